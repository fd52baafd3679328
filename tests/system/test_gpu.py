"""The GPU's own code paths, against the CPU or float64.

A machine with a GPU needs no installed distribution for these tests; bench/gpu/everything.py runs
them with the others that are marked gpu:

    PYTHONPATH=. python -m pytest tests/system/test_gpu.py
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from bench.support.paths import AUSTEN, DATA
from bench.support.small.caches import (
    make_codec,
    make_identity,
    make_records,
    make_sequences,
    make_tables,
)
from cache.checking.verify import verify_cache
from cache.codec import Codec
from cache.profiles.sampled import Sample
from cache.profiles.whole import HiddenReading
from cache.records import Records
from cache.rounding import RecordPositions, make_cosine_basis
from kd.capture.sampling import Randomness, Sampler
from kd.capture.units.drawing import UnitRandomness, UnitSampler
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import Interrupted
from kd.kernels.available import can_run_kernels
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget, decode_tempered
from kd.loss.targets import Targets
from kd.loss.whole_targets import decode_lm_head
from kd.models.lm_head import LMHead, SplitLMHead
from kd.models.precision import pick_device
from kd.models.products.float8 import has_float8
from kd.models.products.split import can_split
from kd.models.products.wide import sums_wide
from kd.models.tokenizers import load_tokenizer
from kd.pipeline import run_stages
from kd.progress import Event, Monitor
from kd.text import batches
from kd.text.batches import Batch, make_batch
from tests.support.kd.quantizers import needs_torchao
from tests.support.kd.samples import make_recorder
from tests.support.kd.students import save_teacher
from tests.support.kd.targets import V, dense_loss, random_entries, random_targets, relative

pytestmark = [
    pytest.mark.gpu,
    # Without this tool CI skips and does not fail: a machine without a GPU cannot get one.
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU = torch.device("cpu")
GPU = torch.device("cuda")
SMOLLM2 = DATA / "smollm2.npz.xz"
PROFILES = ["threshold", "tempered", "topk", "dense", "hidden"]
SAMPLED = ["threshold", "tempered"]
THRESHOLD = 0.04
KNOTS = 5
KEPT = (3, 77)


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Products in float32 are float32; a run that allowed TF32 leaves it allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def make_gpu_codec(profile: str, vocabulary: int, **options: Any) -> Codec:
    options |= {"always_keep": KEPT} if profile in SAMPLED else {}
    return make_identity(vocabulary, codec=make_codec(profile, **options)).record_codec()


# ---------------------------------------------------------------------- records


def sample(logits_NV: Tensor, device: torch.device) -> Sample:
    """A sample of profile tempered."""
    codec = make_gpu_codec("tempered", logits_NV.shape[1])
    gold_N = torch.arange(len(logits_NV), device=device)
    chance = Randomness.of_each(codec, [3], [np.arange(len(logits_NV))], device)[0]
    return Sampler(codec, KNOTS).sample(logits_NV.to(device), gold_N, chance)


def list_units(logits_NV: Tensor, device: torch.device) -> list[list[np.ndarray]]:
    """The columns of a sample in units, for each position."""
    codec = make_gpu_codec("threshold", logits_NV.shape[1])
    gold_N = torch.arange(len(logits_NV), device=device)
    (chance,) = UnitRandomness.of_each(codec, [3], [np.arange(len(logits_NV))], device)
    sampler = UnitSampler(codec, make_tables(logits_NV.shape[1], codec.clusters))
    found = sampler.draw_units(logits_NV.to(device), gold_N, gold_N % codec.clusters, chance)
    columns = {name: each.cpu().numpy() for name, each in found.items()}
    heads, tails = (np.cumsum(columns[f"{part}_count"])[:-1] for part in ("head", "tail"))
    parts = [np.split(columns[name], heads) for name in ("head_ids", "head_units")]
    parts += [np.split(columns[name], tails) for name in ("tail_ids", "tail_k")]
    parts += [list(columns["known_logprobs"])]
    return [list(each) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_units_of_given_logits_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    logits_NV = make_random_logits("threshold", dtype)
    same_N = [
        all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
        for found, expected in zip(
            list_units(logits_NV, GPU), list_units(logits_NV, CPU), strict=True
        )
    ]
    # A point of the systematic sample may fall between the two rounded sums.
    assert all(same_N) if dtype == torch.float64 else np.mean(same_N) > 0.9


def make_random_logits(profile: str, dtype: torch.dtype) -> Tensor:
    """Rows from flat to peaked; no size is so near the threshold that rounding could decide."""
    generator = torch.Generator().manual_seed(0)
    spread_N = torch.linspace(0.5, 8.0, 200, dtype=torch.float64)
    logits_NV = (
        torch.randn(200, 5000, generator=generator, dtype=torch.float64) * spread_N[:, None]
    ).to(dtype)
    betas = make_gpu_codec(profile, 5000).proposal_betas if profile == "tempered" else (1.0,)
    size_NV = torch.stack([torch.softmax(logits_NV.double() * beta, -1) for beta in betas]).mean(0)
    clear_N = (size_NV - THRESHOLD).abs().amin(-1) > 1e-5
    assert clear_N.sum() > 150
    return logits_NV[clear_N]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_samples_of_given_logits_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    logits_NV = make_random_logits("tempered", dtype)
    found = sample(logits_NV, GPU)
    expected = sample(logits_NV, CPU)
    assert np.array_equal(found.head_count, expected.head_count)
    assert np.array_equal(found.head_ids, expected.head_ids)
    np.testing.assert_allclose(found.head_logprobs, expected.head_logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.known_logprobs, expected.known_logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=1e-4)
    if found.partition is not None:
        assert found.partition.shape == (len(logits_NV), KNOTS, 2)
        np.testing.assert_allclose(found.partition, expected.partition, rtol=1e-5, atol=2e-4)
    same_N = [np.array_equal(a, b) for a, b in zip(tails(found), tails(expected), strict=True)]
    if dtype == torch.float64:
        assert all(same_N)
        if found.tail_logprobs is not None:
            np.testing.assert_allclose(found.tail_logprobs, expected.tail_logprobs, atol=1e-12)
    else:  # a point of the systematic sample may fall between the two rounded sums
        assert np.mean(same_N) > 0.9


def tails(found: Sample) -> list[np.ndarray]:
    return np.split(found.tail_ids[:, 0], np.cumsum(found.tail_count)[:-1])


def record(codec: Codec, device: torch.device, positions: int = 70) -> tuple[Tensor, Records]:
    """Next tokens, some of them always_keep ids, and a record of float64 hidden states.

    In float64 nothing rounds.
    """
    generator = torch.Generator().manual_seed(4)
    hidden_ND = torch.randn(positions, 16, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(codec.vocabulary_size + 8, 16, generator=generator, dtype=torch.float64)
    gold_N = torch.randint(0, codec.vocabulary_size, (positions,), generator=generator)
    gold_N[::9] = KEPT[1]
    head = LMHead(weight_VD.to(device), None, 0.7, None, codec.vocabulary_size)
    recorder = make_recorder(head, codec, 16, KNOTS if codec.profile == "tempered" else 0)
    return gold_N, recorder.record(hidden_ND.to(device), gold_N.to(device), 3, np.arange(positions))


@pytest.mark.parametrize("vocabulary", [300, 70_000])
@pytest.mark.parametrize("profile", PROFILES)
def test_columns_are_those_of_the_cpu_to_the_bit(profile: str, vocabulary: int) -> None:
    codec = make_gpu_codec(profile, vocabulary)
    found = record(codec, GPU)[1]
    expected = record(codec, CPU)[1]
    assert found.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        assert found[name].dtype == column.dtype and np.array_equal(found[name], column), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [300, 20_001])
@torch.no_grad()
def test_logits_of_a_head_in_half_precision_are_summed_in_float32(
    vocabulary: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden_ND = torch.randn(40, 512, generator=generator).to(dtype)
    weight_VD = torch.randn(vocabulary, 512, generator=generator).to(dtype)
    head = LMHead(weight_VD.to(GPU), None, 1.0, None, vocabulary)
    assert sums_wide(head.weight, torch.float32), "this build cannot: logits are converted first"
    room_NV = torch.empty(40, vocabulary + 64, device=GPU)[:, :vocabulary]
    expected_NV = hidden_ND.double() @ weight_VD.double().T
    for found_NV in (
        head.compute_logits(hidden_ND.to(GPU)),
        head.compute_logits(hidden_ND.to(GPU), room_NV),
    ):
        assert relative(found_NV.cpu(), expected_NV) < 1e-5


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_a_split_head_is_as_exact_as_one_in_float32(stored: torch.dtype) -> None:
    if not can_split(GPU):
        pytest.skip("this GPU has no matrix units for bfloat16")
    generator = torch.Generator().manual_seed(4)
    hidden_ND = torch.randn(40, 512, generator=generator)
    weight_VD = torch.randn(20_001, 512, generator=generator).to(stored)
    weight = weight_VD.view(torch.uint16) if stored == torch.bfloat16 else weight_VD
    arrays = {"weight": weight.numpy(), "bias": np.zeros(0), "transform": np.array([1.0, 0.0])}
    head = decode_lm_head(arrays, len(weight_VD), GPU)
    assert isinstance(head, SplitLMHead)
    expected_NV = hidden_ND.double() @ weight_VD.double().T
    strict_NV = hidden_ND.to(GPU) @ weight_VD.to(GPU).float().T
    found_NV = head.compute_logits(hidden_ND.to(GPU))
    assert relative(found_NV.cpu(), expected_NV) < 2 * relative(strict_NV.cpu(), expected_NV)


# ---------------------------------------------------------------------- columns


def make_random_batch(codec: Codec) -> Batch:
    """A batch of random columns with the tail of one draw, as a cache reads it."""
    sequences = make_sequences(5, 6, 16, codec.vocabulary_size)
    gold_N = sequences.find_gold_ids()
    columns = make_records(5, sequences.positions, codec, gold_N).columns
    return make_batch(sequences, Records(columns | pick_draw(columns)))


def pick_draw(columns: dict[str, Any]) -> dict[str, Any]:
    """The tails of the first draw, in records that may have several."""
    names = {"tail_ids", "tail_logprobs"} & columns.keys()
    return {name: columns[name][:, 0] for name in names if columns[name].ndim > 1}


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("vocabulary", [300, 70_000])
@pytest.mark.parametrize("profile", PROFILES)
def test_columns_arrive_in_their_own_types(
    profile: str, vocabulary: int, bits: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "WIDE_BYTES", 0)
    batch = make_random_batch(
        make_gpu_codec(profile, vocabulary, **({"bits": bits} if profile == "hidden" else {}))
    )
    there = (batch.pin() if pinned else batch).to(GPU)
    assert (
        batch.teacher is not None
        and there.teacher is not None
        and there.teacher.keys() == batch.teacher.keys()
    )
    for name, column in batch.teacher.items():
        moved = there.teacher[name]
        assert moved.device.type == GPU.type and moved.dtype == column.dtype, name
        assert np.array_equal(moved.cpu().numpy(), column.numpy()), name
    ids = {"threshold": "tail_ids", "tempered": "tail_ids", "topk": "top_ids"}
    if profile in ids:
        assert there.teacher[ids[profile]].dtype == (
            torch.uint16 if vocabulary == 300 else torch.uint32
        )
    assert torch.equal(there.gold_N.cpu(), batch.gold_N) and torch.equal(
        there.rows_N.cpu(), batch.rows_N
    )


def decode(codec: Codec, temperature: float, device: torch.device) -> Targets:
    """The target of the CPU's records, decoded on ``device``."""
    gold_N, records = record(codec, CPU)
    columns = {
        name: torch.from_numpy(column).to(device) for name, column in records.columns.items()
    }
    weight_VD = torch.randn(codec.vocabulary_size, 16, generator=torch.Generator().manual_seed(6))
    head = LMHead(weight_VD.to(device), None, 0.7, 8.0, codec.vocabulary_size)
    return TargetDecoder(codec, head).decode(
        gold_N.to(device), columns | pick_draw(columns), temperature
    )


