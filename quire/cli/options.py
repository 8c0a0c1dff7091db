"""Arguments that several verbs share: the model, its engine, and how tokens are chosen.

Only what was given on the command line comes back from `engine_settings` and `given_sampling`:
defaults belong to the engine and the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, grammar_of
from quire.config.flags import add_flags
from quire.config.groups import CacheConfig, ExecutorConfig, ModelConfig, SchedulerConfig

_ENGINE_GROUPS = (ModelConfig, CacheConfig, SchedulerConfig, ExecutorConfig)
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 always takes the likeliest token; higher is more varied"),
    ("top_k", int, "choose among so many of the likeliest tokens; 0: all"),
    ("top_p", float, "choose among the likeliest tokens that hold this probability"),
    ("min_p", float, "leave out tokens less likely than this share of the likeliest"),
    ("typical_p", float, "choose among tokens about as surprising as is to be expected"),
    ("top_n_sigma", float, "choose within so many standard deviations of the largest logit"),
    ("xtc_probability", float, "how often the likeliest choices are left out"),
    ("xtc_threshold", float, "what is likelier than this counts among them; default 0.1"),
    ("repetition_penalty", float, "above 1: tokens already seen become less likely"),
    ("presence_penalty", float, "subtracted once from tokens already given out"),
    ("frequency_penalty", float, "subtracted from tokens for each time they were given out"),
    ("dry_multiplier", float, "above 0: makes going on with a repeat less likely"),
    ("dry_base", float, "how the penalty grows with each token of it; default 1.75"),
    ("dry_allowed_length", int, "repeats of fewer tokens are free; default 2"),
    ("no_repeat_ngram_size", int, "no so many tokens in a row twice; 0: off"),
    ("mirostat", int, "2: keep surprise at a level, instead of filtering; 0: off"),
    ("mirostat_tau", float, "that level, in bits; default 5"),
    ("mirostat_eta", float, "how fast it is corrected; default 0.1"),
    ("seed", int, "the same seed gives the same answer"),
    ("max_tokens", int, "most tokens of an answer; default: what the context holds"),
    ("min_tokens", int, "fewest tokens of an answer"),
)


def add_engine_arguments(
    parser: argparse.ArgumentParser,
    *,
    skip: frozenset[str] = frozenset(),
    only: frozenset[str] = frozenset(),
) -> None:
    """MODEL and the flags of the engine's config groups, but those named in `skip`; only: where
    any are named, no others."""
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder, or a GGUF file; default: the model in the box",
    )
    names = {name for group in _ENGINE_GROUPS for name in group.__dataclass_fields__}
    left_out = skip | {"model"} | (names - only if only else set())
    add_flags(parser, *_ENGINE_GROUPS, skip=left_out)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings that were given, as LLM and AsyncLLM take them."""
    names = [name for group in _ENGINE_GROUPS for name in group.__dataclass_fields__]
    given = vars(arguments)
    return {name: given[name] for name in names if name in given and name != "model"}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of SamplingParams that make sense for one person at a terminal."""
    section = parser.add_argument_group("How tokens are chosen (default: as the model says)")
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
        help="end the answer where this text would begin; may be given repeatedly",
    )
    section.add_argument(
        "--bad-word",
        action="append",
        dest="bad_words",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="never write this text; may be given repeatedly",
    )
    section.add_argument(
        "--structured-outputs",
        type=_structured_outputs,
        dest="structured_outputs",
        default=argparse.SUPPRESS,
        metavar="JSON",
        help="what the answer may be: an object with one of json (a schema), json_object, regex, "
        "choice, grammar (Lark or GBNF) and structural_tag; @FILE reads it from a file",
    )


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given."""
    given = vars(arguments)
    fields = {name: given[name] for name, _, _ in _SAMPLING if name in given}
    if "stop" in given:
        fields["stop"] = tuple(given["stop"])
    if "bad_words" in given:
        fields["bad_words"] = tuple(given["bad_words"])
    if "structured_outputs" in given:
        fields["structured_outputs"] = given["structured_outputs"]
    return fields


def _structured_outputs(text: str) -> Grammar:
    """A grammar, as argparse reads an argument."""
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
        raise argparse.ArgumentTypeError(str(error)) from None


def a_count(text: str) -> int:
    """A whole number of at least 1, as argparse reads an argument."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def a_list_of(what: str) -> Callable[[str], tuple[float, ...]]:
    """Reads positive numbers between commas; `what` they are stands in the error."""

    def read(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(one) for one in text.split(","))
        except ValueError:
            values = ()
        if not values or not all(0 < value < 1e6 for value in values):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what} as in 0.5,1,2")
        return values

    return read
