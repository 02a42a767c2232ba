"""The loss and one optimiser step: weights, masks, conditions, accumulation, and stopping before anything bad is applied."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gem_train_fakes
import pytest
import torch
from gem_train_fakes import FakeSource, Probe, ProbeOptions
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from gem_core.batch import Batch
from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.builtin.precision import Fp32
from gem_core.spec import DataSchema, DelaysReduction, HoldsWeights, PluginError, RequestError, RunFailed, SparseOptimizer, Task
from gem_core.train.evaluate import evaluate
from gem_core.train.feed import Feed, Work
from gem_core.train.labels import check_batch, check_tasks, observed, weight_sums
from gem_core.train.metrics import StreamMetrics
from gem_core.train.optim import AveragedWeights, adamw
from gem_core.train.step import Learner, batch_loss, forward, settle, train_step
from gem_core.train.world import World

CPU = torch.device("cpu")
CTR, CVR = Task(name="ctr"), Task(name="cvr", condition="ctr", weight=0.5)


def learner_of(source: FakeSource, *, model: nn.Module | None = None, clip: float = 0.0, sgd: bool = False, decay: float = 0.0) -> Learner:
    """A learner over the fakes whose first weights do not depend on the caller."""
    torch.manual_seed(7)
    schema, options = source.schema(), ProbeOptions()
    model = model or Probe(schema, options)
    embeddings = TorchEmbeddings(Probe.tables(schema, options), SparseOptimizer(name="sgd" if sgd else "rowwise_adagrad", lr=0.1), device=CPU, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if sgd else adamw(model, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    return Learner(
        world=World(),
        tasks=schema.tasks,
        model=model,
        dense=model,
        embeddings=embeddings,
        precision=Fp32(),
        optimizer=optimizer,
        dense_lr=0.1,
        sparse_lr=0.1,
        clip_norm=clip,
        average=AveragedWeights(model, decay) if decay else None,
        stream=StreamMetrics(schema.tasks, CPU),
    )


def work_of(source: FakeSource, *rows: Tensor) -> Work:
    """One step over micro-batches of these rows."""
    feed = Feed(iter([source.batch(at) for at in rows]), World(), source.schema(), flops=lambda batch: batch.rows, accumulate=len(rows))
    return next(iter(feed))


def state_of(learner: Learner) -> dict[str, Tensor]:
    tables = {f"table {name}": table["weight"] for name, table in learner.embeddings.export_tables().items()}
    return {**{name: p.detach().clone() for name, p in learner.model.named_parameters()}, **tables}


def plain_loss(logits: Mapping[str, Tensor], batch: Batch, weights: Tensor) -> Tensor:
    """The loss as the documentation writes it, row by row."""
    total = torch.zeros(())
    for task, denominator in zip((CTR, CVR), weights.tolist(), strict=True):
        part = torch.zeros(())
        for i in range(batch.rows):
            if task.condition is None or batch.labels[task.condition][i] == 1:
                w = batch.weights[task.name][i] if task.name in batch.weights else 1.0
                part = part + w * bce(logits[task.name][i], batch.labels[task.name][i])
        total = total + task.weight * part / denominator
    return total


class Holding(Fp32):
    """A recipe that is told of new weights: it notes the first parameter at that moment."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.model: nn.Module | None = None

    def weights_changed(self) -> None:
        assert self.model is not None
        self.seen.append(next(self.model.parameters()).detach().clone())


