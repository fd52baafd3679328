"""Starts the ranks of a job by torchrun, relays what they report, and ends them.

    this process --> torchrun (agent.py) --> rank 0, rank 1, ...

    run_dir/ranks/    order.json, and why ranks failed; it exists while they run. All hosts that
                      share the stage see it, or each has its own
    stdin             this process writes nothing; its end asks every rank to save and to stop
    stdout            rank 0 writes its events, and its result as the last one

If this process ends, however it ends, the kernel kills torchrun, and with it the ranks (Linux).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from cache.disk import make_folder, remove_path, storage_errors
from cache.json_object import Json
from kd.errors import RankLost, TrainingError
from kd.files import RANKS, read_json, write_json
from kd.parallel.agent import END_SIGNAL, FAILURES, ONLY_HOST
from kd.parallel.children import build_path, relay_events
from kd.parallel.rank_failures import RankError, read_first_failure
from kd.parallel.standing import find_standing_ranks
from kd.progress import Event, HostPlace, Monitor

#: The module of a rank; it is above this one, because it runs the pipeline.
RANK_MODULE = "kd.rank"
#: Seconds for which a host tries to reach the leader.
REACH_SECONDS = 300.0
#: From where a job goes on.
KEPT = "it continues from its newest checkpoint, or after its last sealed shard"


@dataclass(frozen=True)
class RankOrder:
    """The work of all ranks: a stage of a job, the folder of caches, and the run folder.

    ``key`` is that of the hosts that share the stage (``kd.progress.HostPlace``). ``apart``: they
    share no folder, and each has an order of its own.
    """

    stage: str
    config: Json
    home: str
    run_dir: str
    key: str = ""
    apart: bool = False

    @classmethod
    def read(cls, folder: Path) -> RankOrder:
        """Read the order that ``run_in_ranks`` wrote."""
        return cls(**read_json(folder / "order.json"))


def run_in_ranks(order: RankOrder, count: int, monitor: Monitor, module: str = RANK_MODULE) -> Json:
    """Run ``order`` in ``count`` ranks, and return the result of rank 0.

    If this process was started as one of that many, none is started. If several hosts share the
    stage, each starts its part of them.
    Raises the error of the rank that failed first: ``Interrupted`` after a stop, and ``RankLost``
    where a rank was killed.
    """
    if (ranks := find_standing_ranks()) is not None:
        return ranks.run(asdict(order), monitor)
    host = monitor.host
    folder = Path(order.run_dir) / RANKS
    results: list[Json] = []

    def listen(event: Event) -> None:
        if event.type == "result":
            results.append(event.data)
        else:
            monitor.listen(event)

    with _giving_order(folder, order, host):
        with _running_agent(folder, count, module, host) as process:
            relay_events(process, listen, monitor.should_stop)
            code = process.wait()
        if code == 0 and results:
            return results[-1]
        raise _find_error(folder, code)


def join_ranks(
    order: RankOrder, count: int, monitor: Monitor, host: HostPlace, module: str = RANK_MODULE
) -> None:
    """Run the ranks of ``host``, which does not lead; there are ``count`` on all hosts.

    They follow the order of the leader, or their own ``order`` if the hosts share no folder. Raises
    as ``run_in_ranks`` does, and ``TrainingError`` if the leader cannot be reached.
    """
    require_reachable(host)
    folder = Path(host.run_dir or order.run_dir) / RANKS
    with _giving_order(folder, order, host) if not host.run_dir else nullcontext():
        with _running_agent(folder, count, module, host) as process:
            relay_events(process, monitor.listen, monitor.should_stop)
            code = process.wait()
        if code:
            raise _find_error(folder, code)


@contextmanager
def _giving_order(folder: Path, order: RankOrder, host: HostPlace | None) -> Iterator[None]:
    """Let the ranks find ``order`` in ``folder`` for the length of the block."""
    if host is not None:
        order = replace(order, key=host.key, apart=not host.run_dir)
    with storage_errors(folder):
        remove_path(folder)  # an earlier process may have been killed
        make_folder(folder)
    try:
        write_json(folder / "order.json", asdict(order))
        yield
    finally:
        remove_path(folder)


def name_interface(address: str) -> dict[str, str]:
    """Return the variables that let ranks use the network interface that has ``address``.

    Raises ``TrainingError`` if none has.
    """
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    detail = f"No network interface of this host has the address {address}."
    raise TrainingError(detail, "Set KD_HOST_ADDRESS to one that the other hosts can reach.")


def require_reachable(host: HostPlace) -> None:
    """Wait until the leader of ``host`` answers; raise ``TrainingError`` if it does not."""
    address, _, port = host.endpoint.rpartition(":")
    end = time.monotonic() + REACH_SECONDS
    while True:
        try:
            with socket.create_connection((address, int(port)), timeout=10):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TrainingError(
                    f"This host ({host.address}) cannot reach the host that leads the job at "
                    f"{host.endpoint}: {error}.",
                    "Open the ports between the hosts, or set KD_HOST_ADDRESS on each to an "
                    "address that the others reach.",
                ) from None
            time.sleep(1.0)


@contextmanager
def _running_agent(
    folder: Path, count: int, module: str, host: HostPlace | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run torchrun for the length of the block; it is killed where the block raises."""
    # -P keeps the working folder out of the path: it may hold a folder named kd.
    command = [sys.executable, "-P", "-m", "kd.parallel.agent"]
    place = json.dumps(asdict(host or ONLY_HOST))
    variables = {"PYTHONPATH": build_path(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, str(folder), str(count), module, str(os.getpid()), place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | variables | (name_interface(host.address) if host else {}),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _find_error(folder: Path, code: int) -> Exception:
    """The error that ended the ranks, from what they and torchrun have written."""
    found = [read_json(path) or {} for path in sorted(folder.glob(FAILURES.format("*")))]
    codes = {rank: code for each in found for rank, code in each.items()}
    # By END_SIGNAL torchrun has ended the ranks that were left.
    killed = {rank: -each for rank, each in codes.items() if each < 0 and -each != END_SIGNAL}
    if killed:
        rank, signum = min(killed.items())
        return RankLost(
            f"Process {rank} of those that share the stage was killed by "
            f"{signal.Signals(signum).name}, so that all of them ended.",
            f"Run the same job again: {KEPT}. SIGKILL often means that memory ran out.",
            signum,
        )
    if code < 0:
        return RankLost(
            f"torchrun was killed by {signal.Signals(-code).name}, and the ranks with it.",
            f"Run the same job again: {KEPT}.",
            -code,
        )
    return read_first_failure(folder) or RankError(
        f"the ranks ended without a result (exit codes {codes or code}); the log says why"
    )
