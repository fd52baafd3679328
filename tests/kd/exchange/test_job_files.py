"""Job files of DistillKit, axolotl and TRL, converted: values, remarks, and that nothing is lost.

The files have the form of the tools' own examples, with fields of each kind and values other than
the tool's defaults.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kd.config.jobfile import parse_config, parse_yaml
from kd.errors import ConfigError
from kd.exchange.job_files.conversion import Conversion, convert_file, convert_job
from kd.exchange.job_files.trl import DISTILLATION, GKD, SFT

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
AXOLOTL_PLAIN = """
base_model: org/student
load_in_8bit: false
datasets:
  - path: org/chats
    type: chat_template
    message_property_mappings: {role: from, content: value}
  - {path: json, data_files: [a.jsonl, b.jsonl]}
  - {path: texts/more.jsonl, ds_type: json, type: alpaca}
val_set_size: 200
sequence_len: 1024
adapter: lora
lora_r: 8
lora_target_linear: true
lora_target_modules: [q_proj, embed_tokens]
gradient_accumulation_steps: 2
micro_batch_size: 4
max_steps: 1000
optimizer: paged_lion_8bit
adam_beta1: 0.8
lr_scheduler: one_cycle
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
bfloat16: true
tf32: auto
gradient_checkpointing: offload
group_by_length: true
use_trackio: true
"""
TRL_SFT = """
model_name_or_path: org/student
dataset_name: org/chats
torch_dtype: bfloat16
max_seq_length: 512
assistant_only_loss: true
chat_template: "{{ messages }}"
eval_strategy: no
activation_offloading: true
num_train_epochs: 1
gradient_accumulation_steps: 4
torch_compile: true
torch_compile_mode: max-autotune
fp16: true
use_peft: true
load_in_4bit: true
"""
#: The tool, its file, and the teacher that is given beside it.
FILES = {
    "distillkit": ("distillkit", DISTILLKIT, None),
    "distillkit, records": ("distillkit", DISTILLKIT_OFFLINE, None),
    "axolotl, server": ("axolotl", AXOLOTL_ONLINE, None),
    "axolotl, records": ("axolotl", AXOLOTL_OFFLINE, None),
    "axolotl, plain": ("axolotl", AXOLOTL_PLAIN, "org/teacher"),
    "trl, GKD": ("trl", TRL_GKD, None),
    "trl, server": ("trl", TRL_SERVER, None),
    "trl, SFT": ("trl", TRL_SFT, "org/teacher"),
}
#: Fields that only say which of the tool's trainers the file is for, or what its default is.
SAYS_NOTHING = {"kd_trainer", "kind", "load_in_8bit", "load_in_4bit", "lora_target_modules",
                "bf16", "tf32", "eval_strategy", "activation_offloading"}  # fmt: skip


def convert(name: str) -> Conversion:
    return change(name)


def change(name: str, **fields: Any) -> Conversion:
    """Convert a file with other values of some fields; None leaves a field out."""
    tool, text, teacher = FILES[name]
    return convert_job(parse_yaml(text) | fields, tool, teacher)


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
    tool, text, teacher = FILES[name]
    data, whole = parse_yaml(text), convert(name)
    lost = []
    for path in list_leaves(data):
        try:
            same = convert_job(drop_leaf(data, path), tool, teacher) == whole
        except ConfigError:
            same = False
        named = {each.field for each in whole.remarks} & set(list_sections(path))
        if same and not named and path[-1] not in SAYS_NOTHING:
            lost.append(path)
    assert lost == []


@pytest.mark.parametrize("name", FILES)
def test_a_field_that_no_rule_knows_is_named(name: str) -> None:
    found = change(name, brand_new=1, not_given=None)
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


@pytest.mark.parametrize(
    ("tool", "data", "message"),
    [
        ("trl", {"beta": 0.1, "max_prompt_length": 512}, "beta is of another trainer"),
        ("trl", {"reward_funcs": ["accuracy"]}, "reward_funcs is of another trainer"),
        ("trl", {"num_train_epochs": 1}, "names no teacher.*--teacher"),
        ("trl", {"lmbda": 0.5}, "names no teacher.*--teacher"),
        ("axolotl", {"rl": "dpo"}, "rl is another kind of training"),
        ("axolotl", {"reward_model": True}, "reward_model is another kind of training"),
        ("axolotl", {"learning_rate": 1e-5}, "names no teacher.*--teacher"),
        ("distillkit", {"model": "org/student"}, "teacher is missing"),
    ],
)
def test_a_file_that_does_not_distil_is_refused(
    tool: str, data: dict[str, Any], message: str
) -> None:
    """Such files were read as distillation: DPO's beta became a divergence."""
    known = {"model_name_or_path": "org/student", "base_model": "org/student"}
    texts = {"dataset_name": "org/chats", "datasets": [{"path": "org/chats"}]}
    with pytest.raises(ConfigError, match=message):
        convert_job(known | texts | data, tool)


