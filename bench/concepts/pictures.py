"""The pictures of docs/concepts, drawn from records of the passage."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bench.concepts.passage import (
    ENDING,
    Passage,
    decode_records,
    make_codec,
    make_records,
    show,
    spread_weights,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: How often the records of the passage are drawn again for the picture of the bias.
ROUNDS = 200
HEAD, TAIL, OTHER, EDGE = "#1f5fa8", "#d9731a", "#c4ccd6", "#555555"


def draw_record(passage: Passage) -> Figure:
    """The most probable tokens of the worked example, and which of them the record keeps."""
    codec = make_codec(len(passage.words))
    row = passage.find(ENDING)
    records = make_records(passage, codec)
    target = decode_records(passage, codec, records)
    weights_V = spread_weights(target, codec.vocabulary_size)[row]
    # Each token of the tail weighs a unit.
    unit = float(weights_V[int(records.slice(row, row + 1)["tail_ids"][0])])
    p_V = passage.temper()[row]
    shown = p_V.topk(36).indices
    figure, axes = make_figure(8, 3.2)
    heads = p_V[shown] > unit
    axes.bar(
        range(len(shown)), p_V[shown].tolist(), color=[HEAD if head else OTHER for head in heads]
    )
    kept = [place for place, each in enumerate(shown) if weights_V[each] > 0]
    axes.plot(kept, weights_V[shown[kept]].tolist(), "o", color=TAIL, markersize=5)
    axes.axhline(unit, color=EDGE, linewidth=0.8, linestyle="--")
    axes.text(35.4, unit + 0.008, f"a unit, {unit:.4f}", ha="right")
    axes.bar([0], [0], color=HEAD, label="head: probability of the teacher")
    axes.bar([0], [0], color=OTHER, label="tail: probability of the teacher")
    axes.plot([], [], "o", color=TAIL, label="weight in the record")
    axes.legend(frameon=False)
    axes.set_xticks(
        range(len(shown)), [show(passage.words[each]) for each in shown], rotation=90, fontsize=7
    )
    axes.set_ylabel("p")
    axes.set_title(f"“... {ENDING}”: the 36 most probable next tokens", loc="left")
    return figure


def average_records(passage: Passage) -> tuple[Tensor, float]:
    """The mean weights (N, V) of records with different seeds, and the mean count of entries."""
    total_NV = torch.zeros(passage.logits_NV.shape, dtype=torch.float64)
    entries = 0
    for seed in range(ROUNDS):
        codec = make_codec(len(passage.words), seed)
        target = decode_records(passage, codec, make_records(passage, codec))
        total_NV += spread_weights(target, codec.vocabulary_size)
        entries += len(target.ids_E)
    return total_NV / ROUNDS, entries / ROUNDS / len(passage.gold_N)


def keep_top(p_NV: Tensor, k: int) -> Tensor:
    """The weights of records that keep the k most probable tokens, scaled so that they sum to 1."""
    top = p_NV.topk(k)
    kept_NV = torch.zeros_like(p_NV).scatter_(1, top.indices, top.values)
    return kept_NV / kept_NV.sum(1, keepdim=True)


def draw_bias(passage: Passage) -> Figure:
    """The mean weight over the mean p, for tokens of each probability."""
    p_NV = passage.temper()
    mean_NV, entries = average_records(passage)
    k = round(entries)
    bounds = 10.0 ** np.arange(-5, 0.25, 0.5)
    centres = np.sqrt(bounds[1:] * bounds[:-1])

    def compare(weights_NV: Tensor) -> list[float]:
        ranges = [(p_NV > low) & (p_NV <= high) for low, high in itertools.pairwise(bounds)]
        return [float(weights_NV[each].sum() / p_NV[each].sum()) for each in ranges]

    figure, axes = make_figure(6.4, 3.2)
    axes.axhline(1, color=EDGE, linewidth=0.8, linestyle="--")
    axes.semilogx(centres, compare(keep_top(p_NV, k)), "s-", color=TAIL,
                  label=f"the {k} most probable tokens, renormalised")  # fmt: skip
    axes.semilogx(centres, compare(mean_NV), "o-", color=HEAD,
                  label=f"head and sampled tail, {entries:.0f} entries in the mean")  # fmt: skip
    axes.set_xlabel("the teacher's probability p of a token")
    axes.set_ylabel("mean weight / p")
    axes.set_ylim(-0.05, 2)
    axes.legend(frameon=False)
    axes.set_title("What records say about tokens of each probability", loc="left")
    return figure


def draw_temperature(passage: Passage) -> Figure:
    """The share of p_T that lies outside the most probable tokens, at each temperature."""
    temperatures = np.linspace(0.5, 4, 36)
    figure, axes = make_figure(6.4, 3.2)
    for k, colour in ((12, TAIL), (50, HEAD), (200, EDGE)):
        outside = [
            float(1 - passage.temper(each).topk(k).values.sum(1).mean()) for each in temperatures
        ]
        axes.plot(temperatures, outside, color=colour, label=f"outside the top {k}")
    axes.set_xlabel("temperature T")
    axes.set_ylabel("mean share of the probability")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    axes.set_title(
        f"Probability that a top-k record drops (V = {len(passage.words):,})", loc="left"
    )
    return figure


def make_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


DRAWINGS = {"record": draw_record, "bias": draw_bias, "temperature": draw_temperature}


def draw_pictures(passage: Passage, folder: Path) -> None:
    """Write the pictures as SVG; the same data give the same bytes."""
    import matplotlib

    # Text stays text, and no identifier or date differs from run to run.
    style = {"svg.hashsalt": "potstill", "svg.fonttype": "none", "font.size": 9}
    for name, draw in DRAWINGS.items():
        with matplotlib.rc_context(style):
            draw(passage).savefig(folder / f"{name}.svg", metadata={"Date": None})
