"""GrammarCompiler: grammars become matchers in threads of its own, and are kept by digest.

Two lanes of threads: one for short grammars, which llguidance's own limits bound, one for those
that are tried out first in a process that can be ended (trial.py), so that whoever sends grammars
made to harm keeps others of that kind waiting, and nobody else. Whoever waits asks `is_settled`;
nobody is made to wait. Knows no requests and no scheduler. Always holds: one grammar is compiled
once while it is kept; what is kept is bounded in number and in bytes; a grammar that takes too long
is given up, and what compiles it is ended; a failed one is remembered like a compiled one, so
sending it again costs nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire._native import give_back_freed_memory
from quire.base.errors import InvalidParameter, QuireError, WorkerError
from quire.base.grammar import Grammar
from quire.structured.matcher import Matcher, MatcherError
from quire.structured.trial import Trial, needs_trial, too_slow
from quire.structured.vocabulary import LoadedVocabulary, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Grammars kept, compiled or failed, and the memory they may take together: within the reserve that
# the memory plan leaves, whatever callers send.
MAX_KEPT = 256
MAX_KEPT_BYTES = 128 << 20
# Memory of a compiled grammar by its length: choices and objects of thousands took up to so much.
_BYTES_A_CHAR = 210
_LEAST_BYTES = 64 << 10
# What is longer leaves much behind when it is compiled, which goes back to the system at once.
_LARGE_CHARS = 32_768
NUM_THREADS = 2  # of each lane
# A grammar whose lexer failed is compiled again for one row only where that took at most so long.
MAX_RECOMPILE_MS = 250.0
# After so long without a grammar to try out, the process for it is ended.
_IDLE_S = 60.0
# Milliseconds a compilation may take.
MAX_COMPILE_MS = 10_000.0
# llguidance's own bounds, in its units: work to build a lexer and for one mask, states, symbols.
_INITIAL_FUEL = 1_000_000
_STEP_FUEL = 200_000
_STEP_ITEMS = 50_000
_LEXER_STATES = 50_000
_GRAMMAR_SYMBOLS = 500_000
# A row's items: two for each choice, four for each property of an object, and some.
_ROW_ITEMS = 6_500


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

    @property
    def num_bytes(self) -> int:
        """Memory it takes, about; of one on its way, what it may come to."""
        if self.error is not None:
            return _LEAST_BYTES + len(self.grammar.text)
        written = 0 if self.root is None else self.root.num_source_chars
        return _LEAST_BYTES + max(len(self.grammar.text), written) * _BYTES_A_CHAR


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
        max_kept_bytes: int = MAX_KEPT_BYTES,
        max_compile_ms: float = MAX_COMPILE_MS,
        new_trial: Callable[[], Trial] = Trial,
    ) -> None:
        self.on_settled = on_settled
        self.num_compiled = 0
        self._vocabulary = vocabulary
        self._now_ms = now_ms
        self._num_threads = num_threads
        self._max_kept, self._max_kept_bytes = max_kept, max_kept_bytes
        self._max_compile_ms = max_compile_ms
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._pins: Counter[bytes] = Counter()  # live requests by digest of their grammar
        self._lock = threading.Lock()  # of the entries and threads
        self._loading = threading.Lock()
        self._loaded: LoadedVocabulary | None = None
        self._new_trial = new_trial
        self._quick, self._slow = _Lane(), _Lane()
        self._trying = threading.Lock()
        self._trial = new_trial()  # of those who compile in their own threads

    def want(self, grammar: Grammar) -> None:
        """Begin to compile a grammar, unless it is known."""
        with self._lock:
            self._entry(grammar)

    def pin(self, grammar: Grammar) -> None:
        """Begin to compile a grammar, and keep it for a live request until `unpin`.

        Pinned grammars may exceed the bound on their number, not the one on their memory.
        """
        with self._lock:
            self._pins[grammar.digest] += 1
            self._entry(grammar)

    def unpin(self, grammar: Grammar) -> None:
        """Release what one `pin` kept."""
        with self._lock:
            self._pins[grammar.digest] -= 1
            if self._pins[grammar.digest] <= 0:
                del self._pins[grammar.digest]
                self._let_go()

    def is_settled(self, grammar: Grammar) -> bool:
        """Whether it is compiled or has failed; it is wanted from now on if it was not."""
        with self._lock:
            entry = self._entry(grammar)
            if entry.began_ms is not None and not entry.is_settled:
                took_ms = self._now_ms() - entry.began_ms
                if took_ms > self._max_compile_ms:
                    entry.error = too_slow(grammar, self._max_compile_ms)
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
            with self._trying:
                self._compile(entry, self._trial)
        if entry.root is None:
            assert entry.error is not None, "a settled grammar has a root or an error"
            raise entry.error
        return entry.root.copy()

    def replacement(self, grammar: Grammar, failed: Matcher) -> Matcher:
        """Return a matcher at the beginning of its answer, with a lexer shared with no other.

        Copies of one compiled grammar share llguidance's lexer, whose errors are permanent. So the
        grammar `failed` was copied from is dropped: later requests compile it again. Raises
        MatcherError where compiling it takes too long to repeat between two steps.
        """
        root = failed.root
        with self._lock:
            entry = self._entries.get(grammar.digest)
            if entry is not None and entry.root is root:
                del self._entries[grammar.digest]
        if root.compile_ms > MAX_RECOMPILE_MS:
            raise MatcherError("the grammar takes too long to compile again")
        matcher = compiled(grammar, self._load(), root.source)
        matcher.source, matcher.compile_ms = root.source, root.compile_ms
        return matcher

    def close(self) -> None:
        """Begin nothing more; what is being tried out is ended."""
        with self._lock:
            for lane in (self._quick, self._slow):
                lane.close()
        self._trial.end()
        with self._trying:
            self._trial.close()

    def _entry(self, grammar: Grammar, *, queued: bool = True) -> _Entry:
        digest = grammar.digest
        entry = self._entries.get(digest)
        if entry is not None:
            self._entries.move_to_end(digest)
            return entry
        entry = self._entries[digest] = _Entry(grammar)
        self._let_go()
        if queued:
            lane = self._slow if needs_trial(grammar) else self._quick
            lane.jobs.put(entry)
            if len(lane.trials) < self._num_threads:
                lane.start(self._work, self._new_trial())
        return entry

    def _let_go(self) -> None:
        """Evict settled grammars, least recently used first, until the rest are within bounds.

        Those of live requests are evicted last, and only for memory.
        """
        num_bytes = sum(kept.num_bytes for kept in self._entries.values())
        settled = [key for key, kept in self._entries.items() if kept.is_settled]
        for key in (key for key in settled if key not in self._pins):
            if len(self._entries) <= self._max_kept and num_bytes <= self._max_kept_bytes:
                return
            num_bytes -= self._entries.pop(key).num_bytes
        for key in (key for key in settled if key in self._pins):
            if num_bytes <= self._max_kept_bytes:
                return
            num_bytes -= self._entries.pop(key).num_bytes

    def _work(self, lane: _Lane, trial: Trial) -> None:
        while (entry := lane.next_job(trial)) is not None:
            if not entry.is_settled:
                entry.began_ms = self._now_ms()
                self._compile(entry, trial)
            self.on_settled()
        trial.close()

    def _compile(self, entry: _Entry, trial: Trial) -> None:
        try:
            root = self._compiled(entry.grammar, trial)
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
        if len(entry.grammar.text) > _LARGE_CHARS:
            give_back_freed_memory()

    def _compiled(self, grammar: Grammar, trial: Trial) -> Matcher:
        vocabulary, source = self._load(), ""
        if needs_trial(grammar):
            names = vocabulary.special_names
            source = trial.source(grammar, names, limit_ms=self._max_compile_ms)
        began_ms = self._now_ms()
        root = compiled(grammar, vocabulary, source)
        root.source, root.compile_ms = source, self._now_ms() - began_ms
        return root

    def _load(self) -> LoadedVocabulary:
        with self._loading:
            if self._loaded is None:
                self._loaded = LoadedVocabulary(self._vocabulary())
            return self._loaded


class _Lane:
    """Grammars that wait for some threads, and the trial of each of these. Changed under a lock."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self.trials: list[Trial] = []

    def start(self, work: Callable[[_Lane, Trial], None], trial: Trial) -> None:
        """One more thread."""
        self.trials.append(trial)
        threading.Thread(target=work, args=(self, trial), name="quire-grammar", daemon=True).start()

    def next_job(self, trial: Trial) -> _Entry | None:
        """What to compile next; None at the end."""
        try:
            return self.jobs.get(timeout=_IDLE_S)
        except queue.Empty:
            trial.close()
            return self.jobs.get()

    def close(self) -> None:
        """The threads end."""
        for trial in self.trials:
            self.jobs.put(None)
            trial.end()
        self.trials = []


