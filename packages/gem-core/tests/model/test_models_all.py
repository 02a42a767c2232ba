"""What holds of every model: ``gem``, ``hstu`` and ``dlrm``."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from gem_core.model.crossing import KeyValues
from gem_core.model.dlrm import DlrmModel, DlrmOptions
from gem_core.model.gem import GemModel, GemOptions, GroupStep
from gem_core.model.hstu import HstuModel, HstuOptions
from gem_core.ops.slot import bind_kernels, kernel_slots
from gem_core.spec import DataSchema, KernelRequest

SMALL = {"dim": 8, "heads": 2, "seeds": 2, "queries": 1}
GEM = {
    "dim": 8,
    "tokens": 6,
    "x_sum": 3,
    "sequence": SMALL,
    "features": {"embedding_dim": 8},
    "experts": [{"kind": "wukong", "hidden": [16]}],
    "head": {"hidden": [16]},
}
MODELS: dict[str, tuple[Any, Any]] = {
    "gem": (GemModel, GemOptions.model_validate(GEM)),
    "gem_wide": (
        GemModel,
        GemOptions.model_validate(
            GEM | {"wide": True, "links": True, "sequence": SMALL | {"pffn": "fused", "attention": "block", "block": 4, "pooled_tokens": 3}}
        ),
    ),
    "gem_time": (
        GemModel,
        GemOptions.model_validate(GEM | {"sequence": SMALL | {"rope": "time", "window": 2}, "comp_skip": "pool_first", "layers": 3}),
    ),
    "hstu": (HstuModel, HstuOptions(dim=8, features={"embedding_dim": 8}, wide=True)),
    "dlrm": (DlrmModel, DlrmOptions(dim=8, features={"embedding_dim": 8}, wide=True)),
    "gem_group": (
        GemModel,
        GemOptions.model_validate(
            GEM
            | {
                "features": {"embedding_dim": 4, "numbers": "group", "group_tokens": 2},
                "experts": [{"kind": "wukong", "rank": None}, {"kind": "cross"}, {"kind": "deep"}],
                "ensemble": "concat",
                "head": {"numbers": True, "shared": [8]},
                "sequence": SMALL | {"norm": "layer", "keys_per_token": 1},
            }
        ),
    ),
    "dcn": (DlrmModel, DlrmOptions(dim=8, features={"embedding_dim": 8}, interaction="cross")),
}
LENGTHS = [[3, 2], [0, 1], [9, 5], [1, 0], [4, 4], [0, 0]]
each_model = pytest.mark.parametrize("name", MODELS)
main_models = pytest.mark.parametrize("name", ["gem", "hstu", "dlrm"])


def usable(name: str, schema: DataSchema) -> bool:
    """``gem_time`` asks for event times and is only for schemas with groups."""
    return name != "gem_time" or bool(schema.sequences)


@each_model
@pytest.mark.parametrize("schema", ["full", "one_group", "sequences_only", "rows_only", "numbers_only", "vector_only"])
def test_case_B22_every_part_of_a_schema_trains(kit: ModuleType, name: str, schema: str) -> None:
    cls, options = MODELS[name]
    data = kit.SCHEMAS[schema]
    if not usable(name, data):
        pytest.skip("asks for event times")
    batch = kit.make_batch(data, [row[: len(data.sequences)] for row in LENGTHS])
    model, tables = kit.make_model(cls, data, options)
    logits = model.train()(batch, tables(batch.ids))
    assert list(logits) == [task.name for task in data.tasks]
    assert all(logit.shape == (batch.rows,) and logit.dtype == torch.float32 for logit in logits.values())
    kit.bce(logits, batch).backward()
    dead = [key for key, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert dead == []


@each_model
def test_gradient_reaches_every_parameter(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    model, tables = kit.make_model(cls, kit.FULL, options)
    batch = kit.make_batch(kit.FULL, [[9, 5]] * 12)
    kit.bce(model(batch, tables(batch.ids)), batch).backward()
    zero = [key for key, p in [*model.named_parameters(), *tables.named_parameters()] if p.grad is None or not bool((p.grad != 0).any())]
    assert zero == []


@each_model
def test_case_I13_overfits_a_tiny_batch(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    data = kit.SCHEMAS["one_group"]
    batch = kit.make_batch(data, [[3], [0], [9], [1]] * 4, seed=3)
    model, tables = kit.make_model(cls, data, options)
    model.train()
    optimizer = torch.optim.Adam([*model.parameters(), *tables.parameters()], lr=0.02)
    first = float("nan")
    for step in range(40):
        loss = kit.bce(model(batch, tables(batch.ids)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.item() if step == 0 else first
    assert first > 0.4
    assert loss.item() < 0.1  # the entropy of these labels is near 0.69


@each_model
def test_case_B25_all_histories_empty(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    batch = kit.make_batch(kit.FULL, [[0, 0]] * 4)
    model, tables = kit.make_model(cls, kit.FULL, options)
    loss = kit.bce(model(batch, tables(batch.ids)), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@each_model
def test_batch_without_rows(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    batch = kit.make_batch(kit.FULL, [])
    model, tables = kit.make_model(cls, kit.FULL, options)
    logits = model(batch, tables(batch.ids))
    assert all(logit.shape == (0,) for logit in logits.values())
    sum(logit.sum() for logit in logits.values()).backward()
    assert all(p.grad is not None and not bool(p.grad.any()) for p in model.parameters())
    assert model.flops(batch) == 0


@each_model
@settings(max_examples=8, deadline=None, derandomize=True)
@given(rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=5), data=st.data())
def test_a_row_does_not_depend_on_its_batch(kit: ModuleType, name: str, rows: list[tuple[int, int]], data: st.DataObject) -> None:
    cls, options = MODELS[name]
    batch = kit.make_batch(kit.FULL, rows)
    model, tables = kit.make_model(cls, kit.FULL, options)
    order = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, max_size=6))
    part = kit.take_rows(kit.FULL, batch, order)
    with torch.no_grad():
        whole, some = model(batch, tables(batch.ids)), model(part, tables(part.ids))
    for task, logit in whole.items():
        torch.testing.assert_close(some[task], logit[order], rtol=1e-4, atol=1e-5)


def test_the_row_check_sees_a_fault(kit: ModuleType) -> None:
    """Planted fault: events of one row handed to its neighbour."""
    cls, options = MODELS["gem"]
    batch = kit.make_batch(kit.FULL, [[3, 2], [3, 2]])
    model, tables = kit.make_model(cls, kit.FULL, options)
    other = kit.take_rows(kit.FULL, batch, [1, 0])
    batch.event_time.update(other.event_time)
    part = kit.take_rows(kit.FULL, kit.make_batch(kit.FULL, [[3, 2], [3, 2]]), [0])
    with torch.no_grad():
        whole, some = model(batch, tables(batch.ids)), model(part, tables(part.ids))
    assert (whole["ctr"][0] - some["ctr"][0]).abs() > 1e-5


@each_model
def test_bf16_autocast_stays_close(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    batch = kit.make_batch(kit.FULL, LENGTHS)
    model, tables = kit.make_model(cls, kit.FULL, options)
    exact = model(batch, tables(batch.ids))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(batch, tables(batch.ids))
        loss = kit.bce(rounded, batch)
    loss.backward()
    for task, logit in exact.items():
        assert rounded[task].dtype == torch.float32
        torch.testing.assert_close(rounded[task], logit, rtol=0.1, atol=0.1)
        assert not torch.equal(rounded[task], logit)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())


@each_model
def test_float64(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    batch = kit.make_batch(kit.FULL, LENGTHS)
    model, tables = kit.make_model(cls, kit.FULL, options)
    single = model(batch, tables(batch.ids))
    wide = kit.make_batch(kit.FULL, LENGTHS)
    wide.dense.update({key: value.double() for key, value in wide.dense.items()})
    wide.event_dense.update({key: value.double() for key, value in wide.event_dense.items()})
    double = model.double()(wide, tables.double()(wide.ids))
    for task, logit in single.items():
        assert double[task].dtype == torch.float64
        torch.testing.assert_close(double[task].float(), logit, rtol=1e-4, atol=1e-4)


@each_model
def test_one_seed_gives_one_model(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    batch = kit.make_batch(kit.FULL, LENGTHS)
    runs = []
    for seed in (5, 5, 6):
        model, tables = kit.make_model(cls, kit.FULL, options, seed)
        runs.append(model(batch, tables(batch.ids))["ctr"])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@each_model
def test_made_on_meta_then_reset(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    batch = kit.make_batch(kit.FULL, LENGTHS)
    outputs = []
    for _ in range(2):
        with torch.device("meta"):
            model = cls(kit.FULL, options)
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else -1)
        torch.manual_seed(0)
        model.reset_parameters()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        tables = kit.Lookup(cls.tables(kit.FULL, options))
        outputs.append(model.eval()(batch, tables(batch.ids))["cvr"])
    assert torch.equal(*outputs)


@each_model
def test_reset_gives_the_scales_of_a_new_model(kit: ModuleType, name: str) -> None:
    """A forgotten or doubled initialisation would change the spread of some parameter."""
    cls, options = MODELS[name]
    model, _ = kit.make_model(cls, kit.FULL, options)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for p in model.parameters():
        p.data.fill_(1e3)
    model.reset_parameters()
    for key, p in model.named_parameters():
        if p.numel() >= 64:
            assert 0.5 < float(p.detach().std() / before[key].std().clamp(min=1e-9)) < 2.0 or not before[key].std()
        assert float(p.detach().abs().max()) < 100, key


@each_model
def test_flops_match_torchs_count_without_padding(kit: ModuleType, name: str) -> None:
    """With rows of equal, full length and no window, the padded reference computes exactly the valid elements."""
    cls, options = MODELS[name]
    if name in ("gem_wide", "gem_time", "hstu"):
        pytest.skip("masked pairs: counted by hand in the model's own tests")
    batch = kit.make_batch(kit.FULL, [[9, 5]] * 3)
    model, tables = kit.make_model(cls, kit.FULL, options)
    embedded = {key: value.detach() for key, value in tables(batch.ids).items()}
    with FlopCounterMode(display=False) as counter:
        model(batch, embedded)
    added = sum(2 * batch.rows * m.shape[0] * m.weight[..., 0].numel() * m.added for m in model.modules() if isinstance(m, KeyValues))
    asking = [
        (m.ask.weight.shape[0], m.pool.tokens, m.pool.seed_count, m.dim) for m in model.modules() if isinstance(m, GroupStep) and m.ask and m.pool
    ]
    added += sum(2 * batch.rows * queries * (tokens - seeds - queries) * dim for queries, tokens, seeds, dim in asking)  # zeros, for the targets
    assert model.flops(batch) == counter.get_total_flops() - added


@each_model
def test_flops_count_valid_elements_only(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    model, _ = kit.make_model(cls, kit.FULL, options)
    rows = [[3, 2], [0, 1], [9, 5]]
    whole = model.flops(kit.make_batch(kit.FULL, rows))
    assert whole == sum(model.flops(kit.make_batch(kit.FULL, [row])) for row in rows)
    assert isinstance(whole, int)


@main_models
def test_kernel_requests_are_what_bound_slots_ask_for(kit: ModuleType, name: str) -> None:
    """Bound slots refuse a call that uses a feature they did not declare, so a pass means that the requests are complete."""
    cls, options = MODELS[name]
    model, tables = kit.make_model(cls, kit.FULL, options)
    batch = kit.make_batch(kit.FULL, LENGTHS)
    free = model(batch, tables(batch.ids))
    where = {"device": "cpu", "dtype": "fp32", "arch": None, "backward": True}
    requests = model.kernel_requests(**where)
    assert all(isinstance(request, KernelRequest) for request in requests)
    assert len(set(requests)) == len(requests)
    assert {request.op for request in requests} == {slot.op for slot in kernel_slots(model)}
    bound = bind_kernels(model, **where)
    assert {choice.backend for choice in bound} <= {"reference"}
    for task, logit in model(batch, tables(batch.ids)).items():
        torch.testing.assert_close(logit, free[task])


@each_model
def test_case_H25_tasks_have_their_own_outputs(kit: ModuleType, name: str) -> None:
    cls, options = MODELS[name]
    model, tables = kit.make_model(cls, kit.FULL, options)
    batch = kit.make_batch(kit.FULL, LENGTHS)
    logits = model(batch, tables(batch.ids))
    assert not torch.allclose(logits["ctr"], logits["cvr"])
    model.zero_grad()
    logits["cvr"].sum().backward()
    first, second = model.heads.networks
    assert all(p.grad is None or not bool(p.grad.any()) for p in first.parameters())
    assert any(bool(p.grad.any()) for p in second.parameters())
