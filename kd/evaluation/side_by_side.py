"""Teacher and student side by side on this device: size, memory, speed, and how both continue.

    reads     one forward pass over held-out text, with the logits of every position
    writes    all prompts at once, always the most probable token
    memory    the weights, and the most that reading and writing add to them

Of reading the best of a few passes counts, so that another program disturbs it little.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache.json_object import Json
from kd.addresses import ModelSource
from kd.evaluation.teacher_comparison import CHUNK_ELEMENTS, EvaluatedModel
from kd.files import format_bytes
from kd.memory.model_work import count_weight_bytes
from kd.memory.step_memory import measure_free_memory, read_peak_memory, reset_peak_memory
from kd.models.folder import ModelFolder, find_source
from kd.models.loading import choose_teacher_dtype, outline_teacher
from kd.models.teacher_files import TeacherFiles
from kd.text.batches import Batch, Source, make_batch
from kd.training.samples import Prompt, continue_prompts

#: Tokens of the text that is read to measure the speed, at most one sequence more.
READ_TOKENS = {"cuda": 8192, "cpu": 512}
#: Passes that are timed after the first one, which warms up.
PASSES = 3
#: A first pass of more seconds is the only one.
LONG_SECONDS = 2.0
#: Free memory that a teacher needs, as a multiple of its weights.
_MARGIN = 1.2
#: The most that a GGUF file grows when it is unpacked to float32.
_GGUF_GROWTH = 16


@dataclass(frozen=True)
class ModelCost:
    """The size, memory and speed of a model on this device; None where it is not known.

    ``memory_bytes`` are those of the weights, ``working_bytes`` those that reading and writing
    add: a GPU's allocator counts them; on a CPU they are not known.
    """

    parameters: int | None
    disk_bytes: int | None
    memory_bytes: int | None = None
    working_bytes: int | None = None
    read_tokens_per_second: float | None = None
    write_tokens_per_second: float | None = None

    @classmethod
    def of_folder(cls, folder: Path | None, gguf_file: str | None = None) -> ModelCost:
        """Read the sizes of a model from its files, without loading it."""
        if folder is None:
            return cls(None, None)
        return cls(count_stored_parameters(folder) or None, count_disk_bytes(folder, gguf_file))

    @classmethod
    def of_source(cls, source: ModelSource | None) -> ModelCost:
        """Read the sizes of a model from its files, if they are on this machine."""
        if source is None or not source.has_weights:
            return cls(None, None)
        found = find_source(source, Path())
        return cls.of_folder(None if found is None else found.path, source.gguf_file)


def count_disk_bytes(folder: Path, gguf_file: str | None = None) -> int | None:
    """Count the bytes of the weights in ``folder``, of all its safetensors or of one GGUF file."""
    # A student with adapters keeps them, and perhaps their base, in folders of their own. Where
    # they are merged, the folder's own weights are the whole model.
    found = ModelFolder(folder).weight_files or sorted(folder.glob("*/*.safetensors"))
    files = [folder / gguf_file] if gguf_file else found
    return sum(file.stat().st_size for file in files if file.is_file()) or None


def count_stored_parameters(folder: Path) -> int:
    """Count the numbers in the safetensors files of ``folder``, of the language model alone."""
    return sum(int(np.prod(shape)) for shape in ModelFolder(folder).read_text_shapes().values())


# ---------------------------------------------------------------------- measured


def read_sample(source: Source, device: torch.device) -> Batch:
    """Read a few held-out sequences, or training ones where none are held out."""
    first = source.train_count if source.validation_count else 0
    left = source.validation_count or source.train_count
    sequences, _ = source.read(np.arange(first, first + 1))
    count = min(max(READ_TOKENS[device.type] // sequences.length, 1), left)
    sequences, _ = source.read(np.arange(first, first + count))
    return make_batch(sequences, None).to(device)


@torch.no_grad()
def measure_cost(
    model: EvaluatedModel, batch: Batch, writer: SampleWriter, known: ModelCost
) -> ModelCost:
    """Measure the speed and the memory of ``model``, and add them to what is ``known``."""
    device = batch.tokens_BL.device
    reset_peak_memory(device)
    # Right after a reset the peak is what is in use.
    before = read_peak_memory(device)
    read_seconds, _ = _time_once(lambda: _read(model, batch), device)
    if read_seconds <= LONG_SECONDS:
        passes = (_time_once(lambda: _read(model, batch), device) for _ in range(PASSES))
        read_seconds = min(seconds for seconds, _ in passes)
    # Reading has warmed the device up.
    write_seconds, written = _time_once(lambda: writer.write(model.model), device)
    tensors = (*model.model.parameters(), *model.model.buffers())
    return ModelCost(
        parameters=model.model.num_parameters(),
        disk_bytes=known.disk_bytes,
        memory_bytes=sum(each.numel() * each.element_size() for each in tensors),
        working_bytes=read_peak_memory(device) - before if device.type == "cuda" else None,
        read_tokens_per_second=round(batch.tokens_BL.numel() / read_seconds, 1),
        write_tokens_per_second=round(written / write_seconds, 1) if written else None,
    )


def _read(model: EvaluatedModel, batch: Batch) -> int:
    hidden_ND = model.compute_hidden_states(batch)
    for chunk_ND in hidden_ND.split(max(CHUNK_ELEMENTS // model.lm_head.vocabulary, 1)):
        model.lm_head.compute_logits(chunk_ND)
    return len(hidden_ND)


def _time_once(work: Callable[[], int], device: torch.device) -> tuple[float, int]:
    began = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - began, 1e-9), found


def take_stored_precision(student: PreTrainedModel, folder: Path | None) -> PreTrainedModel:
    """Return the student as it would be loaded to be used here.

    On a GPU that is in the precision of its file. A CPU is slow in 16 bits: there it stays in
    float32, as the teacher does.
    """
    stored = ModelFolder(folder).dtype if folder is not None else None
    if student.device.type == "cpu" or stored in (None, "float32"):
        return student
    used = copy.deepcopy(student)
    nn.Module.to(used, getattr(torch, stored or "float32"))
    return used


# ---------------------------------------------------------------------- the teacher


def find_lack_of_memory(
    teacher: TeacherFiles, device: torch.device, limit: int | None = None
) -> str | None:
    """Say how much memory ``device`` lacks for a teacher; None if it has enough.

    ``limit`` are the bytes that the job may use on a CPU.
    """
    need = _estimate_loaded_bytes(teacher, device)
    free = measure_free_memory(device)
    if limit is not None and device.type != "cuda":
        reset_peak_memory(device)  # the peak is now what is in use
        left = max(limit - read_peak_memory(device), 0)
        free = left if free is None else min(free, left)
    if free is not None and need * _MARGIN > free:
        return f"it needs about {format_bytes(need)} of memory, and {format_bytes(free)} is free"
    return None


def _estimate_loaded_bytes(teacher: TeacherFiles, device: torch.device) -> int:
    """Estimate the bytes of the teacher's weights when they are loaded."""
    section = teacher.section
    if section.gguf_file:
        return (count_disk_bytes(teacher.folder, section.gguf_file) or 0) * _GGUF_GROWTH
    dtype = choose_teacher_dtype(teacher, device)
    if section.quantization is None:
        return count_stored_parameters(teacher.folder) * dtype.itemsize
    return count_weight_bytes(outline_teacher(teacher, dtype), dtype.itemsize, section.quantization)


