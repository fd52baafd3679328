"""When memory runs out: an error with remedies, and the largest micro-batch that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from kd.config.train import OPTIMIZERS, TrainConfig
from kd.errors import OutOfMemory, is_out_of_memory
from kd.memory.step_bytes import resize_micro_batch
from kd.memory.step_memory import measure_free_memory

#: Share of the free memory that a rehearsal leaves unused, for holes that no allocator avoids.
SPARE_SHARE = 0.1


def make_out_of_memory(
    error: BaseException, options: TrainConfig, estimate: str = ""
) -> OutOfMemory:
    """Make the error for a job that ran out of memory, with the settings that would need less.

    Settings that do not change the result come first. ``estimate`` is a sentence about the expected
    need.
    """
    return OutOfMemory(
        f"Memory ran out with {options.batch_size} sequences a forward pass: {_reason(error)}."
        + f" {estimate}" * bool(estimate),
        "Any of these needs less: " + "; ".join(list_remedies(options)) + ".",
    )


def _reason(error: BaseException) -> str:
    """The first line of the error; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def list_remedies(options: TrainConfig) -> Iterator[str]:
    """List the settings that need less memory; those that do not change the result come first."""
    reduced = reduce_micro_batch(options)
    if reduced is not None:
        yield (
            f"train.batch_size {reduced.batch_size} with train.gradient_accumulation_steps "
            f"{reduced.gradient_accumulation_steps}, which is the same step"
        )
        if not options.auto_batch:
            yield "train.auto_batch true, which finds the largest batch_size that fits"
    if options.gradient_checkpointing != "full":
        yield "train.gradient_checkpointing full" + " or sqrt" * (
            options.gradient_checkpointing != "sqrt"
        )
    if not options.activation_offload and options.compile == "none":
        yield "train.activation_offload true on a GPU, if the host has memory"
    if options.logits_chunk != 1:
        now = options.logits_chunk or "it is chosen by the free memory now"
        yield f"a smaller train.logits_chunk ({now})"
    if options.optimizer.numbers > 1 and not options.optimizer.small:
        *most, last = (name for name, rules in OPTIMIZERS.items() if rules.small)
        yield f"train.optim {', '.join(most)} or {last}, whose state is smaller"
    if options.optimizer.rounds and not options.is_pure_bfloat16:
        yield "train.precision bf16_pure, whose weights and gradients are half as large"
    yield "a shorter data.sequence_length, or a smaller student"


def memory_errors(options: TrainConfig, estimate: str = "") -> AbstractContextManager[None]:
    """Raise ``OutOfMemory``, with its remedies, in place of an error of an allocator in the block.

    Other errors pass unchanged.
    """
    return _replace_memory_errors(lambda error: make_out_of_memory(error, options, estimate))


def saving_errors(what: str) -> AbstractContextManager[None]:
    """Raise ``OutOfMemory`` where memory runs out in the block, which saves ``what``.

    Other errors pass unchanged.
    """

    def describe(error: RuntimeError | MemoryError) -> OutOfMemory:
        return OutOfMemory(
            f"Memory ran out while {what} was saved: {_reason(error)}. Nothing half-written is "
            "left.",
            "Saving needs some 100 MiB of this machine's memory, beside what the run holds. Free "
            "memory or ask for more with resources.memory, then run the same job again: it "
            "continues from its newest checkpoint.",
        )

    return _replace_memory_errors(describe)


@contextmanager
def _replace_memory_errors(
    describe: Callable[[RuntimeError | MemoryError], OutOfMemory],
) -> Iterator[None]:
    """Raise what ``describe`` returns in place of an error of an allocator in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise describe(error) from error


# ---------------------------------------------------------------------- what fits


def reduce_micro_batch(options: TrainConfig) -> TrainConfig | None:
    """Split the step into smaller micro-batches; None if a micro-batch is one sequence.

    The new size is the largest part of batch_size that divides it: half of an even one.
    """
    batch = options.batch_size
    parts = next((factor for factor in range(2, batch + 1) if batch % factor == 0), None)
    return None if parts is None else resize_micro_batch(options, batch // parts)


def find_fitting_micro_batch(
    options: TrainConfig, attempt: Callable[[TrainConfig], None]
) -> TrainConfig:
    """``options`` with the largest micro-batch at which ``attempt`` does not run out of memory.

    ``attempt`` must leave no memory in use (``rehearse_step``). Raises ``OutOfMemory`` where not
    even one sequence fits.
    """
    while (refusal := _try_micro_batch(attempt, options)) is not None:
        release_memory()
        reduced = reduce_micro_batch(options)
        if reduced is None:
            raise refusal
        options = reduced
    return options


def release_memory() -> None:
    """Free the memory that a failed attempt left to the garbage collector and to torch's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _try_micro_batch(
    attempt: Callable[[TrainConfig], None], options: TrainConfig
) -> OutOfMemory | None:
    """The error of an ``attempt`` that ran out of memory, or None.

    It is returned and not raised: a traceback would keep the tensors that filled the memory.
    """
    try:
        attempt(options)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return make_out_of_memory(error, options)
    return None


def rehearse_step(
    loss: Callable[[], Tensor], modules: Sequence[nn.Module], reserve: int, device: torch.device
) -> None:
    """Run ``loss`` forward and backward twice in training mode, to see whether a step fits.

    Twice, because the second micro-batch of a step needs its memory beside the gradients of the
    first. Meanwhile ``reserve`` bytes are held for the optimiser's state, which the first step
    makes, and ``SPARE_SHARE`` of the free memory: an allocator does not find the same room twice,
    and a batch that only just fits would fail at a later step. Afterwards ``modules`` and random
    state are as before.
    """
    modes = [module.training for module in modules]
    reserve += round(SPARE_SHARE * (measure_free_memory(device) or 0))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        held = torch.empty(reserve, dtype=torch.uint8, device=device)
        try:
            for module in modules:
                module.train()
            for _ in range(2):
                loss().backward()
        finally:
            del held
            for module, mode in zip(modules, modes, strict=True):
                module.train(mode).zero_grad(set_to_none=True)
