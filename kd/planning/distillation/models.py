"""Teacher and student of a plan: a model's folder, its config.json alone, or a size such as 70B.

A size stands for a Llama of about so many parameters, in the proportions of Llama 3: heads of 64
numbers (128 from a width of 3,072), keys and values of at most 8 heads, an MLP of 3.5 widths, about
a layer for each 128 numbers of the width. With L layers of width D, V tokens and embeddings that
are apart from the LM head,

    parameters = L (2 D^2 + 2 D K + 10.5 D^2) + 2 V D        K: the width of the keys
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from kd.config.job import JobConfig
from kd.config.student import StudentConfig, StudentInit
from kd.errors import ConfigError, ModelError, Problem
from kd.memory.model_memory import read_student_shapes
from kd.models.folder import ModelFolder
from kd.planning.shapes import StudentPlan, adapt, describe_student_files, describe_tensors

#: V of a model of which only the size is known: that of Llama 3.
VOCABULARY = 128_256
#: Numbers of the width for each layer, and the most heads of keys and values.
_WIDTH_OF_LAYER = 128
_KEY_HEADS = 8
#: The width from which a head has 128 numbers and not 64, and the widths that are tried. The widest
#: is that of ``student.init``.
_WIDE = 3072
_WIDTHS = (*range(256, _WIDE, 256), *range(_WIDE, 32_768 + 1, 1024))
#: Parameters from which embeddings and LM head are apart, as in Llama 3 (1B and 3B tie them).
_TIED_BELOW = 4e9
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MBT])", re.IGNORECASE)
_FACTORS = {"M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class PlannedModel:
    """A model as a plan needs it, the name by which it was asked for, and how it is known."""

    name: str
    plan: StudentPlan
    source: str

    @property
    def vocabulary(self) -> int:
        """V, the rows of the LM head."""
        return self.plan.shape.head.rows

    @property
    def parameters(self) -> int:
        """All parameters; embeddings that are the LM head's weight too count once."""
        return self.plan.work.stored

    def describe(self) -> str:
        """The model in words: its name, parameters and vocabulary."""
        return f"{self.name} ({self.parameters / 1e9:.4g}e9 parameters, V = {self.vocabulary:,})"


def read_model(name: str, root: Path, field: str, vocabulary: int = VOCABULARY) -> PlannedModel:
    """Read the model ``name``: a folder below ``root``, one of the hub's cache, or a size.

    ``vocabulary`` is that of a model of which only the size is known. Raises ``ConfigError`` for
    the field ``field`` where nothing tells the model.
    """
    path = root / name
    if path.is_file() and path.name == "config.json":
        return _read_config(name, ModelFolder(path.parent), field)
    folder = ModelFolder.find(name, root)
    if folder is not None:
        return _read_config(name, folder, field)
    size = _SIZE.fullmatch(name.strip())
    if size is None:
        raise _refuse(
            field, f"{name!r} is neither a folder on this machine, nor a config.json, nor a size."
        )
    return _build_by_size(name, float(size[1]) * _FACTORS[size[2].upper()], vocabulary, field)


def _refuse(field: str, detail: str) -> ConfigError:
    remedy = "Give the folder of a model, the path of its config.json, or a size such as 70B."
    return ConfigError([Problem(field, detail, remedy)])


def _read_config(name: str, folder: ModelFolder, field: str) -> PlannedModel:
    """Build the model of a config.json without memory, and read the shapes of its tensors."""
    try:
        if not folder.config:
            raise _refuse(field, f"{folder.path} holds no config.json.")
        folder.require_decoder()
        shapes = _make_hollow_shapes(folder)
    except ModelError as error:
        raise ConfigError([Problem(field, error.detail, error.remedy)]) from None
    plan = describe_tensors(shapes, folder.text_config)
    return PlannedModel(name, plan, "its config.json")


