"""Choose an attention that keeps the documents of a packed row apart, and check that it does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from cache.errors import PotstillError
from kd.errors import ModelError, format_first_line
from kd.models.attention.interface import NAMES, use_own_attention, use_packed_attention
from kd.models.attention.kernels import KernelFailed, trying_kernels
from kd.models.depth import cut_fields
from kd.models.folder import ConfigFields
from kd.models.layers import compute_hidden_states, evaluating, find_device
from kd.models.precision import float32_products
from kd.progress import SILENT, Monitor
from kd.text.packed_rows import PackedRows

#: Tokens of a document of the short trial.
SHORT_TOKENS = 4
#: Tokens of a document of the long trial, at least and at most. A few of them are read at the start
#: of a run. A window of a mask may be longer: there the mask itself is compared
#: (``kd.models.attention.documents.Reach``).
LEAST_TOKENS = 32
MOST_TOKENS = 256
#: Parts of the names of a configuration's fields that say how far back a layer reads, in tokens.
REACHES = ("window", "chunk", "conv", "kernel", "dilation", "stride", "block_size", "compress")
#: The ids of the tokens that are tried: small, because every vocabulary has them.
LEAST_ID = 1
MOST_ID = 5
#: The largest difference between a document in a packed row and alone, as a share of the largest
#: hidden state. Much more than rounding, also that of 16 bits over many layers, and much less than
#: what a layer that attends otherwise changes.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
TOLERANCE_16_BIT = 5e-2
#: Parameters of a small model from which on its MLPs are narrowed, to this width.
LARGE_LAYERS = 2**28
NARROW = 16
MLP_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")
#: Bytes of a sequence's mask from which on a run warns of it.
LARGE_MASK = 2**26


def warn_of_mask(model: PreTrainedModel, sequence_length: int, monitor: Monitor) -> None:
    """Emit a warning if ``model`` makes a large mask for each packed sequence.

    Call it after ``isolate_documents``. A mask has a byte for each pair of tokens.
    """
    size = sequence_length**2
    if size < LARGE_MASK or model.config._attn_implementation in NAMES.values():
        return
    monitor.warn_once(
        f"{type(model).__name__} computes its attention by its own code, with a mask of "
        f"{size / 2**20:,.0f} MiB for each packed sequence of {sequence_length} tokens. If memory "
        "runs out, set data.sequence_length lower or data.packing to false."
    )


def isolate_documents(
    model: PreTrainedModel, dtype: torch.dtype | None = None, monitor: Monitor = SILENT
) -> None:
    """Let ``model`` compute the documents of a packed row as if each were alone.

    ``dtype`` is the precision of its products, where that is not the one of its weights: the
    kernels for it are tried too. Where one fails, the model keeps its own attention, and
    ``monitor`` is told why. Raises ``ModelError`` if the model cannot keep documents apart
    (``try_to_isolate``).
    """
    if (problem := try_to_isolate(model, dtype, monitor)) is not None:
        raise problem


@torch.no_grad()
@float32_products()  # TF32's rounding in a deep mixture of experts would look like a leak
def try_to_isolate(
    model: PreTrainedModel, dtype: torch.dtype | None = None, monitor: Monitor = SILENT
) -> ModelError | None:
    """Let ``model`` compute the documents of a packed row as if each were alone, if it can.

    It uses our attention where this gives the hidden states of its own, and keeps its own mask
    where it does not. Returns why it cannot: a token changes the hidden states of the next document
    either way, or the model's own code does not take packed rows. Raises ``ModelError`` if the
    model cannot compute even documents alone.
    """
    with evaluating(model):
        # A model that uses our attention already would find nothing to replace.
        use_own_attention(model)
        trials = _make_trials(model)
        with trying_kernels(None if dtype == torch.float32 else dtype):
            if use_packed_attention(model) and all(
                _computes_as_alone(model, each, monitor) for each in trials
            ):
                return None
        use_own_attention(model)
        return _explain_shared_rows(model, trials)


def explain_own_rows(hollow: PreTrainedModel) -> ModelError | None:
    """Return why documents cannot share rows in a model whose weights are not read yet.

    ``hollow`` may be on the device meta. None if they can, or if only the weights will show
    it. A model that is too large to try has layers with a state, or has none.
    """
    small = make_small(hollow)
    with suppress(ModelError):
        if small is not None:
            return try_to_isolate(small)
    if getattr(hollow, "_is_stateful", False):
        detail = f"{type(hollow).__name__} has layers whose state runs on through a row."
        return ModelError(detail, "Set data.packing to false.")
    return None


def precheck_isolation(small: PreTrainedModel, sequence_length: int, monitor: Monitor) -> None:
    """Check a model as training will, before its weights are read.

    ``small`` is checked in its place (``make_small``), and may use another attention afterwards.
    Raises the error of ``isolate_documents``, and warns as ``warn_of_mask``.
    """
    isolate_documents(small)
    warn_of_mask(small, sequence_length, monitor)


def make_small(hollow: PreTrainedModel) -> PreTrainedModel | None:
    """Make a random model of ``hollow``'s class and width, with few tokens and a layer of each
    kind.

    It stands in for a model whose weights are not read yet, which may be on the device meta. None
    where none can be made: such a model is checked when it trains.
    """
    text = hollow.config.get_text_config()
    named = (getattr(text, name, None) for name in ("layer_types", "layers_block_type"))
    kinds = next(filter(None, named), ["any"])
    # The last layer too: mixtures of experts often begin after the first layers.
    picked = sorted({*map(kinds.index, kinds), 0, text.num_hidden_layers - 1})
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        fields = cut_fields(hollow.config, tuple(picked)) | {"pad_token_id": 0}
        fields |= {name: 2 * MOST_ID for name in fields if name.startswith("vocab_size")}
        if _count_numbers(hollow, fields) > LARGE_LAYERS:
            fields |= {
                name: min(value, NARROW)
                for name, value in fields.items()
                if isinstance(value, int) and any(part in name for part in MLP_WIDTHS)
            }
            if _count_numbers(hollow, fields) > LARGE_LAYERS:
                return None
        torch.manual_seed(0)
        return type(hollow)(type(hollow.config).from_dict(fields))
    return None


def _count_numbers(hollow: PreTrainedModel, fields: ConfigFields) -> int:
    """Count the parameters of a model of ``hollow``'s class with these ``fields``."""
    with torch.device("meta"):
        made = type(hollow)(type(hollow.config).from_dict(fields))
    return sum(parameter.numel() for parameter in made.parameters())


