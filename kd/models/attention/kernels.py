"""Compute the attention of packed rows by the fastest way that the device and the model allow.

    plain     rows of one document: torch's attention, all rows at once
    varlen    torch's variable-length attention, on a GPU of compute capability 8.0 or more
    flash     the same from the package flash-attn, which has soft-caps and dropout too
    flex      torch's flex attention, which has sinks and masks of any form too
    spans     one span after the other: torch's attention, or blocks of queries where a span has a
              window, a soft-cap, a sink or another thing that torch's attention lacks

Shapes: B rows, H query heads, K key heads, L positions, D width of a head, T = B L.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.flex_attention import flex_attention_forward

from kd.errors import format_first_line
from kd.models.attention.blocks import Scoring, attend_in_blocks
from kd.models.attention.documents import DocumentMask, RowMask

Kernel = Literal["plain", "varlen", "flash", "flex", "spans"]
#: The widest head that the flash kernels compute.
WIDEST_HEAD = 256
#: The precisions that they compute in.
HALVES = (torch.bfloat16, torch.float16)
#: How far their output may be from that of spans, as a share of the largest number: much more than
#: the rounding of 16 bits, much less than what another document or a wrong window changes.
KERNEL_TOLERANCE = 5e-2
#: The first and the last compute capability of GPUs with little shared memory: there the flash
#: kernels do not differentiate heads of these widths, nor wider ones with dropout (torch's
#: sdp_utils.cpp: "head_dim_gt192_constraints_on_sm86_89_or_120").
SMALL_GPUS = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
REFUSED_WIDTHS = range(193, 225)
#: What computes torch's attention of spans. On an H100 or B200 torch prefers cuDNN (sdp_utils.cpp:
#: check_prefer_cudnn_attention), which takes up to a second to plan each length that is new.
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class AttentionTraits:
    """What decides about the kernel: the device, the tensors and the model's kind of attention.

    ``capability`` is the GPU's; None on a CPU. ``width`` is that of q and k, ``value_width`` that
    of v. ``causal`` and ``regular`` are those of the mask. ``flash`` and ``flex``: these kernels
    can be used.
    """

    capability: tuple[int, int] | None
    dtype: torch.dtype
    width: int
    value_width: int
    causal: bool
    regular: bool
    softcap: bool
    sinks: bool
    dropout: bool
    flash: bool
    flex: bool


def choose_kernel(traits: AttentionTraits) -> Kernel:
    """Return the fastest kernel that computes attention of these ``traits`` right."""
    bare = not (traits.softcap or traits.sinks)
    if traits.causal and bare and not _needs_blocks(traits):
        return "plain"
    if traits.capability is None or traits.capability < (8, 0):
        return "spans"
    fits = _fits_flash(traits) and traits.width % 8 == 0
    if fits and traits.regular and bare and not traits.dropout:
        return "varlen"
    if fits and traits.regular and traits.flash and not traits.sinks:
        return "flash"
    if traits.flex and not traits.dropout and traits.width == traits.value_width:
        return "flex"
    return "spans"


def shares_keys(traits: AttentionTraits) -> bool:
    """Whether torch's attention reads the keys of several query heads without all scores in memory.

    On a GPU only its flash kernel does; the others need a copy of the keys for each query head.
    """
    return traits.capability is None or _fits_flash(traits)


def _fits_flash(traits: AttentionTraits) -> bool:
    """Whether the flash kernels of a GPU compute heads of these widths, and differentiate them."""
    if traits.capability is None or traits.capability < (8, 0) or traits.dtype not in HALVES:
        return False
    small = any(first <= traits.capability <= last for first, last in SMALL_GPUS)
    wide = traits.dropout and traits.width >= REFUSED_WIDTHS.stop
    if small and (wide or traits.width in REFUSED_WIDTHS):
        return False
    return traits.width == traits.value_width <= WIDEST_HEAD


def _needs_blocks(traits: AttentionTraits) -> bool:
    """Whether torch's attention would hold all scores of a document.

    On a CPU it does with dropout, and where values are wider or narrower than keys.
    """
    return traits.capability is None and (traits.dropout or traits.width != traits.value_width)


def attend(
    module: nn.Module,
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    mask: DocumentMask,
    scoring: Scoring,
    sink_H: Tensor | None,
) -> Tensor:
    """Return the output of the layer ``module``, (B, L, H, E).

    In ``trying_kernels`` a kernel that fails raises ``KernelFailed``. For another precision the
    output is that of spans, and a kernel that computes something else raises it, too.
    """
    rows = match_precision(q_BHLD, k_BKLD, v_BKLE)
    traits = describe(rows[0], rows[2], mask, scoring, sink_H)
    call = _Call(traits, module, rows, mask, scoring, sink_H)
    if _trying.dtype is not None:
        _require_alike(call.round(_trying.dtype))
        return call.run("spans")
    kernel = choose_kernel(traits)
    # What plain attention and spans raise is no fault of a kernel.
    if _trying.active and kernel not in ("plain", "spans"):
        return _try_kernel(call, kernel)
    return call.run(kernel)


@dataclass(frozen=True)
class _Call:
    """What a layer asks of a kernel; ``rows_BHLD`` are q, k and v, of which q alone has H heads."""

    traits: AttentionTraits
    module: nn.Module
    rows_BHLD: tuple[Tensor, ...]
    mask: DocumentMask
    scoring: Scoring
    sink_H: Tensor | None

    def round(self, dtype: torch.dtype) -> _Call:
        """Return the call with q, k and v in ``dtype``."""
        rows = tuple(each.to(dtype) for each in self.rows_BHLD)
        return replace(self, traits=replace(self.traits, dtype=dtype), rows_BHLD=rows)

    def run(self, kernel: Kernel) -> Tensor:
        """Return the output of ``kernel``, (B, L, H, E)."""
        q_BHLD, k_BKLD, v_BKLE = self.rows_BHLD
        scoring = self.scoring
        if kernel in ("plain", "spans") and not shares_keys(self.traits):
            groups = q_BHLD.shape[1] // k_BKLD.shape[1]
            k_BKLD, v_BKLE = (each.repeat_interleave(groups, dim=1) for each in (k_BKLD, v_BKLE))
        if kernel == "plain":
            # Some of torch's kernels write (B, H, L, E), and models view the output as (B, L, H E).
            return _run_torch(q_BHLD, k_BKLD, v_BKLE, scoring).transpose(1, 2).contiguous()
        if kernel == "varlen":
            return run_varlen(q_BHLD, k_BKLD, v_BKLE, self.mask, scoring)
        if kernel == "flash":
            return _run_flash(q_BHLD, k_BKLD, v_BKLE, self.mask, scoring)
        if kernel == "flex":
            found: Tensor = flex_attention_forward(
                self.module,
                q_BHLD,
                k_BKLD,
                v_BKLE,
                self.mask.blocks,
                scaling=scoring.scale,
                softcap=scoring.softcap,
                s_aux=self.sink_H,
            )[0]
            return found
        blocks = _needs_blocks(self.traits)
        return _run_spans(q_BHLD, k_BKLD, v_BKLE, self.mask, scoring, self.sink_H, blocks)


# ---------------------------------------------------------------------- is the kernel right?


class KernelFailed(RuntimeError):
    """A kernel cannot compute a layer, or computes something else than spans."""


class _Trying(threading.local):
    """Whether this thread tries kernels, and the precision whose kernels it compares with spans."""

    active = False
    dtype: torch.dtype | None = None


_trying = _Trying()


@contextmanager
def trying_kernels(dtype: torch.dtype | None) -> Iterator[None]:
    """Compare in each layer the kernel for ``dtype`` with spans, which go on in its place.

    So a model that is tried in float32 needs no kernel that only float32 needs. None compares
    nothing: the model's own precision takes its kernel, which must not fail.
    """
    _trying.active, _trying.dtype = True, dtype
    try:
        yield
    finally:
        _trying.active, _trying.dtype = False, None


def _try_kernel(call: _Call, kernel: Kernel) -> Tensor:
    """Return the output of ``kernel``. Raises ``KernelFailed`` if it cannot run."""
    try:
        return call.run(kernel)
    # Triton needs a C compiler, and torch may be built without a kernel.
    except Exception as error:
        raise KernelFailed(f"{kernel} attention failed: {format_first_line(error)}") from error


def _require_alike(call: _Call) -> None:
    """Raise ``KernelFailed`` if the kernel that ``call`` takes differs from spans.

    Spans compute in float32 from the same rounded numbers, so that the kernel alone differs.
    """
    kernel = choose_kernel(call.traits)
    if kernel in ("plain", "spans"):
        return
    found = _try_kernel(call, kernel).float()
    expected = call.round(torch.float32).run("spans")
    difference = float((found - expected).abs().max())
    # So that a number which is not finite counts as a difference.
    if not difference <= KERNEL_TOLERANCE * float(expected.abs().max()):
        raise KernelFailed(f"{kernel} attention differs from torch's by {difference:.2g}")


def describe(
    q_BHLD: Tensor, v_BKLE: Tensor, mask: RowMask, scoring: Scoring, sink_H: Tensor | None
) -> AttentionTraits:
    """Return what decides about the kernel."""
    device = q_BHLD.device
    on_gpu = device.type == "cuda"
    return AttentionTraits(
        capability=torch.cuda.get_device_capability(device) if on_gpu else None,
        dtype=q_BHLD.dtype,
        width=q_BHLD.shape[-1],
        value_width=v_BKLE.shape[-1],
        causal=mask.causal,
        regular=mask.regular,
        softcap=scoring.softcap is not None,
        sinks=sink_H is not None,
        dropout=scoring.dropout > 0.0,
        flash=on_gpu and _finds("flash_attn"),
        flex=on_gpu and _finds("triton"),
    )


@functools.cache
def _finds(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def match_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``tensors`` in the precision of autocast, as torch's own attention takes them."""
    device = tensors[0].device.type
    dtype = tensors[0].dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return tuple(each.to(dtype) for each in tensors)


