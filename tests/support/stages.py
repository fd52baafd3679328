"""Models and rows so small that every stage of a job runs in a moment."""

from __future__ import annotations

from bench.gpu.stage_work import ModelShape, Sizes

TINY = Sizes(
    {"tiny": ModelShape(2, 64, 128, 4, 2, tied=False)},
    student="tiny",
    vocabulary=512,
    document=16,
    row=32,
    tokens=64,
    head=(64, 32, 512),
)
