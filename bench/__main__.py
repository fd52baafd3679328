"""List the benches, or run one by its name: ``make bench``, ``make bench NAME=reader``.

    python -m bench [NAME [FLAG ...]]

The flags go to the script of the bench, whose ``--help`` explains them. docs/benchmarks has what
the benches printed. The times are those of two cores without other work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from bench.support.paths import ROOT


@dataclass(frozen=True)
class Bench:
    """A bench: its script with the flags that it always gets, what it shows, how long it takes."""

    command: str
    shows: str
    takes: str


BENCHES = {
    "speed": Bench(
        "bench/speed.py",
        "what capture, a step, the LM head and loading cost, as ratios within one run",
        "minutes",
    ),
    "reader": Bench(
        "bench/reader.py",
        "how fast a cache is read, cold and warm, beside a plain read of its files",
        "minutes",
    ),
    "tokens": Bench(
        "bench/text/tokens.py",
        "how fast text is tokenized into a token store, beside the bare tokenizer, and its memory",
        "minutes",
    ),
    "context": Bench(
        "bench/text/context.py",
        "whether a student learns an instruction that only its teacher reads",
        "hours",
    ),
    "other-tokenizer": Bench(
        "bench/text/other_tokenizer.py",
        "what a teacher with another tokenizer teaches, in bits per byte of held-out text",
        "an hour",
    ),
    "in-part": Bench(
        "bench/text/in_part.py",
        "the memory of a part of a large text: captured, extended, verified and trained on",
        "minutes",
    ),
    "capture": Bench(
        "bench/capture.py",
        "how much of its work a capture hides behind a simulated device",
        "3 minutes",
    ),
    "capture-workers": Bench(
        "bench/devices/capture_workers.py",
        "what two and four workers of a capture gain, and what would stop more of them",
        "15 minutes",
    ),
    "dataloader": Bench(
        "bench/loops/dataloader.py",
        "a DataLoader with workers over a cache, beside the reader of the training loop",
        "minutes",
    ),
    "manifest": Bench(
        "bench/loops/manifest.py",
        "how a cache of 1e12 tokens opens, and how fast the sequences of a step are found",
        "2 minutes",
    ),
    "store": Bench(
        "bench/stores/reading.py",
        "how fast a student reads its cache from a bucket, beside the disk",
        "2 minutes",
    ),
    "records": Bench(
        "bench/records.py",
        "bytes and closeness of caches, beside the formats of other tools",
        "minutes",
    ),
    "coding": Bench(
        "bench/coding.py",
        "bytes of the ids of a cache in several codings; FLAGS is the folder of the cache",
        "minutes",
    ),
    "dither": Bench(
        "bench/dither.py",
        "bytes, noise and bias of records of profile threshold, beside those of version 0.2.0",
        "minutes",
    ),
    "bias": Bench(
        "bench/bias.py",
        "the bias of sampled records on real text, by decade of probability",
        "minutes",
    ),
    "served": Bench(
        "bench/teachers/served.py",
        "noise and bias of records of a served teacher, for several proposals and numbers of ids",
        "90 minutes",
    ),
    "several-teachers": Bench(
        "bench/teachers/several.py",
        "one student of two teachers: by sources or as a mixture, by tokens or by domains",
        "20 minutes",
    ),
    "quality": Bench(
        "bench/quality.py",
        "students of each kind of record, and their shares of full distillation",
        "hours",
    ),
    "peers": Bench(
        "bench/peers/compare.py",
        "our program beside TRL, DistillKit, axolotl and a plain loop; needs a package index",
        "an hour",
    ),
    "train": Bench(
        "bench/train.py",
        "the training loop: against cross-entropy, against a live teacher, and each lever",
        "10 minutes",
    ),
    "saving": Bench(
        "bench/loops/saving.py",
        "what checkpoints cost a training whose disk is slow",
        "8 minutes",
    ),
    "packed": Bench(
        "bench/loops/packed.py",
        "memory and time of packed rows, beside rows of one document",
        "minutes",
    ),
    "temperature": Bench(
        "bench/temperature.py",
        "learned temperatures, beside the best fixed one",
        "an hour",
    ),
    "products": Bench(
        "bench/products.py",
        "errors of the LM head's products, and the bytes that chunks of logits move",
        "minutes",
    ),
    "scale": Bench(
        "bench/devices/scale.py",
        "what two and four ranks gain on this machine, and what their exchange costs",
        "minutes",
    ),
    "hosts": Bench(
        "bench/devices/hosts.py --scaling",
        "bytes and speed of a training on two and four hosts, beside the formulas; needs root",
        "7 minutes",
    ),
    "forecast": Bench(
        "bench/forecast.py",
        "what kd estimate and kd plan tell, beside what some jobs take",
        "10 minutes",
    ),
    "roofline": Bench(
        "bench/roofline.py",
        "the expected rates of some GPUs; FLAGS=--measure runs the stages here, beside them",
        "a minute",
    ),
    "launches": Bench(
        "bench/gpu/launches.py",
        "launches and waits of the hot path on a GPU, counted without one",
        "a minute",
    ),
    "kernels": Bench(
        "bench/gpu/kernel_builds.py",
        "the GPU kernels as compiled for some kinds of GPU; needs no GPU",
        "a minute",
    ),
    "gpu": Bench(
        "bench/gpu/everything.py --out gpu-pages",
        "on a machine with a GPU: its tests, rates, speed, and a job of real size",
        "9 minutes",
    ),
    "table": Bench(
        "bench/gpu/table.py",
        "RS-KD's table: loss, KL, calibration and acceptance of students of each kind of record",
        "8 minutes on a GPU, hours without",
    ),
    "service": Bench(
        "bench/service.py",
        "the API under load, with thousands of jobs stored and hundreds of streams open",
        "minutes",
    ),
    "interface": Bench(
        "bench/interface/dashboard.py",
        "what a user of the dashboard waits for, in headless Chromium",
        "2 minutes",
    ),
}


def render_list() -> str:
    """One line for each bench: its name, its time, and what it shows."""
    lines = [f"  {name:16} {each.takes:11} {each.shows}" for name, each in BENCHES.items()]
    use = 'Run one with `make bench NAME=reader`; FLAGS="--out table.md" goes to its script.'
    return "\n".join([use, "", *lines])


def run(name: str, flags: list[str]) -> int:
    """Run the bench with this name, and return its exit status."""
    script, *given = BENCHES[name].command.split()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(ROOT / script), *given, *flags]
    return subprocess.run(command, env=environment, check=False).returncode


def main(words: list[str]) -> int:
    """Run the bench that ``words`` begin with; without words, list all."""
    if not words or words[0] in ("-h", "--help"):
        print(render_list())
        return 0
    if words[0] not in BENCHES:
        print(f"There is no bench {words[0]!r}.\n{render_list()}", file=sys.stderr)
        return 2
    return run(words[0], words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
