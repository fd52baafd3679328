"""The weights of a server's model on this machine: a forward pass to compare with, and an LM head.

They are in the folder of ``teacher.tokenizer``, where somebody has put the whole model.

Shapes: N positions of a text, V vocabulary, D hidden width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import PurePath

import numpy as np
import torch
from torch import Tensor

from cache.errors import PotstillError
from cache.profiles.threshold import SCORED_TOP
from kd.capture.remote import TopEntries
from kd.models.attention.isolation import make_small
from kd.models.folder import ModelFolder
from kd.models.layers import compute_hidden_states, find_device
from kd.models.lm_head import LMHead, count_rows, find_lm_head, require_rows
from kd.models.loading import choose_teacher_dtype, load_teacher, outline_teacher
from kd.models.precision import pick_device
from kd.models.stored.tensors import read_head
from kd.models.teacher_files import TeacherFiles
from kd.progress import Monitor

#: The most bytes of weights that a CPU loads only to test a server. On a GPU they may take half of
#: what is free.
LARGEST = 4 << 30


@torch.no_grad()
def read_top_here(
    teacher: TeacherFiles, vocabulary: int, tokens: list[int], monitor: Monitor
) -> TopEntries | None:
    """Return the most probable tokens after all but the last of ``tokens``, by the weights here.

    None where the folder is not that of the server's model, by its name, or has no weights that
    this machine can load without effort; a warning says why they cannot be loaded.
    """
    device = pick_device()
    if not _holds_model(teacher, device):
        return None
    monitor.emit("stage", stage="precompute", phase=f"reading a text with {teacher.folder}")
    try:
        model = load_teacher(teacher, device)
        lm_head = find_lm_head(model, vocabulary)
        tokens_BL = torch.tensor([tokens[:-1]], device=find_device(model))
        return pick_top(lm_head, compute_hidden_states(model, tokens_BL)[0])
    except (PotstillError, MemoryError, torch.OutOfMemoryError) as error:
        message = f"the server was not compared with the weights in {teacher.folder}: {error}"
        monitor.emit("warning", message=message)
        return None


def _holds_model(teacher: TeacherFiles, device: torch.device) -> bool:
    """Whether the folder has the server's model, whose weights take no more than a test may."""
    section, folder = teacher.section, ModelFolder(teacher.folder)
    same = PurePath(section.model).name == PurePath(section.tokenizer or "").name
    if not same or not folder.has_config or folder.stored_quantization is not None:
        return False
    numbers = sum(map(math.prod, folder.read_text_shapes().values()))
    on_gpu = device.type == "cuda"
    most = torch.cuda.mem_get_info(device)[0] // 2 if on_gpu else LARGEST
    return 0 < numbers * choose_teacher_dtype(teacher, device).itemsize <= most


@torch.no_grad()
def pick_top(lm_head: LMHead, hidden_ND: Tensor) -> TopEntries:
    """Return the most probable tokens of hidden states; next tokens and the rest are left out."""
    logp_NV = lm_head.compute_logits(hidden_ND).log_softmax(1)
    best = logp_NV.topk(min(SCORED_TOP, lm_head.vocabulary))
    none = np.zeros(len(logp_NV), np.float32)
    ids, logprobs = (each.cpu().numpy() for each in (best.indices, best.values))
    return TopEntries(np.arange(len(none)), ids.astype(np.uint32), logprobs, none, none)


def read_lm_head(teacher: TeacherFiles, vocabulary: int, device: torch.device) -> LMHead:
    """Return the LM head in the folder of ``teacher.tokenizer``, in float32.

    Only its own tensors are read; scale and soft cap are those of a small model of its class.
    Raises the errors of ``read_head`` and ``find_lm_head``.
    """
    hollow = outline_teacher(teacher, torch.float32)
    require_rows(hollow, vocabulary)
    small = make_small(hollow)
    shown = hollow if small is None else small.eval()
    lm_head = find_lm_head(shown, count_rows(shown))
    weight, bias = read_head(hollow, ModelFolder(teacher.folder))
    weight = weight.to(device, torch.float32)
    bias = None if bias is None else bias.to(weight)
    return replace(lm_head, weight=weight, bias=bias, vocabulary=vocabulary)
