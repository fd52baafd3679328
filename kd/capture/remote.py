"""A remote teacher: reads the K most probable tokens of every position from an OpenAI-compatible
server (vLLM). ``kd.capture.served`` asks for other tokens too, and asks other servers.

    packed sequence -> documents -> POST /v1/completions with prompt_logprobs
                    -> checked entries -> records

    prompt_logprobs   a list with one item per token of the prompt, null for the first. The item of
                      token t + 1 is the prediction of position t, as {id: {logprob, rank, ...}}. It
                      has K entries, and one more where the token itself is not among them. Natural
                      logarithms, temperature 1; vLLM writes -9999 for -inf

A server knows no packed sequences, so each document becomes a prompt of its own, up to its last
target. If an answer is wrong, or does not come after some attempts, the capture of the shard fails.
Missing values are never filled in.

Shapes: N positions with a target, L tokens of a prompt, K entries of a position.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, ClassVar, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from cache.codec import Codec
from cache.manifest import ServedTest, TokenizerProbe, encode_canonical_json
from cache.profiles.threshold import SCORED_TOP
from cache.profiles.topk import TopReading
from cache.records import Records, Sequences
from cache.rounding import RecordPositions
from kd.capture.log_mass import RESIDUAL_SLACK, log1mexp, log_sum_exp
from kd.capture.recording import TeacherReading
from kd.config.teacher import TeacherConfig
from kd.errors import ModelError, TokenizerMismatch
from kd.progress import SILENT, Monitor
from kd.text.teacher_side.sequences import find_teacher_side

#: Seconds to wait for one answer.
ANSWER_SECONDS = 600.0
#: Further attempts of a request if the server is unreachable, busy or fails.
RETRIES = 6
#: Seconds before the second attempt of a request; they double with each attempt.
BACKOFF_SECONDS = 0.5
#: The most seconds between two attempts, before the random factor.
LONGEST_BACKOFF = 30.0
#: The most seconds that a server's Retry-After is followed.
LONGEST_PAUSE = 600.0
#: Seconds after which a wait for answers is interrupted, to see whether the job must stop.
POLL_SECONDS = 0.5
#: Sequences that are asked about at once, for each request that may run; more answers would wait.
AHEAD = 4
#: Seconds without an answer after which an event reports the wait.
WAITING_SECONDS = 30.0
#: The most by which rounding may lift a sum of probabilities above 1; an answer beyond it is
#: refused.
ANSWER_MASS_TOLERANCE = 1e-4
#: The options of sampling that change nothing; vLLM applies none of them to prompts.
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
#: Hosts that are never reached through a proxy.
_LOCAL = {"127.0.0.1", "localhost", "::1"}


def hash_remote_teacher(config: TeacherConfig) -> str:
    """Return a hash that stands for the weights of a remote teacher, which cannot be seen.

    It is the sha256 of the canonical JSON of the server's address, the model's name and
    ``teacher.revision``. So two servers of one model have different hashes. A server whose weights
    change keeps its hash, unless the job changes ``teacher.revision``, which is not sent.
    """
    content = {
        "backend": config.backend,
        "url": find_server_url(config),
        "model": config.model,
        "revision": config.revision,
    }
    return hashlib.sha256(encode_canonical_json(content)).hexdigest()


def find_server_url(config: TeacherConfig) -> str:
    """Return the part of the address before /v1/completions; the configured one may end in /v1."""
    assert config.url is not None, "TeacherConfig refuses a server without url"
    return config.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, eq=False)
class TopEntries:
    """The teacher's K most probable tokens at N positions; their entropy is unknown.

    positions  (N,)      the index of each position in its sequence
    ids        (N, K)    by descending log-probability; 0 where the vocabulary has fewer than K
                         tokens
    logprobs   (N, K)    in nats; -inf where the vocabulary has fewer than K tokens
    gold       (N,)      log-probability of the next token, which may be outside the K
    residual   (N,)      log of the mass outside the K; -inf where nothing is left
    """

    positions: NDArray[np.int64]
    ids: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    gold: NDArray[np.float32]
    residual: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in vars(self).values())

    def select(self, rows: slice) -> TopEntries:
        """Return the entries of some positions."""
        return TopEntries(*(column[rows] for column in vars(self).values()))

    @staticmethod
    def empty(k: int) -> TopEntries:
        """Return entries of no position."""
        none = np.zeros(0, np.float32)
        entries = np.zeros((0, k), np.float32)
        return TopEntries(none.astype(np.int64), entries.astype(np.uint32), entries, none, none)

    @staticmethod
    def concatenate(parts: Iterable[TopEntries]) -> TopEntries:
        """Join the positions of ``parts``, of which there must be at least one, in order."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return TopEntries(*map(np.concatenate, columns))

    def make_records(self, codec: Codec, number: int) -> Records:
        """Encode the entries as records of sequence ``number``."""
        places = RecordPositions(np.full(len(self), number), self.positions)
        reading = TopReading(
            known_logprobs=self.gold[:, None],
            entropy=np.full(len(self), np.nan),
            ids=self.ids,
            logprobs=self.logprobs,
            residual=self.residual,
        )
        return codec.encode(reading, places)


