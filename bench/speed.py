"""How much distillation costs beyond what there is to do without it: one table, of ratios measured in one run.

    python bench/speed.py [--quick] [--teacher 16x2048] [--student 16x1024] [--batch 8] [--rounds 7] [--out FILE]
    python bench/speed.py --tasks head --head 16384x2048x248320

task        the first variant, speed 1        what is compared with it
capture     the teacher's bare forward        reading its records, of profile threshold and of profile tempered;
                                              reading and sealing them on disk, as a shard of one batch, which is the
                                              dearest there is: a job's holds 256 sequences (the note below the table)
step        cross-entropy on all logits       the fused head: on hard labels alone, on the teacher's records
head        cross-entropy on all logits       the same without the model around it; torch's own chunked loss; on a GPU
                                              Liger's and cut cross-entropy where they are installed; records of profile
                                              tempered at T = 2
loader      the student's step on records     reading a cache in random order and making batches of it

The bare forward is the teacher's own, with its head: the logits of the whole batch. Records are those that a small
random Llama's capture seals, read back from disk; decoding their columns is a part of what is timed.

Runs on the first GPU if there is one, else on the CPU. Models are random Llamas named by layers x width, made here;
nothing is downloaded. Needs torch, transformers, numpy, zarr and what kd/config.py reads YAML with (pydantic, pyyaml).

The floor of a task is what its arithmetic and the bytes that must move take at the rates of this machine, measured
first (one large matrix product, one large copy). N positions, T tokens a sequence, L layers, D width, V vocabulary,
P parameters outside the embedding and the head:

    capture     N (2 P + 2 L T D + 2 D V) FLOP: body, causal attention, head. Nothing for the records: logits that are
                made must be read, but a chunk of them fits a CPU's cache.
    step        three times that (forward, and two products for each of its in the backward pass),
                and 28 bytes of each parameter for AdamW in float32: four numbers read, three written.
    head        3 * 2 N D V FLOP: the logits, and the gradients of both their factors.
    loader      the records as stored, read, and the batch that is made of them, written.

Materialised logits move at least 4 N V (forward) + 8 N V (backward) bytes more in float32, which the fused head does
not; that is room below the first variant, not part of the floor.
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
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import Machine, Row, extra_memory, fresh_processes, interleave, measure_machine, render, seconds
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from cache.manifest import CacheIdentity, Provenance
from cache.records import Records, Sequences
from cache.store import Cache, capture, open_cache
from cache.testing import make_codec, make_identity
from kd.batches import Batch, make_batch, step_indices
from kd.config.cache import CacheConfig
from kd.config.train import TrainConfig
from kd.losses import Objective, distillation_loss
from kd.models import Head, head_of, hide_progress_bars
from kd.precision import Precision, pick_device, target_hidden_states
from kd.recording import Recorder
from kd.targets import TargetDecoder, Targets
from kd.teacher import CachedRecords, Teacher
from kd.train import make_optimizer

PRELOAD = ["transformers.models.llama.modeling_llama", "kd.teacher", "kd.train"]
THRESHOLD, ALPHA, TEMPERATURE = 0.04, 0.1, 2.0
HARD, RECORDS = "fused, hard labels alone", f"fused, records, alpha {ALPHA}"
TEMPERED = f"fused, tempered records at T = {TEMPERATURE:g}, alpha {ALPHA}"
BATCHES = 16  # that the loader's cache holds
SMALL = (1, 64)  # the teacher that the records to train on come from
DEVICE = pick_device()

Run = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """What to measure: models as (layers, width), the head alone as (positions, width, vocabulary)."""

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
        """What the teacher, and the student's matrix products, run in."""
        return getattr(torch, self.dtype)

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.length


SIZES = {
    "cpu": Sizes(),
    "cuda": Sizes((16, 2048), (16, 1024), (8192, 2048, 151_936), 128_256, 1024, 8, "bfloat16", 20, 8192),
}
QUICK = Sizes((2, 64), (2, 64), (64, 32, 1000), 1000, 32, 2, rounds=2, product=256)


