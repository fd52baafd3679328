"""API keys: the file, the access that it gives, and the commands that change it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from bench.support.harness import Parts
from bench.support.paths import ROOT
from cache.errors import StorageError
from services.api.guards import rate_limits
from services.api.guards.authentication import UnsafeBind, is_loopback, require_safe_bind
from services.settings import Settings
from services.store import key_file
from services.store.key_file import (
    SCOPES,
    KeyFile,
    KeysError,
    create_key,
    parse_lifetime,
    read_keys,
    revoke_keys,
)
from services.terminal.cli import app
from services.terminal.client import make_client
from tests.support.services.door import bearer, make_door, problem, serving


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


# The file


def test_a_key_has_256_random_bits_and_only_its_digest_is_kept(file: Path) -> None:
    made = [create_key(file, "alice", ["write"]) for _ in range(20)]
    texts = {text for text, _ in made}
    assert len(texts) == 20
    assert all(re.fullmatch(r"kd_[A-Za-z0-9_-]{43}", text) for text in texts)
    stored = file.read_text()
    assert not any(text in stored or text.removeprefix("kd_") in stored for text in texts)
    assert [key.sha256 for _, key in made] == [
        hashlib.sha256(text.encode()).hexdigest() for text, _ in made
    ]
    assert read_keys(file) == tuple(key for _, key in made)


def test_the_file_is_made_for_its_owner_alone(file: Path) -> None:
    before = os.umask(0)
    try:
        create_key(file, "alice", ["read"])
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o644, 0o666])
def test_a_file_that_others_may_use_is_refused(file: Path, mode: int) -> None:
    create_key(file, "alice", ["read"])
    file.chmod(mode)
    with pytest.raises(KeysError, match=f"{mode:04o}") as caught:
        KeyFile(file).list_keys()
    assert "chmod 600" in caught.value.remedy
    with pytest.raises(KeysError):
        create_key(file, "mallory", ["admin"])


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_that_only_owner_and_group_read_is_used(file: Path, mode: int) -> None:
    text, key = create_key(file, "alice", ["read"])
    file.chmod(mode)
    assert KeyFile(file).find(text) == key


def test_a_revoked_key_ends_and_stays_on_record(file: Path) -> None:
    (first, one), (second, _), (other, _) = (
        create_key(file, name, ["write"]) for name in ("alice", "alice", "bob")
    )
    keys = KeyFile(file)
    assert revoke_keys(file, one.id) == [one]
    assert keys.find(first) is None and keys.find(second) and keys.find(other)
    assert [key.name for key in revoke_keys(file, "alice")] == ["alice"]
    assert keys.find(second) is None and keys.find(other)
    assert file.read_text().count('"alice"') == 2 and file.read_text().count('"revoked"') == 2
    with pytest.raises(KeysError, match="no key in"):
        revoke_keys(file, "alice")


def test_the_file_is_read_again_when_it_has_changed_and_only_then(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    real = key_file._read_file
    monkeypatch.setattr(key_file, "_read_file", lambda path: reads.append(1) or real(path))
    text, _ = create_key(file, "alice", ["read"])
    reads.clear()  # making a key reads too
    keys = KeyFile(file)
    assert keys.find("kd_x") is None and keys.find(text) and keys.find(text)
    assert len(reads) == 1
    later, _ = create_key(file, "bob", ["read"])
    assert keys.find(later) is not None


def test_a_file_that_is_replaced_by_one_of_equal_size_is_read_again(
    file: Path, tmp_path: Path
) -> None:
    text, _ = create_key(file, "alice", ["read"])
    keys = KeyFile(file)
    assert keys.find(text)
    other = tmp_path / "other"
    new, _ = create_key(other, "alice", ["read"])
    times = file.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)
    assert keys.find(text) is None and keys.find(new)


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        '"text"',
        "{}",
        '{"name": "x", "sha256": "12", "scopes": ["read"]}',
        '{"name": "X Y", "sha256": "%s", "scopes": ["read"]}' % ("0" * 64),
        '{"name": "x", "sha256": "%s", "scopes": []}' % ("0" * 64),
        '{"name": "x", "sha256": "%s", "scopes": ["root"]}' % ("0" * 64),
        '{"name": "x", "sha256": "%s", "scopes": 5}' % ("0" * 64),
        '{"revoked": null}',
    ],
)
def test_a_file_that_is_not_in_order_lets_nobody_in(file: Path, line: str) -> None:
    text, _ = create_key(file, "alice", ["read"])
    with file.open("a") as out:
        out.write(line + "\n")
    with pytest.raises(KeysError, match="line 2"):
        KeyFile(file).find(text)


def test_a_line_that_a_crash_cut_off_is_named_and_not_glued_to_the_next(file: Path) -> None:
    create_key(file, "alice", ["read"])
    whole = file.read_text()
    file.write_text(whole + whole[:40])
    with pytest.raises(KeysError, match="line 2"):
        create_key(file, "bob", ["read"])
    file.write_text(whole.rstrip("\n"))  # only the newline was lost
    create_key(file, "bob", ["read"])
    assert [key.name for key in read_keys(file)] == ["alice", "bob"]


def test_a_key_of_which_the_disk_takes_a_part_is_not_made(file: Path) -> None:
    create_key(file, "first", ["read"])
    before = file.read_bytes()
    soft, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # as on a full disk: the first bytes of the line are written, the others are not
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, most))
        with pytest.raises(StorageError):
            create_key(file, "second", ["read"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, most))
    assert file.read_bytes() == before
    create_key(file, "second", ["read"])
    assert [key.name for key in read_keys(file)] == ["first", "second"]


def test_keys_that_are_made_at_once_are_all_there(file: Path) -> None:
    def make(name: str) -> None:
        for _ in range(20):
            create_key(file, name, ["read"])

    threads = [threading.Thread(target=make, args=(f"owner-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_keys(file)) == 160


@pytest.mark.parametrize("name", ["", "Alice", "a b", "a" * 64, "../x", "*", "local", "a\n"])
def test_a_name_that_cannot_be_an_owner_is_refused(file: Path, name: str) -> None:
    with pytest.raises(KeysError, match="name of a key"):
        create_key(file, name, ["read"])
    assert not file.exists()


@pytest.mark.parametrize("scopes", [[], ["root"], ["read", "everything"]])
def test_scopes_that_are_not_known_are_refused(file: Path, scopes: list[str]) -> None:
    with pytest.raises(KeysError, match="scopes"):
        create_key(file, "alice", scopes)


def test_a_scope_holds_those_before_it(file: Path) -> None:
    keys = [create_key(file, "alice", [scope])[1] for scope in SCOPES]
    may = [[key.may(scope) for scope in SCOPES] for key in keys]
    assert may == [[True, False, False], [True, True, False], [True, True, True]]


def test_every_key_is_compared_whatever_matches(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of an answer must not depend on the key: all are compared, each in constant time."""
    import hmac

    texts = [create_key(file, f"owner-{number}", ["read"])[0] for number in range(5)]
    compared: list[str] = []
    real = hmac.compare_digest
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(b) or real(a, b))
    for text in (texts[0], texts[4], "kd_nobody", "", "kd_\ud800"):
        compared.clear()
        KeyFile(file).find(text)
        assert len(compared) == 5


