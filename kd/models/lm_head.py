"""The LM head of a model: it turns hidden states into logits.

Shapes: B sequences, L positions of a sequence, N positions, D hidden width, V vocabulary (of the
tokenizer; V' >= V where the model pads its own), c tokens of one block of the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kd.errors import ModelError, TokenizerMismatch
from kd.models.layers import compute_hidden_states, evaluating, find_device, is_hollow, removing
from kd.models.precision import float32_products
from kd.models.products.split import write_split_product_
from kd.models.products.wide import sums_wide, write_product_

#: Tokens of the vocabulary in one matrix product on a CPU. One product over all 49,152 tokens of a
#: vocabulary took a quarter longer.
BLOCK_TOKENS = 512
#: Tokens whose weights are converted at a time, on a GPU that cannot sum in a wider dtype.
CONVERTED_TOKENS = 8192
#: Outputs of the linear layer that show the scale (where every soft cap is linear), and the cap.
NEAR_ZERO = 2.0**-20
BEYOND_CAPS = 2.0**40


@dataclass(frozen=True)
class LMHead:
    """The map from hidden states x to logits, s = softcap(scale * (x Wᵀ + b)).

    The soft cap is c tanh(z / c). ``weight`` is (V', D) and ``bias`` (V',). Rows from index
    ``vocabulary`` on are padding, and are ignored.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    vocabulary: int

    @property
    def plain(self) -> bool:
        """True if the logits are x Wᵀ: no bias, scale or soft cap."""
        return self.bias is None and self.scale == 1.0 and not self.softcap

    def refresh(self, model: PreTrainedModel) -> LMHead:
        """Return this LM head of ``model`` with the weights that it holds now.

        They are others than before where weights are gathered for a pass (FSDP2).
        """
        layer = model.get_output_embeddings()
        return replace(self, weight=layer.weight, bias=layer.bias)

    def cast(self, dtype: torch.dtype) -> LMHead:
        """Return this LM head for many products with hidden states of ``dtype``: rounded once."""
        return replace(self, weight=self.weight[: self.vocabulary].detach().to(dtype))

    def multiply(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """Return x Wᵀ (N, V) without padding tokens, in the dtype of ``room_NV``.

        ``room_NV`` is memory for the result, in the dtype of ``hidden_ND`` or a wider one; no
        gradient is possible then. Without it the dtype is that of ``hidden_ND``. W is always
        rounded to the dtype of ``hidden_ND``.
        """
        weight_VD = self.weight[: self.vocabulary].to(hidden_ND.dtype)
        if room_NV is None:
            if torch.is_grad_enabled():
                return nn.functional.linear(hidden_ND, weight_VD)
            room_NV = hidden_ND.new_empty(len(hidden_ND), self.vocabulary)
        columns = self.vocabulary
        if not hidden_ND.is_cuda:
            columns = BLOCK_TOKENS
        elif room_NV.dtype != hidden_ND.dtype and not sums_wide(hidden_ND, room_NV.dtype):
            columns = CONVERTED_TOKENS
        blocks = zip(weight_VD.split(columns), room_NV.split(columns, 1), strict=True)
        for block_cD, out_Nc in blocks:
            write_product_(out_Nc, hidden_ND, block_cD.T)
        return room_NV

    def project(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """Return z = x Wᵀ + b (N, V), in float32 or float64.

        The sums of x Wᵀ are rounded to the dtype of ``hidden_ND`` only where a gradient is
        enabled, or where ``room_NV`` has that dtype. The result may use the memory ``room_NV``.
        """
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        if room_NV is None and not torch.is_grad_enabled():
            room_NV = hidden_ND.new_empty(len(hidden_ND), self.vocabulary, dtype=wide)
        z_NV = self.multiply(hidden_ND, room_NV).to(wide)
        if self.bias is None:
            return z_NV
        out_NV = None if room_NV is None else z_NV
        return torch.add(z_NV, self.bias[: self.vocabulary], out=out_NV)

    def transform_logits(self, z_NV: Tensor, out_NV: Tensor | None = None) -> Tensor:
        """Apply the scale and the soft cap to the output of the linear layer.

        ``out_NV`` is memory for the result, and may be ``z_NV``.
        """
        if self.scale != 1.0:
            z_NV = torch.mul(z_NV, self.scale, out=out_NV)
        if not self.softcap:
            return z_NV
        s_NV = torch.tanh(torch.div(z_NV, self.softcap, out=out_NV), out=out_NV)
        return torch.mul(s_NV, self.softcap, out=out_NV)

    def compute_logits(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """Return the model's logits (N, V), in float32 or float64, rounded as ``project`` says.

        The result may use the memory ``room_NV``.
        """
        z_NV = self.project(hidden_ND, room_NV)
        return self.transform_logits(z_NV, None if room_NV is None else z_NV)


@dataclass(frozen=True)
class SplitLMHead(LMHead):
    """An LM head whose products in float32 are sums of products in bfloat16.

    ``parts`` are those of the weight's rows of the vocabulary (``kd.models.products.split``). It is
    for GPUs, and for heads that need no gradient.
    """

    parts: tuple[Tensor, ...] = ()

    def multiply(self, hidden_ND: Tensor, room_NV: Tensor | None = None) -> Tensor:
        """Return x Wᵀ (N, V): for ``hidden_ND`` in float32 from the parts, else as ``LMHead``."""
        if hidden_ND.dtype != torch.float32:
            return super().multiply(hidden_ND, room_NV)
        if room_NV is None:
            room_NV = hidden_ND.new_empty(len(hidden_ND), self.vocabulary)
        write_split_product_(room_NV, hidden_ND, self.parts)
        return room_NV


def is_plain(weight: Tensor) -> bool:
    """Whether ``weight`` holds its numbers as they are. Quantised weights are other classes."""
    return weight.is_floating_point() and type(weight) is Tensor


def find_lm_head(model: PreTrainedModel, vocabulary: int) -> LMHead:
    """Return the LM head of ``model``, checked against the model's own logits where it has values.

    The scale and the soft cap are those that the model is seen to apply, under whatever name its
    configuration has them; a model without values shows none. Raises ``ModelError`` if the model
    does anything else to its logits, and ``TokenizerMismatch`` if it has fewer rows than
    ``vocabulary``.
    """
    name = type(model).__name__
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        detail = f"{name} has no linear LM head (found {type(layer).__name__})."
        raise ModelError(detail, "Use a causal language model.")
    if not is_plain(layer.weight.data):
        detail = f"the LM head of {name} is quantised, but records are its logits."
        raise ModelError(detail, "Use a model whose LM head has plain weights.")
    require_rows(model, vocabulary)
    lm_head = LMHead(layer.weight, layer.bias, 1.0, None, vocabulary)
    if is_hollow(model):
        return lm_head
    with evaluating(model):
        return _examine_lm_head(model, lm_head, name)


def find_student_head(student: PreTrainedModel, vocabulary: int) -> LMHead:
    """Return the LM head of ``student`` as ``find_lm_head`` does, with all of its V' rows.

    The softmax of a student is over all of them, as that of the saved model is. Rows beyond
    ``vocabulary`` would otherwise never be trained, and win probability from the tokens.
    """
    require_rows(student, vocabulary)
    return find_lm_head(student, count_rows(student))


def precheck_lm_head(small: PreTrainedModel) -> None:
    """Check what a model does to its logits as training will, before its weights are read.

    ``small`` is checked in its place (``kd.models.attention.isolation.make_small``). Raises the
    errors of ``find_lm_head``, but those about values.
    """
    if _gives_finite_logits(small.eval()):
        find_lm_head(small, count_rows(small))


@torch.no_grad()
def _gives_finite_logits(small: PreTrainedModel) -> bool:
    """Whether a random model can stand in for another one: not where it cannot run itself."""
    try:
        logits_BLV = small(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False).logits
    except Exception:  # models raise any class where a size does not suit them
        return False
    return bool(logits_BLV.isfinite().all())


def count_rows(model: PreTrainedModel) -> int:
    """Return V', the rows of the LM head; without bound where the model has no linear one."""
    layer = model.get_output_embeddings()
    return int(layer.weight.shape[0]) if isinstance(layer, nn.Linear) else sys.maxsize


def require_rows(model: PreTrainedModel, vocabulary: int) -> None:
    """Raise ``TokenizerMismatch`` if the LM head has fewer rows than ``vocabulary``, V."""
    if (rows := count_rows(model)) < vocabulary:
        raise TokenizerMismatch(
            f"{type(model).__name__} has {rows} output rows, but the tokenizer has "
            f"{vocabulary} tokens.",
            "Use a model made for this tokenizer, or add the missing rows with "
            f"model.resize_token_embeddings({vocabulary}) of transformers.",
        )


@torch.no_grad()
@float32_products()
def _examine_lm_head(model: PreTrainedModel, lm_head: LMHead, name: str) -> LMHead:
    """Return ``lm_head`` with the model's own scale and soft cap.

    Raises ``ModelError`` if the model's own logits are others even so.
    """
    tokens_BL = torch.arange(8, device=find_device(model)).remainder(lm_head.vocabulary)[None]
    hidden_LD = compute_hidden_states(model, tokens_BL)[0]
    if hidden_LD.shape[1] != lm_head.weight.shape[1]:
        raise ModelError(
            f"{name} changes its hidden states between its last norm and its LM head: they have "
            f"{hidden_LD.shape[1]} numbers, and the LM head reads {lm_head.weight.shape[1]}.",
            "Use a model whose LM head reads its last hidden states, as Llama's does.",
        )
    z_LV = lm_head.project(hidden_LD)
    if not torch.isfinite(z_LV).all():
        detail = f"{name} computes NaN or infinite logits."
        raise ModelError(detail, "Check its weights, or run it in float32.")
    lm_head = _measure_transform(model, lm_head, tokens_BL, hidden_LD)
    tolerance = 1e-3 if lm_head.weight.dtype == torch.float32 else 5e-2
    # The logits as they are, then enlarged to 50: what is done to large ones may not show near 0.
    for gain in (1.0, 50.0 / float(z_LV.abs().max().clamp(min=1e-30))):
        enlarge = partial(lambda gain, _, z: z * gain, gain)
        theirs = _compute_own_logits(model, tokens_BL, enlarge).float()
        ours = lm_head.transform_logits(z_LV * gain)
        difference = float((ours - theirs[:, : lm_head.vocabulary]).abs().max())
        # "not <=" is true for NaN too, and for an infinity of theirs.
        if not difference <= tolerance * float(ours.abs().max()):
            raise ModelError(
                f"{name} does something to its logits after the LM head that is not supported "
                f"(ours and its own differ by {difference:.3g}).",
                "Supported: a bias, a multiplier, and a soft cap c tanh(z / c).",
            )
    return lm_head


def _measure_transform(
    model: PreTrainedModel, lm_head: LMHead, tokens_BL: Tensor, hidden_LD: Tensor
) -> LMHead:
    """Return ``lm_head`` with the scale and the soft cap that ``model`` applies.

    Some models (MiniCPM3) multiply the hidden states before the linear layer; without a bias this
    is a scale too.
    """
    given: list[Tensor] = []

    def measure(value: float) -> Tensor:
        def give(x: Tensor, z: Tensor) -> Tensor:
            given.append(x[0].double())
            return torch.full_like(z, value, dtype=torch.float64)

        return _compute_own_logits(model, tokens_BL, give)

    near_LV = measure(NEAR_ZERO)
    far_LV = measure(BEYOND_CAPS)
    factor = _measure_factor(hidden_LD, given[0])
    before = _find_exact(factor, model, hidden_LD.dtype) if lm_head.bias is None else 1.0
    # The median, because single tokens may be masked.
    after = _find_exact(float(near_LV.double().median()) / NEAR_ZERO, model, near_LV.dtype)
    cap = abs(float(far_LV.double().median()))
    capped = cap < 0.5 * abs(after) * BEYOND_CAPS
    softcap = _find_exact(cap, model, far_LV.dtype) if capped else None
    return replace(lm_head, scale=before * after, softcap=softcap)


def _measure_factor(x_LD: Tensor, given_LD: Tensor) -> float:
    """Return the factor by which the model multiplied ``x_LD``, of the same numbers' dtype.

    Each product was rounded once, and so bounds the factor; 256 numbers of bfloat16 bound it to
    some 1e-5. Where no factor is within all bounds, it is that of least squares; 1 where all are 0.
    """
    eps = torch.finfo(x_LD.dtype).eps
    x_N, given_N = x_LD[x_LD != 0].double(), given_LD[x_LD != 0]
    if not len(x_N):
        return 1.0
    reach_N = eps * torch.exp2(given_N.frexp().exponent.double() - 2) / x_N.abs()
    low, high = (given_N / x_N - reach_N).max(), (given_N / x_N + reach_N).min()
    best = (low + high) / 2 if low <= high else (given_N * x_N).sum() / x_N.square().sum()
    return float(best)


def _find_exact(measured: float, model: PreTrainedModel, dtype: torch.dtype) -> float:
    """Return the number of the model's configuration, or its inverse, that rounds to ``measured``.

    ``measured`` itself, of type ``dtype``, where there is none.
    """
    fields = model.config.get_text_config().to_dict().values()
    known = [float(each) for each in fields if type(each) in (int, float) and each]
    exact = min((1.0, *known, *(1.0 / each for each in known)), key=lambda x: abs(x - measured))
    tolerance = 4 * max(torch.finfo(dtype).eps, 1e-9)  # of float64, a cap bends more than it rounds
    return exact if abs(exact - measured) <= tolerance * abs(exact) else measured


def _compute_own_logits(
    model: PreTrainedModel, tokens_BL: Tensor, change: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the model's own logits (L, V') of its first row.

    ``change`` is given the input and the output of the linear layer, and returns another output.
    """
    hook = model.get_output_embeddings().register_forward_hook(
        lambda layer, inputs, output: change(inputs[0], output)
    )
    with removing([hook]):
        return model(input_ids=tokens_BL, use_cache=False).logits[0]
