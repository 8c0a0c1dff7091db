"""Questions and answers made from templates: small talk, simple facts, and sums.

Small talk and facts are lists in small_talk.json and facts.json: phrasings with gaps, and answers
with the same gaps. Sums, counting and comparisons are generated here. Some phrasings, some pairs of
a fact with a phrasing and some sums are held out for the evaluation: `held_out` returns them.

A question that `held_out` returns is never in the training data, in any spelling. All randomness
comes from the `random.Random` argument.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from corpus import BOYS, GIRLS, words

Turn = tuple[str, str]  # a role and its text

MAX_NUMBER = 20  # the largest number in the supported sums
ONES = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    " fifteen sixteen seventeen eighteen nineteen"
)
TENS = words("twenty thirty forty fifty")
COUNTED = words("apples balls toys books cookies flowers stars hats eggs shells")
SIZES = words("ant bee mouse frog bird cat dog sheep pig lion cow horse bear elephant whale")
SYSTEMS = [
    "You are Quill, a toy model that tells stories.",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You are Quill.",
    "Answer in short sentences.",
    "Tell short stories with simple words.",
    "Be kind and brief.",
]
PLUS = [
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "What's {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "{a} plus {b}",
    "How much is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "Can you add {a} and {b}?",
    "Tell me what {a} + {b} is.",
    "What is the sum of {a} and {b}?",
]
PLUS_HELD_OUT = ["Please add {a} and {b}.", "Do you know what {a} plus {b} is?"]
MINUS = [
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "What's {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} = ?",
    "{a} minus {b}",
    "How much is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Take {b} from {a}.",
    "Tell me what {a} - {b} is.",
]
MINUS_HELD_OUT = ["Do you know what {a} minus {b} is?"]
TIMES = [
    "What is {a} times {b}?",
    "{a} times {b}",
    "What is {a} x {b}?",
    "How much is {a} times {b}?",
]


@dataclass(frozen=True, slots=True)
class Ask:
    """A kind of question: its phrasings, held-out phrasings, and answers."""

    kind: str
    says: tuple[str, ...]
    held_out: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its accepted answers."""

    kind: str
    says: str
    answers: tuple[str, ...]


def chosen(text: str, *, percent: int) -> bool:
    """Return whether this text is among the `percent` of texts that are held out."""
    return zlib.crc32(text.encode()) % 100 < percent


def fill(template: str, gaps: Mapping[str, str]) -> str:
    """Fill {gaps}; {Gap} is capitalized; "a" becomes "an" before a vowel."""
    capitals = {name.capitalize(): text[:1].upper() + text[1:] for name, text in gaps.items()}
    filled = template.format(**gaps, **capitals)
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", filled)


def number_word(number: int) -> str:
    """Return a number from 0 to 59 in words."""
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


def as_typed(text: str, rng: random.Random) -> str:
    """Return the text as typed in a hurry: without capital and final mark."""
    if rng.random() < 0.25:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip(".?! ")
    return text


