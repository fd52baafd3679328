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

``run_precompute`` makes the sealed cache, ``run_train`` all that follows it. Three more have no
place in that line: ``run_search`` trains many students (kd/search/trials.py), ``run_verify``
compares a sealed cache with its digests, and ``run_fidelity`` with its teacher
(kd/capture/fidelity/recheck.py).

The pipeline knows nothing of HTTP, Redis or Celery. Each stage is idempotent: called again with the
same folders it uses the sealed cache and goes on from the newest checkpoint, so that a job that
runs twice finishes once.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from cache.checking.verify import find_extras, verify_cache
from cache.disk import list_file_sizes, naming_removed_folders
from cache.errors import CacheCorrupt
from cache.reading.usage import hold_for
from cache.remote.probe import require_store
from cache.store import Cache, has_manifest, open_cache
from kd.buckets.inputs import begin_downloads
from kd.buckets.runs import find_own_run
from kd.capture.fidelity.live import TeacherLocation
from kd.capture.fidelity.recheck import recheck_fidelity
from kd.capture.plan import (
    CapturePlan,
    plan_capture,
    resolve_teacher_folder,
    set_packing,
    settle_packing,
)
from kd.capture.teacher import capture_cache, help_capture, warn_of_overruled
from kd.config.job import JobConfig
from kd.config.jobfile import keep_meaning, read_record
from kd.config.teacher import SHARED, TeacherConfig
from kd.config.train import TrainConfig
from kd.errors import ConfigError, FidelityError
from kd.evaluation.baseline import build_first_student, build_starting_student
from kd.evaluation.comparison import compare_with_records
from kd.evaluation.measure import EvaluationContext
from kd.evaluation.model_card import PROVENANCE, write_provenance
from kd.evaluation.report import COMPARED, make_report, write_report
from kd.evaluation.teacher_effect import warn_of_verdict
from kd.evaluation.tokens.scoring import FILE as TOKENS_FILE
from kd.files import (
    HELPERS,
    MARK,
    RUN_FORMAT,
    find_caches,
    read_json,
    require_known_run,
    whole_folder,
    write_json,
)
from kd.kernels.available import describe_kernel_failure
from kd.memory.auto_batch import release_memory, saving_errors
from kd.memory.host import choose_chunk_memory
from kd.memory.one_sequence import require_capture_memory
from kd.models.attention.causality import precheck_causality
from kd.models.attention.isolation import make_small, precheck_isolation
from kd.models.folder import ModelFolder, require_allowed_remote_code, resolve_model
from kd.models.layers import stopping_forward
from kd.models.lm_head import precheck_lm_head, require_rows
from kd.models.loading import (
    hide_progress_bars,
    outline_student,
    require_shareable_teacher,
    require_trainable_student,
)
from kd.models.precision import Precision, pick_device
from kd.models.saving import choose_save_dtype, load_saved_student, save_student
from kd.models.spread.following import follow
from kd.models.spread.leading import leading
from kd.models.tokenizers import (
    KnownTokenizer,
    hash_tokenizer,
    load_tokenizer,
    require_same_tokenizer,
    take_chat_template,
)
from kd.models.tokenizing.rules import sample_texts
from kd.models.vocabulary import choose_run_vocabulary, choose_student_vocabulary
from kd.parallel.devices import count_ranks
from kd.parallel.group import ALONE, Group, leave_group
from kd.parallel.launch import RankOrder, run_in_ranks
from kd.parallel.strategies import collect_weights, put_weights
from kd.preflight.devices import ask_torch, require_known_architecture
from kd.preflight.problems import Folders, Machine, require_no_problems
from kd.preflight.stored_models import note_models
from kd.progress import NOTICES, SILENT, Monitor, Notice, keep_notices
from kd.search.trials import search_students
from kd.text.batches import CachedRecords, PlainText, Source
from kd.text.corpus import TEXTS, open_corpus
from kd.tracking.loading import reported_loading
from kd.training import checkpoint
from kd.training.loop import train
from kd.training.prepare import require_served, require_stages
from kd.training.resume.elsewhere import fetch_run, keeping_checkpoint
from kd.training.resume.identity import compute_resume_identity, require_same_job
from kd.training.samples import EvaluationSamples
from kd.training.uploads import CheckpointUploads

