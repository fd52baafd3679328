"""Load the teacher, and load or build the student.

A student comes from its own folder, is cut out of the teacher, or is a fresh Llama.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TorchAoConfig

from kd.addresses import ModelSource
from kd.config.student import StudentConfig, StudentInit
from kd.errors import ConfigError, ModelError, format_first_line
from kd.models.adapters import add_adapters
from kd.models.composites import find_text_config, map_names
from kd.models.distributed.device_map import Places
from kd.models.distributed.leading import find_leader
from kd.models.distributed.sharding import make_places, require_shareable, settle_part
from kd.models.folder import (
    ROUNDS_PLAIN_WEIGHTS,
    SPREADS_PLAIN_WEIGHTS,
    ModelFolder,
    find_source,
    require_allowed_remote_code,
    resolve_model,
    resolve_source,
)
from kd.models.inheritance import cut_hollow_student, cut_student
from kd.models.layers import train_all_rows
from kd.models.precision import choose_weight_dtype, pick_device, round_parameters
from kd.models.quantization.groups import name_quantization
from kd.models.quantization.rounding import make_quantization_config, read_widths
from kd.models.stored import tensors
from kd.models.teacher_files import TeacherFiles
from kd.models.tokenizers import get_vocabulary_size, list_end_ids
from kd.progress import Notice


def hide_progress_bars() -> None:
    """Hide the progress bars of transformers and the hub: a run reports its own progress."""
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()


# ---------------------------------------------------------------------- the teacher


def load_teacher(
    teacher: TeacherFiles, device: torch.device, captured: str | None = None
) -> PreTrainedModel:
    """Load the teacher, frozen, in evaluation mode and in its own precision.

    It gives its hidden states on ``device``, where its LM head is. All of it is there, unless
    ``teacher.parallel`` spreads it. One that is made for several processes is placed by accelerate
    where no other process follows this one. ``captured`` is the name of the quantisation in the
    identity of a cache, whose teacher is loaded again.
    """
    leader = find_leader()
    section = teacher.section
    if section.is_shared and leader is not None:
        leader.order_loading(teacher)
        model = load_part(teacher, device, leads=True)
        leader.lead_reading(model)
        return model
    how = _plan_reading(teacher, device, captured)
    if section.parallel == "none":
        return read_model(teacher.folder, how).eval().requires_grad_(False)
    places = Places.of(section.gpu_memory, section.host_memory)
    model = read_model(teacher.folder, replace(how, places=places.list_arguments()))
    places.settle(model, device)
    return model.eval().requires_grad_(False)


def load_part(teacher: TeacherFiles, device: torch.device, leads: bool) -> PreTrainedModel:
    """Load this process's part of a teacher; all processes that share it call this together.

    The process that leads has the whole LM head on ``device``.
    """
    how = _plan_reading(teacher, device)
    hollow = outline_teacher(teacher, how.dtype)
    size = torch.distributed.get_world_size()
    parallel = teacher.section.parallel
    require_shareable(parallel, hollow, size)
    model = read_model(teacher.folder, replace(how, places=make_places(parallel, hollow, size)))
    settle_part(model.eval().requires_grad_(False), device, leads)
    return model


def require_shareable_teacher(teacher: TeacherFiles, size: int) -> None:
    """Raise ``ConfigError`` if ``size`` processes cannot share the teacher as the job asks."""
    require_shareable(teacher.section.parallel, outline_teacher(teacher, torch.float32), size)


def _plan_reading(
    teacher: TeacherFiles, device: torch.device, captured: str | None = None
) -> ReadingPlan:
    source = teacher.section.files
    rounding = None
    if teacher.section.quantization is not None:
        widths = _read_widths(teacher)
        name = captured or name_quantization(teacher.section.quantization, widths.values())
        rounding = make_quantization_config(name, widths, device)
    trusted = require_allowed_remote_code(source)
    dtype = choose_teacher_dtype(teacher, device)
    return ReadingPlan(dtype, device, source.gguf_file, trusted, rounding)


def choose_quantization(teacher: TeacherFiles) -> str:
    """Return the name of the teacher's quantisation in a cache's identity; "" for plain weights."""
    if teacher.section.quantization is None:
        return ""
    return name_quantization(teacher.section.quantization, _read_widths(teacher).values())


def _read_widths(teacher: TeacherFiles) -> dict[str, int]:
    """Return the input widths of the layers that may be rounded; only int4 depends on them."""
    if teacher.section.quantization != "int4":
        return {}
    return read_widths(outline_teacher(teacher, torch.bfloat16))


def choose_teacher_dtype(teacher: TeacherFiles, device: torch.device) -> torch.dtype:
    """Return the precision that the teacher runs in.

    "auto" means float32 on a CPU and for GGUF files, bfloat16 for weights in int4, otherwise the
    precision of the stored weights, as far as the GPU has it.
    """
    section = teacher.section
    if section.quantization == "int4":
        return torch.bfloat16
    if section.dtype != "auto":
        return getattr(torch, section.dtype)
    # Most CPUs are slow in 16 bits; a GGUF file is unpacked to float32.
    if device.type == "cpu" or section.gguf_file:
        return torch.float32
    stored: torch.dtype = getattr(torch, ModelFolder(teacher.folder).dtype or "float32")
    return choose_weight_dtype(stored, device)


# ---------------------------------------------------------------------- the student


def build_student(
    config: StudentConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    teacher: ModelSource | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Return the student, with adapters where ``config`` asks for them.

    Its weights are float32, or under adapters what ``student.lora.base`` says. One that is read
    from its folder is on ``device`` (None: the device of the run); one that is cut out of the
    teacher or built fresh is on the CPU. Fresh weights and adapters are drawn from torch's current
    random state.
    """
    assert config is not None, "JobConfig refuses a training job without a student"
    student = _build_without_adapters(config, tokenizer, context, teacher, device or pick_device())
    return _finish_student(student, config)


