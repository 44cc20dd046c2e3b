"""Branch health: known mixtures, and a drafter's own numbers."""

from __future__ import annotations

import math

import pytest
import torch

from dblast.reproduction.branch_health import branch_health, drafter_health
from dblast.errors import DBlastError


def test_equal_branches_that_are_used_equally():
    health = branch_health(torch.full((5, 4, 3), 7), torch.full((5, 4), math.log(0.25)))
    assert health["effective_branches"] == pytest.approx(4) == health["branches_per_block"]
    assert health["first_tokens"] == pytest.approx(1) == health["blocks"]
    assert [health[f"wins_{z}"] for z in (1, 2, 3, 4)] == [1, 0, 0, 0]


def test_a_branch_for_every_block_is_in_use_although_each_block_has_one():
    branches = torch.arange(4 * 4 * 2).view(4, 4, 2)
    prior = torch.eye(4).clamp(min=1e-12).log()
    health = branch_health(branches, prior)
    assert health["effective_branches"] == pytest.approx(4)
    assert health["branches_per_block"] == pytest.approx(1)
    assert all(health[f"wins_{z}"] == 0.25 for z in (1, 2, 3, 4))


def test_a_dead_branch_shows():
    prior = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]).log()
    health = branch_health(torch.arange(18).view(2, 3, 3), prior)
    assert health["effective_branches"] == pytest.approx(2) == health["branches_per_block"]
    assert health["wins_3"] == 0


def test_distinct_tokens_and_blocks_are_counted():
    one = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 4], [5, 2, 3]])
    two = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    health = branch_health(torch.stack([one, two]), torch.full((2, 4), math.log(0.25)))
    assert health["blocks"] == pytest.approx((3 + 1) / 2)
    assert health["first_tokens"] == pytest.approx((2 + 1) / 2)


def test_the_mean_prior_is_not_the_mean_entropy():
    prior = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    health = branch_health(torch.zeros(2, 2, 1, dtype=torch.long), prior.log())
    entropy = [-sum(p * math.log(p) for p in row) for row in [[0.6, 0.4], [0.9, 0.1], [0.3, 0.7]]]
    assert health["effective_branches"] == pytest.approx(math.exp(entropy[0]))
    assert health["branches_per_block"] == pytest.approx((math.exp(entropy[1]) + math.exp(entropy[2])) / 2)
    assert (health["wins_1"], health["wins_2"]) == (0.5, 0.5)


@pytest.mark.parametrize("shape", [((0, 2, 3), (0, 2)), ((2, 3), (2, 3)), ((2, 3, 4), (2, 4))])
def test_shapes_that_do_not_fit_are_refused(shape):
    with pytest.raises(DBlastError, match=r"branches must be \(N, K, b\)"):
        branch_health(torch.zeros(shape[0], dtype=torch.long), torch.zeros(shape[1]))


def test_a_drafters_health_is_that_of_its_blocks(llama, make_drafter, make_trajectory):
    drafter = make_drafter(llama, num_categories=3)
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    # More anchors than one packed row holds.
    rows = [make_trajectory(prompt=3, response=n, width=width, seed=n) for n in (5, 30)]
    health = drafter_health(drafter, rows)
    anchors = 0
    first = 0.0
    for row in rows:
        for a in range(len(row.response_ids)):
            position = len(row.prompt_ids) + a - 1
            out = drafter(row.tokens[position].view(1, 1), torch.tensor([[position]]), row.features[None, :position])
            first += drafter.greedy_tokens(out.branch_hidden)[0, :, 0].unique().numel()
            anchors += 1
    assert anchors == 35 and health["first_tokens"] == pytest.approx(first / anchors)
    with pytest.raises(DBlastError, match="no trajectories"):
        drafter_health(drafter, [])


def test_fresh_heads_start_alike(llama, make_drafter, make_trajectory):
    drafter = make_drafter(llama, num_categories=0).with_categories(4, seed=0)
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    health = drafter_health(drafter, [make_trajectory(width=width)])
    assert health["effective_branches"] == pytest.approx(4)
    assert health["blocks"] < 4
