"""One of the processes that share a stage of a job: ``python -m kd.rank FOLDER``.

torchrun starts it (kd/parallel/agent.py). FOLDER holds the order. Rank 0 writes its events to
stdout as JSON lines, and its result as the last one. The end of stdin asks to save and to stop.
What a rank prints goes to stderr, which is the log of the run.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kd.parallel.parent_death import PARENT_VARIABLE, die_with_parent
from kd.progress import Event, EventPipe, Monitor

if TYPE_CHECKING:
    from cache.json_object import Json
    from kd.parallel.launch import RankOrder


def main() -> None:
    """Do this rank's part of a stage, and end the process."""
    run_rank(run_order)


def run_rank(work: Callable[[RankOrder, Monitor], Json]) -> None:
    """Do ``work`` for the order, report its result or its error, and end the process."""
    # Before the imports, which take seconds: torchrun may be killed meanwhile.
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    from kd.errors import Interrupted
    from kd.parallel.launch import RankOrder
    from kd.parallel.rank_failures import write_failure

    rank = int(os.environ["RANK"])
    folder = Path(sys.argv[1])
    events = EventPipe()
    listen: Callable[[Event], None] = events.send if rank == 0 else (lambda event: None)
    code = 0
    try:
        result = work(RankOrder.read(folder), Monitor(listen, has_stdin_ended, patient=False))
        listen(Event("result", result))
    except Exception as error:
        if not isinstance(error, Interrupted):
            traceback.print_exc()
        write_failure(folder, rank, error)
        code = 1
    sys.stderr.flush()
    # Not by sys.exit: threads of a group whose other ranks are gone would keep this process.
    os._exit(code)


def run_order(order: RankOrder, monitor: Monitor) -> Json:
    """Join the other ranks and run the stage with them; returns the result, on rank 0."""
    from kd.config.jobfile import parse_config
    from kd.config.kinds import CAPTURE, TRAIN
    from kd.models.loading import hide_progress_bars
    from kd.parallel.group import join_group
    from kd.preflight.confinement import confined_datasets
    from kd.preflight.limits import read_granted_limits
    from kd.stages.capture import share_capture
    from kd.stages.training import run_training

    hide_progress_bars()
    run = {CAPTURE.name: share_capture, TRAIN.name: run_training}[order.stage]
    config = parse_config(order.config)
    with confined_datasets(read_granted_limits()):
        return run(config, Path(order.home), Path(order.run_dir), monitor, join_group()).to_json()


def has_stdin_ended() -> bool:
    """Whether stdin has ended. Nothing is ever written to it, so readable means the end."""
    return bool(select.select([0], [], [], 0)[0])


if __name__ == "__main__":
    main()
