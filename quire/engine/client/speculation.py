"""The Speculation of a request: what it asks for, by what the server offers.

Knows the model card; no proposers. A request that asks for what is not offered is refused here.
"""

from __future__ import annotations

import numpy as np

from quire.base.errors import InvalidParameter
from quire.base.rare_records import Speculation
from quire.base.speculation_params import SpeculationParams
from quire.engine.model_card import ModelCard

NO_SPECULATION = SpeculationParams()


def speculation_of(
    card: ModelCard, params: SpeculationParams = NO_SPECULATION
) -> Speculation | None:
    """Return how tokens of a request are proposed; None: not at all.

    Raises InvalidParameter for what the server does not offer.
    """
    asks = bool(params.is_on or params.prediction_ids)
    if asks and not card.max_draft_tokens:
        raise InvalidParameter(
            f"{'speculation' if params.is_on else 'prediction'} is given, and this server verifies "
            'no draft tokens (--max-draft-tokens is 0); leave it out or send "speculation": "off"',
            param="speculation" if params.is_on else "prediction",
        )
    if params.max_drafts is not None and params.max_drafts > card.max_draft_tokens:
        raise InvalidParameter(
            f"speculation has max_draft_tokens {params.max_drafts}; this server allows at most "
            f"{card.max_draft_tokens} (--max-draft-tokens)",
            param="speculation",
        )
    uses_proposer = card.speculates if params.is_on is None else params.is_on
    if not (uses_proposer or params.prediction_ids) or not card.max_draft_tokens:
        return None
    return Speculation(
        max_drafts=params.max_drafts or card.max_draft_tokens,
        uses_proposer=uses_proposer,
        prediction_ids=np.array(params.prediction_ids, np.int32),
    )
