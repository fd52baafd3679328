"""The objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from kd.config.section import Section

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "total_variation"]
Weight = Annotated[float, Field(ge=0.0, le=1.0)]
Temperature = Annotated[float, Field(gt=0.0, le=100.0)]


class Ramp(Section):
    """A value that moves from ``start`` to ``end`` while the run goes on."""

    schedule: Literal["linear", "cosine", "step"] = Field(
        description="Form of the way: a line, half a cosine, or one jump in the middle of it."
    )
    start: float = Field(ge=0.0, le=100.0, description="Value at the first step.")
    end: float = Field(ge=0.0, le=100.0, description="Value from the last step of the way on.")
    steps: int | None = Field(None, ge=1, le=100_000_000, description="Steps the way takes; default the whole run.")


class LearnedTemperature(Section):
    """A temperature that is learned: T = min (max / min)^sigmoid(theta), theta with an optimiser of its own."""

    mode: Literal["adversarial", "entropy", "lookahead", "teacher_only"] = Field(
        description=(
            "adversarial = T makes T^2 KL large while the student makes it small; entropy = the teacher's mean entropy "
            "is held at target_entropy; lookahead = T follows the held-out loss one step ahead; teacher_only = only "
            "the teacher is tempered. Plain minimisation is no mode: it runs to a bound whatever the student is."
        )
    )
    min: float = Field(0.5, ge=0.05, le=100.0, description="Lowest temperature.")
    max: float = Field(2.0, ge=0.05, le=100.0, description="Highest temperature.")
    init: float = Field(1.0, ge=0.05, le=100.0, description="Temperature at the first step.")
    learning_rate: float = Field(0.01, gt=0.0, le=10.0, description="Learning rate of theta.")
    prior: float = Field(
        0.1,
        ge=0.0,
        le=1000.0,
        description="Weight of (log(T / init))^2, which pulls T to where it began; not of mode entropy.",
    )
    target_entropy: float | None = Field(
        None, gt=0.0, le=20.0, description="Mode entropy: mean entropy in nats that the teacher is held at."
    )
    ramp_steps: int = Field(
        100, ge=0, le=10_000_000, description="Mode adversarial: steps over which the reversed gradient grows to full."
    )
    interval: int = Field(
        10,
        ge=1,
        le=100_000,
        description="Modes lookahead and teacher_only: T moves every so many steps, at the cost of some passes.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _minimisation_is_no_mode(cls, value: Any) -> Any:
        if value in ("minimise", "minimize", "min", "gradient", "plain", "learned"):
            raise ValueError(
                f"{value} is not offered: KL falls to 0 as T grows and T^2 KL as T shrinks, whatever the student is, "
                "so a temperature that minimises the loss runs to a bound. Use adversarial, entropy, lookahead or "
                "teacher_only"
            )
        return value

    @model_validator(mode="after")
    def _bounds_hold_it(self) -> Self:
        if not self.min < self.init < self.max:
            raise ValueError(
                f"loss.temperature.init {self.init:g} must lie between min {self.min:g} and max {self.max:g}"
            )
        if (self.target_entropy is None) == (self.mode == "entropy"):
            raise ValueError("loss.temperature.target_entropy is for mode entropy, which needs it")
        return self


def _kind_of_temperature(value: Any) -> str:
    if isinstance(value, LearnedTemperature) or (isinstance(value, Mapping) and "mode" in value):
        return "LearnedTemperature"
    return "Ramp" if isinstance(value, Mapping | Ramp) else "float"


def _kind_of_alpha(value: Any) -> str:
    return "Ramp" if isinstance(value, Mapping | Ramp) else "float"


class FeatureConfig(Section):
    """Matching of the teacher's last hidden states, which profile hidden keeps."""

    weight: float = Field(0.0, ge=0.0, le=1000.0, description="Weight of the term; 0 = none.")
    kind: Literal["mse", "cosine"] = Field(
        "mse", description="mse = squared error of normalised states; cosine = 1 - their cosine."
    )


class LossConfig(Section):
    """The objective: (1 - alpha) D(teacher, student) + alpha cross-entropy, and what is added to it."""

    alpha: Annotated[Annotated[Weight, Tag("float")] | Annotated[Ramp, Tag("Ramp")], Discriminator(_kind_of_alpha)] = (
        Field(
            0.1,
            description=(
                "Weight of the hard labels, a number or a schedule; 1 = plain cross-entropy, needs no cache. Where "
                "other tools weigh the teacher (kd_alpha, kd_ratio, Megatron's alpha), it is 1 minus that."
            ),
        )
    )
    temperature: Annotated[
        Annotated[Temperature, Tag("float")]
        | Annotated[Ramp, Tag("Ramp")]
        | Annotated[LearnedTemperature, Tag("LearnedTemperature")],
        Discriminator(_kind_of_temperature),
    ] = Field(
        1.0,
        description=(
            "Temperature of teacher and student: a number, a schedule, or one that is learned; other than 1 it needs "
            "profile tempered, hidden or dense."
        ),
    )
    divergence: Divergence = Field(
        "forward_kl",
        description=(
            "D: forward_kl = KL(teacher || student); reverse_kl; jsd = generalised Jensen-Shannon with beta; skew_kl = "
            "KL(teacher || beta teacher + (1 - beta) student); total_variation. All but the first need profile hidden "
            "or dense."
        ),
    )
    beta: float = Field(0.5, gt=0.0, lt=1.0, description="Weight of the teacher in the mixture of jsd and skew_kl.")
    label_smoothing: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of each hard label that is spread over the vocabulary."
    )
    z_loss: float = Field(
        0.0, ge=0.0, le=1.0, description="Weight of log(Z)^2, which keeps the student's logits from drifting."
    )
    entropy_weighting: float = Field(
        0.0,
        ge=-4.0,
        le=4.0,
        description=(
            "Exponent e of the weight (1 + H)^e that the teacher's entropy H gives a token's share of D, scaled to "
            "mean 1 in a micro-batch; above 0 = uncertain tokens count more."
        ),
    )
    features: FeatureConfig = Field(
        default_factory=FeatureConfig, description="Matching of hidden states, with profile hidden."
    )

    @field_validator("temperature", mode="before")
    @classmethod
    def _mode_or_schedule(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and ("mode" in value) == ("schedule" in value):
            raise ValueError(
                "a temperature that is no number has mode (it is learned) or schedule (it goes from start to end), "
                + ("not both" if "mode" in value else f"but got neither: its keys are {', '.join(map(str, value))}")
            )
        return value

    @model_validator(mode="after")
    def _ramps_within_bounds(self) -> Self:
        if isinstance(self.alpha, Ramp) and max(self.alpha.start, self.alpha.end) > 1.0:
            raise ValueError("loss.alpha.start and end must be between 0 and 1")
        if isinstance(self.temperature, Ramp) and min(self.temperature.start, self.temperature.end) <= 0.0:
            raise ValueError("loss.temperature.start and end must be above 0")
        return self

    @property
    def hard_labels_only(self) -> bool:
        """Whether nothing of the teacher is asked for."""
        return self.alpha == 1.0 and self.features.weight == 0.0

    @property
    def temperatures(self) -> tuple[float, float]:
        """Lowest and highest temperature that the run may come to."""
        if isinstance(self.temperature, Ramp):
            ends = self.temperature.start, self.temperature.end
            return min(ends), max(ends)
        if isinstance(self.temperature, LearnedTemperature):
            return self.temperature.min, self.temperature.max
        return self.temperature, self.temperature
