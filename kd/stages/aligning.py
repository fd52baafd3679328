"""The records of a teacher for a student whose tokenizer may be another one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedTokenizerBase

from cache.store import Cache
from kd.config.job import JobConfig
from kd.config.loss import LossConfig
from kd.errors import ConfigError, ModelError, Problem, TokenizerMismatch
from kd.models.layers import find_model_context
from kd.models.loading import outline_student
from kd.models.tokenizers import KnownTokenizer, require_same_tokenizer
from kd.models.tokenizing.aligned_cache import (
    MOST_TOKENS,
    SAMPLE_ROWS,
    AlignedCache,
    require_aligned,
)
from kd.models.tokenizing.alignment import Aligner
from kd.models.tokenizing.pieces import TokenPieces
from kd.models.tokenizing.rules import sample_texts
from kd.models.vocabulary import choose_student_vocabulary
from kd.progress import Monitor
from kd.text.stored.packed import PackedText


def needs_alignment(
    config: JobConfig, store: Cache, tokenizer: PreTrainedTokenizerBase, monitor: Monitor
) -> bool:
    """Whether the student's ``tokenizer`` is not that of ``store``.

    Raises ``TokenizerMismatch`` if it must be.
    """
    known = KnownTokenizer.of_cache(store)
    return not is_same_tokenizer(config.loss, tokenizer, known, (), monitor)


def align_source(
    config: JobConfig, store: Cache, tokenizer: PreTrainedTokenizerBase, monitor: Monitor
) -> AlignedCache:
    """Return ``store`` in the tokens of the job's student.

    ``tokenizer`` is the student's, with the chat template that it learns; its texts will end as
    those of the teacher. Raises ``ConfigError`` or ``ModelError`` if the two cannot be aligned as
    the job asks.
    """
    require_alignable(config, store.codec.profile, store.codec.rules.sampled)
    vocabulary = choose_student_vocabulary(tokenizer, config.student, config.teacher_files)
    length = bound_rows(config, store.identity.data.sequence_length)
    found = AlignedCache.of(store, tokenizer, vocabulary, config.loss.tokenizers == "alm", length)
    teacher, student = found.aligner.teacher, found.aligner.student
    require_template_tokens(str(tokenizer.chat_template), teacher, student)
    sample, _ = store.read(np.arange(min(SAMPLE_ROWS, len(store))))
    require_aligned(found.aligner, sample, length, monitor.note)
    learn_end(tokenizer, teacher, student)
    return found


def precheck_alignment(
    config: JobConfig,
    theirs: PreTrainedTokenizerBase,
    size: int,
    own: PreTrainedTokenizerBase,
    text: PackedText,
    monitor: Monitor,
) -> tuple[int, int]:
    """Raise before a capture what ``align_source`` would raise after it.

    ``theirs`` is the teacher's tokenizer of ``size`` ids, ``own`` the student's; ``text`` is
    that to capture. Returns V of the student, and the most tokens of its rows.
    """
    length = config.data.sequence_length
    known = KnownTokenizer.of(theirs, size, "the teacher's")
    if is_same_tokenizer(config.loss, own, known, sample_texts(config.data), monitor):
        return size, length
    require_alignable(config, config.cache.profile, config.cache.sampled)
    vocabulary = choose_student_vocabulary(own, config.student, config.teacher_files)
    pieces = TokenPieces.of_tokenizer(theirs, size)
    aligner = Aligner.of(pieces, own, vocabulary)
    if config.data.has_chats:
        require_template_tokens(str(theirs.chat_template), pieces, aligner.student)
    sample = text.select(np.arange(min(SAMPLE_ROWS, len(text))))
    most = bound_rows(config, length)
    require_aligned(aligner, sample, most, monitor.note)
    return vocabulary, most


def is_same_tokenizer(
    loss: LossConfig,
    tokenizer: PreTrainedTokenizerBase,
    known: KnownTokenizer,
    texts: Iterable[str],
    monitor: Monitor,
) -> bool:
    """Whether ``tokenizer`` is the one that is ``known``; ``TokenizerMismatch`` if it must be."""
    try:
        require_same_tokenizer(tokenizer, known, texts=texts, note=monitor.note)
    except TokenizerMismatch:
        if loss.tokenizers == "same":
            raise
        return False
    return True


def require_alignable(config: JobConfig, profile: str, sampled: bool) -> None:
    """Raise ``ConfigError`` if the job asks for what needs equal tokens.

    ``sampled``: records of ``profile`` are entries with a sampled tail.
    """
    problems = config.loss.list_unaligned(profile, sampled)
    if config.evaluation.teacher:
        detail = "it compares two distributions token by token, but teacher and student have other "
        remedy = "Set it to false: the report compares bits per byte."
        problems.append(Problem("/evaluation/teacher", f"{detail}tokens.", remedy))
    if problems:
        raise ConfigError(problems)


def require_template_tokens(template: str, teacher: TokenPieces, student: TokenPieces) -> None:
    """Raise ``ModelError`` if a chat template writes a token that the student lacks."""
    lost = [name for name in teacher.names if name in template and name not in student.names]
    if lost:
        raise ModelError(
            f"the teacher's chat template writes {', '.join(lost)}, which the student's tokenizer "
            "does not have as special tokens.",
            "Add them to the student's tokenizer and resize its embeddings, or use a teacher whose "
            "template has the student's tokens.",
        )


def bound_rows(config: JobConfig, length: int) -> int:
    """Return the most tokens of the student for a row of ``length`` tokens of its teacher.

    They are no more than the context of a student that is not fresh.
    """
    assert config.student is not None, "only a job with a student aligns"
    most = MOST_TOKENS * length
    if config.student.model is None:
        return most
    return min(most, find_model_context(outline_student(config.student)) or most)


def learn_end(
    tokenizer: PreTrainedTokenizerBase, teacher: TokenPieces, student: TokenPieces
) -> None:
    """Let the student's texts end with the token with which those of its teacher end."""
    end = teacher.roles.get("eos")
    found = None if end is None else teacher.find_special(end, student)
    if found not in (None, tokenizer.eos_token_id):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(found)
