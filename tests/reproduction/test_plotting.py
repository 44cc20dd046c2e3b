"""Every figure on the committed data: as wide as a page's columns, legible, one meaning a colour, the same bytes again."""

import re
from io import BytesIO
from itertools import combinations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from dblast.reproduction.diagnosis.plots import CAUSES, figure1, mismatch_figure, oracle_figure, rejections_figure
from dblast.reproduction.loss_study import loss_figure
from dblast.reproduction.paths import FIGURES
from dblast.reproduction.plotting import (
    K_COLOURS,
    METHOD_COLOURS,
    ONE_COLUMN,
    REFERENCE_COLOUR,
    SMALLEST,
    STYLE,
    TARGET_COLOURS,
    TWO_COLUMNS,
    branch_health_figure,
    determinism_figure,
    figure2,
    figure3,
    gains_figure,
    legend_below,
    panel_grid,
    save_figure,
    training_figure,
)
from dblast.reproduction.beyond.study import proposal_figure
from dblast.reproduction.sweeps import sweep_figure, training_setting_figure

#: By name of the committed figure: how it is drawn from its data.
DRAWN = {
    "cpu/determinism": determinism_figure,
    "cpu/figure1": figure1,
    "cpu/figure3": lambda _: figure3(),
    "cpu/gains": gains_figure,
    "cpu/mismatch": lambda data: mismatch_figure(data, 6),
    "cpu/oracle": lambda data: oracle_figure(data, 7),
    "beyond/proposals": proposal_figure,
    "sweeps/block_length": lambda data: sweep_figure(data, "block length b (tokens)"),
    "sweeps/threshold": lambda data: sweep_figure(data, "threshold τ", even=True),
    "sweeps/training_setting": lambda data: training_setting_figure(data, "low"),
}
for target in ("tiny", "smollm2"):
    DRAWN |= {
        f"cpu/branch_health_{target}": lambda data, target=target: branch_health_figure(data, target),
        f"cpu/figure2_{target}": lambda data, target=target: figure2(data, target),
        f"cpu/rejections_{target}": lambda data, target=target: rejections_figure(data, target),
        f"cpu/training_{target}": lambda data, target=target: training_figure(data, target),
        f"losses/losses_{target}": loss_figure,
    }


@pytest.fixture(autouse=True)
def style():
    """Sizes are those of the project's style; uncompressed PDFs can be read."""
    with mpl.rc_context(STYLE | {"pdf.compression": 0}):
        yield
    plt.close("all")


@pytest.fixture
def drawn_texts(monkeypatch):
    """Texts that the canvas really draws: hidden ones and ticks outside the axes are not among them."""
    texts = []
    draw = Text.draw

    def drawing(self, renderer):
        texts.append(self)
        draw(self, renderer)

    monkeypatch.setattr(Text, "draw", drawing)

    def drawn(figure):
        figure.canvas.draw()
        texts.clear()
        figure.canvas.draw()
        return [text for text in dict.fromkeys(texts) if text.get_visible() and text.get_text().strip()]

    return drawn


def test_no_committed_figure_is_left_out():
    committed = {f"{profile}/{path.stem}" for profile in ("cpu", "losses", "sweeps", "beyond") for path in (FIGURES / profile).glob("*.pdf")}
    assert set(DRAWN) == committed


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_fits_a_page_and_can_be_read(name, drawn_texts):
    figure = DRAWN[name](pd.read_csv(FIGURES / f"{name}.csv"))
    width = figure.get_size_inches()[0]
    assert width in (ONE_COLUMN, TWO_COLUMNS) and width <= 7.0
    texts = drawn_texts(figure)
    assert min(text.get_fontsize() for text in texts) >= SMALLEST >= 6.5
    canvas = figure.bbox
    boxes = {text: text.get_window_extent() for text in texts}
    for text, box in boxes.items():
        inside = canvas.x0 - 1 <= box.x0 and box.x1 <= canvas.x1 + 1 and canvas.y0 - 1 <= box.y0 and box.y1 <= canvas.y1 + 1
        assert inside, f"{text.get_text()!r} is cut off"
    for (one, box), (other, box2) in combinations(boxes.items(), 2):
        apart = min(box.x1, box2.x1) - max(box.x0, box2.x0) < 1 or min(box.y1, box2.y1) - max(box.y0, box2.y0) < 1
        assert apart, f"{one.get_text()!r} and {other.get_text()!r} overlap"

    file = BytesIO()
    figure.savefig(file, format="pdf")
    page = file.getvalue()
    # What the file holds: subscripts are not among the sizes of texts.
    (box,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) [\d.]+ \]", page)
    assert abs(float(box) / 72 - width) < 0.01
    sizes = [float(size) for size in re.findall(rb"/\S+ ([\d.]+) Tf", page)]
    assert sizes and min(sizes) >= 6.5, f"a text of {min(sizes)} pt"


