"""torch.compile: it is on where asked for, tells of graph breaks, and changes no number by more than rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kd.errors import TrainingError
from kd.levers.checkpointing import checkpoint_activations, decoder_layers
from kd.levers.compiling import Compilation, CompileReport, _counts, compile_student
from kd.models import hidden_states

ROOT = Path(__file__).resolve().parent.parent


def make_student() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **shape)).train()


def traced(student: PreTrainedModel) -> Compilation:
    """The student under torch.compile without its code generation, which is what takes long."""
    torch._dynamo.reset()
    student.base_model.compile(backend="eager")
    return Compilation(*_counts())


def step(student: PreTrainedModel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states of a packed batch, and the gradients of the body."""
    tokens_BT = torch.arange(24).reshape(2, 12)
    hidden_BTD = hidden_states(student, tokens_BT, torch.arange(6).repeat(2).expand(2, 12))
    student.zero_grad(set_to_none=True)
    hidden_BTD.square().mean().backward()
    return hidden_BTD.detach(), [each.grad for each in student.base_model.parameters() if each.grad is not None]


def test_none_compiles_nothing() -> None:
    student = make_student()
    assert compile_student(student, "none") is None
    assert student.base_model._compiled_call_impl is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own use
def test_the_body_is_compiled_in_place_and_keeps_its_names() -> None:
    student = make_student()
    names = list(student.state_dict())
    assert compile_student(student, "default") is not None
    assert student.base_model._compiled_call_impl is not None
    assert list(student.state_dict()) == names


def test_the_mode_is_handed_on() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        compile_student(make_student(), "nonsense")  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", ["none", "sqrt"])
def test_a_whole_graph_has_no_break(checkpointing: str) -> None:
    student = make_student()
    checkpoint_activations(student, checkpointing)  # type: ignore[arg-type]
    compilation = traced(student)
    assert compilation.report() == CompileReport(0, ()), "nothing ran yet"
    step(student)
    report = compilation.report()
    assert report == CompileReport(1, ())
    assert str(report) == "torch.compile made 1 graph without a break"


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch looks itself
def test_a_graph_break_is_counted_and_explained() -> None:
    student = make_student()
    layer = decoder_layers(student)[1]

    def look(module: nn.Module, inputs: object) -> None:
        torch._dynamo.graph_break("a hook looks at the hidden states")

    layer.mlp.register_forward_pre_hook(look)
    compilation = traced(student)
    step(student)
    report = compilation.report()
    assert report.graphs > 1
    assert len(report.breaks) >= 1
    assert "Call to `torch._dynamo.graph_break()` (User-inserted graph break" in str(report)
    later = Compilation(*_counts()).report()
    assert later == CompileReport(0, ()), "each report is of its own compilation"


def test_without_a_compiler_it_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    student = make_student()
    with pytest.raises(TrainingError, match=r"train\.compile needs a compiler \(g\+\+ or clang\+\+\)") as caught:
        compile_student(student, "default")
    assert "train.compile to none" in caught.value.remedy
    assert student.base_model._compiled_call_impl is None


CHILD = """
import torch
from kd.levers.checkpointing import checkpoint_activations
from kd.levers.compiling import compile_student
from tests.test_kd_levers_compiling import make_student, step

plain, compiled = make_student(), make_student()
checkpoint_activations(compiled, "full")
compilation = compile_student(compiled, "default")
(hidden, gradients), (hidden_compiled, gradients_compiled) = step(plain), step(compiled)
torch.testing.assert_close(hidden_compiled, hidden)
torch.testing.assert_close(gradients_compiled, gradients)
print(compilation.report())
"""


@pytest.mark.slow
def test_compiled_code_computes_the_same_and_checkpoints_too() -> None:
    """In a process of its own: torch's code generation forks workers, and warns of torch's own deprecations."""
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.compile made 1 graph without a break"
