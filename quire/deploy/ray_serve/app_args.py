"""AppArgs: the arguments of build_app, as in the `args` of a Ray Serve config file.

Knows no Ray. Always holds: an unknown key, a wrong type and a number out of range are errors that
name their place, before anything is deployed.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from quire.base.errors import SettingError
from quire.config.admin_keys import read_api_keys
from quire.config.flags import keywords_in_errors, server_and_engine_config
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig
from quire.deploy.ray_serve.scaling import ScalingTarget
from quire.router.features import settings_in
from quire.router.route_file import RouteFile, route_file_of
from quire.router.settings import RouterSettings

Amount = Annotated[float, Meta(ge=0, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=10_000)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]

# Beyond the grace time: the last events, and the end of the engine.
STOP_MARGIN_S = 15.0
# Settings of `quire serve` that a replica in Ray has from elsewhere, and from where.
_ELSEWHERE = {
    "model": "give model beside settings",
    "host": "give host beside settings",
    "port": "replicas take a free port, which the routers learn",
    "uds": "the routers reach replicas over the network",
    "admin_port": "admin routes are at the replica's own address",
    "api_processes": "raise max_replicas instead",
    "grpc_port": "it is not available in Ray",
    "tls_cert": "the routers reach replicas without TLS: use a private network",
    "tls_key": "the routers reach replicas without TLS: use a private network",
    "insecure": "give insecure beside settings",
    "log_level": "Ray Serve's logging_config has it",
    "log_format": "Ray Serve's logging_config has it",
}
# Keys of a router's configuration file that are given elsewhere, or of what Ray does.
_NO_ROUTER_KEYS = ("replicas", "replicas-file", "host", "port", "reuse-port", "kubernetes", "redis")
_KV_EVENTS = "kv-events"


class Scaling(Struct, frozen=True, forbid_unknown_fields=True):
    """How many engines. min_replicas 0: none while there are no requests. busy_share,
    waiting_tokens and ttft_ms: the load of one engine (ScalingTarget). look_back_s: over which
    loads are averaged."""

    min_replicas: Annotated[int, Meta(ge=0, le=10_000)] = 1
    max_replicas: Count = 1
    busy_share: Annotated[float, Meta(gt=0, le=1)] = 0.8
    waiting_tokens: Annotated[int, Meta(ge=1, le=2**40)] = 8192
    ttft_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 0.0
    upscale_delay_s: Seconds = 10.0
    downscale_delay_s: Seconds = 300.0
    to_zero_delay_s: Seconds = 600.0
    look_back_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0

    @property
    def target(self) -> ScalingTarget:
        """The load of one engine."""
        return ScalingTarget(
            busy_share=self.busy_share, waiting_tokens=self.waiting_tokens, ttft_ms=self.ttft_ms
        )


class AppArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """model: as in `quire serve MODEL`. settings: its flags with underscores. router: the keys of
    a router's configuration file. num_cpus, num_gpus, resources: of each engine. host: the address
    at which engines listen, by default that of their node. ingress: direct, or through Serve's
    Python proxy. insecure: accept requests without a key. num_routers: replicas of the router.
    router_nodes: head, which outlives nodes that come and go, or any.
    """

    model: str = ""
    settings: dict[str, Any] = {}
    scaling: Scaling = Scaling()
    num_cpus: Amount = 1.0
    num_gpus: Amount = 0.0
    resources: dict[str, Amount] = {}
    host: str = ""
    insecure: bool = False
    ingress: Literal["direct", "proxy"] = "direct"
    num_routers: Count = 1
    router_nodes: Literal["head", "any"] = "head"
    router: dict[str, Any] = {}

    def configs(self, host: str) -> tuple[ServerConfig, EngineConfig]:
        """Return the configurations of an engine that listens at `host`. Raises SettingError."""
        settings = {name.replace("-", "_"): value for name, value in self.settings.items()}
        for name, why in _ELSEWHERE.items():
            if name in settings:
                raise SettingError(f"settings has {name}: {why}")
        with keywords_in_errors():
            given = {**settings, "model": self.model, "host": host, "port": 0}
            return server_and_engine_config({**given, "insecure": self.insecure})

    def route_file(self) -> RouteFile:
        """Return the router's configuration. Raises SettingError."""
        if _KV_EVENTS in self.router:
            raise SettingError(
                f"router has {_KV_EVENTS}, which needs an address of events for each engine, and "
                "all engines of an application have the same settings and may share a node; leave "
                "it out: the router goes by what it has sent where"
            )
        for name in _NO_ROUTER_KEYS:
            if name in self.router:
                raise SettingError(
                    f"router has {name}, which Ray Serve and the directory of replicas decide; "
                    "leave it out"
                )
        try:
            return route_file_of(self.router)
        except ValueError as error:
            raise SettingError(f"router: {error}") from error

    def router_settings(self, replica_key: str | None = None) -> RouterSettings:
        """Return the router's settings; requests wait for engines that are started on demand."""
        file = self.route_file()
        settings = settings_in(file)
        if "wait-seconds" not in self.router:
            settings["wait_s"] = _WAIT_S
        if "resume-seconds" not in self.router:
            settings["resume_s"] = _RESUME_S
        return RouterSettings(**settings, replica_key=replica_key)

    def replica_key(self) -> str | None:
        """Return a key of the engines, for the router's own requests; None without keys.

        Reads the key file. Raises SettingError.
        """
        file = self.route_file().replica_key_file
        server, _ = self.configs("127.0.0.1")
        keys = (*server.api_key, *read_api_keys(server.api_key_file))
        if file is not msgspec.UNSET:
            keys = read_api_keys(file)
        return keys[0] if keys else None


# A cold start: a worker process, the engine and its weights.
_WAIT_S, _RESUME_S = 300.0, 120.0


def read_args(args: Mapping[str, Any]) -> AppArgs:
    """Return the arguments of build_app. Raises SettingError; reads no file."""
    try:
        found = msgspec.convert(dict(args), AppArgs)
    except msgspec.ValidationError as error:
        raise SettingError(f"args: {_why(error, args)}") from error
    scaling = found.scaling
    if scaling.min_replicas > scaling.max_replicas:
        raise SettingError(
            f"args: scaling.min_replicas is {scaling.min_replicas} and max_replicas is "
            f"{scaling.max_replicas}; raise max_replicas"
        )
    server, engine = found.configs("127.0.0.1")
    has_keys = server.api_key or server.api_key_file or engine.scheduler.tenants
    if not (has_keys or found.insecure):
        raise SettingError(
            "args: no key is set, and Serve listens on all interfaces, so any client that reaches "
            "a node could use the engines; give settings.api_key_file, a file on each node, or "
            "insecure: true"
        )
    found.router_settings()
    return found


def _why(error: msgspec.ValidationError, args: Mapping[str, Any]) -> str:
    """Return what is wrong, with the nearest name of an unknown key."""
    what, _, place = str(error).partition(" - at `$.")
    what = what[:1].lower() + what[1:]
    for known, given in ((AppArgs, args), (Scaling, args.get("scaling"))):
        if not isinstance(given, Mapping):
            continue
        names = known.__struct_fields__
        for name in given:
            if name not in names:
                near = get_close_matches(str(name), names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
                return f"{name!r} is not known; {hint}"
    return f"{place.rstrip('`')}: {what}" if place else what
