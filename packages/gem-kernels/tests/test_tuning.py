"""``gem kernels tune`` and the configurations that it keeps."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from gem_core.spec import KernelRequest, MachineError, RequestError, load_object
from gem_kernels.bench import measure, tune
from gem_kernels.bench.shapes import SHAPES, VARIANTS_OF
from gem_kernels.bench.workloads import build
from gem_kernels.common import tuning
from gem_kernels.ops import host
from gem_kernels.ops.block_attention import configs as block
from gem_kernels.ops.gdpa import configs as gdpa
from gem_kernels.plugin import gem_cli_commands

GPU = "NVIDIA H200"
KEY = gdpa.config_key("forward", dim=128, v_dim=128, itemsize=2, max_length=1000, arch=90)
BETTER, PACKAGED = gdpa.Config(64, 128, 4, 2), gdpa.choose(KEY)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GEM_KERNELS_HOME", str(tmp_path))
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def gpu():
    with patch.object(torch.cuda, "is_available", lambda: True), patch.object(torch.cuda, "get_device_name", lambda *a: GPU):
        yield


def keep(key=KEY, config=BETTER, op="gdpa"):
    return tuning.write(op, GPU, {tuning.key_text(key): tuning.entry_of(config, 0.5, ["self-L1024"])})


def test_what_is_kept_is_launched_with_and_other_keys_keep_the_package_s(gpu):
    assert tuning.tuned("gdpa", KEY, PACKAGED) == PACKAGED
    file = keep()
    assert file.parts[-3] == "NVIDIA-H200"
    assert file.parts[-2].startswith("triton-")
    assert tuning.tuned("gdpa", KEY, PACKAGED) == BETTER
    assert tuning.tuned("gdpa", replace(KEY, long_rows=False), PACKAGED) == PACKAGED
    assert tuning.tuned("jagged_attention", KEY, PACKAGED) == PACKAGED
    keep(replace(KEY, long_rows=False), PACKAGED)
    assert len(tuning.read("gdpa", GPU)) == 2, "entries of other keys stay"


def test_another_gpu_and_another_triton_have_files_of_their_own(gpu):
    keep()
    with patch.object(torch.cuda, "get_device_name", lambda *a: "NVIDIA H100 80GB HBM3"):
        tuning.forget()
        assert tuning.tuned("gdpa", KEY, PACKAGED) == PACKAGED
    with patch.object(tuning, "version", lambda name: "9.9"):
        tuning.forget()
        assert tuning.tuned("gdpa", KEY, PACKAGED) == PACKAGED


def test_without_a_gpu_the_package_s_configuration_counts():
    keep()
    with patch.object(torch.cuda, "is_available", lambda: False):
        assert tuning.tuned("gdpa", KEY, PACKAGED) == PACKAGED


@pytest.mark.parametrize(
    ("text", "fault"),
    [("{", "cannot be read"), ("[]", "cannot be read"), ('{"entries": {"a": {"config": {"block_m": "64"}}}}', "not made of integers")],
)
def test_a_file_that_is_not_one_of_ours_is_named(gpu, text, fault):
    keep().write_text(text)
    tuning.forget()
    with pytest.raises(RequestError, match=rf"gdpa\.json.*{fault}.*Delete the file"):
        tuning.tuned("gdpa", KEY, PACKAGED)
    assert "cannot be read" in tuning.where(KernelRequest(op="gdpa", device="cuda", dtype="bf16"), GPU) or fault != "cannot be read"
    keep()
    assert tuning.tuned("gdpa", KEY, PACKAGED) == BETTER, "tuning again replaces it"


def test_a_file_of_another_release_is_named(gpu):
    file = keep()
    content = json.loads(file.read_text())
    content["entries"][tuning.key_text(KEY)]["config"].pop("stages")
    file.write_text(json.dumps(content))
    tuning.forget()
    with pytest.raises(RequestError, match=r"this release wants block_m, block_n, stages, warps.*gem kernels tune --op gdpa"):
        tuning.tuned("gdpa", KEY, PACKAGED)


def test_tables_say_where_configurations_come_from():
    request = KernelRequest(op="gdpa", device="cuda", dtype="bf16")
    assert tuning.where(request, GPU) == "the package's, measured on an H200"
    file = keep()
    assert tuning.where(request, GPU) == f"1 tuned in {file}, else the package's"


def test_a_configuration_is_tried_in_every_thread_and_then_forgotten():
    from threading import Thread

    seen = []
    with tuning.tried("gdpa", "forward", BETTER):
        thread = Thread(target=lambda: seen.append(tuning.tuned("gdpa", KEY, PACKAGED)))
        thread.start()
        thread.join()
    assert seen == [BETTER], "gradients are computed in threads of torch's own"
    assert tuning.tuned("gdpa", KEY, PACKAGED) == PACKAGED


# ---- the search -----------------------------------------------------------------------------------------------------------------------


def searched(times, *, faults=(), broken=()):
    """The notes and the entry of a search whose candidates take ``times``; some give wrong results or do not run."""
    current = []

    def run_of(function, work, mode):
        if current[-1] in broken:
            raise RuntimeError("out of shared memory")
        return lambda repeats: times[current[-1]]

    real = tuning.tried

    def tried(op, direction, config):
        current.append(config)
        return real(op, direction, config)

    with (
        patch.object(tuning, "tried", tried),
        patch.object(measure, "wrong", lambda function, small: "result 0 is 1 off" if current[-1] in faults else None),
        patch.object(measure, "passes", run_of),
    ):
        return tune.candidates("gdpa", "forward", list(times), None, None, None, "fwd")


def test_the_fastest_right_configuration_wins_and_the_others_are_named():
    wrong, slow = gdpa.Config(32, 32, 4, 1), gdpa.Config(128, 128, 8, 4)
    times, notes = searched({PACKAGED: 2.0, BETTER: 1.0, wrong: 0.1, slow: 0.2}, faults=[wrong], broken=[slow])
    assert times == {PACKAGED: 2.0, BETTER: 1.0}
    assert any("REFUSED" in note and "1 off" in note for note in notes)
    assert any("does not run" in note and "RuntimeError" in note for note in notes)


def test_a_configuration_that_is_clearly_slower_is_not_timed_further():
    slow = gdpa.Config(32, 32, 4, 1)
    times, _ = searched({PACKAGED: 1.0, slow: 1.2, BETTER: 1.1})
    assert times == {PACKAGED: 1.0, BETTER: 1.1}


def test_spaces_hold_what_the_package_takes_and_fit_an_sm():
    for direction in block.DIRECTIONS:
        for roomy in (True, False):
            key = block.Key(direction, 64, 128, False, False, False, roomy)
            candidates = list(block.space(key))
            assert block.choose(key) in candidates
            tensors = 3 if direction == "forward" else 4
            assert all(c.stages * tensors * 64 * 128 * 2 <= (227 if roomy else 99) * 1024 for c in candidates)
            assert len(candidates) <= 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter")
def test_what_is_tried_reaches_the_launch():
    """The launch of a portable kernel asks for its configuration by op and direction; under the interpreter as if it were compiled."""
    from gem_kernels.bench.workloads import build
    from gem_kernels.ops import attention
    from gem_kernels.ops.block_attention import launch

    work = build("block_attention", "", SHAPES["block-u2000"], [9], torch.float32, "cpu")
    chosen = []
    with (
        patch.object(launch, "tuned", lambda op, key, packaged: chosen.append((op, key.direction, packaged)) or block.INTERPRETER),
        patch.object(host, "interpreted", lambda: False),
        patch.object(host, "check_call", lambda *a, **o: None),
    ):
        out = work.call(launch.block_attention)
        torch.autograd.grad(out.sum(), work.leaves())
    assert chosen == [("block_attention", "forward", block.WIDE), ("block_attention", "backward", block.WIDE)]
    work = build("gdpa", "", SHAPES["self-L256"], [9], torch.float32, "cpu")
    chosen.clear()
    from gem_kernels.ops.gdpa.launch import gdpa as kernel

    with (
        patch.object(attention, "tuned", lambda op, key, packaged: chosen.append((op, key.direction)) or packaged),
        patch.object(attention.AttentionCall, "key", lambda self, direction: replace(KEY, direction=direction)),
        patch.object(attention, "interpreted", lambda: False),
        patch.object(attention.AttentionCall, "launch", lambda self, kernel, config, *a, **o: None),
    ):
        work.call(kernel)
    assert chosen == [("gdpa", "forward")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter")
@pytest.mark.parametrize("op", ["block_attention"])
def test_a_search_times_each_direction_under_its_key(op):
    """Under the interpreter, which launches with one configuration whatever is tried: all that a search does but that."""
    tunable = tune.tunables()[op]
    packaged, other = tunable.packaged, (gdpa.Config(32, 32, 4, 1) if op == "gdpa" else block.Config(2, 4, 1, None))
    few = replace(tunable, space=lambda key: [packaged(key), other])
    with patch.object(tune, "SMALL_SHORT", (9, 0, 3)), patch.object(tune, "SMALL_LONG", (9, 0, 3)):
        found = list(tune.search(op, few, "", replace(SHAPES["self-L256"], longest=9, shortest=1), 2, torch.float32, "cpu"))
    assert len(found) == len(tunable.directions)
    for direction, (key, first, times, text) in zip(tunable.directions, found, strict=True):
        assert f"direction={direction} " in key
        assert text.startswith(f"{direction}: ")
        assert "REFUSED" not in text
        assert first in times
        assert set(times) <= {first, other}


def test_the_best_configuration_is_that_over_all_shapes_of_a_key():
    """Ratios count, not milliseconds, which long rows would rule; a configuration that one shape gave up is out."""
    third = gdpa.Config(32, 32, 4, 1)
    short, long = {PACKAGED: 1.0, BETTER: 0.5, third: 0.4}, {PACKAGED: 100.0, BETTER: 120.0}
    entry = tune.best_of(PACKAGED, {"self-u1024": short, "self-L2048": long})
    assert tuning.built(gdpa.Config, entry, "gdpa") == BETTER
    assert (entry["ratio"], entry["shapes"]) == (0.85, ["self-L2048", "self-u1024"])
    slower = tune.best_of(PACKAGED, {"self-L2048": long})
    assert (tuning.built(gdpa.Config, slower, "gdpa"), slower["ratio"]) == (PACKAGED, 1.0), "an older entry gives way to the package's"
    disjoint = tune.best_of(PACKAGED, {"a": {PACKAGED: 1.0}, "b": {BETTER: 1.0}})
    assert tuning.built(gdpa.Config, disjoint, "gdpa") == PACKAGED


def test_the_command_keeps_one_entry_a_key_for_the_launches_that_follow(gpu, capsys):
    def search(op, tunable, variant, form, rows, dtype):
        yield tuning.key_text(KEY), PACKAGED, {PACKAGED: 2.0, BETTER: 1.0 if form.longest > 1024 else 1.8}, "forward: 2 timed"
        yield "another key", PACKAGED, {}, "key_grad: passed over"

    with patch.object(tune, "search", search):
        tune.tune(op=["gdpa"], shape=["self-L1024", "self-L2048"], dtype="bf16", rows=4)
    assert tuning.read("gdpa", GPU) == {tuning.key_text(KEY): tuning.entry_of(BETTER, 0.7, ["self-L1024", "self-L2048"])}
    assert tuning.tuned("gdpa", KEY, PACKAGED) == BETTER
    shown = capsys.readouterr().out
    for text in ("self-L1024: forward: 2 timed", "passed over", "0.700 of the package's time", "kept in"):
        assert text in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter")
def test_a_search_passes_over_what_its_small_calls_cannot_check():
    tunable = tune.tunables()["gdpa"]
    with patch.object(tune, "SMALL_SHORT", (600,)):
        found = list(tune.search("gdpa", tunable, "", replace(SHAPES["self-L256"], longest=3, shortest=1), 1, torch.float32, "cpu"))
    assert all(not times and "passed over" in text for _, _, times, text in found)


@pytest.mark.parametrize("options", [{"op": ["norm_linear"]}, {"shape": ["self-L7"]}, {"dtype": "fp8"}], ids=str)
def test_unknown_words_are_refused_with_the_known_ones(options):
    with pytest.raises(RequestError, match="Known: "):
        tune.tune(**{"op": None, "shape": None, "dtype": "bf16", "rows": 4, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_tuned():
    with pytest.raises(MachineError, match="no CUDA device"):
        tune.tune(op=None, shape=None, dtype="bf16", rows=4)


def test_the_command_is_declared_and_can_be_loaded():
    (command,) = [c for c in gem_cli_commands() if c.name == "kernels tune"]
    assert load_object(command.load) is tune.tune


def test_block_attention_is_tuned_apart_with_rotation_and_with_norms():
    tunable = tune.tunables()["block_attention"]
    works = [build("block_attention", variant, SHAPES["block-u2000"], [70], torch.bfloat16, "cpu") for variant in VARIANTS_OF["block_attention"]]
    assert len({tunable.key("forward", work) for work in works}) == 3
