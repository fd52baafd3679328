"""Losses for a teacher with another tokenizer, against brute force in float64 on 20 tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kd.checks.parity import check_parity
from kd.evaluation.floor import find_least_loss
from kd.loss.aligned.targets import TAU, ChunkTarget, Projection
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import LossTerms, compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Targets
from kd.models.lm_head import LMHead
from kd.models.tokenizing.pieces import TokenPieces
from kd.models.tokenizing.projection import make_projection
from kd.training.evaluate import score_positions
from tests.support.kd.samples import UNITS, columns_of, encode, make_codec, sample, sample_units

CPU = torch.device("cpu")
N, D = 12, 6
SEED = 3


def pieces(text: str, end: str = "<end>") -> TokenPieces:
    """Return a vocabulary of the words of ``text``, "_" is a space; the last id is ``end``."""
    words = [word.replace("_", " ").encode() for word in text.split()]
    size = len(words) + 1
    special = {len(words): end}
    return TokenPieces(size, dict(enumerate(words)), special, {"eos": len(words)})


#: Both have 20 ids. No token of the student begins as the teacher's xyz does, but x.
TEACHER = pieces("a b c d x y z _ ab abc cd bcd xyz xyza _a _ab _abc dd ddd")
STUDENT = pieces("a b c d x y z _ ab abd cda bc bca zz _a _abb d_a dda _x", "</s>")
TV, SV = TEACHER.size, STUDENT.size


def find_groups() -> tuple[dict[int, list[int]], dict[int, float]]:
    """The groups of all tokens of the teacher and their factors, by the definition."""
    theirs, ours = ({w: i for i, w in each.bytes_of.items()} for each in (TEACHER, STUDENT))

    def first(word: bytes, known: dict[bytes, int]) -> int:
        return next(known[word[:n]] for n in range(len(word), 0, -1) if word[:n] in known)

    groups = {i: [j for w, j in ours.items() if first(w, theirs) == i] for i in theirs.values()}
    groups[TV - 1] = [SV - 1]
    alone = {i: first(w, ours) for w, i in theirs.items() if not groups[i]}
    served = list(alone.values())
    factors = {
        i: 1 / (2 * served.count(alone[i])) if i in alone
        else 0.5 if set(group) & set(served) else 1.0
        for i, group in groups.items()
    }  # fmt: skip
    return groups | {i: [j] for i, j in alone.items()}, factors


def projection() -> Projection:
    return Projection.of(make_projection(TEACHER, STUDENT), CPU)


def make_head(vocabulary: int = SV, bias: bool = True) -> LMHead:
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(vocabulary, D, generator=generator, dtype=torch.float64) * 0.8
    offset = torch.randn(vocabulary, generator=generator, dtype=torch.float64) if bias else None
    return LMHead(weight.requires_grad_(), offset, 1.0, None, vocabulary)


def make_states(count: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + 1)
    return torch.randn(count, D, generator=generator, dtype=torch.float64).requires_grad_()


def draw_entries(count: int = N) -> SparseTarget:
    """Entries in the teacher's tokens whose weights do not sum to 1; some positions have none."""
    rng = np.random.default_rng(SEED)
    counts = rng.integers(0, 6, count)
    ids = np.concatenate([rng.permutation(TV)[:each] for each in counts])
    weights = torch.from_numpy(rng.random(counts.sum()) / 2)
    entropy = torch.from_numpy(rng.random(count))
    offsets = torch.from_numpy(np.concatenate([[0], counts.cumsum()]))
    return SparseTarget(offsets, torch.from_numpy(ids), weights, entropy, torch.zeros(count).long())


def gold(count: int = N) -> Tensor:
    return torch.randint(0, SV, (count,), generator=torch.Generator().manual_seed(SEED + 2))


def run(
    targets: Targets, objective: Objective, size: int | None = None
) -> tuple[LossTerms, Tensor, Tensor]:
    """Return the fused loss, and its gradients for the states and for the head."""
    states_ND, head = make_states(len(targets)), make_head()
    terms = compute_distillation_loss(states_ND, head, targets, objective, size)
    terms.total.backward()
    assert states_ND.grad is not None and head.weight.grad is not None
    return terms, states_ND.grad, head.weight.grad


def logits(count: int = N) -> tuple[Tensor, Tensor, LMHead]:
    states_ND, head = make_states(count), make_head()
    return states_ND @ head.weight.T + head.bias, states_ND, head


