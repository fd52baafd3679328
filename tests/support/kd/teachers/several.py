"""A job with two teachers, each with a text of its own, and such teachers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def make_other_teacher(teacher: Path, folder: Path) -> Path:
    """Copy a teacher, with other weights of the same tokenizer."""
    shutil.copytree(teacher, folder)
    weights = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    # A learned weight, so that the models differ as two trainings do.
    changed = {
        name: each + 0.3 * torch.randn(each.shape, generator=random) * each.std()
        for name, each in weights.items()
        if each.ndim > 1
    }
    save_file(weights | changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_several_job(
    teachers: dict[str, Path], sources: list[dict[str, Any]], **sections: dict[str, Any]
) -> dict[str, Any]:
    """Make a job whose ``sources`` name some of ``teachers``; ``sections`` add to its sections."""
    first = str(next(iter(teachers.values())))
    job: dict[str, Any] = {
        "name": "several",
        "teachers": {name: {"model": str(each)} for name, each in teachers.items()},
        "student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": first}},
        "data": {
            "train": sources, "validation_fraction": 0.2, "sequence_length": 32,
            "max_train_samples": 16, "max_eval_samples": 3,
        },
        "cache": {"shard_sequences": 4},
        "train": {"max_steps": 6, "batch_size": 4, "save_steps": 2, "logging_steps": 1},
        "evaluation": {"continuations": 0, "samples": 0},
    }  # fmt: skip
    return job | {name: job.get(name, {}) | section for name, section in sections.items()}


def write_texts(text: Path, folder: Path) -> dict[str, Path]:
    """Write the two halves of a text as files named after the teachers math and code."""
    content = text.read_text(encoding="utf-8")
    half = len(content) // 2
    folder.mkdir(parents=True, exist_ok=True)
    found = {"math": folder / "math.txt", "code": folder / "code.txt"}
    found["math"].write_text(content[:half], encoding="utf-8")
    found["code"].write_text(content[half:], encoding="utf-8")
    return found
