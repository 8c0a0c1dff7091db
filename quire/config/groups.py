"""All settings, in frozen groups: each package receives only its own group.

A field's metadata holds the help text of its flag (quire/config/flags.py builds the flags) and the
flag itself if it differs from the field's name. Only single values are checked here; what depends
on the model or the machine is checked where those are known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.base.errors import SettingError
from quire.base.log_process import LogSettings


def setting(default: Any, text: str, *, flag: str | None = None) -> Any:
    """Return a field with a default, the help text of its flag, and the flag if not its name."""
    metadata = {"help": text} if flag is None else {"help": text, "flag": flag}
    return field(default=default, metadata=metadata)


# The lists below repeat names of packages that this package must not import.
# quire/program/kv_cache.py
KV_CACHE_DTYPES = ("auto", "f32", "bf16", "int8", "fp8")
# quire/scheduler/policy/policies.py
POLICIES = ("fcfs", "priority", "sjf", "fair", "edf")
# quire/output_parsers/registry.py
TOOL_PARSERS = (
    *("auto", "none", "hermes", "qwen3_coder", "glm", "llama3_json", "pythonic", "mistral"),
    *("deepseek", "kimi", "granite", "phi", "harmony", "json"),
)
REASONING_PARSERS = ("auto", "none", "think", "mistral", "seed", "kimi", "harmony")
# Each process holds a tokenizer in memory.
MAX_API_PROCESSES = 64
# Names that checkpoints and other engines use.
DTYPE_NAMES = {"float32": "f32", "bfloat16": "bf16"}
# quire/quant/scheme.py
QUANTIZATIONS = (
    *("auto", "none", "int8", "int4", "int4-g32", "int4-g64", "int4-g128"),
    *("int4-zp", "int4-g32-zp", "int4-g64-zp", "int4-g128-zp", "fp8", "fp8-block"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model and precision."""

    model: str = setting("", "directory of the model, or a GGUF file; empty: the built-in model")
    dtype: Literal["auto", "f32", "bf16", "float32", "bfloat16"] = setting(
        "auto", "dtype of weights and activations; auto: as the checkpoint (f16 becomes f32)"
    )
    quantization: str = setting(
        "auto",
        "quantize the weights of products while loading: int8, or int4 in groups of 32 (also plain "
        "int4), 64 or 128, with -zp zero points; on GPUs fp8 with a scale per row, or fp8-block; "
        "none: --dtype; auto: as in a quantized GGUF file or an fp8 checkpoint, else none",
    )
    head_precision: str = setting(
        "auto", "quantization of the output head (logits); auto: int8 if the rest is int4"
    )
    keep: tuple[str, ...] = setting(
        (),
        'override the precision of weights by name, as in "layers.0.*=none" (quire program prints '
        "the names); may be repeated, the last match applies",
    )
    max_model_len: int | None = setting(
        None, "maximum tokens of prompt and output together; default: limited by model and memory"
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "name of the model in the API; may be repeated: requests may use any, responses carry the "
        "first; default: the name of the directory or file",
    )
    chat_template: str | None = setting(
        None,
        "chat template that replaces the model's default: a file, or the name of another template "
        "of the model",
    )

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)  # one prompt token, one output token
        _one_of("dtype", self.dtype, ("auto", "f32", "bf16", *DTYPE_NAMES))
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        object.__setattr__(self, "keep", tuple(self.keep))  # a list if it was read from JSON
        object.__setattr__(self, "dtype", DTYPE_NAMES.get(self.dtype, self.dtype))
        names = self.served_model_name
        names = (names,) if isinstance(names, str) else tuple(names)
        object.__setattr__(self, "served_model_name", names)
        if "" in names:
            raise SettingError("served_model_name is empty; give a name or leave it out")
        if len(set(names)) < len(names):
            raise SettingError(f"served_model_name names {names} repeat one; give each once")
        if self.chat_template == "":
            raise SettingError("chat_template is empty; give a file or a name, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = setting(16, "tokens per KV block: 4, 8, or a multiple of 16 from 16 to 128")
    kv_cache_memory_bytes: int | None = setting(
        None,
        "memory of the KV cache, as in 2GiB; default: a share of the free memory",
        flag="kv-cache-memory",
    )
    kv_touch_ahead_bytes: int = setting(
        1024**3,
        "memory of unused KV blocks to fault in while the engine is idle, so that prompts do not "
        "wait for page faults, as in 2GiB; 0: fault in on first use",
        flag="kv-touch-ahead",
    )
    kv_cache_dtype: Literal["auto", "f32", "bf16", "int8", "fp8", "float32", "bfloat16"] = setting(
        "auto",
        "precision of keys and values; int8, and on GPUs fp8, have one scale per token and head; "
        "auto: as --dtype",
    )
    enable_prefix_caching: bool = setting(
        True,
        "keep the KV blocks of finished requests and reuse them for requests with the same prefix",
    )

    kv_tier_path: str | None = setting(
        None,
        "directory of the disk tier: evicted KV blocks stay findable there, also after a restart, "
        "and are fetched if that is faster than recomputing them; default: none",
    )
    kv_tier_bytes: int = setting(
        8 * 1024**3, "maximum size of the disk tier, as in 8GiB", flag="kv-tier-size"
    )
    kv_tier_host_bytes: int | None = setting(
        None,
        "host memory for KV blocks evicted from a GPU, instead of the disk tier, as in 64GiB; "
        "default: none",
        flag="kv-tier-host-size",
    )
    kv_tier_fetch: Literal["cost", "always", "never"] = setting(
        "cost",
        "when to fetch blocks from a tier: cost, if it is predicted to be faster than recomputing "
        "them; always; never, the tier is only filled",
    )

    def __post_init__(self) -> None:
        _at_least("kv_touch_ahead_bytes", self.kv_touch_ahead_bytes, 0)
        _at_least("kv_tier_bytes", self.kv_tier_bytes, 1)
        _one_of("kv_tier_fetch", self.kv_tier_fetch, ("cost", "always", "never"))
        if self.kv_tier_path == "":
            raise SettingError("kv_tier_path is empty; give a directory, or leave it out")
        if self.kv_tier_host_bytes is not None:
            _at_least("kv_tier_host_bytes", self.kv_tier_host_bytes, 1)
        given = "kv_tier_path" if self.kv_tier_path is not None else "kv_tier_host_bytes"
        if self.has_tier and not self.enable_prefix_caching:
            raise SettingError(
                f"{given} needs enable_prefix_caching, since blocks in a tier are found by their "
                "prefix; leave one of them out"
            )
        if self.kv_tier_path is not None and self.kv_tier_host_bytes is not None:
            raise SettingError(
                "kv_tier_path and kv_tier_host_bytes are both given, but only one tier is "
                "supported: leave one of them out (the disk tier survives a restart, host memory "
                "is faster)"
            )
        if self.block_size not in (4, 8, *range(16, 129, 16)):
            raise SettingError(
                f"block_size is {self.block_size}; allowed are 4, 8, and multiples of 16 from 16 "
                "to 128"
            )
        _one_of("kv_cache_dtype", self.kv_cache_dtype, (*KV_CACHE_DTYPES, *DTYPE_NAMES))
        own_name = DTYPE_NAMES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", own_name)
        if self.kv_cache_memory_bytes is not None:
            _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)

    @property
    def has_tier(self) -> bool:
        """Return whether evicted KV blocks are kept in a disk or host tier."""
        return self.kv_tier_path is not None or self.kv_tier_host_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduling and batching."""

    max_num_seqs: int = setting(64, "maximum number of requests in one step")
    max_num_batched_tokens: int | None = setting(
        None,
        "maximum number of tokens in one step; default: enough to saturate the kernels (256 with "
        "AMX, else 128), and at least two for each of --max-num-seqs",
    )
    plans_in_flight: int | None = setting(
        None,
        "step plans in flight: 1, or 2 to overlap scheduling with execution; default: 2 on a GPU, "
        "else 1",
    )
    max_queued_requests: int = setting(
        1024, "maximum number of waiting requests; further ones are rejected with 503"
    )
    max_queued_tokens: int = setting(
        0, "maximum prompt tokens of waiting requests; more are rejected with 503; 0: no limit"
    )
    tenants: str | None = setting(
        None,
        "file of tenants (.toml or .json) with their keys, weights, limits; see docs/tenants.md",
    )
    queue_timeout_s: float | None = setting(
        None,
        "seconds after which a request that has not started is rejected; default: no limit",
        flag="queue-timeout",
    )
    step_budget_ms: float = setting(
        0.0, "maximum predicted milliseconds of a step; 0: limited by max-num-batched-tokens only"
    )
    scheduling_policy: Literal["fcfs", "priority", "sjf", "fair", "edf"] = setting(
        "fcfs",
        "scheduling order: fcfs by arrival, priority by the requests' priority, sjf shortest job "
        "first, fair shares among tenants, edf earliest deadline first",
    )
    policy_aging: float = setting(
        1.0,
        "weight of waiting time against the policy's order: 1 normal, 2 double, 0 none (then "
        "preferred requests can starve others)",
    )

    tpot_target_ms: float = setting(
        0.0,
        "milliseconds between tokens up to which other requests' prefill may slow decoding; 0: as "
        "requests specify (tpot_slo_ms), and for long prompts about twice the undisturbed time",
    )
    long_prompt_tokens: int = setting(
        2048, "number of tokens from which a prompt counts as long; 0: no prompt does"
    )
    layered_prefill: bool = setting(
        True,
        "layered prefill: compute long prompts a few layers per step while other requests decode, "
        "if that is faster than small chunks and the executor supports it (native and reference)",
    )
    max_long_prompts: int = setting(
        0, "maximum number of running requests with long prompts; 0: no limit"
    )
    max_short_prompts: int = setting(0, "maximum number of other running requests; 0: no limit")

    def __post_init__(self) -> None:
        for name in (
            *("tpot_target_ms", "max_queued_tokens"),
            *("long_prompt_tokens", "max_long_prompts", "max_short_prompts"),
        ):
            _at_least(name, getattr(self, name), 0)
        _one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        _at_least("policy_aging", self.policy_aging, 0)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        if self.plans_in_flight is not None:
            _one_of("plans_in_flight", self.plans_in_flight, (1, 2))
        _at_least("max_queued_requests", self.max_queued_requests, 1)
        _at_least("step_budget_ms", self.step_budget_ms, 0)
        if self.queue_timeout_s is not None:
            _at_least("queue_timeout_s", self.queue_timeout_s, 0.001)
        if self.tenants == "":
            raise SettingError("tenants is empty; give a file, or leave it out")
        if self.max_num_batched_tokens is None:
            return
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"{self.max_num_seqs}: every running request takes a token per step; raise the "
                "former or lower the latter"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Execution."""

    executor: Literal["native", "reference", "torch"] = setting(
        "native",
        "native: compiled CPU kernels; reference: NumPy, slow and simple; torch: GPU kernels",
    )
    device: str | None = setting(
        None,
        "with --executor torch: auto (a GPU, else the CPU), cpu, cuda or cuda:N; default: auto",
    )
    numerics: Literal["exact", "fast"] | None = setting(
        None,
        "with --executor torch: exact, an answer does not depend on the batch; fast, products use "
        "the vendor's library and may differ in the last bits; default: exact",
    )
    enforce_eager: bool = setting(
        False,
        "with --executor torch: launch kernels one by one instead of replaying CUDA graphs: "
        "slower, but without the memory of the graphs",
    )
    num_threads: int | None = setting(
        None, "compute threads; default: the cores this process may use", flag="threads"
    )
    pack_cache: str | None = setting(
        None,
        "directory that caches the packed weights, in a file of their size which the next start "
        "maps; default: weights are packed at each start",
    )
    record_plans: str | None = setting(
        None, "record every step's plan and result in this file, for replay"
    )

    def __post_init__(self) -> None:
        _one_of("executor", self.executor, ("native", "reference", "torch"))
        self._check_device()
        if self.num_threads is not None:
            _at_least("num_threads", self.num_threads, 1)
            if self.num_threads > 1024:
                raise SettingError(f"num_threads is {self.num_threads}; at most 1024 are allowed")
        if self.pack_cache == "":
            raise SettingError("pack_cache is empty; give a directory, or leave it out")

    def _check_device(self) -> None:
        for name, unset in (("device", None), ("numerics", None), ("enforce_eager", False)):
            if getattr(self, name) != unset and self.executor != "torch":
                raise SettingError(
                    f"{name} is {getattr(self, name)} and executor is {self.executor}: only the "
                    "torch executor supports it; give --executor torch, or leave it out"
                )
        if self.device is not None and not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", self.device):
            raise SettingError(
                f"device is {self.device!r}; auto, cpu, cuda and cuda:N (as in cuda:0) are allowed"
            )
        if self.numerics is not None:
            _one_of("numerics", self.numerics, ("exact", "fast"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """HTTP server."""

    host: str = setting(
        "127.0.0.1", "address to listen on; anything but loopback requires --api-key"
    )
    port: int = setting(8000, "port to listen on; 0 takes a free one and prints it")
    api_key: tuple[str, ...] = setting(
        (), "API key; may be repeated; default: QUIRE_API_KEY of the environment"
    )
    api_processes: int = setting(
        1, "API processes (HTTP, chat templates, tokenization) of the one engine: 1 to 64"
    )
    share_prefixes: bool = setting(
        False,
        "share cached prefixes between tenants and keys: faster for common prefixes, but response "
        "times then reveal which prompts others have sent",
    )
    insecure: bool = setting(False, "allow listening beyond loopback without an API key")
    uds: str | None = setting(
        None, "listen on a Unix socket at this path, instead of an address and a port"
    )
    root_path: str = setting("", "path prefix under which a proxy serves this server, as in /llm")
    cors_origin: tuple[str, ...] = setting(
        (),
        "allow browser pages of this origin (as in https://app.example), or of any (*); may be "
        "repeated; default: the server's own origin only",
    )
    admin_port: int | None = setting(
        None,
        "serve the admin routes only at this port of 127.0.0.1; 0 takes a free one; default: at "
        "the main port, for local clients or with an admin key",
    )
    admin_key_file: str | None = setting(
        None, "file of admin keys, one per line; with it an --api-key grants no admin access"
    )
    access_log: Literal["text", "json", "off"] = setting(
        "text", "log one line per request: in the log format, with all lines as JSON, or none"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "minimum severity of log lines, for all processes"
    )
    log_format: Literal["text", "json"] | None = setting(
        None,
        "format of all log lines, including those of libraries and tracebacks; default: json with "
        "--access-log json, else text",
    )
    tls_cert: str | None = setting(None, "PEM file with the certificate chain; enables HTTPS")
    tls_key: str | None = setting(
        None, "PEM file with the certificate's private key; default: the file of --tls-cert"
    )
    max_output_tokens: int | None = setting(
        None,
        "maximum output tokens a request may ask for; also limits requests without max_tokens",
    )
    unknown_fields: Literal["refuse", "warn"] = setting(
        "refuse", "how to handle unknown request fields: reject the request, or warn"
    )
    tool_call_parser: str = setting(
        "auto",
        "format of tool calls: auto, by the chat template; none, calls stay text; "
        "hermes, qwen3_coder, glm, llama3_json, pythonic, mistral, deepseek, kimi, granite, phi, "
        "harmony, json",
    )
    reasoning_parser: str = setting(
        "auto",
        "format of reasoning: auto, by the chat template; none, reasoning stays text; "
        "think, mistral, seed, kimi, harmony",
    )
    trust_request_chat_template: bool = setting(
        False, "run chat templates from requests, which are programs from untrusted clients"
    )
    grace_s: float = setting(
        30.0, "seconds for running requests to finish after SIGTERM", flag="grace-seconds"
    )
    request_timeout_s: float | None = setting(
        None, "time limit of a request in seconds; default: none", flag="request-timeout"
    )
    heartbeat_s: float = setting(
        15.0,
        "seconds without output after which a stream sends a comment, so that proxies and clients "
        "keep it open; 0: none",
        flag="heartbeat-seconds",
    )
    keep_alive_s: float = setting(
        75.0,
        "seconds that an idle connection is kept open for the next request; closed earlier if file "
        "descriptors run short",
        flag="keep-alive-seconds",
    )
    stall_s: float = setting(
        30.0,
        "seconds after which a stream is cancelled if its client reads nothing",
        flag="stall-seconds",
    )
    resume_s: float = setting(
        60.0,
        "seconds that a resumable stream waits for a disconnected client, and is kept after its "
        "end",
        flag="resume-seconds",
    )
    resume_memory_bytes: int = setting(
        64 * 1024 * 1024,
        "memory for resumable streams, 1MiB each; 0: streams are not resumable",
        flag="resume-memory",
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "largest request body, as in 8MiB", flag="max-body"
    )
    watchdog_s: float = setting(
        60.0,
        "seconds without progress, with work pending, after which /health reports failure",
        flag="watchdog-seconds",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingError(f"port is {self.port}; 0 to 65535 is allowed")
        if self.admin_port is not None and not 0 <= self.admin_port <= 65535:
            raise SettingError(f"admin_port is {self.admin_port}; 0 to 65535 is allowed")
        if not 1 <= self.api_processes <= MAX_API_PROCESSES:
            raise SettingError(
                f"api_processes is {self.api_processes}; 1 to {MAX_API_PROCESSES} are allowed "
                "(more than the number of cores have no benefit)"
            )
        if self.uds == "":
            raise SettingError("uds is empty; give the path of a socket, or leave it out")
        _check_root_path(self.root_path)
        for origin in self.cors_origin:
            _check_origin(origin)
        _one_of("access_log", self.access_log, ("text", "json", "off"))
        _one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        if self.log_format is not None:
            _one_of("log_format", self.log_format, ("text", "json"))
        if self.log_format == "text" and self.access_log == "json":
            raise SettingError(
                "log_format is 'text' and access_log is 'json', but one log has one format; leave "
                "one of them out"
            )
        if any(not key.strip() for key in self.api_key):
            raise SettingError(
                "an API key is empty (--api-key, QUIRE_API_KEY); give a key, or leave it out"
            )
        if self.tls_key is not None and self.tls_cert is None:
            raise SettingError("tls_key is given without tls_cert; give the certificate too")
        if self.max_output_tokens is not None:
            _at_least("max_output_tokens", self.max_output_tokens, 1)
        _one_of("unknown_fields", self.unknown_fields, ("refuse", "warn"))
        _one_of("tool_call_parser", self.tool_call_parser, TOOL_PARSERS)
        _one_of("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        _at_least("grace_s", self.grace_s, 0)
        if self.request_timeout_s is not None:
            _at_least("request_timeout_s", self.request_timeout_s, 0.001)
        _at_least("heartbeat_s", self.heartbeat_s, 0)
        _at_least("keep_alive_s", self.keep_alive_s, 0)
        _at_least("stall_s", self.stall_s, 0.01)
        _at_least("resume_s", self.resume_s, 0)
        _at_least("resume_memory_bytes", self.resume_memory_bytes, 0)
        _at_least("max_body_bytes", self.max_body_bytes, 1024)
        _at_least("watchdog_s", self.watchdog_s, 0.001)

    @property
    def logging(self) -> LogSettings:
        """Return the log settings of the server's processes."""
        form = self.log_format or ("json" if self.access_log == "json" else "text")
        return LogSettings(level=self.log_level, form=form)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise SettingError(f"{name} is {value}; at least {low} is needed")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(map(str, allowed))
        raise SettingError(f"{name} is {value!r}; allowed: {listed}")


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def _check_origin(origin: str) -> None:
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise SettingError(
            f"cors_origin is {origin!r}; give scheme, host and port as browsers send them, as in "
            "https://app.example or http://localhost:3000 (lower case, no path, no trailing "
            "slash), or * for any"
        )


def _check_root_path(path: str) -> None:
    if path and not _PREFIX.fullmatch(path):
        raise SettingError(
            f"root_path is {path!r}; give a path such as /llm, with a leading slash and without a "
            "trailing one"
        )
    if path == "/v1":
        raise SettingError(
            "root_path is /v1, which is part of the routes themselves; give only the prefix before "
            "it, if any"
        )
