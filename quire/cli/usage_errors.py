"""Explain wrong words on the command line: what is not known, and what to write instead.

Pure functions of the words and a parser; imported only once the words are found to be wrong.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from quire.cli.usage_hints import ACTIONS, EQUIVALENTS, WITHOUT_FLAG
from quire.config.foreign_flags import (
    FOREIGN_SUBCOMMANDS,
    alternative,
    begun_with,
    with_dashes,
)
from quire.config.foreign_values import instead_of_value

_VERSION_FLAGS = ("-v", "-V", "-version")
_MAX_SHOWN_CHARS = 120
_REQUIRED = re.compile(r"the following arguments are required: (.*)", re.DOTALL)
_PIPE = "a prompt in a file is piped in: quire {name} <FILE"
# Flags that llama.cpp and Ollama have in a terminal, with the flag here that the hint is about.
_IN_TERMINAL: Mapping[str, tuple[str, str]] = {
    "-n": ("--max-tokens", "the maximum number of output tokens is --max-tokens"),
    "--predict": ("--max-tokens", "the maximum number of output tokens is --max-tokens"),
    "--n-predict": ("--max-tokens", "the maximum number of output tokens is --max-tokens"),
    "-s": ("--seed", "the seed is --seed"),
    "-f": ("--prompt", _PIPE),
    "--file": ("--prompt", _PIPE),
    "--prompt-file": ("--prompt", _PIPE),
}


def unknown_subcommand(name: str, known: Iterable[str]) -> str:
    """Return the error for a word that is no subcommand."""
    listed = list(known)
    near = get_close_matches(name[:60].lower(), listed, 1)
    hint = FOREIGN_SUBCOMMANDS.get(name) or (f"did you mean {near[0]}?" if near else "")
    return f"there is no subcommand {name!r}; {hint and hint + '; '}there are: {', '.join(listed)}"


def flag_before_subcommand(
    words: Sequence[str], known: Iterable[str], serve: argparse.ArgumentParser
) -> str:
    """Return the error for a flag of a subcommand that comes before the subcommand's name."""
    listed = list(known)
    flag = _flag_of(words[0])
    if flag in _VERSION_FLAGS:
        return f"{flag} is not a flag of quire; quire --version prints the version"
    name = next((word for word in words if word in listed), None)
    if name is None and flag not in serve._option_string_actions:
        return (
            f"{flag} is not a flag of quire; the first word is a subcommand, one of: "
            f"{', '.join(listed)}"
        )
    rest = [word for word in words if word != name]
    wanted = shlex.join(["quire", name or "serve", *rest])
    if len(wanted) > _MAX_SHOWN_CHARS:
        wanted = f"quire {name or 'serve'} {flag} ..."
    return f"{flag} comes before the subcommand; flags come after it: {wanted}"


def unknown_arguments(
    unknown: Sequence[str],
    words: Sequence[str],
    parser: argparse.ArgumentParser,
    serve: argparse.ArgumentParser,
) -> str:
    """Return the error for words that a subcommand's parser does not know.

    words: the whole command line. serve: the parser of `quire serve`, which has the most flags.
    """
    flags_by_hint: dict[str, list[str]] = {}
    for word in unknown:
        if word.startswith("-") and len(word) > 1:
            flag = _flag_of(word)
            listed = flags_by_hint.setdefault(_hint(flag, parser, serve), [])
            listed += [flag] if flag not in listed else []
    parts = [
        f"{', '.join(flags)}: {hint}" if len(flags_by_hint) > 1 else hint
        for hint, flags in flags_by_hint.items()
    ]
    parts += dict.fromkeys(
        _about_stray(word, flag, parser) for word, flag in _strays(unknown, words)
    )
    return "; ".join([f"unknown arguments: {' '.join(unknown)}", *parts])


