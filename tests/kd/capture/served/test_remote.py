"""A teacher behind HTTP: its records are those of the local teacher, failures are retried or
reported, and nothing is filled in.
"""

import copy
import itertools
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi.responses import Response
from pydantic import ValidationError
from tokenizers import normalizers

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from cache.codec import Codec
from cache.manifest import TokenizerProbe
from cache.records import Sequences
from cache.rounding import KNOWN_STEP, TOP_STEP, UNKNOWN, UNKNOWN_ENTROPY
from cache.writing.writer import open_writer
from kd.capture import remote
from kd.capture.opening import open_reader
from kd.capture.plan import plan_capture
from kd.capture.remote import (
    RemoteTeacher,
    TopEntries,
    cut_into_prompts,
    find_server_url,
    hash_remote_teacher,
)
from kd.capture.served.sglang import SGLangTeacher
from kd.config.jobfile import parse_config
from kd.config.teacher import TeacherConfig
from kd.errors import Interrupted, ModelError, TokenizerMismatch
from kd.forecast import trial
from kd.forecast.rehearsal import estimate_job
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.models.loading import load_model
from kd.models.tokenizers import PROBE_TEXTS, encode_probes
from kd.progress import Event, Monitor
from kd.text.packed_rows import PackedRows
from kd.text.packing import compute_position_ids
from tests.support.remote_server import RemoteServer, Torn, entry, error

VOCABULARY = 2048
LENGTH = 40


@pytest.fixture
def server(tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteServer]:
    """A server with no earlier requests, not even late ones of another test, and a client with
    short waits.
    """
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.01)
    with RemoteServer(tiny_teacher, VOCABULARY) as running:
        yield running


def options(url: str, **changes: Any) -> TeacherConfig:
    return TeacherConfig(
        **{"backend": "http", "model": "teacher", "url": url, "tokenizer": "unused"} | changes
    )


def teacher(url: str, k: int = 5, monitor: Monitor | None = None, **changes: Any) -> RemoteTeacher:
    codec, section = Codec("topk", VOCABULARY, seed=1, k=k), options(url, **changes)
    kind = SGLangTeacher if section.backend == "sglang" else RemoteTeacher
    return kind.connect(section, codec, *([monitor] if monitor else []))


def ask(url: str, sequences: Sequences, first: int = 7, **changes: Any) -> list[TopEntries]:
    with teacher(url, **changes) as connected:
        return list(connected.read_top(sequences, first))


