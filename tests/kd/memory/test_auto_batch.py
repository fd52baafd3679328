"""Memory that really runs out: the error has remedies, and auto_batch finds what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kd.config.train import TrainConfig
from kd.errors import TrainingError, is_out_of_memory
from kd.memory.auto_batch import (
    find_fitting_micro_batch,
    make_out_of_memory,
    memory_errors,
    reduce_micro_batch,
    rehearse_step,
)
from kd.memory.step_bytes import resize_micro_batch
from tests.support.kd.memory_script import run_memory_script

CPU = torch.device("cpu")


def make_options(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"max_steps": 1, "batch_size": 8, **changes})


# ---------------------------------------------------------------------- out of memory, or not


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_errors_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_torch_s_own_error_of_a_cpu_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        ValueError("out of memory"),
        OSError(28, "No space left on device"),
    ],
)
def test_other_errors_are_none_and_pass_unchanged(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, memory_errors(make_options()):
        raise error
    assert caught.value is error


# ---------------------------------------------------------------------- the answer


def test_the_answer_names_the_levers_and_their_values() -> None:
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    with (
        pytest.raises(TrainingError) as caught,
        memory_errors(make_options(), "Most of it is activations."),
    ):
        raise cause
    assert caught.value.__cause__ is cause
    assert "8 sequences" in str(caught.value)
    assert "Tried to allocate 2.00 GiB" in str(caught.value)
    assert "Most of it is activations." in str(caught.value)
    for lever in (
        "train.batch_size 4 with train.gradient_accumulation_steps 2",
        "train.auto_batch true",
        "train.gradient_checkpointing full or sqrt",
        "train.logits_chunk",
        "train.optim adamw_8bit, adafactor or lion",
        "data.sequence_length",
    ):
        assert lever in caught.value.remedy, lever


def test_the_answer_leaves_out_what_is_done_already() -> None:
    options = make_options(
        batch_size=1,
        auto_batch=True,
        gradient_checkpointing="full",
        logits_chunk=1,
        optim="adafactor",
    )
    remedy = make_out_of_memory(MemoryError(), options).remedy
    for lever in (
        "train.batch_size",
        "train.auto_batch",
        "gradient_checkpointing",
        "logits_chunk",
        "train.optim",
    ):
        assert lever not in remedy, lever
    assert "data.sequence_length" in remedy


# ---------------------------------------------------------------------- smaller micro-batches


@pytest.mark.parametrize(
    ("batch", "accumulation", "parts"),
    [
        (8, 1, [(4, 2), (2, 4), (1, 8)]),
        (12, 2, [(6, 4), (3, 8), (1, 24)]),
        (9, 1, [(3, 3), (1, 9)]),
        (7, 3, [(1, 21)]),
        (1, 5, []),
    ],
)
def test_smaller_keeps_the_sequences_of_a_step(
    batch: int, accumulation: int, parts: list[tuple[int, int]]
) -> None:
    options: TrainConfig | None = make_options(
        batch_size=batch, gradient_accumulation_steps=accumulation
    )
    found = []
    while options is not None and (options := reduce_micro_batch(options)) is not None:
        found.append((options.batch_size, options.gradient_accumulation_steps))
    assert found == parts
    assert all(one * other == batch * accumulation for one, other in found)


def test_resized_goes_back_to_a_size_that_was_found() -> None:
    options = resize_micro_batch(
        make_options(batch_size=8, gradient_accumulation_steps=3, learning_rate=0.5), 2
    )
    assert (options.batch_size, options.gradient_accumulation_steps, options.learning_rate) == (
        2,
        12,
        0.5,
    )
    with pytest.raises(ValueError, match="5 sequences"):
        resize_micro_batch(options, 5)


def test_fitting_tries_until_it_fits() -> None:
    tried = []

    def attempt(options: TrainConfig) -> None:
        tried.append(options.batch_size)
        if options.batch_size > 2:
            raise torch.OutOfMemoryError("too much")

    found = find_fitting_micro_batch(make_options(), attempt)
    assert tried == [8, 4, 2]
    assert (found.batch_size, found.gradient_accumulation_steps) == (2, 4)


def test_fitting_holds_no_tensor_of_an_attempt_that_failed() -> None:
    """A traceback would keep the tensors of the failed pass, and the next attempt would fail."""
    alive: list[int] = []
    count = 0

    class Held:
        def __init__(self) -> None:
            nonlocal count
            count += 1

        def __del__(self) -> None:
            nonlocal count
            count -= 1

    def attempt(options: TrainConfig) -> None:
        alive.append(count)
        held = Held()
        if options.batch_size > 2:
            raise MemoryError(f"{held is not None}")

    find_fitting_micro_batch(make_options(), attempt)
    assert alive == [0, 0, 0]


def test_fitting_ends_where_one_sequence_does_not_fit() -> None:
    def attempt(options: TrainConfig) -> None:
        raise torch.OutOfMemoryError("far too much")

    with pytest.raises(TrainingError, match="1 sequences a forward pass: far too much") as caught:
        find_fitting_micro_batch(make_options(auto_batch=True), attempt)
    assert "gradient_checkpointing" in caught.value.remedy


def test_fitting_does_not_hide_other_errors() -> None:
    def attempt(options: TrainConfig) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        find_fitting_micro_batch(make_options(), attempt)


# ---------------------------------------------------------------------- the rehearsal


def test_a_rehearsal_runs_two_passes_and_leaves_nothing() -> None:
    layer = nn.Linear(3, 3).eval()
    other = nn.Linear(3, 1)
    random = torch.get_rng_state()
    seen = []

    def loss() -> Tensor:
        seen.append((layer.weight.grad is not None, layer.training))
        return other(nn.functional.dropout(layer(torch.rand(2, 3)))).sum()

    rehearse_step(loss, [layer, other], 1000, CPU)
    assert seen == [(False, True), (True, True)], "the second finds the gradients of the first"
    assert not layer.training
    assert other.training
    assert all(
        parameter.grad is None for module in (layer, other) for parameter in module.parameters()
    )
    assert torch.equal(torch.get_rng_state(), random)


def test_a_rehearsal_that_fails_leaves_nothing_either() -> None:
    layer = nn.Linear(3, 3)
    random = torch.get_rng_state()

    def loss() -> Tensor:
        if layer.weight.grad is not None:
            raise MemoryError
        return layer(torch.rand(2, 3)).sum()

    with pytest.raises(MemoryError):
        rehearse_step(loss, [layer], 0, CPU)
    assert layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_rehearsal_reserves_the_optimiser_s_state() -> None:
    with pytest.raises(RuntimeError) as caught:
        rehearse_step(lambda: pytest.fail("must not be reached"), [], 2**60, CPU)
    assert is_out_of_memory(caught.value)


# ---------------------------------------------------------------------- in a process with a limit

#: Bytes that a child may still take. One sequence fits into them, and 16 do not.
LEFT = 100 * 2**20

CHILD = """
import json, resource, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kd.config.train import TrainConfig
from kd.errors import TrainingError, is_out_of_memory
from kd.memory.auto_batch import (
    find_fitting_micro_batch, memory_errors, rehearse_step,
)
from kd.memory.step_bytes import resize_micro_batch
from kd.memory.step_memory import estimate_optimizer_bytes, measure_free_memory
from kd.models.layers import compute_hidden_states

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_dropout": 0.1,
}
tokens_BL = torch.arange(16 * 512).remainder(128).reshape(16, 512)

