"""What a cache is: the identity that names its folder, and the manifest that completes it.

CacheIdentity          everything the bytes of the records depend on; its fingerprint names the folder
├── teacher            TeacherIdentity     weights by content, and the dtype they ran in
├── tokenizer          TokenizerIdentity   by content
├── data               DataIdentity        tokens by content, and how they were cut
└── codec              CodecIdentity       what is kept of the teacher, and with which random numbers
Manifest
├── identity           CacheIdentity
├── provenance         Provenance          names for people, and what checks a student's tokenizer
├── shards             one ShardEntry each, in order
├── head               FolderEntry         the teacher's LM head, in a hidden cache
└── fidelity           one FidelityRow a temperature: how close the records are to the live teacher
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cache.codec import SMALLEST_THRESHOLD, Codec
from cache.errors import CacheCorrupt, CacheMismatch
from cache.profiles import PROFILES

FORMAT = "potstill-cache"
#: Version of the folder's layout: a reader refuses what is newer.
FORMAT_VERSION = 2
#: Version of sampling and rounding: part of the identity, because it changes the bytes.
CODEC_VERSION = 2
#: The same of hidden states in int8, which since then are kept as cosines.
COSINES_VERSION = 3
#: Bits that a number of these profiles may have.
_BITS = {"dense": (16, 32), "hidden": (8, 16)}


def codec_version(profile: str, bits: int) -> int:
    """The codec version that this program writes and reads, for records of ``profile`` with numbers of ``bits``."""
    return COSINES_VERSION if (profile, bits) == ("hidden", 8) else CODEC_VERSION


@dataclass(frozen=True)
class TeacherIdentity:
    """The teacher: sha256 of its weights, and the dtype of its forward pass."""

    model_sha256: str
    dtype: str


@dataclass(frozen=True)
class TokenizerIdentity:
    """The tokenizer: its vocabulary size, and sha256 of its content."""

    vocabulary_size: int
    sha256: str


@dataclass(frozen=True)
class DataIdentity:
    """The sequences: sha256 of the text, tokens a sequence, packed or not, and how many of each split."""

    sha256: str
    sequence_length: int
    packing: bool
    train_sequences: int
    validation_sequences: int

    @property
    def sequences(self) -> int:
        """Sequences of both splits: training first, then validation."""
        return self.train_sequences + self.validation_sequences


@dataclass(frozen=True)
class CodecIdentity:
    """What is kept, and with which random numbers; fields that a profile does not use are 0 or empty.

    ``threshold`` is a probability; ``temperatures`` the range (T min, T max) of profile tempered; ``always_keep`` the
    ids kept at every position; ``draws`` the independent tail samples of each; ``k`` and ``bits`` the size of topk and
    the precision of dense and hidden; a ``version`` of 0 becomes the present one. Raises ``ValueError`` for a profile
    that does not exist or a number out of range.
    """

    profile: str
    threshold: float = 0.0
    temperatures: tuple[float, ...] = ()
    always_keep: tuple[int, ...] = ()
    draws: int = 1
    k: int = 0
    bits: int = 0
    seed: int = 0
    shard_sequences: int = 256
    version: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.version or codec_version(self.profile, self.bits))
        if self.profile not in PROFILES:
            raise ValueError(f"codec.profile must be one of {', '.join(PROFILES)}, but got {self.profile!r}.")
        if PROFILES[self.profile].sampled and not SMALLEST_THRESHOLD <= self.threshold < 1:
            raise ValueError(f"codec.threshold must lie in [1/1000, 1), but got {self.threshold:g}.")
        if self.profile == "tempered" and not (
            len(self.temperatures) == 2 and 0 < self.temperatures[0] < self.temperatures[1]
        ):
            raise ValueError(f"codec.temperatures must be a range above 0, but got {self.temperatures}.")
        if self.profile == "topk" and self.k < 1:
            raise ValueError(f"codec.k must be at least 1, but got {self.k}.")
        if self.profile in _BITS and self.bits not in _BITS[self.profile]:
            raise ValueError(f"codec.bits of {self.profile} must be one of {_BITS[self.profile]}, but got {self.bits}.")
        if len(set(self.always_keep)) != len(self.always_keep) or min(self.always_keep, default=0) < 0:
            raise ValueError(f"codec.always_keep must name tokens, each once, but got {self.always_keep}.")
        if self.shard_sequences < 1 or not 0 <= self.seed < 2**64 or not 1 <= self.draws <= 64:
            got = f"{self.shard_sequences}, {self.seed} and {self.draws}"
            rule = "codec.shard_sequences must be at least 1, codec.seed in [0, 2^64) and codec.draws in [1, 64]"
            raise ValueError(f"{rule}, but got {got}.")

    def record_codec(self, vocabulary_size: int) -> Codec:
        """The codec of records over ``vocabulary_size`` tokens."""
        return Codec(
            profile=self.profile,
            vocabulary_size=vocabulary_size,
            seed=self.seed,
            threshold=self.threshold,
            temperatures=self.temperatures,
            always_keep=self.always_keep,
            draws=self.draws,
            k=self.k,
            bits=self.bits,
        )


@dataclass(frozen=True)
class CacheIdentity:
    """Everything that the bytes of a cache depend on."""

    teacher: TeacherIdentity
    tokenizer: TokenizerIdentity
    data: DataIdentity
    codec: CodecIdentity

    @property
    def fingerprint(self) -> str:
        """The cache's name: the first 32 hex digits of the sha256 of the identity's canonical JSON."""
        return hashlib.sha256(canonical_json(self.to_json())).hexdigest()[:32]

    @property
    def shard_count(self) -> int:
        """Shards of the complete cache; the last may be shorter."""
        return math.ceil(self.data.sequences / self.codec.shard_sequences)

    def shard_range(self, index: int) -> range:
        """The numbers of the sequences in shard ``index``."""
        start = index * self.codec.shard_sequences
        return range(start, min(start + self.codec.shard_sequences, self.data.sequences))

    def record_codec(self) -> Codec:
        """The codec that writes and reads this cache's records."""
        return self.codec.record_codec(self.tokenizer.vocabulary_size)

    def to_json(self) -> dict[str, Any]:
        """The identity as plain JSON values; ``from_json`` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: object) -> CacheIdentity:
        """Parse strictly, as ``parse`` does; the inverse of ``to_json``."""
        identity: CacheIdentity = parse(cls, document, "identity")
        return identity


def differences(expected: CacheIdentity, got: CacheIdentity) -> list[str]:
    """One line for each differing field, such as ``data.sequence_length: expected 512, got 256``."""
    wanted, found = _flat(expected.to_json()), _flat(got.to_json())
    return [f"{name}: expected {value}, got {found[name]}" for name, value in wanted.items() if found[name] != value]


@dataclass(frozen=True)
class Probe:
    """A text and the ids that the cache's tokenizer gives it: a student's tokenizer must agree."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Provenance:
    """What no byte of the records depends on: names for people, and what checks a student's tokenizer."""

    teacher_name: str = ""
    teacher_revision: str = ""
    probes: tuple[Probe, ...] = ()
    special_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the manifest: counts, bytes on disk with its seal, and the digest of its seal."""

    sequences: int
    positions: int
    head_entries: int
    tail_entries: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class FolderEntry:
    """The folder of the teacher's LM head in the manifest: bytes on disk with its seal, and the seal's digest."""

    bytes: int = 0
    digest: str = ""


@dataclass(frozen=True)
class FidelityRow:
    """How close the records are to the live teacher at one temperature, on ``positions`` sampled positions.

    ``kept_mass`` mean probability of the tokens whose value is stored, ``kept_error`` the mean sum of what they differ
    in; ``kl`` mean KL(live || decoded) in nats, what is not stored as one bucket, None where a sample stands for it;
    ``bias_z`` the largest z of the mean of redrawn samples, ``stored_z`` of the stored ones, None where nothing is
    drawn; ``gold_error`` mean |p decoded / p live - 1| of the next token; ``top1_agreement`` share of positions with
    the same most probable token, or one that ties with it within what is stored, None where no record knows it;
    ``entropy_error`` mean decoded minus live entropy in nats.
    """

    temperature: float
    positions: int
    kept_mass: float
    kept_error: float
    kl: float | None
    bias_z: float | None
    stored_z: float | None
    gold_error: float
    top1_agreement: float | None
    entropy_error: float


@dataclass(frozen=True)
class Manifest:
    """A complete cache. Written last, so its presence means that every shard is there."""

    identity: CacheIdentity
    provenance: Provenance
    shards: tuple[ShardEntry, ...]
    head: FolderEntry = FolderEntry()
    fidelity: tuple[FidelityRow, ...] = ()

    @property
    def positions(self) -> int:
        """Positions with a record."""
        return sum(shard.positions for shard in self.shards)

    @property
    def entries(self) -> int:
        """Head and tail entries of all records."""
        return sum(shard.head_entries + shard.tail_entries for shard in self.shards)

    def to_bytes(self) -> bytes:
        """The file, with a digest of itself; ``from_bytes`` is its inverse."""
        return signed_json({"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Parse strictly; ``where`` names the file in errors.

        Raises ``CacheMismatch`` for another version, ``CacheCorrupt`` for anything else that was not written so.
        """
        document = _json_object(data, where)
        if document.get("format") == FORMAT:
            _refuse_other("format", document.get("version"), FORMAT_VERSION, where)
        content = verified_json(data, where)
        _require(content.pop("format", None) == FORMAT, where, f"format must be {FORMAT!r}")
        _require(content.pop("version", None) == FORMAT_VERSION, where, f"version must be {FORMAT_VERSION}")
        manifest: Manifest = parse(cls, content, where)
        codec = manifest.identity.codec
        _refuse_other("codec", codec.version, codec_version(codec.profile, codec.bits), where)
        expected = [len(manifest.identity.shard_range(index)) for index in range(manifest.identity.shard_count)]
        _require([shard.sequences for shard in manifest.shards] == expected, where, "shards must hold every sequence")
        return manifest


