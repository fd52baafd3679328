"""``kd backup`` and ``kd restore`` with real servers: everything comes back, or nothing changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from bench.support.small.caches import make_cache
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from cache.checking.verify import verify_cache
from cache.disk import hash_file, publish_folder
from cache.errors import StorageError
from kd.progress import Event
from services.settings import Settings
from services.store.backup import (
    BackupError,
    Lacking,
    copy_file,
    copy_folder,
    locate_trees,
    make_backup,
    restore_backup,
    verify_backup,
)
from services.store.connection import connect_redis
from services.store.embedded import EmbeddedServer, find_binary
from services.store.jobs.leases import EventBatch
from services.store.jobs.store import JobStore
from tests.support.commands import kd

NewParts = Callable[..., Parts]
METRICS = Event("metrics", {"step": 1, "loss": 2.5})


@pytest.fixture
def other(new_parts: NewParts) -> Parts:
    """An empty service to restore to."""
    return new_parts()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "backups" / "today"


@pytest.fixture
def home(parts: Parts) -> Iterator[Path]:
    """The data folder of the shared service, with a cache and a run."""
    home = parts.settings.home
    make_cache(home / "caches")
    run = home / "runs" / "job_1"
    (run / "student").mkdir(parents=True)
    (run / "student" / "model.safetensors").write_bytes(os.urandom(3000))
    (run / "log.txt").write_text("a line\n")
    (run / ".lock").touch()
    (run / ".tmp-report.md").write_text("half")
    (run / "link").symlink_to("/etc/passwd")
    yield home
    for tree in ("caches", "runs"):
        shutil.rmtree(home / tree)


def values(parts: Parts) -> dict[str, Any]:
    """Every key of the job store with its value, independent of the server's internal order."""
    redis = parts.jobs.redis
    read = {
        "string": redis.get,
        "hash": redis.hgetall,
        "set": redis.smembers,
        "list": lambda key: redis.lrange(key, 0, -1),
        "zset": lambda key: redis.zrange(key, 0, -1, withscores=True),
        "stream": lambda key: (redis.xrange(key), redis.xinfo_stream(key)["last-generated-id"]),
    }
    return {key: read[redis.type(key)](key) for key in redis.keys("kd:*")}


def back_up(parts: Parts, folder: Path, pause: float = 5.0) -> None:
    make_backup(folder, parts.settings, parts.jobs.redis, pause)


def restore_to(parts: Parts, folder: Path, force: bool = False) -> list[str]:
    return restore_backup(folder, verify_backup(folder), parts.settings, parts.jobs.redis, force)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# What is kept


def test_all_of_it_is_there_again(parts: Parts, home: Path, other: Parts, folder: Path) -> None:
    store = parts.jobs
    ended, waiting, paused = (
        store.create(make_config(name)).id for name in ("ended", "waiting", "paused")
    )
    claim = store.claim(ended, "train", "w", 60)
    assert claim is not None
    store.beat(claim, 60, EventBatch(1, (METRICS,)))
    store.finish(claim, "succeeded")
    store.change("pause", paused)
    before = values(parts)
    assert len(before) > 15
    back_up(parts, folder)

    assert restore_to(other, folder) == []
    assert values(other) == before
    assert [other.job(job_id).status for job_id in (ended, waiting, paused)] == [
        "succeeded",
        "queued",
        "paused",
    ]
    assert other.jobs.read_metrics(ended) == store.read_metrics(ended) != []
    assert other.jobs.redis.pttl(f"kd:job:{ended}:events") > 0, (
        "what has an end of life has one again"
    )
    assert other.jobs.claim_next("train", "w", 60) is not None

    (folder,) = (other.settings.home / "caches").glob("?" * 32)
    assert verify_cache(folder) == []
    run = other.settings.home / "runs" / "job_1"
    names = {"student/model.safetensors", "log.txt"}
    kept = {name: data for name, data in contents(home / "runs" / "job_1").items() if name in names}
    assert contents(run) == kept


