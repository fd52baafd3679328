"""Samples drawn by the GPU kernels, which Triton's interpreter runs on the CPU, have the properties
of samples drawn by PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

import kd.capture.recording
import kd.capture.sampling
from cache.codec import Codec
from cache.profiles.sampled import Sample
from kd.capture.block_sizes import BLOCK, BlockSizes
from kd.capture.host_copy import pack_tensors
from kd.capture.recording import Recorder
from kd.capture.sampling import Randomness, Sampler
from kd.errors import ModelError
from kd.models.lm_head import LMHead
from tests.support.kd.samples import (
    Case,
    cases,
    make_codec,
    make_logits,
    require_sound_weights,
    require_the_last_token,
    require_what_the_scheme_says,
    sample,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tests/system/test_gpu.py runs them on the GPU"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None and not os.environ.get("CI"),
        reason="needs triton",
    ),
]


@contextmanager
def kernels() -> Iterator[None]:
    """Make the sampler use the kernels, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (kd.capture.sampling, kd.capture.recording):
            patch.setattr(module, "can_run_kernels", lambda tensor: tensor.dtype != torch.float64)
        yield


def test_the_kernels_are_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockSizes, "of", None)
    with kernels(), pytest.raises(TypeError, match="not callable"):
        sample(make_codec("threshold", 70), torch.zeros(2, 70))


# The kernel computes exp of lanes beyond the vocabulary too, and masks them afterwards. A GPU gives
# inf there; the interpreter computes with numpy, which warns.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@settings(deadline=None, max_examples=30)
@given(case=cases(profiles=("threshold",)))
def test_samples_are_what_the_scheme_says(case: Case) -> None:
    with kernels():
        require_what_the_scheme_says(case)
        require_sound_weights(case)


@pytest.mark.long
@settings(deadline=None, max_examples=3)
@given(case=cases(vocabularies=(262_143, 262_144), rows=2, profiles=("threshold",)))
def test_the_largest_vocabularies(case: Case) -> None:
    with kernels():
        require_the_last_token(case)


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(case=cases(profiles=("threshold",)))
def test_blocks_have_the_sizes_that_the_plain_sampler_keeps(case: Case) -> None:
    sampler = Sampler(case.codec)
    known_NA = sampler.list_known(case.gold_N)
    expected, head = sampler.split(case.logits_NV, known_NA)
    found = BlockSizes.of(case.logits_NV, known_NA, case.codec.threshold)
    torch.testing.assert_close(found.lse_N, expected.lse_N, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.entropy_N, expected.entropy_N, rtol=1e-5, atol=2e-3)
    size_NV = torch.softmax(case.logits_NV.double(), 1)
    if not (
        (size_NV / case.codec.threshold - 1).abs() < 1e-4
    ).any():  # else float32 may see it on either side
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.head, head, strict=True))
        torch.testing.assert_close(found.sums_NQ, expected.sums_NQ, rtol=1e-4, atol=1e-6)
    rows, blocks = expected.sums_NQ.shape
    everywhere = torch.arange(rows).repeat_interleave(blocks), torch.arange(blocks).repeat(rows)
    looked_at = found.of_blocks(*everywhere)
    assert not looked_at.flatten(1)[found.sums_NQ.flatten() == 0.0].any(), (
        "what the sums leave out is not drawn from"
    )
    torch.testing.assert_close(looked_at.sum(1), found.sums_NQ.flatten(), rtol=1e-4, atol=1e-6)


