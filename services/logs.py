"""What a process of the service logs: a line an event, with whom it concerns and without any secret.

    ours, uvicorn's, Celery's, warnings, uncaught errors -> root logger -> whom it concerns -> redact --+--> console
                                                                                                        '--> json

    console   2026-11-21T12:00:00.000000Z info potstill.worker: stage train job_id=job_... attempt=1 fence=1
    json      {"ts", "level", "logger", "msg", "request_id", "job_id", "attempt", "fence", ...}, those that are known

A module logs with ``logging.getLogger("potstill.part")``, and ``extra={...}`` adds fields. Uvicorn is started with
``log_config=None``, so that its loggers come here as well.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import structlog
from celery import signals
from structlog.contextvars import bind_contextvars, bound_contextvars, merge_contextvars
from structlog.typing import EventDict, Processor

from services.settings import Settings

#: The id of the request that is being answered; empty elsewhere.
request_id: ContextVar[str] = ContextVar("request_id", default="")

#: They tell of every request that we make and of every hint that comes, most of which mean nothing.
TALKATIVE = ("httpx", "celery.worker.strategy", "celery.app.trace")

FIELDS = ("ts", "level", "logger", "msg", "request_id", "job_id", "attempt", "fence")
SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

HIDDEN = "***"
#: Whoever calls may choose the text: none of these takes longer than in proportion to it.
SECRETS = (
    (re.compile(r"\bkd_[A-Za-z0-9_-]{40,}"), "kd_" + HIDDEN),  # 256 bits; the name of a metric is shorter
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_" + HIDDEN),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=_-]{8,}"), "whsec_" + HIDDEN),
    (re.compile(r"(?i)\b(authorization\b['\"]?\s*[:=,]\s*(?:b?['\"])?)[^'\"\r\n]+"), r"\1" + HIDDEN),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{16,}"), r"\1 " + HIDDEN),
    (re.compile(r"(://[^\s:/@?#'\"]*):[^\s/?#'\"]+@"), r"\1:" + HIDDEN + "@"),  # whatever the scheme
    (re.compile(r"(?i)(password|secret|api[_-]?key|(?:access|auth)[_-]token)(['\"]?\s*[=:]\s*['\"]?)[^\s'\",;&]+"),
     r"\1\2" + HIDDEN),
    (re.compile(r"(?i)\b(requirepass|masterauth)\s+\S+"), r"\1 " + HIDDEN),
)  # fmt: skip
SECRET_NAME = re.compile(r"(?i).*(password|secret|api_?key|authorization|cookie|(^|_)token)")
SHORTEST_SECRET = 8
LONGEST_PATH = 2000

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {9: "\t", 10: "\\n", 13: "\\r"}


def configure(settings: Settings, **fields: Any) -> None:
    """Send every log line of this process to stderr in the form that ``log_format`` names, ``fields`` in each."""
    structlog.configure(
        processors=[*_origin(fields), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = Handler(sys.stderr)
    handler.setFormatter(formatter(settings.log_format, literals(settings), fields))
    root = logging.getLogger()
    root.handlers = [other for other in root.handlers if not isinstance(other, Handler)] + [handler]
    root.setLevel(logging.INFO)
    for talkative in TALKATIVE:
        logging.getLogger(talkative).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    signals.setup_logging.connect(_leave_alone, weak=False)
    sys.excepthook, threading.excepthook = _uncaught, _uncaught_in_thread


def formatter(form: str, hidden: tuple[str, ...], fields: Mapping[str, Any]) -> logging.Formatter:
    """The formatter of ``form``, json or console; ``hidden`` are secrets that are known word by word."""
    render: Processor = _json_line if form == "json" else _console_line
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_origin(fields), structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("msg"),
            _redactor(hidden),
            render,
        ],
    )


def bind(**fields: Any) -> None:
    """Put fields into every further line of this thread or task."""
    bind_contextvars(**fields)


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Put fields into every line of the block; empty ones are left out."""
    with bound_contextvars(**{name: value for name, value in fields.items() if value not in (None, "")}):
        yield


