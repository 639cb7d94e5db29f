"""The grammar: what it writes parses, and nothing else does."""

import random

import pytest

from comlrl_lightning.assets.grammar import ANIMALS, MAX_SENTENCES, PLACES, Topic, parses, random_topic, write_story

FINN = Topic("fox", "in the forest")
STORY = (
    "Finn the fox lived in the forest. He was sad. Then Rose the rabbit came along. They took a nap. It was a good day."
)


def stories(num_stories: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [write_story(random_topic(rng), rng) for _ in range(num_stories)]


def test_every_written_story_parses() -> None:
    assert [story for story in stories(500) if not parses(story)] == []


def test_stories_vary_in_length() -> None:
    lengths = [len(story) for story in stories(500)]
    assert min(lengths) < 40
    assert max(lengths) > 250
    sentences = {story.count(".") for story in stories(500)}
    assert sentences == set(range(1, MAX_SENTENCES + 1))


def test_story_keeps_to_its_topic() -> None:
    rng = random.Random(3)
    for animal in ANIMALS:
        for place in PLACES:
            first = write_story(Topic(animal, place), rng).split(".")[0]
            assert f" {animal} " in first
            assert place in first


def test_same_seed_same_story() -> None:
    assert write_story(FINN, random.Random(7)) == write_story(FINN, random.Random(7))


def test_reference_story_parses() -> None:
    assert parses(STORY)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Finn the", "Ben the"),  # the fox is called Finn
        ("He was", "She was"),  # the pronoun of the hero
        ("in the forest", "in the desert"),  # no such place
        ("Rose the rabbit", "Olive the owl"),  # not the fox's friend
        ("They took", "He take"),  # no such verb form
        ("Then Rose the rabbit came along. ", ""),  # "they" without a friend
        ("They took a nap.", "Then Rose the rabbit came along."),  # a friend comes along once
        ("Finn the fox lived in the forest. ", ""),  # no opening
        ("He was sad.", "Finn the fox lived in the forest."),  # a second opening
        ("He was sad.", "It was a good day."),  # a closing in the middle
        ("He was sad.", "He was very sad."),  # a word too many
        ("sad. Then", "sad.Then"),  # no space
        ("sad. Then", "sad.  Then"),  # two spaces
        ("good day.", "good day"),  # cut off
        ("good day.", "good day. "),  # something left over
        ("good day.", "good day.Then"),  # a sentence that starts without a space
        ("Finn the fox", "finn the fox"),  # capitals count
    ],
)
def test_mutations_do_not_parse(old: str, new: str) -> None:
    assert old in STORY
    assert not parses(STORY.replace(old, new, 1))


@pytest.mark.parametrize(
    "text", ["", ".", " ", "Finn", "It was a good day.", "Once a owl called Olive lived by the sea."]
)
def test_other_texts_do_not_parse(text: str) -> None:
    assert not parses(text)


def test_exchanged_words_do_not_parse() -> None:
    # Two different neighbors exchanged inside a sentence: no rule allows both orders.
    rng = random.Random(1)
    for story in stories(200, seed=2):
        words = story.split(" ")
        index = rng.randrange(len(words) - 1)
        words[index], words[index + 1] = words[index + 1], words[index]
        mutated = " ".join(words)
        assert mutated == story or not parses(mutated)
