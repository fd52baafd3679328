"""The body of a model: its last hidden states, its decoder layers, and its context.

Shapes: B sequences, L positions of a sequence, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from kd.errors import ModelError
from kd.models.attention.interface import reading_rows
from kd.models.attention.rotary import keep_frequencies_apart
from kd.models.folder import find_context
from kd.progress import Monitor
from kd.text.packed_rows import PackedRows

#: The attribute of modules that run in several processes together.
_SHARED = "runs_in_several_processes"


def compute_hidden_states(
    model: nn.Module, tokens_BL: Tensor, packed: PackedRows | None = None
) -> Tensor:
    """Return the final hidden states (B, L, D), after the last norm.

    Attention stays inside each document of ``packed``: transformers makes a mask from the
    positions, or after ``kd.models.attention.isolation.isolate_documents`` our attention computes
    one document after the other. None means one document in each row.
    """
    return run_body(model, tokens_BL, packed).last_hidden_state


def run_body(
    model: nn.Module, tokens_BL: Tensor, packed: PackedRows | None = None, **wanted: Any
) -> Any:
    """Run ``model`` up to its last norm, and return its output with what else is ``wanted``."""
    positions_BL = packed.positions_BL if packed is not None and packed.apart else None
    keep_frequencies_apart(model)
    with reading_rows(model, packed):
        body = find_body(model)
        return body(input_ids=tokens_BL, position_ids=positions_BL, use_cache=False, **wanted)


def find_body(model: nn.Module) -> nn.Module:
    """Return the part of ``model`` below its LM head: embeddings, layers and last norm."""
    # getattr, because the __getattr__ of nn.Module is typed as a Tensor.
    body: nn.Module = getattr(model, "base_model")  # noqa: B009
    if body is not model:
        return body
    # Llama 4 names its body for the model with images, and transformers does not find it.
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def find_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which ``model`` takes its tokens and gives its hidden states.

    That is where its LM head is. The first of its parameters may lie on another device: see
    ``teacher.parallel``.
    """
    head = model.get_output_embeddings()
    return model.device if head is None else head.weight.device


def is_hollow(model: nn.Module) -> bool:
    """Whether parameters of ``model`` have a shape but no values, so that it cannot run.

    Of a model that is placed on several devices, values may lie on the disk.
    """
    return not hasattr(model, "hf_device_map") and any(p.is_meta for p in model.parameters())


def train_all_rows(model: nn.Module) -> None:
    """Let every row of the embeddings of ``model`` be trained, that of the padding token too.

    torch gives the row ``padding_idx`` no gradient as an input. But rows here have no padding, and
    the padding token may be one of the text: the end or the beginning of a document. No other
    number changes, and the configuration keeps the token.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def find_decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers in order.

    Empty if no list of the model has that many modules.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in find_body(model).modules() if isinstance(module, nn.ModuleList))
    return next((list(each) for each in lists if len(each) == count), [])


def read_layer_sizes(config: PreTrainedConfig, field: str) -> list[int]:
    """Return the sizes that ``field`` of a configuration has in its layers, which may differ.

    Empty if no layer has such a field.
    """
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    found = [getattr(each, field, None) for each in layers]
    sizes = [size for each in found for size in (each if isinstance(each, list) else [each])]
    return [size for size in sizes if isinstance(size, int)]


def find_list_name(model: PreTrainedModel) -> str:
    """Return the name of the list of decoder layers, which must be one, such as "model.layers"."""
    first = find_decoder_layers(model)[0]
    name = next(name for name, module in model.named_modules() if module is first)
    return name.rpartition(".")[0]


def find_trunk(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return the module that runs the decoder layers in turn, with its name.

    It is the body, or inside it (OPT); a call of the model or of its body runs it once. The model
    must have a list of decoder layers.
    """
    trunk = find_list_name(model).rpartition(".")[0]
    return trunk, model.get_submodule(trunk)


def find_model_context(model: PreTrainedModel) -> int | None:
    """Return the most positions of ``model``, whatever its family calls them; None without a limit.

    XLNet says -1.
    """
    config = model.config.get_text_config()
    named = getattr(config, "max_position_embeddings", None)
    context = find_context(config.to_dict() | {"max_position_embeddings": named})
    return context if context is not None and context > 0 else None


def require_context(model: PreTrainedModel, sequence_length: int) -> None:
    """Raise ``ModelError`` if sequences are longer than the model's context.

    Learned position embeddings would raise an IndexError there. Rotary ones would continue
    silently, to positions that the model was never trained on.
    """
    context = find_model_context(model)
    if context is not None and sequence_length > context:
        raise ModelError(
            f"{type(model).__name__} has a context of {context} tokens, "
            f"but data.sequence_length is {sequence_length}.",
            f"Set data.sequence_length to {context} or less.",
        )


def group_layers(student: PreTrainedModel) -> list[tuple[str, list[Parameter]]]:
    """Return the trained parameters by group, from the bottom to the top of the model.

    The groups are ``embeddings``, ``layer 0``, ``layer 1``, ..., ``head``; the last holds the LM
    head and the final norm. An LM head that is tied to the embeddings belongs to ``embeddings``.
    Groups without a trained parameter are left out.
    """
    layers = find_decoder_layers(student)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    embeddings = [each for each in student.modules() if isinstance(each, nn.Embedding)]
    embedded = {parameter for module in embeddings for parameter in module.parameters()}
    outside = [parameter for parameter in student.parameters() if parameter not in inside]
    groups = [("embeddings", [each for each in outside if each in embedded])]
    groups += [(f"layer {index}", list(layer.parameters())) for index, layer in enumerate(layers)]
    groups.append(("head", [each for each in outside if each not in embedded]))
    trained = ((name, [each for each in own if each.requires_grad]) for name, own in groups)
    return [(name, own) for name, own in trained if own]


def mark_shared_modules(trunk: nn.Module) -> None:
    """Mark the modules inside ``trunk``, whose forward pass several processes run together."""
    for module in trunk.modules():
        if module is not trunk:
            setattr(module, _SHARED, True)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let ``model`` be in the mode for evaluation in the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def removing(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks of ``handles`` at the end of the block."""
    kept = list(handles)
    try:
        yield
    finally:
        for handle in kept:
            handle.remove()


@contextmanager
def stopping_forward(monitor: Monitor, what: str) -> Iterator[None]:
    """Let every module that runs in the block without gradients first ask whether to stop.

    So a request is heard inside long measurements and texts that are written token by token, in
    this library's code and in others'. Raises ``Interrupted``, which says ``what`` was stopped;
    training steps, which have gradients, are left to their own loop. A forward pass that several
    processes share ends first: the others would wait for this one.
    """

    def ask(module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled() and not getattr(module, _SHARED, False):
            monitor.check(what)

    with removing([register_module_forward_pre_hook(ask)]):
        yield
