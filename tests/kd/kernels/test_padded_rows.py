"""Padded rows: kernels touch 16 bytes at a time for any vocabulary, and the values are equal."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.support.waiting import PATIENCE_SECONDS
from kd.kernels.padded_rows import ALIGNMENT, GROUP, count_columns, make_rows

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None and not os.environ.get("CI"),
        reason="needs triton",
    ),
]
#: The tokens of Qwen3's tokenizer.
QWEN3 = 151_669
VOCABULARIES = pytest.mark.parametrize("vocabulary", [1, 15, 16, 61, 64, 4097])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def test_rows_begin_at_lines_of_memory_and_keep_the_length_of_the_vocabulary() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows_NV = make_rows(torch.empty(0), 3, QWEN3, dtype)
        assert rows_NV.shape == (3, QWEN3) and rows_NV.dtype == dtype
        assert rows_NV.stride(0) % ALIGNMENT == 0 and rows_NV.stride(0) - QWEN3 < ALIGNMENT
        assert count_columns(rows_NV) % GROUP == 0
        assert QWEN3 <= count_columns(rows_NV) <= rows_NV.stride(0)
    assert count_columns(torch.empty(3, QWEN3)) == QWEN3, (
        "nothing lies between rows without padding"
    )
    assert count_columns(torch.empty(3, 64)) == 64


def pad(z_NV: Tensor) -> Tensor:
    """The numbers in padded rows, whose padding is not finite."""
    rows_NV = make_rows(z_NV, *z_NV.shape, z_NV.dtype)
    whole = rows_NV.as_strided((len(z_NV), rows_NV.stride(0)), (rows_NV.stride(0), 1))
    whole.fill_(torch.nan)
    return rows_NV.copy_(z_NV)


@VOCABULARIES
@DTYPES
def test_padding_is_in_no_sum(vocabulary: int, dtype: torch.dtype) -> None:
    from kd.kernels.triton_rows import reduce_rows

    generator = torch.Generator().manual_seed(vocabulary)
    z_NV = torch.randn(3, vocabulary, generator=generator).to(dtype)
    plain = reduce_rows(z_NV, temperature=2.0, total=True, mean=True)
    padded = reduce_rows(pad(z_NV), temperature=2.0, total=True, mean=True)
    for found, expected in zip(vars(padded).values(), vars(plain).values(), strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(padded.lse_N, z_NV.float().logsumexp(1))


@VOCABULARIES
@DTYPES
def test_the_gradient_of_padded_rows_is_that_of_others(vocabulary: int, dtype: torch.dtype) -> None:
    from kd.kernels.triton_rows import PLAIN_LM_HEAD, reduce_rows, write_gradient_

    generator = torch.Generator().manual_seed(vocabulary)
    z_NV = torch.randn(3, vocabulary, generator=generator).to(dtype)
    padded_NV = pad(z_NV)
    rows = reduce_rows(z_NV, temperature=2.0)
    factors = (torch.linspace(0.1, 0.3, 3), torch.linspace(0.5, 0.9, 3), 0.01)
    write_gradient_(z_NV, PLAIN_LM_HEAD, 2.0, rows, *factors)
    write_gradient_(padded_NV, PLAIN_LM_HEAD, 2.0, rows, *factors)
    assert torch.equal(padded_NV, z_NV) and torch.isfinite(z_NV).all()


# ---------------------------------------------------------------------- compilation

COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kd.kernels import triton_rows
from kd.kernels.padded_rows import count_columns, make_rows

target = GPUTarget("cuda", int(sys.argv[1]), 32)
vocabulary = int(sys.argv[2])
dtype = sys.argv[3]
width = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
rows = make_rows(torch.empty(0), 2, vocabulary, width)
if sys.argv[4] == "tight":
    rows = rows.contiguous()
numbers = {"vocabulary": vocabulary, "end": count_columns(rows), "stride": rows.stride(0)}
constants = {
    "_reduce_rows_kernel": {"BLOCK": triton_rows.REDUCE_BLOCK},
    "_write_gradient_kernel": {"BLOCK": triton_rows.WRITE_BLOCK},
}
for name, sizes in constants.items():
    kernel = getattr(triton_rows, name)
    types = {}
    divisible = {}
    fixed = {}
    for place, argument in enumerate(kernel.arg_names):
        if argument.isupper():
            types[argument] = "constexpr"
            fixed[(place,)] = sizes.get(argument, False)
        elif argument.endswith(("_NV", "_V", "_N")):
            types[argument] = "*" + (dtype if argument.endswith("V") else "fp32")
            divisible[(place,)] = [["tt.divisibility", 16]]
        elif argument in numbers:
            types[argument] = "i32"
            # As triton does when the kernel is called.
            if numbers.get(argument, 1) % 16 == 0:
                divisible[(place,)] = [["tt.divisibility", 16]]
        else:
            types[argument] = "fp32"
    source = ASTSource(kernel, types, fixed, divisible)
    built = triton.compile(source, target=target, options={"num_warps": triton_rows.WARPS})
    print("kernel", name)
    print(built.asm["ptx"])
"""
#: A load or store of global memory in PTX: its vector and the bits of an element.
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.b(\d+)\s")


def compile_kernels(
    capability: int, vocabulary: int, dtype: str, rows: str, folder: Path
) -> dict[str, Counter[tuple[str, int]]]:
    """How often the kernels access so many bytes at once, by kernel, then by "ld" or "st"."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), str(vocabulary), dtype, rows],
        env=environment | {"TRITON_CACHE_DIR": os.fspath(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for part in done.stdout.split("kernel _")[1:]:
        name, code = part.split("\n", 1)
        found[name] = Counter(
            (kind, int(vector or 1) * int(bits) // 8) for kind, vector, bits in ACCESS.findall(code)
        )
    return found


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        pytest.param(80, "bf16", marks=pytest.mark.long),
        pytest.param(80, "fp32", marks=pytest.mark.slow),
        pytest.param(90, "bf16", marks=pytest.mark.slow),
        pytest.param(90, "fp32", marks=pytest.mark.slow),
    ],
)
def test_logits_of_any_vocabulary_are_read_and_written_16_bytes_at_a_time(
    capability: int, dtype: str, tmp_path: Path
) -> None:
    """Every other access is one number of a row's sums, of 4 bytes."""
    found = compile_kernels(capability, QWEN3, dtype, "padded", tmp_path)
    # A thread of a program of 256 holds 16 logits of a block of 4,096, or 8 of one of 2,048.
    loads = {"bf16": 2, "fp32": 4}[dtype]
    assert found["reduce_rows_kernel"]["ld", 16] == loads
    assert found["write_gradient_kernel"]["ld", 16] == loads // 2
    assert found["write_gradient_kernel"]["st", 16] == loads // 2
    for accesses in found.values():
        assert {size for _, size in accesses} == {4, 16}
        assert sum(count for (_, size), count in accesses.items() if size == 4) <= 3


@pytest.mark.slow
def test_rows_without_padding_are_read_one_element_at_a_time(tmp_path: Path) -> None:
    for accesses in compile_kernels(80, QWEN3, "bf16", "tight", tmp_path).values():
        assert {size for _, size in accesses} == {2, 4}
