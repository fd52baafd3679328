"""The dashboard in a browser: a real API with a real store, and Chromium if it is installed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from bench.support.harness import Parts, make_config
from cache.errors import locate_help
from kd.experiments.page import make_table, render_page
from services.api.routes.dashboard import FOLDER, PAGE, POLICY, VIEWS
from services.store.callers import Caller
from services.store.jobs.leases import Claim
from tests.support.services.api import problem, serving, tell, with_keys
from tests.support.services.pages import find_marked_edges, take_picture

VENDOR = FOLDER / "vendor"
FINGERPRINT = "89b9cebcc74d3dd69828751309d44e8b"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")


@pytest.fixture
def page(new_tab: Callable[..., AbstractContextManager[Page]]) -> Iterator[Page]:
    with new_tab() as tab:
        yield tab


def claim_job(api: Parts, name: str) -> Claim:
    """Create a job and claim it, so that the test acts as its worker."""
    claim = api.jobs.claim(api.jobs.create(make_config(name)).id, "train", "test", 600)
    assert claim is not None
    return claim


def open_page(page: Page, api: Parts, path: str = "") -> None:
    page.goto(f"{api.settings.server}/{path}")


# ---------------------------------------------------------------------- the files


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"style", "onclick", "onload"} & {name for name, _ in attrs}, (
            "the policy forbids what is inline"
        )
        assert tag != "style"
        found = {name: value for name, value in attrs if value}
        if tag in ("script", "link"):
            self.found.append(found.get("src") or found["href"])


def test_the_page_and_all_that_it_loads_are_there(api: Parts) -> None:
    answer = api.http.get("/")
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["content-type"].startswith("text/html")
    waiting = Links(answer.text).found
    seen = set()
    while waiting:
        name = waiting.pop()
        file = api.http.get(f"/{name}")
        assert file.status_code == 200, name
        assert file.headers["cache-control"] == "no-cache"
        assert file.headers["x-content-type-options"] == "nosniff"
        seen.add(name.removeprefix("dashboard/"))
        if name.endswith(".js") and "vendor" not in name:
            assert file.headers["content-type"].startswith("text/javascript")
            modules = re.findall(r'(?:from |import\()"(\.[\w./]+)"', file.text)
            paths = [posixpath.normpath(f"{posixpath.dirname(name)}/{each}") for each in modules]
            waiting += [path for path in paths if path.removeprefix("dashboard/") not in seen]
    there_is = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    licences = {"vendor/README.md", "vendor/uPlot.LICENSE", "vendor/yaml.LICENSE"}
    assert there_is - seen == {PAGE, *licences}


def test_a_file_is_not_sent_again_unless_it_changed(api: Parts) -> None:
    answer = api.http.get("/dashboard/main.js")
    again = api.http.get("/dashboard/main.js", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert api.http.head("/").status_code == 200
    problem(api.http.get("/dashboard/nothing.js"), 404)
    problem(api.http.get("/dashboard/..%2f..%2fpyproject.toml"), 404)
    problem(api.http.post("/dashboard/main.js"), 405)
    problem(api.http.post("/"), 405)


def test_vendored_files_are_those_that_their_list_names() -> None:
    listed = re.findall(
        r"^\| ([\w.]+) \|.*\| (\w{64}) \|$", (VENDOR / "README.md").read_text(), re.MULTILINE
    )
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.suffix in (".js", ".css")
    }
    assert dict(listed) == found
    assert (VENDOR / "uPlot.LICENSE").read_text().startswith("The MIT License")
    assert "Permission to use, copy, modify" in (VENDOR / "yaml.LICENSE").read_text()


# ---------------------------------------------------------------------- the pages


@in_browser
def test_a_job_appears_and_changes_without_a_reload(page: Page, api: Parts) -> None:
    open_page(page, api)
    claim = claim_job(api, "appears")
    row = page.get_by_role("row").filter(has_text="appears")
    expect(row).to_contain_text("running")
    tell(
        api,
        claim,
        ("progress", {"done": 3, "total": 10, "unit": "steps", "fraction": 0.3, "eta_seconds": 61}),
    )
    expect(row).to_contain_text("30%")
    expect(row).to_contain_text("1 min 1 s")
    row.get_by_role("link").focus()
    api.jobs.finish(claim, "succeeded")
    expect(row).to_contain_text("succeeded")
    expect(row.get_by_role("link")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("appears")


@pytest.mark.parametrize(
    ("path", "accept", "html"),
    [
        ("/jobs", "text/html,application/xhtml+xml,*/*;q=0.8", True),
        ("/jobs", "application/json", False),
        ("/jobs", "*/*", False),
        ("/v1/jobs", "text/html", False),
        ("/caches", "text/html", True),
        ("/workers", "text/html", True),
        ("/compare", "text/html", True),
        ("/jobs/x/events", "text/html", False),
    ],
)
def test_a_path_is_a_page_for_who_accepts_html(
    api: Parts, path: str, accept: str, html: bool
) -> None:
    answer = api.http.get(path, headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("text/html") == html
    if html:
        assert answer.headers["content-security-policy"] == POLICY
    if path in ("/jobs", "/caches", "/workers"):
        assert "accept" in answer.headers["vary"].lower()


def test_the_server_and_the_page_know_the_same_views() -> None:
    script = (FOLDER / "main.js").read_text(encoding="utf-8")
    pages = [each.replace("\\/", "/") for each in re.findall(r"^  \[/\^(.*)\$/, ", script, re.M)]
    assert len(pages) >= 8
    addresses = [
        "/", "/jobs", "/jobs/job_1", "/compare", "/new", "/caches", "/caches/89b9", "/tokens",
        "/workers", "/keys", "/storage", "/health", "/nowhere", "/jobs/a/events", "/quota",
        "/metrics", "/workers/a",
    ]  # fmt: skip
    for address in addresses:
        known = any(re.fullmatch(page, address) for page in pages)
        assert known == (VIEWS.fullmatch(address) is not None), address
    assert sum(VIEWS.fullmatch(each) is not None for each in addresses) == 12


@in_browser
def test_each_view_has_an_address_and_a_title_and_old_addresses_lead_there(
    page: Page, api: Parts
) -> None:
    claim = claim_job(api, "addressed")
    open_page(page, api, f"#/jobs/{claim.id}")
    expect(page.get_by_role("heading", level=1)).to_have_text("addressed")
    expect(page).to_have_title("addressed · Potstill")
    assert page.url.endswith(f"/jobs/{claim.id}") and "#" not in page.url
    page.get_by_role("navigation").get_by_role("link", name="Caches").click()
    expect(page).to_have_title("Caches · Potstill")
    expect(page.get_by_role("link", name="Caches")).to_have_attribute("aria-current", "page")
    page.go_back()
    expect(page).to_have_title("addressed · Potstill")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("addressed")
    open_page(page, api, "jobs?status=failed")
    expect(page.get_by_label("Status")).to_have_value("failed")
    page.get_by_label("Status").select_option("")
    page.get_by_label("Search").fill("addressed")
    expect(page.get_by_role("row").filter(has_text="addressed")).to_have_count(1)
    expect(page).to_have_url(re.compile(r"/jobs\?q=addressed$"))
    page.get_by_label("Search").fill("no such job")
    expect(page.get_by_text("No job matches.")).to_be_visible()


@in_browser
def test_jobs_are_selected_and_compared(page: Page, api: Parts) -> None:
    claims = [claim_job(api, name) for name in ("left", "right")]
    for at, claim in enumerate(claims):
        points = [
            ("metrics", {"step": step, "loss": 5.0 - step / 10 + at}) for step in range(1, 20)
        ]
        tell(api, claim, *points, ("evaluation", {"step": 19, "validation_perplexity": 40.0 + at}))
        tell(api, claim, ("cache", {"fingerprint": FINGERPRINT, "bytes_per_token": 20.0 + at}))
    open_page(page, api, "jobs")
    for name in ("left", "right"):
        page.get_by_label(f"Select {name}").check()
    expect(page.get_by_text("2 selected")).to_be_visible()
    page.get_by_role("link", name="Compare").click()
    expect(page).to_have_title("Comparison · Potstill")
    results = page.get_by_role("table", name="Results")
    expect(results.get_by_role("row").filter(has_text="Held-out perplexity")).to_contain_text("41")
    expect(page.get_by_role("row").filter(has_text="name")).to_contain_text('"left"')
    expect(page.get_by_role("figure").first).to_contain_text("Loss")
    expect(page.get_by_role("img", name="against bytes per token")).to_be_visible()
    take_picture(page, "compare")
    open_page(page, api, "jobs")
    for name in ("left", "right"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="cancel 2").click()
    for name in ("left", "right"):
        expect(page.get_by_role("row").filter(has_text=name)).to_contain_text("cancelling")


@in_browser
def test_a_zoom_stays_while_points_come_and_only_losses_are_smoothed(
    page: Page, api: Parts
) -> None:
    claim = claim_job(api, "zoomed")
    rates = [1e-3 if step % 2 else 2e-3 for step in range(1, 101)]
    tell(
        api,
        claim,
        *(
            ("metrics", {"step": step, "loss": 3.0 + rate, "learning_rate": rate})
            for step, rate in enumerate(rates, 1)
        ),
    )
    open_page(page, api, f"jobs/{claim.id}")
    expect(page.get_by_role("img", name="Learning rate")).to_be_visible()
    over = page.get_by_role("figure").filter(has_text="Loss").locator(".u-over").bounding_box()
    assert over is not None
    page.mouse.move(over["x"] + 0.4 * over["width"], over["y"] + 40)
    page.mouse.down()
    page.mouse.move(over["x"] + 0.6 * over["width"], over["y"] + 60, steps=4)
    with page.expect_response(lambda answer: "before_step=" in answer.url):
        page.mouse.up()
    before = page.screenshot(clip=over)  # type: ignore[arg-type]
    tell(api, claim, ("metrics", {"step": 300, "loss": 3.0, "learning_rate": 1e-3}))
    label = "Loss, nats per token: loss 3 at step 300."
    expect(page.get_by_role("img", name="Loss, nats")).to_have_attribute("aria-label", label)
    page.mouse.move(0, 0)
    if folder := os.environ.get("KD_SCREENSHOTS"):
        (Path(folder) / "zoom before.png").write_bytes(before)
        page.screenshot(path=Path(folder) / "zoom.png", full_page=True)
    page.get_by_label("smooth losses").check()
    ticks = page.evaluate(
        "() => performance.getEntriesByType('resource')"
        ".filter(({name}) => name.includes('before_step')).length"
    )
    assert ticks >= 2, "the range that is open is read again when points come"


@in_browser
def test_a_job_shows_its_curves_as_they_grow(page: Page, api: Parts) -> None:
    claim = claim_job(api, "curves")
    open_page(page, api, f"jobs/{claim.id}")
    expect(page.get_by_text("running").first).to_be_visible()
    assert page.locator(".charts").get_by_role("img").count() == 0
    tell(
        api,
        claim,
        ("evaluation", {"step": 3, "validation_perplexity": 50.5, "validation_kl": 0.25}),
    )
    expect(page.get_by_role("figure")).to_have_text([re.compile("^Perplexity"), re.compile("^KL")])
    points = [
        ("metrics", {"step": step, "loss": 9.0 - step, "train_perplexity": 100.0 - step})
        for step in (1, 2, 3)
    ]
    tell(api, claim, *points, ("cache", {"fingerprint": FINGERPRINT, "bytes_per_token": 23.1}))
    expect(page.get_by_role("figure")).to_have_text(
        [re.compile(name) for name in ("^Loss", "^Perplexity", "^KL")]
    )
    picture = page.get_by_role("img", name="Loss, nats per token")
    expect(picture).to_have_attribute("aria-label", "Loss, nats per token: loss 6 at step 3.")
    both = "Perplexity: train perplexity 97 at step 3, validation perplexity 50.5 at step 3."
    expect(page.get_by_role("img", name="Perplexity")).to_have_attribute("aria-label", both)
    assert count_painted_pixels(page) > 100
    expect(page.get_by_role("link", name=FINGERPRINT[:12])).to_be_visible()
    tell(api, claim, ("evaluation", {"step": 2, "validation_kl": 0.0}))
    page.get_by_label("logarithmic").check()
    expect(page.locator(".charts").get_by_role("img")).to_have_count(3)
    assert count_painted_pixels(page) > 100
    tell(api, claim, ("metrics", {"step": 4, "loss": 0.5}))
    expect(picture).to_have_attribute("aria-label", "Loss, nats per token: loss 0.5 at step 4.")
    assert page.locator(".charts").get_by_role("img").count() == 3


@in_browser
def test_the_curves_of_perplexity_are_compared_with_the_teacher_and_a_plain_student(
    page: Page, api: Parts
) -> None:
    claim = claim_job(api, "levels")
    points = [
        ("metrics", {"step": step, "train_perplexity": 200.0 - step}) for step in range(1, 101)
    ]
    tell(api, claim, *points)
    folder = api.settings.run_dir(claim.id)
    folder.mkdir(parents=True)
    plain = {"cross-entropy only": {"perplexity": 94.1}}
    report = {"teacher_perplexity": 35.9, "evaluation": {"models": plain}}
    (folder / "report.json").write_text(json.dumps(report))
    tell(api, claim, ("artifact", {"name": "report.json", "path": str(folder / "report.json")}))
    api.jobs.finish(claim, "succeeded")
    open_page(page, api, f"jobs/{claim.id}")
    expect(page.get_by_role("img", name="Perplexity")).to_have_attribute(
        "aria-label",
        "Perplexity: train perplexity 100 at step 100, teacher 35.9, without a teacher 94.1.",
    )
    assert count_painted_pixels(page) > 100
    take_picture(page, "levels")


@in_browser
def test_a_job_shows_its_speed_its_memory_and_its_layers(page: Page, api: Parts) -> None:
    claim = claim_job(api, "layers")
    names = ["embeddings", *(f"layer {number}" for number in range(12)), "head"]
    tell(
        api,
        claim,
        *(
            (
                "scalars",
                {"step": step, "throughput/tokens_per_second": 250.0 + step,
                 "memory/peak_bytes": 3 * 2**29, "memory/resident_bytes": 2**30}
                | {f"grad_norm/{name}": 0.1 * step + at for at, name in enumerate(names)},
            )
            for step in (1, 2, 3)
        ),
    )  # fmt: skip
    open_page(page, api, f"jobs/{claim.id}")
    titles = ["^Tokens per second", "^Memory, GiB", "^Gradient norm by layer, from red"]
    expect(page.get_by_role("figure")).to_have_text([re.compile(title) for title in titles])
    expect(page.get_by_role("img", name="Memory")).to_have_attribute(
        "aria-label",
        "Memory, GiB: memory/peak bytes 1.5 at step 3, memory/resident bytes 1 at step 3.",
    )
    label = page.get_by_role("img", name="Gradient norm by layer").get_attribute("aria-label")
    assert label is not None and label.index("layer 2 ") < label.index("layer 10 ")
    take_picture(page, "layers")


@in_browser
def test_a_job_shows_the_ablation_in_its_run_folder(page: Page, api: Parts) -> None:
    """The report is of the form that tests/kd/experiments/test_ablation.py sees written."""
    claim = claim_job(api, "ablated")
    folder = api.settings.run_dir(claim.id) / "ablation"
    folder.mkdir(parents=True)
    curves = {"loss": [[100.0, 4.0], [200.0, 3.0]], "perplexity": [], "kl": []}
    run = {"state": "finished", "error": "", "curves": curves, "held_out_loss": 3.25,
           "held_out_kl": 0.5, "held_out_perplexity": 25.8, "train_seconds": 61.0,
           "tokens_per_second": 1234.0, "peak_memory_bytes": 2**30}  # fmt: skip
    failed = {"state": "failed", "error": "<b>no memory</b>", "curves": curves | {"loss": []}}
    rows = [{"label": "the job itself", "run": "a", "refusal": ""},
            {"label": "lion", "run": "b", "refusal": ""},
            {"label": "fp16", "run": None, "refusal": "fp16 needs a GPU"}]  # fmt: skip
    report = {"steps": 60, "axes": [{"name": "train.optim", "why": "", "rows": rows}],
              "runs": {"a": run, "b": failed}}  # fmt: skip
    if (real := os.environ.get("KD_ABLATION")) is not None:
        report = json.loads(Path(real).read_text())
    (folder / "report.json").write_text(json.dumps(report))
    api.jobs.finish(claim, "succeeded")
    open_page(page, api, f"jobs/{claim.id}")
    expect(page.get_by_role("heading", name="Ablation: 60 steps of each run")).to_be_visible()
    take_picture(page, "ablation")
    if real is not None:
        return
    shown = page.get_by_role("table", name="train.optim")
    expect(shown.get_by_role("row")).to_contain_text(
        ["Run", "the job itself3.250.525.81 min 1 s1,2341.0 GiB", "lion<b>no memory</b>",
         "fp16fp16 needs a GPU"]
    )  # fmt: skip
    expect(page.get_by_role("img", name="Loss of train.optim: the job itself 3.")).to_be_visible()


def count_painted_pixels(page: Page) -> int:
    """Count the pixels of the first chart that have any colour."""
    return int(
        page.evaluate(
            """() => {
                const canvas = document.querySelector("canvas");
                const context = canvas.getContext("2d");
                const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
                return data.filter((value, at) => at % 4 === 3 && value > 0).length;
            }"""
        )
    )


@in_browser
def test_names_and_messages_are_text(page: Page, api: Parts) -> None:
    claim = claim_job(api, "text")
    attack = "<img src=x onerror='document.title=\"owned\"'><b>bold</b>"
    api.settings.run_dir(claim.id).mkdir(parents=True)
    (api.settings.run_dir(claim.id) / "log.txt").write_text(f"{attack}\n")
    tell(api, claim, ("warning", {"message": attack}))
    api.jobs.finish(
        claim, "failed", {"type": "bug", "detail": f"Because {attack}", "remedy": attack}
    )
    open_page(page, api, f"jobs/{claim.id}")
    expect(page.get_by_role("alert").first).to_contain_text(f"bug Because {attack}")
    expect(page.get_by_role("alert").first).to_contain_text(f"Help: {locate_help('bug')}")
    expect(page.get_by_role("listitem").filter(has_text="onerror")).to_have_count(1)
    page.get_by_text("Log", exact=True).click()
    expect(page.locator("details pre").first).to_contain_text(attack)
    assert page.locator("main img, main b").count() == 0
    assert page.title() == "text · Potstill"


@in_browser
def test_a_job_is_paused_resumed_and_cancelled(page: Page, api: Parts) -> None:
    job_id = api.jobs.create(make_config("obeys")).id
    open_page(page, api, f"jobs/{job_id}")
    actions = {"pause": "paused", "resume": "queued", "cancel": "cancelled", "retry": "queued"}
    for action, status in actions.items():
        page.get_by_role("button", name=action).click()
        expect(page.locator(".chip")).to_have_text(status)
        assert api.job(job_id).status == status
    claim = api.jobs.claim(job_id, "train", "test", 600)
    assert claim is not None
    expect(page.locator(".chip")).to_have_text("running")
    expect(page.get_by_role("listitem")).to_have_text(
        [re.compile(status) for status in ("running", *reversed(api.statuses(job_id)[:-1]))]
    )


@in_browser
def test_a_job_that_no_worker_can_take_says_why_it_waits(page: Page, api: Parts) -> None:
    job_id = api.jobs.create(make_config("greedy", resources={"gpus": 1})).id
    open_page(page, api, f"jobs/{job_id}")
    why = "No worker serves stage train; the job waits until one starts that has 1 GPU."
    expect(page.get_by_text(why)).to_be_visible()


@in_browser
def test_a_search_shows_its_trials(page: Page, api: Parts) -> None:
    search = start_search(api)
    open_page(page, api, f"jobs/{search.id}")
    expect(page.get_by_role("heading", level=1)).to_have_text("best")
    assert page.get_by_role("heading", name="Trials").count() == 0
    api.jobs.create_trial(search, 0, make_config("best-0"))
    page.get_by_role("table", name="Trials").get_by_role("link", name="best-0").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("best-0")


def start_search(api: Parts) -> Claim:
    """Create a search and claim it; if the API's reconciler was faster, try another one."""
    space = {"train.learning_rate": {"choices": [0.1, 0.2]}}
    data = {"train": "text.txt", "validation_fraction": 0.1}
    claim = None
    while claim is None:
        job_id = api.jobs.create(
            make_config("best", "search", search={"space": space}, data=data)
        ).id
        capture = api.jobs.claim(job_id, "precompute", "test", 600)
        assert capture is not None
        api.jobs.advance(capture, "search")
        claim = api.jobs.claim(job_id, "search", "test", 600)
    return claim


