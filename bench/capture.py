"""Measure how much of its own work a capture hides behind a device that delivers at a set rate.

    python bench/capture.py [--quick] [--rates 10000 40000 150000] [--seconds 15] [--out FILE]

The device is simulated: it delivers what a GPU would, samples of profile threshold over a
vocabulary of 128,256 tokens, at a set number of tokens a second, and sleeps in between as a thread
does that waits for a GPU. All else is real: random numbers, encoding, sealing and writing, with
shards of 256 sequences of 512 tokens on this machine's disk.

The first table has a row for each rate:

    reading    the share of the simulated rate that the capture reaches while it reads
    whole      the same with the wait for the last shard's seal, which a capture has once
    in turn    the share without overlap: read, encode and seal one after the other
    processor  seconds of processor time for each second of the run

The last rate is more than the device could deliver: its row shows the limit of the host.

The second table has the processor's time for a token by part, each measured alone on one thread,
and beside it the floor: the time that the part would take if it did nothing but what it must.

    random numbers  where units and candidates begin, and the rounding of the next token, for each
                    position. Floor: Philox for the first and the last, on blocks of numbers that
                    stay in the processor's cache
    encoding        counts, ids and units to small integers. Floor: one copy of the bytes that come
                    in and go out
    sealing         ids to symbols and bits. Floor: one sort of the entries of a shard, as integers
    writing         compression, checksums, files. Floor: the compression alone, of the same bytes,
                    and their sha256

The samples are made at random: counts, units and candidates are those of a real draw from logits
with a spread of 2.5 nats around a Zipf distribution, the ids are drawn from that distribution.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from numcodecs import blosc

from bench.speed import make_single_documents, read_cpu_name
from bench.support.small.caches import make_codec, make_identity
from cache.codec import Codec
from cache.disk import list_file_sizes
from cache.layout import encode_arrays
from cache.manifest import CacheIdentity
from cache.profiles.threshold import UnitSample
from cache.random import apply_philox
from cache.records import Records, Sequences, compute_offsets
from cache.rounding import RecordPositions
from cache.shard import Seal, make_shard_arrays, write_arrays
from cache.units.dither import DitherTables
from cache.writing.writer import CacheWriter, open_writer
from kd.capture.codec_identity import USUAL_CLUSTERS
from kd.capture.recording import TeacherReading
from kd.capture.shards import ShardPipeline
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.capture.units.fitting import make_tables

CPU = torch.device("cpu")
THRESHOLD = 0.04
#: Positions that are drawn by the real sampler, from which the counts of all others are taken.
DRAWN = 256
#: Different micro-batches that the device has prepared, so that no shard repeats itself.
PREPARED = 16
BATCH = 8
COLUMNS = ("simulated", "shards", "reading", "whole", "in turn", "processor")


@dataclass(frozen=True)
class CaptureSizes:
    """Vocabulary, tokens of a sequence, sequences of a shard, and seconds of a row."""

    vocabulary: int = 128_256
    length: int = 512
    shard_sequences: int = 256
    seconds: float = 15.0
    rounds: int = 5

    @property
    def shard_tokens(self) -> int:
        """Positions with a record in a shard."""
        return self.shard_sequences * (self.length - 1)


QUICK = CaptureSizes(1000, 33, 16, 0.1, 1)


# ---------------------------------------------------------------------- the device


def make_logits(codec: Codec) -> torch.Tensor:
    """Make the logits of a few positions."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(DRAWN, codec.vocabulary_size, generator=generator) * 2.5
    return spread - torch.arange(1, codec.vocabulary_size + 1).log()


def fit_device_tables(codec: Codec) -> DitherTables:
    """Fit tables to the device's tails: all clusters have the same."""
    p_V = torch.softmax(make_logits(codec).double(), 1)
    tails_V = p_V.masked_fill(p_V > codec.threshold, 0.0).sum(0).numpy()
    heads_V = (p_V > codec.threshold).sum(0).numpy()
    found = make_tables(tails_V[None], heads_V[None], np.zeros((1, 1), np.float32))
    arrays = (found.slots_CZ, found.leading_CL, found.centres_CD)
    slots_CZ, leading_CL, centres_CD = (np.repeat(each, codec.clusters, axis=0) for each in arrays)
    return DitherTables(slots_CZ, leading_CL, found.classes_V, centres_CD)


