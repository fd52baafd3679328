"""The loss around a finished student, and from its start to its end: ``kd landscape``.

    plane   L(w + a d + b e) with two random directions d and e, each row of each matrix as long as
            that of w, so that the scale of rows does not matter; biases and norms stay (Li et al.,
            "Visualizing the Loss Landscape of Neural Nets", arXiv 1712.09913)
    line    L((1 - t) w_start + t w_end), from before the start to beyond the end (Goodfellow et
            al., "Qualitatively characterizing neural network optimization problems", arXiv
            1412.6544)

L is (1 - alpha) T^2 KL(teacher || student) + alpha CE, in nats per token, with alpha and T as at
the end of training, on a few training sequences and on a few held-out ones, in float32. Without
records it is CE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import sub
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.config.job import JobConfig
from kd.config.jobfile import read_record
from kd.errors import ModelError
from kd.evaluation.baseline import build_starting_student
from kd.evaluation.teacher_comparison import EvaluatedModel
from kd.experiments.landscape_page import Landscape, LossLine, LossPlane, render_landscape
from kd.files import read_json, write_json, write_text
from kd.loss.decoder import TargetDecoder
from kd.loss.ramps import evaluate_ramp
from kd.models.lm_head import LMHead
from kd.models.loading import hide_progress_bars
from kd.models.precision import (
    Precision,
    compute_target_hidden_states,
    float32_products,
    pick_device,
)
from kd.models.saving import load_saved_student, save_student
from kd.models.vocabulary import choose_run_vocabulary
from kd.progress import SILENT, Monitor
from kd.stages.source import adopt_cache_layout, open_source
from kd.text.batches import Batch, Source, list_held_out, make_batch
from kd.training.evaluate import choose_evaluation_temperature, score_positions

Weights = dict[str, Tensor]
Losses = dict[str, float]
TRAIN, HELD_OUT = "train", "held_out"
#: How far the line goes before the start and beyond the end, as a share of its length.
_BEYOND = 0.25


@dataclass(frozen=True)
class LandscapeOptions:
    """What is measured: points on a side of the plane and on the line, and sequences of each split.

    ``radius`` is the reach of the plane in lengths of the student's rows.
    """

    points: int = 15
    line_points: int = 31
    radius: float = 1.0
    sequences: int = 16
    seed: int = 0


def survey(
    run_dir: Path, home: Path, folder: Path, options: LandscapeOptions, monitor: Monitor = SILENT
) -> Landscape:
    """Measure the landscape of the finished run in ``run_dir``; write and return it.

    ``folder`` gets landscape.json and index.html. Raises ``ModelError`` for a run without a
    student, and the errors of an opened cache.
    """
    config = read_run_job(run_dir)
    hide_progress_bars()
    tokenizer, source = open_source(config, home, run_dir, monitor)
    config = adopt_cache_layout(source, config)
    student = load_saved_student(run_dir / "student")
    end = copy_weights(student)
    # The student before training, in the form in which a finished one is saved.
    with TemporaryDirectory(prefix="kd-start-") as name:
        first = build_starting_student(config, tokenizer)
        save_student(first, tokenizer, Path(name), config.student, torch.float32)
        start = copy_weights(load_saved_student(Path(name)))
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    surface = LossSurface.of(config, source, student, vocabulary, options)
    meter = _Meter(surface, monitor, options.points**2 + options.line_points)
    with float32_products(), torch.no_grad():
        line = _measure_line(meter, start, end, options)
        plane = _measure_plane(meter, end, options)
    tokens = {name: sum(map(len, each)) for name, each in surface.batches.items()}
    weights = (surface.alpha, surface.temperature)
    found = Landscape(config.name, str(run_dir), asdict(options), *weights, tokens, line, plane)
    write_json(folder / "landscape.json", found.to_json())
    write_text(folder / "index.html", render_landscape(found))
    return found


def read_run_job(run_dir: Path) -> JobConfig:
    """Return the job of a finished run. Raises ``ModelError`` where it has no student."""
    content = read_json(run_dir / "config.json")
    if content is None or not (run_dir / "student").is_dir():
        detail = f"the run {run_dir} has no student, or no config.json."
        raise ModelError(detail, "Name a run whose training has finished.")
    return read_record(content)


# ---------------------------------------------------------------------- weights and directions


def copy_weights(model: nn.Module) -> Weights:
    """Return a copy of every weight; one that has several names is there once."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def draw_direction(weights: Weights, seed: int) -> Weights:
    """Draw a random direction whose rows are as long as those of ``weights``; 0 for vectors.

    The numbers are drawn on the CPU, so that they do not depend on the device.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _draw_like(weight, generator) for name, weight in weights.items()}


def _draw_like(weight: Tensor, generator: torch.Generator) -> Tensor:
    if weight.ndim < 2:
        return torch.zeros_like(weight)
    drawn = torch.randn(weight.shape, generator=generator).to(weight)
    lengths = [torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (weight, drawn)]
    return drawn * (lengths[0] / lengths[1].clamp(min=1e-12))


def set_weights(model: nn.Module, origin: Weights, *moves: tuple[float, Weights]) -> None:
    """Set the weights of ``model`` to ``origin`` plus the sum of factors times directions."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(origin[name])
            for factor, direction in moves:
                weight.add_(direction[name].to(weight), alpha=factor)


# ---------------------------------------------------------------------- the loss


