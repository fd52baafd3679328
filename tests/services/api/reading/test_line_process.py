"""The process that answers a line at a time holds few threads of the API, however many ask it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.waiting import wait_until
from services.api.line_process import MOST_WAITING, LineProcess, NoAnswer

#: It answers an order once the file that the order names is there.
MODULE = """
import pathlib, sys, time
print("ready", flush=True)
for line in sys.stdin:
    while not pathlib.Path(line.strip().strip('"')).exists():
        time.sleep(0.01)
    print(line, end="", flush=True)
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[LineProcess]:
    (tmp_path / "slow_lines.py").write_text(MODULE)
    process = LineProcess("slow_lines", {"PYTHONPATH": str(tmp_path)}, 60)
    yield process
    process.close()


def test_who_would_wait_behind_too_many_is_refused_at_once(
    process: LineProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(process.ask(str(gate)))
        except NoAnswer as error:
            answers.append(error.reason)

    threads = [threading.Thread(target=ask) for _ in range(MOST_WAITING + 5)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) == 4)
    assert answers == ["busy"] * 4
    gate.touch()
    for thread in threads:
        thread.join()
    assert answers[4:] == [str(gate)] * (MOST_WAITING + 1)
    assert process.ask(str(gate)) == str(gate)