@dataclass(frozen=True)
class Variant:
    """One way to do a task, with the arithmetic and the bytes that no way can do without."""

    run: Run
    flops: float
    moved: float = 0.0


@dataclass(frozen=True)
class Task:
    """Ways to do ``tokens`` tokens of one task, the one to compare with first; ``note`` tells what is not a ratio."""

    variants: dict[str, Variant]
    tokens: int
    note: Callable[[], str] | None = None


# ---------------------------------------------------------------------- the tasks


def capture_task(sizes: Sizes, folder: Path) -> Task:
    model = frozen(sizes, sizes.teacher)
    sequences, seeds = one_document_each(sizes, sizes.batch), count()
    tokens_BT = make_batch(sequences, None).to(DEVICE).tokens_BT
    threshold, tempered = (
        reader(model, identity_of(sizes, sequences, profile), sequences) for profile in ("threshold", "tempered")
    )

    @torch.no_grad()
    def bare() -> None:
        model(input_ids=tokens_BT, use_cache=False)

    def read(teacher: Teacher) -> Records:
        return Records.concatenate(records for _, records in teacher.read(sequences, 0))

    def seal() -> None:
        with capture(folder, identity_of(sizes, sequences, "threshold", seed=next(seeds))) as writer:
            writer.write_shard(0, sequences, read(threshold))

    runs: dict[str, Run] = {
        "teacher's bare forward": bare,
        "records read": partial(read, threshold),
        "records read and sealed": seal,
        "tempered records read": partial(read, tempered),
    }
    flops = forward_flops(sizes, model)

    def about() -> str:
        return f"{about_records(read(threshold), tempered)}; {about_sealing(sizes, folder, bare)}"

    return Task({name: Variant(run, flops) for name, run in runs.items()}, sizes.tokens, about)


def about_records(records: Records, tempered: Teacher) -> str:
    heads, tails = (records.length(axis) / len(records) for axis in ("head", "tail"))
    entries = f"its records hold the next token, {heads:.1f} head and {tails:.1f} tail entries a token"
    return f"{entries}; tempered ones {tempered.recorder.nodes} nodes"


def about_sealing(sizes: Sizes, folder: Path, bare: Run) -> str:
    """What a shard of the size that a job's have costs to seal; its records are a small teacher's."""
    sequences = one_document_each(sizes, CacheConfig().shard_sequences)
    teacher = reader(frozen(sizes, SMALL), identity_of(sizes, sequences, "threshold"), sequences)
    records = Records.concatenate(each for _, each in teacher.read(sequences, 0))

    def seal(seed: int) -> None:
        with capture(folder, identity_of(sizes, sequences, "threshold", seed)) as writer:
            writer.write_shard(0, sequences, records)

    taken = median(seconds(partial(seal, seed)) for seed in range(3))
    share = taken / (seconds(bare) * len(sequences) / sizes.batch)
    return f"a shard of {len(sequences)} sequences is sealed in {taken:.2f} s, {share:.2%} of their bare forward's time"


def step_task(sizes: Sizes, folder: Path) -> Task:
    student = llama(sizes, sizes.student, tie_word_embeddings=True)
    head, precision = head_of(student, sizes.vocabulary), Precision(DEVICE.type, sizes.torch_dtype)
    optimizer = make_optimizer(student, (), TrainConfig(max_steps=1, learning_rate=1e-5), DEVICE)
    batch, decoder = recorded(sizes, folder, "threshold")
    labels_BT = F.pad(batch.tokens_BT[:, 1:], (0, 1), value=-100)

    def plain() -> Tensor:
        with precision.autocast():
            logits = student(input_ids=batch.tokens_BT, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten())

    def fused(targets: Callable[[], Targets], alpha: float) -> Tensor:
        hidden_ND = target_hidden_states(student, batch, precision)
        return distillation_loss(hidden_ND, head, targets(), Objective(alpha)).total / len(batch)

    def step(loss: Callable[[], Tensor]) -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    losses = {
        "cross-entropy, all logits": plain,
        HARD: partial(fused, partial(Targets, batch.gold_N), 1.0),
        RECORDS: partial(fused, partial(decoder.targets, batch.gold_N, batch.teacher), ALPHA),
    }
    flops, moved = 3 * forward_flops(sizes, student), 28.0 * sum(each.numel() for each in student.parameters())
    return Task({name: Variant(partial(step, loss), flops, moved) for name, loss in losses.items()}, sizes.tokens)


