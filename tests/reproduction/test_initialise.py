"""Starting points of a drafter: random, the target's layers, published DFlash checkpoints, fresh category heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dblast.backbone import DBlastConfig
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.training import frequent_tokens, new_drafter, start_from_target, tap_scales
from tests.checks import one_line
from tests.helpers import assert_close, assert_same_computation

MASK, HEADS = 3, ("expander.", "prior.")


def change_per_branch(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Size of the change of every branch's logits, relative to the logits."""
    return torch.linalg.vector_norm(after - before, dim=(0, 2, 3)) / torch.linalg.vector_norm(before)


def config_for(target, **settings) -> DBlastConfig:
    settings = dict(num_layers=2, block_length=3, mask_token_id=MASK) | settings
    return DBlastConfig.for_target(target.model.config, **settings)


@torch.no_grad()
def outputs(drafter: DBlastDrafter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    out = drafter(
        torch.tensor([[7, 8, 9]]), torch.tensor([[2, 5, 9]]), torch.randn(1, 9, 64, generator=generator)
    )
    return drafter.logits(out.branch_hidden)


# -- random --------------------------------------------------------------------------------------


def test_new_drafter_depends_on_its_seed_alone(llama):
    config = config_for(llama, num_categories=2)
    first = new_drafter(config, llama, seed=0)
    torch.rand(3)
    again, other = new_drafter(config, llama, seed=0), new_drafter(config, llama, seed=1)
    for name, value in first.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_new_drafter_leaves_the_global_seed_alone(llama):
    before = torch.get_rng_state()
    new_drafter(config_for(llama), llama, seed=0)
    assert torch.equal(before, torch.get_rng_state())


# -- from the target -----------------------------------------------------------------------------


@pytest.mark.parametrize("target_name", ["llama", "qwen3"])
@pytest.mark.parametrize("layers, copied", [(None, [2, 3]), ([0, 3], [0, 3]), ([1, 1], [1, 1])])
def test_layers_and_final_norm_are_the_targets(request, target_name, layers, copied):
    target = request.getfixturevalue(target_name)
    drafter = new_drafter(config_for(target), target, seed=0)
    start_from_target(drafter, target, torch.ones(2), layers)
    for ours, index in zip(drafter.layers, copied, strict=True):
        theirs = target.model.model.layers[index].state_dict()
        assert set(ours.state_dict()) == set(theirs)
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs[name])
    assert torch.equal(drafter.norm.weight, target.model.model.norm.weight)


def test_copied_layers_are_the_drafters_own(llama):
    drafter = start_from_target(new_drafter(config_for(llama), llama, seed=0), llama, torch.ones(2))
    before = llama.model.model.layers[3].mlp.up_proj.weight.clone()
    with torch.no_grad():
        drafter.layers[1].mlp.up_proj.weight.add_(1.0)
    assert torch.equal(before, llama.model.model.layers[3].mlp.up_proj.weight)


def test_context_projection_averages_the_taps_at_unit_size(llama):
    drafter, scales = new_drafter(config_for(llama), llama, seed=0), torch.tensor([2.0, 8.0])
    start_from_target(drafter, llama, scales)
    taps = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(0))
    expected = (taps / scales[:, None]).mean(1)
    torch.testing.assert_close(drafter.fc(taps.flatten(1)), expected, atol=1e-6, rtol=1e-5)


def test_category_heads_are_left_alone(llama):
    drafter = new_drafter(config_for(llama, num_categories=2), llama, seed=0)
    before = drafter.expander.weight.clone()
    start_from_target(drafter, llama, torch.ones(2))
    assert torch.equal(before, drafter.expander.weight)


@pytest.mark.parametrize("layers", [[0], [0, 4], [-1, 0], [0, 1, 2]])
def test_layers_that_do_not_exist_are_refused(llama, layers):
    drafter = new_drafter(config_for(llama), llama, seed=0)
    with pytest.raises(DBlastError) as error:
        start_from_target(drafter, llama, torch.ones(2), layers)
    one_line(error, "2 target layers", "0..3", str(layers))


def test_layers_of_another_family_are_refused(qwen3):
    drafter = new_drafter(config_for(qwen3, use_qk_norm=False), qwen3, seed=0)
    with pytest.raises(DBlastError) as error:
        start_from_target(drafter, qwen3, torch.ones(2))
    one_line(error, "q_norm")


def test_layers_of_another_shape_are_refused(llama):
    config = config_for(llama)
    config.intermediate_size = 40
    drafter = new_drafter(config, llama, seed=0)
    with pytest.raises(DBlastError) as error:
        start_from_target(drafter, llama, torch.ones(2))
    one_line(error, "does not fit")


