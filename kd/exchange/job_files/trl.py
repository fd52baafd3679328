"""Read a job of TRL's DistillationTrainer, ServerDistillationTrainer or GKDTrainer.

Format: the YAML file of TRL's scripts (``--config``), whose keys are the fields of ScriptArguments,
ModelConfig, and DistillationConfig or GKDConfig. beta 0 is KL(teacher || student), beta 1 the
reverse, and between them the generalised Jensen-Shannon divergence, with the teacher's weight beta
in the mixture, as ours.
"""

from __future__ import annotations

from typing import Any

from kd.exchange.job_files.draft import Draft, Fields
from kd.exchange.job_files.training import (
    REASONS,
    TRAINER_DEFAULTS,
    make_name,
    write_adapters,
    write_training,
)

#: Fields that only GKDConfig has.
GKD_FIELDS = ("lmbda", "seq_kd", "max_new_tokens")
COMMON = TRAINER_DEFAULTS | {"bf16": True, "gradient_checkpointing": True}
#: The defaults of GKDConfig, and those of DistillationConfig.
GKD = COMMON | {"learning_rate": 2e-5, "beta": 0.5, "temperature": 0.9}
DISTILLATION = COMMON | {"learning_rate": 1e-6, "beta": 1.0, "temperature": 1.0}
_ON_POLICY = (
    "the student writes no texts here: it learns from the texts of the dataset. Let the teacher "
    "write the answers first."
)


def read_job(data: Any, draft: Draft) -> None:
    """Write the job of a parsed file into the draft."""
    fields = Fields(data, draft)
    gkd = any(name in fields for name in GKD_FIELDS)
    if not gkd:
        draft.remark("beta", "read as a file of DistillationTrainer; one of GKD has lmbda.")
    defaults = GKD if gkd else DISTILLATION
    draft.put("kind", "distill")
    draft.put("name", make_name(fields.take("output_dir", "job")))
    _read_models(fields, draft)
    _read_data(fields, draft, gkd)
    _read_loss(fields, draft, defaults)
    write_training(fields, draft, defaults)
    if fields.take("disable_dropout", gkd):
        draft.put("train.dropout", 0.0)
    fields.close(
        REASONS
        | dict.fromkeys(
            ("lmbda", "max_new_tokens", "max_completion_length", "seq_kd", "top_p", "top_k",
             "min_p", "generation_kwargs", "repetition_penalty", "use_vllm", "vllm_",
             "cache_implementation", "max_tool_calling_iterations"),
            _ON_POLICY,
        )
        | {
            "dtype": "the student's weights are in float32 and computed in train.precision.",
            "loss_add_tail": "profile topk always keeps the mass of the rest as one bucket.",
        }
    )  # fmt: skip


def _read_models(fields: Fields, draft: Draft) -> None:
    if (model := fields.take("model_name_or_path")) is not None:
        draft.put("student.model", model)
    if (revision := fields.take("model_revision", "main")) != "main":
        draft.put("student.revision", revision)
    _read_teacher(fields, draft, model)
    if fields.take("use_peft", False):
        write_adapters(fields, draft, dropout=0.05)


def _read_teacher(fields: Fields, draft: Draft, student: Any) -> None:
    teacher = fields.take("teacher_model_name_or_path", student)
    draft.put("teacher.model", teacher)
    if (revision := fields.take("teacher_model_revision")) is not None:
        draft.put("teacher.revision", revision)
    if (url := fields.take("teacher_model_server_url")) is not None:
        draft.put("teacher.backend", "http")
        draft.put("teacher.url", url)
        draft.put("teacher.tokenizer", student)
        draft.put("cache", {"profile": "topk", "k": fields.take("loss_top_k", 1)})
        fields.remark(
            "teacher_model_server_url",
            "must be an OpenAI-compatible server (`vllm serve`); teacher.model is its name there.",
        )
    elif fields.take("trust_remote_code", False):
        draft.put("teacher.trust_remote_code", True)
    arguments = fields.section("teacher_model_init_kwargs")
    if (dtype := arguments.take("dtype", arguments.take("torch_dtype"))) is not None:
        draft.put("teacher.dtype", str(dtype).removeprefix("torch."))
    arguments.close(REASONS)


def _read_data(fields: Fields, draft: Draft, gkd: bool) -> None:
    train_split = fields.take("dataset_train_split", "train")
    test_split = fields.take("dataset_test_split", "test")
    path, name = fields.take("dataset_name"), fields.take("dataset_config")
    mixture = fields.take("datasets", [])
    if mixture:
        sources = [
            _read_source(Fields(each, draft, f"datasets[{place}]."))
            for place, each in enumerate(mixture)
        ]
    else:
        sources = [_name_dataset(path, name, train_split)]
    draft.put("data.train", sources)
    if fields.take("eval_strategy", "no") != "no" and path is not None and not mixture:
        draft.put("data.validation", [_name_dataset(path, name, test_split)])
    if (share := fields.take_number("test_split_size")) is not None:
        draft.put("data.validation_fraction", share)
    if fields.take("dataset_streaming", False) or fields.take("streaming", False):
        draft.put("data.streaming", True)
        fields.remark("dataset_streaming", "a stream needs data.max_train_samples.")
    draft.put("data.format", "messages" if gkd else "prompt_completion")
    fields.remark(
        "dataset_name",
        "data.format is a guess: messages, prompt_completion, or auto for plain text"
        + ("." if gkd else f"; {_ON_POLICY}"),
    )
    draft.put("data.sequence_length", fields.take("max_length", 1024))
    draft.put("data.packing", fields.take("packing", False))


def _read_source(fields: Fields) -> dict[str, Any]:
    made = _name_dataset(fields.take("path"), fields.take("name"), fields.take("split", "train"))
    if (share := fields.take_number("fraction")) is not None:
        made["weight"] = share
    fields.close()
    return made


def _name_dataset(path: Any, name: Any, split: Any) -> dict[str, Any]:
    return {"path": path} | ({"name": name} if name else {}) | {"split": split}


def _read_loss(fields: Fields, draft: Draft, defaults: dict[str, Any]) -> None:
    beta = fields.take_number("beta", defaults["beta"])
    temperature = fields.take_number("temperature", defaults["temperature"])
    draft.put("loss.alpha", 0.0)
    if draft.job["teacher"].get("backend") == "http":
        if beta or temperature != 1.0:
            fields.remark(
                "beta",
                f"{beta:g} at temperature {temperature:g}: the records of a server serve KL"
                "(teacher || student) at temperature 1 only, which the job has.",
            )
        return
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "jsd")
    draft.put("loss.divergence", divergence)
    if divergence == "jsd":
        draft.put("loss.beta", beta)
    draft.put("loss.temperature", temperature)
    if divergence != "forward_kl" or temperature != 1.0:
        draft.put("cache.profile", "hidden")
        fields.remark("beta", "needs a cache of profile hidden, which the job has.")
    if temperature != 1.0:
        fields.remark("temperature", "the divergence is also multiplied by T^2 here.")
