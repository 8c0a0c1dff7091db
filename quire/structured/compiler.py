"""GrammarCompiler: grammars become matchers in threads of its own, and are kept by digest.

Whoever waits asks `state`; nobody is made to wait. Knows no requests and no scheduler. Always
holds: one grammar is compiled once while it is kept; what is kept is bounded in number; a grammar
that takes too long is given up (its thread goes on until llguidance's own limits end it); a failed
one is remembered like a compiled one, so sending it again costs nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.base.errors import InvalidParameter, QuireError, WorkerError
from quire.base.grammar import Grammar
from quire.structured.matcher import Matcher, MatcherError
from quire.structured.vocabulary import LoadedVocabulary, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Grammars kept, compiled or failed.
MAX_KEPT = 256
NUM_THREADS = 2
# Milliseconds a compilation may take.
MAX_COMPILE_MS = 10_000.0
# llguidance's own bounds, in its units: work to build a lexer and for one mask, states, symbols.
_INITIAL_FUEL = 1_000_000
_STEP_FUEL = 200_000
_STEP_ITEMS = 50_000
_LEXER_STATES = 50_000
_GRAMMAR_SYMBOLS = 500_000


@dataclass(slots=True, eq=False)
class _Entry:
    """A grammar on its way: root is set when it is compiled, error when it cannot be."""

    grammar: Grammar
    began_ms: float | None = None  # a thread is at it
    root: Matcher | None = None
    error: QuireError | None = None

    @property
    def is_settled(self) -> bool:
        return self.root is not None or self.error is not None


class GrammarCompiler:
    """vocabulary: called once, in a thread, when the first grammar comes.

    on_settled: called in a thread when a grammar is compiled or has failed. now_ms: a clock.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        now_ms: Callable[[], float],
        on_settled: Callable[[], None] = lambda: None,
        num_threads: int = NUM_THREADS,
        max_kept: int = MAX_KEPT,
        max_compile_ms: float = MAX_COMPILE_MS,
    ) -> None:
        self.on_settled = on_settled
        self.num_compiled = 0
        self._vocabulary = vocabulary
        self._now_ms = now_ms
        self._num_threads = num_threads
        self._max_kept = max_kept
        self._max_compile_ms = max_compile_ms
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._lock = threading.Lock()  # of the entries and threads
        self._loading = threading.Lock()
        self._loaded: LoadedVocabulary | None = None
        self._jobs: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def want(self, grammar: Grammar) -> None:
        """Begin to compile a grammar, unless it is known."""
        with self._lock:
            self._entry(grammar)

    def is_settled(self, grammar: Grammar) -> bool:
        """Whether it is compiled or has failed; it is wanted from now on if it was not."""
        with self._lock:
            entry = self._entry(grammar)
            if entry.began_ms is not None and not entry.is_settled:
                took_ms = self._now_ms() - entry.began_ms
                if took_ms > self._max_compile_ms:
                    entry.error = _too_slow(grammar, self._max_compile_ms)
            return entry.is_settled

    def is_ready(self, grammar: Grammar) -> bool:
        """Whether it is compiled; one that failed never is."""
        return self.is_settled(grammar) and self.error(grammar) is None

    def error(self, grammar: Grammar) -> QuireError | None:
        """Why a settled grammar cannot be used; None where it can."""
        with self._lock:
            entry = self._entries.get(grammar.digest)
            return None if entry is None else _named(entry.error, grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of its answer. Compiles in the caller's thread what is not
        there (any more). Raises InvalidParameter where the grammar cannot be used."""
        with self._lock:
            entry = self._entry(grammar, queued=False)
        if not entry.is_settled:
            self._compile(entry)
        if entry.root is None:
            assert entry.error is not None, "a settled grammar has a root or an error"
            raise entry.error
        return entry.root.copy()

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            self._threads = []

    def _entry(self, grammar: Grammar, *, queued: bool = True) -> _Entry:
        digest = grammar.digest
        entry = self._entries.get(digest)
        if entry is not None:
            self._entries.move_to_end(digest)
            return entry
        entry = self._entries[digest] = _Entry(grammar)
        too_many = max(len(self._entries) - self._max_kept, 0)
        for old in [key for key, kept in self._entries.items() if kept.is_settled][:too_many]:
            del self._entries[old]
        if queued:
            self._jobs.put(entry)
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._work, name="quire-grammar", daemon=True)
                self._threads.append(thread)
                thread.start()
        return entry

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            if not entry.is_settled:
                entry.began_ms = self._now_ms()
                self._compile(entry)
            self.on_settled()

    def _compile(self, entry: _Entry) -> None:
        try:
            root = self._compiled(entry.grammar)
        except QuireError as error:
            entry.error = entry.error or error
        except Exception as error:  # noqa: BLE001  whatever a library raises fails one grammar
            entry.error = entry.error or WorkerError(
                f"the grammar could not be compiled: {type(error).__name__}: {str(error)[:200]}"
            )
        else:
            if entry.error is None:  # else it was given up meanwhile
                entry.root = root
                self.num_compiled += 1

    def _compiled(self, grammar: Grammar) -> Matcher:
        from llguidance import LLMatcher  # both only when a grammar comes

        from quire.structured.source import llguidance_grammar, refusal

        vocabulary = self._load()
        try:
            source = llguidance_grammar(grammar, vocabulary.special_names)
            matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=_limits())
        except ValueError as error:  # numbers it has no room for, say
            raise refusal(grammar, str(error)) from None
        if matcher.is_error():
            raise refusal(grammar, matcher.get_error())
        if matcher.is_stopped():
            raise refusal(grammar, "it allows no text but the empty one")
        root = Matcher(matcher, vocabulary)
        try:
            _try_out(root)
        except MatcherError as error:
            raise refusal(grammar, str(error)) from None
        return root

    def _load(self) -> LoadedVocabulary:
        with self._loading:
            if self._loaded is None:
                self._loaded = LoadedVocabulary(self._vocabulary())
            return self._loaded


def _try_out(root: Matcher) -> None:
    """Take the first step here, beside the loop: the first mask is the dearest, a grammar that
    allows nothing shows itself, and one beyond llguidance's bounds mostly does so at once."""
    words = root.mask().nonzero()[0]
    trial, bits = root.copy(), int(root.mask()[words[0]])
    first = int(words[0]) * 32 + (bits & -bits).bit_length() - 1
    if not trial.ends_with(first):
        trial.take([first])
        if not trial.is_complete:
            trial.mask()


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


def _too_slow(grammar: Grammar, limit_ms: float) -> InvalidParameter:
    return InvalidParameter(
        f"{grammar.param}: the grammar was not compiled within {limit_ms / 1000:g} s; make it "
        "smaller (fewer alternatives, smaller bounds of repetition)",
        param=grammar.param,
    )


def _named(error: QuireError | None, grammar: Grammar) -> QuireError | None:
    """The error with the field this grammar came from: another's may have failed first."""
    if isinstance(error, InvalidParameter) and error.param and error.param != grammar.param:
        said = str(error)
        if said.startswith(f"{error.param}: "):
            said = grammar.param + said[len(error.param) :]
        return InvalidParameter(said, param=grammar.param)
    return error
