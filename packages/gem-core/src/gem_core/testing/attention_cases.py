"""Cases of the attention ops."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from gem_core.ops.activations import ACTIVATIONS
from gem_core.testing.inputs import Call, Case, Inputs, OpCases

LENGTHS: dict[str, list[int]] = {
    "empty_batch": [],
    "all_rows_empty": [0, 0, 0],
    "one_row": [7],
    "empty_rows": [0, 5, 0, 0, 3, 0],
    "one_long": [1, 0, 131, 2, 1],
    "odd": [3, 17, 31],
    "tile_edges": [15, 16, 17, 63, 64, 65],
}
"""Row lengths that break kernels."""

QUERIES, KEYS = [2, 0, 9, 5, 20], [4, 6, 0, 5, 3]
"""Cross lengths: rows without queries, without keys, with more queries than keys and the other way round."""
HEADS = 2


def longest(lengths: Sequence[int]) -> int:
    return max(lengths, default=0)


def self_attention(inputs: Inputs, lengths: list[int], *, layout: str = "separate", kv_heads: int = HEADS, v_dim: int = 0, **options: Any) -> Call:
    """q, k, v over the same rows; ``layout`` separate, fused or amid_nan."""
    tokens, dim, v_dim = sum(lengths), inputs.head_dim, v_dim or inputs.head_dim
    if layout == "fused":
        q, k, v = inputs.fused(tokens, HEADS, dim, dim, v_dim)
    elif layout == "amid_nan":
        q, k, v = (inputs.amid_nan(tokens, HEADS, d) for d in (dim, dim, v_dim))
    else:
        q, k, v = inputs.tensor(tokens, HEADS, dim), inputs.tensor(tokens, kv_heads, dim), inputs.tensor(tokens, kv_heads, v_dim)
    offsets = inputs.offsets(lengths)
    return (q, k, v, offsets, offsets), {"max_q": longest(lengths), "max_k": longest(lengths), **options}


def cross_attention(inputs: Inputs, queries: list[int] | int, keys: list[int] | int, *, rows: int = 3, kv_heads: int = HEADS, **options: Any) -> Call:
    """Separate rows of queries and keys; a number instead of lengths makes queries shared, or keys dense over ``rows``."""
    dim = inputs.head_dim
    shared, dense = isinstance(queries, int), isinstance(keys, int)
    q = inputs.tensor(queries if isinstance(queries, int) else sum(queries), HEADS, dim)
    shape = (rows, keys) if isinstance(keys, int) else (sum(keys),)
    k, v = inputs.tensor(*shape, kv_heads, dim), inputs.tensor(*shape, kv_heads, dim)
    max_q = queries if isinstance(queries, int) else longest(queries)
    max_k = keys if isinstance(keys, int) else longest(keys)
    q_offsets = None if shared else inputs.offsets(queries)  # type: ignore[arg-type]
    k_offsets = None if dense else inputs.offsets(keys)  # type: ignore[arg-type]
    return (q, k, v, q_offsets, k_offsets), {"max_q": max_q, "max_k": max_k, **options}


def _shared_cases() -> list[Case]:
    """What jagged_attention and gdpa have in common."""
    cases = [Case(name, partial(self_attention, lengths=lengths)) for name, lengths in LENGTHS.items()]
    odd = LENGTHS["odd"]
    cases += [
        Case("generous_maximum", lambda inputs: _generous(self_attention(inputs, odd))),
        Case("fused_views", partial(self_attention, lengths=odd, layout="fused")),
        Case("amid_nan", partial(self_attention, lengths=odd, layout="amid_nan")),
        Case("narrow_v", lambda inputs: self_attention(inputs, odd, v_dim=max(inputs.head_dim // 2, 1))),
        Case("gqa", partial(self_attention, lengths=odd, kv_heads=1)),
        Case("scale", partial(self_attention, lengths=odd, scale=0.125)),
        Case("window_0", partial(self_attention, lengths=odd, window=0)),
        Case("window_3", partial(self_attention, lengths=LENGTHS["empty_rows"] + odd, window=3)),
        Case("window_20_one_long", partial(self_attention, lengths=LENGTHS["one_long"], window=20)),
        Case("window_beyond", partial(self_attention, lengths=odd, window=1000)),
        Case("cross", partial(cross_attention, queries=QUERIES, keys=KEYS)),
        Case("cross_no_keys", partial(cross_attention, queries=[3, 4], keys=[0, 0])),
        Case("cross_no_queries", partial(cross_attention, queries=[0, 0], keys=[3, 4])),
        Case("cross_window", partial(cross_attention, queries=QUERIES, keys=KEYS, window=2)),
        Case("cross_gqa", partial(cross_attention, queries=QUERIES, keys=KEYS, kv_heads=1)),
        Case("broadcast_q", partial(cross_attention, queries=5, keys=KEYS)),
        Case("broadcast_q_many", partial(cross_attention, queries=33, keys=[70, 0, 1])),
        Case("broadcast_q_empty_batch", partial(cross_attention, queries=5, keys=[])),
        Case("broadcast_q_window", partial(cross_attention, queries=5, keys=KEYS, window=2)),
    ]
    return cases


def _generous(call: Call) -> Call:
    arguments, options = call
    return arguments, {**options, "max_q": options["max_q"] + 9, "max_k": options["max_k"] + 40}


def _too_short(inputs: Inputs) -> Call:
    arguments, options = self_attention(inputs, [3, 40, 0, 20])
    return arguments, {**options, "max_q": 17, "max_k": 17}


def _biased(inputs: Inputs, lengths: list[int], rows: int | None = None, heads: int = HEADS, removed: bool = False, **options: Any) -> Call:
    call, named = self_attention(inputs, lengths, **options)
    size = named["max_q"]
    bias = inputs.tensor(len(lengths) if rows is None else rows, heads, size, size)
    if removed:  # minus infinity above the diagonal and on one whole query
        gone = inputs.values(size, size).abs().triu(1) > 0
        gone[:1] = True
        bias = bias.masked_fill(gone, float("-inf"))
    return call, {**named, "bias": bias}


def _jagged_attention() -> OpCases:
    odd = LENGTHS["odd"]
    cases = [
        *_shared_cases(),
        Case("causal", partial(self_attention, lengths=LENGTHS["empty_rows"] + odd, causal=True)),
        Case("causal_tile_edges", partial(self_attention, lengths=LENGTHS["tile_edges"], causal=True)),
        Case("causal_window_3", partial(self_attention, lengths=odd, causal=True, window=3)),
        Case("causal_cross", partial(cross_attention, queries=QUERIES, keys=KEYS, causal=True)),
        Case("causal_cross_window", partial(cross_attention, queries=QUERIES, keys=KEYS, causal=True, window=1)),
        Case("causal_broadcast_q", partial(cross_attention, queries=5, keys=KEYS, causal=True)),
        Case("bias", partial(_biased, lengths=odd)),
        Case("bias_shared", partial(_biased, lengths=odd, rows=1, heads=1)),
        Case("bias_causal", partial(_biased, lengths=odd, heads=1, causal=True)),
        Case("bias_removes_keys", partial(_biased, lengths=odd, rows=1, heads=1, removed=True)),
        Case("lse", partial(cross_attention, queries=QUERIES, keys=KEYS, return_lse=True)),
        Case("lse_causal", partial(self_attention, lengths=odd, causal=True, return_lse=True)),
        Case("large_scores", partial(self_attention, lengths=odd, scale=8.0)),
    ]
    return OpCases(tuple(cases), self_attention, _too_short)


def _gdpa() -> OpCases:
    odd = LENGTHS["empty_rows"] + LENGTHS["odd"]
    cases = _shared_cases()
    for name in ACTIVATIONS:
        cases.append(Case(f"act_{name}", partial(self_attention, lengths=odd, activation=name, scale=0.5)))
        cases.append(
            Case(f"act_{name}_after", partial(cross_attention, queries=QUERIES, keys=KEYS, activation=name, scale=0.25, scale_position="after"))
        )
    cases += [
        Case("dense_kv", partial(cross_attention, queries=[5, 0, 40], keys=17)),
        Case("dense_kv_empty_batch", partial(cross_attention, queries=[], keys=17, rows=0)),
        Case("dense_kv_no_tokens", partial(cross_attention, queries=[0, 0], keys=17, rows=2)),
        Case("dense_kv_one_key", partial(cross_attention, queries=[5, 0, 40], keys=1)),
        Case("dense_kv_gqa", partial(cross_attention, queries=[5, 0, 40], keys=17, kv_heads=1)),
        Case("dense_kv_window", partial(cross_attention, queries=[5, 0, 40], keys=17, window=4)),
        Case("dense_kv_broadcast_q", partial(cross_attention, queries=5, keys=17)),
        Case("scale_after_window", partial(self_attention, lengths=odd, scale=0.5, scale_position="after", window=2, activation="silu")),
    ]
    return OpCases(tuple(cases), self_attention, _too_short)


def _one_offsets(call: Call, **options: Any) -> Call:
    (q, k, v, offsets, _), named = call
    return (q, k, v, offsets), {"max_length": named.pop("max_q"), **{n: o for n, o in named.items() if n != "max_k"}, **options}


def _block(
    inputs: Inputs, lengths: list[int], *, rope: bool = False, norm: bool = False, layout: str = "separate", v_dim: int = 0, **options: Any
) -> Call:
    arguments, named = _one_offsets(self_attention(inputs, lengths, layout=layout, v_dim=v_dim), **options)
    if norm:
        named["q_gain"], named["k_gain"] = inputs.tensor(inputs.head_dim), inputs.tensor(inputs.head_dim)
    if rope:
        named["rope"] = inputs.angles(sum(lengths), inputs.head_dim // 2)
    return arguments, named


def _block_attention() -> OpCases:
    odd = LENGTHS["empty_rows"] + LENGTHS["odd"]
    cases = [Case(name, partial(_block, lengths=lengths)) for name, lengths in LENGTHS.items()]
    cases += [
        Case("fused_views", partial(_block, lengths=odd, layout="fused")),
        Case("amid_nan", partial(_block, lengths=odd, layout="amid_nan")),
        Case("narrow_v", lambda inputs: _block(inputs, odd, v_dim=max(inputs.head_dim // 2, 1))),
        Case("scale", partial(_block, lengths=odd, scale=0.125)),
        Case("block_1", partial(_block, lengths=odd, block=1)),
        Case("block_16", partial(_block, lengths=LENGTHS["tile_edges"], block=16)),
        Case("rope", partial(_block, lengths=LENGTHS["tile_edges"], rope=True)),
        Case("rope_on_v", partial(_block, lengths=odd, rope=True, rope_on_v=True)),
        Case("rope_fused_views", partial(_block, lengths=odd, rope=True, layout="fused")),
        Case("qk_norm", partial(_block, lengths=odd, norm=True)),
        Case("qk_norm_eps", partial(_block, lengths=LENGTHS["tile_edges"], norm=True, eps=0.5, v_dim=8)),
        Case("qk_norm_rope", partial(_block, lengths=LENGTHS["tile_edges"], norm=True, rope=True)),
        Case("qk_norm_rope_on_v_fused_views", partial(_block, lengths=odd, norm=True, rope=True, rope_on_v=True, layout="fused")),
        Case("qk_norm_empty_batch", partial(_block, lengths=[], norm=True)),
    ]
    return OpCases(tuple(cases), _block, lambda inputs: _shorten(_block(inputs, [3, 90, 0, 20])))


def _shorten(call: Call) -> Call:
    return call[0], {**call[1], "max_length": 17}


def _hstu(inputs: Inputs, lengths: list[int], *, contextual: bool = False, targets: bool = False, bias: int | None = None, **options: Any) -> Call:
    layout, v_dim = options.pop("layout", "separate"), options.pop("v_dim", 0)
    arguments, named = _one_offsets(self_attention(inputs, lengths, layout=layout, v_dim=v_dim), **{"norm_length": 4, **options})
    prefix = [(row * 2 + 1) % 4 if contextual else 0 for row in range(len(lengths))]
    prefix = [min(p, length) for p, length in zip(prefix, lengths)]
    if contextual:
        named["contextual"] = inputs.counts(prefix)
    if targets:
        named["targets"] = inputs.counts([min(row % 4, length - p) for row, (p, length) in enumerate(zip(prefix, lengths))])
    if bias is not None:
        named["bias"] = inputs.tensor(bias, HEADS, named["max_length"], named["max_length"])
    return arguments, named


def _hstu_attention() -> OpCases:
    rows = [0, 5, 1, 12, 3, 33, 17]
    cases = [Case(name, partial(_hstu, lengths=lengths)) for name, lengths in LENGTHS.items()]
    for causal in (True, False):
        for window in (None, 3):
            for contextual in (False, True):
                for targets in (False, True):
                    words = ("causal" if causal else "full", window and "window", contextual and "contextual", targets and "targets")
                    make = partial(_hstu, lengths=rows, causal=causal, window=window, contextual=contextual, targets=targets)
                    cases.append(Case("mask_" + "_".join(w for w in words if w), make))
    cases += [
        Case("default_norm", partial(_hstu, lengths=rows, norm_length=None)),
        Case("fused_views", partial(_hstu, lengths=rows, layout="fused")),
        Case("amid_nan", partial(_hstu, lengths=rows, layout="amid_nan")),
        Case("narrow_v", lambda inputs: _hstu(inputs, rows, v_dim=max(inputs.head_dim // 2, 1))),
        Case("scale", partial(_hstu, lengths=rows, scale=0.125)),
        Case("bias", partial(_hstu, lengths=rows, bias=len(rows))),
        Case("bias_shared", partial(_hstu, lengths=rows, bias=1)),
        Case("bias_targets", partial(_hstu, lengths=rows, bias=1, targets=True, contextual=True)),
    ]
    return OpCases(tuple(cases), _hstu, lambda inputs: _shorten(_hstu(inputs, [3, 40, 0, 20])))


def _pooled(inputs: Inputs, lengths: list[int], *, seeds: int = 5, per_row: bool = False, kv_heads: int = HEADS, **options: Any) -> Call:
    dim, tokens = inputs.head_dim, sum(lengths)
    queries = inputs.tensor(len(lengths), seeds, HEADS, dim) if per_row else inputs.tensor(seeds, HEADS, dim)
    k, v = inputs.tensor(tokens, kv_heads, dim), inputs.tensor(tokens, kv_heads, options.pop("v_dim", dim))
    return (queries, k, v, inputs.offsets(lengths)), {"max_k": longest(lengths), **options}


def _pooled_attention() -> OpCases:
    odd = LENGTHS["empty_rows"] + LENGTHS["odd"]
    cases = [Case(name, partial(_pooled, lengths=lengths)) for name, lengths in LENGTHS.items()]
    cases += [
        Case("per_row_seeds", partial(_pooled, lengths=odd, per_row=True)),
        Case("per_row_seeds_empty_batch", partial(_pooled, lengths=[], per_row=True)),
        Case("one_seed", partial(_pooled, lengths=odd, seeds=1)),
        Case("many_seeds", partial(_pooled, lengths=odd, seeds=67)),
        Case("gqa", partial(_pooled, lengths=odd, kv_heads=1)),
        Case("narrow_v", lambda inputs: _pooled(inputs, odd, v_dim=max(inputs.head_dim // 2, 1))),
        Case("scale", partial(_pooled, lengths=odd, scale=0.125)),
    ]
    return OpCases(tuple(cases), _pooled, lambda inputs: (_pooled(inputs, [3, 40, 0])[0], {"max_k": 17}))


ATTENTION_CASES = {
    "jagged_attention": _jagged_attention,
    "gdpa": _gdpa,
    "block_attention": _block_attention,
    "hstu_attention": _hstu_attention,
    "pooled_attention": _pooled_attention,
}
