"""The process that answers a line at a time holds few threads of the API, however many ask it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.support.waiting import wait_until
from services.api.line_process import MOST_WAITING, LineProcess, NoAnswer
from services.api.turns import NoTurn, Turns

#: It answers an order once the file that the order names is there.
MODULE = """
import os, pathlib, sys, time
print("ready", flush=True)
for line in sys.stdin:
    if "panic" in line:
        os.abort()  # as a library in Rust does
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
    first, gate = str(tmp_path / "first"), str(tmp_path / "gate")
    answers: list[str] = []
    others: list[str] = []

    def ask(order: str) -> None:
        try:
            answers.append(process.ask(order))
        except NoAnswer as error:
            answers.append(error.reason)

    threads = [threading.Thread(target=ask, args=[first])]
    threads[0].start()
    wait_until(lambda: process._child is not None)
    threads += [threading.Thread(target=ask, args=[gate]) for _ in range(MOST_WAITING + 4)]
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(answers) == 4)
    # A group that has not waited yet is let in, in place of the latest of the largest group.
    other = threading.Thread(target=lambda: others.append(process.ask("/", "other")))
    other.start()
    wait_until(lambda: len(answers) == 5)
    assert answers == ["busy"] * 5
    Path(first).touch()
    other.join(30)
    # It was the next one, though it came last: the gate of all others is closed.
    assert others == ["/"]
    Path(gate).touch()
    for thread in threads:
        thread.join()
    assert answers[5:] == [first] + [gate] * (MOST_WAITING - 1)
    assert process.ask(gate) == gate


def test_a_process_that_ends_by_itself_is_no_broken_limit(process: LineProcess) -> None:
    with pytest.raises(NoAnswer) as caught:
        process.ask("panic")
    assert caught.value.reason == "crash"
    assert process.ask("/") == "/"


def test_groups_take_turns_however_many_orders_each_has() -> None:
    turns = Turns(100)
    served: list[str] = []
    first = threading.Event()

    def take(group: str) -> None:
        with turns.take(group, 60):
            served.append(group)
            first.wait(60)

    threads = [threading.Thread(target=take, args=(group,)) for group in "aaaaaabbc"]
    for number, thread in enumerate(threads):
        thread.start()
        wait_until(partial(lambda count: len(turns._waiting) == count, number))
    first.set()
    for thread in threads:
        thread.join()
    assert "".join(served) == "abcabaaaa"
    with turns.take("a", 1), pytest.raises(NoTurn), turns.take("b", 0.01):
        pass
