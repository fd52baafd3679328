"""The base class of all sections of a job, frozen and strict about its keys; sizes in bytes."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, model_validator

_NULL = {"type": "null"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def _parse_bytes(value: object) -> object:
    """Parse a size such as ``"16GiB"`` into bytes; leave any other value to the field."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    number, prefix, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


#: Makes bytes of text such as "16GiB". It stands after a field's bounds, or its schema would lack
#: them.
AS_BYTES = BeforeValidator(_parse_bytes)


class Section(BaseModel):
    """A section of a job. It is immutable, and an unknown key is an error.

    null means "use the default" unless the field accepts null.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=False
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_no_value(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # pydantic reports that it is no mapping
        return {
            key: value
            for key, value in data.items()
            if value is not None or not cls._has_default_for_null(key)
        }

    @classmethod
    def _has_default_for_null(cls, key: Any) -> bool:
        """Whether ``key`` is a field that has a default and does not accept null itself."""
        field = cls.model_fields.get(key)
        return (
            field is not None
            and not field.is_required()
            and type(None) not in typing.get_args(field.annotation)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return pydantic's schema, with null added to each field that has a default.

        A section or a mapping that is there without being given has the default ``{}``, which tells
        it from one that is absent.
        """
        # The validator above accepts null where the annotation does not, so the schema must say so.
        schema = handler(core_schema)
        for key, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if cls._has_default_for_null(key):
                _allow_null(field)
            if cls.model_fields[key].default_factory is not None:
                field.setdefault("default", {})
        return schema


def _allow_null(field: dict[str, Any]) -> None:
    """Let the schema of a field accept null too; its title and description stay where they are."""
    forms = field.pop("oneOf", None) or field.pop("anyOf", None)
    if forms is None:
        kept = {"title", "description", "default", "examples"}
        forms = [{key: field.pop(key) for key in list(field) if key not in kept}]
    field["anyOf"] = forms if _NULL in forms else [*forms, _NULL]
