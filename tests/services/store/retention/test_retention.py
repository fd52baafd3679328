"""What each rule of retention removes, and what stays because somebody needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from bench.support.small.caches import make_cache, make_identity
from bench.support.waiting import PATIENCE_SECONDS
from cache.checking.listing import list_caches
from cache.checking.verify import verify_cache
from cache.disk import locked
from cache.reading.usage import held, hold_for, locate_use, read_last_use
from cache.store import open_cache
from cache.writing.writer import open_writer
from kd.config.data import DataConfig
from kd.files import LOCK, write_json
from kd.progress import Event
from kd.python.inputs import describe_text
from kd.text.corpus import Corpus, open_corpus
from kd.text.stored.shard_files import list_stores, locate_lock
from services.loops.teams import TeamRules
from services.settings import DAY_SECONDS, Settings
from services.store.jobs.leases import EventBatch
from services.store.jobs.store import JobStore
from services.store.retention.collector import Item, Scene, find_items, look, remove_items
from services.store.run_folder import read_run
from services.store.training_files import TrainingFiles
from tests.support.records import finished, queued, running

DAY = DAY_SECONDS
OLD = 100 * DAY


class Home:
    """A data folder and its job store, in which things can be made old."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self.settings = Settings(home=folder, redis_url=parts.server.url)
        self.store: JobStore = parts.jobs
        for each in ("caches", "runs"):
            (folder / each).mkdir()

    def make_cache(self, name: str = "1", age: float = OLD) -> Path:
        """A sealed cache that was captured and used so long ago."""
        identity = make_identity(train_sequences=3, validation_sequences=1)
        identity = replace(identity, data=replace(identity.data, sha256=name * 64))
        folder = make_cache(self.settings.caches, identity)
        make_old(folder / "manifest.json", age)
        return folder

    def make_run(self, status: str = "succeeded", age: float = OLD, **changes: Any) -> Path:
        """The folder of a job that ended so long ago, with a log and three checkpoints."""
        claim = running(self.store, **changes)
        point = Event("metrics", {"step": 1, "loss": 2.0})
        self.store.beat(claim, 5, EventBatch(1, (point,)))
        error = {"type": "x", "detail": "It failed.", "remedy": "Retry."}
        if status == "cancelled":
            self.store.change("cancel", claim.id)
            self.store.release(claim)
        else:
            self.store.finish(claim, status, None if status == "succeeded" else error)  # type: ignore[arg-type]
        self.make_ended_old(claim.id, age)
        folder = self.settings.run_dir(claim.id)
        folder.mkdir(parents=True)
        (folder / LOCK).touch()
        (folder / "log.txt").write_text("a line\n")
        write_json(folder / "config.json", make_config("quick", **changes).model_dump(mode="json"))
        for step in (2, 4, 6):
            place = folder / "checkpoints" / f"step-{step:08d}"
            place.mkdir(parents=True)
            write_json(place / "state.json", {"progress": {"step": step, "best_step": 2}})
        return folder

    def make_ended_old(self, job_id: str, age: float = OLD) -> None:
        """Let a job have ended so long ago."""
        ended = self.store.read_clock_ms() - int(age * 1000)
        self.store.redis.hset(f"kd:job:{job_id}", "finished_at", ended)

    def look(self, force: bool = False, keep: int = 0, beside: bool = True, **ages: float) -> Scene:
        """The service as a pass with these ages sees it.

        Ended jobs keep so many checkpoints (0 = all), and those ``beside`` a student or not.
        """
        changes = {"retain_checkpoints": keep, "retain_checkpoints_of_students": beside}
        settings = self.settings.model_copy(update=changes)
        return look(settings, self.store, ages, force)

    def find(self, **limits: Any) -> list[Item]:
        """What these limits would remove."""
        return find_items(self.look(**limits))

    def sweep(self, **limits: Any) -> tuple[list[Item], list[Item]]:
        """Remove it; return what is gone and what stays."""
        scene = self.look(**limits)
        return remove_items(find_items(scene), scene, lambda *_, **__: None)


@pytest.fixture
def home(parts: Parts, tmp_path: Path) -> Home:
    folder = tmp_path / "home"
    folder.mkdir()
    return Home(parts, folder)


def make_old(path: Path, age: float = OLD) -> None:
    moment = time.time() - age
    os.utime(path, (moment, moment))


def save_student(run: Path, fingerprint: str) -> None:
    """A saved student whose card names its cache, as a report does."""
    (run / "student").mkdir(parents=True)
    (run / "student" / "README.md").write_text(f"- Cache: 19.4 bytes (`{fingerprint}`).\n")


