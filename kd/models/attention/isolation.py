"""Choose an attention that keeps the documents of a packed row apart, and check that it does."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kd.errors import ModelError
from kd.models.attention.interface import NAMES, use_own_attention, use_packed_attention
from kd.models.layers import compute_hidden_states
from kd.progress import Monitor
from kd.text.packed_rows import PackedRows

#: A packed row of two documents.
POSITIONS = (0, 1, 2, 3, 0, 1, 2, 3)
TOKENS = (1, 2, 3, 4, 1, 2, 3, 4)
#: The largest difference between a document in a packed row and alone, as a share of the largest
#: hidden state. Much more than rounding, also that of 16 bits over many layers, and much less than
#: what a layer that attends otherwise changes.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
TOLERANCE_16_BIT = 5e-2
#: Bytes of a sequence's mask from which on a run warns of it.
LARGE_MASK = 2**26


def warn_of_mask(model: PreTrainedModel, sequence_length: int, monitor: Monitor) -> None:
    """Emit a warning if ``model`` makes a large mask for each packed sequence.

    Call it after ``isolate_documents``. A mask has a byte for each pair of tokens.
    """
    size = sequence_length**2
    if size < LARGE_MASK or model.config._attn_implementation in NAMES.values():
        return
    monitor.emit(
        "warning",
        message=f"{type(model).__name__} computes its attention by its own code, with a mask of "
        f"{size / 2**20:,.0f} MiB for each packed sequence of {sequence_length} tokens. If memory "
        "runs out, set data.sequence_length lower or data.packing to false.",
    )


@torch.no_grad()
def isolate_documents(model: PreTrainedModel) -> None:
    """Let ``model`` compute the documents of a packed row as if each were alone.

    It uses our attention where this gives the hidden states of its own, and keeps its own mask
    where it does not. Raises ``ModelError`` if a token changes the hidden states of the next
    document either way.
    """
    training = model.training
    model.eval()
    # A model that uses our attention already would find nothing to replace.
    use_own_attention(model)
    try:
        if use_packed_attention(model) and _computes_as_alone(model):
            return
        use_own_attention(model)
        if not _isolates(model):
            raise ModelError(
                f"{type(model).__name__} attends across the documents of a packed sequence.",
                "Set data.packing to false, or use a model whose attention follows position_ids.",
            )
    finally:
        model.train(training)


def _computes_as_alone(model: PreTrainedModel) -> bool:
    """Whether documents in a packed row are as the model's own attention computes each alone."""
    try:
        packed = _compute(model, TOKENS, POSITIONS)
        kept_apart = _isolates(model)
    # The model's own code may raise anything when it gets document bounds in place of a mask.
    except Exception:
        return False
    if not kept_apart:
        return False
    use_own_attention(model)
    alone = torch.cat([_compute(model, TOKENS[:4]), _compute(model, TOKENS[4:])], dim=1)
    use_packed_attention(model)
    tolerance = TOLERANCES.get(packed.dtype, TOLERANCE_16_BIT)
    return bool((packed - alone).abs().max() <= tolerance * alone.abs().max())


def _isolates(model: PreTrainedModel) -> bool:
    """Whether other tokens in the first of two packed documents leave the second as it was."""
    packed = _compute(model, TOKENS, POSITIONS)
    other = tuple(token + (place < 4) for place, token in enumerate(TOKENS))
    changed = _compute(model, other, POSITIONS)
    difference = float((packed[:, 4:] - changed[:, 4:]).abs().max())
    # Experts are multiplied in groups of tokens, and the size of a group changes the rounding.
    # float32 separates that rounding from a real leak, which can be as small as 5e-4. bfloat16
    # cannot, so there any difference counts as a leak.
    tolerance = 1e-5 if packed.dtype.itemsize >= 4 else 0.0
    return difference <= tolerance * float(packed.abs().max())


def _compute(
    model: PreTrainedModel, tokens: tuple[int, ...], positions: tuple[int, ...] | None = None
) -> Tensor:
    tokens_1L = torch.tensor([tokens], device=model.device)
    if positions is None:
        return compute_hidden_states(model, tokens_1L)
    packed = PackedRows.of(torch.tensor([positions])).map(lambda each: each.to(model.device))
    return compute_hidden_states(model, tokens_1L, packed)
