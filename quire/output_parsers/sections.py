"""Parse tool calls in a section: DeepSeek (V3, R1, V3.1) and Kimi K2.

    <section begin> <call begin> head <separator> arguments <call end> ... <section end>

The head names the function; in DeepSeek's older form it holds the call's type, and the name and a
```json fence follow the separator. Text outside of the section is content.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.output_parsers.json_call import End, read_value
from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader, ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The marks of one format."""

    begins: str
    call_begins: str
    separator: str
    call_ends: str
    ends: str

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all marks."""
        return (self.begins, self.call_begins, self.separator, self.call_ends, self.ends)


_BAR = "\N{FULLWIDTH VERTICAL LINE}"
DEEPSEEK = Section(
    begins=f"<{_BAR}tool▁calls▁begin{_BAR}>",
    call_begins=f"<{_BAR}tool▁call▁begin{_BAR}>",
    separator=f"<{_BAR}tool▁sep{_BAR}>",
    call_ends=f"<{_BAR}tool▁call▁end{_BAR}>",
    ends=f"<{_BAR}tool▁calls▁end{_BAR}>",
)
KIMI = Section(
    begins="<|tool_calls_section_begin|>",
    call_begins="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_ends="<|tool_call_end|>",
    ends="<|tool_calls_section_end|>",
)


def read_sections(reader: Reader, sink: Sink, form: Section) -> Parse[None]:
    """Parse content and sections; the mark that begins a section is optional."""
    outside = Markers((form.begins, form.call_begins))
    within = Markers((form.call_begins, form.ends))
    while mark := (yield from reader.until(outside, sink.content, sink.unfinished)):
        sink.border()
        if mark == form.begins:
            mark = yield from reader.until(within, ignore)
        while mark == form.call_begins:
            mark = yield from _call(reader, sink, form)
            if mark not in (form.call_begins, form.ends):
                mark = yield from reader.until(within, ignore)


def _call(reader: Reader, sink: Sink, form: Section) -> Parse[str]:
    """Parse one call and return the mark at which it ended."""
    ends = Markers((form.call_ends, form.call_begins, form.ends))
    head: list[str] = []
    reader.record()
    mark = yield from reader.until(Markers((form.separator, *ends.texts)), head.append)
    name, depth = "".join(head), 0
    if mark == form.separator and (yield from reader.space()) != "{":
        line: list[str] = []
        mark = yield from reader.until(Markers(("\n", "{", "`", *ends.texts)), line.append)
        name = "".join(line)
        if mark in ("\n", "`"):
            mark = yield from reader.until(Markers(("{", *ends.texts)), ignore)
        depth = int(mark == "{")
    raw = reader.recorded()
    name = _name(name)
    if mark not in (form.separator, "{") or not name:
        next_call = mark if mark == form.call_begins else ""
        give_back = sink.content if mark else sink.unfinished
        give_back(form.call_begins + raw[: len(raw) - len(next_call)])
        return mark
    sink.begin(name)
    sink.arguments("{" * depth)
    end = yield from read_value(reader, sink.arguments, ends, depth=depth)
    if end is End.MARKER:
        return form.call_ends
    sink.broken = end is End.CUT
    return (yield from reader.until(ends, ignore))


def _name(head: str) -> str:
    """Return the function's name; Kimi's heads are functions.NAME:NUMBER."""
    name, colon, number = head.strip().rpartition(":")
    bare = name if colon and number.isdigit() else head.strip()
    return bare.removeprefix("functions.")
