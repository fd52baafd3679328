"""The strings and the keys of a JSON body: what no record could hold is refused at the door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.support.harness import make_body
from kd.config.job import JobConfig
from kd.config.jobfile import set_value
from tests.support.services.api import problem, valid

#: Texts that no file name and no record can hold, as JSON writes them.
UNUSABLE = ["\ud800", "a\udfffb", "a\0b"]


def list_string_fields(schema: dict[str, Any]) -> list[tuple[str, ...]]:
    """List the paths of all fields that may hold text, in the order of the schema."""

    def walk(node: dict[str, Any], path: tuple[str, ...], seen: tuple[str, ...]) -> Iterator[Any]:
        name = node.get("$ref", "").rpartition("/")[2]
        if name:
            if name not in seen:
                yield from walk(schema["$defs"][name], path, (*seen, name))
            return
        if node.get("type") == "string":
            yield path
        for key, inner in node.get("properties", {}).items():
            yield from walk(inner, (*path, key), seen)
        for form in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            yield from walk(form, path, seen)
        if isinstance(node.get("items"), dict):
            yield from walk(node["items"], (*path, "0"), seen)
        if isinstance(node.get("additionalProperties"), dict):
            yield from walk(node["additionalProperties"], (*path, "key"), seen)

    return list(dict.fromkeys(walk(schema, (), ())))


def place(body: Any, path: tuple[str, ...], value: Any) -> Any:
    """Put ``value`` at ``path``; the index 0 makes a list of one."""
    if path[-1] == "0":
        return place(body, path[:-1], [value])
    return set_value(body, list(path), value)


def test_every_text_of_a_job_is_refused_with_its_pointer(http: httpx.Client) -> None:
    fields = list_string_fields(JobConfig.model_json_schema())
    assert len(fields) >= 50 and ("teacher", "revision") in fields
    for index, path in enumerate(fields):
        text = UNUSABLE[index % len(UNUSABLE)]
        content = json.dumps(place(make_body("quick"), path, text))
        for address in ("/jobs", "/jobs/validate"):
            answer = http.post(
                address, content=content, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 422, (path, answer.text)
            (problem,) = answer.json()["errors"]
            assert problem["pointer"] == "/" + "/".join(path)
            assert "holds" in problem["detail"]
    assert http.get("/jobs").json()["data"] == []


def test_every_body_is_read_so(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    bodies = [
        (method, path)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    ]
    assert len(bodies) >= 3
    for method, path in bodies:
        answer = http.request(
            method,
            path.replace("{", "").replace("}", ""),
            content=b'{"a/b": ["\\ud800"]}',
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 422, (path, answer.text)
        assert answer.json()["errors"][0]["pointer"] == "/a~1b/0"


def test_a_key_may_not_hold_such_text_either(http: httpx.Client) -> None:
    answer = http.post(
        "/jobs",
        content=b'{"labels": {"a\\ud800": "x"}}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/labels"


def test_a_whole_pair_of_surrogates_is_text(http: httpx.Client, text: str) -> None:
    body = make_body("quick", labels={"mood": "\U0001f600"})
    answer = http.post("/jobs/validate", json=body)
    assert "holds" not in answer.text


@pytest.mark.parametrize(
    "content", [b'{"name": "a", "name": "b"}', b'{"train": {"max_steps": 1, "max_steps": 2}}']
)
def test_a_key_that_an_object_has_twice_is_refused(http: httpx.Client, content: bytes) -> None:
    answer = http.post("/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "twice" in answer.json()["detail"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_condition_that_no_route_checks_is_refused_and_nothing_is_changed(
    http: httpx.Client, text: str, method: str
) -> None:
    made = http.post("/jobs", json=valid("quick", text))
    assert made.status_code == 202, made.text
    path = made.headers["location"]
    tag = http.get(path).headers["etag"]
    for value in (tag, '"1"', "*"):
        target = f"{path}/cancel" if method == "POST" else path
        answer = http.request(method, target, headers={"If-Match": value})
        problem(answer, 400, "precondition-unsupported")
        refused = http.post("/jobs", json=valid("quick", text), headers={"If-Match": value})
        problem(refused, 400, "precondition-unsupported")
    assert http.get(path).headers["etag"] == tag
    assert len(http.get("/jobs").json()["data"]) == 1


def test_an_empty_cursor_is_told_as_such(http: httpx.Client) -> None:
    document = problem(http.get("/jobs?cursor="), 422, "bad-cursor")
    assert document.detail == "cursor is empty."
    assert "first page" in document.remedy


def test_a_url_in_place_of_a_path_is_told_as_such(http: httpx.Client, text: str) -> None:
    for source, detail, remedy in (
        (f"file://{text}/text.txt", "is a URL", f"Write the path alone: {text}/text.txt."),
        ("gs://bucket/text.jsonl", "is a URL", "Copy it to this machine"),
        ("s3://bucket/text.jsonl", "lies outside the buckets", "Put it below KD_STORE"),
    ):
        job = valid("quick", text, "distill")
        for field in ("data/train/0", "teacher/model"):
            body = json.loads(json.dumps(job))
            section, name, *_ = field.split("/")
            body[section][name] = source
            for path in ("/jobs", "/jobs/validate"):
                document = problem(http.post(path, json=body), 422)
                (found,) = document.errors
                assert found.pointer == f"/{field}"
                assert f"{source!r} {detail}" in found.detail
                assert found.remedy.startswith(remedy.removesuffix("it to this machine"))
    missing = valid("quick", text) | {"data": {"train": f"{text}/none.txt"}}
    assert "no file" in problem(http.post("/jobs", json=missing), 422).detail
