"""Define arguments that several subcommands share: the model, its engine, and sampling.

`engine_settings` and `given_sampling` return only what was given on the command line: defaults
belong to the engine and the model.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.base.errors import InvalidParameter, RequestError
from quire.base.grammar import Grammar, grammar_of
from quire.config.executor_config import ExecutorConfig
from quire.config.flags import add_flags
from quire.config.groups import CacheConfig, ModelConfig, SchedulerConfig
from quire.config.kv_store import KVStoreConfig
from quire.config.server_config import ServerConfig
from quire.config.speculation import SpeculationConfig
from quire.config.transfer import TransferConfig


def positive_int(text: str) -> int:
    """Parse an argument as an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


# Sizes that requests may ask for, which no subcommand but `quire serve` takes.
_ONLY_SERVED = frozenset({"matryoshka_dimensions"})
_ENGINE_GROUPS = (ModelConfig, CacheConfig, SchedulerConfig, ExecutorConfig, SpeculationConfig)
_SAMPLING: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("temperature", float, "0 always takes the most likely token; higher values vary more"),
    ("top_k", int, "sample from this many of the most likely tokens; 0: all"),
    ("top_p", float, "sample from the most likely tokens with this total probability"),
    ("min_p", float, "drop tokens below this fraction of the highest probability"),
    ("typical_p", float, "sample from tokens close to the expected surprise (locally typical)"),
    ("top_n_sigma", float, "sample within this many standard deviations of the largest logit"),
    ("xtc_probability", float, "probability of dropping the most likely tokens (XTC)"),
    ("xtc_threshold", float, "probability above which XTC may drop a token; default 0.1"),
    ("repetition_penalty", float, "above 1: tokens already seen become less likely"),
    ("presence_penalty", float, "subtracted once from the logits of tokens already generated"),
    ("frequency_penalty", float, "subtracted from a token's logit for each time it was generated"),
    ("dry_multiplier", float, "above 0: penalize tokens that continue a repetition (DRY)"),
    ("dry_base", float, "growth of DRY's penalty with each repeated token; default 1.75"),
    ("dry_allowed_length", int, "shorter repetitions are not penalized by DRY; default 2"),
    ("no_repeat_ngram_size", int, "never repeat a sequence of this many tokens; 0: off"),
    ("repeat_last_n", int, "the penalties count this many last tokens; -1: all"),
    ("mirostat", int, "1 or 2: control the surprise of tokens, instead of filtering; 0: off"),
    ("mirostat_tau", float, "mirostat's target surprise in bits; default 5"),
    ("mirostat_eta", float, "mirostat's learning rate; default 0.1"),
    ("seed", int, "the same seed gives the same answer"),
    ("max_tokens", positive_int, "maximum output tokens; default: what the context holds"),
    ("min_tokens", int, "minimum output tokens"),
)


def add_engine_arguments(
    parser: argparse.ArgumentParser,
    *,
    skip: frozenset[str] = frozenset(),
    only: frozenset[str] = frozenset(),
) -> None:
    """Add MODEL and the flags of the engine's config groups.

    skip: fields to leave out. only: if not empty, the fields to add.
    """
    _add_model_and_file(parser)
    names = {name for group in _ENGINE_GROUPS for name in group.__dataclass_fields__}
    left_out = skip | _ONLY_SERVED | {"model"} | (names - only if only else set())
    add_flags(parser, *_ENGINE_GROUPS, skip=left_out)


