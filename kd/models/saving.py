"""Save the finished student as a Hugging Face folder, and load it again."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd.config.student import StudentConfig
from kd.config.train import TrainConfig
from kd.files import read_json
from kd.models.adapters import (
    has_adapters,
    load_adapters,
    merge_adapters,
    remove_adapters,
    save_adapters,
)
from kd.models.folder import ADAPTER_FOLDER, BASE_FOLDER, resolve_model
from kd.models.loading import ReadingPlan, load_model, read_model
from kd.models.precision import Precision, pick_device, round_parameters


def choose_save_dtype(options: TrainConfig, precision: Precision) -> torch.dtype:
    """Return the precision to save in: the configured one, or with "auto" the one of training."""
    if options.save_dtype == "auto":
        return precision.dtype
    dtype: torch.dtype = getattr(torch, options.save_dtype)
    return dtype


def save_student(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    plan: StudentConfig | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights, both configurations and the tokenizer of ``student`` into ``folder``.

        student/            the model, with its adapters merged in unless ``plan.lora.merge`` is
                            false
        student/adapter/    the adapters, in the format of peft
        student/base/       the model that unmerged adapters belong to, if it has no folder of its
                            own

    Weights are rounded to ``dtype``. Changes ``student``: afterwards it is rounded too, and has no
    adapters.
    """
    target: Path | None = folder
    if has_adapters(student):
        target = _save_adapters(student, folder, plan)
    if target is not None:
        # The weights are rounded here and not by save_pretrained, so that ``student`` is what is
        # saved.
        nn.Module.to(student, dtype)
        student.save_pretrained(target)
    tokenizer.save_pretrained(folder)


def _save_adapters(
    student: PreTrainedModel, folder: Path, plan: StudentConfig | None
) -> Path | None:
    """Write the adapters and remove them from ``student``.

    Returns the folder where the rest of the student must be written, or None if it need not be.
    """
    assert plan is not None and plan.lora is not None, "only student.lora gives a student adapters"
    if plan.lora.merge:
        save_adapters(student, folder / ADAPTER_FOLDER, plan.model, plan.revision)
        # In 16 bits the adapters' part would be rounded before the sum is.
        round_parameters(student, torch.float32)
        merge_adapters(student)
        return folder
    save_adapters(student, folder / ADAPTER_FOLDER, plan.model or BASE_FOLDER, plan.revision)
    remove_adapters(student)
    return None if plan.model else folder / BASE_FOLDER


def load_saved_student(folder: Path) -> PreTrainedModel:
    """Load the student that ``save_student`` wrote into ``folder``, in float32.

    It is on the device of the run. Adapters that were saved without their base are merged into it,
    on the CPU.
    """
    adapter = read_json(folder / ADAPTER_FOLDER / "adapter_config.json")
    if adapter is None or (folder / "config.json").is_file():
        return read_model(folder, ReadingPlan(torch.float32, pick_device()))
    own = folder / BASE_FOLDER
    base = (
        own
        if own.is_dir()
        else resolve_model(adapter["base_model_name_or_path"], adapter["revision"])
    )
    return load_adapters(load_model(base, torch.float32), folder / ADAPTER_FOLDER)
