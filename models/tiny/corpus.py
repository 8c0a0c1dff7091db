"""The training text of the model in the box, as rows of token ids.

Reads the stories and the books, cleans them, trains the byte-level BPE, and deals rows: windows of
a book, or stories, either plain or told in a conversation. Names and colours in a story are swapped
at random, so that a thousand stories last longer. Everything is drawn from the one `random.Random`
handed in, so a seed fixes the order.

Does not know PyTorch or the model. Always holds: a held-out story is never in a row; a row starts
with the begin token; a turn ends with the end token, which is also the end of a story.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END = "<|begin|>", "<|end|>"
SPECIALS = [BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
HELD_OUT_EVERY = 20  # one story in twenty, 5 %
ECHO_SHARE = 0.3  # of the rows made from books
PLAIN_SHARE, TALK_SHARE = 0.25, 0.3  # of the documents; the rest are stories asked for

GIRLS, BOYS, COLOURS = (
    group.split()
    for group in (
        "Lily Anna Mia Sara Lucy Sarah Molly Jane Lila Jill Daisy Sue Sally Amy Mary Jenny Emma"
        " Ella Emily Rachel Lola Kate Alice Claire Sophie Polly Nora Chloe Zoe Bella",
        "Ben Tom Timmy Jack Tim Sam Max John Bob Joe Jimmy Tommy Billy Andy Benny James Jake Jim"
        " Frank George Oliver Charlie Danny Peter Henry Leo Joey Fred Paul Mike",
        "red blue green yellow pink purple",
    )
)
SWAPS = [frozenset(GIRLS), frozenset(BOYS), frozenset(COLOURS)]
NAME = re.compile(r"\b(?:" + "|".join(GIRLS + BOYS) + r")\b")

REQUESTS = [
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "tell me a story about {}",
    "Please tell me a story about {}.",
    "Can you tell me a story about {}?",
    "Write a short story about {}.",
    "I want to hear a story about {}.",
]
OPEN_REQUESTS = ["Tell me a story.", "Tell me a story, please.", "Can you tell me a story?"]
SYSTEMS = [
    "You are Quill, a toy model that tells stories.",
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "Tell short stories with simple words.",
]

# Words the article test below takes for nouns, but nobody asks for a story about them.
NOT_A_TOPIC = (
    "time while day name idea back lesson moment surprise head hand face voice smile mess air"
    " place plan way end side sudden will how again cold dark work line help sound minute thing"
    " break spot mistake chance task walk ride trip look problem world floor ground game adventure"
    " story noise friend girl boy man child mom dad mummy mother father brother sister"
)
AFTER_ARTICLE = re.compile(
    r"\b(?:the|a|an|his|her|their)\s+([a-z]{3,})"
    r"(?=(\s*[.,!?]|\s+(?:and|was|were|in|on|to|with|that|is|had|who|from|for|named|called)\b)?)"
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Clean texts, split once."""

    stories: list[str]
    held_out: list[str]
    books: list[str]


@dataclass(frozen=True, slots=True)
class Ask:
    """One scripted exchange: ways to say a thing, and ways to answer it.

    Both may hold the gaps {name} and {thing}, which are filled alike.
    """

    says: list[str]
    answers: list[str]


def read_texts(folder: Path) -> Texts:
    """Read and clean the stories and the English books of the data folder's `text`."""
    stories = [clean_story(s) for s in json.loads((folder / "tinystories_1000.json").read_text())]
    botchan = (folder / "botchan.txt").read_text(encoding="utf-8-sig")
    start, end = botchan.index("A NOTE BY THE TRANSLATOR"), botchan.index("*** END OF")
    return Texts(
        stories=[s for i, s in enumerate(stories) if i % HELD_OUT_EVERY],
        held_out=stories[::HELD_OUT_EVERY],
        books=[
            unwrap((folder / "war-and-peace.txt").read_text(encoding="utf-8"), "\n\n"),
            botchan[start:end].strip().replace("\n", " "),
            (folder / "tinyshakespeare.txt").read_text(encoding="utf-8").strip(),
        ],
    )


def clean_story(text: str) -> str:
    """Undo text that was once decoded with the wrong table, and use plain quotes."""
    for wrong, right in [("â€œ", '"'), ("â€™", "'"), ("â€“", " - "), ("â€”", " - "), ("â€", '"')]:
        text = text.replace(wrong, right)
    text = text.replace("“", '"').replace("”", '"').replace(" \n", "\n")
    return re.sub(r"  +", " ", text).strip()


def unwrap(text: str, paragraph_break: str) -> str:
    """Join hard-wrapped lines into paragraphs."""
    paragraphs = (" ".join(p.split()) for p in text.split(paragraph_break))
    return "\n\n".join(p for p in paragraphs if p)


def read_asks(path: Path) -> list[Ask]:
    """Read the scripted small talk."""
    return [Ask(says=one["says"], answers=one["answers"]) for one in json.loads(path.read_text())]


