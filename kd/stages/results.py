"""What a training leaves in its run folder: checkpoints, and the files of its report."""

from __future__ import annotations

from pathlib import Path

from kd.buckets.runs import find_own_run
from kd.config.job import JobConfig
from kd.config.train import TrainConfig
from kd.evaluation.report import COMPARED, Report
from kd.evaluation.teacher_effect import warn_of_verdict
from kd.evaluation.tokens.scoring import FILE as TOKENS_FILE
from kd.files import PROVENANCE, read_json
from kd.progress import Monitor, StageResult
from kd.text.batches import Source
from kd.training import checkpoint
from kd.training.resume.identity import compute_resume_identity

#: The folder of checkpoints in a run folder.
CHECKPOINTS = "checkpoints"
#: The files of a training in its run folder, beside the plots of its report.
ARTIFACTS = ("student", "report.md", "report.json", "metrics.jsonl", "profile.json")


def read_finished(config: JobConfig, source: Source, run_dir: Path) -> Report | None:
    """The report in ``run_dir``, if just this job has trained and measured the student there."""
    made = read_json(run_dir / "student" / PROVENANCE) or {}
    report: Report | None = read_json(run_dir / "report.json")
    if made.get("job") != config.model_dump(mode="json") or report != made["report"]:
        return None
    # Also the text and the cache must be those of then.
    identity = compute_resume_identity(config, source.fingerprint)
    same = checkpoint.read_newest_identity(run_dir / "checkpoints") == identity
    return report if same else None


def tell_results(report: Report, run_dir: Path, monitor: Monitor) -> StageResult:
    """Emit what the student is worth and where its files are; return both."""
    monitor.emit("report", **{name: report.get(name) for name in COMPARED})
    warn_of_verdict(report, monitor)
    names = [*ARTIFACTS, *report["plots"]]
    names += [TOKENS_FILE] if (run_dir / TOKENS_FILE).is_file() else []
    artifacts = {name: str(run_dir / name) for name in names}
    for name, path in artifacts.items():
        monitor.emit("artifact", name=name, path=path)
    return StageResult(artifacts=artifacts, report=report)


def keep_last_checkpoint(run_dir: Path, options: TrainConfig) -> None:
    """Delete the other checkpoints of a run and of its baseline, in its bucket too.

    With early stopping the best one stays besides: whoever goes on takes its weights at the end.
    """
    stopping = options.early_stopping_patience is not None
    for folder in (run_dir / "baseline" / CHECKPOINTS, run_dir / CHECKPOINTS):
        best = checkpoint.read_best_step(folder) if stopping else None
        checkpoint.prune_checkpoints(folder, 1, best)
    if (run := find_own_run(run_dir)) is not None:
        run.prune_checkpoints(1, best)
