"""How the text of an answer is made of its tokens, wherever that is done.

The client's side makes it to tell it, the engine's where beams end by it. Knows no tokenizer's
files and no transport. Always holds: both make the same text of the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.base.sampling_params import SamplingParams
from quire.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


def text_reader(
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    prompt_ids: NDArray[np.int32],
    shown_ids: frozenset[int],
) -> Detokenizer:
    """At the beginning of the answer to such a prompt. shown_ids: special tokens that are text."""
    continues = len(prompt_ids) > 0 and int(prompt_ids[-1]) not in tokenizer.special_ids
    return Detokenizer(
        tokenizer, sampling.skip_special_tokens, continues=continues, shown_ids=shown_ids
    )