#: What a run folder holds besides the results of the run.
CHECKPOINTS = "checkpoints"
LOG = "log.txt"
#: The last characters before a user's words, by which a cache of chats is recognised.
_TURN_CHARACTERS = 12
#: The files of a training in its run folder, beside the plots of its report.
ARTIFACTS = ("student", "report.md", "report.json", "metrics.jsonl", "profile.json")


def run_stages(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor = SILENT
) -> dict[str, Any]:
    """Run all stages of the job, one after the other; returns their results."""
    result: dict[str, Any] = {}
    for stage in config.stages:
        monitor.check(f"before stage {stage}")
        result |= run_stage(stage, config, home, run_dir, monitor)
    return result


def run_stage(
    stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor = SILENT
) -> dict[str, Any]:
    """Run one stage of the job.

    ``home`` holds the texts and caches of all jobs, ``run_dir`` the files of this job. Raises
    ``ConfigError`` for a job that cannot run, ``DeviceUnusable`` for a GPU that torch's build does
    not know, and ``TrainingError`` where ``run_dir`` is another job's.
    """
    require_known_architecture(ask_torch())
    begin_downloads(home, partial(report_download, stage, monitor))
    require_no_problems(config, Folders(Path(), home), Machine(device=pick_device()))
    require_known_run(run_dir)
    fetch_run(config, run_dir, stage, monitor)
    config = settle_run(config, run_dir, monitor)
    require_same_job(config, run_dir)
    if config.needs_cache:
        require_store(find_caches(home, config.cache.store), "precompute" in config.stages)
    hide_progress_bars()
    write_json(run_dir / MARK, {"format": RUN_FORMAT})
    write_json(run_dir / "config.json", config.model_dump(mode="json"))
    if config.checks_cache:
        check = {"verify": run_verify, "fidelity": run_fidelity}[config.kind]
        result = check(config, home, run_dir, monitor)
    else:
        monitor.emit("stage", stage=stage, phase="loading data")
        warn_of_kernels(pick_device(), monitor)
        run = {"precompute": run_precompute, "train": run_train, "search": run_search}[stage]
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
    """Return the job with what its run has settled.

    These are what data.packing auto means, so that a later stage needs no teacher, and what an
    earlier version meant, which began the run.
    """
    with suppress(ValueError):  # a damaged record means nothing; ``require_same_job`` follows
        config = keep_meaning(config, read_json(run_dir / "config.json"))
    inputs = read_cache_inputs(read_json(run_dir / "cache.json"))
    packing = inputs["data"]["packing"] if inputs else None
    if config.data.packing == "auto" and isinstance(packing, bool):
        settled = set_packing(config, packing)
        if select_cache_inputs(settled) == inputs:
            return settled
    return settle_packing(config, monitor)


def publish_results(run_dir: Path, stage: str, monitor: Monitor) -> None:
    """Put the results of the run into its bucket too, if it has one: all but its checkpoints."""
    run = find_own_run(run_dir)
    if run is None:
        return
    names = [name for name in list_file_sizes(run_dir) if is_result(name)]
    report = partial(monitor.emit, "stage", stage=stage)
    run.publish_files(run_dir, names, lambda line: report(phase=line))


def is_result(name: str) -> bool:
    """Whether a file of a run folder is one of its results."""
    first = name.partition("/")[0]
    return not first.startswith(".") and first not in (CHECKPOINTS, LOG, HELPERS)


def report_download(stage: str, monitor: Monitor, line: str) -> None:
    """Report that text or a model comes from a bucket or a hub; raise ``Interrupted`` to stop."""
    monitor.emit("stage", stage=stage, phase=line)
    monitor.check("while it downloaded; the files that came whole stay")


