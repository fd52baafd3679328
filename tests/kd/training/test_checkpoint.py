"""Checkpoints: stopped and resumed equals uninterrupted, and a roll-back leaves no trace."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.support.waiting import PATIENCE_SECONDS
from cache.errors import CacheCorrupt
from cache.manifest import sign_json, verify_json
from kd.config.train import TrainConfig
from kd.errors import TrainingError
from kd.optim.averaging import Averager, serving, use_served_weights
from kd.optim.optimizers import make_optimizer
from kd.optim.schedules import make_scheduler
from kd.training import checkpoint
from kd.training.saved.restoring import restore
from kd.training.saved.state import SavedState, TrainingProgress, TrainState
from kd.training.saved.state_file import read_state

STEPS = 7
CUT = 4
OPTIMIZERS = {
    "adamw": {"optim_args": {"amsgrad": 1}},
    "adafactor": {},
    "muon": {},
    "lion": {"learning_rate": 0.003},
    "lars": {"learning_rate": 5.0},
    "schedule_free": {"lr_scheduler_type": "constant_with_warmup"},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "onecycle": {"warmup_steps": 0},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 3}},
}


def load_step(folder: Path, step: int, state: TrainState) -> None:
    """Restore the checkpoint of ``step``, whose earlier contents are dropped."""
    path = checkpoint.locate_checkpoint(folder, step)
    restore(path, SavedState.from_json(read_state(path)), state)


def make_options(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"max_steps": STEPS, "learning_rate": 0.01, "warmup_steps": 2} | changes)


class Extra(nn.Module):
    """An extra as real ones are: a parameter that the optimiser trains, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 6)
        self.own = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


class Run:
    """A loop like that of kd/training/loop.py.

    Its tokens come from torch's generator, so that random state matters too.
    """

    def __init__(
        self, options: TrainConfig, seed: int = 0, ema: bool = True, scale: float | None = 2.0**126
    ) -> None:
        torch.manual_seed(seed)
        shape = {
            "vocab_size": 24,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_attention_heads": 2,
        }
        self.student = LlamaForCausalLM(
            LlamaConfig(**shape, num_hidden_layers=2, attention_dropout=0.2)
        ).train()
        self.extra = Extra()
        self.ema = Averager(self.student, 0.9) if ema else None
        cpu = torch.device("cpu")
        self.optimizer = make_optimizer(
            self.student, self.extra.projection.parameters(), options, cpu
        )
        # Far too high a scale at first: the first steps overflow and are skipped.
        scaler = torch.amp.GradScaler(
            "cpu", enabled=scale is not None, init_scale=scale or 1.0, growth_interval=3
        )
        extras = {"features": self.extra} | ({"ema": self.ema} if self.ema else {})
        self.state = TrainState(
            self.student,
            self.optimizer,
            make_scheduler(self.optimizer, options, STEPS),
            scaler,
            TrainingProgress(),
            extras,
        )

    def forward(self) -> Tensor:
        tokens = torch.randint(24, (2, 6))
        hidden = self.student.model(tokens).last_hidden_state
        logits = self.student.lm_head(hidden)
        matched = (self.extra.projection(hidden) - 1).square().mean()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + matched

    def step(self) -> float:
        state = self.state
        scaler = self.state.scaler
        loss = self.forward()
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:
            state.scheduler.step()
        if self.ema is not None:
            self.ema.update()
        with torch.no_grad():
            self.extra.own.add_(loss.item() / 3)
            self.extra.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        state.progress.step += 1
        state.progress.last_evaluation = {"loss": loss.item()}
        return loss.item()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def everything(self) -> dict[str, Any]:
        """All that a checkpoint must hold, by other means than the checkpoint's."""
        names = {
            p: n
            for n, p in [
                *self.student.named_parameters(),
                *self.extra.named_parameters(prefix="extra"),
            ]
        }
        tensors = {name: parameter.detach().clone() for parameter, name in names.items()}
        tensors |= {f"buffer {name}": value.clone() for name, value in self.extra.named_buffers()}
        tensors |= {
            f"ema {name}": value.clone()
            for name, value in (self.ema or nn.Module()).named_buffers()
        }
        numbers: dict[str, Any] = {}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                (tensors if isinstance(value, Tensor) else numbers)[f"{names[parameter]} {key}"] = (
                    value.clone() if isinstance(value, Tensor) else value
                )
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        rates = self.state.scheduler.get_last_lr()
        rest = (
            groups,
            rates,
            self.state.scheduler.last_epoch,
            self.state.scaler.state_dict(),
            asdict(self.state.progress),
        )
        return {
            "tensors": tensors | {"random": torch.get_rng_state()},
            "numbers": numbers,
            "rest": rest,
        }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name
        assert found["tensors"][name].dtype == tensor.dtype, name
    assert found["numbers"] == expected["numbers"]
    assert found["rest"] == expected["rest"]


