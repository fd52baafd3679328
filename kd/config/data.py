"""The text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kd.config.section import Section


class DatasetSpec(Section):
    """A dataset for ``datasets.load_dataset``."""

    path: str = Field(min_length=1, description="Hub id or local folder of the dataset.")
    name: str | None = Field(None, description="Configuration name of the dataset.")
    split: str = Field("train", description="Split, slices allowed: train[:1%].")
    revision: str | None = Field(None, description="Branch, tag or commit.")
    weight: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description=(
            "Share of this source in a mixture, relative to the others' (files have 1). A weight other than 1, or "
            "streaming, makes a mixture, which ends where its first source does; else all sources are read whole."
        ),
    )


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
            "auto goes by the file's suffix; messages = rows with a chat under the key messages, and under tools the "
            "JSON schemas of its tools if it has any, rendered by the tokenizer's chat template. A template that "
            "writes today's date is told 26 July 2024, so that the same chats are the same tokens on any day."
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
    streaming: bool = Field(
        False, description="Read dataset specs as streams: nothing is downloaded whole; needs max_train_samples."
    )
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

    @model_validator(mode="after")
    def _streams_end(self) -> Self:
        if self.streaming and self.max_train_samples is None:
            raise ValueError("data.streaming needs data.max_train_samples: a stream need not end")
        specs = [source for source in (*self.train, *self.validation) if isinstance(source, DatasetSpec)]
        if self.streaming and (sliced := [spec.split for spec in specs if "[" in spec.split]):
            raise ValueError(f"data.streaming cannot slice a split, but got {sliced[0]}: use max_train_samples")
        if self.streaming and self.max_eval_samples is None and any(spec in specs for spec in self.validation):
            raise ValueError("data.streaming of data.validation needs data.max_eval_samples: a stream need not end")
        return self

    @property
    def held_out_fraction(self) -> float:
        """Share of the training sequences to hold out."""
        if self.validation:
            return 0.0
        return 0.02 if self.validation_fraction is None else self.validation_fraction
