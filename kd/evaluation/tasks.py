"""Benchmark tasks of lm-eval, through its Python API (an extra: pip install 'potstill[eval]')."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd.config.extras import NO_HARNESS, is_harness_installed
from kd.errors import ConfigError, Problem


def require_harness() -> None:
    """Raise ``ConfigError`` where lm-eval is not installed."""
    if not is_harness_installed():
        raise ConfigError([NO_HARNESS])


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
    require_harness()
    # Imported here because lm-eval is an extra that may be absent.
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # lm-eval finds a task by its name, so the folder of a file is searched for the file's stem.
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=sorted({str(file.parent) for file in files}) or None)
    names = [Path(task).stem if Path(task) in files else task for task in tasks]
    _require_known(names, manager.all_tasks)
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=names,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None, "lm-eval returns results in the first process, and there is one"
    return select_numbers(found["results"])


def _require_known(names: list[str], known: list[str]) -> None:
    problems = [
        Problem(
            f"/evaluation/tasks/{place}",
            f"lm-eval knows no task {name!r}.",
            "See `lm-eval ls tasks`.",
        )
        for place, name in enumerate(names)
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)


def select_numbers(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The numbers among lm-eval's results.

    ``acc,none`` becomes ``acc``, with another filter ``acc (filter)``.
    """
    return {
        task: {
            _name_metric(name): float(value)
            for name, value in values.items()
            if _is_number(name, value)
        }
        for task, values in results.items()
    }


def _name_metric(name: str) -> str:
    metric, _, kind = name.partition(",")
    return metric if kind in ("", "none") else f"{metric} ({kind})"


def _is_number(name: str, value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("sample_len", "alias")
    )
