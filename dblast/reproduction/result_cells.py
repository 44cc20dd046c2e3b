"""The numbers of a profile's results as cells, each with its name and its error, for :mod:`dblast.reproduction.check_results`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dblast.reproduction.claims import claims_table
from dblast.reproduction.diagnosis.determinism import determinism_bins
from dblast.reproduction.diagnosis.rejections import CAUSES, summarise_rejections
from dblast.reproduction.diagnosis.tables import oracle_summary
from dblast.reproduction.estimates import accepted_length_rows, held_out_at_chosen, ratio_with_influence, standard_error
from dblast.reproduction.language import synthetic
from dblast.reproduction.online import online_rows
from dblast.reproduction.tables import METHODS, figure2_rows

#: An error estimated from fewer prompts says little, and a bin with fewer may be empty in another run.
FEW = 10
#: Documents behind the tiny target's held-out loss, see :func:`dblast.reproduction.language.tiny.train_tiny_target`.
HELD_OUT_DOCUMENTS = 128

#: Result tables that cells are made of.
CHECKED = ("scores", "parameters", "determinism", "oracle", "figure1", "rejections", "online", "target")
#: Columns that name a cell.
KEYS = ["table", "quantity", "target", "cell"]


def _cells(rows: pd.DataFrame, table: str, quantity: str, label: str, value: str, error: str, n: str) -> pd.DataFrame:
    """Cells from estimates over prompts: ``KEYS, value, error, n``; ``label`` is a format string over the columns.

    No error (NaN) from fewer than :data:`FEW` prompts, or where it is zero: then one prompt decides the number.
    """
    usable = (rows[n] >= FEW) & (rows[error] > 0)
    names = [label.format_map(row) for row in rows.to_dict("records")]
    columns = {"table": table, "quantity": quantity, "target": rows.target, "cell": names}
    return pd.DataFrame(columns | {"value": rows[value], "error": rows[error].where(usable), "n": rows[n]})


def _rejection_cells(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Conditional acceptance by position, and the share of blocks that each cause ends."""
    by = ["target", "setting", "method"]
    slots = summarise_rejections(rows, by)
    # Late slots are reached on a few prompts only: what counts is how many of them carry the ratio.
    reached = rows[rows.reached > 0].groupby([*by, "position", "task", "prompt_id"], observed=True).reached.sum()
    carrying = reached.groupby(level=[*by, "position"]).agg(lambda part: part.sum() ** 2 / (part**2).sum())
    slots = slots.merge(carrying.rename("carrying").reset_index(), on=[*by, "position"], how="left")
    label, number = "{method}, {setting}, position {position}", "conditional_acceptance"
    cells = [_cells(slots, "rejections", "conditional acceptance", label, number, "standard_error", "carrying")]
    blocks = rows[rows.anchors > 0].groupby([*by, "task", "prompt_id"], observed=True)
    # A block ends at one slot at most: a cause summed over slots is a share of blocks.
    whole = blocks[list(CAUSES)].sum().assign(anchors=blocks.anchors.sum() / blocks.position.nunique())
    shares = []
    for names, part in whole.groupby(level=by, observed=True):
        for cause in CAUSES:
            share, influence = ratio_with_influence(part[cause].to_numpy(), part.anchors.to_numpy())
            row = dict(zip(by, names, strict=True)) | {"cause": cause, "share": share, "n": len(part)}
            shares.append(row | {"error": standard_error(influence)})
    label = "{method}, {setting}, {cause}"
    return [*cells, _cells(pd.DataFrame(shares), "rejections", "share of blocks ended", label, "share", "error", "n")]


def _score_cells(scores: pd.DataFrame) -> list[pd.DataFrame]:
    """Accepted lengths at the calibrated Z_T, at every Z_T (Figure 2), and at Z_T = 1 by construction (Table 4).

    Drafters with K = 1 have no Z_T: Table 4's are among the first.
    """
    lengths = accepted_length_rows(held_out_at_chosen(scores), per_seed=False)
    label = "{method}, K = {K}, {loss}, {construction}, {setting}, {task}, seeds {seed}"
    shown = [("scores", label, lengths)]
    # Of other losses than the paper's there is no figure.
    paper = scores[scores.method.isin(METHODS) & (scores.K == 4)]
    if (paper.construction == "all_prefixes").any():
        (target,) = paper.target.unique()
        shown.append(("figure2", "{method}, {setting}, Z_T = {category_temperature:g}", figure2_rows(paper, target)))
    fixed = paper[(paper.loss == "AL") & (paper.setting == "low") & (paper.split == "held_out")]
    fixed = fixed[fixed.category_temperature == 1.0]
    # Without an ablation this would be a point of Figure 2 again.
    if fixed.construction.nunique() > 1:
        rows = accepted_length_rows(fixed, per_seed=False)
        shown.append(("table4", "K = {K}, {construction}, {task}, Z_T = {category_temperature:g}", rows))
    number = ("accepted_length", "standard_error", "n")
    return [_cells(rows, table, "accepted length", label, *number) for table, label, rows in shown]


