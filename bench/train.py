"""What training costs: the fused step, the whole loop with and without a teacher in it, and each lever.

    python bench/train.py [--small] [--out FILE]

Four parts, in one run, each of ratios between variants that take turns (``bench/measure.py``):

    step and head   our step on a teacher's records against the same on plain cross-entropy with all logits: time, and
                    peak memory beyond what was there (``bench/speed.py``, which tells sizes and floors)
    loops           kd.train's own loop from a cache, the same loop on cross-entropy alone (alpha 1, text without
                    records), and distillation with the live teacher in the step
    profile         where the time of the loop from the cache goes: profile.json of its run
    levers          the same loop with one lever more, each named by its place in a job

The live teacher's loop does what a good one must and nothing else: the same batches, read ahead; the teacher's forward
pass without a gradient; forward KL to all of its distribution, a chunk of logits at a time, by the same fused pass; the
same student, optimiser and schedule. It has no checks, reports or checkpoints, which kd.train's own has, so what the
cache wins is, if anything, understated.

The floor of a loop's step is the arithmetic of its models at this machine's rate for large products, and AdamW's
bytes: 3 F of the student (forward, and two products for each of its in the backward pass), F of the teacher where it is
live (F as in ``bench/speed.py``). Whatever the machine, the cache should win at least what the teacher takes: where the
teacher alone takes t times as long as a step from the cache, that is to be 1 + t times as fast as the live loop.

Two settings: the example's teacher and text (examples/austen), and random Llamas with a vocabulary of 49,152.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import speed
import torch
from measure import Machine, Row, Timing, fresh_processes, interleave, measure_machine, one_heap, render
from speed import ALPHA, DEVICE, RECORDS, Run, Sizes
from torch import nn
from transformers import PreTrainedModel

from cache.store import Cache, open_cache
from kd import models
from kd.batches import Batch, PlainText, Source, training_batches
from kd.config.job import JobConfig
from kd.data import Corpus, load_corpus
from kd.jobfile import parse_config
from kd.levers.optimizers import make_optimizer
from kd.levers.schedules import make_scheduler
from kd.losses import Objective, chunk_positions, distillation_loss
from kd.models import Head, head_of, hide_progress_bars
from kd.precision import Precision, set_tf32, target_hidden_states
from kd.progress import SILENT, Event, Monitor
from kd.targets import HiddenTarget, Targets
from kd.teacher import CachedRecords, capture, make_plan
from kd.train import required, train

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "austen"
PLAIN = "cross-entropy, all logits"
CACHE, HARD, LIVE, TEACHER = "from the cache", "cross-entropy alone", "live teacher in the step", "teacher alone"
PROFILES = ("threshold", "tempered")


@dataclass(frozen=True)
class Pace:
    """How many rounds, and how many steps each variant takes in a round."""

    rounds: int
    steps: int

    @property
    def total(self) -> int:
        """Steps of a whole run: the first turn, which starts everything, is not counted by ``interleave``."""
        return (self.rounds + 1) * self.steps


@dataclass(frozen=True)
class Scale:
    """How much of everything: the sizes of both settings, and their paces."""

    wide: Sizes
    wide_pace: Pace
    example: Sizes
    example_pace: Pace
    sequences: int  # to train on
    held_out: int  # of the example


EXAMPLE_SIZES = Sizes((6, 256), (2, 128), vocabulary=2048, batch=8, dtype=speed.SIZES[DEVICE.type].dtype)
FULL = Scale(replace(speed.SIZES[DEVICE.type], rounds=5), Pace(5, 2), EXAMPLE_SIZES, Pace(15, 10), 64, 16)
SMALL = Scale(speed.QUICK, Pace(1, 2), replace(EXAMPLE_SIZES, length=32, batch=2), Pace(1, 2), 8, 2)


# ---------------------------------------------------------------------- what is trained on what


@dataclass(frozen=True)
class Setting:
    """A teacher, its text, what caches keep of it by profile, and a folder for runs."""

    name: str
    sizes: Sizes
    pace: Pace
    teacher: PreTrainedModel
    corpus: Corpus
    caches: dict[str, Cache]
    folder: Path

    def student(self) -> PreTrainedModel:
        """A fresh student, always the same."""
        return speed.llama(self.sizes, self.sizes.student, tie_word_embeddings=True)

    def job(self, profile: str = "threshold", **changes: Any) -> JobConfig:
        """A job that trains it from the cache of ``profile``; ``changes`` by section."""
        layers, width = self.sizes.student
        steps = self.pace.total
        schedule = {"max_steps": steps, "batch_size": self.sizes.batch, "eval_steps": steps, "save_steps": steps}
        return parse_config(
            {
                "kind": "train",
                "student": {"init": {"layers": layers, "hidden_size": width, "tokenizer": "the teacher's"}},
                "data": {"sequence_length": self.sizes.length},
                "cache": {"fingerprint": self.caches[profile].identity.fingerprint},
                "loss": {"alpha": ALPHA, **changes.get("loss", {})},
                "train": {**schedule, "learning_rate": 1e-3, **changes.get("train", {})},
            }
        )

    def source(self, profile: str = "threshold") -> Source:
        """The text with the records of ``profile``."""
        return CachedRecords(self.caches[profile])

    @cached_property
    def student_flops(self) -> float:
        """FLOP of a step, without a teacher."""
        return 3.0 * speed.forward_flops(self.sizes, self.student())

    @cached_property
    def teacher_flops(self) -> float:
        """FLOP of the teacher's forward pass over the batch of a step."""
        return speed.forward_flops(self.sizes, self.teacher)

    @cached_property
    def adam_bytes(self) -> float:
        """Bytes that AdamW reads and writes in a step."""
        return 28.0 * sum(each.numel() for each in self.student().parameters())


