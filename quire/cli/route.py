"""`quire route URL URL ...`: one address for several servers, with failover of streams.

Loads no model. Prints the address on standard output like `quire serve`, and everything else as
log lines on standard error. A flag counts before the same setting in the configuration file.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from quire.base.errors import InvalidParameter, SettingError
from quire.base.log import Log
from quire.base.server_url import key_headers
from quire.config.process_limits import raise_open_files
from quire.router.discovery import Discovery, StaticList, WatchedFile, replica_url
from quire.router.features import Features, features_of, settings_in
from quire.router.quotas import Buckets, LocalBuckets, Quotas
from quire.router.route_file import KVEventsTable, RouteFile, read_route_file
from quire.router.settings import AUTO, ROUTING_POLICIES, BacklogTokens, RouterSettings
from quire.routing.block_sets import BlockSets

if TYPE_CHECKING:
    from quire.router.redis_link import RedisLink
    from quire.router.role_balance import MovableServers

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 8080
_DEFAULTS = RouterSettings()
_SECONDS = {
    "probe_s": ("--probe-seconds", "interval between health checks of a replica"),
    "stall_s": (
        "--stall-seconds",
        "time without progress after which a replica counts as stalled; longer for a replica with "
        "long gaps in normal operation",
    ),
    "silence_s": (
        "--silence-seconds",
        "time without a byte, heartbeats included, after which a stream counts as interrupted; of "
        "an answer without heartbeats: time in which its replica has no work, and a tenth of the "
        "maximum time without output",
    ),
    "connect_s": ("--connect-seconds", "time to connect to a replica"),
    "resume_s": (
        "--resume-seconds",
        "time that a stream, or a request without output, waits for another replica after its own "
        "has failed",
    ),
    "wait_s": (
        "--wait-seconds",
        "time that a request waits for a first replica, where replicas are started on demand; 0: "
        "rejected at once",
    ),
    "grace_s": ("--grace-seconds", "time for open requests to finish after SIGTERM"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument(
        "replicas",
        metavar="URL",
        nargs="*",
        help="addresses of the replicas, without a path, as in http://127.0.0.1:8000",
    )
    parser.add_argument(
        "--replicas-file",
        metavar="FILE",
        help="file with one address per line, read again when it changes, instead of URLs",
    )
    _add_prefill(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with these settings, and with models, quotas, hedging, cascades, Redis and "
        "Kubernetes (docs/router.md); flags override it",
    )
    parser.add_argument("--host", help=f"address to listen on (default {_DEFAULT_HOST})")
    parser.add_argument(
        "--port", type=int, help=f"port to listen on; 0: a free one (default {_DEFAULT_PORT})"
    )
    parser.add_argument(
        "--reuse-port",
        action="store_true",
        help="let several routers listen on one port; the kernel divides connections among them",
    )
    parser.add_argument(
        "--policy",
        choices=ROUTING_POLICIES,
        help=f"how a replica is chosen (default {_DEFAULTS.policy})",
    )
    parser.add_argument(
        "--backlog-tokens",
        type=_backlog_tokens,
        metavar="N",
        help="with --policy warm-cache: number of open tokens above the least loaded replica from "
        "which a replica is no longer preferred for its cache; auto: the number from which "
        f"computing the prompt elsewhere is faster, by measured TTFT "
        f"(default {_DEFAULTS.backlog_tokens})",
    )
    _add_limits(parser)
    parser.add_argument(
        "--replica-key-file",
        metavar="FILE",
        help="file with an API key of the replicas, to read what they serve; clients send their "
        "own keys",
    )
    parser.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        help="allow browser pages of this origin (as in https://app.example), or of any (*), as "
        "--cors-origin of a server does; may be repeated; default: none",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow listening beyond loopback if the replicas need no key",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name, (flag, text) in _SECONDS.items():
        default = getattr(_DEFAULTS, name)
        parser.add_argument(
            flag,
            dest=name,
            type=float,
            metavar="S",
            help=f"{text} (default {default:g})",
        )
    parser.add_argument(
        "--max-open-requests",
        dest="max_open",
        type=int,
        metavar="N",
        help=f"maximum open requests of all clients; more are rejected with 503 (default "
        f"{_DEFAULTS.max_open})",
    )
    parser.add_argument(
        "--max-open-per-key",
        type=int,
        metavar="N",
        help="maximum open requests of one API key; more are rejected with 429 (default 0: "
        "no limit)",
    )


def _backlog_tokens(text: str) -> BacklogTokens:
    """Return the value of --backlog-tokens. Raises ArgumentTypeError."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of tokens nor auto"
        ) from None


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill",
        metavar="URL",
        action="append",
        default=[],
        help="a server of role prefill, which computes long prompts for the replicas; may be "
        "repeated",
    )
    parser.add_argument(
        "--prefill-file",
        metavar="FILE",
        help="file with addresses of prefill servers, like --replicas-file, instead of --prefill",
    )
    parser.add_argument(
        "--min-prefill-tokens",
        type=int,
        metavar="N",
        help="with prefill servers: shorter prompts (estimated) are not sent there "
        f"(default {_DEFAULTS.min_prefill_tokens})",
    )
    parser.add_argument(
        "--movable",
        metavar="URL",
        action="append",
        default=[],
        help="a server of role both, used for prompts or for answers, whichever lacks servers; "
        "changes over after draining; may be repeated",
    )
    parser.add_argument(
        "--role-seconds",
        dest="role_hold_s",
        type=float,
        metavar="S",
        help="with --movable: time that prompts or answers lack servers before a movable server "
        "changes its role "
        f"(default {_DEFAULTS.role_hold_s:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Route until a signal. Raises SettingError."""
    from quire.router.policies import make_routing_policy
    from quire.router.server import run as serve  # imports uvicorn
    from quire.router.service import RouterService

    raise_open_files()
    log = Log("router")
    file = RouteFile() if arguments.config is None else read_route_file(arguments.config)
    _check_prefill(arguments)
    settings = _settings(arguments, file)
    discovery, features = _parts(arguments, file, log)
    make_routing_policy(settings, features.sets)  # raises before anything is started
    prefill, movable = _prefill_discovery(arguments, settings.probe_s, log), None
    if arguments.movable:
        from quire.router.role_balance import SideDiscovery  # only where it is wanted
        from quire.routing.role_shortage import Side

        movable = _movable(arguments, [discovery, *([] if prefill is None else [prefill])])
        discovery = SideDiscovery(discovery, movable, Side.DECODE)
        prefill = SideDiscovery(prefill, movable, Side.PREFILL)
    if "*" in settings.cors_origin and not settings.replica_key:
        log.warning(
            "any web page may use this router through a browser that reaches it: the replicas "
            "seem to need no key"
        )
    host = _given(arguments.host, file.host, _DEFAULT_HOST)
    _check_exposure(host, settings, is_insecure=arguments.insecure)
    port = _given(arguments.port, file.port, _DEFAULT_PORT)
    listening = _listen(host, port, reuses_port=arguments.reuse_port or file.reuse_port)
    host, port = listening.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def announce(num_available: int) -> None:
        log.event("listening", address=address, policy=settings.policy, available=num_available)
        print(
            f"routing at {address}, {num_available} of {len(discovery.poll())} replicas available",
            flush=True,
        )

    def open_service() -> Awaitable[RouterService]:
        return RouterService.open(settings, discovery, log, features, prefill, movable)

    return serve(open_service, listening, log, announce)


def _given(flag: Any, in_file: Any, default: Any) -> Any:
    """Return a flag's value, else that of the file, else the default."""
    if flag is not None:
        return flag
    return default if in_file is UNSET else in_file


def _settings(arguments: argparse.Namespace, file: RouteFile) -> RouterSettings:
    """Return the settings of the flags and of the file. Raises SettingError."""
    flags = {name: getattr(arguments, name) for name in settings_in(RouteFile())}
    for name in ("min_prefill_tokens", "role_hold_s"):
        flags[name] = getattr(arguments, name)
    if flags["cors_origin"] is not None:
        flags["cors_origin"] = tuple(flags["cors_origin"])
    in_flags = {name: value for name, value in flags.items() if value is not None}
    key_file = _given(arguments.replica_key_file, file.replica_key_file, None)
    return RouterSettings(**(settings_in(file) | in_flags), replica_key=_key(key_file))


def _parts(arguments: argparse.Namespace, file: RouteFile, log: Log) -> tuple[Discovery, Features]:
    """Return the discovery and the features; what is not configured is not imported."""
    has_addresses = bool(arguments.replicas or arguments.replicas_file)
    probe_s = _given(arguments.probe_s, file.probe_seconds, _DEFAULTS.probe_s)
    quotas, buckets = None, None
    leases: Discovery | None = None
    link: RedisLink | None = None
    if file.redis is not None:
        from quire.router.redis_buckets import RedisBuckets
        from quire.router.redis_leases import RedisLeases
        from quire.router.redis_link import RedisLink

        link = RedisLink(file.redis.url, file.redis.timeout_ms / 1000)
        local = LocalBuckets(time.monotonic, file.redis.routers or 1)
        buckets = RedisBuckets(link, file.redis.prefix, local, log, time.monotonic)
        if file.redis.leases:
            leases = RedisLeases(link, file.redis.prefix, log, time.monotonic)
    if file.quotas is not None or file.tenants:
        store: Buckets = buckets or LocalBuckets(time.monotonic)
        quotas = Quotas(file.quotas, file.tenants, store)
    if has_addresses:
        discovery = _discovery(list(arguments.replicas), arguments.replicas_file, probe_s, log)
    elif (
        sum([bool(file.replicas or file.replicas_file), file.kubernetes is not None, bool(leases)])
        > 1
    ):
        raise SettingError(
            f"{arguments.config}: replicas are given in several ways; keep one of replicas, "
            "replicas-file, [kubernetes] and leases of [redis]"
        )
    elif leases is not None:
        discovery = leases
    elif file.kubernetes is not None:
        from quire.router.kubernetes_endpoints import KubernetesEndpoints

        discovery = KubernetesEndpoints(file.kubernetes, log)
    else:
        discovery = _discovery(list(file.replicas), file.replicas_file, probe_s, log)
    features = features_of(file, quotas, None if link is None else (lambda: link.is_down))
    if file.kv_events is not None:
        _follow_events(features, file.kv_events)
    return discovery, features


def _follow_events(features: Features, table: KVEventsTable) -> None:
    """Let the policy know what replicas publish."""
    from quire.router.exact_prefixes import ExactPrefixes  # imports ZeroMQ

    features.sets = sets = BlockSets(table.max_blocks)
    features.make_look_up = lambda fleet: ExactPrefixes(fleet, table, sets)


def _discovery(
    replicas: list[str], replicas_file: str | None, probe_s: float, log: Log
) -> Discovery:
    if bool(replicas) == bool(replicas_file):
        raise SettingError(
            "give the addresses of the replicas, as in `quire route http://127.0.0.1:8000 "
            "http://127.0.0.1:8001`, or --replicas-file FILE, not both"
        )
    if replicas_file:
        return WatchedFile(Path(replicas_file), log, probe_s, time.monotonic)
    return _listed(replicas)


def _check_prefill(arguments: argparse.Namespace) -> None:
    """Raise SettingError for flags that have no effect without servers that compute prompts."""
    has_prefill = arguments.prefill or arguments.prefill_file or arguments.movable
    if arguments.min_prefill_tokens is not None and not has_prefill:
        raise SettingError(
            f"--min-prefill-tokens is {arguments.min_prefill_tokens} and no server computes "
            "prompts for the replicas; add --prefill URL, --prefill-file FILE or --movable URL, or "
            "leave it out"
        )
    if arguments.role_hold_s is not None and not arguments.movable:
        raise SettingError(
            f"--role-seconds is {arguments.role_hold_s:g} and no server may change its role; add "
            "--movable URL, or leave it out"
        )


def _prefill_discovery(arguments: argparse.Namespace, probe_s: float, log: Log) -> Discovery | None:
    if arguments.prefill and arguments.prefill_file:
        raise SettingError("--prefill and --prefill-file are both given; give one of them")
    if arguments.prefill_file:
        return WatchedFile(Path(arguments.prefill_file), log, probe_s, time.monotonic)
    return _listed(arguments.prefill) if arguments.prefill else None


def _movable(arguments: argparse.Namespace, fixed: Sequence[Discovery]) -> MovableServers:
    """Return the movable servers; the first computes prompts where no other server does."""
    from quire.router.role_balance import MovableServers
    from quire.routing.role_shortage import Side

    has_prefill = len(fixed) > 1
    urls = _listed(arguments.movable).poll()
    known = {url.shown for one in fixed for url in one.poll()}
    if twice := [one.shown for one in urls if one.shown in known]:
        raise SettingError(
            f"--movable {twice[0]} is given as a replica or prefill server too; give it once"
        )
    return MovableServers(urls, Side.DECODE if has_prefill else Side.PREFILL)


def _listed(texts: list[str]) -> StaticList:
    try:
        urls = [replica_url(url) for url in texts]
    except InvalidParameter as error:
        raise SettingError(str(error)) from error
    return StaticList(tuple({url.full: url for url in urls}.values()))


def _key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
        key_headers(key)
    except (OSError, UnicodeDecodeError, InvalidParameter) as error:
        raise SettingError(f"--replica-key-file {path}: {error}") from error
    if not key:
        raise SettingError(f"--replica-key-file {path} is empty; put the key on its first line")
    return key


def _check_exposure(host: str, settings: RouterSettings, *, is_insecure: bool) -> None:
    is_local = host in ("127.0.0.1", "::1", "localhost")
    if is_local or is_insecure or settings.replica_key:
        return
    raise SettingError(
        f"--host is {host} and the replicas seem to need no key, so any client that "
        "reaches this address could use them; give the replicas keys and --replica-key-file, or "
        "add --insecure"
    )


def _listen(host: str, port: int, *, reuses_port: bool) -> socket.socket:
    if not 0 <= port <= 65535:
        raise SettingError(f"--port is {port}; a number from 0 to 65535 is allowed")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuses_port:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(address)
            listening.listen(1024)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise SettingError(
            f"cannot listen at {host} port {port} ({error}); choose another --host or --port"
        ) from error
    listening.setblocking(False)
    return listening
