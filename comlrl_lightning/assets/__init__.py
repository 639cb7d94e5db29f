"""The tiny story model that ships with the package, its grammar and the script that trains it."""

from pathlib import Path

STORY_MODEL = "story-model"
"""Name of the story model wherever the agents' settings take the name of a model or a tokenizer."""


def story_model_path() -> Path:
    """Return the folder of the story model, to be given wherever a model name or a local folder is taken."""
    return Path(__file__).parent / "story_model"
