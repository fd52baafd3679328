"""The report of a run, as numbers, page and plots: report.json, report.md and PNG files."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from cache.inspection import sum_gold_losses
from cache.json_object import Json
from cache.manifest import FidelityOverride
from cache.perplexity import BlockLosses, raise_e
from cache.rounding import ENTROPY_STEP, UNKNOWN_ENTROPY
from kd.capture.capturing import summarise_cache
from kd.config.job import JobConfig
from kd.evaluation.doubts import PERPLEXITIES, find_perplexity, judge_teacher
from kd.evaluation.in_depth import BASELINE, BEFORE, STUDENT, EvaluationContext, evaluate_in_depth
from kd.evaluation.pages import format_closing_sections, format_model_table, format_verdict
from kd.evaluation.teacher_comparison import TEACHER, compare_with_records
from kd.evaluation.words import explain_words
from kd.files import read_json, write_json, write_text
from kd.models.precision import pick_device
from kd.models.tokenizing.aligned_cache import AlignedCache, find_cache
from kd.progress import NOTICES, SILENT, keep_notices, replace_nonfinite
from kd.text.batches import Source
from kd.text.text_bytes import compute_bits_per_byte
from kd.tracking.metrics import read_metrics
from kd.training.early_stopping import find_best_step
from kd.training.evaluate import BY_DOMAIN, choose_evaluation_temperature
from kd.training.saved.state import TrainingProgress

#: The name of the divergence in a report, by what a teacher with another tokenizer teaches.
DIVERGENCES = {
    None: "KL(teacher ‖ student)",
    "projected": "KL(teacher ‖ projected student)",
    "alm": "the divergence of chunk likelihoods",
}
#: The content of report.json.
Report = Json
#: What the event ``report`` says of a run, so that jobs can be compared.
COMPARED = (
    *("student_perplexity", "student_bits_per_byte", "teacher_perplexity"),
    *("teacher_bits_per_byte", "held_out_tokens", "held_out_bytes"),
)


def make_report(
    config: JobConfig,
    source: Source,
    saved: PreTrainedModel,
    progress: TrainingProgress,
    vocabulary: int,
    run: EvaluationContext | None = None,
) -> Report:
    """Evaluate the student as it was saved, and add the results of training and capture.

    With a ``run``, whose folder gets the plots, the report also has all that ``config.evaluation``
    requests. It holds no NaN.
    """
    pace = round(progress.tokens / progress.seconds, 1) if progress.seconds else None
    # This moves the student to the device.
    monitor = run.monitor if run is not None else SILENT
    after = compare_with_records(saved, config, source, vocabulary, monitor)
    report = {
        "name": config.name,
        "kind": config.kind,
        "teacher": _choose_teacher_name(config, source),
        **config.loss.model_dump(mode="json", include={"alpha", "temperature", "divergence"}),
        **_measure_teacher(source, config.require_train().batch_size),
        **_describe_student(config, progress.first_evaluation or {}, after),
        "steps": progress.step,
        "kept_step": find_best_step(progress, config.require_train()) or progress.step,
        "tokens": progress.tokens,
        "skipped_batches": [asdict(each) for each in progress.skipped],
        "parameters": saved.num_parameters(),
        "train_seconds": round(progress.seconds, 1),
        "train_tokens_per_second": pace,
        "device": torch.cuda.get_device_name() if pick_device().type == "cuda" else "CPU",
    }
    if run is not None:
        notices = keep_notices(run.training / NOTICES, run.monitor)
        report |= _read_training(run) | {"notices": [each.to_json() for each in notices]}
        with_start = config.evaluation.teacher
        report |= evaluate_in_depth(config, source, saved, run, with_start=with_start)
    report = replace_nonfinite(report | _measure_bits(report))
    return report | judge_report(report)


def _measure_bits(report: Report) -> Report:
    """The bytes of the held-out text, and what a model needs for one of them, in bits."""
    found = report.get("evaluation") or {}
    bits = {
        key.replace("perplexity", "bits_per_byte"): compute_bits_per_byte(
            math.log(report[key]), found["tokens"], found["bytes"]
        )
        for key in PERPLEXITIES.values()
        if found and report.get(key) is not None
    }
    return {"held_out_bytes": found.get("bytes"), **bits}


def judge_report(report: Report) -> Report:
    """The verdict on the teacher, and the share of its quality that the student keeps."""
    verdict = judge_teacher(report)
    return {
        "verdict": None if verdict is None else verdict.to_json(),
        "quality_kept": compute_kept_quality(report),
    }


def compute_kept_quality(report: Report) -> float | None:
    """The share of what the teacher knows beyond a unigram that the student knows, too.

    (unigram - student) / (unigram - teacher), in nats per held-out token. None where one of the
    three is not known, or where the teacher is no better than the unigram.
    """
    ngrams = (report.get("evaluation") or {}).get("ngrams")
    found = [find_perplexity(report, name) for name in (STUDENT, TEACHER)]
    nats = [math.log(perplexity) for perplexity in found if perplexity is not None]
    if ngrams is None or len(nats) < len(found) or nats[1] >= ngrams["unigram_loss"]:
        return None
    student, teacher = nats
    return float((ngrams["unigram_loss"] - student) / (ngrams["unigram_loss"] - teacher))


def _describe_student(config: JobConfig, before: Report, after: Report) -> Report:
    """The student's scores on the held-out text, from the evaluations before and after training."""
    return {
        "student_perplexity_before": before.get("validation_perplexity"),
        "student_perplexity": after.get("validation_perplexity"),
        "held_out_tokens": after.get("validation_tokens"),
        "student_perplexity_before_interval": _read_interval(before),
        "student_perplexity_interval": _read_interval(after),
        "student_calibration_error": after.get("validation_calibration_error"),
        "evaluation_temperature": choose_evaluation_temperature(config.loss),
        "validation_kl": after.get("validation_kl"),
        "validation_agreement": after.get("validation_agreement"),
        **_describe_domains(after),
    }


