"""The section ``cache``: what a cache keeps of the teacher's predictions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from cache.errors import StoreError
from cache.profiles.profile import Profile
from cache.profiles.table import PROFILES
from cache.remote.address import StoreAddress, is_bucket
from kd.config.section import Section

#: A whole fingerprint of a cache, the name of its folder.
FINGERPRINT_PATTERN = r"^[0-9a-f]{32}$"

#: What to do where a job asks for more than one sample of each tail of profile threshold.
_SMALLER = (
    ". Set a smaller cache.threshold: it makes less noise than several draws, and takes fewer bytes"
)


class TemperatureRange(Section):
    """The range of temperatures at which a cache is unbiased."""

    min: float = Field(0.5, ge=0.05, le=100.0)
    """Lowest temperature."""

    max: float = Field(2.0, ge=0.05, le=100.0)
    """Highest temperature."""

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if not self.min < self.max:
            raise ValueError(f"cache.temperatures.min {self.min:g} must be below max {self.max:g}")
        return self


class CacheConfig(Section):
    """The cache: which of the teacher's predictions it keeps, and how precisely."""

    profile: Literal["threshold", "tempered", "topk", "dense", "hidden"] = "threshold"
    """threshold = an unbiased sample of all probabilities, for temperature 1; tempered = probable
    tokens exact, the tail sampled without bias, for any temperature in a range; topk = the k most
    probable tokens and the total probability of the rest; dense = all log-probabilities; hidden =
    the teacher's last hidden state, exact at any temperature."""

    threshold: float = Field(0.04, ge=0.001, le=0.5)
    """Profiles threshold and tempered: tokens with a higher probability than this are kept by
    themselves, in tempered exactly, and the others are sampled. A smaller one means less noise and
    more bytes; at most 1/threshold + 1 entries per token, and as many again for tempered."""

    temperatures: TemperatureRange | None = None
    """Profile tempered: the range of temperatures to support; default 0.5 to 2."""

    always_keep: tuple[Annotated[int, Field(ge=0)], ...] = Field((), max_length=64)
    """Profiles threshold and tempered: token ids whose probability is kept at every
    position, for example end of sequence and tool calls. The probability of the true next token is
    always kept."""

    draws: int = Field(1, ge=1, le=64)
    """Profile tempered: samples of the tail at every position. Epoch e reads sample e modulo draws,
    so that a student does not memorise one sample over several epochs. For profile threshold a
    smaller threshold gives more for fewer bytes."""

    k: int | None = Field(None, ge=1, le=4096)
    """Profile topk: entries kept; default 64. Profile threshold with teacher.proposal: ids that the
    server scores at each position, for example 128."""

    dtype: Literal["auto", "float16", "float32", "int8", "int16"] = "auto"
    """Precision of profiles dense (float16 or float32, auto = float16) and hidden (int8 or int16,
    auto = int16). int8 takes a little more than half the space of int16; its log-probabilities have
    an error of some hundredths of a nat."""

    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of the tail's samples."""

    shard_sequences: int = Field(256, ge=1, le=65536)
    """Sequences per shard. A shard is written as a whole; a capture resumes after the last complete
    shard."""

    fidelity: Literal["refuse", "warn"] = "refuse"
    """What happens if the records of a finished capture differ from the teacher by more than the
    teacher's own noise and the profile explain. refuse = the capture fails; warn = the cache is
    sealed with this result in its manifest, and every job that uses it warns."""

    extends: str | None = Field(None, pattern=FINGERPRINT_PATTERN)
    """A sealed cache of the same teacher and settings whose text is the beginning of this job's
    text. Its complete shards of training sequences are used without a copy, and only the new text
    is captured."""

    fingerprint: str | None = Field(None, pattern=FINGERPRINT_PATTERN)
    """Kind train: the sealed cache to train from, for example an imported one; its text replaces
    data."""

    store: str | None = Field(None, max_length=1024)
    """Where the cache is stored: a folder, or an S3 bucket, s3://bucket/prefix. Null = KD_STORE, or
    else the folder caches of KD_HOME. The bytes and the fingerprint of the cache do not depend on
    it."""

    @property
    def named(self) -> dict[str, str]:
        """The caches that the section names, by field."""
        fields = {"fingerprint": self.fingerprint, "extends": self.extends}
        return {field: name for field, name in fields.items() if name is not None}

    @property
    def rules(self) -> Profile:
        """The rules of the profile."""
        return PROFILES[self.profile]

    @property
    def sampled(self) -> bool:
        """Whether the profile samples the tail."""
        return self.rules.sampled

    @property
    def range(self) -> tuple[float, ...]:
        """Lowest and highest temperature, for profile tempered; empty for others."""
        if "temperatures" not in self.rules.options:
            return ()
        span = self.temperatures or TemperatureRange()
        return (span.min, span.max)

    @property
    def entries(self) -> int:
        """Entries per position of profile topk, or ids that a server scores; 0 for others."""
        return self.k or (64 if "k" in self.rules.options and not self.sampled else 0)

    @property
    def bits(self) -> int:
        """Bits of each stored number, for profiles dense and hidden; 0 for others."""
        return self.rules.dtypes.get(self.dtype, 0)

    @field_validator("store")
    @classmethod
    def _names_a_place(cls, store: str | None) -> str | None:
        if store is not None and is_bucket(store):
            try:
                return str(StoreAddress.parse(store))
            except StoreError as error:
                raise ValueError(str(error)) from None
        if store is not None and not store.strip():
            raise ValueError("cache.store must name a folder or a bucket")
        return store

    @model_validator(mode="after")
    def _profile_has_its_options(self) -> Self:
        # Only an option that a job sets, and not to its default, is an error: a job that a report
        # prints holds every default.
        own = self.rules.options
        options = frozenset[str]().union(*(each.options for each in PROFILES.values()))
        strange = sorted(self.model_fields_set & options - own)
        fields = type(self).model_fields
        if given := [name for name in strange if getattr(self, name) != fields[name].default]:
            instead = "" if "draws" not in given or not self.rules.dithered else _SMALLER
            raise ValueError(
                f"cache.profile {self.profile} has no use for {', '.join(given)}; "
                f"it takes {', '.join(sorted(own))}{instead}"
            )
        # The field takes the dtypes of both profiles; each profile has only some of them.
        if self.rules.dtypes and self.dtype not in self.rules.dtypes:
            known = ", ".join(self.rules.dtypes)
            raise ValueError(
                f"cache.dtype of profile {self.profile} must be one of {known}, but got "
                f"{self.dtype}"
            )
        if len(set(self.always_keep)) != len(self.always_keep):
            raise ValueError("cache.always_keep names a token twice")
        if self.extends is not None and self.fingerprint is not None:
            raise ValueError(
                "cache.extends is for a capture, and cache.fingerprint names a cache that is "
                "captured already"
            )
        return self
