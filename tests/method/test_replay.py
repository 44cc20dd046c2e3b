"""Replay against the online loop, enumerated exactly on toy targets."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from dblast import replay
from dblast.drafter import DraftOutput
from dblast.errors import DBlastError
from dblast.proposals import branch_log_q, point_masses, propose
from dblast.replay import expected_accepted, expected_passes, sampled_log_q, score, trajectory_acceptance
from dblast.trajectories import block_index, pack_first
from dblast.reproduction.estimates import ratio_with_influence, standard_error
from dblast.verifier import greedy_branch_acceptance, soft_acceptance
from tests.helpers import (
    all_blocks,
    assert_close,
    block_log_q,
    category_log_prior,
    generator,
    random_branches,
    random_log_prior,
    random_target,
    sequence_probability,
    soft_distribution,
)

VOCABULARY, EOS = 3, 0


class Toy:
    """A toy target with an end token and a budget, and a drafter that is a table from prefix to branches and prior."""

    def __init__(self, branches, temperature, budget=5, block_length=2, seed=0, zeros=False):
        rng = generator(seed)
        self.budget, self.block_length = budget, block_length
        self.target = random_target(VOCABULARY, budget + 1, rng, zeros)
        self.branches = {y: random_branches(branches, block_length, VOCABULARY, rng) for y in self.target}
        self.log_prior = {y: category_log_prior(random_log_prior(branches, rng), temperature) for y in self.target}

    def finished(self, tokens):
        return len(tokens) == self.budget or tokens[-1:] == (EOS,)

    def trajectories(self, prefix=()):
        """Everything that plain sampling can emit."""
        if self.finished(prefix):
            return [prefix] if sequence_probability(self.target, prefix) > 0 else []
        return [tokens for v in range(VOCABULARY) for tokens in self.trajectories((*prefix, v))]

    def online_pass(self, anchor):
        """(tokens so far, probability) of every way one pass of the online loop ends, in plain floats."""
        branches, prior = self.branches[anchor].tolist(), self.log_prior[anchor].exp().tolist()
        for z, draft in enumerate(branches):
            tokens, alive = anchor, prior[z]
            for i, drafted in enumerate(draft):
                p, q = self.target[tokens], [0.0] * VOCABULARY
                for branch, weight in zip(branches, prior, strict=True):
                    if branch[:i] == draft[:i]:
                        q[branch[i]] += weight
                if alive == 0:
                    break
                q = [mass / sum(q) for mass in q]
                accept = min(1.0, p[drafted] / q[drafted])
                excess = [max(0.0, p[v] - q[v]) for v in range(VOCABULARY)]
                if accept < 1:
                    for v in range(VOCABULARY):
                        yield (*tokens, v), alive * (1 - accept) * excess[v] / sum(excess)
                tokens, alive = (*tokens, drafted), alive * accept
                if self.finished(tokens):
                    yield tokens, alive
                    break
            else:
                for v, share in enumerate(self.target[tokens]):
                    yield (*tokens, v), alive * share

    def online(self):
        """Law of the output, and E[passes; output] of every output."""
        law, passes = defaultdict(float, {(): 1.0}), defaultdict(float)
        for length in range(self.budget):
            for anchor in [y for y in law if len(y) == length and not self.finished(y)]:
                for tokens, probability in self.online_pass(anchor):
                    law[tokens] += law[anchor] * probability
                    passes[tokens] += (passes[anchor] + law[anchor]) * probability
        outputs = [y for y in law if self.finished(y) and law[y] > 0]
        return {y: law[y] for y in outputs}, {y: passes[y] for y in outputs}

    def acceptance(self, trajectory):
        """What replay computes from one stored trajectory, (n, b)."""
        index, valid = block_index(len(trajectory), self.block_length)
        prefixes = [trajectory[:a] for a in range(len(trajectory))]
        log_p = torch.tensor([self.target[y][v] for y, v in zip(prefixes, trajectory, strict=True)]).log()
        accept = greedy_branch_acceptance(
            torch.stack([self.branches[y] for y in prefixes]),
            torch.stack([self.log_prior[y] for y in prefixes]),
            torch.tensor(trajectory)[index],
            log_p[index],
        )
        return accept * valid

    def replay(self, trajectories):
        """Expected passes of every trajectory, in one padded batch."""
        padded = torch.zeros(len(trajectories), self.budget, self.block_length)
        for row, trajectory in zip(padded, trajectories, strict=True):
            row[: len(trajectory)] = self.acceptance(trajectory)
        return expected_passes(padded, torch.tensor([len(trajectory) for trajectory in trajectories]))


class SoftToy(Toy):
    """The same with tokens sampled inside the branch at a draft temperature, on the branch's own top-k."""

    def __init__(self, branches, draft_temperature, draft_top_k, budget=4, block_length=2, seed=0):
        super().__init__(branches, 1.0, budget, block_length, seed)
        rng = generator(seed + 1)
        shape = (branches, block_length, VOCABULARY)
        self.log_q = {
            y: branch_log_q(torch.randn(shape, generator=rng, dtype=torch.float64), draft_temperature, draft_top_k)
            for y in self.target
        }

    def online_pass(self, anchor):
        log_q, prior = self.log_q[anchor], self.log_prior[anchor].exp()
        for z, draft in itertools.product(range(len(prior)), all_blocks(VOCABULARY, self.block_length).tolist()):
            alive = float(prior[z] * math.prod(log_q[z, i, token].exp() for i, token in enumerate(draft)))
            tokens = anchor
            for i, drafted in enumerate(draft):
                if alive == 0:
                    break
                p, q = self.target[tokens], soft_distribution(log_q, self.log_prior[anchor], torch.tensor(draft[:i]))
                q = q.tolist()
                accept = min(1.0, p[drafted] / q[drafted])
                excess = [max(0.0, p[v] - q[v]) for v in range(VOCABULARY)]
                if accept < 1:
                    for v in range(VOCABULARY):
                        yield (*tokens, v), alive * (1 - accept) * excess[v] / sum(excess)
                tokens, alive = (*tokens, drafted), alive * accept
                if self.finished(tokens):
                    yield tokens, alive
                    break
            else:
                for v, share in enumerate(self.target[tokens]):
                    yield (*tokens, v), alive * share

    def acceptance(self, trajectory):
        index, valid = block_index(len(trajectory), self.block_length)
        prefixes = [trajectory[:a] for a in range(len(trajectory))]
        log_p = torch.tensor([self.target[y][v] for y, v in zip(prefixes, trajectory, strict=True)]).double().log()
        blocks = torch.tensor(trajectory)[index]
        log_q = torch.cat([block_log_q(self.log_q[y], block[None]) for y, block in zip(prefixes, blocks, strict=True)])
        prior = torch.stack([self.log_prior[y] for y in prefixes])
        return soft_acceptance(log_q, prior, log_p[index]) * valid


