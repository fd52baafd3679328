"""The Optuna study of a search: what to try next, what to stop early, and the outcomes.

A study lives in its journal, to which lines are only added. The sampler of a trial is seeded by the
trial's number. So the next trial depends only on the results of the earlier ones, no matter how
often the search was stopped and resumed. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from cache.disk import storage_errors
from cache.json_object import Json
from kd.config.job import JobConfig
from kd.config.jobfile import read_record
from kd.config.placement import PLACEMENT_FIELDS
from kd.config.search import Dimension, SearchConfig
from kd.errors import TrainingError
from kd.search.space import Overrides, get_search, list_ends

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as Trial  # exported for services, which import no Optuna

Outcome = Literal["complete", "pruned", "failed"]
#: Seed of every sampler, beside what it samples.
SEED = 0


class Journal(Protocol):
    """The storage of a study: numbered lines, which are only added and which only Optuna reads."""

    def read_logs(self, log_number_from: int) -> Iterator[Json]:
        """Yield the lines from number ``log_number_from`` on."""

    def append_logs(self, logs: list[Json]) -> None:
        """Add all lines, or none of them."""


def make_study(config: JobConfig, journal: Journal) -> SearchStudy:
    """Open the study of this job in ``journal``, or begin it; a smaller loss is better.

    Raises ``TrainingError`` if the journal belongs to another job. The job may ask for more trials
    than when the study began.
    """
    import optuna

    # Optuna would print a line for each trial, beside the run's own progress.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(cast(Any, journal)),
        study_name="search",
        pruner=optuna.pruners.MedianPruner(),
        direction="minimize",
        load_if_exists=True,
    )
    known = study.user_attrs.get("config")
    if known is None:
        # Earlier versions kept a digest of the fields of then as "job": it tells nothing now.
        study.set_user_attr("config", select_shaping_fields(config))
    elif select_shaping_fields(read_record(known)) != select_shaping_fields(config):
        raise TrainingError(
            "Another job started the search in this folder: its configuration differs.",
            "Give the job another name (or --run-dir), or delete this run folder to start over.",
        )
    return SearchStudy(study, get_search(config))


def select_shaping_fields(config: JobConfig) -> Mapping[str, Any]:
    """Return the fields that are equal in jobs which may continue each other's search.

    Such jobs may differ in name, number of trials and placement.
    """
    placement = dict.fromkeys(PLACEMENT_FIELDS, True)
    return config.model_dump(mode="json", exclude={"name": True, "search": {"trials"}, **placement})


class FileJournal:
    """A journal in a file, one line of JSON per entry. The caller holds the folder's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:  # a crash may have cut the last line short
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

    def read_logs(self, log_number_from: int) -> Iterator[Json]:
        """Yield the lines from number ``log_number_from`` on."""
        with self._path.open("rb") as file:
            yield from map(json.loads, islice(file, log_number_from, None))

    def append_logs(self, logs: list[Json]) -> None:
        """Add lines and flush them to the disk."""
        with storage_errors(self._path.parent), self._path.open("ab") as file:
            file.write("".join(json.dumps(log) + "\n" for log in logs).encode())
            file.flush()
            os.fsync(file.fileno())


def _make_sampler(search: SearchConfig, *what: object) -> BaseSampler:
    """Make a sampler whose draws depend only on ``what`` it samples."""
    from optuna import samplers

    seed = int.from_bytes(hashlib.sha256(repr((SEED, *what)).encode()).digest()[:4], "big")
    if search.sampler == "tpe":
        # Trials run side by side: constant_liar keeps them from trying the same values.
        return samplers.TPESampler(seed=seed, constant_liar=True)
    if search.sampler == "gp":
        return samplers.GPSampler(seed=seed)
    return samplers.RandomSampler(seed=seed)


# ---------------------------------------------------------------------- trials


