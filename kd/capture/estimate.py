"""Estimate the tokens and bytes of a capture before it runs, and check the free disk space.

Imports no torch.

    by table   counts tokens in a sample of the text; bytes per token were measured once, on another
               teacher
    by trial   counts all tokens; measures bytes and seconds of a few micro-batches
               (``kd.capture.probe``)

The bytes of profiles threshold and tempered depend on the teacher's entropy. Those of topk, dense
and hidden follow from the format; compression makes them fewer. The table was measured on
SmolLM2-135M-Instruct (V = 49,152, mean entropy 3.5 nats) reading 16,384 tokens of *Persuasion* in
sequences of 256. It is the difference between shards of 64 and of 32 sequences, so it counts every
byte that grows with the number of positions.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache.codec import Codec, choose_id_dtype
from cache.disk import list_file_sizes
from cache.errors import PotstillError, StorageError
from cache.manifest import CacheIdentity, CodecIdentity, choose_codec_version
from cache.profiles import PROFILES
from cache.records import AXES
from kd.config.cache import CacheConfig
from kd.config.job import JobConfig
from kd.errors import ConfigError, DataError, ModelError, Problem
from kd.files import format_bytes, measure_free_bytes
from kd.models.folder import ModelFolder
from kd.text.chats import Chat
from kd.text.corpus import count_held_out, count_kept_held_out, describe_held_out
from kd.text.files import choose_format, find_files, is_saved_dataset, unpack
from kd.text.mixtures import name_source
from kd.text.rows import COLUMNS, Completion, read_cell

#: Bytes of English text per token; used where the tokenizer is not on this machine.
BYTES_PER_TOKEN = 4.0
#: Bytes of text that an estimate reads, over all files together.
SAMPLE_BYTES = 1 << 19
#: The most files that an estimate reads.
SAMPLE_FILES = 16
#: The size of the text in a compressed Parquet file, as a multiple of the size of the file.
PARQUET_EXPANSION = 2.5
#: Disk space that must stay free beside the cache, as a share of the cache: estimates err.
MARGIN = 0.05
#: Bytes that must stay free for logs, checkpoints and other programs.
RESERVE_BYTES = 64 * 2**20

#: For each threshold: bytes per position without its tails, bytes of the tails of one draw,
#: entries.
_MEASURED: dict[str, dict[float, tuple[float, float, float]]] = {
    "threshold": {
        0.25: (4.9, 2.7, 2.5),
        0.125: (6.2, 5.1, 4.9),
        0.08: (7.3, 7.4, 7.3),
        0.04: (10.0, 12.6, 12.9),
        0.02: (14.5, 20.7, 22.4),
        0.01: (22.2, 33.1, 38.1),
        0.004: (40.9, 59.5, 74.9),
        0.001: (106.0, 137.0, 195.3),
    },
    "tempered": {
        0.25: (18.5, 4.9, 2.5),
        0.125: (18.7, 10.0, 5.0),
        0.08: (20.3, 15.2, 7.6),
        0.04: (21.2, 28.3, 14.1),
        0.02: (24.6, 51.4, 26.1),
        0.01: (29.1, 92.4, 48.1),
        0.004: (44.3, 197.3, 108.1),
        0.001: (104.0, 617.0, 362.9),
    },
}
#: V of the teacher that the table was measured on.
_MEASURED_VOCABULARY = 49_152
#: Bits that an entry grows by when the vocabulary doubles; less than 1, because ids are coded by
#: their frequency. Measured between that vocabulary and the example's 2,048 (19.4 bytes per token).
_BITS_PER_DOUBLING = 0.43
#: Bytes of a shard that do not depend on its content: metadata, seal, manifest line, and the start
#: of each compressed stream.
_SHARD_BYTES = {
    "threshold": 8_000,
    "tempered": 45_000,
    "topk": 8_000,
    "dense": 6_000,
    "hidden": 6_000,
}
#: Share of the entries of a record that are heads, and numbers of the log-partition at its
#: temperatures: measured on the example at thresholds of 0.04 and 0.01.
_HEAD_SHARE = 0.22
_PARTITION_NUMBERS = 8
#: Bytes of a shard's frequency table, for each token of the vocabulary.
_TABLE_BYTES = 0.15


@dataclass(frozen=True)
class CaptureSize:
    """The sequences and positions of a capture.

    ``counted`` is true if all text was counted, and false if a sample was. ``held_out`` says which
    sequences are held out, and why.
    """

    train_sequences: int
    validation_sequences: int
    sequence_length: int
    positions: int
    counted: bool
    held_out: str = ""

    @property
    def sequences(self) -> int:
        """The number of sequences in both splits."""
        return self.train_sequences + self.validation_sequences


@dataclass(frozen=True)
class CacheSize:
    """Bytes on disk: of each position, of each shard besides its positions, and of the LM head."""

    position: float
    shard: float
    lm_head: int = 0

    def sum_bytes(self, positions: int, shards: int) -> int:
        """Return the bytes of a whole cache."""
        return math.ceil(self.position * positions + self.shard * shards) + self.lm_head


@dataclass(frozen=True)
class Estimate:
    """The size and duration of a capture.

    ``seconds``, ``hours`` and ``device`` are None if no teacher was run. ``bytes_per_token``
    divides all bytes by the positions with a record. ``fits`` says whether the disk has enough free
    space.
    """

    method: str
    tokens: int
    tokens_counted: bool
    train_sequences: int
    validation_sequences: int
    positions: int
    shards: int
    bytes_per_token: float
    bytes: int
    free_bytes: int
    fits: bool
    seconds: float | None = None
    hours: float | None = None
    device: str | None = None
    held_out: str = ""

    @classmethod
    def of(
        cls,
        work: CaptureSize,
        storage: CacheSize,
        shard_sequences: int,
        free: int,
        pace: tuple[float, str] | None = None,
    ) -> Estimate:
        """Compute the estimate.

        ``pace`` is the seconds per sequence and the device they were measured on.
        """
        shards = math.ceil(work.sequences / shard_sequences)
        size = storage.sum_bytes(work.positions, shards)
        seconds = None if pace is None else pace[0] * work.sequences
        return cls(
            method="table" if pace is None else "trial",
            tokens=work.sequences * work.sequence_length,
            tokens_counted=work.counted,
            train_sequences=work.train_sequences,
            validation_sequences=work.validation_sequences,
            positions=work.positions,
            shards=shards,
            bytes_per_token=round(size / max(work.positions, 1), 2),
            bytes=size,
            free_bytes=free,
            fits=size * (1 + MARGIN) + RESERVE_BYTES <= free,
            seconds=None if seconds is None else round(seconds, 1),
            hours=None if seconds is None else round(seconds / 3600, 3),
            device=None if pace is None else pace[1],
            held_out=work.held_out,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        return asdict(self)


def estimate_by_table(config: JobConfig, root: Path, home: Path) -> Estimate:
    """Estimate a job's capture without running its teacher; relative paths start at ``root``.

    Raises ``ConfigError`` where the job captures nothing, or where only a trial can find its size.
    """
    work, storage = measure_capture(config, root)
    return Estimate.of(work, storage, config.cache.shard_sequences, measure_free_bytes(home))


def measure_capture(config: JobConfig, root: Path) -> tuple[CaptureSize, CacheSize]:
    """Return what ``estimate_by_table`` reads from files: the size of the text and of its cache.

    Raises what that function raises.
    """
    require_capture(config)
    tokenizer = _TokenCounter.find(config, root)
    work = _estimate_capture_size(config, root, tokenizer)
    codec = make_codec_identity(config.cache).record_codec(tokenizer.size)
    width = _require_width(config, root) if codec.profile == "hidden" else 0
    return work, estimate_cache_size(codec, width)


def list_measured_files(config: JobConfig, root: Path) -> list[Path]:
    """List the files on which the result of ``measure_capture`` depends."""
    texts = {
        source
        for source in (*config.data.train, *config.data.validation)
        if isinstance(source, str)
    }
    files = [file for source in texts for file in find_files(source, root)]
    return files + list_teacher_files(config, root)


def list_teacher_files(config: JobConfig, root: Path) -> list[Path]:
    """List the files in the folder of the teacher's tokenizer, if it is on this machine."""
    folder = _find_teacher_folder(config, root)
    return [] if folder is None else [file for file in folder.path.iterdir() if file.is_file()]


