"""The identity that names the folder of a cache, and the manifest that completes it.

CacheIdentity          all that the bytes of the records depend on; its fingerprint names the folder
├── teacher            TeacherIdentity     weights by content, their dtype and their quantisation
├── tokenizer          TokenizerIdentity   by content
├── data               DataIdentity        text by content, and how it was cut into sequences
└── codec              CodecIdentity       what is kept of the teacher, and the seed of sampling
Manifest
├── identity           CacheIdentity
├── provenance         Provenance          names for people, and what checks a student's tokenizer
├── shards             one ShardEntry for each shard, in order; empty if they are in pieces
├── head               FolderEntry         the teacher's LM head, in a hidden cache
├── fidelity           one FidelityRow for each temperature: closeness to the live teacher
├── token_map          FolderEntry         the tokens of all ids; empty in a cache of format 2
├── overruled          FidelityOverride    the verdict that the job overruled; from format 4 on
├── tail_mean          FolderEntry         the mean tail of profile threshold; from format 5 on
├── pieces             PieceIndex          files with the entries of many shards; from format 6 on
├── first_tails        FolderEntry         sums for a cache that extends this one; from format 7 on
├── dither             FolderEntry         the tables of profile threshold; from format 8 on
└── served             ServedTest          the test of a teacher's server; from format 9 on
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cache.codec import Codec
from cache.errors import CacheCorrupt, CacheMismatch
from cache.json_object import Json
from cache.profiles.table import PROFILES
from cache.shards.entries import PieceIndex, ShardEntry, ShardTotals

FORMAT = "potstill-cache"
#: Newest version of the folder's layout: a cache whose teacher read a context, or whose server was
#: tested. A cache has the lowest version that describes it, so a program which does not know of
#: a part refuses the cache by name.
FORMAT_VERSION = 9
#: The version of a cache with tables of dither.
DITHER_FORMAT_VERSION = 8
#: The version of a cache with the sums of its first tails.
FIRST_TAILS_FORMAT_VERSION = 7
#: The version of a cache of many shards, whose entries are in pieces.
PIECES_FORMAT_VERSION = 6
#: The version of a cache with a mean tail, or of a teacher that was quantised or spread over
#: devices.
TAIL_MEAN_FORMAT_VERSION = 5
#: The version of a cache with an overruled verdict.
OVERRULED_FORMAT_VERSION = 4
#: The version of all other caches.
PLAIN_FORMAT_VERSION = 3
#: The oldest version that this program reads. A cache of it has no token map.
OLDEST_FORMAT_VERSION = 2
#: Version of sampling and rounding. It is part of the identity, because it changes the bytes.
CODEC_VERSION = 2
#: Codec version of hidden states in int8, which are stored as cosines.
COSINES_VERSION = 3
#: Added to the codec version of a teacher in half precision, because its logits are now sums in
#: float32. A cache without it holds logits that were rounded to the teacher's dtype.
WIDE_LOGITS = 2
_HALF_DTYPES = ("bfloat16", "float16")
#: The fields of an identity that are left out where they are empty: caches that could be captured
#: before there was such a field keep their fingerprint.
_LEFT_OUT = {
    "teacher": ("quantization", "parallel", "server", "proposal"),
    "data": ("context_sha256",),
    "codec": ("clusters", "fitted", "entropies"),
}
#: The folders that a manifest leaves out where the cache does not have them.
_LEFT_OUT_FOLDERS = ("tail_mean", "first_tails", "dither")
#: The results of checks that it leaves out where there are none.
_LEFT_OUT_VERDICTS = ("overruled", "served")
_REMEDY = "Delete the cache's folder and capture it again."


def choose_codec_version(profile: str, bits: int, dtype: str = "") -> int:
    """Choose the codec version that this program writes for a profile and its teacher's dtype."""
    cosines = profile in PROFILES and Codec(profile, 0, bits=bits).cosines
    version = COSINES_VERSION if cosines else CODEC_VERSION
    return version + WIDE_LOGITS if dtype in _HALF_DTYPES else version