def request_id_of(offered: str | None) -> str:
    """The id that a client gave to its request, if it is a sane one; else a new one."""
    return offered if offered and SANE_REQUEST_ID.fullmatch(offered) else f"req_{secrets.token_hex(16)}"


def redact(text: str, hidden: tuple[str, ...] = ()) -> str:
    """``text`` without keys, tokens and passwords, nor the words in ``hidden``."""
    for word in hidden:
        text = text.replace(word, HIDDEN)
    for pattern, shown in SECRETS:
        text = pattern.sub(shown, text)
    return text


def shown(path: str) -> str:
    """A request's path as a line tells it: no longer than makes sense, for clients send any."""
    if len(path) <= LONGEST_PATH:
        return path
    return redact(path)[:LONGEST_PATH] + "..."  # hidden first: of a key that is cut nobody would see what it was


def literals(settings: Settings, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The secrets that this process was given, longest first: they are hidden wherever they stand."""
    given = [value for name, value in environment.items() if SECRET_NAME.fullmatch(name)]
    password = re.search(r"://[^:/@]*:(.+)@", settings.redis_url or "")
    given += [password[1]] if password else []
    return tuple(sorted({word for word in given if len(word) >= SHORTEST_SECRET}, key=len, reverse=True))


ELSEWHERE = ("exception", "color_message")  #: told last; and uvicorn's text once more, with codes for a terminal


class Handler(logging.StreamHandler[Any]):
    """Writes to stderr. A line that cannot be formatted is told of without its arguments: these may hold secrets."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by logging in the ``except`` of a failed write."""
        error = sys.exc_info()[0]
        name = error.__name__ if error else "error"
        sys.stderr.write(f"a line of {record.name} at {record.pathname}:{record.lineno} was not logged: {name}\n")


def _origin(fields: Mapping[str, Any]) -> list[Processor]:
    """What every line tells: when, how bad, who says so, and whom it concerns."""

    def concern(_: Any, __: str, event: EventDict) -> EventDict:
        if current := request_id.get():
            event.setdefault("request_id", current)
        return {**fields, **event}

    return [
        merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        concern,
    ]


def _redactor(hidden: tuple[str, ...]) -> Processor:
    """Hides secrets in every text of an event, however deep it lies."""

    def clean(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {str(name): HIDDEN if _is_secret(str(name), item) else clean(item) for name, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [clean(item) for item in value]
        return redact(str(value), hidden)

    def processor(_: Any, __: str, event: EventDict) -> EventDict:
        cleaned: EventDict = clean(event)
        return cleaned

    return processor


def _is_secret(name: str, value: Any) -> bool:
    return SECRET_NAME.fullmatch(name) is not None and not isinstance(value, bool | int | float | None)


def _in_order(event: EventDict) -> dict[str, Any]:
    """The fields that every line has, then the others, then a traceback."""
    known = {name: event[name] for name in FIELDS if name in event}
    others = {name: value for name, value in event.items() if name not in (*FIELDS, *ELSEWHERE)}
    trace = {"exception": event["exception"]} if "exception" in event else {}
    return known | others | trace


def _json_line(_: Any, __: str, event: EventDict) -> str:
    return json.dumps(_in_order(event), ensure_ascii=False, default=str)


def _console_line(_: Any, __: str, event: EventDict) -> str:
    fields = _in_order(event)
    head = [str(fields.pop(name, "")) for name in ("ts", "level", "logger", "msg")]
    trace = fields.pop("exception", None)
    tail = "".join(f" {name}={value}" for name, value in fields.items())
    line = f"{head[0]} {head[1]} {head[2]}: {head[3]}{tail}".translate(CONTROLS)  # one event cannot pose as two
    return f"{line}\n{trace.translate(CONTROLS | {10: 10})}" if trace else line


def _leave_alone(**_: Any) -> None:
    """Celery sets up no logging of its own where somebody listens to this signal."""


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("potstill").critical("this process ends: %s", kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and failed.exc_type is not SystemExit:
        name = failed.thread.name if failed.thread else "a thread"
        logging.getLogger("potstill").critical("%s ended", name, exc_info=failed.exc_value)
