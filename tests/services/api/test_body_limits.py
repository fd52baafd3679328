"""The limits on a request's body: its size, and the nesting of its JSON."""

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

from bench.support.harness import Parts
from services.api.guards.body_limits import JSON_DEPTH, JsonDepth
from tests.support.services.door import make_door, serving


@pytest.fixture
def client(parts: Parts) -> Iterator[httpx.Client]:
    with serving(make_door(parts.settings)) as client:
        yield client


def make_nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_a_body_may_be_as_deep_as_the_limit_and_no_deeper(client: httpx.Client) -> None:
    json_body = {"Content-Type": "application/json"}
    assert (
        client.post("/things", content=make_nested(JSON_DEPTH), headers=json_body).status_code
        == 200
    )
    for body in (
        make_nested(JSON_DEPTH + 1),
        make_nested(100_000),
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ):
        answer = client.post("/things", content=body, headers=json_body)
        assert answer.status_code == 400 and f"deeper than {JSON_DEPTH}" in answer.json()["detail"]
    deep_text = json.dumps({"a": "[" * 1000 + '"' + "{" * 1000 + "\\"}).encode()
    assert client.post("/things", content=deep_text, headers=json_body).status_code == 200


def test_a_body_that_does_not_end_is_refused_as_soon_as_it_is_too_deep(
    client: httpx.Client,
) -> None:
    names = ("Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked")
    head = "\r\n".join(["POST /things HTTP/1.1", *names, "", ""])
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=5) as raw:
        raw.sendall(head.encode())
        for _ in range(JSON_DEPTH + 1):
            raw.sendall(b"1\r\n[\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")  # the end of the body was never sent


def measure_depth(value: object) -> int:
    """Measure the depth of the parsed value: the reference for the depth of the pieces."""
    if isinstance(value, dict):
        return 1 + max(map(measure_depth, value.values()), default=0)
    return 1 + max(map(measure_depth, value), default=0) if isinstance(value, list) else 0


texts = st.text(alphabet='[]{}",:\\ aé\n', max_size=8)
values = st.recursive(
    texts | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


@given(values, st.booleans(), st.randoms(use_true_random=False))
def test_the_depth_is_that_of_the_value_in_any_pieces(
    value: object, ascii_only: bool, rng: random.Random
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(6)))
    depth = JsonDepth()
    found = [depth.feed(body[start:end]) for start, end in pairwise([0, *cuts, len(body)])]
    assert found[-1] == measure_depth(value)
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
    JsonDepth().feed(body)
    assert time.process_time() - begin < 1.0  # a scanner that reads bytes again would take minutes
