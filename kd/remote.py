"""A teacher behind an OpenAI-compatible server (vLLM): its k most probable tokens of every position, over HTTP.

    packed sequence -> documents -> POST /v1/completions with prompt_logprobs -> checked entries -> records

    prompt_logprobs   a list with an item for each token of the prompt: null for the first, for token t + 1 what
                      position t predicts, as {id: {logprob, rank, ...}}; k entries, and one more where the token
                      itself is not among them. Natural log-probabilities at temperature 1; vLLM writes -9999 for -inf

A server knows nothing of packed sequences: each document is a prompt of its own, up to its last target. What cannot be
had after some attempts, or is not what was asked for, fails the capture of the shard; nothing is ever filled in.

Shapes: P positions that have a target, N tokens of a prompt, k entries of a position.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec, Places
from cache.manifest import Probe, canonical_json
from cache.records import Records, Sequences
from kd.config.teacher import TeacherConfig
from kd.errors import ModelError, TokenizerMismatch
from kd.exchange.rows import SLACK, log1mexp, log_sum_exp
from kd.progress import SILENT, Monitor

BACKOFF_SECONDS, LONGEST_BACKOFF, LONGEST_PAUSE = 0.5, 30.0, 600.0
POLL_SECONDS, WAITING_SECONDS = 0.5, 30.0
#: How far rounding may lift a sum of probabilities above 1 before an answer is refused.
MASS_TOLERANCE = 1e-4
_LOCAL = {"127.0.0.1", "localhost", "::1"}  # never through a proxy


def remote_sha256(config: TeacherConfig) -> str:
    """A name for a teacher whose weights cannot be seen: sha256 of the canonical JSON of where and what it is.

    Two servers of one model have different names, and a server that changes its weights keeps its name: say so by
    ``teacher.revision``, which is hashed too and sent nowhere.
    """
    content = {
        "backend": config.backend,
        "url": server_url(config),
        "model": config.model,
        "revision": config.revision,
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def server_url(config: TeacherConfig) -> str:
    """What comes before /v1/completions; an address that ends in /v1, as clients of OpenAI write it, will do."""
    assert config.url is not None, "TeacherConfig refuses backend http without url"
    return config.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, eq=False)
class TopK:
    """The teacher's k most probable tokens of P positions.

    ``positions`` (P,): the places in the sequence. ``ids`` (P, k) uint32 in descending order of ``logprobs`` (P, k)
    float32, in nats; id 0 with -inf where the vocabulary has fewer than k. ``gold`` (P,) float32: log-probability of
    the next token, which may be outside the k. ``residual`` (P,) float32: log of the mass outside the k, -inf where
    nothing is left. The entropy cannot be known.
    """

    positions: NDArray[np.int64]
    ids: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    gold: NDArray[np.float32]
    residual: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.positions)

    @staticmethod
    def empty(k: int) -> TopK:
        """No positions at all."""
        floats = np.zeros(0, np.float32)
        return TopK(np.zeros(0, np.int64), np.zeros((0, k), np.uint32), np.zeros((0, k), np.float32), floats, floats)

    @staticmethod
    def concatenate(parts: Iterable[TopK]) -> TopK:
        """All positions of ``parts`` (at least one), in order."""
        kept = list(parts)
        return TopK(*(np.concatenate([getattr(part, field.name) for part in kept]) for field in fields(TopK)))

    def records(self, codec: Codec, number: int) -> Records:
        """As records of sequence ``number``."""
        places = Places(np.full(len(self), number), self.positions)
        unknown = np.full(len(self), np.nan)
        return codec.encode_top(self.gold[:, None], unknown, (self.ids, self.logprobs), self.residual, places)


@dataclass(frozen=True, eq=False)
class Piece:
    """A document of sequence ``number`` that begins at place ``start``; ``targets`` are places in its ``tokens``."""

    number: int
    start: int
    tokens: list[int]
    targets: list[int]

    def refuse(self, what: str, place: int | None = None) -> ModelError:
        """The error for a wrong answer."""
        where = f"position {self.start if place is None else self.start + place}"
        return ModelError(
            f"sequence {self.number}, {where}: the teacher's server gave a wrong answer: {what}.",
            "The capture goes on from the last whole shard once the server is right: vLLM or another server that "
            "implements prompt_logprobs as it does, with the model of teacher.tokenizer.",
        )


def pieces_of(sequences: Sequences, row: int, first: int) -> Iterator[Piece]:
    """The documents in ``sequences[row]`` that have a target, each cut after the last; ``first`` numbers row 0."""
    bounds = [*np.flatnonzero(sequences.document_start[row]).tolist(), sequences.length]
    for begin, end in itertools.pairwise(bounds):
        targets = np.flatnonzero(sequences.target_mask[row, begin:end]).tolist()
        if targets:
            tokens = sequences.tokens[row, begin : begin + targets[-1] + 2].tolist()
            yield Piece(first + row, begin, tokens, targets)


@dataclass(frozen=True, eq=False)
class RemoteTeacher:
    """A server and how to read records off it; as a context manager it closes its connections.

    Requests run in an event loop of its own, because only there can one that hangs be given up at once.
    """

    config: TeacherConfig
    codec: Codec
    client: httpx.AsyncClient
    runner: asyncio.Runner
    monitor: Monitor = SILENT

    @classmethod
    def connect(cls, config: TeacherConfig, codec: Codec, monitor: Monitor = SILENT) -> RemoteTeacher:
        """A teacher for records of ``codec``, whose profile is topk; raises ``ModelError`` where there is no key."""
        if codec.profile != "topk" or codec.always_keep:
            raise ModelError(
                "a server tells its most probable tokens and no others.",
                "With teacher.backend http, set cache.profile to topk and cache.always_keep to [].",
            )
        url = server_url(config)
        client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if (key := _api_key(config)) else {},
            timeout=httpx.Timeout(config.timeout, connect=min(10.0, config.timeout)),
            limits=httpx.Limits(max_connections=config.concurrency),
            trust_env=httpx.URL(url).host not in _LOCAL,
        )
        return cls(config, codec, client, asyncio.Runner(), monitor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()

    def require_same_tokenizer(self, probes: Iterable[Probe], sequence_length: int) -> None:
        """Ask vLLM's /tokenize; a server that has none is believed, with a warning.

        Raises ``TokenizerMismatch`` where it encodes a probe otherwise, ``ModelError`` for too short a context.
        """
        for probe in probes:
            body = {"model": self.config.model, "prompt": probe.text, "add_special_tokens": True}
            response = self.runner.run(self._post("/tokenize", body))
            if (answer := _tokenized(response)) is None:
                unchecked = "whether its tokenizer is teacher.tokenizer could not be checked by /tokenize"
                self.monitor.emit("warning", message=f"{unchecked}: {self._word(response)}")
                return
            self._require_tokens(answer["tokens"], probe)
            self._require_context(answer, sequence_length)

    def _require_tokens(self, found: Any, probe: Probe) -> None:
        if found != list(probe.ids):
            expected = ", ".join(map(str, probe.ids[:8]))
            raise TokenizerMismatch(
                f"The server's tokenizer does not encode {probe.text[:40]!r} as teacher.tokenizer does: expected "
                f"{expected} ..., got {str(found)[:60]}.",
                "Set teacher.tokenizer to the tokenizer of the model that the server runs.",
            )

    def _require_context(self, answer: dict[str, Any], sequence_length: int) -> None:
        context = answer.get("max_model_len")
        if isinstance(context, int) and context <= sequence_length:  # it must have room for one more token
            raise ModelError(
                f"{server_url(self.config)} has a context of {context} tokens, but data.sequence_length is "
                f"{sequence_length}.",
                f"Set data.sequence_length to {context - 1} or less, or start vLLM with a longer --max-model-len.",
            )

    def read(self, sequences: Sequences, first: int) -> Iterator[tuple[int, Records]]:
        """Yield (1, its records) for each sequence; ``first`` is the number of the first one."""
        for number, top in enumerate(self.top(sequences, first), first):
            yield 1, top.records(self.codec, number)

    def top(self, sequences: Sequences, first: int) -> Iterator[TopK]:
        """Yield what the server says of each sequence, in order; documents are asked for side by side.

        Raises ``ModelError`` naming sequence and position where an answer is wrong, and the server's word where it
        refuses or stays away.
        """
        tasks = self.runner.run(self._start(sequences, first))
        try:
            for row in tasks:
                yield TopK.concatenate([TopK.empty(self.codec.k), *self._results(row)])
        finally:
            _give_up(itertools.chain(*tasks))

    async def _start(self, sequences: Sequences, first: int) -> list[list[asyncio.Task[TopK]]]:
        """A task for each document of each sequence; they run whenever the loop does."""
        room = asyncio.Semaphore(self.config.concurrency)
        return [
            [asyncio.create_task(self._ask(piece, room)) for piece in pieces_of(sequences, row, first)]
            for row in range(len(sequences))
        ]

    def _results(self, tasks: list[asyncio.Task[TopK]]) -> list[TopK]:
        """What ``tasks`` return. Meanwhile a request to stop is heard, and a sign of life is given."""
        said = time.monotonic()
        while any(not task.done() for task in tasks):
            done, _ = self.runner.run(asyncio.wait(tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION))
            for task in done:
                task.result()  # the first that failed ends it all
            self.monitor.check("while waiting for the teacher's server")
            if time.monotonic() - said > WAITING_SECONDS:
                self.monitor.emit("stage", stage="precompute", phase=f"waiting for {server_url(self.config)}")
                said = time.monotonic()
        return [task.result() for task in tasks]

    async def _ask(self, piece: Piece, room: asyncio.Semaphore) -> TopK:
        async with room:
            response = await self._post("/v1/completions", self._body(piece))
        if not response.is_success:
            raise ModelError(self._word(response), _REMEDIES.get(response.status_code, _REMEDY))
        try:
            answer = response.json()
        except ValueError as error:
            raise piece.refuse(f"no JSON ({error})") from error
        return top_of(answer, piece, self.codec.k, self.codec.vocabulary_size)

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The server's answer or refusal, asked for again where it is away, busy or broken."""
        for attempt in range(1, self.config.retries + 2):
            try:
                response = await self.client.post(path, json=body)
            except httpx.RequestError as error:
                failure, pause = f"{type(error).__name__} {error}".strip(), 0.0
            else:
                if response.status_code != 429 and response.status_code < 500:
                    return response
                failure, pause = self._word(response), _retry_after(response)
            if attempt <= self.config.retries:
                await asyncio.sleep(max(pause, _backoff(attempt)))
        raise ModelError(
            f"{server_url(self.config)} gave no answer to {attempt} requests, the last time: {failure}.",
            "Check that the server runs, and raise teacher.retries or teacher.timeout; lower teacher.concurrency where "
            "it is too much for it. The capture goes on from the last whole shard.",
        )

    def _body(self, piece: Piece) -> dict[str, Any]:
        """What is asked: the entries of a prompt, at temperature 1 whatever the server's defaults are."""
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
        prompt = {"prompt": piece.tokens, "add_special_tokens": False, "max_tokens": 1}  # vLLM has no 0
        return {
            "model": self.config.model,
            "prompt_logprobs": min(self.codec.k, self.codec.vocabulary_size),
            "return_token_ids": True,
            **prompt,
            **neutral,
        }

    def _word(self, response: httpx.Response) -> str:
        """What the server says in an answer that is none, without the key, should it repeat it."""
        text = " ".join(response.text.split())
        if key := self.client.headers.get("Authorization", "").removeprefix("Bearer "):
            text = text.replace(key, "***")
        return f"{server_url(self.config)} answers {response.status_code}: {text[:300]}"


