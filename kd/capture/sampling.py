"""Draw samples from logits: the head is stored exactly, the tail by systematic sampling
proportional to size.

A position has the teacher's distribution p over V tokens, a threshold tau, and a size g for every
token: p itself, or for profile tempered the mean of p_T over the proposal's temperatures.

    known   the next token and the always_keep ids, with their log-probabilities
    head    every other token with g > tau, with its log-probability
    tail    all remaining tokens: R is the sum of their g; m = max(1, floor(R / tau)) of them are
            drawn by systematic sampling, token i with probability m g_i / R

Inclusion probabilities min(1, g / tau') give the least variance of any unbiased estimate of that
size (Cohen, Duffield, Kaplan, Lund, Thorup, "Stream sampling for variance-optimal estimation of
subset sums", SODA 2009, arXiv 0803.0473). Systematic sampling lays the sizes of the tail end to end
in a random order, and takes the tokens under the m points (u + i) R / m for i = 0 ... m - 1. No
token lies under two points, because g <= tau <= R / m (or m = 1). Blocks of 64 tokens are in random
order, the tokens within a block are not. Inclusion probabilities, and so the mean and the variance
of each weight, are the same for any order.

Shapes: N positions of a chunk, n positions of one pass, V vocabulary, Q blocks of V, U tokens
of a block, q blocks that are searched, A known ids of a position, R draws, H and M head and tail
entries, m points of a position, J knots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.profiles.profile import Reading
from cache.profiles.sampled import Sample
from cache.random import PURPOSE_TAIL, draw_permutations, draw_uniforms
from kd.capture.host_copy import HostCopy
from kd.errors import ModelError
from kd.loss.targets import list_kept_ids
from kd.text.steps.pinned import copy_to_device

#: Tokens of a block.
BLOCK = 64
#: The logarithm that stands for a probability of 0, because 0 * -inf would be NaN.
LOWEST = -1e4
#: Logits of one pass. On a CPU they should stay in its cache, because several steps read them.
PASS_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


@dataclass(frozen=True)
class Randomness:
    """The random numbers of N positions: ``uniform_NR`` in [0, 1), and the order of the blocks.

    The order is that of a sequence, ``order_Q`` (Q,). Where the positions belong to several
    sequences it has a row for each position, (N, Q).
    """

    uniform_NR: Tensor
    order_Q: Tensor

    @classmethod
    def of_each(
        cls,
        codec: Codec,
        sequences: Sequence[int],
        positions: Sequence[np.ndarray],
        device: torch.device,
    ) -> list[Randomness]:
        """Derive the random numbers of several sequences, from only (seed, sequence, position).

        The R draws of a position share its order of blocks and start at equal distances. Together
        they are one systematic sample of R times the size, so their mean varies less than that of
        independent draws.
        """
        counts = [len(positions_N) for positions_N in positions]
        numbers_N = np.repeat(np.array(sequences), counts)
        first = draw_uniforms(codec.seed, PURPOSE_TAIL, numbers_N, np.concatenate(positions))
        uniform = (first[:, None] + np.arange(codec.draws) / codec.draws) % 1.0
        blocks = -(-codec.vocabulary_size // BLOCK)
        orders_SQ = draw_permutations(codec.seed, np.array(sequences), blocks)
        parts = copy_to_device(uniform, device).split(counts)
        return list(map(cls, parts, copy_to_device(orders_SQ, device)))

    @classmethod
    def join(cls, parts: Sequence[Randomness]) -> Randomness:
        """Join the positions of ``parts``, of which there must be at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        uniform_NR = torch.cat([part.uniform_NR for part in parts])
        orders = [part.order_Q.expand(len(part.uniform_NR), -1) for part in parts]
        return cls(uniform_NR, torch.cat(orders))

    def select(self, rows: slice) -> Randomness:
        """Return the random numbers of some of the positions."""
        order = self.order_Q if self.order_Q.dim() == 1 else self.order_Q[rows]
        return Randomness(self.uniform_NR[rows], order)

    @property
    def blocks(self) -> int:
        """Number of blocks of the vocabulary, Q."""
        return self.order_Q.shape[-1]

    def arrange(self, sums_NQ: Tensor) -> Tensor:
        """Return the columns of each position in the order of its blocks, (N, Q)."""
        if self.order_Q.dim() == 1:
            return sums_NQ.index_select(1, self.order_Q)
        return sums_NQ.gather(1, self.order_Q)

    def find_blocks(self, rows_M: Tensor, places_M: Tensor) -> Tensor:
        """Return the blocks (M,) at places of the order of positions ``rows_M``."""
        if self.order_Q.dim() == 1:
            return self.order_Q[places_M]
        return self.order_Q[rows_M, places_M]