def _describe_domains(after: Report) -> Report:
    """The student's scores by domain; nothing if there is one."""
    names = [key.partition("/")[2] for key in after if key.startswith("validation_tokens/")]
    short = {key: key.removeprefix("validation_") for key in BY_DOMAIN}
    scores = {name: {short[key]: after.get(f"{key}/{name}") for key in BY_DOMAIN} for name in names}
    return {"domains": scores} if scores else {}


def _read_interval(found: Report) -> Report | None:
    """The interval of a perplexity of few tokens, as an evaluation has it."""
    ends = {end: found.get(f"validation_perplexity_{end}") for end in ("low", "high")}
    return None if ends["low"] is None else ends


def _read_training(run: EvaluationContext) -> Report:
    """The last temperature, the verdicts of the checks, and the profile of time and memory."""
    lines = read_metrics(run.training / "metrics.jsonl")
    # Lines of checks and evaluations have no temperature.
    temperatures = [each["temperature"] for each in lines if each.get("temperature") is not None]
    shown = ("step", "check", "ok", "message", "remedy")
    return {
        "temperature_at_end": temperatures[-1] if temperatures else None,
        "checks": [{key: line[key] for key in shown} for line in lines if "check" in line],
        "profile": read_json(run.training / "profile.json"),
    }


def _choose_teacher_name(config: JobConfig, source: Source) -> str | None:
    """The name in the job, or in the cache where the job names a cache; None without a teacher."""
    store = find_cache(source)
    # A job that names a cache may have another teacher in its own section; the cache's counts.
    named = config.teacher_name is None or config.cache.fingerprint is not None
    if store is not None and named:
        return store.manifest.teacher.name
    return None if source.codec is None else config.teacher_name


