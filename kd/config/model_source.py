"""Where the files of a model come from, in one record: a job names models in several sections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSource:
    """The name of a model, and which of its files are read.

    ``name`` is a local folder, a hub id or the folder of a bucket. ``gguf_file`` is read in place
    of safetensors. ``trust_remote_code`` asks for the model's own Python code, which the operator
    must allow too. Without ``has_weights`` only the tokenizer is read.
    """

    name: str
    revision: str | None = None
    gguf_file: str | None = None
    trust_remote_code: bool = False
    has_weights: bool = True

    @property
    def weights(self) -> str | None:
        """The pattern of the files with weights that are downloaded; None for a tokenizer alone."""
        return self.gguf_file or ("*.safetensors" if self.has_weights else None)
