"""Models of many architectures, real but tiny: our logits are theirs, or the model is refused by name."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

from kd import models
from kd.config.student import StudentConfig, StudentInit
from kd.config.teacher import TeacherConfig
from kd.errors import ModelError, TokenizerMismatch
from kd.student import save_student

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, ROWS = 90, 96  # every head is padded
LLAMA = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {
    "vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OPT = {
    "vocab_size": ROWS, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32,
}  # fmt: skip
MAMBA = {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
BLOOM = {"vocab_size": ROWS, "hidden_size": 32, "n_layer": 2, "n_head": 2}
FALCON_H1 = LLAMA | {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
}  # fmt: skip

ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("LlamaConfig", LLAMA | {"tie_word_embeddings": True}),
    "llama untied": ("LlamaConfig", LLAMA | {"tie_word_embeddings": False}),
    "gpt2": ("GPT2Config", GPT),
    "gemma2 soft cap": ("Gemma2Config", LLAMA | {"head_dim": 16}),
    "gemma2 low cap": ("Gemma2Config", LLAMA | {"head_dim": 16, "final_logit_softcapping": 2.0}),
    "gemma2 no cap": ("Gemma2Config", LLAMA | {"head_dim": 16, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3TextConfig", LLAMA | {"head_dim": 16, "final_logit_softcapping": 20.0}),
    "cohere scale": ("CohereConfig", LLAMA | {"logit_scale": 0.0625}),
    "cohere2 scale": ("Cohere2Config", LLAMA | {"logit_scale": 4.0}),
    "granite scaling": ("GraniteConfig", LLAMA | {"logits_scaling": 8.0}),
    "phi bias": ("PhiConfig", LLAMA),
    "gptj bias": ("GPTJConfig", GPT | {"rotary_dim": 8}),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen3": ("Qwen3Config", LLAMA | {"head_dim": 16}),
    "gpt-neox": ("GPTNeoXConfig", LLAMA),
    "mistral": ("MistralConfig", LLAMA),
    "mixtral": ("MixtralConfig", LLAMA | {"num_local_experts": 4}),
    "falcon-h1": ("FalconH1Config", FALCON_H1),
    "opt": ("OPTConfig", OPT),
    "bloom": ("BloomConfig", BLOOM),
    "mamba": ("MambaConfig", MAMBA),
}
LEAKS = {"opt", "bloom", "mamba", "falcon-h1"}  # documents are kept apart by position_ids, which these do not use
PACKS = sorted(ZOO.keys() - LEAKS)


def build(name: str, **changes: Any) -> PreTrainedModel:
    """The model with random weights, in which a head's bias and a norm's scale are random too."""
    config_class, shape = ZOO[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**(shape | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def some_tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------------- the head


SINGLE = {"mixtral", "mamba", "falcon-h1"}  # parts of these have no float64 on a CPU
PRECISIONS = [(name, torch.float32, 1e-5) for name in ZOO]
PRECISIONS += [(name, torch.float64, 1e-11) for name in ZOO if name not in SINGLE]


@pytest.mark.parametrize("name, dtype, tolerance", PRECISIONS)
@torch.no_grad()
def test_our_logits_are_the_models_own(name, dtype, tolerance):
    model = build(name).to(dtype)
    head = models.head_of(model, VOCABULARY)
    theirs = model(input_ids=some_tokens(), use_cache=False).logits
    assert theirs.shape[-1] == ROWS
    ours = head.logits(models.hidden_states(model, some_tokens()).flatten(0, 1)).unflatten(0, (2, 12))
    assert ours.dtype == dtype and ours.shape == (2, 12, VOCABULARY)
    assert theirs[..., :VOCABULARY].std() > 0.01
    torch.testing.assert_close(ours, theirs[..., :VOCABULARY], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("vocabulary", [1, models.COLUMNS, models.COLUMNS + 1, 3 * models.COLUMNS - 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_logits_without_a_gradient_are_those_with_one(vocabulary, dtype):
    """Made a block of the vocabulary at a time, in memory that is given (here between other numbers) or not."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden, weight = (torch.randn(rows, 24, generator=generator).to(dtype) for rows in (7, vocabulary + 3))
    head = models.Head(weight, None, 1.0, None, vocabulary)
    expected = head.product(hidden.requires_grad_())
    assert expected.requires_grad and expected.shape == (7, vocabulary)
    around = torch.full((7, vocabulary + 2), 99.0, dtype=dtype)
    with torch.no_grad():
        given = head.product(hidden, around[:, 1:-1])
        for found in (given, head.product(hidden)):
            torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert given.data_ptr() == around[:, 1:-1].data_ptr()
    assert bool((around[:, [0, -1]] == 99.0).all())


