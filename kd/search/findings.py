"""Write the results of a search: best.yaml, report.json and report.md. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cache.json_object import Json
from cache.perplexity import FEW_TOKENS, raise_e
from kd.checks.verdict import Verdict
from kd.config.job import JobConfig
from kd.errors import TrainingError
from kd.evaluation.pages import format_verdict
from kd.evaluation.teacher_effect import judge_pair
from kd.files import write_json, write_text
from kd.progress import replace_nonfinite
from kd.search.space import Overrides, get_search, make_best_job
from kd.search.study import SearchStudy

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

#: The files in the run folder of a search.
SEARCH_FILES = ("best.yaml", "report.md", "report.json")
#: Our words for the states of Optuna's trials.
OUTCOMES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True)
class TrialResult:
    """A trial: its state, its loss (nats per token) after ``steps``, and the values that it tried.

    ``why`` is the reason of a failure. ``same_as`` is the number of an earlier trial with the same
    values, in place of which this one was not trained. A ``loss`` that is not finite is None.
    """

    number: int
    state: str
    loss: float | None
    steps: int
    values: Overrides
    why: str
    same_as: int | None


@dataclass(frozen=True)
class SearchReport:
    """The outcome of a search: the best trial, and all trials from best to worst."""

    name: str
    kind: str
    held_out_tokens: int | None
    best: TrialResult | None
    tried_all: bool
    trials: tuple[TrialResult, ...]
    verdict: Verdict | None

    def to_json(self) -> Json:
        """Return the content of report.json, in which the best trial stands in short."""
        report: Json = replace_nonfinite(asdict(self))
        if best := report["best"]:
            report["best"] = {name: best[name] for name in ("number", "loss", "values")}
        return report


def make_search_report(config: JobConfig, study: SearchStudy) -> SearchReport:
    """Make the report of all trials so far."""

    def rank(row: TrialResult) -> tuple[bool, float, int]:
        loss = math.inf if row.loss is None else row.loss
        return row.state != "complete", loss, row.number

    trials = sorted(map(describe_trial, study.list_trials()), key=rank)
    return SearchReport(
        name=config.name,
        kind=config.kind,
        held_out_tokens=study.held_out_tokens,
        best=next((row for row in trials if row.state == "complete"), None),
        tried_all=study.has_tried_all(),
        trials=tuple(trials),
        verdict=judge_search(trials),
    )


def judge_search(trials: Sequence[TrialResult]) -> Verdict | None:
    """Judge the teacher of a search that also tried to train without it (``loss.alpha`` 1).

    The best trials of both kinds are compared. None if one kind has no complete trial.
    """
    # Of equal losses the one with steps comes first: a trial that was not trained again has none.
    found: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for row in trials:
        alpha = row.values.get("loss.alpha")
        if row.state == "complete" and alpha is not None and row.loss is not None:
            found[alpha == 1.0].append((row.loss, -row.steps))
    if not found[True] or not found[False]:
        return None
    (taught, steps), (plain, plain_steps) = min(found[False]), min(found[True])
    return judge_pair(raise_e(taught), raise_e(plain), None, steps=-max(steps, plain_steps))


def describe_trial(trial: FrozenTrial) -> TrialResult:
    """Describe a trial as it is now; one that did not complete has its least loss so far."""
    losses = trial.intermediate_values
    state = OUTCOMES.get(trial.state.name, "running")
    loss = trial.value if state == "complete" else min(losses.values(), default=None)
    return TrialResult(
        number=trial.number,
        state=state,
        loss=replace_nonfinite(loss),
        steps=max(losses, default=0),
        values={name: trial.params[name] for name in sorted(trial.params)},
        why=trial.user_attrs.get("why", ""),
        same_as=trial.user_attrs.get("same_as"),
    )


def write_search(run_dir: Path, config: JobConfig, report: SearchReport) -> dict[str, str]:
    """Write the search's files; return their paths by name.

    Raises ``TrainingError`` if no trial completed; the report is written before.
    """
    write_json(run_dir / "report.json", report.to_json())
    write_text(run_dir / "report.md", render_search_report(config, report))
    if report.best is None:
        why = next((row.why for row in report.trials if row.why), "All were stopped early.")
        detail = f"None of the {len(report.trials)} trials completed. {why}"
        raise TrainingError(detail, f"{run_dir / 'report.md'} lists the outcome of each.")
    write_text(run_dir / "best.yaml", render_best_job(config, report.best))
    return {name: str(run_dir / name) for name in SEARCH_FILES}


def render_best_job(config: JobConfig, best: TrialResult) -> str:
    """Render the whole job with the best values for ``kd run``, which reuses the search's cache.

    A comment says so where it would capture one without the entropies of positions.
    """
    job = make_best_job(config, best.values)
    note = (
        f"# Trial {best.number} of search {config.name}: "
        f"held-out loss {best.loss:.4f} nats per token.\n"
    )
    if config.keeps_entropies and not job.keeps_entropies:
        note += "# It captures a smaller cache; kind train and cache.fingerprint avoid that.\n"
    return note + yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def render_search_report(config: JobConfig, report: SearchReport) -> str:
    """Render the report as Markdown."""
    fields = sorted(get_search(config).space)
    warning = format_verdict(report.to_json())
    lines = [f"# {report.name}", "", *warning, _summarise(config, report), ""]
    perplexity = _name_perplexity(report.held_out_tokens)
    heading = ("trial", "outcome", "held-out loss", perplexity, "steps")
    lines += [_format_row(*heading, *(f"`{name}`" for name in fields))]
    lines += [_format_row("---:", "---", "---:", "---:", "---:", *["---:"] * len(fields))]
    for row in report.trials:
        values = [_format_value(row.values.get(name)) for name in fields]
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        # exp(loss) overflows a float above 709.
        shown = "" if row.loss is None or row.loss >= 700 else f"{math.exp(row.loss):,.2f}"
        lines.append(_format_row(row.number, row.state, loss, shown, row.steps, *values))
    failures = [f"- Trial {row.number} failed: {row.why}" for row in report.trials if row.why]
    failures += [
        f"- Trial {row.number} has the values of trial {row.same_as}, and was not trained."
        for row in report.trials
        if row.same_as is not None
    ]
    return "\n".join([*lines, *([""] if failures else []), *failures]) + "\n"


def _name_perplexity(tokens: int | None) -> str:
    """The title of the column; below 2,000 tokens it says where the intervals are."""
    if tokens is None:
        return "perplexity"
    where = ": each trial's report has the interval" if tokens < FEW_TOKENS else ""
    return f"perplexity of {tokens:,} tokens{where}"


def _summarise(config: JobConfig, report: SearchReport) -> str:
    search = get_search(config)
    best = report.best
    what = f"{len(report.trials)} trials from one cache, sampler {search.sampler}."
    if report.tried_all and len(report.trials) < search.trials:
        what += f" It ended before {search.trials} trials: the space has no other values."
    if best is None:
        return f"{what} None completed."
    found = ", ".join(f"`{name}` {_format_value(value)}" for name, value in best.values.items())
    return f"{what} The best is trial {best.number}: {found}. `best.yaml` is the whole job."


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _format_row(*cells: Any) -> str:
    shown = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(shown)} |"
