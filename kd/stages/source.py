"""What a training reads: the records of its cache or its text, and the student's tokenizer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cache.json_object import Json
from cache.reading.usage import hold_for
from cache.store import Cache, open_cache
from kd.addresses import ModelSource
from kd.capture.capturing import warn_of_overruled
from kd.capture.extending import settle_recipe
from kd.capture.plan import plan_capture, set_packing, settle_packing
from kd.config.job import JobConfig
from kd.config.jobfile import read_record
from kd.config.routing.parts import list_members, split_job
from kd.errors import ConfigError
from kd.files import find_caches, read_json
from kd.memory.host import choose_chunk_memory
from kd.models import tokenizers
from kd.models.folder import find_source, resolve_model, resolve_source
from kd.models.tokenizing.aligned_cache import AlignedCache, find_cache
from kd.models.vocabulary import choose_student_vocabulary
from kd.progress import Monitor, Notice
from kd.stages.aligning import align_source, needs_alignment
from kd.text.batches import PlainText, Source
from kd.text.corpus import TEXTS, open_corpus
from kd.text.joined.source import JoinedSource, SourcePart
from kd.training.preparing.requirements import require_served

#: The last characters before a user's words, by which a cache of chats is recognised.
_TURN_CHARACTERS = 12


def open_source(
    config: JobConfig, home: Path, run_dir: Path, monitor: Monitor
) -> tuple[PreTrainedTokenizerBase, Source]:
    """The training data, in the tokens of the student's tokenizer, which comes with it."""
    tokenizer = load_student_tokenizer(config)
    if not config.needs_cache:
        size = choose_student_vocabulary(tokenizer, config.student, config.teacher_files)
        corpus = open_corpus(config.data, tokenizer, home / TEXTS, monitor, size)
        return tokenizer, PlainText(corpus)
    known = read_json(run_dir / "cache.json")
    names: list[str | None] = [config.cache.fingerprint]
    members = list_members(config)
    # Where the capture of this run has written its result, the cache is known without reading the
    # text again.
    if names == [None] and known and are_cache_inputs(read_cache_inputs(known), config):
        names = known.get("fingerprints", [known["fingerprint"]])
    elif names == [None]:
        names = [None] * len(members)
    memory = choose_chunk_memory() // len(members)
    opened = iter(
        [
            open_records(member.job, tokenizer, home, name, memory, monitor)
            for member, name in zip(members, names, strict=True)
        ]
    )
    if not config.teachers:
        return tokenizer, next(opened)
    parts = [
        SourcePart(part.name, tuple((member.weight, next(opened)) for member in part.members))
        for part in split_job(config)
    ]
    return tokenizer, JoinedSource(tuple(parts), config.loss.balance)


def open_records(
    config: JobConfig,
    tokenizer: PreTrainedTokenizerBase,
    home: Path,
    fingerprint: str | None,
    memory: int,
    monitor: Monitor,
) -> Source:
    """Open the records of a job of one teacher; None: the cache that its text and teacher make.

    ``tokenizer`` is the student's. ``memory`` bounds the bytes of decoded chunks.
    """
    caches = find_caches(home, config.cache.store)
    if fingerprint is not None:
        store = open_cache(caches / fingerprint, memory_bytes=memory)
    else:
        identity = settle_recipe(plan_capture(config, monitor, home / TEXTS), caches).identity
        store = open_cache(caches / identity.fingerprint, identity, memory)
    hold_for(store, store.folder)
    warn_of_overruled(store, monitor)
    wants_tail = config.loss.tail_control and config.loss.entropy_weighting == 0.0
    if wants_tail and store.codec.rules.sums_tails and not store.manifest.tail_mean.digest:
        what = "caches without a mean tail, so that loss.tail_control has no effect"
        remedy = "Capture it again, from a teacher on this machine."
        monitor.note(Notice(what, 1, str(store.folder.name), remedy))
    other = needs_alignment(config, store, tokenizer, monitor)
    require_served(config.loss, store.codec)
    adopt_chat_template(tokenizer, config, store, monitor)
    return align_source(config, store, tokenizer, monitor) if other else store