@pytest.mark.parametrize(
    ("text", "lifetime"),
    [("90d", timedelta(days=90)), ("12h", timedelta(hours=12)), ("26w", timedelta(weeks=26))],
)
def test_a_key_expires_after_its_time(file: Path, text: str, lifetime: timedelta) -> None:
    shown, key = create_key(file, "alice", ["read"], parse_lifetime(text))
    forever, _ = create_key(file, "alice", ["read"])
    assert key.expires_at is not None
    assert abs(key.expires_at - datetime.now(UTC) - lifetime) < timedelta(minutes=5)
    assert KeyFile(file).find(shown) == key
    assert not key.expired
    assert key.expires_soon == (text == "12h")
    other = KeyFile(file).find(forever)
    assert other is not None and other.expires_at is None and not other.expires_soon
    assert '"expires_at"' not in file.read_text().splitlines()[1], "its line is as it always was"


@pytest.mark.parametrize("text", ["", "90", "d", "0d", "-1d", "1.5d", "90 days", "1y", "999999d"])
def test_what_is_no_time_is_refused_and_no_key_is_made(file: Path, text: str) -> None:
    code, out, _ = run("new", "alice", f"--expires={text}", file=file, refused=True)
    assert (code, out) == (1, "")
    assert not file.exists()


@pytest.mark.parametrize("end", ["soon", "2027-01-01T00:00:00", 5])
def test_a_line_whose_end_cannot_be_read_lets_nobody_in(file: Path, end: Any) -> None:
    text, _ = create_key(file, "alice", ["read"])
    entry = json.loads(file.read_text()) | {"expires_at": end}
    file.write_text(json.dumps(entry) + "\n")
    with pytest.raises(KeysError, match="line 1"):
        KeyFile(file).find(text)


