"""Text -> tokens -> packed sequences, in small steps.

    sources.py    files, globs, datasets   -> one text (or chat) per document
    tokens.py     texts, chats             -> Documents: token ids, and which are targets
    pieces.py     a long text              -> its ids, piece by piece, the same as of the whole
    packing.py    Documents                -> Sequences: (S, L) tokens, boundaries, target mask
    mixtures.py   Sequences of each source -> Sequences of all, in the shares of their weights

The result depends only on the text and the configuration. The tokens of a corpus name its cache,
also if sources are mixed or streamed.

Shapes: S sequences, L positions of a sequence.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cache.records import Sequences
from kd.config.data import DataConfig, TextSources
from kd.errors import DataError
from kd.progress import SILENT, Monitor, ProgressMeter
from kd.text.files import find_files
from kd.text.mixtures import get_weight, has_dataset, is_mixture, mix_texts, name_source
from kd.text.packing import Document, join_blocks, pack_in_blocks
from kd.text.sources import read_documents
from kd.text.tokens import choose_pad_id, encode_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Seconds between two reports of how far the reading has come.
REPORT_SECONDS = 1.0
#: Tokens that may be held out in any case: fewer make a perplexity too uncertain.
FEW_TOKENS = 2048
#: Bytes of the unit in which the reading is reported.
KILOBYTE = 1000


@dataclass(frozen=True)
class Corpus:
    """The packed text of a job; a cache stores the training sequences before the held-out ones."""

    train: Sequences
    validation: Sequences

    def compute_sha256(self) -> str:
        """Return the hash of every token, boundary and mask bit, in order."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            digest.update(np.asarray(part.tokens.shape, np.int64).tobytes())
            for array in (
                part.tokens.astype("<u4", copy=False),
                part.document_start,
                part.target_mask,
            ):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def load_corpus(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    monitor: Monitor = SILENT,
    size: int | None = None,
) -> Corpus:
    """Read, tokenize and pack the text that ``config`` names; streams only as far as needed.

    Raises ``DataError`` where the text holds a token whose id is not below ``size``, V.
    """

    def load(field: str, wanted: int | None) -> Sequences:
        sources = config.train if field == "train" else config.validation
        return _load_sequences(sources, field, wanted, config, tokenizer, monitor, size)

    if not config.train:  # a model is only measured
        validation = _take_first(
            load("validation", config.max_eval_samples), config.max_eval_samples
        )
        return Corpus(validation.select(slice(0, 0)), validation)
    train = load("train", _count_wanted(config))
    if config.validation:
        validation = load("validation", config.max_eval_samples)
    else:
        train, validation = _hold_out(train, config.held_out_fraction)
    train = _take_first(train, config.max_train_samples)
    kept = count_kept_held_out(len(validation), len(train), config)
    return Corpus(train, _take_first(validation, kept))


def _count_wanted(config: DataConfig) -> int | None:
    """Count the training sequences to read, including those that will be held out; None = all.

    Sequences are held out from the end of the text, so that a text that ends is read to its end.
    """
    kept = config.max_train_samples
    fraction = config.held_out_fraction
    if kept is None or fraction == 0:
        return kept
    streamed = config.streaming and has_dataset(config.train)
    return (
        next(n for n in itertools.count(kept) if n - count_held_out(n, fraction) >= kept)
        if streamed
        else None
    )


def _load_sequences(
    sources: TextSources,
    field: str,
    wanted: int | None,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    monitor: Monitor,
    size: int | None,
) -> Sequences:
    """Load the first ``wanted`` sequences: from one source after the other, or from a mixture."""

    def pack_sources(sources: TextSources, field: str) -> Iterator[Sequences]:
        report = _ReadingReport(field, monitor, _count_bytes(sources))
        found = read_documents(sources, field, config, report.note)
        documents = encode_documents(found, tokenizer, config, size, monitor)
        pad_id = choose_pad_id(tokenizer, size)
        return pack_in_blocks(report.follow(documents), config, field, pad_id)

    if not is_mixture(sources, config):
        return join_blocks(_take_until(pack_sources(sources, field), wanted))
    texts = [pack_sources((source,), f"{field}.{number}") for number, source in enumerate(sources)]
    sequences, ended = mix_texts(texts, list(map(get_weight, sources)), wanted)
    if ended is not None:
        source = f"data.{field}.{ended} ({name_source(sources[ended])})"
        monitor.emit(
            "warning",
            message=f"{source} has no more text: the mixture ends with it, after {len(sequences)} "
            "sequences of all sources.",
        )
    return sequences


