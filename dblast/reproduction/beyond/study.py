"""Notebook 08's table, figure and goals, from the scores of :mod:`dblast.reproduction.beyond.scores`.

The base of every gain is the paper's own: K = 1, fine-tuned with NLL, one greedy block of b tokens.
"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dblast.reproduction.beyond.scores import CELL, TEMPERATURES, choose_temperatures
from dblast.reproduction.bootstrap import bootstrap_gain
from dblast.reproduction.captions import seeds_in_words
from dblast.reproduction.estimates import Estimate, accepted_length
from dblast.reproduction.plotting import METHOD_COLOURS, SETTING_LABELS, panel_grid
from dblast.reproduction.tables import (
    METHODS,
    SETTINGS_ORDER,
    Table,
    bracketed,
    length_columns,
    paired_gain,
    plus_minus,
)

#: Proposals in the order of tables, and what they are called.
PROPOSAL_WORDS = {
    "greedy_branch": "greedy block",
    "soft": "sampled block",
    "branches": "trie of the branches",
    "tree": "tree",
}
#: Goals for low determinism: gain over the base in %, by blocks of b tokens that a pass may verify, and target.
GOALS = {1: {"tiny": 30, "smollm2": 70}, 4: {"tiny": 60, "smollm2": 130}}
#: What dependence should add to a tree of the same size, tiny, per cent.
TREE_GOAL = 12


def held_out(scores: pd.DataFrame) -> pd.DataFrame:
    """Held-out rows, each at the temperatures that calibration chose."""
    return scores[scores.split == "held_out"]


def pick(rows: pd.DataFrame, setting: str, method: str, proposal: str, nodes: int) -> pd.DataFrame:
    """The rows of one cell."""
    same = (rows.setting == setting) & (rows.method == method) & (rows.proposal == proposal) & (rows.nodes == nodes)
    return rows[same]


def block_length(rows: pd.DataFrame) -> int:
    """b of one target's rows."""
    return int(rows[rows.proposal == "greedy_branch"].nodes.iloc[0])


def proposal_rows(scores: pd.DataFrame) -> pd.DataFrame:
    """Every proposal, size, variant and setting: accepted length, and the paired gain over K = 1 NLL greedy.

    Returns:
        ``target, setting, proposal, nodes, method, K, loss``, ``drafted`` (mean tokens verified a pass),
        ``category_temperature, draft_temperature, accepted_length, standard_error, seed_spread``, ``gain`` (per cent,
        ``gain_low`` and ``gain_high``: paired bootstrap over prompts), ``seeds`` and ``n``.
    """
    rows = []
    for target in dict.fromkeys(scores.target):
        mine = held_out(scores[scores.target == target])
        b = block_length(mine)
        for setting in [s for s in SETTINGS_ORDER if s in set(mine.setting)]:
            base = pick(mine, setting, "DFlash", "greedy_branch", b)
            for proposal in PROPOSAL_WORDS:
                for nodes in sorted(set(mine[mine.proposal == proposal].nodes)):
                    for method in METHODS:
                        ours = pick(mine, setting, method, proposal, nodes)
                        if ours.empty:
                            continue
                        gain = bootstrap_gain(ours, base, macro=True)
                        names = {
                            "target": target,
                            "setting": setting,
                            "proposal": proposal,
                            "nodes": int(nodes),
                            "method": method,
                        }
                        names |= {"K": ours.K.iloc[0], "loss": ours.loss.iloc[0], "drafted": ours.drafted.mean()}
                        names |= length_columns(ours) | {"draft_temperature": ours.draft_temperature.iloc[0]}
                        names |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
                        rows.append(names | {"seeds": ours.seed.nunique()})
    return pd.DataFrame(rows)


