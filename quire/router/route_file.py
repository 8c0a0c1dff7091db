"""RouteFile: the configuration file of a router, a TOML file with typed tables.

    replicas = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]

    [models.chat]
    targets = [{model = "qwen-1", weight = 95}, {model = "qwen-2", weight = 5}]

Keys at the top level are those of the command line's flags. Knows no replica: whether a model is
served is not checked here, since replicas come and go. Always holds: an unknown key, a wrong type
and a number out of range are errors that name their place.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, UnsetType

from quire.base.engine_endpoints import LAST_PORT, colliding_ports, port_of
from quire.base.errors import SettingError

MAX_FILE_BYTES = 1 << 20

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Count = Annotated[int, Meta(ge=1, le=2**40)]
Share = Annotated[float, Meta(ge=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Pattern = Annotated[str, Meta(min_length=1, max_length=1000)]
Reason = Literal["low-confidence", "failed-grammar", "refusal", "length"]
# How English models begin to refuse. Each part is bounded, so that none needs backtracking.
ENGLISH_REFUSAL = (
    r"(?i)^\s{0,8}(?:(?:i['\u2019]m|i am) (?:very |so |really )?sorry\b|sorry\b|unfortunately\b"
    r"|i apologi[sz]e\b|as an ai\b)?[^.!?\n]{0,60}?\bi(?: can(?:['\u2019]t|not| not)"
    r"|['\u2019]m (?:not able|unable) to| am (?:not able|unable) to| won['\u2019]t)"
    r" (?:help(?! but\b)|assist|answer|provide|comply|fulfil|discuss|support|create|generate|write"
    r"|do that)"
)
Endpoint = Annotated[str, Meta(pattern=r"^(tcp://[^\s/]+:[0-9]{1,5}|ipc://[^\s]+)$")]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Table(Struct, frozen=True, forbid_unknown_fields=True, rename=lambda n: n.replace("_", "-")):
    """A table of the file; keys have dashes where attributes have underscores."""


class Target(Table, frozen=True):
    """A model as replicas name it, and its share of an alias. weight 0: it gets nothing."""

    model: Name
    weight: Annotated[float, Meta(ge=0, le=1e9)] = 1.0


class ModelTable(Table, frozen=True):
    """A name for clients. longer: the model for prompts that the target's context cannot hold."""

    targets: tuple[Target, ...] = ()
    longer: str = ""


class CascadeTable(Table, frozen=True):
    """A name that is answered by a small model where it suffices.

    large_patterns: expressions of the operator; a prompt with a match goes to the large model.
    classifier: a file of `quire cascade`; what it finds hard with more than hard_above (None:
    HARD_ABOVE) goes to the large model, but for a share to explore (None: EXPLORE). outcomes: a
    file for judged answers of the small model.
    escalate: the reasons for which an answer of the small model is replaced. refusal_patterns: an
    answer with a match in its beginning is a refusal. judge_streams: hold streams of the small
    model until they can be judged.
    """

    small: Name
    large: Name
    max_prompt_tokens: Count = 2000
    tools: Literal["small", "large"] = "large"
    large_patterns: tuple[Pattern, ...] = ()
    classifier: str = ""
    hard_above: Share | None = None
    explore: Share | None = None
    outcomes: str = ""
    escalate: tuple[Reason, ...] = ("low-confidence", "failed-grammar", "refusal")
    refusal_patterns: tuple[Pattern, ...] = (ENGLISH_REFUSAL,)
    min_mean_logprob: Annotated[float, Meta(ge=-100, le=0)] = -1.0
    judge_streams: bool = False


class HedgingTable(Table, frozen=True):
    """share: of the tokens of all requests, which hedges may compute again. whole_answers: also
    hedge answers that are not streamed."""

    share: Annotated[float, Meta(gt=0, le=0.5)] = 0.03
    percentile: Annotated[float, Meta(ge=50, le=99.9)] = 95.0
    whole_answers: bool = False


class SummariesTable(Table, frozen=True):
    """Bounds of summaries of prompts that do not fit, which requests ask for.

    model: what summarizes; a request may name another. max_tokens: of a summary. max_prompt_tokens:
    of what is summarized, estimated. max_requests: that one prompt may take.
    """

    model: Name
    max_tokens: Annotated[int, Meta(ge=16, le=2**20)] = 512
    max_prompt_tokens: Count = 131_072
    max_requests: Annotated[int, Meta(ge=1, le=1000)] = 16


