"""The `quire` command: finds the verb, runs it, and turns errors into words and an exit code.

Each verb is a module of this folder with `add_arguments(parser)` and `run(arguments) -> int`, and
is imported only when it is used: start-up is felt. Exit codes: 0 done, 1 the engine or a server
failed, 2 what was asked cannot be done, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn, Protocol, cast

from quire.base.errors import QuireError, SettingError, WorkerError
from quire.cli.output import lose_output

VERBS = {
    "serve": "start an OpenAI-compatible HTTP server",
    "chat": "talk to a model in the terminal",
    "complete": "continue one prompt",
    "bench": "measure speed on this machine",
    "simulate": "replay a trace through the scheduler in virtual time, policies side by side",
    "profile": "where a step's time goes, and what this machine would allow",
    "program": "print what the engine runs for a model, with bytes and operations",
    "completion": "print a shell completion script",
}
_EXIT_FAILED = 1
_EXIT_REFUSED = 2
_EXIT_INTERRUPTED = 130
_EXIT_PIPE_CLOSED = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Verb(Protocol):
    """What a verb's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Raises SystemExit where argparse does."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb_name = next((word for word in words if not word.startswith("-")), None)
    parser = command_parser([verb_name] if verb_name in VERBS else [])
    if verb_name is not None and verb_name not in VERBS:
        parser.error(_no_subcommand(verb_name))
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        of_subcommand = getattr(arguments, "parser", parser)
        hint = _instead_of(unknown, of_subcommand)
        of_subcommand.error(f"unknown arguments: {' '.join(unknown)}{hint}")
    if arguments.version:
        print(f"quire {_version()}")
        return 0
    if arguments.verb is None:
        parser.print_help()
        return _EXIT_REFUSED
    _tolerate_any_encoding()
    try:
        code = verb(arguments.verb).run(arguments)
        sys.stdout.flush()
        return code
    except QuireError as error:
        told = _in_flags(str(error)) if isinstance(error, SettingError) else str(error)
        _complain(arguments.verb, told)
        return _EXIT_FAILED if isinstance(error, WorkerError) else _EXIT_REFUSED
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: say nothing, not even at exit
        lose_output()
        return _EXIT_PIPE_CLOSED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        lose_output()
        _complain(arguments.verb, f"cannot write: {error.strerror}; make room, or write elsewhere")
        return _EXIT_FAILED


class _Parser(argparse.ArgumentParser):
    """Takes flags in full only, and reports an error in one line, without the list of flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(
            _EXIT_REFUSED, f"{self.prog}: {message}\nusage: {self.prog} --help lists its flags\n"
        )


def command_parser(complete_verbs: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the whole command; only `complete_verbs` get their own arguments."""
    parser = _Parser(
        prog="quire", description="A small, fast, exact LLM inference and serving engine."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, purpose in VERBS.items():
        sub_parser = verbs.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}."
        )
        sub_parser.set_defaults(parser=sub_parser)
        if name in complete_verbs:
            verb(name).add_arguments(sub_parser)
    return parser


def verb(name: str) -> Verb:
    """The module of a verb."""
    return cast(Verb, import_module(f"quire.cli.{name}"))


def _no_subcommand(name: str) -> str:
    from difflib import get_close_matches  # only where it is needed

    from quire.config.foreign_flags import SUBCOMMANDS

    near = get_close_matches(name[:60], VERBS, 1)
    hint = SUBCOMMANDS.get(name) or (f"did you mean {near[0]}?" if near else "")
    return f"there is no subcommand {name!r}; {hint and hint + '; '}there are: {', '.join(VERBS)}"


def _instead_of(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    from quire.config.foreign_flags import instead_of  # only where it is needed

    serve = command_parser(["serve"]).parse_known_args(["serve"])[0].parser
    flags = {word.split("=")[0] for word in unknown}
    of_serve = sorted(flags & serve._option_string_actions.keys())
    others = [word for word in unknown if word.split("=")[0] not in of_serve]
    hint = instead_of(others, parser._option_string_actions)
    return hint + "".join(f"; {flag} is a flag of quire serve" for flag in of_serve)


def _in_flags(text: str) -> str:
    from quire.config.flags import in_flags  # only where there is something to say

    return in_flags(text)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # only where it is asked for

    try:
        return version("quire")
    except PackageNotFoundError:
        return "(not installed)"


def _tolerate_any_encoding() -> None:
    """Bytes that are no text become lone surrogates, which the tokenizer refuses by name."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _complain(verb_name: str, text: str) -> None:
    print(f"quire {verb_name}: {text.strip()}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