@pytest.mark.parametrize("vocabulary", [300, 70_000])
@pytest.mark.parametrize(("profile", "temperature"), [(each, 1.0) for each in PROFILES] + [
    (each, temperature) for each in ("tempered", "dense", "hidden") for temperature in (0.5, 1.7)
])  # fmt: skip
def test_a_decoded_target_is_the_cpu_s(profile: str, temperature: float, vocabulary: int) -> None:
    codec = make_gpu_codec(profile, vocabulary)
    rows = slice(7, 60)
    found, expected = (
        decode(codec, temperature, device).teacher.take_chunk(rows) for device in (GPU, CPU)
    )
    q_NV = torch.softmax(torch.randn(53, vocabulary, generator=torch.Generator().manual_seed(7)), 1)
    torch.testing.assert_close(found.entropy_N.cpu(), expected.entropy_N, rtol=1e-5, atol=1e-5)
    found_sum = found.compute_expected_N(q_NV.log().to(GPU)).sum().item()
    expected_sum = expected.compute_expected_N(q_NV.log()).sum().item()
    assert found_sum == pytest.approx(expected_sum, rel=1e-5)
    assert torch.equal(found.find_best_N().cpu(), expected.find_best_N())
    there = q_NV.to(GPU)  # q - 0.9 p determines all of p, entry by entry
    for chunk, each in ((found, there), (expected, q_NV)):
        chunk.subtract_(each, 0.9)
    torch.testing.assert_close(there.cpu(), q_NV, rtol=1e-5, atol=1e-6)
    if isinstance(found, SparseTarget):  # float64 stays float64
        assert torch.equal(found.ids_E.cpu(), expected.ids_E) and torch.equal(
            found.offsets_N1.cpu(), expected.offsets_N1
        )
        torch.testing.assert_close(
            found.weights_E.cpu(), expected.weights_E, rtol=1e-11, atol=1e-13
        )


