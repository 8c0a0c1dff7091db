"""Find the topic of a story without a tagger, and write requests for such a story.

A topic is a thing or a person that the story names early and often: its main character. Names,
animals and toys can be swapped for others throughout a story, which augments the few real stories
and teaches the model to follow the request. A request names only topics of its story.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable

from corpus import BOYS, GIRLS, words

EARLY_CHARS = 220  # a topic is named within this many characters
HERO_TIMES = 3
COLOURS = words("red blue green yellow pink purple")
ANIMALS = words(
    "dog cat bird bear frog duck rabbit lion tiger monkey elephant owl pig cow horse goat turtle"
    " snail spider bug bee dragon robot squirrel snake crab whale dolphin penguin giraffe zebra"
)
TOYS = words("ball doll truck car kite boat train robot drum balloon")
SWAPS = (
    (frozenset(GIRLS), 0.7),
    (frozenset(BOYS), 0.7),
    (frozenset(COLOURS), 0.5),
    (frozenset(ANIMALS), 0.35),
    (frozenset(TOYS), 0.25),
)
NAME = re.compile(r"\b(?:" + "|".join(GIRLS + BOYS) + r")\b")
PERSON = re.compile(r"\b(girl|boy|" + "|".join(ANIMALS) + r") (?:named|called) ([A-Z][a-z]+)")

REQUESTS = [
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Tell me a story about {}",
    "tell me a story about {}",
    "Please tell me a story about {}.",
    "Can you tell me a story about {}?",
    "Tell me a short story about {}.",
    "Write a story about {}.",
    "Write a short story about {}.",
    "I want to hear a story about {}.",
    "I want a story about {}.",
    "A story about {}, please.",
    "Do you know a story about {}?",
    "Could you tell a story about {}?",
    "story about {}",
]
OPEN_REQUESTS = [
    "Tell me a story.",
    "Tell me a story",
    "tell me a story",
    "Tell me a story, please.",
    "Can you tell me a story?",
    "Tell me a short story.",
    "Write a story.",
    "Write a short story.",
    "I want a story.",
    "A story, please.",
    "Do you know a story?",
]

# Words that the article test below takes for nouns, but that are no topics.
NOT_A_TOPIC = frozenset(
    words(
        "time while day name idea back lesson moment surprise head hand face voice smile mess"
        " air place plan way end side sudden will how again cold dark work line help sound"
        " minute thing break spot mistake chance task walk ride trip look problem world floor"
        " ground game adventure story noise friend girl boy man child mom dad mummy mother"
        " father brother sister bit lot right left best top little big hug fun first other rest"
        " middle same inside outside mommy daddy play night one new old good great kids people"
        " family"
    )
)
AFTER_ARTICLE = re.compile(
    r"\b(?:the|a|an|his|her|their)\s+([a-z]{3,})"
    r"(?=(\s*[.,!?]|\s+(?:and|was|were|in|on|to|with|that|is|had|who|from|for|named|called)\b)?)"
)


def find_nouns(stories: Iterable[str]) -> frozenset[str]:
    """Find nouns without a tagger: words that often end the phrase after an article."""
    seen: Counter[str] = Counter()
    closed: Counter[str] = Counter()
    for story in stories:
        for match in AFTER_ARTICLE.finditer(story):
            seen[match[1]] += 1
            closed[match[1]] += match[2] is not None
    nouns = {w for w in seen if closed[w] >= 4 and closed[w] >= 0.6 * seen[w]}
    nouns |= set(ANIMALS) | set(TOYS)
    return frozenset(w for w in nouns - NOT_A_TOPIC if not w.endswith("s"))


def topics_of(story: str, nouns: frozenset[str]) -> list[str]:
    """Return the topics of a story as a request would name them, the main one first."""
    early = story[:EARLY_CHARS]
    people = {name: kind for kind, name in PERSON.findall(early)}
    counts = Counter(re.findall(r"[A-Za-z]+", story))
    found: Counter[str] = Counter()
    for word in dict.fromkeys(re.findall(r"[A-Za-z]+", early)):
        if counts[word] < HERO_TIMES:
            continue
        if word in people:
            found[f"a {people[word]} named {word}"] = counts[word]
        elif word in nouns:
            found[("an " if word[0] in "aeiou" else "a ") + word] = counts[word]
        elif NAME.fullmatch(word):
            found[word] = counts[word]
    return [topic for topic, _ in found.most_common(3)]


def request_for(story: str, nouns: frozenset[str], rng: random.Random) -> str:
    """Write a request for this story; an open one if it has no clear topic."""
    topics = topics_of(story, nouns)
    if not topics or rng.random() < 0.08:
        return rng.choice(OPEN_REQUESTS)
    chosen = topics[:2] if len(topics) > 1 and rng.random() < 0.25 else [rng.choice(topics[:2])]
    if rng.random() < 0.4:  # a short request: the kind or the name alone
        chosen = [
            rng.choice([topic.split(" named ")[0], topic.split(" named ")[-1]]) for topic in chosen
        ]
    return rng.choice(REQUESTS).format(" and ".join(chosen))


def swap_words(story: str, rng: random.Random) -> str:
    """Swap people, colours, animals and toys of a story for others, consistently."""
    mapping: dict[str, str] = {}
    told = set(re.findall(r"\w+", story))
    for group, share in SWAPS:
        found = sorted(group & told)
        if not found or rng.random() > share:
            continue
        others = sorted(group - mapping.keys() - set(mapping.values()))
        found = [word for word in found if word not in mapping]
        mapping |= dict(zip(found, rng.sample(others, k=len(found)), strict=True))
    mapping |= {f"{old}s": f"{new}s" for old, new in mapping.items()}
    swapped = re.sub(r"\w+", lambda match: mapping.get(match[0], match[0]), story)
    swapped = re.sub(r"\b([Aa]) (?=(?:elephant|owl|octopus)\b)", r"\1n ", swapped)
    return re.sub(r"\b([Aa])n (?!elephant|owl|octopus)(?=[bcdfghjklmnpqrstvwxz])", r"\1 ", swapped)
