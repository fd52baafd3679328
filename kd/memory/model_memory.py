"""The least memory that the models of a job take, from their files and shapes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cache.errors import PotstillError
from kd.config.job import JobConfig
from kd.config.student import StudentConfig, StudentInit
from kd.models.folder import ModelFolder
from kd.models.quantization.groups import choose_int4_group
from kd.optim.state_size import (
    AVERAGE_NUMBER_BYTES,
    ParameterShape,
    count_optimizer_bytes,
    count_trained_bytes,
)

#: Bytes of a number in float32.
FLOAT32 = 4
_STORED_BYTES = {"float32": FLOAT32, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelMemory:
    """The bytes of the teacher's weights, and of the student with its gradients and optimiser.

    Activations and the framework need more. None means that a model is not used, or that its size
    is unknown.
    """

    teacher_bytes: int | None
    student_parameters: int | None
    student_bytes: int | None

    @property
    def least_bytes(self) -> int | None:
        """The bytes that a process of the job needs at least: it holds one model at a time."""
        known = [size for size in (self.teacher_bytes, self.student_bytes) if size]
        return max(known, default=None)


def estimate_model_memory(
    config: JobConfig, root: Path, find_vocabulary: Callable[[], int]
) -> ModelMemory:
    """Estimate the memory of the job's models; relative paths start at ``root``.

    ``find_vocabulary`` returns the vocabulary of the teacher. It is called where a new student gets
    that vocabulary.
    """
    teacher = config.captured_teacher
    share = 0
    # A remote teacher takes no memory of the worker.
    if teacher is not None and teacher.is_local:
        stored = count_teacher_bytes(root / teacher.model, teacher.quantization)
        share = teacher.compute_device_share(stored, config.resources.gpus or 1)
    parameters = _list_student_parameters(config, root, find_vocabulary)
    return ModelMemory(
        teacher_bytes=share or None,
        student_parameters=sum(each.size for each in parameters) or None,
        student_bytes=_count_student_bytes(config, parameters) or None,
    )


def count_teacher_bytes(path: Path, quantization: str | None) -> int:
    """Count the bytes of the weights in ``path`` as they are stored, or as they are rounded.

    The scales of rounded weights need a little more. 0 if no file of safetensors is there.
    """
    folder = ModelFolder(path)
    stored = sum(file.stat().st_size for file in folder.weight_files)
    if quantization is None:
        return stored
    item_bytes = _STORED_BYTES.get(folder.dtype or "float32", FLOAT32)
    return round(stored * compute_rounded_share(folder, quantization, item_bytes))


def compute_rounded_share(folder: ModelFolder, quantization: str, item_bytes: int) -> float:
    """Compute the bytes of weights with rounded layers, as a share of ``item_bytes`` a number."""
    shapes = folder.read_text_shapes()
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    rounded = sum(
        sizes[name]
        for name, shape in shapes.items()
        if _is_layer_matrix(name, shape)
        and (quantization != "int4" or choose_int4_group(shape[1]) is not None)
    )
    bits = {"int8": 8, "int4": 4}[quantization]
    return 1 - rounded / max(sum(sizes.values()), 1) * (1 - bits / (8 * item_bytes))


def estimate_least_memory(config: JobConfig, root: Path) -> int | None:
    """The bytes that the job needs at least; None if they are unknown or a model cannot be read."""
    try:
        # Reading a tokenizer takes long, so a new student counts without its embeddings.
        found = estimate_model_memory(config, root, lambda: 0)
    except (PotstillError, OSError, ValueError):
        return None
    if found.student_bytes is None and config.student is not None and config.student.init:
        # Without a teacher the vocabulary is not known, but the layers are.
        shapes = _list_llama_shapes(config.student.init, vocabulary=0)
        layers = [describe_parameter(name, shape) for name, shape in shapes]
        found = replace(found, student_bytes=_count_student_bytes(config, layers))
    return found.least_bytes


def _count_student_bytes(config: JobConfig, parameters: list[ParameterShape]) -> int:
    """Count the bytes of weights, gradients, optimiser state and moving average."""
    numbers = sum(each.size for each in parameters)
    weights = FLOAT32 * numbers
    lora = None if config.student is None else config.student.lora
    if config.train is None or lora is not None:
        # LoRA trains only the adapters, which are small beside the weights.
        return weights // 2 if lora is not None and lora.base == "bfloat16" else weights
    average = AVERAGE_NUMBER_BYTES * numbers if config.train.ema_decay is not None else 0
    state = count_optimizer_bytes(config.train.optim, parameters)
    return 2 * count_trained_bytes(numbers, config.train) + state + average


def _list_student_parameters(
    config: JobConfig, root: Path, find_vocabulary: Callable[[], int]
) -> list[ParameterShape]:
    """List the shapes of the student's parameters; empty if only a loaded model could tell them."""
    student = config.student
    if student is None or config.train is None:
        return []
    if student.init is not None and config.teacher_files is None:
        return []
    shapes = read_student_shapes(student, root, find_vocabulary)
    return [describe_parameter(name, shape) for name, shape in shapes.items()]


def read_student_shapes(
    student: StudentConfig, root: Path, find_vocabulary: Callable[[], int]
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a student by its name.

    Empty for one that is cut out of its teacher, and where no file of safetensors is there.
    """
    if student.init is not None:
        return dict(_list_llama_shapes(student.init, find_vocabulary()))
    if student.model is not None:
        return ModelFolder(root / student.model).read_text_shapes()
    return {}


def describe_parameter(name: str, shape: tuple[int, ...]) -> ParameterShape:
    """Describe the tensor ``name`` of a model as a trained parameter."""
    return ParameterShape(shape, _is_layer_matrix(name, shape))


def _list_llama_shapes(
    shape: StudentInit, vocabulary: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield a Llama's tensors: attention, MLP and norms of each layer, embeddings, LM head."""
    width = shape.hidden_size
    keys = (shape.num_key_value_heads or shape.attention_heads) * (width // shape.attention_heads)
    matrices = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (shape.mlp_width, width),
        "mlp.up_proj": (shape.mlp_width, width),
        "mlp.down_proj": (width, shape.mlp_width),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    for layer in range(shape.layers):
        start = f"model.layers.{layer}"
        yield from ((f"{start}.{name}.weight", size) for name, size in matrices.items())
        yield from ((f"{start}.{name}.weight", (width,)) for name in norms)
    yield "model.norm.weight", (width,)
    yield "model.embed_tokens.weight", (vocabulary, width)
    # Tied embeddings are the LM head's weight too, and are counted once.
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (vocabulary, width)


def _is_layer_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of a layer.

    The name of such a tensor holds the layer's number: ``model.layers.0.mlp.up_proj.weight``.
    """
    numbered = any(part.isdecimal() for part in name.split("."))
    return numbered and len(shape) == 2 and not name.endswith("bias")