def test_what_a_config_declares_is_in_the_head():
    assert models.head_of(build("gemma2 low cap"), VOCABULARY).softcap == 2.0
    assert models.head_of(build("cohere scale"), VOCABULARY).scale == 0.0625
    assert models.head_of(build("granite scaling"), VOCABULARY).scale == 0.125
    assert models.head_of(build("phi bias"), VOCABULARY).bias.shape == (ROWS,)
    tied = build("llama tied")
    assert models.head_of(tied, VOCABULARY).weight is tied.get_input_embeddings().weight


class Altered(LlamaForCausalLM):
    """A model that does something to its logits which its config does not tell."""

    change: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


UNDECLARED = {
    "soft cap": lambda z: 30 * torch.tanh(z / 30),
    "high soft cap": lambda z: 200 * torch.tanh(z / 200),
    "multiplier": lambda z: z * 0.5,
    "multiplier near one": lambda z: z * 1.01,
    "shift of one token": lambda z: z + z.detach().abs().max() * nn.functional.one_hot(torch.tensor(5), ROWS),
    "log softmax": lambda z: z.log_softmax(-1),
    "clamp": lambda z: z.clamp(-20, 20),
    "nan": lambda z: z * float("nan"),
    "masked": lambda z: z.masked_fill(torch.arange(ROWS) == 7, float("-inf")),
}


@pytest.mark.parametrize("size", [1e-6, 0.02, 1.0], ids=["minute logits", "usual", "large"])
@pytest.mark.parametrize("change", UNDECLARED.values(), ids=UNDECLARED)
def test_an_undeclared_change_after_the_head_is_refused_by_name(change, size):
    torch.manual_seed(0)
    model = Altered(LlamaConfig(**LLAMA, initializer_range=size, tie_word_embeddings=False))
    model.change = lambda z: z
    models.head_of(model, VOCABULARY)
    model.change = change
    with pytest.raises(ModelError, match="Altered does something to its logits after the LM head") as caught:
        models.head_of(model, VOCABULARY)
    assert "final_logit_softcapping" in caught.value.remedy


def test_a_head_of_zeros_is_accepted():
    model = build("llama untied")
    nn.init.zeros_(model.lm_head.weight)
    assert models.head_of(model, VOCABULARY).weight.count_nonzero() == 0


@pytest.mark.parametrize("multiplier, accepted", [(1.0, True), (0.25, False)])
def test_a_multiplier_we_do_not_know_is_refused(multiplier, accepted):
    shape = transformers.FalconH1Config(**FALCON_H1, lm_head_multiplier=multiplier)
    model = AutoModelForCausalLM.from_config(shape).eval()
    if not accepted:
        with pytest.raises(ModelError, match="FalconH1ForCausalLM does something"):
            models.head_of(model, VOCABULARY)
        return
    theirs = model(input_ids=some_tokens(), use_cache=False).logits[..., :VOCABULARY]
    ours = models.head_of(model, VOCABULARY).logits(models.hidden_states(model, some_tokens()))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_weights_that_are_not_finite_are_refused():
    model = build("llama untied")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ModelError, match="LlamaForCausalLM computes NaN"):
        models.head_of(model, VOCABULARY)


def test_the_check_leaves_the_model_as_it_was():
    model = build("gpt2").train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    models.head_of(model, VOCABULARY)
    models.require_document_isolation(model)
    assert model.training and all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_without_a_head_and_a_head_too_narrow_are_refused():
    with pytest.raises(ModelError, match="LlamaModel has no linear LM head"):
        models.head_of(LlamaModel(LlamaConfig(**LLAMA)), VOCABULARY)
    with pytest.raises(TokenizerMismatch, match="96 output rows, but the tokenizer has 97 tokens"):
        models.head_of(build("llama tied"), ROWS + 1)
    assert models.head_of(build("llama tied"), ROWS).vocabulary == ROWS


