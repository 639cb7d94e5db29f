"""Processors, weighted sums and reward models."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from comlrl_lightning.environment.prompts import RewardFunction
from comlrl_lightning.reward_model import RewardModel
from comlrl_lightning.rewards import (
    Chain,
    Clip,
    RewardProcessor,
    RewardProcessors,
    Scale,
    Shift,
    WeightedRewards,
    part_means,
)
from tests.tiny_lm import tiny_tokenizer

ITEM = {"prompt": "p", "topic": "t"}


class TestProcessors:
    def test_values(self) -> None:
        # 0.5 * 10 = 5; 5 - 3 = 2; clipped to at most 1
        assert RewardProcessors.scale(factor=10.0)(0.5) == 5.0
        assert RewardProcessors.shift(-3.0)(5.0) == 2.0
        assert RewardProcessors.clip(-1.0, 1.0)(2.0) == 1.0
        assert RewardProcessors.clip(low=-1.0, high=1.0)(-2.0) == -1.0
        assert RewardProcessors.clip(-1.0, 1.0)(0.25) == 0.25

    def test_a_chain_goes_from_left_to_right(self) -> None:
        # (1 + 1) * 3 = 6, but 1 * 3 + 1 = 4
        shift, scale = RewardProcessors.shift(1.0), RewardProcessors.scale(3.0)
        assert RewardProcessors.chain(shift, scale)(1.0) == 6.0
        assert RewardProcessors.chain(scale, shift)(1.0) == 4.0
        assert RewardProcessors.chain()(1.0) == 1.0

    def test_they_are_plain_values(self) -> None:
        chain = RewardProcessors.chain(RewardProcessors.scale(2.0), RewardProcessors.clip(0.0, 1.0))
        assert pickle.loads(pickle.dumps(chain)) == chain
        assert chain == Chain([Scale(2.0), Clip(0.0, 1.0)])
        assert chain != Chain([Scale(2.5), Clip(0.0, 1.0)])
        assert repr(chain) == "Chain(processors=(Scale(factor=2.0), Clip(low=0.0, high=1.0)))"
        assert hash(Shift(1.0)) == hash(Shift(1.0))

    def test_numbers_must_make_sense(self) -> None:
        with pytest.raises(ValueError, match=r"factor=nan is not a finite number. Give one"):
            RewardProcessors.scale(float("nan"))
        with pytest.raises(ValueError, match="value=inf is not a finite number"):
            RewardProcessors.shift(float("inf"))
        with pytest.raises(ValueError, match=r"low=1.0 is not below high=1.0. Give two bounds in order"):
            RewardProcessors.clip(1.0, 1.0)

    def test_a_chain_of_a_maker_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"processors\[1\]=.*Scale is a class. Give an object of it, Scale\(...\)"):
            RewardProcessors.chain(Scale(1.0), RewardProcessors.scale)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "name", ["comlrl_lightning.rewards.RewardProcessors.scale", "comlrl_lightning.rewards.Scale"]
    )
    def test_yaml_names_them(self, name: str) -> None:
        parser = ArgumentParser()
        parser.add_argument("--reward_processor", type=RewardProcessor | None)
        config = parser.parse_object({"reward_processor": {"class_path": name, "init_args": {"factor": 10.0}}})
        assert parser.instantiate(config).reward_processor == Scale(10.0)

    def test_yaml_names_a_chain(self) -> None:
        parser = ArgumentParser()
        parser.add_argument("--reward_processor", type=RewardProcessor | None)
        parts = [
            {"class_path": "comlrl_lightning.rewards.Scale", "init_args": {"factor": 10.0}},
            {"class_path": "comlrl_lightning.rewards.Clip", "init_args": {"low": 0.0, "high": 1.0}},
        ]
        chain = {"class_path": "comlrl_lightning.rewards.Chain", "init_args": {"processors": parts}}
        config = parser.parse_object({"reward_processor": chain})
        assert parser.instantiate(config).reward_processor == Chain([Scale(10.0), Clip(0.0, 1.0)])


def short(first: Sequence[str], second: Sequence[str]) -> list[float]:
    """Minus the characters of both texts."""
    return [-float(len(a) + len(b)) for a, b in zip(first, second, strict=True)]


def on_topic(*completions: Sequence[str], batch_items: Sequence[Mapping[str, Any]], turn: int) -> torch.Tensor:
    """The turn where all texts hold the topic, else 0."""
    topic = batch_items[0]["topic"]
    return torch.tensor([turn * all(topic in text for text in texts) for texts in zip(*completions, strict=True)])


PAIR = [["t", "tt"], ["tt", "no"]]
"""`[N=2][J=2]` texts: characters 3 and 4, both on topic only in the first pair."""


class TestWeightedRewards:
    def test_the_sum_by_hand(self) -> None:
        # turn 2: short (-3, -4), on_topic (2, 0); 0.5 * -3 + 10 * 2 = 18.5 and 0.5 * -4 + 10 * 0 = -2
        weighted = WeightedRewards({"short": short, "topic": on_topic}, {"topic": 10.0, "short": 0.5})
        reward = RewardFunction(weighted, 2)
        assert reward(PAIR, item=ITEM, prompts=("a", "b"), turn=2) == [18.5, -2.0]

    def test_parts_are_means_over_all_joint_completions(self) -> None:
        weighted = WeightedRewards({"short": short, "topic": on_topic}, [0.5, 10.0])
        with weighted.collected() as parts:
            weighted(*PAIR, batch_items=[ITEM], turn=2)
            weighted(["t"], ["t"], batch_items=[ITEM], turn=1)
        # short (-3 - 4 - 2) / 3, topic (2 + 0 + 1) / 3: not weighted
        assert part_means(parts) == {"short": -3.0, "topic": 1.0}
        assert part_means([]) == {}

    def test_parts_get_the_keywords_of_the_call(self) -> None:
        calls: list[dict[str, Any]] = []

        def part(*completions: Sequence[str], **keywords: Any) -> list[float]:
            calls.append(keywords)
            return [0.0] * len(completions[0])

        inner = WeightedRewards({"part": part})
        reward = RewardFunction(WeightedRewards({"part": part, "inner": inner}), 2)
        reward(PAIR, item=ITEM, prompts=("a", "b"), turn=1)
        reward(PAIR, item=ITEM, prompts=None, turn=2)  # as in trajectories, which share no prompts then
        inner(*PAIR)
        first = {"batch_items": [ITEM], "prompts": ["a", "b"], "turn": 1}
        assert calls == [first] * 2 + [{"batch_items": [ITEM], "turn": 2}] * 2 + [{}]

    def test_all_weigh_one_by_default(self) -> None:
        assert WeightedRewards({"a": short, "b": short})(["x"], ["y"]) == [-4.0]

    @pytest.mark.parametrize(
        "weights", [[1.0], [1.0, 2.0, 3.0], {"short": 1.0}, {"short": 1.0, "topic": 1.0, "x": 1.0}]
    )
    def test_weights_must_fit(self, weights: Any) -> None:
        with pytest.raises(ValueError, match=r"weights=.* does not fit rewards=\['short', 'topic'\]. Give one weight"):
            WeightedRewards({"short": short, "topic": on_topic}, weights)

    def test_weights_must_be_finite(self) -> None:
        with pytest.raises(ValueError, match="weights=nan is not a finite number"):
            WeightedRewards({"short": short}, [float("nan")])

    def test_no_part(self) -> None:
        with pytest.raises(ValueError, match=r"rewards=\{\} names no reward. Give at least one, by name"):
            WeightedRewards({})

    def test_signatures_of_parts_are_read_at_construction(self) -> None:
        with pytest.raises(
            ValueError, match=r"rewards\['short'\]=tests.test_rewards.short cannot be called with 3 lists"
        ):
            RewardFunction(WeightedRewards({"topic": on_topic, "short": short}), 3)

    def test_values_of_parts_are_checked(self) -> None:
        weighted = WeightedRewards({"short": short, "bad": lambda a, b: [None, 1.0]})
        with pytest.raises(
            ValueError, match=r"rewards\['bad'\]=.* gave None for task item \{.*'topic': 't'\} at turn 2"
        ):
            RewardFunction(weighted, 2)(PAIR, item=ITEM, prompts=("a", "b"), turn=2, item_index=4)

    def test_exceptions_of_parts_name_part_and_item(self) -> None:
        weighted = WeightedRewards({"short": short, "bad": lambda a, b: 1 / 0})
        with pytest.raises(ZeroDivisionError) as error:
            RewardFunction(weighted, 2)(PAIR, item=ITEM, prompts=("a", "b"), turn=2, item_index=4)
        part, whole = error.value.__notes__
        assert "rewards['bad']=" in part
        assert "reward_func=comlrl_lightning.rewards.WeightedRewards for task item 4" in whole


def test_yaml_names_weighted_rewards() -> None:
    parser = ArgumentParser()
    parser.add_argument("--reward_func", type=Callable[..., Any])
    parts = {"rewards": {"short": "tests.test_rewards.short"}, "weights": {"short": 2.0}}
    config = parser.parse_object(
        {"reward_func": {"class_path": "comlrl_lightning.WeightedRewards", "init_args": parts}}
    )
    assert RewardFunction(parser.instantiate(config).reward_func, 2)(PAIR, item=ITEM, prompts=(), turn=1) == [
        -6.0,
        -8.0,
    ]


def reward_model(**overrides: Any) -> LlamaForSequenceClassification:
    """A tiny random reward model in training mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    settings = {**sizes, "num_attention_heads": 2, "num_labels": 1, "pad_token_id": 258, "initializer_range": 0.5}
    return LlamaForSequenceClassification(LlamaConfig(**{**settings, **overrides}))


