"""A small seeded soak of the whole service under faults, and tests of its judge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.faults import (
    Answer,
    Cluster,
    FaultInjector,
    RequestedAction,
    RequestedJob,
    Soak,
    SoakPlan,
)
from bench.support.judge import (
    LedgerLine,
    SoakVerdict,
    check_answers,
    check_history,
    check_versions,
    check_writers,
    find_allowed_ends,
    find_left_over,
    render_recoveries,
)
from bench.support.paths import ROOT

#: The faults that kill something: each with its weight and its victim. A worker that runs nothing
#: recovers nothing that could be measured, so others are killed more often.
KILLS = {
    "child killed": (4, "worker"),
    "worker killed": (1, "worker"),
    "Redis killed": (2, "plane"),
    "API killed": (2, "plane"),
}


@pytest.mark.alone
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_server_binary")
@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        pytest.param(
            SoakPlan(faults=20, jobs=7, seed=5, backlog=5, pace=(0.2, 0.8)),
            FaultInjector.KINDS,
            marks=pytest.mark.long,
            id="every kind",
        ),
        pytest.param(
            SoakPlan(faults=8, jobs=4, seed=78, backlog=4, pace=(0.3, 0.8)), KILLS, id="kills"
        ),
    ],
)
def test_a_soak_of_faults_leaves_nothing_wrong(
    tmp_path: Path, plan: SoakPlan, kinds: dict[str, tuple[int, str]]
) -> None:
    cluster = Cluster(tmp_path / "home", workers=2)
    try:
        soak = Soak(cluster, plan, FaultInjector(cluster, plan.seed, kinds))
        try:
            soak.run()
        finally:
            soak.close()
        verdict = SoakVerdict(soak, tmp_path / "spare")
        print(render_recoveries(verdict.rows(), verdict.summary()))
        assert verdict.violations == []
        assert len(soak.orders) >= plan.jobs and len(soak.chaos.injuries) >= plan.faults
        assert sum(len(times) for _, _, times in verdict.rows()) > 3, (
            "some recoveries were measured"
        )
    finally:
        cluster.close()


# ---------------------------------------------------------------------- the judge


def line(at: float, writer: str, what: str, number: int) -> LedgerLine:
    return LedgerLine(at, writer, what, "thing", number, "job_x")


def test_two_writers_may_take_turns_but_not_interleave() -> None:
    turns = [
        line(1, "a", "write", 1),
        line(2, "a", "wrote", 1),
        line(3, "b", "write", 2),
        line(4, "b", "wrote", 2),
    ]
    assert list(check_writers(turns)) == []
    (found,) = check_writers([*turns, line(5, "a", "write", 3)])
    assert "a of job_x writes 3 after b has begun" in found
    (found,) = check_writers([*turns, line(5, "b", "wrote", 2)])
    assert "number 2 was written 2 times" in found


@pytest.mark.parametrize(
    "statuses, retries, wrong",
    [
        (["queued", "running", "queued", "running", "succeeded"], 0, 0),
        (
            [
                "queued",
                "running",
                "pausing",
                "paused",
                "queued",
                "cancelled",
                "queued",
                "running",
                "succeeded",
            ],
            1,
            0,
        ),
        (["waiting", "queued", "running", "cancelling", "succeeded"], 0, 0),
        (["queued", "running", "succeeded", "succeeded"], 0, 2),
        (["queued", "running", "cancelled"], 0, 1),
        (["queued", "running", "failed", "queued", "running", "succeeded"], 0, 1),
        (["queued", "running"], 0, 1),
        (["running", "succeeded"], 0, 1),
    ],
)
def test_a_history_has_one_end_in_each_life_and_no_jumps(
    statuses: list[str], retries: int, wrong: int
) -> None:
    assert len(list(check_history("job_x", statuses, retries))) == wrong


def test_versions_that_go_back_are_found() -> None:
    def answer(version: int, status: str = "running") -> Answer:
        return Answer(0.0, "/jobs/job_x", 200, 0.1, version=version, job_status=status)

    assert list(check_versions([answer(1), answer(1), answer(3)])) == []
    assert len(list(check_versions([answer(3), answer(2)]))) == 1
    assert len(list(check_versions([answer(3), answer(3, "queued")]))) == 1


def test_answers_that_were_not_promised_are_found() -> None:
    allowed = [
        Answer(0, "/x", 200, 0),
        Answer(0, "/x", None, 0),
        Answer(0, "/x", 503, 0, retry_after=True),
    ]
    assert list(check_answers(allowed)) == []
    assert len(list(check_answers([Answer(0, "/x", 503, 0), Answer(0, "/x", 500, 0)]))) == 2


def test_the_wishes_of_a_client_allow_certain_ends() -> None:
    def ends(
        *wishes: tuple[str, str | None], name: str = "light-1-1-1", **parents: str
    ) -> set[str]:
        order = RequestedJob(
            "key", {"name": name}, id="job_x", wishes=[RequestedAction(*wish) for wish in wishes]
        )
        return find_allowed_ends(order, parents)

    assert ends() == ends(("pause", "paused"), ("resume", "queued")) == {"succeeded"}
    assert ends(("cancel", "cancelled")) == {"cancelled"}
    assert ends(("cancel", "cancelling")) == ends(("cancel", None)) == {"succeeded", "cancelled"}
    assert ends(("cancel", "cancelled"), ("retry", "queued")) == {"succeeded"}
    assert ends(("retry", "queued"), ("cancel", "cancelled")) == {"cancelled"}
    assert ends(("cancel", "cancelled"), ("retry", None)) == {"succeeded", "cancelled"}
    assert ends(name="poison") == {"failed"}
    assert ends(parent="cancelled") == {"cancelled"}


def test_a_leftover_is_found_in_a_sealed_cache_alone(
    tmp_path: Path,
) -> None:
    for name in ("sealed", "given-up"):
        (tmp_path / name / ".tmp-shards-000000").mkdir(parents=True)
    (tmp_path / "sealed" / "manifest.json").touch()
    assert find_left_over(tmp_path) == [f"left over: {tmp_path / 'sealed' / '.tmp-shards-000000'}"]


@pytest.mark.long
def test_the_command_of_make_chaos_lists_its_options() -> None:
    out = subprocess.run(
        [sys.executable, "bench/chaos.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert out.returncode == 0
    for option in ("--faults", "--jobs", "--demo-faults", "--outage", "--seed"):
        assert option in out.stdout
