"""A Chrome trace of a few steps: trace.json, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: The first steps are left out, because they allocate, compile and tune.
SKIPPED_STEPS = 3


class Trace:
    """Records ``steps`` steps of this process after the first ones, and writes ``path``."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        self._steps = steps
        self._taken = 0
        self._profile: Any = None

    def step(self) -> Path | None:
        """Count a step at its end; returns the file when it has just been written."""
        self._taken += 1
        if self._steps and self._taken == SKIPPED_STEPS:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.__enter__()
        if self._profile is not None and self._taken == SKIPPED_STEPS + self._steps:
            return self.close()
        return None

    def close(self) -> Path | None:
        """Write the steps recorded so far, which may be fewer; None if there are none."""
        if self._profile is None:
            return None
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        return self._path
