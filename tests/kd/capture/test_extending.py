"""A cache that extends another has the bytes of one that was captured whole, and stands alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.support.small.caches import make_cache, make_codec, make_identity
from cache.checking.verify import verify_cache
from cache.disk import hash_file, list_file_sizes
from cache.errors import CacheCorrupt
from cache.manifest import FORMAT_VERSION
from cache.store import measure_cache_bytes, open_cache
from cache.units.dither import DitherTables
from kd.capture.codec_identity import Recipe
from kd.capture.units.fitting import fit_tables
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.loss import LossConfig
from kd.errors import ConfigError, Interrupted
from kd.pipeline import run_stages
from kd.preflight.problems import Folders, find_problems
from kd.progress import SILENT, Event, Monitor
from kd.stages.capture import run_precompute

pytestmark = pytest.mark.usefixtures("one_thread")

#: Characters of the text before it grew; those after are half as many again.
BEFORE = 8_000


@pytest.fixture(autouse=True)
def small_caches_keep_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.writing.writer.FIRST_TAILS_SHARE", 100.0)


@pytest.fixture
def texts(tiny_text: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A folder of training text, and a file to hold out."""
    text = tiny_text.read_text(encoding="utf-8")
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text(text[:BEFORE], encoding="utf-8")
    (tmp_path / "held out.txt").write_text(text[-3_000:], encoding="utf-8")
    return folder, tmp_path / "held out.txt"


def make_job(teacher: Path, texts: tuple[Path, Path], **cache: Any) -> JobConfig:
    return parse_config(
        {
            "kind": "precompute",
            "teacher": {"model": str(teacher), "batch_size": 3},
            "data": {
                "train": str(texts[0]),
                "validation": str(texts[1]),
                "sequence_length": 64,
            },
            "cache": {"shard_sequences": 7, **cache},
        }
    )


def grow(texts: tuple[Path, Path], tiny_text: Path) -> None:
    """Add to the end of the last file, and a file after it."""
    text = tiny_text.read_text(encoding="utf-8")
    with (texts[0] / "a.txt").open("a", encoding="utf-8") as file:
        file.write(text[BEFORE : BEFORE + 2_000])
    (texts[0] / "b.txt").write_text(text[BEFORE + 2_000 : BEFORE + 4_000], encoding="utf-8")


def capture(job: JobConfig, home: Path, monitor: Monitor = SILENT) -> Path:
    summary = run_precompute(job, home, home / "run", monitor).cache
    return home / "caches" / str(summary["fingerprint"])


def stop_after(reads: int) -> Monitor:
    """Make a monitor that stops a capture after so many micro-batches."""
    seen: list[str] = []
    return Monitor(lambda event: seen.append(event.type), lambda: seen.count("progress") >= reads)


