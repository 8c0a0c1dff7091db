"""Check the known tokens of an answer that is to be continued (`output_ids`).

They count as output, so they must be ids of the model, fewer than the answer may have, and none of
them may have ended it. Knows no engine and no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams

PARAM = "output_ids"


def check_output_ids(
    output_ids: Sequence[int],
    sampling: SamplingParams,
    stop_ids: Sequence[int],
    vocab_size: int,
    *,
    max_tokens: int,
) -> None:
    """Raise InvalidParameter unless an answer with `output_ids` can go on.

    max_tokens: of the whole answer. stop_ids: tokens that end it.
    """
    check_combination(sampling)
    if not (min(output_ids) >= 0 and max(output_ids) < vocab_size):
        outside = next(id_ for id_ in output_ids if not 0 <= id_ < vocab_size)
        raise InvalidParameter(
            f"output_ids holds token id {outside}; the model has ids 0 to {vocab_size - 1}",
            param=PARAM,
        )
    if len(output_ids) >= max_tokens:
        raise InvalidParameter(
            f"output_ids has {len(output_ids)} tokens and the answer may have {max_tokens} "
            "(max_tokens counts them too); it is complete: raise max_tokens to go on",
            param=PARAM,
        )
    if not set(stop_ids).isdisjoint(output_ids):
        ended = next(id_ for id_ in output_ids if id_ in stop_ids)
        raise InvalidParameter(
            f"output_ids holds token {ended}, which ends an answer; leave out that token and what "
            "follows it, or set ignore_eos",
            param=PARAM,
        )


def check_combination(sampling: SamplingParams) -> None:
    """Raise InvalidParameter for parameters with which no answer can be continued."""
    conflicts = {
        "n": (sampling.n != 1, "answers of one choice can be continued: leave n out"),
        "best_of": (sampling.best_of not in (None, 1), "leave best_of out"),
        "use_beam_search": (sampling.use_beam_search, "beams cannot be continued"),
        "mirostat": (
            bool(sampling.mirostat),
            "its state depends on every token before: leave mirostat out",
        ),
        "prompt_logprobs": (
            sampling.prompt_logprobs is not None,
            "they came with the first tokens: leave prompt_logprobs out",
        ),
    }
    for name, (is_given, advice) in conflicts.items():
        if is_given:
            raise InvalidParameter(
                f"output_ids is given with {name} {getattr(sampling, name)!r}; {advice}",
                param=PARAM,
            )
