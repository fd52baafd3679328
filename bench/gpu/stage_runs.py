"""Runs the stages of ``bench.gpu.stage_work`` on the device at hand, with random models."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.gpu.stage_work import Sizes, Stage, make_config
from bench.speed import (
    DEVICE,
    RECORDS,
    BenchmarkSizes,
    Runnable,
    make_cache_identity,
    make_head_task,
    make_loader_task,
    make_teacher,
)
from bench.support.timing import time_run
from bench.support.training import prepare_run, step_by_hand
from cache.records import Sequences
from kd.models.attention.isolation import isolate_documents
from kd.models.precision import find_hardware


@dataclass(frozen=True)
class ReaderRate:
    """The tokens that the reader delivers in a second, and the bytes that it moves for each."""

    rate: float
    bytes: float


def measure_stage(stage: Stage, setting: str, sizes: Sizes, rounds: int) -> float:
    """Measure the tokens/s of a stage: the median of some rounds, after one that warms up."""
    make = {"capture": run_capture, "step": run_step, "head": run_head}[stage.kind]
    with make(stage, setting, sizes) as run:
        return stage.tokens / measure_median(run, rounds)


def measure_median(run: Runnable, rounds: int) -> float:
    """The median of the seconds of a run."""
    run()
    return median(time_run(run) for _ in range(rounds))


def measure_reader(sizes: Sizes, rounds: int) -> ReaderRate:
    """Measure how fast batches are made of a cache, whose chunks are decoded in memory."""
    with tempfile.TemporaryDirectory() as folder:
        task = make_loader_task(make_benchmark_sizes(sizes), Path(folder))
        variant = task.variants["cache to batches"]
        return ReaderRate(
            task.tokens / measure_median(variant.run, rounds), variant.moved / task.tokens
        )


# ---------------------------------------------------------------------- the stages


@contextmanager
def run_capture(stage: Stage, _: str, sizes: Sizes) -> Iterator[Runnable]:
    """Read the records of one micro-batch."""
    bench = replace(make_benchmark_sizes(sizes), length=stage.row)
    model = make_model(stage, sizes, bench.torch_dtype).eval().requires_grad_(False)
    isolate_documents(model)
    sequences = make_packed_rows(stage, sizes)
    identity = make_cache_identity(bench, sequences, "threshold")
    teacher = make_teacher(model, identity, sequences)
    yield lambda: [each.encode() for each in teacher.deliver(sequences, 0)]


@contextmanager
def run_step(stage: Stage, setting: str, sizes: Sizes) -> Iterator[Runnable]:
    """Take an optimiser step of one micro-batch, without the loader."""
    sequences = make_packed_rows(stage, sizes)
    with tempfile.TemporaryDirectory() as folder:
        run = prepare_run(
            make_benchmark_sizes(sizes),
            sequences,
            make_model(stage, sizes, torch.float32),
            Path(folder),
            batch_size=len(sequences),
            gradient_checkpointing=setting.split()[-1],
        )
        micro_batches = next(run.read_batches())
        yield lambda: step_by_hand(run, micro_batches)


@contextmanager
def run_head(_: Stage, __: str, sizes: Sizes) -> Iterator[Runnable]:
    """Compute the fused loss of records, forward and backward."""
    with tempfile.TemporaryDirectory() as folder:
        yield make_head_task(make_benchmark_sizes(sizes), Path(folder)).variants[RECORDS].run


# ---------------------------------------------------------------------- what they are made of


def make_benchmark_sizes(sizes: Sizes) -> BenchmarkSizes:
    """The sizes as the other benches name them."""
    dtypes = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return BenchmarkSizes(
        head=sizes.head,
        vocabulary=sizes.vocabulary,
        length=sizes.document,
        batch=sizes.tokens // sizes.document,
        dtype=dtypes[find_hardware(DEVICE).precision],
    )


def make_model(stage: Stage, sizes: Sizes, dtype: torch.dtype) -> PreTrainedModel:
    """Make a random model; one with an LM head of its own has the entropy of real text."""
    torch.manual_seed(0)
    config = make_config(sizes, stage.model)
    with torch.device(DEVICE):
        # In its own dtype from the start: in float32 a large teacher would not fit.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if not config.tie_word_embeddings:
            torch.nn.init.normal_(model.lm_head.weight, std=4.0 / config.hidden_size**0.5)
    return model


def make_packed_rows(stage: Stage, sizes: Sizes) -> Sequences:
    """Make the rows of a micro-batch, each of whole documents."""
    count = stage.tokens // stage.row
    tokens_BL = np.random.default_rng(0).integers(0, sizes.vocabulary, (count, stage.row))
    start_BL = np.zeros(tokens_BL.shape, bool)
    target_BL = np.ones(tokens_BL.shape, bool)
    start_BL[:, :: stage.document] = True
    target_BL[:, stage.document - 1 :: stage.document] = False
    return Sequences(tokens_BL.astype(np.uint32), start_BL, target_BL)
