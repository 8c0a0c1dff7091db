"""`quire serve [MODEL]`: run an OpenAI-compatible server with one model.

Binds the port, starts the engine process, and only then imports the HTTP modules, so that the
imports of both processes overlap. Prints a short summary when requests are accepted. Exit code: 0
after a clean stop, 1 if the engine or the server failed; invalid settings are raised as by any
subcommand.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import SettingError, WorkerError
from quire.base.log import Log
from quire.base.log_process import start_logging
from quire.base.log_sink import can_write
from quire.base.native_module import require_native
from quire.cli.options import add_all_settings
from quire.cli.output import discard_output
from quire.cli.pull import add_pull_flag, pull_if_asked
from quire.config.admin_keys import read_admin_keys, read_api_keys
from quire.config.flags import config_from_flags, engine_from_flags
from quire.config.groups import EngineConfig
from quire.config.kv_events import read_kv_events
from quire.config.launch_environment import read_launch_environment
from quire.config.server_and_engine import check_together
from quire.config.server_config import ServerConfig
from quire.config.tenants import Tenant, read_tenants_of_server
from quire.hub.cache import with_local_model

if TYPE_CHECKING:
    from quire.api.served_engine import ServedEngine
    from quire.engine.client.launch import EngineProcess
    from quire.engine.model_card import ModelCard

_PROGRESS_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the flags of all config groups."""
    add_pull_flag(parser)
    add_all_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped and return the exit code.

    Raises SettingError, ModelError or CapacityError.
    """
    require_native()  # before processes start that would each report it
    from quire.api.http.sockets import SocketFile, check_tls, listen, listen_for_admins, url_of
    from quire.engine.client.launch import EngineProcess

    # A reload (SIGHUP) during start-up is ignored; run_server installs its handler later.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _refuse_both(arguments)
    server = _with_keys_of_file(config_from_flags(ServerConfig, arguments))
    start_logging("server", server.logging)
    engine = engine_from_flags(arguments)
    check_together(server, engine)
    pull_if_asked(arguments)
    engine = with_local_model(engine)
    backend = engine.executor.distributed_executor_backend
    if backend == "external_launcher" and read_launch_environment(os.environ).rank > 0:
        return _be_a_rank(engine)
    path = engine.scheduler.tenants
    tenants = None if path is None else _tenants_of(path, server)
    check_tls(server)
    if server.otlp_endpoint is not None:
        from quire.api.request_spans import check_spans  # slow import

        check_spans(server)
    read_admin_keys(server.admin_key_file)  # fail early if it is invalid
    if server.responses_store is not None:
        from quire.api.openai.responses.open_store import store_of  # not needed by other commands

        store_of(server).close()
    if server.batch_store is not None:
        from quire.api.batches.journal import BatchJournal  # not needed by other commands

        BatchJournal(server.batch_store).close()
    for_admins = listen_for_admins(server)
    listening = listen(server, has_tenants=tenants is not None)
    file = SocketFile(listening)
    try:
        engine = _with_topic(engine, listening)
        if engine.executor.data_parallel_size > 1:
            engines = _launch_engines(engine, server)
        else:
            engines = [(engine, EngineProcess.launch(engine, server.logging))]
        urls = [url_of(listening, scheme="http" if server.tls_cert is None else "https")]
        urls += [] if for_admins is None else [url_of(for_admins)]
        _log_start(server, engine, urls, is_open=not server.api_key and tenants is None)
        sockets = (listening, for_admins)
        if server.api_processes > 1:
            return _serve_with_workers(server, engines, sockets, urls=urls)
        return _serve(server, engines, sockets, urls=urls, tenants=tenants)
    finally:
        file.remove()


def _be_a_rank(engine: EngineConfig) -> int:
    """Compute what rank 0 asks for instead of serving, until it ends this rank."""
    from quire.engine.assembly.model_files import model_folder  # not needed by a server
    from quire.ranks.launched import run_launched

    folder = model_folder(engine.model)
    try:
        run_launched(engine.executor, os.environ, checkpoint=str(folder))
    except WorkerError as error:
        Log("rank").error("this rank ends", reason=str(error))
        return 1
    return 0


def _with_topic(engine: EngineConfig, listening: socket.socket) -> EngineConfig:
    """Name this server in the topic of KV events, unless one is set."""
    given = engine.cache.kv_events_config
    if given is None or read_kv_events(given).topic is not None:
        return engine
    from quire.engine.assembly.model_files import model_name  # only with KV events

    host, port = "localhost", 0
    if listening.family != socket.AF_UNIX:
        host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    topic = f"kv@{host}:{port}@{model_name(engine.model)}"
    named = json.dumps({**json.loads(given), "topic": topic})
    return replace(engine, cache=replace(engine.cache, kv_events_config=named))


def _refuse_both(arguments: argparse.Namespace) -> None:
    """Raise SettingError if both a Unix socket and an address are given.

    A file may repeat the default address, as that of `quire config show --toml` does.
    """
    given = vars(arguments)
    sources = given.get("sources", {})
    for name in ("host", "port"):
        if given.get("uds") is None or name not in given:
            continue
        is_flag = name not in sources or sources[name].source.kind == "flag"
        if is_flag or given[name] != getattr(ServerConfig(), name):
            raise SettingError(f"--uds and --{name} are both given; give one of them")


def _tenants_of(path: str, server: ServerConfig) -> tuple[Tenant, ...]:
    return read_tenants_of_server(path, has_keys=bool(server.api_key))


def _with_keys_of_file(server: ServerConfig) -> ServerConfig:
    return replace(server, api_key=(*server.api_key, *read_api_keys(server.api_key_file)))


def _launch_engines(
    engine: EngineConfig, server: ServerConfig
) -> list[tuple[EngineConfig, EngineProcess]]:
    from quire.engine.data_parallel.engine_configs import launch_engines  # only if asked for

    return launch_engines(engine, server.logging)


def _serve(
    server: ServerConfig,
    engines: Sequence[tuple[EngineConfig, EngineProcess]],
    sockets: tuple[socket.socket, socket.socket | None],
    *,
    urls: Sequence[str],
    tenants: tuple[Tenant, ...] | None,
) -> int:
    log = Log("server")
    listening, for_admins = sockets
    # Imported only now, in parallel with the engine process's imports.
    from quire.api.served_engine import served_engine
    from quire.api.server import run as run_server

    engine = served_engine(engines, server, log)
    announced = threading.Event()
    _start_progress(lambda: engine.loading, announced)

    def announce() -> None:
        announced.set()
        _announce(engine.card, engine.notes, _template_problems(engine), urls, log)

    try:
        path = engines[0][0].scheduler.tenants
        return run_server(
            engine,
            server,
            listening,
            log,
            announce=announce,
            for_admins=for_admins,
            tenants=tenants,
            read_tenants=None if path is None else lambda: _tenants_of(path, server),
            tenants_file=path,
        )
    finally:
        announced.set()


def _serve_with_workers(
    server: ServerConfig,
    engines: Sequence[tuple[EngineConfig, EngineProcess]],
    sockets: tuple[socket.socket, socket.socket | None],
    *,
    urls: Sequence[str],
) -> int:
    """Serve with several API processes, which this process supervises."""
    from quire.api.workers.supervisor import supervise

    log, loading, announced = Log("server"), [(0, 0)], threading.Event()
    _start_progress(lambda: loading[0], announced)

    def see(done_bytes: int, total_bytes: int) -> None:
        loading[0] = done_bytes, total_bytes

    def announce(card: ModelCard, notes: Sequence[str], problems: Sequence[str] | None) -> None:
        announced.set()
        _announce(card, notes, problems, urls, log)

    listening, for_admins = sockets
    try:
        return supervise(
            engines,
            server,
            listening,
            log,
            announce=announce,
            for_admins=for_admins,
            on_loading=see,
        )
    finally:
        announced.set()


def _log_start(
    server: ServerConfig, config: EngineConfig, urls: Sequence[str], *, is_open: bool
) -> None:
    log = Log("server")
    url, *admins = urls
    log.event(
        "loading",
        model=config.model.model or "the built-in model",
        address=url,
        **({"admin_address": admins[0]} if admins else {}),
    )
    if "*" in server.cors_origin and is_open:
        log.warning(
            "any web page may use this server through a browser that reaches it: no key is set"
        )


def _announce(
    card: ModelCard,
    notes: Sequence[str],
    problems: Sequence[str] | None,
    urls: Sequence[str],
    log: Log,
) -> None:
    """Report that requests are accepted. problems: of the chat templates; None: there are none."""
    for problem in problems or ():
        log.warning("chat template cannot be used", reason=problem)
    try:
        if not can_write(sys.stdout.fileno()):
            raise BlockingIOError("it is a full pipe without a reader")
        print(_summary(card, notes, problems, urls), flush=True)
    except OSError as error:  # requests are served nevertheless
        discard_output()
        log.warning("standard output cannot be written", reason=str(error), address=urls[0])


def _summary(
    card: ModelCard, notes: Sequence[str], problems: Sequence[str] | None, urls: Sequence[str]
) -> str:
    """Return the summary: what is served, where, in how much memory, and the start-up time."""
    weights = "" if card.quantization == "none" else f", weights {card.quantization}"
    if problems is None:
        problems = ["the model has no chat template (--chat-template)"] if card.generates else []
    kept = "" if card.kv_cache_dtype == card.dtype else f", KV {card.kv_cache_dtype}"
    lines = [
        f"model    {card.name} ({card.dtype}{weights}{kept}, {card.recipe}), "
        f"context {card.max_model_len} tokens",
        *(f"memory   {note}" for note in notes),
        *(f"chats    not served: {why}" for why in problems),
        *(f"{what}  {url}" for what, url in zip(("address", "admin  "), urls, strict=False)),
        f"ready in {_age_s():.2f} s",
    ]
    return "\n".join(lines)


def _template_problems(engine: ServedEngine) -> list[str] | None:
    """Return why chat templates are unusable, None without any; everything else is served."""
    template = engine.template
    return None if template is None else list(template.problems.values())


def _start_progress(loading: Callable[[], tuple[int, int]], announced: threading.Event) -> None:
    if sys.stderr.isatty() and sys.__stderr__ is not None:
        threading.Thread(
            target=_show_progress, args=(loading, announced), name="quire-progress", daemon=True
        ).start()


def _show_progress(loading: Callable[[], tuple[int, int]], announced: threading.Event) -> None:
    """Show a progress line on the terminal while weights are packed."""
    assert sys.__stderr__ is not None, "checked by the caller"
    terminal, shown = sys.__stderr__, False  # not a line of the log
    while not announced.wait(_PROGRESS_S):
        done_bytes, total_bytes = loading()
        if total_bytes:
            shown = True
            share = 100 * done_bytes // total_bytes
            terminal.write(f"\rweights {share:3d} % of {total_bytes / 2**20:.0f} MiB")
            terminal.flush()
    if shown:
        terminal.write("\r\033[K")


def _age_s() -> float:
    """Return the seconds since this process started; 0 if the system does not report it."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return 0.0
    # The command's name, field 2, is in parentheses and may hold anything; field 22 is the start.
    started_ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
