"""The lines of output files of batches: the LineForm of OpenAI's API.

Knows no journal. Always holds: a line has a response or an error, never both.
"""

from __future__ import annotations

import msgspec

from quire.api.batches.stored_files import new_id
from quire.api.openai.dialect import OPENAI


class OutputLines:
    """A LineForm."""

    dialect, has_files = OPENAI, True

    def answered(self, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
        """See LineForm."""
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        return _line(custom_id, response, None)

    def unanswered(self, custom_id: str, code: str, message: str) -> bytes:
        """See LineForm."""
        return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: object, error: object) -> bytes:
    entry = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(entry) + b"\n"