def build_hollow_student(
    config: StudentConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    teacher: ModelSource | None = None,
) -> PreTrainedModel:
    """Return the student that ``build_student`` builds, with parameters that have no values.

    It takes no memory but that of its buffers, which are on the CPU.
    """
    from accelerate import init_empty_weights

    assert config is not None, "JobConfig refuses a training job without a student"
    with init_empty_weights(include_buffers=False):
        student = _build_without_adapters(config, tokenizer, context, teacher, CPU, hollow=True)
    # accelerate gives each module a parameter of its own.
    student.tie_weights()
    with init_empty_weights(include_buffers=False):
        return _finish_student(student, config)


def _finish_student(student: PreTrainedModel, config: StudentConfig) -> PreTrainedModel:
    train_all_rows(student)
    if config.lora is None:
        return student
    round_parameters(student, getattr(torch, config.lora.base))
    return add_adapters(student, config.lora)


def _build_without_adapters(
    config: StudentConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    teacher: ModelSource | None,
    device: torch.device,
    hollow: bool = False,
) -> PreTrainedModel:
    """Return the student without adapters, read onto ``device`` if it is read from its folder.

    With ``hollow`` its weights are neither read nor computed.
    """
    read = load_hollow if hollow else read_model
    cut = cut_hollow_student if hollow else cut_student
    if config.init is not None:
        return _make_fresh_llama(config.init, tokenizer, context, teacher)
    if config.from_teacher is None:
        assert config.model is not None
        # Read as it is kept: two copies of a large base need not exist.
        dtype = torch.float32 if config.lora is None else getattr(torch, config.lora.base)
        own = resolve_model(config.model, config.revision)
        ModelFolder(own).require_trainable_weights()
        return read(own, ReadingPlan(dtype, device))
    assert teacher is not None, "JobConfig refuses a student from a teacher without a teacher"
    folder = resolve_source(teacher)
    if teacher.gguf_file is None:
        ModelFolder(folder).require_trainable_weights()
    # On the CPU, so that the cut does not depend on the device.
    how = ReadingPlan(torch.float32, CPU, teacher.gguf_file, require_allowed_remote_code(teacher))
    return cut(read(folder, how).eval(), config.from_teacher)


def _make_fresh_llama(
    init: StudentInit, tokenizer: PreTrainedTokenizerBase, context: int, teacher: ModelSource | None
) -> PreTrainedModel:
    settings = _find_generation_settings(init, teacher)
    ends = list_end_ids(settings, tokenizer)
    shape = transformers.LlamaConfig(
        vocab_size=get_vocabulary_size(tokenizer),
        hidden_size=init.hidden_size,
        intermediate_size=init.mlp_width,
        num_hidden_layers=init.layers,
        num_attention_heads=init.attention_heads,
        num_key_value_heads=init.num_key_value_heads or init.attention_heads,
        tie_word_embeddings=init.tie_word_embeddings,
        # Rotary embeddings cost nothing, and a longer context lets the student be trained further.
        max_position_embeddings=max(context, 2048),
        bos_token_id=tokenizer.bos_token_id,
        # One alone is written as a number, as every reader expects it.
        eos_token_id=ends if len(ends) > 1 else next(iter(ends), None),
    )
    student = transformers.LlamaForCausalLM(shape)
    # Only now: the library fills the row of the padding token with zeros.
    for each in (student.config, student.generation_config):
        each.pad_token_id = tokenizer.pad_token_id
    if settings is not None:
        settings.eos_token_id = shape.eos_token_id
        student.generation_config = settings
    return student


