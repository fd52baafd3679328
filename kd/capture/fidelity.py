"""Compare the records of a cache with the live teacher, on a few positions, before training.

    stored    the records of the cache, decoded as for training, are compared with the teacher's
              distribution
    redrawn   the same positions are recorded again with other seeds; the mean of samples must be
              the teacher's

Samples are judged by sums over positions that should equal the teacher's: sums over tokens with
pseudo-random signs, over buckets of equally frequent tokens, and over tokens of similar
probability. The z of a sum divides its error by

    se^2 = max(variance over redraws, sum p^2 (1 - pi) / pi) + event^2 + systematic^2

The second term in max is the variance of the sampling itself (pi = probability to be drawn);
``event`` is the most that one draw or one rounding can change; ``systematic`` bounds the error of
interpolation. The last two keep z small where a change is so rare that redraws never show it, or
show it once. By Bennett's inequality a sum of N independent changes exceeds z = 8.5 with a
probability below 1e-9, for any rate of changes (Boucheron, Lugosi, Massart, "Concentration
inequalities", 2013, theorem 2.9). A capture checks about 200 such sums.

Shapes: N sampled positions, V vocabulary, D hidden width, E entries of N positions,
R redraws, F sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from cache.codec import ENTROPY_STEP, KNOWN_STEP, TOP_STEP, Codec
from cache.manifest import CacheIdentity, FidelityOverride, FidelityRow
from cache.profiles import PROFILES
from cache.records import AXES, Records, Sequences
from cache.store import Cache
from kd.capture.knots import LARGEST_LOG_MASS_ERROR
from kd.capture.noise import (
    ALLOWED_NOISE,
    LARGEST_NOISE,
    SAFETY,
    choose_allowed_noise,
    measure_squared_noise,
    read_together,
    summarise_noise,
)
from kd.capture.recording import Recorder
from kd.config.cache import CacheConfig
from kd.config.teacher import TeacherConfig
from kd.errors import FidelityError, ModelError
from kd.loss.decoder import TargetDecoder
from kd.loss.sparse_targets import SparseTarget
from kd.loss.targets import TargetChunk
from kd.loss.whole_targets import TopTarget, decode_lm_head
from kd.models.folder import compute_fingerprint, is_remote_code_allowed, resolve_model
from kd.models.layers import compute_hidden_states, find_device, require_context
from kd.models.lm_head import LMHead, find_lm_head
from kd.models.loading import load_teacher
from kd.models.precision import pick_device
from kd.text.batches import make_batch

#: Positions that are compared by default.
POSITIONS = 32
#: Times that each position is recorded again by default.
REDRAWS = 40
#: Positions of one sequence.
PER_SEQUENCE = 8
#: Sequences that are read together: their logits are in memory at once.
SEQUENCES_PER_READ = 4
#: The largest |z| of a faithful cache; the top of this file derives it.
LARGEST_Z = 8.5
#: The largest root mean square of |delta log p|, weighted by p, for profiles dense and hidden.
EXACT_STEP = 2e-2
#: The same bound for int8, where SmolLM2-135M has 0.03.
INT8_STEP = 1e-1
#: The largest error of a tempered log-partition between its knots, as a share of the mass;
#: kd.capture.knots bounds its mean.
PARTITION_ERROR = 5e-3
#: The smallest share of positions at which cache and teacher agree on the most probable token.
LEAST_AGREEMENT = 0.9
#: Sums over tokens with pseudo-random signs.
_SIGNS = 8
#: Sums over buckets of equally frequent tokens.
_BUCKETS = 8
#: Sums over tokens of similar probability: one for each factor of 10 below the threshold.
_LEVELS = 4
#: The smallest probability whose logarithm is taken.
_LEAST = 1e-30
#: The field that overrules the verdict, and its value.
OVERRULING_FIELD = "cache.fidelity: warn"
_REMEDY = (
    "Check that the teacher has the weights and the code that were captured, "
    "and that it runs in the same precision."
)
_REMEDY_BY_PROFILE = {
    "tempered": " If so, narrow cache.temperatures, or use cache.profile hidden.",
    "hidden": " If so, its hidden states are too uneven for this precision: "
    "set cache.dtype to int16.",
}


@dataclass(frozen=True)
class LiveTeacher:
    """The loaded teacher that records are compared with."""

    model: PreTrainedModel
    lm_head: LMHead

    @classmethod
    def load(cls, identity: CacheIdentity, config: TeacherConfig, folder: Path) -> LiveTeacher:
        """Load the model in ``folder``, in the precision and quantisation of the capture."""
        # Another precision would differ from the records by more than the bounds allow.
        captured = identity.teacher
        update = {"dtype": captured.dtype, "quantization": captured.quantization or None}
        config = config.model_copy(update=update)
        model = load_teacher(config, folder, pick_device())
        require_context(model, identity.data.sequence_length)
        return cls(model, find_lm_head(model, identity.tokenizer.vocabulary_size))

    @torch.no_grad()
    def compute_states(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return hidden states (N, D) and next tokens (N,) of all targets of ``sequences``."""
        batch = make_batch(sequences, None).to(find_device(self.model))
        hidden_BLD = compute_hidden_states(self.model, batch.tokens_BL, batch.packed)
        return hidden_BLD.flatten(0, 1)[batch.rows_N], batch.gold_N


