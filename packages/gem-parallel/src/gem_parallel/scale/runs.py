"""One layout on one number of ranks as a training run in a folder of its own. Imports no torch."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem_core.spec import RequestError

GEM = ("-m", "gem_core")
REFUSED = (2, 3)
"""Exit codes of ``gem`` for a request or a machine that cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is the same in all runs.

    Args:
        recipe: a TOML file, or the name of a recipe.
        sets: the user's ``--set`` values.
        config: the configuration that they give.
        steps: timed steps; as many go before them untimed.
        weak: whether the global batch grows with the ranks.
        device: ``cpu`` or ``cuda``.
        folder: of all runs.
    """

    recipe: str
    sets: tuple[str, ...]
    config: Mapping[str, Any]
    steps: int
    weak: bool
    device: str
    folder: Path

    def batch_size(self, ranks: int) -> int:
        """Rows of a global batch."""
        return int(self.config["data"]["batch_size"]) * (ranks if self.weak else 1)

    def rows_a_step(self, ranks: int) -> int:
        """Rows of a step of full batches."""
        return self.batch_size(ranks) * int(self.config["optim"]["accumulate"])

    def place(self, layout: str, ranks: int) -> Path:
        """Where a run's log, result and run folder are."""
        return self.folder / f"ranks-{ranks}" / layout

    def settings(self, ranks: int, layout: Sequence[str]) -> list[str]:
        """``--set`` values of a run: the user's, then those of the measurement and of the layout."""
        threads = ["run.threads=1"] if self.device == "cpu" else []
        own = [f'run.device="{self.device}"', *threads, f"data.batch_size={self.batch_size(ranks)}", *layout]
        return [*self.sets, *own]


def words_of(settings: Sequence[str]) -> list[str]:
    """As words of a command line."""
    return [word for setting in settings for word in ("--set", setting)]


def configuration(recipe: str, sets: Sequence[str]) -> dict[str, Any]:
    """The configuration of a recipe, checked by ``gem config show``.

    Raises:
        RequestError: as the command says.
    """
    found: dict[str, Any] = answer(["config", "show", "-c", recipe, *words_of(sets), "--json"])["config"]
    return found


def answer(words: Sequence[str]) -> dict[str, Any]:
    """What a ``gem`` command prints as JSON.

    Raises:
        RequestError: the command ends with an error, which is passed on.
    """
    done = subprocess.run([sys.executable, *GEM, *words], capture_output=True, text=True)
    if done.returncode:
        why = f"signal {-done.returncode} ended it" if done.returncode < 0 else first_error(done.stderr)
        raise RequestError(*(told_error(done.stderr) or (f"gem {words[0]}", why, f"Run `gem {' '.join(words)}`.")))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def asked_of(bench: Bench, ranks: int, layout: Sequence[str]) -> list[str]:
    """The words after ``gem`` of a run, its folder apart.

    Steps are logged in two windows: the first warms up, the second counts. An epoch ends without ending the run, nothing is evaluated in between, and
    nothing is saved.
    """
    length = [f"train.max_steps={2 * bench.steps}", f"train.log_every={bench.steps}", "train.epochs=1000000", 'train.uneven="drop"']
    quiet = ["train.eval_every=0", "train.checkpoint_every=0", "train.checkpoint_last=false"]
    return ["train", "-c", bench.recipe, *words_of([*bench.settings(ranks, layout), *length, *quiet])]


def check_folder(bench: Bench, wanted: Mapping[tuple[str, int], Sequence[str]]) -> None:
    """Raise RequestError if the folder holds finished runs of another request under the same names."""
    for (layout, ranks), words in wanted.items():
        kept = kept_result(bench.place(layout, ranks))
        if kept is not None and kept["asked"] != list(words):
            so = f"{bench.place(layout, ranks)} was measured with other settings"
            raise RequestError(f"gem bench scale --out {bench.folder}", so, "Name another folder, or remove this one.")


def kept_result(place: Path) -> dict[str, Any] | None:
    """What an earlier call has written of a finished run, or None."""
    file = place / "result.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def keep_result(place: Path, asked: Sequence[str], figures: Mapping[str, Any]) -> None:
    """Write a finished run's figures."""
    draft = place / "result.writing"
    draft.write_text(json.dumps({"asked": list(asked), "figures": figures}, indent=1), encoding="utf-8")
    draft.replace(place / "result.json")


def train(place: Path, ranks: int, words: Sequence[str]) -> int:
    """Run to the end under torchrun; output goes to ``log.txt``. Returns the exit code of the first rank that failed, or 0."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    command = [*torchrun(ranks), *GEM, *words, "--out", str(place / "run")]
    log = place / "log.txt"
    with log.open("w", encoding="utf-8") as file:
        print("$", *command, file=file, flush=True)
        code = run_to_end(command, stdout=file, stderr=subprocess.STDOUT)
    told = re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", log.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    return int(told[1]) if code and told else code


def torchrun(ranks: int) -> list[str]:
    """The beginning of a command that starts so many ranks on this machine."""
    here = ("--standalone", "--local-addr", "localhost")  # the host's own name may be unknown to its resolver
    return [sys.executable, "-m", "torch.distributed.run", *here, "--nproc-per-node", str(ranks)]


def run_to_end(command: Sequence[str], **words: Any) -> int:
    """Exit code of a command. When this process is interrupted or told to end, the command is stopped with the processes that it started."""
    before = signal.signal(signal.SIGTERM, _end)
    process = subprocess.Popen(command, start_new_session=True, **words)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def told_error(text: str) -> tuple[str, str, str] | None:
    """The three lines of an error that ``gem`` has printed: what was asked, what is so, what to do."""
    found = re.search(r"^gem: (.+)\n  (.+)\n  (.+)$", text, re.MULTILINE)
    return None if found is None else (found[1], found[2], found[3])


def first_error(text: str) -> str:
    """The line of a log that says best why a run failed: the trainer's error, else a rank's first exception, else a signal, else the last line."""
    told = told_error(text)
    if told is not None:
        return f"{told[0]}: {told[1]}"
    for pattern in (r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*(?!ChildFailed)\w*(?:Error|Exception|Failed)\b.*)$", r"(Signal \d+ \(\w+\) received.*)$"):
        if (found := re.search(pattern, text, re.MULTILINE)) is not None:
            return found[1]
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was printed"
