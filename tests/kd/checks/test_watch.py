"""The watch reports spikes, clipping, starvation and drift once each, and nothing else."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kd.checks.verdict import Verdict
from kd.checks.watch import AVERAGE_WARM_UP, WARM_UP, WINDOW, StepSeconds, TrainingWatch
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.errors import TrainingError
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.text.steps.reading import TimedIterator, read_training_batches

BUSY = StepSeconds(0.0, 1.0)


def make_job(train: dict[str, Any] | None = None, **checks: Any) -> JobConfig:
    return parse_config(
        {
            "kind": "train",
            "student": {"init": {"layers": 1, "hidden_size": 16, "tokenizer": "."}},
            "data": {"train": "unused.txt"},
            "loss": {"alpha": 1.0},
            "train": {"max_steps": 8, **(train or {})},
            "checks": checks,
        }
    )


def step(
    watch: TrainingWatch, loss: float, ce_loss: float | None = None, grad_norm: float = 0.1
) -> list[Verdict]:
    return watch.observe_step(loss, loss if ce_loss is None else ce_loss, grad_norm, BUSY)


def begin_watch(job: JobConfig) -> TrainingWatch:
    return TrainingWatch(job.checks, job.require_train())


def make_watch(losses: list[float], **checks: Any) -> TrainingWatch:
    watch = begin_watch(make_job(**checks))
    for loss in losses:
        step(watch, loss)
    return watch


# ---------------------------------------------------------------------- spikes


def test_the_average_is_the_exponential_one() -> None:
    losses = np.random.default_rng(0).uniform(1, 9, 40).tolist()
    weights = 0.9 ** np.arange(40)[::-1]
    assert make_watch(losses).average == pytest.approx(
        float(weights @ losses / weights.sum()), rel=1e-12
    )


def test_a_loss_above_three_times_its_average_is_a_spike() -> None:
    watch = make_watch([2.0] * 30)
    assert not watch.is_spike(5.99, 5.99)
    assert watch.is_spike(6.01, 6.01)
    assert make_watch([2.0] * 30, spike_factor=4.0).is_spike(8.01, 8.01)
    assert not make_watch([2.0] * 30, spike_factor=0).is_spike(1e9, 1e9)


def test_the_first_losses_and_those_near_zero_are_no_spikes() -> None:
    assert not make_watch([2.0] * (AVERAGE_WARM_UP - 1)).is_spike(100.0, 100.0)
    assert make_watch([2.0] * AVERAGE_WARM_UP).is_spike(100.0, 100.0)
    assert not make_watch([0.001] * 30).is_spike(0.2, 0.2), (
        "noise about a student that equals its teacher"
    )
    assert make_watch([0.001] * 30).is_spike(0.31, 0.31)


def test_an_objective_that_jumps_is_no_spike() -> None:
    """alpha goes from 0 to 1: from 0.3 nats of KL to 3 of cross-entropy, which was 3 before."""
    watch = begin_watch(make_job())
    for _ in range(30):
        step(watch, 0.3, 3.0)
    assert not watch.is_spike(3.0, 3.1)
    assert watch.is_spike(3.0, 5.7), "here the student did get worse"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error_of_its_own(loss: float) -> None:
    assert not make_watch([2.0] * 30).is_spike(loss, loss)


def test_a_spike_goes_back_until_it_may_no_more() -> None:
    watch = make_watch([2.0] * 30)
    path = Path("checkpoints/step-00000020")
    for rollbacks in (0, 1):
        verdict = watch.make_spike_verdict(31, 8.0, rollbacks, path)
        assert verdict.ok and f"roll-back {rollbacks + 1} of 2" in verdict.message
        assert (
            "step 31 the loss is 8, 4.0 times" in verdict.message
            and "step-00000020" in verdict.message
        )
        verdict.require()
    with pytest.raises(
        TrainingError, match=r"last good checkpoint is checkpoints/step-00000020"
    ) as caught:
        watch.make_spike_verdict(31, 8.0, 2, path).require()
    assert "train.learning_rate" in caught.value.remedy
    with pytest.raises(TrainingError, match="no checkpoint to go back to"):
        watch.make_spike_verdict(31, 8.0, 0, None).require()


# ---------------------------------------------------------------------- clipping


def observe_norms(watch: TrainingWatch, norms: list[float]) -> list[Verdict]:
    return [verdict for norm in norms for verdict in step(watch, 2.0, grad_norm=norm)]


def test_clipping_of_most_steps_is_reported_once() -> None:
    watch = begin_watch(make_job())
    found = observe_norms(watch, ([2.0] * 3 + [0.5] * 2) * 20)
    assert [verdict.check for verdict in found] == ["clipping"]
    assert not found[0].ok and found[0].facts == {"share": 0.6, "max_grad_norm": 1.0}
    assert "60%" in found[0].message and "train.max_grad_norm" in found[0].remedy
    assert observe_norms(watch, [0.5] * WINDOW) == []
    assert len(observe_norms(watch, [2.0] * WINDOW)) == 1, "again, after it had ended"


def test_clipping_of_some_steps_is_not_reported() -> None:
    assert observe_norms(begin_watch(make_job()), [2.0, 0.5] * WINDOW) == [], (
        "half is not more than half"
    )
    assert len(observe_norms(begin_watch(make_job()), [2.0] * 26 + [0.5] * 24)) == 1
    assert observe_norms(begin_watch(make_job({"max_grad_norm": 0})), [9.0] * WINDOW) == [], (
        "no clipping at all"
    )
    assert observe_norms(begin_watch(make_job()), [math.inf] * WINDOW) == [], (
        "steps that the loss scaler skips"
    )


# ---------------------------------------------------------------------- starvation


def observe_seconds(watch: TrainingWatch, seconds: list[StepSeconds]) -> list[Verdict]:
    return [verdict for each in seconds for verdict in watch.observe_step(2.0, 2.0, 0.1, each)]


def test_waiting_for_data_is_reported_with_advice() -> None:
    watch = begin_watch(make_job({"dataloader_num_workers": 3}))
    found = observe_seconds(
        watch, [StepSeconds(0.0, 1.0)] * WARM_UP + [StepSeconds(0.3, 0.7)] * 2 * WINDOW
    )
    assert [verdict.check for verdict in found] == ["starvation"]
    assert not found[0].ok and found[0].facts["share"] == pytest.approx(0.3)
    assert "train.dataloader_num_workers (now 3)" in found[0].remedy
    assert "set train.order (now shuffled) to windows" in found[0].remedy


def test_the_first_steps_tell_nothing_of_waiting() -> None:
    cold = [StepSeconds(100.0, 1.0)] * WARM_UP
    assert (
        observe_seconds(begin_watch(make_job()), cold + [StepSeconds(0.05, 0.95)] * 3 * WINDOW)
        == []
    )
    assert (
        len(
            observe_seconds(
                begin_watch(make_job()),
                cold + [StepSeconds(0.11, 0.89)] * 3 * WINDOW,
            )
        )
        == 1
    )


class Slow(PlainText):
    """Text on a slow disk."""

    def read(self, indices: np.ndarray, draws: np.ndarray | int = 0) -> Any:
        time.sleep(0.01)
        return super().read(indices, draws)


@pytest.mark.alone
@pytest.mark.parametrize(("kind", "pause", "alarms"), [(Slow, 0.0, 1), (PlainText, 0.004, 0)])
def test_a_starved_loop_is_told_from_a_fed_one(
    kind: type[PlainText], pause: float, alarms: int
) -> None:
    """A source's real batches, and a loop that takes ``pause`` seconds a step."""
    config = make_job({"batch_size": 2, "dataloader_num_workers": 1})
    assert config.train is not None
    documents = [Document(np.arange(40, dtype=np.uint32) % 7) for _ in range(20)]
    text = pack_documents(documents, config.data.model_copy(update={"sequence_length": 16}))
    steps = WARM_UP + WINDOW
    batches = TimedIterator(
        read_training_batches(kind(Corpus(text, text)), config.train, range(steps))
    )
    watch = begin_watch(config)
    found = []
    for _ in batches:
        began = time.perf_counter()
        time.sleep(pause)
        found += watch.observe_step(
            2.0, 2.0, 0.1, StepSeconds(batches.last, time.perf_counter() - began)
        )
    assert [verdict.check for verdict in found] == ["starvation"] * alarms
    assert all(verdict.facts["share"] > 0.5 for verdict in found)