@dataclass(frozen=True)
class TeacherLocation:
    """The folder of a cache's teacher.

    ``genuine`` means that it has the weights that were captured.
    """

    config: TeacherConfig
    folder: Path
    genuine: bool

    @classmethod
    def find(cls, store: Cache, name: str | None, root: Path) -> TeacherLocation:
        """Find the teacher ``name``, by default the one in the cache's provenance.

        A name is a folder, a GGUF file or a hub id. Raises ``FidelityError`` for a cache whose
        teacher cannot be run, such as a remote one, and ``ModelError`` where no model is found.
        """
        _require_live(store)
        provenance = store.manifest.provenance
        path = root / (name or provenance.teacher_name)
        gguf_file = path.name if path.suffix == ".gguf" else None
        place = path.parent if gguf_file else path
        config = TeacherConfig(
            model=str(place)
            if place.exists()
            else _find_hub_id(name or provenance.teacher_name, gguf_file),
            revision=None if name else provenance.teacher_revision or None,
            gguf_file=gguf_file,
            trust_remote_code=is_remote_code_allowed(),
        )
        return cls.of_config(store, config)

    @classmethod
    def of_config(cls, store: Cache, config: TeacherConfig) -> TeacherLocation:
        """Find the teacher that ``config`` names; raises as ``find`` does."""
        _require_live(store)
        # One process runs it here, however many did in the capture.
        parallel = "device_map" if store.identity.teacher.parallel else "none"
        folder = resolve_model(config.model, config.revision, config.gguf_file or "*.safetensors")
        digest = compute_fingerprint(folder, config.gguf_file)
        return cls(
            config.model_copy(update={"parallel": parallel}),
            folder,
            digest == store.identity.teacher.model_sha256,
        )

    def require_genuine(self, store: Cache) -> None:
        """Raise ``FidelityError`` unless the weights are those that were captured."""
        if not self.genuine:
            raise FidelityError(
                f"{store.folder} was captured from other weights than {self.folder} has now.",
                "Name the teacher of the capture in teacher.model, with its revision.",
            )


def _require_live(store: Cache) -> None:
    """Raise ``FidelityError`` for a cache whose teacher cannot be run here."""
    if (kind := store.identity.teacher.dtype) not in ALLOWED_NOISE:
        raise FidelityError(
            f"{store.folder} has no live teacher to compare with: its records are {kind}.",
            "Check its bytes instead: kd cache verify.",
        )


def _find_hub_id(name: str, gguf_file: str | None) -> str:
    """Return ``owner/model`` of ``owner/model/file.gguf``; without a GGUF file, ``name`` itself.

    The address of a bucket is cut in the same way.
    """
    return name if gguf_file is None else name.rpartition("/")[0]


def choose_temperatures(codec: Codec) -> tuple[float, ...]:
    """Return the temperatures at which a cache is measured: those that its profile can serve."""
    if codec.profile == "tempered":
        low, high = codec.temperatures
        return tuple(round(t, 6) for t in np.geomspace(low, high, 5).tolist())
    return (0.5, 1.0, 2.0) if PROFILES[codec.profile].any_temperature else (1.0,)


