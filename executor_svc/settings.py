"""All that can be set about an executor: each field is a flag, and an environment variable PAGED_EXECUTOR_<FIELD>."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from executor_svc.exposure import unguarded

_ENV_PREFIX = "PAGED_EXECUTOR_"
_MAX_IPC_PATH_BYTES = 107
SMALLEST_SIMULATED_VOCABULARY = 258  # 256 bytes, <s> and </s>


class ExecutorSettings(BaseSettings):
    """One executor process: where it listens, what it serves, what it lends."""

    model_config = SettingsConfigDict(
        env_prefix=_ENV_PREFIX,
        cli_prog_name="paged-executor",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="forbid",
        protected_namespaces=(),
    )

    endpoint: str = Field(
        "tcp://127.0.0.1:5555",
        description="ZeroMQ endpoint to listen on: tcp://HOST:PORT (port 0 or * takes a free one) or ipc://PATH.",
    )
    endpoint_file: Path | None = Field(
        None, description="File that the real endpoint is written to, at once and whole, when the executor is ready."
    )
    curve_key_file: Path | None = Field(
        None, description="File with the executor's own CURVE keys, secret and public; schedulers need the public one."
    )
    curve_allowed_keys: Path | None = Field(
        None, description="File with the public CURVE key of the only scheduler let in, or directory of such (*.key)."
    )
    ipc_mode: str = Field(
        "600", pattern="^[0-7]{3}$", description="Mode of an ipc endpoint's file, octal: who writes it may connect."
    )
    insecure: bool = Field(False, description="Listen beyond this machine without CURVE, to whoever comes.")
    model: str | None = Field(None, description="Model to serve: a directory, a hub id or a .gguf file.")
    served_name: str | None = Field(None, description="Name that clients know the model by; made from model if unset.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and KV memory; auto takes the one the model was saved in."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    cache_dir: Path = Field(
        Path("~/.cache/paged"),
        description="Directory for models converted from GGUF, tokenizers, compiled kernels and proofs of models.",
    )
    kept_proofs: bool = Field(
        True, description="On a CPU, start as a model was proved before, in cache-dir, rather than prove it again."
    )
    cpu_kernels: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "neon", "reference"] = Field(
        "auto",
        description="Instructions that a CPU's kernels use; auto takes the best it has, reference none but torch's.",
    )
    fused_modules: bool = Field(
        True, description="Compute the parts of a model that are understood by a CPU's kernels, in fewer passes."
    )
    int8_weights: bool = Field(
        False,
        description="Keep the weights of linear layers in 8 bits on a CPU: half the memory and faster, less exact.",
    )
    int8_kv: bool = Field(
        False,
        description="Keep keys and values in 8 bits on a CPU: about half the memory, so twice the tokens; less exact.",
    )

    cpu_threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Threads that a step runs on, on a CPU; as many as the process may use cores if unset.",
    )

    block_size: int = Field(16, ge=1, le=256, description="Tokens in a KV block: a power of two, 1 to 256.")
    num_blocks: int | None = Field(
        None,
        ge=2,
        le=1 << 24,
        description="KV blocks, one of them reserved; sized by memory (simulated: 4096) if unset.",
    )
    kv_memory: int | None = Field(
        None, ge=1, description="Bytes of KV memory, in each process; sized by what is free if unset."
    )
    memory_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that is filled, what other processes hold included; KV memory takes what "
        "weights and steps leave of it.",
    )
    cuda_graphs: bool = Field(True, description="Record decode steps as CUDA graphs.")
    max_rows: int = Field(256, ge=1, le=65536, description="Sequences that may run at once.")
    tokens_per_step: int = Field(1024, ge=2, le=1 << 20, description="Tokens that one step may compute.")
    plans_in_flight: int = Field(
        3,
        ge=1,
        le=16,
        description="Plans that a scheduler may send ahead of their results. It sends one fewer, but no fewer than "
        "two, while they come in time. A distant executor needs more.",
    )
    max_model_len: int | None = Field(
        None, ge=2, le=1 << 24, description="Tokens of prompt and output together; as the model allows if unset."
    )

    session_timeout_s: float = Field(
        5.0, gt=0, le=3600, description="Seconds of silence after which a scheduler's session ends."
    )
    recall_timeout_s: float = Field(
        3.0,
        gt=0,
        le=3600,
        description="Seconds, and some steps, that a scheduler has to return what others are to be lent; else its "
        "session ends.",
    )
    rank_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Seconds that processes started by torchrun wait for each other within a step before all end.",
    )
    step_timeout_s: float = Field(
        15.0,
        gt=0,
        le=86_400,
        description="Seconds after which a step that has not ended ends the process; slow models get longer.",
    )
    max_message_bytes: int = Field(
        64 << 20, ge=1 << 22, le=1 << 30, description="Bytes of the largest message that is received."
    )
    shutdown_grace_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds that schedulers have, when the executor is told to stop, to have their requests computed "
        "elsewhere or to end them.",
    )
    metrics_address: str | None = Field(
        None,
        pattern=r"^\S+:\d{1,5}$",
        description="Where Prometheus may read, over plain HTTP, as HOST:PORT; nowhere if unset.",
    )
    traces_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+/\S*$",
        description="URL of the OTLP/HTTP receiver that gets spans of the steps of requests that schedulers trace, "
        "such as http://HOST:4318/v1/traces; none are made if unset. Needs the extra tracing.",
    )
    exit_with_parent: bool = Field(False, description="Die when the process that started this one does (Linux).")

    record_dir: Path | None = Field(
        None,
        description="Directory that gets a file of the last steps after a fault, for `paged replay`; nothing is "
        "recorded if unset.",
    )
    record_token_ids: bool = Field(
        False, description="Keep token ids in these files: they hold prompts and answers then, and replay is exact."
    )
    record_max_bytes: int = Field(
        64 << 20, ge=1 << 20, le=1 << 32, description="Bytes of plans and results that are kept for such a file."
    )
    record_max_files: int = Field(8, ge=1, le=10_000, description="Newest files that are kept in record_dir.")

    simulate: bool = Field(False, description="Serve the simulated model: exact, and without any weights.")
    simulate_vocab_size: int = Field(
        32000, ge=SMALLEST_SIMULATED_VOCABULARY, le=1 << 20, description="Vocabulary of the simulated model, in ids."
    )
    simulate_max_model_len: int = Field(
        4096, ge=2, le=1 << 20, description="Length of the simulated model, in tokens of prompt and output together."
    )
    simulate_eos_id: int = Field(257, ge=0, description="End token of the simulated model.")
    simulate_fixed_us: float = Field(0.0, ge=0, le=60e6, description="Microseconds that each simulated step takes.")
    simulate_per_token_us: float = Field(
        0.0, ge=0, le=60e6, description="Microseconds more for each token that a step computes."
    )
    simulate_per_context_token_ns: float = Field(
        0.0, ge=0, le=1e9, description="Nanoseconds more for each token of context that a step's rows see."
    )
    simulate_script: Path | None = Field(
        None, description="JSON file of replies and faults; executor_svc/simulated/script.py has the format."
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe event logged.")
    log_format: Literal["console", "json"] = Field("console", description="Form of the log lines on stderr.")

    @field_validator("endpoint")
    @classmethod
    def _known_transport(cls, endpoint: str) -> str:
        kind, _, place = endpoint.partition("://")
        if kind not in ("tcp", "ipc") or not place:
            raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
        if kind == "ipc" and len(place.encode()) > _MAX_IPC_PATH_BYTES:
            raise ValueError(f"its path has {len(place.encode())} bytes; sockets have {_MAX_IPC_PATH_BYTES} at most")
        if kind == "tcp":
            port = place.rpartition(":")[2]
            if port != "*" and not (port.isdecimal() and int(port) < 1 << 16):
                raise ValueError("must end in a port: 0 to 65535, or *")
        return endpoint

    @model_validator(mode="after")
    def _fits_together(self) -> "ExecutorSettings":
        if self.tokens_per_step <= self.max_rows:
            raise ValueError(
                f"tokens_per_step {self.tokens_per_step} must exceed max_rows {self.max_rows}, "
                "or prompts wait while all rows decode; raise one or lower the other"
            )
        if problems := list(unguarded(self)):
            raise ValueError("; ".join(problems))
        if self.simulate == (self.model is not None):
            raise ValueError("give either --model or --simulate")
        if self.simulate and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size {self.block_size} must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256")
        if self.simulate and self.simulate_eos_id >= self.simulate_vocab_size:
            raise ValueError(
                f"simulate_eos_id {self.simulate_eos_id} must be below simulate_vocab_size {self.simulate_vocab_size}"
            )
        return self


def parse(arguments: Sequence[str]) -> ExecutorSettings:
    """Settings from flags first, then the environment, then defaults. Ends the process with code 2 on a bad value."""
    try:
        return ExecutorSettings(_cli_parse_args=list(arguments))  # type: ignore[call-arg]
    except ValidationError as error:
        refuse(*[_explain(dict(problem)) for problem in error.errors()])


def refuse(*problems: str) -> NoReturn:
    """Say what is wrong with the settings and end the process with code 2."""
    for problem in problems:
        print(f"paged-executor: {problem}", file=sys.stderr)
    sys.exit(2)


def _explain(problem: dict[str, object]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    location = problem["loc"]
    if not isinstance(location, tuple) or not location:
        return message
    name = str(location[0])
    flag, variable = "--" + name.replace("_", "-"), _ENV_PREFIX + name.upper()
    return f"{flag} (or {variable}) is {problem['input']!r}: {message}"
