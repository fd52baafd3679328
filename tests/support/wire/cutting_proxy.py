"""A TCP proxy that cuts connections after a given number of bytes of answers."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress


class CuttingProxy:
    """Passes bytes on to a port of this machine.

    ``limits`` holds one number for each of the next connections: the bytes of answers after which
    it is cut. Connections beyond them are never cut. With a limit of 0 the request arrives, and its
    answer is lost.
    """

    def __init__(self, port: int, limits: Iterable[int] = ()) -> None:
        self.limits = deque(limits)
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    @property
    def url(self) -> str:
        """The address under which the proxy is called."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """End all connections."""
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                limit = self.limits.popleft() if self.limits else None
                self._start(self._pass_on, near, far, None)
                self._start(self._pass_on, far, near, limit)

    @staticmethod
    def _pass_on(source: socket.socket, goal: socket.socket, limit: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                kept = piece if limit is None else piece[: limit - passed]
                goal.sendall(kept)
                passed += len(piece)
                if limit is not None and passed >= limit:
                    break
        for each in (source, goal):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting(port: int, *limits: int) -> Iterator[CuttingProxy]:
    """Run a proxy until the block ends."""
    proxy = CuttingProxy(port, limits)
    try:
        yield proxy
    finally:
        proxy.close()
