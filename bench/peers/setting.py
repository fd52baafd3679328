"""What all programs of a comparison share: teacher, text, first students, and the order of rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.paths import AUSTEN
from bench.teachers.whole import save_teacher, save_whole
from kd.config.jobfile import parse_config
from kd.evaluation.baseline import build_starting_student
from kd.models.tokenizers import load_tokenizer
from kd.text.corpus import load_corpus
from kd.text.steps.order import list_step_indices

NOVELS = ("prideprejudice", "sensesensibility")
#: The optimiser of all programs: AdamW, with decay of matrices only.
OPTIMISER = {"weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "max_grad_norm": 1.0}


@dataclass(frozen=True)
class Sizes:
    """How much is learned and measured.

    ``rows`` of ``length`` tokens to train on, of which each of ``steps`` takes ``batch``.
    ``held_out`` rows are measured. ``student`` is a section of a job.
    """

    rows: int
    length: int
    steps: int
    batch: int
    rate: float
    warmup: int
    held_out: int
    student: tuple[tuple[str, Any], ...]


#: Two passes over the rows.
EXAMPLE = Sizes(
    480, 256, 120, 8, 3e-3, 12, 75, (("init", {"layers": 2, "hidden_size": 128}),)
)  # fmt: skip
QUICK = Sizes(32, 64, 8, 8, 3e-3, 2, 8, (("init", {"layers": 1, "hidden_size": 32}),))
#: One pass.
SMOLLM2 = Sizes(60, 256, 15, 4, 5e-4, 2, 12, (("from_teacher", {"layers": 6}),))


@dataclass(frozen=True)
class Setting:
    """A teacher and the sizes of its comparison; ``folder`` holds all of its files."""

    name: str
    sizes: Sizes
    folder: Path

    @property
    def teacher(self) -> Path:
        """The teacher in float32, which every program reads."""
        return self.folder / "teacher"

    @property
    def text(self) -> Path:
        """The text to train on: one document, so that no row holds two."""
        return self.folder / "train.txt"

    def student(self, seed: int) -> Path:
        """The student that every program begins with."""
        return self.folder / f"student {seed}"

    def rows(self) -> Path:
        """The token ids of all rows, (rows, length)."""
        return self.folder / "rows.npy"

    def order(self, seed: int) -> Path:
        """The numbers of the rows in the order of the training, (steps x batch)."""
        return self.folder / f"order {seed}.npy"

    def make_job(self, seed: int, student: dict[str, Any]) -> dict[str, Any]:
        """Return our program's job."""
        sizes = self.sizes
        return {
            "kind": "distill",
            "name": "peers",
            "teacher": {"model": str(self.teacher), "batch_size": sizes.batch},
            "student": student,
            "data": {
                "train": str(self.text),
                "validation_fraction": 0,
                "sequence_length": sizes.length,
                "max_train_samples": sizes.rows,
            },
            "cache": {"threshold": 0.04, "seed": seed},
            "loss": {"alpha": 0.0},
            "train": {
                "max_steps": sizes.steps,
                "batch_size": sizes.batch,
                "learning_rate": sizes.rate,
                "warmup_steps": sizes.warmup,
                "weight_decay": OPTIMISER["weight_decay"],
                "max_grad_norm": OPTIMISER["max_grad_norm"],
                "lm_head_floor": 0.0,
                "save_steps": sizes.steps,
                "seed": seed,
            },
            "evaluation": {"samples": 0, "continuations": 0},
        }

    def describe(self, seed: int, out: Path) -> dict[str, Any]:
        """Return what the scripts of other programs read."""
        sizes = asdict(self.sizes)
        kept = ("steps", "batch", "length", "rate", "warmup")
        return {
            **{name: sizes[name] for name in kept},
            **OPTIMISER,
            "teacher": str(self.teacher),
            "student": str(self.student(seed)),
            "rows": str(self.rows()),
            "order": str(self.order(seed)),
            "out": str(out),
            "seed": seed,
        }


def choose_setting(arguments: argparse.Namespace, work: Path) -> Setting:
    """Return the setting that the flags ask for."""
    if arguments.teacher is not None:
        return Setting("teacher", SMOLLM2, work / "teacher")
    if arguments.quick:
        return Setting("quick", QUICK, work / "quick")
    return Setting("example", EXAMPLE, work / "example")


def prepare(setting: Setting, source: Path, gguf: str | None, seeds: int) -> None:
    """Write all files of ``setting`` that are not there yet; ``source`` is the teacher's folder."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    if not setting.teacher.is_dir():
        save_teacher(source, gguf, setting.teacher)
    if not setting.text.is_file():
        novels = (AUSTEN / "text" / f"{name}.txt" for name in NOVELS)
        setting.text.write_text("".join(each.read_text(encoding="utf-8") for each in novels))
    if not setting.rows().is_file():
        write_rows(setting)
    for seed in range(seeds):
        if not setting.student(seed).is_dir():
            save_first_student(setting, seed)
        write_order(setting, seed)


def save_first_student(setting: Setting, seed: int) -> None:
    """Save the student that the training of ``seed`` begins with."""
    config = parse_config(setting.make_job(seed, dict(setting.sizes.student)))
    tokenizer = load_tokenizer(setting.teacher)
    save_whole(build_starting_student(config, tokenizer), tokenizer, setting.student(seed))


def write_rows(setting: Setting) -> None:
    """Write the token ids as our program packs them; every position but the last has a target."""
    config = parse_config(setting.make_job(0, dict(setting.sizes.student)))
    train = load_corpus(config.data, load_tokenizer(setting.teacher)).train
    assert len(train) == setting.sizes.rows
    assert train.target_mask[:, :-1].all()
    np.save(setting.rows(), train.tokens)


def write_order(setting: Setting, seed: int) -> None:
    """Write the order in which our program takes the rows with this seed."""
    sizes = setting.sizes
    steps = [list_step_indices(sizes.rows, sizes.batch, seed, step) for step in range(sizes.steps)]
    np.save(setting.order(seed), np.concatenate(steps).astype(np.int64))


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, which is YAML, too."""
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
