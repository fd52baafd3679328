"""A cache on a slow disk is named at the start of a run, with its rate and the student's."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

from bench.support.small.caches import make_cache, make_identity
from cache.reading.file_reads import DiskReads
from cache.store import Cache, open_cache
from kd.checks.slow_disk import STEPS, DiskWatch
from kd.checks.watch import WARM_UP, StepSeconds
from kd.progress import Event, Monitor
from kd.training.loop import train
from tests.support.kd.students import make_llama
from tests.support.kd.training import make_text_job

VOCABULARY = 300
#: Seconds that the slow disk takes for a file.
DELAY = 0.01


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "caches", make_identity(train_sequences=24))


def slow_down(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the disk take ``DELAY`` for each file below ``folder``."""
    read = Path.read_bytes

    def read_slowly(path: Path) -> bytes:
        if path.is_relative_to(folder):
            time.sleep(DELAY)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_slowly)


def find_warnings(source: Cache, run_folder: Path) -> list[str]:
    """Train from ``source``, and return the warnings of a slow disk."""
    told: list[str] = []

    def listen(event: Event) -> None:
        if event.type == "warning":
            told.append(event.data["message"])

    job = make_text_job({"max_steps": WARM_UP + 2 * STEPS, "batch_size": 2, "eval_steps": 1000})
    train(job, source, make_llama(VOCABULARY), VOCABULARY, run_folder, Monitor(listen))
    return [each for each in told if "disk of the cache" in each]


@pytest.mark.long
def test_a_slow_disk_is_named_once_with_its_rate_and_remedies(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, folder)
    source = open_cache(folder, memory_bytes=0)
    (message,) = find_warnings(source, tmp_path / "run")
    known = source.disk_reads.bytes / source.disk_reads.seconds / 1e6
    found = re.search(r"gives ([\d.e-]+) MB/s", message)
    assert found is not None
    assert float(found[1]) == pytest.approx(known, rel=0.8)
    rates = re.search(r"took ([\d,]+) tokens/s; without waiting they would take ([\d,]+)", message)
    assert rates is not None
    taken, possible = (int(each.replace(",", "")) for each in rates.groups())
    assert taken < 0.9 * possible
    for remedy in ("train.order (now shuffled)", "a local disk"):
        assert remedy in message


@pytest.mark.long
def test_a_slow_disk_whose_cache_fits_into_memory_is_not_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, folder)
    source = open_cache(folder)
    source.read(np.arange(24))
    assert source.disk_reads.seconds > 0
    assert find_warnings(source, tmp_path / "run") == []


class Counted(DiskReads):
    """Reads that a test counts itself."""

    def add(self, seconds: float) -> None:
        self.bytes += 1_000_000
        self.seconds += seconds


@pytest.mark.parametrize(
    ("waited", "reading", "threads", "warns"),
    [
        (0.6, 0.5, 1, True),
        (0.6, 0.2, 1, False),  # decoding is what the run waits for
        (0.05, 0.05, 1, False),  # hardly a wait
        (0.6, 0.5, 4, False),  # four threads, each of which read for an eighth of a second
        (0.6, 2.0, 4, True),
    ],
)
def test_only_waiting_for_the_disk_is_named(
    waited: float, reading: float, threads: int, warns: bool
) -> None:
    reads = Counted()
    job = make_text_job({"max_steps": 50, "dataloader_num_workers": threads})
    watch = DiskWatch(job.require_train(), reads)
    found = []
    for _ in range(WARM_UP + 3 * STEPS):
        reads.add(reading)
        found.append(watch.observe_step(100, StepSeconds(waited, 1.0 - waited)))
    told = [each for each in found if each is not None]
    assert len(told) == warns
    if warns:
        assert found[WARM_UP + STEPS - 1] == told[0], "as early as possible"
        assert f"gives {threads / reading:.3g} MB/s" in told[0]
        assert "60% of their time, and took 100 tokens/s" in told[0]
        assert "they would take 250" in told[0]


def test_a_source_in_memory_has_no_disk() -> None:
    watch = DiskWatch(make_text_job({"max_steps": 50}).require_train(), None)
    assert {watch.observe_step(1, StepSeconds(1.0, 0.0)) for _ in range(50)} == {None}
