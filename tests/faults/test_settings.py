"""Settings that cannot work are refused, before anything is loaded where that can be seen there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from comlrl_lightning import wandb_logger
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Sampling, Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms import IAC, MADPO, MAGRPO, CooperativeModule
from comlrl_lightning.callbacks import BatchCheckpoint, EvalInterval, EvalMetrics, JSONExport, RewardCurve, SaveAgents
from comlrl_lightning.preferences.comparators import APIComparator, FixedModel
from comlrl_lightning.preferences.replay import LambdaDecay
from comlrl_lightning.rewards import WeightedRewards
from tests.algorithms.support import make_trainer, uneven_reward
from tests.faults.registry import Refused, faults
from tests.tiny_lm import tiny_llama, tiny_tokenizer

TEAM = SharedBase("story-model", num_agents=2)


def make(algorithm: type[CooperativeModule] = MAGRPO, agents: Any = TEAM, **settings: Any) -> CooperativeModule:
    """An algorithm whose models nobody loads."""
    return algorithm(agents, settings.pop("reward_func", uneven_reward), **settings)


def trained_with(**flags: Any) -> None:
    """The hook of the module in which a trainer's flags are looked at."""
    module = make()
    module.trainer = make_trainer(**flags)
    module.configure_callbacks()


def one_adapter_folder(folder: Path) -> None:
    """Adapters for two agents from a folder with those of one."""
    (folder / "agent_0").mkdir()
    make(agents=SharedBase("m", num_agents=2, adapters=str(folder)))


def built(model: Any = None, **settings: Any) -> AgentTeam:
    """Two agents on a tiny model."""
    return build_team(SharedBase(model or tiny_llama(), 2, tokenizer=tiny_tokenizer(), **settings))