def _count_bytes(sources: TextSources) -> int:
    """Count the bytes of the files that ``sources`` name; 0 if one is a dataset."""
    if has_dataset(sources):
        return 0
    return sum(
        file.stat().st_size for source in sources for file in find_files(name_source(source))
    )


class _ReadingReport:
    """Reports how far the reading of a field has come, so that the process does not seem to hang.

    ``total`` is the number of bytes of its files, 0 if it is not known.
    """

    def __init__(self, field: str, monitor: Monitor, total: int) -> None:
        self._field = field
        self._monitor = monitor
        self._meter = ProgressMeter(total=total // KILOBYTE, unit="kB")
        self._bytes = 0

    def note(self, count: int) -> None:
        """Count ``count`` more bytes of the files as read."""
        self._bytes += count

    def follow(self, documents: Iterator[Document]) -> Iterator[Document]:
        """Pass the documents on; report at most every ``REPORT_SECONDS``."""
        tokens = 0
        new = 0
        reported_at = time.monotonic()
        for document in documents:
            yield document
            new += len(document)
            self._monitor.check("while reading the text")
            if time.monotonic() - reported_at > REPORT_SECONDS:
                tokens += new
                self._report(tokens, new)
                new = 0
                reported_at = time.monotonic()

    def _report(self, tokens: int, new: int) -> None:
        meter = self._meter
        self._monitor.emit("stage", phase=f"reading data.{self._field}: {tokens:,} tokens")
        if meter.total:
            read = min(self._bytes // KILOBYTE, meter.total)
            self._monitor.emit("progress", **meter.advance(read - meter.done, new))


def _hold_out(train: Sequences, fraction: float) -> tuple[Sequences, Sequences]:
    """Split off the last ``fraction`` of the sequences, at least one.

    They are taken from the end, so that neighbours in a text are on the same side of the split.
    """
    # At least one sequence must be left to train on.
    held_out = count_held_out(len(train), fraction)
    if held_out >= len(train):
        raise DataError(
            f"data.train gives {len(train)} sequence(s), too few to hold {held_out} out.",
            "Add text, lower data.sequence_length, or set data.validation_fraction to 0.",
        )
    cut = len(train) - held_out
    # Slices share the memory of the whole.
    return train.select(slice(cut)), train.select(slice(cut, None))


def count_held_out(count: int, fraction: float) -> int:
    """Count the sequences that are held out of ``count``."""
    return max(1, round(count * fraction)) if fraction > 0 else 0


def count_kept_held_out(held_out: int, trained: int, config: DataConfig) -> int:
    """Count the sequences that are kept of ``held_out``, where ``trained`` are trained on.

    A share of a long text may be much more than the few sequences of it that are trained on.
    """
    if config.max_eval_samples is not None:
        return min(held_out, config.max_eval_samples)
    if config.validation or config.max_train_samples is None:
        return held_out
    return min(held_out, max(trained, math.ceil(FEW_TOKENS / config.sequence_length)))


def describe_held_out(kept: int, trained: int, config: DataConfig) -> str:
    """Say which ``kept`` sequences are held out, where ``trained`` are trained on, and why."""
    share = f"the last {config.held_out_fraction:.3g} of data.train"
    source = "data.validation" if config.validation else share
    if kept == 0:
        return "no sequence is held out: data.validation_fraction is 0"
    if config.max_eval_samples == kept:
        return f"the first {kept} sequences of {source}: data.max_eval_samples"
    least = math.ceil(FEW_TOKENS / config.sequence_length)
    if config.validation or config.max_train_samples is None or kept < max(trained, least):
        return f"{kept} sequences: {source}"
    return (
        f"the first {kept} sequences of {share}: without data.max_eval_samples no more than are "
        f"trained on, or {FEW_TOKENS:,} tokens"
    )


def _take_first(sequences: Sequences, count: int | None) -> Sequences:
    if count is None or count >= len(sequences):
        return sequences
    # A copy frees the memory of the rest, which may be much larger.
    return sequences.select(np.arange(count))


def _take_until(text: Iterable[Sequences], wanted: int | None) -> Iterator[Sequences]:
    """Yield the blocks of ``text`` until there are ``wanted`` sequences; the last block is cut."""
    for block in text:
        yield _take_first(block, wanted)
        wanted = None if wanted is None else wanted - len(block)
        if wanted is not None and wanted <= 0:
            return
