"""The mini-story grammar of the embedded model: one set of rules that both writes stories and recognises them.

A story is an opening, then body sentences, then perhaps a closing. The opening names the hero, its kind and the place,
and everything after it must agree: the pronoun, the names, the place. A friend may come along once; only then may
"they" act. The rules, the words and all stories made from them are our own work, under Apache-2.0 like the package.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

ANIMALS = ("fox", "bear", "rabbit", "owl", "mouse", "cat", "dog", "frog", "duck", "horse", "goat", "hen")
PLACES = (
    "in the forest",
    "by the river",
    "on the farm",
    "near the lake",
    "on the hill",
    "in the garden",
    "by the sea",
    "in the village",
)
MAX_SENTENCES = 9

_WOMEN = ("Mia", "Ann", "Lily", "Rose", "Zoe", "Emma")
_MEN = ("Ben", "Tom", "Max", "Sam", "Leo", "Finn")
_PRONOUNS = dict.fromkeys(_WOMEN, "she") | dict.fromkeys(_MEN, "he")
_KINDS = (*ANIMALS, "dragon", "dinosaur", "robot", "wizard")
_SCENES = (*PLACES, "in the clouds", "on Mars", "on the moon", "at the fair")

# `{slot}` is another rule, `<slot>` is filled from the story's cast.
_RULES: dict[str, tuple[str, ...]] = {
    "opening": (
        "<hero> the <kind> lived <place>.",
        "Once <article> <kind> called <hero> lived <place>.",
        "One day, <hero> the <kind> was <place>.",
        "<hero> was a {size} <kind> who lived <place>.",
    ),
    "body": (
        "{Hero} {act}.",
        "{Hero} {act}.",
        "{when} {hero} {act}.",
        "{Hero} {act} and {act}.",
        "{Hero} was {mood}.",
        "{Hero} was {mood}, so <she> {act}.",
        "It was {weather} <place>.",
        '"I am {mood}," said <hero>.',
    ),
    "meeting": ("{Hero} met <friend> the <friend_kind>.", "Then <friend> the <friend_kind> came along."),
    "together": (
        "They {act}.",
        "<friend> {act}.",
        "{when} they {act}.",
        "<hero> and <friend> {act}.",
        '"You are {mood}," said <friend>.',
    ),
    "closing": ("In the end, {hero} was {mood}.", "That night, {hero} slept well.", "It was a good day."),
    "closing_together": ("In the end, they were friends.", "That night, they slept well.", "It was a good day."),
    "Hero": ("<hero>", "<She>", "<She>"),
    "hero": ("<hero>", "<she>", "<she>"),
    "when": ("Then", "Soon", "Later,", "After lunch,", "In the morning,"),
    "act": (
        "{move} {path}",
        "{move} {path}",
        "{get} a {look} {thing}",
        "{get} a {look} {thing}",
        "ate {food}",
        "{rest}",
    ),
    "move": ("ran", "walked", "jumped"),
    "path": ("over the wall", "to the old tree", "down the road", "across the grass", "around the house"),
    "get": ("found", "saw", "made", "lost"),
    "look": ("red", "blue", "small", "big", "shiny"),
    "thing": ("ball", "hat", "stone", "box", "boat", "kite", "bell", "key"),
    "food": ("some bread", "some nuts", "some soup", "some cheese", "a ripe plum"),
    "rest": ("took a nap", "sang a song", "played a game", "sat in the sun", "told a story", "looked at the sky"),
    "mood": ("happy", "sad", "hungry", "tired", "brave", "kind"),
    "size": ("little", "young", "clever", "quiet"),
    "weather": ("warm", "cold", "sunny", "windy"),
}
_SLOT = re.compile(r"\{(\w+)\}|<(\w+)>")


@dataclass(frozen=True)
class Topic:
    """What a story is about, as its prompt says it."""

    kind: str
    """The hero's kind, such as "fox"."""
    place: str
    """Where the story happens, such as "in the forest"."""


@dataclass(frozen=True)
class Cast:
    """The choices that every sentence of one story has to respect."""

    hero: str
    """The hero's name; it fixes the pronoun."""
    topic: Topic
    """The hero's kind and the place."""
    friend: str = ""
    """The friend's name, empty until the friend has come along."""
    friend_kind: str = ""
    """The friend's kind, another one than the hero's."""

    def words(self) -> dict[str, str]:
        """Return the text of every `<slot>`."""
        pronoun = _PRONOUNS[self.hero]
        return {
            "hero": self.hero,
            "she": pronoun,
            "She": pronoun.capitalize(),
            "kind": self.topic.kind,
            "article": _article(self.topic.kind),
            "place": self.topic.place,
            "friend": self.friend,
            "friend_kind": self.friend_kind,
        }


def story_prompt(animal: str, place: str) -> str:
    """Return the task that asks for a story about an animal at a place."""
    return f"Tell a story about {_article(animal)} {animal} {place}."


