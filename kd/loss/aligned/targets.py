"""Targets of a student with another tokenizer than its teacher.

Projected KL. At a position where a token of each begins at the same byte, the teacher's entries of
weight w_i are compared with Q_i = c_i sum_{j in S_i} q_j, the student's mass on the tokens S_i that
stand for i (``kd.models.tokenizing.projection``):

    L = W LSE(s) - sum_i w_i log(c_i sum_{j in S_i} e^{s_j}) - H
    dL/ds = W q - p~,   p~_j = sum_i w_i [j in S_i] q_j / sum_{k in S_i} q_k

It is linear in w: of an unbiased sample value and gradient are unbiased. Entries that no token
stands for are left out of W. Elsewhere a position has no entries.

Chunk likelihoods (ALM, Minixhofer et al., arXiv 2503.20083). With S_c and R_c the sums of student's
and teacher's log-probabilities over the tokens of a chunk, tau = ``TAU``,

    P = e^{R/tau}, Q = e^{S/tau}    L_c = tau [P log(P/Q) + (1-P) log((1-P)/(1-Q))]
    -dL_c/dS_c = (P - Q) / (1 - Q)

so the gradient is that of hard labels with this weight, which one pass before it computes.

Shapes: N positions that have a target, V vocabulary, E entries, F members of their groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from cache.layout import Arrays
from kd.loss.chunk_size import choose_chunk_positions
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Columns, Targets, TeacherTarget
from kd.models.lm_head import LMHead

#: tau of chunk likelihoods. At a large one the weights of long chunks do not vanish.
TAU = 100.0
#: The least -log Q/tau: a student that is sure of a chunk has a finite loss.
_LEAST = 1e-9


@dataclass(frozen=True, eq=False)
class Projection:
    """The groups S_i of all tokens of the teacher, on the device of the loss.

    The fields are the arrays of ``kd.models.tokenizing.projection.make_projection``.
    """

    offsets: Tensor
    ids: Tensor
    logs: Tensor
    same: Tensor

    @classmethod
    def of(cls, arrays: Arrays, device: torch.device) -> Projection:
        """Bring ``arrays`` to ``device``."""
        return cls(**{name: torch.from_numpy(each).to(device) for name, each in arrays.items()})

    @cached_property
    def sizes(self) -> Tensor:
        """The members of each group, (V,)."""
        return self.offsets.diff()

    @cached_property
    def is_plain(self) -> bool:
        """Whether each token stands for one token alone: then only the numbers of tokens change."""
        return bool((self.sizes <= 1).all() and (self.logs == 0.0).all())

    def project(self, columns: Columns, target: SparseTarget) -> SparseTarget | ProjectedTarget:
        """Project a target in the teacher's tokens; positions without a record lose its entries."""
        known_N = columns["teacher_gold"] >= 0
        weights_E = target.weights_E * target.spread(known_N)
        weights_E = weights_E * (self.sizes[target.ids_E] > 0)

        def find_best() -> Tensor:
            best_N = target.find_best_N()
            return torch.where(known_N & (best_N >= 0), self.same[best_N.clamp(min=0)], -1)

        whole = target.normalized and self.is_plain
        kept = replace(
            target,
            weights_E=weights_E,
            entropy_N=target.entropy_N * known_N,
            normalized=whole and bool((weights_E == target.weights_E).all()),
            tail_places_M=None,
            find_best=lru_cache(maxsize=1)(find_best),
        )
        if self.is_plain:
            ids_E = self.ids[self.offsets[kept.ids_E].clamp(max=len(self.ids) - 1)]
            return replace(kept, ids_E=ids_E)
        return ProjectedTarget(kept, self)


