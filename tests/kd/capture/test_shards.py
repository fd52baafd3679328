"""A capture that overlaps its work: the same bytes as one step after the other, bounded memory, and
errors and stops that leave nothing behind.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.waiting import PATIENCE_SECONDS
from cache import disk
from cache.checking.verify import verify_cache
from cache.disk import TEMPORARY_PREFIX, hash_file, list_file_sizes
from cache.profiles.table import PROFILES
from cache.records import Records, Sequences, TailSums
from cache.writing.writer import CacheWriter, open_writer
from kd.capture import shards
from kd.capture import teacher as reading
from kd.capture.capturing import capture_cache, select_shard_sequences
from kd.capture.plan import CapturePlan, plan_capture
from kd.capture.recording import TeacherReading
from kd.capture.shards import CaptureReport, RecordReader, record_shards
from kd.capture.teacher import Teacher, fit_recorder
from kd.capture.usefulness import HeldOutWatch
from kd.config.jobfile import parse_config
from kd.errors import Interrupted, ModelError, OutOfMemory
from kd.progress import SILENT, Event, Monitor

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make_plan(tiny_teacher: Path, tiny_text: Path) -> Callable[..., CapturePlan]:
    def make(profile: str = "threshold", **cache: Any) -> CapturePlan:
        sampled = {"threshold": 0.01} if PROFILES[profile].sampled else {}
        if "draws" in PROFILES[profile].options:
            sampled["draws"] = 2
        job = {
            "kind": "precompute",
            "teacher": {"model": str(tiny_teacher), "batch_size": 3},
            "data": {
                "train": str(tiny_text),
                "sequence_length": 64,
                "max_train_samples": 18,
            },
            "cache": {"profile": profile, "shard_sequences": 7, **sampled, **cache},
        }
        return plan_capture(parse_config(job))

    return make


def content(folder: Path) -> dict[str, str]:
    return {
        name: hash_file(folder / name)
        for name in list_file_sizes(folder)
        if name.startswith(("shards/", "seals/0", "head/"))
    }


def capture_one_after_the_other(plan: CapturePlan, root: Path) -> dict[str, str]:
    """Read, encode and seal a shard, then the next; return the digests of all files."""
    with open_writer(root, plan.identity) as writer:
        teacher = fit_recorder(Teacher.load(plan), plan, writer, SILENT)
        for index in writer.find_missing_shards():
            sequences = select_shard_sequences(plan, index)
            first = plan.identity.shard_range(index).start
            parts = [each.encode() for each in teacher.deliver(sequences, first)]
            writer.write_shard(index, sequences, Records.concatenate(parts))
    return content(writer.folder)


@dataclass
class Changed:
    """A teacher whose deliveries a test changes; ``count`` of them were made."""

    teacher: RecordReader
    change: Callable[[int, TeacherReading], TeacherReading]
    count: int = 0

    def deliver(self, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        for delivery in self.teacher.deliver(sequences, first):
            self.count += 1
            yield self.change(self.count, delivery)

    def take_tail_sums(self) -> TailSums | None:
        return self.teacher.take_tail_sums()


@dataclass
class Capture:
    """A capture whose teacher a test changes, with what it reported."""

    plan: CapturePlan
    root: Path
    change: Callable[[int, TeacherReading], TeacherReading] = lambda _, delivery: delivery
    stop: Callable[[list[Event]], bool] = lambda _: False
    events: list[Event] = field(default_factory=list)
    reader: Changed | None = None

    def run(self) -> CacheWriter:
        monitor = Monitor(self.events.append, lambda: self.stop(self.events))
        with open_writer(self.root, self.plan.identity) as writer:
            teacher = fit_recorder(Teacher.load(self.plan), self.plan, writer, SILENT)
            self.reader = Changed(teacher, self.change)
            missing = writer.find_missing_shards()
            report = CaptureReport(monitor, self.plan.identity, HeldOutWatch(self.plan))
            left = sum(len(self.plan.identity.shard_range(index)) for index in missing)
            report.expect(missing, self.plan.identity.data.sequences - left, missing.last)
            work = ((index, select_shard_sequences(self.plan, index)) for index in missing)
            record_shards(self.reader, writer, work, report)
        return writer

    def list(self, type: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.type == type]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    ours = [thread.name for thread in threading.enumerate() if thread.name not in before]
    assert not [name for name in ours if name.startswith(("encode", "seal"))]


def require_nothing_half_written(folder: Path) -> None:
    assert not list(folder.rglob(f"{TEMPORARY_PREFIX}*"))
    sealed = {path.stem for path in (folder / "seals").iterdir()}
    written = {path.name for path in (folder / "shards").iterdir() if path.is_dir()}
    assert sealed - {"head", "dither"} == written


# ---------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(each, marks=pytest.mark.long) if each == "tempered" else each
        for each in PROFILES
    ],
)
def test_the_bytes_are_those_of_one_step_after_the_other(
    make_plan: Callable[..., CapturePlan], profile: str, tmp_path: Path
) -> None:
    plan = make_plan(profile)
    expected = capture_one_after_the_other(plan, tmp_path / "plain")
    capture_cache(plan, tmp_path / "overlapped", SILENT)
    folder = tmp_path / "overlapped" / plan.identity.fingerprint
    found = content(folder)
    assert len(expected) > 20 and found == expected
    assert verify_cache(folder) == []


@pytest.mark.long
@pytest.mark.parametrize("limit", [0, 30_000])
def test_the_bytes_do_not_depend_on_the_memory_that_may_wait(
    make_plan: Callable[..., CapturePlan],
    limit: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan()
    expected = capture_one_after_the_other(plan, tmp_path / "plain")
    monkeypatch.setattr(shards, "IN_FLIGHT_BYTES", limit)
    writer = Capture(plan, tmp_path / "bounded").run()
    assert content(writer.folder) == expected


# ---------------------------------------------------------------------- bounds


def test_reading_waits_where_the_encoders_do_not_keep_up(
    make_plan: Callable[..., CapturePlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two deliveries, the fourth is read only after one is encoded."""
    freed = threading.Event()
    sizes: list[int] = []

    def hold(count: int, delivery: TeacherReading) -> TeacherReading:
        sizes.append(delivery.nbytes)
        if count == 1:
            monkeypatch.setattr(shards, "IN_FLIGHT_BYTES", int(2.5 * delivery.nbytes))

        def encode() -> Records:
            assert freed.wait(PATIENCE_SECONDS)
            return delivery.encode()

        # All of one size, so that the bound counts them.
        return replace(delivery, nbytes=sizes[0], encode=encode)

    capture = Capture(make_plan(), tmp_path, hold)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(capture.run)
        wait_until(lambda: len(sizes) == 3)
        time.sleep(0.2)
        assert len(sizes) == 3, "two wait to be encoded, and the third for room"
        freed.set()
        running.result(PATIENCE_SECONDS)
    assert len(capture.list("shard")) == 3


