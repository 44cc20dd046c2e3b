"""Training objectives against scalar transcriptions of the equations, over every block of a three-token vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from dblast.errors import DBlastError
from dblast.losses import (
    AL_CONSTRUCTIONS,
    LOSSES,
    acceptance_length_loss,
    acceptance_terms,
    block_gamma,
    conditional_log_q,
    decayed_cross_entropy,
    nll_loss,
    prefix_log_q,
    stopping_prefix,
    get_loss,
)
from tests.helpers import (
    all_blocks,
    assert_close,
    assert_same_computation,
    block_log_q,
    generator,
    random_log_prior,
    random_position_log_q,
    random_target,
    target_log_p,
)

VOCABULARY, LENGTH = 3, 3
#: None of the prefixes fails the first, all fail the last.
TAUS = (0.0, 0.1, 0.5, 1.0, 1e30)


class Scalars:
    """The objectives of one block, from plain floats: ``q[z][i]``, ``prior[z]``, ``p[i]``, positions from 0.

    The switches break one part of eq. 14-16 each; comparisons must notice.
    """

    def __init__(self, log_q, log_prior, log_p, *, clip=True, cumulative=True, inverted=False):
        self.q = [[math.exp(value) for value in branch] for branch in log_q]
        self.prior = [math.exp(value) for value in log_prior]
        self.p = [math.exp(value) for value in log_p]
        self.clip, self.cumulative, self.inverted = clip, cumulative, inverted

    def prefix_q(self, length):
        total = 0.0
        for z, weight in enumerate(self.prior):
            product = weight
            for i in range(length):
                product *= self.q[z][i]
            total += product
        return total

    def accept(self, i):
        # Not prefix_q(0): a perturbed prior does not sum to one, and the first conditional is the first prefix.
        before = self.prefix_q(i) if i else 1.0
        ratio = self.p[i] * before / self.prefix_q(i + 1)
        return min(1.0, ratio) if self.clip else ratio

    def ratio(self, length):
        ratio = self.prefix_q(length) / math.prod(self.p[:length])
        return 1 / ratio if self.inverted else ratio

    def accepted_length(self, length):
        products = [math.prod(self.accept(j) for j in range(i)) for i in range(1, length + 1)]
        return sum(products) if self.cumulative else products[-1]

    def members(self, tau, construction):
        b = len(self.p)
        last = min([length for length in range(1, b + 1) if self.ratio(length) < tau] + [b])
        return {"whole_block": [b], "one_prefix": [last], "all_prefixes": list(range(1, last + 1))}[construction]

    def al(self, tau=0.1, construction="all_prefixes", members=None):
        members = self.members(tau, construction) if members is None else members
        return -sum(math.log(self.ratio(length)) + math.log(self.accepted_length(length)) for length in members)

    def nll(self):
        return -math.log(self.prefix_q(len(self.p)))

    def weighted_cross_entropy(self, gamma):
        """Weighted sum over positions and the sum of the weights."""
        total, weights = 0.0, 0.0
        for i in range(len(self.p)):
            marginal = sum(weight * self.q[z][i] for z, weight in enumerate(self.prior))
            total -= math.exp(-i / gamma) * math.log(marginal)
            weights += math.exp(-i / gamma)
        return total, weights


class Case:
    """Every block of a random toy target beside a random drafter, as the tensors that the losses take."""

    def __init__(self, branches, seed=0, length=LENGTH, zeros=False):
        rng = generator(seed)
        self.target = random_target(VOCABULARY, length, rng, zeros)
        self.blocks = all_blocks(VOCABULARY, length)
        self.position_log_q = random_position_log_q(branches, length, VOCABULARY, rng)
        self.log_q = block_log_q(self.position_log_q, self.blocks)
        self.log_prior = random_log_prior(branches, rng).expand(len(self.blocks), -1)
        self.log_p = target_log_p(self.target, self.blocks)

    @property
    def tensors(self):
        return self.log_q, self.log_prior, self.log_p

    def scalars(self, **switches):
        rows = zip(*(tensor.tolist() for tensor in self.tensors), strict=True)
        return [Scalars(*row, **switches) for row in rows]


def mean(values):
    return sum(values) / len(values)


@pytest.fixture(params=[1, 2, 3], ids=lambda branches: f"K={branches}")
def case(request):
    return Case(request.param, seed=request.param)


def gradients(loss, log_q, log_prior, log_p, **options):
    """Gradients of a loss with respect to log q and the log prior."""
    log_q, log_prior = log_q.clone().requires_grad_(), log_prior.clone().requires_grad_()
    loss(log_q, log_prior, log_p, **options).backward()
    return log_q.grad, log_prior.grad


def finite_differences(loss, case, step=1e-5):
    """Central differences of a scalar loss over blocks; a value of one block moves only that block's term."""
    tensors = [tensor.clone() for tensor in case.tensors]
    slopes = []
    for tensor in tensors[:2]:
        slope = torch.zeros_like(tensor)
        flat, flat_slope = tensor.view(len(tensor), -1), slope.view(len(tensor), -1)
        for block in range(len(flat)):
            for k in range(flat.shape[1]):
                ends = []
                for sign in (1, -1):
                    flat[block, k] += sign * step
                    ends.append(loss(block, Scalars(*(t[block].tolist() for t in tensors))))
                    flat[block, k] -= sign * step
                flat_slope[block, k] = (ends[0] - ends[1]) / (2 * step) / len(flat)
        slopes.append(slope)
    return slopes


