"""Rotary positions whose frequencies depend on the length of a text: LongRoPE and dynamic NTK.

transformers chooses them once for all rows of a forward pass, by its last position. Here each
document has those that it has alone, whatever stands beside it, pads its row or was read before.

Shapes: B rows, L positions of a row, C documents of a batch.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from kd.models.attention.interface import get_documents
from kd.text.packed_rows import PackedRows

#: The field of LongRoPE with the length up to which texts have the short frequencies.
_USUAL = "original_max_position_embeddings"
#: Models whose modules were looked through.
_known: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def keep_frequencies_apart(model: nn.Module) -> None:
    """Let ``model`` rotate the documents of ``reading_rows`` as if each were alone."""
    if model in _known:
        return
    _known.add(model)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        varying = any(map(_varies, kinds.values() if isinstance(kinds, dict) else [kinds]))
        # A copy of a model has its hooks already.
        if varying and _rotate_apart not in module._forward_hooks.values():
            module.register_forward_hook(_rotate_apart, with_kwargs=True)


def _varies(kind: object) -> bool:
    return kind == "longrope" or "dynamic" in str(kind)


def _rotate_apart(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return in place of ``output`` the rotations that each document has alone."""
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    layer_type = given.get("layer_type")
    positions = given.pop("position_ids")
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    usual = _find_usual_length(module, kind, layer_type)
    if not _varies(kind) or (kind == "longrope" and positions.shape[-1] <= usual):
        return output
    if kind != "longrope":
        # After a longer text, a text of just the usual length would keep its frequencies.
        module.forward(position_ids=torch.zeros_like(positions[..., :1]), **given)
    documents = get_documents()
    if documents is None or documents.positions_BL.shape[-1] != positions.shape[-1]:
        return output if kind == "longrope" else module.forward(position_ids=positions, **given)
    # Those of padding go on from its document where that need not be kept apart.
    places_BL = torch.zeros_like(positions) + documents.positions_BL.to(positions.device)
    length_BL = documents.measure_lengths().to(positions.device)
    found = None
    for low, high in itertools.pairwise((0, usual, *_list_longer(documents, kind, usual))):
        inside_BL = (length_BL > low) & (length_BL <= high)
        # No position of another document is left that could choose the frequencies.
        own = module.forward(position_ids=torch.where(inside_BL, places_BL, 0), **given)
        found = own if found is None else _choose(inside_BL, own, found)
    return found


def _find_usual_length(module: Any, kind: str, layer_type: str | None) -> int:
    """Return the length up to which all texts have the same frequencies."""
    if kind != "longrope":
        return int(module.original_max_seq_len)
    rope = module.config.rope_parameters
    return int((rope if layer_type is None else rope[layer_type])[_USUAL])


def _list_longer(documents: PackedRows, kind: str, usual: int) -> list[float]:
    """Return the greatest lengths, in order, of documents that share frequencies above ``usual``.

    Dynamic NTK gives each length its own.
    """
    if kind == "longrope":
        return [float("inf")]
    lengths_C = documents.host_bounds_C.diff().unique()
    return lengths_C[lengths_C > usual].tolist()


def _choose(inside_BL: Tensor, own: Any, others: Any) -> Any:
    """Return ``own`` where ``inside_BL``, else ``others``: tensors (..., L, angles) or tuples."""
    if isinstance(own, tuple):
        return tuple(_choose(inside_BL, *pair) for pair in zip(own, others, strict=True))
    return torch.where(inside_BL[..., None], own, others)
