"""Fair share: which team's job goes next, what is charged to whom, and what quotas hold back."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.support.harness import make_config
from kd.progress import Event
from services.loops.teams import TeamRules
from services.settings import Settings
from services.store.callers import Caller, Quota
from services.store.jobs.leases import Capacity, Claim, EventBatch
from services.store.jobs.store import JobStore
from services.store.jobs.teams import TeamBytes
from tests.support.records import ANN, BOB, ERROR, HELD_OUT, let_pass, queued

DAY = 86400.0
TEAMS = ("a", "b", "c", "d")
NOTHING = EventBatch(0, ())


def use(
    jobs: JobStore,
    team: str,
    recent: float = 0.0,
    today: float = 0.0,
    seconds: int | None = None,
) -> None:
    """Say that a team has used so many device-seconds, by ``seconds`` of the store's clock."""
    seconds = jobs.redis.time()[0] if seconds is None else seconds
    jobs.redis.hset(
        f"kd:team:{team}",
        mapping={
            "recent": recent * 1000,
            "charged_at": seconds * 1000,
            "day": int(seconds // DAY),
            "today": int(today * 1000),
        },
    )


LARGE = Capacity(8)


def take(jobs: JobStore, capacity: Capacity = LARGE) -> Claim:
    claim = jobs.claim_next("train", "w", 60, capacity)
    assert claim is not None
    return claim


def age(jobs: JobStore, claim: Claim, seconds: float) -> None:
    """Let a job have held its devices for so long since the last charge."""
    jobs.redis.hincrby(f"kd:job:{claim.id}", "charged_at", -int(seconds * 1000))


def account_of(jobs: JobStore, team: str) -> Any:
    return jobs.read_accounts(team)[0]


def warnings_of(jobs: JobStore, job_id: str) -> list[str]:
    return [each.data["message"] for each in jobs.read_events(job_id, types=["warning"])]


# ---------------------------------------------------------------------- the order


@dataclass(frozen=True)
class Waiting:
    """A queued job."""

    team: str
    priority: int
    gpus: int


WAITING = st.builds(
    Waiting, st.sampled_from(TEAMS), st.sampled_from([0, 5, 9]), st.sampled_from([1, 1, 2, 4])
)


def choose(
    line: list[tuple[int, Waiting]], held: Counter[str], recent: dict[str, float], gpus: int
) -> int | None:
    """The number of the job that goes next, by the rule in plain Python."""
    first = {
        team: min((-job.priority, number) for number, job in line if job.team == team)[1]
        for team in {job.team for _, job in line}
    }
    for team in sorted(first, key=lambda team: (held[team], recent[team], first[team])):
        mine = [(-job.priority, number) for number, job in line
                if job.team == team and job.gpus <= gpus]  # fmt: skip
        if mine:
            return min(mine)[1]
    return None


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    waiting=st.lists(WAITING, min_size=1, max_size=12),
    recent=st.fixed_dictionaries({team: st.sampled_from([0.0, 10.0, 500.0]) for team in TEAMS}),
    workers=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=12),
)
def test_the_script_takes_the_job_that_the_rule_names(
    jobs: JobStore, waiting: list[Waiting], recent: dict[str, float], workers: list[int]
) -> None:
    jobs.redis.flushall()
    ids = [
        queued(jobs, caller=Caller(f"key-{job.team}", named_team=job.team),
               priority=job.priority, resources={"gpus": job.gpus})
        for job in waiting
    ]  # fmt: skip
    # At one time: what was used a second earlier counts less, and would decide between equals.
    seconds, _ = jobs.redis.time()
    for team in TEAMS:
        use(jobs, team, recent[team], seconds=seconds)
    line = list(enumerate(waiting))
    held: Counter[str] = Counter()
    for gpus in workers:
        expected = choose(line, held, recent, gpus)
        claim = jobs.claim_next("train", "w", 60, Capacity(gpus))
        assert (claim and claim.id) == (None if expected is None else ids[expected])
        if expected is not None:
            held[waiting[expected].team] += waiting[expected].gpus
            line = [entry for entry in line if entry[0] != expected]