def draw_few(codec: Codec, tables: DitherTables) -> UnitSample:
    """Draw the sample of a few positions with the real sampler."""
    logits = make_logits(codec)
    generator = torch.Generator().manual_seed(1)
    gold = torch.multinomial(torch.softmax(logits, 1), 1, generator=generator)[:, 0]
    (chance,) = UnitRandomness.of_each(codec, [0], [np.arange(DRAWN)], CPU)
    cluster = torch.randint(0, codec.clusters, (DRAWN,), generator=generator)
    found = UnitSampler(codec, tables).draw_units(logits, gold, cluster, chance)
    return UnitSample(**{name: each.numpy() for name, each in found.items()})


def multiply_sample(few: UnitSample, codec: Codec, positions: int, seed: int) -> UnitSample:
    """Make a sample of ``positions``: the counts and numbers of ``few``, and other ids."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, DRAWN, positions)

    def find_entries(counts: np.ndarray) -> np.ndarray:
        first = compute_offsets(counts)[rows]
        each = counts[rows]
        offset = np.arange(each.sum()) - np.repeat(compute_offsets(each)[:-1], each)
        return np.repeat(first, each) + offset

    heads = find_entries(few.head_count)
    tails = find_entries(few.tail_count)

    def draw_ids(count: int) -> np.ndarray:
        # Powers of V spread like 1 / rank, which is Zipf's distribution.
        return (codec.vocabulary_size ** random.random(count)).astype(np.int64) - 1

    return UnitSample(
        known_logprobs=few.known_logprobs[rows],
        entropy=few.entropy[rows],
        cluster=few.cluster[rows],
        head_count=few.head_count[rows],
        head_ids=draw_ids(len(heads)),
        head_units=few.head_units[heads],
        tail_count=few.tail_count[rows],
        tail_ids=draw_ids(len(tails)),
        tail_k=few.tail_k[tails],
    )


@dataclass(frozen=True)
class SimulatedDevice:
    """Delivers prepared samples at ``rate`` tokens a second, and sleeps in between."""

    codec: Codec
    tables: DitherTables
    samples: list[UnitSample]

    @classmethod
    def prepare(cls, sizes: CaptureSizes, codec: Codec) -> SimulatedDevice:
        """Prepare the samples of different micro-batches."""
        tables = fit_device_tables(codec)
        few = draw_few(codec, tables)
        positions = BATCH * (sizes.length - 1)
        samples = [multiply_sample(few, codec, positions, seed) for seed in range(PREPARED)]
        return cls(codec, tables, samples)

    @cached_property
    def _sizes(self) -> list[int]:
        return [
            sum(each.nbytes for each in vars(sample).values() if each is not None)
            for sample in self.samples
        ]

    def deliver(self, sequences: Sequences, first: int, rate: float) -> Iterator[TeacherReading]:
        """Yield each micro-batch when a device of ``rate`` tokens a second has it."""
        ready = time.perf_counter()
        prepared = cycle(zip(self.samples, self._sizes, strict=True))
        for start in range(0, len(sequences), BATCH):
            places = find_places(sequences, first, start)
            # This thread makes the random numbers while the device computes the hidden states.
            make_random_numbers(self.codec, places)
            ready += len(places.position_N) / rate
            time.sleep(max(ready - time.perf_counter(), 0.0))
            # A device that had to wait does not deliver faster afterwards.
            ready = max(ready, time.perf_counter())
            sample, nbytes = next(prepared)
            encode = partial(self.codec.encode, sample, places)
            yield TeacherReading(BATCH, len(places.position_N), nbytes, encode)


def find_places(sequences: Sequences, first: int, start: int) -> RecordPositions:
    """Return the positions of the micro-batch that begins at sequence ``start``."""
    rows, positions = np.nonzero(sequences.target_mask[start : start + BATCH])
    return RecordPositions(rows + first + start, positions)


def make_random_numbers(codec: Codec, places: RecordPositions) -> None:
    """Make the random numbers that the device needs for a micro-batch."""
    numbers, first = np.unique(places.sequence_N, return_index=True)
    positions = np.split(places.position_N, first[1:])
    UnitRandomness.of_each(codec, numbers.tolist(), positions, CPU)


# ---------------------------------------------------------------------- rates


@dataclass(frozen=True)
class Paced:
    """Tokens of a run, the seconds of its reading and of all, and the processor's seconds."""

    tokens: int
    reading: float
    whole: float
    cpu_seconds: float