def with_help_of_required(message: str, parser: argparse.ArgumentParser) -> str:
    """Add to argparse's list of missing arguments what each of them is."""
    match = _REQUIRED.fullmatch(message)
    if match is None:
        return message
    about = {_name(action): _about(action) for action in parser._actions}
    names = [
        f"{name} ({about[name]})" if about.get(name) else name for name in match[1].split(", ")
    ]
    return f"the following arguments are required: {', '.join(names)}"


def wrong_choice(action: argparse.Action, value: object, program: str) -> str:
    """Return the error for a value that is none of an argument's choices.

    program: the command that has the argument, as in "quire bench".
    """
    choices = list(action.choices or ())
    if action.option_strings:
        setting = action.option_strings[0].lstrip("-").replace("-", "_")
        hint = instead_of_value(setting, value, choices)
    else:
        hint = ACTIONS.get(program, {}).get(str(value), "")
    message = f"invalid choice: {value!r} (choose from {', '.join(map(str, choices))})"
    return f"{message}; {hint}" if hint else message


def _hint(flag: str, parser: argparse.ArgumentParser, serve: argparse.ArgumentParser) -> str:
    known = parser._option_string_actions
    positionals = [_name(action) for action in _positionals(parser)]
    flag = with_dashes(flag)
    if flag in known:
        return f"flags are spelled with dashes: {flag}"
    if (own := WITHOUT_FLAG.get(flag)) in positionals:
        return f"{own} is given without a flag: {parser.prog} {' '.join(positionals)}"
    if equal := next((one for one in EQUIVALENTS.get(flag, ()) if one in known), ""):
        return f"use {equal} ({_about(known[equal])})"
    if flag in serve._option_string_actions:
        return f"{flag} is a flag of quire serve"
    if flag == "--version":
        return "quire --version prints the version"
    name = parser.prog.removeprefix("quire ")
    own, text = _IN_TERMINAL.get(flag, ("", ""))
    if own in known:
        return text.format(name=name)
    if name != "serve" and (begun := begun_with(flag, known)):
        return begun
    hint = alternative(flag, known)
    if not hint:
        return "there is no such flag"
    if "MODEL" in positionals:
        hint = hint.replace("quire serve", f"quire {name}")
    elif "quire serve MODEL" in hint:
        fits = "; quire plan MODEL predicts whether one fits this machine"
        return f"{parser.prog} takes no model; leave it out{fits if name == 'doctor' else ''}"
    named = re.findall(r"--[a-z-]+", hint)
    is_of_serve = named and not any(one in known for one in named)
    return f"{hint} (a flag of quire serve)" if is_of_serve else hint


def _strays(unknown: Sequence[str], words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield unknown words that are no value of an unknown flag, each with the flag before it."""
    unknown_flags = {word for word in unknown if word.startswith("-")}
    flag = ""
    for word in words:
        if word.startswith("-"):
            flag = word
        elif word in unknown and flag not in unknown_flags:
            yield word, _flag_of(flag)


def _about_stray(word: str, flag: str, parser: argparse.ArgumentParser) -> str:
    action = parser._option_string_actions.get(flag)
    if action is not None and action.nargs != 0:
        value = f"{flag} takes one value"
        if isinstance(action, argparse._AppendAction) or "repeated" in str(action.help):
            return f"{value}; give the flag again for {word!r}: {flag} {shlex.quote(word)}"
    names = [str(action.metavar or action.dest) for action in _positionals(parser)]
    taken = " and ".join(names) if names else "no words"
    return f"{word!r} is one word too many: besides flags, {parser.prog} takes {taken}"


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _name(action: argparse.Action) -> str:
    """Return an argument's name as argparse's messages have it: a flag is not its metavar."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def _about(action: argparse.Action) -> str:
    if action.choices is not None:
        return f"one of {', '.join(map(str, action.choices))}"
    return str(action.help or "").replace("%%", "%")


def _flag_of(word: str) -> str:
    return word.split("=")[0]