def test_a_tempered_target_s_slope_in_the_temperature_is_the_cpu_s() -> None:
    codec = make_gpu_codec("tempered", 300)
    gold_N, records = record(codec, CPU)
    slopes = []
    for device in (GPU, CPU):
        columns = {
            name: torch.from_numpy(column).to(device) for name, column in records.columns.items()
        }
        drawn = {name: columns[name][:, 0] for name in ("tail_ids", "tail_logprobs")}
        temperature = torch.tensor(1.3, dtype=torch.float64, device=device, requires_grad=True)
        target = decode_tempered(codec, columns | drawn, gold_N.to(device), temperature)
        rank_E = torch.arange(len(target.ids_E), device=device, dtype=torch.float64)
        slopes.append(
            torch.autograd.grad(
                (target.weights_E * rank_E).sum() + target.entropy_N.sum(), temperature
            )[0]
        )
    torch.testing.assert_close(slopes[0].cpu(), slopes[1], rtol=1e-9, atol=0.0)
    assert slopes[1].abs() > 1e-3


def test_segments_sum_in_float64_and_may_be_empty() -> None:
    """Decoding relies on this: a float32 sum would lose the small terms, and the last segments are
    empty.
    """
    generator = torch.Generator().manual_seed(8)
    counts_N = torch.randint(0, 30, (500,), generator=generator)
    counts_N[[0, 1, 200, -2, -1]] = 0
    values_E = (
        torch.rand(int(counts_N.sum()), generator=generator, dtype=torch.float64) * 1e-9 + 1.0
    )
    here = values_E.requires_grad_()
    there = values_E.detach().to(GPU).requires_grad_()
    expected_N = torch.stack([part.sum() for part in here.split(counts_N.tolist())])
    found_N = torch.segment_reduce(there, "sum", lengths=counts_N.to(GPU), unsafe=True)
    assert found_N.dtype == torch.float64
    torch.testing.assert_close(found_N.cpu(), expected_N, rtol=1e-14, atol=0.0)
    weight_N = torch.rand(500, generator=generator, dtype=torch.float64)
    (expected_N * weight_N).sum().backward()
    (found_N * weight_N.to(GPU)).sum().backward()
    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=0.0, atol=0.0)