# At the door


@pytest.fixture
def keyed(parts: Parts, file: Path) -> Iterator[tuple[httpx.Client, dict[str, str]]]:
    """A client, and the keys of a (write), b (read) and r (admin)."""
    texts = {
        name: create_key(file, name, [scope])[0]
        for name, scope in zip("abr", ("write", "read", "admin"), strict=True)
    }
    with serving(make_door(parts.settings.model_copy(update={"api_keys_file": file}))) as client:
        yield client, texts


def test_without_a_file_everybody_is_local(parts: Parts) -> None:
    with serving(make_door(parts.settings)) as client:
        assert client.get("/whoami").json() == {"name": "local", "sees_all": True}
        assert client.get("/whoami", headers=bearer("kd_anything")).json()["name"] == "local"
        assert client.post("/things", json={"a": 1}).status_code == 200
        assert client.get("/workers").status_code == 200


def test_a_key_says_who_asks(keyed: tuple[httpx.Client, dict[str, str]]) -> None:
    client, texts = keyed
    found = {
        name: client.get("/whoami", headers=bearer(text)).json() for name, text in texts.items()
    }
    assert found == {
        "a": {"name": "a", "sees_all": False},
        "b": {"name": "b", "sees_all": False},
        "r": {"name": "r", "sees_all": True},
    }
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer kd_wrong", "Basic YTpi", "kd_wrong", "Bearer {a}x", "Bearer {A}"],
)
def test_without_a_key_that_holds_the_answer_is_401(
    keyed: tuple[httpx.Client, dict[str, str]], header: str | None
) -> None:
    client, texts = keyed
    shown = None if header is None else header.format(a=texts["a"], A=texts["a"].upper())
    headers = {} if shown is None else {"Authorization": shown}
    for answer in (
        client.get("/whoami", headers=headers),
        client.post("/things", json={}, headers=headers),
    ):
        document = problem(answer, 401)
        assert document["type"] == "urn:potstill:problem:unauthenticated"
        assert answer.headers["www-authenticate"] == 'Bearer realm="potstill"'
        assert texts["a"] not in answer.text


def test_without_the_scope_the_answer_is_403(keyed: tuple[httpx.Client, dict[str, str]]) -> None:
    client, texts = keyed
    table = {
        name: [
            client.get("/whoami", headers=bearer(text)).status_code,
            client.post("/things", json={}, headers=bearer(text)).status_code,
            client.get("/workers", headers=bearer(text)).status_code,
        ]
        for name, text in texts.items()
    }
    assert table == {"a": [200, 200, 403], "b": [200, 403, 403], "r": [200, 200, 200]}
    refused = problem(client.post("/things", json={}, headers=bearer(texts["b"])), 403)
    assert "write" in refused["detail"] and "--scopes write" in refused["remedy"]


def test_a_key_that_is_revoked_is_out_with_the_next_request(
    keyed: tuple[httpx.Client, dict[str, str]], file: Path
) -> None:
    client, texts = keyed
    assert client.get("/whoami", headers=bearer(texts["a"])).status_code == 200
    revoke_keys(file, "a")
    problem(client.get("/whoami", headers=bearer(texts["a"])), 401)
    assert client.get("/whoami", headers=bearer(texts["b"])).status_code == 200
    text, _ = create_key(file, "late", ["read"])
    assert client.get("/whoami", headers=bearer(text)).json()["name"] == "late"


