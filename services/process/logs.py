"""The log of a process: one line for each event, with its job and request, without secrets.

    our loggers, uvicorn, Celery, warnings, uncaught errors
        -> root logger -> add job and request -> redact -> console or json

    console  2026-11-21T12:00:00.000000Z info potstill.worker: stage train job_id=job_... fence=1
    json     {"ts", "level", "logger", "msg", "request_id", "job_id", "attempt", "fence", ...}

A line contains the fields that are known. A module logs with
``logging.getLogger("potstill.part")``; ``extra={...}`` adds fields. Uvicorn starts with
``log_config=None``, so that its loggers use this one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import structlog
from celery import signals
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.typing import EventDict, Processor

from services.settings import Settings

#: The id of the request in progress; empty outside a request.
request_id: ContextVar[str] = ContextVar("request_id", default="")

#: Loggers that write a line for every request that we send and every hint that comes.
TALKATIVE = ("httpx", "celery.worker.strategy", "celery.app.trace")

#: Fields that come first in a line, in this order.
FIELDS = ("ts", "level", "logger", "msg", "request_id", "job_id", "attempt", "fence")
#: Request ids that a client may choose.
SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

MASK = "***"
#: Patterns of secrets. A client may choose the text, so each pattern takes linear time.
SECRETS = (
    (re.compile(r"\bkd_[A-Za-z0-9_-]{40,}"), "kd_" + MASK),  # longer than any metric
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_" + MASK),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=_-]{8,}"), "whsec_" + MASK),
    (re.compile(r"(?i)\b(authorization\b['\"]?\s*[:=,]\s*(?:b?['\"])?)[^'\"\r\n]+"), r"\1" + MASK),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{16,}"), r"\1 " + MASK),
    (re.compile(r"(://[^\s:/@?#'\"]*):[^\s/?#'\"]+@"), r"\1:" + MASK + "@"),  # any scheme
    (re.compile(r"(?i)(password|secret|api[_-]?key|(?:access|auth)[_-]token)(['\"]?\s*[=:]\s*['\"]?)[^\s'\",;&]+"),
     r"\1\2" + MASK),
    (re.compile(r"(?i)\b(requirepass|masterauth)\s+\S+"), r"\1 " + MASK),
)  # fmt: skip
#: Names of fields and variables whose value is a secret.
SECRET_NAME = re.compile(r"(?i).*(password|secret|api_?key|authorization|cookie|(^|_)token)")
#: Shorter secrets are not hidden: they would hide ordinary words.
SHORTEST_SECRET = 8
#: Characters of a request's path in a line.
LONGEST_PATH = 2000

#: Control characters -> how the console shows them.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {9: "\t", 10: "\\n", 13: "\\r"}


def configure(settings: Settings, **fields: Any) -> None:
    """Send the log of this process to stderr in the settings' ``log_format``, with these fields."""
    structlog.configure(
        processors=[
            *_build_processors(fields),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = Handler(sys.stderr)
    handler.setFormatter(make_formatter(settings.log_format, find_secrets(settings), fields))
    root = logging.getLogger()
    root.handlers = [other for other in root.handlers if not isinstance(other, Handler)] + [handler]
    root.setLevel(logging.INFO)
    for talkative in TALKATIVE:
        logging.getLogger(talkative).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    signals.setup_logging.connect(_leave_alone, weak=False)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def make_formatter(
    form: str, hidden: tuple[str, ...], fields: Mapping[str, Any]
) -> logging.Formatter:
    """Make the formatter of ``form``, json or console. ``hidden`` lists secrets to hide."""
    as_json = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    render: Processor = as_json if form == "json" else _render_console
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_build_processors(fields), structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("msg"),
            lambda _, __, event: _clean(event, hidden),
            _order_fields,
            render,
        ],
    )


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Put fields into every line of the block. Empty values are left out."""
    known = {name: value for name, value in fields.items() if value not in (None, "")}
    with bound_contextvars(**known):
        yield


def choose_request_id(offered: str | None) -> str:
    """Use the request id that a client offers if its form is allowed; else make one."""
    if offered and SANE_REQUEST_ID.fullmatch(offered):
        return offered
    return f"req_{secrets.token_hex(16)}"


def redact(text: str, hidden: tuple[str, ...] = ()) -> str:
    """``text`` without keys, tokens, passwords and the words in ``hidden``."""
    for word in hidden:
        text = text.replace(word, MASK)
    for pattern, shown in SECRETS:
        text = pattern.sub(shown, text)
    return text


def shorten_path(path: str) -> str:
    """Cut a request's path to a length that suits a line."""
    if len(path) <= LONGEST_PATH:
        return path
    # Hide secrets first: no pattern would find a key that is cut.
    return redact(path)[:LONGEST_PATH] + "..."


