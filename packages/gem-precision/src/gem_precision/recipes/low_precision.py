"""Recipes that compute large linear layers and attention in FP8 or a microscaling format, and the rest as ``bf16_islands`` does."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from gem_core.spec import KernelUnavailable, PrecisionDecision, RequestError
from gem_precision.backends import Device, LinearBackend, LinearShape, backends_of, find_backend, require
from gem_precision.grouped import token_linear
from gem_precision.linear import LinearRule, LowForward, emulated_linear, lower, rule_of
from gem_precision.options import GuardOptions, RampOptions
from gem_precision.plugin import emulated
from gem_precision.policy import island_around
from gem_precision.presets import PRESETS
from gem_precision.products import HeldBind
from gem_precision.ramps import last_layers
from gem_precision.recipes.bf16_islands import Bf16Islands
from gem_precision.recipes.changing import Changing, Lowered
from gem_precision.sites import Site, has_tokens, sites
from gem_precision.telemetry import Telemetry
from gem_precision.weights import HeldWeight


@dataclass(frozen=True, slots=True)
class Lowering:
    """What becomes of a site: the preset whose formats it has, the rule of a linear layer, why, and who multiplies (None for the emulation)."""

    preset: str
    rule: LinearRule
    reason: str
    backend: LinearBackend | None = None


class LowSites(Changing):
    """The sites of a model in low precision where ``choose`` says so, the rest as ``bf16_islands`` has it.

    Args:
        name: of the recipe, for messages.
        high: patterns of module names that stay as ``bf16_islands`` has them, on top of its islands.
        islands: as in ``bf16_islands``; None for its default names.
        small: linear layers with fewer inputs or outputs than this, and attention with narrower heads, stay high.
        attention: whether the products of attention may be low.
        telemetry: whether operands of linear layers are watched in training.
        guard: as in ``Changing``.
        ramp: as in ``Changing``.
        keep_last: so many of the last ``layers`` stay high.
        cpu: what the rest computes in on a CPU.
        tf32: as in ``bf16_islands``.
    """

    def __init__(
        self,
        name: str,
        *,
        high: Sequence[str],
        islands: Sequence[str] | None,
        small: int,
        attention: bool,
        telemetry: bool,
        cpu: Literal["fp32", "bf16"],
        tf32: bool = False,
        guard: GuardOptions | None = None,
        ramp: RampOptions | None = None,
        keep_last: int = 0,
    ) -> None:
        super().__init__(guard, ramp, Telemetry() if telemetry else None)
        self._name, self._patterns, self._small, self._attention, self._keep_last = name, tuple(high), small, attention, keep_last
        self._rest = Bf16Islands(islands=islands, small=0, cpu=cpu, tf32=tf32)
        self._held: list[HeldWeight] = []
        self._emulates: str | None = None

    def choose(self, site: Site) -> Lowering | str:
        """What becomes of a site that nothing keeps high, or why it stays."""
        raise NotImplementedError

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """Turn the sites to low precision in place, and return one decision for each leaf module and each kernel of attention.

        Raises:
            RequestError: a pattern matches no module, or the model has been prepared before.
        """
        if any(rule_of(module) is not None for module in model.modules()):
            raise RequestError(f"precision recipe {self._name!r}", "a recipe has prepared this model before", "Build the model anew.")
        names = [name for name, _ in model.named_modules()]
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise RequestError(f"precision.options.high: {pattern!r}", "no module has such a name", "`gem train` prints each module's format.")
        last = last_layers(model, self._keep_last)
        islands = self._rest.islands(model)
        decided = {d.module: d for d in self._rest.prepare(model, device_type)}
        lowered: list[Lowered] = []
        for site in sites(model):
            island = island_around(site.owner, islands)
            chosen = "its weights are handed to a kernel" if site.handed else island or self._reason_to_stay(site, last) or self.choose(site)
            before = decided.get(site.name)
            high = before.format if before is not None else "fp32" if island else self.compute_dtype()
            if isinstance(chosen, Lowering):
                decided[site.name] = _lowered(site, chosen, device_type)
                lowered.append(Lowered(site, chosen.preset, high))
                self._attend(site, chosen.rule)
                if chosen.backend is None or chosen.backend.emulated:
                    self._emulates = self._emulates or site.name
            else:
                decided[site.name] = PrecisionDecision(module=site.name, format=high, reason=chosen)
        self.follow(lowered, list(decided.values()))
        return self.decisions()

    def _attend(self, site: Site, rule: LinearRule) -> None:
        """Know what holds a lowered site's weight, and watch the operands of linear layers where telemetry is asked for."""
        if site.slot is None:
            forward: LowForward = vars(site.module)["forward"]
            self._held.append(forward.held)
            if self._telemetry is not None:
                forward.watch = self._telemetry.watcher(site.name)
        elif not site.attention:
            self._held.append(HeldWeight(rule.weights))
            vars(site.slot)["bind"] = HeldBind(site.slot.bind, self._held[-1])

    def weights_changed(self) -> None:
        """Nothing that was made of the weights holds any longer."""
        for held in self._held:
            held.changed()

    def not_recordable(self) -> str | None:
        """As in ``Changing``; native kernels cast a weight anew in each recorded pass (``HeldWeight.get``)."""
        return super().not_recordable() or (self._emulates and f"{self._emulates} is emulated, and emulations are not recorded")

    def _reason_to_stay(self, site: Site, last: Sequence[str]) -> str | None:
        if site.attention and not self._attention:
            return "attention is left as it is"
        pattern = next((p for p in self._patterns if fnmatchcase(site.owner, p)), None)
        if pattern is not None:
            return f"named by the pattern {pattern!r} of precision.options.high"
        if any(f"{site.owner}.".startswith(f"{layer}.") for layer in last):
            return f"in the last {self._keep_last} layers, which precision.options.keep_last keeps high"
        if site.width is not None and site.width < self._small:
            return f"{'heads' if site.attention else 'a matrix'} {site.width} wide: too small to gain, under {self._small}"
        return None

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """That of ``bf16_islands``."""
        return self._rest.forward_context(device_type)

    def compute_dtype(self) -> str:
        """What kernels outside the low-precision sites are asked for."""
        return self._rest.compute_dtype()


