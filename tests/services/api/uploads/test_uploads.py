"""Files to train on over real HTTP: sent as they are, checked while they arrive, kept by team."""

from __future__ import annotations

import json
import resource
import socket
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.support.harness import Parts
from bench.support.waiting import wait_until
from services.api.guards import json_lines
from services.api.guards.json_lines import RowChecker
from services.store.key_file import create_key
from services.store.training_files import TrainingFiles
from tests.support.services.api import client, problem, serving, valid

LIMIT = 200_000
TEXT_ROW = {"text": "It is a truth universally acknowledged."}
CHAT_ROW = {
    "messages": [
        {"role": "user", "content": "Who is rich?"},
        {"role": "assistant", "content": "Mr. Bingley."},
    ]
}
PAIR_ROW = {"prompt": "Who is rich?", "completion": "Mr. Bingley."}


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


ONE_LINE = lines(TEXT_ROW)


def in_pieces(content: bytes) -> Iterator[bytes]:
    """Yield the content, whose length is then not told."""
    yield content


@dataclass
class House:
    """An API with keys: ann and amy are of one team, bob is of another."""

    parts: Parts
    keys: dict[str, str]
    clients: dict[str, httpx.Client] = field(default_factory=dict)

    def client(self, name: str) -> httpx.Client:
        if name not in self.clients:
            self.clients[name] = client(self.parts, self.keys[name])
        return self.clients[name]

    def put(self, who: str, name: str, content: Any = ONE_LINE) -> httpx.Response:
        return self.client(who).put(f"/files/{name}", content=content)

    def upload(self, who: str, name: str, content: bytes = ONE_LINE) -> dict[str, Any]:
        """Upload a file; return its record."""
        answer = self.put(who, name, content)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def submit(self, who: str, path: str) -> httpx.Response:
        """Create a job of ``who``, which no worker runs, on a text."""
        body = valid("quick", str(self.parts.settings.home / "inputs"), "distill")
        return self.client(who).post("/jobs", json=body | {"data": {"train": path}})

    def left_nothing(self) -> bool:
        return not list(self.parts.settings.files.rglob(".tmp-*"))


@pytest.fixture(scope="module")
def house(_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    file = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    teams = {"ann": "novels", "amy": "novels", "bob": "poems"}
    keys = {name: create_key(file, name, ["write"], team=team)[0] for name, team in teams.items()}
    keys |= {"reader": create_key(file, "reader", ["read"], team="novels")[0], "nobody": "kd_none"}
    folder = tmp_path_factory.mktemp("api")
    with serving(folder, api_keys_file=file, file_bytes=LIMIT) as parts:
        made = House(parts, keys)
        yield made
        for each in made.clients.values():
            each.close()


@pytest.mark.parametrize(
    ("row", "form"), [(TEXT_ROW, "jsonl"), (CHAT_ROW, "messages"), (PAIR_ROW, "prompt_completion")]
)
def test_a_file_is_kept_as_it_was_sent(house: House, row: Any, form: str) -> None:
    ann = house.client("ann")
    content = BOM_UTF8 + lines(row, row) + b"\n" + json.dumps(row).encode()
    made = house.upload("ann", "two lines é.jsonl", content)
    assert (made["name"], made["bytes"], made["rows"]) == ("two lines é.jsonl", len(content), 3)
    assert made["format"] == form
    assert Path(made["path"]).read_bytes() == content
    url = "/files/two lines é.jsonl"
    assert ann.get(url).json() == ann.get(f"/files/{made['id']}").json() == made
    assert ann.get(f"{url}/content").content == content
    part = ann.get(f"{url}/content", headers={"Range": "bytes=3-9"})
    assert (part.status_code, part.content) == (206, content[3:10])
    problem(ann.get(f"{url}/content", headers={"Range": "bytes=999999-"}), 416)
    assert ann.delete(url).status_code == 204
    problem(ann.get(url), 404)
    problem(ann.delete(url), 404)
    assert not list(house.parts.settings.files.rglob(f"*{made['id']}*"))


def test_the_check_of_a_line_builds_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "DataConfig", lambda **_: pytest.fail("built"))
    checker = RowChecker()
    checker.feed(lines(TEXT_ROW, TEXT_ROW))
    assert (checker.finish(), checker.rows) == ("jsonl", 2)