def head_task(sizes: Sizes, folder: Path) -> Task:
    positions, width, vocabulary = sizes.head
    torch.manual_seed(0)
    hidden_ND = torch.randn(positions, width, device=DEVICE).to(sizes.torch_dtype).requires_grad_()
    weight_VD = (torch.randn(vocabulary, width, device=DEVICE) / width**0.5).to(sizes.torch_dtype).requires_grad_()
    one = replace(sizes, vocabulary=vocabulary, length=positions + 1, batch=1)
    decoded: dict[str, Callable[[], Targets]] = {}
    for profile in ("threshold", "tempered"):
        batch, decoder = recorded(one, folder, profile)
        temperature = TEMPERATURE if profile == "tempered" else 1.0
        decoded[profile] = partial(decoder.targets, batch.gold_N, batch.teacher, temperature)
    gold_N, head = batch.gold_N, Head(weight_VD, None, 1.0, None, vocabulary)

    def step(loss: Callable[[], Tensor]) -> None:
        loss().backward()
        hidden_ND.grad = weight_VD.grad = None

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(hidden_ND, weight_VD).float(), gold_N)

    def chunked() -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden_ND, weight_VD, gold_N, options=options)

    def fused(targets: Callable[[], Targets], alpha: float) -> Tensor:
        return distillation_loss(hidden_ND, head, targets(), Objective(alpha)).total / positions

    losses = {
        "cross-entropy, all logits": plain,
        "torch's linear_cross_entropy": chunked,
        **{name: partial(loss, hidden_ND, weight_VD, gold_N) for name, loss in peers().items()},
        HARD: partial(fused, partial(Targets, gold_N), 1.0),
        RECORDS: partial(fused, decoded["threshold"], ALPHA),
        TEMPERED: partial(fused, decoded["tempered"], ALPHA),
    }
    if not hasattr(F, "linear_cross_entropy"):  # it came with torch 2.13
        del losses["torch's linear_cross_entropy"]
    flops = 6.0 * positions * width * vocabulary
    return Task({name: Variant(partial(step, loss), flops) for name, loss in losses.items()}, positions)


def peers() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Others' heads on hard labels, of (hidden states, weight, labels): those that are installed, on a GPU."""
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


def loader_task(sizes: Sizes, folder: Path) -> Task:
    store = sealed(sizes, folder, one_document_each(sizes, BATCHES * sizes.batch), "threshold")
    source, steps = CachedRecords(store), count()

    def load() -> Batch:
        return next_batch(source, sizes.batch, next(steps))

    some = [load() for _ in range(BATCHES)]  # and now every chunk has been decoded once
    moved = store.bytes_per_token * store.manifest.positions / BATCHES + bytes_of(some[0])
    variants = {
        "the student's step on records": step_task(sizes, folder).variants[RECORDS],
        "cache to batches": Variant(load, 0.0, moved),
    }
    return Task(variants, sizes.tokens, partial(per_core, store, sizes.batch))


def next_batch(source: CachedRecords, size: int, step: int) -> Batch:
    return make_batch(*source.read(step_indices(source.train_count, size, 0, step)))


def bytes_of(batch: Batch) -> int:
    assert batch.teacher is not None
    return sum(each.nbytes for each in (batch.tokens_BT, batch.rows_N, batch.gold_N, *batch.teacher.values()))


