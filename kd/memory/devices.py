"""Kinds of devices, by the figures of their makers. Imports no torch.

The figures are those of dense products with sums in float32. A job never reaches them: see
``kd.forecast``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class DeviceRates:
    """What a device can do at most.

    ``memory`` is in bytes, ``half`` and ``single`` are FLOP/s of products in bfloat16 (float16
    where there is no bfloat16) and in float32, ``tf32`` is that of float32 products in TF32, and
    ``bandwidth`` are the bytes/s of its memory. ``peer`` are the bytes/s that it sends to a device
    of the same host, and ``network`` those that all devices of a host together send to other hosts.
    """

    name: str
    memory: int
    half: float
    single: float
    tf32: float
    bandwidth: float
    has_bfloat16: bool = True
    #: An assumption for kinds without NVLink: 16 lanes of PCIe 4.0 (3.0 has half, 5.0 twice that).
    peer: float = 25e9
    #: An assumption for kinds whose data sheets name no network: 100 Gb/s for a host.
    network: float = 12.5e9

    def find_rate(self, dtype: str, tf32: bool) -> float:
        """The FLOP/s of products in ``dtype``: fp32, bf16 or fp16."""
        if dtype != "fp32":
            return self.half
        return self.tf32 if tf32 else self.single

    def find_ring_rate(self, ranks: int) -> float:
        """The bytes/s of a ring of ``ranks`` devices, as each of them sees it.

        NCCL lays one ring through each network adapter of a host, so that a part of the bytes
        crosses to the next host by each of them.
        """
        return self.peer if ranks <= HOST_DEVICES else min(self.peer, self.network)


#: Devices of a host, as in the DGX and HGX systems of NVIDIA.
HOST_DEVICES = 8
#: Memory is the total that nvidia-smi prints. Rates are without sparsity, from NVIDIA's data sheets
#: and, for GeForce, from the white papers of Ampere GA102 and Ada (float16 with sums in float32).
#: ``peer`` is NVLink in one direction, half of the data sheets' sum of both. ``network`` is the
#: InfiniBand of a host by the DGX data sheets: DGX-1 has four adapters of 100 Gb/s, DGX A100 eight
#: of 200 Gb/s, and DGX H100, H200 and B200 eight of 400 Gb/s.
DEVICE_KINDS = {
    each.name: each
    for each in (
        DeviceRates(
            "v100", 16_160 * MIB, 125e12, 15.7e12, 15.7e12, 900e9,
            has_bfloat16=False, peer=150e9, network=50e9,
        ),
        DeviceRates("t4", 15_360 * MIB, 65e12, 8.1e12, 8.1e12, 320e9, has_bfloat16=False),
        DeviceRates("a10", 23_028 * MIB, 125e12, 31.2e12, 62.5e12, 600e9),
        DeviceRates("l4", 23_034 * MIB, 121e12, 30.3e12, 60e12, 300e9),
        DeviceRates("l40s", 46_068 * MIB, 362e12, 91.6e12, 183e12, 864e9),
        DeviceRates("rtx3090", 24_576 * MIB, 71e12, 35.6e12, 35.6e12, 936e9),
        DeviceRates("rtx4090", 24_564 * MIB, 165e12, 82.6e12, 82.6e12, 1_008e9),
        DeviceRates(
            "a100-40gb", 40_960 * MIB, 312e12, 19.5e12, 156e12, 1_555e9, peer=300e9, network=200e9
        ),
        DeviceRates(
            "a100-80gb", 81_920 * MIB, 312e12, 19.5e12, 156e12, 2_039e9, peer=300e9, network=200e9
        ),
        DeviceRates(
            "h100", 81_559 * MIB, 989e12, 67e12, 494e12, 3_350e9, peer=450e9, network=400e9
        ),
        DeviceRates(
            "h200", 143_771 * MIB, 989e12, 67e12, 494e12, 4_800e9, peer=450e9, network=400e9
        ),
        DeviceRates(
            "b200", 183_359 * MIB, 2_250e12, 80e12, 1_125e12, 8_000e9, peer=900e9, network=400e9
        ),
    )
}  # fmt: skip
#: Bytes that the CUDA context and the libraries' own kernels take of a GPU: an assumption.
CUDA_CONTEXT = 512 * MIB
#: The least seconds of an operation on a GPU, because the host launches them one by one. A launch
#: takes a program in C 3.8 microseconds (NVIDIA, Getting Started with CUDA Graphs, 2019), and torch
#: has its own work for each operation.
LAUNCH_SECONDS = 5e-6

#: Words in the names of GPUs that have the name of a kind too, and other rates: a part of a GPU
#: (MIG), cards of laptops, and cards with less power.
_OTHERS = (
    {"mig"}, {"laptop"}, {"max"}, {"h100", "pcie"}, {"h100", "nvl"}, {"rtx3090", "ti"},
    {"rtx4090", "d"},
)  # fmt: skip


def find_device_kind(name: str) -> DeviceRates | None:
    """Find the kind of the GPU that torch calls ``name``; None if it is not in the table.

    Kinds that differ only in their memory count as one.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower().replace("rtx ", "rtx")))
    if any(other <= words for other in _OTHERS):
        return None
    kinds = DEVICE_KINDS.values()
    return next((each for each in kinds if each.name.partition("-")[0] in words), None)
