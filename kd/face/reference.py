"""Write ``docs/python.md`` from the signatures and docstrings of the names in ``kd.__all__``.

``make docs`` writes the file; a test compares it with the output of this module. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import kd

INTRODUCTION = """\
# Python

<!-- Written by `make docs` from kd/__init__.py and the docstrings of its names. -->
"""
_EXAMPLE = re.compile(r"\n(?:    .*\n|\n)+")
#: What the types of the signatures are.
TYPES = """\
In the signatures, `Named` is a string or a path (`str | os.PathLike`).
"""
#: The widest line of a signature.
_WIDTH = 100


def render_python_page() -> str:
    """Return the whole page as Markdown."""
    functions = [name for name in kd.__all__ if not inspect.isclass(getattr(kd, name))]
    classes = [name for name in kd.__all__ if name not in functions]
    parts = [INTRODUCTION, _format_introduction(inspect.getdoc(kd) or ""), TYPES]
    for title, names in (("Functions", functions), ("Classes", classes)):
        parts += [f"## {title}\n", *(_describe(name, getattr(kd, name)) for name in names)]
    return "\n".join(parts)


def _format_introduction(text: str) -> str:
    """The docstring of ``kd`` with its example as a block of Python."""

    def mark(found: re.Match[str]) -> str:
        return f"\n\n```python\n{inspect.cleandoc(found[0]).strip()}\n```\n\n"

    return _EXAMPLE.sub(mark, _format_prose(text), count=1)


def _format_prose(text: str) -> str:
    """A docstring as Markdown: its double backticks are single ones there."""
    return text.replace("``", "`").rstrip() + "\n"


def _describe(name: str, thing: Any) -> str:
    """The section of one public name."""
    lines = [f"### kd.{name}\n", _format_block(_format_signature(f"kd.{name}", thing))]
    lines.append(_format_prose(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        members = [f"- `{each}`: {first}" for each, first in _list_members(thing)]
        lines += [*members, ""] if members else []
    return "\n".join(lines)


def _format_block(code: str) -> str:
    return f"```text\n{code}\n```\n"


def _format_signature(name: str, thing: Any) -> str:
    """The signature on one line, or with one parameter a line where that is too long."""
    if dataclasses.is_dataclass(thing):
        fields = [f"{each.name}: {each.type}" for each in dataclasses.fields(thing)]
        return _fold(name, fields, "")
    signature = inspect.signature(thing)
    parameters = list(_list_parameters(signature))
    empty = signature.return_annotation is inspect.Signature.empty or inspect.isclass(thing)
    return _fold(name, parameters, "" if empty else f" -> {signature.return_annotation}")


def _list_parameters(signature: inspect.Signature) -> Iterator[str]:
    """The parameters as they are written, with the star before those that need a name."""
    starred = False
    for each in signature.parameters.values():
        starred |= each.kind is each.VAR_POSITIONAL
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield _format_parameter(each)


def _format_parameter(parameter: inspect.Parameter) -> str:
    """The parameter as it is written; a default that is a function by its name."""
    default = parameter.default
    written = parameter.replace(default=inspect.Parameter.empty)
    left = str(written).replace("'", "")
    if default is inspect.Parameter.empty:
        return left
    return f"{left} = {default.__name__ if inspect.isfunction(default) else repr(default)}"


def _fold(name: str, parameters: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in parameters), f"){returns}"])


def _list_members(thing: type) -> Iterator[tuple[str, str]]:
    """The public methods and properties of a class, and the first sentence of each.

    Those that it has from a library are left out.
    """
    ours = [each for each in thing.__mro__ if each.__module__.startswith("kd.")]
    members = {name: member for each in reversed(ours) for name, member in vars(each).items()}
    for name, member in sorted(members.items()):
        documented = isinstance(member, property) or inspect.isfunction(member)
        if documented and not name.startswith("_") and (doc := inspect.getdoc(member)):
            call = name if isinstance(member, property) else f"{name}()"
            yield call, " ".join(doc.split("\n\n")[0].split()).replace("``", "`")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(render_python_page())
