"""Measure what distillation costs beyond training without it: one table of ratios from one run.

    python bench/speed.py [--quick] [--teacher 16x2048] [--student 16x1024] [--batch 8] [--rounds 7]
                          [--out FILE]
    python bench/speed.py --tasks head --head 16384x2048x248320

task      the first variant, speed 1      compared with it
capture   the teacher's bare forward      reading its records, of profile threshold and of profile
                                          tempered; reading and sealing them on disk as a shard of
                                          one batch. This is the worst case: a job's shard holds 256
                                          sequences (the note below the table).
step      cross-entropy on all logits     the fused LM head: on hard labels alone, on the teacher's
                                          records
head      cross-entropy on all logits     the fused LM head without a model around it; torch's own
                                          chunked loss; on a GPU Liger's and cut cross-entropy if
                                          they are installed; records of profile tempered at T = 2
loader    the student's step on records   reading a cache in random order and making batches of it

The bare forward includes the teacher's LM head: it makes the logits of the whole batch. The records
are captured from a small random Llama, sealed, and read back from disk; decoding their columns is
part of the measured time.

Runs on the first GPU if there is one, else on the CPU. Models are random Llamas made here and named
by layers x width; nothing is downloaded. Needs torch, transformers, numpy, zarr, pydantic and
pyyaml.

The floor of a task is the time that its arithmetic and its necessary bytes take at the rates of
this machine. The rates are measured first, with one large matrix product and one large copy. N
positions, L positions of a sequence, H layers, D width, V vocabulary, P parameters outside
embedding and LM head:

    capture   N (2 P + 2 H L D + 2 D V) FLOP: body, causal attention, LM head. Nothing is added for
              the records: the logits must be read once more, but a chunk of them fits the CPU's
              cache.
    step      three times as many FLOP (for each product of the forward pass two in the backward
              pass), and 28 bytes for each parameter for AdamW in float32: four numbers read, three
              written.
    head      3 * 2 N D V FLOP: the logits, and the gradients of both their factors.
    loader    the bytes of the stored records, read, and of the batch made of them, written.

Materialised logits move at least 4 N V (forward) + 8 N V (backward) bytes more in float32. The
fused LM head does not move them, so it may be faster than the first variant; the floor does not
count them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from bench.support.small.caches import make_codec, make_identity
from bench.support.timing import (
    Machine,
    TimingRow,
    fresh_processes,
    interleave,
    measure_extra_memory,
    measure_machine,
    render_timings,
    time_run,
)
from cache.manifest import CacheIdentity, Provenance
from cache.records import Records, Sequences
from cache.store import Cache, open_cache
from cache.units.dither import DitherTables
from cache.writing.writer import CacheWriter, open_writer
from kd.capture.recording import LOGIT_ELEMENTS, Recorder, TailMeter
from kd.capture.teacher import Teacher
from kd.capture.units.fitting import fit_tables
from kd.config.cache import CacheConfig
from kd.config.train import TrainConfig
from kd.loss.decoder import TargetDecoder
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.models.lm_head import LMHead, find_lm_head
from kd.models.loading import hide_progress_bars
from kd.models.precision import Precision, compute_target_hidden_states, pick_device
from kd.optim.optimizers import make_optimizer
from kd.text.batches import Batch, make_batch
from kd.text.steps.order import list_step_indices

PRELOAD = ["transformers.models.llama.modeling_llama", "kd.capture.teacher", "kd.training.loop"]
THRESHOLD = 0.04
ALPHA = 0.1
TEMPERATURE = 2.0
HARD = "fused, hard labels alone"
RECORDS = f"fused, records, alpha {ALPHA}"
TEMPERED = f"fused, tempered records at T = {TEMPERATURE:g}, alpha {ALPHA}"
#: Batches in the cache of the task loader.
BATCHES = 16
#: Layers and width of the teacher whose records the tasks step, head and loader train on.
SMALL = (1, 64)
DEVICE = pick_device()

Runnable = Callable[[], Any]


@dataclass(frozen=True)
class BenchmarkSizes:
    """Sizes: models as (layers, width), the LM head alone as (positions, width, vocabulary)."""

    teacher: tuple[int, int] = (6, 512)
    student: tuple[int, int] = (4, 256)
    head: tuple[int, int, int] = (1024, 576, 49_152)
    vocabulary: int = 49_152
    length: int = 256
    batch: int = 4
    dtype: str = "float32"
    rounds: int = 7
    product: int = 2048

    @property
    def torch_dtype(self) -> torch.dtype:
        """The precision of the teacher and of the student's matrix products."""
        return getattr(torch, self.dtype)

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.length


