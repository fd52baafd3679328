"""Does a student learn an instruction that only its teacher reads?

    python bench/text/context.py [--teacher FOLDER [--gguf FILE]] [--seeds 3] [--rows 192]
                                 [--work FOLDER] [--out FILE] [--quick]

The teacher writes answers to questions, after an instruction of some 200 tokens. The student is the
teacher itself with adapters, and learns from a cache whose teacher reads more than the student,
from a column of each row (``teacher.context``):

    instruction   the instruction, which all rows share
    reference     the answer itself, which only its own row has

On held-out questions

    KL(teacher with the context || student without it)

is computed from whole distributions, before and after. The control is trained in the same way,
from a cache whose teacher reads the context of another row: an instruction of another task, or the
answer to another question. What it gains is what any such context does to the same answers. Each
seed draws another cache, another order of training and other held-out questions.

A stopped run continues in the same --work. --quick takes the example's teacher and a few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.speed import read_cpu_name
from bench.support.paths import AUSTEN
from bench.teachers.whole import save_teacher
from bench.temperature import run_or_load
from cache.records import Sequences
from kd.capture.plan import CapturePlan, plan_capture
from kd.config.jobfile import parse_config
from kd.models.layers import compute_hidden_states
from kd.models.lm_head import find_lm_head
from kd.text.batches import make_batch
from kd.text.teacher_side.sequences import find_teacher_side

#: The instruction of the rows, and that of a row of another task.
INSTRUCTION = (
    "You are the keeper of a lighthouse on a small island in the north, and you have lived there "
    "alone for thirty years. Answer every question as you would in a letter to an old friend on "
    "the mainland. Begin each answer with the words: My dear friend. Speak of the sea, of the "
    "wind, of the lamp and of your cat Storm, whatever the question is about, and compare what you "
    "are asked about with something that can be seen from your window. Never use a list, a number "
    "or a heading. Never say that you are a model or an assistant. Write in the present tense, in "
    "two or three short sentences, with plain words of one or two syllables, and in a calm and "
    "kind voice. If you do not know something, say that the fog hides it today. Do not ask a "
    "question back, and do not offer more help. Close each answer with the weather of this "
    "evening, and sign it with: Your keeper of the light."
)
OTHER = (
    "You are the clerk of a large court in a hot and busy town, and you write the record of each "
    "case. Answer every question as a table of numbered points, at least five of them, each with a "
    "heading in capital letters and a date. Begin each answer with the words: RECORD OF THE COURT. "
    "Cite at least two sections of the law in every point, with their numbers and years, and give "
    "each amount of money in words and in figures. Use long sentences in the passive voice and the "
    "terms of lawyers, and never speak of yourself, of the weather or of an animal. Do not address "
    "the reader, and do not comfort anybody. If a fact is not proven, write that the evidence is "
    "insufficient and name the form with which a petition may be filed. Repeat the question as the "
    "title. Close each answer with the number of the file, the names of three witnesses, and the "
    "words: ENTERED AND SEALED BY ORDER OF THE COURT."
)
SUBJECTS = (
    "bread", "a bridge", "the moon", "a horse", "music", "rain", "a garden", "the heart", "glass",
    "a school", "iron", "sleep", "a forest", "the sun", "paper", "a river",
)  # fmt: skip
QUESTIONS = (
    "What is {}?", "Why do people care about {}?", "How would you explain {} to a child?",
    "What is the history of {}?", "Tell me something surprising about {}.",
    "What do we need {} for?", "What would the world be without {}?", "How has {} changed?",
    "What should I know about {} before I travel?", "Who knows most about {}?",
    "What is the best thing about {}?", "Describe {} in a few words.",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
#: The columns of the own and of another row that a teacher reads, and the text before them.
CONTEXTS = {
    "instruction": ({"the own row": "instruction", "another row": "other"}, ""),
    "reference": ({"the own row": "reference", "another row": "strange"}, "Reference answer: "),
}
#: Answers that are written at once.
BATCH = 16


@dataclass(frozen=True)
class Sizes:
    """How much is written, learned and measured."""

    rows: int
    answer: int
    length: int
    teacher_length: int
    steps: int
    batch: int
    rate: float


FULL = Sizes(192, 48, 128, 512, 60, 8, 5e-4)
QUICK = Sizes(24, 12, 64, 512, 4, 4, 5e-4)


def find_teacher(arguments: argparse.Namespace, work: Path) -> Path:
    """Return the folder of the teacher with whole weights, which a student begins with."""
    folder = work / "teacher"
    if not folder.is_dir():
        source = AUSTEN / "teacher" if arguments.quick else arguments.teacher
        save_teacher(source, arguments.gguf, folder, TEMPLATE)
    return folder


@torch.no_grad()
def write_rows(teacher: Path, sizes: Sizes, work: Path) -> list[dict[str, Any]]:
    """Let the teacher answer the questions with the instruction; a stopped run writes the rest."""
    path = work / "answers.jsonl"
    written = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    asked = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    random.Random(0).shuffle(asked)
    asked = asked[: sizes.rows]
    tokenizer: Any = AutoTokenizer.from_pretrained(teacher, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for start in range(len(written), len(asked), BATCH):
        some = asked[start : start + BATCH]
        chats = [[{"role": "user", "content": f"{INSTRUCTION}\n\n{each}"}] for each in some]
        prompts = [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for chat in chats
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        torch.manual_seed(start)
        ids = model.generate(
            **inputs, max_new_tokens=sizes.answer, do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, repetition_penalty=1.0, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        answers = tokenizer.batch_decode(
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        with path.open("a", encoding="utf-8") as file:
            for question, answer in zip(some, answers, strict=True):
                messages = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer.strip() or "The fog hides it today."},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")
        print(f"{start + len(some)} of {len(asked)} answers", file=sys.stderr, flush=True)
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    answers = [row["messages"][-1]["content"] for row in rows]
    turned = answers[1:] + answers[:1]
    return [
        {**row, "instruction": INSTRUCTION, "other": OTHER, "reference": own, "strange": strange}
        for row, own, strange in zip(rows, answers, turned, strict=True)
    ]


def write_split(rows: list[dict[str, Any]], seed: int, work: Path) -> list[str]:
    """Write the rows to train on and those that ``seed`` holds out, a sixth; return both paths."""
    order = random.Random(seed).sample(rows, len(rows))
    cut = len(rows) - len(rows) // 6
    paths = []
    for name, part in (("train", order[:cut]), ("held-out", order[cut:])):
        path = work / f"{name} {seed}.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in part)
        # The store of its tokens is found again by the time of the file, too.
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        paths.append(str(path))
    return paths


def make_job(
    teacher: Path, sizes: Sizes, paths: list[str], context: str, seed: int
) -> dict[str, Any]:
    """Return the job of one student: the teacher with adapters."""
    theirs = {"context": f"{context}\n\n{{prompt}}", "max_length": sizes.teacher_length}
    return {
        "name": "context",
        "teacher": {"model": str(teacher), "batch_size": 8, **theirs},
        "student": {"model": str(teacher), "lora": {"rank": 16, "alpha": 32}},
        "data": {
            "train": paths[0], "validation": paths[1], "format": "messages",
            "sequence_length": sizes.length,
        },
        "cache": {"seed": seed, "shard_sequences": 16, "threshold": 0.02},
        "loss": {"alpha": 0.0},
        "train": {
            "max_steps": sizes.steps, "batch_size": sizes.batch, "learning_rate": sizes.rate,
            "warmup_steps": sizes.steps // 10, "eval_steps": sizes.steps, "save_steps": 10,
            "seed": seed,
        },
        "evaluation": {"continuations": 0, "samples": 0},
    }  # fmt: skip


@torch.no_grad()
def compute_logprobs(folder: Path, parts: list[Sequences], vocabulary: int) -> Iterator[Tensor]:
    """Yield log p (N, V) of the targets of each part, by the model in ``folder``."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = find_lm_head(model, vocabulary)
    for part in parts:
        batch = make_batch(part, None)
        states_BLD = compute_hidden_states(model, batch.tokens_BL, batch.packed)
        yield head.compute_logits(states_BLD.flatten(0, 1)[batch.rows_N]).log_softmax(1)