_REMEDY = (
    "vLLM must be started with --max-logprobs of at least cache.k, and with a --max-model-len above "
    "data.sequence_length."
)
_REMEDIES = {
    401: "Put the server's key into the variable that teacher.api_key_env names.",
    403: "Put the server's key into the variable that teacher.api_key_env names.",
    404: "Check teacher.url, and that teacher.model is the name of the model on the server.",
}


def _tokenized(response: httpx.Response) -> dict[str, Any] | None:
    """The answer of /tokenize, or None where there is no such thing."""
    try:
        answer = response.json() if response.is_success else None
    except ValueError:  # a page for people
        return None
    return answer if isinstance(answer, dict) and "tokens" in answer else None


def _give_up(tasks: Iterable[asyncio.Task[TopK]]) -> None:
    """End what still runs, when the loop next does, and forget what failed."""
    for task in tasks:
        if not task.cancel() and not task.cancelled():
            task.exception()


def _api_key(config: TeacherConfig) -> str | None:
    """The key, from the environment alone; what could not stand in a header is refused here, not in a traceback."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ModelError(
            f"the environment variable {config.api_key_env} holds no API key.",
            "Set it where the worker runs, or leave teacher.api_key_env out.",
        )
    return key


def _backoff(attempt: int) -> float:
    """Seconds to wait after a failed ``attempt``: twice as long each time, and not in step with other clients."""
    return float(min(BACKOFF_SECONDS * 2.0 ** (attempt - 1), LONGEST_BACKOFF) * random.uniform(0.5, 1.5))


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait (RFC 9110, 10.2.3: a number of them, or a date); 0 where it does not."""
    text = response.headers.get("Retry-After", "").strip()
    try:
        seconds = float(text) if text.isdecimal() else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError):  # nothing, nonsense, or a date without a zone
        return 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE)


