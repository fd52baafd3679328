"""Text -> tokens -> packed sequences, in small steps.

    sources.py        files, globs, datasets   -> one text (or chat) per document
    tokens.py         texts, chats             -> Documents: token ids, and which are targets
    text_encoder.py   a long text              -> its ids, piece by piece, the same as of the whole
    packing.py        Documents                -> Sequences: (S, L) tokens, boundaries, target mask
    mixtures.py       Sequences of each source -> Sequences of all, in the shares of their weights
    stored/           Sequences                -> a token store on the disk, read by shard
    teacher_side/     with teacher.context: what the teacher reads, beside each of the Sequences

The result depends only on the text and the configuration. The tokens of a corpus name its cache,
also if sources are mixed or streamed.

Shapes: S sequences, L positions of a sequence.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from cache.records import Sequences
from kd.config.data import DataConfig, TextSources
from kd.errors import DataError
from kd.progress import SILENT, Monitor, ProgressMeter
from kd.text.mixtures import Packer, TextReader, get_weight, has_dataset, is_mixture, name_source
from kd.text.packing import Block, Document, join_blocks, pack_in_blocks
from kd.text.reading.notes import TextNotes
from kd.text.sources import find_documents
from kd.text.stored.digest import hash_text
from kd.text.stored.inputs import describe_inputs, name_inputs
from kd.text.stored.packed import PackedText
from kd.text.stored.places import BEGINNING, Cursor, TextPlace
from kd.text.stored.shard_files import Layout
from kd.text.stored.view import StoredSequences, TokenStore
from kd.text.stored.writing import StoreOrder, is_current, write_store
from kd.text.teacher_side.context import TeacherContext
from kd.text.teacher_side.sequences import PairedText
from kd.text.text_files import find_source_files
from kd.text.tokens import DocumentEncoder, choose_pad_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = TypeVar("Text", bound=PackedText)

#: Folder of the data folder that holds the token stores of all jobs.
TEXTS = "texts"
#: Seconds between two reports of how far the reading has come.
REPORT_SECONDS = 1.0
#: Tokens that may be held out in any case: fewer make a perplexity too uncertain.
FEW_TOKENS = 2048
#: Bytes of the unit in which the reading is reported.
KILOBYTE = 1000


@dataclass(frozen=True)
class Corpus:
    """The packed text of a job; a cache stores the training sequences before the held-out ones."""

    train: PackedText
    validation: PackedText

    def compute_sha256(self) -> str:
        """Return the hash of every token, boundary and mask bit, in order."""
        return hash_text((self.train, self.validation))

    def compute_context_sha256(self) -> str:
        """Return the hash of both sides of each sequence; empty if the teacher has no context."""
        parts = (self.train, self.validation)
        wide = [each.wide for each in parts if isinstance(each, PairedText)]
        return hash_text(wide) if wide else ""

    def select(self, numbers: np.ndarray) -> Sequences:
        """Return the sequences of ``numbers``, which ascend; those to train on come first."""
        count = len(self.train)
        parts = (
            self.train.select(numbers[numbers < count]),
            self.validation.select(numbers[numbers >= count] - count),
        )
        kept = [part for part in parts if len(part)]
        return type(kept[0]).concatenate(kept)

    def with_context(self, context: TeacherContext | None, length: int) -> Corpus:
        """Return the corpus of sequences of ``length`` of which stored ones hold the teacher's."""
        if context is None:
            return self
        return Corpus(PairedText(self.train, length), PairedText(self.validation, length))


def open_corpus(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    texts: Path,
    monitor: Monitor = SILENT,
    size: int | None = None,
    context: TeacherContext | None = None,
) -> Corpus:
    """Open the text that ``config`` names; tokenize it into a store below ``texts`` first.

    A text whose store is complete is not read again. Raises ``DataError`` if the text holds a
    token whose id is not below ``size``, V, if its store is damaged, or if the teacher cannot read
    a document in ``context``.
    """

    def load(field: str, wanted: int | None) -> StoredSequences:
        text = _FieldText(field, config, tokenizer, monitor, size, context)
        return StoredSequences.whole(text.store(texts, wanted))

    corpus = _split(config, load, StoredSequences.part)
    return corpus.with_context(context, config.sequence_length)


def load_corpus(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    monitor: Monitor = SILENT,
    size: int | None = None,
    context: TeacherContext | None = None,
) -> Corpus:
    """Read, tokenize and pack a small text into memory; streams only as far as needed.

    The sequences are those of ``open_corpus``, and it raises the same errors.
    """

    def load(field: str, wanted: int | None) -> Sequences:
        return _FieldText(field, config, tokenizer, monitor, size, context).load(wanted)

    corpus = _split(config, load, lambda text, start, stop: text.select(slice(start, stop)))
    return corpus.with_context(context, config.sequence_length)


def _split(
    config: DataConfig,
    load: Callable[[str, int | None], Text],
    part: Callable[[Text, int, int], Text],
) -> Corpus:
    """Load the fields of ``config`` and cut them into training and held-out sequences."""
    if not config.train:  # a model is only measured
        validation = load("validation", config.max_eval_samples)
        return Corpus(part(validation, 0, 0), validation)
    whole = load("train", _count_wanted(config))
    count = len(whole)
    if config.validation:
        held_out = load("validation", config.max_eval_samples)
    else:
        # From the end, so that neighbours in a text are on the same side of the split.
        split = count_held_out(count, config.held_out_fraction)
        if split >= count:
            detail = f"data.train gives {count} sequence(s), too few to hold {split} out."
            remedy = "Add text, lower data.sequence_length, or set data.validation_fraction to 0."
            raise DataError(detail, remedy)
        count -= split
        held_out = part(whole, count, len(whole))
    if config.max_train_samples is not None:
        count = min(count, config.max_train_samples)
    kept = count_kept_held_out(len(held_out), count, config)
    return Corpus(part(whole, 0, count), part(held_out, 0, kept))


