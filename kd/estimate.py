"""What a capture will need, before anything runs: tokens, bytes, and whether the disk holds them. Imports no torch.

    from the table   tokens counted in a sample of the text, bytes a token as measured once on another teacher
    from a trial     tokens counted in full, bytes and seconds of a few micro-batches of the teacher (``kd.trial``)

Bytes of profiles threshold and tempered depend on how sure the teacher is; those of topk, dense and hidden are
arithmetic, before compression. Measured on SmolLM2-135M-Instruct (V = 49,152, mean entropy 3.5 nats) reading 16,384
tokens of *Persuasion* in sequences of 256, by the difference of shards of 64 and of 32 sequences, everything counted.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache.codec import Codec, id_dtype
from cache.disk import files_below
from cache.errors import PotstillError, StorageError
from cache.manifest import CacheIdentity, CodecIdentity
from cache.profiles import PROFILES
from kd.config.cache import CacheConfig
from kd.config.job import JobConfig
from kd.data import find_files, format_of, held_out_count
from kd.errors import ConfigError, DataError, Problem

#: Bytes of English text a token, where the tokenizer cannot be had.
BYTES_PER_TOKEN = 4.0
#: Bytes of text that are read for an estimate, over all files, and how many files at most.
SAMPLE_BYTES, SAMPLE_FILES = 1 << 19, 16
#: Text in a compressed Parquet file, as a multiple of its size.
PARQUET_EXPANSION = 2.5
#: What must stay free beside the cache: a share of it, and something for everything else.
MARGIN, RESERVE_BYTES = 0.05, 64 * 2**20

#: threshold -> bytes a position but for tails, bytes of one draw's tails, entries.
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
_MEASURED_VOCABULARY = 49_152
#: What an entry grows by when the vocabulary doubles: less than a bit, because ids are coded by their frequency.
#: Measured between that one and the example's 2,048 (19.4 bytes a token).
_BITS_A_DOUBLING = 0.43
#: Of a shard: metadata, seal, manifest line, and what compression needs to begin with; and a byte's share for each
#: token of its frequency table.
_SHARD_BYTES = {"threshold": 8_000, "tempered": 45_000, "topk": 8_000, "dense": 6_000, "hidden": 6_000}
_TABLE_BYTES = 0.15


@dataclass(frozen=True)
class Work:
    """The text of a job as its capture will see it; ``counted`` in full, or estimated from a sample."""

    train_sequences: int
    validation_sequences: int
    sequence_length: int
    positions: int
    counted: bool

    @property
    def sequences(self) -> int:
        """Sequences of both splits."""
        return self.train_sequences + self.validation_sequences


@dataclass(frozen=True)
class Storage:
    """Bytes on disk: of a position with all that belongs to it, of a shard whatever is in it, and of the LM head."""

    position: float
    shard: float
    head: int = 0

    def total(self, positions: int, shards: int) -> int:
        """Bytes of a whole cache."""
        return math.ceil(self.position * positions + self.shard * shards) + self.head


@dataclass(frozen=True)
class Estimate:
    """What a capture will need; ``seconds`` and ``device`` are None where no teacher was run.

    ``bytes_per_token`` is per position with a record, everything counted. ``fits`` says whether the disk holds it.
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

    @classmethod
    def of(
        cls, work: Work, storage: Storage, shard_sequences: int, free: int, pace: tuple[float, str] | None = None
    ) -> Estimate:
        """The estimate of ``work``; ``pace`` is seconds a sequence, and the device they were measured on."""
        shards = math.ceil(work.sequences / shard_sequences)
        size = storage.total(work.positions, shards)
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
        )

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain JSON values."""
        return asdict(self)


def estimate_by_table(config: JobConfig, root: Path, home: Path) -> Estimate:
    """The estimate of a job without running its teacher; relative paths are taken from ``root``.

    Raises ``ConfigError`` where the job captures nothing or its size cannot be known so.
    """
    require_capture(config)
    tokenizer = _Tokenizer.find(config, root)
    work = _work(config, root, tokenizer)
    codec = codec_identity(config.cache).record_codec(tokenizer.size)
    width = _width(config, root) if codec.profile == "hidden" else 0
    return Estimate.of(work, storage_by_table(codec, width), config.cache.shard_sequences, free_bytes(home))


def require_capture(config: JobConfig) -> None:
    """Raise ``ConfigError`` for a job that captures nothing."""
    if config.kind == "train" or config.teacher is None:
        raise ConfigError([Problem("/kind", f"a job of kind {config.kind} captures nothing to estimate.")])


def vocabulary_size(config: JobConfig, root: Path) -> int:
    """Tokens that the tokenizer of the job's teacher knows; by its config.json, or a guess, where it is not at hand."""
    return _Tokenizer.find(config, root).size


