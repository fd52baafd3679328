"""The document bounds of packed rows, in place of a mask.

In every mask of a causal language model a query reads consecutive keys that end at itself: all of
its document, a sliding window of it, or a chunk of it. So the number of its first key says it all.
The documents are known where batches are made (``kd.text.packed_rows``); what a query reads of its
own is a ``Reach``, which a model does not change.

Shapes: B rows, L positions of a row, C spans of a batch, P positions of a probe.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from kd.text.packed_rows import PackedRows
from kd.text.steps.pinned import copy_to_device

#: Says for (rows, heads, queries, keys) which of the keys the queries read.
MaskFunction = Callable[[Any, Any, Any, Any], Tensor]


@dataclass(frozen=True)
class Reach:
    """Which keys of its document a query reads, of those up to itself.

    The last ``window`` ones, or those of its own chunk of ``chunk`` tokens; else all.
    """

    window: int | None = None
    chunk: int | None = None

    @classmethod
    def find(
        cls, mask_function: MaskFunction, size: int | None, device: torch.device
    ) -> Reach | None:
        """Find the reach of a mask whose windows or chunks have ``size`` tokens; waits once.

        ``mask_function`` must not know the documents. None for a mask of another form.
        """
        if size == 0:
            return None
        place_1P = torch.arange(2 * (size or 1) + 1, device=device)[None]
        first_1P = find_first_keys(mask_function, torch.zeros_like(place_1P), known=False)
        for each in (cls(), cls(window=size), cls(chunk=size)):
            if torch.equal(first_1P, place_1P - each.count_before(place_1P)):
                return each
        return None

    def count_before(self, position_BL: Tensor) -> Tensor:
        """Return how many keys before its own a query reads, from its place in its document."""
        if self.window is not None:
            return position_BL.clamp(max=self.window - 1)
        return position_BL if self.chunk is None else position_BL % self.chunk

    def cut(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the spans of a document that lies at ``start`` to ``stop`` of its row."""
        step = self.chunk or stop - start
        for first in range(start, stop, step):
            place_l = np.arange(min(step, stop - first))
            shift = len(place_l) if self.window is None else self.window - 1
            yield Span(first, first + len(place_l), np.maximum(place_l - shift, 0))


@dataclass(frozen=True, eq=False)
class Span:
    """Positions ``start`` to ``stop`` of a row, which read no others and which no others read.

    ``first_l`` is the first key of each query, counted from ``start``.
    """

    start: int
    stop: int
    first_l: NDArray[np.int64]

    def __len__(self) -> int:
        return self.stop - self.start

    @cached_property
    def causal(self) -> bool:
        """Every query reads all earlier keys of the span."""
        return not self.first_l.any()

    @cached_property
    def window(self) -> int | None:
        """The most keys that a query reads; None if the span is no sliding window of that width."""
        place_l = np.arange(len(self))
        width = int((place_l - self.first_l).max()) + 1
        return width if np.array_equal(self.first_l, np.maximum(place_l - width + 1, 0)) else None


@dataclass(frozen=True, eq=False)
class DocumentMask:
    """What the queries of packed rows read. Layers get it in the place of a mask.

    ``first_BL``: the number of the first key of each query, within its row. ``spans``: the spans of
    each row, in order, which cover the row. ``packed``: the documents, where they are the spans.
    """

    first_BL: Tensor
    spans: tuple[tuple[Span, ...], ...]
    packed: PackedRows | None = None

    @classmethod
    def of_packed(cls, packed: PackedRows, reach: Reach) -> DocumentMask:
        """Make the mask of known documents, without waiting for the device."""
        position_BL = packed.positions_BL
        batch, length = position_BL.shape
        place_BL = torch.arange(length, device=position_BL.device).expand(batch, length)
        spans: list[list[Span]] = [[] for _ in range(batch)]
        for start, stop in itertools.pairwise(packed.host_bounds_C.tolist()):
            row, first = divmod(start, length)
            spans[row].extend(reach.cut(first, first + stop - start))
        return cls(
            place_BL - reach.count_before(position_BL),
            tuple(map(tuple, spans)),
            packed if reach.chunk is None else None,
        )

    @classmethod
    def of(cls, first_BL: Tensor) -> DocumentMask | None:
        """Find the spans; waits once for the device. None if a first key is -1."""
        rows = first_BL.cpu().numpy()
        if rows.min() < 0:
            return None
        return cls(first_BL, tuple(_split_row(row) for row in rows))

    @cached_property
    def causal(self) -> bool:
        """Every row is one span, and its queries read all earlier keys."""
        return all(len(row) == 1 and row[0].causal for row in self.spans)

    @cached_property
    def longest(self) -> int:
        """Positions of the longest span."""
        return max(len(span) for row in self.spans for span in row)

    @cached_property
    def regular(self) -> bool:
        """All spans that are not causal are sliding windows of one width."""
        return len(self._widths) <= 1 and None not in self._widths

    @cached_property
    def window(self) -> int | None:
        """The width of the sliding windows; None if all spans are causal, or not ``regular``."""
        return next(iter(self._widths), None) if self.regular else None

    @cached_property
    def _widths(self) -> set[int | None]:
        return {span.window for row in self.spans for span in row if not span.causal}

    @cached_property
    def blocks(self) -> BlockMask:
        """The blocks of queries and keys with something to read, as flex attention takes them."""
        first_BL = self.first_BL

        def reads(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= first_BL[row, query])

        batch, length = first_BL.shape
        # Compiled, because otherwise torch makes the whole mask (B, 1, L, L) first.
        found: BlockMask = _compile_block_mask()(
            reads, batch, None, length, length, device=first_BL.device
        )
        return found

    @cached_property
    def bounds_C(self) -> Tensor:
        """The first position of each span in the flattened batch, and B L: (C + 1,), int32."""
        if self.packed is not None:
            return self.packed.bounds_C
        length = self.first_BL.shape[1]
        starts = [number * length + span.start for number, row in enumerate(self.spans)
                  for span in row]  # fmt: skip
        bounds_C = np.array([*starts, self.first_BL.numel()], dtype=np.int32)
        return copy_to_device(bounds_C, self.first_BL.device)


