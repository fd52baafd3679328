"""Refuse models that look ahead: their probabilities have seen the tokens that they predict."""

from __future__ import annotations

from contextlib import suppress

import torch
from transformers import PreTrainedModel

from kd.errors import ModelError
from kd.models.attention.isolation import LEAST_ID, MOST_ID, TOLERANCE_16_BIT, make_small
from kd.models.layers import compute_hidden_states, evaluating, find_device
from kd.models.precision import float32_products

#: Tokens of the texts that are tried, at most: some attention is sparse only from 700 tokens on.
LENGTHS = (8, 1024)
#: The share of a text whose tokens are changed, at its end: of the short one this is one token.
CHANGED_SHARE = 8
#: The largest difference of earlier hidden states, as a share of the largest one. Experts are
#: multiplied in groups of tokens, and the size of a group changes the rounding.
TOLERANCE = 1e-5


@torch.no_grad()
@float32_products()
def require_causal(model: PreTrainedModel, sequence_length: int) -> None:
    """Raise ``ModelError`` if other tokens at the end of a text change what stands before them.

    A short text is tried, and one as long as the sequences. The model must have values.
    """
    with evaluating(model):
        looks_ahead = any(_looks_ahead(model, min(sequence_length, each)) for each in LENGTHS)
    if looks_ahead:
        raise ModelError(
            f"{type(model).__name__} looks ahead: other tokens at the end of a text change its "
            "hidden states before them, so its probabilities have seen what they predict.",
            "Use a causal language model. If this is one, set is_causal and is_decoder in its "
            "config.json to true, or use_bidirectional_attention to false, or leave them out.",
        )


def precheck_causality(small: PreTrainedModel, sequence_length: int) -> None:
    """Check a model as ``require_causal`` does, before its weights are read.

    ``small`` is checked in its place (``make_small``). One that cannot run says nothing.
    """
    # Models raise any other class where a size does not suit them.
    with suppress(RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        require_causal(small, sequence_length)


def _looks_ahead(model: PreTrainedModel, length: int) -> bool:
    random = torch.Generator().manual_seed(0)
    tokens_1L = torch.randint(LEAST_ID, MOST_ID, (1, length), generator=random)
    kept = length - max(length // CHANGED_SHARE, 1)
    hidden, changed = (
        compute_hidden_states(model, each.to(find_device(model)))[:, :kept]
        for each in (tokens_1L, tokens_1L + (torch.arange(length) >= kept))
    )
    if torch.equal(hidden, changed):
        return False
    difference = float((hidden - changed).abs().max() / hidden.abs().max())
    if hidden.dtype.itemsize >= 4:
        return difference > TOLERANCE
    # 16 bits round too much to tell; a model of the same kind in float32 tells it, if it can run.
    small = make_small(model)
    if small is not None:
        with suppress(Exception):
            return _looks_ahead(small.eval(), length)
    return difference > TOLERANCE_16_BIT
