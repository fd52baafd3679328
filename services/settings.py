"""What the operator decides: environment variables that begin with ``KD_``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

STAGES = ("precompute", "train")  #: the stages that workers run, which are also the names of the two queues
SEARCH = "search"  #: the stage that the API's reconciler drives: a search waits for its trials, and needs no worker

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().resolve())]


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
    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port that the API listens on; 0 = any free one.")
    server: str = Field("http://127.0.0.1:8000", description="Address of the API, for the command line.")
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
    child_module: str = Field(
        "services.worker.child",
        pattern=r"^[A-Za-z_][\w.]*$",
        description="Module that runs one stage in a process of its own.",
    )

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
        plain = {name: int(value) if isinstance(value, bool) else value for name, value in values.items()}
        return {f"KD_{name.upper()}": str(value) for name, value in plain.items()}
