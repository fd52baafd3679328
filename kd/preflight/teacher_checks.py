"""What a teacher lacks, found before it runs: files, packages, the operator's consent.

Every check of a teacher that needs no other section of the job stands here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from kd.config.extras import NO_GGUF, NO_QUANTIZER, is_torchao_installed
from kd.config.teacher import TeacherConfig
from kd.errors import Problem
from kd.models.folder import (
    ROUNDS_PLAIN_WEIGHTS,
    SPREADS_PLAIN_WEIGHTS,
    ModelFolder,
    is_remote_code_allowed,
    locate_model,
)
from kd.preflight.named_paths import point_at_teacher
from kd.preflight.validate import (
    ask_folder,
    check_context,
    check_model,
    check_tokenizer,
    guard_access,
)


def find_teacher_problems(
    teacher: TeacherConfig, root: Path, is_cut: bool, length: int | None
) -> Iterator[Problem]:
    """Find what the files of a teacher lack; relative paths start at ``root``.

    ``is_cut``: the student is cut out of it. ``length`` are the tokens of a sequence that it must
    read; None if that is not known.
    """
    source = teacher.files
    pointer = point_at_teacher(source)
    if not source.has_weights:
        yield from guard_access(pointer, check_tokenizer(pointer, source.name, root))
    else:
        yield from guard_access(pointer, check_model(pointer, source.name, root, source.gguf_file))
        if source.trust_remote_code and not is_remote_code_allowed():
            what = "the operator does not allow it."
            yield Problem("/teacher/trust_remote_code", what, "Set KD_TRUST_REMOTE_CODE=1.")
    if teacher.proposal is not None:
        model = ("/teacher/proposal", teacher.proposal, root, None)
        yield from guard_access(model[0], check_model(*model))
    if teacher.is_local and teacher.gguf_file is None:
        yield from guard_access(pointer, _check_stored_weights(teacher, root, is_cut))
    if length is not None:
        pointer = "/teacher/max_length" if teacher.has_context else "/data/sequence_length"
        yield from guard_access(pointer, check_context(teacher.model, length, root, pointer))


def _check_stored_weights(teacher: TeacherConfig, root: Path, is_cut: bool) -> Iterator[Problem]:
    """Find stored quantised weights where the job needs plain ones."""
    folder = ModelFolder(locate_model(teacher.model, root))
    if is_cut:
        require = ModelFolder.require_trainable_weights
        yield from ask_folder("/student/from_teacher", folder, require)
    if teacher.parallel != "none":
        whole = partial(ModelFolder.require_plain_weights, why=SPREADS_PLAIN_WEIGHTS)
        yield from ask_folder("/teacher/parallel", folder, whole)
    if teacher.quantization is not None:
        plain = partial(ModelFolder.require_plain_weights, why=ROUNDS_PLAIN_WEIGHTS)
        yield from ask_folder("/teacher/quantization", folder, plain)


def find_missing_head(teacher: TeacherConfig, root: Path) -> Iterator[Problem]:
    """Find that the files of a served teacher lack the LM head that profile hidden stores."""
    folder = ModelFolder(locate_model(teacher.files.name, root))
    if folder.has_config and not folder.weight_files:
        what = f"profile hidden stores the LM head, but {folder.path} has no *.safetensors."
        remedy = "Set teacher.tokenizer to a local folder of the whole model."
        yield Problem(point_at_teacher(teacher.files), what, remedy)


def find_missing_readers(teacher: TeacherConfig) -> list[Problem]:
    """Find that this machine lacks what reads a teacher: torchao to quantise it, or gguf."""
    found = [NO_QUANTIZER] if teacher.quantization and not is_torchao_installed() else []
    return found + ([NO_GGUF] if teacher.gguf_file and find_spec("gguf") is None else [])


def find_unreadable_weights(teacher: TeacherConfig, root: Path) -> Iterator[Problem]:
    """Find that the stored weights of a teacher need a package that this machine lacks."""
    if teacher.is_local and teacher.gguf_file is None:
        folder = ModelFolder(locate_model(teacher.model, root))
        yield from ask_folder("/teacher/model", folder, ModelFolder.require_readable_weights)