def test_each_token_of_the_student_is_in_one_group_and_the_factors_keep_a_distribution() -> None:
    groups, factors = find_groups()
    found = projection()
    members = [
        found.ids[a:b].tolist() for a, b in zip(found.offsets, found.offsets[1:], strict=False)
    ]
    assert {i: sorted(each) for i, each in enumerate(members)} == {
        i: sorted(each) for i, each in groups.items()
    }
    assert found.logs.exp().tolist() == pytest.approx([factors[i] for i in range(TV)])
    sums = np.zeros(SV)
    for i, group in groups.items():
        sums[group] += factors[i]
    assert sums.max() <= 1.0 and groups[12] == [4], "xyz begins with x"
    assert found.same.tolist()[8] == 8 and found.same.tolist()[12] == -1
    assert found.same.tolist()[-1] == SV - 1, "the ends are a pair by their role"


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("size", [None, 5])
def test_the_projected_loss_is_that_of_brute_force(
    alpha: float, temperature: float, size: int | None
) -> None:
    entries, groups, factors = draw_entries(), *find_groups()
    known_N = torch.arange(N) % 5 != 4
    columns = {"teacher_gold": torch.where(known_N, 0, -1)}
    teacher = projection().project(columns, entries)
    targets = Targets(gold(), teacher, temperature)
    terms, by_states, by_head = run(targets, Objective(alpha, label_smoothing=0.1), size)

    s_NV, states_ND, head = logits()
    logq_NV = torch.log_softmax(s_NV / temperature, 1)
    kd = torch.zeros((), dtype=torch.float64)
    for n in range(N):
        if not known_N[n]:
            continue
        kd = kd - entries.entropy_N[n]
        for e in range(int(entries.offsets_N1[n]), int(entries.offsets_N1[n + 1])):
            i = int(entries.ids_E[e])
            mass = logq_NV[n, groups[i]].exp().sum() * factors[i]
            kd = kd - entries.weights_E[e] * mass.log()
    ce = torch.nn.functional.cross_entropy(s_NV, gold(), reduction="sum", label_smoothing=0.1)
    total = (1 - alpha) * temperature**2 * kd + alpha * ce
    total.backward()
    torch.testing.assert_close(terms.total.detach(), total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_states, states_ND.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(by_head, head.weight.grad, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_a_group_is_its_share_of_the_student() -> None:
    """W q - p~, entry by entry, also where a group has no probability at all."""
    entries = draw_entries()
    target = projection().project({"teacher_gold": torch.zeros(N).long()}, entries)
    s_NV = logits()[0].detach()
    target.compute_expected_N(s_NV)
    g_NV = torch.softmax(s_NV, 1) * target.total_N[:, None]
    target.subtract_(g_NV, 1.0)
    assert g_NV.sum(1).abs().max() < 1e-12, "p~ has the sum W"
    # What others have subtracted before does not count: a mixture adds up.
    again_NV = torch.zeros_like(s_NV)
    target.subtract_(again_NV, -1.0)
    expected_NV = torch.softmax(s_NV, 1) * target.total_N[:, None] - g_NV
    torch.testing.assert_close(again_NV, expected_NV)
    target.shares.clear()
    nothing = torch.zeros(N, SV, dtype=torch.float64)
    target.subtract_(nothing, -1.0)
    torch.testing.assert_close(nothing.sum(1), target.total_N)


@pytest.mark.parametrize("profile", ["threshold", UNITS, "tempered"])
def test_ten_thousand_redraws_average_to_the_gradient_of_the_whole_distribution(
    profile: str,
) -> None:
    redraws = 10_000
    generator = torch.Generator().manual_seed(5)
    logits_V = torch.randn(TV, generator=generator) * 2
    logits_NV = logits_V.expand(redraws, TV)
    codec = make_codec(profile, TV, 0.2)
    chosen = torch.zeros(redraws, dtype=torch.int64)
    found = (sample_units if profile == UNITS else sample)(codec, logits_NV, chosen)
    columns = columns_of(encode(codec, found)) | {"teacher_gold": chosen}
    decoder = TargetDecoder(codec, projection=projection())
    target = decoder.decode(chosen, columns).teacher
    q_V = torch.softmax(logits(1)[0][0].detach(), 0)
    value_N = -target.compute_expected_N(q_V.log().expand(redraws, SV))
    g_NV = q_V.expand(redraws, SV).clone() * target.total_N[:, None]
    target.subtract_(g_NV, 1.0)

    p_V = torch.softmax(logits_V.double(), 0)
    groups, factors = find_groups()
    expected_V, value = q_V.clone(), 0.0
    for i, group in groups.items():
        expected_V[group] -= p_V[i] * q_V[group] / q_V[group].sum()
        value -= float(p_V[i] * (factors[i] * q_V[group].sum()).log())
    error = (g_NV.mean(0) - expected_V).abs()
    z = error / (g_NV.std(0) / redraws**0.5 + 1e-4)
    assert z.max() < 4.5, z
    assert abs(float(value_N.mean()) - value) < 4.5 * float(value_N.std()) / redraws**0.5 + 1e-3


def test_equal_tokenizers_project_to_the_plain_target_to_the_bit() -> None:
    codec = make_codec(UNITS, TV, 0.1)
    chosen = torch.arange(N) % TV
    logits_NV = torch.randn(N, TV, generator=torch.Generator().manual_seed(6)) * 3
    columns = columns_of(encode(codec, sample_units(codec, logits_NV, chosen)))
    columns["teacher_gold"] = chosen
    same = Projection.of(make_projection(TEACHER, TEACHER), CPU)
    plain = TargetDecoder(codec).decode(chosen, columns)
    through = TargetDecoder(codec, projection=same).decode(chosen, columns)
    assert isinstance(through.teacher, SparseTarget)
    losses = [run(each, Objective(0.2)) for each in (plain, through)]
    for ours, theirs in zip(*losses, strict=True):
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        assert all(torch.equal(*pair) for pair in pairs)
    assert torch.equal(plain.teacher.find_best_N(), through.teacher.find_best_N())


def test_a_student_that_is_its_teacher_has_no_projected_loss_and_no_gradient() -> None:
    s_NV = logits()[0].detach()
    p_NV = torch.softmax(s_NV, 1)
    offsets = torch.arange(N + 1) * SV
    entropy_N = torch.special.entr(p_NV).sum(1)
    ids = torch.arange(SV).repeat(N)
    entries = SparseTarget(offsets, ids, p_NV.reshape(-1), entropy_N, torch.zeros(N).long())
    same = Projection.of(make_projection(STUDENT, STUDENT), CPU)
    target = same.project({"teacher_gold": torch.zeros(N).long()}, entries)
    terms, by_states, by_head = run(Targets(gold(), target), Objective(0.0))
    assert abs(float(terms.total.detach())) < 1e-9
    assert max(by_states.abs().max(), by_head.abs().max()) < 1e-9


# ---------------------------------------------------------------------- chunks

#: Two rows: one of three chunks, with a position in none, and one of a chunk of three tokens.
CHUNKS = torch.tensor([0, 0, 1, -1, 2, 2, 2, 2, 3, 3, 3, -1])


@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize("size", [None, 5])
def test_the_loss_of_chunks_is_that_of_their_likelihoods(alpha: float, size: int | None) -> None:
    log_p = torch.tensor([-0.2, -3.0, -7.5, -0.001], dtype=torch.float64)
    known_N = torch.where(CHUNKS < 0, 0.0, log_p[CHUNKS.clamp(min=0)])
    targets = Targets(gold(), ChunkTarget(CHUNKS, known_N))
    terms, by_states, by_head = run(targets, Objective(alpha), size)

    s_NV, states_ND, head = logits()
    q_N = torch.softmax(s_NV, 1)[torch.arange(N), gold()]
    kd = torch.zeros((), dtype=torch.float64)
    for number in range(4):
        p = log_p[number].exp() ** (1 / TAU)
        q = q_N[number == CHUNKS].prod() ** (1 / TAU)
        kd = kd + TAU * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
    total = (1 - alpha) * kd - alpha * q_N.log().sum()
    total.backward()
    torch.testing.assert_close(terms.total.detach(), total.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_states, states_ND.grad, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(by_head, head.weight.grad, rtol=1e-8, atol=1e-10)
    states_ND, head = make_states(), make_head()
    score = score_positions(states_ND, head, targets, 5)
    assert score.kd == pytest.approx(float(kd.detach()), rel=1e-6) and score.comparable == 0


def test_a_student_that_is_its_teacher_has_no_loss_of_chunks_and_no_gradient() -> None:
    s_NV = logits()[0].detach()
    logq_N = torch.log_softmax(s_NV, 1)[torch.arange(N), gold()]
    own_N = torch.stack([logq_N[number == CHUNKS].sum() for number in CHUNKS])
    targets = Targets(gold(), ChunkTarget(CHUNKS, torch.where(CHUNKS < 0, 0.0, own_N)))
    terms, by_states, by_head = run(targets, Objective(0.0))
    assert abs(float(terms.total.detach())) < 1e-9
    assert max(by_states.abs().max(), by_head.abs().max()) < 1e-9


def test_positions_in_no_chunk_have_no_gradient_whatever_is_stored_there() -> None:
    gradients = []
    for stored in (0.0, -1e4, -torch.inf):
        known_N = torch.where(CHUNKS < 0, stored, -2.0).double()
        _, by_states, _ = run(Targets(gold(), ChunkTarget(CHUNKS, known_N)), Objective(0.0))
        assert (by_states[CHUNKS < 0] == 0.0).all()
        gradients.append(by_states)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("kind", ["projected", "chunks"])
def test_the_checks_of_a_run_know_both_losses(kind: str) -> None:
    teacher = (
        projection().project({"teacher_gold": torch.zeros(N).long()}, draw_entries())
        if kind == "projected"
        else ChunkTarget(CHUNKS, torch.where(CHUNKS < 0, 0.0, -1.0).double())
    )
    targets = Targets(gold(), teacher)
    head = replace(make_head(), bias=None)
    verdict = check_parity(make_states(), head, targets, Objective(0.3), 8)
    assert verdict.ok, verdict.message
    if kind == "projected":
        least = find_least_loss(targets, Objective(0.0), SV)
        assert least <= float(run(targets, Objective(0.0))[0].total.detach())
