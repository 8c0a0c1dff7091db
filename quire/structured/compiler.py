"""GrammarCompiler: compile grammars to matchers in background threads; cache them by digest.

Two groups of threads: one for short grammars, with costs bounded by llguidance's limits, one for
grammars that are first compiled in a process that can be killed (trial.py). So hostile grammars
delay only grammars of their own kind. Callers poll `is_settled`; no call blocks, except `matcher`
for a grammar that is not cached. Invariants: a grammar is compiled once while it is cached; the
cache is bounded in entries and bytes; a compilation that takes too long is abandoned and its
process killed; a failure is cached like a result.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire._native import give_back_freed_memory
from quire.base.errors import InvalidParameter, QuireError, WorkerError
from quire.base.grammar import Grammar, GrammarKind
from quire.structured.limits import parser_limits
from quire.structured.matcher import Matcher, MatcherError
from quire.structured.trial import Trial, needs_trial, too_slow
from quire.structured.vocabulary import LoadedVocabulary, Vocabulary

if TYPE_CHECKING:
    from quire.structured.matcher import Tracker
    from quire.structured.unique_tracker import UniqueTracker

# Cached grammars, compiled or failed, and their total memory: within the reserve that the memory
# plan leaves, whatever clients send.
MAX_KEPT = 256
MAX_KEPT_BYTES = 128 << 20
# Memory of a compiled grammar per character: the measured maximum, with thousands of choices and
# properties.
_BYTES_A_CHAR = 210
_MIN_BYTES = 64 << 10
# Compiling a longer grammar leaves much freed memory, which is returned to the system at once.
_LARGE_CHARS = 32_768
NUM_THREADS = 2  # of each lane
# After a failure of its lexer a grammar is compiled again for one row only up to this time.
MAX_RECOMPILE_MS = 250.0
# Idle time after which the trial process is ended.
_IDLE_S = 60.0
# Milliseconds a compilation may take.
MAX_COMPILE_MS = 10_000.0


@dataclass(slots=True, eq=False)
class _Entry:
    """A cached grammar: root is set once it is compiled, error if it cannot be."""

    grammar: Grammar
    began_ms: float | None = None  # when a thread began to compile it
    root: Matcher | None = None
    error: QuireError | None = None

    @property
    def is_settled(self) -> bool:
        return self.root is not None or self.error is not None

    @property
    def num_bytes(self) -> int:
        """Return the approximate memory; of one not compiled yet, an estimate."""
        if self.error is not None:
            return _MIN_BYTES + len(self.grammar.text)
        written = remembered = 0
        if self.root is not None:
            written, remembered = self.root.num_source_chars, self.root.num_tracker_bytes
        return _MIN_BYTES + max(len(self.grammar.text), written) * _BYTES_A_CHAR + remembered


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
        self._trial = new_trial()  # of callers that compile in their own threads

    def want(self, grammar: Grammar) -> None:
        """Begin to compile a grammar, unless it is cached."""
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
                self._evict()

    def is_settled(self, grammar: Grammar) -> bool:
        """Return whether it is compiled or has failed; begin to compile it if it is not cached."""
        with self._lock:
            entry = self._entry(grammar)
            if entry.began_ms is not None and not entry.is_settled:
                took_ms = self._now_ms() - entry.began_ms
                if took_ms > self._max_compile_ms:
                    entry.error = too_slow(grammar, self._max_compile_ms)
            return entry.is_settled

    def is_ready(self, grammar: Grammar) -> bool:
        """Return whether it is compiled; False if it failed."""
        return self.is_settled(grammar) and self.error(grammar) is None

    def error(self, grammar: Grammar) -> QuireError | None:
        """Return why a settled grammar cannot be used, or None."""
        with self._lock:
            entry = self._entries.get(grammar.digest)
            return None if entry is None else _named(entry.error, grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of an answer. Compile the grammar in the calling
        thread if it is not cached. Raises InvalidParameter if the grammar cannot be used."""
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

        Copies of one compiled grammar share llguidance's lexer, and errors of a lexer are
        permanent. So the grammar `failed` was copied from is dropped: later requests compile it
        again. Raises MatcherError if compiling it takes too long to repeat between two steps.
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
        """Stop all threads and kill the trial processes."""
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
        self._evict()
        if queued:
            lane = self._slow if needs_trial(grammar) else self._quick
            lane.jobs.put(entry)
            if len(lane.trials) < self._num_threads:
                lane.start(self._work, self._new_trial())
        return entry

    def _evict(self) -> None:
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
    """A queue of grammars, with one trial process for each of its threads. Guarded by a lock."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self.trials: list[Trial] = []

    def start(self, work: Callable[[_Lane, Trial], None], trial: Trial) -> None:
        """Start another thread."""
        self.trials.append(trial)
        threading.Thread(target=work, args=(self, trial), name="quire-grammar", daemon=True).start()

    def next_job(self, trial: Trial) -> _Entry | None:
        """Return the next grammar to compile; None after `close`."""
        try:
            return self.jobs.get(timeout=_IDLE_S)
        except queue.Empty:
            trial.close()
            return self.jobs.get()

    def close(self) -> None:
        """End the threads."""
        for trial in self.trials:
            self.jobs.put(None)
            trial.end()
        self.trials = []


def compiled(grammar: Grammar, vocabulary: LoadedVocabulary, source: str = "") -> Matcher:
    """Compile a grammar. source: its llguidance form, if it is known already.

    Raises InvalidParameter if no answer can follow it.
    """
    if grammar.kind is GrammarKind.ANY:
        return _any_text(grammar, vocabulary)
    from llguidance import LLMatcher  # imported with the first grammar

    from quire.structured.rejection import rejection
    from quire.structured.source import llguidance_grammar, unique_plan

    try:
        source = source or llguidance_grammar(grammar, vocabulary.special_names)
        matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=parser_limits())
    except ValueError as error:  # for example integer overflow
        raise rejection(grammar, str(error)) from None
    if matcher.is_error():
        raise rejection(grammar, matcher.get_error())
    if matcher.is_stopped():
        raise rejection(grammar, "it allows no text but the empty one")
    plan = unique_plan(grammar, source)
    trackers = _thinking(grammar, vocabulary)
    try:
        if plan is not None:
            trackers.append(_tracker(plan, vocabulary))
        root = Matcher(matcher, vocabulary, trackers)
        root.num_source_chars = len(source)
        _try_out(root)
    except MatcherError as error:
        raise rejection(grammar, str(error)) from None
    return root


def _any_text(grammar: Grammar, vocabulary: LoadedVocabulary) -> Matcher:
    """Return the matcher of any tokens within a budget of reasoning."""
    from quire.structured.thinking import FreeText, without_ends

    free = FreeText(vocabulary.num_ids)
    return Matcher(free, without_ends(vocabulary), _thinking(grammar, vocabulary))


def _thinking(grammar: Grammar, vocabulary: LoadedVocabulary) -> list[Tracker]:
    """Return what enforces the budget of reasoning, if there is one. Raises InvalidParameter."""
    if grammar.thinking is None:
        return []
    from quire.structured.thinking import thinking_tracker

    return [thinking_tracker(grammar.thinking, vocabulary)]


def _tracker(plan: Mapping[str, Any], vocabulary: LoadedVocabulary) -> UniqueTracker:
    """Return what enforces the plan for uniqueItems. Raises MatcherError."""
    from quire.structured.unique_state import places_of
    from quire.structured.unique_tracker import UniqueTracker

    place, tracked = places_of(plan)
    for items in tracked:
        items.is_item(b"")  # fails now, if at all
        if not items.has_enough():
            raise MatcherError(
                f"an array with uniqueItems needs {items.min_items} items (minItems), and so many "
                "distinct ones are not known to exist"
            )
    return UniqueTracker(place, tracked, vocabulary.index())


def _try_out(root: Matcher) -> None:
    """Compute the first masks outside the engine loop: the first is the most expensive, and
    grammars that allow nothing or exceed llguidance's limits mostly fail there."""
    words = root.mask().nonzero()[0]
    trial, bits = root.copy(), int(root.mask()[words[0]])
    first = int(words[0]) * 32 + (bits & -bits).bit_length() - 1
    if not trial.ends_with(first):
        trial.take([first])
        if not trial.is_complete:
            trial.mask()


def _named(error: QuireError | None, grammar: Grammar) -> QuireError | None:
    """Return the error with the field of this request: the cached one may name another's."""
    params = (grammar.param, None if grammar.thinking is None else grammar.thinking.param)
    if isinstance(error, InvalidParameter) and error.param and error.param not in params:
        message = str(error)
        if message.startswith(f"{error.param}: "):
            message = grammar.param + message[len(error.param) :]
        return InvalidParameter(message, param=grammar.param)
    return error