def _find_generation_settings(
    init: StudentInit, teacher: ModelSource | None
) -> transformers.GenerationConfig | None:
    """Read how the teacher, or the model whose tokenizer is taken, generates; None if unknown."""
    named = [] if teacher is None else [teacher]
    named += [ModelSource(init.tokenizer)] if init.tokenizer else []
    for source in named:
        found = find_source(source, Path())
        if found is None:
            continue
        if (found.path / "generation_config.json").is_file():
            return transformers.GenerationConfig.from_pretrained(found.path)
        if (end := found.text_config.get("eos_token_id")) is not None:
            return transformers.GenerationConfig(eos_token_id=end)
    return None


# ---------------------------------------------------------------------- files


CPU = torch.device("cpu")


@dataclass(frozen=True)
class ReadingPlan:
    """How the files of a model are read: into which precision, and onto which device.

    ``gguf_file`` is read in place of safetensors. ``trust_remote_code`` runs the model's own code.
    ``rounding`` rounds the weights of linear layers, all but the LM head's. ``places`` are the
    arguments of transformers' ``from_pretrained`` that spread the weights over several devices.
    """

    dtype: torch.dtype
    device: torch.device = CPU
    gguf_file: str | None = None
    trust_remote_code: bool = False
    rounding: TorchAoConfig | None = None
    places: Mapping[str, Any] | None = None

    def list_arguments(self) -> dict[str, Any]:
        """The arguments of transformers' ``from_pretrained``.

        Tensors go from the mapped file to the device one by one: the host never holds them all.
        """
        places = {"device_map": {"": self.device}} if self.places is None else self.places
        arguments = {"dtype": self.dtype, **places}
        if self.gguf_file:
            return arguments | {"gguf_file": self.gguf_file}
        if self.rounding is not None:
            arguments["quantization_config"] = self.rounding
        return arguments | {"use_safetensors": True}


def load_model(folder: Path, dtype: torch.dtype, gguf_file: str | None = None) -> PreTrainedModel:
    """Load the causal language model in ``folder`` onto the CPU, as ``read_model`` does."""
    return read_model(folder, ReadingPlan(dtype, gguf_file=gguf_file))


def read_model(folder: Path, how: ReadingPlan) -> PreTrainedModel:
    """Load the causal language model in ``folder``.

    Reads safetensors or GGUF, never a pickle: loading a pickle can run code. Raises ``ModelError``.
    """
    with _reading_errors(folder, how.gguf_file):
        model = _read_model(ModelFolder(folder), how)
    # transformers refuses to save a model with the mark of a GGUF file; its weights are unpacked.
    if getattr(getattr(model.config, "quantization_config", None), "quant_method", None) == "gguf":
        del model.config.quantization_config
        for name, value in {"hf_quantizer": None, "is_quantized": False}.items():
            setattr(model, name, value)
    # Tensors of these layers are not read, so a saved model must not count them.
    for name in tensors.list_later_tokens(model.config):
        setattr(model.config, name, 0)
    # The layers of GPT-2 are no Linear.
    plain = all(type(parameter.data) is torch.Tensor for parameter in model.parameters())
    if how.rounding is not None and plain:
        raise ModelError(
            f"{type(model).__name__} has no linear layers that teacher.quantization could round.",
            "Remove the field, or set it to int8 where it is int4.",
        )
    train_all_rows(model)
    return model


