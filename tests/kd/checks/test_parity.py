"""The fused loss agrees with the dense one on records of real captures, and a wrong constant fails.

The floor is the least of both losses: free logits, trained, come down to it and not below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cache.store import open_cache
from kd.checks import parity as parity_module
from kd.checks.parity import check_parity, take_first_positions
from kd.config.jobfile import parse_config
from kd.errors import TrainingError
from kd.evaluation.floor import find_least_loss
from kd.loss.decoder import TargetDecoder
from kd.loss.dense import compute_dense_loss
from kd.loss.fused import LossTerms, compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import Targets, detach_number
from kd.loss.whole_targets import HiddenTarget
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import LMHead, find_lm_head
from kd.progress import Monitor
from kd.stages.capture import run_precompute
from kd.text.batches import make_batch
from tests.support.kd.students import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 2048
SECTIONS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.1, "always_keep": [0, 5]},
    "tempered": {"profile": "tempered", "temperatures": {"min": 0.5, "max": 2.0}},
    "topk": {"profile": "topk", "k": 12},
    "dense": {"profile": "dense"},
    "hidden": {"profile": "hidden"},
}
ANY_TEMPERATURE = ("tempered", "dense", "hidden")
Take = Callable[..., Targets]


@pytest.fixture(scope="module")
def targets_of(
    tiny_teacher: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Take:
    """The targets of a batch by profile and temperature; each profile is captured once."""
    home = tmp_path_factory.mktemp("home")
    captured = {}

    def take(profile: str, temperature: float | Tensor = 1.0) -> Targets:
        if profile == "none":
            return replace(take("dense", temperature), teacher=None)
        if profile not in captured:
            captured[profile] = capture(profile)
        source, batch = captured[profile]
        return TargetDecoder.of(source, torch.device("cpu")).decode(
            batch.gold_N, batch.teacher, temperature
        )

    def capture(profile: str) -> Any:
        data = {
            "train": str(tiny_text),
            "sequence_length": 16,
            "max_train_samples": 3,
            "max_eval_samples": 1,
        }
        job = {
            "kind": "precompute",
            "teacher": {"model": str(tiny_teacher)},
            "data": data,
            "cache": SECTIONS[profile],
        }
        (home / profile).mkdir()
        found = run_precompute(parse_config(job), home, home / profile, Monitor())
        source = open_cache(home / "caches" / found.cache["fingerprint"])
        return source, make_batch(*source.read(np.arange(source.train_count)))

    return take


@dataclass(frozen=True)
class Student:
    hidden_ND: Tensor
    head: LMHead


@pytest.fixture(scope="module")
def student() -> Student:
    """A random student's hidden states and its LM head, padded beyond the vocabulary."""
    model = make_llama(
        VOCABULARY + 5,
        24,
        layers=1,
        seed=1,
        intermediate_size=48,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    tokens_BL = torch.randint(0, VOCABULARY, (3, 15))
    return Student(
        compute_hidden_states(model, tokens_BL).flatten(0, 1).detach(),
        find_lm_head(model, VOCABULARY),
    )


def add_bias_and_cap(student: Student) -> Student:
    bias = torch.randn(VOCABULARY + 5, requires_grad=True)
    return Student(student.hidden_ND, replace(student.head, bias=bias, scale=0.5, softcap=5.0))


# ---------------------------------------------------------------------- what is right passes


@pytest.mark.long
@pytest.mark.parametrize("profile", ["none", *SECTIONS])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_every_profile_agrees(
    profile: str, alpha: float, targets_of: Take, student: Student
) -> None:
    alpha = 1.0 if profile == "none" else alpha
    for each in (student, add_bias_and_cap(student)):
        verdict = check_parity(each.hidden_ND, each.head, targets_of(profile), Objective(alpha), 8)
        assert verdict.ok, verdict
        assert verdict.facts["tokens"] == 8 and max(verdict.facts["errors"].values()) < 2e-5
        names = {"logits", "loss", "gradient of hidden states", "gradient of head weight"}
        biased = {"gradient of head bias"} if each.head.bias is not None else set()
        assert set(verdict.facts["errors"]) == names | biased


@pytest.mark.parametrize("profile", ANY_TEMPERATURE)
@pytest.mark.parametrize("temperature", [0.5, 1.4, 2.0])
def test_every_temperature_agrees_with_its_gradient(
    profile: str, temperature: float, targets_of: Take, student: Student
) -> None:
    theta = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    verdict = check_parity(
        student.hidden_ND, student.head, targets_of(profile, theta * 1.0), Objective(0.1), 8
    )
    assert verdict.ok, verdict
    assert "gradient of T" in verdict.facts["errors"]
    assert theta.grad is None and student.head.weight.grad is None, "nothing is left behind"


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd", "skew_kl", "total_variation"])
@pytest.mark.parametrize("profile", ["dense", "hidden"])
def test_every_divergence_agrees(
    divergence: Any, profile: str, targets_of: Take, student: Student
) -> None:
    objective = Objective(0.2, divergence, label_smoothing=0.1, z_loss=1e-3, entropy_weighting=1.0)
    assert check_parity(student.hidden_ND, student.head, targets_of(profile, 1.5), objective, 8).ok


def test_a_student_that_is_its_teacher_agrees(targets_of: Take) -> None:
    """Loss and gradients are 0 up to rounding, so an error relative to them has no meaning."""
    targets = targets_of("hidden")
    teacher: Any = targets.teacher
    hidden_ND = teacher.hidden_ND.float() * teacher.scale_N[:, None]
    head = replace(teacher.lm_head, weight=teacher.lm_head.weight.clone().requires_grad_())
    verdict = check_parity(hidden_ND, head, targets, Objective(0.0), 8)
    assert verdict.ok and abs(verdict.facts["loss"]) < 1e-6, verdict


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_have_bounds_of_their_own(
    dtype: torch.dtype, targets_of: Take, student: Student
) -> None:
    verdict = check_parity(
        student.hidden_ND.to(dtype), student.head, targets_of("threshold"), Objective(0.1), 40
    )
    assert verdict.ok, verdict
    assert (max(verdict.facts["errors"].values()) > 1e-4) == (dtype.itemsize == 2), (
        "half precision is not float32"
    )


NEAR = ["forward_kl", "reverse_kl", "jsd", "total_variation"]


def make_near_student(
    distance: float, dtype: torch.dtype, temperature: float | Tensor = 1.0
) -> tuple[Tensor, LMHead, Targets]:
    """Hidden states and an LM head at a given distance from the teacher's.

    The logits are as spread as those of a trained model.
    """
    generator = torch.Generator().manual_seed(3)
    weight, hidden_ND, *noise = (
        torch.randn(shape, generator=generator)
        for shape in ((VOCABULARY, 64), (8, 64), (VOCABULARY, 64), (8, 64))
    )
    theirs = LMHead(weight * 5 / 8, None, 1.0, None, VOCABULARY)
    codes = (hidden_ND * 2000).round().to(torch.int16)
    teacher = HiddenTarget(codes, torch.full((8,), 1 / 2000), theirs, detach_number(temperature))
    targets = Targets(torch.randint(VOCABULARY, (8,), generator=generator), teacher, temperature)
    ours = replace(theirs, weight=((weight + distance * noise[0]) * 5 / 8).requires_grad_())
    return (hidden_ND + distance * noise[1]).to(dtype), ours, targets


@pytest.mark.parametrize("divergence", NEAR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 8.0])
def test_a_student_near_its_teacher_agrees(
    divergence: Any, dtype: torch.dtype, temperature: float
) -> None:
    """Rounding of the logits, and of the sign of q - p, is no error of the loss."""
    for distance in (0.0, 0.02, 0.1):
        theta = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
        verdict = check_parity(
            *make_near_student(distance, dtype, theta), Objective(0.1, divergence), 8
        )
        assert verdict.ok, (distance, verdict)