@dataclass(frozen=True)
class TokenSizes:
    """The results of one pass over the logits: LSE, entropy, sizes, and the largest size of each
    block.
    """

    lse_N: Tensor
    entropy_N: Tensor
    size_NQU: Tensor
    largest_NQ: Tensor

    @property
    def sums_NQ(self) -> Tensor:
        """The sum of the sizes in each block."""
        return self.size_NQU.sum(-1)


class Sampler:
    """Draws samples from logits, for profile threshold or for profile tempered.

    For profile tempered it adds the tail's log-partition at ``knots`` temperatures.
    """

    def __init__(self, codec: Codec, knots: int = 0) -> None:
        self.codec = codec
        self.knots = knots
        self._sizes: TokenSizes | None = None
        #: The sizes of the tails of the last draw, which the next one overwrites.
        self.tails: TokenSizes | None = None

    def sample(self, logits_NV: Tensor, gold_N: Tensor, chance: Randomness) -> Sample:
        """Draw the sample of N positions. Each depends only on its own logits, not on the batch.

        A logit of -inf is a token of probability 0. Raises ``ModelError`` for NaN and +inf.
        """
        return make_sample([HostCopy.start(self.draw(logits_NV, gold_N, chance)).wait()])

    def draw(self, logits_NV: Tensor, gold_N: Tensor, chance: Randomness) -> dict[str, Tensor]:
        """Draw the sample of N positions, as tensors on the device of the logits.

        The names are those of ``Sample``. Raises ``ModelError`` for NaN and +inf.
        """
        known_NA = self.list_known(gold_N)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        sizes, (rows_H, ids_H) = self.split(logits_NV, known_NA)
        # Sizes are 0 outside the tail now, so the draw can only find tokens of the tail.
        tail = _draw_tail(sizes, chance, self.codec.threshold)
        heads_N = rows_H.new_zeros(len(gold_N)).scatter_add_(0, rows_H, torch.ones_like(rows_H))
        found = {
            "known_logprobs": logits_NV.gather(1, known_NA) - sizes.lse_N[:, None],
            "entropy": sizes.entropy_N.clone(),  # the next call writes over it
            "head_count": heads_N,
            "head_ids": ids_H,
            "head_logprobs": logits_NV[rows_H, ids_H] - sizes.lse_N[rows_H],
            "tail_count": tail.count_N,
            "tail_ids": tail.ids_MR,
        }
        if self.codec.rules.keeps_partition:
            found |= self._add_tempered(logits_NV, sizes, tail)
        return found

    def split(self, s_NV: Tensor, known_NA: Tensor) -> tuple[TokenSizes, tuple[Tensor, Tensor]]:
        """Return the sizes, set to 0 outside the tail, and the rows and ids (H,) of head tokens."""
        sizes = self._read(s_NV)
        sizes.size_NQU.flatten(1).scatter_(1, known_NA, 0.0)
        # Only blocks that have a head token are searched.
        threshold = self.codec.threshold
        rows_q, blocks_q = (sizes.largest_NQ > threshold).nonzero(as_tuple=True)
        which_H, place_H = (sizes.size_NQU[rows_q, blocks_q] > threshold).nonzero(as_tuple=True)
        head = rows_q[which_H], blocks_q[which_H] * BLOCK + place_H
        sizes.size_NQU.flatten(1)[head] = 0.0
        return sizes, head

    def list_known(self, gold_N: Tensor) -> Tensor:
        """Return the next token and the always_keep ids of each position, (N, A)."""
        kept_A = list_kept_ids(self.codec.always_keep, gold_N.device)
        return torch.cat([gold_N[:, None], kept_A.expand(len(gold_N), -1)], 1)

    def _read(self, s_NV: Tensor) -> TokenSizes:
        """Compute all sizes, a few rows at a time, so that later steps find the logits in the CPU's
        cache.
        """
        positions, vocabulary = s_NV.shape
        step = _choose_rows_per_pass(s_NV)
        sizes = self._find_room(s_NV)
        room_nV = s_NV.new_empty(min(step, positions), vocabulary)
        for start in range(0, positions, step):
            rows = slice(start, min(start + step, positions))
            s_nV = room_nV[: rows.stop - start]
            size_nQU = sizes.size_NQU[rows]
            largest_nQ = sizes.largest_NQ[rows]
            size_nV = size_nQU.flatten(1)[:, :vocabulary]
            torch.clamp(s_NV[rows], min=LOWEST, out=s_nV)
            torch.softmax(s_nV, -1, out=size_nV)
            torch.amax(size_nQU, -1, out=largest_nQ)
            # log p = s - LSE for every token; the most probable one gives LSE without another sum.
            sizes.lse_N[rows] = s_nV.amax(-1) - largest_nQ.amax(-1).log()
            mean_n = reduce_by_row(torch.linalg.vecdot, size_nV, s_nV)
            sizes.entropy_N[rows] = sizes.lse_N[rows] - mean_n
            if self.codec.rules.keeps_partition:
                average_tempered_(size_nV, s_nV, self.codec.proposal_betas)
                torch.amax(size_nQU, -1, out=largest_nQ)
        if not (torch.isfinite(sizes.entropy_N) & (sizes.lse_N > LOWEST / 2)).all():
            detail = f"The teacher's logits are NaN or infinite, or all below {LOWEST / 2:g}."
            raise ModelError(detail, "Run it in float32 or bfloat16 (teacher.dtype).")
        return sizes

    def _find_room(self, s_NV: Tensor) -> TokenSizes:
        """Return memory for the results, kept from call to call: allocating it would cost more than
        a pass.
        """
        positions, vocabulary = s_NV.shape
        blocks = -(-vocabulary // BLOCK)
        kept = self._sizes
        if (
            kept is None
            or kept.size_NQU.dtype != s_NV.dtype
            or kept.largest_NQ.shape[0] < positions
        ):
            size_NQU = s_NV.new_zeros(positions, blocks, BLOCK)  # the last block's padding stays 0
            lse_N, entropy_N = s_NV.new_empty(2, positions).unbind()
            largest_NQ = s_NV.new_empty(positions, blocks)
            self._sizes = kept = TokenSizes(lse_N, entropy_N, size_NQU, largest_NQ)
        return TokenSizes(*(getattr(kept, field.name)[:positions] for field in fields(TokenSizes)))

    def _add_tempered(self, s_NV: Tensor, sizes: TokenSizes, tail: _Tail) -> dict[str, Tensor]:
        """Return the tail's log-probabilities and log-partition, for profile tempered."""
        betas = self.codec.nodes(self.knots)
        rows_M1 = tail.rows_M[:, None]
        parts = []
        # At least one pass, so that an empty sequence gives an empty partition of the right shape.
        for start in range(0, max(len(s_NV), 1), _choose_rows_per_pass(s_NV)):
            rows = slice(start, start + _choose_rows_per_pass(s_NV))
            parts.append(compute_partition(compute_tail_logprobs(s_NV[rows], sizes, rows), betas))
        return {
            "tail_logprobs": s_NV[rows_M1, tail.ids_MR] - sizes.lse_N[rows_M1],
            "partition": torch.cat(parts),
        }


def compute_tail_logprobs(s_nV: Tensor, sizes: TokenSizes, rows: slice) -> Tensor:
    """Return the log-probabilities (n, V) of the tails of ``rows``.

    ``LOWEST`` for all other tokens.
    """
    in_tail_nV = sizes.size_NQU[rows].flatten(1)[:, : s_nV.shape[1]] > 0
    return torch.where(in_tail_nV, s_nV - sizes.lse_N[rows, None], LOWEST)


def _choose_rows_per_pass(s_NV: Tensor) -> int:
    return max(PASS_ELEMENTS[s_NV.device.type] // s_NV.shape[1], 1)


def make_sample(parts: Sequence[dict[str, np.ndarray]], kind: type[Reading] = Sample) -> Any:
    """Make the sample of all positions of ``parts``, of which there must be at least one, in order.

    Each part holds the arrays of a sample of ``kind``.
    """
    return kind(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


@dataclass(frozen=True)
class _Tail:
    """The drawn tail: counts (N,), the row of each entry (M,), and the ids (M, R).

    The ids ascend within each record and draw.
    """

    count_N: Tensor
    rows_M: Tensor
    ids_MR: Tensor


@dataclass(frozen=True)
class _Points:
    """The points of one draw: for all slots (N, m), and the rows and slots (M,) that are drawn."""

    points_Nm: Tensor
    rows_M: Tensor
    slots_M: Tensor

    def pick(self, values_Nm: Tensor) -> Tensor:
        """Return the values of the points that are drawn, (M,)."""
        return values_Nm[self.rows_M, self.slots_M]


def _draw_tail(sizes: TokenSizes, chance: Randomness, threshold: float) -> _Tail:
    """Draw the tail. On a GPU it waits for the device once, to know the number of entries."""
    # float64: points are compared with sums over the whole vocabulary.
    running_NQ = chance.arrange(sizes.sums_NQ).cumsum(1, dtype=torch.float64)
    rest_N = running_NQ[:, -1]
    # Where every token of the vocabulary is known or in the head, the tail is empty.
    count_N = torch.where(rest_N > 0, torch.floor(rest_N / threshold).clamp(min=1), 0).long()
    # Slots that hold the tail of every position. A GPU would have to be waited for to know the
    # largest count: it gets the largest of any teacher, whose sizes sum to 1 up to roundings.
    if count_N.is_cuda:
        slots = math.floor(1.001 / threshold) + 1
    else:
        slots = int(count_N.max()) if len(count_N) else 0
    slot_m = torch.arange(slots, device=count_N.device)
    rows_M, slots_M = (slot_m < count_N[:, None]).nonzero(as_tuple=True)
    apart_N = rest_N / count_N.clamp(min=1)
    # With more points than blocks, a search by blocks reads most blocks again and again, and a sum
    # over all of V costs less. Its rounding may move a point to the neighbouring token. So the
    # larger thresholds keep the search by blocks: the bytes of their caches must not change.
    find: Callable[[_Points], Tensor]
    if threshold < min(1 / 255, 1 / chance.blocks):
        find = partial(_find_by_tokens, _accumulate_sizes(sizes, chance))
    else:
        find = partial(_find_by_blocks, sizes, running_NQ, chance)
    draws = []
    for uniform_N in chance.uniform_NR.unbind(1):
        points_Nm = (uniform_N[:, None] + slot_m) * apart_N[:, None]
        draws.append(_order_ids(find(_Points(points_Nm, rows_M, slots_M)), rows_M, chance))
    return _Tail(count_N, rows_M, torch.stack(draws, 1))


def _order_ids(place_M: Tensor, rows_M: Tensor, chance: Randomness) -> Tensor:
    """Turn places, counted in the order of the blocks, into token ids that ascend within each
    row.
    """
    block_M = place_M // BLOCK
    vocabulary = chance.blocks * BLOCK
    ids_M = chance.find_blocks(rows_M, block_M) * BLOCK + (place_M - block_M * BLOCK)
    # Row and id in one number: one sort orders both.
    keys_M = rows_M * vocabulary + ids_M
    if keys_M.is_cuda:
        return keys_M.sort().values % vocabulary
    # numpy sorts numbers several times as fast as torch does.
    return torch.from_numpy(np.sort(keys_M.numpy()) % vocabulary)


def _accumulate_sizes(sizes: TokenSizes, chance: Randomness) -> Tensor:
    """Return the running sum of sizes over all tokens, with blocks in the order of ``chance``."""
    rows_N1 = torch.arange(len(sizes.size_NQU), device=chance.order_Q.device)[:, None]
    arranged_NQU = (
        sizes.size_NQU[:, chance.order_Q]
        if chance.order_Q.dim() == 1
        else sizes.size_NQU[rows_N1, chance.order_Q]
    )
    return arranged_NQU.flatten(1).cumsum(1, dtype=torch.float64)


def _find_by_tokens(running_NV: Tensor, points: _Points) -> Tensor:
    """Find the places (M,) under the drawn points, in a running sum over all tokens.

    A point beyond the end takes the last token with a size above 0.
    """
    last_N1 = (running_NV < running_NV[:, -1:]).sum(-1, keepdim=True)
    found_Nm = torch.searchsorted(running_NV, points.points_Nm, right=True)
    return points.pick(torch.minimum(found_Nm, last_N1))


def _find_by_blocks(
    sizes: TokenSizes, running_NQ: Tensor, chance: Randomness, points: _Points
) -> Tensor:
    """Find the places (M,) under the drawn points: first the block of each, then the place in the
    block.

    A running sum over all of V would need float64, because in float32 its error would rival the
    small probabilities at its end. That would cost as much as the whole rest of the sampling. A
    point that rounding moves beyond its block takes the block's last token with a size above 0.
    """
    block_Nm = torch.searchsorted(running_NQ, points.points_Nm, right=True)
    block_Nm.clamp_(max=chance.blocks - 1)
    before_Nm = torch.nn.functional.pad(running_NQ, (1, -1)).gather(1, block_Nm)
    block_M = points.pick(block_Nm)
    blocks_M = chance.find_blocks(points.rows_M, block_M)
    inside_MU = sizes.size_NQU[points.rows_M, blocks_M].double().cumsum(-1)
    offset_M1 = points.pick(points.points_Nm - before_Nm)[:, None]
    place_M = (inside_MU <= offset_M1).sum(-1)
    return block_M * BLOCK + torch.minimum(place_M, (inside_MU < inside_MU[:, -1:]).sum(-1))


def reduce_by_row(reduce: Callable[..., Tensor], *rows_NV: Tensor) -> Tensor:
    """Apply ``reduce`` to each row, with the same bits for any number of rows and threads.

    PyTorch splits a single row among its threads, and so sums it in another order than one of many
    rows. A single row is therefore reduced twice, side by side.
    """
    if len(rows_NV[0]) != 1:
        return reduce(*rows_NV)
    return reduce(*(row_1V.repeat(2, 1) for row_1V in rows_NV))[:1]


def average_tempered_(p_NV: Tensor, s_NV: Tensor, betas: tuple[float, ...]) -> None:
    """Turn p = softmax(s) into the mean of softmax(b s) over ``betas``, in place."""
    # p is softmax(1 s) already; it stays in the sum only where 1 is one of the betas.
    if 1.0 not in betas:
        p_NV.zero_()
    for beta in betas:
        if beta != 1.0:
            p_NV.add_(torch.softmax(s_NV * beta, -1))
    p_NV.div_(len(betas))


def compute_partition(tail_NV: Tensor, betas: tuple[float, ...]) -> Tensor:
    """Return B(b) = log sum exp(b l) over the tail and its derivative E_b[l], (N, J, 2), at each b
    = 1 / T.

    ``tail_NV`` holds log-probabilities l, and ``LOWEST`` for tokens outside the tail.
    """
    top_N = tail_NV.amax(-1)
    values = []
    scaled_NV = torch.empty_like(tail_NV)
    p_NV = torch.empty_like(tail_NV)
    for beta in betas:
        torch.softmax(torch.mul(tail_NV, beta, out=scaled_NV), -1, out=p_NV)
        # log p = b l - B(b) at the most probable token; softmax is faster than exp and a sum.
        value_N = beta * top_N - p_NV.amax(-1).log()
        values.append(torch.stack([value_N, reduce_by_row(torch.linalg.vecdot, p_NV, tail_NV)], -1))
    return torch.stack(values, 1)