def test_ten_thousand_redraws_average_to_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's mean weight is its probability, |z| < 5, and the weights of the head do not
    vary.
    """
    rows = 3
    vocabulary = 90
    at_once = 100
    turns = 100
    codec = make_codec("threshold", vocabulary, 0.1)
    logits = make_logits("normal", rows, vocabulary, 1.5, 3)
    gold_N = torch.tensor([4, 5, 6])
    p = torch.softmax(logits.double(), 1).numpy()
    read = BlockSizes.of(logits, gold_N[:, None], codec.threshold)
    monkeypatch.setattr(BlockSizes, "of", lambda *_: repeated(read, at_once))
    logits = logits.repeat(at_once, 1)
    gold_N = gold_N.repeat(at_once)
    total = np.zeros_like(p)
    square = np.zeros_like(p)
    with kernels():
        for turn in range(turns):
            weight = weights(codec, sample(codec, logits, gold_N, turn), gold_N).reshape(
                -1, rows, vocabulary
            )
            total = total + weight.sum(0)
            square = square + (weight**2).sum(0)
    mean = total / (at_once * turns)
    error = np.sqrt(np.maximum(square / (at_once * turns) - mean**2, 0) / (at_once * turns))
    varies = error > 1e-9
    assert varies.sum() > 200
    assert np.abs((mean - p)[varies] / error[varies]).max() < 5.0
    np.testing.assert_allclose(mean[~varies], p[~varies], atol=1e-6)


def repeated(sizes: BlockSizes, times: int) -> BlockSizes:
    """Repeat the same rows, because the interpreter needs a second for a thousand."""
    rows_H, ids_H = sizes.head
    offset_H = len(sizes.lse_N) * torch.arange(times).repeat_interleave(len(rows_H))
    columns = {
        name: getattr(sizes, name).repeat(times, *[1] * (getattr(sizes, name).ndim - 1))
        for name in ("logits_NV", "known_NA", "lse_N", "entropy_N", "sums_NQ")
    }
    return replace(sizes, **columns, head=(rows_H.repeat(times) + offset_H, ids_H.repeat(times)))


def weights(codec: Codec, found: Sample, gold_N: torch.Tensor) -> np.ndarray:
    """Return the weights (N, V) of a sample before its record rounds them."""
    rows = np.arange(len(gold_N))
    weight = np.zeros((len(gold_N), codec.vocabulary_size))
    weight[rows, gold_N.numpy()] = np.exp(found.known_logprobs[:, 0])
    weight[np.repeat(rows, found.head_count), found.head_ids] = np.exp(found.head_logprobs)
    rest = (1.0 - weight.sum(1)) / np.maximum(found.tail_count, 1)
    weight[np.repeat(rows, found.tail_count), found.tail_ids[:, 0]] = np.repeat(
        rest, found.tail_count
    )
    return weight


@dataclass
class Operations(TorchDispatchMode):
    """Counts the operations of torch by name, without views."""

    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_chunk_waits_for_the_device_three_times_and_copies_once() -> None:
    """A GPU is waited for where the number of rows depends on its numbers: of blocks with a head
    token, of head tokens and of tail tokens.

    The largest count of a tail is asked for on a CPU alone. More draws do not wait more often.
    """
    logits = make_logits("normal", 8, 5 * BLOCK, 2.0, 0)
    for draws in (1, 3):
        codec = make_codec("threshold", 5 * BLOCK, draws=draws)
        chance = Randomness.of(codec, 0, np.arange(8), torch.device("cpu"))
        with kernels(), Operations() as seen:
            found = Sampler(codec).draw(logits, torch.zeros(8, dtype=torch.int64), chance)
            packed, _ = pack_tensors(found)
        waits = {"nonzero": 3, "_local_scalar_dense": 1}
        assert {name: seen.counts[name] for name in waits} == waits
        assert not {"bincount", "masked_select", "unique", "repeat_interleave"} & {*seen.counts}
        # Launches, in a chunk of any size; the interpreter of the kernels needs memory beside them.
        launches = seen.counts.total() - sum(
            seen.counts[name] for name in ("set_", "empty", "new_empty")
        )
        assert launches <= 105 + 45 * draws
        assert packed.dtype == torch.uint8 and packed.nbytes == sum(
            tensor.nbytes for tensor in found.values()
        )


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy's, which the interpreter computes with
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = torch.zeros(3, 2 * BLOCK + 5)
    logits[1, 70] = bad
    with kernels(), pytest.raises(ModelError, match="NaN or infinite"):
        sample(make_codec("threshold", logits.shape[1]), logits)


@pytest.mark.parametrize(
    ("scale", "bias"), [(1.0, False), (0.5, False), (1.0, True)], ids=["plain", "scale", "bias"]
)
def test_a_teacher_in_bfloat16_is_read_as_it_is(scale: float, bias: bool) -> None:
    """Kernels widen the logits when they read them; other operations of the LM head come before
    that.
    """
    vocabulary = 300
    width = 16
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator)
    offset = torch.randn(vocabulary, generator=generator)
    head = LMHead(weight.bfloat16(), offset.bfloat16() if bias else None, scale, None, vocabulary)
    hidden = torch.randn(40, width, generator=generator).bfloat16()
    gold = torch.arange(40)
    codec = make_codec("threshold", vocabulary)
    expected = Recorder(head, codec).record(hidden, gold, 3, np.arange(40))
    with kernels():
        found = Recorder(head, codec).record(hidden, gold, 3, np.arange(40))
    assert found.columns.keys() == expected.columns.keys()
    for name in ("known", "entropy", "head_count", "head_ids", "head_logprobs", "tail_count"):
        np.testing.assert_allclose(
            found[name].astype(float), expected[name].astype(float), atol=1.0, err_msg=name
        )
    assert np.mean(found["tail_ids"] == expected["tail_ids"]) > 0.95
