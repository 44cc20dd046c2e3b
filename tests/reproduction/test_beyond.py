"""Notebook 08's numbers: what is scored and chosen, ranks after siblings, sizes by cost, tables that can be checked by hand."""

from dataclasses import replace
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from dblast.decoding import generate
from dblast.replay import score
from dblast.reproduction.beyond import scores as beyond_scores
from dblast.reproduction.beyond import siblings as beyond_siblings
from dblast.reproduction.beyond.cost import (
    TREE_PARTS,
    best_fixed_size,
    cost_rows,
    measure_widths,
    roofline,
    roofline_table,
    speed_rows,
    width_rows,
)
from dblast.reproduction.beyond.scores import (
    ALL_PROMPTS,
    DRAFT_TEMPERATURES,
    TREE_BLOCKS,
    choose_temperatures,
    chosen_calls,
    collect_proposals,
    every_call,
    proposal_scores,
)
from dblast.reproduction.beyond.siblings import (
    accuracy_rows,
    accuracy_table,
    collect_siblings,
    continuations,
    prefix_ranks,
)
from dblast.reproduction.beyond.study import (
    best_within,
    branch_value,
    chosen_temperatures,
    goal_rows,
    goal_table,
    proposal_figure,
    proposal_rows,
    proposal_table,
    sampled_table,
    temperature_map,
)
from dblast.reproduction.demo import draw_tree
from dblast.reproduction.profiles import MAIN, TINY, get_profile
from dblast.sampling import SamplingSettings
from tests.helpers import assert_close, generator, random_log_prior, random_position_log_q, soft_distribution

# -- what is scored, and what is chosen ------------------------------------------------------------


def test_the_profile_scores_the_drafters_of_table_2():
    profile = get_profile("beyond")
    assert [plan.label for plan in profile.plans] == ["tiny", "smollm2"] and profile.notebooks == ("08",)
    for plan in profile.plans:
        base = get_profile("cpu").plan(plan.label)
        assert replace(plan, variants=base.variants, seeds=base.seeds) == base
        assert set(plan.variants) <= set(MAIN) and set(plan.seeds) <= set(base.seeds)


def test_every_proposal_is_scored_at_every_pair_of_temperatures():
    one, four = (every_call(TINY, variant) for variant in (MAIN[0], MAIN[3]))
    assert [call["proposal"] for call in one] == ["greedy_branch", "soft", "tree"]
    assert [call["proposal"] for call in four] == ["greedy_branch", "soft", "tree", "branches"]
    for call in four:
        assert call["category_temperatures"] == list(TINY.category_temperatures)
    assert four[1]["draft_temperatures"] == list(DRAFT_TEMPERATURES) and 0.0 in DRAFT_TEMPERATURES
    assert four[2]["nodes"] == [7, 14, 28, 56] == [7 * blocks for blocks in TREE_BLOCKS]


def cell_rows(values, proposal="soft", nodes=7, split="calibration"):
    """Calibration sums of one variant at (Z_T, T_d) pairs: passes for 100 tokens."""
    names = {
        "target": "toy",
        "method": "DBlast",
        "K": 4,
        "loss": "AL",
        "construction": "all_prefixes",
        "setting": "low",
    }
    return pd.DataFrame(
        [
            names
            | {"proposal": proposal, "nodes": nodes, "split": split, "seed": seed, "category_temperature": z}
            | {"draft_temperature": warm, "emitted": 100, "passes": passes}
            for (z, warm), per_seed in values.items()
            for seed, passes in enumerate(per_seed)
        ]
    )


def test_the_pair_with_the_fewest_passes_over_all_seeds_is_chosen_and_ties_go_to_the_smaller():
    soft = cell_rows({(0.2, 1.0): (50, 50), (0.2, 0.5): (40, 60), (1.0, 0.0): (30, 65), (1.0, 0.5): (65, 30)})
    held_out = cell_rows({(0.6, 2.0): (1, 1)}, split="held_out")
    tree = cell_rows({(z, np.nan): (50, 50 - z) for z in (0.0, 0.4)}, "tree", 14)
    chosen = choose_temperatures(pd.concat([soft, held_out, tree])).set_index("proposal")
    assert (chosen.category_temperature["soft"], chosen.draft_temperature["soft"]) == (1.0, 0.0)
    assert chosen.category_temperature["tree"] == 0.4 and np.isnan(chosen.draft_temperature["tree"])


