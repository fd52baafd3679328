"""Seal the shards of a capture, while the teacher reads on.

    teacher, this thread -> what it delivers -> encoders -> records -> sealer -> shard on disk

Reading waits where ``IN_FLIGHT_BYTES`` of deliveries wait to be encoded, and where as much was read
beside a shard that is being sealed. One shard at a time is sealed. A capture that is killed loses
the shard that it reads; while a shard is sealed, it loses that one and what was read beside it,
two shards at most. The ids of a shard are coded by how frequent each token is in all of it
(``cache.layout``), so that nothing can be sealed before its last sequence is read.

The same records make the same bytes: what threads do depends only on their input.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse, islice
from typing import Protocol, Self

from cache.disk import measure_disk
from cache.manifest import CacheIdentity, ServedTest
from cache.records import Records, Sequences, TailSums
from cache.shards.shard_runs import ShardRuns
from cache.writing.writer import CacheWriter
from kd.capture.recording import Recorder, TeacherReading
from kd.capture.usefulness import HeldOutWatch
from kd.progress import Monitor, ProgressMeter, ShardRanges

#: Bytes of deliveries that wait to be encoded, and bytes that are read beside a shard that is being
#: sealed, each at the most. A million tokens of profile threshold, some ten seconds of the fastest
#: GPU, and far less than sealing takes for itself.
IN_FLIGHT_BYTES = 1 << 28
#: Seconds below which a disk is not called slow: what little it holds is hardly worth a warning.
LEAST_DISK_SECONDS = 1.0
#: Tokens a second of a fast teacher. A disk that takes as many is not compared with the teacher.
FAST_TOKENS = 100_000
#: Waits of a worker that gets no range of shards now, in seconds.
LEAST_WAIT_SECONDS = 0.25
MOST_WAIT_SECONDS = 4.0
#: Threads that encode. More gain little: numpy holds the interpreter's lock for part of its work.
ENCODERS = 2


class RecordReader(Protocol):
    """A teacher that makes records of sequences: a local model, or a server."""

    @property
    def tested(self) -> ServedTest | None:
        """The result of the test of a server."""

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of hidden states; None if the server's log-probabilities are recorded."""

    def deliver(self, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        """Yield what is delivered of each micro-batch; ``first`` is the first sequence's number."""

    def take_tail_sums(self) -> TailSums | None:
        """Return the sums of the tails since the last call; None if they are not known."""


@dataclass(frozen=True)
class SealedShard:
    """A shard that lies on the disk: its index, its bytes, and how long it took.

    ``seconds`` are those of writing it, of which the disk took ``disk_seconds``; ``read_seconds``
    are those of the teacher.
    """

    index: int
    bytes: int
    seconds: float
    disk_seconds: float
    read_seconds: float

    def describe_slow_disk(self) -> str | None:
        """Describe a disk that takes less than the teacher gives; None if it takes enough."""
        if self.disk_seconds <= max(self.read_seconds, LEAST_DISK_SECONDS):
            return None
        rates = (self.bytes / max(each, 1e-9) for each in (self.disk_seconds, self.read_seconds))
        return _describe_slow_disk(*rates)


def predict_slow_disk(
    writer: CacheWriter, reader: RecordReader, sequences: Sequences, whole: tuple[int, int]
) -> str | None:
    """Describe a disk that will take less than the teacher gives; None if it takes enough.

    ``whole`` are the positions and the bytes of the cache. The disk is probed for some
    milliseconds. The teacher reads micro-batches of ``sequences``, which are not kept, only where
    the disk would not do for a fast one.
    """
    positions, size = whole
    taken = measure_disk(writer.folder)
    each = size / max(positions, 1)
    if taken > each * FAST_TOKENS or size < taken * LEAST_DISK_SECONDS:
        return None
    # The rate of the second micro-batch, or of the only one: the first one warms the teacher up.
    rate = 0.0
    began = time.monotonic()
    for delivery in islice(reader.deliver(sequences, 0), 2):
        delivery.encode()  # waits for what a GPU still computes
        rate = delivery.positions / max(time.monotonic() - began, 1e-9)
        began = time.monotonic()
    reader.take_tail_sums()  # these are read again
    given = each * rate
    return _describe_slow_disk(taken, given) if taken < given else None


def _describe_slow_disk(taken: float, given: float) -> str:
    """Say that a disk takes fewer bytes a second than the teacher gives."""
    return (
        f"The disk of the cache is slow: it takes {taken / 1e6:.3g} MB/s, and the teacher gives "
        f"{given / 1e6:.3g} MB/s, so that the capture waits for the disk. Move KD_HOME to a local "
        "disk and copy the cache when it is complete, or store fewer bytes for a token: set "
        "cache.threshold higher, or choose another cache.profile."
    )


class ShardPipeline(AbstractContextManager["ShardPipeline"]):
    """Encodes deliveries and seals shards in threads of its own.

    As a context manager it leaves no thread behind. A shard that was whole at an error or at a
    stop is sealed first, and nothing of another one is written. ``sealed`` is called with each
    shard in the sealing thread; ``check_stop`` before a wait that may be long.
    """

    def __init__(
        self,
        writer: CacheWriter,
        sealed: Callable[[int, Sequences, Records], None] = lambda *_: None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._writer = writer
        self._sealed = sealed
        self._check_stop = check_stop
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._begin_shard()
        # Parts of any shard that are not encoded yet, with their bytes, the oldest first.
        self._queue: deque[tuple[Future[Records], int]] = deque()
        self._sealing: Future[SealedShard] | None = None

    def _begin_shard(self) -> None:
        # The parts of the shard that is read, and the bytes that they were delivered in.
        self._parts: list[Future[Records]] = []
        self._read = 0
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        # Parts of an unfinished shard: their records would be of no use.
        for part in self._parts:
            part.cancel()
        # The sealer first: it waits for encoders, and no encoder waits for it.
        self._sealer.shutdown()
        self._encoders.shutdown(cancel_futures=True)

    def add(self, delivery: TeacherReading) -> None:
        """Encode the next part of the shard that is read. Raises the error of an earlier part."""
        while self._queue and self._queue[0][0].done():
            self._queue.popleft()[0].result()
        most = IN_FLIGHT_BYTES - delivery.nbytes
        while self._queue and sum(size for _, size in self._queue) > most:
            self._queue.popleft()[0].result()
        if self._sealing is not None and self._read > most:
            self._wait_for_seal()
        part = self._encoders.submit(delivery.encode)
        self._parts.append(part)
        self._queue.append((part, delivery.nbytes))
        self._read += delivery.nbytes

    def give_up(self) -> None:
        """Drop the parts that were added since the last shard."""
        for part in self._parts:
            part.cancel()
        self._queue = deque(each for each in self._queue if not each[0].cancelled())
        self._begin_shard()

    def seal(self, index: int, sequences: Sequences, tails: TailSums | None = None) -> None:
        """Seal the parts that were added as shard ``index``, after the shard before it.

        ``tails`` are the sums of its tails.
        """
        read_seconds = time.monotonic() - self._began
        self._wait_for_seal()
        work = (index, sequences, self._parts, tails, read_seconds)
        self._sealing = self._sealer.submit(self._write, *work)
        self._begin_shard()

    def collect(self) -> SealedShard | None:
        """Return the shard that was sealed since the last call, if any; raises its error."""
        if self._sealing is None or not self._sealing.done():
            return None
        sealing, self._sealing = self._sealing, None
        return sealing.result()

    def finish(self) -> SealedShard | None:
        """Wait until the last whole shard is sealed, and return it as ``collect`` does."""
        self._wait_for_seal()
        return self.collect()

    def _wait_for_seal(self) -> None:
        if self._sealing is not None and not self._sealing.done():
            self._check_stop()
            self._sealing.result()

    def _write(
        self,
        index: int,
        sequences: Sequences,
        parts: list[Future[Records]],
        tails: TailSums | None,
        read_seconds: float,
    ) -> SealedShard:
        """Write and seal one shard, in the sealing thread."""
        records = Records.concatenate(part.result() for part in parts)
        parts.clear()  # the joined records are in memory now
        began = time.monotonic()
        disk_before = self._writer.disk_seconds
        size = self._writer.write_shard(index, sequences, records, tails)
        seconds = time.monotonic() - began
        disk_seconds = self._writer.disk_seconds - disk_before
        self._sealed(index, sequences, records)
        return SealedShard(index, size, seconds, disk_seconds, read_seconds)


class CaptureReport:
    """Tells a monitor what a capture does. Its progress counts the sequences of sealed shards, and
    those that were read.
    """

    def __init__(self, monitor: Monitor, identity: CacheIdentity, watch: HeldOutWatch) -> None:
        self.monitor = monitor
        self.watch = watch
        self._identity = identity
        self._last: int | None = None
        self._left_held_out = 0
        self._judged_disk = False
        self._meter = ProgressMeter(identity.data.sequences, "sequences")

    def expect(self, missing: ShardRuns, sealed: int, last: int | None = None) -> None:
        """Count shards that will be read, and ``sealed`` sequences that need not be.

        ``last`` is the shard with which everything ends; None if that is not known.
        """
        self._left_held_out += sum(map(self.watch.holds_out, missing))
        self._meter.skip(sealed)
        self._last = last

    def drop(self, sequences: int) -> None:
        """Take back sequences that were read for nothing."""
        self._meter.done -= sequences

    def report_slow_disk(self, warning: str | None) -> None:
        """Report a slow disk, once."""
        if warning is not None and not self._judged_disk:
            self.monitor.emit("warning", message=warning)
            self._judged_disk = True

    def report_read(self, sequences: int, positions: int) -> None:
        """Report sequences that were read, and their positions."""
        self.monitor.emit("progress", **self._meter.advance(sequences, positions))
        self.monitor.report_alive()

    def report_sealed(self, shard: SealedShard | None) -> None:
        """Report a shard that was sealed, and a teacher that does not know the held-out text."""
        if shard is None:
            return
        self.monitor.emit("shard", bytes=shard.bytes, seconds=shard.seconds)
        # Only the first shard: while a later one is read, the reading waits for the disk too.
        self.report_slow_disk(shard.describe_slow_disk())
        self._judged_disk = True
        if not self.watch.holds_out(shard.index):
            return
        self._left_held_out -= 1
        if not self._left_held_out and (message := self.watch.find_warning()):
            self.monitor.emit("warning", message=message)

    def describe_place(self, index: int, left: int, sequences: int) -> str:
        """Say where in shard ``index`` a capture stops, of which ``left`` sequences are unread."""
        where = f"shard {index + 1} of {self._identity.shard_count}"
        if not left:
            return f"after {where}"
        return (
            f"in {where}; the {sequences - left} of its {sequences} sequences that were read are "
            "read again"
        )

    def is_end(self, index: int, left: int) -> bool:
        """Return whether nothing is left to read."""
        return not left and index == self._last


def record_shards(
    reader: RecordReader,
    writer: CacheWriter,
    work: Iterable[tuple[int, Sequences]],
    report: CaptureReport,
) -> None:
    """Read the sequences of each shard of ``work``, and seal it.

    Raises the error of the reader, of the encoding or of the disk, and ``Interrupted`` if the
    monitor asks to stop; shards that were read whole are sealed before.
    """
    with ShardRecording(reader, writer, report) as recording:
        for index, sequences in work:
            recording.record(index, sequences)
        recording.finish()


class ShardRecording:
    """Reads shards and seals them, one after the other. ``sealed`` gets the number of each."""

    def __init__(
        self,
        reader: RecordReader,
        writer: CacheWriter,
        report: CaptureReport,
        sealed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._reader = reader
        self._report = report
        self._sealed = sealed
        self._writer = writer
        self._identity = writer.identity
        self._pipeline = ShardPipeline(
            writer, report.watch.add, lambda: report.monitor.report_alive(stepping=False)
        )

    def __enter__(self) -> Self:
        self._pipeline.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._pipeline.__exit__(*raised)
        self._writer.clear_unfinished()

    def record(
        self, index: int, sequences: Sequences, is_given_up: Callable[[], bool] = lambda: False
    ) -> bool:
        """Read a shard, and begin to seal it. Returns False where it was given up meanwhile."""
        reader, report, pipeline = self._reader, self._report, self._pipeline
        monitor = report.monitor
        self._writer.begin_shard(index)
        left = len(sequences)
        for delivery in reader.deliver(sequences, self._identity.shard_range(index).start):
            pipeline.add(delivery)
            left -= delivery.sequences
            if not left:
                self.finish()
                pipeline.seal(index, sequences, reader.take_tail_sums())
            self._note(pipeline.collect())
            report.report_read(delivery.sequences, delivery.positions)
            if left and is_given_up():
                pipeline.give_up()
                reader.take_tail_sums()
                report.drop(len(sequences) - left)
                return False
            if not report.is_end(index, left) and monitor.should_stop():
                self.finish()
                monitor.check(report.describe_place(index, left, len(sequences)))
        return True

    def finish(self) -> None:
        """Wait until every shard that was read whole is sealed."""
        self._note(self._pipeline.finish())

    def _note(self, shard: SealedShard | None) -> None:
        self._report.report_sealed(shard)
        if shard is not None:
            self._sealed(shard.index)


def record_ranges(
    reader: RecordReader,
    writer: CacheWriter,
    select: Callable[[int], Sequences],
    ranges: ShardRanges,
    report: CaptureReport,
) -> None:
    """Read and seal the shards that ``ranges`` hands to this process, until nothing is left.

    ``select`` returns the sequences of a shard. Shards that are sealed already are checked and
    skipped. Raises what ``record_shards`` raises.
    """
    unfinished = UnfinishedRanges(writer.identity, ranges)
    patience = Patience(report.monitor)
    with ShardRecording(reader, writer, report, unfinished.note_sealed) as recording:
        while (shards := ranges.take(patience.check)) is not None:
            if not shards:
                recording.finish()
                patience.wait()
                continue
            patience.renew()
            missing = writer.find_missing_shards(shards)
            sealed = filterfalse(missing.__contains__, shards)
            report.expect(missing, sum(len(writer.identity.shard_range(each)) for each in sealed))
            unfinished.begin(shards, missing)
            for index in missing:
                if not recording.record(index, select(index), partial(ranges.is_finished, shards)):
                    unfinished.give_up(shards)
                    break
        recording.finish()


class UnfinishedRanges:
    """The ranges of this process with shards that are not sealed yet."""

    def __init__(self, identity: CacheIdentity, ranges: ShardRanges) -> None:
        self._identity = identity
        self._ranges = ranges
        self._left: dict[range, set[int]] = {}

    def begin(self, shards: range, missing: Iterable[int]) -> None:
        """Add a range, of which the ``missing`` shards will be sealed."""
        self._left[shards] = set(missing)
        self._finish_if_sealed(shards)

    def note_sealed(self, index: int) -> None:
        """Tell that a range is finished where shard ``index`` was its last one."""
        for shards in [each for each in self._left if index in each]:
            self._left[shards].discard(index)
            self._finish_if_sealed(shards)

    def give_up(self, shards: range) -> None:
        """Leave a range to the worker that was faster."""
        if self._left.pop(shards, None) is not None:
            self._tell(shards)

    def _finish_if_sealed(self, shards: range) -> None:
        if not self._left[shards]:
            del self._left[shards]
            self._tell(shards)

    def _tell(self, shards: range) -> None:
        self._ranges.finish(shards, sum(len(self._identity.shard_range(index)) for index in shards))


class Patience:
    """The waits of a worker that gets no range now, each longer than the one before."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.renew()

    def renew(self) -> None:
        """Begin with the shortest wait again."""
        self._seconds = LEAST_WAIT_SECONDS

    def check(self) -> None:
        """Report that this process lives; raise ``Interrupted`` if it should stop."""
        self._monitor.report_alive(stepping=False)
        self._monitor.check("between two ranges of shards")

    def wait(self) -> None:
        """Wait, and check in between."""
        end = time.monotonic() + self._seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, LEAST_WAIT_SECONDS))
        self._seconds = min(2 * self._seconds, MOST_WAIT_SECONDS)
