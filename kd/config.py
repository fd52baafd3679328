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

from cache.profiles import PROFILES, unserved

#: Bits of the numbers that profiles dense and hidden keep.
DTYPE_BITS = {
    "dense": {"auto": 16, "float16": 16, "float32": 32},
    "hidden": {"auto": 16, "int16": 16, "int8": 8},
}

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

    backend: Literal["local", "http"] = Field(
        "local",
        description=(
            "local = the model runs here; http = an OpenAI-compatible server that returns prompt_logprobs (vLLM) is "
            "asked, for cache.profile topk."
        ),
    )
    model: str = Field(
        min_length=1,
        description=(
            "Local folder or hub id of the teacher (a causal language model); with backend http its name on the server."
        ),
    )
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
    url: str | None = Field(
        None,
        pattern=r"^https?://[^/?#@\s]+(/[^?#@\s]*)?$",
        description="Backend http: address of the server, up to what comes before /v1/completions.",
    )
    tokenizer: str | None = Field(
        None, min_length=1, description="Backend http: local folder or hub id of the tokenizer that the model has."
    )
    api_key_env: str | None = Field(
        None,
        pattern=r"^KD_TEACHER_KEY(_[A-Z0-9_]+)?$",
        description=(
            "Backend http: name of the environment variable of the worker that holds the server's API key; "
            "KD_TEACHER_KEY, or a name that begins with KD_TEACHER_KEY_, so that a job can name no other secret."
        ),
    )
    timeout: float = Field(120.0, gt=0, le=3600, description="Backend http: seconds to wait for one answer.")
    retries: int = Field(
        6, ge=0, le=100, description="Backend http: further attempts where the server is away, busy or fails."
    )
    concurrency: int = Field(8, ge=1, le=256, description="Backend http: requests in flight at once.")

    @model_validator(mode="after")
    def _backend_has_its_fields(self) -> Self:
        if self.backend == "http":
            if missing := [name for name in ("url", "tokenizer") if getattr(self, name) is None]:
                raise ValueError(f"teacher.backend http needs {' and '.join(f'teacher.{name}' for name in missing)}")
            strange = {"gguf_file", "dtype"}
        else:
            strange = {"url", "tokenizer", "api_key_env"}
        if unused := sorted(name for name in strange if getattr(self, name) not in (None, "auto")):
            raise ValueError(f"teacher.backend {self.backend} has no use for {', '.join(unused)}")
        return self


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
        (),
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
    assistant_only_loss: bool = Field(
        True,
        description=(
            "Of chats (format messages) only the assistant's tokens are learned and get records; false = every token."
        ),
    )
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


class TemperatureRange(Section):
    """Temperatures that a cache must be right at."""

    min: float = Field(0.5, ge=0.05, le=100.0, description="Lowest temperature.")
    max: float = Field(2.0, ge=0.05, le=100.0, description="Highest temperature.")

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if not self.min < self.max:
            raise ValueError(f"cache.temperatures.min {self.min:g} must be below max {self.max:g}")
        return self