def train(options):
    torch.manual_seed(0)
    student = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)

    def compute_loss(rows_BL):
        return compute_hidden_states(student, rows_BL).square().mean()

    def attempt(tried):
        reserve = estimate_optimizer_bytes(student, tried)
        rows_BL = tokens_BL[: tried.batch_size]
        rehearse_step(lambda: compute_loss(rows_BL), [student], reserve, CPU)

    if options.auto_batch:
        options = find_fitting_micro_batch(options, attempt)
    for _ in range(2):
        with memory_errors(options):
            optimizer.zero_grad(set_to_none=True)
            for rows_BL in tokens_BL.split(options.batch_size):
                (compute_loss(rows_BL) / options.gradient_accumulation_steps).backward()
            optimizer.step()
    sums = [float(each.detach().double().square().sum()) for each in student.parameters()]
    return options.batch_size, sums

def limit_memory(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    return measure_free_memory(CPU)

options = TrainConfig(max_steps=1, batch_size=16)
found = {}
train(resize_micro_batch(options, 1))  # what the libraries need once
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
found["free"] = limit_memory(used + int(sys.argv[1]))
try:
    train(options)
except TrainingError as error:
    found["error"] = str(error)
    found["remedy"] = error.remedy
size, found["auto"] = train(options.model_copy(update={"auto_batch": True}))
limit_memory(resource.RLIM_INFINITY)
found["size"], found["plain"] = train(resize_micro_batch(options, size))
found["other"] = train(resize_micro_batch(options, 1))[1]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def child() -> dict[str, Any]:
    return run_memory_script(CHILD, str(LEFT))


@pytest.mark.long
def test_memory_that_runs_out_is_answered_by_the_levers(child: dict[str, Any]) -> None:
    assert "Memory ran out with 16 sequences a forward pass" in child["error"]
    assert "can't allocate memory" in child["error"], "the message is the allocator's"
    assert "train.batch_size 8 with train.gradient_accumulation_steps 2" in child["remedy"]
    assert "train.auto_batch true" in child["remedy"]


@pytest.mark.long
def test_auto_batch_trains_as_plain_accumulation_at_the_size_it_found(
    child: dict[str, Any],
) -> None:
    assert 1 < child["size"] < 16, child
    assert child["auto"] == child["plain"], "bit for bit"
    assert child["auto"] != child["other"], "the comparison can fail"


LATER = """
import json, resource, sys
from pathlib import Path
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kd.text.batches import PlainText
from kd.text.corpus import Corpus
from kd.text.packing import Document, pack_documents
from kd.errors import OutOfMemory
from kd.config.jobfile import parse_config
from kd.progress import Monitor
from kd.training.loop import train

SHAPE = {
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
rng = np.random.default_rng(0)
warnings = []
texts = [[Document(rng.integers(0, 128, 512 * count).astype(np.uint32))] for count in (16, 1)]

def run(name, listen=lambda event: None, **options):
    config = parse_config({
        "kind": "train",
        "student": {"init": {"layers": 2, "hidden_size": 64, "tokenizer": "."}},
        "data": {"train": "unused.txt", "sequence_length": 512},
        "loss": {"alpha": 1.0},
        "train": {"max_steps": 3, "batch_size": 16, "eval_steps": 4, "save_steps": 4} | options,
    })
    torch.manual_seed(0)
    student = LlamaForCausalLM(LlamaConfig(**SHAPE))
    source = PlainText(Corpus(*(pack_documents(text, config.data) for text in texts)))
    folder = Path(sys.argv[1]) / name
    progress = train(config, source, student, 128, folder, Monitor(listen))
    return progress, [float(each.detach().double().sum()) for each in student.parameters()]

def take_memory(event):
    if event.type == "progress" and event.data["done"] == 1:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 60 * 2**20, resource.RLIM_INFINITY))
    if event.type == "warning":
        warnings.append(event.data["message"])

progress, auto = run("auto", take_memory, auto_batch=True)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
_, plain = run("plain")
found = {
    "size": progress.batch_size,
    "step": progress.step,
    "tokens": progress.tokens,
    "warnings": warnings,
}
ways = {"fixed": {}, "by length": {"auto_batch": True, "order": "length"}}
for name, options in ways.items():
    try:
        run(name, take_memory, **options)
    except OutOfMemory as error:
        found[name] = str(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps(found | {"auto": auto, "plain": plain}))
"""


@pytest.mark.long
def test_memory_that_is_taken_later_is_answered_by_smaller_micro_batches(tmp_path: Path) -> None:
    found = run_memory_script(LATER, str(tmp_path))
    assert found["size"] in (1, 2, 4, 8), found
    assert found["step"] == 3
    assert found["tokens"] == 3 * 16 * 511
    assert "Memory ran out at step 2 with batch_size 16: 8 is used." in found["warnings"]
    assert found["auto"] == pytest.approx(found["plain"], rel=1e-6, abs=1e-6)
    for name in ("fixed", "by length"):
        assert "Memory ran out with 16 sequences a forward pass" in found[name]


@pytest.mark.long
def test_the_limit_of_the_process_is_what_is_free(child: dict[str, Any]) -> None:
    assert child["free"] == pytest.approx(LEFT, rel=0.02)
