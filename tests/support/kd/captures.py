"""Captures of a small teacher, one cache of each profile, and the same teacher live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kd.capture.fidelity.live import LiveTeacher
from kd.config.jobfile import parse_config
from kd.config.teacher import TeacherConfig
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_teacher
from kd.models.teacher_files import TeacherFiles
from kd.progress import SILENT, Monitor
from kd.stages.capture import run_precompute

#: The cache section of each profile, by a name for tests.
PROFILES: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.02, "always_keep": [0, 7]},
    "tempered": {"profile": "tempered"},
    "topk": {"profile": "topk", "k": 16},
    "dense": {"profile": "dense"},
    "dense32": {"profile": "dense", "dtype": "float32"},
    "hidden": {"profile": "hidden"},
    "int8": {"profile": "hidden", "dtype": "int8"},
}


def capture(
    teacher: Path, text: Path, home: Path, monitor: Monitor = SILENT, **options: Any
) -> Path:
    """Capture 24 sequences of ``text``, with ``options`` for the cache; return its folder."""
    data = {
        "train": str(text),
        "sequence_length": 64,
        "max_train_samples": 20,
        "max_eval_samples": 4,
    }
    job = {"kind": "precompute", "teacher": {"model": str(teacher)}, "data": data}
    config = parse_config(job | {"cache": {"shard_sequences": 7, **options}})
    summary = run_precompute(config, home, home / "run", monitor).cache
    return home / "caches" / str(summary["fingerprint"])


def live(folder: Path) -> LiveTeacher:
    """Load the teacher in ``folder``, of 2,048 tokens, on the CPU."""
    model = load_teacher(
        TeacherFiles(TeacherConfig(model=str(folder)), folder), torch.device("cpu")
    )
    return LiveTeacher(model, find_lm_head(model, 2048))
