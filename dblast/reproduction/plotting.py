"""Every figure, from result tables: one style, one palette, deterministic files."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython import get_ipython
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image

from dblast.reproduction.paths import figures_folder
from dblast.reproduction.tables import OBJECTIVE_NAMES, SETTINGS_ORDER, paper_gains, read_paper

#: Okabe and Ito's colour-blind-safe palette; a method keeps its colour in every figure, and nothing else has it.
METHOD_COLOURS = {"DFlash": "#555555", "DFlash+AL": "#0072B2", "DFlash+DS": "#E69F00", "DBlast": "#D55E00"}
LOSS_COLOURS = {"NLL": METHOD_COLOURS["DFlash+DS"], "AL": METHOD_COLOURS["DBlast"]}
#: Number of categories where no method is meant: one hue, darker with K, so that the order survives grey print.
K_COLOURS = {1: "#A98BD0", 2: "#7444AE", 4: "#35105F"}
K_MARKERS = {1: "o", 2: "s", 4: "D"}
#: Targets, in a profile's order.
TARGET_COLOURS = ("#882255", "#999933", "#000000", "#44AA99")
#: What needs no drafter, or comes before every method: the true joint, independent proposals, pre-training.
REFERENCE_COLOUR = "#000000"
SETTING_LABELS = {"high": "high\n(T=0.7)", "medium": "medium\n(T=1.0)", "low": "low\n(T=1.5)"}

#: Widths of a paper's figures in inches. Files are saved as large as that: what is set here is what a reader sees.
ONE_COLUMN, TWO_COLUMNS = 3.4, 7.0
#: No text is smaller (points). Subscripts are set at 0.7 of their line: a line that has one is MATH_SIZE.
SMALLEST, MATH_SIZE = 6.5, 9.4

STYLE = {
    # Half of the files': bars and lines fall on the same pixels, which lets a report recognise a figure.
    "figure.dpi": 100,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "figure.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,
    "svg.hashsalt": "dblast",
}


def use_style() -> None:
    """Apply the project's matplotlib style to this session; in a notebook, figures are shown as small PNGs."""
    mpl.rcParams.update(STYLE)
    if shell := get_ipython():
        # The inline backend installs its own formatter at the end of the cell that first loads it;
        # a callback registered after that comes last.
        plt.switch_backend(plt.get_backend())
        png = shell.display_formatter.formatters["image/png"]
        shell.events.register("post_run_cell", lambda _: png.for_type(Figure, palette_png))


def palette_png(figure: Figure, colours: int = 64) -> bytes:
    """A PNG with a palette: a third of the size, which keeps notebooks light. Files on disk keep all colours."""
    full, small = BytesIO(), BytesIO()
    figure.savefig(full, format="png")
    image = Image.open(full).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def panel_grid(rows: int, columns: int, height: float, width: float | None = None, **options) -> tuple[Figure, np.ndarray]:
    """A figure as wide as one column of a page, or as two where panels stand side by side.

    Args:
        rows, columns: of panels.
        height: of the figure, inches.
        width: one of the two, where the number of panels is not what decides.
        options: of ``matplotlib.pyplot.subplots``.

    Returns:
        The figure and its axes, (rows, columns).
    """
    width = width or (ONE_COLUMN if columns == 1 else TWO_COLUMNS)
    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)


def interval_bars(rows: pd.DataFrame, name: str) -> tuple[pd.Series, pd.Series]:
    """How far the 95 % interval of a column reaches down and up, as ``errorbar`` wants it; ends as by ``Estimate.columns``."""
    return rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]