@dataclass(frozen=True)
class TeacherIdentity:
    """The teacher: sha256 of its weights as they are stored, and the dtype of its forward pass.

    ``quantization`` names how its weights were quantised when they were loaded
    (docs/formats.md), and ``parallel`` says how they were spread over several
    devices; each is empty if they were not. If a server scored ids, or is SGLang, ``server`` is its
    kind and version, and ``proposal`` the sha256 and the dtype of the model that drew the ids.
    """

    model_sha256: str
    dtype: str
    quantization: str = ""
    parallel: str = ""
    server: str = ""
    proposal: str = ""

    @property
    def plain(self) -> bool:
        """True if the weights were used as they are stored, on one device."""
        return not self.quantization and not self.parallel

    def describe_precision(self) -> str:
        """Return precision and spread in words, such as ``bfloat16, weights in int8``."""
        rounded = f", weights in {self.quantization}" if self.quantization else ""
        return self.dtype + rounded + (f", spread by {self.parallel}" if self.parallel else "")


@dataclass(frozen=True)
class TokenizerIdentity:
    """The tokenizer: its vocabulary size, and sha256 of its content."""

    vocabulary_size: int
    sha256: str


@dataclass(frozen=True)
class DataIdentity:
    """The sequences: sha256 of the text, length, packed or not, and the number in each split.

    ``context_sha256`` is that of the sequences with those which the teacher read in their place,
    side by side; empty if it read the same ones.
    """

    sha256: str
    sequence_length: int
    packing: bool
    train_sequences: int
    validation_sequences: int
    context_sha256: str = ""

    @property
    def sequences(self) -> int:
        """Number of sequences of both splits."""
        return self.train_sequences + self.validation_sequences


@dataclass(frozen=True)
class CodecIdentity:
    """The stored part of the teacher, and the seed; unused fields of a profile are 0 or empty.

    ``threshold`` is a probability; ``temperatures`` the range (T min, T max) of profile tempered;
    ``always_keep`` the ids that every record keeps; ``draws`` the number of tail samples of each
    position; ``k`` the entries of topk, or the ids that a server scored; ``bits`` the precision of
    dense and hidden. ``clusters`` is the number of the tables of profile threshold, which the first
    ``fitted`` sequences make, and ``entropies`` says that it keeps the entropy of each position. A
    ``version`` of 0 becomes the present one. Raises ``ValueError`` for a profile that does not
    exist or a number out of range.
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
    clusters: int = 0
    fitted: int = 0
    entropies: bool = False

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ValueError(
                f"codec.profile must be one of {', '.join(PROFILES)}, but got {self.profile!r}."
            )
        version = self.version or choose_codec_version(self.profile, self.bits)
        object.__setattr__(self, "version", version)
        codec = self.record_codec(0)
        if fault := codec.rules.find_fault(codec):
            raise ValueError(fault)
        kept = self.always_keep
        if len(set(kept)) != len(kept) or min(kept, default=0) < 0:
            raise ValueError(f"codec.always_keep must name tokens, each once, but got {kept}.")
        if self.shard_sequences < 1 or not 0 <= self.seed < 2**64 or not 1 <= self.draws <= 64:
            got = f"{self.shard_sequences}, {self.seed} and {self.draws}"
            raise ValueError(
                "codec.shard_sequences must be at least 1, codec.seed in [0, 2^64) "
                f"and codec.draws in [1, 64], but got {got}."
            )

    def record_codec(self, vocabulary_size: int) -> Codec:
        """Build the codec of records over ``vocabulary_size`` tokens."""
        names = {each.name for each in fields(Codec)} - {"vocabulary_size"}
        own = {name: getattr(self, name) for name in names}
        return Codec(vocabulary_size=vocabulary_size, **own)


@dataclass(frozen=True)
class CacheIdentity:
    """Everything that the bytes of a cache depend on."""

    teacher: TeacherIdentity
    tokenizer: TokenizerIdentity
    data: DataIdentity
    codec: CodecIdentity

    @property
    def fingerprint(self) -> str:
        """The cache's name: the first 32 hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(encode_canonical_json(self.to_json())).hexdigest()[:32]

    @property
    def shard_count(self) -> int:
        """Number of shards of the complete cache; the last may be shorter."""
        return math.ceil(self.data.sequences / self.codec.shard_sequences)

    @property
    def lasting_shards(self) -> int:
        """Number of first shards that are the same in a cache of a text that goes on.

        They are whole, and hold only training sequences. The last training sequence is in none of
        them: it may be padded, and a longer text would fill it.
        """
        return max(self.data.train_sequences - 1, 0) // self.codec.shard_sequences

    def shard_range(self, index: int) -> range:
        """Return the numbers of the sequences in shard ``index``."""
        start = index * self.codec.shard_sequences
        return range(start, min(start + self.codec.shard_sequences, self.data.sequences))

    def record_codec(self) -> Codec:
        """Build the codec that writes and reads the records of this cache."""
        return self.codec.record_codec(self.tokenizer.vocabulary_size)

    def to_json(self) -> Json:
        """Return the identity as plain JSON values; ``from_json`` is the inverse."""
        document = asdict(self)
        for part, names in _LEFT_OUT.items():
            for name in names:
                if not document[part][name]:
                    del document[part][name]
        return document

    @classmethod
    def from_json(cls, document: object) -> CacheIdentity:
        """Parse strictly, as ``parse_as`` does; the inverse of ``to_json``."""
        identity: CacheIdentity = parse_as(cls, _add_left_out(document), "identity")
        return identity


