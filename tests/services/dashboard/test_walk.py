"""Every view of the dashboard at two widths and in two schemes: axe finds nothing, nothing is cut.

``KD_SCREENSHOTS`` names a folder for the pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from playwright.sync_api import Page, expect

from bench.support.harness import Parts, make_config
from bench.support.small.caches import make_cache, make_identity
from tests.support.services.api import tell
from tests.support.services.pages import SCHEMES, WIDTHS, find_violations, take_picture

#: Views whose folded parts are opened first.
UNFOLDED = ("jobs", "job", "storage")


@pytest.fixture(scope="module")
def views(api: Parts) -> dict[str, str]:
    """The address of each view by its name, with a job and a cache to show."""
    claim, other = (
        api.jobs.claim(api.jobs.create(make_config(name)).id, "train", "test", 600)
        for name in ("walked", "walked-again")
    )
    assert claim is not None and other is not None
    points = [
        ("metrics", {"step": step, "loss": 5.0 - step / 50, "train_perplexity": 150.0 - step,
                     "learning_rate": 1e-3, "grad_norm": 1.0 + step / 100})
        for step in range(1, 101)
    ]  # fmt: skip
    evaluation = {"step": 100, "validation_perplexity": 70.8, "validation_kl": 0.3,
                  "validation_tokens": 38_250}  # fmt: skip
    tell(api, claim, *points, ("evaluation", evaluation))
    spike = {"step": 60, "check": "spike", "ok": True, "message": "Back.", "remedy": ""}
    tell(api, claim, ("warning", {"message": "The text is short."}), ("check", spike))
    tell(api, claim, ("checkpoint", {"step": 100, "path": "x"}))
    tell(api, claim, ("stage", {"stage": "train", "phase": "training"}))
    study = _make_study(api)
    tell(api, other, *points[:50])
    folder = make_cache(api.settings.caches, make_identity(train_sequences=12))
    return {
        "jobs": "jobs",
        "job": f"jobs/{claim.id}",
        "compare": f"compare?jobs={claim.id},{other.id}",
        "new": "new",
        "caches": "caches",
        "cache": f"caches/{folder.name}",
        "tokens": "tokens",
        "study": f"compare?study={study}",
        "workers": "workers",
        "health": "health",
        "storage": "storage",
        "keys": "keys",
        "missing": "jobs/job_00000000000000000000000000",
    }


def _make_study(api: Parts) -> str:
    """Create a search with three trials that have ended; return its id."""
    space = {"train.learning_rate": {"choices": [0.1, 0.2]}}
    data = {"train": "text.txt", "validation_fraction": 0.1}
    search = api.jobs.create(make_config("study", "search", search={"space": space}, data=data)).id
    for at in range(3):
        config = make_config(f"study-{at}", train={"max_steps": 5, "learning_rate": 0.1 * (at + 1)})
        claim = api.jobs.claim(api.jobs.create(config).id, "train", "test", 600)
        assert claim is not None
        evaluation = {"step": 5, "validation_perplexity": 70.0 - at, "validation_kl": 0.3}
        tell(api, claim, ("evaluation", evaluation), ("metrics", {"step": 4, "loss": 3.0}))
        tell(api, claim, ("metrics", {"step": 5, "loss": 2.0}))
        tell(api, claim, ("cache", {"fingerprint": "0" * 32, "bytes_per_token": 20.0 + at}))
        api.jobs.finish(claim, "succeeded")
        api.jobs.redis.hset(f"kd:job:{claim.id}", "parent", search)
    return search


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in SCHEMES], ids=str)
def tab(
    new_tab: Callable[..., AbstractContextManager[Page]], request: pytest.FixtureRequest
) -> Iterator[tuple[Page, str]]:
    """A tab of one width and scheme."""
    width, scheme = request.param
    size = {"width": width, "height": 900}
    with new_tab(viewport=size, color_scheme=scheme) as page:
        yield page, f"{width} {scheme}"


@pytest.mark.long
def test_every_view_is_whole_and_accessible(
    tab: tuple[Page, str], api: Parts, views: dict[str, str]
) -> None:
    page, about = tab
    found = {}
    for name, path in views.items():
        page.goto(f"{api.settings.server}/{path}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.wait_for_load_state("networkidle") if name in ("new",) else page.wait_for_timeout(700)
        if name in UNFOLDED:
            for folded in page.locator("summary, .fold[aria-expanded=false]").all():
                folded.click()
        if violations := find_violations(page):
            found[name] = violations
        too_wide = page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        if too_wide > 0:
            found[f"{name}, width"] = too_wide
        take_picture(page, f"{name} {about}")
    assert found == {}


@pytest.mark.long
def test_the_walk_finds_a_fault(tab: tuple[Page, str], api: Parts) -> None:
    page, _ = tab
    page.goto(f"{api.settings.server}/workers")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.evaluate("document.querySelector('main').append(document.createElement('input'))")
    assert [each["rule"] for each in find_violations(page)] == ["label"]
