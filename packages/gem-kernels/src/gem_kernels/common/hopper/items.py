"""Which items of a tile list a program of a Hopper kernel takes: an item is a tile and a head.

Programs take turns in snake order, one way and then the other: under a causal mask the tiles of a row differ in length, and a fixed order would give
some programs the longer one every time.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.hopper.gluon import gl, gluon


@gluon.jit
def _place(turn):
    """This program's place in a turn."""
    return gl.where(turn % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def item_of(turn, total):
    """The item of this program's ``turn``-th turn, or the last one past the end; the first where there is none."""
    return gl.maximum(gl.minimum(turn * gl.num_programs(0) + _place(turn), total - 1), 0)


@gluon.jit
def items_here(total):
    """How many of ``total`` items this program takes."""
    full = total // gl.num_programs(0)
    return full + gl.where(_place(full) < total % gl.num_programs(0), 1, 0)


@gluon.jit
def read_row(records, item, heads):
    """Of an item's tile: its first token within the row, and the row's first token, tokens used and tokens, queries and keys being the same."""
    base = records + item // heads * 8
    return gl.load(base + 1), gl.load(base + 2), gl.load(base + 3), gl.load(base + 4)
