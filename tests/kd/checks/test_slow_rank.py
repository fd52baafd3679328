"""A slow rank is named by what it does alone, because all ranks wait for it as long."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.support.ranks import run_ranks
from kd.checks.slow_rank import RANK_SECONDS, RankWatch, compare_ranks, count_by_host
from kd.parallel.group import Group
from tests.support.kd.shared_training import (
    capture_profiles,
    change,
    make_shared_job,
    train_alone,
    train_student,
)

Job = dict[str, Any]
HOST = platform.node()

#: Stops a process for longer than it lets it run, until stdin ends; then the process runs.
STOPPER = """
import os, select, signal, sys, time
while not select.select([sys.stdin], [], [], 0.01)[0]:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.015)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


@contextmanager
def stopped_again_and_again() -> Iterator[None]:
    """Let another process stop this one for more than half of the time."""
    command = [sys.executable, "-c", STOPPER, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        yield


def train_with_slow_rank(group: Group, slow: int | None, *arguments: Any) -> dict[str, Any]:
    with stopped_again_and_again() if group.rank == slow else nullcontext():
        return train_student(group, *arguments)


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    steps = {"max_steps": 150, "eval_steps": 150, "save_steps": 150, "logging_steps": 15}
    return make_shared_job(tiny_teacher, tiny_text, **steps)


@pytest.fixture(scope="module")
def cache(job: Job, tmp_path_factory: pytest.TempPathFactory) -> str:
    return capture_profiles(job, tmp_path_factory.mktemp("home"), "threshold")["threshold"]


def read_ranks(run: Job) -> list[dict[str, float]]:
    """The seconds of each rank at each reported step, by its name."""
    head = f"{RANK_SECONDS}/"
    return [
        {name.removeprefix(head): line[name] for name in line if name.startswith(head)}
        for line in run["lines"]
        if line["type"] == "scalars"
    ]


def read_alarms(run: Job) -> list[str]:
    return [line["message"] for line in run["lines"] if line.get("check") == "slow_rank"]


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_is_stopped_again_and_again_is_named(
    job: Job, cache: str, tmp_path: Path, strategy: str
) -> None:
    job = change(job, train={"strategy": strategy})
    run, _ = run_ranks(2, train_with_slow_rank, 1, job, cache, str(tmp_path / "run"))
    reports = read_ranks(run)
    assert [set(each) for each in reports] == [{f"rank 0 on {HOST}", f"rank 1 on {HOST}"}] * 10
    slowest = [next(iter(compare_ranks(each).items())) for each in reports]
    assert sum(name == f"rank 1 on {HOST}" and times > 1.3 for name, times in slowest) > 5, slowest
    (message,) = read_alarms(run)
    assert message.startswith(f"The other ranks wait for rank 1 on {HOST} (")


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_nothing_disturbs_set_off_no_alarm(
    job: Job, cache: str, tmp_path: Path, strategy: str
) -> None:
    job = change(job, train={"strategy": strategy})
    run, _ = run_ranks(2, train_with_slow_rank, None, job, cache, str(tmp_path / "run"))
    assert len(read_ranks(run)) == 10
    assert all(seconds > 0 for each in read_ranks(run) for seconds in each.values())
    assert read_alarms(run) == []


@pytest.mark.long
def test_stages_of_a_pipeline_and_a_rank_alone_report_what_they_have(
    job: Job, cache: str, tmp_path: Path
) -> None:
    job = change(job, train={"max_steps": 4, "logging_steps": 2, "strategy": "pipeline"})
    run, _ = run_ranks(2, train_student, job, cache, str(tmp_path / "two"))
    assert [len(each) for each in read_ranks(run)] == [2, 2]
    assert all(seconds > 0 for each in read_ranks(run) for seconds in each.values())
    one = train_alone(change(job, train={"strategy": "single"}), cache, str(tmp_path / "one"))
    assert read_ranks(one) == [{}, {}]


def tell(watch: RankWatch, windows: int, *seconds: float) -> list[str]:
    """Report ``seconds`` of each rank for so many windows of 5 reports."""
    return [
        alarm.message for _ in range(5 * windows) for alarm in watch.observe(watch.name(seconds))
    ]


def make_watch(ranks: int, logging_steps: int = 10, strategy: str = "fsdp") -> RankWatch:
    hosts = [f"gpu-{'ab'[2 * rank // ranks]}" for rank in range(ranks)]
    return RankWatch(hosts, strategy, logging_steps, alarms=True)


def test_a_slow_rank_is_told_once_until_it_has_recovered() -> None:
    watch = make_watch(2)
    told = "The other ranks wait for rank 1 on gpu-b (1.50 times the median)."
    assert tell(watch, 1, 1.0, 1.5) == []
    assert tell(watch, 5, 1.0, 1.5) == [told]
    assert tell(watch, 1, 1.0, 1.0) == [], "one good window is no recovery"
    assert tell(watch, 2, 1.0, 1.5) == []
    assert tell(watch, 2, 1.0, 1.25) == []
    assert tell(watch, 2, 1.0, 1.5) == [told]


def test_a_slow_host_of_two_is_told_rank_by_rank() -> None:
    told = tell(make_watch(4), 2, 1.0, 1.0, 2.0, 1.4)
    slow = "rank 2 on gpu-b (2.00 times the median), rank 3 on gpu-b (1.40 times the median)"
    assert told == [f"The other ranks wait for {slow}."]


def test_what_disturbs_a_part_of_a_window_is_no_alarm() -> None:
    watch = make_watch(2)
    for at in range(50):
        own = 9.0 if at % 5 < 2 else 1.0
        assert watch.observe(watch.name([1.0, own])) == []


def test_a_delay_in_one_step_of_many_counts_by_its_mean() -> None:
    """Of ten steps one takes long: each part of a window has one."""
    watch = make_watch(2, logging_steps=1)
    found = [
        alarm
        for step in range(100)
        for alarm in watch.observe(watch.name([1.0, 6.0 if step % 10 == 3 else 1.0]))
    ]
    assert [alarm.facts["seconds"]["rank 1 on gpu-b"] for alarm in found] == [1.5]


def test_stages_of_a_pipeline_have_other_work_and_no_alarm() -> None:
    assert tell(make_watch(2, strategy="pipeline"), 4, 1.0, 3.0) == []


def test_ranks_are_counted_by_host() -> None:
    names = make_watch(4).name([1.0] * 4)
    assert count_by_host(names) == "2 on gpu-a, 2 on gpu-b"
