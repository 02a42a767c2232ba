"""Compiled blocks: the same run and the same names without them, counted compilations, and a limit that ends the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.builtin.toy import ToySource
from gem_core.config.load import LoadedConfig, load_config
from gem_core.config.schema import CompileSection
from gem_core.ops.slot import KernelSlot, kernel_slots
from gem_core.spec import DataSchema, RequestError, RunFailed, Task
from gem_core.train import compiled
from gem_core.train.compiled import Compiled, blocks, bounded, compiled_blocks, limit_named, sharing
from gem_core.train.compose import compose
from gem_core.train.feed import empty_batch
from gem_core.train.log import read_log
from gem_core.train.run import train

SMALL = [
    "run.device=cpu", "run.threads=1", "model.name=hstu", "model.options.dim=8", "model.options.layers=1", "model.options.bias=none",
    "data.options.rows=128", "data.batch_size=32", "train.epochs=1", "train.log_every=2", "kernels.prefer=['reference']",
]  # fmt: skip


@pytest.fixture(autouse=True)
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Blocks are traced and run as they were traced; code generation is torch's own business, and slow on a CPU."""
    import torch._dynamo

    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small(folder: Path, *overrides: str) -> LoadedConfig:
    return load_config("toy", [*SMALL, f"run.out={json.dumps(str(folder))}", *overrides])


NO_EVENTS = DataSchema(tasks=(Task(name="ctr"),))
BATCH = empty_batch(NO_EVENTS)


class Block(nn.Module):
    """A block whose code depends on a word: each one is a kind of input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, word: str) -> Tensor:
        return self.linear(x) * len(word)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.others = nn.ModuleList([nn.Linear(2, 2)])
        self.head = nn.Linear(2, 1)

    def forward(self, batch: Batch, x: Tensor, word: str) -> Tensor:
        for layer in self.layers:
            x = layer(x, word)
        return self.head(x)  # type: ignore[no-any-return]


def test_blocks_are_the_layers() -> None:
    model = Model()
    assert blocks(model) == list(model.layers)
    with pytest.raises(RequestError, match="Linear has no list of modules named layers"):
        blocks(nn.Linear(2, 2))


class Choosing(Model):
    """A model that says what is worth compiling."""

    def compiled_parts(self) -> list[nn.Module]:
        return [self.layers[1], self.head]


def test_a_model_may_name_the_blocks() -> None:
    model = Choosing()
    assert blocks(model) == [model.layers[1], model.head]


def test_a_compiled_gem_has_the_losses_of_another(tmp_path: Path) -> None:
    words = [word for word in SMALL if "model" not in word] + ["model.name=gem", "model.options.layers=2"]
    plain = train(load_config("toy", [*words, f"run.out={json.dumps(str(tmp_path / 'plain'))}"]))
    fast = train(load_config("toy", [*words, f"run.out={json.dumps(str(tmp_path / 'fast'))}", "compile.blocks=default"]))
    losses = [[record["loss"] for record in read_log(tmp_path / name) if record["event"] == "train"] for name in ("plain", "fast")]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    assert plain["compile"]["graphs"] == 0
    assert fast["compile"]["graphs"] == 8  # two parts of two layers that differ, to train and to evaluate


def test_a_compiled_run_has_the_losses_names_and_checkpoints_of_another(tmp_path: Path) -> None:
    plain = train(small(tmp_path / "plain"))
    fast = train(small(tmp_path / "fast", "compile.blocks=default"))
    losses = [[record["loss"] for record in read_log(tmp_path / name) if record["event"] == "train"] for name in ("plain", "fast")]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    assert plain["compile"] == {"graphs": 0, "seconds": 0.0}
    assert 1 <= fast["compile"]["graphs"] <= 4
    # evaluation compiles too
    assert 0 < fast["compile"]["seconds"] < fast["first_step_seconds"] + fast["train_seconds"] + fast["eval_seconds"]
    assert ">compiling<" in (tmp_path / "fast/report.html").read_text()
    assert ">compiling<" not in (tmp_path / "plain/report.html").read_text()
    # the checkpoint of one goes on in the other, which asks for the same names and shapes
    run = compose(small(tmp_path / "fast", "train.epochs=2", "compile.blocks=off"), resume=tmp_path / "fast")
    try:
        assert run.progress.step == 4
        assert not any("_orig_mod" in name for name in run.model.state_dict())
    finally:
        run.close()


def test_the_time_to_the_first_step_is_told(tmp_path: Path) -> None:
    summary = train(small(tmp_path / "run"))
    (told,) = [record for record in read_log(tmp_path / "run") if record["event"] == "first_step"]
    assert told["step"] == 1
    assert told["seconds"] == summary["first_step_seconds"] > 0
    assert "first step after" in (tmp_path / "run/report.html").read_text()


def test_a_block_that_meets_too_many_kinds_of_input_ends_the_run() -> None:
    model, x = Model(), torch.ones(3, 2, requires_grad=True)
    with compiled_blocks(model, CompileSection(blocks="default", recompiles=2), NO_EVENTS) as told:
        with limit_named(2):
            for word in ("a", "bb", "ccc", "dddd"):  # two blocks of one kind share 2 x 2 compilations
                model(BATCH, x, word)
        assert told.graphs == 4
        with pytest.raises(RunFailed, match=r"compiled for 2 kinds of input.*compile.recompiles"), limit_named(2):
            model(BATCH, x, "eeeee")


def test_a_run_whose_blocks_meet_the_limit_fails_and_says_so_in_its_log(tmp_path: Path) -> None:
    """The second batch has another number of events than the first."""
    with pytest.raises(RunFailed, match="compiled for 1 kinds of input"):
        train(small(tmp_path / "run", "compile.blocks=default", "compile.recompiles=1"))
    assert [record["step"] for record in read_log(tmp_path / "run") if record["event"] in ("first_step", "failed")] == [1, 1]


class Apart:
    """A forward that the compiler does not look into, as a precision recipe puts in the place of a layer's own."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight, self.layer.bias)


