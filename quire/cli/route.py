"""`quire route URL URL ...`: one address for several servers, with failover of streams.

Loads no model. Prints the address on standard output like `quire serve`, and everything else as
log lines on standard error.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from quire.base.errors import InvalidParameter, SettingError
from quire.base.log import Log
from quire.base.server_url import key_headers
from quire.router.discovery import Discovery, StaticList, WatchedFile, replica_url
from quire.router.settings import POLICIES, RouterSettings

_DEFAULTS = RouterSettings()
_SECONDS = {
    "probe_s": ("--probe-seconds", "read the health of each replica so often"),
    "stall_s": (
        "--stall-seconds",
        "a replica without progress for so long is given up; longer where its gaps are usually "
        "long",
    ),
    "silence_s": ("--silence-seconds", "a stream without any byte for so long is given up"),
    "connect_s": ("--connect-seconds", "time to connect to a replica"),
    "resume_s": ("--resume-seconds", "an interrupted stream waits so long for another replica"),
    "grace_s": ("--grace-seconds", "open requests may end within this time after SIGTERM"),
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
        help="a file with one address a line, read again when it changes, instead of URLs",
    )
    _add_prefill(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8080, help="port to listen at; 0: a free one")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=_DEFAULTS.policy,
        help=f"how a replica is chosen (default {_DEFAULTS.policy})",
    )
    parser.add_argument(
        "--backlog-tokens",
        type=int,
        default=_DEFAULTS.backlog_tokens,
        metavar="N",
        help="policy warm-cache: a replica with so many more open tokens than the least loaded "
        f"one is not preferred for its cache (default {_DEFAULTS.backlog_tokens})",
    )
    for name, (flag, text) in _SECONDS.items():
        default = getattr(_DEFAULTS, name)
        parser.add_argument(
            flag,
            dest=name,
            type=float,
            default=default,
            metavar="S",
            help=f"{text} (default {default:g})",
        )
    parser.add_argument(
        "--max-open-requests",
        type=int,
        default=_DEFAULTS.max_open,
        metavar="N",
        help=f"open requests of all clients; more are refused with 503 (default "
        f"{_DEFAULTS.max_open})",
    )
    parser.add_argument(
        "--max-open-per-key",
        type=int,
        default=_DEFAULTS.max_open_per_key,
        metavar="N",
        help="open requests of one API key; more are refused with 429 (default 0: no limit)",
    )
    parser.add_argument(
        "--replica-key-file",
        metavar="FILE",
        help="a file with an API key of the replicas, to read what they serve; clients send their "
        "own keys",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen at an address that is not loopback although the replicas need no key",
    )


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
        help="a file with their addresses, like --replicas-file, instead of --prefill",
    )
    parser.add_argument(
        "--min-prefill-tokens",
        type=int,
        default=_DEFAULTS.min_prefill_tokens,
        metavar="N",
        help="shorter prompts (estimated) are not sent to prefill servers "
        f"(default {_DEFAULTS.min_prefill_tokens})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Route until a signal. Raises SettingError."""
    from quire.router.server import run as serve  # imports uvicorn

    log = Log("router")
    settings = RouterSettings(
        policy=arguments.policy,
        backlog_tokens=arguments.backlog_tokens,
        max_open=arguments.max_open_requests,
        max_open_per_key=arguments.max_open_per_key,
        replica_key=_key(arguments.replica_key_file),
        min_prefill_tokens=arguments.min_prefill_tokens,
        **{name: getattr(arguments, name) for name in _SECONDS},
    )
    discovery, prefill = _discovery(arguments, log), _prefill_discovery(arguments, log)
    _check_exposure(arguments, settings)
    listening = _listen(arguments.host, arguments.port)
    host, port = listening.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def announce(num_available: int) -> None:
        log.event("listening", address=address, policy=settings.policy, available=num_available)
        print(
            f"routing at {address}, {num_available} of {len(discovery.poll())} replicas available",
            flush=True,
        )

    return serve(settings, discovery, listening, log, announce, prefill)


def _discovery(arguments: argparse.Namespace, log: Log) -> Discovery:
    if bool(arguments.replicas) == bool(arguments.replicas_file):
        raise SettingError(
            "give the addresses of the replicas, as in `quire route http://127.0.0.1:8000 "
            "http://127.0.0.1:8001`, or --replicas-file FILE, not both"
        )
    if arguments.replicas_file:
        return WatchedFile(Path(arguments.replicas_file), log)
    return _listed(arguments.replicas)


def _prefill_discovery(arguments: argparse.Namespace, log: Log) -> Discovery | None:
    if arguments.prefill and arguments.prefill_file:
        raise SettingError("--prefill and --prefill-file are both given; give one of them")
    if arguments.prefill_file:
        return WatchedFile(Path(arguments.prefill_file), log)
    return _listed(arguments.prefill) if arguments.prefill else None


def _listed(texts: list[str]) -> StaticList:
    try:
        urls = [replica_url(url) for url in texts]
    except InvalidParameter as error:
        raise SettingError(str(error)) from error
    return StaticList(tuple({url.shown + url.path: url for url in urls}.values()))


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


def _check_exposure(arguments: argparse.Namespace, settings: RouterSettings) -> None:
    is_local = arguments.host in ("127.0.0.1", "::1", "localhost")
    if is_local or arguments.insecure or settings.replica_key:
        return
    raise SettingError(
        f"--host is {arguments.host} and the replicas seem to need no key, so any client that "
        "reaches this address could use them; give the replicas keys and --replica-key-file, or "
        "add --insecure"
    )


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise SettingError(f"--port is {port}; a number from 0 to 65535 is allowed")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
