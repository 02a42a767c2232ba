"""From a checkpoint into models, optimisers and tables."""

from pathlib import Path

import pytest
import torch
from torch import nn

from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.spec import PluginError, RequestError, RunFailed, SparseOptimizer, TableSpec
from gem_core.train.checkpoint import restore
from gem_core.train.checkpoint.pieces import dense_pieces, table_pieces
from gem_core.train.checkpoint.saved import Saved, find_checkpoint
from gem_core.train.checkpoint.saver import Content, write_checkpoint
from gem_core.train.optim import AveragedWeights, adamw
from gem_core.train.world import World


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def model_and_optimizer(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = net()
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def written(run: Path, pieces: object, step: int = 1) -> Saved:
    write_checkpoint(run / "checkpoints", Content(step=step, pieces=pieces, trainer={}, about={}), keep=1)  # type: ignore[arg-type]
    return find_checkpoint(run)


def saved_dense(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    return written(run, dense_pieces(restore.model_tensors(model) | restore.optimizer_tensors(model, optimizer), leads=True))


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    mine, theirs = first.state_dict(), second.state_dict()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []


def test_weights_buffers_and_optimiser_go_on_to_the_bit(tmp_path: Path) -> None:
    first, optimizer = model_and_optimizer(1)
    saved = saved_dense(tmp_path, first, optimizer)
    second, other = model_and_optimizer(2, steps=0)
    restore.restore_dense(second, saved, other)
    assert_same_weights(first, second)
    for model, opt in ((first, optimizer), (second, other)):
        torch.manual_seed(5)
        one_step(model, opt)
    assert_same_weights(first, second)


def test_names_are_those_of_parameters(tmp_path: Path) -> None:
    saved = saved_dense(tmp_path, *model_and_optimizer(1))
    assert "dense/model/0.weight" in saved.index
    assert "dense/model/1.running_mean" in saved.index
    assert saved.names("dense/optimizer/exp_avg/") == sorted(name for name, _ in net().named_parameters())


def test_a_parameter_without_state_starts_afresh(tmp_path: Path) -> None:
    """The last layer had no gradient yet when the checkpoint was made: its counter is not the one that loading would make up."""
    first, optimizer = model_and_optimizer(1, steps=0)
    nn.Sequential(*list(first)[:2])(torch.randn(5, 3)).square().sum().backward()  # type: ignore[call-overload]
    optimizer.step()
    saved = saved_dense(tmp_path, first, optimizer)
    assert "dense/optimizer/step/2.weight" not in saved.index
    second, other = model_and_optimizer(2, steps=0)
    restore.restore_dense(second, saved, other)
    counts = {name: float(other.state[p]["step"]) for name, p in second.named_parameters() if p in other.state}
    assert counts == {"0.weight": 1.0, "0.bias": 1.0, "1.weight": 1.0, "1.bias": 1.0}


def test_case_E10_weights_alone_need_no_optimiser(tmp_path: Path) -> None:
    first, optimizer = model_and_optimizer(1)
    second, _ = model_and_optimizer(2)
    restore.restore_dense(second, saved_dense(tmp_path, first, optimizer))
    assert_same_weights(first, second)


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved = saved_dense(tmp_path, *model_and_optimizer(1))
    with pytest.raises(RequestError, match="7 weights have other names or shapes"):
        restore.restore_dense(nn.Sequential(nn.Linear(3, 4)), saved)
    other = nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(RequestError, match=r"1 weights .* the first is '0.weight'"):
        restore.restore_dense(other, saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_state_that_is_no_tensor_is_refused() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            """Nothing to set."""

    with pytest.raises(PluginError, match="_extra_state of the state to save: it is a int"):
        restore.model_tensors(Odd(1, 1))


def test_averages_come_back(tmp_path: Path) -> None:
    model, _ = model_and_optimizer(1)
    average = AveragedWeights(model, 0.5)
    nn.init.zeros_(model.get_parameter("0.weight"))
    average.update()
    saved = written(tmp_path, dense_pieces(restore.average_tensors(average.state_dict()), leads=True))
    other = AveragedWeights(model_and_optimizer(2)[0], 0.5)
    restore.restore_average(other.state_dict(), saved)
    assert all(torch.equal(tensor, average.state_dict()[name]) for name, tensor in other.state_dict().items())


# ---- tables -----------------------------------------------------------------------------------------------------------------------------


def engine(name: str = "item", rows: int = 5, rule: str = "rowwise_adagrad", seed: int = 1) -> TorchEmbeddings:
    table = TableSpec(name=name, rows=rows, dim=4, features=("f",), init_scale=0.1)
    return TorchEmbeddings([table], SparseOptimizer(name=rule), device=torch.device("cpu"), seed=seed)


def used(tables: TorchEmbeddings) -> TorchEmbeddings:
    """With values in all of its state."""
    for piece in tables.table_slices():
        piece.tensor.uniform_()
    tables.tables_loaded(3)
    return tables


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
def test_case_E01_tables_and_their_state_come_back(tmp_path: Path, rule: str) -> None:
    first, second = used(engine(rule=rule)), engine(rule=rule, seed=2)
    saved = written(tmp_path, table_pieces(first.table_slices()))
    restore.restore_tables(second, saved, updates=3)
    expected, got = (tables.export_tables()["item"] for tables in (first, second))
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, got[name])] == []
    assert second.table_updates() == 3


def test_case_E08_a_rows_adagrad_state_has_one_value(tmp_path: Path) -> None:
    saved = written(tmp_path, table_pieces(used(engine()).table_slices()))
    assert saved.shape("tables/item/state") == (5,)


def test_case_E10_tables_for_evaluation_leave_the_optimiser_alone(tmp_path: Path) -> None:
    """Also when the evaluating engine keeps other state than was saved."""
    first = used(engine())
    saved = written(tmp_path, table_pieces(first.table_slices()))
    second = engine(rule="adam", seed=2)
    restore.restore_tables(second, saved, updates=None)
    state = second.export_tables()["item"]
    assert torch.equal(state["weight"], first.export_tables()["item"]["weight"])
    assert not state["exp_avg"].any()


def test_case_E03_other_tables_sizes_and_rules_are_refused_before_anything_changes(tmp_path: Path) -> None:
    saved = written(tmp_path, table_pieces(used(engine()).table_slices()))
    for other, match in (
        (engine("user"), "they differ in 'item'"),
        (engine(rows=6), r"tables/item/weight of the checkpoint: its shape is \[5, 4\], this model wants \[6, 4\]"),
        (engine(rule="adam"), "tables/item/exp_avg of the checkpoint: it has no 'exp_avg'"),
    ):
        before = other.export_tables()
        with pytest.raises(RequestError, match=match):
            restore.restore_tables(other, saved, updates=1)
        after = other.export_tables()
        assert all(torch.equal(tensor, after[table][name]) for table, state in before.items() for name, tensor in state.items())


class TwoRanks(World):
    """The first of two ranks, whose other one found nothing, or a bad file."""

    other: RunFailed | None = None

    def gather_objects(self, value: object) -> list[object]:
        return [value, self.other]


def test_what_one_rank_finds_all_raise(tmp_path: Path) -> None:
    saved = saved_dense(tmp_path, *model_and_optimizer(1))
    world = TwoRanks(rank=0, size=2)
    restore.verify_together(saved, world)
    bad = RunFailed("checkpoint", "file x is missing", "Restore it.")
    type(world).other = bad
    with pytest.raises(RunFailed, match="file x is missing"):
        restore.verify_together(saved, world)