def packed(starts: list[list[int]], targets: float = 0.7, seed: int = 0) -> Sequences:
    """Return random tokens in sequences whose documents begin at ``starts``; some positions have a
    target.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (len(starts), LENGTH)).astype(np.uint32)
    document_start = np.zeros(tokens.shape, bool)
    mask = rng.random(tokens.shape) < targets
    for row, places in enumerate(starts):
        document_start[row, [0, *places]] = True
    mask[:, -1] = False
    mask[:, :-1] &= ~document_start[:, 1:]
    return Sequences(tokens, document_start, mask)


PACKED = packed([[7, 8, 25, 39], [], [20], [1, 2, 3]])


@torch.no_grad()
def local(folder: Path, sequences: Sequences) -> torch.Tensor:
    """Return log p (N, V) in float64 of the local model, which reads packed sequences whole."""
    model = load_model(folder, torch.float32).eval()
    head = find_lm_head(model, VOCABULARY)
    tokens_BL = torch.from_numpy(sequences.tokens.astype(np.int64))
    positions_BL = torch.from_numpy(compute_position_ids(sequences.document_start))
    hidden_BLD = compute_hidden_states(model, tokens_BL, PackedRows.of(positions_BL))
    return (
        head.compute_logits(hidden_BLD[torch.from_numpy(sequences.target_mask)])
        .double()
        .log_softmax(-1)
    )


# ---------------------------------------------------------------------- what is read


BACKENDS = pytest.mark.parametrize("backend", ["http", "sglang"])


@BACKENDS
@pytest.mark.parametrize("k", [1, 5, 64])
def test_the_entries_are_the_local_teachers(server, tiny_teacher, one_thread, k, backend):
    logprobs_NV = local(tiny_teacher, PACKED)
    best = logprobs_NV.topk(k)
    top = TopEntries.concatenate(ask(server.url, PACKED, k=k, backend=backend))
    assert np.array_equal(top.ids, best.indices.numpy())
    assert np.allclose(top.logprobs, best.values.numpy(), atol=2e-5)
    gold = logprobs_NV.gather(
        1, torch.from_numpy(PACKED.find_gold_ids().astype(np.int64))[:, None]
    )[:, 0].numpy()
    assert np.allclose(top.gold, gold, atol=2e-5)
    assert (top.gold < top.logprobs[:, -1]).any()  # outside the k: an entry of its own
    outside = logprobs_NV.scatter(1, best.indices, -math.inf).logsumexp(-1).numpy()
    assert np.allclose(np.exp(top.residual), np.exp(outside), atol=1e-5)
    assert np.array_equal(top.positions, np.nonzero(PACKED.target_mask)[1])
    assert (top.ids.dtype, top.logprobs.dtype, top.gold.dtype, top.residual.dtype) == (
        np.uint32,
        *[np.float32] * 3,
    )


def test_each_document_is_a_prompt_of_its_own_up_to_its_last_target(server):
    mask = np.zeros_like(PACKED.target_mask)
    mask[0, [2, 5, 30]] = True
    mask[1, 10] = True
    sequences = Sequences(PACKED.tokens, PACKED.document_start, mask)
    found = ask(server.url, sequences, k=3, concurrency=1)
    assert [body["prompt"] for body in server.asked] == [
        sequences.tokens[0, :7].tolist(),
        sequences.tokens[0, 25:32].tolist(),
        sequences.tokens[1, :12].tolist(),
    ]
    assert [top.positions.tolist() for top in found] == [[2, 5, 30], [10], [], []]
    for body in server.asked:  # whatever generation_config.json says on the server
        assert (body["model"], body["prompt_logprobs"], body["max_tokens"]) == ("teacher", 3, 1)
        assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (
            1,
            1,
            -1,
            1,
        )
        assert body["add_special_tokens"] is False


def test_sglang_reads_all_of_a_prompt_and_is_sent_no_temperature(server):
    ask(server.url, PACKED, k=3, concurrency=1, backend="sglang")
    pieces = [cut_into_prompts(PACKED, row, 0) for row in range(len(PACKED))]
    tokens = [piece.tokens for piece in itertools.chain(*pieces)]
    assert [body["input_ids"] for body in server.asked] == tokens
    for body in server.asked:
        assert (body["top_logprobs_num"], body["logprob_start_len"]) == (3, 0)
        assert body["sampling_params"] == {"max_new_tokens": 1}


@BACKENDS
def test_a_small_vocabulary_has_no_more_than_its_entries(server, backend):
    sequences = packed([[]], targets=0.1)
    (top,) = ask(server.url, sequences, k=VOCABULARY + 2, backend=backend)
    assert (np.sort(top.ids[:, :VOCABULARY], axis=1) == np.arange(VOCABULARY)).all()
    assert (top.ids[:, VOCABULARY:] == 0).all() and np.isneginf(top.logprobs[:, VOCABULARY:]).all()
    assert np.isneginf(top.residual).all()


def test_the_residual_of_a_certain_record_is_not_rounding_noise(server):
    """In float32, 1 - sum would be 0 or 6e-8; the mass outside the entries is exact to its last
    digit.
    """

    def certain(answer: Any) -> Any:
        (choice,) = answer["choices"]
        choice["prompt_logprobs"][1:] = [
            {str(token): entry(math.log1p(-3e-9), 1, token)}
            for token in choice["prompt_token_ids"][1:]
        ]
        return answer

    server.twists.append(certain)
    (top,) = ask(server.url, packed([[]], targets=0.2), k=1)
    assert np.allclose(np.exp(top.residual.astype(np.float64)), 3e-9, rtol=1e-5, atol=0)


def test_what_vllm_writes_for_a_probability_of_zero_weighs_nothing(server):
    def impossible(item: dict[str, Any], gold: str) -> None:
        item[gold]["logprob"] = -9999.0

    server.twists.append(at(3, impossible))
    (top,) = ask(
        server.url, Sequences(PACKED.tokens[2:3], PACKED.document_start[2:3], only(22)), k=3
    )
    assert top.gold == -9999.0 and np.exp(top.logprobs.astype(np.float64)).sum() < 1.0


def test_order_is_kept_while_several_are_in_flight(server, one_thread, monkeypatch):
    """Also if there are more sequences than are asked about at once."""
    monkeypatch.setattr(remote, "AHEAD", 1)
    sequences = packed([[10, 20, 30]] * 6)
    expected = ask(server.url, sequences, concurrency=1)
    assert server.most_in_flight == 1
    waits = itertools.cycle([0.12, 0.0, 0.06])
    server.twists.extend(delayed(next(waits)) for _ in range(24))
    found = ask(server.url, sequences, concurrency=4)
    assert 2 <= server.most_in_flight <= 4
    for top, other in zip(expected, found, strict=True):
        assert all(np.array_equal(getattr(top, name), getattr(other, name)) for name in vars(top))


def test_records_are_the_codecs(server):
    with teacher(server.url, k=5) as connected:
        tops = list(connected.read_top(PACKED, 7))
        read = list(connected.deliver(PACKED, 7))
    assert [each.sequences for each in read] == [1] * len(PACKED)
    for top, each in zip(tops, read, strict=True):
        records = each.encode()
        assert len(records) == len(top) and np.array_equal(records["top_ids"], top.ids)
        assert np.allclose(-TOP_STEP * records["top_logprobs"], top.logprobs, atol=TOP_STEP)
        assert np.allclose(-TOP_STEP * records["residual"], top.residual, atol=TOP_STEP)
        assert np.allclose(-KNOWN_STEP * records["known"][:, 0], top.gold, atol=KNOWN_STEP)
        assert (records["entropy"] == UNKNOWN_ENTROPY).all()
    with teacher(server.url, k=VOCABULARY) as connected:
        (each,) = connected.deliver(packed([[]], targets=0.1), 0)
    assert (each.encode()["residual"] == UNKNOWN).all()


# ---------------------------------------------------------------------- what is tried again


def delayed(seconds: float) -> Callable[[Any], Any]:
    def wait(answer: Any) -> Any:
        time.sleep(seconds)
        return answer

    return wait


TEMPORARY = {
    "500 twice": [lambda _: error(500, "EngineDeadError")] * 2,
    "503": [lambda _: error(503, "starting")],
    "429": [lambda _: error(429, "busy", Retry_After="0")],
    "connection drop": [lambda _: Torn()],
    "time-out": [delayed(1.0)],
    "all of them": [
        lambda _: error(502, "?"),
        lambda _: Torn(),
        lambda _: error(429, "busy"),
        delayed(1.0),
    ],
}


@pytest.mark.parametrize(
    "backend, twists",
    [*(("http", each) for each in TEMPORARY.values()), ("sglang", TEMPORARY["all of them"])],
    ids=[*TEMPORARY, "sglang"],
)
def test_what_may_pass_is_tried_again(server, backend, twists, monkeypatch):
    sequences = packed([[]])
    (expected,) = ask(server.url, sequences, backend=backend)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.5)
    server.asked.clear()
    server.twists.extend(twists)
    (found,) = ask(server.url, sequences, backend=backend)
    assert len(server.asked) == len(twists) + 1
    assert np.array_equal(found.logprobs, expected.logprobs) and np.array_equal(
        found.ids, expected.ids
    )


@pytest.mark.parametrize(
    "twists", [value * 3 for value in TEMPORARY.values()][:5], ids=list(TEMPORARY)[:5]
)
def test_after_the_last_attempt_the_failure_is_told(server, twists, monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 1)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.5)
    server.twists.extend(twists)
    with pytest.raises(
        ModelError, match=rf"{server.url} gave no answer to 2 requests, the last time: \S+"
    ) as caught:
        ask(server.url, packed([[]]))
    assert "teacher.concurrency" in caught.value.remedy and len(server.asked) == 2


def test_a_server_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(
        ModelError, match="gave no answer to 1 requests, the last time: ConnectError"
    ):
        ask(url, packed([[]]))


def test_the_server_says_how_long_to_wait(server):
    server.twists.extend(
        [
            lambda _: error(429, "busy", Retry_After="1"),
            lambda _: error(503, "busy", Retry_After="1"),
        ]
    )
    began = time.monotonic()
    ask(server.url, packed([[]]))
    assert time.monotonic() - began >= 2.0 and len(server.asked) == 3


def test_retry_after_is_a_number_a_date_or_nothing():
    def seconds(text: str | None) -> float:
        return remote._parse_retry_after(
            httpx.Response(429, headers={"Retry-After": text} if text is not None else {})
        )

    soon = datetime.now(UTC) + timedelta(seconds=90)
    assert 85 < seconds(format_datetime(soon, usegmt=True)) <= 90
    assert seconds("7") == 7 and seconds("999999999") == remote.LONGEST_PAUSE
    past = format_datetime(soon - timedelta(days=1), usegmt=True)
    for text in (None, "", "soon", "-3", "1e9", past, "Wed, 21 Oct 2099 07:28:00"):
        assert seconds(text) == 0


def test_waiting_grows_and_is_never_in_step():
    waits = [[remote._choose_backoff(attempt) for _ in range(200)] for attempt in (1, 2, 3, 50)]
    for attempt, found in enumerate(waits[:3]):
        base = remote.BACKOFF_SECONDS * 2**attempt
        assert min(found) >= base / 2 and max(found) <= base * 1.5 and len(set(found)) > 100
    assert max(waits[3]) <= remote.LONGEST_BACKOFF * 1.5


@pytest.mark.long
def test_a_trial_times_whole_rounds_of_answers(server, tiny_teacher, tmp_path, monkeypatch):
    """Answers come at the same time: one takes as long as all that are in progress, and none is a
    warm-up.
    """

    def slowly(answer: Any) -> Any:
        time.sleep(0.4)
        return answer

    read = []
    inner = RemoteTeacher.deliver

    def counted(self: RemoteTeacher, sequences: Sequences, first: int) -> Iterator[Any]:
        for delivery in inner(self, sequences, first):
            read.append(delivery.sequences)
            yield delivery

    def seconds(concurrency: int) -> float:
        server.twists.clear()
        server.twists.extend([slowly] * 20)
        read.clear()
        url = {"url": server.url, "model": "teacher", "tokenizer": str(tiny_teacher)}
        text = str(ROOT / "examples/austen/text/persuasion.txt")
        job = {
            "kind": "precompute",
            "teacher": HTTP | url | {"concurrency": concurrency},
            "data": {
                "train": text,
                "sequence_length": 16,
                "max_train_samples": 6,
                "validation_fraction": 0,
            },
            "cache": {"profile": "topk", "k": 5},
        }
        found = estimate_job(parse_config(job), tmp_path).capture
        assert found is not None and found.seconds is not None
        return found.seconds

    monkeypatch.setattr(RemoteTeacher, "deliver", counted)
    assert seconds(concurrency=6) >= 0.4 and len(read) == 6
    monkeypatch.setattr(trial, "SECONDS", 0.0)
    seconds(concurrency=3)
    assert len(read) >= 3


# ---------------------------------------------------------------------- what is refused


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    """Return a twist that changes the answer's choice."""

    def twist(answer: Any) -> Any:
        change(answer["choices"][0])
        return answer

    return twist


