"""Attention in blocks of queries, for windows, soft-caps, sinks and dropout, on every device.

The backward pass computes the weights of a block again, so that none are kept.

    scores   s = cap(scale q k)       where cap(x) = c tanh(x / c), if there is a soft-cap c
    weights  p = exp(s) / (sum exp(s) + exp(sink))
    output   o = dropout(p) v

Shapes: K key heads, G query heads of each key head, l queries of a span, q queries of a block,
k keys of a block, D width of a head, E width of a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from kd.text.steps.pinned import copy_to_device

#: Elements of the scores of one block.
BLOCK_ELEMENTS = 2**21
#: Queries of a block at least, whatever the row's length.
LEAST_QUERIES = 16
#: Queries of a block at most.
MOST_QUERIES = 256
#: Seeds of dropout that are drawn from.
SEEDS = 2**31


@dataclass(frozen=True)
class Scoring:
    """How scores become weights.

    ``scale`` multiplies q k. ``softcap`` bounds the scores; None does not. ``dropout`` is the
    share of the weights that are set to zero. It is drawn from ``seed``, from which that of span n
    differs by n; None draws a seed for each span, from torch's generator.
    """

    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | None = None

    def of_span(self, number: int) -> Scoring:
        """Return the scoring of a span, by its place among all of a batch."""
        return self if self.seed is None else replace(self, seed=self.seed + number)

    def choose_seed(self) -> int:
        """Return the seed of the dropout of one span."""
        if not self.dropout:
            return 0
        return int(torch.randint(SEEDS, ())) if self.seed is None else self.seed


def attend_in_blocks(
    q_KGlD: Tensor,
    k_KlD: Tensor,
    v_KlE: Tensor,
    sink_KG: Tensor | None,
    first_l: NDArray[np.int64],
    scoring: Scoring,
) -> Tensor:
    """Return the output (K, G, l, E) of one span, in the precision of ``v_KlE``.

    ``first_l`` is the first key of each query. Sums are float32, or float64 for float64 inputs.
    """
    output: Tensor = _BlockAttention.apply(q_KGlD, k_KlD, v_KlE, sink_KG, first_l, scoring)
    return output


def differentiate_in_blocks(
    grad_KGlE: Tensor,
    q_KGlD: Tensor,
    k_KlD: Tensor,
    v_KlE: Tensor,
    sink_KG: Tensor | None,
    first_l: NDArray[np.int64],
    scoring: Scoring,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the sinks of one span, from that of its output.

    ``seed`` is that of the dropout in the forward pass.
    """
    with torch.autocast(q_KGlD.device.type, enabled=False):
        return _Work(q_KGlD, k_KlD, v_KlE, sink_KG, scoring, seed).differentiate(grad_KGlE, first_l)


@dataclass(frozen=True)
class _Block:
    """Some ``queries`` that follow each other, and the ``keys`` that they read."""

    queries: slice
    keys: slice
    hidden_qk: Tensor


def _cut_blocks(first_l: NDArray[np.int64], heads: int, device: torch.device) -> Iterator[_Block]:
    length = len(first_l)
    start = 0
    first_l1 = copy_to_device(first_l, device)[:, None]
    while start < length:
        first = int(first_l[start:].min())
        fitting = BLOCK_ELEMENTS // (heads * (start - first + 1))
        stop = min(start + min(max(fitting, LEAST_QUERIES), MOST_QUERIES), length)
        key_k = torch.arange(first, stop, device=device)
        query_q1 = torch.arange(start, stop, device=device)[:, None]
        hidden_qk = (key_k > query_q1) | (key_k < first_l1[start:stop])
        yield _Block(slice(start, stop), slice(first, stop), hidden_qk)
        start = stop


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_KGlD: Tensor,
        k_KlD: Tensor,
        v_KlE: Tensor,
        sink_KG: Tensor | None,
        first_l: NDArray[np.int64],
        scoring: Scoring,
    ) -> Tensor:
        ctx.save_for_backward(q_KGlD, k_KlD, v_KlE, sink_KG)
        ctx.first_l = first_l
        ctx.scoring = scoring
        # The backward pass draws the same dropout again from the same seed.
        ctx.seed = scoring.choose_seed()
        output_KGlE = v_KlE.new_empty(*q_KGlD.shape[:-1], v_KlE.shape[-1])
        with torch.autocast(q_KGlD.device.type, enabled=False):
            work = _Work(q_KGlD, k_KlD, v_KlE, sink_KG, scoring, ctx.seed)
            for block in _cut_blocks(first_l, work.heads, q_KGlD.device):
                weights_KGqk, _ = work.compute_weights(block)
                kept_KGqk = weights_KGqk * work.draw_factors(weights_KGqk)
                output_KGlE[:, :, block.queries] = kept_KGqk @ work.take(v_KlE, block.keys)
        return output_KGlE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_KGlE: Tensor) -> tuple[Tensor | None, ...]:
        q_KGlD, k_KlD, v_KlE, sink_KG = ctx.saved_tensors
        found = differentiate_in_blocks(
            grad_KGlE, q_KGlD, k_KlD, v_KlE, sink_KG, ctx.first_l, ctx.scoring, ctx.seed
        )
        return (*found, None, None)


