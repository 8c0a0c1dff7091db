"""The exit codes of the `quire` command, and what each means.

The table of docs/errors.md is generated from EXIT_CODES. Invariant: subcommands return only these
codes; a server that is ended by a second signal exits with 128 plus its number.
"""

from __future__ import annotations

from collections.abc import Mapping

SUCCESS = 0
FAILED = 1
REFUSED = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

# (meaning, what to do)
EXIT_CODES: Mapping[int, tuple[str, str]] = {
    SUCCESS: (
        "Success; `quire serve` was stopped by SIGTERM or SIGINT and drained.",
        "",
    ),
    FAILED: (
        "The engine, the GPU or the HTTP server failed, also that of `quire route`, or the output "
        "could not be written. `quire chat --url`, `quire bench serve`, `quire record` and "
        "`quire why`: the server cannot be reached. "
        "`quire plan`: the model does not fit. `quire doctor`: a problem was found. "
        "`quire replay`: a request failed, or a token differs. `quire complete`: the answer ended "
        "with an error. `quire why`: there is no timeline.",
        "Read the last lines of standard error; a service manager may restart the server.",
    ),
    REFUSED: (
        "Nothing was started: a wrong flag or file, a port in use, no key beyond loopback, a "
        "model that is broken, not supported, not downloaded or too large. `quire chat` from a "
        "pipe: the model answered an input with an error.",
        "Correct what the message names; a restart alone does not help.",
    ),
    INTERRUPTED: (
        "Stopped by Ctrl-C; `quire simulate` has printed the results so far.",
        "",
    ),
    PIPE_CLOSED: (
        "The program that read standard output ended before the output did, as in "
        "`quire complete -p Hello | head -c 1`; a shell shows it with `set -o pipefail`.",
        "",
    ),
}
SIGNALLED = (
    "A second SIGTERM or SIGINT ended `quire serve` at once: 128 plus the signal's number, as "
    "143 and 130. Requests were cut.",
    "Wait for `--grace-seconds`, or lower it.",
)
