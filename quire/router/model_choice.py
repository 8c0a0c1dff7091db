"""ModelChoice: which model answers one request, and when another one takes over.

An alias or a cascade names the first model. A prompt that does not fit its context goes to the
longer model, where one is configured: the replica's own refusal says so, since the router has no
tokenizer. Where no model holds it, its earlier part is summarized if the request asks for that. An
answer of a cascade's small model that is not good enough goes to the large one.
Always holds: the model changes only while the client has no byte of an answer.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.router.admission import Admission
from quire.router.api_forms import TOO_LONG, error_message
from quire.router.cascade import Cascade, Guess, Judge
from quire.router.faults import Refusal
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.model_names import ChosenModel
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import RouterMetrics
from quire.router.summaries import PromptSummary

_MAX_NAMED = 20


class ModelChoice:
    """Sets the model of the request; raises Refusal where none is named and several are served.

    summary: of the prompt where it does not fit; None where the request asks for none.
    needs_summary: it is wanted next. adds_event: its report belongs in the next event of a stream.
    """

    def __init__(
        self,
        fleet: Fleet,
        features: Features,
        metrics: RouterMetrics,
        request: RoutedRequest,
        summary: PromptSummary | None = None,
    ) -> None:
        self._fleet = fleet
        self._features = features
        self._metrics = metrics
        self._request = request
        self._summary = summary
        self._is_summarized = False
        self._too_long = ""
        self.needs_summary = self.adds_event = False
        self._target = ChosenModel("")
        self._longer = ""
        self._cascade: Cascade | None = None
        self._judge: Judge | None = None
        self._guess: Guess | None = None
        self._is_large = False
        self._shown: bytes | None = None
        self._events_of: Callable[[bytes], bytes] | None = None
        self._asked = request.model or features.names.default
        if not request.names_model:
            return  # no object, or no name: replicas say what is wrong with it
        if not self._asked:
            self._check_unambiguous()
            return
        self._asked = self._without_suffix(self._asked)
        self._cascade = features.cascades.get(self._asked)
        if self._cascade is None:
            self._use(self._asked)
        else:
            self._begin_cascade(self._cascade)

    def is_changed_by(self, status: int, code: str, body: bytes) -> bool:
        """Return whether this response is replaced: another model is asked then."""
        request = self._request
        if status == 400 and code == TOO_LONG:
            return self._is_shortened(error_message(body))
        judge, self._judge = self._judge, None
        if judge is None or self._cascade is None or status != 200:
            return False
        reason, self._shown = judge.verdict(body)
        used = request.form.used_tokens(body)
        spent = sum(max(one, 0) for one in used) if used is not None else request.prompt_tokens
        return self._is_escalated(self._cascade, judge, reason, spent)

    def _is_shortened(self, message: str) -> bool:
        """Return whether a prompt that does not fit is sent to the longer model, or summarized."""
        request = self._request
        if self._longer:
            self._metrics.longer.labels(request.model).inc()
            request.use_model(self._longer)
            self._longer = ""
            return True
        if self._summary is None:
            return False
        if self._is_summarized:
            raise Refusal(
                400,
                "context_length_exceeded",
                f"{message}; although its earlier part is summarized already. Send shorter "
                "messages, or set summarize_prompt.keep_turns or max_tokens lower",
                param="messages",
            )
        self._too_long = message
        self.needs_summary = True
        return True

    async def summarize(self) -> tuple[bytes, bytes]:
        """Replace the earlier part of the prompt by a summary; return the header that says so.

        The model that the client has named is asked again. Raises Refusal.
        """
        summary, metrics, outcome = self._summary, self._metrics, "failed"
        assert summary is not None, "needs_summary is set only with one"
        self.needs_summary = False
        self._is_summarized = True
        try:
            await summary.shorten(self._request, self._too_long)
            outcome = "done"
        finally:
            metrics.summaries.labels(outcome).inc()
            metrics.summary_tokens.labels("prompt").inc(summary.prompt_tokens)
            metrics.summary_tokens.labels("output").inc(summary.output_tokens)
        self._request.use_model(self._target.model)
        self._longer = self._target.longer
        self.adds_event = True
        return summary.header

    def shown_event(self, events: bytes) -> bytes:
        """Return events of a stream for the client: with the report of a summary, once."""
        if not self.adds_event or self._summary is None:
            return events
        shown = self._summary.shown_event(events)
        self.adds_event = shown is None
        return events if shown is None else shown

    @property
    def judges_stream(self) -> bool:
        """Whether a stream is held until it is complete."""
        return self._judge is not None and self._request.is_stream

    def is_changed_by_stream(self, events: bytes, num_tokens: int, *, has_failed: bool) -> bool:
        """Return whether a whole stream is replaced: another model is asked then. One that ends by
        an error of the request (has_failed) is no answer, and not judged."""
        judge, self._judge = self._judge, None
        if judge is None or self._cascade is None:
            return False
        self._events_of = judge.shown_events
        if has_failed:
            return False
        reason = judge.stream_verdict(events)
        spent = self._request.prompt_tokens + num_tokens
        return self._is_escalated(self._cascade, judge, reason, spent)

    def shown_events(self, events: bytes) -> bytes:
        """Return events of a judged stream for the client."""
        return self.shown_event(events if self._events_of is None else self._events_of(events))

    def _is_escalated(self, cascade: Cascade, judge: Judge, reason: str, spent: int) -> bool:
        """Count a verdict; ask the large model where there is a reason. spent: its tokens."""
        self._metrics.cascade.labels(cascade.name, reason or "small").inc()
        if self._guess is not None and judge.has_seen:
            cascade.note(self._guess, reason)
            if self._guess.probability is not None:
                guess = "hard" if cascade.is_hard(self._guess) else "easy"
                became = "replaced" if reason else "kept"
                self._metrics.cascade_guesses.labels(cascade.name, guess, became).inc()
        if not reason:
            return False
        self._request.replaced_tokens += spent
        self._metrics.cascade_tokens.labels(cascade.name, "small", "replaced").inc(spent)
        self._shown, self._events_of = None, None
        self._is_large = True
        judge.undo(self._request)
        self._use(cascade.large)
        return True

    def shown(self, status: int, body: bytes) -> bytes:
        """Return the body for the client: without what only the router has asked for, and with the
        report of a summary."""
        shown = body if self._shown is None else self._shown
        if self._summary is not None and self._is_summarized and status == 200:
            return self._summary.shown(shown)
        return shown

    def ended(self) -> None:
        """Count what a cascade's answer took."""
        if self._cascade is not None:
            which = "large" if self._is_large else "small"
            tokens = self._request.used_tokens() - self._request.replaced_tokens
            self._metrics.cascade_tokens.labels(self._cascade.name, which, "answered").inc(tokens)

    def may_be_served(self) -> bool:
        """Return whether a replica may serve the model, now or once one is there."""
        return self._asked in self._names or self._fleet.knows(self._request.model)

    def unavailable(self, admission: Admission) -> Refusal:
        """Return the refusal of a request that no replica can take now."""
        return admission.unavailable(self._request.model, self._asked, self._names)

    @property
    def _names(self) -> list[str]:
        """The names that are no model of a replica."""
        return [*self._features.names.names, *self._features.cascades]

    def _without_suffix(self, name: str) -> str:
        """Return a name without the suffix of its API, unless it is one that is served with it."""
        plain = name.removesuffix(self._request.form.model_suffix)
        replicas = self._fleet.replicas.values()

        def is_known(one: str) -> bool:
            return one in self._names or any(replica.serves(one) for replica in replicas)

        return plain if plain and not is_known(name) else name

    def _begin_cascade(self, cascade: Cascade) -> None:
        rule = cascade.rule(self._request)
        if not rule:
            self._guess = cascade.guess(self._request)
            if cascade.is_hard(self._guess) and not cascade.explores(self._request):
                rule = "classifier"
        self._is_large = bool(rule)
        self._use(cascade.large if rule else cascade.small)
        if rule:
            self._metrics.cascade.labels(cascade.name, rule).inc()
            return
        self._judge = cascade.judge(self._request)
        if self._judge is None:
            self._metrics.cascade.labels(cascade.name, "small_not_judged").inc()

    def _use(self, name: str) -> None:
        """Ask for the model of a name, which may be an alias."""
        chosen = self._features.names.choose(name, self._request.session, self._fleet.is_served)
        self._target = ChosenModel(name) if chosen is None else chosen
        self._longer = self._target.longer
        self._request.use_model(self._target.model)

    def _check_unambiguous(self) -> None:
        served = [set(one.models) for one in self._fleet.replicas.values() if one.models]
        if not served or set.intersection(*served):
            return
        names = sorted(set.union(*served) | set(self._features.names.names))
        shown = ", ".join(map(repr, names[:_MAX_NAMED]))
        raise Refusal(
            400,
            "invalid_value",
            f"the body names no model and the replicas serve several; name one of them as model: "
            f"{shown}",
            param="model",
        )
