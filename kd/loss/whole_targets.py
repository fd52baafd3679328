"""Targets of the profiles topk, dense and hidden, which cover the whole vocabulary.

Shapes: N positions that have a target, V vocabulary, D the teacher's width, K top-k entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.rounding import TOP_STEP, UNKNOWN
from kd.loss.targets import LEAST_LOGPROB, Columns
from kd.models.cosines import from_cosines
from kd.models.lm_head import LMHead, SplitLMHead
from kd.models.precision import float32_products
from kd.models.products.split import can_split, split_into_halves


@dataclass(frozen=True)
class TopTarget:
    """K tokens with their probabilities, most probable first, and the mass of the rest.

    All sum to 1. The rest is one bucket (a ghost token): it constrains only how much probability of
    the student lies outside the K tokens, not where. In the gradient q - p the bucket is therefore
    spread as the student spreads it: r q_v / (1 - Q), with Q the student's mass on the K tokens. 1
    - Q is summed over the outside itself: as a difference, or as log1mexp of the K tokens'
    logsumexp, it loses all digits when Q nears 1. The outside ends at ``vocabulary``, V: rows
    beyond it get no part of the rest. A target of tokens is its own chunk.
    """

    ids_NK: Tensor
    p_NK: Tensor
    rest_N: Tensor
    vocabulary: int | None = None
    #: K entries are not all of p.
    whole: ClassVar[bool] = False
    #: The probabilities of each position sum to 1.
    total_N: ClassVar[None] = None

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> TopTarget:
        """The target of positions ``rows``; its numbers stay in float64."""
        return TopTarget(self.ids_NK[rows], self.p_NK[rows], self.rest_N[rows], self.vocabulary)

    @property
    def entropy_N(self) -> Tensor:
        """H of the K probabilities and the bucket."""
        return torch.special.entr(self.p_NK).sum(1) + torch.special.entr(self.rest_N)

    def compute_expected_N(self, s_NV: Tensor) -> Tensor:
        """sum_i p_i s_i + r LSE(s outside) of each position, float64."""
        inside_N = (self.p_NK * s_NV.gather(1, self.ids_NK)).sum(1)
        outside_N = s_NV[:, : self.vocabulary].scatter(1, self.ids_NK, -torch.inf).logsumexp(1)
        # Where K covers the vocabulary nothing is outside: the rest is 0 and LSE -inf.
        return inside_N + (self.rest_N * outside_N).where(self.rest_N > 0, 0.0)

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """q - share * p inside, q (1 - share * r / (1 - Q)) outside, in place."""
        q_NV = q_NV[:, : self.vocabulary]
        # The K tokens are zeroed so that the sum is of the outside alone, and set again below.
        q_NK = q_NV.gather(1, self.ids_NK)
        q_NV.scatter_(1, self.ids_NK, 0.0)
        outside_N = q_NV.sum(1).clamp(min=torch.finfo(q_NV.dtype).tiny)
        q_NV.mul_((1.0 - share * (self.rest_N / outside_N)[:, None]).to(q_NV.dtype))
        q_NV.scatter_(1, self.ids_NK, q_NK).scatter_add_(
            1, self.ids_NK, self.p_NK.to(q_NV.dtype) * -share
        )

    def find_best_N(self) -> Tensor:
        """The first token of each position."""
        return self.ids_NK[:, 0]


def decode_top(columns: Columns, k: int | None = None, vocabulary: int | None = None) -> TopTarget:
    """The target of profile topk, of its first ``k`` entries; the others go to the rest.

    Rounding makes the stored probabilities sum to 1 within 1e-3, so they are divided by their sum.
    """
    logprobs_NK = _decode_steps(columns["top_logprobs"])
    residual_N1 = _decode_steps(columns["residual"])[:, None]
    k = logprobs_NK.shape[1] if k is None else k
    rest_N = torch.cat([logprobs_NK[:, k:], residual_N1], 1).logsumexp(1)
    p_NK1 = torch.cat([logprobs_NK[:, :k], rest_N[:, None]], 1).softmax(1)
    ids_NK = columns["top_ids"].long()[:, :k]
    # A record of fewer tokens ends in absent ones; they become repeats of the first, of weight 0.
    ids_NK = ids_NK.where(~torch.isinf(logprobs_NK[:, :k]), ids_NK[:, :1])
    return TopTarget(ids_NK, p_NK1[:, :-1], p_NK1[:, -1], vocabulary)


def _decode_steps(codes: Tensor) -> Tensor:
    """Log-probabilities, -inf if the record has none."""
    steps = codes.double()
    return (steps * -TOP_STEP).masked_fill(steps == UNKNOWN, -torch.inf)


@dataclass(frozen=True)
class Distribution:
    """All log-probabilities of the positions of one chunk, (N, V)."""

    logp_NV: Tensor
    #: The probabilities of each position sum to 1.
    total_N: ClassVar[None] = None

    @cached_property
    def p_NV(self) -> Tensor:
        """All probabilities."""
        return self.logp_NV.exp()

    @cached_property
    def entropy_N(self) -> Tensor:
        """H(p)."""
        return -torch.linalg.vecdot(self.p_NV, self.logp_NV).double()

    def compute_expected_N(self, s_NV: Tensor) -> Tensor:
        """p . s of each position, float64."""
        return torch.linalg.vecdot(self.p_NV.to(s_NV.dtype), s_NV[:, : self.p_NV.shape[1]]).double()

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        """q - share * p, in place."""
        q_NV = q_NV[:, : self.p_NV.shape[1]]
        if isinstance(share, Tensor):
            q_NV.addcmul_(self.p_NV, share, value=-1)
        else:
            q_NV.sub_(self.p_NV, alpha=share)

    def find_best_N(self) -> Tensor:
        """The most probable token."""
        return self.logp_NV.argmax(1)


@dataclass(frozen=True)
class DenseTarget:
    """All log-probabilities at T = 1, (N, V) in float16 or float32."""

    logprobs_NV: Tensor
    temperature: float
    whole: ClassVar[bool] = True

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> Distribution:
        """softmax(l / T) of positions ``rows``."""
        logprobs_NV = self.logprobs_NV[rows].to(dtype).clamp(min=LEAST_LOGPROB)
        return Distribution(torch.log_softmax(logprobs_NV.div_(self.temperature), 1))


@dataclass(frozen=True)
class HiddenTarget:
    """The teacher's last hidden states: ``hidden_ND``, integers of 8 or 16 bits, times ``scale_N``.

    With ``cosines`` they are the coefficients of a cosine transform (``kd.models.cosines``).
    """

    hidden_ND: Tensor
    scale_N: Tensor
    lm_head: LMHead
    temperature: float
    cosines: bool = False
    whole: ClassVar[bool] = True

    def decode_states(self, rows: slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """The hidden states of positions ``rows``."""
        states_ND = self.hidden_ND[rows].to(dtype) * self.scale_N[rows, None]
        return from_cosines(states_ND) if self.cosines else states_ND

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> Distribution:
        """softmax(z / T) of positions ``rows``, where z are the logits of the teacher's LM head."""
        with float32_products():
            logits_NV = self.lm_head.compute_logits(self.decode_states(rows, dtype))
        return Distribution(torch.log_softmax(logits_NV.div_(self.temperature), 1))


def decode_lm_head(
    stored: dict[str, NDArray[Any]], vocabulary: int, device: torch.device
) -> LMHead:
    """The teacher's LM head from a hidden cache (``Cache.teacher_head``), for products in float32.

    Its weight is float32, except on a GPU that splits such products into some in bfloat16.
    """
    # Copies, because a cache's arrays are read-only and torch has no read-only tensors.
    weight = torch.tensor(stored["weight"])
    bias = torch.tensor(stored["bias"])
    # NumPy has no bfloat16, so the cache stores its bits.
    weight = weight.view(torch.bfloat16) if weight.dtype == torch.uint16 else weight
    weight = weight.to(device)
    scale, softcap = stored["transform"].tolist()
    head = LMHead(
        weight=weight,
        bias=bias.to(device) if len(bias) else None,
        scale=scale,
        softcap=softcap or None,
        vocabulary=vocabulary,
    )
    if can_split(device):
        return SplitLMHead(**vars(head), parts=split_into_halves(weight))
    return replace(head, weight=weight.float())