def make_shard_identity(sizes: CaptureSizes, shards: int) -> CacheIdentity:
    """Make the identity of a cache of so many shards."""
    codec = make_codec(
        "threshold",
        threshold=THRESHOLD,
        shard_sequences=sizes.shard_sequences,
        clusters=USUAL_CLUSTERS,
    )
    return make_identity(sizes.vocabulary, sizes.length, shards * sizes.shard_sequences, 0, codec)


def make_texts(sizes: CaptureSizes) -> Sequences:
    """Make the sequences of a shard, of tokens that spread like those of a text."""
    random = np.random.default_rng(0)
    shape = (sizes.shard_sequences, sizes.length)
    return make_single_documents((sizes.vocabulary ** random.random(shape)).astype(np.int64) - 1)


def run_overlapped(
    device: SimulatedDevice, sizes: CaptureSizes, rate: float, shards: int, root: Path
) -> Paced:
    """Capture shards as a job does, and take the time."""
    sequences = make_texts(sizes)
    with open_writer(root, make_shard_identity(sizes, shards)) as writer:
        writer.write_tables(device.tables)
        began = (time.perf_counter(), time.process_time())
        with ShardPipeline(writer) as pipeline:
            for index in range(shards):
                first = index * sizes.shard_sequences
                for delivery in device.deliver(sequences, first, rate):
                    pipeline.add(delivery)
                pipeline.seal(index, sequences)
            reading = time.perf_counter() - began[0]
            pipeline.finish()
        whole = time.perf_counter() - began[0]
    return Paced(shards * sizes.shard_tokens, reading, whole, time.process_time() - began[1])


def run_in_turn(
    device: SimulatedDevice, sizes: CaptureSizes, rate: float, shards: int, root: Path
) -> Paced:
    """Read, encode and seal shards one after the other, and take the time."""
    sequences = make_texts(sizes)
    with open_writer(root, make_shard_identity(sizes, shards)) as writer:
        writer.write_tables(device.tables)
        began = (time.perf_counter(), time.process_time())
        for index in range(shards):
            first = index * sizes.shard_sequences
            parts = [each.encode() for each in device.deliver(sequences, first, rate)]
            writer.write_shard(index, sequences, Records.concatenate(parts))
        whole = time.perf_counter() - began[0]
    return Paced(shards * sizes.shard_tokens, whole, whole, time.process_time() - began[1])


