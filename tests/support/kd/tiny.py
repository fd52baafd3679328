"""The smallest job that goes through both stages: a few sequences, a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_tiny_job(teacher: Path, text: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Make a job of 20 training sequences in shards of 8; ``sections`` add to its sections."""
    job: dict[str, Any] = {
        "name": "tiny",
        "teacher": {"model": str(teacher), "batch_size": 4},
        "student": {"init": {"layers": 1, "hidden_size": 16}},
        "data": {
            "train": str(text), "validation_fraction": 0.1, "sequence_length": 32,
            "max_train_samples": 20, "max_eval_samples": 4,
        },
        "cache": {"shard_sequences": 8},
        "train": {"max_steps": 6, "batch_size": 4, "dropout": 0.1},
        "evaluation": {"max_new_tokens": 4},
    }  # fmt: skip
    return job | {name: job.get(name, {}) | section for name, section in sections.items()}
