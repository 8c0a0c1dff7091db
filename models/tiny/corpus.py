"""Training texts of the built-in model, cleaned and split once, and its tokenizer.

The texts are real stories (one in twenty is held out), stories sampled from another model (filtered
for nonsense), and books. The tokenizer is a byte-level BPE with one token per digit, so that the
model can learn sums.

A held-out story is in no other list; the same files give the same texts in the same order.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END = "<|begin|>", "<|end|>"
SPECIALS = [BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
HELD_OUT_EVERY = 20  # one story in twenty, 5 %
TOKENIZER_STORIES = 12_000  # of the sampled ones: more do not improve it

GIRLS, BOYS = (
    group.split()
    for group in (
        "Lily Anna Mia Sara Lucy Sarah Molly Jane Lila Jill Daisy Sue Sally Amy Mary Jenny Emma"
        " Ella Emily Rachel Lola Kate Alice Claire Sophie Polly Nora Chloe Zoe Bella",
        "Ben Tom Timmy Jack Tim Sam Max John Bob Joe Jimmy Tommy Billy Andy Benny James Jake Jim"
        " Frank George Oliver Charlie Danny Peter Henry Leo Joey Fred Paul Mike",
    )
)

MIN_WORDS, MAX_WORDS = 60, 330
MIN_VARIETY = 0.36  # distinct words per word of a story
MAX_REPEATS = 2  # of any five consecutive words
MAX_SHARE_OF_ONE_WORD = 0.075  # largest share of one word
KNOWN_TIMES = 30  # a word in fewer stories is likely made up
WORD = re.compile(r"[A-Za-z']+")


def words(text: str) -> list[str]:
    """Split a word list written as one text."""
    return text.split()


SMALL_WORDS = frozenset(
    words(
        "the and was her his she they you with for that had said were have him but not them very"
        " He She They The And can it all will are"
    )
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Clean texts, split once."""

    stories: list[str]
    held_out: list[str]
    sampled: list[str]
    books: list[str]


def read_texts(folder: Path, sampled: Iterable[Path] = ()) -> Texts:
    """Read `text` in the data directory and the files written by sample_stories.py."""
    stories = [clean_story(s) for s in json.loads((folder / "tinystories_1000.json").read_text())]
    botchan = (folder / "botchan.txt").read_text(encoding="utf-8-sig")
    start, end = botchan.index("A NOTE BY THE TRANSLATOR"), botchan.index("*** END OF")
    kept = [s for i, s in enumerate(stories) if i % HELD_OUT_EVERY]
    told = [clean_story(json.loads(line)["story"]) for path in sampled for line in path.open("rb")]
    return Texts(
        stories=kept,
        held_out=stories[::HELD_OUT_EVERY],
        sampled=sensible(told, real=kept),
        books=[
            unwrap((folder / "war-and-peace.txt").read_text(encoding="utf-8"), "\n\n"),
            botchan[start:end].strip().replace("\n", " "),
            (folder / "tinyshakespeare.txt").read_text(encoding="utf-8").strip(),
        ],
    )


def clean_story(text: str) -> str:
    """Repair wrongly decoded text, straighten quotes and strip line ends."""
    for wrong, right in [("â€œ", '"'), ("â€™", "'"), ("â€“", " - "), ("â€”", " - "), ("â€", '"')]:
        text = text.replace(wrong, right)
    text = text.replace("“", '"').replace("”", '"')
    text = re.sub(r"\s*\n\s*", "\n\n", text)
    return re.sub(r"  +", " ", text).strip()


def unwrap(text: str, paragraph_break: str) -> str:
    """Join hard-wrapped lines into paragraphs."""
    paragraphs = (" ".join(p.split()) for p in text.split(paragraph_break))
    return "\n\n".join(p for p in paragraphs if p)


def sensible(told: list[str], *, real: list[str]) -> list[str]:
    """Return the sampled stories that are neither too short nor full of repeats or made-up words.

    A story with more than three names is dropped too: small models confuse more.
    """
    counts: Counter[str] = Counter()
    for story in told:
        counts.update(set(WORD.findall(story)))
    known = {w for w, n in counts.items() if n >= KNOWN_TIMES}
    for story in real:
        known.update(WORD.findall(story))
    names = set(GIRLS + BOYS)
    return list(dict.fromkeys(s for s in told if _is_sensible(s, known, names)))


def _is_sensible(story: str, known: set[str], names: set[str]) -> bool:
    told = WORD.findall(story)
    if not MIN_WORDS <= len(told) <= MAX_WORDS or story[-1] not in '.!?"':
        return False
    if story.count('"') % 2 or any(word not in known for word in told):
        return False
    first_hundred = {word.lower() for word in told[:100]}
    if len(first_hundred) < MIN_VARIETY * min(len(told), 100):
        return False
    runs = Counter(tuple(told[i : i + 5]) for i in range(len(told) - 4))
    if max(runs.values()) > MAX_REPEATS:
        return False
    times = Counter(word for word in told if len(word) > 2 and word not in SMALL_WORDS)
    if max(times.values()) > MAX_SHARE_OF_ONE_WORD * len(told):
        return False
    found = Counter(word for word in told if word in names)
    return len(found) <= 3 and all(n > 1 for n in found.values())


def train_tokenizer(texts: Texts, talk: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train the BPE on the stories, a share of the books, and the questions with their answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    told = texts.sampled[:TOKENIZER_STORIES]
    books = [book[: len(book) // 4] for book in texts.books]
    tokenizer.train_from_iterator(texts.stories * 3 + told + books + list(talk) * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist."""
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer has no {token}"
    return found
