"""The devices that a plan is made for, such as ``8xh100`` or ``cpu``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kd.errors import ConfigError, Problem
from kd.memory.devices import DEVICE_KINDS, DeviceRates, find_device_kind

#: The kind that is no GPU: the processor of this machine.
CPU = "cpu"
#: The most devices of a plan.
MOST_DEVICES = 16_384


@dataclass(frozen=True)
class DeviceGroup:
    """``count`` devices of the same ``rates``; ``measured`` says that a probe told the rates."""

    rates: DeviceRates
    count: int
    measured: bool = False

    @classmethod
    def parse(cls, text: str) -> DeviceGroup:
        """Read a name. Raises ``ConfigError`` for an unknown kind, or a number that no plan has."""
        found = re.fullmatch(r"(?:(\d{1,9})\s*x\s*)?([a-z][\w-]*)", text.strip().lower())
        if found is None:
            raise _refuse(text, "has not the form of 8xh100, h100 or cpu")
        count = int(found[1] or 1)
        if found[2] not in (CPU, *DEVICE_KINDS):
            raise _refuse(text, f"names the kind {found[2]!r}, which is not known")
        most = 1 if found[2] == CPU else MOST_DEVICES
        if not 1 <= count <= most:
            raise _refuse(text, f"asks for {count} devices, but a plan has 1 to {most:,} of these")
        return cls.of_processor() if found[2] == CPU else cls(DEVICE_KINDS[found[2]], count)

    @classmethod
    def here(cls) -> DeviceGroup:
        """The GPUs of this machine by their maker's figures, or its processor."""
        import torch

        if not torch.cuda.is_available():
            return cls.of_processor()
        name = torch.cuda.get_device_name()
        kind = find_device_kind(name)
        if kind is None:
            raise _refuse(name, "is the GPU of this machine, whose rates are not known")
        return cls(kind, torch.cuda.device_count())

    @classmethod
    def of_processor(cls) -> DeviceGroup:
        """The processor of this machine, whose rates are measured."""
        import torch

        from kd.memory.rates import measure_rates

        return cls(measure_rates(torch.device(CPU)), 1, measured=True)

    @property
    def is_gpu(self) -> bool:
        """Whether they are GPUs."""
        return not self.measured

    def describe(self) -> str:
        """The devices in words: ``8 x h100``."""
        return f"{self.count} x {self.rates.name}"


def _refuse(text: str, why: str) -> ConfigError:
    kinds = ", ".join(DEVICE_KINDS)
    remedy = f"Give a number and a kind, such as 8xh100. The kinds: {CPU}, {kinds}."
    return ConfigError([Problem("/devices", f"{text!r} {why}.", remedy)])
