"""The files of a job over HTTP: its checkpoints and artifacts, whole and in part, and no others."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bench.support.harness import Parts, make_config
from bench.support.waiting import wait_until
from cache.disk import hash_file
from cache.manifest import sign_json
from services.api.answers.file_digests import FileDigests
from services.store.jobs.leases import Claim
from tests.support.services.api import UNLIMITED, problem, running, serving, tell


@pytest.fixture(scope="module")
def api(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    with serving(tmp_path_factory.mktemp("api")) as parts:
        yield parts


def checkpoint(folder: Path, step: int, best_step: int, loss: float | None) -> Path:
    """Write a checkpoint as kd.training.checkpoint does, except for the bytes of its tensors."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    names = (
        "model.safetensors",
        "optimizer.safetensors",
        "extras.safetensors",
        "random.safetensors",
    )
    for name in names:
        (path / name).write_bytes(f"{name} of {step}".encode() * 10)
    progress = {
        "step": step,
        "best_step": best_step,
        "last_evaluation": {"validation_loss": loss, "note": "text"},
    }
    content = {"progress": progress, "sha256": {name: hash_file(path / name) for name in names}}
    (path / "state.json").write_bytes(sign_json(content))
    return path


def producing(api: Parts, **files: str) -> Claim:
    """Create a job that reports artifacts, given as their contents by name."""
    claim = running(api)
    folder = api.settings.run_dir(claim.id)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
        tell(api, claim, ("artifact", {"name": name, "path": str(folder / name)}))
    return claim


# ---------------------------------------------------------------------- checkpoints


def test_checkpoints_are_listed_with_what_they_hold(api: Parts) -> None:
    claim = running(api)
    folder = api.settings.run_dir(claim.id)
    checkpoint(folder, 100, 100, 2.5)
    newest = checkpoint(folder, 200, 100, None)
    first, last = api.http.get(f"/jobs/{claim.id}/checkpoints").json()["data"]
    assert (first["step"], first["is_best"], first["is_last"], first["metrics"]) == (
        100,
        True,
        False,
        {"validation_loss": 2.5},
    )
    assert (last["step"], last["is_best"], last["is_last"], last["metrics"]) == (
        200,
        False,
        True,
        {},
    )
    assert last["bytes"] == sum(file.stat().st_size for file in newest.iterdir())
    assert last["sha256"] == hash_file(newest / "state.json")
    assert api.http.get(f"/jobs/{claim.id}/checkpoints/200").json() == last
    model = next(file for file in last["files"] if file["name"] == "model.safetensors")
    answer = api.http.get(model["url"])
    assert answer.content == (newest / "model.safetensors").read_bytes()
    assert (
        answer.headers["etag"]
        == f'"{model["sha256"]}"'
        == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    )


def test_a_damaged_or_half_written_checkpoint_is_left_out(api: Parts) -> None:
    claim = running(api)
    folder = api.settings.run_dir(claim.id)
    checkpoint(folder, 1, 1, 1.0)
    damaged = checkpoint(folder, 2, 2, 1.0) / "state.json"
    damaged.write_bytes(
        damaged.read_bytes().replace(b'"best_step": 2', b'"best_step": 3').replace(b":2", b":3")
    )
    (folder / "checkpoints" / "step-00000003").mkdir()
    (folder / "checkpoints" / ".tmp-step-00000004").mkdir()
    assert [
        one["step"] for one in api.http.get(f"/jobs/{claim.id}/checkpoints").json()["data"]
    ] == [1]


def test_unknown_checkpoints_are_404(api: Parts) -> None:
    claim = running(api)
    assert api.http.get(f"/jobs/{claim.id}/checkpoints").json() == {"data": []}
    folder = api.settings.run_dir(claim.id)
    checkpoint(folder, 1, 1, 1.0)
    (folder / "secret").write_text("x")
    for path in ("2", "2/state.json", "1/none", "1/..%2f..%2fsecret", "1/%2fetc%2fpasswd"):
        problem(api.http.get(f"/jobs/{claim.id}/checkpoints/{path}"), 404)
    for path in ("x", "-1", "100000000"):
        problem(api.http.get(f"/jobs/{claim.id}/checkpoints/{path}"), 422)


