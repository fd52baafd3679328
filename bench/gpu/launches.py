"""Count the launches and waits that a chunk, a micro-batch and a step cost a GPU, on a CPU.

    python bench/gpu/launches.py [--out FILE]

The numbers are counted and not measured: the code takes its GPU path, with tensors that lie in the
CPU's memory (``bench.support.launches``). They depend neither on the machine nor on the sizes, but
on the versions of torch and transformers. ``tests/bench/gpu/test_launches.py`` pins them.

    chunk of a capture   logits to records on their way to the host; profile tempered makes a pass
                         over few rows at a time, and one pass is counted
    chunk of the loss    one more chunk of the logits of a micro-batch, gradient included
    layer                one more layer of the student, a Llama, forward and backward
    micro-batch          one more micro-batch, without its layers, with one chunk
    step                 the rest of an optimiser step: clipping, AdamW, the loss for reports
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# Triton reads it when it is first imported. In a process of tests beside a GPU nothing is counted.
if __name__ == "__main__" or not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import transformers

from bench.speed import QUICK, make_llama, make_random_documents
from bench.support.launches import DeviceWork, as_on_a_gpu, count_device_work
from bench.support.small.caches import make_codec, make_identity, make_tables
from bench.support.training import KEPT, prepare_run, step_by_hand
from cache.profiles.table import PROFILES
from kd.capture.recording import Recorder, SequenceStates, TailMeter
from kd.models.lm_head import LMHead
from kd.training.run import Run

VOCABULARY = 512
WIDTH = 16


# ---------------------------------------------------------------------- capture


def count_capture_chunk(profile: str, sequences: int = 1) -> DeviceWork:
    """Count one chunk of a capture, whose positions belong to ``sequences`` sequences."""
    options = {"always_keep": KEPT} if profile in ("threshold", "tempered") else {}
    codec = make_identity(VOCABULARY, codec=make_codec(profile, **options)).record_codec()
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(VOCABULARY, WIDTH, generator=generator).bfloat16()
    recorder = Recorder(
        LMHead(weight_VD, None, 1.0, None, VOCABULARY),
        codec,
        5 if profile == "tempered" else 0,
        TailMeter(sequences) if profile == "threshold" else None,
        make_tables(VOCABULARY, codec.clusters, WIDTH) if codec.rules.dithered else None,
    )
    rows = [
        SequenceStates(
            number,
            torch.randn(8, WIDTH, generator=generator).bfloat16(),
            torch.randint(0, VOCABULARY, (8,), generator=generator),
            np.arange(8),
        )
        for number in range(sequences)
    ]
    with torch.no_grad(), as_on_a_gpu():
        recorder.read(rows)  # what is made once is no part of a chunk
        return count_device_work(lambda: recorder.read(rows))


# ---------------------------------------------------------------------- training


def make_run(folder: Path, layers: int, packed: bool, **train: Any) -> Run:
    """Prepare a training of a student of ``layers`` layers; packed rows have two documents."""
    sizes = replace(QUICK, student=(layers, 64))
    sequences = make_random_documents(sizes, 8)
    if packed:
        middle = sizes.length // 2
        sequences.target_mask[:, middle - 1] = False
        sequences.document_start[:, middle] = True
    student = make_llama(sizes, sizes.student, tie_word_embeddings=True)
    return prepare_run(sizes, sequences, student, folder, batch_size=2, **train)


def count_step(
    layers: int = 2, micro_batches: int = 1, chunks: int = 1, packed: bool = False
) -> DeviceWork:
    """Count the second step of a training: the first one makes state, and checks the gradients."""
    # A micro-batch has 62 positions with a target: two sequences of 32 tokens.
    train = {"gradient_accumulation_steps": micro_batches, "logits_chunk": -(-62 // chunks)}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), layers, packed, **train)
        batches = run.read_batches()
        with as_on_a_gpu():
            step_by_hand(run, next(batches))
            return count_device_work(partial(step_by_hand, run, next(batches)))


def count_training() -> dict[str, DeviceWork]:
    """Count the parts of a training; each is the difference of two steps."""
    whole = count_step()
    layer = count_step(layers=3) - whole
    micro_batch = count_step(micro_batches=2) - whole
    packed = count_step(micro_batches=2, packed=True) - count_step(packed=True)
    # On a CPU packed rows are computed document by document, with more launches than on a GPU.
    packed.launches.clear()
    return {
        "loss: a chunk with records": count_step(chunks=2) - whole,
        "training: a layer of the student": layer,
        "training: a micro-batch, without its layers": micro_batch - layer - layer,
        "training: a micro-batch of packed rows, waits alone": packed,
        "training: a step, without its micro-batches": whole - micro_batch,
    }


def count_capture() -> dict[str, DeviceWork]:
    """Count a chunk of every profile."""
    several = {"threshold, positions of 4 sequences": count_capture_chunk("threshold", 4)}
    each = {profile: count_capture_chunk(profile) for profile in PROFILES}
    return {f"capture: a chunk, {name}": work for name, work in (each | several).items()}


# ---------------------------------------------------------------------- the table


def render(counts: dict[str, DeviceWork]) -> str:
    """The counts as a markdown table."""
    lines = ["| what | launches | waits | the waits |", "|---|--:|--:|---|"]
    for what, work in counts.items():
        waits = ", ".join(f"{name} {count}" for name, count in sorted(work.waits.items()))
        launches = str(work.launches.total() or "-")
        cells = [what, launches, str(work.waits.total()), waits or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    text = f"Counted on a CPU with {versions}.\n\n{render(count_capture() | count_training())}"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
