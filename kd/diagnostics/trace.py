"""A Chrome trace of a few steps: trace.json, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

FIRST = 3  # steps left out: the first ones allocate, compile and tune


class Trace:
    """Records ``steps`` steps of this process, after the first ones, and writes them to ``path``."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps, self._taken = path, steps, 0
        self._profile: Any = None

    def step(self) -> Path | None:
        """Call it at the end of every step; returns the file once it is written."""
        self._taken += 1
        if self._steps and self._taken == FIRST:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.__enter__()
        if self._profile is not None and self._taken == FIRST + self._steps:
            return self.close()
        return None

    def close(self) -> Path | None:
        """Write what was recorded, where there is something: a run that ends early has a shorter trace."""
        if self._profile is None:
            return None
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        return self._path
