"""The teacher of a cache, loaded again, and where it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache.manifest import CacheIdentity
from cache.records import Sequences
from cache.store import Cache
from kd.capture.noise import ALLOWED_NOISE
from kd.config.teacher import TeacherConfig
from kd.errors import FidelityError
from kd.models.attention.causality import require_causal
from kd.models.folder import compute_fingerprint, is_remote_code_allowed
from kd.models.layers import compute_hidden_states, find_device, require_context
from kd.models.lm_head import LMHead, find_lm_head
from kd.models.loading import load_teacher
from kd.models.precision import pick_device
from kd.models.quantization.groups import read_quantization
from kd.models.teacher_files import TeacherFiles
from kd.text.batches import make_batch
from kd.text.corpus import Corpus
from kd.text.teacher_side.sequences import find_teacher_side


@dataclass(frozen=True)
class LiveTeacher:
    """The loaded teacher that records are compared with.

    A teacher with a context reads the sequences of ``corpus``, which a cache does not hold.
    """

    model: PreTrainedModel
    lm_head: LMHead
    corpus: Corpus | None = None

    @classmethod
    def load(cls, identity: CacheIdentity, teacher: TeacherFiles) -> LiveTeacher:
        """Load the model of ``teacher``, in the precision and quantisation of the capture."""
        # Another precision would differ from the records by more than the bounds allow.
        captured = identity.teacher
        quantization = read_quantization(captured.quantization)
        changes = {"dtype": captured.dtype, "quantization": quantization}
        teacher = replace(teacher, section=teacher.section.model_copy(update=changes))
        model = load_teacher(teacher, pick_device(), captured.quantization)
        require_context(model, identity.data.sequence_length)
        require_causal(model, identity.data.sequence_length)
        return cls(model, find_lm_head(model, identity.tokenizer.vocabulary_size))

    def find_read(self, number: int, sequence: Sequences) -> Sequences:
        """Return what the teacher read of sequence ``number``, which the cache has as given."""
        if self.corpus is None:
            return sequence
        return find_teacher_side(self.corpus.select(np.array([number])))

    @torch.no_grad()
    def compute_states(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return hidden states (N, D) and next tokens (N,) of all targets of ``sequences``."""
        batch = make_batch(sequences, None).to(find_device(self.model))
        hidden_BLD = compute_hidden_states(self.model, batch.tokens_BL, batch.packed)
        return hidden_BLD.flatten(0, 1)[batch.rows_N], batch.gold_N


@dataclass(frozen=True)
class TeacherLocation:
    """The files of a cache's teacher.

    ``genuine`` means that they have the weights that were captured.
    """

    teacher: TeacherFiles
    genuine: bool

    @classmethod
    def find(cls, store: Cache, name: str | None, root: Path) -> TeacherLocation:
        """Find the teacher ``name``, by default the one that the cache names.

        A name is a folder, a GGUF file or a hub id. Raises ``FidelityError`` for a cache whose
        teacher cannot be run, such as a remote one, and ``ModelError`` if no model is found.
        """
        recorded = store.manifest.teacher
        wanted = name or recorded.name
        path = root / wanted
        gguf_file = path.name if path.suffix == ".gguf" else None
        place = path.parent if gguf_file else path
        # owner/model of owner/model/file.gguf; the address of a bucket is cut in the same way.
        named = wanted.rpartition("/")[0] if gguf_file else wanted
        section = TeacherConfig(
            model=str(place) if place.exists() else named,
            revision=None if name else recorded.revision or None,
            gguf_file=gguf_file,
            trust_remote_code=is_remote_code_allowed(),
        )
        return cls.of_section(store, section)

    @classmethod
    def of_section(cls, store: Cache, section: TeacherConfig) -> TeacherLocation:
        """Find the teacher that ``section`` names; raises as ``find`` does."""
        if (kind := store.identity.teacher.dtype) not in ALLOWED_NOISE:
            raise FidelityError(
                f"{store.folder} has no live teacher to compare with: its records are {kind}.",
                "Check its bytes instead: kd cache verify.",
            )
        if store.identity.data.context_sha256:
            raise FidelityError(
                f"{store.folder} holds what its student reads, but its teacher read a context "
                "(teacher.context).",
                "Check its bytes instead: kd cache verify. The capture compared its records.",
            )
        # One process runs it here, however many did in the capture.
        captured = store.manifest.teacher.identity
        parallel = "device_map" if captured.parallel else "none"
        teacher = TeacherFiles.resolve(section.model_copy(update={"parallel": parallel}))
        digest = compute_fingerprint(teacher.folder, section.gguf_file)
        return cls(teacher, digest == captured.model_sha256)

    def require_genuine(self, store: Cache) -> None:
        """Raise ``FidelityError`` unless the weights are those that were captured."""
        if not self.genuine:
            folder = self.teacher.folder
            raise FidelityError(
                f"{store.folder} was captured from other weights than {folder} has now.",
                "Name the teacher of the capture in teacher.model, with its revision.",
            )
