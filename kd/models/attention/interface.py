"""Our attention as an implementation that models of transformers can be told to use.

A model that uses it has one of the names in ``NAMES`` in its configuration, which is not saved. All
that is no packed row (generation with a cache, padded rows, masks of the model's own) is computed
by the implementation that the model had before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
)

from kd.models.attention.blocks import Scoring
from kd.models.attention.documents import (
    DocumentMask,
    find_document_starts,
    find_first_keys,
)
from kd.models.attention.kernels import attend

#: Our names, by the name of the implementation that they replace. transformers reads other parts of
#: such names: no name may hold sdpa, flash or flex.
NAMES = {"sdpa": "potstill", "eager": "potstill_eager"}

#: Why torch.compile breaks its graph here.
_BREAK = "the documents of packed rows differ from batch to batch"

_positions: ContextVar[Tensor | None] = ContextVar("positions", default=None)


@contextmanager
def packed_positions(positions_BL: Tensor | None) -> Iterator[None]:
    """Tell the masks of the forward pass in the block that rows are packed as ``positions_BL`` say.

    Some models (gpt-oss) do not hand their positions to their masks.
    """
    before = _positions.set(positions_BL)
    try:
        yield
    finally:
        _positions.reset(before)


def use_packed_attention(model: nn.Module) -> bool:
    """Let ``model`` use our attention; returns whether it has an implementation that we replace."""
    return _rename(model, NAMES)


def use_own_attention(model: nn.Module) -> None:
    """Let ``model`` use the attention that it had before ``use_packed_attention``."""
    _rename(model, {ours: theirs for theirs, ours in NAMES.items()})


def _rename(model: nn.Module, names: dict[str, str]) -> bool:
    found = {
        id(config): config
        for module in model.modules()
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig)
    }
    # Setting the name of a configuration sets that of all its parts: the parts come last.
    wanted = [
        (config, names[config._attn_implementation])
        for config in found.values()
        if config._attn_implementation in names
    ]
    for config, name in wanted:
        config._attn_implementation = name
    return bool(wanted)


# ---------------------------------------------------------------------- masks


def _make_masks(theirs: str) -> Callable[..., Any]:
    """Return a function that makes masks as ``theirs``, but document bounds for packed rows."""
    own: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[theirs]

    @torch.compiler.disable(reason=_BREAK)
    def make(**asked: Any) -> DocumentMask | Tensor | None:
        if theirs == "sdpa" and _is_plain(**asked):
            return own(**asked)
        mask = _find_document_mask(**asked)
        if mask is None:
            return own(**asked)
        if theirs == "sdpa" and mask.causal:
            return None if asked.get("allow_is_causal_skip", True) else own(**asked)
        return mask

    return make


def _is_plain(
    *,
    q_length: int,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **_: Any,
) -> bool:
    """Whether rows are one document each and no window is shorter: a mask is hardly asked for.

    transformers finds that without waiting for the device.
    """
    whole = local_size is None or q_length < local_size
    return allow_is_causal_skip and whole and _positions.get() is None


def _find_document_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> DocumentMask | None:
    """Return the bounds in place of a mask; None where a mask is needed."""
    begins = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0
    if not begins or q_length != kv_length or attention_mask is not None or use_vmap:
        return None
    positions_BL = _positions.get()
    known = positions_BL is not None and positions_BL.shape[-1] == q_length
    if positions_BL is not None and known:
        start_BL = find_document_starts(positions_BL.expand(batch_size, -1))
    else:
        start_BL = torch.zeros(batch_size, q_length, dtype=torch.int64, device=device)
    return DocumentMask.of(find_first_keys(mask_function, start_BL, known))


# ---------------------------------------------------------------------- attention


@torch.compiler.disable(reason=_BREAK)
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if position_bias is not None:
        raise NotImplementedError("attention with a bias for each pair of positions needs a mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, softcap, dropout)
    return attend(module, query, key, value, attention_mask, scoring, s_aux), None


def _attend_or_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *rest: Any,
    **more: Any,
) -> tuple[Tensor, Any]:
    compute: Any = _attend if isinstance(attention_mask, DocumentMask) else sdpa_attention_forward
    found: tuple[Tensor, Any] = compute(module, query, key, value, attention_mask, *rest, **more)
    return found


def _attend_or_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *rest: Any,
    **more: Any,
) -> tuple[Tensor, Any]:
    compute: Any = _attend if isinstance(attention_mask, DocumentMask) else _find_eager(module)
    found: tuple[Tensor, Any] = compute(module, query, key, value, attention_mask, *rest, **more)
    return found


def _find_eager(module: nn.Module) -> Any:
    """Return the function that ``module`` calls for the implementation "eager"."""
    files = (sys.modules[each.__module__] for each in type(module).__mro__)
    found = (getattr(file, "eager_attention_forward", None) for file in files)
    return next(each for each in found if each is not None)


def _register() -> None:
    computing = {"sdpa": _attend_or_sdpa, "eager": _attend_or_eager}
    for theirs, ours in NAMES.items():
        AttentionInterface.register(ours, computing[theirs])
        AttentionMaskInterface.register(ours, _make_masks(theirs))


_register()