def test_norms_the_target_lacks_keep_their_start(llama):
    drafter = new_drafter(config_for(llama, use_qk_norm=True), llama, seed=0)
    start_from_target(drafter, llama, torch.ones(2))
    assert torch.equal(drafter.layers[0].self_attn.q_norm.weight, torch.ones(8))


def test_tap_scale_is_the_median_size_of_each_tap(make_trajectory):
    trajectory = make_trajectory(prompt=3, response=9)
    sizes = torch.tensor([500.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    features = torch.cat([sizes[:, None] * torch.ones(11, 32), 3 * sizes[:, None] * torch.ones(11, 32)], dim=1)
    scales = tap_scales([replace(trajectory, features=features.to(torch.bfloat16))], taps=2)
    torch.testing.assert_close(scales, torch.tensor([6.0, 18.0]))


def test_positions_without_a_size_do_not_count(make_trajectory):
    trajectory = make_trajectory(width=8)
    features = torch.zeros_like(trajectory.features)
    features[-2:] = 3.0
    scales = tap_scales([replace(trajectory, features=features)], taps=2)
    assert_close(scales, [3.0, 3.0])
    features[:, 4:] = 0.0
    with pytest.raises(DBlastError, match="no usable size"):
        tap_scales([replace(trajectory, features=features)], taps=2)


# -- draft vocabulary ----------------------------------------------------------------------------


def test_frequent_tokens_are_the_most_frequent_in_ascending_order(make_trajectory):
    first = replace(make_trajectory(), response_ids=torch.tensor([9, 9, 9, 5, 5, 7]))
    second = replace(make_trajectory(), response_ids=torch.tensor([7, 30, 5]))
    assert frequent_tokens([first, second], 3, 40).tolist() == [5, 7, 9]


def test_frequent_tokens_breaks_ties_and_fills_up_with_the_smaller_id(make_trajectory):
    trajectory = replace(make_trajectory(), response_ids=torch.tensor([9, 9, 6, 5]))
    assert frequent_tokens([trajectory], 2, 40).tolist() == [5, 9]
    assert frequent_tokens([trajectory], 5, 40).tolist() == [0, 1, 5, 6, 9]


# -- category heads ------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 4])
def test_adding_categories_keeps_the_backbone(llama, make_drafter, start):
    backbone = make_drafter(llama, num_categories=start)
    drafter = backbone.with_categories(3, seed=0)
    kept = {name: value for name, value in backbone.state_dict().items() if not name.startswith(HEADS)}
    for name, value in kept.items():
        assert torch.equal(value, drafter.state_dict()[name])
    assert set(drafter.state_dict()) - set(kept) == {f"{h}{k}" for h in HEADS for k in ("weight", "bias")}
    assert drafter.config.num_categories == 3 and drafter.config.target_layer_ids == backbone.config.target_layer_ids


def test_adding_categories_leaves_the_backbone_untouched(llama, make_drafter):
    backbone = make_drafter(llama, num_categories=0)
    before = outputs(backbone)
    drafter = backbone.with_categories(2, seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
    assert_same_computation(outputs(backbone), before)
    assert backbone.config.num_categories == 0


def test_seeds_differ_only_in_the_heads(llama, make_drafter):
    backbone = make_drafter(llama, num_categories=0)
    first, again, other = (backbone.with_categories(2, seed).state_dict() for seed in (0, 0, 1))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        # Biases and the prior start at zero whatever the seed.
        assert torch.equal(value, other[name]) == (name != "expander.weight")


def test_added_categories_barely_change_the_drafter(llama, make_drafter):
    backbone = make_drafter(llama, num_categories=0)
    backbone.config.initializer_range = 0.02
    before, after = outputs(backbone), outputs(backbone.with_categories(4, seed=0).eval())
    change = change_per_branch(before, after)
    assert 0 < change.min() and change.max() < 0.05


def test_adding_categories_keeps_a_draft_vocabulary(llama, make_drafter):
    backbone = make_drafter(llama, num_categories=0, draft_vocab_size=12)
    drafter = backbone.with_categories(2, seed=0)
    assert torch.equal(drafter.draft_token_ids, backbone.draft_token_ids)
    assert set(drafter.greedy_tokens(torch.randn(4, 2, 3, 32)).flatten().tolist()) <= set(
        drafter.draft_token_ids.tolist()
    )


def test_adding_categories_leaves_the_global_seed_alone(llama, make_drafter):
    backbone = make_drafter(llama, num_categories=0)
    before = torch.get_rng_state()
    backbone.with_categories(2, seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_fewer_than_one_category_is_refused(llama, make_drafter):
    with pytest.raises(DBlastError) as error:
        make_drafter(llama).with_categories(0, seed=0)
    one_line(error, "K", "0")


# -- published checkpoints -----------------------------------------------------------------------


def write_dflash(folder: Path, drafter: DBlastDrafter, **changes) -> Path:
    """A folder as z-lab publishes it: a Qwen3-like config.json and bfloat16 safetensors under DFlash's names.

    ``changes`` are parameters to replace, or to leave out where None.
    """
    ours = drafter.config
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": ours.block_size,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": ours.target_layer_ids},
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": ours.head_dim,
        "hidden_act": "silu",
        "hidden_size": ours.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": ours.intermediate_size,
        "layer_types": ["full_attention"] * ours.num_hidden_layers,
        "max_position_embeddings": 96,
        "max_window_layers": ours.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": ours.num_attention_heads,
        "num_hidden_layers": ours.num_hidden_layers,
        "num_key_value_heads": ours.num_key_value_heads,
        "num_target_layers": ours.num_target_layers,
        "rms_norm_eps": ours.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": ours.vocab_size,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = drafter.state_dict() | {name.replace("__", "."): value for name, value in changes.items()}
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items() if value is not None}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def published(qwen3, make_drafter) -> DBlastDrafter:
    """A drafter whose weights bfloat16 can hold."""
    drafter = make_drafter(qwen3, num_categories=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return drafter


def test_published_checkpoint_computes_what_its_weights_say(qwen3, published, tmp_path):
    loaded = DBlastDrafter.load(write_dflash(tmp_path / "dflash", published))
    assert loaded.config.num_categories == 0 and loaded.config.rope_theta == 1_000_000.0
    assert loaded.config.block_length == 3 and loaded.config.target_layer_ids == [0, 2]
    loaded = loaded.float().eval().attach(qwen3.model)
    torch.testing.assert_close(outputs(loaded), outputs(published), atol=1e-5, rtol=1e-5)


def test_published_checkpoint_takes_category_heads(qwen3, published, tmp_path):
    loaded = DBlastDrafter.load(write_dflash(tmp_path / "dflash", published)).with_categories(4, seed=1)
    assert loaded.category_parameters() == 4 * 32**2 + 2 * 4 * 32 + 4
    for name, value in published.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name].float())
    logits = outputs(loaded.float().eval().attach(qwen3.model))
    assert logits.shape[1] == 4
    change = change_per_branch(outputs(published), logits)
    assert 0 < change.min() and change.max() < 0.05


def test_published_checkpoint_can_be_stored_as_our_own(qwen3, published, tmp_path):
    DBlastDrafter.load(write_dflash(tmp_path / "dflash", published)).save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "dblast"
    loaded = DBlastDrafter.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval().attach(qwen3.model)
    torch.testing.assert_close(outputs(loaded), outputs(published), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"fc__weight": None}, ["missing", "fc.weight"]),
        ({"layers__1__self_attn__q_norm__weight": None}, ["missing", "layers.1.self_attn.q_norm.weight"]),
        ({"lm_head__weight": torch.zeros(4, 4)}, ["unexpected", "lm_head.weight"]),
        ({"fc__weight": torch.zeros(32, 96)}, ["mismatched", "fc.weight"]),
    ],
)
def test_checkpoint_of_another_shape_is_refused(published, tmp_path, changes, words):
    folder = write_dflash(tmp_path / "dflash", published, **changes)
    with pytest.raises(DBlastError) as error:
        DBlastDrafter.load(folder)
    one_line(error, str(folder), *words)


def test_cut_off_checkpoint_is_refused(published, tmp_path):
    folder = write_dflash(tmp_path / "dflash", published)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(DBlastError) as error:
        DBlastDrafter.load(folder)
    one_line(error, str(folder))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_incomplete_checkpoint_is_refused(published, tmp_path, missing):
    folder = write_dflash(tmp_path / "dflash", published)
    (folder / missing).unlink()
    with pytest.raises(DBlastError) as error:
        DBlastDrafter.load(folder)
    one_line(error, str(folder))


def test_checkpoint_without_mask_token_is_refused(published, tmp_path):
    folder = write_dflash(tmp_path / "dflash", published)
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["mask_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DBlastError) as error:
        DBlastDrafter.load(folder)
    one_line(error, "mask_token_id")
