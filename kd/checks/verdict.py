"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kd.errors import TrainingError
from kd.progress import finite


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check: a sentence with the numbers in it, what to do, and the numbers as JSON values."""

    check: str
    ok: bool
    message: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The data of an event ``check``."""
        said = {"check": self.check, "ok": self.ok, "message": self.message, "remedy": self.remedy}
        return {**said, "facts": finite(self.facts)}

    def require(self) -> None:
        """Raise ``TrainingError`` if the check failed: for those that training must not go on without."""
        if not self.ok:
            raise TrainingError(self.message, self.remedy)
