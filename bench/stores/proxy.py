"""A proxy in front of an S3 server that does wrong what servers and networks do wrong.

Each request asks ``choose`` for a fault:

    ""           none
    refused      500 before the server has seen the request
    busy         503 with Retry-After
    throttled    429
    late         the answer comes after a pause
    cut          the connection ends before the server has seen the request
    lost         the server does what is asked, and the connection ends before the answer
    short        the answer ends in the middle of its body
    expired      403: the credentials have expired
    full         403: the bucket is full; writes alone
    deaf         conditions are taken out of the request
    denied       403: the key may not do this
    unknown      403: there is no such key
    moved        301 without a place to go to: the bucket is in another region

With a region the proxy refuses requests that are signed for another one, as Amazon's servers do.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Method and path of a request -> the fault.
Choose = Callable[[str, str], str]

#: Faults that a client overcomes by itself, and those that end a job.
PASSING = ("refused", "busy", "throttled", "late", "cut", "lost", "short")
LASTING = ("expired", "full")
ANSWERS = {
    "refused": (500, "InternalError", "We encountered an internal error."),
    "busy": (503, "SlowDown", "Please reduce your request rate."),
    "throttled": (429, "TooManyRequests", "Too many requests."),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
    "full": (403, "QuotaExceeded", "The bucket quota is exceeded."),
    "denied": (403, "AccessDenied", "Access Denied."),
    "unknown": (403, "InvalidAccessKeyId", "The key does not exist in our records."),
    "moved": (301, "PermanentRedirect", "The bucket must be addressed at another endpoint."),
}
_LATE_SECONDS = 0.3
#: The region in the scope of a signature.
_REGION = re.compile(r"Credential=[^/]+/\d{8}/([^/]+)/s3/")


class Proxy:
    """A running proxy: its port, its faults so far, and what chooses the next ones."""

    def __init__(self, server_port: int, choose: Choose, region: str = "") -> None:
        self.choose = choose
        self.region = region
        self.faults: Counter[str] = Counter()
        self.headers: list[str] = []
        self._server_port = server_port
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                # A client that was killed or gave up waits for no answer.
                with suppress(BrokenPipeError, ConnectionResetError):
                    proxy._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        fault = self.choose(request.command, request.path)
        if fault == "full" and request.command not in ("PUT", "POST"):
            fault = ""
        if fault:
            self.faults[fault] += 1
        signed = _REGION.search(request.headers.get("Authorization", ""))
        if self.region and signed is not None and signed[1] != self.region:
            message = (
                f"The authorization header is malformed; the region '{signed[1]}' is wrong; "
                f"expecting '{self.region}'"
            )
            self._refuse(request, 400, "AuthorizationHeaderMalformed", message)
            return
        if fault in ANSWERS:
            self._refuse(request, *ANSWERS[fault])
            return
        if fault == "late":
            time.sleep(_LATE_SECONDS)
        if fault == "cut":
            request.close_connection = True
            return
        status, headers, answer = self._forward(request, body, fault == "deaf")
        if fault == "lost":
            request.close_connection = True
            return
        request.send_response(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date"):
                request.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == "content-length"), "")
        head = request.command == "HEAD"
        request.send_header("Content-Length", length if head and length else str(len(answer)))
        request.end_headers()
        if fault == "short":
            answer = answer[: len(answer) // 2]
            request.close_connection = True
        request.wfile.write(answer)

    def _refuse(
        self, request: BaseHTTPRequestHandler, status: int, code: str, message: str
    ) -> None:
        answer = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        request.send_response(status)
        if status == 503:
            request.send_header("Retry-After", "1")
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(answer)

    def _forward(
        self, request: BaseHTTPRequestHandler, body: bytes, deaf: bool
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {
            name: value
            for name, value in request.headers.items()
            if not (deaf and name.lower() in ("if-match", "if-none-match"))
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._server_port, timeout=60)
        try:
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        """Answer requests in this block."""
        thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()
