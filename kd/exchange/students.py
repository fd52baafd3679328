"""Write a finished student in another form: a merged model, only an adapter, or a GGUF file.

GGUF is written by llama.cpp's own converter, if it is installed: it knows the architectures and
the tokenizers that llama.cpp reads.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import nn
from transformers import AutoConfig

from cache import disk
from cache.errors import StorageError
from cache.json_object import Json
from kd.config.jobfile import read_record
from kd.errors import ModelError
from kd.evaluation.model_card import write_provenance
from kd.files import PROVENANCE, locate_temporary, read_json, whole_folder
from kd.models.folder import ADAPTER_CONFIG, ADAPTER_FOLDER, BASE_FOLDER
from kd.models.saving import find_base, load_saved_student, save_model
from kd.progress import Monitor

Form = Literal["merged", "adapter", "gguf"]
#: The names that llama.cpp's converter has where it is installed.
CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
#: Characters of the converter's last line that a message holds.
_LONGEST_LINE = 300
#: What to do where a student has no adapters of its own.
_WHOLE = "Use --to merged or --to gguf."
_UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"


@dataclass(frozen=True)
class StudentExport:
    """An order: write ``form`` of the student in ``folder`` to ``out``, which must be new.

    ``converter`` is the path of llama.cpp's, None for the one on PATH; ``outtype`` is the precision
    of a GGUF file, as the converter names it.
    """

    folder: Path
    form: Form
    out: Path
    converter: str | None = None
    outtype: str = "auto"

    def run(self, monitor: Monitor) -> Json:
        """Write the export, whole or not at all; return a summary.

        Raises ``ModelError`` if the student has no such form or the converter refuses, and
        ``StorageError`` if ``out`` is in use.
        """
        if self.out.exists():
            raise StorageError(f"{self.out} exists.", "Give the name of a new one with --out.")
        monitor.emit("stage", stage="export", phase="writing")
        write: dict[Form, Callable[[], None]] = {
            "merged": self._write_merged,
            "adapter": self._write_adapter,
            "gguf": self._write_gguf,
        }
        with disk.storage_errors(self.out.parent):
            disk.make_folder(self.out.parent)
            write[self.form]()
        return {"form": self.form, "path": str(self.out), "bytes": disk.measure_path(self.out)}

    def _write_merged(self) -> None:
        with whole_folder(self.out) as folder:
            merge_into(self.folder, folder)

    def _write_adapter(self) -> None:
        """Write the adapters at the root of the folder, as peft does, with the tokenizer."""
        settings = read_json(self.folder / ADAPTER_FOLDER / ADAPTER_CONFIG)
        if settings is None:
            what = f"{self.folder} has no adapters: its job had no student.lora."
            raise ModelError(what, _WHOLE)
        if settings["base_model_name_or_path"] == BASE_FOLDER:
            what = f"The base model of the adapters is saved in {self.folder} only."
            raise ModelError(what, _WHOLE)
        with whole_folder(self.out) as folder:
            shutil.copytree(self.folder / ADAPTER_FOLDER, folder, dirs_exist_ok=True)
            _copy_rest(self.folder, folder, excluded=(".safetensors", "config.json"))

    def _write_gguf(self) -> None:
        converter = find_converter(self.converter)
        with TemporaryDirectory(dir=self.out.parent, prefix=".tmp-") as temporary:
            model = self.folder
            if not (model / "config.json").is_file():
                model = Path(temporary, "model")
                model.mkdir()
                merge_into(self.folder, model)
            target = locate_temporary(self.out)
            try:
                _convert(converter, model, target, self.outtype)
                disk.sync_path(target)
                target.rename(self.out)
                disk.sync_path(self.out.parent)
            finally:
                disk.remove_path(target)


def merge_into(student: Path, folder: Path) -> None:
    """Write the whole model of the saved ``student`` into ``folder``, which exists.

    Adapters that were saved without their base are merged into it, in the precision of the base.
    """
    if (student / "config.json").is_file():
        _copy_rest(student, folder)
        return
    model = load_saved_student(student)
    # The precision in which the base of the adapters is stored.
    base_folder = find_base(student)
    dtype = AutoConfig.from_pretrained(base_folder).dtype
    nn.Module.to(model, dtype if isinstance(dtype, torch.dtype) else torch.float32)
    save_model(model, folder)
    _copy_rest(student, folder)
    # The card of adapters names peft and the base; a whole model needs neither.
    known = read_json(folder / PROVENANCE)
    if known is not None:
        write_provenance(folder, read_record(known["job"]), known["report"])


def _copy_rest(student: Path, folder: Path, excluded: tuple[str, ...] = ()) -> None:
    """Copy the student's files but its adapters and their base; keep what ``folder`` has."""
    for name in disk.list_file_sizes(student):
        inside = name.startswith((f"{ADAPTER_FOLDER}/", f"{BASE_FOLDER}/"))
        if inside or (name.endswith(excluded) and excluded) or (folder / name).exists():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(student / name, folder / name)


def find_converter(named: str | None) -> Path:
    """Find llama.cpp's converter: the one that is ``named``, or the one on PATH."""
    if named is not None:
        path = Path(named)
        inside = [path / name for name in CONVERTERS] if path.is_dir() else [path]
        found = [str(each) for each in inside if each.is_file()]
    else:
        found = [each for name in CONVERTERS if (each := shutil.which(name)) is not None]
    if not found:
        where = f"at {named}" if named is not None else "on PATH"
        raise ModelError(
            f"llama.cpp's converter {CONVERTERS[0]} is not {where}.",
            "Get https://github.com/ggml-org/llama.cpp and give its folder with --converter. "
            "--to merged writes the folder that the converter reads.",
        )
    return Path(found[0]).absolute()


def _convert(converter: Path, model: Path, out: Path, outtype: str) -> None:
    """Run the converter. Raises ``ModelError`` with its last words if it fails."""
    command = [sys.executable] if converter.suffix == ".py" else []
    command += [str(converter), str(model), "--outfile", str(out), "--outtype", outtype]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == 0 and out.is_file():
        return
    said = (ended.stderr or ended.stdout).strip()
    last = said.rpartition("\n")[2]
    remedy = "Update llama.cpp, or use --to merged."
    if _UNKNOWN_TOKENIZER in said:
        remedy = "llama.cpp does not know this tokenizer. Use --to merged, or another loader."
    if "No module named" in said:
        remedy = "Install what the converter needs: `pip install gguf sentencepiece`."
    detail = f"{converter.name} ended with code {ended.returncode}: {last[:_LONGEST_LINE]}"
    raise ModelError(detail, remedy)
