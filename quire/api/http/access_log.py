"""The access log: a line for each request, when its answer has ended.

Route, status, times and counts; never a raw path, a prompt, a text or a key. /health, /metrics and
what browsers ask beforehand are logged when they fail, else at the level debug. Knows no route.
Always holds: each form has the same fields, and a request has one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from quire.api.generation.choice_streams import ChoiceStreams
from quire.api.generation.request_registry import OpenRequest
from quire.base.log import Log
from quire.base.report import Field
from quire.config.tenants import Tenant

PREFLIGHT = "preflight"
# What a caller who left before there was a status is counted as.
GONE = 499
_POLLED = frozenset({"/health", "/metrics", PREFLIGHT})


class AccessLog:
    """Of one server. form: as --access-log has it."""

    def __init__(self, log: Log, form: Literal["text", "json", "off"]) -> None:
        self._log = log
        self._form = form

    def note(
        self,
        state: Mapping[str, Any],
        *,
        request_id: str,
        method: str,
        route: str,
        status: int,
        took_ms: float,
    ) -> None:
        """A request is over. state: what the layers below have left of it."""
        if self._form == "off":
            return
        level = "debug" if route in _POLLED and status < 400 else "info"
        fields: dict[str, Field] = {
            "request": request_id,
            "method": method,
            "route": route,
            "status": status,
            "took_ms": round(took_ms, 1),
            **_whose(state),
        }
        answers = state.get("answers")
        if isinstance(answers, ChoiceStreams):
            fields |= _told(answers)
        live = state.get("live")
        if isinstance(live, OpenRequest) and live.error is not None and status != GONE:
            fields["error"] = live.error
        if self._form == "json":
            self._log.event_as_json("request", fields, level=level)
        elif level == "debug":
            self._log.debug("request", **fields)
        else:
            self._log.event("request", **fields)


def _whose(state: Mapping[str, Any]) -> dict[str, Field]:
    """The caller's own name for the request, its trace, and its tenant."""
    fields: dict[str, Field] = {name: state[name] for name in ("name", "trace") if state.get(name)}
    tenant = state.get("tenant")
    if isinstance(tenant, Tenant) and not tenant.is_default:
        fields["tenant"] = tenant.name
    return fields


def _told(answers: ChoiceStreams) -> dict[str, Field]:
    usage, first_ms = answers.usage, answers.first_token_ms
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "finish": answers.finish_reasons,
        **({} if first_ms is None else {"ttft_ms": round(first_ms, 1)}),
    }
