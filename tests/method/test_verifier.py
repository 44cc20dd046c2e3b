"""Conditionals, acceptance and residual against brute force; the law that they add up to is in test_exact_law."""

from __future__ import annotations

import math

import pytest
import torch

from dblast.losses import conditional_log_q
from dblast.proposals import (
    branch_posterior,
    greedy_branch_conditional,
    greedy_branch_proposal,
    point_masses,
    soft_conditional,
    soft_proposal,
)
from dblast.verifier import (
    accept_ratio,
    acceptance_given_emitted,
    greedy_branch_acceptance,
    residual_distribution,
    soft_acceptance,
)
from tests.helpers import (
    all_blocks,
    assert_close,
    block_log_q,
    category_log_prior,
    generator,
    greedy_branch_distribution,
    random_branches,
    random_distribution,
    random_log_prior,
    random_position_log_q,
    random_target,
    soft_distribution,
    target_log_p,
)

VOCABULARY, LENGTH = 3, 3
CATEGORY_TEMPERATURES = (0.0, 0.5, 1.0, 2.0)

#: Branches that share prefixes of every length, and an exact duplicate.
SHARED = torch.tensor([[0, 1, 2], [0, 1, 0], [0, 2, 2], [0, 1, 2]])


def brute_force_conditional(branches, prior, tokens):
    """Eq. 20 in words: among the branches with this prefix, the share of prior whose next token is this one."""
    q = []
    for i, token in enumerate(tokens):
        alive = [z for z, branch in enumerate(branches) if branch[:i] == tokens[:i]]
        total = sum(prior[z] for z in alive)
        q.append(sum(prior[z] for z in alive if branches[z][i] == token) / total if total > 0 else 0.0)
    return q


BRANCH_SETS = [SHARED] + [
    random_branches(branches, LENGTH, VOCABULARY, generator(10 * branches + seed))
    for branches in (1, 2, 3, 4)
    for seed in range(4)
]


@pytest.mark.parametrize("temperature", CATEGORY_TEMPERATURES)
@pytest.mark.parametrize("branches", BRANCH_SETS, ids=lambda tokens: str(tokens.tolist()).replace(" ", ""))
def test_greedy_branch_conditional(branches, temperature):
    blocks = all_blocks(VOCABULARY, LENGTH)
    log_prior = category_log_prior(random_log_prior(len(branches), generator(1)), temperature)
    expected = [
        brute_force_conditional(branches.tolist(), log_prior.exp().tolist(), block) for block in blocks.tolist()
    ]
    actual = greedy_branch_conditional(
        branches.expand(len(blocks), -1, -1), log_prior.expand(len(blocks), -1), blocks
    )
    assert_close(actual, expected, tolerance=1e-6)
    for block, row in zip(blocks, actual, strict=True):
        for i in range(LENGTH):
            whole = greedy_branch_distribution(branches, log_prior, block[:i], VOCABULARY)
            assert_close(whole[block[i]], row[i], tolerance=1e-6)


def test_greedy_branch_conditional_of_each_anchor_reads_its_own_branches():
    branches = torch.stack([random_branches(3, LENGTH, VOCABULARY, generator(seed)) for seed in range(20)])
    log_prior = torch.stack([random_log_prior(3, generator(seed)) for seed in range(20)])
    tokens = branches[:, 0]
    expected = [
        brute_force_conditional(*row)
        for row in zip(branches.tolist(), log_prior.exp().tolist(), tokens.tolist(), strict=True)
    ]
    assert_close(greedy_branch_conditional(branches, log_prior, tokens), expected, tolerance=1e-6)


def test_one_branch_is_a_point_mass_accepted_with_the_probability_of_its_token():
    branch = torch.tensor([[[0, 1, 2]]])
    log_p = torch.tensor([[0.5, 0.2, 0.9]]).log()
    p = torch.tensor(random_distribution(VOCABULARY, generator(3)))
    q = greedy_branch_distribution(branch[0], torch.zeros(1), branch[0, 0, :0], VOCABULARY)
    assert_close(q, [1.0, 0.0, 0.0])
    assert_close(accept_ratio(p[0], q[0]), p[0])
    # Given that the emitted token is the drafted one, it was accepted for certain.
    assert_close(greedy_branch_acceptance(branch, torch.zeros(1, 1), branch[:, 0], log_p), torch.ones(1, 3))
    other = torch.tensor([[0, 2, 2]])
    assert_close(greedy_branch_acceptance(branch, torch.zeros(1, 1), other, log_p), [[1.0, 0.0, 0.0]])


