"""Plan a capture before the teacher is loaded: the text, and the identity and provenance of the
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache import manifest
from cache.codec import Codec
from cache.errors import PotstillError
from cache.random import SEQUENCES
from kd.capture.codec_identity import Recipe, make_codec_identity
from kd.capture.remote import RemoteTeacher, hash_remote_teacher
from kd.capture.served.scoring import require_scoring_version
from kd.capture.served.sglang import SGLangTeacher
from kd.config.cache import CacheConfig
from kd.config.data import DataConfig
from kd.config.job import JobConfig
from kd.config.teacher import TeacherConfig
from kd.errors import ConfigError, Problem
from kd.models import loading, tokenizers
from kd.models.attention.isolation import explain_own_rows
from kd.models.folder import compute_fingerprint
from kd.models.precision import pick_device
from kd.models.teacher_files import TeacherFiles
from kd.models.vocabulary import choose_source_vocabulary
from kd.progress import SILENT, Monitor, Notice
from kd.text.corpus import Corpus, describe_held_out, load_corpus, open_corpus
from kd.text.teacher_side.context import TeacherContext


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
    teacher = TeacherFiles.resolve(config.teacher)
    source = teacher.section.files
    tokenizer = tokenizers.load_source_tokenizer(source, teacher.folder)
    size = choose_source_vocabulary(tokenizer, source, teacher.folder)
    context = TeacherContext.of(config)
    if texts is None:
        corpus = load_corpus(config.data, tokenizer, monitor, size, context)
    else:
        corpus = open_corpus(config.data, tokenizer, texts, monitor, size, context)
    return make_capture_plan(config, teacher, tokenizer, corpus, monitor)


def settle_packing(config: JobConfig, monitor: Monitor = SILENT) -> JobConfig:
    """Return the job with data.packing true or false in place of auto, and say why false.

    A job that names a sealed cache stays as it is: it gets the layout of that cache. So does one of
    several teachers, whose ordinary jobs are settled one by one.
    """
    named = config.cache.fingerprint is not None
    if config.data.packing != "auto" or named or config.teachers:
        return config
    if config.teacher_context is not None:
        return set_packing(config, False)
    for who, hollow in _load_hollow_models(config):
        if (why := explain_own_rows(hollow)) is not None:
            what = "models in which documents cannot share a row, so that each gets its own"
            remedy = "Rows of similar length make a batch."
            monitor.note(Notice(what, 1, f"the {who}: {why.detail}".rstrip("."), remedy))
            return set_packing(config, False)
    return set_packing(config, True)


def set_packing(config: JobConfig, packing: bool) -> JobConfig:
    """Return the job with what data.packing auto means for it."""
    changed: dict[str, object] = {"data": config.data.model_copy(update={"packing": packing})}
    train = config.train
    if not packing and train and train.order == "shuffled" and train.strategy != "pipeline":
        changed["train"] = train.model_copy(update={"order": "length"})
    return config.model_copy(update=changed)


def _load_hollow_models(config: JobConfig) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the job's models that are on this machine, without weights; a fresh one is a Llama."""
    teacher, student = config.active_teacher, config.student
    # What cannot be made is refused where it is loaded, by a better message.
    if teacher is not None and teacher.is_local:
        with suppress(PotstillError):
            files = TeacherFiles.resolve(teacher, whole=False)
            yield "teacher", loading.outline_teacher(files, torch.float32)
    if student is not None and student.model is not None:
        with suppress(PotstillError):
            yield "student", loading.outline_student(student)


@dataclass(frozen=True)
class CapturePlan:
    """The inputs of a capture: the teacher, the text, and the identity of the cache.

    ``data`` and ``options`` are the job's sections on text and on cache.
    """

    teacher: TeacherFiles
    data: DataConfig
    options: CacheConfig
    tokenizer: PreTrainedTokenizerBase
    corpus: Corpus
    identity: manifest.CacheIdentity

    @property
    def read_length(self) -> int:
        """The most tokens that the teacher reads at once."""
        return self.teacher.section.count_read(self.data.sequence_length)

    def describe_held_out(self) -> str:
        """Say which sequences of the text are held out, and why so many."""
        return describe_held_out(len(self.corpus.validation), len(self.corpus.train), self.data)


