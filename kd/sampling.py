"""Logits -> samples: the head exact, the tail by systematic sampling with probability proportional to size.

For a position with teacher distribution p over V tokens, threshold tau, and a size g for every token (p itself, or for
profile tempered the mean of p_T over the proposal's temperatures):

    known   the gold token and the always_keep ids, with their log-probabilities
    head    every other token with g > tau, with its log-probability
    tail    R = sum of what is left of g; m = max(1, floor(R / tau)) tokens by systematic sampling, token i with
            probability m g_i / R

Inclusion probabilities min(1, g / tau') give the least variance of any unbiased estimate of that size (Cohen, Duffield,
Kaplan, Lund, Thorup, "Stream sampling for variance-optimal estimation of subset sums", SODA 2009, arXiv 0803.0473).
Systematic: lay the tail end to end in a random order and take the tokens under the m points (u + k) R / m. No token
stands under two points, because g <= tau <= R / m (or m = 1). The order is random between blocks of 64 tokens and fixed
within them; inclusion probabilities, and so means and the variance of each weight, are the same for any order.

Shapes: N positions of one sequence, V vocabulary, J blocks of V, K forced ids, E draws, H and M head and tail entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec, Sample
from cache.random import PURPOSE_TAIL, permutation, uniforms
from kd.block_sizes import BLOCK, LOWEST, BlockSizes
from kd.errors import ModelError
from kd.student_rows import kernels_run

#: Logits that are worked on at once: on a CPU several passes over them should find them in its cache.
PASS_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


@dataclass(frozen=True)
class Chance:
    """The randomness of N positions of one sequence: ``uniform_NE`` in [0, 1), and the order of the blocks (J,)."""

    uniform_NE: Tensor
    order_J: Tensor

    @classmethod
    def of(cls, codec: Codec, sequence: int, positions_N: np.ndarray, device: torch.device) -> Chance:
        """A pure function of (seed, sequence, position).

        The E draws of a position share its order and start at equal distances: together they are one systematic sample
        of E times the size, so their mean varies less than that of independent draws.
        """
        first = uniforms(codec.seed, PURPOSE_TAIL, sequence, positions_N)
        uniform = (first[:, None] + np.arange(codec.draws) / codec.draws) % 1.0
        order = permutation(codec.seed, sequence, -(-codec.vocabulary_size // BLOCK))
        return cls(torch.from_numpy(uniform).to(device), torch.from_numpy(order).to(device))

    def rows(self, rows: slice) -> Chance:
        """The randomness of some of the positions."""
        return Chance(self.uniform_NE[rows], self.order_J)


@dataclass(frozen=True)
class Sizes:
    """What one pass over the logits leaves: LSE and entropy (N,), sizes in blocks, and each block's largest (N, J)."""

    lse_N: Tensor
    entropy_N: Tensor
    size_NJB: Tensor
    largest_NJ: Tensor

    @property
    def sums_NJ(self) -> Tensor:
        """The sum of each block's."""
        return self.size_NJB.sum(-1)

    def of_blocks(self, rows_M: Tensor, blocks_M: Tensor) -> Tensor:
        """The sizes of some blocks, (M, 64)."""
        return self.size_NJB[rows_M, blocks_M]


