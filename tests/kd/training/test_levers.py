"""Every setting in the whole loop changes the student, and a stop in the middle does not."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic_core import to_json
from torch import Tensor, nn

from cache.profiles.threshold import WHOLE, count_rest, find_counted
from cache.store import open_cache
from kd.config.fields.removed import restore_removed
from kd.config.job import JobConfig
from kd.config.jobfile import parse_config
from kd.config.train import TrainConfig
from kd.errors import ConfigError, Interrupted, OutOfMemory, TrainingError
from kd.loss.decoder import TargetDecoder
from kd.loss.objective import Objective
from kd.models.lm_head import find_lm_head
from kd.models.loading import build_student
from kd.models.precision import Precision
from kd.models.tokenizers import get_vocabulary_size
from kd.parallel.group import ALONE
from kd.parallel.strategies import WholeLoss
from kd.progress import SILENT, Monitor
from kd.stages.capture import run_precompute
from kd.tracking.metrics import read_metrics
from kd.training.lookahead import LookAhead
from kd.training.loop import train
from kd.training.preparing.setting import TrainingSetting, place_student
from kd.training.resume import identity as resuming
from kd.training.resume.identity import FREE_FIELDS, NEWER_FIELDS, compute_resume_identity
from kd.training.step_loss import StepLoss
from tests.support.kd.students import copy_weights, make_llama
from tests.support.kd.training import read_history, stop_after

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 7
Job = dict[str, Any]


@dataclass(frozen=True)
class Taught:
    """Sealed caches of one text, and a job that trains from them."""

    job: Job
    tokenizer: Any
    home: Path
    fingerprints: dict[str, str]

    def config(self, profile: str = "hidden", **sections: Any) -> JobConfig:
        job = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in self.job.items()
        }
        for section, values in sections.items():
            job[section] = {**job.get(section, {}), **values}
        job["cache"] = {"profile": profile, "shard_sequences": 8}
        return parse_config(job)

    def train(
        self, config: JobConfig, folder: Path, monitor: Monitor = SILENT
    ) -> dict[str, Tensor]:
        """The weights that training leaves."""
        source = open_cache(self.home / "caches" / self.fingerprints[config.cache.profile])
        assert config.train is not None
        torch.manual_seed(config.train.seed)
        student = build_student(config.student, self.tokenizer, 32, config.teacher_files)
        train(config, source, student, get_vocabulary_size(self.tokenizer), folder, monitor)
        return copy_weights(student)


@pytest.fixture(scope="module")
def taught(
    tiny_teacher: Path, tiny_text: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Taught:
    home = tmp_path_factory.mktemp("taught")
    job: Job = {
        "name": "levers",
        "teacher": {"model": str(tiny_teacher), "batch_size": 8},
        "student": {"init": {"layers": 2, "hidden_size": 16}},
        "data": {
            "train": str(tiny_text), "validation_fraction": 0.1, "sequence_length": 32,
            "max_train_samples": 20, "max_eval_samples": 4,
        },
        "train": {
            "max_steps": STEPS, "batch_size": 4, "eval_steps": 3, "save_steps": 2,
            "logging_steps": 1, "learning_rate": 1e-2, "warmup_steps": 1, "dropout": 0.1,
        },
    }  # fmt: skip
    found = Taught(job, tokenizer, home, {})
    for profile in ("threshold", "tempered", "hidden"):
        # One of the levers needs the entropies of positions.
        capture = found.config(profile, loss={"entropy_weighting": 1.0})
        summary = run_precompute(capture, home, home, SILENT)
        found.fingerprints[profile] = summary.cache["fingerprint"]
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def plain(taught: Taught, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The student of the job with every setting at its default."""
    torch.set_num_threads(1)
    return taught.train(taught.config(), tmp_path_factory.mktemp("plain"))


