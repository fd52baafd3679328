"""Variable-length attention of the simulated GPU, document by document.

Shapes: T positions, H query heads, K key heads, D width of a head, l positions of a document.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One document: its positions, and its queries, keys, values and weights in float32."""

    positions: slice
    q_HlD: Tensor
    k_HlD: Tensor
    v_HlD: Tensor
    weights_Hll: Tensor
    groups: int

    def fold(self, each_HlD: Tensor) -> Tensor:
        """Add up what the query heads of a key head give, (l, K, D)."""
        return each_HlD.unflatten(0, (-1, self.groups)).sum(1).transpose(0, 1)


def compute(func: Any, args: Any, kwargs: dict[str, Any], wrap: Callable[[Tensor], Tensor]) -> Any:
    """Do torch's operation ``func``, forward or backward, on tensors of the simulated GPU."""
    names = [each.name for each in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    grad_THD = given.get("grad_out")
    q_THD, k_TKD, v_TKD = (_take(given[name]) for name in ("query", "key", "value"))
    bounds_C = _take(given["cu_seq_q"])
    _require_kernel(q_THD, bounds_C, given["max_q"])
    window = given.get("window_size") or (-1, -1)
    scale = given.get("scale") or q_THD.shape[-1] ** -0.5
    documents = _cut(q_THD, k_TKD, v_TKD, bounds_C, window, scale)
    if grad_THD is not None:
        found = _differentiate(_take(grad_THD), q_THD, k_TKD, v_TKD, documents, scale)
        return tuple(wrap(each) for each in found)
    out_THD = torch.zeros(*q_THD.shape[:2], v_TKD.shape[2], dtype=q_THD.dtype)
    for each in documents:
        out_THD[each.positions] = (each.weights_Hll @ each.v_HlD).transpose(0, 1).to(q_THD.dtype)
    lse_HT = torch.zeros(q_THD.shape[1], q_THD.shape[0])
    return wrap(out_THD), wrap(lse_HT), wrap(torch.zeros(2, dtype=torch.uint64))


def _take(tensor: Any) -> Tensor:
    inner = getattr(tensor, "inner", None)
    if inner is None:
        raise RuntimeError("variable-length attention takes tensors of the GPU alone")
    return inner


def _require_kernel(q_THD: Tensor, bounds_C: Tensor, longest: int) -> None:
    """Raise ``RuntimeError`` for what the kernel of a GPU does not take."""
    lengths_C = bounds_C.diff()
    if q_THD.dtype not in (torch.float16, torch.bfloat16) or q_THD.shape[-1] % 8:
        raise RuntimeError(f"no kernel for {q_THD.dtype} and heads of width {q_THD.shape[-1]}")
    if bounds_C.dtype != torch.int32 or int(bounds_C[-1]) != len(q_THD) or int(bounds_C[0]):
        raise RuntimeError(
            f"the bounds {bounds_C.tolist()} are not those of {len(q_THD)} positions"
        )
    if int(lengths_C.max()) > longest or int(lengths_C.min()) < 0:
        raise RuntimeError(f"a document is longer than {longest}: {lengths_C.tolist()}")


def _cut(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, bounds_C: Tensor, window: Any, scale: float
) -> Iterator[Document]:
    before, after = window
    groups = q_THD.shape[1] // k_TKD.shape[1]
    for start, stop in itertools.pairwise(bounds_C.tolist()):
        positions = slice(start, stop)
        q_HlD, k_KlD, v_KlD = (
            each[positions].transpose(0, 1).float() for each in (q_THD, k_TKD, v_TKD)
        )
        k_HlD, v_HlD = (each.repeat_interleave(groups, 0) for each in (k_KlD, v_KlD))
        place_l = torch.arange(stop - start)
        distance_ll = place_l[:, None] - place_l[None]
        hidden_ll = torch.zeros_like(distance_ll, dtype=torch.bool)
        if before >= 0:
            hidden_ll |= distance_ll > before
        if after >= 0:
            hidden_ll |= -distance_ll > after
        score_Hll = (q_HlD @ k_HlD.mT * scale).masked_fill(hidden_ll, -torch.inf)
        yield Document(positions, q_HlD, k_HlD, v_HlD, score_Hll.softmax(-1), groups)


def _differentiate(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    documents: Iterator[Document],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Autograd does not act below the level of subclasses, so the formula is written out.
    """
    q_grad, k_grad, v_grad = (torch.zeros_like(each) for each in (q_THD, k_TKD, v_TKD))
    for each in documents:
        grad_HlD = grad_THD[each.positions].transpose(0, 1).float()
        weights_Hll = each.weights_Hll
        of_weights_Hll = grad_HlD @ each.v_HlD.mT
        mean_Hl1 = (of_weights_Hll * weights_Hll).sum(-1, keepdim=True)
        of_scores_Hll = weights_Hll * (of_weights_Hll - mean_Hl1) * scale
        q_grad[each.positions] = (of_scores_Hll @ each.k_HlD).transpose(0, 1).to(q_THD.dtype)
        k_grad[each.positions] = each.fold(of_scores_Hll.mT @ each.q_HlD).to(k_TKD.dtype)
        v_grad[each.positions] = each.fold(weights_Hll.mT @ grad_HlD).to(v_TKD.dtype)
    return q_grad, k_grad, v_grad