@dataclass(frozen=True)
class _Trial:
    """Two packed documents: ``tokens_L`` in a row, of which the first document has ``first``."""

    tokens_L: Tensor
    first: int

    @classmethod
    def of(cls, wanted: int, context: int) -> _Trial:
        """Make documents of ``wanted`` tokens, or as many as the context of a model holds.

        The first is longer by an eighth, so that the second does not begin where a chunk does.
        """
        second = min(wanted, context * 8 // 17)
        first = second + second // 8
        random = torch.Generator().manual_seed(0)
        return cls(torch.randint(LEAST_ID, MOST_ID, (first + second,), generator=random), first)

    def read_packed(self, model: PreTrainedModel, change: int = 0) -> Tensor:
        """Return the hidden states of the row; ``change`` is added to the first document's ids."""
        place_1L = torch.arange(len(self.tokens_L))[None]
        in_first_1L = place_1L < self.first
        packed = PackedRows.of(torch.where(in_first_1L, place_1L, place_1L - self.first))
        return compute_hidden_states(
            model,
            (self.tokens_L + change * in_first_1L).to(find_device(model)),
            packed.map(lambda each: each.to(find_device(model))),
        )

    def read_beside(self, model: PreTrainedModel, change: int = 0) -> Tensor:
        """Return the second document's hidden states, beside the first one in a row of its own."""
        second = len(self.tokens_L) - self.first
        rows_BL = torch.stack([self.tokens_L[:second] + change, self.tokens_L[self.first :]])
        return compute_hidden_states(model, rows_BL.to(find_device(model)))[1:]


def _make_trials(model: PreTrainedModel) -> list[_Trial]:
    """Make a short trial, and one whose documents are longer than the window of any layer."""
    config = model.config.get_text_config()
    named = getattr(config, "max_position_embeddings", None) or 0
    # XLNet says -1: its positions have no end.
    context = named if named > 0 else 2 * MOST_TOKENS
    wanted = max(_find_longest_reach(config) + 2, LEAST_TOKENS)
    return [_Trial.of(each, context) for each in (SHORT_TOKENS, wanted)]


def _find_longest_reach(config: PreTrainedConfig) -> int:
    """Return the most tokens that a field says a layer reads back, of those that can be tried."""
    sizes = (
        size
        for name, size in config.to_dict().items()
        if isinstance(size, int) and any(part in name for part in REACHES)
    )
    return max((size for size in sizes if size <= MOST_TOKENS - 2), default=0)


def _computes_as_alone(model: PreTrainedModel, trial: _Trial, monitor: Monitor = SILENT) -> bool:
    """Whether documents in a packed row are as the model's own attention computes each alone."""
    try:
        packed = trial.read_packed(model)
        kept_apart = _isolates(model, trial)
    except KernelFailed as failure:
        monitor.warn_once(
            f"{type(model).__name__} computes its attention by its own code, which needs more time "
            f"and memory: {failure}"
        )
        return False
    # The model's own code may raise anything when it gets document bounds in place of a mask.
    except Exception:
        return False
    if not kept_apart:
        return False
    use_own_attention(model)
    alone = _read_alone(model, trial)
    difference = float((packed - alone).abs().max())
    tolerance = TOLERANCES.get(packed.dtype, TOLERANCE_16_BIT) * float(alone.abs().max())
    if difference > tolerance and packed.dtype.itemsize < 4:
        tolerance = 2.0 * _measure_rounding(model, trial, alone)
    use_packed_attention(model)
    return difference <= tolerance


def _measure_rounding(model: PreTrainedModel, trial: _Trial, alone: Tensor) -> float:
    """Return how much 16 bits round in packed documents, with the model's own attention and mask.

    0 where that cannot read them: for some models only our attention can.
    """
    try:
        return float((trial.read_packed(model) - alone).abs().max())
    except Exception:
        return 0.0


def _read_alone(model: PreTrainedModel, trial: _Trial) -> Tensor:
    """Return the hidden states of the documents, read one after the other with the model's own
    attention; ``ModelError`` if it cannot.
    """
    try:
        documents = trial.tokens_L.to(find_device(model)).tensor_split([trial.first])
        return torch.cat([compute_hidden_states(model, each[None]) for each in documents], dim=1)
    except (PotstillError, torch.OutOfMemoryError):
        raise
    # It may raise anything, for example where its sizes do not fit each other.
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot read a text of {len(trial.tokens_L)} tokens: "
            f"{format_first_line(error)}",
            "Check the sizes in its config.json.",
        ) from error