class LanesTable(Table, frozen=True):
    """Bounds of long prompts. ttft_ms: the target for the first tokens of short prompts, to which
    the limit of long ones is adapted; 0: the limit is fixed."""

    long_prompt_tokens: Count = 4096
    max_long_per_replica: Annotated[int, Meta(ge=1, le=10_000)] = 2
    max_wait_seconds: Seconds = 30.0
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    ttft_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0


class QuotaTable(Table, frozen=True):
    """Tokens that each key may use. burst_tokens: 0 for those of one minute."""

    tokens_per_minute: Count
    burst_tokens: Annotated[int, Meta(ge=0, le=2**40)] = 0


class TenantTable(QuotaTable, frozen=True):
    """Keys that share one quota. key_digests: SHA-256 of each key, in hex."""

    key_digests: tuple[Digest, ...] = ()


class RedisTable(Table, frozen=True):
    """Where several routers share quotas, and where replicas hold leases.

    routers: how many share the quotas; each allows that part alone while Redis is down; None: one.
    """

    url: Name
    prefix: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9_:.-]+$")] = (
        "quire:"
    )
    routers: Annotated[int, Meta(ge=1, le=1000)] | None = None
    timeout_ms: Annotated[int, Meta(ge=1, le=10_000)] = 250
    leases: bool = False


class KubernetesTable(Table, frozen=True):
    """The Service with the replicas' endpoints. namespace: "" for the router's own. port: the name
    of the endpoints' port; "" where there is one."""

    service: Name
    namespace: str = ""
    port: str = ""
    secure: bool = False


class TiersTable(Table, frozen=True):
    """Limits of open requests by service_tier, for each replica.

    preset: how the limits follow the targets; None: latency-first. ttft_ms, tpot_ms: targets of
    streams above flex; 0 for none, and without either the limits are fixed.
    """

    preset: Literal["latency-first", "throughput-first"] | None = None
    ttft_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0
    tpot_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0
    max_default: Annotated[int, Meta(ge=1, le=100_000)] = 256
    max_flex: Annotated[int, Meta(ge=1, le=100_000)] = 64
    max_wait_seconds: Seconds = 60.0
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 10_000


class SleepTable(Table, frozen=True):
    """How many of the replicas are awake at a time; the least recently used sleep."""

    max_awake: Annotated[int, Meta(ge=1, le=10_000)]
    max_wait_seconds: Seconds = 60.0


class KVEndpointsTable(Table, frozen=True):
    """Where one replica publishes its KV events. replay_endpoint: "" for nowhere.
    data_parallel_size: 0 for that of all replicas."""

    endpoint: Endpoint
    replay_endpoint: Endpoint | Literal[""] = ""
    data_parallel_size: Annotated[int, Meta(ge=0, le=1024)] = 0


class KVEventsTable(Table, frozen=True):
    """KV events of the replicas, by which the policy warm-cache knows what they have cached.

    port, replay_port: at the host of each replica; replay_port 0: missing events are not asked for.
    replicas: by address, those that publish elsewhere. data_parallel_size: engines of each replica,
    which publish at the ports after these. max_blocks: remembered of each engine.
    min_prompt_tokens: shorter prompts (estimated) are not looked up. tokenize_ms: a text is looked
    up if a replica gives its token ids within this time.
    """

    port: Annotated[int, Meta(ge=1, le=65535)] = 5557
    replay_port: Port = 5558
    replicas: dict[Name, KVEndpointsTable] = {}
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    max_blocks: Annotated[int, Meta(ge=1, le=2**30)] = 1_000_000
    min_prompt_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 256
    tokenize_ms: Annotated[int, Meta(ge=1, le=10_000)] = 100