SIZES = {
    "cpu": BenchmarkSizes(),
    "cuda": BenchmarkSizes(
        (16, 2048), (16, 1024), (8192, 2048, 151_936), 128_256, 1024, 8, "bfloat16", 20, 8192
    ),
}
QUICK = BenchmarkSizes((2, 64), (2, 64), (64, 32, 1000), 1000, 32, 2, rounds=2, product=256)


@dataclass(frozen=True)
class Variant:
    """One way to do a task, with the arithmetic and the bytes that every way needs."""

    run: Runnable
    flops: float
    moved: float = 0.0


@dataclass(frozen=True)
class Task:
    """Variants of a task for ``tokens`` tokens, the reference first; ``note`` adds other facts."""

    variants: dict[str, Variant]
    tokens: int
    note: Callable[[], str] | None = None


# ---------------------------------------------------------------------- the tasks


def make_capture_task(sizes: BenchmarkSizes, folder: Path) -> Task:
    model = make_frozen_llama(sizes, sizes.teacher)
    sequences = make_random_documents(sizes, sizes.batch)
    seeds = count()
    tokens_BL = make_batch(sequences, None).to(DEVICE).tokens_BL
    threshold, tempered = (
        make_teacher(model, make_cache_identity(sizes, sequences, profile), sequences)
        for profile in ("threshold", "tempered")
    )
    unmetered = replace(threshold, recorder=replace(threshold.recorder, meter=None))

    @torch.no_grad()
    def bare() -> None:
        model(input_ids=tokens_BL, use_cache=False)

    def read(teacher: Teacher) -> Records:
        return Records.concatenate(each.encode() for each in teacher.deliver(sequences, 0))

    def seal() -> None:
        with open_writer(
            folder, make_cache_identity(sizes, sequences, "threshold", seed=next(seeds))
        ) as writer:
            write_own_tables(writer, threshold)
            writer.write_shard(0, sequences, read(threshold), threshold.take_tail_sums())

    runs: dict[str, Runnable] = {
        "teacher's bare forward": bare,
        "records read": partial(read, threshold),
        "records read, without the mean tail": partial(read, unmetered),
        "records read and sealed": seal,
        "tempered records read": partial(read, tempered),
    }
    flops = count_forward_flops(sizes, model)

    def about() -> str:
        records = describe_records(read(threshold), tempered)
        softmaxes = partial(compute_softmaxes, sizes, 2 * tempered.recorder.knots)
        shares = measure_forward_shares(
            bare, partial(read, threshold), partial(read, tempered), softmaxes
        )
        return f"{records}; {measure_sealing(sizes, folder, bare)}{shares}"

    return Task({name: Variant(run, flops) for name, run in runs.items()}, sizes.tokens, about)


def describe_records(records: Records, tempered: Teacher) -> str:
    heads, tails = (records.length(axis) / len(records) for axis in ("head", "tail"))
    entries = (
        f"its records hold the next token, {heads:.1f} head and {tails:.1f} tail entries a token"
    )
    return f"{entries}; tempered ones {tempered.recorder.knots} nodes"


