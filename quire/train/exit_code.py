"""The exit codes of the commands that train, and the line that each of them ends with.

Knows no PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from quire.base.errors import QuireError

FAILED = 1
INTERRUPTED = 130


def exit_code(run: Callable[[], None], out: Path) -> int:
    """Run a training and return its exit code. out: its directory."""
    try:
        run()
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(
            "interrupted: the same command, run again, continues from the texts and the checkpoint "
            f"in {out}, as far as there are any",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0