def test_a_key_is_warned_of_and_then_refused(
    keyed: tuple[httpx.Client, dict[str, str]], file: Path
) -> None:
    client, texts = keyed
    soon, key = create_key(file, "soon", ["write"], timedelta(days=3))
    late, _ = create_key(file, "late", ["read"], timedelta(days=300))
    past, _ = create_key(file, "past", ["read"], timedelta(seconds=-1))
    assert key.expires_at is not None
    for answer in (
        client.get("/whoami", headers=bearer(soon)),
        client.post("/things", json={}, headers=bearer(soon)),
        client.get("/workers", headers=bearer(soon)),
    ):
        assert answer.headers["potstill-key-expires"] == key.expires_at.isoformat()
        assert "ratelimit" in answer.headers
    for text in (texts["a"], late):
        answer = client.get("/whoami", headers=bearer(text))
        assert answer.status_code == 200
        assert "potstill-key-expires" not in answer.headers
    answer = client.get("/whoami", headers=bearer(past))
    document = problem(answer, 401)
    assert document["type"] == "urn:potstill:problem:key-expired"
    assert document["title"] == "The API key has expired"
    assert "kd keys new past" in document["remedy"]
    assert answer.headers["www-authenticate"]


def test_the_client_warns_once_of_the_end_of_its_key(
    keyed: tuple[httpx.Client, dict[str, str]], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    http, texts = keyed
    soon, key = create_key(file, "soon", ["read"], timedelta(days=3))
    assert key.expires_at is not None
    for text in (soon, texts["b"]):
        with make_client(str(http.base_url), text) as client:
            for _ in range(2):
                client.request("GET", "/whoami")
    shown = capsys.readouterr()
    assert shown.err.count(key.expires_at.isoformat()) == 1
    assert shown.out == ""


def test_a_stream_ends_when_its_key_has_expired(
    parts: Parts, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "STREAM_LEASE_SECONDS", 0.9)
    text, key = create_key(file, "alice", ["read"], timedelta(days=1))
    assert key.expires_at is not None
    past = key.expires_at - timedelta(days=2)
    settings = parts.settings.model_copy(update={"api_keys_file": file})
    with (
        serving(make_door(settings)) as client,
        client.stream("GET", "/stream", headers=bearer(text)) as answer,
    ):
        lines = answer.iter_lines()
        assert "tick" in next(lines)
        file.write_text(file.read_text().replace(key.expires_at.isoformat(), past.isoformat()))
        for _ in lines:  # until the server ends the stream
            pass
        problem(client.get("/whoami", headers=bearer(text)), 401)


@pytest.mark.parametrize("harm", ["gone", "open", "torn"])
def test_a_file_that_cannot_be_trusted_any_more_lets_nobody_in(
    keyed: tuple[httpx.Client, dict[str, str]], file: Path, harm: str
) -> None:
    client, texts = keyed
    saved = file.read_text()
    {
        "gone": file.unlink,
        "open": lambda: file.chmod(0o666),
        "torn": lambda: file.write_text(saved[:-30]),
    }[harm]()
    answer = client.get("/whoami", headers=bearer(texts["a"]))
    document = problem(answer, 503)
    assert document["type"] == "urn:potstill:problem:keys-unreadable"
    assert document["title"] == "The API keys cannot be read"
    assert answer.headers["retry-after"] and str(file) not in answer.text
    file.unlink(missing_ok=True)
    create_key(file, "x", ["read"])
    file.write_text(saved)
    assert client.get("/whoami", headers=bearer(texts["a"])).status_code == 200


def test_the_routes_declare_the_key_in_the_openapi_document(parts: Parts) -> None:
    app = make_door(parts.settings)
    document = app.openapi()
    assert document["components"]["securitySchemes"]["ApiKey"]["scheme"] == "bearer"
    secured = {
        path
        for path, methods in document["paths"].items()
        for each in methods.values()
        if "security" in each
    }
    assert secured == {"/whoami", "/things", "/workers", "/stream"}
    app.state.limiter.close()


# Where the API listens


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    require_safe_bind(Settings(host=host, api_keys_file=None))


OTHER_HOSTS = [
    "0.0.0.0",  # noqa: S104
    "::",
    "192.168.1.5",
    "2001:db8::1",
    "localhost.example.org",
    "",
]


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_any_other_address_needs_keys(host: str, file: Path) -> None:
    assert not is_loopback(host)
    with pytest.raises(UnsafeBind, match="no key") as caught:
        require_safe_bind(Settings(host=host, api_keys_file=None))
    assert "KD_API_KEYS_FILE" in caught.value.remedy
    with pytest.raises(KeysError, match="kd keys new"):
        require_safe_bind(Settings(host=host, api_keys_file=file))
    create_key(file, "alice", ["read"])
    require_safe_bind(Settings(host=host, api_keys_file=file))


# The commands


def run(*arguments: str, file: Path, refused: bool = False) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *arguments, "--file", str(file)])
    # The command line itself turns an error of this kind into a message and exit code 1.
    if refused and isinstance(result.exception, KeysError):
        return 1, result.stdout, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_commands_make_list_and_revoke(file: Path) -> None:
    made = [
        json.loads(run("new", "alice", "--scopes", "read,write", "--json", file=file)[1])
        for _ in range(2)
    ]
    assert all(KeyFile(file).find(each["key"]) for each in made)
    listed = json.loads(run("ls", "--json", file=file)[1])
    assert listed == [
        {name: value for name, value in each.items() if name != "key"} for each in made
    ]
    ended = json.loads(run("revoke", made[0]["id"], "--json", file=file)[1])
    assert ended == listed[:1]
    assert json.loads(run("ls", "--json", file=file)[1]) == listed[1:]


