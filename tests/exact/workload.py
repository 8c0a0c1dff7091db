"""Draw cases: requests, their arrival and cancellation times, and the engine settings.

A case is a pure function of its number, so a failed case can be repeated alone. Settings are drawn
to be hard: few blocks, small step budgets, up to three plans in flight. Most cases combine these.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from quire.base.grammar import choice, grammar, grammar_of, json_object, json_schema, regex
from quire.base.rare_records import Speculation
from quire.base.records import NO_RULES, Request, TokenRules
from quire.base.sampling_checks import SAMPLERS
from quire.base.sampling_params import SamplingParams
from quire.scheduler.policy.policies import POLICY_NAMES
from quire.scheduler.tenants.tenant_usage import TenantLimits

MAX_MODEL_LEN = 512
VOCAB_SIZE = 307
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "is_here": {"type": "boolean"},
        "years": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "is_here", "years"],
    "additionalProperties": False,
}
GRAMMARS = (
    json_schema(_PERSON),
    json_object(),
    regex("[a-f]{2}-[0-9]+"),
    regex("(ab|cd)*"),
    choice(["yes", "yesterday", "no"]),
    grammar('start: "the list: " item (", " item)*\nitem: /[a-z]{1,3}/ "!"'),
    json_schema(
        {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-c]{0,2}$"},
            "uniqueItems": True,
            "minItems": 5,
        }
    ),
    # A pattern and a length: each word takes much of the lexer's budget.
    json_schema({"type": "string", "maxLength": 700, "pattern": r"^(?:[a-d]+[ .]+){0,149}[a-d]+$"}),
    # Budgets of reasoning: of an open one with a closing mark of three tokens, and before a text.
    grammar_of({"thinking": {"max_tokens": 7, "opens": "[", "closes": "]/!", "is_open": True}}),
    grammar_of(
        {
            "grammar": "start: thought /[a-f]{2}/\nthought[lazy]: /(.|\\n)*]/",
            "thinking": {"max_tokens": 4, "opens": "[", "closes": "]", "is_open": True},
        }
    ),
)
BLOCK_SIZES = (16, 16, 16, 32)
# What proposes in cases with drafts, and in how many of a hundred: those of servers by
# their kind, of which prompt lookup has two forms, and ones that know the answer (drafts.py).
PROPOSERS: Mapping[str, int] = {
    **{"ngram": 4, "history": 4, "draft": 12, "self": 20, "medusa": 10, "eagle": 10},
    **{"right": 16, "wrong": 8, "alternating": 8, "sometimes": 8},
}
THREADS = (1, 1, 1, 1, 2, 3)  # threads mostly wait for each other on a busy machine
# Of the first 80 cases of test_one_answer.py those that reach nothing alone: each pair of an event
# (preempted, forked, ...) with a model, a proposer, a policy, a number of plans in flight or a
# sampling parameter, and each proposer with threads and plans in flight, is in another case, too.
REDUNDANT_CASES = frozenset(
    (2, 4, 13, 17, 21, 27, 31, 37, 39, 40, 43, 46, 54, 58, 59, 62, 69, 72, 73, 76, 77, 78)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Engine settings of a case."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_samples: int
    plans_in_flight: int
    prefix_caching: bool
    num_threads: int
    max_model_len: int = MAX_MODEL_LEN
    micro_batches: int = 0  # of a pipeline
    policy: str = "fcfs"
    tier_blocks: int = 0  # places of the tier, which is used whenever possible
    tier_in_host: bool = False  # in host memory instead of on disk
    tenants: tuple[TenantLimits, ...] = ()
    layered: bool = False  # layered prefill where it is possible
    jump_ahead: bool = True  # append forced tokens; a request alone takes a step per token
    proposer: str = ""  # of draft tokens (drafts.py); "" for none
    draft_blocks: int = 0  # KV blocks of the draft model or head, where that is the proposer
    all_layers: bool = False  # all layers draft, not half of them, where these are the proposer
    draft_noise: bool = True  # the draft model samples with the noise of the target
    max_drafts: int = 0
    adaptive: bool = False  # as many drafts as the control chooses, instead of all


# Settings of a request alone: enough blocks, whole prompts, no sharing, one thread.
ALONE = Settings(
    num_blocks=MAX_MODEL_LEN // 16 + 2,
    block_size=16,
    max_num_seqs=1,
    max_num_batched_tokens=MAX_MODEL_LEN,
    max_samples=1,
    plans_in_flight=1,
    prefix_caching=False,
    num_threads=1,
    jump_ahead=False,
)


ALONE_WITH_BEAMS = replace(ALONE, num_blocks=3 * ALONE.num_blocks, max_num_seqs=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The streams of one request, which arrive before step `at_step`; some are cancelled later.

    cancel_at: step before which stream i is aborted, or None.
    """

    at_step: int
    requests: tuple[Request, ...]
    cancel_at: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload and its settings. `model` is an index into the models of the run."""

    number: int
    model: int
    settings: Settings
    arrivals: tuple[Arrival, ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        """Return the requests of all streams."""
        return tuple(request for arrival in self.arrivals for request in arrival.requests)


def draw_case(number: int, *, num_models: int, vocab_size: int) -> Case:
    """Draw case `number`, as a pure function of the number."""
    rng = random.Random(f"one answer {number}")
    is_long = rng.random() < 0.06  # longer than one attention piece (256 positions)
    block_size = rng.choice(BLOCK_SIZES)
    prefixes = [
        _ids(rng, vocab_size, rng.randrange(block_size, 5 * block_size // 2) + 200 * is_long)
        for _ in range(2)
    ]
    prefixes.append(prefixes[0][: len(prefixes[0]) // 2])
    num_callers = rng.randint(3, 4) if is_long else rng.randint(4, 6)
    arrivals = tuple(
        _arrival(rng, number, caller, prefixes, vocab_size) for caller in range(num_callers)
    )
    searching = random.Random(f"beams {number}")
    if searching.random() < 0.5:
        arrivals += (_beams(searching, f"{number}.beams", prefixes, vocab_size),)
    requests = [request for arrival in arrivals for request in arrival.requests]
    max_tokens_drawn = max(request.max_total_tokens for request in requests)
    settings = Settings(
        num_blocks=-(-max_tokens_drawn // block_size) + rng.choice((0, 0, 0, 0, 1, 1, 4)),
        block_size=block_size,
        max_num_seqs=rng.randint(3, 8),
        max_num_batched_tokens=rng.choice((64, 160))
        if is_long
        else rng.choice((8, 13, 24, 24, 48)),
        max_samples=rng.choice((1, 2, 3, 8)),
        plans_in_flight=rng.choice((1, 2, 3)),
        prefix_caching=rng.random() < 0.8,
        num_threads=rng.choice(THREADS),
        policy=POLICY_NAMES[number % len(POLICY_NAMES)],
    )
    for request in requests:  # enough for one search alone, and no more
        if request.sampling.use_beam_search:
            least = _blocks_for_beams(request, block_size)
            settings = replace(settings, num_blocks=max(settings.num_blocks, least))
    tiers = random.Random(f"tier {number}")
    if settings.prefix_caching and tiers.random() < 0.6:
        settings = replace(settings, tier_blocks=tiers.choice((3, 12, 48, 48)))
    if random.Random(f"layers {number}").random() < 0.9:
        settings = replace(settings, layered=True)
    bounded = random.Random(f"tenants {number}")
    if bounded.random() < 0.3:
        settings = _with_tenants(bounded, settings, -(-max_tokens_drawn // block_size))
        # A narrow tenant limit may reduce the beam width, which would change the result.
        arrivals = tuple(one for one in arrivals if not one.requests[0].sampling.use_beam_search)
    drafting = random.Random(f"drafts {number}")
    if drafting.random() < 0.8:
        settings, arrivals = _with_drafts(drafting, settings, arrivals, vocab_size)
    return Case(number=number, model=number % num_models, settings=settings, arrivals=arrivals)


def _with_drafts(
    rng: random.Random, settings: Settings, arrivals: tuple[Arrival, ...], vocab_size: int
) -> tuple[Settings, tuple[Arrival, ...]]:
    """Add a proposer, and requests that speculate, most of them; some predict their answer."""
    settings = replace(
        settings,
        proposer=rng.choices([*PROPOSERS], [*PROPOSERS.values()])[0],
        max_drafts=rng.choice((1, 2, 3, 5, 8)),
        adaptive=rng.random() < 0.25,
        draft_blocks=rng.choice((3, 20, 100)),
        draft_noise=rng.random() < 0.7,
        all_layers=rng.random() < 0.6,
    )

    def speculating(request: Request) -> Request:
        own = random.Random(f"drafts {request.group_id}")
        if own.random() < 0.1:
            return request
        predicted = [own.randrange(2, vocab_size) for _ in range(20)] if own.random() < 0.1 else ()
        speculation = Speculation(
            max_drafts=own.choice((2, 8)),
            uses_proposer=own.random() < 0.95,
            prediction_ids=np.array(predicted, np.int32),
        )
        return replace(request, speculation=speculation)

    return settings, tuple(
        replace(arrival, requests=tuple(map(speculating, arrival.requests))) for arrival in arrivals
    )


def _with_tenants(rng: random.Random, settings: Settings, longest_blocks: int) -> Settings:
    """Add tenants with floors, ceilings and request limits that admit the longest request."""
    floors = {"": 0, "a": rng.choice((0, 1, 2)), "b": rng.choice((0, 0, 2))}
    tenants = tuple(
        TenantLimits(
            name=name,
            shown=name or "default",
            floor_blocks=floor,
            ceiling_blocks=rng.choice((None, longest_blocks, longest_blocks + 1)),
            max_running=rng.choice((None, None, 1, 2)),
        )
        for name, floor in floors.items()
    )
    num_blocks = max(settings.num_blocks, longest_blocks + sum(floors.values()))
    return replace(settings, tenants=tenants, num_blocks=num_blocks)


def _arrival(
    rng: random.Random, number: int, caller: int, prefixes: list[list[int]], vocab_size: int
) -> Arrival:
    prompt = _ids(rng, vocab_size, rng.randint(1, 24))
    if rng.random() < 0.75:
        shared = rng.choice(prefixes)
        # Sometimes the prompt is only the prefix: fully cached the second time.
        prompt = list(shared) if rng.random() < 0.25 else shared + prompt
    scoring = random.Random(f"scoring {number}.{caller}")
    sampling = _with_scores(scoring, _sampling(rng, vocab_size), vocab_size)
    rarely, rules = random.Random(f"rare {number}.{caller}"), NO_RULES
    if rarely.random() < 0.5:
        sampling, rules = _with_rare(rarely, sampling, prompt, vocab_size)
    sampling = _as_llama_cpp(random.Random(f"window {number}.{caller}"), sampling)
    pooling = random.Random(f"pooled {number}.{caller}")
    if sampling.n == 1 and pooling.random() < 0.12:  # an embedding in place of an answer
        way = pooling.choice(("last", "mean", "mean"))
        sampling = SamplingParams(pooling=way, max_tokens=0, seed=sampling.seed)
        rules = NO_RULES
    structured = random.Random(f"structured {number}.{caller}")
    if structured.random() < 0.3 and sampling.max_tokens != 0:
        sampling = _with_grammar(structured, sampling)
        rules = replace(rules, banned_sequences=())  # allowed tokens must not be banned
    drawn_tokens = rng.randint(10, 32)
    max_tokens = drawn_tokens if sampling.max_tokens is None else sampling.max_tokens
    stop_ids = tuple(rng.sample(range(vocab_size), 8)) if rng.random() < 0.4 else (1,)
    if sampling.structured_outputs is not None:  # the grammar may allow only other stop tokens
        stop_ids = (1,) if sampling.min_tokens else tuple(dict.fromkeys((1, *stop_ids)))
    at_step = rng.choice((0, 0, 0, rng.randint(1, 30)))
    asked = random.Random(f"asked {number}.{caller}")
    wishes: dict[str, Any] = {
        "tenant": asked.choice(("", "a", "b")),
        "priority": asked.choice((0, 0, -1, 3)),
        "ttft_slo_ms": asked.choice((None, 5.0, 1e6)),
        "tpot_slo_ms": asked.choice((None, 0.01, 2.0)),
    }
    requests = tuple(
        Request(
            request_id=f"{number}.{caller}/{stream}",
            group_id=f"{number}.{caller}",
            stream=stream,
            prompt_ids=np.array(prompt, np.int32),
            sampling=sampling,
            stop_ids=stop_ids,
            max_total_tokens=len(prompt) + max_tokens,
            arrival_ms=float(at_step),
            cache_salt=rng.choice(("", "", "", "a")),
            rules=rules,
            **wishes,
        )
        for stream in range(sampling.n)
    )
    cancel_at = tuple(
        at_step + rng.randint(1, 40) if rng.random() < 0.06 else None for _ in requests
    )
    return Arrival(at_step=at_step, requests=requests, cancel_at=cancel_at)


def _beams(rng: random.Random, name: str, prefixes: list[list[int]], vocab_size: int) -> Arrival:
    """Return a search of two or three beams, which fits the smallest max_num_seqs."""
    prompt = rng.choice(prefixes)[: rng.randint(1, 40)] + _ids(rng, vocab_size, rng.randint(0, 6))
    n = rng.randint(1, 3)
    sampling = SamplingParams(
        n=n,
        best_of=rng.choice((3, max(n, 2))),
        use_beam_search=True,
        temperature=0.0,
        length_penalty=rng.choice((1.0, 0.0, 2.0)),
        early_stopping=rng.choice((False, True, "never")),
        seed=rng.randrange(2**40),
        min_tokens=rng.choice((0, 0, 4)),
        logprobs=rng.choice((None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, 1)),
    )
    sampling = _with_processors(random.Random(f"processed {name}"), sampling, vocab_size)
    sampling = _as_llama_cpp(random.Random(f"window {name}"), sampling)
    stop_ids = tuple(rng.sample(range(vocab_size), rng.choice((1, 30))))
    banned = rng.sample(range(vocab_size), rng.choice((0, 9)))
    rules = TokenRules(banned_sequences=tuple((id_,) for id_ in banned))
    at_step, max_tokens = rng.choice((0, 0, 5)), rng.randint(4, 24)
    requests = tuple(
        Request(
            request_id=f"{name}/{stream}",
            group_id=name,
            stream=stream,
            prompt_ids=np.array(prompt, np.int32),
            sampling=sampling,
            stop_ids=stop_ids,
            max_total_tokens=len(prompt) + max_tokens,
            arrival_ms=float(at_step),
            rules=rules,
        )
        for stream in range(n)
    )
    cancel_at = tuple(
        at_step + rng.randint(1, 40) if rng.random() < 0.06 else None for _ in requests
    )
    return Arrival(at_step=at_step, requests=requests, cancel_at=cancel_at)


def _with_processors(
    rng: random.Random, sampling: SamplingParams, vocab_size: int
) -> SamplingParams:
    """Add logits processors and stop conditions to a beam search."""
    bias = {rng.randrange(vocab_size): rng.uniform(-5, 5) for _ in range(3)}
    fields: dict[str, Any] = {}
    if rng.random() < 0.5:
        fields = {
            "repetition_penalty": rng.choice((1.0, 1.3)),
            "presence_penalty": rng.choice((0.0, 0.7)),
            "frequency_penalty": rng.choice((0.0, -0.4)),
            "logit_bias": rng.choice(({}, bias)),
            "no_repeat_ngram_size": rng.choice((0, 0, 2)),
            "dry_multiplier": rng.choice((0.0, 0.8)),
            "logprob_token_ids": rng.choice(((), (3, 5))),
        }
    if rng.random() < 0.4:
        fields["structured_outputs"] = rng.choice(GRAMMARS)
    if rng.random() < 0.4:
        fields["stop"] = rng.choice((("a",), ("e", "th"), ("q", "zz", "1"), ('"',)))
    return replace(sampling, **fields)


def _blocks_for_beams(request: Request, block_size: int) -> int:
    width, shared = request.sampling.num_sequences, len(request.prompt_ids) // block_size
    own = -(-request.max_total_tokens // block_size) - shared
    return shared + width * own + width - 1


def _sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    bias = {rng.randrange(vocab_size): rng.uniform(-5, 5) for _ in range(3)}
    return SamplingParams(
        n=rng.choice((1, 1, 1, 1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 0.5, 1.0, 1.0, 1.7)),
        top_k=rng.choice((0, 0, -1, 1, 5, 40)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.4)),
        logit_bias=bias if rng.random() < 0.2 else {},
        seed=rng.randrange(-(2**40), 2**40),
        min_tokens=rng.choice((0, 0, 2)),
        logprobs=rng.choice((None, 0, 2, 5)),
    )


def _with_scores(rng: random.Random, sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Request prompt scores for some streams, only scores for others, listed ids for others."""
    prompt_logprobs = rng.choice((None, None, None, 0, 2, 5))
    if prompt_logprobs is not None and sampling.n == 1 and rng.random() < 0.3:
        return replace(sampling, prompt_logprobs=prompt_logprobs, max_tokens=0, min_tokens=0)
    listed = rng.sample(range(vocab_size), rng.randint(1, 5)) if rng.random() < 0.2 else ()
    return replace(sampling, prompt_logprobs=prompt_logprobs, logprob_token_ids=tuple(listed))