def free_bytes(folder: Path) -> int:
    """Bytes left on the disk of ``folder``, which need not exist."""
    existing = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    return shutil.disk_usage(existing).free


# ---------------------------------------------------------------------- bytes


def codec_identity(options: CacheConfig) -> CodecIdentity:
    """What a job keeps of each position, and with which random numbers."""
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
    )


def storage_by_table(codec: Codec, width: int = 0) -> Storage:
    """Bytes of a cache of ``codec``; ``width`` is D, for profile hidden."""
    shard = float(_SHARD_BYTES[codec.profile])
    if PROFILES[codec.profile].sampled:
        shard += _TABLE_BYTES * codec.vocabulary_size
        rest, tail, entries = _interpolated(codec.profile, codec.threshold)
        longer = _BITS_A_DOUBLING * math.log2(codec.vocabulary_size / _MEASURED_VOCABULARY) / 8 * entries
        return Storage(max(rest + tail * codec.draws + longer, 1.0) + 2 * len(codec.always_keep), shard)
    id_bytes = id_dtype(codec.vocabulary_size).itemsize
    every = id_bytes + 3  # the token itself, its log-probability and the entropy
    own = {
        "topk": codec.k * (id_bytes + 2) + 2,
        "dense": codec.vocabulary_size * codec.bits // 8,
        "hidden": width * codec.bits // 8 + 4,
    }
    head = codec.vocabulary_size * width * 4 if codec.profile == "hidden" else 0
    return Storage(float(every + own[codec.profile]), shard, head)


def _interpolated(profile: str, threshold: float) -> tuple[float, float, float]:
    """The table's numbers at ``threshold``, linear in its logarithm; beyond its ends, its ends."""
    rows = sorted(_MEASURED[profile].items())
    places = np.log([row[0] for row in rows])
    rest, tail, entries = (
        float(np.interp(math.log(threshold), places, [row[1][column] for row in rows])) for column in range(3)
    )
    return rest, tail, entries


def require_space(folder: Path, identity: CacheIdentity, positions: int, width: int) -> None:
    """Raise ``StorageError`` where the disk can certainly not hold the cache that will lie in ``folder``.

    What is there of it counts. A teacher may be surer than the table's: half of what that says must fit.
    """
    codec = identity.record_codec()
    need = storage_by_table(codec, width).total(positions, identity.shard_count)
    need -= sum(files_below(folder).values())
    free = free_bytes(folder)
    if need * 0.5 > free:
        raise StorageError(
            f"{folder} needs about {_readable(need)} for {positions:,} tokens of profile {codec.profile}, but "
            f"{_readable(free)} is free.",
            "Free space, set KD_HOME to another disk, or keep less: a larger cache.threshold, or fewer sequences "
            "(data.max_train_samples). `kd estimate` tells before.",
        )