@dataclass(frozen=True)
class FidelityMeasurement:
    """How close the records are to the teacher, and the teacher's own noise in nats.

    ``rows``: one for each temperature; empty where the chosen sequences have no target.
    """

    rows: tuple[FidelityRow, ...]
    noise: float


@torch.no_grad()
def measure_fidelity(
    store: Cache,
    live: LiveTeacher,
    positions: int = POSITIONS,
    redraws: int = REDRAWS,
    waiting: Callable[[], None] = lambda: None,
) -> FidelityMeasurement:
    """Compare about ``positions`` positions with the teacher, at each temperature.

    Positions come from sequences at equal distances over the cache. The teacher reads them one by
    one, and once more together, which shows its own noise. The same cache and teacher always give
    the same rows. ``waiting`` is called between the parts of the work, and may raise to give up.
    """
    codec = replace(store.codec, draws=1)  # one of the stored draws of each position is read
    device = find_device(live.model)
    lm_head = (
        decode_lm_head(store.teacher_head(), codec.vocabulary_size, device)
        if codec.profile == "hidden"
        else None
    )
    decoders = [_Decoder(codec, lm_head, temperature) for temperature in choose_temperatures(codec)]
    found: list[list[_Measurements]] = [[] for _ in decoders]
    squared: list[Tensor] = []
    for number, part in enumerate(_read_samples(store, live, positions)):
        waiting()
        again = part.measure_noise(live, [decoder.temperature for decoder in decoders])
        squared += again
        fresh = (
            part.redraw(codec, live.lm_head, number, redraws, waiting)
            if PROFILES[codec.profile].sampled
            else None
        )
        for decoder, list_ in zip(decoders, found, strict=True):
            waiting()
            list_.append(_compare(part, fresh, decoder, summarise_noise(again)))
    noise = summarise_noise(squared)
    allowed = choose_allowed_noise(store.identity.teacher.dtype, noise)
    rows = tuple(
        _make_row(each, decoder, allowed)
        for each, decoder in zip(found, decoders, strict=True)
        if each
    )
    return FidelityMeasurement(rows, noise)


# ---------------------------------------------------------------------- the sample


@dataclass(frozen=True)
class _PositionSample:
    """Some of the compared positions, with their stored records and the teacher's log p.

    ``sequences`` holds the sequences of the positions, and ``rows_N`` the place of each position
    among all targets of these.
    """

    hidden_ND: Tensor
    gold_N: Tensor
    stored: Records
    logp_NV: Tensor
    sequences: Sequences
    rows_N: Tensor

    def measure_noise(self, live: LiveTeacher, temperatures: list[float]) -> list[Tensor]:
        """Read all sequences together; return the squared noise of the positions.

        A lone sequence is read twice at once. Empty where memory holds only one at a time.
        """
        read = self.sequences
        if len(read) == 1:
            read = Sequences.concatenate([read, read])
        hidden_ND = read_together(lambda part: live.compute_states(part)[0], read)
        if hidden_ND is None:
            return []
        again_NV = live.lm_head.compute_logits(hidden_ND[self.rows_N]).double().log_softmax(1)
        return [measure_squared_noise(self.logp_NV, again_NV, self.gold_N, temperatures)]

    def redraw(
        self,
        codec: Codec,
        lm_head: LMHead,
        number: int,
        redraws: int,
        waiting: Callable[[], None],
    ) -> Records:
        """Record these positions with R other seeds.

        The (R * N) records of one seed stand together.
        """
        knots = self.stored["partition"].shape[1] if codec.profile == "tempered" else 0
        places = np.arange(len(self.gold_N))
        # Seeds that differ from the codec's own: the stored sample is compared apart.
        seeds = [(codec.seed + 1 + redraw) % 2**64 for redraw in range(redraws)]
        recorders = (Recorder(lm_head, replace(codec, seed=seed), knots) for seed in seeds)
        written = []
        for recorder in recorders:
            waiting()
            written.append(recorder.record(self.hidden_ND, self.gold_N, number, places))
        joined = Records.concatenate(written).columns
        return Records(
            {
                name: column[:, 0] if AXES[name] == "tail" else column
                for name, column in joined.items()
            }
        )


