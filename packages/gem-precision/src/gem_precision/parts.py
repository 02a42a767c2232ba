"""A weight that ranks keep in parts, rounded before it travels: bytes of elements and scales, equal to those of the whole weight rounded at once.

A part is some consecutive rows. Where blocks do not end with a part, ranks first agree on the largest magnitudes of the blocks that they share, so
that scales are those of whole blocks. Elements are then rounded where they are: each only depends on its own value and its block's scale.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_core.spec import RequestError
from gem_precision.formats import Format, block_amax, quantize
from gem_precision.formats.packed import element_bytes, pack_elements, pack_scales, scale_bytes, unpack_elements, unpack_scales
from gem_precision.hadamard import WIDTH, turned


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A weight ``[out, in]`` in ``ranks`` parts of ``rows`` rows, zeros beyond its end, of which this is part ``rank``; all rounded along one axis.

    Args:
        form: the format along that axis.
        across: the axis is that of the outputs, as the input gradient contracts it, instead of that of the inputs.
        hadamard: seed of the transform along the axis, None for none.
    """

    form: Format
    across: bool
    hadamard: int | None
    out: int
    columns: int
    rows: int
    rank: int
    ranks: int

    def check(self) -> None:
        """A part can be rounded as the whole is.

        Raises:
            RequestError: the transform turns rows of two parts together.
        """
        if self.across and self._turns and self.rows % WIDTH and self.ranks > 1:
            so = f"the Hadamard transform turns {WIDTH} outputs together, and a rank has {self.rows} of {self.out}"
            raise RequestError(
                "a low-precision weight in parts",
                so,
                "Shard over fewer ranks, set hadamard = false, or keep the layer high (precision.options.high).",
            )

    @property
    def largest_size(self) -> int:
        """Size of what ``largest`` gives."""
        return self._all_blocks * self._wide_blocks if self._shared else 0

    @property
    def bytes(self) -> int:
        """Bytes of a packed part."""
        return element_bytes(self.form, self.rows * self.columns) + scale_bytes(self.form, self._own_blocks * self._wide_blocks)

    def largest(self, part: Tensor) -> Tensor:
        """``[largest_size]``: the largest magnitude that this part has in each block of the weight; infinity where one is not finite."""
        if not self._shared:
            return part.new_zeros(0, dtype=torch.float32)
        own = block_amax(self._placed(part), self._format).nan_to_num(nan=torch.inf)
        everywhere = own.new_zeros(self._all_blocks, self._wide_blocks)
        everywhere[self._first_block : self._first_block + len(own)] = own
        return everywhere.flatten()

    def pack(self, part: Tensor, largest: Tensor) -> Tensor:
        """``[bytes]`` uint8 of ``[up to rows, columns]``; ``largest`` is the maximum over the ranks."""
        placed, amax = self._placed(part), None
        if self._shared:
            everywhere = largest.view(self._all_blocks, self._wide_blocks)
            touched = -(-len(placed) // self._height) if self._height else 1
            amax = everywhere[self._first_block : self._first_block + touched]
            amax = torch.where(amax.isfinite(), amax, torch.nan)
        low = quantize(placed, self._format, amax=amax)
        elements = low.elements[self._lead : self._lead + self.rows]
        scales = pad(low.scales, (0, 0, 0, self._own_blocks - len(low.scales)))
        return torch.cat([pack_elements(elements, self.form), pack_scales(scales, self.form)])

    def unpack(self, received: Tensor) -> Tensor:
        """``[ranks * rows, columns]`` float32 of ``[ranks, bytes]``."""
        split = element_bytes(self.form, self.rows * self.columns)
        elements = unpack_elements(received[:, :split], self.form, self.rows * self.columns).view(-1, self.columns)
        scales = unpack_scales(received[:, split:], self.form).view(-1, self._wide_blocks)
        row = torch.arange(self.ranks * self.rows, device=received.device)
        rank = row // self.rows
        block = rank * self._own_blocks
        if self._height:
            block = block + row // self._height - rank * self.rows // self._height
        return elements * scales[block].repeat_interleave(self._width, 1)[:, : self.columns]

    def _placed(self, part: Tensor) -> Tensor:
        """The part, turned, with zeros for the rows that it lacks and for those of its first block that an earlier part has."""
        whole = pad(part.float(), (0, 0, 0, self.rows - len(part)))
        if self._turns:
            whole = turned(whole.T, self.hadamard).T if self.across else turned(whole, self.hadamard)
        return pad(whole, (0, 0, self._lead, 0))

    @property
    def _turns(self) -> bool:
        return self.hadamard is not None and (self.out if self.across else self.columns) % WIDTH == 0

    @property
    def _format(self) -> Format:
        """The format with its blocks as they lie in ``[out, in]``."""
        return replace(self.form, block=self.form.block[::-1]) if self.across else self.form

    @property
    def _height(self) -> int | None:
        """Rows of a block, None for all of the weight."""
        return self._format.block[0]

    @property
    def _width(self) -> int:
        return self._format.block[1] or max(1, self.columns)

    @property
    def _wide_blocks(self) -> int:
        return -(-self.columns // self._width)

    @property
    def _shared(self) -> bool:
        """Whether blocks can have rows of several parts."""
        return self.ranks > 1 and (self._height is None or self.rows % self._height != 0)

    @property
    def _all_blocks(self) -> int:
        """Blocks from the first row to the last, of the weight."""
        return -(-self.ranks * self.rows // self._height) if self._height else 1

    @property
    def _own_blocks(self) -> int:
        """Blocks that a part has rows of, at most."""
        if self._height is None:
            return 1
        return self.rows // self._height if self.rows % self._height == 0 else (self.rows + self._height - 2) // self._height + 1

    @property
    def _first_block(self) -> int:
        return self.rank * self.rows // self._height if self._height else 0

    @property
    def _lead(self) -> int:
        """Rows of this part's first block that an earlier part has."""
        return self.rank * self.rows % self._height if self._height else 0
