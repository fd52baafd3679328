"""How many bytes of text the held-out targets stand for: what bits per byte divide by.

Perplexities of two tokenizers cannot be compared; bits per byte = loss * tokens / (ln 2 * bytes) can.

Shapes: T tokens of a sequence.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cache.records import Sequences
from kd.batches import Source

_AT_ONCE = 16  # sequences, with all that a cache keeps of them: in profile hidden thousands of bytes a token


def held_out_bytes(source: Source, tokenizer: PreTrainedTokenizerBase) -> int:
    """UTF-8 bytes of the text that the held-out targets decode to; special tokens have none."""
    first, count = source.train_count, source.validation_count
    total = 0
    for start in range(first, first + count, _AT_ONCE):
        sequences, _ = source.read(np.arange(start, min(start + _AT_ONCE, first + count)))
        total += target_bytes(sequences, tokenizer)
    return total


def target_bytes(sequences: Sequences, tokenizer: PreTrainedTokenizerBase) -> int:
    """UTF-8 bytes of the targets of ``sequences``.

    A run of targets is decoded behind what it follows in its document, for a token may look otherwise at the start of
    a text. A character whose bytes are split over two sequences counts as its replacement, three bytes.
    """
    return sum(
        _run_bytes(tokens_T[start:stop], first - start, tokenizer)
        for tokens_T, start_T, mask_T in zip(
            sequences.tokens, sequences.document_start, sequences.target_mask, strict=True
        )
        for start, first, stop in _runs(start_T, mask_T)
    )


def bits_per_byte(loss: float, tokens: int, text_bytes: int) -> float | None:
    """A mean loss in nats per token as bits per byte of text; None where there is no text."""
    return loss * tokens / (math.log(2) * text_bytes) if text_bytes else None


def _runs(start_T: NDArray[np.bool_], mask_T: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """(start of the document, first target, end) of every run of targets; position t has token t + 1 as its target."""
    runs = np.flatnonzero(np.diff(mask_T.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    starts = np.flatnonzero(start_T)
    begins = starts[np.searchsorted(starts, runs[:, 0], side="right") - 1]
    return list(zip(begins.tolist(), *(runs + 1).T.tolist(), strict=True))


def _run_bytes(tokens_T: NDArray[np.uint32], skip: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Bytes of ``tokens_T`` without its first ``skip``."""
    return len(_decode(tokens_T, tokenizer)) - len(_decode(tokens_T[:skip], tokenizer))


def _decode(tokens_T: NDArray[np.uint32], tokenizer: PreTrainedTokenizerBase) -> bytes:
    text = tokenizer.decode(tokens_T.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text).encode()