def _run_torch(q_BHLD: Tensor, k_BKLD: Tensor, v_BKLE: Tensor, scoring: Scoring) -> Tensor:
    return functional.scaled_dot_product_attention(
        q_BHLD,
        k_BKLD,
        v_BKLE,
        dropout_p=scoring.dropout,
        is_causal=True,
        scale=scoring.scale,
        enable_gqa=q_BHLD.shape[1] != k_BKLD.shape[1],
    )


def _run_spans(
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLE: Tensor,
    mask: DocumentMask,
    scoring: Scoring,
    sink_H: Tensor | None,
    blocks: bool,
) -> Tensor:
    batch, heads, length, _ = q_BHLD.shape
    groups = heads // k_BKLD.shape[1]
    sizes = [[len(span) for span in row] for row in mask.spans]
    # split and not slices: the gradient of each slice would be as large as the whole row.
    parts = (
        [part for row, cut in zip(each.unbind(0), sizes, strict=True) for part in row.split(cut, 1)]
        for each in (q_BHLD, k_BKLD, v_BKLE)
    )
    sink_KG = None if sink_H is None else sink_H.view(-1, groups)
    # Only blocks draw from a seed that is given.
    given = scoring.seed is not None
    blocks = blocks or given or scoring.softcap is not None or sink_H is not None
    spans = (span for row in mask.spans for span in row)
    found = []
    with sdpa_kernel(WITHOUT_PLANS):
        for number, (span, q_HlD, k_KlD, v_KlE) in enumerate(zip(spans, *parts, strict=True)):
            if span.causal and not blocks:
                output_HlE = _run_torch(q_HlD[None], k_KlD[None], v_KlE[None], scoring)[0]
            else:
                q_KGlD = q_HlD.unflatten(0, (-1, groups))
                output_HlE = attend_in_blocks(
                    q_KGlD, k_KlD, v_KlE, sink_KG, span.first_l, scoring.of_span(number)
                ).flatten(0, 1)
            found.append(output_HlE.transpose(0, 1))
    return torch.cat(found).view(batch, length, heads, -1)


