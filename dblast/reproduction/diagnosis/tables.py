"""Tables of notebook 01: oracle proposals, Table 5 (bins of determinism) and Table 9 (branches beside target samples)."""

from __future__ import annotations

import html

import pandas as pd

from dblast.reproduction.captions import over_prompts
from dblast.reproduction.estimates import held_out_at_chosen, ratio_with_influence, standard_error
from dblast.reproduction.tables import SETTINGS_ORDER, Table, read_paper

#: Rows of the oracle table that bound what one fixed block, or four, can reach.
ONE_BLOCK, FOUR_BLOCKS = "best 1 block", "best 4 blocks"

#: An interval needs at least as many prompts.
FEW = 5


def oracle_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean accepted length of every oracle proposal, standard errors over prompts (prefixes of one are not independent).

    Returns:
        ``target, setting, proposal, accepted_length, standard_error, prefixes, n`` (prompts).
    """
    rows = []
    order = list(dict.fromkeys(table.proposal))
    for target in dict.fromkeys(table.target):
        for setting in SETTINGS_ORDER:
            for proposal in order:
                part = table[(table.target == target) & (table.setting == setting) & (table.proposal == proposal)]
                if part.empty:
                    continue
                sums = part.groupby("prompt_id").accepted_length.agg(["sum", "size"])
                value, influence = ratio_with_influence(sums["sum"].to_numpy(), sums["size"].to_numpy())
                rows.append(
                    {
                        "target": target,
                        "setting": setting,
                        "proposal": proposal,
                        "accepted_length": value,
                        "standard_error": standard_error(influence),
                        "prefixes": len(part),
                        "n": len(sums),
                    }
                )
    return pd.DataFrame(rows)


def oracle_display(summary: pd.DataFrame) -> Table:
    """The oracle proposals as a table, settings side by side."""
    cells = summary.assign(cell=[f"{v:.2f} ± {e:.2f}" for v, e in zip(summary.accepted_length, summary.standard_error)])
    display = cells.pivot(index=["target", "proposal"], columns="setting", values="cell")
    order = [s for s in SETTINGS_ORDER if s in display.columns]
    index = list(dict.fromkeys(zip(summary.target, summary.proposal, strict=True)))
    return Table(
        "oracle",
        "Oracle proposals",
        "Expected accepted length in tokens of one draft step without any drafter. Independent proposals: made from one half "
        "of a prefix's sampled continuations, scored on the other. Blocks: the best among the sampled ones, their worth exact, "
        "a lower bound on the best there are. ± one standard error over prompts.",
        summary,
        display.loc[index, order].fillna(""),
    )


def ceiling_table(scores: pd.DataFrame, oracle: pd.DataFrame) -> pd.DataFrame:
    """How far the independent drafter is from the best single block of its target.

    Both are means over anchors of what one draft step is expected to accept: DFlash's over every anchor of the
    held-out responses, the best block's (and the best four blocks') over notebook 01's truncation points in
    responses to all evaluation prompts. The best sampled block is an estimate from below of the best there is.

    Returns:
        ``target, setting, drafter, drafter_error, best block, best_error, best 4 blocks, share, share_error``: tokens,
        and the drafter's share of the best block in per cent; standard errors over prompts, the two sides taken as
        independent in that of the share.
    """
    best = oracle_summary(oracle).set_index(["target", "setting", "proposal"])
    rows = []
    for (target, setting), part in held_out_at_chosen(scores[scores.method == "DFlash"]).groupby(["target", "setting"]):
        if (target, setting, ONE_BLOCK) not in best.index:
            continue
        sums = part.groupby(["task", "prompt_id"])[["anchor_accepted", "anchors"]].sum()
        value, influence = ratio_with_influence(sums.anchor_accepted.to_numpy(), sums.anchors.to_numpy())
        error, one = standard_error(influence), best.loc[(target, setting, ONE_BLOCK)]
        relative = ((error / value) ** 2 + (one.standard_error / one.accepted_length) ** 2) ** 0.5
        rows.append(
            {
                "target": target,
                "setting": setting,
                "drafter": value,
                "drafter_error": error,
                "best block": one.accepted_length,
                "best_error": one.standard_error,
                "best 4 blocks": best.loc[(target, setting, FOUR_BLOCKS)].accepted_length,
                "share": 100 * value / one.accepted_length,
                "share_error": 100 * value / one.accepted_length * relative,
            }
        )
    order = pd.CategoricalDtype(SETTINGS_ORDER, ordered=True)
    columns = ["target", "setting", "drafter", "drafter_error", "best block", "best_error", "best 4 blocks", "share", "share_error"]
    table = pd.DataFrame(rows, columns=columns).astype({"setting": order})
    return table.sort_values(["target", "setting"]).reset_index(drop=True)


def _interval(value: float, low: float, high: float) -> str:
    if value != value:
        return "–"
    if low != low:
        return f"{round(value):+d} %"
    # Whole numbers have no negative zero.
    return f"{round(value):+d} % [{round(low):+d}, {round(high):+d}]"


def _pm(value: float, error: float) -> str:
    return f"{value:.2f}" if error != error else f"{value:.2f} ± {error:.2f}"


def table5(bins: pd.DataFrame) -> Table:
    """Table 5: relative gain by bin of early determinism with 95 % intervals and counts, beside the paper's."""
    paper = read_paper("figure1_table5_determinism").set_index("bin_low")
    lines = []
    for row in bins.itertuples():
        printed = paper.loc[row.bin_low]
        ends = (row.gain_low, row.gain_high) if row.prompts >= FEW else (float("nan"), float("nan"))
        lines.append(
            {
                "target": row.target,
                "prompts": row.split.replace("_", "-"),
                "D_b": f"{row.bin_low:.1f}–{row.bin_high:.1f}",
                "points": row.n,
                "of prompts": row.prompts,
                "independent": _pm(row.dflash, row.dflash_error),
                "dependent": _pm(row.dblast, row.dblast_error),
                "gain": _interval(row.gain, *ends),
                "paper": f"{printed.relative_gain_percent:+.0f} % (n = {int(printed.samples)})",
            }
        )
    return Table(
        "table5",
        "Table 5",
        "Accepted length of one draft step by early determinism D_b: independent (K = 1, NLL) against dependent "
        f"(K = 4, AL), ± one standard error over {over_prompts(bins.seeds.max())}, gain with a 95 % interval "
        f"(– where the independent draft accepts nothing; no interval from fewer than {FEW} prompts).",
        bins,
        pd.DataFrame(lines).set_index(["target", "prompts", "D_b"]),
    )


