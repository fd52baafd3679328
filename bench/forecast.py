"""Compare what ``kd estimate`` and ``kd plan`` tell with what a job then takes, on this device.

    python bench/forecast.py [--jobs example fresh short cut lora] [--teacher FOLDER]
                             [--gguf FILE] [--out FILE]

The jobs:

    example   the job of examples/austen, with fewer steps
    fresh     a new student of six layers in rows of 128 tokens
    cut       a student of eight layers cut out of a larger teacher: the model in ``--teacher``, for
              instance SmolLM2-135M; without the flag this job is left out
    short     adapters on the example's teacher, with packed rows of 256 tokens
    lora      the same with rows of 2,048 tokens

Each job is rehearsed in one process; capture and training then run in processes of their own, as in
the service. The row ``plan`` is the training with the best settings of ``kd plan``, whose
arithmetic gets the rates of this processor (``bench.gpu.device_rates``) in place of a GPU's.
The memory is that above the imports: the peak that was told and the peak of the process, each less
what the process took after its imports. The seconds are those of reading the text (capture) and of
all steps (training).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch

from bench.gpu.device_rates import measure_rates
from bench.speed import read_cpu_name
from bench.support.paths import AUSTEN, HELD_OUT, ROOT
from bench.support.timing import MIB, fresh_processes
from kd.capture.estimate.text import TokenCounter
from kd.config.job import JobConfig
from kd.config.jobfile import load_config, parse_config
from kd.forecast.rehearsal import estimate_job
from kd.forecast.strategies import DeviceGroup, plan_job
from kd.loss.chunk_size import choose_cpu_chunk_positions
from kd.memory.devices import CUDA_CONTEXT
from kd.memory.step_memory import read_peak_memory, read_resident_memory, reset_peak_memory
from kd.models.loading import hide_progress_bars
from kd.pipeline import run_stage
from kd.progress import Event, Monitor

CPU = torch.device("cpu")
#: Layers of the student that is cut out of the larger teacher.
CUT_LAYERS = 8
COLUMNS = ("job", "phase", "memory told", "measured", "ratio", "seconds told", "measured", "ratio")


def make_jobs(arguments: argparse.Namespace) -> dict[str, JobConfig]:
    """Make the jobs that the flags name."""
    text = {
        "train": str(AUSTEN / "text/prideprejudice.txt"),
        "validation": str(HELD_OUT),
    }
    train = {"max_steps": arguments.steps, "eval_steps": arguments.steps}
    jobs = {"example": load_config(AUSTEN / "job.yaml", [
        f"teacher.model={AUSTEN / 'teacher'}", f"data.train={text['train']}",
        f"data.validation={text['validation']}", "data.max_train_samples=128",
        "data.max_eval_samples=16", f"train.max_steps={4 * arguments.steps}",
        f"train.eval_steps={4 * arguments.steps}", "train.warmup_steps=1",
    ])}  # fmt: skip
    jobs["fresh"] = parse_config({
        "teacher": {"model": str(AUSTEN / "teacher")},
        "student": {"init": {"layers": 6, "hidden_size": 384}},
        "data": {**text, "sequence_length": 128, "max_train_samples": 96, "max_eval_samples": 8},
        "train": {**train, "batch_size": 8},
    })  # fmt: skip
    if arguments.teacher is not None:
        jobs["cut"] = parse_config({
            "teacher": {"model": arguments.teacher, "gguf_file": arguments.gguf, "batch_size": 4},
            "student": {"from_teacher": {"layers": CUT_LAYERS}},
            "data": {
                **text, "sequence_length": 256, "max_train_samples": 24, "max_eval_samples": 4,
            },
            "train": {**train, "batch_size": 4},
        })  # fmt: skip
    jobs["short"] = parse_config({
        "teacher": {"model": str(AUSTEN / "teacher"), "batch_size": 4},
        "student": {"model": str(AUSTEN / "teacher"), "lora": {"rank": 16}},
        "data": {**text, "sequence_length": 256, "max_train_samples": 24, "max_eval_samples": 4},
        "train": {**train, "batch_size": 4},
    })  # fmt: skip
    jobs["lora"] = parse_config({
        "teacher": {"model": str(AUSTEN / "teacher"), "batch_size": 2},
        "student": {"model": str(AUSTEN / "teacher"), "lora": {"rank": 16}},
        "data": {**text, "sequence_length": 2048, "max_train_samples": 12, "max_eval_samples": 2},
        "train": {**train, "batch_size": 4},
    })  # fmt: skip
    return {name: job for name, job in jobs.items() if name in arguments.jobs}


# ---------------------------------------------------------------------- told and measured


def tell(config: dict[str, Any], home: str) -> dict[str, tuple[float, float]]:
    """Forecast the job: bytes above the imports, and seconds, by phase."""
    hide_progress_bars()
    before = read_resident_memory()
    forecast = estimate_job(parse_config(config), Path(home))
    capture, training = forecast.capture, forecast.training
    assert capture is not None and capture.seconds is not None, "every job here captures"
    assert training is not None, "every job here trains"
    # Without the evaluations.
    seconds = training.steps * training.step_seconds
    return {
        "capture": (forecast.capture_memory_bytes - before, capture.seconds),
        "training": (training.memory_bytes - before, seconds),
    }


def tell_plan(config: dict[str, Any], home: str) -> tuple[tuple[float, float], dict[str, Any]]:
    """Plan the job for a GPU as fast as this processor: bytes, seconds and the best settings."""
    hide_progress_bars()
    teacher = parse_config(config).teacher_files
    assert teacher is not None, "every job here captures a teacher"
    chunk = choose_cpu_chunk_positions(TokenCounter.find(teacher, ROOT).size)
    train = config["train"] | {"precision": "fp32", "logits_chunk": chunk}
    job = parse_config(config | {"train": train})
    best = plan_job(job, ROOT, Path(home), DeviceGroup(measure_rates(CPU), 1)).strategies[0]
    settings = {
        name: getattr(best, name)
        for name in ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
    }
    return (best.memory_bytes - CUDA_CONTEXT, best.seconds), settings


def measure(config: dict[str, Any], home: str, stage: str) -> tuple[float, float]:
    """Run one stage: its peak above the imports, in bytes, and the seconds of its phase."""
    times: dict[str, float] = {}
    peaks: list[int] = []

    def listen(event: Event) -> None:
        phase = event.data.get("phase")
        # The phase ends here: what a report or a check takes later is not part of it.
        if phase in ("checking fidelity", "saving"):
            peaks.append(read_peak_memory(CPU))
        if event.type == "stage" and phase is not None:
            times.setdefault(phase, time.monotonic())

    before = read_resident_memory()
    reset_peak_memory(CPU)
    run = Path(home) / "run"
    run_stage(stage, parse_config(config), Path(home), run, Monitor(listen))
    if stage == "precompute":
        return peaks[0] - before, times["checking fidelity"] - times["capturing"]
    profile = json.loads((run / "profile.json").read_text(encoding="utf-8"))
    seconds = sum(
        each["seconds"]
        for each in profile["phases"]
        if each["name"] not in ("evaluation", "checkpoint")
    )
    return peaks[0] - before, seconds


def compare(pool: Executor, name: str, config: JobConfig) -> list[list[str]]:
    """The rows of a job."""
    job = config.model_dump(mode="json")
    with tempfile.TemporaryDirectory() as home:
        told = pool.submit(tell, job, home).result()
        rows = []
        for phase, stage in (("capture", "precompute"), ("training", "train")):
            memory, seconds = pool.submit(measure, job, home, stage).result()
            rows.append(format_row(name, phase, told[phase], (memory, seconds)))
        planned, settings = pool.submit(tell_plan, job, home).result()
        print(name, settings, file=sys.stderr)
        changed = job | {"train": job["train"] | settings}
        shutil.rmtree(Path(home) / "run")
        rows.append(
            format_row(name, "plan", planned, pool.submit(measure, changed, home, "train").result())
        )
    return rows


def format_row(
    name: str, phase: str, told: tuple[float, float], measured: tuple[float, float]
) -> list[str]:
    """Format one row: sizes in MiB, times in seconds, and told over measured."""
    cells = [name, phase]
    for place, unit in enumerate((MIB, 1.0)):
        digits = ".0f" if place == 0 else ".1f"
        cells += [f"{told[place] / unit:{digits}}", f"{measured[place] / unit:{digits}}"]
        cells.append(f"{told[place] / measured[place]:.2f}")
    return cells


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=["example", "fresh", "short", "cut", "lora"])
    parser.add_argument("--teacher", help="folder of the larger teacher of the job cut")
    parser.add_argument("--gguf", help="GGUF file in that folder, where it has no safetensors")
    parser.add_argument("--steps", type=int, default=6, help="steps of a training (example: 4x)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    lines = [f"{read_cpu_name()}, {torch.get_num_threads()} threads; memory in MiB.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "--:|" * (len(COLUMNS) - 2)]
    with fresh_processes(["torch", "kd.forecast.rehearsal", "kd.forecast.strategies"]) as pool:
        for name, job in make_jobs(arguments).items():
            lines += [f"| {' | '.join(row)} |" for row in compare(pool, name, job)]
            print("\n".join(lines[-3:]), file=sys.stderr)
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
