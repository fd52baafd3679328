"""The checks of Host and Origin, CORS, and the security headers of every answer."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from bench.support.harness import Parts
from services.api.guards.host_origin import SAFE_HEADERS
from tests.support.services.door import make_door, problem, serving


@pytest.fixture
def client(parts: Parts) -> Iterator[httpx.Client]:
    with serving(make_door(parts.settings)) as client:
        yield client


# Host


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:{port}"]
)
def test_the_names_of_this_machine_are_known(client: httpx.Client, host: str) -> None:
    assert (
        client.get("/whoami", headers={"Host": host.format(port=client.base_url.port)}).status_code
        == 200
    )


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "evil.example:8000",
        "",
        "::1",
        "*",
    ],
)
def test_another_name_is_refused_before_any_route(client: httpx.Client, host: str) -> None:
    for answer in (
        client.get("/whoami", headers={"Host": host}),
        client.get("/nowhere", headers={"Host": host}),
    ):
        document = problem(answer, 400)
        assert (
            document["type"] == "urn:potstill:problem:bad-host"
            and "KD_ALLOWED_HOSTS" in document["remedy"]
        )
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_health_probe_may_use_any_host_name(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"Host": "10.1.2.3:8000"}).status_code == 200
    assert client.get("/healthz/../whoami", headers={"Host": "10.1.2.3:8000"}).status_code in (
        400,
        404,
    )


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
def test_the_operator_names_the_hosts(
    parts: Parts, allowed: list[str], host: str, status: int
) -> None:
    with serving(
        make_door(parts.settings.model_copy(update={"allowed_hosts": tuple(allowed)}))
    ) as client:
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


def test_our_own_page_and_a_client_without_a_page_may_change_things(client: httpx.Client) -> None:
    own = str(client.base_url).rstrip("/")
    assert client.post("/things", json={}, headers={"Origin": own}).status_code == 200
    assert client.post("/things", json={}).status_code == 200


def test_a_cors_preflight_fails_while_cors_is_off(client: httpx.Client) -> None:
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = client.options("/things", headers=asked)
    assert answer.status_code == 405 and not [
        name for name in answer.headers if name.startswith("access-control")
    ]


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
    assert (
        before.status_code == 200
        and before.headers["access-control-allow-origin"] == "https://ui.example"
    )
    assert (
        change.json() == {"a": 1}
        and change.headers["access-control-allow-origin"] == "https://ui.example"
    )
    assert "RateLimit" in change.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in change.headers
    assert foreign.status_code == 400 and "access-control-allow-origin" not in foreign.headers
    assert stopped.status_code == 403


# Headers


def test_every_answer_has_the_security_headers(client: httpx.Client) -> None:
    answers = {
        "an answer": client.get("/whoami"),
        "no such path": client.get("/nowhere"),
        "not allowed": client.delete("/whoami"),
        "not valid": client.post(
            "/things", content=b"{", headers={"Content-Type": "application/json"}
        ),
    }
    for name, answer in answers.items():
        assert {key: answer.headers.get(key) for key in SAFE_HEADERS} == SAFE_HEADERS, name
        assert (
            answer.headers["content-security-policy"]
            == "default-src 'none'; frame-ancestors 'none'"
        ), name
    page = client.get("/page").headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page and "default-src" not in page
