"""Ask a grammar about answers, one history at a time: for the references of beam search."""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.grammar import Grammar
from quire.models.model_folder import box_path
from quire.structured.compiler import GrammarCompiler
from quire.structured.matcher import Matcher, MatcherError
from quire.structured.vocabulary import Vocabulary
from quire.text.tokenizer import Tokenizer


class GrammarAnswers:
    """A grammar over the tokens of the built-in model, with the given end tokens."""

    def __init__(self, grammar: Grammar, *, eos_ids: Sequence[int] = ()) -> None:
        tokenizer = Tokenizer.load(box_path())
        vocabulary = Vocabulary(
            token_bytes=[tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)],
            special_ids=tokenizer.special_ids,
            eos_ids=tuple(eos_ids),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )
        self._size = tokenizer.vocab_size
        self._compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0)
        self._grammar = grammar

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that may follow; none if these tokens begin no answer."""
        matcher = self._after(tokens)
        try:
            mask = [] if matcher is None else matcher.mask().tolist()
        except MatcherError:
            mask = []
        return [id_ for id_ in range(self._size) if mask and mask[id_ // 32] >> id_ % 32 & 1]

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Return whether the answer can only end here."""
        matcher = self._after(tokens)
        return matcher is not None and matcher.is_complete

    def _after(self, tokens: Sequence[int]) -> Matcher | None:
        matcher = self._compiler.matcher(self._grammar)
        try:
            matcher.take(tokens)
        except MatcherError:
            return None
        return matcher
