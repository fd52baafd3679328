"""``kd run`` of a search: the trials one after the other, in this process, each in a folder of its own.

    study.jsonl        the study; what is in it is never done again
    trials/0000/       a trial's run folder: config.json, metrics.jsonl, checkpoints/ until it ends, student/, report.md
    best.yaml          the whole job with the best values
    report.json, .md   every trial

Stopped or killed and started again, it goes on: the trial under way goes on from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.disk import remove
from kd.config.job import JobConfig
from kd.errors import ConfigError, Interrupted, ModelError, TrainingError
from kd.files import read_json, write_json
from kd.metrics import read_metrics
from kd.progress import Event, Monitor
from kd.search.report import row_of, search_report, write_search
from kd.search.space import Overrides, keeps_best, search_of, space_problems, trial_job
from kd.search.study import FileJournal, make_study, new_trial, open_trials, report, should_prune, suggest, tell

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

TrainStudent = Callable[[JobConfig, Path, Path, Monitor], dict[str, Any]]
"""``kd.pipeline.train_student``."""

SHOWN = {"progress", "metrics", "evaluation", "warning", "check"}


def search_students(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, train_student: TrainStudent
) -> dict[str, Any]:
    """Try as many trials as were asked for, from the sealed cache that ``run_dir``/cache.json names.

    A trial whose values do not go together, or that diverges, has failed; the search goes on. Raises ``ConfigError``
    where the space is wrong, ``TrainingError`` where no trial came to its end, ``Interrupted`` when asked to stop.
    """
    if problems := space_problems(config):
        raise ConfigError(problems)
    study = make_study(config, FileJournal(run_dir / "study.jsonl"))
    search = _Search(config, home, run_dir, monitor, train_student, study)
    while (trial := search.next()) is not None:
        search.run(trial)
    found = search_report(config, study)
    artifacts = write_search(run_dir, config, found)
    artifacts["student"] = str(trial_folder(run_dir, found["best"]["number"]) / "student")
    for name, path in artifacts.items():
        monitor.emit("artifact", name=name, path=path)
    return {"artifacts": artifacts, "report": found}


def trial_folder(run_dir: Path, number: int) -> Path:
    """The run folder of a trial."""
    return run_dir / "trials" / f"{number:04d}"


@dataclass(frozen=True)
class _Search:
    config: JobConfig
    home: Path
    run_dir: Path
    monitor: Monitor
    train_student: TrainStudent
    study: Study

    def next(self) -> Trial | None:
        """The trial that was under way, or a new one; None where all are done."""
        search = search_of(self.config)
        done = len(self.study.get_trials(deepcopy=False)) - len(begun := open_trials(self.study))
        fraction = done / search.trials
        self.monitor.emit("progress", done=done, total=search.trials, unit="trials", fraction=round(fraction, 6))
        return begun[0] if begun else new_trial(self.study, search)

    def run(self, trial: Trial) -> None:
        """Train the trial's student and tell the study what came of it; only a failed one keeps its checkpoints."""
        search = search_of(self.config)
        self.monitor.check(f"before trial {trial.number} of {search.trials}")
        overrides = suggest(self.study, trial, search)
        watched = _Watched(self.study, trial, self.monitor)
        self.monitor.emit("stage", stage="search", phase=f"trial {trial.number} of {search.trials}")
        self.monitor.emit("trial", number=trial.number, values=overrides, state="running")
        try:
            self._train(trial.number, overrides, watched)
            tell(self.study, trial, "complete", keeps_best=keeps_best(self.config, overrides))
        except Interrupted:
            if not watched.pruned:
                raise
            tell(self.study, trial, "pruned")
        except (ConfigError, ModelError, TrainingError) as error:
            tell(self.study, trial, "failed", str(error))
        row = row_of(self.study.get_trials(deepcopy=False)[trial.number])
        if row["state"] != "failed":
            remove(trial_folder(self.run_dir, trial.number) / "checkpoints")
        self.monitor.emit("trial", **{name: row[name] for name in ("number", "values", "state", "loss", "why")})

    def _train(self, number: int, overrides: Overrides, watched: _Watched) -> None:
        folder = trial_folder(self.run_dir, number)
        job = trial_job(self.config, overrides, read_json(self.run_dir / "cache.json")["fingerprint"], number)
        write_json(folder / "config.json", job.model_dump(mode="json"))
        watched.catch_up(folder / "metrics.jsonl")
        self.train_student(job, self.home, folder, Monitor(watched.listen, watched.should_stop))


@dataclass
class _Watched:
    """Between a trial and who listens to the search: takes its held-out losses, and stops it where they are bad."""

    study: Study
    trial: Trial
    monitor: Monitor
    pruned: bool = False

    def listen(self, event: Event) -> None:
        """Pass on what is of interest in a search."""
        if event.type == "evaluation":
            self._report(event.data)
        if event.type in SHOWN:
            self.monitor.emit(event.type, **event.data)

    def should_stop(self) -> bool:
        """Whether the trial is to stop where everything is saved."""
        return self.pruned or self.monitor.should_stop()

    def catch_up(self, metrics: Path) -> None:
        """Take what a killed process measured and had no time to report."""
        for line in read_metrics(metrics):
            if line["type"] == "evaluation":
                self._report(line)

    def _report(self, found: dict[str, Any]) -> None:
        report(self.study, self.trial, found["step"], found.get("validation_loss"))
        self.pruned = self.pruned or should_prune(self.trial)
