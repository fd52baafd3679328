"""The text of a job as a plan needs it: sequences, targets, and bytes of records. Imports no torch.

It is told by the table of ``kd.capture.estimate``, or read from the manifest of a sealed cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cache.codec import Codec
from cache.errors import PotstillError
from cache.store import read_manifest
from kd.capture.codec_identity import make_codec_identity
from kd.capture.estimate.job import estimate_vocabulary_size, measure_capture, require_capture
from kd.capture.estimate.storage import estimate_decoded_bytes
from kd.capture.estimate.text import CaptureSize
from kd.config.job import JobConfig
from kd.files import find_caches
from kd.memory.host import choose_chunk_memory
from kd.models.folder import ModelFolder

#: A vocabulary for a codec of whose records nobody asks the size.
_ANY_VOCABULARY = 1 << 16


@dataclass(frozen=True)
class TextSize:
    """The sequences of both splits, the positions with a target of one, and the loader's bytes.

    ``train`` is None where the text cannot be read here. ``codec`` is that of the teacher's
    records; None where the job has none.
    """

    train: int | None
    validation: int
    length: int
    targets: float
    loader: int
    codec: Codec | None


@dataclass(frozen=True)
class TextFiles:
    """Where the text of a job lies: relative paths start at ``root``, caches are in ``home``.

    ``measure`` and ``find_vocabulary`` read the text and the teacher's vocabulary; the API keeps
    their answers.
    """

    root: Path
    home: Path
    measure: Callable[[JobConfig, Path], CaptureSize]
    find_vocabulary: Callable[[], int]

    @classmethod
    def of(cls, config: JobConfig, root: Path, home: Path) -> TextFiles:
        """Read the files anew at each question."""
        return cls(root, home, measure_text, lambda: estimate_vocabulary_size(config, root))


def measure_text(config: JobConfig, root: Path) -> CaptureSize:
    """Count the text of a job, as a capture of it would."""
    # A job of kind train reads records that a capture of the same text makes.
    return measure_capture(config.model_copy(update={"kind": "distill"}), root)[0]


def find_text_size(config: JobConfig, files: TextFiles) -> TextSize:
    """Find the size of the job's text: of its sealed cache, or of its files."""
    cap = choose_chunk_memory(config.require_train()) if config.needs_cache else 0
    try:
        work, codec = _find_sizes(config, files)
    except PotstillError:  # text of the hub, or that only the worker can read
        length = config.data.sequence_length
        codec = make_codec_identity(config.cache).record_codec(_ANY_VOCABULARY)
        return TextSize(None, 0, length, float(length - 1), cap, codec if cap else None)
    records = work.positions * estimate_decoded_bytes(codec, _find_teacher_width(config, files))
    return TextSize(
        train=work.train_sequences,
        validation=work.validation_sequences,
        length=work.sequence_length,
        targets=work.positions / max(work.sequences, 1),
        loader=min(round(records), cap),
        codec=codec if config.needs_cache else None,
    )


def _find_sizes(config: JobConfig, files: TextFiles) -> tuple[CaptureSize, Codec]:
    """The sequences and positions of a job, and the codec of its records."""
    if config.cache.fingerprint is None:
        require_capture(config.model_copy(update={"kind": "distill"}))
        work = files.measure(config, files.root)
        return work, make_codec_identity(config.cache).record_codec(files.find_vocabulary())
    identity = read_manifest(
        find_caches(files.home, config.cache.store) / config.cache.fingerprint
    ).identity
    data = identity.data
    work = CaptureSize(
        train_sequences=data.train_sequences,
        validation_sequences=data.validation_sequences,
        sequence_length=data.sequence_length,
        positions=data.sequences * (data.sequence_length - 1),
        counted=True,
    )
    return work, identity.record_codec()


def _find_teacher_width(config: JobConfig, files: TextFiles) -> int:
    if config.teacher is None:
        return 0
    folder = ModelFolder.find(config.teacher.model, files.root, config.teacher.revision)
    return (folder.hidden_width if folder is not None else None) or 0
