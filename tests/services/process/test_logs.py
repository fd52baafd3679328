"""The log of a process: its form, its job and request, and no secrets."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import traceback
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from services.process.logs import (
    Handler,
    bound,
    choose_request_id,
    find_secrets,
    make_formatter,
    redact,
    request_id,
    shorten_path,
)
from services.process.streams import UnfailingStream
from services.settings import Settings

KEY = "kd_" + "Ab3-_" * 8 + "xyz"
SECRETS = {
    "api key": KEY,
    "hub token": "hf_" + "aB1" * 11,
    "webhook secret": "whsec_" + "bWluZSBhbG9uZQ==",
    "header": f"Authorization: Bearer {KEY}",
    "header of another scheme": "authorization: Digest username=mine",
    "headers as a tuple": f"(b'authorization', b'Bearer {KEY}')",
    "bearer token": "Bearer eyJhbGciOiJIUzI1NiJ9.mine",
    "password of a URL": "redis://:mine@127.0.0.1:6379/0",
    "user and password of a URL": "https://me:mi:ne@example.org/path",
    "password with an at sign": "redis://:mi@ne@host:1/0",
    "assignment": "KD_API_KEY=mine-alone",
    "JSON": '{"password": "mine"}',
    "server configuration": "requirepass mine",
}


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_a_secret_is_hidden(text: str) -> None:
    shown = redact(f"before; {text}")
    assert shown.startswith("before; ")
    assert "***" in shown
    assert not re.search(r"mine|mi:ne|mi@ne|ne@|Ab3|aB1|bWlu|eyJ", shown)


@pytest.mark.parametrize(
    "text",
    [
        "kd_reconciler_last_run_timestamp_seconds is 0",
        "GET http://127.0.0.1:8000/jobs/job_01jd failed",
        "redis://127.0.0.1:6379/0 does not answer",
        "tokens: 5, token 7 of 12, the secret of a good cup",
        "mail me@example.org at 10:30",
        "bearer bonds",
        "KD_WEBHOOK_SECRET_FILE=/run/webhook",
        "config.json: loss.alpha=0.1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


PIECES = [
    *SECRETS.values(),
    "://",
    "@",
    ":",
    "=",
    "***",
    "secret",
    "password",
    "kd_",
    "Bearer ",
    " ",
    "\n",
    "'",
    "a" * 50,
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_hiding_is_idempotent(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "scheme", ["redis", "_redis", "-redis", "...redis", "+r", "1.redis", "a.b+c-1", "x" * 50]
)
def test_the_password_of_a_url_is_hidden_whatever_its_scheme_and_what_stands_before_it(
    scheme: str,
) -> None:
    assert (
        redact(f"to{scheme}://me:mine@host/0 {scheme}://:mine@host")
        == f"to{scheme}://me:***@host/0 {scheme}://:***@host"
    )


HOSTILE = [
    "a",
    "a.",
    "a-b:",
    "a://",
    "://x:",
    "a://x:y:",
    "kd_",
    "kd_-",
    "hf_.",
    "whsec_-",
    "authorization:",
    "bearer x-",
]
HOSTILE += [
    "authorization ",
    "authorization:\n",
    "bearer ",
    "password",
    "password= ",
    "requirepass ",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("filler", ["", " " * 200_000], ids=["", "and spaces"])
def test_hiding_is_quick_on_any_text(piece: str, filler: str) -> None:
    text = piece * (200_000 // len(piece)) + filler
    before = process_time()
    redact(text)
    assert process_time() - before < 2


def test_a_path_is_told_in_its_beginning_and_without_secrets() -> None:
    assert shorten_path("/jobs/job_1") == "/jobs/job_1"
    assert shorten_path("/" + "a." * 40_000) == "/" + "a." * 999 + "a..."
    assert shorten_path("/" + "a" * 1980 + f"/{KEY}") == "/" + "a" * 1980 + "/kd_***..."


def test_known_secrets_are_hidden_word_by_word() -> None:
    environment = {
        "HF_TOKEN": "a plain word",
        "KD_API_KEY": "quite-another",
        "KD_API_KEYS_FILE": "/run/secrets/keys",
    }
    settings = Settings(redis_url="redis://:correct-horse@127.0.0.1:1/0")
    hidden = find_secrets(settings, environment)
    assert set(hidden) == {"a plain word", "quite-another", "correct-horse"}
    assert redact("a plain word, quite-another or correct-horse", hidden) == "***, *** or ***"


def line_of(form: str, message: Any, *arguments: Any, **record: Any) -> str:
    extra = record.pop("extra", {})
    made = logging.getLogger("potstill.test").makeRecord(
        "potstill.test",
        logging.WARNING,
        "file.py",
        1,
        message,
        arguments,
        record.get("exc_info"),
        extra=extra,
    )
    return make_formatter(form, ("correct-horse",), {"part": "api"}).format(made)


def fields_of(*arguments: Any, **record: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(line_of("json", *arguments, **record))
    return fields


def test_a_json_line_tells_whom_it_concerns() -> None:
    with bound(job_id="job_1", attempt=2, fence=0, request_id=""):
        fields = fields_of(
            "stage %s", "train", extra={"steps": [1, 2], "path": ROOT, "color_message": "%s"}
        )
    assert list(fields)[:4] == ["ts", "level", "logger", "msg"]
    assert datetime.fromisoformat(fields.pop("ts")).tzinfo is not None
    assert fields == {
        "level": "warning",
        "logger": "potstill.test",
        "msg": "stage train",
        "job_id": "job_1",
        "attempt": 2,
        "fence": 0,
        "part": "api",
        "steps": [1, 2],
        "path": str(ROOT),
    }
    assert "job_id" not in fields_of("afterwards")


def test_the_request_that_is_answered_is_named() -> None:
    token = request_id.set("req_1")
    try:
        assert fields_of("text")["request_id"] == "req_1"
        with bound(request_id="req_of_the_job"):
            assert fields_of("text")["request_id"] == "req_of_the_job"
    finally:
        request_id.reset(token)


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_part_of_a_line_shows_a_secret(form: str) -> None:
    try:
        raise ValueError("redis://:mine@host refused correct-horse")
    except ValueError:
        trace = sys.exc_info()
    extra = {
        "password": "mine",
        "auth_token": "mine",
        "deep": {"list": ["hf_" + "mine" * 9]},
        "headers": {b"x": KEY},
    }
    line = line_of(form, "correct-horse %s", "whsec_" + "mine" * 4, exc_info=trace, extra=extra)
    assert "ValueError" in line
    assert not re.search("mine|horse|Ab3", line)


def test_an_event_cannot_pose_as_two() -> None:
    forged = "one\n2026-01-01T00:00:00Z info potstill: two\x1b[2J"
    assert "\n" not in line_of("json", "%s", forged)
    line = line_of("console", "%s", forged, extra={"field": forged})
    assert "\n" not in line
    assert "\x1b" not in line


@pytest.mark.parametrize("offered", ["a", "req_1.2:3-4", "x" * 128])
def test_a_sane_request_id_is_taken_over(offered: str) -> None:
    assert choose_request_id(offered) == offered


@pytest.mark.parametrize("offered", [None, "", "x" * 129, "a b", "a\nb", "ä", "-x", "%0a", "{}"])
def test_another_is_replaced(offered: str | None) -> None:
    assert re.fullmatch(r"req_[0-9a-f]{32}", choose_request_id(offered))
    assert choose_request_id(offered) != choose_request_id(offered)


def run(program: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code and lines of a process that has configured its log and then runs ``program``."""
    head = (
        "import logging, sys, threading, warnings; "
        "from services.process.logs import configure, bound\n"
    )
    head += "from services.settings import Settings\nconfigure(Settings(), part='test')\n"
    command = [sys.executable, "-c", head + program]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**environment},
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_a_process_logs_lines_of_json_whoever_speaks() -> None:
    program = """
import structlog
from structlog.contextvars import bind_contextvars
logging.getLogger("uvicorn.error").info("Started server process [%d]", 1)
logging.getLogger("celery.worker").warning("lost connection")
structlog.get_logger("potstill.part").info("ours", job_id="job_1")
bind_contextvars(job_id="job_2")
logging.getLogger("potstill.part").debug("not told")
warnings.warn("take care")
logging.getLogger("potstill.part").info("bound")
configure(Settings(), part='again')
logging.getLogger("potstill.part").info("once")
"""
    code, lines = run(program, KD_LOG_FORMAT="json")
    assert code == 0
    told = [
        (line["logger"], line["msg"], line.get("job_id"), line["part"]) for line in parsed(lines)
    ]
    assert told == [
        ("uvicorn.error", "Started server process [1]", None, "test"),
        ("celery.worker", "lost connection", None, "test"),
        ("potstill.part", "ours", "job_1", "test"),
        ("py.warnings", "<string>:12: UserWarning: take care\n", "job_2", "test"),
        ("potstill.part", "bound", "job_2", "test"),
        ("potstill.part", "once", "job_2", "again"),
    ]


