"""An answer that a grammar holds to be calls or else words of some form: which of both it is.

It is calls where it begins as they do, character by character; else all of it is content, whatever
a dialect's marks or names stand in it. Knows no grammar and no dialect. Always holds: which it is
depends on the text's beginning alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader
from quire.output_parsers.registry import Dialect, Read
from quire.output_parsers.tools import Tools

_NOTHING = Markers(())


def calls_or_words(dialect: Dialect, begins: Iterable[str]) -> Dialect:
    """The dialect, for answers that are calls only where they begin as one of these does."""
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
