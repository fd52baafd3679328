"""Cut a student into stages of consecutive decoder layers, of which this process keeps one.

    stage 0      embeddings, first layers
    stage k      layers
    last stage   last layers, final norm, LM head

The student stays the model that it is: its own forward pass makes rotary embeddings, positions and
the masks of each layer, as in one process. What the stage does not have loses its parameters and
its work: layers of other stages hand on what they get, and the layer before the first own one hands
on the hidden states that the stage before has sent. So names of parameters stay too.

A model may do more with a layer than that, so each stage compares its hidden states with those of
the whole student before anything is trained.

Shapes: B sequences, L positions of a sequence, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from kd.errors import ModelError, format_first_line
from kd.models.layers import compute_hidden_states, evaluating, find_decoder_layers, removing
from kd.models.precision import Precision
from kd.parallel.cutting import cut_layers
from kd.text.batches import Batch

#: Fields of configurations of models whose layers use more than the hidden states before them, each
#: with what they use.
_SHARING = {
    "num_kv_shared_layers": "its last layers read keys and values of earlier ones",
    "hidden_size_per_layer_input": "each layer reads embeddings of its own",
}
#: Tokens of the trial.
_TRIAL_TOKENS = 8
#: The largest difference of the hidden states of a stage from those of the whole student, as a
#: share of the largest one: no more than another kernel may round.
_TOLERANCE = 1e-5
_TOLERANCE_16_BIT = 1e-2


@dataclass
class Passage:
    """The hidden states (B, L, D) that enter and leave a stage in the present forward pass."""

    given: Tensor | None = None
    sent: Tensor | None = None


@dataclass(frozen=True)
class StudentStage:
    """The stage ``number`` of ``count`` that this process has of ``student``.

    ``owned``: the parameters that it has. ``tied``: those of them that the first and the last stage
    both have. Hidden states have the width ``width``, and the types ``given_dtype`` as the stage
    receives them and ``sent_dtype`` as it sends them.
    """

    student: PreTrainedModel
    number: int
    count: int
    owned: frozenset[Parameter]
    tied: tuple[Parameter, ...]
    width: int
    given_dtype: torch.dtype
    sent_dtype: torch.dtype
    precision: Precision
    passage: Passage = field(default_factory=Passage)

    @property
    def is_last(self) -> bool:
        """Whether the stage has the LM head."""
        return self.number == self.count - 1

    @contextmanager
    def receiving(self, hidden_BLD: Tensor | None) -> Iterator[None]:
        """Let a forward pass of the student in the block go on from ``hidden_BLD``."""
        self.passage.given = hidden_BLD
        try:
            yield
        finally:
            self.passage.given = self.passage.sent = None

    def pass_on(self, batch: Batch) -> Tensor:
        """Return the hidden states (B, L, D) of ``batch`` for the next stage."""
        with self.precision.autocast():
            compute_hidden_states(self.student, batch.tokens_BL, batch.packed)
        assert self.passage.sent is not None
        return self.passage.sent


def require_cuttable(student: PreTrainedModel, stages: int) -> None:
    """Raise ``ModelError`` if ``student``, which may be hollow, has no such stages."""
    config = student.config.get_text_config()
    if getattr(student.config, "is_encoder_decoder", False):
        raise _make_refusal(student, "it has an encoder and a decoder")
    for name, why in _SHARING.items():
        if getattr(config, name, None):
            raise _make_refusal(student, why)
    layers = find_decoder_layers(student)
    if not layers:
        raise _make_refusal(student, "it has no list of decoder layers")
    if len(layers) < stages:
        raise ModelError(
            f"a student of {len(layers)} layers cannot be cut into {stages} stages, one for each "
            "device.",
            f"Set resources.gpus to {len(layers)} or less, or train.strategy to ddp.",
        )


def pick_own_layers(student: PreTrainedModel, number: int, count: int) -> list[nn.Module]:
    """Return the layers of stage ``number`` of ``count``; raises as ``require_cuttable``."""
    require_cuttable(student, count)
    layers = find_decoder_layers(student)
    sizes = cut_layers(len(layers), count)
    return layers[sum(sizes[:number]) :][: sizes[number]]


def cut(student: PreTrainedModel, number: int, count: int, precision: Precision) -> StudentStage:
    """Leave only stage ``number`` of ``count`` of ``student``, in place.

    The parameters of other stages become empty, whoever refers to them. Raises ``ModelError`` if
    a stage computes something else than the whole student.
    """
    require_cuttable(student, count)
    parts = _find_parts(student)
    sizes = cut_layers(len(parts.layers), count)
    first = sum(sizes[:number])
    own = range(first, first + sizes[number])
    owned, tied = _deal_parameters(student, parts, sizes, number)
    seen = _observe(student, own, precision)
    passage = Passage()
    _hollow(student, parts, own, passage, seen)
    _release(student, owned)
    stage = StudentStage(
        student,
        number,
        count,
        owned,
        tied,
        width=seen.left.shape[-1],
        given_dtype=(seen.left if seen.entered is None else seen.entered).dtype,
        sent_dtype=seen.left.dtype,
        precision=precision,
        passage=passage,
    )
    _require_same(stage, seen)
    return stage


def _make_refusal(student: PreTrainedModel, why: str) -> ModelError:
    return ModelError(
        f"train.strategy is pipeline, but student.model, a {type(student).__name__}, cannot be cut "
        f"into stages: {why}.",
        "Set train.strategy to ddp or fsdp.",
    )


# ---------------------------------------------------------------------- parts of a model


@dataclass(frozen=True)
class _Parts:
    """The decoder layers, and the modules with parameters that run before and after all of them."""

    layers: list[nn.Module]
    front: list[nn.Module]
    back: list[nn.Module]


@torch.no_grad()
def _find_parts(student: PreTrainedModel) -> _Parts:
    """Find the parts by running the body; refuses modules that run between the layers, or never."""
    layers = find_decoder_layers(student)
    inside = {module for layer in layers for module in layer.modules()}
    outside = [
        module
        for module in student.modules()
        if module not in inside and next(module.parameters(recurse=False), None) is not None
    ]
    entered: list[nn.Module] = []
    places: dict[nn.Module, set[str]] = {module: set() for module in outside}

    def note(module: nn.Module, _: Any) -> None:
        if module in places:
            many = len(set(entered))
            places[module].add("front" if not many else "back" if many == len(layers) else "among")
        else:
            entered.append(module)

    with removing(each.register_forward_pre_hook(note) for each in (*layers, *outside)):
        _run_trial(student)
    # The loss calls the LM head itself.
    places[student.get_output_embeddings()] = {"back"}
    names = {module: name for name, module in student.named_modules()}
    for module, found in places.items():
        if found not in ({"front"}, {"back"}):
            why = f"{names[module]} runs neither before nor after its layers"
            raise _make_refusal(student, why)
    return _Parts(
        layers,
        [module for module, found in places.items() if found == {"front"}],
        [module for module, found in places.items() if found == {"back"}],
    )


def _deal_parameters(
    student: PreTrainedModel, parts: _Parts, sizes: list[int], number: int
) -> tuple[frozenset[Parameter], tuple[Parameter, ...]]:
    """The parameters of stage ``number``, and those of them that another stage has too."""
    stages: dict[Parameter, set[int]] = {each: set() for each in student.parameters()}
    of_layer = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    for stage, layer in zip(of_layer, parts.layers, strict=True):
        for parameter in layer.parameters():
            stages[parameter].add(stage)
    front, back = map(_list_parameters, (parts.front, parts.back))
    for stage, outside in ((0, front), (len(sizes) - 1, back)):
        for parameter in outside:
            stages[parameter].add(stage)
    ends = front & back
    for name, parameter in student.named_parameters():
        if len(stages[parameter]) > 1 and parameter not in ends:
            raise _make_refusal(student, f"several of its layers share {name}")
    owned = frozenset(each for each, found in stages.items() if number in found)
    return owned, tuple(each for each in student.parameters() if each in owned & ends)


def _list_parameters(modules: list[nn.Module]) -> set[Parameter]:
    return {each for module in modules for each in module.parameters(recurse=False)}


# ---------------------------------------------------------------------- the trial


@dataclass(frozen=True)
class _Seen:
    """What the whole student computes in a trial.

    ``entered`` and ``left`` are hidden states (B, L, D): those of the layer before the first own
    one (None for stage 0), and those of the last own one. ``final`` are those after the last norm.
    ``tuples`` tells how many values each layer returns; 0 for a plain tensor.
    """

    entered: Tensor | None
    left: Tensor
    final: Tensor
    tuples: list[int]


def _run_trial(student: PreTrainedModel) -> Tensor:
    """Return the final hidden states of a few tokens, in the mode for evaluation."""
    size = min(student.config.get_text_config().vocab_size, _TRIAL_TOKENS)
    tokens_BL = torch.arange(_TRIAL_TOKENS, device=student.device).remainder(size)[None]
    with evaluating(student):
        return compute_hidden_states(student, tokens_BL)


@torch.no_grad()
def _observe(student: PreTrainedModel, own: range, precision: Precision) -> _Seen:
    layers = find_decoder_layers(student)
    outputs: dict[nn.Module, Any] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        outputs[module] = output

    with removing(each.register_forward_hook(note) for each in layers), precision.autocast():
        final = _run_trial(student)
    hidden = [_pick_hidden(outputs[layer]) for layer in layers]
    if any(each is None or each.shape != final.shape for each in hidden):
        raise _make_refusal(student, "its layers hand on more than hidden states")
    tuples = [len(each) if isinstance(each := outputs[layer], tuple) else 0 for layer in layers]
    entered = hidden[own.start - 1] if own.start else None
    left = hidden[own.stop - 1]
    assert left is not None
    return _Seen(entered, left, final, tuples)


def _pick_hidden(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None


@torch.no_grad()
def _require_same(stage: StudentStage, seen: _Seen) -> None:
    """Raise ``ModelError`` if the stage computes something else than the whole student did."""
    student = stage.student
    try:
        with stage.receiving(seen.entered), stage.precision.autocast():
            final = _run_trial(student)
            found = final if stage.is_last else stage.passage.sent
    # A model may raise anything where layers are left out.
    except Exception as error:
        why = f"it fails without its other layers ({format_first_line(error)})"
        raise _make_refusal(student, why) from error
    wanted = seen.final if stage.is_last else seen.left
    assert found is not None
    tolerance = _TOLERANCE if stage.precision.dtype.itemsize >= 4 else _TOLERANCE_16_BIT
    difference = float((found - wanted).abs().max())
    # "not <=" is true for NaN too.
    if not difference <= tolerance * float(wanted.abs().max()):
        why = f"without its other layers its hidden states differ by {difference:.3g}"
        raise _make_refusal(student, why)


# ---------------------------------------------------------------------- what a stage does not have


def _hollow(
    student: PreTrainedModel, parts: _Parts, own: range, passage: Passage, seen: _Seen
) -> None:
    """Take the work out of all modules of other stages, and let ``passage`` join the stages."""
    for place, layer in enumerate(parts.layers):
        if place not in own:
            joint = passage if place == own.start - 1 else None
            layer.forward = _PassingLayer(joint, seen.tuples[place])  # type: ignore[method-assign]
    if own.stop < len(parts.layers):
        parts.layers[own.stop - 1].register_forward_hook(_Keep(passage))
        for module in parts.back:
            module.forward = _return_input  # type: ignore[method-assign]
    if own.start:
        embeddings = student.get_input_embeddings()
        for module in parts.front:
            module.forward = _Received(passage, module is embeddings)  # type: ignore[method-assign]


def _release(student: PreTrainedModel, owned: frozenset[Parameter]) -> None:
    """Take the parameters of other stages out of the modules, and free their memory."""
    for module in student.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter in owned:
                continue
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
            # A tensor that is no parameter: a model may ask for the device of its embeddings.
            del module._parameters[name]
            module.__dict__[name] = parameter.data


@dataclass(frozen=True)
class _PassingLayer:
    """The ``forward`` of a layer of another stage: it returns hidden states as they came.

    With ``passage`` it returns those that the stage before has sent. ``values`` is how many values
    the layer returns; 0 for a plain tensor.
    """

    passage: Passage | None
    values: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _return_input(*args, **kwargs) if self.passage is None else self.passage.given
        return (hidden, *[None] * (self.values - 1)) if self.values else hidden


@dataclass(frozen=True)
class _Keep:
    """A hook of the last layer of a stage: it keeps the layer's output for the next stage."""

    passage: Passage

    def __call__(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self.passage.sent = _pick_hidden(output)


@dataclass(frozen=True)
class _Received:
    """The ``forward`` of a module that only the first stage has: its result is not used.

    It has the shape of hidden states, so that the model can go on with it.
    """

    passage: Passage
    embeds: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.passage.given
        assert given is not None
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.shape == given.shape:
            return first
        # Not what was received: the model may change its embeddings in place.
        return torch.zeros_like(given) if self.embeds else given.new_zeros(())


def _return_input(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))