# ---------------------------------------------------------------------- a teacher's head in float32


def real_states() -> tuple[np.ndarray, Tensor]:
    """Hidden states (64, D) of SmolLM2-135M and rows (256, D) of its LM head, float32.

    They are those where rounding shows most.
    """
    stored = np.load(io.BytesIO(lzma.decompress(SMOLLM2.read_bytes())))
    rows = stored["rows"].astype(np.float32) * stored["row_scale"][:, None]
    return stored["states"].astype(np.float32), torch.from_numpy(rows)


def cut_to_tf32(values: Tensor) -> Tensor:
    """The ten bits of the mantissa that a TF32 product reads of a float32."""
    return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("bits", [8, 16])
def test_the_teacher_s_head_loses_nothing_to_tf32(bits: int, precision: str) -> None:
    """Training sets ``high``, which lets float32 products run in TF32.

    The products of the teacher's LM head must not: real hidden states have a few channels of great
    size, and TF32 alone would change log p by more than the 2e-2 that the profile promises. The
    second half of the test shows that on the same numbers.
    """
    hidden, weight_VD = real_states()
    positions = np.arange(len(hidden))
    codec = Codec("hidden", len(weight_VD), bits=bits)
    places = RecordPositions(np.zeros_like(positions), positions)
    basis = make_cosine_basis(hidden.shape[1]) if codec.cosines else np.eye(hidden.shape[1])
    common = {"known_logprobs": np.zeros((len(hidden), 1)), "entropy": np.zeros(len(hidden))}
    records = codec.encode(HiddenReading(**common, states=hidden @ basis.T), places)
    columns = {name: torch.from_numpy(column).to(GPU) for name, column in records.columns.items()}
    coded_ND = columns["hidden"].double() * columns["hidden_scale"].double()[:, None]
    stored_ND = (coded_ND @ torch.from_numpy(basis).to(GPU)).float()
    exact_NV = F.linear(stored_ND.double(), weight_VD.double().to(GPU)).log_softmax(1)

    torch.set_float32_matmul_precision(precision)  # the fixture sets it back
    decoder = TargetDecoder(codec, LMHead(weight_VD.to(GPU), None, 1.0, None, len(weight_VD)))
    found = decoder.decode(torch.zeros(len(hidden), dtype=torch.int64, device=GPU), columns).teacher
    likely_NV = exact_NV > -20.0  # float32 has too few digits for smaller probabilities
    error_NV = found.take_chunk(slice(0, len(hidden))).p_NV.double().log() - exact_NV
    assert error_NV[likely_NV].abs().max() < 1e-3

    cut_NV = F.linear(
        cut_to_tf32(stored_ND).double(), cut_to_tf32(weight_VD).double().to(GPU)
    ).log_softmax(1)
    assert (cut_NV - exact_NV)[likely_NV].abs().max() > 2e-2, "TF32 would do now: let it"


