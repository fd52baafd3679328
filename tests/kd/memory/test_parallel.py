"""Bytes and times of a step on several ranks, against values that are worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kd.config.train import TrainConfig
from kd.memory.devices import DEVICE_KINDS, DeviceRates
from kd.memory.parallel import (
    HEADROOM,
    LINK_SHARE,
    ParallelStrategy,
    choose_strategy,
    count_between_hosts,
    count_traffic,
    count_waiting,
    estimate_rank,
)
from kd.memory.step_bytes import StepShape, StudentShape
from kd.optim.state_size import ParameterShape

#: A layer of one matrix of 1,000 numbers, an embedding and an untied head of 200 each, a norm.
LAYER = ParameterShape((10, 100), is_layer_matrix=True)
EMBEDDING = ParameterShape((20, 10), is_layer_matrix=False)
NORM = ParameterShape((10,), is_layer_matrix=False)
STUDENT = StudentShape(
    layers=4,
    trained=(LAYER,) * 4 + (EMBEDDING, EMBEDDING, NORM),
    in_layers=4000,
    largest=1000,
    largest_trained=1000,
    widths=440,
    head=200,
    width=10,
    buffer_bytes=8,
)
NUMBERS = 4 * 1000 + 2 * 200 + 10


def make_step(student: StudentShape = STUDENT, item: int = 2, **changes: Any) -> StepShape:
    options = TrainConfig(max_steps=1, batch_size=2, gradient_accumulation_steps=4)
    return StepShape(
        student=student,
        options=options.model_copy(update=changes),
        length=8,
        vocabulary=20,
        item=item,
        chunk=4,
    )


# ---------------------------------------------------------------------- the choice


def test_auto_is_the_first_strategy_that_fits() -> None:
    step = make_step()
    ddp, fsdp = (estimate_rank(step, name, 4).total for name in ("ddp", "fsdp"))
    assert fsdp < ddp
    for room, expected in ((ddp, "ddp"), (ddp - 1, "fsdp"), (fsdp - 1, "fsdp")):
        assert choose_strategy(step, 4, math.ceil(room / (1 - HEADROOM))) == expected
    assert choose_strategy(step, 4, None) == "ddp"
    assert choose_strategy(step, 1, 1) == "single"
    # What parts cannot do stays with whole copies.
    assert choose_strategy(make_step(optim="adamw_8bit"), 4, 1) == "ddp"


# ---------------------------------------------------------------------- memory


def test_one_rank_is_the_step_itself() -> None:
    step = make_step()
    found = estimate_rank(step, "single", 1)
    assert (found.total, found.buffers) == (step.estimate().total, 0)
    assert estimate_rank(step, "fsdp", 1) == estimate_rank(step, "ddp", 1) == found


def test_ddp_needs_on_each_device_as_much_as_one_device_alone() -> None:
    """Its buckets are the gradients themselves."""
    single, ddp = (estimate_rank(make_step(), each, 4) for each in ("single", "ddp"))
    assert ddp == single


def test_parts_that_lie_on_the_host_are_not_on_the_device() -> None:
    there = estimate_rank(make_step(), "fsdp", 4)
    here = estimate_rank(make_step(fsdp_offload=True), "fsdp", 4)
    assert here.offloaded == there.weights + there.gradients + there.optimizer
    assert here.total == there.total - here.offloaded
    assert (here.weights, here.gradients, here.optimizer) == (0, 0, 0)
    assert here.buffers == there.buffers


def test_fsdp_divides_weights_gradients_and_state_and_gathers_the_largest_layer() -> None:
    ranks = 4
    found = estimate_rank(make_step(), "fsdp", ranks)
    assert found.weights == 8 + NUMBERS * 4 / ranks
    assert found.gradients == NUMBERS * 4 / ranks
    assert found.optimizer == NUMBERS * 8 / ranks
    # Embedding, norm and head in bfloat16; two layers; one gradient in bfloat16 and in float32.
    assert found.buffers == 2 * 410 + 2 * 2 * 1000 + (2 + 4) * 1000
    single = estimate_rank(make_step(), "single", 1)
    # No layer casts its weights, and no head is cast.
    assert single.activations - found.activations == 4 * 2000
    assert single.head - found.head == 2 * 200


def test_frozen_weights_are_gathered_and_have_no_gradient() -> None:
    student = replace(
        STUDENT,
        trained=(ParameterShape((4, 10), is_layer_matrix=True),) * 4,
        in_layers=4 * 1040,
        largest=1040,
        largest_trained=40,
        frozen=4 * 1000 + 410,
        frozen_bytes=4 * 2000 + 1640,
        head_bytes=4,
    )
    found = estimate_rank(make_step(student), "fsdp", 2)
    assert found.weights == 8 + (4 * (160 + 2000) + 1640) / 2
    assert found.gradients == 4 * 160 / 2
    assert found.buffers == 2 * 410 + 2 * 2 * 1040 + (2 + 4) * 40


def test_a_stage_of_a_pipeline_holds_its_part_and_all_micro_batches_in_flight() -> None:
    whole, stage = (estimate_rank(make_step(), "pipeline", ranks) for ranks in (1, 2))
    assert stage.weights - 8 == (whole.weights - 8) / 2
    assert (stage.activations, stage.head) == (whole.activations, whole.head)


def test_fsdp_needs_less_than_ddp_and_a_stage_least() -> None:
    """FSDP gathers two layers of the four here, and a stage holds one."""
    sizes = [estimate_rank(make_step(), each, 4).total for each in ("ddp", "fsdp", "pipeline")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


# ---------------------------------------------------------------------- bytes that are sent


def test_ddp_sends_its_gradients_once_a_step() -> None:
    assert count_traffic(make_step(), "ddp", 4) == 2 * 3 / 4 * 4 * NUMBERS
    assert count_traffic(make_step(gradient_accumulation_steps=1), "ddp", 4) == 6 * NUMBERS
    assert count_traffic(make_step(), "ddp", 1) == 0


def test_fsdp_gathers_twice_and_scatters_once_in_each_micro_batch() -> None:
    gathered = 2 * NUMBERS * 2 * 3 / 4
    scattered = NUMBERS * 4 * 3 / 4
    assert count_traffic(make_step(), "fsdp", 4) == 4 * (gathered + scattered)


def test_fsdp_gathers_once_and_in_its_own_type_what_lies_outside_of_the_layers() -> None:
    """4,000 numbers are in the layers, 410 outside."""
    found = count_traffic(make_step(item=4), "fsdp", 4)
    assert found == 4 * 3 / 4 * (2 * 4000 * 4 + 410 * 4 + NUMBERS * 4)
    pure = make_step(precision="bf16_pure")
    assert count_traffic(pure, "fsdp", 4) == 4 * 3 / 4 * (2 * 4000 * 2 + 410 * 2 + NUMBERS * 4)


# ---------------------------------------------------------------------- time

#: Devices of a host send 80 bytes/s to each other after LINK_SHARE, hosts 8.
RATES = DeviceRates("round", 1, 1.0, 1.0, 1.0, 1.0, peer=80 / LINK_SHARE, network=8 / LINK_SHARE)


@pytest.mark.parametrize(
    ("strategy", "traffic", "ranks", "waiting"),
    [
        # 2/3 of 12 seconds in 4 micro-batches hide 2 seconds.
        ("ddp", 160, 4, 0.0),
        ("ddp", 800, 4, 8.0),
        ("ddp", 80, 16, 8.0),
        ("fsdp", 800, 4, 0.0),
        ("fsdp", 1600, 4, 8.0),
        ("single", 80, 4, 0.0),
    ],
)
def test_only_what_the_work_does_not_hide_is_waited_for(
    strategy: ParallelStrategy, traffic: float, ranks: int, waiting: float
) -> None:
    found = count_waiting(12.0, traffic, strategy, ranks, 4, RATES)
    assert found == pytest.approx(waiting)


def test_hsdp_sends_gradients_between_hosts_once_a_step() -> None:
    step = make_step()
    between = count_between_hosts(step, 2)
    assert between == 2 * 1 / 2 * 4 * NUMBERS
    assert count_between_hosts(step, 1) == 0
    # 800 bytes take 10 s in the host, and 80 bytes 10 s between two; 12 s of work hide the rest.
    assert count_waiting(12.0, 800, "hsdp", 4, 4, RATES, 80) == pytest.approx(8.0)


def test_links_are_those_of_the_data_sheets() -> None:
    rates = {name: (kind.peer, kind.network) for name, kind in DEVICE_KINDS.items()}
    assert rates["h100"] == (450e9, 8 * 50e9)
    assert rates["a100-80gb"] == rates["a100-40gb"] == (300e9, 8 * 25e9)
    assert rates["l40s"] == (25e9, 12.5e9)


def test_a_ring_uses_all_adapters_of_a_host() -> None:
    h100 = DEVICE_KINDS["h100"]
    assert (h100.find_ring_rate(8), h100.find_ring_rate(9)) == (450e9, 400e9)
    l40s = DEVICE_KINDS["l40s"]
    assert (l40s.find_ring_rate(8), l40s.find_ring_rate(16)) == (25e9, 12.5e9)


def test_a_look_ahead_has_three_more_gradients() -> None:
    step = make_step()
    ahead = replace(step, looks_ahead=True).estimate()
    assert ahead.gradients == 4 * step.estimate().gradients
    assert replace(ahead, gradients=step.estimate().gradients) == step.estimate()