def measure_sealing(sizes: BenchmarkSizes, folder: Path, bare: Runnable) -> str:
    """Measure the sealing of a shard as large as a job's; its records come from a small teacher."""
    sequences = make_random_documents(sizes, CacheConfig().shard_sequences)
    teacher = make_teacher(
        make_frozen_llama(sizes, SMALL),
        make_cache_identity(sizes, sequences, "threshold"),
        sequences,
    )
    records = Records.concatenate(each.encode() for each in teacher.deliver(sequences, 0))

    def open_cache_of(seed: int) -> AbstractContextManager[CacheWriter]:
        return open_writer(folder, make_cache_identity(sizes, sequences, "threshold", seed))

    def seal(seed: int) -> None:
        with open_cache_of(seed) as writer:
            writer.write_shard(0, sequences, records)

    for seed in range(3):
        # Once in a cache, so it is no part of a shard.
        with open_cache_of(seed) as writer:
            write_own_tables(writer, teacher)
    taken = median(time_run(partial(seal, seed)) for seed in range(3))
    share = taken / (time_run(bare) * len(sequences) / sizes.batch)
    sealed = f"a shard of {len(sequences)} sequences is sealed in {taken:.2f} s"
    return f"{sealed}, {share:.2%} of their bare forward's time"


def compute_softmaxes(sizes: BenchmarkSizes, count: int) -> None:
    """Compute ``count`` softmaxes of the logits of a batch, in chunks as large as a capture's.

    A tempered record takes two for each node, and sums: one of all tokens for the sizes, and one of
    its tail alone for the log-partition, whose terms would underflow beside the head's.
    """
    rows = max(LOGIT_ELEMENTS["cpu"] // sizes.vocabulary, 1)
    logits_NV = torch.zeros(rows, sizes.vocabulary)
    for _ in range(-(-count * sizes.tokens // rows)):
        torch.softmax(logits_NV, 1, out=logits_NV)


def measure_forward_shares(
    bare: Runnable, threshold: Runnable, tempered: Runnable, softmaxes: Runnable
) -> str:
    """Measure the share of a capture's processor time that is the bare forward's, on one thread.

    Where the forward pass uses every core, no capture is faster than this, whatever it overlaps.
    On a GPU the processor does other work than the forward pass, and the result is empty.
    """
    if DEVICE.type != "cpu":
        return ""
    threads = torch.get_num_threads()
    # Threads that wait for each other would use processor time too.
    torch.set_num_threads(1)
    try:
        rounds = [
            [measure_cpu(run) for run in (bare, threshold, tempered, softmaxes)] for _ in range(3)
        ]
    finally:
        torch.set_num_threads(threads)
    shares = [median(taken[0] / taken[which] for taken in rounds) for which in (1, 2)]
    floor = median(taken[0] / (taken[0] + taken[3]) for taken in rounds)
    return (
        f"; of the processor's time the bare forward is {shares[0]:.2f} of reading and "
        f"{shares[1]:.2f} of tempered reading, the most speed of a capture whose forward uses "
        f"every core; with nothing but the softmaxes of its nodes tempered reading would reach "
        f"{floor:.2f}"
    )


def measure_cpu(run: Runnable) -> float:
    """Measure the processor's seconds of a run."""
    began = time.process_time()
    run()
    return time.process_time() - began


def make_step_task(sizes: BenchmarkSizes, folder: Path) -> Task:
    student = make_llama(sizes, sizes.student, tie_word_embeddings=True)
    head = find_lm_head(student, sizes.vocabulary)
    precision = Precision(DEVICE.type, sizes.torch_dtype)
    optimizer = make_optimizer(student, (), TrainConfig(max_steps=1, learning_rate=1e-5), DEVICE)
    batch, decoder = make_recorded_batch(sizes, folder, "threshold")
    labels_BL = F.pad(batch.tokens_BL[:, 1:], (0, 1), value=-100)

    def plain() -> Tensor:
        with precision.autocast():
            logits = student(input_ids=batch.tokens_BL, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten())

    def fused(targets: Callable[[], Targets], alpha: float) -> Tensor:
        hidden_ND = compute_target_hidden_states(student, batch, precision)
        return compute_distillation_loss(hidden_ND, head, targets(), Objective(alpha)).total / len(
            batch
        )

    def step(loss: Callable[[], Tensor]) -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    losses = {
        "cross-entropy, all logits": plain,
        HARD: partial(fused, partial(Targets, batch.gold_N), 1.0),
        RECORDS: partial(fused, partial(decoder.decode, batch.gold_N, batch.teacher), ALPHA),
    }
    flops = 3 * count_forward_flops(sizes, student)
    moved = 28.0 * sum(each.numel() for each in student.parameters())
    return Task(
        {name: Variant(partial(step, loss), flops, moved) for name, loss in losses.items()},
        sizes.tokens,
    )


def make_head_task(sizes: BenchmarkSizes, folder: Path) -> Task:
    positions, width, vocabulary = sizes.head
    torch.manual_seed(0)
    hidden_ND = torch.randn(positions, width, device=DEVICE).to(sizes.torch_dtype).requires_grad_()
    weight_VD = (
        (torch.randn(vocabulary, width, device=DEVICE) / width**0.5)
        .to(sizes.torch_dtype)
        .requires_grad_()
    )
    one = replace(sizes, vocabulary=vocabulary, length=positions + 1, batch=1)
    decoded: dict[str, Callable[[], Targets]] = {}
    for profile in ("threshold", "tempered"):
        batch, decoder = make_recorded_batch(one, folder, profile)
        temperature = TEMPERATURE if profile == "tempered" else 1.0
        decoded[profile] = partial(decoder.decode, batch.gold_N, batch.teacher, temperature)
    gold_N = batch.gold_N
    head = LMHead(weight_VD, None, 1.0, None, vocabulary)

    def step(loss: Callable[[], Tensor]) -> None:
        loss().backward()
        hidden_ND.grad = weight_VD.grad = None

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(hidden_ND, weight_VD).float(), gold_N)

    def chunked() -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden_ND, weight_VD, gold_N, options=options)

    def fused(targets: Callable[[], Targets], alpha: float) -> Tensor:
        return (
            compute_distillation_loss(hidden_ND, head, targets(), Objective(alpha)).total
            / positions
        )

    losses = {
        "cross-entropy, all logits": plain,
        "torch's linear_cross_entropy": chunked,
        **{
            name: partial(loss, hidden_ND, weight_VD, gold_N) for name, loss in find_peers().items()
        },
        HARD: partial(fused, partial(Targets, gold_N), 1.0),
        RECORDS: partial(fused, decoded["threshold"], ALPHA),
        TEMPERED: partial(fused, decoded["tempered"], ALPHA),
    }
    if not hasattr(F, "linear_cross_entropy"):  # torch has it from version 2.13 on
        del losses["torch's linear_cross_entropy"]
    flops = 6.0 * positions * width * vocabulary
    return Task(
        {name: Variant(partial(step, loss), flops) for name, loss in losses.items()}, positions
    )


def find_peers() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Find other projects' fused LM heads that are installed; none without a GPU.

    Each is a function of hidden states, weight and hard labels.
    """
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    if DEVICE.type != "cuda":
        return found
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["Liger's fused cross-entropy"] = lambda x, w, y: liger(w, x, y)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        found["cut cross-entropy"] = linear_cross_entropy
    return found


def make_loader_task(sizes: BenchmarkSizes, folder: Path) -> Task:
    store = seal_cache(
        sizes, folder, make_random_documents(sizes, BATCHES * sizes.batch), "threshold"
    )
    steps = count()

    def load() -> Batch:
        return read_batch(store, sizes.batch, next(steps))

    # Load all once, so that every chunk of the cache is decoded before the time is measured.
    some = [load() for _ in range(BATCHES)]
    moved = store.bytes_per_token * store.manifest.positions / BATCHES + count_batch_bytes(some[0])
    variants = {
        "the student's step on records": make_step_task(sizes, folder).variants[RECORDS],
        "cache to batches": Variant(load, 0.0, moved),
    }
    return Task(variants, sizes.tokens, partial(measure_per_core, store, sizes.batch))


def read_batch(source: Cache, size: int, step: int) -> Batch:
    return make_batch(*source.read(list_step_indices(source.train_count, size, 0, step)))


def count_batch_bytes(batch: Batch) -> int:
    assert batch.teacher is not None
    return sum(
        each.nbytes
        for each in (batch.tokens_BL, batch.rows_N, batch.gold_N, *batch.teacher.values())
    )


def measure_per_core(store: Cache, size: int) -> str:
    """Measure how much one core reads in a second, and what opening a shard costs once."""
    tokens = store.manifest.positions
    entries = store.manifest.entries
    source = open_cache(store.folder)
    seconds = []
    for epoch in range(4):
        began = time.process_time()
        batches = [
            read_batch(source, size, step) for step in range(epoch * BATCHES, (epoch + 1) * BATCHES)
        ]
        seconds.append(time.process_time() - began)
    each = sum(seconds[1:]) / 3
    compact = sum(map(count_batch_bytes, batches)) / tokens
    shards = len(store.manifest.shards)
    return (
        f"{entries / tokens:.1f} entries and {store.bytes_per_token:.1f} bytes a token, "
        f"{compact:.1f} in a batch; in a second one core reads {tokens / each:,.0f} tokens, "
        f"{entries / each:,.0f} entries, and the first look at a shard of "
        f"{tokens / shards:,.0f} tokens costs {(seconds[0] - each) / shards * 1e3:,.1f} ms more"
    )


TASKS = {
    "capture": make_capture_task,
    "step": make_step_task,
    "head": make_head_task,
    "loader": make_loader_task,
}


# ---------------------------------------------------------------------- what they are made of


def make_llama(sizes: BenchmarkSizes, shape: tuple[int, int], **options: Any) -> LlamaForCausalLM:
    """Make a random Llama; with an LM head of its own its entropy is like that of real text.

    The logits then have a spread of 4 nats.
    """
    layers, width = shape
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        max_position_embeddings=max(sizes.length, 64),
        **options,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config)
        if not config.tie_word_embeddings:
            torch.nn.init.normal_(model.lm_head.weight, std=4.0 / width**0.5)
    return model


def make_single_documents(tokens_BL: np.ndarray) -> Sequences:
    """Make sequences of one document each."""
    start_BL = np.zeros(tokens_BL.shape, bool)
    target_BL = np.ones(tokens_BL.shape, bool)
    start_BL[:, 0] = True
    target_BL[:, -1] = False
    return Sequences(tokens_BL.astype(np.uint32), start_BL, target_BL)


def make_random_documents(sizes: BenchmarkSizes, sequences: int) -> Sequences:
    return make_single_documents(
        np.random.default_rng(0).integers(0, sizes.vocabulary, (sequences, sizes.length))
    )


def make_cache_identity(
    sizes: BenchmarkSizes, sequences: Sequences, profile: str, seed: int = 0, **options: Any
) -> CacheIdentity:
    """Make the identity of a cache of ``sequences``, with shards as large as a job's."""
    shard = CacheConfig().shard_sequences
    codec = make_codec(profile, threshold=THRESHOLD, shard_sequences=shard, seed=seed, **options)
    return make_identity(sizes.vocabulary, sizes.length, len(sequences), 0, codec)


def make_frozen_llama(sizes: BenchmarkSizes, shape: tuple[int, int]) -> LlamaForCausalLM:
    """Make a random Llama as a teacher: its precision, in evaluation mode, without gradients."""
    return make_llama(sizes, shape).to(sizes.torch_dtype).eval().requires_grad_(False)


def make_teacher(model: LlamaForCausalLM, identity: CacheIdentity, sequences: Sequences) -> Teacher:
    """Make ``model`` the teacher of a cache, as a capture does.

    Profile threshold adds up its tails and fits its tables; tempered has as many knots as the cache
    needs.
    """
    head = find_lm_head(model, identity.tokenizer.vocabulary_size)
    profile = identity.codec.profile
    meter = TailMeter(identity.data.train_sequences) if profile == "threshold" else None
    recorder = Recorder(head, identity.record_codec(), meter=meter)
    teacher = Teacher(model, recorder, len(identity.shard_range(0)))
    if recorder.codec.rules.dithered:
        return replace(
            teacher, recorder=replace(recorder, tables=fit_own_tables(teacher, sequences))
        )
    if profile != "tempered":
        return teacher
    return replace(
        teacher, recorder=replace(teacher.recorder, knots=teacher.choose_knots(sequences).count)
    )


def fit_own_tables(teacher: Teacher, sequences: Sequences) -> DitherTables:
    """Fit the tables of profile threshold to the teacher's states of all sequences."""
    recorder = teacher.recorder
    with torch.no_grad():
        states = teacher.read_states(sequences)
        return fit_tables(states, recorder.lm_head, recorder.codec, recorder.codec.clusters)


def write_own_tables(writer: CacheWriter, teacher: Teacher) -> None:
    """Write the tables of the teacher's recorder, if it has any."""
    if teacher.recorder.tables is not None:
        writer.write_tables(teacher.recorder.tables)


def seal_cache(
    sizes: BenchmarkSizes, folder: Path, sequences: Sequences, profile: str, **options: Any
) -> Cache:
    """Capture a cache of ``sequences`` below ``folder`` from a small teacher."""
    identity = make_cache_identity(sizes, sequences, profile, **options)
    teacher = make_teacher(make_frozen_llama(sizes, SMALL), identity, sequences)
    with open_writer(folder, identity) as writer:
        write_own_tables(writer, teacher)
        for index in range(identity.shard_count):
            numbers = identity.shard_range(index)
            part = sequences.select(np.asarray(numbers))
            records = Records.concatenate(
                each.encode() for each in teacher.deliver(part, numbers.start)
            )
            writer.write_shard(index, part, records, teacher.take_tail_sums())
        writer.finish(Provenance())
    return open_cache(folder / identity.fingerprint)


def make_recorded_batch(
    sizes: BenchmarkSizes, folder: Path, profile: str
) -> tuple[Batch, TargetDecoder]:
    """Make one batch with its records as in training, and the decoder of its records."""
    store = seal_cache(sizes, folder, make_random_documents(sizes, sizes.batch), profile)
    batch = make_batch(*store.read(range(sizes.batch))).to(DEVICE)
    return batch, TargetDecoder(store.codec)


def count_forward_flops(sizes: BenchmarkSizes, model: LlamaForCausalLM) -> float:
    layers = model.config.num_hidden_layers
    width = model.config.hidden_size
    body = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".layers." in name
    )
    return sizes.tokens * (
        2.0 * body + 2.0 * layers * sizes.length * width + 2.0 * width * sizes.vocabulary
    )