def cases() -> list[Any]:
    found = []
    for (optim, changes), schedule in itertools.product(OPTIMIZERS.items(), SCHEDULES):
        if optim != "schedule_free" or schedule == "cosine":
            chosen = (
                {"lr_scheduler_type": schedule} | SCHEDULES[schedule] | changes | {"optim": optim}
            )
            found.append(pytest.param(chosen, id=f"{optim}-{chosen['lr_scheduler_type']}"))
    return found


@pytest.mark.parametrize("chosen", cases())
@pytest.mark.parametrize(
    ("ema", "scale"), [(True, 2.0**126), (False, None)], ids=["ema-scaler", "plain"]
)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    tmp_path: Path, chosen: dict[str, Any], ema: bool, scale: float | None
) -> None:
    options = make_options(**chosen)
    whole = Run(options, ema=ema, scale=scale)
    whole.train(STEPS)
    expected = whole.everything()

    cut = Run(options, ema=ema, scale=scale)
    cut.train(CUT)
    path = checkpoint.save_checkpoint(tmp_path, cut.state, "job")
    assert path.name == f"step-{CUT:08d}"
    resumed = Run(options, seed=77, ema=ema, scale=scale)  # other weights, other random state
    assert checkpoint.load_newest(tmp_path, resumed.state, "job") == []
    resumed.train(STEPS - CUT)
    assert_equal(resumed.everything(), expected)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_every_optimiser_skips_the_overflowing_steps_of_these_tests(optim: str) -> None:
    """Else the scaler of the test above would test nothing."""
    run = Run(make_options(**OPTIMIZERS[optim] | {"optim": optim}))
    run.train(STEPS)
    assert run.state.scaler.get_scale() < 2.0**126 and run.state.scheduler.last_epoch < STEPS


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_restoring_into_a_live_run_leaves_nothing_of_it(tmp_path: Path, optim: str) -> None:
    options = make_options(**OPTIMIZERS[optim] | {"optim": optim})
    run = Run(options)
    checkpoint.save_checkpoint(
        tmp_path, run.state, "job"
    )  # before any step: no state, no step count, no average
    start = run.everything()
    run.train(3)
    checkpoint.save_checkpoint(tmp_path, run.state, "job")
    middle = run.everything()
    run.train(2)

    # A step is under way: gradients are there, and were unscaled already.
    run.state.progress.best_loss = 1.0
    run.state.progress.best_step = 5
    run.state.scaler.scale(run.forward()).backward()
    run.state.scaler.unscale_(run.optimizer)
    for step, expected in ((3, middle), (0, start)):
        load_step(tmp_path, step, run.state)
        assert_equal(run.everything(), expected)
        assert all(
            parameter.grad is None
            for parameter in [*run.student.parameters(), *run.extra.parameters()]
        )
    run.train(3)
    assert_equal(run.everything(), middle)


def test_entry_of_a_group_that_the_checkpoint_does_not_know_is_forgotten(tmp_path: Path) -> None:
    """pytorch_optimizer counts steps in the groups, some of which it adds at the first step."""
    run = Run(make_options(optim="muon"))
    checkpoint.save_checkpoint(tmp_path, run.state, "job")
    run.optimizer.param_groups[-1]["late"] = 1
    load_step(tmp_path, 0, run.state)
    assert "late" not in run.optimizer.param_groups[-1]


