"""Sample stories in bulk from stories260K with Quire, as training text for the built-in model.

Half of them start from an empty prompt, half from an opening line about a drawn hero, so that more
animals and things occur than the model would choose by itself. Each story has its own seed, so the
same arguments give the same stories at any concurrency.

Only stories that ended by themselves are written, one JSON line each, appended whole; a story is
the opening and the generated text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from corpus import BOYS, GIRLS, words

from quire import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent.parent
DATA_FOLDER = Path(os.environ.get("QUIRE_DATA", ROOT.parent / "shared" / "data"))
STORIES_A_CALL = 2000

HEROES = words(
    "dog cat bird fish frog duck bear bunny rabbit mouse lion tiger elephant monkey fox wolf owl"
    " horse cow pig sheep goat bee butterfly squirrel turtle snail spider ant dragon robot unicorn"
    " princess prince king queen fairy witch wizard pirate clown farmer doctor teacher baker cook"
    " boat car truck train plane rocket ball kite doll teddy tree flower star cloud moon sun leaf"
    " rock hat shoe cup spoon cake cookie apple banana puppy kitten whale dolphin shark crab"
    " penguin giraffe zebra chicken hen deer donkey bug worm snake crocodile dinosaur ghost giant"
)
KINDS = words("little small big happy sad brave kind curious lonely funny lazy clever shy old")
OPENINGS = [
    "Once upon a time, there was a {kind} {hero} named {name}.",
    "Once upon a time, there was a {kind} {hero} called {name}.",
    "Once upon a time, there was a {kind} {hero}.",
    "One day, a {kind} {hero} named {name}",
    "One day, {name} saw a {kind} {hero}",
    "{name} had a {kind} {hero}.",
    "Once upon a time, {name} found a {kind} {hero}",
    "{name} and {other} were playing with the {hero}",
    "{name} wanted a {hero}",
    "There once was a {kind} {hero} who lived in",
    "Once there was a {kind} {hero}. The {hero}",
    "{name} went to the",
    "One day, {name} and {other} went to",
]


def openings(rng: random.Random) -> Iterator[str]:
    """Yield openings without end; every other one is empty."""
    while True:
        name, other = rng.sample(GIRLS + BOYS, k=2)
        filled = rng.choice(OPENINGS).format(
            name=name, other=other, hero=rng.choice(HEROES), kind=rng.choice(KINDS)
        )
        for vowel in "aeiou":
            filled = filled.replace(f" a {vowel}", f" an {vowel}")
        yield filled
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Sample stories from stories260K with Quire."
    )
    parser.add_argument("--model", type=Path, default=DATA_FOLDER / "stories260K")
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file to append to")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=1, help="of the first story")
    parser.add_argument("--batch", type=int, default=128, help="stories in one step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.85)
    parser.add_argument("--top-p", type=float, default=0.95)
    args = parser.parse_args()

    started, num_stories, num_bytes, num_tokens = time.monotonic(), 0, 0, 0
    rng = random.Random(args.seed)
    drawn = openings(rng)
    llm = LLM(
        args.model,
        max_num_seqs=args.batch,
        max_num_batched_tokens=max(512, 2 * args.batch),
        num_threads=args.threads,
    )
    with llm, args.out.open("a", encoding="utf-8") as out:
        seed = args.seed * 1_000_000_000
        while (time.monotonic() - started) / 60 < args.minutes:
            prompts = [next(drawn) for _ in range(STORIES_A_CALL)]
            samplings = [
                SamplingParams(
                    temperature=args.temperature,
                    top_p=args.top_p,
                    max_tokens=450,
                    stop_token_ids=(1,),  # the begin token, which separates stories in llama2.c
                    seed=seed + i,
                )
                for i in range(len(prompts))
            ]
            seed += len(prompts)
            answers = llm.generate(prompts, samplings, progress=False)
            for prompt, answer in zip(prompts, answers, strict=True):
                num_tokens += len(answer.token_ids)
                if answer.finish_reason != "stop":
                    continue
                story = (prompt + answer.text).strip()
                out.write(json.dumps({"story": story}) + "\n")
                num_stories += 1
                num_bytes += len(story.encode())
            out.flush()
            seconds = time.monotonic() - started
            print(
                f"{seconds:.0f} s: {num_stories} stories, {num_bytes / 1e6:.1f} MB, "
                f"{num_tokens / seconds:.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
