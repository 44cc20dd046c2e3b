"""Sittings: killed and resumed, one after another, and the table of what they reach."""

import json
import random
from dataclasses import replace

import pandas as pd
import pytest
import torch

from dblast.drafter import DBlastDrafter
from dblast.errors import ArtefactError, DBlastError
from dblast.reproduction.prompts.sources import load_prompts, normalised, read_prompts
from dblast.reproduction.strong import scaling, scoring, sittings
from dblast.reproduction.strong.pool import WindowSampler
from dblast.reproduction.strong.sittings import Sitting, begin, run_sitting, sitting_folder
from dblast.reproduction.strong.text import TextRecipe, TextStore, make_shard
from dblast.training import Trainer, TrainingConfig
from dblast.trajectories import EncodedPrompt
from tests.helpers import assert_close

TAPS = [0, 2]
RECIPE = TextRecipe(settings=("low",), budgets=(8,), quarters=1, responses=6)
TRAINING = TrainingConfig(
    loss="KD",
    optimizer="muon",
    steps=6,
    sequences=3,
    anchors=4,
    evaluate_every=2,
    checkpoint_every=2,
    learning_rate=1e-3,
)
FIRST = Sitting(start="target", layers=2, draft_vocabulary=20, visits=1, window=1, training=TRAINING)


def prompts(block, count):
    rng = random.Random(block)
    return [EncodedPrompt(f"raw-{i}", "raw", tuple(rng.randrange(4, 40) for _ in range(4))) for i in range(count)]


@pytest.fixture
def store(llama, tmp_path):
    store = TextStore(tmp_path / "text")
    for index in range(3):
        make_shard(store, RECIPE, llama, index, prompts)
    return store


@pytest.fixture
def run(llama, store, monkeypatch):
    """Runs a sitting; scores are the drafter's first weights."""
    monkeypatch.setattr(sittings, "curve_trajectories", lambda plan: {"low": []})
    monkeypatch.setattr(sittings, "_curve", lambda rows: lambda drafter: {"low": drafter.fc.weight[0, 0].item()})
    monkeypatch.setattr(
        sittings, "score_sets", lambda drafter, plans: pd.DataFrame({"x": [drafter.fc.weight[0, 0].item()]})
    )

    def start(name, wanted=FIRST):
        return run_sitting(name, begin(name, wanted, store), store, llama, TAPS, {"bundled": None})

    return start


def weights(name):
    return DBlastDrafter.load(sitting_folder(name) / "drafter", dtype=torch.float32).state_dict()


class Killed(Exception):
    pass


def test_a_killed_sitting_goes_on_as_it_was_on_the_text_that_it_had(run, llama, store, monkeypatch):
    run("whole")
    advance, steps = Trainer.advance, []

    def killed(self):
        if self.step == 3:
            raise Killed
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", killed)
    with pytest.raises(Killed):
        run("killed")
    make_shard(store, RECIPE, llama, 3, prompts)
    monkeypatch.setattr(Trainer, "advance", lambda self: steps.append(self.step) or advance(self))
    run("killed")
    assert steps == [2, 3, 4, 5]
    for name, value in weights("whole").items():
        assert_close(value.float(), weights("killed")[name].float(), 1e-5)
    one, other = (
        json.loads((sitting_folder(name) / "drafter" / "training.json").read_text()) for name in ("whole", "killed")
    )
    assert [len(record["sittings"]) for record in (one, other)] == [1, 1]
    assert one["sittings"][0]["shards"] == other["sittings"][0]["shards"] and len(one["sittings"][0]["shards"]) == 3
    assert [point["step"] for point in other["sittings"][0]["history"]] == [0, 2, 4, 6]
    # Finished: nothing is trained, and what only a resumed run needs is gone.
    run("killed")
    assert len(steps) == 4 and not (sitting_folder("killed") / "state.safetensors").exists()


def test_the_next_sitting_starts_from_the_last_with_words_of_its_text(run, llama, store):
    run("one")
    make_shard(store, RECIPE, llama, 3, prompts)
    later = replace(
        FIRST,
        start="one",
        draft_vocabulary=24,
        training=replace(TRAINING, steps=1, learning_rate=1e-9, matrix_learning_rate=1e-9),
    )
    run("two", later)
    before, after = weights("one"), weights("two")
    assert_close(after["fc.weight"], before["fc.weight"], 1e-5)
    shards = list(range(4))
    want = sittings.vocabulary(store, shards, 24, llama.model.config.vocab_size)
    assert torch.equal(after["draft_token_ids"], want)
    counts = torch.bincount(torch.cat([store.read(i)[1].responses for i in shards]), minlength=40)
    assert counts[want].min() >= counts[~torch.isin(torch.arange(40), want)].max()
    record = json.loads((sitting_folder("two") / "drafter" / "training.json").read_text())["sittings"]
    assert [(s["name"], s["start"], len(s["shards"])) for s in record] == [("one", "target", 3), ("two", "one", 4)]
    # Sums over both, and the larger text.
    row = scaling.history_rows("two", record, tokens=1000, anchors=1000)
    assert (row["anchors"], row["tokens"]) == (6 * 12 + 12, store.tokens())
    shipped = [record[0] | {"start": "shipped"}]
    assert scaling.history_rows("x", shipped, 1000, 1000)["anchors"] == 1000 + 72


