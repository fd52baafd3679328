"""A small server with vLLM's /v1/completions: prompt_logprobs of a real model, in vLLM's JSON.

A test can make it answer wrongly: it appends a function to ``twists``, and one answer uses it up.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from transformers import AutoModelForCausalLM, AutoTokenizer

#: Takes the JSON of an answer; returns other JSON, or a whole response to send in its place.
Twist = Callable[[Any], Any]


class RemoteServer:
    """Serves the model in ``folder`` as ``teacher``, with the first ``vocabulary`` tokens."""

    def __init__(
        self, folder: Path, vocabulary: int, key: str | None = None, max_logprobs: int = 4096
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.no_tokenizer: Response | None = None
        self.vocabulary = vocabulary
        self.key = key
        self.max_logprobs = max_logprobs
        self.max_model_len = 512
        self.twists: deque[Twist] = deque()
        self.asked: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        settings = {
            "log_level": "critical",
            "lifespan": "off",
            "ws": "none",
            "timeout_graceful_shutdown": 1,
        }
        self._server = uvicorn.Server(uvicorn.Config(self._app(), **settings))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            # The model runs in a thread, so that requests overlap as they do in a real server.
            from anyio.to_thread import run_sync

            return await run_sync(
                self._answer, await request.json(), request.headers.get("Authorization")
            )

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Response:
            if self.no_tokenizer is not None:
                return self.no_tokenizer
            ids = self.tokenizer((await request.json())["prompt"])["input_ids"]
            return JSONResponse(
                {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}
            )

        return app

    def _answer(self, body: dict[str, Any], authorization: str | None) -> Response:
        with self._lock:
            self.asked.append(body)
            twist = self.twists.popleft() if self.twists else None
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if refusal := self._refusal(body, authorization):
                return refusal
            answer = self._completion(body)
            twisted = twist(answer) if twist else answer
            return (
                twisted
                if isinstance(twisted, Response)
                else Response(json.dumps(twisted), 200, None, _JSON)
            )
        finally:
            with self._lock:
                self.in_flight -= 1

    def _refusal(self, body: dict[str, Any], authorization: str | None) -> Response | None:
        if self.key is not None and authorization != f"Bearer {self.key}":
            return error(401, f"Unauthorized: {authorization}")
        if body["model"] != "teacher":
            return error(404, f"The model `{body['model']}` does not exist.")
        if body["max_tokens"] < 1:
            return error(400, f"max_tokens must be at least 1, got {body['max_tokens']}.")
        if (k := body["prompt_logprobs"]) > self.max_logprobs:
            return error(
                400,
                f"Requested prompt logprobs of {k}, "
                f"which is greater than max allowed: {self.max_logprobs}",
            )
        return None

    @torch.no_grad()
    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = body["prompt"]
        k = body["prompt_logprobs"]
        logprobs_NV = (
            self.model(torch.tensor([tokens])).logits[0, :, : self.vocabulary].log_softmax(-1)
        )
        items: list[Any] = [None]
        for logprobs_V, token in zip(logprobs_NV, tokens[1:], strict=False):
            own = float(logprobs_V[token])
            item = {str(token): entry(own, int((logprobs_V >= own).sum()), token)}
            best = logprobs_V.topk(k)
            for rank, (value, index) in enumerate(
                zip(best.values.tolist(), best.indices.tolist(), strict=True), 1
            ):
                item[str(index)] = entry(value, rank, index)
            items.append(item)
        choice = {
            "index": 0,
            "text": "!",
            "logprobs": None,
            "finish_reason": "length",
            "prompt_logprobs": items,
        }
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = tokens
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": "teacher",
            "choices": [choice],
        }


_JSON = "application/json"


def entry(logprob: float, rank: int, token: int) -> dict[str, Any]:
    """Return one candidate in vLLM's format."""
    return {"logprob": logprob, "rank": rank, "decoded_token": f"<{token}>"}


def error(status: int, message: str, **headers: str) -> Response:
    """Return an error response in vLLM's format, with these headers."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse(
        {"error": {"message": message, "type": "Error", "code": status}}, status, names
    )
