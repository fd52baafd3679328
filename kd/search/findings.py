"""Write the results of a search: best.yaml, report.json and report.md. Imports no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cache.perplexity import FEW_TOKENS, raise_e
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig
from kd.errors import TrainingError
from kd.evaluation.pages import format_verdict
from kd.evaluation.teacher_effect import judge_pair
from kd.files import write_json, write_text
from kd.progress import replace_nonfinite
from kd.search.space import get_search, make_best_job
from kd.search.study import get_held_out_tokens, has_tried_all

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

#: The files in the run folder of a search.
SEARCH_FILES = ("best.yaml", "report.md", "report.json")
#: Our words for the states of Optuna's trials.
OUTCOMES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


def make_search_report(config: JobConfig, study: Study) -> dict[str, Any]:
    """Make the report: the best trial, and all trials from best to worst. No number is NaN."""
    trials = [describe_trial(trial) for trial in study.get_trials(deepcopy=False)]

    def rank(row: dict[str, Any]) -> tuple[bool, float, int]:
        loss = math.inf if row["loss"] is None else row["loss"]
        return row["state"] != "complete", loss, row["number"]

    trials.sort(key=rank)
    complete = [row for row in trials if row["state"] == "complete"]
    best = {name: complete[0][name] for name in ("number", "loss", "values")} if complete else None
    report: dict[str, Any] = replace_nonfinite(
        {
            "name": config.name,
            "kind": config.kind,
            "held_out_tokens": get_held_out_tokens(study),
            "best": best,
            "tried_all": has_tried_all(study, get_search(config)),
            "trials": trials,
        }
    )
    verdict = judge_search(trials)
    return report | {"verdict": None if verdict is None else verdict.to_json()}


def judge_search(trials: list[dict[str, Any]]) -> Verdict | None:
    """Judge the teacher of a search that also tried to train without it (``loss.alpha`` 1).

    The best trials of both kinds are compared. None if one kind has no complete trial.
    """
    losses: dict[bool, list[float]] = {True: [], False: []}
    for row in trials:
        alpha = row["values"].get("loss.alpha")
        if row["state"] == "complete" and alpha is not None and row["loss"] is not None:
            losses[alpha == 1.0].append(row["loss"])
    if not losses[True] or not losses[False]:
        return None
    return judge_pair(raise_e(min(losses[False])), raise_e(min(losses[True])), None)


def describe_trial(trial: FrozenTrial) -> dict[str, Any]:
    """Describe a trial in plain values: state, loss, steps, tried values, reason of a failure."""
    losses = trial.intermediate_values
    state = OUTCOMES.get(trial.state.name, "running")
    return {
        "number": trial.number,
        "state": state,
        "loss": trial.value if state == "complete" else min(losses.values(), default=None),
        "steps": max(losses, default=0),
        "values": {name: trial.params[name] for name in sorted(trial.params)},
        "why": trial.user_attrs.get("why", ""),
        "same_as": trial.user_attrs.get("same_as"),
    }


def write_search(run_dir: Path, config: JobConfig, report: dict[str, Any]) -> dict[str, str]:
    """Write the search's files; return their paths by name.

    Raises ``TrainingError`` if no trial completed; the report is written before.
    """
    write_json(run_dir / "report.json", report)
    write_text(run_dir / "report.md", render_search_report(config, report))
    if report["best"] is None:
        why = next(
            (row["why"] for row in report["trials"] if row["why"]), "All were stopped early."
        )
        raise TrainingError(
            f"None of the {len(report['trials'])} trials completed. {why}",
            f"{run_dir / 'report.md'} lists the outcome of each.",
        )
    write_text(run_dir / "best.yaml", render_best_job(config, report))
    return {name: str(run_dir / name) for name in SEARCH_FILES}


def render_best_job(config: JobConfig, report: dict[str, Any]) -> str:
    """Render the whole job with the best values for ``kd run``, which reuses the search's cache."""
    best = report["best"]
    job = make_best_job(config, best["values"]).model_dump(mode="json")
    comment = (
        f"# Trial {best['number']} of search {config.name}: "
        f"held-out loss {best['loss']:.4f} nats per token.\n"
    )
    return comment + yaml.safe_dump(job, sort_keys=False, allow_unicode=True)


def render_search_report(config: JobConfig, report: dict[str, Any]) -> str:
    """Render the report as Markdown."""
    fields = sorted(get_search(config).space)
    lines = [f"# {report['name']}", "", *format_verdict(report), _summarise(config, report), ""]
    perplexity = _name_perplexity(report.get("held_out_tokens"))
    heading = ("trial", "outcome", "held-out loss", perplexity, "steps")
    lines += [_format_row(*heading, *(f"`{name}`" for name in fields))]
    lines += [_format_row("---:", "---", "---:", "---:", "---:", *["---:"] * len(fields))]
    for row in report["trials"]:
        values = [_format_value(row["values"].get(name)) for name in fields]
        outcome = (row["number"], row["state"], *_format_loss(row["loss"]), row["steps"])
        lines.append(_format_row(*outcome, *values))
    failures = [
        f"- Trial {row['number']} failed: {row['why']}" for row in report["trials"] if row["why"]
    ]
    failures += [
        f"- Trial {row['number']} has the values of trial {row['same_as']}, and was not trained."
        for row in report["trials"]
        if row["same_as"] is not None
    ]
    return "\n".join([*lines, *([""] if failures else []), *failures]) + "\n"


def _name_perplexity(tokens: int | None) -> str:
    """The title of the column; below 2,000 tokens it says where the intervals are."""
    if tokens is None:
        return "perplexity"
    where = ": each trial's report has the interval" if tokens < FEW_TOKENS else ""
    return f"perplexity of {tokens:,} tokens{where}"


def _summarise(config: JobConfig, report: dict[str, Any]) -> str:
    search = get_search(config)
    best = report["best"]
    what = (
        f"{len(report['trials'])} trials from one cache, "
        f"sampler {search.sampler}, pruner {search.pruner}."
    )
    if report["tried_all"] and len(report["trials"]) < search.trials:
        what += f" It ended before {search.trials} trials: the space has no other values."
    if best is None:
        return f"{what} None completed."
    found = ", ".join(f"`{name}` {_format_value(value)}" for name, value in best["values"].items())
    return f"{what} The best is trial {best['number']}: {found}. `best.yaml` is the whole job."


def _format_loss(loss: float | None) -> tuple[str, str]:
    if loss is None:
        return "", ""
    # exp(loss) overflows a float above 709.
    return f"{loss:.4f}", f"{math.exp(loss):,.2f}" if loss < 700 else ""


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _format_row(*cells: Any) -> str:
    shown = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(shown)} |"
