"""The least memory that the models of a job take, from their files and shapes. Imports no torch.

Activations and the framework need more.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cache.errors import PotstillError
from kd.config.job import JobConfig
from kd.config.routing.parts import list_members
from kd.config.student import StudentInit
from kd.config.teacher import TeacherConfig
from kd.models.folder import ModelFolder
from kd.optim.state_size import ParameterShape, count_state_bytes, count_trained_bytes

#: Bytes of a number in float32.
FLOAT32 = 4
_STORED_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
_ROUNDED_BITS = {"int8": 8, "int4": 4}


def count_teacher_bytes(config: JobConfig, root: Path) -> int | None:
    """Count the bytes of the teacher's weights that each device of the job holds at least.

    They are those of its files below ``root``, or of all weights rounded to teacher.quantization.
    Of several teachers one runs at a time, and the largest counts. None without a teacher that this
    machine runs, and where its files are not known.
    """
    teachers = [member.job.captured_teacher for member in list_members(config)]
    sizes = [_count_bytes(each, config, root) for each in teachers if each is not None]
    return max((size for size in sizes if size is not None), default=None)


def _count_bytes(teacher: TeacherConfig, config: JobConfig, root: Path) -> int | None:
    if not teacher.is_local:
        return None
    folder = ModelFolder(root / teacher.model)
    size = sum(file.stat().st_size for file in folder.weight_files)
    if teacher.quantization is not None:
        stored_bits = _STORED_BITS.get(folder.dtype or "float32", 32)
        size = size * _ROUNDED_BITS[teacher.quantization] // stored_bits
    return teacher.compute_device_share(size, config.resources.gpus or 1) or None


def list_student_shapes(
    config: JobConfig, root: Path, vocabulary: int = 0
) -> tuple[ParameterShape, ...]:
    """List the parameters of the job's student; a new one gets this ``vocabulary``.

    Empty without a training, for a student that is cut out of its teacher, and where no file of
    safetensors is below ``root``: only a loaded model could tell the shapes. Every matrix counts as
    one of a layer, whose state is never larger than that of other matrices.
    """
    student = config.student
    shapes: Iterable[tuple[int, ...]] = ()
    if student is not None and config.train is not None and student.init is not None:
        shapes = _list_llama_shapes(student.init, vocabulary)
    elif student is not None and config.train is not None and student.model is not None:
        shapes = ModelFolder(root / student.model).read_text_shapes().values()
    return tuple(ParameterShape(shape, is_layer_matrix=len(shape) > 1) for shape in shapes)


def _list_llama_shapes(shape: StudentInit, vocabulary: int) -> list[tuple[int, ...]]:
    """List the shapes of a Llama: attention, MLP and norms of each layer, norm, embeddings."""
    width = shape.hidden_size
    keys = (shape.num_key_value_heads or shape.attention_heads) * (width // shape.attention_heads)
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    mlp = [(shape.mlp_width, width)] * 3
    norms = [(width,)] * (2 * shape.layers + 1)
    # Tied embeddings are the LM head's weight too, and are counted once.
    embeddings = [(vocabulary, width)] * (1 if shape.tie_word_embeddings else 2)
    return [*(attention + mlp) * shape.layers, *norms, *embeddings]


def count_student_bytes(config: JobConfig, shapes: tuple[ParameterShape, ...]) -> int | None:
    """Count the bytes of weights, gradients, optimiser state and moving average of a student.

    None without ``shapes``, which then are not known.
    """
    numbers = sum(each.size for each in shapes)
    if config.student is None or config.train is None or not numbers:
        return None
    if config.student.lora is not None:
        # LoRA trains only the adapters, which are small beside the weights.
        return FLOAT32 * numbers // (2 if config.student.lora.base == "bfloat16" else 1)
    weights = count_trained_bytes(numbers, config.train)
    return 2 * weights + count_state_bytes(config.train, shapes)


def estimate_least_memory(config: JobConfig, root: Path) -> int | None:
    """The bytes that a process of the job needs at least: it holds one model at a time.

    None if they are unknown, or if a model cannot be read.
    """
    try:
        # Reading a tokenizer takes long, so a new student counts without its embeddings.
        student = count_student_bytes(config, list_student_shapes(config, root))
        sizes = [count_teacher_bytes(config, root), student]
    except (PotstillError, OSError, ValueError):
        return None
    return max((size for size in sizes if size), default=None)
