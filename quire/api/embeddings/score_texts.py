"""The texts of /v1/score and /v1/rerank: the names of both sides, and their longest lengths.

Clients of vLLM name the sides of a score in four ways; errors use the names that were sent. A text
beyond max_tokens_per_query or max_tokens_per_doc is cut at its end. Knows no model beyond its
tokenizer. Always holds: at most max_text_bytes of a text are tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.embeddings.inputs import yield_regularly
from quire.api.generation.request_context import RequestContext
from quire.api.generation.text_bounds import max_text_bytes
from quire.base.errors import InvalidParameter
from quire.base.show import show

# Names of both sides of a score.
SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
# The longest query and document, in tokens.
MAX_TOKENS = ("max_tokens_per_query", "max_tokens_per_doc")
_NUM_TOKENS_LIMIT = 2**31 - 1
_PART_OF_CHARACTER = "\ufffd"


def sides_of(given: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names under which both sides of a score are given. Raises InvalidParameter."""
    names = dict.fromkeys(name for pair in SIDES for name in pair)
    found = [name for name in names if name in given]
    fitting = [pair for pair in SIDES if set(found) <= set(pair)]
    if not fitting:
        pairs = "; ".join(" and ".join(pair) for pair in SIDES)
        raise InvalidParameter(
            f"{' and '.join(found)} are given; two texts are compared, as one of: {pairs}",
            param=found[-1],
        )
    return fitting[0]


async def shortened(request: RequestContext, texts: Sequence[str], limit: str) -> Sequence[str]:
    """Return the texts, each cut to the tokens that the field `limit` allows.

    Raises InvalidParameter.
    """
    num_tokens = request.given.get(limit, 0)
    if type(num_tokens) is not int or not 0 <= num_tokens <= _NUM_TOKENS_LIMIT:
        raise InvalidParameter(
            f"{limit} is {show(num_tokens)}; a whole number from 1 is allowed, or 0 to cut nothing",
            param=limit,
        )
    if not num_tokens:
        return texts
    cut = []
    for at, text in enumerate(texts):
        await yield_regularly(at)
        cut.append(await request.run_in_thread(_first_tokens, request, text, num_tokens))
    return cut


def _first_tokens(request: RequestContext, text: str, num_tokens: int) -> str:
    """Return the first `num_tokens` tokens of a text as text; all of it if it has no more."""
    tokenizer = request.engine.tokenizer
    tokenized = text.encode()[: max_text_bytes(request.engine)].decode(errors="ignore")
    ids = tokenizer.encode(tokenized, add_special_tokens=False)
    if len(ids) <= num_tokens:
        return text
    first = tokenizer.decode(ids[:num_tokens], skip_special_tokens=False)
    return first.rstrip(_PART_OF_CHARACTER)
