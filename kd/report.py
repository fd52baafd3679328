"""What a run achieved, in numbers, as a page and in pictures: report.json, report.md and PNG files."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from cache.codec import ENTROPY_STEP, KNOWN_STEP, UNKNOWN, UNKNOWN_ENTROPY
from kd.batches import Source
from kd.checkpoint import Progress
from kd.config.job import JobConfig
from kd.evaluate import evaluate, evaluation_temperature
from kd.evaluation.closer import BASELINE, BEFORE, STUDENT, Run, look_closer
from kd.evaluation.comparison import TEACHER
from kd.evaluation.pages import closing_sections, table_of_models
from kd.evaluation.text import bits_per_byte
from kd.files import read_json, write_json, write_text
from kd.metrics import read_metrics
from kd.models import head_of
from kd.precision import Precision, float32_products, pick_device
from kd.progress import finite
from kd.targets import TargetDecoder
from kd.teacher import CachedRecords, summarise
from kd.train import best_step, required

Report = dict[str, Any]


def make_report(
    config: JobConfig,
    source: Source,
    saved: PreTrainedModel,
    progress: Progress,
    vocabulary: int,
    run: Run | None = None,
) -> Report:
    """Evaluate the student as it was saved and join that with what training and capture found; no NaN in it.

    With a ``run``, whose folder the pictures are drawn into, also all that ``config.evaluation`` asks for.
    """
    device = pick_device()
    nn.Module.to(saved, device)
    precision = Precision.choose("fp32", device)
    options = required(config.train)
    decoder, temperature = TargetDecoder.of(source, device), evaluation_temperature(config.loss)
    head = head_of(saved, vocabulary)
    with float32_products():
        after = evaluate(saved, head, source, decoder, options.batch_size, precision, device, temperature)
    before = progress.first_evaluation or {}
    report = {
        "name": config.name,
        "kind": config.kind,
        "teacher": _teacher_name(config, source),
        **config.loss.model_dump(mode="json", include={"alpha", "temperature", "divergence"}),
        **_teacher_facts(source, options.batch_size),
        "student_perplexity_before": before.get("validation_perplexity"),
        "student_perplexity": after.get("validation_perplexity"),
        "student_calibration_error": after.get("validation_calibration_error"),
        "evaluation_temperature": temperature,
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
    if run is not None:
        report |= {"temperature_at_end": _last_temperature(run), **_told(run)}
        report |= look_closer(config, source, saved, run, with_start=config.evaluation.teacher)
    return finite(report)


def _last_temperature(run: Run) -> float | None:
    lines = read_metrics(run.training / "metrics.jsonl")
    return next((line["temperature"] for line in reversed(lines) if line.get("temperature") is not None), None)


def _told(run: Run) -> Report:
    """What the run's checks found, and where its time went."""
    lines = read_metrics(run.training / "metrics.jsonl")
    verdicts = [{key: line[key] for key in ("step", "check", "ok", "message")} for line in lines if "check" in line]
    return {"checks": verdicts, "profile": read_json(run.training / "profile.json")}


def _teacher_name(config: JobConfig, source: Source) -> str | None:
    """As the job names it, or as the cache does that the job names."""
    if not isinstance(source, CachedRecords):
        return None
    if config.teacher is None or config.cache.fingerprint is not None:
        return source.store.manifest.provenance.teacher_name
    return config.teacher.model


def _teacher_facts(source: Source, at_once: int) -> Report:
    """The teacher's own perplexity and entropy on the held-out text, from its records, and the cache they lie in.

    Records are read ``at_once`` sequences at a time: all columns of a whole held-out text may not fit in memory.
    """
    if not isinstance(source, CachedRecords):
        return {}
    facts = summarise(source.store, reused=True)
    facts.pop("reused")
    facts["cache_tokens"] = facts.pop("tokens")
    gold, entropy = _Mean(), _Mean()
    first, end = source.train_count, source.train_count + source.validation_count
    for start in range(first, end, at_once):
        _, records = source.read(np.arange(start, min(start + at_once, end)))
        gold.add(records["known"][:, 0], UNKNOWN)
        entropy.add(records["entropy"], UNKNOWN_ENTROPY)
    if gold.count:
        facts["teacher_perplexity"] = math.exp(gold.value * KNOWN_STEP)
    if entropy.count:
        facts["teacher_entropy"] = entropy.value * ENTROPY_STEP
    return facts


