"""`kd run` in a terminal that closes: it saves, and the same command continues."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import yaml

from bench.support.paths import ROOT
from bench.support.waiting import wait_until

PYTHON = """
import sys, kd
try:
    kd.run_job(kd.load_job(sys.argv[1]), out=sys.argv[2], home=sys.argv[3])
except KeyboardInterrupt:
    sys.exit(130)
"""


def lead_session() -> None:
    """Make the terminal that of this process, and hear of its end also below nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.long
@pytest.mark.parametrize("door", ["kd run", "kd.run_job"])
def test_a_closed_terminal_leaves_a_checkpoint(tmp_path: Path, door: str) -> None:
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged.\n" * 200)
    tokenizer = str(ROOT / "examples/austen/teacher")
    job = {
        "kind": "train",
        "student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": tokenizer}},
        "data": {"train": str(tmp_path / "text.txt"), "sequence_length": 32, "max_eval_samples": 4},
        "loss": {"alpha": 1.0},
        "train": {"max_steps": 100_000, "batch_size": 2, "logging_steps": 1},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    run = tmp_path / "run"
    python = [sys.executable, "-c", PYTHON, file, run, tmp_path]
    command = [sys.executable, "-m", "services.terminal.cli", "run", file, "--run-dir", run]
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*command, "--home", tmp_path] if door == "kd run" else python,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        start_new_session=True,
        preexec_fn=lead_session,  # noqa: PLW1509  the child executes another program at once
    )
    os.close(terminal)
    os.set_blocking(screen, False)

    def has_begun() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(screen, 1 << 16)  # a screen that nobody reads would stop the run
        metrics = run / "metrics.jsonl"
        assert process.poll() is None, "it runs"
        return metrics.is_file() and metrics.read_text().count("\n") > 3

    try:
        wait_until(has_begun, 200)
        os.close(screen)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert list((run / "checkpoints").glob("step-*")), "what was learned is kept"
