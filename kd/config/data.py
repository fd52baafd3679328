"""The section ``data``: the text, and how it is cut into sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kd.addresses import names_text
from kd.config.section import Section

#: The teachers of a source and their weights, by name.
Route = tuple[tuple[str, float], ...]
#: The error of weights such as 0.333333.
_ROUNDING = 1e-5


class DatasetSpec(Section):
    """A dataset that ``datasets.load_dataset`` or ``datasets.load_from_disk`` reads."""

    path: str = Field(min_length=1)
    """Hub id or local folder of the dataset; with teacher or mixture also files."""

    name: str | None = None
    """Configuration name of the dataset."""

    split: str = "train"
    """Split; slices are allowed: train[:1%]."""

    revision: str | None = None
    """Branch, tag or commit."""

    weight: float = Field(1.0, gt=0, le=1e6)
    """Share of this source in a mixture, relative to the other sources (files have 1). A weight
    other than 1, or streaming, makes a mixture; it ends when any of its sources ends. Without a
    mixture, all sources are read completely."""

    teacher: str | None = None
    """With teachers: the one that reads this source. A path that no dataset of a hub can have, such
    as math/*.jsonl or ./texts, is then read as without a mapping around it."""

    mixture: dict[str, Annotated[float, Field(gt=0, le=1)]] | None = None
    """With teachers: several of them and their weights, such as {math: 0.5, code: 0.5}. The student
    learns the weighted mean of their distributions."""

    @model_validator(mode="after")
    def _weights_are_shares(self) -> Self:
        if self.mixture is None:
            return self
        if self.teacher is not None:
            raise ValueError("teacher and mixture are both given: remove one of them")
        if abs(sum(self.mixture.values()) - 1.0) > _ROUNDING:
            got = f"{sum(self.mixture.values()):g}"
            raise ValueError(f"the weights of mixture must add up to 1, but got {got}: change them")
        return self

    @property
    def route(self) -> Route:
        """The teachers of this source and their weights, by name; empty without one."""
        shares = {self.teacher: 1.0} if self.teacher is not None else self.mixture or {}
        total = sum(shares.values())
        return tuple(sorted((name, weight / total) for name, weight in shares.items()))

    def leave_route(self) -> str | DatasetSpec:
        """Return the source as a job with one teacher has it."""
        plain = self.model_copy(update={"teacher": None, "mixture": None})
        is_path = plain == DatasetSpec(path=self.path) and names_text(self.path)
        # Without a route it stays a dataset, whose card may name files.
        return self.path if self.route and is_path else plain


# A job may give one source without a list around it.
def _wrap_in_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str | Mapping | DatasetSpec) else value


def _find_source_kind(value: Any) -> str:
    return "DatasetSpec" if isinstance(value, Mapping | DatasetSpec) else "str"


# With a discriminator pydantic reports errors for the form that was meant, not for both forms.
TextSource = Annotated[
    Annotated[str, Field(min_length=1), Tag("str")] | Annotated[DatasetSpec, Tag("DatasetSpec")],
    Discriminator(_find_source_kind),
]
#: Sources of one field at most: each of them is looked for when a job is checked.
MOST_SOURCES = 1000
TextSources = Annotated[
    tuple[TextSource, ...], Field(max_length=MOST_SOURCES), BeforeValidator(_wrap_in_tuple)
]


class DataConfig(Section):
    """The text."""

    train: TextSources = ()
    """Files, folders or globs (txt, jsonl, parquet; also .gz and .zst), files or folders of a
    bucket (s3://bucket/name), folders that save_to_disk of datasets wrote, or datasets as {path:
    ...}."""

    validation: TextSources = ()
    """Held-out text, in the same forms as train. Without it, a share of the training sequences is
    held out."""

    validation_fraction: float | None = Field(None, ge=0.0, le=0.5)
    """Share of the training sequences held out when validation is not given; default 0.02; 0 holds
    out nothing."""

    format: Literal[
        "auto", "text", "jsonl", "parquet", "messages", "sharegpt", "prompt_completion", "alpaca"
    ] = "auto"
    """auto = by the file's suffix; messages = each row has a chat under the key messages, and may
    have the JSON schemas of its tools under the key tools; sharegpt = a chat under conversations,
    whose turns have from and value; alpaca = a question under instruction (and input), its answer
    under output. The tokenizer's chat template renders them; if a message's content is given in
    parts, the parts are joined. prompt_completion = two texts, joined as they are, or two lists of
    messages, under prompt and completion."""

    text_column: str = Field("text", min_length=1)
    """Column (jsonl, parquet, datasets) that holds the text."""

    document_separator: str | None = None
    """What ends a document within a plain text, so that nothing crosses it. Default: the
    tokenizer's end token, where the text holds it; another text, such as <|endoftext|>, ends
    documents in its place; an empty one: a file or row is one document."""

    assistant_only_loss: bool = True
    """In chats only the assistant's tokens are learned and get records; with format
    prompt_completion only the completion's tokens. false = all tokens."""

    sequence_length: int = Field(512, ge=8, le=1_048_576)
    """Tokens per sequence."""

    streaming: bool = False
    """Read datasets as streams, without downloading them completely; needs max_train_samples."""

    packing: bool | Literal["auto"] = "auto"
    """true = fill each sequence with several documents; attention and loss do not cross from one to
    the next. false = one document per sequence, padded. auto = true where teacher and student can
    keep documents apart in a sequence; else, as with recurrent layers, false, and train.order
    length in place of shuffled."""

    max_train_samples: int | None = Field(None, ge=1)
    """Keep only the first sequences of the training text, at most this many. If a share is held out
    and max_eval_samples is not set, at most this many sequences, or 2,048 tokens, of it are
    kept."""

    max_eval_samples: int | None = Field(None, ge=1)
    """Keep only the first held-out sequences, at most this many."""

    @model_validator(mode="after")
    def _one_holdout(self) -> Self:
        if self.validation and self.validation_fraction is not None:
            raise ValueError("give data.validation or data.validation_fraction, not both")
        return self

    @model_validator(mode="after")
    def _streams_end(self) -> Self:
        if self.streaming and self.max_train_samples is None:
            raise ValueError("data.streaming needs data.max_train_samples: a stream need not end")
        # Only datasets are streamed: files end, and need no limit.
        train, held_out = (
            [source for source in sources if isinstance(source, DatasetSpec)]
            for sources in (self.train, self.validation)
        )
        sliced = [spec.split for spec in (*train, *held_out) if "[" in spec.split]
        if self.streaming and sliced:
            raise ValueError(
                f"data.streaming cannot slice a split, but got {sliced[0]}: use max_train_samples"
            )
        if self.streaming and held_out and self.max_eval_samples is None:
            raise ValueError(
                "data.streaming of data.validation needs data.max_eval_samples: a stream need not "
                "end"
            )
        return self

    @property
    def has_chats(self) -> bool:
        """Whether the rows are chats, which a chat template renders."""
        return self.format in ("messages", "sharegpt", "alpaca")

    @property
    def held_out_fraction(self) -> float:
        """Share of the training sequences to hold out."""
        if self.validation:
            return 0.0
        return 0.02 if self.validation_fraction is None else self.validation_fraction