def compiled(grammar: Grammar, vocabulary: LoadedVocabulary, source: str = "") -> Matcher:
    """A matcher at the beginning of its answer. source: the grammar in llguidance's words, where
    they are known.

    Raises InvalidParameter where no answer can follow it.
    """
    from llguidance import LLMatcher  # both only when a grammar comes

    from quire.structured.source import llguidance_grammar, refusal

    try:
        source = source or llguidance_grammar(grammar, vocabulary.special_names)
        matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=_limits())
    except ValueError as error:  # numbers it has no room for, say
        raise refusal(grammar, str(error)) from None
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())
    if matcher.is_stopped():
        raise refusal(grammar, "it allows no text but the empty one")
    root = Matcher(matcher, vocabulary)
    root.num_source_chars = len(source)
    try:
        _try_out(root)
    except MatcherError as error:
        raise refusal(grammar, str(error)) from None
    return root


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
        max_items_in_row=_ROW_ITEMS,
        verbose_errors=False,
    )


def _named(error: QuireError | None, grammar: Grammar) -> QuireError | None:
    """The error with the field this grammar came from: another's may have failed first."""
    if isinstance(error, InvalidParameter) and error.param and error.param != grammar.param:
        said = str(error)
        if said.startswith(f"{error.param}: "):
            said = grammar.param + said[len(error.param) :]
        return InvalidParameter(said, param=grammar.param)
    return error