def test_trees_of_one_temperature_are_scored_together():
    chosen = pd.DataFrame(
        {
            "proposal": ["tree", "tree", "tree", "soft", "greedy_branch"],
            "nodes": [7, 14, 28, 7, 7],
            "category_temperature": [0.6, 1.0, 0.6, 0.2, np.nan],
            "draft_temperature": [np.nan, np.nan, np.nan, 0.5, np.nan],
        }
    )
    assert chosen_calls(chosen) == [
        {"proposal": "greedy_branch", "category_temperatures": [1.0]},
        {"proposal": "soft", "category_temperatures": [0.2], "draft_temperatures": [0.5], "draft_top_k": 20},
        {"proposal": "tree", "category_temperatures": [0.6], "nodes": [7, 28]},
        {"proposal": "tree", "category_temperatures": [1.0], "nodes": [14]},
    ]


@pytest.fixture
def study(llama, make_drafter, make_trajectory, monkeypatch, tmp_path):
    """A plan whose target, drafters and texts are random and at hand; trained drafters are named by their stage."""
    plan = replace(TINY, label="toy", category_temperatures=(0.0, 1.0), seeds=(0, 1), parallel=False)
    plan = replace(plan, variants=(MAIN[0], MAIN[3]), drafter=replace(plan.drafter, block_length=3))
    texts = [make_trajectory(seed=seed) for seed in range(4)]

    def drafter(folder, target):
        k, seed = (int(part) for part in folder.name.split("-"))
        return make_drafter(llama, num_categories=k, seed=5 + seed)

    for module in (beyond_scores, beyond_siblings):
        monkeypatch.setattr(module, "open_target", lambda plan: llama)
        monkeypatch.setattr(module, "prepare_variant", lambda plan, v, seed, threads=None: tmp_path / f"{v.K}-{seed}")
        monkeypatch.setattr(module, "open_drafter", drafter)
        monkeypatch.setattr(module, "prepare_trajectories", lambda plan, setting: texts)
        monkeypatch.setattr(module, "calibration_ids", lambda plan: {"random-0"})
        monkeypatch.setattr(module, "variant_stage", lambda plan, v, seed: SimpleNamespace(key=f"{v.K}-{seed}"))
        monkeypatch.setattr(module, "trajectory_stage", lambda plan, setting: SimpleNamespace(key=setting))
    monkeypatch.setattr(beyond_scores, "prepare_variants", lambda plan: None)
    return plan, texts


def test_calibration_is_summed_and_held_out_texts_are_scored_at_what_it_chose(study, llama, make_drafter):
    plan, texts = study
    table = collect_proposals(plan)
    split = table.split == "calibration"
    assert set(table[split].prompt_id) == {ALL_PROMPTS} and set(table[~split].prompt_id) == {
        "random-1",
        "random-2",
        "random-3",
    }
    # Settings have the same texts here, and so the same numbers.
    per_cell = table[split].groupby(["setting", "K", "seed", "proposal"]).size()
    d, z = len(DRAFT_TEMPERATURES), 2
    for setting in ("high", "low"):
        assert per_cell[setting, 1, 0].to_dict() == {"greedy_branch": 1, "soft": d, "tree": 4}
        assert per_cell[setting, 4, 1].to_dict() == {"greedy_branch": z, "soft": z * d, "tree": 4 * z, "branches": z}
    chosen = choose_temperatures(table)
    rows = table[
        (table.setting == "low") & (table.K == 4) & (table.proposal == "tree") & (table.nodes == 12) & (table.seed == 1)
    ]
    mine = chosen[(chosen.setting == "low") & (chosen.K == 4) & (chosen.proposal == "tree") & (chosen.nodes == 12)]
    drafter, temperature = make_drafter(llama, num_categories=4, seed=6), mine.category_temperature.iloc[0]
    expected = score(drafter, texts[1:], [temperature], proposal="tree", nodes=[12])
    assert_close(rows[rows.split == "held_out"].passes.to_numpy(), expected.passes.to_numpy())
    calibration = score(drafter, texts[:1], [0.0, 1.0], proposal="tree", nodes=[12])
    assert_close(rows[rows.split == "calibration"].passes.to_numpy(), calibration.passes.to_numpy())
    # Found again, not computed again.
    beyond_scores.open_drafter = lambda *_: pytest.fail("scored again")
    pd.testing.assert_frame_equal(collect_proposals(plan), table)


