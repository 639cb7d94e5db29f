"""What the benchmarks make of their measurements: ratios, tables, resumed runs, and comparisons that they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import _report, _results
from benchmarks._job import (
    Done,
    Job,
    Measurement,
    external_transition,
    formatters,
    recorded,
    reward_func,
    task_items,
)
from benchmarks._report import Comparison
from benchmarks._results import Row, Run
from benchmarks._works import MEMORY_GOALS, OVER_AGENTS, QUICK, SIDES, SPEED_GOALS, WORKS, sides_of
from benchmarks.bench_comlrl import command, parse, plan, run
from comlrl_lightning.tasks import length_ratio

DONE = Done(num_updates=1, num_joint=16, num_prompt_tokens=130, num_completion_tokens=2048, num_trained=32)
VERSIONS = {"torch": "2.13.0"}


def job(work: str, side: str, seed: int = 0) -> Job:
    return Job("small", WORKS[work], SIDES[side].dtype, SIDES[side].full, seed)


def measured(wall: float, gigabytes: float = 1.0, done: Done = DONE) -> Measurement:
    return Measurement(done, wall, wall / 4, wall / 2, round(gigabytes * 1e9), VERSIONS)


def runs(work: str, side: str, *walls: float, gigabytes: float = 1.0, done: Done = DONE) -> list[Run]:
    """One run per repeat."""
    return [Run(side, job(work, side, seed), measured(wall, gigabytes, done)) for seed, wall in enumerate(walls)]


def row(work: str, side: str, *walls: float, gigabytes: float = 1.0, done: Done = DONE) -> Row:
    (made,) = _results.rows(runs(work, side, *walls, gigabytes=gigabytes, done=done))
    return made


def cells(text: str, start: str) -> list[str]:
    """Cells of the only line of a page that begins with some cells."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_named_work_and_side_exists() -> None:
    assert {*QUICK, *OVER_AGENTS, *SPEED_GOALS, *MEMORY_GOALS} <= set(WORKS)
    assert sides_of(WORKS["tree"], None, quick=False) == ["comlrl-fp32", "comlrl-bf16", "ours-bf16"]
    assert sides_of(WORKS["agents-8"], None, quick=False) == ["comlrl-bf16", "ours-bf16"]
    assert sides_of(WORKS["update"], None, quick=False)[-1] == "ours-fp32"
    assert sides_of(WORKS["update"], None, quick=True) == ["comlrl-fp32", "ours-bf16"]
    assert sides_of(WORKS["update"], ["ours-full-fp32"], quick=True) == ["ours-full-fp32"]
    assert WORKS["tree"].shortened(8).num_tokens == 4  # 32 * 8 / 64


def test_names_of_sampling_works_count_their_rows() -> None:
    for work in WORKS.values():
        if work.kind == "generate":
            assert work.name == f"generate-{work.num_items * work.num_agents * work.num_generations}"


def test_ratios_pair_the_repeats() -> None:
    comparison = Comparison(row("update", "comlrl-fp32", 30.0, 90.0, 40.0), row("update", "ours-bf16", 10.0, 9.0))
    assert comparison.speedups == [3.0, 10.0]  # 30/10, 90/9; the third has no partner
    assert _report.spread(comparison.speedups, 2, "x") == "6.50x (3.00-10.00)"
    assert _report.spread([3.0], 1, "x") == "3.0x"


def test_memory_share_is_ours_of_theirs() -> None:
    theirs = row("magrpo-4", "comlrl-fp32", 9.0, gigabytes=6.0)
    ours = row("magrpo-4", "ours-fp32", 3.0, gigabytes=1.5)
    assert Comparison(theirs, ours).memory_shares == [0.25]


def test_comparisons_take_the_fastest_by_its_median() -> None:
    rows = [
        row("update", "comlrl-fp32", 30.0, 31.0, 10.0),
        row("update", "comlrl-bf16", 20.0, 21.0, 99.0),  # median 21
        row("update", "ours-fp32", 9.0, 9.0, 9.0),
        row("update", "ours-bf16", 7.0, 7.0, 11.0),
    ]
    best = _report.compare(rows)
    assert best is not None
    assert (best.theirs.name, best.ours.name) == ("comlrl-bf16", "ours-bf16")
    assert best.speedups == [20 / 7, 3.0, 9.0]
    fp32 = _report.compare(rows, "comlrl-fp32", "ours-fp32")
    assert fp32 is not None
    assert (fp32.theirs.name, fp32.ours.name) == ("comlrl-fp32", "ours-fp32")
    assert _report.compare(rows[:2]) is None
    assert _report.compare(rows[1:], "comlrl-fp32") is None