# ---------------------------------------------------------------------- the fused head


def move_to_gpu(part: Any) -> Any:
    """``part`` with every tensor in it on the GPU."""
    if isinstance(part, Tensor):
        return part.to(GPU)
    if is_dataclass(part):
        return replace(
            part, **{field.name: move_to_gpu(getattr(part, field.name)) for field in fields(part)}
        )
    return part


def require_parity(
    targets: Targets,
    head: LMHead,
    dtype: torch.dtype,
    tolerance: float,
    alpha: float,
    chunk_size: int,
) -> None:
    """Value and every gradient on the GPU near the dense float64 reference on the CPU."""
    x = torch.randn(
        len(targets), head.weight.shape[1], generator=torch.Generator().manual_seed(1)
    ).to(dtype)
    there = [
        None if each is None else each.to(GPU).requires_grad_()
        for each in (x, head.weight, head.bias)
    ]
    moved = replace(head, weight=there[1], bias=there[2])
    terms = compute_distillation_loss(
        there[0], moved, move_to_gpu(targets), Objective(alpha), chunk_size
    )
    (terms.total / 7).backward()

    wide = [
        None if each is None else each.detach().double().requires_grad_()
        for each in (x, head.weight, head.bias)
    ]
    expected = dense_loss(*wide, head, targets, alpha)
    (expected / 7).backward()
    assert terms.total.item() == pytest.approx(expected.item(), rel=tolerance)
    for ours, reference in zip(there, wide, strict=True):
        if ours is not None:
            assert relative(ours.grad.cpu(), reference.grad) < tolerance
    assert not there[1].grad[head.vocabulary :].any(), "padding must not be trained"


DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)


def make_random_head(
    vocabulary: int, width: int, dtype: torch.dtype, bias: bool, softcap: float | None
) -> LMHead:
    """An LM head whose float32 weight is exact in ``dtype``."""
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(vocabulary + 8, width, generator=generator) / 4).to(dtype).float()
    offset = torch.randn(vocabulary + 8, generator=generator) if bias else None
    return LMHead(weight, offset, 1.0, softcap, vocabulary)


