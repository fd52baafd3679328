"""Measure what training costs: the fused step, the loop with and without a teacher, and each lever.

    python bench/train.py [--small] [--out FILE]

One run with five parts. Each compares variants that take turns (``bench/support/timing.py``):

    step and head   our step on a teacher's records against a step on plain cross-entropy with all
                    logits: time, and extra memory at the peak (``bench/speed.py`` explains sizes
                    and floors)
    loops           the loop of kd.training.loop from a cache, the same loop on cross-entropy alone
                    (alpha 1, text without records), and distillation with the live teacher in the
                    step
    profile         where the time of the loop from the cache goes: profile.json of its run
    levers          the same loop with one more lever, named by its field in a job
    packed rows     memory and time of rows of many documents (``bench/loops/packed.py``)

The live teacher's loop does only what is necessary: the same batches, read ahead; the teacher's
forward pass without a gradient; forward KL to its whole distribution, one chunk of logits at a
time, by the same fused pass; the same student, optimiser and schedule. It has no checks, reports or
checkpoints, unlike the loop of kd.training.loop, so the advantage of the cache is, if anything,
understated.

The floor of a loop's step is the arithmetic of its models at this machine's rate for large
products, and the bytes of AdamW: 3 F for the student (for each product of the forward pass two in
the backward pass), and F for a live teacher, with F as in ``bench/speed.py``. On any machine the
cache should save at least the teacher's time: if the teacher alone takes t times as long as a step
from the cache, the cache should be 1 + t times as fast as the live loop.

Two settings: the example's teacher and text (examples/austen), and random Llamas with a vocabulary
of 49,152.
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

import torch
from torch import nn
from transformers import PreTrainedModel

from bench import speed
from bench.loops import packed
from bench.speed import ALPHA, DEVICE, RECORDS, BenchmarkSizes, Runnable
from bench.support.paths import AUSTEN, HELD_OUT
from bench.support.timing import (
    Machine,
    Timing,
    TimingRow,
    fresh_processes,
    interleave,
    measure_machine,
    render_timings,
    use_one_heap,
)
from cache.store import Cache, open_cache
from kd.capture.capturing import capture_cache
from kd.capture.plan import make_capture_plan
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.loss.chunk_size import choose_chunk_positions
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.targets import Targets
from kd.loss.whole_targets import HiddenTarget
from kd.models.lm_head import LMHead, find_lm_head
from kd.models.loading import hide_progress_bars, load_teacher
from kd.models.precision import Precision, allow_tf32, compute_target_hidden_states
from kd.models.teacher_files import TeacherFiles
from kd.models.tokenizers import load_tokenizer
from kd.optim.optimizers import make_optimizer
from kd.optim.schedules import make_scheduler
from kd.progress import SILENT, Event, Monitor
from kd.text.batches import Batch, PlainText, Source
from kd.text.corpus import Corpus, load_corpus
from kd.text.steps.reading import read_training_batches
from kd.training.loop import train

PLAIN = "cross-entropy, all logits"
CACHE = "from the cache"
HARD = "cross-entropy alone"
LIVE = "live teacher in the step"
TEACHER = "teacher alone"
PROFILES = ("threshold", "tempered")
WITHOUT_CONTROL: dict[str, dict[str, Any]] = {"loss": {"tail_control": False}}


@dataclass(frozen=True)
class Pace:
    """The number of rounds, and the steps of each variant in a round."""

    rounds: int
    steps: int

    @property
    def total(self) -> int:
        """Steps of a whole run: ``interleave`` adds one turn before the rounds, to warm up."""
        return (self.rounds + 1) * self.steps


@dataclass(frozen=True)
class Scale:
    """The sizes and paces of both settings.

    ``sequences`` to train on and ``held_out`` sequences are those of the example.
    """

    wide: BenchmarkSizes
    wide_pace: Pace
    example: BenchmarkSizes
    example_pace: Pace
    sequences: int
    held_out: int


EXAMPLE_SIZES = BenchmarkSizes(
    (6, 256), (2, 128), vocabulary=2048, batch=8, dtype=speed.SIZES[DEVICE.type].dtype
)
FULL = Scale(
    replace(speed.SIZES[DEVICE.type], rounds=5), Pace(5, 2), EXAMPLE_SIZES, Pace(15, 10), 64, 16
)
SMALL = Scale(speed.QUICK, Pace(1, 2), replace(EXAMPLE_SIZES, length=32, batch=2), Pace(1, 2), 8, 2)


# ---------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Setting:
    """A teacher, its text, its caches by profile, and a folder for runs."""

    name: str
    sizes: BenchmarkSizes
    pace: Pace
    teacher: PreTrainedModel
    corpus: Corpus
    caches: dict[str, Cache]
    folder: Path

    def student(self) -> PreTrainedModel:
        """Make a fresh student, always with the same weights."""
        return speed.make_llama(self.sizes, self.sizes.student, tie_word_embeddings=True)

    def job(self, profile: str = "threshold", **changes: Any) -> JobConfig:
        """Make a job that trains the student from the cache of ``profile``.

        ``changes`` are the fields to change, by section.
        """
        layers, width = self.sizes.student
        steps = self.pace.total
        schedule = {
            "max_steps": steps,
            "batch_size": self.sizes.batch,
            "eval_steps": steps,
            "save_steps": steps,
        }
        return parse_config(
            {
                "kind": "train",
                "student": {
                    "init": {"layers": layers, "hidden_size": width, "tokenizer": "the teacher's"}
                },
                "data": {"sequence_length": self.sizes.length},
                "cache": {"fingerprint": self.caches[profile].identity.fingerprint},
                "loss": {"alpha": ALPHA, **changes.get("loss", {})},
                "train": {**schedule, "learning_rate": 1e-3, **changes.get("train", {})},
            }
        )

    def source(self, profile: str = "threshold") -> Source:
        """The text with the records of ``profile``."""
        return self.caches[profile]

    @cached_property
    def student_flops(self) -> float:
        """FLOP of a step, without a teacher."""
        return 3.0 * speed.count_forward_flops(self.sizes, self.student())

    @cached_property
    def teacher_flops(self) -> float:
        """FLOP of the teacher's forward pass over the batch of a step."""
        return speed.count_forward_flops(self.sizes, self.teacher)

    @cached_property
    def adam_bytes(self) -> float:
        """Bytes that AdamW reads and writes in a step."""
        return 28.0 * sum(each.numel() for each in self.student().parameters())


