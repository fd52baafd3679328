"""What a run achieved, in numbers and as a page: report.json and report.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from cache.codec import ENTROPY_STEP, KNOWN_STEP, UNKNOWN, UNKNOWN_ENTROPY
from kd.batches import Source
from kd.checkpoint import Progress
from kd.config.job import JobConfig
from kd.evaluate import evaluate
from kd.files import write_json, write_text
from kd.models import head_of
from kd.precision import Precision, pick_device
from kd.progress import finite
from kd.targets import TargetDecoder
from kd.teacher import CachedRecords, summarise
from kd.train import best_step, required

Report = dict[str, Any]


def make_report(
    config: JobConfig, source: Source, saved: PreTrainedModel, progress: Progress, vocabulary: int
) -> Report:
    """Evaluate the student as it was saved and join that with what training and capture found; no NaN in it."""
    device = pick_device()
    nn.Module.to(saved, device)
    precision = Precision.choose("fp32", device)
    options = required(config.train)
    decoder = TargetDecoder.of(source, config.loss.temperature, device)
    after = evaluate(saved, head_of(saved, vocabulary), source, decoder, options.batch_size, precision, device)
    before = progress.first_evaluation or {}
    return finite(
        {
            "name": config.name,
            "kind": config.kind,
            "teacher": _teacher_name(config, source),
            "alpha": config.loss.alpha,
            "temperature": config.loss.temperature,
            **_teacher_facts(source),
            "student_perplexity_before": before.get("validation_perplexity"),
            "student_perplexity": after.get("validation_perplexity"),
            "validation_kl": after.get("validation_kl"),
            "validation_agreement": after.get("validation_agreement"),
            "steps": progress.step,
            "kept_step": best_step(progress, options) or progress.step,
            "tokens": progress.tokens,
            "parameters": saved.num_parameters(),
            "train_seconds": round(progress.seconds, 1),
            "train_tokens_per_second": round(progress.tokens / progress.seconds, 1) if progress.seconds else None,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        }
    )


def _teacher_name(config: JobConfig, source: Source) -> str | None:
    """As the job names it, or as the cache does that the job names."""
    if not isinstance(source, CachedRecords):
        return None
    return config.teacher.model if config.teacher is not None else source.store.manifest.provenance.teacher_name


def _teacher_facts(source: Source) -> Report:
    """The teacher's own perplexity and entropy on the held-out text, from its records, and the cache they lie in."""
    if not isinstance(source, CachedRecords):
        return {}
    facts = summarise(source.store, reused=True)
    facts.pop("reused")
    facts["cache_tokens"] = facts.pop("tokens")
    if source.validation_count:
        _, records = source.read(np.arange(source.train_count, source.train_count + source.validation_count))
        gold, entropy = records["known"][:, 0], records["entropy"]
        gold, entropy = gold[gold != UNKNOWN], entropy[entropy != UNKNOWN_ENTROPY]  # an import may not have said
        if len(gold):
            facts["teacher_perplexity"] = math.exp(float(gold.mean(dtype=np.float64)) * KNOWN_STEP)
        if len(entropy):
            facts["teacher_entropy"] = float(entropy.mean(dtype=np.float64)) * ENTROPY_STEP
    return facts


def write_report(run_dir: Path, report: Report) -> None:
    """Write both forms."""
    write_json(run_dir / "report.json", report)
    write_text(run_dir / "report.md", render(report))


def render(report: Report) -> str:
    """The report as Markdown."""
    lines = [f"# {report['name']}", "", _sentence(report), ""]
    rows = (
        ("teacher", "teacher_perplexity"),
        ("student before training", "student_perplexity_before"),
        ("student after training", "student_perplexity"),
    )
    table = [f"| {label} | {report[key]:,.2f} |" for label, key in rows if report.get(key) is not None]
    if table:
        lines += ["| held-out perplexity | |", "|---|---:|", *table, ""]
    lines += [fact for fact in (_closeness(report), _cache(report), _speed(report)) if fact]
    return "\n".join(lines) + "\n"


def _sentence(report: Report) -> str:
    work = f"{report['steps']:,} steps, {report['tokens']:,} tokens"
    if report["kept_step"] != report["steps"]:
        work += f" (the weights of step {report['kept_step']:,}, the best on the held-out text, were kept)"
    if report["teacher"] is None:
        return f"Trained on plain text: {work}."
    return f"Distilled from `{report['teacher']}`: {work}, {report['alpha']:.0%} of the weight on the hard labels."


def _closeness(report: Report) -> str:
    parts = []
    if report.get("validation_kl") is not None:
        parts.append(f"KL(teacher ‖ student) is {report['validation_kl']:.3f} nats per held-out token")
    if report.get("validation_agreement") is not None:
        parts.append(f"both name the same best next token {report['validation_agreement']:.1%} of the time")
    return f"- Closeness: {'; '.join(parts)}." if parts else ""


def _cache(report: Report) -> str:
    if report.get("bytes_per_token") is None:
        return ""
    return (
        f"- Cache: {report['bytes_per_token']:.1f} bytes per token on disk, everything counted, for "
        f"{report['entries_per_token']:.1f} entries per token (`{report['fingerprint']}`)."
    )


def _speed(report: Report) -> str:
    size = f"{report['parameters']:,} parameters"
    pace = report.get("train_tokens_per_second")
    if not pace:
        return f"- Size: {size}."
    return f"- Size and speed: {size}, trained at {pace:,.0f} tokens per second on {report['device']}."
