"""Number formats of the Trainer: what is cut to 16 bits, what never is, and which formats are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from comlrl_lightning import (
    IAC,
    MAAC,
    MADPO,
    MAGRPO,
    MARLHF,
    AdapterCritic,
    AgentParallel,
    CooperativeModule,
    JointRewardModel,
    LoraSettings,
    Sampling,
    SharedBase,
    TaskDataModule,
    ValueHead,
)
from comlrl_lightning.agents.team import AgentTeam, TokenScores
from comlrl_lightning.cli import CooperativeCLI
from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.metrics import MetricTable
from tests.algorithms.support import ITEMS, echo, make_trainer, tiny_agents, uneven_reward

FORMATS = ("32-true", "bf16-true", "bf16-mixed")
LORA = LoraSettings(rank=2)
CASES: list[tuple[type[CooperativeModule], dict[str, Any]]] = [
    (MAGRPO, {"num_turns": 2, "external_transition": echo, "reference_kl_coef": 0.1}),
    (IAC, {"critic": ValueHead()}),
    (IAC, {"critic": AdapterCritic(lora=LORA)}),
    (MAAC, {"critic": AdapterCritic(lora=LORA, hidden_size=8)}),
    (MADPO, {}),
    (MARLHF, {"reward_model": JointRewardModel(model=AdapterCritic(lora=LORA))}),
]


def made(algorithm: type[CooperativeModule] = MAGRPO, kind: Any = "shared", **settings: Any) -> CooperativeModule:
    given = {"sampling": Sampling(max_new_tokens=4), "seed": 1, "reward_func": uneven_reward}
    return algorithm(tiny_agents(kind, dtype=torch.float32), **{**given, **settings})


def fitted(module: CooperativeModule, precision: Any, **settings: Any) -> Trainer:
    trainer = make_trainer(**{"max_epochs": 3, "precision": precision, **settings})
    trainer.fit(module, TaskDataModule(ITEMS[:2], batch_size=2))
    return trainer


class WithoutDoubles(Tensor):
    """A tensor as on a device that has no float64, from which only `cpu` leads away."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if not isinstance(result, Tensor):
            return result
        if func is Tensor.cpu:
            return result.as_subclass(Tensor)
        if result.dtype == torch.float64:
            raise TypeError(f"{func} makes float64 on a device that has none.")
        return result


def elsewhere(scores: TokenScores) -> TokenScores:
    """Scores as if their model were on such a device."""
    parts = scores.log_probs, scores.entropy, scores.completion_mask
    return TokenScores(*(part.as_subclass(WithoutDoubles) for part in parts))


