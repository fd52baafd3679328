"""The teacher's compact columns -> what the student should predict at a temperature, on the device that trains.

    threshold, tempered   weighted entries        KL = LSE(s) - sum_i w_i s_i - H(p_T)
    topk                  entries and one bucket  KL = sum_i p_i log(p_i / q_i) + r log(r / (1 - sum_i q_i))
    dense, hidden         all of p_T              KL = sum_v p_v log(p_v / q_v)

with s the student's logits over T and q = softmax(s). All of it is LSE(s) - E[s] - H, and the gradient with respect to
s is q - p: that is what a chunk of a target gives to the loss. Numbers of entries are decoded in float64: there are a
few dozen a position, and it leaves nothing to think about in sums of probabilities. Where T is a tensor that requires
a gradient, weights and entropies of entries are functions of it that autograd knows.

Shapes: N positions that have a target, V vocabulary, D the teacher's width, K always_keep ids, H head, M tail and E all
entries of N positions, G nodes, k most probable tokens. Log-probabilities l at T = 1; b = 1/T; p_T = exp(b l - A(b)).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.codec import ENTROPY_STEP, KNOWN_STEP, PARTITION_STEP, TOP_STEP, UNKNOWN, UNKNOWN_ENTROPY, Codec
from cache.profiles import FORWARD_KL, PROFILES, unserved
from kd.batches import Source
from kd.cosines import from_cosines
from kd.models import Head
from kd.precision import float32_products

if TYPE_CHECKING:
    from kd.losses import Objective

Columns = dict[str, Tensor]

LEAST_LOGPROB = -1e4  # of a token that the teacher forbids: 0 in every sum, and finite in every divergence


class Chunk(Protocol):
    """The target of some consecutive positions, in the terms of the loss."""

    @property
    def entropy_N(self) -> Tensor:
        """H(p) in nats; 0 where the record does not know it, so that KL is a cross-entropy there."""
        ...

    def expected_N(self, s_NV: Tensor) -> Tensor:
        """E_p[s] of each position, float64."""
        ...

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """Turn the student's probabilities q, times any number, into that less share * p, in place.

        ``share`` is a number, or (N, 1) in the dtype of ``q_NV``.
        """
        ...

    def best_N(self) -> Tensor:
        """The teacher's most probable token, -1 where the record does not know it."""
        ...


class Target(Protocol):
    """The teacher's distributions at N positions."""

    @property
    def whole(self) -> bool:
        """Whether it says the probability of every token."""
        ...

    def chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> Chunk:
        """The target of positions ``rows``; all of p comes in ``dtype``."""
        ...


@dataclass(frozen=True)
class Targets:
    """What N positions should predict: the hard label, and the teacher's distribution at ``temperature``.

    ``teacher`` is None where there is none (alpha must be 1). ``entropy_N`` is the teacher's H in nats at T = 1 as the
    records have it, float64, NaN where nobody said.
    """

    gold_N: Tensor
    teacher: Target | None = None
    temperature: float | Tensor = 1.0
    entropy_N: Tensor | None = None

    def __len__(self) -> int:
        return self.gold_N.shape[0]

    @property
    def temperature_value(self) -> float:
        """The temperature as a number."""
        return number(self.temperature)


def number(temperature: float | Tensor) -> float:
    """``temperature`` without its gradient."""
    return float(temperature.detach()) if isinstance(temperature, Tensor) else temperature