@pytest.mark.parametrize("fused", [True, False])
def test_state_goes_to_the_device_of_its_parameter_but_counts_of_steps_stay_where_they_are_read(
    tmp_path: Path, fused: bool
) -> None:
    """The device without memory stands for a GPU."""
    run = Run(make_options(), scale=None)
    run.train(1)
    checkpoint.save_checkpoint(tmp_path, run.state, "job")
    moved = Run(make_options(), scale=None)
    moved.student.to("meta")
    projection = moved.extra.projection.parameters()  # stays
    optimizer = make_optimizer(moved.student, projection, make_options(), torch.device("mtia"))
    for group in optimizer.param_groups:
        group["fused"] = fused
    load_step(tmp_path, 1, replace(moved.state, optimizer=optimizer))
    for parameter, state in optimizer.state.items():
        found = {name: value.device.type for name, value in state.items()}
        home = parameter.device.type
        assert found == {"step": home if fused else "cpu", "exp_avg": home, "exp_avg_sq": home}
    assert any(parameter.is_meta for parameter in optimizer.state)


def test_state_of_a_parameter_that_the_checkpoint_does_not_know_is_forgotten(
    tmp_path: Path,
) -> None:
    run = Run(make_options(), scale=None)
    bias = run.extra.projection.bias
    bias.requires_grad_(False)
    run.train(2)
    checkpoint.save_checkpoint(tmp_path, run.state, "job")
    bias.requires_grad_(True)
    run.train(1)
    assert bias in run.optimizer.state
    load_step(tmp_path, 2, run.state)
    assert bias not in run.optimizer.state


# ---------------------------------------------------------------------- roll-back


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_roll_back_halves_the_rate_once_more_each_time(tmp_path: Path, optim: str) -> None:
    options = make_options(**OPTIMIZERS[optim] | {"optim": optim})
    run = Run(options, scale=None)
    run.train(3)
    saved = checkpoint.save_checkpoint(tmp_path, run.state, "job")
    rates = run.state.scheduler.get_last_lr()
    weights = run.everything()["tensors"]
    for count, factor in ((1, 0.5), (2, 0.25)):
        run.train(2)
        assert checkpoint.roll_back(tmp_path, run.state, "job") == saved
        progress = run.state.progress
        assert (progress.step, progress.rollbacks, progress.learning_rate_factor) == (
            3,
            count,
            factor,
        )
        assert run.state.scheduler.get_last_lr() == [rate * factor for rate in rates]
        assert [group["lr"] for group in run.optimizer.param_groups] == [
            rate * factor for rate in rates
        ]
        for name, tensor in run.everything()["tensors"].items():
            assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("schedule", ["cosine", "onecycle"])
def test_resume_after_a_roll_back_equals_going_on(tmp_path: Path, schedule: str) -> None:
    options = make_options(lr_scheduler_type=schedule, **SCHEDULES[schedule])
    run = Run(options)
    run.train(2)
    checkpoint.save_checkpoint(tmp_path, run.state, "job")
    run.train(2)
    checkpoint.roll_back(tmp_path, run.state, "job")
    run.train(2)
    checkpoint.save_checkpoint(tmp_path, run.state, "job")
    run.train(3)
    resumed = Run(options, seed=77)
    checkpoint.load_newest(tmp_path, resumed.state, "job")
    assert (resumed.state.progress.rollbacks, resumed.state.progress.learning_rate_factor) == (
        1,
        0.5,
    )
    resumed.train(3)
    assert_equal(resumed.everything(), run.everything())


