"""The one-page report of a drafter: ``report.html`` with its figures inside, ``report.md`` with them beside it."""

from __future__ import annotations

import base64
from pathlib import Path

import jinja2
import pandas as pd

from dblast.reproduction.configuration import configuration_rows
from dblast.reproduction.own.evaluation import ALL, readable
from dblast.reproduction.own.plots import curves_figure, evaluation_figure, png
from dblast.reproduction.own.requirements import size
from dblast.reproduction.own.target import Request
from dblast.reproduction.plans import Plan

#: What each column of branch health means.
HEALTH = {
    "effective_branches": "branches in use over the whole text",
    "branches_per_block": "branches in use in a block",
    "first_tokens": "different first tokens",
    "blocks": "different blocks",
}

_ENVIRONMENT = jinja2.Environment(
    autoescape=False, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
)
_MARKDOWN = _ENVIRONMENT.from_string("""# {{ title }}

{{ introduction }}
{% for part in parts %}

## {{ part.title }}

{{ part.text }}
{% if part.table is not none %}

{{ part.markdown }}
{% endif %}
{% if part.figure %}

![{{ part.title }}]({{ part.file }})
{% endif %}
{% endfor %}
""")
_HTML = jinja2.Environment(
    autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
).from_string(
    """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
body{font:1rem/1.5 system-ui,sans-serif;color:#1a1a1a;max-width:62rem;margin:auto;padding:1rem;overflow-wrap:anywhere}
h1,h2{line-height:1.25}h2{border-bottom:2px solid #0072b2}img{max-width:100%;height:auto}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.88rem;overflow-wrap:normal}th{background:#f4f6f8;text-align:left}
th,td{padding:.25rem .6rem;border-bottom:1px solid #d5d9dd;vertical-align:top;white-space:nowrap}
.wrapped td{white-space:normal}
</style></head>
<body><h1>{{ title }}</h1>
<p>{{ introduction }}</p>
{% for part in parts %}
<section><h2>{{ part.title }}</h2>
<p>{{ part.text }}</p>
{% if part.table is not none %}
<div class="scroll"><table class="{{ part.style }}"><thead>
<tr>{% for name in part.table.columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in part.table.itertuples(index=False) %}
<tr>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% if part.figure %}
<img alt="{{ part.title }}" src="data:image/png;base64,{{ part.base64 }}">
{% endif %}
</section>
{% endfor %}
</body></html>
"""
)


class _Part:
    """A section: text, then a table or a figure or both."""

    def __init__(
        self,
        title: str,
        text: str,
        table: pd.DataFrame | None = None,
        figure: bytes = b"",
        file: str = "",
        style: str = "",
    ):
        self.title, self.text, self.table, self.figure, self.file, self.style = title, text, table, figure, file, style

    @property
    def base64(self) -> str:
        return base64.b64encode(self.figure).decode()

    @property
    def markdown(self) -> str:
        # A bar would end a cell.
        cells = self.table.map(lambda value: str(value).replace("|", "\\|"))
        return cells.to_markdown(index=False, disable_numparse=True)


def write_report(
    folder: Path,
    *,
    name: str,
    accepted: pd.DataFrame,
    health: dict[str, dict[str, float]],
    speed: pd.DataFrame,
    costs: pd.DataFrame,
    starts: int,
    histories: dict[str, list[dict]],
    configuration: dict[str, str],
) -> None:
    """Write ``report.html``, ``report.md``, ``accepted_lengths.csv`` and the two figures into ``folder``.

    Args:
        name: of the target.
        accepted: :func:`dblast.reproduction.own.evaluation.accepted_lengths`.
        health: branch health by setting; empty for K = 1.
        speed: :func:`dblast.reproduction.own.run.decoding_speed`.
        costs: ``what, tokens, anchors, disk, minutes``, the last row for all.
        starts: how many times the run was started.
        histories: training curves by stage.
        configuration: the plan in words.
    """
    parts = [
        _Part(
            "Accepted length",
            "Draft tokens accepted per target pass, without the pass's own token; ± one standard error over held-out "
            "prompts, then the 95 % interval. In the loop: of online decoding, which stands at a surprising place "
            "after every rejection; this is what decoding is sped up by. Per anchor: averaged over all places of the "
            "text alike, which is higher. Both by replay of stored answers. Z_T, the temperature with which a branch "
            "is drawn, was chosen on other prompts. Greedy branch: a branch is drawn, and its likeliest tokens are the "
            "draft; soft: tokens are drawn inside the branch; tree: the heaviest beginnings of blocks, all scored in "
            "one target pass, which is wider. The start drafter is the one before fine-tuning, with one block (K = 1).",
            readable(overall(accepted)),
            png(evaluation_figure(accepted)),
            "accepted_lengths.png",
        ),
        _Part(
            "Speed",
            "Tokens per second of decoding one prompt at a time on this machine, with the drafter (greedy branch) and "
            "without it, in the target's precision, after a warm-up.",
            _speed(speed),
        ),
        _Part(
            "Training",
            "Loss of every stage, and accepted length per anchor on calibration prompts (Z_T = 1), both on answers at the "
            "setting in brackets: the two stages cannot be compared with each other.",
            figure=png(curves_figure(histories)),
            file="training.png",
        ),
    ]
    if health:
        parts.append(
            _Part(
                "Branches",
                "Whether the branches differ and are used: numbers from 1 to K, means over all places of some answers, "
                "and the share of blocks in which each branch is the likeliest.",
                _health(health),
            )
        )
    if ALL in set(accepted.task):
        tasks = readable(accepted[accepted.task != ALL])
        parts.insert(1, _Part("Accepted length by task", "The same for every task on its own.", tasks))
    times = "once" if starts == 1 else f"{starts} times"
    parts += [
        _Part(
            "Cost",
            f"The run was started {times}. The minutes of a stage are those of its last start; the last row counts all "
            "starts, with loading, evaluation and timing. Text and states in between stay in the cache until they are "
            "deleted.",
            _costs(costs),
        ),
        _Part(
            "Configuration",
            "What ran.",
            pd.DataFrame(list(configuration.items()), columns=["item", "value"]),
            style="wrapped",
        ),
    ]
    page = {"title": f"A drafter for {name}", "introduction": _introduction(accepted, speed), "parts": parts}
    (folder / "report.html").write_text(_HTML.render(page), encoding="utf-8")
    (folder / "report.md").write_text(_MARKDOWN.render(page).rstrip() + "\n", encoding="utf-8")
    accepted.round(6).to_csv(folder / "accepted_lengths.csv", index=False)
    for part in parts:
        if part.figure:
            (folder / part.file).write_bytes(part.figure)


