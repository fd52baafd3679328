"""Compare records of profile threshold with those of version 0.2.0: bytes a token, noise, and bias.

    python bench/dither.py [--teacher FOLDER [--gguf-file NAME]] [--text FILE]
                           [--sequences 112] [--length 512] [--fit 80] [--threshold 0.04]
                           [--clusters 16 256] [--scale 1.06] [--seed 0]

The last ``--fit`` sequences make the tables, the others are recorded and written as a shard.

bytes    all arrays of the records on disk, without tokens and offsets
side     the frequency classes, or the tables: a longer text divides them further
noise    the mean of |w - p|^2, the realised weights against the teacher's probabilities
z        of the sums of weights, the largest over the decades of p

``--scale`` makes the units of the new records larger than the threshold of the others, whose heads
are exact.

    N   positions of a chunk      V   vocabulary
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
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

CHUNK = 64
_DECADES = 8


class Errors:
    """Errors of weights, by decade of p."""

    def __init__(self) -> None:
        self.noise = 0.0
        self.error_8 = np.zeros(_DECADES)
        self.variance_8 = np.zeros(_DECADES)

    def add(self, target: SparseTarget, p_NV: Tensor, threshold: float) -> None:
        """Add the errors of a chunk; a token is sampled in units of about ``threshold``."""
        w_NV = torch.zeros_like(p_NV)
        w_NV.index_put_((target.rows_E, target.ids_E), target.weights_E, accumulate=True)
        assert float((w_NV.sum(1) - 1.0).abs().max()) < 1e-9, "weights sum to 1"
        error_NV = w_NV - p_NV
        self.noise += float(error_NV.square().sum())
        part_NV = (p_NV / threshold).frac()
        variance_NV = threshold**2 * part_NV * (1.0 - part_NV)
        decade_NV = (-p_NV.clamp(min=1e-30).log10()).floor().clamp(0, _DECADES - 1).long()
        for sums_8, values_NV in ((self.error_8, error_NV), (self.variance_8, variance_NV)):
            sums_8 += np.bincount(decade_NV.flatten(), values_NV.flatten(), _DECADES)

    @property
    def largest_z(self) -> float:
        """The largest |z| of a decade."""
        return float((np.abs(self.error_8) / np.sqrt(self.variance_8 + 1e-12)).max())


def record(truth: Truth, count: int, codec: Codec, tables: DitherTables | None) -> Records:
    """Record the first ``count`` sequences."""
    recorder = Recorder(truth.head, codec, tables=tables)
    parts = []
    for number in range(count):
        positions_N = np.flatnonzero(truth.sequences.target_mask[number])
        hidden_ND, gold_N = truth.hidden[number], truth.gold[number]
        parts.append(recorder.record(hidden_ND, gold_N, number, positions_N))
    return Records.concatenate(parts)


def measure_errors(truth: Truth, count: int, codec: Codec, records: Records) -> Errors:
    """Compare all records with the teacher."""
    decoder = TargetDecoder(codec)
    errors = Errors()
    first = 0
    for hidden_ND, gold_N in zip(truth.hidden[:count], truth.gold[:count], strict=True):
        for start in range(0, len(gold_N), CHUNK):
            rows = slice(start, start + CHUNK)
            size = len(gold_N[rows])
            part = records.slice(first, first + size).columns
            columns = {name: torch.from_numpy(column) for name, column in part.items()}
            columns["tail_ids"] = columns["tail_ids"].reshape(-1)
            target = decoder.decode(gold_N[rows], columns).teacher
            assert isinstance(target, SparseTarget)
            p_NV = truth.head.compute_logits(hidden_ND[rows]).double().softmax(1)
            errors.add(target, p_NV, codec.threshold)
            first += size
    return errors


def measure_bytes(
    truth: Truth, count: int, codec: Codec, records: Records, tables: DitherTables | None
) -> tuple[dict[str, float], float]:
    """Measure the bytes of each array on disk, and those of the classes or tables."""
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
        side = sizes.pop("token_classes", 0.0)
        if tables is not None:
            side_folder = Path(place) / "tables"
            write_arrays(side_folder, tables.to_arrays())
            side = float(sum(list_file_sizes(side_folder).values()))
    return sizes, side


@torch.no_grad()
def print_table(truth: Truth, arguments: argparse.Namespace) -> None:
    """Fit the tables, record, measure and print."""
    vocabulary = truth.head.vocabulary
    count = len(truth.hidden) - arguments.fit
    positions = sum(len(gold_N) for gold_N in truth.gold[:count])
    fitted = list(zip(truth.hidden[count:], truth.gold[count:], strict=True))
    rows = []
    today: tuple[float, float] | None = None
    for clusters in (0, *arguments.clusters):
        threshold = arguments.threshold * (arguments.scale if clusters else 1.0)
        codec = Codec(
            "threshold", vocabulary, arguments.seed, threshold=threshold, clusters=clusters
        )
        tables = fit_tables(fitted, truth.head, codec, clusters) if clusters else None
        records = record(truth, count, codec, tables)
        sizes, side = measure_bytes(truth, count, codec, records, tables)
        errors = measure_errors(truth, count, codec, records)
        whole = sum(sizes.values())
        today = today or (whole, errors.noise)
        rows.append(
            [
                f"{clusters} clusters" if clusters else "version 0.2.0",
                f"{threshold:g}",
                f"{whole / positions:.2f}",
                f"{whole / today[0]:.3f}",
                f"{side / positions:.2f}",
                f"{errors.noise / positions:.5f}",
                f"{errors.noise / today[1]:.3f}",
                f"{errors.largest_z:.1f}",
                ", ".join(f"{name} {size / positions:.2f}" for name, size in sizes.items()),
            ]
        )
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    columns = ["records", "unit", "bytes", "of 0.2.0", "side", "noise", "of 0.2.0", "z", "arrays"]
    print(f"{positions:,} positions, V = {vocabulary:,}, seed {arguments.seed}\n")
    print("\n".join(format_table(columns, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_source_options(parser, sequences=112, length=512)
    parser.add_argument("--fit", type=int, default=80, help="sequences that make the tables")
    parser.add_argument("--threshold", type=float, default=0.04)
    parser.add_argument("--clusters", type=int, nargs="*", default=[16, 256])
    parser.add_argument("--scale", type=float, default=1.06, help="of the new units")
    parser.add_argument("--seed", type=int, default=0, help="of the records")
    arguments = parser.parse_args()
    hide_progress_bars()
    truth, _ = read_teacher(arguments)
    print_table(truth, arguments)


if __name__ == "__main__":
    main()
