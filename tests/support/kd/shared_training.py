"""Trains a student in this process, as one of several ranks or alone."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from cache.store import open_cache
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.loss.temperature import TemperatureControl
from kd.models.loading import build_hollow_student, build_student
from kd.models.precision import Precision
from kd.models.tokenizers import get_vocabulary_size, load_tokenizer
from kd.parallel.group import ALONE, Group
from kd.parallel.strategies import collect_weights
from kd.progress import SILENT, Event, Monitor
from kd.stages.capture import run_precompute
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.tracking.metrics import read_metrics
from kd.training.loop import train
from tests.support.kd.students import make_llama
from tests.support.kd.training import VOCABULARY, make_source, make_text_job, stop_after


def make_shared_job(teacher: Path, text: Path, **train: Any) -> dict[str, Any]:
    """Make a job whose steps of 8 sequences one, two and four ranks can share."""
    return {
        "name": "shared",
        "teacher": {"model": str(teacher), "batch_size": 8},
        "student": {"init": {"layers": 2, "hidden_size": 16}},
        "data": {
            "train": str(text), "validation_fraction": 0.2, "sequence_length": 32,
            "max_train_samples": 40, "max_eval_samples": 7,
        },
        "cache": {"shard_sequences": 8},
        "train": {
            "batch_size": 2, "gradient_accumulation_steps": 4, "logging_steps": 1,
            "learning_rate": 1e-2, **train,
        },
        "evaluation": {"max_new_tokens": 4},
    }  # fmt: skip


def change(job: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the job with other values in its sections."""
    changed = copy.deepcopy(job)
    for name, values in sections.items():
        changed[name] = {**changed.get(name, {}), **values}
    return changed


def capture_profiles(job: dict[str, Any], home: Path, *profiles: str) -> dict[str, str]:
    """Capture a cache of each profile in ``home``, and return their folders."""
    found = {}
    for profile in profiles:
        config = parse_config(change(job, cache={"profile": profile}))
        summary = run_precompute(config, home, home / profile, SILENT)
        found[profile] = str(home / "caches" / summary.cache["fingerprint"])
    return found


def train_student(
    group: Group,
    job: dict[str, Any],
    cache: str,
    folder: str,
    dtype: str = "float32",
    stop: int | None = None,
    spoilt: int | None = None,
) -> dict[str, Any]:
    """Train the job's student from ``cache``; returns what it finds, of rank 0 alone.

    It asks for a stop after step ``stop``, and makes the LM head far too large after the step
    ``spoilt``, once.
    """
    config = parse_config(job)
    assert config.train is not None
    assert config.teacher is not None
    tokenizer = load_tokenizer(Path(config.teacher.model))
    torch.manual_seed(config.train.seed)
    build = build_student if group.leads else build_hollow_student
    student = build(config.student, tokenizer, 32, config.teacher_files)
    student = student.to(getattr(torch, dtype))
    source = open_cache(Path(cache))
    warnings: list[str] = []
    spoils: list[int] = []
    asked = Monitor() if stop is None else stop_after(stop)

    def listen(event: Event) -> None:
        if event.type == "warning":
            warnings.append(event.data["message"])
        asked.listen(event)
        if event.type == "progress" and event.data["done"] == spoilt and not spoils:
            spoils.append(spoilt)
            with torch.no_grad():
                student.get_output_embeddings().weight.mul_(300.0)

    monitor = Monitor(listen, asked.should_stop)
    progress = None
    vocabulary = get_vocabulary_size(tokenizer)
    try:
        progress = train(config, source, student, vocabulary, Path(folder), monitor, group)
    except Interrupted:
        assert stop is not None
    digests = group.gather(hash_tensors(student.parameters()))
    weights = collect_weights(student, group)
    if not group.leads:
        return {}
    lines = read_metrics(Path(folder) / "metrics.jsonl")
    return {
        "weights": {name: each.double().numpy() for name, each in weights.items()},
        "lines": lines,
        "digests": digests,
        "warnings": warnings,
        "progress": progress and asdict(progress),
    }


def hash_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """Hash what this process holds of the tensors."""
    digest = hashlib.sha256()
    for each in tensors:
        own = each.to_local() if isinstance(each, DTensor) else each
        digest.update(own.detach().double().numpy().tobytes())
    return digest.hexdigest()


def train_half(
    group: Group, job: dict[str, Any], *arguments: Any, **options: Any
) -> dict[str, Any]:
    """Train in float16 on a CPU, which the product refuses; scaler and products are the real ones.

    The first loss scale is so large that gradients overflow.
    """
    half = Precision("cpu", torch.float16)
    with (
        mock.patch.object(Precision, "choose", return_value=half),
        mock.patch("kd.models.precision.FIRST_SCALE", 2.0**30),
    ):
        return train_student(group, job, *arguments, **options)


def train_and_list_temperatures(group: Group, *arguments: Any) -> list[float]:
    """Train, and return the temperature with which this rank began each step."""
    found: list[float] = []
    track = TemperatureControl.track

    def listen(control: TemperatureControl, step: int) -> float | torch.Tensor:
        temperature = track(control, step)
        found.append(float(temperature))
        return temperature

    with mock.patch.object(TemperatureControl, "track", listen):
        train_student(group, *arguments)
    return found


def train_on_few_targets(
    group: Group, folder: str, size: int, strategy: str = "auto"
) -> dict[str, Any]:
    """Train on text of which one sequence in three has targets, by steps of 4 sequences.

    A micro-batch has ``size`` sequences, so that some micro-batches, some ranks and one whole step
    have no target. Returns the weights and the lines of rank 0, in float64.
    """
    text = make_source().corpus
    kept_S = np.arange(len(text.train)) % 3 == 0
    sequences = text.train.select(slice(None))
    masked = replace(sequences, target_mask=sequences.target_mask & kept_S[:, None])
    options = {
        "max_steps": 6, "batch_size": size, "gradient_accumulation_steps": 4 // size,
        "eval_steps": 6, "logging_steps": 1, "learning_rate": 1e-2, "strategy": strategy,
    }  # fmt: skip
    job = make_text_job(options, loss={"alpha": 1.0, "label_smoothing": 0.1})
    student = make_llama(VOCABULARY).double()
    source = PlainText(Corpus(masked, text.validation))
    train(job, source, student, VOCABULARY, Path(folder), SILENT, group)
    weights = collect_weights(student, group)
    lines = read_metrics(Path(folder) / "metrics.jsonl") if group.leads else []
    return {"weights": {name: each.numpy() for name, each in weights.items()}, "lines": lines}


def train_alone(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Train in this process, without other ranks."""
    return train_student(ALONE, *arguments, **options)


def curve(found: dict[str, Any], name: str = "loss") -> list[float]:
    """The values of a metric, one for each training step."""
    return [line[name] for line in found["lines"] if line["type"] == "metrics"]


def evaluations(found: dict[str, Any]) -> list[dict[str, float]]:
    """The numbers of each evaluation."""
    return [
        {name: value for name, value in line.items() if isinstance(value, float | int)}
        for line in found["lines"]
        if line["type"] == "evaluation"
    ]


def farthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between the weights of two students."""
    first: dict[str, NDArray[Any]] = one["weights"]
    second: dict[str, NDArray[Any]] = other["weights"]
    assert first.keys() == second.keys()
    return max(float(abs(first[name] - second[name]).max()) for name in first)
