"""The process of trial.py: compiles one grammar after the other over a vocabulary of single bytes.

It computes beside the engine and yields to it (nice), within bounds that the system holds: memory,
processor time a grammar, and a stack smaller than those in which the engine compiles. Ends with its
standard input.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quire.base.grammar import Grammar, GrammarKind
from quire.structured.compiler import compiled
from quire.structured.source import llguidance_grammar
from quire.structured.trial import read_frame, write_frame
from quire.structured.vocabulary import LoadedVocabulary, Vocabulary

_NICE = 10
_STACK_BYTES = 4 << 20
# Beyond what it holds before the first grammar.
_MOST_MEMORY_BYTES = 1 << 30
_END = b"<|end|>"


def main() -> None:
    """Answer until the input ends."""
    os.nice(_NICE)
    _bytes_vocabulary(())  # imports: their memory is not the grammars'
    with open("/proc/self/statm", encoding="ascii") as told:
        pages = int(told.read().split()[0])
    limit = pages * resource.getpagesize() + _MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer)
    thread.start()
    thread.join()


def _answer() -> None:
    while (raw := read_frame(sys.stdin.fileno())) is not None:
        job = json.loads(raw)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        most_s = int(time.process_time()) + 1 + job["most_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, hard))
        write_frame(sys.stdout.fileno(), _tried(job).encode())


def _tried(job: Mapping[str, Any]) -> str:
    """llguidance's words, once they have been compiled, well or not."""
    grammar = Grammar(kind=GrammarKind(job["kind"]), text=job["text"], whitespace=job["whitespace"])
    vocabulary = _bytes_vocabulary(tuple(job["special_names"]))
    try:
        source = llguidance_grammar(grammar, vocabulary.special_names)
    except Exception:  # noqa: BLE001  whoever compiles it next says why
        return ""
    try:
        compiled(grammar, vocabulary, source)
    except MemoryError:
        os._exit(1)
    except Exception:  # noqa: BLE001  likewise
        pass
    return source


@lru_cache(maxsize=1)
def _bytes_vocabulary(special_names: tuple[str, ...]) -> LoadedVocabulary:
    plain = [bytes([byte]) for byte in range(256)]
    special = [*(name.encode() for name in special_names), _END]
    return LoadedVocabulary(
        Vocabulary(
            token_bytes=[*plain, *special],
            special_ids=frozenset(range(256, 256 + len(special))),
            eos_ids=(256 + len(special_names),),
            encode=lambda text: list(text.encode()),
        )
    )