def test_proposals_stand_in_one_table_with_what_they_verify(llama, make_drafter, make_trajectory):
    drafter = make_drafter(llama, num_categories=2)
    calls = [
        {"proposal": "greedy_branch", "category_temperatures": [1.0]},
        {"proposal": "branches", "category_temperatures": [1.0]},
    ]
    table = proposal_scores(drafter, [make_trajectory()], calls, torch.float32).set_index("proposal")
    assert table.nodes.to_dict() == {"greedy_branch": 3, "branches": 6} and table.drafted["greedy_branch"] == 3
    assert table.drafted["branches"] <= 6 and table.draft_temperature.isna().all()


# -- after a sibling -------------------------------------------------------------------------------


@pytest.mark.parametrize("branches", [1, 3])
def test_ranks_are_those_in_the_conditional_of_the_mixture(branches):
    rng = generator(branches)
    log_q = torch.stack([random_position_log_q(branches, 3, 5, rng) for _ in range(6)])
    log_q[0, :, 1, 2] = -torch.inf
    prior = torch.stack([random_log_prior(branches, rng) for _ in range(6)])
    columns = torch.randint(5, (6, 3), generator=rng)
    columns[0, 1], columns[1, 2] = 2, -1
    ranks = prefix_ranks(log_q, prior, columns)
    for row, column in enumerate(columns.tolist()):
        for slot, token in enumerate(column):
            if (row, slot) in ((0, 1), (0, 2), (1, 2)):
                assert ranks[row, slot] == 5  # never drafted, and nothing after it
                continue
            law = soft_distribution(log_q[row], prior[row], columns[row, :slot])
            assert ranks[row, slot] == (law > law[token]).sum()
    if branches == 1:
        alone = (log_q[2, 0, 2] > log_q[2, 0, 2, columns[2, 2]]).sum()
        assert ranks[2, 2] == alone, "one branch does not look back"


def test_continuations_are_counted_after_the_spine_and_after_its_first_sibling():
    ranks = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 2, 1, 0], [0, 4, 0, 0], [3, 9, 0, 0], [0, 0, 0, 0]])
    valid = torch.ones(6, 4, dtype=torch.bool)
    valid[5, 2:] = False
    found = continuations(ranks, valid)
    # Spine: after 0; 00; 0; 0; and 0 in the last (its third token is past the end).
    assert (found["spine"], found["spine_right"]) == (2 + 1 + 1 + 1, 1 + 0 + 0 + 1)
    # Siblings: 001 -> right, 1 -> right, 02 -> wrong, 3 -> wrong; 4 is no sibling.
    assert (found["sibling"], found["sibling_right"]) == (4, 2)


def test_siblings_are_counted_for_every_variant_seed_and_held_out_text(study):
    plan, texts = study
    counts = collect_siblings(plan)
    assert len(counts) == 2 * 2 * 3 * 3 and set(counts.prompt_id) == {"random-1", "random-2", "random-3"}
    assert (counts.spine_right <= counts.spine).all() and (counts.sibling_right <= counts.sibling).all()
    assert counts.sibling.sum() > 0 and counts.spine.sum() > 0
    toy = counts.assign(spine=4, spine_right=3, sibling=2, sibling_right=[i % 2 for i in range(len(counts))])
    rows = accuracy_rows(toy)
    assert len(rows) == 6 and rows.spine.tolist() == [75.0] * 6 and (rows.n == 3).all() and (rows.siblings == 12).all()
    table = accuracy_table(rows)
    assert table.display.loc[("toy", "K = 4, AL"), "low: spine"] == "75.0 ± 0.0" and "toy n = 3" in table.caption


