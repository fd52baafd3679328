"""The section ``loss``: the training objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from cache.codec import Codec
from kd.config.section import Section
from kd.errors import Problem

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "total_variation"]
Weight = Annotated[float, Field(ge=0.0, le=1.0)]
Temperature = Annotated[float, Field(gt=0.0, le=100.0)]


class Ramp(Section):
    """A value that changes from ``start`` to ``end`` during the run."""

    schedule: Literal["linear", "cosine", "step"]
    """Shape: a line, half a cosine, or one jump halfway."""

    start: float = Field(ge=0.0, le=100.0)
    """Value at the first step."""

    end: float = Field(ge=0.0, le=100.0)
    """Value at the last step of the change, and after it."""

    steps: int | None = Field(None, ge=1, le=100_000_000)
    """Steps that the change takes; default the whole run."""


class LearnedTemperature(Section):
    """A learned temperature: T = min (max / min)^sigmoid(theta); theta has its own optimiser."""

    mode: Literal["adversarial", "entropy", "lookahead", "teacher_only"]
    """adversarial = T increases T^2 KL while the student decreases it; entropy = T keeps the
    teacher's mean entropy at target_entropy; lookahead = T decreases the held-out loss after one
    more step; teacher_only = the same as lookahead, but only the teacher is tempered. There is no
    mode that minimises the loss, because T would move to a bound with every student."""

    min: float = Field(0.5, ge=0.05, le=100.0)
    """Lowest temperature."""

    max: float = Field(2.0, ge=0.05, le=100.0)
    """Highest temperature."""

    init: float = Field(1.0, ge=0.05, le=100.0)
    """Temperature at the first step."""

    learning_rate: float = Field(0.01, gt=0.0, le=10.0)
    """Learning rate of theta."""

    target_entropy: float | None = Field(None, gt=0.0, le=20.0)
    """Mode entropy: the teacher's mean entropy, in nats, that T keeps."""

    interval: int = Field(10, ge=1, le=100_000)
    """Modes lookahead and teacher_only: steps between two updates of T; each update costs some
    passes."""

    @property
    def looks_ahead(self) -> bool:
        """True if T is that of the least held-out loss after one more step."""
        return self.mode in ("lookahead", "teacher_only")

    @field_validator("mode", mode="before")
    @classmethod
    def _minimisation_is_no_mode(cls, value: Any) -> Any:
        # pydantic would only list the modes; a user of one of these words needs the reason.
        if value in ("minimise", "minimize", "min", "gradient", "plain", "learned"):
            raise ValueError(
                f"{value} is not offered: for every student KL falls to 0 as T grows, and T^2 KL "
                "as T shrinks, so a temperature that minimises the loss moves to a bound. Use "
                "adversarial, entropy, lookahead or teacher_only"
            )
        return value

    @model_validator(mode="after")
    def _bounds_hold_it(self) -> Self:
        if not self.min < self.init < self.max:
            raise ValueError(
                f"loss.temperature.init {self.init:g} must lie between min {self.min:g} "
                f"and max {self.max:g}"
            )
        if (self.target_entropy is None) == (self.mode == "entropy"):
            raise ValueError(
                "loss.temperature.target_entropy is required for mode entropy, and for no other "
                "mode"
            )
        return self


def _find_temperature_kind(value: Any) -> str:
    if isinstance(value, LearnedTemperature) or (isinstance(value, Mapping) and "mode" in value):
        return "LearnedTemperature"
    return "Ramp" if isinstance(value, Mapping | Ramp) else "float"


def find_ramp(value: Any) -> str:
    """Tell a number from a schedule, by the tag that the union has for each."""
    return "Ramp" if isinstance(value, Mapping | Ramp) else "float"


class FeatureConfig(Section):
    """A term that matches the teacher's last hidden states, which profile hidden keeps."""

    weight: float = Field(0.0, ge=0.0, le=1000.0)
    """Weight of the term; 0 = none."""

    kind: Literal["mse", "cosine"] = "mse"
    """mse = squared error of normalised states; cosine = 1 - their cosine."""


