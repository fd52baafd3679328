"""What a student cannot use where each device holds a part of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from kd.config.job import JobConfig
from kd.config.loss import LearnedTemperature
from kd.config.train import TrainConfig


def list_unsharded_fields(options: TrainConfig) -> list[tuple[str, str]]:
    """List the fields of ``options`` that strategy fsdp cannot serve, each with its reason."""
    found: dict[str, str] = {}
    if options.optimizer.unsharded:
        found["optim"] = options.optimizer.unsharded
    if options.fp8:
        found["fp8"] = "float8 was not tried with gathered weights"
    if options.auto_batch:
        why = "a rank that runs out of memory in a rehearsal would leave the others waiting"
        found["auto_batch"] = why
    if options.replays_graphs:
        why = "CUDA graphs keep the memory of the weights, which is freed after each layer"
        found["compile"] = why
    if options.activation_offload:
        found["activation_offload"] = "it would copy gathered weights to the host"
    return list(found.items())


def list_unstaged_fields(config: JobConfig, options: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield the fields that strategy pipeline cannot serve, as pointers, each with its reason."""
    temperature = config.loss.temperature
    mode = temperature.mode if isinstance(temperature, LearnedTemperature) else None
    if options.optimizer.unstaged:
        yield "/train/optim", options.optimizer.unstaged
    if options.precision in ("fp16", "bf16_pure"):
        why = f"{options.precision} scales or rounds gradients of all stages alike; bf16 does not"
        yield "/train/precision", why
    if options.fp8:
        yield "/train/fp8", "float8 was not tried in stages"
    if options.auto_batch:
        why = "a stage that runs out of memory in a rehearsal would leave the others waiting"
        yield "/train/auto_batch", why
    if options.compile != "none":
        yield "/train/compile", "compiled layers would not be cut"
    if options.activation_offload:
        yield "/train/activation_offload", "stages hold the activations of several micro-batches"
    if options.order == "length":
        yield "/train/order", "the micro-batches of a step would have different lengths"
    if config.loss.looks_ahead:
        yield "/loss/temperature/mode", f"{mode} needs gradients of the whole student"
    if config.loss.features.weight > 0:
        yield "/loss/features", "the projections of features would belong to the last stage alone"
    if config.loss.router_balance:
        yield "/loss/router_balance", "the routers of all layers would have to reach the last stage"
