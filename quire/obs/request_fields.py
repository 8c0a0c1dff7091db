"""Sampling and scheduling parameters as JSON fields of a recording, and back.

The fields have the names and forms of the routes' request fields, so that a replay can send them to
a server as they are. Fields that quote a prompt, an answer or a vocabulary are content.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, GrammarKind
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import OBJECTIVES, SchedulingParams

CONTENT = frozenset(
    {
        "stop",
        "stop_token_ids",
        "logit_bias",
        "logprob_token_ids",
        "dry_sequence_breakers",
        "bad_words",
        "allowed_token_ids",
        "structured_outputs",
    }
)
# A model's generation_config.json may change the defaults of these, so a replay sends each.
MODEL_DEFAULTS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"),
)
# What is applied before the steps that SamplingParams.samplers names, by the names of the field.
BEFORE_SAMPLERS = ("penalties", "dry", "no_repeat_ngram")
_DEFAULTS: Mapping[str, Any] = {
    one.name: {} if one.default is MISSING else one.default for one in fields(SamplingParams)
}
_FORMS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.CHOICE: "choice",
    GrammarKind.GRAMMAR: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}


def sampling_fields(sampling: SamplingParams, *, content: bool) -> dict[str, Any]:
    """Return the parameters that are not defaults. content: also those that quote texts."""
    found: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(sampling, name)
        if value == default or (name in CONTENT and not content):
            continue
        if name == "logit_bias":
            # JSON has no infinity; false bans a token.
            value = [[id_, bias if bias > -math.inf else False] for id_, bias in value.items()]
        elif isinstance(value, Grammar):
            value = _grammar_form(value)
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def sampling_of(given: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of recorded fields. Raises InvalidParameter naming the field."""
    named: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise InvalidParameter(
                f"{name[:64]!r} is no sampling parameter of this release", param=name[:64]
            )
        named[name] = tuple(value) if isinstance(value, list) else value
    if "logit_bias" in named:
        try:
            named["logit_bias"] = {
                int(id_): -math.inf if bias is False else float(bias)
                for id_, bias in named["logit_bias"]
            }
        except (TypeError, ValueError) as error:
            raise InvalidParameter(
                "logit_bias is no list of [token id, bias]", param="logit_bias"
            ) from error
    return SamplingParams(**named)


def body_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded sampling fields as fields of a request, whatever the model's defaults."""
    fields = {**{name: _DEFAULTS[name] for name in MODEL_DEFAULTS}, **given}
    if "samplers" in given:  # a request lists all steps that are on
        fields["samplers"] = [*BEFORE_SAMPLERS, *given["samplers"]]
    return fields


def scheduling_fields(terms: SchedulingParams) -> dict[str, Any]:
    """Return priority and objectives where they are set; the tenant's name is left out."""
    names = ("priority", *OBJECTIVES)
    return {name: value for name in names if (value := getattr(terms, name))}


def scheduling_of(given: Mapping[str, Any]) -> SchedulingParams:
    """Return the scheduling parameters of recorded fields. Raises InvalidParameter."""
    allowed = ("priority", *OBJECTIVES)
    for name in given:
        if name not in allowed:
            raise InvalidParameter(
                f"{name[:64]!r} is no scheduling parameter of this release", param=name[:64]
            )
    return SchedulingParams(**given)


def _grammar_form(grammar: Grammar) -> dict[str, Any]:
    """Return the object of a request that makes this grammar (see grammar_of)."""
    is_json = grammar.kind not in (GrammarKind.REGEX, GrammarKind.GRAMMAR)
    form: dict[str, Any] = {}
    if grammar.kind is not GrammarKind.ANY:
        form[_FORMS[grammar.kind]] = json.loads(grammar.text) if is_json else grammar.text
    if grammar.thinking is not None:
        form["thinking"] = grammar.thinking.form
    if grammar.whitespace == "":
        form["disable_any_whitespace"] = True
    elif grammar.whitespace is not None:
        form["whitespace_pattern"] = grammar.whitespace
    return form
