"""A whole job as one frozen tree: the body of ``POST /jobs`` and the YAML file of ``kd run``.

The description of a field is its documentation in the API and in docs/configuration.md. Relative
paths are resolved against the folder in which the run starts.

No module of this package imports torch, because the API process imports them.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue

from cache.profiles.table import explain_unsupported
from kd.addresses import ModelSource
from kd.config.cache import CacheConfig
from kd.config.checks import ChecksConfig
from kd.config.data import DataConfig
from kd.config.evaluation import EvaluationConfig
from kd.config.kinds import KINDS, Kind, KindName, describe_kinds, list_kinds_without
from kd.config.loss import LearnedTemperature, LossConfig
from kd.config.optimisation.resuming import ResumeConfig
from kd.config.placement import PLACEMENT_FIELDS, Placement
from kd.config.search import SearchConfig
from kd.config.student import StudentConfig
from kd.config.teacher import TeacherConfig
from kd.config.train import TrainConfig

#: A job's name; it is also the name of its run folder.
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"


#: The name of one of several teachers, and so of a domain.
TeacherName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]


class JobConfig(Placement):
    """A whole job."""

    kind: KindName = Field("distill", description=describe_kinds())
    name: str = Field("job", pattern=NAME_PATTERN)
    """A name for people: lower-case letters, digits, dot, dash, underscore."""

    teacher: TeacherConfig | None = None
    """The teacher; required unless kind is verify, or train with alpha 1 or from a sealed cache.
    With kind fidelity it is the teacher that the cache was captured from."""

    teachers: dict[TeacherName, TeacherConfig] = Field(default_factory=dict, max_length=64)
    """Several teachers by name, in place of teacher: each source of the text names its own
    (docs/how-to/several-teachers.md)."""

    student: StudentConfig | None = Field(
        None, description=f"The student; required unless kind is {list_kinds_without('student')}."
    )
    data: DataConfig = Field(default_factory=DataConfig)
    """The text."""

    cache: CacheConfig = Field(default_factory=CacheConfig)
    """Which of the teacher's predictions the cache keeps."""

    loss: LossConfig = Field(default_factory=LossConfig)
    """The objective."""

    train: TrainConfig | None = Field(
        None,
        description=f"The training loop; required unless kind is {list_kinds_without('train')}.",
    )
    checks: ChecksConfig = Field(default_factory=ChecksConfig)
    """What is checked while a student trains."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """How the finished student is measured."""

    resume: ResumeConfig | None = None
    """How a finished run is continued for more steps."""

    search: SearchConfig | None = None
    """What a search tries; required for kind search."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema with the fields of the service last; pydantic lists them first."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        resolved = handler.resolve_ref_schema(schema)
        fields = resolved["properties"].items()
        resolved["properties"] = dict(sorted(fields, key=lambda item: item[0] in PLACEMENT_FIELDS))
        return schema

    @property
    def needs_cache(self) -> bool:
        """Whether the job captures or reads the teacher's records.

        A job of kind train only on hard labels does neither.
        """
        if self.captures or self.checks_cache:
            return self.captures
        return not self.loss.hard_labels_only

    @property
    def own_kind(self) -> Kind:
        """The row of the table of kinds that says what this job does."""
        return KINDS[self.kind]

    @property
    def captures(self) -> bool:
        """Whether the job captures a teacher into a cache of its own."""
        return self.own_kind.captures

    @property
    def keeps_entropies(self) -> bool:
        """Whether the records of profile threshold keep the teacher's entropy at each position.

        False for other profiles, whose records always do, and for a sealed cache that is named.
        """
        if self.cache.fingerprint is not None or not self.cache.rules.dithered:
            return False
        if self.search is None:
            return self.loss.weighs_positions
        # All trials share the cache: it has what any of them may need.
        return self.loss.entropy_weighting != 0.0 or "loss.entropy_weighting" in self.search.space

    @property
    def checks_cache(self) -> bool:
        """Whether the job only checks a sealed cache, which it names."""
        return self.own_kind.checks

    @property
    def cuts_teacher(self) -> bool:
        """True if the student is cut out of the teacher."""
        return self.student is not None and self.student.from_teacher is not None

    @property
    def teacher_context(self) -> tuple[str, str, int] | None:
        """``teacher.system`` and ``context``, and the most tokens that the teacher reads.

        None if it reads what the student reads.
        """
        teacher = self.teacher
        if teacher is None or not teacher.has_context:
            return None
        return teacher.system, teacher.context, teacher.count_read(self.data.sequence_length)

    @property
    def active_teacher(self) -> TeacherConfig | None:
        """The teacher, if the job runs it: to capture it, to build the student, or to compare."""
        captures = self.needs_cache and self.cache.fingerprint is None
        needed = captures or "teacher" in self.own_kind.needs
        runs = self.cuts_teacher or self.evaluation.teacher or needed
        return self.teacher if runs else None

    @property
    def captured_teacher(self) -> TeacherConfig | None:
        """The teacher that a capture or a check of its cache runs; None for a job without both."""
        return self.teacher if "teacher" in self.own_kind.needs else None

    @property
    def served_teacher(self) -> TeacherConfig | None:
        """The teacher, if a server runs it."""
        return self.teacher if self.teacher is not None and not self.teacher.is_local else None

    @property
    def teacher_files(self) -> ModelSource | None:
        """Where the files of the teacher come from that are read on this machine."""
        return None if self.teacher is None else self.teacher.files

    @property
    def teacher_name(self) -> str | None:
        """The name by which the job calls its teacher, or those of several."""
        if self.teacher is None:
            return ", ".join(each.model for each in self.teachers.values()) or None
        return self.teacher.model

    @property
    def named_teachers(self) -> dict[str, TeacherConfig]:
        """Each section of a teacher, by the JSON pointer to it."""
        own = {} if self.teacher is None else {"/teacher": self.teacher}
        return own | {f"/teachers/{name}": each for name, each in self.teachers.items()}

    def explain_no_local_teacher(self) -> str | None:
        """Say why no teacher can run on this machine; None if one can."""
        if self.teacher is None:
            return "there are several teachers" if self.teachers else "there is no teacher"
        return None if self.teacher.is_local else f"teacher.backend is {self.teacher.backend}"

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages that this kind of job runs, in order."""
        return tuple(stage.name for stage in self.own_kind.stages)

    def require_train(self) -> TrainConfig:
        """Return the train section, which every job that trains has."""
        assert self.train is not None, "JobConfig refuses a training job without a train section"
        return self.train

    @property
    def _holds_out(self) -> bool:
        """Whether the job may have held-out text.

        Only the manifest of a sealed cache shows whether that cache has some.
        """
        own = bool(self.data.validation) or self.data.held_out_fraction > 0
        return own or self.cache.fingerprint is not None

    @model_validator(mode="after")
    def _kind_has_its_parts(self) -> Self:
        needs = self.own_kind.needs
        missing = self.teacher is None and not self.teachers
        if missing and self.checks_cache and "teacher" in needs:
            detail = f"teacher is required for kind {self.kind}: it is compared with the cache"
            raise ValueError(detail)
        if missing and self.needs_cache and self.cache.fingerprint is None:
            reason = " with loss.features" if self.loss.alpha == 1.0 else " with loss.alpha below 1"
            detail = f"teacher is required for kind {self.kind}{'' if self.captures else reason}"
            raise ValueError(detail)
        if "student" not in needs:
            return self
        if self.student is None:
            raise ValueError(f"student is required for kind {self.kind}")
        if self.train is None:
            raise ValueError(f"train is required for kind {self.kind}")
        if self.teacher is None and self.student.init and self.student.init.tokenizer is None:
            detail = (
                "student.init.tokenizer is required where there is no one teacher to take it from"
            )
            raise ValueError(detail)
        return self

    @model_validator(mode="after")
    def _what_follows_the_held_out_loss_has_one(self) -> Self:
        if self.train is None or self._holds_out:
            return self
        if self.train.early_stopping_patience is not None:
            raise ValueError(
                "train.early_stopping_patience needs held-out text, but data.validation_fraction 0 "
                "holds nothing out"
            )
        if self.train.lr_scheduler_type == "reduce_lr_on_plateau":
            raise ValueError(
                "train.lr_scheduler_type reduce_lr_on_plateau follows the held-out loss, but "
                "data.validation_fraction 0 holds nothing out"
            )
        return self

    @model_validator(mode="after")
    def _a_training_run_goes_on(self) -> Self:
        if self.resume is not None and not self.own_kind.trains_one:
            raise ValueError(
                f"resume lets a training run go on, but kind {self.kind} trains none: remove resume"
            )
        return self

    @model_validator(mode="after")
    def _adapters_suit_the_precision(self) -> Self:
        lora = self.student.lora if self.student is not None else None
        if lora is None or self.train is None:
            return self
        precision = self.train.precision
        if self.train.fp8:
            raise ValueError(
                "train.fp8 is for students whose weights are all trained, but student.lora trains "
                "adapters: set train.fp8 to false"
            )
        if lora.base == "bfloat16" and precision in ("fp32", "fp16"):
            raise ValueError(
                "student.lora.base bfloat16 needs products in bfloat16, but train.precision is "
                f"{precision}: set it to bf16, or student.lora.base to float32"
            )
        if self.train.is_pure_bfloat16:
            raise ValueError(
                "train.precision bf16_pure halves the memory of trained weights, but student.lora "
                "trains small adapters only: set train.precision to bf16 and student.lora.base to "
                "bfloat16"
            )
        return self

    @model_validator(mode="after")
    def _temperature_can_learn(self) -> Self:
        temperature = self.loss.temperature
        if not isinstance(temperature, LearnedTemperature):
            return self
        mode = f"loss.temperature.mode {temperature.mode}"
        if self.loss.alpha == 1.0:
            detail = f"{mode} learns from the teacher, but loss.alpha 1 gives the teacher no weight"
            raise ValueError(detail)
        if not temperature.looks_ahead:
            return self
        if not self._holds_out:
            detail = f"{mode} needs held-out text, but data.validation_fraction 0 holds nothing out"
            raise ValueError(detail)
        if self.train is not None and self.train.is_pure_bfloat16:
            raise ValueError(
                f"{mode} moves the weights a little to look ahead, which train.precision bf16_pure "
                "would round away: use train.precision bf16"
            )
        if self.train is not None and self.train.replays_graphs:
            raise ValueError(
                f"train.compile {self.train.compile} replays CUDA graphs, which overwrite "
                f"gradients that {mode} must keep: use train.compile default"
            )
        return self

    @model_validator(mode="after")
    def _profile_serves_loss(self) -> Self:
        # The profile of a sealed cache is in its manifest, which is read where the cache is.
        if not self.needs_cache or self.cache.fingerprint is not None:
            return self
        why = explain_unsupported(
            self.cache.profile,
            self.cache.range,
            self.loss.divergence,
            self.loss.temperatures,
            features=self.loss.features.weight > 0,
        )
        if why is not None:
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _teacher_runs_here_where_it_must(self) -> Self:
        why = self.explain_no_local_teacher()
        asking = {
            "student.from_teacher": self.cuts_teacher,
            "evaluation.teacher": self.evaluation.teacher,
        }
        for field, wanted in asking.items():
            if wanted and why is not None:
                raise ValueError(f"{field} needs a teacher with teacher.backend local, but {why}")
        return self

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.train is not None and self.train.order == "curriculum" and not self.needs_cache:
            raise ValueError(
                "train.order curriculum needs the teacher's entropy, but with loss.alpha 1 the job "
                "reads no teacher"
            )
        if self.evaluation.baseline and (self.student is None or self.train is None):
            missing = "student" if self.student is None else "train"
            raise ValueError(f"evaluation.baseline trains a student, but {missing} is not given")
        if (self.search is None) == ("search" in self.own_kind.needs):
            raise ValueError("search is required for kind search, and for no other kind")
        return self

    @model_validator(mode="after")
    def _remote_teacher_gives_its_best(self) -> Self:
        # Of several teachers one is enough: the others are checked one by one.
        proposes = any(each.proposal is not None for each in self.named_teachers.values())
        if proposes != (self.cache.sampled and self.cache.k is not None) and self.needs_cache:
            only, other = ("proposal", "cache.k") if proposes else ("k", "teacher.proposal")
            what = f"cache.profile {self.cache.profile} has no use for {only} without {other}"
            raise ValueError(f"{what}, which belong to profile threshold")
        if (served := self.served_teacher) is None:
            return self
        sglang = served.backend == "sglang"
        if sglang and self.cache.rules.needs_lm_head:
            return self
        if self.needs_cache and not self.cache.entries:
            raise ValueError(
                f"teacher.backend {served.backend} returns only the most probable tokens: set "
                f"cache.profile to topk, not {self.cache.profile}, "
                f"or {'to hidden' if sglang else 'set teacher.proposal and cache.k'}"
            )
        if proposes and self.cache.always_keep:
            raise ValueError("teacher.proposal draws all ids: set cache.always_keep to []")
        if self.loss.entropy_weighting:
            raise ValueError(
                f"teacher.backend {served.backend} returns no entropies, but "
                "loss.entropy_weighting weighs tokens by them"
            )
        return self

    @model_validator(mode="after")
    def _context_fits(self) -> Self:
        if self.teacher is None or not self.teacher.has_context:
            return self
        field = "teacher.context" if self.teacher.context else "teacher.system"
        learns_all = not self.data.assistant_only_loss
        asks = self.data.has_chats or self.data.format == "prompt_completion"
        refused = {
            "data.packing true: set it to auto or false, because a context belongs to one document":
                self.data.packing is True,
            "data.assistant_only_loss false: set it to true, because the teacher reads another "
            "prompt, whose tokens the student has not": asks and learns_all,
            "cache.extends: capture the whole text, because a cache does not hold the contexts of "
            "its teacher": self.cache.extends is not None,
            "evaluation.teacher: set it to false, because the report's teacher would read the "
            "student's prompts": self.evaluation.teacher,
        }  # fmt: skip
        if found := [what for what, is_so in refused.items() if is_so]:
            raise ValueError(f"{field} cannot be combined with {found[0]}")
        if self.teacher.system and not asks:
            raise ValueError(
                f"teacher.system needs chats, but data.format is {self.data.format}: write it into "
                "teacher.context, which comes before each text"
            )
        return self

    @model_validator(mode="after")
    def _text_or_a_sealed_cache(self) -> Self:
        if self.checks_cache:
            if self.cache.fingerprint is None:
                raise ValueError(
                    f"cache.fingerprint is required for kind {self.kind}: it names the sealed "
                    "cache to read"
                )
            return self
        if self.cache.fingerprint is not None and self.captures:
            raise ValueError(
                f"cache.fingerprint names a sealed cache, but kind {self.kind} captures one "
                "itself: use kind train"
            )
        # A sealed cache holds the text that it was captured from.
        if not self.data.train and self.cache.fingerprint is None:
            raise ValueError("data.train is required: files, folders, globs or dataset specs")
        return self