# -- what a node costs -----------------------------------------------------------------------------


def test_the_best_size_yields_most_tokens_for_its_cost():
    accepted, cost = {3: 1.0, 6: 1.5, 12: 1.6}, {3: 1.0, 6: 1.2, 12: 2.0}
    assert best_fixed_size(accepted, cost) == 6
    assert best_fixed_size(accepted, dict.fromkeys(cost, 1.0)) == 12, "free nodes are all taken"
    assert best_fixed_size(dict.fromkeys(cost, 1.0), dict.fromkeys(cost, 1.0)) == 3, "of equals the smaller"


def test_roofline_is_flat_until_products_take_longer_than_reading():
    # 4e9 weights of 2 bytes at 2e12 B/s: 4 ms; two operations each at 4e14/s: 20 us a token.
    assert roofline(4e9, 1, 2e12, 4e14) == roofline(4e9, 200, 2e12, 4e14) == pytest.approx(4e-3)
    assert roofline(4e9, 400, 2e12, 4e14) == pytest.approx(8e-3)


def test_arithmetic_for_a_gpu_says_how_wide_a_pass_is_free():
    table = roofline_table([7, 56, 399])
    assert (table[["8 tokens", "57 tokens"]] == 1).all(axis=None) and table.loc[
        ("A100 80 GB", "Qwen3-4B"), "400 tokens"
    ] == 2.56
    assert table["free up to (tokens)"].tolist() == [156] * 3 + [295] * 3


def test_tokens_per_second_come_from_lengths_and_steps():
    names = [("none", 0, 10.0), ("tree", 7, 12.0), ("tree", 14, 16.0)]
    widths = pd.DataFrame(
        {"target": "toy", "proposal": kind, "nodes": nodes, "prompt": 1, "part": "bare" if kind == "none" else "step"}
        | {"milliseconds": ms}
        for kind, nodes, ms in names
    )
    scores = pd.DataFrame({"target": "toy", "setting": "low", "method": "DFlash", "proposal": "tree", "nodes": [7, 14]})
    rows = cost_rows(widths, scores.assign(accepted_length=[1.0, 1.4]))
    assert rows.tokens_per_second.tolist() == pytest.approx([2000 / 12, 150.0]) and rows.best.tolist() == [True, False]
    assert rows.over_plain.tolist() == pytest.approx([20 / 12, 1.5])


def test_widths_are_timed_for_the_target_alone_a_block_and_every_tree(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=2)
    prompts = [torch.arange(4, 24), torch.arange(5, 27)]
    widths = measure_widths(llama, drafter, prompts, [3, 6], repeats=3).assign(target="toy")
    kinds = widths.groupby("proposal").nodes.unique().map(sorted).to_dict()
    assert kinds == {"none": [0, 3, 6], "greedy_branch": [3], "tree": [3, 6]}
    assert set(widths[widths.proposal == "tree"].part) == {*TREE_PARTS, "step"} and set(widths.prompt) == {1, 2}
    rows = width_rows(widths)
    assert len(rows) == 6 and (rows.milliseconds > 0).all()
    assert rows[(rows.proposal == "none") & (rows.nodes == 0)].relative.iloc[0] == 1


def test_speed_is_tokens_over_seconds_beside_plain_sampling():
    rows = []
    for i, base in enumerate((1.0, 3.0, 2.0)):
        names = {"target": "toy", "setting": "low", "prompt_id": f"p{i}", "tokens": 60}
        rows.append(names | {"method": "plain", "proposal": "none", "nodes": 0, "seconds": base, "passes": 60})
        rows.append(names | {"method": "DFlash", "proposal": "tree", "nodes": 7, "seconds": base / 1.5, "passes": 40})
    (row,) = speed_rows(pd.DataFrame(rows)).itertuples()
    assert (row.accepted_length, row.tokens_per_second, row.over_plain) == pytest.approx((0.5, 45.0, 1.5))
    assert (row.ci_low, row.ci_high) == pytest.approx((1.5, 1.5)), "paired by prompt"


