"""Plan a capture before the teacher is loaded: the text, and the identity and provenance of the
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache.errors import PotstillError
from cache.manifest import (
    CacheIdentity,
    DataIdentity,
    Provenance,
    TeacherIdentity,
    TokenizerIdentity,
)
from cache.random import SEQUENCES
from kd.capture.codec_identity import make_codec_identity
from kd.capture.remote import hash_remote_teacher
from kd.config.job import JobConfig
from kd.config.teacher import TeacherConfig
from kd.errors import ConfigError, Problem
from kd.models.attention.isolation import explain_own_rows
from kd.models.folder import compute_fingerprint, require_allowed_remote_code, resolve_model
from kd.models.loading import (
    choose_quantization,
    choose_teacher_dtype,
    outline_student,
    outline_teacher,
)
from kd.models.precision import pick_device
from kd.models.tokenizers import (
    PROBE_TEXTS,
    encode_probes,
    get_special_tokens,
    hash_tokenizer,
    load_tokenizer,
)
from kd.models.vocabulary import choose_teacher_vocabulary
from kd.progress import SILENT, Monitor, Notice
from kd.text.corpus import Corpus, describe_held_out, load_corpus, open_corpus


def plan_capture(
    config: JobConfig, monitor: Monitor = SILENT, texts: Path | None = None
) -> CapturePlan:
    """Tokenise the job's text with the teacher's tokenizer, and identify the cache.

    The tokens are kept in a store below ``texts``; None packs a small text in memory.
    """
    config = settle_packing(config, monitor)
    assert config.teacher is not None, (
        "JobConfig refuses a job that needs a cache and has no teacher"
    )
    folder = resolve_teacher_folder(config.teacher, config.teacher.gguf_file or "*.safetensors")
    tokenizer = load_tokenizer(
        folder, config.teacher.gguf_file, require_allowed_remote_code(config.teacher)
    )
    size = choose_teacher_vocabulary(tokenizer, config.teacher, folder)
    corpus = (
        load_corpus(config.data, tokenizer, monitor, size)
        if texts is None
        else open_corpus(config.data, tokenizer, texts, monitor, size)
    )
    return make_capture_plan(config, tokenizer, corpus, folder, monitor)


def resolve_teacher_folder(teacher: TeacherConfig, weights: str | None) -> Path:
    """Return the teacher's folder with the files that match ``weights``.

    For a remote teacher, its tokenizer's folder.
    """
    if teacher.tokenizer is not None:
        # A remote teacher's weights stay on its server: only the tokenizer is needed here.
        return resolve_model(teacher.tokenizer, teacher.revision, None)
    return resolve_model(teacher.model, teacher.revision, weights)


def settle_packing(config: JobConfig, monitor: Monitor = SILENT) -> JobConfig:
    """Return the job with data.packing true or false in place of auto, and say why false.

    A job that names a sealed cache stays as it is: it gets the layout of that cache.
    """
    if config.data.packing != "auto" or config.cache.fingerprint is not None:
        return config
    for who, hollow in _load_hollow_models(config):
        if (why := explain_own_rows(hollow)) is not None:
            what = "models in which documents cannot share a row, so that each gets its own"
            remedy = "Rows of similar length make a batch."
            monitor.note(Notice(what, 1, f"the {who}: {why.detail}".rstrip("."), remedy))
            return set_packing(config, False)
    return set_packing(config, True)


def set_packing(config: JobConfig, packing: bool) -> JobConfig:
    """Return the job with what data.packing auto means for it."""
    changed: dict[str, Any] = {"data": config.data.model_copy(update={"packing": packing})}
    train = config.train
    if not packing and train and train.order == "shuffled" and train.strategy != "pipeline":
        changed["train"] = train.model_copy(update={"order": "length"})
    return config.model_copy(update=changed)


def _load_hollow_models(config: JobConfig) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the job's models that are on this machine, without weights; a fresh one is a Llama."""
    teacher, student = config.teacher, config.student
    # What cannot be made is refused where it is loaded, by a better message.
    if teacher is not None and teacher.backend == "local" and config.runs_teacher:
        with suppress(PotstillError):
            folder = resolve_teacher_folder(teacher, teacher.gguf_file)
            yield "teacher", outline_teacher(teacher, folder, torch.float32)
    if student is not None and student.model is not None:
        with suppress(PotstillError):
            yield "student", outline_student(student)