def test_a_hundred_jobs_of_one_team_do_not_hold_up_the_first_of_another(jobs: JobStore) -> None:
    crowd = [queued(jobs, caller=ANN, priority=9) for _ in range(100)]
    running = take(jobs)
    assert running.id == crowd[0]
    other = queued(jobs, caller=BOB, priority=0)
    age(jobs, running, 60)
    jobs.finish(running, "succeeded")
    assert take(jobs).id == other, "after one job's length, whatever the priorities"


def test_teams_share_the_device_time_and_not_the_number_of_jobs(jobs: JobStore) -> None:
    """Jobs of ann take 60 s, those of bob 20 s: bob gets three for one of hers."""
    for _ in range(40):
        queued(jobs, caller=ANN)
        queued(jobs, caller=BOB)
    used: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for _ in range(40):
        claim = take(jobs)
        seconds = 60 if claim.owner == "ann" else 20
        age(jobs, claim, seconds)
        jobs.finish(claim, "succeeded")
        used[claim.owner] += seconds
        ran[claim.owner] += 1
        assert abs(used["ann"] - used["bob"]) <= 60, "never apart by more than one job"
    assert ran == {"ann": 10, "bob": 30}


def test_a_team_that_holds_fewer_devices_goes_first_whatever_it_used_before(
    jobs: JobStore,
) -> None:
    queued(jobs, caller=ANN)
    queued(jobs, caller=ANN)
    take(jobs)
    other = queued(jobs, caller=BOB)
    use(jobs, "bob", recent=10**6)
    assert take(jobs).id == other


def test_use_counts_half_as_much_after_a_half_life(jobs: JobStore) -> None:
    jobs.write_policy(3600.0, {})
    use(jobs, "ann", recent=1000)
    use(jobs, "bob", recent=600)
    jobs.redis.hincrby("kd:team:ann", "charged_at", -3600 * 1000)
    assert account_of(jobs, "ann").recent == pytest.approx(500, rel=1e-3)
    queued(jobs, caller=BOB)
    first = queued(jobs, caller=ANN)
    assert take(jobs).id == first
    assert jobs.write_policy(3600.0, {}) is False, "nothing has changed"


def test_a_worker_of_both_stages_looks_for_the_team_first_and_then_for_the_stage(
    jobs: JobStore,
) -> None:
    mine = queued(jobs, caller=ANN)
    capture = queued(jobs, "distill", ANN)
    other = queued(jobs, "distill", BOB)
    use(jobs, "ann", recent=10)

    def take_any(stage: str, second: str) -> Claim:
        claim = jobs.claim_next(stage, "w", 60, LARGE, [second])
        assert claim is not None
        return claim

    first = take_any("train", "precompute")
    assert (first.id, first.stage) == (other, "precompute"), "bob has used less"
    assert take_any("train", "precompute").id == mine
    assert take_any("train", "precompute").id == capture, "the other queue, if one is empty"


def test_keys_of_one_team_share_its_turn(jobs: JobStore) -> None:
    cal, dee = Caller("cal", named_team="nlp"), Caller("dee", named_team="nlp")
    first = queued(jobs, caller=cal)
    second = queued(jobs, caller=dee, priority=9)
    other = queued(jobs, caller=ANN)
    took = take(jobs)
    assert took.id == second, "priority counts within the team"
    assert take(jobs).id == other
    assert take(jobs).id == first
    assert [job.team for job in map(jobs.get, (first, second, other)) if job] == [
        "nlp",
        "nlp",
        "ann",
    ]
    assert account_of(jobs, "nlp").devices == 2


def test_the_place_in_the_queue_is_that_of_teams_that_take_turns(jobs: JobStore) -> None:
    crowd = [queued(jobs, caller=ANN) for _ in range(5)]
    others = [queued(jobs, caller=BOB) for _ in range(2)]
    turns = [crowd[0], others[0], crowd[1], others[1], *crowd[2:]]
    places = [job.queue_position for job_id in turns if (job := jobs.get(job_id))]
    assert places == list(range(7))


# ---------------------------------------------------------------------- what is charged


