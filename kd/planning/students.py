"""The student of a job as a phase of training, with what autograd keeps measured. Needs torch.

No weight is read. A small student is made with zeros in its place, and runs real passes; a large
one runs on torch's fake tensors, which have a shape and no memory, so that a student of any size
can be planned on a laptop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from kd.config.job import JobConfig
from kd.loss.chunk_size import suits_kernels
from kd.memory.phases import describe_training_phase, measure_saved_bytes, measure_training
from kd.memory.step_bytes import SavedBytesFit
from kd.memory.training_phase import TrainingPhase
from kd.models.attention.isolation import try_to_isolate
from kd.models.loading import require_trainable_student
from kd.models.vocabulary import choose_student_vocabulary
from kd.pipeline import load_student_tokenizer
from kd.planning.texts import TextSize

#: Numbers of a student above which its passes run on fake tensors.
LARGE = 1 << 28


def describe_training(config: JobConfig, text: TextSize, steps: int) -> TrainingPhase:
    """Describe the training of ``config`` for ``steps`` optimiser steps on ``text``.

    Raises what building the student raises.
    """
    tokenizer = load_student_tokenizer(config)
    length = text.length
    assert config.student is not None, "a job that trains has a student"
    student = require_trainable_student(config.student, tokenizer, length, config.teacher)
    options = config.require_train()
    sizes: dict[str, Any] = {
        "vocabulary": choose_student_vocabulary(tokenizer, config),
        "length": length,
        "targets": text.targets,
        "steps": steps,
        "evaluations": 2 + steps // options.eval_steps,
        "held_out": text.validation,
        "loader": text.loader,
        "suits_kernels": suits_kernels(text.codec, config.loss.divergence),
    }
    if sum(parameter.numel() for parameter in student.parameters()) > LARGE:
        saved = measure_fake_passes(student, length)
        return describe_training_phase(student, options, saved, **sizes)
    _allocate(student)
    for tensor in (*student.parameters(), *student.buffers()):
        nn.init.zeros_(tensor)
    why = try_to_isolate(student) if config.data.packing else None
    if why is not None and config.data.packing is True:
        raise why
    return measure_training(student, options, **sizes)


def measure_fake_passes(student: PreTrainedModel, length: int) -> Mapping[str, SavedBytesFit]:
    """Measure what passes of ``student`` keep in each precision; its weights take no memory.

    Its rows are one document. torch's fake products of experts know bfloat16 alone: where a pass
    in float32 is refused, twice the bytes of the one in bfloat16 are told, which is too many.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        _allocate(student)
    half = measure_saved_bytes(student, length, "bf16_pure")
    return {"bf16_pure": half} | {
        name: _measure_or_double(student, length, name, half) for name in ("fp32", "bf16")
    }


def _measure_or_double(
    student: PreTrainedModel, length: int, name: str, half: SavedBytesFit
) -> SavedBytesFit:
    # torch prints the traceback of a refused operation, which is not an error here.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return measure_saved_bytes(student, length, name)
    except RuntimeError:
        return half.scale(2.0)
    finally:
        logger.setLevel(level)


def _allocate(student: PreTrainedModel) -> None:
    """Give the parameters memory; one that two modules share stays one."""
    nn.Module.to_empty(student, device="cpu")
    student.tie_weights()
