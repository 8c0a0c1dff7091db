"""The settings of an engine, in frozen groups: each package receives only its own group.

A field's metadata holds the help text of its flag (quire/config/flags.py builds the flags) and the
flag itself if it differs from the field's name. Only single values are checked here; what depends
on the model or the machine is checked where those are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

from quire.base.errors import SettingError
from quire.config.executor_config import ExecutorConfig
from quire.config.kv_events import read_kv_events
from quire.config.kv_store import KVStoreConfig
from quire.config.proposer_kinds import LOOKUPS, any_of
from quire.config.settings import at_least, at_most, check_dimensions, one_of, setting
from quire.config.speculation import SpeculationConfig
from quire.config.transfer import TransferConfig

# The lists below repeat names of packages that this package must not import.
# quire/program/kv_cache.py
KV_CACHE_DTYPES = ("auto", "f32", "bf16", "int8", "fp8")
# quire/program/declarations.py: tokens of a piece of the KV cache
PIECE_TOKENS = 256
# The default size of the disk tier.
KV_TIER_BYTES = 8 * 1024**3
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

    model: str = setting(
        "",
        "directory of the model, a GGUF file, or ORG/NAME of a model in the Hugging Face cache; "
        "empty: the built-in model",
    )
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
    convert: Literal["auto", "embed", "none"] = setting(
        "auto",
        "what makes embeddings: auto, the model's own sentence-transformers files; embed, also "
        "without them, by the last token's hidden row, normalized; none, no embeddings",
    )
    matryoshka_dimensions: str | None = setting(
        None,
        "sizes of shortened embeddings that requests may ask for: any, or a list such as 256,512; "
        "default: those of the model's config.json",
    )
    chat_template: str | None = setting(
        None,
        "chat template that replaces the model's default: a file, or the name of another template "
        "of the model",
    )

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 2)  # one prompt token, one output token
        one_of("dtype", self.dtype, ("auto", "f32", "bf16", *DTYPE_NAMES))
        one_of("quantization", self.quantization, QUANTIZATIONS)
        one_of("convert", self.convert, ("auto", "embed", "none"))
        if self.matryoshka_dimensions is not None:
            check_dimensions("matryoshka_dimensions", self.matryoshka_dimensions)
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
    """KV cache."""

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

    cache_pin_share: float = setting(
        0.25,
        "share of the KV cache that the prefixes a tenant marks with cache_control (Anthropic's "
        "API) may pin for their lifetime; they are evicted last; 0: none",
    )
    kv_tier_path: str | None = setting(
        None,
        "directory of the disk tier: evicted KV blocks stay findable there, also after a restart, "
        "and are fetched if that is faster than recomputing them; default: none",
        section="KV tiers and events",
    )
    kv_tier_bytes: int = setting(
        KV_TIER_BYTES, "maximum size of the disk tier, as in 8GiB", flag="kv-tier-size"
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
    kv_events_config: str | None = setting(
        None,
        "publish which KV blocks become findable, and which no more, over ZeroMQ: a JSON object "
        'with vLLM\'s fields, as in \'{"enable_kv_cache_events": true, "endpoint": '
        '"tcp://127.0.0.1:5557"}\'; events hold prompt tokens; default: none',
    )

    def __post_init__(self) -> None:
        at_least("cache_pin_share", self.cache_pin_share, 0)
        at_most("cache_pin_share", self.cache_pin_share, 1, "the whole KV cache")
        at_least("kv_touch_ahead_bytes", self.kv_touch_ahead_bytes, 0)
        at_least("kv_tier_bytes", self.kv_tier_bytes, 1)
        one_of("kv_tier_fetch", self.kv_tier_fetch, ("cost", "always", "never"))
        if self.kv_tier_path == "":
            raise SettingError("kv_tier_path is empty; give a directory, or leave it out")
        if self.kv_tier_host_bytes is not None:
            at_least("kv_tier_host_bytes", self.kv_tier_host_bytes, 1)
        if self.kv_tier_path is None and self.kv_tier_bytes != KV_TIER_BYTES:
            raise SettingError(
                "kv_tier_bytes is the size of the disk tier, and no disk tier is given; add "
                "kv_tier_path with its directory, or leave it out (the size of a host tier is "
                "kv_tier_host_bytes)"
            )
        if self.kv_tier_fetch != "cost" and not self.has_tier:
            raise SettingError(
                f"kv_tier_fetch is {self.kv_tier_fetch}, and there is no tier to fetch blocks "
                "from; add kv_tier_path or kv_tier_host_bytes, or leave it out"
            )
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
        if self.kv_events_config is not None:
            events = read_kv_events(self.kv_events_config)
            if events.is_on and not self.enable_prefix_caching:
                raise SettingError(
                    "kv_events_config needs enable_prefix_caching, since events report what a "
                    "prefix finds; leave one of them out"
                )
        if self.block_size not in (4, 8, *range(16, 129, 16)):
            raise SettingError(
                f"block_size is {self.block_size}; allowed are 4, 8, and multiples of 16 from 16 "
                "to 128"
            )
        one_of("kv_cache_dtype", self.kv_cache_dtype, (*KV_CACHE_DTYPES, *DTYPE_NAMES))
        own_name = DTYPE_NAMES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", own_name)
        if self.kv_cache_memory_bytes is not None:
            at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)

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
    timeline_steps: int = setting(
        65_536,
        "number of last steps for which timelines of requests are kept (quire why), fewer if they "
        "take more than 256 bytes each (many prompts or drafts), at most 8388608; 0: no timelines",
    )

    def __post_init__(self) -> None:
        for name in (
            *("tpot_target_ms", "max_queued_tokens", "timeline_steps"),
            *("long_prompt_tokens", "max_long_prompts", "max_short_prompts"),
        ):
            at_least(name, getattr(self, name), 0)
        at_most("timeline_steps", self.timeline_steps, 1 << 23, "up to 256 bytes each: 2 GiB")
        one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        at_least("policy_aging", self.policy_aging, 0)
        at_least("max_num_seqs", self.max_num_seqs, 1)
        if self.plans_in_flight is not None:
            one_of("plans_in_flight", self.plans_in_flight, (1, 2))
        at_least("max_queued_requests", self.max_queued_requests, 1)
        at_least("step_budget_ms", self.step_budget_ms, 0)
        if self.queue_timeout_s is not None:
            at_least("queue_timeout_s", self.queue_timeout_s, 0.001)
        if self.tenants == "":
            raise SettingError("tenants is empty; give a file, or leave it out")
        if self.max_num_batched_tokens is None:
            return
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"{self.max_num_seqs}: every running request takes a token per step; raise the "
                "former or lower the latter"
            )


# As in quire/scheduler/policy/policies.py, in that order.
SCHEDULING_POLICIES: tuple[str, ...] = get_args(
    get_type_hints(SchedulerConfig)["scheduling_policy"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    kv_store: KVStoreConfig = field(default_factory=KVStoreConfig)

    def __post_init__(self) -> None:
        if self.transfer.is_on:
            self._check_transfer()
        if self.kv_store.is_on:
            self._check_store()
        if self.executor.num_ranks > 1:
            self._check_ranks()
        if self.executor.data_parallel_size > 1:
            self._check_engines()
        if self.executor.offloads and self.speculation.proposer == "self":
            self._refuse_first_layers()
        if self.executor.trace_file is not None and not self.scheduler.timeline_steps:
            raise SettingError(
                "trace_file is written from the steps kept for timelines, and timeline_steps is 0; "
                "leave one of them out"
            )

    @property
    def kv_block_tokens(self) -> int:
        """Tokens of a block that the KV cache allocates: under context parallelism a piece on each
        rank, which keeps it in blocks of block_size."""
        ranks = self.executor.context_parallel_size
        return self.cache.block_size if ranks == 1 else ranks * PIECE_TOKENS

    @property
    def host_block_bytes(self) -> dict[str, int]:
        """Host memory for KV blocks outside the pool, by the setting that gives it."""
        tier_bytes = self.cache.kv_tier_host_bytes
        found = {} if tier_bytes is None else {"kv_tier_host_bytes": tier_bytes}
        if self.transfer.is_on:
            found["kv_transfer_bytes"] = self.transfer.kv_transfer_bytes
        if self.kv_store.is_on:
            found["kv_store_buffer_bytes"] = self.kv_store.kv_store_buffer_bytes
        return found

    def check_one_engine(self) -> None:
        """Raise SettingError where several engines are asked for and one can be had."""
        if self.executor.data_parallel_size > 1:
            raise SettingError(
                f"data_parallel_size is {self.executor.data_parallel_size}, and only quire serve "
                "starts several engines; leave it out"
            )

    def _check_engines(self) -> None:
        """Raise SettingError for what engines of one server cannot have each."""
        executor = self.executor
        given = f"data_parallel_size is {executor.data_parallel_size}"
        if executor.distributed_executor_backend == "external_launcher":
            raise SettingError(
                f"{given} and distributed_executor_backend is external_launcher, but a launch has "
                "the ranks of one engine: take mp or ray, or start a server for each engine, with "
                "a launch, a MASTER_PORT and a port of its own, and quire route before them"
            )
        for what, is_given, reason in (
            (
                "disk_offload_gb is given",
                executor.disk_offload_gb is not None,
                "each engine would read all weights from the one disk in each step",
            ),
            (
                "kv_transfer_key_file is given",
                self.transfer.is_on,
                "an exchange of KV blocks is with one engine",
            ),
        ):
            if is_given:
                raise SettingError(
                    f"{given} and {what}, but {reason}: leave one of them out, or start several "
                    "servers behind quire route"
                )

    def _check_transfer(self) -> None:
        """Raise SettingError for what an exchange of KV blocks does not support yet."""
        given = "kv_transfer_key_file is given"
        if not self.cache.enable_prefix_caching:
            raise SettingError(
                f"{given} and enable_prefix_caching is false, but blocks from other engines are "
                "found by their prefix; leave one of them out"
            )

    def _check_store(self) -> None:
        """Raise SettingError for what a shared KV store does not support yet."""
        given, cache = "kv_store is given", self.cache
        for is_given, what, reason, advice in (
            (
                not cache.enable_prefix_caching,
                "enable_prefix_caching is false",
                "blocks in a store are found by their prefix",
                "leave one of them out",
            ),
            (
                cache.kv_tier_fetch != "cost",
                f"kv_tier_fetch is {cache.kv_tier_fetch}",
                "kv_store_fetch decides for the disk tier too",
                "set that, and leave kv_tier_fetch out",
            ),
            (
                self.kv_store.kv_store_encoding == "int8"
                and cache.kv_cache_dtype not in ("auto", "bf16"),
                f"kv_store_encoding is int8 and kv_cache_dtype is {cache.kv_cache_dtype}",
                "only blocks of a bf16 cache are encoded",
                "set kv_cache_dtype to bf16, or leave kv_store_encoding out",
            ),
            (
                cache.kv_tier_host_bytes is not None,
                "kv_tier_host_bytes too",
                "blocks of a store are in host memory already",
                "leave it out, and raise kv_store_buffer_bytes",
            ),
        ):
            if is_given:
                raise SettingError(f"{given} and {what}, but {reason}: {advice}")

    def _check_ranks(self) -> None:
        """Raise SettingError for what several ranks do not support yet."""
        given = self.executor.ranks_text
        if self.executor.context_parallel_size > 1 and PIECE_TOKENS % self.cache.block_size:
            raise SettingError(
                f"{given} and block_size is {self.cache.block_size}; ranks have whole pieces of "
                f"{PIECE_TOKENS} tokens, which 4, 8, 16, 32, 64 and 128 divide: take one of them"
            )
        if (threads := self.executor.num_threads) is not None and (
            threads < self.executor.num_ranks and self.executor.distributed_executor_backend == "mp"
        ):
            raise SettingError(
                f"{given} and num_threads is {threads}, which are divided over the ranks: give at "
                "least one for each, or leave num_threads out"
            )

    def _refuse_first_layers(self) -> None:
        """Raise SettingError for drafts of layers that lie elsewhere between their uses."""
        executor, come = self.executor, "read from disk"
        given = f"disk_offload_gb is {executor.disk_offload_gb}"
        if executor.cpu_offload_gb is not None:
            given, come = f"cpu_offload_gb is {executor.cpu_offload_gb}", "copied to the GPU"
        raise SettingError(
            f"{given} and the model's first layers draft, which would be {come} for each draft "
            f"token: give a --draft-model, take --speculate {any_of((*LOOKUPS, 'off'))}, or leave "
            "the former out"
        )