class RouteFile(Table, frozen=True):
    """The whole file. What is not set is the flag's default."""

    replicas: tuple[Name, ...] = ()
    replicas_file: str = ""
    host: str | UnsetType = msgspec.UNSET
    port: Port | UnsetType = msgspec.UNSET
    reuse_port: bool = False
    policy: str | UnsetType = msgspec.UNSET
    backlog_tokens: int | Literal["auto"] | UnsetType = msgspec.UNSET
    probe_seconds: Seconds | UnsetType = msgspec.UNSET
    stall_seconds: Seconds | UnsetType = msgspec.UNSET
    silence_seconds: Seconds | UnsetType = msgspec.UNSET
    connect_seconds: Seconds | UnsetType = msgspec.UNSET
    resume_seconds: Seconds | UnsetType = msgspec.UNSET
    grace_seconds: Annotated[float, Meta(ge=0, le=86400)] | UnsetType = msgspec.UNSET
    wait_seconds: Annotated[float, Meta(ge=0, le=86400)] | UnsetType = msgspec.UNSET
    max_open_requests: Count | UnsetType = msgspec.UNSET
    max_open_per_key: Annotated[int, Meta(ge=0)] | UnsetType = msgspec.UNSET
    replica_key_file: str | UnsetType = msgspec.UNSET
    cors_origin: tuple[str, ...] | UnsetType = msgspec.UNSET
    default_model: str = ""
    models: dict[Name, str | ModelTable] = {}
    cascades: dict[Name, CascadeTable] = {}
    hedging: HedgingTable | None = None
    summaries: SummariesTable | None = None
    lanes: LanesTable | None = None
    tiers: TiersTable | None = None
    sleep: SleepTable | None = None
    quotas: QuotaTable | None = None
    tenants: dict[Name, TenantTable] = {}
    redis: RedisTable | None = None
    kubernetes: KubernetesTable | None = None
    kv_events: KVEventsTable | None = None


