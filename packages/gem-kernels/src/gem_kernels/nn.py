"""Attention layers over jagged rows, for models that are not built by gem-core.

They are plain modules: ``x`` is ``[tokens, width]`` with the tokens of all rows packed one after the other, ``offsets`` is int64 ``[rows + 1]`` and
``max_length`` the longest row, a host integer. ``backend`` names a kernel; None takes the first that fits of gem-core's preference list.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_core.ops import block_attention, gdpa, hstu_attention, jagged_attention, pffn
from gem_core.spec import RequestError


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, head_dim: int | None, kv_heads: int | None, window: int | None, backend: str | None) -> None:
        super().__init__()
        if head_dim is None and width % heads:
            raise RequestError(f"attention of width {width}", f"it does not divide into {heads} heads", "Give head_dim.")
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim = head_dim or width // heads
        self.window, self.backend = window, backend
        self.q = nn.Linear(width, heads * self.head_dim, bias=False)
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, width, bias=False)

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[tokens, heads, dim]``, and keys and values ``[tokens, kv_heads, dim]`` as views of one buffer."""
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        k, v = self.kv(x if context is None else context).unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(-3)
        return q, k, v


class GdpaAttention(_Attention):
    """Generalised dot-product attention: a pointwise activation of the scores instead of softmax.

    Args:
        width: size of a token.
        heads: query heads.
        head_dim: size of a head, ``width / heads`` by default.
        kv_heads: key and value heads, ``heads`` by default; a divisor of ``heads``.
        activation: one of the activations of ``gem_core.ops.gdpa``.
        window: largest distance between a query and a key it sees; None for all.
        backend: name of a kernel, or None.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        activation: str = "gelu",
        window: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(width, heads, head_dim=head_dim, kv_heads=kv_heads, window=window, backend=backend)
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        max_length: int,
        context: Tensor | None = None,
        context_offsets: Tensor | None = None,
        max_context: int | None = None,
    ) -> Tensor:
        """Attend within rows, or from each row of ``x`` to the same row of ``context``.

        Args:
            x: ``[tokens, width]``.
            offsets: int64 ``[rows + 1]``.
            max_length: longest row of ``x``.
            context: ``[context_tokens, width]``; then ``context_offsets`` and ``max_context`` are wanted too.
            context_offsets: int64 ``[rows + 1]``.
            max_context: longest row of ``context``.

        Returns:
            ``[tokens, width]``.
        """
        q, k, v = self._project(x, context)
        k_offsets, max_k = _context(context, context_offsets, max_context, offsets, max_length)
        o = gdpa(
            q,
            k,
            v,
            offsets,
            k_offsets,
            max_q=max_length,
            max_k=max_k,
            activation=self.activation,
            scale=self.head_dim**-0.5,
            window=self.window,
            backend=self.backend,
        )
        out: Tensor = self.out(o.flatten(1))
        return out


class JaggedAttention(_Attention):
    """Softmax attention.

    Args:
        width: size of a token.
        heads: query heads.
        head_dim: size of a head, ``width / heads`` by default.
        kv_heads: key and value heads, ``heads`` by default; a divisor of ``heads``.
        causal: a token sees itself and what lies before it.
        window: largest distance between a query and a key it sees; None for all.
        backend: name of a kernel, or None; ``sdpa`` is fast on a CPU.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        causal: bool = False,
        window: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(width, heads, head_dim=head_dim, kv_heads=kv_heads, window=window, backend=backend)
        self.causal = causal

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        max_length: int,
        context: Tensor | None = None,
        context_offsets: Tensor | None = None,
        max_context: int | None = None,
    ) -> Tensor:
        """As ``GdpaAttention.forward``."""
        q, k, v = self._project(x, context)
        k_offsets, max_k = _context(context, context_offsets, max_context, offsets, max_length)
        o = jagged_attention(q, k, v, offsets, k_offsets, max_q=max_length, max_k=max_k, causal=self.causal, window=self.window, backend=self.backend)
        assert isinstance(o, Tensor)  # a pair only with return_lse
        out: Tensor = self.out(o.flatten(1))
        return out