class Questions:
    """Draw conversations. `things` are nouns for the gaps that any noun fits."""

    def __init__(self, folder: Path, things: list[str]) -> None:
        self.things = things
        self.talk = [
            Ask("talk", tuple(one["says"]), tuple(one.get("held_out", ())), tuple(one["answers"]))
            for one in json.loads((folder / "small_talk.json").read_text())
        ]
        self.facts = [
            ask
            for topic in json.loads((folder / "facts.json").read_text())
            for ask in _facts_of(topic)
        ]
        by_kind: dict[str, list[Ask]] = {}
        for ask in self.facts:
            by_kind.setdefault(ask.kind, []).append(ask)
        self.facts_by_kind = list(by_kind.values())

    def phrases(self) -> Iterator[str]:
        """Return every phrase, held out or not, to train the tokenizer."""
        for ask in (*self.talk, *self.facts):
            yield from (*ask.says, *ask.answers)

    def held_out(self) -> list[Question]:
        """Return held-out questions in a fixed order: kinds `talk`, `fact`, `plus`, `minus`."""
        rng = random.Random(1)
        found = [
            Question("talk", fill(says, gaps), tuple(fill(a, gaps) for a in ask.answers))
            for ask in self.talk
            for says in ask.held_out
            for gaps in [{"name": rng.choice(GIRLS + BOYS), "thing": rng.choice(self.things)}]
        ]
        found += [
            Question("fact", says, ask.answers) for ask in self.facts for says in ask.held_out
        ]
        for a in range(MAX_NUMBER + 1):
            for b in range(MAX_NUMBER + 1):
                if is_held_out_sum(a, b):
                    says = rng.choice(PLUS[:2]).format(a=a, b=b)
                    found.append(Question("plus", says, (f"{a} plus {b} is {a + b}.",)))
                if b <= a and _is_held_out_difference(a, b):
                    says = rng.choice(MINUS[:2]).format(a=a, b=b)
                    found.append(Question("minus", says, (f"{a} minus {b} is {a - b}.",)))
        for _ in range(40):
            a, b = rng.randint(0, 12), rng.randint(0, 12)
            says = rng.choice(PLUS_HELD_OUT).format(a=a, b=b)
            found.append(Question("plus, new phrasing", says, (f"{a} plus {b} is {a + b}.",)))
            says = rng.choice(MINUS_HELD_OUT).format(a=a + b, b=b)
            found.append(Question("minus, new phrasing", says, (f"{a + b} minus {b} is {a}.",)))
        return found

    def conversation(self, rng: random.Random) -> list[Turn]:
        """Draw one to four exchanges, sometimes after a system message."""
        turns: list[Turn] = []
        if rng.random() < 0.2:
            turns.append(("system", rng.choice(SYSTEMS)))
        name = rng.choice(GIRLS + BOYS) if rng.random() < 0.08 else None
        if name:
            greeting = rng.choice(["My name is {}.", "I am {}.", "Hello, I am {}!", "Hi, I'm {}."])
            answer = rng.choice(["Hello, {}! I am Quill. Would you like a story?",
                                 "Nice to meet you, {}! Would you like a story?"])  # fmt: skip
            turns += [
                ("user", as_typed(greeting.format(name), rng)),
                ("assistant", answer.format(name)),
            ]
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
            turns += self.exchange(rng)
        if name:
            asked = rng.choice(["What is my name?", "Who am I?", "Do you know my name?"])
            turns += [("user", as_typed(asked, rng)), ("assistant", f"Your name is {name}.")]
        return turns

    def exchange(self, rng: random.Random) -> list[Turn]:
        """Draw one question and its answer."""
        draw = rng.random()
        if draw < 0.3:
            says, answer = self._talk(rng)
        elif draw < 0.58:
            says, answer = self._fact(rng)
        elif draw < 0.63:
            says, answer = self._repeat(rng)
        else:
            says, answer = _numbers(rng)
        return [("user", as_typed(says, rng)), ("assistant", answer)]

    def _talk(self, rng: random.Random) -> tuple[str, str]:
        ask = rng.choice(self.talk)
        gaps = {"name": rng.choice(GIRLS + BOYS), "thing": rng.choice(self.things)}
        return fill(rng.choice(ask.says), gaps), fill(rng.choice(ask.answers), gaps)

    def _fact(self, rng: random.Random) -> tuple[str, str]:
        ask = rng.choice(rng.choice(self.facts_by_kind))
        return rng.choice(ask.says), rng.choice(ask.answers)

    def _repeat(self, rng: random.Random) -> tuple[str, str]:
        thing, other = rng.sample(self.things, k=2)
        which = rng.randrange(3)
        if which == 0:
            size = {word: i for i, word in enumerate(SIZES)}
            small, big = sorted(rng.sample(SIZES, k=2), key=size.__getitem__)
            pair = rng.sample([small, big], k=2)
            says = rng.choice(["Which is bigger, a {} or a {}?", "What is bigger, a {} or a {}?"])
            return fill(says.format(*pair), {}), fill(f"A {big} is bigger than a {small}.", {})
        if which == 1:
            name = rng.choice(GIRLS + BOYS)
            says = f"{name} has a {thing}. What does {name} have?"
            return fill(says, {}), fill(f"{name} has a {thing}.", {})
        says = f"I have a {thing} and a {other}. What do I have?"
        return fill(says, {}), fill(f"You have a {thing} and a {other}.", {})


def _facts_of(topic: dict[str, list[str]]) -> Iterator[Ask]:
    """Return the facts of a topic; a tenth of the phrasings of each is also held out."""
    kind = str(topic["kind"])
    rows = [row.split("|") for row in topic["rows"]]
    if topic.get("both_ways"):
        rows += [row[::-1] for row in rows]
    for number, row in enumerate(rows):
        gaps = dict(zip(topic["gaps"], row, strict=True))
        says = [fill(phrase, gaps) for phrase in topic["says"]]
        apart = [s for s in says[1:] if chosen(s, percent=8)]
        never = [fill(phrase, gaps) for phrase in topic["held_out"] if number % 2 == 0] + apart
        answers = tuple(fill(a, gaps) for a in topic["answers"])
        yield Ask(kind, tuple(s for s in says if s not in apart), tuple(never), answers)
        if "check" in topic:
            check = str(topic["check"])
            truth = answers[0][:1].lower() + answers[0][1:]
            yield Ask(f"{kind}, yes", (fill(check, gaps),), (), (f"Yes, {truth}",))
            last = topic["gaps"][-1]
            wrong = sorted({r[-1] for r in rows} - {row[-1]})
            says = [fill(check, gaps | {last: one}) for one in wrong]
            yield Ask(f"{kind}, no", tuple(says), (), (f"No, {truth}",))


