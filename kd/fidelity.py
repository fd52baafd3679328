"""How close the records of a cache are to the live teacher: measured on a few positions before anybody trains on them.

    stored    the records as they lie in the cache, decoded as for training, against the teacher's distribution
    redrawn   the same positions recorded anew with other seeds: the mean of what is sampled must be the teacher's

What is sampled is judged by sums over positions that should equal the teacher's: of tokens with pseudo-random signs, of
buckets of tokens that are equally frequent, and of tokens of like probability. Their z divides by

    se^2 = max(variance over redraws, sum p^2 (1 - pi) / pi) + event^2 + systematic^2

the second being the sampling's own variance (pi = chance to be drawn) and ``event`` the most that one draw or one
rounding can change. The last two make z safe where a change is so rare that it was never, or just once, seen. By
Bennett's inequality a sum of N independent changes passes z = 8.5 with a chance below 1e-9 whatever their rate
(Boucheron, Lugosi, Massart, "Concentration inequalities", 2013, theorem 2.9); a capture looks at some 200 such sums.

Shapes: N sampled positions, V vocabulary, D hidden width, E entries of N positions, R redraws, F sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache.codec import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, Codec
from cache.manifest import CacheIdentity, FidelityRow
from cache.profiles import PROFILES
from cache.records import AXES, Records, Sequences
from cache.store import Cache
from kd import models
from kd.batches import make_batch
from kd.config.teacher import TeacherConfig
from kd.errors import FidelityError, ModelError
from kd.models import Head
from kd.nodes import LARGEST_LOG_MASS_ERROR
from kd.precision import pick_device
from kd.recording import Recorder
from kd.targets import Chunk, SparseTarget, TargetDecoder, TopTarget, teacher_head
from kd.validate import remote_code_allowed

POSITIONS, REDRAWS = 32, 40
#: Positions taken of one sequence, and sequences that are looked at together.
PER_SEQUENCE, SEQUENCES_A_PART = 8, 4
LARGEST_Z = 8.5
#: By how much, in nats of a log-probability, a teacher differs from itself when it is batched otherwise.
NOISE = {"float32": 5e-3, "float16": 2e-2, "bfloat16": 1e-1}
#: What profiles dense and hidden may differ in: root mean square of |delta log p|, weighted by p. In int8 that of
#: SmolLM2-135M is 0.03.
EXACT_STEP, INT8_STEP = 2e-2, 1e-1
#: What a tempered log-partition may err between its nodes, as a share of the mass (kd.nodes bounds its mean).
PARTITION_ERROR = 5e-3
LEAST_AGREEMENT = 0.9
_SIGNS, _BUCKETS, _LEVELS = 8, 8, 4
_LEAST = 1e-30
_REMEDY = "See that the teacher's weights and code are what was captured, and that it runs in the same precision."
_REMEDY_OF = {
    "tempered": " If it is, narrow cache.temperatures, or use cache.profile hidden.",
    "hidden": " If it is, its hidden states are too uneven for what is stored: set cache.dtype to int16.",
}


@dataclass(frozen=True)
class Live:
    """The teacher, running: what the records are compared with."""

    model: PreTrainedModel
    head: Head

    @classmethod
    def load(cls, identity: CacheIdentity, config: TeacherConfig, folder: Path) -> Live:
        """The model in ``folder``, in the precision that the cache was captured in."""
        config = config.model_copy(update={"dtype": identity.teacher.dtype})
        model = models.load_teacher(config, folder, pick_device())
        models.require_context(model, identity.data.sequence_length)
        return cls(model, models.head_of(model, identity.tokenizer.vocabulary_size))

    @torch.no_grad()
    def states(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Hidden states (P, D) and next tokens (P,) of the P targets of ``sequences``; a sequence a forward pass."""
        batch = make_batch(sequences, None).to(self.model.device)
        hidden_BTD = models.hidden_states(self.model, batch.tokens_BT, batch.positions_BT)
        return hidden_BTD.flatten(0, 1)[batch.rows_N], batch.gold_N