def overall(accepted: pd.DataFrame) -> pd.DataFrame:
    """The rows over all tasks, or of the only one."""
    return accepted[accepted.task == ALL] if ALL in set(accepted.task) else accepted


def _introduction(accepted: pd.DataFrame, speed: pd.DataFrame) -> str:
    """What came out, in a sentence for every setting."""
    rows = overall(accepted)
    rows = rows[rows.proposal == "greedy_branch"]
    sentences = []
    for setting, part in rows.groupby("setting", sort=False):
        start, ours = part.in_loop.iloc[0], part.in_loop.iloc[-1]
        ratio = speed[speed.setting == setting].ratio.iloc[-1]
        sentences.append(
            f"{setting} determinism {ours:.2f} (start drafter {start:.2f}), {ratio:.2f} times the speed of plain "
            "decoding"
        )
    return (
        f"Accepted length in the loop: {'; '.join(sentences)}. High, medium and low determinism are T = 0.7, top-p "
        "0.8; T = 1, top-p 0.95; T = 1.5, top-p 0.95, all with top-k 20."
    )


def _speed(speed: pd.DataFrame) -> pd.DataFrame:
    speed = speed.sort_values("setting", key=lambda names: names.map(list(speed.setting).index), kind="stable")
    return pd.DataFrame(
        {
            "setting": speed.setting,
            "drafter": speed.drafter,
            "tokens/s with the drafter": speed.drafted.map("{:.1f}".format),
            "tokens/s without": speed.plain.map("{:.1f}".format),
            "ratio": speed.ratio.map("{:.2f}".format),
            "accepted length of these answers": speed.accepted_length.map("{:.2f}".format),
            "prompts": speed.prompts,
        }
    )


def _health(health: dict[str, dict[str, float]]) -> pd.DataFrame:
    rows = []
    for setting, values in health.items():
        wins = [values[name] for name in values if name.startswith("wins_")]
        row = {"setting": setting} | {words: f"{values[name]:.2f}" for name, words in HEALTH.items()}
        rows.append(row | {"likeliest": ", ".join(f"{100 * share:.0f} %" for share in wins)})
    return pd.DataFrame(rows)


def _costs(costs: pd.DataFrame) -> pd.DataFrame:
    count = "{:,}".format
    return pd.DataFrame(
        {
            "": costs.what,
            "tokens sampled": [count(value) if value else "" for value in costs.tokens],
            "anchors trained on": [count(value) if value else "" for value in costs.anchors],
            "disk": costs.disk.map(size),
            "minutes": costs.minutes.map("{:.1f}".format),
        }
    )


def configuration_in_words(
    plan: Plan, mask_token: str, request: Request, evaluated: int, calibrated: int
) -> dict[str, str]:
    """Table 8's rows of a plan that apply to one drafter, with its prompts and mask token.

    Args:
        evaluated, calibrated: prompts of the evaluation, and those of them that chose Z_T.
    """
    rows = configuration_rows(plan)
    hidden = ["Figure 1 training data", "best single block", "rejections", "variants"]
    if not plan.drafter.pretrained_here:
        # The plan knows how its own drafters are trained, not how this one was.
        hidden += [name for name in rows if name.startswith("pre-training ")]
        rows["pre-training"] = f"none in this run: it starts from {plan.drafter.start}"
    training = request.train_prompts or (
        "made from templates" if request.prompts == "bundled" else f"{request.prompts}, without those that evaluate"
    )
    rows = {name: text.replace(plan.data.prompts, training) for name, text in rows.items() if name not in hidden}
    return rows | {
        "evaluation prompts": f"{evaluated} of {request.prompts}",
        "category temperature": f"chosen on {calibrated} of these prompts, which do not count in the tables",
        "mask token": mask_token,
    }
