"""Warm cache, `warm-cache`: stay with the replica that has the beginning of the prompt.

Of the available replicas the one with the longest known prefix is chosen, until its backlog is too
long; then one that is less loaded. What a replica has is known from its KV events (BlockSets), else
from what was sent there (PrefixHistory). Too long is a fixed difference of open tokens to the least
loaded replica, or it is calibrated by the first tokens that were seen (TTFTModel): the wait is
longer than it takes to compute the prefix elsewhere, and to compute again what the copy displaces
there. Among replicas that have as much of a prompt, one that was found to be much slower gets a
small share only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quire.routing.block_sets import BlockSets
from quire.routing.least_tokens import LeastTokens
from quire.routing.policy import AnyReplica, PolicyCount, Replica, RouteKey
from quire.routing.prefix_history import BLOCK_BYTES, History
from quire.routing.ttft_model import TTFTCosts, TTFTModel

# Of the history's blocks, as the router estimates the lengths of prompts.
_TOKENS_PER_BLOCK = BLOCK_BYTES // 4
# Until first tokens are known, and of expected output at any time: so many open tokens more than
# the least loaded replica are too many.
DEFAULT_BACKLOG_TOKENS = 8192
# So many more open tokens of any kind are too many, or so many prompts of the request's length:
# what a replica is believed to have cached, and so not to compute, may be wrong.
MAX_OPEN_TOKENS, MAX_OPEN_PROMPTS = 131_072, 32
# What a copy of a prefix costs beside its computation, as a multiple of that: caches are full, so
# that it displaces as many tokens, which are to be computed again.
DISPLACED = 1.0
# A replica is slow where a first token takes it so many times as long as the fastest, and so much
# longer. It gets one in so many requests all the same, which show whether it still is.
SLOW_FACTOR, SLOW_S = 2.0, 0.02
SLOW_EVERY = 32
MIN_QUICK = 3  # first tokens in a row that take less than half of what was learned: slow no longer


class WarmCache:
    """backlog_tokens: of the fixed difference; None: it is calibrated. sets: what replicas report;
    None where they report nothing. matched_blocks_total, blocks_total: of the chosen replicas, and
    of all prompts, by the history. left_total: choices of a replica that had less of the prompt
    than another."""

    uses_events = True

    def __init__(
        self, history: History, backlog_tokens: int | None, sets: BlockSets | None = None
    ) -> None:
        self._history = history
        self.sets = sets
        self._backlog_tokens = backlog_tokens
        self._others = LeastTokens()
        self._models: dict[int, TTFTModel] = {}
        self._learned: dict[int, TTFTCosts] = {}  # of those that have had enough first tokens
        self._model_of_all = TTFTModel()
        self._num_without_slow = 0
        self._num_quick: dict[int, int] = {}
        self.matched_blocks_total = 0
        self.blocks_total = 0
        self.left_total = 0

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return the warmest replica that keeps up, else a less loaded one."""
        if len(replicas) == 1:
            return replicas[0]
        matched: Mapping[int, int] = {}
        if key.blocks or key.hashes:
            matched = self._matched_tokens([one.number for one in replicas], key)
        most = max(matched.values(), default=0)
        if not most:
            return self._others.choose(self._without_slow(replicas, key.prompt_tokens), key)
        warm = [one for one in replicas if matched[one.number] == most]
        quick = self._without_slow(warm, max(key.prompt_tokens - most, 0))
        chosen = self._others.choose(quick, key)
        better = self._better(replicas, key, chosen, matched)
        if not better:
            return chosen
        self.left_total += 1
        return self._others.choose(better, key)

    def _without_slow(
        self, replicas: Sequence[AnyReplica], new_tokens: int
    ) -> Sequence[AnyReplica]:
        """Return those replicas that are not much slower than the fastest of them, idle and now.
        Where others have much more output to give, a slow one stays."""
        learned = self._learned
        known = [one for one in replicas if one.number in learned]
        if self._backlog_tokens is not None or len(known) < 2:
            return replicas
        idle_s = {one.number: learned[one.number].seconds(new_tokens, 0) for one in known}
        fastest = min(known, key=lambda one: idle_s[one.number])
        limit_s = max(SLOW_FACTOR * idle_s[fastest.number], idle_s[fastest.number] + SLOW_S)
        slow = [one for one in known if idle_s[one.number] > limit_s]
        if not slow:
            return replicas
        now_s = learned[fastest.number].seconds(new_tokens, fastest.queued_tokens)
        left = {
            one.number
            for one in slow
            if learned[one.number].seconds(new_tokens, one.queued_tokens) > now_s
            and fastest.expected_tokens - one.expected_tokens <= DEFAULT_BACKLOG_TOKENS
        }
        self._num_without_slow = (self._num_without_slow + bool(left)) % SLOW_EVERY
        if not (left and self._num_without_slow):
            return replicas
        return [one for one in replicas if one.number not in left]

    def _better(
        self,
        replicas: Sequence[AnyReplica],
        key: RouteKey,
        warm: AnyReplica,
        matched: Mapping[int, int],
    ) -> Sequence[AnyReplica]:
        """Return the replicas that are taken instead of the warmest; none where it keeps up."""
        costs = self._model_of_all.costs
        if self._backlog_tokens is not None or costs is None:
            allowed = self._backlog_tokens
            allowed = DEFAULT_BACKLOG_TOKENS if allowed is None else allowed
            least = min(one.backlog_tokens for one in replicas)
            return replicas if warm.backlog_tokens - least > allowed else ()
        least = min(one.expected_tokens for one in replicas)
        open_ = min(one.backlog_tokens for one in replicas)
        if (
            warm.expected_tokens - least > DEFAULT_BACKLOG_TOKENS
            or warm.backlog_tokens - open_
            > max(MAX_OPEN_TOKENS, MAX_OPEN_PROMPTS * key.prompt_tokens)
        ):
            return replicas
        learned, prompt = self._learned, key.prompt_tokens
        most = min(matched[warm.number], prompt)

        def cost_s(replica: Replica) -> float:
            own = learned.get(replica.number, costs)
            have = min(matched[replica.number], most)
            new = prompt - have + DISPLACED * (most - have)
            return own.seconds(new, replica.queued_tokens)

        warm_s = cost_s(warm)
        return [one for one in replicas if matched[one.number] < most and cost_s(one) < warm_s]

    def _matched_tokens(self, numbers: Collection[int], key: RouteKey) -> dict[int, int]:
        """Return how much of the prompt each replica has, by its number."""
        mask = 0
        for number in numbers:
            mask |= 1 << number
        blocks = self._history.matched_blocks(key.blocks, mask)
        each: float = _TOKENS_PER_BLOCK
        if key.prompt_tokens:  # in the same measure; half a block at the end has no name
            each = key.prompt_tokens / (len(key.blocks) + 0.5)
        matched = {number: int(count * each) for number, count in blocks.items()}
        if self.sets is None or not key.hashes:
            return matched
        reported = self.sets.matched_tokens(key.hashes, key.block_size, numbers)
        if not any(reported.get(number) for number in numbers):
            return matched  # blocks of isolated tenants are not reported
        return {number: reported.get(number, count) for number, count in matched.items()}

    def new_tokens(self, replica: Replica, key: RouteKey) -> int:
        """Return how many tokens of the prompt the replica has to compute."""
        matched = self._matched_tokens([replica.number], key)[replica.number]
        return max(key.prompt_tokens - matched, 0)

    def sent(self, replica: Replica, key: RouteKey) -> None:
        """Note that the replica has the prompt now."""
        if self.sets is not None and key.hashes:
            self.sets.sent(replica.number, key.hashes)
        if key.blocks:
            bit = 1 << replica.number
            matched = self._history.matched_blocks(key.blocks, bit)
            self.matched_blocks_total += matched.get(replica.number, 0)
            self.blocks_total += len(key.blocks)
            self._history.note(key.blocks, replica.number)

    def note_first_token(
        self, replica: Replica, new_tokens: int, queued_tokens: int, seconds: float
    ) -> None:
        """Learn from a first token how fast the replica is."""
        if self._has_recovered(replica.number, new_tokens, queued_tokens, seconds):
            self._forget_pace(replica.number)
        model = self._models.get(replica.number)
        if model is None:
            model = self._models[replica.number] = TTFTModel()
        for one in (model, self._model_of_all):
            one.note(new_tokens, queued_tokens, seconds)
        if (costs := model.costs) is not None:
            self._learned[replica.number] = costs

    def _has_recovered(
        self, number: int, new_tokens: int, queued_tokens: int, seconds: float
    ) -> bool:
        """Return whether a slow replica is no longer slow: it would get too few requests to show
        that by the mean of the newest 128."""
        known, usual = self._learned.get(number), self._model_of_all.costs
        if known is None or usual is None:
            return False
        known_s = known.seconds(new_tokens, queued_tokens)
        is_slow = known_s > SLOW_FACTOR * usual.seconds(new_tokens, queued_tokens)
        num = self._num_quick.get(number, 0) + 1 if SLOW_FACTOR * seconds < known_s else 0
        self._num_quick[number] = num
        return is_slow and num >= MIN_QUICK

    def _forget_pace(self, number: int) -> None:
        for learned in (self._models, self._learned, self._num_quick):
            learned.pop(number, None)

    def counts(self) -> Sequence[PolicyCount]:
        """Return the blocks of prompts, and those that their replicas had, by the history; and
        what was learned of first tokens, 0 before it is known."""
        costs = self._model_of_all.costs or TTFTCosts(0.0, 0.0, 0.0)
        return (
            PolicyCount("prompt_blocks", "Blocks of routed prompts", self.blocks_total),
            PolicyCount(
                "warm_blocks",
                "Blocks of routed prompts that their replica had, by the router's history",
                self.matched_blocks_total,
            ),
            PolicyCount(
                "left_warm",
                "Choices of a replica with less of the prompt than a busier one",
                self.left_total,
            ),
            PolicyCount(
                "new_token_seconds",
                "Time to the first token for each token to compute, as learned",
                costs.per_new_token,
            ),
            PolicyCount(
                "queued_token_seconds",
                "Time to the first token for each token queued before, as learned",
                costs.per_queued_token,
            ),
        )

    def forget(self, replica: Replica) -> None:
        """Note that its cache is empty."""
        self._history.forget(replica.number)
        self._forget_pace(replica.number)
        if self.sets is not None:
            self.sets.forget(replica.number)