def test_goals_table() -> None:
    rows = [
        row("magrpo-4", "comlrl-fp32", 60.0, 80.0, gigabytes=6.0),
        row("magrpo-4", "comlrl-bf16", 30.0, 40.0, gigabytes=3.0),
        row("magrpo-4", "ours-bf16", 10.0, 10.0, gigabytes=1.5),
        row("magrpo-4", "ours-fp32", 20.0, 20.0, gigabytes=3.0),
        row("generate-16", "ours-bf16", 1.0),
    ]
    text = _report.goals_table(_report.by_work(rows))
    # 60/10 and 80/10; 30/10 and 40/10; 60/20 and 80/20. 1.5/6, 1.5/3, 3/6 both times
    speeds = ["7.00x (6.00-8.00)", "3.50x (3.00-4.00)", "3.50x (3.00-4.00)"]
    assert cells(text, "magrpo-4") == ["magrpo-4", "4x", "6x", *speeds]
    shares = ["25% (25-25)", "50% (50-50)", "50% (50-50)"]
    assert cells(text, "magrpo-4, peak memory") == ["magrpo-4, peak memory", "40%", "25%", *shares]
    assert cells(text, "generate-16")[1:] == [""] * 5
    # Times and memory: 7 and 25%, and 3.5 and 50%.
    words = "2 of 2 are reached over float32 comlrl, 0 of 2 are reached over bfloat16 comlrl"
    assert _report.reached(_report.by_work(rows)) == words


def test_details_leave_empty_what_was_not_timed() -> None:
    theirs = row("update", "comlrl-fp32", 32.0, gigabytes=6.0)
    alone = Run("ours-bf16", job("update", "ours-bf16"), replace(measured(8.0, 1.5), generation_seconds=None))
    text = _report.details_table([theirs, *_results.rows([alone])])
    # 16 joint completions and 2048 tokens in 8 s; 32/8; 1.5 of 6 GB
    numbers = ["8.0", "", "4.0", "2.000", "256.0", "1.50", "4.00x", "25%"]
    assert cells(text, "comlrl_lightning")[3:] == numbers


def test_labels_name_the_critics() -> None:
    assert "AdapterCritic" in SIDES["ours-bf16"].trained("iac")
    assert "critic" not in SIDES["ours-bf16"].trained("magrpo")


def test_cost_over_agents_is_per_token() -> None:
    # 2 agents: 2048 tokens in 8.192 s, 4 ms each; 4 agents: 4096 tokens in 12.288 s, 3 ms each
    few = row("magrpo-2", "ours-bf16", 8.192)
    many = row("agents-4", "ours-bf16", 12.288, done=replace(DONE, num_completion_tokens=4096))
    text = _report.agents_table(_report.by_work([few, many]))
    first, second = (line for line in text.splitlines() if line.startswith("| comlrl_lightning"))
    assert [cell.strip() for cell in first.strip("|").split("|")][1:] == ["2", "0.51", "4.00", "1.00x"]
    assert [cell.strip() for cell in second.strip("|").split("|")][1:] == ["4", "0.77", "3.00", "0.75x"]
    assert _report.agents_table(_report.by_work([few])) == ""


def test_page_has_every_work_and_no_folders() -> None:
    rows = [*_results.rows(runs("tree", "comlrl-fp32", 9.0)), row("iac", "ours-bf16", 1.0)]
    options = parse(["--model", "/somewhere/small", "--works", "tree", "iac", "--tokens", "8"])
    text = _report.page(command(options), "small", rows)
    assert "## tree" in text
    assert "2 agents, 1 item, 32 tokens, 2 turns, 1 item per update" in text
    assert "## iac" in text
    assert "somewhere" not in text
    assert "--works tree iac --repeats 3 --tokens 8" in text


