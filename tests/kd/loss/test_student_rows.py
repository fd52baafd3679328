"""The GPU kernels, run on the CPU by Triton's interpreter, and compiled for some GPUs.

Their results on a real GPU are tested in tests/system/test_gpu.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import kd.loss.fused
from bench.support.waiting import PATIENCE_SECONDS
from kd.kernels.available import can_run_kernels
from kd.loss.fused import compute_distillation_loss
from kd.loss.objective import Objective
from kd.loss.sparse_targets import SparseTarget
from kd.loss.student_rows import StudentRows
from kd.loss.targets import Targets
from kd.models.lm_head import LMHead
from tests.support.kd.targets import (
    CHUNKS,
    LEVERS,
    SHAPES,
    D,
    N,
    Shape,
    V,
    learned,
    random_targets,
    require_parity,
)

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tests/system/test_gpu.py runs them on the GPU"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None and not os.environ.get("CI"),
        reason="needs triton",
    ),
]
BLOCKS = pytest.mark.parametrize(
    "block", [16, 64], ids=["many blocks", "one block"]
)  # V = 61 is no multiple of it


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fused pass use the kernels, as on a GPU."""
    monkeypatch.setattr(
        kd.loss.fused, "can_run_kernels", lambda hidden_ND: hidden_ND.dtype != torch.float64
    )


@pytest.fixture
def _block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import kd.kernels.triton_rows

    monkeypatch.setattr(kd.kernels.triton_rows, "REDUCE_BLOCK", block)
    monkeypatch.setattr(kd.kernels.triton_rows, "WRITE_BLOCK", block)


def make_plain_targets(targets: Targets) -> Targets:
    """The targets without the teacher."""
    return replace(targets, teacher=None)


@BLOCKS
@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.long
def test_value_and_gradients_equal_the_dense_reference(
    temperature: float, shape: Shape, alpha: float
) -> None:
    require_parity(random_targets(1, "sparse", temperature), shape, Objective(alpha), 7)


@pytest.mark.long
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4])
def test_every_lever_and_the_temperature_s_gradient(temperature: float, lever: str) -> None:
    targets = random_targets(3, "sparse", temperature)
    require_parity(targets, SHAPES["all"], LEVERS[lever], 5)
    require_parity(learned(targets, temperature), SHAPES["all"], LEVERS[lever], 5)


@CHUNKS
@pytest.mark.parametrize("shape", ["plain", "all"])
def test_hard_labels_alone(shape: str, chunk: int | None) -> None:
    require_parity(make_plain_targets(random_targets(2)), SHAPES[shape], LEVERS["hard only"], chunk)


def test_the_kernels_are_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    import kd.kernels.triton_rows

    assert isinstance(kd.kernels.triton_rows._reduce_rows_kernel, InterpretedFunction)
    monkeypatch.setattr(kd.kernels.triton_rows, "_reduce_rows_kernel", None)
    with pytest.raises(TypeError, match="not subscriptable"):
        require_parity(random_targets(1), SHAPES["plain"], Objective(0.1))


def test_whole_distributions_and_float64_go_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kd.loss.fused, "StudentRows", None)
    for profile in ("top", "dense", "hidden"):
        require_parity(random_targets(1, profile), SHAPES["plain"], Objective(0.1))
    require_parity(random_targets(1), SHAPES["plain"], Objective(0.1), None, torch.float64)
    monkeypatch.undo()
    assert not can_run_kernels(torch.ones(2, 3)), "a CPU has no use for them"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    """From the logits of a 16-bit product to the gradient, only the last step rounds."""
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(rows, D, generator=generator).to(dtype) for rows in (N, V))
    targets = random_targets(5)
    assert isinstance(targets.teacher, SparseTarget)
    student = StudentRows.of(
        x, LMHead(weight, None, 1.0, None, V), targets.gold_N, targets.teacher, 1.0, False, False
    )
    z_NV = student.z_NV.double()
    found_NV = student.turn_into_gradient_(0.2, 0.8, 0.2, 0.0)
    expected_NV = torch.softmax(z_NV, 1)
    expected_NV *= 0.2 + 0.8 * targets.teacher.total_N[:, None]
    targets.teacher.subtract_(expected_NV, 0.8)
    expected_NV[torch.arange(N), targets.gold_N] -= 0.2
    rounding = torch.finfo(dtype).eps / (
        1 if dtype == torch.bfloat16 else 2
    )  # the interpreter truncates to bfloat16
    excess_NV = (found_NV.double() - expected_NV).abs() - rounding * expected_NV.abs()
    assert float(excess_NV.max()) < 1e-6


def test_an_entry_that_is_the_gold_token_twice_counts_once() -> None:
    """An always_keep id that is the gold token adds an entry of weight 0 beside its own."""
    generator = torch.Generator().manual_seed(6)
    gold_N = torch.randint(0, V - 1, (N,), generator=generator)
    ids_NK = torch.stack([gold_N, gold_N, (gold_N + 1) % V], 1)
    weights_NK = torch.tensor([0.7, 0.0, 0.3], dtype=torch.float64).expand(N, -1)
    zero_N = torch.zeros(N, dtype=torch.int64)
    target = SparseTarget(
        3 * torch.arange(N + 1), ids_NK.reshape(-1), weights_NK.reshape(-1), zero_N.double(), zero_N
    )
    require_parity(Targets(gold_N, target), SHAPES["all"], Objective(0.3), 5)


def test_the_same_bits_every_time() -> None:
    x = torch.randn(N, D)
    weight = torch.randn(V, D)

    def compute_gradients() -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        head = LMHead(leaves[1], None, 1.0, None, V)
        compute_distillation_loss(
            leaves[0], head, random_targets(7), Objective(0.3), 5
        ).total.backward()
        return [each.grad for each in leaves]

    for first, second in zip(compute_gradients(), compute_gradients(), strict=True):
        assert torch.equal(first, second)


# ---------------------------------------------------------------------- compilation

COMPILE = """
import itertools, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kd.kernels import triton_rows as row_kernels

flags = {
    "_reduce_rows_kernel": ["BIASED", "CAPPED", "TEMPERED", "TOTAL", "MEAN"],
    "_write_gradient_kernel": ["BIASED", "CAPPED", "TEMPERED"],
}
target = GPUTarget("cuda", int(sys.argv[1]), 32)
for name, switches in flags.items():
    kernel = getattr(row_kernels, name)
    for dtype, on in itertools.product(("bf16", "fp32"), (False, True)):
        constants = dict.fromkeys(switches, on) | {"BLOCK": 4096}
        types = {}
        for argument in kernel.arg_names:
            if argument in constants:
                types[argument] = "constexpr"
            elif argument.startswith(("z_", "bias_")):
                types[argument] = "*" + dtype
            elif argument.endswith("_N"):
                types[argument] = "*fp32"
            else:
                sizes = ("vocabulary", "end", "stride")
                types[argument] = "i32" if argument in sizes else "fp32"
        places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
        source = ASTSource(kernel, types, places)
        built = triton.compile(source, target=target, options={"num_warps": row_kernels.WARPS})
        spilled = [line for line in built.asm["ptx"].splitlines() if ".local" in line]
        assert built.asm["cubin"] and not spilled, (name, dtype, on, spilled)
        print(name, dtype, on, len(built.asm["cubin"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 90])
def test_the_kernels_compile_for(capability: int, tmp_path: os.PathLike[str]) -> None:
    """Compile for Turing and Hopper to machine code, with the assembler that triton includes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": os.fspath(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8