def _count_wanted(config: DataConfig) -> int | None:
    """Count the training sequences to read, including those that will be held out; None = all.

    Sequences are held out from the end of the text, so that a text that ends is read to its end.
    """
    kept = config.max_train_samples
    fraction = config.held_out_fraction
    if kept is None or fraction == 0:
        return kept
    if not (config.streaming and has_dataset(config.train)):
        return None
    return next(n for n in itertools.count(kept) if n - count_held_out(n, fraction) >= kept)


@dataclass(frozen=True)
class _FieldText:
    """The text of ``field``, train or validation: one source after the other, or a mixture."""

    field: str
    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    monitor: Monitor
    size: int | None
    context: TeacherContext | None = None
    notes: TextNotes = dataclass_field(default_factory=TextNotes)

    @property
    def sources(self) -> TextSources:
        return self.config.train if self.field == "train" else self.config.validation

    def load(self, wanted: int | None) -> Sequences:
        """Read the first ``wanted`` sequences into memory."""
        reader = self.read()
        sequences = join_blocks(reader.read_all(wanted))
        for notice in self.notes.list_notices():
            self.monitor.note(notice)
        self._warn_if_ended(reader.ended, len(sequences))
        return sequences

    def store(self, texts: Path, wanted: int | None) -> TokenStore:
        """Open the store of the first ``wanted`` sequences; write it first if need be."""

        def describe() -> dict[str, object]:
            text = (self.sources, self.field, self.config)
            inputs = describe_inputs(*text, self.tokenizer, self.size, wanted)
            return inputs if self.context is None else inputs | {"context": asdict(self.context)}

        inputs = describe()
        folder = texts / name_inputs(inputs)
        if not is_current(folder, inputs):
            beside = 0 if self.context is None else self.context.length
            layout = Layout.choose(self.config.sequence_length + beside, self.size)
            bytes_to_read = _count_bytes(self.sources, self.field)
            order = StoreOrder(layout, describe, self.read, wanted, bytes_to_read, self.notes)
            write_store(folder, order, self.monitor)
        store = TokenStore(folder)
        for notice in store.manifest.notices:
            self.monitor.note(notice)
        self._warn_if_ended(store.manifest.ended, len(store))
        return store

    def read(self, cursor: Cursor | None = None) -> TextReader:
        """Open the text at ``cursor``; None is its beginning."""
        if not is_mixture(self.sources, self.config):
            return TextReader([self._pack(self.sources, self.field)], [1.0], cursor)
        texts = [
            self._pack((source,), f"{self.field}.{number}", number)
            for number, source in enumerate(self.sources)
        ]
        weights = list(map(get_weight, self.sources))
        return TextReader(texts, weights, cursor, self.config.sequence_length)

    def _pack(self, sources: TextSources, field: str, number: int = 0) -> Packer:
        """Return what packs ``sources`` from a place on; they are text ``number`` of a mixture."""
        config, monitor, size, context = self.config, self.monitor, self.size, self.context
        notes = self.notes.of_text(number)

        def pack(start: TextPlace) -> Iterator[Block]:
            report = _ReadingReport(field, monitor, _count_bytes(sources, field))
            found = find_documents(sources, field, config, report.note, start, notes, context)
            encoder = DocumentEncoder(self.tokenizer, config, size, monitor, notes, context)
            pad_id = choose_pad_id(self.tokenizer, size)
            resumed = start != BEGINNING
            documents = report.follow(encoder.encode(found))
            teacher_length = None if context is None else context.length
            return pack_in_blocks(documents, config, field, pad_id, resumed, teacher_length)

        return pack

    def _warn_if_ended(self, ended: int | None, count: int) -> None:
        if ended is None:
            return
        source = f"data.{self.field}.{ended} ({name_source(self.sources[ended])})"
        what = f"the mixture ends with it, after {count} sequences of all sources."
        self.monitor.emit("warning", message=f"{source} has no more text: {what}")


def _count_bytes(sources: TextSources, field: str) -> int:
    """Count the bytes of the files of ``field`` in ``sources``; 0 if ``datasets`` reads one."""
    total = 0
    for source in sources:
        found = find_source_files(source, split=field.partition(".")[0])
        if found is None:
            return 0
        total += sum(file.stat().st_size for file in found.files)
    return total


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
                meter = self._meter
                self._monitor.emit("stage", phase=f"reading data.{self._field}: {tokens:,} tokens")
                if meter.total:
                    read = min(self._bytes // KILOBYTE, meter.total)
                    self._monitor.emit("progress", **meter.advance(read - meter.done, new))
                new = 0
                reported_at = time.monotonic()


def count_held_out(count: int, fraction: float) -> int:
    """Count the sequences that are held out of ``count``."""
    return max(1, round(count * fraction)) if fraction > 0 else 0


def count_kept_held_out(held_out: int, trained: int, config: DataConfig) -> int:
    """Count the sequences that are kept of ``held_out`` if ``trained`` are trained on.

    A share of a long text may be much more than the few sequences of it that are trained on.
    """
    if config.max_eval_samples is not None:
        return min(held_out, config.max_eval_samples)
    if config.validation or config.max_train_samples is None:
        return held_out
    return min(held_out, max(trained, math.ceil(FEW_TOKENS / config.sequence_length)))


def describe_held_out(kept: int, trained: int, config: DataConfig) -> str:
    """Say which ``kept`` sequences are held out if ``trained`` are trained on, and why."""
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
