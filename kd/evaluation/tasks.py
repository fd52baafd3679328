"""Benchmark tasks of lm-eval, through its Python API (an extra: pip install 'potstill[eval]')."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd.config.extras import NO_HARNESS, is_harness_installed
from kd.errors import ConfigError, Problem


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: tuple[str, ...],
    batch_size: int,
) -> dict[str, dict[str, float]]:
    """Return every number that lm-eval computes, by task and by metric.

    A task is a name that lm-eval knows, or the path of a YAML file named after the task that it
    defines. Raises ``ConfigError`` for an unknown task, and where lm-eval is not installed.
    """
    if not is_harness_installed():
        raise ConfigError([NO_HARNESS])
    # Imported here because lm-eval is an extra that may be absent.
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # lm-eval finds a task by its name, so the folder of a file is searched for the file's stem.
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=sorted({str(file.parent) for file in files}) or None)
    names = [Path(task).stem if Path(task) in files else task for task in tasks]
    remedy = "See `lm-eval ls tasks`."
    problems = [
        Problem(f"/evaluation/tasks/{place}", f"lm-eval knows no task {name!r}.", remedy)
        for place, name in enumerate(names)
        if name not in manager.all_tasks
    ]
    if problems:
        raise ConfigError(problems)
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=names,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None, "lm-eval returns results in the first process, and there is one"
    return select_numbers(found["results"])


def select_numbers(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The numbers among lm-eval's results.

    ``acc,none`` becomes ``acc``, with another filter ``acc (filter)``.
    """
    found: dict[str, dict[str, float]] = {}
    for task, values in results.items():
        numbers: dict[str, float] = {}
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name not in ("sample_len", "alias"):
                numbers[metric if kind in ("", "none") else f"{metric} ({kind})"] = float(value)
        found[task] = numbers
    return found
