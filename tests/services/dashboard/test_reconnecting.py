"""The stream of events in a browser, cut and opened again: no event is missed or comes twice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from bench.support.harness import Parts
from services.store.jobs.leases import Claim
from tests.support.services.api import running, serving, tell

#: Collects the ids of all events that the module of the dashboard hands out.
COLLECT = """async (id) => {
    const { follow } = await import("/dashboard/stream.js");
    window.openings = 0;
    window.found = [];
    window.leave = follow(id, (event) => {
        if (event) window.found.push(event.id);
        else window.openings += 1;
    });
}"""

#: Counts those who listen for the page to be hidden.
LISTEN = """() => {
    window.listeners = 0;
    const listen = document.addEventListener.bind(document);
    document.addEventListener = (type, ...others) => {
        window.listeners += type === "visibilitychange";
        listen(type, ...others);
    };
}"""


@pytest.fixture
def page(new_tab: Callable[..., AbstractContextManager[Page]]) -> Iterator[Page]:
    with new_tab() as tab:
        yield tab


def warn(parts: Parts, claim: Claim, numbers: range) -> None:
    """Tell of one warning after the other."""
    for number in numbers:
        tell(parts, claim, ("warning", {"message": f"warning {number}"}))


def list_ids(parts: Parts, job_id: str) -> list[str]:
    """The ids of the warnings of a job, and of its end."""
    events = parts.jobs.read_events(job_id)
    wanted = [at for at, event in enumerate(events) if event.type == "warning"]
    return [event.id for event in events[wanted[0] :]]


def wait_for(page: Page, condition: str, *values: Any) -> None:
    """Wait until a condition holds in the page."""
    page.wait_for_function(condition, arg=list(values))


@pytest.mark.usefixtures("_server_binary")
def test_a_page_goes_on_where_it_was_when_the_server_starts_again(
    page: Page, tmp_path: Path
) -> None:
    with serving(tmp_path) as parts:
        claim = running(parts)
        page.goto(f"{parts.settings.server}/jobs/{claim.id}")
        page.evaluate(COLLECT, claim.id)
        wait_for(page, "() => window.openings > 0")
        warn(parts, claim, range(3))
        wait_for(page, "() => window.found.length === 3")
        for begin in (3, 9):
            (process,) = (each for each in parts._processes if each.poll() is None)
            warn(parts, claim, range(begin, begin + 2))
            process.terminate()
            process.wait()
            expect(page.get_by_role("status")).to_contain_text("does not answer")
            warn(parts, claim, range(begin + 2, begin + 4))
            parts.start_api()
            warn(parts, claim, range(begin + 4, begin + 6))
        parts.jobs.finish(claim, "succeeded")
        sent = list_ids(parts, claim.id)
        assert len(sent) == 16
        wait_for(page, "([most]) => window.found.length >= most", len(sent))
        assert page.evaluate("window.found") == sent
        # The page has no other events than the list, each once.
        events = page.get_by_role("list", name="Events").get_by_role("listitem")
        expect(events.first).to_contain_text("succeeded")
        shown = [text for text in events.all_inner_texts() if "warning" in text]
        assert [text.split("warning ")[1] for text in shown] == [
            str(at) for at in range(14, -1, -1)
        ]


class CuttingProxy:
    """Passes bytes on, and cuts the answer of each event stream after a number of them."""

    def __init__(self, port: int, cuts: Iterator[int]) -> None:
        self._port = port
        self._cuts = cuts
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.streams = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Pass on one connection, which may carry several requests, one after the other."""
        left = [1 << 62]  # bytes of answers until the cut
        with closing(client), socket.create_connection(("127.0.0.1", self._port)) as server:
            arguments = (client, server, left)
            threading.Thread(target=self._pass_requests, args=arguments, daemon=True).start()
            with suppress(OSError):
                while part := server.recv(1 << 16):
                    client.sendall(part[: left[0]])
                    left[0] -= len(part)
                    if left[0] <= 0:
                        break
            # Otherwise the other thread would go on waiting.
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _pass_requests(self, client: socket.socket, server: socket.socket, left: list[int]) -> None:
        with suppress(OSError):
            while part := client.recv(1 << 16):
                if b"/events/stream" in part.split(b"\r\n", 1)[0]:
                    self.streams += 1
                    left[0] = next(self._cuts)
                server.sendall(part)


@pytest.mark.long
def test_a_stream_that_is_cut_anywhere_loses_and_repeats_nothing(page: Page, api: Parts) -> None:
    claim = running(api)
    # The head of an answer has about 600 bytes, an event about 90: cuts fall into both.
    proxy = CuttingProxy(api.settings.port, count(700, 61))
    page.goto(f"{proxy.address}/new")
    warn(api, claim, range(1))
    page.evaluate(LISTEN)
    page.evaluate(COLLECT, claim.id)
    wait_for(page, "() => window.openings > 0")
    warn(api, claim, range(1, 2))
    wait_for(page, "() => window.found.length === 1")
    for begin in range(2, 50, 6):
        warn(api, claim, range(begin, begin + 6))
        page.wait_for_timeout(300)
    api.jobs.finish(claim, "succeeded")
    sent = list_ids(api, claim.id)[1:]
    wait_for(page, "([most]) => window.found.length >= most", len(sent))
    assert page.evaluate("window.found") == sent
    assert proxy.streams > 3
    assert page.evaluate("window.listeners") == 1, "each stream asks anew only once it was hidden"
    proxy.close()


#: Says that the page is hidden, or shown, as a browser does with the tab that is left.
TURN = """(hidden) => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.mark.usefixtures("_server_binary")
def test_hidden_pages_hold_no_connection_and_miss_no_event(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path) as parts:
        claim = running(parts)
        address = f"{parts.settings.server}/jobs/{claim.id}"
        page.goto(address)
        page.evaluate(COLLECT, claim.id)
        wait_for(page, "() => window.openings > 0")
        warn(parts, claim, range(2))
        wait_for(page, "() => window.found.length === 2")
        page.evaluate(TURN, True)
        # A browser has six connections to a server, whatever the number of tabs.
        others = [page.context.new_page() for _ in range(7)]
        for other in others:
            other.goto(address)
            expect(other.get_by_role("heading", level=1)).to_be_visible()
            other.evaluate(TURN, True)
        warn(parts, claim, range(2, 5))
        page.evaluate(TURN, False)
        wait_for(page, "() => window.found.length === 5")
        assert page.evaluate("() => window.found") == list_ids(parts, claim.id)
