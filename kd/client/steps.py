"""What an operation asks of the client that runs it: to send, to read, to pause.

An operation is a generator of these steps. It decides what is sent and what an answer means; a
client carries the steps out, in a thread (``kd.client.sync``) or in an event loop
(``kd.client.asynchronous``). So each operation is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

#: Seconds within which the server must send something.
READ_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """One HTTP request. A value of None in ``query`` is left out; ``body`` is JSON."""

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    read_seconds: float = READ_SECONDS

    @property
    def parameters(self) -> dict[str, Any]:
        """The query without the values of None."""
        return {name: value for name, value in self.query.items() if value is not None}


@dataclass(frozen=True)
class Answer:
    """The answer to a request; ``content`` is empty while its stream is still to be read.

    The names of ``headers`` are in lower case.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes = b""

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return 200 <= self.status < 300


@dataclass(frozen=True)
class Send:
    """Send a request. The result is the whole ``Answer``."""

    request: Request


@dataclass(frozen=True)
class Open:
    """Send a request. The result is the ``Answer``; ``Read`` reads the content of a success."""

    request: Request


@dataclass(frozen=True)
class Read:
    """Read from the opened answer. The result is a piece of its content; None at the end."""


@dataclass(frozen=True)
class Pause:
    """Do nothing for some seconds."""

    seconds: float


@dataclass(frozen=True)
class Invoke:
    """Call a function that takes long, such as one that reads a large file."""

    call: Callable[[], Any]


@dataclass(frozen=True)
class Emit:
    """Hand an item to the caller."""

    item: Any


@dataclass(frozen=True)
class Returned:
    """The operation has ended with this result."""

    value: Any


Step = Send | Open | Read | Pause | Invoke | Emit
#: An operation whose result is a ``T``. A lost connection is raised in it as ``Unreachable``.
Steps = Generator[Step, Any, T]
