"""The `quire` command: run a subcommand, and report errors as messages and exit codes.

Each subcommand is a module of this package with `add_arguments(parser)` and `run(arguments) ->
int`, imported only when used, to keep start-up fast. Exit codes are those of exit_codes.py.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn, Protocol, cast

from quire.base.errors import QuireError, SettingError, WorkerError
from quire.base.native_module import names_missing_build
from quire.cli.exit_codes import FAILED, INTERRUPTED, PIPE_CLOSED, REFUSED, SUCCESS
from quire.cli.output import discard_output

SUBCOMMANDS = {
    "serve": "start an OpenAI-compatible HTTP server",
    "route": "route requests to several servers, and continue streams of one that fails",
    "cascade": "train the classifier of a router's cascade from logged outcomes",
    "lease": "hold the lease of a server in Redis, by which routers find it",
    "chat": "chat with a model in the terminal",
    "complete": "continue one prompt",
    "pull": "download a model from the Hugging Face Hub",
    "models": "list the models, packed weights and KV tiers on this machine, or remove some",
    "bench": "measure speed on this machine",
    "simulate": "compare scheduling policies on a trace, in virtual time",
    "profile": "print the time of each operation of a step, and the machine's limits",
    "plan": "predict whether a model fits a device, and how fast it is",
    "doctor": "check this machine, or diagnose a running server",
    "why": "show where the time of a request went, from a running server",
    "config": "print the settings with their sources, or check a configuration file",
    "record": "record the requests of a running server, with their arrival times, in a file",
    "replay": "send the requests of a recording again, and compare times and tokens",
    "env": "print a report of this installation and machine for bug reports",
    "program": "print the operations of a model's step, with bytes and arithmetic",
    "completion": "print a shell completion script",
}
# Subcommands that load the libraries of an engine, unless --url names a server.
_COMPUTING = ("serve", "chat", "complete", "bench", "profile", "replay", "simulate", "plan")
_OWN_FLAGS = ("--version", "-h", "--help")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Subcommand(Protocol):
    """The interface of a subcommand's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises SystemExit like argparse."""
    try:
        with names_missing_build():
            return _run(argv)
    except SettingError as error:
        _print_error("quire", str(error))
        return REFUSED
    except KeyboardInterrupt:  # also while a subcommand is imported
        return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    if name == "serve" and _logs_json(words):
        from quire.base import log  # before the flags are parsed: their errors are lines of the log

        log.process_form = "json"
    parser = command_parser([name] if name in SUBCOMMANDS else [])
    if words and words[0].startswith("-") and words[0] not in _OWN_FLAGS:
        from quire.cli.usage_errors import flag_before_subcommand  # slow imports

        parser.error(flag_before_subcommand(words, SUBCOMMANDS, _serve_parser()))
    if name is not None and name not in SUBCOMMANDS:
        from quire.cli.usage_errors import unknown_subcommand

        parser.error(unknown_subcommand(name, SUBCOMMANDS))
    # argparse would read llama.cpp's -hf as -h with the value f.
    like_help = [word for word in words if word.startswith("-h") and word != "-h"]
    arguments, unknown = parser.parse_known_args([w for w in words if w not in like_help])
    if unknown := [*like_help, *unknown]:
        from quire.cli.usage_errors import unknown_arguments

        of_subcommand = getattr(arguments, "parser", parser)
        of_subcommand.error(unknown_arguments(unknown, words, of_subcommand, _serve_parser()))
    if arguments.version:
        print(f"quire {_version()}")
        return SUCCESS
    if arguments.subcommand is None:
        parser.print_help()
        return REFUSED
    _tolerate_any_encoding()
    try:
        if arguments.subcommand in _COMPUTING and not vars(arguments).get("url"):
            from quire.config.process_limits import check_address_space  # slow import

            check_address_space()
        if "settings_taken" in arguments:
            _apply_sources(arguments)
        code = subcommand(arguments.subcommand).run(arguments)
        sys.stdout.flush()
        return code
    except QuireError as error:
        is_setting = isinstance(error, SettingError)
        text = error.text_in_flags or str(error)
        message = _in_flags(text, arguments) if is_setting else text
        _print_error(f"quire {arguments.subcommand}", message)
        return FAILED if isinstance(error, WorkerError) else REFUSED
    except MemoryError:
        from quire.config.process_limits import out_of_memory  # slow import

        _print_error(f"quire {arguments.subcommand}", str(out_of_memory()))
        return FAILED
    except BrokenPipeError:  # the reader of standard output is gone: stay silent, also at exit
        discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        discard_output()
        _print_error(
            f"quire {arguments.subcommand}",
            f"cannot write: {error.strerror}; make room, or write elsewhere",
        )
        return FAILED