def _readable(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


# ---------------------------------------------------------------------- text


@dataclass(frozen=True)
class _Tokenizer:
    """Tokens in a text, and how many there are in all: by tokenizer.json, or by rule of thumb."""

    size: int
    inner: Any = None

    @classmethod
    def find(cls, config: JobConfig, root: Path) -> _Tokenizer:
        """The teacher's, where its file is on this machine."""
        path = _teacher_file(config, root, "tokenizer.json")
        if path is None:
            size = _shape(config, root).get("vocab_size")
            return cls(size if isinstance(size, int) and size > 1 else _MEASURED_VOCABULARY)
        from tokenizers import Tokenizer

        try:
            inner = Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no class of its own for this
            raise _unreadable("tokenizer.json", error) from None
        return cls(max(inner.get_vocab(with_added_tokens=True).values()) + 1, inner)

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        if self.inner is None:
            return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)
        return len(self.inner.encode(text, add_special_tokens=False).ids)


def _teacher_file(config: JobConfig, root: Path, name: str) -> Path | None:
    """A small file of the teacher's, where it is on this machine: in its folder, or in the hub's cache."""
    teacher = config.teacher
    assert teacher is not None
    model = teacher.tokenizer or teacher.model
    if (root / model).is_dir():
        return path if (path := root / model / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, name, revision=teacher.revision)
    except ValueError:  # not of the form of a hub id
        return None
    return Path(found) if isinstance(found, str) else None


def _shape(config: JobConfig, root: Path) -> dict[str, Any]:
    """The teacher's config.json, empty where it is not on this machine."""
    path = _teacher_file(config, root, "config.json")
    return {} if path is None else _json(path)


def _width(config: JobConfig, root: Path) -> int:
    if width := _width_in(_shape(config, root)):
        return width
    detail = "the width of its hidden states is not known without its config.json."
    raise ConfigError([Problem("/teacher/model", detail, "Estimate without --fast.")])


def hidden_width(folder: Path) -> int:
    """D of the model in ``folder`` by its config.json; 0 where it does not say."""
    return _width_in(_json(folder / "config.json"))


def _width_in(shape: dict[str, Any]) -> int:
    names = ("hidden_size", "n_embd", "d_model", "dim")
    return next((shape[name] for name in names if isinstance(shape.get(name), int)), 0)