def legend_below(figure: Figure, axes, columns: int | None = None) -> None:
    """The legend of ``axes`` under all panels, where it hides no data; in one line unless ``columns`` are given."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns or len(labels))


def save_figure(figure: Figure, profile: str, name: str, caption: str, data: pd.DataFrame) -> list[Path]:
    """Write ``<name>.{pdf,png,csv,txt}`` to :func:`~dblast.reproduction.paths.figures_folder`: figure twice, its data, its caption.

    The same figure gives the same bytes: no dates are written.
    """
    folder = figures_folder(profile)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("pdf", "png", "csv", "txt")]
    figure.savefig(paths[0], metadata={"CreationDate": None, "ModDate": None})
    figure.savefig(paths[1], dpi=200, metadata={"Software": None})
    data.round(6).to_csv(paths[2], index=False)
    paths[3].write_text(caption + "\n", encoding="utf-8")
    return paths


def determinism_figure(table: pd.DataFrame) -> Figure:
    """Mean largest probability and entropy of the target by setting, one panel each; error bars ±1 SEM over prompts."""
    targets = list(dict.fromkeys(table.target))
    figure, panels = panel_grid(1, 2, 2.5)
    for axes, (column, label) in zip(
        panels[0], [("p_max", "largest probability of p"), ("entropy", "entropy of p (nats)")], strict=True
    ):
        sns.pointplot(
            table,
            x="setting",
            y=column,
            hue="target",
            order=[s for s in SETTINGS_ORDER if s in set(table.setting)],
            errorbar="se",
            palette=dict(zip(targets, TARGET_COLOURS, strict=False)),
            markers=["o", "s", "D", "^"][: len(targets)],
            ax=axes,
            legend=axes is panels[0, 0],
            markersize=5,
            linewidth=1.4,
            err_kws={"linewidth": 1.2},
        )
        name_settings(axes, [tick.get_text() for tick in axes.get_xticklabels()])
        axes.set(xlabel="determinism", ylabel=label)
    return figure


def name_settings(axes, settings: list[str]) -> None:
    """Label the ticks 0, 1, … of an axis with settings and their temperatures."""
    axes.set_xticks(range(len(settings)), [SETTING_LABELS.get(setting, setting) for setting in settings])


def training_figure(history: pd.DataFrame, target: str) -> Figure:
    """Loss and accepted length per anchor over training: pre-training left, main fine-tuned variants right."""
    rows = history[history.target == target]
    figure, panels = panel_grid(2, 2, 4.2, sharex="col")
    pre = rows[rows.stage == "pretrain"]
    fine = rows[(rows.stage == "finetune") & rows.K.isin([1, 4]) & (rows.construction == "all_prefixes")]
    for axes, column in ((panels[0, 0], "training_loss"), (panels[1, 0], "accepted_per_anchor")):
        axes.plot(pre.anchors / 1000, pre[column], color=REFERENCE_COLOUR, marker="o", ms=3)
    for (k, loss), part in fine.groupby(["K", "loss"]):
        line = {"color": METHOD_COLOURS[_method(k, loss)], "ls": "--" if k == 1 else "-", "zorder": 3 if k == 1 else 2}
        mean = part.groupby("anchors")[["training_loss", "accepted_per_anchor"]].mean().reset_index()
        for axes, column in ((panels[0, 1], "training_loss"), (panels[1, 1], "accepted_per_anchor")):
            axes.plot(mean.anchors / 1000, mean[column], marker="o" if loss == "AL" else "s", ms=3, label=f"K = {k}, {loss}", **line)
    objective = OBJECTIVE_NAMES.get(pre.loss.iloc[0], pre.loss.iloc[0])
    panels[0, 0].set(title=f"pre-training ({objective})", ylabel="loss (nats per token)")
    panels[0, 1].set(title="fine-tuning (mean over seeds)", ylabel="loss (nats per block)")
    panels[1, 0].set(xlabel="anchors seen (thousands)", ylabel="accepted length\nper anchor (tokens)")
    panels[1, 1].set(xlabel="anchors seen (thousands)")
    panels[1, 1].legend()
    figure.suptitle(f"target: {target}")
    return figure


def branch_health_figure(history: pd.DataFrame, target: str, k: int = 4) -> Figure:
    """Are all K branches alive? Effective number, distinct first tokens and share of each winner over fine-tuning."""
    rows = history[(history.target == target) & (history.stage == "finetune") & (history.K == k)]
    rows = rows[rows.construction == "all_prefixes"]
    figure, grid = panel_grid(1, 3, 2.5)
    panels = grid[0]
    losses = [loss for loss in LOSS_COLOURS if loss in set(rows.loss)]
    shares = [f"wins_{z + 1}" for z in range(k)]
    for loss in losses:
        mean = rows[rows.loss == loss].groupby("anchors").mean(numeric_only=True)
        for axes, column in zip(panels, ("effective_branches", "first_tokens"), strict=False):
            axes.plot(mean.index / 1000, mean[column], color=LOSS_COLOURS[loss], marker="o", ms=3, label=loss)
    for axes, title in zip(panels, ("effective branches", "distinct first tokens"), strict=False):
        axes.set(title=title, xlabel="anchors seen (thousands)", ylim=(0.9, k + 0.1))
    # Branches have no names across seeds: compared by rank.
    for i, loss in enumerate(losses):
        last = rows[(rows.loss == loss) & (rows.step == rows.step.max())]
        heights = np.sort(last[shares].to_numpy(), axis=1)[:, ::-1].mean(0)
        places = [z + 0.4 * (i - (len(losses) - 1) / 2) for z in range(k)]
        panels[2].bar(places, 100 * heights, 0.38, color=LOSS_COLOURS[loss], label=loss)
    panels[2].set(title="wins by rank", xlabel="branch (most often first)", ylabel="% of blocks")
    panels[2].set_xticks(range(k), [str(z + 1) for z in range(k)])
    panels[0].legend(loc="lower right")
    figure.suptitle(f"target: {target}, K = {k}")
    return figure


def _method(k: int, loss: str) -> str:
    return {(1, "NLL"): "DFlash", (1, "AL"): "DFlash+AL"}.get((k, loss), "DFlash+DS" if loss == "NLL" else "DBlast")


def gains_figure(gains: pd.DataFrame, paper_target: str = "Qwen3-8B") -> Figure:
    """Gain over DFlash in per cent by setting and method, ours with 95 % intervals beside the paper's averages."""
    targets = list(dict.fromkeys(gains.target))
    # Own scales: a weak drafter's relative gains can be far wider than the others.
    figure, panels = panel_grid(1, len(targets) + 1, 2.8)
    methods = list(METHOD_COLOURS)[1:]
    paper = paper_gains()
    paper = paper[paper.target == paper_target].assign(gain_low=lambda p: p.gain, gain_high=lambda p: p.gain)
    for axes, (title, rows) in zip(
        panels[0],
        [*((t, gains[gains.target == t]) for t in targets), (f"paper: {paper_target}", paper)],
        strict=True,
    ):
        settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
        for offset, method in enumerate(methods):
            part = rows[rows.method == method].set_index("setting").loc[settings]
            x = [i + 0.25 * (offset - 1) for i in range(len(settings))]
            axes.bar(x, part.gain, 0.23, color=METHOD_COLOURS[method], label=method)
            axes.errorbar(x, part.gain, interval_bars(part, "gain"), fmt="none", ecolor="black", lw=0.9)
        axes.axhline(0, color="black", lw=0.8)
        name_settings(axes, settings)
        n = f" (n = {rows.n.iloc[0]} prompts)" if "n" in rows else ""
        axes.set(title=title + n, xlabel="determinism")
    panels[0, 0].set_ylabel("gain over DFlash (%)")
    legend_below(figure, panels[0, 0])
    return figure


