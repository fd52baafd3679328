"""Targets of weighted entries, from the profiles threshold and tempered.

A record has the exact values of the known ids and of the head (all tokens above the threshold), and
a sample of the tail. KL = -sum_i w_i log q_i - H(p_T), with q the student at T. The entries are
decoded in float64: a position has only a few dozen, and sums of probabilities then need no care.
Where T is a tensor that requires a gradient, weights and entropies are functions of T that autograd
differentiates.

A token of the tail weighs p_T over its chance to be drawn (Horvitz and Thompson, 1952), so that the
mean of its weight over draws is p_T. The sum W of a position's weights is then 1 in the mean, and
not in each draw. Dividing the weights by W would make every draw a distribution, but a biased one:
W is large if improbable tokens were drawn too seldom. So the loss multiplies LSE(s) by W. At
T = 1 of profile threshold all tail weights are equal, and W is 1 in each draw, unless a server
scored ids (``Profile.counts_units``).

Shapes: N positions that have a target, V vocabulary, A known ids (the gold token, then
always_keep), H head, M tail and E all entries of N positions, J knots of the tail's partition
function. Log-probabilities l are at T = 1; b = 1/T; p_T = exp(b l - A(b)).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from cache.codec import Codec
from cache.profiles.threshold import WHOLE, count_units, list_known_masses
from cache.rounding import KNOWN_STEP, PARTITION_STEP
from kd.loss.targets import Columns, decode_entropies, detach_number, list_betas, list_kept_ids

#: More than the ids of any vocabulary.
_IDS = 1 << 32


@dataclass(frozen=True)
class SparseTarget:
    """Weighted entries; those of position n are ``offsets_N1[n]`` to ``offsets_N1[n + 1]``.

    The first ``candidate_count_N[n]`` entries are at least as probable as all tokens that are not
    among them, so the teacher's best token is one of them; 0 if there are no such entries.
    ``normalized`` tells that the weights of every position sum to 1. ``tail_places_M`` are the
    places of sampled entries among all; a chunk has none. ``find_best`` finds the teacher's best
    token, and -1 if it is not known, where records say so. A target of entries is its own chunk.
    """

    offsets_N1: Tensor
    ids_E: Tensor
    weights_E: Tensor
    entropy_N: Tensor
    candidate_count_N: Tensor
    normalized: bool = False
    tail_places_M: Tensor | None = None
    find_best: Callable[[], Tensor] | None = None
    #: Some entries are not all of p.
    whole: ClassVar[bool] = False

    @cached_property
    def total_N(self) -> Tensor | None:
        """The sum W of each position's weights, float64, without a gradient; None if all are 1."""
        return None if self.normalized else self.sum_N(self.weights_E.detach())

    def find_entries(self, rows: slice) -> slice:
        """The range of the entries of positions ``rows``."""
        return slice(self._bounds[rows.start], self._bounds[rows.stop])

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> SparseTarget:
        """The target of positions ``rows``; its numbers stay in float64."""
        entries = self.find_entries(rows)
        find_best = self.find_best
        return SparseTarget(
            self.offsets_N1[rows.start : rows.stop + 1] - entries.start,
            self.ids_E[entries],
            self.weights_E[entries],
            self.entropy_N[rows],
            self.candidate_count_N[rows],
            self.normalized,
            find_best=find_best and (lambda: find_best()[rows]),
        )

    def gather_logits(self, s_NV: Tensor) -> Tensor:
        """s of each entry, (E,)."""
        return _pick(s_NV.reshape(-1), self._locate_entries(s_NV.shape[1]))

    def spread(self, values_N: Tensor) -> Tensor:
        """Each position's value, repeated for each of its entries, (E,)."""
        return _pick(values_N, self.rows_E)

    def compute_expected_N(self, s_NV: Tensor) -> Tensor:
        """sum_i w_i s_i of each position, float64."""
        return self.sum_N(self.weights_E * self.gather_logits(s_NV))

    def sum_N(self, values_E: Tensor) -> Tensor:
        """The sum over each position's entries."""
        # ``unsafe`` skips a check of the lengths, which would wait for the device.
        return torch.segment_reduce(values_E, "sum", lengths=self.offsets_N1.diff(), unsafe=True)

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """q - share * w, in place."""
        weights_E = self.weights_E * (
            self.spread(share[:, 0]) if isinstance(share, Tensor) else share
        )
        # At most one entry of a place has a weight, so the order of additions changes no result.
        q_NV.view(-1).index_add_(
            0, self._locate_entries(q_NV.shape[1]), weights_E.to(q_NV.dtype), alpha=-1
        )

    def find_best_N(self) -> Tensor:
        """The heaviest candidate of each position, of equals the smallest id, or -1."""
        if self.find_best is not None:
            return self.find_best()
        rank_E = (
            torch.arange(len(self.ids_E), device=self.ids_E.device) - self.offsets_N1[self.rows_E]
        )
        weight_E = self.weights_E.masked_fill(~(rank_E < self.candidate_count_N[self.rows_E]), -1.0)
        top_N = weight_E.new_zeros(len(self.candidate_count_N)).scatter_reduce(
            0, self.rows_E, weight_E, "amax"
        )
        return pick_smallest(self.rows_E, self.ids_E, weight_E >= top_N[self.rows_E], len(top_N))

    @cached_property
    def _bounds(self) -> list[int]:
        """The offsets, copied to the host once: each copy waits for the device."""
        bounds: list[int] = self.offsets_N1.tolist()
        return bounds

    @cached_property
    def rows_E(self) -> Tensor:
        """The position of each entry."""
        return _find_rows(self.offsets_N1.diff(), self.ids_E)

    def _locate_entries(self, vocabulary: int) -> Tensor:
        """The place of each entry in a flattened (N, V)."""
        return self.rows_E * vocabulary + self.ids_E


