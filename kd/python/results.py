"""What a call returns: frozen records that show themselves as text, as HTML and as plots."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.json_object import Json
from kd.config.job import JobConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Fact = tuple[str, str]


class _Shown:
    """Shows the facts of a record: aligned lines as text, a table in a notebook."""

    def _title(self) -> str:
        raise NotImplementedError

    def _facts(self) -> Iterable[Fact]:
        raise NotImplementedError

    def __str__(self) -> str:
        facts = list(self._facts())
        width = max(len(name) for name, _ in facts)
        return "\n".join([self._title(), *(f"  {name:<{width}}  {value}" for name, value in facts)])

    def _repr_html_(self) -> str:
        """Return a table for a notebook; every text in it is escaped."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table><caption>{html.escape(self._title())}</caption>{rows}</table>"


def _number(name: str, value: float | None, form: str = ",.2f") -> list[Fact]:
    return [] if value is None else [(name, f"{value:{form}}")]


def _list_measures(found: StudentResult | EvaluationResult) -> Iterable[Fact]:
    yield from _number("perplexity", found.perplexity)
    yield from _number("perplexity of the teacher", found.teacher_perplexity)
    yield from _number("bits per byte", found.bits_per_byte, ".4f")
    yield from _number("KL", found.kl, ".4f")
    yield from _number("agreement", found.agreement, ".1%")


@dataclass(frozen=True, eq=False)
class CacheResult(_Shown):
    """A sealed cache of a teacher's predictions; any number of students can be trained from it.

    ``bytes_per_token`` counts everything on the disk, ``tokens`` the tokens with a record.
    ``reused`` says that the cache existed before the call. The functions of ``kd`` take the result
    in place of the path ``folder``.
    """

    fingerprint: str
    folder: Path
    bytes_per_token: float
    entries_per_token: float
    tokens: int
    reused: bool
    job: JobConfig = field(repr=False)
    report: Mapping[str, Any] = field(repr=False)
    warnings: tuple[str, ...] = field(default=(), repr=False)

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def _title(self) -> str:
        return f"Cache {self.fingerprint[:12]}"

    def _facts(self) -> Iterable[Fact]:
        yield "teacher", self.job.teacher_name or ""
        yield "tokens", f"{self.tokens:,}"
        yield "bytes per token", f"{self.bytes_per_token:.1f}"
        if self.entries_per_token:  # none where a record is no list of entries
            yield "entries per token", f"{self.entries_per_token:.1f}"
        yield "captured", "before this call" if self.reused else "now"
        yield "folder", str(self.folder)


@dataclass(frozen=True, eq=False)
class StudentResult(_Shown):
    """A trained student, and what was measured of it on the held-out text.

    Perplexities are per held-out token: compare them only where text and vocabulary are the same,
    and ``bits_per_byte`` for any tokenizer. ``kl`` is KL(teacher ‖ student) in nats per held-out
    token, and ``agreement`` the share of tokens at which both have the same best next token, both
    by the teacher's records. None = not measured. ``run`` is the folder of the run, ``folder`` that
    of the student, a Hugging Face folder. The functions of ``kd`` take the result in place of the
    path ``folder``.
    """

    run: Path
    perplexity: float | None
    perplexity_before: float | None
    teacher_perplexity: float | None
    bits_per_byte: float | None
    kl: float | None
    agreement: float | None
    job: JobConfig = field(repr=False)
    report: Mapping[str, Any] = field(repr=False)
    warnings: tuple[str, ...] = field(default=(), repr=False)

    @property
    def folder(self) -> Path:
        """The folder of the student."""
        return self.run / "student"

    @property
    def report_page(self) -> Path:
        """The report as a page of Markdown."""
        return self.run / "report.md"

    @property
    def metrics(self) -> list[Json]:
        """The lines of metrics.jsonl: losses by step, evaluations, checks."""
        from kd.tracking.metrics import read_metrics

        return read_metrics(self.run / "metrics.jsonl")

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the student in float32, on the GPU if there is one, and its tokenizer."""
        from kd.models.saving import load_saved_student
        from kd.models.tokenizers import load_tokenizer

        return load_saved_student(self.folder), load_tokenizer(self.folder)

    def plot(self) -> Figure:
        """Draw the losses by step, and the held-out perplexity with the teacher's as a line."""
        from kd.python.plots import plot_training

        return plot_training(self.metrics, self.teacher_perplexity)

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def _title(self) -> str:
        return f"Student {self.job.name}"

    def _facts(self) -> Iterable[Fact]:
        yield from _number("perplexity before", self.perplexity_before)
        yield from _list_measures(self)
        yield "steps", f"{self.report.get('steps') or 0:,}"
        yield from (("warning", text) for text in self.warnings)
        yield "student", str(self.folder)
        yield "report", str(self.report_page)


@dataclass(frozen=True, eq=False, kw_only=True)
class DistillationResult(StudentResult):
    """A trained student with the cache that it learned from."""

    cached: CacheResult

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the cache."""
        return self.cached.fingerprint

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the cache for each token, everything counted."""
        return self.cached.bytes_per_token

    def _facts(self) -> Iterable[Fact]:
        yield from super()._facts()
        yield "bytes per token", f"{self.bytes_per_token:.1f}"
        yield "cache", str(self.cached.folder)


@dataclass(frozen=True, eq=False)
class EvaluationResult(_Shown):
    """What was measured of a model on a text.

    ``kl`` is KL(teacher ‖ model) in nats per token of the whole distributions, ``agreement`` the
    share of tokens at which both have the same best next token; None without a teacher. ``out`` is
    the folder of report.md and report.json.
    """

    model: Path
    out: Path
    tokens: int
    perplexity: float
    teacher_perplexity: float | None
    bits_per_byte: float | None
    kl: float | None
    agreement: float | None
    report: Mapping[str, Any] = field(repr=False)
    warnings: tuple[str, ...] = field(default=(), repr=False)

    def _title(self) -> str:
        return f"Evaluation of {self.model}"

    def _facts(self) -> Iterable[Fact]:
        yield "tokens", f"{self.tokens:,}"
        yield from _list_measures(self)
        yield from (("warning", text) for text in self.warnings)
        yield "report", str(self.out / "report.md")
