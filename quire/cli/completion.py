"""`quire completion SHELL`: print a script that completes subcommands, flags and their values.

It is generated from the argument parsers. Load it with, for example, `source <(quire completion
bash)`, or put it where the shell looks for completions.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.cli.main import SUBCOMMANDS, command_parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag. choices: its allowed values, empty if any; takes_value: False for a switch."""

    names: tuple[str, ...]
    text: str
    choices: tuple[str, ...]
    takes_value: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SubcommandWords:
    """What may follow a subcommand: flags, the values of a positional argument, or a path."""

    name: str
    text: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]
    takes_path: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument(
        "shell", metavar="SHELL", choices=sorted(_SCRIPTS), help="the shell to write a script for"
    )


def run(arguments: argparse.Namespace) -> int:
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return the completion script for "bash", "zsh" or "fish"."""
    return _SCRIPTS[shell](subcommand_words())


def subcommand_words() -> list[SubcommandWords]:
    """Return all subcommands with their flags, read from the parsers."""
    parser = command_parser(list(SUBCOMMANDS))
    [sub_parsers] = [
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return [_words_of(name, sub_parsers[name]) for name in SUBCOMMANDS]


def _words_of(name: str, parser: argparse.ArgumentParser) -> SubcommandWords:
    flags = _flags_of(parser)
    positionals = [action for action in parser._actions if not action.option_strings]
    words = [str(choice) for action in positionals for choice in action.choices or ()]
    return SubcommandWords(
        name=name,
        text=SUBCOMMANDS[name],
        flags=tuple(flags),
        words=tuple(words),
        takes_path=any(not action.choices for action in positionals),
    )


def _flags_of(parser: argparse.ArgumentParser) -> list[Flag]:
    """Return the flags of a parser and of the subcommands below it, each name once."""
    flags: dict[tuple[str, ...], Flag] = {}
    for action in parser._actions:
        if action.option_strings:
            flags.setdefault(tuple(action.option_strings), _flag(action))
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                flags = {flag.names: flag for flag in _flags_of(below)} | flags
    return list(flags.values())


def _flag(action: argparse.Action) -> Flag:
    return Flag(
        names=tuple(action.option_strings),
        text=" ".join((action.help or "").replace("%%", "%").split()),
        choices=tuple(str(choice) for choice in action.choices or ()),
        takes_value=action.nargs != 0,
    )


def _bash(subcommands: Sequence[SubcommandWords]) -> str:
    cases = "\n".join(_bash_case(subcommand) for subcommand in subcommands)
    names = " ".join(subcommand.name for subcommand in subcommands)
    return f"""\
# bash completion of quire; load it with: source <(quire completion bash)
_quire() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local flags="" words="" paths=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names} --help --version" \
-- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$flags" -- "$current"));;
        *) COMPREPLY=($(compgen -W "$words" $paths -- "$current"));;
    esac
}}
complete -o filenames -F _quire quire"""


def _bash_case(subcommand: SubcommandWords) -> str:
    """Return the case of one subcommand, with the values of its flags."""
    lines = [
        f"        {subcommand.name})",
        f'            flags="{" ".join(name for flag in subcommand.flags for name in flag.names)}"',
        f'            words="{" ".join(subcommand.words)}"',
        f"            paths={'-f' if subcommand.takes_path else ''}",
        '            case "$previous" in',
    ]
    for flag in subcommand.flags:
        pattern = "|".join(flag.names)
        if flag.choices:
            lines.append(
                f'            {pattern}) flags="" words="{" ".join(flag.choices)}" paths="";;'
            )
        elif flag.takes_value:
            lines.append(f'            {pattern}) flags="" words="" paths=-f;;')
    return "\n".join([*lines, "            esac;;"])


def _zsh(subcommands: Sequence[SubcommandWords]) -> str:
    listed = " ".join(
        shlex.quote(f"{subcommand.name}:{subcommand.text}") for subcommand in subcommands
    )
    cases = "\n".join(
        f"        {subcommand.name}) _arguments \\\n            "
        + " \\\n            ".join(_zsh_arguments(subcommand))
        + ";;"
        for subcommand in subcommands
    )
    return f"""\
#compdef quire
# zsh completion of quire; put it on your fpath as _quire
_quire() {{
    local -a subcommands=({listed})
    if (( CURRENT == 2 )); then
        _describe subcommand subcommands
        return
    fi
    local subcommand="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$subcommand" in
{cases}
    esac
}}
compdef _quire quire"""


def _zsh_arguments(subcommand: SubcommandWords) -> list[str]:
    arguments = []
    for flag in subcommand.flags:
        text = "".join(" " if character in "[]:\\" else character for character in flag.text)
        value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
        arguments += [
            shlex.quote(f"*{name}[{text}]" + (value if flag.takes_value else ""))
            for name in flag.names
        ]
    if subcommand.words:
        arguments.append(shlex.quote(f"1:word:({' '.join(subcommand.words)})"))
    if subcommand.takes_path:
        arguments.append(shlex.quote("1:model:_files"))
    return arguments


def _fish(subcommands: Sequence[SubcommandWords]) -> str:
    lines = ["# fish completion of quire; load it with: quire completion fish | source"]
    lines.append("complete -c quire -f")
    for subcommand in subcommands:
        described = f"{subcommand.name} -d {_fish_text(subcommand.text)}"
        lines.append(f"complete -c quire -n __fish_use_subcommand -a {described}")
        seen = f"complete -c quire -n '__fish_seen_subcommand_from {subcommand.name}'"
        if subcommand.words:
            lines.append(f"{seen} -a '{' '.join(subcommand.words)}'")
        if subcommand.takes_path:
            lines.append(f"{seen} -a '(__fish_complete_path)'")
        for flag in subcommand.flags:
            names = [
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            ]
            value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r"
            taken = value if flag.takes_value else ""
            lines.append(f"{seen} {' '.join(names)}{taken} -d {_fish_text(flag.text)}")
    return "\n".join(lines)


def _fish_text(text: str) -> str:
    """Quote text for fish, where only backslash and quote are special in single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SCRIPTS: dict[str, Callable[[Sequence[SubcommandWords]], str]] = {
    "bash": _bash,
    "fish": _fish,
    "zsh": _zsh,
}
