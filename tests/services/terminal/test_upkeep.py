"""The commands ``kd cache diff|stats|rm`` and ``kd gc --store``: output, exit codes and files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support.harness import Parts, make_config
from bench.support.small.caches import fill_cache, make_cache, make_codec, make_identity
from bench.support.waiting import wait_until
from cache.checking.verify import verify_cache
from cache.manifest import CacheIdentity, TokenizerProbe
from cache.store import open_cache, read_manifest
from cache.writing.writer import open_writer
from kd.progress import Event
from services.store.jobs.leases import EventBatch
from services.terminal.commands.upkeep import find_embedded_url
from services.terminal.exit_codes import INVALID
from tests.support.commands import kd


def identity_of(name: str, profile: str = "threshold", **options: object) -> CacheIdentity:
    identity = make_identity(
        train_sequences=5, validation_sequences=2, codec=make_codec(profile, **options)
    )
    return replace(identity, data=replace(identity.data, sha256=name * 64))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two caches of one teacher and codec, and one of another profile."""
    home = tmp_path_factory.mktemp("homes") / "home"
    for identity in (identity_of("1"), identity_of("2"), identity_of("3", "topk")):
        make_cache(home / "caches", identity)
    return home


@pytest.fixture
def home(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "home"))


ONE, TWO, TOPK = (identity_of(*each).fingerprint for each in (("1",), ("2",), ("3", "topk")))