@dataclass(frozen=True)
class Origin:
    """Where the teacher of a cache lies; ``genuine`` where its weights are those that were captured."""

    config: TeacherConfig
    folder: Path
    genuine: bool

    @classmethod
    def find(cls, store: Cache, name: str | None, root: Path) -> Origin:
        """The teacher ``name``: a folder, a GGUF file or a hub id; None is the one that the cache's provenance names.

        Raises ``FidelityError`` for a cache without a teacher that can be asked, ``ModelError`` where there is none.
        """
        if store.identity.teacher.dtype not in NOISE:
            kind = store.identity.teacher.dtype
            raise FidelityError(
                f"{store.folder} has no live teacher to compare with: its records are {kind}.",
                "Its bytes can be checked: kd cache verify.",
            )
        provenance = store.manifest.provenance
        path = root / (name or provenance.teacher_name)
        gguf_file = path.name if path.suffix == ".gguf" else None
        place = path.parent if gguf_file else path
        config = TeacherConfig(
            model=str(place) if place.exists() else _hub_id(name or provenance.teacher_name, gguf_file),
            revision=None if name else provenance.teacher_revision or None,
            gguf_file=gguf_file,
            trust_remote_code=remote_code_allowed(),
        )
        folder = models.resolve(config.model, config.revision)
        return cls(config, folder, models.fingerprint(folder, gguf_file) == store.identity.teacher.model_sha256)


def _hub_id(name: str, gguf_file: str | None) -> str:
    """``owner/model`` of ``owner/model/file.gguf``."""
    return name if gguf_file is None else str(PurePosixPath(name).parent)


def temperatures_of(codec: Codec) -> tuple[float, ...]:
    """The temperatures that a cache is measured at: 1, or what it was made for."""
    if codec.profile == "tempered":
        low, high = codec.temperatures
        return tuple(round(t, 6) for t in np.geomspace(low, high, 5).tolist())
    return (0.5, 1.0, 2.0) if PROFILES[codec.profile].any_temperature else (1.0,)


@torch.no_grad()
def measure(store: Cache, live: Live, positions: int = POSITIONS, redraws: int = REDRAWS) -> tuple[FidelityRow, ...]:
    """One row a temperature, of about ``positions`` positions in sequences at equal distances over the cache.

    The same cache and the same teacher give the same rows. Empty where the sampled sequences have no target.
    """
    codec = replace(store.codec, draws=1)  # of several samples of a position, one is read
    device = live.model.device
    head = teacher_head(store.teacher_head(), codec.vocabulary_size, device) if codec.profile == "hidden" else None
    decoders = [_Decoder(codec, head, temperature) for temperature in temperatures_of(codec)]
    found: list[list[_Found]] = [[] for _ in decoders]
    for number, part in enumerate(_parts(store, live, positions)):
        fresh = part.redrawn(codec, live.head, number, redraws) if PROFILES[codec.profile].sampled else None
        for decoder, list_ in zip(decoders, found, strict=True):
            list_.append(_compare(part, fresh, decoder))
    noise = NOISE[store.identity.teacher.dtype]
    return tuple(_row(each, decoder, noise) for each, decoder in zip(found, decoders, strict=True) if each)


# ---------------------------------------------------------------------- the sample


@dataclass(frozen=True)
class _Part:
    """Some of the sampled positions: hidden states, next tokens, stored records, and the teacher's log p (N, V)."""

    hidden_ND: Tensor
    gold_N: Tensor
    stored: Records
    logp_NV: Tensor

    def redrawn(self, codec: Codec, head: Head, number: int, redraws: int) -> Records:
        """The records of these positions as ``redraws`` other seeds make them, one after the other: (R * N,)."""
        nodes = self.stored["partition"].shape[1] if codec.profile == "tempered" else 0
        places = np.arange(len(self.gold_N))
        seeds = [(codec.seed + 1 + redraw) % 2**64 for redraw in range(redraws)]
        recorders = (Recorder(head, replace(codec, seed=seed), nodes) for seed in seeds)
        written = (recorder.records(self.hidden_ND, self.gold_N, number, places) for recorder in recorders)
        joined = Records.concatenate(written).columns
        return Records({name: column[:, 0] if AXES[name] == "tail" else column for name, column in joined.items()})


