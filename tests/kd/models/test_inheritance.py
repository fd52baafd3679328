"""Students cut out of teachers: a student with everything is the teacher itself, and unused parts
can be cut away without a change.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bench.support.paths import AUSTEN
from kd.addresses import ModelSource
from kd.config.student import LoraConfig, StudentConfig, StudentFromTeacher
from kd.errors import ModelError
from kd.models.adapters import has_adapters, merge_adapters
from kd.models.inheritance import cut_student, pick_layers, sample_text
from kd.models.lm_head import find_lm_head
from kd.models.loading import build_student, load_model
from tests.support.kd.zoo import VOCABULARY, build

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["llama tied", "llama untied", "mistral", "qwen2", "qwen3"]
BIASED = {"llama untied": {"attention_bias": True, "mlp_bias": True}}
TOKENS_BL = torch.arange(48).view(3, 16) % VOCABULARY


def teacher_of(kind: str, **changes: Any) -> PreTrainedModel:
    return build(kind, **({"num_hidden_layers": 4} | BIASED.get(kind, {}) | changes))


def plan(layers: int = 4, **fields: Any) -> StudentFromTeacher:
    return StudentFromTeacher(layers=layers, **fields)


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    return model.eval()(input_ids=TOKENS_BL).logits


@pytest.mark.parametrize(
    ("pick", "layers", "expected"),
    [
        ("spread", 1, (0,)),
        ("spread", 2, (0, 9)),
        ("spread", 4, (0, 3, 6, 9)),
        ("spread", 3, (0, 5, 9)),
        ("first", 3, (0, 1, 2)),
        ("last", 3, (7, 8, 9)),
        ("ends", 3, (0, 1, 9)),
        ("ends", 4, (0, 1, 8, 9)),
        ("ends", 1, (0,)),
    ],
)
def test_the_rule_picks_layers(pick: str, layers: int, expected: tuple[int, ...]) -> None:
    assert pick_layers(10, plan(layers, pick=pick)) == expected


@pytest.mark.parametrize("pick", ["spread", "first", "last", "ends"])
def test_every_rule_picks_distinct_layers_in_order(pick: str) -> None:
    for there in range(1, 34):
        for count in range(1, there + 1):
            picked = pick_layers(there, plan(count, pick=pick))
            assert (
                len(picked) == count and sorted(set(picked)) == list(picked) and picked[-1] < there
            )
            assert pick != "spread" or count == 1 or (picked[0], picked[-1]) == (0, there - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_all_the_layers_are_the_teacher(kind: str) -> None:
    teacher = teacher_of(kind)
    student = cut_student(teacher, plan())
    assert torch.equal(logits_of(student), logits_of(teacher))
    assert type(student) is type(teacher) and student.num_parameters() == teacher.num_parameters()
    assert all(parameter.requires_grad for parameter in student.parameters())
    own = {parameter.data_ptr() for parameter in teacher.parameters()}
    assert not own & {parameter.data_ptr() for parameter in student.parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_some_of_the_layers_are_what_is_left_when_the_others_are_taken_out(kind: str) -> None:
    teacher = teacher_of(kind)
    student = cut_student(teacher, plan(2, pick="last"))
    layers: Any = teacher.base_model.layers
    teacher.base_model.layers = torch.nn.ModuleList([layers[2], layers[3]])
    expected = logits_of(teacher)
    assert torch.equal(logits_of(student), expected) and student.config.num_hidden_layers == 2


def test_layers_keep_their_kind_of_attention() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    teacher = teacher_of("qwen3", layer_types=kinds, sliding_window=4, use_sliding_window=True)
    student = cut_student(teacher, plan(3, pick="ends"))
    assert student.config.layer_types == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_channels_that_write_nothing_are_cut_for_free(kind: str) -> None:
    """Channels that write zero are cut, however large their weights are.

    The remaining channels keep their order.
    """
    teacher = teacher_of(kind)
    with torch.no_grad():
        for layer in teacher.base_model.layers:
            layer.mlp.down_proj.weight[:, ::2] = 0
            layer.mlp.gate_proj.weight[::2] *= 30
    student = cut_student(teacher, plan(intermediate_size=24))
    assert student.config.intermediate_size == 24
    torch.testing.assert_close(logits_of(student), logits_of(teacher), rtol=1e-5, atol=1e-5)
    less = cut_student(teacher, plan(intermediate_size=20))
    assert not torch.allclose(logits_of(less), logits_of(teacher), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_directions_that_nothing_is_written_to_are_cut_for_free(kind: str) -> None:
    """The stream occupies 16 of 32 directions, none of them an axis, and every norm has its own
    gains.
    """
    teacher = teacher_of(kind, rms_norm_eps=1e-12)  # an epsilon weighs otherwise in another width
    basis_Dd = torch.linalg.qr(torch.randn(32, 16, generator=torch.Generator().manual_seed(3)))[0]
    onto_DD = basis_Dd @ basis_Dd.T
    with torch.no_grad():
        embedding = teacher.get_input_embeddings().weight
        embedding.copy_(embedding @ onto_DD)
        for layer in teacher.base_model.layers:
            for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
                writer.weight.copy_(onto_DD @ writer.weight)
                if writer.bias is not None:
                    writer.bias.copy_(onto_DD @ writer.bias)
    student = cut_student(teacher, plan(hidden_size=16))
    assert student.config.hidden_size == 16 and not student.config.tie_word_embeddings
    torch.testing.assert_close(logits_of(student), logits_of(teacher), rtol=1e-5, atol=1e-4)
    less = cut_student(teacher, plan(hidden_size=12))
    assert not torch.allclose(logits_of(less), logits_of(teacher), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_student_is_saved_and_read_like_any_model(kind: str, tmp_path: Path) -> None:
    student = cut_student(teacher_of(kind), plan(2, hidden_size=24, intermediate_size=40))
    student.save_pretrained(tmp_path)
    again = load_model(tmp_path, torch.float32)
    assert torch.equal(logits_of(again), logits_of(student))
    assert find_lm_head(again, VOCABULARY).weight.shape == (96, 24)


@pytest.mark.long
def test_the_teacher_stays_as_it_was_and_the_student_is_a_function_of_it() -> None:
    teacher = teacher_of("llama tied")
    before = copy.deepcopy(teacher.state_dict())
    shape = plan(3, hidden_size=24, intermediate_size=40)
    torch.manual_seed(0)
    one = cut_student(teacher, shape)
    torch.manual_seed(1)
    same = cut_student(teacher, shape)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert not any(module._forward_pre_hooks for module in teacher.modules())
    assert one.generation_config.to_dict() == teacher.generation_config.to_dict()


def test_the_text_is_the_teacher_s_own() -> None:
    """The text's mean negative log-likelihood is the teacher's entropy on it."""
    teacher = build("llama untied")
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(6)
    text_BL = sample_text(teacher, sequences=64, length=32)
    assert text_BL.shape == (64, 32) and set(text_BL[:, 0].tolist()) == {
        teacher.config.bos_token_id
    }
    with torch.no_grad():
        logprobs = teacher(input_ids=text_BL[:, :-1]).logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    surprise = -logprobs.gather(2, text_BL[:, 1:, None])[..., 0]
    spread = float((surprise - entropy).std()) / math.sqrt(surprise.numel())
    assert abs(float((surprise - entropy).mean())) < 4 * spread
    assert float(entropy.mean()) < math.log(96) - 0.2


@torch.no_grad()
@pytest.mark.long
def test_on_the_example_a_cut_student_begins_far_ahead_of_a_fresh_one(tokenizer: Any) -> None:
    teacher = load_model(AUSTEN / "teacher", torch.float32).eval()
    text = (AUSTEN / "text" / "persuasion.txt").read_text(encoding="utf-8")[3000:9000]
    tokens_BL = torch.tensor([tokenizer(text)["input_ids"][:1024]]).view(4, 256)

    def loss(student: PreTrainedModel) -> float:
        logits_NV = student(input_ids=tokens_BL).logits[:, :-1].flatten(0, 1)
        return float(cross_entropy(logits_NV, tokens_BL[:, 1:].flatten()))

    whole = loss(teacher)
    fresh = math.log(2048)
    assert loss(cut_student(teacher, plan(6, hidden_size=128))) < whole + 0.6
    assert loss(cut_student(teacher, plan(6, intermediate_size=352))) < whole + 0.8
    assert loss(cut_student(teacher, plan(3, pick="spread"))) < whole + 1.1
    narrow = plan(3, pick="spread", hidden_size=128, intermediate_size=352)
    assert loss(cut_student(teacher, narrow)) < fresh - 1.5


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("gpt2", "hidden_size"),
        ("gemma2 soft cap", "hidden_size"),
        ("gemma2 soft cap", "intermediate_size"),
        ("mixtral", "intermediate_size"),
    ],
)
def test_narrower_students_of_another_kind_are_refused_by_name(kind: str, field: str) -> None:
    teacher = build(kind)
    with pytest.raises(
        ModelError,
        match=f"{field} cannot make a {type(teacher).__name__} narrower: "
        ".* llama, mistral, qwen2, qwen3",
    ):
        cut_student(teacher, plan(1, **{field: 16}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 5}, "layers is 5, but the teacher .* has only 4"),
        ({"hidden_size": 64}, "hidden_size is 64, but the teacher .* has only 32"),
        ({"intermediate_size": 64}, "intermediate_size is 64, but the teacher .* has only 48"),
        ({"hidden_size": 15}, r"no LlamaForCausalLM has this shape: .*15"),
    ],
)
def test_students_larger_than_the_teacher_or_of_no_shape_are_refused(
    fields: dict[str, int], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        cut_student(teacher_of("llama tied"), StudentFromTeacher(**{"layers": 4} | fields))


def test_a_job_may_take_layers_of_its_teacher_and_put_adapters_on_them(
    tiny_teacher: Path, tokenizer: Any
) -> None:
    teacher = ModelSource(str(tiny_teacher))
    config = StudentConfig(from_teacher=plan(1), lora=LoraConfig(rank=4))
    student = build_student(config, tokenizer, 64, teacher)
    assert has_adapters(student) and student.config.num_hidden_layers == 1
    original = load_model(tiny_teacher, torch.float32).model.layers[0].state_dict()
    kept = merge_adapters(student).model.layers[0].state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in original.items())