def at(place: int, change: Callable[[dict[str, Any], str], Any]) -> Callable[[Any], Any]:
    """Return a twist that changes an item of prompt_logprobs, given the id of its token."""
    return changed(
        lambda choice: change(
            choice["prompt_logprobs"][place], str(choice["prompt_token_ids"][place])
        )
    )


def shifted(choice: dict[str, Any]) -> None:
    choice["prompt_logprobs"] = [None, *choice["prompt_logprobs"][2:], choice["prompt_logprobs"][1]]


def set_best(item: dict[str, Any], logprob: Any) -> None:
    next(iter(item.values()))["logprob"] = logprob


def without_the_least(item: dict[str, Any], gold: str) -> None:
    others = [token for token in item if token != gold]
    del item[min(others, key=lambda token: item[token]["logprob"])]


WRONG = {
    "short": (changed(lambda c: c["prompt_logprobs"].pop()), "position 0: .*must have 40 items"),
    "long": (
        changed(lambda c: c["prompt_logprobs"].append({})),
        "position 0: .*must have 40 items.* but are 41",
    ),
    "none": (changed(lambda c: c.update(prompt_logprobs=None)), "position 0: .*but are NoneType"),
    "not asked for": (
        changed(lambda c: c.pop("prompt_logprobs")),
        "position 0: .*no choice with prompt_logprobs",
    ),
    "two choices": (lambda answer: {"choices": answer["choices"] * 2}, "position 0: .*no choice"),
    "no choice": (lambda _: {"choices": []}, "position 0: .*no choice"),
    "something else": (lambda _: ["hello"], "position 0: .*no choice"),
    "no json": (lambda _: Response("<html>", 200), "position 0: .*no JSON"),
    "other tokens": (
        changed(lambda c: c["prompt_token_ids"].insert(0, 1)),
        "position 0: .*read other tokens",
    ),
    "not shifted": (
        changed(lambda c: c["prompt_logprobs"].insert(0, c["prompt_logprobs"].pop())),
        "may be shifted",
    ),
    "shifted": (changed(shifted), r"position \d+: .*the next token, id \d+, is not among"),
    "missing gold": (
        at(13, lambda item, gold: item.pop(gold)),
        "position 12: .*the next token, id",
    ),
    "a hole": (
        changed(lambda c: c["prompt_logprobs"].__setitem__(13, None)),
        "position 12: .*AttributeError",
    ),
    "too few": (at(13, without_the_least), "position 12: .*entries, where 6 were asked for"),
    "nan": (
        at(13, lambda item, _: set_best(item, math.nan)),
        "position 12: .*nan is no log-probability",
    ),
    "null": (
        at(13, lambda item, _: set_best(item, None)),
        "position 12: .*None is no log-probability",
    ),
    "text": (
        at(13, lambda item, _: set_best(item, "-1.0")),
        "position 12: .*'-1.0' is no log-probability",
    ),
    "true": (
        at(13, lambda item, _: set_best(item, False)),
        "position 12: .*False is no log-probability",
    ),
    "positive": (
        at(13, lambda item, _: set_best(item, 0.25)),
        "position 12: .*0.25 is no log-probability",
    ),
    "infinite": (
        at(13, lambda item, _: set_best(item, math.inf)),
        "position 12: .*inf is no log-probability",
    ),
    "no number": (at(13, lambda item, gold: item[gold].pop("logprob")), "position 12: .*KeyError"),
    "bare": (at(13, lambda item, gold: item.update({gold: -1.0})), "position 12: .*TypeError"),
    "too much": (
        at(13, lambda item, _: [each.update(logprob=-0.1) for each in item.values()]),
        "position 12: .*probabilities sum to",
    ),
    "no probabilities": (
        at(
            13,
            lambda item, _: [each.update(logprob=each["logprob"] - 10.0) for each in item.values()],
        ),
        "position 12: .*of the probability is missing, and cannot lie below the last entry",
    ),
    "outside": (
        at(13, lambda item, _: item.update({"2048": entry(-9.0, 9, 0)})),
        "position 12: .*id 2048 lies outside",
    ),
    "below": (
        at(13, lambda item, _: item.update({"-1": entry(-9.0, 9, 0)})),
        "position 12: .*id -1 lies outside",
    ),
    "words": (
        at(13, lambda item, _: item.update({"the": entry(-9.0, 9, 0)})),
        "position 12: .*invalid literal",
    ),
}


