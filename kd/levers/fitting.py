"""When memory runs out: an answer that names the levers, and the largest micro-batch that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kd.config.train import TrainConfig
from kd.errors import OutOfMemory
from kd.levers.memory import free_memory

SPARE = 0.1

# What torch and the libraries below it say where they raise no class of their own.
_PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, of a GPU or of this machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)


def out_of_memory(error: BaseException, options: TrainConfig, estimate: str = "") -> OutOfMemory:
    """The answer to ``error``: the levers that are left, those first that leave the result as it is.

    ``estimate`` says what the memory was expected to be needed for.
    """
    said = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return OutOfMemory(
        f"Memory ran out with {options.batch_size} sequences a forward pass: {said}." + f" {estimate}" * bool(estimate),
        "Any of these needs less: " + "; ".join(_levers(options)) + ".",
    )


def _levers(options: TrainConfig) -> Iterator[str]:
    reduced = smaller(options)
    if reduced is not None:
        yield (
            f"train.batch_size {reduced.batch_size} with train.gradient_accumulation_steps "
            f"{reduced.gradient_accumulation_steps}, which is the same step"
        )
        if not options.auto_batch:
            yield "train.auto_batch true, which finds the largest batch_size that fits"
    if options.gradient_checkpointing != "full":
        yield "train.gradient_checkpointing full" + " or sqrt" * (options.gradient_checkpointing != "sqrt")
    if options.logits_chunk != 1:
        yield f"a smaller train.logits_chunk ({options.logits_chunk or 'it is chosen by the free memory now'})"
    if options.optim in ("adamw", "schedule_free"):
        yield "train.optim adafactor or lion, whose state is smaller"
    yield "a shorter data.sequence_length, or a smaller student"


@contextmanager
def memory_errors(options: TrainConfig, estimate: str = "") -> Iterator[None]:
    """Turn running out of memory into an ``OutOfMemory`` that names the levers; other errors pass unchanged."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, options, estimate) from error


# ---------------------------------------------------------------------- the largest micro-batch that fits


def smaller(options: TrainConfig) -> TrainConfig | None:
    """The same step in smaller micro-batches: half of batch_size (of an odd one, the next part that divides it)."""
    batch = options.batch_size
    parts = next((factor for factor in range(2, batch + 1) if batch % factor == 0), None)
    return None if parts is None else resized(options, batch // parts)


def resized(options: TrainConfig, batch_size: int) -> TrainConfig:
    """The same step in micro-batches of ``batch_size`` sequences, which must divide it."""
    accumulation, rest = divmod(options.batch_size * options.gradient_accumulation_steps, batch_size)
    if rest:
        raise ValueError(f"{batch_size} sequences do not divide a step of {batch_size * accumulation + rest}")
    return options.model_copy(update={"batch_size": batch_size, "gradient_accumulation_steps": accumulation})


def fitting(options: TrainConfig, attempt: Callable[[TrainConfig], None]) -> TrainConfig:
    """``options`` with the largest micro-batch at which ``attempt`` does not run out of memory (``smaller``).

    ``attempt`` must leave nothing behind (``rehearse``). Raises ``OutOfMemory`` where not even one sequence fits.
    """
    while True:
        refusal = _refusal(attempt, options)
        if refusal is None:
            return options
        forget()
        reduced = smaller(options)
        if reduced is None:
            raise refusal
        options = reduced


def forget() -> None:
    """Give back what a failed attempt has left to the garbage collector and to torch's own store."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _refusal(attempt: Callable[[TrainConfig], None], options: TrainConfig) -> OutOfMemory | None:
    """How ``attempt`` ran out of memory, if it did; without the traceback, which holds the tensors that filled it."""
    try:
        attempt(options)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return out_of_memory(error, options)
    return None


def rehearse(loss: Callable[[], Tensor], modules: Sequence[nn.Module], reserve: int, device: torch.device) -> None:
    """Run ``loss`` forward and backward twice in training mode; ``modules`` and random state are then as before.

    Twice, because the second micro-batch of a step finds the gradients of the first. ``reserve`` bytes are held
    meanwhile for what is not there before the first step: the optimiser's state. So is ``SPARE`` of what is free, for
    no allocator finds room twice in the same places: a batch that only just fits would fail at some later step.
    """
    modes = [module.training for module in modules]
    reserve += round(SPARE * (free_memory(device) or 0))
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
