"""The finished student: a Hugging Face folder that loads anywhere, and says where it comes from."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd.config.job import JobConfig
from kd.config.student import StudentConfig
from kd.config.train import TrainConfig
from kd.files import read_json, write_json
from kd.levers.adapters import has_adapters, load_adapters, merge_adapters, remove_adapters, save_adapters
from kd.models import load, resolve
from kd.precision import Precision
from kd.report import Report, render


def save_dtype(options: TrainConfig, precision: Precision) -> torch.dtype:
    """The precision to save in: as configured, or the one the student was trained in."""
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
    """Write weights (rounded to ``dtype``), configuration, generation configuration and tokenizer into ``folder``.

        student/            the model, its adapters merged in unless ``plan.lora.merge`` is false
        student/adapter/    the adapters, as peft keeps them
        student/base/       what they belong to, where they are not merged and it lies nowhere else

    Afterwards ``student`` is what was written: without adapters, and rounded.
    """
    target: Path | None = folder
    if has_adapters(student):
        target = _save_adapters(student, folder, plan)
    if target is not None:
        nn.Module.to(student, dtype)
        student.save_pretrained(target)
    tokenizer.save_pretrained(folder)


def _save_adapters(student: PreTrainedModel, folder: Path, plan: StudentConfig | None) -> Path | None:
    """Write the adapters and take them out of ``student``; returns where what is left is to be written, if anywhere."""
    assert plan is not None and plan.lora is not None, "only student.lora gives a student adapters"
    if plan.lora.merge:
        save_adapters(student, folder / _ADAPTER, plan.model, plan.revision)
        merge_adapters(student)
        return folder
    save_adapters(student, folder / _ADAPTER, plan.model or _BASE, plan.revision)
    remove_adapters(student)
    return None if plan.model else folder / _BASE


def load_saved(folder: Path) -> PreTrainedModel:
    """What ``save_student`` wrote into ``folder``, in float32; adapters without weights are merged into their base."""
    adapter = read_json(folder / _ADAPTER / "adapter_config.json")
    if adapter is None or (folder / "config.json").is_file():
        return load(folder, torch.float32)
    own = folder / _BASE
    base = own if own.is_dir() else resolve(adapter["base_model_name_or_path"], adapter["revision"])
    return load_adapters(load(base, torch.float32), folder / _ADAPTER)


def write_provenance(folder: Path, config: JobConfig, report: Report) -> None:
    """Write the model card (README.md), and the job and its numbers as distillation.json."""
    write_json(folder / "distillation.json", {"job": config.model_dump(mode="json"), "report": report})
    start = config.student.model if config.student else None
    alone = not (folder / "config.json").is_file()
    data = ModelCardData(
        base_model=start if start and not Path(start).exists() else None,
        library_name="peft" if alone else "transformers",
        pipeline_tag="text-generation",
        tags=["distillation", "knowledge-distillation", "potstill"],
        distillation_teacher=report.get("teacher"),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{render(report)}{_use(folder)}").save(folder / "README.md")


def _use(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return _USE.format(imports="", model='AutoModelForCausalLM.from_pretrained("path/to/this/folder")')
    base = "path/to/this/folder/base" if (folder / _BASE).is_dir() else _base_name(folder)
    model = f'AutoModelForCausalLM.from_pretrained("{base}")\n'
    model += f'model = PeftModel.from_pretrained(model, "path/to/this/folder/{_ADAPTER}")'
    return _USE.format(imports="from peft import PeftModel\n", model=model)


def _base_name(folder: Path) -> str:
    return str(read_json(folder / _ADAPTER / "adapter_config.json")["base_model_name_or_path"])


_ADAPTER, _BASE = "adapter", "base"

_USE = """
## Use

```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

model = {model}
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
"""
