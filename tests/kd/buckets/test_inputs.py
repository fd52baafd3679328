"""Text and models of a bucket are used as those of a folder are."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.stores.proxy import Proxy
from bench.stores.server import Server
from cache.errors import StoreError
from cache.remote.address import StoreAddress
from cache.remote.bucket import Bucket
from kd.buckets import downloads
from kd.buckets.downloads import Downloads, Listing
from kd.buckets.inputs import begin_downloads, download_files, list_stored
from kd.config.jobfile import parse_config
from kd.errors import ConfigError, Interrupted, ModelError
from kd.models.folder import compute_fingerprint, resolve_model
from kd.pipeline import run_stages
from kd.preflight.problems import Folders, find_problems
from kd.progress import Event, Monitor
from kd.text.text_files import find_files

Job = dict[str, Any]


@pytest.fixture(autouse=True)
def _downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KD_DOWNLOADS", "")  # so that it is put back after the test
    begin_downloads(tmp_path / "home")


@pytest.fixture
def bucket(address: str) -> Bucket:
    return Bucket(StoreAddress.parse(address))


def put_folder(bucket: Bucket, folder: Path, name: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put(f"{name}/{path.relative_to(folder)}", path.read_bytes())


def test_a_file_and_a_folder_of_text_are_listed_as_those_of_a_disk(
    bucket: Bucket, address: str, tmp_path: Path
) -> None:
    for name in ("b.txt", "a.jsonl", "inner/c.md", "skipped.bin", "readme"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    put_folder(bucket, tmp_path / "text", "text")
    found = find_files(f"{address}/text").files
    same = find_files(str(tmp_path / "text")).files
    assert [path.read_bytes() for path in found] == [path.read_bytes() for path in same]
    assert [path.name for path in found] == [path.name for path in same]
    [alone] = find_files(f"{address}/text/readme").files
    assert (alone.name, alone.read_text()) == ("readme", "text of readme")
    assert find_files(f"{address}/none").files == []


def test_a_file_is_downloaded_once_and_again_where_the_object_has_changed(
    bucket: Bucket, address: str, s3_server: Server, reach: Callable[[int], None], tmp_path: Path
) -> None:
    bucket.put("a.txt", b"one")
    asked: list[str] = []
    proxy = Proxy(s3_server.port, lambda method, path: asked.append(f"{method} {path}") or "")
    with proxy.running():
        reach(proxy.port)
        [first] = find_files(f"{address}/a.txt").files
        begin_downloads(tmp_path / "home")
        assert find_files(f"{address}/a.txt").files == [first]
        assert sum(line.startswith("GET") and "a.txt" in line.split("?")[0] for line in asked) == 1
        bucket.put("a.txt", b"two")
        assert find_files(f"{address}/a.txt").files == [first]  # a stage sees one version
        begin_downloads(tmp_path / "home")
        [second] = find_files(f"{address}/a.txt").files
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")


def test_a_download_that_was_cut_goes_on_where_it_ended(
    bucket: Bucket,
    address: str,
    s3_server: Server,
    reach: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downloads, "_PART", 1 << 16)
    data = os.urandom(10 << 16)
    bucket.put("a.txt", data)
    left = [4]

    def choose(method: str, path: str) -> str:
        if method != "GET" or "a.txt" not in path.split("?")[0]:
            return ""
        left[0] -= 1
        return "expired" if left[0] == 0 else ""

    proxy = Proxy(s3_server.port, choose)
    with proxy.running():
        reach(proxy.port)
        with pytest.raises(StoreError, match="have expired"):
            find_files(f"{address}/a.txt")
        [path] = find_files(f"{address}/a.txt").files
        assert left[0] == -7  # the seven parts that were left
    assert path.read_bytes() == data
    assert [each.name for each in path.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("fault", ["refused", "cut", "short", "lost", "busy"])
def test_faults_of_the_network_change_nothing(
    bucket: Bucket,
    address: str,
    s3_server: Server,
    reach: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    monkeypatch.setattr(downloads, "_PART", 1 << 12)
    data = os.urandom(3 << 12)
    bucket.put("a.txt", data)
    turns = [0]

    def choose(*_: str) -> str:
        turns[0] += 1
        return fault if turns[0] % 3 == 0 else ""

    proxy = Proxy(s3_server.port, choose)
    with proxy.running():
        reach(proxy.port)
        [path] = find_files(f"{address}/a.txt").files
    assert path.read_bytes() == data
    assert proxy.faults[fault]


def test_an_object_that_is_replaced_while_it_comes_is_refused(
    bucket: Bucket, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_PART", 4)
    bucket.put("a.txt", b"the first text")
    list_stored(f"{address}/a.txt")
    bucket.put("a.txt", b"another  text!")
    with pytest.raises(StoreError, match="was replaced while it was read"):
        download_files(f"{address}/a.txt", ["a.txt"])


def test_what_was_used_the_longest_ago_goes_first_and_nothing_that_is_in_use(
    bucket: Bucket, address: str, tmp_path: Path
) -> None:
    listings = []
    for number in range(4):
        bucket.put(f"{number}/a.txt", bytes(1000))
        listings.append(list_stored(f"{address}/{number}"))
    room = Downloads(tmp_path / "room", limit=2500)
    held = room.hold(listings[0])
    for number, listing in enumerate(listings):
        handle = room.hold(listing)
        os.utime(room.root / f"{listing.name}.used", (number, number))
        room.download(listing, ["a.txt"], lambda _: None)
        os.close(handle)
    left = {path.name for path in room.root.iterdir() if path.is_dir()}
    assert left == {listings[0].name, listings[3].name}
    os.close(held)
    room.shrink()
    assert len(list(room.root.glob("*.used"))) == 2
    Downloads(room.root, limit=1000).shrink()
    assert {path.name for path in room.root.iterdir() if path.is_dir()} == {listings[3].name}


def test_a_download_reports_and_can_be_stopped(bucket: Bucket, address: str) -> None:
    bucket.put("a.txt", b"text")
    listing = list_stored(f"{address}/a.txt")

    def stop(line: str) -> None:
        raise Interrupted(line)

    slow = Listing(listing.url, _Stuck(), listing.objects)  # type: ignore[arg-type]
    room = Downloads(Path(os.environ["KD_DOWNLOADS"]), 1 << 20)
    handle = room.hold(slow)
    with pytest.raises(Interrupted, match=re.escape(f"downloading {address}/a.txt: 0 bytes of")):
        room.download(slow, ["a.txt"], stop)
    os.close(handle)


class _Stuck:
    """A bucket whose objects come in three seconds."""

    def get_part(self, *_: object) -> bytes:
        time.sleep(3)
        return b"text"


# ---------------------------------------------------------------------- models and jobs


def test_a_model_has_the_fingerprint_of_its_folder(
    bucket: Bucket, address: str, tiny_teacher: Path
) -> None:
    put_folder(bucket, tiny_teacher, "model")
    bucket.put("model/pytorch_model.bin", b"a pickle")
    small = resolve_model(f"{address}/model", weights=None)
    assert not list(small.glob("*.safetensors"))
    folder = resolve_model(f"{address}/model")
    assert folder == small
    assert compute_fingerprint(folder) == compute_fingerprint(tiny_teacher)
    assert not (folder / "pytorch_model.bin").exists()
    with pytest.raises(ModelError, match="nothing lies at"):
        resolve_model(f"{address}/other")


@pytest.fixture
def job(tiny_teacher: Path, tiny_text: Path) -> Job:
    return {
        "name": "tiny",
        "teacher": {"model": str(tiny_teacher), "batch_size": 4},
        "student": {"model": str(tiny_teacher)},
        "data": {
            "train": str(tiny_text), "validation": str(tiny_text), "sequence_length": 32,
            "max_train_samples": 20, "max_eval_samples": 4,
        },
        "cache": {"shard_sequences": 8},
        "train": {"max_steps": 2, "batch_size": 4},
        "evaluation": {"max_new_tokens": 4},
    }  # fmt: skip


def name_in_bucket(job: Job, address: str) -> Job:
    data = {**job["data"], "train": f"{address}/text.txt", "validation": f"{address}/held"}
    model = {"model": f"{address}/model"}
    return {**job, "teacher": {**job["teacher"], **model}, "student": model, "data": data}


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_job_that_names_a_bucket_is_the_job_that_names_a_folder(
    job: Job, bucket: Bucket, address: str, tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    put_folder(bucket, tiny_teacher, "model")
    bucket.put("text.txt", tiny_text.read_bytes())
    bucket.put("held/text.txt", tiny_text.read_bytes())
    plain, far = tmp_path / "plain", tmp_path / "far"
    known = run_stages(parse_config(job), plain, plain / "runs" / "x")
    events: list[Event] = []
    wanted = parse_config(name_in_bucket(job, address))
    found = run_stages(wanted, far, far / "runs" / "x", Monitor(events.append))
    assert found.cache["fingerprint"] == known.cache["fingerprint"]
    student = "runs/x/student/model.safetensors"
    assert (far / student).read_bytes() == (plain / student).read_bytes()
    assert found.report["teacher"] == f"{address}/model"
    assert not list(tmp_path.glob("home/downloads/*"))
    # On another disk the run goes on: what it is made of does not depend on the folder.
    other = tmp_path / "other"
    far.rename(other)
    (other / "downloads").rename(tmp_path / "gone")
    again = run_stages(wanted, other, other / "runs" / "x")
    assert again.report["steps"] == found.report["steps"]


def test_what_is_missing_in_a_bucket_is_a_problem_of_its_field(
    job: Job, bucket: Bucket, address: str, tmp_path: Path
) -> None:
    bucket.put("model/README.md", b"a card alone")
    bucket.put("held/empty.txt", b"")
    folders = Folders(tmp_path, tmp_path / "home")
    found = {
        each.pointer: each.detail
        for each in find_problems(parse_config(name_in_bucket(job, address)), folders)
    }
    assert "holds no config.json" in found["/teacher/model"]
    assert "holds no config.json" in found["/student/model"]
    assert "nothing lies at" in found["/data/train/0"]
    assert "holds no text" in found["/data/validation/0"]
    away = Folders(tmp_path, tmp_path / "home", asked=False)
    assert find_problems(parse_config(name_in_bucket(job, address)), away) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gs://bucket/a.txt", "is a URL"),
        ("s3://me:hidden@bucket/a.txt", "no user, password"),
        ("s3://bucket/a/*.txt", "is not the address of a bucket"),
        ("s3://bucket/../a", "is not the address of a bucket"),
    ],
)
def test_addresses_that_are_wrong_are_refused_before_anything_is_asked(
    job: Job, tmp_path: Path, name: str, words: str
) -> None:
    config = parse_config({**job, "data": {**job["data"], "train": name}})
    [found] = find_problems(config, Folders(tmp_path, None))
    assert found.pointer == "/data/train/0"
    assert words in f"{found}"
    assert "hidden" not in f"{found}".replace(name, "")


def test_a_model_in_a_bucket_has_no_revision(job: Job, tmp_path: Path) -> None:
    teacher = {"model": "s3://bucket/model", "revision": "main"}
    [found] = find_problems(parse_config({**job, "teacher": teacher}), Folders(tmp_path, None))
    assert (found.pointer, "no revision 'main'" in found.detail) == ("/teacher/model", True)


def test_a_bucket_that_refuses_or_is_not_there_is_a_problem_that_says_so(
    job: Job, address: str, s3_server: Server, reach: Callable[[int], None], tmp_path: Path
) -> None:
    config = parse_config(name_in_bucket(job, address))
    proxy = Proxy(s3_server.port, lambda *_: "expired")
    with proxy.running():
        reach(proxy.port)
        found = find_problems(config, Folders(tmp_path, tmp_path / "home"))
        assert {each.pointer for each in found} == {
            "/teacher/model", "/student/model", "/data/train/0", "/data/validation/0",
        }  # fmt: skip
        assert all("403 ExpiredToken" in each.detail for each in found)
        assert all("renew them" in each.remedy for each in found)
        with pytest.raises(ConfigError, match="ExpiredToken"):
            run_stages(config, tmp_path / "home", tmp_path / "home" / "runs" / "x")
