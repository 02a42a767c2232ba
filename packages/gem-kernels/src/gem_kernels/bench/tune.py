"""The command ``gem kernels tune``: the configurations of an op, timed on this machine, the fastest right one of each key kept on disk.

A configuration that does not compile or does not fit the GPU is passed over, one whose result is wrong is refused and named, and one that is clearly
slower after a few calls is timed no further.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Annotated, Any

import typer

from gem_core.spec import MachineError, RequestError
from gem_kernels.bench.shapes import BATCH, SHAPES, SHAPES_OF, VARIANTS_OF, Shape
from gem_kernels.common import tuning

Times = dict[Any, float]
"""Milliseconds of a pass by configuration."""
QUICK, SLOWER = 3, 1.15
"""Calls after which a configuration that takes so many times as long as the fastest one is given up."""
SMALL_LONG, SMALL_SHORT = (600, 0, 70), (70, 0, 300)
"""Row lengths of the calls that a configuration must get right: its tiles differ by whether rows are long."""


@dataclass(frozen=True)
class Tunable:
    """An op with configurations to search.

    Args:
        directions: names of its passes; those after the first belong to the backward pass.
        key: ``(direction, workload)`` to the bucketed key.
        packaged: ``key`` to the package's configuration.
        space: ``key`` to the configurations worth timing.
    """

    directions: tuple[str, ...]
    key: Callable[[str, Any], Any]
    packaged: Callable[[Any], Any]
    space: Callable[[Any], Iterator[Any]]


def tunables() -> dict[str, Tunable]:
    """The ops whose ``triton`` backend can be tuned."""
    from gem_kernels.ops.block_attention import configs as block
    from gem_kernels.ops.gdpa import configs as gdpa
    from gem_kernels.ops.jagged_attention import configs as jagged

    def attention_key(direction: str, work: Any) -> Any:
        from gem_core.ops.dispatch import cuda_arch

        given = work.arguments
        longest = given["max_k"] if direction == "key_grad" else given["max_q"]
        arch = cuda_arch(given["q"].device.index or 0) if given["q"].is_cuda else None
        return gdpa.config_key(
            direction, dim=given["q"].shape[-1], v_dim=given["v"].shape[-1], itemsize=given["q"].element_size(), max_length=longest, arch=arch
        )  # fmt: skip

    def block_key(direction: str, work: Any) -> Any:
        from gem_kernels.ops.block_attention.launch import key_of

        given = work.arguments
        return key_of(direction, given["q"], given["v"], 64, turned="rope" in given, normed="q_gain" in given)

    return {
        "gdpa": Tunable(gdpa.DIRECTIONS, attention_key, gdpa.choose, gdpa.space),
        "jagged_attention": Tunable(gdpa.DIRECTIONS, attention_key, lambda key: jagged.choose(key, bias=False), gdpa.space),
        "block_attention": Tunable(block.DIRECTIONS, block_key, block.choose, block.space),
    }


def tune(
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Only this shape; may be repeated. All published ones of the op if left out.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = BATCH,
) -> None:
    """Time the tile shapes of the portable kernels on this GPU and keep the fastest; later launches look them up."""
    import torch

    known = tunables()
    for word, words, option in ((op, known, "--op"), (shape, SHAPES, "--shape"), ([dtype], ("bf16", "fp16"), "--dtype")):
        for given in word or ():
            if given not in words:
                raise RequestError(f"gem kernels tune {option} {given}", "there is no such word", f"Known: {', '.join(words)}.")
    if not torch.cuda.is_available():
        raise MachineError("gem kernels tune", "there is no CUDA device", "Run it on the machine that is to be tuned.")
    gpu, kind = torch.cuda.get_device_name(), {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for name in op or known:
        timed: dict[str, tuple[Any, dict[str, Times]]] = {}
        for place in (s for s in SHAPES_OF[name] if shape is None or s in shape):
            for variant in VARIANTS_OF.get(name, ("",)):
                for key, packaged, times, text in search(name, known[name], variant, SHAPES[place], rows, kind):
                    print(f"{name} {variant} {place}: {text}", flush=True)
                    if times:
                        timed.setdefault(key, (packaged, {}))[1][f"{place} {variant}".strip()] = times
        entries = {key: best_of(packaged, found) for key, (packaged, found) in timed.items()}
        for key, entry in entries.items():
            print(f"{name} {key}: {entry['config']} takes {entry['ratio']:.3f} of the package's time")
        if entries:
            print(f"kept in {tuning.write(name, gpu, entries)}", flush=True)


def search(
    op: str, tunable: Tunable, variant: str, form: Shape, rows: int, dtype: Any, device: str = "cuda"
) -> Iterator[tuple[str, Any, Times, str]]:
    """What each direction of a call gives."""
    from gem_kernels.bench.backends import resolve
    from gem_kernels.bench.workloads import build

    work = build(op, variant, form, form.lengths(rows), dtype, device)
    small = build(op, variant, form, list(SMALL_LONG if form.longest > 512 else SMALL_SHORT), dtype, device)
    function = resolve(work, "triton")
    if isinstance(function, str):
        raise MachineError(f"gem kernels tune --op {op}", function, "Only the triton backend is tuned.")
    for direction in tunable.directions:
        key = tunable.key(direction, work)
        packaged = tunable.packaged(key)
        if tunable.key(direction, small) != key:
            text = f"{direction}: passed over, the small calls that a configuration must get right have another key"
            yield tuning.key_text(key), packaged, {}, text
            continue
        mode = "fwd" if direction == tunable.directions[0] else "bwd"
        times, notes = candidates(op, direction, [packaged, *(c for c in tunable.space(key) if c != packaged)], function, work, small, mode)
        best = min(times, key=lambda config: times[config], default=packaged)
        text = f"{direction}: {len(times)} timed, best {best} {times.get(best, 0.0):.4f} ms, packaged {times.get(packaged, 0.0):.4f} ms"
        yield tuning.key_text(key), packaged, times, "\n    ".join([text, *notes])


def best_of(packaged: Any, found: dict[str, Times]) -> tuning.Entry:
    """The configuration that is fastest over all shapes of a key, each shape's times over that of the package's configuration."""
    common = set.intersection(*(set(times) for times in found.values()))
    ratios = {config: mean(times[config] / times.get(packaged, min(times.values())) for times in found.values()) for config in common}
    best = min(sorted(ratios, key=str), key=lambda config: ratios[config], default=packaged)
    return tuning.entry_of(best, ratios.get(best, 1.0), sorted(found))


def candidates(
    op: str, direction: str, configs: list[Any], function: Callable[..., Any], work: Any, small: Any, mode: str
) -> tuple[Times, list[str]]:
    """Median milliseconds of a whole pass with each configuration that runs and is right, and a note on each other one."""
    from gem_kernels.bench.measure import passes, wrong

    times: Times = {}
    notes = []
    for config in configs:
        with tuning.tried(op, direction, config):
            try:
                fault = wrong(function, small)
                if fault is not None:
                    notes.append(f"REFUSED {config}: {fault}")
                    continue
                run = passes(function, work, mode)
                ms = run(QUICK)
                if ms <= SLOWER * min(times.values(), default=ms):
                    times[config] = run(4 * QUICK)
            except Exception as error:  # a tile that the compiler or the GPU does not take
                notes.append(f"does not run: {config}: {type(error).__name__}")
    return times, notes