def _add_left_out(identity: object) -> object:
    """Return the JSON of an identity with the fields that ``to_json`` leaves out."""
    if not isinstance(identity, dict):
        return identity
    added = dict(identity)
    parts = (("teacher", TeacherIdentity), ("data", DataIdentity), ("codec", CodecIdentity))
    for part, kind in parts:
        if isinstance(added.get(part), dict):
            empty = {
                each.name: each.default for each in fields(kind) if each.name in _LEFT_OUT[part]
            }
            added[part] = {**empty, **added[part]}
    return added


def list_differences(expected: CacheIdentity, got: CacheIdentity) -> list[str]:
    """List the differing fields, such as ``data.sequence_length: expected 512, got 256``."""
    wanted = flatten(asdict(expected))
    found = flatten(asdict(got))
    return [
        f"{name}: expected {value}, got {found[name]}"
        for name, value in wanted.items()
        if found[name] != value
    ]


@dataclass(frozen=True)
class TokenizerProbe:
    """A text and its ids from the cache's tokenizer: a student's tokenizer must return the same."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Provenance:
    """Facts that the records do not depend on: names for people, and checks of a tokenizer."""

    teacher_name: str = ""
    teacher_revision: str = ""
    probes: tuple[TokenizerProbe, ...] = ()
    special_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedTeacher:
    """What a cache says of its teacher.

    ``name`` and ``revision`` are those of the job that captured it, for people and for finding its
    files again; each may be empty. ``identity`` tells whether found files are the captured ones.
    """

    name: str
    revision: str
    identity: TeacherIdentity


@dataclass(frozen=True)
class FolderEntry:
    """A folder of arrays in the manifest: bytes on disk with the seal, and the seal's digest.

    Both are empty if the cache has no such folder.
    """

    bytes: int = 0
    digest: str = ""


@dataclass(frozen=True)
class FidelityRow:
    """How close the records are to the live teacher at one temperature, on sampled ``positions``.

    ``kept_mass``       mean sum of the probabilities whose values are stored
    ``kept_error``      mean sum of their absolute errors
    ``kl``              mean KL(live || decoded) in nats, with all tokens that are not stored as one
                        bucket; None if a sample stands for them
    ``bias_z``          largest z of the mean of redrawn samples; None if nothing is drawn
    ``stored_z``        largest z of the mean of stored samples; None if nothing is drawn
    ``gold_error``      mean |p decoded / p live - 1| of the next token
    ``top1_agreement``  share of positions with the same most probable token, or one whose stored
                        value ties with it; None if no record contains it
    ``entropy_error``   mean decoded minus live entropy in nats
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
class FidelityOverride:
    """The verdict on a cache that differs from its teacher, and the field that overruled it.

    ``noise``: the teacher's own noise as measured, in nats. ``problems``: one line for each value
    that was out of bounds. ``field``: the job's field and its value.
    """

    noise: float
    problems: tuple[str, ...]
    field: str

    def to_json(self) -> Json:
        """Return the verdict as plain JSON values."""
        return {**asdict(self), "problems": list(self.problems)}

    def describe(self) -> str:
        """Return the verdict as one sentence."""
        return (
            f"The records of this cache differ from the teacher, and {self.field} accepted them: "
            f"{'; '.join(self.problems)}. The teacher's own noise was {self.noise:.3g} nats."
        )


@dataclass(frozen=True)
class ServedTest:
    """The test of a teacher's server before the capture.

    ``requests`` equal ones gave log-probabilities that differ by ``spread`` nats at most, a root
    mean square under the teacher's p.
    """

    requests: int
    spread: float