def test_a_file_never_changes(house: House) -> None:
    made = house.upload("ann", "fixed.jsonl")
    again = house.put("amy", "fixed.jsonl", in_pieces(lines(TEXT_ROW)))
    assert (again.status_code, again.json()) == (200, made)
    longer, as_long = lines(TEXT_ROW, TEXT_ROW), lines(TEXT_ROW).replace(b"truth", b"TRUTH")
    for other in (longer, as_long, in_pieces(longer)):
        refused = problem(house.put("amy", "fixed.jsonl", other), 409, "conflict")
        assert "fixed.jsonl with other content" in refused.detail
    assert Path(made["path"]).read_bytes() == lines(TEXT_ROW)
    assert house.left_nothing()
    assert house.client("ann").delete("/files/fixed.jsonl").status_code == 204
    new = house.upload("ann", "fixed.jsonl", as_long)
    assert new["path"] != made["path"], "a job that names the deleted text must not read this one"


def test_files_are_listed_newest_first(house: House) -> None:
    made = [house.upload("bob", f"{number}.jsonl") for number in range(5)]
    assert house.client("bob").get("/files").json() == {"data": made[::-1]}


def test_files_belong_to_the_team(house: House) -> None:
    made = house.upload("ann", "ours.jsonl")
    assert house.client("amy").get("/files/ours.jsonl").json() == made
    assert house.submit("amy", made["path"]).status_code == 202
    bob = house.client("bob")
    for name in ("ours.jsonl", made["id"]):
        for method, below in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = problem(bob.request(method, f"/files/{name}{below}"), 404)
            assert answer.detail == f"There is no file {name}."
    assert made["id"] not in bob.get("/files").text
    assert "outside the folders" in problem(house.submit("bob", made["path"]), 422).detail
    assert house.upload("bob", "ours.jsonl", lines(PAIR_ROW))["id"] != made["id"]


