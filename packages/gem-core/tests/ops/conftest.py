"""Independent float64 truth for the ops' tests: one row, one query at a time, masks as plain Python."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

Sees = Callable[[int, int, int, int, int], bool]
"""``sees(row, i, j, q_length, k_length)``: whether query i sees key j."""


@pytest.fixture(autouse=True)
def one_thread(clean_host: None) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def offsets_of() -> Callable[[list[int]], Tensor]:
    def make(lengths: list[int]) -> Tensor:
        running = [0]
        for length in lengths:
            running.append(running[-1] + length)
        return torch.tensor(running, dtype=torch.int64)

    return make


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    """Seeded normal values, float64 unless told otherwise."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return draw


@pytest.fixture
def brute() -> Callable[..., Tensor]:
    """Attention by loops over rows and queries.

    ``rows`` holds ``(q [lq, heads, dim], k [lk, kv_heads, dim], v [lk, kv_heads, v_dim])`` of each row; ``weights`` maps the scores ``[seen, heads]``
    of one query to weights; ``bias(row, i, seen)`` gives what is added to them.
    """

    def attend(
        rows: list[tuple[Tensor, Tensor, Tensor]],
        *,
        scale: float,
        weights: Callable[[Tensor], Tensor],
        sees: Sees = lambda row, i, j, lq, lk: True,
        bias: Callable[[int, int, list[int]], Any] = lambda row, i, seen: 0.0,
    ) -> Tensor:
        outputs = []
        for row, (q, k, v) in enumerate(rows):
            (lq, heads, _), (lk, kv_heads, v_dim) = q.shape, v.shape
            group = heads // kv_heads
            out = [q.new_zeros(heads, v_dim) for _ in range(lq)]
            for i in range(lq):
                seen = [j for j in range(lk) if sees(row, i, j, lq, lk)]
                if not seen:
                    continue
                k_seen, v_seen = k[seen].repeat_interleave(group, 1), v[seen].repeat_interleave(group, 1)
                scores = scale * (q[i] * k_seen).sum(-1) + bias(row, i, seen)
                out[i] = (weights(scores)[..., None] * v_seen).sum(0)
            outputs.append(torch.stack(out) if out else q.new_zeros(0, heads, v_dim))
        return torch.cat(outputs) if outputs else torch.empty(0)

    return attend


@pytest.fixture
def softmax() -> Callable[[Tensor], Tensor]:
    def weights(scores: Tensor) -> Tensor:
        raised = (scores - scores.detach().max()).exp()
        return raised / raised.sum(0)

    return weights


@pytest.fixture
def cut_rows() -> Callable[[Tensor, list[int]], list[Tensor]]:
    """A packed tensor as one tensor a row."""

    def split(packed: Tensor, lengths: list[int]) -> list[Tensor]:
        return list(torch.split(packed, lengths))

    return split


@pytest.fixture
def window_rule() -> Callable[[bool, int | None], Sees]:
    """Positions aligned at the end, in words of one query and one key."""

    def rule(causal: bool, window: int | None) -> Sees:
        def sees(row: int, i: int, j: int, lq: int, lk: int) -> bool:
            position = i + lk - lq
            if causal and j > position:
                return False
            return window is None or abs(position - j) <= window

        return sees

    return rule


@pytest.fixture
def activations() -> dict[str, Callable[[Tensor], Tensor]]:
    """The activations from their textbook formulas, element by element."""

    def gelu_fast(x: float) -> float:
        c2, c4, c6 = 0.3747698, -0.04271125, 0.002265000812849393
        if abs(x) >= 2.775:
            return max(x, 0.0)
        return x / 2 + c2 * x**2 + c4 * x**4 + c6 * x**6

    scalar: dict[str, Callable[[float], float]] = {
        "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
        "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_fast": gelu_fast,
        "silu": lambda x: x / (1 + math.exp(-x)),
        "relu": lambda x: max(x, 0.0),
        "relu2": lambda x: max(x, 0.0) ** 2,
        "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
        "hardswish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
        "identity": lambda x: x,
    }

    def over(function: Callable[[float], float]) -> Callable[[Tensor], Tensor]:
        return lambda scores: torch.tensor([[function(float(s)) for s in row] for row in scores], dtype=torch.float64)

    return {name: over(function) for name, function in scalar.items()}