def _read_samples(store: Cache, live: LiveTeacher, positions: int) -> Iterator[_PositionSample]:
    numbers = _space_evenly(len(store), math.ceil(positions / PER_SEQUENCE))
    for start in range(0, len(numbers), SEQUENCES_PER_READ):
        chosen = numbers[start : start + SEQUENCES_PER_READ]
        share = math.ceil(positions / len(numbers))
        found = [_read_positions(store, live, number, share) for number in chosen]
        gold_N = torch.cat([each.gold_N for each in found])
        if len(gold_N) == 0:
            continue
        hidden_ND = torch.cat([each.hidden_ND for each in found])
        logits_NV = live.lm_head.compute_logits(hidden_ND)
        if not torch.isfinite(logits_NV.logsumexp(1)).all():
            raise ModelError(
                "The teacher's logits are NaN or infinite.", "Run it in float32 or bfloat16."
            )
        starts = np.cumsum([0] + [each.targets for each in found])
        rows = [each.places + start for each, start in zip(found, starts, strict=False)]
        yield _PositionSample(
            hidden_ND,
            gold_N,
            Records.concatenate(each.stored for each in found),
            logits_NV.double().log_softmax(1),
            Sequences.concatenate(each.sequences for each in found),
            torch.from_numpy(np.concatenate(rows)),
        )


@dataclass(frozen=True)
class _SequenceSample:
    """Some positions of one sequence: ``places`` among its ``targets`` positions with a target."""

    sequences: Sequences
    targets: int
    places: NDArray[np.int64]
    hidden_ND: Tensor
    gold_N: Tensor
    stored: Records


def _read_positions(store: Cache, live: LiveTeacher, number: int, count: int) -> _SequenceSample:
    """Read ``count`` positions of sequence ``number``, at equal distances."""
    sequences, records = store.read([number], draws=number)
    places = _space_evenly(len(records), count)
    hidden_ND, gold_N = live.compute_states(sequences)
    picked = Records.concatenate([records.slice(place, place + 1) for place in places] or [records])
    return _SequenceSample(
        sequences,
        len(records),
        np.array(places, np.int64),
        hidden_ND[places],
        gold_N[places],
        picked,
    )


def _space_evenly(size: int, count: int) -> list[int]:
    """Return at most ``count`` numbers of ``range(size)``, at equal distances with both ends."""
    return sorted({round(place) for place in np.linspace(0, size - 1, min(size, count)).tolist()})


# ---------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class _Measurements:
    """The measurements of one ``_PositionSample`` at one temperature.

    Only sampled profiles have ``sums``.
    """

    kept_mass_N: Tensor
    kept_error_N: Tensor
    kl_N: Tensor
    gold_error_N: Tensor
    agrees_N: Tensor
    entropy_error_N: Tensor
    sums: _SampledSums | None


@dataclass(frozen=True)
class _SampledSums:
    """The sums of the teacher, of stored and of redrawn records, and the variance of one sample.

    ``event`` is the most that one draw or one rounding can change a sum.
    """

    live_F: Tensor
    stored_F: Tensor
    redrawn_RF: Tensor
    variance_F: Tensor
    event: float

    def __add__(self, other: _SampledSums) -> _SampledSums:
        return _SampledSums(
            self.live_F + other.live_F,
            self.stored_F + other.stored_F,
            self.redrawn_RF + other.redrawn_RF,
            self.variance_F + other.variance_F,
            max(self.event, other.event),
        )

    def compute_scores(self, systematic: float, noise: float) -> tuple[float, float]:
        """Return the largest |z| of the mean over redraws, and that of the stored sums."""
        redraws = len(self.redrawn_RF)
        one_F = torch.maximum(self.redrawn_RF.var(0), self.variance_F)
        mean_F = one_F / redraws + (self.event / redraws) ** 2 + systematic**2
        bias_F = (self.redrawn_RF.mean(0) - self.live_F).abs() / mean_F.sqrt()
        stored_F = one_F + self.event**2 + systematic**2 + noise**2
        return float(bias_F.max()), float(
            ((self.stored_F - self.live_F).abs() / stored_F.sqrt()).max()
        )


