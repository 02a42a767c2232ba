"""``gem checkpoint`` as a person types it, and comparing tensor by tensor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gem_core.cli.main import run as gem
from gem_core.train.checkpoint import compare
from gem_core.train.checkpoint.compare import differences
from gem_core.train.checkpoint.pieces import pieces_of
from gem_core.train.checkpoint.saved import Saved, find_checkpoint
from gem_core.train.checkpoint.saver import Content, write_checkpoint


def written(run: Path, tensors: dict[str, Tensor]) -> Saved:
    pieces = {name: pieces_of(tensor) for name, tensor in tensors.items()}
    write_checkpoint(run / "checkpoints", Content(step=3, pieces=pieces, trainer={}, about={}), keep=1)
    return find_checkpoint(run)


def test_show(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gem(["checkpoint", "show", str(finished_run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{finished_run}/checkpoints/step-12: step 12, ")
    assert "by gem-core" in lines[1]
    assert "engine torch" in lines[1]
    rows = [line.split() for line in lines[3:]]
    assert rows[0] == ["WHAT", "SHAPE", "HOLDS", "MB"]
    assert rows[1] == ["tables/item", "20", "x", "4", "weight,", "state", "0.0"]
    assert [row[0] for row in rows[2:]] == ["dense/model", "dense/optimizer"]


def test_show_as_json(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = find_checkpoint(finished_run).path
    assert gem(["checkpoint", "show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["world"], shown["engine"], shown["optimizer"]) == (12, 1, "torch", "rowwise_adagrad")
    assert shown["bytes"] == sum(file.stat().st_size for file in path.iterdir() if file.name != "about.json")
    assert {group["name"]: group["bytes"] for group in shown["tensors"]}["tables/item"] == 20 * 4 * 4 + 20 * 4


def test_verify_names_the_file(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished_run, run)
    assert gem(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.endswith("3 files are as they were written\n")
    file = find_checkpoint(run).path / "tensors-0-0.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    for words in (["verify", str(run)], ["convert", str(run), "--out", str(tmp_path / "x")], ["export", str(run), "--out", str(tmp_path / "y")]):
        assert gem(["checkpoint", *words]) == 1
        assert "file tensors-0-0.safetensors holds other bytes" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()


def test_no_run_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gem(["checkpoint", "show", str(tmp_path)]) == 2
    assert "there is no complete one" in capsys.readouterr().err


A = {"dense/model/w": torch.ones(3), "dense/model/gone": torch.ones(1), "tables/t/weight": torch.arange(12.0).view(4, 3), "n": torch.empty(0)}


@pytest.mark.parametrize("block_bytes", [1, 50, 1 << 20])
def test_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(compare, "BLOCK_BYTES", block_bytes)
    other = {name: tensor.clone() for name, tensor in A.items() if name != "dense/model/gone"}
    other["tables/t/weight"][0, 0] += 0.5
    other["tables/t/weight"][3, 2] -= 0.75
    other |= {"dense/model/new": torch.tensor(1), "dense/model/w": torch.ones(4)}
    found = differences(written(tmp_path / "a", A), written(tmp_path / "b", other))
    assert [(d.name, d.so) for d in found if d.so] == [
        ("dense/model/gone", "only in the first"),
        ("dense/model/new", "only in the second"),
        ("dense/model/w", "shapes [3] and [4]"),
    ]
    assert [(d.name, d.values, d.of, d.largest) for d in found if not d.so] == [("tables/t/weight", 2, 12, 0.75)]


def test_equal_checkpoints_do_not_differ(tmp_path: Path) -> None:
    a = written(tmp_path / "a", A | {"dense/model/scalar": torch.tensor(3)})
    assert differences(a, a) == []


def test_diff(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gem(["checkpoint", "diff", str(finished_run), str(finished_run)]) == 0
    assert "\n0 of " in capsys.readouterr().out
    saved = find_checkpoint(finished_run)
    tensors = {name: saved.tensor(name) for name in saved.index}
    tensors["tables/item/state"][4] += 2
    written(tmp_path, tensors)
    assert gem(["checkpoint", "diff", str(finished_run), str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["tables/item/state", "1", "of", "20", "2"]
    assert gem(["checkpoint", "diff", str(finished_run), str(tmp_path), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown == {"name": "tables/item/state", "so": "", "values": 1, "of": 20, "largest": pytest.approx(2.0)}


def test_case_E01_convert_gives_whole_tensors_to_the_bit(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "all.safetensors"
    assert gem(["checkpoint", "convert", str(finished_run), "--out", str(file)]) == 0
    saved, got = find_checkpoint(finished_run), load_file(file)
    assert set(got) == set(saved.index)
    assert all(torch.equal(got[name], saved.tensor(name)) for name in got)
    assert gem(["checkpoint", "convert", str(finished_run), "--out", str(file)]) == 2
    assert "it exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["all.safetensors"]


def test_export(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], plugins: object) -> None:
    assert gem(["checkpoint", "export", str(finished_run), "--out", str(tmp_path / "scorer")]) == 0
    assert "the model of step 12" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "scorer").iterdir()) == ["model.json", "weights.safetensors"]
    assert set(load_file(tmp_path / "scorer" / "weights.safetensors")) >= {"tables/item", "model/first.weight"}