@dataclass(frozen=True, eq=False)
class ProjectedTarget:
    """Entries in the teacher's tokens, for a student with others. It is its own chunk.

    ``shares`` holds the share of each member in its group, (F,), once logits were seen: the p~ of
    these logits is what ``subtract_`` subtracts, whatever was subtracted before.
    """

    entries: SparseTarget
    projection: Projection
    shares: list[Tensor] = field(default_factory=list)
    #: Some entries are not all of p.
    whole: ClassVar[bool] = False

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> ProjectedTarget:
        """The target of positions ``rows``; its numbers stay in float64."""
        return ProjectedTarget(self.entries.take_chunk(rows), self.projection)

    @property
    def entropy_N(self) -> Tensor:
        """H of the teacher's distribution."""
        return self.entries.entropy_N

    @property
    def total_N(self) -> Tensor | None:
        """The sum W of the weights."""
        return self.entries.total_N

    @cached_property
    def sizes_E(self) -> Tensor:
        """The members of each entry's group."""
        return self.projection.sizes[self.entries.ids_E]

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """The entry (F,) and the student's token (F,) of each member, group after group."""
        sizes_E = self.sizes_E
        entry_F = torch.arange(len(sizes_E), device=sizes_E.device).repeat_interleave(sizes_E)
        begins_E = self.projection.offsets[self.entries.ids_E] - (sizes_E.cumsum(0) - sizes_E)
        places_F = begins_E[entry_F] + torch.arange(len(entry_F), device=sizes_E.device)
        return entry_F, self.projection.ids[places_F]

    def _locate(self, vocabulary: int) -> Tensor:
        """The place of each member in a flattened (N, V), (F,)."""
        entry_F, ids_F = self.members
        return self.entries.rows_E[entry_F] * vocabulary + ids_F

    def _reduce(self, values_F: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values_F, how, lengths=self.sizes_E, unsafe=True)

    def compute_expected_N(self, s_NV: Tensor) -> Tensor:
        """sum_i w_i log(c_i sum_{j in S_i} e^{s_j}) of each position, float64."""
        entry_F, _ = self.members
        s_F = s_NV.reshape(-1)[self._locate(s_NV.shape[1])].double()
        # A group of one token is that token to the bit: log(e^0) is 0.
        most_E = torch.where(self.sizes_E > 0, self._reduce(s_F, "max"), 0.0)
        terms_F = (s_F - most_E[entry_F]).exp()
        sum_E = self._reduce(terms_F, "sum")
        self.shares[:] = [terms_F / sum_E[entry_F]]
        logs_E = most_E + sum_E.clamp(min=1.0).log() + self.projection.logs[self.entries.ids_E]
        return self.entries.sum_N(self.entries.weights_E * logs_E)

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """q - share * p~, in place; before any logits each group is shared equally."""
        entry_F, _ = self.members
        share_F = self.shares[0] if self.shares else 1.0 / self.sizes_E[entry_F]
        weights_E = self.entries.weights_E * (
            self.entries.spread(share[:, 0]) if isinstance(share, Tensor) else share
        )
        terms_F = (weights_E[entry_F] * share_F).to(q_NV.dtype)
        q_NV.view(-1).index_add_(0, self._locate(q_NV.shape[1]), terms_F, alpha=-1)

    def find_best_N(self) -> Tensor:
        """The student's token of the same bytes as the teacher's best one, or -1."""
        return self.entries.find_best_N()


@dataclass(frozen=True, eq=False)
class ChunkTarget:
    """The chunk of each position, -1 for none, and the teacher's log-probability R of it."""

    chunk_N: Tensor
    logp_N: Tensor
    #: One number is not all of p.
    whole: ClassVar[bool] = False

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> SparseTarget:
        """Raise ``TypeError``: positions of a chunk need each other's labels, see ``settle``."""
        raise TypeError("a target of chunks is settled before it is cut")

    def settle(self, gold_N: Tensor, logq_N: Tensor) -> SparseTarget:
        """Return weighted hard labels with the loss and the gradient of these chunks.

        ``logq_N`` are the student's log-probabilities of ``gold_N``.
        """
        inside_N = self.chunk_N >= 0
        number_N = self.chunk_N.clamp(min=0)
        zero_N = torch.zeros_like(self.logp_N)
        held_N = inside_N.double()
        s_N = zero_N.index_add(0, number_N, logq_N.double() * held_N)[number_N] / TAU
        size_N = zero_N.index_add(0, number_N, held_N)[number_N].clamp(min=1.0)
        s_N = s_N.clamp(max=-_LEAST)
        r_N = (self.logp_N / TAU).clamp(max=-_LEAST)
        rest_N, own_N = -torch.expm1(r_N), -torch.expm1(s_N)  # 1 - P, 1 - Q
        loss_N = r_N.exp() * (r_N - s_N) + rest_N * (rest_N.log() - own_N.log())
        weight_N = (own_N - rest_N) / own_N * held_N
        # So that -w log q - H is the chunk's loss, in equal parts for its positions.
        entropy_N = -weight_N * logq_N.double() - TAU * loss_N / size_N * held_N
        places = torch.arange(len(gold_N) + 1, device=gold_N.device)
        none_N = torch.zeros_like(gold_N)
        return SparseTarget(places, gold_N, weight_N, entropy_N, none_N)


@runtime_checkable
class UnsettledTarget(TeacherTarget, Protocol):
    """A target whose loss needs the student's probabilities of all labels before it is cut."""

    def settle(self, gold_N: Tensor, logq_N: Tensor) -> TeacherTarget:
        """Return the target with the loss and the gradient that these probabilities give."""


@torch.no_grad()
def settle_targets(
    hidden_ND: Tensor, lm_head: LMHead, targets: Targets, size: int | None = None
) -> Targets:
    """Return ``targets`` with weights where the loss compares chunks, else as they are.

    The logits of ``size`` positions exist at a time.
    """
    if not isinstance(targets.teacher, UnsettledTarget):
        return targets
    size = size or choose_chunk_positions(lm_head.vocabulary, hidden_ND.device)
    head = lm_head.cast(hidden_ND.dtype)
    parts = [hidden_ND.new_empty(0, dtype=torch.float64)]
    for states_ND, gold_N in zip(hidden_ND.split(size), targets.gold_N.split(size), strict=True):
        s_NV = head.compute_logits(states_ND)
        parts.append((s_NV.gather(1, gold_N[:, None])[:, 0] - s_NV.logsumexp(1)).double())
    teacher = targets.teacher.settle(targets.gold_N, torch.cat(parts))
    return replace(targets, teacher=teacher)
