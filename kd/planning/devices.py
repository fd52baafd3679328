"""The devices that a plan is made for, such as ``8xh100`` or ``cpu``. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kd.errors import ConfigError, Problem
from kd.memory.devices import DEVICE_KINDS
from kd.memory.training_phase import Place

#: The kind that is no GPU: this machine's processor, or a worker's.
CPU = "cpu"
#: The most devices of a plan.
MOST_DEVICES = 16_384


@dataclass(frozen=True)
class DeviceName:
    """A number of devices of a kind, as they are named: ``8xh100``."""

    kind: str
    count: int

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Read a name. Raises ``ConfigError`` for an unknown kind, or no device at all."""
        found = re.fullmatch(r"(?:(\d{1,9})\s*x\s*)?([a-z][\w-]*)", text.strip().lower())
        if found is None:
            raise _refuse(text, "has not the form of 8xh100, h100 or cpu")
        count = int(found[1] or 1)
        if found[2] not in (CPU, *DEVICE_KINDS):
            raise _refuse(text, f"names the kind {found[2]!r}, which is not known")
        if not 1 <= count <= MOST_DEVICES:
            raise _refuse(text, f"asks for {count} devices, but a plan has 1 to {MOST_DEVICES:,}")
        return cls(found[2], count)


def _refuse(text: str, why: str) -> ConfigError:
    kinds = ", ".join(DEVICE_KINDS)
    remedy = f"Give a number and a kind, such as 8xh100. The kinds: {CPU}, {kinds}."
    return ConfigError([Problem("/devices", f"{text!r} {why}.", remedy)])


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one kind, one rank on each."""

    place: Place
    count: int

    @classmethod
    def of_kind(cls, name: DeviceName) -> DeviceGroup:
        """Devices of a kind of GPU, by its maker's figures."""
        return cls(Place.named(DEVICE_KINDS[name.kind]), name.count)

    @classmethod
    def of_host(cls, host: Place, count: int) -> DeviceGroup:
        """Processes that share the cores and the memory of the processor ``host``."""
        return cls(host.divide(count), count)

    def describe(self) -> str:
        """The devices in words: ``8 x h100``."""
        return f"{self.count} x {self.place.rates.name}"
