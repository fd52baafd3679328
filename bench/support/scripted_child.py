"""The real child with a scripted stage; the job's name selects the script."""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cache.disk import locked, storage_errors
from kd.config.job import JobConfig
from kd.errors import DataError, Interrupted, TrainingError
from kd.progress import Monitor, ProgressMeter
from services.worker.stage_child import main

STEPS = 60
STEP_SECONDS = 0.05
HOLD = "hold"


def run_stage(
    stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, turn: int
) -> dict[str, Any]:
    """Run the script that the job's name selects."""
    (run_dir / "pid").write_text(str(os.getpid()))
    monitor.emit("stage", stage=stage, phase="loading")
    script = quick if config.name == "captures" and stage == "train" else SCRIPTS[config.name]
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
        monitor.emit(
            "progress", done=step, total=3, unit="steps", fraction=step / 3, eta_seconds=0.0
        )
    monitor.emit("evaluation", step=3, validation_perplexity=20.5)


def steps(run_dir: Path, monitor: Monitor) -> None:
    """Work for a few seconds; each step is on disk once, however often the run is interrupted."""
    file = run_dir / "steps"
    first = len(file.read_text().split()) if file.exists() else 0
    for step in range(first, STEPS):
        if monitor.should_stop():
            raise Interrupted(f"Stopped before step {step}.")
        time.sleep(STEP_SECONDS)
        with file.open("a") as out:
            out.write(f"{step}\n")
        monitor.emit(
            "progress", done=step + 1, total=STEPS, unit="steps", fraction=(step + 1) / STEPS
        )
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


def stays_alone(run_dir: Path, monitor: Monitor) -> None:
    """Start a process, then be silent and deaf, like a loop in C that holds the interpreter."""
    kin = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    (run_dir / "kin").write_text(str(kin.pid))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    time.sleep(300)


def captures(run_dir: Path, monitor: Monitor) -> None:
    """Act as a capture: one process at a time; a later one finds the work done.

    It lasts for as long as the caches hold a file of the name ``HOLD``.
    """
    root = run_dir.parent.parent / "caches"
    root.mkdir(exist_ok=True)
    lock = root / f"{'f' * 32}.lock"
    sealed = root / "sealed"
    with locked(lock, lambda: monitor.wait_for("another job's capture", lock, "precompute")):
        if sealed.exists():
            return
        (run_dir / "captured").touch()
        while (root / HOLD).exists():
            monitor.check("between two shards")
            time.sleep(STEP_SECONDS)
        sealed.touch()


def counts(run_dir: Path, monitor: Monitor) -> None:
    meter = ProgressMeter(3, "steps")
    for _ in range(3):
        monitor.emit("progress", **meter.advance(1, 100))
    for seconds in (0.3, 7.0):
        monitor.emit("shard", bytes=1000, seconds=seconds)
        monitor.report_alive()


def hangs_in_its_loop(run_dir: Path, monitor: Monitor) -> None:
    monitor.report_alive()
    time.sleep(300)


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


def hungry(run_dir: Path, monitor: Monitor) -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        raise TrainingError("Memory ran out at step 3.", "Lower train.batch_size.") from error


def eats(run_dir: Path, monitor: Monitor) -> None:
    """Take more memory than there is."""
    (run_dir / "ready").touch()
    while not (run_dir / "go").exists():
        time.sleep(0.05)
    eaten = []
    while True:
        eaten.append(bytearray(b"x") * 2**24)


def fills(run_dir: Path, monitor: Monitor) -> None:
    with storage_errors(run_dir):
        raise OSError(errno.ENOSPC, "No space left on device", str(run_dir / "shard"))


def exits(run_dir: Path, monitor: Monitor) -> None:
    sys.stderr.write("the library gave up\n")
    os._exit(3)


def dies(run_dir: Path, monitor: Monitor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_once(run_dir: Path, monitor: Monitor) -> None:
    if not (run_dir / "died").exists():
        (run_dir / "died").touch()
        dies(run_dir, monitor)


def fails_and_dies(run_dir: Path, monitor: Monitor) -> None:
    """Tell an error, and be killed after that, as by a library that crashes when it is unloaded."""
    atexit.register(os.kill, os.getpid(), signal.SIGKILL)
    fails(run_dir, monitor)


def reports(run_dir: Path, monitor: Monitor) -> None:
    quick(run_dir, monitor)
    (run_dir / "report.md").write_text("# The report\n")
    (run_dir / "report.json").write_text(
        json.dumps({"student_perplexity": 20.5, "teacher_perplexity": None})
    )
    for name in ("report.md", "report.json"):
        monitor.emit("artifact", name=name, path=str(run_dir / name))


def talks(run_dir: Path, monitor: Monitor) -> None:
    """Send events that are too long for the job store, and an error that is."""
    monitor.emit("warning", message="w" * (1 << 20))
    monitor.emit("metrics", step=1, loss=1.0, values=list(range(1 << 16)))
    raise DataError("d" * (1 << 20), "Shorten it.")


def leaks(run_dir: Path, monitor: Monitor) -> None:
    """Say the token of the environment, as a careless library does."""
    monitor.emit("warning", message=f"a look-up with {os.environ['HF_TOKEN']} failed")
    raise DataError(f"403 for the token {os.environ['HF_TOKEN']}.", "Use another token.")


def leaks_and_exits(run_dir: Path, monitor: Monitor) -> None:
    sys.stderr.write(f"403 for the token {os.environ['HF_TOKEN']}\n")
    os._exit(3)


def environment(run_dir: Path, monitor: Monitor) -> None:
    (run_dir / "environment").write_text(
        "\n".join(f"{name}={value}" for name, value in os.environ.items())
    )


SCRIPTS = {
    script.__name__.replace("_", "-"): script
    for script in (
        quick,
        steps,
        endless,
        with_kin,
        stays_alone,
        captures,
        counts,
        hangs_in_its_loop,
        hungry,
        eats,
        fills,
        stubborn,
        silent,
        fails,
        fails_and_dies,
        buggy,
        exits,
        dies,
        dies_once,
        environment,
        reports,
        talks,
        leaks,
        leaks_and_exits,
    )
} | {"austen-baseline": reports}

if __name__ == "__main__":
    sys.exit(main(run_stage))
