"""Checkpoints on disk: complete or absent, finite, verified; the same beside training as at once; loadable after a kill at any moment."""

import json
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from gem_train_ranks import write_until_killed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_core.spec import RequestError, RunFailed
from gem_core.train.checkpoint import pieces as pieces_module
from gem_core.train.checkpoint import saver as saver_module
from gem_core.train.checkpoint import store
from gem_core.train.checkpoint.pieces import HostCopy, Piece, Pieces, divided, pieces_of
from gem_core.train.checkpoint.saved import FORMAT, REPLACED, Saved, checkpoints, find_checkpoint
from gem_core.train.checkpoint.saver import Content, Saver, write_checkpoint
from gem_core.train.world import World

TENSORS = {"dense/model/w": torch.ones(3), "tables/t/weight": torch.arange(12.0).view(4, 3), "tables/t/state": torch.arange(4.0)}


def content(step: int, tensors: dict[str, Tensor] = TENSORS, **trainer: Any) -> Content:
    pieces = {name: pieces_of(tensor) for name, tensor in tensors.items()}
    return Content(step=step, pieces=pieces, trainer={"at": step, **trainer}, about={"kernels": {"gdpa": "reference"}})


def write(run: Path, step: int, tensors: dict[str, Tensor] = TENSORS, *, keep: int = 2, **trainer: Any) -> Path:
    return write_checkpoint(run / "checkpoints", content(step, tensors, **trainer), keep=keep)


def tensors_of(saved: Saved) -> dict[str, Tensor]:
    return {name: saved.tensor(name) for name in saved.index}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name], tensor), name


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    saved = find_checkpoint(tmp_path)
    assert saved.path == path
    assert (saved.about["step"], saved.about["kernels"]) == (7, {"gdpa": "reference"})
    assert find_checkpoint(path).path == path
    assert_equal(tensors_of(saved), TENSORS)
    assert saved.trainer() == {"at": 7}
    assert torch.equal(saved.read()["tables"]["t"]["state"], torch.arange(4.0))
    assert sorted(saved.about["files"]) == ["tensors-0-0.safetensors", "tensors.json", "trainer.pt"]
    saved.verify()


ODD = {
    "scalar": torch.tensor(7),
    "none": torch.empty(0, 5),
    "no width": torch.empty(3, 0),
    "strided": torch.arange(20.0).view(4, 5).t()[1:4],
    "half": torch.tensor([1.5, -2.0, 6e4], dtype=torch.float16),
    "brain": torch.tensor([[1e30, -0.0]], dtype=torch.bfloat16),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "eight": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "long name/with.dots/und Ümlaut": torch.arange(1, dtype=torch.int32),
}


@pytest.mark.parametrize("piece_bytes", [1, 13, 1 << 20])
@pytest.mark.parametrize("file_bytes", [1, 50, 1 << 20])
def test_tensors_of_every_kind_in_pieces_and_files_of_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, file_bytes: int
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(store, "FILE_BYTES", file_bytes)
    odd = {f"dense/model/{name}": tensor for name, tensor in ODD.items()} | {"tables/t/weight": torch.randn(101, 3)}
    made = content(1, odd)
    made = Content(step=1, pieces=divided(made.pieces), trainer={}, about={})
    write_checkpoint(tmp_path / "checkpoints", made, keep=1)
    saved = find_checkpoint(tmp_path)
    assert len(saved.index["tables/t/weight"]["pieces"]) == {1: 101, 13: 101, 1 << 20: 1}[piece_bytes]
    files = [name for name in saved.about["files"] if name.startswith("tensors-")]
    assert (len(files) == 1) == (file_bytes == 1 << 20)
    expected = {name: tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in odd.items()}
    got = {name: tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in tensors_of(saved).items()}
    assert_equal(got, expected)
    saved.verify()