@dataclass(frozen=True)
class _KnownTokens:
    """The tokens whose probability a target contains.

    All others form one bucket of mass ``rest_N``.
    """

    p_NV: Tensor
    known_NV: Tensor
    rest_N: Tensor

    @classmethod
    def of(cls, target: TargetChunk, records: Records, like_NV: Tensor) -> _KnownTokens:
        """Collect the probabilities of single tokens in ``target``, the decoded ``records``."""
        if isinstance(target, SparseTarget):
            return cls._of_entries(target, records, like_NV)
        p_NV = torch.zeros_like(like_NV)
        if isinstance(target, TopTarget):
            p_NV.scatter_add_(1, target.ids_NK, target.p_NK)
            return cls(p_NV, p_NV > 0, target.rest_N)
        # A target of all V tokens offers no copy of p: subtracting it -1 times from 0 gives one.
        target.subtract_(p_NV, -1.0)
        return cls(p_NV, torch.ones_like(p_NV, dtype=torch.bool), p_NV.new_zeros(len(p_NV)))

    @classmethod
    def _of_entries(cls, target: SparseTarget, records: Records, like_NV: Tensor) -> _KnownTokens:
        """Collect the known and head tokens, which come first among a position's entries."""
        known_N = torch.from_numpy(
            records["known"].shape[1] + records["head_count"].astype(np.int64)
        )
        rows_E = _find_rows(target)
        rank_E = torch.arange(len(rows_E), device=rows_E.device) - target.offsets_N1[rows_E]
        keeps_E = rank_E < known_N.to(rows_E.device)[rows_E]
        places = (rows_E[keeps_E], target.ids_E[keeps_E])
        weights = target.weights_E[keeps_E]
        p_NV = torch.zeros_like(like_NV).index_put_(places, weights, accumulate=True)
        known_NV = torch.zeros_like(like_NV, dtype=torch.bool).index_put_(
            places, torch.tensor(True).to(rows_E.device)
        )
        return cls(p_NV, known_NV, 1.0 - p_NV.sum(1))

    def compute_kl(self, p_NV: Tensor) -> Tensor:
        """Return KL(p || these probabilities), (N,), with all other tokens as one bucket."""
        inside_N = (
            p_NV
            * (p_NV.clamp(min=_LEAST).log() - self.p_NV.clamp(min=_LEAST).log())
            * self.known_NV
        ).sum(1)
        rest_N = p_NV.masked_fill(self.known_NV, 0.0).sum(1)
        return inside_N + rest_N * (
            rest_N.clamp(min=_LEAST).log() - self.rest_N.clamp(min=_LEAST).log()
        )


def _find_rows(target: SparseTarget) -> Tensor:
    """Return the position of each entry, (E,)."""
    counts_N = target.offsets_N1.diff()
    return torch.repeat_interleave(torch.arange(len(counts_N), device=counts_N.device), counts_N)


@dataclass(frozen=True)
class _Decoder:
    """Decodes records at one temperature; profile hidden needs the teacher's ``lm_head``."""

    codec: Codec
    lm_head: LMHead | None
    temperature: float

    def decode(self, records: Records, gold_N: Tensor) -> TargetChunk:
        """Return the target of ``records``, decoded as for training."""
        columns = {
            name: torch.from_numpy(column).to(gold_N.device)
            for name, column in records.columns.items()
        }
        teacher = (
            TargetDecoder(self.codec, self.lm_head)
            .decode(gold_N, columns, self.temperature)
            .teacher
        )
        assert teacher is not None
        return teacher.take_chunk(slice(0, len(gold_N)))


def _compare(
    part: _PositionSample, fresh: Records | None, decoder: _Decoder, noise: float
) -> _Measurements:
    """Compare the stored records of ``part`` with the teacher, at the decoder's temperature.

    ``noise`` is the teacher's own, in nats.
    """
    codec = decoder.codec
    p_NV = (part.logp_NV / decoder.temperature).softmax(1)
    target = decoder.decode(part.stored, part.gold_N)
    kept = _KnownTokens.of(target, part.stored, p_NV)
    best_N = target.find_best_N()
    log_N = part.logp_NV.amax(1)
    # Two tokens whose log-probabilities differ by less than rounding and noise may change places.
    width = _find_tie_width(codec) + 2 * SAFETY * noise
    near_N = part.logp_NV.gather(1, best_N.clamp(min=0)[:, None])[:, 0] >= log_N - width
    live_entropy_N = torch.special.entr(p_NV).sum(1)
    return _Measurements(
        kept_mass_N=kept.p_NV.sum(1),
        kept_error_N=((kept.p_NV - p_NV).abs() * kept.known_NV).sum(1),
        kl_N=kept.compute_kl(p_NV),
        gold_error_N=_measure_gold_error(part, kept, p_NV, codec),
        agrees_N=near_N.double().masked_fill(best_N < 0, torch.nan),
        entropy_error_N=_decode_entropy(target, part.stored).to(p_NV.device) - live_entropy_N,
        sums=None if fresh is None else _compute_sums(part, fresh, decoder, p_NV),
    )


