"""Read the multipart form of a file upload (RFC 7578), piece by piece.

Strict: only what the form of POST /v1/files needs. A file's name is a label and never a path. Knows
no route and no store. Always holds: no more than one piece of the body, one line of a head and one
delimiter are in memory; a form without its closing delimiter is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.base.errors import RequestError
from quire.base.show import show

_MAX_HEAD_BYTES = 8 * 1024
_MAX_PARTS = 16
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_TYPE = re.compile(r'multipart/form-data\s*;\s*boundary=(?:"([^"]*)"|([^\s;"]*))\s*', re.I)
_DISPOSITION = re.compile(
    r'form-data\s*;\s*name="([^"\\]{1,128})"(?:\s*;\s*filename="((?:[^"\\]|\\.)*)")?'
    r"(?:\s*;\s*filename\*=[^;]*)?\s*",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Part:
    """The head of a part: the name of its field, and of its file if it is one."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a Content-Type names. Raises RequestError."""
    match = _TYPE.fullmatch(content_type)
    boundary = "" if match is None else match[1] or match[2] or ""
    if not _BOUNDARY.fullmatch(boundary):
        raise RequestError(
            f"content-type is {show(content_type)}; send a form: multipart/form-data; boundary=..."
        )
    return boundary.encode("ascii")


class MultipartReader:
    """Turns pieces of a body into heads of parts (Part) and pieces of their contents (bytes)."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._rest = b"\r\n"  # the first delimiter has no line end before it
        self._num_parts = 0
        self._state = "preamble"

    def feed(self, piece: bytes) -> Iterator[Part | bytes]:
        """Yield what `piece` completes. Raises RequestError."""
        self._rest += piece
        while True:
            if self._state == "end":
                self._rest = b""
                return
            if self._state == "delimiter":
                if not self._read_delimiter_end():
                    return
            elif self._state == "head":
                part = self._read_head()
                if part is None:
                    return
                yield part
            else:
                content, found = self._read_content()
                if self._state == "preamble" and content:
                    raise RequestError("the form does not begin with its boundary")
                if content:
                    yield content
                if not found:
                    return
                self._state = "delimiter"

    def close(self) -> None:
        """Check that the form is whole. Raises RequestError."""
        if self._state != "end":
            raise RequestError(
                "the form ends before its closing boundary; send all of it, with the right "
                "content-length"
            )

    def _read_content(self) -> tuple[bytes, bool]:
        """Return the content up to a delimiter, and whether there is one."""
        at = self._rest.find(self._delimiter)
        if at >= 0:
            content, self._rest = self._rest[:at], self._rest[at + len(self._delimiter) :]
            return content, True
        # A delimiter may begin in the last bytes.
        num_kept = len(self._delimiter) - 1
        start = self._rest.rfind(b"\r", max(0, len(self._rest) - num_kept))
        while start >= 0 and not self._delimiter.startswith(self._rest[start:]):
            start = self._rest.rfind(b"\r", max(0, len(self._rest) - num_kept), start)
        at = len(self._rest) if start < 0 else start
        content, self._rest = self._rest[:at], self._rest[at:]
        return content, False

    def _read_delimiter_end(self) -> bool:
        """Read what follows a delimiter: a line end, or `--` at the end of the form."""
        if len(self._rest) < 2:
            return False
        mark, self._rest = self._rest[:2], self._rest[2:]
        if mark == b"--":
            self._state = "end"
        elif mark == b"\r\n":
            self._state = "head"
        else:
            raise RequestError("a boundary of the form is followed by neither -- nor a line end")
        return True

    def _read_head(self) -> Part | None:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if len(head) > _MAX_HEAD_BYTES:
            raise RequestError(f"the head of a part has more than {_MAX_HEAD_BYTES} bytes")
        if not found:
            return None
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise RequestError(f"the form has more than {_MAX_PARTS} parts; send file and purpose")
        self._rest = rest
        self._state = "content"
        return _part_of(head)


def _part_of(head: bytes) -> Part:
    try:
        lines = head.decode("utf-8").split("\r\n")
    except UnicodeDecodeError:
        raise RequestError("the head of a part is not UTF-8") from None
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    encoding = headers.get("content-transfer-encoding", "binary").lower()
    if encoding not in ("binary", "8bit", "7bit"):
        raise RequestError(
            f"a part has content-transfer-encoding {show(encoding)}; send the bytes as they are"
        )
    disposition = headers.get("content-disposition", "")
    match = _DISPOSITION.fullmatch(disposition)
    if match is None:
        raise RequestError(
            f"a part has content-disposition {show(disposition)}; send form-data with a name, and "
            "for the file a filename"
        )
    filename = match[2]
    return Part(match[1], None if filename is None else re.sub(r"\\(.)", r"\1", filename))