def proposal_table(rows: pd.DataFrame, target: str) -> Table:
    """One target's proposals, the settings side by side: accepted length, and the gain with its interval."""
    mine = rows[rows.target == target]
    lines: dict[tuple, dict[str, str]] = {}
    for row in mine.to_dict("records"):
        name = PROPOSAL_WORDS[row["proposal"]]
        line = lines.setdefault((name, row["nodes"], f"K = {row['K']}, {row['loss']}"), {})
        line[row["setting"]] = f"{row['accepted_length']:.2f}"
        is_base = (row["method"], row["proposal"]) == ("DFlash", "greedy_branch")
        line[f"{row['setting']}: gain (%)"] = (
            "" if is_base else f"{row['gain']:+.0f} [{row['gain_low']:+.0f}, {row['gain_high']:+.0f}]"
        )
    display = pd.DataFrame.from_dict(lines, orient="index")
    display.index = pd.MultiIndex.from_tuples(display.index, names=["proposal", "tokens", "drafter"])
    return Table(
        f"proposals_{target}",
        f"Proposals ({target})",
        f"Accepted length without bonus token by proposal, tokens that a pass may verify, and drafter, held-out prompts "
        f"(n = {mine.n.max()}), {seeds_in_words(mine.seeds.max())}, Z_T and T_d chosen together on the calibration split; "
        "gains over the greedy block of K = 1, NLL, in % with 95 % intervals over prompts (paired bootstrap).",
        mine,
        display,
    )