def test_a_recipe_that_holds_weights_is_told_of_new_ones(source: FakeSource) -> None:
    """Once a step, of all micro-batches, after the optimiser has moved; and on both sides of an evaluation on averages."""
    learner = learner_of(source, decay=0.5)
    learner.precision = recipe = Holding()
    recipe.model = learner.model
    assert isinstance(recipe, HoldsWeights)
    before = next(learner.model.parameters()).detach().clone()
    train_step(learner, work_of(source, torch.arange(4), torch.arange(4, 8)), step=0, lr_factor=1.0)
    (moved,) = recipe.seen
    assert not torch.equal(moved, before)
    assert torch.equal(moved, next(learner.model.parameters()))
    assert learner.average is not None
    evaluate(learner.dense, learner.embeddings, recipe, source, learner.world, batch_size=8, weights=learner.average.in_place)
    assert torch.equal(recipe.seen[1], next(iter(learner.average.state_dict().values())))
    assert not torch.equal(recipe.seen[1], moved)
    assert torch.equal(recipe.seen[2], moved)


class Delaying:
    """A strategy that notes what happens between the beginning and the end of each micro-batch."""

    def __init__(self, learner: Learner) -> None:
        self.seen: list[str] = []
        learner.model.register_forward_pre_hook(lambda *_: self.seen.append("forward"))
        next(learner.model.parameters()).register_hook(lambda _: self.seen.append("backward"))
        learner.optimizer.register_step_pre_hook(lambda *_: self.seen.append("update"))

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.seen.append("last begins" if last else "begins")
        yield
        self.seen.append("ends")


def test_a_strategy_is_told_which_of_several_micro_batches_is_the_last(source: FakeSource) -> None:
    """Around forward and backward of each; a step of one micro-batch has nothing to put off."""
    learner = learner_of(source)
    delaying = Delaying(learner)
    assert isinstance(delaying, DelaysReduction)
    learner.delaying = [delaying]
    train_step(learner, work_of(source, torch.arange(4), torch.arange(4, 8)), step=0, lr_factor=1.0)
    within = ["forward", "backward", "ends"]
    assert delaying.seen == ["begins", *within, "last begins", *within, "update"]
    delaying.seen.clear()
    train_step(learner, work_of(source, torch.arange(4)), step=1, lr_factor=1.0)
    assert delaying.seen == ["forward", "backward", "update"]


# ---- which rows count -------------------------------------------------------------------------------------------------------------------


def test_a_condition_needs_an_observed_positive(source: FakeSource) -> None:
    batch = source.batch(torch.arange(4))
    batch = replace(
        batch,
        labels={"ctr": torch.tensor([1.0, 0.0, 1.0, 1.0]), "cvr": torch.ones(4)},
        masks={"ctr": torch.tensor([True, True, False, True]), "cvr": torch.tensor([True, True, True, False])},
    )
    got = observed(batch, (CTR, CVR))
    assert got["ctr"].tolist() == [True, True, False, True]
    assert got["cvr"].tolist() == [True, False, False, False]
    assert weight_sums(replace(batch, weights={"cvr": torch.full((4,), 3.0)}), (CTR, CVR)).tolist() == [3.0, 3.0]