@lru_cache(maxsize=8)
def list_masses_on(device: torch.device) -> Tensor:
    """Return the masses of the codes of known ids on ``device``."""
    return torch.from_numpy(list_known_masses()).to(device)


def decode_units(codec: Codec, columns: Columns, gold_N: Tensor) -> SparseTarget:
    """The target at T = 1 of profile threshold: heads and tails weigh their units.

    What the known ids leave, in the integers in which it was counted, is the mass of all units. It
    may be a little negative; clipping it would bias the loss.
    """
    twice_H = columns["head_units"].long()
    entries = _SampledEntries.of(codec, columns, gold_N)
    codes_NA = columns["known"].long()
    mass_NA = list_masses_on(codes_NA.device)[codes_NA] * entries.counted_NA
    rest_N, number_N = count_units(mass_NA.sum(1), codec.threshold)
    share_N = rest_N.double() / (number_N.clamp(min=1) * WHOLE)
    known_NA = mass_NA.double() / WHOLE
    # Without a unit the rest is rounding, which goes to the gold token.
    known_NA[:, 0] += (rest_N.double() / WHOLE).masked_fill(number_N > 0, 0.0)
    weights = (
        known_NA,
        (twice_H >> 1) * entries.spread_over_head(share_N),
        entries.spread_over_tail(share_N),
    )
    entropy_N = decode_entropies(columns["entropy"], unknown=0.0)
    leads_N = known_NA.amax(1) > codec.threshold
    target = entries.make_target(weights, entropy_N, leads_N)
    # An evaluation asks for it, and no step of a training.
    best = partial(entries.find_best_of_units, known_NA, twice_H, share_N, leads_N)
    normalized = not codec.rules.counts_units
    return replace(target, normalized=normalized, find_best=lru_cache(maxsize=1)(best))


def decode_threshold(codec: Codec, columns: Columns, gold_N: Tensor) -> SparseTarget:
    """The target at T = 1 of profile threshold of version 0.2.0.

    Known ids and head weigh their probability; the M tail entries share the rest equally. Rounding
    may make the rest a little negative; clipping it would bias the loss.
    """
    if codec.rules.dithered:
        return decode_units(codec, columns, gold_N)
    entries = _SampledEntries.of(codec, columns, gold_N)
    known_NA = entries.known_NA.exp() * entries.counted_NA
    head_H = entries.head_H.exp()
    rest_N = 1.0 - known_NA.sum(1) - entries.sum_head(head_H)
    # Where every token is an entry there is no tail. The rest is then rounding, which goes to the
    # gold token, so that the weights sum to 1.
    known_NA[:, 0] += rest_N.masked_fill(entries.tail_count_N > 0, 0.0)
    tail_M = entries.spread_over_tail(rest_N / entries.tail_count_N.clamp(min=1))
    entropy_N = decode_entropies(columns["entropy"], unknown=0.0)
    target = entries.make_target(
        (known_NA, head_H, tail_M), entropy_N, known_NA.amax(1) > codec.threshold
    )
    return replace(target, normalized=True)