def test_prefix_log_q_sums_the_category_out(case):
    expected = [[math.log(s.prefix_q(length)) for length in range(1, LENGTH + 1)] for s in case.scalars()]
    assert_close(prefix_log_q(case.log_q, case.log_prior), expected, tolerance=1e-5)


def test_conditionals_are_ratios_of_prefixes(case):
    expected = [
        [math.log(s.prefix_q(i + 1) / (s.prefix_q(i) if i else 1.0)) for i in range(LENGTH)] for s in case.scalars()
    ]
    assert_close(conditional_log_q(case.log_q, case.log_prior), expected, tolerance=1e-5)


def test_nll(case):
    expected = mean([s.nll() for s in case.scalars()])
    assert_close(nll_loss(case.log_q, case.log_prior), expected, tolerance=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 2.0, 7.0])
def test_decayed_cross_entropy(case, gamma):
    sums = [s.weighted_cross_entropy(gamma) for s in case.scalars()]
    expected = sum(total for total, _ in sums) / sum(weights for _, weights in sums)
    assert_close(decayed_cross_entropy(case.log_q, case.log_prior, gamma=gamma), expected, tolerance=1e-5)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0), (12, 6.0)])
def test_gamma_by_block_size(block_size, gamma):
    assert block_gamma(block_size - 1) == gamma


@pytest.mark.parametrize("construction", AL_CONSTRUCTIONS)
@pytest.mark.parametrize("tau", TAUS)
def test_acceptance_length_loss(case, tau, construction):
    expected = mean([s.al(tau, construction) for s in case.scalars()])
    actual = acceptance_length_loss(*case.tensors, tau=tau, construction=construction)
    assert_close(actual, expected, tolerance=1e-5)


def test_acceptance_terms(case):
    log_r, log_accept, log_s = acceptance_terms(*case.tensors)
    for row, s in enumerate(case.scalars()):
        lengths = range(1, LENGTH + 1)
        assert_close(log_r[row], [math.log(s.ratio(length)) for length in lengths], tolerance=1e-5)
        accepted = [math.log(math.prod(s.accept(j) for j in range(length))) for length in lengths]
        assert_close(log_accept[row], accepted, tolerance=1e-5)
        assert_close(log_s[row], [math.log(s.accepted_length(length)) for length in lengths], tolerance=1e-5)


@pytest.mark.parametrize("tau", TAUS)
def test_stopping_prefix_keeps_the_first_failure(case, tau):
    log_r, _, _ = acceptance_terms(*case.tensors)
    assert stopping_prefix(log_r, tau).tolist() == [s.members(tau, "one_prefix")[0] for s in case.scalars()]


def test_toy_blocks_stop_at_every_length():
    """Otherwise the comparisons above would not tell the constructions apart."""
    log_r, _, _ = acceptance_terms(*Case(3, seed=3).tensors)
    assert set(stopping_prefix(log_r, 0.5).tolist()) == {1, 2, 3}


@pytest.mark.parametrize("name", ["NLL", "CE"])
def test_gradients_of_the_likelihoods(case, name):
    weights = sum(math.exp(-i / 2.0) for i in range(LENGTH))
    value = {"NLL": lambda s: s.nll(), "CE": lambda s: s.weighted_cross_entropy(2.0)[0] / weights}[name]
    slopes = finite_differences(lambda block, s: value(s), case)
    for actual, expected in zip(gradients(get_loss(name), *case.tensors), slopes, strict=True):
        assert_close(actual, expected, tolerance=1e-6)


