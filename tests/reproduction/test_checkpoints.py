"""Shipped drafters: written whole, checked on loading."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config
from typer.testing import CliRunner

from dblast.reproduction import checkpoints
from dblast.reproduction.cli import app
from dblast.support.files import MANIFEST, RECORD, check_manifest
from dblast.reproduction.checkpoints import SHIPPED, shipped_drafter
from dblast.drafter import DBlastDrafter
from dblast.errors import ArtefactError, DBlastError
from dblast.reproduction.demo import check_target_name
from dblast.reproduction.experiments import check_target
from dblast.reproduction.initialise import start_drafter
from dblast.reproduction.plan_options import customise
from dblast.reproduction.pretraining import pretraining_plan
from dblast.reproduction.profiles import PROFILES, SMOLLM2, TINY, DrafterConfig, Profile
from dblast.trajectories import sample_trajectories
from tests.conftest import MASK_TOKEN_ID


@pytest.fixture
def written(llama, make_drafter, tmp_path):
    drafter = make_drafter(llama, num_categories=0, draft_vocab_size=12)
    return drafter, drafter.save(tmp_path / "made", {"history": [{"step": 0}]}, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", RECORD, MANIFEST])
def test_a_checkpoint_that_lacks_a_file_is_refused(written, name):
    """Files that are damaged: test_damage.py."""
    (written[1] / name).unlink()
    with pytest.raises(ArtefactError, match="missing or damaged"):
        check_manifest(written[1])


def test_a_manifest_must_name_every_file(written):
    path = written[1] / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]["model.safetensors"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtefactError, match="model.safetensors"):
        check_manifest(written[1])


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


@pytest.mark.parametrize("word", ["target", "shipped", "random"])
def test_words_win_over_folders_of_their_name(written, tmp_path, monkeypatch, word):
    shutil.copytree(written[1], tmp_path / word)
    monkeypatch.chdir(tmp_path)
    shape = customise(SMOLLM2, start=word).drafter
    assert shape == replace(SMOLLM2.drafter, start=word)
    shape = customise(SMOLLM2, start=f"./{word}").drafter
    assert (shape.start, shape.layers, shape.draft_vocabulary) == (f"./{word}", 2, 12) and not shape.pretrained_here


def test_a_folder_called_shipped_is_not_what_is_shipped(llama, written, tmp_path, monkeypatch):
    drafter, folder = written
    monkeypatch.setattr(checkpoints, "CHECKPOINTS", folder.parent)
    monkeypatch.setattr(checkpoints, "SHIPPED", {llama.name: folder.name})
    (tmp_path / "cwd" / "shipped").mkdir(parents=True)
    (tmp_path / "cwd" / "shipped" / MANIFEST).write_text("no manifest")
    monkeypatch.chdir(tmp_path / "cwd")
    taps = list(drafter.config.target_layer_ids)
    shape = DrafterConfig(layers=2, block_length=drafter.config.block_length, draft_vocabulary=12, start="shipped")
    monkeypatch.setattr("dblast.reproduction.experiments.open_target", lambda plan: llama)
    short = replace(SMOLLM2.data, evaluation_tokens=8, evaluation_per_task=1)
    check_target(replace(SMOLLM2, data=short, drafter=replace(shape, taps=tuple(taps))))


def test_the_tiny_target_is_no_folder(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    for use in (lambda: customise(SMOLLM2, model="tiny"), lambda: check_target_name("tiny")):
        with pytest.raises(DBlastError, match=r"'tiny'.*\./tiny"):
            use()
    assert customise(SMOLLM2, model="./tiny").target == "./tiny"
    check_target_name("./tiny")


def test_a_drafter_with_category_heads_is_no_start(llama, make_drafter, tmp_path):
    folder = make_drafter(llama, num_categories=2).save(tmp_path / "made")
    with pytest.raises(DBlastError, match="category heads already"):
        start_drafter(DrafterConfig(block_length=3, start=str(folder)), llama, [], [0, 2])


@pytest.mark.parametrize("size, kept", [(8192, 0), (40, 0), (39, 39), (0, 0)])
def test_a_draft_vocabulary_is_never_larger_than_the_targets(llama, make_trajectory, size, kept):
    shape = DrafterConfig(layers=1, block_length=3, draft_vocabulary=size, start="random")
    drafter = start_drafter(shape, llama, [make_trajectory()], [2])
    assert drafter.config.draft_vocab_size == kept and len(drafter.target_head) == (kept or 40)


def test_an_unsupported_model_is_refused_before_anything_is_sampled(tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(GPT2Config().to_dict()))
    monkeypatch.setattr("dblast.reproduction.experiments.sample_trajectories", lambda *_, **__: pytest.fail("sampled"))
    for command in ("pretrain", "train"):
        done = CliRunner().invoke(app, [command, "--target", "smollm2", "--model", str(tmp_path / "gpt2")])
        assert isinstance(done.exception, DBlastError) and "'gpt2'" in str(done.exception), done.exception
        assert "llama, mistral, qwen3" in str(done.exception)


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


# -- from a model of one's own to a drafter ------------------------------------------------------


def test_a_model_of_ones_own_is_pretrained_and_fine_tuned_from_the_command_line(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("DBLAST_CACHE", str(tmp_path / "cache"))
    llama.model.save_pretrained(tmp_path / "target")
    llama.tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "mine.jsonl"
    # No prompt twice, not even in another task: equal ones would stay on one side of the split.
    last = {"chat": "w17", "code": "w18"}
    lines = [{"task": task, "turns": [f"w{n} {word}"]} for task, word in last.items() for n in range(4, 14)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # The smoke profile's few, short responses; two layers, and the whole of a vocabulary below the plan's 8192 tokens.
    small = replace(
        SMOLLM2,
        data=replace(SMOLLM2.data, training_tokens=12, evaluation_tokens=12),
        pretrain_data=replace(SMOLLM2.pretrain_data, training_tokens=12, evaluation_tokens=12),
        drafter=replace(SMOLLM2.drafter, block_length=3),
        pretrain=replace(SMOLLM2.pretrain, sequences=2, anchors=4, precision="float32", evaluate_every=2),
        finetune=replace(SMOLLM2.finetune, sequences=2, anchors=4, precision="float32", evaluate_every=2),
        precision="float32",
    )
    # Under a name that there is: others are refused before anything is looked up.
    monkeypatch.setitem(PROFILES, "losses", Profile("losses", (small,)))
    common = ["--profile", "losses", "--target", "smollm2", "--model", str(tmp_path / "target")]
    common += ["--mask-token-id", str(MASK_TOKEN_ID), "--prompts", str(prompts), "--tasks", "chat,code"]
    made, tuned = tmp_path / "my-dflash", tmp_path / "my-drafter"

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    pretraining = ["--layers", "2", "--steps", "3", "--training-prompts", "8", "--output", str(made)]
    text = run("pretrain", *common, *pretraining)
    assert text.count("accepted length") == 3 and str(made) in text
    record = json.loads((check_manifest(made) / RECORD).read_text())
    assert (record["anchors"], record["training"]["loss"], len(record["held_out"])) == (24, "KD", 3)
    assert record["history"][-1]["step"] == 3

    fine = ["--start", str(made), "-K", "2", "--loss", "AL", "--steps", "2", "--training-prompts", "8"]
    sampled = []

    def counted(target, prompts, *rest, **options):
        sampled.append(len(prompts))
        return sample_trajectories(target, prompts, *rest, **options)

    monkeypatch.setattr("dblast.reproduction.experiments.sample_trajectories", counted)
    text = run("train", *common, *fine, "--output", str(tuned))
    # A drafter that is given needs no data of its own training: 4096 prompts by this plan.
    assert sampled and max(sampled) <= len(lines)
    assert text.count("accepted length") == 3
    drafter = DBlastDrafter.from_pretrained(tuned)
    config = drafter.config
    assert (config.num_categories, config.num_hidden_layers, config.block_length, config.draft_vocab_size) == (2, 2, 3, 0)
    # It says what it is for and what made it, and decodes as it was calibrated.
    assert (config.target_name, config.mask_token_id) == (str(tmp_path / "target"), MASK_TOKEN_ID)
    assert config.target_identity == llama.identity() and config.chat_options == {"enable_thinking": False}
    assert set(config.category_temperatures) == {"high", "medium", "low"}
    assert config.recipe["variant"]["loss"] == "AL" and config.recipe["training"]["steps"] == 2
    assert json.loads((check_manifest(tuned) / RECORD).read_text())["history"][-1]["step"] == 2
    decoding = ["generate", "--prompt", "w5 w7", "--target", str(tmp_path / "target"), "--max-new-tokens", "4"]
    assert "accepted length" in run(*decoding, "--drafter", str(tuned))
    # Without a mask token nothing starts.
    done = CliRunner().invoke(app, ["train", *common[:6], "--start", "target", "--training-prompts", "9"])
    assert isinstance(done.exception, DBlastError) and "--mask-token-id" in str(done.exception)
    # So is a drafter to start from that is damaged or of another shape, before anything is sampled.
    monkeypatch.setattr("dblast.reproduction.experiments.sample_trajectories", lambda *_, **__: pytest.fail("this sampled"))
    for name, harm, words in (
        ("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "missing or damaged"),
        ("manifest", lambda _: b"", "manifest"),
        ("config.json", lambda data: data + b" ", "missing or damaged"),
    ):
        harmed = tmp_path / f"harmed-{name}"
        shutil.copytree(made, harmed)
        path = harmed / (MANIFEST if name == "manifest" else name)
        path.write_bytes(harm(path.read_bytes()))
        done = CliRunner().invoke(app, ["train", *common, "--start", str(harmed), "--training-prompts", "9"])
        assert isinstance(done.exception, DBlastError) and words in str(done.exception), done.exception
    fewer = ["--start", str(made), "--block-length", "2", "--training-prompts", "9"]
    done = CliRunner().invoke(app, ["train", *common, *fewer])
    assert isinstance(done.exception, DBlastError) and "drafts blocks of 3 tokens" in str(done.exception)
    # An output that exists is refused before anything runs.
    done = CliRunner().invoke(app, ["pretrain", *common, *pretraining])
    assert isinstance(done.exception, DBlastError) and "exists already" in str(done.exception)
