"""Ranks are started by torchrun, their events and errors arrive, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from kd.errors import ConfigError, Interrupted, NotFinite, RankLost
from kd.files import RANKS
from kd.parallel.rank_failures import RankError
from kd.progress import Event, Monitor
from tests.support.kd.sharing.processes import list_processes
from tests.support.kd.sharing.scripted_rank import launch

pytestmark = pytest.mark.long


def ranks_of(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*") if path.read_text()]


def test_events_and_result_of_rank_0_arrive(tmp_path: Path) -> None:
    events: list[Event] = []
    assert launch("succeed", tmp_path, Monitor(events.append)) == {"answer": 42, "wild": None}
    assert events == [Event("progress", {"done": 1})]
    assert not (tmp_path / RANKS).exists()


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("refuse", ConfigError, r"train\.order: it is wrong\. Change it\."),
        ("diverge", NotFinite, "the loss is nan. Lower the rate."),
        ("break", RankError, "ValueError: no such thing"),
        ("die", RankLost, "Process 1 of those that share the stage was killed by SIGKILL"),
    ],
)
def test_the_error_of_one_rank_ends_all(
    tmp_path: Path, name: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        launch(name, tmp_path)
    if isinstance(caught.value, ConfigError):
        assert [each.pointer for each in caught.value.problems] == ["/train/order"]
    if isinstance(caught.value, RankLost):
        assert caught.value.signum == signal.SIGKILL
    wait_until(lambda: not list_processes(tmp_path), 10)
    assert not (tmp_path / RANKS).exists()


def test_a_stop_reaches_every_rank(tmp_path: Path) -> None:
    asked = threading.Event()
    monitor = Monitor(lambda event: asked.set(), asked.is_set)
    with pytest.raises(Interrupted, match="Stopped on request at step 3"):
        launch("stop", tmp_path, monitor)
    assert asked.is_set()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_every_process_stops_no_rank_before_it_is_asked(
    tmp_path: Path, number: signal.Signals
) -> None:
    """SIGHUP of a terminal, SIGTERM of a container: the run itself decides what it means."""
    asked = threading.Event()

    def hang_up(event: Event) -> None:
        for each in set(list_processes(tmp_path)) - {os.getpid()}:
            os.kill(each, number)
        asked.set()

    with pytest.raises(Interrupted, match="Stopped on request at step 3"):
        launch("stop", tmp_path, Monitor(hang_up, asked.is_set))
    assert asked.is_set()


def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    """At any moment: also while torchrun or a rank still imports."""
    code = (
        "import sys; from pathlib import Path; "
        "from tests.support.kd.sharing.scripted_rank import launch; "
        "launch('wait', Path(sys.argv[1]))"
    )
    for seconds in (1.0, None):
        command = [sys.executable, "-c", code, str(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT)
        if seconds is None:
            wait_until(lambda: len(ranks_of(tmp_path)) == 2, 60)
        else:
            wait_until((tmp_path / RANKS / "order.json").exists, 60)
            time.sleep(seconds)
        process.kill()
        process.wait()
        wait_until(lambda: not list_processes(tmp_path), 60)
