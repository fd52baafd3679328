"""Measure how fast a cache is read: cold and warm, in each order, beside a plain read of its files.

    python bench/reader.py [--quick] [--tokens N] [--rounds 3] [--out FILE]
                           [--teacher FOLDER [--gguf-file NAME] --text FILE --length 512]

The first table reads caches of profile threshold at three lengths, on one thread:

    cold       the system has forgotten the cache's files, and no chunk is decoded: one epoch in the
               order windows, with less memory than the decoded cache takes. Each file is hashed.
    warm       a quarter of the same batches, once more, with all their chunks in memory
    shuffled   batches in full random order, with a quarter of the memory of cold
    floor      what cold must do at the least, measured by itself: read every file, hash it,
               decompress its chunks, and copy them once
    wait       share of its time that a student waits which takes 100,000 tokens/s and sleeps in
               between, with one thread that reads ahead; the wait for the first batch is left out

The second table reads caches of the other profiles cold, beside a plain read of the same files. The
last line says how well windows shuffle.

Rates count tokens with a record. "Per core" divides by the time that the processor worked for it,
which other work on the machine changes little; the first column divides by the time on the clock.

The records are captured from a small random teacher at threshold 0.04, or made at random for the
other profiles, and repeated until the shards are as large as a job's: 256 sequences, but half a
million tokens at the most. With ``--teacher`` only the first table is printed, with one row: of the
records of that teacher, which a job of as many tokens would make of the first sequences of a text.
Their tables are fitted to the sequences after them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numcodecs import blosc

from bench.records import add_source_options, read_teacher
from bench.records import make_cache_identity as make_truth_identity
from bench.speed import (
    SIZES,
    SMALL,
    BenchmarkSizes,
    make_cache_identity,
    make_frozen_llama,
    make_random_documents,
    make_teacher,
    read_cpu_name,
)
from bench.support.small.caches import make_codec, make_identity, make_lm_head, make_records
from cache.codec import Codec
from cache.disk import list_file_sizes
from cache.manifest import CacheIdentity, CodecIdentity, Provenance
from cache.profiles.table import PROFILES
from cache.profiles.topk import TopReading
from cache.profiles.whole import HiddenReading
from cache.records import Records, Sequences
from cache.rounding import RecordPositions
from cache.store import Cache, open_cache
from cache.units.dither import DitherTables
from cache.writing.writer import open_writer
from kd.capture.codec_identity import USUAL_CLUSTERS, Recipe
from kd.capture.recording import Recorder
from kd.capture.units.fitting import fit_tables
from kd.config.cache import CacheConfig
from kd.config.train import TrainConfig
from kd.models.loading import hide_progress_bars
from kd.text.shuffling import EpochWindows
from kd.text.steps import order as ordering
from kd.text.steps.reading import TimedIterator, read_training_batches

LENGTHS = (512, 2048, 8192)
#: Tokens of the records that are made before they are repeated.
ORIGINAL_TOKENS = 32_768
#: Tokens of a shard at the most, because one is encoded in memory.
SHARD_TOKENS = 1 << 19
#: Part of the decoded cache for which cold reads have memory; it must hold a window, which is half.
MEMORY_SHARE = 0.75
#: Tokens of a batch, and those that the simulated student takes in a second.
BATCH_TOKENS = 16_384
STUDENT_RATE = 100_000
#: Caches of the other profiles of random records: sequences that are made, and their repetitions.
MADE = {"topk": (128, 2), "dense": (4, 8), "hidden": (32, 8)}
OTHERS = ("tempered", *MADE)
#: Positions with a record in each of these sequences.
MADE_POSITIONS = 64
#: Tokens of the cache of profile tempered.
TEMPERED_TOKENS = 1 << 20
HIDDEN_WIDTH = 1024
TOPK = 50
#: Columns of the second table, and of the first.
OTHER_COLUMNS = (
    "profile",
    "tokens",
    "bytes a token",
    "cold, tokens/s",
    "cold, MB/s",
    "cold, MB/s per core",
    "plain read, MB/s",
)
COLUMNS = (
    "length",
    "tokens",
    "bytes a token",
    "cold, tokens/s",
    "cold, per core",
    "warm, per core",
    "shuffled, per core",
    "floor, per core",
    "wait",
)


@dataclass(frozen=True)
class Reading:
    """Tokens that were read, with the seconds of the wall clock and of the processor."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second by the wall clock."""
        return self.tokens / self.seconds

    @property
    def core_rate(self) -> float:
        """Tokens for each second of a core."""
        return self.tokens / self.cpu_seconds


