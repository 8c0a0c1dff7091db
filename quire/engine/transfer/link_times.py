"""LinkTimes: how long a block takes on its way from each machine, as far as that is known.

Links to several machines differ, so each has an estimate of its own. The first transfer replaces
the guess, and each block after it moves the estimate. Knows hosts and times, no connection. Always
holds: an estimate for which a link is not used fades, so that one that was slow for a while, or on
busy cores, is tried again in the end.
"""

from __future__ import annotations

_KEEP = 0.9  # what a block leaves of the estimate before it
_FADE = 0.98


class LinkTimes:
    """The links of one engine. guess_ms: a block's time until one is measured."""

    def __init__(self, guess_ms: float) -> None:
        self.guess_ms = guess_ms
        self._measured_ms: dict[str, float] = {}  # by host: loopback, and those of the settings

    def block_ms(self, host: str) -> float:
        """Return how long a block from there takes."""
        return self._measured_ms.get(host, self.guess_ms)

    def note(self, host: str, num_blocks: int, took_ms: float) -> None:
        """Take in how long so many blocks took."""
        mean_ms = took_ms / num_blocks
        keep = _KEEP**num_blocks
        known_ms = self._measured_ms.get(host, mean_ms)
        self._measured_ms[host] = keep * known_ms + (1.0 - keep) * mean_ms

    def fade(self, host: str) -> None:
        """Note that a prompt is computed because this link is too slow."""
        if host in self._measured_ms:
            self._measured_ms[host] *= _FADE
        else:
            self.guess_ms *= _FADE
