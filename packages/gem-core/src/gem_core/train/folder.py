"""The run folder: who may write into it, and its plain files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gem_core.config.load import LoadedConfig
from gem_core.config.show import as_toml
from gem_core.spec import RequestError

MANIFEST = "manifest.json"


def check_new(folder: Path) -> None:
    """Raise RequestError unless a new run may take the folder: it is absent, empty, or holds an earlier run (which will be moved aside)."""
    for path in (folder, previous(folder)):
        if path.exists() and not (is_run(path) or _is_empty(path)):
            so = "it exists and is no folder" if not path.is_dir() else f"it holds other files and no {MANIFEST} of a run"
            raise RequestError(f"run folder {path}", so, "Choose another one with --out DIR.")


def claim(folder: Path) -> None:
    """Make the folder for a new run; an earlier run in it moves to ``NAME.previous``, of which one is kept."""
    check_new(folder)
    if is_run(folder):
        shutil.rmtree(previous(folder), ignore_errors=True)
        folder.rename(previous(folder))
    folder.mkdir(parents=True, exist_ok=True)


def previous(folder: Path) -> Path:
    """Where an earlier run of the same name goes."""
    return folder.with_name(f"{folder.name}.previous")


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run of this trainer."""
    if not (folder / MANIFEST).is_file():
        return False
    try:
        return "gem_run" in read_manifest(folder)
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError):  # somebody else's file of that name
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder."""
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return content


def require_run(folder: Path) -> None:
    """Raise RequestError unless the folder holds a run."""
    if not is_run(folder):
        raise RequestError(f"run {folder}", f"there is no {MANIFEST} of a run", "Give a run folder, for example runs/NAME.")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON so that a reader finds the old file or the new one; NaN is refused."""
    draft = path.with_suffix(".writing")
    draft.write_text(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    draft.replace(path)


def write_config(path: Path, loaded: LoadedConfig) -> None:
    """Write the resolved configuration as TOML that ``gem train -c`` reads."""
    lines = ["# The resolved configuration of this run."]
    for section, values in loaded.config.model_dump(mode="json").items():
        lines += ["", f"[{section}]", *(f"{key} = {as_toml(value)}" for key, value in values.items() if value is not None)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
