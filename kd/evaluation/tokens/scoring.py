"""Student and teacher at single tokens of the held-out text, for the dashboard's page of tokens.

At each position that has a target, of each model's distribution q at T = 1:

    entropy   -sum_v q_v log q_v, in nats
    said      log q_gold, in nats, of the token that the text has
    rank      1 + the number of tokens that are more probable than that token
    top       the TOP most probable tokens and their log-probabilities; all others are the tail

and KL(teacher || student) = sum_v p_v log(p_v / q_v) where there is a teacher. Nothing of this is
in the report. ``docs/formats.md`` describes the file.

Shapes: S sequences of L tokens, N positions that have a target, V vocabulary, K = TOP, or V if that
is less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cache.records import Sequences
from kd.evaluation.teacher_comparison import CHUNK_ELEMENTS, TEACHER, EvaluatedModel
from kd.files import write_text
from kd.loss.targets import widen_logprobs
from kd.models.layers import find_device
from kd.models.precision import float32_products
from kd.progress import replace_nonfinite
from kd.text.batches import Batch, Source, list_held_out, make_batch, read_in_parts

FORMAT = 1
#: The name of the file in a run folder.
FILE = "tokens.json"
#: Most tokens of the text that are read. A CPU is slow with a large teacher.
READ_TOKENS = {"cuda": 2048, "cpu": 1024}
#: Most probable tokens that are listed at each position.
TOP = 10
#: Decimal places of the numbers in the file.
DIGITS = 4


def write_tokens(
    path: Path,
    models: Mapping[str, EvaluatedModel],
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    without_teacher: str | None,
) -> None:
    """Score the ``models`` at a few held-out tokens, and write the result to ``path``.

    Training text takes the place of held-out text where there is none. ``without_teacher`` says why
    the teacher is not among the models. Raises ``ModelError`` if a model cannot read the text.
    """
    device = find_device(next(iter(models.values())).model)
    numbers, sequences = read_evenly(source, READ_TOKENS[device.type])
    scored, divergences = score_models(models, make_batch(sequences, None).to(device))
    shown = {*sequences.tokens.reshape(-1).tolist()}
    for columns in scored.values():
        shown.update(token for row in columns["top_ids"] for token in row)
    arrays = (sequences.tokens, sequences.document_start, sequences.target_mask)
    found = {
        "format": FORMAT,
        "held_out": source.validation_count > 0,
        "without_teacher": without_teacher,
        "models": scored,
        "kl": divergences,
        "sequences": [
            {
                "number": number,
                "ids": tokens_L.tolist(),
                "starts": np.flatnonzero(start_L).tolist(),
                "scored": (np.flatnonzero(mask_L) + 1).tolist(),
            }
            for number, tokens_L, start_L, mask_L in zip(numbers, *arrays, strict=True)
        ],
        "texts": decode_each(sorted(shown), tokenizer),
    }
    plain = replace_nonfinite(found)
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    write_text(path, text + "\n")


def read_evenly(source: Source, limit: int) -> tuple[list[int], Sequences]:
    """Read sequences from all parts of the held-out text, ``limit`` tokens or fewer in all.

    Returns their numbers within that text, too. A sequence that is longer than ``limit`` is cut.
    """
    places = list_held_out(source) or range(source.train_count)
    sequences, _ = next(read_in_parts(source, places, 1))
    count = min(max(limit // sequences.length, 1), len(places))
    numbers = np.unique(np.linspace(0, len(places) - 1, count).round().astype(np.int64))
    sequences, _ = source.read(places.start + numbers)
    kept = slice(None, min(sequences.length, limit))
    mask_SL = sequences.target_mask[:, kept].copy()
    mask_SL[:, -1] = False  # the target of the last token is cut off
    cut = Sequences(sequences.tokens[:, kept], sequences.document_start[:, kept], mask_SL)
    return numbers.tolist(), cut


@torch.no_grad()
def score_models(
    models: Mapping[str, EvaluatedModel], batch: Batch
) -> tuple[dict[str, dict[str, list[Any]]], list[Any] | None]:
    """Score every model at the N targets of ``batch``: columns of N values, by model, and the KL.

    The KL is None without a teacher; the model that is not the teacher is the student.
    """
    with float32_products():
        states = {name: model.compute_hidden_states(batch) for name, model in models.items()}
        vocabulary = next(iter(models.values())).lm_head.vocabulary
        parts: list[dict[str, dict[str, Tensor]]] = []
        divergences = []
        for rows in torch.arange(len(batch)).split(max(CHUNK_ELEMENTS // vocabulary, 1)):
            logprobs = {
                name: model.lm_head.compute_logits(states[name][rows]).log_softmax(1)
                for name, model in models.items()
            }
            gold_N = batch.gold_N[rows]
            parts.append({name: _score(q_NV, gold_N) for name, q_NV in logprobs.items()})
            for name, q_NV in logprobs.items():
                if TEACHER in logprobs and name != TEACHER:
                    p_NV = widen_logprobs(logprobs[TEACHER], q_NV.shape[1])
                    # A token with p = 0 adds nothing, whatever its q is.
                    terms_NV = torch.where(p_NV.isneginf(), 0.0, p_NV.exp() * (p_NV - q_NV))
                    divergences.append(terms_NV.sum(1))
    columns = {
        name: {
            column: _round(torch.cat([part[name][column] for part in parts]))
            for column in parts[0][name]
        }
        for name in models
    }
    return columns, _round(torch.cat(divergences)) if divergences else None


def _score(q_NV: Tensor, gold_N: Tensor) -> dict[str, Tensor]:
    """Score the log-probabilities of one model, as the head of this module says."""
    said_N1 = q_NV.gather(1, gold_N[:, None])
    top = q_NV.topk(min(TOP, q_NV.shape[1]), dim=1)
    return {
        "entropy": torch.special.entr(q_NV.exp()).sum(1),
        "said": said_N1[:, 0],
        "rank": (q_NV > said_N1).sum(1) + 1,
        "top_ids": top.indices,
        "top_logprobs": top.values,
    }


def _round(values: Tensor) -> list[Any]:
    """List a tensor; floats with few digits, which keeps the file small."""
    if not values.is_floating_point():
        return values.tolist()
    # In float64, because 0.1234 has no short form in float32. Adding 0 turns -0 into 0.
    return (values.double().cpu().numpy().round(DIGITS) + 0.0).tolist()


def decode_each(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the text of each id by itself, or its name in the vocabulary if it is no whole text.

    That is so for a part of a character, and for an id beyond the tokenizer's own.
    """
    texts = {}
    for token in ids:
        name: Any = tokenizer.convert_ids_to_tokens(token)
        if name is None:  # the id is beyond the tokenizer's own
            texts[str(token)] = f"<{token}>"
            continue
        text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if not text or "\ufffd" in text:
            text = str(name)
        elif name.startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"  # SentencePiece drops the space at the beginning of a text
        texts[str(token)] = text
    return texts