@pytest.mark.long
def test_a_job_that_was_running_goes_on_without_losing_an_attempt(
    new_parts: NewParts, other: Parts, folder: Path
) -> None:
    first = new_parts()
    worker = first.start_worker()
    job_id = first.submit("steps")
    steps = first.settings.run_dir(job_id) / "steps"
    wait_until(lambda: steps.exists() and len(steps.read_text().split()) > 5)
    back_up(first, folder)
    assert first.job(job_id).status == "running", "the service goes on"

    assert restore_to(other, folder) == [job_id]
    assert other.job(job_id).status == "queued"
    saved = (other.settings.run_dir(job_id) / "steps").read_text().split()
    assert len(saved) > 5
    other.start_api()  # its reconciler sends the hint
    other.start_worker()
    job = other.wait_for(job_id, "succeeded", "failed")
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert (other.settings.run_dir(job_id) / "steps").read_text().split() == [
        str(step) for step in range(60)
    ]
    assert first.wait_for(job_id, "succeeded").attempt == 1
    assert worker.poll() is None


def test_hints_and_signs_of_life_are_not_kept(parts: Parts, folder: Path) -> None:
    parts.submit("quick")
    parts.jobs.redis.set("kd:worker:gone", "{}", ex=60)
    parts.jobs.redis.sadd("kd:workers", "gone")
    # On a busy machine the hint of a job may be left to the reconciler.
    parts.jobs.redis.lpush("kd:celery:train", "a hint")
    back_up(parts, folder)
    keys = [json.loads(line)["key"] for line in (folder / "redis.jsonl").read_text().splitlines()]
    assert "kd:queue:train" in keys
    assert not [key for key in keys if key.startswith(("kd:celery:", "kd:worker"))]


def test_what_is_locked_or_unfinished_or_a_link_is_left_out(
    parts: Parts, home: Path, folder: Path
) -> None:
    back_up(parts, folder)
    names = set(contents(folder))
    assert {"backup.json", "redis.jsonl", "runs/job_1/log.txt"} <= names
    assert not [name for name in names if name.endswith((".lock", "link")) or ".tmp-" in name]


def test_the_keys_of_the_api_come_along_and_stay_private(
    parts: Parts, other: Parts, folder: Path
) -> None:
    keys = parts.settings.home / "keys"
    keys.write_text('{"name": "me"}\n')
    settings = parts.settings.model_copy(update={"api_keys_file": keys})
    make_backup(folder, settings, parts.jobs.redis)
    keys.unlink()
    target = other.settings.home / "secrets" / "keys"
    settings = other.settings.model_copy(update={"api_keys_file": target})
    restore_backup(folder, verify_backup(folder), settings, other.jobs.redis, force=False)
    assert target.read_text() == '{"name": "me"}\n'
    assert [path.stat().st_mode & 0o777 for path in (target, folder / "api_keys")] == [0o600, 0o600]
    assert folder.stat().st_mode & 0o777 == 0o700


# One moment


def test_the_store_is_read_at_one_moment(parts: Parts, other: Parts, folder: Path) -> None:
    """Clients write all the time. In the backup, every index agrees with every record."""
    ids = [parts.jobs.create(make_config("moved")).id for _ in range(1500)]
    resting = threading.Event()

    def work(number: int) -> None:
        store = JobStore(connect_redis(parts.server.url, 20))
        for turn in range(10**6):
            if resting.is_set():
                return
            for job_id in ids[number::2]:
                store.change("pause" if turn % 2 == 0 else "resume", job_id)

    clients = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for client in clients:
        client.start()
    wait_until(lambda: parts.jobs.redis.zcard("kd:index:*:paused") > 300)
    version = parts.jobs.get(ids[0]).version
    try:
        back_up(parts, folder)
        wait_until(lambda: parts.jobs.get(ids[0]).version != version)
    finally:
        resting.set()
        for client in clients:
            client.join()
    restore_to(other, folder)
    redis = other.jobs.redis
    status = {job_id: redis.hget(f"kd:job:{job_id}", "status") for job_id in ids}
    for name in ("queued", "paused"):
        assert set(redis.zrange(f"kd:index:*:{name}", 0, -1)) == {
            one for one in ids if status[one] == name
        }
    assert set(redis.zrange("kd:queue:train", 0, -1)) == {
        one for one in ids if status[one] == "queued"
    }
    assert len(set(status.values())) == 2


def test_a_store_that_takes_too_long_is_no_backup_and_is_let_go(parts: Parts, folder: Path) -> None:
    for _ in range(300):
        parts.jobs.create(make_config("one"))
    with pytest.raises(BackupError, match="could not be read within"):
        back_up(parts, folder, pause=0.001)
    parts.jobs.create(make_config("another"))
    assert list(folder.parent.iterdir()) == []


