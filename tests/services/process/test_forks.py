"""Modules that run in forks of a warm process end as they would in a Python of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.harness import is_alive
from bench.support.waiting import wait_until
from bench.support.warm import SERVICE, WarmPython, find_packages, get_warm_python

SECONDS = 120.0
LAST_WORDS = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("first")
"""
DAMAGED = "import sys; sys.stderr.write('half a line'); sys.exit('the reason')"
WAITING = """
import signal, time
from kd.parallel.parent_death import die_with_parent
die_with_parent(signal.SIGKILL)
time.sleep(300)
"""


@pytest.mark.parametrize(
    "program",
    [
        "print('done')",
        "raise SystemExit",
        "raise SystemExit(3)",
        "import sys; sys.exit(-1)",
        DAMAGED,
        "raise ValueError('bad')",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "print(input())",
        LAST_WORDS,
    ],
)
def test_a_fork_ends_as_a_python_of_its_own(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    env = os.environ | {"PYTHONPATH": find_packages()}
    fork = get_warm_python(SERVICE).run("program", [], "answer\n", tmp_path, env, SECONDS)
    own = subprocess.run(
        [sys.executable, "-m", "program"],
        cwd=tmp_path,
        env=env,
        input="answer\n",
        capture_output=True,
        text=True,
    )
    assert (fork.returncode, fork.stdout) == (own.returncode, own.stdout), fork.stderr
    assert fork.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]


@pytest.mark.long
def test_a_process_ends_with_the_one_that_it_was_forked_from(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAITING)
    warm = WarmPython(SERVICE)
    with Path(os.devnull).open("r+") as nothing:
        files = [nothing.fileno()] * 3
        process = warm.start("program", [], files, tmp_path, dict(os.environ), new_session=True)
    assert os.getsid(process.pid) == process.pid
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    warm.close()
    wait_until(lambda: not is_alive(process.pid))
    assert process.wait() == -signal.SIGKILL
    process.kill()