@dataclass(frozen=True)
class TargetDecoder:
    """Turns the columns of a batch into targets; made once for a run.

    ``codec`` is None where there is no teacher, ``head`` the teacher's where the codec's profile is hidden. ``k`` reads
    fewer entries of topk records than there are.
    """

    codec: Codec | None
    head: Head | None = None
    k: int | None = None

    @classmethod
    def of(cls, source: Source, device: torch.device) -> TargetDecoder:
        """The decoder for the batches of ``source``."""
        codec, head = source.codec, None
        if codec is not None and codec.profile == "hidden":
            head = teacher_head(source.teacher_head(), codec.vocabulary_size, device)
        return cls(codec, head)

    def require(self, objective: Objective, lowest: float, highest: float) -> None:
        """Raise ``ValueError`` if the profile cannot serve ``objective`` from T ``lowest`` to ``highest``."""
        for temperature in (lowest, highest):
            self._require(objective.divergence, temperature)
        if lowest < highest:
            self._require_any_temperature()

    def _require(self, divergence: str, temperature: float) -> None:
        if self.codec is None:
            return
        span = self.codec.temperatures
        why = unserved(self.codec.profile, (span[0], span[1]) if span else None, divergence, temperature)
        if why is not None:
            raise ValueError(f"The loss cannot be served: {why}.")

    def _require_any_temperature(self) -> None:
        if self.codec is not None and not PROFILES[self.codec.profile].any_temperature:
            raise ValueError(
                f"The loss cannot be served: the temperature moves, but profile {self.codec.profile} is right at 1 "
                "only: use profile tempered, hidden or dense."
            )

    def targets(self, gold_N: Tensor, columns: Columns | None, temperature: float | Tensor = 1.0) -> Targets:
        """The targets of N positions, on the device of their columns; hard labels alone where there are none.

        ``temperature`` is a number, or a 0-dim tensor; where it requires a gradient, the loss computes it. Raises
        ``ValueError`` where the profile cannot serve it.
        """
        if columns is None:
            return Targets(gold_N, temperature=temperature)
        self._require(FORWARD_KL, number(temperature))
        if isinstance(temperature, Tensor) and temperature.requires_grad:
            self._require_any_temperature()
        teacher = self._teacher(gold_N, columns, temperature)
        return Targets(gold_N, teacher, temperature, _entropies(columns["entropy"], unknown=torch.nan))

    def _teacher(self, gold_N: Tensor, columns: Columns, temperature: float | Tensor) -> Target:
        assert self.codec is not None, "records come with their codec"
        match self.codec.profile:
            case "threshold":
                return threshold_target(self.codec, columns, gold_N)
            case "tempered":
                return tempered_target(self.codec, columns, gold_N, temperature)
            case "topk":
                return top_target(columns, self.k)
            case "dense":
                return DenseTarget(columns["logprobs"], number(temperature))
            case _:
                assert self.head is not None, "a hidden cache comes with its teacher's head"
                states = columns["hidden"], columns["hidden_scale"]
                return HiddenTarget(*states, self.head, number(temperature), self.codec.cosines)


# ---------------------------------------------------------------------- weighted entries


@dataclass(frozen=True)
class SparseTarget:
    """Entries ``offsets_N1[n]`` to ``offsets_N1[n + 1]`` belong to position n; their weights sum to 1.

    The first ``leaders_N[n]`` of them have probabilities that no other token exceeds all of, so that the teacher's best
    token is among them; 0 where there are none such. A target of entries is its own chunk.
    """

    offsets_N1: Tensor
    ids_E: Tensor
    weights_E: Tensor
    entropy_N: Tensor
    leaders_N: Tensor

    @property
    def whole(self) -> bool:
        """Some entries are not all of p."""
        return False

    def entries(self, rows: slice) -> slice:
        """Which entries are those of positions ``rows``."""
        return slice(self._bounds[rows.start], self._bounds[rows.stop])

    def chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> SparseTarget:
        """The target of positions ``rows``; in float64 whatever ``dtype``."""
        entries = self.entries(rows)
        return SparseTarget(
            self.offsets_N1[rows.start : rows.stop + 1] - entries.start,
            self.ids_E[entries],
            self.weights_E[entries],
            self.entropy_N[rows],
            self.leaders_N[rows],
        )

    def at(self, s_NV: Tensor) -> Tensor:
        """s of each entry, (E,)."""
        return _picked(s_NV.reshape(-1), self._places(s_NV.shape[1]))

    def spread(self, values_N: Tensor) -> Tensor:
        """Each position's value for each of its entries, (E,)."""
        return _picked(values_N, self.rows_E)

    def expected_N(self, s_NV: Tensor) -> Tensor:
        """sum_i w_i s_i of each position, float64."""
        return self.sum_N(self.weights_E * self.at(s_NV))

    def sum_N(self, values_E: Tensor) -> Tensor:
        """The sum of each position's entries."""
        return torch.segment_reduce(values_E, "sum", lengths=self.offsets_N1.diff(), unsafe=True)

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """q - share * w, in place."""
        weights_E = self.weights_E * (self.spread(share[:, 0]) if isinstance(share, Tensor) else share)
        # No two entries with a weight share a place, so the sum has no collisions that count and is deterministic.
        q_NV.view(-1).index_add_(0, self._places(q_NV.shape[1]), weights_E.to(q_NV.dtype), alpha=-1)

    def best_N(self) -> Tensor:
        """The heaviest of each position's leaders (of equals the smallest id), -1 where it has none."""
        rank_E = torch.arange(len(self.ids_E), device=self.ids_E.device) - self.offsets_N1[self.rows_E]
        leads_E = rank_E < self.leaders_N[self.rows_E]
        weight_E = self.weights_E.masked_fill(~leads_E, -1.0)
        top_N = weight_E.new_zeros(len(self.leaders_N)).scatter_reduce(0, self.rows_E, weight_E, "amax")
        none = torch.iinfo(torch.int64).max
        best_E = self.ids_E.masked_fill(weight_E < top_N[self.rows_E], none)
        best_N = self.ids_E.new_full((len(self.leaders_N),), none).scatter_reduce(0, self.rows_E, best_E, "amin")
        return best_N.masked_fill(self.leaders_N == 0, -1)

    @cached_property
    def _bounds(self) -> list[int]:
        """The offsets on the host: one wait for the device, not one a chunk."""
        bounds: list[int] = self.offsets_N1.tolist()
        return bounds

    @cached_property
    def rows_E(self) -> Tensor:
        """The position of each entry."""
        return _rows(self.offsets_N1.diff(), self.ids_E)

    def _places(self, vocabulary: int) -> Tensor:
        """The place of each entry in a flattened (N, V)."""
        return self.rows_E * vocabulary + self.ids_E


