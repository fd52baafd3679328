"""One stage of one run of an ablation, in a process of its own: ``python -m kd.experiments.child``.

A process of its own makes the peak of memory that of this run alone, and a run that dies leaves the
others alone. The argument is a folder with the order. Events go to stdout as JSON lines; the end of
stdin asks to save and to stop; what libraries print goes to stderr.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cache.disk import make_folder, remove_path, storage_errors
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import Interrupted, RankLost, TrainingError
from kd.files import read_json, write_json
from kd.parallel.children import build_path, relay_events
from kd.parallel.parent_death import PARENT_VARIABLE, die_with_parent
from kd.parallel.rank_failures import read_first_failure, write_failure
from kd.progress import EventPipe, Monitor
from kd.rank import has_stdin_ended

#: The folder in a run folder with the order and the error of its process.
FOLDER = "process"
LOG = "log.txt"


@dataclass(frozen=True)
class StageOrder:
    """A stage of a job. A trained student is also measured on the held-out text of ``measure_on``.

    That is the job with which all are compared, and ``records`` a run folder that knows its cache.
    """

    stage: str
    config: dict[str, Any]
    home: str
    run_dir: str
    measure_on: dict[str, Any] | None = None
    records: str = ""


def run_in_child(order: StageOrder, monitor: Monitor) -> None:
    """Do ``order`` in a new process, whose events ``monitor`` gets.

    Raises the error of the process, ``Interrupted`` after a stop, and ``RankLost`` where it was
    killed.
    """
    run_dir = Path(order.run_dir)
    folder = run_dir / FOLDER
    with storage_errors(folder):
        remove_path(folder)
        make_folder(folder)
    write_json(folder / "order.json", asdict(order))
    with (run_dir / LOG).open("ab") as log:
        process = subprocess.Popen(
            # -P keeps the working folder out of the path: it may hold a folder named kd.
            [sys.executable, "-P", "-m", "kd.experiments.child", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": build_path(), PARENT_VARIABLE: str(os.getpid())},
            # Ctrl-C is for the process that started this one, which then asks it to stop.
            start_new_session=True,
        )
        try:
            relay_events(process, monitor.listen, monitor.should_stop)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
    error = read_first_failure(folder)
    remove_path(folder)
    if error is not None:
        raise error
    if code < 0:
        detail = f"The process of this run was killed by {signal.Signals(-code).name}."
        raise RankLost(detail, "SIGKILL often means that memory ran out.", -code)
    if code:
        detail = f"The process of this run ended with code {code}."
        raise TrainingError(detail, f"Its end is in {LOG}.")


def main() -> None:
    """Do the order in the folder that the command line names."""
    # Before the imports, which take seconds: the parent may be killed meanwhile.
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    folder = Path(sys.argv[1])
    monitor = Monitor(EventPipe().send, has_stdin_ended)
    try:
        do_order(StageOrder(**read_json(folder / "order.json")), monitor)
    except Exception as error:
        if not isinstance(error, Interrupted):
            traceback.print_exc()
        write_failure(folder, 0, error)
        sys.exit(1)


def do_order(order: StageOrder, monitor: Monitor) -> None:
    """Run the stage, and measure its student where it trains one."""
    from kd.pipeline import run_stage

    home, run_dir = Path(order.home), Path(order.run_dir)
    run_stage(order.stage, parse_config(order.config), home, run_dir, monitor)
    if order.measure_on is not None:
        base = parse_config(order.measure_on)
        found = measure_student(base, home, Path(order.records), run_dir / "student", monitor)
        write_json(run_dir / "measured.json", found)


def measure_student(
    base: JobConfig, home: Path, records: Path, folder: Path, monitor: Monitor
) -> dict[str, Any]:
    """Measure the student in ``folder`` on the held-out records of ``base``, in float32.

    All runs of an ablation are measured on the same records at the same temperature, whatever they
    were trained on.
    """
    from kd.evaluation.teacher_comparison import compare_with_records
    from kd.models.saving import load_saved_student
    from kd.models.vocabulary import choose_run_vocabulary
    from kd.progress import replace_nonfinite
    from kd.stages.source import adopt_cache_layout, open_source

    tokenizer, source = open_source(base, home, records, monitor)
    student = load_saved_student(folder)
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    found = compare_with_records(student, adopt_cache_layout(source, base), source, vocabulary)
    measured: dict[str, Any] = replace_nonfinite(found)
    return measured


if __name__ == "__main__":
    main()
