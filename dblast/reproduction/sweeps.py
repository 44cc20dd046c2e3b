"""Notebook 07: one value varied at a time around Table 2's drafters, and what each value is worth.

A profile of sweeps has a plan for every value, labelled by it; the plan it varies around
stands for its own value. All plans of one target are scored on the same texts, so that
comparisons between values are paired by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.figure import Figure

from dblast.errors import DBlastError
from dblast.reproduction.captions import error_words, seeds_in_words
from dblast.reproduction.estimates import Estimate, decided, held_out_at_chosen
from dblast.reproduction.plans import Plan, Profile
from dblast.reproduction.plotting import METHOD_COLOURS, SETTING_LABELS, interval_bars, legend_below, panel_grid
from dblast.reproduction.tables import METHODS, SETTINGS_ORDER, Table, length_columns, paired_gain, per_cent, plus_minus

#: What the swept columns are called in tables.
VALUE_WORDS = {"tau": "threshold τ", "b": "block length b", "trained": "determinism of the training text"}


def threshold(plan: Plan) -> float:
    """The threshold tau of the AL loss (eq. 15)."""
    return plan.finetune.tau


def block_length(plan: Plan) -> int:
    """The draft block length b."""
    return plan.drafter.block_length


def training_setting(plan: Plan) -> str:
    """The sampling setting of the responses that variants are fine-tuned on."""
    return plan.data.training_setting


def swept(profile: Profile, base: str, read: Callable[[Plan], object]) -> dict[object, str]:
    """The labels of a sweep's plans by value, in order: those of ``base``'s target whose value is another, and ``base``.

    Raises:
        DBlastError: no plan varies this value, or two plans have the same one.
    """
    centre = profile.plan(base)
    own = read(centre)
    found = {own: base}
    for plan in profile.plans:
        if plan.target == centre.target and read(plan) != own:
            if read(plan) in found:
                raise DBlastError(f"profile {profile.name!r} has two plans with the value {read(plan)!r}")
            found[read(plan)] = plan.label
    if len(found) < 2:
        raise DBlastError(f"no plan of profile {profile.name!r} varies this value of {base!r}")
    if isinstance(own, str):
        return {value: found[value] for value in SETTINGS_ORDER if value in found}
    return dict(sorted(found.items()))


def sweep_rows(scores: pd.DataFrame, labels: dict[object, str], base: object, name: str) -> pd.DataFrame:
    """Macro-averaged accepted length by value, method and evaluation setting, with paired gains.

    Only fine-tuning seeds that all values have are used.

    Args:
        scores: of all plans, from :func:`dblast.reproduction.experiments.collect_scores`.
        labels: from :func:`swept`.
        base: the value that ``over_base`` compares with.
        name: what the value is called: a column of the result.

    Returns:
        ``name, setting, method, category_temperature, accepted_length, standard_error, seed_spread``, ``over_base``
        (per cent over the same method at ``base``) and ``gain`` (per cent over DFlash at the same value; NaN where it
        was not trained), each with its ``_error`` over prompts (paired) and fine-tuning seeds and the ends of its 95 %
        interval, ``_low`` and ``_high``; ``seeds`` and ``n`` prompts.

    Raises:
        DBlastError: a plan without scores, no seed in common, or ``base`` is not a value of the sweep.
    """
    if base not in labels:
        raise DBlastError(f"{base!r} is not a value of this sweep; its values: {', '.join(map(str, labels))}")
    if missing := set(labels.values()) - set(scores.target):
        raise DBlastError(f"no scores of {sorted(missing)[0]!r}")
    mine = scores[scores.target.isin(labels.values())]
    shared = set.intersection(*(set(part.seed) for _, part in mine.groupby("target")))
    if not shared:
        raise DBlastError("the values of this sweep have no fine-tuning seed in common")
    chosen = held_out_at_chosen(mine[mine.seed.isin(shared)])
    settings = [s for s in SETTINGS_ORDER if s in set(chosen.setting)]
    nothing = Estimate(float("nan"), float("nan"), 0)

    def pick(value: object, setting: str, method: str) -> pd.DataFrame:
        return chosen[(chosen.target == labels[value]) & (chosen.setting == setting) & (chosen.method == method)]

    rows = []
    for value in labels:
        for setting in settings:
            dflash = pick(value, setting, "DFlash")
            for method in METHODS:
                ours = pick(value, setting, method)
                if ours.empty:
                    continue
                other = pick(base, setting, method)
                over = paired_gain(ours, other) if value != base and len(other) else nothing
                gain = paired_gain(ours, dflash) if method != "DFlash" and len(dflash) else nothing
                rows.append(
                    {
                        name: value,
                        "setting": setting,
                        "method": method,
                        **length_columns(ours),
                        **over.columns("over_base"),
                        **gain.columns("gain"),
                        "seeds": ours.seed.nunique(),
                    }
                )
    return pd.DataFrame(rows)


def loss_gains(scores: pd.DataFrame, labels: dict[object, str], name: str) -> pd.DataFrame:
    """What the AL loss is worth over NLL with as many categories, by value.

    Args:
        scores, labels, name: as in :func:`sweep_rows`.

    Returns:
        For every K that was trained with both, ``name, K, setting, gain`` (per cent), ``gain_error`` over prompts (paired)
        and fine-tuning seeds, the 95 % interval ``gain_low, gain_high``, ``seeds`` and ``n``.
    """
    rows = []
    for value, label in labels.items():
        chosen = held_out_at_chosen(scores[scores.target == label])
        for k in sorted(set(chosen.K)):
            for setting in [s for s in SETTINGS_ORDER if s in set(chosen.setting)]:
                part = chosen[(chosen.K == k) & (chosen.setting == setting)]
                ours, base = part[part.loss == "AL"], part[part.loss == "NLL"]
                if ours.empty or base.empty:
                    continue
                gain = paired_gain(ours, base)
                names = {name: value, "K": k, "setting": setting}
                rows.append(names | gain.columns("gain") | {"seeds": gain.seeds, "n": gain.n})
    return pd.DataFrame(rows)


def sweep_table(rows: pd.DataFrame, name: str, title: str, what: str, against: str = "over_base") -> Table:
    """A line for every value and method: accepted length at each setting, and one of the gains.

    Args:
        rows: from :func:`sweep_rows`.
        name: of the table's files; the swept column is the first of ``rows``.
        what: what the gain is over, in words.
        against: "over_base" or "gain".
    """
    value, seeds = rows.columns[0], rows.seeds.max()
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows.to_dict("records"):
        line = lines.setdefault((row[value], row["method"]), {})
        line[row["setting"]] = plus_minus(Estimate(row["accepted_length"], row["standard_error"], row["n"]))
        gain = Estimate(row[against], row[f"{against}_error"], row["n"])
        line[f"{row['setting']}: {what}"] = "" if pd.isna(row[against]) else per_cent(gain)
    display = pd.DataFrame.from_dict(lines, orient="index")
    display.index = pd.MultiIndex.from_tuples(display.index, names=[VALUE_WORDS.get(value, value), "method"])
    return Table(
        name,
        title,
        f"Accepted length without bonus token by {VALUE_WORDS.get(value, value)}, held-out prompts (n = {rows.n.max()}), "
        f"{seeds_in_words(seeds)}, Z_T chosen on the calibration split; gains {what}. {error_words(seeds)}",
        rows,
        display,
    )


def sweep_figure(rows: pd.DataFrame, label: str, even: bool = False) -> Figure:
    """Accepted length against the swept value: a panel a setting, a line a method, bars of one standard error.

    Args:
        rows: from :func:`sweep_rows`.
        label: of the horizontal axis, with its unit.
        even: values at even distances, whatever their size.
    """
    value = rows.columns[0]
    values = list(dict.fromkeys(rows[value]))
    settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
    figure, panels = panel_grid(1, len(settings), 2.6)
    for axes, setting in zip(panels[0], settings, strict=True):
        for marker, method in zip("osD^", METHODS, strict=True):
            part = rows[(rows.setting == setting) & (rows.method == method)]
            if part.empty:
                continue
            places = [values.index(v) for v in part[value]] if even else part[value]
            # The standard error over prompts is that of the level; a line's own ups and downs are paired.
            axes.errorbar(
                places, part.accepted_length, yerr=part.standard_error, marker=marker, ms=4, lw=1.2, elinewidth=0.8,
                color=METHOD_COLOURS[method], label=method,
            )  # fmt: skip
        axes.set_xticks(range(len(values)) if even else values, [f"{v:g}" for v in values])
        axes.set(title=SETTING_LABELS[setting].replace("\n", " "), xlabel=label)
    panels[0, 0].set_ylabel("accepted length (tokens)")
    figure.suptitle(f"n = {rows.n.max()} prompts, {seeds_in_words(rows.seeds.max())}")
    legend_below(figure, panels[0, 0])
    return figure


def training_setting_figure(rows: pd.DataFrame, trained: str) -> Figure:
    """What training on another setting's text changes: a panel a target, a point a method and evaluation setting.

    Args:
        rows: from :func:`sweep_rows`, one frame of several targets with a column ``target``.
        trained: the setting that was trained on; ``over_base`` is what it is worth.
    """
    targets = list(dict.fromkeys(rows.target))
    settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
    figure, panels = panel_grid(1, len(targets), 2.8)
    for axes, target in zip(panels[0], targets, strict=True):
        part = rows[(rows.target == target) & (rows.trained == trained)]
        for place, (marker, method) in enumerate(zip("osD^", METHODS, strict=True)):
            mine = part[part.method == method].set_index("setting").reindex(settings)
            x = [i + 0.14 * (place - 1.5) for i in range(len(settings))]
            axes.errorbar(
                x, mine.over_base, yerr=interval_bars(mine, "over_base"), fmt=marker, ms=4, elinewidth=0.9,
                color=METHOD_COLOURS[method], label=method,
            )  # fmt: skip
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xticks(range(len(settings)), settings)
        axes.set(title=f"{target}, n = {part.n.max()} prompts, {seeds_in_words(part.seeds.max())}", xlabel="determinism in evaluation")
    panels[0, 0].set_ylabel(f"change by training on {trained}\ninstead of high determinism (%)")
    legend_below(figure, panels[0, 0])
    return figure


def training_setting_rows(scores: pd.DataFrame, profile: Profile, targets: Sequence[str], base: str) -> pd.DataFrame:
    """:func:`sweep_rows` of the training setting for several targets, with a first column ``target``."""
    frames = []
    for target in targets:
        rows = sweep_rows(scores, swept(profile, target, training_setting), base, "trained")
        rows.insert(0, "target", target)
        frames.append(rows)
    return pd.concat(frames, ignore_index=True)


def with_verdicts(rows: pd.DataFrame, column: str = "over_base") -> pd.DataFrame:
    """Rows that have this gain, with its 95 % interval and whether it is above zero ("better"), below ("worse") or neither."""
    kept = rows[rows[column].notna()].copy()
    kept["ci_low"], kept["ci_high"] = kept[f"{column}_low"], kept[f"{column}_high"]
    kept["verdict"] = [decided(low, high) for low, high in zip(kept.ci_low, kept.ci_high, strict=True)]
    return kept


def verdict_counts(told: pd.DataFrame, column: str) -> pd.DataFrame:
    """How many comparisons of every value came out better, undecided and worse.

    Args:
        told: from :func:`with_verdicts`.
        column: the swept value's.
    """
    counts = told.groupby([column, "verdict"]).size().unstack("verdict", fill_value=0)
    return counts.reindex(columns=["better", "undecided", "worse"], fill_value=0).rename_axis(columns=None)