@pytest.mark.parametrize("linked", ["checkpoints/step-00000001", "checkpoints", "."])
def test_no_folder_of_a_path_may_be_a_link(api: Parts, tmp_path: Path, linked: str) -> None:
    """A process of the job could make one of its folders a link to any folder of the machine."""
    claim = running(api)
    target = tmp_path / "elsewhere"
    checkpoint(target, 1, 1, 1.0)
    (target / "checkpoints" / "step-00000001" / "passwd").write_text("hidden")
    (target / "log.txt").write_text("hidden")
    (target / "report.md").write_text("hidden")
    place = api.settings.run_dir(claim.id) / linked
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target / linked)
    report = str(api.settings.run_dir(claim.id) / "report.md")
    tell(api, claim, ("artifact", {"name": "report.md", "path": report}))
    own = f"/jobs/{claim.id}"
    assert api.http.get(f"{own}/checkpoints").json() == {"data": []}
    assert api.http.get(f"{own}/artifacts").json() == {"data": []}
    assert api.http.get(f"{own}/logs").content == b""
    for path in ("checkpoints/1", "checkpoints/1/passwd", "artifacts/report.md"):
        problem(api.http.get(f"{own}/{path}"), 404)


def test_a_real_checkpoint_is_described(api: Parts, tmp_path: Path) -> None:
    import torch
    from torch import nn

    from kd.training.checkpoint import save_checkpoint
    from kd.training.saved.state import TrainingProgress, TrainState

    claim = running(api)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    progress = TrainingProgress(
        step=7, best_step=7, best_loss=1.5, last_evaluation={"validation_loss": 1.5}
    )
    state = TrainState(
        model, optimizer, scheduler, torch.amp.GradScaler("cpu", enabled=False), progress
    )
    save_checkpoint(api.settings.run_dir(claim.id) / "checkpoints", state, "job")
    (found,) = api.http.get(f"/jobs/{claim.id}/checkpoints").json()["data"]
    assert (found["step"], found["is_best"], found["metrics"]) == (
        7,
        True,
        {"validation_loss": 1.5},
    )
    for file in found["files"]:
        content = api.http.get(file["url"]).content
        assert len(content) == file["bytes"]
        assert file["sha256"] in (None, hashlib.sha256(content).hexdigest())


# ---------------------------------------------------------------------- artifacts


def test_artifacts_are_listed_and_fetched(api: Parts) -> None:
    claim = producing(api, **{"report.md": "# Report\n", "report.json": "{}"})
    student = api.settings.run_dir(claim.id) / "student"
    (student / "adapter").mkdir(parents=True)
    (student / "adapter" / "adapter config.json").write_text("{}")
    (student / "model.safetensors").write_bytes(bytes(range(256)) * 10_000)
    tell(api, claim, ("artifact", {"name": "student", "path": str(student)}))
    listed = {
        one["name"]: one for one in api.http.get(f"/jobs/{claim.id}/artifacts").json()["data"]
    }
    assert set(listed) == {
        "report.md",
        "report.json",
        "student/model.safetensors",
        "student/adapter/adapter config.json",
    }
    assert listed["report.md"]["media_type"] == "text/markdown; charset=utf-8"
    assert listed["report.md"]["sha256"] is None, "nobody has asked for it yet"
    document = api.http.get("/openapi.json").json()
    path = document["paths"]["/jobs/{job_id}/artifacts/{name}"]
    described = path["get"]["responses"]["200"]["content"]
    assert {one["media_type"].partition(";")[0] for one in listed.values()} <= set(described)
    for name, one in listed.items():
        answer = api.http.get(one["url"])
        content = (api.settings.run_dir(claim.id) / name).read_bytes()
        assert (answer.status_code, answer.content) == (200, content)
        assert answer.headers["etag"] == f'"{hashlib.sha256(content).hexdigest()}"'
        assert answer.headers["content-disposition"].startswith("attachment; filename=")
        assert answer.headers["content-type"] == one["media_type"]
        assert answer.headers["content-length"] == str(one["bytes"])
    again = {
        one["name"]: one["sha256"]
        for one in api.http.get(f"/jobs/{claim.id}/artifacts").json()["data"]
    }
    assert again["report.md"] == hashlib.sha256(b"# Report\n").hexdigest()


