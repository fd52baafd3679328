"""The noise scale of a batch: against its definition, and against plain gradients in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from kd.capture.probe import open_trial
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.evaluation.baseline import build_starting_student
from kd.experiments.noise import (
    BatchNoise,
    GradientSums,
    advise_on_batch,
    measure_batch_noise,
)
from kd.models.vocabulary import choose_run_vocabulary
from kd.pipeline import load_student_tokenizer, open_source
from kd.progress import SILENT
from kd.text.batches import CachedRecords

pytestmark = pytest.mark.usefixtures("one_thread")


def make_job(teacher: Path, text: Path, /, **changes: Any) -> JobConfig:
    job = {
        "teacher": {"model": str(teacher), "batch_size": 4},
        "student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": str(teacher)}},
        "data": {
            "train": str(text), "sequence_length": 64, "max_train_samples": 12,
            "validation_fraction": 0.1,
        },
        "cache": {"threshold": 0.05},
        "train": {"max_steps": 4, "batch_size": 4},
    }  # fmt: skip
    return parse_config(job | changes)


def test_the_estimates_are_unbiased() -> None:
    """Over many draws of gradients whose mean and covariances are known."""
    generator = np.random.default_rng(0)
    mean = np.array([0.3, -0.2, 0.1])
    data, records = np.array([1.0, 0.5, 0.2]), np.array([0.3, 0.1, 0.4])
    found = []
    for _ in range(4000):
        own = mean + generator.normal(0, np.sqrt(data), (6, 3))
        first, second = (own + generator.normal(0, np.sqrt(records), (6, 3)) for _ in range(2))
        sums = GradientSums(
            count=6,
            paired=4,
            sum_of_squares=float((first**2).sum()),
            square_of_sum=float((first.sum(0) ** 2).sum()),
            differences=float(((first - second)[:4] ** 2).sum()),
        )
        noise = BatchNoise.of(sums, 10.0)
        found.append((noise.gradient, noise.data, noise.records))
    expected = [(mean**2).sum(), data.sum(), records.sum()]
    assert np.mean(found, axis=0) == pytest.approx(expected, rel=0.05)
    exact = BatchNoise(*expected, 10.0, 6, 4)
    assert exact.scale == pytest.approx(2.5 / 0.14) and exact.records_share == pytest.approx(0.32)
    assert exact.to_json()["scale_tokens"] == pytest.approx(25 / 0.14)


def test_gradients_are_those_of_plain_cross_entropy(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    job = make_job(
        tiny_teacher, tiny_text, kind="train", teacher=None, loss={"alpha": 1.0},
        data={"train": str(tiny_text), "sequence_length": 64, "max_train_samples": 5,
              "validation_fraction": 0.1, "packing": False},
    )  # fmt: skip
    _, source = open_source(job, tmp_path, tmp_path, SILENT)
    tokenizer = load_student_tokenizer(job)
    student = build_starting_student(job, tokenizer)
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    found = measure_batch_noise(job, source, None, student, vocabulary)
    assert found is not None and (found.paired, found.records) == (0, 0.0)

    count = source.train_count
    sequences, _ = source.read(np.arange(count))
    tokens = sequences.positions / count
    plain = build_starting_student(job, tokenizer).double().eval()
    gradients = []
    for tokens_L, mask_L in zip(sequences.tokens, sequences.target_mask, strict=True):
        ids_L = torch.from_numpy(tokens_L.astype(np.int64))
        logits_LV = plain(ids_L[None]).logits[0, :, :vocabulary]
        wanted_L = torch.where(torch.from_numpy(mask_L), ids_L.roll(-1), -100)
        loss = cross_entropy(logits_LV, wanted_L, ignore_index=-100, reduction="sum") / tokens
        plain.zero_grad()
        loss.backward()
        gradients.append(
            torch.cat([each.grad.flatten() for each in plain.parameters() if each.grad is not None])
        )
    products = torch.stack(gradients) @ torch.stack(gradients).T
    gradient = float(products.sum() - products.trace()) / (count * (count - 1))
    assert found.gradient == pytest.approx(gradient, rel=1e-4)
    assert found.data == pytest.approx(float(products.trace()) / count - gradient, rel=1e-4)


def test_the_records_part_grows_with_the_threshold(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    parts = []
    for threshold in (0.02, 0.2):
        job = make_job(tiny_teacher, tiny_text, cache={"threshold": threshold})
        tokenizer = load_student_tokenizer(job)
        with open_trial(job, tmp_path) as trial:
            assert trial.second is not None
            first, second = CachedRecords(trial.first), CachedRecords(trial.second)
            student = build_starting_student(job, tokenizer)
            vocabulary = choose_run_vocabulary(first, tokenizer, student)
            found = measure_batch_noise(job, first, second, student, vocabulary)
            same = measure_batch_noise(job, first, first, student, vocabulary)
        assert found is not None and same is not None
        assert (found.measured, found.paired, same.records) == (12, 8, 0.0)
        assert found.data + found.records == pytest.approx(same.data, rel=1e-6)
        parts.append(found.records)
    assert 4 < parts[1] / parts[0] < 25


def test_advice_follows_scale_and_share(tiny_teacher: Path, tiny_text: Path) -> None:
    job = make_job(tiny_teacher, tiny_text)

    def say(gradient: float, data: float, records: float, paired: int = 8) -> str:
        noise = BatchNoise(gradient, data, records, 64.0, 12, paired)
        return " ".join(advise_on_batch(job, noise))

    assert "100.0 sequences (6,400 tokens), and a step has 4. Twice" in say(0.1, 9.9, 0.1)
    assert "Steps of half the sequences" in say(10.0, 1.0, 0.1)
    assert "The two fit" in say(1.0, 4.0, 0.4)
    assert "lost in its noise on 12 sequences" in say(-0.1, 4.0, 0.4)
    # A third of the variance: a tenth is left by (1/9) / (1/2) of the noise.
    assert "33.3% of the gradient's variance" in say(1.0, 4.0, 2.0)
    assert "cache.threshold 0.011 would leave about 10%" in say(1.0, 4.0, 2.0)
    assert "of up to 0.1 it stays below 2%" in say(1.0, 99.0, 1.0)
    assert "sampled records, the rest from the data" in say(1.0, 9.0, 1.0)
    assert "records" not in say(1.0, 9.0, 0.0, paired=0)