# ---------------------------------------------------------------------- packed documents


@pytest.mark.parametrize("name", PACKS)
@torch.no_grad()
def test_packed_documents_are_computed_as_if_alone(name):
    model = build(name) if name in SINGLE else build(name).double()
    tolerance = 1e-5 if name in SINGLE else 1e-6  # some compute their rotations in float32 always
    models.require_document_isolation(model)
    tokens = some_tokens(1, 15)
    cuts = [0, 4, 5, 11, 15]
    positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(cuts)])[None]
    packed = models.hidden_states(model, tokens, positions)
    for start, stop in itertools.pairwise(cuts):
        alone = models.hidden_states(model, tokens[:, start:stop])
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=tolerance, atol=tolerance)


class Forgetful(LlamaForCausalLM):
    """A model whose body drops the positions it is given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        whole = self.model.forward
        self.model.forward = lambda position_ids=None, **kwargs: whole(**kwargs)


def test_a_model_that_lets_documents_see_each_other_is_refused():
    with pytest.raises(ModelError, match="Forgetful attends across the documents") as caught:
        models.require_document_isolation(Forgetful(LlamaConfig(**LLAMA)).eval())
    assert "data.packing" in caught.value.remedy
    for name in LEAKS:
        with pytest.raises(ModelError, match="attends across the documents"):
            models.require_document_isolation(build(name))


# ---------------------------------------------------------------------- tokenizers


@pytest.fixture
def permuted(tokenizer, tmp_path) -> Any:
    """A tokenizer of the same size and the same tokens, of which two have exchanged their ids."""
    tokenizer.save_pretrained(tmp_path / "permuted")
    path = tmp_path / "permuted" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]
    path.write_text(json.dumps(content), encoding="utf-8")
    return models.load_tokenizer(tmp_path / "permuted")


def test_another_numbering_of_the_same_tokens_is_refused_naming_the_probes(tokenizer, permuted):
    probes = models.probe(tokenizer, models.PROBES)
    models.require_same_tokenizer(tokenizer, probes)
    assert models.vocabulary_size(permuted) == models.vocabulary_size(tokenizer) == 2048
    with pytest.raises(TokenizerMismatch) as caught:
        models.require_same_tokenizer(permuted, probes)
    wrong = [text for text in models.PROBES if tokenizer(text)["input_ids"] != permuted(text)["input_ids"]]
    assert wrong and all(repr(text[:40]) in caught.value.detail for text in wrong)
    ids, others = tokenizer(wrong[0])["input_ids"], permuted(wrong[0])["input_ids"]
    place = next(place for place, pair in enumerate(zip(ids, others, strict=True)) if len(set(pair)) == 2)
    assert f"from token {place}: expected {ids[place]}" in caught.value.detail
    assert f"got {others[place]}" in caught.value.detail and caught.value.remedy


def test_the_tokenizers_hash_is_of_its_content(tokenizer, permuted, tmp_path):
    tokenizer.save_pretrained(tmp_path / "copy")
    original = models.tokenizer_sha256(tokenizer)
    assert models.tokenizer_sha256(models.load_tokenizer(tmp_path / "copy")) == original
    assert models.tokenizer_sha256(permuted) != original
    path = tmp_path / "copy" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:100]  # the same tokens, other merges
    path.write_text(json.dumps(content), encoding="utf-8")
    assert models.tokenizer_sha256(models.load_tokenizer(tmp_path / "copy")) != original


def test_probes_reach_every_kind_of_text(tokenizer):
    for each in models.probe(tokenizer, models.PROBES):
        assert tokenizer.decode(list(each.ids)) == each.text and len(each.ids) > 3


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be loaded"):
        models.load_tokenizer(tmp_path)


# ---------------------------------------------------------------------- fingerprint


@pytest.fixture
def copied_teacher(tiny_teacher, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_teacher, tmp_path / "copied"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_the_fingerprint_is_of_the_content_alone(tiny_teacher, copied_teacher):
    original = models.fingerprint(tiny_teacher)
    for path in copied_teacher.iterdir():
        os.utime(path, (1, 1))
    (copied_teacher / "README.md").write_text("says nothing about the outputs", encoding="utf-8")
    assert models.fingerprint(copied_teacher) == original


@pytest.mark.parametrize("offset", [0, 5000, -1])
def test_one_flipped_bit_of_the_weights_changes_the_fingerprint(tiny_teacher, copied_teacher, offset):
    flip(copied_teacher / "model.safetensors", offset)
    assert models.fingerprint(copied_teacher) != models.fingerprint(tiny_teacher)


def test_configuration_and_file_names_are_in_the_fingerprint(tiny_teacher, copied_teacher):
    original = models.fingerprint(tiny_teacher)
    config = copied_teacher / "config.json"
    before = config.read_text(encoding="utf-8")
    config.write_text(before.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'), encoding="utf-8")
    assert config.read_text(encoding="utf-8") != before
    assert models.fingerprint(copied_teacher) != original
    config.write_text(before, encoding="utf-8")
    (copied_teacher / "model.safetensors").rename(copied_teacher / "model-1.safetensors")
    assert models.fingerprint(copied_teacher) != original


def test_a_folder_without_weights_or_configuration_is_refused(copied_teacher):
    (copied_teacher / "config.json").rename(copied_teacher / "config.bak")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        models.fingerprint(copied_teacher)
    (copied_teacher / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        models.fingerprint(copied_teacher)
    with pytest.raises(ModelError, match=r"x\.gguf does not exist"):
        models.fingerprint(copied_teacher, "x.gguf")


# ---------------------------------------------------------------------- finding


class Hub(BaseHTTPRequestHandler):
    """A hub that has no model, and guards those of ``gated/``."""

    def do_GET(self) -> None:
        gated = "/gated/" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


RESOLVE = """
import json, sys
from kd.errors import ModelError
from kd.models import resolve
errors = {}
for model in sys.argv[1:]:
    try:
        resolve(model)
    except ModelError as error:
        errors[model] = [error.detail, error.remedy]
