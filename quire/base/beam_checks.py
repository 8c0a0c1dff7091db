"""What beam search can go with: the checks of its fields, and the defaults that would forbid it.

Knows field names and their values that ask for nothing; no search. Beams are chosen by sums of
log-probabilities, so whatever changes logits or draws tokens is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

if TYPE_CHECKING:
    from quire.base.sampling_params import SamplingParams

EARLY_STOPPING = (True, False, "never")
_DRAWS = "beams are found, not drawn"
_CHANGES = "beams are compared by the model's own log-probabilities"
# Fields that must be off, with the value that is, and why.
_MUST_BE_OFF: Mapping[str, tuple[Any, str]] = {
    "temperature": (0.0, _DRAWS),
    "top_k": (0, _DRAWS),
    "top_p": (1.0, _DRAWS),
    "min_p": (0.0, _DRAWS),
    "typical_p": (1.0, _DRAWS),
    "top_n_sigma": (0.0, _DRAWS),
    "epsilon_cutoff": (0.0, _DRAWS),
    "eta_cutoff": (0.0, _DRAWS),
    "xtc_probability": (0.0, _DRAWS),
    "mirostat": (0, _DRAWS),
    "repetition_penalty": (1.0, _CHANGES),
    "presence_penalty": (0.0, _CHANGES),
    "frequency_penalty": (0.0, _CHANGES),
    "dry_multiplier": (0.0, _CHANGES),
    "no_repeat_ngram_size": (0, _CHANGES),
    "logit_bias": ({}, _CHANGES),
    "allowed_token_ids": (None, _CHANGES),
    "stop": ((), "beams end by tokens (end-of-text or stop_token_ids), not by text"),
    "structured_outputs": (
        None,
        "beams go back and branch, which grammars are not followed through yet",
    ),
    "logprob_token_ids": ((), "beams tell of likely tokens only (logprobs)"),
}
# What a caller who asks for beams gets where a field is not named: a model's own defaults for
# sampling must not forbid them.
BEAMS_OFF: Mapping[str, Any] = {name: off for name, (off, _) in _MUST_BE_OFF.items()}
_BEAMS_ONLY: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}


def check_beams(sampling: SamplingParams) -> None:
    """Raise InvalidParameter for what beams cannot go with, and for their fields without them."""
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
    for name, (off, why) in _MUST_BE_OFF.items():
        value = getattr(sampling, name)
        if value != off and not (name == "top_k" and value == -1):
            raise InvalidParameter(
                f"{name} is {show(value)} and use_beam_search is true; {why}: set {name} to "
                f"{show(off)}, or leave beam search out",
                param=name,
            )
    if sampling.max_tokens == 0:
        raise InvalidParameter(
            "max_tokens is 0 and use_beam_search is true; beams need tokens: set max_tokens to at "
            "least 1, or leave beam search out",
            param="max_tokens",
        )