def test_conditions_chain() -> None:
    tasks = (CTR, CVR, Task(name="again", condition="cvr"))
    batch = FakeSource().batch(torch.arange(3))
    batch = replace(batch, labels={"ctr": torch.tensor([1.0, 0.0, 1.0]), "cvr": torch.tensor([1.0, 1.0, 0.0]), "again": torch.ones(3)}, weights={})
    assert observed(batch, tasks)["again"].tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((), "at least one task"),
        ((CTR, CTR), "its own name"),
        ((Task(name="a", condition="b"),), "condition 'b'"),
        ((Task(name="a", condition="b"), Task(name="b", condition="a")), "condition"),
        ((Task(name="a", condition="a"),), "condition 'a'"),
        ((Task(name="a", weight=-1.0),), "weight is -1"),
        ((Task(name="a", weight=float("nan")),), "weight is nan"),
    ],
)
def test_unsound_tasks_are_refused(tasks: Sequence[Task], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_tasks(tasks)


def test_a_batch_must_have_every_label(source: FakeSource) -> None:
    batch = source.batch(torch.arange(3))
    check_batch(batch, source.schema().tasks)
    with pytest.raises(RequestError, match="label 'cvr': it is missing"):
        check_batch(replace(batch, labels={"ctr": batch.labels["ctr"]}), source.schema().tasks)
    with pytest.raises(RequestError, match=r"its shape is \[2\] in a batch of 3 rows"):
        check_batch(replace(batch, labels={**batch.labels, "cvr": torch.zeros(2)}), source.schema().tasks)


# ---- the loss ---------------------------------------------------------------------------------------------------------------------------


def test_loss_is_the_documented_sum(source: FakeSource) -> None:
    batch = source.batch(torch.arange(12))
    logits = {name: torch.randn(12) for name in ("ctr", "cvr")}
    weights = weight_sums(batch, (CTR, CVR))
    loss, sums = batch_loss(logits, batch, (CTR, CVR), weights)
    assert float(loss) == pytest.approx(float(plain_loss(logits, batch, weights)), rel=1e-6)
    assert sums[:, 0].tolist() == weights.tolist()


def test_case_H24_task_weights_keep_their_ratio(source: FakeSource) -> None:
    """Weights 1 and 2 on the same labels and logits: the second task's loss and gradient are twice the first's."""
    batch = source.batch(torch.arange(8))
    batch = replace(batch, labels={"a": batch.labels["ctr"], "b": batch.labels["ctr"]}, weights={})
    tasks = (Task(name="a", weight=1.0), Task(name="b", weight=2.0))
    logits = {"a": torch.linspace(-1, 1, 8).requires_grad_(), "b": torch.linspace(-1, 1, 8).requires_grad_()}
    both, _ = batch_loss(logits, batch, tasks, weight_sums(batch, tasks))
    first, _ = batch_loss({"a": logits["a"]}, batch, tasks[:1], weight_sums(batch, tasks[:1]))
    both.backward()  # type: ignore[no-untyped-call]
    assert both.item() == pytest.approx(3 * first.item())
    assert torch.allclose(logits["b"].grad, 2 * logits["a"].grad)  # type: ignore[operator, arg-type]


def test_masked_labels_change_nothing(source: FakeSource) -> None:
    batch = source.batch(torch.arange(6))
    mask = torch.tensor([True, False, True, True, False, True])
    logits = {"ctr": torch.randn(6, requires_grad=True)}
    seen = []
    for garbage in (0.0, float("nan"), -1.0):
        label = torch.where(mask, batch.labels["ctr"], garbage)
        changed = replace(batch, labels={"ctr": label}, masks={"ctr": mask})
        loss, _ = batch_loss(logits, changed, (CTR,), weight_sums(changed, (CTR,)))
        (gradient,) = torch.autograd.grad(loss, logits["ctr"])
        seen.append((loss.item(), gradient.tolist()))
        assert gradient[~mask].eq(0).all()
    assert seen[0] == seen[1] == seen[2]


def test_a_task_without_rows_adds_nothing_but_stays_in_the_graph(source: FakeSource) -> None:
    batch = source.batch(torch.arange(5))
    batch = replace(batch, labels={"ctr": torch.zeros(5), "cvr": torch.zeros(5)})
    logits = {"ctr": torch.zeros(5, requires_grad=True), "cvr": torch.zeros(5, requires_grad=True)}
    weights = weight_sums(batch, (CTR, CVR))
    assert weights[1] == 0
    loss, _ = batch_loss(logits, batch, (CTR, CVR), weights)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(0.6931, abs=1e-4)
    assert logits["cvr"].grad is not None
    assert logits["cvr"].grad.eq(0).all()


def test_a_batch_without_rows_has_loss_zero_and_a_backward(source: FakeSource) -> None:
    learner = learner_of(source)
    batch = source.batch(torch.arange(0))
    loss, sums = batch_loss(forward(learner.dense, learner.embeddings, batch, learner.tasks), batch, learner.tasks, torch.tensor([4.0, 2.0]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == 0.0
    assert sums.eq(0).all()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in learner.model.parameters())


def test_ranks_losses_add_up_to_the_global_one(source: FakeSource) -> None:
    learner = learner_of(source)
    whole = source.batch(torch.arange(11))
    weights = weight_sums(whole, learner.tasks)

    def loss(batch: Batch) -> float:
        return float(batch_loss(forward(learner.dense, learner.embeddings, batch, learner.tasks), batch, learner.tasks, weights)[0])

    parts = [loss(source.batch(torch.arange(0, 4))), loss(source.batch(torch.arange(4, 11)))]
    assert sum(parts) == pytest.approx(loss(whole), rel=1e-6)


class Wrong(nn.Module):
    """Answers in another shape, or leaves a task out."""

    def __init__(self, answer: Callable[[int], dict[str, Tensor]]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, batch: Batch, embedded: Any) -> dict[str, Tensor]:
        return self.answer(batch.rows)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda n: {"ctr": torch.zeros(n)}, "'cvr': they are missing"),
        (lambda n: {"ctr": torch.zeros(n), "cvr": torch.zeros(n, 1)}, r"shape is \[3, 1\] for 3 rows"),
    ],
)
def test_a_models_wrong_answer_is_named(source: FakeSource, answer: Callable[[int], dict[str, Tensor]], message: str) -> None:
    learner = learner_of(source)
    with pytest.raises(PluginError, match=message):
        forward(Wrong(answer), learner.embeddings, source.batch(torch.arange(3)), learner.tasks)


