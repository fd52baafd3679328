"""torch.compile: where asked for, with a report of breaks, and results equal up to rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from bench.support.paths import ROOT
from bench.support.waiting import PATIENCE_SECONDS
from kd.errors import TrainingError
from kd.memory.activation_checkpointing import checkpoint_activations
from kd.models.layers import find_decoder_layers
from kd.training.compiling import Compilation, _read_counts, compile_student
from tests.support.kd.students import make_llama, step_packed

CPU = torch.device("cpu")


def traced(student: PreTrainedModel) -> Compilation:
    """The student under torch.compile without its code generation, which is what takes long."""
    torch._dynamo.reset()
    student.base_model.compile(backend="eager")
    return Compilation(*_read_counts())


def test_none_compiles_nothing() -> None:
    student = make_llama().train()
    assert compile_student(student, "none", CPU) is None
    assert student.base_model._compiled_call_impl is None


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch's own use
def test_the_body_is_compiled_in_place_and_keeps_its_names() -> None:
    student = make_llama().train()
    names = list(student.state_dict())
    assert compile_student(student, "default", CPU) is not None
    assert student.base_model._compiled_call_impl is not None
    assert list(student.state_dict()) == names


def test_the_mode_is_handed_on() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        compile_student(make_llama().train(), "nonsense", CPU)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", ["none", "sqrt"])
def test_a_whole_graph_has_no_break(checkpointing: str) -> None:
    student = make_llama().train()
    checkpoint_activations(student, checkpointing)  # type: ignore[arg-type]
    compilation = traced(student)
    assert compilation.report().facts == {"graphs": 0, "breaks": []}, "nothing ran yet"
    step_packed(student)
    report = compilation.report()
    assert report.ok and report.facts == {"graphs": 1, "breaks": []}
    assert report.message == "torch.compile made 1 graph without a break."


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch looks itself
def test_a_graph_break_is_counted_and_explained() -> None:
    student = make_llama().train()
    layer = find_decoder_layers(student)[1]

    def look(module: nn.Module, inputs: object) -> None:
        torch._dynamo.graph_break("a hook looks at the hidden states")

    layer.mlp.register_forward_pre_hook(look)
    compilation = traced(student)
    step_packed(student)
    report = compilation.report()
    assert report.facts["graphs"] > 1
    assert not report.ok and len(report.facts["breaks"]) >= 1
    assert "Call to `torch._dynamo.graph_break()` (User-inserted graph break" in report.message
    later = Compilation(*_read_counts()).report().facts
    assert later == {"graphs": 0, "breaks": []}, "each report is of its own compilation"


def test_without_a_compiler_it_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    student = make_llama().train()
    with pytest.raises(
        TrainingError, match=r"train\.compile needs a compiler \(g\+\+ or clang\+\+\)"
    ) as caught:
        compile_student(student, "default", CPU)
    assert "train.compile to none" in caught.value.remedy
    assert student.base_model._compiled_call_impl is None


CHILD = """
import torch
from kd.memory.activation_checkpointing import checkpoint_activations
from kd.training.compiling import compile_student
from tests.support.kd.students import make_llama, step_packed

plain, compiled = make_llama().train(), make_llama().train()
checkpoint_activations(compiled, "full")
compilation = compile_student(compiled, "default", compiled.device)
hidden, gradients = step_packed(plain)
hidden_compiled, gradients_compiled = step_packed(compiled)
torch.testing.assert_close(hidden_compiled, hidden)
torch.testing.assert_close(gradients_compiled, gradients)
print(compilation.report().message)
"""


@pytest.mark.slow
def test_compiled_code_computes_the_same_and_checkpoints_too() -> None:
    """In a process of its own.

    torch's code generation forks workers, and warns of torch's own deprecations.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.compile made 1 graph without a break."
