"""ServerConfig: the settings of the HTTP server.

A field's metadata holds the help text of its flag (quire/config/flags.py builds the flags). Only
single values are checked here, and settings that contradict each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quire.base.cors import check_origin
from quire.base.errors import SettingError
from quire.base.log_process import LogSettings
from quire.config.settings import at_least, at_most, one_of, setting

# The lists below repeat names of a package that this package must not import.
# quire/output_parsers/registry.py
TOOL_PARSERS = (
    *("auto", "none", "hermes", "qwen3_coder", "glm", "llama3_json", "pythonic", "mistral"),
    *("deepseek", "kimi", "granite", "phi", "harmony", "json"),
)
REASONING_PARSERS = ("auto", "none", "think", "mistral", "seed", "kimi", "harmony")
# Each process holds a tokenizer in memory.
MAX_API_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """HTTP server."""

    host: str = setting(
        "127.0.0.1", "address to listen on; anything but loopback requires --api-key"
    )
    port: int = setting(8000, "port to listen on; 0 takes a free one and prints it")
    uds: str | None = setting(
        None, "listen on a Unix socket at this path, instead of an address and a port"
    )
    grpc_port: int | None = setting(
        None,
        "also serve gRPC at this port of --host (KServe v2, quire.v1.Generation, health); 0 takes "
        "a free one; needs quire-llm[grpc]; default: none",
    )
    root_path: str = setting("", "path prefix under which a proxy serves this server, as in /llm")
    tls_cert: str | None = setting(None, "PEM file with the certificate chain; enables HTTPS")
    tls_key: str | None = setting(
        None, "PEM file with the certificate's private key; default: the file of --tls-cert"
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "allow browser pages of this origin (as in https://app.example), or of any (*); may be "
        "repeated; default: the server's own origin only",
    )
    web_page: bool = setting(True, "serve the web page at / to browsers (chat, engine view)")
    api_processes: int = setting(
        1, "API processes (HTTP, chat templates, tokenization) of the engine or engines: 1 to 64"
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "largest request body, as in 8MiB", flag="max-body"
    )
    keep_alive_s: float = setting(
        75.0,
        "seconds that an idle connection is kept open for the next request; closed earlier if file "
        "descriptors run short",
        flag="keep-alive-seconds",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "API key; may be repeated; other users can see command lines: prefer QUIRE_API_KEY or "
        "--api-key-file",
        secret=True,
        section="Keys and access",
    )
    api_key_file: str | None = setting(
        None, "file of API keys, one per line; they are accepted beside those of --api-key"
    )
    insecure: bool = setting(False, "allow listening beyond loopback without an API key")
    share_prefixes: bool = setting(
        False,
        "share cached prefixes between tenants and keys: faster for common prefixes, but response "
        "times then reveal which prompts others have sent",
    )
    admin_key_file: str | None = setting(
        None, "file of admin keys, one per line; with it an --api-key grants no admin access"
    )
    admin_port: int | None = setting(
        None,
        "serve the admin routes only at this port of 127.0.0.1; 0 takes a free one; default: at "
        "the main port, for local clients or with an admin key",
    )
    record_content: bool = setting(
        False,
        "let admins record token ids of prompts and answers (quire record --content), which show "
        "what users sent",
    )
    trust_request_chat_template: bool = setting(
        False, "run chat templates from requests, which are programs from untrusted clients"
    )
    max_output_tokens: int | None = setting(
        None,
        "maximum output tokens a request may ask for; also limits requests without max_tokens",
        section="Requests and answers",
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
    request_timeout_s: float | None = setting(
        None, "time limit of a request in seconds; default: none", flag="request-timeout"
    )
    heartbeat_s: float = setting(
        15.0,
        "seconds without output after which a stream sends a comment, so that proxies and clients "
        "keep it open; 0: none",
        flag="heartbeat-seconds",
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
    responses_store: str | None = setting(
        None,
        "SQLite file of stored responses (/v1/responses), kept across restarts; default: in memory",
        section="Stored responses and batches",
    )
    responses_store_bytes: int = setting(
        64 * 1024 * 1024,
        "size of stored responses for each API key, beyond which the least recently used are "
        "removed; 0: none are stored",
        flag="responses-store-size",
    )
    batch_store: str | None = setting(
        None,
        "SQLite file of files and batches (/v1/files, /v1/batches), which continue after a "
        "restart; default: these routes are off",
    )
    batch_store_bytes: int = setting(
        8 * 1024 * 1024 * 1024,
        "size of the files of each API key, beyond which uploads are refused",
        flag="batch-store-size",
    )
    batch_lines: int = setting(
        8,
        "lines of batches that run at once on an idle server; each open request of others takes "
        "the place of one",
    )
    access_log: Literal["text", "json", "off"] = setting(
        "text",
        "log one line per request: in the log format, with all lines as JSON, or none",
        section="Logs and traces",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "minimum severity of log lines, for all processes"
    )
    log_format: Literal["text", "json"] | None = setting(
        None,
        "format of all log lines, including those of libraries and tracebacks; default: json with "
        "--access-log json, else text",
    )
    otlp_endpoint: str | None = setting(
        None,
        "send an OpenTelemetry span of each request to this OTLP/HTTP collector, as in "
        "http://localhost:4318; needs quire-llm[otel]; default: OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    grace_s: float = setting(
        30.0,
        "seconds for running requests to finish after SIGTERM",
        flag="grace-seconds",
        section="Shutdown and restart",
    )
    watchdog_s: float = setting(
        60.0,
        "seconds without progress, with work pending, after which /health reports failure, and "
        "--restart-engine ends the engine",
        flag="watchdog-seconds",
    )
    restart_engine: bool = setting(
        False,
        "start the engine again when it dies or makes no progress, and continue open requests "
        "exactly",
    )
    restart_limit: int = setting(
        5,
        "restarts of the engine in a row, each within 30 seconds of service, after which the "
        "server ends with exit code 1",
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
            check_origin(origin)
        one_of("access_log", self.access_log, ("text", "json", "off"))
        one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        if self.log_format is not None:
            one_of("log_format", self.log_format, ("text", "json"))
        if self.log_format == "text" and self.access_log == "json":
            raise SettingError(
                "log_format is 'text' and access_log is 'json', but one log has one format; leave "
                "one of them out"
            )
        if any(not key.strip() for key in self.api_key):
            raise SettingError(
                "an API key is empty (--api-key, QUIRE_API_KEY); give a key, or leave it out"
            )
        if not all(key.isascii() and key.isprintable() for key in self.api_key):
            raise SettingError(
                "an API key has characters that no HTTP header can hold (--api-key, QUIRE_API_KEY, "
                "--api-key-file); give one of printable ASCII characters"
            )
        if self.tls_key is not None and self.tls_cert is None:
            raise SettingError("tls_key is given without tls_cert; give the certificate too")
        if self.otlp_endpoint is not None and not _HTTP_URL.fullmatch(self.otlp_endpoint):
            raise SettingError(
                f"otlp_endpoint is {self.otlp_endpoint!r}; give the http:// or https:// address of "
                "a collector, as in http://localhost:4318"
            )
        if self.max_output_tokens is not None:
            at_least("max_output_tokens", self.max_output_tokens, 1)
        one_of("unknown_fields", self.unknown_fields, ("refuse", "warn"))
        one_of("tool_call_parser", self.tool_call_parser, TOOL_PARSERS)
        one_of("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        at_least("grace_s", self.grace_s, 0)
        if self.request_timeout_s is not None:
            at_least("request_timeout_s", self.request_timeout_s, 0.001)
        at_least("heartbeat_s", self.heartbeat_s, 0)
        at_least("keep_alive_s", self.keep_alive_s, 0)
        at_least("stall_s", self.stall_s, 0.01)
        at_least("resume_s", self.resume_s, 0)
        at_least("resume_memory_bytes", self.resume_memory_bytes, 0)
        at_least("responses_store_bytes", self.responses_store_bytes, 0)
        at_least("batch_store_bytes", self.batch_store_bytes, 1)
        at_least("batch_lines", self.batch_lines, 1)
        if self.batch_store is not None and self.api_processes > 1:
            raise SettingError(
                f"batch_store is given and api_processes is {self.api_processes}; one process has "
                "the journal of batches: leave api_processes at 1, or leave batch_store out"
            )
        if self.grpc_port is not None:
            at_least("grpc_port", self.grpc_port, 0)
            at_most("grpc_port", self.grpc_port, 65_535, "the last port")
        if self.grpc_port is not None and self.api_processes > 1:
            raise SettingError(
                f"grpc_port is given and api_processes is {self.api_processes}; one process serves "
                "gRPC: leave api_processes at 1, or leave grpc_port out"
            )
        at_least("max_body_bytes", self.max_body_bytes, 1024)
        at_least("watchdog_s", self.watchdog_s, 0.001)
        at_least("restart_limit", self.restart_limit, 1)

    @property
    def logging(self) -> LogSettings:
        """Return the log settings of the server's processes."""
        form = self.log_format or ("json" if self.access_log == "json" else "text")
        return LogSettings(level=self.log_level, form=form)


_HTTP_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


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
