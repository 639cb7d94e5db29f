"""What the preference algorithms share: rounds in which a team answers, is compared, and learns from that."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from typing_extensions import override

from comlrl_lightning.algorithms.checkpoint import KEY
from comlrl_lightning.algorithms.checks import refuse_settings
from comlrl_lightning.algorithms.evaluating import COMPARE, TRAIN
from comlrl_lightning.algorithms.module import CooperativeModule
from comlrl_lightning.algorithms.updating import S, StepLearner
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.metrics import preference_key
from comlrl_lightning.preferences.comparators import Comparator
from comlrl_lightning.preferences.pairs import (
    PairSelection,
    PairSettings,
    PreferencePair,
    Round,
    candidate_pairs,
    compared_pairs,
    shuffled,
)
from comlrl_lightning.preferences.replay import CurrentRound, Replay
from comlrl_lightning.preferences.rounds import Phase, RoundProgress, Schedule, share
from comlrl_lightning.rollouts.collect import RolloutShape, TaskInterface
from comlrl_lightning.rollouts.recording import record_candidates
from comlrl_lightning.types import Rollouts
from comlrl_lightning.utilities.checks import check_whole
from comlrl_lightning.utilities.distributed import rank, sum_over_ranks, world_size
from comlrl_lightning.utilities.plain import from_plain, to_plain

ONE_TURN = (
    "external_transition",
    "external_prompt_passthrough",
    "num_turns",
    "discount",
    "early_termination_threshold",
)
"""Settings of several turns, which preferences do not have."""


class PreferenceModule(CooperativeModule):
    """What the preference algorithms share: rounds of collecting pairs and of learning from them.

    A round is a fixed number of Lightning epochs, `epochs_per_round`. Its first epoch collects: each task item gets
    `num_candidates` joint completions, which the reward function scores and which become pairs of a better and a worse
    one; no weight changes. The other epochs learn. An epoch that learns from pairs gives each training step an equal
    share of them. One round is preference learning as it is usually done, several are its iterative form:
    ``Trainer(max_epochs=num_rounds * module.epochs_per_round)``. There is one turn.

    Args:
        num_candidates: Joint completions per task item in a collection.
        pair_selection: Which pairs an item gives. ``"disjoint"`` pairs the best candidate with the worst and so on
            inward, each once; ``"reward_gap"`` takes the largest gaps, which repeats the extremes; ``"random"``;
            ``"all"``; ``"comparator_reward"`` takes the pairs in which the comparator did best. None: the first without
            a comparator, the last with one.
        num_pairs_per_item: Most pairs that an item gives. None: no limit.
        comparator: Who else answers, to be compared with answer by answer. None: candidates are compared with each
            other.
        comparator_num_candidates: Joint completions per item by the comparator. None: `num_candidates`.
        replay: Which rounds' pairs a round learns from.
        learning_epochs: Epochs per round that train the policies.
    """

    fixed_settings = (
        *(name for name in CooperativeModule.fixed_settings if name not in ONE_TURN),
        "num_candidates",
        "pair_selection",
        "num_pairs_per_item",
        "comparator",
        "comparator_num_candidates",
        "replay",
        "learning_epochs",
    )

    def __init__(
        self,
        *args: Any,
        num_candidates: int = 8,
        pair_selection: PairSelection | None = None,
        num_pairs_per_item: int | None = None,
        comparator: Comparator | None = None,
        comparator_num_candidates: int | None = None,
        replay: Replay = CurrentRound(),  # noqa: B008  (frozen)
        learning_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        refuse_settings(type(self).__name__, ONE_TURN, kwargs, "preferences are about one turn")
        # By position come agents and functions only, none of the settings below.
        super().__init__(  # type: ignore[misc]
            *args,
            external_transition=None,
            external_prompt_passthrough=False,
            num_turns=1,
            discount=1.0,
            early_termination_threshold=None,
            **kwargs,
        )
        self._leave_out(ONE_TURN)
        given = {
            "num_candidates": num_candidates,
            "pair_selection": pair_selection,
            "num_pairs_per_item": num_pairs_per_item,
            "comparator": to_plain(comparator),
            "comparator_num_candidates": comparator_num_candidates,
            "replay": to_plain(replay),
            "learning_epochs": learning_epochs,
        }
        self.save_hyperparameters(given)
        self.comparator: Comparator | None = from_plain("comparator", comparator)
        self.replay: Replay = from_plain("replay", replay)
        check_strategies(self.comparator, self.replay)
        check_whole(1, learning_epochs=learning_epochs)
        check_candidates(num_candidates, comparator_num_candidates, with_comparator=self.comparator is not None)
        pairs = PairSettings(pair_selection, num_pairs_per_item)
        self.pair_selection: PairSelection = pairs.resolved(self.comparator is not None)
        self.num_pairs_per_item = num_pairs_per_item
        self.candidate_shape = RolloutShape(num_candidates)
        self.comparator_shape = RolloutShape(comparator_num_candidates or num_candidates)
        self.schedule = Schedule(0, learning_epochs)
        self.rounds = RoundProgress()

    def _leave_out(self, names: Sequence[str]) -> None:
        """Take settings that this algorithm does not have out of its hyperparameters, which load it again."""
        for name in names:
            self.hparams.pop(name, None)

    @property
    def epochs_per_round(self) -> int:
        """Lightning epochs from one collection to the next."""
        return self.schedule.epochs_per_round

    @property
    def last_round(self) -> Round | None:
        """The last round whose collection is over, with the pairs of all ranks; None before the first."""
        return self.rounds.kept[-1] if self.rounds.kept else None

    @override
    def build_learners(self) -> None:
        if self.comparator is not None:
            self.comparator.build()
            self.comparator_models = nn.ModuleList(self.comparator.modules())

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        max_epochs = self.trainer.max_epochs
        is_rehearsal = bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        if not is_rehearsal and max_epochs is not None and max_epochs > 0 and max_epochs % self.epochs_per_round:
            rank_zero_warn(
                f"Trainer(max_epochs={max_epochs}) ends inside a round of {self.epochs_per_round} epochs. Use"
                " num_rounds * module.epochs_per_round."
            )
        if self.current_epoch == 0:
            # Counters go on over several fits, as `env_step` does.
            self.rounds = RoundProgress(task_reward_scores=self.rounds.task_reward_scores)
            if self.comparator is not None:
                self.comparator.begin_run()

    @override
    def _forget_leftovers(self) -> None:
        super()._forget_leftovers()
        if self.schedule.phase(self.current_epoch).kind == "collect":
            self.rounds = self.rounds.without_collection()
        if self.comparator is not None:
            self.comparator.pop_counts()

    @override
    def _train_on(self, batch: TaskBatch, is_last: bool) -> None:
        self.rollouts = None  # steps on pairs have none
        phase = self.schedule.phase(batch.epoch)
        if phase.kind == "collect":
            self._collect_pairs(batch, phase, is_last)
        else:
            self._learn(batch, phase, is_last)

    def _learn(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        """One training step of an epoch that learns."""
        raise NotImplementedError

    def _collect_pairs(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        """Let the team, and perhaps another, answer some items, and keep the pairs."""
        progress = self.rounds.at_round(phase.round)
        if self.comparator is not None:
            self.comparator.begin_round(phase.round, self.team)
        interface, by_task = self._candidate_interface()
        rollouts = self._collect(batch, TRAIN, self.sampling, self.candidate_shape, interface=interface)
        record_candidates(self.training_metrics, rollouts, self.interface.reward.pop_parts(), by_task)
        pairs, num_scored = self._pairs(batch, rollouts, phase, interface)
        num_scores = round(sum_over_ranks(num_scored))
        self.env_step += num_scores
        rewards = [reward for node in rollouts.nodes for reward in node.rewards]
        self.rounds = progress.with_step(batch.stop, pairs, rewards, num_scores if by_task else 0)
        self.rollouts = rollouts
        if is_last:
            self.rounds = self.rounds.at_end(self.replay, (self.seed, COMPARE))
            if not self.rounds.pairs:
                rank_zero_warn(
                    f"Round {phase.round + 1} has no pair to learn from: all answers to an item had the same reward or"
                    " were the same. Its learning epochs change nothing. Look at the reward, or raise num_candidates."
                )

    def _candidate_interface(self) -> tuple[TaskInterface, bool]:
        """What scores candidates, and whether that is the task's reward."""
        return self.interface, True

    def _pairs(
        self, batch: TaskBatch, rollouts: Rollouts, phase: Phase, interface: TaskInterface
    ) -> tuple[list[PreferencePair], int]:
        """The pairs of some items, and how many joint completions were scored for them."""
        key, limit = (self.seed, COMPARE, phase.round), self.num_pairs_per_item
        pairs: list[PreferencePair] = []
        others: Rollouts | None = None
        if self.comparator is not None:
            others = self._compare(batch, self.comparator, interface)
        partners = {} if others is None else {node.task: node for node in others.nodes}
        for node in rollouts.nodes:
            index = rollouts.indices[node.task]
            if others is None:
                found = candidate_pairs(node, index, self.pair_selection, limit, key)
            elif node.task in partners:
                found = compared_pairs(node, partners[node.task], index, self.pair_selection, limit, key)
            else:  # none of the comparator's answers has a reward
                found = []
            self.training_metrics.update(preference_key("pairs_per_item"), float(len(found)))
            for pair in found:
                self.training_metrics.update(preference_key("reward_gap"), pair.gap)
            pairs += found
        return pairs, rollouts.num_scored + (0 if others is None else others.num_scored)

    def _compare(self, batch: TaskBatch, comparator: Comparator, interface: TaskInterface) -> Rollouts:
        others = self._collect(
            batch, COMPARE, self.sampling, self.comparator_shape, comparator.sampler(self.team), interface
        )
        self.interface.reward.pop_parts()  # the log is about the team
        for node in others.nodes:
            for reward in node.rewards:
                self.training_metrics.update(preference_key("comparator_reward_mean"), reward)
        counts = comparator.pop_counts()
        if counts.num_joint:
            unparsed = counts.num_unparsed / counts.num_joint
            self.training_metrics.update(preference_key("comparator_unparsed_share"), unparsed, counts.num_joint)
        return others

    def _step_on_pairs(
        self,
        learner: StepLearner[PreferencePair, S],
        pairs: Sequence[PreferencePair],
        batch: TaskBatch,
        phase: Phase,
        is_last: bool,
        batch_size: int | None,
    ) -> None:
        """Optimizer steps on this training step's share of the pairs, none where it is empty, one idle without pairs.

        Args:
            learner: Whose loss.
            pairs: All pairs of the epoch, the same on every rank.
            batch: The training step's items, whose place in the epoch says which share.
            phase: What the epoch is for.
            is_last: Whether it ends here.
            batch_size: Pairs per optimizer step over all ranks; None: the whole share.
        """
        if not pairs:
            self._idle_step()
            return
        started = time.perf_counter()
        kinds = ("collect", "reward", "learn")
        ordered = shuffled(pairs, (self.seed, COMPARE, phase.round, kinds.index(phase.kind), phase.index))
        # Not by the number of the batch, which Lightning counts on where a stream goes on at the start of an epoch.
        mine = share(range(batch.start, batch.stop), self.rounds.num_items, len(pairs), batch_size, is_last)
        for start in range(mine.start, mine.stop, batch_size or max(len(mine), 1)):
            chosen = ordered[start : min(start + (batch_size or len(mine)), mine.stop)]
            self._optimizer_step(learner, chosen[rank() :: world_size()])
        if mine:
            self.training_metrics.update("time/update", time.perf_counter() - started)

    @override
    def counters(self) -> dict[str, float]:
        # Steps on pairs score nothing: their x-axis is the number of updates.
        counts = {"task_reward_scores": self.rounds.task_reward_scores, "update_step": self.update_step}
        return {**super().counters(), **{name: float(count) for name, count in counts.items()}}

    @override
    def get_extra_state(self) -> dict[str, int]:
        return {**super().get_extra_state(), "task_reward_scores": self.rounds.task_reward_scores}

    @override
    def set_extra_state(self, state: dict[str, int]) -> None:
        super().set_extra_state(state)
        self.rounds = replace(self.rounds, task_reward_scores=state["task_reward_scores"])

    @override
    def progress(self) -> RoundProgress:
        return self.rounds

    @override
    def progress_state(self, progress: Any) -> dict[str, Any]:
        assert isinstance(progress, RoundProgress)
        comparator = {} if self.comparator is None else self.comparator.state_dict()
        return {"rounds": progress.to_state(), "comparator": comparator}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # As `env_step`, it goes on where only the weights are taken over.
        counted = checkpoint[KEY].get("own", {}).get("rounds", {}).get("task_reward_scores", 0)
        self.rounds = replace(self.rounds, task_reward_scores=counted)

    @override
    def restore_progress(self, state: Mapping[str, Any]) -> None:
        self.rounds = RoundProgress.from_state(state["rounds"])
        if self.comparator is not None:
            self.comparator.load_state_dict(state["comparator"])