def decode_tempered(
    codec: Codec, columns: Columns, gold_N: Tensor, temperature: float | Tensor
) -> SparseTarget:
    """The target at ``temperature`` of profile tempered; its numbers are differentiable in it.

    Known ids and head weigh p_i = exp(b l_i - A(b)), and so does the tail, over the chance that an
    entry was drawn.
    """
    entries = _SampledEntries.of(codec, columns, gold_N)
    beta = 1.0 / temperature
    partition = _Partition(entries, codec, columns["partition"])
    log_tail_N, log_tail_slope_N = partition.compute_tail(beta)
    log_all_N = partition.compute_total(beta)
    known_NA = (beta * entries.known_NA - log_all_N[:, None]).exp() * entries.counted_NA
    head_H = (beta * entries.head_H - entries.spread_over_head(log_all_N)).exp()
    proposal = _Proposal.of(partition)
    tail_M = proposal.weigh_tail(columns["tail_logprobs"], beta, log_all_N)

    mean_l_N = (known_NA * entries.known_NA).sum(1) + entries.sum_head(head_H * entries.head_H)
    # H = A(b) - b E[l]; B'(b) is the tail's mean of l, and exp(B - A) its mass.
    entropy_N = log_all_N - beta * (mean_l_N + (log_tail_N - log_all_N).exp() * log_tail_slope_N)
    # A token is in the head if its g is above the threshold, so known ids are compared in g, too.
    best_N = proposal.evaluate(entries.known_NA.amax(1), proposal.log_all_JN).mean(0)
    return entries.make_target((known_NA, head_H, tail_M), entropy_N, best_N > codec.threshold)


def pick_smallest(rows_H: Tensor, ids_H: Tensor, chosen_H: Tensor, positions: int) -> Tensor:
    """The smallest chosen id of each position, (N,), -1 without one."""
    none = torch.iinfo(torch.int64).max
    least_N = torch.full((positions,), none, device=ids_H.device)
    least_N.scatter_reduce_(0, rows_H, ids_H.masked_fill(~chosen_H, none), "amin")
    return least_N.masked_fill(least_N == none, -1)


