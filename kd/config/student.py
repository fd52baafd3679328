"""The model that is trained."""

from __future__ import annotations

from typing import Self

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