@dataclass(frozen=True, eq=False)
class DocumentPrompt:
    """A document that begins at token ``start`` of sequence ``number``.

    ``targets`` index its ``tokens``.
    """

    number: int
    start: int
    tokens: list[int]
    targets: list[int]

    def refuse(self, what: str, place: int | None = None) -> ModelError:
        """Return the error for a wrong answer, at the token ``place`` of the document."""
        where = f"position {self.start if place is None else self.start + place}"
        return ModelError(
            f"sequence {self.number}, {where}: the teacher's server gave a wrong answer: {what}.",
            "Use vLLM or SGLang (teacher.backend), or a server that answers in the same way, with "
            "the model of teacher.tokenizer. The next attempt goes on after the last whole shard.",
        )


def cut_into_prompts(sequences: Sequences, row: int, first: int) -> Iterator[DocumentPrompt]:
    """Yield the documents in ``sequences[row]`` that have a target, each cut after its last target.

    ``first`` is the number of the sequence in row 0.
    """
    bounds = [*np.flatnonzero(sequences.document_start[row]).tolist(), sequences.length]
    for begin, end in itertools.pairwise(bounds):
        targets = np.flatnonzero(sequences.target_mask[row, begin:end]).tolist()
        if targets:
            # The item of the last target is that of the token after it, which must be sent too.
            tokens = sequences.tokens[row, begin : begin + targets[-1] + 2].tolist()
            yield DocumentPrompt(first + row, begin, tokens, targets)


@dataclass(frozen=True)
class Question:
    """A request about a document: the path and the body, and what reads the JSON of the answer."""

    piece: DocumentPrompt
    path: str
    body: Mapping[str, object]
    read: Callable[[Any], Any]


#: The answers to questions, in the order of these, while they come.
Answers = list[asyncio.Task[Any]]


