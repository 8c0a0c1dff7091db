"""Run `quire serve` so that SIGUSR1 makes it write the number of its event loop's tasks.

Run: python -m bench.soak.server FILE, then the arguments of `quire serve`. Nothing else is changed.
The number is written into FILE.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from quire.api import server
from quire.cli import main as cli


def main() -> int:
    run, file = server.ServerProcess.run, Path(sys.argv[1])

    async def run_with_signal(life: server.ServerProcess, *args: Any) -> int:
        loop = asyncio.get_running_loop()

        def write_tasks() -> None:
            partial = file.with_suffix(".partial")
            partial.write_text(str(len(asyncio.all_tasks(loop))))
            partial.rename(file)

        loop.add_signal_handler(signal.SIGUSR1, write_tasks)
        return await run(life, *args)

    server.ServerProcess.run = run_with_signal  # type: ignore[method-assign]
    return cli.main(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
