"""The files and jobs of OpenAI's API, called by OpenAI's own client over real HTTP."""

from __future__ import annotations

import json
import resource
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from bench.support.harness import Parts, make_config
from bench.support.paths import ROOT
from bench.support.waiting import wait_until
from kd.client.wire.jobs import Job
from services.api.openai import rows
from services.api.openai.rows import RowChecker
from services.store.callers import Caller
from services.store.key_file import create_key
from services.store.training_files import TrainingFiles
from tests.support.documents import list_blocks
from tests.support.services.api import problem, serving, tell

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


def connect(parts: Parts, key: str = "any") -> OpenAI:
    return OpenAI(base_url=f"{parts.settings.server}/v1", api_key=key, max_retries=0)


@dataclass
class House:
    """An API with keys: ann and amy are of one team, bob is of another."""

    parts: Parts
    keys: dict[str, str]

    clients: dict[str, OpenAI] = field(default_factory=dict)

    def client(self, name: str) -> OpenAI:
        if name not in self.clients:
            self.clients[name] = connect(self.parts, self.keys[name])
        return self.clients[name]

    def upload(self, name: str, content: bytes = lines(TEXT_ROW), filename: str = "t.jsonl") -> str:
        client = self.client(name)
        return client.files.create(file=(filename, content), purpose="fine-tune").id

    def submit(self, name: str, file: str, **changes: Any) -> str:
        """Create a job of ``name`` that no worker runs; return its id."""
        return self.client(name).fine_tuning.jobs.create(**self.job(file) | changes).id

    def job(self, file: str, **hyperparameters: Any) -> dict[str, Any]:
        text = str(self.parts.settings.home / "inputs")
        distillation = {"teacher": text, "hyperparameters": hyperparameters}
        method = {"type": "distillation", "distillation": distillation}
        return {"model": text, "training_file": file, "method": method}


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
        for client in made.clients.values():
            client.close()


def refused(error: pytest.ExceptionInfo[Any], *words: str, param: str | None = None) -> None:
    """Check the error as the client shows it."""
    body = error.value.body
    assert set(body) == {"message", "type", "param", "code"}
    assert all(word in body["message"] for word in words), body["message"]
    assert body["param"] == param


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("row", "form"), [(TEXT_ROW, "jsonl"), (CHAT_ROW, "messages"), (PAIR_ROW, "prompt_completion")]
)
def test_a_file_is_kept_as_it_was_sent(house: House, row: Any, form: str) -> None:
    client = house.client("ann")
    content = BOM_UTF8 + lines(row, row) + b"\n" + json.dumps(row).encode()
    made = client.files.create(file=("two.jsonl", content), purpose="fine-tune")
    assert (made.bytes, made.filename, made.purpose) == (len(content), "two.jsonl", "fine-tune")
    assert made.model_extra is not None
    assert (made.model_extra["rows"], made.model_extra["format"]) == (3, form)
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert not list(house.parts.settings.files.rglob(f"*{made.id}*"))


def test_the_check_of_a_line_builds_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "DataConfig", lambda **_: pytest.fail("built"))
    checker = RowChecker()
    checker.feed(lines(TEXT_ROW, TEXT_ROW))
    assert (checker.finish(), checker.rows) == ("jsonl", 2)