class _Work:
    """One span, and the random numbers of its dropout."""

    def __init__(
        self,
        q_KGlD: Tensor,
        k_KlD: Tensor,
        v_KlE: Tensor,
        sink_KG: Tensor | None,
        scoring: Scoring,
        seed: int,
    ) -> None:
        self.q_KGlD = q_KGlD
        self.k_KlD = k_KlD
        self.v_KlE = v_KlE
        self.scoring = scoring
        self.dtype = torch.promote_types(q_KGlD.dtype, torch.float32)
        self.heads = q_KGlD.shape[0] * q_KGlD.shape[1]
        self.sink_dtype = None if sink_KG is None else sink_KG.dtype
        self.sink_KG11 = None if sink_KG is None else sink_KG.to(self.dtype)[..., None, None]
        self.seed = seed

    @cached_property
    def generator(self) -> torch.Generator:
        """The random numbers of the dropout. Without dropout none is made."""
        return torch.Generator(self.q_KGlD.device).manual_seed(self.seed)

    def take(self, each_KlD: Tensor, places: slice) -> Tensor:
        """Return some keys or values, for all query heads, in the precision of the sums."""
        return each_KlD[:, None, places].to(self.dtype)

    def compute_weights(self, block: _Block) -> tuple[Tensor, Tensor | None]:
        """Return the weights (K, G, q, k) before dropout, and tanh of the soft-cap."""
        scoring = self.scoring
        q_KGqD = self.q_KGlD[:, :, block.queries].to(self.dtype)
        score_KGqk = q_KGqD @ self.take(self.k_KlD, block.keys).mT
        score_KGqk.mul_(scoring.scale)
        tanh_KGqk = None
        if scoring.softcap is not None:
            tanh_KGqk = score_KGqk.div_(scoring.softcap).tanh_()
            score_KGqk = tanh_KGqk * scoring.softcap
        score_KGqk.masked_fill_(block.hidden_qk, -math.inf)
        if self.sink_KG11 is None:
            return score_KGqk.softmax(dim=-1), tanh_KGqk
        top_KGq1 = score_KGqk.amax(dim=-1, keepdim=True).maximum(self.sink_KG11)
        weights_KGqk = score_KGqk.sub_(top_KGq1).exp_()
        total_KGq1 = weights_KGqk.sum(dim=-1, keepdim=True) + (self.sink_KG11 - top_KGq1).exp()
        return weights_KGqk.div_(total_KGq1), tanh_KGqk

    def draw_factors(self, like_KGqk: Tensor) -> Tensor:
        """Return what dropout multiplies the weights of the next block with; call it once for each.

        The share ``dropout`` becomes zero, and the rest is scaled up.
        """
        keep = 1.0 - self.scoring.dropout
        if keep == 1.0:
            return like_KGqk.new_ones(())
        if keep <= 0.0:
            return like_KGqk.new_zeros(())
        return torch.empty_like(like_KGqk).bernoulli_(keep, generator=self.generator).div_(keep)

    def differentiate(
        self, grad_KGlE: Tensor, first_l: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k, v and the sinks."""
        scoring = self.scoring
        dq_KGlD = torch.empty_like(self.q_KGlD)
        dk_KlD = torch.zeros_like(self.k_KlD, dtype=self.dtype)
        dv_KlE = torch.zeros_like(self.v_KlE, dtype=self.dtype)
        sink_sum = None if self.sink_KG11 is None else torch.zeros_like(self.sink_KG11)
        for block in _cut_blocks(first_l, self.heads, self.q_KGlD.device):
            p_KGqk, tanh_KGqk = self.compute_weights(block)
            factor_KGqk = self.draw_factors(p_KGqk)
            g_KGqE = grad_KGlE[:, :, block.queries].to(self.dtype)
            dv_KlE[:, block.keys] += ((p_KGqk * factor_KGqk).mT @ g_KGqE).sum(dim=1)
            dp_KGqk = (g_KGqE @ self.take(self.v_KlE, block.keys).mT).mul_(factor_KGqk)
            mean_KGq1 = (p_KGqk * dp_KGqk).sum(dim=-1, keepdim=True)
            if sink_sum is not None:
                rest_KGq1 = 1.0 - p_KGqk.sum(dim=-1, keepdim=True)
                sink_sum -= (rest_KGq1 * mean_KGq1).sum(dim=2, keepdim=True)
            ds_KGqk = dp_KGqk.sub_(mean_KGq1).mul_(p_KGqk)
            if tanh_KGqk is not None:
                ds_KGqk.mul_(1.0 - tanh_KGqk.square())
            ds_KGqk.mul_(scoring.scale)
            dq_KGlD[:, :, block.queries] = ds_KGqk @ self.take(self.k_KlD, block.keys)
            q_KGqD = self.q_KGlD[:, :, block.queries].to(self.dtype)
            dk_KlD[:, block.keys] += (ds_KGqk.mT @ q_KGqD).sum(dim=1)
        sinks = None if sink_sum is None else sink_sum[..., 0, 0].to(self.sink_dtype)
        return dq_KGlD, dk_KlD.to(self.k_KlD.dtype), dv_KlE.to(self.v_KlE.dtype), sinks
