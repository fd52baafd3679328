"""The page of one job in a browser: what happened to it, on its curves and in a list."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from playwright.sync_api import Page, expect

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from kd.client.wire.service import Device, WorkerState
from services.store.jobs.leases import Claim, EventBatch
from tests.support.services.api import problem, tell
from tests.support.services.pages import require_fit, take_picture


@pytest.fixture
def page(new_tab: Callable[..., AbstractContextManager[Page]]) -> Iterator[Page]:
    with new_tab() as tab:
        yield tab


def claim_job(api: Parts, name: str, stage: str = "train", **changes: object) -> Claim:
    """Create a job and claim it, so that the test acts as its worker."""
    claim = api.jobs.claim(api.jobs.create(make_config(name, **changes)).id, stage, "test", 600)
    assert claim is not None
    return claim


def train(api: Parts, claim: Claim, first: int, last: int) -> None:
    """Tell of the steps from ``first`` to ``last``."""
    for step in range(first, last + 1):
        done = {"done": step, "total": 100, "unit": "steps", "fraction": step / 100}
        metrics = {"step": step, "loss": 5.0 - step / 50}
        tell(api, claim, ("progress", done), ("metrics", metrics))


def expire(api: Parts, job_id: str) -> bool:
    """Take back the jobs of lost workers. Returns whether this one waits again."""
    api.jobs.expire()
    job = api.jobs.get(job_id)
    return job is not None and job.status == "queued"


def test_samples_are_shown_as_they_come(page: Page, api: Parts) -> None:
    claim = claim_job(api, "writing")
    train(api, claim, 1, 3)
    page.goto(f"{api.settings.server}/jobs/{claim.id}")
    expect(page.get_by_role("heading", name="writing")).to_be_visible()
    expect(page.get_by_role("heading", name="Samples")).to_have_count(0)
    for step, text in ((0, "the the the"), (2, "said\n  she"), (2, "said\n  he")):
        texts = [{"prompt": "It was", "text": text}]
        tell(api, claim, ("samples", {"step": step, "texts": texts}))
    shown = page.get_by_role("table", name="How the student continues prompt 1")
    expect(shown.get_by_role("row")).to_contain_text(
        ["The student writes", "2said\n  he", "0the the the"]
    )
    require_fit(page)
    take_picture(page, "samples")
    for step, space, sign in (
        (4, "\n" * 32, "↵×32"), (6, "\n \n" * 40, "↵×80 ␣×40"), (8, "\t" * 99, "␣×99"),
    ):  # fmt: skip
        texts = [{"prompt": "It was", "text": space + "it"}]
        tell(api, claim, ("samples", {"step": step, "texts": texts}))
        expect(shown.get_by_role("row").nth(1)).to_have_text(f"{step}{sign}it")


def test_events_are_marks_on_the_curves_and_lines_of_a_list(page: Page, api: Parts) -> None:
    claim = claim_job(api, "marked")
    train(api, claim, 1, 20)
    tell(api, claim, ("checkpoint", {"step": 20, "path": "x"}))
    train(api, claim, 21, 50)
    spike = {"step": 50, "check": "spike", "ok": True, "message": "Back to step 20.", "remedy": ""}
    tell(api, claim, ("check", spike))
    train(api, claim, 51, 80)
    tell(api, claim, ("warning", {"message": "The disk is slow."}))
    found = {"step": 80, "validation_perplexity": 70.5, "validation_kl": 0.25}
    tell(api, claim, ("evaluation", found))
    train(api, claim, 81, 100)
    page.goto(f"{api.settings.server}/jobs/{claim.id}")
    events = page.get_by_role("list", name="Events").get_by_role("listitem")
    expect(events).to_contain_text(
        ["evaluation: perplexity 70.5, KL 0.25 · step 80", "The disk is slow. · step 80",
         "spike: Back to step 20. · step 50", "checkpoint saved · step 20", "train · running",
         "train · queued"]
    )  # fmt: skip
    loss = page.get_by_role("figure").filter(has_text="Loss, nats per token")
    marks = loss.get_by_role("button")
    expect(marks).to_have_count(3)  # two events at step 80 are one mark
    tip = marks.last.locator(".tip")
    marks.last.hover()
    expect(tip).to_have_text(
        "step 80: The disk is slow.step 80: evaluation: perplexity 70.5, KL 0.25"
    )
    assert tip.bounding_box()["width"] > 100  # type: ignore[index]
    page.keyboard.press("Tab")
    marks.first.focus()
    expect(marks.first).to_have_accessible_name(re.compile("step 20: checkpoint saved"))
    assert marks.first.locator(".tip").bounding_box()["width"] > 100  # type: ignore[index]
    page.keyboard.press("Escape")
    assert marks.first.locator(".tip").bounding_box()["width"] == 1  # type: ignore[index]
    # Only the marks of one chart stop the Tab key; a kind that is not chosen is gone from both.
    page.get_by_label("checkpoints").uncheck()
    expect(marks).to_have_count(2)
    expect(events).to_have_count(5)


def test_what_a_client_did_is_told_and_keeps_its_place(page: Page, api: Parts) -> None:
    claim = claim_job(api, "told")
    train(api, claim, 1, 5)
    api.jobs.change("pause", claim.id)
    api.jobs.release(claim)
    api.jobs.change("resume", claim.id)
    page.goto(f"{api.settings.server}/jobs/{claim.id}")
    events = page.get_by_role("list", name="Events").get_by_role("listitem")
    expect(events.first).to_contain_text("train · queued · resumed · step 5")
    expect(events.nth(1)).to_contain_text("train · paused · step 5")
    # An event that comes later has the step of what was read before it.
    assert api.jobs.claim(claim.id, "train", "test", 600) is not None
    expect(events.first).to_contain_text("train · running · step 5")


def test_phases_stand_on_the_axis_of_time(page: Page, api: Parts) -> None:
    job_id = api.jobs.create(make_config("phased", "distill")).id
    capture = api.jobs.claim(job_id, "precompute", "test", 600)
    assert capture is not None
    for phase in ("loading data", "reading data.train: 3 tokens", "reading data.train: 9 tokens"):
        tell(api, capture, ("stage", {"stage": "precompute", "phase": phase}))
    api.jobs.advance(capture, "train")
    claim = api.jobs.claim(job_id, "train", "test", 600)
    assert claim is not None
    tell(api, claim, ("stage", {"stage": "train", "phase": "training"}))
    train(api, claim, 1, 3)
    tell(api, claim, ("profile", {"phases": []}), ("stage", {"stage": "train", "phase": "saving"}))
    api.jobs.finish(claim, "succeeded")
    page.goto(f"{api.settings.server}/jobs/{job_id}")
    picture = page.get_by_role("img", name="Phases over time")
    expect(picture).to_have_attribute(
        "aria-label",
        re.compile("waiting .*, precompute .*, waiting .*, train .*, evaluation "),
    )
    page.get_by_text("Phases as a table").click()
    rows = page.get_by_role("table", name="Phases").get_by_role("row")
    expect(rows).to_contain_text(
        ["Phase", "waiting", "precompute", "loading data", "reading data.train", "waiting",
         "train", "training", "evaluation", "saving"]
    )  # fmt: skip


def test_the_time_between_a_failure_and_its_retry_is_no_phase_of_work(
    page: Page, api: Parts
) -> None:
    claim = claim_job(api, "broken")
    tell(api, claim, ("stage", {"stage": "train", "phase": "training"}))
    api.jobs.finish(claim, "failed")
    assert api.http.post(f"/jobs/{claim.id}/retry").is_success
    page.goto(f"{api.settings.server}/jobs/{claim.id}")
    expect(page.get_by_role("img", name="Phases over time")).to_have_attribute(
        "aria-label", re.compile("waiting .*, train .*, failed .*, waiting ")
    )


def test_the_time_of_a_lost_worker_is_no_phase_of_work(page: Page, api: Parts) -> None:
    claim = claim_job(api, "lost")
    tell(api, claim, ("stage", {"stage": "train", "phase": "training"}))
    api.jobs.beat(claim, 0, EventBatch(2, ()))
    wait_until(lambda: expire(api, claim.id), 30)
    page.goto(f"{api.settings.server}/jobs/{claim.id}")
    expect(page.get_by_role("img", name="Phases over time")).to_have_attribute(
        "aria-label", re.compile("waiting .*, train .*, worker lost .*, waiting ")
    )


def test_the_configuration_begins_with_what_is_not_the_default(page: Page, api: Parts) -> None:
    claim = claim_job(api, "set", checks={"spike_factor": 4.5})
    page.goto(f"{api.settings.server}/jobs/{claim.id}")
    table = page.get_by_role("table", name="Settings that are not the defaults")
    expect(table.get_by_role("row").filter(has_text="checks.spike_factor")).to_have_text(
        "checks.spike_factor4.53"
    )
    everything = page.locator("details").filter(has_text="All settings").locator("pre")
    expect(everything).to_be_hidden()
    page.get_by_text("All settings").click()
    expect(everything).to_contain_text('"max_skipped"')


def test_a_configuration_of_another_version_is_shown_whole(page: Page, api: Parts) -> None:
    claim = claim_job(api, "foreign")
    config = json.dumps({"kind": "train", "from_the_future": 1})
    api.jobs.redis.hset(f"kd:job:{claim.id}", "config", config)
    problem(api.http.get(f"/jobs/{claim.id}/settings"), 422, "invalid-job")
    page.goto(f"{api.settings.server}/jobs/{claim.id}")
    page.get_by_text("All settings").click()
    expect(page.get_by_text('"from_the_future": 1')).to_be_visible()


def test_resources_are_told_from_what_the_metrics_carry(page: Page, api: Parts) -> None:
    claim = claim_job(api, "used")
    device = Device(kind="cuda", name="H100", index="0,1", count=2, memory_bytes=80 << 30)
    api.jobs.show_worker(WorkerState(id="test", stages=["train"], device=device), 600)
    train(api, claim, 1, 2)
    scalars = {
        "step": 2,
        "memory/peak_bytes": 3 << 30,
        "loader/waited_share": 0.125,
        "loader/late_steps": 0.5,
        "throughput/mfu": 0.41,
        "memory/allocated_bytes": 1 << 30,
    }
    tell(api, claim, ("scalars", scalars))  # fmt: skip
    page.goto(f"{api.settings.server}/jobs/{claim.id}")
    facts = page.locator("h2:text('Resources') + dl")
    expect(facts).to_contain_text("Device2 × H100 with 80.0 GiB")
    expect(facts).to_contain_text("Utilisation of the device (MFU)41.0%")
    expect(facts).to_contain_text("GPU memory of tensors1.0 GiBPeak memory3.0 GiB")
    expect(facts).to_contain_text("Waiting for data12.5%Steps that waited over 1 ms50.0%")
    api.jobs.hide_worker("test")


def test_ranks_are_told_by_host_with_the_slowest_and_its_alarm(
    api: Parts, new_tab: Callable[..., AbstractContextManager[Page]]
) -> None:
    claim = claim_job(api, "two-hosts")
    ranks = [f"rank {rank} on gpu-{'ab'[rank // 2]}" for rank in range(4)]
    # An earlier attempt had another host.
    tell(api, claim, ("scalars", {"step": 10, "rank_seconds/rank 0 on gpu-c": 9.0}))
    for step in range(20, 120, 10):
        train(api, claim, step, step)
        slow = 0.5 if step < 60 else 0.8
        seconds = zip(ranks, (0.5, 0.51, 0.49, slow), strict=True)
        named = {f"rank_seconds/{name}": each for name, each in seconds}
        tell(api, claim, ("scalars", {"step": step, **named}))
    alarm = {"step": 110, "check": "slow_rank", "ok": False, "remedy": "Look at its host."}
    message = "The other ranks wait for rank 3 on gpu-b (1.60 times the median)."
    tell(api, claim, ("check", {**alarm, "message": message}))
    for width in (1440, 360):
        with new_tab(viewport={"width": width, "height": 900}) as tab:
            tab.goto(f"{api.settings.server}/jobs/{claim.id}")
            facts = tab.locator("h2:text('Resources') + dl")
            expect(facts).to_contain_text("Ranks2 on gpu-a, 2 on gpu-b")
            expect(facts).to_contain_text("Slowest rankrank 3 on gpu-b, 1.6 times the median")
            chart = tab.get_by_role("img", name="Seconds that a rank works alone in a step")
            expect(chart).to_have_accessible_name(re.compile("rank 3 on gpu-b 0.8 at step 110"))
            expect(tab.locator("ol.events li.bad")).to_contain_text(f"slow_rank: {message}")
            require_fit(tab)
            take_picture(tab, f"ranks-{width}")
