"""What every part of a job's configuration is: frozen, and strict about its keys."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator

_NULL = {"type": "null"}


class Section(BaseModel):
    """A part of the tree: immutable, every unknown key is an error, and null is the default where it is no value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_no_value(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or not cls._has_default_for_null(key)}

    @classmethod
    def _has_default_for_null(cls, key: Any) -> bool:
        """Whether ``key`` is a field with a default, of which null is no value."""
        field = cls.model_fields.get(key)
        return field is not None and not field.is_required() and type(None) not in typing.get_args(field.annotation)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """As pydantic's, with null where it is taken."""
        schema = handler(core_schema)
        for key, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if cls._has_default_for_null(key):
                _allow_null(field)
        return schema


def _allow_null(field: dict[str, Any]) -> None:
    """Let the schema of a field take null too; what it says of the field stays beside its forms."""
    forms = field.pop("oneOf", None) or field.pop("anyOf", None)
    if forms is None:
        said = {"title", "description", "default", "examples"}
        forms = [{key: field.pop(key) for key in list(field) if key not in said}]
    field["anyOf"] = forms if _NULL in forms else [*forms, _NULL]