@pytest.mark.parametrize("name", [name for name, (_, _, teacher) in FILES.items() if not teacher])
def test_a_file_has_one_teacher(name: str) -> None:
    tool, text, _ = FILES[name]
    with pytest.raises(ConfigError, match="Leave out --teacher"):
        convert_job(parse_yaml(text), tool, "org/teacher")


@pytest.mark.parametrize("wrong", ["text", [1], {"a": 1}])
@pytest.mark.parametrize("name", FILES)
def test_a_value_of_another_type_is_refused_or_converted(name: str, wrong: Any) -> None:
    """Whatever stands at a field, the answer is a job or an error that names it."""
    tool, text, teacher = FILES[name]
    data = parse_yaml(text)
    answers = set()
    for path in [*list_leaves(data), *[(key,) for key in data]]:
        changed = drop_leaf(data, path)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place.insert(path[-1], wrong) if isinstance(place, list) else place.update(
            {path[-1]: wrong}
        )
        try:
            answers.add(type(convert_job(changed, tool, teacher)))
        except ConfigError:
            answers.add(ConfigError)
    assert answers == {Conversion, ConfigError}


def test_fine_tuning_of_axolotl_gets_a_teacher() -> None:
    found = convert("axolotl, plain")
    job, remarks = parse_config(found.job), remarks_of(found)
    assert job.kind == "distill" and job.teacher is not None and job.student is not None
    assert (job.teacher.backend, job.teacher.model) == ("local", "org/teacher")
    assert (job.loss.alpha, job.loss.divergence, job.cache.profile) == (
        0.1,
        "forward_kl",
        "threshold",
    )
    assert found.job["data"]["train"] == [
        {"path": "org/chats"},
        "a.jsonl",
        "b.jsonl",
        "texts/more.jsonl",
    ]
    assert job.data.format == "sharegpt"
    assert "differs from that of another dataset" in remarks["datasets[2].type"]
    train = job.require_train()
    # A share of 0.03 of the steps, as axolotl has by default.
    assert (train.warmup_steps, train.lr_scheduler_type) == (30, "onecycle")
    assert "only the schedule cosine" in remarks["cosine_min_lr_ratio"]
    assert (train.optim, train.optim_args) == ("lion", {"beta1": 0.8, "beta2": 0.999})
    assert (train.precision, train.tf32, train.order) == ("bf16", True, "length")
    assert (train.gradient_checkpointing, train.activation_offload) == ("full", True)
    # lora_target_linear adds all linear layers to those that are named.
    assert job.student.lora is not None and job.student.lora.targets == ()


def test_what_axolotl_does_by_default() -> None:
    """Precision by the hardware, 512 tokens, and some warm-up."""
    bare = change(
        "axolotl, plain", bfloat16=None, sequence_len=None, cosine_min_lr_ratio=None, max_steps=9000
    )
    job = parse_config(bare.job)
    assert (job.require_train().precision, job.data.sequence_length) == ("auto", 512)
    assert job.require_train().warmup_steps == 100
    longer = change("axolotl, plain", max_steps=None)
    assert "0.03 of the run's steps, and at most 100" in remarks_of(longer)["warmup_ratio"]
    constant = change("axolotl, plain", lr_scheduler="constant", max_steps=None)
    assert "warmup_ratio" not in remarks_of(constant)
    # axolotl rounds a share down, and makes one step two.
    few = change("axolotl, plain", warmup_ratio=0.0019)
    assert parse_config(few.job).require_train().warmup_steps == 2
    quoted = change("axolotl, plain", bfloat16=None, bf16="false", fp16="False")
    assert parse_config(quoted.job).require_train().precision == "fp32"
    fp16 = change("axolotl, plain", bfloat16=None, fp16=True)
    assert parse_config(fp16.job).require_train().precision == "fp16"


def test_plugins_of_axolotl_that_change_the_training_are_named() -> None:
    names = [
        "axolotl.integrations.liger.LigerPlugin",
        "axolotl.integrations.spectrum.SpectrumPlugin",
    ]
    assert remarks_of(change("axolotl, plain", plugins=names[:1]))["plugins"] == "not needed."
    assert (
        remarks_of(change("axolotl, plain", plugins=names))["plugins"] == f"not read: {names[1]}."
    )


def test_adapters_of_axolotl() -> None:
    named = change("axolotl, plain", lora_target_linear=False)
    job = parse_config(named.job)
    assert job.student is not None and job.student.lora is not None
    assert job.student.lora.targets == ("q_proj", "embed_tokens")
    # Frozen weights in bfloat16 need products in bfloat16.
    half = change("axolotl, plain", adapter="qlora", bfloat16=None, fp16=True)
    student = parse_config(half.job).student
    assert student is not None and student.lora is not None and student.lora.base == "float32"
    with pytest.raises(ConfigError, match="adapter is llama-adapter"):
        change("axolotl, plain", adapter="llama-adapter")
    without = change("axolotl, plain", adapter=None)
    assert "the file has no adapter" in remarks_of(without)["lora_r"]