@DTYPES
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("bias", "softcap"), [(False, None), (True, 5.0)], ids=["plain", "bias+softcap"]
)
def test_fused_head_equals_the_dense_float64_reference(
    alpha: float,
    dtype: torch.dtype,
    tolerance: float,
    bias: bool,
    softcap: float | None,
) -> None:
    positions = 97
    vocabulary = 1000
    generator = torch.Generator().manual_seed(1)
    gold_N = torch.randint(0, vocabulary, (positions,), generator=generator)
    targets = Targets(gold_N, random_entries(generator, positions, vocabulary))
    require_parity(
        targets,
        make_random_head(vocabulary, 64, dtype, bias, softcap),
        dtype,
        tolerance,
        alpha,
        chunk_size=20,
    )


@DTYPES
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["sparse", "top", "dense", "hidden"])
def test_every_kind_of_target_equals_the_dense_float64_reference(
    kind: str, temperature: float, dtype: torch.dtype, tolerance: float
) -> None:
    head = make_random_head(V, 64, dtype, True, None)
    require_parity(random_targets(1, kind, temperature), head, dtype, tolerance, 0.3, chunk_size=5)


def make_token_targets(positions: int, vocabulary: int) -> Targets:
    generator = torch.Generator().manual_seed(3)
    gold_N = torch.randint(0, vocabulary, (positions,), generator=generator)
    return move_to_gpu(Targets(gold_N, random_entries(generator, positions, vocabulary)))


def compute_outcome(targets: Targets, head: LMHead, dtype: torch.dtype) -> list[Tensor]:
    """The loss, and the gradients for hidden states and weight."""
    generator = torch.Generator(GPU).manual_seed(4)
    hidden_ND = torch.randn(len(targets), head.weight.shape[1], generator=generator, device=GPU).to(
        dtype
    )
    leaves = [hidden_ND.requires_grad_(), head.weight.detach().clone().requires_grad_()]
    terms = compute_distillation_loss(
        leaves[0], replace(head, weight=leaves[1]), targets, Objective(0.1), chunk_size=300
    )
    terms.total.backward()
    return [terms.total.detach(), *(leaf.grad for leaf in leaves)]


