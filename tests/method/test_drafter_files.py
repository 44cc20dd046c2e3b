"""Loading and saving drafters: one way, nothing guessed, nothing half-written, in DFlash's published format too."""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dblast.backbone import DBlastConfig
from dblast.drafter import DBlastDrafter
from dblast.errors import ArtefactError, DBlastError
from dblast.support.files import RECORD, check_manifest
from dblast.sampling import SETTINGS, SamplingSettings
from tests.checks import refused
from tests.conftest import MASK_TOKEN_ID
from tests.helpers import generator

#: config.json of z-lab/Qwen3-4B-DFlash-b16, with the sizes of the targets here.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 2]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 96,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 40,
}


@pytest.fixture
def published(qwen3, make_drafter, tmp_path) -> Path:
    """A folder as z-lab publishes it."""
    drafter = make_drafter(qwen3, num_categories=0).to(torch.bfloat16)
    folder = tmp_path / "dflash"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    save_file(drafter.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change_config(folder: Path, **changes) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_weights(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(change(state) or state, folder / "model.safetensors", metadata={"format": "pt"})


# -- DFlash's own format -------------------------------------------------------------------------


@pytest.mark.parametrize("read", [DBlastDrafter.load, DBlastDrafter.from_pretrained])
def test_a_published_folder_is_a_drafter_without_category_heads(qwen3, published, read, caplog, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = read(published)
    assert drafter.config.num_categories == 0 and drafter.category_parameters() == 0
    assert drafter.dtype == torch.bfloat16 and not drafter.training
    assert (drafter.config.block_length, drafter.config.target_layer_ids) == (3, [0, 2])
    assert (drafter.config.rope_theta, drafter.config.rms_norm_eps) == (1e6, 1e-6)
    assert not caplog.text and capfd.readouterr() == ("", "")
    drafter.attach(qwen3)


def test_the_dtype_can_be_chosen(published):
    assert DBlastDrafter.load(published, dtype=torch.float32).dtype == torch.float32
    assert DBlastDrafter.from_pretrained(published, dtype=torch.float32).dtype == torch.float32


@torch.no_grad()
def logits(drafter: DBlastDrafter) -> torch.Tensor:
    features = torch.randn(1, 9, 64, generator=generator(5))
    return drafter.logits(drafter(torch.tensor([[7, 8, 9]]), torch.tensor([[2, 5, 9]]), features).branch_hidden)


def test_a_published_drafter_computes_what_its_weights_say_takes_heads_and_is_stored_as_our_own(
    qwen3, make_drafter, published, tmp_path
):
    expected = logits(make_drafter(qwen3, num_categories=0).to(torch.bfloat16).float())
    loaded = DBlastDrafter.load(published, dtype=torch.float32).attach(qwen3)
    loaded.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "dblast"
    for drafter in (loaded, DBlastDrafter.load(tmp_path / "ours").attach(qwen3)):
        torch.testing.assert_close(logits(drafter), expected, atol=1e-5, rtol=1e-5)
    found = logits(loaded.with_categories(4, seed=1).eval())
    change = torch.linalg.vector_norm(found - expected, dim=(0, 2, 3)) / torch.linalg.vector_norm(expected)
    assert change.shape == (4,) and 0 < change.min() and change.max() < 0.05


@pytest.mark.parametrize("key", ["block_size", "target_layer_ids", "mask_token_id"])
def test_draft_settings_are_read_from_either_place(published, key):
    """Newer DFlash files keep the block size with the others; some keep all of them at the top."""
    inner = dict(PUBLISHED["dflash_config"])
    if key == "block_size":
        change_config(published, block_size=None, dflash_config=inner | {"block_size": 4})
    else:
        change_config(published, **{key: inner.pop(key)}, dflash_config=inner)
    config = DBlastDrafter.load(published).config
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (4, [0, 2], MASK_TOKEN_ID)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias = True"]),
        ({"mlp_bias": True}, ["mlp_bias = True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout = 0.1"]),
        ({"is_causal": True}, ["is_causal = True"]),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, ["'sliding_attention'"]),
        ({"layer_types": None, "sliding_window": 8, "use_sliding_window": None}, ["sliding_window = 8"]),
        ({"layer_types": None, "sliding_window": 8, "use_sliding_window": True}, ["sliding_window = 8"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope type 'yarn'"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["rope type 'linear'"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2}}, ["rope_parameters", "factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["rope_parameters", "full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"v_head_dim": 16}, ["v_head_dim = 16", "12"]),
        ({"target_hidden_size": 64}, ["target_hidden_size = 64", "32"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"dflash_config": PUBLISHED["dflash_config"] | {"selector_rank": 256}}, ["selector_rank = 256"]),
        ({"dflash_config": PUBLISHED["dflash_config"] | {"final_logit_softcapping": 20.0}}, ["final_logit_softcapping"]),
        ({"dflash_config": PUBLISHED["dflash_config"] | {"output_multiplier": 0.2}}, ["output_multiplier = 0.2"]),
        ({"dflash_config": PUBLISHED["dflash_config"] | {"attention_sink_bias": True}}, ["attention_sink_bias"]),
        ({"dflash_config": PUBLISHED["dflash_config"] | {"block_size": 16}}, ["two block sizes, 4 and 16"]),
        ({"dflash_config": {"mask_token_id": MASK_TOKEN_ID}}, ["lacks target_layer_ids"]),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, ["mask_token_id is not set"]),
        ({"block_size": None}, ["lacks block_size"]),
        ({"rope_theta": None}, ["lacks rope_theta"]),
        ({"rms_norm_eps": None, "num_target_layers": None}, ["lacks rms_norm_eps, num_target_layers"]),
        ({"speculators_model_type": "dflash"}, ["speculators_model_type"]),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(published, changes, words):
    change_config(published, **changes)
    with refused(str(published), *words):
        DBlastDrafter.load(published)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 8, "layer_types": None},
        {"sliding_window": 8, "use_sliding_window": True},
        {"is_causal": False},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"dflash_config": PUBLISHED["dflash_config"] | {"num_anchors": 512, "loss_decay_gamma": 7.0, "use_swa": False}},
        {"v_head_dim": 12, "target_hidden_size": 32, "partial_rotary_factor": 1.0},
    ],
)
def test_values_that_change_nothing_pass_without_a_warning(published, changes):
    change_config(published, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DBlastDrafter.load(published)


def test_keys_that_mean_nothing_here_are_named_once(published):
    change_config(published, colour="blue", answer=42)
    with pytest.warns(UserWarning, match="answer, colour") as caught:
        DBlastDrafter.load(published)
    assert len(caught) == 1


# -- damage --------------------------------------------------------------------------------------


def loads_as_refusal(folder: Path, *words: str, kind=DBlastError, capfd=None) -> None:
    for read in (DBlastDrafter.load, DBlastDrafter.from_pretrained):
        with refused(str(folder), *words, kind=kind):
            read(folder)
    assert capfd is None or capfd.readouterr() == ("", "")


def test_weights_that_do_not_fit_are_named_and_nothing_else_is_printed(published, capfd):
    change_config(published, num_hidden_layers=1, layer_types=None)
    loads_as_refusal(published, "unexpected layers.1.", capfd=capfd)
    change_config(published, num_hidden_layers=3)
    loads_as_refusal(published, "missing layers.2.", capfd=capfd)
    change_config(published, num_hidden_layers=2, intermediate_size=56)
    loads_as_refusal(published, "mismatched layers.0.mlp.", capfd=capfd)


def test_a_checkpoint_without_its_draft_vocabulary_is_refused(llama, make_drafter, tmp_path):
    make_drafter(llama, draft_vocab_size=12).save_pretrained(tmp_path)
    change_weights(tmp_path, lambda state: {k: v for k, v in state.items() if k != "draft_token_ids"})
    loads_as_refusal(tmp_path, "missing draft_token_ids")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(published, value):
    def spoil(state):
        state["layers.1.mlp.up_proj.weight"][3, 4] = value

    change_weights(published, spoil)
    loads_as_refusal(published, "layers.1.mlp.up_proj.weight is not finite", kind=ArtefactError)


def test_a_pickle_is_never_read(llama, make_drafter, tmp_path, monkeypatch):
    drafter = make_drafter(llama)
    drafter.save_pretrained(tmp_path)
    torch.save(drafter.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    loads_as_refusal(tmp_path, "pytorch_model.bin is a pickle")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "qwen3"}'])
def test_a_configuration_that_is_none_is_refused(published, content):
    (published / "config.json").write_text(content)
    loads_as_refusal(published)


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(published, name, cut_off):
    content = (published / name).read_bytes()
    (published / name).unlink()
    if cut_off:
        (published / name).write_bytes(content[:-50])
    loads_as_refusal(published)


def test_a_folder_that_is_not_there_is_called_missing(tmp_path):
    loads_as_refusal(tmp_path / "none", "no such folder")


# -- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 12}], ids=["whole", "draft-vocabulary"])
@pytest.mark.parametrize("num_categories", [0, 1, 3])
def test_what_is_saved_comes_back(llama, make_drafter, tmp_path, num_categories, settings):
    drafter = make_drafter(llama, num_categories=num_categories, **settings)
    folder = drafter.save(tmp_path / "deep" / "drafter", {"history": [1]})
    assert json.loads((folder / RECORD).read_text()) == {"history": [1]}
    assert json.loads((folder / "config.json").read_text())["num_categories"] == num_categories
    check_manifest(folder)
    for read in (DBlastDrafter.load, DBlastDrafter.from_pretrained):
        loaded = read(folder)
        assert loaded.config.num_categories == num_categories and loaded.dtype == torch.float32
        assert loaded.state_dict().keys() == drafter.state_dict().keys()
        for name, value in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)


