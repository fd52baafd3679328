"""Distil a language model into a smaller one, from Python.

    import kd

    teacher, text = "examples/austen/teacher", "examples/austen/text/persuasion.txt"
    data = {"train": text, "sequence_length": 128, "max_train_samples": 32}
    new = {"init": {"layers": 1, "hidden_size": 64}}  # or the name or folder of a model
    result = kd.distill(teacher, new, data, train={"max_steps": 8}, cache={"threshold": 0.04})
    print(result)  # perplexities, bytes per token, folders
    model, tokenizer = result.load()
    result.plot().savefig("curves.png")

    sealed = kd.build_cache(teacher, data)  # the teacher reads once, for any number of students
    student = kd.train_student(sealed, new, train={"epochs": 1, "learning_rate": 1e-3})
    unseen = "examples/austen/text/sensesensibility.txt"
    print(kd.evaluate(student, unseen, teacher=teacher, data={"max_eval_samples": 4}))

``import kd`` loads nothing else: a name is looked up when it is first used, and torch is loaded
when the first run begins. The names in ``__all__`` are public; all else belongs to its room.
Settings have the names of a job in YAML (docs/configuration.md). ``kd.load_job`` reads such a job,
and ``kd.run_job`` runs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kd.cached.loss import DistillationLoss
    from kd.cached.opening import OpenCache, open_cache
    from kd.cached.sft import CachedDistillationSFTTrainer
    from kd.cached.trainer import CachedDistillationTrainer
    from kd.client.client import Client
    from kd.client.errors import Refused, TimedOut, Unreachable
    from kd.python.calls import build_cache, distill, evaluate, run_job, train_student
    from kd.python.jobs import load_job
    from kd.python.results import CacheResult, DistillationResult, EvaluationResult, StudentResult
    from kd.python.runs import RunSummary, list_runs

#: The module of each public name. A new name needs a line here, one in ``__all__``, and one above.
_MODULES = {
    "distill": "kd.python.calls",
    "build_cache": "kd.python.calls",
    "train_student": "kd.python.calls",
    "evaluate": "kd.python.calls",
    "run_job": "kd.python.calls",
    "load_job": "kd.python.jobs",
    "list_runs": "kd.python.runs",
    "RunSummary": "kd.python.runs",
    "CacheResult": "kd.python.results",
    "StudentResult": "kd.python.results",
    "DistillationResult": "kd.python.results",
    "EvaluationResult": "kd.python.results",
    "Client": "kd.client.client",
    "Refused": "kd.client.errors",
    "TimedOut": "kd.client.errors",
    "Unreachable": "kd.client.errors",
    "open_cache": "kd.cached.opening",
    "OpenCache": "kd.cached.opening",
    "DistillationLoss": "kd.cached.loss",
    "CachedDistillationTrainer": "kd.cached.trainer",
    "CachedDistillationSFTTrainer": "kd.cached.sft",
}

__all__ = [
    "CacheResult",
    "CachedDistillationSFTTrainer",
    "CachedDistillationTrainer",
    "Client",
    "DistillationLoss",
    "DistillationResult",
    "EvaluationResult",
    "OpenCache",
    "Refused",
    "RunSummary",
    "StudentResult",
    "TimedOut",
    "Unreachable",
    "build_cache",
    "distill",
    "evaluate",
    "list_runs",
    "load_job",
    "open_cache",
    "run_job",
    "train_student",
]


def __getattr__(name: str) -> object:
    """Return the public ``name``; its module is imported at the first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'kd' has no attribute {name!r}")
    found: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
