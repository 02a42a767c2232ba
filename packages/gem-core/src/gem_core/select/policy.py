"""Which backend runs an op: a name asked for never falls through; otherwise the first fit of an ordered list of names."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from gem_core.plugins.nearest import nearest
from gem_core.select.registry import OwnedImpl, Registry, registry, why_not
from gem_core.spec import KernelImpl, KernelRequest, KernelUnavailable, RequestError

log = logging.getLogger("gem_core.select")

DEFAULT_PREFER = ("gluon", "triton", "reference")
OnReference = Literal["warn", "error", "allow"]


@dataclass(frozen=True, kw_only=True)
class KernelPolicy:
    """The ``[kernels]`` part of a configuration.

    Args:
        use: backend by op.
        prefer: backend names in order, for ops that are not named.
        on_reference: what an automatic choice of ``reference`` for training on CUDA does.
        prefer_rule: where ``prefer`` comes from; ``--set`` stands above ``GEM_KERNELS_PREFER``, anything else below it.
    """

    use: Mapping[str, str] = field(default_factory=dict)
    prefer: tuple[str, ...] = DEFAULT_PREFER
    on_reference: OnReference = "warn"
    prefer_rule: str = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """The backend chosen for a request, its declaration, and the rule that chose it."""

    request: KernelRequest
    backend: str
    impl: KernelImpl
    rule: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One kernel as ``explain`` sees it: ``here`` is ``chosen``, ``fits`` or ``no``."""

    owned: OwnedImpl
    here: str
    why_not: list[str]


_DEFAULT = KernelPolicy()
_policy: ContextVar[KernelPolicy] = ContextVar("gem_kernel_policy", default=_DEFAULT)
_used: ContextVar[Mapping[str, str]] = ContextVar("gem_kernels_used", default=MappingProxyType({}))


@contextmanager
def policy_scope(policy: KernelPolicy) -> Iterator[None]:
    """Choose by this policy inside the block; its op names are checked on entry."""
    for op in policy.use:
        registry().op(op)
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


@contextmanager
def use(**op_backend: str) -> Iterator[None]:
    """``with gem_core.use(gdpa="reference")``: name backends inside the block; inner blocks add to outer ones.

    Raises:
        RequestError: an op that does not exist; the nearest is offered.
    """
    for op in op_backend:
        registry().op(op)
    token = _used.set({**_used.get(), **op_backend})
    try:
        yield
    finally:
        _used.reset(token)


def choose(request: KernelRequest, backend: str | None = None) -> KernelChoice:
    """The kernel for a request. Cached; call it once when a run is composed, not per step.

    Args:
        request: what is needed.
        backend: the backend named by the call, if any.

    Raises:
        KernelUnavailable: the named backend does not fit, or none of the preferred ones does; every candidate's reasons are listed.
        RequestError: an unknown op, backend or feature word; the nearest is offered.
    """
    known, on_reference = registry(), _policy.get().on_reference
    key = (request, named_backend(request.op, backend), preference(), on_reference)
    if key not in known.choices:
        found = _decide(request, backend)
        if on_reference == "warn" and _slow(found):
            log.warning(
                "%s trains on the slow reference. `gem kernels explain %s` says why no faster backend is taken.", describe(request), request.op
            )
        known.choices[key] = found
    choice: KernelChoice = known.choices[key]
    return choice


def _decide(request: KernelRequest, backend: str | None) -> KernelChoice:
    check_request(request)
    known = registry()
    name, rule = named_backend(request.op, backend)
    if name is not None:
        return _by_name(known, request, name, rule)
    choice = _by_preference(known, request, *preference())
    if _policy.get().on_reference == "error" and _slow(choice):
        so = f"only the reference fits{_reasons(known.of(request.op), request)}"
        raise KernelUnavailable(
            f"a kernel for {describe(request)}", so, 'kernels.on_reference = "error" refuses it; set "warn" or "allow" to train on it.'
        )
    return choice


def _slow(choice: KernelChoice) -> bool:
    """Whether training on CUDA fell to the reference without anybody naming it."""
    request = choice.request
    return choice.backend == "reference" and choice.rule.startswith("prefer") and request.device == "cuda" and request.backward


def named_backend(op: str, backend: str | None = None) -> tuple[str | None, str]:
    """The backend named for an op and where; ``(None, "")`` where none is. The nearest place counts."""
    if backend is not None:
        return backend, "backend= of the call"
    for names, rule in ((_used.get(), "gem_core.use"), (_from_variable(), "GEM_KERNELS"), (_policy.get().use, "kernels.use")):
        if op in names:
            return names[op], rule
    return None, ""