def make_example_setting(scale: Scale, folder: Path) -> Setting:
    """Make the setting of the example's own teacher, which reads one of its novels."""
    sizes = scale.example
    job = {
        "kind": "precompute",
        "teacher": {"model": str(AUSTEN / "teacher"), "batch_size": 16},
        "data": {
            "train": str(AUSTEN / "text" / "northangerabbey.txt"),
            "validation": str(HELD_OUT),
            "sequence_length": sizes.length,
            "max_train_samples": scale.sequences,
            "max_eval_samples": scale.held_out,
        },
    }
    tokenizer = load_tokenizer(AUSTEN / "teacher")
    # One of the levers needs the entropies of positions.
    job |= {"loss": {"entropy_weighting": 1.0}}
    jobs = {profile: parse_config(job | {"cache": {"profile": profile}}) for profile in PROFILES}
    section = jobs["threshold"].teacher
    assert section is not None
    teacher = TeacherFiles(section, AUSTEN / "teacher")
    corpus = load_corpus(jobs["threshold"].data, tokenizer)
    plans = {
        profile: make_capture_plan(each, teacher, tokenizer, corpus)
        for profile, each in jobs.items()
    }
    found = {
        profile: capture_cache(plan, folder, SILENT)["fingerprint"]
        for profile, plan in plans.items()
    }
    caches = {profile: open_cache(folder / fingerprint) for profile, fingerprint in found.items()}
    model = load_teacher(teacher, DEVICE)
    return Setting("example", sizes, scale.example_pace, model, corpus, caches, folder)