def require_capture(config: JobConfig) -> None:
    """Raise ``ConfigError`` for a job that captures nothing."""
    if config.kind == "train" or config.teacher is None:
        raise ConfigError(
            [Problem("/kind", f"a job of kind {config.kind} captures nothing to estimate.")]
        )


def estimate_vocabulary_size(config: JobConfig, root: Path) -> int:
    """Return the vocabulary size of the teacher's tokenizer.

    Where the tokenizer is not on this machine, the size comes from config.json, or is a guess.
    """
    return _TokenCounter.find(config, root).size


# ---------------------------------------------------------------------- bytes


def make_codec_identity(options: CacheConfig, dtype: str = "") -> CodecIdentity:
    """Return what a job stores for each position, and the seed of its random numbers.

    ``dtype`` is that of the teacher, where it is known.
    """
    return CodecIdentity(
        profile=options.profile,
        threshold=options.threshold if options.sampled else 0.0,
        temperatures=options.range,
        always_keep=options.always_keep,
        draws=options.draws,
        k=options.entries,
        bits=options.bits,
        seed=options.seed,
        shard_sequences=options.shard_sequences,
        version=choose_codec_version(options.profile, options.bits, dtype),
    )


def estimate_cache_size(codec: Codec, width: int = 0) -> CacheSize:
    """Estimate the bytes of a cache with ``codec``.

    Profile hidden needs ``width``, D of the teacher.
    """
    shard = float(_SHARD_BYTES[codec.profile])
    if PROFILES[codec.profile].sampled:
        shard += _TABLE_BYTES * codec.vocabulary_size
        rest, tail, entries = _interpolate(codec.profile, codec.threshold)
        longer = (
            _BITS_PER_DOUBLING
            * math.log2(codec.vocabulary_size / _MEASURED_VOCABULARY)
            / 8
            * entries
        )
        return CacheSize(
            max(rest + tail * codec.draws + longer, 1.0) + 2 * len(codec.always_keep), shard
        )
    id_bytes = choose_id_dtype(codec.vocabulary_size).itemsize
    # Every record has the next token, its log-probability (2 bytes) and the entropy (1 byte).
    every = id_bytes + 3
    own = {
        "topk": codec.k * (id_bytes + 2) + 2,
        "dense": codec.vocabulary_size * codec.bits // 8,
        "hidden": width * codec.bits // 8 + 4,
    }
    lm_head = codec.vocabulary_size * width * 4 if codec.profile == "hidden" else 0
    return CacheSize(float(every + own[codec.profile]), shard, lm_head)


