"""The stages of a job, each with the FLOP of its tokens and the memory that it needs.

The arithmetic is that of ``kd plan``. A model is named by the sizes of a Llama; nothing of its
weights is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kd.capture.codec_identity import make_codec_identity
from kd.capture.estimate.storage import estimate_cache_size
from kd.config.cache import CacheConfig
from kd.config.train import TrainConfig
from kd.memory.devices import CUDA_CONTEXT, DeviceRates
from kd.memory.model_work import count_model_work
from kd.memory.step_bytes import StepShape, compute_group_sizes
from kd.memory.step_memory import describe_student

#: Ways to keep fewer activations, from the fastest on.
CHECKPOINTING = ("none", "sqrt", "full")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama; ``pairs`` are its heads of keys and values."""

    layers: int
    width: int
    inner: int
    heads: int
    pairs: int
    tied: bool


@dataclass(frozen=True)
class Sizes:
    """Teachers and student by name, and the tokens that they read.

    ``document`` and ``row`` are the tokens of a document and of a packed row, ``tokens`` those of a
    micro-batch, and ``head`` is positions, width and vocabulary of the LM head alone.
    """

    teachers: dict[str, ModelShape]
    student: str
    vocabulary: int
    document: int
    row: int
    tokens: int
    head: tuple[int, int, int]

    def __str__(self) -> str:
        positions, width, vocabulary = self.head
        return (
            f"Micro-batches of {self.tokens:,} tokens, V = {self.vocabulary:,}; packed rows of "
            f"{self.row:,} tokens hold documents of {self.document:,}; LM head alone: "
            f"{positions:,} positions, D = {width:,}, V = {vocabulary:,}."
        )


#: The sizes of Llama 3.2 1B and of Llama 3.1 8B.
REAL = Sizes(
    {
        "1B": ModelShape(16, 2048, 8192, 32, 8, tied=True),
        "8B": ModelShape(32, 4096, 14336, 32, 8, tied=False),
    },
    student="1B",
    vocabulary=128_256,
    document=1024,
    row=8192,
    tokens=8192,
    head=(16_384, 2048, 248_320),
)
SMALL = Sizes(
    {"11M": ModelShape(4, 256, 1024, 8, 4, tied=False)},
    student="11M",
    vocabulary=8192,
    document=128,
    row=512,
    tokens=1024,
    head=(1024, 256, 8192),
)


@dataclass(frozen=True)
class Setting:
    """A way to run a stage: its name, the FLOP of a token, and its memory on a device."""

    name: str
    flops: float
    count_memory: Callable[[DeviceRates], int]


@dataclass(frozen=True)
class Stage:
    """A stage with the formula of a token's FLOP, and its settings, the fastest first.

    ``kind`` is capture, step or head; ``document`` and ``row`` are the tokens of a document and of
    a row.
    """

    name: str
    kind: str
    model: str
    document: int
    row: int
    tokens: int
    formula: str
    settings: tuple[Setting, ...]


def choose_setting(stage: Stage, rates: DeviceRates) -> Setting | None:
    """Choose the first setting that fits into the memory of the device; None where none does."""
    fitting = (each for each in stage.settings if each.count_memory(rates) <= rates.memory)
    return next(fitting, None)


def list_stages(sizes: Sizes) -> list[Stage]:
    """List the stages: captures, steps of the student, the LM head alone."""
    rows = {
        format_rows(sizes.document): (sizes.document, sizes.document),
        f"packed {format_rows(sizes.row)}": (sizes.document, sizes.row),
    }
    captures = [
        make_capture_stage(sizes, model, name, *lengths)
        for model in sizes.teachers
        for name, lengths in rows.items()
    ]
    steps = [make_step_stage(sizes, name, row) for name, (_, row) in rows.items()]
    return [*captures, *steps, make_head_stage(sizes)]


def format_rows(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def make_config(sizes: Sizes, model: str) -> LlamaConfig:
    """Make the configuration of a model."""
    shape = sizes.teachers[model]
    return LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.pairs,
        max_position_embeddings=sizes.row,
        tie_word_embeddings=shape.tied,
    )


def make_hollow(sizes: Sizes, model: str) -> LlamaForCausalLM:
    """Make a model whose weights have no memory."""
    with torch.device("meta"):
        return LlamaForCausalLM(make_config(sizes, model))


# ---------------------------------------------------------------------- the stages


def make_capture_stage(sizes: Sizes, model: str, rows: str, document: int, row: int) -> Stage:
    """Make a capture of one micro-batch; the memory is that of the weights in 16 bits."""
    hollow = make_hollow(sizes, model)
    weights = 2 * sum(each.numel() for each in hollow.parameters())
    flops = count_model_work(hollow, sizes.vocabulary).count_forward(document)
    return Stage(
        name=f"capture, {model}, {rows}",
        kind="capture",
        model=model,
        document=document,
        row=row,
        tokens=sizes.tokens,
        formula="2 N + 2 A C + 2 D V",
        settings=(Setting("-", flops, lambda rates: weights + CUDA_CONTEXT),),
    )


def make_step_stage(sizes: Sizes, rows: str, row: int) -> Stage:
    """Make a step of the student in rows of ``row`` tokens; documents cost the same in any row."""
    hollow = make_hollow(sizes, sizes.student)
    student = describe_student(hollow)
    work = count_model_work(hollow, sizes.vocabulary)

    def make_setting(how: str) -> Setting:
        options = TrainConfig(
            max_steps=1, batch_size=sizes.tokens // sizes.document, gradient_checkpointing=how
        )
        step = partial(
            StepShape, student, options, sizes.document, sizes.vocabulary, chunk=1, kernels=True
        )
        count = student.layers
        recomputed = sum(compute_group_sizes(count, options.gradient_checkpointing)) / count

        def count_memory(rates: DeviceRates) -> int:
            item = 2 if rates.half > rates.single else 4
            return step(item=item).estimate().total + CUDA_CONTEXT

        flops = work.count_training(sizes.document, recomputed)
        return Setting(f"checkpointing {how}", flops, count_memory)

    return Stage(
        name=f"step, {sizes.student}, {rows}",
        kind="step",
        model=sizes.student,
        document=sizes.document,
        row=row,
        tokens=sizes.tokens,
        formula="3 (2 N + 2 A C + 2 D V)",
        settings=tuple(map(make_setting, CHECKPOINTING)),
    )


def make_head_stage(sizes: Sizes) -> Stage:
    """Make the fused loss of some positions, forward and backward, without a model around it."""
    positions, width, vocabulary = sizes.head
    size = width * vocabulary
    # The weight, its gradient and its copy in 16 bits; the hidden states and their gradient.
    held = 10 * size + 8 * positions * width
    return Stage(
        name="LM head",
        kind="head",
        model="",
        document=positions,
        row=positions,
        tokens=positions,
        formula="6 D V",
        settings=(Setting("-", 6 * size, lambda rates: held + CUDA_CONTEXT),),
    )


def count_read_bytes(vocabulary: int) -> float:
    """The bytes of a token on the disk, of profile threshold with the job's defaults."""
    codec = make_codec_identity(CacheConfig()).record_codec(vocabulary)
    return estimate_cache_size(codec).position
