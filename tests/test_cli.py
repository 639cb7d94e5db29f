"""The command line, in process, on a tiny model."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import Trainer
from safetensors.torch import load_file, save_file

from comlrl_lightning import MAGRPO, TaskDataModule
from comlrl_lightning.cli import cause_of, main
from tests.tiny_lm import save_tiny, tiny_llama, tiny_tokenizer

TASK = "comlrl_lightning.tasks.length_ratio"


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["comlrl-lightning"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), tiny_llama(), tiny_tokenizer())


@pytest.fixture
def config(tmp_path: Path, model: str) -> str:
    """A configuration of eight items, two agents, a buffer of three nodes, evaluations every four items."""
    settings: dict[str, Any] = {
        "trainer": {
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "callbacks": [
                {"class_path": "EvalInterval", "init_args": {"interval": 4}},
                {"class_path": "JSONExport", "init_args": {"path": str(tmp_path / "metrics.json")}},
                {
                    "class_path": "BatchCheckpoint",
                    "init_args": {"every_n_batches": 1, "keep": None, "dirpath": str(tmp_path / "saved")},
                },
                {"class_path": "SaveAgents", "init_args": {"folder": str(tmp_path / "agents")}},
            ],
        },
        "model": {
            "class_path": "MAGRPO",
            "init_args": {
                "agents": {"class_path": "SharedBase", "init_args": {"model": model, "num_agents": 2}},
                "formatters": [f"{TASK}.brief_formatter", f"{TASK}.detailed_formatter"],
                "reward_func": f"{TASK}.reward_func",
                "num_generations": 2,
                "sampling": {"max_new_tokens": 6},
                "rollout_buffer_size": 3,
                "lr_scheduler": {"class_path": "LinearLR", "init_args": {"total_iters": 4}},
            },
        },
        "data": {
            "train_dataset": f"{TASK}.open_train_items",
            "eval_dataset": f"{TASK}.open_eval_items",
            "shuffle": True,
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def error_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What stands on the screen when the command line refuses its arguments."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == 2
    return capsys.readouterr().err


def help_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """A help text, its line breaks and indentation removed."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_fit_does_what_the_file_says(config: str, tmp_path: Path) -> None:
    main(["fit", "--config", config])
    # Evaluations before items 0 and 4, each of four items scored K=2 joint completions.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["env_step"] for line in lines] == [0, 8]
    assert (tmp_path / "agents" / "agent_1" / "adapter_config.json").exists()