@pytest.mark.parametrize("draft", [(1.0, 0), (0.4, 0), (3.0, 0), (0.8, 2), (1.0, 1)], ids=str)
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_replay_of_sampled_drafts_is_the_online_loop(branches, draft):
    toy = SoftToy(branches, *draft, seed=branches)
    law, passes = toy.online()
    trajectories = toy.trajectories()
    replayed = toy.replay(trajectories)
    assert_close([law[y] for y in trajectories], [sequence_probability(toy.target, y) for y in trajectories], 1e-12)
    assert_close(replayed, [passes[y] / law[y] for y in trajectories], tolerance=1e-6)


@pytest.mark.parametrize("draft_vocab_size", [0, 12])
def test_sampled_log_q_is_the_law_that_tokens_are_drawn_from(llama, make_drafter, draft_vocab_size, monkeypatch):
    drafter = make_drafter(llama, num_categories=3, draft_vocab_size=draft_vocab_size)
    hidden = torch.randn(5, 3, 3, 32, generator=generator(0))
    output = DraftOutput(hidden, torch.randn(5, 3, generator=generator(1)))
    temperatures = (0.3, 1.0, 2.0)
    for draft_top_k in (0, 4, 99):
        made = [
            propose(drafter, output, 3, mode="soft", draft_temperature=value, draft_top_k=draft_top_k)
            for value in temperatures
        ]
        for pieces in (2**22, 1, 300):
            monkeypatch.setattr(replay, "DRAFT_LOGITS", pieces)
            tokens = torch.arange(5 * 3).view(5, 3) % 40
            tables = sampled_log_q(drafter, hidden, tokens, temperatures, draft_top_k)
            for proposal, table in zip(made, tables, strict=True):
                for slot in range(3):
                    drawn = proposal.branch_q(torch.full((5,), slot), tokens[:, slot, None]).squeeze(-1)
                    assert_close(table[..., slot].exp(), drawn, tolerance=1e-5)
    (plain,) = sampled_log_q(drafter, hidden, tokens)
    assert torch.equal(plain, drafter.log_q(hidden, tokens))
    assert_close(plain.exp(), sampled_log_q(drafter, hidden, tokens, temperatures)[1].exp(), tolerance=1e-5)


