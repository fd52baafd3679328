"""Records in units as the target of the loss, against float64 code that holds all weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.codec import Codec
from cache.records import Records
from cache.rounding import ENTROPY_STEP
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.models.lm_head import LMHead
from tests.support.kd.samples import (
    UNITS,
    columns_of,
    encode,
    make_codec,
    make_logits,
    sample_units,
)

N, V, D = 12, 90, 6
KEPT = (5, 17)
WHOLE = 1 << 40

pytestmark = pytest.mark.usefixtures("one_thread")


def weigh_record(codec: Codec, record: Records, gold: int) -> np.ndarray:
    """Return the weights of one record, (V,), by its definition."""
    ids = [gold, *codec.always_keep]
    masses = [round(math.exp(-int(code) / 256) * WHOLE) for code in record["known"][0]]
    weights = np.zeros(codec.vocabulary_size)
    rest = WHOLE
    for place, (token, mass) in enumerate(zip(ids, masses, strict=True)):
        if place == 0 or token != gold:
            weights[token] += mass / WHOLE
            rest -= mass
    tau = round(codec.threshold * WHOLE)
    number = max(-(-rest // tau), 0)
    if number == 0:
        weights[gold] += rest / WHOLE
        return weights
    units = [int(twice) // 2 for twice in record["head_units"]]
    assert sum(units) + len(record["tail_ids"]) == number
    for token, count in zip(record["head_ids"], units, strict=True):
        weights[token] += count * rest / WHOLE / number
    for token in record["tail_ids"]:
        weights[token] += rest / WHOLE / number
    return weights


def make_case(kind: str, threshold: float, kept: tuple[int, ...]) -> tuple[Codec, Records, Tensor]:
    codec = make_codec(UNITS, V, threshold, always_keep=kept, entropies=True)
    gold_N = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(2))
    gold_N[3] = KEPT[0]
    logits_NV = make_logits(kind, N, V, 3.0, 4)
    return codec, encode(codec, sample_units(codec, logits_NV, gold_N)), gold_N


@pytest.mark.parametrize("kind", ["normal", "one-hot", "masked", "uniform"])
@pytest.mark.parametrize("threshold", [0.004, 0.04, 0.5])
@pytest.mark.parametrize("kept", [(), KEPT], ids=["none kept", "two kept"])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_value_and_gradients_are_those_of_all_weights(
    kind: str, threshold: float, kept: tuple[int, ...], alpha: float
) -> None:
    codec, records, gold_N = make_case(kind, threshold, kept)
    weights_NV = torch.from_numpy(
        np.stack(
            [weigh_record(codec, records.slice(row, row + 1), int(gold_N[row])) for row in range(N)]
        )
    )
    torch.testing.assert_close(weights_NV.sum(1), torch.ones(N).double(), rtol=0, atol=1e-12)
    targets = TargetDecoder(codec).decode(gold_N, columns_of(records))
    chance = torch.Generator().manual_seed(6)
    hidden = torch.randn(N, D, generator=chance, dtype=torch.float64)
    weight = torch.randn(V, D, generator=chance, dtype=torch.float64)
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for sink in (found, expected):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        if sink is found:
            head = LMHead(leaves[1], None, 1.0, None, V)
            total = compute_distillation_loss(leaves[0], head, targets, Objective(alpha), 5).total
        else:
            logq_NV = torch.log_softmax(leaves[0] @ leaves[1].T, 1)
            entropy = torch.from_numpy(records["entropy"].astype(float)).sum() * ENTROPY_STEP
            soft = -(weights_NV * logq_NV).sum() - entropy
            hard = -logq_NV.gather(1, gold_N[:, None]).sum()
            total = alpha * hard + (1 - alpha) * soft
        total.backward()
        sink += [total.detach(), *(each.grad for each in leaves if each.grad is not None)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_tails_are_named_and_chunks_are_parts_of_the_whole() -> None:
    codec, records, gold_N = make_case("normal", 0.04, KEPT)
    target = TargetDecoder(codec).decode(gold_N, columns_of(records)).teacher
    assert isinstance(target, SparseTarget) and target.normalized
    assert target.tail_places_M is not None
    assert target.ids_E[target.tail_places_M].tolist() == records["tail_ids"].tolist()
    chunk = target.take_chunk(slice(4, 9))
    assert chunk.find_best is not None
    assert torch.equal(chunk.find_best_N(), target.find_best_N()[4:9])
    entries = target.find_entries(slice(4, 9))
    assert torch.equal(chunk.weights_E, target.weights_E[entries])
