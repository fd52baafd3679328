"""Several caches as one source: loss and gradient against whole distributions in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.store import Cache, open_cache
from kd.checks.parity import check_parity
from kd.config.jobfile import parse_config
from kd.errors import DataError
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.models.lm_head import LMHead
from kd.progress import SILENT
from kd.stages.capture import run_precompute
from kd.text.batches import Batch, Source, make_batch
from kd.text.joined.source import JoinedSource, SourcePart
from kd.text.steps.reading import deal_validation_batches
from tests.support.kd.captures import PROFILES
from tests.support.kd.teachers.several import make_other_teacher

V, D = 2048, 8
CPU = torch.device("cpu")
SOFT = Objective()
EXACT = {"profile": "dense", "dtype": "float32"}

pytestmark = pytest.mark.usefixtures("one_thread")


class World(NamedTuple):
    """Two teachers, a text, and a folder for caches."""

    teachers: dict[str, Path]
    text: Path
    home: Path

    def capture(self, teacher: str, length: int = 32, **options: Any) -> Cache:
        data = {"train": str(self.text), "sequence_length": length}
        data |= {"max_train_samples": 8, "max_eval_samples": 3}
        job = {"kind": "precompute", "teacher": {"model": str(self.teachers[teacher])}}
        config = parse_config(job | {"data": data, "cache": {"shard_sequences": 3, **options}})
        made = run_precompute(config, self.home, self.home / "run", SILENT).cache
        return open_cache(self.home / "caches" / str(made["fingerprint"]))


@pytest.fixture(scope="module")
def world(tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("joined")
    other = make_other_teacher(tiny_teacher, folder / "other")
    return World({"one": tiny_teacher, "other": other}, tiny_text, folder / "home")


def join(*parts: list[tuple[float, Source]], balance: str = "tokens") -> JoinedSource:
    named = [SourcePart(f"part {number}", tuple(part)) for number, part in enumerate(parts)]
    return JoinedSource(tuple(named), balance)


def read(source: Source, indices: list[int]) -> Batch:
    return make_batch(*source.read(np.array(indices)))


class Student(NamedTuple):
    """A student that knows the token before each target, in float64."""

    hidden_VD: Tensor
    lm_head: LMHead

    @classmethod
    def draw(cls) -> Student:
        random = torch.Generator().manual_seed(0)
        hidden_VD, weight_VD = torch.randn(2, V, D, generator=random, dtype=torch.float64)
        return cls(hidden_VD, LMHead(weight_VD, None, 1.0, None, V))

    def run(
        self, source: Source, batch: Batch, objective: Objective = SOFT
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of a batch, and its gradient for the hidden states, (N, D)."""
        hidden_ND = self.look_up(batch).requires_grad_()
        targets = TargetDecoder.of(source, CPU).decode(batch.gold_N, batch.teacher)
        loss = compute_distillation_loss(hidden_ND, self.lm_head, targets, objective, 7).total
        loss.backward()
        assert hidden_ND.grad is not None
        return loss.detach(), hidden_ND.grad

    def look_up(self, batch: Batch) -> Tensor:
        return self.hidden_VD[batch.tokens_BL.flatten()[batch.rows_N]].clone()


def assert_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def decode_logprobs(cache: Cache, indices: list[int]) -> Tensor:
    _, records = cache.read(np.array(indices))
    return torch.from_numpy(records["logprobs"]).double().log_softmax(1)


@pytest.mark.parametrize("profile", ["threshold", "tempered", "dense32", "hidden"])
def test_two_halves_of_one_teacher_are_that_teacher(world: World, profile: str) -> None:
    """Profile dense keeps all of p, so that its second seed changes nothing but the cache."""
    cache = world.capture("one", **PROFILES[profile])
    seed = {"seed": 1} if profile == "dense32" else {}
    second = world.capture("one", **PROFILES[profile] | seed)
    assert (second.fingerprint != cache.fingerprint) == bool(seed)
    student = Student.draw()
    joined = join([(0.5, cache), (0.5, second)])
    batch = read(cache, [5, 1, 2])
    assert_close(student.run(joined, read(joined, [5, 1, 2])), student.run(cache, batch))
    alone = join([(1.0, cache)])
    value, gradient = student.run(alone, read(alone, [5, 1, 2]))
    expected = student.run(cache, batch)
    assert torch.equal(value, expected[0]) and torch.equal(gradient, expected[1])


