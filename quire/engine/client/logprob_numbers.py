"""How many numbers a request's log-probabilities are, and their bound.

All of the vocabulary (-1) is as many numbers a token as it has ids; what that would make of a long
prompt or answer is refused before it is computed. Knows no JSON.
"""

from __future__ import annotations

from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import ALL_LOGPROBS
from quire.base.sampling_params import SamplingParams

# For each request, 4 bytes each until they are written, and up to some 70 bytes of JSON. A prompt
# of 131,072 tokens has 2.75 million at 20 alternatives a token.
MAX_NUMBERS = 4_194_304


def with_all(num_top: int, vocab_size: int) -> int:
    """Return a number of alternatives; of all, the size of the vocabulary."""
    return vocab_size if num_top == ALL_LOGPROBS else num_top


def check_all_logprobs(
    sampling: SamplingParams, vocab_size: int, *, prompt_tokens: int, max_tokens: int
) -> None:
    """Raise InvalidParameter where all log-probabilities would be too many numbers."""
    for name, num_tokens, what in (
        ("prompt_logprobs", prompt_tokens, "the prompt has"),
        ("logprobs", max_tokens * sampling.num_sequences, "the answer may have"),
    ):
        if getattr(sampling, name) != ALL_LOGPROBS or num_tokens * vocab_size <= MAX_NUMBERS:
            continue
        raise InvalidParameter(
            f"{name} is -1, the whole vocabulary of {vocab_size} ids for each token, and {what} "
            f"{num_tokens} tokens; at most {MAX_NUMBERS} numbers a request are allowed, those of "
            f"{MAX_NUMBERS // vocab_size} tokens: send a shorter prompt, lower max_tokens, or ask "
            "for the best alternatives (1 to 20), or for those of listed ids (logprob_token_ids)",
            param=name,
        )