@pytest.mark.parametrize("twist, detail", WRONG.values(), ids=WRONG)
def test_a_wrong_answer_is_named_and_nothing_is_filled(server, twist, detail):
    """The request is not repeated: a server that is wrong once is not trusted a second time."""
    sequences = packed([[], []], targets=1.1)
    server.twists.extend([lambda answer: answer, twist])
    where = f"^sequence 8, {'' if 'position' in detail else '.*'}{detail}"
    with teacher(server.url, concurrency=1) as connected:
        reading = connected.deliver(sequences, 7)
        next(reading)
        with pytest.raises(ModelError, match=where) as caught:
            next(reading)
    assert len(server.asked) == 2 and caught.value.remedy


def test_a_position_is_counted_from_the_start_of_the_sequence(server):
    server.twists.append(at(3, lambda item, gold: item.pop(gold)))
    with pytest.raises(ModelError, match="sequence 9, position 22: "):
        ask(
            server.url, Sequences(PACKED.tokens[2:3], PACKED.document_start[2:3], only(22)), first=9
        )


def only(place: int) -> np.ndarray:
    mask = np.zeros((1, LENGTH), bool)
    mask[0, place] = True
    return mask


@BACKENDS
def test_a_model_with_more_tokens_than_the_tokenizer_is_refused(server, backend):
    server.vocabulary = 2112
    with pytest.raises(ModelError, match="lies outside the tokenizer's 2048 tokens"):
        ask(server.url, PACKED, k=64, backend=backend)


