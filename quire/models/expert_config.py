"""What the config.json of families with experts has in common, as an ExpertsSpec.

A family calls `read_experts` with its own names before it calls `read_decoder`, and gives the
fields that it alone has with dataclasses.replace. Knows JSON only through ConfigReader.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.spec import ExpertsSpec

# Counts beyond these are mistakes; what the kernels hold is less (_native.MAX_EXPERTS).
MAX_COUNT = 2**16
MAX_SIZE = 2**22
# The number of experts, under the name of the family's files or of transformers 5.
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Losses and noise of training, and whether the router's logits are returned as well.
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def read_experts(
    config: ConfigReader,
    *,
    layers: frozenset[int],
    normalized: bool,
    size_key: str,
    top_k_key: str = "num_experts_per_tok",
    count_keys: Sequence[str] = COUNT_KEYS,
) -> ExpertsSpec:
    """Return the spec, with the defaults of ExpertsSpec for what is not read here.

    size_key, top_k_key: the keys of an expert's inner width and of the number chosen per token.
    count_keys: those of the number of experts, which must agree where several are given.
    """
    config.pass_over(TRAINING)
    num_experts = _read_count(config, count_keys)
    top_k = config.whole(top_k_key, 1, MAX_COUNT)
    if top_k > num_experts:
        config.note(
            f"{top_k_key} is {top_k}; there are {num_experts} experts",
            of=(top_k_key, *count_keys),
        )
    return ExpertsSpec(
        layers=layers,
        num_experts=num_experts,
        top_k=min(top_k, num_experts),
        size=config.whole(size_key, 1, MAX_SIZE),
        normalized=normalized,
    )


def _read_count(config: ConfigReader, keys: Sequence[str]) -> int:
    """Return the number of experts."""
    names = [name for name in keys if config.has(name)] or [keys[0]]
    counts = {name: config.whole(name, 1, MAX_COUNT) for name in names}
    if len(set(counts.values())) > 1:
        config.note(f"{' and '.join(names)} are {counts}; they must agree")
    return counts[names[0]]


def read_layer_list(config: ConfigReader, key: str) -> frozenset[int]:
    """Return a list of layers; none where the key is absent."""
    value = config.take(key)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or any(type(layer) is not int for layer in value):
        config.note(f"{key} is {show(value)}; a list of layer numbers is allowed")
        return frozenset()
    return frozenset(value)