cuts = st.lists(st.integers(0, 40), max_size=5)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 5), saved_at=cuts, box=st.tuples(*[st.integers(0, 40)] * 2, *[st.integers(0, 5)] * 2))
def test_any_box_comes_from_any_division(rows: int, width: int, saved_at: list[int], box: tuple[int, int, int, int]) -> None:
    """Rows divided anywhere, also into parts without rows, are read as any box, against plain indexing. Other memory is not touched."""
    whole = torch.arange(float(rows * width)).view(rows, width)
    edges = sorted({0, rows, *(cut for cut in saved_at if cut < rows)})
    parts = [Piece((begin, 0), whole[begin:end]) for begin, end in pairwise(edges)]
    first, last, left, right = (min(value, limit) for value, limit in zip(box, (rows, rows, width, width), strict=True))
    rows_wanted, columns_wanted = slice(min(first, last), max(first, last)), slice(min(left, right), max(left, right))
    memory = torch.full((rows, width), -1.0)
    with TemporaryDirectory() as folder:
        made = Content(step=1, pieces={"t": Pieces((rows, width), torch.float32, parts)}, trainer={}, about={})
        path = write_checkpoint(Path(folder) / "checkpoints", made, keep=1)
        wanted = Piece((rows_wanted.start, columns_wanted.start), memory[rows_wanted, columns_wanted])
        find_checkpoint(path).fill({"t": Pieces((rows, width), torch.float32, [wanted])})
    expected = torch.full((rows, width), -1.0)
    expected[rows_wanted, columns_wanted] = whole[rows_wanted, columns_wanted]
    assert torch.equal(memory, expected)


def test_files_are_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    odd = {f"dense/model/{name}": tensor for name, tensor in ODD.items()}
    path = write(tmp_path, 1, odd)
    got = load_file(path / "tensors-0-0.safetensors")
    for name, tensor in odd.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].float(), tensor.float()), name


def test_rows_are_read_without_the_others(tmp_path: Path) -> None:
    """Poisoned memory outside of the wanted rows stays as it was."""
    write(tmp_path, 1)
    memory = torch.full((6, 3), -7.0)
    find_checkpoint(tmp_path).fill({"tables/t/weight": Pieces((4, 3), torch.float32, [Piece((1, 0), memory[2:4])])})
    assert torch.equal(memory[2:4], TENSORS["tables/t/weight"][1:3])
    assert bool((memory[[0, 1, 4, 5]] == -7).all())


def test_a_box_of_columns_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1)
    target = torch.zeros(2, 1)
    find_checkpoint(tmp_path).fill({"tables/t/weight": Pieces((4, 3), torch.float32, [Piece((2, 1), target)])})
    assert target.tolist() == [[7.0], [10.0]]


def test_a_file_that_ends_early_is_told_even_unverified(tmp_path: Path) -> None:
    path = write(tmp_path, 1) / "tensors-0-0.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(RunFailed, match="it ends 2 bytes early"):
        tensors_of(find_checkpoint(tmp_path))


# ---- what is kept -----------------------------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (2, 9, 10, 100):
        write(tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-10", "step-100"]
    assert find_checkpoint(tmp_path).about["step"] == 100


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        write(tmp_path, 5, value=value)
    assert find_checkpoint(tmp_path).trainer()["value"] == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5"]


def test_a_kill_between_two_names_of_a_replaced_step_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, 5, keep=1)
    folder = tmp_path / "checkpoints"
    (folder / "step-5").rename(folder / f"{REPLACED}5")
    assert find_checkpoint(tmp_path).trainer() == {"at": 5}
    write(tmp_path, 6, keep=2)
    assert [path.name for path in checkpoints(folder)] == ["step-5", "step-6"]


