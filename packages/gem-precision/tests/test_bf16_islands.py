"""The recipe on whole models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from gem_core.spec import RequestError
from gem_core.spec.kernels import DTYPES
from gem_precision.recipes.bf16_islands import Bf16Islands
from gem_precision.recipes.low_precision import fp8_square

UNIX_TIME, DAY = 1.65e9, 86_400.0


def recipe(**options: Any) -> Bf16Islands:
    return Bf16Islands(**{"cpu": "bf16", **options})


@pytest.fixture
def matmul_switch() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32_is_asked_for_by_name_on_a_gpu_alone(matmul_switch: None, kit: Any) -> None:
    for options, device, wanted in (
        ({}, "cuda", False),
        ({"tf32": True}, "cuda", True),
        ({}, "cpu", True),
        ({"tf32": True}, "cpu", False),
    ):
        for made in (recipe(**options), fp8_square(**options)):
            torch.backends.cuda.matmul.allow_tf32 = wanted if device == "cpu" else not wanted
            made.prepare(nn.Sequential(nn.Linear(32, 32)), device)
            assert torch.backends.cuda.matmul.allow_tf32 is wanted


def batch(rows: int = 64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=draw)
    return x, (x.sum(1) + 0.3 * torch.randn(rows, generator=draw) > 0).float()


def losses(model: nn.Module, precision: Bf16Islands, steps: int = 30) -> list[float]:
    optimizer, (x, y) = torch.optim.AdamW(model.parameters(), lr=3e-3), batch()
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        with precision.forward_context("cpu"):
            loss = binary_cross_entropy_with_logits(model(x).float(), y)
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    return values


def bad_gradients(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is None or not bool(torch.isfinite(p.grad).all())]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check_decisions(model: Any, precision: Bf16Islands, called: nn.Module | None = None) -> None:
    """What ran is what was decided."""
    decided = {d.module: d.format for d in precision.prepare(model, "cpu")}
    with precision.forward_context("cpu"):
        (called or model)(batch()[0])
    for name, module in model.named_modules():
        for seen in getattr(module, "seen", ()):
            want = torch.float32 if decided.get(name, decided.get(f"{name}.linear")) == "fp32" else torch.bfloat16
            assert (seen[1] if isinstance(seen, tuple) else seen) == want, name


def test_each_module_computes_in_what_was_decided(model: nn.Module, kit: Any) -> None:
    precision = recipe()
    decided = {d.module: d.format for d in precision.prepare(model, "cpu")}
    with precision.forward_context("cpu"):
        got = kit.outputs.of(model, batch()[0]).dtypes
    for name, number_format in decided.items():
        if number_format == "fp32":
            assert got[name] == torch.float32, name
    assert got["layers.0.mix"] == got["layers.1.fused"] == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"islands": ["layers.0"]}, {"islands": ["*.mix", "*.linear"]}, {"islands": [], "small": 64}])
def test_other_options_hold_their_decisions_too(model: nn.Module, options: dict[str, Any]) -> None:
    check_decisions(model, recipe(**options))


def test_the_check_of_decisions_goes_red_when_an_island_is_lost(model: Any) -> None:
    class Lost(Bf16Islands):
        def prepare(self, model: Any, device_type: str) -> Any:
            decided = super().prepare(model, device_type)
            del model.layers[0].mix.forward
            return decided

    with pytest.raises(AssertionError, match=r"layers\.0\.mix"):
        check_decisions(model, Lost(cpu="bf16", islands=["layers.0.mix"]))


def test_a_model_on_meta_is_prepared_before_it_has_weights(kit: Any, model: nn.Module) -> None:
    with torch.device("meta"):
        late = kit.small()
    precision = recipe()
    precision.prepare(late, "cpu")
    assert all(p.is_meta for p in late.parameters())
    late.to_empty(device="cpu")
    late.load_state_dict(model.state_dict())
    recipe().prepare(model, "cpu")
    with precision.forward_context("cpu"):
        assert torch.equal(late(batch()[0]), model(batch()[0]))


def test_state_dict_names_and_float32_stay(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recipe().prepare(model, "cpu")
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_islands_survive_ddp(model: Any, group: None) -> None:
    precision = recipe(islands=["heads", "layers.0.mix"])
    precision.prepare(model, "cpu")
    wrapped, (x, y) = DistributedDataParallel(model), batch()
    with precision.forward_context("cpu"):
        binary_cross_entropy_with_logits(wrapped(x).float(), y).backward()
    assert model.layers[0].mix.seen == [(torch.float32, torch.float32)]
    assert model.layers[1].mix.seen[0][1] == torch.bfloat16
    assert bad_gradients(model) == []


def test_training_follows_float32(kit: Any) -> None:
    runs = {}
    for name, precision in {"fp32": recipe(cpu="fp32"), "bf16": recipe()}.items():
        torch.manual_seed(3)
        model = kit.small()
        precision.prepare(model, "cpu")
        runs[name] = losses(model, precision)
    assert runs["fp32"][-1] < 0.6 * runs["fp32"][0]
    assert runs["bf16"] != runs["fp32"]
    assert runs["bf16"] == pytest.approx(runs["fp32"], abs=0.02)


def test_everything_an_island_equals_float32_exactly(kit: Any) -> None:
    runs = {}
    for name, precision in {"fp32": recipe(cpu="fp32"), "islands": recipe(islands=["*"])}.items():
        torch.manual_seed(3)
        model = kit.small()
        precision.prepare(model, "cpu")
        runs[name] = losses(model, precision, steps=3)
    assert runs["islands"] == runs["fp32"]


def test_a_star_holds_what_the_model_computes_itself_too(kit: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = kit.spy(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) @ x.t()  # type: ignore[no-any-return]

    for islands, expected in ((["*"], torch.float32), (["part"], torch.bfloat16)):
        model, precision = Outer(), recipe(islands=islands)
        precision.prepare(model, "cpu")
        with precision.forward_context("cpu"):
            assert model(torch.ones(2, 8)).dtype == expected


class Hour(nn.Module):
    """A time feature that goes through a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.age = nn.Linear(1, 16, bias=False)
        nn.init.ones_(self.age.weight)

    def forward(self, seconds: Tensor) -> Tensor:
        out: Tensor = self.age(seconds)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.events = Hour()

    def forward(self, seconds: Tensor) -> Tensor:
        out: Tensor = self.events(seconds)
        return out