print(json.dumps(errors))
"""


def resolve_errors(*names: str, **environment: str) -> dict[str, list[str]]:
    """In a process of its own: ``huggingface_hub`` reads its environment when it is imported."""
    code, clean = RESOLVE, {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, env=clean | environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hub_models_that_cannot_be_had_are_refused_with_what_to_do(hub, tmp_path):
    found = resolve_errors("gated/model", "org/none", HF_ENDPOINT=hub, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    assert "is gated" in found["gated/model"][0] and "hf auth login" in found["gated/model"][1]
    assert "(RepositoryNotFoundError)" in found["org/none"][0] and "Check the name" in found["org/none"][1]


def test_offline_only_what_is_cached_is_found(tmp_path):
    snapshot = tmp_path / "hub" / "models--org--known" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "hub" / "models--org--known" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--known" / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    found = resolve_errors("org/known", "org/none", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert found.keys() == {"org/none"} and "HF_HUB_OFFLINE=1" in found["org/none"][1]


def test_folders_are_taken_as_they_are_and_other_names_refused(tiny_teacher):
    assert models.resolve(str(tiny_teacher)) == tiny_teacher
    with pytest.raises(ModelError, match=r"model folder '\./no/such/folder' does not exist"):
        models.resolve("./no/such/folder")


# ---------------------------------------------------------------------- loading


def test_the_teacher_is_frozen_in_evaluation_mode_and_in_its_precision(tiny_teacher):
    cpu = torch.device("cpu")
    for dtype, expected in [("auto", torch.float32), ("bfloat16", torch.bfloat16)]:
        teacher = models.load_teacher(TeacherConfig(model=str(tiny_teacher), dtype=dtype), tiny_teacher, cpu)
        assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
        assert {p.dtype for p in teacher.parameters()} == {expected}


def test_a_pickle_is_never_read(copied_teacher):
    (copied_teacher / "model.safetensors").rename(copied_teacher / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.load(copied_teacher, torch.float32)


def test_damaged_weights_and_models_of_another_kind_are_refused(copied_teacher):
    weights = (copied_teacher / "model.safetensors").read_bytes()
    (copied_teacher / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="cannot be loaded: SafetensorError"):
        models.load(copied_teacher, torch.float32)
    (copied_teacher / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    with pytest.raises(ModelError, match="causal language model"):
        models.load(copied_teacher, torch.float32)


def test_code_that_comes_with_a_model_needs_the_operators_consent(monkeypatch):
    config = TeacherConfig(model="x", trust_remote_code=True)
    monkeypatch.delenv("KD_TRUST_REMOTE_CODE", raising=False)
    with pytest.raises(ModelError, match="does not allow"):
        models.allowed_remote_code(config)
    monkeypatch.setenv("KD_TRUST_REMOTE_CODE", "1")
    assert models.allowed_remote_code(config)
    assert not models.allowed_remote_code(TeacherConfig(model="x"))


# ---------------------------------------------------------------------- students


def fresh(tokenizer: Any, seed: int = 0, context: int = 64, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    init = StudentInit(**{"layers": 1, "hidden_size": 32} | changes)
    return models.build_student(StudentConfig(init=init), tokenizer, context)


def test_a_fresh_student_is_a_llama_of_the_shape_asked_for(tokenizer):
    student = fresh(tokenizer, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40)
    layer = student.model.layers[0]
    assert student.get_output_embeddings().weight.shape == (2048, 48)
    assert layer.self_attn.k_proj.weight.shape == (24, 48) and layer.mlp.up_proj.weight.shape == (40, 48)
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    assert student.config.eos_token_id == tokenizer.eos_token_id and student.config.max_position_embeddings == 2048
    untied = fresh(tokenizer, tie_word_embeddings=False, context=4096)
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight
    assert untied.config.max_position_embeddings == 4096


def test_a_fresh_student_is_a_function_of_the_seed(tokenizer):
    one, same, other = (fresh(tokenizer, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_student_may_start_from_a_folder(tiny_teacher, tokenizer):
    student = models.build_student(StudentConfig(model=str(tiny_teacher)), tokenizer, 64)
    original = models.load(tiny_teacher, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), original.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in student.parameters())


LOAD = """
import socket, sys
socket.socket.connect = None  # a call would fail: there is no network here
import numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, out = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
ids = tokenizer("Sir Walter Elliot, of Kellynch Hall", return_tensors="pt")["input_ids"]
torch.set_num_threads(1)
with torch.no_grad():
    logits = model(ids).logits
    written = model.generate(ids, max_new_tokens=5, do_sample=False)