@dataclass(frozen=True)
class Manifest:
    """The description of a complete cache. It is written last, so with it every shard exists.

    The entries of the shards are either in ``shards`` or in ``pieces``;
    ``cache.shards.manifest_pieces.open_entries`` reads both.
    """

    identity: CacheIdentity
    provenance: Provenance
    shards: tuple[ShardEntry, ...]
    head: FolderEntry = FolderEntry()
    fidelity: tuple[FidelityRow, ...] = ()
    token_map: FolderEntry = FolderEntry()
    overruled: FidelityOverride | None = None
    tail_mean: FolderEntry = FolderEntry()
    pieces: PieceIndex | None = None
    first_tails: FolderEntry = FolderEntry()
    dither: FolderEntry = FolderEntry()
    served: ServedTest | None = None

    @property
    def teacher(self) -> RecordedTeacher:
        """The teacher: name and revision from the provenance, the rest from the identity."""
        known = self.provenance
        return RecordedTeacher(known.teacher_name, known.teacher_revision, self.identity.teacher)

    @property
    def totals(self) -> ShardTotals:
        """The sums over all shards."""
        return ShardTotals.of(self.shards) if self.pieces is None else self.pieces.totals

    @property
    def positions(self) -> int:
        """Number of positions with a record."""
        return self.totals.positions

    @property
    def entries(self) -> int:
        """Number of head and tail entries of all records."""
        totals = self.totals
        return totals.head_entries + totals.tail_entries

    def to_bytes(self) -> bytes:
        """Encode the manifest's file, with a digest of itself; ``from_bytes`` is the inverse."""
        content = {**asdict(self), "identity": self.identity.to_json()}
        for name in _LEFT_OUT_VERDICTS:
            if content[name] is None:
                del content[name]
        for name in _LEFT_OUT_FOLDERS:
            if not content[name]["digest"]:
                del content[name]
        del content["shards" if self.pieces else "pieces"]
        return sign_json({"format": FORMAT, "version": self._choose_version(), **content})

    def _choose_version(self) -> int:
        newest = (self.identity.data.context_sha256, self.identity.teacher.server, self.served)
        if any(newest):
            return FORMAT_VERSION
        if self.dither.digest:
            return DITHER_FORMAT_VERSION
        if self.first_tails.digest:
            return FIRST_TAILS_FORMAT_VERSION
        if self.pieces is not None:
            return PIECES_FORMAT_VERSION
        if not self.identity.teacher.plain or self.tail_mean.digest:
            return TAIL_MEAN_FORMAT_VERSION
        return PLAIN_FORMAT_VERSION if self.overruled is None else OVERRULED_FORMAT_VERSION

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Parse strictly; ``where`` names the file in errors.

        Raises ``CacheMismatch`` for another version, and ``CacheCorrupt`` unless every byte is as
        it was written.
        """
        # The version comes first: another version may sign or lay out its manifest differently.
        document = _parse_json_object(data, where)
        if document.get("format") == FORMAT:
            versions = range(OLDEST_FORMAT_VERSION, FORMAT_VERSION + 1)
            _refuse_other_version("format", document.get("version"), versions, where)
        content = verify_json(data, where)
        _require(content.pop("format", None) == FORMAT, where, f"format must be {FORMAT!r}")
        version = content.pop("version", None)
        _require(type(version) is int and version > 0, where, f"version must be {FORMAT_VERSION}")
        if version == OLDEST_FORMAT_VERSION:
            content["token_map"] = asdict(FolderEntry())
        for name in _LEFT_OUT_VERDICTS:
            if name != "overruled" or version != OVERRULED_FORMAT_VERSION:
                content.setdefault(name, None)
        for name in _LEFT_OUT_FOLDERS:
            content.setdefault(name, asdict(FolderEntry()))
        other = "shards" if version == PIECES_FORMAT_VERSION else "pieces"
        if version >= FIRST_TAILS_FORMAT_VERSION:
            other = "shards" if "pieces" in content else "pieces"
        _require(other not in content, where, f"version {version} must have no {other}")
        content[other] = [] if other == "shards" else None
        content["identity"] = _add_left_out(content.get("identity"))
        manifest: Manifest = parse_as(cls, content, where)
        codec = manifest.identity.codec
        oldest = choose_codec_version(codec.profile, codec.bits)
        newest = choose_codec_version(codec.profile, codec.bits, manifest.identity.teacher.dtype)
        readable = range(oldest, newest + 1, WIDE_LOGITS)
        _refuse_other_version("codec", manifest.identity.codec.version, readable, where)
        _require(manifest._holds_every_sequence(), where, "shards must hold every sequence")
        return manifest

    def _holds_every_sequence(self) -> bool:
        """Return whether the entries are those of the shards that the identity has."""
        identity = self.identity
        if self.pieces is not None:
            size = self.pieces.piece_shards
            counts = (self.pieces.totals.shards, self.pieces.totals.sequences)
            return (
                size > 0
                and counts == (identity.shard_count, identity.data.sequences)
                and len(self.pieces.sha256) == math.ceil(identity.shard_count / size)
            )
        return len(self.shards) == identity.shard_count and all(
            entry.sequences == len(identity.shard_range(index))
            for index, entry in enumerate(self.shards)
        )


def encode_canonical_json(document: object) -> bytes:
    """Encode a JSON document in its one canonical form: sorted keys, no spaces, ASCII, no NaN."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def sign_json(document: Json) -> bytes:
    """Encode ``document`` as canonical JSON, with its own sha256 under the key ``digest``."""
    digest = hashlib.sha256(encode_canonical_json(document)).hexdigest()
    return encode_canonical_json({**document, "digest": digest})


