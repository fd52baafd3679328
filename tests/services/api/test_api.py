"""Jobs over real HTTP: creating, validating, cloning, listing and showing them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS, wait_until
from kd.client.wire.jobs import Job
from tests.support.services.api import (
    UNLIMITED,
    inputs,
    problem,
    running,
    sse,
    statuses,
    tell,
    valid,
)

MakeParts = Callable[..., Parts]
UNKNOWN = "job_" + "0" * 26


# ---------------------------------------------------------------------- POST


def test_post_creates_a_job_and_get_shows_it(new_parts: MakeParts, tmp_path: Path) -> None:
    text = inputs(tmp_path / "inputs")
    api = new_parts(**UNLIMITED | {"data_roots": (tmp_path / "inputs",)})
    api.start_api()
    api.start_worker()
    http = api.http
    answer = http.post(
        "/jobs", json=valid("quick", text, "distill"), headers={"X-Request-ID": "mine-1"}
    )
    assert answer.status_code == 202
    job = Job.model_validate(answer.json())
    assert answer.headers["location"] == f"/jobs/{job.id}" == job.links.self
    assert int(answer.headers["retry-after"]) > 0
    assert (job.status, job.kind, job.name, job.request_id) == (
        "queued",
        "distill",
        "quick",
        "mine-1",
    )
    api.wait_for(job.id, "succeeded", "failed")
    document = http.get(f"/jobs/{job.id}").json()
    assert document["status"] == "succeeded"
    assert "owner" not in document
    assert set(document["progress"]) == {
        "done",
        "total",
        "unit",
        "fraction",
        "eta_seconds",
        "per_second",
        "tokens",
        "tokens_per_second",
    }
    assert document["metrics"]["kd_loss"] is None, "not a number is null"
    assert document["created_at"].endswith("Z")
    assert document["config"]["train"]["max_steps"] == 1
    metrics = http.get(f"/jobs/{job.id}/metrics").json()
    assert next(one for one in metrics["series"] if one["name"] == "loss")["values"] == [
        3.0,
        1.5,
        1.0,
    ]
    assert "printed by the run" in http.get(f"/jobs/{job.id}/logs").text


def test_an_idempotency_key_gives_the_same_job_again(http: httpx.Client, text: str) -> None:
    headers = {"Idempotency-Key": "a key of mine"}
    first = http.post("/jobs", json=valid("quick", text), headers=headers)
    again = http.post("/v1/jobs", json=valid("quick", text), headers=headers)
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    problem(http.post("/jobs", json=valid("fails", text), headers=headers), 422, "key-reused")
    http.post(f"/jobs/{first.json()['id']}/cancel")
    http.delete(f"/jobs/{first.json()['id']}")
    gone = http.post("/jobs", json=valid("quick", text), headers=headers)
    assert gone.status_code in (202, 404), "a key whose job was deleted causes no server error"


def test_a_repeated_post_finds_its_job_even_if_its_text_is_gone(
    api: Parts, http: httpx.Client
) -> None:
    text = Path(inputs(api.settings.home / "inputs" / "passing"))
    job = valid("quick", str(text))
    headers = {"Idempotency-Key": "mine"}
    first = http.post("/jobs", json=job, headers=headers)
    assert first.status_code == 202
    (text / "text.txt").unlink()
    again = http.post("/jobs", json=job, headers=headers)
    assert (again.status_code, again.json().get("id")) == (202, first.json()["id"])
    assert again.headers["idempotent-replayed"] == "true"
    problem(http.post("/jobs", json=valid("other", str(text)), headers=headers), 422, "key-reused")
    assert problem(http.post("/jobs", json=job, headers={"Idempotency-Key": "new"}), 422).errors
    assert len(http.get("/jobs").json()["data"]) == 1


def test_many_posts_with_one_key_create_one_job(http: httpx.Client, text: str) -> None:
    def post(_: int) -> str:
        return str(
            http.post(
                "/jobs", json=valid("quick", text), headers={"Idempotency-Key": "at once"}
            ).json()["id"]
        )

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(post, range(40)))
    assert len(ids) == 1
    assert len(http.get("/jobs", params={"limit": 100}).json()["data"]) == 1


@pytest.mark.parametrize(
    "change, pointer, words",
    [
        ({"lose": {}}, "/lose", "Did you mean loss?"),
        ({"train": {"max_steps": 0}}, "/train/max_steps", "greater than or equal to 1"),
        (
            {"train": {"max_steps": 1, "learning_rat": 1}},
            "/train/learning_rat",
            "Did you mean learning_rate?",
        ),
        ({"train": {"max_steps": "many"}}, "/train/max_steps", "valid integer"),
        (
            {"name": "Not A Name"},
            "/name",
            "lower-case letters, digits, dots, dashes and underscores",
        ),
        (
            {"cache": {"fingerprint": "5f1d"}},
            "/cache/fingerprint",
            "`kd cache info 5f1d` prints it.",
        ),
        ({"data": {"train": "no-such-file.txt"}}, "/data/train/0", "no-such-file.txt"),
        ({"data": {"train": "/etc/passwd"}}, "/data/train/0", "/etc/passwd"),
        ({"kind": "distil"}, "/kind", "'distill'"),
        (
            {"loss": {"alpha": {"schedule": "linear", "strat": 1}}},
            "/loss/alpha/strat",
            "Did you mean start?",
        ),
        (
            {"loss": {"temperature": {"mode": "entropy", "schedule": "step"}}},
            "/loss/temperature",
            "not both",
        ),
        ({"body": {}}, "/body", "unknown key 'body'"),
        ({"loss": {"alpha": 0.5}}, "", "teacher is required"),
        ({"priority": 10}, "/priority", "less than or equal to 9"),
        ({"labels": {"a": "b" * 64}}, "/labels/a", "63"),
        ({"depends_on": [UNKNOWN]}, "/depends_on/0", UNKNOWN),
        ({"webhook": "https://example.org/hook"}, "/webhook", "off on this server"),
        ({"resources": {"memory": "much"}}, "/resources/memory", "valid integer"),
        (
            {"evaluation": {"tasks": "hellaswag"}},
            "/evaluation/tasks",
            "Input should be a list, but got 'hellaswag'",
        ),
        ({"teacher": {"model": None}}, "/teacher/model", "but got null"),
        ({"cache": 3}, "/cache", "Input should be a section (a mapping of fields), but got 3."),
    ],
)
def test_a_bad_job_is_refused_with_a_pointer(
    http: httpx.Client, text: str, change: dict[str, Any], pointer: str, words: str
) -> None:
    for path in ("/jobs", "/jobs/validate"):
        document = problem(http.post(path, json=valid("quick", text) | change), 422)
        found = {error.pointer: f"{error.detail} {error.remedy}" for error in document.errors}
        assert words in found[pointer] and not document.detail.startswith("1 problem")
        assert words in f"{document.detail} {document.errors[0].remedy}"
    assert http.get("/jobs").json()["data"] == []


def test_null_is_the_default_of_a_field(http: httpx.Client, text: str) -> None:
    job = valid("quick", text)
    nulls = {
        "cache": None,
        "data": job["data"] | {"validation": None},
        "evaluation": {"tasks": None},
    }
    made = http.post("/jobs", json=job | nulls).raise_for_status().json()
    assert made["config"] == http.post("/jobs", json=job).raise_for_status().json()["config"]


def test_every_problem_is_listed(http: httpx.Client, text: str) -> None:
    wrong = valid("quick", text) | {
        "name": "?",
        "x": 1,
        "data": {"train": "a.txt", "sequence_length": 1},
    }
    document = problem(http.post("/jobs", json=wrong), 422)
    assert {error.pointer for error in document.errors} == {"/name", "/x", "/data/sequence_length"}


def test_a_text_that_is_not_there_has_a_remedy(http: httpx.Client, text: str) -> None:
    job = valid("quick", text) | {"data": {"train": f"{text}/gone.txt", "sequence_length": 64}}
    document = problem(http.post("/jobs", json=job), 422)
    (found,) = document.errors
    assert found.pointer == "/data/train/0" and "no file matches" in document.detail
    assert document.remedy == found.remedy and document.remedy.startswith("Check the path")


def test_a_value_that_fits_no_form_is_one_problem(http: httpx.Client, text: str) -> None:
    wrong = valid("quick", text) | {"train": {"max_steps": 1, "gradient_checkpointing": "ful"}}
    (found,) = problem(http.post("/jobs", json=wrong), 422).errors
    assert (found.pointer, found.remedy) == ("/train/gradient_checkpointing", "Did you mean full?")
    assert "'none', 'full' or 'sqrt', or a valid integer" in found.detail


@pytest.mark.parametrize(
    "content, headers, status, words",
    [
        (b'{"kind": ', {"content-type": "application/json"}, 400, "not JSON"),
        (b"[]", {"content-type": "application/json"}, 422, "a section (a mapping of fields)"),
        (b"", {"content-type": "application/json"}, 422, "no body"),
        (
            b"kind: distill",
            {"content-type": "application/yaml"},
            415,
            "Content-Type: application/json",
        ),
        (b"{}", {"content-type": "text/plain"}, 415, "Content-Type: application/json"),
        (b"{}", {}, 415, "Content-Type: application/json"),
        (b'{"train": {"learning_rate": NaN}}', {"content-type": "application/json"}, 422, "finite"),
        (b"\xff\xfe", {"content-type": "application/json"}, 400, ""),
        (b"[" * 100_000, {"content-type": "application/json"}, 400, ""),
    ],
)
def test_a_body_that_is_not_a_job_is_refused(
    http: httpx.Client, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    document = problem(http.post("/jobs", content=content, headers=headers), status)
    assert words in f"{document.detail} {document.remedy}"


def test_a_body_of_more_than_a_mebibyte_is_refused(http: httpx.Client) -> None:
    big = b'{"name": "' + b"x" * (1 << 20) + b'"}'
    headers = {"content-type": "application/json"}
    assert "1048576 bytes" in problem(http.post("/jobs", content=big, headers=headers), 413).detail
    pieces = (big[start : start + 65536] for start in range(0, len(big), 65536))
    problem(http.post("/jobs", content=pieces, headers=headers), 413)
    problem(http.post("/jobs", content=big[: (1 << 20) - 100], headers=headers), 400)


def test_no_job_is_accepted_while_the_disk_is_nearly_full(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    text = inputs(tmp_path / "inputs")
    parts = new_parts(
        **UNLIMITED | {"disk_floor_bytes": 1 << 60, "data_roots": (tmp_path / "inputs",)}
    )
    parts.start_api()
    problem(parts.http.post("/jobs", json=valid("quick", text)), 507, "disk-full")
    problem(parts.http.get("/readyz"), 503, "disk-full")
    assert parts.http.get("/jobs").json()["data"] == []


def test_a_caller_cannot_exceed_its_quota_of_open_jobs(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    text = inputs(tmp_path / "inputs")
    parts = new_parts(**UNLIMITED | {"quota_open_jobs": 2, "data_roots": (tmp_path / "inputs",)})
    parts.start_api()
    first = parts.http.post("/jobs", json=valid("quick", text)).json()["id"]
    parts.http.post("/jobs", json=valid("quick", text))
    refused = parts.http.post("/jobs", json=valid("quick", text))
    problem(refused, 429, "quota-exceeded")
    assert int(refused.headers["retry-after"]) > 0
    parts.http.post(f"/jobs/{first}/cancel")
    assert parts.http.post("/jobs", json=valid("quick", text)).status_code == 202


def test_a_retry_cannot_exceed_the_quota_of_open_jobs(new_parts: MakeParts, tmp_path: Path) -> None:
    text = inputs(tmp_path / "inputs")
    parts = new_parts(**UNLIMITED | {"quota_open_jobs": 2, "data_roots": (tmp_path / "inputs",)})
    parts.start_api()
    first, _ = (parts.http.post("/jobs", json=valid("quick", text)).json() for _ in range(2))
    assert parts.http.post(f"/jobs/{first['id']}/cancel").status_code == 202
    other = parts.http.post("/jobs", json=valid("quick", text))
    assert other.status_code == 202
    refused = problem(parts.http.post(f"/jobs/{first['id']}/retry"), 429, "quota-exceeded")
    assert refused.quota is not None
    assert (refused.quota.what, refused.quota.used, refused.quota.limit) == ("open_jobs", 2, 2)
    assert parts.job(first["id"]).status == "cancelled"
    assert parts.http.post(f"/jobs/{other.json()['id']}/cancel").status_code == 202
    assert parts.http.post(f"/jobs/{first['id']}/retry").status_code == 202


def test_a_caller_cannot_exceed_its_quota_of_record_bytes(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    text = inputs(tmp_path / "inputs")
    parts = new_parts(
        **UNLIMITED | {"quota_record_bytes": 4000, "data_roots": (tmp_path / "inputs",)}
    )
    parts.start_api()
    first = parts.http.post("/jobs", json=valid("quick", text)).json()["id"]
    parts.http.post(f"/jobs/{first}/cancel")
    refused = parts.http.post("/jobs", json=valid("quick", text))
    refusal = problem(refused, 429, "quota-exceeded")
    assert "they may take 4000" in refusal.detail
    assert "DELETE /jobs/{id}" in refusal.remedy
    assert parts.http.delete(f"/jobs/{first}").is_success
    assert parts.http.post("/jobs", json=valid("quick", text)).status_code == 202


# ---------------------------------------------------------------------- validate, clone


def test_validate_shows_the_plan_of_a_job(http: httpx.Client) -> None:
    job = valid("quick", "examples/austen/teacher", "distill") | {
        "data": {"train": "README.md", "sequence_length": 128},
        "train": {
            "epochs": 2,
            "batch_size": 4,
            "gradient_accumulation_steps": 2,
            "warmup_steps": 100_000,
        },
        "resources": {"gpus": 1, "memory": "1000GiB"},
    }
    plan = http.post("/jobs/validate", json=job).json()
    assert plan["stages"] == ["precompute", "train"]
    assert plan["config"]["train"]["learning_rate"] == 3e-4, "defaults are filled in"
    assert plan["capture"]["bytes"] > 0
    assert plan["steps"] == -(-2 * plan["capture"]["train_sequences"] // 8)
    assert plan["tokens"] == plan["steps"] * 8 * 128
    weights = sum(
        file.stat().st_size for file in (ROOT / "examples/austen/teacher").glob("*.safetensors")
    )
    assert plan["memory"]["teacher_bytes"] == weights
    assert plan["memory"]["student_bytes"] == 16 * plan["memory"]["student_parameters"]
    assert plan["free_bytes"] > 0
    assert any("wait for a worker of stage train" in warning for warning in plan["warnings"])
    assert any("train.warmup_steps 100000 takes all" in warning for warning in plan["warnings"])
    assert not any("alpha" in warning for warning in plan["warnings"])
    plan = http.post("/jobs/validate", json=job | {"loss": {"alpha": 1}}).json()
    assert any("loss.alpha 1 gives the teacher" in warning for warning in plan["warnings"])
    assert http.get("/jobs").json()["data"] == [], "no job is taken"


def test_the_student_s_parameters_are_counted_as_torch_counts_them(
    http: httpx.Client, tiny_teacher: Path
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {
        "layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    teacher = "examples/austen/teacher"
    job = valid("quick", teacher, "distill") | {
        "data": {"train": "README.md"},
        "student": {"init": shape},
    }
    found = http.post("/jobs/validate", json=job).json()["memory"]["student_parameters"]
    llama = LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    assert found == AutoModelForCausalLM.from_config(llama).num_parameters()


@pytest.mark.parametrize(
    "name, content",
    [
        ("config.json", "["),
        ("config.json", "[]"),
        ("config.json", '{"text_config": "x"}'),
        ("config.json", '{"vocab_size": "many", "hidden_size": "wide"}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\x00"),
        ("model.safetensors", "no tensors"),
        ("model.safetensors", "\x02\x00\x00\x00\x00\x00\x00\x00[]"),
        ("text.txt", "\udcff\x00"),
    ],
)
@pytest.mark.parametrize("profile", ["threshold", "hidden"])
def test_a_broken_model_or_text_is_a_problem_of_the_job(
    api: Parts, http: httpx.Client, name: str, content: str, profile: str
) -> None:
    text = inputs(api.settings.home / "inputs" / "broken")
    Path(text, name).write_text(content, encoding="utf-8", errors="surrogateescape")
    job = valid("quick", text, "distill", cache={"profile": profile})
    job["student"] = {"model": text} if name == "model.safetensors" else job["student"]
    for path in ("/jobs/validate", "/jobs?dry_run=true"):
        answer = http.post(path, json=job)
        assert answer.status_code in (200, 422), answer.text
    Path(text, "tokenizer.json").unlink(missing_ok=True)


def test_a_dry_run_creates_no_job(http: httpx.Client) -> None:
    job = valid("quick", "examples/austen/teacher", "distill") | {"data": {"train": "README.md"}}
    answer = http.post("/jobs", params={"dry_run": True}, json=job)
    assert (answer.status_code, answer.json()["method"]) == (200, "table")
    assert http.get("/jobs").json()["data"] == []


def test_a_clone_is_the_same_job_with_changes(http: httpx.Client, text: str) -> None:
    old = http.post(
        "/jobs", json=valid("quick", text, labels={"team": "x", "run": "1"}, priority=7)
    ).json()
    same = http.post(f"/jobs/{old['id']}/clone")
    assert same.status_code == 202
    assert same.json()["id"] != old["id"]
    assert same.json()["config"] == old["config"]
    patch = {"labels": {"run": None, "try": "2"}, "train": {"max_steps": 5}, "priority": None}
    headers = {"Content-Type": "application/merge-patch+json", "Idempotency-Key": "clone"}
    other = http.post(f"/jobs/{old['id']}/clone", content=json.dumps(patch), headers=headers).json()
    assert other["labels"] == {"team": "x", "try": "2"}
    assert (other["config"]["train"]["max_steps"], other["priority"]) == (5, 5)
    assert (
        http.post(
            f"/jobs/{old['id']}/clone", json=patch, headers={"Idempotency-Key": "clone"}
        ).json()
        == other
    )
    document = problem(http.post(f"/jobs/{old['id']}/clone", json={"train": {"max_step": 5}}), 422)
    assert document.errors[0].pointer == "/train/max_step"
    problem(http.post(f"/jobs/{old['id']}/clone", json=[1]), 422)
    problem(http.post(f"/jobs/{UNKNOWN}/clone"), 404)


# ---------------------------------------------------------------------- GET


def test_unknown_things_are_404(http: httpx.Client) -> None:
    for method, path in (
        ("GET", ""),
        ("POST", "/cancel"),
        ("POST", "/clone"),
        ("GET", "/events"),
        ("GET", "/logs"),
    ):
        document = problem(http.request(method, f"/jobs/{UNKNOWN}{path}"), 404)
        assert UNKNOWN in document.detail
        assert document.remedy
    problem(http.get("/jobs/job_1:events"), 404)
    problem(http.get("/nothing"), 404)
    problem(http.get("/v1/nothing"), 404)
    problem(http.post("/v1/fine_tuning/jobs", json={}), 404)
    problem(http.get("/jobs/"), 404)


def test_405_names_every_method_that_is_allowed(http: httpx.Client) -> None:
    for method, path, allowed in (
        ("DELETE", "/jobs", "GET, POST"),
        ("PUT", "/jobs/x/cancel", "POST"),
        ("PATCH", "/v1/jobs/x", "DELETE, GET"),
        ("POST", "/v1/files", "GET"),
        ("POST", "/files/x", "DELETE, GET, PUT"),
        ("OPTIONS", "/jobs/validate", "POST"),
        ("POST", "/caches/x", "DELETE, GET"),
        ("POST", "/jobs/x/artifacts/y", "GET, HEAD"),
    ):
        response = http.request(method, path)
        problem(response, 405)
        assert response.headers["allow"] == allowed


def test_jobs_are_listed_newest_first_by_cursor(api: Parts, http: httpx.Client) -> None:
    ids = [api.submit("quick") for _ in range(7)]
    seen = []
    cursor = None
    pages = 0
    while True:
        page = http.get(
            "/jobs", params={"limit": 3, **({"cursor": cursor} if cursor else {})}
        ).json()
        if pages == 1:
            api.submit("quick")  # a new job does not shift the pages that follow
        seen += [job["id"] for job in page["data"]]
        pages += 1
        cursor = page["next_cursor"]
        assert page["has_more"] == (cursor is not None)
        if cursor is None:
            break
    assert seen == ids[::-1]


def test_jobs_are_filtered_by_their_properties(api: Parts, http: httpx.Client) -> None:
    def found(**query: Any) -> set[str]:
        return {
            job["id"] for job in http.get("/jobs", params={"limit": 100, **query}).json()["data"]
        }

    old = api.jobs.create(make_config("quick", labels={"team": "x"})).id
    time.sleep(0.01)
    between = datetime.now(UTC)
    time.sleep(0.01)
    young = api.jobs.create(
        make_config("quick", "precompute", labels={"team": "y", "a.b/c": "d_e"})
    ).id
    api.jobs.change("cancel", old)
    assert found() == {old, young}
    assert found(status="cancelled") == {old}
    assert found(kind="precompute") == {young}
    assert found(label="team:x") == {old}
    assert found(label="a.b/c:d_e") == {young}
    assert found(label="team:z") == set()
    assert found(created_after=between.isoformat()) == {young}
    assert found(created_after=(between + timedelta(days=1)).isoformat()) == set()
    assert found(parent=old) == set()


@pytest.mark.parametrize(
    "query",
    [
        *(
            "limit=0",
            "limit=101",
            "limit=x",
            "status=lost",
            "kind=x",
            "cursor=zzz",
            "cursor=%21",
            "cursor=%C3%A9",
        ),
        *("cursor=", "cursor=MTIz%0A", "label=x", "created_after=yesterday", "created_after=0"),
        *("created_after=2026-11-21T12:00:00",),
    ],
)
def test_a_bad_query_is_refused(http: httpx.Client, query: str) -> None:
    document = problem(http.get(f"/jobs?{query}"), 422)
    assert document.type.rpartition(":")[2] in ("invalid-parameter", "bad-cursor")
    assert query.split("=")[0] in document.detail and "job:" not in document.detail


def test_an_answer_that_has_not_changed_is_304(api: Parts, http: httpx.Client) -> None:
    job_id = api.submit("quick")
    first = http.get(f"/jobs/{job_id}")
    tag = first.headers["etag"]
    assert tag == f'W/"{first.json()["version"]}"'
    again = http.get(f"/jobs/{job_id}", headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    several = {"If-None-Match": f'"0", {tag.removeprefix("W/")}'}
    assert http.get(f"/jobs/{job_id}", headers=several).status_code == 304
    api.jobs.change("cancel", job_id)
    assert (
        http.get(f"/jobs/{job_id}", headers={"If-None-Match": tag}).json()["status"] == "cancelled"
    )


def test_a_long_poll_answers_when_the_job_has_changed(api: Parts, http: httpx.Client) -> None:
    job_id = api.submit("quick")
    tag = http.get(f"/jobs/{job_id}").headers["etag"]
    began = time.monotonic()
    threading.Timer(0.7, api.jobs.change, ("cancel", job_id)).start()
    answer = http.get(f"/jobs/{job_id}", params={"wait": 30}, headers={"If-None-Match": tag})
    assert answer.json()["status"] == "cancelled"
    assert 0.5 < time.monotonic() - began < 30
    began = time.monotonic()
    assert http.get(f"/jobs/{job_id}", params={"wait": 30}).json()["status"] == "cancelled"
    assert time.monotonic() - began < 30, "nothing more can happen to a job that has ended"


def test_a_long_poll_ends_without_a_change(api: Parts, http: httpx.Client) -> None:
    job_id = api.submit("quick")
    tag = http.get(f"/jobs/{job_id}").headers["etag"]
    began = time.monotonic()
    assert (
        http.get(f"/jobs/{job_id}", params={"wait": 1}, headers={"If-None-Match": tag}).status_code
        == 304
    )
    assert http.get(f"/jobs/{job_id}", params={"wait": 1}).json()["status"] == "queued"
    assert time.monotonic() - began > 2
    problem(http.get(f"/jobs/{job_id}", params={"wait": 31}), 422)


# ---------------------------------------------------------------------- failures


@pytest.mark.long
def test_the_api_process_never_imports_torch(tmp_path: Path, text: str) -> None:
    """Neither its imports nor its answers import torch."""
    code = f"""