def test_a_folder_that_another_takes_the_place_of_is_never_a_mixture(tmp_path: Path) -> None:
    """Change the folder after the first file is copied."""
    source = tmp_path / "last"
    target = tmp_path / "copy"
    for folder, letter in ((source, b"a"), (tmp_path / ".tmp-last", b"b")):
        folder.mkdir()
        for number in range(8):
            (folder / f"{number}.bin").write_bytes(letter * (4 << 20))

    def replace() -> None:
        wait_until((target / "1.bin").exists)
        publish_folder(tmp_path / ".tmp-last", source)

    writer = threading.Thread(target=replace)
    writer.start()
    found = copy_folder(source, target, {})
    writer.join()
    assert len(found) == 8
    assert {data[:1] + data[-1:] for data in contents(target).values()} == {b"bb"}
    assert {file.bytes for file in found.values()} == {4 << 20}


def test_a_folder_that_is_being_removed_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    run = tmp_path / "run"
    target = tmp_path / "copy"
    old = run / "checkpoints" / "step-1"
    old.mkdir(parents=True)
    (run / "log.txt").touch()
    for number in range(20):
        (old / f"{number}.bin").touch()
    (old / "0.bin").unlink()

    def remove_slowly() -> None:
        for number in range(1, 20):
            time.sleep(0.02)
            (old / f"{number}.bin").unlink()
        old.rmdir()

    writer = threading.Thread(target=remove_slowly)
    writer.start()
    found = copy_folder(run, target, {})
    writer.join()
    assert list(found) == ["log.txt"]
    assert set(contents(target)) == {"log.txt"}


def test_a_file_that_grows_is_copied_as_long_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "log.txt"
    target = tmp_path / "copy"
    source.write_bytes(b"x" * (64 << 20))

    def grow() -> None:
        wait_until(target.exists)
        with source.open("ab") as log:
            log.write(b"y" * (1 << 20))

    writer = threading.Thread(target=grow)
    writer.start()
    copied = copy_file(source, target)
    writer.join()
    assert source.stat().st_size == 65 << 20
    assert (copied.bytes, copied.sha256) == (64 << 20, hash_file(target))


# What is refused


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "runs/job_1/log.txt: its bytes have changed": lambda folder: (
        folder / "runs/job_1/log.txt"
    ).write_text("a lime\n"),
    "redis.jsonl: its bytes have changed": lambda folder: (
        (folder / "redis.jsonl").open("a").write("\n")
    ),
    "log.txt: missing": lambda folder: (folder / "runs/job_1/log.txt").unlink(),
    "runs/more: not part": lambda folder: (folder / "runs/more").touch(),
    "is not a backup": lambda folder: (folder / "backup.json").unlink(),
    "another version": lambda folder: (folder / "backup.json").write_text('{"format": 99}'),
}


@pytest.mark.parametrize("complaint", DAMAGE)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_damaged_backup_is_refused(
    parts: Parts, home: Path, folder: Path, complaint: str
) -> None:
    parts.jobs.create(make_config("kept"))
    back_up(parts, folder)
    assert verify_backup(folder).keys > 0
    DAMAGE[complaint](folder)
    with pytest.raises(BackupError, match=complaint):
        verify_backup(folder)


def test_a_target_that_is_not_empty_is_replaced_by_force_alone(
    parts: Parts, home: Path, other: Parts, folder: Path
) -> None:
    kept = parts.jobs.create(make_config("kept")).id
    back_up(parts, folder)
    lost = other.jobs.create(make_config("lost")).id
    with pytest.raises(BackupError, match="jobs in the job store"):
        restore_to(other, folder)
    assert other.job(lost).name == "lost"
    other.jobs.redis.flushall()
    (other.settings.home / "runs" / "job_2").mkdir(parents=True)
    (other.settings.home / "runs" / "job_2" / "log.txt").touch()
    with pytest.raises(BackupError, match=r"is not empty: runs\."):
        restore_to(other, folder)
    assert not other.jobs.redis.exists(f"kd:job:{kept}")
    other.jobs.create(make_config("lost"))
    restore_to(other, folder, force=True)
    assert [path.name for path in (other.settings.home / "runs").iterdir()] == ["job_1"]
    assert other.jobs.redis.zrange("kd:index:*:*", 0, -1) == [kept]


