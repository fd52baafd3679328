"""The errors of a run, besides those of the cache.

PotstillError (cache.errors)
├── ConfigError           the job's configuration is wrong; ``problems`` names each field
├── ModelError            missing, gated, or of a shape that cannot be distilled
├── DataError             missing, empty, too short, or not in the declared format
├── TokenizerMismatch     student and cache do not share a tokenizer
├── FidelityError         a cache's records differ from the running teacher
├── OtherCapture          a worker cannot help with a capture of other inputs, version or place
├── HubError              a hub refused, is out of reach, or holds something else
├── DeviceUnusable        the promised GPU is not there for torch, or not known to its build
├── TrainingError         a checkpoint cannot be resumed, a check failed, memory ran out
│   ├── NotFinite         the loss became NaN
│   ├── RankLost          one of the processes that share a stage was killed
│   └── OutOfMemory       memory ran out; the remedy names settings that need less
└── Interrupted           the run was asked to stop, and has saved what it needs to resume
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cache.errors import PotstillError

#: The remedy for several problems of a configuration.
_SEVERAL = "Change each of these fields; what to do stands after it."


@dataclass(frozen=True)
class Problem:
    """One wrong field: a JSON pointer to it, what is wrong, and the remedy."""

    pointer: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        # For people the dotted name of a field; the pointer itself is for programs.
        where = self.pointer.strip("/").replace("/", ".") or "job"
        return f"{where}: {self.detail} {self.remedy}".strip()

    def to_json(self) -> dict[str, str]:
        """Return the entry in the ``errors`` list of a problem document."""
        return {"pointer": self.pointer, "detail": self.detail, "remedy": self.remedy}


class ConfigError(PotstillError):
    """The configuration is refused; ``problems`` lists everything that is wrong with it.

    The remedy is that of the one problem. Of several ones each stands beside its problem.
    """

    type = "invalid_config"

    def __init__(self, problems: list[Problem]) -> None:
        if len(problems) == 1:
            super().__init__(str(replace(problems[0], remedy="")), problems[0].remedy)
        else:
            super().__init__("; ".join(map(str, problems)), _SEVERAL)
        self.problems = problems

    @classmethod
    def of_field(cls, pointer: str, detail: str, remedy: str) -> ConfigError:
        """Return the error for one wrong field."""
        return cls([Problem(pointer, detail, remedy)])


class ModelError(PotstillError):
    """A model cannot be found, read, or used as a teacher or student."""

    type = "model_error"


class DataError(PotstillError):
    """The text cannot be read, is empty, or is too short."""

    type = "data_error"


class TokenizerMismatch(PotstillError):
    """The student's tokenizer is not the one the cache was captured with."""

    type = "tokenizer_mismatch"


class FidelityError(PotstillError):
    """The records of a cache differ from the running teacher by more than their profile allows."""

    type = "fidelity_error"


class OtherCapture(PotstillError):
    """A worker cannot help with a capture: its inputs, its version or its store are others."""

    type = "other_capture"


class HubError(PotstillError):
    """A Hugging Face hub refused a request, cannot be reached, or holds something else."""

    type = "hub_error"


class DeviceUnusable(PotstillError):
    """torch cannot compute on the device that the job was given."""

    type = "device_unusable"


class TrainingError(PotstillError):
    """Training cannot continue."""

    type = "training_error"


class NotFinite(TrainingError):
    """The loss or its gradient became NaN or infinite."""

    type = "nan_loss"


class OutOfMemory(TrainingError):
    """A GPU or this machine ran out of memory."""

    type = "out_of_memory"


class RankLost(TrainingError):
    """One of the processes that share a stage was killed, so that all of them ended.

    ``signum`` is the signal that killed it. Everything up to the newest checkpoint is kept.
    """

    type = "worker_lost"

    def __init__(self, detail: str, remedy: str = "", signum: int = 0) -> None:
        super().__init__(detail, remedy)
        self.signum = signum


class Interrupted(PotstillError):
    """The run was asked to stop; its work is on disk, and a new attempt continues from there."""

    type = "interrupted"


#: Phrases in the messages of torch and of its libraries where they raise no class of their own.
_OUT_OF_MEMORY_PHRASES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that the memory of a GPU or of this machine ran out."""
    # The class of torch is found by its name, because this module does not import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """Whether ``text``, a message or the end of a log, says that memory ran out."""
    return any(phrase in text.lower() for phrase in _OUT_OF_MEMORY_PHRASES)


def format_first_line(error: Exception) -> str:
    """Return the type of ``error`` and the first line of its message."""
    # Libraries put advice and stack traces into the lines after the first.
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
