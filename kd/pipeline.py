"""The whole run, one stage after the other:

    text -> tokens -> teacher logits -> cache records -> batches -> loss -> student -> report

    stage        takes                    gives                            lives in
    read, pack   text                     tokens (S, L)                    kd/data.py
    capture      tokens, teacher          records in a sealed cache        kd/teacher.py, kd/sampling.py, cache/
    batch        cache                    Batch                            kd/batches.py
    train        batches                  student                          kd/train.py, kd/losses.py
    report       student, held-out text   report.json, report.md, plots    kd/evaluate.py, kd/evaluation, kd/report.py
    search       a study's trials         the best of their jobs           kd/search
    verify       a sealed cache           what is wrong with it            cache/

Knows nothing of HTTP, Redis or Celery. Each stage is idempotent: called again with the same folders it uses the
sealed cache and goes on from the newest checkpoint, so a job that runs twice finishes once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cache.errors import CacheCorrupt
from cache.profiles import unserved
from cache.store import Cache, open_cache, verify
from kd import models
from kd.batches import PlainText, Source
from kd.config.job import JobConfig
from kd.config.teacher import TeacherConfig
from kd.data import load_corpus
from kd.errors import ConfigError, Problem
from kd.evaluation.baseline import starting_student
from kd.evaluation.closer import Run, require_possible
from kd.extras import missing_extras
from kd.files import read_json, whole_folder, write_json
from kd.precision import Precision, pick_device
from kd.progress import SILENT, Monitor
from kd.report import make_report, write_report
from kd.resuming import require_same_job
from kd.search.trials import search_students
from kd.student import load_saved, save_dtype, save_student, write_provenance
from kd.teacher import CachedRecords, Plan, capture, make_plan
from kd.train import required, train
from kd.validate import check_inputs

ARTIFACTS = ("student", "report.md", "report.json", "metrics.jsonl", "profile.json")


def distill(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor = SILENT) -> dict[str, Any]:
    """Run every stage of the job; returns what they found."""
    result: dict[str, Any] = {}
    for stage in config.stages:
        result |= run_stage(stage, config, home, run_dir, monitor)
    return result


def run_stage(stage: str, config: JobConfig, home: Path, run_dir: Path, monitor: Monitor = SILENT) -> dict[str, Any]:
    """Run one stage of the job; ``home`` holds the caches, ``run_dir`` is the job's own."""
    if problems := [*check_inputs(config, Path(), home), *missing_extras(config)]:
        raise ConfigError(problems)
    require_possible(config)
    if config.train is not None:  # what the device cannot do is refused before a teacher is read
        Precision.choose(config.train.precision, pick_device())
    require_same_job(config, run_dir)
    models.hide_progress_bars()
    write_json(run_dir / "config.json", config.model_dump(mode="json"))
    if config.kind == "verify":
        return verify_cache(config, home, run_dir, monitor)
    monitor.emit("stage", stage=stage, phase="loading data")
    run = {"precompute": precompute, "train": train_student, "search": search}[stage]
    return run(config, home, run_dir, monitor)