def test_a_backup_of_an_earlier_version_replaces_no_folder_that_it_does_not_know(
    parts: Parts, home: Path, other: Parts, folder: Path
) -> None:
    back_up(parts, folder)
    model = other.settings.home / "models" / "mine" / "config.json"
    model.parent.mkdir(parents=True)
    model.touch()
    index = json.loads((folder / "backup.json").read_text())
    del index["files"]["lacking.json"]
    (folder / "backup.json").write_text(json.dumps(index))
    (folder / "lacking.json").rename(folder.parent / "lacking.json")
    restore_to(other, folder, force=True)
    assert model.is_file()
    assert (other.settings.home / "runs" / "job_1").is_dir()


def test_nothing_is_restored_under_a_worker_s_feet(
    parts: Parts, other: Parts, folder: Path
) -> None:
    back_up(parts, folder)
    worker = other.start_worker()
    with pytest.raises(BackupError, match="Workers use this job store"):
        restore_to(other, folder, force=True)
    worker.terminate()
    worker.wait(20)
    for state in (
        other.jobs.list_workers()
    ):  # one that had no time to say so would be missed in half a minute
        other.jobs.hide_worker(state.id)
    restore_to(other, folder)


def test_a_backup_goes_to_a_new_folder_outside_of_the_data(parts: Parts, folder: Path) -> None:
    with pytest.raises(BackupError, match="is in KD_HOME"):
        back_up(parts, parts.settings.home / "backup")
    folder.mkdir(parents=True)
    back_up(parts, folder)
    with pytest.raises(BackupError, match="is not empty"):
        back_up(parts, folder)


def test_a_disk_that_cannot_hold_it_is_found_before_anything_is_written(
    parts: Parts, home: Path, folder: Path
) -> None:
    free = shutil.disk_usage(home).free
    sparse = home / "runs" / "job_1" / "huge"
    with sparse.open("wb") as file:
        file.truncate(free + 1)
    with pytest.raises(StorageError, match="a backup needs"):
        back_up(parts, folder)
    assert not folder.parent.exists()


LIMITED = """
import resource, sys
from pathlib import Path
from cache.errors import StorageError
from services.store.connection import connect_redis
from services.settings import Settings
from services.store.backup import make_backup
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    make_backup(Path(sys.argv[1]), Settings(), connect_redis(Settings().redis_url))
except StorageError as error:
    sys.exit(f"StorageError: {error}")
"""


