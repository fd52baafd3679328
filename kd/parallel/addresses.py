"""The addresses of hosts that share a stage: which interface has one, and whether one answers."""

from __future__ import annotations

import socket
import time

import psutil

from kd.errors import TrainingError
from kd.progress import HostPlace

#: Seconds for which a host tries to reach the leader.
REACH_SECONDS = 120.0


def name_interface(address: str) -> dict[str, str]:
    """Return the variables that let ranks use the network interface that has ``address``.

    Raises ``TrainingError`` if none has.
    """
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    detail = f"No network interface of this host has the address {address}."
    raise TrainingError(detail, "Set KD_HOST_ADDRESS to one that the other hosts can reach.")


def require_reachable(host: HostPlace) -> None:
    """Wait until the leader of ``host`` answers; raise ``TrainingError`` if it does not."""
    address, _, port = host.endpoint.rpartition(":")
    end = time.monotonic() + REACH_SECONDS
    while True:
        try:
            with socket.create_connection((address, int(port)), timeout=10):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TrainingError(
                    f"This host ({host.address}) cannot reach the host that leads the job at "
                    f"{host.endpoint}: {error}.",
                    "Open the ports between the hosts, or set KD_HOST_ADDRESS on each to an "
                    "address that the others reach.",
                ) from None
            time.sleep(1.0)
