"""One of the processes that share a stage of a job, started by torchrun.

    python -m kd.rank FOLDER     by the torchrun of this service (kd/parallel/agent.py)
    torchrun ... -m kd.rank JOB  by another, on one host or on several

FOLDER holds the order. Rank 0 writes its events to stdout as JSON lines, and its result as the last
one. The end of stdin asks to save and to stop. What a rank prints goes to stderr, which is the log
of the run.

JOB is a job file, which rank 0 runs as ``kd run`` does; SIGTERM to all ranks saves and stops.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cache.errors import PotstillError
from kd.parallel.children import has_stdin_ended
from kd.parallel.parent_death import PARENT_VARIABLE, die_with_parent
from kd.progress import Event, EventPipe, Monitor

#: What a rank says when it has lost the others, whose own logs say more.
LOST = (
    "The ranks cannot go on together: one has ended, or its host cannot be reached. Start the same "
    "command on all hosts again: it continues from the newest checkpoint."
)
#: For so long the other ranks of a host leave it to the first one to say that.
TELL_SECONDS = 5.0

if TYPE_CHECKING:
    from cache.json_object import Json
    from kd.parallel.group import Group
    from kd.parallel.launch import RankOrder


def main() -> None:
    """Do this rank's part of a stage or of a job, and end the process."""
    if PARENT_VARIABLE in os.environ:
        run_rank(join_and_run)
    else:
        sys.exit(run_job_with_others())


def run_job_with_others() -> int:
    """Run the job of the command line with all ranks that torchrun has started."""
    parser = argparse.ArgumentParser(prog="kd.rank")
    parser.add_argument("job", help="the job file, the same on all hosts")
    parser.add_argument("--set", action="append", default=[], help="for example train.max_steps=10")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "torchrun starts it: torchrun --nnodes 2 --nproc-per-node 8 ... -m kd.rank JOB"
        )
    from kd.parallel.group import join_group, require_same_time
    from kd.parallel.standing import StandingRanks
    from kd.python.calls import run_job
    from kd.python.jobs import load_job
    from kd.python.running import stop_on_signals
    from kd.python.version import read_version

    # A rank that lost torchrun would wait for the others.
    die_with_parent(signal.SIGKILL)
    try:
        job = load_job(given.job, set=given.set)
        software = f"Potstill {read_version()}, "
        group = join_group(lasting=True, software=software)
        require_same_time(group)
        ranks = StandingRanks(group, run_here)
        if ranks.group.leads:
            with ranks.leading():
                run_job(job)
        else:
            with stop_on_signals(lambda line: None) as stop:
                ranks.follow(Monitor(should_stop=stop.is_set, patient=False))
    except (PotstillError, KeyboardInterrupt) as error:
        return _tell(str(error))
    except RuntimeError:
        traceback.print_exc()
        return _tell(LOST)
    return 0


def _tell(message: str) -> int:
    """Write why this host ended, once; returns its exit status."""
    if os.environ["LOCAL_RANK"] != "0":
        # torchrun ends this rank as soon as the first one of its host has told why.
        time.sleep(TELL_SECONDS)
    sys.stderr.write(f"{message}\n")
    return 1


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

    def listen(event: Event) -> None:
        # The first rank of another host shows that the ranks of that host are alive.
        if rank == 0 or (event.type == "alive" and os.environ["LOCAL_RANK"] == "0"):
            events.send(event)

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


def join_and_run(order: RankOrder, monitor: Monitor) -> Json:
    """Join the other ranks and run the stage with them; returns the result, on rank 0."""
    from kd.parallel.group import join_group

    group = join_group()
    if order.apart:
        # That of the leader: it has settled what the job leaves open.
        order = replace(order, config=group.share(order.config))
    return run_order(order, monitor, replace(group, apart=order.apart))


def run_here(order: Json, monitor: Monitor, group: Group) -> Json:
    """Run the stage of rank 0 with the folders of this host."""
    from kd.parallel.launch import RankOrder
    from kd.python.inputs import find_home

    own = RankOrder(**order)
    if not group.leads:
        home = find_home(None)
        own = replace(own, home=str(home), run_dir=str(home / "runs" / own.config["name"]))
    return run_order(own, monitor, group)


def run_order(order: RankOrder, monitor: Monitor, group: Group) -> Json:
    """Run the stage with the ranks of ``group``; returns the result, on rank 0."""
    from kd.config.jobfile import parse_config
    from kd.config.kinds import CAPTURE, TRAIN
    from kd.models.loading import hide_progress_bars
    from kd.preflight.confinement import confined_datasets
    from kd.preflight.limits import read_granted_limits
    from kd.stages.capture import share_capture
    from kd.stages.training import run_training

    hide_progress_bars()
    run = {CAPTURE.name: share_capture, TRAIN.name: run_training}[order.stage]
    config = parse_config(order.config)
    with confined_datasets(read_granted_limits()):
        return run(config, Path(order.home), Path(order.run_dir), monitor, group).to_json()


if __name__ == "__main__":
    main()