REFUSALS = {
    "model": ({"model": "other"}, 404, "teacher.model"),
    "k": ({"k": 5000}, 400, "--max-logprobs"),
    "key": ({"api_key_env": "KD_TEACHER_KEY"}, 401, "teacher.api_key_env"),
    "sglang": ({"backend": "sglang"}, 400, "--context-length"),
    "key of sglang": (
        {"backend": "sglang", "api_key_env": "KD_TEACHER_KEY"},
        401,
        "teacher.api_key_env",
    ),
}


@pytest.mark.parametrize("changes, status, remedy", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_told_in_the_servers_words_at_once(
    server, monkeypatch, changes, status, remedy
):
    server.key = "right" if status == 401 else None
    server.max_logprobs = 20 if status == 400 else 4096
    server.max_model_len = LENGTH - 1
    monkeypatch.setenv("KD_TEACHER_KEY", "wrong-key-9c1")
    with pytest.raises(
        ModelError, match=f"answers {status}: .*(not exist|max allowed: 20|Unauthorized|longer)"
    ) as caught:
        ask(server.url, packed([[]]), **changes)
    assert remedy in caught.value.remedy and len(server.asked) == 1
    assert "wrong-key-9c1" not in str(caught.value)  # the server repeats it


def test_the_key_comes_from_the_environment_and_stays_there(server, monkeypatch):
    server.key = "a-secret-4711"
    monkeypatch.setenv("KD_TEACHER_KEY_LAB", " a-secret-4711\n")
    with teacher(server.url, api_key_env="KD_TEACHER_KEY_LAB") as connected:
        assert len(list(connected.read_top(packed([[]]), 0))) == 1
        shown = [
            repr(connected),
            repr(connected.client.headers),
            connected.config.model_dump_json(),
        ]
    shown.append(json.dumps(server.asked))
    assert not any("a-secret-4711" in text for text in shown)


@pytest.mark.parametrize("value", [None, "", "  \n", "two\nlines", "schlüssel"])
def test_a_key_that_is_not_there_or_not_one_is_refused_without_showing_it(
    server, monkeypatch, value
):
    monkeypatch.delenv("KD_TEACHER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("KD_TEACHER_KEY", value)
    with pytest.raises(ModelError, match="KD_TEACHER_KEY holds no API key") as caught:
        teacher(server.url, api_key_env="KD_TEACHER_KEY")
    assert (
        caught.value.remedy and "schl" not in str(caught.value) and "lines" not in str(caught.value)
    )


@pytest.mark.parametrize(
    "codec", [Codec("threshold", 10, threshold=0.04), Codec("topk", 10, k=2, always_keep=(3,))]
)
def test_what_a_server_cannot_tell_is_refused(codec):
    with pytest.raises(ModelError, match=r"cache\.profile to topk and cache\.always_keep"):
        RemoteTeacher.connect(options("http://127.0.0.1:1"), codec)


def test_a_stop_is_heard_while_the_server_is_silent(server, monkeypatch):
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(remote, "WAITING_SECONDS", 0.1)
    events = []
    monitor = Monitor(events.append, lambda: bool(events))
    answered = threading.Event()
    stopped = threading.Event()

    def answer_late(answer: Any) -> Any:
        stopped.wait(PATIENCE_SECONDS)
        answered.set()
        return answer

    server.twists.append(answer_late)
    with teacher(server.url, monitor=monitor) as connected:
        with pytest.raises(Interrupted):
            list(connected.deliver(packed([[]]), 0))
        assert not answered.is_set(), "the stop did not wait for the answer"
        stopped.set()
    assert events and events[0].data["phase"] == f"waiting for {server.url}"


def test_a_failure_ends_the_attempts_of_the_others(server):
    server.twists.extend(
        [lambda _: error(400, "no"), *[lambda _: error(503, "busy", Retry_After="60")] * 9]
    )
    began = time.monotonic()
    with pytest.raises(ModelError, match="answers 400"):
        ask(server.url, packed([[10, 20, 30]]), concurrency=4)
    assert time.monotonic() - began < 60, "the others would wait a minute before they try again"


# ---------------------------------------------------------------------- tokenizers


def test_the_servers_tokenizer_is_the_one_we_have(server, tokenizer):
    probes = encode_probes(tokenizer, PROBE_TEXTS)
    swapped = TokenizerProbe(probes[1].text, (*probes[1].ids[:3], *probes[1].ids[4:]))
    with teacher(server.url) as connected:
        connected.require_same_tokenizer(probes, 511)
        with pytest.raises(
            TokenizerMismatch, match=r"does not encode '  leading spaces.*teacher\.tokenizer"
        ) as caught:
            connected.require_same_tokenizer([probes[0], swapped], 511)
        assert "teacher.tokenizer" in caught.value.remedy
        with pytest.raises(
            ModelError, match=r"context of 512 tokens, but data\.sequence_length is 512"
        ):
            connected.require_same_tokenizer(probes, 512)


@pytest.mark.parametrize(
    "answer", [error(404, "Not Found"), Response("<html>", 200), Response("[1]", 200)]
)
def test_a_server_that_does_not_tokenize_is_believed_aloud(server, tokenizer, monkeypatch, answer):
    monkeypatch.setattr(server, "no_tokenizer", answer)
    events: list[Event] = []
    with teacher(server.url, monitor=Monitor(events.append)) as connected:
        connected.require_same_tokenizer(encode_probes(tokenizer, PROBE_TEXTS), 10_000)
    assert [event.type for event in events] == ["warning"] and "/tokenize" in events[0].data[
        "message"
    ]


def test_the_servers_tokenizer_is_asked_with_the_text_of_the_job(server, tiny_teacher, tmp_path):
    """A rule may show in the text of the job and in no probe text."""
    assert not any("was" in text for text in PROBE_TEXTS)
    (tmp_path / "text.txt").write_text("It was so. " * 300, encoding="utf-8")
    url = {"url": server.url, "model": "teacher", "tokenizer": str(tiny_teacher)}
    job = {
        "kind": "precompute",
        "teacher": HTTP | url,
        "data": {"train": str(tmp_path / "text.txt"), "sequence_length": 16},
        "cache": {"profile": "topk", "k": 5},
    }
    plan = plan_capture(parse_config(job))
    library = server.tokenizer.backend_tokenizer
    with open_writer(tmp_path, plan.identity) as writer:
        with open_reader(plan, writer, Monitor()):
            pass
        library.normalizer = normalizers.Replace("was", "is")
        with (
            pytest.raises(TokenizerMismatch, match="does not encode 'It was"),
            open_reader(plan, writer, Monitor()),
        ):
            pass


def test_what_is_left_unread_is_given_up_and_the_next_reading_is_whole(server):
    sequences = packed([[10, 20]] * 4)
    with teacher(server.url, concurrency=2) as connected:
        expected = list(connected.read_top(sequences, 0))
        server.twists.extend([lambda answer: answer] * 3 + [delayed(1.0)] * 6)
        reading = connected.read_top(sequences, 0)
        next(reading)
        reading.close()
        found = list(connected.read_top(sequences, 0))
        left = connected.read_top(sequences, 0)
        next(left)
    for top, other in zip(expected, found, strict=True):
        assert all(np.array_equal(getattr(top, name), getattr(other, name)) for name in vars(top))


# ---------------------------------------------------------------------- names and configuration


def test_the_name_of_a_teacher_is_where_and_what_it_is():
    base = options("http://host:8000", revision="v1")
    same = [
        options(
            "http://host:8000/v1/",
            revision="v1",
            concurrency=1,
            api_key_env="KD_TEACHER_KEY",
        ),
        options("http://host:8000/", revision="v1", tokenizer="elsewhere"),
    ]
    other = [
        options("http://host:8001", revision="v1"),
        options("http://host:8000", revision="v2"),
        options("http://host:8000"),
        options("http://host:8000", revision="v1", model="Teacher"),
    ]
    assert {hash_remote_teacher(each) for each in same} == {hash_remote_teacher(base)}
    assert len({hash_remote_teacher(each) for each in [base, *other]}) == 5
    assert len(hash_remote_teacher(base)) == 64
    assert [find_server_url(each) for each in same] == ["http://host:8000"] * 2


def test_an_address_below_a_path_is_kept(server):
    with teacher("http://127.0.0.1:1/lab/v1") as connected:
        assert str(connected.client.build_request("POST", "/v1/completions").url) == (
            "http://127.0.0.1:1/lab/v1/completions"
        )


HTTP = {"backend": "http", "model": "m", "url": "https://host/v1", "tokenizer": "t"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"url": None}, "needs teacher.url"),
        ({"tokenizer": None}, "needs teacher.tokenizer"),
        ({"gguf_file": "a.gguf"}, "no use for gguf_file"),
        ({"dtype": "float16"}, "no use for dtype"),
        ({"backend": "local"}, "no use for tokenizer, url"),
        ({"backend": "sglang", "url": None}, "backend sglang needs teacher.url"),
        ({"backend": "sglang", "proposal": "p"}, "sglang has no use for proposal"),
        ({"url": "host:8000"}, "pattern"),
        ({"url": "ftp://host"}, "pattern"),
        ({"url": "http://name:secret@host"}, "pattern"),
        ({"url": "http://host/v1?key=secret"}, "pattern"),
        ({"api_key_env": "AWS_SECRET_ACCESS_KEY"}, "pattern"),
        ({"api_key_env": "KD_REDIS_URL"}, "pattern"),
        ({"concurrency": 0}, "greater than or equal to 1"),
    ],
)
def test_a_backend_has_the_fields_it_needs_and_no_others(changes, message):
    TeacherConfig(**HTTP)
    with pytest.raises(ValidationError, match=message):
        TeacherConfig(**copy.deepcopy(HTTP) | changes)