# ---------------------------------------------------------------------- running them


def measure_tasks(sizes: BenchmarkSizes, tasks: Sequence[str]) -> str:
    """Measure the tasks; returns the table as text, with the machine above it."""
    hide_progress_bars()
    torch.set_float32_matmul_precision("high")  # as training sets it
    machine = measure_machine(sizes.torch_dtype, sizes.product)
    rows = []
    notes = []
    with fresh_processes(PRELOAD) as pool:
        for name in tasks:
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                task = TASKS[name](sizes, Path(folder))
                memory = measure_memories(name, sizes, task, pool)
                rows += measure_task(name, task, memory, machine, sizes.rounds)
                notes += [f"- {name}: {task.note()}."] if task.note else []
    return "\n".join([*make_heading(machine, sizes), "", render_timings(rows), "", *notes])


def measure_task(
    name: str, task: Task, memory: dict[str, float | None], machine: Machine, rounds: int
) -> list[TimingRow]:
    timings = interleave({each: variant.run for each, variant in task.variants.items()}, rounds)
    return [
        TimingRow(
            name,
            each,
            task.tokens,
            timings[each],
            memory[each],
            machine.floor(variant.flops, variant.moved),
        )
        for each, variant in task.variants.items()
    ]


def measure_memories(
    name: str, sizes: BenchmarkSizes, task: Task, pool: Executor
) -> dict[str, float | None]:
    """Measure the extra memory of each variant; on a CPU each runs in a process of its own."""
    if DEVICE.type == "cuda":
        return {each: measure_extra_memory(variant.run) for each, variant in task.variants.items()}
    return {
        each: pool.submit(measure_memory_alone, name, sizes, each).result()
        for each in task.variants
    }