# Saves step 3 over itself, as after a roll-back, killed before the n-th change to the disk, for all
# n; then resumes.
KILLED = """
import json, os, signal, sys
from pathlib import Path
import torch
from kd.training.checkpoint import load_newest, save_checkpoint
from kd.training.saved.state import TrainingProgress, TrainState

def make_state(**progress):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, optimizer, scheduler, scaler, TrainingProgress(**progress))

def save_in_child(folder, last_change):
    \"\"\"Kill the child at its change number ``last_change`` of the file system.\"\"\"
    if (pid := os.fork()) == 0:
        changes = 0
        def count(event, arguments):
            nonlocal changes
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                changes += 1
                if changes == last_change:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        save_checkpoint(folder, make_state(step=3, rollbacks=1), "job")
        os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL

last_change = 1
died = True
while died:
    folder = Path(sys.argv[1], str(last_change))
    save_checkpoint(folder, make_state(step=3), "job")
    died = save_in_child(folder, last_change)
    found = make_state()
    problems = load_newest(folder, found, "job")
    save_checkpoint(folder, found, "job")
    report = {
        "died": died,
        "step": found.progress.step,
        "rollbacks": found.progress.rollbacks,
        "problems": problems,
        "left": [path.name for path in folder.iterdir()],
    }
    print(json.dumps(report), flush=True)
    last_change += 1
"""


