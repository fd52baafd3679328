"""One sample of positions at one temperature: the records beside the teacher.

Shapes: N sampled positions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache.codec import Codec
from cache.records import Records
from cache.rounding import ENTROPY_STEP, KNOWN_STEP
from kd.capture.fidelity.bounds import find_tie_width
from kd.capture.fidelity.decoding import LEAST, KnownTokens, RecordDecoder
from kd.capture.fidelity.samples import PositionSample
from kd.capture.fidelity.sums import SampledSums, compute_sums
from kd.capture.noise import SAFETY
from kd.loss.targets import TargetChunk
from kd.loss.whole_targets import TopTarget


@dataclass(frozen=True)
class Measurements:
    """The measurements of one ``PositionSample`` at one temperature.

    Only sampled profiles have ``sums``.
    """

    kept_mass_N: Tensor
    kept_error_N: Tensor
    kl_N: Tensor
    gold_error_N: Tensor
    agrees_N: Tensor
    entropy_error_N: Tensor
    sums: SampledSums | None


def compare_records(
    part: PositionSample, fresh: Records | None, decoder: RecordDecoder, noise: float
) -> Measurements:
    """Compare the stored records of ``part`` with the teacher, at the decoder's temperature.

    ``noise`` is the teacher's own, in nats.
    """
    codec = decoder.codec
    p_NV = (part.logp_NV / decoder.temperature).softmax(1)
    target = decoder.decode(part.stored, part.gold_N)
    kept = KnownTokens.of(target, part.stored, p_NV)
    best_N = target.find_best_N()
    log_N = part.logp_NV.amax(1)
    # Two tokens whose log-probabilities differ by less than rounding and noise may change places.
    width = find_tie_width(codec) + 2 * SAFETY * noise
    near_N = part.logp_NV.gather(1, best_N.clamp(min=0)[:, None])[:, 0] >= log_N - width
    live_entropy_N = torch.special.entr(p_NV).sum(1)
    return Measurements(
        kept_mass_N=kept.p_NV.sum(1),
        kept_error_N=((kept.p_NV - p_NV).abs() * kept.known_NV).sum(1),
        kl_N=kept.compute_kl(p_NV),
        gold_error_N=_measure_gold_error(part, kept, p_NV, codec),
        agrees_N=near_N.double().masked_fill(best_N < 0, torch.nan),
        entropy_error_N=_decode_entropy(target, part.stored).to(p_NV.device) - live_entropy_N,
        sums=None if fresh is None else compute_sums(part, fresh, decoder, p_NV),
    )


def _measure_gold_error(
    part: PositionSample, kept: KnownTokens, p_NV: Tensor, codec: Codec
) -> Tensor:
    """Return |p decoded / p live - 1| of the next token, (N,).

    Profile topk stores that token's log-probability beside its entries, and threshold more finely
    than the integers that its target counts in.
    """
    gold_N1 = part.gold_N[:, None]
    log_N = kept.p_NV.gather(1, gold_N1)[:, 0].clamp(min=LEAST).log()
    if codec.k or codec.rules.dithered:
        known_N = torch.from_numpy(part.stored["known"][:, 0].astype(np.float64))
        log_N = known_N.to(log_N.device) * -KNOWN_STEP
    live_N = p_NV.gather(1, gold_N1)[:, 0].clamp(min=LEAST).log()
    # Both are clamped, so that a probability of 0 gives a large error and not an infinite one.
    return (log_N.clamp(min=math.log(LEAST)) - live_N).abs().clamp(max=20.0).expm1()


def _decode_entropy(target: TargetChunk, records: Records) -> Tensor:
    """Return the entropy of the records, (N,).

    For topk it is read from the record: the target would give that of its entries and one bucket.
    """
    if isinstance(target, TopTarget):
        return torch.from_numpy(records["entropy"].astype(np.float64)) * ENTROPY_STEP
    return target.entropy_N.double()