def find_secrets(
    settings: Settings, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The secrets in the environment and the settings, longest first."""
    given = [value for name, value in environment.items() if SECRET_NAME.fullmatch(name)]
    password = re.search(r"://[^:/@]*:(.+)@", settings.redis_url or "")
    given += [password[1]] if password else []
    return tuple(
        sorted({word for word in given if len(word) >= SHORTEST_SECRET}, key=len, reverse=True)
    )


class Handler(logging.StreamHandler[Any]):
    """Writes lines, and never raises: a log that cannot be written must not end what it is about.

    Lines that the disk does not take are counted. The first line that it takes again comes after
    one that says how many are missing. A line that cannot be formatted is replaced by its place.
    """

    def __init__(self, stream: Any = None) -> None:
        super().__init__(stream)
        self._missing = 0
        self._reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line. ``logging`` calls this."""
        try:
            text = self.format(record) + self.terminator
            self.stream.write(self._describe_missing() + text)
            self.flush()
        except OSError as error:
            self._missing += 1
            self._reason = error.strerror or type(error).__name__
        except Exception:
            self.handleError(record)
        else:
            self._missing = 0

    def handleError(self, record: logging.LogRecord) -> None:
        """Write the place of a line that cannot be formatted."""
        error = sys.exc_info()[0]
        name = error.__name__ if error else "error"
        # ValueError: the stream is closed.
        with suppress(OSError, ValueError):
            sys.stderr.write(
                f"a line of {record.name} at {record.pathname}:{record.lineno} was not logged:"
                f" {name}\n"
            )

    def _describe_missing(self) -> str:
        """The line about missing lines, or nothing. The line before it may be cut: it is ended."""
        if not self._missing:
            return ""
        message = "%d lines are missing here: the log could not be written (%s)"
        counted = (self._missing, self._reason)
        name = "potstill.log"
        record = logging.LogRecord(name, logging.WARNING, __file__, 0, message, counted, None)
        return f"{self.terminator}{self.format(record)}{self.terminator}"


def _build_processors(fields: Mapping[str, Any]) -> list[Processor]:
    """Processors that add time, level, logger, request and the given fields."""

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


def _clean(value: Any, hidden: tuple[str, ...], name: str = "") -> Any:
    """Hide the secrets in every text of a value, at any depth; ``name`` is that of its field."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if SECRET_NAME.fullmatch(name):
        return MASK
    if isinstance(value, Mapping):
        return {str(key): _clean(item, hidden, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(item, hidden) for item in value]
    return redact(str(value), hidden)


def _order_fields(_: Any, __: str, event: EventDict) -> EventDict:
    """The fields that every line has, then the others, then the traceback."""
    event.pop("color_message", None)  # uvicorn's text again, with terminal codes
    trace = {"exception": event.pop("exception")} if "exception" in event else {}
    known = {name: event[name] for name in FIELDS if name in event}
    return {**known, **event, **trace}


def _render_console(_: Any, __: str, fields: EventDict) -> str:
    head = [str(fields.pop(name, "")) for name in ("ts", "level", "logger", "msg")]
    trace = fields.pop("exception", None)
    tail = "".join(f" {name}={value}" for name, value in fields.items())
    # Line breaks are escaped, so that one event cannot look like two.
    line = f"{head[0]} {head[1]} {head[2]}: {head[3]}{tail}".translate(CONTROLS)
    return f"{line}\n{trace.translate(CONTROLS | {10: 10})}" if trace else line


def _leave_alone(**_: Any) -> None:
    """Do nothing. Celery sets up no logging while this signal has a receiver."""


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("potstill").critical(
        "this process ends: %s", kind.__name__, exc_info=(kind, error, trace)
    )


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and failed.exc_type is not SystemExit:
        name = failed.thread.name if failed.thread else "a thread"
        logging.getLogger("potstill").critical("%s ended", name, exc_info=failed.exc_value)