def make_wide_setting(scale: Scale, folder: Path) -> Setting:
    """Make the setting of random Llamas; the records come from a smaller one, as many of them."""
    sizes = scale.wide
    sequences = speed.make_random_documents(sizes, 4 * sizes.batch)
    caches = {"threshold": speed.seal_cache(sizes, folder, sequences, "threshold")}
    corpus = Corpus(sequences, sequences.select(slice(0)))
    return Setting(
        "wide",
        sizes,
        scale.wide_pace,
        speed.make_frozen_llama(sizes, sizes.teacher),
        corpus,
        caches,
        folder,
    )


# ---------------------------------------------------------------------- loops in turns


class SteppedTraining:
    """A training of kd.training.loop that takes some steps on request, and waits between them.

    It runs in a thread of its own, and only one of the two threads runs at a time, so that several
    trainings can take turns. ``parity_seconds`` is the time of its parity check, from the event
    before the check to the check's own event.
    """

    def __init__(self, training: Callable[[Monitor], Any]) -> None:
        self._training = training
        self._go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None
        self._heard = time.perf_counter()
        self.parity_seconds = 0.0

    def take(self, steps: int) -> None:
        """Take ``steps`` steps; the first starts the training. Raises what the training raises."""
        for _ in range(steps):
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._go.release()
            self._stands.acquire()
            if self._error is not None:
                raise self._error

    def finish(self) -> None:
        """Let the training end, after its last step."""
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
        before = self._heard
        self._heard = time.perf_counter()
        if event.type == "check" and event.data["check"] == "parity":
            self.parity_seconds = self._heard - before
        if event.type == "progress":  # the loop emits one at the end of every step
            self._stands.release()
            self._go.acquire()


def start_stepped_training(
    setting: Setting, name: str, config: JobConfig, source: Source
) -> SteppedTraining:
    """Make a stepped training of ``config`` on ``source``, in a run folder of its own."""
    run_dir = setting.folder / name
    run_dir.mkdir(parents=True)
    student = setting.student()
    vocabulary = setting.sizes.vocabulary
    return SteppedTraining(
        lambda monitor: train(config, source, student, vocabulary, run_dir, monitor)
    )


