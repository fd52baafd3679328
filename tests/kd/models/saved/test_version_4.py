"""Saved students are read alike by transformers 4 and 5: the same logits, the same token ids.

``KD_TRANSFORMERS_4`` names a Python that has transformers 4.57. Without it the test installs that
version into a temporary folder.
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kd.models.saving import load_saved_student, save_student, save_tokenizer
from kd.models.tokenizers import PROBE_TEXTS, load_tokenizer
from tests.support.kd.zoo import some_tokens
from tests.support.packed_zoo import OURS, OWN, OWN_ROWS, SIZES, THEIRS

pytestmark = pytest.mark.usefixtures("one_thread")

VERSION_4 = "transformers==4.57.*"
READER = Path(__file__).parents[3] / "support" / "read_with_version_4.py"
#: Architectures that transformers 4 has not.
NEW = {
    "afmoe", "axk1", "beam", "cohere2_moe", "cwm", "exaone_moe", "flint", "gemma4_text",
    "glm4_moe_lite", "granite_swa", "granitemoe_swa", "hyperclovax", "internlm3", "iquestcoder",
    "jais2", "laguna", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral3",
    "nanochat", "nemotron_h", "qwen3_5_text", "solar_open", "youtu",
}  # fmt: skip
#: More architectures that it has, with their own sizes.
MORE: dict[str, dict[str, Any]] = {
    "bert-generation": {"is_decoder": True}, "biogpt": {}, "falcon": {"alibi": True},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "n_mamba_heads": 2, "attention_head_dim": 16, "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4,
        "mamba_headdim": 16, "mamba_ngroups": 1, "adapter_rank": 4, "attention_head_dim": 16,
    },
}  # fmt: skip
FAMILIES = [kind for kind in (*OURS, *THEIRS, *OWN_ROWS, *MORE) if kind not in NEW]
#: Largest difference of the logits, as a share of the largest logit. Transformers 4 computes one
#: activation in 16 bits, whatever it is asked for.
TOLERANCES = {"apertus": 5e-3}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
#: Shorter than the text: the long table is used.
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 2.5, 4.0, 8.0], "original_max_position_embeddings": 16,
}  # fmt: skip
SCALED: list[tuple[str, dict[str, Any]]] = [
    *[("llama", kind) for kind in (LINEAR, YARN, LLAMA3, {**LINEAR, "rope_type": "dynamic"})],
    *[(name, LINEAR) for name in ("olmo2", "granite", "gpt_neox", "gemma3_text", "persimmon")],
    *[(name, YARN) for name in ("qwen3", "gpt_oss", "olmo3", "deepseek_v2")],
    *[(name, LONG) for name in ("phi3", "qwen2")],
]
#: Class names of tokenizers as teachers have them, with the type of the model.
#: Their tokenizers split bytes, or words as SentencePiece does.
CLASSES: list[tuple[str, str | None]] = [
    ("llama", "LlamaTokenizer"), ("llama", "PreTrainedTokenizerFast"), ("llama", "GPT2Tokenizer"),
    ("llama", "TokenizersBackend"), ("llama", None), ("qwen2", "Qwen2Tokenizer"),
    ("phi3", "GPT2Tokenizer"), ("gpt_neox", "GPTNeoXTokenizer"), ("gpt2", "GPT2Tokenizer"),
    ("mistral", "LlamaTokenizerFast"), ("qwen3", "Qwen2TokenizerFast"),
]  # fmt: skip
WORD_CLASSES: list[tuple[str, str | None]] = [
    ("llama", "LlamaTokenizer"), ("llama", None), ("mistral", "LlamaTokenizerFast"),
    ("gemma2", "GemmaTokenizer"), ("gemma3_text", "GemmaTokenizerFast"), ("phi3", "LlamaTokenizer"),
    ("cohere", "CohereTokenizerFast"),
]  # fmt: skip


def make_config(kind: str, scaling: dict[str, Any] | None = None) -> PreTrainedConfig:
    """Return a tiny configuration whose rotary bases are no defaults."""
    made = CONFIG_MAPPING[kind]
    known = made().to_dict().keys() | made.attribute_map.keys()
    own = OWN.get(kind, {}) | OWN_ROWS.get(kind, {}) | MORE.get(kind, {})
    sizes = {name: size for name, size in SIZES.items() if name in known} | own
    if scaling and "original_max_position_embeddings" in known:
        sizes["original_max_position_embeddings"] = 16
    rope = copy.deepcopy(getattr(made(**sizes), "rope_parameters", None))
    if not rope:
        return made(**sizes)
    for part in [each for each in rope.values() if isinstance(each, dict)] or [rope]:
        part["rope_theta"] = 0.1 * part["rope_theta"] + 77.0
    rope.get("full_attention", rope).update(scaling or {})
    return made(**sizes | {"rope_parameters": rope})


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def save_expected(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Save the student, with the logits and the token ids that every reader must find."""
    save_student(model, tokenizer, folder)
    ids = some_tokens(2, 24)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.contiguous()
    save_file({"ids": ids, "logits": logits}, folder / "expected.safetensors")
    expect_ids(tokenizer, folder)


def expect_ids(tokenizer: Any, folder: Path) -> None:
    special = "".join(tokenizer.get_added_vocab())
    texts = {text: tokenizer(text)["input_ids"] for text in (*PROBE_TEXTS, f"It was {special} so")}
    expected = {"texts": texts, "template": tokenizer.chat_template}
    (folder / "expected.json").write_text(json.dumps(expected))


def split_words() -> Tokenizer:
    """Make a tokenizer that splits text as SentencePiece does, with bytes for rare characters."""
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Metaspace()
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    library.train_from_iterator(
        ["It was said that the good ones were better, and said so."], trainer
    )
    return library


