"""What the preference algorithms share: rounds in which a team answers, is compared, and learns from that."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from typing_extensions import override

from comlrl_lightning.algorithms.checkpoint import KEY
from comlrl_lightning.algorithms.module import COMPARE, TRAIN, CooperativeModule
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.environment.functions import TaskFunctions
from comlrl_lightning.learning.updates import StepLearner, StepStats
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
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.rollouts.recording import record_candidates
from comlrl_lightning.types import Rollouts
from comlrl_lightning.utilities.checks import check_whole
from comlrl_lightning.utilities.distributed import rank, sum_over_ranks, world_size

S = TypeVar("S", bound=StepStats)


class PreferenceModule(CooperativeModule):
    """Learns from preferences in rounds: collect pairs, then learn from them.

    A round is a fixed number of Lightning epochs, `epochs_per_round`. Its first epoch collects: each task item gets
    `num_candidates` joint completions, which the reward function scores and which become pairs of a better and a worse
    one; no weight changes. The other epochs learn. An epoch that learns from pairs gives each training step an equal
    share of them. One round is preference learning as it is usually done, several are its iterative form:
    ``Trainer(max_epochs=num_rounds * module.epochs_per_round)``. There is one turn.
    """

    num_candidates: int = 8
    """Joint completions per task item in a collection."""
    pair_selection: PairSelection | None = None
    """Which pairs an item gives. ``"disjoint"`` pairs the best candidate with the worst and so on inward, each once;
    ``"reward_gap"`` takes the largest gaps, which repeats the extremes; ``"random"``; ``"all"``;
    ``"comparator_reward"`` takes the pairs in which the comparator did best. None: the first without a comparator, the
    last with one."""
    num_pairs_per_item: int | None = None
    """Most pairs that an item gives. None: no limit."""
    comparator: Comparator | None = None
    """Source of other joint completions, to be compared with answer by answer. None: candidates are compared with each
    other."""
    comparator_num_candidates: int | None = None
    """Joint completions per item by the comparator. None: `num_candidates`."""
    replay: Replay = CurrentRound()
    """Which rounds' pairs a round learns from."""
    learning_epochs: int = 1
    """Epochs per round that train the policies."""

    @override
    def check_settings(self) -> None:
        super().check_settings()
        check_strategies(self.comparator, self.replay)
        check_whole(1, learning_epochs=self.learning_epochs)
        check_candidates(
            self.num_candidates, self.comparator_num_candidates, with_comparator=self.comparator is not None
        )
        pairs = PairSettings(self.pair_selection, self.num_pairs_per_item)
        self.resolved_selection: PairSelection = pairs.resolved(self.comparator is not None)
        self.candidate_shape = RolloutShape(self.num_candidates)
        self.comparator_shape = RolloutShape(self.comparator_num_candidates or self.num_candidates)
        self.schedule = self.make_schedule()
        self.rounds = RoundProgress()

    def make_schedule(self) -> Schedule:
        """The epochs of a round."""
        return Schedule(0, self.learning_epochs)

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
        super().build_learners()
        if self.comparator is not None:
            self.comparator.build()
            self.comparator_models = nn.ModuleList(self.comparator.modules())

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        max_epochs = self.trainer.max_epochs
        is_fast_dev_run = bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        if not is_fast_dev_run and max_epochs is not None and max_epochs > 0 and max_epochs % self.epochs_per_round:
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
    def discard_unfinished_step(self) -> None:
        super().discard_unfinished_step()
        if self.schedule.phase(self.current_epoch).kind == "collect":
            self.rounds = self.rounds.without_collection()
        if self.comparator is not None:
            self.comparator.pop_counts()

    @override
    def train_on(self, batch: TaskBatch, is_last: bool) -> None:
        self.rollouts = None  # steps on pairs have none
        phase = self.schedule.phase(batch.epoch)
        if phase.kind == "collect":
            self._collect_pairs(batch, phase, is_last)
        else:
            self.learn(batch, phase, is_last)

    def learn(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        """One training step of an epoch that learns."""
        raise NotImplementedError

    def _collect_pairs(self, batch: TaskBatch, phase: Phase, is_last: bool) -> None:
        """Let the team, and perhaps another, answer some items, and keep the pairs."""
        progress = self.rounds.at_round(phase.round)
        if self.comparator is not None:
            self.comparator.begin_round(phase.round, self.team)
        functions, by_task = self.candidate_functions()
        rollouts = self.collect(batch, TRAIN, self.sampling, self.candidate_shape, functions)
        record_candidates(self.training_metrics, rollouts, by_task)
        pairs, num_scored = self._pairs(batch, rollouts, phase, functions)
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

    def candidate_functions(self) -> tuple[TaskFunctions, bool]:
        """The functions that candidates are scored by, and whether they hold the task's own reward."""
        return self.task_functions, True

    def _pairs(
        self, batch: TaskBatch, rollouts: Rollouts, phase: Phase, functions: TaskFunctions
    ) -> tuple[list[PreferencePair], int]:
        """The pairs of some items, and how many joint completions were scored for them."""
        key, limit = (self.seed, COMPARE, phase.round), self.num_pairs_per_item
        pairs: list[PreferencePair] = []
        others: Rollouts | None = None
        if self.comparator is not None:
            others = self._compare(batch, self.comparator, functions)
        partners = {} if others is None else {node.task: node for node in others.nodes}
        for node in rollouts.nodes:
            index = rollouts.indices[node.task]
            if others is None:
                found = candidate_pairs(node, index, self.resolved_selection, limit, key)
            elif node.task in partners:
                found = compared_pairs(node, partners[node.task], index, self.resolved_selection, limit, key)
            else:  # none of the comparator's answers has a reward
                found = []
            self.training_metrics.update(preference_key("pairs_per_item"), float(len(found)))
            for pair in found:
                self.training_metrics.update(preference_key("reward_gap"), pair.gap)
            pairs += found
        return pairs, rollouts.num_scored + (0 if others is None else others.num_scored)

    def _compare(self, batch: TaskBatch, comparator: Comparator, functions: TaskFunctions) -> Rollouts:
        others = self.collect(
            batch, COMPARE, self.sampling, self.comparator_shape, functions, comparator.sampler(self.team)
        )
        for node in others.nodes:
            for reward in node.rewards:
                self.training_metrics.update(preference_key("comparator_reward_mean"), reward)
        counts = comparator.pop_counts()
        if counts.num_joint:
            unparsed = counts.num_unparsed / counts.num_joint
            self.training_metrics.update(preference_key("comparator_unparsed_share"), unparsed, counts.num_joint)
        return others

    def step_on_pairs(
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
            self.idle_step()
            return
        started = time.perf_counter()
        kinds = ("collect", "reward", "learn")
        ordered = shuffled(pairs, (self.seed, COMPARE, phase.round, kinds.index(phase.kind), phase.index))
        # Not by the number of the batch, which Lightning counts on where a stream goes on at the start of an epoch.
        mine = share(range(batch.start, batch.stop), self.rounds.num_items, len(pairs), batch_size, is_last)
        for start in range(mine.start, mine.stop, batch_size or max(len(mine), 1)):
            chosen = ordered[start : min(start + (batch_size or len(mine)), mine.stop)]
            self.optimizer_step_on(learner, chosen[rank() :: world_size()])
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
    def round_state(self) -> RoundProgress:
        return self.rounds

    @override
    def round_state_to_plain(self, state: Any) -> dict[str, Any]:
        assert isinstance(state, RoundProgress)
        comparator = {} if self.comparator is None else self.comparator.state_dict()
        return {"rounds": state.to_state(), "comparator": comparator}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # As `env_step`, it goes on where only the weights are taken over.
        counted = checkpoint[KEY].get("own", {}).get("rounds", {}).get("task_reward_scores", 0)
        self.rounds = replace(self.rounds, task_reward_scores=counted)

    @override
    def restore_round_state(self, state: Mapping[str, Any]) -> None:
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
