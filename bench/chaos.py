"""Inject hundreds of faults into the service, check its promises, and print how fast it recovers.

    python bench/chaos.py [--faults 500] [--jobs 200] [--bucket-faults 500] [--gangs 50]
                          [--demo-faults 30] [--outage 300] [--seed 1] [--workers 3] [--devices 1]
                          [--out FILE]

soak      Jobs write real shards. Some share a cache, some wait for another job, some always die; of
          some of them several workers capture the cache together.
          Meanwhile children, workers, hosts, Redis and the API are killed, stopped and terminated,
          hints are doubled, and jobs are cancelled, paused and retried. At the end every job must
          be in its right state, every shard, step and student must equal those of an undisturbed
          run, nothing may have been done twice, and no process may be left over.
bucket    The same with all caches in a bucket, a real S3 server behind a proxy. Among the faults
          are those of the bucket: refused, throttled, slow, cut and shortened answers, and requests
          that were carried out although their answer is lost.
gangs     Jobs train on one to four of six workers, which are killed meanwhile. Each step waits for
          all hosts of a job. No job may run twice at once, and no worker may idle for 20 s while a
          job waits that fits.
demo      The job of examples/austen runs under the same faults. Its student and its cache must be
          the same, bit for bit. With --devices 2 two processes train the student together.
outage    Redis is stopped in the middle of that job's training. The training must continue in
          attempt 1, and its history must be complete.

recovery  After a fault of a child, worker or host: seconds from the fault until the job's next
          useful write (in the demo: its next event), without the time that the job waits in the
          queue behind others. After a fault of Redis or the API: seconds from the end of the fault
          until /readyz succeeds. A fault that met no work, or a job that a client stopped as well,
          has no recovery.

Exits with code 1 if a promise was broken. A seed fixes the plan of the faults; what each of them
meets depends on the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.support.paths import ROOT

sys.path.insert(0, str(ROOT))

from bench.devices.gang_soak import IDLE_SECONDS, KINDS, GangSoak, IdleWatch
from bench.stores.storm import BucketFaultInjector, stormy_bucket
from bench.support.faults import Cluster, FaultInjector, Soak, SoakPlan
from bench.support.judge import SoakVerdict, read_ledgers, render_recoveries
from bench.support.real_job import DisturbedRuns, run_outage
from kd.config.job import JobConfig
from kd.config.jobfile import load_config

EXAMPLE = ROOT / "examples" / "austen" / "job.yaml"
LIGHT = "bench.support.light_child"
VIOLATIONS_SHOWN = 40
#: The workers on which the gangs run.
GANG_WORKERS = 6


def say(line: str) -> None:
    """Print progress to stderr, so that stdout holds the tables alone."""
    print(line, file=sys.stderr, flush=True)


def make_folder() -> Path:
    """Make the folder of one part; it stays for inspection."""
    folder = Path(tempfile.mkdtemp(prefix="potstill-chaos-"))
    say(f"data and logs: {folder}")
    return folder


@contextmanager
def running(
    workers: int, child: str, folder: Path | None = None, **settings: Any
) -> Iterator[tuple[Cluster, Path]]:
    """Yield a running cluster and an empty folder."""
    folder = folder or make_folder()
    cluster = Cluster(folder / "home", workers, child, **settings)
    try:
        yield cluster, folder / "spare"
    finally:
        cluster.close()


def run_soak(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Run the light jobs under faults; returns their table and the violations."""
    with running(arguments.workers, LIGHT) as (cluster, spare):
        plan = SoakPlan(arguments.faults, arguments.jobs, arguments.seed)
        return judge_soak(Soak(cluster, plan), spare, "")


