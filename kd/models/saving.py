"""Save the finished student as a Hugging Face folder, and load it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cache.json_object import Json
from kd.config.student import StudentConfig
from kd.config.train import TrainConfig
from kd.files import read_json, write_json
from kd.models.adapters import (
    has_adapters,
    load_adapters,
    merge_adapters,
    remove_adapters,
    save_adapters,
)
from kd.models.folder import ADAPTER_CONFIG, ADAPTER_FOLDER, BASE_FOLDER, resolve_model
from kd.models.loading import ReadingPlan, load_model, read_model
from kd.models.precision import Precision, pick_device, round_parameters

#: What transformers 5 keeps in ``rope_parameters`` and transformers 4 beside ``rope_scaling``.
_OLD_ROPE = ("rope_theta", "partial_rotary_factor")
#: Other names of it in GPT-NeoX.
_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
#: Types whose classes in transformers 4 accept no key beside those of the scaling itself, and call
#: its kind "type".
_STRICT_SCALING = {
    "fuyu", "hunyuan_v1_dense", "hunyuan_v1_moe", "olmo", "olmo2", "phi3", "phi4_multimodal"
}  # fmt: skip
#: The context before the scaling, which transformers 4 reads beside it for one kind.
_CONTEXT = "original_max_position_embeddings"
#: Classes of tokenizers that only transformers 5 has, and the one of both that reads any
#: tokenizer.json as it is.
_NEW_CLASSES = {
    "TokenizersBackend", "PythonBackend", "SentencePieceBackend", "MistralCommonBackend"
}  # fmt: skip
_PLAIN_CLASS = "PreTrainedTokenizerFast"
#: The vocabulary as SentencePiece has it, which llama.cpp's converter wants for some families.
_SENTENCEPIECE = "tokenizer.model"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
#: Counts that transformers 4 knows by the name that transformers 5 has as a second one.
_OLD_COUNTS = {"num_experts"}
#: Kinds of layers that transformers 4 calls otherwise in some models; version 5 reads both names.
_OLD_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}
_OLD_LAYERED = {"granitemoehybrid": "layer_types", "zamba": "layers_block_type",
                "zamba2": "layers_block_type"}  # fmt: skip


def choose_save_dtype(options: TrainConfig, precision: Precision) -> torch.dtype:
    """Return the precision to save in: the configured one, or with "auto" the one of training."""
    if options.save_dtype == "auto":
        return precision.dtype
    return getattr(torch, options.save_dtype)


def save_student(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    plan: StudentConfig | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights, both configurations and the tokenizer of ``student`` into ``folder``.

        student/            the model, with its adapters merged in unless ``plan.lora.merge`` is
                            false
        student/adapter/    the adapters, in the format of peft
        student/base/       the model that unmerged adapters belong to, if it has no folder of its
                            own

    Weights are rounded to ``dtype``. Changes ``student``: afterwards it is rounded too, and has no
    adapters.
    """
    target: Path | None = folder
    if has_adapters(student):
        target = _save_adapters(student, folder, plan)
    if target is not None:
        # The weights are rounded here and not by save_pretrained, so that ``student`` is what is
        # saved.
        nn.Module.to(student, dtype)
        save_model(student, target)
    save_tokenizer(tokenizer, folder)


def _save_adapters(
    student: PreTrainedModel, folder: Path, plan: StudentConfig | None
) -> Path | None:
    """Write the adapters and remove them from ``student``.

    Returns the folder where the rest of the student must be written, or None if it need not be.
    """
    assert plan is not None and plan.lora is not None, "only student.lora gives a student adapters"
    if plan.lora.merge:
        save_adapters(student, folder / ADAPTER_FOLDER, plan.model, plan.revision)
        # In 16 bits the adapters' part would be rounded before the sum is.
        round_parameters(student, torch.float32)
        merge_adapters(student)
        return folder
    save_adapters(student, folder / ADAPTER_FOLDER, plan.model or BASE_FOLDER, plan.revision)
    remove_adapters(student)
    return None if plan.model else folder / BASE_FOLDER


