"""A small server with the endpoints of vLLM and SGLang, whose answers come from a real model.

    POST /v1/completions         prompt_logprobs
    POST /inference/v1/generate  prompt_logprobs, and prompt_logprob_token_ids of version 0.33
    POST /tokenize, GET /version
    POST /generate               flat log-probabilities and hidden states of SGLang 0.5.23
    GET /server_info

A test can make it answer wrongly: it appends a function to ``twists``, and one answer uses it up;
or it sets ``fault``, which is wrong in every answer.
"""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from transformers import AutoModelForCausalLM, AutoTokenizer

#: Takes the JSON of an answer; returns other JSON, or a whole response to send in its place.
Twist = Callable[[Any], Any]
#: late = each position answers for the one before it; last = the last position is dropped; warm =
#: all answers are those of temperature 2; warm prompts = those of prompts are; swapped = two ids of
#: each position are exchanged; replicas = every second answer is that of other weights; silent =
#: there are no log-probabilities of generated tokens. Of hidden states: late states = each is that
#: of the position before; chunked = only those of the last half come; raw = before the last norm.
Fault = Literal[
    "late", "last", "warm", "warm prompts", "swapped", "replicas", "silent",
    "late states", "chunked", "raw",
]  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """log p of the prompt's L - 1 positions and of the token after it, and L hidden states."""

    logprobs_NV: torch.Tensor
    last_V: torch.Tensor
    states_LD: torch.Tensor


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
        self.version: str | None = "0.33.0"
        #: The answer of /server_info in place of its own.
        self.about: dict[str, Any] | None = None
        self.gives_states = True
        self.fault: Fault | None = None
        #: Seconds before each answer.
        self.delay = 0.0
        self._answers = 0
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

        @app.get("/version")
        async def version() -> Response:
            return JSONResponse({"version": self.version}) if self.version else error(404, "?")

        @app.get("/server_info")
        async def server_info(request: Request) -> Response:
            if (
                self.key is not None
                and request.headers.get("Authorization") != f"Bearer {self.key}"
            ):
                return JSONResponse({"error": "Unauthorized"}, 401)
            about = {"version": "0.5.23", "model_path": "/models/teacher", "frontend": "python"}
            limit = {"served_model_name": "teacher", "max_req_input_len": self.max_model_len - 6}
            return JSONResponse(self.about if self.about is not None else about | limit)

        @app.post("/generate")
        @app.post("/v1/completions")
        @app.post("/inference/v1/generate")
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
        time.sleep(self.delay)
        try:
            if "input_ids" in body:
                refusal, make = self._flat_refusal(body, authorization), self._flat
            else:
                refusal = self._refusal(body, authorization)
                make = self._generation if "token_ids" in body else self._completion
            if refusal:
                return refusal
            answer = make(body)
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
        options = body.get("sampling_params", body)
        if options["max_tokens"] < 1:
            return error(400, f"max_tokens must be at least 1, got {options['max_tokens']}.")
        if refusal := self._ids_refusal(body, options.get("prompt_logprob_token_ids")):
            return refusal
        if (k := options.get("prompt_logprobs", 0)) > self.max_logprobs:
            return error(
                400,
                f"Requested prompt logprobs of {k}, "
                f"which is greater than max allowed: {self.max_logprobs}",
            )
        return None

    def _ids_refusal(self, body: dict[str, Any], rows: Any) -> Response | None:
        """Refuse as version 0.33 does, in its words."""
        if rows is None:
            return None
        if (most := max(map(len, rows), default=0)) > self.max_logprobs:
            return error(
                400,
                f"Requested {most} token ids per row in prompt_logprob_token_ids, which is greater "
                f"than max allowed: {self.max_logprobs}. Set max_logprobs (--max-logprobs) to at "
                f"least {most}.",
            )
        if not most:
            return error(400, "prompt_logprob_token_ids must be a non-empty integer array.")
        scored = len(body["token_ids"]) - 1
        if len(rows) != scored:
            return error(
                400,
                f"prompt_logprob_token_ids has {len(rows)} rows, but the prompt has {scored} "
                "scored rows (prompt_len - 1 - prompt_logprob_start).",
            )
        ids = [token for row in rows for token in row]
        if min(ids) < -1 or max(ids) >= self.model.config.vocab_size:
            return error(400, "prompt_logprob_token_ids contain out-of-vocab token ids")
        return None

    def _flat_refusal(self, body: dict[str, Any], authorization: str | None) -> Response | None:
        """Refuse as SGLang does, in its words."""
        if self.key is not None and authorization != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if (length := len(body["input_ids"])) >= self.max_model_len:
            why = f"The input ({length} tokens) is longer than the model's context length"
            return JSONResponse(
                {"error": {"message": f"{why} ({self.max_model_len} tokens)."}}, 400
            )
        if body.get("return_hidden_states") and not self.gives_states:
            why = "The server is not configured to return hidden states."
            return JSONResponse({"error": {"message": why}}, 400)
        return None

    def _flat(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, k = body["input_ids"], body["top_logprobs_num"]
        found = self._read(tokens)
        asks = body.get("logprob_start_len", -1) == 0
        best = found.last_V.topk(k)
        after = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        about: dict[str, Any] = {
            "id": "1",
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": len(tokens),
            "input_token_logprobs": [],
            "output_token_logprobs": [[float(best.values[0]), int(best.indices[0]), None]],
        }
        if self.fault != "silent":
            about["output_top_logprobs"] = [[[value, token, None] for value, token in after]]
        if asks:
            gold_N = found.logprobs_NV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
            about["input_token_logprobs"] = [
                [value, token, None] for value, token in zip([None, *gold_N], tokens, strict=True)
            ]
            about |= self._make_flat(found.logprobs_NV, k)
        if body.get("return_hidden_states"):
            about["hidden_states"] = [self._choose_states(found.states_LD).tolist()]
        answer = {"text": "!", "output_ids": [0], "meta_info": about}
        return answer | (
            {"prompt_token_ids": tokens} if body.get("return_prompt_token_ids") else {}
        )

    def _make_flat(self, logprobs_NV: torch.Tensor, k: int) -> dict[str, Any]:
        assert k <= self.vocabulary
        best = logprobs_NV[:-1].topk(k) if self.fault == "last" else logprobs_NV.topk(k)
        values_NK, ids_NK = best.values.float().numpy(), best.indices.int().numpy()
        if self.fault == "swapped":
            values_NK[:, [0, 1]] = values_NK[:, [1, 0]]
        name = "input_top_logprobs"
        return {
            f"{name}_val_flat_b64": base64.b64encode(values_NK.tobytes()).decode(),
            f"{name}_idx_flat_b64": base64.b64encode(ids_NK.tobytes()).decode(),
            f"{name}_val_flat_b64_dtype": "float32",
            f"{name}_idx_flat_b64_dtype": "int32",
            f"{name}_shape": list(values_NK.shape),
            f"{name}_null_prefix": 1,
        }

    def _choose_states(self, states_LD: torch.Tensor) -> torch.Tensor:
        if self.fault == "late states":
            return states_LD.roll(1, 0)
        return states_LD[len(states_LD) // 2 :] if self.fault == "chunked" else states_LD

    def _read_raw(self, tokens: list[int]) -> torch.Tensor:
        """Return the states before the last norm."""
        given: list[torch.Tensor] = []
        with self._lock:
            hook = self.model.model.norm.register_forward_pre_hook(lambda _, x: given.append(x[0]))
            self.model(torch.tensor([tokens]))
            hook.remove()
        return given[0][0]

    @torch.no_grad()
    def _read(self, tokens: list[int]) -> Reading:
        found = self.model(torch.tensor([tokens]), output_hidden_states=True)
        logits_LV = found.logits[0, :, : self.vocabulary]
        states_LD = self._read_raw(tokens) if self.fault == "raw" else found.hidden_states[-1][0]
        with self._lock:
            self._answers += 1
            other = self.fault == "replicas" and self._answers % 2 == 0
        if other:
            noise = torch.Generator().manual_seed(0)
            logits_LV = logits_LV + 0.3 * torch.randn(logits_LV.shape, generator=noise)
        warm_LV = logits_LV / (2.0 if self.fault in ("warm", "warm prompts") else 1.0)
        last_V = warm_LV[-1] if self.fault == "warm" else logits_LV[-1]
        prompt_NV = warm_LV[:-1].roll(1, 0) if self.fault == "late" else warm_LV[:-1]
        return Reading(prompt_NV.log_softmax(-1), last_V.log_softmax(-1), states_LD)

    def _generation(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, options = body["token_ids"], body["sampling_params"]
        logprobs_NV = self._read(tokens).logprobs_NV
        answer: dict[str, Any] = {
            "request_id": "generate-tokens-1",
            "model": "teacher",
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": tokens if body.get("return_token_ids") else None,
            "choices": [{"index": 0, "token_ids": [0], "finish_reason": "length"}],
        }
        if "prompt_logprobs" in options:
            items = make_items(logprobs_NV, tokens, options["prompt_logprobs"])
            answer["prompt_logprobs"] = items
        if (rows := options.get("prompt_logprob_token_ids")) is not None:
            scores = score_rows(logprobs_NV, rows)
            if self.fault == "swapped":
                scores[:, [0, 1]] = scores[:, [1, 0]]
            answer["prompt_token_id_logprobs"] = encode_array(
                scores[:-1] if self.fault == "last" else scores
            )
        return answer

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = body["prompt"]
        found = self._read(tokens)
        logprobs_NV, last_V = found.logprobs_NV, found.last_V
        if self.fault == "swapped":
            logprobs_NV, last_V = swap_best(logprobs_NV), swap_best(last_V)
        choice: dict[str, Any] = {
            "index": 0,
            "text": "!",
            "logprobs": None,
            "finish_reason": "length",
            "prompt_logprobs": None,
        }
        if (k := body.get("prompt_logprobs")) is not None:
            items = make_items(logprobs_NV, tokens, k)
            choice["prompt_logprobs"] = items[:-1] if self.fault == "last" else items
        count = None if self.fault == "silent" else body.get("logprobs")
        if count and body.get("return_tokens_as_token_ids"):
            best = last_V.topk(count)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            choice["logprobs"] = {
                "top_logprobs": [{f"token_id:{token}": value for token, value in pairs}]
            }
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = tokens
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": "teacher",
            "choices": [choice],
        }


def swap_best(logprobs: torch.Tensor) -> torch.Tensor:
    """Exchange the two most probable tokens."""
    best = logprobs.topk(2)
    return logprobs.scatter(-1, best.indices, best.values.flip(-1))


def make_items(logprobs_NV: torch.Tensor, tokens: list[int], k: int) -> list[Any]:
    """Return prompt_logprobs in vLLM's format."""
    items: list[Any] = [None]
    for logprobs_V, token in zip(logprobs_NV, tokens[1:], strict=True):
        own = float(logprobs_V[token])
        item = {str(token): entry(own, int((logprobs_V >= own).sum()), token)}
        best = logprobs_V.topk(k)
        for rank, (value, index) in enumerate(
            zip(best.values.tolist(), best.indices.tolist(), strict=True), 1
        ):
            item[str(index)] = entry(value, rank, index)
        items.append(item)
    return items


def score_rows(logprobs_NV: torch.Tensor, rows: list[list[int]]) -> np.ndarray:
    """Return log p of the ids of each row, float32; -inf fills rows up."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])
    found = logprobs_NV.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    scores: np.ndarray = found.float().numpy()
    return scores


def encode_array(array: np.ndarray) -> str:
    """Return base64 of the .npy file of ``array``."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class Torn(Response):
    """A response that sends half of its announced bytes and then closes the connection."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"1000")],
            }
        )
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": False})


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