@pytest.fixture
def keep_recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let captures have the recipe of a cache: that of a text may change as it grows."""

    def keep(folder: Path) -> None:
        known = open_cache(folder).identity.codec
        if known.clusters:
            recipe = Recipe(known.clusters, known.fitted)
            monkeypatch.setattr(Recipe, "choose", lambda *_: recipe)

    return keep


def content(folder: Path) -> dict[str, str]:
    return {name: hash_file(folder / name) for name in list_file_sizes(folder)}


@pytest.mark.parametrize(
    "profile",
    [
        "threshold",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("hidden", "tempered", "topk")),
    ],
)
def test_it_has_the_bytes_of_a_cache_that_was_captured_whole(
    profile: str,
    tiny_teacher: Path,
    tiny_text: Path,
    texts: tuple[Path, Path],
    tmp_path: Path,
    keep_recipe: Callable[[Path], None],
) -> None:
    home = tmp_path / "home"
    before = capture(make_job(tiny_teacher, texts, profile=profile), home)
    lasting = open_cache(before).identity.lasting_shards
    assert lasting >= 3
    grow(texts, tiny_text)
    events: list[Event] = []
    extending = make_job(tiny_teacher, texts, profile=profile, extends=before.name)
    extended = capture(extending, home, Monitor(events.append))
    keep_recipe(before)
    whole = capture(make_job(tiny_teacher, texts, profile=profile), tmp_path / "other")

    assert extended.name == whole.name != before.name
    if profile == "threshold":
        # Only what it takes from the cache tells that its tables are those of the first text.
        assert content(before / "dither") == content(extended / "dither")
    assert content(extended) == content(whole)
    done = [event.data["done"] for event in events if event.type == "progress"]
    assert done[0] == lasting * 7 + 3, "what was captured before is not read by the teacher"
    for index in range(open_cache(extended).identity.shard_count):
        ours, theirs = (
            each / "shards" / f"{index:06d}" / "zarr.json" for each in (extended, before)
        )
        assert (theirs.is_file() and ours.samefile(theirs)) == (index < lasting), "no copy"
    assert verify_cache(before) == [] == verify_cache(extended)
    shutil.rmtree(before)
    assert verify_cache(extended) == []


def test_it_keeps_the_entropies_of_positions_where_the_earlier_cache_does(
    tiny_teacher: Path, tiny_text: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    weighing = make_job(tiny_teacher, texts).model_copy(
        update={"loss": LossConfig(entropy_weighting=1.0)}
    )
    before = capture(weighing, tmp_path)
    grow(texts, tiny_text)
    extended = capture(make_job(tiny_teacher, texts, extends=before.name), tmp_path)
    assert open_cache(before).codec.entropies and open_cache(extended).codec.entropies


@pytest.mark.long
def test_only_a_cache_with_sums_has_a_folder_of_them(
    tiny_teacher: Path,
    texts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = capture(make_job(tiny_teacher, texts), tmp_path / "kept")
    monkeypatch.setattr("cache.writing.writer.FIRST_TAILS_SHARE", 0.0025)
    small = capture(make_job(tiny_teacher, texts), tmp_path / "small")
    versions = [
        json.loads((each / "manifest.json").read_bytes())["version"] for each in (kept, small)
    ]
    assert versions == [FORMAT_VERSION] * 2, "both have tables of dither"
    assert (kept / "first_tails").is_dir() and not (small / "first_tails").exists()
    sizes = [sum(list_file_sizes(each).values()) for each in (kept, small)]
    for folder, size in zip((kept, small), sizes, strict=True):
        opened = open_cache(folder)
        assert measure_cache_bytes(folder, opened.manifest) == size
    (name,) = [each for each in list_file_sizes(kept) if each.startswith("first_tails/sums/c")]
    (kept / name).write_bytes((kept / name).read_bytes()[:-1])
    assert any("first_tails/sums" in line for line in verify_cache(kept))


@pytest.mark.long
def test_caches_extend_one_another_and_a_capture_that_was_stopped_goes_on(
    tiny_teacher: Path,
    tiny_text: Path,
    texts: tuple[Path, Path],
    tmp_path: Path,
    keep_recipe: Callable[[Path], None],
) -> None:
    home = tmp_path / "home"
    first = capture(make_job(tiny_teacher, texts), home)
    grow(texts, tiny_text)
    second = capture(make_job(tiny_teacher, texts, extends=first.name), home)
    shutil.rmtree(first)
    (texts[0] / "c.txt").write_text(
        tiny_text.read_text(encoding="utf-8")[13_000:], encoding="utf-8"
    )
    job = make_job(tiny_teacher, texts, extends=second.name)
    for stop in (1, 4):
        with pytest.raises(Interrupted):
            capture(job, home, stop_after(stop))
    third = capture(job, home)
    keep_recipe(third)
    assert content(third) == content(capture(make_job(tiny_teacher, texts), tmp_path / "other"))


@pytest.mark.long
def test_a_text_that_changed_or_shrank_is_refused(
    tiny_teacher: Path, tiny_text: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    before = capture(make_job(tiny_teacher, texts), home)
    text = (texts[0] / "a.txt").read_text(encoding="utf-8")
    grow(texts, tiny_text)
    # A file that is read before the old one.
    (texts[0] / "0.txt").write_text("New words come first.", encoding="utf-8")
    job = make_job(tiny_teacher, texts, extends=before.name)
    with pytest.raises(ConfigError, match=r"training sequence 0 differs. New text must come after"):
        capture(job, home)
    for name in ("0.txt", "b.txt"):
        (texts[0] / name).unlink()
    (texts[0] / "a.txt").write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"training sequences, and this job only \d+"):
        capture(job, home)


@pytest.mark.long
def test_other_settings_and_missing_or_damaged_caches_are_refused_by_name(
    tiny_teacher: Path,
    tiny_text: Path,
    texts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "home"
    before = capture(make_job(tiny_teacher, texts), home)
    grow(texts, tiny_text)

    def found(**cache: Any) -> list[str]:
        job = make_job(tiny_teacher, texts, **cache)
        problems = find_problems(job, Folders(Path(), home))
        assert {each.pointer for each in problems} <= {"/cache/extends"}
        return [each.detail for each in problems]

    assert found(extends=before.name) == []
    (line,) = found(extends=before.name, seed=3)
    assert "another setting: codec.seed: expected 3, got 0" in line
    (line,) = found(extends="0" * 32)
    assert "there is no sealed cache '00000000000000000000000000000000'" in line
    with pytest.raises(ConfigError, match=r"cache.extends is for a capture"):
        make_job(tiny_teacher, texts, extends=before.name, fingerprint=before.name)

    shard = next(
        name for name in list_file_sizes(before) if name.startswith("shards/000001/known/c")
    )
    data = bytearray((before / shard).read_bytes())
    data[-9] ^= 1
    (before / shard).write_bytes(bytes(data))
    with pytest.raises(CacheCorrupt, match=r"known"):
        capture(make_job(tiny_teacher, texts, extends=before.name), home)
    shutil.rmtree(home / "caches")

    monkeypatch.setattr("cache.writing.writer.FIRST_TAILS_SHARE", 0.0)
    small = capture(make_job(tiny_teacher, texts), home)
    (texts[0] / "c.txt").write_text("More.", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"does not keep the sums of its tails"):
        capture(make_job(tiny_teacher, texts, extends=small.name), home)


@pytest.mark.long
def test_a_student_of_it_is_that_of_a_cache_that_was_captured_whole(
    tiny_teacher: Path,
    tiny_text: Path,
    texts: tuple[Path, Path],
    tmp_path: Path,
    keep_recipe: Callable[[Path], None],
) -> None:
    home = tmp_path / "home"
    before = capture(make_job(tiny_teacher, texts), home)
    grow(texts, tiny_text)
    keep_recipe(before)
    students = []
    for place, cache in ((home, {"extends": before.name}), (tmp_path / "other", {})):
        job = make_job(tiny_teacher, texts, **cache).model_dump(mode="json")
        changes = {
            "kind": "distill",
            "student": {"init": {"layers": 1, "hidden_size": 16}},
            "train": {"max_steps": 3, "batch_size": 4},
        }
        run_stages(parse_config(job | changes), place, place / "student run")
        students.append(content(place / "student run" / "student"))
    assert students[0]["model.safetensors"] == students[1]["model.safetensors"]


def test_a_cache_of_an_earlier_version_cannot_be_extended(
    tiny_teacher: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    earlier = make_codec("threshold", clusters=0, fitted=0)
    name = make_cache(home / "caches", make_identity(codec=earlier)).name
    with pytest.raises(ConfigError, match="an earlier version captured it"):
        capture(make_job(tiny_teacher, texts, extends=name), home)


def test_a_capture_that_was_begun_with_other_tables_takes_no_shard(
    tiny_teacher: Path,
    tiny_text: Path,
    texts: tuple[Path, Path],
    tmp_path: Path,
    keep_recipe: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "home"
    before = capture(make_job(tiny_teacher, texts), home)
    grow(texts, tiny_text)
    keep_recipe(before)

    def fit_others(*given: Any) -> DitherTables:
        tables = fit_tables(*given)
        return replace(tables, classes_V=tables.classes_V[::-1].copy())

    # The tables of a longer text are others, and those of another device may be.
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("kd.capture.teacher.fit_tables", fit_others)
        with pytest.raises(Interrupted):
            capture(make_job(tiny_teacher, texts), home, stop_after(1))
    (begun,) = [each for each in before.parent.iterdir() if each.is_dir() and each != before]
    held = content(begun)
    assert content(before / "dither") != content(begun / "dither")

    with pytest.raises(ConfigError, match="begun with other tables of dither") as refusal:
        capture(make_job(tiny_teacher, texts, extends=before.name), home)
    (problem,) = refusal.value.problems
    assert str(begun) in problem.detail and before.name[:12] in problem.detail
    assert content(begun) == held, "no shard was taken"
    # The remedy.
    assert problem.remedy.startswith("Remove cache.extends")
    whole = capture(make_job(tiny_teacher, texts), home)
    assert whole == begun and verify_cache(whole) == []
    assert content(whole).items() >= held.items()
