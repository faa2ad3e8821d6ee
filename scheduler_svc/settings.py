"""All settings of the scheduler, as flags (`--max-losses`) or variables (`PAGED_SCHEDULER_MAX_LOSSES`)."""

import re
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from scheduler_svc.core.tenants import TenantLimits, Tenants
from scheduler_svc.exposure import unguarded

ENV_PREFIX = "PAGED_SCHEDULER_"
EXIT_BAD_SETTING = 2
MAX_IPC_PATH_BYTES = 107  # of a Unix domain socket's address


def _listen_address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) <= 65535):
        raise ValueError("must be HOST:PORT with a port from 0 (any free one) to 65535, such as 127.0.0.1:50051")
    return value


def _endpoint(value: str) -> str:
    tcp = re.fullmatch(r"tcp://\S+:(\d{1,5})", value)
    ipc = re.fullmatch(r"ipc://(.+)", value)
    if tcp is not None and 1 <= int(tcp[1]) <= 65535:
        return value
    if ipc is None or len(ipc[1].encode()) > MAX_IPC_PATH_BYTES:
        raise ValueError(
            "must be tcp://HOST:PORT with a port from 1 to 65535, or ipc://PATH with a path of at most "
            f"{MAX_IPC_PATH_BYTES} bytes, such as tcp://127.0.0.1:5555"
        )
    return value


def _endpoints(value: str) -> str:
    endpoints = [_endpoint(endpoint.strip()) for endpoint in value.split(",")]
    return ",".join(dict.fromkeys(endpoints))


def _new_scheduler_id() -> str:
    return f"scheduler-{uuid.uuid4().hex[:12]}"