def _measure_gold_error(
    part: _PositionSample, kept: _KnownTokens, p_NV: Tensor, codec: Codec
) -> Tensor:
    """Return |p decoded / p live - 1| of the next token, (N,).

    Profile topk stores that token's log-probability beside its entries.
    """
    gold_N1 = part.gold_N[:, None]
    log_N = kept.p_NV.gather(1, gold_N1)[:, 0].clamp(min=_LEAST).log()
    if codec.profile == "topk":
        log_N = (
            torch.from_numpy(part.stored["known"][:, 0].astype(np.float64)).to(log_N.device)
            * -KNOWN_STEP
        )
    live_N = p_NV.gather(1, gold_N1)[:, 0].clamp(min=_LEAST).log()
    # Both are clamped, so that a probability of 0 gives a large error and not an infinite one.
    return (log_N.clamp(min=math.log(_LEAST)) - live_N).abs().clamp(max=20.0).expm1()


def _decode_entropy(target: TargetChunk, records: Records) -> Tensor:
    """Return the entropy of the records, (N,).

    For topk it is read from the record: the target would give that of its entries and one bucket.
    """
    if isinstance(target, TopTarget):
        return torch.from_numpy(records["entropy"].astype(np.float64)) * ENTROPY_STEP
    return target.entropy_N.double()


# ---------------------------------------------------------------------- the sums of samples