@in_browser
def test_a_refusal_of_the_server_is_shown(page: Page, api: Parts) -> None:
    claim = claim_job(api, "refuses")
    open_page(page, api, f"jobs/{claim.id}")
    button = page.get_by_role("button", name="pause")
    expect(button).to_be_visible()
    page.route("**/pause", lambda route: (api.jobs.finish(claim, "succeeded"), route.continue_()))
    button.click()
    expect(page.get_by_role("alert").first).to_contain_text("succeeded")


@in_browser
def test_files_of_a_job_are_downloaded(page: Page, api: Parts) -> None:
    report = make_finished_job(api, "made")
    open_page(page, api)
    page.get_by_role("link", name="made", exact=True).click()
    expect(page.get_by_role("heading", name="Report")).to_be_visible()
    check_download(page, "report.md", "# made\n")
    report.unlink()
    page.route("**/artifacts/report.md", lambda route: route.abort())
    # With a key the page fetches the file itself, because a link cannot send the key.
    page.evaluate("sessionStorage.setItem('potstill-key', 'kd_any')")
    page.get_by_role("button", name="report.md").click()
    expect(page.get_by_role("alert")).to_contain_text("does not answer")


REPORT = """# told

## <b>bold</b> of `a|b`

One line
and the next.

| text | perplexity |
|---|---:|
| student \\| teacher | 70.75 |
| | |

- Cache: `89b9`.
- <img src=x onerror=alert(1)>

![Reliability](reliability.png)

![Training](curves.png)

![Gone](gone.png)

#no heading
| alone
-

    | quoted |
      as it *is*

````text
## as ``` it

> is
````
"""