# argparse's message for a value that is no number.
_NO_NUMBER = re.compile(r"invalid (int|float) value: (.*)", re.DOTALL)
# Its message for a value of a flag that takes none, as in --insecure=yes.
_NO_VALUE = re.compile(r"ignored explicit argument '(.*)'", re.DOTALL)
# A usage line lists at most so many flags; the help text below it lists all.
_MAX_USAGE_FLAGS = 16
_KINDS = {"int": "a whole number", "float": "a number"}


class _Parser(argparse.ArgumentParser):
    """Accept unabbreviated flags only; report an error in one line, without the list of flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse abbreviates flags of one dash all the same: -t is llama.cpp's, not -tp.
        return [
            found
            for found in super()._get_option_tuples(option_string)
            if option_string.startswith(found[1])
        ]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # The text of argparse's own error depends on the version of Python.
        if action.choices is not None and value not in action.choices:
            from quire.cli.usage_errors import wrong_choice  # slow imports

            raise argparse.ArgumentError(action, wrong_choice(action, value, self.prog))

    def format_help(self) -> str:
        """Return the help text, with a usage line that does not list many flags twice."""
        if sum(bool(action.option_strings) for action in self._actions) > _MAX_USAGE_FLAGS:
            formatter = self._get_formatter()
            words = (
                formatter._format_args(action, action.dest)
                for action in self._actions
                if not action.option_strings
            )
            self.usage = " ".join(("%(prog)s [FLAGS]", *words))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        from quire.cli.usage_errors import with_help_of_required  # slow imports

        message = with_help_of_required(message, self)
        message = _NO_VALUE.sub(r"takes no value; leave out =\1", message)
        message = _NO_NUMBER.sub(lambda found: f"{found[2]} is not {_KINDS[found[1]]}", message)
        _print_error(self.prog, f"{message}\nusage: {self.prog} --help lists its flags")
        self.exit(REFUSED)


def command_parser(with_arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the whole command; only `with_arguments` get their arguments."""
    parser = _Parser(
        prog="quire", description="A small, fast, exact LLM inference and serving engine."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subcommands = parser.add_subparsers(
        dest="subcommand", metavar="SUBCOMMAND", title="subcommands"
    )
    for name, purpose in SUBCOMMANDS.items():
        sub_parser = subcommands.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}."
        )
        sub_parser.set_defaults(parser=sub_parser)
        if name in with_arguments:
            subcommand(name).add_arguments(sub_parser)
    return parser


def subcommand(name: str) -> Subcommand:
    """Return the module of a subcommand."""
    return cast(Subcommand, import_module(f"quire.cli.{name}"))


def _serve_parser() -> argparse.ArgumentParser:
    parsed = command_parser(["serve"]).parse_known_args(["serve"])[0]
    return cast(argparse.ArgumentParser, parsed.parser)


def _apply_sources(arguments: argparse.Namespace) -> None:
    """Add the settings of the configuration file and the environment, and print warnings."""
    from quire.base import log  # slow imports
    from quire.cli.options import apply_sources

    warnings = apply_sources(arguments, os.environ)
    given = vars(arguments)
    if arguments.subcommand == "serve" and (
        given.get("log_format") == "json"
        or (given.get("access_log") == "json" and "log_format" not in given)
    ):
        log.process_form = "json"
    for warning in warnings:
        _print_error(f"quire {arguments.subcommand}", f"warning: {warning}")


def _in_flags(text: str, arguments: argparse.Namespace) -> str:
    """Name flags in place of settings, each with the line or the variable that set it."""
    from quire.config.flags import in_flags  # slow imports
    from quire.config.sources import with_sources

    return with_sources(in_flags(text), vars(arguments).get("sources", {}))


def _version() -> str:
    from quire.base.version import installed_version  # slow import

    return installed_version()


def _tolerate_any_encoding() -> None:
    """Accept any bytes: undecodable ones become lone surrogates, which the tokenizer rejects."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _logs_json(words: Sequence[str]) -> bool:
    """Return whether the flags ask for a log of JSON, so far as they can be read."""
    asked = " ".join(words).replace("=", " ")
    return "--log-format json" in asked or (
        "--access-log json" in asked and "--log-format text" not in asked
    )


def _print_error(program: str, text: str) -> None:
    """Print an error of a program; a server that logs JSON logs it."""
    from quire.base import log  # slow import

    text = f"{program}: {text.strip()}"
    if log.process_form == "json":
        for line in text.splitlines():
            log.Log("server").printed(line)
    else:
        print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
