"""The lines of results of message batches: the LineForm of Anthropic's API.

Knows no journal. Always holds: a result has one of the types succeeded, errored, canceled and
expired, and an error the form of the same error at /v1/messages.
"""

from __future__ import annotations

import msgspec

from quire.api.anthropic.dialect import ANTHROPIC, error_type
from quire.api.batches.line_form import CANCELLED, EXPIRED

# The types of results without an answer.
_TYPES = {EXPIRED: "expired", CANCELLED: "canceled"}
_STATUSES = {"server_ended": 500, "invalid_api_key": 401}


class BatchResults:
    """A LineForm."""

    dialect, has_files = ANTHROPIC, False

    def answered(self, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
        """See LineForm."""
        if status == 200:
            return _line(custom_id, {"type": "succeeded", "message": msgspec.Raw(body)})
        return _line(custom_id, {"type": "errored", "error": msgspec.Raw(body)})

    def unanswered(self, custom_id: str, code: str, message: str) -> bytes:
        """See LineForm."""
        if code in _TYPES:
            return _line(custom_id, {"type": _TYPES[code]})
        error = {"type": error_type(_STATUSES[code]), "message": message}
        body = {"type": "error", "error": error, "request_id": None}
        return _line(custom_id, {"type": "errored", "error": body})


def _line(custom_id: str, result: object) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"