def measure_memory_alone(name: str, sizes: BenchmarkSizes, variant: str) -> float | None:
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        return measure_extra_memory(TASKS[name](sizes, Path(folder)).variants[variant].run)


def make_heading(machine: Machine, sizes: BenchmarkSizes) -> list[str]:
    """The lines about the machine and about the sizes."""
    device = name_machine()
    positions, width, vocabulary = sizes.head
    about_machine = (
        f"Machine: {device}, torch {torch.__version__}, {torch.get_num_threads()} threads on "
        f"{os.cpu_count()} cores; {sizes.dtype} products {machine.products / 1e12:.3g} TFLOP/s, "
        f"copies {machine.copies / 1e9:.3g} GB/s."
    )
    about_sizes = (
        f"Sizes: teacher {format_shape(sizes.teacher)}, student {format_shape(sizes.student)}, "
        f"vocabulary {sizes.vocabulary:,}, {sizes.batch} sequences of {sizes.length} tokens; "
        f"head alone N = {positions:,}, D = {width:,}, V = {vocabulary:,}; "
        f"threshold {THRESHOLD}; {sizes.rounds} rounds."
    )
    return [about_machine, "", about_sizes]


def format_shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def name_machine() -> str:
    """Return the name of the GPU, or of the processor where there is none."""
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else read_cpu_name()


