"""Measure what a user of the dashboard waits for: the curves of a long job, and a new point.

    python bench/interface/dashboard.py [--points 20000] [--rounds 5] [--out FILE]

A real API and a real store run on this machine, and Chromium shows the page of a job that has
``--points`` points of each of four metrics in the file of its run.

    drawn    from the request of the page until the charts have their points
    zoomed   from the end of a drag over a tenth of the steps until its points have come: all of
             them, without thinning
    a point  from the event of a new point in the store until the page shows it
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from bench.speed import read_cpu_name
from bench.support.harness import Parts, make_config
from kd.progress import Event
from services.store.jobs.leases import Claim, EventBatch

NAMES = ("loss", "kd_loss", "ce_loss", "learning_rate")


#: No limit on requests: the page must not wait for one.
UNLIMITED: dict[str, Any] = {"rate_get": 10**6, "rate_sse": 1000}


@contextmanager
def serving(folder: Path) -> Iterator[Parts]:
    """Start an API with a store of its own."""
    parts = Parts(folder, **UNLIMITED)
    try:
        parts.start_api()
        yield parts
    finally:
        parts.close()


def tell(api: Parts, claim: Claim, events: list[dict[str, Any]]) -> None:
    """Deliver points of a run as its worker does."""
    number = int(api.jobs.redis.hget(f"kd:job:{claim.id}", "batch") or 0) + 1
    batch = EventBatch(number, tuple(Event("metrics", each) for each in events))
    assert api.jobs.beat(claim, 6000, batch) == "go"


def write_points(api: Parts, claim: Claim, points: int) -> None:
    """Write the metrics of a run of ``points`` steps, and send them to the store."""
    folder = api.settings.run_dir(claim.id)
    folder.mkdir(parents=True)
    events = [
        {"step": step, **dict.fromkeys(NAMES, 1.0 + 1.0 / step)} for step in range(1, points + 1)
    ]
    lines = (json.dumps({"type": "metrics", **each}) + "\n" for each in events)
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    for first in range(0, points, 1000):
        tell(api, claim, events[first : first + 1000])


def time_drawing(page: Page, address: str, points: int) -> float:
    """Return the seconds until the charts of the page at ``address`` show the last step."""
    began = time.perf_counter()
    page.goto(address)
    page.get_by_role("img", name=f"at step {points}.").first.wait_for()
    return time.perf_counter() - began


def time_zoom(page: Page) -> float:
    """Return the seconds from a drag over a tenth of the steps until all points of it came."""
    over = page.get_by_role("figure").first.locator(".u-over").bounding_box()
    assert over is not None
    y = over["y"] + 40
    page.mouse.move(over["x"] + 0.5 * over["width"], y)
    page.mouse.down()
    page.mouse.move(over["x"] + 0.6 * over["width"], y, steps=3)
    began = time.perf_counter()
    with page.expect_response(lambda answer: "before_step=" in answer.url) as answer:
        page.mouse.up()
    answer.value.finished()
    return time.perf_counter() - began


def time_point(page: Page, api: Parts, claim: Claim, step: int) -> float:
    """Return the seconds from the event of a point until the page shows it."""
    began = time.perf_counter()
    tell(api, claim, [{"step": step, **dict.fromkeys(NAMES, 1.5)}])
    page.get_by_role("img", name=f"loss 1.5 at step {step}").wait_for()
    return time.perf_counter() - began


def measure(points: int, rounds: int) -> list[str]:
    """Measure all; return the rows of the table."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    found: dict[str, list[float]] = {"drawn": [], "zoomed": [], "a point": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder)) as api,
        sync_playwright() as driver,
    ):
        claim = api.jobs.claim(api.jobs.create(make_config("long")).id, "train", "bench", 6000)
        assert claim is not None
        write_points(api, claim, points)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        address = f"{api.settings.server}/jobs/{claim.id}"
        step = points
        for _ in range(rounds):
            page = browser.new_page()
            found["drawn"].append(time_drawing(page, address, step))
            found["zoomed"].append(time_zoom(page))
            page.close()
            page = browser.new_page()
            time_drawing(page, address, step)
            step += 1
            found["a point"].append(time_point(page, api, claim, step))
            page.close()
        browser.close()
    return [
        f"| {name} | {statistics.median(each):.2f} | {min(each):.2f} to {max(each):.2f} |"
        for name, each in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.points, arguments.rounds)
    machine = f"Machine: {read_cpu_name()}; {arguments.points:,} points; {arguments.rounds} rounds."
    page = "\n".join([machine, "", "| what | seconds | least to most |", "|---|--:|--:|", *rows])
    sys.stdout.write(page + "\n")
    if arguments.out:
        arguments.out.write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
