"""Logits -> records: the head exact, the tail by systematic sampling with probability proportional to size.

For a position with teacher distribution p over V tokens, and threshold tau:

    head    every token with p > tau, with its log-probability
    tail    R = 1 - sum head; m = max(1, floor(R / tau)) tokens by systematic PPS, each of weight R / m

Inclusion probabilities min(1, p / tau') give the least variance of any unbiased estimate of that size (Cohen, Duffield,
Kaplan, Lund, Thorup, "Stream sampling for variance-optimal estimation of subset sums", SODA 2009, arXiv 0803.0473).
Systematic: lay the tail's probabilities end to end in a random order, and take the tokens under the m points
(u + k) R / m. No token stands under two points, because p <= tau <= R / m (or m = 1).

Shapes: N positions of one sequence, V vocabulary, H and M head and tail entries of all N.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cache.random import PURPOSE_TAIL, permutation, uniforms
from cache.records import Records
from kd.errors import ModelError

_BLOCK = 64
_LOWEST = -1e4  # in place of -inf: its probability is 0 all the same, and 0 * -inf is NaN


def sample_records(logits_NV: Tensor, gold_N: Tensor, uniform_N: Tensor, order_V: Tensor, threshold: float) -> Records:
    """Records of N positions from their logits, the next tokens, one uniform number each, and the tail's order.

    Row n depends on row n alone, so the result does not depend on how positions were batched.
    """
    s_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logp_NV = torch.log_softmax(s_NV, dim=-1).clamp_(min=_LOWEST)
    p_NV = logp_NV.exp()
    entropy_N = -(p_NV * logp_NV).sum(-1)
    if not torch.isfinite(entropy_N).all():
        raise ModelError("The teacher's logits are NaN or infinite.", "Run it in float32 or bfloat16 (teacher.dtype).")
    rows_H, ids_H = (p_NV > threshold).nonzero(as_tuple=True)
    head_count, head_ids, head_logprobs = _head(logp_NV, rows_H, ids_H)
    p_NV[rows_H, ids_H] = 0.0  # what is left is the tail
    tail_count, tail_ids = _tail(p_NV, uniform_N, order_V, threshold)
    return Records(
        head_count=head_count,
        head_ids=head_ids,
        head_logprobs=head_logprobs,
        tail_count=tail_count,
        tail_ids=tail_ids,
        gold_logprob=_numpy(logp_NV.gather(1, gold_N[:, None])[:, 0], np.float32),
        entropy=_numpy(entropy_N, np.float32),
    )


def draws(seed: int, sequence: int, positions_N: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """The randomness of one sequence's records: a uniform number for each position, and the tail's order."""
    return uniforms(seed, PURPOSE_TAIL, sequence, positions_N), permutation(seed, sequence, vocabulary)


def _head(logp_NV: Tensor, rows_H: Tensor, ids_H: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts (N,), ids (H,) and log-probabilities (H,), most probable first within a record."""
    logprobs = _numpy(logp_NV[rows_H, ids_H], np.float32)
    rows, ids = _numpy(rows_H, np.int64), _numpy(ids_H, np.uint32)
    order = np.lexsort((ids, -logprobs, rows))
    return np.bincount(rows, minlength=len(logp_NV)).astype(np.uint8), ids[order], logprobs[order]


def _tail(tail_NV: Tensor, uniform_N: Tensor, order_V: Tensor, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts (N,) and ids (M,), ascending within a record, drawn from the probabilities left in ``tail_NV``."""
    vocabulary = tail_NV.shape[1]
    blocks_NKB = _blocks(tail_NV.index_select(1, order_V))
    running_NK = blocks_NKB.sum(-1).cumsum(1, dtype=torch.float64)
    rest_N = running_NK[:, -1]
    count_N = torch.clamp(torch.floor(rest_N / threshold), min=1)
    slot_M = torch.arange(int(count_N.max()), device=tail_NV.device)
    points_NM = (uniform_N[:, None] + slot_M) * (rest_N / count_N)[:, None]
    place_NM = _places(points_NM, running_NK, blocks_NKB)
    ids_NM = torch.where(slot_M < count_N[:, None], order_V[place_NM.clamp(max=vocabulary - 1)], vocabulary)
    ids_NM = ids_NM.sort(dim=1).values
    return _numpy(count_N, np.uint8), _numpy(ids_NM[ids_NM < vocabulary], np.uint32)


def _blocks(ordered_NV: Tensor) -> Tensor:
    """The ordered tail as (N, K, 64), padded with zeros."""
    return torch.nn.functional.pad(ordered_NV, (0, -ordered_NV.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))


def _places(points_NM: Tensor, running_NK: Tensor, blocks_NKB: Tensor) -> Tensor:
    """Where in the order each point falls, (N, M): the block first, then the place inside it.

    Two levels, because a running sum over all of V must be in float64 (in float32 its error would rival the small
    probabilities at its end), which over V would cost as much as all the rest. A point that rounding puts past the
    end of its block takes the block's last token that has a probability.
    """
    block_NM = torch.searchsorted(running_NK, points_NM, right=True).clamp(max=running_NK.shape[1] - 1)
    before_NK = torch.nn.functional.pad(running_NK, (1, -1))
    inside_NMB = blocks_NKB.gather(1, block_NM[..., None].expand(-1, -1, _BLOCK)).double().cumsum(-1)
    offset_NM = points_NM - before_NK.gather(1, block_NM)
    last_NM = (inside_NMB < inside_NMB[..., -1:]).sum(-1)
    within_NM = torch.searchsorted(inside_NMB, offset_NM[..., None], right=True)[..., 0]
    return block_NM * _BLOCK + torch.minimum(within_NM, last_NM)


def _numpy(tensor: Tensor, dtype: type[np.generic]) -> np.ndarray:
    return tensor.cpu().numpy().astype(dtype)