# ---- the step ---------------------------------------------------------------------------------------------------------------------------


def test_case_H26_gradients_do_not_add_up_over_steps(source: FakeSource) -> None:
    """With a learning rate of zero two steps on one batch leave the gradient of one."""
    learner, work = learner_of(source, sgd=True), work_of(source, torch.arange(8))
    first = train_step(learner, work, step=1, lr_factor=0.0)
    gradients = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    second = train_step(learner, work, step=2, lr_factor=0.0)
    assert first == second
    assert first.grad_norm == second.grad_norm
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, learner.model.parameters(), strict=True) if p.grad is not None)


def test_case_H26_planted_fault_without_zero_grad_goes_red(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, work = learner_of(source, sgd=True), work_of(source, torch.arange(8))
    monkeypatch.setattr(learner.optimizer, "zero_grad", lambda: None)
    first = train_step(learner, work, step=1, lr_factor=0.0)
    second = train_step(learner, work, step=2, lr_factor=0.0)
    assert second.grad_norm == pytest.approx(2 * first.grad_norm)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_case_H27_every_parameter_moves_and_accumulation_is_one_large_batch(source: FakeSource, parts: int) -> None:
    at = torch.arange(16)
    whole, split = learner_of(source), learner_of(source)
    before = state_of(whole)
    one = train_step(whole, work_of(source, at), step=1, lr_factor=1.0)
    many = train_step(split, work_of(source, *at.chunk(parts)), step=1, lr_factor=1.0)
    assert all(not torch.equal(before[name], value) for name, value in state_of(whole).items())
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for name, value in state_of(split).items():
        assert torch.allclose(value, state_of(whole)[name], atol=1e-5), name


def test_accumulation_weighs_uneven_micro_batches_by_their_rows(source: FakeSource) -> None:
    whole, split = learner_of(source, sgd=True), learner_of(source, sgd=True)
    at = torch.arange(16)
    train_step(whole, work_of(source, at), step=1, lr_factor=1.0)
    train_step(split, work_of(source, at[:3], at[3:4], at[4:]), step=1, lr_factor=1.0)
    for name, value in state_of(split).items():
        assert torch.allclose(value, state_of(whole)[name], atol=1e-6), name


def test_learning_rates_follow_the_factor(source: FakeSource) -> None:
    """Under SGD half the factor moves everything half as far."""
    start = state_of(learner_of(source, sgd=True))
    moved = []
    for factor in (1.0, 0.5):
        learner = learner_of(source, sgd=True)
        train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=factor)
        moved.append({name: value - start[name] for name, value in state_of(learner).items()})
    for name, step in moved[0].items():
        assert torch.allclose(0.5 * step, moved[1][name], atol=1e-6), name


