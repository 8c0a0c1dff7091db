"""What each error of the API means and what to do: for /docs and docs/errors.md.

Statuses and codes are those of quire/api/http/errors.py, meanings the docstrings of the classes.
Always holds: every class of that table has a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.api.http.errors import (
    HEAD_TOO_LARGE,
    SHAPES,
    Aborted,
    ErrorShape,
    ForeignPage,
    MethodNotAllowed,
    NotAdmin,
    NothingToChoose,
    ReadElsewhere,
    ReaderGone,
    ResumeGone,
    SlowReader,
    UnknownBatch,
    UnknownConversation,
    UnknownFile,
    UnknownRequest,
    UnknownResponse,
    UnknownRoute,
    UnsupportedEncoding,
)
from quire.base import errors
from quire.base.errors import QuireError

_AT_START = "Report it: start-up checks this; the server's log has more."

ADVICE: Mapping[type[QuireError], str] = {
    errors.RequestError: "Correct the request as the message says; sent again, it fails again.",
    errors.InvalidParameter: (
        "Correct the field in `param`; the message names the values that are allowed."
    ),
    errors.ContextTooLong: (
        "Shorten the prompt or lower `max_tokens`; `GET /v1/models` has the context length as "
        "`max_model_len`. On the server: a larger `--max-model-len` or `--kv-cache-memory`."
    ),
    errors.BodyTooLarge: "Send less, or raise `--max-body`.",
    UnsupportedEncoding: "Send the JSON without compression.",
    errors.UnknownModel: (
        "Use a name that `GET /v1/models` lists, or leave `model` out; `--served-model-name` adds "
        "names."
    ),
    UnknownRoute: "Use the path that the message names; `GET /docs` lists all.",
    MethodNotAllowed: "Use a method of the `allow` header.",
    UnknownRequest: (
        "Check the id and the key: a request is visible to the key that sent it, until a minute "
        "after its end."
    ),
    UnknownConversation: "Check the id and the key; `GET /v1/conversations/ID/items` has items.",
    UnknownFile: "List the files of the key with GET /v1/files.",
    UnknownBatch: "List the batches of the key with GET /v1/batches.",
    UnknownResponse: (
        "Check the id and the key; send the conversation as `input` instead, or raise "
        "`--responses-store-size` on the server."
    ),
    ResumeGone: "Send the request again; resume within `--resume-seconds`.",
    NothingToChoose: (
        "Loosen `bad_words`, `allowed_token_ids`, `logit_bias` or n-gram bans, which exclude every "
        "token that the grammar allows."
    ),
    Aborted: "Nothing: `DELETE /v1/requests/{id}` or its POST form ended the request.",
    SlowReader: "Read the stream faster, or ask for less; `--stall-seconds` is the limit.",
    ReaderGone: "Send the request again; `--resume-seconds` is how long a stream waits.",
    ReadElsewhere: "Read on at the newer connection; two clients resumed one stream.",
    ForeignPage: (
        "Start the server with a key, or allow the page by `--cors-origin`; a proxy must send "
        "`Host: localhost` to a server without keys."
    ),
    NotAdmin: (
        "Use a key of `--admin-key-file` or of a tenant with `admin = true`, or ask from the same "
        "machine."
    ),
    errors.NotAuthorized: "Send `Authorization: Bearer KEY` with a key of the server.",
    errors.OverloadedError: (
        "Send the request again after `retry-after`. If it persists, raise "
        "`--max-queued-requests`, or serve with more memory or machines."
    ),
    errors.ShuttingDown: "Send the request to another server, or again after the restart.",
    errors.QueueTimedOut: "Send the request again later, or raise `--queue-timeout`.",
    errors.DeadlineMissed: (
        "Send the request again after `retry-after`, or with a longer `ttft_slo_ms` or "
        "`deadline_ms`."
    ),
    errors.TenantLimit: (
        "Send the request again after `retry-after`, or raise the tenant's `max_queued`."
    ),
    errors.TimedOut: (
        "Ask for fewer tokens, or allow more time (`--request-timeout`, `deadline_ms`)."
    ),
    errors.WorkerError: (
        "Send the request again when `GET /health` is ok. The server exits with 1, and its log "
        "names the cause."
    ),
    errors.StepRowError: (
        "Send the request again; if it fails again, report it with the line of the log. Other "
        "requests are unaffected."
    ),
    errors.PoisonRequest: (
        "Do not send it again; report it with the lines of the server's log about the engine's "
        "deaths. Other requests went on."
    ),
    errors.DeviceLost: "Restart the server after reading the system's log (`dmesg`).",
    errors.ModelError: _AT_START,
    errors.SettingError: _AT_START,
    errors.CapacityError: _AT_START,
    QuireError: "Report it with the lines of the server's log.",
}
_HEAD_MEANING = "The request's head is over 64 KiB or has over 128 headers."
_HEAD_ADVICE = "Send fewer or shorter headers and cookies."


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """One line of the table of errors. code: None for errors that have none."""

    status: int
    code: str | None
    meaning: str
    advice: str


def error_rows() -> list[ErrorRow]:
    """Return a row for each status and code that the server can send, in order."""
    rows = [_row(SHAPES[kind], _first_paragraph(kind), ADVICE[kind]) for kind in SHAPES]
    rows.append(_row(HEAD_TOO_LARGE, _HEAD_MEANING, _HEAD_ADVICE))
    return sorted(rows, key=lambda row: (row.status, row.code or ""))


def _row(shape: ErrorShape, meaning: str, advice: str) -> ErrorRow:
    return ErrorRow(
        status=shape.status,
        code=shape.code,
        meaning=meaning,
        advice=advice,
    )


def _first_paragraph(kind: type[QuireError]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())
