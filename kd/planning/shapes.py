"""A student as the files of its model describe it. Imports no torch, and reads no weight.

The plan of the API and the levers of a plan use it. What autograd keeps is told by the shape, from
what transformers' decoders keep: each matrix of a layer its input and its output, and a little
more for norms, rotations and activations. ``kd.planning.students`` measures it where torch is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kd.config.job import JobConfig
from kd.config.student import StudentConfig, StudentFromTeacher
from kd.memory.model_memory import FLOAT32, describe_parameter, read_student_shapes
from kd.memory.step_bytes import BlockShape, HeadShape, SavedBytesFit, StudentShape
from kd.memory.work import ModelWork, find_expert_share
from kd.models.folder import ModelFolder
from kd.optim.state_size import ParameterShape

Shapes = Mapping[str, tuple[int, ...]]

#: Names of the weights that embed tokens, and of LM heads.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
#: Part of a name that says that a tensor is of one of several experts.
_EXPERTS = re.compile(r"\bexperts\b")
#: The name of the matrix that reads all heads of a layer's attention. GPT-2's is transposed.
_ATTENTION_OUTPUT = re.compile(
    r"\b(self_attn|attn|attention|self_attention)\.(o_proj|out_proj|dense|wo)\.weight$"
)
#: Bytes that autograd keeps for each number of the inputs and outputs of a layer's matrices, by
#: precision: measured on tiny Llamas. bf16 keeps norms and residuals in float32.
#: Other families keep 0.7 to 1.5 of what is told so (tests/kd/planning/test_shapes.py).
_KEPT_BYTES = {"fp32": 4.6, "bf16": 3.3, "bf16_pure": 2.6}
#: More is kept where the activation is computed in several operations.
_COMPOSED = ("gelu_new", "gelu_fast", "quick_gelu")
_COMPOSED_FACTOR = 1.35
#: Bytes of a number of the hidden states between layers, by precision, and how many of them are
#: kept outside of the layers.
_HIDDEN_BYTES = {"fp32": 4, "bf16": 4, "bf16_pure": 2}
_OUTSIDE_COPIES = 2
#: Bytes of a number that autocast casts.
_CAST_BYTES = {"fp32": 0, "bf16": 2, "bf16_pure": 0}


@dataclass(frozen=True)
class StudentPlan:
    """A student as a training phase needs it: its shape, its work, and what autograd keeps."""

    shape: StudentShape
    work: ModelWork
    saved: Mapping[str, SavedBytesFit]


def describe_student_files(
    config: JobConfig, root: Path, find_vocabulary: Callable[[], int]
) -> StudentPlan | None:
    """Describe the student of a job by the files below ``root``; None if they do not tell it.

    ``find_vocabulary`` returns the vocabulary of the teacher.
    """
    student = config.student
    if student is None:
        return None
    shapes, fields = _read_student(config, student, root, find_vocabulary)
    if not shapes or not _find_layer_numbers(shapes):
        return None
    plan = describe_tensors(shapes, fields)
    return plan if student.lora is None else adapt(plan, student.lora.rank, student.lora.base)


def _read_student(
    config: JobConfig, student: StudentConfig, root: Path, find_vocabulary: Callable[[], int]
) -> tuple[Shapes, dict[str, Any]]:
    """The student's tensors, and the fields of its configuration that its work depends on."""
    cut = student.from_teacher
    if cut is not None:
        if config.teacher is None or cut.hidden_size or cut.intermediate_size:
            return {}, {}
        folder = ModelFolder.find(config.teacher.model, root, config.teacher.revision)
        return ({}, {}) if folder is None else (_cut_layers(folder, cut), folder.text_config)
    if student.init is not None and config.teacher is None:
        return {}, {}  # its vocabulary is that of a tokenizer which the worker reads
    if student.init is not None:
        heads = {"num_attention_heads": student.init.attention_heads}
        return read_student_shapes(student, root, find_vocabulary), heads
    assert student.model is not None
    folder = ModelFolder.find(student.model, root, student.revision)
    return ({}, {}) if folder is None else (folder.read_text_shapes(), folder.text_config)


def _cut_layers(folder: ModelFolder, cut: StudentFromTeacher) -> Shapes:
    """The tensors of the first layers of the teacher; which ones are cut changes no size."""
    shapes = folder.read_text_shapes()
    kept = set(_find_layer_numbers(shapes)[: cut.layers])
    return {
        name: shape
        for name, shape in shapes.items()
        if (number := _find_layer_number(name)) is None or number in kept
    }