def test_while_a_shard_is_sealed_the_next_is_read_and_not_the_one_after(
    make_plan: Callable[..., CapturePlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = threading.Event()
    write = CacheWriter.write_shard

    def hold(self: CacheWriter, *arguments: Any) -> int:
        assert freed.wait(PATIENCE_SECONDS)
        return write(self, *arguments)

    monkeypatch.setattr(CacheWriter, "write_shard", hold)
    capture = Capture(make_plan(), tmp_path)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(capture.run)
        # A shard is three micro-batches.
        wait_until(lambda: capture.reader is not None and capture.reader.count == 6)
        time.sleep(0.2)
        assert capture.reader is not None and capture.reader.count == 6
        assert not capture.list("shard")
        assert [each["done"] for each in capture.list("progress")] == [3, 6, 7, 10, 13]
        freed.set()
        running.result(PATIENCE_SECONDS)
    done = [each["done"] for each in capture.list("progress")]
    assert done == sorted(done) and done[-1] == 20


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------- errors and stops


@pytest.mark.long
def test_an_error_of_an_encoder_ends_the_capture_with_its_own_message(
    make_plan: Callable[..., CapturePlan], tmp_path: Path
) -> None:
    """The shards before it are sealed, and the capture goes on from there."""
    plan = make_plan()
    expected = capture_one_after_the_other(plan, tmp_path / "plain")

    def refuse() -> Records:
        raise ModelError("The logits of the sixth micro-batch are broken.", "Mend them.")

    def break_sixth(count: int, delivery: TeacherReading) -> TeacherReading:
        return replace(delivery, encode=refuse) if count == 6 else delivery

    broken = Capture(plan, tmp_path / "broken", break_sixth)
    with pytest.raises(ModelError, match="sixth micro-batch are broken"):
        broken.run()
    assert broken.reader is not None and 6 <= broken.reader.count <= 8
    folder = tmp_path / "broken" / plan.identity.fingerprint
    require_nothing_half_written(folder)
    resumed = Capture(plan, tmp_path / "broken")
    assert content(resumed.run().folder) == expected
    assert resumed.list("progress")[0]["done"] == 7 + 3, "what was sealed is not read again"


def test_an_error_of_the_disk_ends_the_capture_with_its_own_message(
    make_plan: Callable[..., CapturePlan], tmp_path: Path
) -> None:
    plan = make_plan()
    folder = tmp_path / plan.identity.fingerprint

    def take_place(count: int, delivery: TeacherReading) -> TeacherReading:
        if count == 2:
            (folder / "shards").rename(folder / "elsewhere")
        return delivery

    with pytest.raises(OSError, match="shards"):
        Capture(plan, tmp_path, take_place).run()
    assert not list(folder.rglob(f"{TEMPORARY_PREFIX}*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("stop", "where", "sealed"),
    [
        (1, "in shard 1 of 3; the 3 of its 7", 0),
        (3, "after shard 1 of 3", 1),
        (4, "in shard 2 of 3; the 3 of its 7", 1),
        (7, "in shard 3 of 3; the 3 of its 6", 2),
    ],
)
def test_a_stop_seals_what_was_read_whole_and_says_what_is_read_again(
    make_plan: Callable[..., CapturePlan], stop: int, where: str, sealed: int, tmp_path: Path
) -> None:
    """The shards have 7, 7 and 6 sequences, which are read three at a time."""
    plan = make_plan()
    capture = Capture(
        plan,
        tmp_path,
        stop=lambda events: sum(event.type == "progress" for event in events) >= stop,
    )
    with pytest.raises(Interrupted, match=where):
        capture.run()
    assert len(capture.list("progress")) == stop
    assert len(capture.list("shard")) == sealed
    require_nothing_half_written(tmp_path / plan.identity.fingerprint)
    expected = capture_one_after_the_other(plan, tmp_path / "plain")
    assert content(Capture(plan, tmp_path).run().folder) == expected


# ---------------------------------------------------------------------- memory


@pytest.mark.long
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
    ids=["GPU", "CPU"],
)
@pytest.mark.parametrize(
    ("profile", "most", "failed"),
    [
        ("tempered", 1, [4, 2]),
        ("threshold", 2, [4]),
        # Its tables are fitted to two sequences first.
        ("threshold", 1, [2]),
    ],
)
def test_a_micro_batch_that_does_not_fit_is_halved_and_the_rows_stay(
    make_plan: Callable[..., CapturePlan],
    profile: str,
    most: int,
    failed: list[int],
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(profile)
    small = replace_batch_size(plan, most)
    expected = capture_one_after_the_other(small, tmp_path / "small")
    passes = limit_sequences(monkeypatch, most, error)
    events: list[Event] = []
    capture_cache(replace_batch_size(plan, 4), tmp_path / "large", Monitor(events.append))
    assert content(tmp_path / "large" / plan.identity.fingerprint) == expected
    told = [event.data["message"] for event in events if event.type == "warning"]
    assert [count for count in passes if count > most] == failed, "the smaller size stays"
    assert len([text for text in told if "Memory ran out" in text]) == len(failed)
    assert any(f"Set teacher.batch_size to {most} " in text for text in told)


@pytest.mark.parametrize("profile", PROFILES)
def test_too_little_memory_for_one_sequence_is_told_before_anything_is_written(
    make_plan: Callable[..., CapturePlan],
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(profile)
    limit_sequences(monkeypatch, 0, MemoryError())
    with pytest.raises(OutOfMemory, match="one sequence of 64 tokens") as caught:
        capture_cache(plan, tmp_path, SILENT)
    assert "data.sequence_length" in caught.value.remedy
    folder = tmp_path / plan.identity.fingerprint
    assert list(list_file_sizes(folder)) == ["shards/zarr.json"]


def replace_batch_size(plan: CapturePlan, size: int) -> CapturePlan:
    section = plan.teacher.section.model_copy(update={"batch_size": size})
    return replace(plan, teacher=replace(plan.teacher, section=section))


def limit_sequences(monkeypatch: pytest.MonkeyPatch, most: int, error: Exception) -> list[int]:
    """Let passes of more than ``most`` sequences fail; return the sequences of each pass."""
    real = reading.compute_hidden_states
    passes: list[int] = []

    def compute(model: Any, tokens_BL: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append(len(tokens_BL))
        if len(tokens_BL) > most:
            raise error
        return real(model, tokens_BL, *rest)

    monkeypatch.setattr(reading, "compute_hidden_states", compute)
    return passes


def find_slow_disk_warnings(capture: Capture) -> list[str]:
    capture.run()
    warnings = (event.data["message"] for event in capture.events if event.type == "warning")
    return [message for message in warnings if "disk of the cache" in message]


@pytest.mark.long
def test_a_disk_that_takes_less_than_the_teacher_gives_is_named_after_the_first_shard(
    make_plan: Callable[..., CapturePlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes a tenth of a second to make each file durable."""
    assert find_slow_disk_warnings(Capture(make_plan(), tmp_path / "fast")) == []
    sync = os.fsync

    def sync_slowly(handle: int) -> None:
        time.sleep(0.1)
        sync(handle)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    capture = Capture(make_plan(), tmp_path / "slow")
    (message,) = find_slow_disk_warnings(capture)
    kinds = [event.type for event in capture.events if event.type in ("shard", "warning")]
    assert kinds[:2] == ["shard", "warning"]
    shard = next(event.data for event in capture.events if event.type == "shard")
    found = re.search(r"takes ([\d.e-]+) MB/s, and the teacher gives ([\d.e-]+) MB/s", message)
    assert found is not None
    taken, given = map(float, found.groups())
    assert shard["bytes"] / shard["seconds"] / 1e6 <= taken * 1.01
    assert taken == pytest.approx(shard["bytes"] / shard["seconds"] / 1e6, rel=0.5)
    assert taken < given
    assert "Move KD_HOME to a local disk" in message
    assert "cache.threshold" in message


@pytest.mark.long
def test_a_slow_disk_is_named_before_the_capture_begins(
    make_plan: Callable[..., CapturePlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes a tenth of a second to make a file of 64 bytes durable."""
    plan = make_plan()
    told: list[Event] = []
    sync = os.fsync

    def sync_slowly(handle: int) -> None:
        time.sleep(0.1)
        sync(handle)

    with monkeypatch.context() as slow:
        slow.setattr(os, "fsync", sync_slowly)
        slow.setattr(disk, "PROBE_BYTES", 64)
        capture_cache(plan, tmp_path / "slow", Monitor(told.append))
    kinds = [
        "warning" if event.type == "warning" else event.data.get("phase", event.type)
        for event in told
        if event.type != "warning" or "disk of the cache" in event.data["message"]
    ]
    assert kinds.count("warning") == 1
    assert kinds.index("warning") < kinds.index("capturing") < kinds.index("shard")
    message = next(event.data["message"] for event in told if event.type == "warning")
    found = re.search(r"takes ([\d.e-]+) MB/s, and the teacher gives ([\d.e-]+) MB/s", message)
    assert found is not None
    taken, given = map(float, found.groups())
    assert taken < min(64 / 0.1 / 1e6, given)
    assert "cache.threshold" in message

    # What the teacher read to be timed is not in the cache.
    capture_cache(plan, tmp_path / "fast", SILENT)
    name = plan.identity.fingerprint
    assert content(tmp_path / "slow" / name) == content(tmp_path / "fast" / name)
    for root in ("slow", "fast"):
        assert not list((tmp_path / root / name).rglob(f"{TEMPORARY_PREFIX}*"))