def run_bucket_soak(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Run the light jobs with their caches in a bucket that is hurt too."""
    folder = make_folder()
    (folder / "server").mkdir()
    with stormy_bucket(folder / "server", arguments.seed) as bucket:
        os.environ.update(bucket.environment)
        with running(arguments.workers, LIGHT, folder, store=bucket.address) as (cluster, spare):
            share = arguments.bucket_faults / arguments.faults if arguments.faults else 1.0
            jobs = round(arguments.jobs * share)
            plan = SoakPlan(arguments.bucket_faults, jobs, arguments.seed)
            chaos = BucketFaultInjector(cluster, arguments.seed, bucket)
            return judge_soak(Soak(cluster, plan, chaos), spare, ", caches in a bucket")


def run_gang_soak(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Run light jobs on several hosts under faults; returns their table and the violations."""
    with running(GANG_WORKERS, LIGHT) as (cluster, spare):
        plan = SoakPlan(arguments.gangs, arguments.gangs, arguments.seed, backlog=8)
        soak = GangSoak(cluster, plan, FaultInjector(cluster, arguments.seed, KINDS))
        watch = IdleWatch(soak)
        try:
            table, found = judge_soak(soak, spare, ", on one to four hosts each")
        finally:
            watch.close()
        joined = sum(line.what == "join" for line in read_ledgers(cluster.home))
    table += f"- members that joined a gang: {joined}\n"
    table += f"- the longest time that a job waited beside idle workers: {watch.longest:.1f} s\n"
    if watch.longest > IDLE_SECONDS:
        found.append(f"{watch.job} waited for {watch.longest:.0f} s beside idle workers")
    return table, found


def judge_soak(jobs: Soak, spare: Path, where: str) -> tuple[str, list[str]]:
    """Run a soak; returns its table and the violations."""
    try:
        jobs.run(say)
    finally:
        jobs.close()
    verdict = SoakVerdict(jobs, spare)
    faults = len(jobs.chaos.injuries)
    title = f"## {faults} faults, {len(jobs.orders)} light jobs{where}, seed {jobs.plan.seed}"
    table = render_recoveries(verdict.rows(), verdict.summary())
    return f"{title}\n\n{table}\n", verdict.violations


def run_demo(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Run the real job under faults and through a long outage; returns table and violations."""
    with running(1, "services.worker.stage_child") as (cluster, _):
        runs = DisturbedRuns(cluster, load_example(arguments.devices), arguments.seed)
        try:
            runs.run_undisturbed()
            say(f"the example takes {runs.seconds:.0f} s undisturbed")
            runs.run(arguments.demo_faults, (0.5, max(2.0, runs.seconds / 12)))
        finally:
            runs.close()
        table = f"## The example job\n\n{render_recoveries(runs.rows(), runs.summary())}\n"
        found = runs.violations
        if arguments.outage:
            more = list(run_outage(cluster, lengthen_job(runs, arguments.outage), arguments.outage))
            kept = (
                "not all as promised"
                if more
                else "the training went on, attempt 1, history complete"
            )
            table += f"- Redis away for {arguments.outage:.0f} s in the middle of it: {kept}\n"
            found = [*found, *more]
        return table, found


def lengthen_job(runs: DisturbedRuns, seconds: float):  # type: ignore[no-untyped-def]
    """The example with more steps, so that its training outlasts the outage."""
    assert runs.config.train is not None and runs.config.train.max_steps is not None
    steps = runs.config.train.max_steps * (1 + 2 * 1.5 * seconds / runs.seconds)
    more = [f"train.max_steps={round(steps)}", "train.logging_steps=5"]
    return load_example(runs.config.resources.gpus or 1, more)


def load_example(devices: int, changes: list[str] | None = None) -> JobConfig:
    """Load the example's job, for so many devices of a CPU."""
    wanted = [f"resources.gpus={devices}"] if devices > 1 else []
    return load_config(EXAMPLE, [*wanted, *(changes or [])])


def main() -> int:
    """Run the parts that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument(
        "--bucket-faults", type=int, default=500, help="faults with the caches in a bucket"
    )
    parser.add_argument("--gangs", type=int, default=50, help="jobs on several hosts, and faults")
    parser.add_argument("--demo-faults", type=int, default=30)
    parser.add_argument(
        "--outage", type=float, default=300.0, help="seconds without Redis; 0 skips this part"
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="processes that train the example together"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The workers inherit it.
    os.environ["KD_DEVICES"] = ",".join(["cpu"] * arguments.devices)
    parts = [run_soak(arguments)] if arguments.faults else []
    parts += [run_bucket_soak(arguments)] if arguments.bucket_faults else []
    parts += [run_gang_soak(arguments)] if arguments.gangs else []
    parts += [run_demo(arguments)] if arguments.demo_faults else []
    text = "\n".join(table for table, _ in parts)
    violations = [line for _, found in parts for line in found]
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    for line in violations[:VIOLATIONS_SHOWN]:
        say(f"VIOLATION {line}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
