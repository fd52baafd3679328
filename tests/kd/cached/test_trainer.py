"""The trainers against our own loop: the same batches in the same order give the same losses."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments

from bench.support.paths import ROOT
from bench.support.small.caches import make_cache, make_codec, make_identity
from cache.store import open_cache as open_store
from kd.cached.loss import DistillationLoss, make_training_batch
from kd.cached.opening import OpenCache, open_cache
from kd.cached.trainer import CachedDistillationTrainer
from kd.config.jobfile import parse_config
from kd.errors import TokenizerMismatch
from kd.models.layers import compute_hidden_states
from kd.progress import Monitor
from kd.tracking.metrics import read_metrics
from kd.training.loop import train
from tests.support.kd.own_loops import LENGTH, VOCABULARY
from tests.support.kd.students import copy_weights, make_llama

#: TRL and peft use names of transformers that its next version will not have.
OLD_NAMES = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
STEPS, BATCH, RATE, ALPHA, SEED = 12, 4, 3e-3, 0.25, 5


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Caches of packed documents whose epochs hold a whole number of batches."""
    root = tmp_path_factory.mktemp("caches")
    shape = (VOCABULARY, LENGTH, 24, 4)
    return {
        profile: make_cache(root, make_identity(*shape, make_codec(profile, **options)))
        for profile, options in (("threshold", {}), ("tempered", {"draws": 2}))
    }


def make_student() -> LlamaForCausalLM:
    return make_llama(VOCABULARY + 6)


def train_ourselves(
    folder: Path, out: Path, profile: str, temperature: float, micro: int = BATCH, seed: int = SEED
) -> tuple[list[float], LlamaForCausalLM]:
    """The losses and the student of our own loop, with all that the trainers lack switched off."""
    job = parse_config(
        {
            "kind": "train",
            "teacher": {"model": "unused"},
            "cache": {"profile": profile},
            "student": {"init": {"layers": 2, "hidden_size": 16, "tokenizer": "."}},
            "data": {"train": "unused.txt", "sequence_length": LENGTH},
            "loss": {"alpha": ALPHA, "temperature": temperature, "tail_control": False},
            "train": {
                "max_steps": STEPS,
                "batch_size": micro,
                "gradient_accumulation_steps": BATCH // micro,
                "learning_rate": RATE,
                "lr_scheduler_type": "constant",
                "weight_decay": 0.0,
                "adam_beta2": 0.999,
                "lm_head_floor": 0.0,
                "max_grad_norm": 0.0,
                "precision": "fp32",
                "order": "windows",
                "seed": seed,
                "logging_steps": 1,
            },
        }
    )
    source = open_store(folder)
    student = make_student()
    train(job, source, student, VOCABULARY, out, Monitor())
    lines = read_metrics(out / "metrics.jsonl")
    return [line["loss"] for line in lines if line["type"] == "metrics"], student


def choose_arguments(out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        "max_grad_norm": 0.0,
        "seed": SEED,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    } | changes


def assert_same_training(trainer: Any, own: tuple[list[float], LlamaForCausalLM]) -> None:
    """Compare the losses that the trainer logged, and its weights, with those of our own loop."""
    expected, student = own
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(found) == len(expected) == STEPS
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)
    weights = copy_weights(student)
    start = copy_weights(make_student())
    for name, each in trainer.model.named_parameters():
        torch.testing.assert_close(each.detach(), weights[name], rtol=0, atol=1e-4)
        assert not torch.allclose(weights[name], start[name], rtol=0, atol=1e-3), name


