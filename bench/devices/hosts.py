"""Run the service on several hosts, hurt them and the network between them, and check every job.

    python bench/devices/hosts.py [--faults 30] [--seed 1]

Job store, API and three workers run in network namespaces of this machine, with one file system and
clocks that differ by up to half an hour. Links are cut and slowed, hosts are frozen and killed, the
job store is killed, clocks jump. At the end every job must have succeeded, every shard, step and
student must equal those of an undisturbed run, nothing may have been done twice, and no process may
be left over. Exits with code 1 if not. Needs root on Linux, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.support.hosts import run_faults


def say(line: str) -> None:
    """Print progress to stderr, so that stdout holds the result alone."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="potstill-hosts-"))
    say(f"data and logs: {folder}")
    struck, found = run_faults(folder, arguments.faults, arguments.seed, say)
    jobs = struck.pop("jobs")
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(struck.items()))
    print(f"{struck.total()} faults ({kinds}), {jobs} jobs: {len(found)} violations")
    for line in found:
        say(f"VIOLATION {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
