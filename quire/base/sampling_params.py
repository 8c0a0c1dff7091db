"""What a caller may ask of sampling, and the check of each field.

Knows nothing of logits or HTTP. After `resolve` the record is complete: it has a seed and its
numbers lie within the limits below, so lower layers need no checks.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, grammar_of
from quire.base.parameter_checks import MAX_TOKEN_ID, number, texts, token_ids, whole
from quire.base.show import show

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 1_024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1_024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1_024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 32_768
MAX_DRY_BREAKERS = 32
MAX_DRY_BREAKER_CHARS = 40
# Repeats are followed back over so many tokens, so that a step is linear in the history.
MAX_REPEAT_TOKENS = 50
MAX_TEMPERATURE = 100.0
# Below, the noise could not turn a difference that f32 shows: such temperatures are 0.
SMALLEST_TEMPERATURE = 2.0**-40
MAX_SEED = 2**63 - 1
# Below, logits that are divided by it leave the range of f32, and of sense long before.
MIN_REPETITION_PENALTY = 0.01
EARLY_STOPPING = (True, False, "never")
_BEAMS_ONLY: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}


class _NotNamed(float):
    """A temperature that was not given: 1, or with beams, which are found and not drawn, 0."""


DEFAULT_TEMPERATURE = _NotNamed(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Steps and order: quire/sampling/batch.py.

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

    typical_p, epsilon_cutoff, eta_cutoff, no_repeat_ngram_size: as in transformers (prompt and
    output count). top_n_sigma: as in llama.cpp, 0 or -1 keeps all. xtc_*: as in llama.cpp; the
    coin is part of the keyed noise. dry_*: as in text-generation-webui, repeats of up to
    50 tokens; dry_penalty_last_n as in llama.cpp (-1 looks at all tokens, 0 at none).
    mirostat: 0 or 2, as in llama.cpp; it replaces the filters (top_k and so on).
    bad_words: texts that are not written, as in vLLM, but also where the prompt began one, and in
    every way the tokenizer spells one: behind a space, a line break or nothing.
    allowed_token_ids: nothing else is chosen; None allows all.
    skip_special_tokens: special tokens have no text in the answer; False writes them out (but not
    the one that ended it), so that stop strings can match them.
    best_of: so many sequences are computed and the n best returned, by mean log-probability
    of their tokens (of the raw logits); None computes n.
    use_beam_search: beams as in transformers, best_of (or n) of them, n returned; with
    length_penalty and early_stopping (True, False or "never"); temperature must be 0, its default
    there.
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
        # Several of these are made a request, most without anything rare: one look at all of that.
        rare = _rare_values(self)
        is_plain = tuple(map(type, rare)) == _RARE_TYPES and rare == _RARE
        for name, low, high in _USUAL_WHOLE_NUMBERS if is_plain else WHOLE_NUMBERS:
            value = getattr(self, name)
            if type(value) is int and low <= value <= high:
                continue
            if value is not None or name not in _MAY_BE_NONE:
                self._settle(name, whole(name, value, low, high))
        for name, least, most in _USUAL_NUMBERS if is_plain else NUMBERS:
            value, open_low = getattr(self, name), name in MUST_BE_ABOVE
            if not (type(value) is float and least < value <= most):
                self._settle(name, number(name, value, least, most, open_low=open_low))
        if self.top_n_sigma < 0:  # llama.cpp's way to say off
            self._settle("top_n_sigma", 0.0)
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
        if not is_plain:
            self._check_stops()
            self._check_logprob_token_ids()
            self._check_words_and_ids()
        self._check_logit_bias()
        self._check_mirostat_and_xtc()
        self._check_best_of()
        if not isinstance(self.structured_outputs, Grammar | None):
            self._settle("structured_outputs", grammar_of(self.structured_outputs))
        _check_beams(self)
        if self.max_tokens == 0:
            self._check_no_output()

    def _settle(self, name: str, value: Any) -> None:
        """Keep a checked value in the type of its field, whatever type it came in."""
        object.__setattr__(self, name, value)

    def _check_stops(self) -> None:
        self._settle(
            "stop",
            texts("stop", self.stop, most=MAX_STOP_STRINGS, max_chars=MAX_STOP_STRING_CHARS),
        )
        self._settle(
            "stop_token_ids",
            token_ids("stop_token_ids", self.stop_token_ids, most=MAX_STOP_TOKEN_IDS),
        )

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
            whole("logit_bias", token_id, 0, MAX_TOKEN_ID): number(
                "logit_bias", bias, -100.0, 100.0
            )
            for token_id, bias in self.logit_bias.items()
        }
        self._settle("logit_bias", checked)

    def _check_logprob_token_ids(self) -> None:
        checked = token_ids("logprob_token_ids", self.logprob_token_ids, most=MAX_LOGPROB_TOKEN_IDS)
        self._settle("logprob_token_ids", checked)
        if checked and self.logprobs is None:
            self._settle("logprobs", 0)

    def _check_words_and_ids(self) -> None:
        bad_words = texts(
            "bad_words", self.bad_words, most=MAX_BAD_WORDS, max_chars=MAX_BAD_WORD_CHARS
        )
        if blank := next((word for word in bad_words if not word.strip()), None):
            raise InvalidParameter(
                f"bad_words holds {show(blank)}, which is white space only; give words",
                param="bad_words",
            )
        self._settle("bad_words", bad_words)
        if isinstance(self.dry_sequence_breakers, str):
            raise InvalidParameter(
                f"dry_sequence_breakers is the text {show(self.dry_sequence_breakers)}; a list of "
                "strings is allowed (a list written as a text, as some programs send it, is not "
                "read)",
                param="dry_sequence_breakers",
            )
        breakers = texts(
            "dry_sequence_breakers",
            self.dry_sequence_breakers,
            most=MAX_DRY_BREAKERS,
            max_chars=MAX_DRY_BREAKER_CHARS,
        )
        self._settle("dry_sequence_breakers", breakers)
        if self.allowed_token_ids is None:
            return
        allowed = token_ids("allowed_token_ids", self.allowed_token_ids, most=MAX_ALLOWED_TOKEN_IDS)
        if not allowed:
            raise InvalidParameter(
                "allowed_token_ids is an empty list, so nothing could be chosen; give at least "
                "one id, or leave it out to allow all",
                param="allowed_token_ids",
            )
        if len(set(allowed)) < len(allowed):
            allowed = tuple(dict.fromkeys(allowed))
        self._settle("allowed_token_ids", allowed)

    def _check_mirostat_and_xtc(self) -> None:
        """What mirostat and XTC cannot go with."""
        if self.mirostat == 1:
            raise InvalidParameter(
                "mirostat is 1; 0 (off) and 2 are allowed: version 2 steers towards the same "
                "mirostat_tau without guessing how the tail falls off",
                param="mirostat",
            )
        if self.mirostat:
            for name, off in FILTERS_OFF.items():
                if getattr(self, name) > 0 and getattr(self, name) != off:
                    raise InvalidParameter(
                        f"mirostat is 2 and {name} is {getattr(self, name)}; mirostat alone "
                        f"decides which tokens are kept: set {name} to {off}, or mirostat to 0",
                        param="mirostat",
                    )
        if self.temperature < SMALLEST_TEMPERATURE:
            for name in ("mirostat", "xtc_probability"):
                if getattr(self, name):
                    raise InvalidParameter(
                        f"{name} is {getattr(self, name)} and temperature is {self.temperature}, "
                        "which always takes the likeliest token; raise temperature, or leave "
                        f"{name} out",
                        param=name,
                    )

    def _check_best_of(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameter(
                f"best_of is {self.best_of} and n is {self.n}; best_of counts all sequences that "
                f"are computed, of which the n best are returned: raise it to at least {self.n}",
                param="best_of",
            )

    def _check_no_output(self) -> None:
        """What cannot be asked together with max_tokens 0."""
        if self.prompt_logprobs is None:
            raise InvalidParameter(
                "max_tokens is 0 and the prompt's log-probabilities are not asked for; a whole "
                f"number from 1 to {2**31 - 1} is allowed, or 0 with prompt_logprobs",
                param="max_tokens",
            )
        if self.num_sequences > 1:
            param = "n" if self.best_of is None else "best_of"
            raise InvalidParameter(
                f"{param} is {self.num_sequences} and max_tokens is 0; choices without tokens "
                f"cannot differ: leave {param} out",
                param=param,
            )
        if self.logprob_token_ids:
            raise InvalidParameter(
                "logprob_token_ids is given and max_tokens is 0; they come with generated "
                "tokens: set max_tokens to at least 1, or leave them out",
                param="logprob_token_ids",
            )

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

        Where they ask for mirostat or beams, what these cannot go with and they do not name is
        switched off: a model's defaults (top_k and the like) must not forbid it. Raises
        InvalidParameter.
        """
        off: Mapping[str, Any] = FILTERS_OFF if named.get("mirostat") == 2 else {}
        if named.get("use_beam_search") is True:
            off = BEAMS_OFF
        own = dict(zip(_NAMES, _values(self), strict=True))
        return SamplingParams(**{**own, **off, **named})

    def resolve(self) -> SamplingParams:
        """Return a copy that has a seed; one without is given a random seed."""
        if self.seed is not None:
            return self
        resolved = copy(self)  # its values are checked
        resolved._settle("seed", random_seed())
        return resolved


