"""The section ``student``: the model that is trained."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kd.config.section import Section


class StudentInit(Section):
    """A new Llama with random weights."""

    layers: int = Field(ge=1, le=256)
    """Transformer layers."""

    hidden_size: int = Field(ge=8, le=32768)
    """Width of the hidden state."""

    intermediate_size: int | None = Field(None, ge=8, le=131072)
    """Width of the MLP; default 8/3 of hidden_size, rounded up to a multiple of 32."""

    num_attention_heads: int | None = Field(None, ge=1, le=1024)
    """Attention heads; default hidden_size / 64, and at least 2 if hidden_size allows it."""

    num_key_value_heads: int | None = Field(None, ge=1, le=1024)
    """Key/value heads (grouped-query attention); default num_attention_heads."""

    tie_word_embeddings: bool = True
    """Share the embedding matrix with the LM head."""

    tokenizer: str | None = None
    """Local folder or hub id of the tokenizer; default the teacher's."""

    @property
    def attention_heads(self) -> int:
        """Attention heads, with the default filled in."""
        if self.num_attention_heads is not None:
            return self.num_attention_heads
        heads = max(self.hidden_size // 64, 2)
        # Heads must divide the width, and rotary positions need an even head width.
        while heads > 1 and self.hidden_size % (2 * heads):
            heads -= 1
        return heads

    @property
    def mlp_width(self) -> int:
        """Intermediate size, with the default filled in."""
        return self.intermediate_size or -(-self.hidden_size * 8 // 3 // 32) * 32

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_attention_heads "
                f"{self.attention_heads} (rotary positions need an even head width)"
            )
        if self.attention_heads % (self.num_key_value_heads or self.attention_heads):
            raise ValueError(
                f"num_attention_heads {self.attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        return self


class StudentFromTeacher(Section):
    """A student that is built from layers of the teacher."""

    layers: int = Field(ge=1, le=256)
    """Number of layers to keep. Works with any decoder whose layers are a list; experts are kept
    whole."""

    pick: Literal["spread", "first", "last", "ends"] = "ends"
    """Which layers: spread = at even distances, with the first and the last; first = the first
    ones; last = the last ones; ends = from both ends."""

    hidden_size: int | None = Field(None, ge=8, le=32768)
    """Width; default the teacher's. A smaller width keeps the directions of the residual stream
    that have the most energy, and unties the LM head. Only for Llama, Mistral, Qwen 2 and Qwen
    3."""

    intermediate_size: int | None = Field(None, ge=8, le=131072)
    """Width of the MLP; default the teacher's. A smaller width keeps the channels that have the
    largest output. Only for Llama, Mistral, Qwen 2 and Qwen 3."""


class LoraConfig(Section):
    """Low-rank adapters on a frozen student, through peft."""

    rank: int = Field(16, ge=1, le=4096)
    """Rank of the adapters."""

    alpha: float = Field(32.0, gt=0, le=65536)
    """Scale: the output of the adapters is multiplied by alpha / rank."""

    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout on the input of the adapters; the adapters of experts have none."""

    targets: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    """Names of the linear layers and of the experts' weights (gate_up_proj, down_proj) that get
    adapters; default all except the LM head. Routers get none, and in state-space mixers (Mamba)
    only in_proj gets one."""

    base: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen weights in memory. bfloat16 halves their size and needs
    train.precision bf16; the adapters stay in float32."""

    merge: bool = True
    """Save the student with its adapters merged into the weights. The adapters are always saved
    separately, too."""


class StudentConfig(Section):
    """The model that is trained: an existing model, a new one, or layers of the teacher."""

    model: str | None = Field(None, min_length=1)
    """Local folder, hub id or folder of a bucket (s3://bucket/name) to start from. If a model also
    reads images or sound, only its language model is trained and saved."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    init: StudentInit | None = None
    """Build a new Llama of this shape, instead of model."""

    from_teacher: StudentFromTeacher | None = None
    """Take layers of the teacher, instead of model."""

    lora: LoraConfig | None = None
    """Train only low-rank adapters."""

    @property
    def own_tokenizer(self) -> str | None:
        """Where the student's own tokenizer is; None if it takes the teacher's."""
        return self.model or (self.init.tokenizer if self.init is not None else None)

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(origin is not None for origin in (self.model, self.init, self.from_teacher)) != 1:
            raise ValueError(
                "give exactly one of student.model (start from a checkpoint), student.init (a new "
                "Llama) and student.from_teacher (layers of the teacher)"
            )
        if self.revision is not None and self.model is None:
            raise ValueError(
                "student.revision names a revision of a hub model, but student.model is not given"
            )
        # Adapters leave the weights frozen, and random weights would never be trained.
        if self.lora is not None and self.init is not None:
            raise ValueError(
                "student.lora trains small corrections of trained weights, but student.init makes "
                "new weights: use only one of the two"
            )
        return self
