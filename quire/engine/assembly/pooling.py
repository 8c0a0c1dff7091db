"""Whether and how an engine makes embeddings: its settings and the files of its model.

Loads no tensor. Always holds: what a folder says is honoured, or refused by name; a setting only
adds what the folder leaves open.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.base.errors import SettingError
from quire.config.groups import ModelConfig
from quire.models.pooling_files import PoolingSpec, plain_pooling, read_pooling
from quire.models.spec import ModelSpec

MAX_MEAN_TOKENS = 1 << 21


def model_pooling(config: ModelConfig, folder: Path, spec: ModelSpec) -> PoolingSpec | None:
    """Return how embeddings are made; None where they are off.

    Raises SettingError, and ConfigError for files that cannot be honoured.
    """
    size = spec.embedding.size or spec.hidden_size
    if config.convert == "none":
        if not spec.has_head:
            raise SettingError(
                "convert is none and the model is a decoder without a head, which makes nothing "
                "but embeddings; leave it out"
            )
        if config.matryoshka_dimensions is not None:
            raise SettingError(
                "matryoshka_dimensions is given and convert is none, so there are no embeddings; "
                "leave one of them out"
            )
        return None
    pooling = read_pooling(folder, size)
    if pooling is None and (config.convert == "embed" or not spec.has_head):
        pooling = plain_pooling(size)
    if pooling is not None and config.convert == "embed":
        pooling = replace(pooling, embeds=True)
    _check_length(pooling, config.max_model_len or spec.max_positions)
    if config.matryoshka_dimensions is None:
        return pooling
    if pooling is None:
        raise SettingError(
            "matryoshka_dimensions is given and the model has no files of sentence-transformers, "
            "so it makes no embeddings; add --convert embed, or leave it out"
        )
    return _with_dimensions(pooling, config.matryoshka_dimensions)


def _check_length(pooling: PoolingSpec | None, num_tokens: int) -> None:
    """Refuse contexts of which sums could exceed 64 bits (quire/runner/pooling.py)."""
    if pooling is not None and pooling.pooling == "mean" and num_tokens > MAX_MEAN_TOKENS:
        raise SettingError(
            f"the model has {num_tokens} positions, and embeddings that are a mean take at most "
            f"{MAX_MEAN_TOKENS}; lower --max-model-len, or turn embeddings off (--convert none)"
        )


def _with_dimensions(pooling: PoolingSpec, given: str) -> PoolingSpec:
    if given == "any":
        return replace(pooling, any_dimensions=True, dimensions=())
    sizes = tuple(sorted({int(size) for size in given.split(",")}))
    if sizes[-1] > pooling.size:
        raise SettingError(
            f"matryoshka_dimensions holds {sizes[-1]}; the model's embeddings have {pooling.size} "
            "dimensions, give fewer"
        )
    return replace(pooling, any_dimensions=False, dimensions=sizes)