@dataclass(frozen=True)
class SearchStudy:
    """The study of a search: Optuna's, and the job's section search."""

    study: Study
    search: SearchConfig

    def list_trials(self) -> list[FrozenTrial]:
        """List all trials so far, by number."""
        return self.study.get_trials(deepcopy=False)

    def list_open_trials(self) -> list[Trial]:
        """List the trials without an outcome, oldest first."""
        from optuna.trial import Trial, TrialState

        open_trials = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [Trial(self.study, each._trial_id) for each in open_trials]

    def estimate_seconds_left(self) -> float | None:
        """Estimate the seconds until all trials have ended, at the pace so far.

        None before the first one has ended.
        """
        known = self.list_trials()
        begins = [trial.datetime_start for trial in known if trial.datetime_start is not None]
        ends = [trial.datetime_complete for trial in known if trial.datetime_complete is not None]
        if not ends:
            return None
        pace = (max(ends) - min(begins)).total_seconds() / len(ends)
        return round(pace * max(self.search.trials - len(ends), 0), 1)

    def start_trial(self) -> Trial | None:
        """Start a trial; return None if there are enough of them, or no other values to try."""
        if len(self.list_trials()) >= self.search.trials or self.has_tried_all():
            return None
        return self.study.ask()

    def has_tried_all(self) -> bool:
        """Return whether all values of the space were tried; a range of numbers has no end."""
        space = self.search.space
        params = [each.params for each in self.list_trials()]
        tried = {_key_point(each) for each in params if len(each) == len(space)}
        return len(tried) >= math.prod(map(_count_values, space.values()))

    def find_twin(self, trial: Trial) -> FrozenTrial | None:
        """Find an earlier trial with the same values that is open, complete or was stopped early.

        One that failed is tried again: it may have been cancelled.
        """
        from optuna.trial import TrialState

        *earlier, own = self.list_trials()[: trial.number + 1]
        point = _key_point(own.params)
        same = (each for each in earlier if _key_point(each.params) == point)
        return next((each for each in same if each.state != TrialState.FAIL), None)

    def end_as_twin(self, trial: Trial, twin: FrozenTrial) -> None:
        """End a trial as an earlier one with the same values has ended: it is not trained again."""
        trial.set_user_attr("same_as", twin.number)
        is_complete = twin.state.name == "COMPLETE"
        self.study.tell(trial, twin.value if is_complete else None, state=twin.state)

    def suggest_values(self, trial: Trial) -> Overrides:
        """Suggest the values of a trial; values that it already has stay the same."""
        overrides: Overrides = {}
        for dotted in sorted(self.search.space):
            # A sampler of its own for each field: a resumed trial draws the same values again.
            self.study.sampler = _make_sampler(self.search, trial.number, dotted)
            dimension = self.search.space[dotted]
            if dimension.choices is not None:
                overrides[dotted] = trial.suggest_categorical(dotted, dimension.choices)
            else:
                low, high = list_ends(dimension)
                suggest = trial.suggest_int if dimension.integer else trial.suggest_float
                overrides[dotted] = suggest(dotted, low, high, log=dimension.log)
        return overrides

    @property
    def held_out_tokens(self) -> int | None:
        """The tokens of the held-out text; None if no trial has measured them."""
        found = self.study.user_attrs.get("held_out_tokens")
        return None if found is None else int(found)

    def note_held_out_tokens(self, tokens: int | None) -> None:
        """Record once how many tokens the held-out losses of all trials are means of."""
        if tokens is not None and self.held_out_tokens is None:
            self.study.set_user_attr("held_out_tokens", tokens)

    def report_loss(self, trial: Trial, step: int, loss: float | None) -> None:
        """Record a held-out loss after ``step`` steps.

        The loss before the first step is ignored, because the trial's values had no effect on it
        yet.
        """
        # A resumed trial evaluates some steps again, and Optuna warns about a second value.
        if step > 0 and loss is not None and step not in self.list_losses(trial):
            trial.report(loss, step)

    def end_trial(
        self, trial: Trial, outcome: Outcome, why: str = "", keeps_best: bool = False
    ) -> None:
        """End a trial. A complete trial counts by the held-out loss of the weights that it saved.

        A complete trial without any held-out loss has failed. ``keeps_best``: it saved its best
        weights and not its last ones (``kd.search.space.keeps_best``).
        """
        from optuna.trial import TrialState

        found = self.list_losses(trial)
        if outcome == "complete" and not found:
            outcome = "failed"
            why = "It has no held-out loss."
        if why:
            trial.set_user_attr("why", why)
        if outcome == "complete":
            self.study.tell(trial, min(found.values()) if keeps_best else found[max(found)])
        else:
            state = TrialState.PRUNED if outcome == "pruned" else TrialState.FAIL
            self.study.tell(trial, state=state)

    def list_losses(self, trial: Trial) -> dict[int, float]:
        """Return the held-out losses of a trial so far, by step."""
        return self.list_trials()[trial.number].intermediate_values


def _count_values(dimension: Dimension) -> float:
    if dimension.choices is not None:
        return len({*map(repr, dimension.choices)})
    low, high = list_ends(dimension)
    return high - low + 1 if dimension.integer else math.inf


def _key_point(values: Overrides) -> str:
    return repr(sorted(values.items()))


def should_prune(trial: Trial) -> bool:
    """Return whether the trial is so bad that it should stop."""
    return bool(trial.should_prune())
