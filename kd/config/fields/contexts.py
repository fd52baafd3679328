"""The columns in ``teacher.context``. Imports no torch."""

from __future__ import annotations

from string import Formatter


def read_context(context: str) -> list[tuple[str, str | None]]:
    """Return the texts of a context, each with the name of the column after it; None = no column.

    Raises ``ValueError`` if braces do not hold a name.
    """
    write = "write {column} for a column of the row, and {{ and }} for braces"
    try:
        parts = list(Formatter().parse(context))
    except ValueError as error:
        raise ValueError(f"its braces do not match ({error}): {write}") from None
    for _, name, form, conversion in parts:
        if name is not None and (not name.strip() or form or conversion):
            shown = f"{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
            raise ValueError(f"{{{shown}}} is not the name of a column: {write}")
    return [(text, name) for text, name, *_ in parts]
