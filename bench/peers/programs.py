"""The programs that are compared: what each needs, what its user writes, and how it is run.

    Potstill        `kd run` of a job: the capture, then the training of a student
    TRL             GKDTrainer of trl.experimental with lmbda 0, TRL's only trainer of given text
    DistillKit      its program on its own records, with its README's recommended settings
    DistillKit tail the same with two settings that its README leaves off: normalize_t, by which
                    its polynomials fit, and the tail, which it calls symmetric_uniform
    plain loop      a loop in plain torch with the teacher in memory
    axolotl         its KD plugin on rows with the teacher's k most probable tokens

All minimise the forward KL of teacher and student at T = 1, without hard labels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from bench.peers.environments import Environment, Unavailable
from bench.peers.setting import OPTIMISER, Setting, write_json
from bench.support.paths import ROOT

RUNNERS = Path(__file__).parent / "runners"
CLOCK = str(RUNNERS / "clock.py")
OURS = "Potstill"
TRL = Environment("trl", ("trl", "transformers", "datasets", "accelerate"), "trl.experimental.gkd")
#: The versions that DistillKit's pyproject.toml asks for, and the transformers of their time.
DISTILLKIT = Environment(
    "distillkit",
    (
        "trl==0.25.1",
        "accelerate==1.11.0",
        "transformers==4.57.3",
        "datasets==4.4.1",
        "pydantic==2.12.5",
        "click==8.3.1",
        "pyyaml",
        "wandb",
    ),
    "trl",
    pinned=False,
)
AXOLOTL = Environment("axolotl", ("axolotl==0.19.0",), "axolotl.integrations.kd", pinned=False)
#: Entries of a record of axolotl, which its documents leave to the user.
AXOLOTL_K = 64


@dataclass(frozen=True)
class Case:
    """One program's run with one seed: its Python, its checkout if it has one, its folder."""

    setting: Setting
    seed: int
    folder: Path
    python: Path
    checkout: Path | None = None

    @property
    def times(self) -> Path:
        """The file of the clock."""
        return self.folder / "times.txt"

    def write_settings(self) -> str:
        """Write the file that the scripts of other programs read, and return its path."""
        path = self.folder / "settings.json"
        write_json(path, self.setting.describe(self.seed, self.folder / "student"))
        return str(path)

    def write(self, name: str, content: Any) -> str:
        """Write a file of YAML into the folder and return its path."""
        path = self.folder / name
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return str(path)

    def clocked(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` under the clock."""
        return [str(self.python), CLOCK, str(self.times), *command]


Command = Callable[[Case], list[str]]
#: The checkouts of programs that are on no package index, by the flag that names them.
Checkouts = dict[str, Path | None]


@dataclass(frozen=True)
class Program:
    """A program: its environment (None: this Python), and how it captures and trains.

    In the folder of a case ``student`` is the saved student, and ``kept`` what the teacher said.
    ``written``: the files that its user writes, in that folder or among the runners. ``needs``: the
    flag that names its checkout.
    """

    name: str
    train: Command
    written: tuple[str, ...]
    student: str = "student"
    capture: Command | None = None
    kept: str | None = None
    environment: Environment | None = None
    needs: str | None = None

    def find_python(self, venvs: Path, checkouts: Checkouts) -> Path:
        """Return its Python, in an environment that is made first; raise ``Unavailable``."""
        if self.needs is not None and checkouts[self.needs] is None:
            raise Unavailable(
                f"it is on no package index; --{self.needs} names a checkout of its repository"
            )
        if self.environment is None:
            return Path(sys.executable)
        return self.environment.build(venvs)

    def find_code(self, case: Case) -> str:
        """Return the folder of its code if that is not installed, for PYTHONPATH."""
        if self.name == OURS:
            return str(ROOT)
        return "" if case.checkout is None else str(case.checkout)


# ---------------------------------------------------------------------- ours


def run_ours(case: Case, *more: str) -> list[str]:
    job = case.setting.make_job(case.seed, {"model": str(case.setting.student(case.seed))})
    place = ["--home", str(case.folder / "home"), "--run-dir", str(case.folder / "run")]
    file = case.write("job.yaml", job)
    return ["-m", "services.terminal.cli", "run", file, *place, "--quiet", *more]


def capture_ours(case: Case) -> list[str]:
    place = str(case.folder / "capture")
    return [str(case.python), *run_ours(case, "--set", "kind=precompute", "--run-dir", place)]


def train_ours(case: Case) -> list[str]:
    return case.clocked(*run_ours(case))


# ---------------------------------------------------------------------- others


def train_plain(case: Case) -> list[str]:
    return case.clocked(str(RUNNERS / "plain_loop.py"), case.write_settings())


def train_trl(case: Case) -> list[str]:
    return case.clocked(str(RUNNERS / "trl_gkd.py"), case.write_settings())


def make_compression(case: Case, normalized: bool) -> dict[str, Any]:
    """DistillKit's recommended settings, with the size of the vocabulary as its sampler sets it."""
    words = AutoTokenizer.from_pretrained(case.setting.teacher).get_vocab()
    return {
        "d": max(len(words) + 1, *words.values()),
        "k": 128,
        "exact_k": 16,
        "exact_dtype": "bfloat16",
        "polynomial_terms": [0, 1, 2, 3, 4, "sqrt"],
        "term_dtype": "float32",
        "residual_bins": [],
        "delta_encoding": False,
        "error_diffusion": False,
        **({"normalize_t": True} if normalized else {}),
    }


def capture_distillkit(case: Case, normalized: bool) -> list[str]:
    compression = case.write("compression.yaml", make_compression(case, normalized))
    script = str(RUNNERS / "distillkit_records.py")
    return [str(case.python), script, case.write_settings(), compression, str(case.folder)]


def train_distillkit(case: Case, tail: bool) -> list[str]:
    sizes = case.setting.sizes
    config = {
        "project_name": "peers",
        "model": str(case.setting.student(case.seed)),
        "output_path": str(case.folder / "student"),
        "sequence_length": sizes.length - 1,
        "use_flash_attention": False,
        "dataset": {
            "train_dataset": {"disk_path": str(case.folder / "packed")},
            "prepacked": True,
            "seed": 0,
        },
        "teacher": {"kind": "dataset", "logprob_compressor": make_compression(case, tail)},
        "loss_functions": [
            {
                "function": "kl",
                "weight": 1.0,
                "temperature": 1.0,
                "missing_probability_handling": "symmetric_uniform" if tail else "zero",
                "sparse_chunk_length": 1024,
            }
        ],
        "training_args": {
            "max_steps": sizes.steps,
            "per_device_train_batch_size": sizes.batch,
            "learning_rate": sizes.rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": sizes.warmup,
            "weight_decay": OPTIMISER["weight_decay"],
            "adam_beta1": OPTIMISER["betas"][0],
            "adam_beta2": OPTIMISER["betas"][1],
            "adam_epsilon": OPTIMISER["eps"],
            "max_grad_norm": OPTIMISER["max_grad_norm"],
            "optim": "adamw_torch_fused",
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": True,
            "remove_unused_columns": False,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": case.seed,
        },
    }
    script = str(RUNNERS / "distillkit_train.py")
    order = str(case.setting.order(case.seed))
    return case.clocked(script, order, case.write("config.yaml", config))


def make_distillkit(name: str, tail: bool) -> Program:
    return Program(
        name,
        lambda case: train_distillkit(case, tail),
        ("compression.yaml", "config.yaml"),
        capture=lambda case: capture_distillkit(case, tail),
        kept="packed",
        environment=DISTILLKIT,
        needs="distillkit",
    )


def capture_axolotl(case: Case) -> list[str]:
    script = str(RUNNERS / "axolotl_records.py")
    return [
        str(case.python),
        script,
        case.write_settings(),
        str(AXOLOTL_K),
        str(case.folder / "rows"),
    ]


def train_axolotl(case: Case) -> list[str]:
    sizes = case.setting.sizes
    config = {
        "base_model": str(case.setting.student(case.seed)),
        "plugins": ["axolotl.integrations.kd.KDPlugin"],
        "kd_trainer": True,
        "kd_ce_alpha": 0.0,
        "kd_alpha": 1.0,
        "kd_temperature": 1.0,
        "datasets": [{"path": str(case.folder / "rows"), "type": None}],
        "dataset_prepared_path": str(case.folder / "prepared"),
        "output_dir": str(case.folder / "student"),
        "sequence_len": sizes.length,
        "dataset_num_proc": 1,
        "sample_packing": False,
        "val_set_size": 0,
        "shuffle_merged_datasets": False,
        "micro_batch_size": sizes.batch,
        "gradient_accumulation_steps": 1,
        "max_steps": sizes.steps,
        "learning_rate": sizes.rate,
        "lr_scheduler": "cosine",
        "warmup_steps": sizes.warmup,
        "optimizer": "adamw_torch_fused",
        "weight_decay": OPTIMISER["weight_decay"],
        "adam_beta1": OPTIMISER["betas"][0],
        "adam_beta2": OPTIMISER["betas"][1],
        "adam_epsilon": OPTIMISER["eps"],
        "max_grad_norm": OPTIMISER["max_grad_norm"],
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": False,
        "sdp_attention": True,
        "save_strategy": "no",
        "seed": case.seed,
    }
    script = str(RUNNERS / "axolotl_train.py")
    order = str(case.setting.order(case.seed))
    return case.clocked(script, order, case.write("config.yaml", config))


PROGRAMS = (
    Program(
        OURS,
        train_ours,
        ("job.yaml",),
        student="run/student",
        capture=capture_ours,
        kept="home/caches",
    ),
    Program("TRL", train_trl, (str(RUNNERS / "trl_gkd.py"),), environment=TRL),
    make_distillkit("DistillKit", tail=False),
    make_distillkit("DistillKit tail", tail=True),
    Program("plain loop", train_plain, (str(RUNNERS / "plain_loop.py"),)),
    Program(
        "axolotl",
        train_axolotl,
        ("config.yaml", str(RUNNERS / "axolotl_records.py")),
        capture=capture_axolotl,
        kept="rows",
        environment=AXOLOTL,
    ),
)
