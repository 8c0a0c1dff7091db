"""Orders of samplers that clients send, as SamplingParams.samplers.

A list is the order of sampling/batch.py if no two steps that are on and do not commute are in
another order than there. Otherwise the temperature and the filters are applied as listed; what
changes logits before them (penalties, DRY, bans) has its place. `samplers` has llama.cpp's names,
or its letters; `sampler_priority` has those of text-generation-webui, and its
`temperature_last` moves one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import SAMPLERS, SMALLEST_TEMPERATURE
from quire.base.sampling_params import SamplingParams
from quire.base.show import show

# The steps in the server's order, with the fields and values at which each is off. The presence and
# frequency penalties are one step: both subtract.
_STEPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("repetition_penalty", {"repetition_penalty": 1.0}),
    ("presence_penalty", {"presence_penalty": 0.0}),
    ("frequency_penalty", {"frequency_penalty": 0.0}),
    ("dry", {"dry_multiplier": 0.0}),
    ("no_repeat_ngram", {"no_repeat_ngram_size": 0}),
    ("temperature", {"temperature": 1.0}),
    ("top_n_sigma", {"top_n_sigma": 0.0}),
    ("min_p", {"min_p": 0.0}),
    ("top_k", {"top_k": 0}),
    ("typical_p", {"typical_p": 1.0}),
    ("top_p", {"top_p": 1.0}),
    ("epsilon_cutoff", {"epsilon_cutoff": 0.0}),
    ("eta_cutoff", {"eta_cutoff": 0.0}),
    ("xtc", {"xtc_probability": 0.0}),
    ("mirostat", {"mirostat": 0}),
)
# Pairs that may be swapped. top_k looks at the order of tokens only, which temperature and min_p
# keep; top_n_sigma scales with the temperature; a banned token stays banned.
_COMMUTING = frozenset(
    {
        frozenset({"presence_penalty", "frequency_penalty"}),
        frozenset({"temperature", "top_k"}),
        frozenset({"temperature", "top_n_sigma"}),
        frozenset({"min_p", "top_k"}),
        *(
            frozenset({"no_repeat_ngram", other})
            for other in ("repetition_penalty", "presence_penalty", "frequency_penalty", "dry")
        ),
        frozenset({"no_repeat_ngram", "temperature"}),
    }
)
# Filters that keep the most probable token, so that they change nothing at temperature 0.
_KEEP_BEST = frozenset({"top_n_sigma", "min_p", "top_k", "top_p", "epsilon_cutoff", "eta_cutoff"})
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# Names of each list: the steps that a name stands for; none for steps that are always off.
_OF_LLAMA_CPP: Mapping[str, tuple[str, ...]] = {
    "penalties": _PENALTIES,
    "typ_p": ("typical_p",),
    "typical": ("typical_p",),
    **{
        name: (name,)
        for name in (
            "dry",
            "top_n_sigma",
            "top_k",
            "typical_p",
            "top_p",
            "min_p",
            "xtc",
            "temperature",
            "epsilon_cutoff",
            "eta_cutoff",
            "no_repeat_ngram",
        )
    },
    **dict.fromkeys(("adaptive_p", "tfs_z", "tfs"), ()),
}
_OF_WEBUI: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name, _ in _STEPS},
    **dict.fromkeys(
        (
            "dynamic_temperature",
            "quadratic_sampling",
            "tfs",
            "top_a",
            "adaptive_p",
            "encoder_repetition_penalty",
        ),
        (),
    ),
}
ORDERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "samplers": _OF_LLAMA_CPP,
    "sampler_priority": _OF_WEBUI,
    "temperature_last": {},
}
# What a request says with each, for the documentation.
ORDER_WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("samplers", "sampler_priority"),
        "the temperature and the filters are applied in this order, after penalties, DRY and bans",
    ),
    "temperature_last": "`true`: the temperature is applied after the filters",
}
MAX_SAMPLERS = 64
# What its letters stand for.
_LETTERS: Mapping[str, str] = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p"},
    **{
        "p": "top_p",
        "m": "min_p",
        "x": "xtc",
        "t": "temperature",
        "a": "adaptive_p",
        "i": "infill",
    },
}
# Orders of other servers where a request lists none; the steps that they lack have the place that
# they have here.
LLAMA_CPP_ORDER = (
    *("no_repeat_ngram", "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p"),
    *("epsilon_cutoff", "eta_cutoff", "min_p", "xtc", "temperature"),
)
OLLAMA_ORDER = (
    *("no_repeat_ngram", "penalties", "dry", "top_n_sigma", "top_k", "temperature", "typ_p"),
    *("top_p", "epsilon_cutoff", "eta_cutoff", "min_p", "xtc"),
)


def in_order(given: Mapping[str, Any], sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with the order that a request lists. Raises InvalidParameter.

    given: has a field of ORDERS. An empty list leaves the order to the server.
    """
    listed = [name for name in ("samplers", "sampler_priority") if name in given]
    if len(listed) > 1:
        raise InvalidParameter(
            "samplers and sampler_priority are both given, and both are the order of samplers; "
            "leave one out",
            param="sampler_priority",
        )
    is_last = given.get("temperature_last", False)
    if not isinstance(is_last, bool):
        raise InvalidParameter(
            f"temperature_last is {show(is_last)}; true or false is allowed",
            param="temperature_last",
        )
    name = listed[0] if listed else "temperature_last"
    places = _places(name, given[name]) if listed else {}
    if places:  # in place of the order that the model's files have
        sampling = replace(sampling, samplers=())
    else:
        places = {step: place for place, (step, _) in enumerate(_STEPS)}
    if is_last and "temperature" in places:
        places["temperature"] = len(_STEPS) + max(places.values())
    if sampling.mirostat and name == "samplers":
        return sampling  # llama.cpp ignores the list with mirostat
    return _placed(name, places, sampling)


