"""The service under hundreds of real faults: what it promised is checked, and how fast it got over them is printed.

    python bench/chaos.py [--faults 500] [--jobs 200] [--demo-faults 30] [--outage 300] [--seed 1] [--workers 3]

soak      jobs that write real shards, some of which share a cache, wait for another, are poison; meanwhile children,
          workers, hosts, Redis and API are killed, stopped and terminated, hints doubled, jobs cancelled, paused and
          retried; then every job must be in its right state, every shard, step and student as an undisturbed run has
          it, nothing done twice, no process left
demo      the example job of examples/austen, under the same faults: the same student, the same cache, to the bit
outage    Redis is stopped in the middle of that job's training: it goes on, in attempt 1, and its history is complete

recovery  of a child, worker or host: from the fault until the job's next useful write (in the demo: until its next
          news), without the time that it stood in the queue behind others; of Redis or API: from when its cause was
          gone until /readyz says yes. Of a fault with no work under way, or on a job that a client stopped as well,
          there is none.

Exit code 1 where anything was not as promised. A seed gives the same plan; what it meets is up to the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kd.jobfile import load_config  # noqa: E402
from tests.chaos import Cluster, Plan, Soak  # noqa: E402
from tests.judge import Verdict, render  # noqa: E402
from tests.real_job import Ordeal, outage  # noqa: E402

EXAMPLE = ROOT / "examples" / "austen" / "job.yaml"
SHOWN = 40


def say(line: str) -> None:
    """To who waits."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def running(workers: int, child: str) -> Iterator[tuple[Cluster, Path]]:
    """A cluster in a folder of its own, which stays where something went wrong, and an empty folder beside it."""
    folder = Path(tempfile.mkdtemp(prefix="potstill-chaos-"))
    say(f"data and logs: {folder}")
    cluster = Cluster(folder / "home", workers, child)
    try:
        yield cluster, folder / "spare"
    finally:
        cluster.close()


def soak(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The table of the light jobs, and what was not as promised."""
    with running(arguments.workers, "tests.light_child") as (cluster, spare):
        jobs = Soak(cluster, Plan(arguments.faults, arguments.jobs, arguments.seed))
        try:
            jobs.run(say)
        finally:
            jobs.close()
        verdict = Verdict(jobs, spare)
        title = f"## {len(jobs.chaos.injuries)} faults, {len(jobs.orders)} light jobs, seed {arguments.seed}"
        return f"{title}\n\n{render(verdict.rows(), verdict.summary())}\n", verdict.violations


def demo(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The tables of the real job under faults and through a long outage, and what was not as promised."""
    with running(1, "services.worker.child") as (cluster, _):
        ordeal = Ordeal(cluster, load_config(EXAMPLE), arguments.seed)
        try:
            ordeal.undisturbed()
            say(f"the example takes {ordeal.seconds:.0f} s undisturbed")
            ordeal.run(arguments.demo_faults, (0.5, max(2.0, ordeal.seconds / 12)))
        finally:
            ordeal.close()
        table = f"## The example job\n\n{render(ordeal.rows(), ordeal.summary())}\n"
        found = ordeal.violations
        if arguments.outage:
            more = list(outage(cluster, longer(ordeal, arguments.outage), arguments.outage))
            kept = "not all as promised" if more else "the training went on, attempt 1, history complete"
            table += f"- Redis away for {arguments.outage:.0f} s in the middle of it: {kept}\n"
            found = [*found, *more]
        return table, found


def longer(ordeal: Ordeal, seconds: float):  # type: ignore[no-untyped-def]
    """The example, with steps enough to train for half as long again."""
    assert ordeal.config.train is not None and ordeal.config.train.max_steps is not None
    steps = ordeal.config.train.max_steps * (1 + 2 * 1.5 * seconds / ordeal.seconds)
    return load_config(EXAMPLE, [f"train.max_steps={round(steps)}", "train.logging_steps=5"])


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--demo-faults", type=int, default=30)
    parser.add_argument("--outage", type=float, default=300.0, help="seconds; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the table, too")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parts = [soak(arguments)] if arguments.faults else []
    parts += [demo(arguments)] if arguments.demo_faults else []
    text, violations = "\n".join(table for table, _ in parts), [line for _, found in parts for line in found]
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    for line in violations[:SHOWN]:
        say(f"VIOLATION {line}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
