"""The report of an ablation: the axes, and the state, the curves and the figures of every run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kd.experiments.plan import AblationAxis
from kd.files import read_json
from kd.tracking.metrics import read_metrics

REPORT = "report.json"
#: Points of a curve in the report; longer ones are thinned.
_POINTS = 200

Curve = list[tuple[float, float]]
"""Pairs of (tokens trained, value)."""


@dataclass(frozen=True)
class RunFigures:
    """The figures of a finished run: quality, time, speed and memory; None if not known."""

    held_out_loss: float | None
    held_out_perplexity: float | None
    held_out_kl: float | None
    held_out_agreement: float | None
    held_out_tokens: int | None
    steps: int | None
    tokens: int | None
    train_seconds: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    bytes_per_token: float | None

    @classmethod
    def read(cls, folder: Path) -> RunFigures:
        """Read the figures in the folder of a finished run."""
        report = read_json(folder / REPORT) or {}
        measured = read_json(folder / "measured.json") or {}
        profile = report.get("profile") or {}
        return cls(
            held_out_loss=measured.get("validation_loss"),
            held_out_perplexity=measured.get("validation_perplexity"),
            held_out_kl=measured.get("validation_kl"),
            held_out_agreement=measured.get("validation_agreement"),
            held_out_tokens=measured.get("validation_tokens"),
            steps=report.get("steps"),
            tokens=report.get("tokens"),
            train_seconds=report.get("train_seconds"),
            tokens_per_second=report.get("train_tokens_per_second"),
            peak_memory_bytes=profile.get("peak_memory_bytes"),
            bytes_per_token=report.get("bytes_per_token"),
        )


@dataclass(frozen=True)
class RunReport:
    """One run: ``state`` is waiting, finished or failed; ``folder`` is relative to the ablation's.

    ``own_records``: it was trained on other records than the job itself. ``temperature`` is the
    job's section. Without ``figures`` the run has not finished.
    """

    label: str
    folder: str
    state: str
    error: str
    own_records: bool
    temperature: object
    curves: Mapping[str, Curve]
    figures: RunFigures | None

    @property
    def held_out_loss(self) -> float | None:
        """The loss on the held-out text of the job itself, in nats per token."""
        return None if self.figures is None else self.figures.held_out_loss


@dataclass(frozen=True)
class AblationReport:
    """All that an ablation has found; ``base`` is the digest of the job itself among ``runs``."""

    name: str
    job: Mapping[str, Any]
    steps: int | None
    seed: int
    base: str
    axes: tuple[AblationAxis, ...]
    runs: Mapping[str, RunReport]

    def to_json(self) -> dict[str, Any]:
        """Return the content of report.json, in which a run has its figures beside its state."""
        content = asdict(self)
        for run in content["runs"].values():
            run |= run.pop("figures") or {}
        return content


def read_curves(path: Path) -> dict[str, Curve]:
    """Return the curves in metrics.jsonl."""
    lines = read_metrics(path)
    counted = [(line["step"], line["tokens"]) for line in lines if line.get("tokens")]
    # A step has about the same tokens in the whole run: evaluations name the step alone.
    each = counted[-1][1] / counted[-1][0] if counted and counted[-1][0] else 0.0
    names = {"loss": "loss", "perplexity": "validation_perplexity", "kl": "validation_kl"}
    told = [line for line in lines if line["type"] in ("metrics", "evaluation")]
    curves = {}
    for name, key in names.items():
        points = [(line["step"] * each, line[key]) for line in told if line.get(key) is not None]
        stride = -(-len(points) // _POINTS) or 1
        curves[name] = [*points[:-1:stride], *points[-1:]]
    return curves
