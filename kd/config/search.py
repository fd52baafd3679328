"""The section ``search``: which settings a search tries, and how."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kd.config.section import Section


class Dimension(Section):
    """The values that a search tries for one field: a range, or choices."""

    min: float | None = None
    """Lowest value."""

    max: float | None = None
    """Highest value."""

    log: bool = False
    """Sample the range on a logarithmic scale."""

    integer: bool = False
    """Whole numbers only."""

    choices: tuple[str | float | int | bool, ...] | None = Field(None, min_length=1, max_length=64)
    """The values to try, instead of a range."""

    @model_validator(mode="after")
    def _range_or_choices(self) -> Self:
        if (self.choices is None) == (self.min is None or self.max is None):
            raise ValueError("give min and max, or choices")
        if self.min is not None and self.max is not None and not self.min < self.max:
            raise ValueError(f"min {self.min:g} must be below max {self.max:g}")
        if self.log and (self.min is None or self.min <= 0):
            raise ValueError("log needs a range whose min is above 0")
        return self


class SearchConfig(Section):
    """An Optuna study whose trials are students trained from one cache."""

    space: dict[str, Dimension] = Field(min_length=1, max_length=32)
    """The fields to vary, by their dotted names (for example train.learning_rate), and the values
    to try."""

    trials: int = Field(20, ge=1, le=10_000)
    """Number of trials."""

    sampler: Literal["tpe", "gp", "random"] = "tpe"
    """How the next trial is chosen."""