# ---------------------------------------------------------------------- caches


def repeat(sequences: Sequences, records: Records, times: int) -> tuple[Sequences, Records]:
    """Repeat sequences and their records."""
    return Sequences.concatenate([sequences] * times), Records.concatenate([records] * times)


def seal_repeated(
    root: Path,
    identity: CacheIdentity,
    part: tuple[Sequences, Records],
    tables: DitherTables | None = None,
) -> Path:
    """Seal a cache whose shards all hold ``part``; return its folder.

    A candidate is another token in another sequence, so copies have as many entries, not the same.
    """
    with open_writer(root, identity) as writer:
        if tables is not None:
            writer.write_tables(tables)
        if identity.codec.profile == "hidden":
            head = make_lm_head(identity.tokenizer.vocabulary_size)
            writer.write_lm_head(head)
        writer.write_shard(0, *part)
        # Equal shards have equal files, so that copies save the time to encode them.
        for index in range(1, identity.shard_count):
            name = f"{index:06d}"
            shutil.copytree(writer.folder / "shards/000000", writer.folder / "shards" / name)
            shutil.copy(writer.folder / "seals/000000.json", writer.folder / f"seals/{name}.json")
        writer.finish(Provenance())
    return writer.folder


def choose_rows(tokens: int, length: int) -> tuple[int, int]:
    """Choose the sequences of a shard, and how many of them are made and then repeated."""
    most = min(SHARD_TOKENS, tokens // 2) // length
    rows = min(CacheConfig().shard_sequences, max(most, 1))
    count = min(max(ORIGINAL_TOKENS // length, 1), rows)
    return rows - rows % count, count


def make_sampled_cache(
    root: Path, sizes: BenchmarkSizes, tokens: int, profile: str = "threshold"
) -> Path:
    """Make a cache of a sampled profile of about ``tokens`` tokens, at least two shards."""
    rows, count = choose_rows(tokens, sizes.length)
    original = make_random_documents(sizes, count)
    options = {"clusters": USUAL_CLUSTERS} if PROFILES[profile].dithered else {}
    identity = make_cache_identity(sizes, original, profile, **options)
    teacher = make_teacher(make_frozen_llama(sizes, SMALL), identity, original)
    records = Records.concatenate(each.encode() for each in teacher.deliver(original, 0))
    identity = enlarge_identity(identity, rows, max(tokens // (rows * sizes.length), 2))
    tables = teacher.recorder.tables
    return seal_repeated(root, identity, repeat(original, records, rows // count), tables)


def enlarge_identity(identity: CacheIdentity, rows: int, shards: int) -> CacheIdentity:
    """The identity of a cache of ``shards`` shards of ``rows`` sequences."""
    return replace(
        identity,
        codec=replace(identity.codec, shard_sequences=rows),
        data=replace(identity.data, train_sequences=shards * rows),
    )


def make_taught_cache(root: Path, arguments: argparse.Namespace) -> Path:
    """Make a cache of about ``arguments.tokens`` tokens from the records of a given teacher."""
    truth, _ = read_teacher(arguments)
    rows, count = choose_rows(arguments.tokens, arguments.length)
    if count >= len(truth.hidden):
        sys.exit(f"--sequences {arguments.sequences} leaves none after the {count} of the records.")
    shards = max(arguments.tokens // (rows * arguments.length), 2)
    clusters = Recipe.choose(shards * rows * arguments.length, shards * rows).clusters
    codec = CodecIdentity("threshold", threshold=CacheConfig().threshold, clusters=clusters)
    identity = enlarge_identity(make_truth_identity(truth, codec), rows, shards)
    own = identity.record_codec()
    rest = zip(truth.hidden[count:], truth.gold[count:], strict=True)
    recorder = Recorder(truth.head, own, tables=fit_tables(rest, truth.head, own, clusters))
    original = truth.sequences.select(np.arange(count))
    records = Records.concatenate(
        recorder.record(truth.hidden[number], truth.gold[number], number, np.flatnonzero(mask_L))
        for number, mask_L in enumerate(original.target_mask)
    )
    return seal_repeated(root, identity, repeat(original, records, rows // count), recorder.tables)


def make_other_cache(root: Path, sizes: BenchmarkSizes, profile: str) -> Path:
    """Make a cache of two shards of another profile."""
    if profile == "tempered":
        tokens = TEMPERED_TOKENS if sizes.vocabulary == SIZES["cpu"].vocabulary else 4096
        return make_sampled_cache(root, sizes, tokens, profile)
    count, times = MADE[profile]
    made = make_random_documents(replace(sizes, length=MADE_POSITIONS + 1), count)
    codec = make_codec(
        profile, shard_sequences=count * times, **{"k": TOPK} if profile == "topk" else {}
    )
    identity = make_identity(sizes.vocabulary, MADE_POSITIONS + 1, 2 * count * times, 0, codec)
    records = make_profile_records(count * MADE_POSITIONS, identity.record_codec())
    return seal_repeated(root, identity, repeat(made, records, times))


def make_profile_records(positions: int, codec: Codec) -> Records:
    """Make random records; those of topk and hidden are as large as those of a model."""
    if codec.profile == "dense":
        return make_records(0, positions, codec)
    random = np.random.default_rng(0)
    places = RecordPositions(np.zeros(positions, np.int64), np.arange(positions))
    known = -random.random((positions, 1))
    entropy = random.random(positions)
    common = {"known_logprobs": known, "entropy": entropy}
    if codec.profile == "hidden":
        states = random.normal(size=(positions, HIDDEN_WIDTH))
        return codec.encode(HiddenReading(**common, states=states), places)
    ids = random.integers(0, codec.vocabulary_size, (positions, TOPK))
    logprobs = -np.sort(random.exponential(4.0, (positions, TOPK)), axis=1)
    own = {"ids": ids, "logprobs": logprobs, "residual": -entropy}
    return codec.encode(TopReading(**common, **own), places)


# ---------------------------------------------------------------------- reading


def drop_from_system_memory(folder: Path) -> None:
    """Ask the system to forget the content of all files of ``folder``."""
    for name in list_file_sizes(folder):
        handle = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def choose_options(store: Cache, order: str, **changes: object) -> TrainConfig:
    """Make the options of batches of ``BATCH_TOKENS`` tokens."""
    length = store.identity.data.sequence_length
    size = max(min(BATCH_TOKENS // length, len(store.train)), 1)
    return TrainConfig(
        max_steps=1, batch_size=size, order=order, dataloader_num_workers=0, **changes
    )


def read_steps(store: Cache, order: str, tokens: int | None = None) -> Reading:
    """Read an epoch in ``order``, or its first steps that hold ``tokens``."""
    options = choose_options(store, order)
    steps = len(store.train) // options.batch_size
    if tokens is not None:
        step_tokens = options.batch_size * store.identity.data.sequence_length
        steps = min(max(tokens // step_tokens, 1), steps)
    began = time.perf_counter()
    began_cpu = time.process_time()
    read = sum(
        len(batch) for step in read_training_batches(store, options, range(steps)) for batch in step
    )
    return Reading(read, time.perf_counter() - began, time.process_time() - began_cpu)


def measure_decoded_bytes(folder: Path) -> int:
    """Measure the bytes of all decoded chunks."""
    return sum(len(decompress(folder / name)) for name in list_chunks(folder))


def list_chunks(folder: Path) -> list[str]:
    """List the files of the chunks of all shards."""
    names = list_file_sizes(folder)
    return [n for n in names if n.startswith("shards/") and n.rpartition("/")[2].startswith("c.")]


def decompress(file: Path) -> bytes:
    """Decompress a chunk, without its checksum."""
    content: bytes = blosc.decompress(file.read_bytes()[:-4])
    return content


def read_plainly(folder: Path) -> float:
    """Measure the seconds of a plain read of all chunks."""
    drop_from_system_memory(folder)
    began = time.perf_counter()
    for name in list_chunks(folder):
        (folder / name).read_bytes()
    return time.perf_counter() - began


def measure_floor(folder: Path) -> float:
    """Measure the processor's seconds to read, hash, decompress and copy all chunks once."""
    drop_from_system_memory(folder)
    began = time.process_time()
    for name in list_chunks(folder):
        data = (folder / name).read_bytes()
        hashlib.sha256(data).digest()
        np.frombuffer(blosc.decompress(data[:-4]), np.uint8).copy()
    return time.process_time() - began


def middle(measure: Callable[[], float], rounds: int) -> float:
    """Measure several times and return the median."""
    return median(measure() for _ in range(rounds))


# ---------------------------------------------------------------------- tables


def measure_lengths(
    sizes: BenchmarkSizes, lengths: tuple[int, ...], tokens: int, rounds: int
) -> Iterator[str]:
    """Yield the rows of the first and of the third table, for each length."""
    for length in lengths:
        print(f"measuring: length {length}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = make_sampled_cache(Path(name), replace(sizes, length=length), tokens)
            yield describe_length(folder, rounds)


def describe_length(folder: Path, rounds: int) -> str:
    """Measure one cache of profile threshold; returns its row."""
    store = open_cache(folder)
    length = store.identity.data.sequence_length
    limit = int(measure_decoded_bytes(folder) * MEMORY_SHARE)
    floor = middle(partial(measure_floor, folder), rounds)
    cold = read_cold(folder, limit, rounds)
    warm_store = open_cache(folder, memory_bytes=1 << 62)
    part = store.manifest.positions // 4
    read_steps(warm_store, "windows", part)
    warm = read_steps(warm_store, "windows", part)
    shuffled = read_steps(open_cache(folder, memory_bytes=limit // 4), "shuffled", part // 16)
    wait = measure_wait(folder, limit)
    cells = [
        f"{length:,}",
        f"{cold.tokens:,}",
        f"{store.bytes_per_token:.1f}",
        f"{cold.rate:,.0f}",
        f"{cold.core_rate:,.0f}",
        f"{warm.core_rate:,.0f}",
        f"{shuffled.core_rate:,.0f}",
        f"{cold.tokens / floor:,.0f}",
        f"{wait:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def read_cold(folder: Path, limit: int, rounds: int) -> Reading:
    """Read an epoch by windows of a cache that is not in memory, several times; the median."""
    found = []
    for _ in range(rounds):
        drop_from_system_memory(folder)
        found.append(read_steps(open_cache(folder, memory_bytes=limit), "windows"))
    return sorted(found, key=lambda reading: reading.rate)[len(found) // 2]


def measure_wait(folder: Path, limit: int) -> float:
    """Measure the share of its time that a simulated student waits for its batches."""
    drop_from_system_memory(folder)
    source = open_cache(folder, memory_bytes=limit)
    options = choose_options(source, "windows").model_copy(update={"dataloader_num_workers": 1})
    steps = min(len(source.train) // options.batch_size, 64)
    timed = TimedIterator(read_training_batches(source, options, range(steps)))
    began = time.perf_counter()
    first = None
    for (batch,) in timed:
        if first is None:
            first = timed.seconds
        time.sleep(len(batch) / STUDENT_RATE)
    whole = time.perf_counter() - began
    return (timed.seconds - (first or 0.0)) / whole


def measure_others(sizes: BenchmarkSizes, rounds: int) -> Iterator[str]:
    """Yield the rows of the second table."""
    for profile in OTHERS:
        print(f"measuring: profile {profile}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = make_other_cache(Path(name), sizes, profile)
            size = sum((folder / each).stat().st_size for each in list_chunks(folder))
            plain = middle(partial(read_plainly, folder), rounds)
            cold = read_cold(folder, 1 << 29, rounds)
            cells = [
                profile,
                f"{cold.tokens:,}",
                f"{size / cold.tokens:,.1f}",
                f"{cold.rate:,.0f}",
                f"{size / cold.seconds / 1e6:,.0f}",
                f"{size / cold.cpu_seconds / 1e6:,.0f}",
                f"{size / plain / 1e6:,.0f}",
            ]
            yield f"| {' | '.join(cells)} |"


def describe_mixing() -> str:
    """Compare windows with a full shuffle, at a cache of eight windows of 32 shards."""
    count, shard_size, width, batch = 65_536, 256, 32, 32
    found = EpochWindows(count, shard_size, width, 0, 0)[np.arange(count)]
    full = np.random.default_rng(0).permutation(count)
    labels = np.random.default_rng(1).normal(size=count // shard_size)[
        np.arange(count) // shard_size
    ]
    texts = np.random.default_rng(2).normal(size=count // 4)[np.arange(count) // 4]
    distances = [np.abs(np.diff(np.argsort(order))).mean() for order in (found, full)]
    spreads = [
        [measure_spread(order, label, batch) for order in (found, full)]
        for label in (texts, labels)
    ]
    return (
        f"Mixing, {count:,} sequences in windows of {width} of {count // shard_size} shards, "
        f"against a full shuffle: neighbours of the file are {distances[0]:,.0f} places apart "
        f"({distances[1]:,.0f}); the mean of a label over a batch of {batch} varies, relative to "
        f"independent draws, {spreads[0][0]:.2f} times as much for a label of each text of four "
        f"sequences ({spreads[0][1]:.2f}), and {spreads[1][0]:.2f} times for a label of each shard "
        f"({spreads[1][1]:.2f}; in the order of the file {batch})."
    )


def measure_spread(order: np.ndarray, label: np.ndarray, batch: int) -> float:
    """Compute the variance of the batches' mean labels, relative to independent draws."""
    means = label[order].reshape(-1, batch).mean(axis=1)
    return float(means.var() * batch / label.var())


def describe_machine(vocabulary: str) -> str:
    """Describe the machine and the readers."""
    return (
        f"Machine: {read_cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"one reading thread, batches of {BATCH_TOKENS:,} tokens, {vocabulary}; "
        f"memory for {MEMORY_SHARE:.0%} of the decoded cache, shuffled {MEMORY_SHARE / 4:.0%}."
    )


def format_lengths(rows: Iterator[str]) -> list[str]:
    """Format the first table."""
    return [f"| {' | '.join(COLUMNS)} |", "|--:|--:|--:|--:|--:|--:|--:|--:|--:|", *rows]


@torch.no_grad()
def measure_taught(arguments: argparse.Namespace) -> str:
    """Measure the records of a given teacher; returns the text of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_taught_cache(Path(name), arguments)
        store = open_cache(folder)
        codec = store.identity.codec
        head = describe_machine(f"V = {store.identity.tokenizer.vocabulary_size:,}")
        teacher = (
            f"Records of {arguments.gguf_file or arguments.teacher.name} at {codec.threshold}, "
            f"{codec.clusters} clusters, {store.manifest.entries / store.manifest.positions:.1f} "
            "entries a token."
        )
        rows = [describe_length(folder, arguments.rounds)]
    return "\n".join([head, teacher, "", *format_lengths(iter(rows))])


def measure(sizes: BenchmarkSizes, lengths: tuple[int, ...], tokens: int, rounds: int) -> str:
    """Measure everything; returns the text of all tables."""
    head = describe_machine(f"V = {sizes.vocabulary:,}")
    first = format_lengths(measure_lengths(sizes, lengths, tokens, rounds))
    second = [
        f"| {' | '.join(OTHER_COLUMNS)} |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *measure_others(sizes, rounds),
    ]
    return "\n".join([head, "", *first, "", *second, "", describe_mixing()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure how fast a cache is read, cold and warm.",
    )
    parser.add_argument("--tokens", type=int, default=1 << 23, help="tokens of a cache, about")
    parser.add_argument("--rounds", type=int, default=3, help="cold reads of each cache")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--out", type=Path, help="write the same text to this file too")
    add_source_options(parser, sequences=192, length=512)
    parser.set_defaults(teacher=None)
    given = parser.parse_args()
    hide_progress_bars()
    sizes = SIZES["cpu"]
    lengths = LENGTHS
    tokens = given.tokens
    if given.quick:
        sizes = replace(sizes, vocabulary=1000)
        lengths = (32, 64)
        tokens = 8192
        ordering.WINDOW_TOKENS = 2048
    text = measure_taught(given) if given.teacher else measure(sizes, lengths, tokens, given.rounds)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