def estimate_entries(codec: Codec) -> float:
    """Estimate the head and tail entries of a record of one draw; 0 where nothing is sampled."""
    if codec.profile not in _MEASURED:
        return 0.0
    return _interpolate(codec.profile, codec.threshold)[2]


def estimate_decoded_bytes(codec: Codec, width: int = 0) -> float:
    """Estimate the bytes of a decoded record in memory; ``width`` is D of a profile hidden."""
    entries = estimate_entries(codec)
    rows = {
        "position": 1.0,
        "head": _HEAD_SHARE * entries,
        "tail": (1 - _HEAD_SHARE) * entries * codec.draws,
    }
    # Columns with more than one number for each row of their axis.
    numbers = {
        "known": 1 + len(codec.always_keep),
        "partition": _PARTITION_NUMBERS,
        "top_ids": codec.k,
        "top_logprobs": codec.k,
        "logprobs": codec.vocabulary_size,
        "hidden": width,
    }
    return sum(
        dtype.itemsize * rows[AXES[name]] * numbers.get(name, 1)
        for name, (dtype, _) in codec.schema().items()
    )


def _interpolate(profile: str, threshold: float) -> tuple[float, float, float]:
    """Interpolate the table at ``threshold``, linearly in its logarithm.

    Thresholds beyond the ends of the table get the values of the ends.
    """
    rows = sorted(_MEASURED[profile].items())
    places = np.log([row[0] for row in rows])
    rest, tail, entries = (
        float(np.interp(math.log(threshold), places, [row[1][column] for row in rows]))
        for column in range(3)
    )
    return rest, tail, entries


def estimate_bytes(identity: CacheIdentity, positions: int, width: int) -> int:
    """Return the bytes of a whole cache of ``positions``; ``width`` is the teacher's, or 0."""
    size = estimate_cache_size(identity.record_codec(), width)
    return size.sum_bytes(positions, identity.shard_count)


def require_space(folder: Path, identity: CacheIdentity, positions: int, need: int) -> None:
    """Raise ``StorageError`` where the disk certainly cannot hold ``need`` bytes in ``folder``.

    Bytes of the cache that are already written count as available.
    """
    need -= sum(list_file_sizes(folder).values())
    free = measure_free_bytes(folder)
    # This teacher may have a lower entropy than the table's, and need less: half must fit.
    if need * 0.5 > free:
        raise StorageError(
            f"{folder} needs about {format_bytes(need)} for {positions:,} tokens of profile "
            f"{identity.codec.profile}, but {format_bytes(free)} is free.",
            "Free space, set KD_HOME to another disk, or store less: raise cache.threshold, "
            "or lower data.max_train_samples. Run `kd estimate` to see the size in advance.",
        )


# ---------------------------------------------------------------------- text