def read_route_file(path: str) -> RouteFile:
    """Read and check a file. Raises SettingError."""
    try:
        with Path(path).expanduser().open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise SettingError(
            f"the configuration file {path} cannot be read ({error.strerror}); give a TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingError(f"the configuration file {path} is not UTF-8") from error
    if len(raw) > MAX_FILE_BYTES:
        raise SettingError(
            f"the configuration file {path} has more than {MAX_FILE_BYTES} bytes; give a TOML file "
            "of settings"
        )
    try:
        return parse_route_file(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SettingError(f"the configuration file {path}: {why}") from error


def parse_route_file(text: str) -> RouteFile:
    """Return the settings of a file's text. Raises ValueError that says what is wrong where."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"it is not valid TOML: {error}; write each setting once, as in port = 8080"
        ) from error
    return route_file_of(document)


def route_file_of(document: Mapping[str, Any]) -> RouteFile:
    """Return the settings of a parsed file. Raises ValueError that says what is wrong where."""
    _check_names(RouteFile, document, "")
    try:
        found = msgspec.convert(document, RouteFile)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        what = what[:1].lower() + what[1:]
        if what.startswith("invalid enum value") and (allowed := _choices_at(place)):
            what += f"; allowed are {', '.join(allowed)}"
        raise ValueError(f"{place.rstrip('`')}: {what}" if place else what) from error
    _check_whole(found)
    return found


def _check_whole(found: RouteFile) -> None:
    """Check what no single key can say. Raises ValueError."""
    for name in found.models:
        if name in found.cascades:
            raise ValueError(f"{name!r} is in [models] and in [cascades]; rename one of them")
        table = found.models[name]
        if isinstance(table, ModelTable):
            if table.targets and not any(one.weight for one in table.targets):
                raise ValueError(f"models.{name}: each target has weight 0; give one a weight")
            if not table.targets and not table.longer:
                raise ValueError(f"models.{name} has no targets; write targets = [{{model = ...}}]")
            models = [one.model for one in table.targets]
            if len(set(models)) < len(models):
                raise ValueError(f"models.{name}: a model is a target twice; keep one of them")
        elif not table:
            raise ValueError(f"models.{name} is empty; give the name of a model")
    for name, cascade in found.cascades.items():
        _check_cascade(name, cascade)
    holders: dict[str, str] = {}
    for name, tenant in found.tenants.items():
        if not tenant.key_digests:
            raise ValueError(
                f"tenants.{name} has no key-digests; give the SHA-256 of each key "
                "(printf %s KEY | sha256sum)"
            )
        for digest in tenant.key_digests:
            if holders.setdefault(digest, name) != name:
                raise ValueError(
                    f"tenants {holders[digest]} and {name} have a key in common; each key belongs "
                    "to one tenant"
                )
    if found.redis is not None and not (found.quotas or found.tenants):
        _check_unshared(found.redis)
    if (tiers := found.tiers) is not None and tiers.preset and not (tiers.ttft_ms or tiers.tpot_ms):
        raise ValueError(
            f"tiers: preset is {tiers.preset!r}, which says how the limits follow targets, and "
            "there are none; add ttft-ms or tpot-ms, or leave preset out"
        )
    if found.sleep is not None and found.kubernetes is not None:
        raise ValueError(
            "[sleep] and [kubernetes] exclude each other: a server that sleeps is not ready, so "
            "its endpoint leaves the Service, and no request could wake it; give the addresses as "
            "replicas or replicas-file, or leave [sleep] out"
        )
    if found.kv_events is not None:
        _check_kv_events(found.kv_events)


def _check_cascade(name: str, cascade: CascadeTable) -> None:
    """Raise ValueError for what has no effect, and for patterns that are none."""
    for key, given in (("hard-above", cascade.hard_above), ("explore", cascade.explore)):
        if given is not None and not cascade.classifier:
            raise ValueError(
                f"cascades.{name}: {key} is {given:g} and has no effect without a classifier, "
                'which says what is hard; name its file, as in classifier = "hard.json", or '
                f"leave {key} out"
            )
    if cascade.explore is not None and not cascade.outcomes:
        raise ValueError(
            f"cascades.{name}: explore has no effect without outcomes, to which the answers of "
            'explored requests are written; name a file, as in outcomes = "outcomes.jsonl", or '
            "leave explore out"
        )
    for key, patterns in (
        ("large-patterns", cascade.large_patterns),
        ("refusal-patterns", cascade.refusal_patterns),
    ):
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"cascades.{name}: {key} has {pattern!r}, which is no regular expression "
                    f"({error})"
                ) from error


def _check_unshared(redis: RedisTable) -> None:
    """Raise ValueError for what has no effect without quotas."""
    if not redis.leases:
        raise ValueError(
            "[redis] has neither leases = true nor quotas to share; add one, or leave it out"
        )
    if redis.routers is not None:
        raise ValueError(
            f"redis: routers is {redis.routers}, the number of routers that share quotas, and "
            "there are none to share; add [quotas] or [tenants], or leave routers out"
        )


def _check_kv_events(table: KVEventsTable) -> None:
    """Raise ValueError where an engine's port would be another's, or none."""
    replay = f"tcp://host:{table.replay_port}" if table.replay_port else ""
    places = {"kv-events": (f"tcp://host:{table.port}", replay, 0)}
    for name, own in table.replicas.items():
        where = f'kv-events.replicas."{name}"'
        places[where] = (own.endpoint, own.replay_endpoint, own.data_parallel_size)
    for where, (endpoint, replay, own_size) in places.items():
        size = own_size or table.data_parallel_size
        ports = colliding_ports(endpoint, replay, size) if size > 1 else None
        if ports is not None:
            raise ValueError(
                f"{where}: events are at port {ports[0]} and replays at {ports[1]}, and each of "
                f"{size} engines (data-parallel-size) takes the next ones; put the replays at "
                f"{ports[0] + size} or later, here and at the replicas"
            )
        for one in (endpoint, replay):
            if (port := port_of(one)) is not None and port + size - 1 > LAST_PORT:
                raise ValueError(
                    f"{where}: the last of {size} engines (data-parallel-size) would be at port "
                    f"{port + size - 1}; the last port is {LAST_PORT}: take a lower one"
                )


def _check_names(kind: type[Struct], entries: Mapping[str, Any], place: str) -> None:
    """Raise ValueError for the first key that a table does not have, with the nearest one."""
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in entries.items():
        where = f"{place}.{key}" if place else key
        if key not in known:
            near = get_close_matches(key.replace("_", "-")[:60], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ValueError(f"{where} is not a setting; {hint}")
        inner = _table_in(known[key])
        if inner is None:
            continue
        if isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, dict):
                    _check_names(inner, one, f"{where}[{number}]")
        elif get_origin(known[key]) is dict:
            for name, one in value.items() if isinstance(value, dict) else ():
                if isinstance(one, dict):
                    _check_names(inner, one, f"{where}.{name}")
        elif isinstance(value, dict):
            _check_names(inner, value, where)


def _choices_at(place: str) -> tuple[str, ...]:
    """Return the words that are allowed at a place as msgspec names it, such as
    cascades[...].escalate[0]; none where it has others than words."""
    kind: Any = RouteFile
    for key in re.sub(r"\[[^]]*\]", "", place.rstrip("`")).split("."):
        table = _table_in(kind)
        fields = () if table is None else msgspec.structs.fields(table)
        kind = next((one.type for one in fields if one.encode_name == key), None)
    return tuple(_choices_in(kind))


def _choices_in(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
        return
    for one in get_args(kind):
        yield from _choices_in(one)


def _table_in(kind: Any) -> type[Struct] | None:
    """Return the table that a key's type holds, in a list or under names; None without one."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    return next((found for one in get_args(kind) if (found := _table_in(one)) is not None), None)
