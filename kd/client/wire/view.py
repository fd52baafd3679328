"""What all models of the wire share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class View(BaseModel):
    """A part of an answer. Numbers are finite or null: JSON has neither NaN nor infinity."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)