def test_posterior_of_point_masses_is_the_prior_of_the_branches_that_agree():
    tokens = torch.tensor([[0, 1, 2], [1, 0, 0]])
    log_q = point_masses(SHARED.expand(2, -1, -1), tokens)
    assert log_q[0].exp().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]]
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4])
    actual = branch_posterior(log_q, prior.log().expand(2, -1))
    agree = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    expected = prior.unsqueeze(-1) * agree / (prior.unsqueeze(-1) * agree).sum(0)
    assert_close(actual[0], expected)
    # Nobody drafts 1 first: no branch is left, and nothing is divided by zero.
    assert actual[1, :, 1:].tolist() == [[0, 0, 0]] * 4


def test_posterior_of_unlikely_prefixes_is_that_of_the_products():
    """Products of 80 factors of 1e-6 are zero in any float; their ratios are not."""
    odds = torch.tensor([0.5, 1.0])
    log_q = (1e-6 * odds).log().view(1, 2, 1).expand(1, 2, 80).clone()
    log_q[:, :, 2:] = math.log(1e-6)
    actual = branch_posterior(log_q, torch.tensor([[0.5, 0.5]]).log())[0, :, -1]
    assert_close(actual, [0.2, 0.8], tolerance=1e-4)
    assert soft_conditional(log_q, torch.zeros(1, 2)).isfinite().all()


@pytest.mark.parametrize("temperature", CATEGORY_TEMPERATURES)
@pytest.mark.parametrize("branches", [1, 2, 3, 4])
def test_soft_conditional_of_replay_of_decoding_and_of_training_is_one(branches, temperature):
    """Of whole blocks, of every candidate at every slot, and of the losses where nothing is clamped."""
    rng = generator(branches)
    position_log_q = random_position_log_q(branches, LENGTH, VOCABULARY, rng)
    log_prior = category_log_prior(random_log_prior(branches, rng), temperature)
    blocks = all_blocks(VOCABULARY, LENGTH)
    many = len(blocks)
    log_q, priors = block_log_q(position_log_q, blocks), log_prior.expand(many, -1)
    conditional = soft_conditional(log_q, priors)
    assert conditional.dtype == torch.float64
    assert_close(conditional_log_q(log_q, priors).exp(), conditional, tolerance=1e-5)
    dense = position_log_q.expand(many, -1, -1, -1)
    proposal = soft_proposal(dense, priors, torch.zeros(many, dtype=torch.long), blocks)
    candidates = torch.arange(VOCABULARY).expand(many, -1)
    for i in range(LENGTH):
        expected = torch.stack([soft_distribution(position_log_q, log_prior, block[:i]) for block in blocks])
        assert_close(expected.sum(-1), 1.0, tolerance=1e-12)
        assert_close(proposal.q(torch.full((many,), i), candidates), expected, tolerance=1e-12)
        assert_close(conditional[:, i], expected.gather(-1, blocks[:, i : i + 1]).squeeze(-1), tolerance=1e-12)
    assert (proposal.q(torch.full((many,), LENGTH), candidates) == 0).all()


@pytest.mark.parametrize("temperature", CATEGORY_TEMPERATURES)
@pytest.mark.parametrize("branches", BRANCH_SETS, ids=lambda tokens: str(tokens.tolist()).replace(" ", ""))
def test_greedy_branch_conditional_of_candidates_is_that_of_the_block(branches, temperature):
    log_prior = category_log_prior(random_log_prior(len(branches), generator(1)), temperature)
    many = len(branches)
    proposal = greedy_branch_proposal(branches.expand(many, -1, -1), log_prior.expand(many, -1), torch.arange(many))
    candidates = torch.arange(VOCABULARY).expand(many, -1)
    for i in range(LENGTH):
        q = proposal.q(torch.full((many,), i), candidates)
        for z, block in enumerate(branches):
            expected = greedy_branch_distribution(branches, log_prior, block[:i], VOCABULARY)
            assert_close(q[z], expected, tolerance=1e-12)
            assert_close(proposal.q_drafted[z, i], expected[block[i]], tolerance=1e-12)
    assert (proposal.q(torch.full((many,), LENGTH), candidates) == 0).all()