def _find_layer_number(name: str) -> int | None:
    """The number of the layer that the tensor ``name`` belongs to."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _find_layer_numbers(shapes: Shapes) -> list[int]:
    numbers = {_find_layer_number(name) for name in shapes}
    return sorted(number for number in numbers if number is not None)


# ---------------------------------------------------------------------- shape, work, activations


def describe_tensors(shapes: Shapes, fields: Mapping[str, Any]) -> StudentPlan:
    """Describe a model by the shapes of its tensors and the fields of its configuration."""
    blocks: dict[int | None, list[ParameterShape]] = {}
    for name, shape in shapes.items():
        blocks.setdefault(_find_layer_number(name), []).append(describe_parameter(name, shape))
    layers = tuple(BlockShape(tuple(blocks[number])) for number in _find_layer_numbers(shapes))
    head = _describe_head(shapes)
    inner = _read_count(fields, "intermediate_size") or 4 * head.width
    student = StudentShape(
        layers=layers,
        outside=BlockShape(tuple(blocks.get(None, ()))),
        head=head,
        width=head.width,
        inner=inner,
    )
    share = find_expert_share(fields.get)
    saved = {name: _estimate_saved(student, shapes, fields, share, name) for name in _KEPT_BYTES}
    return StudentPlan(student, _count_work(student, shapes, fields, share), saved)


def _describe_head(shapes: Shapes) -> HeadShape:
    embedding = _find_shape(shapes, _EMBEDDINGS)
    head = _find_shape(shapes, _HEADS)
    rows, width = head or embedding or max(
        (shape for name, shape in shapes.items() if len(shape) == 2), key=lambda each: each[0]
    )  # fmt: skip
    return HeadShape(rows, width, trained=True, tied=head is None)


def _find_shape(shapes: Shapes, names: tuple[str, ...]) -> tuple[int, ...] | None:
    return next((shape for name, shape in shapes.items() if name.endswith(names)), None)


def _list_met(shapes: Shapes, share: float) -> list[tuple[tuple[int, ...], float]]:
    """The matrices of all layers, and the share of each that a token meets."""
    return [
        (shape, share if _EXPERTS.search(name) else 1.0)
        for name, shape in shapes.items()
        if _find_layer_number(name) is not None and len(shape) > 1
    ]


def _count_work(
    student: StudentShape, shapes: Shapes, fields: Mapping[str, Any], share: float
) -> ModelWork:
    heads = _read_count(fields, "num_attention_heads", "n_head") or 1
    width = heads * (_read_count(fields, "head_dim") or student.width // heads)
    # Layers may have heads of different widths: the last map of an attention reads all its heads.
    read = sum(shape[1] for name, shape in shapes.items() if _ATTENTION_OUTPUT.search(name))
    products = sum(part * _multiply(shape) for shape, part in _list_met(shapes, share))
    return ModelWork(
        products=round(products),
        attention=read or len(student.layers) * width,
        head=student.head.numbers,
        vocabulary=student.head.rows,
        stored=student.numbers,
    )


def _read_count(fields: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is a whole number above 0."""
    values = (fields.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _multiply(shape: tuple[int, ...]) -> int:
    return ParameterShape(shape, is_layer_matrix=False).size


def _estimate_saved(
    student: StudentShape, shapes: Shapes, fields: Mapping[str, Any], share: float, precision: str
) -> SavedBytesFit:
    # A stack of experts has its inputs and outputs once for each expert.
    numbers = sum(
        part * sum(shape[-2:]) * _multiply(shape[:-2]) for shape, part in _list_met(shapes, share)
    )
    activation = fields.get("activation_function") or fields.get("hidden_act")
    factor = _COMPOSED_FACTOR if activation in _COMPOSED else 1.0
    casts = _CAST_BYTES[precision] * sum(each.numbers for each in student.layers)
    hidden = float(_HIDDEN_BYTES[precision] * student.width)
    return SavedBytesFit(
        layers=(float(casts), numbers * factor * _KEPT_BYTES[precision], 0.0),
        outside=(0.0, _OUTSIDE_COPIES * hidden, 0.0),
        boundary=(0.0, hidden, 0.0),
    )


# ---------------------------------------------------------------------- changed students


def adapt(plan: StudentPlan, rank: int, base: str = "float32") -> StudentPlan:
    """Freeze the student of ``plan``, and put adapters at all matrices of its layers."""
    item = FLOAT32 if base == "float32" else 2
    shape = plan.shape
    outside = _freeze(shape.outside, item)
    adapted = replace(
        shape,
        layers=tuple(_adapt_block(layer, rank, item) for layer in shape.layers),
        outside=outside,
        head=replace(shape.head, trained=False, item=item),
    )
    return replace(plan, shape=adapted, work=replace(plan.work, frozen=True))


def _freeze(block: BlockShape, item: int) -> BlockShape:
    return BlockShape((), block.numbers, block.frozen_bytes + item * block.trained_numbers)


def _adapt_block(block: BlockShape, rank: int, item: int) -> BlockShape:
    frozen = _freeze(block, item)
    adapters = [
        ParameterShape(shape, is_layer_matrix=True)
        for each in block.trained
        if each.is_layer_matrix
        for shape in ((rank, each.shape[-1]), (each.shape[-2], rank))
    ]
    return replace(frozen, trained=tuple(adapters))


def shorten(plan: StudentPlan, layers: int) -> StudentPlan:
    """Keep the first ``layers`` of the student of ``plan`` alone."""
    share = layers / plan.shape.layer_count
    saved = {name: fit.take_layers(share) for name, fit in plan.saved.items()}
    shape = replace(plan.shape, layers=plan.shape.layers[:layers])
    work = replace(
        plan.work,
        products=round(share * plan.work.products),
        attention=round(share * plan.work.attention),
        stored=shape.numbers,
    )
    return StudentPlan(shape, work, saved)