def train_tokenizer(texts: Texts, asks: list[Ask], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; stories count four times, since telling them is what it is for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    talk = [line for ask in asks for line in ask.says + ask.answers] + REQUESTS + SYSTEMS
    tokenizer.train_from_iterator(texts.stories * 4 + texts.books + talk * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer has no {token}"
    return found


def find_nouns(stories: list[str]) -> frozenset[str]:
    """Find nouns without a tagger: words that mostly close the phrase an article opened."""
    seen: Counter[str] = Counter()
    closed: Counter[str] = Counter()
    for story in stories:
        for match in AFTER_ARTICLE.finditer(story):
            seen[match[1]] += 1
            closed[match[1]] += match[2] is not None
    nouns = {w for w in seen if closed[w] >= 4 and closed[w] >= 0.6 * seen[w]}
    return frozenset(w for w in nouns - set(NOT_A_TOPIC.split()) if not w.endswith("s"))


class RowDealer:
    """Deals endless training rows of `row_tokens` ids."""

    def __init__(
        self, tokenizer: Tokenizer, texts: Texts, *, asks: list[Ask], row_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        self.stories = texts.stories
        self.asks = asks
        self.row_tokens = row_tokens
        self.begin = token_id(tokenizer, BEGIN)
        self.end = token_id(tokenizer, END)
        self.books = [self._ids(book) for book in texts.books]
        self.nouns = find_nouns(texts.stories)
        self.things = sorted(self.nouns)

    def deal(self, rng: random.Random, *, book_share: float) -> list[int]:
        """Deal one row: a window of a book, echoes from one, or documents until it is full."""
        if rng.random() < book_share:
            return self._echoes(rng) if rng.random() < ECHO_SHARE else self._book_window(rng)
        row: list[int] = []
        while len(row) < self.row_tokens:
            row += self._document(rng)
        return row[: self.row_tokens]

    def story_ids(self, story: str) -> list[int]:
        """A plain story as a document."""
        return [self.begin, *self._ids(story), self.end]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _book_window(self, rng: random.Random) -> list[int]:
        (book,) = rng.choices(self.books, weights=[len(b) for b in self.books])
        start = rng.randrange(len(book) - self.row_tokens)
        return [self.begin, *book[start : start + self.row_tokens - 1]]

    def _echoes(self, rng: random.Random) -> list[int]:
        """Pieces of a book, each said two or three times: practice in reading what came before."""
        row = [self.begin]
        while len(row) < self.row_tokens:
            piece = self._book_window(rng)[1 : rng.randrange(8, 80)]
            row += piece * rng.choice([2, 3])
        return row[: self.row_tokens]

    def _document(self, rng: random.Random) -> list[int]:
        kind = rng.random()
        if kind < PLAIN_SHARE:
            return self.story_ids(swap_words(rng.choice(self.stories), rng))
        is_talk = kind > 1 - TALK_SHARE
        turns = list(self._small_talk(rng)) if is_talk or rng.random() < 0.1 else []
        if not is_talk:
            story = swap_words(rng.choice(self.stories), rng)
            turns += [("user", self._request(story, rng)), ("assistant", story)]
        if rng.random() < 0.15:
            turns.insert(0, ("system", rng.choice(SYSTEMS)))
        ids = [self.begin]
        for role, text in turns:
            ids += [token_id(self.tokenizer, f"<|{role}|>"), *self._ids(text), self.end]
        return ids

    def _small_talk(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        for ask in rng.sample(self.asks, k=rng.choice([1, 1, 1, 2])):
            gaps = {"name": rng.choice(GIRLS + BOYS), "thing": rng.choice(self.things)}
            yield "user", rng.choice(ask.says).format(**gaps)
            yield "assistant", rng.choice(ask.answers).format(**gaps)

    def _request(self, story: str, rng: random.Random) -> str:
        """Ask for a story about a name or a thing that this story mentions at least twice."""
        words = Counter(re.findall(r"[a-z]+", story))
        names = [n for n, count in Counter(NAME.findall(story)).items() if count > 1]
        things = sorted(w for w, count in words.items() if count > 1 and w in self.nouns)
        topics = rng.sample(names, k=min(len(names), rng.choice([0, 1, 1, 2])))
        for thing in rng.sample(things, k=min(len(things), rng.choice([0, 1, 1]))):
            topics.append(("an " if thing[0] in "aeiou" else "a ") + thing)
        if not topics:
            return rng.choice(OPEN_REQUESTS)
        return rng.choice(REQUESTS).format(" and ".join(topics[:2]))


def swap_words(story: str, rng: random.Random) -> str:
    """Rename the people and recolour the things of a story, each consistently."""
    mapping: dict[str, str] = {}
    for group in SWAPS:
        found = sorted(group & set(re.findall(r"\w+", story)))
        if found and rng.random() < 0.6:
            mapping |= zip(found, rng.sample(sorted(group), k=len(found)), strict=True)
    return re.sub(r"\w+", lambda match: mapping.get(match[0], match[0]), story)