def test_soft_conditional_after_a_token_that_no_branch_drafts_is_zero():
    log_q = torch.tensor([[[0.5, 0.0, 0.5], [0.25, 0.0, 0.5]]]).log()
    assert_close(soft_conditional(log_q, torch.tensor([[0.5, 0.5]]).log()), [[0.375, 0.0, 0.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conditionals_and_acceptance_keep_their_precision(dtype):
    branches, log_prior = SHARED.unsqueeze(0), torch.full((1, 4), 0.25, dtype=dtype).log()
    log_p = torch.tensor([[1 / 3, 0.3, 1 / 3]], dtype=dtype).log()
    for actual in (
        greedy_branch_acceptance(branches, log_prior, SHARED[:1], log_p),
        soft_acceptance(log_prior.unsqueeze(-1).expand(1, 4, 3), log_prior, log_p),
    ):
        assert actual.dtype == dtype
    q = torch.tensor([0.1], dtype=dtype)
    assert_close(acceptance_given_emitted(q, log_p[:, 0]), q * 3, tolerance=1e-6 if dtype == torch.float32 else 1e-14)


def test_nan_in_a_prior_stays_nan():
    """Never zero, which would accept every draft."""
    log_prior = torch.tensor([[0.5, math.nan]]).log()
    tokens = torch.tensor([[0, 1]])
    assert greedy_branch_conditional(tokens.unsqueeze(1).expand(1, 2, 2), log_prior, tokens).isnan().all()


def test_soft_acceptance_is_the_ratio_of_conditionals():
    rng = generator(5)
    position_log_q, log_prior = random_position_log_q(3, LENGTH, VOCABULARY, rng), random_log_prior(3, rng)
    target, blocks = random_target(VOCABULARY, LENGTH, rng), all_blocks(VOCABULARY, LENGTH)
    actual = soft_acceptance(
        block_log_q(position_log_q, blocks), log_prior.expand(len(blocks), -1), target_log_p(target, blocks)
    )
    for block, row in zip(blocks, actual, strict=True):
        for i, token in enumerate(block.tolist()):
            q = float(soft_distribution(position_log_q, log_prior, block[:i])[token])
            assert_close(row[i], min(1.0, q / target[tuple(block[:i].tolist())][token]), tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q_x", [1.0, 0.5, 1e-30, 0.0])
def test_token_of_target_probability_zero_is_never_accepted(q_x, dtype):
    p, q = torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([q_x, 1 - q_x], dtype=dtype)
    assert float(accept_ratio(p[0], q[0])) == 0.0
    assert float(residual_distribution(p, q)[0]) == 0.0


def test_acceptance_probability_is_the_clipped_ratio():
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.8, 0.2, 0.0])
    assert_close(accept_ratio(p, q), [0.25, 1.0, 1.0])


def test_residual_is_the_renormalised_excess_of_the_target():
    p, q = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]]), torch.tensor([[0.8, 0.1, 0.1], [0.0, 1.0, 0.0]])
    assert_close(residual_distribution(p, q), [[0.0, 2 / 3, 1 / 3], [1.0, 0.0, 0.0]])


def test_draft_equal_to_the_target_is_always_accepted():
    p = torch.tensor([random_distribution(5, generator(seed)) for seed in range(20)])
    assert (accept_ratio(p, p.clone()) == 1.0).all()
    assert_close(residual_distribution(p, p.clone()), p)


@pytest.mark.parametrize("zeros", [False, True], ids=["p > 0", "p with zeros"])
def test_acceptance_given_the_emitted_token(zeros):
    """P(draft accepted | x emitted) by Bayes' rule over everything one position can do."""
    for seed in range(10):
        rng = generator(seed)
        p = torch.tensor(random_distribution(4, rng, zeros), dtype=torch.float64)
        q = torch.tensor(random_distribution(4, rng, zeros=True), dtype=torch.float64)
        accepted = q * accept_ratio(p, q)
        emitted = accepted + (1 - accepted.sum()) * residual_distribution(p, q)
        possible = p > 0
        assert_close(emitted, p, tolerance=1e-12)
        assert_close(
            acceptance_given_emitted(q, p.log())[possible], (accepted / emitted)[possible], tolerance=1e-6
        )


def test_acceptance_given_the_emitted_token_is_finite_at_zero_probability():
    actual = acceptance_given_emitted(torch.tensor([0.0, 0.5, 0.0]), torch.tensor([0.0, -torch.inf, -torch.inf]))
    assert_close(actual, [0.0, 1.0, 0.0])