def threshold_target(codec: Codec, columns: Columns, gold_N: Tensor) -> SparseTarget:
    """The target at T = 1 of profile threshold: entries weigh their probability, the tail's m share what is left.

    What is left may be a little below 0 where rounding lifted the others above 1: clipping would bias it.
    """
    entries = _Entries.of(codec, columns, gold_N)
    known_NK, head_H = entries.known_NK.exp() * entries.counted_NK, entries.head_H.exp()
    rest_N = 1.0 - known_NK.sum(1) - entries.sum_head(head_H)
    # Where every token is an entry there is no tail, and what is left is rounding: it goes to the gold token.
    known_NK[:, 0] += rest_N.masked_fill(entries.has_tail_N, 0.0)
    tail_M = entries.over_tail(rest_N / entries.tail_count_N.clamp(min=1))
    entropy_N = _entropies(columns["entropy"], unknown=0.0)
    return entries.target((known_NK, head_H, tail_M), entropy_N, known_NK.amax(1) > codec.threshold)


def _entropies(codes_N: Tensor, unknown: float) -> Tensor:
    """H(p) in nats, float64."""
    return (codes_N.double() * ENTROPY_STEP).masked_fill(codes_N == UNKNOWN_ENTROPY, unknown)


def tempered_target(codec: Codec, columns: Columns, gold_N: Tensor, temperature: float | Tensor) -> SparseTarget:
    """The target at ``temperature`` of profile tempered; weights and entropy are differentiable in it.

    w_i = exp(b l_i - A(b)) for tokens of which the record has the exact value. The tail has exp(B(b) - A(b)) in all,
    shared in proportion to exp(b l_i) / g_i, with g = mean_k p_{T_k} what it was sampled in proportion to.
    """
    entries, beta = _Entries.of(codec, columns, gold_N), 1.0 / temperature
    partition = _Partition(entries, codec, columns["partition"])
    log_tail_N, log_tail_slope_N = partition.tail(beta)
    log_all_N = partition.all(beta)
    known_NK = (beta * entries.known_NK - log_all_N[:, None]).exp() * entries.counted_NK
    head_H = (beta * entries.head_H - entries.over_head(log_all_N)).exp()
    mass_N = (log_tail_N - log_all_N).exp()

    proposals = [(each, partition.all(each)) for each in codec.proposal_betas]
    tail_l_M = columns["tail_logprobs"].double() * -codec.tail_step
    size_M = torch.stack([(each * tail_l_M - entries.over_tail(log_N)).exp() for each, log_N in proposals]).mean(0)
    ratio_M = (beta * tail_l_M).exp() / size_M
    tail_M = ratio_M * entries.over_tail(mass_N / entries.sum_tail(ratio_M).clamp(min=1e-300))

    mean_l_N = (known_NK * entries.known_NK).sum(1) + entries.sum_head(head_H * entries.head_H)
    entropy_N = log_all_N - beta * (mean_l_N + mass_N * log_tail_slope_N)
    best_known_N = entries.known_NK.amax(1)
    best_size_N = torch.stack([(each * best_known_N - log_N).exp() for each, log_N in proposals]).mean(0)
    return entries.target((known_NK, head_H, tail_M), entropy_N, best_size_N > codec.threshold)