@in_browser
def test_a_report_s_markdown_becomes_elements(page: Page, api: Parts) -> None:
    make_finished_job(api, "told", text=REPORT)
    open_page(page, api)
    page.get_by_role("link", name="told", exact=True).click()
    report = page.get_by_role("region", name="Report")
    expect(report.get_by_role("heading")).to_have_text(["Report", "<b>bold</b> of a|b"])
    expect(report.locator("p")).to_have_text(["One line and the next.", "#no heading", "-"])
    expect(report.locator("table").first.locator("td")).to_have_text(
        ["student | teacher", "70.75", "", ""]
    )
    expect(report.get_by_role("listitem")).to_have_text(
        ["Cache: 89b9.", "<img src=x onerror=alert(1)>"]
    )
    expect(report.locator("code")).to_have_text(["a|b", "89b9"])
    expect(report.locator("pre")).to_have_text(["| quoted |\n  as it *is*", "## as ``` it\n\n> is"])
    expect(page.get_by_role("alert")).to_have_count(0)
    picture = report.get_by_role("img")
    expect(picture).to_have_count(1)  # the curves are charts already, and one picture is missing
    expect(picture).to_have_js_property("naturalWidth", 1)
    # With a key the page fetches the file itself, because a link cannot send the key.
    page.evaluate("sessionStorage.setItem('potstill-key', 'kd_any')")
    page.reload()
    expect(picture).to_have_attribute("src", re.compile("^blob:"))
    expect(picture).to_have_js_property("naturalWidth", 1)