# ---------------------------------------------------------------------- caches


def test_a_cache_goes_by_its_last_use_and_by_its_age(home: Home) -> None:
    unused, used, young = (
        home.make_cache("1"),
        home.make_cache("2"),
        home.make_cache("3", age=DAY),
    )
    with held(used):
        pass
    assert [item.name for item in home.find(caches=30 * DAY)] == [unused.name]
    by_age = home.find(captured=30 * DAY)
    assert {item.name for item in by_age} == {unused.name, used.name}
    assert all(item.kept_by is None for item in by_age)
    (item,) = home.find(caches=30 * DAY)
    assert item.bytes == sum(path.stat().st_size for path in unused.rglob("*") if path.is_file())
    assert "not used for 100 days" in item.reason and item.age_seconds == pytest.approx(
        OLD, abs=600
    )
    gone, kept = home.sweep(caches=30 * DAY)
    assert ([each.name for each in gone], kept) == ([unused.name], [])
    assert {path.name for path in home.settings.caches.iterdir() if path.is_dir()} == {
        used.name,
        young.name,
    }
    assert home.find() == [], "no rule, nothing to remove"


def test_a_use_is_recorded_beside_the_cache_and_changes_none_of_its_bytes(home: Home) -> None:
    folder = home.make_cache()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert read_last_use(folder) is None
    store = open_cache(folder)
    hold_for(store, folder)
    assert time.time() - read_last_use(folder) < 60  # type: ignore[operator]
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert verify_cache(folder) == []
    assert locate_use(folder).parent == folder.parent


def test_a_cache_that_is_read_stays_even_with_force(home: Home) -> None:
    folder = home.make_cache()
    store = open_cache(folder)
    hold_for(store, folder)
    make_old(locate_use(folder))
    gone, kept = home.sweep(force=True, caches=30 * DAY)
    assert gone == [] and "is being read" in str(kept[0].kept_by)
    assert verify_cache(folder) == []
    del store
    gone, kept = home.sweep(caches=30 * DAY)
    assert [item.path for item in gone] == [folder] and not locate_use(folder).exists()


def test_a_cache_that_is_captured_stays_even_with_force(home: Home) -> None:
    folder = home.make_cache()
    identity = open_cache(folder).identity
    with open_writer(home.settings.caches, identity):
        gone, kept = home.sweep(force=True, caches=30 * DAY)
    assert gone == [] and "is being captured" in str(kept[0].kept_by)


def test_a_cache_that_a_job_or_a_student_names_goes_only_with_force(home: Home) -> None:
    asked, carded = home.make_cache("1"), home.make_cache("2")
    job_id = queued(home.store, cache={"fingerprint": asked.name})
    run = home.settings.runs / "mine"
    save_student(run, carded.name)
    gone, kept = home.sweep(caches=30 * DAY)
    assert gone == []
    assert {item.name: item.kept_by for item in kept} == {
        asked.name: f"the job {job_id}, which has not ended",
        carded.name: "the student of mine",
    }
    gone, kept = home.sweep(force=True, caches=30 * DAY)
    assert {item.name for item in gone} == {asked.name, carded.name} and kept == []
    assert list_caches(home.settings.caches) == []


def test_every_cache_of_a_job_with_several_teachers_stays(home: Home) -> None:
    names = [home.make_cache(each).name for each in "123"]
    claim = running(home.store)
    plan = Event("plan", {"fingerprint": names[0], "fingerprints": names[:2]})
    home.store.beat(claim, 5, EventBatch(1, (plan,)))
    gone, kept = home.sweep(caches=30 * DAY)
    assert [item.name for item in gone] == names[2:]
    holder = f"the job {claim.id}, which has not ended"
    assert {item.name: item.kept_by for item in kept} == dict.fromkeys(names[:2], holder)


def test_a_job_that_is_submitted_after_the_listing_keeps_its_cache(home: Home) -> None:
    folder = home.make_cache()
    scene = home.look(caches=30 * DAY)
    items = find_items(scene)
    job_id = queued(home.store, cache={"fingerprint": folder.name})
    gone, kept = remove_items(items, scene, lambda *_, **__: None)
    assert gone == [] and job_id in str(kept[0].kept_by)
    assert verify_cache(folder) == []