@dataclass(frozen=True)
class _Entries:
    """The entries of sampled records, as numbers: known ids (gold first), head and tail.

    ``counted_NK`` is False for an always_keep id that is the gold token, which is an entry already.
    """

    ids_NK: Tensor
    counted_NK: Tensor
    known_NK: Tensor
    head_ids_H: Tensor
    head_H: Tensor
    head_count_N: Tensor
    tail_ids_M: Tensor
    tail_count_N: Tensor

    @classmethod
    def of(cls, codec: Codec, columns: Columns, gold_N: Tensor) -> _Entries:
        kept_K = torch.tensor(codec.always_keep, dtype=torch.int64, device=gold_N.device)
        kept_NK = kept_K.expand(len(gold_N), -1)
        gold_N1 = gold_N[:, None]
        return cls(
            ids_NK=torch.cat([gold_N1, kept_NK], 1),
            counted_NK=torch.cat([torch.ones_like(gold_N1, dtype=torch.bool), kept_NK != gold_N1], 1),
            known_NK=columns["known"].double() * -KNOWN_STEP,
            head_ids_H=columns["head_ids"].long(),
            head_H=columns["head_logprobs"].double() * -codec.head_step,
            head_count_N=columns["head_count"].long(),
            tail_ids_M=columns["tail_ids"].long(),
            tail_count_N=columns["tail_count"].long(),
        )

    @property
    def has_tail_N(self) -> Tensor:
        return self.tail_count_N > 0

    def over_head(self, values_N: Tensor) -> Tensor:
        return _picked(values_N, self._row_H)

    def over_tail(self, values_N: Tensor) -> Tensor:
        return _picked(values_N, self._row_M)

    @cached_property
    def _row_H(self) -> Tensor:
        return _rows(self.head_count_N, self.head_ids_H)

    @cached_property
    def _row_M(self) -> Tensor:
        return _rows(self.tail_count_N, self.tail_ids_M)

    def sum_head(self, values_H: Tensor) -> Tensor:
        return torch.segment_reduce(values_H, "sum", lengths=self.head_count_N, unsafe=True)

    def sum_tail(self, values_M: Tensor) -> Tensor:
        return torch.segment_reduce(values_M, "sum", lengths=self.tail_count_N, unsafe=True)

    def target(self, weights: tuple[Tensor, Tensor, Tensor], entropy_N: Tensor, known_leads_N: Tensor) -> SparseTarget:
        """Known, head and tail side by side. ``known_leads_N``: the best of the known is above the threshold.

        A head entry is always above it, and all that is not an entry below.
        """
        known, head = self.ids_NK.shape[1], self.head_count_N
        counts_N = known + head + self.tail_count_N
        starts_N = counts_N.cumsum(0) - counts_N
        heads_N, tails_N = starts_N + known, starts_N + known + head
        place_E = torch.cat(
            [
                (starts_N[:, None] + torch.arange(known, device=head.device)).reshape(-1),
                _places(heads_N, head, self._row_H),
                _places(tails_N, self.tail_count_N, self._row_M),
            ]
        )
        ids_E = torch.cat([self.ids_NK.reshape(-1), self.head_ids_H, self.tail_ids_M])
        weights_E = torch.cat([weights[0].reshape(-1), *weights[1:]])
        return SparseTarget(
            torch.cat([starts_N, counts_N.sum()[None]]),
            torch.empty_like(ids_E).scatter(0, place_E, ids_E),
            torch.empty_like(weights_E).scatter(0, place_E, weights_E),
            entropy_N,
            torch.where((head > 0) | known_leads_N, known + head, 0),
        )