def describe_rate(device: SimulatedDevice, sizes: CaptureSizes, rate: float) -> str:
    """Run a capture at ``rate`` and return its row."""
    print(f"measuring: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    shards = max(2, math.ceil(rate * sizes.seconds / sizes.shard_tokens))
    found = []
    for run in (run_overlapped, run_in_turn):
        with tempfile.TemporaryDirectory() as folder:
            found.append(run(device, sizes, rate, shards, Path(folder)))
    ours, plain = found
    ideal = ours.tokens / rate
    cells = [
        f"{rate:,.0f}",
        f"{shards}",
        f"{ours.tokens / ours.reading:,.0f}, {ideal / ours.reading:.1%}",
        f"{ideal / ours.whole:.1%}",
        f"{ideal / plain.whole:.1%}",
        f"{ours.cpu_seconds / ours.whole:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------------- parts


def time_cpu(run: Callable[[], object], rounds: int) -> float:
    """Measure the least of the processor's seconds that a run takes, in all threads."""
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return min(seconds)


@dataclass(frozen=True)
class Part:
    """A part of the host's work on a shard, and the least that it must do."""

    name: str
    run: Callable[[], object]
    floor: Callable[[], object]


def list_parts(device: SimulatedDevice, sizes: CaptureSizes, root: Path) -> list[Part]:
    """List the parts of the host's work on one shard."""
    sequences = make_texts(sizes)
    codec = device.codec
    all_places = [
        find_places(sequences, 0, start) for start in range(0, sizes.shard_sequences, BATCH)
    ]
    samples = [sample for sample, _ in zip(cycle(device.samples), all_places, strict=False)]
    pairs = list(zip(samples, all_places, strict=True))
    records = Records.concatenate(codec.encode(*pair) for pair in pairs)
    arrays = make_shard_arrays(sequences, records, codec, device.tables)
    offsets = compute_offsets(sequences.target_mask.sum(axis=1))
    keys = np.random.default_rng(0).permutation(records.length("head") + records.length("tail"))
    come = [value for sample in samples for value in vars(sample).values() if value is not None]
    go = list(records.columns.values())
    folders = (root / f"written-{number}" for number in range(1000))

    def write() -> None:
        folder = next(folders)
        write_arrays(folder, arrays)
        Seal.of(folder, sequences, records)

    def compress() -> None:
        for values in arrays.values():
            data = np.ascontiguousarray(values)
            hashlib.sha256(blosc.compress(data, b"zstd", 5, blosc.AUTOSHUFFLE)).digest()

    def copy() -> None:
        for values in (*come, *go):
            values.copy()

    def seal() -> None:
        encode_arrays(records, offsets, codec, device.tables)

    def draw() -> None:
        for places in all_places:
            make_random_numbers(codec, places)

    return [
        Part("random numbers", draw, partial(run_philox, 2 * len(records))),
        Part("encoding", lambda: [codec.encode(*pair) for pair in pairs], copy),
        Part("sealing", seal, lambda: np.sort(keys)),
        Part("writing", write, compress),
    ]


def run_philox(count: int) -> None:
    """Make ``count`` random numbers, block by block in the processor's cache."""
    block = np.ones((4, 2048), np.uint64)
    for _ in range(-(-count // block.shape[1])):
        apply_philox(block, (1, 2))


def measure_parts(device: SimulatedDevice, sizes: CaptureSizes) -> Iterator[str]:
    """Yield the rows of the second table, and their sum."""
    print("measuring: parts", file=sys.stderr, flush=True)
    total = np.zeros(2)
    with tempfile.TemporaryDirectory() as folder:
        for part in list_parts(device, sizes, Path(folder)):
            taken = np.array([time_cpu(run, sizes.rounds) for run in (part.run, part.floor)])
            each = taken / sizes.shard_tokens * 1e6
            total += each
            yield f"| {part.name} | {each[0]:.2f} | {each[1]:.2f} |"
    yield f"| all | {total[0]:.2f} | {total[1]:.2f} |"


def describe_shard(device: SimulatedDevice, sizes: CaptureSizes) -> str:
    """Say what a shard holds."""
    heads, tails = (
        np.mean([getattr(sample, f"{name}_count").mean() for sample in device.samples])
        for name in ("head", "tail")
    )
    held = np.mean(
        [sum(v.nbytes for v in vars(s).values() if v is not None) for s in device.samples]
    ) / (BATCH * (sizes.length - 1))
    with tempfile.TemporaryDirectory() as folder:
        writer = seal_one(device, sizes, Path(folder))
        stored = sum(list_file_sizes(writer.folder).values()) / sizes.shard_tokens
    return (
        f"- A token has {heads:.1f} head and {tails:.1f} tail entries, {held:,.0f} bytes as it is "
        f"delivered and {stored:.1f} on disk; a shard has {sizes.shard_tokens:,} tokens."
    )


def seal_one(device: SimulatedDevice, sizes: CaptureSizes, root: Path) -> CacheWriter:
    """Seal one shard and return its writer."""
    with open_writer(root, make_shard_identity(sizes, 1)) as writer:
        writer.write_tables(device.tables)
        sequences = make_texts(sizes)
        parts = [each.encode() for each in device.deliver(sequences, 0, math.inf)]
        writer.write_shard(0, sequences, Records.concatenate(parts))
    return writer


def measure(sizes: CaptureSizes, rates: list[float]) -> str:
    """Measure all rates and parts; returns the tables as text."""
    codec = make_shard_identity(sizes, 1).record_codec()
    device = SimulatedDevice.prepare(sizes, codec)
    lines = [
        f"Machine: {read_cpu_name()}, {torch.get_num_threads()} threads.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "--:|" * len(COLUMNS),
        *(describe_rate(device, sizes, rate) for rate in rates),
        "",
        "| part | us a token | floor |",
        "|---|--:|--:|",
        *measure_parts(device, sizes),
        "",
        describe_shard(device, sizes),
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[10_000, 40_000, 150_000], help="tokens/s"
    )
    parser.add_argument("--seconds", type=float, help="seconds of each rate, about")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, which show only that it works"
    )
    parser.add_argument("--out", type=Path, help="write the same text to this file too")
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    sizes = QUICK if given.quick else CaptureSizes()
    text = measure(replace(sizes, seconds=given.seconds or sizes.seconds), given.rates)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