# ---------------------------------------------------------------------- agreement


def observe_agreement(watch: TrainingWatch, shares: list[float | None]) -> list[Verdict]:
    return [
        verdict
        for share in shares
        for verdict in watch.observe_evaluation({"validation_agreement": share})
    ]


def test_a_student_that_leaves_its_teacher_is_reported_once() -> None:
    watch = begin_watch(make_job())
    assert observe_agreement(watch, [None, 0.3, 0.5, 0.45, 0.41]) == []
    found = observe_agreement(watch, [0.39, 0.35])
    assert [verdict.check for verdict in found] == ["agreement"]
    assert found[0].facts == {"agreement": 0.39, "best": 0.5} and "loss.alpha" in found[0].remedy
    assert len(observe_agreement(watch, [0.5, 0.3])) == 1
    assert begin_watch(make_job()).observe_evaluation({}) == []


# ---------------------------------------------------------------------- state


def test_restored_from_json_it_goes_on_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    steps = [
        (float(loss), float(norm))
        for loss, norm in zip(rng.gamma(2, 1, 300), rng.gamma(2, 1, 300), strict=True)
    ]
    shares = rng.uniform(0, 1, 300).tolist()

    def go_on(watch: TrainingWatch, part: slice) -> list[Any]:
        results: list[Any] = []
        for (loss, norm), share in zip(steps[part], shares[part], strict=True):
            results.append((watch.is_spike(loss, loss), watch.average))
            results += [
                step(watch, loss, grad_norm=norm),
                watch.observe_evaluation({"validation_agreement": share}),
            ]
        return results

    whole = go_on(begin_watch(make_job()), slice(0, 300))
    assert any(isinstance(each, tuple) and each[0] for each in whole) and any(
        isinstance(e, list) and e for e in whole
    )
    for cut in (1, 49, 77, 250):
        first = begin_watch(make_job())
        second = begin_watch(make_job())
        before = go_on(first, slice(0, cut))
        second.restore(json.loads(json.dumps(first.state())))
        assert before + go_on(second, slice(cut, 300)) == whole