def _with_rare(
    rng: random.Random, sampling: SamplingParams, prompt: list[int], vocab_size: int
) -> tuple[SamplingParams, TokenRules]:
    """Add rarely used sampling parameters, a few at a time; mirostat in a third of the cases."""
    few = rng.sample(range(2, vocab_size), 12)  # a small allowed set repeats tokens
    fields: dict[str, Any] = {
        "temperature": sampling.temperature or 1.0,
        "dry_multiplier": rng.choice((0.0, 0.8, 3.0)),
        "dry_base": rng.choice((1.75, 1.1)),
        "dry_allowed_length": rng.choice((1, 2, 3)),
        "dry_penalty_last_n": rng.choice((-1, -1, 6)),
        "no_repeat_ngram_size": rng.choice((0, 0, 0, 3)),
        "allowed_token_ids": rng.choice((None, None, few)),
    }
    if rng.random() < 0.33:
        fields["mirostat"] = 2
        fields["mirostat_tau"] = rng.choice((1.0, 3.0))
        fields["mirostat_eta"] = rng.choice((0.1, 1.0))
    else:
        fields["typical_p"] = rng.choice((1.0, 0.9, 0.3))
        fields["top_n_sigma"] = rng.choice((0.0, 0.0, 1.0, 2.0))
        fields["epsilon_cutoff"] = rng.choice((0.0, 0.0, 0.002))
        fields["eta_cutoff"] = rng.choice((0.0, 0.0, 0.01))
        fields["xtc_probability"] = rng.choice((0.0, 0.5, 1.0))
        fields["xtc_threshold"] = rng.choice((0.01, 0.1))
    banned: list[tuple[int, ...]] = []
    if rng.random() < 0.5:
        banned = [(one, other) for one, other in pairwise(few)]
        banned.append((*prompt[len(prompt) - rng.randint(0, 2) :], few[0]))
        banned.append((rng.randrange(vocab_size),))
    rules = TokenRules(banned_sequences=tuple(banned), breaker_ids=tuple(few[: rng.randint(0, 2)]))
    return sampling.changed(**fields), rules


def _as_llama_cpp(rng: random.Random, sampling: SamplingParams) -> SamplingParams:
    """Let the penalties of some requests count the last tokens only; draw an order of the steps,
    and the first version of mirostat."""
    fields: dict[str, Any] = {"repeat_last_n": rng.choice((None, None, -1, 0, 1, 7, 64))}
    steps = [*SAMPLERS]
    rng.shuffle(steps)
    if sampling.mirostat:
        fields["mirostat"] = rng.choice((1, 2))
    elif rng.random() < 0.4 and not sampling.use_beam_search:
        fields["samplers"] = tuple(steps)
    return replace(sampling, **fields)


def _with_grammar(rng: random.Random, sampling: SamplingParams) -> SamplingParams:
    """Add a grammar: with many or few forced tokens, one that may end early, one without end.

    Some requests ask for log-probabilities, which excludes forced tokens.
    """
    grammar = rng.choice(GRAMMARS)
    return replace(
        sampling,
        structured_outputs=grammar,
        allowed_token_ids=None,
        no_repeat_ngram_size=0,
        min_tokens=rng.choice((0, 0, 3)),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, None, None, sampling.logprobs)),
    )


def _ids(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return [rng.randrange(2, vocab_size) for _ in range(count)]