def is_held_out_sum(a: int, b: int) -> bool:
    """Return whether sums of these two numbers, in either order, are held out."""
    return chosen(f"{min(a, b)} + {max(a, b)}", percent=15)


def _is_held_out_difference(a: int, b: int) -> bool:
    return chosen(f"{a} - {b}", percent=15)


def _numbers(rng: random.Random) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.68:
        return _sum(rng)
    if draw < 0.74:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        return rng.choice(TIMES).format(a=a, b=b), f"{a} times {b} is {a * b}."
    if draw < 0.84:
        a, b = rng.sample(range(100 if rng.random() < 0.5 else MAX_NUMBER), k=2)
        word = rng.choice(["bigger", "bigger", "larger", "smaller"])
        more = (a < b) if word == "smaller" else (a > b)
        says = rng.choice([f"Which is {word}, {a} or {b}?", f"Which number is {word}, {a} or {b}?",
                           f"What is {word}, {a} or {b}?", f"Is {a} or {b} {word}?"])  # fmt: skip
        return says, f"{a if more else b} is {word} than {b if more else a}."
    if draw < 0.92:
        a = rng.randint(1, 30)
        if rng.random() < 0.5:
            says = rng.choice(["What number comes after {}?", "What comes after {}?",
                               "Which number is after {}?"])  # fmt: skip
            return says.format(a), f"{a + 1} comes after {a}."
        says = rng.choice(["What number comes before {}?", "What comes before {}?"])
        return says.format(a), f"{a - 1} comes before {a}."
    first = 1 if rng.random() < 0.7 else rng.randint(2, 10)
    last = rng.randint(first + 1, MAX_NUMBER)
    if first == 1:
        shown = number_word(last) if rng.random() < 0.4 else str(last)
        says = rng.choice(["Count to {}.", "Can you count to {}?", "Please count to {}."])
        return says.format(shown), ", ".join(map(str, range(1, last + 1))) + "."
    if rng.random() < 0.5:
        says, counted = f"Count from {first} to {last}.", range(first, last + 1)
    else:
        says, counted = f"Count down from {first}.", range(first, -1, -1)
    return says, ", ".join(map(str, counted)) + "."


def _sum(rng: random.Random) -> tuple[str, str]:
    """Draw a sum or a difference that is not held out."""
    most = 99 if rng.random() < 0.25 else MAX_NUMBER
    while True:
        a, b = rng.randint(0, most), rng.randint(0, most)
        if rng.random() < 0.5:
            if not is_held_out_sum(a, b):
                break
        elif a >= b and not _is_held_out_difference(a, b):
            return _difference(a, b, rng)
    draw = rng.random()
    if draw < 0.12 and 0 < a <= 10 and 0 < b <= 10:
        name, things = rng.choice([*GIRLS, *BOYS]), rng.choice(COUNTED)
        if rng.random() < 0.4:
            says = f"I have {a} {things} and get {b} more. How many {things} do I have?"
            return says, f"You have {a + b} {things}."
        says = f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have?"
        return says, f"{name} has {a + b} {things}."
    if draw < 0.3 and most == MAX_NUMBER:
        left, right, total = number_word(a), number_word(b), number_word(a + b)
        says = rng.choice([PLUS[1], PLUS[6], PLUS[7], PLUS[9]]).format(a=left, b=right)
        return says[:1].upper() + says[1:], f"{left.capitalize()} plus {right} is {total}."
    return rng.choice(PLUS).format(a=a, b=b), f"{a} plus {b} is {a + b}."


def _difference(a: int, b: int, rng: random.Random) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.12 and 0 < b < a <= MAX_NUMBER:
        name, things = rng.choice([*GIRLS, *BOYS]), rng.choice(COUNTED)
        says = f"{name} has {a} {things} and loses {b}. How many {things} does {name} have?"
        return says, f"{name} has {a - b} {things}."
    if draw < 0.25 and a <= MAX_NUMBER:
        left, right, rest = number_word(a), number_word(b), number_word(a - b)
        says = rng.choice([MINUS[1], MINUS[6], MINUS[7]]).format(a=left, b=right)
        return says[:1].upper() + says[1:], f"{left.capitalize()} minus {right} is {rest}."
    return rng.choice(MINUS).format(a=a, b=b), f"{a} minus {b} is {a - b}."
