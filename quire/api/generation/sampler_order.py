"""Orders of samplers that clients send: accepted if they cannot change the answer.

The server applies the steps of token choice in one order (quire/sampling/batch.py). A list from a
client is the same request if every step that is on is in it, and no two of them that do not
commute are in another order than the server's. `samplers` has llama.cpp's names,
`sampler_priority` those of text-generation-webui.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import SMALLEST_TEMPERATURE
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
}


def check_sampler_order(name: str, value: Any, sampling: SamplingParams) -> None:
    """Raise InvalidParameter if applying the samplers as listed could change the answer.

    name: of the field, which has the names. An empty list leaves the order to the server.
    """
    names = ORDERS[name]
    if not isinstance(value, list):
        raise InvalidParameter(f"{name} is {show(value)}; a list is allowed", param=name)
    for entry in value:
        if not isinstance(entry, str) or entry not in names:
            raise InvalidParameter(
                f"{name} holds {show(entry)}; known: {', '.join(names)}; leave {name} out",
                param=name,
            )
    if not value or (sampling.mirostat and names is _OF_LLAMA_CPP):
        return  # llama.cpp ignores the list with mirostat
    places: dict[str, int] = {}
    for place, entry in enumerate(value):
        for step in names[entry]:
            places.setdefault(step, place)
    active = _active(sampling)
    for step in active:
        if step not in places:
            raise InvalidParameter(
                f"{name} does not list {step}, which is on in this request; add it, leave {name} "
                f"out, or switch {step} off",
                param=name,
            )
    for first, second in combinations(active, 2):
        if places[first] > places[second] and frozenset({first, second}) not in _COMMUTING:
            raise InvalidParameter(
                f"{name} has {second} before {first}; this server applies {first} first, which "
                f"would change the answer: switch one of them off, or leave {name} out",
                param=name,
            )


def neutral_unlisted(name: str, listed: Sequence[str]) -> dict[str, Any]:
    """Return the parameters that are off since a list leaves their steps out, at these values."""
    steps = {step for entry in listed for step in ORDERS[name].get(entry, ())}
    return {
        field: value for step, off in _STEPS if step not in steps for field, value in off.items()
    }


def _active(sampling: SamplingParams) -> list[str]:
    """Return the steps that are on, in the server's order."""
    is_greedy = sampling.temperature < SMALLEST_TEMPERATURE
    return [
        step
        for step, off in _STEPS
        if any(getattr(sampling, field) != value for field, value in off.items())
        and not (step == "top_k" and sampling.top_k == -1)
        and not (is_greedy and step in _KEEP_BEST)
    ]
