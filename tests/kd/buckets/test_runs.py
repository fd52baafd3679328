"""A run whose checkpoints are in a bucket goes on on another machine, and ends as it would have."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.stores.proxy import PASSING, Proxy
from bench.stores.server import KEYS, Server
from cache.errors import CacheCorrupt, StoreError
from cache.remote.address import StoreAddress
from cache.remote.bucket import Bucket
from kd.buckets.runs import STATE, StoredRun, open_stored_run
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.pipeline import run_stage, run_stages
from kd.progress import Event, Monitor
from kd.training.saved.uploads import CheckpointUploads
from tests.support.kd.tiny import make_tiny_job

pytestmark = pytest.mark.usefixtures("one_thread")

Job = dict[str, Any]
RUN = "job_" + "1" * 26


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    return make_tiny_job(
        tiny_teacher,
        tiny_text,
        train={
            "max_steps": 8,
            "eval_steps": 2,
            "save_steps": 2,
            "save_total_limit": 2,
            "early_stopping_patience": 50,
        },
    )


@pytest.fixture
def run(address: str, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """The place of the run in the bucket; the cache lies beside it."""
    monkeypatch.setenv("KD_DOWNLOADS", "")
    monkeypatch.setenv("KD_STORE", address)
    monkeypatch.setenv("KD_RUN_STORE", f"{address}/runs/{RUN}")
    return open_stored_run(f"{address}/runs/{RUN}")


def locate_run(home: Path) -> Path:
    return home / "runs" / RUN


def read_student(home: Path) -> bytes:
    return (locate_run(home) / "student" / "model.safetensors").read_bytes()


def train_until(config: Any, home: Path, step: int) -> None:
    """Train until the checkpoint of ``step`` was saved, then stop."""
    seen = [0]

    def listen(event: Event) -> None:
        if event.type == "checkpoint":
            seen[0] = event.data["step"]

    with pytest.raises(Interrupted):
        run_stage("train", config, home, locate_run(home), Monitor(listen, lambda: seen[0] >= step))


@pytest.mark.long
def test_a_run_goes_on_on_another_disk_and_ends_with_the_same_student(
    job: Job, run: StoredRun, tmp_path: Path
) -> None:
    config = parse_config(job)
    plain, one, two, three = (tmp_path / name for name in ("plain", "one", "two", "three"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KD_RUN_STORE")
        run_stages(config, plain, locate_run(plain))
    run_stage("precompute", config, one, locate_run(one))
    assert "cache.json" in run.read_files()
    train_until(config, two, 4)
    assert max(each.step for each in run.list_checkpoints()) >= 4
    shutil.rmtree(two)
    events: list[Event] = []
    run_stage("train", config, three, locate_run(three), Monitor(events.append))
    steps = [each.data["step"] for each in events if each.type == "checkpoint"]
    assert min(steps) > 4
    assert read_student(three) == read_student(plain)
    # The history is that of the whole run.
    lines = (locate_run(three) / "metrics.jsonl").read_text().splitlines()
    trained = [json.loads(line) for line in lines]
    whole = (locate_run(plain) / "metrics.jsonl").read_text().splitlines()
    assert [each["step"] for each in trained] == [json.loads(line)["step"] for line in whole]
    # What is kept in the bucket is what is kept on the disk: two, and the best one.
    kept = {path.name for path in (locate_run(three) / "checkpoints").iterdir()}
    assert {each.name.partition(".")[0] for each in run.list_checkpoints()} == kept
    assert not list(locate_run(three).glob(".tmp-*"))
    # The results in the bucket are the files of the run.
    stored = run.read_files()
    for name in ("student/model.safetensors", "report.json", "metrics.jsonl", "profile.json"):
        data = run.bucket.get(stored[name].object)
        assert data == (locate_run(three) / name).read_bytes()
    assert not any(name.startswith(("checkpoints", "log")) for name in stored)
    for each in run.bucket.walk(run.folder):
        data = run.bucket.get(each.name)
        assert not any(secret.encode() in data for secret in KEYS.values())


@pytest.mark.long
def test_the_newest_checkpoint_of_disk_and_bucket_is_taken(
    job: Job, run: StoredRun, tmp_path: Path
) -> None:
    config = parse_config(job)
    one, two = tmp_path / "one", tmp_path / "two"
    run_stage("precompute", config, one, locate_run(one))
    train_until(config, one, 2)
    train_until(config, two, 6)
    events: list[Event] = []
    run_stage("train", config, one, locate_run(one), Monitor(events.append))
    assert [e.data["step"] for e in events if e.type == "checkpoint"] == [8]


@pytest.mark.long
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    job: Job, run: StoredRun, tmp_path: Path
) -> None:
    config = parse_config(job)
    one, two = tmp_path / "one", tmp_path / "two"
    run_stage("precompute", config, one, locate_run(one))
    train_until(config, one, 4)
    newest = run.list_checkpoints()[-1]
    run.bucket.put(newest.files["model.safetensors"].name, b"other bytes")
    with pytest.raises(CacheCorrupt, match=r"model\.safetensors differs"):
        run.fetch_checkpoint(run.list_checkpoints()[-1], tmp_path / "x", lambda _: None)
    events: list[Event] = []
    run_stage("train", config, two, locate_run(two), Monitor(events.append))
    warnings = [each.data["message"] for each in events if each.type == "warning"]
    assert any("An older checkpoint is taken" in each for each in warnings)
    assert read_student(two)


def test_half_a_checkpoint_counts_for_nothing(run: StoredRun, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 2)
    run.put_checkpoint(folder)
    run.bucket.put(f"{run.folder}/checkpoints/step-00000004.{'0' * 32}/model.safetensors", b"x")
    assert [each.step for each in run.list_checkpoints()] == [2]
    run.prune_checkpoints(1, None)  # another process may be putting it
    assert len(list(run.bucket.walk(f"{run.folder}/checkpoints"))) == 3


def make_checkpoint(folder: Path, step: int, salt: str = "") -> Path:
    place = folder / f"step-{step:08d}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.safetensors").write_bytes(os.urandom(1000))
    (place / STATE).write_text(json.dumps({"step": step, "salt": salt}))
    return place


def test_the_bucket_keeps_the_newest_and_the_best(run: StoredRun, tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        run.put_checkpoint(make_checkpoint(tmp_path, step))
    # A process on another machine went on from step 4, and saved 6 once more.
    run.put_checkpoint(make_checkpoint(tmp_path, 6, "again"))
    newest = run.list_checkpoints()[-2]
    run.prune_checkpoints(2, 2)
    assert [each.step for each in run.list_checkpoints()] == [2, 8]
    run.prune_checkpoints(1, None)
    assert [each.step for each in run.list_checkpoints()] == [8]
    assert newest.step == 6
    names = {each.name.split("/")[2] for each in run.bucket.walk(f"{run.folder}/checkpoints")}
    assert len(names) == 1


def test_results_are_replaced_as_a_whole(run: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "a").write_bytes(b"one")
    (tmp_path / "report.json").write_bytes(b"{}")
    run.publish_files(tmp_path, ["student/a", "report.json"], lambda _: None)
    first = run.read_files()
    assert run.bucket.get(first["student/a"].object) == b"one"
    (tmp_path / "student" / "a").write_bytes(b"two")
    run.publish_files(tmp_path, ["student/a"], lambda _: None)
    second = run.read_files()
    assert run.bucket.get(second["student/a"].object) == b"two"
    # What was not put again stays; of a folder that was, nothing else does.
    assert set(second) == {"student/a", "report.json"}
    assert second["report.json"] == first["report.json"]
    (tmp_path / "student" / "a").rename(tmp_path / "student" / "b")
    run.publish_files(tmp_path, ["student/b"], lambda _: None)
    third = run.read_files()
    assert set(third) == {"student/b", "report.json"}
    names = {each.name for each in run.bucket.walk(run.folder)}
    assert names == {f"{run.folder}/files.json", *(each.object for each in third.values())}
    run.remove()
    assert list(run.bucket.walk(run.folder)) == []
    assert run.read_files() == {}


# ---------------------------------------------------------------------- a bucket that is slow


def test_a_slow_bucket_does_not_stop_the_loop_and_the_newest_arrives(
    run: StoredRun, s3_server: Server, reach: Callable[[int], None], tmp_path: Path
) -> None:
    answering = threading.Event()

    def choose(method: str, path: str) -> str:
        if method == "PUT" and "/checkpoints/" in path:
            answering.wait()
        return ""

    proxy = Proxy(s3_server.port, choose)
    folder = tmp_path / RUN
    with proxy.running():
        reach(proxy.port)
        with CheckpointUploads(folder, Monitor()) as uploads:
            for step in range(1, 21):
                path = make_checkpoint(folder / "checkpoints", step)
                uploads.offer(path, 2, None)
                shutil.rmtree(path)  # as pruning does
                waiting = list((folder / ".tmp-uploads").iterdir())
                assert len(waiting) <= 2
            # None has arrived, and no offer has waited for that.
            assert run.list_checkpoints() == []
            answering.set()
        steps = [each.step for each in run.list_checkpoints()]
    assert steps[-1] == 20
    assert len(steps) <= 2
    assert not (folder / ".tmp-uploads").exists()


def test_a_bucket_that_is_away_is_a_warning_and_the_training_goes_on(
    run: StoredRun, s3_server: Server, reach: Callable[[int], None], tmp_path: Path
) -> None:
    away = [True]
    proxy = Proxy(s3_server.port, lambda *_: "expired" if away[0] else "")
    events: list[Event] = []
    folder = tmp_path / RUN
    with proxy.running():
        reach(proxy.port)
        with CheckpointUploads(folder, Monitor(events.append)) as uploads:
            uploads.offer(make_checkpoint(folder / "checkpoints", 1), 2, None)
            while list((folder / ".tmp-uploads").iterdir()):
                time.sleep(0.01)
            away[0] = False
            uploads.offer(make_checkpoint(folder / "checkpoints", 2), 2, None)
        assert [each.step for each in run.list_checkpoints()] == [2]
    [warning] = [each.data["message"] for each in events if each.type == "warning"]
    assert "step-00000001 could not be copied to the bucket" in warning
    assert "ExpiredToken" in warning


def test_a_run_inside_of_another_one_has_no_place(run: StoredRun, tmp_path: Path) -> None:
    with CheckpointUploads(tmp_path / RUN / "baseline", Monitor()) as uploads:
        uploads.offer(make_checkpoint(tmp_path, 1), 2, None)
    assert list(run.bucket.walk(run.folder)) == []


@pytest.mark.long
def test_results_that_cannot_be_put_fail_the_stage_and_a_retry_ends_it(
    job: Job, run: StoredRun, s3_server: Server, reach: Callable[[int], None], tmp_path: Path
) -> None:
    config = parse_config(job)
    run_stage("precompute", config, tmp_path, locate_run(tmp_path))
    proxy = Proxy(
        s3_server.port,
        lambda method, path: "full" if method in ("PUT", "POST") and "/files." in path else "",
    )
    with proxy.running():
        reach(proxy.port)
        with pytest.raises(StoreError, match="QuotaExceeded"):
            run_stage("train", config, tmp_path, locate_run(tmp_path))
        assert "report.json" not in run.read_files()
    reach(s3_server.port)
    run_stage("train", config, tmp_path, locate_run(tmp_path))
    assert "report.json" in run.read_files()


_TRAIN = """
import sys
from pathlib import Path
from kd.config.jobfile import parse_config
from kd.files import read_json
from kd.pipeline import run_stage
import torch
torch.set_num_threads(1)
home = Path(sys.argv[1])
run_stage("train", parse_config(read_json(Path(sys.argv[2]))), home, home / "runs" / sys.argv[3])
"""


@pytest.mark.long
def test_a_machine_that_is_lost_in_mid_training_loses_nothing_that_had_arrived(
    job: Job, run: StoredRun, tmp_path: Path
) -> None:
    """``kill -9`` at any moment, again and again, each time with another empty disk."""
    job["train"] |= {"max_steps": 40, "save_steps": 1}
    config = parse_config(job)
    plain = tmp_path / "plain"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KD_RUN_STORE")
        run_stages(config, plain, locate_run(plain))
    run_stage("precompute", config, tmp_path / "first", locate_run(tmp_path / "first"))
    file = tmp_path / "job.json"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    reached = 0
    for number in range(20):
        home = tmp_path / f"machine-{number}"
        process = subprocess.Popen([sys.executable, "-c", _TRAIN, str(home), str(file), RUN])
        goal = reached + 5
        while process.poll() is None and reached < goal:
            reached = max((each.step for each in run.list_checkpoints()), default=0)
            time.sleep(0.05)
        if process.poll() is None and reached < 40:
            process.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(home / "runs" / RUN / ".tmp-uploads", ignore_errors=True)
        if process.returncode == 0:
            break
        reached = max((each.step for each in run.list_checkpoints()), default=0)
    assert number >= 3
    assert read_student(home) == read_student(plain)


def test_the_address_of_a_run_names_its_folder(address: str) -> None:
    run = open_stored_run(f"{address}/runs/{RUN}")
    assert run.folder == RUN
    assert str(run) == f"{address}/runs/{RUN}"
    assert isinstance(Bucket(StoreAddress.parse(address)), Bucket)


@pytest.mark.long
def test_another_job_goes_on_with_a_run_of_another_disk(
    job: Job, run: StoredRun, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``resume.run`` names a job whose disk is lost: its checkpoint comes from the bucket."""
    del job["train"]["early_stopping_patience"]
    one, two = tmp_path / "one", tmp_path / "two"
    run_stages(parse_config(job), one, locate_run(one))
    (tmp_path / "one").rename(tmp_path / "lost")
    longer = RUN.replace("1", "2")
    monkeypatch.setenv("KD_RUN_STORE", f"{address}/runs/{longer}")
    job["train"] |= {"max_steps": 12}
    job["resume"] = {"run": RUN, "schedule": "extend"}
    events: list[Event] = []
    monitor = Monitor(events.append)
    run_stages(parse_config(job), two, two / "runs" / longer, monitor)
    steps = [each.data["step"] for each in events if each.type == "checkpoint"]
    assert (min(steps), max(steps)) == (10, 12)
    stored = open_stored_run(f"{address}/runs/{longer}")
    assert [each.step for each in stored.list_checkpoints()] == [10, 12]
    assert [each.step for each in run.list_checkpoints()] == [6, 8]


