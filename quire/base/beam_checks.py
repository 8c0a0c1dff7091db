"""What beam search can go with: the checks of its fields, and of those that would forbid it.

Knows field names and their values that ask for nothing; no search. Beams are chosen by sums of
log-probabilities, after penalties, bias and bans; whatever draws tokens is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

if TYPE_CHECKING:
    from quire.base.sampling_params import SamplingParams

EARLY_STOPPING = (True, False, "never")
_BEAMS_ONLY: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}


def check_beams(sampling: SamplingParams, must_be: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for what beams cannot go with, and for their fields without them.

    must_be: fields that must be off beside beams, with the value that is.
    """
    given = sampling.early_stopping
    if not isinstance(given, bool | str) or given not in EARLY_STOPPING:
        raise InvalidParameter(
            f'early_stopping is {show(given)}; true, false or "never" is allowed',
            param="early_stopping",
        )
    if not sampling.use_beam_search:
        for name, off in _BEAMS_ONLY.items():
            if getattr(sampling, name) != off:
                raise InvalidParameter(
                    f"{name} is {show(getattr(sampling, name))} without use_beam_search: it "
                    "belongs to beam search; set use_beam_search, or leave it out",
                    param=name,
                )
        return
    for name, off in must_be.items():
        value = getattr(sampling, name)
        if value != off and not (name == "top_k" and value == -1):
            raise InvalidParameter(
                f"{name} is {show(value)} and use_beam_search is true; beams are found, not drawn: "
                f"set {name} to {show(off)}, or leave beam search out",
                param=name,
            )
    if sampling.max_tokens == 0:
        raise InvalidParameter(
            "max_tokens is 0 and use_beam_search is true; beams need tokens: set max_tokens to at "
            "least 1, or leave beam search out",
            param="max_tokens",
        )