def _determinism_cells(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """How decided the target is: means over responses of entropy (nats) and largest probability, by setting."""
    cells = []
    for column, quantity in (("entropy", "entropy (nats)"), ("p_max", "largest probability")):
        # A prompt has one response, but where it had more these would not be independent.
        sums = rows.groupby(["target", "setting", "prompt_id"], observed=True)[column].agg(["sum", "size"])
        lines = []
        for (target, setting), part in sums.groupby(level=["target", "setting"], observed=True):
            value, influence = ratio_with_influence(part["sum"].to_numpy(), part["size"].to_numpy())
            error = standard_error(influence)
            lines.append({"target": target, "setting": setting, "value": value, "error": error, "n": len(part)})
        cells.append(_cells(pd.DataFrame(lines), "determinism", quantity, "{setting}", "value", "error", "n"))
    return cells


def _claim_cells(claims: pd.DataFrame) -> pd.DataFrame:
    """The claims' numbers; their errors are those of the intervals, except for a bootstrap's on a grid.

    Student's quantile, which widens an interval of few training seeds, stays in the error: it is as little known.
    """
    above, below = claims.ci_high - claims.ours, claims.ours - claims.ci_low
    normal = np.isclose(above, below) & (above > 0)
    columns = {"table": "claims", "quantity": "number", "target": claims.target, "cell": claims.claim}
    return pd.DataFrame(columns | {"value": claims.ours, "error": (above / 1.96).where(normal), "n": np.nan})


def result_cells(tables: dict[str, pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All cells of one target, and its claims (without that on time, which is the machine's).

    Args:
        tables: result tables by name, of :data:`CHECKED`; what is not there has no cells, but scores must be.

    Returns:
        ``KEYS, value, error, n``: numbers, standard errors (zero: exact; NaN: none that can be used) and
        prompts; and :func:`dblast.reproduction.claims.claims_table`.
    """
    cells = _score_cells(tables["scores"])
    if "determinism" in tables:
        cells += _determinism_cells(tables["determinism"])
    if "figure1" in tables:
        bins = determinism_bins(tables["figure1"])
        label = "{split}, D_b {bin_low:.1f} to {bin_high:.1f}"
        quantities = {"dflash": "DFlash", "dblast": "DBlast", "gain": "gain (%)"}
        cells += [_cells(bins, "figure1", quantities[q], label, q, f"{q}_error", "prompts") for q in quantities]
    if "oracle" in tables:
        oracle = oracle_summary(tables["oracle"])
        label = "{proposal}, {setting}"
        cells.append(_cells(oracle, "oracle", "accepted length", label, "accepted_length", "standard_error", "n"))
    if "rejections" in tables:
        cells += _rejection_cells(tables["rejections"])
    if "online" in tables:
        decoded = online_rows(tables["online"])
        cells.append(_cells(decoded, "online", "accepted length", "{method}, {setting}", "online", "online_error", "n"))
    if "target" in tables:
        # It has no error of its own: that of the language's entropy on as many documents.
        names = {"target": tables["scores"].target.iloc[0], "error": synthetic.entropy_per_token(HELD_OUT_DOCUMENTS)[1]}
        end = tables["target"].tail(1).assign(**names, n=HELD_OUT_DOCUMENTS)
        cells.append(_cells(end, "target", "held-out loss", "nats per token", "held_out_loss", "error", "n"))
    if "parameters" in tables:
        counts = tables["parameters"].assign(table="parameters", error=0.0, n=np.nan)
        counts = counts.assign(cell=counts.K.map("K = {}".format))
        for name in ("added_parameters", "drafter_parameters"):
            cells.append(counts.assign(quantity=name.replace("_", " "), value=counts[name])[[*KEYS, "value", "error", "n"]])
    # A sweep of the AL loss alone has no claims.
    methods = set(tables["scores"].method)
    claims = claims_table(tables["scores"] if set(METHODS) <= methods else tables["scores"][:0], tables.get("figure1"))
    return pd.concat([*cells, _claim_cells(claims)], ignore_index=True), claims