@pytest.mark.long
def test_kill_9_while_a_checkpoint_is_saved_over_itself_leaves_one(tmp_path: Path) -> None:
    """At any moment the old checkpoint is there, or the new one; the next save removes the rest."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert process.returncode == 0, process.stderr
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    assert [report["died"] for report in reports] == [True] * (len(reports) - 1) + [False]
    assert [report["step"] for report in reports] == [3] * len(reports)
    assert all(
        report["problems"] == [] and report["left"] == ["step-00000003"] for report in reports
    )
    rollbacks = [report["rollbacks"] for report in reports]
    assert rollbacks == sorted(rollbacks) and set(rollbacks) == {0, 1}, (
        "first the old one, then the new one"
    )


def test_roll_back_passes_over_damaged_checkpoints_and_deletes_them(tmp_path: Path) -> None:
    run = Run(make_options())
    for _ in range(3):
        run.train(1)
        checkpoint.save_checkpoint(tmp_path, run.state, "job")
    damage(tmp_path / "step-00000003" / "model.safetensors")
    assert checkpoint.roll_back(tmp_path, run.state, "job").name == "step-00000002"
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == [
        "step-00000001",
        "step-00000002",
    ]


def test_roll_back_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    run = Run(make_options())
    run.train(1)
    before = run.everything()
    with pytest.raises(TrainingError, match="no whole checkpoint to go back to") as caught:
        checkpoint.roll_back(tmp_path, run.state, "job")
    assert "save_steps" in caught.value.remedy
    assert_equal(run.everything(), before)


# ---------------------------------------------------------------------- weights that are served


@pytest.mark.parametrize(
    ("optim", "ema"), [("adamw", True), ("adamw", False), ("schedule_free", False)]
)
def test_best_weights_are_those_that_were_evaluated(tmp_path: Path, optim: str, ema: bool) -> None:
    run = Run(make_options(**OPTIMIZERS[optim] | {"optim": optim}), ema=ema, scale=None)
    run.train(3)
    path = checkpoint.save_checkpoint(tmp_path, run.state, "job")
    with serving(run.student, run.optimizer, run.ema):
        best = [parameter.detach().clone() for parameter in run.student.parameters()]
    run.train(3)
    random = torch.get_rng_state()
    checkpoint.load_weights(path, run.state)
    use_served_weights(run.student, run.optimizer, run.ema)
    assert all(torch.equal(a, b) for a, b in zip(run.student.parameters(), best, strict=True))
    assert run.state.progress.step == 6 and torch.equal(torch.get_rng_state(), random)


# ---------------------------------------------------------------------- what is refused


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "extras.safetensors",
    "random.safetensors",
    "state.json",
)


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_checked(tmp_path: Path, name: str) -> None:
    run = Run(make_options())
    run.train(1)
    checkpoint.save_checkpoint(tmp_path, run.state, "job")
    run.train(1)
    path = checkpoint.save_checkpoint(tmp_path, run.state, "job")
    assert {file.name for file in path.iterdir()} == set(FILES)
    damage(path / name)
    (problem,) = checkpoint.load_newest(tmp_path, run.state, "job")
    assert "step-00000002 is damaged" in problem and name in problem
    assert run.state.progress.step == 1
    before = run.everything()
    with pytest.raises(CacheCorrupt, match=name):
        checkpoint.load_weights(path, run.state)
    assert_equal(run.everything(), before)


@pytest.mark.parametrize(
    "load",
    [
        lambda folder, state: checkpoint.load_newest(folder, state, "another"),
        lambda folder, state: checkpoint.roll_back(folder, state, "another"),
    ],
    ids=["newest", "roll-back"],
)
def test_checkpoint_of_another_job_is_refused(
    tmp_path: Path, load: Callable[[Path, TrainState], Any]
) -> None:
    run = Run(make_options())
    run.train(1)
    checkpoint.save_checkpoint(tmp_path, run.state, "job")
    before = run.everything()
    with pytest.raises(TrainingError, match="another job"):
        load(tmp_path, run.state)
    assert_equal(run.everything(), before)


def test_extras_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint.save_checkpoint(tmp_path, Run(make_options()).state, "job")
    without = Run(make_options(), seed=77, ema=False)
    before = without.everything()
    with pytest.raises(TrainingError, match="ema/lm_head/weight"):
        checkpoint.load_newest(tmp_path, without.state, "job")
    assert_equal(without.everything(), before)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = verify_json((path / "state.json").read_bytes(), "state.json")
    change(content)
    (path / "state.json").write_bytes(sign_json(content))


def test_checkpoint_of_an_earlier_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = Run(make_options())
    path = checkpoint.save_checkpoint(tmp_path, run.state, "job")
    rewrite(path, lambda content: content.pop("format"))
    for load in (checkpoint.load_newest, checkpoint.roll_back):
        with pytest.raises(
            TrainingError, match="has checkpoint format 1, but this version reads 2"
        ):
            load(tmp_path, run.state, "job")
    assert path.is_dir()


def test_progress_may_gain_and_lose_fields(tmp_path: Path) -> None:
    run = Run(make_options())
    run.train(1)
    path = checkpoint.save_checkpoint(tmp_path, run.state, "job")

    def change(content: dict[str, Any]) -> None:
        content["progress"]["of_a_later_version"] = 7
        del content["progress"]["best_step"]

    rewrite(path, change)
    run.state.progress.best_step = 99
    checkpoint.load_newest(tmp_path, run.state, "job")
    assert run.state.progress.best_step == 0 and not hasattr(
        run.state.progress, "of_a_later_version"
    )


def test_infinities_in_progress_are_null_in_json(tmp_path: Path) -> None:
    run = Run(make_options())
    run.state.progress.last_evaluation = {"validation_perplexity": float("inf")}
    path = checkpoint.save_checkpoint(tmp_path, run.state, "job")
    assert json.loads((path / "state.json").read_text())["progress"]["last_evaluation"] == {
        "validation_perplexity": None
    }


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    run = Run(make_options())
    for _ in range(5):
        run.train(1)
        checkpoint.save_checkpoint(tmp_path, run.state, "job")
    checkpoint.prune_checkpoints(tmp_path, 2, keep_step=2)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == [
        "step-00000002",
        "step-00000005",
    ]


def test_run_goes_on_with_other_kernels(tmp_path: Path) -> None:
    """A checkpoint of a fused AdamW resumes on one that is not fused, and the other way round."""
    options = make_options()
    for first in ("cpu", "mtia"):  # in torch the second has no fused AdamW
        run = Run(options, scale=None)
        run.optimizer = make_optimizer(
            run.student, run.extra.projection.parameters(), options, torch.device(first)
        )
        scheduler = make_scheduler(run.optimizer, options, STEPS)
        run.state = replace(run.state, optimizer=run.optimizer, scheduler=scheduler)
        run.train(2)
        checkpoint.save_checkpoint(tmp_path / first, run.state, "job")
    fused = Run(options, scale=None)
    plain = Run(options, scale=None)
    checkpoint.load_newest(tmp_path / "mtia", fused.state, "job")
    checkpoint.load_newest(tmp_path / "cpu", plain.state, "job")
    assert fused.optimizer.param_groups[0]["fused"] is True
    for a, b in zip(fused.student.parameters(), plain.student.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    fused.train(2)