@dataclass(frozen=True, eq=False)
class RemoteTeacher(AbstractContextManager["RemoteTeacher"]):
    """Reads records from a server; as a context manager it closes its connections.

    Requests run in an event loop, because only there can a request that hangs be cancelled at once.
    """

    config: TeacherConfig
    codec: Codec
    client: httpx.AsyncClient
    runner: asyncio.Runner
    room: asyncio.Semaphore
    monitor: Monitor = SILENT
    tested: ServedTest | None = None
    #: The server's own log-probabilities are recorded.
    recorder: ClassVar[None] = None
    #: Whether it can return hidden states, too.
    gives_states: ClassVar[bool] = False
    #: What to do about a refusal whose status is not in ``_REMEDIES``.
    remedy: ClassVar[str] = (
        "Start vLLM with --max-logprobs of at least cache.k, and with a --max-model-len above "
        "data.sequence_length."
    )

    @classmethod
    def connect(cls, config: TeacherConfig, codec: Codec, monitor: Monitor = SILENT) -> Self:
        """Return a teacher for records of ``codec``.

        Raises ``ModelError`` for a profile that the server does not serve, and where the API key is
        missing.
        """
        served = codec.k or (codec.rules.needs_lm_head and cls.gives_states)
        if not served or codec.always_keep:
            raise ModelError(
                "a server returns only its most probable tokens, and those that it is asked for.",
                "With teacher.backend http, set cache.profile to topk and cache.always_keep to [], "
                "or set teacher.proposal.",
            )
        url = find_server_url(config)
        client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if (key := _read_api_key(config)) else {},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=min(10.0, ANSWER_SECONDS)),
            limits=httpx.Limits(max_connections=config.concurrency),
            trust_env=httpx.URL(url).host not in _LOCAL,
        )
        room = asyncio.Semaphore(config.concurrency)
        return cls(config, codec, client, asyncio.Runner(), room, monitor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()

    def require_same_tokenizer(self, probes: Iterable[TokenizerProbe], length: int) -> None:
        """Compare the server's tokenizer through /tokenize of vLLM, which SGLang has too.

        Without /tokenize, emit a warning. Raises ``TokenizerMismatch`` if a probe is encoded
        differently, and ``ModelError`` if the server's context is too short for ``length`` tokens.
        """
        answer: Mapping[str, Any] = {}
        for probe in probes:
            body = {"model": self.config.model, "prompt": probe.text, "add_special_tokens": True}
            response = self.runner.run(self._request("POST", "/tokenize", body))
            if "tokens" not in (answer := _read_object(response)):
                self.monitor.emit(
                    "warning",
                    message="whether its tokenizer is teacher.tokenizer could not be checked by "
                    f"/tokenize: {self.describe_answer(response)}",
                )
                return
            found = answer["tokens"]
            if found != list(probe.ids):
                expected = ", ".join(map(str, probe.ids[:8]))
                raise TokenizerMismatch(
                    f"The server's tokenizer does not encode {probe.text[:40]!r} as "
                    f"teacher.tokenizer does: expected {expected} ..., got {str(found)[:60]}.",
                    "Set teacher.tokenizer to the tokenizer of the model that the server runs.",
                )
        context = self.find_context(answer)
        field = "teacher.max_length" if self.config.has_context else "data.sequence_length"
        if isinstance(context, int) and context <= length:
            # It must have room for one more token
            raise ModelError(
                f"{find_server_url(self.config)} has a context of {context} tokens, "
                f"but {field} is {length}.",
                f"Set {field} to {context - 1} or less, "
                "or start the server with a longer context (vLLM: --max-model-len).",
            )

    def find_context(self, answer: Mapping[str, Any]) -> Any:
        """Return the tokens that the server reads at most; ``answer`` is one of /tokenize."""
        return answer.get("max_model_len")

    def take_tail_sums(self) -> None:
        """Return None: a server sends no tails."""

    def deliver(self, sequences: Sequences, first: int) -> Iterator[TeacherReading]:
        """Yield what is delivered of each sequence.

        ``first`` is the number of the first sequence.
        """
        theirs = find_teacher_side(sequences)
        for row, entries in enumerate(self.read_top(theirs, first)):
            # The same targets, at the positions where the student has them.
            top = replace(entries, positions=np.flatnonzero(sequences.target_mask[row]))
            encode = partial(top.make_records, self.codec, first + row)
            yield TeacherReading(1, len(top), top.nbytes, encode)

    def read_top(self, sequences: Sequences, first: int) -> Iterator[TopEntries]:
        """Yield the entries of each sequence, in order. Raises as ``read_answers``."""
        for found in self.read_answers(sequences, first):
            yield TopEntries.concatenate([TopEntries.empty(self.codec.k), *found])

    def read_answers(self, sequences: Sequences, first: int) -> Iterator[list[Any]]:
        """Yield what was read of the documents of each sequence, in order.

        Requests for documents run at the same time. Raises ``ModelError``: with sequence and
        position where an answer is wrong, and with the server's text where it refuses or is not
        available.
        """
        asked = deque[Answers]()
        try:
            for row in range(len(sequences)):
                pieces = cut_into_prompts(sequences, row, first)
                asked.append(self.start(map(self.make_question, pieces)))
                if len(asked) == AHEAD * self.config.concurrency:
                    yield self.wait(asked[0])
                    asked.popleft()
            while asked:
                yield self.wait(asked[0])
                asked.popleft()
        finally:
            give_up(itertools.chain(*asked))

    def ask(self, questions: Iterable[Question]) -> list[Any]:
        """Ask at the same time, and return what was read of the answers, in order."""
        answers = self.start(questions)
        try:
            return self.wait(answers)
        finally:
            give_up(answers)

    def start(self, questions: Iterable[Question]) -> Answers:
        """Begin to ask; requests go on while the event loop runs, as it does in ``wait``."""

        async def create() -> Answers:
            return [asyncio.create_task(self._ask(question)) for question in questions]

        return self.runner.run(create())

    def wait(self, tasks: Answers) -> list[Any]:
        """Return what was read of the answers.

        Meanwhile check for a request to stop, and report the wait. Raises as ``read_top``.
        """
        reported = time.monotonic()
        while any(not task.done() for task in tasks):
            waiting = asyncio.wait(tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            done, _ = self.runner.run(waiting)
            for task in done:
                task.result()  # raises the error of a failed request
            self.monitor.check("while waiting for the teacher's server")
            if time.monotonic() - reported > WAITING_SECONDS:
                phase = f"waiting for {find_server_url(self.config)}"
                self.monitor.emit("stage", stage="precompute", phase=phase)
                reported = time.monotonic()
        return [task.result() for task in tasks]

    async def _ask(self, question: Question) -> Any:
        async with self.room:
            response = await self._request("POST", question.path, question.body)
        if not response.is_success:
            raise ModelError(
                self.describe_answer(response), _REMEDIES.get(response.status_code, self.remedy)
            )
        try:
            answer = response.json()
        except ValueError as error:
            raise question.piece.refuse(f"no JSON ({error})") from error
        return question.read(answer)

    def read_about(self, path: str) -> Mapping[str, Any]:
        """Return what the server says of itself at ``path``; nothing if it does not say it.

        Raises ``ModelError`` if the API key is wrong.
        """
        response = self.runner.run(self._request("GET", path))
        if response.status_code in (401, 403):
            raise ModelError(self.describe_answer(response), _REMEDIES[response.status_code])
        return _read_object(response)

    async def _request(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> httpx.Response:
        """Return the server's answer or refusal.

        Retry while the server is unreachable, busy or broken.
        """
        for attempt in range(1, RETRIES + 2):
            try:
                response = await self.client.request(method, path, json=body)
            except httpx.RequestError as error:
                failure = f"{type(error).__name__} {error}".strip()
                pause = 0.0
            else:
                if response.status_code != 429 and response.status_code < 500:
                    return response
                failure = self.describe_answer(response)
                pause = _parse_retry_after(response)
            if attempt <= RETRIES:
                await asyncio.sleep(max(pause, _choose_backoff(attempt)))
        raise ModelError(
            f"{find_server_url(self.config)} gave no answer to {attempt} requests, "
            f"the last time: {failure}.",
            "Check that the server runs. Lower teacher.concurrency if it is overloaded. The next "
            "attempt continues after the last whole shard.",
        )

    def make_question(self, piece: DocumentPrompt) -> Question:
        """Return the question for the entries of a prompt.

        It sets the temperature and all other options of sampling, because a server has its own
        defaults.
        """
        # One token, because vLLM has no 0.
        prompt = {"prompt": piece.tokens, "add_special_tokens": False, "max_tokens": 1}
        k, vocabulary = self.codec.k, self.codec.vocabulary_size
        body = {
            "model": self.config.model,
            "prompt_logprobs": min(k, vocabulary),
            "return_token_ids": True,
            **prompt,
            **NEUTRAL,
        }
        read = partial(parse_answer, piece=piece, k=k, vocabulary=vocabulary)
        return Question(piece, "/v1/completions", body, read)

    def make_next_question(self, tokens: list[int]) -> Question:
        """Return the question for the most probable tokens after ``tokens``."""
        asked = {"prompt": tokens, "add_special_tokens": False, "max_tokens": 1}
        options = {"model": self.config.model, "return_tokens_as_token_ids": True, **NEUTRAL}
        k = min(SCORED_TOP, self.codec.k, self.codec.vocabulary_size)
        body = asked | options | {"logprobs": k}
        return Question(DocumentPrompt(0, 0, tokens, []), "/v1/completions", body, _parse_next)

    def describe_answer(self, response: httpx.Response) -> str:
        """Return the server's address, the status and the text of a failed answer, without the API
        key.
        """
        text = " ".join(response.text.split())
        if key := self.client.headers.get("Authorization", "").removeprefix("Bearer "):
            text = text.replace(key, "***")
        return f"{find_server_url(self.config)} answers {response.status_code}: {text[:300]}"


#: The remedy for each status of a refusal.
_REMEDIES = {
    401: "Put the server's key into the variable that teacher.api_key_env names.",
    403: "Put the server's key into the variable that teacher.api_key_env names.",
    404: "Check teacher.url, and that teacher.model is the name of the model on the server.",
}


def give_up(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel those that still run, and mark the errors of failed ones as seen."""
    for task in tasks:
        if not task.cancel() and not task.cancelled():
            task.exception()


def _read_object(response: httpx.Response) -> Mapping[str, Any]:
    """Return the JSON object of an answer; an empty one if the server has no such endpoint."""
    try:
        answer = response.json() if response.is_success else None
    except ValueError:  # not JSON, such as an HTML page
        return {}
    return answer if isinstance(answer, dict) else {}


def _read_api_key(config: TeacherConfig) -> str | None:
    """Return the API key from the environment.

    Raises ``ModelError`` if it cannot stand in a header.
    """
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ModelError(
            f"the environment variable {config.api_key_env} holds no API key.",
            "Set it where the worker runs, or leave teacher.api_key_env out.",
        )
    return key


def _choose_backoff(attempt: int) -> float:
    """Return the seconds to wait after a failed ``attempt``.

    They double each time. A random factor keeps clients from retrying at the same moment.
    """
    seconds = min(BACKOFF_SECONDS * 2.0 ** (attempt - 1), LONGEST_BACKOFF)
    return float(seconds * random.uniform(0.5, 1.5))


def _parse_retry_after(response: httpx.Response) -> float:
    """Return the seconds that Retry-After asks to wait, given as a number or a date (RFC 9110,
    10.2.3); else 0.
    """
    text = response.headers.get("Retry-After", "").strip()
    try:
        if text.isdecimal():
            seconds = float(text)
        else:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError):  # nothing, nonsense, or a date without a zone
        return 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE)


# ---------------------------------------------------------------------- answers

#: Errors that reading a value of another shape raises.
MISSHAPEN = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


def parse_answer(answer: Any, piece: DocumentPrompt, k: int, vocabulary: int) -> TopEntries:
    """Return the entries of the targets of ``piece``.

    Raises ``ModelError`` for the first wrong one.
    """
    try:
        (choice,) = answer["choices"]
        items, read = choice["prompt_logprobs"], choice.get("prompt_token_ids")
    except MISSHAPEN as error:
        raise piece.refuse(f"no choice with prompt_logprobs ({describe_error(error)})") from error
    return parse_items(items, read, piece, k, vocabulary)


def parse_items(
    items: Any, read: Any, piece: DocumentPrompt, k: int, vocabulary: int
) -> TopEntries:
    """Return the entries of the targets of ``piece`` from the items of its tokens.

    ``read`` are the tokens that the server says it read; None if it does not say it. Raises
    ``ModelError`` for the first wrong item.
    """
    _require_items(items, read, piece)
    found = []
    for place in piece.targets:
        try:
            found.append(_parse_entries(items[place + 1], piece.tokens[place + 1], k, vocabulary))
        except MISSHAPEN as error:
            raise piece.refuse(describe_error(error), place) from error
    logprobs = np.array([values for _, values, _ in found])
    mass = np.minimum(log_sum_exp(logprobs), 0.0)
    partial = (mass < 0.0) & (k < vocabulary)
    return TopEntries(
        np.asarray(piece.targets, np.int64) + piece.start,
        np.array([ids for ids, _, _ in found], np.uint32),
        logprobs.astype(np.float32),
        np.array([gold for _, _, gold in found], np.float32),
        np.where(partial, log1mexp(np.where(partial, mass, -1.0)), -np.inf).astype(np.float32),
    )


def _parse_next(answer: Any) -> TopEntries | None:
    """Return the most probable tokens, which are named token_id:ID; None if there are none."""
    with suppress(*MISSHAPEN):
        (found,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        return make_single_entries((value, int(name[9:])) for name, value in found.items())
    return None


def make_single_entries(pairs: Iterable[tuple[float, int]]) -> TopEntries:
    """Return the entries of one position from log-probabilities and ids; there must be some."""
    ordered = sorted((-value, token) for value, token in pairs)
    values, ids = zip(*ordered, strict=True)
    none = np.zeros(1, np.float32)
    columns = (np.array([ids], np.uint32), -np.array([values], np.float32))
    return TopEntries(np.zeros(1, np.int64), *columns, none, none)


def _require_items(items: Any, read: Any, piece: DocumentPrompt) -> None:
    """Raise ``ModelError`` unless the L items of an answer belong to the tokens that were sent."""
    if not isinstance(items, list) or len(items) != len(piece.tokens):
        got = f"{len(items)} items" if isinstance(items, list) else type(items).__name__
        raise piece.refuse(
            f"prompt_logprobs must have {len(piece.tokens)} items, one for each token, "
            f"but are {got}"
        )
    if items[0] is not None:
        raise piece.refuse(
            "the first token has log-probabilities, though nothing predicts it: they may be shifted"
        )
    if read not in (None, piece.tokens):
        raise piece.refuse("the server read other tokens than it was sent")


def _parse_entries(
    item: Any, gold: int, k: int, vocabulary: int
) -> tuple[list[int], list[float], float]:
    """Return the K most probable ids, their log-probabilities, and the log-probability of ``gold``.

    Equal log-probabilities are sorted by id, so the result does not depend on the order of the
    answer. Raises ``ValueError`` for a bad item.
    """
    logprobs = {int(token): _parse_logprob(entry) for token, entry in item.items()}
    if outside := [token for token in logprobs if not 0 <= token < vocabulary]:
        raise ValueError(f"id {outside[0]} lies outside the tokenizer's {vocabulary} tokens")
    if gold not in logprobs:
        raise ValueError(f"the next token, id {gold}, is not among its own log-probabilities")
    rank = item[str(gold)].get("rank") or 0
    expected = min(k, vocabulary) + (rank > min(k, vocabulary))
    if len(logprobs) < expected:
        raise ValueError(f"{len(logprobs)} entries, where {expected} were asked for")
    if (mass := math.fsum(map(math.exp, logprobs.values()))) > 1.0 + ANSWER_MASS_TOLERANCE:
        raise ValueError(f"the probabilities sum to {mass:.6g}")
    best = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
    missing = 1.0 - math.fsum(math.exp(logprob) for _, logprob in best)
    room = math.exp(min(best[-1][1] + RESIDUAL_SLACK, 0.0)) * (vocabulary - len(best))
    if missing > room + ANSWER_MASS_TOLERANCE:
        raise ValueError(
            f"{missing:.4f} of the probability is missing, and cannot lie below the last entry"
        )
    lacking = k - len(best)
    ids = [token for token, _ in best]
    values = [logprob for _, logprob in best]
    return ids + [0] * lacking, values + [-math.inf] * lacking, logprobs[gold]


def _parse_logprob(entry: Any) -> float:
    logprob = entry["logprob"]
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not logprob <= 0.0:
        raise ValueError(f"{logprob!r} is no log-probability")
    return float(logprob)


def describe_error(error: Exception) -> str:
    """Return the text of an error, with the class name of those that Python itself raises."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
