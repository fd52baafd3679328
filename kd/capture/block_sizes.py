"""The sizes that a sample is drawn by, on a GPU: their sums over blocks of the vocabulary.

``kd.capture.sampling`` keeps the sizes of all tokens in memory, which on a CPU costs no more than
computing them. On a GPU it would cost too much. So the kernels of ``kd.kernels.triton_rows`` read
the logits twice, and keep only one number for each row and each block. The few blocks with a head
token, a known token or a sampled point are computed again, in full.

Shapes: N positions, V vocabulary, Q blocks of V, q blocks that are computed in full, U tokens of a
block, A known ids of a position (the next token and always_keep), H head entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Tokens of a block.
BLOCK = 64
#: The logarithm that stands for a probability of 0, because 0 * -inf would be NaN.
LOWEST = -1e4
#: A block whose largest size is below the threshold by at most this share is computed in full: the
#: exp of the kernels and that of PyTorch differ in their last bits.
NEAR_THRESHOLD = 1e-4


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of profile threshold, block by block.

    LSE and entropy are (N,), the sums of tails (N, Q). ``head`` holds the rows and ids (H,) of head
    tokens, ascending.
    """

    logits_NV: Tensor
    known_NA: Tensor
    threshold: float
    lse_N: Tensor
    entropy_N: Tensor
    sums_NQ: Tensor
    head: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, logits_NV: Tensor, known_NA: Tensor, threshold: float) -> BlockSizes:
        """Read the logits; the tokens ``known_NA`` belong neither to the head nor to the tail."""
        from kd.kernels.triton_rows import reduce_blocks, reduce_rows

        rows = reduce_rows(logits_NV, mean=True, least=LOWEST)
        assert rows.mean_N is not None
        sums_NQ, largest_NQ = reduce_blocks(logits_NV, rows.lse_N, BLOCK, LOWEST)
        rows_q, blocks_q = (largest_NQ > threshold * (1.0 - NEAR_THRESHOLD)).nonzero(as_tuple=True)
        none_H = rows_q[:0]
        entropy_N = rows.lse_N - rows.mean_N
        found = cls(
            logits_NV, known_NA, threshold, rows.lse_N, entropy_N, sums_NQ, (none_H, none_H)
        )
        return replace(found, head=found._separate_heads(rows_q, blocks_q))

    def _separate_heads(self, rows_q: Tensor, blocks_q: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and ids (H,) of the head tokens, which lie in the blocks given.

        The sums of blocks with head or known tokens become those of only their tails. Such blocks
        are computed together, because each operation is a launch of its own.
        """
        positions, known = self.known_NA.shape
        rows_N = torch.arange(positions, device=rows_q.device)
        # A block may be listed twice; it gets the same sum both times.
        all_rows_q = torch.cat([rows_q, rows_N.repeat_interleave(known)])
        all_blocks_q = torch.cat([blocks_q, self.known_NA.flatten() // BLOCK])
        size_qU = self._compute_sizes(all_rows_q, all_blocks_q)
        is_head_qU = size_qU > self.threshold
        which_H, place_H = is_head_qU[: len(rows_q)].nonzero(as_tuple=True)
        self.sums_NQ[all_rows_q, all_blocks_q] = size_qU.masked_fill_(is_head_qU, 0.0).sum(1)
        return rows_q[which_H], blocks_q[which_H] * BLOCK + place_H

    def of_blocks(self, rows_q: Tensor, blocks_q: Tensor) -> Tensor:
        """Return the sizes (q, U) of some blocks; 0 for tokens outside the tail."""
        size_qU = self._compute_sizes(rows_q, blocks_q)
        return size_qU.masked_fill_(size_qU > self.threshold, 0.0)

    def sum_tails(self, rows: slice) -> Tensor:
        """Return the sum of the tails of ``rows``, token by token, (V,)."""
        s_nV = self.logits_NV[rows].float().clamp_(min=LOWEST)
        size_nV = s_nV.sub_(self.lse_N[rows, None]).exp_()
        size_nV.masked_fill_(size_nV > self.threshold, 0.0).scatter_(1, self.known_NA[rows], 0.0)
        return size_nV.sum(0)

    def _compute_sizes(self, rows_q: Tensor, blocks_q: Tensor) -> Tensor:
        """Compute the sizes (q, U) of head and tail.

        0 for known tokens and beyond the vocabulary.
        """
        ids_qU = blocks_q[:, None] * BLOCK + torch.arange(BLOCK, device=blocks_q.device)
        last = self.logits_NV.shape[1] - 1
        s_qU = self.logits_NV[rows_q[:, None], ids_qU.clamp(max=last)].float().clamp_(min=LOWEST)
        size_qU = (s_qU - self.lse_N[rows_q, None]).exp_().masked_fill_(ids_qU > last, 0.0)
        for known_q in self.known_NA[rows_q].unbind(1):
            size_qU.masked_fill_(ids_qU == known_q[:, None], 0.0)
        return size_qU