def test_a_job_is_charged_for_its_devices_until_it_gives_them_back(jobs: JobStore) -> None:
    job_id = queued(jobs, caller=ANN, resources={"gpus": 2})
    claim = take(jobs, Capacity(2, price=3.0))
    age(jobs, claim, 1800)
    jobs.beat(claim, 60, NOTHING)
    job = jobs.get(job_id)
    assert job is not None and job.cost is not None
    assert job.device_seconds == pytest.approx(3600, rel=1e-3)
    assert job.cost.amount == pytest.approx(3.0, rel=1e-3)
    assert not job.cost.final
    age(jobs, claim, 1800)
    jobs.release(claim)
    time.sleep(0.05)
    cheaper = take(jobs, Capacity(2, price=1.0))
    age(jobs, cheaper, 1800)
    jobs.finish(cheaper, "succeeded")
    job = jobs.get(job_id)
    assert job is not None and job.cost is not None
    assert job.device_seconds == pytest.approx(3 * 3600, rel=1e-3)
    assert job.cost.amount == pytest.approx(3 + 3 + 1, rel=1e-3), "each hour at its own price"
    assert (job.cost.final, job.cost.estimated) == (True, None)
    account = account_of(jobs, "ann")
    assert (account.devices, account.today) == (0, pytest.approx(job.device_seconds))
    again = jobs.get(job_id)
    assert again is not None and again.device_seconds == job.device_seconds


def test_a_lost_worker_is_charged_until_its_last_beat(jobs: JobStore) -> None:
    job_id = queued(jobs, caller=ANN)
    claim = take(jobs)
    age(jobs, claim, 100)
    jobs.beat(claim, 60, NOTHING)
    age(jobs, claim, 10_000)
    let_pass(jobs, "leases", job_id)
    assert jobs.expire() == [job_id]
    job = jobs.get(job_id)
    assert job is not None and job.device_seconds == pytest.approx(100, abs=1)
    assert account_of(jobs, "ann").devices == 0


@pytest.mark.parametrize("end", ["beat", "finish"])
def test_a_machine_that_slept_is_charged_until_the_end_of_the_lease(
    jobs: JobStore, end: str
) -> None:
    job_id = queued(jobs, caller=ANN, resources={"gpus": 2})
    claim = take(jobs, Capacity(2, price=3.0))
    # The last beat was long ago, and its lease ended a minute later.
    age(jobs, claim, 10_000)
    jobs.redis.zincrby("kd:leases", -10_000 * 1000, job_id)
    assert jobs.beat(claim, 60, NOTHING) == "go" if end == "beat" else jobs.finish(claim, "failed")
    job = jobs.get(job_id)
    assert job is not None and job.cost is not None
    assert job.device_seconds == pytest.approx(2 * 60, abs=2)
    assert job.cost.amount == pytest.approx(2 * 60 / 3600 * 3.0, abs=0.01)
    assert account_of(jobs, "ann").today == pytest.approx(2 * 60, abs=2)
    if end == "beat":
        age(jobs, claim, 30)
        jobs.beat(claim, 60, NOTHING)
        later = jobs.get(job_id)
        assert later is not None
        assert later.device_seconds == pytest.approx(2 * 90, abs=2), "each gap for itself"


def test_a_job_that_waits_for_another_process_holds_no_device(jobs: JobStore) -> None:
    queued(jobs, caller=ANN)
    claim = take(jobs)
    assert jobs.idle(claim) == "go"
    assert account_of(jobs, "ann").devices == 0
    assert jobs.beat(claim, 60, NOTHING) == "go"
    assert jobs.idle(claim) == "go"
    jobs.release(claim)
    assert jobs.idle(claim) == "fenced"
    assert account_of(jobs, "ann").today < 5


