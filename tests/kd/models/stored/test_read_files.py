"""A load reads the files that the identity of a model knows, and no other: Linux tells which."""

import ctypes
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kd.errors import ModelError
from kd.models.folder import ModelFolder, compute_fingerprint, list_identity_files
from kd.models.loading import ReadingPlan, read_model
from kd.models.tokenizers import load_tokenizer
from tests.support.kd.zoo import LLAMA, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

IN_OPEN = 0x20
IN_ISDIR = 0x40000000
#: The tokenizer is in an identity by its tokens and its rules, and how a model writes shapes none
#: of its outputs.
BY_CONTENT = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
}  # fmt: skip
#: A model of 8 by 8 that is told by its own code, in two files.
CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .rows import ROWS

class OwnConfig(PreTrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = torch.nn.Embedding(ROWS, 8)
        self.lm_head = torch.nn.Linear(8, ROWS, bias=False)
        self.post_init()
    def get_input_embeddings(self):
        return self.embed_tokens
    def get_output_embeddings(self):
        return self.lm_head
    def forward(self, input_ids=None, **_):
        return CausalLMOutput(logits=self.lm_head(self.embed_tokens(input_ids)))
"""


class Watch:
    """Tells which files below ``root`` are opened, also by libraries that are not Python."""

    def __init__(self, root: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._queue = self._libc.inotify_init1(os.O_NONBLOCK)
        folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
        self._folders = {
            self._libc.inotify_add_watch(self._queue, os.fsencode(each), IN_OPEN): each
            for each in folders
        }

    def read(self) -> set[Path]:
        try:
            data = os.read(self._queue, 1 << 20)
        except BlockingIOError:
            data = b""
        os.close(self._queue)
        opened = set()
        while data:
            watch, mask, _, length = struct.unpack_from("iIII", data)
            name = data[16 : 16 + length].rstrip(b"\0").decode()
            opened |= set() if mask & IN_ISDIR else {self._folders[watch] / name}
            data = data[16 + length :]
        return opened


def write_json(path: Path, **fields: Any) -> None:
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(known | fields), encoding="utf-8")


@pytest.fixture(scope="module")
def kinds(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, ReadingPlan]]:
    """A folder of each kind, below one, and how it is read."""
    root = tmp_path_factory.mktemp("kinds")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"vocab_size": 2048}))
    plain = ReadingPlan(torch.float32)
    for name, size in (("whole", "1GB"), ("shards", "40KB"), ("few", "40KB")):
        model.save_pretrained(root / name, max_shard_size=size)
        tokenizer.save_pretrained(root / name)
    # A file that the index leaves out.
    shutil.copy(root / "whole" / "model.safetensors", root / "few" / "model-extra.safetensors")
    shutil.copytree(root / "whole", root / "composite")
    text = json.loads((root / "whole" / "config.json").read_text(encoding="utf-8"))
    (root / "gguf").mkdir()
    write_gguf(model, tokenizer, root / "gguf" / "x.gguf", np.float32)
    shutil.copy(root / "whole" / "config.json", root / "gguf")
    own = root / "own"
    own.mkdir()
    (own / "modeling_own.py").write_text(CODE, encoding="utf-8")
    (own / "rows.py").write_text("ROWS = 8\n", encoding="utf-8")
    names = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    write_json(own / "config.json", model_type="own", auto_map=names, vocab_size=8)
    weights = {"embed_tokens.weight": torch.ones(8, 8), "lm_head.weight": torch.zeros(8, 8)}
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    write_json(
        root / "composite" / "config.json", model_type="mistral3", text_config=text,
        architectures=["Mistral3ForConditionalGeneration"], vision_config={"model_type": "pixtral"},
    )  # fmt: skip
    return {
        "whole": (root / "whole", plain),
        "shards": (root / "shards", plain),
        "few": (root / "few", plain),
        "composite": (root / "composite", plain),
        "gguf": (root / "gguf", ReadingPlan(torch.float32, gguf_file="x.gguf")),
        "own": (own, ReadingPlan(torch.float32, trust_remote_code=True)),
    }


@pytest.mark.parametrize("kind", ["whole", "shards", "few", "composite", "gguf", "own"])
def test_a_load_opens_what_the_identity_of_the_model_knows(
    kinds: dict[str, tuple[Path, ReadingPlan]], kind: str
) -> None:
    folder, how = kinds[kind]
    compute_fingerprint(folder, how.gguf_file)
    known = {how.gguf_file} if how.gguf_file else {*list_identity_files(folder)}
    # Where the index names all files of the weights, which of them holds a tensor changes nothing.
    known |= {"model.safetensors.index.json"} if kind == "shards" else set()
    watch = Watch(folder.parent)
    read_model(folder, how)
    if kind != "own":  # it has no tokenizer
        load_tokenizer(folder, how.gguf_file)
    opened = watch.read()
    assert {path.parent for path in opened} == {folder}
    assert {path.name for path in opened} - BY_CONTENT - known == set()
    weights = {path.name for path in ModelFolder(folder).list_read_files()}
    weights = {how.gguf_file} if how.gguf_file else weights
    assert weights <= {path.name for path in opened}


def test_an_index_that_leaves_out_a_file_is_in_the_identity(
    kinds: dict[str, tuple[Path, ReadingPlan]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(kinds["few"][0], tmp_path / "few"))
    before = compute_fingerprint(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert compute_fingerprint(folder) != before


# ---------------------------------------------------------------------- files of others


def add_adapters(folder: Path, other: Path) -> None:
    write_json(folder / "adapter_config.json", base_model_name_or_path=str(other))


def name_other_weights(folder: Path, other: Path) -> None:
    (folder / "sub").symlink_to(other)
    write_json(folder / "config.json", transformers_weights="sub/model.safetensors")


def name_other_configuration(folder: Path, other: Path) -> None:
    (folder / "config.4.0.0.json").symlink_to(other / "config.json")
    write_json(folder / "config.json", configuration_files=["config.4.0.0.json"])


def name_other_tokenizer(folder: Path, other: Path) -> None:
    names = [f"../{other.name}/tokenizer.4.0.0.json"]
    shutil.copy(other / "tokenizer.json", other / "tokenizer.4.0.0.json")
    write_json(folder / "tokenizer_config.json", fast_tokenizer_files=names)


def name_other_code(folder: Path, other: Path) -> None:
    names = {"AutoConfig": f"{other}--modeling_own.OwnConfig"}
    write_json(folder / "config.json", model_type="own", auto_map=names)


def name_code_in_a_folder(folder: Path, other: Path) -> None:
    names = {"AutoConfig": "sub/modeling_own.OwnConfig"}
    write_json(folder / "config.json", model_type="own", auto_map=names)


def index_other_weights(folder: Path, other: Path, name: str = "model.safetensors") -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    named = {"model.norm.weight": f"../{other.name}/{name}"}
    write_json(folder / "model.safetensors.index.json", weight_map=named)


def index_a_pickle(folder: Path, other: Path) -> None:
    index_other_weights(folder, other)
    named = {"model.norm.weight": "model.bin"}
    write_json(folder / "model.safetensors.index.json", weight_map=named)


@pytest.mark.parametrize(
    ("kind", "lead_out", "words"),
    [
        ("whole", add_adapters, "holds adapters beside a model"),
        ("gguf", add_adapters, "holds adapters beside a model"),
        ("gguf", name_other_tokenizer, r"names files .*: fast_tokenizer_files"),
        ("whole", name_other_weights, r"config\.json names files .*: transformers_weights"),
        ("whole", name_other_configuration, r"config\.json names files .*: configuration_files"),
        (
            "whole",
            name_other_tokenizer,
            r"tokenizer_config\.json names files .*: fast_tokenizer_files",
        ),
        ("whole", name_other_code, r"config\.json names files .*: auto_map"),
        ("whole", name_code_in_a_folder, r"config\.json names files .*: auto_map"),
        ("whole", index_other_weights, r"names '../other/model\.safetensors', which is no"),
        ("whole", index_a_pickle, r"names 'model\.bin', which is no"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_folder_that_leads_to_other_files_is_refused_before_they_are_read(
    kinds: dict[str, tuple[Path, ReadingPlan]],
    kind: str,
    lead_out: Callable[[Path, Path], None],
    words: str,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(kinds[kind][0], tmp_path / "folder"))
    other = Path(shutil.copytree(kinds["whole"][0], tmp_path / "other"))
    lead_out(folder, other)
    watch = Watch(tmp_path)
    how = ReadingPlan(torch.float32, gguf_file=kinds[kind][1].gguf_file, trust_remote_code=True)
    with pytest.raises(ModelError, match=words):
        read_model(folder, how)
    # Without trust, nothing runs the code that is named; and such an index names no weights here.
    if "auto_map" not in words and "index" not in lead_out.__name__:
        with pytest.raises(ModelError, match=words):
            compute_fingerprint(folder, how.gguf_file)
    if "index" not in lead_out.__name__:
        with pytest.raises(ModelError, match=words):
            load_tokenizer(folder, how.gguf_file, trust_remote_code=True)
    assert not [path for path in watch.read() if path.parent == other]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000 + "]" * 200_000, "recursion"),
        ('{"a": ' * 600 + '{"transformers_weights": 1}' + "}" * 600, "names files"),
        ("{" + " " * (65 << 20) + "}", "bytes"),
        ("[]", "not a JSON object"),
    ],
    ids=["deep", "less-deep", "large", "list"],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_configuration_that_no_model_has_is_refused_by_name(
    kinds: dict[str, tuple[Path, ReadingPlan]], name: str, text: str, words: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(kinds["whole"][0], tmp_path / "folder"))
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"{name} (cannot be read: )?.*{words}"):
        ModelFolder(folder).require_own_files()