def canonical_json(document: object) -> bytes:
    """The one spelling of a JSON document: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def signed_json(document: dict[str, Any]) -> bytes:
    """The canonical JSON of ``document`` and of its own sha256 under the key ``digest``."""
    return canonical_json({**document, "digest": hashlib.sha256(canonical_json(document)).hexdigest()})


def verified_json(data: bytes, where: str) -> dict[str, Any]:
    """The document in ``data`` without its digest; raises ``CacheCorrupt`` unless every byte is as it was signed."""
    document = _json_object(data, where)
    digest = document.pop("digest", None)
    try:
        genuine = signed_json(document) == data
    except ValueError:  # a flipped bit can turn a number into an infinity, which has no spelling
        genuine = False
    _require(genuine, where, f"its content must match its own digest {digest}")
    return document


def _json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CacheCorrupt(
            f"{where} is not JSON: {error}.", "Delete the cache's folder and capture it again."
        ) from error
    _require(isinstance(document, dict), where, "it must be a JSON object")
    return dict(document)


def _refuse_other(what: str, version: object, ours: int, where: str) -> None:
    if isinstance(version, int) and version > ours:
        detail = f"{where}: {what} version {version} is newer than {ours}, the newest this program reads."
        raise CacheMismatch(detail, "Upgrade Potstill, or capture the cache again with this version.")
    if isinstance(version, int) and 1 <= version < ours:
        detail = f"{where}: {what} version {version} is older than {ours}, the oldest this program reads."
        raise CacheMismatch(detail, "Capture the cache again with this version, and delete the old one.")


def _require(holds: bool, where: str, rule: str) -> None:
    if not holds:
        raise CacheCorrupt(f"{where} was damaged: {rule}.", "Delete the cache's folder and capture it again.")


def parse(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``: a dataclass, a tuple or dict of one kind, or a plain JSON type.

    Raises ``CacheCorrupt`` naming the first field that is missing, unknown or of a wrong type.
    """
    if is_dataclass(kind):
        return _parse_dataclass(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        _require(isinstance(value, list), where, "it must be a list")
        return tuple(parse(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is dict:
        _require(isinstance(value, dict), where, "it must be an object")
        return {key: parse(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is UnionType:  # only ``kind | None``
        return None if value is None else parse(arguments[0], value, where)
    _require(type(value) is kind, where, f"it must be of type {kind.__name__}, but got {value!r}")
    return value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _parse_dataclass(kind: Any, value: Any, where: str) -> Any:
    names = {item.name for item in fields(kind)}
    _require(isinstance(value, dict), where, "it must be an object")
    _require(set(value) == names, where, f"fields must be {sorted(names)}, but got {sorted(value)}")
    hints = _hints(kind)
    parsed = {name: parse(hints[name], value[name], f"{where}.{name}") for name in names}
    try:
        return kind(**parsed)
    except ValueError as error:
        raise CacheCorrupt(f"{where}: {error}", "Delete the cache's folder and capture it again.") from error


def _flat(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one level with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