def sampled_table(scores: pd.DataFrame, target: str) -> Table:
    """Table 2's four variants with greedy and with sampled blocks, and what the AL loss is worth in each."""
    mine = held_out(scores[scores.target == target])
    b, lines, rows = block_length(mine), {}, []
    for setting in [s for s in SETTINGS_ORDER if s in set(mine.setting)]:
        for method in METHODS:
            greedy, sampled = (pick(mine, setting, method, name, b) for name in ("greedy_branch", "soft"))
            if greedy.empty:
                continue
            gain = bootstrap_gain(sampled, greedy, macro=True)
            line = {
                name: plus_minus(accepted_length(side, macro=True))
                for name, side in (("greedy", greedy), ("sampled", sampled))
            }
            line["sampled over greedy (%)"] = bracketed(gain)
            names = {"setting": setting, "method": method}
            rows.append(
                names | length_columns(sampled) | {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
            )
            if method in ("DFlash+AL", "DBlast"):
                other = "DFlash" if method == "DFlash+AL" else "DFlash+DS"
                for name, side in (("greedy", greedy), ("sampled", sampled)):
                    base = pick(mine, setting, other, "soft" if name == "sampled" else "greedy_branch", b)
                    line[f"AL over NLL, {name} (%)"] = bracketed(bootstrap_gain(side, base, macro=True))
            z, warm = (sampled[name].iloc[0] for name in TEMPERATURES)
            line |= {"Z_T": "" if math.isnan(z) else f"{z:.1f}", "T_d": f"{warm:.1f}"}
            lines[setting, method] = line
    order = [
        "greedy",
        "sampled",
        "sampled over greedy (%)",
        "Z_T",
        "T_d",
        "AL over NLL, greedy (%)",
        "AL over NLL, sampled (%)",
    ]
    display = pd.DataFrame.from_dict(lines, orient="index")
    display = display[[name for name in order if name in display]].fillna("")
    display.index = pd.MultiIndex.from_tuples(display.index, names=["determinism", "method"])
    return Table(
        f"table2_sampled_{target}",
        f"Table 2 with sampled blocks ({target})",
        f"Accepted length without bonus token, held-out prompts (n = {mine.prompt_id.nunique()}), "
        f"{seeds_in_words(mine.seed.nunique())}, ± one standard error over prompts; gains in % with 95 % intervals over prompts "
        "(paired bootstrap). Z_T and T_d of sampled blocks, chosen together on the calibration split; T_d = 0 is the greedy block.",
        pd.DataFrame(rows),
        display,
    )


def best_within(scores: pd.DataFrame, setting: str, most: int) -> tuple[str, str, int]:
    """Method, proposal and size with the largest calibrated accepted length among those that verify at most ``most`` tokens."""
    mine = scores[(scores.split == "calibration") & (scores.setting == setting) & (scores.nodes <= most)]
    sums = mine.groupby([*CELL, *TEMPERATURES], dropna=False, observed=True)[["emitted", "passes"]].sum().reset_index()
    best = sums.loc[(sums.emitted / sums.passes).idxmax()]
    return best.method, best.proposal, int(best.nodes)


def _verdict(estimate: Estimate, goal: float) -> str:
    low, high = estimate.interval
    return "yes" if low > goal else "no" if high < goal else "open"


def goal_rows(scores: pd.DataFrame) -> pd.DataFrame:
    """What was asked for, ours with a 95 % interval, and whether the whole interval lies beyond it.

    Errors are over prompts (paired) and, where there are several, fine-tuning seeds.

    Returns:
        ``claim, target, goal, ours, ours_error, ci_low, ci_high, reached, how, seeds, n``; "yes" where the interval lies
        above the goal, "no" below, "open" across it. Goals of 0 ask for the sign alone.
    """
    rows = []
    for target in dict.fromkeys(scores.target):
        part = scores[scores.target == target]
        mine = held_out(part)
        b, settings = block_length(mine), [s for s in SETTINGS_ORDER if s in set(mine.setting)]

        def add(
            claim: str, goal: float | None, ours: pd.DataFrame, base: pd.DataFrame, how: str = "", name: str = target
        ) -> None:
            if ours.empty or base.empty:
                return  # a plan that does not train both
            estimate = paired_gain(ours, base)
            low, high = estimate.interval
            rows.append(
                {
                    "claim": claim,
                    "target": name,
                    "goal": goal,
                    **estimate.columns("ours"),
                    "ci_low": low,
                    "ci_high": high,
                    "reached": _verdict(estimate, goal or 0.0),
                    "how": how,
                    "seeds": estimate.seeds,
                    "n": estimate.n,
                }
            )

        for blocks, goals in GOALS.items():
            for setting in settings:
                method, proposal, nodes = best_within(part, setting, blocks * b)
                base = pick(mine, setting, "DFlash", "greedy_branch", b)
                goal = goals.get(target) if setting == "low" else None
                claim = f"The best of at most {blocks * b} tokens over DFlash's greedy block, {setting} determinism (%)"
                how = f"{PROPOSAL_WORDS[proposal]} of {nodes}, {method}"
                add(claim, goal, pick(mine, setting, method, proposal, nodes), base, how)
        for nodes in sorted(set(mine[mine.proposal == "tree"].nodes)):
            for setting in settings:
                sides = (pick(mine, setting, method, "tree", nodes) for method in ("DFlash+DS", "DFlash"))
                goal = TREE_GOAL if target == "tiny" else None
                add(
                    f"Trees of the mixture over trees of one branch, NLL, {nodes} nodes, {setting} determinism (%)",
                    goal,
                    *sides,
                )
        for k, pair in ((1, ("DFlash+AL", "DFlash")), (4, ("DBlast", "DFlash+DS"))):
            for setting in settings:
                sides = (pick(mine, setting, method, "soft", b) for method in pair)
                add(f"The AL loss over NLL in sampled blocks, K = {k}, {setting} determinism (%)", None, *sides)
        for setting in settings:
            sides = pick(mine, setting, "DFlash", "soft", b), pick(mine, setting, "DFlash+DS", "greedy_branch", b)
            add(
                f"A draft temperature alone (K = 1) over four greedy branches, NLL, {setting} determinism (%)",
                None,
                *sides,
            )
            sides = pick(mine, setting, "DFlash", "tree", b), pick(mine, setting, "DFlash", "soft", b)
            add(f"A tree of b nodes over one sampled block, K = 1, NLL, {setting} determinism (%)", None, *sides)
    return pd.DataFrame(rows)


def goal_table(goals: pd.DataFrame) -> Table:
    """One row a claim, the targets side by side, as on the front page."""

    def cell(row) -> str:
        ours, low, high = (f"{round(x, 1) + 0.0:.1f}" for x in (row.ours, row.ci_low, row.ci_high))
        return f"{ours} [{low}, {high}] {row.reached}" + (f" ({row.how})" if row.how else "")

    def goal(part: pd.DataFrame) -> str:
        asked = part.dropna(subset="goal")
        return ", ".join(f"{row.target} {row.goal:g}" for row in asked.itertuples())

    claims = list(dict.fromkeys(goals.claim))
    lines = {
        claim: {"goal": goal(goals[goals.claim == claim])}
        | {row.target: cell(row) for row in goals[goals.claim == claim].itertuples()}
        for claim in claims
    }
    return Table(
        "goals",
        "Goals",
        "Ours in % with its 95 % interval (over prompts and fine-tuning seeds, where there are several), then whether the whole "
        "interval is above the goal (yes), below (no) or neither (open); where no goal was set the sign is asked for. The best "
        "proposal was chosen on the calibration split, and is named.",
        goals,
        pd.DataFrame.from_dict(lines, orient="index").fillna("").rename_axis("claim"),
    )


#: Marks of the proposals in the figure.
_MARKS = {"greedy_branch": "o", "soft": "D", "branches": "^", "tree": "."}


def proposal_figure(rows: pd.DataFrame) -> Figure:
    """Accepted length against the tokens that a pass verifies: a panel a target and setting, a colour a drafter.

    Trees of growing size are lines; blocks, greedy and sampled, and the trie of the branches are marks at what they verify.
    Bars are one standard error over prompts.
    """
    targets = list(dict.fromkeys(rows.target))
    settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
    figure, panels = panel_grid(len(targets), len(settings), 2.3 * len(targets) + 0.6, sharex=True)
    for line, target in zip(panels, targets, strict=True):
        for axes, setting in zip(line, settings, strict=True):
            part = rows[(rows.target == target) & (rows.setting == setting)]
            for place, method in enumerate(METHODS):
                for proposal, mark in _MARKS.items():
                    mine = part[(part.method == method) & (part.proposal == proposal)]
                    # Beside each other, or one's marks would hide the other's.
                    x = mine.drafted * 1.03 ** (place - 1.5)
                    axes.errorbar(
                        x, mine.accepted_length, mine.standard_error, color=METHOD_COLOURS[method], marker=mark, ms=4 + 2 * (mark == "."),
                        ls=("--" if "AL" in method or method == "DBlast" else "-") if proposal == "tree" else "none",
                        lw=1.1, elinewidth=0.7, mfc="white" if proposal == "greedy_branch" else None,
                    )  # fmt: skip
            axes.set_xscale("log", base=2)
            ticks = sorted(set(part[part.proposal == "tree"].nodes))
            axes.set_xticks(ticks, [str(n) for n in ticks])
            axes.minorticks_off()
            axes.set(title=f"{target}, {SETTING_LABELS[setting]}".replace("\n", " "))
        line[0].set_ylabel("accepted length (tokens)")
    for axes in panels[-1]:
        axes.set_xlabel("tokens verified per pass")
    grey = {"color": "#777777", "ls": "none"}
    handles = [Line2D([], [], color=METHOD_COLOURS[m], lw=2, label=m) for m in METHODS]
    handles += [
        Line2D(
            [], [], marker=mark, mfc="white" if name == "greedy_branch" else None, label=PROPOSAL_WORDS[name], **grey
        )
        for name, mark in _MARKS.items()
        if name != "tree"
    ]
    handles.append(Line2D([], [], color="#777777", marker=".", label="trees"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def temperature_map(scores: pd.DataFrame, target: str, setting: str, method: str) -> pd.DataFrame:
    """Accepted length of sampled blocks on the calibration split at every (Z_T, T_d), seeds pooled: rows Z_T, columns T_d."""
    rows = scores[(scores.split == "calibration") & (scores.proposal == "soft") & (scores.target == target)]
    rows = rows[(rows.setting == setting) & (rows.method == method)].fillna({"category_temperature": 1.0})
    sums = rows.groupby(TEMPERATURES)[["emitted", "passes"]].sum()
    return ((sums.emitted - sums.passes) / sums.passes).unstack("draft_temperature").round(2)


def branch_value(rows: pd.DataFrame) -> pd.DataFrame:
    """What four branches add to a tree, per cent over one branch, by size: a row a target, loss and setting, a column a size."""
    trees = (
        rows[rows.proposal == "tree"]
        .set_index(["target", "loss", "setting", "nodes", "K"])
        .accepted_length.unstack("K")
    )
    table = (100 * (trees[4] / trees[1] - 1)).dropna().round(1).unstack("nodes")
    order = [(t, x, s) for t in dict.fromkeys(rows.target) for x in ("NLL", "AL") for s in SETTINGS_ORDER]
    return table.loc[[key for key in order if key in table.index]]


def chosen_temperatures(scores: pd.DataFrame) -> pd.DataFrame:
    """The chosen (Z_T, T_d), the settings side by side."""
    chosen = choose_temperatures(scores)
    words = [
        f"{'–' if math.isnan(z) else format(z, 'g')}" + ("" if math.isnan(t) else f", {t:g}")
        for z, t in zip(chosen.category_temperature, chosen.draft_temperature, strict=True)
    ]
    table = chosen.assign(chosen=words).pivot(
        index=["target", "proposal", "nodes", "method"], columns="setting", values="chosen"
    )
    return table[[s for s in SETTINGS_ORDER if s in table]].rename_axis(columns=None)