def test_the_list_shows_the_end_of_each_key_and_warns_of_it(file: Path) -> None:
    run("new", "forever", file=file)
    _, _, told = run("new", "later", "--expires", "90d", file=file)
    _, soon = create_key(file, "soon", ["read"], timedelta(days=3))
    _, past = create_key(file, "past", ["read"], timedelta(days=-3))
    assert "expires 20" in told
    code, listed, warned = run("ls", file=file)
    assert code == 0
    rows = {line.split()[1]: line for line in listed.splitlines()}
    assert "EXPIRES" in rows["NAME"]
    assert "never" in rows["forever"]
    assert soon.expires_at is not None and str(soon.expires_at.date()) in rows["soon"]
    assert "(expired)" in rows["past"] and "(expired)" not in rows["soon"]
    assert f"revoke {soon.id}" in warned and f"{past.id} of past has expired" in warned
    assert "later" not in warned and "forever" not in warned
    found = {each["name"]: each for each in json.loads(run("ls", "--json", file=file)[1])}
    assert found["forever"]["expires_at"] is None
    assert datetime.fromisoformat(found["soon"]["expires_at"]) == soon.expires_at
    assert run("revoke", "past", file=file)[0] == 0


def test_a_key_is_printed_alone_and_once(file: Path) -> None:
    """The command in a process: stdout contains only the key, so that a script can keep it."""
    program = "from services.terminal.cli import app; app()"
    command = [sys.executable, "-c", program, "keys"]
    made = subprocess.run(
        [*command, "new", "alice", "--file", file], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    text = made.stdout.strip()
    assert re.fullmatch(r"kd_[A-Za-z0-9_-]{43}", text) and text not in made.stderr
    environment = os.environ | {"KD_API_KEYS_FILE": str(file)}
    listed = subprocess.run(
        [*command, "ls"], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert "alice" in listed.stdout and text not in listed.stdout


def test_without_a_file_the_commands_say_which_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KD_API_KEYS_FILE", raising=False)
    result = CliRunner().invoke(app, ["keys", "ls"])
    assert result.exit_code == 2 and "KD_API_KEYS_FILE" in result.output
