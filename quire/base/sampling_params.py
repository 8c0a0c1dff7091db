"""SamplingParams: what a caller may request of sampling, with every field checked.

The fields that most requests use are checked here; a record with any other goes through
sampling_checks.py, which has all limits. Knows nothing of logits or HTTP. After `resolve` the
record has a seed, and its numbers lie within their limits: lower layers need no checks.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar
from quire.base.parameter_checks import number, whole
from quire.base.sampling_checks import (
    EXCLUDING,
    FLAGS,
    MAY_BE_NONE,
    USUAL,
    USUAL_NUMBERS,
    USUAL_WHOLE_NUMBERS,
    checked_rare_fields,
    unknown_fields,
    yielded,
)
from quire.base.show import show


class _NotNamed(float):
    """A temperature that was not given: 1, or with beams, which are found and not drawn, 0."""


DEFAULT_TEMPERATURE = _NotNamed(1.0)


class _Checked(type):
    """Name the field that is meant where a call has an argument that is none."""

    def __call__(cls, *values: Any, **named: Any) -> Any:
        if values or not named.keys() <= cls.__dataclass_fields__.keys():  # type: ignore[attr-defined]
            raise unknown_fields(values, named, cls.__dataclass_fields__)  # type: ignore[attr-defined]
        return super().__call__(**named)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(metaclass=_Checked):
    """How tokens are chosen and when a request ends. Steps and order: quire/sampling/batch.py.

    temperature: 0 is greedy; noise is drawn by (seed, stream, position, token id).
    top_k: keep the k largest logits; 0 or -1 keeps all. top_p, min_p: as in the field.
    repetition_penalty looks at prompt and output; presence and frequency at the output only. With
    repeat_last_n all three look at the last so many tokens of both, as in llama.cpp (-1: all).
    logprobs: None for none, else how many alternatives beside the chosen token (0 to 20, -1 all);
    always of the raw logits, before bias, penalties and temperature.
    prompt_logprobs: the same for each token of the prompt but the first, which nothing precedes.
    logprob_token_ids: those of these ids too, with each generated token; logprobs is 0 at least.
    max_tokens: None means up to the context length. 0 (nothing is generated) is allowed with
    prompt_logprobs only, or with pooling: "last" or "mean" (base/sampling_checks.py).

    typical_p, epsilon_cutoff, eta_cutoff, no_repeat_ngram_size: as in transformers (prompt and
    output count). top_n_sigma (0 or -1 keeps all) and xtc_*: as in llama.cpp; the coin is noise of
    the seed. dry_*: as in text-generation-webui, repeats of up to 50 tokens; dry_penalty_last_n as
    in llama.cpp (-1: all tokens, 0: none). mirostat: 0, 1 or 2, as in llama.cpp; it replaces the
    filters. samplers: temperature and filters in this order (names: sampling_checks.SAMPLERS).
    bad_words: texts that are not written, as in vLLM, but also where the prompt began one, and in
    every way the tokenizer spells one: behind a space, a line break or nothing.
    allowed_token_ids: nothing else is chosen; None allows all. skip_special_tokens: these have no
    text in the answer; False writes them out (but not the last), so that stop strings match them.
    best_of: so many sequences are computed and the n best returned, by mean log-probability
    of their tokens (of the raw logits); None computes n.
    use_beam_search: beams as in transformers, best_of (or n) of them, n returned; length_penalty
    and early_stopping (True, False or "never") go with it; temperature is 0, its default there.
    structured_outputs: the answer is text of this grammar (quire.base.grammar makes them; an
    object of vLLM's form, such as {"json": schema}, becomes one). A complete answer ends, whatever
    min_tokens and ignore_eos say; one cut off by max_tokens or a stop string is not complete.

    Raises InvalidParameter when a value is outside of what is allowed.
    """

    n: int = 1
    temperature: float = DEFAULT_TEMPERATURE
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: str | None = None
    logprob_token_ids: tuple[int, ...] = ()
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    no_repeat_ngram_size: int = 0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    structured_outputs: Grammar | None = None

    def __post_init__(self) -> None:
        if self.temperature is DEFAULT_TEMPERATURE:
            self._settle("temperature", 0.0 if self.use_beam_search is True else 1.0)
        # Several records are made for each request, and most have only usual fields.
        for name, least, most in USUAL_WHOLE_NUMBERS:
            value = getattr(self, name)
            if type(value) is int and least <= value <= most:
                continue
            if value is not None or name not in MAY_BE_NONE:
                self._settle(name, whole(name, value, least, most))
        for name, low, high in USUAL_NUMBERS:
            value = getattr(self, name)
            if not (type(value) is float and low < value <= high):
                self._settle(name, number(name, value, low, high))
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(
                    f"{name} is {show(getattr(self, name))}; true or false is allowed", param=name
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; "
                "lower min_tokens",
                param="min_tokens",
            )
        rare = _rare_values(self)
        if tuple(map(type, rare)) != _RARE_TYPES or rare != _RARE or self.max_tokens == 0:
            given = dict(zip(_NAMES, _values(self), strict=True))
            for name, value in checked_rare_fields(given, _DEFAULTS):
                self._settle(name, value)

    def _settle(self, name: str, value: Any) -> None:
        """Keep a checked value in the type of its field, whatever type it came in."""
        object.__setattr__(self, name, value)

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed: streams or beams."""
        return self.n if self.best_of is None else self.best_of

    @property
    def has_rare_steps(self) -> bool:
        """Whether token choice needs a step that few requests ask for (RareParameters)."""
        return _RARE_STEPS(self) != _RARE_STEPS_OFF

    @property
    def ends_beams_by_text(self) -> bool:
        """Whether beams end by stop strings, so that the search must read their text."""
        return self.use_beam_search and bool(self.stop)

    @property
    def is_ranked(self) -> bool:
        """Whether fewer streams are returned than computed: the best, at the end."""
        return self.num_sequences > self.n and not self.use_beam_search

    def changed(self, **named: Any) -> SamplingParams:
        """Return a copy with these fields replaced, as for a caller that names only some.

        What they do not name and what they ask for cannot go with is switched off: a model's
        defaults (top_k and the like) must not forbid it. Raises InvalidParameter.
        """
        own = dict(zip(_NAMES, _values(self), strict=True))
        if self.has_rare_steps or not EXCLUDING.isdisjoint(named):
            own |= yielded(own, named)
        return SamplingParams(**{**own, **named})

    def resolve(self) -> SamplingParams:
        """Return a copy that has a seed; one without is given a random seed."""
        if self.seed is not None:
            return self
        resolved = copy(self)  # its values are checked
        resolved._settle("seed", random_seed())
        return resolved


def random_seed() -> int:
    """Return the seed of a request that names none: a number that JSON's readers keep exactly."""
    return secrets.randbelow(2**53)


_NAMES = tuple(entry.name for entry in fields(SamplingParams))
_values = attrgetter(*_NAMES)
# The defaults of the fields that few requests name.
_DEFAULTS = {entry.name: entry.default for entry in fields(SamplingParams)} | {"logit_bias": {}}
_RARE_NAMES = tuple(name for name in _NAMES if name not in {*USUAL, *FLAGS} - {"use_beam_search"})
_rare_values = attrgetter(*_RARE_NAMES)
_RARE = tuple(_DEFAULTS[name] for name in _RARE_NAMES)
_RARE_TYPES = tuple(map(type, _RARE))
_RARE_STEPS = attrgetter(
    *("typical_p", "top_n_sigma", "epsilon_cutoff", "eta_cutoff", "xtc_probability"),
    *("dry_multiplier", "no_repeat_ngram_size", "mirostat", "allowed_token_ids", "samplers"),
)
_RARE_STEPS_OFF = _RARE_STEPS(SamplingParams())