@dataclass(frozen=True, eq=False)
class GraphMask:
    """What queries read, as far as a graph may know it: ``packed`` differs between batches."""

    packed: PackedRows
    reach: Reach
    #: A graph must serve rows of one document too.
    causal: ClassVar[bool] = False

    @property
    def regular(self) -> bool:
        """The spans are the documents, as ``bounds_C`` says. Chunks cut them further."""
        return self.reach.chunk is None

    @property
    def bounds_C(self) -> Tensor:
        """The bounds of the documents, on the device."""
        return self.packed.bounds_C

    @property
    def longest(self) -> int:
        """Positions that no document exceeds."""
        return self.packed.longest

    @property
    def window(self) -> int | None:
        """The width of the sliding windows, if there are any."""
        return self.reach.window


#: What kernels for rows of variable length are told of spans.
RowMask = DocumentMask | GraphMask


@functools.cache
def _compile_block_mask() -> Callable[..., BlockMask]:
    compiled: Callable[..., BlockMask] = torch.compile(create_block_mask)
    return compiled


def _split_row(first_L: NDArray[np.int64]) -> tuple[Span, ...]:
    """Cut a row wherever no later query reads an earlier key."""
    starts = np.flatnonzero(np.minimum.accumulate(first_L[::-1])[::-1] >= np.arange(len(first_L)))
    return tuple(
        Span(int(start), int(stop), first_L[start:stop] - start)
        for start, stop in zip(starts, np.append(starts[1:], len(first_L)), strict=True)
    )


def find_document_starts(positions_BL: Tensor) -> Tensor:
    """Return the place in its row of the first token of each token's document, (B, L).

    A document starts where ``positions_BL`` do not go up by one, as in transformers.
    """
    place_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    begins_BL = torch.diff(positions_BL, dim=1, prepend=positions_BL[:, :1] - 1) != 1
    return torch.where(begins_BL, place_L, 0).cummax(dim=1).values


def find_first_keys(mask_function: MaskFunction, start_BL: Tensor, known: bool = True) -> Tensor:
    """Return the first key of each query, (B, L), by halving: O(B L log L), only on the device.

    ``start_BL`` are the places where the documents start. ``known``: they are to be kept apart even
    where ``mask_function`` does not know them. -1 where the keys of a query do not end at itself.
    """
    rows_B1 = torch.arange(len(start_BL), device=start_BL.device)[:, None]
    head = rows_B1.new_zeros(())
    place_BL = torch.arange(start_BL.shape[1], device=start_BL.device).expand_as(start_BL)

    def reads(query_BL: Tensor, key_BL: Tensor) -> Tensor:
        found: Tensor = mask_function(rows_B1, head, query_BL, key_BL)
        return found.expand_as(start_BL)

    # A mask that knows the documents counts its places itself. One that does not knows nothing of
    # what came before the document, so its places count from the document's start.
    crosses_BL = reads(start_BL, (start_BL - 1).clamp(min=0)) & (start_BL > 0)
    offset_BL = torch.where(crosses_BL.any() & known, start_BL, 0)
    query_BL = place_BL - offset_BL
    next_BL = (query_BL + 1).clamp(max=start_BL.shape[1] - 1)
    sees_ahead_BL = reads(query_BL, next_BL) & (next_BL > query_BL)
    ends_at_itself_BL = reads(query_BL, query_BL) & ~sees_ahead_BL
    low_BL = start_BL if known else torch.zeros_like(start_BL)
    high_BL = place_BL
    for _ in range(start_BL.shape[1].bit_length()):
        middle_BL = (low_BL + high_BL) // 2
        read_BL = reads(query_BL, middle_BL - offset_BL)
        high_BL = torch.where(read_BL, middle_BL, high_BL)
        low_BL = torch.where(read_BL, low_BL, (middle_BL + 1).minimum(high_BL))
    return torch.where(ends_at_itself_BL, low_BL, -1)