def test_the_picture_shows_the_way_that_every_pass_went(llama, make_drafter, tokenizer):
    drafter = make_drafter(llama, num_categories=2)
    options = {"mode": "tree", "nodes": 9, "category_temperature": 0.7}
    answer = generate(
        llama, drafter, [[1, 7, 8]], SamplingSettings(0.6), max_new_tokens=40, eos_token_ids=(), generator=generator(1), **options
    )  # fmt: skip
    new = answer.tokens[0].tolist()
    for number, step in enumerate(answer.steps[0]):
        lines = draw_tree(llama, drafter, answer, 9, 0.7, number).splitlines()
        own = new[step.position - 3 + step.emitted - 1]
        assert lines[0].startswith(f"pass {number + 1} of ") and lines[-1] == f"accepted {step.accepted}, 9 nodes"
        assert sum("●" in line for line in lines) == step.accepted
        assert [line.split("⇒ ")[1] for line in lines if "⇒" in line] == [
            f"{tokenizer.decode([own])!r} drawn by the target"
        ]
    most = max(answer.steps[0], key=lambda step: step.emitted).accepted
    assert most > 1 and draw_tree(llama, drafter, answer, 9, 0.7).endswith(f"accepted {most}, 9 nodes")


# -- tables and figure -----------------------------------------------------------------------------

#: Passes relative to K = 1 NLL greedy, by proposal and size; K = 4 takes 0.9 and AL 0.98 of that.
FACTORS = {("greedy_branch", 7): 1.0, ("soft", 7): 0.95, ("tree", 7): 0.9, ("tree", 14): 0.8, ("tree", 28): 0.75}


def toy_scores(targets=("tiny",)):
    """Held-out rows of every cell for 16 prompts of two tasks, and calibration sums that say the same."""
    rng, rows = np.random.default_rng(0), []
    passes = rng.uniform(20, 30, 16)
    for target in targets:
        for variant in MAIN:
            names = {"target": target, "method": variant.method, "K": variant.K, "loss": variant.loss, "seed": 0}
            names |= {"construction": "all_prefixes", "anchor_accepted": 1.0, "anchors": 1}
            cells = FACTORS | ({("branches", 28): 0.85} if variant.K > 1 else {})
            for setting in ("high", "low"):
                for (proposal, nodes), factor in cells.items():
                    factor = factor * (0.9 if variant.K > 1 else 1.0) * (0.98 if variant.loss == "AL" else 1.0)
                    one = names | {"setting": setting, "proposal": proposal, "nodes": nodes, "drafted": nodes - 0.5}
                    one |= {"category_temperature": 0.6 if variant.K > 1 else np.nan, "emitted": 60}
                    one["draft_temperature"] = 0.5 if proposal == "soft" else np.nan
                    for i, value in enumerate(passes):
                        task = ("chat", "code")[i % 2]
                        rows.append(
                            one | {"split": "held_out", "prompt_id": f"p{i}", "task": task, "passes": value * factor}
                        )
                    rows.append(
                        one | {"split": "calibration", "prompt_id": ALL_PROMPTS, "task": "chat", "passes": 25 * factor}
                    )
    return pd.DataFrame(rows), passes


def macro(passes, factor):
    return np.mean([(60 * 8 - part.sum()) / part.sum() for part in (passes[::2] * factor, passes[1::2] * factor)])


def test_rows_and_table_have_gains_over_the_paper_s_baseline():
    scores, passes = toy_scores()
    rows = proposal_rows(scores)
    index = rows.set_index(["setting", "proposal", "nodes", "method"])
    assert len(rows) == 2 * (4 * 5 + 2)
    row = index.loc["low", "tree", 28, "DFlash+DS"]
    assert_close(row.accepted_length, macro(passes, 0.75 * 0.9))
    assert_close(row.gain, 100 * (macro(passes, 0.75 * 0.9) / macro(passes, 1.0) - 1))
    assert row.gain_low < row.gain < row.gain_high and row.n == 16 and row.drafted == 27.5
    display = proposal_table(rows, "tiny").display
    assert display.loc[("greedy block", 7, "K = 1, NLL"), "low: gain (%)"] == ""
    assert display.loc[("tree", 28, "K = 4, NLL"), "low: gain (%)"].startswith(f"{row.gain:+.0f} [")
    assert branch_value(rows).loc[("tiny", "NLL", "low"), 28] == pytest.approx(
        100 * (macro(passes, 0.675) / macro(passes, 0.75) - 1), abs=0.06
    )