TEXTS = [["a", "longer", "b c d"], ["xyz", "x", "yy"]]
"""`[N=2][J=3]` texts of three different lengths once joined."""


def by_hand(model: Any, tokenizer: Any, texts: Sequence[str]) -> list[float]:
    """Each text alone, without padding."""
    with torch.no_grad():
        model.eval()
        return [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]


class TestRewardModel:
    def test_it_scores_the_filled_template(self) -> None:
        model, tokenizer = reward_model().eval(), tiny_tokenizer()
        reward = RewardModel(model, "{prompt} {topic}: {completion_1} / {completion_2}", tokenizer, batch_size=2)
        expected = by_hand(model, tokenizer, ["p t: a / xyz", "p t: longer / x", "p t: b c d / yy"])
        assert len(set(expected)) == 3
        scores = RewardFunction(reward, 2)(TEXTS, item=ITEM, prompts=("a", "b"), turn=1)
        assert scores == pytest.approx(expected, abs=1e-5)

    def test_an_encoder_does_not_look_at_padding(self) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        config = BertConfig(**sizes, num_attention_heads=2, num_labels=1, pad_token_id=258, initializer_range=0.5)
        model, tokenizer = BertForSequenceClassification(config).eval(), tiny_tokenizer()
        reward = RewardModel(model, "{completion_1} {completion_2}", tokenizer)
        expected = by_hand(model, tokenizer, ["a xyz", "longer x", "b c d yy"])
        assert reward(*TEXTS, batch_items=[ITEM]) == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize("pad_token_id", [None, 257])
    def test_without_a_padding_token_and_with_a_shared_one(self, pad_token_id: int | None) -> None:
        model, tokenizer = reward_model(pad_token_id=pad_token_id).eval(), tiny_tokenizer(pad=None)
        reward = RewardModel(model, "{completion_1} {completion_2}", tokenizer)
        expected = by_hand(model, tokenizer, ["a xyz", "longer x", "b c d yy"])
        assert reward(*TEXTS, batch_items=[ITEM]) == pytest.approx(expected, abs=1e-5)
        assert model.config.pad_token_id == pad_token_id

    def test_a_function_as_template(self) -> None:
        model, tokenizer = reward_model().eval(), tiny_tokenizer()
        reward = RewardModel(model, lambda item, completions: item["topic"] + "+".join(completions), tokenizer)
        expected = by_hand(model, tokenizer, ["ta+xyz", "tlonger+x", "tb c d+yy"])
        assert reward(*TEXTS, batch_items=[ITEM]) == pytest.approx(expected, abs=1e-5)

    def test_chat_messages_get_the_template_once(self) -> None:
        # the chat template writes the beginning-of-sequence token itself: 256 once, then "[user]a\n" byte by byte
        model, tokenizer = reward_model().eval(), tiny_tokenizer(chat=True)
        reward = RewardModel(model, lambda item, texts: [{"role": "user", "content": texts[0]}], tokenizer)
        ids = [256, *tokenizer("[user]a\n", add_special_tokens=False)["input_ids"]]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits.item()
        assert reward(["a"], batch_items=[ITEM]) == pytest.approx([expected], abs=1e-5)

    def test_a_function_may_use_the_template_itself(self) -> None:
        model, tokenizer = reward_model().eval(), tiny_tokenizer(chat=True)
        messages = [{"role": "user", "content": "a"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        given: list[Any] = [text, messages]
        first, second = (RewardModel(model, lambda item, texts, one=one: one, tokenizer) for one in given)
        assert first(["a"], batch_items=[ITEM]) == second(["a"], batch_items=[ITEM])

    def test_long_texts_are_cut_as_the_tokenizer_cuts(self) -> None:
        model, tokenizer = reward_model().eval(), tiny_tokenizer()
        reward = RewardModel(model, "{completion_1}", tokenizer, max_length=4)
        # four tokens: beginning of sequence and three bytes
        assert reward(["abcdef"], batch_items=[ITEM]) == pytest.approx(by_hand(model, tokenizer, ["abc"]), abs=1e-5)

    def test_the_model_is_left_as_it_is(self) -> None:
        model = reward_model(attention_dropout=0.9).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        reward = RewardModel(model, "{completion_1} {completion_2}", tiny_tokenizer())
        assert reward(*TEXTS, batch_items=[ITEM]) == reward(*TEXTS, batch_items=[ITEM])
        assert model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_from_a_folder_without_a_padding_token(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2, n_positions=64, num_labels=1)
        model, tokenizer = GPT2ForSequenceClassification(config).eval(), tiny_tokenizer(pad=None)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        reward = RewardModel(model_name=str(tmp_path), template="{completion_1} {completion_2}")
        expected = by_hand(model, tokenizer, ["a xyz", "longer x", "b c d yy"])
        model_class, calls = GPT2ForSequenceClassification, []
        forward = model_class.forward

        def counted(*args: Any, **keywords: Any) -> Any:
            calls.append(args)
            return forward(*args, **keywords)

        monkeypatch.setattr(model_class, "forward", counted)
        assert reward(*TEXTS, batch_items=[ITEM]) == pytest.approx(expected, abs=1e-5)
        assert len(calls) == 1

    def test_a_model_without_a_trained_head_is_an_error(self, tmp_path: Path) -> None:
        reward_model().model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        with pytest.raises(
            ValueError,
            match=r"model_name=.* lacks the weights \['score.weight'\], which would be random. Give",
        ):
            RewardModel(str(tmp_path), "{completion_1}")

    def test_a_model_with_weights_left_over_is_an_error(self, tmp_path: Path) -> None:
        reward_model().save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        bias = "model.layers.0.self_attn.q_proj.bias"
        path = tmp_path / "model.safetensors"
        save_file({**load_file(path), bias: torch.zeros(16)}, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"model_name=.* does not fit in whole. Weights 1 without a place: {bias}"):
            RewardModel(str(tmp_path), "{completion_1}")

    def test_a_head_with_several_scores_is_an_error(self) -> None:
        with pytest.raises(
            ValueError, match=r"model_name=LlamaForSequenceClassification gives 3 scores. Give a reward model"
        ):
            RewardModel(reward_model(num_labels=3), "{completion_1}", tiny_tokenizer())

    @pytest.mark.parametrize("template", ["{prompt}", "", "{} {completion_1}", "{completion_0}"])
    def test_a_template_must_name_a_completion(self, template: str) -> None:
        with pytest.raises(ValueError, match=r"template=.* must name its fields, with \{completion_1\}"):
            RewardModel(reward_model(), template, tiny_tokenizer())

    def test_a_field_that_is_not_there_names_the_item(self) -> None:
        reward = RewardModel(reward_model(), "{question} {completion_1}", tiny_tokenizer())
        with pytest.raises(
            ValueError, match=r"template needs \['question'\], .* only \['completion_1', 'prompt', 'topic'\]"
        ):
            RewardFunction(reward, 1)([["a"]], item=ITEM, prompts=("f",), turn=1)

    def test_a_loaded_model_needs_its_tokenizer(self) -> None:
        with pytest.raises(
            ValueError, match=r"tokenizer=None, but model_name=Llama.* is a loaded model. Give its tokenizer"
        ):
            RewardModel(reward_model(), "{completion_1}")

    def test_a_loaded_model_stays_where_it_is(self) -> None:
        with pytest.raises(ValueError, match="device and model_kwargs are for a model given by name"):
            RewardModel(reward_model(), "{completion_1}", tiny_tokenizer(), device="cpu")

    @pytest.mark.parametrize("settings", [{"batch_size": 0}, {"max_length": -1}])
    def test_sizes_are_positive(self, settings: dict[str, int]) -> None:
        with pytest.raises(ValueError, match=r"(batch_size=0|max_length=-1) is not positive. Give 1 or more"):
            RewardModel(reward_model(), "{completion_1}", tiny_tokenizer(), **settings)  # type: ignore[arg-type]


def test_wrong_kinds_are_named() -> None:
    with pytest.raises(ValueError, match="factor='x' is not a finite number"):
        RewardProcessors.scale("x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="low='a' is not a number"):
        RewardProcessors.clip("a", "b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a dict name -> function"):
        WeightedRewards([len], [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"part named 'a\.b'. Use a text without dots"):
        WeightedRewards({"a.b": len})