def test_an_empty_state_starts_anew() -> None:
    watch = make_watch([2.0] * 30)
    watch.restore({})
    assert watch.average == 0.0 and not watch.is_spike(100.0, 100.0)


# ---------------------------------------------------------------------- layers and units


def test_a_layer_s_gradient_that_explodes_or_vanishes_is_an_alarm_once() -> None:
    watch = begin_watch(make_job())
    usual = {"embeddings": 1.0, "layer 0": 1e-7, "head": 100.0}
    assert watch.observe_layers(usual) == []
    large, small = watch.observe_layers({"embeddings": 101.0, "layer 0": 1e-8, "head": 102.0})
    assert (large.check, small.check) == ("exploding", "vanishing")
    assert large.message == "The norm of the gradient is above 100 in embeddings, head."
    assert small.facts == {"norms": {"layer 0": 1e-8}}
    assert "max_grad_norm" in large.remedy and "learns nothing" in small.remedy
    assert watch.observe_layers({"embeddings": 101.0, "layer 0": 1e-8, "head": 1.0}) == []
    # A checkpoint keeps which alarms have sounded.
    resumed = begin_watch(make_job())
    resumed.restore(json.loads(json.dumps(watch.state())))
    (again,) = resumed.observe_layers({"embeddings": 101.0, "layer 0": 1e-8, "head": 102.0})
    assert again.message.endswith("above 100 in head.")


def test_a_layer_is_not_judged_by_an_infinite_norm() -> None:
    assert begin_watch(make_job()).observe_layers({"layer 0": math.inf}) == []


def test_without_alarms_the_watch_only_looks_for_spikes() -> None:
    watch = begin_watch(make_job(alarms=False))
    assert observe_norms(watch, [2.0] * 2 * WINDOW) == []
    assert observe_seconds(watch, [StepSeconds(1.0, 0.0)] * 2 * WINDOW) == []
    assert watch.observe_layers({"layer 0": 1e9, "layer 1": 0.0}) == []
    assert observe_agreement(watch, [0.9, 0.1]) == []
    assert watch.is_spike(1e9, 1e9)


def test_dead_units_are_an_alarm_once_and_again_for_another_layer() -> None:
    watch = begin_watch(make_job())
    assert watch.observe_units({"layer 0": 0.1, "layer 1": 0.0}) == []
    (alarm,) = watch.observe_units({"layer 0": 0.3, "layer 1": 0.0})
    assert alarm.check == "dead_units" and not alarm.ok
    assert watch.observe_units({"layer 0": 0.4, "layer 1": 0.0}) == []
    assert len(watch.observe_units({"layer 0": 0.4, "layer 1": 0.5})) == 1
