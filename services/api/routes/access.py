"""What routes ask of their caller, and what a route that asks for it may answer."""

from __future__ import annotations

from typing import Any

from fastapi import Depends

from services.api.answers.problems import Answers, describe_problems
from services.api.guards.authentication import count_validation, hold_stream, require_scope

READ = [Depends(require_scope("read"))]
WRITE = [Depends(require_scope("write"))]
ADMIN = [Depends(require_scope("admin"))]
#: Also counts as a validation, of which a caller may ask fewer.
VALIDATE = [*WRITE, Depends(count_validation)]
#: Also holds one of the caller's event streams.
STREAM = [*READ, Depends(hold_stream)]


def guard(
    dependencies: list[Any], *statuses: int, answers: Answers | None = None
) -> dict[str, Any]:
    """Return the arguments of a route that asks for ``dependencies``.

    It may answer with ``answers``, and with the problems of ``statuses`` and of 503: the job store
    may be away.
    """
    described = (answers or {}) | describe_problems(*statuses, 503)
    return {"dependencies": dependencies, "responses": described}