def test_a_run_outside_the_store_that_reads_after_the_listing_keeps_its_cache(home: Home) -> None:
    folder = home.make_cache()
    scene = home.look(caches=30 * DAY)
    items = find_items(scene)
    with held(folder):
        pass  # it has ended, but its student may need the cache
    gone, kept = remove_items(items, scene, lambda *_, **__: None)
    assert gone == [] and kept[0].kept_by == "a run has read it since it was listed"


# ---------------------------------------------------------------------- ended jobs


def test_an_ended_job_goes_with_its_run_and_then_its_cache_is_free(home: Home) -> None:
    cache = home.make_cache()
    old, young = home.make_run(), home.make_run(age=DAY)
    save_student(old, cache.name)
    waiting = queued(home.store)
    limits = {"runs": 30 * DAY, "caches": 30 * DAY, "checkpoints": 0.0, "keep": 1, "logs": DAY / 2}
    gone, kept = home.sweep(**limits)
    assert [(item.kind, item.name) for item in gone if item.name == old.name] == [
        ("runs", old.name)
    ]
    assert [item.name for item in kept] == [cache.name], "its student was there at the beginning"
    assert not old.exists() and home.store.get(old.name) is None
    assert young.is_dir() and home.store.get(waiting) is not None
    assert [item.name for item in home.sweep(**limits)[0]] == [cache.name]


def test_a_run_that_an_open_job_names_or_a_process_holds_stays(home: Home) -> None:
    continued, writing, late = home.make_run(), home.make_run(), home.make_run()
    job_id = queued(home.store, resume={"run": continued.name})
    scene = home.look(runs=30 * DAY)
    items = find_items(scene)
    later = queued(home.store, resume={"run": late.name})
    with locked(writing / LOCK):
        gone, kept = remove_items(items, scene, lambda *_, **__: None)
    assert gone == [] and {item.name: item.kept_by for item in kept} == {
        continued.name: f"the job {job_id}, which has not ended",
        writing.name: "a process writes to it",
        late.name: "it has not ended, or an open job names it",
    }
    home.store.change("cancel", later)
    assert {item.name for item in home.sweep(runs=30 * DAY)[0]} == {writing.name, late.name}


