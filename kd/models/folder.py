"""The folder of a model: where it is, and what its files say about the model. Imports no torch.

Preflight checks, the estimate of a capture and the API's plan of a job read a model's sizes here,
so all of them agree, and none of them loads the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from cache.errors import PotstillError, StoreError
from kd.addresses import HUB_ID, ModelSource
from kd.buckets import inputs
from kd.buckets.snapshots import download_snapshot
from kd.errors import DataError, ModelError, format_first_line
from kd.files import LFS_REMEDY, is_lfs_pointer

#: The fields of a JSON file of a model, such as config.json, by transformers' names.
ConfigFields = dict[str, Any]
#: The facts of a model's card by the hub's names; their authors may give them any form.
Card = dict[str, Any]
#: The folder of the adapters, below a saved student's.
ADAPTER_FOLDER = "adapter"
#: The file there with the settings of the adapters, and the name of their model.
ADAPTER_CONFIG = "adapter_config.json"
#: The folder of the model that unmerged adapters belong to, below a saved student's.
BASE_FOLDER = "base"
#: A folder is a saved student if it holds one of these files: a whole model, or only adapters.
STUDENT_FILES = ("config.json", f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}")
#: The facts between the first two lines of dashes of a model card.
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
#: The licence of a model whose card is not on this machine or names none, as the hub writes it.
UNKNOWN_LICENCE = "unknown"
#: Files that ``resolve_model`` downloads besides the weights: configuration, tokenizer, chat
#: template, code, and the card with the licence.
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", "README.md"]
#: Files of which a tokenizer has at least one: those of tokenizers, SentencePiece, tiktoken and the
#: older ones of transformers.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "spm.model",
    "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt", "tokenizer_config.json",
)  # fmt: skip
#: The file that names the files of the weights, where there are several.
_INDEX = "model.safetensors.index.json"
#: The names that the index of a model may give: files of its folder.
_PLAIN_NAME = re.compile(r"[^/\\\0]+\.safetensors")
#: Kinds of scaled rotary positions whose factor multiplies the context.
_SCALINGS = ("linear", "dynamic", "yarn")
#: What to do about a folder without a tokenizer.
TOKENIZER_REMEDY = "Copy tokenizer.json and tokenizer_config.json of the teacher into it."
#: Packages that transformers needs to read weights that are stored quantised, by quant_method of
#: config.json; those of mxfp4 and fp8 are unpacked where their kernels are missing.
_READERS_OF_QUANTISED = {
    "awq": ("gptqmodel",), "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",), "fp8": (), "gptq": ("gptqmodel", "optimum"),
    "mxfp4": (), "torchao": ("torchao",),
}  # fmt: skip
#: Why a teacher must have plain weights.
ROUNDS_PLAIN_WEIGHTS = "teacher.quantization rounds plain weights"
#: Why weights that are stored quantised cannot be spread over devices.
SPREADS_PLAIN_WEIGHTS = "teacher.parallel spreads plain weights"
#: Families of models name the width of their hidden states differently.
_WIDTH_FIELDS = ("hidden_size", "n_embd", "d_model", "dim")
#: The most that any model has of what a field counts: layers, experts and heads; widths; widths
#: of an MLP; tokens.
_BOUNDS = dict.fromkeys((
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_experts", "num_local_experts",
    "n_routed_experts", "num_attention_heads", "num_key_value_heads", "n_head",
), 1 << 12) | dict.fromkeys((*_WIDTH_FIELDS, "head_dim"), 1 << 16) | dict.fromkeys((
    "intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff",
), 1 << 20) | {"vocab_size": 1 << 22}  # fmt: skip
#: How the name of the embedding ends in models whose language model is a part.
_EMBEDDING = "embed_tokens.weight"
#: The largest file of JSON that is read, in bytes; the index of a model of 1e12 parameters has a
#: tenth of it.
_LARGEST_JSON = 1 << 26
#: Fields of config.json and of tokenizer_config.json that name files which transformers then reads
#: in place of the usual ones.
_REDIRECTIONS = ("configuration_files", "fast_tokenizer_files", "transformers_weights")
#: Bytes of a file that are hashed at once.
_HASHED_BYTES = 1 << 24


# ---------------------------------------------------------------------- the contents of a folder


@dataclass(frozen=True)
class ModelFolder:
    """A model as the files in its folder describe it; each file is read when it is first needed."""

    path: Path

    @classmethod
    def find(cls, model: str, root: Path, revision: str | None = None) -> ModelFolder | None:
        """The folder of ``model`` on this machine: below ``root``, or in the hub's cache.

        Downloads nothing, except the small files of a model in a bucket. None means that this
        machine has no folder of that name, and neither the configuration nor the tokenizer of a
        model of that name.
        """
        folder = locate_model(model, root)
        if folder.is_dir():
            return cls(folder)
        if inputs.is_stored_name(model):
            return None
        from huggingface_hub import try_to_load_from_cache

        for name in ("config.json", "tokenizer.json"):
            try:
                found = try_to_load_from_cache(model, name, revision=revision)
            except ValueError:  # the name has not the form of a hub id
                return None
            if isinstance(found, str):
                return cls(Path(found).parent)
        return None

    @property
    def has_config(self) -> bool:
        """Whether the folder has a config.json.

        A folder of GGUF files or of a tokenizer may have none.
        """
        return (self.path / "config.json").is_file()

    @cached_property
    def config(self) -> ConfigFields:
        """The content of config.json; empty without one.

        Raises ``ModelError`` if the file is not a JSON object.
        """
        if not self.has_config:
            return {}
        self.require_no_pointer("config.json")
        return _read_object(self.path / "config.json")

    @cached_property
    def text_config(self) -> ConfigFields:
        """``config``, with the fields of the language model at the top.

        Models that also read images keep these fields in an inner ``text_config``.
        """
        inner = self.config.get("text_config") or {}
        if not isinstance(inner, dict):
            what = "its text_config is not a JSON object"
            raise _make_unreadable_error(self.path / "config.json", what)
        return {**self.config, **inner}

    @property
    def is_composite(self) -> bool:
        """Whether the language model is a part of a model that also reads images or sound."""
        parts = ("text_config", "vision_config", "audio_config")
        return any(isinstance(self.config.get(part), dict) for part in parts)

    def require_no_pointer(self, *names: str) -> None:
        """Raise ``ModelError`` if Git LFS has not downloaded one of ``names``.

        Without names: a file of the configuration, the tokenizer or the weights.
        """
        weights = [path.name for path in self.weight_files]
        for name in names or ("config.json", *_TOKENIZER_FILES, *weights):
            path = self.path / name
            if path.is_file() and is_lfs_pointer(path):
                what = f"{path} is a pointer of Git LFS, not the file itself."
                raise ModelError(what, LFS_REMEDY)

    def require_own_files(self, gguf_file: str | None = None, trusted: bool = False) -> None:
        """Raise ``ModelError`` if a load would read more than the files of the model's identity.

        Adapters beside it bring a base from anywhere, fields of its configuration name other files,
        and with ``trusted`` they name code of other models. Also where Git LFS has not downloaded a
        file.
        """
        self.require_no_pointer(*filter(None, [gguf_file]))
        if (self.has_config or gguf_file is not None) and (self.path / ADAPTER_CONFIG).is_file():
            remedy = "Merge them into the model, or move their files to another folder."
            raise ModelError(f"{self.path} holds adapters beside a model.", remedy)
        # A GGUF file is its own configuration.
        for name in ["tokenizer_config.json"] + ([] if gguf_file else ["config.json"]):
            path = self.path / name
            for field in _list_redirections(_read_object(path) if path.is_file() else {}, trusted):
                remedy = "Give these files their usual names in this folder, and remove the field."
                raise ModelError(f"{path} names files besides those of the model: {field}.", remedy)
        if not gguf_file:
            self.list_read_files()

    def require_whole_files(self) -> None:
        """Raise ``ModelError`` if the weights are missing, cut off, or not the model's own."""
        self.require_own_files()
        if not (paths := self.list_read_files()):
            detail = f"{self.path} holds neither model.safetensors nor its index."
            raise ModelError(detail, "Convert the model to safetensors, under these names.")
        for path in paths:
            try:
                safe_open(path, "numpy")
            except (OSError, SafetensorError) as error:
                raise _make_unreadable_error(path, format_first_line(error)) from None

    def require_decoder(self) -> None:
        """Raise ``ModelError`` for a model with an encoder, such as T5, by its name.

        Also for sizes that no model has.

        Its decoder predicts a text from another text, so there is no distribution of the next
        token of one text to record.
        """
        if self.config.get("is_encoder_decoder"):
            kind = self.config.get("model_type", "encoder-decoder")
            raise ModelError(
                f"{self.path} holds a model with an encoder and a decoder "
                f"({self.architecture or kind}, of the type {kind}).",
                "Use a decoder-only language model, such as a Llama, Qwen, Gemma or Mistral.",
            )
        for field, most in _BOUNDS.items():
            count = self.text_config.get(field)
            if isinstance(count, int) and count > most:
                raise ModelError(
                    f"config.json of {self.path} has {field} {count}, and no model has more than "
                    f"{most}.",
                    "Correct it, or download the model again.",
                )

    @property
    def stored_quantization(self) -> str | None:
        """How the stored weights are quantised, such as "bitsandbytes"; None for plain weights.

        A model that was unpacked from GGUF may have kept the mark; its weights are plain.
        """
        found = self.text_config.get("quantization_config")
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else None
        return None if method == "gguf" else method

    def require_readable_weights(self) -> None:
        """Raise ``ModelError`` if the weights are quantised in a form that cannot be read."""
        method = self.stored_quantization
        if method is None:
            return
        packages = _READERS_OF_QUANTISED.get(method)
        if packages is None:
            raise ModelError(
                f"the weights in {self.path} are stored quantised by {method!r}, which cannot be "
                "read.",
                f"Use the model with plain weights, or one quantised by "
                f"{', '.join(_READERS_OF_QUANTISED)}.",
            )
        if missing := [package for package in packages if find_spec(package) is None]:
            raise ModelError(
                f"the weights in {self.path} are stored quantised by {method}, which needs "
                f"{' and '.join(missing)}: not installed.",
                f"Install it: pip install {' '.join(missing).replace('_', '-')}; or use the model "
                "with plain weights.",
            )

    def require_trainable_weights(self) -> None:
        """Raise ``ModelError`` if the weights are quantised, and stay so when they are read."""
        if _READERS_OF_QUANTISED.get(self.stored_quantization or "", True):
            self.require_plain_weights("a student has weights in float32")

    def require_plain_weights(self, why: str) -> None:
        """Raise ``ModelError`` if the weights are stored quantised; ``why`` they must not be."""
        if self.stored_quantization is not None:
            raise ModelError(
                f"the weights in {self.path} are stored quantised by {self.stored_quantization}, "
                f"but {why}.",
                "Use the model with plain weights.",
            )

    @property
    def architecture(self) -> str | None:
        """The name of the class that saved the model; None if config.json does not say."""
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else None

    @property
    def context(self) -> int | None:
        """The most positions that the model can attend to; None if config.json does not say."""
        return find_context(self.text_config)

    @property
    def hidden_width(self) -> int | None:
        """D, the width of the hidden states; None if config.json does not say."""
        widths = (self.text_config.get(field) for field in _WIDTH_FIELDS)
        return next((width for width in widths if isinstance(width, int)), None)

    @property
    def vocabulary_size(self) -> int | None:
        """V by config.json, which may count padding; None if it does not say."""
        size = self.text_config.get("vocab_size")
        return size if isinstance(size, int) and size > 1 else None

    @property
    def dtype(self) -> str | None:
        """The precision of the stored weights, such as "bfloat16".

        None if config.json does not say. Read only from the top of config.json, as transformers
        reads it.
        """
        # torch_dtype is the name of the field before transformers 4.56.
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        return dtype if isinstance(dtype, str) else None

    @property
    def tokenizer_file(self) -> Path | None:
        """The path of tokenizer.json; None if the folder has none."""
        path = self.path / "tokenizer.json"
        return path if path.is_file() else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a file of a tokenizer, in the form of any library."""
        return any((self.path / name).is_file() for name in _TOKENIZER_FILES)

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        return sorted(self.path.glob("[!.]*.safetensors"))

    def list_read_files(self) -> list[Path]:
        """The safetensors files that the model is read from; a folder may hold more.

        These are model.safetensors, or those of its index. Raises ``ModelError`` if the index
        cannot be read.
        """
        whole = self.path / "model.safetensors"
        index = self.path / _INDEX
        if whole.is_file() or not index.is_file():
            return [whole] if whole.is_file() else []
        try:
            named = sorted(set(_read_object(index)["weight_map"].values()))
            outside = [file for file in named if not _PLAIN_NAME.fullmatch(file)]
        except (LookupError, TypeError, AttributeError) as error:
            raise _make_unreadable_error(index, error) from None
        if outside:
            detail = f"{index} names {outside[0]!r}, which is no *.safetensors file of its folder."
            remedy = "Move the weights into the folder of config.json, and correct the index."
            raise ModelError(detail, remedy)
        return [self.path / file for file in named]

    @property
    def gguf_files(self) -> list[str]:
        """The names of the GGUF files, sorted."""
        return sorted(path.name for path in self.path.glob("[!.]*.gguf"))

    def read_text_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the language model's tensors: all but those for images and sound."""
        shapes = self.read_parameter_shapes()
        named = [name for name in shapes if f".{name}".endswith(f".{_EMBEDDING}")]
        starts = [name.removesuffix(_EMBEDDING) for name in named]
        if not self.is_composite or not starts:
            return shapes
        own = (*starts, "lm_head.")
        kept = [each for each in shapes if each.startswith(own) or each.endswith(".lm_head.weight")]
        return {name: shapes[name] for name in kept}

    def read_parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each stored tensor, from the headers of the files that are read.

        Unreadable files add none.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.list_read_files():
            with suppress(OSError, SafetensorError), safe_open(path, "numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in [*file.keys()]}
        return shapes


def find_context(fields: Mapping[str, Any]) -> int | None:
    """Return the most positions of a language model with the configuration ``fields``.

    None if they do not say. Scaled rotary positions multiply it, as in vLLM.
    """
    context = fields.get("max_position_embeddings") or fields.get("n_positions")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    if not isinstance(context, int) or not isinstance(rope, dict):
        return context if isinstance(context, int) else None
    kind = rope.get("rope_type", rope.get("type"))
    # Of other kinds, max_position_embeddings is what the scaling has made. So it is of Gemma 3.
    scaled = kind in _SCALINGS and not str(fields.get("model_type")).startswith("gemma3")
    original = "original_max_position_embeddings"
    start = (kind == "yarn" and (fields.get(original) or rope.get(original))) or context
    factor = rope.get("factor") if scaled else None
    return max(context, int(start * factor)) if factor else context


def _make_unreadable_error(path: Path, reason: object) -> ModelError:
    return ModelError(f"{path} cannot be read: {reason}.", "Download or save the model again.")


def _read_object(path: Path) -> ConfigFields:
    """Read a file of a model that holds a JSON object; raise ``ModelError`` for any other."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise _make_unreadable_error(path, f"it has more than {_LARGEST_JSON} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _make_unreadable_error(path, error) from None
    if not isinstance(found, dict):
        raise _make_unreadable_error(path, "it is not a JSON object")
    return found


def _list_redirections(found: Any, trusted: bool) -> Iterator[str]:
    """Name the fields below ``found`` by which transformers would read other files."""
    waiting = [found]
    while waiting:
        each = waiting.pop()
        for name, value in each.items() if isinstance(each, dict) else ():
            named = json.dumps(value) if name == "auto_map" and trusted else ""
            if name in _REDIRECTIONS or "--" in named or "/" in named:
                yield name
        inner = each.values() if isinstance(each, dict) else each
        waiting += inner if isinstance(each, dict | list) else ()


# ---------------------------------------------------------------------- finding a model


def resolve_model(
    model: str, revision: str | None = None, weights: str | None = "*.safetensors"
) -> Path:
    """Return the local folder of ``model``: ``model`` itself, or a snapshot from the hub.

    A snapshot that is not on this machine is downloaded, and a model in a bucket. Only weight
    files that match ``weights`` are downloaded, because a repository may hold twenty quantisations.
    """
    patterns = [*_SMALL_FILES, weights] if weights else _SMALL_FILES
    if inputs.is_stored_name(model):
        return _download_model(model, patterns)
    if Path(model).is_dir():
        return Path(model)
    if not HUB_ID.match(model):
        remedy = "Check the path; relative paths start at the folder where the run starts."
        raise ModelError(f"model folder {model!r} does not exist.", remedy)
    from huggingface_hub.errors import GatedRepoError

    try:
        return download_snapshot(model, revision, patterns)
    except PotstillError:  # whoever follows the download gave up
        raise
    except GatedRepoError as error:
        detail = f"model {model!r} is gated: {error}"
        raise ModelError(detail, "Ask for access on its page, then run: hf auth login.") from error
    # Not found, offline and no network each raise a class of their own, with no common base.
    except Exception as error:
        raise ModelError(
            f"model {model!r} is neither a local folder nor a model that the hub can provide now "
            f"({type(error).__name__}).",
            "Check the name, or download the model first; "
            "with HF_HUB_OFFLINE=1 only downloaded models are found.",
        ) from error


def resolve_source(source: ModelSource, whole: bool = True) -> Path:
    """Return the local folder of ``source``, as ``resolve_model`` does.

    Without ``whole`` no weights in safetensors are downloaded.
    """
    weights = source.weights if whole else source.gguf_file
    return resolve_model(source.name, source.revision, weights)


def find_source(source: ModelSource, root: Path) -> ModelFolder | None:
    """Return the folder of ``source`` if it is on this machine, as ``ModelFolder.find`` does."""
    return ModelFolder.find(source.name, root, source.revision)


def _download_model(url: str, patterns: list[str]) -> Path:
    """Download the files of a bucket that match ``patterns``, as a hub matches them.

    Raises ``ModelError`` if there is none.
    """
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    found = inputs.list_stored(url)
    if not found.objects:
        raise ModelError(*inputs.describe_nothing(url))
    kept = filter_repo_objects(found.objects, allow_patterns=patterns, ignore_patterns="original/*")
    names = sorted(kept)
    if not names:
        remedy = "Give the folder of a Hugging Face model."
        raise ModelError(f"{url!r} holds no file of a model.", remedy)
    return inputs.download_files(url, names)


def locate_model(model: str, root: Path) -> Path:
    """Return where the folder of ``model`` is if it is one below ``root``.

    Of a model in a bucket the small files are downloaded there, if the bucket gives them and unless
    checks must look away.
    """
    if inputs.is_stored_name(model) and inputs.may_read_buckets():
        with suppress(StoreError, DataError, ModelError):
            return _download_model(model, _SMALL_FILES)
    return root / model


def compute_fingerprint(
    folder: Path, gguf_file: str | None = None, check_stop: Callable[[], None] | None = None
) -> str:
    """Return the sha256 of the files that determine the model's outputs.

    These are the configuration, the model's own code and the weights, or only ``gguf_file``.
    ``check_stop`` is called between blocks of a file, and may raise to give up.
    """
    ModelFolder(folder).require_own_files(gguf_file)
    digest = hashlib.sha256()
    for name in [gguf_file] if gguf_file else list_identity_files(folder):
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{path} does not exist.", "Check teacher.gguf_file.")
        content = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_HASHED_BYTES):
                content.update(block)
                if check_stop is not None:
                    check_stop()
        digest.update(name.encode() + content.digest())
    return digest.hexdigest()


def list_identity_files(folder: Path) -> list[str]:
    """The names of the files that determine the outputs of a model with safetensors."""
    model = ModelFolder(folder)
    if not model.weight_files:
        remedy = "Convert the model to safetensors, or set gguf_file."
        raise ModelError(f"{folder} holds no *.safetensors weights.", remedy)
    if not model.has_config:
        remedy = "Give the folder of a Hugging Face model."
        raise ModelError(f"{folder} holds no config.json.", remedy)
    code = sorted(path.name for path in folder.glob("*.py"))
    # An index shapes the outputs where it leaves out a file, such as that of an LM head.
    partial = not {*model.list_read_files()} >= {*model.weight_files}
    index = [_INDEX] if partial and (folder / _INDEX).is_file() else []
    return ["config.json", *code, *index, *(path.name for path in model.weight_files)]


# ---------------------------------------------------------------------- the code of a model


def is_remote_code_allowed() -> bool:
    """Whether jobs may run Python code that comes with a model (KD_TRUST_REMOTE_CODE)."""
    return os.environ.get("KD_TRUST_REMOTE_CODE", "").lower() in {"1", "true", "yes", "on"}


def require_allowed_remote_code(source: ModelSource) -> bool:
    """Return whether to run the Python code of a teacher's files.

    Raises ``ModelError`` if the job asks for it and the operator does not allow it.
    """
    if source.trust_remote_code and not is_remote_code_allowed():
        detail = "teacher.trust_remote_code is set, but the operator does not allow it."
        raise ModelError(detail, "Start with KD_TRUST_REMOTE_CODE=1.")
    return source.trust_remote_code


@lru_cache(maxsize=8)  # to read the metadata of a large file takes seconds
def read_gguf_card(model: str, file: str, revision: str | None = None) -> Card:
    """Read what the metadata of a GGUF file on this machine say of licence and languages.

    The names are those of a card. Nothing is found where the file cannot be read.
    """
    folder = ModelFolder.find(model, Path(), revision)
    path = None if folder is None else folder.path / file
    # A student that learns from a sealed cache needs no gguf.
    if path is None or not path.is_file() or find_spec("gguf") is None:
        return {}
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
    except Exception:  # the library has no class of its own for a damaged file
        return {}
    names = {"license": "general.license", "language": "general.languages"}
    return {name: fields[key].contents() for name, key in names.items() if key in fields}


def read_card(model: str, revision: str | None = None) -> Card:
    """Read the facts of a model's card on this machine; none where it cannot be read."""
    folder = ModelFolder.find(model, Path(), revision)
    path = None if folder is None else folder.path / "README.md"
    if path is None or not path.is_file():
        return {}
    found = _FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace"))
    try:
        facts = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return facts if isinstance(facts, dict) else {}
