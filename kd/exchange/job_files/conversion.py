"""Turn a job file of another tool into ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kd.config.job import JobConfig
from kd.config.jobfile import make_yaml_problem, parse_config, parse_yaml
from kd.errors import ConfigError, Problem
from kd.exchange.job_files import axolotl, distillkit, trl
from kd.exchange.job_files.draft import Draft, Remark

#: The reader of each tool's file, by the tool's name.
TOOLS: dict[str, Callable[[Any, Draft, str | None], None]] = {
    "distillkit": distillkit.read_job,
    "axolotl": axolotl.read_job,
    "trl": trl.read_job,
}


class Conversion(NamedTuple):
    """Our job, and a remark for each field of the other file that it does not hold as it is."""

    job: dict[str, Any]
    remarks: tuple[Remark, ...]

    def render(self) -> str:
        """The job file: the remarks as comments, then the job as YAML."""
        comments = "".join(f"# {each}\n" for each in self.remarks)
        return comments + yaml.safe_dump(self.job, sort_keys=False, allow_unicode=True)


def convert_file(path: Path, tool: str, teacher: str | None = None) -> Conversion:
    """Read the file of ``tool`` and return our job.

    ``teacher`` is the model to distil from, for a file of plain fine-tuning. Raises ``ConfigError``
    if the tool is not known, the file is not YAML, or the job that it would give is not valid.
    """
    if tool not in TOOLS:
        raise ConfigError(
            [Problem("", f"--from is {tool!r}.", f"It must be one of {', '.join(TOOLS)}.")]
        )
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Problem("", f"{path} cannot be read: {error}.", "Give the path of a YAML file.")]
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError([make_yaml_problem("", str(path), error)]) from None
    return convert_job(data, tool, teacher)


def convert_job(data: Any, tool: str, teacher: str | None = None) -> Conversion:
    """Return our job for the parsed file of a tool.

    Raises ``ConfigError`` where the file trains by another method than distillation or names no
    teacher and ``teacher`` is not given, and with every field of the job that is missing or out of
    bounds.
    """
    draft = Draft()
    TOOLS[tool](data, draft, teacher)
    job = {name: draft.job[name] for name in JobConfig.model_fields if name in draft.job}
    parse_config(job)
    return Conversion(job, tuple(draft.remarks))
