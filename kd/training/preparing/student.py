"""What is checked of a student before it trains, and what is changed in its layers."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from kd.config.data import DataConfig
from kd.config.loss import LossConfig
from kd.config.train import TrainConfig
from kd.loss.chunk_size import suits_kernels
from kd.memory.activation_checkpointing import checkpoint_activations
from kd.memory.activation_offload import offload_activations
from kd.memory.host import read_memory_bytes
from kd.memory.parallel import ParallelStrategy, choose_strategy, estimate_rank
from kd.memory.step_bytes import StepMemory, StepShape
from kd.memory.step_memory import describe_step, measure_free_memory
from kd.models.attention.causality import require_causal
from kd.models.attention.interface import use_packed_attention, uses_packed_attention
from kd.models.attention.isolation import isolate_documents, warn_of_mask
from kd.models.layers import require_context
from kd.models.lm_head import LMHead, find_student_head
from kd.models.precision import round_parameters
from kd.models.products.float8 import multiply_in_float8
from kd.models.stages.cut import pick_own_layers
from kd.parallel.group import Group
from kd.text.steps.reading import count_pinned_bytes
from kd.training.preparing.requirements import require_stages
from kd.training.preparing.setting import TrainingSetting


def examine_student(
    setting: TrainingSetting, data: DataConfig, loss: LossConfig, options: TrainConfig
) -> tuple[LMHead, StepMemory, ParallelStrategy]:
    """Check that the job can train its student, and choose the strategy.

    Rank 0 alone runs the student; the others do as it found. Returns the LM head, an estimate of
    the memory of a step on a rank, and the strategy.
    """
    student = setting.student
    group = setting.group
    length = data.sequence_length
    require_context(student, length)
    if group.staged:
        require_stages(loss, student, group.size)
    if group.leads:
        require_causal(student, length)
    lm_head = find_student_head(student, setting.vocabulary)
    # The weights of the other ranks have no values yet that could show it.
    scale, softcap = group.share((lm_head.scale, lm_head.softcap))
    lm_head = replace(lm_head, scale=scale, softcap=softcap)
    if data.packing:
        if group.leads:
            isolate_documents(student, setting.precision.dtype, setting.monitor)
        if group.share(uses_packed_attention(student)):
            use_packed_attention(student)
        warn_of_mask(student, length, setting.monitor)
    if options.is_pure_bfloat16:
        # The checks above need all bits of float32, and all that follows sees the rounded weights.
        round_parameters(student, torch.bfloat16)
    on_gpu = setting.device.type == "cuda"
    # The bytes of the device that are free, and those that the student takes there.
    free = measure_free_memory(setting.device)
    tensors = (*student.parameters(), *student.buffers())
    held = sum(each.nbytes for each in tensors if each.device.type == setting.device.type)
    rooms = group.gather(None if free is None else free + held)
    room = None if None in rooms else min(rooms)
    found = None
    if group.leads:
        kernels = on_gpu and suits_kernels(setting.source.codec, loss.divergence)
        kernels = kernels and setting.source.projection() is None
        what = (length, setting.vocabulary, setting.precision, kernels)
        step = describe_step(
            student, options, *what, looks_ahead=loss.looks_ahead, device=setting.device
        )
        strategy = _choose_strategy(loss, step, room, group)
        parts = group.per_host if strategy == "hsdp" else group.size
        found = asdict(estimate_rank(step, strategy, parts)), strategy
    fields, strategy = group.share(found)
    memory = StepMemory(**fields)
    batches = count_pinned_bytes(setting.source, options) if on_gpu else 0
    host = memory.warn_of_host(read_memory_bytes(), group.size, batches)
    for warning in filter(None, (memory.warning(room), host)):
        setting.monitor.emit("warning", message=warning)
    return lm_head, memory, strategy


def _choose_strategy(
    loss: LossConfig, step: StepShape, room: int | None, group: Group
) -> ParallelStrategy:
    """Return the job's strategy, or what "auto" means for it."""
    asked = step.options.strategy
    if group.alone or asked == "single":
        return "single"
    if asked != "auto":
        return asked
    return "ddp" if loss.looks_ahead else choose_strategy(step, group.size, room, group.per_host)


def change_layers(setting: TrainingSetting, options: TrainConfig) -> None:
    """Let the layers multiply in float8, and checkpoint or offload what they keep, as asked."""
    student = setting.student
    group = setting.group
    if options.fp8:
        multiply_in_float8(student)
    own = pick_own_layers(student, group.rank, group.size) if group.staged else None
    checkpoint_activations(student, options.gradient_checkpointing, own)
    if options.activation_offload:
        offload_activations(student)