def test_the_gradient_is_that_of_the_mixture_and_the_value_that_and_the_jsd(world: World) -> None:
    one, other = (world.capture(name, **EXACT) for name in world.teachers)
    indices = [0, 3, 7]
    source = join([(0.3, one), (0.7, other)])
    batch = read(source, indices)
    student = Student.draw()
    logps = [decode_logprobs(cache, indices) for cache in (one, other)]
    p_NV = 0.3 * logps[0].exp() + 0.7 * logps[1].exp()
    hidden_ND = student.look_up(batch).requires_grad_()
    logq_NV = (hidden_ND @ student.lm_head.weight.T).log_softmax(1)
    kl = (p_NV * (p_NV.log() - logq_NV)).sum()
    kl.backward()
    jsd = sum(
        weight * (logp.exp() * (logp - p_NV.log())).sum()
        for weight, logp in zip((0.3, 0.7), logps, strict=True)
    )
    assert jsd > 1.0, "the teachers differ"
    assert hidden_ND.grad is not None
    assert_close(student.run(source, batch), (kl.detach() + jsd, hidden_ND.grad))


@pytest.mark.parametrize("profile", ["threshold", "topk", "dense32"])
def test_each_sequence_of_other_lengths_has_the_loss_of_its_own_cache(
    world: World, profile: str
) -> None:
    short = world.capture("one", 24, **PROFILES[profile])
    long = world.capture("other", 40, **PROFILES[profile])
    source = join([(1.0, short)], [(1.0, long)])
    assert (source.train_count, source.validation_count) == (16, 6)
    student = Student.draw()
    places = [9, 2, 15, 0]  # two of each, and the longer ones between
    batch = read(source, places)
    assert batch.tokens_BL.shape == (4, 40)
    value, gradient_ND = student.run(source, batch)
    values = [
        student.run(cache, read(cache, [number]))
        for cache, number in ((long, 1), (short, 2), (long, 7), (short, 0))
    ]
    expected = sum(value for value, _ in values), torch.cat([each for _, each in values])
    assert_close((value, gradient_ND), expected)
    targets = TargetDecoder.of(source, CPU).decode(batch.gold_N, batch.teacher)
    head = student.lm_head
    assert check_parity(student.look_up(batch), head, targets, Objective(), 60).ok


def test_a_teacher_that_is_the_student_teaches_nothing(world: World) -> None:
    """Two lengths in one batch, and a mixture of a teacher with itself."""
    short, long = (world.capture("one", length, **EXACT) for length in (24, 40))
    source = join([(0.25, short), (0.75, short)], [(1.0, long)])
    batch = read(source, [1, 12, 8, 3])
    targets = TargetDecoder.of(source, CPU).decode(batch.gold_N, batch.teacher)
    own = [decode_logprobs(*each) for each in ((short, [1]), (long, [4, 0]), (short, [3]))]
    logits_NV = torch.cat(own).requires_grad_()
    head = LMHead(torch.eye(V, dtype=torch.float64), None, 1.0, None, V)
    loss = compute_distillation_loss(logits_NV, head, targets, Objective()).total
    loss.backward()
    assert logits_NV.grad is not None
    assert abs(float(loss.detach())) < 1e-9 * len(batch)
    assert float(logits_NV.grad.abs().max()) < 1e-9


def test_the_cut_into_micro_batches_and_the_order_of_members_do_not_matter(world: World) -> None:
    caches = [world.capture(name, threshold=0.02) for name in world.teachers]
    source = join([(0.4, caches[0]), (0.6, caches[1])], [(1.0, caches[1])])
    turned = join([(0.6, caches[1]), (0.4, caches[0])], [(1.0, caches[1])])
    assert source.fingerprint == turned.fingerprint
    assert source.fingerprint != join([(0.6, caches[0]), (0.4, caches[1])]).fingerprint
    student = Student.draw()
    whole = student.run(source, read(source, list(range(16))))
    assert_close(student.run(turned, read(turned, list(range(16)))), whole)
    for size in (1, 4):
        parts = [
            student.run(source, read(source, list(range(first, first + size))))
            for first in range(0, 16, size)
        ]
        found = sum(value for value, _ in parts), torch.cat([each for _, each in parts])
        assert_close(found, whole)