def _parts(store: Cache, live: Live, positions: int) -> Iterator[_Part]:
    numbers = _spread(len(store), math.ceil(positions / PER_SEQUENCE))
    for start in range(0, len(numbers), SEQUENCES_A_PART):
        chosen = numbers[start : start + SEQUENCES_A_PART]
        share = math.ceil(positions / len(numbers))
        states, golds, stored = zip(*(_rows(store, live, number, share) for number in chosen), strict=True)
        gold_N = torch.cat(golds)
        if len(gold_N) == 0:
            continue
        hidden_ND = torch.cat(states)
        logits_NV = live.head.logits(hidden_ND)
        if not torch.isfinite(logits_NV.logsumexp(1)).all():
            raise ModelError("The teacher's logits are NaN or infinite.", "Run it in float32 or bfloat16.")
        yield _Part(hidden_ND, gold_N, Records.concatenate(stored), logits_NV.double().log_softmax(1))


def _rows(store: Cache, live: Live, number: int, count: int) -> tuple[Tensor, Tensor, Records]:
    """Hidden states, next tokens and records of ``count`` positions of sequence ``number``, at equal distances."""
    sequences, records = store.read([number], draws=number)
    places = _spread(len(records), count)
    hidden_PD, gold_P = live.states(sequences)
    picked = Records.concatenate([records.slice(place, place + 1) for place in places] or [records])
    return hidden_PD[places], gold_P[places], picked


def _spread(size: int, count: int) -> list[int]:
    """At most ``count`` of ``range(size)`` at equal distances, with both ends."""
    return sorted({round(place) for place in np.linspace(0, size - 1, min(size, count)).tolist()})


# ---------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class _Found:
    """What one part has at one temperature: a number a position, and the sums of what is sampled."""

    kept_mass_N: Tensor
    kept_error_N: Tensor
    kl_N: Tensor
    gold_error_N: Tensor
    agrees_N: Tensor
    entropy_error_N: Tensor
    sums: _Sums | None


@dataclass(frozen=True)
class _Sums:
    """The teacher's sums (F,), those of the stored and of the redrawn records (R, F), and how they may vary."""

    live_F: Tensor
    stored_F: Tensor
    redrawn_RF: Tensor
    variance_F: Tensor
    event: float

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.live_F + other.live_F,
            self.stored_F + other.stored_F,
            self.redrawn_RF + other.redrawn_RF,
            self.variance_F + other.variance_F,
            max(self.event, other.event),
        )

    def scores(self, systematic: float, noise: float) -> tuple[float, float]:
        """The largest |z| of the mean of the redrawn sums, and of the stored ones."""
        redraws = len(self.redrawn_RF)
        one_F = torch.maximum(self.redrawn_RF.var(0), self.variance_F)
        mean_F = one_F / redraws + (self.event / redraws) ** 2 + systematic**2
        bias_F = (self.redrawn_RF.mean(0) - self.live_F).abs() / mean_F.sqrt()
        stored_F = one_F + self.event**2 + systematic**2 + noise**2
        return float(bias_F.max()), float(((self.stored_F - self.live_F).abs() / stored_F.sqrt()).max())