def example(scale: Scale, folder: Path) -> Setting:
    """The example's own teacher, reading one of its novels."""
    sizes = scale.example
    job = {
        "kind": "precompute",
        "teacher": {"model": str(EXAMPLE / "teacher"), "batch_size": 16},
        "data": {
            "train": str(EXAMPLE / "text" / "northangerabbey.txt"),
            "validation": str(EXAMPLE / "text" / "persuasion.txt"),
            "sequence_length": sizes.length,
            "max_train_samples": scale.sequences,
            "max_eval_samples": scale.held_out,
        },
    }
    teacher, tokenizer = EXAMPLE / "teacher", models.load_tokenizer(EXAMPLE / "teacher")
    jobs = {profile: parse_config(job | {"cache": {"profile": profile}}) for profile in PROFILES}
    corpus = load_corpus(jobs["threshold"].data, tokenizer)
    plans = {profile: make_plan(each, tokenizer, corpus, teacher) for profile, each in jobs.items()}
    found = {profile: capture(plan, folder, SILENT)["fingerprint"] for profile, plan in plans.items()}
    caches = {profile: open_cache(folder / fingerprint) for profile, fingerprint in found.items()}
    model = models.load_teacher(plans["threshold"].teacher, teacher, DEVICE)
    return Setting("example", sizes, scale.example_pace, model, corpus, caches, folder)


def wide(scale: Scale, folder: Path) -> Setting:
    """Random Llamas of ``bench/speed.py``; the records are those of a smaller one, and as many."""
    sizes = scale.wide
    sequences = speed.one_document_each(sizes, 4 * sizes.batch)
    caches = {"threshold": speed.sealed(sizes, folder, sequences, "threshold")}
    corpus = Corpus(sequences, sequences.select(slice(0)))
    return Setting("wide", sizes, scale.wide_pace, speed.frozen(sizes, sizes.teacher), corpus, caches, folder)


# ---------------------------------------------------------------------- loops that take some steps at a time


class Walk:
    """A training of kd.train that takes as many steps as it is told to, and stands still between them.

    It runs in a thread of its own, one of the two at a time, so that many trainings can take turns step by step.
    ``parity_seconds`` is what its parity check took, from the event before it to its own.
    """

    def __init__(self, training: Callable[[Monitor], Any]) -> None:
        self._training = training
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None
        self._heard = time.perf_counter()
        self.parity_seconds = 0.0

    def take(self, steps: int) -> None:
        """Take so many steps; the first one of all starts the training. Raises what the training raises."""
        for _ in range(steps):
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._go.release()
            self._stands.acquire()
            if self._error is not None:
                raise self._error

    def finish(self) -> None:
        """Let it end, after its last step."""
        self._go.release()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._training(Monitor(self._listen))
        except Exception as error:
            self._error = error
        self._stands.release()

    def _listen(self, event: Event) -> None:
        before, self._heard = self._heard, time.perf_counter()
        if event.type == "check" and event.data["check"] == "parity":
            self.parity_seconds = self._heard - before
        if event.type == "progress":  # there is one at the end of every step
            self._stands.release()
            self._go.acquire()


