"""From the exact sums of a prompt's hidden rows to its vector, and from vectors to a score.

    vector = vector_of(delta.pooled, card.pooling, dimensions=256)

Knows no requests and no JSON. Always holds: a vector is one sequence of rounded operations over its
prompt's sums, so it is the same bit for bit whatever computed the sums, in however many steps;
lengths and products are sums that are rounded once (math.fsum).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidParameter
from quire.base.rare_records import POOL_SCALE, PooledSums
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.models.pooling_files import PoolingSpec

Float32s = NDArray[np.float32]


def pooling_params(pooling: PoolingSpec) -> SamplingParams:
    """Return the parameters of a request that is pooled and generates nothing."""
    return SamplingParams(pooling=pooling.pooling, max_tokens=0, seed=0, temperature=0.0)


def vector_of(
    pooled: PooledSums,
    pooling: PoolingSpec,
    *,
    dimensions: int | None = None,
    normalizes: bool | None = None,
) -> Float32s:
    """Return the vector of one prompt [dimensions].

    The first `dimensions` numbers are kept (None: all), then brought to length 1 where the model or
    the caller says so; a vector of zeros stays.
    """
    mean = pooled.sums[0].astype(np.float64) / (POOL_SCALE * int(pooled.counts[0]))
    kept = mean if dimensions is None else mean[:dimensions]
    if pooling.normalizes if normalizes is None else normalizes:
        length = math.sqrt(math.fsum((kept * kept).tolist()))
        kept = kept / length if length > 0.0 else kept
    vector: Float32s = kept.astype(np.float32)
    return vector


def checked_dimensions(value: object, pooling: PoolingSpec, name: str) -> int | None:
    """Return the size a request asks for; None for the model's own.

    name: of the model. Raises InvalidParameter with what is allowed.
    """
    if value is None or (type(value) is int and value == pooling.size):
        return None
    is_allowed = pooling.any_dimensions or value in pooling.dimensions
    if type(value) is int and 1 <= value < pooling.size and is_allowed:
        return value
    if pooling.any_dimensions:
        allowed = f"a whole number from 1 to {pooling.size} is allowed"
    elif pooling.dimensions:
        sizes = [*(size for size in pooling.dimensions if size < pooling.size), pooling.size]
        allowed = f"one of {', '.join(map(str, sizes))} is allowed"
    else:
        allowed = (
            f"model {name} has {pooling.size} dimensions and was not declared to keep its meaning "
            "when it is cut (Matryoshka): leave dimensions out, or start with "
            "--matryoshka-dimensions any (or a list such as 256,512) if the model was trained so"
        )
    raise InvalidParameter(f"dimensions is {show(value)}; {allowed}", param="dimensions")


def prompt_text(value: object, pooling: PoolingSpec, *, param: str = "prompt_name") -> str:
    """Return the text that precedes inputs, by the name of one of the model's prompts; None takes
    the model's default, "" none. Raises InvalidParameter."""
    name = pooling.default_prompt if value is None else value
    if name is None or name == "":
        return ""
    if not isinstance(name, str) or name not in pooling.prompts:
        named = ", ".join(map(show, pooling.prompts)) or "this model has none"
        raise InvalidParameter(
            f'{param} is {show(value)}; the name of one of the model\'s prompts is allowed, or "" '
            f"for none: {named}",
            param=param,
        )
    return pooling.prompts[name]


def similarity(left: Float32s, right: Float32s, pooling: PoolingSpec) -> float:
    """Return the cosine of two vectors, or their product where the model's files say "dot"."""
    products = left.astype(np.float64) * right.astype(np.float64)
    product = math.fsum(products.tolist())
    if pooling.similarity == "dot":
        return product
    length = _length(left) * _length(right)
    return product / length if length > 0.0 else 0.0


def _length(vector: Float32s) -> float:
    return math.sqrt(math.fsum((vector.astype(np.float64) ** 2).tolist()))
