"""A training step on one, two and four hosts: the bytes on the wire, and the speed over slow links.

The hosts are network namespaces with two ranks each, and gloo joins the ranks. The formulas are
those of ``kd.memory.parallel``, which ``kd plan`` uses.

    bytes   steps of ``kd.training``; the interface of each host counts what it sends. Headers of
            packets, losses and norms come on top of the formula.
    speed   steps of a student whose layers wait for a simulated device: a set time, in which the
            processor idles, so that eight ranks do not contend for two cores. Gradients, wrappers
            (``kd.parallel.strategies``) and collectives are real. ``tc`` limits what each host
            sends and receives. The host waits for the device in each layer, as no host of a GPU
            does, so FSDP hides less here.

A host sends what one rank of a ring sends, because one of its ranks is beside another host.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from bench.devices.scale import QUICK, make_config, make_student, seal_documents
from bench.speed import BenchmarkSizes
from bench.support.hosts import Net
from bench.support.ranks import run_ranks
from bench.support.training import step_by_hand
from cache.store import open_cache
from kd.config.train import TrainConfig
from kd.memory.devices import DeviceRates
from kd.memory.parallel import (
    ParallelStrategy,
    count_between_hosts,
    count_traffic,
    count_waiting,
)
from kd.memory.step_bytes import FLOAT32, StepShape, StudentShape
from kd.memory.step_memory import describe_student
from kd.optim.state_size import ParameterShape
from kd.parallel.group import Group
from kd.parallel.strategies import WholeLoss, replicate, shard, synchronising
from kd.progress import SILENT
from kd.training.prepare import prepare

NAMES = ("one", "two", "three", "four")
STRATEGIES: tuple[ParallelStrategy, ...] = ("ddp", "fsdp", "hsdp")
#: Ranks of a host.
PER_HOST = 2
#: Micro-batches of a step, on all ranks together.
MICRO_BATCHES = 8
#: Bytes of a Mbit.
MBIT = 1e6 / 8
#: Numbers of hosts, and rates of their links in Mbit/s.
COUNTS = (2, 4)
LINKS = (math.inf, 1000, 100)
#: The student of the table of bytes.
TRAINED = BenchmarkSizes(teacher=(1, 64), student=(4, 384), vocabulary=8192, length=64, batch=1)


@dataclass(frozen=True)
class Pace:
    """A student on a simulated device: its parts, and the seconds of a micro-batch's layers.

    ``outside`` are the numbers of embeddings and LM head; ``tokens`` are those of a micro-batch.
    """

    layers: int = 8
    layer: int = 1_000_000
    outside: int = 1_000_000
    seconds: float = 0.5
    tokens: int = 8192

    def __str__(self) -> str:
        numbers = self.layers * self.layer + self.outside
        return (
            f"A student of {numbers:,} numbers in float32, {MICRO_BATCHES} micro-batches of "
            f"{self.tokens:,} tokens a step, {self.seconds:g} s each on a simulated device; "
            f"{PER_HOST} devices a host."
        )

    def describe(self) -> StudentShape:
        """Describe the student as ``kd.memory.step_memory`` does."""
        layer = ParameterShape((self.layer,), is_layer_matrix=True)
        outside = ParameterShape((self.outside,), is_layer_matrix=False)
        return StudentShape(
            layers=self.layers,
            trained=(layer,) * self.layers + (outside,),
            in_layers=self.layers * self.layer,
            largest=self.layer,
            largest_trained=self.layer,
            widths=0,
            head=0,
            width=0,
        )


QUICK_PACE = Pace(layers=2, layer=100_000, outside=50_000, seconds=0.05)


def make_step(student: StudentShape, hosts: int) -> StepShape:
    """Describe a step of a rank in float32."""
    micro_batches = MICRO_BATCHES // (hosts * PER_HOST)
    options = TrainConfig(max_steps=1, gradient_accumulation_steps=micro_batches)
    return StepShape(student, options, length=1, vocabulary=1, item=FLOAT32, chunk=1)


def count_bytes(step: StepShape, strategy: ParallelStrategy, hosts: int) -> float:
    """The bytes that a host sends to others in a step, by the formula."""
    if strategy == "hsdp":
        return count_between_hosts(step, hosts)
    return count_traffic(step, strategy, hosts * PER_HOST) if hosts > 1 else 0.0


def count_gloo(step: StepShape, strategy: ParallelStrategy, hosts: int) -> float:
    """The same through gloo, which reduces and scatters by an all-reduce of twice the bytes."""
    sent = count_bytes(step, strategy, hosts)
    if strategy == "fsdp":
        sent += step.options.gradient_accumulation_steps * count_bytes(step, "ddp", hosts) / 2
    return sent


def read_sent() -> int:
    """The bytes that this host has sent, by the counter of its interface."""
    return int(psutil.net_io_counters(pernic=True)["net0"].bytes_sent)


def measure_step(group: Group, take: Callable[[], None], steps: int) -> tuple[float, float]:
    """Return the median seconds of a step of ``take``, and the bytes that this host sends in it."""
    take()  # buckets are made anew after the first
    group.wait()
    sent, seconds = read_sent(), []
    for _ in range(steps):
        began = time.perf_counter()
        take()
        group.wait()
        seconds.append(time.perf_counter() - began)
    return median(seconds), (read_sent() - sent) / steps


# ---------------------------------------------------------------------- bytes of a real training


def train_rank(
    group: Group, sizes: BenchmarkSizes, cache: str, folder: str, strategy: str, steps: int
) -> tuple[float, float]:
    """Take steps of ``kd.training`` as one of the ranks; returns what ``measure_step`` does."""
    config = make_config(sizes, cache, strategy, MICRO_BATCHES)
    student = make_student(sizes, hollow=not group.leads)
    place = Path(folder) / f"{strategy}-{group.size}"
    run = prepare(config, open_cache(Path(cache)), student, sizes.vocabulary, place, SILENT, group)
    batches = run.read_batches()
    return measure_step(group, lambda: step_by_hand(run, next(batches)), steps)


@dataclass(frozen=True)
class Sent:
    """Bytes that a host sends in a step: by the formula, by the same through gloo, measured."""

    formula: float
    gloo: float
    measured: float


def measure_bytes(
    counts: Sequence[int], sizes: BenchmarkSizes, steps: int
) -> Iterator[tuple[str, list[Sent]]]:
    """Measure the bytes of a training by each strategy, on each number of hosts."""
    student = describe_student(make_student(sizes, hollow=True))
    with tempfile.TemporaryDirectory() as folder, closing(Net(NAMES[: max(counts)])) as net:
        cache = seal_documents(sizes, Path(folder))
        for strategy in STRATEGIES:
            found = []
            for hosts in counts:
                step = make_step(student, hosts)
                ranks = run_on(net, hosts, train_rank, sizes, cache, folder, strategy, steps)
                formula = count_bytes(step, strategy, hosts)
                gloo = count_gloo(step, strategy, hosts)
                found.append(Sent(formula, gloo, max(sent for _, sent in ranks)))
            yield strategy, found


def run_on(net: Net, hosts: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """Run ``function`` in the ranks of the first ``hosts``."""
    names = [net.names[name] for name in NAMES[:hosts]]
    return run_ranks(hosts * PER_HOST, function, *given, hosts=names)


# ---------------------------------------------------------------------- speed, simulated devices


class Device:
    """A device whose work takes a set time, in which the processor has nothing to do."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def work(self, seconds: float) -> None:
        """Return when the device has done this after all that it had to do."""
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        time.sleep(max(self._free_at - time.perf_counter(), 0.0))