# ---------------------------------------------------------------------- answers

# What reading something of another shape raises.
_MISSHAPEN = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


def top_of(answer: Any, piece: Piece, k: int, vocabulary: int) -> TopK:
    """What ``answer`` says of the targets of ``piece``; raises ``ModelError`` naming the first that is wrong."""
    items = _items(answer, piece)
    found = []
    for place in piece.targets:
        try:
            found.append(_entries(items[place + 1], piece.tokens[place + 1], k, vocabulary))
        except _MISSHAPEN as error:
            raise piece.refuse(_said(error), place) from error
    logprobs = np.array([values for _, values, _ in found])
    mass = np.minimum(log_sum_exp(logprobs), 0.0)
    partial = (mass < 0.0) & (k < vocabulary)
    return TopK(
        np.asarray(piece.targets, np.int64) + piece.start,
        np.array([ids for ids, _, _ in found], np.uint32),
        logprobs.astype(np.float32),
        np.array([gold for _, _, gold in found], np.float32),
        np.where(partial, log1mexp(np.where(partial, mass, -1.0)), -np.inf).astype(np.float32),
    )


def _items(answer: Any, piece: Piece) -> list[Any]:
    """The item of each token of the prompt (N,), if there is one for each and they are about what was sent."""
    try:
        (choice,) = answer["choices"]
        items, read = choice["prompt_logprobs"], choice.get("prompt_token_ids")
    except _MISSHAPEN as error:
        raise piece.refuse(f"no choice with prompt_logprobs ({_said(error)})") from error
    if not isinstance(items, list) or len(items) != len(piece.tokens):
        got = f"{len(items)} items" if isinstance(items, list) else type(items).__name__
        raise piece.refuse(f"prompt_logprobs must have {len(piece.tokens)} items, one for each token, but are {got}")
    if items[0] is not None:
        raise piece.refuse("the first token has log-probabilities, though nothing predicts it: they may be shifted")
    if read not in (None, piece.tokens):
        raise piece.refuse("the server read other tokens than it was sent")
    return items