def test_scores_of_a_grid_are_those_of_its_cells(llama, make_drafter, make_trajectory):
    drafter, trajectories = make_drafter(llama, num_categories=3), [make_trajectory(seed=s) for s in (0, 1)]
    categories, drafts = (0.5, 1.0), (0.0, 0.7, 1.0)
    grid = score(drafter, trajectories, categories, proposal="soft", draft_temperatures=drafts, draft_top_k=5)
    assert len(grid) == 2 * 2 * 3
    greedy = score(drafter, trajectories, categories)
    assert "draft_temperature" not in greedy
    for category, draft in itertools.product(categories, drafts):
        cell = grid[(grid.category_temperature == category) & (grid.draft_temperature == draft)]
        alone = score(
            drafter, trajectories, (category,), proposal="soft", draft_temperatures=(draft,), draft_top_k=5
        )
        assert_close(cell.passes.to_numpy(), alone.passes.to_numpy())
        if draft == 0:
            assert_close(cell.passes.to_numpy(), greedy[greedy.category_temperature == category].passes.to_numpy())
    one = make_drafter(llama, num_categories=1)
    single = score(one, trajectories, categories, proposal="soft", draft_temperatures=drafts)
    assert len(single) == 2 * 3 and single.category_temperature.isna().all()
    assert single.draft_temperature.tolist() == [*drafts] * 2


GRID = [(branches, temperature) for branches in (1, 2, 3) for temperature in (0.0, 0.5, 1.0, 2.0)]
each_drafter = pytest.mark.parametrize(("branches", "temperature"), GRID)
each_block_length = pytest.mark.parametrize("block_length", [1, 2, 3])


@each_drafter
@each_block_length
@pytest.mark.parametrize("zeros", [False, True], ids=["p > 0", "p with zeros"])
def test_replay_is_the_online_loop(branches, temperature, block_length, zeros):
    """Same expected passes and emitted tokens; token by token, same passes given each output."""
    toy = Toy(branches, temperature, block_length=block_length, seed=branches, zeros=zeros)
    law, passes = toy.online()
    trajectories = toy.trajectories()
    weights = torch.tensor([sequence_probability(toy.target, y) for y in trajectories], dtype=torch.float64)
    replayed = toy.replay(trajectories)

    assert set(law) == set(trajectories)
    assert_close([law[y] for y in trajectories], weights, tolerance=1e-12)
    assert_close((weights * replayed).sum(), sum(passes.values()), tolerance=1e-6)
    lengths = torch.tensor([len(y) for y in trajectories])
    assert_close((weights * lengths).sum(), sum(law[y] * len(y) for y in law), tolerance=1e-12)
    assert_close(replayed, [passes[y] / law[y] for y in trajectories], tolerance=1e-6)


