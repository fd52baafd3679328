"""What all models of the wire share."""

from pydantic import BaseModel, ConfigDict


class View(BaseModel):
    """A part of an answer. Numbers are finite or null: JSON has neither NaN nor infinity.

    A description that does not fit on the line of its field is the text below the field.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
