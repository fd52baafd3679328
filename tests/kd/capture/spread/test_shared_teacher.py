"""A capture whose teacher two processes share: its records, its end by a stop, and by a kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.checking.verify import verify_cache
from cache.records import Records
from cache.store import Cache, open_cache
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, Interrupted, RankLost
from kd.pipeline import run_stage
from kd.progress import SILENT, Event, Monitor
from tests.support.caches import content
from tests.support.kd.captures import PROFILES
from tests.support.kd.sharing.processes import find_ranks

pytestmark = pytest.mark.usefixtures("one_thread", "two_devices")

Options = dict[str, Any]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KD_DEVICES", "cpu,cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of caches of all tests: captures of one job are one cache."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def options(tiny_teacher: Path, tiny_text: Path) -> Options:
    """A capture of 44 sequences in 11 shards, by a teacher on one device."""
    return {
        "kind": "precompute",
        "teacher": {"model": str(tiny_teacher), "batch_size": 2},
        "data": {
            "train": str(tiny_text), "sequence_length": 64, "max_train_samples": 40,
            "max_eval_samples": 4,
        },
    }  # fmt: skip


def make_job(options: Options, profile: str, parallel: str = "none") -> JobConfig:
    teacher = options["teacher"] | {"parallel": parallel}
    cache = {"shard_sequences": 4, **PROFILES[profile]}
    devices = 1 if parallel == "none" else 2
    changes = {"teacher": teacher, "cache": cache, "resources": {"gpus": devices}}
    return parse_config(options | changes)


def capture(job: JobConfig, home: Path, monitor: Monitor = SILENT) -> Cache:
    summary = run_stage("precompute", job, home, home / "run", monitor).cache
    assert find_ranks(home) == {}
    return open_cache(home / "caches" / str(summary["fingerprint"]))


def read_all(store: Cache) -> Records:
    return store.read(np.arange(len(store)))[1]


def shards(store: Cache) -> dict[str, bytes]:
    return content(store.folder / "shards")


def pair_ids(records: Records) -> Iterator[tuple[int, int]]:
    """Each kept id, with the number of its position."""
    for axis in ("head", "tail"):
        positions = np.repeat(np.arange(len(records)), records[f"{axis}_count"])
        rows = records[f"{axis}_ids"].reshape(len(positions), -1)
        for place, ids in zip(positions, rows, strict=True):
            yield from ((int(place), int(each)) for each in ids)


@pytest.mark.long
def test_dense_records_of_tensor_parallelism_are_the_same_within_rounding(
    options: Options, home: Path
) -> None:
    plain = capture(make_job(options, "dense32"), home)
    shared = capture(make_job(options, "dense32", "tensor"), home)
    assert shared.identity.teacher.parallel == "tensor"
    theirs, ours = (read_all(each)["logprobs"].astype(np.float64) for each in (plain, shared))
    assert ours.shape == theirs.shape and not np.array_equal(ours, theirs)
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    assert np.abs(np.exp(ours) - np.exp(theirs)).max() < 1e-5
    assert [row.temperature for row in shared.manifest.fidelity] == [0.5, 1.0, 2.0]
    assert all(row.kl is not None and row.kl < 1e-6 for row in shared.manifest.fidelity)


@pytest.mark.long
@pytest.mark.parametrize("profile", ["threshold", pytest.param("tempered", marks=pytest.mark.slow)])
def test_sampled_ids_of_tensor_parallelism_are_the_same(
    options: Options, home: Path, profile: str
) -> None:
    """The uniforms depend on the codec, sequence and position alone, so they are the same."""
    plain = capture(make_job(options, profile), home)
    shared = capture(make_job(options, profile, "tensor"), home)
    assert shared.identity.codec == plain.identity.codec and shared.folder != plain.folder
    theirs, ours = (list(pair_ids(read_all(each))) for each in (plain, shared))
    assert len(theirs) > 10_000
    common = len(set(theirs) & set(ours))
    assert common >= 0.999 * len(set(theirs) | set(ours))


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["hidden", "threshold"])
def test_records_of_fsdp_are_those_of_one_process(
    options: Options, home: Path, profile: str
) -> None:
    plain = capture(make_job(options, profile), home)
    shared = capture(make_job(options, profile, "fsdp"), home)
    assert shared.folder != plain.folder
    assert shards(shared) == shards(plain)
    assert shared.manifest.fidelity == plain.manifest.fidelity


class Disturber:
    """Does something once the capture has sealed so many shards."""

    def __init__(self, sealed: int, act: Any) -> None:
        self.left = sealed
        self.act = act
        self.stopping = False
        self.acted_at = 0.0
        self.monitor = Monitor(self.listen, lambda: self.stopping)

    def listen(self, event: Event) -> None:
        self.left -= event.type == "shard"
        if self.left <= 0 and not self.acted_at:
            self.acted_at = time.monotonic()
            self.act(self)


def stop(disturber: Disturber) -> None:
    disturber.stopping = True


def kill(rank: int, home: Path) -> Any:
    return lambda _: os.kill(find_ranks(home)[rank], signal.SIGKILL)


@pytest.mark.slow
def test_a_stopped_or_killed_capture_goes_on_to_the_same_bytes(
    options: Options, home: Path, tmp_path: Path
) -> None:
    job = make_job(options, "threshold", "tensor")
    whole = capture(job, home)
    with pytest.raises(Interrupted, match="Stopped on request"):
        capture(job, tmp_path, Disturber(2, stop).monitor)
    for rank, sealed in ((1, 1), (0, 2)):
        killer = Disturber(sealed, kill(rank, tmp_path))
        with pytest.raises(RankLost, match=f"Process {rank} .* killed by SIGKILL"):
            capture(job, tmp_path, killer.monitor)
        assert time.monotonic() - killer.acted_at < 15
        assert find_ranks(tmp_path) == {}
    resumed = capture(job, tmp_path)
    assert resumed.folder.name == whole.folder.name
    assert shards(resumed) == shards(whole)
    assert verify_cache(resumed.folder) == []


def refuse(job: JobConfig, home: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        run_stage("precompute", job, home, home / "run")
    return str(caught.value)


def test_devices_that_are_not_there_are_refused_before_the_capture(
    options: Options, tmp_path: Path
) -> None:
    job = make_job(options, "topk", "tensor")
    for devices, reason in ((3, "it asks for 3 devices, but this process may use 2"),):
        wanted = parse_config(job.model_dump(mode="json") | {"resources": {"gpus": devices}})
        assert reason in refuse(wanted, tmp_path)
    alone = parse_config(job.model_dump(mode="json") | {"resources": {"gpus": None}})
    assert "shares the teacher among several devices, but the job has one" in refuse(
        alone, tmp_path
    )
    assert not (tmp_path / "caches").exists()