def verify_json(data: bytes, where: str) -> Json:
    """Return the document in ``data`` without its digest.

    Raises ``CacheCorrupt`` unless every byte is as it was signed.
    """
    document = _parse_json_object(data, where)
    digest = document.pop("digest", None)
    try:
        genuine = sign_json(document) == data
    except ValueError:
        # A flipped bit can turn a number into an infinity, which canonical JSON does not have.
        genuine = False
    _require(genuine, where, f"its content must match its own digest {digest}")
    return document


def _parse_json_object(data: bytes, where: str) -> Json:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CacheCorrupt(f"{where} is not JSON: {error}.", _REMEDY) from error
    _require(isinstance(document, dict), where, "it must be a JSON object")
    return dict(document)


def _refuse_other_version(what: str, version: object, ours: range, where: str) -> None:
    if isinstance(version, int) and version > ours[-1]:
        raise CacheMismatch(
            f"{where}: {what} version {version} is newer than {ours[-1]}, "
            "the newest this program reads.",
            "Upgrade Potstill, or capture the cache again with this version.",
        )
    if isinstance(version, int) and 1 <= version < ours[0]:
        raise CacheMismatch(
            f"{where}: {what} version {version} is older than {ours[0]}, "
            "the oldest this program reads.",
            "Capture the cache again with this version, and delete the old one.",
        )


def _require(holds: bool, where: str, rule: str) -> None:
    if not holds:
        raise CacheCorrupt(f"{where} was damaged: {rule}.", _REMEDY)


def parse_as(kind: Any, value: Any, where: str) -> Any:
    """Parse ``value`` as ``kind``: a dataclass, a tuple or dict of one kind, or a plain JSON type.

    Raises ``CacheCorrupt`` that names a field which is missing, unknown or of a wrong type.
    """
    if is_dataclass(kind):
        return _parse_dataclass(kind, value, where)
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is tuple:
        _require(isinstance(value, list), where, "it must be a list")
        return tuple(
            parse_as(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value)
        )
    if origin is dict:
        _require(isinstance(value, dict), where, "it must be an object")
        return {key: parse_as(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    # The only unions here are ``kind | None``.
    if origin is UnionType:
        return None if value is None else parse_as(arguments[0], value, where)
    # Not isinstance: a bool is an int, and would be taken for one.
    _require(type(value) is kind, where, f"it must be of type {kind.__name__}, but got {value!r}")
    return value


_get_hints = functools.cache(get_type_hints)


def _parse_dataclass(kind: Any, value: Any, where: str) -> Any:
    names = {item.name for item in fields(kind)}
    _require(isinstance(value, dict), where, "it must be an object")
    _require(set(value) == names, where, f"fields must be {sorted(names)}, but got {sorted(value)}")
    hints = _get_hints(kind)
    parsed = {name: parse_as(hints[name], value[name], f"{where}.{name}") for name in names}
    try:
        return kind(**parsed)
    except ValueError as error:
        raise CacheCorrupt(f"{where}: {error}", _REMEDY) from error


def flatten(document: Json, prefix: str = "") -> Json:
    """Flatten nested objects to one level with dotted names."""
    flat: Json = {}
    for name, value in document.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
