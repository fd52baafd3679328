"""A rank that does what the name of its job says, without torch: ``python -m ... FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from kd.errors import ConfigError, Interrupted, NotFinite, Problem
from kd.parallel.children import has_stdin_ended
from kd.parallel.launch import RankOrder, run_in_ranks
from kd.parallel.parent_death import PARENT_VARIABLE, die_with_parent
from kd.parallel.rank_failures import write_failure
from kd.progress import Event, EventPipe, Monitor

MODULE = "tests.support.kd.sharing.scripted_rank"
#: Seconds after which a rank that waits gives up.
PATIENCE = 60.0


def launch(name: str, folder: Path, monitor: Monitor | None = None) -> dict[str, object]:
    """Run two such ranks, whose job has this name; the run folder is ``folder``."""
    order = RankOrder("train", {"name": name}, str(folder), str(folder))
    return run_in_ranks(order, 2, monitor or Monitor(), MODULE)


def wait_for_stop() -> None:
    """Wait until the end of stdin asks to stop."""
    deadline = time.monotonic() + PATIENCE
    while not has_stdin_ended() and time.monotonic() < deadline:
        time.sleep(0.05)


def act(name: str, rank: int) -> None:
    """Do what ``name`` says; a rank that nothing is said of waits for the end."""
    match name, rank:
        case "succeed", _:
            return
        case "refuse", 1:
            raise ConfigError([Problem("/train/order", "it is wrong.", "Change it.")])
        case "diverge", 0:
            raise NotFinite("the loss is nan.", "Lower the rate.")
        case "break", 1:
            raise ValueError("no such thing")
        case "die", 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop", _:
            wait_for_stop()
            raise Interrupted("Stopped on request at step 3.", "Run it again.")
    time.sleep(PATIENCE)


def main() -> None:
    """Act, report as ``kd.rank`` does, and end."""
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    events = EventPipe()
    sys.stdout.write("what a rank prints is no event\n")
    name = RankOrder.read(folder).config["name"]
    (Path(RankOrder.read(folder).run_dir) / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 0:
        events.send(Event("progress", {"done": 1}))
    try:
        act(name, rank)
    except Exception as error:
        write_failure(folder, rank, error)
        os._exit(1)
    if rank == 0:
        events.send(Event("result", {"answer": 42, "wild": float("nan")}))


if __name__ == "__main__":
    main()
