"""The section ``train``: the training loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kd.config.loss import Ramp, find_ramp
from kd.config.optimisation.rates import ScheduleArgument, Scheduler, require_schedule_arguments
from kd.config.section import Section

Optimizer = Literal["adamw", "adamw_8bit", "adafactor", "muon", "lion", "lars", "schedule_free"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


def _take_flag(true: str) -> BeforeValidator:
    """Let a field also accept true and false, which are common for it in other tools."""

    def parse(value: Any) -> Any:
        words = {True: true, False: "none"}
        return words[value] if isinstance(value, bool) else value

    return BeforeValidator(parse)


Checkpointing = Annotated[
    Literal["none", "full", "sqrt"] | Annotated[int, Field(ge=2, le=1024)], _take_flag("full")
]
Compile = Annotated[
    Literal["none", "default", "reduce-overhead", "max-autotune"], _take_flag("default")
]

DropoutShare = Annotated[float, Field(ge=0, lt=1)]
Strategy = Literal["auto", "single", "ddp", "fsdp", "hsdp", "pipeline"]
#: Those by which a device holds a part of every parameter.
SHARDED = ("fsdp", "hsdp")


@dataclass(frozen=True)
class OptimizerRules:
    """What an optimiser is; ``kd.optim.optimizers`` makes it."""

    #: The arguments that ``optim_args`` may set; others have fields of their own.
    arguments: set[str]
    #: Numbers of its state for each number of a parameter, as far as these depend on no shape
    #: (``kd.optim.state_size``).
    numbers: int
    #: It is a remedy when memory runs out.
    small: bool = False
    #: It rounds its steps stochastically, so it can train weights in bfloat16.
    rounds: bool = False
    #: It needs whole matrices: one at a time is gathered (``kd.optim.whole_steps``).
    whole: bool = False
    #: It averages its weights in place of decaying the learning rate.
    averages: bool = False
    needs_torchao: bool = False
    #: Why strategies fsdp and pipeline cannot have it; empty if they can.
    unsharded: str = ""
    unstaged: str = ""
    #: The share of the job's learning rate that it has in an ablation of optimisers.
    rate: Fraction | int = 1


#: The arguments of what is AdamW.
ADAM = {"beta1", "beta2", "eps"}
OPTIMIZERS: dict[str, OptimizerRules] = {
    "adamw": OptimizerRules({"amsgrad", *ADAM}, 2, rounds=True),
    "adamw_8bit": OptimizerRules(
        ADAM,
        2,
        small=True,
        rounds=True,
        needs_torchao=True,
        unsharded="adamw_8bit keeps blocks of 256 numbers of whole matrices; the others do not",
        unstaged="checkpoints of stages do not hold a state of 8 bits",
    ),
    "adafactor": OptimizerRules(
        {"eps1", "eps2", "clip_threshold", "decay_rate"}, 0, small=True, whole=True
    ),
    "muon": OptimizerRules(
        {"momentum", "nesterov", "ns_a", "ns_b", "ns_c", "eps", "ns_steps"}, 1, whole=True
    ),
    "lion": OptimizerRules(
        {"beta1", "beta2", "weight_decouple", "fixed_decay"}, 1, small=True, rate=Fraction(1, 5)
    ),
    # Its steps are a thousandth of the weights' length times the rate.
    "lars": OptimizerRules(
        {"momentum", "dampening", "trust_coefficient", "nesterov"}, 1, whole=True, rate=1000
    ),
    "schedule_free": OptimizerRules({"r", "weight_lr_power", *ADAM}, 2, averages=True),
}


class TrainConfig(Section):
    """The training loop."""

    max_steps: int | None = Field(None, ge=1, le=100_000_000)
    """Optimiser steps; give either this or epochs."""

    epochs: float | None = Field(None, gt=0, le=10_000)
    """Passes over the training sequences; give either this or max_steps."""

    batch_size: int = Field(8, ge=1, le=65536)
    """Sequences per forward pass."""

    gradient_accumulation_steps: int = Field(1, ge=1, le=65536)
    """Forward passes per optimiser step; the loss is the mean over all their tokens."""

    learning_rate: float = Field(3e-4, gt=0, le=10)
    """Peak learning rate."""

    lr_scheduler_type: Scheduler = "cosine"
    """A schedule of transformers.get_scheduler; onecycle (torch's OneCycleLR); step = multiplied by
    gamma every step_size steps after the warm-up; multistep = multiplied by gamma at each of
    milestones; reduce_lr_on_plateau = multiplied by factor when more than patience evaluations in a
    row have not lowered the held-out loss. `kd lr job.yaml` shows the rates."""

    lr_scheduler_kwargs: dict[str, ScheduleArgument] = Field(default_factory=dict)
    """Extra arguments of the schedule, for example {min_lr_rate: 0.1} or {milestones: [1000, 2000],
    gamma: 0.1}."""

    warmup_steps: int = Field(0, ge=0, le=10_000_000)
    """Steps of linear warm-up."""

    optim: Optimizer = "adamw"
    """The optimiser: adamw, adamw_8bit (8-bit state for the matrices of the layers, AdamW for the
    rest; needs the extra quantization, and is slow on a CPU), adafactor, muon (for matrices; AdamW
    for the rest), lion, lars, schedule_free (AdamW; set lr_scheduler_type to constant or
    constant_with_warmup)."""

    optim_args: dict[str, float] = Field(default_factory=dict)
    """Extra arguments of the optimiser, for example {beta2: 0.999} for adamw, where beta1, beta2
    and eps are 0.9, 0.95 and 1e-8, or {momentum: 0.95} for muon."""

    weight_decay: float = Field(0.1, ge=0, le=10)
    """Weight decay of matrices; norms and biases have none."""

    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights; the average is evaluated and saved."""

    lm_head_floor: float = Field(0.1, ge=0, lt=1)
    """Make the rows of rare words in the LM head, and the noise of sampled records in them, move
    little. Weights whose gradients are below this share of the root mean square of all gradients
    move in proportion to their gradients (adamw, adamw_8bit, muon and schedule_free). 0 = plain
    AdamW, where all weights move by about the same amount."""

    max_grad_norm: float = Field(1.0, ge=0, le=1e6)
    """Clip the gradient's global norm to this; 0 = do not clip."""

    dropout: (
        Annotated[
            Annotated[DropoutShare, Tag("float")] | Annotated[Ramp, Tag("Ramp")],
            Discriminator(find_ramp),
        ]
        | None
    ) = None
    """Dropout of the student's layers: a number below 1, or a schedule over the run {schedule,
    start, end, steps}; default: the value in the student's config.json."""

    precision: Literal["auto", "bf16", "bf16_pure", "fp16", "fp32"] = "auto"
    """Autocast precision; auto = bf16 on GPUs that have it, fp16 with loss scaling on older GPUs,
    fp32 on a CPU. The scale of fp16 begins at 65,536; it halves when gradients overflow, and that
    step is skipped; it doubles after 2,000 steps whose gradients are finite. bf16_pure = weights
    and gradients are in bfloat16, too, which halves their memory, and the updates are rounded
    stochastically (optim adamw or adamw_8bit); the gradients of micro-batches are summed in
    bfloat16, so a few large micro-batches are better than many small ones."""

    fp8: bool = False
    """Run the matrix products of the student's layers in float8, with torchao (extra quantization),
    on GPUs of the Ada and Hopper generations and later; precision must be auto or bf16. It is worth
    it for wide layers (4,096 and more) with train.compile."""

    gradient_checkpointing: Checkpointing = "none"
    """Recompute activations in the backward pass to save memory: none, full = of every layer, sqrt
    = in about sqrt(layers) groups, n = of every n-th layer."""

    activation_offload: bool = False
    """Keep a GPU's activations for the backward pass in the host's memory, which must have room for
    them. The gradients are the same. The copies take time; with gradient_checkpointing only the
    hidden states between layers are copied."""

    strategy: Strategy = "auto"
    """How several devices (resources.gpus) train one student. ddp: each holds the whole student,
    and gradients are averaged. fsdp: each holds a part of the weights, gradients and optimiser
    state (FSDP2), for students that do not fit on one device. hsdp: fsdp within each host, and ddp
    between hosts (resources.hosts), over slower links. pipeline: each holds some consecutive
    layers, and sends only hidden states, for slow links; of M = gradient_accumulation_steps and S
    devices, a device waits for (S - 1) / (M + S - 1) of a step. single: one device. auto: the
    first of ddp, hsdp and fsdp that fits by the memory estimate. A step has as many sequences as on
    one device, in equal parts."""

    fsdp_offload: bool = False
    """Keep each GPU's part of the weights, gradients and optimiser state in the host's memory
    (strategy fsdp). The optimiser steps there, too. Each layer is copied to the GPU for each of its
    passes, and its gradient is copied back, which takes time. Has no effect on a CPU."""

    compile: Compile = "none"
    """torch.compile the student: none, default, reduce-overhead or max-autotune. A run reports its
    graph breaks. Packed rows cause none, except on a GPU if attention with dropout, soft-caps,
    sinks or chunks runs in flash-attn or flex attention: these get the document boundaries of a
    batch from the host."""

    logits_chunk: int | None = Field(None, ge=1, le=1_048_576)
    """Positions whose logits are in memory at once; the default depends on the vocabulary and the
    free memory. A larger number moves fewer bytes. Another number changes the last bits of the
    gradients."""

    auto_batch: bool = False
    """If memory runs out, at the start or at a later step, halve batch_size and double
    gradient_accumulation_steps; the sequences per optimiser step stay the same."""

    logging_steps: int = Field(10, ge=1, le=1_000_000)
    """Steps between two reports of metrics."""

    eval_steps: int = Field(100, ge=1, le=10_000_000)
    """Steps between two evaluations on the held-out text."""

    save_steps: int = Field(100, ge=1, le=10_000_000)
    """Steps between two checkpoints."""

    save_total_limit: int | None = Field(None, ge=1, le=1000)
    """Checkpoints to keep: the newest ones, and with early stopping also the best one. None = 2
    while the job runs, and the last one once it has ended."""

    early_stopping_patience: int | None = Field(None, ge=1, le=10_000)
    """Stop after this many evaluations without a better held-out loss, and keep the best
    weights."""

    order: Literal["shuffled", "windows", "length", "curriculum"] = "shuffled"
    """Order of an epoch's sequences. shuffled; windows = the shards, or parts of large shards, come
    in random order, and the sequences are shuffled within windows of some shards. A window has
    about four million tokens, or fewer if these take 256 MiB decoded. So a cache that is larger
    than memory is read from disk about once an epoch; length = batches of similar length;
    curriculum = in the first epoch from low to high entropy of the teacher, then shuffled."""

    dataloader_num_workers: int | None = Field(None, ge=0, le=64)
    """Threads that read and decode batches ahead of the step; 0 = read them in the step. Default 1
    on a GPU and 0 on a CPU, where the step uses all cores and such a thread would slow it down."""

    report_to: tuple[Tracker, ...] = Field((), max_length=16)
    """Experiment trackers: tensorboard, wandb, mlflow, trackio. metrics.jsonl is always written."""

    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the saved student; auto = bfloat16 or float16 if the student was trained in it,
    else float32."""

    seed: int = Field(42, ge=0, le=2**32 - 1)
    """Seed of initialisation, data order and dropout."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.max_steps and train.epochs")
        return self

    @model_validator(mode="after")
    def _optimizer_has_its_arguments(self) -> Self:
        known = self.optimizer.arguments
        if strange := sorted(self.optim_args.keys() - known):
            raise ValueError(
                f"train.optim_args of {self.optim} cannot hold {', '.join(strange)}, "
                f"only {', '.join(sorted(known)) or 'nothing'}"
            )
        if self.optimizer.averages and "constant" not in self.lr_scheduler_type:
            raise ValueError(
                f"train.optim {self.optim} needs train.lr_scheduler_type constant or "
                f"constant_with_warmup, not {self.lr_scheduler_type}"
            )
        return self

    @model_validator(mode="after")
    def _precision_suits(self) -> Self:
        # Other optimisers would round their steps to the nearest.
        if self.is_pure_bfloat16 and not self.optimizer.rounds:
            rounding = [name for name, rules in OPTIMIZERS.items() if rules.rounds]
            raise ValueError(
                "train.precision bf16_pure needs an optimiser that rounds its steps "
                f"stochastically, {' or '.join(rounding)}, but train.optim is "
                f"{self.optim}: small steps would be lost"
            )
        if self.fp8 and self.precision not in ("auto", "bf16"):
            raise ValueError(
                "train.fp8 multiplies in float8 where bf16 would multiply in bfloat16, but "
                f"train.precision is {self.precision}: set it to auto or bf16"
            )
        return self

    @model_validator(mode="after")
    def _dropout_changes_within_its_bounds(self) -> Self:
        dropout = self.dropout
        if not isinstance(dropout, Ramp):
            return self
        for name, end in (("start", dropout.start), ("end", dropout.end)):
            if end >= 1:
                raise ValueError(f"train.dropout.{name} must be below 1, but got {end:g}")
        if self.compile != "none":
            raise ValueError(
                f"train.dropout changes at every step, for which train.compile {self.compile} "
                "would compile again: set train.compile to none, or train.dropout to a number"
            )
        return self

    @model_validator(mode="after")
    def _only_parts_are_offloaded(self) -> Self:
        if self.fsdp_offload and self.strategy not in SHARDED:
            raise ValueError(
                f"train.fsdp_offload needs train.strategy fsdp or hsdp, but it is {self.strategy}, "
                "which keeps whole weights on the device"
            )
        return self

    @property
    def optimizer(self) -> OptimizerRules:
        """The rules of the optimiser that ``optim`` names."""
        return OPTIMIZERS[self.optim]

    @property
    def checkpoints_kept(self) -> int:
        """The checkpoints that stay while the job runs."""
        return self.save_total_limit or 2

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimiser step."""
        return self.batch_size * self.gradient_accumulation_steps

    def count_steps(self, sequences: int | None) -> int | None:
        """Optimiser steps for ``sequences`` of training text; None if they depend on an unknown."""
        if self.max_steps is not None:
            return self.max_steps
        if sequences is None or self.epochs is None:
            return None
        return max(1, math.ceil(self.epochs * sequences / self.sequences_per_step))

    @property
    def is_pure_bfloat16(self) -> bool:
        """Whether the trained weights are in bfloat16, without a copy in float32."""
        return self.precision == "bf16_pure"

    @model_validator(mode="after")
    def _compiled_code_keeps_what_it_must(self) -> Self:
        if self.activation_offload and self.compile != "none":
            raise ValueError(
                f"train.activation_offload cannot reach into layers that train.compile "
                f"{self.compile} compiles: set train.compile to none, or use "
                "train.gradient_checkpointing"
            )
        # Each replay of a graph overwrites the outputs of the last one, and gradients are not
        # copied. But these must outlive one backward pass.
        several = self.gradient_accumulation_steps
        for field, given in (
            (f"train.gradient_accumulation_steps {several}", several > 1),
            ("train.auto_batch", self.auto_batch),
        ):
            if self.replays_graphs and given:
                raise ValueError(
                    f"train.compile {self.compile} replays CUDA graphs, which overwrite gradients "
                    f"that {field} must keep: use train.compile default"
                )
        return self

    @property
    def replays_graphs(self) -> bool:
        """Whether the compiled student runs as CUDA graphs."""
        return self.compile in ("reduce-overhead", "max-autotune")

    @model_validator(mode="after")
    def _schedule_has_its_arguments(self) -> Self:
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ValueError(
                "train.lr_scheduler_type constant has no warm-up, but train.warmup_steps is "
                f"{self.warmup_steps}: use train.lr_scheduler_type constant_with_warmup"
            )
        if self.lr_scheduler_type == "onecycle" and self.warmup_steps:
            if "pct_start" in self.lr_scheduler_kwargs:
                raise ValueError(
                    "train.warmup_steps and pct_start of train.lr_scheduler_kwargs both set the "
                    "length of the warm-up: give only one"
                )
            if self.max_steps is not None and self.warmup_steps >= self.max_steps:
                raise ValueError(
                    "train.lr_scheduler_type onecycle needs steps after the warm-up, but "
                    f"train.warmup_steps {self.warmup_steps} takes all of train.max_steps "
                    f"{self.max_steps}"
                )
        require_schedule_arguments(self.lr_scheduler_type, self.lr_scheduler_kwargs)
        return self
