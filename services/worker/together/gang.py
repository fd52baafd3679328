"""The hosts of one training: a worker leads and gathers others, whose children meet its own.

    leader   claims the job, opens a table (``services.store.jobs.gangs``), waits for all members,
             and starts the stage; run_dir/hosts.json has its place, for those who share it
    member   waits until the ranks of the leader have their order, and runs those of its own host

A member that dies, fails or loses its lease ends the attempt on all hosts.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import ClassVar
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from kd.config.job import JobConfig
from kd.config.kinds import TRAIN
from kd.files import write_json
from kd.progress import HostPlace
from kd.python.version import read_version
from services.process.lasting_loops import BlockLoop
from services.settings import Settings
from services.store.embedded import find_free_port
from services.store.jobs.gangs import GangBeat, GangTable
from services.store.jobs.leases import (
    BEAT_SECONDS,
    BEATS_PER_LEASE,
    Capacity,
    Claim,
    EventBatch,
)
from services.store.jobs.store import JobStore
from services.store.ranges import Membership, SharedTerms

#: Seconds for which a leader waits for members.
GATHER_SECONDS = 60.0
#: Seconds after which it begins with fewer, if its job allows that.
FILL_SECONDS = 5.0
#: Seconds that the ranks have to tell why they failed, after a member is lost.
LAST_WORDS_SECONDS = 10.0
#: The file in the run folder with the place of the leader.
HOSTS_FILE = "hosts.json"
#: A beat without events.
_NO_EVENTS = EventBatch(0, ())

log = logging.getLogger("potstill.worker")


@dataclass(eq=False)
class GangMember(BlockLoop):
    """Keeps the membership of a worker alive, with a lease in seconds; ``last`` is the answer."""

    _table: GangTable
    _lease: float
    _member: Membership
    last: GangBeat = field(default_factory=lambda: GangBeat("wait"))
    _lost_at: float = 0.0

    loop: ClassVar[str] = "gang"

    @property
    def is_over(self) -> bool:
        """Whether the ranks of this host can only be ended."""
        lost = self.last.reply == "lost" and time.monotonic() - self._lost_at > LAST_WORDS_SECONDS
        return lost or self.last.reply == "fenced"

    def await_loss(self, seconds: float) -> None:
        """Wait until a member is known to be lost, for ``seconds`` at most.

        A rank that has lost the others fails at once, and the lease of a dead worker ends later.
        """
        end = time.monotonic() + seconds
        while self.last.reply == "go" and time.monotonic() < end:
            time.sleep(0.1)

    def leave(self, warning: str = "") -> None:
        """End the membership, if Redis answers; else its lease runs out."""
        with suppress(RedisError):
            self._table.leave(self._member, warning)

    def _run(self) -> None:
        while not self._closing.is_set() and self.last.reply != "fenced":
            with suppress(RedisError):
                found = self._table.beat_gang(self._member, self._lease)
                self._contact = time.monotonic()
                if found.reply == "lost" != self.last.reply:
                    self._lost_at = time.monotonic()
                self.last = found
            self._closing.wait(min(BEAT_SECONDS, self._lease / BEATS_PER_LEASE))


def find_terms(settings: Settings) -> SharedTerms:
    """Return the version, and the bucket or the folder of runs, which all of a gang must share."""
    place = str(settings.store) if settings.keeps_runs else str(settings.home)
    return SharedTerms(read_version(), place)


def find_host_counts(config: JobConfig, stage: str) -> range:
    """Return the numbers of hosts that a stage of a job may run on."""
    return config.resources.host_counts if stage == TRAIN.name else range(1, 2)


def find_address(settings: Settings) -> str:
    """Return KD_HOST_ADDRESS, or the address from which this host reaches the job store."""
    if settings.host_address is not None:
        return settings.host_address
    # Of several sentinels the first; a socket of the file system is on this host.
    place = urlsplit(settings.redis_url or "").netloc.rpartition("@")[2].partition(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.rpartition(":")[0] or place or "127.0.0.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def gather(
    store: JobStore,
    settings: Settings,
    claim: Claim,
    worker: str,
    capacity: Capacity,
    hosts: range,
    stopping: threading.Event,
    call: Callable[[], None],
) -> tuple[Membership, HostPlace] | None:
    """Wait until the most of ``hosts`` are there; None if too few came, or if the job stops.

    After ``FILL_SECONDS`` the least of them are enough. ``call`` calls for them, and they can read
    the place of the leader in run_dir/hosts.json afterwards. Raises ``RedisError``.
    """
    table, lease = GangTable(store.redis), settings.lease_seconds
    member = table.open_gang(claim, worker, lease, find_terms(settings), hosts[-1])
    if member is None:
        return None
    run_dir = settings.run_dir(claim.id)
    run_dir.mkdir(parents=True, exist_ok=True)
    address, key = find_address(settings), secrets.token_hex(16)
    call()
    begin, interval = time.monotonic(), min(BEAT_SECONDS, lease / BEATS_PER_LEASE)
    while store.beat(claim, lease, _NO_EVENTS) == "go":
        waited = time.monotonic() - begin
        enough = hosts[0] if waited > FILL_SECONDS else hosts[-1]
        endpoint = f"{address}:{find_free_port(address)}"
        answer = table.begin(member, lease, capacity, f"{endpoint} {key}", enough)
        if isinstance(answer, int):
            shared = "" if settings.keeps_runs else str(run_dir)
            place = HostPlace(0, answer, endpoint, key, address, shared)
            write_json(run_dir / HOSTS_FILE, asdict(place))
            return member, place
        if answer != "wait" or waited > GATHER_SECONDS or stopping.wait(interval):
            break
    return None
