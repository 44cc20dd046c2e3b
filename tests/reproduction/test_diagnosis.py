"""The phrase process and its proposals against plain enumeration on three-token alphabets."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from torch.nn.functional import one_hot

from dblast.reproduction.diagnosis.process import (
    PROPOSALS,
    PhraseProcess,
    accepted_by_mixture,
    accepted_greedy,
    accepted_sampled,
    early_determinism,
    em_step,
    entropy,
    estimate_determinism,
    fit_mixture,
    improve_mixture,
    marginals,
    mismatch_table,
    proposal_names,
)
from dblast.reproduction.diagnosis.plots import rejections_figure
from dblast.reproduction.diagnosis.tables import ceiling_table
from dblast.errors import DBlastError
from dblast.reproduction.diagnosis.rejections import CAUSES
from tests.helpers import (
    all_blocks,
    assert_close,
    generator,
    greedy_branch_distribution,
    random_branches,
    random_log_prior,
    random_position_log_q,
    soft_distribution,
)

TINY = PhraseProcess(
    phrases=((0, 1, 2), (0, 2, 1), (2, 0, 0), (1, 1, 0)), weights=(4.0, 3.0, 2.0, 1.0), slip=0.1, vocab_size=3
)
TWO_PHRASES = PhraseProcess(phrases=((0, 1, 2, 0, 1), (1, 2, 2, 1, 0)), weights=(0.6, 0.4), slip=0.1, vocab_size=3)

each_temperature = pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
each_seed = pytest.mark.parametrize("seed", range(3))


def weights(log_p):
    return log_p.sum(-1).exp()


def conditional_table(blocks, log_p):
    """p(. | prefix) of every prefix, as lists, for the enumeration in plain Python."""
    table = {}
    for block, row in zip(blocks.tolist(), log_p.exp().tolist(), strict=True):
        for i, token in enumerate(block):
            table.setdefault(tuple(block[:i]), {})[token] = row[i]
    return {prefix: [row[v] for v in sorted(row)] for prefix, row in table.items()}


def random_mixture(count, process, seed):
    rng = generator(seed)
    tables = random_position_log_q(count, process.block_length, process.vocab_size, rng)
    return random_log_prior(count, rng), tables


@each_temperature
def test_law_is_a_distribution_with_consistent_conditionals(temperature):
    blocks, log_p = TINY.law(temperature)
    assert torch.equal(blocks, all_blocks(3, 3))
    assert log_p.dtype == torch.float64
    weight = weights(log_p)
    assert_close(weight.sum(), 1.0, tolerance=1e-12)
    for row in conditional_table(blocks, log_p).values():
        assert_close(sum(row), 1.0, tolerance=1e-12)
    for block, row in zip(blocks, log_p, strict=True):
        prefix = [weight[(blocks[:, :i] == block[:i]).all(-1)].sum() for i in range(4)]
        assert_close(row.exp(), [after / before for before, after in itertools.pairwise(prefix)], tolerance=1e-12)


def test_joint_at_temperature_one_is_the_mixture_of_phrases():
    blocks, log_p = TINY.law(1.0)
    for block, actual in zip(blocks.tolist(), weights(log_p), strict=True):
        expected = 0.0
        for phrase, weight in zip(TINY.phrases, TINY.weights, strict=True):
            slips = sum(a != b for a, b in zip(phrase, block, strict=True))
            expected += weight / 10 * 0.9 ** (3 - slips) * 0.05**slips
        assert_close(actual, expected, tolerance=1e-12)


@each_temperature
def test_temperature_acts_on_every_conditional(temperature):
    plain = conditional_table(*TINY.law(1.0))
    for prefix, row in conditional_table(*TINY.law(temperature)).items():
        powers = [p ** (1 / temperature) for p in plain[prefix]]
        assert_close(row, [power / sum(powers) for power in powers], tolerance=1e-12)


def test_tempering_the_joint_instead_differs():
    blocks, log_p = TINY.law(1.0)
    faulty = (log_p.sum(-1) / 2).softmax(0)
    assert (faulty - weights(TINY.law(2.0)[1])).abs().max() > 1e-3


@each_temperature
def test_marginals_entropy_and_determinism(temperature):
    blocks, log_p = TINY.law(temperature)
    counts = [[0.0] * 3 for _ in range(3)]
    nats, determinism = 0.0, 0.0
    for block, row in zip(blocks.tolist(), log_p.exp().tolist(), strict=True):
        joint = math.prod(row)
        nats -= joint * math.log(joint)
        determinism += joint * sum(math.prod(row[:j]) for j in range(1, 4)) / 3
        for i, token in enumerate(block):
            counts[i][token] += joint
    assert_close(marginals(blocks, log_p), counts, tolerance=1e-12)
    assert_close(entropy(log_p), nats, tolerance=1e-12)
    assert_close(early_determinism(log_p), determinism, tolerance=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phrases": ()}, "equal length"),
        ({"phrases": ((0, 1), (0,))}, "equal length"),
        ({"phrases": ((), ())}, "equal length"),
        ({"phrases": ((0, 1), (0, 4))}, "tokens 0..V-1"),
        ({"weights": (1.0,)}, "one positive weight"),
        ({"weights": (1.0, 1.0, 0.0, 1.0)}, "one positive weight"),
        ({"slip": 0.0}, "slip"),
        ({"slip": 1.0}, "slip"),
        ({"vocab_size": 1}, "V of at least 2"),
        ({"vocab_size": 1000}, "blocks are more than"),
    ],
)
def test_bad_process_is_refused(change, message):
    with pytest.raises(DBlastError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_bad_temperature_is_refused(temperature):
    with pytest.raises(DBlastError, match="temperature"):
        TINY.law(temperature)


def test_estimated_determinism_is_unbiased():
    """Expectation over every pair of sampled blocks."""
    _, log_p = TINY.law(1.0)
    weight = weights(log_p)
    first, second = torch.cartesian_prod(torch.arange(27), torch.arange(27)).T
    pairs = torch.stack([log_p[first], log_p[second]], dim=1)
    chance = weight[first] * weight[second]
    estimate = estimate_determinism(pairs)
    assert estimate.shape == (27 * 27,)
    assert_close((chance * estimate).sum(), early_determinism(log_p), tolerance=1e-12)
    faulty = pairs.exp().mean((-2, -1))  # mean probability of a token, not of a prefix
    assert (chance * faulty).sum() > early_determinism(log_p) + 0.05


def test_estimated_determinism_keeps_leading_dimensions():
    log_p = -torch.rand(2, 3, 5, 4, generator=generator(0))
    estimate = estimate_determinism(log_p)
    assert estimate.shape == (2, 3)
    assert_close(estimate[1, 2], estimate_determinism(log_p[1, 2]), tolerance=1e-12)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (4, 0)])
def test_determinism_of_nothing_is_refused(shape):
    with pytest.raises(DBlastError, match="log-probabilities"):
        estimate_determinism(torch.zeros(shape))


@each_seed
@pytest.mark.parametrize("count", [1, 2, 4])
def test_likelihood_never_falls(count, seed):
    blocks, log_p = TINY.law(1.5)
    tokens, weight = one_hot(blocks).double(), weights(log_p)
    mixture, likelihoods = random_mixture(count, TINY, seed), []
    for _ in range(30):
        *mixture, likelihood = em_step(tokens, weight, *mixture)
        likelihoods.append(float(likelihood))
        assert_close(mixture[0].exp().sum(), 1.0, tolerance=1e-12)
        assert_close(mixture[1].exp().sum(-1), torch.ones(count, 3), tolerance=1e-12)
    assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(likelihoods))
    assert likelihoods[-1] <= -entropy(log_p)


def test_expected_log_likelihood_is_that_of_the_old_mixture():
    blocks, log_p = TINY.law(1.0)
    log_prior, log_q = random_mixture(2, TINY, seed=0)
    *_, actual = em_step(one_hot(blocks).double(), weights(log_p), log_prior, log_q)
    expected = 0.0
    for block, weight in zip(blocks.tolist(), weights(log_p).tolist(), strict=True):
        per_branch = [math.prod(log_q[z, i, v].exp() for i, v in enumerate(block)) for z in range(2)]
        expected += weight * math.log(sum(float(log_prior[z].exp() * per_branch[z]) for z in range(2)))
    assert_close(actual, expected, tolerance=1e-12)


@each_temperature
def test_one_category_is_the_marginals(temperature):
    blocks, log_p = TINY.law(temperature)
    log_prior, log_q = fit_mixture(blocks, weights(log_p), 1, generator(0))
    assert_close(log_prior, [0.0], tolerance=1e-12)
    assert_close(log_q[0].exp(), marginals(blocks, log_p), tolerance=1e-12)


def test_mixture_of_two_is_recovered():
    blocks, log_p = TWO_PHRASES.law(1.0)
    log_prior, log_q = fit_mixture(blocks, weights(log_p), 2, generator(0))
    *_, likelihood = em_step(one_hot(blocks).double(), weights(log_p), log_prior, log_q)
    assert 0 <= -entropy(log_p) - float(likelihood) + 1e-12 < 1e-6
    assert_close(accepted_sampled(blocks, log_p, log_prior, log_q), 5.0, tolerance=1e-3)
    assert_close(sorted(log_prior.exp().tolist()), [0.4, 0.6], tolerance=1e-3)
    one = fit_mixture(blocks, weights(log_p), 1, generator(0))
    assert accepted_sampled(blocks, log_p, *one) < 4.0


def test_fit_is_reproducible_and_ignores_blocks_without_weight():
    blocks, log_p = TINY.law(1.0)
    weight = weights(log_p) * (blocks[:, 0] != 1)
    fitted = fit_mixture(blocks, weight, 2, generator(1))
    again = fit_mixture(blocks, weight, 2, generator(1))
    assert_close(fitted[0], again[0], tolerance=1e-9)
    assert_close(fitted[1], again[1], tolerance=1e-9)
    assert_close(fitted[1][:, 0, 1].exp(), [0.0, 0.0], tolerance=1e-12)
    assert not any(x.isnan().any() for x in fitted)


@pytest.mark.parametrize("count", [0, 28])
def test_impossible_number_of_categories_is_refused(count):
    blocks, log_p = TINY.law(1.0)
    with pytest.raises(DBlastError, match="K must lie between 1 and 27"):
        fit_mixture(blocks, weights(log_p), count, generator(0))


def speculative_step(blocks, log_p, draft_chance, draft_law):
    """Expected accepted length over *drafted* blocks: E_{x~q} sum_l prod_{j<=l} min(1, p / q), in plain Python.

    ``draft_law(prefix)`` is q(. | prefix); ``draft_chance(block)`` the probability that the block is drafted.
    """
    p, total = conditional_table(blocks, log_p), 0.0
    for block in blocks.tolist():
        alive = draft_chance(block)
        for i, token in enumerate(block):
            if alive == 0:
                break
            prefix = tuple(block[:i])
            alive *= min(1.0, p[prefix][token] / float(draft_law(torch.tensor(prefix, dtype=torch.long))[token]))
            total += alive
    return total


@each_temperature
@each_seed
@pytest.mark.parametrize("count", [1, 2, 3])
def test_sampled_mixture_accepts_what_the_speculative_step_does(count, seed, temperature):
    blocks, log_p = TINY.law(temperature)
    log_prior, log_q = random_mixture(count, TINY, seed)

    def chance(block):
        return float((log_prior + log_q[:, torch.arange(3), torch.tensor(block)].sum(-1)).exp().sum())

    expected = speculative_step(blocks, log_p, chance, lambda prefix: soft_distribution(log_q, log_prior, prefix))
    assert_close(accepted_by_mixture(log_p, log_prior, log_q), expected, tolerance=1e-10)
    assert_close(accepted_sampled(blocks, log_p, log_prior, log_q), expected, tolerance=1e-5)


@each_temperature
def test_independent_proposal_accepts_what_the_speculative_step_does(temperature):
    blocks, log_p = TINY.law(temperature)
    table = marginals(blocks, log_p)
    expected = speculative_step(
        blocks,
        log_p,
        lambda block: math.prod(float(table[i, v]) for i, v in enumerate(block)),
        lambda prefix: table[len(prefix)],
    )
    rows = mismatch_table([temperature], TINY, categories=[1], steps=1).set_index("proposal")
    assert_close(rows.accepted_length["independent, sampled"], expected, tolerance=1e-5)


@each_temperature
@each_seed
def test_greedy_branches_accept_what_the_speculative_step_does(seed, temperature):
    blocks, log_p = TINY.law(temperature)
    rng = generator(seed)
    branches, log_prior = random_branches(3, 3, 3, rng), random_log_prior(3, rng)

    def chance(block):
        return float(log_prior.exp()[(branches == torch.tensor(block)).all(-1)].sum())

    expected = speculative_step(
        blocks, log_p, chance, lambda prefix: greedy_branch_distribution(branches, log_prior, prefix, 3)
    )
    assert_close(accepted_greedy(blocks, log_p, log_prior, branches), expected, tolerance=1e-5)
    points = one_hot(branches, 3).double().log()
    assert_close(accepted_by_mixture(log_p, log_prior, points), expected, tolerance=1e-10)
    assert_close(accepted_sampled(blocks, log_p, log_prior, points), expected, tolerance=1e-5)


def test_conditionals_of_some_blocks_only_are_refused():
    _, log_p = TINY.law(1.0)
    with pytest.raises(DBlastError, match="all 3\\^3 blocks"):
        accepted_by_mixture(log_p[:-1], *random_mixture(1, TINY, seed=0))


@each_temperature
@each_seed
@pytest.mark.parametrize("learning_rate", [0.1, 30.0])
def test_improving_never_lowers(learning_rate, seed, temperature):
    """Even with steps so large that the iterates jump about."""
    _, log_p = TINY.law(temperature)
    log_prior, log_q = random_mixture(2, TINY, seed)
    before = log_prior.clone(), log_q.clone()
    improved = improve_mixture(log_p, log_prior, log_q, steps=15, learning_rate=learning_rate)
    assert accepted_by_mixture(log_p, *improved) >= accepted_by_mixture(log_p, *before)
    assert_close(improved[0].exp().sum(), 1.0, tolerance=1e-12)
    assert_close(improved[1].exp().sum(-1), torch.ones(2, 3), tolerance=1e-12)
    assert torch.equal(log_prior, before[0])
    assert torch.equal(log_q, before[1])


def test_improving_gains_over_the_largest_likelihood():
    blocks, log_p = TINY.law(1.0)
    fitted = fit_mixture(blocks, weights(log_p), 1, generator(0))
    improved = improve_mixture(log_p, *fitted)
    assert accepted_by_mixture(log_p, *improved) > accepted_by_mixture(log_p, *fitted) + 0.1


def test_starts_are_improved_separately():
    _, log_p = TINY.law(1.0)
    starts = [random_mixture(2, TINY, seed) for seed in range(3)]
    together = improve_mixture(log_p, *(torch.stack(x) for x in zip(*starts, strict=True)), steps=10)
    for i, start in enumerate(starts):
        alone = improve_mixture(log_p, *start, steps=10)
        assert_close(together[0][i], alone[0], tolerance=1e-9)
        assert_close(together[1][i], alone[1], tolerance=1e-9)


@pytest.fixture(scope="module")
def table():
    return mismatch_table([0.25, 1.0, 2.0], TINY, steps=20)


def test_table_is_tidy(table):
    columns = ["temperature", "entropy", "determinism", "proposal", "K", "decoding", "accepted_length"]
    assert list(table) == columns
    assert list(table.proposal) == list(PROPOSALS) * 3
    assert set(table.decoding) == {"sampled", "greedy branch", "joint"}
    assert table.K.isna().equals(table.decoding == "joint")
    assert table.K.dropna().isin([1, 2, 4]).all()
    assert table.accepted_length.between(0, 3 + 1e-5).all()


def test_true_joint_accepts_everything(table):
    assert_close(table[table.proposal == "true joint"].accepted_length.tolist(), [3.0] * 3, tolerance=1e-12)


def test_more_branches_never_accept_less(table):
    wide = table.pivot(index="temperature", columns="proposal", values="accepted_length")
    for few, many in itertools.pairwise((1, 2, 4)):
        assert (wide[f"K = {many}, greedy branch"] >= wide[f"K = {few}, greedy branch"]).all()
    for k in (1, 2, 4):
        assert (wide[f"K = {k}, sampled"] >= wide[f"K = {k}, greedy branch"] - 1e-5).all()
    assert (wide["K = 1, sampled"] >= wide["independent, sampled"] - 1e-5).all()
    assert (wide["K = 1, greedy branch"] >= wide["independent, greedy"] - 1e-5).all()


def test_row_depends_on_its_own_temperature_and_categories(table):
    alone = mismatch_table([1.0], TINY, categories=[2], steps=20)
    assert tuple(alone.proposal) == proposal_names([2])
    rows = table[(table.temperature == 1.0) & table.proposal.isin(alone.proposal)]
    assert_close(rows.accepted_length.tolist(), alone.accepted_length.tolist(), tolerance=1e-5)


def test_default_process_shows_the_mismatch():
    """At temperature 1 the order of the proposals is wide and not a matter of optimisation."""
    rows = mismatch_table([1.0], steps=10).set_index("proposal").accepted_length
    assert rows["independent, greedy"] < rows["independent, sampled"] < 2
    assert rows["K = 2, greedy branch"] > 2.5
    assert 4 < rows["K = 4, greedy branch"] < rows["K = 4, sampled"] < 6


def test_the_ceiling_is_beside_the_drafter_anchor_by_anchor():
    """Prompts with more anchors count for more on the drafter's side; Z_T, seeds and calibration prompts change nothing."""
    names = {"target": "toy", "method": "DFlash", "K": 1, "loss": "NLL", "construction": "all_prefixes", "task": "chat"}
    scores = pd.DataFrame(
        [
            {"setting": setting, "split": split, "prompt_id": f"{split}{i}", "seed": seed, "category_temperature": float("nan")}
            | {"emitted": 60, "passes": 30.0, "anchor_accepted": accepted, "anchors": anchors}
            for setting in ("low", "high")
            for split in ("calibration", "held_out")
            for seed in (0, 1)
            for i, (accepted, anchors) in enumerate([(90.0, 50), (10.0, 150)] if split == "held_out" else [(500.0, 100)])
        ]
    ).assign(**names)
    other = scores.assign(method="DBlast", K=4, loss="AL", category_temperature=1.0, anchor_accepted=0.0)
    best = {"independent, greedy": 0.3, "best 1 block": 2.0, "best 4 blocks": 3.0}
    oracle = pd.DataFrame(
        [
            {"target": "toy", "setting": setting, "proposal": proposal, "prompt_id": f"p{i}", "accepted_length": value}
            for setting in ("high", "low")
            for proposal, value in best.items()
            for i in range(3)
        ]
    )
    table = ceiling_table(pd.concat([scores, other]), oracle)
    assert list(table.setting) == ["high", "low"]
    assert_close(table[["drafter", "best block", "best 4 blocks", "share"]].to_numpy(), [[0.5, 2.0, 3.0, 25.0]] * 2)
    assert (table.drafter_error > 0).all() and (table.best_error == 0).all()
    assert_close(table.share_error, 25.0 * table.drafter_error / 0.5)
    assert ceiling_table(scores, oracle.assign(target="other")).empty


def test_positions_that_hardly_any_block_reaches_are_not_drawn():
    names = {"target": "toy", "setting": "high", "method": "DFlash", "standard_error": 0.1, "n": 9, "accepted": 0.1}
    causes = dict.fromkeys(CAUSES, 0.1)
    rows = pd.DataFrame(
        [names | causes | {"position": i + 1, "reached": r, "conditional_acceptance": 0.5} for i, r in enumerate([1.0, 0.01, 0.009])]
    )
    figure = rejections_figure(rows, "toy")
    assert figure.axes[0].containers[0].lines[0].get_xdata().tolist() == [1, 2]
    plt.close(figure)