@dataclass(frozen=True)
class CapturePlan:
    """The inputs of a capture: the text, the teacher's folder, and the identity of the cache."""

    config: JobConfig
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    corpus: Corpus
    identity: CacheIdentity

    @property
    def teacher(self) -> TeacherConfig:
        """The job's teacher; a job with a capture always has one."""
        assert self.config.teacher is not None
        return self.config.teacher

    def describe_held_out(self) -> str:
        """Say which sequences of the text are held out, and why so many."""
        counts = (len(self.corpus.validation), len(self.corpus.train))
        return describe_held_out(*counts, self.config.data)


def make_capture_plan(
    config: JobConfig,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    folder: Path,
    monitor: Monitor = SILENT,
) -> CapturePlan:
    """Return the plan for a corpus that is already read.

    Raises ``ConfigError`` where the job asks for tokens that the teacher does not have.
    """
    assert config.teacher is not None
    vocabulary = choose_teacher_vocabulary(tokenizer, config.teacher, folder)
    teacher = _identify_teacher(config, folder, monitor)
    identity = CacheIdentity(
        teacher,
        TokenizerIdentity(vocabulary, hash_tokenizer(tokenizer)),
        DataIdentity(
            sha256=corpus.compute_sha256(),
            sequence_length=config.data.sequence_length,
            packing=config.data.packing is not False,
            train_sequences=len(corpus.train),
            validation_sequences=len(corpus.validation),
        ),
        make_codec_identity(config.cache, teacher.dtype),
    )
    # Only tokenizer and model show which ids exist: the job alone cannot be checked for this.
    _require_vocabulary(identity)
    require_counters(identity)
    return CapturePlan(config, folder, tokenizer, corpus, identity)


def _identify_teacher(config: JobConfig, folder: Path, monitor: Monitor) -> TeacherIdentity:
    """Identify the teacher by its weights, their precision, and how they are rounded and spread.

    The weights of a remote teacher cannot be seen: it is identified by its address and name.
    """
    assert config.teacher is not None
    if config.teacher.backend == "http":
        return TeacherIdentity(hash_remote_teacher(config.teacher), "remote")
    # Another precision gives other logits, so it belongs to the identity of the teacher.
    dtype = choose_teacher_dtype(config.teacher, folder, pick_device())
    waiting = partial(monitor.check, "while the teacher's files were read")
    digest = compute_fingerprint(folder, config.teacher.gguf_file, waiting)
    return TeacherIdentity(
        digest,
        str(dtype).removeprefix("torch."),
        quantization=choose_quantization(config.teacher, folder),
        # Sums over several devices are rounded otherwise than those of one.
        parallel="" if config.teacher.parallel == "none" else config.teacher.parallel,
    )


def _require_vocabulary(identity: CacheIdentity) -> None:
    """Raise ``ConfigError`` where the job asks for tokens that the teacher does not have."""
    size = identity.tokenizer.vocabulary_size
    codec = identity.codec
    too_large = [token for token in codec.always_keep if token >= size]
    if too_large or codec.k > size:
        field, got = ("always_keep", too_large[0]) if too_large else ("k", codec.k)
        detail = f"{got} is more than the teacher has: its vocabulary is {size} tokens."
        ids = "Ids run from 0; ask the tokenizer for them."
        remedy = ids if too_large else f"Set it to {size} or less."
        raise ConfigError([Problem(f"/cache/{field}", detail, remedy)])


def require_counters(identity: CacheIdentity) -> None:
    """Raise ``ConfigError`` where there are more sequences than random numbers tell apart."""
    if identity.data.sequences > SEQUENCES:
        detail = (
            f"the text gives {identity.data.sequences:,} sequences, but a cache holds at most "
            f"{SEQUENCES:,}: their numbers are counters of random numbers."
        )
        remedy = "Make the sequences longer, or split the text into several caches."
        raise ConfigError([Problem("/data/sequence_length", detail, remedy)])


def make_provenance(plan: CapturePlan) -> Provenance:
    """Return the names of teacher and revision, the probe texts and the special tokens of a cache.

    The last probe text is an excerpt of the corpus: a student's tokenizer must encode it alike.
    """
    tokenizer = plan.tokenizer
    beginning = plan.corpus.train.select(slice(0, 1)).tokens[0][:256]
    excerpt = str(tokenizer.decode(beginning.tolist(), skip_special_tokens=True))
    return Provenance(
        teacher_name="/".join([plan.teacher.model, *filter(None, [plan.teacher.gguf_file])]),
        teacher_revision=plan.teacher.revision or "",
        probes=encode_probes(tokenizer, (*PROBE_TEXTS, excerpt)),
        special_tokens=get_special_tokens(tokenizer),
    )