def test_what_a_killed_process_left_is_not_a_checkpoint_and_goes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    write(tmp_path, 1)
    for name in (".writing-step-2", ".removing-step-0", "step-x"):
        shutil.copytree(folder / "step-1", folder / name)
    assert find_checkpoint(tmp_path).about["step"] == 1
    write(tmp_path, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2", "step-x"]


def test_no_checkpoint_and_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no complete one"):
        find_checkpoint(tmp_path)
    path = write(tmp_path, 1)
    about = json.loads((path / "about.json").read_text())
    for other, do in ((FORMAT + 1, "Install a newer gem-core"), (FORMAT - 1, "Use the gem-core that wrote it")):
        (path / "about.json").write_text(json.dumps({**about, "format": other}))
        with pytest.raises(RequestError, match=f"its format is {other}, this version reads {FORMAT}. {do}"):
            find_checkpoint(tmp_path)


# ---- what is never written, and never trusted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["dense/model/w", "tables/t/weight", "tables/t/state"])
def test_nothing_that_is_not_finite_is_written(tmp_path: Path, bad: float, dtype: torch.dtype, name: str) -> None:
    write(tmp_path, 1)
    broken = TENSORS[name].to(dtype).clone()
    broken.view(-1)[-1] = bad
    with pytest.raises(RunFailed, match=f"step 2: {name} holds a value that is not finite"):
        write(tmp_path, 2, {**TENSORS, name: broken}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_eight_bit_floats_are_checked_as_well(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="dense/model/w holds a value that is not finite"):
        write(tmp_path, 1, {"dense/model/w": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)})


def test_the_trainers_values_are_checked_as_well(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="step 3: trainer/stream/0 holds a value that is not finite"):
        write(tmp_path, 3, stream=[torch.tensor([float("nan")])])
    assert checkpoints(tmp_path / "checkpoints") == []


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"the checkpoint of step 2: rank 0 could not write it: OSError.*No space left on device.*before it is kept"):
        write(tmp_path, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_a_lost_rank_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(saver_module, "save", lost)
    with pytest.raises(RunFailed, match="step 2: rank 0 lost the others while it was written: Connection closed by peer"):
        write(tmp_path, 2)


def test_parts_that_overlap_are_refused(tmp_path: Path) -> None:
    twice = {"tables/t/weight": Pieces((4, 3), torch.float32, [Piece((0, 0), torch.zeros(3, 3)), Piece((2, 0), torch.zeros(2, 3))])}
    with pytest.raises(RunFailed, match="tables/t/weight has overlapping chunks"):
        write_checkpoint(tmp_path / "checkpoints", Content(step=1, pieces=twice, trainer={}, about={}), keep=1)


def test_a_tensor_that_the_ranks_do_not_hold_whole_is_refused(tmp_path: Path) -> None:
    half = {"tables/t/weight": Pieces((4, 3), torch.float32, [Piece((0, 0), torch.zeros(2, 3))])}
    with pytest.raises(RunFailed, match="the ranks hold 6 of the 12 values of tables/t/weight"):
        write_checkpoint(tmp_path / "checkpoints", Content(step=1, pieces=half, trainer={}, about={}), keep=1)


@pytest.mark.parametrize("name", ["tensors-0-0.safetensors", "tensors.json", "trainer.pt"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_harmed_file_is_named(tmp_path: Path, name: str, harm: str) -> None:
    path = write(tmp_path, 1) / name
    saved, before = find_checkpoint(tmp_path), path.read_bytes()
    saved.verify()
    if harm == "flip":
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    elif harm == "cut":
        path.write_bytes(before[:-1])
    else:
        path.unlink()
    so = {"flip": "holds other bytes", "cut": f"has {len(before) - 1} bytes", "remove": "is missing"}[harm]
    with pytest.raises(RunFailed, match=f"file {name} {so}"):
        saved.verify()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", None])
def test_descriptions_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    path = write(tmp_path, 1)
    index = path / "tensors.json"
    if content is None:
        index.unlink()
    else:
        index.write_bytes(content)
        (path / "about.json").write_bytes(content)
        with pytest.raises(RunFailed, match=r"file about\.json cannot be read"):
            find_checkpoint(tmp_path)
    with pytest.raises(RunFailed, match=r"file tensors\.json cannot be read"):
        _ = Saved(path=path, about={}).index


def test_ranks_share_the_verification(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "trainer.pt").unlink()
    saved = find_checkpoint(tmp_path)
    found = []
    for share in range(3):
        try:
            saved.verify(share=share, shares=3)
        except RunFailed as error:
            found.append((share, str(error)))
    assert [share for share, _ in found] == [2]
    assert "trainer.pt is missing" in found[0][1]


class Mischief:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


def test_only_plain_values_are_unpickled(tmp_path: Path) -> None:
    """A checkpoint from a stranger cannot run code."""
    path = write(tmp_path, 1)
    torch.save({"f": Mischief()}, path / "trainer.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights"):
        find_checkpoint(tmp_path).trainer()


# ---- beside training --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def told() -> list[int]:
    return []


@pytest.fixture
def saver(tmp_path: Path, told: list[int]) -> Iterator[Saver]:
    made = Saver(tmp_path / "checkpoints", World(), keep=2, told=lambda step, path: told.append(step))
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The writer waits until this is set."""
    event, publish = threading.Event(), saver_module._publish

    def wait_and_publish(*arguments: Any) -> None:
        assert event.wait(60)
        publish(*arguments)

    monkeypatch.setattr(saver_module, "_publish", wait_and_publish)
    yield event
    event.set()


def test_case_E13_beside_training_the_content_is_that_of_the_moment(tmp_path: Path, saver: Saver, gate: threading.Event) -> None:
    """Every value changes while the writer has not finished, and the files are those of a checkpoint written at once, to the byte."""
    live = {name: tensor.clone() for name, tensor in TENSORS.items()}
    saver.save(content(3, live), background=True)
    for tensor in live.values():
        tensor.fill_(-1.0)
    gate.set()
    saver.wait()
    write(tmp_path / "at once", 3)
    here, there = (find_checkpoint(folder) for folder in (tmp_path, tmp_path / "at once"))
    assert here.about["files"] == there.about["files"]
    assert_equal(tensors_of(here), TENSORS)


def test_planted_fault_without_the_copy_the_content_is_another(
    tmp_path: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """Twin: pieces that are not copied change under the writer's hands."""
    monkeypatch.setattr(HostCopy, "take", lambda self, pieces: dict(pieces))
    begun, resolve = threading.Event(), store.write_safetensors
    monkeypatch.setattr(store, "write_safetensors", lambda *a: (begun.wait(60), resolve(*a))[1])
    live = {name: tensor.clone() for name, tensor in TENSORS.items()}
    saver.save(content(3, live), background=True)
    for tensor in live.values():
        tensor.fill_(-1.0)
    begun.set()
    gate.set()
    saver.wait()
    assert not torch.equal(find_checkpoint(tmp_path).tensor("dense/model/w"), TENSORS["dense/model/w"])


def test_training_goes_on_and_the_next_save_waits(tmp_path: Path, saver: Saver, told: list[int], gate: threading.Event) -> None:
    saver.save(content(1), background=True)
    saver.poll()
    assert (told, checkpoints(tmp_path / "checkpoints")) == ([], [])
    threading.Timer(0.2, gate.set).start()
    saver.save(content(2), background=True)  # waits for the gate
    assert told == [1]
    saver.wait()
    assert told == [1, 2]
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-1", "step-2"]


def test_a_complete_one_is_told_without_waiting(saver: Saver, told: list[int]) -> None:
    saver.save(content(1), background=True)
    until = time.monotonic() + 30
    while not told and time.monotonic() < until:
        saver.poll()
        time.sleep(0.01)
    assert told == [1]


def test_an_error_beside_training_is_raised_by_the_next_save_and_not_by_poll(tmp_path: Path, saver: Saver, told: list[int]) -> None:
    saver.save(content(1, {"dense/model/w": torch.tensor(float("nan"))}), background=True)
    time.sleep(0.5)
    saver.poll()
    with pytest.raises(RunFailed, match="step 1: dense/model/w holds"):
        saver.save(content(2), background=True)
    assert (told, checkpoints(tmp_path / "checkpoints")) == ([], [])


def test_closing_waits_and_logs_an_error(tmp_path: Path, saver: Saver, caplog: pytest.LogCaptureFixture) -> None:
    saver.save(content(1), background=True)
    saver.close()
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-1"]
    other = Saver(tmp_path / "checkpoints", World(), keep=2, told=lambda step, path: None)
    other.save(content(2, {"dense/model/w": torch.tensor(float("nan"))}), background=True)
    other.close()
    assert any("step 2: dense/model/w holds" in record.getMessage() for record in caplog.records)


def test_case_F11_no_memory_is_pinned_on_the_cpu(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: (pinned.append(pin_memory), empty(*a, **k))[1])
    saver.save(content(1), background=True)
    saver.wait()
    assert pinned
    assert not any(pinned)


def test_the_host_copy_is_made_once(saver: Saver) -> None:
    """The memory of the copy is taken once, and follows a tensor that changes its shape."""
    copy = HostCopy()
    first = copy.take({"w": pieces_of(torch.ones(3))})["w"].parts[0].tensor
    again = copy.take({"w": pieces_of(torch.zeros(3))})["w"].parts[0].tensor
    other = copy.take({"w": pieces_of(torch.zeros(4))})["w"].parts[0].tensor
    assert again.data_ptr() == first.data_ptr()
    assert other.shape == (4,)


# ---- killed -----------------------------------------------------------------------------------------------------------------------------


def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    """Signal 9 after each of the changes that the second and third checkpoint make on disk, the removal of the older one among them."""
    steps = set()
    for at in range(9, 34):
        run = tmp_path / str(at)
        assert write_until_killed(run, TENSORS, at) == -signal.SIGKILL
        saved = find_checkpoint(run)
        saved.verify()
        step = saved.about["step"]
        assert_equal(tensors_of(saved), {name: tensor + step for name, tensor in TENSORS.items()})
        steps.add(step)
        write_checkpoint(run / "checkpoints", content(50), keep=1)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-50"]
    assert steps == {1, 2, 3}
