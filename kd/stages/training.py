"""The stage that trains a student on a cache or on plain text, saves it and reports."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from cache.disk import TEMPORARY_PREFIX, storage_errors
from kd.buckets.inputs import begin_downloads
from kd.config.job import JobConfig
from kd.config.kinds import TRAIN
from kd.evaluation.baseline import build_first_student, build_starting_student
from kd.evaluation.in_depth import EvaluationContext
from kd.evaluation.model_card import write_provenance
from kd.evaluation.report import make_report, write_report
from kd.evaluation.teacher_comparison import compare_with_records
from kd.files import whole_folder
from kd.memory.auto_batch import release_memory, saving_errors
from kd.models.layers import stopping_forward
from kd.models.precision import Precision, pick_device
from kd.models.saving import choose_save_dtype, load_saved_student, save_student
from kd.models.vocabulary import choose_run_vocabulary
from kd.parallel.devices import count_ranks
from kd.parallel.group import ALONE, Group, leave_group
from kd.parallel.launch import RankOrder, join_ranks, run_in_ranks
from kd.parallel.strategies import collect_weights
from kd.progress import Monitor, StageResult
from kd.stages.results import keep_last_checkpoint, read_finished, tell_results
from kd.stages.source import adopt_cache_layout, open_source
from kd.training.loop import train
from kd.training.resume.from_bucket import fetch_run
from kd.training.samples import EvaluationSamples
from kd.training.saved.tensor_file import write_tensors
from kd.training.saved.uploads import CheckpointUploads


def run_train(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> StageResult:
    """Train the student on as many devices as the job asks for, each with a process of its own."""
    # Devices may be for the teacher alone.
    ranks = 1
    if config.require_train().strategy != "single":
        ranks = count_ranks(config, monitor.host.count if monitor.host else 1)
    if ranks == 1:
        return run_training(config, home, run_dir, monitor)
    order = RankOrder(TRAIN.name, config.model_dump(mode="json"), str(home), str(run_dir))
    return StageResult(**run_in_ranks(order, ranks, monitor))


def join_training(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> None:
    """Run the ranks of this host for a training that another host leads."""
    host = monitor.host
    assert host is not None, "the host has a place among others"
    begin_downloads(home)
    if not host.run_dir:
        fetch_run(config, run_dir, TRAIN.name, monitor, apart=True)
    order = RankOrder(TRAIN.name, config.model_dump(mode="json"), str(home), str(run_dir))
    join_ranks(order, count_ranks(config, host.count), monitor, host)


def keep_weights(weights: dict[str, Tensor], run_dir: Path) -> Path:
    """Write the weights that rank 0 has collected to a file, and let go of them.

    The student as it was at first is measured next: both at once may not fit in memory.
    """
    path = run_dir / f"{TEMPORARY_PREFIX}trained.safetensors"
    if weights:
        with saving_errors("the student"), storage_errors(run_dir):
            write_tensors(path, weights)
    return path


@torch.no_grad()
def take_weights(student: nn.Module, path: Path) -> None:
    """Set the parameters of ``student`` from a file of ``keep_weights``, one by one; remove it."""
    with safe_open(path, framework="pt") as file:
        for name, parameter in student.named_parameters():
            parameter.copy_(file.get_tensor(name))
    path.unlink()


def run_training(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, group: Group = ALONE
) -> StageResult:
    """Train the student from the sealed cache (or on plain text), save it and report.

    The ranks of ``group`` train together; then rank 0 alone saves and reports, and the others
    return nothing.
    """
    tokenizer, source = open_source(config, home, run_dir, monitor)
    config = adopt_cache_layout(source, config)
    # Rank 0 decides for all: the disk of another host may lag behind.
    report = group.share(read_finished(config, source, run_dir) if group.leads else None)
    if report is not None:
        leave_group(group)
        phase = "this run has finished before, and nothing is measured again"
        monitor.emit("stage", stage="train", phase=phase)
        return tell_results(report, run_dir, monitor) if group.leads else StageResult()
    monitor.check("before the student was loaded")
    student = build_first_student(config, tokenizer, group)
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    monitor.emit("stage", stage="train", phase="training")
    with CheckpointUploads(run_dir, monitor, group.leads) as uploads:
        progress = train(
            config, source, student, vocabulary, run_dir, monitor, group, uploads,
            EvaluationSamples.of(config.evaluation, source, tokenizer),
        )  # fmt: skip
        trained = None if group.alone else keep_weights(collect_weights(student, group), run_dir)
        # Before the block waits for the last upload: other ranks would wait for this one.
        leave_group(group)
    if not group.leads:
        return StageResult()
    if trained is not None:
        student = build_starting_student(config, tokenizer)
        # In float32, as the finished student is.
        progress.first_evaluation = compare_with_records(
            student, config, source, vocabulary, monitor
        )
        take_weights(student, trained)

    monitor.check("after the last step; the training is saved")
    monitor.emit("stage", stage="train", phase="saving")
    options = config.require_train()
    save_dtype = choose_save_dtype(options, Precision.choose(options.precision, pick_device()))
    # The folder gets its name last: a student at that place is whole, with its model card.
    with whole_folder(run_dir / "student") as folder:
        with saving_errors("the student"):
            save_student(student, tokenizer, folder, config.student, save_dtype)
        # The report is of the weights as they were saved, which may have another dtype. Two
        # students at the same time need not fit in memory.
        del student
        release_memory()
        saved = load_saved_student(folder)
        context = EvaluationContext(run_dir, tokenizer, monitor, student_folder=folder)
        with stopping_forward(monitor, "while the student was measured; its training is saved"):
            report = make_report(config, source, saved, progress, vocabulary, context)
        write_provenance(folder, config, report)
    write_report(run_dir, report)
    if options.save_total_limit is None:
        keep_last_checkpoint(run_dir, options)
    return tell_results(report, run_dir, monitor)