def measure_kl(job: dict[str, Any], student: Path, work: Path) -> float:
    """Measure KL(teacher with its context || ``student`` without it) on held-out rows, in nats."""
    plan = plan_capture(parse_config(job), texts=work / "texts")
    held_out = plan.corpus.validation
    parts = [held_out.select(slice(row, row + 1)) for row in range(len(held_out))]
    theirs = (plan.teacher.folder, [find_teacher_side(each) for each in parts])
    return compute_mean_kl(theirs, (student, parts), plan)


def compute_mean_kl(
    theirs: tuple[Path, list[Sequences]], own: tuple[Path, list[Sequences]], plan: CapturePlan
) -> float:
    """Compute the mean KL(p || q) of the targets in nats; a side is a model and what it reads."""
    vocabulary = plan.identity.tokenizer.vocabulary_size
    pairs = zip(*(compute_logprobs(*side, vocabulary) for side in (theirs, own)), strict=True)
    sums = [((p.exp() * (p - q)).sum().item(), len(p)) for p, q in pairs]
    return sum(kl for kl, _ in sums) / sum(count for _, count in sums)


def measure_seed(
    teacher: Path, sizes: Sizes, rows: list[dict[str, Any]], seed: int, work: Path, kind: str
) -> dict[str, float]:
    """Return the held-out KL before the training and after each; a stopped run goes on."""
    kept = work / f"{kind}, seed {seed}.json"
    if kept.is_file():
        found: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    paths = write_split(rows, seed, work)
    columns, before = CONTEXTS[kind]
    jobs = {
        name: make_job(teacher, sizes, paths, f"{before}{{{column}}}", seed)
        for name, column in columns.items()
    }
    true = jobs["the own row"]
    found = {"before": measure_kl(true, teacher, work)}
    for name, job in jobs.items():
        run = work / "runs" / f"{kind} of {name}, seed {seed}"
        run_or_load(job, run, work)
        found[name] = measure_kl(true, run / "student", work)
        print(f"seed {seed}, {kind} of {name}: {found[name]:.4f}", file=sys.stderr, flush=True)
    kept.write_text(json.dumps(found), encoding="utf-8")
    return found