@dataclass(frozen=True)
class _Kept:
    """The tokens that a target has the value of: their probabilities (N, V), which they are, and the others' mass."""

    p_NV: Tensor
    known_NV: Tensor
    rest_N: Tensor

    @classmethod
    def of(cls, target: Chunk, records: Records, like_NV: Tensor) -> _Kept:
        """What ``target``, made from ``records``, says of single tokens."""
        if isinstance(target, SparseTarget):
            return cls._of_entries(target, records, like_NV)
        p_NV = torch.zeros_like(like_NV)
        if isinstance(target, TopTarget):
            p_NV.scatter_add_(1, target.ids_Nk, target.p_Nk)
            return cls(p_NV, p_NV > 0, target.rest_N)
        target.subtract_(p_NV, -1.0)
        return cls(p_NV, torch.ones_like(p_NV, dtype=torch.bool), p_NV.new_zeros(len(p_NV)))

    @classmethod
    def _of_entries(cls, target: SparseTarget, records: Records, like_NV: Tensor) -> _Kept:
        """Gold, always_keep ids and heads come first among the entries of a position."""
        known_N = torch.from_numpy(records["known"].shape[1] + records["head_count"].astype(np.int64))
        rows_E = _rows_of(target)
        rank_E = torch.arange(len(rows_E), device=rows_E.device) - target.offsets_N1[rows_E]
        keeps_E = rank_E < known_N.to(rows_E.device)[rows_E]
        places, weights = (rows_E[keeps_E], target.ids_E[keeps_E]), target.weights_E[keeps_E]
        p_NV = torch.zeros_like(like_NV).index_put_(places, weights, accumulate=True)
        known_NV = torch.zeros_like(like_NV, dtype=torch.bool).index_put_(places, torch.tensor(True).to(rows_E.device))
        return cls(p_NV, known_NV, 1.0 - p_NV.sum(1))

    def kl(self, p_NV: Tensor) -> Tensor:
        """KL(p || this), (N,), with what is not kept as one bucket."""
        inside_N = (p_NV * (p_NV.clamp(min=_LEAST).log() - self.p_NV.clamp(min=_LEAST).log()) * self.known_NV).sum(1)
        rest_N = p_NV.masked_fill(self.known_NV, 0.0).sum(1)
        return inside_N + rest_N * (rest_N.clamp(min=_LEAST).log() - self.rest_N.clamp(min=_LEAST).log())


def _rows_of(target: SparseTarget) -> Tensor:
    """The position of each entry, (E,)."""
    counts_N = target.offsets_N1.diff()
    return torch.repeat_interleave(torch.arange(len(counts_N), device=counts_N.device), counts_N)


@dataclass(frozen=True)
class _Decoder:
    """What reads records at one temperature; ``head`` is the teacher's where the profile is hidden."""

    codec: Codec
    head: Head | None
    temperature: float

    def target(self, records: Records, gold_N: Tensor) -> Chunk:
        """The target of ``records``, as training has it."""
        columns = {name: torch.from_numpy(column).to(gold_N.device) for name, column in records.columns.items()}
        teacher = TargetDecoder(self.codec, self.head).targets(gold_N, columns, self.temperature).teacher
        assert teacher is not None
        return teacher.chunk(slice(0, len(gold_N)))


def _compare(part: _Part, fresh: Records | None, decoder: _Decoder) -> _Found:
    """The stored records of ``part`` against the teacher, at the decoder's temperature."""
    codec = decoder.codec
    p_NV = (part.logp_NV / decoder.temperature).softmax(1)
    target = decoder.target(part.stored, part.gold_N)
    kept = _Kept.of(target, part.stored, p_NV)
    best_N, log_N = target.best_N(), part.logp_NV.amax(1)
    # Two tokens that are nearer to each other than what is stored of them may change places.
    near_N = part.logp_NV.gather(1, best_N.clamp(min=0)[:, None])[:, 0] >= log_N - _tie(codec)
    live_entropy_N = torch.special.entr(p_NV).sum(1)
    return _Found(
        kept_mass_N=kept.p_NV.sum(1),
        kept_error_N=((kept.p_NV - p_NV).abs() * kept.known_NV).sum(1),
        kl_N=kept.kl(p_NV),
        gold_error_N=_gold_error(part, kept, p_NV, codec),
        agrees_N=near_N.double().masked_fill(best_N < 0, torch.nan),
        entropy_error_N=_entropy(target, part.stored).to(p_NV.device) - live_entropy_N,
        sums=None if fresh is None else _sums(part, fresh, decoder, p_NV),
    )