@contextmanager
def _reading_errors(folder: Path, gguf_file: str | None = None) -> Iterator[None]:
    """Raise what transformers raises in this block as ``ModelError``: it has no common base."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except Exception as error:
        remedy = "It must be a causal language model."
        if gguf_file:
            remedy = "GGUF files need: pip install 'potstill[gguf]'."
        what = f"the model in {folder} cannot be loaded: {format_first_line(error)}"
        raise ModelError(what, remedy) from error


def _read_model(folder: ModelFolder, how: ReadingPlan) -> PreTrainedModel:
    made: Any = transformers.AutoModelForCausalLM
    arguments = how.list_arguments() | tensors.REPORTED
    folder.require_own_files(how.gguf_file, how.trust_remote_code)
    if how.gguf_file is None:
        folder.require_readable_weights()
        if how.rounding is not None:
            folder.require_plain_weights(ROUNDS_PLAIN_WEIGHTS)
        if how.places is not None:
            folder.require_plain_weights(SPREADS_PLAIN_WEIGHTS)
        with torch.device("meta"):
            outline = _make_outline(folder, how)
        folder.require_whole_files()
        made = type(outline.hollow)
        arguments |= {"config": outline.shape, "key_mapping": outline.names}
    model: PreTrainedModel
    with tensors.without_report():
        model, found = made.from_pretrained(
            folder.path, trust_remote_code=how.trust_remote_code, **arguments
        )
    tensors.require_all_tensors(type(model).__name__, folder.path, found)
    # Saving would undo the renaming, but a saved student is a plain model.
    if arguments.get("key_mapping") and hasattr(model, "_weight_conversions"):
        del model._weight_conversions
    return model


@dataclass(frozen=True)
class _Outline:
    """A model without its weights.

    ``names`` maps patterns of names in the files to its own, where it is a part of another model.
    ``is_split``: whether it has an LM head of its own although its configuration ties it.
    """

    hollow: PreTrainedModel
    shape: PreTrainedConfig
    names: dict[str, str]
    is_split: bool


def _make_outline(folder: ModelFolder, how: ReadingPlan) -> _Outline:
    """Build the model from its configuration, tied as its tensors are.

    Refuses encoder-decoders by name.
    """
    trusted = {"trust_remote_code": how.trust_remote_code}
    folder.require_own_files(how.gguf_file, how.trust_remote_code)
    folder.require_decoder()
    extra = {"gguf_file": how.gguf_file} if how.gguf_file else {}
    shape: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
        folder.path, **trusted, **extra
    )
    text = None if how.gguf_file else find_text_config(shape, folder)
    shape = text or shape
    make: Any = partial(transformers.AutoModelForCausalLM.from_config, dtype=how.dtype, **trusted)
    hollow = make(shape)
    tied = getattr(shape, "tie_word_embeddings", False) and not how.gguf_file
    if is_split := tied and tensors.has_own_head(hollow, folder):
        shape.tie_word_embeddings = False
        hollow = make(shape)
    return _Outline(hollow, shape, map_names(hollow, folder) if text else {}, is_split)


def check_stored_model(folder: Path) -> list[Notice]:
    """Compare a model with the headers of its files, before its weights are read.

    Returns what must be named. Raises ``ModelError`` if tensors are missing or have another
    shape. Of a quantised model only the embedding and the norms are compared: its other weights are
    stored under names that depend on the quantiser, and are compared when they are read.
    """
    stored = ModelFolder(folder)
    stored.require_whole_files()
    hide_progress_bars()
    with _reading_errors(folder), torch.device("meta"):
        outline = _make_outline(stored, ReadingPlan(torch.float32))
        found = tensors.match_tensors(outline.hollow, stored, outline.names)
    if stored.stored_quantization is not None:
        found = tensors.select_plain(outline.hollow, found)
    tensors.require_all_tensors(type(outline.hollow).__name__, folder, found)
    return tensors.list_notices(outline.hollow, outline.is_split, folder, found)


def require_trainable_student(
    config: StudentConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    teacher: ModelSource | None = None,
) -> PreTrainedModel:
    """Return the student without its weights; raises ``build_student``'s error for its shape."""
    with torch.device("meta"):
        student = _build_without_adapters(config, tokenizer, context, teacher, CPU, hollow=True)
        return student if config.lora is None else add_adapters(student, config.lora)


def outline_teacher(teacher: TeacherFiles, dtype: torch.dtype) -> PreTrainedModel:
    """Build the teacher from its configuration, on the device meta."""
    source = teacher.section.files
    trusted = require_allowed_remote_code(source)
    plan = ReadingPlan(dtype, gguf_file=source.gguf_file, trust_remote_code=trusted)
    with torch.device("meta"):
        return load_hollow(teacher.folder, plan)


def outline_student(config: StudentConfig) -> PreTrainedModel:
    """Build the model that a student begins as from its configuration, on the device meta."""
    assert config.model is not None
    with torch.device("meta"):
        return load_hollow(resolve_model(config.model, config.revision), ReadingPlan(torch.float32))


def load_hollow(folder: Path, how: ReadingPlan) -> PreTrainedModel:
    """Build the model in ``folder`` from its configuration, without its weights.

    Under ``torch.device("meta")`` its parameters have a shape but no memory.
    """
    with _reading_errors(folder, how.gguf_file):
        return _make_outline(ModelFolder(folder), how).hollow