def _measure_teacher(source: Source, at_once: int) -> Report:
    """The teacher's perplexity and entropy on the held-out text, and facts of its cache.

    It reads the records of ``at_once`` sequences at a time: all columns of a whole held-out text
    may not fit in memory.
    """
    store = find_cache(source)
    if store is None:
        return {}
    facts = summarise_cache(store, reused=True)
    facts.pop("reused")
    # In a report ``tokens`` are those of the training.
    facts["cache_tokens"] = facts.pop("tokens")
    gold = BlockLosses.none()
    entropy = 0.0
    known = 0
    first = source.train_count
    end = source.train_count + source.validation_count
    for start in range(first, end, at_once):
        sequences, records = store.read(np.arange(start, min(start + at_once, end)))
        gold += sum_gold_losses(records["known"], sequences.target_mask.sum(axis=1))
        # An import may lack values.
        known_N = records["entropy"][records["entropy"] != UNKNOWN_ENTROPY]
        entropy += float(known_N.sum(dtype=np.float64))
        known += len(known_N)
    if gold.perplexity is not None:
        interval = gold.perplexity.shown_interval
        facts["teacher_perplexity"] = gold.perplexity.value
        facts["teacher_perplexity_tokens"] = gold.tokens
        facts["teacher_perplexity_interval"] = interval and asdict(interval)
        if isinstance(source, AlignedCache):
            facts |= _count_in_own_tokens(source, gold.tokens * math.log(gold.perplexity.value))
    if known:
        facts["teacher_entropy"] = entropy / known * ENTROPY_STEP
    return facts


def _count_in_own_tokens(source: AlignedCache, nats: float) -> Report:
    """The perplexity of a teacher with other tokens, for each token of the student.

    ``nats`` is its loss on all of the held-out text. Both sides then compare as their bits per byte
    do.
    """
    theirs, ours, targets = source.count_held_out()
    own = nats / theirs * ours / targets if theirs and targets else math.nan
    return {
        "teacher_perplexity": raise_e(own),
        "teacher_perplexity_tokens": targets,
        "teacher_perplexity_interval": None,
        "tokenizers": "alm" if source.by_chunks else "projected",
    }


def write_report(run_dir: Path, report: Report) -> None:
    """Write report.json and report.md, and copy the plots to the saved student's model card."""
    write_json(run_dir / "report.json", report)
    write_text(run_dir / "report.md", render_report(report))
    for name in report.get("plots") or ():
        if (run_dir / "student").is_dir():
            shutil.copyfile(run_dir / name, run_dir / "student" / name)


def render_report(report: Report) -> str:
    """The report as Markdown."""
    lines = [f"# {report['name']}", "", *format_verdict(report), _describe_training(report), ""]
    top_k = (report.get("evaluation") or {}).get("top_k", 0)
    lines += format_model_table(_gather_models(report), top_k)
    quality = (_describe_quality, _describe_closeness, _describe_tokenizers, _describe_temperature)
    facts = (describe(report) for describe in (*quality, _describe_cache, _describe_speed))
    lines += filter(None, facts)
    lines += format_closing_sections(report)
    return "\n".join([*lines, *explain_words(lines)]) + "\n"


def _gather_models(report: Report) -> dict[str, Json]:
    """The facts of every model, from measurement in depth or from records and training."""
    measured = (report.get("evaluation") or {}).get("models") or {}
    found = {
        name: {
            "perplexity": report[key],
            "perplexity_interval": report.get(f"{key}_interval"),
            "tokens": report.get(f"{key}_tokens", report.get("held_out_tokens")),
            "bits_per_byte": report.get(key.replace("perplexity", "bits_per_byte")),
        }
        for name, key in PERPLEXITIES.items()
        if report.get(key) is not None
    }
    known = found.keys() | measured.keys()
    order = [name for name in (TEACHER, BEFORE, STUDENT, BASELINE) if name in known]
    # Where both have a figure, the one measured in depth wins.
    return {name: found.get(name, {}) | measured.get(name, {}) for name in order}


def _describe_training(report: Report) -> str:
    work = f"{report['steps']:,} steps, {report['tokens']:,} tokens"
    if report["kept_step"] != report["steps"]:
        work += (
            f" (the weights of step {report['kept_step']:,}, the best on the held-out text, "
            "were kept)"
        )
    if skipped := report.get("skipped_batches"):
        work += (
            f", without the {len(skipped):,} batch(es) whose loss or gradient was not finite: "
            "see the checks"
        )
    if report["teacher"] is None:
        return f"Trained on plain text: {work}."
    alpha = report["alpha"]
    ends = (alpha["start"], alpha["end"]) if isinstance(alpha, dict) else (alpha,)
    share = " to ".join(f"{each:.0%}" for each in ends)
    quantization = report.get("teacher_quantization")
    rounded = f" with its weights in {quantization}" if quantization else ""
    return (
        f"Distilled from `{report['teacher']}`{rounded}: {work}, "
        f"{share} of the weight on the hard labels."
    )


