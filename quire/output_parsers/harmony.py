"""Parse gpt-oss's channels: messages with headers that name role, channel and recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with <|start|>assistant, so an answer begins inside a header. Channel analysis is
reasoning; a message to functions.NAME is a call and its body the arguments; all other bodies are
content. A text without a header is content as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.output_parsers.parsed_answer import PHASES, Sink
from quire.output_parsers.reader import Markers, Parse, Reader, ignore

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_BODY_ENDS = Markers((START, END, CALL, RETURN))
_HEADER_ENDS = Markers((MESSAGE, START, END, CALL, RETURN))
_TO = re.compile(r"\bto=([^\s<]+)")
_PHASES = {"commentary": PHASES[0], "final": PHASES[1]}
_IN_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def read_harmony(reader: Reader, sink: Sink, *, calls: bool) -> Parse[None]:
    """Parse consecutive messages. calls: whether messages to functions are calls."""
    if (yield from _has_no_header(reader)):
        yield from reader.until(_BODY_ENDS, sink.content)
    give_back = sink.content
    while True:
        begun_at = reader.at_chars
        header: list[str] = []
        mark = yield from reader.until(_HEADER_ENDS, header.append)
        if not mark:
            _give_back(give_back, "".join(header))
            return
        give_back = ignore  # between messages there are headers only
        if mark != MESSAGE:
            continue
        mark = yield from _body(reader, sink, "".join(header), begun_at, calls=calls)
        if not mark:
            return
        if mark != START:
            yield from reader.until(Markers((START,)), ignore)


def _has_no_header(reader: Reader) -> Parse[bool]:
    """Return whether the text begins with none of the things that a header may begin with."""
    for opening in (CHANNEL, START, MESSAGE, "to="):
        if (yield from reader.opens_with(opening)):
            reader.unread(opening)
            return False
    return bool((yield from reader.peek()))


def _give_back(content: Callable[[str], None], header: str) -> None:
    """Drop a truncated header; a text without header marks is content."""
    if CHANNEL not in header and "to=" not in header and header.strip() not in ("", "assistant"):
        content(header)


def _body(reader: Reader, sink: Sink, header: str, begun_at: int, *, calls: bool) -> Parse[str]:
    """Parse the body of a message according to its header, and return the mark that ended it."""
    to, channel = _TO.search(header), _IN_CHANNEL.search(header)
    if calls and to is not None and to[1].startswith("functions."):
        sink.begin(to[1].removeprefix("functions."))
        arguments: list[str] = []

        def argue(text: str) -> None:
            arguments.append(text)
            sink.arguments(text)

        mark = yield from reader.until(_BODY_ENDS, argue)
        # A grammar ends a forced call with its arguments, without a mark.
        sink.broken = not mark and not _is_json("".join(arguments))
        return mark
    if channel is not None and channel[1] == "analysis":
        sink.paragraph("reasoning")
        mark = yield from reader.until(_BODY_ENDS, sink.reasoning)
        sink.reasoned.append((begun_at, reader.at_chars))
        return mark
    sink.paragraph("content", "" if channel is None else _PHASES.get(channel[1], ""))
    return (yield from reader.until(_BODY_ENDS, sink.content))


def _is_json(text: str) -> bool:
    """Return whether a text is a complete JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
