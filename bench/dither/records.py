"""Compare records of profile threshold that could be: bytes a token, noise, and bias.

    python bench/dither/records.py [--teacher FOLDER [--gguf-file NAME]] [--text FILE]
                                   [--sequences 112] [--length 512] [--fit 80] [--threshold 0.04]
                                   [--clusters 1 16 256] [--every 1] [--slots 32768]
                                   [--heads KIND ...] [--scale 1.06] [--seed 0]

The last ``--fit`` sequences make the tables of the dither, the others are measured (every n-th
position). Bytes are real: symbols and bits as in cache/idcode.py, then blosc's zstd as in shards.

heads   logarithms: as in shards. units: floor or ceil of p / u, by one systematic sample of all
        heads and of the tail as a whole; u is 1 / ceil(1 / threshold) of all of p, or of the mass
        beside the next token, whose log-probability is stored. coarse units: the mass is that
        beside the stored log-probability, which has steps of 2^-5 in place of 2^-8; they are
        --scale times as large, and the entropy is stored for no position.
tails   ids: as in shards. dither: bench/dither/tails.py, with one table for each cluster of the
        teacher's hidden states; the cluster of each position is stored.
bytes   all columns but tokens. The next token's log-probability is in all rows, the entropy in
        all but those of coarse units.
side    the frequency classes, or the tables and the head's orders of all clusters, over the
        measured positions: a longer text divides them further
noise   the mean of |w - p|^2, the realised weights against the teacher's probabilities
z       of the sums of weights, the largest over the decades of p

    N   positions of a chunk      V   vocabulary      H   heads      M   drawn tokens
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numcodecs import Blosc
from numpy.typing import NDArray
from torch import Tensor

from bench.coding import count_coded_bytes, count_compressed_bytes
from bench.dither.tails import Drawn, Tables, draw_tails, write_drawn
from bench.records import Truth, add_source_options, format_table, read_teacher
from cache.idcode import compute_frequency_classes, order_tokens
from cache.rounding import (
    KNOWN_STEP,
    RecordPositions,
    round_entropy,
    round_stochastically,
)
from kd.capture.sampling import BLOCK
from kd.models.loading import hide_progress_bars

CHUNK = 64
#: The step of the next token's log-probability beside coarse units.
COARSE_STEP = 2.0**-5
#: Rounds of k-means, which converges slowly after them.
_ROUNDS = 12
_DECADES = 8


@dataclass(frozen=True)
class Chunk:
    """Some positions of one sequence, with heads (H,) and tails split off."""

    sequence: int
    position_N: NDArray[np.int64]
    hidden_ND: Tensor
    gold_N: Tensor
    p_NV: Tensor
    gold_logp_N: Tensor
    entropy_N: Tensor
    tail_NV: Tensor
    rows_H: Tensor
    ids_H: Tensor
    p_H: Tensor

    @property
    def places(self) -> RecordPositions:
        """The positions, as random rounding needs them."""
        return RecordPositions(np.full(len(self.position_N), self.sequence), self.position_N)


def read_chunks(truth: Truth, numbers: range, threshold: float, every: int) -> Iterator[Chunk]:
    """Read every n-th position of some sequences."""
    for number in numbers:
        hidden_ND, gold_N = truth.hidden[number][::every], truth.gold[number][::every]
        for start in range(0, len(gold_N), CHUNK):
            rows = slice(start, start + CHUNK)
            logits_NV = truth.head.compute_logits(hidden_ND[rows])
            logp_NV = torch.log_softmax(logits_NV.double(), 1)
            p_NV = logp_NV.exp()
            gold_N1 = gold_N[rows, None]
            tail_NV = p_NV.scatter(1, gold_N1, 0.0)
            rows_H, ids_H = (tail_NV > threshold).nonzero(as_tuple=True)
            p_H = tail_NV[rows_H, ids_H]
            tail_NV[rows_H, ids_H] = 0.0
            yield Chunk(
                number,
                np.arange(start, start + len(gold_N1)) * every,
                hidden_ND[rows],
                gold_N1[:, 0],
                p_NV,
                logp_NV.gather(1, gold_N1)[:, 0],
                torch.special.entr(p_NV).sum(1),
                tail_NV,
                rows_H,
                ids_H,
                p_H,
            )


@dataclass(frozen=True)
class Clusters:
    """Centres of hidden states (C, D), the tables of tails, and the rank of each head (C, V)."""

    centres_CD: Tensor
    tables: Tables
    rank_CV: Tensor
    side_bytes: int

    def find(self, hidden_ND: Tensor) -> Tensor:
        """Return the nearest centre of each state, (N,)."""
        return find_nearest(self.centres_CD, hidden_ND)


def find_nearest(centres_CD: Tensor, hidden_ND: Tensor) -> Tensor:
    """Return the place of the nearest centre, (N,)."""
    parts = hidden_ND.split(8192)
    squares_C = 0.5 * centres_CD.square().sum(1)
    return torch.cat([(part @ centres_CD.T - squares_C).argmax(1) for part in parts])


def find_centres(hidden_ND: Tensor, count: int) -> Tensor:
    """Find centres by k-means, from states that are drawn with a fixed seed."""
    order = torch.randperm(len(hidden_ND), generator=torch.Generator().manual_seed(0))
    centres_CD = hidden_ND[order[:count]].clone()
    for _ in range(_ROUNDS):
        nearest_N = find_nearest(centres_CD, hidden_ND)
        sums_CD = torch.zeros_like(centres_CD).index_add_(0, nearest_N, hidden_ND)
        number_C1 = torch.bincount(nearest_N, minlength=len(centres_CD))[:, None]
        centres_CD = torch.where(number_C1 > 0, sums_CD / number_C1.clamp(min=1), centres_CD)
    return centres_CD


def fit_clusters(
    truth: Truth, numbers: range, threshold: float, counts: list[int], size: int
) -> dict[int, Clusters]:
    """Add up tails and heads of each cluster, for each number of clusters."""
    states_ND = torch.cat([truth.hidden[number] for number in numbers]).float()
    centres = {count: find_centres(states_ND, count) for count in counts}
    shape = truth.head.vocabulary
    tails = {count: torch.zeros(count, shape) for count in counts}
    heads = {count: torch.zeros(count, shape) for count in counts}
    for chunk in read_chunks(truth, numbers, threshold, 1):
        for count in counts:
            nearest_N = find_nearest(centres[count], chunk.hidden_ND.float())
            tails[count].index_add_(0, nearest_N, chunk.tail_NV.float())
            where = (nearest_N[chunk.rows_H], chunk.ids_H)
            heads[count].index_put_(where, chunk.p_H.float(), accumulate=True)
    return {
        count: make_clusters(centres[count], tails[count], heads[count], size) for count in counts
    }


def make_clusters(centres_CD: Tensor, tails_CV: Tensor, heads_CV: Tensor, size: int) -> Clusters:
    """Make tables and orders, and count their bytes: slots of each token, classes of its heads."""
    tables = Tables.of(tails_CV.double(), size)
    classes_CV = torch.log2(heads_CV + 1.0).ceil()
    # Tokens of one class: those that are likely in the tail, then by the heads of all clusters.
    weight_CV = classes_CV + 0.5 * heads_CV.sum(0).add(1.0).log() / 20 + tables.prior_CV
    rank_CV = weight_CV.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    slots = (tables.prior_CV * size).round().to(torch.int32).numpy().astype(np.uint16)
    side = count_compressed_bytes(slots, Blosc.SHUFFLE)
    side += count_compressed_bytes(classes_CV.to(torch.uint8).numpy())
    return Clusters(centres_CD, tables, rank_CV, side + centres_CD.numel() * 2)


@dataclass
class Tally:
    """The columns of one kind of record, and its errors."""

    columns: dict[str, list[NDArray[np.int64]]] = field(default_factory=lambda: defaultdict(list))
    noise: float = 0.0
    error_8: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_DECADES))
    variance_8: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_DECADES))

    def add(self, **columns: NDArray[np.int64] | Tensor) -> None:
        """Add the columns of a chunk."""
        for name, column in columns.items():
            self.columns[name].append(np.asarray(column).astype(np.int64))

    def compare(self, p_NV: Tensor, w_NV: Tensor, variance_NV: Tensor) -> None:
        """Add the errors of the weights of a chunk."""
        error_NV = w_NV - p_NV
        self.noise += float(error_NV.square().sum())
        decade_NV = (-p_NV.clamp(min=1e-30).log10()).floor().clamp(0, _DECADES - 1).long()
        for sums_8, values_NV in ((self.error_8, error_NV), (self.variance_8, variance_NV)):
            sums_8 += np.bincount(decade_NV.flatten(), values_NV.flatten(), _DECADES)

    def join(self, name: str) -> NDArray[np.int64]:
        """Return a whole column."""
        return np.concatenate(self.columns[name])

    @property
    def largest_z(self) -> float:
        """The largest |z| of a decade."""
        return float((np.abs(self.error_8) / np.sqrt(self.variance_8 + 1e-12)).max())


@dataclass(frozen=True)
class Heads:
    """Weights of known tokens and heads (N, V), and of each token that is drawn for the tail."""

    w_NV: Tensor
    count_N: Tensor
    variance_NV: Tensor
    rest_N: Tensor

    def place(self, drawn: Drawn) -> Tensor:
        """Return all weights: the drawn tokens share what is left."""
        w_NV = self.w_NV.clone()
        share_N = self.rest_N / self.count_N.clamp(min=1)
        w_NV.index_put_((drawn.rows_M, drawn.ids_M), share_N[drawn.rows_M], accumulate=True)
        return w_NV


def keep_logarithms(
    chunk: Chunk, threshold: float, tally: Tally, rng: np.random.Generator
) -> Heads:
    """Keep heads as shards do: steps of log(1 / threshold) / 127, and the number of the tail."""
    step = -math.log(threshold) / 127
    codes = round_stochastically(np.log(chunk.p_H.numpy()), step, rng.random(len(chunk.p_H)))
    w_NV = start_weights(chunk, KNOWN_STEP, tally, rng)
    w_NV[chunk.rows_H, chunk.ids_H] = torch.from_numpy(np.exp(-step * codes))
    mass_N = chunk.tail_NV.sum(1)
    count_N = torch.floor(mass_N / threshold).clamp(min=1).where(mass_N > 0, 0.0).long()
    tally.add(head_values=codes, tail_count=count_N)
    apart_N1 = (mass_N / count_N.clamp(min=1))[:, None]
    variance_NV = (chunk.tail_NV * (apart_N1 - chunk.tail_NV)).clamp(min=0.0)
    # Rounding at random to steps in the logarithm: step^2 / 6 on the mean.
    variance_NV[chunk.rows_H, chunk.ids_H] = (step * chunk.p_H).square() / 6
    add_gold_variance(chunk, KNOWN_STEP, variance_NV)
    return Heads(w_NV, count_N, variance_NV, 1.0 - w_NV.sum(1))


def keep_units(
    chunk: Chunk, threshold: float, tally: Tally, rng: np.random.Generator, kind: str
) -> Heads:
    """Count heads in units, and the next token too unless it is stored beside them.

    The number of units of a record follows from the next token's code. Where that was rounded by
    small steps it may be one off, which is the slack.
    """
    positions = len(chunk.gold_N)
    beside = kind != ALL_UNITS
    step = COARSE_STEP if kind == COARSE_UNITS else KNOWN_STEP
    heads_N = torch.bincount(chunk.rows_H, minlength=positions)
    rank_H = torch.arange(len(chunk.rows_H)) - (heads_N.cumsum(0) - heads_N)[chunk.rows_H]
    mass_N = chunk.tail_NV.sum(1)
    w_NV = start_weights(chunk, step, tally, rng)
    if not beside:
        w_NV.zero_()
    gold_N = chunk.gold_logp_N.exp()
    whole_N = mass_N.index_add(0, chunk.rows_H, chunk.p_H) + (0.0 if beside else gold_N)
    # What a reader knows.
    stored_whole_N = 1.0 - w_NV.sum(1)
    counted_N = stored_whole_N if kind == COARSE_UNITS else whole_N
    number_N = torch.ceil(counted_N / threshold - 1e-9).clamp(min=1)
    unit_N = whole_N / number_N
    sizes_NK = torch.zeros(positions, int(heads_N.max()) + 1, dtype=torch.float64)
    sizes_NK[:, 0] = 0.0 if beside else gold_N
    sizes_NK[chunk.rows_H, rank_H + 1] = chunk.p_H
    start_N1 = torch.from_numpy(rng.random((positions, 1)))
    running_NK = torch.floor((sizes_NK / unit_N[:, None]).cumsum(1) + start_N1)
    units_NK = running_NK.diff(dim=1, prepend=torch.zeros(positions, 1, dtype=torch.float64))
    count_N = (number_N - running_NK[:, -1]).clamp(min=0).where(mass_N > 0, 0.0).long()
    units_H = units_NK[chunk.rows_H, rank_H + 1]
    stored_N = stored_whole_N / number_N
    w_NV[chunk.rows_H, chunk.ids_H] = units_H * stored_N[chunk.rows_H]
    tally.add(head_values=units_H)
    if kind == UNITS:
        expected_N = torch.ceil(stored_whole_N / threshold - 1e-9).clamp(min=1)
        tally.add(slack=number_N - expected_N + 8)
    elif kind == ALL_UNITS:
        w_NV[torch.arange(positions), chunk.gold_N] = units_NK[:, 0] * stored_N
        tally.add(gold_units=units_NK[:, 0])
    size_NV = chunk.p_NV / unit_N[:, None]
    part_NV = size_NV - size_NV.floor()
    variance_NV = unit_N[:, None].square() * part_NV * (1.0 - part_NV)
    if beside:
        add_gold_variance(chunk, step, variance_NV)
    return Heads(w_NV, count_N, variance_NV, count_N * stored_N)


def start_weights(chunk: Chunk, step: float, tally: Tally, rng: np.random.Generator) -> Tensor:
    """Return the weights of the next tokens as their log-probabilities are stored."""
    draws_N = rng.random(len(chunk.gold_N))
    codes_N = round_stochastically(chunk.gold_logp_N.numpy(), step, draws_N)
    tally.add(known=codes_N)
    w_NV = torch.zeros_like(chunk.p_NV)
    w_NV[torch.arange(len(codes_N)), chunk.gold_N] = torch.from_numpy(np.exp(-step * codes_N))
    return w_NV


def add_gold_variance(chunk: Chunk, step: float, variance_NV: Tensor) -> None:
    """Set the variance of the next token's rounded probability."""
    variance_N1 = (step * chunk.gold_logp_N.exp()).square()[:, None] / 6
    variance_NV.scatter_(1, chunk.gold_N[:, None], variance_N1)


