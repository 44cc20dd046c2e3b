"""Table 8 says everything that a plan fixes: a field changed is a cell changed."""

from dataclasses import fields, is_dataclass, replace

import pytest

from dblast.reproduction.configuration import configuration_rows, table8
from dblast.reproduction.paths import FIGURES
from dblast.reproduction.plans import DataConfig, Profile, TinyTargetConfig, Variant
from dblast.reproduction.profiles import get_profile

CPU = get_profile("cpu")
MUON = replace(CPU.plan("smollm2"), tiny=TinyTargetConfig())
#: Every field that counts: both trainings with Muon and the AL loss, tasks named, pre-training on data of its own.
FULL = replace(
    MUON,
    pretrain=replace(MUON.pretrain, loss="AL"),
    finetune=replace(MUON.finetune, optimizer="muon"),
    pretrain_data=replace(MUON.data, training_prompts=77),
)

#: What says nothing about the result, or is told by another field.
LEFT_OUT = {
    "label",  # the column's heading
    "parallel",  # a result does not depend on it
    # How often training is looked at and stored.
    "pretrain.evaluate_every", "pretrain.checkpoint_every", "finetune.evaluate_every", "finetune.checkpoint_every",
    # Of the variants and seeds.
    "finetune.loss", "finetune.construction", "finetune.seed",
    # Pre-training evaluates on none but calibration texts.
    "pretrain_data.evaluation_per_task", "pretrain_data.evaluation_tokens", "pretrain_data.settings",
    "pretrain_data.calibration_fraction",
}  # fmt: skip

#: Another value, where that is no number, text in general or tuple.
OTHER = {
    "target": "tiny", "precision": "float16", "pretrain.loss": "CE", "pretrain.optimizer": "adamw", "finetune.optimizer": "adamw",
    "pretrain.construction": "one_prefix", "pretrain.precision": "float32", "finetune.precision": "float32",
    "drafter.taps": (1, 2), "drafter.start_layers": (0, 1), "drafter.start": "random", "drafter.mask_token_id": 5,
    "data.tasks": ("chat",), "pretrain_data.tasks": ("chat",), "diagnosis.training_tasks": ("chat",), "diagnosis.task": "code",
    "variants": (Variant(4, "AL"), Variant(1, "NLL")), "seeds": (0, 7), "category_temperatures": (0.0, 0.5),
    "data.settings": ("high",), "data.prompts": "mine.jsonl", "pretrain_data.prompts": "mine.jsonl",
    "pretrain.warmup_ratio": 0.5, "finetune.warmup_ratio": 0.5,
    "data.training_setting": "low", "pretrain_data.training_setting": "low", "diagnosis.setting": "low",
}  # fmt: skip


def _names(value, before=""):
    """Dotted names of the fields of a plan that hold no further fields."""
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner):
            yield from _names(inner, f"{before}{field.name}.")
        else:
            yield before + field.name


def _replaced(plan, name):
    *path, last = name.split(".")
    owner = getattr(plan, path[0]) if path else plan
    value = OTHER[name] if name in OTHER else 2 * getattr(owner, last) + 1
    assert value != getattr(owner, last)
    changed = replace(owner, **{last: value})
    return replace(plan, **{path[0]: changed}) if path else changed


@pytest.mark.parametrize("name", sorted(set(_names(FULL)) - LEFT_OUT))
def test_a_field_changed_is_a_cell_changed(name):
    assert configuration_rows(_replaced(FULL, name)) != configuration_rows(FULL)


def test_the_fields_left_out_exist():
    assert set(_names(FULL)) >= LEFT_OUT | set(OTHER)


@pytest.mark.parametrize("name", ["learning_rate", "warmup_ratio", "max_norm", "optimizer", "precision", "steps", "sequences"])
def test_pre_training_and_fine_tuning_have_rows_of_their_own(name):
    """The same field of the two changes different cells."""
    before, items = configuration_rows(FULL), []
    for stage in ("pretrain", "finetune"):
        after = configuration_rows(_replaced(FULL, f"{stage}.{name}"))
        items.append({item for item in after if after[item] != before[item]})
    pre, fine = items
    assert pre and fine and not pre & fine
    assert all(item.startswith("pre-training") for item in pre) and not any(item.startswith("pre-training") for item in fine)


def test_the_committed_table_is_that_of_the_profile(tmp_path, monkeypatch):
    monkeypatch.setattr("dblast.reproduction.paths.RUNS", tmp_path)
    for path in table8(CPU).save("cpu"):
        assert path.read_text(encoding="utf-8") == (FIGURES / path.relative_to(tmp_path / "figures")).read_text(encoding="utf-8")


def test_a_published_drafter_has_no_pre_training_of_ours():
    rows = configuration_rows(get_profile("qwen3-4b").plans[0])
    assert rows["pre-training"] == "none here: the published weights of z-lab/Qwen3-4B-DFlash-b16"
    assert not any(item.startswith("pre-training ") for item in rows)


def test_pre_training_on_the_fine_tuning_data_says_so():
    plan = replace(CPU.plan("tiny"), data=DataConfig(prompts="synthetic", training_prompts=33))
    assert configuration_rows(plan)["pre-training responses"].startswith("33 ")
    assert set(table8(Profile("x", (plan,))).display.columns) == {"tiny", "paper"}