class BlockAttention(_Attention):
    """Softmax attention inside blocks of each row, with rotary position embedding.

    Args:
        width: size of a token.
        heads: heads.
        head_dim: size of a head, even, ``width / heads`` by default.
        block: tokens of a block.
        base: of the rotation's frequencies; None rotates nothing.
        rotate_values: rotate the values too.
        qk_norm: divide each head of q and k by its root mean square and multiply it by a learned gain, before the rotation.
        backend: name of a kernel, or None.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        block: int = 64,
        base: float | None = 10_000.0,
        rotate_values: bool = False,
        qk_norm: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__(width, heads, head_dim=head_dim, kv_heads=None, window=None, backend=backend)
        self.block, self.base, self.rotate_values = block, base, rotate_values
        self.q_gain, self.k_gain = (nn.Parameter(torch.ones(self.head_dim)) if qk_norm else None for _ in range(2))

    def forward(self, x: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        """``x`` ``[tokens, width]`` with ``offsets`` int64 ``[rows + 1]`` to ``[tokens, width]``."""
        q, k, v = self._project(x, None)
        rope = None
        if self.base is not None:
            steps = torch.arange(self.head_dim // 2, device=x.device, dtype=torch.float32)
            rope = positions(offsets, x.shape[0])[:, None] * self.base ** (-2.0 / self.head_dim * steps)
        options: dict[str, Any] = {"block": self.block, "rope": rope, "rope_on_v": self.rotate_values and rope is not None}
        options |= {"q_gain": self.q_gain, "k_gain": self.k_gain}
        o = block_attention(q, k, v, offsets, max_length=max_length, backend=self.backend, **options)
        out: Tensor = self.out(o.flatten(1))
        return out


def positions(offsets: Tensor, tokens: int) -> Tensor:
    """Position of each of ``tokens`` packed tokens in its row, int64 ``[tokens]``."""
    index = torch.arange(tokens, device=offsets.device)
    row = torch.searchsorted(offsets, index, right=True) - 1
    return index - offsets[row]


class HstuAttention(nn.Module):
    """An HSTU layer: ``x + out(norm(attention) * u)`` with ``u, v, q, k`` from one projection of ``norm(x)`` under SiLU; arXiv 2402.17152.

    Args:
        width: size of a token.
        heads: heads.
        head_dim: size of a head, ``width / heads`` by default.
        causal: a token sees itself and what lies before it.
        window: farthest token that is seen; None for all.
        backend: name of a kernel, or None.
    """

    def __init__(
        self, width: int, heads: int, *, head_dim: int | None = None, causal: bool = True, window: int | None = None, backend: str | None = None
    ) -> None:
        super().__init__()
        if head_dim is None and width % heads:
            raise RequestError(f"HSTU layer of width {width}", f"it does not divide into {heads} heads", "Give head_dim.")
        self.heads, self.head_dim = heads, head_dim or width // heads
        self.causal, self.window, self.backend = causal, window, backend
        inner = heads * self.head_dim
        self.norm, self.uvqk = nn.LayerNorm(width), nn.Linear(width, 4 * inner)
        self.inner_norm, self.out = nn.LayerNorm(inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, offsets: Tensor, max_length: int, contextual: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """One layer.

        Args:
            x: ``[tokens, width]``; a row is a prefix, a history and targets.
            offsets: int64 ``[rows + 1]``.
            max_length: longest row.
            contextual: int64 ``[rows]``, lengths of the prefixes.
            targets: int64 ``[rows]``, numbers of targets.

        Returns:
            ``[tokens, width]``.
        """
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).view(-1, 4, self.heads, self.head_dim).unbind(1)
        parts: dict[str, Any] = {"contextual": contextual, "targets": targets, "causal": self.causal, "window": self.window}
        o = hstu_attention(q, k, v, offsets, max_length=max_length, backend=self.backend, **parts)
        out: Tensor = x + self.out(self.inner_norm(o.flatten(1)) * u.flatten(1))
        return out


class PffnAttention(nn.Module):
    """A feed-forward block whose weights are generated for each row from a summary of it: ``gdpa`` over ``hidden`` keys between two norms.

    Args:
        width: size of a token.
        heads: heads, a divisor of ``width``.
        summary: size of a row's summary.
        hidden: keys of a row, the hidden size of its block.
        activation: one of the activations of ``gem_core.ops.pffn``.
        backend: name of a kernel, or None.
    """

    def __init__(self, width: int, heads: int, *, summary: int, hidden: int, activation: str = "gelu", backend: str | None = None) -> None:
        super().__init__()
        if width % heads:
            raise RequestError(f"PFFN block of width {width}", f"it does not divide into {heads} heads", "Give a divisor.")
        self.shape = (2, hidden, heads, width // heads)
        self.activation, self.backend = activation, backend
        self.kv = nn.Linear(summary, 2 * hidden * width)

    def forward(self, x: Tensor, offsets: Tensor, max_length: int, summary: Tensor) -> Tensor:
        """``x`` ``[tokens, width]`` and ``summary`` ``[rows, summary]`` to ``[tokens, width]``."""
        k, v = self.kv(summary).view(-1, *self.shape).unbind(1)
        tokens, scale = x.reshape(-1, *self.shape[2:]), self.shape[3] ** -0.5
        out = pffn(tokens, k, v, offsets, max_q=max_length, activation=self.activation, scale=scale, backend=self.backend)
        return out.flatten(1)


def _context(context: Tensor | None, context_offsets: Tensor | None, max_context: int | None, offsets: Tensor, max_length: int) -> tuple[Tensor, int]:
    """Offsets and longest row of the keys."""
    given = [context is not None, context_offsets is not None, max_context is not None]
    if not any(given):
        return offsets, max_length
    if not all(given) or context_offsets is None or max_context is None:
        raise RequestError("attention over a context", "only a part of it is given", "Give context, context_offsets and max_context together.")
    return context_offsets, max_context
