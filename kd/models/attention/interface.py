"""Our attention as an implementation that models of transformers can be told to use.

A model that uses it has one of the names in ``NAMES`` in its configuration, which is not saved. All
that is no packed row (generation with a cache, padded rows, masks of the model's own) is computed
by the implementation that the model had before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from kd.models.attention.blocks import Scoring
from kd.models.attention.compiled import attend_in_graph
from kd.models.attention.documents import (
    DocumentMask,
    GraphMask,
    MaskFunction,
    Reach,
    RowMask,
    find_document_starts,
    find_first_keys,
)
from kd.models.attention.kernels import attend
from kd.text.packed_rows import PackedRows

#: Our names, by the name of the implementation that they replace. transformers reads other parts of
#: such names: no name may hold sdpa, flash or flex.
NAMES = {"sdpa": "potstill", "eager": "potstill_eager"}

#: The arguments by which transformers asks for a mask.
Asked = dict[str, Any]
#: Why torch.compile breaks its graph here.
_BREAK = "what a mask lets each query read is found outside the graph"


class _Reading(threading.local):
    """The rows that this thread's forward pass reads, if ``reading_rows`` began it.

    ``ours``: the model uses our attention. ``documents``: None if each row is one document.
    ``packed``: the documents, if attention must keep them apart.
    """

    ours = False
    documents: PackedRows | None = None
    packed: PackedRows | None = None


# Not a ContextVar, which torch.compile cannot read.
_reading = _Reading()


@contextmanager
def reading_rows(model: nn.Module, packed: PackedRows | None) -> Iterator[None]:
    """Tell the masks of the forward pass of ``model`` in the block where its documents lie.

    Some models (gpt-oss) do not hand their positions to their masks.
    """
    before = _reading.ours, _reading.documents, _reading.packed
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    _reading.ours = name in NAMES.values()
    _reading.documents = packed
    _reading.packed = packed if packed is not None and packed.apart else None
    try:
        yield
    finally:
        _reading.ours, _reading.documents, _reading.packed = before


def get_documents() -> PackedRows | None:
    """Return the documents of the rows that this thread reads; None if each row is one."""
    return _reading.documents


def use_packed_attention(model: nn.Module) -> bool:
    """Let ``model`` use our attention; returns whether it has an implementation that we replace."""
    return _rename(model, NAMES)


def uses_packed_attention(model: PreTrainedModel) -> bool:
    """Whether ``model`` uses our attention."""
    return model.config._attn_implementation in NAMES.values()


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
    def search(asked: Asked) -> DocumentMask | Tensor | None:
        mask = _search_document_mask(asked)
        return own(**_show_documents(asked)) if mask is None else mask

    def make(**asked: Any) -> RowMask | Tensor | None:
        if not _is_usual(asked):
            return search(asked)
        skips = theirs == "sdpa"
        window = asked.get("local_size")
        # Rows of one document each, within the window, need no mask.
        if skips and _reading.packed is None and (window is None or asked["q_length"] < window):
            return None
        reach = _get_reach(asked)
        if reach is None:
            return search(asked)
        mask = _make_document_mask(reach, asked)
        return None if skips and mask.causal else mask

    return make


def _is_usual(asked: Asked) -> bool:
    """Whether the mask is that of the rows of ``reading_rows``, with nothing of the model's own.

    Only causal masks are asked for with ``allow_is_causal_skip``.
    """
    packed = _reading.packed
    known = packed is None or packed.positions_BL.shape == (asked["batch_size"], asked["q_length"])
    causal = asked.get("allow_is_causal_skip", False)
    return _reading.ours and causal and known and _is_of_rows(asked)


def _is_of_rows(asked: Asked) -> bool:
    """Whether queries and keys are those of whole rows, with no mask of the model's own.

    An offset that is a tensor would have to be waited for.
    """
    offsets = (asked.get("q_offset", 0), asked.get("kv_offset", 0))
    begins = all(isinstance(each, int) and each == 0 for each in offsets)
    own = asked.get("attention_mask") is not None or asked.get("use_vmap", False)
    return begins and not own and asked["q_length"] == asked["kv_length"]


def _make_document_mask(reach: Reach, asked: Asked) -> RowMask:
    """Return the bounds of the rows of ``reading_rows``, without waiting for the device."""
    packed = _reading.packed
    if packed is None:
        packed = PackedRows.whole(asked["batch_size"], asked["q_length"], asked["device"])
    if not torch.compiler.is_compiling():
        return DocumentMask.of_packed(packed, reach)
    return GraphMask(packed, reach)


#: What a query reads in the models of a configuration's class, whose windows or chunks are so long;
#: None if that is no ``Reach``.
_reaches: dict[tuple[type, int | None], Reach | None] = {}


def _get_reach(asked: Asked) -> Reach | None:
    kind = (type(asked["config"]), asked.get("local_size"))
    if kind not in _reaches:
        _find_reach(kind, asked["mask_function"], asked["device"])
    return _reaches[kind]


@torch.compiler.disable(reason=_BREAK)
def _find_reach(
    kind: tuple[type, int | None], mask_function: MaskFunction, device: torch.device
) -> None:
    """Find what the queries of a kind read, once: this waits for the device."""
    _reaches[kind] = Reach.find(mask_function, kind[1], device)


def _search_document_mask(asked: Asked) -> DocumentMask | None:
    """Return the bounds of a mask that is not usual; waits for the device. None if it has none.

    So it is with the masks of a forward pass that ``reading_rows`` did not begin.
    """
    if not _is_of_rows(asked):
        return None
    shape = (asked["batch_size"], asked["q_length"])
    packed = _reading.packed
    known = packed is not None and packed.positions_BL.shape[-1] == shape[1]
    if packed is not None and known:
        start_BL = find_document_starts(packed.positions_BL.expand(shape[0], -1))
    else:
        start_BL = torch.zeros(shape, dtype=torch.int64, device=asked["device"])
    return DocumentMask.of(find_first_keys(asked["mask_function"], start_BL, known))


def _show_documents(asked: Asked) -> Asked:
    """Return what was ``asked`` for, with the documents that were hidden from transformers."""
    packed = _reading.packed
    if not _reading.ours or packed is None:
        return asked
    known = masking_utils.packed_sequence_mask_function((packed.positions_BL == 0).cumsum(dim=1))
    return asked | {
        "mask_function": masking_utils.and_masks(known, asked["mask_function"]),
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }


# ---------------------------------------------------------------------- attention


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMask,
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
    if isinstance(attention_mask, GraphMask):
        return attend_in_graph(module, query, key, value, attention_mask, scoring, s_aux), None
    return attend(module, query, key, value, attention_mask, scoring, s_aux), None


def _make_attention(find_theirs: Callable[[nn.Module], Any]) -> Callable[..., Any]:
    """Return our attention for packed rows, and for all else the one that a module had before."""

    def compute(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        *rest: Any, **more: Any,
    ) -> Any:  # fmt: skip
        ours = isinstance(attention_mask, DocumentMask | GraphMask)
        chosen: Any = _attend if ours else find_theirs(module)
        return chosen(module, query, key, value, attention_mask, *rest, **more)

    return compute


def _find_eager(module: nn.Module) -> Any:
    """Return the function that ``module`` calls for the implementation "eager"."""
    files = (sys.modules[each.__module__] for each in type(module).__mro__)
    found = (getattr(file, "eager_attention_forward", None) for file in files)
    return next(each for each in found if each is not None)


_find_theirs: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices


def _find_documents(position_ids: Tensor) -> Tensor | None:
    """Keep transformers from looking for documents in the positions that our attention knows.

    It would wait for the device in each forward pass, and for each kind of mask.
    """
    return None if _reading.ours else _find_theirs(position_ids)


_FINDING: dict[str, Callable[[nn.Module], Any]] = {
    "sdpa": lambda _: sdpa_attention_forward,
    "eager": _find_eager,
}
for _theirs, _ours in NAMES.items():
    AttentionInterface.register(_ours, _make_attention(_FINDING[_theirs]))
    AttentionMaskInterface.register(_ours, _make_masks(_theirs))
masking_utils.find_packed_sequence_indices = _find_documents
