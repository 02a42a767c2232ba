"""A small plain torch model with the parts that the policy speaks of."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.ops.slot import KernelSlot

torch.set_num_threads(1)

# Triton reads this when it is imported: without a GPU the kernels run under its interpreter.
if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"


class Spy(nn.Module):
    """A linear map of its own making, which records the dtypes it computes with."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        self.seen.append((x.dtype, out.dtype))
        return out


class FusedNorm(nn.Module):
    """Hands the weights of its child to a kernel, as a norm fused with a matmul does: the child's forward never runs."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, out)
        self.slot = KernelSlot("norm_linear", features=("rms", "before"))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        self.seen.append(dtype)
        out: Tensor = self.slot(x.to(dtype), self.linear.weight.to(dtype), self.linear.bias.to(dtype), norm="rms", where="before")
        return out


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix, self.fused, self.gate = Spy(dim), FusedNorm(dim, dim), nn.Linear(dim, 4)
        self.softmax, self.drop = nn.Softmax(-1), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        share = self.softmax(self.gate(x))
        return x + self.drop(self.fused(self.mix(self.norm(x)))) * share.amax(-1, keepdim=True)  # type: ignore[no-any-return]


class Heads(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x)))[:, 0]  # type: ignore[no-any-return]


class Small(nn.Module):
    """``[rows, 3] -> [rows]`` logits."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.features = nn.Linear(3, dim)
        self.layers = nn.ModuleList([Block(dim), Block(dim)])
        self.heads = Heads(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        for layer in self.layers:
            x = layer(x)
        return self.heads(x)  # type: ignore[no-any-return]


@dataclass
class Outputs:
    """Output dtypes of modules, by name."""

    dtypes: dict[str, torch.dtype]

    @classmethod
    def of(cls, model: nn.Module, *args: Any) -> "Outputs":
        """Run ``model`` under hooks."""
        dtypes: dict[str, torch.dtype] = {}

        def watch(name: str) -> Any:
            return lambda module, inputs, output: dtypes.update({name: output.dtype})

        handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
        model(*args)
        for handle in handles:
            handle.remove()
        return cls(dtypes)


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def kit() -> Any:
    """The helpers, as test files cannot import a conftest."""

    class Kit:
        small, block, spy, fused, outputs = Small, Block, Spy, FusedNorm, Outputs

    return Kit


def _block_numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    """``[rows, columns]`` float32 that ``fp8_block`` holds exactly, along either axis and in squares, and whose scales differ from block to block.

    Triton's interpreter rounds to FP8 wrongly (it loses carries and cuts subnormals off), so what it is given needs no rounding.
    """
    generator = torch.Generator().manual_seed(seed)

    def power(most: int, *sizes: int) -> Tensor:
        return 2.0 ** torch.randint(-most, most + 1, sizes, generator=generator).float()

    sign = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    tiles = power(12, -(-rows // 128), -(-columns // 128)).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    significand = torch.randint(8, 16, (rows, columns), generator=generator).float()
    return significand * sign * power(3, rows, 1) * power(3, 1, columns) * tiles


@pytest.fixture(scope="session")
def block_numbers() -> Callable[..., Tensor]:
    return _block_numbers
