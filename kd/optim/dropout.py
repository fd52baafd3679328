"""The dropout of a model's layers, which changes during a run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from kd.errors import ModelError
from kd.models.layers import find_decoder_layers


@dataclass(frozen=True)
class Dropout:
    """The places of a model's layers that hold a probability: modules and their attributes."""

    places: tuple[tuple[nn.Module, str], ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Dropout:
        """Find the places; those of adapters have a field of their own.

        Raises ``ModelError`` if the layers of ``model`` have none.
        """
        places = [
            (module, attribute)
            for layer in find_decoder_layers(model)
            for name, module in layer.named_modules()
            if "lora_" not in name
            for attribute in _list_attributes(module)
        ]
        if not places:
            detail = f"train.dropout: the layers of {type(model).__name__} have no dropout."
            remedy = "Leave train.dropout out, or use weight decay (train.weight_decay)."
            raise ModelError(detail, remedy)
        return cls(tuple(places))

    def set(self, probability: float) -> None:
        """Let every place drop with ``probability`` from the next forward pass on."""
        for module, attribute in self.places:
            setattr(module, attribute, probability)


def _list_attributes(module: nn.Module) -> list[str]:
    """The attributes of ``module`` that are probabilities of dropout.

    transformers keeps those of the attention as numbers: ``attention_dropout`` in most models.
    """
    if isinstance(module, nn.Dropout):
        return ["p"]
    return [
        name
        for name, value in vars(module).items()
        if name.endswith("dropout") and isinstance(value, float | int)
    ]
