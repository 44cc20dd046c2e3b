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

from dblast.paths import FIGURES
from dblast.tables import OBJECTIVE_NAMES, SETTINGS_ORDER, paper_gains, read_paper

#: Okabe and Ito's colour-blind-safe palette; a method keeps its colour in every figure.
METHOD_COLOURS = {"DFlash": "#555555", "DFlash+AL": "#0072B2", "DFlash+DS": "#E69F00", "DBlast": "#D55E00"}
LOSS_COLOURS = {"NLL": METHOD_COLOURS["DFlash+DS"], "AL": METHOD_COLOURS["DBlast"]}
SETTING_LABELS = {"high": "high\n(T=0.7)", "medium": "medium\n(T=1.0)", "low": "low\n(T=1.5)"}

STYLE = {
    "figure.dpi": 90,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.grid": True,
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


def save_figure(figure: Figure, profile: str, name: str, caption: str, data: pd.DataFrame) -> list[Path]:
    """Write ``figures/<profile>/<name>.{pdf,png,csv,txt}``: figure twice, its data, its caption.

    The same figure gives the same bytes: no dates are written.
    """
    folder = FIGURES / profile
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
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 2.7), layout="constrained")
    palette = dict(zip(targets, sns.color_palette("colorblind", len(targets)), strict=True))
    for axes, (column, label) in zip(
        panels, [("p_max", "largest probability of p"), ("entropy", "entropy of p (nats)")], strict=True
    ):
        sns.pointplot(
            table,
            x="setting",
            y=column,
            hue="target",
            order=[s for s in SETTINGS_ORDER if s in set(table.setting)],
            errorbar="se",
            palette=palette,
            markers=["o", "s", "D", "^"][: len(targets)],
            ax=axes,
            legend=axes is panels[0],
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
    figure, panels = plt.subplots(2, 2, figsize=(6.8, 4.4), layout="constrained", sharex="col")
    pre = rows[rows.stage == "pretrain"]
    fine = rows[(rows.stage == "finetune") & rows.K.isin([1, 4]) & (rows.construction == "all_prefixes")]
    for axes, column in ((panels[0, 0], "training_loss"), (panels[1, 0], "accepted_per_anchor")):
        axes.plot(pre.anchors / 1000, pre[column], color="#009E73", marker="o", ms=3)
    for (k, loss), part in fine.groupby(["K", "loss"]):
        colour = METHOD_COLOURS[_method(k, loss)]
        mean = part.groupby("anchors")[["training_loss", "accepted_per_anchor"]].mean().reset_index()
        for axes, column in ((panels[0, 1], "training_loss"), (panels[1, 1], "accepted_per_anchor")):
            axes.plot(mean.anchors / 1000, mean[column], color=colour, marker="o", ms=3, label=f"K = {k}, {loss}")
    objective = OBJECTIVE_NAMES.get(pre.loss.iloc[0], pre.loss.iloc[0])
    panels[0, 0].set(title=f"pre-training ({objective})", ylabel="loss (nats per token)")
    panels[0, 1].set(title="fine-tuning (mean over seeds)", ylabel="loss (nats per block)")
    panels[1, 0].set(xlabel="anchors seen (thousands)", ylabel="accepted length\nper anchor (tokens)")
    panels[1, 1].set(xlabel="anchors seen (thousands)")
    panels[1, 1].legend()
    figure.suptitle(f"target: {target}", fontsize=9)
    return figure


def branch_health_figure(history: pd.DataFrame, target: str, k: int = 4) -> Figure:
    """Are all K branches alive? Effective number, distinct first tokens and share of each winner over fine-tuning."""
    rows = history[(history.target == target) & (history.stage == "finetune") & (history.K == k)]
    rows = rows[rows.construction == "all_prefixes"]
    figure, panels = plt.subplots(1, 3, figsize=(6.8, 2.5), layout="constrained")
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
    panels[0].legend()
    figure.suptitle(f"target: {target}, K = {k}", fontsize=9)
    return figure


def _method(k: int, loss: str) -> str:
    return {(1, "NLL"): "DFlash", (1, "AL"): "DFlash+AL"}.get((k, loss), "DFlash+DS" if loss == "NLL" else "DBlast")


def gains_figure(gains: pd.DataFrame, paper_target: str = "Qwen3-8B") -> Figure:
    """Gain over DFlash in per cent by setting and method, ours with 95 % intervals beside the paper's averages."""
    targets = list(dict.fromkeys(gains.target))
    # Own scales: a weak drafter's relative gains can be far wider than the others.
    figure, panels = plt.subplots(1, len(targets) + 1, figsize=(3.0 * (len(targets) + 1), 2.9))
    methods = list(METHOD_COLOURS)[1:]
    paper = paper_gains()
    paper = paper[paper.target == paper_target].assign(gain_low=lambda p: p.gain, gain_high=lambda p: p.gain)
    for axes, (title, rows) in zip(
        panels,
        [*((t, gains[gains.target == t]) for t in targets), (f"paper: {paper_target}", paper)],
        strict=True,
    ):
        settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
        for offset, method in enumerate(methods):
            part = rows[rows.method == method].set_index("setting").loc[settings]
            x = [i + 0.25 * (offset - 1) for i in range(len(settings))]
            axes.bar(x, part.gain, 0.23, color=METHOD_COLOURS[method], label=method)
            axes.errorbar(x, part.gain, (part.gain - part.gain_low, part.gain_high - part.gain), fmt="none", ecolor="black", lw=0.9)
        axes.axhline(0, color="black", lw=0.8)
        name_settings(axes, settings)
        n = f" (n = {rows.n.iloc[0]} prompts)" if "n" in rows else ""
        axes.set(title=title + n, xlabel="determinism")
    panels[0].set_ylabel("gain over DFlash (%)")
    panels[-1].legend(loc="upper left")
    figure.tight_layout()
    return figure


def figure2(rows: pd.DataFrame, target: str) -> Figure:
    """Figure 2: accepted length against Z_T at K = 4, one panel a setting, ±1 SEM, the best point marked."""
    settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
    figure, panels = plt.subplots(1, len(settings), figsize=(2.6 * len(settings) + 0.6, 2.7), squeeze=False)
    for axes, setting in zip(panels[0], settings, strict=True):
        for loss, colour in LOSS_COLOURS.items():
            part = rows[(rows.setting == setting) & (rows.loss == loss)].sort_values("category_temperature")
            axes.errorbar(
                part.category_temperature,
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
            axes.plot(best.category_temperature, best.accepted_length, marker="*", ms=10, color=colour, mec="black", mew=0.5)
        axes.set(title=SETTING_LABELS[setting].replace("\n", " "), xlabel="category temperature $Z_T$")
    panels[0, 0].set_ylabel(f"accepted length (tokens)\n{target}, K = 4, n = {rows.n.iloc[0]} prompts")
    panels[0, 0].legend()
    figure.tight_layout()
    return figure


def _box(axes, x, y, width, height, text, colour="#FFFFFF") -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", fc=colour, ec="#333333", lw=0.9)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=7.5)


def _arrow(axes, start, end, **style) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, color="#333333", lw=0.9, **style))