def test_a_frozen_head_and_few_tokens_agree(targets_of: Take, student: Student) -> None:
    frozen = replace(student.head, weight=student.head.weight.detach())
    verdict = check_parity(student.hidden_ND, frozen, targets_of("threshold"), Objective(0.1), 1000)
    assert verdict.ok and set(verdict.facts["errors"]) == {
        "logits",
        "loss",
        "gradient of hidden states",
    }
    assert verdict.facts["tokens"] == len(targets_of("threshold"))
    assert check_parity(
        student.hidden_ND[:0], student.head, targets_of("threshold"), Objective(0.1), 0
    ).ok


# ---------------------------------------------------------------------- what is wrong does not


def make_altered_pass(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Targets, Objective], tuple[Targets, Objective]],
) -> None:
    """A fused pass into which ``change`` puts a wrong constant."""

    def wrong(hidden_ND: Tensor, head: LMHead, targets: Targets, objective: Objective) -> LossTerms:
        return compute_distillation_loss(hidden_ND, head, *change(targets, objective))

    monkeypatch.setattr(parity_module, "compute_distillation_loss", wrong)


WRONG: dict[str, Callable[[Targets, Objective], tuple[Targets, Objective]]] = {
    "alpha": lambda targets, objective: (targets, replace(objective, alpha=objective.alpha + 0.01)),
    "smoothing": lambda targets, objective: (targets, replace(objective, label_smoothing=0.01)),
    "z-loss": lambda targets, objective: (targets, replace(objective, z_loss=1e-3)),
    "weights": lambda targets, objective: (targets, replace(objective, entropy_weighting=0.2)),
    "temperature": lambda targets, objective: (replace(targets, temperature=1.01), objective),
    "no T squared": lambda targets, objective: (targets, replace(objective, teacher_only=True)),
    "labels": lambda targets, objective: (
        replace(targets, gold_N=targets.gold_N.roll(1)),
        objective,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_constant_stops_the_job(
    name: str, targets_of: Take, student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_altered_pass(monkeypatch, WRONG[name])
    verdict = check_parity(
        student.hidden_ND, student.head, targets_of("dense", 1.5), Objective(0.1), 8
    )
    assert not verdict.ok, verdict
    with pytest.raises(TrainingError, match="which is wrong") as caught:
        verdict.require()
    assert "report" in caught.value.remedy


class Louder(SparseTarget):
    """Entries whose value is 1 % too large; their gradient is right."""

    def compute_expected_N(self, s_NV: Tensor) -> Tensor:
        return super().compute_expected_N(s_NV) * 1.01

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> SparseTarget:
        return Louder(**get_fields(super().take_chunk(rows, dtype)))


class Heavier(SparseTarget):
    """Entries whose gradient is 1 % too large; their value is right."""

    def subtract_(self, q_NV: Tensor, share: float | Tensor) -> None:
        super().subtract_(q_NV, share * 1.01)

    def take_chunk(self, rows: slice, dtype: torch.dtype = torch.float32) -> SparseTarget:
        return Heavier(**get_fields(super().take_chunk(rows, dtype)))


def get_fields(target: SparseTarget) -> dict[str, Any]:
    return {
        name: getattr(target, name)
        for name in ("offsets_N1", "ids_E", "weights_E", "entropy_N", "candidate_count_N")
    }


@pytest.mark.parametrize(("kind", "named"), [(Louder, "loss"), (Heavier, "gradient of")])
def test_a_biased_target_is_named(
    kind: type[SparseTarget], named: str, targets_of: Take, student: Student
) -> None:
    targets = targets_of("threshold")
    assert isinstance(targets.teacher, SparseTarget)
    biased = replace(targets, teacher=kind(**get_fields(targets.teacher)))
    verdict = check_parity(student.hidden_ND, student.head, biased, Objective(0.1), 8)
    assert not verdict.ok and f"the {named}" in verdict.message, verdict


@pytest.mark.parametrize("divergence", NEAR)
@pytest.mark.parametrize("name", ["alpha", "smoothing", "labels"])
def test_a_wrong_constant_near_the_teacher_in_bfloat16(
    divergence: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses of the same logits are compared as strictly as in float32."""
    make_altered_pass(monkeypatch, WRONG[name])
    assert not check_parity(
        *make_near_student(0.1, torch.bfloat16), Objective(0.1, divergence), 8
    ).ok


def test_wrong_logits_are_named(
    targets_of: Take, student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of these logits is right."""
    multiply = LMHead.multiply
    monkeypatch.setattr(
        LMHead,
        "multiply",
        lambda head, hidden_ND, room_NV=None: multiply(head, hidden_ND.roll(1, 0)),
    )
    verdict = check_parity(
        student.hidden_ND.bfloat16(), student.head, targets_of("threshold"), Objective(0.1), 8
    )
    assert not verdict.ok and "the logits" in verdict.message, verdict
    assert verdict.facts["errors"]["loss"] < 1e-5


def test_a_nan_does_not_pass(targets_of: Take, student: Student) -> None:
    spoilt = student.hidden_ND.clone()
    spoilt[2, 3] = torch.nan
    assert not check_parity(spoilt, student.head, targets_of("threshold"), Objective(0.1), 8).ok


# ---------------------------------------------------------------------- the floor


class Free(LMHead):
    def compute_logits(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND


FLOORS = [
    ("none", 1.0, Objective(1.0)),
    ("none", 1.0, Objective(1.0, label_smoothing=0.2)),
    ("threshold", 1.0, Objective(0.0)),
    ("threshold", 1.0, Objective(0.4)),
    ("topk", 1.0, Objective(0.0)),
    ("topk", 1.0, Objective(0.4, label_smoothing=0.1)),
    ("tempered", 1.7, Objective(0.0)),
    ("tempered", 1.7, Objective(0.4)),
    ("dense", 1.0, Objective(0.4)),
    ("dense", 0.6, Objective(0.4)),
    ("dense", 1.0, Objective(0.4, entropy_weighting=4.0)),
    ("dense", 1.0, Objective(0.3, entropy_weighting=-4.0)),
    ("dense", 2.0, Objective(0.3, "reverse_kl")),
    ("hidden", 1.5, Objective(0.3, "jsd", z_loss=1e-3)),
    ("dense", 1.0, Objective(0.3, "skew_kl")),
]


@pytest.mark.parametrize(("profile", "temperature", "objective"), FLOORS)
@pytest.mark.long
def test_the_floor_is_what_free_logits_come_to(
    profile: str, temperature: float, objective: Objective, targets_of: Take
) -> None:
    """Adam on free logits, from the label, ends at the floor, from above."""
    targets = take_first_positions(targets_of(profile, temperature), 3)
    floor = find_least_loss(targets, objective, VOCABULARY)
    logits_NV = torch.zeros(3, VOCABULARY, dtype=torch.float64)
    logits_NV = logits_NV.scatter(1, targets.gold_N[:, None], 5.0).requires_grad_()
    free = Free(torch.empty(0), None, 1.0, None, VOCABULARY)
    search = torch.optim.Adam([logits_NV], lr=0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(search, 400)
    for _ in range(400):
        search.zero_grad()
        total = compute_dense_loss(logits_NV, free, targets, objective).total
        total.backward()
        search.step()
        schedule.step()
    begun = float(
        compute_dense_loss(torch.zeros_like(logits_NV), free, targets, objective).total.detach()
    )
    assert float(total.detach()) == pytest.approx(floor, abs=0.02 * (begun - floor))
    assert float(total.detach()) > floor - 2e-3 * (begun - floor)


def test_the_first_targets_are_the_first_ones(targets_of: Take, student: Student) -> None:
    """The losses of the parts add up, for every kind of target."""
    for profile in SECTIONS:
        targets = targets_of(profile)
        part = take_first_positions(copy.copy(targets), 5)
        assert len(part) == 5
        alone = compute_distillation_loss(
            student.hidden_ND[:5], student.head, part, Objective(0.2)
        ).total
        cut = [
            compute_distillation_loss(
                student.hidden_ND[:n],
                student.head,
                take_first_positions(targets, n),
                Objective(0.2),
            )
            for n in (4, 5)
        ]
        assert float(alone.detach()) == pytest.approx(float(cut[1].total.detach()), rel=1e-6)
        assert float(cut[1].kd - cut[0].kd) > 0


class LargestFloat64(TorchDispatchMode):
    """Keeps the number of elements of the largest float64 tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            self.elements = max(self.elements, made.numel())
        return made


def test_no_copy_of_the_lm_head_is_float64(
    targets_of: Take, student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a large vocabulary has gigabytes, and comes after the memory was found to suffice."""
    targets = targets_of("threshold")
    arguments = (student.hidden_ND, student.head, targets, Objective(alpha=0.3), 8)
    whole = check_parity(*arguments)
    monkeypatch.setattr(parity_module, "BLOCK_ELEMENTS", 4096)
    with LargestFloat64() as largest:
        found = check_parity(*arguments)
    assert largest.elements < student.head.weight.numel() / 2
    assert found.ok
    assert found.facts["errors"] == pytest.approx(whole.facts["errors"], rel=1e-6)