LEARNED = {"min": 0.5, "max": 2.0, "learning_rate": 0.1}
LEVERS: dict[str, dict[str, Any]] = {
    "alpha": {"loss": {"alpha": 0.6}},
    "alpha's schedule": {"loss": {"alpha": {"schedule": "cosine", "start": 0.0, "end": 1.0}}},
    "temperature": {"loss": {"temperature": 1.5}},
    "temperature's schedule": {
        "loss": {"temperature": {"schedule": "linear", "start": 2.0, "end": 1.0}}
    },
    "adversarial": {"loss": {"temperature": {"mode": "adversarial", **LEARNED}}},
    "entropy": {"loss": {"temperature": {"mode": "entropy", "target_entropy": 2.0, **LEARNED}}},
    "lookahead": {"loss": {"temperature": {"mode": "lookahead", "interval": 2, **LEARNED}}},
    "teacher_only": {"loss": {"temperature": {"mode": "teacher_only", "interval": 2, **LEARNED}}},
    "reverse_kl": {"loss": {"divergence": "reverse_kl"}},
    "jsd": {"loss": {"divergence": "jsd", "beta": 0.3}},
    "skew_kl": {"loss": {"divergence": "skew_kl", "beta": 0.2}},
    "total_variation": {"loss": {"divergence": "total_variation"}},
    "label_smoothing": {"loss": {"label_smoothing": 0.2}},
    "entropy_weighting": {"loss": {"entropy_weighting": 1.0}},
    "features": {"loss": {"features": {"weight": 1.0}}},
    "features by cosine": {"loss": {"features": {"weight": 1.0, "kind": "cosine"}}},
    "adafactor": {"train": {"optim": "adafactor"}},
    "muon": {"train": {"optim": "muon"}},
    "lion": {"train": {"optim": "lion", "learning_rate": 1e-3}},
    "lars": {"train": {"optim": "lars", "learning_rate": 1.0}},
    "schedule_free": {
        "train": {"optim": "schedule_free", "lr_scheduler_type": "constant_with_warmup"}
    },
    "optim_args": {"train": {"optim_args": {"amsgrad": 1}}},
    "weight_decay": {"train": {"weight_decay": 0.5}},
    "lm_head_floor": {"train": {"lm_head_floor": 0.0}},
    "onecycle": {"train": {"lr_scheduler_type": "onecycle"}},
    "warm-up, stable, decay": {
        "train": {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 3},
        }
    },
    "cosine with a floor": {
        "train": {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        }
    },
    "step": {
        "train": {"lr_scheduler_type": "step", "lr_scheduler_kwargs": {"step_size": 2}},
    },
    "multistep": {
        "train": {"lr_scheduler_type": "multistep", "lr_scheduler_kwargs": {"milestones": [2, 4]}},
    },
    "reduce_lr_on_plateau": {
        "train": {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_steps": 1,
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.2, "factor": 0.5},
        },
    },
    "dropout": {"train": {"dropout": {"schedule": "linear", "start": 0.4, "end": 0.0}}},
    "ema_decay": {"train": {"ema_decay": 0.9}},
    "max_grad_norm": {"train": {"max_grad_norm": 0.01, "optim": "lars", "learning_rate": 1.0}},
    "bf16": {"train": {"precision": "bf16"}},
    "order by length": {"train": {"order": "length"}, "data": {"packing": False}},
    "curriculum": {"train": {"order": "curriculum"}},
    "order by windows": {"train": {"order": "windows"}},
    "gradient accumulation": {"train": {"batch_size": 2, "gradient_accumulation_steps": 2}},
    "LoRA": {"student": {"lora": {"rank": 2}, "init": None, "from_teacher": {"layers": 1}}},
    "from the teacher": {"student": {"init": None, "from_teacher": {"layers": 1}}},
}
#: Settings that leave the weights as they are, or nearly so; tests of their own cover them.
ALIKE = {"optim_args", "order by length"}


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.long
def test_a_lever_changes_the_student_and_a_stop_does_not(
    lever: str, taught: Taught, plain: dict[str, Tensor], tmp_path: Path
) -> None:
    sections = {name: part for name, part in LEVERS[lever].items() if name != "data"}
    config = taught.config(**sections)
    whole = taught.train(config, tmp_path / "whole")
    if lever not in ALIKE:
        assert not same(whole, plain), "the lever is disconnected"
    with pytest.raises(Interrupted):
        taught.train(config, tmp_path / "cut", stop_after(3))
    assert same(taught.train(config, tmp_path / "cut"), whole), "resumed, it is another student"
    lines = [
        [line for line in read_history(tmp_path / name) if line["type"] != "check"]
        for name in ("cut", "whole")
    ]
    assert lines[0] == lines[1]