def figure3(block_length: int = 3, categories: int = 3) -> Figure:
    """Figure 3: the architecture, drawn: target taps and masked block in, K branches and a prior out."""
    figure, axes = plt.subplots(figsize=(6.8, 3.6))
    axes.set(xlim=(0, 10), ylim=(0, 5.4))
    axes.axis("off")
    slots = ["anchor"] + ["MASK"] * block_length
    width = 0.95
    _box(axes, 0.1, 0.3, 2.2, 0.6, "target hidden states\n(taps, before anchor)", "#E8E8E8")
    _box(axes, 0.1, 1.5, 2.2, 0.6, "fc, hidden_norm\n(context feature)", "#CFE5F3")
    _arrow(axes, (1.2, 0.95), (1.2, 1.45))
    left = 3.2
    _box(axes, left - 0.1, 1.5, (width + 0.1) * len(slots), 0.6, "draft layers, all slots in one pass", "#CFE5F3")
    _arrow(axes, (2.35, 1.8), (left - 0.15, 1.8))
    axes.text(2.72, 1.95, "K, V", fontsize=7, ha="center")
    for i, slot in enumerate(slots):
        x = left + i * (width + 0.1)
        _box(axes, x, 0.3, width - 0.1, 0.5, slot, "#E8E8E8")
        _arrow(axes, (x + 0.42, 0.85), (x + 0.42, 1.45))
        _arrow(axes, (x + 0.42, 2.15), (x + 0.42, 2.45))
        axes.text(x + 0.42, 2.6, f"$h_{i}$", ha="center", va="center", fontsize=9)
    _box(axes, 0.9, 3.2, 2.2, 0.6, r"prior $\ell = W h_0$" + "\n" + r"$q(z|y)=\mathrm{softmax}(\ell/Z_T)$", "#FBE3CF")
    _arrow(axes, (left + 0.3, 2.75), (2.5, 3.15))
    span = (width + 0.1) * block_length
    start = left + width + 0.1
    _box(axes, start, 3.2, span, 0.6, r"expander $h_{i,z} = h_i + g_z(h_i)$", "#FBE3CF")
    for i in range(1, block_length + 1):
        _arrow(axes, (left + i * (width + 0.1) + 0.42, 2.78), (left + i * (width + 0.1) + 0.42, 3.15))
    colours = sns.color_palette("colorblind", categories)
    for z in range(categories):
        y = 4.9 - 0.38 * z
        for i in range(block_length):
            x = start + i * (width + 0.1)
            axes.add_patch(FancyBboxPatch((x, y), width - 0.15, 0.26, boxstyle="round,pad=0.01", fc=colours[z], alpha=0.45))
            axes.text(x + 0.4, y + 0.11, f"$\\hat x_{{{i + 1},{z + 1}}}$", ha="center", va="center", fontsize=7.5)
        axes.text(start - 0.2, y + 0.12, f"z = {z + 1}", ha="right", va="center", fontsize=7.5)
    _arrow(axes, (start + span / 2, 3.85), (start + span / 2, 4.08))
    _arrow(axes, (2.0, 3.85), (start - 0.75, 4.45), connectionstyle="arc3,rad=-0.2")
    axes.text(1.25, 4.45, "sample z", fontsize=7.5)
    axes.text(start + span + 0.1, 4.55, "LM head\n(target's, frozen)\nargmax per slot", fontsize=7, va="center")
    return figure


def paper_figure2_peaks() -> pd.DataFrame:
    """What the paper's Figure 2 shows: the category temperature at the peak, by loss and setting (Qwen3-8B)."""
    return read_paper("figure2_category_temperature")