def days_apart(**options: Any) -> float:
    """What remains of one day between two times."""
    model, precision = Model(), recipe(small=0, **options)
    precision.prepare(model, "cpu")
    with precision.forward_context("cpu"):
        out = model(torch.tensor([[UNIX_TIME], [UNIX_TIME + DAY]]))
    return float((out[1, 0] - out[0, 0]).detach()) / DAY


def test_case_G06_time_features_keep_the_day() -> None:
    assert days_apart() == pytest.approx(1.0, abs=0.01)


def test_case_G06_planted_fault_without_the_island_the_day_is_lost() -> None:
    assert days_apart(islands=[]) == 0.0


def test_case_G05_every_gradient_of_the_first_step_is_finite(model: Any) -> None:
    precision, (x, y) = recipe(), batch()
    precision.prepare(model, "cpu")
    with precision.forward_context("cpu"):
        loss = binary_cross_entropy_with_logits(model(1e4 * x).float(), y)
    assert bool(torch.isfinite(loss))
    loss.backward()
    assert bad_gradients(model) == []


def test_case_G05_planted_fault_the_check_names_the_tensor(model: Any) -> None:
    precision, (x, y) = recipe(), batch()
    precision.prepare(model, "cpu")
    model.layers[1].mix.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
    with precision.forward_context("cpu"):
        binary_cross_entropy_with_logits(model(x).float(), y).backward()
    assert bad_gradients(model) == ["layers.1.mix.weight"]


def test_case_G09_weights_gradients_and_optimiser_state_stay_float32(model: nn.Module) -> None:
    precision, (x, y) = recipe(), batch()
    precision.prepare(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with precision.forward_context("cpu"):
        binary_cross_entropy_with_logits(model(x).float(), y).backward()
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}


def test_case_G09_small_updates_reach_float32_weights_and_are_lost_in_bf16() -> None:
    """An update of 1e-4 on a weight of 1: the reason for float32 master weights."""
    weights = {dtype: torch.ones(1, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    for weight in weights.values():
        for _ in range(250):
            weight.sub_(1e-4)
    assert float(weights[torch.float32]) == pytest.approx(0.975, abs=1e-4)
    assert float(weights[torch.bfloat16]) == 1.0


def test_on_a_cpu_everything_is_float32_by_default_and_says_why(model: Any) -> None:
    precision = Bf16Islands()
    decided = precision.prepare(model, "cpu")
    assert {d.format for d in decided} == {"fp32"}
    assert all("CPU" in d.reason for d in decided)
    assert precision.compute_dtype() == "fp32"
    with precision.forward_context("cpu"):
        model(batch()[0])
    assert model.layers[0].mix.seen == [(torch.float32, torch.float32)]


def test_a_wrong_pattern_is_an_error_on_a_cpu_too(model: nn.Module) -> None:
    with pytest.raises(RequestError, match="no module has such a name"):
        Bf16Islands(islands=["tower.*"]).prepare(model, "cpu")


def test_what_it_computes_in_is_known_once_it_knows_the_device() -> None:
    with pytest.raises(RequestError, match="Call prepare first"):
        Bf16Islands().compute_dtype()


@pytest.mark.parametrize(("device", "expected"), [("cuda", "bf16"), ("cpu", "fp32")])
def test_the_run_says_where_it_computes_whatever_the_machine_has(monkeypatch: pytest.MonkeyPatch, device: str, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cpu")
    precision = Bf16Islands()
    precision.prepare(nn.Linear(32, 32), device)
    assert precision.compute_dtype() == expected
    assert expected in DTYPES


def test_decisions_for_a_gpu_are_made_without_one(model: nn.Module) -> None:
    assert {d.format for d in Bf16Islands().prepare(model, "cuda")} == {"fp32", "bf16", "input"}


def test_a_model_is_prepared_once(model: nn.Module) -> None:
    recipe().prepare(model, "cpu")
    with pytest.raises(RequestError, match="prepared this model before"):
        recipe().prepare(model, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_islands_on_a_gpu(model: Any) -> None:
    precision = Bf16Islands(islands=["heads", "layers.0.mix"])
    precision.prepare(model, "cuda")
    model.cuda()
    with precision.forward_context("cuda"):
        model.layers[0].mix(torch.ones(2, 32, device="cuda", dtype=torch.bfloat16))
        model.layers[1].mix(torch.ones(2, 32, device="cuda", dtype=torch.bfloat16))
    assert model.layers[0].mix.seen == [(torch.float32, torch.float32)]
    assert model.layers[1].mix.seen[0][1] == torch.bfloat16