class CacheConfig(Section):
    """What is kept of the teacher."""

    profile: Literal["threshold", "tempered", "topk", "dense", "hidden"] = Field(
        "threshold",
        description=(
            "threshold = heavy tokens exact, the tail sampled without bias, right at temperature 1; tempered = the "
            "same, right at any temperature of a range; topk = the k most probable tokens and the mass of the rest; "
            "dense = all log-probabilities; hidden = the teacher's last hidden state, exact at any temperature."
        ),
    )
    threshold: float = Field(
        0.04,
        ge=0.004,
        le=0.5,
        description=(
            "Profiles threshold and tempered: tokens with more than this probability are kept exactly; at most "
            "1/threshold + 1 entries per token."
        ),
    )
    temperatures: TemperatureRange | None = Field(
        None, description="Profile tempered: temperatures to be right at; default 0.5 to 2."
    )
    always_keep: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (),
        max_length=64,
        description=(
            "Profiles threshold and tempered: token ids whose probability is kept exactly at every position, for "
            "example end of sequence and tool calls; the next token's always is."
        ),
    )
    draws: int = Field(
        1,
        ge=1,
        le=64,
        description=(
            "Profiles threshold and tempered: tail samples of every position; epoch e reads sample e modulo draws, so "
            "that a student of several epochs does not learn one sample by heart."
        ),
    )
    k: int | None = Field(None, ge=1, le=4096, description="Profile topk: entries kept; default 64.")
    dtype: Literal["auto", "float16", "float32", "int8", "int16"] = Field(
        "auto",
        description=(
            "Precision of profiles dense (float16 or float32, auto = float16) and hidden (int8 or int16, auto = "
            "int16; int8 is half the size, and off by some hundredths of a nat where a teacher has outlier channels)."
        ),
    )
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of the sampling.")
    shard_sequences: int = Field(
        256, ge=1, le=65536, description="Sequences per shard, the unit of commit and of resume."
    )
    fingerprint: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{32}$",
        description="Kind train: the sealed cache to train from, say an imported one; its text stands for data.",
    )

    @property
    def sampled(self) -> bool:
        """Whether the profile samples the tail."""
        return PROFILES[self.profile].sampled

    @property
    def range(self) -> tuple[float, ...]:
        """Lowest and highest temperature of profile tempered; empty for others."""
        if self.profile != "tempered":
            return ()
        span = self.temperatures or TemperatureRange()
        return (span.min, span.max)

    @property
    def entries(self) -> int:
        """k of profile topk; 0 for others."""
        return (self.k or 64) if self.profile == "topk" else 0

    @property
    def bits(self) -> int:
        """Bits of a number of profiles dense and hidden; 0 for others."""
        return DTYPE_BITS[self.profile][self.dtype] if self.profile in DTYPE_BITS else 0

    @model_validator(mode="after")
    def _profile_has_its_options(self) -> Self:
        sampled = {"threshold", "always_keep", "draws"}
        own = {"threshold": sampled, "tempered": sampled | {"temperatures"}, "topk": {"k"}}.get(self.profile, {"dtype"})
        options = {"threshold", "temperatures", "always_keep", "draws", "k", "dtype"}
        if strange := sorted(self.model_fields_set & options - own):
            given = [name for name in strange if getattr(self, name) != type(self).model_fields[name].default]
            if given:
                raise ValueError(
                    f"cache.profile {self.profile} has no use for {', '.join(given)}; it takes {', '.join(sorted(own))}"
                )
        if self.profile in DTYPE_BITS and self.dtype not in DTYPE_BITS[self.profile]:
            known = ", ".join(DTYPE_BITS[self.profile])
            raise ValueError(f"cache.dtype of profile {self.profile} must be one of {known}, but got {self.dtype}")
        if len(set(self.always_keep)) != len(self.always_keep):
            raise ValueError("cache.always_keep names a token twice")
        return self


class LossConfig(Section):
    """The objective: (1 - alpha) KL(teacher || student) + alpha cross-entropy."""

    alpha: float = Field(
        0.1, ge=0.0, le=1.0, description="Weight of the hard labels; 1 = plain cross-entropy, needs no cache."
    )
    temperature: float = Field(
        1.0,
        gt=0.0,
        le=100.0,
        description="Temperature of teacher and student; other than 1 it needs profile tempered, hidden or dense.",
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
    data: DataConfig = Field(default_factory=DataConfig, description="The text.")
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
        if self.teacher is None and self.needs_cache and self.cache.fingerprint is None:
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
        span = self.cache.range
        why = unserved(self.cache.profile, (span[0], span[1]) if span else None, temperature=self.loss.temperature)
        if self.needs_cache and self.cache.fingerprint is None and why is not None:
            raise ValueError(f"loss.temperature {self.loss.temperature:g} cannot be served: {why}")
        return self

    @model_validator(mode="after")
    def _remote_teacher_gives_its_best(self) -> Self:
        if (
            self.teacher is not None
            and self.teacher.backend == "http"
            and self.needs_cache
            and self.cache.profile != "topk"
        ):
            raise ValueError(
                "teacher.backend http gives the most probable tokens only: set cache.profile to topk, not "
                f"{self.cache.profile}"
            )
        return self

    @model_validator(mode="after")
    def _text_or_a_sealed_cache(self) -> Self:
        if self.cache.fingerprint is not None and self.kind != "train":
            raise ValueError(
                f"cache.fingerprint names a sealed cache, which kind {self.kind} would capture: use kind train"
            )
        if not self.data.train and self.cache.fingerprint is None:
            raise ValueError("data.train is required: files, folders, globs or dataset specs")
        return self