def reference_passes(acceptance, advance):
    """The backward recursion in plain floats, with the move of the anchor after l accepted tokens as a parameter."""
    n, b = len(acceptance), len(acceptance[0])
    left = [0.0] * (n + b + 2)
    for a in reversed(range(n)):
        left[a] = 1.0
        for accepted in range(b + 1):
            reached = math.prod(acceptance[a][:accepted])
            stop = reached * (1 - acceptance[a][accepted]) if accepted < b else reached
            left[a] += stop * left[a + advance(accepted)]
    return left[0]


def random_acceptance(*shape, seed=0):
    return torch.rand(shape, generator=generator(seed))


def test_backward_recursion():
    acceptance = random_acceptance(6, 9, 3)
    expected = [reference_passes(row.tolist(), lambda accepted: accepted + 1) for row in acceptance]
    assert_close(expected_passes(acceptance), expected, tolerance=1e-12)


def test_recursion_that_forgets_the_token_of_the_target_differs():
    acceptance = random_acceptance(6, 9, 3)
    faulty = [reference_passes(row.tolist(), lambda accepted: max(1, accepted)) for row in acceptance]
    assert ((expected_passes(acceptance) - torch.tensor(faulty)).abs() > 1e-3).all()


def test_uniform_average_over_anchors_is_not_the_online_number():
    toy = Toy(3, 1.0, seed=3)
    law, passes = toy.online()
    online = (sum(law[y] * len(y) for y in law) - sum(passes.values())) / sum(passes.values())
    accepted, anchors = 0.0, 0.0
    for trajectory in toy.trajectories():
        accepted += law[trajectory] * float(expected_accepted(toy.acceptance(trajectory)).sum())
        anchors += law[trajectory] * len(trajectory)
    assert abs(accepted / anchors - online) > 1e-3


@each_block_length
@pytest.mark.parametrize("length", [1, 4, 7, 8, 12])
def test_every_draft_rejected_costs_one_pass_per_token(length, block_length):
    assert_close(expected_passes(torch.zeros(2, length, block_length)), [length, length])


@each_block_length
@pytest.mark.parametrize("length", [1, 4, 7, 8, 12])
def test_every_draft_accepted_costs_one_pass_per_block_and_bonus(length, block_length):
    passes = math.ceil(length / (block_length + 1))
    assert_close(expected_passes(torch.ones(2, length, block_length)), [passes, passes])


def test_padding_does_not_matter():
    lengths = torch.tensor([3, 7, 1, 5])
    acceptance = random_acceptance(4, 7, 3, seed=1)
    alone = [float(expected_passes(acceptance[t : t + 1, :n])) for t, n in enumerate(lengths.tolist())]
    assert_close(expected_passes(acceptance, lengths), alone, tolerance=1e-12)
    position = torch.arange(7).unsqueeze(-1) + torch.arange(3)
    past_the_end = position >= lengths[:, None, None]
    for filler in (0.0, 1.0, 0.5):
        assert_close(expected_passes(acceptance.masked_fill(past_the_end, filler), lengths), alone, tolerance=1e-12)


def test_expected_accepted_enumerates_the_coin_flips():
    acceptance = random_acceptance(5, 3, seed=2)
    for row, actual in zip(acceptance.tolist(), expected_accepted(acceptance), strict=True):
        expected = 0.0
        for flips in range(8):
            coins = [bool(flips >> j & 1) for j in range(3)]
            probability = math.prod(a if coin else 1 - a for a, coin in zip(row, coins, strict=True))
            expected += probability * (coins.index(False) if False in coins else 3)
        assert_close(actual, expected)


def test_expected_accepted_stops_where_the_block_does():
    acceptance = random_acceptance(4, 3, seed=3)
    valid = torch.arange(3) < torch.tensor([[0], [1], [2], [3]])
    expected = [expected_accepted(acceptance[n, :n]) for n in range(4)]
    assert_close(expected_accepted(acceptance, valid), torch.stack(expected))


def test_block_index():
    index, valid = block_index(length=4, block_length=3)
    assert index.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 3], [3, 3, 3]]
    assert valid.int().tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]


