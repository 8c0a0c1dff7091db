"""What a user may set, in frozen groups: each part of the house receives its own group.

A field's metadata holds the help text its flag shows (quire/config/flags.py makes the flags) and,
where they differ from the field's name, the flag. Checks here are about single values; what
depends on the model or the machine is checked where those are known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.base.errors import SettingError
from quire.base.log_process import LogSettings


def setting(default: Any, text: str, *, flag: str | None = None) -> Any:
    """A field with a default, the help text of its flag, and the flag where it is not its name."""
    metadata = {"help": text} if flag is None else {"help": text, "flag": flag}
    return field(default=default, metadata=metadata)


# The names of quire/program/kv_cache.py, which a room of this row does not read.
KV_CACHE_DTYPES = ("auto", "f32", "bf16", "int8", "fp8")
# The names of quire/scheduler/policy/policies.py, which a room of this row does not read.
POLICIES = ("fcfs", "priority", "sjf", "fair", "edf")
# The names of quire/output_parsers/registry.py, which a room of this row does not read.
TOOL_PARSERS = (
    *("auto", "none", "hermes", "qwen3_coder", "glm", "llama3_json", "pythonic", "mistral"),
    *("deepseek", "kimi", "granite", "phi", "harmony", "json"),
)
REASONING_PARSERS = ("auto", "none", "think", "mistral", "seed", "kimi", "harmony")
# Each has a tokenizer of its own in memory.
MOST_API_PROCESSES = 64
# The names checkpoints and other engines use.
DTYPE_NAMES = {"float32": "f32", "bfloat16": "bf16"}
# The names of quire/quant/scheme.py, which a room of this row does not read.
QUANTIZATIONS = (
    *("auto", "none", "int8", "int4", "int4-g32", "int4-g64", "int4-g128"),
    *("int4-zp", "int4-g32-zp", "int4-g64-zp", "int4-g128-zp", "fp8", "fp8-block"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is computed."""

    model: str = setting("", "folder of the model, or a GGUF file; empty: the model in the box")
    dtype: Literal["auto", "f32", "bf16", "float32", "bfloat16"] = setting(
        "auto", "dtype of weights and products; auto: as the checkpoint (f16 becomes f32)"
    )
    quantization: str = setting(
        "auto",
        "precision the weights of products are brought to while they load: int8, or int4 in groups "
        "of 32 (also plain int4), 64 or 128, -zp with zero points; on GPUs fp8, a scale a row, or "
        "fp8-block; none: --dtype; auto: as a quantized GGUF file, or a checkpoint in fp8, has "
        "them, else none",
    )
    head_precision: str = setting(
        "auto", "the same for the product that gives the logits; auto: int8 where the rest is int4"
    )
    keep: tuple[str, ...] = setting(
        (),
        'another precision for weights by name, as in "layers.0.*=none" (quire program prints the '
        "names); may be repeated, the last that matches counts",
    )
    max_model_len: int | None = setting(
        None, "most tokens of prompt and output together; default: what model and memory allow"
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "name of the model in the API; may be repeated: requests may use any, answers carry the "
        "first; default: the folder's or file's name",
    )
    chat_template: str | None = setting(
        None,
        "chat template in place of the model's own: a file, or the name of another of the model's",
    )

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)  # a token in, a token out
        _one_of("dtype", self.dtype, ("auto", "f32", "bf16", *DTYPE_NAMES))
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        object.__setattr__(self, "keep", tuple(self.keep))  # a list, where it came as JSON
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

    block_size: int = setting(16, "tokens a KV block holds: a multiple of 16 from 16 to 128")
    kv_cache_memory_bytes: int | None = setting(
        None,
        "memory of the KV cache, as in 2GiB; default: a share of what the machine has free",
        flag="kv-cache-memory",
    )
    kv_touch_ahead_bytes: int = setting(
        1024**3,
        "memory of KV blocks not used yet that is asked of the system while there is nothing to "
        "do, so that prompts do not wait for it, as in 2GiB; 0: with first use",
        flag="kv-touch-ahead",
    )
    kv_cache_dtype: Literal["auto", "f32", "bf16", "int8", "fp8", "float32", "bfloat16"] = setting(
        "auto",
        "precision of keys and values; int8, and on GPUs fp8: a scale for each head's row; auto: "
        "as --dtype",
    )
    enable_prefix_caching: bool = setting(
        True, "keep the KV of finished requests and share it with requests that begin alike"
    )

    kv_tier_path: str | None = setting(
        None,
        "folder of one's own in which KV blocks that leave memory go on to be found, after a "
        "restart too, and are fetched where that is faster than computing them; default: none",
    )
    kv_tier_bytes: int = setting(
        8 * 1024**3, "most that folder may take, as in 8GiB", flag="kv-tier-size"
    )
    kv_tier_host_bytes: int | None = setting(
        None,
        "memory of the host, in place of a folder, in which KV blocks that leave a GPU's memory go "
        "on to be found, as in 64GiB; default: none",
        flag="kv-tier-host-size",
    )
    kv_tier_fetch: Literal["cost", "always", "never"] = setting(
        "cost",
        "when blocks are fetched from either: cost, where that is predicted to be faster than "
        "computing them; never: it is filled only",
    )

    def __post_init__(self) -> None:
        _at_least("kv_touch_ahead_bytes", self.kv_touch_ahead_bytes, 0)
        _at_least("kv_tier_bytes", self.kv_tier_bytes, 1)
        _one_of("kv_tier_fetch", self.kv_tier_fetch, ("cost", "always", "never"))
        if self.kv_tier_path == "":
            raise SettingError("kv_tier_path is empty; give a folder, or leave it out")
        if self.kv_tier_host_bytes is not None:
            _at_least("kv_tier_host_bytes", self.kv_tier_host_bytes, 1)
        given = "kv_tier_path" if self.kv_tier_path is not None else "kv_tier_host_bytes"
        if self.has_tier and not self.enable_prefix_caching:
            raise SettingError(
                f"{given} needs enable_prefix_caching: what a tier holds is found by its "
                "prefix; leave one of them out"
            )
        if self.kv_tier_path is not None and self.kv_tier_host_bytes is not None:
            raise SettingError(
                "kv_tier_path and kv_tier_host_bytes are both given; blocks go to one tier, and "
                "nothing carries them on from the host's memory to a folder: leave one of them out "
                "(the folder outlives a restart, the host's memory is faster)"
            )
        if self.block_size not in range(16, 129, 16):
            raise SettingError(
                f"block_size is {self.block_size}; a multiple of 16 from 16 to 128 is allowed"
            )
        _one_of("kv_cache_dtype", self.kv_cache_dtype, (*KV_CACHE_DTYPES, *DTYPE_NAMES))
        own_name = DTYPE_NAMES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", own_name)
        if self.kv_cache_memory_bytes is not None:
            _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)

    @property
    def has_tier(self) -> bool:
        """Whether KV blocks that leave memory go on to be found."""
        return self.kv_tier_path is not None or self.kv_tier_host_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much runs at once."""

    max_num_seqs: int = setting(64, "most requests computed in one step")
    max_num_batched_tokens: int | None = setting(
        None,
        "most tokens computed in one step; default: what fills the kernels and no more (256 with "
        "AMX, else 128), and two for each of --max-num-seqs",
    )
    plans_in_flight: int | None = setting(
        None,
        "plans handed out before the first one's result is back: 1, or 2 to overlap; default: 2 "
        "on a GPU, else 1",
    )
    max_queued_requests: int = setting(
        1024, "requests that may wait; further ones are refused with 503"
    )
    max_queued_tokens: int = setting(
        0, "prompt tokens that may wait; further requests are refused with 503; 0: any number"
    )
    tenants: str | None = setting(
        None,
        "file of tenants (.toml or .json): their keys, weights, limits; see docs/tenants.md",
    )
    queue_timeout_s: float | None = setting(
        None,
        "seconds a request may wait for its first step, then it is refused; default: no limit",
        flag="queue-timeout",
    )
    step_budget_ms: float = setting(
        0.0, "predicted milliseconds a step may take; 0: only max-num-batched-tokens limits it"
    )
    scheduling_policy: Literal["fcfs", "priority", "sjf", "fair", "edf"] = setting(
        "fcfs",
        "who is served first: fcfs by arrival, priority by the requests' priority, sjf the "
        "shortest job, fair tenants by turns, edf the earliest deadline",
    )
    policy_aging: float = setting(
        1.0,
        "how much waiting counts against what a policy favours: 1 as it is, 2 twice, 0 not at all "
        "(then favoured requests can starve others)",
    )

    tpot_target_ms: float = setting(
        0.0,
        "milliseconds between two tokens of an answer that others' prompts may stretch them to; 0: "
        "what requests ask (tpot_slo_ms), and for long prompts about twice what they take alone",
    )
    long_prompt_tokens: int = setting(
        2048, "from so many tokens on a prompt counts as long; 0: none does"
    )
    layered_prefill: bool = setting(
        True,
        "compute parts of long prompts some layers a step beside requests that make tokens, where "
        "that is faster than few tokens a step and the executor can (native and reference)",
    )
    max_long_prompts: int = setting(
        0, "requests with long prompts that may run at once; 0: any number"
    )
    max_short_prompts: int = setting(0, "other requests that may run at once; 0: any number")

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
                f"{self.max_num_seqs}: every running request takes a token a step; raise the "
                "former or lower the latter"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """What computes."""

    executor: Literal["native", "reference", "torch"] = setting(
        "native",
        "native: compiled kernels; reference: NumPy, slow and obvious; torch: a GPU's kernels",
    )
    device: str | None = setting(
        None,
        "with --executor torch: auto (a GPU, else the CPU), cpu, cuda or cuda:N; default: auto",
    )
    numerics: Literal["exact", "fast"] | None = setting(
        None,
        "with --executor torch: exact, a request's answer is what it is alone; fast, products by "
        "the vendor's library, which may differ in last bits; default: exact",
    )
    enforce_eager: bool = setting(
        False,
        "with --executor torch: launch a GPU's steps kernel by kernel, in place of replaying them "
        "from CUDA graphs: slower, and none of their memory is taken",
    )
    num_threads: int | None = setting(
        None, "threads that compute; default: the cores this process may use", flag="threads"
    )
    pack_cache: str | None = setting(
        None,
        "folder in which weights are kept as the kernels want them, in a file as large as they "
        "are: the next start maps it; default: packed at each start",
    )
    record_plans: str | None = setting(
        None, "write every step's plan and result to this file, to be replayed later"
    )

    def __post_init__(self) -> None:
        _one_of("executor", self.executor, ("native", "reference", "torch"))
        self._check_device()
        if self.num_threads is not None:
            _at_least("num_threads", self.num_threads, 1)
            if self.num_threads > 1024:
                raise SettingError(f"num_threads is {self.num_threads}; at most 1024 are allowed")
        if self.pack_cache == "":
            raise SettingError("pack_cache is empty; give a folder, or leave it out")

    def _check_device(self) -> None:
        for name, unset in (("device", None), ("numerics", None), ("enforce_eager", False)):
            if getattr(self, name) != unset and self.executor != "torch":
                raise SettingError(
                    f"{name} is {getattr(self, name)} and executor is {self.executor}: only torch "
                    "has a choice there; give --executor torch, or leave it out"
                )
        if self.device is not None and not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", self.device):
            raise SettingError(
                f"device is {self.device!r}; auto, cpu, cuda and cuda:N (as in cuda:0) are allowed"
            )
        if self.numerics is not None:
            _one_of("numerics", self.numerics, ("exact", "fast"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP edge."""

    host: str = setting("127.0.0.1", "address to listen on; beyond loopback needs --api-key")
    port: int = setting(8000, "port to listen on; 0 takes a free one and prints it")
    api_key: tuple[str, ...] = setting(
        (), "a key callers must show; may be repeated; default: QUIRE_API_KEY of the environment"
    )
    api_processes: int = setting(
        1, "processes that speak HTTP, template and tokenize, before the one engine: 1 to 64"
    )
    share_prefixes: bool = setting(
        False,
        "let tenants and keys share cached prefixes: faster where prompts begin alike, but each "
        "can find out what others have sent",
    )
    insecure: bool = setting(False, "listen beyond loopback without a key")
    uds: str | None = setting(
        None, "listen on a Unix socket at this path, in place of an address and a port"
    )
    root_path: str = setting(
        "", "what stands before every path where a proxy serves us below one, as in /llm"
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "let pages of this origin (as in https://app.example) ask, or of any (*); may be repeated; "
        "default: none but our own",
    )
    admin_port: int | None = setting(
        None,
        "serve the admin routes at this port of 127.0.0.1, and there only; 0 takes a free one; "
        "default: among the others, to this machine or an admin's key",
    )
    admin_key_file: str | None = setting(
        None, "file of keys, one a line, that open the admin routes; no --api-key then does"
    )
    access_log: Literal["text", "json", "off"] = setting(
        "text", "a line for each answered request: as other log lines, all lines as JSON, or none"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least severe log lines that are written, of all processes"
    )
    log_format: Literal["text", "json"] | None = setting(
        None,
        "form of all log lines, those of libraries and tracebacks too; default: json with "
        "--access-log json, else text",
    )
    tls_cert: str | None = setting(
        None, "PEM file with the certificate, and those between it and its root: speak HTTPS"
    )
    tls_key: str | None = setting(
        None, "PEM file with the certificate's private key; default: it is in the same file"
    )
    max_output_tokens: int | None = setting(
        None,
        "most output tokens a request may ask for; what it gets where it names none is cut to it",
    )
    unknown_fields: Literal["refuse", "warn"] = setting(
        "refuse", "what to do with request fields that are not known"
    )
    tool_call_parser: str = setting(
        "auto",
        "how the model writes tool calls: auto, as its chat template shows; none, calls stay text; "
        "hermes, qwen3_coder, glm, llama3_json, pythonic, mistral, deepseek, kimi, granite, phi, "
        "harmony, json",
    )
    reasoning_parser: str = setting(
        "auto",
        "how it marks reasoning: auto, as its chat template shows; none, reasoning stays text; "
        "think, mistral, seed, kimi, harmony",
    )
    trust_request_chat_template: bool = setting(
        False, "run chat templates that requests bring along: programs by whoever asks"
    )
    grace_s: float = setting(
        30.0, "seconds that running requests get to finish on SIGTERM", flag="grace-seconds"
    )
    request_timeout_s: float | None = setting(
        None, "seconds after which a request is ended; default: never", flag="request-timeout"
    )
    heartbeat_s: float = setting(
        15.0,
        "seconds of silence after which a stream gets a comment, so that nobody takes it for dead; "
        "0: none",
        flag="heartbeat-seconds",
    )
    keep_alive_s: float = setting(
        75.0,
        "seconds that an idle connection is kept open for the client's next request; sooner closed "
        "where descriptors run short",
        flag="keep-alive-seconds",
    )
    stall_s: float = setting(
        30.0,
        "seconds after which a stream whose reader takes nothing is cut, its request with it",
        flag="stall-seconds",
    )
    resume_s: float = setting(
        60.0,
        "seconds that a resumable stream waits for a reader that broke off, and is kept after its "
        "end",
        flag="resume-seconds",
    )
    resume_memory_bytes: int = setting(
        64 * 1024 * 1024,
        "memory for resumable streams, 1MiB each; 0: none is resumable",
        flag="resume-memory",
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "largest request body, as in 8MiB", flag="max-body"
    )
    watchdog_s: float = setting(
        60.0,
        "seconds without progress while work is pending after which /health says no",
        flag="watchdog-seconds",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingError(f"port is {self.port}; 0 to 65535 is allowed")
        if self.admin_port is not None and not 0 <= self.admin_port <= 65535:
            raise SettingError(f"admin_port is {self.admin_port}; 0 to 65535 is allowed")
        if not 1 <= self.api_processes <= MOST_API_PROCESSES:
            raise SettingError(
                f"api_processes is {self.api_processes}; 1 to {MOST_API_PROCESSES} are allowed "
                "(more than there are cores bring nothing)"
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
                "log_format is 'text' and access_log is 'json': one log would have two forms; "
                "leave one of them out"
            )
        if any(not key.strip() for key in self.api_key):
            raise SettingError(
                "an API key is empty (--api-key, QUIRE_API_KEY); give one that is not, or none"
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
        """How the server's processes log."""
        form = self.log_format or ("json" if self.access_log == "json" else "text")
        return LogSettings(level=self.log_level, form=form)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All an engine is made from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise SettingError(f"{name} is {value}; at least {least} is needed")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(map(str, allowed))
        raise SettingError(f"{name} is {value!r}; allowed: {listed}")


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def _check_origin(origin: str) -> None:
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise SettingError(
            f"cors_origin is {origin!r}; scheme, host and port as browsers send them are allowed, "
            "as in https://app.example or http://localhost:3000 (small letters, no path, no slash "
            "at the end), or * for any"
        )


def _check_root_path(path: str) -> None:
    if path and not _PREFIX.fullmatch(path):
        raise SettingError(
            f"root_path is {path!r}; a path as in /llm is allowed, with a slash at its beginning "
            "and none at its end"
        )
    if path == "/v1":
        raise SettingError(
            "root_path is /v1, with which our own paths begin; give what stands before it, if "
            "anything does"
        )
