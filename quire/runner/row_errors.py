"""Why the rows of a plan failed: what the model computed, or what their requests exclude.

Called only if a row has failed. Knows slots and positions, no logits: if a request excludes no
token, its row can only lack one because the model computed none.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.base.records import Bools, RowError, StepPlan
from quire.runner.batch_builder import SampledRows
from quire.runner.slot_tables import SlotTables
from quire.runner.token_runs import first_messages

_NOT_FINITE = "the model computed NaN or infinity"
_REMEDY = "the weights are damaged (download them again), or numbers overflow (try --dtype f32)"
NOT_FINITE = f"{_NOT_FINITE}, so there is no token to choose: {_REMEDY}"
ROW_FAILED = (
    "there is no token to choose: what is banned (stop tokens before min_tokens, bad words, "
    "logit_bias, n-grams that came already) and what is allowed leave none; ban less. Or "
    f"{_NOT_FINITE}: {_REMEDY}"
)
BANNED_ALL = (
    "there is no token to choose: all that the grammar allows here is banned (bad words, "
    "allowed_token_ids, n-grams that came already, stop tokens before min_tokens); ban less, or "
    f"allow more in the grammar. Or {_NOT_FINITE}: {_REMEDY}"
)


def row_errors(
    failed: Bools,
    plan: StepPlan,
    tables: SlotTables,
    sampled: SampledRows,
    *,
    messages: Mapping[int, str],
    broken: Mapping[int, str],
) -> tuple[RowError, ...]:
    """Return the errors of the `failed` rows [N].

    messages: by sampled position, of tokens that a grammar or a stop watch excluded or could not
    judge. broken: by row, of rows that failed when computed alone.
    """
    reasons = {**(first_messages(messages, sampled) if messages else {}), **broken}
    return tuple(
        RowError(row=row, message=reasons.get(row) or _reason(int(plan.slots[row]), tables))
        for row in failed.nonzero()[0].tolist()
    )


def _reason(slot: int, tables: SlotTables) -> str:
    """Return why there is no token for a slot, as far as its request shows it."""
    if tables.grammars.has[slot]:
        return BANNED_ALL
    bans = tables.rare.uses[slot] or tables.has_bias[slot] or tables.stops_from[slot]
    return ROW_FAILED if bans else NOT_FINITE