def expect_best_heads(
    rows_H: Tensor, ids_H: Tensor, units_H: Tensor, share_N: Tensor, known_N: Tensor
) -> Tensor:
    """Which heads a reader of units takes for the teacher's best tokens, (H,).

    The head of most units, of equals the smallest id, if it has at least two units and is heavier
    than ``known_N``, the heaviest known id. ``share_N`` is the weight of a unit.
    """
    # Units and id in one number: the largest of a position is that of the head.
    keys_H = units_H * _IDS - ids_H
    key_N = torch.zeros_like(share_N, dtype=torch.int64)
    key_N.scatter_reduce_(0, rows_H, keys_H, "amax")
    most_N = -(-key_N // _IDS)
    leads_N = (most_N > 1) & (most_N * share_N > known_N)
    return keys_H == torch.where(leads_N, key_N, 0)[rows_H]


@dataclass(frozen=True)
class _SampledEntries:
    """The decoded entries of sampled records: log-probabilities of known ids and head, ids of all.

    ``counted_NA`` is False for an always_keep id that is the gold token, which is an entry already.
    """

    ids_NA: Tensor
    counted_NA: Tensor
    known_NA: Tensor
    head_ids_H: Tensor
    head_H: Tensor
    head_count_N: Tensor
    tail_ids_M: Tensor
    tail_count_N: Tensor

    @classmethod
    def of(cls, codec: Codec, columns: Columns, gold_N: Tensor) -> _SampledEntries:
        kept_NA = list_kept_ids(codec.always_keep, gold_N.device).expand(len(gold_N), -1)
        # An always_keep id that is the gold token must not count twice.
        gold_N1 = gold_N[:, None]
        return cls(
            ids_NA=torch.cat([gold_N1, kept_NA], 1),
            counted_NA=torch.cat(
                [torch.ones_like(gold_N1, dtype=torch.bool), kept_NA != gold_N1], 1
            ),
            known_NA=columns["known"].double() * -KNOWN_STEP,
            head_ids_H=columns["head_ids"].long(),
            # Heads in units have none.
            head_H=columns.get("head_logprobs", columns["head_ids"]).double() * -codec.head_step,
            head_count_N=columns["head_count"].long(),
            tail_ids_M=columns["tail_ids"].long(),
            tail_count_N=columns["tail_count"].long(),
        )

    def find_best_of_units(
        self, known_NA: Tensor, twice_H: Tensor, share_N: Tensor, leads_N: Tensor
    ) -> Tensor:
        """The teacher's best token, (N,), -1 if it is not known.

        It is the head that ``expect_best_heads`` names, or the heaviest known id above the
        threshold. A marked head (an odd number in ``twice_H``) exchanges them: it is the best
        itself, unless it is expected to be: then a known id is.
        """
        rows_H = self._row_H
        heads = (rows_H, self.head_ids_H, twice_H >> 1)
        is_expected_H = expect_best_heads(*heads, share_N, known_NA.amax(1))
        expected_N = pick_smallest(rows_H, self.head_ids_H, is_expected_H, len(share_N))
        marked_N = pick_smallest(rows_H, self.head_ids_H, twice_H & 1 > 0, len(share_N))
        known_N = self.ids_NA.gather(1, known_NA.argmax(1, keepdim=True))[:, 0]
        other_N = torch.where(expected_N < 0, known_N.masked_fill(~leads_N, -1), expected_N)
        exchanged_N = torch.where(marked_N == expected_N, known_N, marked_N)
        return torch.where(marked_N < 0, other_N, exchanged_N)

    def spread_over_head(self, values_N: Tensor) -> Tensor:
        return _pick(values_N, self._row_H)

    def spread_over_tail(self, values_N: Tensor) -> Tensor:
        return _pick(values_N, self._row_M)

    @cached_property
    def _row_H(self) -> Tensor:
        return _find_rows(self.head_count_N, self.head_ids_H)

    @cached_property
    def _row_M(self) -> Tensor:
        return _find_rows(self.tail_count_N, self.tail_ids_M)

    def sum_head(self, values_H: Tensor) -> Tensor:
        return torch.segment_reduce(values_H, "sum", lengths=self.head_count_N, unsafe=True)

    def make_target(
        self, weights: tuple[Tensor, Tensor, Tensor], entropy_N: Tensor, known_leads_N: Tensor
    ) -> SparseTarget:
        """Join known ids, head and tail of each position. ``weights`` are theirs, in this order.

        ``known_leads_N`` is True if the best known id is above the threshold. A head entry is
        always above the threshold, and a token that is not an entry always below.
        """
        known = self.ids_NA.shape[1]
        explicit_N = known + self.head_count_N
        counts_N = explicit_N + self.tail_count_N
        starts_N = counts_N.cumsum(0) - counts_N
        known_places_NA = starts_N[:, None] + torch.arange(known, device=starts_N.device)
        tail_places_M = _find_places(starts_N + explicit_N, self.tail_count_N, self._row_M)
        place_E = torch.cat(
            [
                known_places_NA.reshape(-1),
                _find_places(starts_N + known, self.head_count_N, self._row_H),
                tail_places_M,
            ]
        )
        ids_E = torch.cat([self.ids_NA.reshape(-1), self.head_ids_H, self.tail_ids_M])
        weights_E = torch.cat([weights[0].reshape(-1), *weights[1:]])
        return SparseTarget(
            torch.cat([starts_N, counts_N.sum()[None]]),
            torch.empty_like(ids_E).scatter(0, place_E, ids_E),
            torch.empty_like(weights_E).scatter(0, place_E, weights_E),
            entropy_N,
            torch.where((self.head_count_N > 0) | known_leads_N, explicit_N, 0),
            tail_places_M=tail_places_M,
        )


@dataclass(frozen=True)
class _Partition:
    """The log partition function A(b) = log sum_v exp(b l_v).

    The explicit entries and the tail's stored part of it, B(b), add up to it.
    """

    entries: _SampledEntries
    codec: Codec
    knots_NJ2: Tensor

    def compute_total(self, beta: float | Tensor) -> Tensor:
        """A(b), (N,). No maximum is subtracted: a record holds log-probabilities down to -256.

        Below T = 0.36 float64 does not hold exp(-256 b). Where such a token is the only entry, the
        sum is 0, its logarithm -inf and the slope NaN; so the sum is at least the least number.
        """
        known_NA = (beta * self.entries.known_NA).exp() * self.entries.counted_NA
        explicit_N = known_NA.sum(1) + self.entries.sum_head((beta * self.entries.head_H).exp())
        least = torch.finfo(explicit_N.dtype).tiny
        return torch.logaddexp(explicit_N.clamp(min=least).log(), self.compute_tail(beta)[0])

    def compute_tail(self, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        """B(b) and B'(b), (N,), interpolated between two knots; -inf and 0 without a tail."""
        knots = self.codec.nodes(self.knots_NJ2.shape[1])
        value_N, slope_N = interpolate_hermite(
            self.knots_NJ2.double() * PARTITION_STEP, knots, beta
        )
        # What a record stores as the partition of an absent tail is arbitrary.
        empty_N = self.entries.tail_count_N == 0
        return value_N.masked_fill(empty_N, -torch.inf), slope_N.masked_fill(empty_N, 0.0)


@dataclass(frozen=True)
class _Proposal:
    """The distribution g = mean_j p_{T_j} in proportion to which the capture drew the tail.

    Here J counts its temperatures T_j, which are the codec's ``proposal_betas``.
    """

    partition: _Partition
    log_all_JN: Tensor
    log_tail_JN: Tensor

    @classmethod
    def of(cls, partition: _Partition) -> _Proposal:
        betas = partition.codec.proposal_betas
        return cls(
            partition,
            torch.stack([partition.compute_total(each) for each in betas]),
            torch.stack([partition.compute_tail(each)[0] for each in betas]),
        )

    def weigh_tail(self, codes_M: Tensor, beta: float | Tensor, log_all_N: Tensor) -> Tensor:
        """The weights p_i R / (m g_i) of the tail's entries, with R the tail's sum of g.

        A position drew m entries, each with the probability m g_i / R. A stored l_i is rounded so
        that the mean of exp(l_i) is right. p_i / g_i is about exp(c l_i), whose mean is then too
        large by the factor 1 + c (c - 1) v / 2, with v = step^2 / 6 the mean variance of the
        rounding. The weights are divided by it: what is left in their sum over tokens of similar
        probability is below 0.05 % for temperatures from 0.5 to 4.
        """
        entries = self.partition.entries
        step = self.partition.codec.tail_step
        betas = self.partition.codec.proposal_betas
        l_M = codes_M.double() * -step
        log_all_JM = torch.stack([entries.spread_over_tail(each_N) for each_N in self.log_all_JN])
        each_JM = self.evaluate(l_M, log_all_JM)
        g_M = each_JM.mean(0)
        beta_J = list_betas(betas, each_JM.device, each_JM.dtype)
        slope_M = beta_J @ each_JM / each_JM.sum(0)  # d log g / dl
        c_M = beta - slope_M
        rounding_M = 1.0 + c_M * (c_M - 1.0) * (step**2 / 12.0)
        rest_N = (self.log_tail_JN - self.log_all_JN).exp().mean(0)
        apart_N = rest_N / entries.tail_count_N.clamp(min=1)
        p_M = (beta * l_M - entries.spread_over_tail(log_all_N)).exp()
        return p_M * entries.spread_over_tail(apart_N) / (g_M * rounding_M)

    def evaluate(self, l_E: Tensor, log_all_JE: Tensor) -> Tensor:
        """p_{T_j} of tokens with log-probabilities ``l_E``, (J, E); their mean is g.

        ``log_all_JE`` is A of their positions.
        """
        beta_J1 = list_betas(self.partition.codec.proposal_betas, l_E.device, l_E.dtype)[:, None]
        return (beta_J1 * l_E - log_all_JE).exp()


def interpolate_hermite(
    knots_NJ2: Tensor, knots: tuple[float, ...], beta: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Cubic Hermite interpolation at ``beta``: value and slope, (N,).

    ``knots_NJ2`` has the value and the slope at each of the J ``knots``, which increase.
    """
    left = min(max(bisect_right(knots, detach_number(beta)) - 1, 0), len(knots) - 2)
    width = knots[left + 1] - knots[left]
    t = (beta - knots[left]) / width
    (b0, d0), (b1, d1) = (knots_NJ2[:, at].unbind(1) for at in (left, left + 1))
    rise = b1 - b0
    d0 = d0 * width
    d1 = d1 * width
    value_N = b0 + t * (d0 + t * (3 * rise - 2 * d0 - d1 + t * (d0 + d1 - 2 * rise)))
    slope_N = (d0 + t * (6 * rise - 4 * d0 - 2 * d1 + t * (3 * d0 + 3 * d1 - 6 * rise))) / width
    return value_N, slope_N


def _find_rows(counts_N: Tensor, like_E: Tensor) -> Tensor:
    """The position of each entry.

    ``like_E`` gives the number of entries, so that the host does not wait for the device.
    """
    return torch.arange(len(counts_N), device=like_E.device).repeat_interleave(
        counts_N, output_size=len(like_E)
    )


def _pick(values_N: Tensor, places_E: Tensor) -> Tensor:
    """``values_N[places_E]``.

    ``index_select`` takes a third of the time on a CPU, but on a GPU it sums its gradient in any
    order.
    """
    return values_N[places_E] if values_N.requires_grad else values_N.index_select(0, places_E)


def _find_places(starts_N: Tensor, counts_N: Tensor, row_E: Tensor) -> Tensor:
    """start, start + 1, ... of each position, joined; ``row_E`` is the position of each."""
    before_N = counts_N.cumsum(0) - counts_N
    return _pick(starts_N - before_N, row_E) + torch.arange(len(row_E), device=row_E.device)
