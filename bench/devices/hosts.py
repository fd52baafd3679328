"""Run the service on several hosts, hurt them and the network between them, and check every job.

    python bench/devices/hosts.py [--faults 30] [--seed 1]
    python bench/devices/hosts.py --training [--steps 200] [--faults 10]
    python bench/devices/hosts.py --scaling [--quick] [--out FILE]

Job store, API and three workers run in network namespaces of this machine, with one file system and
clocks that are wrong by up to an hour. Links are cut and slowed, hosts are frozen and killed, the
job store is killed, clocks jump. At the end every job must have succeeded, every shard, step and
student must equal those of an undisturbed run, nothing may have been done twice, and no process may
be left over. Exits with code 1 if not. Needs root on Linux, `ip` and `tc`.

With ``--training`` a student is trained on two of the three hosts, by each strategy, while ranks,
children and workers are killed, hosts are cut off, and the job store is killed.

With ``--scaling`` it prints the bytes that hosts send in a training step, and the speed of two and
four hosts over slow links, beside the formulas (``bench.devices.host_scaling``).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from itertools import chain
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.devices.host_scaling import print_tables
from bench.speed import name_machine
from bench.support.hosts import GANG_FAULTS, run_faults, run_gang


def say(line: str) -> None:
    """Print progress to stderr, so that stdout holds the result alone."""
    print(line, file=sys.stderr, flush=True)


def print_training(folder: Path, steps: int, faults: tuple[str, ...]) -> None:
    """Print the times of a training on two hosts of two ranks each, by each strategy."""
    print("| strategy | gather, s | attempts | loss, to one host | student, to one unhurt |")
    print("|---|--:|--:|--:|--:|")
    restarts: dict[str, list[float]] = {}
    for strategy in ("ddp", "fsdp"):
        found = run_gang(folder / strategy, steps, strategy, say, faults, gpus=2)
        for kind, seconds in found.restarts:
            restarts.setdefault(kind, []).append(seconds)
        differences = f"{found.loss:.1e} | {found.student:.1e}"
        print(f"| {strategy} | {found.gather:.1f} | {found.attempts} | {differences} |")
    print("\n| fault | times | seconds until it was further on: median | most |")
    print("|---|--:|--:|--:|")
    for kind, all_of in restarts.items():
        print(f"| {kind} | {len(all_of)} | {median(all_of):.1f} | {max(all_of):.1f} |")


def print_scaling(quick: bool, out: Path | None) -> None:
    """Print the tables of bytes and speed, and also write them to ``out``."""
    lines = []
    for line in chain((f"Machine: {name_machine()}", ""), print_tables(quick)):
        print(line, flush=True)
        lines.append(line)
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small tables in seconds")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    if arguments.scaling:
        print_scaling(arguments.quick, arguments.out)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="potstill-hosts-"))
    say(f"data and logs: {folder}")
    if arguments.training:
        # Each kind in turn: a seed decides which of them come once more.
        dice = random.Random(arguments.seed)
        kinds = [*GANG_FAULTS, *dice.choices(GANG_FAULTS, k=max(arguments.faults, 0))]
        print_training(folder, arguments.steps, tuple(kinds[: arguments.faults]))
        return 0
    struck, found = run_faults(folder, arguments.faults, arguments.seed, say)
    jobs = struck.pop("jobs")
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(struck.items()))
    print(f"{struck.total()} faults ({kinds}), {jobs} jobs: {len(found)} violations")
    for line in found:
        say(f"VIOLATION {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
