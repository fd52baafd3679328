"""Measure how much of full distillation a cache keeps, on students of each kind of record.

    python bench/quality.py [--teacher FOLDER [--gguf-file NAME] --text FILE... --held-out FILE...]
                            [--from-teacher LAYERS | --layers N --width D] [--untied]
                            [--rows NAME...] [--seeds 3] [--steps N] [--work FOLDER] [--out FILE]
                            ...

All students of a seed begin with the same weights and see the same tokens in the same order; only
the records of the teacher differ. alpha is 0: nothing but the record teaches.

    share = (CE of cross-entropy only - CE) / (CE of cross-entropy only - CE of all of p)

Without --teacher it is the example's, at V = 2,048. Students are then fresh Llamas of 2 layers of
128, and train for 400 steps with a rate of 0.003, 40 steps of warm-up and 3,200 sequences.

    caches     all that the rows need are captured in one pass of the teacher, from the same logits;
               a capture that was stopped goes on after the last sealed shard
    students   are trained one after the other; one that was stopped goes on from its newest
               checkpoint, a finished one is not trained again, and one that fails does not stop
               the others
    page       shares with intervals, bytes, hours, and where a row falls behind all of p

Everything is kept in --work. The same flags again go on where it stopped; more --rows or --seeds
add to what is there. Ctrl-C and SIGTERM stop it after a checkpoint.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.support.paths import AUSTEN, HELD_OUT, NOVELS
from bench.support.quality import rows as row_names
from bench.support.quality.capture import capture_together
from bench.support.quality.page import Found, render_page
from bench.support.quality.runs import run_study
from bench.support.quality.study import Study
from cache.errors import PotstillError
from kd.errors import Interrupted
from kd.models.loading import hide_progress_bars
from kd.progress import Event, Monitor

#: The values of flags that are not given.
DEFAULTS: dict[str, Any] = {
    "steps": 82,
    "untied": False,
    "rows": list(row_names.DEFAULT_ROWS),
    "batch": 8,
    "learning_rate": 1e-3,
    "warmup": 10,
    "save_steps": 20,
    "first_seed": 0,
    "set": [],
}
#: Those where --teacher is not given, either.
EXAMPLE: dict[str, Any] = DEFAULTS | {
    "teacher": AUSTEN / "teacher",
    "text": list(NOVELS),
    "held_out": [HELD_OUT],
    "held_out_sequences": 150,
    "sequences": 3200,
    "steps": 400,
    "learning_rate": 3e-3,
    "warmup": 40,
    "save_steps": 400,
}
#: The shape of its students.
EXAMPLE_SHAPE = {"layers": 2, "width": 128}
#: Seconds between two lines about a run that goes on.
REPORT_SECONDS = 60.0
#: The status of a process that Ctrl-C ended.
STOPPED = 130


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; flags of ``DEFAULTS`` are None where they are not given."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=row_names.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seeds", type=count, default=3, help="students of each row")
    add("--steps", type=count, help="steps of every student (82)")
    add("--sequences", type=count, help="training sequences; by default each is seen once")
    add("--length", type=count, default=256, help="tokens a sequence")
    add("--work", type=Path, help="where to keep caches and runs; without --teacher, not needed")
    add("--out", type=Path, help="write the page to this file too")
    add("--teacher", type=Path, help="its folder")
    add("--gguf-file", help="name of the GGUF file in it that holds the weights")
    add("--text", type=Path, nargs="+", help="text to train on")
    add("--held-out", type=Path, nargs="+", help="text to measure on")
    add("--held-out-sequences", type=count, help="keep only the first ones of the held-out text")
    add("--from-teacher", type=count, metavar="LAYERS", help="students of layers of the teacher")
    add("--layers", type=count, help="with --width: fresh students of so many layers")
    add("--width", type=count, help="width of fresh students")
    add("--untied", action="store_const", const=True, help="students with an LM head of their own")
    add("--rows", nargs="+", metavar="NAME", help="rows by name; see the list below")
    add("--batch", type=count, help="sequences a step (8)")
    add("--micro-batch", type=count, help="sequences in memory at once (--batch, but at most 8)")
    add("--learning-rate", type=float, help="its peak (0.001); it falls as a cosine")
    add("--warmup", type=int, help="steps of linear warm-up (10)")
    add("--save-steps", type=count, help="steps between two checkpoints (20)")
    add("--first-seed", type=int, help="the seeds are this one and those after it (0)")
    add(
        "--set",
        action="append",
        metavar="a.b=VALUE",
        help="set a field of every student's job, as kd run does; may be given several times",
    )
    return parser


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it must be 1 or more, but got {value}")
    return value


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags (None: those of this process), and fill in those that are not given."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    needed = ("text", "held_out", "work")
    lacking = [f"--{name.replace('_', '-')}" for name in needed if not vars(arguments)[name]]
    if arguments.teacher and lacking:
        parser.error(f"--teacher needs {', '.join(lacking)} too")
    defaults = DEFAULTS if arguments.teacher else EXAMPLE
    if not (arguments.teacher or arguments.from_teacher or arguments.layers or arguments.width):
        defaults = defaults | EXAMPLE_SHAPE
    for name, value in defaults.items():
        if vars(arguments)[name] is None:
            setattr(arguments, name, value)
    return arguments


def main(words: list[str] | None = None) -> None:
    """Run the study, and print its page."""
    arguments = parse_arguments(words)
    hide_progress_bars()
    try:
        page, complete = run(arguments)
    except Interrupted as stopped:
        print(f"bench/quality.py: {stopped}", file=sys.stderr)
        sys.exit(STOPPED)
    except PotstillError as error:
        print(f"bench/quality.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(page)
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")
    sys.exit(not complete)


def run(arguments: argparse.Namespace) -> tuple[str, bool]:
    """Return the page, and whether every student of it was trained."""
    with tempfile.TemporaryDirectory() as temporary:
        arguments.work = arguments.work or Path(temporary)
        return run_whole_study(Study.of(arguments))


def run_whole_study(study: Study) -> tuple[str, bool]:
    """Capture all caches, train all students, and render the page.

    Raises ``Interrupted`` where a signal asks for it.
    """
    found: Found = {}
    failed = []
    with stopping_on_signals() as should_stop:
        study.work.mkdir(parents=True, exist_ok=True)
        capture = make_monitor("capture", should_stop)
        capture_together(study.plan_captures(), study.caches, capture)
        for row, seed, finished in run_study(study, lambda name: make_monitor(name, should_stop)):
            name = f"{row.name}, seed {seed}"
            if finished is None:
                failed.append(name)
                continue
            found.setdefault(row.name, {})[seed] = finished
            seconds = finished.figures.seconds / finished.figures.steps
            report(f"{name}: {finished.figures.loss:.4f}, {seconds:.2f} s a step")
    page = render_page(study, found)
    if failed:
        page += f"\n\nFailed, and to be run again: {'; '.join(failed)}."
    return page, not failed


@contextmanager
def stopping_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C or SIGTERM came; a second one ends the process."""
    asked = threading.Event()

    def ask(number: int, _: Any) -> None:
        asked.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_monitor(name: str, should_stop: Callable[[], bool]) -> Monitor:
    """Make a monitor that now and then prints how far ``name`` has come."""
    last = time.monotonic()

    def listen(event: Event) -> None:
        nonlocal last
        if event.type == "warning":
            report(f"{name}: {event.data['message']}")
        over = event.type == "progress" and event.data["done"] == event.data["total"]
        if event.type == "progress" and (over or time.monotonic() - last > REPORT_SECONDS):
            last = time.monotonic()
            data = event.data
            report(
                f"{name}: {data['done']} of {data['total']} {data['unit']}, "
                f"{data['tokens_per_second']:,.0f} tokens/s"
            )

    return Monitor(listen, should_stop)


def report(line: str) -> None:
    """Print a line about the progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
