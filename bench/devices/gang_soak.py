"""Light jobs on one to four hosts, while processes are killed; and a watch for hosts that idle."""

from __future__ import annotations

import contextlib
import threading
import time

from redis.exceptions import RedisError

from bench.support.faults import FaultInjector, RequestedJob, Soak, make_light_body

#: The largest number of hosts of a job.
MOST_HOSTS = 4
#: A job that gathered in vain rests for 10 s, and the lease of a dead worker ends after 2 s. Longer
#: than that and a few turns, no host may idle while a job waits that fits.
IDLE_SECONDS = 20.0
WATCH_SECONDS = 0.25

#: The faults of a gang: those that end processes, and those that a client asks for.
KINDS = {
    kind: FaultInjector.KINDS[kind]
    for kind in (
        "child killed",
        "child terminated",
        "worker killed",
        "worker terminated",
        "worker stopped",
        "Redis killed",
        "cancelled",
        "paused, resumed",
    )
}


class GangSoak(Soak):
    """Posts jobs whose training runs on one to four hosts."""

    def _next_order(self, number: int) -> RequestedJob:
        name = f"light-{number}-{3 + number % 4}-{50 + 10 * (number % 5)}"
        resources = {"hosts": 1 + number % MOST_HOSTS}
        body = make_light_body(self.cluster.inputs, name, resources=resources)
        body["train"]["batch_size"] = 12  # one to four hosts share it equally
        return RequestedJob(f"gang-{self.plan.seed}-{number}", body)


class IdleWatch:
    """Looks all the time whether as many workers idle as a waiting job needs; in its own thread.

    ``longest`` is the longest time in seconds for which the same job waited in vain, and ``job``
    is that job.
    """

    def __init__(self, soak: Soak) -> None:
        self.longest, self.job = 0.0, ""
        self._soak = soak
        self._since: dict[str, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="idle-watch")
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(WATCH_SECONDS):
            with contextlib.suppress(RedisError):
                self._look()

    def _look(self) -> None:
        cluster = self._soak.cluster
        # A worker that was killed is listed until its heartbeat expires.
        alive = {process.pid for process in list(cluster.processes.values())}
        workers = cluster.parts.jobs.list_workers()
        idle = sum(each.pid in alive and not each.job for each in workers)
        now = time.monotonic()
        waits = {
            each.id for each in list(self._soak.orders) if 0 < self._count_missing(each) <= idle
        }
        self._since = {each: self._since.get(each, now) for each in waits}
        for each, since in self._since.items():
            if now - since > self.longest:
                self.longest, self.job = now - since, each

    def _count_missing(self, order: RequestedJob) -> int:
        """The workers that a job needs to begin its stage; 0 if it does not wait for any."""
        store = self._soak.cluster.parts.jobs
        job = store.get(order.id)
        wanted: int = order.body["resources"]["hosts"]
        if job is not None and job.status == "queued":
            return wanted if job.stage == "train" else 1
        hosts, begun = store.redis.hmget(f"kd:job:{order.id}:ranges", "hosts", "key")
        if not hosts or begun:
            return 0
        return wanted - int(store.redis.zcard(f"kd:job:{order.id}:ranges:ends"))

    def close(self) -> None:
        """Stop looking."""
        self._closing.set()
        self._thread.join()
