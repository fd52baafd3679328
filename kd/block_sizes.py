"""What a sample is drawn from, on a GPU: sums of sizes over blocks of the vocabulary, and the sizes where they matter.

``kd.sampling`` keeps the sizes of all tokens, which on a CPU costs no more than looking at them. A GPU would spend more
on it than a capture may cost, so here kernels (``kd.row_kernels``) read the logits twice and leave numbers of rows and
blocks. The sizes of the few blocks that hold a head token, a known one or a point of the sample are made anew.

Shapes: N positions, V vocabulary, J blocks of V, K forced ids, M blocks that are looked at, H head entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Tokens of a block.
BLOCK = 64
#: What a probability of 0 has for a logarithm: 0 * -inf is NaN.
LOWEST = -1e4
#: A block whose largest size is this near to the threshold is looked at: the kernels' exp is not PyTorch's to the bit.
NEAR = 1e-4


@dataclass(frozen=True)
class BlockSizes:
    """Of profile threshold: LSE and entropy (N,), tails' sums (N, J), the head's rows and ids (H,), ascending."""

    logits_NV: Tensor
    known_NK: Tensor
    threshold: float
    lse_N: Tensor
    entropy_N: Tensor
    sums_NJ: Tensor
    head: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, logits_NV: Tensor, known_NK: Tensor, threshold: float) -> BlockSizes:
        """Read the logits; ``known_NK`` are the tokens that are neither head nor tail."""
        from kd.row_kernels import reduce_blocks, reduce_rows

        rows = reduce_rows(logits_NV, mean=True, least=LOWEST)
        assert rows.mean_N is not None
        sums_NJ, largest_NJ = reduce_blocks(logits_NV, rows.lse_N, BLOCK, LOWEST)
        rows_M, blocks_M = (largest_NJ > threshold * (1.0 - NEAR)).nonzero(as_tuple=True)
        none_H = rows_M[:0]
        entropy_N = rows.lse_N - rows.mean_N
        found = cls(logits_NV, known_NK, threshold, rows.lse_N, entropy_N, sums_NJ, (none_H, none_H))
        size_MB = found._sizes(rows_M, blocks_M)
        which_H, place_H = (size_MB > threshold).nonzero(as_tuple=True)
        found._sum_anew(rows_M, blocks_M)
        everywhere_NK = torch.arange(len(known_NK), device=known_NK.device)[:, None].expand_as(known_NK)
        found._sum_anew(everywhere_NK.flatten(), known_NK.flatten() // BLOCK)
        head = rows_M[which_H], blocks_M[which_H] * BLOCK + place_H
        return cls(logits_NV, known_NK, threshold, rows.lse_N, entropy_N, sums_NJ, head)

    def of_blocks(self, rows_M: Tensor, blocks_M: Tensor) -> Tensor:
        """The sizes of some blocks, (M, 64), 0 but in the tail."""
        size_MB = self._sizes(rows_M, blocks_M)
        return size_MB.masked_fill_(size_MB > self.threshold, 0.0)

    def _sizes(self, rows_M: Tensor, blocks_M: Tensor) -> Tensor:
        """Those of head and tail; 0 where a token is known, or past the vocabulary's end."""
        ids_MB = blocks_M[:, None] * BLOCK + torch.arange(BLOCK, device=blocks_M.device)
        last = self.logits_NV.shape[1] - 1
        s_MB = self.logits_NV[rows_M[:, None], ids_MB.clamp(max=last)].float().clamp_(min=LOWEST)
        size_MB = (s_MB - self.lse_N[rows_M, None]).exp_().masked_fill_(ids_MB > last, 0.0)
        for known_M in self.known_NK[rows_M].unbind(1):
            size_MB.masked_fill_(ids_MB == known_M[:, None], 0.0)
        return size_MB

    def _sum_anew(self, rows_M: Tensor, blocks_M: Tensor) -> None:
        """The sums of blocks that hold more than tail; where one comes twice, it is the same sum."""
        self.sums_NJ[rows_M, blocks_M] = self.of_blocks(rows_M, blocks_M).sum(1)
