"""Capture a cache: the teacher reads every sequence once, and its records are sealed shard by
shard.

    tokens -> hidden states -> logits of a few positions -> records -> shard on disk

Records are encoded and shards sealed by other threads, while the teacher reads on
(``kd.capture.shards``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from pathlib import Path

import numpy as np

from cache.checking.verify import find_missing
from cache.errors import CacheCorrupt, CacheError
from cache.json_object import Json
from cache.manifest import CacheIdentity, FidelityOverride, FidelityRow, Manifest
from cache.reading.usage import hold_for
from cache.records import Sequences
from cache.shards.shard_runs import ShardRuns
from cache.store import Cache, locate_lock, open_cache
from cache.writing.writer import CacheWriter, open_helper
from cache.writing.writer import open_writer as open_for_capture
from kd.capture.codec_identity import EARLIER_RECORDS
from kd.capture.estimate.storage import estimate_bytes, require_space
from kd.capture.extending import adopt_known_shards
from kd.capture.fidelity.live import LiveTeacher
from kd.capture.fidelity.measure import measure_fidelity
from kd.capture.fidelity.verdict import judge_fidelity
from kd.capture.opening import open_reader
from kd.capture.plan import CapturePlan, make_provenance
from kd.capture.shards import (
    CaptureReport,
    Patience,
    RecordReader,
    predict_slow_disk,
    record_ranges,
    record_shards,
)
from kd.capture.teacher import Teacher
from kd.capture.usefulness import HeldOutWatch
from kd.errors import OtherCapture
from kd.models.folder import ModelFolder
from kd.models.layers import stopping_forward
from kd.models.precision import float32_products
from kd.models.tokenizers import make_token_map
from kd.progress import Monitor, ShardRanges, SharedCapture

#: What a capture waits for while another one holds its lock; events show it.
OTHER_CAPTURE = "another job's capture of the same cache"
#: What is stopped in the fidelity check.
FIDELITY_STOP = "in the fidelity check; every shard is sealed"


def capture_cache(plan: CapturePlan, root: Path, monitor: Monitor) -> Json:
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

    require_written_form(plan, folder)
    on_wait = partial(monitor.wait_for, OTHER_CAPTURE, locate_lock(folder), "precompute")
    shared = monitor.ranges is not None
    with float32_products(), open_for_capture(root, plan.identity, on_wait, shared) as writer:
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
        writer.finish(make_provenance(plan), *verdict, teacher.tested if teacher else None)
    sealed = open_cache(folder, plan.identity)
    hold_for(sealed, folder)
    warn_of_overruled(sealed, monitor)
    return summarise_cache(sealed, reused=False)


def require_written_form(plan: CapturePlan, folder: Path) -> None:
    """Raise ``CacheCorrupt`` if the cache has records that this version does not write."""
    if plan.options.rules.dithered and not plan.identity.codec.clusters:
        raise CacheCorrupt(
            f"the cache {folder} is damaged, and the run goes on with it alone. {EARLIER_RECORDS}",
            "Restore the cache from a copy, or start over in another run folder (--run-dir).",
        )


def estimate_whole(plan: CapturePlan) -> tuple[int, int]:
    """Return the positions of the cache of ``plan``, and about how many bytes it will have."""
    positions = plan.corpus.train.positions + plan.corpus.validation.positions
    width = ModelFolder(plan.teacher.folder).hidden_width or 0
    return positions, estimate_bytes(plan.identity, positions, width)


def find_sealed_cache(
    folder: Path, identity: CacheIdentity, check_stop: Callable[[], None] | None = None
) -> Cache | None:
    """Return the cache in ``folder`` if it is sealed and undamaged.

    None means that it must be captured, or that its damaged shards must be captured again.
    ``check_stop`` is called before each shard is read, and may raise to give up.
    """
    try:
        found = open_cache(folder, identity)
    except CacheError:
        return None
    hold_for(found, folder)  # no removal begins while every byte is read
    return None if find_missing(found, check_stop) else found


def check_fidelity(
    store: Cache, plan: CapturePlan, teacher: RecordReader | None, monitor: Monitor
) -> tuple[tuple[FidelityRow, ...], FidelityOverride | None]:
    """Compare a few records with the teacher, before the manifest seals the cache.

    Returns the rows, and the verdict if the job overruled it. There are no rows for a remote
    teacher, whose distributions are not available. Raises ``FidelityError`` if records differ
    and the job does not accept that: then the shards stay, but the cache is not sealed.
    """
    if not plan.teacher.section.is_local:
        return (), None
    monitor.emit("stage", stage="precompute", phase="checking fidelity")
    # The model is loaded already, unless all shards were sealed by an earlier attempt.
    if isinstance(teacher, Teacher):
        live = LiveTeacher(teacher.model, teacher.recorder.lm_head, plan.corpus)
    else:
        live = replace(LiveTeacher.load(plan.identity, plan.teacher), corpus=plan.corpus)
    began = time.monotonic()
    with stopping_forward(monitor, FIDELITY_STOP):
        found = measure_fidelity(store, live, check_stop=lambda: monitor.check(FIDELITY_STOP))
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
    knots = None if ranges.shared is None else ranges.shared.knots
    with open_reader(plan, writer, monitor, knots) as teacher:
        if ranges.shared is None:
            chosen = teacher.recorder.knots if isinstance(teacher, Teacher) else None
            shared = SharedCapture(plan.identity.fingerprint, chosen)
            ranges.open(shared, plan.identity.shard_count, Patience(monitor).check)
        report = CaptureReport(monitor, plan.identity, HeldOutWatch(plan))
        monitor.emit("stage", stage="precompute", phase="capturing with other workers")
        record_ranges(teacher, writer, partial(select_shard_sequences, plan), ranges, report)
        return teacher


def help_capture(plan: CapturePlan, root: Path, shared: SharedCapture, monitor: Monitor) -> None:
    """Capture shards of the cache of ``plan`` beside the process that leads, until none is left.

    Raises ``OtherCapture`` if this host makes another cache of the job than that process does.
    """
    assert monitor.ranges is not None
    if plan.identity.fingerprint != shared.fingerprint:
        raise OtherCapture(
            f"Here the job makes cache {plan.identity.fingerprint}, and the worker that leads the "
            f"capture makes {shared.fingerprint}.",
            "Give all workers the same text, the same teacher files and the same kind of device.",
        )
    with float32_products(), open_helper(root, plan.identity) as writer:
        capture_ranges(writer, plan, monitor, monitor.ranges)


def select_shard_sequences(plan: CapturePlan, index: int) -> Sequences:
    """Return the sequences of a shard.

    Training sequences come before validation sequences, so one shard may hold both.
    """
    return plan.corpus.select(np.asarray(plan.identity.shard_range(index)))


def summarise_cache(store: Cache, reused: bool) -> Json:
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
