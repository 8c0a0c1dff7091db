"""Arguments that several measurements share: the shape and the precision of their model.

Knows no engine and no workload. Always holds: flags are written in full.
"""

from __future__ import annotations

import argparse

from bench.checkpoints import SHAPES
from bench.peers.convert import PRECISIONS


def parser_of_models(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the shape and the precision of a random checkpoint."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    return parser