def check_strategies(comparator: object, replay: object) -> None:
    """Refuse what is no comparator or no replay.

    Raises:
        ValueError: If one is of another kind.
    """
    if comparator is not None and not isinstance(comparator, Comparator):
        raise ValueError(
            f"comparator={comparator!r} is no comparator. Use CurrentPolicy(), FrozenCopy(), HistoryPolicy(...),"
            " FixedModel(...), APIComparator(...) or None."
        )
    if not isinstance(replay, Replay):
        raise ValueError(
            f"replay={replay!r} is no replay. Use CurrentRound(), NearestK(...), AllHistory() or LambdaDecay(...)."
        )


def check_candidates(num_candidates: int, comparator_num_candidates: int | None, *, with_comparator: bool) -> None:
    """Refuse numbers of joint completions that leave nothing to compare.

    Raises:
        ValueError: If one is out of range, or there is no comparator for its own.
    """
    check_whole(1 if with_comparator else 2, num_candidates=num_candidates)
    if comparator_num_candidates is None:
        return
    check_whole(1, comparator_num_candidates=comparator_num_candidates)
    if not with_comparator:
        raise ValueError(
            f"comparator_num_candidates={comparator_num_candidates} needs a comparator, and comparator=None. Give one,"
            " or leave it out."
        )
