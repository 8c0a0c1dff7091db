"""Parse an answer that a grammar constrains to either calls or content of some form.

It is calls if it begins, character by character, as calls do; otherwise all of it is content, even
if it contains the marks or names of the format. The decision depends on the beginning alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader
from quire.output_parsers.registry import Read, ToolCallFormat
from quire.output_parsers.tools import Tools

_NOTHING = Markers(())


def calls_or_content(dialect: ToolCallFormat, begins: Iterable[str]) -> ToolCallFormat:
    """Return a format that parses calls only in answers that begin with one of `begins`."""
    return replace(dialect, read=partial(_read_either, begins=Markers(begins), read=dialect.read))


def _read_either(
    reader: Reader, sink: Sink, tools: Tools, *, begins: Markers, read: Read
) -> Parse[None]:
    reader.record()
    begun, character = "", (yield from reader.space())
    while character and begun + character in begins.openings:
        begun += yield from reader.char()
        if begun in begins.texts:
            break
        character = yield from reader.peek()
    reader.unread(reader.recorded())
    if begun in begins.texts:
        yield from read(reader, sink, tools)
    else:
        yield from reader.until(_NOTHING, sink.content)
