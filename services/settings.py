"""What the operator decides: environment variables that begin with ``KD_``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

STAGES = ("precompute", "train")  #: the stages that workers run, which are also the names of the two queues
SEARCH = "search"  #: the stage that the API's reconciler drives: a search waits for its trials, and needs no worker

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().resolve())]


def _split(value: object) -> object:
    """``"a, b"`` as the environment has it, as a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Paths = Annotated[tuple[AbsolutePath, ...], NoDecode, BeforeValidator(_split)]


#: Where a server is reached that listens on every address.
REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # nosec B104 -- not bound


class Settings(BaseSettings):
    """One frozen record for API, worker and command line alike; ``environment`` hands it to a subprocess."""

    model_config = SettingsConfigDict(env_prefix="KD_", frozen=True, extra="ignore", validate_default=True)

    home: AbsolutePath = Field(
        Path("potstill-data"), description="Data folder: caches/, runs/, redis/ and logs/ lie in it."
    )
    root: AbsolutePath = Field(Path(), description="Folder against which the relative paths of a job resolve.")
    redis_url: str | None = Field(
        None, repr=False, description="Redis or Valkey to use; without it the bundled Valkey is started."
    )
    redis_password_file: Path | None = Field(
        None, description="File with the password of KD_REDIS_URL, for a URL that is to hold none."
    )
    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port that the API listens on; 0 = any free one.")
    server: str = Field(
        "http://127.0.0.1:8000",
        description="Address of the API, for the command line; without it that of KD_HOST and KD_PORT.",
    )
    lease_seconds: float = Field(
        15.0, ge=0.5, le=3600, description="A worker not heard of for so long has lost its job."
    )
    max_attempts: int = Field(
        3, ge=1, le=1000, description="Attempts that may die before a job fails; clean stops do not count."
    )
    stop_grace_seconds: float = Field(
        60.0, ge=0, le=86400, description="Time for a stopped run to write its checkpoint before it is killed."
    )
    silence_seconds: float = Field(
        1800.0, gt=0, le=604800, description="A run that reports nothing for so long is killed and retried."
    )
    trust_remote_code: bool = Field(False, description="Whether a job may run Python code that comes with a model.")
    api_keys_file: AbsolutePath | None = Field(
        None, description="The API's keys, as `kd keys` writes them; without it everybody on this host may do anything."
    )
    api_key: str | None = Field(None, repr=False, description="The key that the command line shows to the API.")
    allowed_hosts: Words = Field(
        ("127.0.0.1", "localhost", "[::1]"), description="Host names by which the API may be called; * = any."
    )
    allowed_origins: Words = Field((), description="Web origins whose pages may call the API from a browser.")
    model_allow_list: AbsolutePath | None = Field(
        None, description="File of models that jobs may name, one id or folder a line; without it any that is found."
    )
    data_roots: Paths = Field(
        (), description="Folders that jobs may read besides KD_ROOT and the caches. With none and no keys: any folder."
    )
    remote_hosts: Words = Field((), description="Hosts that a job's URLs may name: remote teachers, text on the web.")
    webhook_hosts: Words = Field((), description="Hosts that webhooks may be sent to; none = webhooks are off.")
    webhook_secret_file: AbsolutePath | None = Field(None, description="The secret that signs webhooks, whsec_...")
    quota_open_jobs: int = Field(100, ge=1, description="Jobs of one key that may be open at a time.")
    quota_record_bytes: int = Field(
        64 << 20, ge=1, description="Bytes that the records of one key's jobs may take in Redis, ended ones too."
    )
    rate_post: int = Field(60, ge=1, description="Requests of one key that change something, a minute.")
    rate_get: int = Field(600, ge=1, description="Requests of one key that only read, a minute.")
    rate_sse: int = Field(20, ge=1, description="Event streams that one key may hold open.")
    log_format: Literal["console", "json"] = Field("console", description="How the log is written.")
    otlp_endpoint: str | None = Field(None, description="OpenTelemetry collector (OTLP over HTTP); none = no traces.")
    devices: str | None = Field(
        None, description="Devices of a worker: cpu, or GPU numbers as 0,1; without it the first GPU that is free."
    )
    outage_seconds: float = Field(
        3600.0, gt=0, description="A run whose worker cannot reach Redis for so long saves its state and ends."
    )
    disk_floor_bytes: int = Field(1 << 30, ge=0, description="With less free on the data disk no job is accepted.")
    child_module: str = Field(
        "services.worker.child",
        pattern=r"^[A-Za-z_][\w.]*$",
        description="Module that runs one stage in a process of its own.",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_password(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The password of the file goes into the URL here, so that no other module knows of it."""
        url, file = values.get("redis_url"), values.get("redis_password_file")
        if not url or not file:
            return values
        try:
            password = Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(f"KD_REDIS_PASSWORD_FILE: {file}: {error.strerror}") from None
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2]
        return {**values, "redis_url": parts._replace(netloc=f":{quote(password, safe='')}@{place}").geturl()}

    @model_validator(mode="before")
    @classmethod
    def _with_server(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The command line finds the API of these very settings; of port 0 the true one is not known."""
        host, port = values.get("host", "127.0.0.1"), values.get("port", 8000)
        return values if values.get("server") or str(port) == "0" else {**values, "server": address(host, port)}

    @property
    def caches(self) -> Path:
        """Folder of the caches."""
        return self.home / "caches"

    def run_dir(self, job_id: str) -> Path:
        """Folder of one job's checkpoints, student and report."""
        return self.home / "runs" / job_id

    def environment(self) -> dict[str, str]:
        """The settings as the environment variables of a subprocess."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {f"KD_{name.upper()}": _as_text(value) for name, value in values.items()}


def address(host: str, port: object) -> str:
    """Where the API is reached that listens there."""
    host = REACHED_AT.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
