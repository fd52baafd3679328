"""Measure what checkpoints cost a training whose disk is slow.

    python bench/loops/saving.py [--quick] [--rounds 3]

One training, with the default interval of checkpoints, three times in turn:

    none     without a checkpoint before the end
    waiting  the loop waits until each is written, as it does if memory has no room for a copy
    beside   each is copied, and a thread writes the copy

The disk is simulated: after each block a writer sleeps until the bytes so far would be written at
the given rate. The rate is such that a checkpoint takes two thirds of its interval. The seconds for
which one stops the loop are those of phase checkpoint; the share is of its interval, in which the
steps take as long as those of none. The last line is arithmetic.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.speed import read_cpu_name
from kd.config.jobfile import parse_config
from kd.config.train import TrainConfig
from kd.files import read_json
from kd.models.loading import hide_progress_bars
from kd.progress import Monitor
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.training.loop import train
from kd.training.saved import tensor_file

VOCABULARY = 8192
WAYS = ("none", "waiting", "beside")
#: Bytes of a checkpoint for each parameter: float32, and the two averages of AdamW.
PARAMETER_BYTES = 12
#: The part of its interval that a checkpoint takes.
DISK_SHARE = 2 / 3


class Trained(NamedTuple):
    """Seconds of a step, seconds for which a checkpoint stopped the loop, and its bytes."""

    step: float
    stopped: float
    size: int


def make_student(width: int) -> LlamaForCausalLM:
    """Make a small random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=8,
    )
    return LlamaForCausalLM(config)


def run(folder: Path, way: str, width: int, steps: int, interval: int) -> Trained:
    """Train on random text."""
    train_options = {
        "max_steps": steps,
        "batch_size": 2,
        "save_steps": steps if way == "none" else interval,
        "eval_steps": steps,
    }
    job = parse_config(
        {
            "kind": "train",
            "student": {"init": {"layers": 4, "hidden_size": width, "tokenizer": "."}},
            "data": {"train": "unused.txt", "sequence_length": 32},
            "loss": {"alpha": 1.0},
            "train": train_options,
            # The process has more already, so that there is no room for a copy.
            "resources": {"memory": "64MiB"} if way == "waiting" else {},
        }
    )
    random = np.random.default_rng(0)
    texts = [Document(random.integers(0, VOCABULARY, 32).astype(np.uint32)) for _ in range(64)]
    packed = [pack_documents(part, job.data) for part in (texts[2:], texts[:2])]
    train(job, PlainText(Corpus(*packed)), make_student(width), VOCABULARY, folder, Monitor())
    phases = {each["name"]: each for each in read_json(folder / "profile.json")["phases"]}
    stopped = phases.pop("checkpoint")
    step = sum(each["seconds"] for name, each in phases.items() if name != "evaluation") / steps
    saved = next((folder / "checkpoints").iterdir())
    size = sum(each.stat().st_size for each in saved.iterdir())
    return Trained(step, stopped["seconds"] / stopped["count"], size)


class SlowDisk:
    """Lets tensors be written at ``rate`` bytes a second; as fast as they can at 0."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._blocks = tensor_file._iterate_blocks

    def __enter__(self) -> SlowDisk:
        tensor_file._iterate_blocks = self._yield_slowly
        return self

    def __exit__(self, *_: object) -> None:
        tensor_file._iterate_blocks = self._blocks

    def _yield_slowly(self, tensor: Tensor) -> Iterator[Tensor]:
        for block in self._blocks(tensor):
            yield block
            if self.rate:
                time.sleep(block.nbytes / self.rate)


def measure(width: int, steps: int, interval: int, rounds: int) -> str:
    """Measure the three ways in turn; returns the text of the table."""
    found: dict[str, list[Trained]] = {way: [] for way in WAYS}
    rate = 0.0
    for _ in range(rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as name, SlowDisk(rate):
                found[way].append(run(Path(name), way, width, steps, interval))
            # Of the first run of none, so that it stays the same for all others.
            first = found["none"][0]
            rate = first.size / (DISK_SHARE * first.step * interval)
    step = median(each.step for each in found["none"])
    rows = []
    for way in WAYS[1:]:
        stopped = median(each.stopped for each in found[way])
        rows.append(f"| {way} | {stopped:.2f} | {stopped / (step * interval):.1%} |")
    copied = measure_copy(first.size)
    share = 8e9 * PARAMETER_BYTES / 8 / copied / (TrainConfig(max_steps=1).save_steps * 2.0)
    head = (
        f"Machine: {read_cpu_name()}; {steps} steps of {step:.2f} s, a checkpoint of "
        f"{first.size / 1e6:,.0f} MB each {interval} steps, disk of {rate / 1e6:,.0f} MB/s."
    )
    last = (
        f"A copy is made at {copied / 1e9:.1f} GB/s here. At this rate one of 8 billion parameters "
        f"on 8 GPUs ({8 * PARAMETER_BYTES} GB), with steps of 2 s and the default interval, stops "
        f"the loop for {share:.1%} of its time."
    )
    table = ["| checkpoints | seconds of a stop | of the interval |", "|---|--:|--:|", *rows]
    return "\n".join([head, "", *table, "", last])


def measure_copy(size: int) -> float:
    """Measure the rate of a copy in bytes a second."""
    source, kept = torch.zeros(size // 4), torch.zeros(size // 4)
    found = []
    for _ in range(3):
        began = time.perf_counter()
        kept.copy_(source)
        found.append(size / (time.perf_counter() - began))
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what checkpoints cost a training.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    given = parser.parse_args()
    hide_progress_bars()
    interval = TrainConfig(max_steps=1).save_steps
    sizes = (64, 12, 4) if given.quick else (384, 3 * interval, interval)
    print(measure(*sizes, rounds=1 if given.quick else given.rounds))


if __name__ == "__main__":
    main()
