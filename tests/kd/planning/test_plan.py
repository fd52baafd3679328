"""Plans of a training: what fits, what is best, and what lowers the memory of what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from kd.config.jobfile import parse_config
from kd.config.train import Strategy, TrainConfig
from kd.errors import ConfigError
from kd.memory.devices import CUDA_CONTEXT, DEVICE_KINDS
from kd.memory.parallel import HEADROOM
from kd.memory.phases import Place, forecast_phases, measure_training
from kd.memory.training_phase import TrainingPhase
from kd.parallel.limits import list_unsharded_fields
from kd.planning.by_files import plan_by_files
from kd.planning.candidates import list_candidates, list_micro_batches
from kd.planning.devices import DeviceGroup, DeviceName
from kd.planning.here import plan_training
from kd.planning.plan import make_plan
from kd.planning.texts import TextFiles
from tests.support.kd.students import make_llama

GPU = Place.named(replace(DEVICE_KINDS["a100-40gb"], name="small", memory=1 << 30))
HERE = Place(replace(GPU.rates, memory=1 << 30), False, 1000, "fp32", is_timed=False)


def make_training(width: int = 64, layers: int = 4, **changes: Any) -> TrainingPhase:
    options = TrainConfig(max_steps=10, batch_size=8, gradient_accumulation_steps=2)
    sizes = {"vocabulary": 50, "length": 48, "targets": 47.0, "steps": 10}
    rest = {"evaluations": 2, "held_out": 8, "loader": 100}
    student = make_llama(width=width, layers=layers)
    return measure_training(student, options.model_copy(update=changes), **sizes, **rest)


def shrink(devices: DeviceGroup, memory: int) -> DeviceGroup:
    rates = replace(devices.place.rates, memory=memory)
    return replace(devices, place=replace(devices.place, rates=rates))


# ---------------------------------------------------------------------- devices


def test_devices_are_a_number_and_a_kind() -> None:
    assert DeviceName.parse("8xH100") == DeviceName("h100", 8)
    assert DeviceName.parse("a100-80gb") == DeviceName("a100-80gb", 1)
    assert DeviceName.parse(" 2 x cpu ") == DeviceName("cpu", 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("8xh1000", "the kind 'h1000', which is not known"),
        ("0xh100", "0 devices, but a plan has 1 to"),
        ("0", "has not the form"),
        ("", "has not the form"),
        ("99999xh100", "99999 devices"),
        ("-1xh100", "has not the form"),
    ],
)
def test_devices_that_do_not_exist_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DeviceName.parse(text)


# ---------------------------------------------------------------------- candidates


def test_the_job_as_written_needs_what_kd_estimate_tells() -> None:
    """One device, the job's own settings: the two commands count alike."""
    training = make_training()
    for place in (GPU, HERE):
        found = list_candidates(training, DeviceGroup(place, 1))
        written = next(
            each for each in found
            if each.batch_size == 8 and each.gradient_checkpointing == "none"
            and each.precision == place.choose_precision("auto")
        )  # fmt: skip
        phase = forecast_phases(place, None, training).phases[0]
        assert written.memory_bytes == phase.memory_bytes
        assert written.seconds == pytest.approx(phase.seconds, abs=0.001)
    assert GPU.process == CUDA_CONTEXT


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_sequences_of_a_step_stay_as_the_job_says(count: int) -> None:
    found = list_candidates(make_training(), DeviceGroup(GPU, count))
    assert found
    for each in found:
        assert each.batch_size * each.gradient_accumulation_steps == 16
        assert each.gradient_accumulation_steps % count == 0
    expected = {"single"} if count == 1 else {"ddp", "fsdp"}
    assert {each.strategy for each in found} == expected


