"""What the smoke reproduction must have left behind. Run by `make test` after it, not by plain pytest.

Claims are not asserted here, with one exception: effects that are many standard
errors wide at this size, as a check against regressions. What is asked of each is
over four errors less than what was measured: another machine's drafters are others.
"""

import numpy as np
import pytest
import torch

from dblast.reproduction.estimates import choose_category_temperature, difference, held_out_at_chosen
from dblast.reproduction.experiments import (
    evaluation_prompts,
    open_drafter,
    open_target,
    prepare_pretrained,
    prepare_trajectories,
    training_curve,
    variant_stage,
)
from dblast.decoding import generate
from dblast.reproduction.online import online_rows
from dblast.reproduction.paths import FIGURES, RUNS
from dblast.reproduction.profiles import Variant, get_profile
from dblast.reproduction.estimates import ratio_with_influence, standard_error
from dblast.reproduction.report import build_report
from dblast.reproduction.reproduce import notebook_paths
from dblast.reproduction.results import BEYOND_TABLES, TABLES, open_table, read_provenance
from dblast.sampling import get_setting
from dblast.replay import score
from tests.helpers import assert_within_errors

PROFILE = get_profile("smoke")
TINY = PROFILE.plan("tiny")


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch):
    """The cache of the smoke run instead of the empty one that other tests get."""
    folder = RUNS / "smoke" / "cache"
    if not folder.exists():
        pytest.fail("no smoke run here: run `make test`, or `python -m dblast reproduce --profile smoke --fresh` first")
    monkeypatch.setenv("DBLAST_CACHE", str(folder))
    return folder


def test_every_result_table_was_made_with_provenance():
    record = read_provenance("smoke")
    for plan in PROFILE.plans:
        for table in TABLES:
            if table in BEYOND_TABLES or (table == "target" and plan.tiny is None):
                continue
            entry = record[f"{plan.label}-{table}.parquet"]
            assert entry["packages"]["torch"] and entry["seconds"] >= 0


def _artefacts() -> set[str]:
    """What notebooks 01 to 05 write for the profile's plans, under ``figures/smoke``."""
    figures = ["mismatch", "determinism", "oracle", "figure1", "gains", "figure3"]
    tables = ["oracle", "table1", "table5", "table8", "claims"]
    for plan in PROFILE.plans:
        figures += [f"{name}_{plan.label}" for name in ("rejections", "training", "branch_health", "figure2")]
        tables += [f"{name}_{plan.label}" for name in ("table2", "table3", "table6_7", "table9")]
        if any(variant.construction == "whole_block" for variant in plan.variants):
            tables.append(f"table4_{plan.label}")
    written = {f"{name}.{suffix}" for name in figures for suffix in ("pdf", "png", "csv", "txt")}
    return {"claims.csv"} | written | {f"tables/{name}.{suffix}" for name in tables for suffix in ("csv", "md", "tex")}


def test_this_run_wrote_every_figure_and_table_and_nothing_else(cache_folder):
    """What an earlier run left does not count: the run begins by making its cache, with this link."""
    began = (cache_folder / "targets").lstat().st_mtime
    folder = FIGURES / PROFILE.name
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    written = {path.relative_to(folder).as_posix() for path in files if path.stat().st_mtime >= began}
    assert written == _artefacts()
    assert all(path.stat().st_size > 20 for path in files)
    notebooks = [RUNS / PROFILE.name / path.name for path in notebook_paths(PROFILE)]
    assert len(notebooks) == 5 and all(path.stat().st_mtime >= began for path in notebooks)


def test_the_report_of_this_run_is_small_and_of_this_run(tmp_path):
    page = build_report(PROFILE.name, tmp_path / "report.html")
    assert 200_000 < page.stat().st_size <= 5_000_000
    text = page.read_text(encoding="utf-8")
    assert text.count("the copy of this profile&#39;s last run") == 5 and "as committed" not in text


def test_tiny_target_is_close_to_its_language():
    last = open_table(PROFILE, "tiny", "target").iloc[-1]
    assert last.entropy - 0.02 < last.held_out_loss < last.entropy + 0.15


