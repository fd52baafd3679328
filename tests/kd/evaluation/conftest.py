"""The job that the tests of the evaluation share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def job(tiny_teacher: Path, tiny_text: Path) -> dict[str, Any]:
    """A job of four training steps, with capture."""
    return {
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher)},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text),
            "validation_fraction": 0.1,
            "sequence_length": 32,
            "max_train_samples": 12,
            "max_eval_samples": 4,
        },
        "train": {
            "max_steps": 4,
            "batch_size": 4,
            "eval_steps": 2,
            "save_steps": 2,
            "logging_steps": 1,
            "learning_rate": 1e-2,
        },
        # Most of these tests are about other parts of the report.
        "evaluation": {"continuations": 0},
    }