def test_every_candidate_is_a_job_that_is_accepted() -> None:
    """A strategy is proposed only with settings that train.strategy allows."""
    for changes in ({}, {"optim": "muon"}, {"optim": "adamw_8bit"}, {"auto_batch": True}):
        training = make_training(**changes)
        for each in list_candidates(training, DeviceGroup(GPU, 2)):
            options = training.options.model_copy(update=each.settings)
            assert each.strategy in get_args(Strategy)
            if each.strategy == "fsdp":
                assert list_unsharded_fields(options) == []


def test_what_fits_comes_first_and_the_fastest_of_it_is_the_best() -> None:
    training = make_training()
    devices = DeviceGroup(GPU, 2)
    sizes = sorted(each.memory_bytes for each in list_candidates(training, devices))
    memory = round(sizes[len(sizes) // 2] / (1 - HEADROOM)) + 1
    found = list_candidates(training, shrink(devices, memory))
    fits = [each.fits for each in found]
    assert fits == sorted(fits, reverse=True) and 0 < sum(fits) < len(fits)
    fitting = [each for each in found if each.fits]
    assert all(each.memory_bytes <= (1 - HEADROOM) * memory for each in fitting)
    # Times within 2 % count as equal.
    assert fitting[0].time.total <= 1.02 * min(each.time.total for each in fitting)
    plan = make_plan(training, shrink(devices, memory))
    assert plan.shortfall is None and plan.candidates[0].memory == fitting[0].memory
    assert "fastest" in plan.candidates[0].why
    assert all("times the time" in each.why for each in plan.candidates[1:])


def test_memory_by_part_is_all_that_a_rank_needs() -> None:
    for place in (GPU, HERE):
        for each in list_candidates(make_training(), DeviceGroup(place, 2)):
            beside = each.process + (0 if place.is_gpu else each.loader)
            assert each.memory_bytes == each.memory.total + beside


def test_the_cost_is_that_of_all_devices() -> None:
    one, two = (
        next(each for each in list_candidates(make_training(), DeviceGroup(GPU, count), 3600.0)
             if each.strategy in ("single", "ddp") and each.gradient_checkpointing == "none"
             and each.precision == "bf16" and each.batch_size == 8)
        for count in (1, 2)
    )  # fmt: skip
    assert one.cost == pytest.approx(one.seconds)
    assert two.cost == pytest.approx(2 * two.seconds)


def test_of_many_micro_batches_some_are_tried_and_the_job_s_own() -> None:
    options = TrainConfig(max_steps=1, batch_size=48, gradient_accumulation_steps=5040)
    found = list_micro_batches(options, 1)
    assert 16 <= len(found) <= 17 and 48 in found and found[-1] == 1
    assert all(48 * 5040 % batch == 0 for batch in found)


def test_adapters_on_a_base_in_bfloat16_keep_their_precision() -> None:
    training = make_training()
    half = replace(
        training.student,
        layers=tuple(
            replace(each, trained=(), frozen=each.numbers, frozen_bytes=2 * each.numbers)
            for each in training.student.layers
        ),
    )
    found = list_candidates(replace(training, student=half), DeviceGroup(GPU, 1))
    assert {each.precision for each in found} == {"bf16"}


# ---------------------------------------------------------------------- what does not fit


def test_where_nothing_fits_the_levers_are_told_by_what_they_save() -> None:
    training = make_training(width=256)
    devices = shrink(DeviceGroup(GPU, 1), CUDA_CONTEXT)
    plan = make_plan(training, devices)
    shortfall = plan.shortfall
    assert shortfall is not None and plan.candidates == ()
    least = shortfall.least.memory_bytes
    assert shortfall.missing_bytes == least - int((1 - HEADROOM) * CUDA_CONTEXT) > 0
    levers = {each.setting: each for each in shortfall.levers}
    assert levers.keys() >= {
        "student.lora {rank: 16}", "train.optim adamw_8bit", "train.precision bf16_pure",
        "a student of 2 layers in place of 4", "data.sequence_length 24",
        "train.activation_offload true",
    }  # fmt: skip
    for lever in shortfall.levers:
        assert lever.saved_bytes == least - lever.memory_bytes > 0
    sizes = [each.memory_bytes for each in shortfall.levers]
    assert sizes == sorted(sizes)
    # Two layers less of AdamW in float32: 16 bytes a number.
    numbers = training.student.layers[0].numbers
    half = levers["a student of 2 layers in place of 4"]
    assert half.saved_bytes > 2 * 16 * numbers * 0.9


def test_more_devices_are_a_lever_where_they_are_enough() -> None:
    training = make_training(width=256)
    least = {
        count: min(each.memory_bytes for each in list_candidates(training, DeviceGroup(GPU, count)))
        for count in (2, 4, 8)
    }
    assert least[4] < least[2]
    enough = round(least[4] / (1 - HEADROOM)) + 1
    plan = make_plan(training, shrink(DeviceGroup(GPU, 2), enough))
    assert plan.shortfall is not None
    more = [each for each in plan.shortfall.levers if each.setting.startswith("--devices")]
    assert [each.setting for each in more] == ["--devices 4xsmall"] and more[0].fits


def test_levers_that_are_pulled_already_are_left_out() -> None:
    pulled = {"optim": "adamw_8bit", "precision": "bf16_pure", "activation_offload": True}
    plan = make_plan(make_training(**pulled), shrink(DeviceGroup(GPU, 1), CUDA_CONTEXT))
    assert plan.shortfall is not None
    settings = {each.setting for each in plan.shortfall.levers}
    assert not {each for each in settings if each.startswith("train.")}


def test_a_step_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="a step of 16 sequences cannot be split evenly over 5"):
        make_plan(make_training(), DeviceGroup(GPU, 5))


# ---------------------------------------------------------------------- jobs


def make_job(teacher: Path, text: Path, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "distill",
        "teacher": {"model": str(teacher)},
        "student": {"init": {"layers": 2, "hidden_size": 32}},
        "data": {"train": str(text), "sequence_length": 64},
        "train": {"epochs": 3, "batch_size": 8},
    } | changes


def test_a_job_is_planned_by_its_files_as_it_is_by_its_student(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    config = parse_config(make_job(tiny_teacher, tiny_text))
    measured = plan_training(config, Path("/"), tmp_path, DeviceName("a100-40gb", 2))
    files = TextFiles.of(config, Path("/"), tmp_path)
    told = plan_by_files(config, files, DeviceGroup.of_kind(DeviceName("a100-40gb", 2)))
    assert told is not None
    assert (told.budget, told.steps) == (measured.budget, measured.steps)
    assert [each.settings for each in told.candidates[:1]] == [
        each.settings for each in measured.candidates[:1]
    ]
    ours, theirs = told.candidates[0].memory, measured.candidates[0].memory
    assert (ours.gradients, ours.optimizer) == (theirs.gradients, theirs.optimizer)
    assert ours.total == pytest.approx(theirs.total, rel=0.1)


def test_a_job_that_trains_nothing_or_whose_steps_are_unknown_is_refused(
    tiny_teacher: Path, tiny_text: Path, tmp_path: Path
) -> None:
    alone = {"kind": "precompute", "student": None, "train": None}
    config = parse_config(make_job(tiny_teacher, tiny_text, **alone))
    with pytest.raises(ConfigError, match="kind precompute trains no student"):
        plan_training(config, Path("/"), tmp_path)
    files = TextFiles.of(config, Path("/"), tmp_path)
    group = DeviceGroup(GPU, 1)
    assert plan_by_files(config, files, group) is None
    missing = parse_config(make_job(tiny_teacher, tmp_path / "nowhere.txt"))
    with pytest.raises(ConfigError, match=r"train\.epochs: the steps of an epoch are not known"):
        plan_training(missing, Path("/"), tmp_path, DeviceName("t4", 1))
    assert plan_by_files(missing, TextFiles.of(missing, Path("/"), tmp_path), group) is None
