"""A job that is being written from another tool's file, and the fields of that file.

Each field is taken once. A field that nobody takes gets a remark, so that none is lost silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kd.config.jobfile import set_value
from kd.errors import ConfigError, Problem

#: The remark of a field that no rule knows.
NO_COUNTERPART = "has no counterpart here."
#: Builders of ``datasets`` that read files of a form that we read.
FILE_BUILDERS = ("json", "parquet", "text")
#: Stands where the fingerprint of an imported cache belongs, until the user writes it there.
UNKNOWN_FINGERPRINT = "0" * 32


class Remark(NamedTuple):
    """What a reader must know of one field of the other tool's file."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def list_files(path: Any, files: list[Any], split: Any) -> list[str]:
    """The files that ``load_dataset(path, data_files=files)`` reads whole with one of its builders
    for files; none where ``path`` is another dataset, or where a part of the rows is taken.
    """
    if path not in FILE_BUILDERS or split not in (None, "train"):
        return []
    return [str(each) for each in files]


def require_one_teacher(has_own: bool, given: str | None, missing: str = "") -> None:
    """Raise ``ConfigError`` unless either the file or the command line names a teacher.

    ``given`` is that of ``--teacher``; ``missing`` says what a file without a teacher lacks.
    """
    if has_own and given is not None:
        raise ConfigError(
            [Problem("", "the file has a teacher of its own.", "Leave out --teacher.")]
        )
    if not has_own and given is None:
        raise ConfigError(
            [
                Problem(
                    "",
                    f"the file names no teacher: it has no {missing}.",
                    "Name the model to distil from: --teacher MODEL.",
                )
            ]
        )


def describe_source(source: Mapping[str, Any]) -> str:
    """A dataset in a sentence: its path, and in brackets what else is given."""
    more = ", ".join(f"{name} {value}" for name, value in source.items() if name != "path")
    return f"{source.get('path')} ({more})" if more else str(source.get("path"))


def _parse_flag(value: Any) -> Any:
    return (
        {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, str)
        else value
    )


class Draft:
    """The job as far as it is written, and the remarks."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = {}
        self.remarks: list[Remark] = []

    def put(self, target: str, value: Any) -> None:
        """Set the job's field with the dotted name ``target``."""
        self.job = set_value(self.job, target.split("."), value)

    def remark(self, field: str, text: str) -> None:
        """Say something of a field of the other tool's file."""
        self.remarks.append(Remark(field, text))


class Fields:
    """The fields of one mapping of the other tool's file. null counts as not given, and the texts
    "true" and "false" as flags.

    ``aliases`` gives the file's own names of fields that the rules know by other names.
    """

    def __init__(
        self,
        data: Any,
        draft: Draft,
        prefix: str = "",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(data, Mapping):
            where = prefix.rstrip(".") or "the file"
            raise ConfigError(
                [
                    Problem(
                        "",
                        f"{where} must be a mapping of fields, but got {data!r:.60}.",
                        "Check that --from names the tool whose file it is.",
                    )
                ]
            )
        self._data = {
            str(name): _parse_flag(value) for name, value in data.items() if value is not None
        }
        self._draft = draft
        self._prefix = prefix
        self._aliases = aliases or {}

    def __contains__(self, name: str) -> bool:
        return self._own(name) in self._data

    def _own(self, name: str) -> str:
        return self._aliases.get(name, name)

    def name(self, name: str) -> str:
        """The dotted name of a field as it stands in the file."""
        return self._prefix + self._own(name)

    def take(self, name: str, default: Any = None) -> Any:
        """Take a field out and return its value; the default if it is not given."""
        return self._data.pop(self._own(name), default)

    def take_all(self) -> dict[str, Any]:
        """Take all fields out."""
        taken, self._data = self._data, {}
        return taken

    def set(self, name: str, value: Any) -> None:
        """Go on as if the file gave ``value``."""
        self._data[self._own(name)] = value

    def take_number(self, name: str, default: float | None = None) -> Any:
        """Take a number; ``1e-5``, which YAML reads as text, is one."""
        value = self.take(name, default)
        try:
            number = float(value) if isinstance(value, str) else value
        except ValueError:
            number = value
        if number is None or (
            isinstance(number, int | float)
            and not isinstance(number, bool)
            and math.isfinite(number)
        ):
            return number
        raise self.refuse(name, f"must be a number, but got {value!r:.60}.")

    def take_list(self, name: str) -> list[Any]:
        """Take a list out; empty if it is not given. A mapping or a text is a list of one."""
        value = self.take(name, [])
        if isinstance(value, str | Mapping):
            return [value]
        if not isinstance(value, list):
            raise self.refuse(name, f"must be a list, but got {value!r:.60}.")
        return value

    def take_sections(self, name: str) -> list[Fields]:
        """Take a list of mappings out; an empty one if it is not given."""
        return [
            Fields(each, self._draft, f"{self.name(name)}[{place}].")
            for place, each in enumerate(self.take_list(name))
        ]

    def section(self, name: str) -> Fields:
        """Take a mapping out; an empty one if it is not given."""
        return Fields(self.take(name, {}), self._draft, f"{self.name(name)}.")

    def refuse(
        self, name: str, detail: str, remedy: str = "Correct this field of the file."
    ) -> ConfigError:
        """Return the error that names a field of the file."""
        return ConfigError([Problem("", f"{self.name(name)} {detail}", remedy)])

    def remark(self, name: str, text: str) -> None:
        """Say something of a field."""
        self._draft.remark(self.name(name), text)

    def dismiss(self, name: str, text: str) -> None:
        """Take a field out, and say why the job has none of it, if it is given."""
        if name in self:
            self.take(name)
            self.remark(name, text)

    def close(self, reasons: Mapping[str, str] | None = None) -> None:
        """Name every field that is left, with its reason if there is one."""
        for name in list(self._data):
            reason = next(
                (text for start, text in (reasons or {}).items() if name.startswith(start)),
                NO_COUNTERPART,
            )
            self.dismiss(name, reason)
