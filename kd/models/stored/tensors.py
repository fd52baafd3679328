"""The tensors in a model's files beside those of the model: which are missing, and which unused.

transformers gives a missing tensor random numbers, and leaves out one that it does not know. Both
are compared twice: from the headers of the files before anything is computed, and when the weights
are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kd.errors import ModelError
from kd.models.folder import ModelFolder
from kd.progress import Notice

#: What transformers must do so that ``require_all_tensors`` can judge what it found.
REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}
#: Fields that count layers which predict a later token than the next one. No causal language model
#: of transformers has their tensors.
_LATER_TOKENS = re.compile(r"(mtp|nextn).*(layers|modules)|num_mtp")
#: The most names that an error shows.
_SHOWN = 3

#: What ``from_pretrained`` found: names in missing_keys and unexpected_keys, and in mismatched_keys
#: names with the shapes in the files and in the model.
Found = Mapping[str, Any]


def match_tensors(hollow: PreTrainedModel, folder: ModelFolder, names: dict[str, str]) -> Found:
    """Return what transformers would find in the files of ``hollow``: it loads only their headers.

    ``names`` maps patterns of names in the files to names of the model.
    """
    if hasattr(hollow.config, "quantization_config"):  # else its quantiser would be asked for
        del hollow.config.quantization_config
    shapes = folder.read_text_shapes()
    tensors = {name: torch.empty(shapes[name], device="meta") for name in shapes}
    plan = {"config": hollow.config, "key_mapping": names, "device_map": {"": "meta"}, **REPORTED}
    made: Any = type(hollow)
    with without_report():
        return dict(made.from_pretrained(None, state_dict=tensors, dtype=torch.float32, **plan)[1])


def select_plain(hollow: PreTrainedModel, found: Found) -> Found:
    """Leave of ``found`` what no quantiser renames: the embedding, and vectors such as norms."""
    embedding = hollow.get_input_embeddings()
    plain = {
        name
        for name, each in hollow.named_parameters()
        if each is embedding.weight or (each.dim() == 1 and not name.endswith("bias"))
    }
    return {
        "missing_keys": plain & {*found["missing_keys"]},
        "unexpected_keys": (),
        "mismatched_keys": [each for each in found["mismatched_keys"] if each[0] in plain],
    }


def require_all_tensors(name: str, folder: Path, found: Found) -> None:
    """Raise ``ModelError`` if tensors of the model, a ``name``, are missing or of another shape.

    What transformers can do without is not among them: a tied LM head, buffers that it computes,
    and what the class of the model says.
    """
    if missing := sorted(found["missing_keys"]):
        shown = ", ".join(missing[:_SHOWN])
        if len(missing) > _SHOWN:
            shown += f" and {len(missing) - _SHOWN} others"
        remedy = "Download or save the model again, with its config.json."
        unknown = sorted(found["unexpected_keys"])
        if renamed := [each for end in missing[:_SHOWN] for each in unknown if each.endswith(end)]:
            shown += f"; they hold {renamed[0]}"
            remedy = "Save the model itself, not the one that wraps it, under its own names."
        detail = f"the files in {folder} do not hold all tensors of its language model, a {name}"
        raise ModelError(f"{detail}: {shown}.", remedy)
    if wrong := sorted(found["mismatched_keys"]):
        tensor, stored, own = wrong[0]
        raise ModelError(
            f"the shapes of tensors in {folder} are not those of its config.json, a {name}: "
            f"{len(wrong)}, for example {tensor}: {tuple(stored)}, expected {tuple(own)}.",
            "Download or save weights and config.json again, together.",
        )


def list_notices(
    hollow: PreTrainedModel, is_split: bool, folder: Path, found: Found
) -> list[Notice]:
    """Name the tensors and layers that nothing uses, and an LM head apart from its embedding.

    ``is_split``: whether the files hold such a head, and config.json says that there is none.
    """
    notices = []
    if unused := sorted(found["unexpected_keys"]):
        what = f"tensors in {folder} that the model has no use for, left out"
        remedy = "Check that config.json belongs to these files."
        notices.append(Notice(what, len(unused), unused[0], remedy))
    if is_split:
        what = f"LM heads in {folder} that are not the embedding, as its config.json says, used"
        remedy = "Set it to false there: other programs may use the embedding in place of the head."
        notices.append(Notice(what, 1, "tie_word_embeddings: true", remedy))
    for name, count in list_later_tokens(hollow.config).items():
        what = f"layers for later tokens (MTP) in config.json of {folder}, not used"
        notices.append(Notice(what, count, f"{name}: {count}", "A saved student says 0."))
    return notices


def list_later_tokens(config: PreTrainedConfig) -> dict[str, int]:
    """Return the counts of layers that predict later tokens (MTP), by their fields."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if _LATER_TOKENS.search(name) and type(value) is int and value > 0
    }


def has_own_head(hollow: PreTrainedModel, folder: ModelFolder) -> bool:
    """Whether the files hold an LM head that differs from the embedding.

    Files may hold one matrix twice, and then the two are one.
    """
    layers = (hollow.get_output_embeddings(), hollow.get_input_embeddings())
    found = _find_weights(hollow, folder, layers)
    tensors = _read_tensors(folder, {*found}) if len({*found} - {""}) == 2 else {}
    return len(tensors) == 2 and not torch.equal(*tensors.values())


def read_head(hollow: PreTrainedModel, folder: ModelFolder) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the LM head in the files; a tied one is the embedding.

    No other tensor is read. Raises ``ModelError`` if the files do not hold it.
    """
    head: Any = hollow.get_output_embeddings()
    tied = getattr(hollow.config, "tie_word_embeddings", False)
    layers = (head, hollow.get_input_embeddings() if tied else None)
    name = next(filter(None, _find_weights(hollow, folder, layers)), "")
    bias = f"{name.removesuffix('weight')}bias"
    found = _read_tensors(folder, {name, bias})
    if name not in found or (head.bias is not None) != (bias in found):
        detail = f"{folder.path} does not hold the LM head of its model."
        raise ModelError(detail, "Give a local folder of the whole model.")
    return found[name], found.get(bias)


def _find_weights(
    hollow: PreTrainedModel, folder: ModelFolder, layers: Sequence[nn.Module | None]
) -> list[str]:
    """Return the name of the weight of each layer in the files; "" where they do not hold it."""
    shapes = folder.read_parameter_shapes()
    names = []
    for layer in layers:
        shape = None if layer is None else tuple(layer.weight.shape)  # type: ignore[arg-type]
        paths = [name for name, each in hollow.named_modules() if each is layer] or [""]
        end = f".{paths[0].rpartition('.')[2]}.weight"
        found = [name for name in shapes if f".{name}".endswith(end) and shapes[name] == shape]
        # Layers that predict later tokens may hold copies, deeper inside.
        names.append(min(found, key=len) if found else "")
    return names


def _read_tensors(folder: ModelFolder, names: set[str]) -> dict[str, Tensor]:
    """Read the tensors of these names that the files hold."""
    tensors: dict[str, Tensor] = {}
    for path in folder.list_read_files():
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names & {*file.keys()}}
    return tensors


@contextmanager
def without_report() -> Iterator[None]:
    """Let transformers not list missing and unused tensors: errors and notices name them."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