@pytest.mark.long
def test_every_draw_of_a_mixture_weighs_one_and_their_mean_is_the_mixture(world: World) -> None:
    exact = [world.capture(name, **EXACT) for name in world.teachers]
    p_NV = sum(0.5 * decode_logprobs(cache, [0]).exp() for cache in exact)
    total_NV = torch.zeros_like(p_NV)
    draws = 5
    for seed in range(draws):
        caches = [world.capture(name, threshold=0.02, seed=seed) for name in world.teachers]
        source = join([(0.5, cache) for cache in caches])
        batch = read(source, [0])
        target = TargetDecoder.of(source, CPU).decode(batch.gold_N, batch.teacher).teacher
        assert isinstance(target, SparseTarget)
        sums_N = target.sum_N(target.weights_E)
        torch.testing.assert_close(sums_N, torch.ones_like(sums_N), rtol=0, atol=1e-6)
        total_NV.index_put_((target.rows_E, target.ids_E), target.weights_E / draws, True)
    # Head tokens come in every draw, so that their mean is near after a few.
    head = p_NV > 0.2
    assert head.any()
    assert float((total_NV - p_NV)[head].abs().mean()) < 0.02


def test_balance_gives_every_domain_the_mean_of_its_own(world: World) -> None:
    caches = [world.capture("one", 24), world.capture("other", 40)]
    source = join(*([(1.0, cache)] for cache in caches), balance="domains")
    assert source.fingerprint != join(*([(1.0, cache)] for cache in caches)).fingerprint
    batch = read(source, list(range(16)))
    assert batch.teacher is not None
    student = Student.draw()
    value, _ = student.run(source, batch)
    means, counts = [], []
    for cache in caches:
        own = read(cache, list(range(8)))
        means.append(student.run(cache, own)[0] / len(own))
        counts.append(len(own))
    assert counts[0] < 0.7 * counts[1]
    torch.testing.assert_close(value / sum(counts), sum(means) / 2, rtol=1e-6, atol=0)
    hard = Objective(alpha=1.0)
    plain = student.run(join(*([(1.0, cache)] for cache in caches)), batch, hard)
    assert torch.equal(student.run(source, batch, hard)[0], plain[0]), "hard labels count alike"


def test_the_best_token_of_a_mixture_is_known_where_all_teachers_agree(world: World) -> None:
    one, other = (world.capture(name, **EXACT) for name in world.teachers)
    source = join([(0.5, one), (0.5, other)])
    batch = read(source, [0, 1, 2])
    target = TargetDecoder.of(source, CPU).decode(batch.gold_N, batch.teacher).teacher
    assert target is not None
    best = [decode_logprobs(cache, [0, 1, 2]).argmax(1) for cache in (one, other)]
    found = target.take_chunk(slice(0, len(batch))).find_best_N()
    assert torch.equal(found, torch.where(best[0] == best[1], best[0], -1))
    assert 0 < int((found >= 0).sum()) < len(found)


def test_held_out_batches_are_of_one_domain(world: World) -> None:
    caches = [world.capture("one", 24), world.capture("other", 40)]
    source = join(*([(1.0, cache)] for cache in caches))
    dealt = [(name, len(batch.tokens_BL)) for _, name, batch in deal_validation_batches(source, 2)]
    assert dealt == [("part 0", 2), ("part 0", 1), ("part 1", 2), ("part 1", 1)]


def test_teachers_of_other_sequences_are_no_mixture(world: World) -> None:
    with pytest.raises(DataError, match="read other sequences of the same text"):
        join([(0.5, world.capture("one", 24)), (0.5, world.capture("other", 40))])
