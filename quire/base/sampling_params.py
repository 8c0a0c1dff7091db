"""What a caller may ask of sampling, and the check of each field.

Knows nothing of logits or HTTP. After `resolve` the record is complete: it has a seed and its
numbers lie within the limits below, so nobody further down checks again.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 1_024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1_024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1_024
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**63 - 1
# Below, logits that are divided by it leave the range of f32, and of sense long before.
MIN_REPETITION_PENALTY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    temperature: 0 is greedy; noise is drawn by (seed, stream, position, token id).
    top_k: keep the k largest logits; 0 or -1 keeps all. top_p, min_p: as in the field.
    repetition_penalty looks at prompt and output; presence and frequency at the output only.
    logprobs: None for none, else how many alternatives beside the chosen token (0 to 20);
    always of the raw logits, before bias, penalties and temperature.
    prompt_logprobs: the same for each token of the prompt but the first, which nothing precedes.
    logprob_token_ids: with each generated token the log-probabilities of these ids too; asks for
    logprobs=0 where logprobs is None.
    max_tokens: None means up to the context length. 0 (nothing is generated) is allowed with
    prompt_logprobs only.

    Raises InvalidParameter when a value is outside of what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._settle("n", _whole("n", self.n, 1, MAX_N))
        self._settle("top_k", _whole("top_k", self.top_k, -1, 2**31 - 1))
        self._settle("min_tokens", _whole("min_tokens", self.min_tokens, 0, 2**31 - 1))
        for name, low, high in (
            ("seed", -(2**63), MAX_SEED),
            ("max_tokens", 0, 2**31 - 1),
            ("logprobs", 0, MAX_TOP_LOGPROBS),
            ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                self._settle(name, _whole(name, getattr(self, name), low, high))
        for name, least, most in (
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", MIN_REPETITION_PENALTY, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            self._settle(name, _number(name, getattr(self, name), least, most))
        self._settle("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        for name in ("include_stop_str_in_output", "ignore_eos"):
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
        self._check_stops()
        self._check_logit_bias()
        self._check_logprob_token_ids()
        if self.max_tokens == 0:
            self._check_no_output()

    def _settle(self, name: str, value: Any) -> None:
        """Keep a checked value in the type of its field, whatever type it came in."""
        object.__setattr__(self, name, value)

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._settle("stop", _listed("stop", stop))
        self._settle("stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidParameter(
                    f"stop holds {show(text)}; each entry must be a string of 1 to "
                    f"{MAX_STOP_STRING_CHARS} characters",
                    param="stop",
                )
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise InvalidParameter(
                    f"stop holds {text!a}, with a lone surrogate: half of a character, which "
                    "no text can hold; send whole characters",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most "
                f"{MAX_STOP_TOKEN_IDS} are allowed",
                param="stop_token_ids",
            )
        checked = (_whole("stop_token_ids", id_, 0, 2**31 - 1) for id_ in self.stop_token_ids)
        self._settle("stop_token_ids", tuple(checked))

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameter(
                f"logit_bias is {show(self.logit_bias)}; token ids with their numbers are allowed",
                param="logit_bias",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} "
                "are allowed",
                param="logit_bias",
            )
        checked = {
            _whole("logit_bias", token_id, 0, 2**31 - 1): _number("logit_bias", bias, -100.0, 100.0)
            for token_id, bias in self.logit_bias.items()
        }
        self._settle("logit_bias", checked)

    def _check_logprob_token_ids(self) -> None:
        given = _listed("logprob_token_ids", self.logprob_token_ids)
        if len(given) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidParameter(
                f"logprob_token_ids has {len(given)} ids; at most {MAX_LOGPROB_TOKEN_IDS} are "
                "allowed",
                param="logprob_token_ids",
            )
        checked = tuple(_whole("logprob_token_ids", id_, 0, 2**31 - 1) for id_ in given)
        self._settle("logprob_token_ids", checked)
        if checked and self.logprobs is None:
            self._settle("logprobs", 0)

    def _check_no_output(self) -> None:
        """What cannot be asked together with max_tokens 0."""
        if self.prompt_logprobs is None:
            raise InvalidParameter(
                "max_tokens is 0 and the prompt's log-probabilities are not asked for; a whole "
                f"number from 1 to {2**31 - 1} is allowed, or 0 with prompt_logprobs",
                param="max_tokens",
            )
        if self.n > 1:
            raise InvalidParameter(
                f"n is {self.n} and max_tokens is 0; choices without tokens cannot differ: leave "
                "n out",
                param="n",
            )
        if self.logprob_token_ids:
            raise InvalidParameter(
                "logprob_token_ids is given and max_tokens is 0; they are told with generated "
                "tokens: set max_tokens to at least 1, or leave them out",
                param="logprob_token_ids",
            )

    def resolve(self) -> SamplingParams:
        """Return a copy that has a seed; one without is given a random seed."""
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbelow(2**53))


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidParameter(f"{name} is {show(value)}; a list is allowed", param=name)
    return tuple(value)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    """The value as an int; NumPy's integers are integers, booleans are not."""
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or not low <= whole <= high:
        raise InvalidParameter(
            f"{name} is {show(value)}; a whole number from {low} to {high} is allowed",
            param=name,
        )
    return whole


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """The value as a float; NumPy's numbers are numbers, booleans and texts are not."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    # NaN fails every comparison.
    if not ((low < number if open_low else low <= number) and number <= high):
        least = f"above {low}" if open_low else f"from {low}"
        raise InvalidParameter(
            f"{name} is {show(value)}; a finite number {least} to {high} is allowed", param=name
        )
    return number