def test_picture(tmp_path: Path) -> None:
    _report.draw([row("iac", "ours-bf16", 1.0)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    _report.draw(
        _results.rows([*runs("iac", "ours-bf16", 1.0), *runs("iac", "comlrl-fp32", 3.0)]), tmp_path / "one.png"
    )
    assert (tmp_path / "one.png").stat().st_size > 1000


@pytest.mark.parametrize("count", [*vars(DONE)])
def test_unequal_work_is_refused(count: str) -> None:
    other = replace(DONE, **{count: 7})
    pair = [*runs("update", "comlrl-fp32", 9.0), *runs("update", "ours-bf16", 1.0, done=other)]
    with pytest.raises(RuntimeError, match=rf"update: ours-bf16 did {count}=7, comlrl-fp32 did"):
        _results.check_equal_work(pair)


def test_equal_work_is_a_matter_of_one_work_and_of_what_both_can_count() -> None:
    other = replace(DONE, num_updates=2)
    _results.check_equal_work([*runs("update", "ours-bf16", 1.0), *runs("iac", "ours-bf16", 1.0, done=other)])
    # comlrl steps once per turn
    _results.check_equal_work([*runs("tree", "comlrl-fp32", 9.0, done=other), *runs("tree", "ours-bf16", 1.0)])


def test_results_come_back_for_the_same_jobs_only(tmp_path: Path) -> None:
    former = [*runs("update", "comlrl-fp32", 9.0, 8.0), *runs("tree", "comlrl-fp32", 7.0)]
    assert _results.finished(tmp_path, []) == []
    _results.save(tmp_path, "command", former)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    everything = {(run.side, run.job) for run in former}
    assert _results.finished(tmp_path, everything) == former
    planned = {(former[1].side, former[1].job), ("comlrl-fp32", replace(former[2].job, micro_batch_tokens=1))}
    assert _results.finished(tmp_path, planned) == [former[1]]


def test_results_of_another_machine_are_not_kept(tmp_path: Path) -> None:
    former = runs("update", "comlrl-fp32", 9.0)
    _results.save(tmp_path, "command", former)
    content = json.loads((tmp_path / "results.json").read_text())
    content["machine"]["processor"] = "abacus"
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert _results.finished(tmp_path, {(run.side, run.job) for run in former}) == []


def test_plan_interleaves_the_sides() -> None:
    options = parse(["--works", "tree", "--sides", "comlrl-fp32", "ours-bf16", "--repeats", "2"])
    planned = [(side, job.seed) for side, job in plan(options)]
    assert planned == [("comlrl-fp32", 0), ("ours-bf16", 0), ("comlrl-fp32", 1), ("ours-bf16", 1)]
    assert len(plan(parse(["--quick"]))) == len(QUICK) * 2
    # What is committed stays, unless all of it is measured again.
    assert [parse(given).out.name for given in ([], ["--quick"])] == ["benchmarks", "quick"]
    assert parse(["--quick", "--out", "here"]).out == Path("here")
    assert {job.model for _, job in plan(parse(["--model", "some/where/small"]))} == {"small"}


def test_nothing_runs_when_everything_is_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    arguments = ["--works", "update", "--sides", "ours-bf16", "--repeats", "2", "--resume"]
    options = parse([*arguments, "--out", str(tmp_path), "--model", str(tmp_path / "model")])
    _results.save(tmp_path, "command", [Run(side, job, measured(1.0)) for side, job in plan(options)])
    before = (tmp_path / "results.json").read_bytes()
    run(options)
    assert (tmp_path / "results.json").read_bytes() == before


def test_reward_is_the_task_s_for_two_agents_and_counts_all_texts_for_more() -> None:
    items = task_items(1)
    brief, detailed = ["ab", "abc"], ["abcde", "ab"]
    expected = length_ratio.reward_func(brief, detailed, batch_items=items)
    assert reward_func(brief, detailed, batch_items=items) == expected
    assert reward_func(["a", "a"], ["abc", "a"], ["b", "bc"], ["de", "b"], batch_items=items) == expected
    assert len(formatters(4)) == 4


def test_second_prompts_differ_but_not_in_length() -> None:
    texts = ("a", "2")  # the code of the second has less than three digits
    made = [external_transition(prompt="Task", agent_completions=[text, "x"], num_agents=2) for text in texts]
    assert made[0] != made[1]
    assert {len(prompt) for prompts in made for prompt in prompts} == {len("Task\nWrite version 000.")}


def test_recorded_completions_differ_and_have_the_length() -> None:
    tokens = list(range(100, 170))
    places = [(item, agent, sample) for item in range(4) for agent in range(2) for sample in range(4)]
    made = {tuple(recorded(tokens, *place, 90)) for place in places}
    assert len(made) == len(places)
    assert {len(one) for one in made} == {90}


def test_clock_counts_the_outermost_part_only() -> None:
    from benchmarks import outside  # slow to import

    clock = outside.Clock()
    with clock.timed("backward"), clock.timed("head, sampling"):
        pass
    assert clock.calls["backward"] == 1
    assert clock.calls["head, sampling"] == 0
    clock.seconds["backward"] = 3.0
    assert cells(outside.report(clock, 4.0), "outside") == ["outside", "", "1.00", "25.0%"]


def test_operations_are_those_of_the_formulas() -> None:
    from benchmarks import scaling  # slow to import

    for step in (scaling.Step(), scaling.Step(num_agents=3, num_prompt_tokens=8, num_layers=2)):
        in_sampling, in_update, kept = scaling.count(step)
        assert in_sampling == pytest.approx(step.sampling_flops(), rel=1e-9)
        assert in_update == pytest.approx(step.update_flops(), rel=1e-9)
        assert kept > 0
    assert scaling.Step().reads_prompts_once
    assert not scaling.Step(num_prompt_tokens=8).reads_prompts_once  # 8 + 4 * 24 of 4 * 32 tokens: 81%
