"""Run an ablation: its runs one after the other, each in a process of its own: ``kd ablate``.

    captures/{digest}/     the caches that the runs need: cache.json; the caches are in home/caches
    runs/{label}-{digest}/ a run folder: config.json, metrics.jsonl, student/, report.json, log.txt,
                           and outcome.json once it has ended
    report.json            every run: figures and curves
    index.html             the same as a page

Runs that need the same records share a cache. A finished run is not trained again, one that was
killed goes on from its checkpoint, and one that failed is tried again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from cache.disk import remove_path
from cache.errors import PotstillError
from kd.config.job import JobConfig
from kd.config.kinds import CAPTURE, TRAIN
from kd.errors import Interrupted, format_first_line
from kd.experiments.ablation_page import AblationReport, RunReport, render_ablation
from kd.experiments.child import StageOrder, run_in_child
from kd.experiments.plan import AblationJob, AblationPlan
from kd.files import read_json, write_json, write_text
from kd.progress import Monitor
from kd.stages.source import select_cache_inputs
from kd.tracking.metrics import read_metrics

REPORT, PAGE, OUTCOME = "report.json", "index.html", "outcome.json"
#: Points of a curve in the report; longer ones are thinned.
_POINTS = 200
#: Events of a run that the listener of the ablation gets.
_SHOWN_EVENTS = {"progress", "metrics", "evaluation", "warning", "cache", "stage"}


def ablate(plan: AblationPlan, home: Path, folder: Path, monitor: Monitor) -> AblationReport:
    """Run all that ``plan`` has and ``folder`` does not have yet; returns the report.

    A run that fails is reported with its error, and the others go on. Raises ``Interrupted`` when
    it is asked to stop; the report has what ended before.
    """
    ablation = _Ablation(plan, home, folder, monitor)
    ablation.write_report()
    for number, job in enumerate(plan.jobs.values(), start=1):
        if read_json(ablation.locate(job) / OUTCOME) != ablation.success:
            monitor.check(f"before run {number} of {len(plan.jobs)}")
            monitor.emit("stage", phase=f"run {number} of {len(plan.jobs)}: {job.label}")
            ablation.run(job)
        ablation.write_report()
    for name in (PAGE, REPORT):
        monitor.emit("artifact", name=name, path=str(folder / name))
    return ablation.make_report()


@dataclass(frozen=True)
class _Ablation:
    plan: AblationPlan
    home: Path
    folder: Path
    monitor: Monitor

    def locate(self, job: AblationJob) -> Path:
        """The run folder of ``job``; an earlier one may have another label in its name."""
        runs = self.folder / "runs"
        return next(iter(sorted(runs.glob(f"*-{job.digest}"))), runs / job.folder)

    @property
    def success(self) -> dict[str, str]:
        """The outcome of a run that has ended well, and was measured as this ablation measures."""
        return {"state": "finished", "compared_with": self.plan.base_digest}

    def run(self, job: AblationJob) -> None:
        """Train and measure the student of ``job``, and write how it ended."""
        run_dir = self.locate(job)
        run_dir.mkdir(parents=True, exist_ok=True)
        outcome = self.success
        try:
            records = self._capture(self.plan.base)
            own = self._capture(job.config)
            if (own / "cache.json").is_file():
                shutil.copyfile(own / "cache.json", run_dir / "cache.json")
            order = StageOrder(TRAIN.name, job.config, self.home, run_dir, self.plan.base, records)
            run_in_child(order, self.monitor.pass_on(_SHOWN_EVENTS))
        except Interrupted:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, PotstillError) else format_first_line(error)
            outcome = {"state": "failed", "error": why}
            self.monitor.emit("warning", message=f"{job.label} failed: {why}")
        write_json(run_dir / OUTCOME, outcome)
        if outcome["state"] == "finished":
            remove_path(run_dir / "checkpoints")

    def _capture(self, config: JobConfig) -> Path:
        """Capture the cache of ``config`` unless that is done; returns the folder that knows it."""
        inputs = json.dumps(select_cache_inputs(config), sort_keys=True)
        digest = hashlib.sha256(inputs.encode()).hexdigest()[:8]
        folder = self.folder / "captures" / digest
        if config.captures and not (folder / "cache.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            order = StageOrder(CAPTURE.name, config, self.home, folder)
            run_in_child(order, self.monitor.pass_on(_SHOWN_EVENTS))
        return folder

    # ------------------------------------------------------------------ report

    def write_report(self) -> None:
        """Write report.json and index.html with all that has ended so far."""
        report = self.make_report()
        write_json(self.folder / REPORT, report.to_json())
        write_text(self.folder / PAGE, render_ablation(report))

    def make_report(self) -> AblationReport:
        """Return the axes, and the figures and curves of every run."""
        jobs = self.plan.jobs.items()
        return AblationReport(self.plan, {digest: self.describe(job) for digest, job in jobs})

    def describe(self, job: AblationJob) -> RunReport:
        """Return the state of a run, its curves so far, and its figures if it has finished."""
        folder = self.locate(job)
        outcome = read_json(folder / OUTCOME) or {"state": "waiting"}
        return RunReport(
            label=job.label,
            folder=str(folder.relative_to(self.folder)),
            state=outcome["state"],
            error=outcome.get("error", ""),
            own_records=select_cache_inputs(job.config) != select_cache_inputs(self.plan.base),
            temperature=job.config.model_dump(mode="json")["loss"]["temperature"],
            curves=read_curves(folder / "metrics.jsonl"),
            figures=read_figures(folder) if outcome["state"] == "finished" else {},
        )


def read_figures(folder: Path) -> dict[str, float | None]:
    """Return the figures of a finished run: quality, time, speed and memory."""
    report = read_json(folder / REPORT) or {}
    measured = read_json(folder / "measured.json") or {}
    profile = report.get("profile") or {}
    names = ("loss", "perplexity", "kl", "agreement", "tokens")
    return {f"held_out_{name}": measured.get(f"validation_{name}") for name in names} | {
        "steps": report.get("steps"),
        "tokens": report.get("tokens"),
        "train_seconds": report.get("train_seconds"),
        "tokens_per_second": report.get("train_tokens_per_second"),
        "peak_memory_bytes": profile.get("peak_memory_bytes"),
        "bytes_per_token": report.get("bytes_per_token"),
    }


def read_curves(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the curves in metrics.jsonl as pairs of (tokens trained, value)."""
    lines = read_metrics(path)
    counted = [(line["step"], line["tokens"]) for line in lines if line.get("tokens")]
    # A step has about the same tokens in the whole run: evaluations name the step alone.
    each = counted[-1][1] / counted[-1][0] if counted and counted[-1][0] else 0.0
    names = {"loss": "loss", "perplexity": "validation_perplexity", "kl": "validation_kl"}
    told = [line for line in lines if line["type"] in ("metrics", "evaluation")]
    curves = {}
    for name, key in names.items():
        points = [(line["step"] * each, line[key]) for line in told if line.get(key) is not None]
        stride = -(-len(points) // _POINTS) or 1
        curves[name] = [*points[:-1:stride], *points[-1:]]
    return curves
