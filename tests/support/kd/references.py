"""Plain implementations of reports and scores, to compare the fast ones with."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cache.records import Sequences


def assert_same_facts(found: Any, expected: Any, rel: float = 1e-9) -> None:
    """Compare nested dictionaries and lists; numbers may differ by ``rel``."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same_facts(found[key], expected[key], rel)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same_facts(*pair, rel)
    elif expected is None:
        assert found is None
    else:
        assert found == pytest.approx(expected, rel=rel, abs=1e-12)


def plain_logprobs(
    model: PreTrainedModel, sequences: Sequences, rows: int = 2048
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run transformers alone on one piece of a document at a time; of the LM head, take ``rows``.

    Returns log-probabilities (N, V) in float64, next tokens (N,) and lengths of the context (N,).
    """
    found = []
    golds = []
    contexts = []
    for row in range(len(sequences)):
        starts = [*sequences.document_start[row].nonzero()[0].tolist(), sequences.length]
        for start, stop in itertools.pairwise(starts):
            if sequences.target_mask[row, start]:
                ids = torch.from_numpy(sequences.tokens[row, start:stop].astype("int64"))[None]
                with torch.no_grad():
                    found.append(model(ids).logits[0, :-1, :rows].double().log_softmax(1))
                golds.append(ids[0, 1:])
                contexts.append(torch.arange(1, stop - start))
    return torch.cat(found), torch.cat(golds), torch.cat(contexts)


def by_hand(
    confidence: list[float], right: list[bool], bins: int
) -> tuple[float, list[dict[str, float]]]:
    """Return ECE and the reliability diagram by their definition: bin b is (b / B, (b + 1) / B]."""
    error = 0.0
    curve = []
    for number in range(bins):
        low = number / bins
        high = (number + 1) / bins
        inside = [
            place
            for place, each in enumerate(confidence)
            if low < each <= high or (each == 0.0 and number == 0)
        ]
        if inside:
            mean = math.fsum(confidence[place] for place in inside) / len(inside)
            accuracy = sum(right[place] for place in inside) / len(inside)
            error += len(inside) / len(confidence) * abs(accuracy - mean)
            curve.append(
                {"share": len(inside) / len(confidence), "confidence": mean, "accuracy": accuracy}
            )
    return error, curve
