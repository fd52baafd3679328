"""The finished student: a Hugging Face folder that loads anywhere, and says where it comes from."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd.config.job import JobConfig
from kd.config.train import TrainConfig
from kd.files import write_json
from kd.precision import Precision
from kd.report import Report, render


def save_dtype(options: TrainConfig, precision: Precision) -> torch.dtype:
    """The precision to save in: as configured, or the one the student was trained in."""
    if options.save_dtype == "auto":
        return precision.dtype
    dtype: torch.dtype = getattr(torch, options.save_dtype)
    return dtype


def save_student(student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, configuration, generation configuration and tokenizer into ``folder``."""
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_provenance(folder: Path, config: JobConfig, report: Report) -> None:
    """Write the model card (README.md), and the job and its numbers as distillation.json."""
    write_json(folder / "distillation.json", {"job": config.model_dump(mode="json"), "report": report})
    start = config.student.model if config.student else None
    data = ModelCardData(
        base_model=start if start and not Path(start).exists() else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["distillation", "knowledge-distillation", "potstill"],
        distillation_teacher=report.get("teacher"),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{render(report)}{_USE}").save(folder / "README.md")


_USE = """
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
"""