def read_cpu_name() -> str:
    """Read the processor's name on Linux; elsewhere return its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def parse_shape(text: str) -> tuple[int, int]:
    layers, width = map(int, text.split("x"))
    return layers, width


def parse_head_shape(text: str) -> tuple[int, int, int]:
    positions, width, vocabulary = map(int, text.split("x"))
    return positions, width, vocabulary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure what distillation costs, as ratios in one run."
    )
    parser.add_argument(
        "--teacher",
        type=parse_shape,
        metavar="LAYERSxWIDTH",
        help="a random Llama; its width is a multiple of 64",
    )
    parser.add_argument("--student", type=parse_shape, metavar="LAYERSxWIDTH")
    parser.add_argument(
        "--head",
        type=parse_head_shape,
        metavar="POSITIONSxWIDTHxVOCABULARY",
        help="sizes of the task head",
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--vocabulary", type=int, help="vocabulary of both models")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences of a batch")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="precision of the teacher and of the student's products",
    )
    parser.add_argument("--rounds", type=int, help="rounds; each variant is timed once in each")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, which show only that it works"
    )
    parser.add_argument("--out", type=Path, help="write the same text to this file too")
    return parser.parse_args()


def main() -> None:
    given = vars(parse_arguments())
    out = given.pop("out")
    quick = given.pop("quick")
    tasks = given.pop("tasks")
    sizes = replace(
        QUICK if quick else SIZES[DEVICE.type],
        **{name: each for name, each in given.items() if each},
    )
    text = measure_tasks(sizes, tasks)
    print(text)
    if out:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
