"""A job, as one frozen tree: the body of POST /jobs, the YAML of ``kd run``, the fixtures of the tests.

Imports no torch: the API process reads it. A field's description is the API's documentation and
its line in docs/configuration.md. Paths are resolved against the folder that the run starts in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

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


class Section(BaseModel):
    """A part of the tree: immutable, and every unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=False)


class TeacherConfig(Section):
    """The model that is read once."""

    model: str = Field(min_length=1, description="Local folder or hub id of the teacher (a causal language model).")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    gguf_file: str | None = Field(
        None, description="Name of a GGUF file inside the model's folder, to load it from there."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Precision of the teacher's weights; auto = the checkpoint's own on a GPU, float32 on a CPU.",
    )
    batch_size: int = Field(
        8,
        ge=1,
        le=4096,
        description="Sequences per forward pass of the capture; changes speed and memory, not the cache.",
    )
    trust_remote_code: bool = Field(
        False,
        description=(
            "Run Python code that comes with the model. The operator must allow it too (KD_TRUST_REMOTE_CODE=1)."
        ),
    )


class StudentInit(Section):
    """A fresh Llama."""

    layers: int = Field(ge=1, le=256, description="Transformer layers.")
    hidden_size: int = Field(ge=8, le=32768, description="Width of the hidden state.")
    intermediate_size: int | None = Field(
        None,
        ge=8,
        le=131072,
        description="Width of the MLP; default 8/3 of hidden_size, rounded up to a multiple of 32.",
    )
    num_attention_heads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Attention heads; default one per 64 of hidden_size, at least 2 where it divides.",
    )
    num_key_value_heads: int | None = Field(
        None, ge=1, le=1024, description="Key/value heads (grouped-query attention); default num_attention_heads."
    )
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout probability of attention weights.")
    tie_word_embeddings: bool = Field(True, description="Share the embedding matrix with the LM head.")
    tokenizer: str | None = Field(None, description="Local folder or hub id of the tokenizer; default the teacher's.")

    @property
    def heads(self) -> int:
        """Attention heads, with the default filled in."""
        if self.num_attention_heads is not None:
            return self.num_attention_heads
        heads = max(self.hidden_size // 64, 2)
        while heads > 1 and (self.hidden_size % heads or (self.hidden_size // heads) % 2):
            heads -= 1
        return heads

    @property
    def mlp_width(self) -> int:
        """Intermediate size, with the default filled in."""
        return self.intermediate_size or -(-self.hidden_size * 8 // 3 // 32) * 32

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_attention_heads {self.heads} (rotary "
                "positions need an even head width)"
            )
        if self.heads % (self.num_key_value_heads or self.heads):
            raise ValueError(
                f"num_attention_heads {self.heads} must be a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        return self


class StudentConfig(Section):
    """The model that is trained: an existing one, or a fresh one."""

    model: str | None = Field(None, min_length=1, description="Local folder or hub id to start from.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    init: StudentInit | None = Field(None, description="Or: build a fresh Llama of this shape.")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.model is None) == (self.init is None):
            raise ValueError(
                "give exactly one of student.model (start from a checkpoint) and student.init (a fresh Llama)"
            )
        return self


class DatasetSpec(Section):
    """A dataset for ``datasets.load_dataset``."""

    path: str = Field(min_length=1, description="Hub id or local folder of the dataset.")
    name: str | None = Field(None, description="Configuration name of the dataset.")
    split: str = Field("train", description="Split, slices allowed: train[:1%].")
    revision: str | None = Field(None, description="Branch, tag or commit.")


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str | Mapping | DatasetSpec) else value


def _kind_of_source(value: Any) -> str:
    return "DatasetSpec" if isinstance(value, Mapping | DatasetSpec) else "str"


# The discriminator makes pydantic complain of the form that was meant, not of both.
Source = Annotated[
    Annotated[str, Tag("str")] | Annotated[DatasetSpec, Tag("DatasetSpec")], Discriminator(_kind_of_source)
]
Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_tuple)]


class DataConfig(Section):
    """The text."""

    train: Sources = Field(
        min_length=1,
        description="Files, folders or globs (txt, jsonl, parquet; .gz too), or {path: ...} dataset specs.",
    )
    validation: Sources = Field(
        (), description="Held-out text, like train. Without it a share of the training sequences is held out."
    )
    validation_fraction: float | None = Field(
        None,
        ge=0.0,
        le=0.5,
        description=(
            "Share of the training sequences held out when validation is not given; default 0.02, 0 holds out nothing."
        ),
    )
    format: Literal["auto", "text", "jsonl", "parquet", "messages"] = Field(
        "auto",
        description=(
            "auto goes by the file's suffix; messages = rows with a chat under the key messages, rendered by the "
            "tokenizer's chat template."
        ),
    )
    text_column: str = Field("text", min_length=1, description="Column (jsonl, parquet, datasets) that holds the text.")
    sequence_length: int = Field(512, ge=8, le=1_048_576, description="Tokens per sequence.")
    packing: bool = Field(
        True,
        description=(
            "Fill sequences with several documents (attention and loss do not cross them); false = one document per "
            "sequence, padded."
        ),
    )
    max_train_samples: int | None = Field(None, ge=1, description="Keep only the first so many training sequences.")
    max_eval_samples: int | None = Field(None, ge=1, description="Keep only the first so many held-out sequences.")

    @model_validator(mode="after")
    def _one_holdout(self) -> Self:
        if self.validation and self.validation_fraction is not None:
            raise ValueError("give data.validation or data.validation_fraction, not both")
        return self

    @property
    def held_out_fraction(self) -> float:
        """Share of the training sequences to hold out."""
        if self.validation:
            return 0.0
        return 0.02 if self.validation_fraction is None else self.validation_fraction


class CacheConfig(Section):
    """What is kept of the teacher."""

    profile: Literal["threshold"] = Field(
        "threshold", description="threshold = heavy tokens exact, the tail sampled without bias; serves temperature 1."
    )
    threshold: float = Field(
        0.04,
        ge=0.004,
        le=0.5,
        description=(
            "Tokens with more than this probability are kept exactly; at most 1/threshold + 1 entries per token."
        ),
    )
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of the sampling.")
    shard_sequences: int = Field(
        256, ge=1, le=65536, description="Sequences per shard, the unit of commit and of resume."
    )


class LossConfig(Section):
    """The objective: (1 - alpha) KL(teacher || student) + alpha cross-entropy."""

    alpha: float = Field(
        0.1, ge=0.0, le=1.0, description="Weight of the hard labels; 1 = plain cross-entropy, needs no cache."
    )
    temperature: float = Field(
        1.0, gt=0.0, le=100.0, description="Temperature of teacher and student; profile threshold serves 1 only."
    )


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


class JobConfig(Section):
    """A whole job."""

    kind: Literal["distill", "precompute", "train"] = Field(
        "distill",
        description=(
            "distill = precompute then train; precompute = capture the teacher only; train = from a sealed cache, or "
            "on plain text with alpha 1."
        ),
    )
    name: str = Field(
        "job",
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="A name for people; lower case, digits, dot, dash, underscore.",
    )
    teacher: TeacherConfig | None = Field(None, description="The teacher; required unless kind is train with alpha 1.")
    student: StudentConfig | None = Field(None, description="The student; required unless kind is precompute.")
    data: DataConfig = Field(description="The text.")
    cache: CacheConfig = Field(default_factory=CacheConfig, description="What is kept of the teacher.")
    loss: LossConfig = Field(default_factory=LossConfig, description="The objective.")
    train: TrainConfig | None = Field(None, description="The training loop; required unless kind is precompute.")

    @property
    def needs_cache(self) -> bool:
        """Whether training reads the teacher's records: not where the hard labels have all the weight."""
        return self.kind != "train" or self.loss.alpha < 1.0

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that this kind of job runs, in order; also the names of the service's queues."""
        return ("precompute", "train") if self.kind == "distill" else (self.kind,)

    @model_validator(mode="after")
    def _kind_has_its_parts(self) -> Self:
        if self.teacher is None and self.needs_cache:
            raise ValueError(
                f"teacher is required for kind {self.kind}"
                + (" with loss.alpha below 1" if self.kind == "train" else "")
            )
        if self.kind == "precompute":
            return self
        if self.student is None:
            raise ValueError(f"student is required for kind {self.kind}")
        if self.train is None:
            raise ValueError(f"train is required for kind {self.kind}")
        if self.teacher is None and self.student.init and self.student.init.tokenizer is None:
            raise ValueError("student.init.tokenizer is required where there is no teacher to take it from")
        return self

    @model_validator(mode="after")
    def _early_stopping_has_a_measure(self) -> Self:
        patience = self.train.early_stopping_patience if self.train is not None else None
        if patience is not None and not self.data.validation and self.data.held_out_fraction == 0:
            raise ValueError("train.early_stopping_patience needs held-out text, but data holds nothing out")
        return self

    @model_validator(mode="after")
    def _profile_serves_loss(self) -> Self:
        if self.needs_cache and self.loss.temperature != 1.0:
            raise ValueError(
                f"loss.temperature {self.loss.temperature:g} cannot be served by cache.profile threshold, whose "
                "records are exact at temperature 1 only: "
                "set loss.temperature to 1 (a profile for other temperatures, tempered, is not in this version)"
            )
        return self
