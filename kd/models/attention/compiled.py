"""Attention of packed rows inside a graph of torch.compile.

The documents differ from batch to batch. So a graph holds one operation for each layer, which reads
their bounds when it runs; it is not broken, and not compiled again for other documents.

Shapes: B rows, H query heads, K key heads, L positions, D width of a head, E width of a value,
C documents of a batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from kd.models.attention.blocks import SEEDS, Scoring, differentiate_in_blocks
from kd.models.attention.documents import DocumentMask, GraphMask, Reach
from kd.models.attention.kernels import attend, choose_kernel, describe, match_precision, run_varlen
from kd.text.packed_rows import PackedRows


def attend_in_graph(
    module: nn.Module,
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    mask: GraphMask,
    scoring: Scoring,
    sink_H: Tensor | None,
) -> Tensor:
    """Return the output of the layer ``module``, (B, L, H, E), while torch traces a graph.

    The graph breaks for the kernels flash and flex, which are of a GPU: there for dropout,
    soft-caps, sinks and chunks. Their bounds and blocks are made from documents on the host, and
    torch would compile them anew for each batch.
    """
    q_BHLD, k_BKLD, v_BKLE = match_precision(q_BHLD, k_BKLD, v_BKLE)
    kernel = choose_kernel(describe(q_BHLD, v_BKLE, mask, scoring, sink_H))
    if kernel == "varlen":
        return run_varlen(q_BHLD, k_BKLD, v_BKLE, mask, scoring)
    if kernel == "spans":
        # Drawn in the graph, so that a layer that is computed again draws the same one.
        seed_1 = torch.randint(SEEDS, (1,)) if scoring.dropout else None
        found: Tensor = _attend_spans(
            q_BHLD,
            k_BKLD,
            v_BKLE,
            sink_H,
            mask.packed.positions_BL,
            mask.packed.host_bounds_C,
            seed_1,
            mask.reach.window,
            mask.reach.chunk,
            scoring.scale,
            scoring.softcap,
            scoring.dropout,
        )
        return found
    return _attend_outside(module, q_BHLD, k_BKLD, v_BKLE, mask, scoring, sink_H)


@torch.compiler.disable(reason="flash-attn and flex attention run outside the graph")
def _attend_outside(
    module: nn.Module,
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    mask: GraphMask,
    scoring: Scoring,
    sink_H: Tensor | None,
) -> Tensor:
    whole = DocumentMask.of_packed(mask.packed, mask.reach)
    return attend(module, q_BHLD, k_BKLD, v_BKLE, whole, scoring, sink_H)


# ---------------------------------------------------------------------- the operation


@torch.library.custom_op("potstill::attend_spans", mutates_args=())
def _attend_spans(
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    sink_H: Tensor | None,
    positions_BL: Tensor,
    host_bounds_C: Tensor,
    seed_1: Tensor | None,
    window: int | None,
    chunk: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    mask = _make_mask(positions_BL, host_bounds_C, Reach(window, chunk))
    scoring = _make_scoring(scale, softcap, dropout, seed_1)
    with torch.autocast(q_BHLD.device.type, enabled=False):
        return attend(nn.Module(), q_BHLD, k_BKLD, v_BKLE, mask, scoring, sink_H).contiguous()


@_attend_spans.register_fake
def _(q_BHLD: Tensor, k_BKLD: Tensor, v_BKLE: Tensor, *_: Any) -> Tensor:
    batch, heads, length = q_BHLD.shape[:3]
    return v_BKLE.new_empty(batch, length, heads, v_BKLE.shape[-1])


@torch.library.custom_op("potstill::differentiate_spans", mutates_args=())
def _differentiate_spans(
    grad_BLHE: Tensor,
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    sink_H: Tensor | None,
    positions_BL: Tensor,
    host_bounds_C: Tensor,
    seed_1: Tensor | None,
    window: int | None,
    chunk: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks; the last is empty if there are none.

    No autograd: a kernel of an operation runs below it.
    """
    groups = q_BHLD.shape[1] // k_BKLD.shape[1]
    dq_BHLD, dk_BKLD, dv_BKLE = (each.new_empty(each.shape) for each in (q_BHLD, k_BKLD, v_BKLE))
    sink_KG = None if sink_H is None else sink_H.view(-1, groups)
    dsink_H = q_BHLD.new_zeros(0) if sink_H is None else torch.zeros_like(sink_H)
    mask = _make_mask(positions_BL, host_bounds_C, Reach(window, chunk))
    scoring = _make_scoring(scale, softcap, dropout, seed_1)
    number = itertools.count()
    for row, spans in enumerate(mask.spans):
        for span in spans:
            places = slice(span.start, span.stop)
            own = scoring.of_span(next(number))
            found = differentiate_in_blocks(
                grad_BLHE[row, places].transpose(0, 1).unflatten(0, (-1, groups)),
                q_BHLD[row, :, places].unflatten(0, (-1, groups)),
                k_BKLD[row, :, places],
                v_BKLE[row, :, places],
                sink_KG,
                span.first_l,
                own,
                own.choose_seed(),
            )
            dq_BHLD[row, :, places] = found[0].flatten(0, 1)
            dk_BKLD[row, :, places] = found[1]
            dv_BKLE[row, :, places] = found[2]
            if found[3] is not None:
                dsink_H += found[3].flatten()
    return dq_BHLD, dk_BKLD, dv_BKLE, dsink_H


@_differentiate_spans.register_fake
def _(
    grad_BLHE: Tensor,
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    sink_H: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    rows = (each.new_empty(each.shape) for each in (q_BHLD, k_BKLD, v_BKLE))
    return (*rows, q_BHLD.new_empty(0) if sink_H is None else torch.empty_like(sink_H))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _backward(ctx: Any, grad_BLHE: Tensor) -> tuple[Tensor | None, ...]:
    sink_H = ctx.saved_tensors[3]
    *rows, dsink_H = _differentiate_spans(grad_BLHE, *ctx.saved_tensors, *ctx.settings)
    return (*rows, None if sink_H is None else dsink_H, *[None] * 8)


_attend_spans.register_autograd(_backward, setup_context=_keep)


def _make_mask(positions_BL: Tensor, host_bounds_C: Tensor, reach: Reach) -> DocumentMask:
    packed = PackedRows(positions_BL, host_bounds_C, host_bounds_C, positions_BL.shape[1])
    return DocumentMask.of_packed(packed, reach)


def _make_scoring(
    scale: float, softcap: float | None, dropout: float, seed_1: Tensor | None
) -> Scoring:
    return Scoring(scale, softcap, dropout, None if seed_1 is None else int(seed_1))
