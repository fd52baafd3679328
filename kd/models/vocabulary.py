"""V, the number of token ids that count in a job: those that its tokenizer and its models have.

A model may have more rows than its tokenizer has ids (padding), and a tokenizer may have ids that
its model has no rows for: Gemma 3 has 262,144 rows, and its tokenizer a token of pictures beyond
them. V is the smaller number; only a text that holds an id from V on cannot be used.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd.addresses import ModelSource
from kd.config.student import StudentConfig
from kd.models.folder import ModelFolder, resolve_model, resolve_source
from kd.models.lm_head import count_rows
from kd.models.tokenizers import get_vocabulary_size
from kd.text.batches import Source


def choose_source_vocabulary(
    tokenizer: PreTrainedTokenizerBase, source: ModelSource, folder: Path
) -> int:
    """Return V of a teacher and the tokenizer in ``folder``, by the files of ``source`` there.

    A GGUF file has a row for each of its tokens.
    """
    if source.gguf_file is not None:
        return get_vocabulary_size(tokenizer)
    return choose_folder_vocabulary(tokenizer, folder)


def choose_student_vocabulary(
    tokenizer: PreTrainedTokenizerBase, student: StudentConfig | None, teacher: ModelSource | None
) -> int:
    """Return V of a student, by the files that it is built from; a fresh one has all ids.

    ``teacher`` is the model that a student may be cut out of.
    """
    if student is not None and student.model is not None:
        return choose_folder_vocabulary(tokenizer, resolve_model(student.model, student.revision))
    if student is not None and student.from_teacher is not None and teacher is not None:
        return choose_source_vocabulary(tokenizer, teacher, resolve_source(teacher))
    return get_vocabulary_size(tokenizer)


def choose_folder_vocabulary(tokenizer: PreTrainedTokenizerBase, folder: Path) -> int:
    """Return V of the model in ``folder``, whose rows config.json counts."""
    ids = get_vocabulary_size(tokenizer)
    return min(ids, ModelFolder(folder).vocabulary_size or ids)


def choose_run_vocabulary(
    source: Source, tokenizer: PreTrainedTokenizerBase, *models: PreTrainedModel
) -> int:
    """Return V of ``models`` that read ``source``: that of its cache, if it is one."""
    if source.codec is not None:
        return source.codec.vocabulary_size
    return min(get_vocabulary_size(tokenizer), *map(count_rows, models))
