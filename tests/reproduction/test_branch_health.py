"""Branch health: known mixtures, and a drafter's own numbers."""

from __future__ import annotations

import math
from statistics import mean

import pytest
import torch

from dblast.reproduction.branch_health import branch_health, drafter_health
from dblast.errors import DBlastError
from tests.helpers import generator


def test_equal_branches_that_are_used_equally():
    health = branch_health(torch.full((5, 4, 3), 7), torch.full((5, 4), math.log(0.25)))
    assert health["effective_branches"] == pytest.approx(4) == health["branches_per_block"]
    assert health["first_tokens"] == pytest.approx(1) == health["blocks"]
    assert [health[f"wins_{z}"] for z in (1, 2, 3, 4)] == [1, 0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_numbers_of_a_mixture_are_those_of_a_loop(k, seed):
    """With branches that coincide in part and, of several, one that is never drawn."""
    branches = torch.randint(2, (6, k, 2), generator=generator(seed))
    prior = torch.rand(6, k, generator=generator(seed), dtype=torch.float64)
    prior[:, 1:2] = 0
    prior = prior / prior.sum(-1, keepdim=True)
    rows = prior.tolist()

    def perplexity(row):
        return math.exp(-sum(p * math.log(p) for p in row if p > 0))

    expected = {
        "effective_branches": perplexity(prior.mean(0).tolist()),
        "branches_per_block": mean([perplexity(row) for row in rows]),
        "first_tokens": mean([len({branch[0] for branch in block}) for block in branches.tolist()]),
        "blocks": mean([len(set(map(tuple, block))) for block in branches.tolist()]),
    }
    expected |= {f"wins_{z + 1}": mean([row[z] == max(row) for row in rows]) for z in range(k)}
    assert branch_health(branches, prior.log()) == pytest.approx(expected)


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
