"""What does a teacher with another tokenizer teach: bits per byte of held-out text.

    python bench/text/other_tokenizer.py [--teacher FOLDER [--gguf FILE] --tokenizer FOLDER|FILE]
                                    [--seeds 3] [--steps 100] [--work FOLDER] [--out FILE] [--quick]

A small fresh student with a tokenizer of its own learns the novels of the example from one cache of
the teacher, in three ways: from the text alone (cross-entropy), from the likelihoods of common
spans (alm) and from projected records (projected). All read the same rows in the same order, for
equal steps. --tokenizer is a folder with a tokenizer.json, or a file of byte pairs (.tiktoken) with
the rules of Qwen 2.5. Perplexities of two tokenizers cannot be compared: bits per byte can.

A stopped run continues in the same --work. --quick takes the example's teacher, a tokenizer that it
trains on a novel, and a few steps.
"""

from __future__ import annotations

import argparse
import base64
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence, Split
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from bench.speed import read_cpu_name
from bench.support.paths import AUSTEN
from bench.temperature import run_or_load
from kd.evaluation.in_depth import BASELINE

#: What splits text into words, and the special tokens, of Qwen 2.5.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: Rows of the text that are captured to train on, and their tokens.
ROWS, LENGTH = 768, 128
QUICK_STEPS = 12
#: The name of each way to learn, and loss.tokenizers.
WAYS = {"cross-entropy": None, "alm": "alm", "projected": "projected"}


class _BytePairs(TikTokenConverter):  # type: ignore[misc]
    """The converter, without the package tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        lines = Path(tiktoken_url).read_text(encoding="ascii").split("\n")
        pairs = (line.split() for line in lines if line)
        return {base64.b64decode(text): int(rank) for text, rank in pairs}


def convert_byte_pairs(path: Path) -> Tokenizer:
    """Make the tokenizer of a .tiktoken file with the rules of Qwen 2.5."""
    made = _BytePairs(str(path)).tokenizer()
    made.normalizer = normalizers.NFC()
    words = [Split(Regex(QWEN_WORDS), "isolated"), ByteLevel(False, use_regex=False)]
    made.pre_tokenizer = Sequence(words)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, normalized=False) for each in QWEN_SPECIAL])
    return made


def train_pieces() -> Tokenizer:
    """Train a tokenizer with the rules of SentencePiece on a novel of the example."""
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=[QWEN_SPECIAL[0], *fallback], show_progress=False
    )
    made.train([str(AUSTEN / "text" / "persuasion.txt")], trainer)
    return made


def save_tokenizer(arguments: argparse.Namespace, work: Path) -> Path:
    """Save the student's tokenizer; return its folder."""
    given: Path | None = arguments.tokenizer
    if given is not None and given.is_dir():
        return given
    folder = work / "tokenizer"
    if not folder.is_dir():
        made = train_pieces() if given is None else convert_byte_pairs(given)
        ends = dict.fromkeys(("eos_token", "pad_token"), QWEN_SPECIAL[0])
        PreTrainedTokenizerFast(tokenizer_object=made, **ends).save_pretrained(folder)
    return folder


def make_job(arguments: argparse.Namespace, tokenizer: Path, way: str, seed: int) -> dict[str, Any]:
    """Return the job of one student; that of alm also trains the one of cross-entropy alone."""
    quick = arguments.quick
    steps = arguments.steps
    batch = 8
    teacher = {"model": str(AUSTEN / "teacher" if quick else arguments.teacher)}
    if arguments.gguf is not None and not quick:
        teacher["gguf_file"] = arguments.gguf
    return {
        "name": f"{way}-{seed}",
        "teacher": teacher,
        "student": {
            "init": {"layers": 2, "hidden_size": 64, "tokenizer": str(tokenizer)},
        },
        "data": {
            "train": [str(AUSTEN / "text" / "emma.txt")],
            "validation": [str(AUSTEN / "text" / "northangerabbey.txt")],
            "sequence_length": LENGTH,
            "max_train_samples": 96 if quick else ROWS,
            "max_eval_samples": 8 if quick else 64,
        },
        "cache": {"shard_sequences": 64},
        "loss": {"tokenizers": WAYS[way], "alpha": arguments.alpha},
        "train": {
            "max_steps": steps, "batch_size": batch, "learning_rate": arguments.rate,
            "warmup_steps": steps // 10, "eval_steps": steps, "save_steps": 10, "seed": seed,
        },
        "evaluation": {"continuations": 0, "samples": 0, "baseline": way == "alm"},
    }  # fmt: skip


def measure_seed(
    arguments: argparse.Namespace, tokenizer: Path, seed: int, work: Path
) -> dict[str, float]:
    """Return the bits per byte of each student; a stopped run goes on."""
    found = {}
    for way in ("alm", "projected"):
        job = make_job(arguments, tokenizer, way, seed)
        report = run_or_load(job, work / "runs" / job["name"], work)
        measured = report["evaluation"]["models"]
        found[way] = report["student_bits_per_byte"]
        if way == "alm":
            found["cross-entropy"] = measured[BASELINE]["bits_per_byte"]
        found["teacher"] = report["teacher_bits_per_byte"]
        print(f"seed {seed}: {found}", file=sys.stderr, flush=True)
    return found


def render(found: list[dict[str, float]], arguments: argparse.Namespace) -> str:
    """Return the table, and which way is best in the mean."""
    names = (*WAYS, "teacher")
    chosen = f"{arguments.steps} steps, alpha {arguments.alpha:g}, rate {arguments.rate:g}"
    lines = [
        f"Machine: {read_cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}; {chosen}",
        "",
        "Bits per byte of held-out text:",
        "",
        f"| seed | {' | '.join(names)} |",
        f"|---|{'--:|' * len(names)}",
    ]
    for seed, each in enumerate(found):
        lines.append(f"| {seed} | {' | '.join(f'{each[name]:.4f}' for name in names)} |")
    means = {name: statistics.fmean(each[name] for each in found) for name in WAYS}
    lines.append(f"| mean | {' | '.join(f'{means[name]:.4f}' for name in WAYS)} | |")
    best = min(means, key=means.__getitem__)
    gains = [each["cross-entropy"] - each[best] for each in found]
    lines += ["", f"Best: {best}, {min(gains):.4f} to {max(gains):.4f} below cross-entropy alone."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all seeds, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--teacher", type=Path, help="folder of the teacher")
    parser.add_argument("--gguf", help="name of its GGUF file, if its weights are in one")
    parser.add_argument("--tokenizer", type=Path, help="that of the student")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--work", type=Path, help="folder in which a stopped run continues")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="the example's teacher, few steps")
    arguments = parser.parse_args()
    if None in (arguments.teacher, arguments.tokenizer) and not arguments.quick:
        parser.error("--teacher and --tokenizer are required without --quick")
    if arguments.quick:
        arguments.steps = QUICK_STEPS
    work = arguments.work or Path(tempfile.mkdtemp(prefix="potstill-tokenizers-"))
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(arguments, work)
    found = [measure_seed(arguments, tokenizer, seed, work) for seed in range(arguments.seeds)]
    text = render(found, arguments)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