def warn_of_kernels(device: torch.device, monitor: Monitor) -> None:
    """Warn, once in a run, of GPU kernels that fail on ``device``. A CPU has no use for them."""
    if device.type != "cuda":
        return
    # The tensors of the run name the GPU's number, and the answer is kept under that name.
    numbered = torch.device(device.type, torch.cuda.current_device())
    if message := describe_kernel_failure(numbered, torch.float32):
        monitor.warn_once(f"{message} `kd doctor` tries each kernel.")


def run_precompute(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor
) -> dict[str, Any]:
    """Make sure that a sealed cache for this job exists: capture it if it does not.

    A teacher that several processes share runs in as many as the job has devices.
    """
    teacher = config.teacher
    if teacher is None or teacher.parallel not in SHARED:
        return run_capture(config, home, run_dir, monitor)
    ranks = count_ranks(config)
    require_shareable_teacher(teacher, ranks)
    order = RankOrder("precompute", config.model_dump(mode="json"), str(home), str(run_dir))
    return run_in_ranks(order, ranks, monitor)


def share_capture(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, group: Group
) -> dict[str, Any]:
    """Capture with a teacher that all ranks of ``group`` share.

    Rank 0 alone plans, records, seals and reports. The others run the teacher with it, and return
    nothing.
    """
    result: dict[str, Any] = {}
    if group.leads:
        with leading():
            result = run_capture(config, home, run_dir, monitor)
    else:
        follow()
    leave_group(group)
    return result


