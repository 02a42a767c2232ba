"""All ops and kernels that loaded plugins declare, and why a kernel does not fit a request."""

from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from gem_core.plugins.kinds import name_of
from gem_core.plugins.manager import PluginHost, host
from gem_core.plugins.nearest import nearest
from gem_core.select.known_bad import refusals
from gem_core.spec import KernelImpl, KernelRequest, OpSpec, PluginError, RequestError, load_object


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedImpl:
    """A kernel and who brought it."""

    impl: KernelImpl
    owner_name: str
    owner_version: str

    @property
    def owner(self) -> str:
        """``distribution version``."""
        return f"{self.owner_name} {self.owner_version}"


@dataclass(frozen=True, eq=False)
class Registry:
    """Every declared op and kernel. ``choices`` caches what has been chosen."""

    ops: dict[str, OpSpec]
    impls: list[OwnedImpl]
    choices: dict[Any, Any] = field(default_factory=dict)

    def op(self, name: str) -> OpSpec:
        """The op of that name; RequestError offers the nearest."""
        if name not in self.ops:
            raise RequestError(f"op {name!r}", "no loaded plugin declares it", nearest(name, self.ops))
        return self.ops[name]

    def of(self, op: str) -> list[OwnedImpl]:
        """The kernels for an op, by backend name, variants in the order their plugin declares them."""
        return sorted((owned for owned in self.impls if owned.impl.op == op), key=lambda owned: owned.impl.backend)


def registry() -> Registry:
    """The registry of this process's plugin host, built on first use.

    Raises:
        PluginError: two plugins declare one op, or one kernel (same op, backend and variant); both owners are named.
    """
    return _build(host())


@lru_cache(maxsize=1)
def _build(plugins: PluginHost) -> Registry:
    owners: dict[tuple[str, str], str] = {}
    for hook, noun in (("gem_kernel_ops", "op"), ("gem_kernel_impls", "kernel")):
        for owner, declaration in plugins.collect(hook):
            key = (noun, name_of(declaration))
            if key in owners:
                who = f"declared by {owners[key]} and {owner.name} ({owner.owner})"
                raise PluginError(f"{noun} {key[1]!r}", who, "Block one of the two: GEM_PLUGINS_BLOCK=NAME.")
            owners[key] = f"{owner.name} ({owner.owner})"
    impls = [OwnedImpl(impl=i, owner_name=p.distribution, owner_version=p.version) for p, i in plugins.collect("gem_kernel_impls")]
    return Registry({op.name: op for _, op in plugins.collect("gem_kernel_ops")}, impls)


def why_not(owned: OwnedImpl, request: KernelRequest) -> list[str]:
    """Why a kernel does not fit a request: empty when it fits.

    Raises:
        PluginError: the kernel's own ``check`` raises; that is a bug of its owner, who is named.
    """
    impl = owned.impl
    reasons = _contract(impl, registry().ops) + _device(impl, request) + _call(impl, request) + refusals(impl, request)
    reasons += [f"needs the module {module}, which is not installed" for module in impl.requires if not importable(module)]
    # a check may import what is missing or assume what the data above promise, so it is asked only when they hold
    return reasons or _own_check(owned, request)


def stale() -> list[tuple[OwnedImpl, str]]:
    """Kernels written for another contract of their op, or for an op that nobody declares, with the reason."""
    known = registry()
    return [(owned, reason) for owned in known.impls for reason in _contract(owned.impl, known.ops)]


def _contract(impl: KernelImpl, ops: dict[str, OpSpec]) -> list[str]:
    if impl.op not in ops:
        return [f"no loaded plugin declares the op {impl.op!r}"]
    current = ops[impl.op].contract
    return [] if impl.contract == current else [f"written for contract {impl.contract} of {impl.op}, which is at {current} here"]


def _device(impl: KernelImpl, request: KernelRequest) -> list[str]:
    # the interpreter is the CPU, so whatever runs on a CPU runs there too
    accepted = {request.device, "cpu"} if request.device == "interpreter" else {request.device}
    reasons = [] if accepted & set(impl.devices) else [f"runs on {'/'.join(impl.devices)}, not on {request.device}"]
    if request.dtype not in impl.dtypes:
        reasons.append(f"takes {'/'.join(impl.dtypes)}, not {request.dtype}")
    if request.device == "cuda" and request.arch is not None:
        if impl.min_arch is not None and request.arch < impl.min_arch:
            reasons.append(f"needs sm{impl.min_arch}, this is sm{request.arch}")
        if impl.max_arch is not None and request.arch > impl.max_arch:
            reasons.append(f"ends at sm{impl.max_arch}, this is sm{request.arch}")
    return reasons


def _call(impl: KernelImpl, request: KernelRequest) -> list[str]:
    reasons = []
    if impl.head_dims is not None and request.head_dim is not None and request.head_dim not in impl.head_dims:
        reasons.append(f"takes head_dim {'/'.join(map(str, impl.head_dims))}, not {request.head_dim}")
    missing = sorted(request.features - set(impl.features))
    if missing:
        reasons.append(f"does not support {', '.join(missing)}")
    if request.backward and not impl.backward:
        reasons.append("has no backward")
    if request.deterministic and not impl.deterministic:
        reasons.append("is not deterministic")
    return reasons


def _own_check(owned: OwnedImpl, request: KernelRequest) -> list[str]:
    if owned.impl.check is None:
        return []
    try:
        return [str(reason) for reason in load_object(owned.impl.check)(request)]
    except Exception as error:
        asked, so = f"kernel {name_of(owned.impl)}", f"its check {owned.impl.check} of {owned.owner} raised {type(error).__name__}: {error}"
        raise PluginError(asked, so, f"This is a bug of {owned.owner_name}: report it there, or block the plugin with GEM_PLUGINS_BLOCK.") from error


@cache
def importable(module: str) -> bool:
    """Whether a top-level module is installed; it is not imported."""
    try:
        return find_spec(module) is not None
    except ValueError:  # a module in sys.modules without a spec
        return True
