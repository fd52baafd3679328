"""The baseline: a student like the job's own, trained on cross-entropy alone.

Start, text, steps and seed are the same.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd.config.evaluation import EvaluationConfig
from kd.config.job import JobConfig
from kd.config.loss import FeatureConfig
from kd.models.loading import build_hollow_student, build_student
from kd.models.precision import pick_device
from kd.models.vocabulary import choose_run_vocabulary
from kd.parallel.group import ALONE, Group
from kd.progress import Monitor
from kd.text.batches import Source
from kd.training.evaluate import choose_evaluation_temperature
from kd.training.loop import train
from kd.training.preparing.setting import choose_first_place

#: Events of the baseline's training that are passed on. Its metrics are not: a listener would take
#: them for those of the job's own training.
_FORWARDED_EVENTS = ("progress", "warning")


def build_starting_student(
    config: JobConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The student of a job as it is before training."""
    return build_first_student(config, tokenizer, ALONE)


def build_first_student(
    config: JobConfig, tokenizer: PreTrainedTokenizerBase, group: Group
) -> PreTrainedModel:
    """The student of a job as the ranks of ``group`` begin with it: hollow, but on rank 0."""
    context = config.data.sequence_length
    if not group.leads:
        return build_hollow_student(config.student, tokenizer, context, config.teacher_files)
    options = config.require_train()
    torch.manual_seed(options.seed)
    place = choose_first_place(options, pick_device(), group)
    return build_student(config.student, tokenizer, context, config.teacher_files, place)


def make_cross_entropy_job(config: JobConfig) -> JobConfig:
    """The job with all weight on the hard labels; label smoothing stays.

    The records are still read, for the held-out KL and agreement and for the order of a curriculum.
    """
    plain = config.loss.model_copy(
        update={
            "alpha": 1.0,
            # A fixed one, at which the student's held-out figures are, too.
            "temperature": choose_evaluation_temperature(config.loss),
            "divergence": "forward_kl",
            "entropy_weighting": 0.0,
            "features": FeatureConfig(),
        }
    )
    alone = config.require_train().model_copy(update={"report_to": ()})
    changed = {"loss": plain, "train": alone, "evaluation": EvaluationConfig()}
    return config.model_copy(update=changed)


def train_baseline(
    config: JobConfig,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    monitor: Monitor,
) -> PreTrainedModel:
    """Return the trained baseline.

    Its checkpoints are in ``run_dir``/baseline, so that a second call resumes or returns at once.
    Raises what ``kd.training.loop.train`` raises.
    """
    monitor.emit("stage", stage="train", phase="training the baseline on cross-entropy alone")
    student = build_starting_student(config, tokenizer)
    plain = make_cross_entropy_job(config)
    vocabulary = choose_run_vocabulary(source, tokenizer, student)
    own = monitor.pass_on(_FORWARDED_EVENTS)
    train(plain, source, student, vocabulary, run_dir / "baseline", own)
    return student
