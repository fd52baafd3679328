"""Models in folders of their own, with whole weights, which any program can read."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kd.models.saving import save_student


def save_teacher(source: Path, gguf: str | None, folder: Path, template: str | None = None) -> None:
    """Save the teacher in float32; ``template`` is its chat template, where it has none.

    ``gguf`` names the GGUF file in ``source``, if the weights are in one.
    """
    more = {} if gguf is None else {"gguf_file": gguf}
    read = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **more)
    config = copy.deepcopy(read.config)
    vars(config).pop("quantization_config", None)  # the weights of a GGUF file are whole by now
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source, **more)
    tokenizer.chat_template = tokenizer.chat_template or template
    save_whole(model, tokenizer, folder)


def save_whole(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model so that ``folder`` exists only when it is complete."""
    begun = folder.with_name(f"{folder.name}, begun")
    shutil.rmtree(begun, ignore_errors=True)
    save_student(model, tokenizer, begun)
    begun.rename(folder)