def random_seed() -> int:
    """The seed of a request that names none: a number that JSON's readers keep exactly."""
    return secrets.randbelow(2**53)


# The filters of token choice, with the values that keep every token.
FILTERS_OFF: Mapping[str, float] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "xtc_probability": 0.0,
}
# What must be off beside beams, which are found, not drawn. A caller that asks for beams gets these
# where he does not name them: a model's own defaults must not forbid a search.
BEAMS_OFF: Mapping[str, Any] = {"temperature": 0.0, **FILTERS_OFF, "mirostat": 0}
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "use_beam_search")
_MAY_BE_NONE = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs", "best_of"})
WHOLE_NUMBERS = (
    ("n", 1, MAX_N),
    ("best_of", 1, MAX_N),
    ("top_k", -1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("seed", -(2**63), MAX_SEED),
    ("max_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
    ("dry_allowed_length", 1, MAX_REPEAT_TOKENS),
    ("dry_penalty_last_n", -1, 2**31 - 1),
    ("no_repeat_ngram_size", 0, MAX_REPEAT_TOKENS),
    ("mirostat", 0, 2),
)
MUST_BE_ABOVE = frozenset({"typical_p"})
NUMBERS = (
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("typical_p", 0.0, 1.0),
    ("top_n_sigma", -1.0, 100.0),
    ("epsilon_cutoff", 0.0, 1.0),
    ("eta_cutoff", 0.0, 1.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 1.0, 100.0),
    ("mirostat_tau", 0.0, 100.0),
    ("mirostat_eta", 0.0, 10.0),
    ("length_penalty", -10.0, 10.0),
)

# What a request or a model's defaults often name is looked at by itself, the rest together.
_USUAL = frozenset(
    {"n", "temperature", "top_k", "top_p", "seed", "max_tokens", "min_tokens", "logprobs"}
)
_USUAL_WHOLE_NUMBERS = tuple(row for row in WHOLE_NUMBERS if row[0] in _USUAL)
_USUAL_NUMBERS = tuple(row for row in NUMBERS if row[0] in _USUAL)
_NAMES = tuple(entry.name for entry in fields(SamplingParams))
_values = attrgetter(*_NAMES)
_RARE_NAMES = (
    *(name for name, _, _ in (*WHOLE_NUMBERS, *NUMBERS) if name not in _USUAL),
    "stop",
    "stop_token_ids",
    "logprob_token_ids",
    "bad_words",
    "allowed_token_ids",
    "dry_sequence_breakers",
)
_rare_values = attrgetter(*_RARE_NAMES)
_DEFAULTS = {entry.name: entry.default for entry in fields(SamplingParams)}
_RARE = tuple(_DEFAULTS[name] for name in _RARE_NAMES)
_RARE_TYPES = tuple(map(type, _RARE))


def _check_beams(sampling: SamplingParams) -> None:
    """Raise InvalidParameter for fields that beam search excludes, and for its own without it."""
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
    for name, off in BEAMS_OFF.items():
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


_RARE_STEPS = attrgetter(
    *("typical_p", "top_n_sigma", "epsilon_cutoff", "eta_cutoff", "xtc_probability"),
    *("dry_multiplier", "no_repeat_ngram_size", "mirostat", "allowed_token_ids"),
)
_RARE_STEPS_OFF = _RARE_STEPS(SamplingParams())