def precompute(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Make sure that a sealed cache for this job exists, capturing it if it does not."""
    planned = plan(config, monitor)
    require_student(config, planned)
    monitor.emit("plan", fingerprint=planned.identity.fingerprint)  # whose cache it is, before anything lies there
    summary = capture(planned, home / "caches", monitor)
    write_json(run_dir / "cache.json", {**summary, "inputs": cache_inputs(config)})
    monitor.emit("cache", **summary)
    return {"cache": summary}


def require_student(config: JobConfig, planned: Plan) -> None:
    """Raise what training would of the job's student, by its tokenizer and shape: the capture may take days."""
    if config.student is None or config.stages == ("precompute",):
        return
    own = student_tokenizer(config)
    models.require_same_tokenizer(own, models.probe(planned.tokenizer, models.PROBES))
    models.require_student(config.student, own, config.data.sequence_length, config.teacher)


def verify_cache(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Compare every digest of a sealed cache; raises ``CacheCorrupt`` that names what is damaged."""
    folder = home / "caches" / str(config.cache.fingerprint)
    monitor.emit("stage", stage="precompute", phase="verifying")
    monitor.emit("plan", fingerprint=folder.name)  # whose bytes these are, whatever is found
    damage = verify(folder)
    write_json(run_dir / "verify.json", {"fingerprint": config.cache.fingerprint, "problems": damage})
    monitor.emit("artifact", name="verify.json", path=str(run_dir / "verify.json"))
    if damage:
        raise CacheCorrupt(
            f"{folder} is damaged: {'; '.join(damage[:10])}.", "Delete it and capture it again, or restore a backup."
        )
    found = {"fingerprint": folder.name, "verified": True}
    monitor.emit("cache", **found)
    return {"cache": found}


def search(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Train many students from the sealed cache, to find the settings that suit it best."""
    return search_students(config, home, run_dir, monitor, train_student)


def train_student(config: JobConfig, home: Path, run_dir: Path, monitor: Monitor) -> dict[str, Any]:
    """Train the student from the sealed cache (or on plain text), save it and report."""
    tokenizer, source = open_source(config, home, run_dir, monitor)
    config = cut_as(source, config)
    options, vocabulary = required(config.train), models.vocabulary_size(tokenizer)
    student = starting_student(config, tokenizer)
    monitor.emit("stage", stage="train", phase="training")
    progress = train(config, source, student, vocabulary, run_dir, monitor)

    monitor.emit("stage", stage="train", phase="saving")
    precision = Precision.choose(options.precision, pick_device())
    with whole_folder(run_dir / "student") as folder:
        save_student(student, tokenizer, folder, config.student, save_dtype(options, precision))
        run = Run(run_dir, tokenizer, monitor)
        report = make_report(config, source, load_saved(folder), progress, vocabulary, run)
        write_provenance(folder, config, report)
    write_report(run_dir, report)
    artifacts = {name: str(run_dir / name) for name in (*ARTIFACTS, *report["plots"])}
    for name, path in artifacts.items():
        monitor.emit("artifact", name=name, path=path)
    return {"artifacts": artifacts, "report": report}


# ---------------------------------------------------------------------- where the stages get their inputs


def plan(config: JobConfig, monitor: Monitor = SILENT) -> Plan:
    """Read the text with the teacher's tokenizer: what the cache must contain is known before any teacher runs."""
    assert config.teacher is not None, "JobConfig refuses a job that needs a cache and has no teacher"
    folder = teacher_folder(config.teacher, config.teacher.gguf_file or "*.safetensors")
    tokenizer = models.load_tokenizer(folder, config.teacher.gguf_file, models.allowed_remote_code(config.teacher))
    return make_plan(config, tokenizer, load_corpus(config.data, tokenizer, monitor), folder)


def teacher_folder(teacher: TeacherConfig, weights: str | None) -> Path:
    """The teacher's folder, with the weights that match; of a remote teacher, its tokenizer's."""
    if teacher.tokenizer is not None:
        return models.resolve(teacher.tokenizer, teacher.revision, None)
    return models.resolve(teacher.model, teacher.revision, weights)


def open_source(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor
) -> tuple[PreTrainedTokenizerBase, Source]:
    """What to train on, and the student's tokenizer, which must be the cache's."""
    tokenizer = student_tokenizer(config)
    if not config.needs_cache:
        return tokenizer, PlainText(load_corpus(config.data, tokenizer, monitor))
    known = read_json(run_dir / "cache.json")
    if config.cache.fingerprint is not None:
        store = open_cache(home / "caches" / config.cache.fingerprint)
    elif known is not None and known["inputs"] == cache_inputs(config):
        store = open_cache(home / "caches" / known["fingerprint"])
    else:
        identity = plan(config, monitor).identity
        store = open_cache(home / "caches" / identity.fingerprint, identity)
    models.require_same_tokenizer(tokenizer, store.manifest.provenance.probes)
    require_served(config, store)
    return tokenizer, CachedRecords(store)


def require_served(config: JobConfig, store: Cache) -> None:
    """Raise ``ConfigError`` if the records cannot serve the loss: a job that names a sealed cache learns it here."""
    codec = store.identity.codec
    span = (codec.temperatures[0], codec.temperatures[1]) if codec.temperatures else None
    for temperature in config.loss.temperatures:
        if why := unserved(codec.profile, span, config.loss.divergence, temperature):
            raise ConfigError([Problem("/loss", why + ".", f"See `kd cache info {store.folder.name}`.")])
    if config.loss.features.weight > 0 and codec.profile != "hidden":
        raise ConfigError(
            [Problem("/loss/features", f"profile {codec.profile} keeps no hidden states.", "Use hidden.")]
        )


def cut_as(source: Source, config: JobConfig) -> JobConfig:
    """``config`` with the sequence length and packing of a sealed cache that it names in place of text."""
    if config.cache.fingerprint is None or not isinstance(source, CachedRecords):
        return config
    identity = source.store.identity.data
    cut = {"sequence_length": identity.sequence_length, "packing": identity.packing}
    return config.model_copy(update={"data": config.data.model_copy(update=cut)})


def student_tokenizer(config: JobConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the student's own folder, or the one a fresh student is given."""
    student, teacher = config.student, config.teacher
    assert student is not None, "JobConfig refuses a training job without a student"
    own = student.model or (student.init.tokenizer if student.init else None)
    if own is not None:
        return models.load_tokenizer(models.resolve(own, student.revision, "*.safetensors" if student.model else None))
    assert teacher is not None, "JobConfig refuses a fresh student without a tokenizer"
    folder = teacher_folder(teacher, teacher.gguf_file)
    return models.load_tokenizer(folder, teacher.gguf_file, models.allowed_remote_code(teacher))


def cache_inputs(config: JobConfig) -> dict[str, Any]:
    """The part of a configuration that decides which cache it needs."""
    return config.model_dump(mode="json", include={"teacher", "data", "cache"})