def kd_cache(
    home: Path, *arguments: object, answer: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return kd("cache", *arguments, answer=answer, KD_HOME=str(home), **environment)


def kd_gc(
    home: Path, *arguments: object, answer: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    place = home / "caches"
    return kd("gc", "--store", place, *arguments, answer=answer, KD_HOME=str(home), **environment)


def names(home: Path) -> set[str]:
    return {path.name for path in (home / "caches").iterdir() if path.is_dir()}


def test_diff_ends_with_one_where_there_is_a_difference(home: Path) -> None:
    same = kd_cache(home, "diff", ONE, home / "caches" / ONE)
    assert (same.returncode, same.stderr) == (0, "")
    assert "no difference" in same.stdout
    other = kd_cache(home, "diff", ONE, TOPK)
    assert other.returncode == 1
    assert re.search(r"^codec\.k +0 +5 *$", other.stdout, re.MULTILINE)
    fields = json.loads(kd_cache(home, "diff", ONE, TOPK, "--json").stdout)["fields"]
    assert {"field": "codec.profile", "a": "threshold", "b": "topk"} in fields
    missing = kd_cache(home, "diff", ONE, "./nothing")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "No cache at nothing" in missing.stderr


def test_diff_cuts_a_name_that_is_a_whole_paragraph(home: Path) -> None:
    paragraph = "It is a truth universally acknowledged, that a single man is in want. " * 8
    for number, name in enumerate((ONE, TWO)):
        manifest = read_manifest(home / "caches" / name)
        provenance = replace(manifest.provenance, probes=(TokenizerProbe(paragraph, (number,)),))
        (home / "caches" / name / "manifest.json").write_bytes(
            replace(manifest, provenance=provenance).to_bytes()
        )
    other = kd_cache(home, "diff", ONE, TWO)
    assert (other.returncode, other.stderr) == (1, "")
    (line,) = [line for line in other.stdout.splitlines() if "truth" in line]
    assert re.fullmatch(r'provenance\.probes\."It is a truth .{0,40}\.\.\.  0 +1', line)
    assert paragraph in kd_cache(home, "diff", ONE, TWO, "--json").stdout


def test_stats_show_histograms_and_the_teacher_s_perplexity(home: Path) -> None:
    shown = kd_cache(home, "stats", ONE)
    assert shown.returncode == 0, shown.stderr
    for text in (
        "teacher's perplexity, validation",
        "MEAN ENTROPY OF A SEQUENCE, NATS",
        "KEPT MASS",
        "ARRAY",
        "####",
        "entries",
    ):
        assert text in shown.stdout
    assert re.search(r"validation +[\d,.]+ \(\d+ tokens", shown.stdout)
    of_positions = kd_cache(home, "stats", TOPK).stdout
    assert "ENTROPY, NATS" in of_positions and "MEAN ENTROPY" not in of_positions
    as_json = json.loads(kd_cache(home, "stats", ONE[:8], "--json").stdout)
    assert as_json["entropy_of"] == "sequences"
    opened = open_cache(home / "caches" / ONE)
    assert as_json["positions"] == sum(as_json["kept_mass"]["counts"]) == opened.manifest.positions
    assert as_json["bytes_per_token"] == pytest.approx(opened.bytes_per_token)


def test_gc_asks_and_removes_what_it_named(home: Path) -> None:
    nothing = kd_gc(home)
    assert (nothing.returncode, nothing.stdout) == (0, "nothing to remove\n")
    (home / "caches" / ONE / "manifest.json").unlink()
    assert kd_gc(home).stdout == "nothing to remove\n", "it was written to just now"
    planned = json.loads(kd_gc(home, "--older-than", "0s", "--json").stdout)
    assert planned["removed"] is False
    assert [one["name"] for one in planned["items"]] == [ONE]
    declined = kd_gc(home, "--older-than", "0s", answer="n\n")
    assert declined.returncode == 1
    assert str(home / "caches" / ONE) in declined.stdout
    assert names(home) == {ONE, TWO, TOPK}
    done = kd_gc(home, "--older-than", "0s", answer="y\n")
    assert (done.returncode, names(home)) == (0, {TWO, TOPK})
    assert "1 of 1 removed" in done.stdout


def test_gc_of_a_store_names_leftovers_only_and_the_old_command_is_gone(home: Path) -> None:
    rules = {"KD_RETAIN_CACHES_DAYS": "1", "KD_RETAIN_LEFTOVERS_DAYS": "1"}
    for folder in names(home):
        os.utime(home / "caches" / folder / "manifest.json", (0, 0))
    assert kd_gc(home, "--yes", **rules).stdout == "nothing to remove\n"
    assert names(home) == {ONE, TWO, TOPK}
    gone = kd_cache(home, "gc")
    assert gone.returncode == 2 and "No such command 'gc'" in gone.stderr


def test_a_student_keeps_its_incomplete_cache_and_not_what_was_left_in_it(home: Path) -> None:
    card = home / "runs" / "mine" / "student" / "README.md"
    card.parent.mkdir(parents=True)
    card.write_text(f"- Cache: 19.4 bytes (`{ONE}`), (`{TWO}`).\n")
    (home / "caches" / ONE / "manifest.json").unlink()
    (home / "caches" / TWO / ".tmp-manifest.json").touch()
    done = kd_gc(home, "--older-than", "0s", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"{home / 'caches' / ONE} stays: the student of mine" in done.stderr
    assert names(home) == {ONE, TWO, TOPK}
    assert not (home / "caches" / TWO / ".tmp-manifest.json").exists()


def test_gc_with_yes_does_not_ask(home: Path) -> None:
    (home / "caches" / TWO / "shards" / ".tmp-shards-000000").mkdir()
    removed = json.loads(kd_gc(home, "--json", "--yes").stdout)
    assert removed["removed"] is True
    assert [Path(one["path"]).name for one in removed["items"]] == [".tmp-shards-000000"]
    assert verify_cache(home / "caches" / TWO) == []


@pytest.mark.parametrize("text", ["7", "d", "-1d", "7 days", "1.5h"])
def test_an_invalid_age_is_a_usage_error(home: Path, text: str) -> None:
    refused = kd_gc(home, f"--older-than={text}")
    assert refused.returncode == 2
    assert "is not an age" in refused.stderr


def test_rm_asks_and_removes(home: Path) -> None:
    assert kd_cache(home, "rm", ONE[:6], answer="n\n").returncode == 1
    assert names(home) == {ONE, TWO, TOPK}
    done = kd_cache(home, "rm", ONE[:6], TWO, answer="y\n")
    assert (done.returncode, names(home)) == (0, {TOPK})
    assert f"{ONE}: removed" in done.stdout
    told = kd_cache(home, "rm", TOPK, "--yes", "--json")
    (removed,) = json.loads(told.stdout)
    assert (told.returncode, removed["fingerprint"], removed["removed"]) == (0, TOPK, True)
    assert removed["bytes"] > 0
    unknown = kd_cache(home, "rm", TOPK, "--yes")
    assert unknown.returncode == 1
    assert "names 0 caches" in unknown.stderr


def test_rm_and_gc_leave_a_capture_alone(tmp_path: Path) -> None:
    identity = identity_of("1")
    with open_writer(tmp_path / "caches", identity) as writer:
        refused = kd_cache(tmp_path, "rm", identity.fingerprint, "--yes")
        assert refused.returncode == 1
        assert "is being captured" in refused.stderr
        assert kd_gc(tmp_path, "--older-than", "0s", "--yes").stdout == "nothing to remove\n"
        fill_cache(writer)
    assert verify_cache(writer.folder) == []


# ---- jobs


def test_rm_spares_what_an_unfinished_job_of_the_embedded_store_uses(
    home: Path, parts: Parts
) -> None:
    shutil.copytree(
        parts.settings.home / "redis",
        home / "redis",
        ignore=shutil.ignore_patterns("append*", "*.lock"),
    )
    assert find_embedded_url(home / "redis") == parts.settings.redis_url
    job_id = parts.jobs.create(make_config("waits", cache={"fingerprint": ONE})).id
    refused = kd_cache(home, "rm", TWO, ONE, "--yes")
    assert refused.returncode == 1
    assert f"is used by unfinished jobs: {job_id}" in refused.stderr
    assert names(home) == {ONE, TWO, TOPK}, "nothing is removed where one is refused"
    assert kd_cache(home, "rm", TWO, "--yes").returncode == 0
    parts.jobs.change("cancel", job_id)
    assert kd_cache(home, "rm", ONE, "--yes").returncode == 0
    assert names(home) == {TOPK}


def test_rm_asks_the_store_that_is_configured(home: Path, parts: Parts) -> None:
    job_id = parts.submit("captured", "precompute")
    claim = parts.jobs.claim(job_id, "precompute", "worker", 60)
    assert claim is not None
    parts.jobs.beat(claim, 60, EventBatch(1, (Event("cache", {"fingerprint": TOPK}),)))
    refused = kd_cache(home, "rm", TOPK, "--yes", KD_REDIS_URL=str(parts.settings.redis_url))
    assert refused.returncode == 1
    assert f"is used by unfinished jobs: {job_id}" in refused.stderr
    assert "redis://" not in refused.stderr


def test_gc_and_rm_spare_the_part_of_a_cache_that_a_paused_job_has_captured(
    new_parts: Callable[..., Parts],
) -> None:
    parts = new_parts(child_module="bench.support.light_child")
    parts.start_worker()
    home = parts.settings.home
    store = {"KD_REDIS_URL": str(parts.settings.redis_url)}
    job_id = parts.submit("light-1-100-50", "precompute")
    wait_until(lambda: parts.job(job_id).progress.done)
    parts.jobs.change("pause", job_id)
    job = parts.wait_for(job_id, "paused", "succeeded", "failed")
    assert job.status == "paused"
    assert job.cache is not None
    folder = home / "caches" / str(job.cache.fingerprint)
    assert list(folder.glob("seals/*.json"))
    assert not (folder / "manifest.json").exists()
    assert kd_gc(home, "--older-than", "0s", "--yes", **store).stdout == "nothing to remove\n"
    assert (
        f"is used by unfinished jobs: {job_id}"
        in kd_cache(home, "rm", folder.name, "--yes", **store).stderr
    )
    assert folder.exists()
    parts.jobs.change("cancel", job_id)
    assert "1 of 1 removed" in kd_gc(home, "--older-than", "0s", "--yes", **store).stdout
    assert not folder.exists()


def test_rm_works_without_a_store(home: Path) -> None:
    (home / "redis").mkdir()
    (home / "redis" / "password").write_text("secret")
    (home / "redis" / "port").write_text("1")
    done = kd_cache(home, "rm", ONE, "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert names(home) == {TWO, TOPK}
    (home / "caches" / TWO / "manifest.json").unlink()
    assert kd_gc(home, "--older-than", "0s", "--yes").returncode == 0
    assert names(home) == {TOPK}


def test_a_folder_is_not_checked_as_a_bucket(tmp_path: Path) -> None:
    done = kd("store", "check", str(tmp_path))
    assert done.returncode == INVALID
    assert "is a folder, which needs no check" in " ".join(done.stderr.split())
