"""What a student cannot use where each device holds a part of every parameter. Imports no torch."""

from __future__ import annotations

from kd.config.loss import LearnedTemperature, LossConfig
from kd.config.train import TrainConfig

#: The optimisers that need whole matrices: one at a time is gathered (``kd.optim.whole_steps``).
WHOLE_OPTIMIZERS = ("muon", "lars", "adafactor")
#: The modes of a learned temperature that take gradients of whole parameters.
WHOLE_MODES = ("lookahead", "teacher_only")


def needs_whole_gradients(loss: LossConfig) -> bool:
    """Whether the temperature of ``loss`` is learned from gradients of whole parameters."""
    temperature = loss.temperature
    return isinstance(temperature, LearnedTemperature) and temperature.mode in WHOLE_MODES


def list_unsharded_fields(options: TrainConfig) -> list[tuple[str, str]]:
    """List the fields of ``options`` that strategy fsdp cannot serve, each with its reason."""
    found = (
        (
            "optim",
            options.optim == "adamw_8bit",
            "adamw_8bit keeps blocks of 256 numbers of whole matrices; the others do not",
        ),
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
