"""`python -m quire`: the same as the `quire` command.

Nothing else belongs here.
"""

from __future__ import annotations

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
