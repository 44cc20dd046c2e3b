"""Table 2's footnote: online and replayed lengths that can be computed by hand, and which prompts are decoded."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from dblast.errors import DBlastError
from dblast.reproduction.online import PROMPTS_PER_TASK, _subset, collect_online, online_footnote, online_rows
from dblast.reproduction.profiles import SMOLLM2, TINY, Variant, get_profile
from dblast.reproduction.results import open_tables
from tests.helpers import assert_within_errors


def decoded(online, replayed, method="DFlash", setting="low", target="toy"):
    return pd.DataFrame(
        {
            "target": target,
            "method": method,
            "setting": setting,
            "task": "chat",
            "prompt_id": [f"p{i}" for i in range(len(online))],
            "category_temperature": np.nan,
            "emitted": 60,
            "passes": online,
            "replay_emitted": 60,
            "replay_passes": replayed,
        }
    )


def test_lengths_are_ratios_of_sums_and_the_difference_is_paired():
    rows = online_rows(pd.concat([decoded([20, 40], [24.0, 48.0]), decoded([30, 30], [30.0, 30.0], "DBlast")]))
    first, second = rows.itertuples()
    assert first.online == pytest.approx((120 - 60) / 60) and first.replay == pytest.approx((120 - 72) / 72)
    assert first.difference == pytest.approx(first.online - first.replay) and first.n == 2
    # Both prompts gain by the same factor: the levels differ between prompts, the difference hardly.
    assert first.difference_error < 0.5 * first.online_error
    assert (second.method, second.difference, second.difference_error) == ("DBlast", 0, 0)


def test_the_footnote_names_the_largest_difference_in_its_own_errors():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 40))
    calm = decoded(30 + noise[0], 30 + 0.9 * noise[0], "DFlash")
    wild = decoded(33 + noise[1], 30 + 0.9 * noise[1], "DBlast")
    text = online_footnote(pd.concat([calm, wild, decoded([1, 2], [1, 2], target="other")]), "toy")
    assert text.startswith("Online decoding of 40 of these prompts") and "its 2 accepted lengths" in text
    assert "(DBlast, low)" in text and "-0.1" in text and "the first" not in text
    few = online_footnote(decoded([1.0 + i for i in range(PROMPTS_PER_TASK)], [2.0] * PROMPTS_PER_TASK), "toy")
    assert f"(the first {PROMPTS_PER_TASK} of every task)" in few


def test_the_kept_online_lengths_agree_with_replay():
    rows = online_rows(open_tables(get_profile("cpu"), "online"))
    assert len(rows) == 12
    for row in rows.itertuples():
        assert_within_errors(row.online, row.replay, row.difference_error, units=row.n)


def test_a_few_prompts_of_every_task_are_decoded_and_all_of_a_target_trained_here():
    prompts = [SimpleNamespace(task=task, number=i) for i in range(10) for task in ("chat", "code")]
    few = _subset(prompts, SMOLLM2)
    assert len(few) == 2 * PROMPTS_PER_TASK
    for task in ("chat", "code"):
        assert [p.number for p in few if p.task == task] == list(range(PROMPTS_PER_TASK))
    assert _subset(prompts, TINY) == prompts


def test_a_plan_without_dblast_is_refused_before_any_work():
    with pytest.raises(DBlastError, match="does not train both"):
        collect_online(replace(TINY, variants=(Variant(1, "NLL"),)))