def test_a_disk_that_fills_up_leaves_nothing_behind(parts: Parts, home: Path, folder: Path) -> None:
    """A limit on the size of files stands for a full disk; the run's student is larger."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, folder],
        cwd=ROOT,
        env=os.environ | parts.settings.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("StorageError: "), done.stderr
    assert list(folder.parent.iterdir()) == []


# The commands


@pytest.fixture
def own_server(_server_binary: Path, tmp_path: Path) -> Iterator[tuple[Path, EmbeddedServer]]:
    home = tmp_path / "first"
    server = EmbeddedServer(home / "redis", find_binary())
    server.start()
    yield home, server
    server.stop()


def test_the_commands_find_the_embedded_store(
    own_server: tuple[Path, EmbeddedServer], folder: Path
) -> None:
    home, server = own_server
    with connect_redis(server.url) as client:
        job_id = JobStore(client).create(make_config("kept")).id
    made = kd("backup", folder, "--home", home, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["keys"] > 3
    checked = kd("restore", folder, "--check", "--home", home.parent / "nowhere")
    assert checked.returncode == 0
    assert "not in the backup: teacher (1 jobs), text.txt (1 jobs)" in checked.stderr
    assert not (home.parent / "nowhere").exists()
    told = kd("restore", folder, "--check", "--json", "--home", home.parent / "nowhere")
    assert json.loads(told.stdout)["restored"] is False

    second = home.parent / "second"
    done = kd("restore", folder, "--home", second)
    assert done.returncode == 0, done.stderr
    assert f"The records name paths in {home}" in done.stderr
    refused = kd("restore", folder, "--home", second)
    assert refused.returncode == 1
    assert "--force replaces all of it" in refused.stderr
    forced = kd("restore", folder, "--home", second, "--force", "--json")
    assert json.loads(forced.stdout)["released"] == [], forced.stderr
    again = EmbeddedServer(second / "redis", find_binary())
    again.start()
    try:
        with connect_redis(again.url) as client:
            job = JobStore(client).get(job_id)
        assert job is not None
        assert job.status == "queued"
    finally:
        again.stop()


def test_a_store_that_does_not_answer_is_said_to(tmp_path: Path) -> None:
    done = kd(
        "backup", tmp_path / "new", "--home", tmp_path, KD_REDIS_URL="redis://:secret@127.0.0.1:1/0"
    )
    assert done.returncode == 1
    assert "The job store does not answer" in done.stderr and ".." not in done.stderr
    assert "secret" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_caches_of_another_disk_come_along_and_go_to_that_of_the_target(
    parts: Parts, home: Path, other: Parts, folder: Path, tmp_path: Path
) -> None:
    """KD_STORE is a folder, and a run is a link: both are in the backup, the rest is named."""
    shutil.rmtree(home / "caches")
    cache = make_cache(tmp_path / "disk" / "caches")
    (tmp_path / "disk" / "job_2").mkdir()
    (tmp_path / "disk" / "job_2" / "log.txt").write_text("another disk\n")
    (home / "runs" / "job_2").symlink_to(tmp_path / "disk" / "job_2")
    text = tmp_path / "mine.txt"
    text.write_text("It was the best of times.")
    config = make_config("quick").model_copy(update={"labels": {"text": str(text)}})
    parts.jobs.create(config)
    settings = parts.settings.model_copy(update={"store": str(cache.parent)})
    make_backup(folder, settings, parts.jobs.redis)
    (home / "caches").mkdir()
    lacking = Lacking.read(folder)
    assert lacking.needed[str(text)] == 1
    assert list(lacking.links) == [str(home / "runs" / "job_1" / "link")]
    told = kd("restore", folder, "--check", "--home", tmp_path / "nowhere")
    assert str(text) in told.stderr and "/etc/passwd" in told.stderr, "it is said again"

    place = tmp_path / "new disk"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    settings = other.settings.model_copy(update={"store": str(tmp_path / "link")})
    restore_backup(folder, verify_backup(folder), settings, other.jobs.redis, force=False)
    assert verify_cache(place / cache.name) == []
    assert (tmp_path / "link").is_symlink(), "it leads to the disk that was chosen"
    log = other.settings.home / "runs" / "job_2" / "log.txt"
    assert log.read_text() == "another disk\n"


def test_a_name_that_no_file_can_have_is_no_place(parts: Parts, folder: Path) -> None:
    labels = {"text": "/" + "x" * 300}
    parts.jobs.create(make_config("quick").model_copy(update={"labels": labels}))
    back_up(parts, folder)
    assert Lacking.read(folder).needed == {}


def test_of_a_pattern_the_folder_before_it_is_a_place(
    parts: Parts, folder: Path, tmp_path: Path
) -> None:
    config = make_config("quick", data={"train": [f"{tmp_path}/part-*.jsonl"]})
    parts.jobs.create(config)
    back_up(parts, folder)
    assert Lacking.read(folder).needed == {str(tmp_path): 1, "teacher": 1}


def test_names_that_start_at_the_root_and_ids_of_a_hub_are_named(
    parts: Parts, folder: Path, tmp_path: Path
) -> None:
    """A job that was posted keeps its relative names, which no folder of a backup has."""
    root = tmp_path / "root"
    (root / "models" / "student").mkdir(parents=True)
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("It was the best of times.")
    train = ["texts/a.txt", "texts/*.md", "gone.txt", {"path": "ann/texts"}, "s3://ours/b.txt"]
    for name in ("one", "two"):
        parts.jobs.create(
            make_config(
                name,
                "distill",
                teacher={"model": "ann/teacher"},
                student={"model": "models/student"},
                data={"train": train, "validation_fraction": 0.1},
            )
        )
    settings = parts.settings.model_copy(update={"root": root})
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_backup(folder, settings, parts.jobs.redis)
    places = ("models/student", "texts/a.txt", "texts")
    names = ("ann/teacher", "ann/texts", "gone.txt", "s3://ours/b.txt")
    assert Lacking.read(folder).needed == {
        **{str(root / place): 2 for place in places},
        **dict.fromkeys(names, 2),
    }


def test_settings_name_the_folders_of_a_backup() -> None:
    """The backup contains the folders into which the settings put the files of jobs."""
    settings = Settings(home=Path("/home"))
    assert locate_trees(settings) == {
        name: getattr(settings, name) for name in ("caches", "runs", "files", "models", "data")
    }
    assert settings.run_dir("job").parent == settings.runs
