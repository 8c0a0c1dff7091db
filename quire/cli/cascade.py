"""`quire cascade OUTCOMES --out FILE`: train the classifier of a cascade from logged outcomes.

Loads no model. Prints what the classifier would save, measured on outcomes that it has not seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.cli.exit_codes import SUCCESS

_SMALL_PRICE = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument(
        "outcomes",
        metavar="FILE",
        nargs="+",
        help='what a router has logged (outcomes of a cascade), or lines {"request": {...}, '
        '"hard": true}; the newest file last',
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the classifier; without it only the report is printed"
    )
    parser.add_argument(
        "--cascade", metavar="NAME", default="", help="read the outcomes of this cascade only"
    )
    parser.add_argument(
        "--small-price",
        type=float,
        default=_SMALL_PRICE,
        metavar="SHARE",
        help="price of an answer of the small model, as a share of one of the large "
        f"(default {_SMALL_PRICE:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train, write and report. Raises SettingError."""
    from quire.obs.report import show, table
    from quire.router.classifier_training import file_bytes, report, train
    from quire.router.outcome_files import read_outcomes

    if not 0 < arguments.small_price < 1:
        raise SettingError(
            f"--small-price is {arguments.small_price:g}; a share between 0 and 1 is allowed"
        )
    examples, cascades = read_outcomes(arguments.outcomes, arguments.cascade, on_torn=_warn_of_torn)
    if len(cascades) > 1:
        raise SettingError(
            f"the outcomes are of the cascades {', '.join(sorted(cascades))}, of different models; "
            "choose one with --cascade"
        )
    found = report(examples, arguments.small_price)
    if arguments.out:
        file = train(examples, next(iter(cascades), ""))
        try:
            path = Path(arguments.out).expanduser()
            half = path.with_name(f"{path.name}.new")
            half.write_bytes(file_bytes(file))
            half.replace(path)  # a router never reads half of it
        except OSError as error:
            raise SettingError(f"--out {arguments.out}: {error.strerror}") from error
    rows = [
        (
            f"{row['hard_above']:.1f}",
            *(
                f"{100 * row[name]:.1f} %"
                for name in ("large_at_once", "large_needlessly", "replaced")
            ),
            f"{row['price']:.3f}",
        )
        for row in found.by_threshold
    ]
    headings = ("hard-above", "large at once", "needlessly", "replaced", "price")
    always = found.num_hard / found.num_examples
    text = "\n".join(
        [
            f"{found.num_examples} outcomes, {100 * always:.1f} % hard; "
            f"{found.num_held_out} held out: AUC {found.auc:.3f}, log loss {found.log_loss:.3f} "
            f"({found.base_log_loss:.3f} by the share of hard ones alone)",
            table(headings, rows),
            "price: of a request, where an answer of the large model is 1 and one of the small "
            f"model {found.small_price:g}; least at hard-above = {1 - found.small_price:g} where "
            "the probabilities are right",
            *(
                ["the outcomes say no more than the share of hard ones: do without a classifier"]
                if found.log_loss > 0.98 * found.base_log_loss
                else []
            ),
            *([f"written: {arguments.out}"] if arguments.out else []),
        ]
    )
    show(found._asdict(), text, as_json=arguments.json)
    return SUCCESS


def _warn_of_torn(path: str, num_lines: int) -> None:
    """Log the lines of a file that were left out."""
    Log("cascade").warning(
        "lines that were not written to their ends are left out", file=path, lines=num_lines
    )
