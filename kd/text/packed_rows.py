"""Where the documents of a batch lie, for attention that keeps them apart.

It is worked out where batches are made, on the host, so that no layer waits for the device to find
a document or the longest one.

Shapes: B rows, L positions of a row, C documents of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The documents of packed rows.

    ``positions_BL``: the place of each token in its document. ``bounds_C``: the first place of each
    document in the flattened batch, then B L: (C + 1,), int32. Both go to the device;
    ``host_bounds_C`` are the same bounds and stay on the host. No document is longer than
    ``longest``, which is rounded up to a power of two: compiled code serves all batches with the
    same one. ``apart``: whether attention must keep the documents apart; not if only padding
    follows the first one of each row.
    """

    positions_BL: Tensor
    bounds_C: Tensor
    host_bounds_C: Tensor
    longest: int
    apart: bool = True

    @classmethod
    def of(cls, positions_BL: Tensor, apart: bool = True) -> PackedRows:
        """Find the documents of rows whose positions are on the host.

        A document starts with each row, and wherever positions do not go up by one, as in
        transformers.
        """
        begins_BL = torch.diff(positions_BL, dim=1, prepend=positions_BL[:, :1]) != 1
        starts_C = begins_BL.flatten().nonzero().flatten()
        bounds_C = torch.cat([starts_C, starts_C.new_tensor([positions_BL.numel()])]).int()
        return cls(positions_BL, bounds_C, bounds_C, _round_up(int(bounds_C.diff().max())), apart)

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device) -> PackedRows:
        """Return rows on ``device`` that are one document each, without waiting for the device."""
        host_bounds_C = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
        bounds_C = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        positions_BL = torch.arange(length, device=device).expand(batch, length)
        return cls(positions_BL, bounds_C, host_bounds_C, _round_up(length))

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedRows:
        """Return the rows with ``change`` done to all that goes to the device."""
        return replace(self, positions_BL=change(self.positions_BL), bounds_C=change(self.bounds_C))

    def measure_lengths(self) -> Tensor:
        """Return the length of each token's document (B, L), without waiting for the device."""
        length_C = self.bounds_C.diff()
        size = self.positions_BL.numel()
        return length_C.repeat_interleave(length_C, output_size=size).view_as(self.positions_BL)


def _round_up(length: int) -> int:
    """Return the smallest power of two that is not below ``length``."""
    return 1 << (length - 1).bit_length()
