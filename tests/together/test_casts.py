"""The casts of gem-precision to FP8 in Triton's interpreter, which this environment has.

The interpreter of Triton 3.7 loses the carry when it rounds to FP8 and cuts subnormals off, so values here are E4M3 numbers times powers of two: that
shows scales, places, transposition and padding. Rounding is held against the formats on a GPU.
"""

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import json, sys
import torch
from gem_precision.formats import find_format, quantize
from gem_precision.kernels.cast import cast_both, cast_square

def numbers(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(8, 16, (rows, columns), generator=generator).float()
    x *= torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    return x * 2.0 ** torch.randint(-40, 40, (-(-rows // 128), 1, -(-columns // 128)), generator=generator).float().repeat_interleave(128, 0).expand(
        -1, 1, -1).reshape(-1, -(-columns // 128))[:rows].repeat_interleave(128, 1)[:, :columns]

def same(got, wanted):
    return bool(((got == wanted) | (got.isnan() & wanted.isnan())).all())

def whole(elements, scales):
    return elements.float() * scales.repeat_interleave(128, 1)[:, : elements.shape[1]]

found = {}
for rows in (0, 1, 127, 128, 300):
    x = numbers(max(rows, 1), 256, rows)[:rows]
    if rows == 300:
        x[7, 3], x[290, 200] = float("nan"), float("inf")
        x[130:140] = 0
    low, scales, turned, turned_scales = cast_both(x)
    padded = -(-rows // 128) * 128
    full = torch.zeros(padded, 256)
    full[:rows] = x
    form = find_format("fp8_e4m3_1x128")
    found[f"rows {rows}"] = rows == 0 and low.shape == (0, 256) and turned.shape == (256, 0) or (
        same(whole(low, scales), quantize(full, form).dequantize())
        and same(whole(turned, turned_scales), quantize(full.T.contiguous(), form).dequantize())
        and scales.stride(0) == 1 and turned_scales.stride(0) == 1
    )
w = numbers(256, 640, 5)
low, scales, turned, turned_scales = cast_square(w)
wanted = quantize(w, find_format("fp8_e4m3_128x128"))
found["square"] = same(low.float(), wanted.elements) and same(scales, wanted.scales)
found["square, turned"] = same(turned.float(), wanted.elements.T) and same(turned_scales, wanted.scales.T)
found["rows of scales begin at multiples of four"] = scales.stride() == (8, 1) and turned_scales.stride() == (4, 1)
strided = numbers(128, 512, 6)[:, 128:384]
found["strided"] = same(cast_both(strided)[0].float(), cast_both(strided.contiguous())[0].float())
print(json.dumps(found))
"""


def test_casts_are_the_formats_along_both_axes() -> None:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 9
    assert all(found.values()), found
