"""The report of a run as one HTML page: the facts of report.json, curves, nothing from outside."""

import re
from pathlib import Path

import pytest

from kd.errors import DataError
from kd.experiments.run_page import read_report, render_run, write_page
from kd.files import write_json

REPORT = {
    "name": "a <b>small</b> one",
    "teacher": "teacher",
    "steps": 20,
    "kept_step": 20,
    "tokens": 4096,
    "alpha": 1.0,
    "temperature": 1.0,
    "parameters": 5,
    "teacher_perplexity": 12.5,
    "student_perplexity_before": 900.0,
    "student_perplexity": 31.25,
    "held_out_tokens": 5000,
    "evaluation": {
        "tokens": 5000,
        "bytes": 20000,
        "models": {},
        "samples": {"student": [{"prompt": "<script>", "text": "![x](http://away/x.png)"}]},
    },
}
LINES = [
    {"type": "metrics", "step": step, "loss": 5.0 / step, "learning_rate": 0.1 / step}
    for step in range(1, 21)
] + [
    {"type": "evaluation", "step": step, "validation_perplexity": 900.0 / step, "validation_kl": 1}
    for step in (1, 10, 20)
]


def test_the_page_has_the_facts_the_curves_and_the_job() -> None:
    page = render_run(REPORT, LINES, {"name": "x", "train": {"max_steps": 20}})
    for fact in ("12.50", "900.00", "31.25", "5,000", "4,096", "max_steps: 20"):
        assert fact in page
    labels = re.findall(r'<svg role="img" aria-label="([^"]+)"', page)
    assert labels == ["Training", "Held-out perplexity", "Learning rate"]


def test_the_page_needs_nothing_from_outside_and_runs_nothing() -> None:
    page = render_run(REPORT, LINES, {})
    assert "<script" not in page and "<b>small" not in page
    assert "<img" not in page and "<link" not in page and "@import" not in page
    assert not re.findall(r'(?:src|href)\s*=\s*"(?!#)', page)
    assert "&lt;script&gt;" in page


def test_a_run_without_metrics_has_a_page_without_curves(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no report"):
        write_page(tmp_path)
    write_json(tmp_path / "report.json", REPORT)
    assert write_page(tmp_path) == tmp_path / "report.html"
    assert "<svg" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert read_report(tmp_path) == REPORT
    assert write_page(tmp_path, tmp_path / "mail" / "x.html").is_file()
