"""Small modules that all models use. Each counts its own forward model FLOPs: matmuls only, 2 m n k."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.ops.norm_linear import flops as norm_linear_flops
from gem_core.ops.products import linear_flops, own_flops, slot_flops
from gem_core.ops.slot import KernelSlot, kernel_slots
from gem_core.spec.kernels import KernelRequest

ALIGNED = 8
"""Matmuls in 16 bits are fast where rows of matrices are multiples of so many numbers, 16 bytes."""


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype a kernel is called with: autocast's where it is on, else the tensor's own."""
    kind = tensor.device.type
    if tensor.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def together(first: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one dtype, ``compute_dtype(first)``: under autocast a linear layer and a parameter differ."""
    dtype = compute_dtype(first)
    return tuple(t.to(dtype) for t in (first, *rest))


def pick(x: Tensor, tokens: Sequence[int]) -> Tensor:
    """Some tokens of ``x`` ``[rows, tokens, dim]``, by views: a list as an index would be copied to the device in every step."""
    return torch.stack([x[:, token] for token in tokens], dim=1) if tokens else x[:, :0]


def compact(x: Tensor) -> Tensor:
    """``x.contiguous()``. A GPU copies strided tensors number by number, however short these are: as numbers of eight bytes where they are such."""
    ratio = 8 // x.element_size()
    if torch.compiler.is_compiling() or x.is_contiguous() or ratio < 2 or x.stride(-1) != 1:
        return x.contiguous()
    words = not any(n % ratio for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(torch.int64).contiguous().view(x.dtype) if words else x.contiguous()


class TokenProduct(torch.autograd.Function):
    """``mix_tokens``, one small product a row; ``x`` has the dtype that is computed in, the weight may have another.

    Numbers of tokens are odd sizes, and a GPU multiplies 16-bit matrices several times as fast where rows are multiples of 16 bytes. So the number of
    tokens that is a multiple of 8 lies along rows, in the weight and in each row's summand of its gradient.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        laid = lay_out(weight, x.dtype)
        ctx.save_for_backward(laid, x)
        ctx.dtype = weight.dtype
        return torch.bmm(laid.expand(x.shape[0], -1, -1), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        laid, x = ctx.saved_tensors
        for_weight, for_x = ctx.needs_input_grad
        spread = laid.t().expand(x.shape[0], -1, -1)
        return weight_gradient(grad, x, ctx.dtype) if for_weight else None, torch.bmm(spread, grad) if for_x else None


class FirstTokens(torch.autograd.Function):
    """``mix_tokens`` of as many first tokens as the weight takes, and the further tokens as they are.

    ``[tokens_out, tokens_in], [rows, tokens, dim] -> [rows, tokens_out, dim], [rows, tokens - tokens_in, dim]``.

    The gradients of both are written side by side; those of ``split`` would be joined by a copy of all tokens.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        laid, count = lay_out(weight, x.dtype), weight.shape[1]
        ctx.save_for_backward(laid, x)
        ctx.dtype = weight.dtype
        return torch.bmm(laid.expand(x.shape[0], -1, -1), x[:, :count]), compact(x[:, count:])

    @staticmethod
    def backward(ctx: Any, of_mixed: Tensor, of_rest: Tensor) -> tuple[Tensor | None, Tensor | None]:
        laid, x = ctx.saved_tensors
        for_weight, for_x = ctx.needs_input_grad
        count, spread, of_x = laid.shape[1], laid.t().expand(x.shape[0], -1, -1), None
        if for_x and torch.compiler.is_compiling():  # a compiler takes no part of a tensor for a product's result
            of_x = torch.cat([torch.bmm(spread, of_mixed), of_rest], dim=1)
        elif for_x:
            of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            torch.bmm(spread, of_mixed, out=of_x[:, :count])
            of_x[:, count:] = of_rest
        return weight_gradient(of_mixed, x[:, :count], ctx.dtype) if for_weight else None, of_x


def lay_out(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``[tokens_out, tokens_in]`` in ``dtype``; along rows of memory lie output tokens if their number is a multiple of 8, else input tokens."""
    if weight.shape[0] % ALIGNED:
        return weight.to(dtype, memory_format=torch.contiguous_format)
    return weight.t().to(dtype, memory_format=torch.contiguous_format).t()


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of a map of tokens, summed over rows in ``dtype``: ``[rows, tokens_out, dim], [rows, tokens_in, dim] -> [tokens_out, tokens_in]``."""
    if grad.shape[1] % ALIGNED:
        return torch.bmm(grad, x.transpose(1, 2)).sum(0, dtype=dtype)
    return torch.bmm(x, grad.transpose(1, 2)).sum(0, dtype=dtype).t()


def mix_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """``weight x`` of each row: ``[tokens_out, tokens_in], [rows, tokens_in, dim] -> [rows, tokens_out, dim]``.

    One small product a row: ``matmul`` would make one large product of copies in which the tokens of all rows stand side by side.
    """
    out: Tensor = TokenProduct.apply(weight, x.to(compute_dtype(weight)))  # type: ignore[no-untyped-call]
    return out


def pair_width(dim: int, out: int) -> int:
    """Model FLOPs of one row through a ``dim`` x ``out`` matrix."""
    return 2 * dim * out


class TokenMix(nn.Module):
    """A learned map of tokens, the same for every channel: ``[rows, tokens_in, dim] -> [rows, tokens_out, dim]``.

    Further tokens of the input are left out, by weights of zero: a view of the first tokens has an odd number of them where all are a multiple of 8.
    """

    def __init__(self, tokens_in: int, tokens_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens_out, tokens_in))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        further = x.shape[1] - self.weight.shape[1]
        return mix_tokens(nn.functional.pad(self.weight, (0, further)) if further > 0 else self.weight, x)

    def flops(self, rows: int, dim: int) -> int:
        return own_flops(self, rows * dim * pair_width(*self.weight.shape))


class LearnedToken(nn.Module):
    """One learned token, the same for every row: ``rows -> [rows, 1, dim]``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, rows: int) -> Tensor:
        return self.weight.expand(rows, *self.weight.shape)


class Mlp(nn.Sequential):
    """Linear layers with GELU and dropout between them; the last one is linear."""

    def __init__(self, dim: int, hidden: Sequence[int], out: int, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(dim, width), nn.GELU(), nn.Dropout(dropout)]
            dim = width
        super().__init__(*layers, nn.Linear(dim, out))

    def flops(self, rows: int, *, input_gradient: bool = True) -> int:
        matrices = [m for m in self if isinstance(m, nn.Linear)]
        return total(linear_flops(m, rows, input_gradient=input_gradient or i > 0) for i, m in enumerate(matrices))


class NormLinear(nn.Module):
    """A linear map with a norm before it or after it, through the ``norm_linear`` op: ``[..., dim] -> [..., out]``.

    Args:
        dim: input width.
        out: output width.
        where: ``before`` or ``after`` the matmul. After it the norm has a learned gain; before it the matrix holds that gain.
        residual: whether calls add a residual before the norm (``after`` only).
        norm: ``rms`` or ``layer``.
        bias: whether the linear map has one.
    """

    def __init__(self, dim: int, out: int, *, where: str = "before", residual: bool = False, norm: str = "rms", bias: bool = True) -> None:
        super().__init__()
        self.where, self.dim, self.out, self.norm = where, dim, out, norm
        self.weight = nn.Parameter(torch.empty(out, dim))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.gain = nn.Parameter(torch.empty(out)) if where == "after" else None
        features = [norm, where, *(["affine"] if where == "after" else []), *(["residual"] if residual else [])]
        self.slot = KernelSlot("norm_linear", features=tuple(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.dim**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def forward(self, x: Tensor | Sequence[Tensor], residual: Tensor | None = None) -> Tensor:
        """``x`` may be its columns in parts. They are joined in the dtype that this computes in: half the bytes to join, where it rounds."""
        joined = x if isinstance(x, Tensor) else torch.cat([part.to(compute_dtype(part)) for part in x], dim=-1)
        out: Tensor = self._call(joined, residual)
        return out

    def _call(self, x: Tensor, residual: Tensor | None, **options: bool) -> Any:
        dtype = compute_dtype(x)
        gain = None if self.gain is None else self.gain.to(dtype)
        residual = None if residual is None else residual.to(dtype)
        weight, bias = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        return self.slot(x.to(dtype), weight, bias, norm=self.norm, where=self.where, gamma=gain, residual=residual, **options)

    def flops(self, tokens: int, *, input_gradient: bool = True) -> int:
        return slot_flops(self.slot, norm_linear_flops, input_gradient, tokens=tokens, in_features=self.dim, out_features=self.out)


class PreNormLinear(NormLinear):
    """What a pre-norm layer begins with: ``x = x + pending``, then ``N(x) W^T + b``; gives the second and the first.

    x is the residual stream, and ``pending`` what the layer before adds to it, None for nothing. One kernel adds and norms, where a sum on its own
    would be written by one kernel and read by the next, and its gradients likewise. Whatever comes later takes the stream from here.

    ``[..., dim], [..., dim] -> [..., out], [..., dim]``
    """

    def __init__(self, dim: int, out: int, *, norm: str = "rms", bias: bool = True) -> None:
        super().__init__(dim, out, norm=norm, bias=bias)
        self.slot = KernelSlot("norm_linear", features=(*self.slot.features, "residual", "return_sum"))

    def forward(self, x: Tensor, pending: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out, stream = self._call(x, pending, return_sum=True)
        return out, stream


class AddNorm(nn.LayerNorm):
    """``LayerNorm(x + residual) * gate`` through the ``add_norm`` op: ``[..., dim] -> [..., dim]``; with ``concat``, ``[gate || concat || that]``.

    Parameters are those of ``nn.LayerNorm``.

    Args:
        dim: width.
        residual: whether calls add a residual.
        gate: whether calls multiply by a gate.
        concat: whether calls give what stands between the gate and the result.
    """

    def __init__(self, dim: int, *, residual: bool = False, gate: bool = False, concat: bool = False) -> None:
        super().__init__(dim)
        used = {"residual": residual, "gate": gate, "concat": concat}
        self.slot = KernelSlot("add_norm", features=("layer", "affine", *(word for word, on in used.items() if on)))

    def forward(self, x: Tensor, residual: Tensor | None = None, gate: Tensor | None = None, concat: Tensor | None = None) -> Tensor:
        dtype = compute_dtype(x)
        residual, gate, concat = (None if t is None else t.to(dtype) for t in (residual, gate, concat))
        out: Tensor = self.slot(x.to(dtype), residual, gamma=self.weight.to(dtype), beta=self.bias.to(dtype), gate=gate, concat=concat, eps=self.eps)
        return out


class DenseModel(nn.Module):
    """What every model does the same way: initialise itself, and list the kernels its layers will ask for."""

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer from torch's generator: the way to fill a model that was made on the meta device."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None and module is not self:
                reset()

    def kernel_requests(self, *, device: str, dtype: str, arch: int | None, backward: bool) -> list[KernelRequest]:
        """One request for each different call that the layers make."""
        requests: dict[KernelRequest, None] = {}
        for slot in kernel_slots(self):
            requests[slot.request(device=device, dtype=dtype, arch=arch, backward=backward)] = None
        return list(requests)


def total(counts: Iterable[Any]) -> int:
    """Exact integer sum; counts may be numpy integers."""
    return sum(int(count) for count in counts)
