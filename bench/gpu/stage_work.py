"""The stages of a job, each with the work of its tokens and the memory that it needs.

The arithmetic is that of ``kd.memory.phases`` and ``kd.memory.work``. A model is named by the sizes
of a Llama; nothing of its weights is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kd.capture.codec_identity import make_codec_identity
from kd.capture.estimate.storage import estimate_cache_size
from kd.config.cache import CacheConfig
from kd.config.train import TrainConfig
from kd.memory.model_work import count_model_work
from kd.memory.phases import CapturePhase
from kd.memory.step_bytes import SavedBytesFit
from kd.memory.step_memory import describe_student, fit_saved_bytes
from kd.memory.training_phase import Place, TrainingPhase
from kd.memory.work import ModelWork, Pass, Work
from kd.models.attention.isolation import isolate_documents
from kd.models.precision import Precision

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
    """A way to run a stage: its name, and its work and memory on a device."""

    name: str
    count_work: Callable[[Place], Work]
    count_memory: Callable[[Place], int]


@dataclass(frozen=True)
class Stage:
    """A stage with the formulas of a token's FLOP and bytes, and its settings, the fastest first.

    ``kind`` is capture, step or head; ``document`` and ``row`` are the tokens of a document and of
    a row.
    """

    name: str
    kind: str
    model: str
    document: int
    row: int
    tokens: int
    formulas: tuple[str, str]
    settings: tuple[Setting, ...]


def choose_setting(stage: Stage, place: Place) -> Setting | None:
    """Choose the first setting that fits into the memory of the device; None where none does."""
    fitting = (each for each in stage.settings if each.count_memory(place) <= place.rates.memory)
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
    training = make_training(sizes)
    steps = [make_step_stage(sizes, training, name, row) for name, (_, row) in rows.items()]
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


# ---------------------------------------------------------------------- capture


def make_capture_stage(sizes: Sizes, model: str, rows: str, document: int, row: int) -> Stage:
    """Make a capture of one micro-batch."""
    hollow = make_hollow(sizes, model)

    def describe(place: Place) -> CapturePhase:
        count = sizes.tokens // document
        return CapturePhase(
            teacher=hollow,
            vocabulary=sizes.vocabulary,
            batch_size=count,
            length=document,
            sequences=count,
            targets=document - 1,
            item_bytes=4 if place.auto == "fp32" else 2,
            quantization=None,
            records=0,
            seconds=None,
        )

    def count_memory(place: Place) -> int:
        return describe(place).estimate_memory(place).count_device_bytes(place.is_gpu)

    setting = Setting("-", lambda place: describe(place).work, count_memory)
    return Stage(
        name=f"capture, {model}, {rows}",
        kind="capture",
        model=model,
        document=document,
        row=row,
        tokens=sizes.tokens,
        formulas=("2 N + 2 A C + 2 D V", "w P / M + 8 V"),
        settings=(setting,),
    )


# ---------------------------------------------------------------------- step


def make_training(sizes: Sizes) -> TrainingPhase:
    """Make a training of one step of one micro-batch, document by document."""
    hollow = make_hollow(sizes, sizes.student)
    return TrainingPhase(
        student=describe_student(hollow),
        options=TrainConfig(max_steps=1, batch_size=sizes.tokens // sizes.document),
        vocabulary=sizes.vocabulary,
        length=sizes.document,
        targets=sizes.document - 1,
        steps=1,
        evaluations=0,
        held_out=0,
        loader=0,
        saved={name: fit_layers(sizes, name) for name in ("fp32", "bf16")},
        model=count_model_work(hollow, sizes.vocabulary),
        suits_kernels=True,
    )


def make_step_stage(sizes: Sizes, training: TrainingPhase, rows: str, row: int) -> Stage:
    """Make a step of the student in rows of ``row`` tokens; documents cost the same in any row."""

    def count_memory(how: str, place: Place) -> int:
        changed = training.change(gradient_checkpointing=how)
        return changed.estimate_training_memory(place).count_device_bytes(place.is_gpu)

    def count_work(how: str, place: Place) -> Work:
        return training.change(gradient_checkpointing=how).count_training(place)

    return Stage(
        name=f"step, {sizes.student}, {rows}",
        kind="step",
        model=sizes.student,
        document=sizes.document,
        row=row,
        tokens=sizes.tokens,
        formulas=(
            "3 (2 N + 2 A C + 2 D V)",
            "3 w P / M + 16 V + 2 S + 28 P / M + (8 k + 4) D V / M",
        ),
        settings=tuple(
            Setting(f"checkpointing {how}", partial(count_work, how), partial(count_memory, how))
            for how in CHECKPOINTING
        ),
    )


def fit_layers(sizes: Sizes, precision: str) -> SavedBytesFit:
    """Fit what autograd keeps of all layers of a student, from passes of one of them."""
    config = make_config(sizes, sizes.student)
    layers = config.num_hidden_layers
    config.num_hidden_layers = 1
    config.vocab_size = 64
    student = LlamaForCausalLM(config)
    isolate_documents(student)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    one = fit_saved_bytes(student, sizes.document, Precision("cpu", dtype))
    fixed, linear, square = (layers * part for part in one.layers)
    return replace(one, layers=(fixed, linear, square))


# ---------------------------------------------------------------------- LM head, reader


def make_head_stage(sizes: Sizes) -> Stage:
    """Make the fused loss of some positions, forward and backward, without a model around it."""
    positions, width, vocabulary = sizes.head
    size = width * vocabulary
    model = ModelWork(products=0, attention=0, head=size, vocabulary=vocabulary, stored=size)

    def count_memory(place: Place) -> int:
        # The weight, its gradient and its copy in 16 bits; the hidden states and their gradient.
        held = place.process + 10 * size + 8 * positions * width
        chunk = place.choose_chunk(vocabulary, held)
        return held + 8 * chunk * vocabulary

    def count_work(place: Place) -> Work:
        chunk = place.choose_chunk(vocabulary, place.process + 10 * size)
        chunks = -(-positions // chunk)
        run = Pass(positions, positions, 0, micro_batches=chunks, trains=True)
        found = Work.of(model, run, 4)
        # A chunk reads the weight twice in 16 bits, and reads and writes its gradient in float32:
        # together the 12 bytes of three reads in float32, so the gradient is counted already.
        return replace(found, bytes=found.bytes - found.head_gradient, head_gradient=0.0)

    return Stage(
        name="LM head",
        kind="head",
        model="",
        document=positions,
        row=positions,
        tokens=positions,
        formulas=("6 D V", "12 D V / c + 16 V"),
        settings=(Setting("-", count_work, count_memory),),
    )


def count_read_bytes(vocabulary: int) -> float:
    """The bytes of a token on the disk, of profile threshold with the job's defaults."""
    codec = make_codec_identity(CacheConfig()).record_codec(vocabulary)
    return estimate_cache_size(codec).position
