"""best_of: return the n best of the sequences computed for a prompt, at the end.

Best is the highest mean log-probability of the tokens, as OpenAI's completions have it: of the
raw logits, and of all tokens, the one that ended it included. Ties go to the lower stream. Knows
no engine and no transport. Always holds: nothing is returned before every sequence has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import structs

from quire.base.sampling_params import SamplingParams
from quire.engine.output.output_stream import TextDelta


class Ranking:
    """Collects the deltas of best_of streams, numbered from `first_stream`."""

    def __init__(self, sampling: SamplingParams, first_stream: int) -> None:
        self._sampling = sampling
        self._first = first_stream
        self._deltas: dict[int, list[TextDelta]] = {
            first_stream + place: [] for place in range(sampling.num_sequences)
        }
        self._num_open = sampling.num_sequences

    def take(self, delta: TextDelta) -> list[TextDelta]:
        """Keep what a stream has output; when all have ended, one delta each of the n best."""
        self._deltas[delta.index].append(delta)
        self._num_open -= delta.finish_reason is not None
        return [] if self._num_open else self._best()

    def _best(self) -> list[TextDelta]:
        """Return the n best, failed last; the first has the numbers of tokens and of drafts of the
        sequences that are dropped."""
        ranked = sorted(self._deltas.values(), key=lambda deltas: -_mean_logprob(deltas))
        best = [_joined(deltas) for deltas in ranked[: self._sampling.n]]
        dropped = [deltas[-1] for deltas in ranked[self._sampling.n :]]
        best[0] = structs.replace(
            best[0],
            num_unseen_tokens=sum(one.num_output_tokens for one in dropped),
            accepted_drafts=sum(one.accepted_drafts for one in (best[0], *dropped)),
            rejected_drafts=sum(one.rejected_drafts for one in (best[0], *dropped)),
        )
        prompt_logprobs = next(
            (d.prompt_logprobs for deltas in ranked for d in deltas if d.prompt_logprobs), ()
        )
        shows_logprobs = self._sampling.logprobs is not None
        return [
            structs.replace(
                delta,
                index=self._first + place,
                logprobs=delta.logprobs if shows_logprobs else (),
                prompt_logprobs=() if place else prompt_logprobs,
            )
            for place, delta in enumerate(best)
        ]


def _mean_logprob(deltas: Iterable[TextDelta]) -> float:
    """Return the mean of a stream; -inf if it failed or has no tokens."""
    logprobs = [token.logprob for delta in deltas for token in delta.logprobs]
    failed = any(delta.error is not None for delta in deltas)
    return math.fsum(logprobs) / len(logprobs) if logprobs and not failed else -math.inf


def _joined(deltas: list[TextDelta]) -> TextDelta:
    """Return a stream's deltas as one."""
    return structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(id_ for delta in deltas for id_ in delta.token_ids),
        logprobs=tuple(token for delta in deltas for token in delta.logprobs),
        token_chars=tuple(number for delta in deltas for number in delta.token_chars),
    )
