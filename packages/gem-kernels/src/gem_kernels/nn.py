"""Attention layers over jagged rows, for models that are not built by gem-core.

They are plain modules: ``x`` is ``[tokens, width]`` with the tokens of all rows packed one after the other, ``offsets`` is int64 ``[rows + 1]`` and
``max_length`` the longest row, a host integer. ``backend`` names a kernel; None takes the first that fits of gem-core's preference list.
"""

from torch import Tensor, nn

from gem_core.ops import gdpa, jagged_attention
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


def _context(context: Tensor | None, context_offsets: Tensor | None, max_context: int | None, offsets: Tensor, max_length: int) -> tuple[Tensor, int]:
    """Offsets and longest row of the keys."""
    given = [context is not None, context_offsets is not None, max_context is not None]
    if not any(given):
        return offsets, max_length
    if not all(given) or context_offsets is None or max_context is None:
        raise RequestError("attention over a context", "only a part of it is given", "Give context, context_offsets and max_context together.")
    return context_offsets, max_context