def load_saved_student(folder: Path) -> PreTrainedModel:
    """Load the student that ``save_student`` wrote into ``folder``, in float32.

    It is on the device of the run. Adapters that were saved without their base are merged into it,
    on the CPU.
    """
    adapters = folder / ADAPTER_FOLDER
    if not (adapters / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return read_model(folder, ReadingPlan(torch.float32, pick_device()))
    return load_adapters(load_model(find_base(folder), torch.float32), adapters)


def find_base(folder: Path) -> Path:
    """Return the folder of the model that the unmerged adapters of a student belong to."""
    if (folder / BASE_FOLDER).is_dir():
        return folder / BASE_FOLDER
    adapter = read_json(folder / ADAPTER_FOLDER / ADAPTER_CONFIG)
    return resolve_model(adapter["base_model_name_or_path"], adapter["revision"])


# ---------------------------------------------------------------------- names of version 4


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights and both configurations of ``model``, readable by transformers 4 and 5."""
    settings = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        # The library would not save them: a temperature without sampling, for example, which some
        # models have. What ends a text is kept.
        ids = {name: getattr(settings, name) for name in _TOKEN_IDS}
        model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(folder)
    model.generation_config = settings
    named = _add_old_names(read_json(folder / "config.json"), model.config)
    write_json(folder / "config.json", dict(sorted(named.items())))


def _add_old_names(written: Json, config: PreTrainedConfig) -> Json:
    """Add the names under which transformers 4 reads what transformers 5 keeps under others.

    It takes a default for a name that is missing. Readers of its folders, such as older versions of
    vLLM and of llama.cpp's converter, do so too.
    """
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    for name, part in inner.items():
        if isinstance(part, PreTrainedConfig) and isinstance(written.get(name), dict):
            written[name] = _add_old_names(written[name], part)
    for old in _OLD_COUNTS & config.attribute_map.keys():
        written[old] = getattr(config, old)
    if layers := written.get(_OLD_LAYERED.get(config.model_type, "")):
        written[_OLD_LAYERED[config.model_type]] = [_OLD_LAYERS.get(each, each) for each in layers]
    return written | _list_old_rope(written, written.get("rope_parameters") or {})


def _list_old_rope(written: Json, rope: Json) -> Json:
    """List the settings of the rotary embeddings under the names of transformers 4.

    It has one scaling, of the layers with full attention, and a base for the others.
    """
    main = rope.get("full_attention", rope) or {}
    is_new = str(written.get("model_type")).startswith("gemma4")
    if is_new or any(isinstance(part, dict) for part in main.values()):
        return {}  # layers of kinds that transformers 4 does not have
    old = {name: main[name] for name in _OLD_ROPE if main.get(name) is not None}
    if rope.get("sliding_attention") is not None:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    own = _NEOX_NAMES if str(written.get("model_type")).startswith("gpt_neox") else {}
    old = {own.get(name, name): value for name, value in old.items()}
    scaling = {name: value for name, value in main.items() if name not in _OLD_ROPE}
    if scaling.get("rope_type") == "longrope" and _CONTEXT in scaling:
        old[_CONTEXT] = scaling[_CONTEXT]
    if written.get("model_type") in _STRICT_SCALING:
        scaling.pop(_CONTEXT, None)
        scaling["type"] = scaling.pop("rope_type", None)
    if scaling.keys() - {"rope_type", "type"} or main.get("rope_type", "default") != "default":
        old["rope_scaling"] = scaling
    return old


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files of ``tokenizer``, readable by transformers 4 and 5.

    It keeps the name of its class in the folder that it was read from, where that name makes the
    same tokenizer: llama.cpp's converter goes by it.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    written = read_json(path)
    # Transformers 4 expects a map under the new name of this list.
    if isinstance(extra := written.get("extra_special_tokens"), list):
        written["additional_special_tokens"] = extra
        del written["extra_special_tokens"]
    write_json(path, written)
    if not isinstance(tokenizer, transformers.TokenizersBackend) or "auto_map" in written:
        return
    written |= _list_old_rules(tokenizer, written)
    origin = Path(tokenizer.name_or_path or folder)
    own = (read_json(origin / path.name) or {}).get("tokenizer_class")
    names: list[Any] = [
        name for name in (own, written["tokenizer_class"]) if name not in {None, *_NEW_CLASSES}
    ]
    for name in (*names, _PLAIN_CLASS):
        # With this rule the class would read SentencePiece's file in place of tokenizer.json.
        left_out = {"add_prefix_space"} if "Llama" in name else set()
        kept = {each: value for each, value in written.items() if each not in left_out}
        write_json(path, kept | {"tokenizer_class": name})
        again = transformers.AutoTokenizer.from_pretrained(folder)
        if _list_rules(again) == _list_rules(tokenizer):
            break
    if (origin / _SENTENCEPIECE).is_file() and not (folder / _SENTENCEPIECE).exists():
        shutil.copyfile(origin / _SENTENCEPIECE, folder / _SENTENCEPIECE)


def _list_old_rules(tokenizer: transformers.TokenizersBackend, written: Json) -> Json:
    """List what transformers 4 takes from the settings and transformers 5 from tokenizer.json."""
    ids = tokenizer("a")["input_ids"]
    rules: Json = {
        "add_bos_token": len(ids) > 1 and ids[0] == tokenizer.bos_token_id,
        "add_eos_token": len(ids) > 1 and ids[-1] == tokenizer.eos_token_id,
        "added_tokens_decoder": {
            str(number): token.__getstate__()
            for number, token in tokenizer.added_tokens_decoder.items()
        },
    }
    splitting = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    prefix = splitting.get("add_prefix_space")
    if prefix or (prefix is not None and "add_prefix_space" in written):
        rules["add_prefix_space"] = prefix
    return rules


def _list_rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """All rules of a tokenizer but the state of its last call."""
    if not isinstance(tokenizer, transformers.TokenizersBackend):
        return None
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return rules | {"truncation": None, "padding": None}, tokenizer.special_tokens_map
