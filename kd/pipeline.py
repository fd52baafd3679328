"""The whole run, one stage after the other:

    text -> tokens -> teacher logits -> cache records -> batches -> loss -> student -> report

    step       takes                    gives                     lives in
    tokenise   text                     tokens (S, L)             kd/text/corpus.py
    capture    tokens, teacher          teacher logits            kd/capture/teacher.py
    record     teacher logits           records, sealed cache     kd/capture/recording.py, cache/
    batch      sealed cache             batches                   kd/text/steps/
    loss       batches, hidden states   loss, gradient            kd/loss/fused.py
    train      batches, loss            student                   kd/training/loop.py
    report     student, held-out text   report.json, report.md    kd/evaluation/report.py

kd/stages/joining.py makes the sealed caches, and kd/stages/training.py all that follows it. Three
more tasks have no place in that line: a search trains many students (kd/search/trials.py), and
kd/stages/cache_checks.py compares a sealed cache with its digests, or with its teacher. The table
in kd/config/kinds.py says which kind of job has which stages, and ``TASKS`` what runs them.

The pipeline knows nothing of HTTP, Redis or Celery. Each stage is idempotent: called again with the
same folders it uses the sealed cache and goes on from the newest checkpoint, so that a job that
runs twice finishes once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cache.disk import list_file_sizes, naming_removed_folders
from cache.remote.probe import require_store
from kd import files
from kd.buckets.inputs import begin_downloads
from kd.buckets.runs import find_own_run
from kd.capture.plan import set_packing, settle_packing
from kd.config.job import JobConfig
from kd.config.jobfile import keep_meaning
from kd.kernels.available import describe_kernel_failure
from kd.models.loading import hide_progress_bars
from kd.models.precision import Precision, pick_device
from kd.preflight.devices import ask_torch, require_known_architecture
from kd.preflight.problems import Folders, Machine, require_no_problems
from kd.preflight.stored_models import note_models
from kd.progress import SILENT, Monitor, StageResult
from kd.search.trials import search_students
from kd.stages.cache_checks import run_fidelity, run_verify
from kd.stages.joining import run_captures
from kd.stages.results import CHECKPOINTS
from kd.stages.source import are_cache_inputs, read_cache_inputs
from kd.stages.training import run_train
from kd.tracking.loading_events import reported_loading
from kd.training.resume.from_bucket import fetch_run, keeping_checkpoint
from kd.training.resume.identity import require_same_job

#: The log of a run, which is no result.
LOG = "log.txt"


#: What runs each stage of the table of kinds, by the name of its task.
TASKS: dict[str, Callable[[JobConfig, Path, Path, Monitor], StageResult]] = {
    "capture": run_captures,
    "train": run_train,
    "search": partial(search_students, train_student=run_train),
    "verify": run_verify,
    "fidelity": run_fidelity,
}


def run_stages(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor = SILENT
) -> StageResult:
    """Run all stages of the job, one after the other; returns what they made."""
    result = StageResult()
    for stage, turn in config.own_kind.list_turns():
        monitor.check(f"before stage {stage.name}")
        made = run_stage(stage.name, config, home, run_dir, monitor, turn)
        result = replace(result, **made.to_json())
    return result


def run_stage(
    stage: str,
    config: JobConfig,
    home: Path,
    run_dir: Path,
    monitor: Monitor = SILENT,
    turn: int = 0,
) -> StageResult:
    """Run the stage of the job that has this name and turn (``kd.config.kinds``).

    ``home`` holds the texts and caches of all jobs, ``run_dir`` the files of this job. Raises
    ``ConfigError`` for a job that cannot run, ``DeviceUnusable`` for a GPU that torch's build does
    not know, and ``TrainingError`` where ``run_dir`` is another job's.
    """
    require_known_architecture(ask_torch())
    begin_downloads(home, partial(report_download, stage, monitor))
    require_no_problems(config, Folders(Path(), home), Machine(device=pick_device()))
    files.require_known_run(run_dir)
    apart = monitor.host is not None and not monitor.host.run_dir
    fetch_run(config, run_dir, stage, monitor, apart)
    config = settle_run(config, run_dir, monitor)
    require_same_job(config, run_dir)
    if config.needs_cache:
        require_store(files.find_caches(home, config.cache.store), config.captures)
    hide_progress_bars()
    files.write_json(run_dir / files.MARK, {"format": files.RUN_FORMAT})
    files.write_json(run_dir / "config.json", config.model_dump(mode="json"))
    run = TASKS[config.own_kind.find_stage(stage, turn).task]
    if config.checks_cache:
        result = run(config, home, run_dir, monitor)
    else:
        monitor.emit("stage", stage=stage, phase="loading data")
        warn_of_kernels(config, pick_device(), monitor)
        with (
            naming_removed_folders(run_dir),
            reported_loading(monitor),
            keeping_checkpoint(config, run_dir, stage, monitor),
        ):
            note_models(config, stage, monitor)
            result = run(config, home, run_dir, monitor)
    publish_results(run_dir, stage, monitor)
    return result


def settle_run(config: JobConfig, run_dir: Path, monitor: Monitor) -> JobConfig:
    """Return the job as its run has begun it.

    ``data.packing`` auto becomes what the capture chose, so that a later stage needs no teacher. A
    field keeps the meaning that it had in the version which began the run.
    """
    with suppress(ValueError):  # a damaged record means nothing; ``require_same_job`` follows
        config = keep_meaning(config, files.read_json(run_dir / "config.json"))
    inputs = read_cache_inputs(files.read_json(run_dir / "cache.json"))
    packing = inputs["data"]["packing"] if inputs else None
    if config.data.packing == "auto" and isinstance(packing, bool):
        settled = set_packing(config, packing)
        if are_cache_inputs(inputs, settled):
            return settled
    return settle_packing(config, monitor)


def publish_results(run_dir: Path, stage: str, monitor: Monitor) -> None:
    """Put the results of the run into its bucket too, if it has one: all but its checkpoints."""
    if (run := find_own_run(run_dir)) is None:
        return
    tops = {name: name.partition("/")[0] for name in list_file_sizes(run_dir)}
    left_out = (CHECKPOINTS, LOG, files.HELPERS)
    names = [name for name, top in tops.items() if top[0] != "." and top not in left_out]
    run.publish_files(run_dir, names, lambda line: monitor.emit("stage", stage=stage, phase=line))


def report_download(stage: str, monitor: Monitor, line: str) -> None:
    """Report that text or a model comes from a bucket or a hub; raise ``Interrupted`` to stop."""
    monitor.emit("stage", stage=stage, phase=line)
    monitor.check("while it downloaded; the files that came whole stay")


def warn_of_kernels(config: JobConfig, device: torch.device, monitor: Monitor) -> None:
    """Warn, once in a run, of GPU kernels that fail on ``device`` in a precision of the job.

    A CPU has no use for them.
    """
    if device.type != "cuda":
        return
    # The tensors of the run name the GPU's number, and the answer is kept under that name.
    numbered = torch.device(device.type, torch.cuda.current_device())
    own = config.train.precision if config.train is not None else "auto"
    dtypes = [Precision.choose(name, device).dtype for name in ("fp32", "auto", own)]
    failures = (describe_kernel_failure(numbered, dtype) for dtype in dtypes)
    if message := next(filter(None, failures), ""):
        monitor.warn_once(f"{message} `kd doctor` tries each kernel.")
