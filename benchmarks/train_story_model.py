"""Make the embedded story model: `python -m benchmarks.train_story_model OUT_DIR`.

The corpus is written by our grammar while training runs: prompts exactly as the length-ratio task makes them, each
followed by a story on their topic, of random length. Same seed and number of steps, same weights. Corpus, tokenizer and
weights are our own work, licensed under Apache-2.0.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from comlrl_lightning.assets.grammar import ANIMALS, PLACES, Topic, random_topic, story_prompt, write_story
from comlrl_lightning.tasks import length_ratio

VOCABULARY_SIZE = 768
MAX_POSITIONS = 512
SHARPNESS = 1.4
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
MODEL_CARD = """---
license: apache-2.0
library_name: transformers
---
A Llama of 0.95 million parameters that writes mini-stories. Corpus, tokenizer and weights were made by
`python -m benchmarks.train_story_model` from the package's own grammar and are licensed under Apache-2.0.
"""

# What the stories on the open prompts are about: the hero's kind or the place, in the order of the prompts.
_OPEN_SUBJECTS = (
    "in the clouds",
    "at the fair",
    "dragon",
    "robot",
    "dinosaur",
    "wizard",
    "hero",
    "on the moon",
    "in the garden",
    "on Mars",
)


def documents(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield pairs of a prompt and a story on its topic, without end.

    Args:
        rng: Where every choice comes from.
    """
    while True:
        task, topic = _task(rng)
        if rng.random() < 0.25:
            task = _with_feedback(task, rng)
        formatter = rng.choice((length_ratio.brief_formatter, length_ratio.detailed_formatter, _plain))
        yield formatter({"prompt": task}), write_story(topic, rng)


def make_tokenizer(corpus: Sequence[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 768 tokens, most words whole, that puts the start token before every text.

    Args:
        corpus: Prompts and stories to learn the merges from.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in corpus for text in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", [(BOS, BOS_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """Return an untrained Llama: 4 layers of width 128, tied embeddings.

    Args:
        seed: Seed of the initial weights.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.06,  # the usual 0.02 suits wider models; this learns about twice as fast
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=0, pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID
    )
    return model


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield `[R, L]` token ids and labels, rows of like length together; labels are -100 on prompts and padding.

    Args:
        tokenizer: Tokenizer of prompts and stories.
        rng: Source of the documents and of the order of batches.
        batch_size: Rows per batch.
    """
    stream = documents(rng)
    while True:
        pool = [
            (tokenizer(prompt)["input_ids"], [*tokenizer(story, add_special_tokens=False)["input_ids"], EOS_ID])
            for prompt, story in islice(stream, 16 * batch_size)
        ]
        pool.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        for start in rng.sample(range(0, len(pool), batch_size), 16):
            rows = pool[start : start + batch_size]
            yield (
                _pad([prompt + story for prompt, story in rows], PAD_ID),
                _pad([[-100] * len(prompt) + story for prompt, story in rows], -100),
            )


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, num_steps: int, batch_size: int, seed: int
) -> None:
    """Train a model on the grammar's documents, in place, under a one-cycle learning rate.

    Args:
        model: Model to train.
        tokenizer: Its tokenizer.
        num_steps: Optimizer steps.
        batch_size: Documents per step.
        seed: Seed of the documents.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=num_steps, pct_start=0.1)
    stream = batches(tokenizer, random.Random(seed), batch_size)
    model.train()
    for step, (token_ids, labels) in enumerate(islice(stream, num_steps), start=1):
        loss = model(input_ids=token_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps:
            print(f"step {step}/{num_steps}, loss {loss.item():.3f}", flush=True)
    model.eval()


def sharpen(model: LlamaForCausalLM, factor: float) -> None:
    """Multiply a model's logits by a factor, in place, through the scale of its last norm.

    Sampled at temperature 1, so small a model slips off the grammar once in a few hundred tokens, sharpened more
    rarely.

    Args:
        model: Model to change.
        factor: Factor of the logits.
    """
    with torch.no_grad():
        model.model.norm.weight.mul_(factor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make tokenizer and model and write them to a folder.

    Args:
        arguments: Command-line arguments, those of the process if None.
    """
    parser = argparse.ArgumentParser(description="Train the embedded story model.")
    parser.add_argument("out_dir", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=2200, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=16, help="documents per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of corpus and weights")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # sums over threads would depend on their number
    tokenizer = make_tokenizer(list(islice(documents(random.Random(options.seed)), 4000)))
    model = make_model(options.seed)
    train(model, tokenizer, num_steps=options.steps, batch_size=options.batch_size, seed=options.seed + 1)
    sharpen(model, SHARPNESS)
    model.save_pretrained(options.out_dir)
    tokenizer.save_pretrained(options.out_dir)
    (options.out_dir / "README.md").write_text(MODEL_CARD)


def _task(rng: random.Random) -> tuple[str, Topic]:
    topic = random_topic(rng)
    if rng.random() < 0.75:
        topic = Topic(rng.choice(ANIMALS), rng.choice(PLACES))
        return story_prompt(topic.kind, topic.place), topic
    index = rng.randrange(len(_OPEN_SUBJECTS))
    subject = _OPEN_SUBJECTS[index]
    is_place = " " in subject
    return length_ratio.OPEN_PROMPTS[index], Topic(
        topic.kind if is_place else subject, subject if is_place else topic.place
    )


def _with_feedback(task: str, rng: random.Random) -> str:
    texts = ["x" * rng.randint(1, 200) for _ in range(2)]
    if rng.random() < 0.05:
        texts[0] = ""
    item = {"target_min": 2.0, "target_max": 3.0}
    return rng.choice(length_ratio.external_transition(prompt=task, agent_completions=texts, item=item))


def _plain(item: dict[str, str]) -> str:
    return item["prompt"]


def _pad(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


if __name__ == "__main__":
    main()
