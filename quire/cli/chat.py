"""`quire chat`: hold a conversation in the terminal, with streamed answers.

On a terminal it prompts and keeps a line history. Reading from a pipe it answers each line as a
question and exits with code 2 if one could not be answered. Lines that begin with / are commands.
Ctrl-C stops an answer (its text stays in the conversation), Ctrl-D ends the program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import TextIO

from quire.base.errors import InvalidParameter, QuireError, StepRowError, WorkerError
from quire.cli.chat_backends import ChatBackend, LocalBackend, RemoteBackend
from quire.cli.exit_codes import REFUSED, SUCCESS
from quire.cli.options import (
    add_engine_arguments,
    add_sampling_arguments,
    check_utf8,
    engine_settings,
    given_sampling,
)
from quire.cli.pull import add_pull_flag, pull_if_asked
from quire.cli.server_arguments import add_key_argument
from quire.config.flags import in_flags

# The engine settings that are useful for a single conversation.
_SETTINGS = frozenset(
    {
        "dtype",
        "quantization",
        "head_precision",
        "keep",
        "max_model_len",
        "convert",
        "chat_template",
        "block_size",
        "max_num_batched_tokens",
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "kv_cache_dtype",
        "executor",
        "device",
        "numerics",
        "enforce_eager",
        "num_threads",
        "pack_cache",
    }
)

HELP = """\
/help          this text
/reset         forget the conversation, keep the system text
/system TEXT   set the system text and start over; without TEXT, remove it
/quit          leave (as Ctrl-D does)
//...          send a line that begins with a slash
Ctrl-C         stop the answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    add_engine_arguments(parser, only=_SETTINGS)
    add_pull_flag(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system text")
    parser.add_argument(
        "--url",
        default="",
        metavar="URL",
        help="use an OpenAI-compatible server; MODEL is then the model's name there",
    )
    add_key_argument(parser, "key for --url")
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Converse until the input ends."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    backend = _backend(arguments)
    try:
        if interactive:
            print(f"{backend.name}. /help lists the commands, Ctrl-D leaves.")
        lines = _typed_lines() if interactive else _piped_lines(sys.stdin)
        talk = Conversation(
            backend, sys.stdout, sys.stderr, system=arguments.system, is_typed=interactive
        )
        talk.run(lines)
    finally:
        backend.close()
    return REFUSED if talk.num_refused and not interactive else SUCCESS


def _backend(arguments: argparse.Namespace) -> ChatBackend:
    settings, sampling = engine_settings(arguments), given_sampling(arguments)
    if not arguments.url:
        pull_if_asked(arguments)
        return LocalBackend(arguments.model, settings, sampling)
    if settings:
        raise InvalidParameter(
            f"{in_flags(next(iter(settings)))} configures an engine in this process, but --url "
            "names a server; leave one out"
        )
    return RemoteBackend(
        arguments.url, model=arguments.model, api_key=arguments.api_key, sampling=sampling
    )


class Conversation:
    """Hold the messages and run the conversation. Writes answers to `out`, notices to `notes`.

    If a request fails, its error is noted and its message dropped; only a failed engine or server
    ends the loop, with its error. num_refused: number of requests that failed. is_typed: the lines
    are typed at a terminal, not read from a pipe.
    """

    def __init__(
        self,
        backend: ChatBackend,
        out: TextIO,
        notes: TextIO,
        *,
        system: str = "",
        is_typed: bool = True,
    ) -> None:
        self._backend = backend
        self._out = out
        self._notes = notes
        self._system = system
        self._is_typed = is_typed
        self.messages: list[dict[str, str]] = []
        self.num_refused = 0
        self._reset()

    def run(self, lines: Iterator[str]) -> None:
        """Answer lines until they end or until /quit."""
        for line in lines:
            if line.startswith("/") and not line.startswith("//"):
                if not self._run_command(line):
                    return
            elif line.strip():
                self._ask(line[1:] if line.startswith("//") else line)

    def _run_command(self, line: str) -> bool:
        """Run a command; return False to leave."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._reset()
                self._note("conversation forgotten")
            case "/system":
                self._system = rest.strip()
                self._reset()
                self._note("system text set" if self._system else "system text removed")
            case "/help":
                self._note(HELP)
            case _:
                self._note(f"no command {command}; /help lists them")
        return True

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _ask(self, text: str) -> None:
        answer: list[str] = []
        self.messages.append({"role": "user", "content": text})
        try:
            check_utf8(text, "this line" if self._is_typed else "standard input")
            self._backend.stream_answer(self.messages, self._writer(answer))
        except KeyboardInterrupt:
            self._note(" [stopped]")
        except QuireError as error:
            self._end_line(answer)
            if isinstance(error, WorkerError) and not isinstance(error, StepRowError):
                raise
            self.num_refused += 1
            self.messages.pop()
            self._note(
                f"{error} (/reset forgets the conversation)"
                if self._is_typed
                else f"quire chat: {error}"
            )
            return
        self._end_line(answer)
        self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _writer(self, answer: list[str]) -> Callable[[str], None]:
        def write(text: str) -> None:
            answer.append(text)
            self._out.write(text)
            self._out.flush()

        return write

    def _end_line(self, answer: list[str]) -> None:
        if not answer or not answer[-1].endswith("\n"):
            self._out.write("\n")
        self._out.flush()

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)


def _typed_lines() -> Iterator[str]:
    """Yield lines typed at a prompt, with readline's editing and history."""
    with suppress(ImportError):  # optional in Python builds
        import_module("readline")  # input() uses it once it is loaded
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D or /quit leaves")


def _piped_lines(stream: TextIO) -> Iterator[str]:
    for line in stream:
        yield line.rstrip("\r\n")