def test_the_driver_of_a_search_holds_no_device_and_its_trials_are_of_its_team(
    jobs: JobStore,
) -> None:
    space = {"train.learning_rate": {"choices": [0.1, 0.2]}}
    nlp = Caller("cal", named_team="nlp")
    search = queued(jobs, "search", nlp, search={"space": space}, data=HELD_OUT)
    capture = jobs.claim_next("precompute", "w", 60)
    assert capture is not None
    jobs.advance(capture, "search")
    jobs.write_policy(DAY, {"nlp": Quota(device_seconds=1.0)})
    use(jobs, "nlp", today=2)
    driver = jobs.claim_next("search", "api", 60)
    assert driver is not None and driver.id == search, "it goes on although the quota is used up"
    assert account_of(jobs, "nlp").devices == 0
    trial = jobs.create_trial(driver, 0, make_config("quick"))
    job = jobs.get(trial)
    assert job is not None
    assert (job.team, job.reason is None) == ("nlp", False)
    assert jobs.claim_next("train", "w", 60) is None, "its trial waits"


# ---------------------------------------------------------------------- quotas


def test_a_team_above_its_device_seconds_waits_until_the_next_day(jobs: JobStore) -> None:
    jobs.write_policy(DAY, {"": Quota(device_seconds=600.0)})
    first, second = queued(jobs, caller=ANN), queued(jobs, caller=ANN)
    claim = take(jobs)
    age(jobs, claim, 600)
    assert jobs.beat(claim, 60, NOTHING) == "go", "a job that runs goes on"
    said = (
        "Team ann has used 600 of its 600 device-seconds of this day: "
        "its jobs wait until 00:00 UTC."
    )
    assert warnings_of(jobs, second) == [said], "the queued job hears of it once"
    jobs.beat(claim, 60, NOTHING)
    assert warnings_of(jobs, second) == [said]
    jobs.finish(claim, "succeeded")
    assert jobs.claim_next("train", "w", 60) is None
    other = queued(jobs, caller=BOB)
    assert take(jobs).id == other, "another team has its own quota"
    job = jobs.get(second)
    assert job is not None
    assert (job.status, job.reason, job.estimated_start_at) == ("queued", said, None)
    late = queued(jobs, caller=ANN)
    assert warnings_of(jobs, late) == [said], "a new job hears of it at its creation"
    assert account_of(jobs, "ann").reason == said
    jobs.redis.hincrby("kd:team:ann", "day", -1)
    assert take(jobs).id == second, "a new day"
    assert account_of(jobs, "ann").today < 5
    assert warnings_of(jobs, first) == []


def test_the_quota_of_a_team_goes_before_that_of_all(jobs: JobStore) -> None:
    jobs.write_policy(DAY, {"": Quota(600.0, 1000), "ann": Quota(device_seconds=6000.0)})
    use(jobs, "ann", today=1000)
    use(jobs, "bob", today=1000)
    mine = queued(jobs, caller=ANN)
    queued(jobs, caller=BOB)
    assert take(jobs).id == mine
    assert jobs.claim_next("train", "w", 60) is None
    assert account_of(jobs, "ann").quota == Quota(6000.0, 1000)
    jobs.write_policy(DAY, {})
    assert jobs.claim_next("train", "w", 60) is not None, "a quota that is lifted holds nobody"


def test_the_bytes_of_any_number_of_teams_are_written(jobs: JobStore) -> None:
    sizes = {f"team-{number}": TeamBytes(number) for number in range(5000)}
    jobs.write_bytes(sizes)
    assert [each.bytes for each in jobs.read_accounts("team-0", "team-4999")] == [0, 4999]


def test_a_team_above_its_bytes_waits_and_may_create_no_job(jobs: JobStore) -> None:
    jobs.write_policy(DAY, {"": Quota(bytes=1000)})
    waiting = queued(jobs, caller=ANN)
    jobs.write_bytes({"ann": TeamBytes(600, 300, 100), "bob": TeamBytes(runs=999)})
    said = (
        "Caches and runs of team ann take 1000 bytes, and its quota is 1000: "
        "its jobs wait until some are deleted."
    )
    assert warnings_of(jobs, waiting) == [said]
    assert jobs.claim_next("train", "w", 60) is None
    refused = jobs.create(make_config("quick"), ANN, max_bytes=10**6)
    assert (refused.outcome, refused.detail) == ("team_quota", "1000")
    assert jobs.create(make_config("quick"), BOB, max_bytes=10**6).outcome == "created"
    jobs.write_bytes({"ann": TeamBytes(10)})
    assert take(jobs).owner in ("ann", "bob")
    assert account_of(jobs, "ann").measured_ms is not None
    assert jobs.create(make_config("quick"), ANN, max_bytes=10**6).outcome == "created"


