"""A model is its content, not its name: artefacts of one are not found for another."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedConfig

from dblast.reproduction import experiments, identity
from dblast.reproduction.identity import check_commit, hub_commit, model_identity
from dblast.reproduction.profiles import get_profile
from dblast.support.bundled import SMOLLM2_SHA256
from tests.checks import refused


@pytest.fixture(autouse=True)
def forget():
    hub_commit.cache_clear()
    yield
    hub_commit.cache_clear()


@pytest.fixture
def model(llama, tmp_path):
    folder = tmp_path / "model"
    llama.model.save_pretrained(folder)
    llama.tokenizer.save_pretrained(folder)
    return folder


def retrain(folder) -> None:
    changed = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        changed.model.norm.weight += 0.5
    changed.save_pretrained(folder)


def plan_for(name):
    plan = get_profile("smoke").plan("smollm2")
    return replace(plan, target=str(name), label="own", drafter=replace(plan.drafter, start="target"))


def keys(plan):
    """Of trajectories, and of all that is made from them."""
    stages = [experiments.trajectory_stage(plan, "training"), experiments.trajectory_stage(plan, "high")]
    stages += [experiments.pretrain_stage(plan), experiments.variant_stage(plan, plan.variants[0], 0)]
    return [stage.key for stage in stages]


def test_a_model_retrained_in_place_is_another_target(model):
    before = keys(plan_for(model))
    assert keys(plan_for(model)) == before
    retrain(model)
    assert not set(keys(plan_for(model))) & set(before)


def test_the_same_relative_name_in_two_projects_is_two_targets(model, tmp_path, monkeypatch):
    for name in ("one", "two"):
        shutil.copytree(model, tmp_path / name / "model")
    retrain(tmp_path / "two" / "model")
    found = []
    for name in ("one", "two"):
        monkeypatch.chdir(tmp_path / name)
        found.append(keys(plan_for("./model")))
    assert not set(found[0]) & set(found[1])


def test_the_same_model_elsewhere_is_the_same_target(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    assert keys(plan_for(model)) == keys(plan_for(tmp_path / "copy"))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_every_file_that_loading_reads_counts(model, file):
    before = model_identity(str(model))
    path = model / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert model_identity(str(model)) != before


def test_a_chat_template_counts_and_a_readme_does_not(model):
    before = model_identity(str(model))
    (model / "README.md").write_text("mine")
    assert model_identity(str(model)) == before
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert model_identity(str(model)) != before


def test_a_drafter_retrained_in_place_is_another_start(llama, make_drafter, tmp_path):
    plan = plan_for("smollm2")
    plan = replace(plan, drafter=replace(plan.drafter, start=str(tmp_path / "dflash")))
    make_drafter(llama, num_categories=0).save_pretrained(tmp_path / "dflash")
    before = experiments.pretrain_stage(plan).key
    make_drafter(llama, num_categories=0, seed=4).save_pretrained(tmp_path / "dflash")
    assert experiments.pretrain_stage(plan).key != before


def test_the_calibration_split_counts_where_it_is_used():
    """Scores say which split a prompt belongs to, training curves are measured on one of them."""
    plan = get_profile("smoke").plan("tiny")
    other = replace(plan, data=replace(plan.data, calibration_fraction=0.3))
    ours, theirs = keys(plan), keys(other)
    assert ours[:2] == theirs[:2] and not set(ours[2:]) & set(theirs[2:])


def test_the_bundled_target_is_the_pinned_file():
    assert model_identity("smollm2") == SMOLLM2_SHA256


# -- the hub -------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A local hub cache that holds one commit of owner/name, and a hub that can be given one."""
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "config.json").write_text("{}")
    find = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: find(name, file, cache_dir=tmp_path / "hub"))

    def publish(sha: str) -> None:
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha=sha))
        hub_commit.cache_clear()

    return SimpleNamespace(commit=commit, publish=publish)


def test_offline_a_hub_id_is_the_commit_in_the_local_cache(hub):
    assert model_identity("owner/name") == {"hub": "owner/name", "commit": hub.commit}


def test_online_a_hub_id_is_the_latest_commit(hub):
    before = keys(plan_for("owner/name"))
    hub.publish("b" * 40)
    assert model_identity("owner/name")["commit"] == "b" * 40
    assert not set(keys(plan_for("owner/name"))) & set(before)


def test_a_published_drafter_is_a_commit_too(hub):
    plan = plan_for("smollm2")
    plan = replace(plan, drafter=replace(plan.drafter, start="owner/name"))
    before = experiments.pretrain_stage(plan).key
    hub.publish("b" * 40)
    assert experiments.pretrain_stage(plan).key != before


def test_a_run_asks_the_hub_once(hub, monkeypatch):
    asked = []
    hub.publish("b" * 40)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: asked.append(1) or SimpleNamespace(sha="c" * 40))
    assert {model_identity("owner/name")["commit"] for _ in range(3)} == {"c" * 40} and asked == [1]


@pytest.mark.parametrize("name", ["nobody/nothing", "no such/name at all", "x"])
def test_an_unknown_hub_id_is_refused(hub, name):
    with refused(repr(name), "give a folder"):
        model_identity(name)


def test_a_model_that_changes_on_the_hub_meanwhile_is_refused(hub):
    config = PreTrainedConfig()
    check_commit("owner/name", config)  # what was not loaded from the hub
    config._commit_hash = hub.commit
    check_commit("owner/name", config)
    config._commit_hash = "d" * 40
    with refused("owner/name", "run the same command again"):
        check_commit("owner/name", config)


def test_what_identities_are_made_of_is_no_code_of_a_stage():
    """Their values are in every stage's description."""
    from dblast.reproduction.fingerprint import reached

    assert not {name for module, name in reached(experiments.prepare_trajectories) if module == identity.__name__}