class BranchView:
    """Table 9 of one target as HTML: the darker a token, the more target continuations begin this way."""

    def __init__(self, rows: pd.DataFrame):
        self.rows = rows

    def __repr__(self) -> str:
        prefix = self.rows[self.rows.kind == "prefix"].iloc[0]
        return f"BranchView({prefix.target}, prompt {prefix.prompt_id})"

    def _repr_html_(self) -> str:
        prefix = self.rows[self.rows.kind == "prefix"].iloc[0]
        lines = []
        for row in self.rows[self.rows.kind != "prefix"].itertuples():
            tokens = "".join(
                f'<span style="background:rgba(0,114,178,{0.08 + 0.6 * share:.2f});color:#000;'
                f'padding:1px 3px;margin-right:2px;border-radius:3px">{_visible(token)}</span>'
                for token, share in zip(row.tokens, row.share, strict=True)
            )
            prior = "" if row.prior != row.prior else f"{row.prior:.2f}"
            lines.append(
                f'<tr><td style="text-align:left">{_block_name(row.kind, row.number)}</td><td>{prior}</td>'
                f'<td style="text-align:left;font-family:monospace">{tokens}</td></tr>'
            )
        before = html.escape("".join(prefix.tokens)[-160:])
        return (
            f"<p><b>{html.escape(str(prefix.target))}</b>, prompt {html.escape(str(prefix.prompt_id))}, after "
            f"<i>…{before}</i></p><table><tr><th>block</th><th>prior</th><th>tokens</th></tr>{''.join(lines)}</table>"
        )


def _block_name(kind: str, number: int) -> str:
    return kind if kind == "K = 1" else f"{kind} {number}"


def _visible(token: str) -> str:
    return html.escape(token).replace("\n", "↵").replace(" ", "&nbsp;") or "∅"


def table9(branches: pd.DataFrame, target: str) -> Table:
    """Table 9: target samples beside the K = 1 block and the K branches with their priors, as plain text."""
    rows = branches[(branches.target == target) & (branches.kind != "prefix")]
    lines = []
    for row in rows.itertuples():
        length = "" if row.accepted_length != row.accepted_length else f"{row.accepted_length:.2f}"
        # The branches are one draft: their length is that of the mixture, not of any of them.
        together = row.kind == "branch"
        lines.append(
            {
                "block": _block_name(row.kind, row.number),
                "prior": "" if row.prior != row.prior else f"{row.prior:.2f}",
                "text": "".join(row.tokens).replace("\n", "↵"),
                "first token's share": f"{row.share[0]:.2f}",
                "accepted length": "" if together else length,
            }
        )
    if (rows.kind == "branch").any():
        mixture = rows[rows.kind == "branch"].accepted_length.iloc[0]
        empty = dict.fromkeys(("prior", "text", "first token's share"), "")
        lines.append({"block": "all branches", **empty, "accepted length": f"{mixture:.2f}"})
    flat = rows.assign(tokens=["|".join(t) for t in rows.tokens], share=["|".join(f"{s:.2f}" for s in r) for r in rows.share])
    prompt = rows.prompt_id.iloc[0] if len(rows) else ""
    return Table(
        f"table9_{target}",
        f"Table 9 ({target})",
        f"Target samples beside what two drafters offer after one held-out prefix (prompt {prompt}, the truncation point "
        "of median D_b). Share: fraction of the target's continuations that begin with the block's first token; "
        "accepted length of a draft step over all of them, for the branches that of their mixture.",
        flat,
        pd.DataFrame(lines).set_index("block"),
    )