np.savez(out, ids=ids, logits=logits, written=written, pad=tokenizer.pad_token_id, eos=tokenizer.eos_token_id)
assert not [name for name in sys.modules if name.split(".")[0] in ("kd", "cache", "services")]
"""


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_saved_student_loads_offline_in_a_fresh_process_and_computes_the_same(tokenizer, tmp_path, tied):
    student = fresh(tokenizer, tie_word_embeddings=tied).eval()
    save_student(student, tokenizer, tmp_path / "student")
    assert {path.name for path in (tmp_path / "student").iterdir()} >= {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD, str(tmp_path / "student"), str(tmp_path / "found.npz")],
        capture_output=True, text=True, cwd=tmp_path, env=clean | {"HF_HUB_OFFLINE": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    ids = tokenizer("Sir Walter Elliot, of Kellynch Hall", return_tensors="pt")["input_ids"]
    assert np.array_equal(found["ids"], ids)
    with torch.no_grad():
        assert np.array_equal(found["logits"], student(ids).logits)
    assert len(ids[0]) < len(found["written"][0]) <= len(ids[0]) + 5
    assert found["eos"] == tokenizer.eos_token_id


# ---------------------------------------------------------------------- GGUF


def write_gguf(model: LlamaForCausalLM, tokenizer: Any, path: Path, dtype: type[np.floating]) -> None:
    """The model as llama.cpp writes it: its names, its metadata, and the rows of q and k in its rotary order."""
    gguf = pytest.importorskip("gguf")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    content = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{short}": f"model.layers.{layer}.{long}" for short, long in parts.items()}
    for short, long in names.items():
        tensor = state[f"{long}.weight"].numpy()
        if "attn_q" in short or "attn_k" in short:
            heads = config.num_attention_heads
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{short}.weight", tensor.astype(np.float32 if tensor.ndim == 1 else dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-6), (np.float16, 2e-3)], ids=["F32", "F16"])
def test_a_gguf_teacher_computes_what_its_original_computes(tokenizer, tmp_path, dtype, tolerance):
    torch.manual_seed(0)
    shape = LlamaConfig(**LLAMA | {"vocab_size": 2048, "num_hidden_layers": 1}, tie_word_embeddings=False)
    original = LlamaForCausalLM(shape).eval()
    write_gguf(original, tokenizer, tmp_path / "tiny.gguf", dtype)
    config = TeacherConfig(model=str(tmp_path), gguf_file="tiny.gguf")
    teacher = models.load_teacher(config, tmp_path, torch.device("cpu"))
    loaded = models.load_tokenizer(tmp_path, "tiny.gguf")
    text = "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert models.vocabulary_size(loaded) == 2048 and loaded.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    head = models.head_of(teacher, 2048)
    with torch.no_grad():
        ours = head.logits(models.hidden_states(teacher, ids)[0])
        torch.testing.assert_close(ours, original(ids).logits[0], rtol=tolerance, atol=tolerance)
    before = models.fingerprint(tmp_path, "tiny.gguf")
    flip(tmp_path / "tiny.gguf", -1)
    assert models.fingerprint(tmp_path, "tiny.gguf") != before


def test_a_student_cut_out_of_a_gguf_teacher_is_a_model_like_any_other(tokenizer, tmp_path):
    """transformers marks what it unpacked from GGUF, and saves nothing that bears the mark."""
    torch.manual_seed(0)
    shape = LlamaConfig(**LLAMA | {"vocab_size": 2048, "num_hidden_layers": 2}, tie_word_embeddings=False)
    write_gguf(LlamaForCausalLM(shape), tokenizer, tmp_path / "tiny.gguf", np.float32)
    teacher = TeacherConfig(model=str(tmp_path), gguf_file="tiny.gguf")
    config = StudentConfig.model_validate({"from_teacher": {"layers": 1}})
    models.build_student(config, tokenizer, 32, teacher).save_pretrained(tmp_path / "student")
    written = json.loads((tmp_path / "student" / "config.json").read_text())
    assert "quantization_config" not in written
    (tmp_path / "student" / "config.json").write_text(
        json.dumps(written | {"quantization_config": {"quant_method": "gguf", "gguf_file": "tiny.gguf"}})
    )  # as an earlier version left it
    models.load(tmp_path / "student", torch.float32).save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.mark.parametrize(
    "student, message",
    [
        ({"from_teacher": {"layers": 200}}, "student.from_teacher.layers is 200, but the teacher .* has only"),
        ({"from_teacher": {"layers": 1, "hidden_size": 9}}, "has this shape"),
        ({"from_teacher": {"layers": 1}, "lora": {"targets": ["foo"]}}, "no linear layer named foo"),
        ({"model": "TEACHER", "lora": {"targets": ["foo"]}}, "no linear layer named foo"),
    ],
)
def test_a_shape_that_cannot_be_is_known_without_weights(tiny_teacher, tokenizer, tmp_path, student, message):
    shutil.copytree(tiny_teacher, tmp_path / "t")
    (tmp_path / "t" / "model.safetensors").write_bytes(b"not to be read")
    raw = json.loads(json.dumps(student).replace("TEACHER", str(tmp_path / "t")))
    teacher = TeacherConfig(model=str(tmp_path / "t"))
    with pytest.raises(ModelError, match=message):
        models.require_student(StudentConfig.model_validate(raw), tokenizer, 32, teacher)
    for sound in ({"init": {"layers": 1, "hidden_size": 16}}, {"from_teacher": {"layers": 1}, "lora": {}}):
        models.require_student(StudentConfig.model_validate(sound), tokenizer, 32, teacher)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.load(tmp_path, torch.float32, "x.gguf")


def test_sequences_longer_than_the_context_are_refused() -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=8, n_layer=1, n_head=1)
    )
    models.require_context(model, 32)
    with pytest.raises(ModelError, match=r"context of 32 tokens, but data.sequence_length is 33") as caught:
        models.require_context(model, 33)
    assert "32 or less" in caught.value.remedy
