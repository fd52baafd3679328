"""Run a search in this process, for ``kd run``: one trial after the other, each in its own folder.

    study.jsonl        the study; a trial that ended in it is not repeated
    trials/0000/       the run folder of a trial: config.json, metrics.jsonl, student/, report.md,
                       and checkpoints/ until the trial ends
    best.yaml          the whole job with the best values
    report.json, .md   every trial

A search that was stopped or killed continues: its open trial resumes from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.disk import remove_path
from kd.config.job import JobConfig
from kd.errors import ConfigError, Interrupted, ModelError, TrainingError
from kd.evaluation.teacher_effect import warn_of_verdict
from kd.files import read_json, write_json
from kd.progress import Event, Monitor, StageResult
from kd.search.findings import describe_trial, make_search_report, write_search
from kd.search.space import find_space_problems, keeps_best, make_trial_job
from kd.search.study import FileJournal, SearchStudy, make_study, should_prune
from kd.tracking.metrics import read_metrics

if TYPE_CHECKING:
    from optuna.trial import Trial

#: ``kd.pipeline.run_train``, which this room may not import.
TrainStudent = Callable[[JobConfig, Path, Path, Monitor], StageResult]

#: Events of a trial that the listener of the search gets too.
SHOWN_EVENTS = {"progress", "metrics", "evaluation", "warning", "check"}


def search_students(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, train_student: TrainStudent
) -> StageResult:
    """Run all trials of the search, from the sealed cache that ``run_dir``/cache.json names.

    A trial fails if its values contradict each other or if it diverges; the search continues.
    Raises ``ConfigError`` for a wrong space, ``TrainingError`` if no trial completed, and
    ``Interrupted`` when it is asked to stop.
    """
    if problems := find_space_problems(config):
        raise ConfigError(problems)
    study = make_study(config, FileJournal(run_dir / "study.jsonl"))
    search = _TrialRunner(config, home, run_dir, monitor, train_student, study)
    while (trial := search.find_next()) is not None:
        search.run(trial)
    found = make_search_report(config, study)
    report = found.to_json()
    warn_of_verdict(report, monitor)
    artifacts = write_search(run_dir, config, found)
    artifacts["student"] = str(get_trial_folder(run_dir, report["best"]["number"]) / "student")
    for name, path in artifacts.items():
        monitor.emit("artifact", name=name, path=path)
    return StageResult(artifacts=artifacts, report=report)


def get_trial_folder(run_dir: Path, number: int) -> Path:
    """Return the run folder of a trial."""
    return run_dir / "trials" / f"{number:04d}"


@dataclass(frozen=True)
class _TrialRunner:
    config: JobConfig
    home: Path
    run_dir: Path
    monitor: Monitor
    train_student: TrainStudent
    study: SearchStudy

    def find_next(self) -> Trial | None:
        """Return the trial that was interrupted, or a new one; None if all are done."""
        search = self.study.search
        begun = self.study.list_open_trials()
        done = len(self.study.list_trials()) - len(begun)
        self.monitor.emit(
            "progress",
            done=done,
            total=search.trials,
            unit="trials",
            fraction=round(done / search.trials, 6),
            eta_seconds=self.study.estimate_seconds_left(),
        )
        return begun[0] if begun else self.study.start_trial()

    def run(self, trial: Trial) -> None:
        """Train the trial's student and record the outcome; only failed trials keep checkpoints."""
        search = self.study.search
        self.monitor.check(f"before trial {trial.number} of {search.trials}")
        overrides = self.study.suggest_values(trial)
        if (twin := self.study.find_twin(trial)) is not None:
            self.study.end_as_twin(trial, twin)
            self._announce(trial.number)
            return
        watched = TrialMonitor(self.study, trial, self.monitor)
        self.monitor.emit("stage", stage="search", phase=f"trial {trial.number} of {search.trials}")
        self.monitor.emit("trial", number=trial.number, values=overrides, state="running")
        try:
            folder = get_trial_folder(self.run_dir, trial.number)
            fingerprint = read_json(self.run_dir / "cache.json")["fingerprint"]
            job = make_trial_job(self.config, overrides, fingerprint, trial.number)
            write_json(folder / "config.json", job.model_dump(mode="json"))
            # Before training, so that a trial which was already bad is stopped at once.
            watched.catch_up(folder / "metrics.jsonl")
            self.train_student(job, self.home, folder, Monitor(watched.listen, watched.should_stop))
            self.study.end_trial(trial, "complete", keeps_best=keeps_best(self.config, overrides))
        except Interrupted:
            # A pruned trial and a search that should stop end in the same way.
            if not watched.pruned:
                raise
            self.study.end_trial(trial, "pruned")
        except (ConfigError, ModelError, TrainingError) as error:
            self.study.end_trial(trial, "failed", str(error))
        # Checkpoints of a failed trial may show why it failed.
        if self._announce(trial.number) != "failed":
            remove_path(get_trial_folder(self.run_dir, trial.number) / "checkpoints")

    def _announce(self, number: int) -> str:
        """Report the outcome of a trial, and return it."""
        row = describe_trial(self.study.list_trials()[number])
        facts = {"number": row.number, "values": row.values, "state": row.state}
        self.monitor.emit("trial", **facts, loss=row.loss, why=row.why)
        return row.state


@dataclass
class TrialMonitor:
    """Passes on a trial's events, records its held-out losses, and stops it if they are bad."""

    study: SearchStudy
    trial: Trial
    monitor: Monitor
    pruned: bool = False
    #: Whether the student is trained: its report is made even if the last evaluation was bad.
    trained: bool = False

    def listen(self, event: Event) -> None:
        """Record a held-out loss, and pass on the events that a search shows."""
        if event.type == "evaluation":
            self._report(event.data)
        if event.type == "stage" and event.data.get("phase") == "saving":
            self.trained = True
        if event.type in SHOWN_EVENTS:
            self.monitor.emit(event.type, **event.data)

    def should_stop(self) -> bool:
        """Return whether the trial should stop at the next point where everything is saved."""
        return (self.pruned and not self.trained) or self.monitor.should_stop()

    def catch_up(self, metrics: Path) -> None:
        """Record the losses that a killed process measured but did not record."""
        for line in read_metrics(metrics):
            if line["type"] == "evaluation":
                self._report(line)

    def _report(self, found: Mapping[str, Any]) -> None:
        self.study.note_held_out_tokens(found.get("validation_tokens"))
        self.study.report_loss(self.trial, found["step"], found.get("validation_loss"))
        self.pruned = self.pruned or should_prune(self.trial)
