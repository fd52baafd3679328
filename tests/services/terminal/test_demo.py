"""``kd demo --baseline`` compares the two students, and says when the teacher made one worse."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from bench.support.paths import ROOT
from cache.errors import PotstillError
from kd.client.wire.jobs import Job
from services.terminal.commands.demo import EXAMPLE, _compare, copy_example


def compare(folder: Path, distilled: float, plain: float) -> str:
    """Return what the comparison prints for two students with these perplexities."""
    jobs = []
    for name, perplexity in (("austen", distilled), ("austen-baseline", plain)):
        path = folder / f"{name}.json"
        teacher = {"teacher_perplexity": 35.9} if name == "austen" else {}
        report = {"student_perplexity": perplexity, "held_out_tokens": 38250, **teacher}
        path.write_text(json.dumps(report), encoding="utf-8")
        jobs.append(Job.model_construct(name=name, artifacts={"report.json": str(path)}))
    text = io.StringIO()
    _compare(jobs, Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.parametrize(
    ("distilled", "plain", "first", "share"),
    [
        (70.8, 97.9, "The teacher helped: held-out perplexity 70.80 with it, 97.90 without", True),
        (97.9, 70.8, "The student is worse with the teacher than without it", False),
    ],
)
def test_the_comparison_begins_with_what_the_teacher_was_worth(
    distilled: float, plain: float, first: str, share: bool, tmp_path: Path
) -> None:
    shown = compare(tmp_path, distilled, plain)
    assert shown.startswith(first)
    assert "38,250 tokens" in shown.splitlines()[0]
    assert re.search(r"tokens of the held-out text +38,250 +38,250", shown)
    assert ("of the distance" in shown) == share
    assert ("Try another teacher" in shown) != share


def test_the_example_is_copied_whole_and_never_over_another(tmp_path: Path) -> None:
    written = copy_example(tmp_path / "new")
    assert written == tmp_path / "new" / EXAMPLE.parent
    source = (ROOT / EXAMPLE).parent
    files = [path for path in source.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert (written / path.relative_to(source)).read_bytes() == path.read_bytes()
    with pytest.raises(PotstillError, match="exists already"):
        copy_example(tmp_path / "new")