@in_browser
def test_a_warning_of_the_report_is_the_first_thing_on_the_page(page: Page, api: Parts) -> None:
    text = "# poor\n\n> Warning: The student is worse than `plain` <b>text</b>.\n\nMore.\n"
    make_finished_job(api, "poor", text=text)
    open_page(page, api)
    page.get_by_role("link", name="poor", exact=True).click()
    said = "Warning: The student is worse than plain <b>text</b>."
    warning = page.get_by_role("alert").filter(has_text=said)
    expect(warning).to_have_text(said)
    above = "([a, b]) => a.compareDocumentPosition(b) & Node.DOCUMENT_POSITION_FOLLOWING"
    heading = page.get_by_role("heading", name="poor")
    assert page.evaluate(above, [warning.element_handle(), heading.element_handle()])
    report = page.get_by_role("region", name="Report")
    expect(report.locator("p")).to_have_text([said, "More."])


@in_browser
def test_a_good_verdict_is_the_first_thing_on_the_page_too(page: Page, api: Parts) -> None:
    said = "The teacher helped: held-out perplexity 9.00 with it, 9.50 without."
    verdict = {"check": "teacher", "ok": True, "message": said, "remedy": ""}
    make_finished_job(api, "helped", text=f"# helped\n\n{said}\n", verdict=verdict)
    open_page(page, api)
    page.get_by_role("link", name="helped", exact=True).click()
    first = page.locator("main p").first
    expect(first).to_have_text(said)
    expect(first).to_have_class("good")
    expect(page.get_by_role("alert")).to_have_count(0)


