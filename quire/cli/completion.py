"""`quire completion SHELL`: a script that completes verbs, flags and their values.

Made from the parsers themselves, so it cannot disagree with them. Load it with, for example,
`source <(quire completion bash)`, or put it where the shell looks for completions.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.cli.main import VERBS, command_parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of a verb. choices: the values it takes, empty where any; takes_value: at all."""

    names: tuple[str, ...]
    text: str
    choices: tuple[str, ...]
    takes_value: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbWords:
    """What may follow a verb: flags, the words of a positional argument, or a path."""

    name: str
    text: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]
    takes_path: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("shell", choices=sorted(_SCRIPTS), help="the shell to write a script for")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """The completion script for "bash", "zsh" or "fish"."""
    return _SCRIPTS[shell](verb_words())


def verb_words() -> list[VerbWords]:
    """All verbs with their flags, read from their parsers."""
    parser = command_parser(list(VERBS))
    [sub_parsers] = [
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return [_words_of(name, sub_parsers[name]) for name in VERBS]


def _words_of(name: str, parser: argparse.ArgumentParser) -> VerbWords:
    flags = _flags_of(parser)
    positionals = [action for action in parser._actions if not action.option_strings]
    words = [str(choice) for action in positionals for choice in action.choices or ()]
    return VerbWords(
        name=name,
        text=VERBS[name],
        flags=tuple(flags),
        words=tuple(words),
        takes_path=any(not action.choices for action in positionals),
    )


def _flags_of(parser: argparse.ArgumentParser) -> list[Flag]:
    """Its own, and those of the verbs below it, each name once."""
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


def _bash(verbs: Sequence[VerbWords]) -> str:
    cases = "\n".join(_bash_case(verb) for verb in verbs)
    return f"""\
# bash completion of quire; load it with: source <(quire completion bash)
_quire() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local flags="" words="" paths=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(verb.name for verb in verbs)} --help --version" \
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


def _bash_case(verb: VerbWords) -> str:
    """What may follow one verb, or one of its flags that takes a value."""
    lines = [
        f"        {verb.name})",
        f'            flags="{" ".join(name for flag in verb.flags for name in flag.names)}"',
        f'            words="{" ".join(verb.words)}"',
        f"            paths={'-f' if verb.takes_path else ''}",
        '            case "$previous" in',
    ]
    for flag in verb.flags:
        pattern = "|".join(flag.names)
        if flag.choices:
            lines.append(
                f'            {pattern}) flags="" words="{" ".join(flag.choices)}" paths="";;'
            )
        elif flag.takes_value:
            lines.append(f'            {pattern}) flags="" words="" paths=-f;;')
    return "\n".join([*lines, "            esac;;"])


def _zsh(verbs: Sequence[VerbWords]) -> str:
    listed = " ".join(shlex.quote(f"{verb.name}:{verb.text}") for verb in verbs)
    cases = "\n".join(
        f"        {verb.name}) _arguments \\\n            "
        + " \\\n            ".join(_zsh_arguments(verb))
        + ";;"
        for verb in verbs
    )
    return f"""\
#compdef quire
# zsh completion of quire; put it on your fpath as _quire
_quire() {{
    local -a verbs=({listed})
    if (( CURRENT == 2 )); then
        _describe verb verbs
        return
    fi
    local verb="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$verb" in
{cases}
    esac
}}
compdef _quire quire"""


def _zsh_arguments(verb: VerbWords) -> list[str]:
    arguments = []
    for flag in verb.flags:
        text = "".join(" " if character in "[]:\\" else character for character in flag.text)
        value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
        arguments += [
            shlex.quote(f"*{name}[{text}]" + (value if flag.takes_value else ""))
            for name in flag.names
        ]
    if verb.words:
        arguments.append(shlex.quote(f"1:word:({' '.join(verb.words)})"))
    if verb.takes_path:
        arguments.append(shlex.quote("1:model:_files"))
    return arguments


def _fish(verbs: Sequence[VerbWords]) -> str:
    lines = ["# fish completion of quire; load it with: quire completion fish | source"]
    lines.append("complete -c quire -f")
    for verb in verbs:
        lines.append(
            f"complete -c quire -n __fish_use_subcommand -a {verb.name} -d {_fish_text(verb.text)}"
        )
        seen = f"complete -c quire -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.words:
            lines.append(f"{seen} -a '{' '.join(verb.words)}'")
        if verb.takes_path:
            lines.append(f"{seen} -a '(__fish_complete_path)'")
        for flag in verb.flags:
            names = [
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            ]
            value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r"
            taken = value if flag.takes_value else ""
            lines.append(f"{seen} {' '.join(names)}{taken} -d {_fish_text(flag.text)}")
    return "\n".join(lines)


def _fish_text(text: str) -> str:
    """In fish's single quotes only backslash and quote are special."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SCRIPTS: dict[str, Callable[[Sequence[VerbWords]], str]] = {
    "bash": _bash,
    "fish": _fish,
    "zsh": _zsh,
}
