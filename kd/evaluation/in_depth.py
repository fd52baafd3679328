"""In-depth evaluation of a student: teacher, baseline, samples, tasks and plots on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache.errors import PotstillError
from cache.json_object import Json
from kd.config.data import DataConfig
from kd.config.job import JobConfig
from kd.config.teacher import TeacherConfig
from kd.errors import TokenizerMismatch
from kd.evaluation import side_by_side
from kd.evaluation.baseline import build_starting_student, train_baseline
from kd.evaluation.plots import draw_plots
from kd.evaluation.tasks import run_tasks
from kd.evaluation.teacher_comparison import (
    TEACHER,
    TOP_K,
    EvaluatedModel,
    compare_models,
    summarise_sums,
)
from kd.evaluation.tokens.scoring import FILE, write_tokens
from kd.models.loading import load_teacher
from kd.models.precision import pick_device
from kd.models.teacher_files import TeacherFiles
from kd.models.tokenizers import (
    KnownTokenizer,
    get_vocabulary_size,
    load_source_tokenizer,
    require_same_tokenizer,
)
from kd.models.tokenizing.rules import sample_texts
from kd.models.vocabulary import choose_run_vocabulary
from kd.progress import SILENT, Monitor
from kd.text.batches import Source
from kd.text.ngrams import count_ngrams
from kd.text.text_bytes import count_held_out_bytes
from kd.tracking.metrics import read_metrics
from kd.training.samples import Prompt, choose_prompts

BEFORE = "student before training"
STUDENT = "student"
BASELINE = "cross-entropy only"
#: Sequences of a batch where the job has no train section.
DEFAULT_BATCH = 8
#: Why a spread teacher continues no prompt: for each token it would fetch all of its weights.
SPREAD_TEACHER = "its weights are spread over several devices (teacher.parallel)"


@dataclass(frozen=True)
class EvaluationContext:
    """The folder for the plots, the student's tokenizer, the listener, and two other folders.

    ``training_folder`` is None where the training's files are in ``folder``, too. The student's
    files are in ``student_folder``, if it is saved.
    """

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    monitor: Monitor = SILENT
    training_folder: Path | None = None
    student_folder: Path | None = None

    @property
    def training(self) -> Path:
        """The folder with metrics.jsonl, and with the baseline's checkpoints."""
        return self.training_folder or self.folder


def evaluate_in_depth(
    config: JobConfig,
    source: Source,
    student: PreTrainedModel,
    run: EvaluationContext,
    with_start: bool,
) -> Json:
    """Return the report's ``evaluation`` and the names of the plots, in the run's folder.

    ``with_start`` measures the student before training, too. Raises ``ConfigError`` for an unknown
    task.
    """
    # In the order of their creation.
    students = {STUDENT: student}
    if with_start:
        students = {BEFORE: build_starting_student(config, run.tokenizer), **students}
    if config.evaluation.baseline:
        students[BASELINE] = train_baseline(
            config, source, run.tokenizer, run.training, run.monitor
        )
    teacher = None
    if config.evaluation.teacher:
        assert config.teacher is not None, "JobConfig refuses to compare with no teacher"
        teacher = _load_teacher(config.teacher, config.data, run)
    run.monitor.emit("stage", stage="train", phase="measuring on the held-out text")
    found = measure_models(config, source, students, teacher, run.tokenizer, run.monitor)
    # Models that are measured no more make room for the teacher.
    students.clear()
    try:
        found |= _compare_side_by_side(config, source, student, teacher, run)
    except PotstillError:
        raise
    except Exception as error:  # models raise any class where they cannot generate
        # A finished student is not given up for samples that nobody asked for.
        if config.evaluation.prompts:
            raise
        message = (
            f"The models could not be compared side by side: {type(error).__name__}: {error}. "
            "evaluation.continuations: 0 leaves this out."
        )
        run.monitor.emit("warning", message=message)
    if config.evaluation.tasks:
        run.monitor.emit("stage", stage="train", phase="running lm-eval")
        batch = _choose_batch_size(config)
        found["tasks"] = run_tasks(student, run.tokenizer, config.evaluation.tasks, batch)
    plots = draw_plots(run.folder, found["models"], read_metrics(run.training / "metrics.jsonl"))
    return {"evaluation": found, "plots": plots}