@in_browser
def test_a_perplexity_has_its_tokens_and_its_interval_beside_it(page: Page, api: Parts) -> None:
    claim = claim_job(api, "measured")
    found = {"validation_perplexity": 70.75, "validation_tokens": 1500}
    ends = {"validation_perplexity_low": 60.25, "validation_perplexity_high": 81.5}
    tell(api, claim, ("evaluation", {"step": 1, **found, **ends}))
    shown = "70.75 (1,500 tokens, 95 % interval 60.25 to 81.5)"
    open_page(page, api)
    expect(page.get_by_role("row").filter(has_text="measured")).to_contain_text(shown)
    page.get_by_role("link", name="measured", exact=True).click()
    expect(page.get_by_text(shown)).to_be_visible()


def make_finished_job(
    api: Parts, name: str, *owner: Caller, text: str = "# made\n", verdict: Any = None
) -> Path:
    """Create a job that succeeded, with a report and pictures; return the path of the report."""
    job_id = api.jobs.create(make_config(name), *owner).id
    claim = api.jobs.claim(job_id, "train", "test", 600)
    assert claim is not None
    report = api.settings.run_dir(job_id) / "report.md"
    report.parent.mkdir(parents=True)
    report.write_text(text)
    facts = report.with_name("report.json")
    facts.write_text(json.dumps({"verdict": verdict}))
    for path in (report, facts, *map(report.with_name, ("reliability.png", "curves.png"))):
        if path.suffix == ".png":
            path.write_bytes(PIXEL)
        tell(api, claim, ("artifact", {"name": path.name, "path": str(path)}))
    api.jobs.finish(claim, "succeeded")
    return report