def _explain_shared_rows(model: PreTrainedModel, trials: Sequence[_Trial]) -> ModelError | None:
    """Return why documents cannot share rows with the model's own attention; None if they can."""
    name = type(model).__name__
    try:
        if all(_isolates(model, each) for each in trials):
            return None
        detail = f"{name} attends across the documents of a packed sequence."
    except (PotstillError, torch.OutOfMemoryError):
        raise
    # The model's own code may raise anything where positions begin anew.
    except Exception as error:
        _read_alone(model, trials[0])
        detail = f"{name} cannot read packed sequences: {format_first_line(error)}"
    remedy = "Set data.packing to false, or use a model whose attention follows position_ids."
    return ModelError(detail, remedy)


def _isolates(model: PreTrainedModel, trial: _Trial) -> bool:
    """Whether other tokens in the first of two packed documents leave the second as it was."""
    packed = trial.read_packed(model)
    difference = float((packed - trial.read_packed(model, 1))[:, trial.first :].abs().max())
    # Experts are multiplied in groups of tokens, and the size of a group changes the rounding.
    # float32 separates that rounding from a real leak, which can be as small as 5e-4. In 16 bits
    # any difference counts as a leak in the short trial, which hardly changes the groups. In the
    # long one it must be more than between rows of one document, where nothing can leak.
    if packed.dtype.itemsize >= 4:
        return difference <= 1e-5 * float(packed.abs().max())
    if not difference or trial.first <= SHORT_TOKENS:
        return not difference
    rounding = float((trial.read_beside(model) - trial.read_beside(model, 1)).abs().max())
    return difference <= 4.0 * rounding
