"""RS-KD's main table in small: what students make of each kind of record, within a limit of time.

    python bench/gpu/table.py (--teacher FOLDER [--gguf FILE] | --parts FOLDER) --work FOLDER
        [--layers 10 6] [--seeds 5] [--steps 60] [--minutes 8] [--out FOLDER] [--set a.b=VALUE ...]
    python bench/gpu/table.py --split FILE --into FOLDER

The students are some layers of the teacher; they read 8,192 tokens a step. Those of one number of
layers and one seed begin alike and see the same tokens in the same order; only what they are told
differs (bench/quality.py explains the rows and the columns). One seed is finished for all rows and
layers before the next. After --minutes it stops, at a checkpoint: the page is that of all students
which are finished, and the same command in the same --work goes on.

A machine that takes only some megabytes at once gets a GGUF file in three parts: --split writes
them, and --parts names the folder to which they were copied. --quick takes the example's teacher,
two seeds and a few steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bench import quality
from bench.gpu.parts import join_parts, split_file
from bench.support.paths import AUSTEN, HELD_OUT, NOVELS
from bench.support.quality.capture import capture_together
from bench.support.quality.page import Found, render_page
from bench.support.quality.runs import try_run
from bench.support.quality.study import Study
from bench.teachers.whole import save_teacher
from cache.errors import PotstillError
from kd.errors import DataError, Interrupted
from kd.models.loading import hide_progress_bars
from kd.models.precision import pick_device
from kd.progress import Monitor

#: RS-KD's table, and the records of 16 and 25 bytes that are ours.
ROWS = (
    "cross-entropy only",
    "topk 50",
    "topk 50 and a ghost",
    "draws like threshold 0.04",
    "threshold 0.04",
    "threshold 0.021",
    "all of p",
)
#: Parts of a teacher's file: 98 MB and a checkout are too much for one transfer of 64 MB.
PARTS = 3


@dataclass(frozen=True)
class Sizes:
    """The sizes of a table, where no flag gives others.

    A step reads ``batch`` sequences of ``length`` tokens, ``micro_batch`` at once, and ``held_out``
    sequences are measured.
    """

    layers: tuple[int, ...]
    seeds: int
    steps: int
    batch: int
    micro_batch: int
    length: int
    held_out: int
    save_steps: int


FULL = Sizes((10, 6), 5, 60, 32, 8, 256, 60, 20)
#: On a GPU a step is one micro-batch, and no student is long enough for a checkpoint.
FULL_GPU = replace(FULL, micro_batch=32, save_steps=10_000)
QUICK = Sizes((2, 1), 2, 4, 4, 4, 32, 4, 2)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--teacher", type=Path, help="folder of the teacher; by default that of the example")
    add("--gguf", help="name of its GGUF file, if its weights are in one")
    add("--parts", type=Path, help="folder of the parts of a GGUF file, in place of --teacher")
    add("--layers", type=int, nargs="+", help="the students' layers: 10 6")
    add("--seeds", type=int, help="students of each row and number of layers: 5")
    add("--steps", type=int, help="steps of every student: 60")
    add("--minutes", type=float, default=8.0, help="stop after so many, at a checkpoint")
    add("--work", type=Path, help="folder in which a stopped run continues")
    add("--out", type=Path, help="folder of the page; --work by default")
    add("--set", action="append", default=[], metavar="a.b=VALUE", help="as in bench/quality.py")
    add("--split", type=Path, metavar="FILE", help="write a GGUF file in parts, and end")
    add("--into", type=Path, help="the folder of its parts")
    add("--quick", action="store_true", help="the example's teacher, two seeds, a few steps")
    return parser


def main(words: list[str] | None = None) -> int:
    """Write parts, or train all students and write their page; returns the exit status."""
    began = time.monotonic()
    parser = make_parser()
    arguments = parser.parse_args(words)
    if (arguments.split is None) != (arguments.into is None):
        parser.error("--split and --into go together")
    if arguments.split is None and arguments.work is None:
        parser.error("--work is required")
    hide_progress_bars()
    try:
        if arguments.split is not None:
            for part in split_file(arguments.split, arguments.into, PARTS):
                print(part)
            return 0
        end = began + 60 * arguments.minutes
        return run(arguments, lambda: time.monotonic() > end)
    except PotstillError as error:
        print(f"bench/gpu/table.py: error: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace, is_late: Callable[[], bool]) -> int:
    """Train the students until it is late, and write the page; 1 where some are missing."""
    began = time.monotonic()
    out = arguments.out or arguments.work
    for folder in (arguments.work, out):
        folder.mkdir(parents=True, exist_ok=True)
    sizes = choose_sizes(arguments)
    studies = make_studies(arguments, sizes, find_teacher(arguments))
    found: dict[int, Found] = {layers: {} for layers in studies}
    with quality.stopping_on_signals() as should_stop:
        make_monitor = partial(quality.make_monitor, should_stop=lambda: should_stop() or is_late())
        try:
            train_all(studies, found, make_monitor)
        except Interrupted as stopped:
            quality.report(str(stopped))
    finished = sum(len(students) for each in found.values() for students in each.values())
    wanted = len(studies) * len(ROWS) * sizes.seeds
    told = f"{finished} of {wanted} students in {time.monotonic() - began:.0f} s"
    pages = [
        f"## {layers} layers\n\n{render_page(studies[layers], each)}"
        for layers, each in found.items()
        if each
    ]
    text = "\n\n".join([f"{describe_device()}: {told}.", *pages]) + "\n"
    print(text, end="")
    (out / "table.md").write_text(text, encoding="utf-8")
    return int(finished < wanted)


def find_teacher(arguments: argparse.Namespace) -> Path:
    """Return the folder of the teacher with whole weights: a student reads them in a moment."""
    folder: Path = arguments.work / "teacher"
    if folder.is_dir():
        return folder
    if arguments.parts is not None:
        file = join_parts(arguments.parts)
        save_teacher(file.parent, file.name, folder)
    elif arguments.quick:
        save_teacher(AUSTEN / "teacher", None, folder)
    elif arguments.teacher is not None:
        save_teacher(arguments.teacher, arguments.gguf, folder)
    else:
        raise DataError("No teacher is given.", "Give --teacher FOLDER, --parts FOLDER or --quick.")
    return folder


def choose_sizes(arguments: argparse.Namespace) -> Sizes:
    """Return the sizes that the flags and the device ask for."""
    on_gpu = pick_device().type == "cuda"
    sizes = QUICK if arguments.quick else FULL_GPU if on_gpu else FULL
    given = {name: vars(arguments)[name] for name in ("layers", "seeds", "steps")}
    return replace(sizes, **{name: value for name, value in given.items() if value is not None})


def make_studies(arguments: argparse.Namespace, sizes: Sizes, teacher: Path) -> dict[int, Study]:
    """Return the study of each number of layers; all of them read the same caches."""
    words = [
        "--teacher", teacher, "--work", arguments.work, "--rows", *ROWS,
        "--text", *NOVELS, "--held-out", HELD_OUT, "--held-out-sequences", sizes.held_out,
        "--length", sizes.length, "--batch", sizes.batch, "--micro-batch", sizes.micro_batch,
        "--save-steps", sizes.save_steps, "--seeds", sizes.seeds, "--steps", sizes.steps,
        "--warmup", sizes.steps // 10,
    ]  # fmt: skip
    if pick_device().type == "cuda":
        words += ["--set", "teacher.dtype=bfloat16"]
    for assignment in arguments.set:
        words += ["--set", assignment]
    flags = [str(word) for word in words]
    return {
        layers: Study.of(quality.parse_arguments([*flags, "--from-teacher", str(layers)]))
        for layers in sizes.layers
    }


def train_all(
    studies: dict[int, Study], found: dict[int, Found], make_monitor: Callable[[str], Monitor]
) -> None:
    """Capture the caches, and train seed after seed; put what is finished into ``found``.

    Raises ``Interrupted`` where a monitor asks for it.
    """
    first = next(iter(studies.values()))
    capture_together(first.plan_captures(), first.caches, make_monitor("capture"))
    for seed in first.seeds:
        for layers, study in studies.items():
            for row in study.rows:
                name = f"{row.name}, {layers} layers, seed {seed}"
                monitor = make_monitor(name)
                monitor.check("before the next student")
                if (student := try_run(study, row, seed, monitor)) is not None:
                    found[layers].setdefault(row.name, {})[seed] = student
                    quality.report(f"{name}: {student.figures.loss:.4f}")


def describe_device() -> str:
    """Name the device and the version of torch."""
    device = pick_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