def test_the_sampled_columns_say_what_sampling_and_the_loss_are_worth():
    scores, passes = toy_scores()
    display = sampled_table(scores, "tiny").display
    line = display.loc[("low", "DBlast")]
    assert line["sampled"].startswith(f"{macro(passes, 0.95 * 0.9 * 0.98):.2f} ±") and (line.Z_T, line.T_d) == (
        "0.6",
        "0.5",
    )
    worth = 100 * (macro(passes, 0.95 * 0.9 * 0.98) / macro(passes, 0.95 * 0.9) - 1)
    assert line["AL over NLL, sampled (%)"].startswith(f"{worth:+.1f} [")
    assert display.loc[("low", "DFlash"), "AL over NLL, sampled (%)"] == "" == display.loc[("low", "DFlash"), "Z_T"]


def test_the_best_is_chosen_by_calibration_and_held_out_rows_decide_the_goal():
    scores, passes = toy_scores(("tiny", "smollm2"))
    assert best_within(scores[scores.target == "tiny"], "low", 7) == ("DBlast", "tree", 7)
    # Held-out rows do not choose.
    held = (scores.split == "held_out") & (scores.proposal == "soft")
    assert best_within(scores.assign(passes=scores.passes.where(~held, 1.0)), "low", 7) == ("DBlast", "tree", 7)
    goals = goal_rows(scores)
    row = goals[
        (goals.target == "tiny") & goals.claim.str.contains("at most 7 tokens") & goals.claim.str.contains("low")
    ].iloc[0]
    assert_close(row.ours, 100 * (macro(passes, 0.9 * 0.9 * 0.98) / macro(passes, 1.0) - 1))
    assert row.goal == 30 and row.how == "tree of 7, DBlast"
    assert row.reached == ("yes" if row.ci_low > 30 else "no" if row.ci_high < 30 else "open")
    assert goals[(goals.target == "smollm2") & goals.claim.str.startswith("Trees of the mixture")].goal.isna().all()
    table = goal_table(goals)
    assert list(table.display) == ["goal", "tiny", "smollm2"]
    assert (
        table.display.loc[row.claim, "goal"] == "tiny 30, smollm2 70"
        and "(tree of 7, DBlast)" in table.display.loc[row.claim, "tiny"]
    )


def test_a_plan_without_the_al_loss_has_the_rows_that_it_can_have():
    scores, _ = toy_scores()
    scores = scores[scores.loss == "NLL"]
    goals = goal_rows(scores)
    assert not goals.claim.str.contains("AL loss").any() and goals.claim.str.contains("Trees of the mixture").any()
    assert list(sampled_table(scores, "tiny").display.index.get_level_values("method").unique()) == [
        "DFlash",
        "DFlash+DS",
    ]
    assert len(branch_value(proposal_rows(scores))) == 2


def test_temperatures_are_shown_by_cell_and_as_a_map():
    scores, _ = toy_scores()
    table = chosen_temperatures(scores)
    assert (
        table.loc[("tiny", "soft", 7, "DBlast"), "low"] == "0.6, 0.5"
        and table.loc[("tiny", "tree", 7, "DFlash"), "low"] == "–"
    )
    grid = temperature_map(scores, "tiny", "low", "DBlast")
    assert grid.shape == (1, 1) and grid.loc[0.6, 0.5] == round(
        (60 - 25 * 0.9 * 0.98 * 0.95) / (25 * 0.9 * 0.98 * 0.95), 2
    )


def test_the_figure_has_a_panel_for_every_target_and_setting():
    rows = proposal_rows(toy_scores(("tiny", "smollm2"))[0])
    figure = proposal_figure(rows)
    assert len(figure.axes) == 4 and figure.axes[0].get_title() == "tiny, high (T=0.7)"
    plt.close(figure)