def with_order(names: Sequence[str], sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with one of the orders of other servers, unless the model's files have
    an order."""
    if sampling.samplers:
        return sampling
    return in_order({"samplers": [*names]}, sampling)


def sampler_names(value: Any) -> Any:
    """Return the names of a text of llama.cpp's letters; other values as they are."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SAMPLERS:
        return value
    if not _LETTERS.keys() >= set(value):
        return value
    return [_LETTERS[letter] for letter in value]


def _places(name: str, value: Any) -> dict[str, int]:
    """Return the place of each step in a list of samplers. Raises InvalidParameter."""
    names = ORDERS[name]
    entries = sampler_names(value) if name == "samplers" else value
    if isinstance(entries, list) and len(entries) > MAX_SAMPLERS:
        raise InvalidParameter(
            f"{name} has {len(entries)} entries; at most {MAX_SAMPLERS} are allowed", param=name
        )
    if not isinstance(entries, list):
        raise InvalidParameter(
            f"{name} is {show(value)}; a list is allowed"
            + (f", or a text of the letters {''.join(_LETTERS)}" if name == "samplers" else ""),
            param=name,
        )
    places: dict[str, int] = {}
    for place, entry in enumerate(entries):
        if not isinstance(entry, str) or entry not in names:
            raise InvalidParameter(
                f"{name} holds {show(entry)}; known: {', '.join(names)}; leave {name} out",
                param=name,
            )
        for step in names[entry]:
            places.setdefault(step, place)
    return places


def _placed(name: str, places: Mapping[str, int], sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with the steps that are on in these places."""
    active = _active(sampling)
    for step in active:
        if step not in places:
            raise InvalidParameter(
                f"{name} does not list {step}, which is on in this request; add it, leave {name} "
                f"out, or switch {step} off",
                param=name,
            )
    moved = False
    for first, second in combinations(active, 2):
        if places[first] <= places[second] or frozenset({first, second}) in _COMMUTING:
            continue
        moved = True
        if first not in SAMPLERS or second not in SAMPLERS:
            raise InvalidParameter(
                f"{name} has {second} before {first}; this server applies {first} first, which "
                f"would change the answer: switch one of them off, or leave {name} out",
                param=name,
            )
    if not moved:
        return sampling
    last = len(_STEPS) + len(places)
    filters = [step for step in _on(sampling) if step in SAMPLERS]
    filters.sort(key=lambda step: places.get(step, last))
    return replace(sampling, samplers=tuple(filters))


def has_penalties(sampling: SamplingParams) -> bool:
    """Return whether a penalty is on that repeat_last_n limits."""
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return any(getattr(sampling, name) != value for name, value in off.items())


def neutral_unlisted(name: str, listed: Sequence[str]) -> dict[str, Any]:
    """Return the parameters that are off since a list leaves their steps out, at these values."""
    steps = {step for entry in listed for step in ORDERS[name].get(entry, ())}
    return {
        field: value for step, off in _STEPS if step not in steps for field, value in off.items()
    }


def _active(sampling: SamplingParams) -> list[str]:
    """Return the steps that can change the answer, in the server's order."""
    is_greedy = sampling.temperature < SMALLEST_TEMPERATURE
    return [step for step in _on(sampling) if not (is_greedy and step in _KEEP_BEST)]


def _on(sampling: SamplingParams) -> list[str]:
    """Return the steps that are on, in the server's order."""
    return [
        step
        for step, off in _STEPS
        if any(getattr(sampling, field) != value for field, value in off.items())
        and not (step == "top_k" and sampling.top_k == -1)
    ]