@dataclass(frozen=True)
class _Partition:
    """A(b) = log sum_v exp(b l_v), from the entries and the tail's stored share of it, B(b)."""

    entries: _Entries
    codec: Codec
    nodes_NG2: Tensor

    def all(self, beta: float | Tensor) -> Tensor:
        """A(b), (N,). No maximum is taken out: float64 holds exp of -512, the least there is at b = 2."""
        known_NK = (beta * self.entries.known_NK).exp() * self.entries.counted_NK
        explicit_N = known_NK.sum(1) + self.entries.sum_head((beta * self.entries.head_H).exp())
        return torch.logaddexp(explicit_N.log(), self.tail(beta)[0])

    def tail(self, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        """B(b) and B'(b), (N,), by cubic Hermite interpolation between two nodes; -inf and 0 where there is no tail."""
        nodes = self.codec.nodes(self.nodes_NG2.shape[1])
        value_N, slope_N = hermite(self.nodes_NG2.double() * PARTITION_STEP, nodes, beta)
        empty_N = ~self.entries.has_tail_N
        return value_N.masked_fill(empty_N, -torch.inf), slope_N.masked_fill(empty_N, 0.0)


def hermite(nodes_NG2: Tensor, nodes: tuple[float, ...], beta: float | Tensor) -> tuple[Tensor, Tensor]:
    """Value and slope (N,) at ``beta`` of the cubic that has the values and slopes of the two ``nodes`` around it."""
    left = min(max(bisect_right(nodes, number(beta)) - 1, 0), len(nodes) - 2)
    width = nodes[left + 1] - nodes[left]
    t = (beta - nodes[left]) / width
    (b0, d0), (b1, d1) = (nodes_NG2[:, at].unbind(1) for at in (left, left + 1))
    rise, d0, d1 = b1 - b0, d0 * width, d1 * width
    value_N = b0 + t * (d0 + t * (3 * rise - 2 * d0 - d1 + t * (d0 + d1 - 2 * rise)))
    slope_N = (d0 + t * (6 * rise - 4 * d0 - 2 * d1 + t * (3 * d0 + 3 * d1 - 6 * rise))) / width
    return value_N, slope_N


def _rows(counts_N: Tensor, like_E: Tensor) -> Tensor:
    """The position of each entry; as many as ``like_E``, so that the device need not be asked."""
    return torch.arange(len(counts_N), device=like_E.device).repeat_interleave(counts_N, output_size=len(like_E))


def _picked(values_N: Tensor, places_E: Tensor) -> Tensor:
    """``values_N[places_E]``.

    ``index_select`` takes a third of the time on a CPU, but sums its gradient in any order on a GPU.
    """
    return values_N[places_E] if values_N.requires_grad else values_N.index_select(0, places_E)


def _places(starts_N: Tensor, counts_N: Tensor, row_E: Tensor) -> Tensor:
    """start, start + 1, ... of each position, end to end; ``row_E`` is the position of each."""
    before_N = counts_N.cumsum(0) - counts_N
    return _picked(starts_N - before_N, row_E) + torch.arange(len(row_E), device=row_E.device)


# ---------------------------------------------------------------------- the k most probable, and the rest


@dataclass(frozen=True)
class TopTarget:
    """k tokens and their probabilities, (N, k), most probable first, and the mass of the rest, (N,); they sum to 1.

    The rest is one bucket (a ghost token): it asks of the student only how much lies outside, not where. In the
    gradient q - p it is therefore spread as the student spreads it: r q_v / (1 - Q). What the student has outside, 1 -
    Q, is summed over the outside itself: 1 - Q taken as a difference, or as log1mexp of the support's logsumexp, loses
    all digits where Q nears 1. A target of tokens is its own chunk.
    """

    ids_Nk: Tensor
    p_Nk: Tensor
    rest_N: Tensor

    @property
    def whole(self) -> bool:
        """k entries are not all of p."""
        return False

    def chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> TopTarget:
        """The target of positions ``rows``; in float64 whatever ``dtype``."""
        return TopTarget(self.ids_Nk[rows], self.p_Nk[rows], self.rest_N[rows])

    @property
    def entropy_N(self) -> Tensor:
        """H of the k probabilities and the bucket."""
        return torch.special.entr(self.p_Nk).sum(1) + torch.special.entr(self.rest_N)

    def expected_N(self, s_NV: Tensor) -> Tensor:
        """sum_i p_i s_i + r LSE(s outside) of each position, float64."""
        inside_N = (self.p_Nk * s_NV.gather(1, self.ids_Nk)).sum(1)
        outside_N = s_NV.scatter(1, self.ids_Nk, -torch.inf).logsumexp(1)
        return inside_N + (self.rest_N * outside_N).where(self.rest_N > 0, 0.0)

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """q - share * p inside, q (1 - share * r / (1 - Q)) outside, in place."""
        q_Nk = q_NV.gather(1, self.ids_Nk)
        q_NV.scatter_(1, self.ids_Nk, 0.0)
        outside_N = q_NV.sum(1).clamp(min=torch.finfo(q_NV.dtype).tiny)
        q_NV.mul_((1.0 - share * (self.rest_N / outside_N)[:, None]).to(q_NV.dtype))
        q_NV.scatter_(1, self.ids_Nk, q_Nk).scatter_add_(1, self.ids_Nk, self.p_Nk.to(q_NV.dtype) * -share)

    def best_N(self) -> Tensor:
        """The first token of each position."""
        return self.ids_Nk[:, 0]


def top_target(columns: Columns, k: int | None = None) -> TopTarget:
    """The target of profile topk, of its first ``k`` entries; what is left out goes to the rest.

    Rounding makes the stored probabilities sum to 1 within 1e-3: they are divided by their sum.
    """
    logprobs_Nk, residual_N1 = _steps(columns["top_logprobs"]), _steps(columns["residual"])[:, None]
    k = logprobs_Nk.shape[1] if k is None else k
    rest_N = torch.cat([logprobs_Nk[:, k:], residual_N1], 1).logsumexp(1)
    p_Nk1 = torch.cat([logprobs_Nk[:, :k], rest_N[:, None]], 1).softmax(1)
    ids_Nk = columns["top_ids"].long()[:, :k]
    absent_Nk = torch.isinf(logprobs_Nk[:, :k])
    return TopTarget(ids_Nk.where(~absent_Nk, ids_Nk[:, :1]), p_Nk1[:, :-1], p_Nk1[:, -1])


def _steps(codes: Tensor) -> Tensor:
    """Log-probabilities, -inf where there is none."""
    steps = codes.double()
    return (steps * -TOP_STEP).masked_fill(steps == UNKNOWN, -torch.inf)


# ---------------------------------------------------------------------- all probabilities


@dataclass(frozen=True)
class Distribution:
    """All log-probabilities of the positions of one chunk, (N, V)."""

    logp_NV: Tensor

    @cached_property
    def p_NV(self) -> Tensor:
        """All probabilities."""
        return self.logp_NV.exp()

    @cached_property
    def entropy_N(self) -> Tensor:
        """H(p)."""
        return -torch.linalg.vecdot(self.p_NV, self.logp_NV).double()

    def expected_N(self, s_NV: Tensor) -> Tensor:
        """p . s of each position, float64."""
        return torch.linalg.vecdot(self.p_NV.to(s_NV.dtype), s_NV).double()

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """q - share * p, in place."""
        if isinstance(share, Tensor):
            q_NV.addcmul_(self.p_NV, share, value=-1)
        else:
            q_NV.sub_(self.p_NV, alpha=share)

    def best_N(self) -> Tensor:
        """The most probable token."""
        return self.logp_NV.argmax(1)


@dataclass(frozen=True)
class DenseTarget:
    """All log-probabilities at T = 1, (N, V) in float16 or float32."""

    logprobs_NV: Tensor
    temperature: float

    @property
    def whole(self) -> bool:
        """All of p."""
        return True

    def chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> Distribution:
        """softmax(l / T) of positions ``rows``."""
        logprobs_NV = self.logprobs_NV[rows].to(dtype).clamp(min=LEAST_LOGPROB)
        return Distribution(torch.log_softmax(logprobs_NV.div_(self.temperature), 1))


@dataclass(frozen=True)
class HiddenTarget:
    """The teacher's last hidden states, (N, D), or their ``cosines``: multiples of ``scale_N`` in int8 or int16."""

    hidden_ND: Tensor
    scale_N: Tensor
    head: Head
    temperature: float
    cosines: bool = False

    @property
    def whole(self) -> bool:
        """All of p."""
        return True

    def states(self, rows: slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """The hidden states of positions ``rows``."""
        states_ND = self.hidden_ND[rows].to(dtype) * self.scale_N[rows, None]
        return from_cosines(states_ND) if self.cosines else states_ND

    def chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> Distribution:
        """softmax(z / T) of positions ``rows``, with z the logits that the teacher's head makes of them."""
        with float32_products():
            logits_NV = self.head.logits(self.states(rows, dtype))
        return Distribution(torch.log_softmax(logits_NV.div_(self.temperature), 1))


def teacher_head(stored: dict[str, NDArray[Any]], vocabulary: int, device: torch.device) -> Head:
    """The teacher's head as a hidden cache keeps it (``Cache.teacher_head``), on ``device`` in float32."""
    weight, bias = torch.tensor(stored["weight"]), torch.tensor(stored["bias"])  # what is read cannot be written to
    weight = weight.view(torch.bfloat16) if weight.dtype == torch.uint16 else weight
    scale, softcap = stored["transform"].tolist()
    return Head(
        weight=weight.to(device).float(),
        bias=bias.to(device) if len(bias) else None,
        scale=scale,
        softcap=softcap or None,
        vocabulary=vocabulary,
    )