def test_short_blocks_in_turn(run, monkeypatch):
    """Steps see them, the curve and what is saved have the drafter's own."""
    seen, draw = [], WindowSampler.next

    def watched(self):
        batch = draw(self)
        seen.append(batch.tokens.shape[1])
        return batch

    monkeypatch.setattr(WindowSampler, "next", watched)
    run("short", replace(FIRST, blocks=(2, 7), training=replace(TRAINING, steps=3)))
    assert seen == [2, 7, 2]
    assert DBlastDrafter.load(sitting_folder("short") / "drafter").config.block_length == 7
    with pytest.raises(DBlastError, match="block length"):
        run("none", replace(FIRST, blocks=(0,)))


def test_steps_for_a_time(run, store, llama, monkeypatch):
    """A clock on which every step takes two seconds."""
    clock = iter(range(0, 1000, 8))
    monkeypatch.setattr(sittings.time, "monotonic", lambda: next(clock))
    wanted = replace(FIRST, blocks=(2, 3))
    options = (store, llama, TAPS)
    sitting = sittings.for_minutes("timed", wanted, 1.0, *options)
    assert sitting == replace(wanted, training=replace(TRAINING, steps=30))
    begin("timed", sitting, store)
    # Begun, it keeps its steps.
    assert sittings.for_minutes("timed", wanted, 5.0, *options) == sitting
    for minutes in (0, float("nan")):
        with pytest.raises(DBlastError, match="--minutes"):
            sittings.for_minutes("other", wanted, minutes, *options)


def test_part_of_the_text(store):
    sitting = begin("part", replace(FIRST, tokens=store.header(0)["tokens"] + 1), store)
    assert list(sitting.shards) == [0, 1]
    assert begin("part", replace(FIRST, tokens=store.header(0)["tokens"] + 1), store) == sitting


def test_other_numbers_names_and_damage_are_refused(store, tmp_path):
    begin("a", FIRST, store)
    with pytest.raises(DBlastError, match="another training"):
        begin("a", replace(FIRST, training=replace(TRAINING, steps=7)), store)
    for name in ("", "shipped", "../a", "a/b"):
        with pytest.raises(DBlastError, match="plain word"):
            begin(name, FIRST, store)
    for wrong in (replace(FIRST, start="a"), replace(FIRST, start="nothing")):
        with pytest.raises(DBlastError, match="has ended"):
            begin("b", wrong, store)
    with pytest.raises(DBlastError, match="no text"):
        begin("b", FIRST, TextStore(tmp_path / "none"))
    (sitting_folder("a") / "plan.json").write_text("{}")
    with pytest.raises(ArtefactError, match="damaged"):
        begin("a", FIRST, store)


def test_the_table_begins_with_the_shipped_drafter(run, monkeypatch):
    scores = pd.DataFrame(
        [
            {"evaluation": e, "split": "held out", "setting": s, "accepted_length": 0.5, "standard_error": 0.02,
             "per_anchor": 0.6, "per_anchor_error": 0.02, "n": 88}
            for e in ("bundled", "other style") for s in ("high", "low")
        ]
    )  # fmt: skip
    monkeypatch.setattr(sittings, "score_sets", lambda drafter, plans: scores)
    run("long")
    run("short", replace(FIRST, training=replace(TRAINING, steps=2)))
    table = scaling.scaling_table("smollm2", scores)
    assert list(dict.fromkeys(table.name)) == ["shipped", "short", "long"]
    assert table.tokens.iloc[0] == 478_507 and table.anchors.iloc[0] == 921_600
    figure = scaling.scaling_figure(table)
    assert [panel.get_title() for panel in figure.axes] == ["high", "low"]
    assert "n = 88" in figure.axes[0].get_legend().get_texts()[0].get_text()


def test_the_other_style_is_another():
    """No line of it is a bundled prompt or shares a run of words with one, nor comes from a shape."""
    from dblast.reproduction.strong.prompts import resembles_evaluation

    ours = read_prompts(scoring.OTHER_STYLE)
    assert len(ours) == 44 == len({normalised(p.turns[0]) for p in ours}) and sum(p.raw for p in ours) == 6
    assert not any(resembles_evaluation(p.turns[0]) for p in ours)
    assert {p.task for p in ours}.isdisjoint({p.task for p in load_prompts()} - {"code"})