def figure2(rows: pd.DataFrame, target: str) -> Figure:
    """Figure 2: accepted length against Z_T at K = 4, one panel a setting, ±1 SEM, the best point marked."""
    settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
    figure, panels = panel_grid(1, len(settings), 2.8)
    for axes, setting in zip(panels[0], settings, strict=True):
        for loss, colour in LOSS_COLOURS.items():
            # Beside each other, or one's error bars would hide the other's.
            offset = 0.015 if loss == "AL" else -0.015
            part = rows[(rows.setting == setting) & (rows.loss == loss)].sort_values("category_temperature")
            axes.errorbar(
                part.category_temperature + offset,
                part.accepted_length,
                part.standard_error,
                color=colour,
                marker="o" if loss == "AL" else "s",
                ms=3,
                lw=1.3,
                elinewidth=0.7,
                label=loss,
            )
            best = part.loc[part.accepted_length.idxmax()]
            place = best.category_temperature + offset
            axes.plot(place, best.accepted_length, marker="*", ms=10, color=colour, mec="black", mew=0.5)
        axes.set(title=SETTING_LABELS[setting].replace("\n", " "))
        axes.set_xlabel("category temperature $Z_T$", fontsize=MATH_SIZE)
    panels[0, 0].set_ylabel("accepted length (tokens)")
    figure.suptitle(f"{target}, K = 4, n = {rows.n.iloc[0]} prompts")
    legend_below(figure, panels[0, 0])
    return figure


