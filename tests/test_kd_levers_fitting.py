"""Memory that really runs out: the answer names the levers, and auto_batch finds the micro-batch that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kd.config.train import TrainConfig
from kd.errors import TrainingError
from kd.levers.fitting import fitting, is_out_of_memory, memory_errors, out_of_memory, rehearse, resized, smaller

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def make_options(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"max_steps": 1, "batch_size": 8, **changes})


# ---------------------------------------------------------------------- what counts as out of memory


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
    with pytest.raises(TrainingError) as caught, memory_errors(make_options(), "Most of it is activations."):
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
        "train.optim",
        "data.sequence_length",
    ):
        assert lever in caught.value.remedy, lever


def test_the_answer_leaves_out_what_is_done_already() -> None:
    options = make_options(
        batch_size=1, auto_batch=True, gradient_checkpointing="full", logits_chunk=1, optim="adafactor"
    )
    remedy = out_of_memory(MemoryError(), options).remedy
    for lever in ("train.batch_size", "train.auto_batch", "gradient_checkpointing", "logits_chunk", "train.optim"):
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
def test_smaller_keeps_the_sequences_of_a_step(batch: int, accumulation: int, parts: list[tuple[int, int]]) -> None:
    options: TrainConfig | None = make_options(batch_size=batch, gradient_accumulation_steps=accumulation)
    found = []
    while options is not None and (options := smaller(options)) is not None:
        found.append((options.batch_size, options.gradient_accumulation_steps))
    assert found == parts
    assert all(one * other == batch * accumulation for one, other in found)


def test_resized_goes_back_to_a_size_that_was_found() -> None:
    options = resized(make_options(batch_size=8, gradient_accumulation_steps=3, learning_rate=0.5), 2)
    assert (options.batch_size, options.gradient_accumulation_steps, options.learning_rate) == (2, 12, 0.5)
    with pytest.raises(ValueError, match="5 sequences"):
        resized(options, 5)


def test_fitting_tries_until_it_fits() -> None:
    tried = []

    def attempt(options: TrainConfig) -> None:
        tried.append(options.batch_size)
        if options.batch_size > 2:
            raise torch.OutOfMemoryError("too much")

    found = fitting(make_options(), attempt)
    assert tried == [8, 4, 2]
    assert (found.batch_size, found.gradient_accumulation_steps) == (2, 4)


def test_fitting_holds_no_tensor_of_an_attempt_that_failed() -> None:
    """A traceback holds the frames of the pass that failed; with them alive the next attempt would fail too."""
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

    fitting(make_options(), attempt)
    assert alive == [0, 0, 0]


def test_fitting_ends_where_one_sequence_does_not_fit() -> None:
    def attempt(options: TrainConfig) -> None:
        raise torch.OutOfMemoryError("far too much")

    with pytest.raises(TrainingError, match="1 sequences a forward pass: far too much") as caught:
        fitting(make_options(auto_batch=True), attempt)
    assert "gradient_checkpointing" in caught.value.remedy


def test_fitting_does_not_hide_other_errors() -> None:
    def attempt(options: TrainConfig) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        fitting(make_options(), attempt)


# ---------------------------------------------------------------------- the rehearsal


def test_a_rehearsal_runs_two_passes_and_leaves_nothing() -> None:
    layer, other = nn.Linear(3, 3).eval(), nn.Linear(3, 1)
    random, seen = torch.get_rng_state(), []

    def loss() -> Tensor:
        seen.append((layer.weight.grad is not None, layer.training))
        return other(nn.functional.dropout(layer(torch.rand(2, 3)))).sum()

    rehearse(loss, [layer, other], 1000, CPU)
    assert seen == [(False, True), (True, True)], "the second finds the gradients of the first"
    assert not layer.training
    assert other.training
    assert all(parameter.grad is None for module in (layer, other) for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_rehearsal_that_fails_leaves_nothing_either() -> None:
    layer, random = nn.Linear(3, 3), torch.get_rng_state()

    def loss() -> Tensor:
        if layer.weight.grad is not None:
            raise MemoryError
        return layer(torch.rand(2, 3)).sum()

    with pytest.raises(MemoryError):
        rehearse(loss, [layer], 0, CPU)
    assert layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_rehearsal_reserves_the_optimiser_s_state() -> None:
    with pytest.raises(RuntimeError) as caught:
        rehearse(lambda: pytest.fail("must not be reached"), [], 2**60, CPU)
    assert is_out_of_memory(caught.value)


# ---------------------------------------------------------------------- the real thing, in a process with a limit

CHILD = """
import json, resource
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kd.config.train import TrainConfig
from kd.errors import TrainingError
from kd.levers.fitting import fitting, memory_errors, rehearse, resized
from kd.levers.memory import free_memory, optimizer_bytes
from kd.models import hidden_states

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 2}
tokens = torch.arange(32 * 512).remainder(128).reshape(32, 512)