def _make_hollow_shapes(folder: ModelFolder) -> dict[str, tuple[int, ...]]:
    import torch

    from kd.models.loading import load_hollow

    with torch.device("meta"):
        hollow = load_hollow(folder.path, torch.bfloat16)
    return {name: tuple(each.shape) for name, each in hollow.named_parameters()}


# ---------------------------------------------------------------------- by size


def _build_by_size(name: str, parameters: float, vocabulary: int, field: str) -> PlannedModel:
    init = choose_shape(parameters, vocabulary)
    if init is None:
        raise _refuse(
            field, f"{name} is not a size of a Llama with a vocabulary of {vocabulary:,} tokens."
        )
    shapes = read_student_shapes(StudentConfig(init=init), Path(), lambda: vocabulary)
    plan = describe_tensors(shapes, {"num_attention_heads": init.attention_heads})
    layers = f"{init.layers} layers of width {init.hidden_size:,}"
    return PlannedModel(name, plan, f"a Llama of {layers}, assumed for the size {name}")


def choose_shape(parameters: float, vocabulary: int = VOCABULARY) -> StudentInit | None:
    """The Llama of about ``parameters``; None where no Llama of this vocabulary has so few.

    The width is that whose usual depth comes nearest; the depth then meets the parameters.
    """
    tied = parameters < _TIED_BELOW
    width = min(
        _WIDTHS,
        key=lambda each: abs(
            _count(each, max(each // _WIDTH_OF_LAYER, 1), vocabulary, tied) - parameters
        ),
    )
    outside = _count(width, 0, vocabulary, tied)
    layers = round((parameters - outside) / _count_layer(width))
    if not 1 <= layers <= 256:
        return None
    return StudentInit(
        layers=layers,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_attention_heads=width // _find_head_width(width),
        num_key_value_heads=_count_key_heads(width),
        tie_word_embeddings=tied,
    )


def _find_head_width(width: int) -> int:
    return 128 if width >= _WIDE else 64


def _count_key_heads(width: int) -> int:
    return math.gcd(width // _find_head_width(width), _KEY_HEADS)


def _count_layer(width: int) -> int:
    """Parameters of a layer: queries and output, keys and values, and the MLP's three matrices."""
    keys = _count_key_heads(width) * _find_head_width(width)
    return 2 * width * width + 2 * width * keys + 3 * width * (7 * width // 2)


def _count(width: int, layers: int, vocabulary: int, tied: bool) -> int:
    return layers * _count_layer(width) + (1 if tied else 2) * vocabulary * width


# ---------------------------------------------------------------------- of a job


def read_teacher(config: JobConfig, name: str | None, root: Path) -> PlannedModel:
    """Read the teacher ``name``, or else that of the job. Raises ``ConfigError``."""
    if name is not None:
        return read_model(name, root, "/teacher")
    teacher = config.teacher
    if teacher is None:
        raise _refuse("/teacher", "the job has no teacher.")
    if teacher.backend != "local":
        raise _refuse("/teacher/backend", "a teacher on a server runs on devices of its own.")
    return read_model(teacher.model, root, "/teacher/model")


def read_student(
    config: JobConfig, name: str | None, root: Path, teacher: PlannedModel
) -> PlannedModel | None:
    """Read the student ``name``, or else that of the job; None for a capture alone."""
    if name is not None:
        return read_model(name, root, "/student", teacher.vocabulary)
    student = config.student
    if student is None or config.train is None:
        return None
    if student.model is not None:
        found = read_model(student.model, root, "/student/model", teacher.vocabulary)
        if student.lora is None:
            return found
        adapted = adapt(found.plan, student.lora.rank, student.lora.base)
        return PlannedModel(found.name, adapted, f"{found.source}, with adapters")
    plan = describe_student_files(config, root, lambda: teacher.vocabulary)
    if plan is None:
        detail = "the student is cut from a teacher whose weights are not on this machine."
        raise _refuse("/student", detail)
    return PlannedModel("the job's student", plan, "the job's section student")
