"""What the config.json of families with experts has in common, as an ExpertsSpec.

A family calls `read_experts` with its own names before it calls `read_decoder`. Knows JSON only
through ConfigReader.
"""

from __future__ import annotations

from typing import Any

from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.spec import ExpertsSpec
from quire.program.forms import RoutingForm

MAX_EXPERTS = 2**16
MAX_SIZE = 2**22
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Losses and noise of training, and whether the router's logits are returned as well.
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def read_experts(
    config: ConfigReader,
    *,
    size: str,
    layers: frozenset[int],
    normalized: bool,
    **own: Any,
) -> ExpertsSpec:
    """Return the spec. size: the name of an expert's inner width.

    own: fields of ExpertsSpec that the family has read.
    """
    config.pass_over(TRAINING)
    num_experts = _read_count(config)
    top_k = config.whole("num_experts_per_tok", 1, MAX_EXPERTS)
    if top_k > num_experts:
        config.note(
            f"num_experts_per_tok is {top_k}; there are {num_experts} experts",
            of=("num_experts_per_tok", *COUNTS),
        )
    return ExpertsSpec(
        layers=layers,
        num_experts=num_experts,
        top_k=min(top_k, num_experts),
        size=config.whole(size, 1, MAX_SIZE),
        form=RoutingForm.NORMALIZED if normalized else RoutingForm.SCORES,
        **own,
    )


def _read_count(config: ConfigReader) -> int:
    """The number of experts, under the name of the family's files or of transformers 5."""
    names = [name for name in COUNTS if config.has(name)] or [COUNTS[0]]
    counts = {name: config.whole(name, 1, MAX_EXPERTS) for name in names}
    if len(set(counts.values())) > 1:
        config.note(f"{' and '.join(names)} are {counts}; they must agree")
    return counts[names[0]]


def read_layer_list(config: ConfigReader, key: str) -> frozenset[int]:
    """A list of layers; none where the key is absent."""
    value = config.take(key)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or any(type(layer) is not int for layer in value):
        config.note(f"{key} is {show(value)}; a list of layer numbers is allowed")
        return frozenset()
    return frozenset(value)
