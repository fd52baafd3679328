"""The requests and answers of SGLang, as version 0.5.23 has them.

    POST /generate
    input_ids, logprob_start_len 0    the L tokens of a prompt, none of which comes of its cache
    top_logprobs_num                  K, the most probable tokens that are returned
    return_hidden_states              profile hidden: the server runs with the mode full

    prompt_token_ids                  the tokens that it read
    meta_info
    ├── input_token_logprobs          L items (log-probability, id, text); the first has none
    ├── input_top_logprobs_*_flat_b64 base64 of float32 and int32 (L - 1, K), little-endian: row t
    │                                 is the prediction of position t; _null_prefix 1 stands for
    │                                 the first token, which nothing predicts
    └── hidden_states                 (L, D) as lists, then those of generated tokens. They are what
                                      the LM head reads: after the last norm for most models

No temperature is sent: a server applies it to generated tokens alone.

Shapes: N positions with a target, L tokens of a prompt, K entries, D hidden width.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cache.profiles.threshold import SCORED_TOP
from kd.capture import remote
from kd.capture.remote import DocumentPrompt, Question, TopEntries
from kd.capture.served.scoring import SAME_NATS
from kd.errors import ModelError

_TOP = "input_top_logprobs"


@dataclass(frozen=True, eq=False)
class StateEntries:
    """What a server says of N positions: hidden states (N, D), and the most probable tokens."""

    top: TopEntries
    states: NDArray[np.float32]


class SGLangTeacher(remote.RemoteTeacher):
    """Reads records from a server of SGLang."""

    gives_states: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "Start SGLang with a longer --context-length, and for profile hidden with "
        "--return-hidden-states-mode full --chunked-prefill-size -1."
    )

    def read_server(self) -> Mapping[str, Any]:
        """Return what the server says of itself: its version, and the fields of its command line.

        Raises ``ModelError`` if it is not SGLang, or serves another model than ``teacher.model``.
        """
        url = remote.find_server_url(self.config)
        about = self.read_about("/server_info")
        if "version" not in about or "model_path" not in about:
            raise ModelError(
                f"{url} does not say at /server_info that it is SGLang.",
                "Check teacher.url, or set teacher.backend to http for vLLM.",
            )
        if self.config.model not in (about.get("served_model_name"), about["model_path"]):
            raise ModelError(
                f"{url} serves {about.get('served_model_name') or about['model_path']}, but "
                f"teacher.model is {self.config.model}.",
                "Set teacher.model to the name of the model on the server.",
            )
        return about

    def find_context(self, answer: Mapping[str, Any]) -> Any:
        """Return the length of a prompt that the server refuses; /tokenize tells another one."""
        return self.read_server().get("max_req_input_len")

    def make_question(self, piece: DocumentPrompt) -> Question:
        """Return the question for the entries of a prompt, and with profile hidden its states."""
        vocabulary = self.codec.vocabulary_size
        gives = self.codec.rules.needs_lm_head
        k = self.codec.k or SCORED_TOP
        flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
        asked = {"logprob_start_len": 0, "return_prompt_token_ids": True, **flat}
        # One token: without any, no hidden states come back.
        body = _make_body(piece.tokens, min(k, vocabulary), {"max_new_tokens": 1})
        body |= {"return_hidden_states": gives, **asked}
        parse = parse_states if gives else parse_answer
        read = partial(parse, piece=piece, k=k, vocabulary=vocabulary)
        return Question(piece, "/generate", body, read)

    def make_next_question(self, tokens: list[int]) -> Question:
        """Return the question for the most probable tokens after ``tokens``."""
        k = min(SCORED_TOP, self.codec.k or SCORED_TOP, self.codec.vocabulary_size)
        body = _make_body(tokens, k, {"max_new_tokens": 1, **remote.NEUTRAL})
        return Question(DocumentPrompt(0, 0, tokens, []), "/generate", body, _parse_next)


def _make_body(tokens: list[int], k: int, sampling: Mapping[str, object]) -> dict[str, object]:
    asked = {"return_logprob": True, "top_logprobs_num": k, "sampling_params": sampling}
    return {"input_ids": tokens, **asked}


def parse_answer(answer: Any, piece: DocumentPrompt, k: int, vocabulary: int) -> TopEntries:
    """Return the entries of the targets of ``piece``. Raises ``ModelError`` for a wrong answer."""
    try:
        found = answer["meta_info"]
        read = answer["prompt_token_ids"]
        gold = [item[0] for item in found["input_token_logprobs"]]
        prefix = found[f"{_TOP}_null_prefix"]
        values, ids = (_decode(found, name) for name in ("val", "idx"))
    except remote.MISSHAPEN as error:
        what = f"no flat log-probabilities as of SGLang 0.5.23 ({remote.describe_error(error)})"
        raise piece.refuse(what) from error
    expected = (len(piece.tokens) - 1, min(k, vocabulary))
    if (len(gold) - 1, prefix, values.shape) != (expected[0], 1, expected):
        last = ": the last position is missing" if len(values) == expected[0] - 1 else ""
        got = f"{values.shape} after {prefix} without, and {len(gold)} of the tokens{last}"
        raise piece.refuse(f"log-probabilities must be {expected} after 1 without, but are {got}")
    columns = (values.tolist(), ids.tolist(), gold[1:], piece.tokens[1:])
    items = [gold[0]]
    for place, row in enumerate(zip(*columns, strict=True)):
        try:
            items.append(_make_item(*row))
        except ValueError as error:
            raise piece.refuse(str(error), place) from error
    return remote.parse_items(items, read, piece, k, vocabulary)


def _decode(found: Mapping[str, Any], name: str) -> NDArray[Any]:
    field = f"{_TOP}_{name}_flat_b64"
    dtype = {"val": "float32", "idx": "int32"}[name]
    if (told := found[f"{field}_dtype"]) != dtype:
        raise ValueError(f"{field} is {told}, not {dtype}")
    data = base64.b64decode(found[field], validate=True)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(found[f"{_TOP}_shape"])


def _make_item(values: list[float], ids: list[int], gold: Any, token: int) -> dict[str, Any]:
    """Return the item of a position as vLLM writes it. Raises ``ValueError`` if it disagrees."""
    item = {str(i): {"logprob": value, "rank": 1} for i, value in zip(ids, values, strict=True)}
    same = item.setdefault(str(token), {"logprob": gold, "rank": len(ids) + 1})["logprob"]
    if isinstance(gold, float) and abs(gold - same) > SAME_NATS:
        what = f"the next token, id {token}, has the log-probabilities {gold:.3f} and {same:.3f}"
        raise ValueError(f"{what}: ids are swapped, or positions are shifted")
    return item


def parse_states(answer: Any, piece: DocumentPrompt, k: int, vocabulary: int) -> StateEntries:
    """Return the states of the targets of ``piece``, as ``parse_answer`` does."""
    top = parse_answer(answer, piece, k, vocabulary)
    try:
        states_LD = np.array(answer["meta_info"]["hidden_states"][0], np.float32)
    except remote.MISSHAPEN as error:
        what = f"hidden_states cannot be read ({remote.describe_error(error)})"
        raise piece.refuse(what) from error
    if states_LD.ndim != 2 or len(states_LD) != len(piece.tokens):
        raise piece.refuse(
            f"hidden_states must have a row for each of {len(piece.tokens)} tokens, but are "
            f"{states_LD.shape}. Start SGLang with --chunked-prefill-size -1: of a prompt "
            "that it reads in pieces, only the last piece comes back"
        )
    if not np.isfinite(states_LD).all():
        raise piece.refuse("hidden_states are NaN or infinite")
    return StateEntries(top, states_LD[piece.targets])


def _parse_next(answer: Any) -> TopEntries | None:
    """Return the most probable tokens after a prompt; None if there are none."""
    with suppress(*remote.MISSHAPEN):
        (found,) = answer["meta_info"]["output_top_logprobs"]
        return remote.make_single_entries((value, token) for value, token, _ in found)
    return None
