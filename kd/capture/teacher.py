"""Capture a cache: the teacher reads every sequence once, and its records are sealed shard by
shard.

    tokens -> hidden states -> logits of a few positions -> records -> shard on disk

Records are encoded and shards sealed by other threads, while the teacher reads on
(``kd.capture.shards``).

Shapes: B sequences of a micro-batch, L positions of a sequence, N positions of one sequence with a
target, D hidden width.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import filterfalse, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache.checking.verify import find_missing
from cache.errors import CacheError
from cache.manifest import CacheIdentity, FidelityOverride, FidelityRow, Manifest
from cache.reading.usage import hold_for
from cache.records import Records, Sequences, TailSums
from cache.shards.runs import ShardRuns
from cache.store import Cache, locate_lock, open_cache
from cache.writing.writer import CacheWriter, open_helper
from cache.writing.writer import open_writer as open_for_capture
from kd.capture.estimate.storage import estimate_bytes, require_space
from kd.capture.fidelity.live import LiveTeacher
from kd.capture.fidelity.measure import measure_fidelity
from kd.capture.fidelity.verdict import judge_fidelity
from kd.capture.growth.extending import adopt_known_shards
from kd.capture.knots import KnotChoice, choose_knots
from kd.capture.plan import CapturePlan, make_provenance
from kd.capture.recording import Recorder, SequenceStates, TailMeter, TeacherReading
from kd.capture.remote import RemoteTeacher
from kd.capture.shards import (
    CaptureReport,
    Patience,
    RecordReader,
    predict_slow_disk,
    record_ranges,
    record_shards,
)
from kd.capture.usefulness import HeldOutWatch
from kd.errors import OtherCapture, OutOfMemory, is_out_of_memory
from kd.models.attention.causality import require_causal
from kd.models.attention.isolation import isolate_documents, warn_of_mask
from kd.models.folder import ModelFolder
from kd.models.layers import compute_hidden_states, find_device, require_context, stopping_forward
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_teacher
from kd.models.precision import float32_products, pick_device
from kd.models.quantization.rounding import describe_plain_layers
from kd.models.tokenizers import PROBE_TEXTS, encode_probes, make_token_map
from kd.models.tokenizing.rules import sample_texts
from kd.progress import SILENT, Monitor, RangeTerms, ShardRanges
from kd.text.batches import make_batch
from kd.text.steps.reading import group_by_width
from kd.text.stored.packed import PackedText, iterate

#: What a capture waits for while another one holds its lock; events show it.
OTHER_CAPTURE = "another job's capture of the same cache"
#: What is stopped in the fidelity check.
FIDELITY_STOP = "in the fidelity check; every shard is sealed"
#: Texts of the job that a server is asked to tokenize, and the characters of one.
ASKED_TEXTS, ASKED_CHARACTERS = 16, 1024


def capture_cache(plan: CapturePlan, root: Path, monitor: Monitor) -> dict[str, Any]:
    """Seal the cache of ``plan`` below ``root``, unless it is sealed already; returns its summary.

    Sealed shards of an earlier attempt are kept, and those of a cache that the job extends are
    taken. Two captures of one cache run one after the other,
    and the second reuses the cache.
    """
    folder = root / plan.identity.fingerprint
    reading = partial(monitor.check, "while the cache was read")
    if (found := find_sealed_cache(folder, plan.identity, reading)) is not None:
        warn_of_overruled(found, monitor)
        return summarise_cache(found, reused=True)

    lock = locate_lock(folder)
    waiting = partial(monitor.wait_for, OTHER_CAPTURE, lock, "precompute")
    shared = monitor.ranges is not None
    with float32_products(), open_for_capture(root, plan.identity, waiting, shared) as writer:
        # Another capture may have sealed the cache while this one waited for the lock.
        if (found := find_sealed_cache(folder, plan.identity, reading)) is not None:
            warn_of_overruled(found, monitor)
            return summarise_cache(found, reused=True)
        adopt_known_shards(plan, root, writer, monitor)
        if writer.mirror is None:  # else shards leave this disk once the bucket has them
            require_space(folder, plan.identity, *estimate_whole(plan))
        teacher = capture_shards(writer, plan, monitor)
        size = plan.identity.tokenizer.vocabulary_size
        writer.write_token_map(make_token_map(plan.tokenizer, size).to_arrays())
        verdict = check_fidelity(writer.open_sealed(), plan, teacher, monitor)
        writer.finish(make_provenance(plan), *verdict)
    sealed = open_cache(folder, plan.identity)
    hold_for(sealed, folder)
    warn_of_overruled(sealed, monitor)
    return summarise_cache(sealed, reused=False)


def estimate_whole(plan: CapturePlan) -> tuple[int, int]:
    """Return the positions of the cache of ``plan``, and about how many bytes it will have."""
    positions = plan.corpus.train.positions + plan.corpus.validation.positions
    width = ModelFolder(plan.teacher.folder).hidden_width or 0
    return positions, estimate_bytes(plan.identity, positions, width)


def find_sealed_cache(
    folder: Path, identity: CacheIdentity, waiting: Callable[[], None] | None = None
) -> Cache | None:
    """Return the cache in ``folder`` if it is sealed and undamaged.

    None means that it must be captured, or that its damaged shards must be captured again.
    ``waiting`` is called before each shard is read, and may raise to give up.
    """
    try:
        found = open_cache(folder, identity)
    except CacheError:
        return None
    hold_for(found, folder)  # no removal begins while every byte is read
    return None if find_missing(found, waiting) else found


def check_fidelity(
    store: Cache, plan: CapturePlan, teacher: RecordReader | None, monitor: Monitor
) -> tuple[tuple[FidelityRow, ...], FidelityOverride | None]:
    """Compare a few records with the teacher, before the manifest seals the cache.

    Returns the rows, and the verdict if the job overruled it. There are no rows for a remote
    teacher, whose distributions are not available. Raises ``FidelityError`` where records differ
    and the job does not accept that: then the shards stay, but the cache is not sealed.
    """
    if not plan.teacher.section.is_local:
        return (), None
    monitor.emit("stage", stage="precompute", phase="checking fidelity")
    # The model is loaded already, unless all shards were sealed by an earlier attempt.
    if isinstance(teacher, Teacher):
        live = LiveTeacher(teacher.model, teacher.recorder.lm_head)
    else:
        live = LiveTeacher.load(plan.identity, plan.teacher)
    began = time.monotonic()
    with stopping_forward(monitor, FIDELITY_STOP):
        found = measure_fidelity(store, live, waiting=lambda: monitor.check(FIDELITY_STOP))
    overruled = judge_fidelity(store, found, plan.options)
    monitor.emit(
        "stage",
        stage="precompute",
        phase=f"fidelity checked in {time.monotonic() - began:.1f} s, the teacher's own noise is "
        f"{found.noise:.2g} nats",
    )
    return found.rows, overruled


def warn_of_overruled(store: Cache, monitor: Monitor) -> None:
    """Warn once if the cache was sealed although its records differ from the teacher."""
    if (overruled := store.manifest.overruled) is not None:
        monitor.warn_once(f"{store.folder}: {overruled.describe()}")


def capture_shards(writer: CacheWriter, plan: CapturePlan, monitor: Monitor) -> RecordReader | None:
    """Capture every shard that is not sealed yet.

    Shards with held-out text come first, so that a teacher that does not know the text is noticed
    early. Returns the reader, so that its model need not be loaded again; None where no shard was
    missing.
    """
    if monitor.ranges is not None and not writer.has_every_seal():
        return capture_ranges(writer, plan, monitor, monitor.ranges)
    watch = HeldOutWatch(plan)
    found = writer.find_missing_shards()
    missing = ShardRuns.of(filter(watch.holds_out, found))
    missing += ShardRuns.of(filterfalse(watch.holds_out, found))
    if not missing:
        return None
    monitor.emit("stage", stage="precompute", phase="loading the teacher")
    with open_reader(plan, writer, monitor) as teacher:
        report = CaptureReport(monitor, plan.identity, watch)
        left = sum(len(plan.identity.shard_range(index)) for index in missing)
        report.expect(missing, plan.identity.data.sequences - left, missing.last)
        first = select_shard_sequences(plan, missing.first)
        report.report_slow_disk(predict_slow_disk(writer, teacher, first, estimate_whole(plan)))
        monitor.emit("stage", stage="precompute", phase="capturing")
        work = ((index, select_shard_sequences(plan, index)) for index in missing)
        record_shards(teacher, writer, work, report)
        return teacher


def capture_ranges(
    writer: CacheWriter, plan: CapturePlan, monitor: Monitor, ranges: ShardRanges
) -> RecordReader:
    """Capture the shards that ``ranges`` hands to this process, one of several.

    The process that leads opens the ranges as soon as its teacher is ready.
    """
    monitor.emit("stage", stage="precompute", phase="loading the teacher")
    knots = None if ranges.terms is None else ranges.terms.knots
    with open_reader(plan, writer, monitor, knots) as teacher:
        if ranges.terms is None:
            chosen = teacher.recorder.knots if isinstance(teacher, Teacher) else None
            terms = RangeTerms(plan.identity.fingerprint, chosen)
            ranges.open(terms, plan.identity.shard_count, Patience(monitor).check)
        report = CaptureReport(monitor, plan.identity, HeldOutWatch(plan))
        monitor.emit("stage", stage="precompute", phase="capturing with other workers")
        record_ranges(teacher, writer, partial(select_shard_sequences, plan), ranges, report)
        return teacher


def help_capture(plan: CapturePlan, root: Path, terms: RangeTerms, monitor: Monitor) -> None:
    """Capture shards of the cache of ``plan`` beside the process that leads, until none is left.

    Raises ``OtherCapture`` where this host makes another cache of the job than that process does.
    """
    assert monitor.ranges is not None
    if plan.identity.fingerprint != terms.fingerprint:
        raise OtherCapture(
            f"Here the job makes cache {plan.identity.fingerprint}, and the worker that leads the "
            f"capture makes {terms.fingerprint}.",
            "Give all workers the same text, the same teacher files and the same kind of device.",
        )
    with float32_products(), open_helper(root, plan.identity) as writer:
        capture_ranges(writer, plan, monitor, monitor.ranges)


@contextmanager
def open_reader(
    plan: CapturePlan, writer: CacheWriter, monitor: Monitor, knots: int | None = None
) -> Iterator[RecordReader]:
    """Open the teacher of ``plan``: load its model, or connect to its server.

    ``knots`` is the number of knots that another worker has chosen.
    """
    section = plan.teacher.section
    if section.is_local:
        teacher = Teacher.load(plan)
        if plan.identity.data.packing:
            warn_of_mask(teacher.model, plan.data.sequence_length, monitor)
        warn_of_plain_layers(teacher.model, plan.identity.teacher.quantization, monitor)
        yield fit_recorder(teacher, plan, writer, monitor, knots)
        return
    with RemoteTeacher.connect(section, plan.identity.record_codec(), monitor) as remote:
        length = plan.data.sequence_length
        texts = islice(sample_texts(plan.data), ASKED_TEXTS)
        some = (text[:ASKED_CHARACTERS] for text in texts)
        remote.require_same_tokenizer(encode_probes(plan.tokenizer, (*PROBE_TEXTS, *some)), length)
        yield remote


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
    profile tempered needs a number of ``knots``, which is chosen here where it is None.
    """
    rules = writer.codec.rules
    meter = TailMeter(len(plan.corpus.train)) if rules.sums_tails else None
    recorder = Recorder(teacher.recorder.lm_head, writer.codec, meter=meter)
    teacher = replace(teacher, recorder=recorder, monitor=monitor)
    if rules.needs_lm_head:
        # Only this profile has something to write before the first micro-batch is read.
        teacher.require_memory(plan.corpus.train)
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

    @classmethod
    def load(cls, plan: CapturePlan) -> Teacher:
        """Load the model of ``plan``, and check its context, its LM head and its attention."""
        model = load_teacher(plan.teacher, pick_device())
        require_context(model, plan.data.sequence_length)
        require_causal(model, plan.data.sequence_length)
        lm_head = find_lm_head(model, plan.identity.tokenizer.vocabulary_size)
        if plan.identity.data.packing:
            isolate_documents(model)
        recorder = Recorder(lm_head, plan.identity.record_codec())
        cuts_padding = not plan.identity.data.packing
        batch_size = plan.teacher.section.batch_size
        return cls(model, recorder, batch_size, cuts_padding=cuts_padding)

    def read(self, sequences: Sequences, first: int) -> Iterator[tuple[int, Records]]:
        """Yield (sequences read, their records) per micro-batch, as ``deliver`` does."""
        for delivery in self.deliver(sequences, first):
            yield delivery.sequences, delivery.encode()

    def take_tail_sums(self) -> TailSums | None:
        """Return the sums of the tails since the last call; None for most profiles."""
        return self.recorder.take_tail_sums()

    @torch.no_grad()
    def deliver(self, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        """Yield what is delivered of each micro-batch.

        ``first`` is the number of the first sequence. Raises ``OutOfMemory`` where not even one
        sequence fits.
        """
        start = 0
        while start < len(sequences):
            part = sequences.select(slice(start, start + self.batch_size))
            found = self._try_to_deliver(part, first + start)
            if isinstance(found, TeacherReading):
                yield found
                start += len(part)
            else:
                self._halve(part, found)

    def _try_to_deliver(self, part: Sequences, first: int) -> TeacherReading | Exception:
        """Return the delivery of a micro-batch, or the error if memory ran out.

        The error has no traceback, which would keep the tensors that filled the memory.
        """
        try:
            return self.recorder.read(
                [
                    SequenceStates(number, *states)
                    for number, states in enumerate(self.read_rows(part), first)
                ]
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return error.with_traceback(None)

    def _halve(self, part: Sequences, error: Exception) -> None:
        """Read half as many sequences at once from now on; raise where it was only one."""
        if len(part) == 1:
            raise make_out_of_memory(part.length, error) from error
        gc.collect()
        self.batch_size = len(part) // 2
        self.monitor.emit(
            "warning",
            message=(
                f"Memory ran out while the teacher read {len(part)} sequences at once: from now on "
                f"it reads {self.batch_size}. The random numbers of the records do not depend on "
                f"this. Set teacher.batch_size to {self.batch_size} to avoid the failed attempt."
            ),
        )

    def require_memory(self, sequences: PackedText) -> None:
        """Read the first sequence, and raise ``OutOfMemory`` where the memory is not enough."""
        for delivery in self.deliver(sequences.select(slice(0, 1)), 0):
            delivery.encode()

    @torch.no_grad()
    def choose_knots(self, sequences: PackedText) -> KnotChoice:
        """Choose the number of knots, by measuring the first training sequence that has targets.

        Raises ``OutOfMemory`` where the memory is not enough for it.
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

        They come of one forward pass, or with ``cuts_padding`` of one for each width.
        """
        if not self.cuts_padding:
            yield from self._read_at_once(sequences)
            return
        # Not the width of the longest row of a batch: records do not depend on other documents.
        found: dict[int, tuple[Tensor, Tensor, np.ndarray]] = {}
        for places, part in group_by_width(sequences):
            found.update(zip(places.tolist(), self._read_at_once(part), strict=True))
        yield from (found[place] for place in range(len(sequences)))

    def _read_at_once(self, sequences: Sequences) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        batch = make_batch(sequences, None)
        counts = batch.count_targets()
        device = find_device(self.model)
        batch = batch.pin().to(device) if device.type == "cuda" else batch
        hidden_BLD = compute_hidden_states(self.model, batch.tokens_BL, batch.packed)
        if device.type == "cpu":
            return_freed_memory()
        hidden_ND = hidden_BLD.flatten(0, 1)[batch.rows_N]
        stops = np.cumsum(counts)
        for mask_L, start, stop in zip(
            sequences.target_mask, (stops - counts).tolist(), stops.tolist(), strict=True
        ):
            yield hidden_ND[start:stop], batch.gold_N[start:stop], np.flatnonzero(mask_L)


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


def select_shard_sequences(plan: CapturePlan, index: int) -> Sequences:
    """Return the sequences of a shard.

    Training sequences come before validation sequences, so one shard may hold both.
    """
    numbers = np.asarray(plan.identity.shard_range(index))
    train = plan.corpus.train
    parts = [train.select(numbers[numbers < len(train)])]
    parts += [plan.corpus.validation.select(numbers[numbers >= len(train)] - len(train))]
    return Sequences.concatenate(part for part in parts if len(part))


def summarise_cache(store: Cache, reused: bool) -> dict[str, Any]:
    """Return the summary of a cache that events and reports show."""
    manifest: Manifest = store.manifest
    codec = store.codec
    # The next token, and those that are always kept, are entries beside head and tail.
    known = 1 + len(codec.always_keep) if codec.rules.sampled else 0
    overruled = manifest.overruled
    quantization = manifest.teacher.identity.quantization
    return {
        "fingerprint": manifest.identity.fingerprint,
        "bytes_per_token": round(store.bytes_per_token, 3),
        "entries_per_token": round(known + manifest.entries / max(manifest.positions, 1), 3),
        "tokens": manifest.positions,
        "reused": reused,
        **({"teacher_quantization": quantization} if quantization else {}),
        **({} if overruled is None else {"overruled": overruled.to_json()}),
    }
