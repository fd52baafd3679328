"""Compare records of profile threshold with those of version 0.2.0: bytes a token, noise, and bias.

    python bench/dither.py [--teacher FOLDER [--gguf-file NAME]] [--text FILE]
                           [--sequences 112] [--length 512] [--fit 80] [--threshold 0.04]
                           [--clusters 16 256] [--scale 1.06] [--seeds 3] [--divide 1] [--out FILE]

The last ``--fit`` sequences make the tables, the others are recorded and written as a shard, once
for each seed. The command stops if the weights of a position do not sum to 1.

bytes    all arrays of the records on disk, without tokens and offsets
side     the frequency classes, or the tables: a longer text divides them further
noise    the mean of |w - p|^2, the realised weights against the teacher's probabilities
z        of the sums of weights, the largest |z| over the decades of p

``--scale`` makes the units of the new records larger than the threshold of the others, whose heads
are exact. ``--divide n`` stands for a teacher with n times the vocabulary, where none can be had:
each token becomes n tokens with the shares 1, 1/2, ... 1/n of its probability in every context. So
the entropy grows by that of the shares.

    N   positions of a chunk      V   vocabulary      D   width of hidden states
    E   entries                   B   bands: decades of p
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.records import Truth, add_source_options, format_table, read_teacher
from cache.codec import Codec
from cache.disk import list_file_sizes
from cache.records import Records
from cache.shard import PER_SEQUENCE, make_shard_arrays, write_arrays
from cache.units.dither import DitherTables
from kd.capture.recording import Recorder
from kd.capture.units.fitting import fit_tables
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.models.loading import hide_progress_bars

COLUMNS = ["records", "unit", "seed", "bytes", "of 0.2.0", "side", "noise", "of 0.2.0", "z"]
CHUNK = 64
DECADES = 8


def divide_tokens(truth: Truth, parts: int) -> Truth:
    """Return a teacher with ``parts`` tokens for each token of ``truth``, in fixed shares.

    Which of them is the next token of a position is drawn.
    """
    share = 1.0 / torch.arange(1, parts + 1, dtype=torch.float64)
    share /= share.sum()
    vocabulary = truth.head.vocabulary
    bias_V = share.log().float().repeat_interleave(vocabulary)
    weight_VD = truth.head.weight[:vocabulary].repeat(parts, 1)
    if truth.head.bias is not None:
        bias_V += truth.head.bias[:vocabulary].repeat(parts)
    head = replace(truth.head, weight=weight_VD, bias=bias_V, vocabulary=parts * vocabulary)
    generator = torch.Generator().manual_seed(0)
    gold = [
        gold_N
        + vocabulary * torch.multinomial(share, len(gold_N), replacement=True, generator=generator)
        for gold_N in truth.gold
    ]
    return replace(truth, gold=gold, head=head)


@dataclass(frozen=True)
class TeacherChunk:
    """The teacher's p at some positions of one sequence, and its sums by decade."""

    gold_N: Tensor
    p_NV: Tensor

    @cached_property
    def decade_NV(self) -> Tensor:
        """The decade of each probability: 0 from 0.1 on, and the last for all small ones."""
        log_NV = self.p_NV.float().clamp(min=1e-30).log10()
        return log_NV.neg_().floor_().clamp_(0, DECADES - 1).long()

    @cached_property
    def p_B(self) -> NDArray[np.float64]:
        """The sum of the probabilities of each decade."""
        return self.sum_decades(self.p_NV)

    @cached_property
    def square(self) -> float:
        """The sum of the squares of all probabilities."""
        return float(self.p_NV.square().sum())

    def sum_decades(self, values_NV: Tensor) -> NDArray[np.float64]:
        """Add up values of tokens by decade."""
        return np.bincount(self.decade_NV.flatten(), values_NV.flatten(), DECADES)

    def sum_variances(self, unit: float) -> NDArray[np.float64]:
        """Add up the variances of tokens that are sampled in units."""
        part_NV = (self.p_NV / unit).frac_()
        return unit**2 * self.sum_decades(part_NV - part_NV.square())


