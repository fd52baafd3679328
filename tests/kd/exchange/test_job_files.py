"""Job files of DistillKit, axolotl and TRL, converted: values, remarks, and that nothing is lost.

The files have the form of the tools' own examples, with fields of each kind and values other than
the tool's defaults.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kd.config.jobfile import parse_config, parse_yaml
from kd.errors import ConfigError
from kd.exchange.job_files.conversion import Conversion, convert_file, convert_job

DISTILLKIT = """
project_name: kit
model: org/student
trust_remote_code: true
output_path: /models/Student-4B.distilled
use_flash_attention: true
sequence_length: 4096
dataset:
  train_dataset: {repo_id: org/text, config_name: en, split: "train[:1%]", revision: abc}
  eval_dataset: {disk_path: held-out, split: test}
  num_samples: 1000
  seed: 7
loss_functions:
  - {function: cross_entropy, weight: 0.25}
  - {function: kl, weight: 0.75, temperature: 2.0, missing_probability_handling: zero}
  - {function: hs_cosine, weight: 0.5}
  - {function: hinge, weight: 0.1, margin: 0.5}
layer_mapping: all
teacher:
  kind: hf
  path: org/teacher
  kwargs: {torch_dtype: bfloat16, attn_implementation: flash_attention_2}
training_args:
  dataset_text_field: body
  packing: true
  max_steps: 400
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 4
  learning_rate: 1e-5
  weight_decay: 0.05
  warmup_ratio: 0.03
  lr_scheduler_type: cosine
  bf16: false
  optim: paged_adamw_8bit
  gradient_checkpointing: false
  save_steps: 200
  report_to: [wandb, comet_ml]
  push_to_hub: true
"""
DISTILLKIT_OFFLINE = """
model: org/student
sequence_length: 8192
dataset:
  train_dataset: {repo_id: org/logits-packed, split: first}
  prepacked: true
teacher:
  kind: dataset
  logprob_compressor: {d: 128, k: 50, exact_k: 1}
output_path: out
loss_functions:
  - {function: cross_entropy, weight: 0.5}
  - {function: kl, weight: 0.5, temperature: 1.5, sparse_chunk_length: 1024}
training_args: {num_train_epochs: 2, learning_rate: 2.e-7}
"""
AXOLOTL_ONLINE = """
base_model: org/student
revision_of_model: abc
plugins: [axolotl.integrations.kd.KDPlugin]
kd_trainer: true
kd_ce_alpha: 0.5
kd_alpha: 1.5
kd_temperature: 2.0
kd_beta: 0.5
kd_online_server_base_url: "http://teacher:8000/"
kd_online_server_model: served
kd_online_server: sglang
kd_online_topk: 32
kd_online_timeout: 60
datasets:
  - {path: org/chats, type: chat_template, split: train_sft, field_messages: turns}
test_datasets:
  - {path: org/held-out, split: test}
sequence_len: 4096
sample_packing: true
adapter: qlora
load_in_4bit: true
lora_r: 64
lora_alpha: 128
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [embed_tokens]
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 200
warmup_ratio: 0.1
optimizer: lion_pytorch
lr_scheduler: linear
learning_rate: 2e-4
bf16: auto
tf32: true
gradient_checkpointing: true
torch_compile: true
wandb_project: tests
use_tensorboard: true
evals_per_epoch: 4
special_tokens: {pad_token: "<|end|>"}
output_dir: ./outputs/kd-run
"""
AXOLOTL_OFFLINE = """
base_model: org/student
tokenizer_config: org/teacher
kd_trainer: true
kd_ce_alpha: 0.1
kd_alpha: 0.9
datasets:
  - path: org/logprobs
    type: axolotl.integrations.kd.chat_template
    field_messages: messages_combined
    logprobs_field: llm_text_generation_vllm_logprobs