def write_story(topic: Topic, rng: random.Random) -> str:
    """Write one story about a topic, of one to `MAX_SENTENCES` sentences.

    Args:
        topic: The hero's kind and the place.
        rng: Where every choice comes from, the length included.
    """
    cast = Cast(hero=rng.choice(sorted(_PRONOUNS)), topic=topic)
    num_sentences = rng.randint(1, MAX_SENTENCES)
    meeting = rng.randint(1, 2 * MAX_SENTENCES // 3)
    has_closing = num_sentences > 2 and rng.random() < 0.5
    sentences = [_write("opening", cast, rng)]
    for position in range(1, num_sentences - has_closing):
        if position == meeting:
            cast = _with_friend(cast, rng)
            sentences.append(_write("meeting", cast, rng))
        else:
            sentences.append(_write("together" if cast.friend and rng.random() < 0.6 else "body", cast, rng))
    if has_closing:
        sentences.append(_write("closing_together" if cast.friend else "closing", cast, rng))
    return " ".join(sentences)


def parses(text: str) -> bool:
    """Return whether a text is a whole story of this grammar, from its opening to its last full stop."""
    first, *rest = re.split(r"(?<=\.) ", text)
    cast = _cast_of_opening(first)
    if cast is None or len(rest) >= MAX_SENTENCES:
        return False
    for position, sentence in enumerate(rest, start=1):
        met = None if cast.friend else _cast_of_meeting(sentence, cast)
        if met is not None:
            cast = met
        elif not _fits(sentence, cast, is_last=position == len(rest)):
            return False
    return True


def random_topic(rng: random.Random) -> Topic:
    """Return a topic of any kind and place that the grammar knows."""
    return Topic(rng.choice(_KINDS), rng.choice(_SCENES))


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _write(symbol: str, cast: Cast, rng: random.Random) -> str:
    words = cast.words()

    def fill(slot: re.Match[str]) -> str:
        rule, word = slot.groups()
        return words[word] if rule is None else _SLOT.sub(fill, rng.choice(_RULES[rule]))

    return _SLOT.sub(fill, rng.choice(_RULES[symbol]))


def _with_friend(cast: Cast, rng: random.Random) -> Cast:
    names = sorted(_PRONOUNS.keys() - {cast.hero})
    kinds = [animal for animal in ANIMALS if animal != cast.topic.kind]
    return replace(cast, friend=rng.choice(names), friend_kind=rng.choice(kinds))


def _cast_of_opening(sentence: str) -> Cast | None:
    match = _match(
        "opening", sentence, {"hero": tuple(_PRONOUNS), "kind": _KINDS, "place": _SCENES, "article": ("a", "an")}
    )
    if match is None:
        return None
    cast = Cast(hero=match["hero"], topic=Topic(match["kind"], match["place"]))
    return cast if match.get("article", cast.words()["article"]) == cast.words()["article"] else None


def _cast_of_meeting(sentence: str, cast: Cast) -> Cast | None:
    names = tuple(name for name in _PRONOUNS if name != cast.hero)
    kinds = tuple(animal for animal in ANIMALS if animal != cast.topic.kind)
    match = _match("meeting", sentence, _fixed(cast) | {"friend": names, "friend_kind": kinds})
    return None if match is None else replace(cast, friend=match["friend"], friend_kind=match["friend_kind"])


def _fits(sentence: str, cast: Cast, *, is_last: bool) -> bool:
    symbols = ["body", "together"] if cast.friend else ["body"]
    if is_last:
        symbols.append("closing_together" if cast.friend else "closing")
    return any(_match(symbol, sentence, _fixed(cast)) is not None for symbol in symbols)


def _fixed(cast: Cast) -> dict[str, tuple[str, ...]]:
    return {slot: (word,) for slot, word in cast.words().items()}


def _match(symbol: str, sentence: str, words: Mapping[str, tuple[str, ...]]) -> dict[str, str] | None:
    for pattern in _patterns(symbol, tuple(words.items())):
        if match := pattern.fullmatch(sentence):
            return match.groupdict()
    return None


@lru_cache(maxsize=4096)
def _patterns(symbol: str, words: tuple[tuple[str, tuple[str, ...]], ...]) -> list[re.Pattern[str]]:
    choices = dict(words)

    def expand(template: str) -> str:
        literal, *slots = re.split(r"(\{\w+\}|<\w+>)", template)
        return re.escape(literal) + "".join(map(piece, slots))

    def piece(part: str) -> str:
        if part.startswith("{"):
            return f"(?:{'|'.join(map(expand, _RULES[part[1:-1]]))})"
        if part.startswith("<"):
            options = "|".join(map(re.escape, choices[part[1:-1]]))
            return f"(?:{options})" if len(choices[part[1:-1]]) == 1 else f"(?P<{part[1:-1]}>{options})"
        return re.escape(part)

    return [re.compile(expand(template)) for template in _RULES[symbol]]