def check_download(page: Page, name: str, content: str) -> None:
    with page.expect_download() as download:
        page.get_by_role("button", name=name).click()
    assert download.value.suggested_filename == name
    assert Path(download.value.path()).read_text() == content


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "path", ["", "new", "caches", "workers", "#/nowhere", "jobs/job_0", "caches/0"]
)
def test_every_page_fits_the_screen_of_a_phone(
    browser: Browser, api: Parts, path: str, scheme: Any
) -> None:
    tab = browser.new_page(viewport={"width": 360, "height": 700}, color_scheme=scheme)
    open_page(tab, api, path)
    expect(tab.get_by_role("heading", level=1)).to_be_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.close()


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("of_run", [False, True])
def test_a_table_shows_at_which_edge_it_goes_on(
    browser: Browser, api: Parts, of_run: bool, scheme: Any
) -> None:
    tab = browser.new_page(viewport={"width": 360, "height": 700}, color_scheme=scheme)
    if of_run:
        tab.set_content(render_page("a run", [make_table(["step"], [["1"]])]))
    else:
        api.jobs.create(make_config("a-row"))
        open_page(tab, api)
    expect(tab.locator(".scroll").first).to_be_visible()
    fits, begins, ends = find_marked_edges(tab)
    assert (fits, begins, ends) == ([False, False], [False, True], [True, False])
    tab.close()


