"""The mini-story grammar of the embedded model: one set of rules that both writes stories and recognises them.

A story is an opening, then body sentences, then perhaps a closing. The opening names the hero, its kind and the place,
and everything after it must agree: the pronoun, the names, the place. A friend may come along once; only then may
"they" act. The rules, the words and all stories made from them are our own work, under Apache-2.0 like the package.
"""

import random
import re
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

_CHARACTERS = {  # kind: name, pronoun, kind of the friend
    "fox": ("Finn", "he", "rabbit"),
    "bear": ("Ben", "he", "owl"),
    "rabbit": ("Rose", "she", "bear"),
    "owl": ("Olive", "she", "mouse"),
    "mouse": ("Mia", "she", "horse"),
    "cat": ("Cleo", "she", "dog"),
    "dog": ("Dan", "he", "hen"),
    "frog": ("Fred", "he", "duck"),
    "duck": ("Dora", "she", "frog"),
    "horse": ("Hugo", "he", "goat"),
    "goat": ("Greta", "she", "cat"),
    "hen": ("Hanna", "she", "fox"),
    "dragon": ("Drake", "he", "mouse"),
    "dinosaur": ("Dino", "he", "frog"),
    "robot": ("Rob", "he", "cat"),
    "hero": ("Hilda", "she", "dog"),
    "wizard": ("Wanda", "she", "owl"),
}
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
        '"I am {mood}," said <friend>.',
        '"You are {mood}," said <friend>.',
        '"You are {mood}," said <hero>.',
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

    topic: Topic
    """The hero's kind, which fixes the rest of the cast, and the place."""
    has_friend: bool = False
    """Whether the friend has come along."""

    def words(self) -> dict[str, str]:
        """Return the text of every `<slot>`."""
        hero, pronoun, friend_kind = _CHARACTERS[self.topic.kind]
        return {
            "hero": hero,
            "she": pronoun,
            "She": pronoun.capitalize(),
            "kind": self.topic.kind,
            "article": _article(self.topic.kind),
            "place": self.topic.place,
            "friend": _CHARACTERS[friend_kind][0],
            "friend_kind": friend_kind,
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
    cast = Cast(topic)
    num_sentences = rng.randint(1, MAX_SENTENCES)
    meeting = rng.randint(1, 2 * MAX_SENTENCES // 3)
    has_closing = num_sentences > 2 and rng.random() < 0.5
    sentences = [_write("opening", cast, rng)]
    for position in range(1, num_sentences - has_closing):
        if position == meeting:
            cast = replace(cast, has_friend=True)
            sentences.append(_write("meeting", cast, rng))
        else:
            sentences.append(_write("together" if cast.has_friend and rng.random() < 0.6 else "body", cast, rng))
    if has_closing:
        sentences.append(_write("closing_together" if cast.has_friend else "closing", cast, rng))
    return " ".join(sentences)


def parses(text: str) -> bool:
    """Return whether a text is a whole story of this grammar, from its opening to its last full stop."""
    first, *rest = re.split(r"(?<=\.) ", text)
    cast = _cast_of_opening(first)
    if cast is None:
        return False
    for position, sentence in enumerate(rest, start=1):
        if not cast.has_friend and _fits("meeting", sentence, cast):
            cast = replace(cast, has_friend=True)
        elif not any(_fits(symbol, sentence, cast) for symbol in _symbols(cast, is_last=position == len(rest))):
            return False
    return True


def random_topic(rng: random.Random) -> Topic:
    """Return a topic of any kind and place that the grammar knows."""
    return Topic(rng.choice(tuple(_CHARACTERS)), rng.choice(_SCENES))


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _write(symbol: str, cast: Cast, rng: random.Random) -> str:
    words = cast.words()

    def fill(slot: re.Match[str]) -> str:
        rule, word = slot.groups()
        return words[word] if rule is None else _SLOT.sub(fill, rng.choice(_RULES[rule]))

    return _SLOT.sub(fill, rng.choice(_RULES[symbol]))


def _cast_of_opening(sentence: str) -> Cast | None:
    for kind in _CHARACTERS:
        for place in _SCENES:
            cast = Cast(Topic(kind, place))
            if kind in sentence and place in sentence and _fits("opening", sentence, cast):
                return cast
    return None


def _symbols(cast: Cast, *, is_last: bool) -> list[str]:
    body = ["body", "together"] if cast.has_friend else ["body"]
    closing = ["closing_together" if cast.has_friend else "closing"] if is_last else []
    return body + closing


def _fits(symbol: str, sentence: str, cast: Cast) -> bool:
    return _pattern(symbol, cast).fullmatch(sentence) is not None


@lru_cache(maxsize=4096)
def _pattern(symbol: str, cast: Cast) -> re.Pattern[str]:
    words = cast.words()

    def any_of(rule: str) -> str:
        return f"(?:{'|'.join(map(expand, _RULES[rule]))})"

    def expand(template: str) -> str:
        return "".join(map(piece, re.split(r"(\{\w+\}|<\w+>)", template)))

    def piece(part: str) -> str:
        slot = _SLOT.fullmatch(part)
        if slot is None:
            return re.escape(part)
        rule, word = slot.groups()
        return re.escape(words[word]) if rule is None else any_of(rule)

    return re.compile(any_of(symbol))
