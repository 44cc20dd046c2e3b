"""Notebook 06: the losses of other papers beside DBLAST's, K = 1 and K = 4, on the same start, data and steps."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from dblast.errors import DBlastError
from dblast.reproduction.captions import error_words, seeds_in_words
from dblast.reproduction.estimates import Estimate, decided, held_out_at_chosen
from dblast.reproduction.plotting import K_COLOURS, K_MARKERS, SETTING_LABELS, interval_bars, legend_below, panel_grid
from dblast.reproduction.tables import (
    SETTINGS_ORDER,
    Table,
    length_columns,
    paired_difference,
    paired_gain,
    per_cent,
    plus_minus,
)

#: Every loss compared, in the order of the tables: what it asks for, and whose it is.
LOSSES: dict[str, tuple[str, str]] = {
    "NLL": ("likelihood of the whole block", "eq. 8 of arXiv 2608.05448"),
    "AL": ("acceptance-length loss over all prefixes", "eq. 16 of arXiv 2608.05448"),
    "TRUNC": ("the AL loss without log S", "ours, an ablation"),
    "EAL": ("minus the replayed accepted length", "ours, from eq. 14"),
    "CE": ("cross-entropy of each position's marginal, decaying weights", "DFlash"),
    "DPACE": ("cross-entropy, weights from the drafter's confidence", "arXiv 2605.18810"),
    "FOCAL": ("decayed cross-entropy + first error", "arXiv 2606.11552"),
    "CHAIN": ("decayed cross-entropy + prefix probabilities", "arXiv 2606.11552"),
    "L2R": ("decayed cross-entropy + both", "arXiv 2606.11552"),
    "TV": ("rejection rate against the target's distribution", "total variation"),
    "NLA": ("minus log acceptance rate", "arXiv 2602.23881"),
    "LK": ("KL that gives way to the rejection rate", "arXiv 2602.23881"),
    "KD": ("KL from the target's distribution", "arXiv 1503.02531"),
}


def loss_descriptions() -> pd.DataFrame:
    """Every loss in words, with its source."""
    rows = [(name, *words) for name, words in LOSSES.items()]
    return pd.DataFrame(rows, columns=["loss", "what it asks for", "source"]).set_index("loss")


def _picked(chosen: pd.DataFrame, setting: str, k: int, loss: str) -> pd.DataFrame:
    rows = chosen[(chosen.setting == setting) & (chosen.K == k) & (chosen.loss == loss)]
    return rows[rows.construction == "all_prefixes"]


def _compared(scores: pd.DataFrame, target: str) -> tuple[pd.DataFrame, list[str], list[str], list[int]]:
    """Held-out scores of one target at the calibrated Z_T; its settings, losses and K in order."""
    chosen = held_out_at_chosen(scores[scores.target == target])
    if unknown := set(chosen.loss) - set(LOSSES):
        raise DBlastError(f"no description of loss {sorted(unknown)[0]!r} in dblast.reproduction.loss_study")
    settings = [s for s in SETTINGS_ORDER if s in set(chosen.setting)]
    return chosen, settings, [loss for loss in LOSSES if loss in set(chosen.loss)], sorted(set(chosen.K))


def loss_rows(scores: pd.DataFrame, target: str) -> pd.DataFrame:
    """Macro-averaged accepted length of every loss, K and setting, and its paired gains.

    Args:
        scores: from :func:`dblast.reproduction.experiments.collect_scores`; NLL must be among the losses with every K.

    Returns:
        ``target, setting, loss, K, category_temperature, accepted_length, standard_error, seed_spread``, ``gain``
        (per cent over NLL with K = 1, DFlash's fine-tuning) and ``over_nll`` (per cent over NLL with the same K),
        each with its ``_error`` over prompts (paired) and fine-tuning seeds and the ends of its 95 % interval, ``_low`` and
        ``_high``; ``seeds``, and ``n`` prompts.
    """
    chosen, settings, losses, counts = _compared(scores, target)
    rows = []
    for setting in settings:
        dflash = _picked(chosen, setting, 1, "NLL")
        for k in counts:
            same = _picked(chosen, setting, k, "NLL")
            for loss in losses:
                ours = _picked(chosen, setting, k, loss)
                if ours.empty:
                    continue
                gain, over = paired_gain(ours, dflash), paired_gain(ours, same)
                rows.append(
                    {
                        "target": target,
                        "setting": setting,
                        "loss": loss,
                        "K": k,
                        **length_columns(ours),
                        **gain.columns("gain"),
                        **over.columns("over_nll"),
                        "seeds": ours.seed.nunique(),
                    }
                )
    return pd.DataFrame(rows)


def loss_table(scores: pd.DataFrame, target: str) -> Table:
    """Every loss at K = 1 and K = 4: accepted length, and the paired gain over NLL with the same K."""
    rows = loss_rows(scores, target)
    lines: dict[tuple[int, str], dict[str, str]] = {}
    for row in rows.itertuples():
        line = lines.setdefault((row.K, row.loss), {})
        line[row.setting] = plus_minus(Estimate(row.accepted_length, row.standard_error, row.n))
        gain = per_cent(Estimate(row.over_nll, row.over_nll_error, row.n))
        line[f"{row.setting} over NLL"] = "" if row.loss == "NLL" else gain
    display = pd.DataFrame.from_dict(lines, orient="index")
    display.index = pd.MultiIndex.from_tuples(display.index, names=["K", "loss"])
    seeds = rows.seeds.max()
    return Table(
        f"losses_{target}",
        f"Losses ({target})",
        f"Accepted length without bonus token by loss, held-out prompts (n = {rows.n.max()}), {seeds_in_words(seeds)}, Z_T "
        f"chosen on the calibration split; gains over NLL with the same K. {error_words(seeds)}",
        rows,
        display,
    )


def paired_losses(scores: pd.DataFrame, target: str, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """One loss minus another with the same K, in tokens of accepted length.

    Returns:
        ``target, loss, minus, K, setting, difference, ci_low, ci_high, n, verdict``: the 95 % interval and whether it
        is above zero ("better"), below ("worse") or neither ("undecided").

    Raises:
        DBlastError: a loss that was not trained.
    """
    chosen, settings, losses, counts = _compared(scores, target)
    rows = []
    for ours, base in pairs:
        if missing := {ours, base} - set(losses):
            raise DBlastError(f"loss {sorted(missing)[0]!r} was not trained on {target}; trained: {', '.join(losses)}")
        for k in counts:
            for setting in settings:
                sides = (_picked(chosen, setting, k, loss) for loss in (ours, base))
                estimate = paired_difference(*sides)
                low, high = estimate.interval
                values = [target, ours, base, k, setting, estimate.value, low, high, estimate.n, decided(low, high)]
                rows.append(values)
    columns = ["target", "loss", "minus", "K", "setting", "difference", "ci_low", "ci_high", "n", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def loss_figure(rows: pd.DataFrame) -> Figure:
    """Gain over NLL with K = 1 in per cent: a line a loss, a panel a setting, a mark for each K; bars 95 % intervals."""
    target = rows.target.iloc[0]
    settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
    losses = [loss for loss in LOSSES if loss in set(rows.loss)]
    figure, panels = panel_grid(1, len(settings), 0.24 * len(losses) + 1.3, sharey=True)
    for axes, setting in zip(panels[0], settings, strict=True):
        for k in (1, 4):
            part = rows[(rows.setting == setting) & (rows.K == k)].set_index("loss")
            part = part.loc[[loss for loss in losses if loss in part.index]]
            places = [losses.index(loss) + (0.16 if k > 1 else -0.16) for loss in part.index]
            axes.errorbar(
                part.gain, places, xerr=interval_bars(part, "gain"), fmt=K_MARKERS[k], ms=4, color=K_COLOURS[k], elinewidth=0.9,
                label=f"K = {k}",
            )  # fmt: skip
        axes.axvline(0, color="black", lw=0.8)
        axes.set(title=SETTING_LABELS[setting].replace("\n", " "), xlabel="gain (%)")
        axes.set_yticks(range(len(losses)), losses)
    panels[0, 0].invert_yaxis()
    figure.suptitle(f"accepted length over DFlash fine-tuned with NLL; {target}, n = {rows.n.max()} prompts")
    legend_below(figure, panels[0, 0])
    return figure