def run_capture(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Make sure that a sealed cache for this job exists, as ``run_precompute`` does.

    Where several workers capture it, one of them does this, and the others help with the shards.
    """
    planned = plan_capture(config, monitor, home / TEXTS)
    monitor.check("after the text was read; no shard was started")
    if monitor.ranges is not None and monitor.ranges.terms is not None:
        caches = find_caches(home, config.cache.store)
        help_capture(planned, caches, monitor.ranges.terms, monitor)
        return {}
    require_possible_student(config, planned, monitor)
    caches = find_caches(home, config.cache.store)
    if not has_manifest(caches / planned.identity.fingerprint):
        require_capture_memory(planned, pick_device())
    # Before the capture, so that a listener knows the cache while it is still being written.
    monitor.emit("plan", fingerprint=planned.identity.fingerprint)
    trained = f"{len(planned.corpus.train)} sequences to train on"
    held_out = planned.describe_held_out()
    monitor.emit("stage", stage="precompute", phase=f"text: {trained}; held out: {held_out}")
    summary = capture_cache(planned, caches, monitor)
    write_json(run_dir / "cache.json", {**summary, "inputs": select_cache_inputs(config)})
    keep_notices(run_dir / NOTICES, monitor)
    monitor.emit("cache", **summary)
    return {"cache": summary}


def require_possible_student(config: JobConfig, planned: CapturePlan, monitor: Monitor) -> None:
    """Raise now the errors that training would raise for the job's student, and warn as it would.

    Its tokenizer and its shape are enough to find them. The capture before training may take days.
    """
    if config.student is None or config.stages == ("precompute",):
        return
    own = load_student_tokenizer(config)
    vocabulary = planned.identity.tokenizer.vocabulary_size
    known = KnownTokenizer.of(planned.tokenizer, vocabulary, "the teacher's")
    require_same_tokenizer(own, known, texts=sample_texts(config.data), note=monitor.note)
    student = require_trainable_student(
        config.student, own, config.data.sequence_length, config.teacher
    )
    require_rows(student, vocabulary)
    train = config.train
    stages = config.resources.gpus or 1
    if train is not None and train.strategy == "pipeline" and stages > 1:
        require_stages(config.loss, student, stages)
    # A fresh student is a Llama, and one cut out of the teacher computes as the teacher does.
    if config.student.model is not None:
        # Made once for all checks: that takes seconds for a wide model.
        small = make_small(outline_student(config.student))
        if small is not None:
            precheck_lm_head(small)
            precheck_causality(small, config.data.sequence_length)
            if config.data.packing:
                precheck_isolation(small, config.data.sequence_length, monitor)


def run_verify(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Compare all digests of a sealed cache; ``CacheCorrupt`` names what is damaged."""
    folder = find_caches(home, config.cache.store) / str(config.cache.fingerprint)
    monitor.emit("stage", stage="precompute", phase="verifying")
    # Before the check, so that a listener knows the cache even if the check fails.
    monitor.emit("plan", fingerprint=folder.name)
    damage = verify_cache(folder, lambda: monitor.check("while the cache was read"))
    extras = [] if damage else find_extras(folder)
    if extras:
        what = "files in the folder of the cache that are not part of it, ignored"
        monitor.note(Notice(what, len(extras), extras[0]))
    result = {"fingerprint": config.cache.fingerprint, "problems": damage, "extras": extras}
    write_json(run_dir / "verify.json", result)
    monitor.emit("artifact", name="verify.json", path=str(run_dir / "verify.json"))
    if damage:
        raise CacheCorrupt(
            f"{folder} is damaged: {'; '.join(damage[:10])}.",
            "Delete it and capture it again, or restore a backup.",
        )
    found = {"fingerprint": folder.name, "verified": True}
    monitor.emit("cache", **found)
    return {"cache": found}


def run_fidelity(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Compare some records of a sealed cache with its teacher; ``FidelityError`` where they differ.

    What was measured is written beside the job, and into the cache if it is in bounds.
    """
    assert config.teacher is not None, "JobConfig refuses kind fidelity without a teacher"
    folder = find_caches(home, config.cache.store) / str(config.cache.fingerprint)
    monitor.emit("plan", fingerprint=folder.name)
    store = open_cache(folder)
    hold_for(store, folder)
    with reported_loading(monitor):
        origin = TeacherLocation.of_config(store, config.teacher)
        origin.require_genuine(store)
        monitor.emit("stage", stage="precompute", phase="comparing with the teacher")
        stop = "while the cache was compared with its teacher"
        with stopping_forward(monitor, stop):
            found = recheck_fidelity(store, origin, waiting=lambda: monitor.check(stop))
    write_json(run_dir / "fidelity.json", {"fingerprint": folder.name, **found.to_json()})
    monitor.emit("artifact", name="fidelity.json", path=str(run_dir / "fidelity.json"))
    if found.problems:
        raise FidelityError(
            f"{folder}: the records differ from the teacher: {'; '.join(found.problems)}.",
            "Check that the teacher runs in the same precision and with the same versions.",
        )
    result = {"fingerprint": folder.name, "faithful": True, "noise": found.noise}
    monitor.emit("cache", **result)
    return {"cache": result}


def run_search(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Train many students from the sealed cache, to find the best settings."""
    return search_students(config, home, run_dir, monitor, run_train)


def run_train(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Train the student on as many devices as the job asks for, each with a process of its own."""
    # Devices may be for the teacher alone.
    ranks = 1 if config.require_train().strategy == "single" else count_ranks(config)
    if ranks == 1:
        return run_training(config, home, run_dir, monitor)
    order = RankOrder("train", config.model_dump(mode="json"), str(home), str(run_dir))
    return run_in_ranks(order, ranks, monitor)


def run_training(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor, group: Group = ALONE
) -> dict[str, Any]:
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
        return tell_results(report, run_dir, monitor) if group.leads else {}
    monitor.check("before the student was loaded")
    student = build_first_student(config, tokenizer, group)
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    monitor.emit("stage", stage="train", phase="training")
    with CheckpointUploads(run_dir, monitor, group.leads) as uploads:
        progress = train(
            config, source, student, vocabulary, run_dir, monitor, group, uploads,
            EvaluationSamples.of(config.evaluation, source, tokenizer),
        )  # fmt: skip
        weights = collect_weights(student, group) if not group.alone else {}
        # Before the block waits for the last upload: other ranks would wait for this one.
        leave_group(group)
    if not group.leads:
        return {}
    if weights:
        student = build_starting_student(config, tokenizer)
        # In float32, as the finished student is.
        progress.first_evaluation = compare_with_records(student, config, source, vocabulary)
        put_weights(student, weights)

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


def keep_last_checkpoint(run_dir: Path, options: TrainConfig) -> None:
    """Delete the other checkpoints of a run and of its baseline, in its bucket too.

    With early stopping the best one stays besides: whoever goes on takes its weights at the end.
    """
    stopping = options.early_stopping_patience is not None
    for folder in (run_dir / "baseline" / CHECKPOINTS, run_dir / CHECKPOINTS):
        newest = checkpoint.read_newest_state(folder) if stopping else None
        best = None if newest is None else newest["progress"].get("best_step")
        checkpoint.prune_checkpoints(folder, 1, best)
    if (run := find_own_run(run_dir)) is not None:
        run.prune_checkpoints(1, best)


def read_finished(config: JobConfig, source: Source, run_dir: Path) -> dict[str, Any] | None:
    """The report in ``run_dir``, if just this job has trained and measured the student there."""
    made = read_json(run_dir / "student" / PROVENANCE) or {}
    report: dict[str, Any] | None = read_json(run_dir / "report.json")
    if made.get("job") != config.model_dump(mode="json") or report != made["report"]:
        return None
    # Also the text and the cache must be those of then.
    identity = compute_resume_identity(config, str(source.identity))
    same = checkpoint.read_newest_identity(run_dir / "checkpoints") == identity
    return report if same else None


def tell_results(report: dict[str, Any], run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Emit what the student is worth and where its files are; return both."""
    monitor.emit("report", **{name: report.get(name) for name in COMPARED})
    warn_of_verdict(report, monitor)
    names = [*ARTIFACTS, *report["plots"]]
    names += [TOKENS_FILE] if (run_dir / TOKENS_FILE).is_file() else []
    artifacts = {name: str(run_dir / name) for name in names}
    for name, path in artifacts.items():
        monitor.emit("artifact", name=name, path=path)
    return {"artifacts": artifacts, "report": report}


# ---------------------------------------------------------------------- inputs of the stages


def open_source(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor
) -> tuple[PreTrainedTokenizerBase, Source]:
    """The training data, and the student's tokenizer, which must be that of the cache."""
    tokenizer = load_student_tokenizer(config)
    if not config.needs_cache:
        size = choose_student_vocabulary(tokenizer, config)
        corpus = open_corpus(config.data, tokenizer, home / TEXTS, monitor, size)
        return tokenizer, PlainText(corpus)
    # Where the capture of this run has written its result, the cache is known without reading the
    # text again.
    known = read_json(run_dir / "cache.json")
    memory = choose_chunk_memory(config.train)
    caches = find_caches(home, config.cache.store)
    if config.cache.fingerprint is not None:
        store = open_cache(caches / config.cache.fingerprint, memory_bytes=memory)
    elif known is not None and read_cache_inputs(known) == select_cache_inputs(config):
        store = open_cache(caches / known["fingerprint"], memory_bytes=memory)
    else:
        identity = plan_capture(config, monitor, home / TEXTS).identity
        store = open_cache(caches / identity.fingerprint, identity, memory)
    hold_for(store, store.folder)
    warn_of_overruled(store, monitor)
    note_missing_tail(config, store, monitor)
    require_same_tokenizer(tokenizer, KnownTokenizer.of_cache(store), note=monitor.note)
    require_served(config, store.codec)
    source = CachedRecords(store)
    adopt_chat_template(tokenizer, config, source, monitor)
    return tokenizer, source


def adopt_chat_template(
    tokenizer: PreTrainedTokenizerBase, config: JobConfig, source: CachedRecords, monitor: Monitor
) -> None:
    """Give the student's tokenizer the chat template that its text was rendered with.

    It is that of the teacher: the student learns to answer after these tokens and no others.
    """
    learned = find_teacher_tokenizer(config, source)
    if learned is None or learned.chat_template is None:
        return
    sealed = config.cache.fingerprint is not None
    if not (holds_chats(source, learned) if sealed else config.data.has_chats):
        return
    assert config.student is not None
    if tokenizer.chat_template not in (None, learned.chat_template):
        what = "chat templates of the student's own, replaced by the one that was learned"
        remedy = (
            "The saved student answers as it was trained; give it chats with its own tokenizer."
        )
        place = config.student.model or "the student's tokenizer"
        monitor.note(Notice(what, 1, f"that of {place}", remedy))
    take_chat_template(tokenizer, learned)


def find_teacher_tokenizer(
    config: JobConfig, source: CachedRecords
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the teacher, where it is on this machine and still that of the cache."""
    made = source.store.manifest.provenance
    teacher = config.teacher or TeacherConfig(
        model=made.teacher_name or "unknown", revision=made.teacher_revision or None
    )
    name = teacher.tokenizer or teacher.model
    found = ModelFolder.find(name, Path(), teacher.revision)
    if found is None or not (teacher.gguf_file or found.has_tokenizer):
        return None
    trusted = require_allowed_remote_code(teacher)
    own = load_tokenizer(found.path, teacher.gguf_file, trusted)
    return own if hash_tokenizer(own) == source.store.identity.tokenizer.sha256 else None


def holds_chats(source: CachedRecords, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the first sequence has a user's turn as the tokenizer's template begins one."""
    message = {"role": "user", "content": "MESSAGE"}
    turn = str(tokenizer.apply_chat_template([message], tokenize=False)).partition("MESSAGE")[0]
    sequences, _ = source.read(np.arange(1))
    return turn[-_TURN_CHARACTERS:] in str(tokenizer.decode(sequences.tokens[0].tolist()))


def note_missing_tail(config: JobConfig, store: Cache, monitor: Monitor) -> None:
    """Note that ``loss.tail_control``, the default, has no effect with this cache."""
    wanted = config.loss.tail_control and config.loss.entropy_weighting == 0.0
    if wanted and store.codec.rules.sums_tails and not store.manifest.tail_mean.digest:
        what = "caches without a mean tail, so that loss.tail_control has no effect"
        remedy = "Capture it again, from a teacher on this machine."
        monitor.note(Notice(what, 1, str(store.folder.name), remedy))


def adopt_cache_layout(source: Source, config: JobConfig) -> JobConfig:
    """``config`` with the sequence length and packing of its sealed cache.

    Only a job that names a sealed cache changes: its own ``data`` section names no text.
    """
    if config.cache.fingerprint is None or not isinstance(source, CachedRecords):
        return config
    identity = source.store.identity.data
    layout = {"sequence_length": identity.sequence_length, "packing": identity.packing}
    return config.model_copy(update={"data": config.data.model_copy(update=layout)})


def load_student_tokenizer(config: JobConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in the student's own folder, or the one that a fresh student gets."""
    student = config.student
    teacher = config.teacher
    assert student is not None, "JobConfig refuses a training job without a student"
    own = student.own_tokenizer
    if own is not None:
        # A tokenizer alone needs no weights.
        weights = "*.safetensors" if student.model else None
        return load_tokenizer(resolve_model(own, student.revision, weights))
    assert teacher is not None, "JobConfig refuses a fresh student without a tokenizer"
    folder = resolve_teacher_folder(teacher, teacher.gguf_file)
    return load_tokenizer(folder, teacher.gguf_file, require_allowed_remote_code(teacher))


def select_cache_inputs(config: JobConfig) -> dict[str, Any]:
    """The part of a configuration that decides which cache it needs."""
    return config.model_dump(mode="json", include={"teacher", "data", "cache"})


def read_cache_inputs(known: Any) -> dict[str, Any] | None:
    """Return what the cache of a run was made from, by the run's cache.json.

    Fields that are newer than the run mean what was done then. None where it does not tell.
    """
    with suppress(KeyError, TypeError, ConfigError):
        return select_cache_inputs(read_record({"kind": "precompute", **known["inputs"]}))
    return None
