"""The base class of all sections of a job, frozen and strict about its keys; sizes in bytes.

``find_differences`` lists the values of a section that are not the defaults.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import to_jsonable_python

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

    null means "use the default" unless the field accepts null. The text below a field is its
    description in the schema.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
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
    ) -> JsonSchemaValue:
        """Return pydantic's schema, with null added to each field that has a default.

        A section or a mapping that is there without being given has the default ``{}``, which tells
        it from one that is absent.
        """
        # The validator above accepts null where the annotation does not, so the schema must say so.
        schema = handler(core_schema)
        for key, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if "description" in field:
                field["description"] = " ".join(field["description"].split())
            if cls._has_default_for_null(key):
                forms = field.pop("oneOf", None) or field.pop("anyOf", None)
                if forms is None:  # the title and the description stay where they are
                    kept = {"title", "description", "default", "examples"}
                    forms = [{name: field.pop(name) for name in list(field) if name not in kept}]
                field["anyOf"] = forms if _NULL in forms else [*forms, _NULL]
            if cls.model_fields[key].default_factory is not None:
                field.setdefault("default", {})
        return schema


@dataclass(frozen=True)
class Difference:
    """A setting that was given: its dotted name, its value, and the default as JSON values.

    ``required``: there is no default. A section that is off by default has the default None.
    """

    name: str
    value: Any
    default: Any = None
    required: bool = False


def find_differences(config: Section) -> list[Difference]:
    """Return the settings whose values are not the defaults, in the order of the sections."""
    return list(_walk(config, None, ""))


def _walk(section: BaseModel, defaults: BaseModel | None, path: str) -> Iterator[Difference]:
    """Compare a section with ``defaults``; None: with the defaults of its class."""
    shown = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        required = defaults is None and field.is_required()
        default: Any = None
        if defaults is not None:
            default = getattr(defaults, name)
        elif not required:
            default = field.get_default(call_default_factory=True)
        if not required and value == default:
            continue
        if isinstance(value, BaseModel):
            same = type(value) is type(default)
            found = list(_walk(value, default if same else None, f"{path}{name}."))
            if found:
                yield from found
                continue
        yield Difference(f"{path}{name}", shown[name], to_jsonable_python(default), required)