def _describe_quality(report: Report) -> str:
    """A line on the share of the teacher's quality, and on what counting alone knows."""
    ngrams = (report.get("evaluation") or {}).get("ngrams")
    if not ngrams:
        return ""
    counted = (
        f"counted from {ngrams['counted_tokens']:,} training tokens, a bigram has perplexity "
        f"{math.exp(ngrams['bigram_loss']):,.2f} and a unigram "
        f"{math.exp(ngrams['unigram_loss']):,.2f} "
        f"on {report['evaluation']['tokens']:,} held-out tokens"
    )
    student = find_perplexity(report, STUDENT)
    if student is not None and math.log(student) > ngrams["bigram_loss"]:
        counted += (
            ". The student predicts worse than that bigram, which only counts pairs: train longer, "
            "with more tokens in a step, or take a larger student"
        )
    if report.get("quality_kept") is None:
        return f"- For comparison: {counted}."
    kept = report["quality_kept"]
    share = "(unigram − student) / (unigram − teacher) in nats per held-out token"
    if kept < 0:
        return (
            "- Quality: the student keeps none of the teacher's quality, because it predicts "
            f"worse than a unigram ({share} is {kept:.1%}); {counted}."
        )
    quality = f"the student keeps {kept:.1%} of the teacher's quality"
    return f"- Quality: {quality}, which is {share}; {counted}."


def _describe_closeness(report: Report) -> str:
    parts = []
    if report.get("validation_kl") is not None:
        temperature = report["evaluation_temperature"]
        where = "" if temperature == 1.0 else f" at temperature {temperature:g}"
        # With another tokenizer the loss has a divergence of its own.
        name = DIVERGENCES[report.get("tokenizers")]
        parts.append(f"{name}{where} is {report['validation_kl']:.3f} nats per held-out token")
    if report.get("validation_agreement") is not None:
        parts.append(
            "both have the same most probable next token "
            f"{report['validation_agreement']:.1%} of the time"
        )
    return f"- Closeness, by the teacher's records: {'; '.join(parts)}." if parts else ""


def _describe_tokenizers(report: Report) -> str:
    """A line on how a teacher with another tokenizer is compared."""
    if report.get("tokenizers") is None:
        return ""
    return (
        "- Tokenizers: that of the teacher is another one. Its perplexity is given for each token "
        "of the student, so that both compare as their bits per byte do."
    )


def _describe_temperature(report: Report) -> str:
    """A line on the temperature, with the last value where it changed; nothing at T = 1."""
    temperature = report["temperature"]
    if not isinstance(temperature, dict):
        return "" if temperature == 1.0 else f"- Temperature: {temperature:g}."
    mode = temperature.get("mode")
    how = f"learned ({mode})" if mode else f"by schedule ({temperature['schedule']})"
    end = report.get("temperature_at_end")
    return f"- Temperature: {how}" + (f", {end:.3g} at the end." if end is not None else ".")


def _describe_cache(report: Report) -> str:
    if report.get("bytes_per_token") is None:
        return ""
    entries = report["entries_per_token"]  # 0 where a record is no list of entries
    overruled = report.get("overruled")  # of a cache that differs from its teacher
    return (
        f"- Cache: {report['bytes_per_token']:.1f} bytes per token on disk, everything included"
        + (f", for {entries:.1f} entries per token" if entries else "")
        + f" (`{report['fingerprint']}`)."
        + (f" **{FidelityOverride(**overruled).describe()}**" if overruled else "")
    )


def _describe_speed(report: Report) -> str:
    size = f"{report['parameters']:,} parameters"
    pace = report.get("train_tokens_per_second")
    if not pace:
        return f"- Size: {size}."
    speed = f"{pace:,.0f} tokens per second on {report['device']}"
    return f"- Size and speed: {size}, trained at {speed}."