def test_functions_of_the_working_folder_have_import_paths(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text("def one(*completions):\n    return [1.0] * len(completions[0])\n")
    monkeypatch.chdir(tmp_path)
    # As for a console script, which knows nothing of the folder that it is called from.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    main(["fit", "--config", config, "--model.reward_func", "own_rewards.one"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/final_reward_mean"] for line in lines] == [1.0, 1.0]


def test_what_a_strategy_refuses_is_told(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "{class_path: comlrl_lightning.AgentParallel, init_args: {agent_devices: [cpu, nowhere]}}"
    message = error_of(capsys, "fit", "--config", config, "--trainer.strategy", strategy)
    assert message.splitlines()[-1].startswith("error: AgentParallel(agent_devices='nowhere')")


def test_flags_win_over_the_file(config: str, tmp_path: Path) -> None:
    main(["fit", "--config", config, "--model.num_generations", "3", "--trainer.limit_train_batches", "5"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["env_step"] for line in lines] == [0, 12]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.rglob("adapter_model.safetensors"))
    return {f"{file.parent.name} {name}": value for file in files for name, value in load_file(file).items()}


def test_resume_equals_the_unbroken_run(config: str, tmp_path: Path) -> None:
    main(["fit", "--config", config])
    whole = weights(tmp_path / "agents")
    # After five batches two nodes are left in the buffer of three.
    main(["fit", "--config", config, "--ckpt_path", str(tmp_path / "saved" / "batch-000005.ckpt")])
    torch.testing.assert_close(weights(tmp_path / "agents"), whole, rtol=0, atol=0)


def test_resume_takes_the_flags_and_refuses_another_run(config: str, tmp_path: Path) -> None:
    main(["fit", "--config", config, "--trainer.limit_train_batches", "2"])
    checkpoint = str(tmp_path / "saved" / "batch-000002.ckpt")
    resume = ["fit", "--config", config, "--ckpt_path", checkpoint]
    main([*resume, "--model.logging_steps", "4", "--trainer.max_epochs", "1"])
    with pytest.raises(ValueError, match=r"num_generations=3 differs from the checkpoint's num_generations=2"):
        main([*resume, "--model.num_generations", "3"])


def test_a_script_loads_what_the_command_line_saved(config: str, tmp_path: Path) -> None:
    main(["fit", "--config", config])
    module = MAGRPO.load_from_checkpoint(tmp_path / "saved" / "batch-000008.ckpt")
    saved = weights(tmp_path / "agents")
    trained = [value for agent in range(2) for value in module.team.agent_parameters(agent).values()]
    # The folders and the module list the adapters' factors in the same order.
    assert sorted(float(value.detach().sum()) for value in trained) == pytest.approx(
        sorted(float(value.sum()) for value in saved.values())
    )
    with pytest.raises(ValueError, match=r"lr_scheduler was <.* object> .* Pass lr_scheduler="):
        Trainer(max_epochs=1, logger=False, accelerator="cpu").fit(module, TaskDataModule([{"prompt": "p"}]))


@pytest.mark.parametrize("name", ["Adagrad", "SGD"])
def test_another_optimizer_brings_its_own_defaults(config: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.optim.Optimizer] = []
    configure = MAGRPO.configure_optimizers

    def remembered(module: MAGRPO) -> Any:
        result = configure(module)
        seen.append(result["optimizer"])  # type: ignore[index, call-overload, arg-type]
        return result

    monkeypatch.setattr(MAGRPO, "configure_optimizers", remembered)
    main(["fit", "--config", config, "--model.optimizer", name])
    assert type(seen[0]).__name__ == name
    assert [group["initial_lr"] for group in seen[0].param_groups] == [1e-4, 1e-4]
    assert seen[0].defaults["weight_decay"] == 0


def test_a_learning_rate_in_the_optimizer_is_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", "--config", config, "--model.optimizer", "SGD", "--model.optimizer.lr", "0.5"]
    assert "use agent_learning_rate" in error_of(capsys, *arguments)


@pytest.mark.slow
def test_help_answers_in_ten_seconds() -> None:
    # Processor time, so that a busy machine does not fail it.
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-m", "comlrl_lightning", "--help"], check=True, capture_output=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10


@pytest.mark.filterwarnings("ignore:.* of another run")
def test_saved_configuration_runs_again(config: str, tmp_path: Path) -> None:
    main(["fit", "--config", config, "--trainer.limit_train_batches", "1"])
    first = weights(tmp_path / "agents")
    main(["fit", "--config", str(tmp_path / "lightning_logs" / "version_0" / "run-config.yaml")])
    assert (tmp_path / "lightning_logs" / "version_1" / "run-config.yaml").is_file()
    torch.testing.assert_close(weights(tmp_path / "agents"), first, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The agents are untrained")
def test_validate_and_test_measure_the_same(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for subcommand in ("validate", "test"):
        main([subcommand, "--config", config])
        lines = capsys.readouterr().out.splitlines()
        tables.append([line for line in lines if "eval/final_reward_mean" in line])
    assert tables[0] == tables[1]
    assert len(tables[0]) == 1


@pytest.mark.filterwarnings("ignore:The agents are untrained")
def test_predict_writes_joint_completions(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--config", config, "--output", str(tmp_path / "out" / "joint.jsonl")])
    assert f"2 items written to {tmp_path / 'out' / 'joint.jsonl'}\n" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "out" / "joint.jsonl").read_text().splitlines()]
    assert [(record["index"], record["turn"]) for record in records] == [(0, 1), (1, 1)]
    assert records[0]["prompts"][1] == "Write a detailed response to this task:\nInvent a new type of fruit."
    assert len(records[0]["completions"]) == 2
    assert 0 <= records[0]["reward"] <= 1


def test_untrained_agents_are_told_from_trained_ones(config: str, tmp_path: Path) -> None:
    main(["fit", "--config", config, "--trainer.limit_train_batches", "1"])
    with pytest.warns(UserWarning, match="The agents are untrained: their adapters are fresh"):
        main(["validate", "--config", config])
    for trained in (
        ["--model.agents.adapters", str(tmp_path / "agents")],
        ["--ckpt_path", str(tmp_path / "saved" / "batch-000001.ckpt")],
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            main(["validate", "--config", config, *trained])
        assert not [warning for warning in caught if "untrained" in str(warning.message)]


@pytest.mark.filterwarnings("ignore:A prompt of agent_0 .* cut from the left", "ignore:.* of another run")
def test_a_centralized_team_goes_on_from_what_it_saved(config: str, tmp_path: Path) -> None:
    team = ["--model.collaboration", "centralized", "--trainer.limit_train_batches", "1"]
    main(["fit", "--config", config, *team])
    assert not (tmp_path / "agents" / "agent_1").exists()
    file = tmp_path / "agents" / "agent_0" / "adapter_model.safetensors"
    trained = {name: torch.full_like(weight, 0.25) for name, weight in load_file(file).items()}
    save_file(trained, file)
    # Without a learning rate the second run saves what it has loaded.
    again = ["--model.agents.adapters", str(tmp_path / "agents"), "--model.agent_learning_rate", "0.0"]
    main(["fit", "--config", config, *team, *again])
    assert all(torch.equal(weight, trained[name]) for name, weight in load_file(file).items())


def test_screen_has_no_hints_of_other_products(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # where seed_everything of another test left it
    run = subprocess.run(
        [sys.executable, "-m", "comlrl_lightning", "fit", "--config", config, "--trainer.limit_train_batches=1"],
        check=True,
        capture_output=True,
        text=True,
    )
    noise = ("litlogger", "litmodels", "LeafSpec", "No seed found", "Loading weights", "logging interval")
    assert [text for text in noise if text in run.stdout + run.stderr] == []
    assert "Seed set to 0" in run.stderr


def test_help_of_an_algorithm_says_what_its_settings_mean(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "fit", "--model.help", "MARLOO")
    assert "Multi-Agent RLOO" in text
    assert "K, completions per agent and node, on each rank. (type: int, default: 4)" in text
    assert "Most tokens per completion, the end-of-sequence token included." in text


def test_help_of_callbacks_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Task items between two evaluations" in help_of(capsys, "fit", "--trainer.callbacks.help", "EvalInterval")
    text = help_of(capsys, "predict", "--help")
    assert "--output OUTPUT JSON lines of the joint completions." in text
    assert "--data.eval_num_samples" in text


def test_printed_configuration_names_functions_by_import_path(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", config, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    assert printed["formatters"] == [f"{TASK}.brief_formatter", f"{TASK}.detailed_formatter"]
    assert printed["reward_func"] == f"{TASK}.reward_func"


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("model.reward_func", f"{TASK}.rewrd", f"model.reward_func: module '{TASK}' has no attribute 'rewrd' and so"),
        ("model.reward_func", "nosuch.reward", "model.reward_func: No module named 'nosuch' and so the import path"),
        ("data.train_dataset", "nosuch.items", "train_dataset='nosuch.items' is not the import path of a function"),
        ("model.num_generation", "3", "model: num_generation is not a setting. Did you mean num_generations?"),
        ("data.batchsize", "3", "data: batchsize is not a setting. Did you mean batch_size?"),
        ("trainer.maxepochs", "3", "trainer: maxepochs is not a setting. Did you mean max_epochs?"),
        ("modle", "MAGRPO", "modle is not a setting. Did you mean model?"),
        ("unheard", "3", "unheard is not a setting. Leave it out."),
        ("model", "MAGRP", "model: MAGRP is neither a known name nor an import path. Did you mean MAGRPO?"),
        ("model.agents.num_agents", "two", "model.agents.num_agents: the value is not of type int. Correct it."),
        ("model.agents.num_agent", "3", "model.agents: num_agent is not a setting. Did you mean num_agents?"),
        ("trainer.gradient_clip_val", "1", "Leave it out and use max_grad_norm, which clips each agent by itself."),
        ("trainer.accumulate_grad_batches", "2", "use rollout_buffer_size and train_batch_size"),
        ("model.num_generations", "1", r"MAGRPO(num_generations=1) compares a completion with itself"),
    ],
)
def test_mistakes_end_with_their_cause(
    config: str, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    error = error_of(capsys, "fit", "--config", config, f"--{flag}", value)
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error


def test_so_do_those_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.yaml").write_text("data: {train_dataset: some.items, batchsize: 3}")
    error = error_of(capsys, "fit", "--config", str(tmp_path / "wrong.yaml"))
    assert error.splitlines()[-1] == "data: batchsize is not a setting. Did you mean batch_size?"


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        # Agents of their own train all weights; the shared base's adapters were no setting of the file.
        (
            "quickstart",
            ["agents", "Separate", "agents.models", "[story-model, story-model]"],
            {"agents": {"models": ["story-model"] * 2, "lora": None, "tokenizers": None}},
        ),
        # Its advantages are normalized per group, or as the algorithm wants.
        (
            "marlhf_maac_rounds",
            ["policy", "CriticFree"],
            {"policy": {"algorithm": "MAGRPO", "joint_mode": "aligned", "advantage_normalization": None}},
        ),
        ("maac_length_ratio", ["critic", "ModelCritic", "critic.model", "story-model"], {"critic": {"lora": None}}),
        # What was written stays, where the other class has it, too.
        ("madpo_rounds", ["replay", "AllHistory"], {"replay": {"sample_size": None, "weigh_by_size": False}}),
        ("written", ["agents", "Separate", "agents.models", "[story-model]"], {"agents": {"dtype": "float32"}}),
        ("written", ["critic", "AdapterCritic"], {"critic": {"max_tokens": 7}}),
    ],
)
def test_a_changed_class_has_its_own_defaults(
    name: str, flags: list[str], expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parent.parent / "configs" / f"{name}.yaml"
    if name == "written":
        path = tmp_path / "written.yaml"
        path.write_text(
            "model: {class_path: IAC, init_args: {agents: {class_path: SharedBase, init_args: {model: story-model,"
            " num_agents: 1, dtype: float32}}, critic: {class_path: ModelCritic, init_args: {model: story-model,"
            " max_tokens: 7}}}}"
        )
    given = [f"--model.{flag}" if place % 2 == 0 else flag for place, flag in enumerate(flags)]
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(path), *given, "--print_config"])
    assert ended.value.code == 0
    settings = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    for setting, values in expected.items():
        found = settings[setting]["init_args"]
        assert {key: found[key] for key in values} == values


def test_missing_settings_are_named_last_and_nothing_is_dumped(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "fit", "--model", "MAGRPO")
    assert error.splitlines()[-1] == ("model: agents must be given. Add --model.agents, or a file with --config FILE.")
    assert "Namespace(" not in error


def test_setting_of_another_class_is_none_here(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "MAREINFORCE", "--model.agents", "SharedBase", "--model.joint_mod", "cross"]
    assert "joint_mod is not a setting. Did you mean joint_mode?" in error_of(capsys, "fit", *arguments)


def test_value_of_none_of_several_types() -> None:
    message = """Parser key "agents":
      - Problem with given class_path 'comlrl_lightning.SharedBase':
          Parser key "adapters":
            Does not validate against any of the Union subtypes
            Subtypes: [list[str], <class 'str'>, <class 'NoneType'>]
      - Problem with given class_path 'comlrl_lightning.Separate':
          Option 'adapters' is not accepted"""
    assert cause_of(message) == "agents.adapters: the value is not of type list[str] or str or None. Correct it."
    assert cause_of(message.replace("Does not validate", "Is wrong")) == ""


def test_messages_without_a_known_cause_stay_as_they_are() -> None:
    assert cause_of("Something else happened") == ""
    assert cause_of('Parser key "model": something else') == ""


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        (
            "marlhf_length_ratio",
            ["policy", "ActorCritic", "policy.algorithm", "IAC", "policy.critic", "ValueHead"],
            "class_path: comlrl_lightning.ValueHead",
        ),
        (
            "marlhf_length_ratio",
            ["reward_model.model", "ModelCritic", "reward_model.model.model", "story-model"],
            # The adapter of the default, another class, must not come along.
            "class_path: comlrl_lightning.ModelCritic\n        init_args:\n          model: story-model\n"
            "          models: null\n          lora: null\n",
        ),
        ("maac_length_ratio", ["critic", "ModelCritic", "critic.model", "story-model"], "lora: null"),
        ("madpo_rounds", ["comparator", "FrozenCopy", "replay", "NearestK", "replay.k", "2"], "k: 2"),
        (
            "madpo_rounds",
            [
                *("comparator", "FixedModel", "comparator.agents", "SharedBase"),
                *("comparator.agents.model", "story-model", "comparator.agents.num_agents", "2"),
            ],
            "class_path: comlrl_lightning.FixedModel",
        ),
        ("magrpo_length_ratio", ["collaboration", "TaggedSections"], "class_path: comlrl_lightning.TaggedSections"),
    ],
)
def test_nested_settings_come_back_from_what_is_printed(
    config: str, flags: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parent.parent / "configs" / f"{config}.yaml"
    given = [f"--model.{flag}" if place % 2 == 0 else flag for place, flag in enumerate(flags)]
    printed = []
    for arguments in (["--config", str(path), *given], ["--config", str(tmp_path / "printed.yaml")]):
        with pytest.raises(SystemExit) as ended:
            main(["fit", *arguments, "--print_config"])
        assert ended.value.code == 0
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1])
    assert printed[0] == printed[1]
    assert expected in printed[0]