def _entries(item: Any, gold: int, k: int, vocabulary: int) -> tuple[list[int], list[float], float]:
    """The k most probable ids and their log-probabilities, and that of ``gold``; raises ``ValueError`` for a bad item.

    Of equal ones the smaller id comes first: what is stored does not hang on the order of an answer.
    """
    logprobs = {int(token): _logprob(entry) for token, entry in item.items()}
    if outside := [token for token in logprobs if not 0 <= token < vocabulary]:
        raise ValueError(f"id {outside[0]} lies outside the tokenizer's {vocabulary} tokens")
    if gold not in logprobs:
        raise ValueError(f"the next token, id {gold}, is not among its own log-probabilities")
    rank = item[str(gold)].get("rank") or 0
    expected = min(k, vocabulary) + (rank > min(k, vocabulary))
    if len(logprobs) < expected:
        raise ValueError(f"{len(logprobs)} entries, where {expected} were asked for")
    if (mass := math.fsum(map(math.exp, logprobs.values()))) > 1.0 + MASS_TOLERANCE:
        raise ValueError(f"the probabilities sum to {mass:.6g}")
    best = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
    missing = 1.0 - math.fsum(math.exp(logprob) for _, logprob in best)
    room = math.exp(min(best[-1][1] + SLACK, 0.0)) * (vocabulary - len(best))
    if missing > room + MASS_TOLERANCE:
        raise ValueError(f"{missing:.4f} of the probability is missing, and cannot lie below the last entry")
    lacking = k - len(best)
    ids, values = [token for token, _ in best], [logprob for _, logprob in best]
    return ids + [0] * lacking, values + [-math.inf] * lacking, logprobs[gold]


def _logprob(entry: Any) -> float:
    logprob = entry["logprob"]
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not logprob <= 0.0:
        raise ValueError(f"{logprob!r} is no log-probability")
    return float(logprob)


def _said(error: Exception) -> str:
    """What an error says; those that Python raises itself need their names."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
