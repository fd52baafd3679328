"""Cursors of lists: opaque text, so that no client builds one by itself."""

from __future__ import annotations

import base64
import re

from services.api.answers.problems import ApiProblem


def encode_cursor(cursor: int | None) -> str | None:
    """Return the text of a cursor; None after the last page."""
    if cursor is None:
        return None
    return base64.urlsafe_b64encode(str(cursor).encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> int | None:
    """Return the cursor that a text means; raise 422 if it means none."""
    if cursor is None:
        return None
    if not cursor:
        remedy = "Leave it out for the first page; next_cursor is null after the last page."
        raise ApiProblem(422, "cursor is empty.", remedy, "bad-cursor")
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        # Base64 has several spellings of one text; only our own is accepted.
        if re.fullmatch(r"\d{1,18}", text) and encode_cursor(int(text)) == cursor:
            return int(text)
    except ValueError:  # not base64, or not ASCII
        pass
    detail = f"cursor {cursor!r} does not belong to this list."
    raise ApiProblem(422, detail, "Begin again without a cursor.", "bad-cursor")
