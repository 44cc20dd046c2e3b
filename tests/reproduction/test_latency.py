"""Tables 6 and 7: medians and overheads that can be computed by hand, and a real measurement on a small target."""

import numpy as np
import pandas as pd
import pytest
import torch

from dblast.reproduction.claims import FEW_PER_CENT, _latency_claims, _Target
from dblast.backbone import DBlastConfig
from dblast.training import new_drafter
from dblast.reproduction.latency import CATEGORIES, measure
from dblast.reproduction.latency_tables import BARE, PARTS, latency_rows, latency_table, overhead
from dblast.sampling import SamplingSettings
from tests.conftest import MASK_TOKEN_ID


def times(shares, prompts=12, target="toy"):
    """A step with K categories takes the share of the prompt's base time; every part a sixth of it, the bare pass half."""
    rng = np.random.default_rng(0)
    base = rng.uniform(80, 160, prompts)
    rows = [{"K": -1, "prompt": i, "part": BARE, "milliseconds": base[i] / 2} for i in range(prompts)]
    for k, share in shares.items():
        for i in range(prompts):
            rows.append({"K": k, "prompt": i, "part": "step", "milliseconds": base[i] * share})
            rows += [{"K": k, "prompt": i, "part": part, "milliseconds": base[i] * share / 6} for part in PARTS]
    return pd.DataFrame(rows).assign(target=target), base


def test_overhead_is_paired_by_prompt():
    latency, base = times({0: 1.0, 1: 1.01, 4: 1.03})
    found = overhead(latency, 4)
    assert found.value == pytest.approx(3.0) and found.n == 12
    # Prompts differ twofold, the share is the same on each.
    assert found.interval == pytest.approx((3.0, 3.0))
    assert overhead(latency, 4, base=1).value == pytest.approx(100 * (1.03 / 1.01 - 1))
    rows = latency_rows(latency).set_index("K")
    assert rows.step[4] == pytest.approx(1.03 * np.median(base)) and (rows.over_bare[0], rows.over_bare[4]) == pytest.approx((2.0, 2.06))
    assert rows.loc[4, [f"{part} (ms)" for part in PARTS]].sum() == pytest.approx(rows.step[4])
    assert (rows.target == "toy").all()


def test_a_machine_that_is_not_steady_widens_the_interval():
    latency, _ = times({0: 1.0, 4: 1.03})
    rng = np.random.default_rng(1)
    noisy = latency.assign(milliseconds=latency.milliseconds * rng.uniform(0.9, 1.1, len(latency)))
    low, high = overhead(noisy, 4).interval
    assert low < overhead(noisy, 4).value < high and high - low > 1
    assert overhead(noisy, 4) == overhead(noisy, 4)


def test_the_table_has_the_paper_s_overheads_beside_ours():
    latency, _ = times(dict(zip(CATEGORIES, (1.0, 1.01, 1.02, 1.03, 1.05), strict=True)))
    table = latency_table(latency)
    assert table.name == "table6_7_toy" and table.display.loc["K = 4", "target (ms)"] == table.display.loc["K = 4", "draft (ms)"]
    display = table.display
    assert list(display.index) == ["DFlash (no expander)", "DFlash (with expander)", "K = 2", "K = 4", "K = 8"]
    assert list(display["paper (%)"]) == ["", "+0.3", "+1.1", "+1.4", "+3.4"]
    assert display.loc["K = 4", "over no expander (%)"] == "+3.0 [+3.0, +3.0]" and display.iloc[0, 2] == ""


@pytest.mark.parametrize(("share", "verdict"), [(1.01, "reproduced"), (1.2, "not reproduced")])
def test_the_claim_is_that_four_categories_cost_a_few_per_cent(share, verdict):
    latency, _ = times({0: 1.0, 4: share})
    mine = _Target.__new__(_Target)
    mine.name, mine.rows = "toy", []
    _latency_claims(mine, pd.concat([latency, times({0: 1.0, 4: 3.0}, target="other")[0]]))
    (row,) = mine.rows
    assert row["verdict"] == verdict and row["ours"] == pytest.approx(FEW_PER_CENT - 100 * (share - 1))
    assert row["ci_low"] <= row["ours"] <= row["ci_high"] and row["paper"] == "3.5"


def test_a_small_target_is_timed_part_by_part(llama):
    drafters = {}
    for k in (0, 4):
        config = DBlastConfig.for_target(
            llama.model.config, num_layers=1, block_length=3, mask_token_id=MASK_TOKEN_ID, target_layer_ids=[0]
        )
        config.num_categories = k
        drafters[k] = new_drafter(config, llama, seed=0).attach(llama.model).eval()
    prompts = [torch.arange(6) + 6, torch.arange(8) + 6]
    table = measure(llama, drafters, prompts, SamplingSettings(1.0), repeats=2)
    assert set(table.K) == {-1, 0, 4} and set(table.prompt) == {1, 2} and (table.milliseconds > 0).all()
    assert len(table) == 2 * (1 + 2 * (len(PARTS) + 1))
    assert len(latency_rows(table.assign(target="toy"))) == 2