def simulated_scores(units, seed):
    """Accepted tokens and passes of two drafters on the same trajectories, which vary in length and difficulty."""
    rng = np.random.default_rng(seed)
    emitted = rng.integers(20, 120, units)
    difficulty = rng.gamma(4.0, 0.5, units)
    first = emitted / (1 + difficulty * rng.uniform(0.9, 1.1, units))
    second = emitted / (1.1 + difficulty * rng.uniform(0.9, 1.1, units))
    return (emitted - first, first), (emitted - second, second)


def test_ratio_is_that_of_the_sums():
    (accepted, passes), _ = simulated_scores(50, seed=1)
    ratio, influence = ratio_with_influence(accepted, passes)
    assert_close(ratio, accepted.sum() / passes.sum(), tolerance=1e-12)
    assert influence.shape == accepted.shape
    assert_close(influence.mean(), 0.0, tolerance=1e-12)


def test_standard_error_agrees_with_the_bootstrap():
    (accepted, passes), _ = simulated_scores(300, seed=2)
    _, influence = ratio_with_influence(accepted, passes)
    draws = np.random.default_rng(3).integers(len(accepted), size=(4000, len(accepted)))
    bootstrap = (accepted[draws].sum(1) / passes[draws].sum(1)).std(ddof=1)
    assert_close(standard_error(influence) / bootstrap, 1.0, tolerance=0.1)


def test_paired_difference_agrees_with_the_bootstrap_and_is_sharper_than_unpaired():
    (accepted, passes), (accepted_2, passes_2) = simulated_scores(300, seed=4)
    _, influence = ratio_with_influence(accepted, passes)
    _, influence_2 = ratio_with_influence(accepted_2, passes_2)
    paired = standard_error(influence_2 - influence)
    draws = np.random.default_rng(5).integers(len(accepted), size=(4000, len(accepted)))
    difference = accepted_2[draws].sum(1) / passes_2[draws].sum(1) - accepted[draws].sum(1) / passes[draws].sum(1)
    assert_close(paired / difference.std(ddof=1), 1.0, tolerance=0.1)
    assert paired < 0.5 * math.hypot(standard_error(influence), standard_error(influence_2))


def test_standard_error_of_two_units():
    assert_close(standard_error(np.array([1.0, -1.0])), 1.0, tolerance=1e-12)


def test_single_unit_has_no_standard_error():
    assert math.isnan(standard_error(np.zeros(1)))


def test_no_trajectories_is_an_error():
    with pytest.raises(DBlastError, match="no trajectories"):
        ratio_with_influence(np.zeros(0), np.zeros(0))


def full_table(drafter, trajectory, temperatures, draft_temperatures=()):
    """Acceptance of every slot of every branch, nothing left out: (Z, n, b), or (Z * D, n, b) of sampled drafts."""
    n = len(trajectory.response_ids)
    batch = pack_first(trajectory, n, drafter.config.block_length)
    with torch.no_grad():
        out = batch.run(drafter)
        if draft_temperatures:
            tables = sampled_log_q(drafter, out.branch_hidden, batch.tokens, draft_temperatures)
        else:
            tables = [point_masses(drafter.greedy_tokens(out.branch_hidden), batch.tokens)]
    rows = [soft_acceptance(log_q, out.log_prior(z), batch.log_p) for z in temperatures for log_q in tables]
    return torch.stack([(row * batch.valid)[:n] for row in rows])


def drafts_of(drafter, trajectory, copied, seed):
    """The trajectory with a share of its tokens replaced, one after the other, by what a branch drafts at an earlier anchor."""
    rng, n, b = generator(seed), len(trajectory.response_ids), drafter.config.block_length
    for start in range(0, n, b):
        out = pack_first(trajectory, n, b).run(drafter)
        branches = drafter.greedy_tokens(out.branch_hidden)[start]
        length = min(n - start, int(torch.randint(b + 1, (1,), generator=rng) * copied + 0.5))
        branch = int(torch.randint(len(branches), (1,), generator=rng))
        trajectory.response_ids[start : start + length] = branches[branch, :length]
    return trajectory


