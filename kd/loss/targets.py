"""Targets: what the student should predict at a temperature, in the terms of the loss.

    threshold, tempered  weighted entries        W LSE(s) - sum_i w_i s_i - H(p_T)
    topk                 entries and one bucket  sum_i p_i log(p_i / q_i)
                                                 + r log(r / (1 - sum_i q_i))
    dense, hidden        all of p_T              sum_v p_v log(p_v / q_v)

The last column is KL(p || q), with s the student's logits over T and q = softmax(s). In each row it
is W LSE(s) - E_p[s] - H, with gradient W q - p for s. W is the sum of p. It is 1, except that an
unbiased sample may have another sum. So a chunk of a target provides W, E_p[s], H and the
subtraction of p. ``kd.loss.decoder`` makes targets from the cache's columns:
``kd.loss.sparse_targets`` has the first row of the table, ``kd.loss.whole_targets`` the others.

Shapes: N positions that have a target, V vocabulary. The LM head of a student may have more rows,
V' >= V: its softmax is over all of them, and the teacher's p is 0 beyond V.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from cache.rounding import ENTROPY_STEP, UNKNOWN_ENTROPY

#: The columns of a batch's records, by name, as ``cache.profiles`` stores them.
Columns = dict[str, Tensor]

#: Log-probability of a token that the teacher forbids: 0 in every sum, finite in every divergence.
LEAST_LOGPROB = -1e4
#: Log-probability of an id without a name, which only the student has. It is 0 in every sum, and
#: not so small that a reverse KL would learn nothing else.
NAMELESS_LOGPROB = -50.0


class TargetChunk(Protocol):
    """The target of some consecutive positions, in the terms of the loss."""

    @property
    def entropy_N(self) -> Tensor:
        """H(p) in nats; 0 if the record lacks it, so that KL is a cross-entropy there."""

    @property
    def total_N(self) -> Tensor | None:
        """The sum W of p of each position, float64; None if it is 1 at all positions."""

    def compute_expected_N(self, s_NV: Tensor) -> Tensor:
        """E_p[s] of each position, float64."""

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """Subtract ``share`` times p from ``q_NV``, in place.

        ``q_NV`` holds a multiple of the student's probabilities. ``share`` is a number, or (N, 1)
        in the dtype of ``q_NV``.
        """

    def find_best_N(self) -> Tensor:
        """The teacher's most probable token, -1 if the record does not determine it."""


class TeacherTarget(Protocol):
    """The teacher's distributions at N positions."""

    @property
    def whole(self) -> bool:
        """True if it has the probability of every token."""

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> TargetChunk:
        """The target of positions ``rows``; whole distributions come in ``dtype``."""


@dataclass(frozen=True)
class Targets:
    """The hard label of N positions, and the teacher's distribution at ``temperature``.

    ``teacher`` is None if there is no teacher; alpha must then be 1. ``entropy_N`` is the
    teacher's H in nats at T = 1 from the records, float64, NaN if it is unknown. ``weight_N`` is
    how often each position counts in the divergence (``loss.balance``); None = once.
    """

    gold_N: Tensor
    teacher: TeacherTarget | None = None
    temperature: float | Tensor = 1.0
    entropy_N: Tensor | None = None
    weight_N: Tensor | None = None

    def __len__(self) -> int:
        return self.gold_N.shape[0]

    @property
    def temperature_value(self) -> float:
        """The temperature as a number."""
        return detach_number(self.temperature)


def widen_logprobs(logp_NV: Tensor, rows: int) -> Tensor:
    """The teacher's log-probabilities for a student whose LM head has ``rows`` rows, (N, V')."""
    missing = rows - logp_NV.shape[1]
    return F.pad(logp_NV, (0, missing), value=NAMELESS_LOGPROB) if missing > 0 else logp_NV


def subtract_target_(q_NV: Tensor, target: TargetChunk) -> Tensor:
    """W q - p in place: the gradient of forward KL with respect to the logits s, (N, V).

    ``q_NV`` holds the student's probabilities.
    """
    if target.total_N is not None:
        q_NV.mul_(target.total_N[:, None].to(q_NV.dtype))
    target.subtract_(q_NV, 1.0)
    return q_NV


def detach_number(temperature: float | Tensor) -> float:
    """``temperature`` without its gradient."""
    return float(temperature.detach()) if isinstance(temperature, Tensor) else temperature


@functools.lru_cache(maxsize=16)
def list_kept_ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the always_keep ``ids`` on ``device``, as int64.

    They are made once, because a GPU has to be waited for when numbers are copied to it.
    """
    return torch.tensor(ids, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=16)
def list_betas(betas: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ``betas`` on ``device``. They are made once, as those of ``list_kept_ids``."""
    return torch.tensor(betas, dtype=dtype, device=device)


def decode_entropies(codes_N: Tensor, unknown: float) -> Tensor:
    """H(p) in nats, float64; ``unknown`` if the record does not have it."""
    return (codes_N.double() * ENTROPY_STEP).masked_fill(codes_N == UNKNOWN_ENTROPY, unknown)