def test_case_F11_clipping_on_a_cpu_only_machine(source: FakeSource) -> None:
    learner = learner_of(source, clip=1e-3)
    result = train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=0.0)
    clipped = torch.stack([p.grad.norm() for p in learner.model.parameters() if p.grad is not None]).norm()
    assert result.grad_norm > 1e-2
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)


def test_case_D20_the_reported_norm_is_that_of_the_gradients(source: FakeSource) -> None:
    learner = learner_of(source)
    result = train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=0.0)
    exact = sum(float(p.grad.double().square().sum()) for p in learner.model.parameters() if p.grad is not None) ** 0.5
    assert result.grad_norm == pytest.approx(exact, rel=1e-5)


def test_averaged_weights_trail_and_come_back(source: FakeSource) -> None:
    learner = learner_of(source, decay=0.75)
    average = learner.average
    assert average is not None
    expected = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for step in range(3):
        train_step(learner, work_of(source, torch.arange(8)), step=step + 1, lr_factor=1.0)
        expected = {name: 0.75 * expected[name] + 0.25 * p.detach() for name, p in learner.model.named_parameters()}
    live = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    with average.in_place():
        assert all(torch.allclose(p, expected[name]) for name, p in learner.model.named_parameters())
    assert all(torch.equal(p, live[name]) for name, p in learner.model.named_parameters())


# ---- what is not finite -----------------------------------------------------------------------------------------------------------------


