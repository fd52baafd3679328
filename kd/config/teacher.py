"""The section ``teacher``: the model whose predictions the cache records."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kd.addresses import ModelSource
from kd.config.fields.contexts import read_context
from kd.config.section import AS_BYTES, Section

Bytes = Annotated[int, Field(ge=0, le=1 << 50), AS_BYTES]


#: Values of a field that mean that it is not used.
_UNSET = (None, "auto", "none")


class TeacherConfig(Section):
    """The model whose predictions are recorded."""

    backend: Literal["local", "http", "sglang"] = "local"
    """local = the model runs in the worker; http = an OpenAI-compatible server that returns
    prompt_logprobs (vLLM) runs it, for cache.profile topk, or threshold with proposal; sglang = a
    server of SGLang runs it, for topk or hidden."""

    model: str = Field(min_length=1)
    """Local folder, hub id or folder of a bucket (s3://bucket/name) of the teacher, a causal
    language model, or a model that also reads images or sound, whose language model is used. With
    another backend it is the model's name on the server."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    gguf_file: str | None = None
    """Name of a GGUF file in the model's folder from which to load the weights."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the teacher's weights. auto = float32 on a CPU and on GPUs before V100; on other
    GPUs the checkpoint's precision, with float16 instead of bfloat16 on V100 and T4, which have no
    bfloat16."""

    quantization: Literal["int8", "int4"] | None = None
    """Round the weights of the linear layers to int8 or int4 while they are loaded (pip install
    'potstill[quantization]'). Embeddings, LM head, norms and experts stay in dtype. A quantised
    teacher has a cache of its own. int4 computes in bfloat16, on a GPU of the Ampere generation or
    later. Layers whose input width 32 does not divide stay in bfloat16."""

    parallel: Literal["none", "device_map", "tensor", "fsdp"] = "none"
    """How a teacher that is too large for one device is spread. none = it is on one device.
    device_map = its layers are placed one after the other on the GPUs, then in the host's memory,
    then on the disk. tensor = each of resources.gpus processes holds a part of every matrix, as the
    model's tp_plan says. fsdp = each process holds a part of every layer, and gathers the layer
    that runs. It is part of the cache's identity."""

    gpu_memory: Bytes | None = None
    """Parallel device_map: the most bytes of weights on each GPU: a number, or text such as
    "60GiB". Leave room for activations and logits, and on the first GPU for the LM head. null = all
    free memory."""

    host_memory: Bytes | None = None
    """Parallel device_map: the most bytes of weights in the host's memory; the others are read from
    the disk in each forward pass. null = all free memory."""

    system: str = ""
    """System message that only the teacher reads, in chats (docs/how-to/teacher-context.md)."""

    context: str = ""
    """What the teacher reads in place of the prompt, or before a text: {column} is a column of the
    row, {prompt} the prompt. The student learns to answer without it. Empty = it reads what the
    student reads."""

    max_length: int | None = Field(None, ge=8, le=1_048_576)
    """With context or system: the most tokens of a sequence of the teacher's. A row that needs more
    is refused. null = twice data.sequence_length."""

    batch_size: int = Field(8, ge=1, le=4096)
    """Sequences per forward pass of the capture. It changes the speed and the memory, but not the
    cache, except for the rounding of the teacher's sums."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. The operator must allow it, too
    (KD_TRUST_REMOTE_CODE=1)."""

    url: str | None = Field(None, pattern=r"^https?://[^/?#@\s]+(/[^?#@\s]*)?$")
    """With a server: address of the server, without /v1/completions at its end."""

    tokenizer: str | None = Field(None, min_length=1)
    """With a server: local folder or hub id of the model's tokenizer. Profile hidden reads the LM
    head there, too. The server is compared with weights there if they are not too large and the
    folder has the name of teacher.model."""

    api_key_env: str | None = Field(None, pattern=r"^KD_TEACHER_KEY(_[A-Z0-9_]+)?$")
    """With a server: name of the worker's environment variable that holds the server's API key:
    KD_TEACHER_KEY, or a name that begins with KD_TEACHER_KEY_, so that a job cannot name another
    secret."""

    proposal: str | None = Field(None, min_length=1)
    """Backend http: local folder, hub id or folder of a bucket of a small model of the same
    tokenizer, for example the student. It reads the text here and proposes cache.k ids at each
    position, which the server scores (vLLM 0.33 or later): profile threshold is unbiased then."""

    concurrency: int = Field(8, ge=1, le=256)
    """With a server: requests that may run at the same time."""

    @property
    def is_local(self) -> bool:
        """Whether the model runs in the worker, and not behind a server."""
        return self.backend == "local"

    @property
    def proposer(self) -> TeacherConfig | None:
        """The section of the model that proposes ids, as if it were the teacher."""
        if self.proposal is None:
            return None
        code, size = self.trust_remote_code, self.batch_size
        return TeacherConfig(model=self.proposal, batch_size=size, trust_remote_code=code)

    @property
    def is_shared(self) -> bool:
        """Whether several processes, one on each device, hold parts of its weights."""
        return self.parallel in ("tensor", "fsdp")

    @property
    def has_context(self) -> bool:
        """Whether it reads something else than the student."""
        return bool(self.system or self.context)

    def count_read(self, sequence_length: int) -> int:
        """Count the most tokens that it reads at once, where the student reads so many."""
        return (self.max_length or 2 * sequence_length) if self.has_context else sequence_length

    @property
    def files(self) -> ModelSource:
        """Where the files that are read here come from: the model's, or a server's tokenizer's."""
        if self.tokenizer is not None:  # the weights stay on the server
            return ModelSource(
                self.tokenizer,
                self.revision,
                trust_remote_code=self.trust_remote_code,
                has_weights=False,
            )
        return ModelSource(self.model, self.revision, self.gguf_file, self.trust_remote_code)

    def compute_device_share(self, weights: int, devices: int) -> int:
        """Compute the bytes of ``weights`` that each of ``devices`` holds at least."""
        if self.parallel == "device_map":
            return 0  # what no device holds stays on the disk
        return weights // devices if self.is_shared else weights

    @field_validator("context")
    @classmethod
    def _context_can_be_filled(cls, context: str) -> str:
        read_context(context)
        return context

    @model_validator(mode="after")
    def _length_is_that_of_a_context(self) -> Self:
        if self.max_length is not None and not self.has_context:
            raise ValueError(
                "teacher.max_length is for a teacher with a context, but neither teacher.context "
                "nor teacher.system is set: data.sequence_length holds for both models"
            )
        return self

    @model_validator(mode="after")
    def _backend_has_its_fields(self) -> Self:
        if not self.is_local:
            if missing := [name for name in ("url", "tokenizer") if getattr(self, name) is None]:
                fields = " and ".join(f"teacher.{name}" for name in missing)
                raise ValueError(f"teacher.backend {self.backend} needs {fields}")
            # The server has loaded the model in its own way.
            strange = {"gguf_file", "dtype", "quantization", "parallel"}
            strange |= {"proposal"} if self.backend == "sglang" else set()
        else:
            strange = {"url", "tokenizer", "api_key_env", "proposal"}
        if unused := sorted(name for name in strange if getattr(self, name) not in _UNSET):
            raise ValueError(f"teacher.backend {self.backend} has no use for {', '.join(unused)}")
        return self

    @model_validator(mode="after")
    def _quantization_has_plain_weights(self) -> Self:
        if self.quantization is not None and self.gguf_file is not None:
            raise ValueError(
                "teacher.quantization rounds plain weights, but those in teacher.gguf_file are "
                "rounded already: leave one of the two out"
            )
        if self.quantization == "int4" and self.dtype not in ("auto", "bfloat16"):
            raise ValueError(
                f"teacher.quantization int4 computes in bfloat16, but teacher.dtype is {self.dtype}"
            )
        return self

    @model_validator(mode="after")
    def _parallel_has_plain_weights(self) -> Self:
        one_device = self.parallel == "none"
        strange = ("gpu_memory", "host_memory") if one_device else ("quantization", "gguf_file")
        given = [f"teacher.{name}" for name in strange if getattr(self, name) is not None]
        if given and one_device:
            detail = f"{given[0]} is for a teacher that is spread, but teacher.parallel is none"
            raise ValueError(detail)
        if given:
            raise ValueError(
                f"teacher.parallel {self.parallel} spreads plain weights: it cannot be combined "
                f"with {given[0]}; leave one of the two out"
            )
        return self
