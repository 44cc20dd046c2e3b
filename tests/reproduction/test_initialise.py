"""Starting points of a drafter: random, the target's layers, fresh category heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dblast.backbone import DBlastConfig
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.training import frequent_tokens, new_drafter, start_from_target, tap_scales
from tests.checks import refused
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
    features = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(5))
    out = drafter(torch.tensor([[7, 8, 9]]), torch.tensor([[2, 5, 9]]), features)
    return drafter.logits(out.branch_hidden)


# -- random --------------------------------------------------------------------------------------


def test_new_drafter_depends_on_its_seed_alone(llama):
    config = config_for(llama, num_categories=2)
    before = torch.get_rng_state()
    first = new_drafter(config, llama, seed=0)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    again, other = new_drafter(config, llama, seed=0), new_drafter(config, llama, seed=1)
    for name, value in first.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.fc.weight, other.fc.weight)


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
    with refused("2 target layers", "0..3", str(layers)):
        start_from_target(drafter, llama, torch.ones(2), layers)


def test_layers_of_another_family_are_refused(qwen3):
    drafter = new_drafter(config_for(qwen3, use_qk_norm=False), qwen3, seed=0)
    with refused("q_norm"):
        start_from_target(drafter, qwen3, torch.ones(2))


def test_layers_of_another_shape_are_refused(llama):
    config = config_for(llama)
    config.intermediate_size = 40
    drafter = new_drafter(config, llama, seed=0)
    with refused("does not fit"):
        start_from_target(drafter, llama, torch.ones(2))


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


@pytest.mark.parametrize("draft_vocab_size", [0, 12])
@pytest.mark.parametrize("start", [0, 1, 4])
def test_adding_categories_keeps_the_backbone(llama, make_drafter, start, draft_vocab_size):
    backbone = make_drafter(llama, num_categories=start, draft_vocab_size=draft_vocab_size)
    drafter = backbone.with_categories(3, seed=0)
    kept = {name: value for name, value in backbone.state_dict().items() if not name.startswith(HEADS)}
    for name, value in kept.items():
        assert torch.equal(value, drafter.state_dict()[name])
    assert set(drafter.state_dict()) - set(kept) == {f"{h}{k}" for h in HEADS for k in ("weight", "bias")}
    assert drafter.config.num_categories == 3 and drafter.config.target_layer_ids == backbone.config.target_layer_ids
    if draft_vocab_size:
        tokens = drafter.greedy_tokens(torch.randn(4, 3, 3, 32))
        assert set(tokens.flatten().tolist()) <= set(drafter.draft_token_ids.tolist())


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
    before = torch.get_rng_state()
    first, again, other = (backbone.with_categories(2, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
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


def test_fewer_than_one_category_is_refused(llama, make_drafter):
    with refused("K", "0"):
        make_drafter(llama).with_categories(0, seed=0)