@pytest.mark.usefixtures("cudnn_attention")
def test_attention_is_planned_where_all_rows_have_one_width(taught: Taught, tmp_path: Path) -> None:
    for order, planned in (("windows", True), ("length", False), ("shuffled", True)):
        options = TrainConfig.model_validate({"max_steps": 1, "order": order})
        source = open_cache(taught.home / "caches" / taught.fingerprints["threshold"])
        precision = Precision.choose("fp32", torch.device("cpu"))
        setting = TrainingSetting(
            source, make_llama(), 50, tmp_path, SILENT, ALONE, torch.device("cpu"), precision
        )
        place_student(setting, options)
        assert torch.backends.cuda.cudnn_sdp_enabled() == planned


@pytest.fixture
def half_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 where the product refuses it: the loss scaler is the same one."""
    half = lambda name, device, tf32=True: Precision(device.type, torch.float16)  # noqa: E731
    monkeypatch.setattr(Precision, "choose", half)


@pytest.mark.long
@pytest.mark.usefixtures("half_on_cpu")
@pytest.mark.parametrize("mode", [None, "adversarial", "lookahead"])
def test_everything_at_once_resumes_bit_for_bit(
    taught: Taught, tmp_path: Path, mode: str | None
) -> None:
    """Loss scaler, average, curriculum, one cycle, Muon, features and a temperature that learns."""
    temperature = {"mode": mode, "interval": 2, **LEARNED} if mode else 1.0
    config = taught.config(
        loss={"temperature": temperature, "features": {"weight": 0.5}, "alpha": 0.3},
        train={"optim": "muon", "lr_scheduler_type": "onecycle", "warmup_steps": 0,
               "ema_decay": 0.9, "order": "curriculum",
               "gradient_checkpointing": "full"},
    )  # fmt: skip
    whole = taught.train(config, tmp_path / "whole")
    for stop in (1, 3, 5):
        with pytest.raises(Interrupted):
            taught.train(config, tmp_path / "cut", stop_after(stop))
    assert same(taught.train(config, tmp_path / "cut"), whole)


@pytest.mark.long
@pytest.mark.parametrize("profile", ["tempered", "hidden"])
@pytest.mark.parametrize("mode", ["adversarial", "entropy", "lookahead", "teacher_only"])
def test_a_learned_temperature_is_told_at_every_step(
    taught: Taught, tmp_path: Path, profile: str, mode: str
) -> None:
    learned = {"mode": mode, "interval": 1, **LEARNED}
    learned |= {"target_entropy": 2.0} if mode == "entropy" else {}
    config = taught.config(profile, loss={"temperature": learned}, train={"logging_steps": 5})
    taught.train(config, tmp_path)
    lines = [
        line for line in read_metrics(tmp_path / "metrics.jsonl") if line["type"] == "temperature"
    ]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    temperatures = [line["temperature"] for line in lines]
    assert temperatures[0] == pytest.approx(1.0) and len(set(temperatures)) > 3, "it moves"
    assert all(0.5 < each < 2.0 for each in temperatures)
    assert all(
        line["temperature_gradient"] is not None and 0 <= line["temperature_margin"] <= 0.5
        for line in lines
    )


@pytest.mark.long
@pytest.mark.parametrize("where", [(LookAhead, "compute_slope"), (StepLoss, "check_parity")])
def test_memory_that_runs_out_has_a_remedy_wherever_it_does(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(*where, run_out)
    learned = {"mode": "lookahead", "interval": 1, **LEARNED}
    with pytest.raises(OutOfMemory) as caught:
        taught.train(taught.config(loss={"temperature": learned}), tmp_path)
    assert "train.batch_size" in caught.value.remedy


def test_a_learned_temperature_is_no_argument_of_the_module_that_ddp_wraps(
    taught: Taught, tmp_path: Path
) -> None:
    """DDP and FSDP move arguments to the GPU, and each read of T would wait for it there."""
    given = list[Any]()

    def see(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, WholeLoss):
            given.extend(inputs)

    config = taught.config(loss={"temperature": {"mode": "adversarial"}})
    hook = nn.modules.module.register_module_forward_pre_hook(see)
    try:
        taught.train(config, tmp_path)
    finally:
        hook.remove()
    assert given
    assert not any(isinstance(each, Tensor) for each in given)


@pytest.mark.long
@pytest.mark.parametrize("how", ["full", "sqrt", 2])
def test_checkpointing_and_chunks_change_no_number(
    taught: Taught, plain: dict[str, Tensor], tmp_path: Path, how: str | int
) -> None:
    checkpointed = taught.train(
        taught.config(train={"gradient_checkpointing": how}), tmp_path / "a"
    )
    assert same(checkpointed, plain)
    chunked = taught.train(taught.config(train={"logits_chunk": 7}), tmp_path / "b")
    assert all(torch.allclose(chunked[name], plain[name], atol=1e-4) for name in plain)


def test_workers_and_prefetching_change_no_number(
    taught: Taught, plain: dict[str, Tensor], tmp_path: Path
) -> None:
    options = {"dataloader_num_workers": 3}
    assert same(taught.train(taught.config(train=options), tmp_path), plain)


def test_a_batch_that_fits_is_left_alone(
    taught: Taught, plain: dict[str, Tensor], tmp_path: Path
) -> None:
    assert same(taught.train(taught.config(train={"auto_batch": True}), tmp_path), plain)


def test_the_average_is_what_is_evaluated_and_kept(taught: Taught, tmp_path: Path) -> None:
    config = taught.config(train={"ema_decay": 0.9, "early_stopping_patience": 100})
    kept = taught.train(config, tmp_path)
    trained = taught.train(taught.config(), tmp_path / "plain")
    assert not same(kept, trained)
    evaluations = [
        line for line in read_metrics(tmp_path / "metrics.jsonl") if line["type"] == "evaluation"
    ]
    without = [
        line
        for line in read_metrics(tmp_path / "plain" / "metrics.jsonl")
        if line["type"] == "evaluation"
    ]
    assert evaluations[0]["validation_loss"] == without[0]["validation_loss"], (
        "before the first step"
    )
    assert evaluations[-1]["validation_loss"] != without[-1]["validation_loss"]


def test_a_profile_and_a_tracker_are_written(taught: Taught, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    taught.train(taught.config(train={"report_to": ["tensorboard"]}), tmp_path)
    profile = json.loads((tmp_path / "profile.json").read_text())
    phases = {phase["name"]: phase for phase in profile["phases"]}
    assert {
        "data",
        "forward",
        "head",
        "backward",
        "optimizer",
        "evaluation",
        "checkpoint",
    } <= phases.keys()
    assert phases["forward"]["count"] == STEPS and sum(
        p["share"] for p in phases.values()
    ) == pytest.approx(1.0)
    assert (
        profile["peak_memory_bytes"] > 2**20
        and profile["tokens_per_second"] > 0
        and profile["mfu"] is None
    )
    assert read_tensorboard(tmp_path / "tensorboard") == pytest.approx(
        list_scalars(tmp_path / "metrics.jsonl"), rel=1e-6
    )


def read_tensorboard(folder: Path) -> dict[tuple[str, int], float]:
    """Every scalar of a run's event files, by its name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found |= {(name, each.step): each.value for each in events.Scalars(name)}
    return found


