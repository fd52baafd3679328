"""Compile each GPU kernel for some kinds of GPU, and print what it takes there; needs no GPU.

    python bench/gpu/kernel_builds.py [--capability 75 80 86 89 90 100] [--vocabulary 128256 151669]
                            [--dtype bfloat16 float32] [--out FILE]

The kernels are compiled as a launch would compile them: triton sees the same arguments, and so the
same addresses, strides and sizes that are multiples of 16. The assembler and the reader of its
results come with triton.

    loss      the rows of ``kd.loss.student_rows``; "full" is a head with bias, scale and soft cap,
              at T = 2, with label smoothing and a learned temperature
    loads     of a thread, for one block of logits: count x bytes. Rows are read fastest in loads of
              16 bytes.
    spilled   bytes of a thread's stack and local memory: registers that did not suffice
    sm        registers of a thread on that kind of GPU, and in brackets the warps that are resident
              on a multiprocessor, as its 65,536 registers allow: at most 64 on 80, 90 and 100, 48
              on 86 and 89, 32 on 75
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

# The interpreter compiles nothing. Triton reads the variable when it is first imported.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kd.kernels import triton_rows
from kd.loss.student_rows import StudentRows
from kd.models.lm_head import LMHead

CAPABILITIES = (75, 80, 86, 89, 90, 100)
#: Llama 3's, a multiple of 16, and Qwen 3's tokenizer's, which is none.
VOCABULARIES = (128_256, 151_669)
DTYPES = ("bfloat16", "float32")
REGISTERS = 65_536
MOST_WARPS = {75: 32, 80: 64, 86: 48, 89: 48, 90: 64, 100: 64}
#: Registers are given to a warp in units of this many.
REGISTER_UNIT = 256
ROWS = 2
WIDTH = 16
COLUMNS = ("kernel", "rows of", "logits", "V", "loads", "stores", "spilled")


@dataclass(frozen=True)
class Build:
    """A kernel, compiled for one kind of GPU; ``loads`` and ``stores`` count widths in bytes."""

    kernel: str
    rows: str
    dtype: str
    vocabulary: int
    capability: int
    registers: int
    spilled: int
    loads: Counter[int]
    stores: Counter[int]

    @property
    def warps(self) -> int:
        """The warps that are resident at once, in whole programs."""
        each = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        most = min(REGISTERS // each, MOST_WARPS[self.capability])
        return most // triton_rows.WARPS * triton_rows.WARPS

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of its row in the table that are not of one kind of GPU."""
        name = self.kernel.strip("_").removesuffix("_kernel")
        accesses = (describe_accesses(each) for each in (self.loads, self.stores))
        return (name, self.rows, self.dtype, f"{self.vocabulary:,}", *accesses, str(self.spilled))


def describe_accesses(widths: Counter[int]) -> str:
    """Describe accesses to memory, the widest first."""
    found = sorted(widths.items(), reverse=True)
    return ", ".join(f"{count} x {width}" for width, count in found)


# ---------------------------------------------------------------------- the launches


def launch_plain_loss(dtype: torch.dtype, vocabulary: int) -> None:
    """Launch the kernels of a chunk of the loss, for a plain LM head at T = 1."""
    head = LMHead(torch.zeros(vocabulary, WIDTH, dtype=dtype), None, 1.0, None, vocabulary)
    launch_loss(head, dtype, temperature=1.0, full=False)


def launch_full_loss(dtype: torch.dtype, vocabulary: int) -> None:
    """Launch the kernels of a chunk of the loss with all that they can do."""
    weight_VD = torch.zeros(vocabulary, WIDTH, dtype=dtype)
    head = LMHead(weight_VD, torch.zeros(vocabulary), 0.5, 30.0, vocabulary)
    launch_loss(head, dtype, temperature=2.0, full=True)


def launch_loss(head: LMHead, dtype: torch.dtype, temperature: float, full: bool) -> None:
    hidden_ND = torch.zeros(ROWS, WIDTH, dtype=dtype)
    gold_N = torch.zeros(ROWS, dtype=torch.int64)
    rows = StudentRows.of(hidden_ND, head, gold_N, None, temperature, smoothing=full, slope=full)
    rows.turn_into_gradient_(0.1, 0.9, 0.1, 0.1 if full else 0.0)