class Poison(nn.Module):
    """Gives NaN in forward, or a NaN gradient from a finite forward."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.backward_only = backward

    def forward(self, x: Tensor) -> Tensor:
        if self.backward_only:
            return x + 0 * torch.sqrt(torch.abs(x.detach() - x))  # the square root's gradient at 0 is infinite, and 0 * inf is NaN
        return x * float("nan")


def test_a_nan_loss_names_step_and_module_and_changes_nothing(source: FakeSource) -> None:
    torch.manual_seed(7)
    model = Probe(source.schema(), ProbeOptions())
    model.drop = Poison(backward=False)  # type: ignore[assignment]
    learner = learner_of(source, model=model)
    before = state_of(learner)
    with pytest.raises(RunFailed, match=r"training step 41: the loss is not finite: module 'drop' \(Poison\) gives a non-finite output") as caught:
        train_step(learner, work_of(source, torch.arange(8)), step=41, lr_factor=1.0)
    assert caught.value.exit_code == 1
    assert all(torch.equal(value, before[name]) for name, value in state_of(learner).items())


def test_a_nan_parameter_is_named_before_the_modules_it_spoils(source: FakeSource) -> None:
    learner = learner_of(source)
    with torch.no_grad():
        learner.model.get_parameter("last.bias")[0] = float("inf")
    with pytest.raises(RunFailed, match=r"parameter 'last.bias' is not finite"):
        train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=1.0)


def test_a_nan_in_the_data_is_named_as_such() -> None:
    source = FakeSource(nan_row=3)
    with pytest.raises(RunFailed, match="the batch holds a non-finite value in dense feature 'x'"):
        train_step(learner_of(source), work_of(source, torch.arange(8)), step=1, lr_factor=1.0)


def test_a_nan_in_a_table_is_named(source: FakeSource) -> None:
    learner = learner_of(source)
    tables = learner.embeddings.export_tables()
    tables["item"]["weight"].fill_(float("nan"))
    learner.embeddings.import_tables(tables)
    with pytest.raises(RunFailed, match="tables give a non-finite vector for feature 'item'"):
        train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=1.0)


def test_case_G05_a_nan_gradient_of_a_finite_loss_names_the_parameters(source: FakeSource) -> None:
    torch.manual_seed(7)
    model = Probe(source.schema(), ProbeOptions())
    model.drop = Poison(backward=True)  # type: ignore[assignment]
    learner = learner_of(source, model=model)
    before = state_of(learner)
    with pytest.raises(RunFailed, match=r"the gradients: not finite in 4 parameters: first.weight, first.bias, norm.weight, norm.bias"):
        train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=1.0)
    assert all(torch.equal(value, before[name]) for name, value in state_of(learner).items())


def fused(learner: Learner) -> Learner:
    """With an optimiser that is told of spoilt gradients on the device, as on a GPU."""
    learner.optimizer = torch.optim.AdamW(learner.model.parameters(), lr=learner.dense_lr, fused=True)
    return learner


def test_case_G05_gradients_that_are_looked_at_late_have_changed_nothing(source: FakeSource) -> None:
    torch.manual_seed(7)
    model = Probe(source.schema(), ProbeOptions())
    model.drop = Poison(backward=True)  # type: ignore[assignment]
    learner, work = fused(learner_of(source, model=model)), work_of(source, torch.arange(8))
    before = [p.detach().clone() for p in model.parameters()]
    result = train_step(learner, work, step=1, lr_factor=1.0)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    with pytest.raises(RunFailed, match=r"the gradients: not finite in 4 parameters: first.weight"):
        train_step(learner, work, step=2, lr_factor=1.0)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    with pytest.raises(RunFailed, match="not finite in 4 parameters"):
        _ = result.grad_norm


def test_settling_looks_once(source: FakeSource) -> None:
    torch.manual_seed(7)
    model = Probe(source.schema(), ProbeOptions())
    model.drop = Poison(backward=True)  # type: ignore[assignment]
    learner = fused(learner_of(source, model=model))
    train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=1.0)
    with pytest.raises(RunFailed, match="not finite in 4 parameters"):
        settle(learner)
    settle(learner)


class AtOnce(nn.Module):
    """Engine whose tables change in backward: counts the gradients that reach them."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.reached = inner, 0

    def forward(self, ids: Any) -> dict[str, Tensor]:
        vectors: dict[str, Tensor] = self.inner(ids)
        return {name: _Counted.apply(value, self) for name, value in vectors.items()}

    def __getattr__(self, name: str) -> Any:
        if name == "updates_in_step":
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, engine: AtOnce) -> Tensor:  # type: ignore[override]
        ctx.engine = engine
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.engine.reached += 1
        return gradient, None


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_nan_loss_is_seen_before_tables_that_change_in_backward(source: FakeSource, spoilt: bool) -> None:
    torch.manual_seed(7)
    model = Probe(source.schema(), ProbeOptions())
    if spoilt:
        model.drop = Poison(backward=False)  # type: ignore[assignment]
    learner = learner_of(source, model=model)
    learner.embeddings = engine = AtOnce(learner.embeddings)  # type: ignore[assignment]
    if not spoilt:
        train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=1.0)
        assert engine.reached > 0
        return
    with pytest.raises(RunFailed, match=r"training step 1: the loss is not finite: module 'drop'"):
        train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=1.0)
    assert engine.reached == 0


def test_training_metrics_gather_in_the_step(source: FakeSource) -> None:
    learner = learner_of(source)
    result = train_step(learner, work_of(source, torch.arange(8)), step=1, lr_factor=1.0)
    window = learner.stream.read(World(), close_window=False)["window"]
    weighted = (window["ctr"]["log_loss"] or 0) + 0.5 * (window["cvr"]["log_loss"] or 0)
    assert weighted == pytest.approx(result.loss, rel=1e-6)


def test_the_schema_of_the_fakes_is_what_the_tests_assume(source: FakeSource) -> None:
    schema: DataSchema = source.schema()
    assert schema.tasks == (CTR, CVR)
    assert schema.dense[0].width == gem_train_fakes.WIDTH
