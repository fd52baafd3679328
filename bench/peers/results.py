"""The result of one program with one seed: measured once, then read from its file."""

from __future__ import annotations

import ast
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import kd
from bench.peers.environments import clean
from bench.peers.processes import Usage, read_step_seconds, run_measured
from bench.peers.programs import Case, Program
from bench.peers.setting import Setting, write_json
from bench.support.paths import HELD_OUT

#: A capture that there is none of.
NOTHING = Usage(0.0, 0.0, 0)
#: Students over which the capture is spread in the second column of seconds.
STUDENTS = 5


@dataclass(frozen=True)
class Result:
    """What one program took with one seed, and what its student is worth.

    ``step`` is in seconds of a core, ``disk`` in bytes. ``loss`` and ``kl`` are held-out means in
    nats, ``agreement`` is a share. ``lines`` counts what the user writes.
    """

    step: float
    capture: Usage
    training: Usage
    disk: int
    loss: float
    kl: float
    agreement: float
    lines: int

    @property
    def alone(self) -> float:
        """Seconds of a core of one student, with all of the capture."""
        return self.capture.core_seconds + self.training.core_seconds

    @property
    def shared(self) -> float:
        """Seconds of a core of one student of ``STUDENTS``, which share a capture."""
        return self.capture.core_seconds / STUDENTS + self.training.core_seconds

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read the file that ``measure`` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        usages = {name: Usage(**found[name]) for name in ("capture", "training")}
        return cls(**found | usages)


def measure(program: Program, case: Case, result: Path) -> Result:
    """Capture, train and evaluate; what the run wrote is deleted when ``result`` is written."""
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir(parents=True)
    env = clean(PYTHONPATH=program.find_code(case))
    capture = NOTHING
    if program.capture is not None:
        capture = run_measured(program.capture(case), case.folder, env, case.folder / "capture.log")
    training = run_measured(program.train(case), case.folder, env, case.folder / "train.log")
    kept = 0 if program.kept is None else measure_folder(case.folder / program.kept)
    scores = evaluate(case.folder / program.student, case.setting)
    lines = sum(count_lines(case.folder / name) for name in program.written)
    step = read_step_seconds(case.times)
    found = Result(step, capture, training, kept, *scores, lines)
    result.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, asdict(found))
    shutil.rmtree(case.folder)
    return found


def evaluate(student: Path, setting: Setting) -> tuple[float, float, float]:
    """Measure a saved student as `kd eval` does: cross-entropy, KL from the teacher, agreement."""
    sizes = setting.sizes
    found = kd.evaluate(
        str(student),
        str(HELD_OUT),
        teacher=str(setting.teacher),
        home=setting.folder / "evaluations",
        data={"sequence_length": sizes.length, "max_eval_samples": sizes.held_out},
        evaluation={"continuations": 0, "samples": 0},
        progress=False,
    )
    assert found.kl is not None and found.agreement is not None, "the teacher was there"
    return math.log(found.perplexity), found.kl, found.agreement


def measure_folder(folder: Path) -> int:
    """Measure the bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def count_lines(path: Path) -> int:
    """Count the lines with code or settings: no blank ones, comments and docstring of the file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if path.suffix == ".py":
        first = ast.parse(text).body[0]
        assert isinstance(first, ast.Expr), "the scripts begin with a docstring"
        lines = lines[first.end_lineno :]
    return len([line for line in lines if line.strip() and line.strip()[0] != "#"])
