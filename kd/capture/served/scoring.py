"""The requests and answers of a server that scores chosen ids: vLLM from version 0.33 on.

    POST /inference/v1/generate
    token_ids                                    the L tokens of a prompt
    sampling_params.prompt_logprobs              K, the most probable tokens that are returned
    sampling_params.prompt_logprob_token_ids     L - 1 lists: the ids to score at each position

    prompt_logprobs            as in ``kd.capture.remote``
    prompt_token_id_logprobs   base64 of a .npy file: float32 (L - 1, A). Row t has the natural
                               logarithms of p at position t, at temperature 1; -inf fills rows up

No temperature is sent: a server applies it to generated tokens alone.

Shapes: N positions with a target, L tokens of a prompt, A asked ids of a position, K entries.
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.profiles.threshold import SCORED_TOP
from kd.capture import remote
from kd.errors import ModelError

#: The ids to score, (N, A).
Ids = NDArray[np.int64]
PATH = "/inference/v1/generate"
#: The first version that scores chosen ids.
FIRST_VERSION = (0, 33)
#: Nats by which two values of one answer may differ for the same token.
SAME_NATS = 0.02
#: What vLLM writes for -inf among the most probable tokens.
_LEAST = np.float32(-9999.0)


def require_scoring_version(teacher: remote.RemoteTeacher) -> str:
    """Return the version of a server of vLLM. Raises ``ModelError`` if it cannot score ids."""
    version = str(teacher.read_about("/version").get("version") or "")
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < FIRST_VERSION:
        found = f"is vLLM {version}" if numbers else "does not say at /version that it is vLLM"
        url = remote.find_server_url(teacher.config)
        raise ModelError(
            f"{url} {found}, and teacher.proposal needs vLLM 0.33 or later, which scores ids.",
            "Update the server, or remove teacher.proposal and set cache.profile to topk.",
        )
    return version


@dataclass(frozen=True, eq=False)
class Scores:
    """The most probable tokens at N positions, and log-probabilities of the asked ids, (N, A)."""

    top: remote.TopEntries
    asked: NDArray[np.float32]

    @staticmethod
    def concatenate(parts: list[Scores], k: int, width: int) -> Scores:
        """Join the positions of any number of ``parts``, in order."""
        asked = [np.empty((0, width), np.float32), *(part.asked for part in parts)]
        top = [remote.TopEntries.empty(k), *(part.top for part in parts)]
        return Scores(remote.TopEntries.concatenate(top), np.concatenate(asked))


def make_question(
    teacher: remote.RemoteTeacher, piece: remote.DocumentPrompt, ids: Ids
) -> remote.Question:
    """Return the question that has ``ids`` (N, A) scored at the targets of ``piece``."""
    rows: list[list[int]] = [[] for _ in piece.tokens[1:]]
    for place, own in zip(piece.targets, ids.tolist(), strict=True):
        rows[place] = own
    vocabulary = teacher.codec.vocabulary_size
    k = min(SCORED_TOP, vocabulary)
    asked = {"prompt_logprobs": k, "prompt_logprob_token_ids": rows}
    options = {**asked, "max_tokens": 1, "detokenize": False}  # vLLM has no 0
    own_ids = {"token_ids": piece.tokens, "return_token_ids": True}
    body = {"model": teacher.config.model, **own_ids, "sampling_params": options}
    read = partial(parse_scores, piece=piece, ids=ids, k=k, vocabulary=vocabulary)
    return remote.Question(piece, PATH, body, read)


def parse_scores(
    answer: Any, piece: remote.DocumentPrompt, ids: Ids, k: int, vocabulary: int
) -> Scores:
    """Return the scores of the targets of ``piece``. Raises ``ModelError`` for a wrong answer."""
    names = ("prompt_logprobs", "prompt_token_ids", "prompt_token_id_logprobs")
    items, read, text = (answer.get(name) if isinstance(answer, dict) else None for name in names)
    top = remote.parse_items(items, read, piece, k, vocabulary)
    asked = _decode_scores(text, piece, ids.shape[1])
    scores = Scores(top, asked[piece.targets])
    _require_agreement(scores, piece, ids)
    return scores


def _decode_scores(text: Any, piece: remote.DocumentPrompt, count: int) -> NDArray[np.float32]:
    try:
        found = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (TypeError, ValueError, EOFError) as error:
        raise piece.refuse(f"prompt_token_id_logprobs cannot be read ({error!r})") from error
    expected = (len(piece.tokens) - 1, count)
    if (found.dtype, found.shape) != (np.float32, expected):
        last = ": the last position is missing" if found.shape[:1] == (expected[0] - 1,) else ""
        got = f"{found.dtype} {found.shape}{last}"
        raise piece.refuse(f"prompt_token_id_logprobs must be float32 {expected}, but are {got}")
    return np.asarray(found)


def _require_agreement(scores: Scores, piece: remote.DocumentPrompt, ids: Ids) -> None:
    """Raise ``ModelError`` where the asked ids contradict the most probable tokens."""
    top_N1K, asked = scores.top.logprobs[:, None], np.maximum(scores.asked, _LEAST)
    same = ids[:, :, None] == scores.top.ids[:, None]
    apart = np.where(same, np.abs(asked[:, :, None] - top_N1K), 0.0).max(axis=2)
    # A token beside the most probable ones is no more probable than the last of them.
    apart = np.where(same.any(axis=2), apart, asked - top_N1K[:, :, -1])
    wrong = ~(apart <= SAME_NATS) | ~(scores.asked <= 0.0)  # NaN too
    for row, column in np.argwhere(wrong)[:1]:
        raise piece.refuse(
            f"id {ids[row, column]} has the log-probability {scores.asked[row, column]:.3f} among "
            "the ids that were asked for, which the most probable tokens contradict: ids are "
            "swapped, or positions are shifted",
            piece.targets[row],
        )
