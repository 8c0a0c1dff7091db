"""A model's tokenizer, read where it is needed, and its vocabulary: what grammars are compiled for.

The engine knows ids only; it reads these files when the first grammar comes, or the first beams
that end by stop strings, in a thread beside the loop. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.config.groups import ModelConfig
from quire.engine.assembly.model_files import model_folder
from quire.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


def model_tokenizer(config: ModelConfig, *, vocab_size: int) -> Tokenizer:
    """Read from the model's files. Raises TokenizerError."""
    from quire.text.tokenizer import Tokenizer

    return Tokenizer.load(model_folder(config), vocab_size=vocab_size)


def model_vocabulary(tokenizer: Tokenizer, *, eos_ids: Sequence[int]) -> Vocabulary:
    """Return the tokens of a model."""
    return Vocabulary(
        token_bytes=[tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        eos_ids=tuple(eos_ids),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
