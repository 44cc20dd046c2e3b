"""Shipped drafters: written whole, checked on loading."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from dblast import checkpoints
from dblast.checkpoints import MANIFEST, RECORD, SHIPPED, check_checkpoint, shipped_drafter, write_checkpoint
from dblast.drafter import DBlastDrafter
from dblast.errors import ArtefactError, DBlastError
from dblast.initialise import load_dflash, start_drafter
from dblast.plan_options import customise
from dblast.pretraining import pretraining_plan
from dblast.profiles import SMOLLM2, TINY, DrafterConfig


@pytest.fixture
def written(llama, make_drafter, tmp_path):
    drafter = make_drafter(llama, num_categories=0, draft_vocab_size=12)
    return drafter, write_checkpoint(drafter, {"history": [{"step": 0}]}, tmp_path / "made")


def test_a_checkpoint_comes_back_rounded_to_bfloat16(llama, written):
    drafter, folder = written
    assert drafter.dtype == torch.float32
    loaded = load_dflash(check_checkpoint(folder))
    assert loaded.dtype == torch.bfloat16
    for name, value in drafter.state_dict().items():
        expected = value.to(torch.bfloat16) if value.is_floating_point() else value
        assert torch.equal(loaded.state_dict()[name], expected), name
    assert not list(folder.parent.glob("*.part"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", RECORD, MANIFEST])
@pytest.mark.parametrize("harm", ["missing", "cut", "changed"])
def test_a_damaged_checkpoint_is_refused(written, name, harm):
    path = written[1] / name
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if harm == "cut" else b"[]" + content[2:])
    with pytest.raises(ArtefactError, match="missing or damaged"):
        check_checkpoint(written[1])


def test_a_manifest_must_name_every_file(written):
    path = written[1] / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]["model.safetensors"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtefactError, match="model.safetensors"):
        check_checkpoint(written[1])


def test_an_existing_folder_is_not_overwritten(written):
    with pytest.raises(DBlastError, match="exists already"):
        write_checkpoint(written[0], {}, written[1])


def test_no_drafter_is_shipped_for_other_targets():
    with pytest.raises(DBlastError, match="no drafter is shipped for 'tiny'"):
        shipped_drafter("tiny")


def test_a_plan_starts_from_the_shipped_drafter(llama, written, monkeypatch):
    drafter, folder = written
    monkeypatch.setattr(checkpoints, "CHECKPOINTS", folder.parent)
    monkeypatch.setattr(checkpoints, "SHIPPED", {llama.name: folder.name})
    shape = DrafterConfig(
        layers=drafter.config.num_hidden_layers,
        block_length=drafter.config.block_length,
        draft_vocabulary=12,
        start="shipped",
    )
    started = start_drafter(shape, llama, [], list(drafter.config.target_layer_ids))
    assert started.dtype == torch.float32 and started.config.num_categories == 0
    assert torch.equal(started.fc.weight, drafter.fc.weight.to(torch.bfloat16).float())
    with pytest.raises(DBlastError, match="drafts blocks of"):
        start_drafter(replace(shape, block_length=9), llama, [], list(drafter.config.target_layer_ids))
    with pytest.raises(DBlastError, match="taps target layers"):
        start_drafter(shape, llama, [], [0])


# -- what the repository holds -------------------------------------------------------------------


@pytest.mark.parametrize("target", SHIPPED)
def test_what_is_shipped_is_whole_small_and_fits_its_plan(target):
    folder = shipped_drafter(target)
    drafter = DBlastDrafter.from_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size <= 25e6
    assert all(value.dtype == torch.bfloat16 for value in drafter.parameters())
    plan = {"smollm2": SMOLLM2}[target]
    record = json.loads((folder / RECORD).read_text())
    config = drafter.config
    assert (config.num_categories, config.block_length) == (0, plan.drafter.block_length)
    assert list(config.target_layer_ids) == list(plan.drafter.taps)
    assert config.draft_vocab_size == plan.drafter.draft_vocabulary == drafter.draft_token_ids.unique().numel()
    # The plan says how it was made.
    assert record["training"] == json.loads(json.dumps(vars(plan.pretrain)))
    assert record["data"]["training_prompts"] == plan.pretrain_data.training_prompts
    assert record["data"]["training_tokens"] == plan.pretrain_data.training_tokens
    assert {row["setting"] for row in record["held_out"]} == set(plan.data.settings)


# -- choosing a start ----------------------------------------------------------------------------


def test_pretraining_never_starts_from_a_finished_drafter():
    plan = pretraining_plan(SMOLLM2)
    assert plan.drafter.start == "target" and plan.data == SMOLLM2.pretrain_data
    assert pretraining_plan(TINY).drafter.start == "random"
    with pytest.raises(DBlastError, match="nothing to pre-train"):
        pretraining_plan(customise(SMOLLM2, start="z-lab/Qwen3-4B-DFlash-b16"))


def test_another_model_or_shape_is_pretrained():
    assert customise(SMOLLM2).drafter == SMOLLM2.drafter
    for options in ({"model": "some/model"}, {"layers": 2}):
        shape = customise(SMOLLM2, **options).drafter
        assert (shape.start, shape.taps) == ("target", None)
    assert customise(SMOLLM2, layers=2).drafter.layers == 2
    with pytest.raises(DBlastError, match="--target smollm2"):
        customise(TINY, model="some/model")


def test_a_folder_brings_its_own_shape(written, tmp_path):
    drafter, folder = written
    shape = customise(SMOLLM2, start=str(folder)).drafter
    assert shape.start == str(folder) and shape.draft_vocabulary == 12
    assert list(shape.taps) == list(drafter.config.target_layer_ids)
    assert (shape.layers, shape.block_length) == (drafter.config.num_hidden_layers, drafter.config.block_length)
    with pytest.raises(DBlastError, match="holds no drafter"):
        customise(SMOLLM2, start=str(tmp_path))


def test_options_reach_both_kinds_of_training_data():
    plan = customise(SMOLLM2, prompts="hub", tasks="chat, code", training_prompts=5, pretraining_prompts=7)
    assert (plan.data.training_prompts, plan.pretrain_data.training_prompts) == (5, 7)
    for data in (plan.data, plan.pretrain_data):
        assert data.prompts == "hub" and data.tasks == ("chat", "code")
