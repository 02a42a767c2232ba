"""What the FP8 attention kernels compute, in float64 from the operands that their casts wrote, and inputs for them."""

import math
import re

import numpy as np
import torch

from gem_core.ops.activations import ACTIVATIONS
from gem_kernels.ops.attention import AttentionCall

TILE = 128
PLACES = torch.tensor([t // 16 * 16 + t // 2 % 2 * 8 + t // 4 % 4 * 2 + t % 2 for t in range(TILE)])
"""Of the tokens of a tile of keys, written out: see ``cast.place_of``."""
HEADROOM, LIFT = 2.0**-7, 2.0**8


def offsets(lengths, device="cpu"):
    return torch.tensor([0, *lengths], dtype=torch.int64, device=device).cumsum(0)


def make_call(q, k, v, q_lengths, k_lengths, *, activation="gelu_bf16", **options):
    given = {"max_q": max(q_lengths), "max_k": max(k_lengths), "scale": 128**-0.5, "window": None, **options}
    where = (offsets(q_lengths, q.device), offsets(k_lengths, q.device))
    return AttentionCall(op="attention", q=q, k=k, v=v, q_offsets=where[0], k_offsets=where[1], activation=activation, **given)


def powers(tokens, heads, seed, dtype=torch.float16):
    """Values that E4M3 holds at any of the scales."""
    generator = torch.Generator().manual_seed(seed)
    size = 2.0 ** torch.randint(-2, 3, (tokens, heads, TILE), generator=generator)
    return (size * (2 * torch.randint(0, 2, size.shape, generator=generator) - 1)).to(dtype)


class Tiles:
    """The operands of ``launch.Low`` tile by tile, float64, keys in the order of their tokens and values ``[token, dim]``."""

    def __init__(self, call, low):
        self.call, self.low = call, low
        self.bases = low.bases.tolist()
        places = PLACES.to(low.k.device)
        self.q = low.q.view(-1, call.heads, TILE, TILE).double()
        self.k = low.k.view(-1, call.kv_heads, TILE, TILE).double()[:, :, places]
        self.v = low.v.view(-1, call.kv_heads, TILE, TILE).double().transpose(2, 3)
        self.q_scales, self.k_scales = low.q_scales.view(-1, call.heads).double(), low.k_scales.view(-1, call.kv_heads).double()
        self.v_scales, self.bounds = low.v_scales.view(-1, call.kv_heads).double(), low.bounds.view(-1, call.kv_heads).double()

    def of_queries(self):
        """``(tile, row, first token of it in q, tokens that are used, keys that are used)`` of each tile with work."""
        found = self.call.tiles("q", TILE)
        for tile, (row, first, start, used, _, _, keys, _) in enumerate(found.records[: int(found.count)].tolist()):
            if first < used and keys:
                yield tile, row, start + first, min(TILE, used - first), keys


def to_e4m3(x):
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).double()


def pointwise(call, low):
    """The kernel's output ``[q_tokens, heads, 128]``: weights are rounded as it rounds them, all else is exact."""
    tiles, group = Tiles(call, low), call.heads // call.kv_heads
    before, after = (1.0, call.scale) if call.scale_after else (call.scale, 1.0)
    out = torch.zeros(call.q.shape[0], call.heads, TILE, dtype=torch.float64, device=call.q.device)
    for tile, row, start, count, keys in tiles.of_queries():
        for head in range(call.heads):
            g = head // group
            total, bound = 0, tiles.bounds[row, g]
            for i in range(-(-keys // TILE)):
                slot = tiles.bases[row] - i
                sharpness = before * tiles.q_scales[tile, head] * tiles.k_scales[slot, g]
                gate = 2 * ACTIVATIONS[call.activation.removesuffix("_bf16")](tiles.q[tile, head] @ tiles.k[slot, g].T * sharpness) / sharpness
                total = total + to_e4m3(gate * (tiles.k_scales[slot, g] * tiles.v_scales[slot, g] / bound * HEADROOM)) @ tiles.v[slot, g]
            out[start : start + count, head] = (total * (0.5 / HEADROOM * bound * tiles.q_scales[tile, head] * before * after))[:count]
    return out


def softmax(call, low):
    """As ``pointwise``, and the natural logarithms of the sums ``[q_tokens, heads]``, minus infinity where there is no key."""
    tiles, group = Tiles(call, low), call.heads // call.kv_heads
    out = torch.zeros(call.q.shape[0], call.heads, TILE, dtype=torch.float64, device=call.q.device)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64, device=call.q.device)
    for tile, row, start, count, keys in tiles.of_queries():
        for head in range(call.heads):
            g = head // group
            bound, top = tiles.bounds[row, g], torch.full((TILE, 1), -1e300, dtype=torch.float64, device=out.device)
            total, summed = 0 * tiles.q[tile, head], 0 * top
            for i in reversed(range(-(-keys // TILE))):
                slot = tiles.bases[row] - i
                scores = tiles.q[tile, head] @ tiles.k[slot, g].T * (call.scale * tiles.q_scales[tile, head] * tiles.k_scales[slot, g])
                scores[:, max(0, keys - i * TILE) :] = -math.inf
                new_top = torch.maximum(top, scores.amax(1, keepdim=True))
                p, shrink, top = (scores - new_top).exp(), (top - new_top).exp(), new_top
                share = (tiles.v_scales[slot, g] / bound).clamp(min=2.0**-60) * LIFT
                total = total * shrink + to_e4m3(p * share) @ tiles.v[slot, g]
                summed = summed * shrink + p.sum(1, keepdim=True)
            out[start : start + count, head] = (total * (bound / LIFT) / summed)[:count]
            lse[start : start + count, head] = (top + summed.log())[:count, 0]
    return out, lse


def run_words(assembly, scores, sharpness, factor):
    """What a piece of assembly of ``fp8.weights`` makes of scores, float64 numbers of E4M3 in their order: float16 arithmetic, step by step.

    Args:
        scores: float32 ``[n, 4]``.
    """
    half = np.float16
    limit = lambda x: half(min(max(x, -65504.0), 65504.0))  # noqa: E731
    known = {"$8": limit(sharpness), "$12": limit(factor), "$16": limit(2 * factor)}
    known |= {f"${4 + i}": scores[:, i] for i in range(4)}
    for name, bits in re.findall(r"mov.b32 (\w+), 0x(....)\w{4};", assembly):
        known[name] = np.array(int(bits, 16), dtype=np.uint16).view(half)
    steps = {
        "mul.rn.f16x2": lambda a, b: half(a * np.float64(1) * b),
        "fma.rn.f16x2": lambda a, b, c: half(np.float64(1) * a * b + c),
        "fma.rn.sat.f16x2": lambda a, b, c: half(np.clip(np.float64(1) * a * b + c, 0, 1)),
        "min.f16x2": np.fmin,
        "tanh.approx.f16x2": lambda a: half(np.tanh(np.float64(1) * a)),
        "cvt.rn.f16x2.f32": lambda high, low: half(np.stack((low, high), 1)),
        "cvt.rn.satfinite.e4m3x2.f16x2": lambda a: a,
    }
    with np.errstate(over="ignore", invalid="ignore"):
        for step, target, sources in re.findall(r"([a-z][\w.]*x2[\w.]*) (\w+), ([^;]+);", assembly):
            known[target] = steps[step](*(known[source] for source in sources.split(", ")))
    return to_e4m3(torch.from_numpy(np.concatenate((known["low"], known["high"]), 1).astype(np.float64)))
