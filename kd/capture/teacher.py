"""The teacher of a capture on this machine: a model that reads sequences.

Shapes: B sequences of a micro-batch, L positions of a sequence, N positions of one sequence with a
target, D hidden width.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache.records import Sequences, TailSums
from cache.units.dither import DitherTables
from cache.writing.writer import CacheWriter
from kd.capture.knots import KnotChoice, choose_knots
from kd.capture.plan import CapturePlan
from kd.capture.recording import Recorder, SequenceStates, TailMeter, TeacherReading
from kd.capture.units.fitting import fit_tables
from kd.errors import OutOfMemory, is_out_of_memory
from kd.models.attention.causality import require_causal
from kd.models.attention.isolation import isolate_documents
from kd.models.layers import compute_hidden_states, find_device, require_context
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_teacher
from kd.models.precision import pick_device
from kd.models.quantization.rounding import describe_plain_layers
from kd.progress import SILENT, Monitor
from kd.text.batches import make_batch
from kd.text.steps.reading import group_by_width
from kd.text.stored.packed import PackedText, iterate
from kd.text.teacher_side.sequences import find_teacher_side

Read = TypeVar("Read")


def warn_of_plain_layers(model: PreTrainedModel, quantization: str, monitor: Monitor) -> None:
    """Warn if a quantisation leaves layers of the teacher as they are."""
    if (plain := describe_plain_layers(model, quantization)) is not None:
        monitor.warn_once(plain)


def fit_recorder(
    teacher: Teacher,
    plan: CapturePlan,
    writer: CacheWriter,
    monitor: Monitor,
    knots: int | None = None,
) -> Teacher:
    """Return ``teacher`` with a recorder for the cache of ``plan``, and prepare that cache.

    Several caches can be captured with one loaded teacher. Profile hidden stores the LM head;
    profile tempered needs a number of ``knots``, which is chosen if it is None.
    """
    rules = writer.codec.rules
    teacher = replace(teacher, monitor=monitor)
    meter = TailMeter(len(plan.corpus.train)) if rules.sums_tails else None
    tables = prepare_tables(teacher, plan, writer, monitor) if rules.dithered else None
    recorder = Recorder(teacher.recorder.lm_head, writer.codec, meter=meter, tables=tables)
    teacher = replace(teacher, recorder=recorder)
    if rules.needs_lm_head:
        # Only this profile has something to write before the first micro-batch is read.
        # A teacher without memory for one sequence shows here.
        for delivery in teacher.deliver(plan.corpus.train.select(slice(0, 1)), 0):
            delivery.encode()
        writer.write_lm_head(teacher.recorder.make_lm_head_arrays())
    if not rules.keeps_partition:
        return teacher
    # All shards of a cache have the same number of knots: shards of an earlier attempt set it.
    if knots is None and (sealed := writer.read_sealed_shape("partition")) is not None:
        knots = sealed[1]
    if knots is None:
        found = teacher.choose_knots(plan.corpus.train)
        monitor.emit("stage", stage="precompute", phase=str(found))
        knots = found.count
    return replace(teacher, recorder=replace(recorder, knots=knots))


def prepare_tables(
    teacher: Teacher, plan: CapturePlan, writer: CacheWriter, monitor: Monitor
) -> DitherTables:
    """Return the sealed tables of the cache's dither; fit and seal them if there are none."""
    if (sealed := writer.read_tables()) is not None:
        return sealed
    codec = plan.identity.codec
    tables = "one table (the text is short)" if codec.clusters == 1 else f"{codec.clusters} tables"
    phase = f"fitting {tables} of tails to {codec.fitted:,} sequences"
    monitor.emit("stage", stage="precompute", phase=phase)
    first = plan.corpus.train.select(slice(0, codec.fitted))
    with torch.no_grad():
        states = teacher.read_states(first)
        fitted = fit_tables(states, teacher.recorder.lm_head, writer.codec, codec.clusters)
    return writer.write_tables(fitted)