def per_core(store: Cache, size: int) -> str:
    """What one core's time is worth, and what the first look at a shard costs once: opening and decompressing it."""
    tokens, entries = store.manifest.positions, store.manifest.entries
    source, seconds = CachedRecords(open_cache(store.folder)), []
    for epoch in range(4):
        began = time.process_time()
        batches = [next_batch(source, size, step) for step in range(epoch * BATCHES, (epoch + 1) * BATCHES)]
        seconds.append(time.process_time() - began)
    each, compact = sum(seconds[1:]) / 3, sum(map(bytes_of, batches)) / tokens
    shards = len(store.manifest.shards)
    return (
        f"{entries / tokens:.1f} entries and {store.bytes_per_token:.1f} bytes a token, {compact:.1f} in a batch; in a "
        f"second one core reads {tokens / each:,.0f} tokens, {entries / each:,.0f} entries, and the first look at a "
        f"shard of {tokens / shards:,.0f} tokens costs {(seconds[0] - each) / shards * 1e3:,.1f} ms more"
    )


TASKS = {"capture": capture_task, "step": step_task, "head": head_task, "loader": loader_task}


# ---------------------------------------------------------------------- what they are made of


def llama(sizes: Sizes, shape: tuple[int, int], **options: Any) -> LlamaForCausalLM:
    """A random Llama whose logits have a spread of 4 nats where the head is its own: an entropy as of real text."""
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


def one_document(tokens_BT: np.ndarray) -> Sequences:
    """Sequences that are one document each."""
    start_BT, target_BT = np.zeros(tokens_BT.shape, bool), np.ones(tokens_BT.shape, bool)
    start_BT[:, 0], target_BT[:, -1] = True, False
    return Sequences(tokens_BT.astype(np.uint32), start_BT, target_BT)


def one_document_each(sizes: Sizes, sequences: int) -> Sequences:
    return one_document(np.random.default_rng(0).integers(0, sizes.vocabulary, (sequences, sizes.length)))


def identity_of(sizes: Sizes, sequences: Sequences, profile: str, seed: int = 0) -> CacheIdentity:
    """A cache of ``sequences``, in shards of the size that a job's have."""
    codec = make_codec(profile, threshold=THRESHOLD, shard_sequences=CacheConfig().shard_sequences, seed=seed)
    return make_identity(sizes.vocabulary, sizes.length, len(sequences), 0, codec)


def frozen(sizes: Sizes, shape: tuple[int, int]) -> LlamaForCausalLM:
    """A teacher."""
    return llama(sizes, shape).to(sizes.torch_dtype).eval().requires_grad_(False)


def reader(model: LlamaForCausalLM, identity: CacheIdentity, sequences: Sequences) -> Teacher:
    """``model`` as the teacher of a cache, with as many nodes as it needs."""
    head = head_of(model, identity.tokenizer.vocabulary_size)
    teacher = Teacher(model, Recorder(head, identity.record_codec()), len(identity.shard_range(0)))
    if identity.codec.profile != "tempered":
        return teacher
    return replace(teacher, recorder=replace(teacher.recorder, nodes=teacher.choose_nodes(sequences).count))


def sealed(sizes: Sizes, folder: Path, sequences: Sequences, profile: str) -> Cache:
    """A cache of ``sequences`` below ``folder``, of what a small teacher says of them."""
    identity = identity_of(sizes, sequences, profile)
    teacher = reader(frozen(sizes, SMALL), identity, sequences)
    with capture(folder, identity) as writer:
        for index in range(identity.shard_count):
            numbers = identity.shard_range(index)
            part = sequences.select(np.asarray(numbers))
            records = Records.concatenate(records for _, records in teacher.read(part, numbers.start))
            writer.write_shard(index, part, records)
        writer.finish(Provenance())
    return open_cache(folder / identity.fingerprint)


def recorded(sizes: Sizes, folder: Path, profile: str) -> tuple[Batch, TargetDecoder]:
    """One batch with its records as training has it, and what decodes them."""
    store = sealed(sizes, folder, one_document_each(sizes, sizes.batch), profile)
    batch = make_batch(*store.read(range(sizes.batch))).to(DEVICE)
    return batch, TargetDecoder(store.codec)


def forward_flops(sizes: Sizes, model: LlamaForCausalLM) -> float:
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    body = sum(parameter.numel() for name, parameter in model.named_parameters() if ".layers." in name)
    return sizes.tokens * (2.0 * body + 2.0 * layers * sizes.length * width + 2.0 * width * sizes.vocabulary)


