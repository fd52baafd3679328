"""The operator's settings: environment variables that begin with ``KD_``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from cache.errors import StoreError
from cache.remote.address import StoreAddress, bind_caches, is_bucket, locate_caches
from kd.buckets.inputs import DOWNLOAD_BYTES
from kd.buckets.runs import RUNS, StoredRun, open_stored_run
from kd.files import Disk
from services.redis_url import parse_sentinels, uses_tls

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().resolve())]


def _split(value: object) -> object:
    """Split a text such as ``"a, b"`` from the environment; return any other value as it is."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Paths = Annotated[tuple[AbsolutePath, ...], NoDecode, BeforeValidator(_split)]
DAY_SECONDS = 86400.0
Days = Annotated[float, Field(ge=0, le=36500), BeforeValidator(lambda value: value or 0)]


#: The name of a CPU in KD_DEVICE_PRICES, and the one that stands for every other device.
CPU_DEVICE = "cpu"
ANY_DEVICE = ""


def parse_prices(words: Iterable[str]) -> dict[str, float]:
    """Parse words such as ``h100=2.5`` and ``0.1``; a number alone is of any other device.

    Raises ``ValueError``.
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        name = name.strip().lower()
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            detail = f"{word!r} is not a price: write h100=2.5, cpu=0.04, or 1.2 for the rest"
            raise ValueError(detail)
        if name in found:
            raise ValueError(f"{name or 'any other device'} has two prices")
        found[name] = price
    return found


def _check_store(store: str | None) -> str | None:
    try:
        locate_caches(Path(), store or None)
        return str(StoreAddress.parse(store)) if store and is_bucket(store) else store or None
    except StoreError as error:
        raise ValueError(str(error)) from None


def _check_data_stores(words: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(str(StoreAddress.parse(each)) for each in words)
    except StoreError as error:
        raise ValueError(str(error)) from None


def _check_redis_url(url: str | None) -> str | None:
    try:
        if url is not None:
            parse_sentinels(url)
    except ValueError as error:
        raise ValueError(f"KD_REDIS_URL: {error}") from None
    return url


def _check_prices(words: tuple[str, ...]) -> tuple[str, ...]:
    parse_prices(words)
    return words


#: Addresses that mean every interface -> the address at which this host reaches such a server.
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # nosec B104 -- not bound


class Settings(BaseSettings):
    """The settings of API, workers and command line. ``environment`` hands them to a subprocess."""

    model_config = SettingsConfigDict(
        env_prefix="KD_",
        frozen=True,
        extra="ignore",
        validate_default=True,
        use_attribute_docstrings=True,
    )

    home: AbsolutePath = Path("potstill-data")
    """Data folder. It contains caches/, texts/, runs/, files/, redis/ and logs/."""

    root: AbsolutePath = Path()
    """Folder from which the relative paths of a job start. The default is the folder in which a
    command is typed."""

    store: Annotated[str | None, Field(max_length=1024), AfterValidator(_check_store)] = None
    """Where caches are stored: a folder, or an S3 bucket, s3://bucket/prefix, whose credentials
    come from the usual environment variables. If it is not set, they are in caches/ of KD_HOME."""

    store_cache_bytes: int = Field(50 << 30, ge=1 << 20)
    """Bytes of a bucket's caches that this disk keeps for reading."""

    store_runs: bool = True
    """Whether checkpoints, students and reports of jobs are also copied to the bucket of KD_STORE,
    below runs/, so that a worker on another host can continue a job, and the API shows the files of
    all workers. Without a bucket it has no effect."""

    data_stores: Annotated[Words, AfterValidator(_check_data_stores)] = ()
    """Buckets, s3://bucket/prefix, below which jobs may name text and models, besides KD_STORE.
    They are read with the credentials of the worker."""

    download_bytes: int = Field(DOWNLOAD_BYTES, ge=1 << 20)
    """Bytes of text and models from buckets that this disk keeps."""

    redis_url: Annotated[str | None, AfterValidator(_check_redis_url)] = Field(None, repr=False)
    """Redis or Valkey to use: redis://, rediss:// (TLS), or
    sentinel://HOST:26379,HOST:26379/0?master=NAME (sentinels:// with TLS). If it is not set, the
    bundled Valkey is started."""

    redis_password_file: Path | None = None
    """File with the password of KD_REDIS_URL, if the URL contains none."""

    redis_ca_file: Path | None = None
    """Certificates (PEM) of the authority that signs the server's certificate. The default is the
    system's certificates."""

    host: str = "127.0.0.1"
    """Address on which the API listens."""

    host_address: str | None = None
    """Address of this host, at which the other hosts of a training reach it. The default is that
    from which it reaches the job store."""

    port: int = Field(8000, ge=0, le=65535)
    """Port on which the API listens; 0 = any free port."""

    server: str = "http://127.0.0.1:8000"
    """Address of the API, for the command line. The default follows KD_HOST and KD_PORT."""

    lease_seconds: float = Field(15.0, ge=0.5, le=3600)
    """A worker that is silent for this time loses its job."""

    max_attempts: int = Field(3, ge=1, le=1000)
    """Attempts that may die before a job fails. Clean stops do not count."""

    stop_grace_seconds: float = Field(60.0, ge=0, le=86400)
    """Time that a stopped run has to write its checkpoint before it is killed."""

    silence_seconds: float = Field(1800.0, gt=0, le=604800)
    """A run that reports nothing for this time is killed and retried."""

    trust_remote_code: bool = False
    """Whether a job may run Python code that comes with a model."""

    api_keys_file: AbsolutePath | None = None
    """File of API keys, which `kd keys` writes. If it is not set, everybody on this host may do
    everything."""

    api_key: str | None = Field(None, repr=False)
    """API key that the command line sends."""

    allowed_hosts: Words = ("127.0.0.1", "localhost", "[::1]")
    """Host names under which the API may be called; * = any."""

    allowed_origins: Words = ()
    """Web origins whose pages may call the API from a browser."""

    model_allow_list: AbsolutePath | None = None
    """File of the models that jobs may name, one id or folder per line. If it is not set, jobs may
    name any model."""

    data_roots: Paths = ()
    """Folders that jobs may read besides KD_ROOT and the caches. If this and KD_API_KEYS_FILE are
    not set, jobs may read any folder."""

    remote_hosts: Words = ()
    """Hosts that the URLs of a job may name: remote teachers, text on the web. host:8000 allows
    that port alone."""

    webhook_hosts: Words = ()
    """Hosts that may receive webhooks. If none is set, webhooks are off."""

    webhook_secret_file: AbsolutePath | None = None
    """File of the secrets that sign webhooks, whsec_..."""

    quota_open_jobs: int = Field(100, ge=1)
    """Open jobs that one key may have at a time."""

    quota_record_bytes: int = Field(64 << 20, ge=1)
    """Bytes of Redis that the records of one key's jobs may take, with ended jobs."""

    quota_device_seconds: float | None = Field(None, gt=0)
    """Device-seconds that the jobs of one team may use in a day (UTC). Further jobs wait. `kd keys
    quota` sets it for one team."""

    quota_bytes: int | None = Field(None, ge=1)
    """Bytes that caches, runs and uploaded files of one team may take on the disk. Above it the
    team's queued jobs wait, and new ones are refused. `kd keys quota` sets it for one team."""

    fair_share_half_life_seconds: float = Field(86400.0, ge=60, le=31536000)
    """Time after which a team's use of devices counts half as much in the queue. A free worker
    takes a job of the team that holds the fewest devices, and among equals of the team that used
    the least recently."""

    device_prices: Annotated[Words, AfterValidator(_check_prices)] = ()
    """Prices of an hour of one device, by kind or by a part of its name: h100=2.5,cpu=0.04; a
    number without a name is for all other devices. Without a price no cost is shown."""

    retain_caches_unused_days: Days = 0.0
    """Days after the last run that opened a cache, or the last job that named it, after which the
    cache is removed. 0 = never."""

    retain_caches_days: Days = 0.0
    """Days after its capture after which a cache is removed. 0 = never."""

    retain_texts_days: Days = 0.0
    """Days after the last run that read or wrote a token store after which the store is removed;
    the next run makes it again. 0 = never."""

    retain_runs_days: Days = 0.0
    """Days after the end of a job after which its record, run folder and student are removed, also
    in a bucket. 0 = never."""

    retain_checkpoints: int = Field(0, ge=0)
    """Newest checkpoints that an ended job keeps. 0 = all."""

    retain_checkpoints_of_students: bool = True
    """Whether a job that has succeeded keeps checkpoints beside its saved student."""

    retain_events_days: Days = 30.0
    """Days after the end of a job after which its events and metrics are removed from Redis. 0 =
    never."""

    retain_logs_days: Days = 0.0
    """Days after the end of a job after which its log is removed. 0 = never."""

    retain_files_days: Days = 0.0
    """Days after its upload after which a file that no job names is removed. 0 = never."""

    retain_imports_days: Days = 0.0
    """Days after which models and data that `import kd` saved are removed, counted from the last
    call that saved them. 0 = never."""

    retain_leftovers_days: Days = 0.0
    """Days after the last write after which the service removes what crashes left behind:
    incomplete caches, and runs without a record. 0 = never; `kd gc` then uses 7."""

    retain_hour: int = Field(3, ge=0, le=23)
    """Hour of the day (UTC) at which the API applies the rules KD_RETAIN_*, if any of them is set.
    Redis applies the rule for events by itself."""

    audit_bytes: int = Field(16 << 20, ge=4096, le=1 << 30)
    """Bytes of audit.jsonl in KD_HOME/audit above which a new file is started."""

    audit_files: int = Field(10, ge=1, le=1000)
    """Files of the audit log that are kept; the oldest is deleted."""

    rate_post: int = Field(60, ge=1)
    """Changing requests that one key may send per minute."""

    rate_validate: int = Field(60, ge=1)
    """Validations and dry runs that one key may ask for per minute."""

    rate_get: int = Field(600, ge=1)
    """Reading requests that one key may send per minute."""

    rate_sse: int = Field(20, ge=1)
    """Event streams that one key may keep open."""

    log_format: Literal["console", "json"] = "console"
    """Format of the log."""

    devices: str | None = None
    """Device of a worker: cpu, or the number or UUID of a GPU. The default is the first free GPU.
    Several devices are separated by commas (0,1 or cpu,cpu); a job uses resources.gpus of them, and
    one by default."""

    outage_seconds: float = Field(3600.0, gt=0)
    """A run whose worker cannot reach Redis for this time saves its state and ends."""

    disk_floor_bytes: int = Field(1 << 30, ge=0)
    """Free space on the data disk below which no job is accepted."""

    file_bytes: int = Field(512 << 20, ge=1, le=1 << 40)
    """Bytes of one file that PUT /files/{name} accepts."""

    plan_seconds: float = Field(30.0, gt=0, le=3600)
    """Seconds that the check of one job by POST /jobs/validate may take, or one look into a
    cache."""

    plan_memory_bytes: int = Field(2 << 30, ge=1 << 27)
    """Memory of the process that checks jobs for POST /jobs/validate, and of the one that looks
    into caches."""

    child_module: str = Field("services.worker.stage_child", pattern=r"^[A-Za-z_][\w.]*$")
    """Module that runs one stage in a process of its own."""

    @model_validator(mode="after")
    def _keeps_buckets(self) -> Settings:
        """Refuse rules of retention that would remove caches which other machines use."""
        if self.in_bucket and (self.retain_caches_days or self.retain_caches_unused_days):
            raise ValueError(
                "KD_RETAIN_CACHES_DAYS and KD_RETAIN_CACHES_UNUSED_DAYS do not apply to a bucket: "
                "one machine does not know what the others read. Unset them, and remove caches "
                "with `kd cache rm`"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _complete_redis_url(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Put password and certificates into the URL: no other module knows of their files."""
        url = values.get("redis_url")
        password_file = values.get("redis_password_file")
        ca_file = values.get("redis_ca_file")
        if not url or not (password_file or ca_file):
            return values  # with the URL as it was given: rebuilt, unix:///a would be unix:/a
        parts = urlsplit(url)
        if password_file:
            try:
                password = Path(password_file).read_text(encoding="utf-8").strip()
            except OSError as error:
                detail = f"KD_REDIS_PASSWORD_FILE: {password_file}: {error.strerror}"
                raise ValueError(detail) from None
            name, place = quote(parts.username or ""), parts.netloc.rpartition("@")[2]
            parts = parts._replace(netloc=f"{name}:{quote(password, safe='')}@{place}")
        if ca_file:
            if not uses_tls(url):
                known = "rediss:// or sentinels://"
                raise ValueError(f"KD_REDIS_CA_FILE needs a KD_REDIS_URL of {known}")
            if not Path(ca_file).is_file():
                raise ValueError(f"KD_REDIS_CA_FILE: {ca_file} is not a file")
            query = {**dict(parse_qsl(parts.query)), "ssl_ca_certs": str(ca_file)}
            parts = parts._replace(query=urlencode(query))
        return {**values, "redis_url": parts.geturl()}

    @model_validator(mode="before")
    @classmethod
    def _insert_server(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Let the default address of the API follow host and port.

        Port 0 means any free port, so the address is not known then.
        """
        host = values.get("host", "127.0.0.1")
        port = values.get("port", 8000)
        if values.get("server") or str(port) == "0":
            return values
        return {**values, "server": make_address(host, port)}

    @property
    def prices(self) -> dict[str, float]:
        """Prices of a device-hour by kind of device, and under "" that of any other device."""
        return parse_prices(self.device_prices)

    @property
    def caches(self) -> Path:
        """Folder of the caches, or the one that mirrors the bucket of them."""
        return self.locate_caches(None)

    @property
    def places(self) -> dict[str, Path]:
        """The folders that everything is written to, by the settings that name them."""
        stored = {} if self.store is None or self.in_bucket else {"KD_STORE": self.caches}
        return {"KD_HOME": self.home, **stored}

    def locate_caches(self, store: str | None) -> Path:
        """Return the folder of the caches of a job with this ``cache.store``, or its mirror."""
        return bind_caches(self.home, store or self.store, self.store_cache_bytes)

    def find_full_disk(self, coming: int = 0) -> str | None:
        """Say which disk is nearly full, if ``coming`` bytes were added to the data folder."""
        for name, folder in self.places.items():
            floor = self.disk_floor_bytes + (coming if folder == self.home else 0)
            if lacking := Disk.of(folder).find_shortage(floor):
                return f"The disk of {name} is nearly full: it has {lacking}."
        return None

    @property
    def in_bucket(self) -> bool:
        """Whether caches lie in a bucket, so that this disk does not tell which there are."""
        return self.store is not None and is_bucket(self.store)

    @property
    def keeps_runs(self) -> bool:
        """Whether the files of runs lie in the bucket too, so that hosts need share no folder."""
        return self.in_bucket and self.store_runs

    @property
    def texts(self) -> Path:
        """Folder of the token stores."""
        return self.home / "texts"

    @property
    def runs(self) -> Path:
        """Folder of the runs."""
        return self.home / "runs"

    @property
    def models(self) -> Path:
        """Folder of the models that calls of `import kd` have saved."""
        return self.home / "models"

    @property
    def data(self) -> Path:
        """Folder of the text that calls of `import kd` have saved."""
        return self.home / "data"

    @property
    def files(self) -> Path:
        """Folder of the files that teams have uploaded."""
        return self.home / "files"

    def find_stored_run(self, job_id: str) -> StoredRun | None:
        """Find where one job's files lie besides, in a bucket; None where they lie on disks alone.

        It gives up soon where the bucket does not answer. Raises ``StoreError`` for one that cannot
        be opened.
        """
        url = self.locate_stored_run(job_id)
        return None if url is None else open_stored_run(url, patient=False)

    def locate_stored_run(self, job_id: str) -> str | None:
        """Return the address of one job's files in the bucket; None where they are not kept."""
        return f"{self.store}/{RUNS}/{job_id}" if self.keeps_runs else None

    def run_dir(self, job_id: str) -> Path:
        """Folder of one job's checkpoints, student and report."""
        return self.runs / job_id

    def environment(self) -> dict[str, str]:
        """The settings as the environment variables of a subprocess."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {f"KD_{name.upper()}": _format_value(value) for name, value in values.items()}


def make_address(host: str, port: object) -> str:
    """The URL of an API that listens on ``host`` and ``port``."""
    host = LOOPBACK_OF.get(host, host)
    if ":" in host and not host.startswith("["):  # IPv6
        host = f"[{host}]"
    return f"http://{host}:{port}"


def _format_value(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
