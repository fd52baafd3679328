"""The section ``evaluation``: how the finished student is measured."""

from __future__ import annotations

from pydantic import Field

from kd.config.section import Section


class EvaluationConfig(Section):
    """What the report and `kd eval` measure besides perplexity and KL of the records."""

    teacher: bool = False
    """Run the teacher on the held-out text, and compute KL, total variation and agreement from its
    whole distribution."""

    baseline: bool = False
    """Also train a student on cross-entropy alone, with the same seed and steps, and compare the
    two."""

    prompts: tuple[str, ...] = Field((), max_length=64)
    """Prompts; the report shows how each model continues them."""

    samples: int = Field(1, ge=0, le=8)
    """Number of held-out texts whose beginning the student continues by 32 tokens at each
    evaluation during training; the first of `prompts` replace them. Not available if several
    devices train the student, or train.compile is on."""

    continuations: int = Field(5, ge=0, le=64)
    """Number of held-out texts whose beginning teacher and student continue in the report, side by
    side, with the speed and memory of both on this device; the texts of `prompts` replace them. The
    teacher is loaded for this if it is on this machine and fits into the free memory. 0: the
    teacher is not loaded for this."""

    max_new_tokens: int = Field(64, ge=1, le=4096)
    """The most tokens of a continuation."""

    tasks: tuple[str, ...] = Field((), max_length=64)
    """Benchmark tasks of lm-eval (pip install 'potstill[eval]')."""