@pytest.mark.parametrize("construction", AL_CONSTRUCTIONS)
def test_acceptance_length_gradient_holds_the_membership_fixed(case, construction):
    """The slopes are those of the sum over the prefixes that belong at the unperturbed point, and of nothing else."""
    members = [s.members(0.5, construction) for s in case.scalars()]
    actual = gradients(acceptance_length_loss, *case.tensors, tau=0.5, construction=construction)
    expected = finite_differences(lambda block, s: s.al(members=members[block]), case)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, tolerance=1e-6)


@pytest.mark.parametrize("zeros", [False, True], ids=["p > 0", "p with zeros"])
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_accepted_length_under_the_draft_is_an_expectation_under_the_target(branches, zeros):
    """E_{x~q}[AL] = sum_l E_{x~p}[r_l prod_{j<=l} A_j], the left side by running speculative verification."""
    case = Case(branches, seed=10 + branches, zeros=zeros)
    draft = {tuple(block): s.prefix_q(LENGTH) for block, s in zip(case.blocks.tolist(), case.scalars(), strict=True)}

    def mass(prefix):
        return sum(value for block, value in draft.items() if block[: len(prefix)] == prefix)

    accepted_length = 0.0
    for block, probability in draft.items():
        alive = probability
        for i, token in enumerate(block):
            q = mass(block[: i + 1]) / mass(block[:i])
            alive *= min(1.0, case.target[block[:i]][token] / q)
            accepted_length += alive
    log_r, log_accept, _ = acceptance_terms(*case.tensors)
    p = case.log_p.sum(-1).exp()
    assert_close((p.unsqueeze(-1) * (log_r + log_accept).double().exp()).sum(), accepted_length, tolerance=1e-6)


@pytest.mark.parametrize("loss", ["NLL", "CE", *AL_CONSTRUCTIONS])
def test_equal_branches_are_one_branch(loss):
    case = Case(1, seed=21)
    repeated = case.log_q.expand(-1, 3, -1)
    prior = random_log_prior(3, generator(22)).expand(len(repeated), -1)
    options = {"construction": loss} if loss in AL_CONSTRUCTIONS else {}
    name = "AL" if loss in AL_CONSTRUCTIONS else loss
    one = get_loss(name)(case.log_q, torch.zeros_like(case.log_prior), case.log_p, **options)
    three = get_loss(name)(repeated, prior, case.log_p, **options)
    assert_close(three, one, tolerance=1e-5)


def test_constructions_agree_on_blocks_of_one_token():
    case = Case(2, seed=31, length=1)
    values = [acceptance_length_loss(*case.tensors, construction=construction) for construction in AL_CONSTRUCTIONS]
    assert_close(values[1], values[0])
    assert_close(values[2], values[0])


def never(x, where=True):
    return x.masked_fill(torch.tensor(where), -torch.inf)


IMPOSSIBLE = {
    "q = 0 in every branch": lambda log_q, log_prior, log_p: (never(log_q), log_prior, log_p),
    "q = 0 in one branch": lambda log_q, log_prior, log_p: (never(log_q, [[True], [False]]), log_prior, log_p),
    "q = 0 at one position": lambda log_q, log_prior, log_p: (never(log_q, [False, True, False]), log_prior, log_p),
    "p = 0": lambda log_q, log_prior, log_p: (log_q, log_prior, never(log_p)),
    "p = q = 0": lambda log_q, log_prior, log_p: (never(log_q), log_prior, never(log_p)),
    "category of prior 0": lambda log_q, log_prior, log_p: (log_q, never(0 * log_prior, [False, True]), log_p),
}


@pytest.mark.parametrize("tau", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["NLL", "CE", *AL_CONSTRUCTIONS])
@pytest.mark.parametrize("impossible", IMPOSSIBLE)
def test_impossible_tokens_leave_losses_and_gradients_finite(impossible, loss, tau):
    """Gradients are taken at the drafter's raw outputs; what it cannot draft enters as a constant -inf."""
    case = Case(2, seed=41)
    raw_q = case.position_log_q.clone().requires_grad_()
    raw_prior = case.log_prior[0].clone().requires_grad_()
    log_q = block_log_q(raw_q.log_softmax(-1), case.blocks)
    log_prior = raw_prior.log_softmax(-1).expand(len(case.blocks), -1)
    tensors = IMPOSSIBLE[impossible](log_q, log_prior, case.log_p)
    if loss in AL_CONSTRUCTIONS:
        value = acceptance_length_loss(*tensors, tau=tau, construction=loss)
    else:
        value = get_loss(loss)(*tensors)
    assert torch.isfinite(value)
    for gradient in torch.autograd.grad(value, [raw_q, raw_prior], allow_unused=True, materialize_grads=True):
        assert torch.isfinite(gradient).all()