val_set_size: 0.05
sequence_len: 4096
num_epochs: 3
cosine_min_lr_ratio: 0.1
learning_rate: 0.0001
"""
TRL_GKD = """
model_name_or_path: org/student
model_revision: v2
teacher_model_name_or_path: org/teacher
teacher_model_init_kwargs: {dtype: float16, attn_implementation: eager}
dataset_name: org/chats
dataset_config: en
dataset_train_split: train_sft
eval_strategy: steps
eval_steps: 50
lmbda: 0.25
beta: 0.1
temperature: 0.7
max_new_tokens: 64
max_length: 2048
learning_rate: 1.0e-5
warmup_steps: 0.1
max_steps: 100
use_peft: true
lora_r: 64
lora_target_modules: all-linear
load_in_8bit: true
output_dir: runs/GKD model
report_to: trackio
"""
TRL_SERVER = """
model_name_or_path: org/student
teacher_model_name_or_path: org/teacher
teacher_model_server_url: http://teacher:8000
loss_top_k: 16
beta: 0.0
datasets:
  - {path: org/a, name: en, split: first, fraction: 0.25}
  - {path: org/b, fraction: 0.75, columns: [prompt]}
test_split_size: 0.1
learning_rate: 2.0e-5
num_train_epochs: 1
disable_dropout: true
use_vllm: true
vllm_mode: server
output_dir: Out
"""
FILES = {
    "distillkit": ("distillkit", DISTILLKIT),
    "distillkit, records": ("distillkit", DISTILLKIT_OFFLINE),
    "axolotl, server": ("axolotl", AXOLOTL_ONLINE),
    "axolotl, records": ("axolotl", AXOLOTL_OFFLINE),
    "trl, GKD": ("trl", TRL_GKD),
    "trl, server": ("trl", TRL_SERVER),
}
#: Fields that only say which of the tool's trainers the file is for, or what its default is.
SAYS_NOTHING = {"kd_trainer", "kind", "load_in_8bit", "load_in_4bit", "lora_target_modules"}


def convert(name: str) -> Conversion:
    tool, text = FILES[name]
    return convert_job(parse_yaml(text), tool)


def remarks_of(found: Conversion) -> dict[str, str]:
    return {each.field: each.text for each in found.remarks}


def list_leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in pairs:
        if isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], dict)):
            yield from list_leaves(value, (*path, key))
        else:
            yield (*path, key)


def drop_leaf(data: Any, path: tuple[Any, ...]) -> Any:
    made = copy.deepcopy(data)
    place = made
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return made


def list_sections(path: tuple[Any, ...]) -> list[str]:
    """The dotted names of the mappings that hold a field; a remark names a whole one."""
    return [".".join(map(str, path[:end])) for end in range(1, len(path))]


@pytest.mark.parametrize("name", FILES)
def test_what_is_printed_is_a_job(name: str) -> None:
    found = convert(name)
    assert parse_config(parse_yaml(found.render())) == parse_config(found.job)
    assert found.render().startswith("# ")


@pytest.mark.parametrize("name", FILES)
def test_no_field_is_lost(name: str) -> None:
    """Without a field the job or the remarks are others, or there is no job."""
    tool, text = FILES[name]
    data, whole = parse_yaml(text), convert(name)
    lost = []
    for path in list_leaves(data):
        try:
            same = convert_job(drop_leaf(data, path), tool) == whole
        except ConfigError:
            same = False
        named = {each.field for each in whole.remarks} & set(list_sections(path))
        if same and not named and path[-1] not in SAYS_NOTHING:
            lost.append(path)
    assert lost == []


@pytest.mark.parametrize("name", FILES)
def test_a_field_that_no_rule_knows_is_named(name: str) -> None:
    tool, text = FILES[name]
    found = convert_job(parse_yaml(text) | {"brand_new": 1, "not_given": None}, tool)
    assert "brand_new: has no counterpart here." in map(str, found.remarks)
    assert "not_given" not in remarks_of(found)


def test_the_values_of_distillkit() -> None:
    found = convert("distillkit")
    job, remarks = parse_config(found.job), remarks_of(found)
    assert (job.kind, job.name) == ("distill", "student-4b-distilled")
    assert job.teacher is not None and job.teacher.dtype == "bfloat16"
    # The weights are shares of CE and KL alone: 0.25 / (0.25 + 0.75), and 0.5 / 1 for the states.
    assert (job.loss.alpha, job.loss.features.weight) == (0.25, 0.5)
    assert (job.loss.temperature, job.cache.profile) == (2.0, "hidden")
    train = job.require_train()
    assert (train.max_steps, train.warmup_steps, train.learning_rate) == (400, 12, 1e-5)
    assert (train.optim, train.precision, train.adam_beta2) == ("adamw_8bit", "fp32", 0.999)
    assert "hinge" in remarks["loss_functions[3].function"]
    assert remarks["training_args.report_to"] == "not known: comet_ml."


def test_records_of_distillkit_become_a_job_that_waits_for_their_import() -> None:
    found = convert("distillkit, records")
    job = parse_config(found.job)
    assert (job.kind, job.teacher, job.loss.temperature) == ("train", None, 1.0)
    assert "kd cache import distillkit" in remarks_of(found)["teacher.kind"]
    assert "temperature 1 only" in remarks_of(found)["loss_functions[1].function"]


def test_the_values_of_axolotl() -> None:
    found = convert("axolotl, server")
    job, remarks = parse_config(found.job), remarks_of(found)
    assert job.teacher is not None and job.student is not None and job.student.lora is not None
    assert (job.teacher.backend, job.teacher.url) == ("http", "http://teacher:8000")
    assert (job.cache.profile, job.cache.k, job.loss.alpha) == ("topk", 32, 0.25)
    assert (job.student.lora.rank, job.student.lora.base) == (64, "bfloat16")
    train = job.require_train()
    assert (train.batch_size, train.warmup_steps, train.optim) == (2, 20, "lion")
    assert list(train.report_to or ()) == ["wandb", "tensorboard"]
    assert {"kd_temperature", "kd_beta", "kd_alpha", "kd_online_server"} <= set(remarks)
    floor = parse_config(convert("axolotl, records").job).require_train()
    assert floor.lr_scheduler_type == "cosine_with_min_lr"
    assert floor.lr_scheduler_kwargs == {"min_lr_rate": 0.1}


def test_the_values_of_trl() -> None:
    job = parse_config(convert("trl, GKD").job)
    assert (job.loss.alpha, job.loss.divergence, job.loss.beta) == (0.0, "jsd", 0.1)
    assert (job.cache.profile, job.data.format, job.name) == ("hidden", "messages", "gkd-model")
    assert job.require_train().warmup_steps == 10
    served = parse_config(convert("trl, server").job)
    assert (served.cache.profile, served.cache.k, served.loss.divergence) == (
        "topk",
        16,
        "forward_kl",
    )


@pytest.mark.parametrize(("beta", "divergence"), [(0, "forward_kl"), (1, "reverse_kl")])
def test_the_ends_of_beta_are_the_two_kls(beta: int, divergence: str) -> None:
    found = convert_job(parse_yaml(TRL_GKD) | {"beta": beta}, "trl")
    assert parse_config(found.job).loss.divergence == divergence


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "must be a mapping"),
        ({"learning_rate": "fast"}, "learning_rate must be a number"),
        (parse_yaml(TRL_GKD) | {"learning_rate": 100.0}, "train.learning_rate"),
        (parse_yaml(TRL_GKD) | {"model_name_or_path": None}, "student: give exactly one"),
    ],
)
def test_what_cannot_be_a_job_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert_job(data, "trl")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gkd.yaml"
    path.write_text(TRL_GKD)
    assert convert_file(path, "trl") == convert("trl, GKD")
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        convert_file(path, "trl")
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_file(tmp_path / "none.yaml", "trl")
    with pytest.raises(ConfigError, match="one of distillkit, axolotl, trl"):
        convert_file(path, "unsloth")


def test_remarks_are_comments() -> None:
    lines = convert("trl, GKD").render().splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert comments == [f"# {each}" for each in convert("trl, GKD").remarks]
    assert yaml.safe_load("\n".join(lines))["kind"] == "distill"
