"""Count the bytes of text that the held-out targets stand for, to compute bits per byte.

Perplexities of different tokenizers cannot be compared; bits per byte can:
bits per byte = loss * tokens / (ln 2 * bytes).

Shapes: L positions of a sequence.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cache.records import Sequences
from kd.text.batches import Source, list_held_out, read_in_parts

#: Sequences that are read at once. A record of profile hidden has thousands of bytes per token.
_SEQUENCES_AT_ONCE = 16


def count_held_out_bytes(source: Source, tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the UTF-8 bytes of the text of all held-out targets; special tokens have none."""
    parts = read_in_parts(source, list_held_out(source), _SEQUENCES_AT_ONCE)
    return sum(count_target_bytes(sequences, tokenizer) for sequences, _ in parts)


def count_target_bytes(sequences: Sequences, tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the UTF-8 bytes of the targets of ``sequences``.

    A run of targets is decoded together with the text before it in its document, because a token
    may decode differently at the start of a text. A character that is split over two sequences
    counts as the replacement character, three bytes.
    """
    return sum(
        len(_decode(tokens_L[start:stop], tokenizer))
        - len(_decode(tokens_L[start:first], tokenizer))
        for tokens_L, start_L, mask_L in zip(*sequences.arrays, strict=True)
        for start, first, stop in _find_runs(start_L, mask_L)
    )


def compute_bits_per_byte(loss: float, tokens: int, text_bytes: int) -> float | None:
    """Convert a mean loss in nats per token to bits per byte of text; None if there is no text."""
    return loss * tokens / (math.log(2) * text_bytes) if text_bytes else None


def _find_runs(start_L: NDArray[np.bool_], mask_L: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Find every run of targets as (start of its document, first target, end).

    The mask is at the position before a target: position t has token t + 1 as its target.
    """
    runs = np.flatnonzero(np.diff(mask_L.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    starts = np.flatnonzero(start_L)
    # The document of a run is the last one that begins at or before it.
    begins = starts[np.searchsorted(starts, runs[:, 0], side="right") - 1]
    return list(zip(begins.tolist(), *(runs + 1).T.tolist(), strict=True))


def _decode(tokens_L: NDArray[np.uint32], tokenizer: PreTrainedTokenizerBase) -> bytes:
    text = tokenizer.decode(
        tokens_L.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return str(text).encode()