def _compare_side_by_side(
    config: JobConfig,
    source: Source,
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    run: EvaluationContext,
) -> Json:
    """How student and teacher continue the prompts, and what both cost on this device.

    Without ``teacher`` it is loaded if that is possible, unless the job wants no continuations.
    """
    options = config.evaluation
    prompts = [Prompt.of(text, run.tokenizer) for text in options.prompts]
    prompts = prompts or choose_prompts(source, run.tokenizer, options.continuations)
    if not prompts:
        return {}
    reason = None
    if config.teacher is not None and config.teacher.parallel != "none":
        teacher = None
        reason = SPREAD_TEACHER
    elif teacher is None and options.continuations:
        teacher, reason = _load_teacher_if_possible(config, run)
    run.monitor.emit("stage", stage="train", phase="continuing prompts")
    used = {STUDENT: side_by_side.take_stored_precision(student, run.student_folder)}
    used |= {TEACHER: teacher} if teacher is not None else {}
    vocabulary = choose_run_vocabulary(source, run.tokenizer, *used.values())
    models = {
        name: EvaluatedModel.of(model, vocabulary, config.data, name == TEACHER, run.monitor)
        for name, model in used.items()
    }
    known = {
        STUDENT: side_by_side.ModelCost.of_folder(run.student_folder),
        TEACHER: side_by_side.ModelCost.of_source(config.teacher_files),
    }
    writer = side_by_side.SampleWriter(prompts, run.tokenizer, options.max_new_tokens)
    found = side_by_side.compare_on_device(
        models, known, side_by_side.read_sample(source, pick_device()), writer
    )
    run.monitor.emit("stage", stage="train", phase="scoring single tokens")
    try:
        write_tokens(run.folder / FILE, models, source, run.tokenizer, reason)
    # A finished student is not given up for this file. RuntimeError: also a lack of memory.
    except (PotstillError, RuntimeError) as error:
        message = f"{FILE} was not written: {type(error).__name__}: {error}"
        run.monitor.emit("warning", message=message)
    return {**found, "without_teacher": reason}


def _load_teacher_if_possible(
    config: JobConfig, run: EvaluationContext
) -> tuple[PreTrainedModel | None, str | None]:
    """The teacher, or the reason why it cannot be loaded here; both None if the job has none."""
    teacher = config.teacher
    if teacher is None:
        return None, None
    if not config.captures:
        return None, f"a job of kind {config.kind} loads no teacher (`kd eval` compares the two)"
    try:
        # A quantized teacher is built without its weights to count them, which may fail, too.
        reason = find_reason_without(teacher, pick_device(), config.resources.memory)
        if reason is not None:
            return None, reason
        return _load_teacher(teacher, config.data, run), None
    except TokenizerMismatch:
        return None, "its tokenizer is not that of the student"
    except PotstillError as error:
        return None, error.detail
    except (torch.OutOfMemoryError, MemoryError):
        return None, "there was not enough memory"


def find_reason_without(
    teacher: TeacherConfig, device: torch.device, limit: int | None = None
) -> str | None:
    """Explain why the teacher is not loaded for a comparison; None if it can be.

    ``limit`` are the bytes that the job may use on a CPU.
    """
    if not teacher.is_local:
        return "it runs on a server"
    if teacher.has_context:
        return "it reads a context that the student does not read (teacher.context)"
    files = TeacherFiles.find(teacher, Path())
    if files is None:
        return "its folder is not on this machine"
    return side_by_side.find_lack_of_memory(files, device, limit)


def measure_models(
    config: JobConfig,
    source: Source,
    students: Mapping[str, PreTrainedModel],
    teacher: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    monitor: Monitor = SILENT,
) -> Json:
    """Tokens and bytes of the held-out text, and every model's figures on it.

    Without such text there are no models.
    """
    everyone = {**students, **({TEACHER: teacher} if teacher is not None else {})}
    vocabulary = choose_run_vocabulary(source, tokenizer, *everyone.values())
    # All models are checked before the first one spends time on the text.
    readers = {
        name: EvaluatedModel.of(model, vocabulary, config.data, name == TEACHER, monitor)
        for name, model in everyone.items()
    }
    sums = compare_models(readers, source, _choose_batch_size(config))
    size = count_held_out_bytes(source, tokenizer)
    effect = None
    if BASELINE in sums and STUDENT in sums:
        # The interval is of the paired difference: both students read the same tokens.
        difference = sums[STUDENT].losses - sums[BASELINE].losses
        interval = difference.interval
        effect = {"nats": difference.mean, "interval": interval and asdict(interval)}
    return {
        "tokens": int(next(iter(sums.values())).count_C.sum()) if sums else 0,
        "bytes": size,
        "top_k": TOP_K,
        "models": {
            name: asdict(summarise_sums(each, size, teacher is not None and name != TEACHER))
            for name, each in sums.items()
        },
        "ngrams": _measure_ngrams(source, vocabulary) if sums else None,
        "teacher_effect": effect,
    }


def _measure_ngrams(source: Source, vocabulary: int) -> dict[str, float] | None:
    """The held-out losses of a unigram and a bigram that were counted from the training text."""
    ngrams = count_ngrams(source, vocabulary)
    found = None if ngrams is None else ngrams.measure_held_out(source)
    if ngrams is None or found is None:
        return None
    return {"counted_tokens": ngrams.tokens, "unigram_loss": found[0], "bigram_loss": found[1]}


def _choose_batch_size(config: JobConfig) -> int:
    return config.train.batch_size if config.train is not None else DEFAULT_BATCH


def _load_teacher(
    section: TeacherConfig, data: DataConfig, run: EvaluationContext
) -> PreTrainedModel:
    """Load the teacher, if it shares the student's tokenizer."""
    run.monitor.emit("stage", stage="train", phase="loading the teacher")
    teacher = TeacherFiles.resolve(section)
    own = load_source_tokenizer(section.files, teacher.folder)
    # Probabilities compare only where equal ids mean equal text.
    size = min(map(get_vocabulary_size, (own, run.tokenizer)))
    known = KnownTokenizer.of(own, size, f"that of {section.model}")
    require_same_tokenizer(run.tokenizer, known, texts=sample_texts(data), note=run.monitor.note)
    return load_teacher(teacher, pick_device())