def test_a_drafter_is_saved_in_bfloat16_and_stays_as_it_is(llama, make_drafter, tmp_path):
    drafter = make_drafter(llama, draft_vocab_size=12)
    before = copy.deepcopy(drafter.state_dict())
    half = DBlastDrafter.load(drafter.save(tmp_path / "half", dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16 and not (tmp_path / "half" / RECORD).exists()
    assert not list(tmp_path.glob("*.part"))
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, before[name]) and value.dtype == before[name].dtype
        rounded = value.to(torch.bfloat16) if value.is_floating_point() else value
        assert torch.equal(half.state_dict()[name], rounded)


def test_a_changed_file_is_noticed_by_every_way_of_loading(llama, make_drafter, tmp_path):
    folder = make_drafter(llama).save(tmp_path / "made")
    change_config(folder, initializer_range=0.5)
    loads_as_refusal(folder, "config.json is missing or damaged", kind=ArtefactError)


@pytest.mark.parametrize("stage", ["save_pretrained", "replace"])
def test_a_drafter_appears_whole_or_not_at_all(llama, make_drafter, tmp_path, monkeypatch, stage):
    def fail(*_, **__):
        raise KeyboardInterrupt

    drafter = make_drafter(llama)
    monkeypatch.setattr(*{"save_pretrained": (DBlastDrafter, stage, fail), "replace": (os, stage, fail)}[stage])
    with pytest.raises(KeyboardInterrupt):
        drafter.save(tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(llama, make_drafter, tmp_path):
    with pytest.raises(DBlastError, match="exists already"):
        make_drafter(llama).save(tmp_path)
    assert not list(tmp_path.iterdir())


# -- what a drafter remembers --------------------------------------------------------------------


def remembering(target, **settings) -> DBlastDrafter:
    config = DBlastConfig.for_target(target, num_layers=1, block_length=3, **settings)
    return DBlastDrafter(config)


def test_a_drafter_made_for_a_target_remembers_it(llama, tmp_path):
    drafter = remembering(llama, num_categories=0)
    drafter.config.category_temperatures = {"high": 0.4}
    drafter.config.recipe = {"loss": "AL"}
    config = DBlastDrafter.load(drafter.save(tmp_path / "made")).config
    assert config.target_name == "llama" and config.mask_token_id == llama.mask_token_id
    assert config.target_identity == llama.identity() and config.target_identity["family"] == "llama"
    assert config.chat_options == {"enable_thinking": False}
    assert config.category_temperatures == {"high": 0.4} and config.recipe == {"loss": "AL"}


def test_attach_refuses_a_target_of_another_family_or_tokenizer(llama, qwen3):
    drafter = remembering(llama)
    drafter.attach(llama)
    drafter.attach(llama.model)
    for other in (qwen3, qwen3.model):
        with refused("llama", "family", "qwen3"):
            drafter.attach(other)
    drafter.config.target_identity = llama.identity() | {"tokenizer": "0" * 16}
    with refused("tokenizer"):
        drafter.attach(llama)
    # A bare model brings no tokenizer to compare.
    drafter.attach(llama.model)


def test_older_drafters_know_only_sizes(llama, make_drafter):
    config = make_drafter(llama).config
    assert config.target_identity is config.target_name is config.chat_options is config.recipe is None
    make_drafter(llama).attach(llama)


def test_the_calibrated_category_temperature_is_found_by_name_or_value(llama, make_drafter):
    drafter = make_drafter(llama)
    assert drafter.category_temperature("high") == 1.0
    drafter.config.category_temperatures = {"high": 0.4, "low": 0.0}
    assert drafter.category_temperature("high") == drafter.category_temperature(SETTINGS["high"]) == 0.4
    assert drafter.category_temperature("low") == 0.0 and drafter.category_temperature("medium") == 1.0
    assert drafter.category_temperature(SamplingSettings(0.9)) == 1.0
    with pytest.raises(DBlastError, match="unknown setting 'warm'"):
        drafter.category_temperature("warm")