@DTYPES
@pytest.mark.parametrize("vocabulary", [50_257, 151_936])
def test_the_kernels_equal_the_plain_pass_and_themselves(
    vocabulary: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of many blocks, and of a length that no block size divides."""
    head = move_to_gpu(make_random_head(vocabulary, 64, dtype, False, 30.0))
    targets = make_token_targets(700, vocabulary)
    assert can_run_kernels(torch.ones(1, 2, dtype=dtype, device=GPU))
    found = compute_outcome(targets, head, dtype)
    again = compute_outcome(targets, head, dtype)
    for first, second in zip(found, again, strict=True):
        assert torch.equal(first, second), "neither atomics nor an order may decide a bit"
    monkeypatch.setattr("kd.loss.fused.can_run_kernels", lambda hidden_ND: False)
    for ours, plain in zip(found, compute_outcome(targets, head, dtype), strict=True):
        assert relative(ours, plain.double()) < tolerance


# ---------------------------------------------------------------------- a whole job


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(
        tmp_path_factory.mktemp("teacher"),
        load_tokenizer(AUSTEN / "teacher"),
        64,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )


def make_job(
    teacher: Path, folder: Path, profile: str = "threshold", **train_options: Any
) -> JobConfig:
    text = folder / "persuasion.txt"
    text.write_text(
        (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[:24_000], encoding="utf-8"
    )
    options = {
        "max_steps": 8,
        "batch_size": 8,
        "save_steps": 2,
        "eval_steps": 4,
        "logging_steps": 1,
    }
    return parse_config(
        {
            "kind": "distill",
            "teacher": {"model": str(teacher), "dtype": "bfloat16", "batch_size": 4},
            "student": {"init": {"layers": 2, "hidden_size": 32}},
            "data": {"train": str(text), "sequence_length": 64},
            "cache": {"shard_sequences": 16, "profile": profile},
            "loss": {"temperature": 2.0 if profile in ("tempered", "dense", "hidden") else 1.0},
            "train": options | {"learning_rate": 3e-3, "precision": "bf16"} | train_options,
        }
    )


class Listener:
    """Records the steps of training, and asks to stop once ``stop_after`` of them are done."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[int] = []
        self.stop_after = stop_after

    @property
    def monitor(self) -> Monitor:
        return Monitor(
            self.listen, lambda: self.stop_after is not None and self.stop_after in self.steps
        )

    def listen(self, event: Event) -> None:
        if event.type == "progress" and event.data["unit"] == "steps":
            self.steps.append(event.data["done"])


def test_a_job_in_bf16_stops_resumes_and_ends_as_if_it_had_not_stopped(
    teacher: Path, tmp_path: Path
) -> None:
    job = make_job(teacher, tmp_path)
    again = Listener()
    with pytest.raises(Interrupted):
        run_stages(job, tmp_path, tmp_path / "runs" / "cut", Listener(stop_after=3).monitor)
    cut = run_stages(job, tmp_path, tmp_path / "runs" / "cut", again.monitor)
    whole = run_stages(job, tmp_path, tmp_path / "runs" / "whole")

    assert again.steps == [4, 5, 6, 7, 8]
    (folder,) = (path for path in (tmp_path / "caches").iterdir() if path.is_dir())
    assert verify_cache(folder) == []
    student = AutoModelForCausalLM.from_pretrained(cut.artifacts["student"])
    assert student.dtype == torch.bfloat16 and all(p.isfinite().all() for p in student.parameters())
    reports = [run.report for run in (cut, whole)]
    ends = [report["student_perplexity"] for report in reports]
    assert ends[0] == pytest.approx(ends[1], rel=1e-2), (
        "a GPU's sums have no fixed order: near, not equal"
    )
    assert ends[1] < 0.95 * reports[1]["student_perplexity_before"]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_job_of_every_profile_captures_and_learns(
    teacher: Path, tmp_path: Path, profile: str
) -> None:
    report = run_stages(
        make_job(teacher, tmp_path, profile, max_steps=20), tmp_path, tmp_path / "run"
    ).report
    (folder,) = (path for path in (tmp_path / "caches").iterdir() if path.is_dir())
    assert verify_cache(folder) == []
    assert report["student_perplexity"] < 0.95 * report["student_perplexity_before"]


# ---------------------------------------------------------------------- float8, float16


@needs_torchao
@pytest.mark.skipif(not has_float8(pick_device()), reason="needs a GPU with products in float8")
def test_a_job_in_float8_learns_as_one_in_bfloat16_does(teacher: Path, tmp_path: Path) -> None:
    ends = []
    for name, fp8 in (("bf16", False), ("fp8", True)):
        job = make_job(teacher, tmp_path, max_steps=40, save_steps=100, eval_steps=40, fp8=fp8)
        report = run_stages(job, tmp_path, tmp_path / "runs" / name).report
        ends.append(report["student_perplexity"])
        assert ends[-1] < 0.95 * report["student_perplexity_before"]
    assert ends[0] != ends[1], "no layer multiplied in float8"
    assert ends[0] == pytest.approx(ends[1], rel=0.05)


def read_scale(run_dir: Path) -> float:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return float(json.loads((newest / "state.json").read_text())["scaler"]["scale"])


def test_fp16_skips_the_steps_whose_gradients_overflow(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that overflows halves the scale and leaves the weights unchanged."""
    monkeypatch.setattr("kd.models.precision.FIRST_SCALE", 2.0**40)
    runs = tmp_path / "runs"
    results = {}
    for name, steps in (("skipped", 4), ("trained", 70)):
        job = make_job(
            teacher,
            tmp_path,
            precision="fp16",
            max_steps=steps,
            save_steps=100,
            eval_steps=100,
        )
        results[name] = run_stages(job, tmp_path, runs / name).report
    assert read_scale(runs / "skipped") == 2.0**36
    before = "student_perplexity_before"
    after = "student_perplexity"
    skipped = results["skipped"]
    trained = results["trained"]
    assert skipped[after] == pytest.approx(skipped[before], rel=1e-2), "only rounded to float16"
    assert 1.0 <= read_scale(runs / "trained") < 2.0**36
    assert trained[after] < 0.8 * trained[before]


def test_phases_are_the_devices_time() -> None:
    from kd.tracking.stopwatch import Stopwatch

    clock = Stopwatch(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, device="cuda")
    with clock.phase("product"):
        for _ in range(50):
            matrix @ matrix
    (row,) = clock.table()
    assert row.seconds > 50 * 2 * 4096**3 / 2e15, (
        "no device is faster: the queue was measured, not the work"
    )