class Nested(Model):
    """Blocks of three blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor, word: str) -> Tensor:
        for part in self.parts:
            x = part(x, word)
        return x


def cut(model: Model) -> Model:
    for part in model.layers.modules():
        if isinstance(part, nn.Linear):
            vars(part)["forward"] = Apart(part)
    return model


def test_parts_of_cut_blocks_share_the_limit_of_their_function() -> None:
    """Torch counts by function: six parts of one class may be compiled as often as six blocks."""
    assert [sharing(blocks(model)) for model in (Model(), Nested(), cut(Nested()))] == [2, 2, 6]


def test_slots_whose_kernel_is_kept_out_share_one_function_too() -> None:
    def block() -> nn.Module:
        one = Block()
        one.slots = nn.ModuleList(Slotted() for _ in range(2))
        return one

    found = [block()]
    assert sharing(found) == 1
    kernel_slots(found[0])[1].bind(torch.compiler.disable(lambda x: x))
    assert sharing(found) == 4  # each of the two has two


class Slotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = KernelSlot("add_norm"), KernelSlot("add_norm")


def test_a_cut_block_is_compiled_in_pieces_and_ends_at_the_same_limit() -> None:
    model, x = cut(Nested()), torch.ones(3, 2, requires_grad=True)
    plain = Nested()
    plain.load_state_dict(model.state_dict())
    with compiled_blocks(model, CompileSection(blocks="default", recompiles=2), NO_EVENTS) as told, limit_named(2):
        for word in ("a", "bb"):
            torch.testing.assert_close(model(BATCH, x, word), plain(BATCH, x, word))
        assert told.graphs > 0

        def meet(words: list[str]) -> None:
            with limit_named(2):
                for word in words:
                    model(BATCH, x, word)

        with pytest.raises(RunFailed, match="compiled for 2 kinds of input"):
            meet(["c" * length for length in range(3, 15)])  # six parts, two kinds each: twelve words, of which two were met above


def test_planted_fault_without_the_limit_torch_goes_on_and_says_nothing() -> None:
    model, x = Model(), torch.ones(3, 2, requires_grad=True)
    silent = torch._dynamo.config.patch(fail_on_recompile_limit_hit=False)
    with compiled_blocks(model, CompileSection(blocks="default", recompiles=1), NO_EVENTS), silent:
        for word in ("a", "bb", "ccc", "dddd"):
            assert torch.isfinite(model(BATCH, x, word)).all()


def test_the_longest_row_is_the_schemas_while_blocks_are_compiled() -> None:
    """A kernel takes it for a plain number, so one that changed from batch to batch would be compiled for again and again."""
    source = ToySource(rows=64)
    batch = next(source.batches("train", batch_size=3))
    changed = bounded(batch, source.schema())
    assert {name: span.max_length for name, span in changed.event_offsets.items()} == {"views": 12, "buys": 6}
    assert all(span.offsets is batch.event_offsets[name].offsets for name, span in changed.event_offsets.items())
    seen: list[Any] = []
    model = Model()
    model.forward = lambda batch, *rest: seen.append(batch.event_offsets)  # type: ignore[method-assign]
    with compiled_blocks(model, CompileSection(blocks="default"), source.schema()):
        model(batch)
    model(batch)
    assert {name: span.max_length for name, span in seen[0].items()} == {"views": 12, "buys": 6}
    assert seen[1] is batch.event_offsets


def test_other_errors_of_a_block_stay_what_they_are() -> None:
    with pytest.raises(RequestError, match="asked"), limit_named(2):
        raise RequestError("asked", "so", "do")


def test_counting_stops_where_it_is_left() -> None:
    told = Compiled()
    with told.watch():
        pass
    block = nn.Linear(2, 2)
    block.compile(backend="eager")
    block(torch.ones(1, 2))
    assert told.told() == {"graphs": 0, "seconds": 0.0}


def test_a_mode_that_torch_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"compile\.blocks"):
        small(tmp_path, "compile.blocks=max")
