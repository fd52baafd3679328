"""What a search found: best.yaml, report.json and report.md in its run folder. Imports no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kd.config.job import JobConfig
from kd.errors import TrainingError
from kd.files import write_json, write_text
from kd.progress import finite
from kd.search.space import best_job, search_of

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

FILES = ("best.yaml", "report.md", "report.json")
OUTCOMES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


def search_report(config: JobConfig, study: Study) -> dict[str, Any]:
    """All trials, the best first, and which one that is; numbers in it are finite or None."""
    trials = [row_of(trial) for trial in study.get_trials(deepcopy=False)]
    trials.sort(key=lambda row: (row["state"] != "complete", _or_infinite(row["loss"]), row["number"]))
    complete = [row for row in trials if row["state"] == "complete"]
    best = {name: complete[0][name] for name in ("number", "loss", "values")} if complete else None
    report: dict[str, Any] = finite({"name": config.name, "kind": config.kind, "best": best, "trials": trials})
    return report


def row_of(trial: FrozenTrial) -> dict[str, Any]:
    """A trial in plain values: outcome, best held-out loss, steps, values, and why it failed."""
    losses = trial.intermediate_values
    return {
        "number": trial.number,
        "state": OUTCOMES.get(trial.state.name, "running"),
        "loss": trial.value if trial.state.name == "COMPLETE" else min(losses.values(), default=None),
        "steps": max(losses, default=0),
        "values": {name: trial.params[name] for name in sorted(trial.params)},
        "why": trial.user_attrs.get("why", ""),
    }


def _or_infinite(loss: float | None) -> float:
    return math.inf if loss is None else loss


def write_search(run_dir: Path, config: JobConfig, report: dict[str, Any]) -> dict[str, str]:
    """Write the search's files; returns their paths by name.

    Raises ``TrainingError`` after the report is written where no trial came to its end.
    """
    write_json(run_dir / "report.json", report)
    write_text(run_dir / "report.md", render(config, report))
    if report["best"] is None:
        why = next((row["why"] for row in report["trials"] if row["why"]), "All were stopped early.")
        raise TrainingError(
            f"None of the {len(report['trials'])} trials came to its end. {why}",
            f"{run_dir / 'report.md'} lists what became of each.",
        )
    write_text(run_dir / "best.yaml", best_yaml(config, report))
    return {name: str(run_dir / name) for name in FILES}


def best_yaml(config: JobConfig, report: dict[str, Any]) -> str:
    """The whole job with the best values, as ``kd run`` takes it: the teacher's cache is found, not captured again."""
    best = report["best"]
    job = best_job(config, best["values"]).model_dump(mode="json")
    head = f"# Trial {best['number']} of search {config.name}: held-out loss {best['loss']:.4f} nats per token.\n"
    return head + yaml.safe_dump(job, sort_keys=False, allow_unicode=True)


def render(config: JobConfig, report: dict[str, Any]) -> str:
    """The report as Markdown."""
    fields = sorted(search_of(config).space)
    lines = [f"# {report['name']}", "", _sentence(config, report), ""]
    lines += [_cells("trial", "outcome", "held-out loss", "perplexity", "steps", *(f"`{name}`" for name in fields))]
    lines += [_cells("---:", "---", "---:", "---:", "---:", *["---:"] * len(fields))]
    for row in report["trials"]:
        values = [_value(row["values"].get(name)) for name in fields]
        lines.append(_cells(row["number"], row["state"], *_loss(row["loss"]), row["steps"], *values))
    failures = [f"- Trial {row['number']} failed: {row['why']}" for row in report["trials"] if row["why"]]
    return "\n".join([*lines, *([""] if failures else []), *failures]) + "\n"


def _sentence(config: JobConfig, report: dict[str, Any]) -> str:
    search, best = search_of(config), report["best"]
    what = f"{len(report['trials'])} trials from one cache, sampler {search.sampler}, pruner {search.pruner}."
    if best is None:
        return f"{what} None came to its end."
    found = ", ".join(f"`{name}` {_value(value)}" for name, value in best["values"].items())
    return f"{what} The best is trial {best['number']}: {found}. `best.yaml` is the whole job."


def _loss(loss: float | None) -> tuple[str, str]:
    return ("", "") if loss is None else (f"{loss:.4f}", f"{math.exp(loss):,.2f}" if loss < 700 else "")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _cells(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