def with_nan() -> Any:
    """A tiny model with one broken weight."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    return model


def adapters_of_fewer_layers(folder: Path) -> None:
    built().save(folder)
    path = folder / "agent_1" / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if ".layers.1." not in name}, path)
    built(adapters=str(folder))


def adapters_that_change_the_base(folder: Path) -> None:
    built().save(folder)
    path = folder / "agent_0" / "adapter_config.json"
    path.write_text(path.read_text().replace('"init_lora_weights": true', '"init_lora_weights": "pissa"'))
    built(adapters=str(folder))


AGENTS = (
    Refused(
        "agents",
        "no agents at all",
        "SharedBase(num_agents=0) is out of range. Use a whole number of at least 1.",
        lambda _: SharedBase("m", num_agents=0),
    ),
    Refused(
        "agents",
        "dropout in the adapters",
        "LoraSettings(dropout=0.1) would let rollouts and updates score different policies. Use 0.",
        lambda _: LoraSettings(dropout=0.1),
    ),
    Refused(
        "agents",
        "a loaded model without its tokenizer",
        "SharedBase(model=...) is a loaded model without a tokenizer. Pass tokenizer= too.",
        lambda _: SharedBase(torch.nn.Linear(1, 1), num_agents=2),
    ),
    Refused(
        "agents",
        "one loaded model for two agents with weights of their own",
        "holds the same loaded model for agent_0 and agent_1. Pass copies, or SharedBase for agents that share",
        lambda _: Separate([torch.nn.Linear(1, 1)] * 2, tokenizers=["t", "t"]),
    ),
    Refused(
        "agents",
        "the name of a model where a list of models belongs",
        "Separate(models='gpt2') is no list of models. Give a list, one model per agent.",
        lambda _: Separate("gpt2"),  # type: ignore[arg-type]
    ),
    Refused(
        "agents",
        "two adapter folders for three agents",
        "SharedBase(adapters=...) holds 2 folders for num_agents=3. Give one per agent.",
        lambda _: SharedBase("m", num_agents=3, adapters=["a", "b"]),
    ),
    Refused(
        "agents",
        "a folder of adapters that lacks the second agent's",
        "holds no folder 'agent_1'. Give the folder that save_agents wrote",
        one_adapter_folder,
    ),
    Refused(
        "agents",
        "an access token among the arguments of the model",
        "SharedBase(model_kwargs=...) holds 'token', which would end up in every checkpoint. Set the environment"
        " variable HF_TOKEN instead.",
        lambda _: SharedBase("m", num_agents=2, model_kwargs={"token": "hf_secret"}),
    ),
    Refused(
        "agents",
        "more tokens at least than at most",
        "Sampling(min_new_tokens=9) is above max_new_tokens=8. Lower it.",
        lambda _: Sampling(max_new_tokens=8, min_new_tokens=9),
    ),
    Refused(
        "agents",
        "a temperature that is not a number",
        "Sampling(temperature=nan) is out of range. Use 0 or more.",
        lambda _: Sampling(temperature=float("nan")),
    ),
)
LOADED = (
    Refused(
        "agents",
        "a misspelled layer among others",
        "target_modules=['q_proj', 'vproj'])) names 'vproj', but no layer has that name. Did you mean 'v_proj'?",
        lambda _: built(lora=LoraSettings(target_modules=["q_proj", "vproj"])),
    ),
    Refused(
        "agents",
        "a base with a NaN",
        "The logits of LlamaForCausalLM are not finite. The model itself holds NaN or infinity in model.norm.weight.",
        lambda _: built(with_nan()),
    ),
    Refused(
        "agents",
        "an adapter file with a layer missing",
        "The adapter of agent_1 in ... does not fit in whole. Weights 14 missing: ...layers.1",
        adapters_of_fewer_layers,
    ),
    Refused(
        "agents",
        "adapters whose kind changes the base that agents share",
        "The adapter of agent_0 in ... changes its base (init_lora_weights='pissa'), which it would share with others.",
        adapters_that_change_the_base,
    ),
)
ALGORITHMS = (
    Refused(
        "algorithms",
        "MAGRPO with a group of one, whose advantages are all 0",
        "MAGRPO(num_generations=1) compares a completion with itself",
        lambda _: make(num_generations=1),
    ),
    Refused(
        "algorithms",
        "a tree of more nodes than anybody waits for",
        "num_turns=9 with num_generations=4 ... nodes per task item, above max_nodes=4096. Use num_turns=6,"
        " num_generations=2, MAREINFORCE(num_generations=1), IAC or MAAC (whose nodes are"
        " num_generations * num_turns) or a larger max_nodes.",
        lambda _: make(num_turns=9, external_transition=lambda agent_completions: agent_completions),
    ),
    Refused(
        "algorithms",
        "several turns without a transition",
        "num_turns=2 needs prompts for the turns after the first. Give external_transition.",
        lambda _: make(num_turns=2),
    ),
    Refused(
        "algorithms",
        "a discount above 1",
        "discount=1.5 is out of range. Use a number from 0 to 1.",
        lambda _: make(discount=1.5),
    ),
    Refused(
        "algorithms",
        "three learning rates for two agents",
        "agent_learning_rate=[0.1, 0.2, 0.3] has 3 entries for 2 agents. Give one, or one per agent.",
        lambda _: make(agent_learning_rate=[0.1, 0.2, 0.3]),
    ),
    Refused(
        "algorithms",
        "an optimizer with a learning rate of its own",
        "optimizer sets lr=0.1. Leave the learning rate out of it and use agent_learning_rate.",
        lambda _: make(optimizer=partial(torch.optim.SGD, lr=0.1)),
    ),
    Refused(
        "algorithms",
        "a schedule that waits for a metric",
        "lr_scheduler is ReduceLROnPlateau, which waits for a metric",
        lambda _: make(lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau),
    ),
    Refused(
        "algorithms",
        "`Trainer(gradient_clip_val=1.0)`",
        "Trainer(gradient_clip_val=1.0) does not know about agents. Leave it out and use max_grad_norm",
        lambda _: trained_with(gradient_clip_val=1.0),
    ),
    Refused(
        "algorithms",
        "`Trainer(accumulate_grad_batches=2)`",
        "Trainer(accumulate_grad_batches=2) does not know of buffers. Leave it out and use rollout_buffer_size",
        lambda _: trained_with(accumulate_grad_batches=2),
    ),
    Refused(
        "algorithms",
        "something that is no critic",
        "critic='big' is no critic. Use ValueHead(), AdapterCritic() or ModelCritic(model=...).",
        lambda _: make(IAC, critic="big"),
    ),
    Refused(
        "algorithms",
        "separate models that one model is to speak for",
        "collaboration='centralized' is one model that answers for all, but agents=Separate(...) are several.",
        lambda _: make(agents=Separate(["a", "b"]), collaboration="centralized"),
    ),
)
FUNCTIONS = (
    Refused(
        "user functions",
        "the class of a reward in place of an object of it",
        "reward_func=comlrl_lightning.rewards.WeightedRewards is a class. Give an object of it, WeightedRewards(...).",
        lambda _: make(reward_func=WeightedRewards),
    ),
    Refused(
        "user functions",
        "a reward for three agents in a team of two",
        "cannot be called with 2 lists of completions, one per agent",
        lambda _: make(reward_func=lambda first, second, third: [0.0]),
    ),
    Refused(
        "user functions",
        "three formatters for two agents",
        "holds 3, which does not fit 2 agents. Give one function for all of them, or a list with one per agent.",
        lambda _: make(formatters=[str, str, str]),
    ),
    Refused(
        "user functions",
        "weights for rewards that are not there",
        "weights={'b': 1.0} does not fit rewards=['a']. Give one weight per reward.",
        lambda _: WeightedRewards({"a": uneven_reward}, {"b": 1.0}),
    ),
    Refused(
        "user functions",
        "a reward of the local scope for worker processes",
        "cannot be sent to a worker process: ... Give a function, or an object of a class, from the top level",
        lambda _: make(reward_func=lambda a, b: [0.0], reward_workers=1, reward_backend="process"),
    ),
    Refused(
        "user functions",
        "a reward for late calls without a time limit",
        "reward_timeout_value=0.0 needs reward_timeout_seconds. Give both.",
        lambda _: make(reward_timeout_value=0.0),
    ),
)
CALLBACKS = (
    Refused(
        "callbacks",
        "checkpoints every 0 batches",
        "BatchCheckpoint(every_n_batches=0) is not a whole number from 1. Use at least 1.",
        lambda _: BatchCheckpoint(0),
    ),
    Refused(
        "callbacks",
        "evaluations every half item",
        "EvalInterval(interval=0.5) is not a whole number from 0. Pass 0 for never.",
        lambda _: EvalInterval(0.5),  # type: ignore[arg-type]
    ),
    Refused(
        "callbacks",
        "one function of a pair",
        "EvalMetrics(eval_aggregator=None) has half of a pair. Pass both functions or no EvalMetrics.",
        lambda _: EvalMetrics(lambda: [], None),  # type: ignore[arg-type]
    ),
    Refused(
        "callbacks",
        "metrics into a file of another kind",
        "JSONExport(path='metrics.csv') does not name a JSON file. End it in .json.",
        lambda _: JSONExport("metrics.csv"),
    ),
    Refused(
        "callbacks",
        "a reward curve as a text",
        "RewardCurve(path='curve.txt') does not name a picture. End it in .png.",
        lambda _: RewardCurve("curve.txt"),
    ),
    Refused(
        "callbacks",
        "agents saved by neither the largest nor the smallest metric",
        "SaveAgents(mode='best') is neither 'max' nor 'min'. Use one of them.",
        lambda _: SaveAgents("eval/final_reward_mean", mode="best"),  # type: ignore[arg-type]
    ),
    Refused(
        "loggers",
        "a misspelled key",
        "wandb_config has unknown keys ['projct']. Allowed: name, run_name",
        lambda _: wandb_logger({"projct": "p"}),
    ),
    Refused(
        "loggers",
        "an API key in the configuration",
        "wandb_config has unknown keys ['api_key'].",
        lambda _: wandb_logger({"api_key": "secret"}),
    ),
    Refused(
        "loggers",
        "a section that is no dictionary",
        "wandb_config['config_sections']={'output': True} is not a dictionary of dictionaries.",
        lambda _: wandb_logger({"config_sections": {"output": True}}),
    ),
)


def api(**settings: Any) -> APIComparator:
    """A comparator that asks nobody."""
    return APIComparator(**{"provider": "openai", "model": "tiny", **settings})


PREFERENCES = (
    Refused(
        "preferences",
        "several turns",
        "MADPO(num_turns=...) has no such setting. It is one of IAC or MAAC or MAGRPO or MAREINFORCE or MARLOO or"
        " MAReMax: give it there, or leave it out.",
        lambda _: make(MADPO, num_turns=2),
        TypeError,
    ),
    Refused(
        "preferences",
        "one candidate, which nothing can be compared with",
        "num_candidates=1 is out of range. Use a whole number of at least 2.",
        lambda _: make(MADPO, num_candidates=1),
    ),
    Refused(
        "preferences",
        "pairs with a comparator that is not there",
        "pair_selection='comparator_reward' needs a comparator, and comparator=None.",
        lambda _: make(MADPO, pair_selection="comparator_reward"),
    ),
    Refused(
        "preferences",
        "a decay above 1",
        "decay=2.0 is out of range. Use a number from 0 to 1.",
        lambda _: LambdaDecay(2.0),
    ),
    Refused(
        "preferences",
        "a fixed model that is only a name",
        "FixedModel(agents='gpt2') describes no models. Use SharedBase(...) or Separate(...).",
        lambda _: FixedModel("gpt2"),  # type: ignore[arg-type]
    ),
    Refused(
        "API comparators",
        "the key in place of the name of its variable",
        "api_key_env=... is no name of an environment variable in capital letters. Put the key into a variable",
        lambda _: api(api_key_env="sk-secret"),
    ),
    Refused(
        "API comparators",
        "a variable that is not set",
        "api_key_env='NO_SUCH_KEY' is an environment variable that is not set. Set it to the key of provider='openai'",
        lambda _: api(api_key_env="NO_SUCH_KEY").begin_round(0, None),  # type: ignore[arg-type]
    ),
    Refused(
        "API comparators",
        "a password in the address",
        "base_url=... holds a user name, a password or a query, which would end up in every checkpoint.",
        lambda _: api(base_url="http://me:secret@localhost:8000/v1"),
    ),
    Refused(
        "API comparators",
        "a key among the fields of the request",
        "request_fields=... holds 'api_key', which would end up in every checkpoint.",
        lambda _: api(request_fields={"api_key": "secret"}),
    ),
    Refused(
        "API comparators",
        "a provider that nobody knows",
        "APIComparator(provider='other') is unknown. Use one of",
        lambda _: api(provider="other"),
    ),
)


@faults(*AGENTS, *LOADED, *ALGORITHMS, *FUNCTIONS, *CALLBACKS, *PREFERENCES)
def test_refused(fault: Refused, tmp_path: Path) -> None:
    fault.check(tmp_path)