#: Fills of Figure 3: what goes in and comes out, DFlash's parts, DBlast's own; tints of their methods' colours.
_PLAIN, _DFLASH, _DBLAST = "#FFFFFF", "#DDDDDD", "#F7DFCC"


def _box(axes, x, y, width, height, text, colour=_PLAIN) -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", fc=colour, ec="#333333", lw=0.9)
    )
    size = MATH_SIZE if "$" in text else None
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def _arrow(axes, start, end, **style) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, color="#333333", lw=0.9, **style))


def figure3(block_length: int = 3, categories: int = 3) -> Figure:
    """Figure 3: the architecture, drawn: target taps and masked block in, K branches and a prior out."""
    figure, panels = panel_grid(1, 1, 3.7, TWO_COLUMNS)
    axes = panels[0, 0]
    axes.set(xlim=(0, 9), ylim=(0.2, 5.3))
    axes.axis("off")
    slots = ["anchor"] + ["MASK"] * block_length
    width = 0.95
    _box(axes, 0.1, 0.3, 2.2, 0.6, "target hidden states\n(taps, before anchor)", _PLAIN)
    _box(axes, 0.1, 1.5, 2.2, 0.6, "fc, hidden_norm\n(context feature)", _DFLASH)
    _arrow(axes, (1.2, 0.95), (1.2, 1.45))
    left = 3.2
    _box(axes, left - 0.1, 1.5, (width + 0.1) * len(slots), 0.6, "draft layers, all slots in one pass", _DFLASH)
    _arrow(axes, (2.35, 1.8), (left - 0.15, 1.8))
    axes.text(2.72, 1.95, "keys,\nvalues", ha="center")
    for i, slot in enumerate(slots):
        x = left + i * (width + 0.1)
        _box(axes, x, 0.3, width - 0.1, 0.5, slot, _PLAIN)
        _arrow(axes, (x + 0.42, 0.85), (x + 0.42, 1.45))
        _arrow(axes, (x + 0.42, 2.15), (x + 0.42, 2.45))
        axes.text(x + 0.42, 2.6, f"$h_{i}$", ha="center", va="center", fontsize=MATH_SIZE)
    _box(axes, 0.9, 3.2, 2.2, 0.6, r"prior $\ell = W h_0 + c$" + "\n" + r"$q(z|y)=\mathrm{softmax}(\ell/Z_T)$", _DBLAST)
    _arrow(axes, (left + 0.3, 2.75), (2.5, 3.15))
    span = (width + 0.1) * block_length
    start = left + width + 0.1
    _box(axes, start, 3.2, span, 0.6, r"expander $h_{i,z} = h_i + g_z(h_i)$", _DBLAST)
    for i in range(1, block_length + 1):
        _arrow(axes, (left + i * (width + 0.1) + 0.42, 2.78), (left + i * (width + 0.1) + 0.42, 3.15))
    for z in range(categories):
        y = 4.9 - 0.38 * z
        for i in range(block_length):
            x = start + i * (width + 0.1)
            axes.add_patch(FancyBboxPatch((x, y), width - 0.15, 0.26, boxstyle="round,pad=0.01", fc=_DBLAST, ec="#333333", lw=0.5))
            axes.text(x + 0.4, y + 0.11, f"$\\hat x_{{{i + 1},{z + 1}}}$", ha="center", va="center", fontsize=MATH_SIZE)
        axes.text(start - 0.2, y + 0.12, f"z = {z + 1}", ha="right", va="center")
    _arrow(axes, (start + span / 2, 3.85), (start + span / 2, 4.08))
    _arrow(axes, (2.0, 3.85), (start - 0.75, 4.45), connectionstyle="arc3,rad=-0.2")
    axes.text(1.25, 4.45, "sample z")
    axes.text(start + span + 0.1, 4.55, "LM head\n(target's, frozen)\nargmax per slot", va="center")
    return figure


def paper_figure2_peaks() -> pd.DataFrame:
    """What the paper's Figure 2 shows: the category temperature at the peak, by loss and setting (Qwen3-8B)."""
    return read_paper("figure2_category_temperature")
