"""The shipped model: small, loadable by transformers alone, fluent; and the script that made it, reproducible."""

import random
import tomllib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import train_story_model
from comlrl_lightning.assets import story_model_path
from comlrl_lightning.assets.grammar import parses
from comlrl_lightning.tasks import length_ratio

FORMATTERS = (length_ratio.brief_formatter, length_ratio.detailed_formatter)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(story_model_path(), padding_side="left")


@pytest.fixture(scope="module")
def sampled(tokenizer: Any) -> list[tuple[str, bool]]:
    """200 pairs of a story and whether it ended by itself, over all prompts and both formatters."""
    model = AutoModelForCausalLM.from_pretrained(story_model_path())
    items = length_ratio.train_items() + length_ratio.eval_items()
    prompts = [FORMATTERS[i % 2](items[i // 2 % len(items)]) for i in range(200)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = model.generate(**inputs, max_new_tokens=128, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    new = ids[:, inputs["input_ids"].shape[1] :]
    return [(tokenizer.decode(row, skip_special_tokens=True), tokenizer.eos_token_id in row) for row in new]


def test_folder_is_small_and_listed() -> None:
    files = list(story_model_path().iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) <= 6_000_000
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["comlrl_lightning.assets.story_model"] == ["*"]


def test_special_tokens_differ_and_prompts_start_with_bos(tokenizer: Any) -> None:
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    ids = tokenizer("Tell a story.")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids


@pytest.mark.parametrize("text", ["A fox, née Ω!\n\tTwo lines.", "“日本語” 🦊", " lead and trail "])
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_weights_are_float32() -> None:
    weights = load_file(story_model_path() / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_sampled_stories_parse_and_end(sampled: list[tuple[str, bool]]) -> None:
    good = sum(parses(text) and ended for text, ended in sampled)
    assert good >= 0.9 * len(sampled)


def test_sampled_stories_leave_room_to_learn(sampled: list[tuple[str, bool]]) -> None:
    # Rows alternate between the brief and the detailed agent on the same item.
    texts = [text for text, _ in sampled]
    item = length_ratio.train_items()[0]
    rewards = length_ratio.reward_func(texts[::2], texts[1::2], batch_items=[item])
    assert 0.3 < sum(rewards) / len(rewards) < 0.55
    lengths = sorted(map(len, texts))
    assert lengths[10] < 60
    assert lengths[-10] > 180


def test_script_is_reproducible(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    num_threads = torch.get_num_threads()
    for name in ("first", "second"):
        train_story_model.main([str(tmp_path / name), "--steps", "2"])
        torch.manual_seed(5)  # the surroundings must not matter
    torch.set_rng_state(state)
    torch.set_num_threads(num_threads)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]
    other = train_story_model.make_model(1)
    assert not torch.equal(
        other.get_input_embeddings().weight, train_story_model.make_model(0).get_input_embeddings().weight
    )


def test_corpus_has_the_tasks_prompts() -> None:
    corpus = list(islice(train_story_model.documents(random.Random(0)), 6000))
    prompts = {prompt for prompt, _ in corpus}
    items = length_ratio.train_items() + length_ratio.eval_items()
    assert {formatter(item) for formatter in FORMATTERS for item in items} <= prompts
    assert any("\nThe ratio was " in prompt for prompt in prompts)
    assert all(parses(story) for _, story in corpus[:100])


def test_labels_cover_the_story_and_its_end_only() -> None:
    tokenizer = train_story_model.make_tokenizer(list(islice(train_story_model.documents(random.Random(0)), 500)))
    token_ids, labels = next(train_story_model.batches(tokenizer, random.Random(0), 4))
    for ids, row in zip(token_ids, labels, strict=True):
        story = row[row != -100].tolist()
        assert story[-1] == tokenizer.eos_token_id
        assert parses(tokenizer.decode(story[:-1]))
        prompt = ids[: (row != -100).nonzero()[0]].tolist()
        assert prompt[0] == tokenizer.bos_token_id
        assert tokenizer.decode(prompt[1:]).endswith(".")


def test_sharpening_scales_the_logits() -> None:
    model = train_story_model.make_model(0).eval()
    token_ids = torch.tensor([[1, 40, 41]])
    with torch.no_grad():
        before = model(token_ids).logits
        train_story_model.sharpen(model, 2.0)
        after = model(token_ids).logits
    torch.testing.assert_close(after, 2.0 * before)