@dataclass(frozen=True)
class _TokenCounter:
    """Counts the tokens of a text, with the tokenizer ``inner`` or by ``BYTES_PER_TOKEN``.

    ``size`` is V, the size of the vocabulary.
    """

    size: int
    inner: Any = None

    @classmethod
    def find(cls, config: JobConfig, root: Path) -> _TokenCounter:
        """Return a counter with the teacher's tokenizer, if its file is on this machine."""
        folder = _find_teacher_folder(config, root)
        if folder is None or folder.tokenizer_file is None:
            with _blame_teacher():
                size = None if folder is None else folder.vocabulary_size
            return cls(size or _MEASURED_VOCABULARY)
        from tokenizers import Tokenizer

        try:
            inner = Tokenizer.from_file(str(folder.tokenizer_file))
        except Exception as error:  # the library has no class of its own for this
            raise ConfigError(
                [
                    Problem(
                        "/teacher/model",
                        f"its tokenizer.json cannot be read: {error}.",
                        "Save the model again.",
                    )
                ]
            ) from None
        return cls(max(inner.get_vocab(with_added_tokens=True).values()) + 1, inner)

    def count(self, text: str) -> int:
        """Return the number of tokens in ``text``."""
        if self.inner is None:
            return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)
        return len(self.inner.encode(text, add_special_tokens=False).ids)


def _find_teacher_folder(config: JobConfig, root: Path) -> ModelFolder | None:
    """Return the folder of the teacher's tokenizer and configuration, if it is on this machine."""
    teacher = config.teacher
    assert teacher is not None
    return ModelFolder.find(teacher.tokenizer or teacher.model, root, teacher.revision)


def _require_width(config: JobConfig, root: Path) -> int:
    folder = _find_teacher_folder(config, root)
    with _blame_teacher():
        width = None if folder is None else folder.hidden_width
    if width:
        return width
    detail = "the width of its hidden states is not known without its config.json."
    raise ConfigError([Problem("/teacher/model", detail, "Estimate without --fast.")])


@contextmanager
def _blame_teacher() -> Iterator[None]:
    """Turn a ``ModelError`` into a problem of the job's field teacher.model."""
    try:
        yield
    except ModelError as error:
        raise ConfigError([Problem("/teacher/model", error.detail, error.remedy)]) from None


@dataclass(frozen=True)
class _TextSize:
    """The tokens of a text, those that are learned, its documents, and sequences without packing.

    Numbers are fractional, because a sample is scaled up to the whole text.
    """

    tokens: float = 0.0
    learned: float = 0.0
    documents: float = 0.0
    unpacked: float = 0.0

    def __add__(self, other: _TextSize) -> _TextSize:
        return _TextSize(
            self.tokens + other.tokens,
            self.learned + other.learned,
            self.documents + other.documents,
            self.unpacked + other.unpacked,
        )

    def scale(self, factor: float) -> _TextSize:
        return _TextSize(
            self.tokens * factor,
            self.learned * factor,
            self.documents * factor,
            self.unpacked * factor,
        )


def _estimate_capture_size(config: JobConfig, root: Path, tokenizer: _TokenCounter) -> CaptureSize:
    data = config.data
    sampler = _TextSampler(config, root, tokenizer)
    train = sampler.estimate("train")
    held_out = sampler.estimate("validation") if data.validation else train

    def sequences(text: _TextSize) -> int:
        return max(
            math.ceil(text.tokens / data.sequence_length if data.packing else text.unpacked), 1
        )

    count = sequences(train)
    held = sequences(held_out) if data.validation else count_held_out(count, data.held_out_fraction)
    kept = min(count if data.validation else count - held, data.max_train_samples or count)
    kept_held = count_kept_held_out(held, kept, data)
    positions = (
        _count_positions(train, count) * kept
        + _count_positions(held_out, sequences(held_out)) * kept_held
    )
    return CaptureSize(
        kept,
        kept_held,
        data.sequence_length,
        math.ceil(positions),
        counted=False,
        held_out=describe_held_out(kept_held, kept, data),
    )


def _count_positions(text: _TextSize, sequences: int) -> float:
    """Return the targets per sequence.

    Every learned token is one, except the first of each document and of each sequence.
    """
    share = text.learned / max(text.tokens, 1.0)
    return max((text.tokens - text.documents - sequences) * share / sequences, 0.0)