def test_files_are_listed_by_page_newest_first(house: House) -> None:
    client = house.client("bob")
    ids = [house.upload("bob") for _ in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    assert client.files.list(purpose="batch").data == []


def test_files_belong_to_the_team(house: House) -> None:
    file = house.upload("ann")
    assert house.client("amy").files.retrieve(file).id == file
    assert house.submit("amy", file)
    bob = house.client("bob")
    for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            ask(file)
    assert file not in {each.id for each in bob.files.list()}
    with pytest.raises(openai.BadRequestError) as error:
        house.submit("bob", file)
    refused(error, f"there is no file {file}", param="training_file")


def test_a_job_cannot_name_the_path_of_another_team_s_file(house: House) -> None:
    path = house.client("ann").files.retrieve(house.upload("ann")).model_extra["path"]  # type: ignore[index]
    text = str(house.parts.settings.home / "inputs")
    body = {
        "teacher": {"model": text},
        "student": {"model": text},
        "data": {"train": path},
        "train": {"max_steps": 1},
    }

    def post(name: str) -> Any:
        headers = {"Authorization": f"Bearer {house.keys[name]}"}
        return house.parts.http.post("/jobs", json=body, headers=headers)

    assert post("amy").status_code == 202
    assert "outside the folders" in problem(post("bob"), 422).detail


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
    with pytest.raises(openai.BadRequestError) as error:
        house.upload("ann", content)
    refused(error, *words, param="file")
    assert not list(house.parts.settings.files.rglob(".tmp-*"))


def test_a_file_that_is_too_large_is_refused(house: House) -> None:
    rows = LIMIT // len(lines(TEXT_ROW))
    house.upload("ann", lines(*[TEXT_ROW] * rows))
    for more in (1, 10_000):  # beyond the limit of the file alone, and beyond that of the form
        with pytest.raises(openai.APIStatusError) as error:
            house.upload("ann", lines(*[TEXT_ROW] * (rows + more)))
        assert error.value.status_code == 413
    assert not list(house.parts.settings.files.rglob(".tmp-*"))


@pytest.mark.parametrize("name", ["../../t.jsonl", "/etc/passwd", "a\\b.jsonl", "..", "x" * 300])
def test_a_name_that_is_a_path_is_refused(house: House, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        house.upload("ann", filename=name)
    refused(error, "name", param="file")


def test_the_form_has_a_purpose_and_a_file(house: House) -> None:
    client = house.client("ann")
    with pytest.raises(openai.BadRequestError) as error:
        client.files.create(file=("t.jsonl", lines(TEXT_ROW)), purpose="batch")
    refused(error, "fine-tune", param="purpose")
    with pytest.raises(openai.BadRequestError) as error:
        client.files.create(
            file=("t.jsonl", lines(TEXT_ROW)),
            purpose="fine-tune",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
    refused(error, "not known", param="expires_after[anchor]")
    headers = {"Authorization": f"Bearer {house.keys['ann']}"}
    http = house.parts.http
    problem(http.post("/v1/files", json={}, headers=headers), 415)
    form = headers | {"Content-Type": "multipart/form-data; boundary=xyz"}
    cut = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{"text": "a"}'
    assert (
        "form cannot be read"
        in problem(http.post("/v1/files", content=cut, headers=form), 400).detail
    )


def test_errors_have_both_forms(house: House) -> None:
    for name, kind, status in (
        ("nobody", "authentication_error", 401),
        ("reader", "permission_error", 403),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            house.upload(name)
        assert (error.value.status_code, error.value.body["type"]) == (status, kind)  # type: ignore[index]
    document = problem(house.parts.http.get("/v1/files"), 401)
    assert document.error is not None
    assert document.error.message.startswith(document.detail)
    assert "error" not in house.parts.http.get("/v1/jobs").json()


def test_files_count_for_the_quota_of_their_team_at_once(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts(quota_bytes=4000, disk_floor_bytes=0)
    parts.start_api()
    with connect(parts) as client:
        wait_until(lambda: parts.jobs.redis.hget("kd:policy", "bytes"))
        with pytest.raises(openai.RateLimitError, match="The file needs about") as error:
            client.files.create(file=("t.jsonl", lines(*[TEXT_ROW] * 80)), purpose="fine-tune")
        refused(error, "quota")
        made = client.files.create(file=("t.jsonl", lines(*[TEXT_ROW] * 50)), purpose="fine-tune")
        # The quota is measured once a minute, and was not measured since.
        assert parts.jobs.read_accounts("local")[0].bytes == 0
        with pytest.raises(openai.RateLimitError) as error:
            client.files.create(file=("t.jsonl", lines(*[TEXT_ROW] * 50)), purpose="fine-tune")
        refused(error, "quota")
        assert client.files.delete(made.id).deleted
        client.files.create(file=("t.jsonl", lines(*[TEXT_ROW] * 50)), purpose="fine-tune")


def test_of_files_that_come_together_only_those_within_the_quota_stay(
    new_parts: Callable[..., Parts],
) -> None:
    parts = new_parts(quota_bytes=9000, disk_floor_bytes=0)
    parts.start_api()
    wait_until(lambda: parts.jobs.redis.hget("kd:policy", "bytes"))
    content = lines(*[TEXT_ROW] * 50)
    halfway = threading.Barrier(5)

    def upload(_: int) -> int:
        boundary = b"--x\r\nContent-Disposition: form-data; name="

        def body() -> Iterator[bytes]:
            yield boundary + b'"purpose"\r\n\r\nfine-tune\r\n'
            yield boundary + b'"file"; filename="t.jsonl"\r\n\r\n' + content[:1000]
            halfway.wait(30)
            yield content[1000:] + b"\r\n--x--\r\n"

        form = {"Content-Type": "multipart/form-data; boundary=x"}
        url = f"{parts.settings.server}/v1/files"
        return httpx.post(url, content=body(), headers=form, timeout=60).status_code

    with ThreadPoolExecutor(5) as pool:
        statuses = list(pool.map(upload, range(5)))
    assert 429 in statuses and set(statuses) <= {200, 429}
    stored = TrainingFiles(parts.settings.files)
    assert len(stored.list_files("local")) == statuses.count(200)
    assert stored.measure_team("local") <= 9000


def send_endlessly(
    parts: Parts, most: int, before_the_end: Callable[[], object] = bool
) -> httpx.Response:
    """Upload a file whose length is not told."""
    sent = 0
    piece = lines(*[TEXT_ROW] * 1000)

    def body() -> Iterator[bytes]:
        nonlocal sent
        boundary = b"--x\r\nContent-Disposition: form-data; name="
        yield boundary + b'"purpose"\r\n\r\nfine-tune\r\n'
        yield boundary + b'"file"; filename="t.jsonl"\r\n\r\n'
        while sent < most:
            yield piece
            sent += len(piece)
        before_the_end()
        yield b"\r\n--x--\r\n"

    form = {"Content-Type": "multipart/form-data; boundary=x"}
    url = f"{parts.settings.server}/v1/files"
    return httpx.post(url, content=body(), headers=form, timeout=120)


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


def test_a_disk_that_gets_full_is_told_as_one(
    new_parts: Callable[..., Parts], tmp_path: Path
) -> None:
    """A limit on the size of a file stands for the disk: its error is one of a full disk."""
    parts = new_parts(disk_floor_bytes=0)
    api = parts.start_api()
    resource.prlimit(api.pid, resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    answer = send_endlessly(parts, 6 << 20)
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (507, "urn:potstill:problem:disk-full")


def test_a_damaged_record_of_a_file_hides_no_other_file(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts()
    parts.start_api()
    with connect(parts) as client:
        made = [
            client.files.create(file=("t.jsonl", lines(TEXT_ROW)), purpose="fine-tune").id
            for _ in range(5)
        ]
        files = TrainingFiles(parts.settings.files)
        damages = [b"", b"\xff", b"[]", b'{"id": "x", "bytes": "many"}']
        for file_id, damage in zip(made[1:], damages, strict=True):
            (files.locate("local", file_id).parent / "record.json").write_bytes(damage)
        assert [each.id for each in client.files.list()] == made[:1]
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(made[1])


def test_files_outlive_the_api(new_parts: Callable[..., Parts]) -> None:
    parts = new_parts(disk_floor_bytes=0)
    process = parts.start_api()
    with connect(parts) as client:
        made = client.files.create(file=("t.jsonl", lines(TEXT_ROW)), purpose="fine-tune")
        process.kill()
        process.wait()
        parts.start_api()
        assert client.files.retrieve(made.id) == made
        assert client.files.content(made.id).read() == lines(TEXT_ROW)


# ---------------------------------------------------------------------- jobs


def test_a_job_is_the_one_that_post_jobs_would_make(house: House) -> None:
    client = house.client("ann")
    training, validation = (
        house.upload("ann", lines(CHAT_ROW)),
        house.upload("ann", lines(CHAT_ROW)),
    )
    wanted = house.job(training, train={"max_steps": 7}, loss={"alpha": 0.3}, priority=7)
    made = client.fine_tuning.jobs.create(
        **wanted,
        validation_file=validation,
        suffix="novel",
        seed=11,
        metadata={"project": "austen"},
    )
    assert (made.status, made.training_file, made.validation_file) == (
        "queued",
        training,
        validation,
    )
    assert (made.seed, made.metadata, made.organization_id) == (11, {"project": "austen"}, "novels")
    assert (made.model, made.fine_tuned_model, made.result_files) == (wanted["model"], None, [])
    job = house.parts.job(made.id)
    assert (job.name, job.kind, job.owner, job.team) == ("novel", "distill", "ann", "novels")
    config = job.config
    assert config["data"]["format"] == "messages"
    assert (config["train"]["max_steps"], config["train"]["seed"]) == (7, 11)
    assert (config["loss"]["alpha"], config["priority"]) == (0.3, 7)
    assert client.fine_tuning.jobs.retrieve(made.id) == made
    assert house.client("amy").files.retrieve(training).id == training
    with pytest.raises(openai.NotFoundError):
        house.client("bob").fine_tuning.jobs.retrieve(made.id)


def test_the_text_is_read_once_by_default(house: House) -> None:
    made = house.submit("ann", house.upload("ann"))
    assert house.parts.job(made).config["train"]["epochs"] == 1


def test_the_same_idempotency_key_makes_one_job(house: House) -> None:
    file = house.upload("ann")
    headers = {"Idempotency-Key": "one"}
    assert len({house.submit("ann", file, extra_headers=headers) for _ in range(2)}) == 1


def method(kind: str = "distillation", **distillation: Any) -> dict[str, Any]:
    return {"type": kind, kind: distillation}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "another method": (
        {"method": method("supervised")},
        "Input should be 'distillation'",
        "method.type",
    ),
    "no teacher": ({"method": method()}, "required", "method.distillation.teacher"),
    "an unknown teacher": (
        {"method": method(teacher="./nowhere")},
        "nowhere",
        "method.distillation.teacher.model",
    ),
    "an unknown student": ({"model": "./nowhere"}, "nowhere", "model"),
    "an unknown file": ({"training_file": "file-none"}, "file-none", "training_file"),
    "a path": ({"training_file": "../../keys"}, "there is no file", "training_file"),
    "a name": ({"suffix": "My Model"}, "lower-case", "suffix"),
    "an unknown field": (
        {"extra_body": {"hyperparameters": {"n_epochs": 3}}},
        "unknown key 'hyperparameters'",
        "hyperparameters",
    ),
    "an unknown section": (
        {"method": method(teacher="t", hyperparameters={"trian": {}})},
        "Did you mean train?",
        "method.distillation.hyperparameters.trian",
    ),
    "a bad value": (
        {"method": method(teacher="t", hyperparameters={"train": {"max_steps": -1}})},
        "greater than or equal to 1",
        "method.distillation.hyperparameters.train.max_steps",
    ),
    "a field of its own": (
        {"method": method(teacher="t", hyperparameters={"data": {"train": "/etc/passwd"}})},
        "training_file",
        "method.distillation.hyperparameters.data.train",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_job_is_refused_at_its_field(house: House, case: str) -> None:
    changes, words, param = WRONG[case]
    file = house.upload("ann")
    with pytest.raises(openai.BadRequestError) as error:
        house.submit("ann", file, **changes)
    refused(error, words, param=param)


def test_a_validation_file_has_the_form_of_the_training_file(house: House) -> None:
    text, chats = house.upload("ann"), house.upload("ann", lines(CHAT_ROW))
    with pytest.raises(openai.BadRequestError) as error:
        house.submit("ann", text, validation_file=chats)
    refused(error, "messages", "jsonl", param="validation_file")


def test_jobs_are_listed_by_page_newest_first(house: House) -> None:
    client = house.client("bob")
    file = house.upload("bob")
    ids = [house.submit("bob", file, metadata={"n": str(i % 2)}) for i in range(5)]
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == ids[::-1]
    odd = client.fine_tuning.jobs.list(metadata={"n": "1"})
    assert [job.id for job in odd] == [ids[3], ids[1]]
    with pytest.raises(openai.BadRequestError, match="there is no job"):
        client.fine_tuning.jobs.list(after=house.submit("ann", house.upload("ann")))


def test_a_job_is_paused_resumed_and_cancelled(house: House) -> None:
    jobs = house.client("ann").fine_tuning.jobs
    made = house.submit("ann", house.upload("ann"))
    assert jobs.pause(made).status == "paused"  # type: ignore[comparison-overlap]
    assert jobs.resume(made).status == "queued"
    assert jobs.cancel(made).status == "cancelled"
    with pytest.raises(openai.ConflictError):
        jobs.resume(made)
    events = list(jobs.list_events(made, limit=2))
    assert events[0].message == "The job is cancelled."
    assert len(events) == len({event.id for event in events}) >= 4


def test_a_file_that_an_open_job_needs_is_not_deleted(house: House) -> None:
    file = house.upload("ann")
    made = house.submit("amy", file)
    with pytest.raises(openai.ConflictError) as error:
        house.client("ann").files.delete(file)
    refused(error, "of another key needs the file", "queued")
    with pytest.raises(openai.ConflictError, match=made):
        house.client("amy").files.delete(file)
    house.client("amy").fine_tuning.jobs.cancel(made)
    assert house.client("ann").files.delete(file).deleted


def test_changes_are_in_the_audit_log(house: House) -> None:
    client = house.client("ann")
    file = house.upload("ann")
    made = house.submit("ann", file)
    client.fine_tuning.jobs.cancel(made)
    client.files.delete(file)
    log = (house.parts.settings.home / "audit" / "audit.jsonl").read_text().splitlines()
    found = [(entry["action"], entry["target"]) for entry in map(json.loads, log)]
    assert found[-4:] == [
        ("file.create", file),
        ("job.create", made),
        ("job.cancel", made),
        ("file.delete", file),
    ]


def test_a_failed_job_says_why(house: House) -> None:
    made = house.submit("ann", house.upload("ann"))
    claim = house.parts.jobs.claim(made, "precompute", "worker", 600)
    assert claim is not None
    tell(house.parts, claim, ("warning", {"message": "The text is short."}))
    error = {"type": "data_error", "detail": "The text is too short.", "remedy": "Add text."}
    house.parts.jobs.finish(claim, "failed", error)
    job = house.client("ann").fine_tuning.jobs.retrieve(made)
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("data_error", "The text is too short. Add text.")
    levels = {
        (event.level, event.message)
        for event in house.client("ann").fine_tuning.jobs.list_events(made)
    }
    assert ("warn", "The text is short.") in levels
    assert "error" in {level for level, _ in levels}


def test_a_job_of_another_kind_is_not_shown(house: House) -> None:
    made = house.parts.jobs.create(make_config("quick"), Caller("ann", named_team="novels")).id
    with pytest.raises(openai.NotFoundError, match="kind train"):
        house.client("ann").fine_tuning.jobs.retrieve(made)
    assert made not in {job.id for job in house.client("ann").fine_tuning.jobs.list()}


def test_a_new_student_needs_a_description(house: House) -> None:
    file = house.upload("ann")
    new = house.job(file, student={"from_teacher": {"layers": 1}}) | {"model": "new"}
    job = house.client("ann").fine_tuning.jobs.create(**new)
    assert job.model == "new"
    shown = house.parts.job(job.id).config["student"]
    assert shown["model"] is None
    assert shown["from_teacher"]["layers"] == 1
    with pytest.raises(openai.BadRequestError) as error:
        house.submit("ann", file, model="new")
    refused(error, "student.init", param="method.distillation.hyperparameters.student")


# ---------------------------------------------------------------------- a real training


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_page_s_program_distils_a_student(
    new_parts: Callable[..., Parts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program of docs/how-to/openai.md runs against a real service with a real worker."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    parts = new_parts(
        child_module="services.worker.child", root=tmp_path, disk_floor_bytes=0, silence_seconds=300
    )
    parts.start_api()
    parts.start_worker()
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in list_blocks(ROOT / "docs" / "how-to" / "openai.md", "python"):
        program = block.text.replace("http://127.0.0.1:8000", parts.settings.server)
        exec(compile(program, block.name, "exec"), space)  # noqa: S102
    job = space["job"]
    assert job.status == "succeeded", job
    assert (Path(job.fine_tuned_model) / "config.json").is_file()
    assert job.model == "new"
    record: Job = parts.job(job.id)
    steps = record.metrics.step
    assert steps == 20
    # Tokens that begin a document have no token before them to be learned from.
    assert 0.9 < job.trained_tokens / (20 * 8 * 64) < 1
    client: OpenAI = space["client"]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert [each.step_number for each in checkpoints] == [steps], "a finished run keeps the last"
    table = client.files.content(job.result_files[0]).text.splitlines()
    assert table[0].startswith("step,")
    assert int(table[-1].split(",")[0]) == steps
    assert client.files.retrieve(job.result_files[0]).bytes == len(
        client.files.content(job.result_files[0]).read()
    )
    kinds = {event.type for event in client.fine_tuning.jobs.list_events(job.id, limit=50)}
    assert kinds == {"message", "metrics"}
    client.close()