class LowPrecision(LowSites):
    """One of ``PRESETS``, emulated: the exact numbers of the format on any device, without its speed.

    Args:
        preset: the recipe's name.
        small: as in ``LowSites``; None for the preset's.
        attention: whether the products of attention are low; None for the preset's.
        weight_grad: ``low`` or ``high`` weight gradients of linear layers; None for the preset's.
        stochastic: round output gradients of linear layers stochastically.
        hadamard: turn the operands of linear layers by a random Hadamard transform first.
        linear: name of the backend of linear layers (``gem_precision.backends``); None for the emulation.
        emulate: whether places that no native backend computes are emulated; otherwise they stay high.
    """

    def __init__(
        self,
        preset: str,
        *,
        high: Sequence[str] = (),
        islands: Sequence[str] | None = None,
        small: int | None = None,
        attention: bool | None = None,
        weight_grad: Literal["low", "high"] | None = None,
        stochastic: bool = False,
        hadamard: bool = False,
        linear: str | None = None,
        emulate: bool = True,
        telemetry: bool = False,
        guard: GuardOptions | None = None,
        ramp: RampOptions | None = None,
        keep_last: int = 0,
        cpu: Literal["fp32", "bf16"] = "fp32",
        tf32: bool = False,
    ) -> None:
        chosen = PRESETS[preset]
        super().__init__(
            preset,
            high=high,
            islands=() if preset == "fp8_naive" and islands is None else islands,
            small=chosen.small if small is None else small,
            attention=chosen.attention if attention is None else attention,
            telemetry=telemetry,
            guard=guard,
            ramp=ramp,
            keep_last=keep_last,
            cpu=cpu,
            tf32=tf32,
        )
        rule = chosen.rule()
        low = rule.weight_grad if weight_grad is None else weight_grad == "low"
        self._backend = None if linear is None else find_backend(linear, preset)
        self._rule = replace(rule, weight_grad=low, stochastic=stochastic, hadamard=1 if hadamard else None)
        if not emulate and (stochastic or hadamard or not low):
            so = "native backends round to nearest, turn nothing and have low weight gradients"
            raise RequestError("precision.options.emulate = false", so, "Leave stochastic, hadamard and weight_grad alone, or let emulate be true.")
        self._emulate = emulate
        self._device_type = "cpu"

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """As ``LowSites`` has it."""
        self._device_type = device_type
        return super().prepare(model, device_type)

    def choose(self, site: Site) -> Lowering | str:
        plain = site.slot is None and isinstance(site.module, nn.Linear)
        if self._emulate or (plain and self._backend is not None):
            return Lowering(self._name, self._rule, self._name, self._backend)
        if site.matrix is None or not (plain or site.normed):
            return "precision.options.emulate is off, and nothing computes it natively"
        outputs, inputs = site.matrix
        found = self._native(backends_of(self._name, normed=site.normed), LinearShape(inputs=inputs, outputs=outputs))
        return found if isinstance(found, str) else Lowering(self._name, self._rule, self._name, found)

    def _native(self, known: Sequence[LinearBackend], shape: LinearShape) -> LinearBackend | str:
        """The first native backend that fits a matrix here, or why there is none."""
        device, reasons = Device.here(self._device_type), []
        for backend in known:
            if not backend.emulated:
                found = backend.why_not_unasked(device, shape)
                if not found:
                    return backend
                reasons.append(f"{backend.name}: {', '.join(found)}")
        return f"precision.options.emulate is off, and no backend fits: {'; '.join(reasons) or 'there is no native one'}"


def _lowered(site: Site, how: Lowering, device_type: str) -> PrecisionDecision:
    if site.slot is None:
        by = "emulated" if how.backend is None else f"by {how.backend.name!r}"
        lower(site.module, how.rule, _multiply(site, how.backend, device_type))
        return PrecisionDecision(module=site.name, format=how.rule.label, reason=f"{how.reason}, {by}; weights are kept in float32")
    site.slot.asked = emulated(how.preset) if how.backend is None else how.backend.name
    return PrecisionDecision(module=site.name, format=how.rule.inputs.name, reason=f"{how.reason}, by the kernel backend {site.slot.asked!r}")


def _multiply(site: Site, backend: LinearBackend | None, device_type: str) -> Callable[..., Tensor]:
    """What computes a linear layer; KernelUnavailable if the backend that was asked for cannot."""
    if has_tokens(site.module):
        if backend is not None and not backend.emulated:
            so = f"{site.name} has a matrix for each token, which it has no product for"
            raise KernelUnavailable(f"linear backend {backend.name!r}", so, "Keep the module high (precision.options.high), or leave the name out.")
        return token_linear
    if backend is None:
        return emulated_linear
    assert isinstance(site.module, nn.Linear)
    require(backend, Device.here(device_type), LinearShape(inputs=site.module.in_features, outputs=site.module.out_features))
    return backend.resolve()


fp8_rowwise, fp8_block, fp8_square, mxfp8, mxfp4_mlp, fp8_naive = (partial(LowPrecision, name) for name in PRESETS)
