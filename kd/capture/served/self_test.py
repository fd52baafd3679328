"""Test a teacher's server before anything is captured from it.

    requests   equal ones at the same time: replicas agree, within the noise of bfloat16
    places     what it predicts after the first token, after half and after all but the last one of
               a prompt is what it says of these positions: none is shifted
    prose      on ordinary text a model loses about as much as its entropy says. One that answers at
               a higher temperature seems far less sure than it is
    weights    if they are on this machine, too, a forward pass here says the same

Answers are checked one by one, too (``kd.capture.remote``, ``kd.capture.served.scoring``): the ids
that were sent come back, no position is missing, and the scores of chosen ids agree with those of
the most probable ones.

Shapes: N positions of the test's text, K entries of a position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.manifest import ServedTest
from cache.profiles.threshold import SCORED_TOP
from cache.records import Sequences
from kd.capture import remote
from kd.capture.noise import ALLOWED_NOISE
from kd.capture.remote import TopEntries
from kd.errors import ModelError

#: Ordinary text that no model has learned by heart.
PROSE = (
    "She had been three days in the house before any body spoke to her of the letter. It had come "
    "in the morning, when they were all at breakfast, and her sister had put it away without a "
    "word. She could not ask what was in it, and nobody seemed to think that she ought to be told. "
    "Her father had gone out with the dogs, and would not be home before dinner. She walked to the "
    "end of the garden and back again, and then she sat down near the window, where she could see "
    "the road. The rain had stopped, and there was a little light in the west. She thought of all "
    "that had been said the evening before, and was sorry that she had answered so quickly."
)
#: Equal requests.
REQUESTS = 4
#: Nats by which their answers, and those about the same position, may differ.
MOST_SPREAD = ALLOWED_NOISE["bfloat16"]
#: Nats by which the entropy may exceed the loss on ordinary text. At temperature 2 it exceeds that
#: of small language models by 1.5 to 4, at 1 it lies below it or 0.3 above.
MOST_SURPLUS = 1.0
#: Nats times tokens by which a short text may deviate from ordinary ones.
_SHORT = 10.0


@dataclass(frozen=True)
class Probe:
    """The test's text, and the most probable tokens by the weights on this machine, if any are."""

    tokens: list[int]
    local: TopEntries | None = None

    @property
    def sequences(self) -> Sequences:
        """The text as one document, all of whose positions have a target."""
        place = np.arange(len(self.tokens))[None]
        targets = place < len(self.tokens) - 1
        return Sequences(np.array([self.tokens], np.uint32), place == 0, targets)


def ask_often(teacher: remote.RemoteTeacher, probe: Probe) -> list[Any]:
    """Return the answers to equal requests about ``probe``."""
    (piece,) = remote.cut_into_prompts(probe.sequences, 0, 0)
    return teacher.ask(teacher.make_question(piece) for _ in range(REQUESTS))


def examine_server(teacher: remote.RemoteTeacher, probe: Probe) -> ServedTest:
    """Test a server that returns its most probable tokens. Raises as ``judge``."""
    found = ask_often(teacher, probe)
    return judge(teacher, probe, [(top, bound_entropy(top)) for top in found])


def bound_entropy(top: TopEntries) -> float:
    """Bound the mean entropy from below: no other token is more probable than the last entry."""
    logp_NK = np.maximum(top.logprobs, -1e4).astype(np.float64)
    known_N = (np.exp(logp_NK) * logp_NK).sum(1)
    return -float((known_N + np.exp(top.residual) * logp_NK[:, -1]).mean())


def judge(
    teacher: remote.RemoteTeacher, probe: Probe, answers: list[tuple[TopEntries, float]]
) -> ServedTest:
    """Judge the answers to equal requests about ``probe``, and ask what it predicts after some.

    With each answer comes the mean entropy. Raises ``ModelError`` that names what is wrong.
    """
    url, tokens = remote.find_server_url(teacher.config), probe.tokens
    top, entropy = answers[0]
    spread = max(compare(top, other) for other, _ in answers[1:])
    if not spread <= MOST_SPREAD:
        raise ModelError(
            f"{url}: {len(answers)} equal requests gave log-probabilities that differ by "
            f"{spread:.3g} nats, and its replicas may differ by {MOST_SPREAD:g}.",
            "Serve replicas of the same weights, precision and version, or one alone.",
        )
    _require_places(teacher, tokens, top)
    loss = -float(top.gold.mean())
    if entropy - loss > MOST_SURPLUS + _SHORT / len(tokens):
        raise ModelError(
            f"{url} answers at a temperature above 1: on ordinary text its entropy is "
            f"{entropy:.2f} nats, and its loss only {loss:.2f}.",
            "Serve the model without a processor of logits that changes the temperature.",
        )
    if probe.local is not None and not (apart := compare(probe.local, top)) <= MOST_SPREAD:
        raise ModelError(
            f"{url} does not answer as the weights in {teacher.config.tokenizer} do: their "
            f"log-probabilities differ by {apart:.3g} nats. It has other weights, exchanges ids, "
            "shifts its answers or changes the temperature.",
            "Serve these weights, or set teacher.tokenizer to a folder without weights.",
        )
    return ServedTest(len(answers), spread)


def compare(one: TopEntries, other: TopEntries) -> float:
    """Return by how many nats two answers differ: a root mean square under the first one's p."""
    k = min(SCORED_TOP, one.ids.shape[1], other.ids.shape[1])
    (ids_NK, logp_NK), (other_NK, theirs_NK) = (_cut(each, k) for each in (one, other))
    same = ids_NK[:, :, None] == other_NK[:, None, :]
    found_NK = np.where(same, theirs_NK[:, None, :], -np.inf).max(2)
    # A token that the other answer leaves out is at most as probable there as its last entry.
    found_NK = np.where(np.isinf(found_NK), theirs_NK[:, -1:], found_NK)
    squared_NK = np.exp(logp_NK) * np.square(logp_NK - found_NK)
    return math.sqrt(float(squared_NK.sum(1).mean()))


def _cut(top: TopEntries, k: int) -> tuple[NDArray[Any], NDArray[Any]]:
    return top.ids[:, :k], np.maximum(top.logprobs[:, :k], -1e4).astype(np.float64)


def _require_places(teacher: remote.RemoteTeacher, tokens: list[int], top: TopEntries) -> None:
    """Compare what the server predicts after some beginnings with what it says of prompts."""
    url, last = remote.find_server_url(teacher.config), len(tokens) - 2
    places = sorted({0, last // 2, last})
    found = teacher.ask(teacher.make_next_question(tokens[: place + 1]) for place in places)
    for place, own in zip(places, found, strict=True):
        if own is None:
            message = "whether positions are shifted could not be checked: it returns no logprobs"
            teacher.monitor.emit("warning", message=f"{url}: {message}")
            return
        rows = [row for row in (place, place - 1, place + 1) if 0 <= row <= last]
        apart, *beside = (compare(own, top.select(slice(row, row + 1))) for row in rows)
        if not apart <= MOST_SPREAD:
            what = "it answers at another temperature, or with other weights, about prompts"
            if min(beside, default=math.inf) <= MOST_SPREAD:
                what = "its answers about prompts are shifted by one position"
            raise ModelError(
                f"{url}: after {place + 1} tokens it predicts the next one otherwise than it says "
                f"of a prompt that goes on ({apart:.3g} nats): {what}.",
                "Update the server, or use another one.",
            )