@in_browser
@pytest.mark.parametrize("width", [360, 1440])
def test_a_name_and_an_error_without_spaces_break(browser: Browser, api: Parts, width: int) -> None:
    claim = claim_job(api, "n" * 63)
    error = {"type": "data_error", "detail": "/a-long-path" * 40, "remedy": "x" * 400}
    api.jobs.finish(claim, "failed", error=error)
    tab = browser.new_page(viewport={"width": width, "height": 700})
    open_page(tab, api, f"jobs/{claim.id}")
    expect(tab.get_by_role("alert")).to_contain_text("/a-long-path")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


@pytest.mark.long
@in_browser
def test_an_absent_server_is_reported_and_asked_again(page: Page, api: Parts) -> None:
    open_page(page, api, f"jobs/{api.jobs.create(make_config('away')).id}")
    expect(page.get_by_role("heading", level=1)).to_have_text("away")
    page.context.set_offline(True)
    page.get_by_text("Log", exact=True).click()
    expect(page.locator("details pre").first).to_contain_text("fetch")
    expect(page.get_by_role("status")).to_have_text("The server does not answer; trying again.")
    page.context.set_offline(False)
    expect(page.get_by_role("status")).to_have_text("")


@in_browser
@pytest.mark.usefixtures("_server_binary")
def test_the_page_asks_for_a_key_and_shows_only_its_jobs(page: Page, tmp_path: Path) -> None:
    file, keys = with_keys(tmp_path, ann="write", bob="write")
    with serving(tmp_path / "home", api_keys_file=file) as parts:
        assert httpx.get(f"{parts.settings.server}/dashboard/main.js").is_success
        make_finished_job(parts, "of-ann", Caller("ann"))
        parts.jobs.create(make_config("of-bob"), Caller("bob"))
        open_page(page, parts)
        question = page.get_by_role("dialog")
        question.locator("input").fill("kd_wrong")
        question.get_by_role("button").click()
        expect(question.locator(".error")).to_contain_text("key")
        question.locator("input").fill(keys["ann"])
        question.get_by_role("button").click()
        expect(page.get_by_role("link", name="of-ann")).to_be_visible()
        assert page.get_by_text("of-bob").count() == 0
        page.reload()
        page.get_by_role("link", name="of-ann").click()
        check_download(page, "report.md", "# made\n")
        assert page.evaluate("localStorage.length === 0 && document.cookie === ''")