class Work(torch.autograd.Function):
    """Passes its input on, a third of the seconds in the forward pass; gradients are zero."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, device: Device, seconds: float) -> Tensor:
        """Return ``states``."""
        ctx.given = weight.shape, device, seconds
        device.work(seconds / 3)
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        """Return the gradients of ``states`` and ``weight``."""
        shape, device, seconds = ctx.given
        device.work(seconds * 2 / 3)
        return gradient, torch.zeros(shape), None, None


class PacedPart(nn.Module):
    """A layer of so many numbers, or all that lies outside of the layers."""

    def __init__(self, numbers: int, device: Device, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers))
        self.device, self.seconds = device, seconds

    def forward(self, states: Tensor) -> Tensor:
        """Return ``states`` when the device has done the work."""
        found: Tensor = Work.apply(states, self.weight, self.device, self.seconds)  # type: ignore[no-untyped-call]
        return found


def pace_rank(group: Group, pace: Pace, strategy: str, steps: int) -> tuple[float, float]:
    """Take steps on a simulated device; returns what ``measure_step`` does."""
    device = Device()
    outside = PacedPart(pace.outside, device, 0.0)
    layers = [PacedPart(pace.layer, device, pace.seconds / pace.layers) for _ in range(pace.layers)]
    loss: nn.Module = WholeLoss([outside, *layers])
    mesh = (group.size // PER_HOST, PER_HOST) if strategy == "hsdp" else (group.size,)
    if strategy == "ddp":
        loss = replicate(loss)
    else:
        loss = shard(loss, [[each] for each in layers], torch.float32, torch.device("cpu"), mesh)
    micro_batches = MICRO_BATCHES // group.size

    def compute() -> Tensor:
        states = torch.zeros(1)
        for part in (outside, *layers):
            states = part(states)
        return states.sum()

    def take() -> None:
        for number in range(micro_batches):
            with synchronising(loss, last=number == micro_batches - 1):
                loss(compute).backward()
        loss.zero_grad(set_to_none=True)

    return measure_step(group, take, steps)


@dataclass(frozen=True)
class Times:
    """Seconds of a step: the floor, by the formula, measured.

    The floor is the longer of the device's work and of the bytes at the rate of the link.
    """

    floor: float
    formula: float
    measured: float


def predict(
    step: StepShape, strategy: ParallelStrategy, hosts: int, one: float, mbits: float
) -> float:
    """The seconds of a step on ``hosts`` by that of one host, the bytes and the links."""
    # All of a ring is as fast as the links between hosts, and ``one`` has what passes in a host.
    rates = DeviceRates("simulated", 0, 0, 0, 0, 0, peer=mbits * MBIT, network=mbits * MBIT)
    sent = count_gloo(step, strategy, hosts)
    work, micro_batches = one / hosts, step.options.gradient_accumulation_steps
    traffic, between = (0.0, sent) if strategy == "hsdp" else (sent, 0.0)
    return work + count_waiting(
        work, traffic, strategy, hosts * PER_HOST, micro_batches, rates, between
    )


def measure_speed(
    links: Sequence[float], counts: Sequence[int], pace: Pace, steps: int
) -> Iterator[tuple[str, float, float, list[Times]]]:
    """Measure steps by each strategy over each link: on one host, and on each number of hosts."""
    student = pace.describe()
    with closing(Net(NAMES[: max(counts)])) as net:

        def measure(hosts: int, strategy: str) -> float:
            ranks = run_on(net, hosts, pace_rank, pace, strategy, steps)
            return float(max(seconds for seconds, _ in ranks))

        alone = {strategy: measure(1, strategy) for strategy in ("ddp", "fsdp")}
        alone["hsdp"] = alone["fsdp"]  # on one host they are the same
        for mbits in links:
            for name in net.names if mbits < math.inf else ():
                net.set_rate(name, mbits)
            for strategy in STRATEGIES:
                found = []
                for hosts in counts:
                    step, one = make_step(student, hosts), alone[strategy]
                    device = pace.seconds * step.options.gradient_accumulation_steps
                    links_take = count_gloo(step, strategy, hosts) / (mbits * MBIT)
                    formula = predict(step, strategy, hosts, one, mbits)
                    floor = max(device, links_take)
                    found.append(Times(floor, formula, measure(hosts, strategy)))
                yield strategy, mbits, alone[strategy], found


# ---------------------------------------------------------------------- the tables


def print_tables(quick: bool) -> Iterator[str]:
    """Yield the lines of both tables, a row as soon as it is measured."""
    counts = (2,) if quick else COUNTS
    yield "MB that a host sends to others in a training step:"
    yield ""
    columns = [f"{n} hosts: formula | through gloo | measured" for n in counts]
    yield from start_table("strategy", *columns)
    for strategy, found in measure_bytes(counts, QUICK if quick else TRAINED, 1 if quick else 3):
        yield make_row(strategy, *(number / 1e6 for each in found for number in astuple(each)))
    pace = QUICK_PACE if quick else Pace()
    yield ""
    yield f"{pace} Tokens/s:"
    yield ""
    columns = [f"{n} hosts: at most | formula | measured" for n in counts]
    yield from start_table("strategy", "Mbit/s", "1 host", *columns)
    links = (50,) if quick else LINKS
    for strategy, mbits, one, times in measure_speed(links, counts, pace, 1 if quick else 3):
        link = "-" if mbits == math.inf else f"{mbits:g}"
        seconds = (one, *(number for each in times for number in astuple(each)))
        speeds = [f"{pace.tokens * MICRO_BATCHES / each:,.0f}" for each in seconds]
        yield make_row(strategy, link, *speeds)


def make_row(*cells: str | float) -> str:
    """Make a row of a Markdown table."""
    shown = [each if isinstance(each, str) else f"{each:.2f}" for each in cells]
    return f"| {' | '.join(shown)} |"


def start_table(*columns: str) -> Iterator[str]:
    """Yield the first two lines of a Markdown table; numbers are on the right."""
    heading = make_row(*columns)
    yield heading
    yield f"|---{'|--:' * (heading.count('|') - 2)}|"
