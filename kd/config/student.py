"""The model that is trained."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kd.config.section import Section


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


class StudentFromTeacher(Section):
    """A student cut out of the teacher."""

    layers: int = Field(ge=1, le=256, description="Layers kept.")
    pick: Literal["spread", "first", "last", "ends"] = Field(
        "ends",
        description="Which: spread evenly with the first and the last, the first, the last, or from both ends.",
    )
    hidden_size: int | None = Field(
        None,
        ge=8,
        le=32768,
        description=(
            "Width; default the teacher's. A smaller one keeps the directions of the residual stream that carry most "
            "energy, and unties the LM head."
        ),
    )
    intermediate_size: int | None = Field(
        None,
        ge=8,
        le=131072,
        description="Width of the MLP; default the teacher's. A smaller one keeps the channels that write most.",
    )


class LoraConfig(Section):
    """Low-rank adapters on a frozen student, through peft."""

    rank: int = Field(16, ge=1, le=4096, description="Rank of the adapters.")
    alpha: float = Field(32.0, gt=0, le=65536, description="Scale: adapters are multiplied by alpha / rank.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout before the adapters.")
    targets: Annotated[tuple[str, ...], Field(max_length=64)] = Field(
        (), description="Names of the linear layers that get one; default all but the LM head."
    )
    merge: bool = Field(
        True, description="Save the student with its adapters merged in; the adapter itself is always saved beside it."
    )


class StudentConfig(Section):
    """The model that is trained: an existing one, a fresh one, or one cut out of the teacher."""

    model: str | None = Field(None, min_length=1, description="Local folder or hub id to start from.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    init: StudentInit | None = Field(None, description="Or: build a fresh Llama of this shape.")
    from_teacher: StudentFromTeacher | None = Field(None, description="Or: take layers of the teacher.")
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters only.")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(origin is not None for origin in (self.model, self.init, self.from_teacher)) != 1:
            raise ValueError(
                "give exactly one of student.model (start from a checkpoint), student.init (a fresh Llama) and "
                "student.from_teacher (layers of the teacher)"
            )
        if self.revision is not None and self.model is None:
            raise ValueError("student.revision is that of a hub model, but student.model is not given")
        if self.lora is not None and self.init is not None:
            raise ValueError(
                "student.lora trains small corrections of weights that are good already, but student.init makes fresh "
                "ones: use one of the two"
            )
        return self
