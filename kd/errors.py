"""What can go wrong in a run, beyond the cache's own errors.

PotstillError (cache.errors)
├── ConfigError           the job's configuration is wrong; ``problems`` names each field
├── ModelError            missing, gated, or of a shape that cannot be distilled
├── DataError             missing, empty, too short, or not in the declared format
├── TokenizerMismatch     student and cache do not share a tokenizer
├── FidelityError         a cache's records are not what the live teacher says
├── TrainingError         a checkpoint cannot be resumed, a check failed, memory ran out
│   ├── NotFinite         the loss became NaN
│   └── OutOfMemory       memory ran out; the remedy names the levers
└── Interrupted           the run was asked to stop, and has saved what it needs to go on
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.errors import PotstillError


@dataclass(frozen=True)
class Problem:
    """One wrong field: a JSON pointer to it, what is wrong, and what to do."""

    pointer: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        where = self.pointer.strip("/").replace("/", ".") or "job"
        return f"{where}: {self.detail} {self.remedy}".strip()

    def to_json(self) -> dict[str, str]:
        """As it stands in the ``errors`` list of a problem document."""
        return {"pointer": self.pointer, "detail": self.detail, "remedy": self.remedy}


class ConfigError(PotstillError):
    """The configuration is refused; every problem is listed, not only the first."""

    type = "invalid_config"

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class ModelError(PotstillError):
    """A model cannot be found, read, or used as teacher or student."""

    type = "model_error"


class DataError(PotstillError):
    """The text cannot be read, is empty, or is too short."""

    type = "data_error"


class TokenizerMismatch(PotstillError):
    """The student's tokenizer is not the one the cache was captured with."""

    type = "tokenizer_mismatch"


class FidelityError(PotstillError):
    """The records of a cache differ from the live teacher by more than their profile allows."""

    type = "fidelity_error"


class TrainingError(PotstillError):
    """Training cannot go on."""

    type = "training_error"


class NotFinite(TrainingError):
    """The loss or its gradient became NaN or infinite."""

    type = "nan_loss"


class OutOfMemory(TrainingError):
    """Memory ran out, of a GPU or of this machine."""


class Interrupted(PotstillError):
    """The run was asked to stop; what it did so far is on disk and a new attempt goes on from there."""

    type = "interrupted"
