"""An Optuna study of a search: what to try next, what to stop early, and what came of it. Imports no torch.

All of a study lies in its journal, which is appended to and never rewritten; the sampler of a trial is seeded by its
number. What is tried next is therefore a function of what the finished trials gave, however often the search stops.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from cache.disk import storage_errors
from kd.config.job import JobConfig
from kd.config.placement import PLACEMENT
from kd.config.search import Dimension, SearchConfig
from kd.errors import TrainingError
from kd.search.space import Overrides, ends, search_of

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import Trial as Trial  # named here for services, which know nothing of Optuna

Outcome = Literal["complete", "pruned", "failed"]


class Journal(Protocol):
    """Where a study is kept: lines that are read from any one on, and added at the end."""

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The lines from that one on."""
        ...

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add lines, all or none."""
        ...


def make_study(config: JobConfig, journal: Journal) -> Study:
    """The study of this job in ``journal``, begun or gone on with; smaller is better.

    Raises ``TrainingError`` where the journal is another job's. More trials may be asked for than before.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(cast(Any, journal))
    study = optuna.create_study(
        storage=storage, study_name="search", pruner=_pruner(config), direction="minimize", load_if_exists=True
    )
    known = study.user_attrs.get("job")
    if known is None:
        study.set_user_attr("job", job_digest(config))
    elif known != job_digest(config):
        raise TrainingError(
            "The search in this folder was begun by another job: its configuration differs.",
            "Use another run folder, or delete this one to start over.",
        )
    return study


def job_digest(config: JobConfig) -> str:
    """Equal for jobs that may go on with each other's search: they differ in name, trials and placement, at most."""
    free: dict[str, Any] = {"name": True, "search": {"trials"}} | dict.fromkeys(PLACEMENT, True)
    data = config.model_dump(mode="json", exclude=free)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class FileJournal:
    """A journal in a file, one line of JSON each. The caller holds its folder alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:  # a crash may have cut the last line short
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The lines from that one on."""
        with self._path.open("rb") as file:
            yield from map(json.loads, islice(file, log_number_from, None))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add lines; they are on the disk when this returns."""
        with storage_errors(self._path.parent), self._path.open("ab") as file:
            file.write("".join(json.dumps(log) + "\n" for log in logs).encode())
            file.flush()
            os.fsync(file.fileno())


def _sampler(search: SearchConfig, *what: object) -> BaseSampler:
    """A sampler whose draws depend on the search's seed and on ``what`` is sampled, and on no draw before them."""
    from optuna import samplers

    seed = int.from_bytes(hashlib.sha256(repr((search.seed, *what)).encode()).digest()[:4], "big")
    if search.sampler == "tpe":
        return samplers.TPESampler(seed=seed, constant_liar=True)
    return samplers.GPSampler(seed=seed) if search.sampler == "gp" else samplers.RandomSampler(seed=seed)


def _pruner(config: JobConfig) -> BasePruner:
    from optuna import pruners

    train, name = config.train, search_of(config).pruner
    assert train is not None, "JobConfig refuses a search without a train section"
    if name == "median":
        return pruners.MedianPruner()
    if name == "none":
        return pruners.NopPruner()
    if train.max_steps is None:
        return pruners.HyperbandPruner(min_resource=train.eval_steps)
    return pruners.HyperbandPruner(min_resource=min(train.eval_steps, train.max_steps), max_resource=train.max_steps)


# ---------------------------------------------------------------------- trials


def open_trials(study: Study) -> list[Trial]:
    """The trials that were begun and have no outcome, oldest first."""
    from optuna.trial import Trial, TrialState

    return [Trial(study, each._trial_id) for each in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]


def new_trial(study: Study, search: SearchConfig) -> Trial | None:
    """One more trial, or None where there are as many as were asked for."""
    return study.ask() if len(study.get_trials(deepcopy=False)) < search.trials else None


def suggest(study: Study, trial: Trial, search: SearchConfig) -> Overrides:
    """The values of a trial; for one that has them already, in whole or in part, the same again."""
    overrides = {}
    for dotted in sorted(search.space):
        study.sampler = _sampler(search, trial.number, dotted)
        overrides[dotted] = _value(trial, dotted, search.space[dotted])
    return overrides


def _value(trial: Trial, dotted: str, dimension: Dimension) -> Any:
    if dimension.choices is not None:
        return trial.suggest_categorical(dotted, dimension.choices)
    low, high = ends(dimension)
    if dimension.integer:
        return trial.suggest_int(dotted, low, high, log=dimension.log)
    return trial.suggest_float(dotted, low, high, log=dimension.log)


def report(study: Study, trial: Trial, step: int, loss: float | None) -> None:
    """Note a held-out loss after ``step`` steps; the one before the first step says nothing of a trial's values."""
    if step > 0 and loss is not None and step not in losses(study, trial):
        trial.report(loss, step)


def should_prune(trial: Trial) -> bool:
    """Whether the trial does so badly that it is to stop."""
    return bool(trial.should_prune())


def tell(study: Study, trial: Trial, outcome: Outcome, why: str = "", keeps_best: bool = False) -> None:
    """End a trial; a complete one counts by the held-out loss of the weights that it saved, without any it failed.

    ``keeps_best``: those are its best, not its last (``kd.search.space.keeps_best``).
    """
    from optuna.trial import TrialState

    found = losses(study, trial)
    if outcome == "complete" and not found:
        outcome, why = "failed", "It has no held-out loss."
    if why:
        trial.set_user_attr("why", why)
    if outcome == "complete":
        study.tell(trial, min(found.values()) if keeps_best else found[max(found)])
    else:
        study.tell(trial, state=TrialState.PRUNED if outcome == "pruned" else TrialState.FAIL)


def losses(study: Study, trial: Trial) -> dict[int, float]:
    """The held-out losses of a trial so far, by step."""
    return study.get_trials(deepcopy=False)[trial.number].intermediate_values