def distill_live(setting: Setting, student: PreTrainedModel, config: JobConfig) -> Iterator[None]:
    """Distil with the teacher in the step; takes one step for each item."""
    options = config.require_train()
    vocabulary = setting.sizes.vocabulary
    head = find_lm_head(student, vocabulary)
    teacher_head = find_lm_head(setting.teacher, vocabulary)
    optimizer = make_optimizer(student, (), options, DEVICE)
    scheduler = make_scheduler(optimizer, options, setting.pace.total)
    objective = Objective.of(config.loss)
    precision = Precision.choose(options.precision, DEVICE)
    allow_tf32(DEVICE)
    student.train()
    for batch in iterate_batches(setting):
        targets = Targets(
            batch.gold_N, make_teacher_target(setting.teacher, teacher_head, batch, precision)
        )
        hidden_ND = compute_target_hidden_states(student, batch, precision)
        (
            compute_distillation_loss(hidden_ND, head, targets, objective).total / len(batch)
        ).backward()
        nn.utils.clip_grad_norm_(student.parameters(), options.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def run_teacher_alone(setting: Setting) -> Iterator[None]:
    """Do the teacher's part of ``distill_live``: forward pass and distributions by chunks."""
    head = find_lm_head(setting.teacher, setting.sizes.vocabulary)
    options = setting.job().require_train()
    precision = Precision.choose(options.precision, DEVICE)
    allow_tf32(DEVICE)
    size = choose_chunk_positions(head.vocabulary, DEVICE)
    for batch in iterate_batches(setting):
        target = make_teacher_target(setting.teacher, head, batch, precision)
        for start in range(0, len(batch), size):
            target.take_chunk(slice(start, min(start + size, len(batch))))
        yield


def iterate_batches(setting: Setting) -> Iterator[Batch]:
    """Yield the batches that every loop takes, without records."""
    steps = read_training_batches(
        PlainText(setting.corpus), setting.job().require_train(), range(setting.pace.total)
    )
    return (batch.to(DEVICE) for (batch,) in steps)


@torch.no_grad()
def make_teacher_target(
    teacher: PreTrainedModel, head: LMHead, batch: Batch, precision: Precision
) -> HiddenTarget:
    """Make the live teacher's target: hidden states, which the fused pass turns into logits."""
    hidden_ND = compute_target_hidden_states(teacher, batch, precision)
    return HiddenTarget(
        hidden_ND, hidden_ND.new_ones(len(hidden_ND), dtype=torch.float32), head, 1.0
    )


def take_steps(steps: Iterator[None], count: int) -> None:
    """Take ``count`` steps."""
    for _ in islice(steps, count):
        pass


# ---------------------------------------------------------------------- the four parts


def compare_with_plain(scale: Scale, machine: Machine, pool: Executor) -> str:
    """Compare our step, and our LM head alone, with plain cross-entropy: time and extra memory."""
    rows = []
    notes = []
    for name in ("step", "head"):
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            task = speed.TASKS[name](scale.wide, Path(folder))
            task = replace(task, variants={each: task.variants[each] for each in (PLAIN, RECORDS)})
            memory = speed.measure_memories(name, scale.wide, task, pool)
            pair = speed.measure_task(name, task, memory, machine, scale.wide.rounds)
        rows += pair
        notes.append(f"- {name}: on records it takes {format_comparison(*pair)}.")
    return "\n".join([render_timings(rows), "", *notes])


def format_comparison(plain: TimingRow, ours: TimingRow) -> str:
    """Format time and memory of our row as shares of the plain row's."""
    timing = ours.timing
    spread = f"({1 / timing.fastest:.2f}-{1 / timing.slowest:.2f})"
    time_share = f"{1 / timing.speed:.2f} {spread} of the time of plain"
    if not plain.memory or ours.memory is None:
        return f"{time_share} cross-entropy"
    return f"{time_share} cross-entropy and {ours.memory / plain.memory:.2f} of its extra memory"


def measure_loops(setting: Setting, machine: Machine) -> tuple[list[TimingRow], str]:
    """Measure the loop from the cache, on cross-entropy alone, and with the live teacher.

    The run folder of the loop from the cache stays, because ``render_profile`` reads it. Ratios in
    the text are medians over the rounds, like those of the table.
    """
    print(f"measuring: loops, {setting.name}", file=sys.stderr, flush=True)
    steps = setting.pace.steps
    plain = setting.job(loss={"alpha": 1.0})
    walks = {
        CACHE: start_stepped_training(setting, CACHE, setting.job(), setting.source()),
        HARD: start_stepped_training(setting, HARD, plain, PlainText(setting.corpus)),
    }
    runs: dict[str, Runnable] = {name: partial(each.take, steps) for name, each in walks.items()}
    others = {
        LIVE: distill_live(setting, setting.student(), setting.job()),
        TEACHER: run_teacher_alone(setting),
    }
    runs |= {name: partial(take_steps, each, steps) for name, each in others.items()}
    timings = convert_to_per_step(interleave(runs, setting.pace.rounds), steps)
    for each in walks.values():
        each.finish()
    student = setting.student_flops
    teacher = setting.teacher_flops
    floors = {
        CACHE: machine.floor(student, setting.adam_bytes),
        HARD: machine.floor(student, setting.adam_bytes),
        LIVE: machine.floor(student + teacher, setting.adam_bytes),
        TEACHER: machine.floor(teacher, 0.0),
    }
    return make_rows(setting, timings, floors), describe_loops(setting, timings)


def describe_loops(setting: Setting, timings: dict[str, Timing]) -> str:
    """Describe the arithmetic, then the measured ratios beside the expected ones."""
    student = setting.student_flops / 1e9
    teacher = setting.teacher_flops / 1e9
    hard = timings[HARD]
    online = timings[LIVE]
    alone = 1 / timings[TEACHER].speed
    return (
        f"- {setting.name}: by its arithmetic a step takes {student:,.2f} GFLOP of the student's "
        f"and {teacher:,.2f} of the teacher's, {1 + teacher / student:.2f} times as much in all. "
        f"Measured, the teacher alone takes {alone:.2f} times as long as a step from the cache, "
        f"so that the loop from the cache should be at least {1 + alone:.2f} times as fast as "
        f"the live one: it is {format_spread(online)} times as fast, and "
        f"{format_spread(hard)} times as fast as on cross-entropy alone."
    )


def format_spread(other: Timing) -> str:
    """Format the speed of the first variant relative to this one: median, least and most."""
    return f"{1 / other.speed:.2f} ({1 / other.fastest:.2f}-{1 / other.slowest:.2f})"


def convert_to_per_step(timings: dict[str, Timing], steps: int) -> dict[str, Timing]:
    """Convert timings of ``steps`` steps to timings of one step."""
    return {name: replace(each, seconds=each.seconds / steps) for name, each in timings.items()}


def make_rows(
    setting: Setting, timings: dict[str, Timing], floors: dict[str, float]
) -> list[TimingRow]:
    # The last token of a sequence has no next token.
    tokens = setting.sizes.batch * (setting.sizes.length - 1)
    return [
        TimingRow(setting.name, name, tokens, timing, None, floors[name])
        for name, timing in timings.items()
    ]


def render_profile(setting: Setting) -> str:
    """Render the profile of the loop from the cache, read from its run folder."""
    found = json.loads((setting.folder / CACHE / "profile.json").read_text(encoding="utf-8"))
    lines = ["| phase | times | seconds | ms each | share |", "|---|--:|--:|--:|--:|"]
    for phase in found["phases"]:
        times = f"{phase['seconds']:.3f} | {phase['mean_milliseconds']:.2f}"
        lines.append(f"| {phase['name']} | {phase['count']} | {times} | {phase['share']:.1%} |")
    return "\n".join(lines)


def measure_levers(
    setting: Setting, jobs: dict[str, tuple[str, JobConfig]], machine: Machine
) -> tuple[list[TimingRow], str]:
    """Compare the loop with one more lever with the plain loop: rows, and the parity check's cost.

    ``jobs`` has the profile and the job of each lever; the first is the plain loop, named "none".
    """
    print(f"measuring: levers, {setting.name}", file=sys.stderr, flush=True)
    walks = {
        name: start_stepped_training(
            setting, f"lever {number}", config, setting.source(profile_name)
        )
        for number, (name, (profile_name, config)) in enumerate(jobs.items())
    }
    runs: dict[str, Runnable] = {
        name: partial(each.take, setting.pace.steps) for name, each in walks.items()
    }
    timings = convert_to_per_step(interleave(runs, setting.pace.rounds), setting.pace.steps)
    for each in walks.values():
        each.finish()
    floor = machine.floor(setting.student_flops, setting.adam_bytes)
    rows = make_rows(setting, timings, dict.fromkeys(timings, floor))
    return rows, describe_parity([each.parity_seconds for each in walks.values()], timings["none"])


def make_lever_jobs(setting: Setting) -> dict[str, tuple[str, JobConfig]]:
    """Make the plain job and those with one lever, each with the profile of its cache.

    The lever lookahead looks ahead once in each turn.
    """
    temperatures = [
        2.0,
        {"mode": "adversarial"},
        {"mode": "lookahead", "interval": setting.pace.steps},
    ]
    threshold: list[dict[str, dict[str, Any]]] = [
        {"train": {"ema_decay": 0.999}},
        {"train": {"optim": "muon"}},
        {"train": {"gradient_checkpointing": "full"}},
        {"train": {"gradient_checkpointing": "sqrt"}},
        WITHOUT_CONTROL,
        {"loss": {"entropy_weighting": 1.0}},
    ]
    tempered = [{"loss": {"temperature": each}} for each in temperatures]
    changes = {"threshold": threshold, "tempered": tempered}
    found = {
        format_lever(each): (name, setting.job(name, **each))
        for name, of_profile in changes.items()
        for each in of_profile
    }
    return {"none": ("threshold", setting.job()), **found}


def make_control_jobs(setting: Setting) -> dict[str, tuple[str, JobConfig]]:
    """Make the plain job and the one without the control variate, which grows with V."""
    without = ("threshold", setting.job("threshold", **WITHOUT_CONTROL))
    return {"none": ("threshold", setting.job()), format_lever(WITHOUT_CONTROL): without}


def format_lever(changes: dict[str, dict[str, Any]]) -> str:
    """Format a lever as a job file writes it."""
    ((section, fields),) = changes.items()
    ((field, value),) = fields.items()
    inner = (
        ", ".join(f"{key}: {each}" for key, each in value.items())
        if isinstance(value, dict)
        else None
    )
    return f"{section}.{field}: {f'{{{inner}}}' if inner else value}"


def describe_parity(found: list[float], plain: Timing) -> str:
    seconds = median(found)
    return (
        f"- The parity check of 8 tokens at the start of each of these runs took "
        f"{seconds * 1e3:.1f} ms, as long as {seconds / plain.seconds:.2f} plain steps, once."
    )


# ---------------------------------------------------------------------- running them


def measure_all(scale: Scale) -> str:
    """Measure all parts; returns the page as text, with the machine above it."""
    hide_progress_bars()
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")  # as training sets it
    machine = measure_machine(scale.wide.torch_dtype, scale.wide.product)
    with fresh_processes(speed.PRELOAD) as pool:
        steps = compare_with_plain(scale, machine, pool)
        packed_rows = packed.measure_rows(packed.FULL if scale is FULL else packed.SMALL, pool)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        setting = make_example_setting(scale, Path(first))
        wide = make_wide_setting(scale, Path(second))
        found = [measure_loops(each, machine) for each in (setting, wide)]
        phases = render_profile(setting)
        levers, parity = measure_levers(setting, make_lever_jobs(setting), machine)
        of_wide, _ = measure_levers(wide, make_control_jobs(wide), machine)
    costs = f"{render_timings([*levers, *of_wide])}\n\n{parity}"
    table = render_timings([row for rows, _ in found for row in rows])
    about_profile = f"The example's loop from the cache, {setting.pace.total} steps."
    sections = {
        "Step and head": steps,
        "The loop": "\n".join([table, "", *(about for _, about in found)]),
        "Where its time goes": f"{about_profile}\n\n{phases}",
        "What each lever costs": costs,
        "Packed rows": packed_rows,
    }
    pages = [f"## {title}\n\n{text}" for title, text in sections.items()]
    last = f"All of it took {time.monotonic() - began:.0f} s."
    return "\n\n".join(
        [
            "\n".join([*speed.make_heading(machine, scale.wide), "", describe_example(scale)]),
            *pages,
            last,
        ]
    )


def describe_example(scale: Scale) -> str:
    sizes = scale.example
    pace = scale.example_pace
    other = scale.wide_pace
    return (
        f"The example: teacher {speed.format_shape(sizes.teacher)}, student "
        f"{speed.format_shape(sizes.student)}, vocabulary {sizes.vocabulary:,}, "
        f"{sizes.batch} sequences of {sizes.length} tokens. Loops: {pace.rounds} rounds of "
        f"{pace.steps} steps, {other.rounds} of {other.steps} at the wide vocabulary; "
        f"ms are of one step."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure what training costs, as ratios in one run."
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, which show only that it works"
    )
    parser.add_argument("--out", type=Path, help="write the same text to this file too")
    arguments = parser.parse_args()
    use_one_heap()
    text = measure_all(SMALL if arguments.small else FULL)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