def list_scalars(path: Path) -> dict[tuple[str, int], float]:
    """Every number of metrics.jsonl but the facts of checks, by its name and step."""
    found = {
        (name, line["step"]): float(value)
        for line in read_metrics(path)
        if line["type"] != "check"
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    }
    names = {name for name, _ in found}
    assert {"loss", "validation_loss", "throughput/tokens_per_second", "memory/peak_bytes",
            "memory/resident_bytes", "grad_norm/layer 1", "grad_norm/group 0",
            "learning_rate/head", "learning_rate/group 1"} <= names  # fmt: skip
    rates = [found["learning_rate/group 0", step] for step in range(1, STEPS + 1)]
    assert rates == [found["learning_rate", step] for step in range(1, STEPS + 1)]
    return found


def test_what_the_records_cannot_serve_is_refused_before_the_first_step(
    taught: Taught, tmp_path: Path
) -> None:
    config = taught.config("hidden", loss={"divergence": "jsd"})
    served = config.model_copy(update={"cache": taught.config("threshold").cache})
    with pytest.raises(ConfigError, match="hidden or dense"):
        taught.train(served, tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_a_frozen_base_stays_as_it_was(taught: Taught, tmp_path: Path) -> None:
    config = taught.config(
        student={"lora": {"rank": 2}, "init": None, "from_teacher": {"layers": 1}}
    )
    after = taught.train(config, tmp_path)
    assert config.student is not None
    torch.manual_seed(42)
    before = build_student(config.student, taught.tokenizer, 32, config.teacher_files)
    for name, parameter in before.named_parameters():
        changed = not torch.equal(after[name], parameter)
        assert changed == parameter.requires_grad == ("lora_" in name), name
    assert isinstance(before, nn.Module)


@pytest.mark.parametrize("teacher_only", [False, True])
@pytest.mark.parametrize("profile", ["tempered", "hidden"])
def test_the_slope_that_looks_ahead_is_that_of_the_loss(
    taught: Taught, profile: str, teacher_only: bool
) -> None:
    """A central difference is the reference.

    It has the teacher's part too, which sampled records have in their weights.
    """
    source = open_cache(taught.home / "caches" / taught.fingerprints[profile])
    torch.manual_seed(0)
    student = build_student(taught.config().student, taught.tokenizer, 32).eval()
    head = find_lm_head(student, get_vocabulary_size(taught.tokenizer))
    cpu = torch.device("cpu")
    precision = Precision("cpu", torch.float32)
    ahead = LookAhead(student, head, source, TargetDecoder.of(source, cpu), 4, precision, cpu)
    batch = ahead._read_batch(0)
    objective = Objective(teacher_only=teacher_only)
    for temperature in (0.7, 1.3):
        step = 1e-2
        ends = (ahead._loss(batch, objective, temperature * math.exp(way)) for way in (step, -step))
        up, down = (float(end.detach()) for end in ends)
        found = ahead._slope(batch, objective, temperature)
        assert found == pytest.approx((up - down) / (2 * step), rel=2e-3)


def test_without_newer_fields_a_job_may_resume_what_was_begun_before_they_existed(
    taught: Taught,
) -> None:
    before_them = {"lm_head_floor": 0.0, "dropout": None}
    plain = taught.config(train=before_them)
    sections = plain.model_dump(
        include={"student", "loss"},
        exclude={"loss": {"router_balance", "tail_control", "balance", "tokenizers"}},
    )
    options = restore_removed(plain.require_train().model_dump(mode="json"), "train.")
    for name in (FREE_FIELDS | NEWER_FIELDS.keys()) & options.keys():
        del options[name]
    content = [
        to_json(restore_removed(sections)).decode(),
        to_json(options).decode(),
        "source",
    ]
    before = hashlib.sha256("\n".join(content).encode()).hexdigest()
    assert compute_resume_identity(plain, "source") == before
    for field in ({"lm_head_floor": 0.1}, {"dropout": 0.0}):
        changed = taught.config(train=before_them | field)
        assert compute_resume_identity(changed, "source") != before


@pytest.mark.long
def test_the_control_of_tails_changes_the_student_and_a_stop_does_not(
    taught: Taught, tmp_path: Path
) -> None:
    config = taught.config("threshold")
    whole = taught.train(config, tmp_path / "whole")
    without = taught.config("threshold", loss={"tail_control": False})
    assert not same(taught.train(without, tmp_path / "without"), whole)
    for stop in (1, 3, 5):
        with pytest.raises(Interrupted):
            taught.train(config, tmp_path / "cut", stop_after(stop))
    assert same(taught.train(config, tmp_path / "cut"), whole)


def test_a_run_with_a_control_of_tails_does_not_go_on_without(
    taught: Taught, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        taught.train(taught.config("threshold"), tmp_path, stop_after(3))
    without = taught.config("threshold", loss={"tail_control": False})
    with pytest.raises(TrainingError, match="tail_control/direction_D"):
        taught.train(without, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"loss": {"entropy_weighting": 1.0}}, {"student": {"lora": {"rank": 2}}}],
    ids=["weights of positions", "a frozen LM head"],
)
def test_the_control_of_tails_is_left_out_where_it_is_of_no_use(
    taught: Taught, tmp_path: Path, changes: dict[str, Any]
) -> None:
    if "student" in changes:
        changes = {"student": {**changes["student"], "init": None, "from_teacher": {"layers": 1}}}
    loss = changes.get("loss", {})
    with_it = taught.config("threshold", **changes)
    without = taught.config("threshold", **{**changes, "loss": {**loss, "tail_control": False}})
    assert same(taught.train(with_it, tmp_path / "a"), taught.train(without, tmp_path / "b"))