@pytest.mark.filterwarnings("ignore:Trainer.* ends inside a round")
@pytest.mark.parametrize(("algorithm", "settings"), CASES)
def test_devices_without_double_precision(
    algorithm: type[CooperativeModule], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_probs, values = AgentTeam.log_probs, CriticTeam.values
    expected = fitted(made(algorithm, **settings), "32-true").callback_metrics
    monkeypatch.setattr(AgentTeam, "log_probs", lambda *args, **how: elsewhere(log_probs(*args, **how)))
    monkeypatch.setattr(CriticTeam, "values", lambda *args: values(*args).as_subclass(WithoutDoubles))
    found = fitted(made(algorithm, **settings), "32-true").callback_metrics
    assert found.keys() == expected.keys()
    assert len(found) > 4
    for name in {key for key in expected if not key.startswith("time/")}:
        torch.testing.assert_close(found[name], expected[name], msg=name)


def test_metrics_take_numbers_from_devices_without_double_precision() -> None:
    table = MetricTable(["a"])
    table.update("a", torch.tensor([1.0, 2.0]).as_subclass(WithoutDoubles), 3.0)
    assert table.pop() == {"a": 1.5}


def dtypes(module: CooperativeModule, trained: bool) -> set[torch.dtype]:
    return {one.dtype for one in module.parameters() if one.requires_grad == trained}


@pytest.mark.filterwarnings("ignore:Trainer.* ends inside a round")
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize(("algorithm", "settings"), CASES)
def test_only_the_frozen_base_is_cut(algorithm: Any, settings: dict[str, Any], precision: str) -> None:
    # A step of 1e-6 on weights of about 0.1 is below what bfloat16 tells apart (2**-9 of a weight, so 2e-4).
    module = made(algorithm, agent_learning_rate=1e-6, **settings)
    module.configure_model()
    start = {name: one.detach().clone() for name, one in module.named_parameters() if one.requires_grad}
    trainer = fitted(module, precision)
    assert dtypes(module, trained=True) == {torch.float32}
    assert dtypes(module, trained=False) == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    (optimizer,) = trainer.optimizers
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert moments
    assert {value.dtype for value in moments} == {torch.float32}
    changes = {
        name: float((one.detach() - start[name]).abs().max())
        for name, one in module.named_parameters()
        if one.requires_grad and "agent_" in name and "lora_B" in name
    }
    assert changes
    # AdamW moves by about the learning rate per step; three epochs take at most a few steps.
    assert all(1e-7 < change < 1e-4 for change in changes.values()), changes


@pytest.mark.parametrize(("precision", "gap"), [("32-true", 1e-5), ("bf16-true", 0.02), ("bf16-mixed", 0.02)])
def test_rollouts_and_updates_score_alike(precision: str, gap: float) -> None:
    # Several optimizer steps on one buffer, of one mini-batch each: the first of them sees ratios of about 1.
    module = made(clip_epsilon=0.2, num_turns=2, external_transition=echo)
    metrics = fitted(module, precision, max_epochs=1).callback_metrics
    for agent in (0, 1):
        assert metrics[f"agent_{agent}/sampler_gap"] < gap
        assert metrics[f"agent_{agent}/effective_sample_size"] > 0.95


@pytest.mark.parametrize("precision", FORMATS)
def test_users_functions_see_single_precision(precision: str) -> None:
    seen: set[tuple[str, torch.dtype, torch.dtype]] = set()

    def look(who: str) -> None:
        ones = torch.ones(2, 2)
        seen.add((who, ones.dtype, (ones @ ones).dtype))

    def reward(*completions: list[str]) -> list[float]:
        look("reward")
        return uneven_reward(*completions)

    def formatter(item: dict[str, Any]) -> str:
        look("formatter")
        return str(item["prompt"])

    def transition(agent_completions: Sequence[str]) -> Sequence[str]:
        look("transition")
        return agent_completions

    module = made(reward_func=reward, formatters=formatter, external_transition=transition, num_turns=2)
    fitted(module, precision, max_epochs=1)
    assert seen == {(who, torch.float32, torch.float32) for who in ("reward", "formatter", "transition")}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("precision", FORMATS)
def test_models_at_the_same_time_compute_in_the_same_format(precision: str) -> None:
    alone, together = made(kind="separate"), made(kind="separate")
    fitted(alone, precision, max_epochs=2)
    fitted(together, precision, max_epochs=2, strategy=AgentParallel(["cpu", "cpu"]))
    others = dict(together.named_parameters())
    assert all(torch.equal(value, others[name]) for name, value in alone.named_parameters())


class TestRefusals:
    def test_of_true_half_precision(self) -> None:
        with pytest.raises(ValueError, match=r"precision='16-true'\) would need a gradient scaler. Use 'bf16-mixed'"):
            fitted(made(), "16-true")

    def test_of_a_scaler(self) -> None:
        # What Lightning makes of precision="16-mixed" where there is a GPU.
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        trainer = make_trainer(plugins=[plugin])
        with pytest.raises(ValueError, match=r"precision='16-mixed'\) would need a gradient scaler"):
            trainer.fit(made(), TaskDataModule(ITEMS[:2]))

    @pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
    def test_on_the_command_line(self, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
        # The configuration says what was asked for; on a CPU the Trainer itself no longer does.
        arguments = [
            *("--model", "MAGRPO", "--model.agents", "SharedBase", "--model.agents.model", "story-model"),
            *(
                "--model.agents.num_agents",
                "2",
                "--model.reward_func",
                "comlrl_lightning.tasks.length_ratio.reward_func",
            ),
            *("--data.train_dataset", "comlrl_lightning.tasks.length_ratio.train_items"),
            *("--trainer.accelerator", "cpu", "--trainer.precision", precision),
        ]
        with pytest.raises(SystemExit):
            CooperativeCLI(arguments, run=False)
        assert f"Trainer(precision='{precision}') would need a gradient scaler" in capsys.readouterr().err

    def test_in_python_lightning_says_what_it_trains_in(self) -> None:
        with pytest.warns(UserWarning, match=r"AMP with fp16 is not supported on CPU. Using `precision='bf16-mixed'`"):
            trainer = make_trainer(precision="16-mixed")
        assert trainer.precision == "bf16-mixed"

    def test_of_trained_weights_in_half_precision(self) -> None:
        message = (
            r'trained weights are bfloat16, in which most updates round to nothing.\s+Load the models with dtype="f'
        )
        with pytest.raises(ValueError, match=message):
            fitted(made(kind="full"), "bf16-true")
        half = SharedBase("story-model", num_agents=2, dtype="bfloat16")
        module = MAGRPO(half, uneven_reward, sampling=Sampling(max_new_tokens=2))
        fitted(module, "bf16-mixed", max_epochs=1)  # adapters on a base in half precision are fine
        assert dtypes(module, trained=True) == {torch.float32}
