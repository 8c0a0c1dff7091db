"""Run `quire serve` on a null engine: python -m bench.frontend.null_server STEP_MS

Everything else is the server's own: command line, HTTP, tokenizer, client, messages, engine loop,
scheduler, cache, runner, detokenizer. Arguments after STEP_MS are those of `quire serve`. Two names
of quire are replaced in the processes of this bench: the function that starts the engine process,
and in it the choice of executor.
"""

from __future__ import annotations

import sys
from importlib import import_module

from bench.frontend.null_executor import NullExecutorClass
from quire.base import child_process
from quire.cli import main as cli


def child_main(module: str, step_ms: float) -> int:
    """Run a process that the server starts: an API process unchanged, the engine's with our
    executor.
    """
    if module != "quire.engine.process.main":
        return int(import_module(module).main())
    from quire.engine.assembly import sized_model
    from quire.engine.process import main as process

    sized_model.choose_executor_class = lambda *_: NullExecutorClass(step_ms / 1000)  # type: ignore
    return process.main()


def main() -> int:
    step_ms = float(sys.argv[1])
    theirs = "import_module(sys.argv.pop(1)).main()"
    ours = f"import_module('bench.frontend.null_server').child_main(sys.argv.pop(1), {step_ms})"
    if theirs not in child_process._START:
        raise SystemExit("quire/base/child_process.py starts processes in another way; change this")
    child_process._START = child_process._START.replace(theirs, ours)
    return cli.main(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
