"""The student that never met the teacher: the same start, text, steps and seed, on cross-entropy alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kd.batches import Source
from kd.config.evaluation import EvaluationConfig
from kd.config.job import JobConfig
from kd.config.loss import FeatureConfig
from kd.evaluate import evaluation_temperature
from kd.models import build_student, vocabulary_size
from kd.progress import Event, Monitor
from kd.train import required, train

#: What a listener may hear of the second training: its metrics would be taken for the first one's.
_HEARD = ("progress", "warning")


def starting_student(config: JobConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The student of a job as its training finds it."""
    torch.manual_seed(required(config.train).seed)
    return build_student(config.student, tokenizer, config.data.sequence_length, config.teacher)


def cross_entropy_only(config: JobConfig) -> JobConfig:
    """The job with all of the weight on the hard labels; what it adds to them (smoothing, z-loss) stays.

    The records are still read for the held-out KL and agreement, and for the order of a curriculum.
    """
    plain = config.loss.model_copy(
        update={
            "alpha": 1.0,
            "temperature": evaluation_temperature(config.loss),
            "divergence": "forward_kl",
            "entropy_weighting": 0.0,
            "features": FeatureConfig(),
        }
    )
    alone = required(config.train).model_copy(update={"report_to": (), "trace_steps": 0})
    return config.model_copy(update={"loss": plain, "train": alone, "evaluation": EvaluationConfig()})


def train_baseline(
    config: JobConfig, source: Source, tokenizer: PreTrainedTokenizerBase, run_dir: Path, monitor: Monitor
) -> PreTrainedModel:
    """The trained baseline; its checkpoints lie in ``run_dir``/baseline, so that a second call goes on or ends at once.

    Raises what ``kd.train.train`` raises.
    """
    monitor.emit("stage", stage="train", phase="training the baseline on cross-entropy alone")
    student = starting_student(config, tokenizer)
    plain, vocabulary = cross_entropy_only(config), vocabulary_size(tokenizer)
    train(plain, source, student, vocabulary, run_dir / "baseline", _discreet(monitor))
    return student


def _discreet(monitor: Monitor) -> Monitor:
    def listen(event: Event) -> None:
        if event.type in _HEARD:
            monitor.listen(event)

    return Monitor(listen, monitor.should_stop)