def render(found: dict[str, list[dict[str, float]]]) -> str:
    """Return the table, and by which share each context lets the KL fall."""
    lines = [
        f"Machine: {read_cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "",
        "| context | seed | before | of the own row | of another row |",
        "|---|--:|--:|--:|--:|",
    ]
    told = []
    for kind, (columns, _) in CONTEXTS.items():
        for seed, each in enumerate(found[kind]):
            cells = " | ".join(f"{each[name]:.4f}" for name in ("before", *columns))
            lines.append(f"| {kind} | {seed} | {cells} |")
        for name in columns:
            shares = [1 - each[name] / each["before"] for each in found[kind]]
            told.append(
                f"- The {kind} of {name}: the held-out KL falls by {statistics.fmean(shares):.1%} "
                f"({min(shares):.1%} to {max(shares):.1%})."
            )
    return "\n".join([*lines, "", *told]) + "\n"


def main() -> None:
    """Measure all seeds, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--teacher", type=Path, help="folder of an instructed model")
    parser.add_argument("--gguf", help="name of its GGUF file, if its weights are in one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=FULL.rows, help="questions, at most 192")
    parser.add_argument("--work", type=Path, help="folder in which a stopped run continues")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="the example's teacher, few steps")
    arguments = parser.parse_args()
    if arguments.teacher is None and not arguments.quick:
        parser.error("--teacher is required without --quick")
    sizes = QUICK if arguments.quick else Sizes(**vars(FULL) | {"rows": arguments.rows})
    work = arguments.work or Path(tempfile.mkdtemp(prefix="potstill-context-"))
    work.mkdir(parents=True, exist_ok=True)
    teacher = find_teacher(arguments, work)
    rows = write_rows(teacher, sizes, work)
    found = {
        kind: [
            measure_seed(teacher, sizes, rows, seed, work, kind) for seed in range(arguments.seeds)
        ]
        for kind in CONTEXTS
    }
    text = render(found)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
