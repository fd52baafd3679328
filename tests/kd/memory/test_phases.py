"""Memory, time and cost of a job's phases, against counts that are made in another way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from kd.config.teacher import TeacherConfig
from kd.config.train import TrainConfig
from kd.memory.devices import CUDA_CONTEXT, DEVICE_KINDS, DeviceRates, find_device_kind
from kd.memory.model_memory import compute_rounded_share, count_teacher_bytes
from kd.memory.model_work import count_model_work, count_weight_bytes
from kd.memory.parallel import Split, estimate_rank
from kd.memory.phases import (
    CapturePhase,
    DeviceForecast,
    Strategy,
    forecast_phases,
    measure_training,
)
from kd.memory.rates import measure_rates
from kd.memory.training_phase import Place, TrainingPhase
from kd.memory.work import (
    ASSUMED_UTILIZATION,
    ModelWork,
    Pass,
    Work,
    compute_cost,
    count_head_gradient_bytes,
)
from kd.models.folder import ModelFolder
from kd.models.layers import compute_hidden_states
from kd.models.precision import Precision
from tests.support.kd.students import make_llama
from tests.support.kd.training import estimate_memory
from tests.support.kd.zoo import build

CPU = torch.device("cpu")
#: A device of round figures: 1 TFLOP/s in halves, a quarter of that in float32, 100 GB/s.
RATES = DeviceRates("round", 2**30, 1e12, 0.25e12, 0.5e12, 1e11)
HERE = Place(RATES, is_gpu=False, process=1000, auto="fp32", is_timed=True)
MODEL = ModelWork(products=1000, attention=64, head=800, vocabulary=50, stored=2000)


def make_training(student: LlamaForCausalLM | None = None, **changes: Any) -> TrainingPhase:
    options = TrainConfig(max_steps=10, batch_size=4).model_copy(update=changes)
    sizes = {"vocabulary": 50, "length": 48, "targets": 47.0, "steps": 10}
    rest = {"evaluations": 2, "held_out": 8, "loader": 100}
    return measure_training(student or make_student(), options, **sizes, **rest)


def make_student(width: int = 16) -> LlamaForCausalLM:
    return make_llama(width=width, layers=4)


def make_capture() -> CapturePhase:
    return CapturePhase(
        teacher=make_llama(layers=2), vocabulary=50, batch_size=2, length=48, sequences=10,
        targets=47.0, item_bytes=4, quantization=None, records=500, seconds=2.0,
    )  # fmt: skip


# ---------------------------------------------------------------------- work


def test_a_training_token_costs_six_flop_for_each_parameter() -> None:
    run = Pass(tokens=100, targets=90, context=0, micro_batches=1)
    reading = Work.of(MODEL, run, 4)
    assert reading.flops == 2 * (100 * 1000 + 90 * 800)
    training = Work.of(MODEL, replace(run, trains=True), 4)
    assert training.flops == 3 * reading.flops
    again = Work.of(MODEL, replace(run, trains=True, recomputed=1.0), 4)
    assert again.flops == training.flops + 2 * 100 * 1000
    adapters = Work.of(replace(MODEL, frozen=True), replace(run, trains=True), 4)
    assert adapters.flops == 2 * reading.flops


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_products_of_a_model_are_those_that_torch_counts(name: str) -> None:
    """A token of a mixture of experts meets those experts only that its router picks."""
    model = make_llama(layers=3) if name == "llama" else build(name)
    if name == "mixtral":
        # torch does not count the grouped products that are the default.
        model.set_experts_implementation("eager")
    tokens_BL = torch.arange(24).remainder(model.config.vocab_size)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        compute_hidden_states(model.eval(), tokens_BL)
    counted = sum(
        flops
        for operation, flops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operation)
    )
    found = 2 * count_model_work(model, 50).products
    assert found == pytest.approx(counted / 24, rel=0.05)


def test_a_phase_takes_the_longer_of_products_and_bytes() -> None:
    work = Work(flops=1e12, bytes=1e10)
    assert work.seconds(RATES, "bf16", True, 1.0) == 1.0
    assert work.seconds(RATES, "fp32", True, 0.5) == 4.0
    assert work.seconds(RATES, "fp32", False, 1.0) == 4.0
    assert Work(flops=0.0, bytes=1e12).seconds(RATES, "bf16", True, 1.0) == 10.0


def test_the_cost_is_that_of_the_hours() -> None:
    assert compute_cost(1800, 3.0) == 1.5
    assert compute_cost(1800, None) is None


def test_a_larger_chunk_moves_the_gradient_of_the_head_less_often() -> None:
    """One chunk writes it and scales it; each further one reads and writes it once more."""
    assert count_head_gradient_bytes(800, 1) == 4 * 800 * 3
    assert count_head_gradient_bytes(800, 16) == 4 * 800 * (3 + 2 * 15)
    run = Pass(tokens=100, targets=90, context=0, micro_batches=6, trains=True, chunks=5)
    found = Work.of(MODEL, run, 4)
    assert found.head_gradient == 6 * count_head_gradient_bytes(800, 5)
    fewer = Work.of(MODEL, replace(run, chunks=2), 4)
    assert found.bytes - fewer.bytes == found.head_gradient - fewer.head_gradient
    for other in (Work.of(MODEL, replace(run, trains=False), 4),
                  Work.of(replace(MODEL, frozen=True), run, 4)):  # fmt: skip
        assert other.head_gradient == 0


def test_what_chunks_add_is_told_of_the_training_alone() -> None:
    training = make_training(logits_chunk=47)
    phases = forecast_phases(HERE, make_capture(), training, seconds=5.0).phases
    assert [each.head_gradient_bytes > 0 for each in phases] == [False, True, False]
    # Four sequences of 47 targets make four chunks, in each of ten steps.
    expected = 10 * count_head_gradient_bytes(training.model.head, 4)
    assert phases[1].head_gradient_bytes == expected
    whole = training.change(logits_chunk=None)
    least = forecast_phases(HERE, None, whole, seconds=5.0).phases[0].head_gradient_bytes
    assert least == 10 * count_head_gradient_bytes(training.model.head, 1)


def test_a_gpu_whose_kernels_compute_the_loss_needs_one_number_for_a_logit() -> None:
    kind = find_device_kind("h100")
    assert kind is not None
    place = Place.named(kind)
    plain = make_training()
    kernels = replace(plain, suits_kernels=True)
    logits = plain.options.batch_size * 48 * 50
    difference = plain.estimate_step(place).head - kernels.estimate_step(place).head
    assert difference == (8 - 2) * logits
    assert plain.estimate_step(HERE) == kernels.estimate_step(HERE)


# ---------------------------------------------------------------------- devices


def test_a_gpu_is_found_by_the_name_that_torch_gives_it() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA L40S": "l40s", "NVIDIA L4": "l4",
        "NVIDIA GeForce RTX 4090": "rtx4090", "Tesla T4": "t4", "NVIDIA B200": "b200",
    }  # fmt: skip
    found = {name: find_device_kind(name) for name in names}
    assert {name: kind and kind.name for name, kind in found.items()} == names
    a100 = find_device_kind("NVIDIA A100-SXM4-80GB")
    assert a100 is not None and a100.half == 312e12
    assert find_device_kind("Radeon") is None


def test_the_rates_of_this_machine_are_measured() -> None:
    found = measure_rates(CPU)
    assert found.name.startswith("cpu, ") and found.memory > 2**28
    assert min(found.half, found.single, found.bandwidth) > 0


# ---------------------------------------------------------------------- weights


def test_rounded_layers_take_a_byte_a_number_and_a_scale_a_row() -> None:
    model = make_llama(layers=3, width=64)
    plain = count_weight_bytes(model, 4, None)
    assert plain == 4 * sum(each.numel() for each in model.parameters())
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    numbers = sum(each.weight.numel() for each in layers)
    rows = sum(each.out_features for each in layers)
    assert count_weight_bytes(model, 4, "int8") == plain - 3 * numbers + 4 * rows


def test_rows_in_int4_take_half_a_byte_a_number_and_four_bytes_a_group() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=1024, intermediate_size=2048, num_hidden_layers=1,
            num_attention_heads=8, num_key_value_heads=8,
        )
    )  # fmt: skip
    numbers = 4 * 1024**2 + 3 * 1024 * 2048
    saved = count_weight_bytes(model, 2, None) - count_weight_bytes(model, 2, "int4")
    assert saved == 2 * numbers - (numbers // 2 + 4 * numbers // 128)


def test_no_group_of_int4_divides_a_row_of_100_numbers_and_it_stays(tmp_path: Path) -> None:
    model = make_llama(width=100, intermediate_size=96)
    saved = count_weight_bytes(model, 2, None) - count_weight_bytes(model, 2, "int4")
    # A row of 96 numbers has tiles for 1,024 of them, and a group for each 32.
    assert saved == 2 * 100 * (2 * 96 - (1024 // 2 + 4 * 1024 // 32))
    model.save_pretrained(tmp_path)
    numbers = sum(each.numel() for each in model.parameters())
    share = compute_rounded_share(ModelFolder(tmp_path), "int4", 2)
    assert share == pytest.approx(1 - 0.75 * 2 * 96 * 100 / numbers)


def test_the_share_of_rounded_weights_is_known_by_the_shapes_in_the_files(tmp_path: Path) -> None:
    model = make_llama(layers=3, width=64)
    model.save_pretrained(tmp_path)
    numbers = sum(each.numel() for each in model.parameters())
    matrices = sum(each.numel() for each in model.model.layers.parameters() if each.ndim == 2)
    share = compute_rounded_share(ModelFolder(tmp_path), "int8", 4)
    assert share == pytest.approx(1 - 0.75 * matrices / numbers)
    rounded = TeacherConfig(model=str(tmp_path), quantization="int8")
    plain = TeacherConfig(model=str(tmp_path))
    told = [count_teacher_bytes(each, Path()) or 0 for each in (rounded, plain)]
    assert told[0] == pytest.approx(share * told[1], abs=1)


# ---------------------------------------------------------------------- phases


def test_a_teacher_that_is_spread_is_told_as_the_device_that_holds_most() -> None:
    """Of a teacher in two ranks; the untied LM head is whole on the first."""
    plain = make_capture()
    model = plain.teacher
    whole = 4 * sum(each.numel() for each in model.parameters())
    head = 4 * model.get_output_embeddings().weight.numel()
    layer = 4 * sum(each.numel() for each in model.model.layers[0].parameters())
    place = Place.named(DEVICE_KINDS["t4"])

    def weigh(**changes: Any) -> int:
        return replace(plain, **changes).estimate_memory(place).weights

    assert weigh() == whole
    assert weigh(parallel="tensor", ranks=2) == (whole - head) / 2 + head
    assert weigh(parallel="fsdp", ranks=2) == whole - 2 * layer / 2 + 2 * layer
    assert weigh(parallel="device_map", most_on_gpu=1000) == 1000
    assert weigh(parallel="device_map", most_on_host=1000) == whole


def test_the_device_at_hand_takes_the_seconds_that_were_timed() -> None:
    found = forecast_phases(HERE, make_capture(), make_training(), seconds=5.0, price=36.0)
    capture, training, evaluation = found.phases
    assert not found.expected
    assert (capture.phase, capture.seconds) == ("capture", 2.0)
    assert (training.phase, training.seconds, training.cost) == ("training", 5.0, 0.05)
    assert evaluation.utilization == training.utilization
    assert 0 < evaluation.flops < training.flops


def test_the_memory_of_a_training_is_the_step_s_and_what_lies_beside_it() -> None:
    training = make_training()
    phase = forecast_phases(HERE, None, training, seconds=5.0).phases[0]
    options = training.options
    step = estimate_memory(make_student(), options, 48, 50, Precision("cpu", torch.float32))
    assert phase.memory_bytes == step.total + 100 + 1000
    evaluation = forecast_phases(HERE, None, training, seconds=5.0).phases[1].memory
    assert (evaluation.gradients, evaluation.weights) == (0, phase.memory.weights)


def test_another_device_is_expected_by_its_figures() -> None:
    kind = DEVICE_KINDS["t4"]
    training = make_training()
    found = forecast_phases(Place.named(kind), make_capture(), training, 5.0, price=1.0)
    assert found.expected and found.device == "t4"
    assert {each.utilization for each in found.phases} == {ASSUMED_UTILIZATION}
    # A GPU does not hold the loader's records, and its CUDA context is counted.
    phase = found.phases[1]
    memory = phase.memory
    parts = memory.weights + memory.gradients + memory.optimizer + memory.activations + memory.head
    assert phase.memory_bytes == parts + CUDA_CONTEXT
    assert all(each.fits for each in found.phases)
    # float16 is the default there, and a T4 has no bfloat16.
    assert Place.named(kind).choose_precision("auto") == "fp16"
    assert Place.named(DEVICE_KINDS["l4"]).choose_precision("auto") == "bf16"


def read(found: DeviceForecast) -> dict[str, Strategy]:
    return {each.setting: each for each in found.strategies}


def test_a_job_for_several_devices_is_told_what_each_of_them_needs() -> None:
    training = make_training(gradient_accumulation_steps=4)
    place = Place.named(DEVICE_KINDS["t4"])
    found = read(forecast_phases(place, None, training, ranks=4))
    ddp = found["train.strategy ddp, each of 4 devices (auto)"]
    fsdp = found["train.strategy fsdp, each of 4 devices"]
    step = training.take_rank(Split("fsdp", 4)).describe_step(place, Split("fsdp", 4))
    rank = estimate_rank(step, Split("fsdp", 4))
    assert fsdp.memory_bytes == rank.total + CUDA_CONTEXT < ddp.memory_bytes
    assert ddp.seconds < found["as written"].seconds
    alone = read(forecast_phases(place, None, training))
    assert not any(name.startswith("train.strategy") for name in alone)
    # Processes of a host share its memory.
    (here, *_) = (
        each
        for name, each in read(forecast_phases(HERE, None, training, 5.0, ranks=4)).items()
        if "train.strategy" in name
    )
    assert here.fits == (4 * here.memory_bytes <= HERE.rates.memory)


def test_each_strategy_moves_one_lever() -> None:
    training = make_training(logits_chunk=300)
    found = read(forecast_phases(HERE, None, training, seconds=5.0))
    written = found.pop("as written")
    assert written.seconds == 5.0
    full = found["train.gradient_checkpointing full"]
    assert full.memory_bytes < written.memory_bytes and full.seconds > written.seconds
    single = found["train.batch_size 1, train.gradient_accumulation_steps 4"]
    assert single.memory_bytes < written.memory_bytes
    assert found["train.precision bf16"].seconds < written.seconds
    assert found.keys() >= {"train.gradient_checkpointing sqrt", "train.logits_chunk 256"}


def test_a_lever_that_is_pulled_already_is_left_out() -> None:
    training = make_training(gradient_checkpointing="full", batch_size=1, logits_chunk=8)
    found = read(forecast_phases(HERE, None, training, seconds=5.0))
    assert found.keys() == {
        "as written", "train.precision bf16", "train.precision bf16_pure", "train.precision fp32",
        "train.gradient_checkpointing sqrt", "train.optim adamw_8bit",
    }  # fmt: skip
    pulled = {"activation_offload": True, "optim": "adamw_8bit", "precision": "bf16_pure"}
    there = forecast_phases(Place.named(DEVICE_KINDS["t4"]), None, make_training(**pulled), 5.0)
    assert not read(there).keys() & {
        "train.activation_offload true", "train.optim adamw_8bit", "train.precision bf16_pure",
    }  # fmt: skip


def test_levers_that_a_job_cannot_pull_are_left_out() -> None:
    """On a CPU nothing is offloaded, and other optimisers lose small steps in bfloat16."""
    here = read(forecast_phases(HERE, None, make_training(optim="lion"), seconds=5.0))
    assert not here.keys() & {"train.activation_offload true", "train.precision bf16_pure"}


def test_pure_bfloat16_and_small_states_need_less_memory() -> None:
    student = make_student(width=64)
    training = make_training(student)
    numbers = sum(each.numel() for each in student.parameters())
    found = read(forecast_phases(HERE, None, training, seconds=5.0))
    bytes_of = {name: each.memory_bytes for name, each in found.items()}
    half, pure = (
        training.change(precision=name).estimate_training_memory(HERE)
        for name in ("bf16", "bf16_pure")
    )
    assert half.weights - pure.weights == half.gradients - pure.gradients == 2 * numbers
    # No weight is cast, and hidden states between the layers are in bfloat16 too.
    assert half.activations - pure.activations > numbers
    less = bytes_of["train.precision bf16"] - bytes_of["train.precision bf16_pure"]
    assert less >= 4 * numbers + half.activations - pure.activations
    assert bytes_of["train.optim adamw_8bit"] < bytes_of["as written"] - 2 * numbers
    # The passes in bfloat16 leave the student as it was.
    assert {each.dtype for each in student.parameters()} == {torch.float32}


def test_offloaded_activations_take_the_time_of_two_copies() -> None:
    place = replace(Place.named(RATES), rates=replace(RATES, link=1e9))
    training = make_training(precision="fp32")
    offloading = training.change(activation_offload=True)
    plain, moved = (each.count_training(place) for each in (training, offloading))
    assert (plain.transferred, plain.flops, plain.bytes) == (0.0, moved.flops, moved.bytes)
    kept = training.saved["fp32"].at(4, 48).layers - training.saved["fp32"].layers[0]
    assert moved.transferred == pytest.approx(2 * 10 * kept)
    extra = moved.seconds(place.rates, "fp32", False, 0.5) - plain.seconds(
        place.rates, "fp32", False, 0.5
    )
    assert extra == pytest.approx(moved.transferred / 1e9 / 0.5)
    found = read(forecast_phases(place, None, training, 5.0))
    offloaded = found["train.activation_offload true"]
    assert offloaded.memory_bytes < found["as written"].memory_bytes
    assert offloaded.seconds > found["as written"].seconds


def test_what_does_not_fit_is_told() -> None:
    small = replace(HERE, rates=replace(RATES, memory=10_000))
    found = forecast_phases(small, None, make_training(), seconds=5.0)
    assert not found.phases[0].fits and not found.strategies[0].fits