def test_the_grid_of_panels_is_one_column_or_two():
    assert panel_grid(2, 1, 3.0)[0].get_size_inches().tolist() == [ONE_COLUMN, 3.0]
    figure, panels = panel_grid(2, 3, 3.0, sharey="row")
    assert figure.get_size_inches().tolist() == [TWO_COLUMNS, 3.0] and panels.shape == (2, 3)
    assert panel_grid(1, 1, 3.0, TWO_COLUMNS)[0].get_size_inches()[0] == TWO_COLUMNS


def test_a_legend_below_hides_no_panel():
    figure, panels = panel_grid(1, 2, 2.5)
    panels[0, 0].plot([0, 1], label="a")
    panels[0, 0].plot([1, 0], label="b")
    legend_below(figure, panels[0, 0])
    figure.canvas.draw()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    assert legend.get_window_extent().y1 <= min(axes.get_tightbbox().y0 for axes in panels.flat)


def _luminance(colour):
    return float(np.dot(to_rgb(colour), (0.2126, 0.7152, 0.0722)))


def test_methods_colours_mean_nothing_else():
    others = [*K_COLOURS.values(), *(colour for _, _, colour, _ in CAUSES), *TARGET_COLOURS, REFERENCE_COLOUR]
    for colour in others:
        near = min(np.linalg.norm(np.subtract(to_rgb(colour), to_rgb(method))) for method in METHOD_COLOURS.values())
        assert near > 0.25, f"{colour} can be taken for a method's"
    assert not {colour for _, _, colour, _ in CAUSES} & set(K_COLOURS.values())


def test_colours_are_told_apart_in_grey():
    """More categories are darker; causes differ by shade or by hatch."""
    ramp = [_luminance(K_COLOURS[k]) for k in sorted(K_COLOURS)]
    assert all(light - dark > 0.15 for light, dark in zip(ramp, ramp[1:]))
    shades = [_luminance(colour) for _, _, colour, _ in CAUSES]
    assert all(light - dark > 0.1 for dark, light in zip(shades, shades[1:]))
    assert len({hatch for *_, hatch in CAUSES}) == len(CAUSES)


@pytest.mark.parametrize(("name", "allowed"), [("cpu/rejections_tiny", "bars"), ("losses/losses_tiny", "points")])
def test_figures_use_those_colours(name, allowed):
    figure = DRAWN[name](pd.read_csv(FIGURES / f"{name}.csv"))
    methods = {to_rgb(colour) for colour in METHOD_COLOURS.values()}
    if allowed == "bars":
        used = {patch.get_facecolor()[:3] for axes in figure.axes[3:] for patch in axes.patches}
        assert used == {to_rgb(colour) for _, _, colour, _ in CAUSES}
    else:
        used = {to_rgb(container.lines[0].get_color()) for axes in figure.axes for container in axes.containers}
        assert used == {to_rgb(K_COLOURS[k]) for k in (1, 4)}
    assert not used & methods


def test_the_same_figure_gives_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr("dblast.reproduction.paths.RUNS", tmp_path)
    data = pd.read_csv(FIGURES / "cpu/gains.csv")
    figure = gains_figure(data)
    files = []
    for folder, made, clock in (("a", figure, 10**9), ("b", figure, 2 * 10**9), ("c", gains_figure(data), 0)):
        # The time that matplotlib writes where it is let.
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(clock))
        paths = save_figure(made, folder, "gains", "A caption.", data)
        assert [path.suffix for path in paths] == [".pdf", ".png", ".csv", ".txt"]
        files.append([path.read_bytes() for path in paths])
    assert files[0] == files[1] == files[2]
    pdf, png = files[0][:2]
    assert not re.search(rb"/(CreationDate|ModDate)", pdf)
    # Neither a date nor the version of what drew it.
    image = Image.open(BytesIO(png))
    assert set(image.info) <= {"dpi"}, image.info
    assert image.width == round(200 * figure.get_size_inches()[0])
