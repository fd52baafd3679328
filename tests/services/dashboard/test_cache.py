"""The page of a cache in a browser: histograms, shards, checks, records, users and export."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from bench.support.harness import Parts, make_config
from bench.support.paths import AUSTEN
from bench.support.small.caches import (
    make_cache,
    make_codec,
    make_identity,
    make_shard,
    write_folders,
)
from cache.shards.names import locate_seal, name_shard
from cache.store import open_cache
from cache.viewing.record_pages import read_page
from cache.viewing.texts import TokenTexts
from cache.writing.writer import open_writer
from kd.config.jobfile import parse_config
from kd.files import write_json
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from tests.support.services.api import serving, tell
from tests.support.services.pages import check_page

pytestmark = pytest.mark.usefixtures("one_thread")
OpenTab = Callable[..., AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def api(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """An API whose jobs a real child runs, for a teacher of the example."""
    folder = tmp_path_factory.mktemp("api")
    options = {
        "child_module": "services.worker.stage_child",
        "data_roots": (AUSTEN, folder),
        "silence_seconds": 600.0,
        "lease_seconds": 60.0,
    }
    with serving(folder, **options) as parts:
        yield parts


@pytest.fixture(scope="module")
def captured(api: Parts) -> Path:
    """A cache that a real teacher wrote: 14 shards of 4 sequences."""
    job = {
        "kind": "precompute",
        "teacher": {"model": str(AUSTEN / "teacher")},
        "data": {
            "train": str(AUSTEN / "text" / "persuasion.txt"),
            "validation_fraction": 0.1,
            "sequence_length": 64,
            "max_train_samples": 50,
            "max_eval_samples": 4,
        },
        "cache": {"shard_sequences": 4, "threshold": 0.02},
    }
    run = api.settings.home / "run"
    summary = run_precompute(parse_config(job), api.settings.home, run, SILENT).cache
    return Path(api.settings.caches) / str(summary["fingerprint"])


@pytest.fixture
def page(new_tab: OpenTab) -> Iterator[Page]:
    with new_tab(viewport={"width": 1440, "height": 900}) as tab:
        yield tab


def open_page(page: Page, api: Parts, folder: Path, query: str = "") -> None:
    page.goto(f"{api.settings.server}/caches/{folder.name}{query}")
    expect(page.get_by_role("heading", level=1)).to_contain_text(folder.name[:12])


def check(api: Parts, folder: Path, *problems: str) -> str:
    """Play a worker that verifies the cache and finds these problems."""
    body = {"kind": "verify", "name": "verify", "cache": {"fingerprint": folder.name}}
    claim = api.jobs.claim(api.jobs.create(parse_config(body)).id, "precompute", "test", 600)
    assert claim is not None
    run = api.settings.run_dir(claim.id)
    run.mkdir(parents=True)
    write_json(run / "verify.json", {"problems": list(problems)})
    error = {"type": "cache_corrupt", "detail": "It is damaged.", "remedy": "Capture it again."}
    api.jobs.finish(claim, "failed" if problems else "succeeded", error if problems else None)
    return str(claim.id)


def test_the_page_shows_what_a_cache_holds(page: Page, api: Parts, captured: Path) -> None:
    check(api, captured)
    student = api.jobs.create(
        make_config("reads-it", cache={"fingerprint": captured.name}, loss={"alpha": 0.5})
    )
    claim = api.jobs.claim(student.id, "train", "test", 600)
    assert claim is not None
    tell(api, claim, ("artifact", {"name": "student", "path": "/somewhere"}))
    api.jobs.finish(claim, "succeeded")
    open_page(page, api, captured)
    store = open_cache(captured)
    expect(page.get_by_text(f"All {store.manifest.positions:,} records were read.")).to_be_visible()
    for name in ("Mean entropy of a sequence, nats", "Entries per token", "Kept mass"):
        expect(
            page.get_by_role("img", name=re.compile(f"{name}: mean .*most often"))
        ).to_be_visible()
    shards = page.get_by_role("listbox", name="Shards").get_by_role("option")
    expect(shards).to_have_count(14)
    expect(page.get_by_text("14 sealed", exact=True)).to_be_visible()
    jobs = page.get_by_role("region", name="Jobs")
    expect(jobs.get_by_role("row", name=re.compile("reads-it"))).to_contain_text("yes")
    expect(page.get_by_text(f"the student of {student.id}")).to_be_visible()
    expect(page.get_by_text("No byte has changed since the cache was sealed.")).to_be_visible()
    expect(page.get_by_role("table", name="Fidelity").get_by_role("row")).to_have_count(2)
    command = f"kd cache export {captured.name[:12]} --format parquet"
    expect(page.get_by_text(command)).to_be_visible()
    check_page(page, "cache")


@pytest.mark.long
def test_records_are_read_by_sequence_and_position(page: Page, api: Parts, captured: Path) -> None:
    store = open_cache(captured)
    tokens = store.token_map()
    assert tokens is not None
    found = read_page(store, TokenTexts(tokens), 7, 25, 25)
    open_page(page, api, captured, "?sequence=7&record=25")
    rows = page.get_by_role("region", name="Text with its records").locator("ol.records > li")
    expect(rows).to_have_count(25)
    record = found.records[0]
    expect(rows.first).to_contain_text(record.said.replace(" ", "␣"))
    expect(rows.first).to_contain_text(f"{100 * record.head[0].probability:.1f}%")
    assert record.entropy is not None
    # A half is rounded up on the page.
    expect(rows.first).to_contain_text(f"Mean entropy, nats {record.entropy + 1e-9:.3g}")
    expect(page.get_by_text("This cache keeps the mean entropy of each sequence.")).to_be_visible()
    details = rows.first.locator("details")
    details.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(details.locator("ul li")).to_have_count(len(record.head))
    check_page(page, "records")
    page.get_by_role("button", name="Later records").click()
    expect(rows).to_have_count(found.count - 50)
    expect(page.get_by_role("button", name="Later records")).to_be_disabled()
    expect(page).to_have_url(re.compile("sequence=7&record=50"))
    page.get_by_label("Sequence", exact=True).fill("52")
    page.keyboard.press("Enter")
    expect(page.get_by_text(re.compile("^Sequence 52 .*, held out"))).to_be_visible()
    page.get_by_role("button", name="Next sequence").click()
    expect(page.get_by_role("button", name="Next sequence")).to_be_disabled()
    page.goto(f"{api.settings.server}/caches/{captured.name}?sequence=99")
    expect(page.get_by_text("has no such sequence: it has 54")).to_be_visible()
    page.get_by_label("Sequence", exact=True).fill("3")
    page.keyboard.press("Enter")
    expect(rows).to_have_count(25)


def test_a_shard_opens_its_records_by_keyboard(page: Page, api: Parts, captured: Path) -> None:
    open_page(page, api, captured)
    shards = page.get_by_role("listbox", name="Shards")
    expect(shards.get_by_role("option")).to_have_count(14)
    expect(page.get_by_text(re.compile("^Sequence 0 "))).to_be_visible()
    shards.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.get_by_text("Shard 2: sealed; it begins with sequence 8")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_text(re.compile("^Sequence 8 "))).to_be_visible()
    expect(page.get_by_role("heading", name="Text with its records")).to_be_focused()
    shards.get_by_role("option").nth(5).click()
    expect(page.get_by_text("Shard 5: sealed; it begins with sequence 20")).to_be_visible()
    page.get_by_role("button", name="Records of this shard").click()
    expect(page.get_by_text(re.compile("^Sequence 20 "))).to_be_visible()


@pytest.mark.long
def test_damage_is_shown_where_it_is(page: Page, api: Parts) -> None:
    folder = make_cache(api.settings.caches, make_identity(train_sequences=397))
    (folder / locate_seal(name_shard(2))).unlink()
    check(api, folder, f"{name_shard(7)}/entropy/c.0: content differs from its sha256")
    open_page(page, api, folder)
    expect(page.get_by_role("option", name="Shard 7: corrupt")).to_be_visible()
    expect(page.get_by_text("2 corrupt", exact=True)).to_be_visible()
    expect(page.get_by_text(re.compile("Corrupt: 2, 7"))).to_be_visible()
    expect(page.get_by_text("content differs from its sha256")).to_be_visible()
    expect(page.get_by_text(re.compile("is missing, but the manifest names it"))).to_be_visible()
    check_page(page, "damaged")


@pytest.mark.long
def test_a_capture_under_way_shows_its_shards(page: Page, api: Parts) -> None:
    identity = make_identity(train_sequences=57)
    config = make_config("capturing", "precompute", cache={"shard_sequences": 4})
    claim = api.jobs.claim(api.jobs.create(config).id, "precompute", "test", 600)
    assert claim is not None
    progress = {"done": 4, "total": 60, "unit": "sequences"}
    tell(api, claim, ("plan", {"fingerprint": identity.fingerprint}), ("progress", progress))
    with open_writer(api.settings.caches, identity) as writer:
        write_folders(writer)
        for index in range(6):
            writer.write_shard(index, *make_shard(identity, index))
        writer.begin_shard(6)
        open_page(page, api, writer.folder)
        expect(page.get_by_text("1 in work", exact=True)).to_be_visible()
        expect(page.get_by_text("8 missing", exact=True)).to_be_visible()
        expect(page.get_by_role("heading", name="Checks")).to_be_hidden()
        check_page(page, "capture")
        writer.clear_unfinished()


@pytest.mark.long
@pytest.mark.parametrize("profile", ["hidden", "topk"])
def test_records_of_other_profiles_are_shown(page: Page, api: Parts, profile: str) -> None:
    folder = make_cache(api.settings.caches, make_identity(codec=make_codec(profile)))
    open_page(page, api, folder)
    rows = page.locator("ol.records > li")
    expect(rows.first).to_contain_text("in the hidden state" if profile == "hidden" else "token ")
    check_page(page, profile)


@pytest.mark.long
def test_the_buttons_check_the_cache_for_real(page: Page, api: Parts, captured: Path) -> None:
    api.start_worker("precompute")
    open_page(page, api, captured)
    checks = page.get_by_role("region", name="Checks")
    page.get_by_role("button", name="Verify every byte").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Verify every byte")).to_be_disabled()
    expect(checks.get_by_text("succeeded")).to_have_count(1)
    page.get_by_role("button", name="Compare with the teacher").click()
    expect(page.get_by_text("The records match the teacher.")).to_be_visible()
    victim = captured / name_shard(3) / "entropy" / "c.0"
    content = victim.read_bytes()
    victim.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    page.get_by_role("button", name="Verify every byte").click()
    expect(checks.get_by_text("content differs from its sha256")).to_be_visible()
    expect(page.get_by_role("option", name="Shard 3: corrupt")).to_be_visible()
    victim.write_bytes(content)


@pytest.mark.long
def test_what_is_refused_says_why(page: Page, api: Parts) -> None:
    folder = make_cache(api.settings.caches, make_identity(train_sequences=61))
    open_page(page, api, folder)
    teacher = page.get_by_role("button", name="Compare with the teacher")
    expect(teacher).to_be_enabled()
    (folder / "manifest.json").rename(folder / "gone")
    teacher.click()
    expect(page.get_by_role("alert")).to_contain_text("not sealed yet")
    (folder / "gone").rename(folder / "manifest.json")
