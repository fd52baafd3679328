"""What a student cannot use where each device holds a part of it. Imports no torch."""

from __future__ import annotations

from kd.config.job import JobConfig
from kd.config.loss import LearnedTemperature
from kd.config.train import TrainConfig


def list_unsharded_fields(options: TrainConfig) -> list[tuple[str, str]]:
    """List the fields of ``options`` that strategy fsdp cannot serve, each with its reason."""
    found = (
        ("optim", bool(options.optimizer.unsharded), options.optimizer.unsharded),
        ("fp8", options.fp8, "float8 was not tried with gathered weights"),
        (
            "auto_batch",
            options.auto_batch,
            "a rank that runs out of memory in a rehearsal would leave the others waiting",
        ),
        (
            "compile",
            options.replays_graphs,
            "CUDA graphs keep the memory of the weights, which is freed after each layer",
        ),
        (
            "activation_offload",
            options.activation_offload,
            "it would copy gathered weights to the host",
        ),
    )
    return [(name, why) for name, refused, why in found if refused]


def list_unstaged_fields(config: JobConfig, options: TrainConfig) -> list[tuple[str, str]]:
    """List the fields that strategy pipeline cannot serve, as pointers, each with its reason."""
    temperature = config.loss.temperature
    mode = temperature.mode if isinstance(temperature, LearnedTemperature) else None
    found = (
        ("/train/optim", bool(options.optimizer.unstaged), options.optimizer.unstaged),
        (
            "/train/precision",
            options.precision in ("fp16", "bf16_pure"),
            f"{options.precision} scales or rounds gradients of all stages alike; bf16 does not",
        ),
        ("/train/fp8", options.fp8, "float8 was not tried in stages"),
        (
            "/train/auto_batch",
            options.auto_batch,
            "a stage that runs out of memory in a rehearsal would leave the others waiting",
        ),
        ("/train/compile", options.compile != "none", "compiled layers would not be cut"),
        (
            "/train/activation_offload",
            options.activation_offload,
            "stages hold the activations of several micro-batches",
        ),
        (
            "/train/order",
            options.order == "length",
            "the micro-batches of a step would have different lengths",
        ),
        (
            "/loss/temperature/mode",
            config.loss.looks_ahead,
            f"{mode} needs gradients of the whole student",
        ),
        (
            "/loss/features",
            config.loss.features.weight > 0,
            "the projections of features would belong to the last stage alone",
        ),
        (
            "/loss/router_balance",
            bool(config.loss.router_balance),
            "the routers of all layers would have to reach the last stage",
        ),
    )
    return [(pointer, why) for pointer, refused, why in found if refused]
