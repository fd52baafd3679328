"""The model card of a finished student: facts for the hub, the report, use, limits and origin."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from cache.json_object import Json
from kd.addresses import HUB_ID
from kd.config.job import JobConfig
from kd.evaluation.in_depth import STUDENT
from kd.evaluation.report import Report, render_report
from kd.files import PROVENANCE, hide_folders, read_json, write_json
from kd.models.folder import (
    ADAPTER_FOLDER,
    BASE_FOLDER,
    UNKNOWN_LICENCE,
    ModelFolder,
    read_card,
    read_gguf_card,
)
from kd.models.inheritance import pick_layers

#: The longest prompt of the example.
_PROMPT_CHARACTERS = 60


def write_provenance(folder: Path, config: JobConfig, report: Report) -> None:
    """Write the model card (README.md), and the job with its report as distillation.json."""
    job = config.model_dump(mode="json")
    write_json(folder / PROVENANCE, {"job": job, "report": report})
    alone = not (folder / "config.json").is_file()  # an adapter without its base
    start = find_start(config)
    known = start is not None and not Path(start).exists()
    languages = _read_own_card(config).get("language")
    named = (source.path for source in config.data.train if not isinstance(source, str))
    # Paths on this machine mean nothing to a reader of the card.
    facts = ModelCardData(
        base_model=start if known else None,
        base_model_relation=("adapter" if alone else "finetune") if known else None,
        license=find_licence(config),
        language=languages if isinstance(languages, str | list) else None,
        datasets=[path for path in dict.fromkeys(named) if not Path(path).exists()] or None,
        library_name="peft" if alone else "transformers",
        pipeline_tag="text-generation",
        tags=["distillation", "knowledge-distillation", "potstill"],
        distillation_teacher=report.get("teacher"),
    )
    front = f"---\n{facts.to_yaml()}\n---\n\n"
    told = render_report(report), _describe_limits(config, report), _describe_origin(config)
    page, *rest = (hide_folders(text, job) for text in told)
    parts = (hide_folders(front, job) + page, _describe_use(folder, config, report), *rest)
    ModelCard("\n".join(parts)).save(folder / "README.md")


# ---------------------------------------------------------------------- where it comes from


def find_start(config: JobConfig) -> str | None:
    """Find the model whose weights the student began with; None for random ones."""
    student = config.student
    if student is not None and student.model is not None:
        return student.model
    if student is not None and student.from_teacher is not None:
        return config.teacher_name
    return None


def find_licence(config: JobConfig) -> str:
    """Find the licence of the teacher, or of the start where there is no teacher."""
    found = _read_own_card(config).get("license")
    return found if isinstance(found, str) and found else UNKNOWN_LICENCE


def _read_own_card(config: JobConfig) -> Json:
    """The facts of the card of the teacher, or of the start where there is no teacher.

    A GGUF file may say them itself. What a card leaves out, that of its base model may say.
    """
    student, teacher, found = config.student, config.teacher_files, Json()
    if teacher is not None:
        found = read_card(teacher.name, teacher.revision)
        if teacher.gguf_file:
            found |= read_gguf_card(teacher.name, teacher.gguf_file, teacher.revision)
    elif student is not None and student.model is not None:
        found = read_card(student.model, student.revision)
    base = found.get("base_model")
    # A card may name anything, a folder by its path too: only a name of the hub is looked up.
    known = read_card(base) if isinstance(base, str) and HUB_ID.match(base) else {}
    return known | found


# ---------------------------------------------------------------------- sections


def _describe_use(folder: Path, config: JobConfig, report: Report) -> str:
    """The section with code that generates text, for the files in ``folder``."""
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    load = ["model = AutoModelForCausalLM.from_pretrained(folder)"]
    if not (folder / "config.json").is_file():
        imports.insert(0, "from peft import PeftModel")
        if (folder / BASE_FOLDER).is_dir():
            base = f'f"{{folder}}/{BASE_FOLDER}"'
        else:
            settings = read_json(folder / ADAPTER_FOLDER / "adapter_config.json")
            name = str(settings["base_model_name_or_path"])
            hidden = hide_folders(name, config.model_dump(mode="json"))
            base = json.dumps(name if hidden == name else f"path/to/{hidden}")
        load = [
            f"model = AutoModelForCausalLM.from_pretrained({base})",
            f'model = PeftModel.from_pretrained(model, f"{{folder}}/{ADAPTER_FOLDER}")',
        ]
    code = [
        *imports,
        "",
        'folder = "path/to/this/folder"',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        *load,
        *_encode_example(config, report),
        'ids, mask = inputs["input_ids"], inputs["attention_mask"]',
        "written = model.generate(ids, attention_mask=mask, max_new_tokens=40)",
        "print(tokenizer.decode(written[0], skip_special_tokens=True))",
    ]
    return "\n".join(["", "## Use", "", "```python", *code, "```", ""])


def _encode_example(config: JobConfig, report: Report) -> list[str]:
    """The lines that encode a prompt, or a question where the student learned chats."""
    if config.data.has_chats:
        return [
            'messages = [{"role": "user", "content": "Hello! Who are you?"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
    samples = ((report.get("evaluation") or {}).get("samples") or {}).get(STUDENT) or []
    prompt = " ".join(samples[0]["prompt"].split())[:_PROMPT_CHARACTERS] if samples else ""
    return [f'inputs = tokenizer({json.dumps(prompt or "The")}, return_tensors="pt")']


def _describe_limits(config: JobConfig, report: Report) -> str:
    tokens = report.get("held_out_tokens")
    measured = f"{tokens:,} held-out tokens" if tokens else "no held-out text"
    seen = f"{report['tokens']:,} tokens in sequences of {config.data.sequence_length:,}"
    lines = [
        f"- It saw {seen}: longer texts are untested.",
        f"- It was measured on {measured} of the same kind of text, and on no other text.",
        "- Its facts, its safety and its bias were not measured.",
        "- It repeats the errors and the biases of its teacher and of its text.",
    ]
    return "\n".join(["## Limitations", "", *lines, ""])


def _describe_start(config: JobConfig) -> str:
    """The weights that the student began with, and which of them were cut out."""
    start = find_start(config)
    cut = None if config.student is None else config.student.from_teacher
    if start is None or cut is None:
        return f"the weights of `{start}`" if start else "random weights"
    sizes = {"hidden_size": cut.hidden_size, "intermediate_size": cut.intermediate_size}
    narrowed = "".join(f", {name} cut to {size:,}" for name, size in sizes.items() if size)
    teacher = config.teacher_files
    known = ModelFolder.find(start, Path(), None if teacher is None else teacher.revision)
    count = None if known is None else known.config.get("num_hidden_layers")
    if not isinstance(count, int):
        return f"{cut.layers} layers of `{start}` ({cut.pick}){narrowed}"
    kept = ", ".join(map(str, pick_layers(count, cut)))
    return f"{cut.layers} of the {count} layers of `{start}` (numbers {kept}){narrowed}"


def _describe_origin(config: JobConfig) -> str:
    """The section on the weights it began with, on licences, text and languages."""
    start = find_start(config)
    teacher = config.teacher_name
    files = config.teacher_files
    owner = teacher or start
    licence = find_licence(config)
    lines = [f"- Start: {_describe_start(config)}."]
    if files is not None and files.gguf_file:
        lines.append(f"- Teacher: the file `{Path(files.gguf_file).name}` of `{teacher}`.")
    if licence != UNKNOWN_LICENCE:
        lines.append(f"- Licence: {licence}, the licence of `{owner}`.")
    elif owner is not None:
        check = f"Check the licence of `{owner}` before you share this model."
        lines.append(f"- Licence: unknown. {check}")
    else:
        lines.append("- Licence: unknown. Choose one that the licence of the text allows.")
    if start is not None and start != owner:
        lines.append(f"- Check the licence of `{start}`, too: its weights are in this model.")
    text = ", ".join(
        f"`{source if isinstance(source, str) else source.path}`" for source in config.data.train
    )
    lines.append(f"- Text: {text or 'that of the cache'}. Check its licence, too.")
    if not _read_own_card(config).get("language"):
        lines.append("- Languages: the languages of the text; no card names them.")
    return "\n".join(["## Origin", "", *lines, ""])
