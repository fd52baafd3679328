"""Two keys: through no endpoint does one see, change or fetch anything of the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.support.harness import Parts, make_config
from bench.support.small.caches import make_cache
from cache.store import read_manifest
from cache.writing.writer import open_writer
from kd.client.wire.service import WorkerState
from kd.files import write_json
from services.store.callers import Caller
from tests.support.services.api import client, problem, running, serving, tell, valid, with_keys

MARK = "visible-to-alice-alone"
OPEN = {"/healthz", "/readyz"}


@dataclass
class House:
    parts: Parts
    alice: httpx.Client
    bob: httpx.Client
    reader: httpx.Client
    admin: httpx.Client

    @property
    def operations(self) -> list[tuple[str, str]]:
        paths = self.parts.http.get("/openapi.json").json()["paths"]
        return [(method.upper(), path) for path, found in paths.items() for method in found]


@pytest.fixture(scope="module")
def house(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("keys")
    file, keys = with_keys(folder, alice="write", bob="write", reader="read", admin="admin")
    with serving(tmp_path_factory.mktemp("api"), api_keys_file=file) as parts:
        clients = {name: client(parts, key) for name, key in keys.items()}
        yield House(parts, **clients)
        for each in clients.values():
            each.close()


@pytest.fixture
def owned(house: House) -> dict[str, str]:
    """Create a job of alice with a log, a checkpoint, an artifact and a cache.

    The result holds the values of the path parameters that name them.
    """
    parts = house.parts
    parts.jobs.redis.flushall()
    job_id = parts.jobs.create(make_config("quick", labels={"mark": MARK}), Caller("alice")).id
    claim = parts.jobs.claim(job_id, "train", "worker:1", 600)
    assert claim is not None
    folder = parts.settings.run_dir(job_id)
    folder.mkdir(parents=True)
    for name in ("log.txt", "report.md"):
        (folder / name).write_text(MARK)
    fingerprint = make_cache(parts.settings.caches).name
    tell(parts, claim, ("artifact", {"name": "report.md", "path": str(folder / "report.md")}))
    tell(parts, claim, ("metrics", {"step": 1, "loss": 1.0}), ("warning", {"message": MARK}))
    tell(parts, claim, ("cache", {"fingerprint": fingerprint, "bytes_per_token": 1.0}))
    parts.jobs.show_worker(WorkerState(id="worker:1", stages=["train"], job=job_id, attempt=1), 30)
    parts.jobs.finish(claim, "succeeded")
    for name in (f"{MARK}.jsonl", "report.md"):
        assert house.alice.put(f"/files/{name}", content=b'{"text": "a"}').status_code < 300
    return {
        "job_id": job_id,
        "fingerprint": fingerprint,
        "name": "report.md",
        "step": "1",
        "file": "state.json",
    }


def body_of(method: str, path: str, house: House) -> Any:
    if method == "POST" and path in ("/jobs", "/jobs/validate"):
        return valid("quick", str(house.parts.settings.home / "inputs"))
    return None


def ask(
    http: httpx.Client, house: House, method: str, path: str, owned: dict[str, str]
) -> httpx.Response:
    if path.endswith("/stream"):
        with http.stream(method, path.format(**owned)) as response:
            response.read()
            return response
    return http.request(method, path.format(**owned), json=body_of(method, path, house))


def test_no_endpoint_answers_without_a_key(house: House, owned: dict[str, str]) -> None:
    strangers = [{}, {"Authorization": "Bearer kd_" + "x" * 43}, {"Authorization": "Basic YTpi"}]
    for method, path in house.operations:
        for headers in strangers:
            for prefix in ("", "/v1"):
                url = prefix + path.format(**owned)
                answer = house.parts.http.request(
                    method, url, headers=headers, json=body_of(method, path, house)
                )
                if path in OPEN:
                    assert answer.status_code == 200
                else:
                    problem(answer, 401)
                    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_a_key_that_only_reads_changes_nothing(house: House, owned: dict[str, str]) -> None:
    for method, path in house.operations:
        if method != "GET":
            problem(ask(house.reader, house, method, path, owned), 403)


def test_things_of_another_key_do_not_exist(house: House, owned: dict[str, str]) -> None:
    """Every endpoint with an id in its path answers bob as if the id did not exist."""
    nobody = owned | {
        "job_id": "job_" + "0" * 26,
        "fingerprint": "0" * 32,
    }
    seen = 0
    for method, path in house.operations:
        # To upload a file makes one of bob's own team.
        if "{" in path and method != "PUT":
            found = problem(ask(house.bob, house, method, path, owned), 404)
            missing = problem(ask(house.bob, house, method, path, nobody), 404)
            shown = found.detail
            for name in ("job_id", "fingerprint"):
                shown = shown.replace(owned[name], nobody[name])
            assert shown == missing.detail
            seen += 1
    assert seen >= 18
    assert house.alice.get(f"/jobs/{owned['job_id']}").json()["status"] == "succeeded", (
        "nothing has happened to it"
    )
    assert house.alice.get(f"/caches/{owned['fingerprint']}").status_code == 200


def test_no_list_shows_things_of_another_key(house: House, owned: dict[str, str]) -> None:
    for method, path in house.operations:
        if method == "GET" and "{" not in path:
            text = house.bob.get(path).text
            assert MARK not in text
            assert owned["job_id"] not in text
            assert owned["fingerprint"] not in text
    assert house.bob.get("/jobs", params={"label": f"mark:{MARK}"}).json()["data"] == []
    worker = next(
        one for one in house.bob.get("/workers").json()["data"] if one["id"] == "worker:1"
    )
    assert (worker["busy"], worker["job"], worker["attempt"]) == (True, None, None)


def test_the_owner_and_an_admin_see_it_all(house: House, owned: dict[str, str]) -> None:
    for http in (house.alice, house.admin):
        assert http.get(f"/jobs/{owned['job_id']}").json()["labels"] == {"mark": MARK}
        assert owned["job_id"] in {
            job["id"] for job in http.get("/jobs", params={"limit": 100}).json()["data"]
        }
        for part in ("events", "logs", "artifacts/report.md"):
            assert MARK in http.get(f"/jobs/{owned['job_id']}/{part}").text
        assert owned["fingerprint"] in {
            entry["fingerprint"] for entry in http.get("/caches").json()["data"]
        }
        assert owned["job_id"] in http.get("/workers").text


def test_runs_and_the_texts_of_caches_show_to_their_owner_and_runs_of_no_job_to_an_admin(
    house: House, owned: dict[str, str]
) -> None:
    runs = house.parts.settings.runs
    measured = {"teacher": "Big", "student_bits_per_byte": 1.25, "validation_kl": 0.5}
    write_json(runs / owned["job_id"] / "report.json", measured)
    write_json(runs / "by-hand" / "config.json", {"kind": "train"})
    inputs = {"data": {"train": ["her.txt"]}}
    made = {"fingerprint": owned["fingerprint"], "reused": False, "inputs": inputs}
    write_json(runs / owned["job_id"] / "cache.json", made)
    house.parts.jobs.redis.sadd("kd:caches:bob", owned["fingerprint"])
    for who, seen in ((house.alice, ("her.txt", owned["job_id"])), (house.bob, (None, None))):
        (cache,) = who.get("/caches").json()["data"]
        detail = who.get(f"/caches/{owned['fingerprint']}").json()
        assert (cache["text"], cache["made_by"]) == (detail["text"], detail["made_by"]) == seen
    (run,) = house.alice.get("/runs").json()["data"]
    assert (run["name"], run["state"]) == (owned["job_id"], "finished")
    assert (run["teacher"], run["bits_per_byte"], run["kl"]) == ("Big", 1.25, 0.5)
    assert house.bob.get("/runs").json()["data"] == []
    seen = {each["name"] for each in house.admin.get("/runs").json()["data"]}
    assert {owned["job_id"], "by-hand"} <= seen


def test_a_job_cannot_wait_for_another_key_s_job(house: House, owned: dict[str, str]) -> None:
    job = valid("quick", str(house.parts.settings.home / "inputs"))
    foreign = problem(house.bob.post("/jobs", json=job | {"depends_on": [owned["job_id"]]}), 422)
    unknown = problem(house.bob.post("/jobs", json=job | {"depends_on": ["job_" + "0" * 26]}), 422)
    assert foreign.detail.replace(owned["job_id"], "job_" + "0" * 26) == unknown.detail
    assert (
        house.alice.post("/jobs", json=job | {"depends_on": [owned["job_id"]]}).status_code == 202
    )


@pytest.mark.parametrize("kind", ["train", "verify"])
def test_a_job_cannot_read_another_key_s_cache(
    house: House, owned: dict[str, str], kind: str
) -> None:
    text = str(house.parts.settings.home / "inputs")

    def post(http: httpx.Client, fingerprint: str) -> httpx.Response:
        wanted = {"cache": {"fingerprint": fingerprint}, "kind": kind, "name": "quick"}
        job = wanted if kind == "verify" else valid("quick", text, loss={"alpha": 0.5}) | wanted
        return http.post("/jobs", json=job)

    foreign = problem(post(house.bob, owned["fingerprint"]), 422)
    unknown = problem(post(house.bob, "0" * 32), 422)
    assert foreign.detail.replace(owned["fingerprint"], "0" * 32) == unknown.detail
    assert post(house.alice, owned["fingerprint"]).status_code == 202


def test_a_job_cannot_start_from_another_key_s_student(house: House, owned: dict[str, str]) -> None:
    parts = house.parts
    student = parts.settings.run_dir(owned["job_id"]) / "student"
    student.mkdir()
    (student / "config.json").write_text("{}")
    (student / "model.safetensors").write_bytes(b"x")
    job = valid("quick", str(parts.settings.home / "inputs")) | {"student": {"model": str(student)}}
    assert problem(house.bob.post("/jobs", json=job), 422).errors[0].pointer == "/student/model"
    assert house.alice.post("/jobs", json=job).status_code == 202


@pytest.mark.parametrize("part", ["events", "trials", "waits", "metrics", "x"])
def test_a_folder_named_as_a_part_of_a_record_is_refused_as_any_other(
    house: House, owned: dict[str, str], part: str
) -> None:
    parts = house.parts
    parts.jobs.redis.hset(f"kd:job:{owned['job_id']}:trials", "0", owned["job_id"])
    path = parts.settings.run_dir(f"{owned['job_id']}:{part}") / "text.txt"
    job = valid("quick", str(parts.settings.home / "inputs")) | {"data": {"train": str(path)}}
    for http in (house.alice, house.bob):
        assert problem(http.post("/jobs", json=job), 422).errors[0].pointer == "/data/train/0"


def test_a_cache_of_two_keys_goes_with_the_second(house: House, owned: dict[str, str]) -> None:
    parts = house.parts
    url = f"/caches/{owned['fingerprint']}"
    job_id = parts.jobs.create(make_config("quick"), Caller("bob")).id
    claim = parts.jobs.claim(job_id, "train", "worker:1", 600)
    assert claim is not None
    tell(parts, claim, ("cache", {"fingerprint": owned["fingerprint"], "bytes_per_token": 1.0}))
    assert house.bob.get(url).status_code == 200
    problem(house.admin.delete(url), 409, "in-use")
    problem(house.bob.delete(url), 409, "in-use")
    assert house.alice.delete(url).status_code == 204, (
        "the answer does not show that another key uses it"
    )
    problem(house.alice.get(url), 404)
    assert house.bob.get(url).status_code == 200
    parts.jobs.finish(claim, "succeeded")
    assert house.bob.delete(url).status_code == 204
    assert not (parts.settings.caches / owned["fingerprint"]).exists()


def test_an_admin_removes_a_cache_for_everybody_once_nobody_uses_it(
    house: House, owned: dict[str, str]
) -> None:
    parts = house.parts
    url = f"/caches/{owned['fingerprint']}"
    claim = parts.jobs.claim(
        parts.jobs.create(make_config("quick"), Caller("bob")).id, "train", "worker:1", 600
    )
    assert claim is not None
    tell(parts, claim, ("cache", {"fingerprint": owned["fingerprint"], "bytes_per_token": 1.0}))
    assert claim.id in problem(house.admin.delete(url), 409, "in-use").detail
    assert house.alice.get(url).status_code == house.bob.get(url).status_code == 200
    parts.jobs.finish(claim, "succeeded")
    with open_writer(
        parts.settings.caches, read_manifest(parts.settings.caches / owned["fingerprint"]).identity
    ):
        problem(house.admin.delete(url), 409, "in-use")
    assert house.alice.get(url).status_code == house.bob.get(url).status_code == 200
    assert house.admin.delete(url).status_code == 204
    assert not (parts.settings.caches / owned["fingerprint"]).exists()
    for http in (house.admin, house.alice, house.bob):
        problem(http.get(url), 404)
        assert owned["fingerprint"] not in http.get("/caches").text
    assert not parts.jobs.redis.keys("kd:caches:*"), (
        "a cache that is captured anew belongs to the key that captures it"
    )


def test_the_same_idempotency_key_of_two_keys_makes_two_jobs(house: House) -> None:
    job = valid("quick", str(house.parts.settings.home / "inputs"))
    headers = {"Idempotency-Key": "the same"}
    first, second = (
        http.post("/jobs", json=job, headers=headers) for http in (house.alice, house.bob)
    )
    assert first.json()["id"] != second.json()["id"]
    assert "idempotent-replayed" not in second.headers


def test_the_document_of_the_api_needs_no_key_and_holds_no_data(house: House) -> None:
    problem(house.parts.http.get("/docs"), 404)
    problem(house.parts.http.get("/redoc"), 404)
    document = house.parts.http.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in OPEN)
            assert ("401" in operation["responses"]) == (path not in OPEN)


@pytest.mark.parametrize("way", ["/jobs", "/jobs/validate"])
def test_a_job_continues_a_run_of_its_own_key_alone(
    house: House, owned: dict[str, str], way: str
) -> None:
    text = str(house.parts.settings.home / "inputs")
    body = valid("longer", text, resume={"run": owned["job_id"]})
    refused = problem(house.bob.post(way, json=body), 422)
    assert [each.pointer for each in refused.errors or []] == ["/resume/run"]
    assert "there is no job" in refused.detail
    assert house.alice.post(way, json=body).status_code in (200, 202)
    claim = running(house.parts, Caller("alice"))
    body["resume"]["run"] = claim.id
    assert "has not ended; it is running" in problem(house.alice.post(way, json=body), 422).detail
