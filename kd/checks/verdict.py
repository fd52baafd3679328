"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cache.json_object import Json
from kd.errors import TrainingError
from kd.progress import replace_nonfinite

#: Names that a message lists; the facts have all of them.
NAMES_SHOWN = 5


def format_names(names: Sequence[str], shown: int = NAMES_SHOWN) -> str:
    """Name the first ``shown`` of ``names``, and count the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


@dataclass(frozen=True)
class Verdict:
    """The result of one check: a sentence with its numbers, the remedy, and the numbers as JSON."""

    check: str
    ok: bool
    message: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> Json:
        """The data of a ``check`` event."""
        return {**asdict(self), "facts": replace_nonfinite(self.facts)}  # JSON has no NaN

    def require(self) -> None:
        """Raise ``TrainingError`` if the check failed; for failures that must end the training."""
        if not self.ok:
            raise TrainingError(self.message, self.remedy)