@dataclass
class Teacher:
    """A loaded teacher, and the recorder of its outputs.

    ``batch_size`` sequences are read in one forward pass; it is halved where memory runs out.
    ``cuts_padding``: rows are one document each, and are read without most of their padding.
    """

    model: PreTrainedModel
    recorder: Recorder
    batch_size: int
    monitor: Monitor = SILENT
    cuts_padding: bool = False
    #: No server is tested.
    tested: ClassVar[None] = None

    @classmethod
    def load(cls, plan: CapturePlan, monitor: Monitor = SILENT) -> Teacher:
        """Load the model of ``plan``, and check its context, its LM head and its attention."""
        model = load_teacher(plan.teacher, pick_device())
        require_context(model, plan.read_length)
        require_causal(model, plan.read_length)
        lm_head = find_lm_head(model, plan.identity.tokenizer.vocabulary_size)
        if plan.identity.data.packing:
            isolate_documents(model, monitor=monitor)
        recorder = Recorder(lm_head, plan.identity.record_codec())
        cuts_padding = not plan.identity.data.packing
        # As for a student whose rows have many widths (``kd.training.preparing.setting``).
        torch.backends.cuda.enable_cudnn_sdp(not cuts_padding)
        return cls(model, recorder, plan.teacher.section.batch_size, cuts_padding=cuts_padding)

    def take_tail_sums(self) -> TailSums | None:
        """Return the sums of the tails since the last call; None for most profiles."""
        return self.recorder.take_tail_sums()

    @torch.no_grad()
    def deliver(self, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        """Yield what is delivered of each micro-batch.

        ``first`` is the number of the first sequence. Raises ``OutOfMemory`` if not even one
        sequence fits.
        """

        def read(part: Sequences, start: int) -> TeacherReading:
            rows = enumerate(self.read_rows(part), first + start)
            return self.recorder.read([SequenceStates(number, *states) for number, states in rows])

        yield from self._read_parts(sequences, read)

    def _read_parts(
        self, sequences: Sequences, read: Callable[[Sequences, int], Read]
    ) -> Iterator[Read]:
        """Yield what ``read`` makes of each micro-batch and of the number of sequences before it.

        A micro-batch for which memory runs out is read again in smaller ones.
        """
        start = 0
        while start < len(sequences):
            part = sequences.select(slice(start, start + self.batch_size))
            try:
                found = read(part, start)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # A traceback would keep the tensors that filled the memory.
                self._halve(part, error.with_traceback(None))
            else:
                yield found
                start += len(part)

    def _halve(self, part: Sequences, error: Exception) -> None:
        """Read half as many sequences at once from now on; raise where it was only one."""
        if len(part) == 1:
            raise make_out_of_memory(find_teacher_side(part).length, error) from error
        gc.collect()
        self.batch_size = len(part) // 2
        self.monitor.emit(
            "warning",
            message=f"Memory ran out while the teacher read {len(part)} sequences at once: from "
            f"now on it reads {self.batch_size}. The random numbers of the records do not depend "
            f"on this. Set teacher.batch_size to {self.batch_size} to avoid the failed attempt.",
        )

    def read_states(self, sequences: Sequences) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield hidden states (N, D) and next tokens (N,) of sequences.

        Raises ``OutOfMemory`` if the memory is not enough for one sequence.
        """
        for rows in self._read_parts(sequences, lambda part, _: list(self.read_rows(part))):
            yield from (row[:2] for row in rows)

    @torch.no_grad()
    def choose_knots(self, sequences: PackedText) -> KnotChoice:
        """Choose the number of knots, by measuring the first training sequence that has targets.

        Raises ``OutOfMemory`` if the memory is not enough for it.
        """
        try:
            hidden_ND, gold_N, _ = next(self.read_rows(find_first_trained(sequences)))
            return choose_knots(hidden_ND, gold_N, self.recorder.lm_head, self.recorder.codec)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise make_out_of_memory(sequences.length, error) from error

    def read_rows(self, sequences: Sequences) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        """Yield each sequence's hidden states (N, D), next tokens (N,) and positions (N,).

        They come of one forward pass, or with ``cuts_padding`` of one for each width. With a
        context the states are those of the teacher's own sequences, at the same targets.
        """
        theirs = find_teacher_side(sequences)
        positions = map(np.flatnonzero, sequences.target_mask)
        if not self.cuts_padding:
            yield from (
                (*states, own)
                for states, own in zip(self._read_at_once(theirs), positions, strict=True)
            )
            return
        # Not the width of the longest row of a batch: records do not depend on other documents.
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for places, part in group_by_width(theirs):
            found.update(zip(places.tolist(), self._read_at_once(part), strict=True))
        yield from ((*found[place], own) for place, own in enumerate(positions))

    def _read_at_once(self, sequences: Sequences) -> Iterator[tuple[Tensor, Tensor]]:
        batch = make_batch(sequences, None)
        counts = batch.count_targets().tolist()
        device = find_device(self.model)
        batch = batch.pin().to(device) if device.type == "cuda" else batch
        hidden_BLD = compute_hidden_states(self.model, batch.tokens_BL, batch.packed)
        if device.type == "cpu":
            return_freed_memory()
        hidden_ND = hidden_BLD.flatten(0, 1)[batch.rows_N]
        yield from zip(hidden_ND.split(counts), batch.gold_N.split(counts), strict=True)


def return_freed_memory() -> None:
    """Return the freed memory of the heap to the system, where the C library can do that.

    glibc keeps what a forward pass frees in pieces that are too small for the logits, so the
    process would grow by both.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def make_out_of_memory(length: int, error: Exception) -> OutOfMemory:
    """Make the error of a teacher that has no memory for one sequence of ``length`` tokens."""
    reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return OutOfMemory(
        f"Memory ran out while the teacher read one sequence of {length} tokens: {reason}.",
        "Any of these needs less: a smaller data.sequence_length, teacher.dtype bfloat16 or "
        "float16, or a smaller teacher. Or ask for more memory with resources.memory. Sealed "
        "shards are kept.",
    )


def find_first_trained(text: PackedText) -> Sequences:
    """Return the first sequence of ``text`` that has a target; the very first where none has."""
    for sequences in iterate(text):
        # argmax of booleans is the first that is true.
        first = int(np.argmax(sequences.target_mask.any(axis=1)))
        if sequences.target_mask[first].any():
            return sequences.select(slice(first, first + 1))
    return text.select(slice(0, 1))
