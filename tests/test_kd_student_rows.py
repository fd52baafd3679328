"""The kernels of a GPU, run by Triton's interpreter on the CPU, and compiled for the GPUs that there are.

What a GPU itself makes of them is in tests/test_gpu.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import kd.losses
from kd.losses import Objective, distillation_loss
from kd.models import Head
from kd.student_rows import StudentRows, kernels_run
from kd.targets import SparseTarget, Targets
from tests.test_kd_losses import CHUNKS, LEVERS, SHAPES, D, N, Shape, V, learned, random_targets, require_parity

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py runs them on the GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None and not os.environ.get("CI"), reason="needs triton"),
]
BLOCKS = pytest.mark.parametrize("block", [16, 64], ids=["many blocks", "one block"])  # V = 61 is not a multiple


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused pass takes the kernels, as it does on a GPU."""
    monkeypatch.setattr(kd.losses, "kernels_run", lambda hidden_ND: hidden_ND.dtype != torch.float64)


@pytest.fixture
def _block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import kd.row_kernels

    monkeypatch.setattr(kd.row_kernels, "REDUCE_BLOCK", block)
    monkeypatch.setattr(kd.row_kernels, "WRITE_BLOCK", block)


def plain(targets: Targets) -> Targets:
    """The same without a teacher."""
    return replace(targets, teacher=None)


@BLOCKS
@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_value_and_gradients_equal_the_dense_reference(temperature: float, shape: Shape, alpha: float) -> None:
    require_parity(random_targets(1, "sparse", temperature), shape, Objective(alpha), 7)


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4])
def test_every_lever_and_the_temperature_s_gradient(temperature: float, lever: str) -> None:
    targets = random_targets(3, "sparse", temperature)
    require_parity(targets, SHAPES["all"], LEVERS[lever], 5)
    require_parity(learned(targets, temperature), SHAPES["all"], LEVERS[lever], 5)


@CHUNKS
@pytest.mark.parametrize("shape", ["plain", "all"])
def test_hard_labels_alone(shape: str, chunk: int | None) -> None:
    require_parity(plain(random_targets(2)), SHAPES[shape], LEVERS["hard only"], chunk)


def test_the_kernels_are_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    import kd.row_kernels

    assert isinstance(kd.row_kernels._reduce, InterpretedFunction)
    monkeypatch.setattr(kd.row_kernels, "_reduce", None)
    with pytest.raises(TypeError, match="not subscriptable"):
        require_parity(random_targets(1), SHAPES["plain"], Objective(0.1))


def test_whole_distributions_and_float64_go_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kd.losses, "StudentRows", None)
    for profile in ("top", "dense", "hidden"):
        require_parity(random_targets(1, profile), SHAPES["plain"], Objective(0.1))
    require_parity(random_targets(1), SHAPES["plain"], Objective(0.1), None, torch.float64)
    monkeypatch.undo()
    assert not kernels_run(torch.ones(2, 3)), "a CPU has no use for them"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    """The logits as a 16-bit product has them; from there to the gradient nothing but the last rounding."""
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(rows, D, generator=generator).to(dtype) for rows in (N, V))
    targets = random_targets(5)
    assert isinstance(targets.teacher, SparseTarget)
    student = StudentRows.of(x, Head(weight, None, 1.0, None, V), targets.gold_N, targets.teacher, 1.0, False, False)
    z_NV = student.z_NV.double()
    found_NV = student.gradient_(0.2, 0.8, 0.2, 0.0)
    expected_NV = torch.softmax(z_NV, 1)
    targets.teacher.subtract_(expected_NV, 0.8)
    expected_NV[torch.arange(N), targets.gold_N] -= 0.2
    rounding = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2)  # the interpreter cuts bfloat16 off
    excess_NV = (found_NV.double() - expected_NV).abs() - rounding * expected_NV.abs()
    assert float(excess_NV.max()) < 1e-6


def test_an_entry_that_is_the_gold_token_twice_counts_once() -> None:
    """An always_keep id that is the gold token is an entry without a weight beside the one with it."""
    generator = torch.Generator().manual_seed(6)
    gold_N = torch.randint(0, V - 1, (N,), generator=generator)
    ids_NE = torch.stack([gold_N, gold_N, (gold_N + 1) % V], 1)
    weights_NE = torch.tensor([0.7, 0.0, 0.3], dtype=torch.float64).expand(N, -1)
    zero_N = torch.zeros(N, dtype=torch.int64)
    target = SparseTarget(3 * torch.arange(N + 1), ids_NE.reshape(-1), weights_NE.reshape(-1), zero_N.double(), zero_N)
    require_parity(Targets(gold_N, target), SHAPES["all"], Objective(0.3), 5)


def test_the_same_bits_every_time() -> None:
    x, weight = torch.randn(N, D), torch.randn(V, D)

    def gradients() -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        head = Head(leaves[1], None, 1.0, None, V)
        distillation_loss(leaves[0], head, random_targets(7), Objective(0.3), 5).total.backward()
        return [each.grad for each in leaves]

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


# ---------------------------------------------------------------------- compiled for GPUs that are not here

COMPILE = """
import itertools, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kd import row_kernels

flags = {
    "_reduce": ["BIASED", "CAPPED", "TEMPERED", "TOTAL", "MEAN"],
    "_write": ["BIASED", "CAPPED", "TEMPERED"],
    "_blocks": ["BLOCKS"],
}
target = GPUTarget("cuda", int(sys.argv[1]), 32)
for name, switches in flags.items():
    kernel = getattr(row_kernels, name)
    for dtype, on in itertools.product(("bf16", "fp32"), (False, True)):
        constants = dict.fromkeys(switches, on) | {"BLOCK": 4096}
        if name == "_blocks":
            constants = {"BLOCKS": 32, "BLOCK": 64}
        types = {}
        for argument in kernel.arg_names:
            if argument in constants:
                types[argument] = "constexpr"
            elif argument.startswith(("z_", "s_", "bias_")):
                types[argument] = "*" + dtype
            elif argument.endswith(("_N", "_NJ")):
                types[argument] = "*fp32"
            else:
                types[argument] = "i32" if argument in ("vocabulary", "stride", "blocks") else "fp32"
        source = ASTSource(kernel, types, {(kernel.arg_names.index(key),): value for key, value in constants.items()})
        built = triton.compile(source, target=target, options={"num_warps": row_kernels.WARPS})
        spilled = [line for line in built.asm["ptx"].splitlines() if ".local" in line]
        assert built.asm["cubin"] and not spilled, (name, dtype, on, spilled)
        print(name, dtype, on, len(built.asm["cubin"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 90])
def test_the_kernels_compile_for(capability: int, tmp_path: os.PathLike[str]) -> None:
    """Turing and Hopper: to machine code, by the assembler that triton brings."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": os.fspath(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