# ---------------------------------------------------------------------- kernels of a GPU


def _lay_out(q_BHLD: Tensor, k_BKLD: Tensor, v_BKLE: Tensor, mask: RowMask) -> tuple[Any, ...]:
    """Return q, k, v as (T, H, D), the spans' bounds of q and k, and the longest span of each."""
    rows = (each.transpose(1, 2).flatten(0, 1) for each in (q_BHLD, k_BKLD, v_BKLE))
    return (*rows, mask.bounds_C, mask.bounds_C, mask.longest, mask.longest)


def get_window(mask: RowMask) -> tuple[int, int]:
    """Return how many keys before and after its own a query reads; -1 means all.

    The kernels count the keys before a query's own one, so a window of w keys is w - 1.
    """
    return (-1 if mask.window is None else mask.window - 1, 0)


#: Before torch 2.12 its kernel takes fewer key heads than query heads without being told.
_ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def run_varlen(
    q_BHLD: Tensor, k_BKLD: Tensor, v_BKLE: Tensor, mask: RowMask, scoring: Scoring
) -> Tensor:
    """Return torch's variable-length attention, (B, L, H, E)."""
    compute: Callable[..., Any] = varlen_attn
    grouped = {"enable_gqa": q_BHLD.shape[1] != k_BKLD.shape[1]} if _ASKS_FOR_GROUPS else {}
    found = compute(
        *_lay_out(q_BHLD, k_BKLD, v_BKLE, mask),
        scale=scoring.scale,
        window_size=get_window(mask),
        **grouped,
    )
    output_BLHE: Tensor = found.unflatten(0, (-1, q_BHLD.shape[2]))
    return output_BLHE


def _run_flash(
    q_BHLD: Tensor, k_BKLD: Tensor, v_BKLE: Tensor, mask: DocumentMask, scoring: Scoring
) -> Tensor:
    found: Tensor = importlib.import_module("flash_attn").flash_attn_varlen_func(
        *_lay_out(q_BHLD, k_BKLD, v_BKLE, mask),
        dropout_p=scoring.dropout,
        softmax_scale=scoring.scale,
        causal=True,
        window_size=get_window(mask),
        softcap=scoring.softcap or 0.0,
    )
    return found.unflatten(0, (-1, q_BHLD.shape[2]))
