"""The stages of a pipeline, one on each rank: ``torch.distributed.pipelining`` runs them.

Every rank reads the same micro-batches, so only hidden states travel, and their gradients back.
The last stage computes the loss, and the measurements that other ranks do not have.
The schedule is 1F1B: a stage goes backward as soon as it can, and has at most as many micro-batches
in memory as there are stages.

Shapes: B sequences of a micro-batch, L positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn import Parameter

from kd.parallel.group import Group

Result = TypeVar("Result")


class Stage(Protocol):
    """The part of a student that this rank has."""

    @property
    def student(self) -> nn.Module:
        """The module with the parameters of this stage."""

    @property
    def tied(self) -> tuple[Parameter, ...]:
        """The parameters that the first and the last stage both have."""

    @property
    def width(self) -> int:
        """The width of the hidden states between stages."""

    @property
    def given_dtype(self) -> torch.dtype:
        """The type of the hidden states that the stage receives."""

    @property
    def sent_dtype(self) -> torch.dtype:
        """The type of the hidden states that the stage sends."""

    def receiving(self, hidden_BLD: Tensor | None) -> AbstractContextManager[None]:
        """Let a forward pass in the block go on from ``hidden_BLD``."""

    def pass_on(self, batch: Any) -> Tensor:
        """Return the hidden states of ``batch`` for the next stage."""


class StageLoss(nn.Module):
    """A stage of a student and its loss, in the place of ``kd.parallel.strategies.WholeLoss``.

    Each forward pass of the stage runs in a context ``measured()``.
    """

    def __init__(
        self,
        stage: Stage,
        group: Group,
        device: torch.device,
        measured: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList([stage.student])
        self._stage = stage
        self._group = group
        self._device = device
        self._measured = measured
        self._task = _Task(stage.student, group)
        self._prepared: dict[tuple[Any, ...], PipelineScheduleSingle] = {}
        # All ranks call it, as torch asks.
        self._ends = dist.new_group(sorted({0, group.size - 1}))

    @property
    def is_last(self) -> bool:
        """Whether this stage has the LM head."""
        return self._group.rank == self._group.size - 1

    def forward(self, work: Callable[..., Result], *inputs: Any) -> Result:
        """Return ``work(*inputs)``, which runs the student from what this stage received."""
        return work(*inputs)

    def run_step(self, batches: Sequence[Any], compute_loss: Callable[[Any], Tensor]) -> None:
        """Add up the gradients of ``compute_loss`` of all ``batches``, which have one shape.

        The last stage alone calls it.
        """
        schedule = self._prepare(batches[0].tokens_BL.shape, len(batches), trains=True)
        self._run(schedule, [self._bring(each) for each in batches], compute_loss)
        self._add_tied_gradients()

    @torch.no_grad()
    def call(self, work: Callable[..., Result], batch: Any, *inputs: Any) -> Result | None:
        """Return ``work(batch, *inputs)`` on the last stage, and None on all others.

        No backward pass follows. The random state stays as it is.
        """
        found: list[Result] = []

        def compute(batch: Any) -> Tensor:
            found.append(work(batch, *inputs))
            return torch.zeros((), device=self._device)

        schedule = self._prepare(batch.tokens_BL.shape, 1, trains=False)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            self._run(schedule, [self._bring(batch)], compute)
        return found[0] if found else None

    def clip_(self, parameters: Iterable[Parameter], limit: float) -> Tensor:
        """Clip the gradients of all stages by their common norm, and return the norm before it."""
        own = [each for each in parameters if each.grad is not None]
        # A tied weight counts on the first stage.
        tied = set(self._stage.tied) if self.is_last else set()
        counted = [each.grad for each in own if each not in tied and each.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if counted:
            square += nn.utils.get_total_norm(counted).double() ** 2
        norm = self._group.add_(square).sqrt()
        if own:
            nn.utils.clip_grads_with_norm_(own, limit, norm.to(own[0].dtype))
        return norm

    def _bring(self, batch: Any) -> Any:
        """Return ``batch`` on this rank's device, with records where they are used."""
        return (batch if self.is_last else batch.drop_records()).to(self._device)

    def _run(
        self,
        schedule: PipelineScheduleSingle,
        batches: Sequence[Any],
        compute: Callable[[Any], Tensor],
    ) -> None:
        def work(given: Tensor | None, number: int) -> Tensor:
            batch = batches[number]
            with self._measured(), self._stage.receiving(given):
                return compute(batch) if self.is_last else self._stage.pass_on(batch)

        self._task.work = work
        numbers = torch.arange(len(batches))
        target = numbers if self.is_last and schedule._has_backward else None
        inputs = (numbers,) if self._group.leads else ()
        try:
            schedule.step(*inputs, number=numbers, target=target, return_outputs=False)
        except RuntimeError as error:
            # torch hides errors of a stage, such as of memory that ran out, behind its own.
            raise error.__cause__ or error from None
        finally:
            self._task.work = None

    def _prepare(self, shape: torch.Size, count: int, trains: bool) -> PipelineScheduleSingle:
        """Return torch's schedule for ``count`` micro-batches of ``shape`` (B, L)."""
        key = (shape, count, trains)
        if key in self._prepared:
            return self._prepared[key]

        def describe(*size: int, dtype: torch.dtype) -> Tensor:
            gradient = trains and dtype.is_floating_point
            return torch.empty(size, dtype=dtype, device="meta", requires_grad=gradient)

        given_BLD = describe(*shape, self._stage.width, dtype=self._stage.given_dtype)
        sent_BLD = describe(*shape, self._stage.width, dtype=self._stage.sent_dtype)
        number = describe(1, dtype=torch.int64)
        loss = describe(dtype=torch.float64)
        # With these descriptions torch does not run the stages to learn their shapes.
        stage = PipelineStage(
            self._task,
            self._group.rank,
            self._group.size,
            self._device,
            input_args=number if self._group.leads else given_BLD,
            output_args=loss if self.is_last else sent_BLD,
        )
        if trains:
            # The loss is a sum already: nothing is divided by the number of micro-batches.
            found: PipelineScheduleSingle = Schedule1F1B(
                stage, count, lambda loss, _: loss, scale_grads=False
            )
        else:
            found = ScheduleGPipe(stage, count)
        self._prepared[key] = found
        return found

    def _add_tied_gradients(self) -> None:
        """Let the first and the last stage have the whole gradient of a tied weight, bit for bit.

        Both then take the same step with it.
        """
        for parameter in self._stage.tied:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._ends)


class _Task(nn.Module):
    """The module that torch's schedule runs: the stage of the student, with the ``work`` of now."""

    def __init__(self, student: nn.Module, group: Group) -> None:
        super().__init__()
        self.student = student
        self._leads = group.leads
        self.work: Callable[[Tensor | None, int], Tensor] | None = None

    def forward(self, given: Tensor, number: Tensor) -> Tensor:
        """Do the work of micro-batch ``number`` on what the stage before has sent."""
        assert self.work is not None
        # The first stage receives nothing: torch hands it the number.
        return self.work(None if self._leads else given, int(number))


def keep_owned(optimizer: torch.optim.Optimizer, owned: frozenset[Parameter]) -> None:
    """Leave only the parameters ``owned`` in the groups of ``optimizer``, which stay all."""
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if each in owned]