def read_chunks(truth: Truth, count: int) -> Iterator[TeacherChunk]:
    """Read the first ``count`` sequences."""
    for hidden_ND, gold_N in zip(truth.hidden[:count], truth.gold[:count], strict=True):
        for some_ND, some_N in zip(hidden_ND.split(CHUNK), gold_N.split(CHUNK), strict=True):
            yield TeacherChunk(some_N, truth.head.compute_logits(some_ND).double().softmax(1))


@dataclass
class Errors:
    """Errors of weights, by decade of p."""

    noise: float = 0.0
    error_B: NDArray[np.float64] = field(default_factory=lambda: np.zeros(DECADES))
    variance_B: NDArray[np.float64] = field(default_factory=lambda: np.zeros(DECADES))

    def add(
        self, target: SparseTarget, chunk: TeacherChunk, variance_B: NDArray[np.float64]
    ) -> None:
        """Add the errors of a chunk."""
        weights_E = target.weights_E
        off = float((target.sum_N(weights_E) - 1.0).abs().max())
        if off > 1e-9:
            sys.exit(f"The weights of a position sum to 1 but for {off:.1e}.")
        p_E = chunk.p_NV[target.rows_E, target.ids_E]
        self.noise += chunk.square + float((weights_E * (weights_E - 2.0 * p_E)).sum())
        decade_E = chunk.decade_NV[target.rows_E, target.ids_E]
        self.error_B += np.bincount(decade_E, weights_E, DECADES) - chunk.p_B
        self.variance_B += variance_B

    @property
    def largest_z(self) -> float:
        """The largest |z| of a decade."""
        return float((np.abs(self.error_B) / np.sqrt(self.variance_B + 1e-12)).max())


@dataclass(frozen=True)
class Recorded:
    """Records of one kind and seed, the bytes of their arrays, and those of classes or tables."""

    codec: Codec
    records: Records
    sizes: dict[str, float]
    side: float
    errors: Errors = field(default_factory=Errors)

    @property
    def whole(self) -> float:
        """The bytes of all arrays."""
        return sum(self.sizes.values())

    def decode(self, first: int, gold_N: Tensor) -> SparseTarget:
        """Decode the records from the number ``first`` on."""
        part = self.records.slice(first, first + len(gold_N)).columns
        columns = {name: torch.from_numpy(column) for name, column in part.items()}
        columns["tail_ids"] = columns["tail_ids"].reshape(-1)
        target = TargetDecoder(self.codec).decode(gold_N, columns).teacher
        assert isinstance(target, SparseTarget)
        return target


def record(truth: Truth, count: int, codec: Codec, tables: DitherTables | None) -> Recorded:
    """Record the first ``count`` sequences, and measure the bytes."""
    recorder = Recorder(truth.head, codec, tables=tables)
    parts = []
    for number in range(count):
        positions_N = np.flatnonzero(truth.sequences.target_mask[number])
        hidden_ND, gold_N = truth.hidden[number], truth.gold[number]
        parts.append(recorder.record(hidden_ND, gold_N, number, positions_N))
    records = Records.concatenate(parts)
    sizes = measure_bytes(truth, count, codec, records, tables)
    side = sizes.pop("token_classes", 0.0) if tables is None else measure_tables(tables)
    return Recorded(codec, records, sizes, side)


def measure_bytes(
    truth: Truth, count: int, codec: Codec, records: Records, tables: DitherTables | None
) -> dict[str, float]:
    """Measure the bytes of each array of a shard."""
    sequences = truth.sequences.select(slice(0, count))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "shard"
        write_arrays(folder, make_shard_arrays(sequences, records, codec, tables))
        sizes: dict[str, float] = {}
        for name, size in list_file_sizes(folder).items():
            if "/c" in name:
                sizes[name.partition("/")[0]] = sizes.get(name.partition("/")[0], 0.0) + size
    for name in (*PER_SEQUENCE, "offsets"):
        del sizes[name]
    return sizes