@pytest.mark.long
@pytest.mark.parametrize("profile, temperature", [("threshold", 1.0), ("tempered", 1.5)])
@pytest.mark.parametrize("micro", [BATCH, BATCH // 2])
def test_the_trainer_has_the_loss_curve_of_our_own_loop(
    packed: dict[str, Path], tmp_path: Path, profile: str, temperature: float, micro: int
) -> None:
    own = train_ourselves(packed[profile], tmp_path / "own", profile, temperature, micro)
    opened = open_cache(packed[profile])
    arguments = choose_arguments(
        tmp_path / "theirs",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=BATCH // micro,
    )
    trainer = CachedDistillationTrainer(
        make_student(),
        TrainingArguments(**arguments),
        opened=opened,
        loss_fn=DistillationLoss(opened, ALPHA, temperature),
    )
    trainer.train()
    assert_same_training(trainer, own)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    words["<eos>"] = words.pop("w0")
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    )


@pytest.mark.long
@OLD_NAMES
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_of_trl_has_the_loss_curve_of_our_own_loop(
    packed: dict[str, Path], tmp_path: Path, checkpointing: bool
) -> None:
    trl = pytest.importorskip("trl")
    from kd.cached.sft import CachedDistillationSFTTrainer

    own = train_ourselves(packed["threshold"], tmp_path / "own", "threshold", 1.0)
    opened = open_cache(packed["threshold"])
    arguments = choose_arguments(
        tmp_path / "theirs", bf16=False, gradient_checkpointing=checkpointing
    )
    trainer = CachedDistillationSFTTrainer(
        make_student(),
        trl.SFTConfig(**arguments),
        opened=opened,
        loss_fn=DistillationLoss(opened, ALPHA),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    assert_same_training(trainer, own)


def test_without_trl_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kd.cached.sft", raising=False)
    monkeypatch.setitem(sys.modules, "trl.trainer.sft_trainer", None)
    with pytest.raises(ImportError, match=r"pip install 'potstill\[trl\]'"):
        importlib.import_module("kd.cached.sft")


def test_the_trainer_evaluates_on_the_held_out_sequences(
    packed: dict[str, Path], tmp_path: Path
) -> None:
    opened = open_cache(packed["threshold"])
    student = make_student()
    trainer = CachedDistillationTrainer(
        student, TrainingArguments(**choose_arguments(tmp_path)), opened=opened
    )
    found = trainer.evaluate()["eval_loss"]
    loader = DataLoader(opened.validation, 2, collate_fn=opened.collate)
    expected = [compute_plainly(student, opened, batch) for batch in loader]
    assert found == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def compute_plainly(student: LlamaForCausalLM, opened: OpenCache, batch: dict[str, Any]) -> float:
    """The loss from hidden states of the student, as a loop of one's own computes them."""
    student.eval()
    with torch.no_grad():
        hidden = student.base_model(
            batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).last_hidden_state
        return float(DistillationLoss(opened)(hidden, student.lm_head.weight, batch))


def test_documents_of_a_packed_row_stay_apart(packed: dict[str, Path], tmp_path: Path) -> None:
    """Another first document changes no loss but its own, in the trainer's forward pass."""
    opened = open_cache(packed["threshold"])
    student = make_student()
    trainer = CachedDistillationTrainer(
        student, TrainingArguments(**choose_arguments(tmp_path)), opened=opened
    )
    batch = make_training_batch(next(iter(opened.stream(4))))
    assert batch.packed is not None
    rows = batch.packed.positions_BL.diff(dim=1).ne(1).float().argmax(1) + 1
    first = torch.arange(LENGTH) < rows[:, None]
    changed = torch.where(first, (batch.tokens_BL + 1) % VOCABULARY, batch.tokens_BL)
    assert trainer.model is student
    student.eval()
    hidden, other = (
        compute_hidden_states(student, tokens, batch.packed)
        for tokens in (batch.tokens_BL, changed)
    )
    torch.testing.assert_close(hidden[~first], other[~first])
    assert not torch.allclose(hidden[first], other[first])


@OLD_NAMES
def test_adapters_of_peft_are_trained(packed: dict[str, Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    student = peft.get_peft_model(
        make_student(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    before = {name: each.clone() for name, each in student.named_parameters()}
    opened = open_cache(packed["threshold"])
    trainer = CachedDistillationTrainer(
        student, TrainingArguments(**choose_arguments(tmp_path)), opened=opened
    )
    trainer.train()
    moved = {name for name, each in student.named_parameters() if not each.equal(before[name])}
    assert moved == {name for name in before if "lora" in name}


def test_a_model_without_all_tokens_of_the_cache_is_refused(
    packed: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(TokenizerMismatch, match="300 tokens"):
        CachedDistillationTrainer(
            make_llama(VOCABULARY - 1),
            TrainingArguments(**choose_arguments(tmp_path)),
            opened=open_cache(packed["threshold"]),
        )


def test_what_a_trainer_cannot_serve_is_refused(packed: dict[str, Path], tmp_path: Path) -> None:
    arguments = TrainingArguments(**choose_arguments(tmp_path))
    decoded = open_cache(packed["threshold"], form="entries")
    with pytest.raises(ValueError, match="must have the form records"):
        CachedDistillationTrainer(make_student(), arguments, opened=decoded)
    opened = open_cache(packed["threshold"])
    trainer = CachedDistillationTrainer(make_student(), arguments, opened=opened)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="FSDP and DeepSpeed are not supported"):
        trainer.learn_from(opened, None, "windows")
    trainer.is_fsdp_enabled = False
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="one process for each GPU"):
        trainer.learn_from(opened, None, "windows")


@pytest.mark.long
def test_the_example_of_plain_torch_trains_as_our_own_loop(
    packed: dict[str, Path], tmp_path: Path
) -> None:
    path = ROOT / "examples/loops/plain_torch.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    example = runpy.run_path(str(path))
    make_student().save_pretrained(tmp_path / "student")
    settings = {"BATCH": BATCH, "ALPHA": ALPHA}
    example["main"].__globals__.update(settings)
    losses = example["main"](
        str(packed["threshold"]), str(tmp_path / "student"), str(tmp_path / "out"), steps=STEPS
    )
    assert len(losses) == STEPS and (tmp_path / "out" / "model.safetensors").is_file()
    own, _ = train_ourselves(packed["threshold"], tmp_path / "own", "threshold", 1.0, seed=0)
    assert losses[0] == pytest.approx(own[0], abs=1e-5)
