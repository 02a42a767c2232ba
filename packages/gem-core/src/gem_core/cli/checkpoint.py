"""``gem checkpoint``: what a checkpoint holds, whether it is whole, how two differ, and taking weights elsewhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gem_core.cli.lazy import NearestGroup
from gem_core.cli.output import print_json, print_table

app = typer.Typer(cls=NearestGroup, help="What a checkpoint holds, whether it is whole, how two differ; export.", add_completion=False)

Where = Annotated[Path, typer.Argument(help="A run folder (its newest checkpoint), or the folder of one checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("show")
def show_(path: Where, json: Json = False) -> None:
    """Step, who wrote it, tables, other tensors, sizes."""
    saved = _open(path)
    about, groups = saved.about, _groups(saved)
    total = sum(file["bytes"] for file in about["files"].values())
    facts = {key: about[key] for key in ("step", "format", "world", "written_by", "kernels")}
    facts |= {"engine": about["config"]["embedding"]["engine"], "optimizer": about["config"]["embedding"]["optimizer"]}
    if json:
        facts |= {"ids": about.get("ids", {}), "resized": about.get("resized", [])}
        print_json({"path": str(saved.path), **facts, "bytes": total, "files": about["files"], "tensors": groups})
        return
    by = about["written_by"]
    print(f"{saved.path}: step {about['step']}, {total / 1e6:.1f} MB in {len(about['files'])} files, format {about['format']}")
    print(f"written {by['time']} by gem-core {by['gem_core']}, torch {by['torch']}, world size {about['world']}, engine {facts['engine']}\n")
    print_table(("WHAT", "SHAPE", "HOLDS", "MB"), [(g["name"], g["shape"], g["holds"], f"{g['bytes'] / 1e6:.1f}") for g in groups])
    for told in about.get("resized", ()):
        print(f"\n{told}")


def _groups(saved: Any) -> list[dict[str, Any]]:
    """A row for each table, then one for each kind of dense tensors."""
    rows: dict[str, list[str]] = {}
    for name in saved.index:
        rows.setdefault(name.rsplit("/", 1)[0] if name.startswith("tables/") else "/".join(name.split("/")[:2]), []).append(name)
    out = []
    for group in sorted(rows, key=lambda group: (not group.startswith("tables/"), group)):
        names, table = rows[group], group.startswith("tables/")
        holds = _contents(saved, group, names) if table else f"{len(names)} tensors"
        shape = " x ".join(map(str, saved.shape(f"{group}/weight"))) if table else ""
        out.append({"name": group, "shape": shape, "holds": holds, "bytes": sum(saved.nbytes(name) for name in names)})
    return out


def _contents(saved: Any, table: str, names: list[str]) -> str:
    """A table's tensors; of managed ids how many were seen, and how many of them own a row."""
    of_ids = {f"{table}/{name}" for name in ("id", "id_row", "id_count", "id_used")}
    told = sorted((name.rsplit("/", 1)[1] for name in names if name not in of_ids), key=lambda name: (name != "weight", name))
    if f"{table}/id_row" in names:
        owned = int(saved.tensor(f"{table}/id_row").count_nonzero())
        told.append(f"{saved.shape(f'{table}/id')[0]} ids, {owned} with a row of their own")
    return ", ".join(told)


@app.command("verify")
def verify_(path: Where) -> None:
    """Compare every file with the hash it was written with; exit code 1 names the files that differ."""
    saved = _open(path)
    saved.verify()
    print(f"{saved.path}: {len(saved.about['files'])} files are as they were written")


@app.command("diff")
def diff_(
    first: Annotated[Path, typer.Argument(help="A run folder or a checkpoint.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    json: Json = False,
) -> None:
    """Which tensors differ, in how many values, and by how much at most."""
    a, b = _open(first), _open(second)
    from dataclasses import asdict

    from gem_core.train.checkpoint.compare import differences

    found = differences(a, b)
    if json:
        print_json([{key: value for key, value in asdict(d).items() if not d.so or key in ("name", "so")} for d in found])
        return
    print(f"{a.path}: step {a.about['step']}\n{b.path}: step {b.about['step']}")
    print(f"{len(found)} of {len({*a.index, *b.index})} tensors differ")
    if found:
        print()
        print_table(("TENSOR", "VALUES", "LARGEST"), [(d.name, d.so or f"{d.values} of {d.of}", "" if d.so else f"{d.largest:.6g}") for d in found])


@app.command("convert")
def convert_(path: Where, out: Annotated[Path, typer.Option(help="The safetensors file to write.")]) -> None:
    """Write every tensor whole (weights, tables, optimiser state) into one safetensors file."""
    from gem_core.train.checkpoint.compare import convert

    saved = _open(path)
    saved.verify()
    convert(saved, out)
    print(f"{out}: {len(saved.index)} tensors of step {saved.about['step']}")


@app.command("export")
def export_(path: Where, out: Annotated[Path, typer.Option(help="The folder to make.")]) -> None:
    """Write a model for scoring: weights and tables without optimiser state, and what is needed to build it."""
    from gem_core.train.scoring import export_scorer

    saved = _open(path)
    saved.verify()
    export_scorer(saved, out)
    print(f"{out}: the model of step {saved.about['step']}; gem_core.train.scoring.load_scorer loads it")


def _open(path: Path) -> Any:
    from gem_core.train.checkpoint.saved import find_checkpoint

    return find_checkpoint(path)