def preference() -> tuple[tuple[str, ...], str]:
    """The ordered backend names of the automatic choice, and where they come from."""
    policy, variable = _policy.get(), os.environ.get("GEM_KERNELS_PREFER", "")
    if variable and policy.prefer_rule != "--set":
        return tuple(name.strip() for name in variable.split(",") if name.strip()), "GEM_KERNELS_PREFER"
    return tuple(policy.prefer), policy.prefer_rule


def explain(request: KernelRequest, backend: str | None = None) -> tuple[list[Candidate], KernelChoice | KernelUnavailable]:
    """Every candidate for a request with its reasons, and the choice or the error that ``choose`` would give."""
    outcome: KernelChoice | KernelUnavailable
    try:
        outcome = _decide(request, backend)
    except KernelUnavailable as error:
        outcome = error
    name, _ = named_backend(request.op, backend)
    prefer, _ = preference()
    candidates = []
    for owned in registry().of(request.op):
        reasons = why_not(owned, request)
        chosen = isinstance(outcome, KernelChoice) and outcome.impl is owned.impl
        here = "chosen" if chosen else "no" if reasons else "fits"
        if name is None and owned.impl.backend not in prefer:
            reasons = [*reasons, "not in prefer"]
        elif name is not None and owned.impl.backend != name:
            reasons = [*reasons, f"{name} is named"]
        candidates.append(Candidate(owned=owned, here=here, why_not=reasons))
    return candidates, outcome


def check_request(request: KernelRequest) -> None:
    """Raise RequestError for an op or a feature word that does not exist."""
    op = registry().op(request.op)
    for word in sorted(request.features - set(op.features)):
        raise RequestError(f"feature {word!r} of {request.op}", "the op has no such feature", nearest(word, op.features))


def _from_variable() -> Mapping[str, str]:
    text = os.environ.get("GEM_KERNELS")
    return _read_variable(text) if text else {}


@lru_cache(maxsize=32)
def _read_variable(text: str) -> Mapping[str, str]:
    names = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        op, equals, backend = (piece.strip() for piece in part.partition("="))
        if not (op and equals and backend):
            raise RequestError(
                f"GEM_KERNELS={text!r}", f"{part!r} is not OP=BACKEND", "Write it as in GEM_KERNELS=gdpa=reference,jagged_attention=sdpa."
            )
        registry().op(op)
        names[op] = backend
    return names


def _by_name(known: Registry, request: KernelRequest, backend: str, rule: str) -> KernelChoice:
    candidates = [owned for owned in known.of(request.op) if owned.impl.backend == backend]
    if not candidates:
        backends = [owned.impl.backend for owned in known.of(request.op)]
        raise RequestError(f"backend {backend!r} for {request.op} ({rule})", "no loaded plugin declares it", nearest(backend, backends))
    fit = next((owned for owned in candidates if not why_not(owned, request)), None)
    if fit is None:
        asked = f"backend {backend!r} for {describe(request)} ({rule})"
        raise KernelUnavailable(
            asked, f"it does not fit{_reasons(candidates, request)}", "Name another backend, or none: the automatic choice looks further."
        )
    return KernelChoice(request=request, backend=backend, impl=fit.impl, rule=rule)


def _by_preference(known: Registry, request: KernelRequest, prefer: tuple[str, ...], rule: str) -> KernelChoice:
    candidates = known.of(request.op)
    for name in prefer:
        fit = next((owned for owned in candidates if owned.impl.backend == name and not why_not(owned, request)), None)
        if fit is not None:
            return KernelChoice(request=request, backend=name, impl=fit.impl, rule=f"prefer ({rule})")
    asked = f"a kernel for {describe(request)}"
    so = f"no backend of {', '.join(prefer) or 'an empty list'} ({rule}) fits{_reasons(candidates, request, prefer)}"
    raise KernelUnavailable(asked, so, f"`gem kernels explain {request.op}` walks the rules; kernels.prefer is the list.")


def describe(request: KernelRequest) -> str:
    """A request in one line."""
    arch = f" sm{request.arch}" if request.arch is not None else ""
    words = [f"head_dim {request.head_dim}"] if request.head_dim is not None else []
    words += sorted(request.features)
    words += ["backward"] if request.backward else ["forward only"]
    words += ["deterministic"] if request.deterministic else []
    return f"{request.op} on {request.device}{arch} in {request.dtype} ({', '.join(words)})"


def _reasons(candidates: list[OwnedImpl], request: KernelRequest, prefer: tuple[str, ...] | None = None) -> str:
    lines = []
    for owned in candidates:
        reasons = why_not(owned, request)
        if prefer is not None and owned.impl.backend not in prefer:
            reasons = [*reasons, "not in prefer"]
        name = "/".join(part for part in (owned.impl.backend, owned.impl.variant) if part)
        lines.append(f"\n    {name} ({owned.owner}): {'; '.join(reasons) or 'fits'}")
    return ":" + "".join(lines) if lines else ""
