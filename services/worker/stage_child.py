"""One stage of one job in its own process: ``python -m services.worker.stage_child``.

stdin     one line with an ``Order`` (stage_messages.py), then a byte now and then; if stdin ends or
          is silent, the supervisor is gone, and this process and its descendants are killed
stdout    JSON lines: the events of kd.progress, then one event of type result, error or elsewhere
answers   a pipe whose number is in the order: what range_server.py answers, for a capture by
          several workers
stderr    the log, and all that the run prints
SIGTERM   save, then end
exit      0 done, 1 failed, 75 stopped on request with everything saved, 76 another process does
          the same work, 77 failed with an error that may have passed when it is tried again
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from cache.disk import locked, make_folder, storage_errors
from cache.json_object import Json
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import Interrupted, RankLost
from kd.files import LOCK
from kd.parallel.parent_death import die_with_parent
from kd.preflight.confinement import confined_datasets
from kd.preflight.limits import Confinement, grant_limits
from kd.preflight.problems import Folders, require_no_problems
from kd.progress import Event, EventPipe, Monitor, WorkHeldByAnother
from services.process.stdin_guard import die_with_stdin, offer_to_oom_killer
from services.process.streams import UnfailingStream
from services.worker.failures import describe_error, is_passing
from services.worker.stage_messages import Order
from services.worker.together.range_client import RangeClient

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_STOPPED = 75
EXIT_HELD = 76
EXIT_PASSING = 77
#: Time that an earlier process has to release the run folder.
LOCK_SECONDS = 30.0

#: A function such as ``kd.pipeline.run_stage``.
StageRunner = Callable[[str, JobConfig, Path, Path, Monitor, int], Json]


def run_stage_of_pipeline(
    gpus: int, stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, turn: int
) -> Json:
    """Call ``kd.pipeline.run_stage``. No other process of the service loads torch.

    Raises ``DeviceUnusable`` if the worker gave the job ``gpus`` GPUs and torch sees none.
    """
    monitor.check("before the run began")
    # A handler in Python would have to wait for the imports, and there is nothing to save yet.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        from kd.pipeline import run_stage
        from kd.preflight.devices import ask_torch, require_promised_gpus

        require_promised_gpus(gpus, ask_torch())
    finally:
        signal.signal(signal.SIGTERM, handler)
    return run_stage(stage, config, home, run_dir, monitor, turn).to_json()


def run_ranks_of_host(
    stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, turn: int
) -> Json:
    """Run the ranks of this host for a stage that another host leads."""
    from kd.stages.training import join_training

    join_training(config, home, run_dir, monitor)
    return {}


def main(run_stage: StageRunner | None = None, run_host: StageRunner = run_ranks_of_host) -> int:
    """Run the stage that stdin names, by the pipeline if none is given. Returns the exit code.

    ``run_host`` runs the part of this host in a stage that another host leads.
    """
    die_with_parent(signal.SIGKILL)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    events = EventPipe()
    # The log is a file. Where its disk is full, a line is lost, but not the run or its error.
    sys.stdout = UnfailingStream(1)
    sys.stderr = UnfailingStream(2)
    # The order is the first line. Heartbeats that follow it may be lost here.
    read = b""
    while b"\n" not in read:
        part = os.read(0, 65536)
        if not part:
            raise SystemExit(
                "services.worker.stage_child expects an order on stdin: only a worker starts it."
            )
        read += part
    order = TypeAdapter(Order).validate_json(read.partition(b"\n")[0])
    die_with_stdin(order.patience)
    # After the guard was started: the guard must outlive this process.
    offer_to_oom_killer()
    if order.host is not None and order.host.number > 0:
        run_stage = run_host
    run_stage = run_stage or partial(run_stage_of_pipeline, order.gpus)
    return attempt_stage(run_stage, order, events, stop)


def attempt_stage(
    run_stage: StageRunner, order: Order, events: EventPipe, stop: threading.Event
) -> int:
    """Run the stage alone in its run folder and report its end. Returns the exit code."""
    run_dir = Path(order.run_dir)
    stage = order.stage
    deadline = time.monotonic() + LOCK_SECONDS

    def give_up() -> None:
        if stop.is_set() or time.monotonic() > deadline:
            held = f"{run_dir} is still held by an earlier process."
            raise Interrupted(held, "It will be tried again.")

    try:
        with storage_errors(run_dir):
            make_folder(run_dir)
        with (
            storage_errors(run_dir),
            # A process that lost its lease must not write beside its successor.
            locked(run_dir / LOCK, give_up),
        ):
            config = parse_config(order.config)
            home = Path(order.home)
            granted = order.confinement
            grant_limits(granted)
            limits = None if granted is None else Confinement.from_order(granted)
            # A link may have changed since the job was taken. The files themselves are checked by
            # the stage.
            require_no_problems(config, Folders(Path(), None, limits))
            client = None  # this process captures alone
            if order.answers is not None:
                client = RangeClient(events.send, order.answers, order.shared)
            monitor = Monitor(
                events.send, stop.is_set, patient=False, ranges=client, host=order.host
            )
            with confined_datasets(limits):
                result = run_stage(stage, config, home, run_dir, monitor, order.turn)
    except WorkHeldByAnother as error:
        events.send(Event("elsewhere", {"lock": str(error.lock)}))
        return EXIT_HELD
    except Interrupted as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_STOPPED
    except RankLost as error:
        # The supervisor judges how a process ended: this one ends as the rank did.
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), error.signum)
        return EXIT_FAILED
    except Exception as error:
        traceback.print_exc()
        events.send(Event("error", describe_error(error)))
        return EXIT_PASSING if is_passing(error) else EXIT_FAILED
    events.send(Event("result", result))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
