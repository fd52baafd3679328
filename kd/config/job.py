"""A job, as one frozen tree: the body of POST /jobs, the YAML of ``kd run``, the fixtures of the tests.

Nothing in this package imports torch: the API process reads it. A field's description is the API's documentation and
its line in docs/configuration.md. Paths are resolved against the folder that the run starts in.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from cache.profiles import unserved
from kd.config.cache import CacheConfig
from kd.config.data import DataConfig
from kd.config.loss import LossConfig
from kd.config.section import Section
from kd.config.student import StudentConfig
from kd.config.teacher import TeacherConfig
from kd.config.train import TrainConfig


class JobConfig(Section):
    """A whole job."""

    kind: Literal["distill", "precompute", "train"] = Field(
        "distill",
        description=(
            "distill = precompute then train; precompute = capture the teacher only; train = from a sealed cache, or "
            "on plain text with alpha 1."
        ),
    )
    name: str = Field(
        "job",
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="A name for people; lower case, digits, dot, dash, underscore.",
    )
    teacher: TeacherConfig | None = Field(None, description="The teacher; required unless kind is train with alpha 1.")
    student: StudentConfig | None = Field(None, description="The student; required unless kind is precompute.")
    data: DataConfig = Field(default_factory=DataConfig, description="The text.")
    cache: CacheConfig = Field(default_factory=CacheConfig, description="What is kept of the teacher.")
    loss: LossConfig = Field(default_factory=LossConfig, description="The objective.")
    train: TrainConfig | None = Field(None, description="The training loop; required unless kind is precompute.")

    @property
    def needs_cache(self) -> bool:
        """Whether training reads the teacher's records: not where the hard labels have all the weight."""
        return self.kind != "train" or self.loss.alpha < 1.0

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that this kind of job runs, in order; also the names of the service's queues."""
        return ("precompute", "train") if self.kind == "distill" else (self.kind,)

    @model_validator(mode="after")
    def _kind_has_its_parts(self) -> Self:
        if self.teacher is None and self.needs_cache and self.cache.fingerprint is None:
            raise ValueError(
                f"teacher is required for kind {self.kind}"
                + (" with loss.alpha below 1" if self.kind == "train" else "")
            )
        if self.kind == "precompute":
            return self
        if self.student is None:
            raise ValueError(f"student is required for kind {self.kind}")
        if self.train is None:
            raise ValueError(f"train is required for kind {self.kind}")
        if self.teacher is None and self.student.init and self.student.init.tokenizer is None:
            raise ValueError("student.init.tokenizer is required where there is no teacher to take it from")
        return self

    @model_validator(mode="after")
    def _early_stopping_has_a_measure(self) -> Self:
        patience = self.train.early_stopping_patience if self.train is not None else None
        if patience is not None and not self.data.validation and self.data.held_out_fraction == 0:
            raise ValueError("train.early_stopping_patience needs held-out text, but data holds nothing out")
        return self

    @model_validator(mode="after")
    def _profile_serves_loss(self) -> Self:
        span = self.cache.range
        why = unserved(self.cache.profile, (span[0], span[1]) if span else None, temperature=self.loss.temperature)
        if self.needs_cache and self.cache.fingerprint is None and why is not None:
            raise ValueError(f"loss.temperature {self.loss.temperature:g} cannot be served: {why}")
        return self

    @model_validator(mode="after")
    def _remote_teacher_gives_its_best(self) -> Self:
        if (
            self.teacher is not None
            and self.teacher.backend == "http"
            and self.needs_cache
            and self.cache.profile != "topk"
        ):
            raise ValueError(
                "teacher.backend http gives the most probable tokens only: set cache.profile to topk, not "
                f"{self.cache.profile}"
            )
        return self

    @model_validator(mode="after")
    def _text_or_a_sealed_cache(self) -> Self:
        if self.cache.fingerprint is not None and self.kind != "train":
            raise ValueError(
                f"cache.fingerprint names a sealed cache, which kind {self.kind} would capture: use kind train"
            )
        if not self.data.train and self.cache.fingerprint is None:
            raise ValueError("data.train is required: files, folders, globs or dataset specs")
        return self
