"""Time the configurations that ``gem_kernels.ops.gdpa.configs.space`` offers, and print the best beside the chosen one.

    python3 packages/gem-kernels/benchmarks/tune_gdpa.py [--shapes self-L256,self-L1024] [--activation gelu] [--workers 12]

Configurations are compiled first, in processes of their own, into Triton's cache on disk; timing then is a matter of seconds.
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent))

from attention import DIM, SCALE, chosen_shapes, jagged, lengths_of, median_ms

from gem_core.ops.activations import ACTIVATIONS
from gem_kernels.ops.gdpa import call, configs

Job = tuple[str, str, configs.Config]
"""Shape, direction and configuration."""


def key_of(shape: str, direction: str) -> configs.Key:
    q_lengths, k_lengths = lengths_of(shape)
    longest = int((k_lengths if direction == "key_grad" else q_lengths).max())
    major, minor = torch.cuda.get_device_capability()
    return configs.config_key(direction, dim=DIM, v_dim=DIM, itemsize=2, max_length=longest, arch=10 * major + minor)


def run_direction(direction: str, arguments: tuple[Any, ...], options: dict[str, Any], activation: str, dout: torch.Tensor) -> None:
    settings = (options["max_q"], options["max_k"], activation, SCALE, False, None, "triton")
    if direction == "forward":
        torch.ops.gem_kernels.gdpa(*arguments, *settings)
    else:
        getattr(torch.ops.gem_kernels, f"gdpa_{direction}")(dout, *arguments, *settings)


def compile_one(activation: str, job: Job) -> str:
    """Compile one configuration by running it on two rows; returns what went wrong, if anything: not every tile compiles on every chip."""
    shape, direction, config = job
    with patch.object(call, "choose", lambda key: config), torch.no_grad():
        arguments, options = jagged(shape, batch=2)
        try:
            run_direction(direction, arguments, options, activation, torch.randn_like(arguments[0]))
            torch.cuda.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


def timed(shape: str, direction: str, candidates: list[configs.Config], activation: str) -> list[tuple[float, configs.Config]]:
    """Milliseconds of each configuration, fastest first."""
    arguments, options = jagged(shape)
    call = partial(run_direction, direction, arguments, options, activation, torch.randn_like(arguments[0]))
    results = []
    for config in candidates:
        with patch.object(call, "choose", lambda key, config=config: config), torch.no_grad():
            results.append((median_ms(call), config))
    return sorted(results, key=lambda pair: pair[0])


def tune(shapes: list[str], activation: str, workers: int) -> Iterator[str]:
    """Lines for the five best configurations of each shape and direction, and for the chosen one."""
    jobs: list[Job] = [(s, d, config) for s in shapes for d in configs.DIRECTIONS for config in configs.space(key_of(s, d))]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = dict(zip(jobs, pool.map(partial(compile_one, activation), jobs), strict=True))
    for job, failure in failures.items():
        if failure:
            yield f"does not run: {job[1]} {job[2]}: {failure}"
    for shape in shapes:
        for direction in configs.DIRECTIONS:
            candidates = [config for s, d, config in jobs if (s, d) == (shape, direction) and not failures[s, d, config]]
            results = timed(shape, direction, candidates, activation)
            chosen = configs.choose(key_of(shape, direction))
            for i, (ms, config) in enumerate(results):
                if i < 5 or config == chosen:
                    yield f"{shape:>14} {direction:>10} {ms:9.4f} ms  {config}{'  <- chosen' if config == chosen else ''}"
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="self-L256,self-L1024")
    parser.add_argument("--activation", default="gelu", choices=list(ACTIVATIONS))
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    for line in tune(chosen_shapes(options.shapes), options.activation, options.workers):
        print(line, flush=True)


if __name__ == "__main__":
    main()