@dataclass(frozen=True)
class _TokenFunctions:
    """F functions of a token; their means under p and under an unbiased sample of p are equal."""

    sign_8V: Tensor
    bucket_V: Tensor
    level_NV: Tensor

    @classmethod
    def of(cls, p_NV: Tensor, size_NV: Tensor, threshold: float) -> _TokenFunctions:
        """Make pseudo-random signs, buckets of equal mass, and a level for each factor of 10.

        The seed is fixed, so a cache is always measured by the same signs.
        """
        dice = torch.Generator().manual_seed(0)
        sign_8V = torch.randint(2, (_SIGNS, p_NV.shape[1]), generator=dice).double() * 2 - 1
        mass_V, order_V = p_NV.mean(0).sort(descending=True)
        rank_V = (mass_V.cumsum(0) * _BUCKETS).long().clamp_(max=_BUCKETS - 1)
        below_NV = (threshold / size_NV.clamp(min=_LEAST)).log10().floor() + 1
        level_NV = below_NV.clamp(0, _LEVELS - 1).long()
        return cls(
            sign_8V.to(p_NV.device), torch.empty_like(rank_V).scatter(0, order_V, rank_V), level_NV
        )

    def evaluate(self, rows_E: Tensor, ids_E: Tensor) -> Tensor:
        """Return the functions at each entry, (E, F)."""
        kinds = (self.bucket_V[ids_E], _BUCKETS), (self.level_NV[rows_E, ids_E], _LEVELS)
        return torch.cat(
            [self.sign_8V[:, ids_E].T, *(torch.nn.functional.one_hot(*kind) for kind in kinds)], 1
        )

    def sum_all(self, weights_NV: Tensor, squared: bool = False) -> Tensor:
        """Return the sums (F,) over all tokens of a weight times the functions or their squares."""
        weights_V = weights_NV.sum(0)
        sign_8V = self.sign_8V.square() if squared else self.sign_8V
        buckets = torch.bincount(self.bucket_V, weights_V, _BUCKETS)
        levels = torch.bincount(self.level_NV.flatten(), weights_NV.flatten(), _LEVELS)
        return torch.cat([sign_8V @ weights_V, buckets, levels])

    def sum_entries(self, target: SparseTarget) -> Tensor:
        """Return the sums (R, F) over entries; ``target`` holds the positions R times."""
        rows_E = _find_rows(target)
        positions = len(self.level_NV)
        values_EF = self.evaluate(rows_E % positions, target.ids_E) * target.weights_E[:, None]
        sums_RF = values_EF.new_zeros((len(target.offsets_N1) - 1) // positions, values_EF.shape[1])
        return sums_RF.index_add_(0, rows_E // positions, values_EF)


def _compute_sums(
    part: _PositionSample, fresh: Records, decoder: _Decoder, p_NV: Tensor
) -> _SampledSums:
    codec = decoder.codec
    redraws = len(fresh) // len(part.gold_N)
    size_NV = _compute_sizes(part.logp_NV, codec)
    functions = _TokenFunctions.of(p_NV, size_NV, codec.threshold)
    redrawn = decoder.decode(fresh, part.gold_N.repeat(redraws))
    stored = decoder.decode(part.stored, part.gold_N)
    assert isinstance(redrawn, SparseTarget) and isinstance(stored, SparseTarget)
    variance_NV, largest = _compute_sampling_variance(
        p_NV, size_NV, fresh.slice(0, len(p_NV)), part, decoder
    )
    step = max(KNOWN_STEP, codec.head_step) / decoder.temperature
    return _SampledSums(
        live_F=functions.sum_all(p_NV),
        stored_F=functions.sum_entries(stored)[0],
        redrawn_RF=functions.sum_entries(redrawn),
        variance_F=functions.sum_all(variance_NV, squared=True),
        event=2 * largest + step,
    )


def _compute_sizes(logp_NV: Tensor, codec: Codec) -> Tensor:
    """Return the sizes that tails are drawn by.

    They are p, or for profile tempered the mean of p_T over the proposal's temperatures.
    """
    if codec.profile == "threshold":
        return logp_NV.exp()
    return torch.stack([(logp_NV * beta).softmax(1) for beta in codec.proposal_betas]).mean(0)


def _compute_sampling_variance(
    p_NV: Tensor, size_NV: Tensor, fresh: Records, part: _PositionSample, decoder: _Decoder
) -> tuple[Tensor, float]:
    """Return the variance of each token's weight under independent draws, and the largest weight.

    The variance is p^2 (1 - pi) / pi, with pi the probability to be drawn.
    """
    target = decoder.decode(fresh, part.gold_N)
    tail_NV = size_NV.masked_fill(_KnownTokens.of(target, fresh, p_NV).known_NV, 0.0)
    count_N1 = torch.from_numpy(fresh["tail_count"].astype(np.float64)).to(p_NV.device)[:, None]
    chance_NV = (count_N1 * tail_NV / tail_NV.sum(1, keepdim=True).clamp(min=_LEAST)).clamp(max=1.0)
    weight_NV = (p_NV / chance_NV.clamp(min=_LEAST)).masked_fill(chance_NV <= _LEAST, 0.0)
    return p_NV * weight_NV * (1.0 - chance_NV), float(weight_NV.max())


def _make_row(found: list[_Measurements], decoder: _Decoder, noise: float) -> FidelityRow:
    """Return the means over all positions and the largest |z| as one row."""
    codec = decoder.codec
    sums = [each.sums for each in found if each.sums is not None]
    positions = sum(len(each.kl_N) for each in found)

    def mean(name: str) -> float:
        return _round_number(float(torch.cat([getattr(each, name) for each in found]).nanmean()))

    # NaN where no target shows its most probable token.
    agreement = mean("agrees_N")
    bias_z = stored_z = None
    if sums:
        systematic = positions * LARGEST_LOG_MASS_ERROR if codec.profile == "tempered" else 0.0
        noise_of_sums = math.sqrt(positions) * noise / decoder.temperature
        bias_z, stored_z = map(
            _round_number, sum(sums[1:], sums[0]).compute_scores(systematic, noise_of_sums)
        )
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


def _round_number(value: float) -> float:
    return float(f"{value:.6g}")


# ---------------------------------------------------------------------- the bounds


@dataclass(frozen=True)
class _Bounds:
    """The bounds of a faithful cache; other weights or shifted positions exceed them by far."""

    codec: Codec
    noise: float

    def find_problems(self, row: FidelityRow) -> list[str]:
        """Return one line for each value of ``row`` that is out of bounds."""
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
            f"{name} at temperature {row.temperature:g} is {value:.3g}, "
            f"but must be at most {limits[name]:.3g}"
            for name, value in measured.items()
            if value is not None and not abs(value) <= limits[name]
        ]
        if row.top1_agreement is not None and not row.top1_agreement >= LEAST_AGREEMENT:
            got = f"top1_agreement at temperature {row.temperature:g} is {row.top1_agreement:.3g}"
            lines.append(f"{got}, but must be at least {LEAST_AGREEMENT:g}")
        return lines

    def _kept_error(self, row: FidelityRow) -> float:
        """Bound the error by the rounding step; for tempered add the log-partition's error."""
        return (
            math.expm1((_find_step(self.codec) + self.noise) / row.temperature)
            + self._partition_error
        )

    def _gold_error(self, row: FidelityRow) -> float:
        """Bound the relative error of the next token's probability.

        It is larger for dense and hidden where p is small. For tempered, the normaliser A adds the
        rounding of its head tokens.
        """
        rare = {
            "tempered": _find_step(self.codec),
            "dense": EXACT_STEP,
            "hidden": 2 * _find_step(self.codec),
        }
        step = KNOWN_STEP + rare.get(self.codec.profile, 0.0)
        return math.expm1((step + self.noise) / row.temperature) + self._partition_error

    def _kl(self, row: FidelityRow) -> float:
        """Bound KL by E_p[delta^2] / 2 for errors delta in log p."""
        step = _find_step(self.codec) / row.temperature
        noise = self.noise / row.temperature
        return (step**2 + noise**2) / 2 + 1e-6

    def _entropy_error(self, row: FidelityRow) -> float:
        """Bound the error of the mean entropy.

        A stored entropy is rounded stochastically: the bound is Hoeffding's for a probability of
        1e-9. Other profiles compute it, so it changes with the log-probabilities.
        """
        if self.codec.profile in ("threshold", "topk"):
            return ENTROPY_STEP * math.sqrt(math.log(2e9) / (2 * row.positions)) + 5 * self.noise
        return (
            5 * (_find_step(self.codec) + self.noise) / row.temperature + 5 * self._partition_error
        )

    @property
    def _partition_error(self) -> float:
        return PARTITION_ERROR if self.codec.profile == "tempered" else 0.0


def _find_step(codec: Codec) -> float:
    """Return the largest error of a stored log-probability, in nats."""
    if codec.profile in ("threshold", "tempered"):
        return max(KNOWN_STEP, codec.head_step)
    if codec.profile == "topk":
        return TOP_STEP
    return INT8_STEP if codec.bits == 8 else EXACT_STEP


def _find_tie_width(codec: Codec) -> float:
    """Return the difference in nats within which rounding may swap two tokens."""
    return 2 * _find_step(codec) * (4 if codec.profile == "hidden" else 1)


def find_out_of_bounds(store: Cache, found: FidelityMeasurement) -> list[str]:
    """Return one line for each value that is out of the bounds of a faithful cache."""
    bounds = _Bounds(store.codec, choose_allowed_noise(store.identity.teacher.dtype, found.noise))
    lines = [line for row in found.rows for line in bounds.find_problems(row)]
    if not found.noise <= LARGEST_NOISE:
        lines.append(
            f"the teacher's own noise between two batches is {found.noise:.3g} nats, but must be "
            f"at most {LARGEST_NOISE:g}"
        )
    return lines


def require_fidelity(store: Cache, found: FidelityMeasurement) -> None:
    """Raise ``FidelityError`` naming every value that is out of bounds."""
    if lines := find_out_of_bounds(store, found):
        raise FidelityError(
            f"{store.folder}: the records differ from the teacher: {'; '.join(lines)}.",
            _REMEDY
            + _REMEDY_BY_PROFILE.get(store.codec.profile, "")
            + f" To capture it again, delete {store.folder} first. To accept the records as they "
            f"are, set {OVERRULING_FIELD}: the cache keeps the verdict.",
        )


def judge_fidelity(
    store: Cache, found: FidelityMeasurement, config: CacheConfig
) -> FidelityOverride | None:
    """Raise ``FidelityError`` as ``require_fidelity`` does, unless ``config`` overrules that.

    Returns the verdict that was overruled; None for a faithful cache.
    """
    if config.fidelity == "refuse":
        require_fidelity(store, found)
        return None
    lines = find_out_of_bounds(store, found)
    if not lines:
        return None
    return FidelityOverride(_round_number(found.noise), tuple(lines), OVERRULING_FIELD)