def measure_tables(tables: DitherTables) -> float:
    """Measure the bytes of tables on disk."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tables"
        write_arrays(folder, tables.to_arrays())
        return float(sum(list_file_sizes(folder).values()))


def record_all(truth: Truth, count: int, arguments: argparse.Namespace) -> Iterator[Recorded]:
    """Record with each number of clusters and each seed; 0 clusters are version 0.2.0."""
    fitted = list(zip(truth.hidden[count:], truth.gold[count:], strict=True))
    for clusters in (0, *arguments.clusters):
        threshold = arguments.threshold * (arguments.scale if clusters else 1.0)
        codec = Codec("threshold", truth.head.vocabulary, threshold=threshold, clusters=clusters)
        tables = fit_tables(fitted, truth.head, codec, clusters) if clusters else None
        for seed in range(arguments.seeds):
            yield record(truth, count, replace(codec, seed=seed), tables)


def compare(truth: Truth, count: int, all_recorded: list[Recorded]) -> None:
    """Compare all records with the teacher, whose p is computed once."""
    units = {each.codec.threshold for each in all_recorded}
    first = 0
    for chunk in read_chunks(truth, count):
        variances = {unit: chunk.sum_variances(unit) for unit in units}
        for each in all_recorded:
            target = each.decode(first, chunk.gold_N)
            each.errors.add(target, chunk, variances[each.codec.threshold])
        first += len(chunk.gold_N)


def make_row(each: Recorded, before: Recorded) -> list[str]:
    """Format a row of the table; ``before`` is version 0.2.0 with the same seed."""
    positions = len(each.records)
    clusters = each.codec.clusters
    return [
        f"{clusters} clusters" if clusters else "version 0.2.0",
        f"{each.codec.threshold:g}",
        f"{each.codec.seed}",
        f"{each.whole / positions:.2f}",
        f"{each.whole / before.whole:.3f}",
        f"{each.side / positions:.2f}",
        f"{each.errors.noise / positions:.5f}",
        f"{each.errors.noise / before.errors.noise:.3f}",
        f"{each.errors.largest_z:.1f}",
    ]


def format_arrays(all_recorded: list[Recorded]) -> list[str]:
    """Format the bytes of each array a token, with seed 0."""
    first = [each for each in all_recorded if each.codec.seed == 0]
    names = sorted({name for each in first for name in each.sizes})
    titles = [f"{each.codec.clusters} clusters" for each in first[1:]]
    rows = [
        [name, *(f"{each.sizes.get(name, 0.0) / len(each.records):.2f}" for each in first)]
        for name in names
    ]
    return format_table(["array", "version 0.2.0", *titles], rows)


@torch.no_grad()
def measure(truth: Truth, arguments: argparse.Namespace) -> list[str]:
    """Record, compare, and return the lines of both tables."""
    truth = divide_tokens(truth, arguments.divide) if arguments.divide > 1 else truth
    count = len(truth.hidden) - arguments.fit
    all_recorded = list(record_all(truth, count, arguments))
    compare(truth, count, all_recorded)
    rows = [make_row(each, all_recorded[each.codec.seed]) for each in all_recorded]
    machine = f"Machine: {platform.system()} {platform.machine()}, torch {torch.__version__}"
    about = f"{len(all_recorded[0].records):,} positions, V = {truth.head.vocabulary:,}"
    return [machine, "", about, "", *format_table(COLUMNS, rows), "", *format_arrays(all_recorded)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_source_options(parser, sequences=112, length=512)
    parser.add_argument("--fit", type=int, default=80, help="sequences that make the tables")
    parser.add_argument("--threshold", type=float, default=0.04)
    parser.add_argument("--clusters", type=int, nargs="*", default=[16, 256])
    parser.add_argument("--scale", type=float, default=1.06, help="of the new units")
    parser.add_argument("--seeds", type=int, default=3, help="of the records")
    parser.add_argument("--divide", type=int, default=1, help="tokens for each of the teacher's")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    arguments = parser.parse_args()
    hide_progress_bars()
    truth, _ = read_teacher(arguments)
    page = "\n".join(measure(truth, arguments))
    print(page)
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