@pytest.mark.parametrize(("steps", "alike"), [(5, True), (7, False)])
def test_the_control_of_tails_waits_for_the_end_of_a_curriculum(
    taught: Taught, tmp_path: Path, steps: int, alike: bool
) -> None:
    """The mean of the text says nothing of batches in the order of entropy: an epoch of 5 steps."""
    found = []
    for wanted in (True, False):
        options = {"order": "curriculum", "max_steps": steps}
        config = taught.config("threshold", train=options, loss={"tail_control": wanted})
        found.append(taught.train(config, tmp_path / f"{wanted}"))
    assert same(*found) == alike


def test_the_mean_tail_is_that_of_the_training_text(taught: Taught) -> None:
    """It is what the teacher says of the tails, at all training positions."""
    store = open_cache(taught.home / "caches" / taught.fingerprints["threshold"])
    found = store.tail_mean()
    assert found is not None
    sequences, records = store.read(store.train)
    counted = find_counted(store.codec, records["known"], sequences.find_gold_ids())
    rest, number = count_rest(store.codec, records["known"], counted)
    mass = (records["tail_count"] * rest / WHOLE / np.maximum(number, 1)).mean()
    assert found["mean"].sum() == pytest.approx(mass, rel=1e-2)


def test_a_run_by_windows_of_an_earlier_rule_is_not_resumed(
    taught: Taught, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read some sequences of its epoch twice and others never."""
    jobs = {order: taught.config(train={"order": order}) for order in ("shuffled", "windows")}
    before = {name: compute_resume_identity(job, "source") for name, job in jobs.items()}
    monkeypatch.setattr(resuming, "WINDOWS", "another rule")
    after = {name: compute_resume_identity(job, "source") for name, job in jobs.items()}
    assert after["shuffled"] == before["shuffled"]
    assert after["windows"] != before["windows"]