@pytest.mark.parametrize("plan", PROFILE.plans, ids=lambda plan: plan.label)
def test_fresh_category_heads_barely_disturb_the_pretrained_drafter(plan):
    history = open_table(PROFILE, plan.label, "training")
    # Measured anew: the curve of a shipped drafter is of other texts.
    end = training_curve(plan)(open_drafter(prepare_pretrained(plan), open_target(plan)))["accepted_per_anchor"]
    starts = history[(history.stage == "finetune") & (history.step == 0)].accepted_per_anchor
    assert len(starts) == len(plan.variants) * len(plan.seeds)
    assert starts.between(0.9 * end, 1.1 * end).all(), f"pre-training ended at {end}, fine-tuning began at {starts}"


def test_perfect_marginals_lose_to_four_blocks_on_the_trained_target():
    """Oracle proposals: at high determinism the gap is eight errors wide."""
    table = open_table(PROFILE, "tiny", "oracle")
    wide = table[table.setting == "high"].pivot_table(index="prompt_id", columns="proposal", values="accepted_length")
    gap = wide["best 4 blocks"] - wide["independent, sampled"]
    assert gap.mean() > 3 * gap.std() / len(gap) ** 0.5


def test_accepted_length_falls_with_determinism():
    """By six errors from high to medium, by five from medium to low."""
    scores = open_table(PROFILE, "tiny", "scores")
    rows = held_out_at_chosen(scores)
    base = rows[rows.method == "DFlash"]
    means = base.groupby("setting")[["emitted", "passes"]].sum()
    lengths = (means.emitted - means.passes) / means.passes
    assert lengths["high"] > lengths["medium"] > lengths["low"]


def test_four_likelihood_branches_beat_one_at_high_determinism():
    """By nearly six errors."""
    rows = held_out_at_chosen(open_table(PROFILE, "tiny", "scores"))
    rows = rows[(rows.setting == "high") & (rows.loss == "NLL")]
    estimate = difference(rows[rows.K == 4], rows[rows.K == 1], macro=True)
    assert estimate.value > estimate.standard_error


@pytest.mark.parametrize("label", [plan.label for plan in PROFILE.plans])
def test_the_online_table_agrees_with_replay(label):
    """Two independent texts of the same prompts in every cell."""
    table = open_table(PROFILE, label, "online")
    assert (table.passes <= table.emitted).all() and (table.emitted > 0).all()
    rows = online_rows(table)
    assert len(rows) == 2 * len(PROFILE.plan(label).data.settings)
    for row in rows.itertuples():
        assert_within_errors(row.online, row.replay, row.difference_error, units=row.n)
    chosen = choose_category_temperature(open_table(PROFILE, label, "scores")).set_index(["method", "setting"])
    for names, part in table[table.method == "DBlast"].groupby(["method", "setting"]):
        assert set(part.category_temperature) == {chosen.category_temperature[names]}


@pytest.mark.parametrize("categories", [1, 4])
@pytest.mark.parametrize("setting", ["high", "low"])
def test_replay_and_online_decoding_agree_on_the_trained_target(categories, setting):
    """Same prompts and setting, two independent sets of texts (three seeds pooled)."""
    target = open_target(TINY)
    drafter = open_drafter(variant_stage(TINY, Variant(categories, "NLL"), 0).folder, target)
    stored = list(prepare_trajectories(TINY, setting))
    replayed = score(drafter, stored, (1.0,)).sort_values("prompt_id")
    prompts = sorted(evaluation_prompts(TINY, target), key=lambda prompt: prompt.prompt_id)
    assert [prompt.prompt_id for prompt in prompts] == replayed.prompt_id.tolist()
    emitted, passes = np.zeros(len(prompts)), np.zeros(len(prompts))
    for seed in range(3):
        result = generate(
            target,
            drafter,
            [prompt.ids for prompt in prompts],
            get_setting(setting),
            max_new_tokens=TINY.data.evaluation_tokens,
            generator=torch.Generator().manual_seed(seed),
        )
        emitted += [len(tokens) for tokens in result.tokens]
        passes += [len(steps) for steps in result.steps]
    online, online_influence = ratio_with_influence(emitted - passes, passes)
    n, v = replayed.emitted.to_numpy(), replayed.passes.to_numpy()
    offline, offline_influence = ratio_with_influence(n - v, v)
    error = np.hypot(standard_error(online_influence), standard_error(offline_influence))
    assert online > 0.3
    assert_within_errors(online, offline, error, units=len(prompts))
