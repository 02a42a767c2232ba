"""Everything of this package that waits for a GPU, in one command: tests and memory checks side by side, then timings one by one.

    python3 packages/gem-kernels/benchmarks/rerun.py OUT [--parts 'bench-*'] [--minutes 9] [--jobs 8] [--again] [--list]

Each part is a program of its own with a time limit and a log ``OUT/PART.log``; a part that fails stops no other. ``OUT/summary.json`` says what
became of each; parts that are ``ok`` there are not repeated, so the command goes on where it was cut off. Ends with 1 if a part failed, ran out of
time or was left out for lack of it.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

from gem_kernels.ops.limits import UNMEASURED

HERE = Path(__file__).parent
GPU = HERE.parent / "tests" / "gpu"
SHARE = 0.6
"""Part of the time that tests and memory checks get; what is left is for timings."""
NO_SANITIZER = "compute-sanitizer is not on PATH"
MOVERS = ("jagged_concat", "jagged_split", "jagged_pad", "jagged_unpad", "jagged_dense_bmm_add")
PORTABLE = (
    "BlockAttention",
    "HstuAttention",
    "HstuAttentionGluon",
    "PooledAttention",
    "PooledAttentionGluon",
    "NormLinear",
    "AddNorm",
    "GatedResidual",
    "Pffn",
    "PffnGluon",
    "Jagged",
)


@dataclass(frozen=True)
class Part:
    """One program.

    Args:
        name: what it is called by, and its log.
        command: the program and its words; ``OUT`` in a word stands for the folder of results.
        limit: seconds.
        alone: it times something, so that nothing else may run on the GPU.
        environment: variables that it gets beside those of this program.
        says: what its log must hold for it to be ``ok``: tests that are all skipped end well and show nothing.
        never: what its log must not hold: a benchmark goes on past a backend that is wrong.
    """

    name: str
    command: tuple[str, ...]
    limit: int = 240
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    says: str = ""
    never: str | None = None


def _tests(name: str, file: str, only: str = "", share: str = "", **environment: str) -> Part:
    words = ("-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rs", "--durations=15")
    picked = (*(("-k", only) if only else ()), *(("--share", share) if share else ()))
    return Part(f"test-{name}", (sys.executable, *words, str(GPU / file), *picked), environment=environment, says=" passed")


def _shared(name: str, file: str, parts: int, only: str = "") -> list[Part]:
    """A suite in parts of as many tests each, so that what takes longest is spread over processes."""
    if parts == 1:
        return [_tests(name, file, only)]
    return [_tests(f"{name}-{i}of{parts}", file, only, f"{i}/{parts}") for i in range(1, parts + 1)]


def _cli(name: str, *words: str, limit: int = 60, **environment: str) -> Part:
    return Part(name, (sys.executable, "-m", "gem_core", "kernels", *words), limit, alone=True, environment=environment, never="no speed:")


def tests() -> list[Part]:
    """Parts of about a minute each, start and compilation included, by what an H200 took; those that show most first."""
    # "HstuAttention" is also the beginning of the name of the Gluon suite.
    whole, found = {"BlockAttention": 2, "HstuAttention": 4, "PffnGluon": 4}, []
    for kind in PORTABLE:
        found += _shared(kind, "test_gpu_conformance_portable.py", whole.get(kind, 1), f"Test{kind} and not Test{kind}Gluon")
    files = {
        "many_rows": 1,
        "pffn": 1,
        "norm_linear": 8,
        "fp8": 1,
        "hstu_attention": 2,
        "launcher": 5,
        "portable_attention": 3,
        "places": 3,
        "capture": 10,
    }
    for name, parts in files.items():
        found += _shared(name, f"test_gpu_{name}.py", parts)
    # More than 2^31 elements a tensor: one process, for the sake of the GPU's memory.
    for name, parts in {"block_attention": 2, "attention_ops": 8}.items():
        file = f"test_gpu_{name}.py"
        found += [*_shared(name, file, parts, "not case_C08"), _tests(f"{name}-C08", file, "case_C08")]
    # By dtype; what is drawn has none in its name.
    suites = {
        "GdpaGluon": ("test_gpu_attention.py", 5, ("bf16", "fp16")),
        "GdpaTriton": ("test_gpu_conformance.py", 1, ("bf16", "fp16", "fp32")),
        "JaggedAttentionTriton": ("test_gpu_attention.py", 1, ("bf16", "fp16", "fp32")),
        "JaggedAttentionGluon": ("test_gpu_attention.py", 1, ("bf16", "fp16")),
    }
    for kind, (file, parts, dtypes) in suites.items():
        found += [part for dtype in dtypes for part in _shared(f"{kind}-{dtype}", file, parts, f"{kind} and {dtype}")]
        found += [_tests(f"{kind}-drawn", file, f"{kind} and not ({' or '.join(dtypes)})")]
    found += [_tests("Sdpa", "test_gpu_conformance.py", "Sdpa"), _tests("Varlen", "test_gpu_adapters.py", "Varlen")]
    found += _shared("Flex", "test_gpu_adapters.py", 4, "Flex")
    direct = {"GEM_DIRECT_LAUNCH": "1", "GEM_CHECK": "full"}
    return [
        *found,
        *(
            _tests(f"direct-{kind}", "test_gpu_conformance_portable.py", f"Test{kind} and not Test{kind}Gluon", **direct)
            for kind in ("NormLinear", "AddNorm", "Pffn")
        ),
    ]


def timings() -> list[Part]:
    """The most wanted first."""
    bench = ("bench", "--csv", "OUT/bench.csv")
    host = Part("host-time", (sys.executable, str(HERE / "host_time.py"), "--csv", "OUT/host.csv"), 90, alone=True)
    ops = ("add_norm", "gated_residual", "block_attention", "pooled_attention", "pffn", "hstu_attention", *MOVERS)
    adapters = [word for name in ("varlen", "flex", "fa4") for word in ("--backend", name)]
    return [
        host,
        *(_cli(f"bench-{op}", *bench, "--op", op) for op in ops),
        _cli("bench-adapters", *bench, "--op", "jagged_attention", *adapters, limit=90),
        _cli("tune-block", "tune", "--op", "block_attention", limit=150, GEM_KERNELS_HOME="OUT/tuned"),
        _cli("tune-gdpa", "tune", "--op", "gdpa", "--shape", "self-L256", limit=120, GEM_KERNELS_HOME="OUT/tuned"),
    ]


def every_part() -> list[Part]:
    return [Part("memcheck", (sys.executable, str(HERE / "memcheck.py")), limit=420), *tests(), *timings()]


class Summary:
    """``summary.json`` of a folder, written anew after each part."""

    def __init__(self, out: Path) -> None:
        self.file, self.lock = out / "summary.json", Lock()
        self.parts: dict[str, Any] = json.loads(self.file.read_text())["parts"] if self.file.exists() else {}

    def add(self, name: str, **found: Any) -> None:
        with self.lock:
            self.parts[name] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **found}
            draft = self.file.with_suffix(".part")
            draft.write_text(json.dumps({"versions": _versions(), "parts": self.parts}, indent=1) + "\n")
            draft.replace(self.file)

    def done(self, name: str) -> bool:
        return bool(self.parts.get(name, {}).get("state") == "ok")


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "gem-kernels"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def run_part(part: Part, out: Path, seconds: float) -> dict[str, Any]:
    """State, exit code and seconds of one part, which gets ``seconds`` at most."""
    start, log = time.monotonic(), out / f"{part.name}.log"
    limit = min(part.limit, seconds)
    if limit < 1:
        return {"state": "left out", "why": "no time was left"}
    words = [word.replace("OUT", str(out), 1) if word.startswith("OUT") else word for word in part.command]
    extra = {name: value.replace("OUT", str(out), 1) if value.startswith("OUT") else value for name, value in part.environment.items()}
    with log.open("w") as file:
        program = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, UNMEASURED: "1", **extra}, start_new_session=True)
        try:
            code = program.wait(limit)
        except subprocess.TimeoutExpired:
            return {"state": "timeout", "limit": round(limit), "seconds": round(time.monotonic() - start, 1)}
        finally:
            with suppress(ProcessLookupError):  # all of its session is gone
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    text = log.read_text(errors="replace")
    good = code == 0 and part.says in text and (part.never is None or part.never not in text)
    state = "ok" if good else "absent" if code != 0 and NO_SANITIZER in text else "failed"
    return {"state": state, "exit": code, "seconds": round(time.monotonic() - start, 1)}


def run(parts: Iterable[Part], out: Path, *, minutes: float = 9, jobs: int = 8, again: bool = False) -> list[str]:
    """Run the parts and return the names of those that are not ``ok`` (nor ``absent``: a tool that this machine lacks).

    Args:
        parts: those that are not ``alone`` run side by side, the others after them.
        out: folder of logs, figures and the summary.
        minutes: for all; the ``alone`` ones get at least what ``SHARE`` leaves of them.
        jobs: parts at once.
        again: repeat what is ``ok``.
    """
    out.mkdir(parents=True, exist_ok=True)
    summary, start = Summary(out), time.monotonic()
    wanted = list(parts)
    todo = [part for part in wanted if again or not summary.done(part.name)]

    def one(part: Part, until: float) -> None:
        found = run_part(part, out, until - time.monotonic())
        summary.add(part.name, **found)
        print(f"{part.name:32} {found['state']:9} {found.get('seconds', '')!s:>7}", flush=True)
        if found["state"] == "failed":
            print("    " + "\n    ".join((out / f"{part.name}.log").read_text(errors="replace").splitlines()[-15:]), flush=True)

    end = start + 60 * minutes
    alone = [part for part in todo if part.alone]
    with ThreadPoolExecutor(jobs) as pool:
        until = start + 60 * minutes * SHARE if alone else end
        list(pool.map(lambda part: one(part, until), [part for part in todo if not part.alone]))
    for part in alone:
        one(part, end)
    return [part.name for part in wanted if summary.parts[part.name]["state"] not in ("ok", "absent")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of logs, figures and the summary")
    parser.add_argument("--parts", action="append", help="only parts whose name this pattern matches; may be repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="for the whole run")
    parser.add_argument("--jobs", type=int, default=8, help="tests and memory checks at once")
    parser.add_argument("--again", action="store_true", help="repeat parts that are ok")
    parser.add_argument("--list", action="store_true", help="only name the parts")
    options = parser.parse_args()
    known = every_part()
    parts = [part for part in known if not options.parts or any(fnmatchcase(part.name, pattern) for pattern in options.parts)]
    if not parts:
        sys.exit(f"no part is called {' or '.join(options.parts)}; known: {', '.join(part.name for part in known)}")
    if options.list:
        print("\n".join(part.name for part in parts))
        return
    bad = run(parts, options.out.resolve(), minutes=options.minutes, jobs=options.jobs, again=options.again)
    sys.exit(f"not ok: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