def test_a_quota_stops_no_cancel_no_pause_and_no_deadline(jobs: JobStore) -> None:
    jobs.write_policy(DAY, {"": Quota(device_seconds=1.0)})
    use(jobs, "ann", today=5)
    ids = [queued(jobs, caller=ANN, deadline_seconds=60) for _ in range(3)]
    assert jobs.change("pause", ids[0]).status == "paused"
    assert jobs.change("resume", ids[0]).status == "queued"
    assert jobs.change("cancel", ids[1]).status == "cancelled"
    let_pass(jobs, "deadlines", ids[2])
    assert jobs.due() == [ids[2]]
    job = jobs.get(ids[2])
    assert job is not None and job.status == "failed"


# ---------------------------------------------------------------------- records of before


def test_records_from_before_teams_are_of_their_owner_and_find_their_queue(
    jobs: JobStore,
) -> None:
    job_id = queued(jobs, caller=ANN)
    jobs.redis.hdel(f"kd:job:{job_id}", "team")
    jobs.redis.delete("kd:queue:train:ann", "kd:queuers:train")
    assert jobs.claim_next("train", "w", 60) is None
    assert jobs.repair(0, 60) == (0, [job_id])
    assert take(jobs).id == job_id
    active = jobs.redis.hkeys("kd:devices:ann")
    jobs.redis.delete("kd:devices:ann")
    jobs.repair(0, 60)
    assert jobs.redis.hkeys("kd:devices:ann") == active
    job = jobs.get(job_id)
    assert job is not None and job.team == "ann"


def test_a_run_of_before_prices_has_no_cost(jobs: JobStore) -> None:
    job_id = queued(jobs)
    claim = take(jobs)
    age(jobs, claim, 10)
    jobs.fail_attempt(claim, ERROR)
    job = jobs.get(job_id)
    assert job is not None and job.cost is None
    assert job.device_seconds == pytest.approx(10, abs=1)
    assert json.loads(job.model_dump_json())["cost"] is None


# ---------------------------------------------------------------------- records without teams


def forget_teams(jobs: JobStore, *job_ids: str) -> None:
    """Leave the records as a version without teams has written them."""
    jobs.redis.delete("kd:owners", "kd:teams", "kd:measured")
    for job_id in job_ids:
        jobs.redis.hdel(f"kd:job:{job_id}", "team")


def test_the_bytes_of_an_owner_count_before_its_first_job_of_a_version_with_teams(
    jobs: JobStore, tmp_path: Path
) -> None:
    home = Settings(home=tmp_path)
    job_id = jobs.create(make_config("quick", "distill"), Caller("ada:1", named_team="nlp")).id
    claim = jobs.claim(job_id, "precompute", "w", 60)
    assert claim is not None
    event = Event("cache", {"fingerprint": "e" * 32})
    jobs.beat(claim, 60, EventBatch(1, (event,)))
    for folder, size in ((home.caches / ("e" * 32), 700), (home.run_dir(job_id), 50)):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(size))
    forget_teams(jobs, job_id)
    TeamRules(jobs, home).measure_if_due()
    (account,) = jobs.read_accounts()
    assert (account.team, account.disk) == ("ada:1", TeamBytes(caches=700, runs=50))


def test_an_owner_whose_team_is_known_keeps_it(jobs: JobStore) -> None:
    for name, team in (("ada", "nlp"), ("eve", "eve")):
        jobs.create(make_config("quick"), Caller(name, named_team=team))
    assert jobs.name_owners() == []
    jobs.redis.hdel("kd:owners", "eve")
    assert jobs.name_owners() == ["eve"] and jobs.name_owners() == []
    assert jobs.redis.hgetall("kd:owners") == {"ada": "nlp", "eve": "eve"}