@dataclass
class _Mean:
    """The mean of codes, but for those that say nothing: an import may not have known."""

    total: float = 0.0
    count: int = 0

    def add(self, codes_N: NDArray[Any], unknown: int) -> None:
        known = codes_N[codes_N != unknown]
        self.total += float(known.sum(dtype=np.float64))
        self.count += len(known)

    @property
    def value(self) -> float:
        return self.total / self.count


def write_report(run_dir: Path, report: Report) -> None:
    """Write both forms; the saved student, whose card shows the pictures too, gets copies of them."""
    write_json(run_dir / "report.json", report)
    write_text(run_dir / "report.md", render(report))
    for name in report.get("plots") or ():
        if (run_dir / "student").is_dir():
            shutil.copyfile(run_dir / name, run_dir / "student" / name)


def render(report: Report) -> str:
    """The report as Markdown."""
    lines = [f"# {report['name']}", "", _sentence(report), ""]
    lines += table_of_models(_models(report), (report.get("evaluation") or {}).get("top_k", 0))
    facts = (_closeness(report), _temperature(report), _cache(report), _speed(report))
    lines += [fact for fact in facts if fact]
    return "\n".join([*lines, *closing_sections(report)]) + "\n"


def _models(report: Report) -> dict[str, dict[str, Any]]:
    """What is known of every model; of those that nobody measured closely, what the records and the training say."""
    evaluation = report.get("evaluation") or {}
    measured = evaluation.get("models") or {}
    known = {
        TEACHER: report.get("teacher_perplexity"),
        BEFORE: report.get("student_perplexity_before"),
        STUDENT: report.get("student_perplexity"),
    }
    found = {
        name: {
            "perplexity": perplexity,
            "bits_per_byte": bits_per_byte(math.log(perplexity), evaluation["tokens"], evaluation["bytes"])
            if evaluation
            else None,
        }
        for name, perplexity in known.items()
        if perplexity is not None
    }
    order = (TEACHER, BEFORE, STUDENT, BASELINE)
    return {name: found.get(name, {}) | measured.get(name, {}) for name in order if name in found or name in measured}


def _sentence(report: Report) -> str:
    work = f"{report['steps']:,} steps, {report['tokens']:,} tokens"
    if report["kept_step"] != report["steps"]:
        work += f" (the weights of step {report['kept_step']:,}, the best on the held-out text, were kept)"
    if report["teacher"] is None:
        return f"Trained on plain text: {work}."
    share = _hard_labels(report["alpha"])
    return f"Distilled from `{report['teacher']}`: {work}, {share} of the weight on the hard labels."


def _hard_labels(alpha: float | dict[str, Any]) -> str:
    return f"{alpha['start']:.0%} to {alpha['end']:.0%}" if isinstance(alpha, dict) else f"{alpha:.0%}"


def _closeness(report: Report) -> str:
    parts = []
    if report.get("validation_kl") is not None:
        temperature = report["evaluation_temperature"]
        where = "" if temperature == 1.0 else f" at temperature {temperature:g}"
        parts.append(f"KL(teacher ‖ student){where} is {report['validation_kl']:.3f} nats per held-out token")
    if report.get("validation_agreement") is not None:
        parts.append(f"both name the same best next token {report['validation_agreement']:.1%} of the time")
    return f"- Closeness, by the teacher's records: {'; '.join(parts)}." if parts else ""


def _temperature(report: Report) -> str:
    """Nothing at T = 1; of one that moved, where it ended."""
    temperature = report["temperature"]
    if not isinstance(temperature, dict):
        return "" if temperature == 1.0 else f"- Temperature: {temperature:g}."
    how = f"learned ({temperature['mode']})" if "mode" in temperature else f"by schedule ({temperature['schedule']})"
    end = report.get("temperature_at_end")
    return f"- Temperature: {how}" + (f", {end:.3g} at the end." if end is not None else ".")


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
