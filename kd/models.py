"""Models and tokenizers: found, loaded, fingerprinted, built, saved. And the one thing we need inside: the LM head.

Shapes: B sequences, T positions, D hidden width, V vocabulary (the tokenizer's; a model's own may be padded wider).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cache.manifest import Probe
from kd.config.student import StudentConfig, StudentInit
from kd.config.teacher import TeacherConfig
from kd.errors import ModelError, TokenizerMismatch
from kd.levers.adapters import add_adapters
from kd.levers.inheritance import hollow_student_of, student_of
from kd.validate import HUB_ID, remote_code_allowed


def hide_progress_bars() -> None:
    """Silence the libraries' own bars: a run reports its progress itself."""
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()


# ---------------------------------------------------------------------- finding


_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]


def resolve(model: str, revision: str | None = None, weights: str | None = "*.safetensors") -> Path:
    """The local folder of ``model``: itself if it is one, else the hub's snapshot, downloaded where need be.

    Of the weights only the files that match ``weights`` are taken: a repository may hold twenty quantisations.
    """
    if Path(model).is_dir():
        return Path(model)
    if not HUB_ID.match(model):
        raise ModelError(
            f"model folder {model!r} does not exist.", "Check the path; it is taken from the folder the run starts in."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    try:
        wanted = [*_SMALL_FILES, weights] if weights else _SMALL_FILES
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=["original/*"]))
    except GatedRepoError as error:
        raise ModelError(
            f"model {model!r} is gated: {error}", "Ask for access on its page, then run: hf auth login."
        ) from error
    except Exception as error:  # not found, offline, no network: each its own unrelated class
        raise ModelError(
            f"model {model!r} is neither a local folder nor a hub model that can be had now ({type(error).__name__}).",
            "Check the name, or download it first; with HF_HUB_OFFLINE=1 only what is already cached is found.",
        ) from error


def fingerprint(folder: Path, gguf_file: str | None = None) -> str:
    """sha256 over the files that determine the model's outputs: configuration and weights."""
    names = [gguf_file] if gguf_file else _weight_files(folder)
    digest = hashlib.sha256()
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{path} does not exist.", "Check teacher.gguf_file.")
        with path.open("rb") as file:
            digest.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[str]:
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(
            f"{folder} holds no *.safetensors weights.", "Convert the model to safetensors, or set gguf_file."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json.", "Give the folder of a Hugging Face model.")
    return ["config.json", *sorted(path.name for path in folder.glob("*.py")), *weights]


# ---------------------------------------------------------------------- tokenizers

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading spaces,\ttabs\nand\n\nblank lines ",
    "naïve café, Straße, Ελληνικά, русский, 日本語, العربية, 🙂",
    "def f(x):\n    return x ** 2 + 3.14159e-10  # 1,234,567",
    "<s> </s> <|endoftext|> [INST] <unk>",
)