@dataclass(frozen=True)
class _TextSampler:
    """Estimates the size of a text from the beginnings of some of its files."""

    config: JobConfig
    root: Path
    tokenizer: _TokenCounter

    def estimate(self, field: str) -> _TextSize:
        """Estimate the size of ``data.train`` or ``data.validation``."""
        sources = getattr(self.config.data, field)
        for number, source in enumerate(sources):
            name = name_source(source)
            if not isinstance(source, str) or is_saved_dataset(self.root / name):
                detail = f"the size of dataset {name!r} is not known without reading it."
                raise ConfigError(
                    [Problem(f"/data/{field}/{number}", detail, "Estimate without --fast.")]
                )
        # A source that comes again is looked for once, and counted as often as it comes.
        found = {source: find_files(source, self.root) for source in dict.fromkeys(sources)}
        files = [file for source in sources for file in found[source]]
        if not files:
            raise DataError(
                f"data.{field}: no file matches {sources}.", "Give a file, a folder or a glob."
            )
        different = list(dict.fromkeys(files))
        chosen = different[:: max(len(different) // SAMPLE_FILES, 1)]
        read = sum(
            (self._require_readable(file, SAMPLE_BYTES // len(chosen)) for file in chosen),
            _TextSize(),
        )
        return read.scale(_sum_file_sizes(files) / max(_sum_file_sizes(chosen), 1))

    def _require_readable(self, path: Path, limit: int) -> _TextSize:
        try:
            return self._measure_file(path, limit)
        except PotstillError:
            raise
        # json, gzip, pyarrow and rows of another kind raise classes with no common base.
        except Exception as error:
            detail = (
                f"{path} cannot be read as data.format {self.config.data.format}: "
                f"{type(error).__name__}: {error}."
            )
            raise DataError(detail, "Correct it, or set data.format.") from error

    def _measure_file(self, path: Path, limit: int) -> _TextSize:
        kind = choose_format(path, self.config.data)
        if "parquet" in (kind, path.suffix.removeprefix(".")):
            tokens = path.stat().st_size * PARQUET_EXPANSION / BYTES_PER_TOKEN
            return self._measure_documents(tokens, tokens, max(tokens / 512, 1.0))
        data, share = _read_beginning(path, limit)
        if kind == "text":
            tokens = self.tokenizer.count(data.decode("utf-8", "ignore")) / share
            return self._measure_documents(tokens, tokens, 1.0)
        rows = sum(
            (
                self._measure_row(row, f"{path}: row {number}")
                for number, row in enumerate(_parse_rows(data), 1)
            ),
            _TextSize(),
        )
        return rows.scale(1 / share)

    def _measure_row(self, row: dict[str, Any], place: str) -> _TextSize:
        data = self.config.data
        content = read_cell(row, place, data) if data.format in COLUMNS else None
        if isinstance(content, Completion):
            prompt, answer = map(self.tokenizer.count, (content.prompt, content.completion))
            learned = answer + 1 if data.assistant_only_loss else prompt + answer + 1
            return self._measure_documents(prompt + answer + 1, learned, 1.0)
        if not isinstance(content, Chat):
            tokens = self.tokenizer.count(str(row.get(data.text_column) or "")) + 1
            return self._measure_documents(tokens, tokens, 1.0)
        # A chat template adds about 4 tokens to each message.
        messages = [
            (each.get("role"), self.tokenizer.count(str(each.get("content") or "")) + 4)
            for each in content.messages
        ]
        learned = sum(
            count
            for place, (role, count) in enumerate(messages)
            if (role == "assistant" and place >= content.learned_from)
            or not data.assistant_only_loss
        )
        return self._measure_documents(sum(count for _, count in messages), learned, 1.0)

    def _measure_documents(self, tokens: float, learned: float, count: float) -> _TextSize:
        return _TextSize(
            tokens,
            learned,
            count,
            count * math.ceil(tokens / count / self.config.data.sequence_length),
        )


def _sum_file_sizes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _pack_zstd(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


#: Compresses bytes as a file of the suffix has them.
_PACK: dict[str, Callable[[bytes], bytes]] = {".gz": zlib.compress, ".zst": _pack_zstd}


def _read_beginning(path: Path, limit: int) -> tuple[bytes, float]:
    """Return the first ``limit`` bytes, decompressed, and their share of the file."""
    with path.open("rb") as raw, unpack(path, raw) as file:
        data = file.read(limit)
        whole = not file.read(1)
    if whole:
        return data, 1.0
    # How many bytes of a packed file were read is not known: compress them again to find out.
    read = len(_PACK[path.suffix](data)) if path.suffix in _PACK else limit
    return data, read / path.stat().st_size


def _parse_rows(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines or of a JSON array, up to the first incomplete one."""
    text = data.decode("utf-8-sig", "ignore")
    decoder = json.JSONDecoder()
    place = 0
    while (start := text.find("{", place)) >= 0:
        try:
            row, place = decoder.raw_decode(text, start)
        except ValueError:
            return
        yield row