def add_all_settings(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags of all config groups, those of the server included."""
    _add_model_and_file(parser)
    groups = (*_ENGINE_GROUPS, TransferConfig, KVStoreConfig)
    add_flags(parser, ServerConfig, *groups, skip=frozenset({"model"}))


def _add_model_and_file(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(settings_taken=frozenset({"model"}))
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="directory, a GGUF file, or ORG/NAME[:FILE.gguf] of a model in the Hugging Face "
        "cache; default: the built-in model",
    )
    parser.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help="TOML file of settings with the names of flags, as in max-num-seqs = 64; environment "
        "variables and flags override it; default: the file of QUIRE_CONFIG, if any",
    )


def apply_sources(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Set what a configuration file and the environment give and the flags do not.

    Records each with its source in `arguments.sources`. Returns warnings. Does nothing if `--url`
    names a server in place of an engine.
    """
    from quire.config.config_file import read_config_file  # slow imports
    from quire.config.environment import FILE_VARIABLE, read_environment
    from quire.config.sources import merged

    taken = arguments.settings_taken
    if vars(arguments).get("url"):
        if arguments.config:
            raise InvalidParameter(
                "--config configures an engine in this process, but --url names a server; leave "
                "one out"
            )
        return []
    path = arguments.config or environment.get(FILE_VARIABLE, "")
    of_file, warnings = read_config_file(path) if path else ({}, [])
    of_environment, more = read_environment(environment)
    given = {name: value for name, value in vars(arguments).items() if name in taken}
    if not given["model"]:
        del given["model"]
    arguments.sources = merged(given, of_environment, of_file)
    for name, sourced in arguments.sources.items():
        if name in taken:
            setattr(arguments, name, sourced.value)
    if arguments.subcommand in ("serve", "config"):
        from quire.config.foreign_variables import unread_variables

        unread = unread_variables(environment, arguments.sources)
        more = [*more, unread] if unread else more
    return warnings + more


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that were given, as keyword arguments of LLM and AsyncLLM."""
    names = [name for group in _ENGINE_GROUPS for name in group.__dataclass_fields__]
    given = vars(arguments)
    return {name: given[name] for name in names if name in given and name != "model"}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the sampling parameters that are useful in a terminal."""
    section = parser.add_argument_group("Sampling (default: the model's generation_config.json)")
    for name, kind, text in _SAMPLING:
        section.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            type=kind,
            default=argparse.SUPPRESS,
            metavar=name.rsplit("_", maxsplit=1)[-1].upper(),
            help=text,
        )
    section.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end the answer before this text; may be given repeatedly",
    )
    section.add_argument(
        "--bad-word",
        action="append",
        dest="bad_words",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="never generate this text; may be given repeatedly",
    )
    section.add_argument(
        "--structured-outputs",
        type=_structured_outputs,
        dest="structured_outputs",
        default=argparse.SUPPRESS,
        metavar="JSON",
        help="constrain the answer: an object with one of json (a schema), json_object, regex, "
        "choice, grammar (Lark or GBNF) and structural_tag; @FILE reads it from a file",
    )


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that were given."""
    given = vars(arguments)
    fields = {name: given[name] for name, _, _ in _SAMPLING if name in given}
    if "stop" in given:
        fields["stop"] = tuple(given["stop"])
    if "bad_words" in given:
        fields["bad_words"] = tuple(given["bad_words"])
    if "structured_outputs" in given:
        fields["structured_outputs"] = given["structured_outputs"]
    return fields


@contextmanager
def sampling_flags_in_errors() -> Iterator[None]:
    """Name the flag in place of the field, in errors about sampling."""
    try:
        yield
    except RequestError as error:
        name = error.param or ""
        if name in {field for field, _, _ in _SAMPLING}:
            flag = "--" + name.replace("_", "-")
            at = r"(?<![\w\"-])" if "_" in name else "^"  # else it may be an English word
            text = re.sub(rf"{at}{name}(?![\w-])", flag, str(error))
            error.args = (text, *error.args[1:])
        raise


def _structured_outputs(text: str) -> Grammar:
    """Parse an argument into a grammar."""
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        return grammar_of(json.loads(text), param="--structured-outputs")
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be read: {error.strerror}; name a file"
        ) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f'it is not JSON ({error}); write an object, such as {{"regex": "[0-9]+"}}'
        ) from None
    except InvalidParameter as error:
        # argparse begins its message with the flag.
        text = str(error).removeprefix("--structured-outputs").lstrip(": ")
        raise argparse.ArgumentTypeError(text) from None


def check_utf8(text: str, what: str) -> str:
    """Return a text that the system has decoded. Raises InvalidParameter unless it was UTF-8.

    what: where the text is from, as in "standard input".
    """
    for at, char in enumerate(text):
        if "\udc80" <= char <= "\udcff":  # what surrogateescape makes of other bytes
            num_bytes = len(text[:at].encode(errors="surrogateescape"))
            raise InvalidParameter(
                f"{what} is not UTF-8: its byte {num_bytes} is 0x{ord(char) & 0xFF:02x}; convert "
                "it, as with iconv -f LATIN1 -t UTF-8"
            )
    return text


def positive_float(text: str) -> float:
    """Return a number above 0. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, such as 2 or 0.5")
    return value


def positive_floats(what: str) -> Callable[[str], tuple[float, ...]]:
    """Return a parser of comma-separated positive numbers. what: their name in the error."""

    def read(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(one) for one in text.split(","))
        except ValueError:
            values = ()
        if not values or not all(0 < value < 1e6 for value in values):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what} such as 0.5,1,2")
        return values

    return read


def comma_separated(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))