@pytest.mark.long
def test_a_process_that_dies_of_an_error_says_so_in_its_form_and_without_secrets() -> None:
    program = """
thread = threading.Thread(target=lambda: [][1], name="helper")
thread.start(); thread.join()
raise RuntimeError("no answer from redis://:mine@host: correct-horse")
"""
    code, lines = run(program, KD_LOG_FORMAT="json", KD_API_KEY="correct-horse")
    first, last = parsed(lines)
    assert code == 1
    assert (first["level"], first["msg"]) == ("critical", "helper ended")
    assert "IndexError" in first["exception"]
    assert last["msg"] == "this process ends: RuntimeError"
    assert "redis://:***@host: ***" in last["exception"]
    assert not re.search("mine|horse", "".join(lines))


def test_a_line_that_cannot_be_formatted_is_told_of_without_its_arguments() -> None:
    code, lines = run('logging.getLogger("potstill.part").info("%d steps", "mine")')
    assert code == 0
    assert len(lines) == 1
    assert "a line of potstill.part" in lines[0]
    assert "TypeError" in lines[0]
    assert "mine" not in lines[0]


def test_a_log_on_a_full_disk_raises_nothing_and_says_later_what_is_missing() -> None:
    with Path("/dev/full").open("w") as full:
        handler = Handler(full)
        handler.setFormatter(make_formatter("console", (), {}))
        for number in range(3):
            handler.handle(make_record("line %d", number))
        handler.stream = io.StringIO()
        handler.handle(make_record("line %d", 3))
        handler.handle(make_record("line %d", 4))
        end_of_cut_line, report, *lines = handler.stream.getvalue().splitlines()
        with suppress(OSError):
            full.close()
    assert end_of_cut_line == ""
    assert "3 lines are missing here" in report and "No space left" in report
    assert [line.rpartition(": ")[2] for line in lines] == ["line 3", "line 4"]


def test_a_closed_log_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    Handler(closed).handle(make_record("line"))


def make_record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("potstill", logging.INFO, "file.py", 1, message, arguments, None)


def test_prints_to_a_full_disk_raise_nothing() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        stream = UnfailingStream(full.fileno())
        print("a line", file=stream)
        stream.flush()
        traceback.print_stack(file=stream)


def test_a_console_line_reads_well_and_a_traceback_follows_it() -> None:
    program = """
with bound(job_id="job_1", attempt=1, fence=3):
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("potstill.worker").exception("stage %s", "train")
"""
    _, lines = run(program)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT[\d:.]+Z error potstill.worker: stage train "
        r"job_id=job_1 attempt=1 fence=3 part=test",
        lines[0],
    )
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
