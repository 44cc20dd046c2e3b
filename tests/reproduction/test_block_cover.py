"""The best branches and their prior against brute force over all sets of blocks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from dblast.reproduction.diagnosis.block_cover import _branch_nodes, _split, best_blocks, cover_value
from dblast.errors import DBlastError
from dblast.replay import expected_accepted
from dblast.verifier import greedy_branch_acceptance
from tests.helpers import all_blocks, assert_close, generator, random_log_prior, random_target, target_log_p

VOCABULARY, LENGTH = 3, 3

each_seed = pytest.mark.parametrize("seed", range(4))
each_support = pytest.mark.parametrize("zeros", [False, True], ids=["p > 0", "p with zeros"])


def random_law(seed, zeros=False):
    """All blocks of a random target, their conditionals and their probabilities."""
    blocks = all_blocks(VOCABULARY, LENGTH)
    log_p = target_log_p(random_target(VOCABULARY, LENGTH, generator(seed), zeros), blocks)
    return blocks, log_p, log_p.sum(-1).exp()


def trie_prior(branches, blocks, weight):
    """The prior under which every emitted token that some branch offers is accepted; branches are distinct."""
    return _split(*_branch_nodes(branches, blocks.long(), weight.double()))


def distinct_branches(blocks, count, seed):
    return blocks[torch.randperm(len(blocks), generator=generator(seed))[:count]]


def prefixes(branches):
    return {tuple(branch[:length]) for branch in branches for length in range(1, len(branch) + 1)}


def prefix_weights(blocks, weight):
    """Probability of every prefix, in plain Python."""
    total = defaultdict(float)
    for block, w in zip(blocks.tolist(), weight.tolist(), strict=True):
        for prefix in prefixes([block]):
            total[prefix] += w
    return total


def covered(branches, blocks, weight):
    """Total probability of the distinct prefixes of the branches, in plain Python."""
    total = prefix_weights(blocks, weight)
    return sum(total[prefix] for prefix in prefixes(branches.tolist()))


def exact_accepted(branches, log_prior, blocks, log_p):
    """Expected accepted length of one greedy-branch step by enumeration of the emitted block."""
    count = len(blocks)
    acceptance = greedy_branch_acceptance(branches.expand(count, -1, -1), log_prior.expand(count, -1), blocks, log_p)
    return float((log_p.sum(-1).exp() * expected_accepted(acceptance.double())).sum())


@each_seed
@each_support
@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_set_of_blocks_covers_more(count, zeros, seed):
    blocks, _, weight = random_law(seed, zeros)
    total = prefix_weights(blocks, weight)
    subsets = itertools.combinations(blocks.tolist(), count)
    best = max(sum(total[prefix] for prefix in prefixes(subset)) for subset in subsets)
    branches, _ = best_blocks(blocks, weight, count)
    assert_close(covered(branches, blocks, weight), best, tolerance=1e-12)
    assert_close(cover_value(branches, blocks, weight), best, tolerance=1e-12)


@each_seed
@each_support
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_accepted_length_is_the_covered_probability(count, zeros, seed):
    """For the best branches and for any others, with the prior that follows the target through the trie."""
    blocks, log_p, weight = random_law(seed, zeros)
    branches, log_prior = best_blocks(blocks, weight, count)
    assert_close(exact_accepted(branches, log_prior, blocks, log_p), cover_value(branches, blocks, weight), 1e-5)
    assert_close(log_prior, trie_prior(branches, blocks, weight), tolerance=1e-12)

    others = distinct_branches(blocks, count, seed)
    log_prior = trie_prior(others, blocks, weight)
    assert_close(log_prior.exp().sum(), 1.0, tolerance=1e-12)
    assert_close(cover_value(others, blocks, weight), covered(others, blocks, weight), tolerance=1e-12)
    assert_close(exact_accepted(others, log_prior, blocks, log_p), cover_value(others, blocks, weight), 1e-5)


@each_seed
@each_support
def test_no_other_prior_accepts_more(zeros, seed):
    blocks, log_p, weight = random_law(seed, zeros)
    branches = distinct_branches(blocks, 4, seed)
    bound = cover_value(branches, blocks, weight)
    for other in range(20):
        assert exact_accepted(branches, random_log_prior(4, generator(other)), blocks, log_p) <= bound + 1e-5


@each_seed
def test_more_branches_cover_more_and_keep_the_first_ones(seed):
    blocks, _, weight = random_law(seed)
    branches, _ = best_blocks(blocks, weight, len(blocks))
    values = [cover_value(branches[:count], blocks, weight) for count in range(1, len(blocks) + 1)]
    gains = [values[0], *(b - a for a, b in itertools.pairwise(values))]
    assert min(gains) > 0
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(gains))
    assert_close(values[-1], LENGTH, tolerance=1e-12)
    for count in range(1, len(blocks)):
        assert torch.equal(best_blocks(blocks, weight, count)[0], branches[:count])


def test_prior_where_the_target_is_silent():
    blocks, weight = torch.tensor([[0, 0], [0, 1]]), torch.tensor([0.5, 0.5])
    assert_close(trie_prior(torch.tensor([[1, 0], [1, 1], [2, 0]]), blocks, weight).exp(), [0.25, 0.25, 0.5])
    assert_close(trie_prior(torch.tensor([[0, 1], [1, 1]]), blocks, weight), [0.0, -math.inf], 1e-12)


@each_seed
def test_sample_with_repeats_is_its_empirical_law(seed):
    sample = torch.randint(2, (64, 5), generator=generator(seed))
    distinct, times = sample.unique(dim=0, return_counts=True)
    branches, log_prior = best_blocks(sample, torch.full((64,), 1 / 64), 4)
    expected = best_blocks(distinct, times / 64, 4)
    assert torch.equal(branches, expected[0])
    assert_close(log_prior, expected[1], tolerance=1e-12)


def test_ties_go_to_the_lexicographically_smallest_block_in_any_order():
    blocks = all_blocks(3, 2)
    weight = torch.full((9,), 1 / 9)
    for seed in range(5):
        order = torch.randperm(9, generator=generator(seed))
        branches, _ = best_blocks(blocks[order], weight, 5)
        assert branches.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [0, 2]]


def test_no_more_branches_than_distinct_blocks():
    blocks = torch.tensor([[5, 1], [2, 2], [5, 1]])
    branches, log_prior = best_blocks(blocks, torch.tensor([0.5, 0.0, 0.5]), 7)
    assert branches.tolist() == [[5, 1], [2, 2]]
    assert_close(log_prior, [0.0, -math.inf], 1e-12)


def test_large_vocabularies_and_long_blocks():
    blocks = torch.randint(50_000, (128, 15), generator=generator(0))
    blocks[64:, :7] = blocks[0, :7]
    weight = torch.full((128,), 1 / 128)
    branches, _ = best_blocks(blocks, weight, 3)
    # The shared beginning and one ending of it, then two blocks that share nothing.
    assert_close(cover_value(branches, blocks, weight), (7 * 65 + 8 + 15 + 15) / 128, tolerance=1e-6)


def test_repeated_branches_cover_once():
    blocks, _, weight = random_law(0)
    assert_close(cover_value(blocks[[4, 4, 4]], blocks, weight), cover_value(blocks[[4]], blocks, weight), 1e-12)


def test_inputs_stay_as_they_are():
    blocks, _, weight = random_law(1)
    before = blocks.clone(), weight.clone()
    best_blocks(blocks, weight, 3)
    trie_prior(blocks[:3], blocks, weight)
    assert torch.equal(blocks, before[0])
    assert torch.equal(weight, before[1])


BLOCKS, WEIGHT = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0.5, 0.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_blocks(BLOCKS, WEIGHT, 0), "at least 1"),
        (lambda: best_blocks(BLOCKS[:0], WEIGHT[:0], 1), "non-empty"),
        (lambda: best_blocks(BLOCKS[:, :0], WEIGHT, 1), "non-empty"),
        (lambda: best_blocks(BLOCKS[0], WEIGHT, 1), "non-empty"),
        (lambda: best_blocks(BLOCKS, WEIGHT[:1], 1), "one weight per block"),
        (lambda: best_blocks(BLOCKS, torch.tensor([1.5, -0.5]), 1), "not negative"),
        (lambda: best_blocks(BLOCKS, torch.tensor([0.5, math.nan]), 1), "finite"),
        (lambda: best_blocks(BLOCKS, torch.zeros(2), 1), "positive"),
        (lambda: cover_value(BLOCKS[:0], BLOCKS, WEIGHT), "branches must be"),
        (lambda: cover_value(BLOCKS[:, :1], BLOCKS, WEIGHT), "branches must be"),
        (lambda: cover_value(BLOCKS, BLOCKS, -WEIGHT), "not negative"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(DBlastError, match=message):
        call()


@pytest.mark.parametrize("seed", range(4))
def test_known_prefix_probabilities_give_the_same_as_block_weights(seed):
    """From all blocks of a law: weights of blocks, or of every beginning, choose and score alike."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.cartesian_prod(*[torch.arange(3)] * 3)
    weight = torch.rand(27, generator=generator, dtype=torch.float64)
    weight = weight / weight.sum()
    beginnings = torch.stack(
        [((blocks[:, None, : j + 1] == blocks[:, : j + 1]).all(-1) * weight).sum(-1) for j in range(3)], dim=-1
    )
    for count in (1, 2, 5):
        one, two = best_blocks(blocks, weight, count), best_blocks(blocks, beginnings, count)
        assert torch.equal(one[0], two[0])
        torch.testing.assert_close(one[1], two[1])
        assert cover_value(one[0], blocks, weight) == pytest.approx(cover_value(two[0], blocks, beginnings))
    # A sample holds some of the blocks, with exact probabilities of all their beginnings.
    some = torch.randperm(27, generator=generator)[:6]
    branches, _ = best_blocks(blocks[some], beginnings[some], 2)
    assert cover_value(branches, blocks[some], beginnings[some]) == pytest.approx(cover_value(branches, blocks, weight))