def adopt_chat_template(
    tokenizer: PreTrainedTokenizerBase, config: JobConfig, source: Cache, monitor: Monitor
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
    tokenizers.take_chat_template(tokenizer, learned)


def find_teacher_tokenizer(config: JobConfig, source: Cache) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the teacher, where it is on this machine and still that of the cache."""
    recorded = source.manifest.teacher
    named = ModelSource(recorded.name or "unknown", recorded.revision or None)
    teacher = config.teacher_files or named
    found = find_source(teacher, Path())
    if found is None or not (teacher.gguf_file or found.has_tokenizer):
        return None
    own = tokenizers.load_source_tokenizer(teacher, found.path)
    return own if tokenizers.hash_tokenizer(own) == source.identity.tokenizer.sha256 else None


def holds_chats(source: Cache, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the first sequence has a user's turn as the tokenizer's template begins one."""
    message = {"role": "user", "content": "MESSAGE"}
    turn = str(tokenizer.apply_chat_template([message], tokenize=False)).partition("MESSAGE")[0]
    sequences, _ = source.read(np.arange(1))
    return turn[-_TURN_CHARACTERS:] in str(tokenizer.decode(sequences.tokens[0].tolist()))


def adopt_cache_layout(source: Source, config: JobConfig) -> JobConfig:
    """``config`` with the sequence length and packing of its sealed cache.

    Only a job that names a sealed cache changes, because its own ``data`` section names no text,
    and one whose student has other tokens, because its rows may be longer. A job of several
    teachers is packed if one of its caches is.
    """
    if config.teachers:
        return _adopt_members(source, config)
    aligned = source if isinstance(source, AlignedCache) else None
    store = find_cache(source)
    if store is None or (config.cache.fingerprint is None and aligned is None):
        return config
    identity = store.identity.data
    length = identity.sequence_length if aligned is None else aligned.length
    layout = {"sequence_length": length, "packing": identity.packing}
    return config.model_copy(update={"data": config.data.model_copy(update=layout)})


def _adopt_members(source: Source, config: JobConfig) -> JobConfig:
    """Return ``config`` with the packing of its caches, and the length of their longest rows."""
    assert isinstance(source, JoinedSource), "several teachers are joined"
    rows = [each.length for _, each in source.members if isinstance(each, AlignedCache)]
    length = max([config.data.sequence_length, *rows])
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"sequence_length": length})}
    )
    if config.data.packing != "auto":
        return config
    settled = [settle_packing(member.job) for member in list_members(config)]
    return set_packing(config, any(each.data.packing for each in settled))


def load_student_tokenizer(config: JobConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in the student's own folder, or the one that a fresh student gets."""
    student = config.student
    teacher = config.teacher_files
    assert student is not None, "JobConfig refuses a training job without a student"
    own = student.own_tokenizer
    if own is not None:
        # A tokenizer alone needs no weights.
        weights = "*.safetensors" if student.model else None
        return tokenizers.load_tokenizer(resolve_model(own, student.revision, weights))
    assert teacher is not None, "JobConfig refuses a fresh student without a tokenizer"
    return tokenizers.load_source_tokenizer(teacher, resolve_source(teacher, whole=False))


def select_cache_inputs(config: JobConfig) -> Json:
    """The part of a configuration that decides which cache it needs."""
    included = {"teacher", "data", "cache"} | ({"teachers"} if config.teachers else set())
    sections = config.model_dump(mode="json", include=included)
    return sections | {"entropies": config.keeps_entropies}


def are_cache_inputs(inputs: Json | None, config: JobConfig) -> bool:
    """Whether ``inputs``, of which a run has made its cache, are those of ``config``."""
    wanted = select_cache_inputs(config)
    if inputs is not None and inputs["entropies"] is None:
        # Version 0.2.0 kept the entropy of each position for every job.
        wanted["entropies"] = None
    return inputs == wanted


def read_cache_inputs(known: Any) -> Json | None:
    """Return what the cache of a run was made from, by the run's cache.json.

    Fields that are newer than the run mean what was done then; ``entropies`` is None for a run
    that version 0.2.0 began. None where it does not tell.
    """
    with suppress(KeyError, TypeError, ConfigError):
        sections = dict(known["inputs"])
        entropies = sections.pop("entropies", None)
        record = read_record({"kind": "precompute", **sections})
        return select_cache_inputs(record) | {"entropies": entropies}
    return None