@pytest.mark.long
def test_the_best_weights_of_a_run_of_another_disk_come_from_the_bucket(
    job: Job, run: StoredRun, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rate of the first step is 0, and the next ones are far too large.
    job["train"] |= {
        "learning_rate": 5.0, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2,
        "eval_steps": 1,
    }  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    run_stages(parse_config(job), one, locate_run(one))
    assert json.loads((locate_run(one) / "report.json").read_text())["kept_step"] == 1
    first = read_student(one)
    one.rename(tmp_path / "lost")
    longer = RUN.replace("1", "2")
    monkeypatch.setenv("KD_RUN_STORE", f"{address}/runs/{longer}")
    job["train"] |= {"max_steps": 12}
    job["resume"] = {"run": RUN, "schedule": "extend"}
    folder = two / "runs" / longer
    run_stages(parse_config(job), two, folder)
    assert json.loads((folder / "report.json").read_text())["kept_step"] == 1
    assert (folder / "student" / "model.safetensors").read_bytes() == first


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.long
def test_random_faults_of_the_bucket_change_nothing(
    job: Job,
    run: StoredRun,
    s3_server: Server,
    reach: Callable[[int], None],
    tmp_path: Path,
    seed: int,
) -> None:
    """Each stage has another disk, and every fifth request has a fault."""
    job["train"] |= {"save_steps": 1}
    config = parse_config(job)
    homes = [tmp_path / name for name in ("plain", "one", "two", "three")]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KD_RUN_STORE")
        run_stages(config, homes[0], locate_run(homes[0]))
    chance = random.Random(seed)
    proxy = Proxy(
        s3_server.port, lambda *_: chance.choice(PASSING) if chance.random() < 0.2 else ""
    )
    with proxy.running():
        reach(proxy.port)
        run_stage("precompute", config, homes[1], locate_run(homes[1]))
        train_until(config, homes[2], 4)
        run_stage("train", config, homes[3], locate_run(homes[3]))
        stored = run.read_files()
        student = run.bucket.get(stored["student/model.safetensors"].object)
    assert proxy.faults.total() >= 10
    assert student == read_student(homes[3]) == read_student(homes[0])


@pytest.mark.slow
def test_several_processes_go_on_on_another_disk(
    job: Job, run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job["resources"] = {"gpus": 2}
    monkeypatch.setenv("KD_DEVICES", "cpu,cpu")
    for strategy in ("ddp", "fsdp"):
        job["train"] |= {"strategy": strategy, "early_stopping_patience": None}
        config = parse_config(job)
        plain, one, two = (tmp_path / f"{strategy}-{name}" for name in ("plain", "one", "two"))
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("KD_RUN_STORE")
            run_stages(config, plain, locate_run(plain))
        run_stage("precompute", config, one, locate_run(one))
        train_until(config, one, 4)
        newest = sorted((locate_run(one) / "checkpoints").iterdir())[-1]
        assert run.has_checkpoint(newest)
        run_stage("train", config, two, locate_run(two))
        assert read_student(two) == read_student(plain)
        kept = {path.name for path in (locate_run(two) / "checkpoints").iterdir()}
        assert {each.name.partition(".")[0] for each in run.list_checkpoints()} == kept
        run.remove()