LAUNCHES: dict[str, Callable[[torch.dtype, int], None]] = {
    "loss": launch_plain_loss,
    "loss, full": launch_full_loss,
}
KERNELS = ("_reduce_rows_kernel", "_write_gradient_kernel")


# ---------------------------------------------------------------------- compilation


@dataclass(frozen=True)
class _AbsentGpu:
    """What triton asks of a driver before it compiles; each kind of GPU is a device of its own."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class _Compiler:
    """Stands for a kernel: it compiles what it is asked to launch, and keeps the result."""

    kernel: Any
    built: list[Any]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def compile_launch(*arguments: Any, **options: Any) -> None:
            self.built.append(self.kernel.warmup(*arguments, grid=grid, **options))

        return compile_launch


def compile_kernels(capability: int, dtype: str, vocabulary: int) -> Iterator[Build]:
    """Compile every launch for one kind of GPU."""
    driver.set_active(_AbsentGpu(capability))
    for rows, launch in LAUNCHES.items():
        built: list[Any] = []
        with ExitStack() as stack:
            for name in KERNELS:
                compiler = _Compiler(getattr(triton_rows, name), built)
                stack.enter_context(patch.object(triton_rows, name, compiler))
            launch(getattr(torch, dtype), vocabulary)
        for each in built:
            registers, spilled = read_resources(each.asm["cubin"])
            yield Build(
                kernel=each.metadata.name,
                rows=rows,
                dtype=dtype,
                vocabulary=vocabulary,
                capability=capability,
                registers=registers,
                spilled=spilled,
                loads=count_accesses("ld", each.asm["ptx"]),
                stores=count_accesses("st", each.asm["ptx"]),
            )


def read_resources(cubin: bytes) -> tuple[int, int]:
    """Read the registers of a thread, and the bytes of its stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(re.findall(rf"\b{name}:(\d+)", told)[-1])
             for name in ("REG", "STACK", "LOCAL")}  # fmt: skip
    return found["REG"], found["STACK"] + found["LOCAL"]


def count_accesses(kind: str, ptx: str) -> Counter[int]:
    """Count the accesses to global memory by their bytes: ``ld`` or ``st``."""
    found = re.findall(rf"\b{kind}\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return Counter(int(lanes or 1) * int(bits) // 8 for lanes, bits in found)


# ---------------------------------------------------------------------- the table


def render(builds: list[Build]) -> str:
    """The versions of the tools, and the builds as a markdown table with a row for each launch."""
    tools = f"ptxas {knobs.nvidia.ptxas.version}"
    if max(build.capability for build in builds) >= 100:
        tools += f", for sm_100 {knobs.nvidia.ptxas_blackwell.version}"
    capabilities = sorted({build.capability for build in builds})
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for build in builds:
        found = rows.setdefault(build.cells, dict.fromkeys(capabilities, "-"))
        found[build.capability] = f"{build.registers} ({build.warps})"
    heading = [*COLUMNS, *(f"sm {capability}" for capability in capabilities)]
    lines = [
        f"Compiled by triton {triton.__version__}, {tools}; {triton_rows.WARPS} warps a program.",
        "",
        f"| {' | '.join(heading)} |",
        "|---|---|---|--:|---|---|--:|" + "--:|" * len(capabilities),
        *(f"| {' | '.join([*cells, *found.values()])} |" for cells, found in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", nargs="+", type=int, default=CAPABILITIES,
                        choices=CAPABILITIES)  # fmt: skip
    parser.add_argument("--vocabulary", nargs="+", type=int, default=VOCABULARIES)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    sizes = [(dtype, size) for size in given.vocabulary for dtype in given.dtype]
    builds = [
        build
        for size in sizes
        for capability in given.capability
        for build in compile_kernels(capability, *size)
    ]
    text = render(builds)
    sys.stdout.write(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