def walk(setting: Setting, name: str, config: JobConfig, source: Source) -> Walk:
    """kd.train's loop on ``source``, in a folder of its own."""
    run_dir = setting.folder / name
    run_dir.mkdir(parents=True)
    student, vocabulary = setting.student(), setting.sizes.vocabulary
    return Walk(lambda monitor: train(config, source, student, vocabulary, run_dir, monitor))


def live(setting: Setting, student: PreTrainedModel, config: JobConfig) -> Iterator[None]:
    """Distillation with the teacher in the step; a step for each item."""
    options, vocabulary = required(config.train), setting.sizes.vocabulary
    head, teacher_head = head_of(student, vocabulary), head_of(setting.teacher, vocabulary)
    optimizer = make_optimizer(student, (), options, DEVICE)
    scheduler, objective = make_scheduler(optimizer, options, setting.pace.total), Objective.of(config.loss)
    precision = Precision.choose(options.precision, DEVICE)
    set_tf32(DEVICE, options.tf32)
    student.train()
    for batch in batches(setting):
        targets = Targets(batch.gold_N, known(setting.teacher, teacher_head, batch, precision))
        hidden_ND = target_hidden_states(student, batch, precision)
        (distillation_loss(hidden_ND, head, targets, objective).total / len(batch)).backward()
        nn.utils.clip_grad_norm_(student.parameters(), options.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def listening(setting: Setting) -> Iterator[None]:
    """What of that is the teacher's: its forward pass and its distributions, a chunk at a time."""
    head, options = head_of(setting.teacher, setting.sizes.vocabulary), required(setting.job().train)
    precision = Precision.choose(options.precision, DEVICE)
    set_tf32(DEVICE, options.tf32)
    size = chunk_positions(head.vocabulary, DEVICE)
    for batch in batches(setting):
        target = known(setting.teacher, head, batch, precision)
        for start in range(0, len(batch), size):
            target.chunk(slice(start, min(start + size, len(batch))))
        yield


def batches(setting: Setting) -> Iterator[Batch]:
    """The batches that every loop takes, of text alone."""
    steps = training_batches(PlainText(setting.corpus), required(setting.job().train), range(setting.pace.total))
    return (batch.to(DEVICE) for (batch,) in steps)


@torch.no_grad()
def known(teacher: PreTrainedModel, head: Head, batch: Batch, precision: Precision) -> HiddenTarget:
    """What the teacher knows of a batch: hidden states, of which the fused pass makes logits chunk by chunk."""
    hidden_ND = target_hidden_states(teacher, batch, precision)
    return HiddenTarget(hidden_ND, hidden_ND.new_ones(len(hidden_ND), dtype=torch.float32), head, 1.0)


def advance(steps: Iterator[None], count: int) -> None:
    """Take ``count`` steps."""
    for _ in islice(steps, count):
        pass


# ---------------------------------------------------------------------- the four parts


def against_plain(scale: Scale, machine: Machine, pool: Executor) -> str:
    """Our step, and our head alone, against plain cross-entropy: time and peak extra memory."""
    rows, notes = [], []
    for name in ("step", "head"):
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            task = speed.TASKS[name](scale.wide, Path(folder))
            task = replace(task, variants={each: task.variants[each] for each in (PLAIN, RECORDS)})
            memory = speed.memories(name, scale.wide, task, pool)
            pair = speed.measured(name, task, memory, machine, scale.wide.rounds)
        rows += pair
        notes.append(f"- {name}: on records it takes {compared(*pair)}.")
    return "\n".join([render(rows), "", *notes])


def compared(plain: Row, ours: Row) -> str:
    """Time and memory of one row as shares of another's."""
    timing = ours.timing
    time_share = f"{1 / timing.speed:.2f} ({1 / timing.fastest:.2f}-{1 / timing.slowest:.2f}) of the time of plain"
    if not plain.memory or ours.memory is None:
        return f"{time_share} cross-entropy"
    return f"{time_share} cross-entropy and {ours.memory / plain.memory:.2f} of its extra memory"


def loops(setting: Setting, machine: Machine) -> tuple[list[Row], str]:
    """From the cache, on cross-entropy alone, and with the live teacher; the run from the cache stays for its profile.

    A ratio below is of medians over the rounds, as the table's are.
    """
    print(f"measuring: loops, {setting.name}", file=sys.stderr, flush=True)
    steps, plain = setting.pace.steps, setting.job(loss={"alpha": 1.0})
    walks = {
        CACHE: walk(setting, CACHE, setting.job(), setting.source()),
        HARD: walk(setting, HARD, plain, PlainText(setting.corpus)),
    }
    runs: dict[str, Run] = {name: partial(each.take, steps) for name, each in walks.items()}
    others = {LIVE: live(setting, setting.student(), setting.job()), TEACHER: listening(setting)}
    runs |= {name: partial(advance, each, steps) for name, each in others.items()}
    timings = per_step(interleave(runs, setting.pace.rounds), steps)
    for each in walks.values():
        each.finish()
    student, teacher = setting.student_flops, setting.teacher_flops
    floors = {
        CACHE: machine.floor(student, setting.adam_bytes),
        HARD: machine.floor(student, setting.adam_bytes),
        LIVE: machine.floor(student + teacher, setting.adam_bytes),
        TEACHER: machine.floor(teacher, 0.0),
    }
    return table_rows(setting, timings, floors), about_loops(setting, timings)


def about_loops(setting: Setting, timings: dict[str, Timing]) -> str:
    """The floor first, then what was measured beside what was asked for."""
    student, teacher = setting.student_flops / 1e9, setting.teacher_flops / 1e9
    hard, online = timings[HARD], timings[LIVE]
    alone = 1 / timings[TEACHER].speed
    return (
        f"- {setting.name}: by its arithmetic a step takes {student:,.2f} GFLOP of the student's and {teacher:,.2f} of "
        f"the teacher's, {1 + teacher / student:.2f} times as much in all. Measured, the teacher alone takes "
        f"{alone:.2f} times as long as a step from the cache, so that the loop from the cache should be at least "
        f"{1 + alone:.2f} times as fast as the live one: it is {spread(online)} times as fast, and {spread(hard)} "
        f"times as fast as on cross-entropy alone."
    )


def spread(other: Timing) -> str:
    """How many times as fast the first variant is as this one: median, least and most."""
    return f"{1 / other.speed:.2f} ({1 / other.fastest:.2f}-{1 / other.slowest:.2f})"


def per_step(timings: dict[str, Timing], steps: int) -> dict[str, Timing]:
    """The same for one of ``steps``."""
    return {name: replace(each, seconds=each.seconds / steps) for name, each in timings.items()}


def table_rows(setting: Setting, timings: dict[str, Timing], floors: dict[str, float]) -> list[Row]:
    tokens = setting.sizes.batch * (setting.sizes.length - 1)  # the last one of a sequence has no next
    return [Row(setting.name, name, tokens, timing, None, floors[name]) for name, timing in timings.items()]


def profile(setting: Setting) -> str:
    """Where the time of the loop from the cache went, as its run folder tells it."""
    found = json.loads((setting.folder / CACHE / "profile.json").read_text(encoding="utf-8"))
    lines = ["| phase | times | seconds | ms each | share |", "|---|--:|--:|--:|--:|"]
    for phase in found["phases"]:
        numbers = f"{phase['count']} | {phase['seconds']:.3f} | {phase['mean_milliseconds']:.2f} | {phase['share']:.1%}"
        lines.append(f"| {phase['name']} | {numbers} |")
    return "\n".join(lines)


def levers(setting: Setting, machine: Machine) -> str:
    """The loop with one lever more, against the plain one."""
    print(f"measuring: levers, {setting.name}", file=sys.stderr, flush=True)
    walks = {
        name: walk(setting, f"lever {number}", config, setting.source(profile_name))
        for number, (name, (profile_name, config)) in enumerate(levers_of(setting).items())
    }
    runs: dict[str, Run] = {name: partial(each.take, setting.pace.steps) for name, each in walks.items()}
    timings = per_step(interleave(runs, setting.pace.rounds), setting.pace.steps)
    for each in walks.values():
        each.finish()
    floor = machine.floor(setting.student_flops, setting.adam_bytes)
    table = render(table_rows(setting, timings, dict.fromkeys(timings, floor)))
    return f"{table}\n\n{about_parity([each.parity_seconds for each in walks.values()], timings['none'])}"


def levers_of(setting: Setting) -> dict[str, tuple[str, JobConfig]]:
    """The plain job and those with one lever, each with the profile of its cache; one look ahead in each turn."""
    temperatures = [2.0, {"mode": "adversarial"}, {"mode": "lookahead", "interval": setting.pace.steps}]
    threshold: list[dict[str, dict[str, Any]]] = [
        {"train": {"ema_decay": 0.999}},
        {"train": {"optim": "muon"}},
        {"train": {"gradient_checkpointing": "full"}},
        {"train": {"gradient_checkpointing": "sqrt"}},
        {"loss": {"z_loss": 1e-4}},
        {"loss": {"entropy_weighting": 1.0}},
    ]
    tempered = [{"loss": {"temperature": each}} for each in temperatures]
    changes = {"threshold": threshold, "tempered": tempered}
    found = {
        named(each): (name, setting.job(name, **each)) for name, of_profile in changes.items() for each in of_profile
    }
    return {"none": ("threshold", setting.job()), **found}


def named(changes: dict[str, dict[str, Any]]) -> str:
    """A lever as a job says it."""
    ((section, fields),) = changes.items()
    ((field, value),) = fields.items()
    inner = ", ".join(f"{key}: {each}" for key, each in value.items()) if isinstance(value, dict) else None
    return f"{section}.{field}: {f'{{{inner}}}' if inner else value}"


def about_parity(found: list[float], plain: Timing) -> str:
    seconds = median(found)
    return (
        f"- The parity check of 8 tokens at the start of each of these runs took {seconds * 1e3:.1f} ms, as long as "
        f"{seconds / plain.seconds:.2f} plain steps, once."
    )


# ---------------------------------------------------------------------- running them


def bench(scale: Scale) -> str:
    """Measure all of it; the page as text, with the machine above it."""
    hide_progress_bars()
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")  # as training sets it
    machine = measure_machine(scale.wide.torch_dtype, scale.wide.product)
    with fresh_processes(speed.PRELOAD) as pool:
        steps = against_plain(scale, machine, pool)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        setting = example(scale, Path(first))
        found = [loops(each, machine) for each in (setting, wide(scale, Path(second)))]
        phases, costs = profile(setting), levers(setting, machine)
    table = render([row for rows, _ in found for row in rows])
    sections = {
        "Step and head": steps,
        "The loop": "\n".join([table, "", *(about for _, about in found)]),
        "Where its time goes": f"The example's loop from the cache, {setting.pace.total} steps.\n\n{phases}",
        "What each lever costs": costs,
    }
    pages = [f"## {title}\n\n{text}" for title, text in sections.items()]
    last = f"All of it took {time.monotonic() - began:.0f} s."
    return "\n\n".join(["\n".join([*speed.heading(machine, scale.wide), "", about_example(scale)]), *pages, last])


def about_example(scale: Scale) -> str:
    sizes, pace, other = scale.example, scale.example_pace, scale.wide_pace
    return (
        f"The example: teacher {speed.named(sizes.teacher)}, student {speed.named(sizes.student)}, vocabulary "
        f"{sizes.vocabulary:,}, {sizes.batch} sequences of {sizes.length} tokens. Loops: {pace.rounds} rounds of "
        f"{pace.steps} steps, {other.rounds} of {other.steps} at the wide vocabulary; ms are of one step."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what training costs, as ratios measured in one run.")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that it works, and nothing else")
    parser.add_argument("--out", type=Path, help="write the same text to this file too")
    arguments = parser.parse_args()
    one_heap()
    text = bench(SMALL if arguments.small else FULL)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
