"""Check that a stage computes on the device that it was promised, before any work is done.

torch uses the CPU without a word where it finds no GPU, and a GPU that its build does not know
fails at the first kernel, which may come hours later. Both are errors here, with their cause.

The check is for CUDA only: a CPU can always be used.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

import torch

from kd.errors import DeviceUnusable, format_first_line

#: A name in the list of architectures of a CUDA build: machine code (sm) or source code for the
#: driver's compiler (compute), a capability, and a letter for code of one family or one chip.
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")

Capability = tuple[int, int]


@dataclass(frozen=True)
class TorchGpu:
    """A GPU that torch sees. ``capability`` is its compute capability, for example (8, 0)."""

    name: str
    capability: Capability


@dataclass(frozen=True)
class TorchGpus:
    """What torch says about the GPUs of this process.

    ``version`` is that of torch, ``cuda`` the CUDA version of its build, and ``architectures`` the
    code that the build contains, such as sm_80. ``failure`` says why there are no GPUs.
    """

    version: str
    cuda: str | None
    gpus: tuple[TorchGpu, ...] = ()
    architectures: tuple[str, ...] = ()
    failure: str = ""

    @property
    def build(self) -> str:
        """The build in words."""
        return f"torch {self.version} ({f'CUDA {self.cuda}' if self.cuda else 'without CUDA'})"


def ask_torch() -> TorchGpus:
    """Ask torch for its build and for the GPUs that this process sees."""
    version = str(torch.__version__)
    cuda = torch.version.cuda
    # torch warns of a driver that is too old; ``failure`` says the same.
    with warnings.catch_warnings(action="ignore"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            failure = "torch counts 0 GPUs"
            try:
                torch.cuda.init()
            except Exception as error:  # torch raises several types, and none of its own
                failure = format_first_line(error)
            return TorchGpus(version, cuda, failure=failure)
    gpus = tuple(
        TorchGpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in range(count)
    )
    return TorchGpus(version, cuda, gpus, tuple(torch.cuda.get_arch_list()))


def require_promised_gpus(promised: int, seen: TorchGpus) -> None:
    """Raise ``DeviceUnusable`` if the job was given GPUs, and torch sees none."""
    if promised and not seen.gpus:
        given = "1 GPU" if promised == 1 else f"{promised} GPUs"
        raise DeviceUnusable(
            f"The worker gave this job {given}, but torch sees none: {seen.build} says "
            f"{seen.failure!r}.",
            f"{find_remedy(seen)} With KD_DEVICES=cpu the worker runs jobs on the CPU.",
        )


def find_remedy(seen: TorchGpus) -> str:
    """Say what to do where the driver has GPUs, and torch sees none."""
    if seen.cuda is None:
        return "Install a build of torch with CUDA (leave TORCH_INDEX empty)."
    return (
        "`kd doctor` and `nvidia-smi` show the driver: CUDA 13 needs driver 580 or newer, "
        "CUDA 12 needs 525 or newer. Update it, or install the build of torch for CUDA 12.6."
    )


def require_known_architecture(seen: TorchGpus) -> None:
    """Raise ``DeviceUnusable`` if torch's build has no code for the first GPU, which a job uses."""
    if not seen.gpus or is_known(seen.gpus[0].capability, seen.architectures):
        return
    gpu = seen.gpus[0]
    major, minor = gpu.capability
    raise DeviceUnusable(
        f"{seen.build} has no code for {gpu.name}, whose architecture is sm_{major}{minor}; "
        f"it has code for {', '.join(seen.architectures)}.",
        "Install a build of torch that has: the one for CUDA 12.6 knows sm_50 to sm_90, the one "
        "for CUDA 13.0 sm_75 and newer. With KD_DEVICES=cpu the worker runs jobs on the CPU.",
    )


def is_known(capability: Capability, architectures: tuple[str, ...]) -> bool:
    """Whether a build with code for ``architectures`` runs on a GPU of this capability.

    Machine code (sm_80) runs on its own and on later minor versions of the same major version.
    Code for the driver's compiler (compute_80) runs on everything newer. Code of one family
    (sm_100f) is bound like machine code, code of one chip (sm_90a) runs there only. A build
    without any such name, for example one for AMD's GPUs, is not judged.
    """
    named = [match for each in architectures if (match := _ARCHITECTURE.fullmatch(each))]
    return not named or any(_runs_on(capability, match) for match in named)


def _runs_on(capability: Capability, match: re.Match[str]) -> bool:
    """Return whether code for the architecture of ``match``, such as sm_90a, runs on a GPU.

    Code with an "a" runs on that architecture only. PTX (compute_80) also runs on every later one,
    and machine code (sm_80) on later ones of the same major number (CUDA programming guide, 3.1).
    """
    kind, major, minor, suffix = match.groups()
    built = (int(major), int(minor))
    if suffix == "a":
        return capability == built
    if kind == "compute" and not suffix:
        return capability >= built
    return capability[0] == built[0] and capability[1] >= built[1]