def test_texts_of_axolotl() -> None:
    texts = [{"path": "org/texts", "name": "en", "type": "pretrain", "text_column": "body"}]
    job = parse_config(change("axolotl, plain", datasets=None, pretraining_dataset=texts).job)
    assert (job.data.format, job.data.text_column) == ("auto", "body")
    turns = [{"path": "org/chats", "type": "chat_template", "field_messages": "conversations"}]
    assert change("axolotl, plain", datasets=turns).job["data"]["format"] == "sharegpt"
    keys = {"message_field_role": "who", "message_field_content": "said"}
    chats = [{"path": "org/chats", "type": "chat_template", "field_messages": "chat"} | keys]
    remarks = remarks_of(change("axolotl, plain", datasets=chats))
    assert "rename the column chat to messages" in remarks["datasets[0].field_messages"]
    assert "datasets[0].message_property_mappings" in remarks
    with pytest.raises(ConfigError, match="datasets is missing"):
        change("axolotl, plain", datasets=[])


def test_fine_tuning_of_trl_gets_a_teacher() -> None:
    found = convert("trl, SFT")
    job, remarks = parse_config(found.job), remarks_of(found)
    assert job.teacher is not None and job.student is not None and job.student.lora is not None
    assert (job.teacher.model, job.teacher.dtype) == ("org/teacher", "bfloat16")
    assert (job.loss.divergence, job.cache.profile) == ("forward_kl", "threshold")
    assert (job.data.sequence_length, job.data.assistant_only_loss) == (512, True)
    assert not job.data.validation
    train = job.require_train()
    assert (train.learning_rate, train.precision, train.compile) == (2e-5, "fp16", "default")
    assert "cannot accumulate" in remarks["torch_compile_mode"]
    assert not train.activation_offload and "compiled" in remarks["activation_offloading"]
    assert "peft has a default" in remarks["lora_target_modules"]
    assert job.student.lora.base == "float32"
    assert parse_config(change("trl, SFT", dataset_text_field="body").job).data.format == "auto"
    files = [{"path": "json", "data_files": "a.jsonl"}]
    mixed = change("trl, SFT", dataset_name=None, datasets=files)
    assert mixed.job["data"]["train"] == ["a.jsonl"]


def test_the_temperature_of_gkd_is_not_that_of_its_loss() -> None:
    found = change("trl, GKD", beta=0.0)
    job = parse_config(found.job)
    assert (job.loss.divergence, job.loss.temperature) == ("forward_kl", 1.0)
    assert job.cache.profile == "threshold"
    assert "GKD's loss has 1" in remarks_of(found)["temperature"]
    # DistillationTrainer divides the logits of its loss by it.
    there = change("trl, GKD", lmbda=None, max_new_tokens=None)
    assert parse_config(there.job).loss.temperature == 0.7


def test_the_defaults_are_those_of_the_installed_trl() -> None:
    trl = pytest.importorskip("trl")
    gkd = pytest.importorskip("trl.experimental.gkd")
    for config, ours in (
        (trl.SFTConfig, SFT),
        (trl.DistillationConfig, DISTILLATION),
        (gkd.GKDConfig, GKD),
    ):
        theirs = {each.name: each.default for each in dataclasses.fields(config)}
        assert {name: theirs[name] for name in ours if name not in ("bf16", "temperature")} == {
            name: value for name, value in ours.items() if name not in ("bf16", "temperature")
        }
        assert theirs["bf16"] is None  # which is true unless fp16 is


def test_entries_of_distillkit_with_a_loss_that_they_do_not_serve() -> None:
    data = parse_yaml(DISTILLKIT)
    data["teacher"]["top_k"] = 64
    found = convert_job(data, "distillkit")
    cache = parse_config(found.job).cache
    assert (cache.profile, cache.k) == ("hidden", None)
    assert "not used" in remarks_of(found)["teacher.top_k"]
    data["loss_functions"] = None
    cache = parse_config(convert_job(data, "distillkit").job).cache
    assert (cache.profile, cache.k) == ("topk", 64)


def test_distillkit_learns_the_whole_chat() -> None:
    assert parse_config(convert("distillkit").job).data.assistant_only_loss is False


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
        (parse_yaml(TRL_GKD) | {"learning_rate": "fast"}, "learning_rate must be a number"),
        (parse_yaml(TRL_GKD) | {"max_steps": float("inf")}, "max_steps must be a number"),
        (parse_yaml(TRL_GKD) | {"dataset_name": None}, "dataset_name is missing"),
        (parse_yaml(TRL_GKD) | {"dataset_mixture": {}}, "dataset_mixture is not a field of TRL"),
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