def draw_systematically(chunk: Chunk, count_N: Tensor, rng: np.random.Generator) -> Drawn:
    """Draw tails as ``kd.capture.sampling`` does, from blocks in random order."""
    vocabulary = chunk.tail_NV.shape[1]
    blocks = rng.permutation(-(-vocabulary // BLOCK))
    order_V = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    order_V = torch.from_numpy(order_V[order_V < vocabulary])
    running_NV = chunk.tail_NV[:, order_V].cumsum(1)
    slot_m = torch.arange(max(int(count_N.max()), 1))
    apart_N1 = (running_NV[:, -1] / count_N.clamp(min=1))[:, None]
    points_Nm = (torch.from_numpy(rng.random((len(count_N), 1))) + slot_m) * apart_N1
    found_Nm = torch.searchsorted(running_NV, points_Nm, right=True).clamp(max=vocabulary - 1)
    rows_M, slots_M = (slot_m < count_N[:, None]).nonzero(as_tuple=True)
    return Drawn(rows_M, order_V[found_Nm[rows_M, slots_M]], torch.zeros_like(rows_M))


def draw_by_dither(
    chunk: Chunk, heads: Heads, clusters: Clusters, tally: Tally, rng: np.random.Generator
) -> Drawn:
    """Draw tails with shared dither, and add the columns of heads and tails."""
    cluster_N = clusters.find(chunk.hidden_ND.float())
    uniform_NV = torch.from_numpy(rng.random(chunk.tail_NV.shape))
    places = (0, chunk.sequence, chunk.position_N)
    drawn = draw_tails(chunk.tail_NV, heads.count_N, clusters.tables, cluster_N, places, uniform_NV)
    written = write_drawn(drawn, len(cluster_N))
    rows = np.repeat(np.arange(len(cluster_N)), written.other_N)
    tally.add(
        cluster=cluster_N,
        gaps=written.k_E,
        accepted=written.accepted_N,
        other_ranks=clusters.rank_CV[cluster_N[rows], written.other_ids],
        others=written.other_N,
        head_ranks=clusters.rank_CV[cluster_N[chunk.rows_H], chunk.ids_H],
        heads=torch.bincount(chunk.rows_H, minlength=len(cluster_N)),
    )
    return drawn


def count_bytes(tally: Tally, vocabulary: int) -> dict[str, float]:
    """Count the bytes of each column."""
    known = tally.join("known").astype(np.uint16)
    found: dict[str, float] = {"known": count_compressed_bytes(known, Blosc.BITSHUFFLE)}
    for name in ("entropy", "gold_units", "slack", "head_values", "cluster"):
        if name in tally.columns:
            found[name] = count_compressed_bytes(tally.join(name).astype(np.uint8))
    heads = tally.join("heads")
    found["head_count"] = count_compressed_bytes(heads.astype(np.uint8))
    if "gaps" in tally.columns:
        others = tally.join("others")
        found["dithered"] = count_coded_bytes(tally.join("gaps"), tally.join("accepted"))
        found["other_count"] = count_compressed_bytes(others.astype(np.uint8))
        found["others"] = count_ranks(tally.join("other_ranks"), others, vocabulary)
        found["head_ids"] = count_ranks(tally.join("head_ranks"), heads, vocabulary)
    else:
        tails = tally.join("tails")
        ids = [tally.join("head_ids"), tally.join("tail_ids")]
        classes = compute_frequency_classes(ids, vocabulary)
        rank = np.argsort(order_tokens(classes))
        found["side"] = count_compressed_bytes(classes)
        found["head_ids"] = count_ranks(rank[ids[0]], heads, vocabulary)
        found["tail_ids"] = count_ranks(rank[ids[1]], tails, vocabulary)
    if "tail_count" in tally.columns:
        found["tail_count"] = count_compressed_bytes(tally.join("tail_count").astype(np.uint8))
    return found


def count_ranks(ranks: NDArray[np.int64], counts: NDArray[np.int64], vocabulary: int) -> float:
    """Count the bytes of ids by their ranks, which need not be sorted."""
    base = np.repeat(np.arange(len(counts)) * vocabulary, counts)
    return count_coded_bytes(np.sort(base + ranks) - base, counts)


#: The kinds of heads, by the name of the column.
LOGARITHMS = "logarithms"
UNITS = "units beside the next token"
ALL_UNITS = "units of all of p"
COARSE_UNITS = "coarse units"
HEADS = (LOGARITHMS, UNITS, ALL_UNITS, COARSE_UNITS)


def measure(
    truth: Truth, numbers: range, clusters: dict[int, Clusters], arguments: argparse.Namespace
) -> list[list[str]]:
    """Measure records on the same positions; return the rows of the table, today's first."""
    rows = []
    today: tuple[float, float] | None = None
    for kind in arguments.heads:
        for count, tally in measure_kind(kind, truth, numbers, clusters, arguments).items():
            found = count_bytes(tally, truth.head.vocabulary)
            side = found.pop("side", clusters[count].side_bytes if count else 0.0)
            positions = len(tally.join("known"))
            whole = sum(found.values())
            today = today or (whole, tally.noise)
            rows.append(
                [
                    kind,
                    f"dither, {count} clusters" if count else "ids",
                    f"{whole / positions:.2f}",
                    f"{whole / today[0]:.3f}",
                    f"{side / positions:.2f}",
                    f"{tally.noise / positions:.5f}",
                    f"{tally.noise / today[1]:.3f}",
                    f"{tally.largest_z:.1f}",
                    ", ".join(f"{name} {size / positions:.2f}" for name, size in found.items()),
                ]
            )
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def measure_kind(
    kind: str,
    truth: Truth,
    numbers: range,
    clusters: dict[int, Clusters],
    arguments: argparse.Namespace,
) -> dict[int, Tally]:
    """Measure one kind of heads, with ids and with each number of clusters."""
    rng = np.random.default_rng(arguments.seed)
    threshold = arguments.threshold * (arguments.scale if kind == COARSE_UNITS else 1.0)
    counts = (0, *clusters) if kind != COARSE_UNITS else tuple(clusters)
    tallies = {count: Tally() for count in counts}
    for chunk in read_chunks(truth, numbers, threshold, arguments.every):
        entropy_N = round_entropy(0, chunk.entropy_N.numpy(), chunk.places)
        for count, tally in tallies.items():
            if kind != COARSE_UNITS:
                tally.add(entropy=entropy_N)
            if kind == LOGARITHMS:
                heads = keep_logarithms(chunk, threshold, tally, rng)
            else:
                heads = keep_units(chunk, threshold, tally, rng, kind)
            if count:
                drawn = draw_by_dither(chunk, heads, clusters[count], tally, rng)
            else:
                drawn = draw_systematically(chunk, heads.count_N, rng)
                tally.add(
                    heads=torch.bincount(chunk.rows_H, minlength=len(chunk.gold_N)),
                    head_ids=chunk.ids_H,
                    tails=heads.count_N,
                    tail_ids=drawn.ids_M,
                )
            w_NV = heads.place(drawn)
            assert float((w_NV.sum(1) - 1.0).abs().max()) < 1e-9, "weights sum to 1"
            tally.compare(chunk.p_NV, w_NV, heads.variance_NV)
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_source_options(parser, sequences=112, length=512)
    parser.add_argument("--fit", type=int, default=80, help="sequences that make the tables")
    parser.add_argument("--threshold", type=float, default=0.04)
    parser.add_argument("--clusters", type=int, nargs="*", default=[1, 16, 256])
    parser.add_argument("--every", type=int, default=1, help="measure every n-th position")
    parser.add_argument("--heads", nargs="*", default=HEADS, choices=HEADS)
    parser.add_argument("--scale", type=float, default=1.06, help="of coarse units")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--slots", type=int, default=1 << 15, help="of a table, a power of two")
    arguments = parser.parse_args()
    hide_progress_bars()
    truth, _ = read_teacher(arguments)
    print_table(truth, arguments)


@torch.no_grad()
def print_table(truth: Truth, arguments: argparse.Namespace) -> None:
    """Fit the tables, measure and print."""
    measured = range(len(truth.hidden) - arguments.fit)
    fitted = range(len(measured), len(truth.hidden))
    clusters = fit_clusters(truth, fitted, arguments.threshold, arguments.clusters, arguments.slots)
    columns = ["heads", "tails", "bytes", "of today", "side", "noise", "of today", "z", "columns"]
    rows = measure(truth, measured, clusters, arguments)
    print(f"threshold {arguments.threshold:g}, V = {truth.head.vocabulary:,}")
    print("\n".join(format_table(columns, rows)))


if __name__ == "__main__":
    main()
