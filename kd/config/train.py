"""The training loop."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kd.config.section import Section

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]


# What get_scheduler takes for each of them, besides warm-up and length; of the second set, exactly one is needed.
SCHEDULER_KWARGS: dict[str, tuple[set[str], set[str]]] = {
    "linear": (set(), set()),
    "cosine": ({"num_cycles"}, set()),
    "cosine_with_restarts": ({"num_cycles"}, set()),
    "polynomial": ({"lr_end", "power"}, set()),
    "constant": (set(), set()),
    "constant_with_warmup": (set(), set()),
    "inverse_sqrt": ({"timescale"}, set()),
    "cosine_with_min_lr": ({"num_cycles"}, {"min_lr", "min_lr_rate"}),
    "cosine_warmup_with_min_lr": ({"num_cycles", "warmup_lr_rate"}, {"min_lr", "min_lr_rate"}),
    "warmup_stable_decay": ({"num_cycles", "min_lr_ratio", "num_stable_steps"}, {"num_decay_steps"}),
}


class TrainConfig(Section):
    """The training loop."""

    max_steps: int | None = Field(None, ge=1, le=100_000_000, description="Optimiser steps; give this or epochs.")
    epochs: float | None = Field(
        None, gt=0, le=10_000, description="Passes over the training sequences; give this or max_steps."
    )
    batch_size: int = Field(8, ge=1, le=65536, description="Sequences per forward pass.")
    gradient_accumulation_steps: int = Field(
        1, ge=1, le=65536, description="Forward passes per optimiser step; the mean is over tokens, not over passes."
    )
    learning_rate: float = Field(3e-4, gt=0, le=10, description="Peak learning rate.")
    lr_scheduler_type: Scheduler = Field("cosine", description="Schedule of transformers.get_scheduler.")
    lr_scheduler_kwargs: dict[str, float] = Field(
        default_factory=dict, description="Extra arguments of the schedule, e.g. {min_lr_rate: 0.1}."
    )
    warmup_steps: int = Field(0, ge=0, le=10_000_000, description="Steps of linear warm-up.")
    weight_decay: float = Field(
        0.1, ge=0, le=10, description="AdamW weight decay, on matrices only: never on norms and biases."
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta 2.")
    adam_epsilon: float = Field(1e-8, gt=0, le=1, description="AdamW epsilon.")
    max_grad_norm: float = Field(
        1.0, ge=0, le=1e6, description="Clip the gradient's global norm to this; 0 = do not clip."
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description=(
            "Autocast precision; auto = bf16 on GPUs that have it, fp16 with loss scaling on older ones, fp32 on a CPU."
        ),
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    compile: bool = Field(False, description="torch.compile the student.")
    logging_steps: int = Field(10, ge=1, le=1_000_000, description="Report metrics every so many steps.")
    eval_steps: int = Field(100, ge=1, le=10_000_000, description="Evaluate on the held-out text every so many steps.")
    save_steps: int = Field(100, ge=1, le=10_000_000, description="Write a checkpoint every so many steps.")
    save_total_limit: int = Field(
        2, ge=1, le=1000, description="Checkpoints kept; the newest, and the best when early stopping is on."
    )
    early_stopping_patience: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="Stop after so many evaluations without a better held-out loss, and keep the best weights.",
    )
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Precision of the saved student; auto = bfloat16 or float16 if it was trained so, else float32.",
    )
    seed: int = Field(42, ge=0, le=2**32 - 1, description="Seed of initialisation, data order and dropout.")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.max_steps and train.epochs")
        return self

    @model_validator(mode="after")
    def _schedule_has_its_arguments(self) -> Self:
        given = self.lr_scheduler_kwargs.keys()
        optional, needed = SCHEDULER_KWARGS[self.lr_scheduler_type]
        if unknown := given - optional - needed:
            raise ValueError(
                f"lr_scheduler_kwargs of {self.lr_scheduler_type} cannot hold {', '.join(sorted(unknown))}, "
                f"only {', '.join(sorted(optional | needed)) or 'nothing'}"
            )
        if needed and len(given & needed) != 1:
            raise ValueError(f"lr_scheduler_kwargs of {self.lr_scheduler_type} must hold {' or '.join(sorted(needed))}")
        return self