# ---------------------------------------------------------------------- both


def compare_on_device(
    models: Mapping[str, EvaluatedModel],
    known: Mapping[str, ModelCost],
    batch: Batch,
    writer: SampleWriter,
) -> Json:
    """The samples of ``models``, and the costs of these and of other ``known`` models.

    The first of ``known`` is the student, the second its teacher.
    """
    costs = dict(known)
    samples = {}
    for name, model in models.items():
        costs[name] = measure_cost(model, batch, writer, known[name])
        samples[name] = writer.texts
    student, teacher = costs.values()
    # How many times the student is smaller or faster, where both figures are known.
    pairs = {
        "times_fewer_parameters": (teacher.parameters, student.parameters),
        "times_smaller_on_disk": (teacher.disk_bytes, student.disk_bytes),
        "times_less_memory": (teacher.memory_bytes, student.memory_bytes),
        "times_faster_reading": (student.read_tokens_per_second, teacher.read_tokens_per_second),
        "times_faster_writing": (student.write_tokens_per_second, teacher.write_tokens_per_second),
    }
    ratios = {name: round(more / less, 3) for name, (more, less) in pairs.items() if more and less}
    return {
        "samples": samples,
        "costs": {name: asdict(cost) for name, cost in costs.items() if cost.parameters},
        "student_is": ratios,
    }


@dataclass
class SampleWriter:
    """Lets models continue the same ``prompts``, and keeps the last texts of each.

    A text has at most ``count`` tokens.
    """

    prompts: list[Prompt]
    tokenizer: PreTrainedTokenizerBase
    count: int
    texts: list[dict[str, str]] = field(default_factory=list)

    def write(self, model: PreTrainedModel) -> int:
        """Continue every prompt, and return the number of tokens written."""
        found = continue_prompts(model, self.tokenizer, self.prompts, self.count)
        self.texts = [
            {"prompt": prompt.text, "text": each.text}
            for prompt, each in zip(self.prompts, found, strict=True)
        ]
        return sum(each.tokens for each in found)