def loss_by_name(loss, log_q, log_prior, log_p, valid=None):
    if loss == "CE":
        return decayed_cross_entropy(log_q, log_prior, valid, gamma=2.0)
    if loss == "NLL":
        return nll_loss(log_q, log_prior, valid)
    return acceptance_length_loss(log_q, log_prior, log_p, valid, tau=0.5, construction=loss)


@pytest.mark.parametrize("filler", [-0.3, -torch.inf], ids=["filler", "-inf filler"])
@pytest.mark.parametrize("loss", ["NLL", "CE", *AL_CONSTRUCTIONS])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_block_has_the_loss_of_the_truncated_block(case, length, loss, filler):
    valid = (torch.arange(LENGTH) < length).expand_as(case.log_p)
    log_q = case.log_q.masked_fill(~valid.unsqueeze(1), filler)
    log_p = case.log_p.masked_fill(~valid, filler)
    truncated = loss_by_name(loss, case.log_q[..., :length], case.log_prior, case.log_p[..., :length])
    assert_close(loss_by_name(loss, log_q, case.log_prior, log_p, valid), truncated, tolerance=1e-6)


@pytest.mark.parametrize("loss", ["NLL", *AL_CONSTRUCTIONS])
def test_batch_of_mixed_lengths_is_the_mean_over_anchors(case, loss):
    lengths = 1 + torch.arange(len(case.blocks)) % LENGTH
    valid = torch.arange(LENGTH) < lengths.unsqueeze(-1)
    each = [
        loss_by_name(loss, case.log_q[i : i + 1, :, :n], case.log_prior[i : i + 1], case.log_p[i : i + 1, :n])
        for i, n in enumerate(lengths.tolist())
    ]
    assert_close(loss_by_name(loss, *case.tensors, valid), torch.stack(each).mean(), tolerance=1e-6)


@pytest.mark.parametrize("loss", ["NLL", "CE", *AL_CONSTRUCTIONS])
def test_positions_that_do_not_exist_have_no_gradient(case, loss):
    valid = (torch.arange(LENGTH) < 2).expand_as(case.log_p)
    log_q_gradient, _ = gradients(lambda *tensors: loss_by_name(loss, *tensors, valid), *case.tensors)
    assert (log_q_gradient[..., 2] == 0).all()
    assert (log_q_gradient[..., :2] != 0).any()


def test_names_choose_the_objective(case):
    assert ["NLL", "AL", "CE"] == list(LOSSES)[:3]
    assert_same_computation(get_loss("NLL")(*case.tensors), nll_loss(case.log_q, case.log_prior))
    assert_same_computation(get_loss("CE")(*case.tensors), decayed_cross_entropy(case.log_q, case.log_prior))
    for construction in AL_CONSTRUCTIONS:
        expected = acceptance_length_loss(*case.tensors, tau=0.5, construction=construction)
        assert_same_computation(get_loss("AL")(*case.tensors, tau=0.5, construction=construction), expected)


def test_unknown_names_and_negative_tau_are_refused(case):
    with pytest.raises(DBlastError, match="'KL'.*NLL, AL, CE"):
        get_loss("KL")(*case.tensors)
    with pytest.raises(DBlastError, match="'two_prefixes'.*all_prefixes, one_prefix, whole_block"):
        acceptance_length_loss(*case.tensors, construction="two_prefixes")
    with pytest.raises(DBlastError, match="tau"):
        acceptance_length_loss(*case.tensors, tau=-0.1)


@pytest.mark.parametrize("fault", [{"clip": False}, {"cumulative": False}, {"inverted": True}], ids=str)
def test_faulty_acceptance_length_losses_are_far_from_the_right_one(fault):
    case = Case(1, seed=51)
    actual = float(acceptance_length_loss(*case.tensors))
    assert abs(mean([s.al() for s in case.scalars()]) - actual) < 1e-5
    assert abs(mean([s.al() for s in case.scalars(**fault)]) - actual) > 1e-3
