"""The process of trial.py: compile one grammar after another for a vocabulary of single bytes.

It runs at low priority beside the engine, within limits that the system enforces: memory, CPU time
per grammar, and a stack smaller than that of the engine's compiler threads. Ends with its standard
input.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from quire.base.grammar import Grammar, GrammarKind
from quire.structured.compiler import compiled
from quire.structured.source import llguidance_grammar
from quire.structured.trial import read_frame, write_frame
from quire.structured.vocabulary import byte_vocabulary

_NICE = 10
_STACK_BYTES = 4 << 20
# In addition to the memory before the first grammar.
_MAX_MEMORY_BYTES = 1 << 30


def main() -> None:
    """Compile grammars until the input ends."""
    os.nice(_NICE)
    byte_vocabulary(())  # import before the memory is measured
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + _MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer)
    thread.start()
    thread.join()


def _answer() -> None:
    while (raw := read_frame(sys.stdin.fileno())) is not None:
        job = json.loads(raw)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        limit_s = int(time.process_time()) + 1 + job["max_cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, hard))
        write_frame(sys.stdout.fileno(), _source_of(job).encode())


def _source_of(job: Mapping[str, Any]) -> str:
    """Return llguidance's form of a grammar after compiling it, successfully or not."""
    grammar = Grammar(kind=GrammarKind(job["kind"]), text=job["text"], whitespace=job["whitespace"])
    vocabulary = byte_vocabulary(tuple(job["special_names"]))
    try:
        source = llguidance_grammar(grammar, vocabulary.special_names)
    except Exception:  # noqa: BLE001  the next compilation reports the error
        return ""
    try:
        compiled(grammar, vocabulary, source)
    except MemoryError:
        os._exit(1)
    except Exception:  # noqa: BLE001  likewise
        pass
    return source