@dataclass(frozen=True)
class LossSurface:
    """The loss of a student on fixed batches, as a function of its weights."""

    student: PreTrainedModel
    lm_head: LMHead
    decoder: TargetDecoder
    batches: Mapping[str, list[Batch]]
    alpha: float
    temperature: float

    @classmethod
    def of(
        cls,
        config: JobConfig,
        source: Source,
        student: PreTrainedModel,
        vocabulary: int,
        options: LandscapeOptions,
    ) -> LossSurface:
        """Take ``options.sequences`` of each split, chosen by the seed."""
        device = pick_device()
        measured = EvaluatedModel.of(student, vocabulary, config.data)
        train = config.require_train()
        steps = train.count_steps(source.train_count) or 1
        alpha = 1.0 if source.codec is None else evaluate_ramp(config.loss.alpha, steps, steps)
        batches = {}
        generator = np.random.default_rng(options.seed)
        splits = {TRAIN: range(source.train_count), HELD_OUT: list_held_out(source)}
        for split, places in splits.items():
            if count := len(places):
                chosen = generator.choice(count, min(options.sequences, count), replace=False)
                numbers = np.sort(chosen) + places.start
                parts = np.split(numbers, range(train.batch_size, len(numbers), train.batch_size))
                batches[split] = [make_batch(*source.read(part)).to(device) for part in parts]
        decoder = TargetDecoder.of(source, device)
        temperature = choose_evaluation_temperature(config.loss)
        return cls(student, measured.lm_head, decoder, batches, alpha, temperature)

    def measure(self) -> Losses:
        """Return the mean loss of a token in each split, with the weights as they are now."""
        return {split: self._measure_split(batches) for split, batches in self.batches.items()}

    def _measure_split(self, batches: list[Batch]) -> float:
        precision = Precision.choose("fp32", self.student.device)
        head = self.lm_head.refresh(self.student)
        total = 0.0
        for batch in batches:
            hidden_ND = compute_target_hidden_states(self.student, batch, precision)
            targets = self.decoder.decode(batch.gold_N, batch.teacher, self.temperature)
            score = score_positions(hidden_ND, head, targets)
            total += self.alpha * score.ce
            total += (1 - self.alpha) * self.temperature**2 * (score.kd or 0.0)
        return total / max(sum(map(len, batches)), 1)


# ---------------------------------------------------------------------- line and plane


@dataclass
class _Meter:
    """Measures and counts the points; stops between two of them when that is asked for."""

    surface: LossSurface
    monitor: Monitor
    total: int
    done: int = 0

    def measure(self, origin: Weights, *moves: tuple[float, Weights]) -> Losses:
        set_weights(self.surface.student, origin, *moves)
        found = self.surface.measure()
        self.done += 1
        facts = {"done": self.done, "total": self.total, "unit": "points"}
        self.monitor.emit("progress", **facts, fraction=round(self.done / self.total, 6))
        self.monitor.check("while the landscape was measured; nothing is written")
        return found


def _measure_line(
    meter: _Meter, start: Weights, end: Weights, options: LandscapeOptions
) -> LossLine:
    """Measure the loss from before the start to beyond the end."""
    path = {name: weight - start[name].to(weight) for name, weight in end.items()}
    places = [float(each) for each in np.linspace(-_BEYOND, 1 + _BEYOND, options.line_points)]
    curves = _gather([meter.measure(start, (place, path)) for place in places])
    barrier = {name: find_barrier(places, values) for name, values in curves.items()}
    return LossLine(places, curves, barrier)


def find_barrier(places: list[float], losses: list[float]) -> float | None:
    """Return by how much the loss rises above its least so far, on the way from 0 to 1, at most.

    0 where it falls all the way. None where a loss is not finite.
    """
    way = [loss for place, loss in zip(places, losses, strict=True) if 0 <= place <= 1]
    if not all(map(math.isfinite, way)):
        return None
    return max(map(sub, way, accumulate(way, min)), default=0.0)


def _measure_plane(meter: _Meter, end: Weights, options: LandscapeOptions) -> LossPlane:
    """Measure the loss on a square grid around the trained weights."""
    one, other = (draw_direction(end, 2 * options.seed + each) for each in (0, 1))
    places = [float(each) for each in np.linspace(-options.radius, options.radius, options.points)]
    rows = [
        _gather([meter.measure(end, (along, one), (upward, other)) for along in places])
        for upward in places
    ]
    set_weights(meter.surface.student, end)
    centre = meter.surface.measure()
    grids = {name: [row[name] for row in rows] for name in centre}
    rise = {name: measure_rise(places, grid, centre[name]) for name, grid in grids.items()}
    return LossPlane(places, grids, centre, rise)


def measure_rise(places: list[float], grid: list[list[float]], centre: float) -> float | None:
    """Return the mean rise of the loss above ``centre`` at about half of the largest distance.

    None where no finite point lies there.
    """
    reach = max(places)
    found = [
        loss - centre
        for upward, row in zip(places, grid, strict=True)
        for along, loss in zip(places, row, strict=True)
        if abs(math.hypot(upward, along) / reach - 0.5) <= 0.1 and math.isfinite(loss)
    ]
    return sum(found) / len(found) if found else None


def _gather(losses: list[Losses]) -> dict[str, list[float]]:
    return {name: [each[name] for each in losses] for name in losses[0]}
