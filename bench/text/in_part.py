"""Capture a part of a large text, extend it, verify it and train on it, and measure the memory.

    python bench/text/in_part.py [--tokens 2e6] [--sequences 1536] [--out FILE]

The text is that of ``bench/text/tokens.py``: files with about ``--tokens`` tokens. The teacher is a
random Llama of one layer with the example's tokenizer. Each row is a process of its own, started as
a user starts it:

    capture   kd run: tokenizes all of the text, and captures its first ``--sequences`` sequences
    extend    kd run: captures twice as many, and takes the first ones (cache.extends)
    verify    kd cache verify: reads every byte of the second cache
    train     kd run: trains a student from it

The peak is that of the process and of those that it started, imports included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from bench.speed import read_cpu_name
from bench.support.paths import AUSTEN, ROOT
from bench.text.tokens import LENGTH, MB, write_text
from kd.models.tokenizers import load_tokenizer

#: The standard deviation of the teacher's weights. Its distributions are as peaked as those of a
#: trained one, and so are its records: a cache must be large enough to be extended.
SPREAD = 0.6
#: The held-out sequences.
HELD_OUT = 64
#: The steps of the student, and the sequences of each.
STEPS = 20
BATCH = 8


@dataclass(frozen=True)
class Stage:
    """One process: the tokens that it is about, its seconds, and its peak of memory in bytes."""

    name: str
    tokens: int
    seconds: float
    peak: int


def run_stage(name: str, tokens: int, *words: str) -> Stage:
    """Run ``kd`` with ``words`` and measure it; raises ``RuntimeError`` where it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "services.terminal.cli", *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    _, status, used = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"kd {' '.join(words)} failed.")
    return Stage(name, tokens, time.perf_counter() - began, used.ru_maxrss * 1024)


def write_teacher(folder: Path) -> None:
    """Write a random teacher of one layer, and the example's tokenizer."""
    tokenizer = load_tokenizer(AUSTEN / "teacher")
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=SPREAD,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_job(folder: Path, sequences: int, **changes: Any) -> dict[str, Any]:
    """Make the job that captures ``sequences`` sequences of the text in ``folder``."""
    return {
        "kind": "precompute",
        "teacher": {"model": str(folder / "teacher")},
        "data": {
            "train": str(folder / "text"),
            "sequence_length": LENGTH,
            "max_train_samples": sequences,
            "max_eval_samples": HELD_OUT,
        },
        **changes,
    }


def measure_stages(folder: Path, sequences: int, tokens: int) -> list[Stage]:
    """Run all stages on the text and the teacher in ``folder``."""
    home = folder / "home"

    def run(name: str, count: int, job: dict[str, Any]) -> Stage:
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job), encoding="utf-8")
        place = ("--home", str(home), "--run-dir", str(folder / "runs" / name))
        return run_stage(name, count, "run", str(path), *place)

    stages = [run("capture", tokens, make_job(folder, sequences))]
    (first,) = list_caches(home)
    extends = {"cache": {"extends": first}}
    stages.append(run("extend", sequences * LENGTH, make_job(folder, 2 * sequences, **extends)))
    (second,) = list_caches(home) - {first}
    place = ("--home", str(home))
    stages.append(run_stage("verify", 2 * sequences * LENGTH, "cache", "verify", second, *place))
    student = {"init": {"layers": 1, "hidden_size": 32}}
    train = {"max_steps": STEPS, "batch_size": BATCH}
    job = make_job(folder, 2 * sequences, kind="distill", student=student, train=train, **extends)
    stages.append(run("train", STEPS * BATCH * LENGTH, job))
    return stages


def list_caches(home: Path) -> set[str]:
    """List the fingerprints of the caches below ``home``."""
    return {each.parent.name for each in (home / "caches").glob("*/manifest.json")}


def render(stages: list[Stage]) -> list[str]:
    """The stages as a table, in Markdown."""
    return [
        "| stage | tokens | seconds | peak, MB |",
        "|---|--:|--:|--:|",
        *(
            f"| {each.name} | {each.tokens:,} | {each.seconds:,.0f} | {each.peak / MB:,.0f} |"
            for each in stages
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=2e6)
    parser.add_argument("--sequences", type=int, default=1536)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-in-part-") as name:
        folder = Path(name)
        (folder / "text").mkdir()
        write_text(folder / "text", arguments.tokens)
        write_teacher(folder / "teacher")
        stages = measure_stages(folder, arguments.sequences, int(arguments.tokens))
    machine = f"Machine: {read_cpu_name()}, {os.cpu_count()} cores"
    about = f"{arguments.sequences:,} of the sequences of {LENGTH} tokens are captured first"
    page = "\n".join([f"{machine}; {about}.", "", *render(stages)]) + "\n"
    sys.stdout.write(page)
    if arguments.out:
        arguments.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