# ---------------------------------------------------------------------- running them


def bench(sizes: Sizes, tasks: Sequence[str]) -> str:
    """Measure the tasks; the table as text, with the machine above it."""
    hide_progress_bars()
    torch.set_float32_matmul_precision("high")  # as training sets it
    machine = measure_machine(sizes.torch_dtype, sizes.product)
    rows, notes = [], []
    with fresh_processes(PRELOAD) as pool:
        for name in tasks:
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                task = TASKS[name](sizes, Path(folder))
                memory = memories(name, sizes, task, pool)
                rows += measured(name, task, memory, machine, sizes.rounds)
                notes += [f"- {name}: {task.note()}."] if task.note else []
    return "\n".join([*heading(machine, sizes), "", render(rows), "", *notes])


def measured(name: str, task: Task, memory: dict[str, float | None], machine: Machine, rounds: int) -> list[Row]:
    timings = interleave({each: variant.run for each, variant in task.variants.items()}, rounds)
    return [
        Row(name, each, task.tokens, timings[each], memory[each], machine.floor(variant.flops, variant.moved))
        for each, variant in task.variants.items()
    ]


def memories(name: str, sizes: Sizes, task: Task, pool: Executor) -> dict[str, float | None]:
    """The extra memory of each variant. A GPU keeps account of it; on a CPU each needs a process of its own."""
    if DEVICE.type == "cuda":
        return {each: extra_memory(variant.run) for each, variant in task.variants.items()}
    return {each: pool.submit(memory_alone, name, sizes, each).result() for each in task.variants}


def memory_alone(name: str, sizes: Sizes, variant: str) -> float | None:
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        return extra_memory(TASKS[name](sizes, Path(folder)).variants[variant].run)


def heading(machine: Machine, sizes: Sizes) -> list[str]:
    """The machine's line and the sizes'."""
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else cpu_name()
    positions, width, vocabulary = sizes.head
    about_machine = (
        f"Machine: {device}, torch {torch.__version__}, {torch.get_num_threads()} threads on {os.cpu_count()} cores; "
        f"{sizes.dtype} products {machine.products / 1e12:.3g} TFLOP/s, copies {machine.copies / 1e9:.3g} GB/s."
    )
    about_sizes = (
        f"Sizes: teacher {named(sizes.teacher)}, student {named(sizes.student)}, vocabulary {sizes.vocabulary:,}, "
        f"{sizes.batch} sequences of {sizes.length} tokens; head alone N = {positions:,}, D = {width:,}, "
        f"V = {vocabulary:,}; threshold {THRESHOLD}; {sizes.rounds} rounds."
    )
    return [about_machine, "", about_sizes]


def named(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def cpu_name() -> str:
    """The processor as Linux names it, or else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def shape(text: str) -> tuple[int, int]:
    layers, width = map(int, text.split("x"))
    return layers, width


def head_shape(text: str) -> tuple[int, int, int]:
    positions, width, vocabulary = map(int, text.split("x"))
    return positions, width, vocabulary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print what distillation costs, as ratios measured in one run.")
    parser.add_argument(
        "--teacher", type=shape, metavar="LAYERSxWIDTH", help="a random Llama's; width a multiple of 64"
    )
    parser.add_argument("--student", type=shape, metavar="LAYERSxWIDTH")
    parser.add_argument("--head", type=head_shape, metavar="POSITIONSxWIDTHxVOCABULARY", help="of the head alone")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--vocabulary", type=int, help="of both models")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences")
    parser.add_argument("--rounds", type=int, help="each variant is timed once a round")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, and nothing else")
    parser.add_argument("--out", type=Path, help="write the same text to this file too")
    return parser.parse_args()


def main() -> None:
    given = vars(parse_arguments())
    out, quick, tasks = given.pop("out"), given.pop("quick"), given.pop("tasks")
    sizes = replace(QUICK if quick else SIZES[DEVICE.type], **{name: each for name, each in given.items() if each})
    text = bench(sizes, tasks)
    print(text)
    if out:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