def test_a_job_that_is_retried_after_the_listing_keeps_its_run(home: Home) -> None:
    run = home.make_run("failed")
    scene = home.look(runs=30 * DAY)
    items = find_items(scene)
    assert home.store.change("retry", run.name).outcome == "done"
    gone, _ = remove_items(items, scene, lambda *_, **__: None)
    assert gone == [] and run.is_dir() and home.store.get(run.name) is not None


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_the_newest_checkpoints_stay_and_the_best_of_a_job_that_may_be_retried(home: Home) -> None:
    done, failed = home.make_run(), home.make_run("failed")
    open_job = running(home.store)
    (home.settings.run_dir(open_job.id) / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name in (".tmp-step-00000008", ".tmp-old-step-00000006"):
        (done / "checkpoints" / name).mkdir()
    assert {item.reason for item in home.find(checkpoints=0.0, keep=4)} == {
        "a save or a removal was interrupted"
    }, "three are not more than four"
    _, kept = home.sweep(checkpoints=0.0, keep=1)
    assert kept == []
    assert steps(done) == [".tmp-old-step-00000006", "step-00000006"]
    assert steps(failed) == ["step-00000002", "step-00000006"], "step 2 is the best"
    assert steps(home.settings.run_dir(open_job.id)) == ["step-00000001"]
    assert home.sweep(checkpoints=0.0, keep=1) == ([], [])


def test_no_checkpoint_stays_beside_a_saved_student_if_the_rule_says_so(home: Home) -> None:
    saved, unsaved, failed = home.make_run(), home.make_run(), home.make_run("failed")
    for run in (saved, failed):
        (run / "student").mkdir()
    with locked(saved / LOCK):
        gone, kept = home.sweep(checkpoints=0.0, beside=False)
    assert gone == [] and {item.kept_by for item in kept} == {"a process writes to it"}
    gone, kept = home.sweep(checkpoints=0.0, beside=False)
    assert {item.name for item in gone} == {saved.name} and steps(saved) == []
    assert len(steps(unsaved)) == len(steps(failed)) == 3, "a failed job may be retried"


def test_logs_of_ended_jobs_go_and_the_records_stay(home: Home) -> None:
    old, young = home.make_run(), home.make_run(age=DAY)
    gone, kept = home.sweep(logs=30 * DAY)
    assert [(item.kind, item.name) for item in gone] == [("logs", old.name)]
    assert kept == [] and all(item.bytes > 0 for item in gone)
    assert not (old / "log.txt").exists() and (young / "log.txt").exists()
    assert home.store.read_metrics(old.name) and home.store.read_events(old.name)
    assert home.store.get(old.name).status == "succeeded"  # type: ignore[union-attr]


@pytest.mark.parametrize("days, seconds", [(30.0, 30 * DAY), (7.0, 7 * DAY), (0.0, -1)])
def test_the_events_of_an_ended_job_expire_after_the_time_of_the_setting(
    home: Home, days: float, seconds: float
) -> None:
    TeamRules(home.store, home.settings.model_copy(update={"retain_events_days": days})).step()
    left: Any = home.store.redis.ttl(f"kd:job:{finished(home.store)}:events")
    assert left == pytest.approx(seconds, abs=60)


# ---------------------------------------------------------------------- token stores


@pytest.fixture
def text(home: Home, tokenizer: Any, tiny_text: Path) -> Callable[[], Corpus]:
    """Opens a text from its token store."""
    data = DataConfig(train=(str(tiny_text),), validation_fraction=0.0, sequence_length=16)
    return lambda: open_corpus(data, tokenizer, home.settings.texts, size=2048)


def make_store_old(home: Home) -> Path:
    (store,) = list_stores(home.settings.texts)
    for path in (store.folder, *store.folder.rglob("*"), locate_use(store.folder)):
        make_old(path)
    return store.folder


def test_a_token_store_goes_unless_it_is_read_or_written(
    home: Home, text: Callable[[], Corpus]
) -> None:
    read = text()
    folder = make_store_old(home)
    _, kept = home.sweep(texts=DAY)
    assert [(item.kind, item.kept_by) for item in kept] == [
        ("texts", f"{folder} is being read by a run.")
    ]
    before = read.train.select([0]).tokens
    del read
    with locked(locate_lock(folder)):
        _, kept = home.sweep(texts=DAY)
    assert [item.kept_by for item in kept] == [f"{folder} is being written by a run."]
    gone, kept = home.sweep(texts=DAY)
    assert [item.path for item in gone] == [folder] and kept == []
    assert gone[0].bytes > 1000
    assert list(home.settings.texts.iterdir()) == []
    assert (text().train.select([0]).tokens == before).all(), "it is made again"


def test_a_token_store_that_was_used_since_it_was_listed_stays(
    home: Home, text: Callable[[], Corpus]
) -> None:
    text()
    assert home.find(texts=DAY) == []
    folder = make_store_old(home)
    scene = home.look(texts=DAY)
    items = find_items(scene)
    text()
    gone, kept = remove_items(items, scene, lambda *_, **__: None)
    assert gone == [] and [item.kept_by for item in kept] == [
        "a run has read it since it was listed"
    ]
    assert (folder / "manifest.json").is_file()


# ---------------------------------------------------------------------- files and imports


def test_an_uploaded_file_that_no_job_names_goes(home: Home) -> None:
    files = TrainingFiles(home.settings.files)
    ids = []
    for name in ("x.jsonl", "y.jsonl", "z.jsonl"):
        with files.receiving("nlp") as pending:
            pending.write(b'{"messages": []}\n')
            ids.append(pending.publish(name, 1, "messages", lambda: None).id)
    free, used, ended = ids
    open_job = queued(home.store, data={"train": str(files.locate("nlp", used))})
    ended_job = finished(home.store, data={"train": str(files.locate("nlp", ended))})
    assert home.find(files=DAY) == []
    gone, kept = home.sweep(files=0.0)
    assert [item.name for item in gone] == [free]
    assert {item.name: item.kept_by for item in kept} == {
        used: f"the job {open_job}, which has not ended",
        ended: f"the job {ended_job}",
    }
    assert {file.id for file in files.list_files("nlp")} == {used, ended}


def test_saved_data_goes_unless_a_job_or_a_student_names_it_or_it_is_saved_again(
    home: Home,
) -> None:
    texts = ["one", "two", "three", "four"]
    paths = [
        Path(describe_text([f"A text: {each}"], "/data/train", home.settings.home).sources)
        for each in texts
    ]
    for path in paths:
        make_old(path)
    free, named, carded, again = paths
    job_id = queued(home.store, data={"train": str(named)})
    run = home.settings.runs / "mine"
    (run / "student").mkdir(parents=True)
    write_json(run / "student" / "distillation.json", {"job": {"data": {"train": [str(carded)]}}})
    scene = home.look(imports=30 * DAY)
    items = find_items(scene)
    describe_text(["A text: four"], "/data/train", home.settings.home)
    gone, kept = remove_items(items, scene, lambda *_, **__: None)
    assert [item.path for item in gone] == [free]
    assert {item.path: item.kept_by for item in kept} == {
        named: f"the job {job_id}, which has not ended",
        carded: "the student of mine",
        again: "it was saved again since it was listed",
    }


# ---------------------------------------------------------------------- leftovers and kills


def test_leftovers_go_after_some_time(home: Home) -> None:
    unknown, held_run, removed = (home.make_run() for _ in range(3))
    for run in (unknown, held_run, removed):
        home.store.change("delete", run.name)
        for path in (*run.rglob("*"), run):
            make_old(path)
    removed = removed.rename(removed.with_name(f".tmp-{removed.name}"))
    incomplete, needed = home.make_cache("1"), home.make_cache("2")
    for folder in (incomplete, needed):
        (folder / "manifest.json").unlink()
        for path in (*folder.rglob("*"), folder):
            make_old(path)
    save_student(home.settings.runs / "mine", needed.name)
    with locked(held_run / LOCK):
        gone, kept = home.sweep(leftovers=7 * DAY, strays=7 * DAY)
    assert {item.path for item in gone} == {unknown, removed, incomplete}
    assert [(item.path, item.kept_by) for item in kept] == [(needed, "the student of mine")]
    assert held_run.is_dir()
    assert home.find(leftovers=1000 * DAY, strays=1000 * DAY) == []


def test_a_leftover_that_is_needed_again_after_the_listing_stays(home: Home) -> None:
    run, incomplete = home.make_run(), home.make_cache()
    home.store.change("delete", run.name)
    (incomplete / "manifest.json").unlink()
    for path in (*run.rglob("*"), run, *incomplete.rglob("*"), incomplete):
        make_old(path)
    scene = home.look(leftovers=7 * DAY, strays=7 * DAY)
    items = find_items(scene)
    assert {item.path for item in items} == {run, incomplete}
    assert home.store.adopt(read_run(run), "local")
    (incomplete / "shards").touch()
    gone, kept = remove_items(items, scene, lambda *_, **__: None)
    assert gone == [] and {item.path: item.kept_by for item in kept} == {
        run: "a job record names it by now",
        incomplete: "it was saved again since it was listed",
    }


#: Applies rules in a process that kills itself before the n-th change that it makes to the disk.
CHILD = """
import os, signal, sys
from pathlib import Path
from services.settings import Settings
from services.store.connection import connect_redis
from services.store.jobs.store import JobStore
from services.store.retention.collector import find_items, look, remove_items

settings = Settings(home=Path(sys.argv[1]))
store = JobStore(connect_redis(settings.redis_url))
scene = look(settings, store, {"caches": 1.0, "runs": 1.0, "imports": 1.0})
items = find_items(scene)
deadly, changes = int(sys.argv[2]), 0

def count(event, arguments):
    global changes
    if event in ("os.rename", "os.remove", "os.rmdir"):
        changes += 1
        if changes == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
remove_items(items, scene, lambda *_, **__: None)
"""


@pytest.mark.long
@pytest.mark.parametrize("deadly", [1, 2, 5, 45, 48])
def test_a_removal_that_is_killed_leaves_nothing_that_is_believed(home: Home, deadly: int) -> None:
    cache, run = home.make_cache(), home.make_run()
    (data,) = [Path(describe_text(["A text."], "/data/train", home.settings.home).sources)]
    make_old(data)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KD_REDIS_URL": str(home.settings.redis_url),
    }
    command = [sys.executable, "-c", CHILD, str(home.settings.home), str(deadly)]
    died = subprocess.run(command, env=environment, timeout=PATIENCE_SECONDS, check=False)
    assert died.returncode == -9
    assert all(each.complete for each in list_caches(home.settings.caches)), "whole, or gone"
    if run.is_dir():
        assert len(steps(run)) == 3 and (run / "log.txt").exists()
    if data.exists():
        assert json.loads(data.read_text()) == {"text": "A text."}
    for path in home.settings.home.rglob("*"):
        make_old(path)
    home.sweep(caches=1.0, runs=1.0, imports=1.0, leftovers=DAY, strays=DAY)
    left = [path for path in home.settings.home.rglob("*") if path.is_file()]
    assert left == [], "the next pass removes the rest"
    assert not cache.exists() and home.store.get(run.name) is None