def _json(path: Path) -> dict[str, Any]:
    """A config.json with what concerns text at its top, empty where there is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return {**document, **(document.get("text_config") or {})}
    except (ValueError, TypeError, AttributeError) as error:  # no JSON, or of another shape
        raise _unreadable(path.name, error) from None


def _unreadable(name: str, error: Exception) -> ConfigError:
    return ConfigError([Problem("/teacher/model", f"its {name} cannot be read: {error}.", "Save the model again.")])


@dataclass(frozen=True)
class _Text:
    """What some text comes to: tokens, those that are learned, documents, and sequences if they are not packed."""

    tokens: float = 0.0
    learned: float = 0.0
    documents: float = 0.0
    unpacked: float = 0.0

    def __add__(self, other: _Text) -> _Text:
        return _Text(*(mine + theirs for mine, theirs in zip(_numbers(self), _numbers(other), strict=True)))

    def times(self, factor: float) -> _Text:
        return _Text(*(number * factor for number in _numbers(self)))


def _numbers(text: _Text) -> tuple[float, ...]:
    return (text.tokens, text.learned, text.documents, text.unpacked)


def _work(config: JobConfig, root: Path, tokenizer: _Tokenizer) -> Work:
    data = config.data
    train = _Reading(config, root, tokenizer).of("train")
    held_out = _Reading(config, root, tokenizer).of("validation") if data.validation else train

    def sequences(text: _Text) -> int:
        return max(math.ceil(text.tokens / data.sequence_length if data.packing else text.unpacked), 1)

    count = sequences(train)
    held = sequences(held_out) if data.validation else held_out_count(count, data.held_out_fraction)
    kept = min(count if data.validation else count - held, data.max_train_samples or count)
    kept_held = min(held, data.max_eval_samples or held)
    positions = _positions(train, count) * kept + _positions(held_out, sequences(held_out)) * kept_held
    return Work(kept, kept_held, data.sequence_length, math.ceil(positions), counted=False)


def _positions(text: _Text, sequences: int) -> float:
    """Targets a sequence: every learned token but the first of each document and of each sequence."""
    share = text.learned / max(text.tokens, 1.0)
    return max((text.tokens - text.documents - sequences) * share / sequences, 0.0)


@dataclass(frozen=True)
class _Reading:
    """Reads a little of every file, or of some of them, and takes the rest to be like it."""

    config: JobConfig
    root: Path
    tokenizer: _Tokenizer

    def of(self, field: str) -> _Text:
        """What ``data.train`` or ``data.validation`` comes to."""
        sources = getattr(self.config.data, field)
        for number, source in enumerate(sources):
            if not isinstance(source, str):
                detail = f"the size of dataset {source.path!r} is not known without reading it."
                raise ConfigError([Problem(f"/data/{field}/{number}", detail, "Estimate without --fast.")])
        files = [file for source in sources for file in find_files(source, self.root)]
        if not files:
            raise DataError(f"data.{field}: no file matches {sources}.", "Give a file, a folder or a glob.")
        every = max(len(files) // SAMPLE_FILES, 1)
        chosen = files[::every]
        read = sum((self._readable(file, SAMPLE_BYTES // len(chosen)) for file in chosen), _Text())
        return read.times(_size(files) / max(_size(chosen), 1))

    def _readable(self, path: Path, limit: int) -> _Text:
        try:
            return self._file(path, limit)
        except PotstillError:
            raise
        except Exception as error:  # json, gzip, pyarrow, rows of another kind: each has classes of its own
            what = f"{path} cannot be read as data.format {self.config.data.format}: {type(error).__name__}: {error}."
            raise DataError(what, "Correct it, or set data.format.") from error

    def _file(self, path: Path, limit: int) -> _Text:
        kind = format_of(path, self.config.data)
        if "parquet" in (kind, path.suffix.removeprefix(".")):
            tokens = path.stat().st_size * PARQUET_EXPANSION / BYTES_PER_TOKEN
            return self._documents(tokens, tokens, max(tokens / 512, 1.0))
        data, share = _beginning(path, limit)
        if kind == "text":
            tokens = self.tokenizer.count(data.decode("utf-8", "ignore")) / share
            return self._documents(tokens, tokens, 1.0)
        return sum((self._row(row) for row in _rows(data)), _Text()).times(1 / share)

    def _row(self, row: dict[str, Any]) -> _Text:
        data = self.config.data
        if data.format != "messages":
            tokens = self.tokenizer.count(str(row.get(data.text_column) or "")) + 1
            return self._documents(tokens, tokens, 1.0)
        chat = row["messages"]
        said = [(each.get("role"), self.tokenizer.count(str(each.get("content") or "")) + 4) for each in chat]
        answers = sum(count for role, count in said if role == "assistant" or not data.assistant_only_loss)
        return self._documents(sum(count for _, count in said), answers, 1.0)

    def _documents(self, tokens: float, learned: float, count: float) -> _Text:
        return _Text(tokens, learned, count, count * math.ceil(tokens / count / self.config.data.sequence_length))


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _beginning(path: Path, limit: int) -> tuple[bytes, float]:
    """The first ``limit`` bytes, unpacked, and the share of the file that they are."""
    packed = path.suffix == ".gz"
    with gzip.open(path) if packed else path.open("rb") as file:
        data = file.read(limit)
        whole = not file.read(1)
    return data, 1.0 if whole else (len(zlib.compress(data)) if packed else limit) / path.stat().st_size


def _rows(data: bytes) -> Iterator[dict[str, Any]]:
    """The rows of JSON lines or of a JSON array, up to the first that is torn or no object."""
    text, decoder, place = data.decode("utf-8-sig", "ignore"), json.JSONDecoder(), 0
    while (start := text.find("{", place)) >= 0:
        try:
            row, place = decoder.raw_decode(text, start)
        except ValueError:
            return
        yield row
