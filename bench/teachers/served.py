"""Noise and bias of records of a served teacher, for several proposals and numbers of ids.

    python bench/teachers/served.py [--teacher FOLDER [--gguf-file NAME]] [--text FILE]
                                    [--positions 700] [--rounds 50] [--quick]

The teacher's probabilities stand for a server's answers. A proposal draws ids at each position, and
the weights p / pi become records of profile threshold, again and again
(``kd.capture.served.drawing``, ``kd.capture.units.drawing``).

KL            KL(teacher || proposal) in nats: how well the proposal knows the teacher
weights       E |w - p|^2 of the weights before they become records, by arithmetic
records       the same of the records, measured
1e-1, ...     z of the sum of weights over all tokens whose probability is from 1e-1 to 1, and so
              on: the mean error over the rounds, over its standard error; with no bias |z| is small
sum           the mean sum of the weights of a record, and its standard deviation

Proposals: the text's own counts of tokens; the teacher itself with 8 and with 32 tokens of context,
in place of a student. The last rows are records of a local teacher, whose weights sum to 1.

Shapes: N positions, V vocabulary, E entries, D decades of probability.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.records import add_source_options, format_table, read_teacher
from cache.codec import Codec
from cache.profiles.threshold import SCORED_TOP, UnitSample
from cache.random import PURPOSE_PROPOSAL, draw_uniforms
from cache.rounding import RecordPositions
from kd.capture.remote import TopEntries
from kd.capture.sampling import make_sample
from kd.capture.served.drawing import HEAVY_TEMPERATURE, draw_ids, find_chances, weigh
from kd.capture.served.scoring import Scores
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.capture.units.fitting import make_tables
from kd.loss.sparse_targets import decode_units
from kd.models.layers import compute_hidden_states
from kd.models.loading import hide_progress_bars, load_model

#: Decades of a token's probability by their lower end; the last holds all below 1e-4.
DECADES = ("1e-1", "1e-2", "1e-3", "1e-4", "less")
COLUMNS = ["proposal", "ids", "KL", "weights", "records", *DECADES, "sum"]
IDS = (64, 128, 256)
CONTEXTS = (8, 32)
THRESHOLD = 0.04
ROWS = 64


@dataclass(frozen=True)
class Sample:
    """Positions of a text: the teacher's logits (N, V) and next tokens (N,), and their numbers."""

    logits_NV: Tensor
    gold_N: Tensor

    def cut(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, log-probabilities and next tokens of some positions at a time."""
        for start in range(0, len(self.gold_N), ROWS):
            rows = slice(start, start + ROWS)
            yield rows, self.logits_NV[rows].double().log_softmax(1), self.gold_N[rows]


def score(logp_NV: Tensor, asked: Tensor, gold_N: Tensor) -> Scores:
    """What a server with these probabilities answers."""
    best = logp_NV.topk(SCORED_TOP)
    gold = logp_NV.gather(1, gold_N[:, None])[:, 0]
    columns = (best.indices, best.values, gold, gold)
    top = TopEntries(np.arange(len(gold_N)), *(column.numpy() for column in columns))
    return Scores(top, logp_NV.gather(1, asked).numpy())


def measure_weights(sample: Sample, proposal_NV: Tensor, count: int) -> tuple[float, float]:
    """KL of the proposal, and the noise of the weights, by arithmetic."""
    divergences, noises = [], []
    for rows, logp_NV, gold_N in sample.cut():
        s_NV = proposal_NV[rows].double()
        p_NV = logp_NV.exp()
        divergences.append((p_NV * (logp_NV - s_NV.log_softmax(1))).sum(1))
        g_NV = s_NV.softmax(1) + (s_NV / HEAVY_TEMPERATURE).softmax(1)
        g_NV.scatter_(1, gold_N[:, None], 0.0)
        chance_NV = find_chances(g_NV, count).clamp(min=1e-300)
        noise_NV = p_NV.square() * (1.0 - chance_NV) / chance_NV
        noise_NV.scatter_(1, gold_N[:, None], 0.0)
        noises.append(noise_NV.scatter(1, logp_NV.topk(SCORED_TOP).indices, 0.0).sum(1))
    return float(torch.cat(divergences).mean()), float(torch.cat(noises).mean())


def measure_records(
    sample: Sample, proposal_NV: Tensor | None, count: int, rounds: int
) -> tuple[float, np.ndarray, np.ndarray]:
    """Draw records: their noise, the errors of each round and decade, and the sums of records.

    Without a proposal they are those of a local teacher.
    """
    vocabulary = sample.logits_NV.shape[1]
    codec = Codec("threshold", vocabulary, threshold=THRESHOLD, clusters=1, k=count, entropies=True)
    mean_1V = sample.logits_NV.softmax(1).mean(0, keepdim=True).numpy()
    tables = make_tables(mean_1V, np.zeros_like(mean_1V), np.zeros((1, 4), np.float32))
    sampler = UnitSampler(codec, tables)
    errors_RD = np.zeros((rounds, len(DECADES)))
    sums, noise = [], 0.0
    for rows, logp_NV, gold_N in sample.cut():
        p_NV = logp_NV.exp()
        decade_NV = (-logp_NV / math.log(10)).floor().clamp(0, len(DECADES) - 1).long()
        numbers = np.arange(rows.start, rows.start + len(gold_N))
        for number in range(rounds):
            weights_NV = draw_weights(sampler, (logp_NV, gold_N), proposal_NV, (number, numbers))
            difference_NV = weights_NV - p_NV
            noise += float(difference_NV.square().sum())
            sums.append(weights_NV.sum(1).numpy())
            found_D = torch.zeros(len(DECADES), dtype=torch.float64)
            found_D.index_add_(0, decade_NV.flatten(), difference_NV.flatten())
            errors_RD[number] += found_D.numpy()
    return noise / (rounds * len(sample.gold_N)), errors_RD, np.concatenate(sums)


def draw_weights(
    sampler: UnitSampler,
    teacher: tuple[Tensor, Tensor],
    proposal_NV: Tensor | None,
    places: tuple[int, np.ndarray],
) -> Tensor:
    """Draw records of some positions once, and return the weights that a reader finds, (N, V)."""
    logp_NV, gold_N = teacher
    number, numbers = places
    codec = sampler.codec
    logw_NV = logp_NV
    if proposal_NV is not None:
        uniform = draw_uniforms(number, PURPOSE_PROPOSAL, numbers, 0)
        own_NV = proposal_NV[numbers[0] : numbers[-1] + 1]
        drawn = draw_ids(own_NV, gold_N, codec.k, torch.from_numpy(uniform))
        weights = weigh(score(logp_NV, drawn.ids_NA, gold_N), drawn, gold_N)
        logw_NV = weights.spread(slice(None), codec.vocabulary_size)
    chances = UnitRandomness.of_each(codec, [number], [numbers], gold_N.device)
    found = sampler.draw_units(logw_NV, gold_N, torch.zeros_like(gold_N), chances[0])
    sample = make_sample([{name: column.numpy() for name, column in found.items()}], UnitSample)
    records = codec.encode(sample, RecordPositions(np.full(len(numbers), number), numbers))
    stored = records.columns.items()
    columns = {name: torch.from_numpy(column.astype(np.int64)) for name, column in stored}
    weights_NV = torch.zeros_like(logp_NV)
    decode_units(codec, columns, gold_N).subtract_(weights_NV, -1.0)
    return weights_NV


def make_cells(name: str, known: tuple[str, ...], found: tuple[float, np.ndarray, np.ndarray]):
    """Return a row of the table."""
    noise, errors_RD, sums = found
    error_D = errors_RD.std(0, ddof=1) / math.sqrt(len(errors_RD))
    z_D = np.divide(errors_RD.mean(0), error_D, where=error_D > 0, out=np.zeros_like(error_D))
    total = f"{sums.mean():.4f} ± {sums.std():.3f}"
    return [name, *known, f"{noise:.2e}", *(f"{z:.1f}" for z in z_D), total]


@torch.no_grad()
def read_sample(arguments: argparse.Namespace) -> tuple[Sample, dict[str, Tensor]]:
    """Read the text: the teacher's logits at some positions, and those of each proposal."""
    truth, _ = read_teacher(arguments)
    most = max(CONTEXTS)
    places = [
        (row, place)
        for row, mask in enumerate(truth.sequences.target_mask)
        for place in np.flatnonzero(mask).tolist()
        if place >= most
    ]
    every = np.linspace(0, len(places) - 1, min(arguments.positions, len(places))).astype(int)
    chosen = [places[index] for index in every]
    tokens = truth.sequences.tokens.astype(np.int64)
    ranks = [np.cumsum(mask) - 1 for mask in truth.sequences.target_mask]
    hidden = torch.stack([truth.hidden[row][ranks[row][place]] for row, place in chosen])
    gold_N = torch.tensor([tokens[row, place + 1] for row, place in chosen])
    counts_V = np.bincount(tokens.ravel(), minlength=truth.head.vocabulary) + 0.5
    counts_NV = torch.from_numpy(np.log(counts_V)).float().expand(len(chosen), -1)
    proposals = {"counts of the text": counts_NV}
    model = load_model(arguments.teacher, torch.float32, arguments.gguf_file).eval()
    for context in CONTEXTS:
        windows = np.stack([tokens[row, place + 1 - context : place + 1] for row, place in chosen])
        parts = torch.from_numpy(windows).split(32)
        states = torch.cat([compute_hidden_states(model, part)[:, -1] for part in parts])
        proposals[f"{context} tokens of context"] = truth.head.compute_logits(states)
    return Sample(truth.head.compute_logits(hidden), gold_N), proposals


@torch.no_grad()
def main(given: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_source_options(parser, sequences=4, length=512)
    parser.add_argument("--positions", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="32 positions, 10 rounds, 128 ids")
    arguments = parser.parse_args(given)
    numbers = IDS
    if arguments.quick:
        arguments.positions, arguments.rounds, arguments.sequences, numbers = 32, 10, 1, (128,)
    hide_progress_bars()
    sample, proposals = read_sample(arguments)
    print(f"{len(sample.gold_N)} positions, {arguments.rounds} rounds, threshold {THRESHOLD:g}\n")
    rows = []
    for name, proposal_NV in proposals.items():
        for count in numbers:
            divergence, noise = measure_weights(sample, proposal_NV, count)
            found = measure_records(sample, proposal_NV, count, arguments.rounds)
            known = (str(count), f"{divergence:.2f}", f"{noise:.2e}")
            rows.append(make_cells(name, known, found))
    found = measure_records(sample, None, 0, arguments.rounds)
    rows.append(make_cells("a local teacher", ("-", "0.00", "0"), found))
    print("\n".join(format_table(COLUMNS, rows)))


if __name__ == "__main__":
    main()