BAD = {
    "not JSON": (lines(TEXT_ROW, TEXT_ROW) + b"{oops\n", ["Line 3", "not JSON"]),
    "no form": (lines(TEXT_ROW, TEXT_ROW, {"txet": "a"}), ["Line 3", "none of the forms"]),
    "a list": (lines(TEXT_ROW, TEXT_ROW, []), ["Line 3", "none of the forms"]),
    "no role": (lines({"messages": [{"content": "a"}]}), ["Line 1", "'role' in message 1"]),
    "half a pair": (lines({"prompt": "a"}), ["Line 1", "'completion'"]),
    "no content": (lines({"messages": [{"role": "user", "content": None}]}), ["'content'"]),
    "an image": (
        lines({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ["Line 1", "only text can be read"],
    ),
    "no messages": (lines({"messages": []}), ["Line 1", "no messages"]),
    "no completion": (lines({"prompt": "a", "completion": " "}), ["Line 1", "nothing to learn"]),
    "two forms": (lines(TEXT_ROW, TEXT_ROW, CHAT_ROW), ["Line 3", "messages", "jsonl"]),
    "not UTF-8": (lines(TEXT_ROW, TEXT_ROW) + b'{"text": "\xff"}', ["Line 3", "UTF-8"]),
    "half a pair of surrogates": (b'{"text": "\\ud800"}', ["Line 1", "surrogate"]),
    "deep": (b"[" * 100_000, ["Line 1", "nested"]),
    "NaN": (b'{"text": NaN}', ["Line 1", "NaN"]),
    "empty": (b"\n\n", ["no example"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_its_line(house: House, case: str) -> None:
    content, words = BAD[case]
    refused = problem(house.put("ann", "bad.jsonl", content), 400, "invalid-file")
    assert all(word in f"{refused.detail} {refused.remedy}" for word in words), refused
    assert house.left_nothing()


def test_a_file_that_is_too_large_is_refused(house: House) -> None:
    rows = LIMIT // len(lines(TEXT_ROW))
    house.upload("ann", "large.jsonl", lines(*[TEXT_ROW] * rows))
    more = lines(*[TEXT_ROW] * (rows + 1))
    # The length is told, or found while the file arrives.
    for content in (more, in_pieces(more), lines(*[TEXT_ROW] * (rows + 100_000))):
        refused = problem(house.put("ann", "larger.jsonl", content), 413)
        assert "KD_FILE_BYTES" in refused.remedy
    assert house.left_nothing()


@pytest.mark.parametrize(
    "name", ["..%2Ft.jsonl", "%2Fetc%2Fpasswd", "a%5Cb.jsonl", "%2E%2E", ".a", "a%0Ab", "x" * 300]
)
def test_a_name_that_is_a_path_is_refused(house: House, name: str) -> None:
    url = f"{house.parts.settings.server}/files/{name}"
    headers = {"Authorization": f"Bearer {house.keys['ann']}"}
    answer = httpx.put(url, content=lines(TEXT_ROW), headers=headers)
    assert answer.status_code == (404 if "%2F" in name else 400)
    assert "%2F" in name or "not a plain name" in answer.json()["detail"]


def test_a_form_is_refused_and_json_lines_have_several_names(house: House) -> None:
    ann = house.client("ann")
    refused = problem(ann.put("/files/form", files={"file": ("t.jsonl", lines(TEXT_ROW))}), 415)
    assert "without a form" in refused.remedy
    problem(ann.put("/files/form", json=TEXT_ROW), 415)
    for kind in ("application/x-ndjson", "application/jsonl; charset=utf-8", "text/plain"):
        answer = ann.put("/files/kind", content=lines(TEXT_ROW), headers={"Content-Type": kind})
        assert answer.is_success


def test_an_upload_that_is_cut_leaves_nothing(house: House) -> None:
    url = httpx.URL(house.parts.settings.server)
    files = house.parts.settings.files / "novels"
    with socket.create_connection((url.host, url.port), timeout=5) as raw:
        head = (
            "PUT /files/cut.jsonl HTTP/1.1",
            f"Host: {url.host}",
            f"Authorization: Bearer {house.keys['ann']}",
            "Content-Length: 1000",
        )
        raw.sendall("\r\n".join([*head, "", ""]).encode() + lines(TEXT_ROW))
        wait_until(lambda: list(files.glob(".tmp-*")))
    wait_until(house.left_nothing)
    problem(house.client("ann").get("/files/cut.jsonl"), 404)


def test_only_a_key_that_may_write_uploads(house: House) -> None:
    problem(house.put("nobody", "t.jsonl"), 401)
    problem(house.put("reader", "t.jsonl"), 403)
    problem(house.client("reader").delete("/files/t.jsonl"), 403)


# ---------------------------------------------------------------------- room


def put(parts: Parts, name: str, content: Any) -> httpx.Response:
    """Upload a file to an API without keys."""
    url = f"{parts.settings.server}/files/{name}"
    return httpx.put(url, content=content, timeout=120)


def test_files_count_for_the_quota_of_their_team_at_once(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts(quota_bytes=4000, disk_floor_bytes=0)
    parts.start_api()
    wait_until(lambda: parts.jobs.redis.hget("kd:policy", "bytes"))
    refused = problem(put(parts, "a", lines(*[TEXT_ROW] * 80)), 429, "quota-exceeded")
    assert "The file needs about" in refused.detail
    assert refused.quota is not None and refused.quota.what == "bytes"
    content = lines(*[TEXT_ROW] * 50)
    assert put(parts, "a", content).status_code == 201
    # The quota is measured once a minute, and was not measured since.
    assert parts.jobs.read_accounts("local")[0].bytes == 0
    problem(put(parts, "b", content), 429, "quota-exceeded")
    assert put(parts, "a", content).status_code == 200, "the same file needs no more room"
    assert parts.http.delete("/files/a").status_code == 204
    assert put(parts, "b", content).status_code == 201


def test_of_files_that_come_together_only_those_within_the_quota_stay(
    new_parts: Callable[..., Parts],
) -> None:
    parts = new_parts(quota_bytes=9000, disk_floor_bytes=0)
    parts.start_api()
    wait_until(lambda: parts.jobs.redis.hget("kd:policy", "bytes"))
    content = lines(*[TEXT_ROW] * 50)
    halfway = threading.Barrier(5)

    def upload(number: int) -> int:
        def body() -> Iterator[bytes]:
            yield content[:1000]
            halfway.wait(30)
            yield content[1000:]

        return put(parts, f"{number}.jsonl", body()).status_code

    with ThreadPoolExecutor(5) as pool:
        statuses = list(pool.map(upload, range(5)))
    assert 429 in statuses and set(statuses) <= {201, 429}
    stored = TrainingFiles(parts.settings.files)
    assert len(stored.list_files("local")) == statuses.count(201)
    assert stored.measure_team("local") <= 9000


def test_of_files_of_one_name_that_come_together_one_stays(
    new_parts: Callable[..., Parts],
) -> None:
    parts = new_parts(disk_floor_bytes=0)
    parts.start_api()
    halfway = threading.Barrier(4)

    def upload(number: int) -> int:
        def body() -> Iterator[bytes]:
            halfway.wait(30)
            yield lines({"text": f"text {number // 2}"})

        return put(parts, "one.jsonl", body()).status_code

    with ThreadPoolExecutor(4) as pool:
        statuses = sorted(pool.map(upload, range(4)))
    assert statuses == [200, 201, 409, 409]
    assert len(TrainingFiles(parts.settings.files).list_files("local")) == 1


def send_endlessly(
    parts: Parts, most: int, before_the_end: Callable[[], object] = bool
) -> httpx.Response:
    """Upload a file whose length is not told."""
    piece = lines(*[TEXT_ROW] * 1000)

    def body() -> Iterator[bytes]:
        for _ in range(most // len(piece) + 1):
            yield piece
        before_the_end()
        yield piece

    return put(parts, "endless.jsonl", body())


def test_a_file_of_unknown_length_is_checked_while_it_arrives(
    new_parts: Callable[..., Parts],
) -> None:
    parts = new_parts(disk_floor_bytes=0, quota_bytes=1 << 20)
    parts.start_api()
    wait_until(lambda: parts.jobs.redis.hget("kd:policy", "bytes"))
    files = TrainingFiles(parts.settings.files)
    # Refused and removed although its end has not come.
    answer = send_endlessly(
        parts, 24 << 20, lambda: wait_until(lambda: files.measure_team("local") == 0)
    )
    assert answer.status_code == 429, answer.text


def test_a_disk_below_its_floor_takes_no_file(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts(disk_floor_bytes=1 << 60)
    parts.start_api()
    problem(put(parts, "a", lines(TEXT_ROW)), 507, "disk-full")


def test_a_disk_that_gets_full_is_told_as_one(new_parts: Callable[..., Parts]) -> None:
    """A limit on the size of a file stands for the disk: its error is one of a full disk."""
    parts = new_parts(disk_floor_bytes=0)
    api = parts.start_api()
    resource.prlimit(api.pid, resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    problem(send_endlessly(parts, 6 << 20), 507, "disk-full")
    wait_until(lambda: TrainingFiles(parts.settings.files).measure_team("local") == 0)


# ---------------------------------------------------------------------- what is kept


def test_a_damaged_record_of_a_file_hides_no_other_file(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts()
    parts.start_api()
    made = [put(parts, f"{number}", lines(TEXT_ROW)).json() for number in range(5)]
    damages = [b"", b"\xff", b"[]", b'{"id": "x", "bytes": "many"}']
    for each, damage in zip(made[1:], damages, strict=True):
        Path(each["path"]).with_name("record.json").write_bytes(damage)
    assert parts.http.get("/files").json()["data"] == made[:1]
    problem(parts.http.get("/files/1"), 404)
    problem(parts.http.get(f"/files/{made[1]['id']}"), 404)


def test_files_outlive_the_api(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts(disk_floor_bytes=0)
    process = parts.start_api()
    made = put(parts, "t.jsonl", lines(TEXT_ROW)).json()
    process.kill()
    process.wait()
    parts.start_api()
    assert parts.http.get("/files/t.jsonl").json() == made
    assert parts.http.get("/files/t.jsonl/content").content == lines(TEXT_ROW)


def test_a_file_that_an_open_job_needs_is_not_deleted(house: House) -> None:
    made = house.upload("ann", "needed.jsonl")
    job = house.submit("amy", made["path"]).json()["id"]
    refused = problem(house.client("ann").delete("/files/needed.jsonl"), 409, "in-use")
    assert "of another key needs the file needed.jsonl" in refused.detail
    assert job in problem(house.client("amy").delete(f"/files/{made['id']}"), 409).detail
    assert house.client("amy").post(f"/jobs/{job}/cancel").status_code == 202
    assert house.client("ann").delete("/files/needed.jsonl").status_code == 204


def test_changes_are_in_the_audit_log(house: House) -> None:
    made = house.upload("ann", "logged.jsonl")
    assert house.put("ann", "logged.jsonl").status_code == 200
    house.client("ann").delete("/files/logged.jsonl")
    log = (house.parts.settings.home / "audit" / "audit.jsonl").read_text().splitlines()
    found = [(entry["action"], entry["target"]) for entry in map(json.loads, log)]
    assert found[-2:] == [("file.create", made["id"]), ("file.delete", made["id"])]
