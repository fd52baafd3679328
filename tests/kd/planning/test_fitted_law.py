"""Laws of the held-out loss: against the law that made the runs, and against their own noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kd.errors import ConfigError
from kd.planning.budget import ComputeBudget
from kd.planning.finished_runs import FinishedRun, read_finished_runs
from kd.planning.fitted_law import expect_loss

SIZES = (1_000_000, 3_000_000, 10_000_000)
LENGTHS = (10_000_000, 40_000_000, 200_000_000)


def compute_loss(parameters: float, tokens: float) -> float:
    """The law of the tests: E = 1.8, A = 480, a = 0.4, B = 2000, b = 0.35."""
    return 1.8 + 480 / parameters**0.4 + 2000 / tokens**0.35


def make_runs(
    points: list[tuple[int, int]], noise: float = 0.0, seed: int = 0
) -> list[FinishedRun]:
    draws = np.random.default_rng(seed).normal(0.0, noise, len(points))
    return [
        FinishedRun(Path(f"run{i}"), n, d, compute_loss(n, d) + float(draws[i]))
        for i, (n, d) in enumerate(points)
    ]


GRID = [(n, d) for n in SIZES for d in LENGTHS]
BY_TOKENS = [(3_000_000, 10_000_000 * 2**step) for step in range(6)]


def test_the_law_that_made_the_runs_is_found_again() -> None:
    found = expect_loss(make_runs(GRID), 30_000_000, 600_000_000)
    assert found.law == "E + A / N^a + B / D^b" and found.runs == 9
    assert found.loss == pytest.approx(compute_loss(30_000_000, 600_000_000), abs=1e-3)
    assert found.constants["E"] == pytest.approx(1.8, rel=0.02)
    assert found.constants["a"] == pytest.approx(0.4, rel=0.05)
    assert found.constants["b"] == pytest.approx(0.35, rel=0.05)
    assert found.constants["A"] == pytest.approx(480, rel=0.5)
    assert "30,000,000 parameters, the runs have 1,000,000 to 10,000,000" in found.beyond


def test_runs_of_one_size_give_a_law_of_tokens_alone() -> None:
    found = expect_loss(make_runs(BY_TOKENS), 3_000_000, 100_000_000)
    assert found.law == "E + B / D^b" and found.beyond == ""
    assert found.loss == pytest.approx(compute_loss(3_000_000, 100_000_000), abs=1e-3)
    assert found.constants["B"] == pytest.approx(2000, rel=0.05)
    other = expect_loss(make_runs(BY_TOKENS), 9_000_000, 100_000_000)
    assert "the law knows nothing of other parameters" in other.beyond
    sizes = [(10**6 * 2**step, 40_000_000) for step in range(5)]
    assert expect_loss(make_runs(sizes), 4_000_000, 40_000_000).law == "E + A / N^a"


def test_few_runs_of_both_share_an_exponent_so_that_noise_can_be_measured() -> None:
    found = expect_loss(make_runs([*GRID[:3], GRID[4], GRID[8]], noise=0.01), 10**7, 10**8)
    assert found.law == "E + A / N^a + B / D^a"
    assert found.low is not None and found.high is not None
    assert found.low < found.loss < found.high


@pytest.mark.long
@pytest.mark.parametrize("points", [GRID, BY_TOKENS], ids=["sizes and tokens", "tokens"])
def test_the_interval_holds_new_runs_as_often_as_it_says(points: list[tuple[int, int]]) -> None:
    """Of 40 repetitions with new noise 32 or more hold: with 95 % each, fewer are 1 in 1,000."""
    noise = 0.02
    target = (3_000_000, 100_000_000)
    new = np.random.default_rng(99).normal(0.0, noise, 40)
    held = 0
    for seed in range(40):
        found = expect_loss(make_runs(points, noise, seed), *target)
        assert found.low is not None and found.high is not None
        held += found.low <= compute_loss(*target) + new[seed] <= found.high
    assert held >= 32


def test_runs_that_give_no_law_are_refused_by_what_they_lack() -> None:
    with pytest.raises(ConfigError, match="needs 5 finished runs, but there are 4"):
        expect_loss(make_runs(GRID[:4]), 10**6, 10**7)
    with pytest.raises(ConfigError, match="have 1 sizes and 1 numbers of tokens"):
        expect_loss(make_runs([GRID[0]] * 6), 10**6, 10**7)
    with pytest.raises(ConfigError, match="have 2 sizes and 2 numbers of tokens"):
        expect_loss(make_runs([*GRID[:2], *GRID[3:5], GRID[0]]), 10**6, 10**7)


# ---------------------------------------------------------------------- reports


def write_run(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True)
    report = {
        "parameters": 1000, "tokens": 5000, "student_perplexity": float(np.exp(2.5)),
        "held_out_tokens": 700,
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report | changes))
    return folder


def test_runs_are_read_from_their_reports_alone_or_together(tmp_path: Path) -> None:
    one = write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "runs" / "two", tokens=9000)
    (tmp_path / "runs" / "empty").mkdir()
    found = read_finished_runs([tmp_path / "runs", one])
    assert [(run.parameters, run.tokens) for run in found] == [(1000, 5000), (1000, 9000)]
    assert found[0].loss == pytest.approx(2.5)


def test_runs_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    broken = write_run(tmp_path / "broken")
    (broken / "report.json").write_text("{")
    silent = write_run(tmp_path / "silent", student_perplexity=None)
    with pytest.raises(ConfigError) as caught:
        read_finished_runs([broken, silent, tmp_path / "nowhere"])
    text = str(caught.value)
    assert f"{broken}" in text and "nowhere has no report.json" in text
    assert "its student_perplexity is None" in text and len(caught.value.problems) == 3


def test_runs_on_other_held_out_text_are_refused(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "other", held_out_tokens=800)
    with pytest.raises(ConfigError, match=r"different held-out texts \(tokens: 700 in .*, 800 in"):
        read_finished_runs([one, other])


# ---------------------------------------------------------------------- budget


def test_the_budget_is_that_of_the_papers() -> None:
    """Chinchilla itself: 70 B parameters, 1.4 T tokens, 5.88e23 FLOP."""
    found = ComputeBudget.of(70_000_000_000, 1_400_000_000_000)
    assert found.flops == pytest.approx(5.88e23)
    assert found.tokens_per_parameter == 20
    assert found.suited_parameters == found.parameters == found.best_parameters
    assert found.suited_tokens == found.tokens
    small = ComputeBudget.of(1000, 5000)
    assert small.best_parameters == round((6 * 1000 * 5000 / 120) ** 0.5)
