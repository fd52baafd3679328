"""How the finished student is measured."""

from __future__ import annotations

from pydantic import Field

from kd.config.section import Section


class EvaluationConfig(Section):
    """What the report measures besides perplexity and KL from the records, and what `kd eval` does."""

    teacher: bool = Field(
        False, description="Run the teacher on the held-out text: KL, total variation and agreement from all of p."
    )
    baseline: bool = Field(
        False, description="Train a student on cross-entropy alone too, with the same seed and steps, and compare."
    )
    top_k: int = Field(5, ge=1, le=100, description="k of top-k agreement.")
    bins: int = Field(15, ge=2, le=100, description="Bins of the calibration error (ECE).")
    prompts: tuple[str, ...] = Field((), max_length=64, description="Texts to continue, as samples in the report.")
    max_new_tokens: int = Field(64, ge=1, le=4096, description="Tokens of a sample.")
    tasks: tuple[str, ...] = Field((), max_length=64, description="Tasks of lm-eval (pip install 'potstill[eval]').")
    plots: bool = Field(True, description="Draw the curves and the reliability plot as PNG files.")