class LossConfig(Section):
    """The objective: (1 - alpha) D(teacher, student) + alpha cross-entropy + extra terms."""

    alpha: Annotated[
        Annotated[Weight, Tag("float")] | Annotated[Ramp, Tag("Ramp")], Discriminator(find_ramp)
    ] = 0.1
    """Weight of the hard labels: a number or a schedule. 1 = plain cross-entropy, which needs no
    cache. Other tools give the weight of the teacher (kd_alpha, kd_ratio, Megatron's alpha): alpha
    is 1 minus that weight."""

    temperature: Annotated[
        Annotated[Temperature, Tag("float")]
        | Annotated[Ramp, Tag("Ramp")]
        | Annotated[LearnedTemperature, Tag("LearnedTemperature")],
        Discriminator(_find_temperature_kind),
    ] = 1.0
    """Temperature of teacher and student: a number, a schedule, or a learned temperature. A
    temperature other than 1 needs profile tempered, hidden or dense."""

    divergence: Divergence = "forward_kl"
    """The divergence D: forward_kl = KL(teacher || student); reverse_kl = KL(student || teacher);
    jsd = generalised Jensen-Shannon with beta; skew_kl = KL(teacher || beta teacher + (1 - beta)
    student); total_variation. All but the first need profile hidden or dense."""

    beta: float = Field(0.5, gt=0.0, lt=1.0)
    """Weight of the teacher in the mixture of jsd and skew_kl."""

    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of each hard label that is spread evenly over the vocabulary."""

    entropy_weighting: float = Field(0.0, ge=-4.0, le=4.0)
    """Exponent e of a token's weight (1 + H)^e in D, where H is the teacher's entropy; the weights
    are scaled to mean 1 in each step. With an exponent above 0, tokens about which the teacher is
    unsure count more. A cache of profile threshold that is captured for it, or for a search over
    it, keeps the entropy of each position, for about a byte per token."""

    balance: Literal["tokens", "domains"] = "tokens"
    """With teachers: what counts alike in D, each token, or each domain, whose tokens share its
    weight. A domain is all that one teacher reads, or one mixture."""

    tail_control: bool = True
    """Remove most of the noise of the sampled tails (profile threshold) from the gradient of the LM
    head, with the mean tail that the cache holds. The mean of the gradient stays the same. Has no
    effect with a cache without a mean tail (merged, of another tool, or of an earlier version),
    with a frozen LM head, with entropy_weighting, with several caches (teachers), or in the first
    epoch of train.order curriculum."""

    tokenizers: Literal["same", "projected", "alm"] = "same"
    """What a teacher with another tokenizer teaches: same = nothing, the job is refused; alm = the
    likelihood of each span of text that both divide alike, with any profile; projected = KL where
    tokens of both begin, with profile threshold or tempered. With equal tokenizers it has no
    effect."""

    features: FeatureConfig = Field(default_factory=FeatureConfig)
    """Matching of hidden states, with profile hidden."""

    router_balance: float | None = Field(None, ge=0.0, le=10.0)
    """Weight of the balance loss of a mixture of experts, which keeps its routers from choosing
    only a few experts; default the student's own router_aux_loss_coef, 0 = none. It is computed for
    each micro-batch of a device, so it depends on train.batch_size, not only on the sequences of a
    step."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _mode_or_schedule(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and ("mode" in value) == ("schedule" in value):
            neither = f"but got neither: its keys are {', '.join(map(str, value))}"
            raise ValueError(
                "a temperature that is not a number has the key mode (it is learned) or schedule "
                f"(it goes from start to end), {'not both' if 'mode' in value else neither}"
            )
        return value

    @model_validator(mode="after")
    def _ramps_within_bounds(self) -> Self:
        if isinstance(self.alpha, Ramp) and max(self.alpha.start, self.alpha.end) > 1.0:
            raise ValueError("loss.alpha.start and end must be between 0 and 1")
        if isinstance(self.temperature, Ramp) and self.temperatures[0] <= 0.0:
            raise ValueError("loss.temperature.start and end must be above 0")
        return self

    @property
    def looks_ahead(self) -> bool:
        """True if the temperature is learned from gradients of the whole student."""
        return isinstance(self.temperature, LearnedTemperature) and self.temperature.looks_ahead

    @property
    def hard_labels_only(self) -> bool:
        """Whether the objective uses only the hard labels, and nothing of the teacher."""
        return self.alpha == 1.0 and self.features.weight == 0.0

    @property
    def weighs_positions(self) -> bool:
        """Whether the objective weighs positions by the teacher's entropy at each."""
        return self.entropy_weighting != 0.0 and not self.hard_labels_only

    @property
    def learns_temperature(self) -> bool:
        """Whether the temperature is learned."""
        return isinstance(self.temperature, LearnedTemperature)

    @property
    def temperatures(self) -> tuple[float, float]:
        """The lowest and the highest temperature that the run can reach."""
        if isinstance(self.temperature, Ramp):
            ends = (self.temperature.start, self.temperature.end)
            return min(ends), max(ends)
        if isinstance(self.temperature, LearnedTemperature):
            return self.temperature.min, self.temperature.max
        return self.temperature, self.temperature

    def list_unaligned(self, profile: str, sampled: bool) -> list[Problem]:
        """List what records of ``profile`` cannot serve a student with another tokenizer.

        ``sampled``: they are entries with a sampled tail.
        """
        if self.hard_labels_only:
            return []
        chunks = self.tokenizers == "alm"
        learned = isinstance(self.temperature, LearnedTemperature)
        tempered = learned or (chunks and self.temperatures != (1.0, 1.0))
        remedies = {
            "/loss/divergence": self.divergence != "forward_kl" and "forward_kl",
            "/loss/features": self.features.weight > 0.0 and "weight 0",
            "/loss/temperature": tempered and "1",
            "/loss/entropy_weighting": chunks and self.weighs_positions and "0",
            "/loss/tokenizers": not chunks and not sampled and "alm, or capture profile threshold",
        }
        what = f"it cannot be served by loss.tokenizers {self.tokenizers} and profile {profile}"
        why = f"{what}: student and teacher have other tokens."
        return [
            Problem(place, why, f"Set it to {remedy}.")
            for place, remedy in remedies.items()
            if remedy
        ]

    def list_unserved(self, codec: Codec) -> list[Problem]:
        """List what the records of a sealed cache cannot serve."""
        remedy = "See `kd cache info` for the contents of a cache."
        asked = (self.divergence, self.temperatures)
        if why := codec.why_unsupported(*asked):
            return [Problem("/loss", f"{why}.", remedy)]
        if why := codec.why_unsupported(*asked, self.features.weight > 0):
            return [Problem("/loss/features", f"{why}.", remedy)]
        if self.weighs_positions and (why := codec.why_unweighted()):
            return [Problem("/loss/entropy_weighting", f"{why}.", remedy)]
        return []