import sys, services.api.app
from fastapi.testclient import TestClient
from services.settings import Settings
settings = Settings(redis_url="redis://127.0.0.1:1/0",
                    home={str(tmp_path)!r}, data_roots=({text!r},),
                    allowed_hosts=("testserver",), disk_floor_bytes=0)
client = TestClient(services.api.app.create_app(settings))
assert client.post("/jobs", json={valid("quick", text)!r}).status_code == 503
assert client.post("/jobs/validate", json={valid("quick", text)!r}).status_code == 503
assert client.get("/models").status_code == 200
assert client.get("/metrics").status_code == 200
print([name for name in ("torch", "transformers", "datasets") if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.alone
def test_without_redis_the_api_answers_quickly_and_says_so(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    text = inputs(tmp_path / "inputs")
    parts = new_parts(**UNLIMITED | {"data_roots": (tmp_path / "inputs",)})
    parts.start_api()
    job_id = parts.submit("quick")
    os.kill(parts.server.pid, signal.SIGSTOP)  # silent, which is harder to notice than gone
    requests = [
        ("GET", "/jobs", None),
        ("GET", f"/jobs/{job_id}", None),
        ("GET", f"/jobs/{job_id}/events", None),
        ("POST", f"/jobs/{job_id}/cancel", None),
        ("POST", "/jobs", valid("quick", text)),
        ("GET", "/readyz", None),
    ]

    def ask(request: tuple[str, str, Any]) -> tuple[httpx.Response, float]:
        method, path, sent = request
        began = time.monotonic()
        return parts.http.request(method, path, json=sent), time.monotonic() - began

    # All at a time, because each waits for the store.
    with ThreadPoolExecutor(len(requests)) as pool:
        for response, seconds in pool.map(ask, requests):
            assert seconds < 3
            problem(response, 503, "store-unavailable")
            assert response.headers["retry-after"] == "2"
    # One client for all: each new client would load every certificate authority, which takes
    # seconds of this test's own time.
    with (
        ThreadPoolExecutor(100) as pool,
        httpx.Client(base_url=parts.settings.server, timeout=20) as client,
    ):
        began = time.monotonic()
        answers = list(pool.map(lambda _: client.get(f"/jobs/{job_id}"), range(100)))
        assert time.monotonic() - began < 5
    assert {answer.status_code for answer in answers} == {503}
    assert parts.answers("/healthz"), "the process itself is well"
    process = parts.server._process
    assert process is not None
    process.send_signal(signal.SIGCONT)
    assert wait_until(lambda: parts.answers("/readyz"))
    assert parts.http.get(f"/jobs/{job_id}").json()["status"] == "queued"


def test_a_full_server_answers_503_but_still_serves_reads(
    new_parts: MakeParts, tmp_path: Path
) -> None:
    text = inputs(tmp_path / "inputs")
    parts = new_parts(**UNLIMITED | {"data_roots": (tmp_path / "inputs",)})
    parts.start_api()
    job_id = parts.submit("quick")
    parts.jobs.redis.config_set("maxmemory", "1mb")
    problem(parts.http.post("/jobs", json=valid("quick", text)), 503, "store-unavailable")
    assert parts.http.get(f"/jobs/{job_id}").json()["status"] == "queued"
    parts.jobs.redis.config_set("maxmemory", "0")
    assert parts.http.post("/jobs", json=valid("quick", text)).status_code == 202


def test_a_stream_outlives_a_restart_of_redis(new_parts: MakeParts) -> None:
    parts = new_parts(**UNLIMITED)
    parts.start_api()
    job_id = parts.submit("quick")
    received: list[dict[str, str]] = []

    def listen() -> None:
        url = f"{parts.settings.server}/jobs/{job_id}/events/stream"
        with httpx.stream("GET", url, timeout=30) as response:
            for event in sse(response):
                received.append(event)  # noqa: PERF402 -- the test looks meanwhile

    listener = threading.Thread(target=listen)
    listener.start()
    wait_until(lambda: statuses(received))
    os.kill(parts.server.pid, signal.SIGKILL)
    time.sleep(1.0)
    parts.server.ensure()
    parts.jobs.change("cancel", job_id)
    listener.join(PATIENCE_SECONDS)
    assert statuses(received) == ["queued", "cancelled"]


def test_open_streams_and_polls_do_not_hold_up_the_shutdown(new_parts: MakeParts) -> None:
    parts = new_parts(**UNLIMITED)
    api = parts.start_api()
    job_id = parts.submit("quick")
    poll = threading.Thread(target=parts.answers, args=(f"/jobs/{job_id}?wait=30",))
    poll.start()
    with httpx.stream("GET", f"{parts.settings.server}/jobs/{job_id}/events/stream") as response:
        next(response.iter_bytes())
        began = time.monotonic()
        api.terminate()
        assert api.wait(PATIENCE_SECONDS) == 0
        assert time.monotonic() - began < 30, "the poll alone waits so long"
    poll.join(PATIENCE_SECONDS)
    assert not poll.is_alive()


def test_a_job_whose_hint_was_lost_runs_all_the_same(new_parts: MakeParts) -> None:
    parts = new_parts(**UNLIMITED)
    job_id = parts.jobs.create(
        make_config("quick")
    ).id  # without a hint, as if the API had died in between
    parts.jobs.redis.hset(f"kd:job:{job_id}", "dispatched_at", 0)
    parts.start_worker()
    parts.start_api()
    assert parts.wait_for(job_id, "succeeded", "failed").status == "succeeded"


def test_a_listing_of_many_jobs_looks_at_one_page(api: Parts, http: httpx.Client) -> None:
    for _ in range(300):
        api.jobs.create(make_config("quick"))
    before = api.jobs.redis.info("commandstats")["cmdstat_hgetall"]["calls"]
    assert len(http.get("/jobs", params={"limit": 5}).json()["data"]) == 5
    assert api.jobs.redis.info("commandstats")["cmdstat_hgetall"]["calls"] - before <= 12


def test_progress_of_a_run_is_shown(api: Parts, http: httpx.Client) -> None:
    claim = running(api)
    tell(api, claim, ("progress", {"done": 1, "total": 4, "unit": "steps", "fraction": 0.25}))
    shown = http.get(f"/jobs/{claim.id}").json()
    assert (shown["status"], shown["progress"]["fraction"], shown["worker"]) == (
        "running",
        0.25,
        "test",
    )


def test_an_idle_connection_outlives_those_of_clients(api: Parts) -> None:
    """A server that closes first closes upon a request that is on its way: it would be lost."""
    kept = httpx.Limits().keepalive_expiry
    assert kept is not None
    with closing(HTTPConnection("127.0.0.1", api.settings.port, timeout=10)) as connection:
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        time.sleep(kept + 1.0)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