def load_tokenizer(
    folder: Path, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``."""
    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, **extra
        )
    except Exception as error:
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}", "It needs a tokenizer.json."
        ) from error
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """V: one more than the largest token id. A model's own width may be padded beyond it."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the map from tokens to ids and of how the probes are encoded."""
    content = [sorted(tokenizer.get_vocab().items()), [each.ids for each in probe(tokenizer, PROBES)]]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def probe(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> tuple[Probe, ...]:
    """How ``tokenizer`` encodes ``texts``: what two tokenizers must agree on."""
    return tuple(Probe(text, tuple(map(int, tokenizer(text, verbose=False)["input_ids"]))) for text in texts)


def require_same_tokenizer(tokenizer: PreTrainedTokenizerBase, probes: tuple[Probe, ...]) -> None:
    """Raise ``TokenizerMismatch`` naming each probe that ``tokenizer`` encodes otherwise than the cache's did.

    Equal widths prove nothing: two vocabularies of one size may number their tokens differently.
    """
    wrong = [
        f"{expected.text[:40]!r}{_first_difference(expected.ids, found.ids)}"
        for expected, found in zip(probes, probe(tokenizer, (each.text for each in probes)), strict=True)
        if found != expected
    ]
    if wrong:
        raise TokenizerMismatch(
            f"The student's tokenizer does not encode text as the cache's does. {'; '.join(wrong)}.",
            "Use a student with the teacher's tokenizer, or student.init for a fresh one.",
        )


def _first_difference(expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    both = min(len(expected), len(found))
    place = next((place for place in range(both) if expected[place] != found[place]), both)
    shown = (", ".join(map(str, ids[place : place + 4])) or "nothing" for ids in (expected, found))
    return " from token {}: expected {}, got {}".format(place, *shown)


# ---------------------------------------------------------------------- models


def load_teacher(config: TeacherConfig, folder: Path, device: torch.device) -> PreTrainedModel:
    """The teacher in evaluation mode, frozen, in its configured precision."""
    model = load(folder, teacher_dtype(config, folder, device), config.gguf_file, allowed_remote_code(config))
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


def teacher_dtype(config: TeacherConfig, folder: Path, device: torch.device) -> torch.dtype:
    """The precision the teacher runs in: auto is the checkpoint's own on a GPU, float32 on a CPU."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if device.type == "cpu" or config.gguf_file:
        return torch.float32
    return AutoConfig.from_pretrained(folder, trust_remote_code=allowed_remote_code(config)).dtype or torch.float32


def allowed_remote_code(config: TeacherConfig) -> bool:
    """Whether to run a model's own Python: the job must ask and the operator must agree."""
    if config.trust_remote_code and not remote_code_allowed():
        raise ModelError(
            "teacher.trust_remote_code is set, but the operator does not allow it.",
            "Start with KD_TRUST_REMOTE_CODE=1.",
        )
    return config.trust_remote_code


def build_student(
    config: StudentConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    teacher: TeacherConfig | None = None,
) -> PreTrainedModel:
    """The student in float32 on the CPU: from its folder, out of the teacher, or fresh from torch's random state.

    With adapters, which begin at random too, where it is to have some.
    """
    assert config is not None, "JobConfig refuses a training job without a student"
    student = _without_adapters(config, tokenizer, context, teacher)
    return student if config.lora is None else add_adapters(student, config.lora)


def _without_adapters(
    config: StudentConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    teacher: TeacherConfig | None,
    hollow: bool = False,
) -> PreTrainedModel:
    """The student, or where it is to be ``hollow`` its shape alone."""
    read, cut = (_hollow, hollow_student_of) if hollow else (load, student_of)
    if config.init is not None:
        return _fresh_llama(config.init, tokenizer, context)
    if config.from_teacher is None:
        assert config.model is not None
        return read(resolve(config.model, config.revision), torch.float32)
    assert teacher is not None, "JobConfig refuses a student out of a teacher that it does not have"
    folder = resolve(teacher.model, teacher.revision, teacher.gguf_file or "*.safetensors")
    whole = read(folder, torch.float32, teacher.gguf_file, allowed_remote_code(teacher))
    return cut(whole.eval(), config.from_teacher)


def _fresh_llama(init: StudentInit, tokenizer: PreTrainedTokenizerBase, context: int) -> PreTrainedModel:
    shape = LlamaConfig(
        vocab_size=vocabulary_size(tokenizer),
        hidden_size=init.hidden_size,
        intermediate_size=init.mlp_width,
        num_hidden_layers=init.layers,
        num_attention_heads=init.heads,
        num_key_value_heads=init.num_key_value_heads or init.heads,
        attention_dropout=init.attention_dropout,
        tie_word_embeddings=init.tie_word_embeddings,
        max_position_embeddings=max(context, 2048),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(shape)


def load(
    folder: Path, dtype: torch.dtype, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal language model in ``folder``, on the CPU; only safetensors and GGUF are read, never a pickle."""
    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {"use_safetensors": True}
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, **extra
        )
    except Exception as error:
        remedy = (
            "GGUF files need: pip install 'potstill[gguf]'." if gguf_file else "It must be a causal language model."
        )
        raise ModelError(f"the model in {folder} cannot be loaded: {_first_line(error)}", remedy) from error
    _forget_gguf(model)
    return model


def _forget_gguf(model: PreTrainedModel) -> None:
    """Take off the mark of a GGUF file: its weights were unpacked, and transformers saves no model that bears it."""
    if getattr(getattr(model.config, "quantization_config", None), "quant_method", None) == "gguf":
        del model.config.quantization_config
        for name, value in {"hf_quantizer": None, "is_quantized": False}.items():
            setattr(model, name, value)


def require_student(
    config: StudentConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    teacher: TeacherConfig | None = None,
) -> None:
    """Raise what ``build_student`` would of a shape that cannot be; no weights are read or made."""
    with torch.device("meta"):
        student = _without_adapters(config, tokenizer, context, teacher, hollow=True)
        if config.lora is not None:
            add_adapters(student, config.lora)


def _hollow(
    folder: Path, dtype: torch.dtype, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """What ``load`` gives, without its weights where the device "meta" is the default."""
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        shape = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **extra)
        hollow: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ModelError(
            f"the model in {folder} cannot be made: {_first_line(error)}", "It must be a causal language model."
        ) from error
    return hollow


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


# ---------------------------------------------------------------------- the LM head


#: Tokens whose logits a CPU makes at once: of all 49,152 its matrix product took a quarter longer.
COLUMNS = 512


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: s = softcap(scale * (x Wᵀ + b)), with softcap(z) = c tanh(z / c).

    ``weight`` (V', D) and ``bias`` (V',) may be wider than the vocabulary; ids from ``vocabulary`` on are padding.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    vocabulary: int

    @property
    def plain(self) -> bool:
        """Whether x Wᵀ are the logits."""
        return self.bias is None and self.scale == 1.0 and not self.softcap

    def product(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """x Wᵀ, (N, V) in the dtype of ``hidden_ND``, of the real vocabulary: padding does not exist here.

        ``room_NV`` is memory of that dtype to put it in, where no gradient is wanted.
        """
        weight_VD = self.weight[: self.vocabulary].to(hidden_ND.dtype)
        if room_NV is None:
            if torch.is_grad_enabled():
                return nn.functional.linear(hidden_ND, weight_VD)
            room_NV = hidden_ND.new_empty(len(hidden_ND), self.vocabulary)
        columns = self.vocabulary if hidden_ND.is_cuda else COLUMNS
        for part_cD, out_Nc in zip(weight_VD.split(columns), room_NV.split(columns, 1), strict=True):
            torch.mm(hidden_ND, part_cD.T, out=out_Nc)
        return room_NV

    def project(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """z = x Wᵀ + b, (N, V) in float32 or better; ``room_NV`` as of ``product``."""
        z_NV = self.product(hidden_ND, room_NV)
        z_NV = z_NV.to(torch.promote_types(z_NV.dtype, torch.float32))
        return z_NV if self.bias is None else z_NV + self.bias[: self.vocabulary]

    def transform(self, z_NV: Tensor) -> Tensor:
        """What the model does to its logits after the linear layer."""
        z_NV = z_NV * self.scale if self.scale != 1.0 else z_NV
        return self.softcap * torch.tanh(z_NV / self.softcap) if self.softcap else z_NV

    def logits(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """The model's logits (N, V), which may lie in ``room_NV`` (``project``)."""
        return self.transform(self.project(hidden_ND, room_NV))


def head_of(model: PreTrainedModel, vocabulary: int) -> Head:
    """The model's head, checked against the model's own logits; refused by name where it does something we do not.

    Soft-capping is Gemma's ``final_logit_softcapping``; scaling, Cohere's ``logit_scale`` and Granite's
    ``logits_scaling``.
    """
    name, layer, config = type(model).__name__, model.get_output_embeddings(), model.config
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"{name} has no linear LM head (found {type(layer).__name__}).", "Use a causal language model."
        )
    if layer.weight.shape[0] < vocabulary:
        raise TokenizerMismatch(
            f"{name} has {layer.weight.shape[0]} output rows, but the tokenizer has {vocabulary} tokens.",
            "Use a model made for this tokenizer.",
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = Head(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None), vocabulary)
    _check_head(model, head, name)
    return head


@torch.no_grad()
def _check_head(model: PreTrainedModel, head: Head, name: str) -> None:
    """Compare our logits with the model's own on a few tokens, at a size where any non-linearity shows."""
    training = model.training
    model.eval()
    tokens_BT = torch.arange(8, device=model.device).remainder(head.vocabulary)[None]
    z_TV = head.project(hidden_states(model, tokens_BT)[0])
    if not torch.isfinite(z_TV).all():
        raise ModelError(f"{name} computes NaN or infinite logits.", "Check its weights, or run it in float32.")
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 5e-2
    for gain in (1.0, 50.0 / float(z_TV.abs().max().clamp(min=1e-30))):  # as they are, and where a soft cap shows
        theirs = _own_logits(model, tokens_BT, gain)[:, : head.vocabulary]
        ours = head.transform(z_TV * gain)
        difference = float((ours - theirs).abs().max())
        if not difference <= tolerance * float(ours.abs().max()):  # also catches NaN, and an infinity of theirs
            raise ModelError(
                f"{name} does something to its logits after the LM head that is not supported "
                f"(ours and its own differ by {difference:.3g}).",
                "Supported: bias, logit_scale, logits_scaling, final_logit_softcapping.",
            )
    model.train(training)


def _own_logits(model: PreTrainedModel, tokens_BT: Tensor, gain: float) -> Tensor:
    """What the model itself makes of its first row (T, V') when its head's output is multiplied by ``gain``."""
    hook = model.get_output_embeddings().register_forward_hook(lambda layer, inputs, output: output * gain)
    try:
        return model(input_ids=tokens_BT, use_cache=False).logits[0].float()
    finally:
        hook.remove()


def hidden_states(model: nn.Module, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
    """The final hidden states (B, T, D), after the last norm.

    ``positions_BT`` that restart within a row make attention stay inside each document (transformers builds the
    block-diagonal mask from them); None means that each row is one document.
    """
    inner: nn.Module = getattr(model, "base_model")  # noqa: B009 (nn.Module's own __getattr__ is typed as Tensor)
    return inner(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False).last_hidden_state


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the body, in order; none where the model keeps them in no list of their number."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    return next((list(each) for each in lists if len(each) == count), [])


def require_context(model: PreTrainedModel, sequence_length: int) -> None:
    """Raise ``ModelError`` if sequences are longer than the model's context.

    Learned positions end there with an IndexError; rotary ones go on, silently, into what the model never saw.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and sequence_length > context:
        raise ModelError(
            f"{type(model).__name__} has a context of {context} tokens, but data.sequence_length is {sequence_length}.",
            f"Set data.sequence_length to {context} or less.",
        )


@torch.no_grad()
def require_document_isolation(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` if a token of one packed document changes the hidden states of the next."""
    training = model.training
    model.eval()
    positions_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=model.device)
    tokens_BT = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4]], device=model.device)
    packed = hidden_states(model, tokens_BT, positions_BT)
    changed = hidden_states(model, tokens_BT + torch.tensor([[1] * 4 + [0] * 4], device=model.device), positions_BT)
    model.train(training)
    difference = float((packed[:, 4:] - changed[:, 4:]).abs().max())
    # Experts are multiplied in groups, and groups of other sizes round otherwise; a leak can be as small as 5e-4, which
    # bfloat16 could not tell from that.
    tolerance = 1e-5 if packed.dtype.itemsize >= 4 else 0.0
    if not difference <= tolerance * float(packed.abs().max()):
        raise ModelError(
            f"{type(model).__name__} attends across the documents of a packed sequence.",
            "Set data.packing to false, or use a model whose attention follows position_ids.",
        )
