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
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from cache.disk import make_folder, remove_path, storage_errors
from kd.config.job import JobConfig
from kd.errors import Interrupted, RankLost, TrainingError
from kd.files import read_json, write_json
from kd.parallel.children import build_path, has_stdin_ended, relay_events
from kd.parallel.parent_death import PARENT_VARIABLE, die_with_parent
from kd.parallel.rank_failures import read_first_failure, write_failure
from kd.progress import EventPipe, Monitor, replace_nonfinite

#: The folder in a run folder with the order and the error of its process.
FOLDER = "process"
LOG = "log.txt"


@dataclass(frozen=True)
class StageOrder:
    """A stage of a job. A trained student is also measured on the held-out text of ``measure_on``.

    That is the job with which all are compared, and ``records`` a run folder that knows its cache.
    """

    stage: str
    config: JobConfig
    home: Path
    run_dir: Path
    measure_on: JobConfig | None = None
    records: Path = Path()


def run_in_child(order: StageOrder, monitor: Monitor) -> None:
    """Do ``order`` in a new process, whose events ``monitor`` gets.

    Raises the error of the process, ``Interrupted`` after a stop, and ``RankLost`` where it was
    killed.
    """
    folder = order.run_dir / FOLDER
    with storage_errors(folder):
        remove_path(folder)
        make_folder(folder)
    write_json(folder / "order.json", TypeAdapter(StageOrder).dump_python(order, mode="json"))
    with (
        (order.run_dir / LOG).open("ab") as log,
        subprocess.Popen(
            # -P keeps the working folder out of the path: it may hold a folder named kd.
            [sys.executable, "-P", "-m", "kd.experiments.child", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": build_path(), PARENT_VARIABLE: str(os.getpid())},
            # Ctrl-C is for the process that started this one, which then asks it to stop.
            start_new_session=True,
        ) as process,
    ):
        try:
            relay_events(process, monitor.listen, monitor.should_stop)
            code = process.wait()
        finally:
            process.kill()
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

    home, run_dir = order.home, order.run_dir
    run_stage(order.stage, order.config, home, run_dir, monitor)
    if (base := order.measure_on) is not None:
        found = measure_student(base, home, order.records, run_dir / "student", monitor)
        write_json(run_dir / "measured.json", replace_nonfinite(found))


def measure_student(
    base: JobConfig, home: Path, records: Path, folder: Path, monitor: Monitor
) -> dict[str, float | None]:
    """Measure the student in ``folder`` on the held-out records of ``base``, in float32.

    All runs of an ablation are measured on the same records at the same temperature, whatever they
    were trained on.
    """
    from kd.evaluation.teacher_comparison import compare_with_records
    from kd.models.saving import load_saved_student
    from kd.models.vocabulary import choose_run_vocabulary
    from kd.stages.source import adopt_cache_layout, open_source

    tokenizer, source = open_source(base, home, records, monitor)
    student = load_saved_student(folder)
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    return compare_with_records(student, adopt_cache_layout(source, base), source, vocabulary)


if __name__ == "__main__":
    main()