def test_pages_that_were_added_after_the_end_are_listed(api: Parts, tmp_path: Path) -> None:
    """What `kd landscape` and `kd ablate` write into the folder of a run, and nothing beside it."""
    claim = producing(api, **{"report.md": "# Report\n"})
    folder = api.settings.run_dir(claim.id)
    for name in ("landscape/index.html", "landscape/other.html", "ablation/report.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "secret").write_text("secret")
    (folder / "ablation" / "index.html").symlink_to(tmp_path / "secret")
    listed = [one["name"] for one in api.http.get(f"/jobs/{claim.id}/artifacts").json()["data"]]
    assert sorted(listed) == ["ablation/report.json", "landscape/index.html", "report.md"]
    answer = api.http.get(f"/jobs/{claim.id}/artifacts/landscape/index.html")
    assert answer.text == "landscape/index.html"
    assert answer.headers["content-disposition"].startswith("attachment; filename=")
    problem(api.http.get(f"/jobs/{claim.id}/artifacts/ablation/index.html"), 404)


def test_artifacts_are_found_where_the_data_folder_is_now(api: Parts) -> None:
    claim = producing(api, **{"report.md": "# The report"})
    before = f"/where/it/was/runs/{claim.id}/report.md"
    tell(api, claim, ("artifact", {"name": "report.md", "path": before}))
    now = str(api.settings.run_dir(claim.id) / "report.md")
    shown = api.http.get(f"/jobs/{claim.id}")
    assert shown.json()["artifacts"] == {"report.md": now}
    assert api.http.get(f"/jobs/{claim.id}/artifacts/report.md").text == "# The report"


def test_a_part_of_an_artifact(api: Parts) -> None:
    claim = producing(api, **{"metrics.jsonl": "0123456789"})
    url = f"/v1/jobs/{claim.id}/artifacts/metrics.jsonl"
    tag = api.http.get(url).headers["etag"]
    part = api.http.get(url, headers={"Range": "bytes=2-5"})
    assert (part.status_code, part.text, part.headers["content-range"]) == (
        206,
        "2345",
        "bytes 2-5/10",
    )
    assert part.headers["etag"] == tag
    assert api.http.get(url, headers={"Range": "bytes=2-5", "If-Range": tag}).status_code == 206
    other = api.http.get(url, headers={"Range": "bytes=2-5", "If-Range": '"other"'})
    assert (other.status_code, other.text) == (200, "0123456789")
    problem(api.http.get(url, headers={"Range": "bytes=10-"}), 416, "range-not-satisfiable")
    for matching in (tag, f'"x", {tag}', "*", f"W/{tag}"):
        answer = api.http.get(url, headers={"If-None-Match": matching})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    head = api.http.head(url)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "10")


def test_an_empty_artifact_is_sent(api: Parts) -> None:
    claim = producing(api, **{"profile.json": ""})
    answer = api.http.get(f"/jobs/{claim.id}/artifacts/profile.json")
    assert (answer.status_code, answer.content) == (200, b"")


def test_an_artifact_that_changes_has_another_tag(api: Parts) -> None:
    claim = producing(api, **{"report.md": "one"})
    url = f"/jobs/{claim.id}/artifacts/report.md"
    before = api.http.get(url)
    (api.settings.run_dir(claim.id) / "report.md").write_text("two")
    after = api.http.get(url, headers={"If-None-Match": before.headers["etag"]})
    assert (after.status_code, after.text) == (200, "two")
    assert after.headers["etag"] != before.headers["etag"]