def _gold_error(part: _Part, kept: _Kept, p_NV: Tensor, codec: Codec) -> Tensor:
    """|p decoded / p live - 1| of the next token, (N,); topk has it beside its entries."""
    gold_N1 = part.gold_N[:, None]
    log_N = kept.p_NV.gather(1, gold_N1)[:, 0].clamp(min=_LEAST).log()
    if codec.profile == "topk":
        log_N = torch.from_numpy(part.stored["known"][:, 0].astype(np.float64)).to(log_N.device) * -KNOWN_STEP
    live_N = p_NV.gather(1, gold_N1)[:, 0].clamp(min=_LEAST).log()
    return (log_N.clamp(min=math.log(_LEAST)) - live_N).abs().clamp(max=20.0).expm1()


def _entropy(target: Chunk, records: Records) -> Tensor:
    """H(p) as the records have it, (N,): topk's target knows only that of its entries and one bucket."""
    if isinstance(target, TopTarget):
        return torch.from_numpy(records["entropy"].astype(np.float64)) * ENTROPY_STEP
    return target.entropy_N.double()


# ---------------------------------------------------------------------- what is sampled


@dataclass(frozen=True)
class _Functions:
    """F functions of a token, whose means under p and under a fair sample of p agree."""

    sign_SV: Tensor
    bucket_V: Tensor
    level_NV: Tensor

    @classmethod
    def of(cls, p_NV: Tensor, size_NV: Tensor, threshold: float) -> _Functions:
        """Signs that are always the same, buckets of equal mass, and a level for each factor of 10 of the size."""
        dice = torch.Generator().manual_seed(0)
        sign_SV = torch.randint(2, (_SIGNS, p_NV.shape[1]), generator=dice).double() * 2 - 1
        mass_V, order_V = p_NV.mean(0).sort(descending=True)
        rank_V = (mass_V.cumsum(0) * _BUCKETS).long().clamp_(max=_BUCKETS - 1)
        below_NV = (threshold / size_NV.clamp(min=_LEAST)).log10().floor() + 1
        level_NV = below_NV.clamp(0, _LEVELS - 1).long()
        return cls(sign_SV.to(p_NV.device), torch.empty_like(rank_V).scatter(0, order_V, rank_V), level_NV)

    def values(self, rows_E: Tensor, ids_E: Tensor) -> Tensor:
        """The functions at each entry, (E, F)."""
        kinds = (self.bucket_V[ids_E], _BUCKETS), (self.level_NV[rows_E, ids_E], _LEVELS)
        return torch.cat([self.sign_SV[:, ids_E].T, *(torch.nn.functional.one_hot(*kind) for kind in kinds)], 1)

    def total(self, weights_NV: Tensor, squared: bool = False) -> Tensor:
        """The sums (F,) of a weight for every token, of the functions or of their squares."""
        weights_V = weights_NV.sum(0)
        sign_SV = self.sign_SV.square() if squared else self.sign_SV
        buckets = torch.bincount(self.bucket_V, weights_V, _BUCKETS)
        levels = torch.bincount(self.level_NV.flatten(), weights_NV.flatten(), _LEVELS)
        return torch.cat([sign_SV @ weights_V, buckets, levels])

    def drawn(self, target: SparseTarget) -> Tensor:
        """The sums (R, F) of entries, with R times the positions."""
        rows_E, positions = _rows_of(target), len(self.level_NV)
        values_EF = self.values(rows_E % positions, target.ids_E) * target.weights_E[:, None]
        sums_RF = values_EF.new_zeros((len(target.offsets_N1) - 1) // positions, values_EF.shape[1])
        return sums_RF.index_add_(0, rows_E // positions, values_EF)


def _sums(part: _Part, fresh: Records, decoder: _Decoder, p_NV: Tensor) -> _Sums:
    codec = decoder.codec
    redraws = len(fresh) // len(part.gold_N)
    size_NV = _size(part.logp_NV, codec)
    functions = _Functions.of(p_NV, size_NV, codec.threshold)
    redrawn, stored = decoder.target(fresh, part.gold_N.repeat(redraws)), decoder.target(part.stored, part.gold_N)
    assert isinstance(redrawn, SparseTarget) and isinstance(stored, SparseTarget)
    variance_NV, largest = _sampling(p_NV, size_NV, fresh.slice(0, len(p_NV)), part, decoder)
    step = max(KNOWN_STEP, codec.head_step) / decoder.temperature
    return _Sums(
        live_F=functions.total(p_NV),
        stored_F=functions.drawn(stored)[0],
        redrawn_RF=functions.drawn(redrawn),
        variance_F=functions.total(variance_NV, squared=True),
        event=2 * largest + step,
    )


def _size(logp_NV: Tensor, codec: Codec) -> Tensor:
    """What tails are drawn in proportion to: p, or the mean of p_T over the proposal's temperatures."""
    if codec.profile == "threshold":
        return logp_NV.exp()
    return torch.stack([(logp_NV * beta).softmax(1) for beta in codec.proposal_betas]).mean(0)


def _sampling(p_NV: Tensor, size_NV: Tensor, fresh: Records, part: _Part, decoder: _Decoder) -> tuple[Tensor, float]:
    """Variance of the weight of every token under independent draws, p^2 (1 - pi) / pi, and the largest weight."""
    target = decoder.target(fresh, part.gold_N)
    tail_NV = size_NV.masked_fill(_Kept.of(target, fresh, p_NV).known_NV, 0.0)
    count_N1 = torch.from_numpy(fresh["tail_count"].astype(np.float64)).to(p_NV.device)[:, None]
    chance_NV = (count_N1 * tail_NV / tail_NV.sum(1, keepdim=True).clamp(min=_LEAST)).clamp(max=1.0)
    weight_NV = (p_NV / chance_NV.clamp(min=_LEAST)).masked_fill(chance_NV <= _LEAST, 0.0)
    return p_NV * weight_NV * (1.0 - chance_NV), float(weight_NV.max())


def _row(found: list[_Found], decoder: _Decoder, noise: float) -> FidelityRow:
    """The means of all positions, and the largest z."""
    codec, sums = decoder.codec, [each.sums for each in found if each.sums is not None]
    positions = sum(len(each.kl_N) for each in found)

    def mean(name: str) -> float:
        return _short(float(torch.cat([getattr(each, name) for each in found]).nanmean()))

    agreement = mean("agrees_N")
    bias_z = stored_z = None
    if sums:
        systematic = positions * LARGEST_LOG_MASS_ERROR if codec.profile == "tempered" else 0.0
        noise_of_sums = math.sqrt(positions) * noise / decoder.temperature
        bias_z, stored_z = map(_short, sum(sums[1:], sums[0]).scores(systematic, noise_of_sums))
    return FidelityRow(
        temperature=decoder.temperature,
        positions=positions,
        kept_mass=mean("kept_mass_N"),
        kept_error=mean("kept_error_N"),
        kl=None if sums else mean("kl_N"),
        bias_z=bias_z,
        stored_z=stored_z,
        gold_error=mean("gold_error_N"),
        top1_agreement=None if math.isnan(agreement) else agreement,
        entropy_error=mean("entropy_error_N"),
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# ---------------------------------------------------------------------- what is close enough


@dataclass(frozen=True)
class _Bounds:
    """What the rows of a faithful cache keep; a teacher of other weights, or other positions, is far beyond."""

    codec: Codec
    noise: float

    def problems(self, row: FidelityRow) -> list[str]:
        """One line for each value of ``row`` that is out of bounds."""
        limits = {
            "kept_error": self._kept_error(row),
            "kl": self._kl(row),
            "bias_z": LARGEST_Z,
            "stored_z": LARGEST_Z,
            "gold_error": self._gold_error(row),
            "entropy_error": self._entropy_error(row),
        }
        measured = {name: getattr(row, name) for name in limits}
        lines = [
            f"{name} at temperature {row.temperature:g} is {value:.3g}, but at most {limits[name]:.3g} is right"
            for name, value in measured.items()
            if value is not None and not abs(value) <= limits[name]
        ]
        if row.top1_agreement is not None and not row.top1_agreement >= LEAST_AGREEMENT:
            got = f"top1_agreement at temperature {row.temperature:g} is {row.top1_agreement:.3g}"
            lines.append(f"{got}, but at least {LEAST_AGREEMENT:g} is right")
        return lines

    def _kept_error(self, row: FidelityRow) -> float:
        """Every stored value within its step, and a tempered one within its log-partition's error."""
        return math.expm1((_step(self.codec) + self.noise) / row.temperature) + self._partition_error

    def _gold_error(self, row: FidelityRow) -> float:
        """Dense and hidden may be further off where p is small; that of a tempered A carries its head's rounding."""
        rare = {"tempered": _step(self.codec), "dense": EXACT_STEP, "hidden": 2 * _step(self.codec)}
        step = KNOWN_STEP + rare.get(self.codec.profile, 0.0)
        return math.expm1((step + self.noise) / row.temperature) + self._partition_error

    def _kl(self, row: FidelityRow) -> float:
        """Of errors delta in log p, KL is E_p[delta^2] / 2."""
        step, noise = _step(self.codec) / row.temperature, self.noise / row.temperature
        return (step**2 + noise**2) / 2 + 1e-6

    def _entropy_error(self, row: FidelityRow) -> float:
        """A stored entropy is rounded by chance: Hoeffding's bound for 1e-9. Others move with the log-probabilities."""
        if self.codec.profile in ("threshold", "topk"):
            return ENTROPY_STEP * math.sqrt(math.log(2e9) / (2 * row.positions)) + 5 * self.noise
        return 5 * (_step(self.codec) + self.noise) / row.temperature + 5 * self._partition_error

    @property
    def _partition_error(self) -> float:
        return PARTITION_ERROR if self.codec.profile == "tempered" else 0.0


def _step(codec: Codec) -> float:
    """Nats that a stored log-probability may be off."""
    if codec.profile in ("threshold", "tempered"):
        return max(KNOWN_STEP, codec.head_step)
    if codec.profile == "topk":
        return TOP_STEP
    return INT8_STEP if codec.bits == 8 else EXACT_STEP


def _tie(codec: Codec) -> float:
    """Nats within which two tokens may change places."""
    return 2 * _step(codec) * (4 if codec.profile == "hidden" else 1)


def out_of_bounds(store: Cache, rows: tuple[FidelityRow, ...]) -> list[str]:
    """One line for each value that a faithful cache would not have."""
    bounds = _Bounds(store.codec, NOISE[store.identity.teacher.dtype])
    return [line for row in rows for line in bounds.problems(row)]


def require_fidelity(store: Cache, rows: tuple[FidelityRow, ...]) -> None:
    """Raise ``FidelityError`` naming every value that is out of bounds."""
    if lines := out_of_bounds(store, rows):
        raise FidelityError(
            f"{store.folder}: the records differ from the teacher: {'; '.join(lines)}.",
            _REMEDY + _REMEDY_OF.get(store.codec.profile, "") + f" To capture it again, delete {store.folder} first.",
        )
