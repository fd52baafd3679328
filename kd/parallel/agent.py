"""torchrun for the ranks of one job.

    python -m kd.parallel.agent FOLDER COUNT MODULE PARENT PLACE

It runs this host's part of COUNT processes ``python -m MODULE FOLDER``. PLACE is that of the host
among several (``kd.progress.HostPlace``), as JSON. As soon as a process fails it ends the others,
and writes FOLDER/failures-{number of the host}.json: {rank: exit code}, below 0 for the signal that
killed the rank. It ends with the process PARENT, which started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from kd.parallel.parent_death import PARENT_VARIABLE, die_with_parent
from kd.progress import HostPlace

FAILURES = "failures-{}.json"
#: Ends the ranks that are left after one has failed: they ignore SIGTERM.
END_SIGNAL = signal.SIGUSR1
#: The place of a host that shares its stage with no other. Port 0: a free one.
ONLY_HOST = HostPlace(0, 1, "127.0.0.1:0", "potstill", "127.0.0.1", "")
#: Seconds for which the hosts of a job wait for each other.
MEETING_SECONDS = 300
#: Seconds that the other ranks have to end themselves after one has failed.
SHUTDOWN_SECONDS = 2


def main() -> int:
    """Run the ranks; returns 0 if all of them succeeded."""
    folder, count, module, parent, place = sys.argv[1:]
    die_with_parent(signal.SIGKILL, int(parent))
    # Ctrl-C in a terminal, the end of the terminal, and SIGTERM to a whole group or service reach
    # this process and the ranks too, but the run is to save its state first: the process that
    # started this one asks for it. The ranks inherit this.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    # Only now, because the imports take seconds.
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torchrun has no option for the signal.
    api._get_default_signal = lambda: END_SIGNAL
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    host = HostPlace(**json.loads(place))
    size = int(count) // host.count
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // size, 1)))
    if host.count == 1 and sys.platform.startswith("linux"):
        # Its own name may not lead to this host.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=host.count,
        max_nodes=host.count,
        nproc_per_node=size,
        run_id=host.key,
        # Of several hosts each has its number already, and number 0 leads.
        rdzv_backend="static" if host.count > 1 else "c10d",
        rdzv_endpoint=host.endpoint,
        rdzv_configs={"rank": host.number, "timeout": MEETING_SECONDS},
        local_addr=host.address,
        max_restarts=0,
        signals_to_handle="SIGQUIT",
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-m", module, folder)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        (Path(folder) / FAILURES.format(host.number)).write_text(
            json.dumps(codes), encoding="utf-8"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