def test_nothing_but_the_job_s_own_files_is_an_artifact(api: Parts, tmp_path: Path) -> None:
    """A run may report paths outside of its folder, links out of it, and folders above it."""
    claim = producing(api, **{"report.md": "mine"})
    other = producing(api, **{"report.md": "other"})
    own = api.settings.run_dir(claim.id)
    foreign = api.settings.run_dir(other.id)
    (tmp_path / "secret").write_text("hidden")
    (own / "link").symlink_to(tmp_path / "secret")
    (own / "folder").mkdir()
    (own / "folder" / "link").symlink_to(tmp_path / "secret")
    (own / "folder" / "up").symlink_to(tmp_path)
    (own / "to-other").symlink_to(foreign)
    for name, path in {
        "a": "/etc/passwd",
        "b": str(foreign / "report.md"),
        "c": str(own / ".." / other.id / "report.md"),
        "d": str(own / "link"),
        "e": str(own / "folder"),
        "f": str(own / "to-other"),
        "g": str(own.parent),
        "h": "relative",
    }.items():
        tell(api, claim, ("artifact", {"name": name, "path": path}))
    assert [one["name"] for one in api.http.get(f"/jobs/{claim.id}/artifacts").json()["data"]] == [
        "report.md"
    ]
    for name in (
        "a",
        "b",
        "c",
        "d",
        "e/link",
        "e/up/secret",
        "f/report.md",
        "g",
        "h",
        "../x",
        "report.md/x",
        "",
    ):
        answer = api.http.get(f"/jobs/{claim.id}/artifacts/{name}", follow_redirects=False)
        assert answer.status_code == 404, name
        assert "hidden" not in answer.text
    problem(api.http.get(f"/jobs/{claim.id}/artifacts/..%2f{other.id}%2freport.md"), 404)


def test_a_search_shows_the_student_of_its_best_trial(api: Parts) -> None:
    space = {"train.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}
    search = api.jobs.create(
        make_config(
            "quick",
            "search",
            teacher={"model": "t"},
            search={"trials": 1, "space": space},
            data={"train": "x.txt"},
        )
    )
    claim = api.jobs.claim(search.id, "precompute", "test", 600)
    assert claim is not None
    trial = running(api).id
    stranger = running(api).id
    api.jobs.redis.hset(f"kd:job:{search.id}:trials", "0", trial)
    for job_id, name in ((trial, "student"), (stranger, "other")):
        folder = api.settings.run_dir(job_id) / "student"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        tell(api, claim, ("artifact", {"name": name, "path": str(folder)}))
    assert api.http.get(f"/jobs/{search.id}/artifacts/student/config.json").text == "{}"
    problem(api.http.get(f"/jobs/{search.id}/artifacts/other/config.json"), 404)


def test_a_digest_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    digests = FileDigests()
    file.write_bytes(b"x" * 1000)
    assert digests.look_up(file) is None
    with file.open("rb") as opened:
        first = digests.compute(opened.fileno())
        assert first == hashlib.sha256(b"x" * 1000).hexdigest() == digests.look_up(file)
        monkeypatch.setattr(hashlib, "file_digest", None)  # so that a second read would fail
        assert digests.compute(opened.fileno()) == first
    file.write_bytes(b"y" * 1000)
    assert digests.look_up(file) is None


def test_the_names_of_artifacts_hold_no_path(api: Parts) -> None:
    claim = producing(api, **{"report.md": "x"})
    assert str(api.settings.home) not in json.dumps(
        api.http.get(f"/jobs/{claim.id}/artifacts").json()
    )


def test_requests_that_are_given_up_leave_no_file_open(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts(**UNLIMITED)
    process = parts.start_api()
    claim = producing(parts, **{"log.txt": "line\n" * 1000})
    handles = Path(f"/proc/{process.pid}/fd")

    def held() -> int:
        """Count the files of jobs that the API has open."""
        count = 0
        for handle in handles.iterdir():
            with suppress(FileNotFoundError):  # the API closed it in the meantime
                count += handle.readlink().is_relative_to(parts.settings.home / "runs")
        return count

    for path in (f"/jobs/{claim.id}/artifacts/log.txt", f"/jobs/{claim.id}/logs"):
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        for _ in range(100):
            with socket.create_connection(
                ("127.0.0.1", parts.settings.port), timeout=10
            ) as connection:
                connection.sendall(request)
    assert parts.http.get(path).text == "line\n" * 1000
    wait_until(lambda: held() == 0)