def train(options):
    torch.manual_seed(0)
    student = LlamaForCausalLM(LlamaConfig(vocab_size=128, attention_dropout=0.1, **SHAPE)).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)

    def loss(rows):
        return hidden_states(student, rows).square().mean()

    def rehearsal(tried):
        rehearse(lambda: loss(tokens[: tried.batch_size]), [student], optimizer_bytes(student, tried), CPU)

    if options.auto_batch:
        options = fitting(options, rehearsal)
    for _ in range(2):
        with memory_errors(options):
            optimizer.zero_grad(set_to_none=True)
            for rows in tokens.split(options.batch_size):
                (loss(rows) / options.gradient_accumulation_steps).backward()
            optimizer.step()
    return options.batch_size, [float(each.detach().double().square().sum()) for each in student.parameters()]

def limit(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    return free_memory(CPU)

options, found = TrainConfig(max_steps=1, batch_size=32), {}
train(resized(options, 1))  # what the libraries need once
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
found["free"] = limit(used + 200 * 2**20)
try:
    train(options)
except TrainingError as error:
    found["error"], found["remedy"] = str(error), error.remedy
size, found["auto"] = train(options.model_copy(update={"auto_batch": True}))
limit(resource.RLIM_INFINITY)
found["size"], found["plain"] = train(resized(options, size))
found["other"] = train(resized(options, 1))[1]
print(json.dumps(found))
"""


def run_child(script: str, *arguments: str) -> dict[str, Any]:
    """What ``script`` prints, in a process of its own."""
    if sys.platform != "linux":
        pytest.skip("RLIMIT_AS is kept on Linux")
    # glibc raises its threshold for mmap with every large block that is freed, and then keeps such blocks in a heap
    # with holes: how much fits below a limit would be a matter of luck.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def child() -> dict[str, Any]:
    return run_child(CHILD)


def test_memory_that_runs_out_is_answered_by_the_levers(child: dict[str, Any]) -> None:
    assert "Memory ran out with 32 sequences a forward pass" in child["error"]
    assert "can't allocate memory" in child["error"], "it is the allocator that said it"
    assert "train.batch_size 16 with train.gradient_accumulation_steps 2" in child["remedy"]
    assert "train.auto_batch true" in child["remedy"]


def test_auto_batch_trains_as_plain_accumulation_at_the_size_it_found(child: dict[str, Any]) -> None:
    assert 1 < child["size"] < 32, child
    assert child["auto"] == child["plain"], "bit for bit"
    assert child["auto"] != child["other"], "the comparison can fail"


LATER = """
import json, resource, sys
from pathlib import Path
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kd.batches import PlainText
from kd.data import Corpus, Document, pack
from kd.errors import OutOfMemory
from kd.jobfile import parse_config
from kd.progress import Monitor
from kd.train import train

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
rng, warnings = np.random.default_rng(0), []
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
    student = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=512, **SHAPE))
    source = PlainText(Corpus(*(pack(text, config.data) for text in texts)))
    progress = train(config, source, student, 128, Path(sys.argv[1]) / name, Monitor(listen))
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
found = {"size": progress.batch_size, "step": progress.step, "tokens": progress.tokens, "warnings": warnings}
for name, options in {"fixed": {}, "by length": {"auto_batch": True, "order": "length"}}.items():
    try:
        run(name, take_memory, **options)
    except OutOfMemory as error:
        found[name] = str(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps(found | {"auto": auto, "plain": plain}))
"""


def test_memory_that_is_taken_later_is_answered_by_smaller_micro_batches(tmp_path: Path) -> None:
    found = run_child(LATER, str(tmp_path))
    assert found["size"] in (1, 2, 4, 8) and (found["step"], found["tokens"]) == (3, 3 * 16 * 511), found
    assert "Memory ran out at step 2 with batch_size 16: 8 is used." in found["warnings"]
    assert found["auto"] == pytest.approx(found["plain"], rel=1e-6, abs=1e-6)
    for name in ("fixed", "by length"):
        assert "Memory ran out with 16 sequences a forward pass" in found[name]


def test_the_limit_of_the_process_is_what_is_free(child: dict[str, Any]) -> None:
    assert child["free"] == pytest.approx(200 * 2**20, rel=0.02)