TenantName = Annotated[str, Field(max_length=128, pattern=r"^[ -~]*$")]  # as requests may have them
TenantWeight = Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class SchedulerSettings(BaseSettings):
    """Serves large language models over gRPC and drives an executor that holds the model."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        cli_prog_name="paged-scheduler",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        validate_default=False,
    )

    listen_address: Annotated[str, AfterValidator(_listen_address)] = Field(
        default="127.0.0.1:50051", description="Where gRPC calls are taken, as HOST:PORT; port 0 takes any free one."
    )
    address_file: Path | None = Field(
        default=None, description="File that gets the real listening address once calls are taken."
    )
    executor_endpoint: Annotated[str, AfterValidator(_endpoints)] = Field(
        default="tcp://127.0.0.1:5555",
        description="ZeroMQ endpoints of executors, with commas between; of a host name, all its addresses are taken.",
    )
    tls_certificate: Path | None = Field(
        default=None, description="PEM file of the server's certificate, and those between it and its CA's."
    )
    tls_private_key: Path | None = Field(default=None, description="PEM file of the certificate's private key.")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM file of the CA whose certificates clients must show; none is asked for if unset."
    )
    token_file: Path | None = Field(
        default=None,
        description="File of hashed bearer tokens, one of which each call must bring; see docs/security.md.",
    )
    reflection: bool = Field(default=True, description="Tell callers which services there are (gRPC reflection).")
    curve_key_file: Path | None = Field(
        default=None, description="File with this scheduler's own CURVE keys, secret and public, towards executors."
    )
    curve_executor_key: Path | None = Field(
        default=None, description="File with the executors' public CURVE key, the same for all of them."
    )
    insecure: bool = Field(
        default=False,
        description="Listen beyond this machine without TLS or to callers that nobody knows, or drive executors there "
        "without CURVE.",
    )
    resolve_s: PositiveSeconds = Field(
        default=2.0, description="Seconds between look-ups of the host names in executor_endpoint."
    )
    scheduler_id: str = Field(
        default_factory=_new_scheduler_id,
        min_length=1,
        max_length=128,
        description="Name towards the executor; a second scheduler of the same name ends the session of the first.",
    )
    cache_dir: Path = Field(
        default=Path("~/.cache/paged/tokenizers"),
        description="Directory that keeps the tokenizers that executors have sent.",
    )

    max_waiting_requests: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Sequences (samples of requests) that may wait for admission; more are RESOURCE_EXHAUSTED.",
    )
    max_wait_s: PositiveSeconds = Field(
        default=600.0,
        description="Seconds that a request may wait for admission; what is expected to wait longer is "
        "RESOURCE_EXHAUSTED at once, and what has, then.",
    )
    max_waiting_tokens: int = Field(
        default=4_194_304,
        ge=1,
        le=10**12,
        description="Tokens of requests that may wait for admission, some 40 bytes each; more are RESOURCE_EXHAUSTED.",
    )
    max_tenant_requests: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Requests of one tenant at once, waiting or running; more are RESOURCE_EXHAUSTED.",
    )
    max_tenant_waiting_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="Tokens of one tenant's requests that may wait for admission; more are RESOURCE_EXHAUSTED.",
    )
    max_waiting_grammars: int = Field(
        default=1024,
        ge=1,
        le=65_536,
        description="Grammars that may wait to be compiled, of all tenants; more are RESOURCE_EXHAUSTED.",
    )
    max_tenant_waiting_grammars: int = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Grammars of one tenant that may wait to be compiled; more are RESOURCE_EXHAUSTED.",
    )
    max_concurrent_calls: int = Field(
        default=8192,
        ge=1,
        le=1_000_000,
        description="gRPC calls at once, those of health apart; more are RESOURCE_EXHAUSTED.",
    )
    max_many_calls: int = Field(
        default=128,
        ge=1,
        le=1_000_000,
        description="Calls of GenerateMany at once, which count as their answers do, too; more are RESOURCE_EXHAUSTED.",
    )
    max_receive_s: PositiveSeconds = Field(
        default=30.0,
        description="Seconds that a call's request may take to arrive; what takes longer ends with DEADLINE_EXCEEDED.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of prompt and output together, where less than the model's own length.",
    )
    max_logprobs: int = Field(
        default=20, ge=0, le=1024, description="Most alternatives that a request may ask for per token."
    )
    max_samples: int = Field(default=128, ge=1, le=4096, description="Most samples (n) that a request may ask for.")
    max_grammar_s: PositiveSeconds = Field(
        default=2.0, description="Seconds of a CPU that compiling a request's grammar may take; one at a time is tried."
    )
    max_request_s: PositiveSeconds = Field(
        default=3600.0,
        description="Seconds after which a request ends with DEADLINE_EXCEEDED, whatever its own deadline.",
    )
    max_message_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=1024 * 1024,
        le=1024**3,
        description="Largest gRPC message taken or sent, in bytes.",
    )
    max_total_request_bytes: int = Field(
        default=1024**3,
        ge=1024 * 1024,
        le=1024**4,
        description="Bytes of the requests of all calls that are going on; more are RESOURCE_EXHAUSTED.",
    )
    max_unread_bytes: int = Field(
        default=4 * 1024 * 1024,
        ge=64 * 1024,
        le=1024**3,
        description="Bytes of a stream's answers that may wait for its reader; with more it is RESOURCE_EXHAUSTED.",
    )
    max_total_unread_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024 * 1024,
        le=1024**4,
        description="The same of all streams together; with more, the one that has most is RESOURCE_EXHAUSTED.",
    )

    executor_wait_s: PositiveSeconds = Field(
        default=30.0, description="Seconds that requests wait for a lost executor before they end with UNAVAILABLE."
    )
    new_request_wait_s: float | None = Field(
        default=None,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds without an executor after which new requests are UNAVAILABLE at once; 0: as soon as the "
        "last one is lost. Unset: executor_wait_s, which is also the most.",
    )
    result_timeout_s: PositiveSeconds = Field(
        default=10.0,
        description="Seconds without a result after which the executor counts as lost; slow models get longer.",
    )
    idle_plan_s: PositiveSeconds = Field(
        default=1.0, description="Seconds between the empty plans that an idle scheduler sends as a sign of life."
    )
    max_losses: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="Losses of the executor over a request computed alone, after which it fails.",
    )
    max_executor_losses: int = Field(
        default=20,
        ge=1,
        le=100_000,
        description="Losses of an executor within loss_window_s, after which it is not attached until there are fewer.",
    )
    loss_window_s: PositiveSeconds = Field(default=60.0, description="Seconds in which these losses are counted.")
    watermark: float = Field(
        default=0.05, ge=0, le=0.5, description="Share of the blocks that stays free when a new request is admitted."
    )
    ageing_tokens: int = Field(
        default=1_000_000,
        ge=1,
        le=10**15,
        description="Tokens served, by weight, after which a waiting request rises by one priority over new ones.",
    )
    tenant_weights: dict[TenantName, TenantWeight] = Field(
        default_factory=dict,
        max_length=65_536,
        description="Shares of tenants by name, as JSON or NAME=WEIGHT; those left out have 1.",
    )
    model_sampling: bool = Field(
        default=False,
        description="Take sampling parameters that a request leaves unset from the model's generation_config.json.",
    )
    vllm_model: str = Field(
        default="",
        max_length=128,
        description="Served name of the model that VllmEngine's calls are for; empty where there is only one.",
    )
    prefix_caching: bool = Field(default=True, description="Reuse the K/V of prompts that begin alike.")
    max_cache_watchers: int = Field(
        default=16, ge=1, le=1024, description="Callers of WatchPrefixCache at once; more are RESOURCE_EXHAUSTED."
    )
    max_cache_events: int = Field(
        default=65_536,
        ge=1,
        le=10**7,
        description="Events kept for a watcher of the prefix cache that is slow; after more it starts anew.",
    )

    metrics_address: Annotated[str, AfterValidator(_listen_address)] | None = Field(
        default=None, description="Where Prometheus may read, over plain HTTP, as HOST:PORT; nowhere if unset."
    )
    metrics_vllm_names: bool = Field(
        default=False, description="Tell metrics that mean the same under vLLM's names, too, for dashboards of vLLM."
    )
    traces_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+/\S*$",
        description="URL of the OTLP/HTTP receiver that gets spans of requests, such as http://HOST:4318/v1/traces; "
        "none are made if unset. Needs the extra tracing.",
    )
    traces_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the requests that are traced whose callers do not say whether they are.",
    )
    max_watchers: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Callers of Watch at once, pages of the block map among them; more are RESOURCE_EXHAUSTED.",
    )
    block_map_address: Annotated[str, AfterValidator(_listen_address)] | None = Field(
        default=None,
        description="Where the block map page is served over HTTP, as HOST:PORT; nowhere if unset.",
    )

    keepalive_s: PositiveSeconds = Field(
        default=30.0, description="Seconds between keepalive pings on a quiet connection."
    )
    max_connection_age_s: PositiveSeconds = Field(
        default=60.0,
        description="Seconds after which clients are asked to connect anew, which is when they find new schedulers.",
    )
    max_connection_age_grace_s: PositiveSeconds = Field(
        default=3600.0, description="Seconds that the calls of such a connection have to end."
    )
    shutdown_grace_s: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds that running calls have to end at shutdown.",
    )
    exit_with_parent: bool = Field(
        default=False, description="Die when the process that started this one does (Linux only)."
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe events logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="Form of log lines; auto is console on a terminal and json elsewhere."
    )

    @property
    def executor_endpoints(self) -> list[str]:
        return self.executor_endpoint.split(",")

    def model_post_init(self, context: object) -> None:
        self.cache_dir = self.cache_dir.expanduser()

    @model_validator(mode="after")
    def _is_guarded(self) -> "SchedulerSettings":
        if problems := list(unguarded(self)):
            raise ValueError("; ".join(problems))
        return self


def tenants_of(settings: SchedulerSettings) -> Tenants:
    """What tenants may have, as far as settings say."""
    default = TenantLimits(settings.max_tenant_requests, settings.max_tenant_waiting_tokens)
    stated = {name: replace(default, weight=weight) for name, weight in settings.tenant_weights.items()}
    return Tenants(stated, default)


def parse_settings(arguments: Sequence[str] | None = None) -> SchedulerSettings:
    """Settings from flags (default: those of this process), then environment, then defaults.

    Prints what is wrong with each bad one and exits with code 2; `--help` exits with 0.
    """
    flags = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return CliApp.run(SchedulerSettings, cli_args=flags)
    except ValidationError as error:
        print(_explain(error), file=sys.stderr)
        raise SystemExit(EXIT_BAD_SETTING) from None
    except SettingsError as error:  # the text of a table that is none: its field's name is in the sentence
        name = next((name for name in SchedulerSettings.model_fields if name in str(error)), "settings")
        found = f"{_flag(name)} (or {ENV_PREFIX}{name.upper()}): must be JSON, or NAME=VALUE pairs with commas between"
        print(f"paged-scheduler: {found}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_SETTING) from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:  # it is about several
            lines.append(f"paged-scheduler: {message}")
            continue
        name = str(problem["loc"][0])
        variable = f"{ENV_PREFIX}{name.upper()}"
        lines.append(f"paged-scheduler: {_flag(name)} (or {variable}): {message}; got {problem['input']!r}")
    return "\n".join(lines)
