"""What a browser can be talked into, and what it can do with an answer: Host, Origin, CORS, headers, depth."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.guard import JSON_DEPTH, SAFE_HEADERS, Depth
from tests.door import make_door, problem, serving
from tests.harness import Parts


@pytest.fixture
def client(parts: Parts) -> Iterator[httpx.Client]:
    with serving(make_door(parts.settings)) as client:
        yield client


# Host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:{port}"])
def test_this_machine_s_names_are_known(client: httpx.Client, host: str) -> None:
    assert client.get("/whoami", headers={"Host": host.format(port=client.base_url.port)}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "evil.example:8000", "", "::1", "*"]
)
def test_another_name_is_refused_before_any_route(client: httpx.Client, host: str) -> None:
    for answer in (client.get("/whoami", headers={"Host": host}), client.get("/nowhere", headers={"Host": host})):
        document = problem(answer, 400)
        assert document["type"] == "urn:potstill:problem:bad-host" and "KD_ALLOWED_HOSTS" in document["remedy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_probe_may_call_by_any_name(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"Host": "10.1.2.3:8000"}).status_code == 200
    assert client.get("/healthz/../whoami", headers={"Host": "10.1.2.3:8000"}).status_code in (400, 404)


@pytest.mark.parametrize(
    "allowed, host, status",
    [
        (["kd.example"], "kd.example:443", 200),
        (["kd.example"], "a.kd.example", 400),
        (["*.kd.example"], "a.kd.example", 200),
        (["*.kd.example"], "a.b.kd.example", 200),
        (["*.kd.example"], "kd.example", 400),
        (["*.kd.example"], "evilkd.example", 400),
        (["*"], "anything.at.all", 200),
    ],
)
def test_the_operator_names_the_hosts(parts: Parts, allowed: list[str], host: str, status: int) -> None:
    with serving(make_door(parts.settings.model_copy(update={"allowed_hosts": tuple(allowed)}))) as client:
        assert client.get("/whoami", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("host, status", [("192.0.2.7", 200), ("192.0.2.8", 400), ("0.0.0.0", 400)])  # noqa: S104
def test_the_address_that_the_api_listens_on_is_known(parts: Parts, host: str, status: int) -> None:
    bound = "192.0.2.7" if status == 200 else "0.0.0.0"  # noqa: S104
    with serving(make_door(parts.settings.model_copy(update={"host": bound}))) as client:
        assert client.get("/whoami", headers={"Host": f"{host}:8000"}).status_code == status


# Origin


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1", "http://["]
)
def test_a_foreign_page_may_change_nothing(client: httpx.Client, origin: str) -> None:
    answer = client.post("/things", json={}, headers={"Origin": origin})
    assert problem(answer, 403)["type"] == "urn:potstill:problem:foreign-origin"
    assert "access-control-allow-origin" not in answer.headers
    read = client.get("/whoami", headers={"Origin": origin})
    assert read.status_code == 200 and "access-control-allow-origin" not in read.headers


def test_our_own_page_and_no_page_at_all_may(client: httpx.Client) -> None:
    own = str(client.base_url).rstrip("/")
    assert client.post("/things", json={}, headers={"Origin": own}).status_code == 200
    assert client.post("/things", json={}).status_code == 200


def test_a_page_cannot_ask_beforehand_where_cors_is_off(client: httpx.Client) -> None:
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = client.options("/things", headers=asked)
    assert answer.status_code == 405 and not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_origin_may_ask_and_read_and_change(parts: Parts) -> None:
    settings = parts.settings.model_copy(update={"allowed_origins": ("https://ui.example",)})
    with serving(make_door(settings)) as client:
        asked = {
            "Origin": "https://ui.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,idempotency-key",
        }
        before = client.options("/things", headers=asked)
        change = client.post("/things", json={"a": 1}, headers={"Origin": "https://ui.example"})
        foreign = client.options("/things", headers=asked | {"Origin": "https://evil.example"})
        stopped = client.post("/things", json={}, headers={"Origin": "https://evil.example"})
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == "https://ui.example"
    assert change.json() == {"a": 1} and change.headers["access-control-allow-origin"] == "https://ui.example"
    assert "RateLimit" in change.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in change.headers
    assert foreign.status_code == 400 and "access-control-allow-origin" not in foreign.headers
    assert stopped.status_code == 403


# Headers


def test_every_answer_is_marked(client: httpx.Client) -> None:
    answers = {
        "an answer": client.get("/whoami"),
        "no such path": client.get("/nowhere"),
        "not allowed": client.delete("/whoami"),
        "not valid": client.post("/things", content=b"{", headers={"Content-Type": "application/json"}),
    }
    for name, answer in answers.items():
        assert {key: answer.headers.get(key) for key in SAFE_HEADERS} == SAFE_HEADERS, name
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'", name
    page = client.get("/page").headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page and "default-src" not in page


# Depth


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_a_body_may_be_as_deep_as_the_limit_and_no_deeper(client: httpx.Client) -> None:
    json_body = {"Content-Type": "application/json"}
    assert client.post("/things", content=nested(JSON_DEPTH), headers=json_body).status_code == 200
    for body in (nested(JSON_DEPTH + 1), nested(100_000), b'{"a":' * 50_000 + b"1" + b"}" * 50_000):
        answer = client.post("/things", content=body, headers=json_body)
        assert answer.status_code == 400 and f"deeper than {JSON_DEPTH}" in answer.json()["detail"]
    deep_text = json.dumps({"a": "[" * 1000 + '"' + "{" * 1000 + "\\"}).encode()
    assert client.post("/things", content=deep_text, headers=json_body).status_code == 200


def test_a_body_that_does_not_end_is_refused_as_soon_as_it_is_too_deep(client: httpx.Client) -> None:
    names = ("Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked")
    head = "\r\n".join(["POST /things HTTP/1.1", *names, "", ""])
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=5) as raw:
        raw.sendall(head.encode())
        for _ in range(JSON_DEPTH + 1):
            raw.sendall(b"1\r\n[\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")  # the end of the body was never sent


def depth_of(value: object) -> int:
    """By the parsed value: the definition that reading piece by piece must agree with."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


texts = st.text(alphabet='[]{}",:\\ aé\n', max_size=8)
values = st.recursive(
    texts | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


@given(values, st.booleans(), st.randoms(use_true_random=False))
def test_the_depth_is_that_of_the_value_however_it_is_cut(value: object, ascii_only: bool, rng: random.Random) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(6)))
    depth = Depth()
    found = [depth.after(body[start:end]) for start, end in pairwise([0, *cuts, len(body)])]
    assert found[-1] == depth_of(value)
    assert found == sorted(found)


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b'\\"' * (1 << 19),
        b'""' * (1 << 19),
        b"[]" * (1 << 19),
        b'"' + b"\\" * (1 << 20),
        b"{" + b'"[' * (1 << 19),
    ],
    ids=["escapes", "strings", "lists", "backslashes", "open strings"],
)
def test_a_megabyte_of_anything_is_read_in_a_moment(body: bytes) -> None:
    begin = time.process_time()
    Depth().after(body)
    assert time.process_time() - begin < 1.0  # what rescans would take minutes