REPLAYED = [(1, 0, 1), (1, 12, 7), (4, 0, 30), (4, 12, 8), (4, 12, 2)]


@pytest.mark.parametrize(("branches", "draft_vocab_size", "response"), REPLAYED)
def test_greedy_tokens_of_slots_that_no_branch_reaches_are_not_needed(
    llama, make_drafter, make_trajectory, branches, draft_vocab_size, response, monkeypatch
):
    drafter = make_drafter(llama, num_categories=branches, draft_vocab_size=draft_vocab_size, block_length=5)
    temperatures, reached = (0.0, 0.5, 1.0), 0.0
    for seed in range(6):
        trajectory = drafts_of(drafter, make_trajectory(response=response, seed=seed), seed % 3 / 2, seed)
        expected = full_table(drafter, trajectory, temperatures)
        made, rows = trajectory_acceptance(drafter, trajectory, temperatures), []
        assert_close(made, expected)
        reached = max(reached, float(expected.sum(-1).max()))
        # Rows of the head: pairs of anchor and branch that have agreed so far, and no others.
        with monkeypatch.context() as patch:
            greedy = drafter.greedy_tokens
            patch.setattr(drafter, "greedy_tokens", lambda hidden: rows.append(len(hidden)) or greedy(hidden))
            trajectory_acceptance(drafter, trajectory, temperatures)
        assert rows[0] == response * branches and sum(rows) < response * branches * 5 or response < 3
        assert rows == sorted(rows, reverse=True)
    assert reached > 1 or response < 3


@pytest.mark.parametrize(("branches", "draft_vocab_size", "response"), REPLAYED)
def test_sampled_drafts_are_scored_as_far_as_they_can_be_accepted(
    llama, make_drafter, make_trajectory, branches, draft_vocab_size, response, monkeypatch
):
    """Nothing moves by more than the bound that is stated, which is tried at a thousand times the limit in use."""
    drafter = make_drafter(llama, num_categories=branches, draft_vocab_size=draft_vocab_size, block_length=5)
    categories, drafts, left_out = (0.0, 1.0), (0.3, 1.0), 0
    for seed, least in itertools.product(range(4), (0.0, 1e-6, 1e-3, 0.1)):
        monkeypatch.setattr(replay, "LEAST_REACH", least)
        trajectory = drafts_of(drafter, make_trajectory(response=response, seed=seed), seed % 3 / 2, seed)
        expected = full_table(drafter, trajectory, categories, drafts)
        made = trajectory_acceptance(drafter, trajectory, categories, "soft", draft_temperatures=drafts)
        if not least:
            assert_close(made, expected)
        left_out += int(((expected > 0) & (made == 0)).sum()) if least == 0.1 else 0
        assert_close(made[made > 0], expected[made > 0])
        rounding = 1e-6
        lost = expected_accepted(expected) - expected_accepted(made)
        assert (lost > -rounding).all() and (lost < 4 * least + rounding).all()
        moved = (expected_passes(made) - expected_passes(expected)).abs()
        assert (moved < response * (least * expected_passes(expected) + rounding)).all()
    assert left_out or response < 30  # else the test shows nothing


def test_a_limit_that_is_not_kept_passes_the_bound(llama, make_drafter, make_trajectory, monkeypatch):
    """Slots left out where a draft still gets there half of the time."""
    drafter = make_drafter(llama, num_categories=2, block_length=5)
    trajectory = drafts_of(drafter, make_trajectory(response=30), 1.0, 0)
    expected = full_table(drafter, trajectory, (1.0,), (0.3,))
    monkeypatch.setattr(replay, "LEAST_REACH", 0.5)
    made = trajectory_acceptance(drafter, trajectory, (1.0,), "soft", draft_temperatures=(0.3,))
    lost = expected_accepted(expected) - expected_accepted(made)
    assert lost.max() > 4 * 1e-3
