"""The real child with a light stage in place of the real one: what it does is written in the job's name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.errors import DataError, Interrupted
from kd.progress import Monitor
from services.worker.child import main

STEPS = 60
STEP_SECONDS = 0.05


def run_stage(stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Do as the name says."""
    (run_dir / "pid").write_text(str(os.getpid()))
    monitor.emit("stage", stage=stage, phase="loading")
    script = SCRIPTS[config.name]
    script(run_dir, monitor)
    if stage == "precompute":
        monitor.emit("cache", fingerprint="f" * 32, bytes_per_token=12.5, tokens=100, reused=False)
        return {"cache": {}}
    monitor.emit("artifact", name="student", path=str(run_dir / "student"))
    return {"artifacts": {}}


def quick(run_dir: Path, monitor: Monitor) -> None:
    print("printed by the run")
    for step in range(1, 4):
        monitor.emit("metrics", step=step, loss=3.0 / step, kd_loss=float("nan"), temperature=1.0)
        monitor.emit("progress", done=step, total=3, unit="steps", fraction=step / 3, eta_seconds=0.0)
    monitor.emit("evaluation", step=3, validation_perplexity=20.5)


def steps(run_dir: Path, monitor: Monitor) -> None:
    """A few seconds of work whose every step is on disk once, however often it is interrupted."""
    file = run_dir / "steps"
    first = len(file.read_text().split()) if file.exists() else 0
    for step in range(first, STEPS):
        if monitor.should_stop():
            raise Interrupted(f"Stopped before step {step}.")
        time.sleep(STEP_SECONDS)
        with file.open("a") as out:
            out.write(f"{step}\n")
        monitor.emit("progress", done=step + 1, total=STEPS, unit="steps", fraction=(step + 1) / STEPS)
        monitor.emit("metrics", step=step, loss=1.0)


def endless(run_dir: Path, monitor: Monitor) -> None:
    while not monitor.should_stop():
        monitor.emit("progress", done=1, total=2, unit="steps", fraction=0.5)
        time.sleep(0.05)
    raise Interrupted("Stopped on request.")


def with_kin(run_dir: Path, monitor: Monitor) -> None:
    kin = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    (run_dir / "kin").write_text(str(kin.pid))
    endless(run_dir, monitor)


def stubborn(run_dir: Path, monitor: Monitor) -> None:
    for _ in range(6000):
        monitor.emit("progress", done=1, total=2, unit="steps", fraction=0.5)
        time.sleep(0.05)


def silent(run_dir: Path, monitor: Monitor) -> None:
    time.sleep(300)


def fails(run_dir: Path, monitor: Monitor) -> None:
    raise DataError("text.txt is empty.", "Give a file with text in it.")


def buggy(run_dir: Path, monitor: Monitor) -> None:
    _ = 1 / len(os.environ.get("NO_SUCH_VARIABLE", ""))


def exits(run_dir: Path, monitor: Monitor) -> None:
    sys.stderr.write("the library gave up\n")
    os._exit(3)


def dies(run_dir: Path, monitor: Monitor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_once(run_dir: Path, monitor: Monitor) -> None:
    if not (run_dir / "died").exists():
        (run_dir / "died").touch()
        dies(run_dir, monitor)


def reports(run_dir: Path, monitor: Monitor) -> None:
    quick(run_dir, monitor)
    (run_dir / "report.md").write_text("# The report\n")
    (run_dir / "report.json").write_text(json.dumps({"student_perplexity": 20.5, "teacher_perplexity": None}))
    for name in ("report.md", "report.json"):
        monitor.emit("artifact", name=name, path=str(run_dir / name))


def environment(run_dir: Path, monitor: Monitor) -> None:
    (run_dir / "environment").write_text("\n".join(os.environ))


SCRIPTS = {
    script.__name__.replace("_", "-"): script
    for script in (
        quick,
        steps,
        endless,
        with_kin,
        stubborn,
        silent,
        fails,
        buggy,
        exits,
        dies,
        dies_once,
        environment,
        reports,
    )
} | {"austen-baseline": reports}

if __name__ == "__main__":
    sys.exit(main(run_stage))