def make_tokenizer(folder: Path, library: Tokenizer, kind: str, name: str | None, bos: bool) -> Any:
    """Read the tokenizer of a teacher of type ``kind``, whose class has the ``name``."""
    folder.mkdir(parents=True)
    library.add_special_tokens(["<s>", "<|user|>", "<|end|>"])
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A",
            pair="<s> $A <s> $B",
            special_tokens=[("<s>", library.token_to_id("<s>"))],
        )
    library.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": name, "bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>",
        "additional_special_tokens": ["<|user|>", "<|end|>"], "chat_template": "{{ bos_token }}",
        "add_bos_token": not bos,  # transformers 5 goes by tokenizer.json
    }  # fmt: skip
    settings = {key: value for key, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    make_config(kind).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def read_with_version_4(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that compares folders, with transformers 4."""
    python, path = os.environ.get("KD_TRANSFORMERS_4"), ""
    if python is None:
        python, path = sys.executable, str(tmp_path_factory.mktemp("version_4"))
        pip = [python, "-m", "pip", "install", "--quiet", "--target", path, VERSION_4]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{VERSION_4} cannot be installed: {done.stderr.strip()[-200:]}")

    def read(folders: Iterator[Path]) -> dict[str, Any]:
        # What is installed for transformers 4 comes before what this Python has.
        command = [python, str(READER), *map(str, folders)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return read


@pytest.mark.long
def test_students_of_all_families_are_read_by_version_4(
    tokenizer: Any, tmp_path: Path, read_with_version_4: Any
) -> None:
    for kind in FAMILIES:
        save_expected(make_model(make_config(kind)), tokenizer, tmp_path / kind)
    for number, (kind, scaling) in enumerate(SCALED):
        folder = tmp_path / f"{kind} {scaling['rope_type']} {number}"
        save_expected(make_model(make_config(kind, scaling)), tokenizer, folder)
    found = read_with_version_4(tmp_path.iterdir())
    wrong = {
        Path(name).name: each
        for name, each in found.items()
        if not (
            isinstance(each["logits"], float)
            and each["logits"] < TOLERANCES.get(Path(name).name, 1e-4)
        )
        or each["ids"]
    }
    assert len(found) == len(FAMILIES) + len(SCALED) and not wrong, wrong


@pytest.mark.long
def test_tokenizers_of_all_classes_are_read_by_version_4(
    tokenizer: Any, tmp_path: Path, read_with_version_4: Any
) -> None:
    made = [(kind, name, False) for kind, name in CLASSES for _ in range(2)]
    made += [(kind, name, True) for kind, name in WORD_CLASSES for _ in range(2)]
    for number, (kind, name, words) in enumerate(made):
        library = split_words() if words else copy.deepcopy(tokenizer.backend_tokenizer)
        teacher = tmp_path / "teachers" / str(number)
        own = make_tokenizer(teacher, library, kind, name, bos=number % 2 == 0)
        # A fresh student is a Llama whatever its teacher is; others are as their teachers are.
        for student in ("llama", kind):
            folder = tmp_path / "students" / f"{number} {student}"
            make_config(student).save_pretrained(folder)
            save_tokenizer(own, folder)
            expect_ids(own, folder)
    found = read_with_version_4((tmp_path / "students").iterdir())
    wrong = {
        (*made[int(Path(name).name.split()[0])], name): each["ids"]
        for name, each in found.items()
        if each["ids"]
    }
    assert len(found) > len(made) and not wrong, wrong


@pytest.mark.parametrize(
    ("kind", "scaling", "old"),
    [
        ("llama", None, {"rope_theta": 1077.0}),
        ("llama", YARN, {"rope_theta": 1077.0, "rope_scaling": YARN}),
        (
            "olmo2",
            LINEAR,
            {"rope_theta": 1077.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        ("gpt_neox", LINEAR, {"rotary_emb_base": 1077.0, "rotary_pct": 0.25}),
        ("gemma3_text", LINEAR, {"rope_local_base_freq": 1077.0, "rope_scaling": LINEAR}),
        ("phi3", LONG, {"original_max_position_embeddings": 16}),
        ("qwen3_moe", None, {"num_experts": 4, "num_local_experts": 4}),
        ("granitemoehybrid", None, {"layer_types": ["mamba", "attention"]}),
    ],
)
def test_settings_are_saved_under_the_names_of_both_versions(
    kind: str, scaling: dict[str, Any] | None, old: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    model = make_model(make_config(kind, scaling))
    save_student(model, tokenizer, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written.get(name) for name in old} == old
    again = load_saved_student(tmp_path)
    ids = some_tokens(2, 24)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("phi3", "GPT2Tokenizer", "GPT2Tokenizer"),
        ("qwen2", "Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("llama", "TokenizersBackend", "PreTrainedTokenizerFast"),
    ],
)
def test_a_tokenizer_keeps_its_own_name_and_rules(
    kind: str, name: str, expected: str, tokenizer: Any, tmp_path: Path
) -> None:
    library = copy.deepcopy(tokenizer.backend_tokenizer)
    own = make_tokenizer(tmp_path / "teacher", library, kind, name, bos=True)
    (tmp_path / "teacher" / "tokenizer.model").write_bytes(b"as SentencePiece has it")
    save_student(make_model(make_config(kind)), own, tmp_path / "student")
    written = json.loads((tmp_path / "student" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == expected and written["add_bos_token"] is True
    assert written["additional_special_tokens"] == ["<|user|>", "<|end|>"]
    assert "extra_special_tokens" not in written
    assert (tmp_path / "student" / "tokenizer.model").exists()
    again = load_tokenizer(tmp_path / "student")
    assert [again(text)["input_ids"] for text in PROBE_TEXTS] == [
        own(text)["input_ids"] for text in PROBE_TEXTS
    ]