class Sampler:
    """Takes samples of logits for profile threshold, or for profile tempered with its log-partition at some nodes."""

    def __init__(self, codec: Codec, nodes: int = 0) -> None:
        self.codec = codec
        self.nodes = nodes
        self._sizes: Sizes | None = None

    def sample(self, logits_NV: Tensor, gold_N: Tensor, chance: Chance) -> Sample:
        """What is kept of N positions. Row n depends on row n alone: it does not matter how positions were batched.

        Raises ``ModelError`` where logits are NaN or infinite; -inf is a token that cannot come.
        """
        wide, known_NK = torch.promote_types(logits_NV.dtype, torch.float32), self.known(gold_N)
        sizes: Sizes | BlockSizes
        if self.codec.profile == "threshold" and kernels_run(logits_NV):
            sizes = BlockSizes.of(logits_NV, known_NK, self.codec.threshold)
            _require_finite(sizes)
            rows_H, ids_H = sizes.head
        else:
            logits_NV = logits_NV.to(wide)
            sizes, (rows_H, ids_H) = self.split(logits_NV, known_NK)
        tail_count, tail_ids = _tail(sizes, chance, self.codec.threshold)
        found = Sample(
            known_logprobs=(logits_NV.gather(1, known_NK).to(wide) - sizes.lse_N[:, None]).cpu().numpy(),
            entropy=sizes.entropy_N.clone().cpu().numpy(),  # the next call writes over it
            head_count=torch.bincount(rows_H, minlength=len(gold_N)).cpu().numpy(),
            head_ids=ids_H.cpu().numpy(),
            head_logprobs=(logits_NV[rows_H, ids_H].to(wide) - sizes.lse_N[rows_H]).cpu().numpy(),
            tail_count=tail_count,
            tail_ids=tail_ids,
        )
        return found if isinstance(sizes, BlockSizes) else self._tempered(found, logits_NV, sizes)

    def split(self, s_NV: Tensor, known_NK: Tensor) -> tuple[Sizes, tuple[Tensor, Tensor]]:
        """The sizes, which are 0 but in the tail, and rows and ids (H,) of heads."""
        sizes = self._read(s_NV)
        sizes.size_NJB.flatten(1).scatter_(1, known_NK, 0.0)
        head = _above(sizes, self.codec.threshold)
        sizes.size_NJB.flatten(1)[head] = 0.0
        return sizes, head

    def known(self, gold_N: Tensor) -> Tensor:
        """The next token and the always_keep ids, (N, 1 + K)."""
        return torch.cat([gold_N[:, None], gold_N.new_tensor([self.codec.always_keep]).expand(len(gold_N), -1)], 1)

    def _read(self, s_NV: Tensor) -> Sizes:
        """One pass over the logits, a few rows at a time: all but its first step find them in the processor's cache."""
        positions, vocabulary = s_NV.shape
        step = _rows_a_pass(s_NV)
        sizes = self._room(s_NV)
        room_nV = s_NV.new_empty(min(step, positions), vocabulary)
        for start in range(0, positions, step):
            rows = slice(start, min(start + step, positions))
            s_nV, size_nJB, largest_nJ = room_nV[: rows.stop - start], sizes.size_NJB[rows], sizes.largest_NJ[rows]
            size_nV = size_nJB.flatten(1)[:, :vocabulary]
            torch.clamp(s_NV[rows], min=LOWEST, out=s_nV)
            torch.softmax(s_nV, -1, out=size_nV)
            torch.amax(size_nJB, -1, out=largest_nJ)
            sizes.lse_N[rows] = s_nV.amax(-1) - largest_nJ.amax(-1).log()
            sizes.entropy_N[rows] = sizes.lse_N[rows] - by_row(torch.linalg.vecdot, size_nV, s_nV)
            if self.codec.profile == "tempered":
                mean_tempered_(size_nV, s_nV, self.codec.proposal_betas)
                torch.amax(size_nJB, -1, out=largest_nJ)
        _require_finite(sizes)
        return sizes

    def _room(self, s_NV: Tensor) -> Sizes:
        """Where to put what is found, kept from call to call: fresh memory costs more than a pass over it."""
        positions, vocabulary = s_NV.shape
        blocks = -(-vocabulary // BLOCK)
        kept = self._sizes
        if kept is None or kept.size_NJB.dtype != s_NV.dtype or kept.largest_NJ.shape[0] < positions:
            size_NJB = s_NV.new_zeros(positions, blocks, BLOCK)  # the last block's padding stays 0
            lse_N, entropy_N = s_NV.new_empty(2, positions).unbind()
            self._sizes = kept = Sizes(lse_N, entropy_N, size_NJB, s_NV.new_empty(positions, blocks))
        return Sizes(*(getattr(kept, field.name)[:positions] for field in fields(Sizes)))

    def _tempered(self, found: Sample, s_NV: Tensor, sizes: Sizes) -> Sample:
        """``found`` with what other temperatures need, if any: the tail's log-probabilities, and its log-partition."""
        if self.codec.profile == "threshold":
            return found
        betas = self.codec.nodes(self.nodes)
        rows_M = torch.from_numpy(np.repeat(np.arange(len(s_NV)), found.tail_count)).to(s_NV.device)[:, None]
        tail_ME = s_NV[rows_M, torch.from_numpy(found.tail_ids).to(s_NV.device)] - sizes.lse_N[rows_M]
        parts = []
        for start in range(0, max(len(s_NV), 1), _rows_a_pass(s_NV)):
            rows = slice(start, start + _rows_a_pass(s_NV))
            parts.append(partition(tail_logprobs(s_NV[rows], sizes, rows), betas))
        return replace(found, tail_logprobs=tail_ME.cpu().numpy(), partition=torch.cat(parts).cpu().numpy())


def tail_logprobs(s_nV: Tensor, sizes: Sizes, rows: slice) -> Tensor:
    """Log-probabilities (n, V) of some rows' tails; ``LOWEST`` for known and head tokens, whose sizes are 0."""
    in_tail_nV = sizes.size_NJB[rows].flatten(1)[:, : s_nV.shape[1]] > 0
    return torch.where(in_tail_nV, s_nV - sizes.lse_N[rows, None], LOWEST)


def _rows_a_pass(s_NV: Tensor) -> int:
    return max(PASS_ELEMENTS[s_NV.device.type] // s_NV.shape[1], 1)


def joined(parts: list[Sample]) -> Sample:
    """All positions of ``parts`` (at least one), in order."""
    names = [name for name, value in vars(parts[0]).items() if value is not None]
    return Sample(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _above(sizes: Sizes, threshold: float) -> tuple[Tensor, Tensor]:
    """Rows and ids (H,) of sizes above the threshold, in ascending order; blocks without one are not looked at."""
    rows_b, blocks_b = (sizes.largest_NJ > threshold).nonzero(as_tuple=True)
    which_H, place_H = (sizes.size_NJB[rows_b, blocks_b] > threshold).nonzero(as_tuple=True)
    return rows_b[which_H], blocks_b[which_H] * BLOCK + place_H


def _require_finite(sizes: Sizes | BlockSizes) -> None:
    if not (torch.isfinite(sizes.entropy_N) & (sizes.lse_N > LOWEST / 2)).all():
        remedy = "Run it in float32 or bfloat16 (teacher.dtype)."
        raise ModelError(f"The teacher's logits are NaN or infinite, or all below {LOWEST / 2:g}.", remedy)


def _tail(sizes: Sizes | BlockSizes, chance: Chance, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts (N,) and ids (M, E), ascending within a record and draw, from the sizes that are left."""
    order_J = chance.order_J
    running_NJ = sizes.sums_NJ.index_select(1, order_J).cumsum(1, dtype=torch.float64)
    rest_N = running_NJ[:, -1]
    # Where all of the vocabulary is known or head, nothing is left to draw from.
    count_N = torch.where(rest_N > 0, torch.floor(rest_N / threshold).clamp(min=1), 0).long()
    slot_m = torch.arange(int(count_N.max()) if len(count_N) else 0, device=count_N.device)
    drawn_Nm, apart_N = slot_m < count_N[:, None], rest_N / count_N.clamp(min=1)
    # Of more points than blocks, most blocks are looked into again and again: then a sum over all of V costs less. Its
    # rounding may put a point on a neighbour, so thresholds that caches had before keep their way, and their bytes.
    find: Callable[[Tensor, Tensor], Tensor]
    if isinstance(sizes, Sizes) and threshold < min(1 / 255, 1 / len(order_J)):
        find = partial(_by_tokens, _running_NV(sizes, order_J))
    else:
        find = partial(_by_blocks, sizes, running_NJ, order_J)
    draws = [
        _ids(find((uniform_N[:, None] + slot_m) * apart_N[:, None], drawn_Nm), drawn_Nm, order_J)
        for uniform_N in chance.uniform_NE.unbind(1)
    ]
    return count_N.cpu().numpy(), np.stack(draws, axis=1)


def _ids(place_M: Tensor, drawn_Nm: Tensor, order_J: Tensor) -> np.ndarray:
    """The tokens at ``place_M``, counted with the blocks in ``order_J``; ascending within each row."""
    block_M, vocabulary = place_M // BLOCK, len(order_J) * BLOCK
    ids_M = order_J[block_M] * BLOCK + (place_M - block_M * BLOCK)
    keys = np.sort((drawn_Nm.nonzero()[:, 0] * vocabulary + ids_M).cpu().numpy())
    return keys % vocabulary


def _running_NV(sizes: Sizes, order_J: Tensor) -> Tensor:
    """The running sum over all tokens, their blocks in ``order_J``."""
    return sizes.size_NJB[:, order_J].flatten(1).cumsum(1, dtype=torch.float64)


def _by_tokens(running_NV: Tensor, points_Nm: Tensor, drawn_Nm: Tensor) -> Tensor:
    """The places (M,) under the points that are drawn; one past the end takes the last token that has a size."""
    last_N1 = (running_NV < running_NV[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(running_NV, points_Nm, right=True), last_N1)[drawn_Nm]


def _by_blocks(
    sizes: Sizes | BlockSizes, running_NJ: Tensor, order_J: Tensor, points_Nm: Tensor, drawn_Nm: Tensor
) -> Tensor:
    """The same: the block of each point first, then the place inside it.

    Two levels, because a running sum over all of V must be in float64 (in float32 its error would rival the small
    probabilities at its end), which over V would cost as much as all the rest. A point that rounding puts past the
    end of its block takes the block's last token that has a size.
    """
    block_Nm = torch.searchsorted(running_NJ, points_Nm, right=True).clamp_(max=len(order_J) - 1)
    before_Nm = torch.nn.functional.pad(running_NJ, (1, -1)).gather(1, block_Nm)
    block_M = block_Nm[drawn_Nm]
    inside_MB = sizes.of_blocks(drawn_Nm.nonzero()[:, 0], order_J[block_M]).double().cumsum(-1)
    offset_M1 = (points_Nm - before_Nm)[drawn_Nm][:, None]
    place_M, last_M = (inside_MB <= offset_M1).sum(-1), (inside_MB < inside_MB[:, -1:]).sum(-1)
    return block_M * BLOCK + torch.minimum(place_M, last_M)


def by_row(reduce: Callable[..., Tensor], *rows_NV: Tensor) -> Tensor:
    """``reduce`` of each row, (N,), to the same bits for any number of rows and threads.

    A row alone would be shared among the threads, and summed in another order than rows side by side.
    """
    if len(rows_NV[0]) != 1:
        return reduce(*rows_NV)
    return reduce(*(row_1V.repeat(2, 1) for row_1V in rows_NV))[:1]


def log_sum(values_NV: Tensor) -> Tensor:
    """log sum exp of each row."""
    return torch.logsumexp(values_NV, -1)


def mean_tempered_(p_NV: Tensor, s_NV: Tensor, betas: tuple[float, ...]) -> None:
    """Turn p = softmax(s) into the mean of softmax(b s) over ``betas``, in place."""
    if 1.0 not in betas:
        p_NV.zero_()
    for beta in betas:
        if beta != 1.0:
            p_NV.add_(torch.softmax(s_NV * beta, -1))
    p_NV.div_(len(betas))


def partition(tail_NV: Tensor, betas: tuple[float, ...]) -> Tensor:
    """B(b) = log sum exp(b l) over the tail and its derivative E_b[l], (N, G, 2), at the given b = 1 / T.

    ``tail_NV`` holds log-probabilities, and ``LOWEST`` where a token is not in the tail.
    """
    top_N, values = tail_NV.amax(-1), []
    scaled_NV, p_NV = torch.empty_like(tail_NV), torch.empty_like(tail_NV)
    for beta in betas:
        torch.softmax(torch.mul(tail_NV, beta, out=scaled_NV), -1, out=p_NV)
        value_N = beta * top_N - p_NV.amax(-1).log()  # softmax knows the sum, and is faster than an exp alone
        values.append(torch.stack([value_N, by_row(torch.linalg.vecdot, p_NV, tail_NV)], -1))
    return torch.stack(values, 1)