def make_capture_plan(
    config: JobConfig,
    teacher: TeacherFiles,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    monitor: Monitor = SILENT,
) -> CapturePlan:
    """Return the plan for a corpus that is already read.

    Raises ``ConfigError`` if the job asks for tokens that the teacher does not have.
    """
    size = choose_source_vocabulary(tokenizer, teacher.section.files, teacher.folder)
    known = _identify_teacher(teacher, monitor)
    # Tables of dither are fitted by a recipe that suits the text.
    recipe = Recipe.choose(corpus.train.positions, len(corpus.train))
    identity = manifest.CacheIdentity(
        known,
        manifest.TokenizerIdentity(size, tokenizers.hash_tokenizer(tokenizer)),
        manifest.DataIdentity(
            sha256=corpus.compute_sha256(),
            sequence_length=config.data.sequence_length,
            packing=config.data.packing is not False,
            train_sequences=len(corpus.train),
            validation_sequences=len(corpus.validation),
            context_sha256=corpus.compute_context_sha256(),
        ),
        make_codec_identity(
            config.cache, config.keeps_entropies, known.dtype, recipe.clusters, recipe.sequences
        ),
    )
    # Only tokenizer and model show which ids exist: a job cannot be checked for this without them.
    codec = identity.codec
    too_large = [token for token in codec.always_keep if token >= size]
    if too_large or codec.k > size:
        field, got = ("always_keep", too_large[0]) if too_large else ("k", codec.k)
        detail = f"{got} is more than the teacher has: its vocabulary is {size} tokens."
        ids = "Ids run from 0; ask the tokenizer for them."
        remedy = ids if too_large else f"Set it to {size} or less."
        raise ConfigError([Problem(f"/cache/{field}", detail, remedy)])
    require_counters(identity)
    return CapturePlan(teacher, config.data, config.cache, tokenizer, corpus, identity)


def _identify_teacher(teacher: TeacherFiles, monitor: Monitor) -> manifest.TeacherIdentity:
    """Identify the teacher by its weights, their precision, and how they are rounded and spread.

    The weights of a remote teacher cannot be seen: it is identified by its address and name, and
    by the model that proposes ids to it, or by the version of SGLang.
    """
    section = teacher.section
    if not section.is_local:
        known = manifest.TeacherIdentity(hash_remote_teacher(section), "remote")
        if section.backend == "sglang":
            # No record is made: any codec does.
            with SGLangTeacher.connect(section, Codec("topk", 1, k=1), monitor) as server:
                return replace(known, server=f"sglang {server.read_server()['version']}")
        return known if section.proposer is None else _add_proposal(known, section, monitor)
    # Another precision gives other logits, so it belongs to the identity of the teacher.
    dtype = loading.choose_teacher_dtype(teacher, pick_device())
    check_stop = partial(monitor.check, "while the teacher's files were read")
    return manifest.TeacherIdentity(
        compute_fingerprint(teacher.folder, section.gguf_file, check_stop),
        str(dtype).removeprefix("torch."),
        quantization=loading.choose_quantization(teacher),
        # Sums over several devices are rounded otherwise than those of one.
        parallel="" if section.parallel == "none" else section.parallel,
    )


def _add_proposal(
    known: manifest.TeacherIdentity, section: TeacherConfig, monitor: Monitor
) -> manifest.TeacherIdentity:
    """Add the server's version, and the weights and the precision of the proposal."""
    assert section.proposer is not None
    proposal = TeacherFiles.resolve(section.proposer)
    dtype = str(loading.choose_teacher_dtype(proposal, pick_device())).removeprefix("torch.")
    check_stop = partial(monitor.check, "while the files of the proposal were read")
    digest = compute_fingerprint(proposal.folder, check_stop=check_stop)
    # No record is made: any codec does.
    with RemoteTeacher.connect(section, Codec("topk", 1, k=1), monitor) as teacher:
        server = require_scoring_version(teacher)
    return replace(known, server=f"vllm {server}", proposal=f"{digest} {dtype}")


def require_counters(identity: manifest.CacheIdentity) -> None:
    """Raise ``ConfigError`` if there are more sequences than random numbers tell apart."""
    if identity.data.sequences > SEQUENCES:
        detail = (
            f"the text gives {identity.data.sequences:,} sequences, but a cache holds at most "
            f"{SEQUENCES:,}: their numbers are counters of random numbers."
        )
        remedy = "Make the sequences longer, or split the text into several caches."
        raise ConfigError([Problem("/data/sequence_length", detail, remedy)])


def make_provenance(plan: CapturePlan) -> manifest.Provenance:
    """Return the names of teacher and revision, the probe texts and the special tokens of a cache.

    The last probe text is an excerpt of the corpus: a student's tokenizer must encode it alike.
    """
    tokenizer = plan.tokenizer
    section = plan.teacher.section
    beginning = plan.corpus.train.select(slice(0, 1)).tokens[0][:256]
    excerpt = str(tokenizer.decode(beginning.tolist(), skip_special_tokens=True))
    return manifest.Provenance(
        teacher_name="/".join([section.model, *filter(None, [section.gguf_file])]),
        teacher_revision=section.revision or "",
        probes=tokenizers.encode_probes(tokenizer, (*tokenizers.PROBE_TEXTS, excerpt)),
        special_tokens=tokenizers.get_special_tokens(tokenizer),
    )
