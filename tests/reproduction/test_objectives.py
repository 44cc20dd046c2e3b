"""The objectives of other papers against loops over plain floats: every block of a toy target, values and slopes."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import types
from functools import partial

import pytest
import torch

import dblast.losses
import dblast.reproduction.objectives
from dblast.errors import DBlastError
from dblast.losses import INPUTS, LOSSES, conditional_log_q, decayed_cross_entropy, nll_loss
from dblast.reproduction.objectives import (
    OBJECTIVES,
    chain_loss,
    d_pace_loss,
    distribution_loss,
    expected_accepted_length_loss,
    first_error_loss,
    first_error_weights,
    left_to_right_loss,
    log_candidate_acceptance,
    log_realised_acceptance,
    position_mean,
    truncated_cross_entropy,
)
from tests.helpers import assert_close, assert_same_computation, soft_distribution
from tests.method.test_losses import IMPOSSIBLE, Case, gradients, mean

VOCABULARY, LENGTH = 3, 3
BRANCHES = pytest.mark.parametrize("branches", [1, 2, 3])


class Toy(Case):
    """A case of test_losses beside the whole conditional distributions, as candidates; blocks of mixed lengths."""

    def __init__(self, branches, seed=0, length=LENGTH, zeros=False):
        super().__init__(branches, seed, length, zeros)
        rows = self.blocks.tolist()
        target = [[self.target[tuple(row[:i])] for i in range(length)] for row in rows]
        self.log_p_candidates = torch.tensor(target, dtype=torch.float64).log()
        self.log_q_candidates = self.position_log_q.expand(len(rows), -1, -1, -1)
        self.probability = self.log_p.sum(-1).exp()
        self.lengths = [1 + n % length for n in range(len(rows))]
        self.valid = torch.arange(length) < torch.tensor(self.lengths).unsqueeze(-1)

    @property
    def candidates(self):
        return {"log_q_candidates": self.log_q_candidates, "log_p_candidates": self.log_p_candidates}

    def expectation(self, loss, **options):
        """Of a loss that is a mean over anchors, over blocks drawn from the target."""
        each = [loss(*(t[n : n + 1] for t in self.tensors), **options) for n in range(len(self.blocks))]
        return (torch.stack(each) * self.probability).sum()


class Block:
    """One block in plain floats; positions count from 0 and end at the block's own length."""

    def __init__(self, length, log_q, log_prior, log_p, log_q_candidates, log_p_candidates):
        self.length = length
        self.q = [[math.exp(x) for x in branch] for branch in log_q]
        self.prior = [math.exp(x) for x in log_prior]
        self.p = [math.exp(x) for x in log_p]
        self.cq = [[[math.exp(x) for x in row] for row in branch] for branch in log_q_candidates]
        self.cp = [[math.exp(x) for x in row] for row in log_p_candidates]

    def weights(self, i):
        return [prior * math.prod(q[:i]) for prior, q in zip(self.prior, self.q, strict=True)]

    def prefix(self, length):
        return sum(self.weights(length)) if length else 1.0

    def conditional(self, i):
        return self.prefix(i + 1) / self.prefix(i)

    def over_vocabulary(self, i):
        """Pairs of p(v) and q(v | prefix)."""
        for v, p in enumerate(self.cp[i]):
            yield p, sum(w * cq[i][v] for w, cq in zip(self.weights(i), self.cq, strict=True)) / self.prefix(i)

    def accept(self, i):
        return min(1.0, self.conditional(i) / self.p[i])

    def rate(self, i, exact):
        return sum(min(p, q) for p, q in self.over_vocabulary(i)) if exact else self.accept(i)

    def divergence(self, i, exact):
        if not exact:
            return math.log(self.p[i] / self.conditional(i))
        return sum(p * math.log(p / q) for p, q in self.over_vocabulary(i))


def per_block(term):
    """Mean over blocks of a sum over positions; ``term(block, unperturbed block, position)``."""
    return lambda blocks, fixed: mean(
        [sum(term(b, f, i) for i in range(b.length)) for b, f in zip(blocks, fixed, strict=True)]
    )


def per_token(term):
    """Mean over existing positions, weighted by exp(-k / 2), which is DFlash's for blocks of 3."""

    def oracle(blocks, fixed):
        existing = [(b, i) for b in blocks for i in range(b.length)]
        total = sum(math.exp(-i / 2.0) * term(b, fixed, i) for b, i in existing)
        return total / sum(math.exp(-i / 2.0) for _, i in existing)

    return oracle


def d_pace_term(b, f, i, alpha=0.5):
    smooth = [(1 - alpha) * f.conditional(j) + alpha for j in range(f.length)]
    return -sum(math.prod(smooth[: m + 1]) for m in range(i, f.length)) * math.log(b.conditional(i))


def truncated_term(b, f, i):
    stops = [n for n in range(1, f.length + 1) if f.prefix(n) / math.prod(f.p[:n]) < 0.5]
    return -math.log(b.prefix(i + 1) / math.prod(b.p[: i + 1])) if i + 1 <= min([*stops, f.length]) else 0.0


def first_error_term(b, f, i):
    survives = math.prod(f.accept(j) for j in range(i))
    return -survives * (1 - f.accept(i)) * math.log(b.conditional(i))


def lk(exact):
    def oracle(blocks, fixed):
        mix = [math.exp(-3.0 * mean([f.rate(i, exact) for f in fixed if f.length > i])) for i in range(LENGTH)]
        term = per_token(lambda b, _, i: mix[i] * b.divergence(i, exact) + (1 - mix[i]) * (1 - b.rate(i, exact)))
        return term(blocks, fixed)

    return oracle


def added(*parts):
    return lambda blocks, fixed: sum(weight * oracle(blocks, fixed) for weight, oracle in parts)


CROSS_ENTROPY = per_token(lambda b, fixed, i: -math.log(b.conditional(i)))
CHAIN = per_block(lambda b, f, i: -b.prefix(i + 1))
FIRST_ERROR = per_block(first_error_term)
ORACLES = {
    "DPACE": per_block(d_pace_term),
    "TRUNC": per_block(truncated_term),
    "FOCAL": added((1.0, CROSS_ENTROPY), (0.3, FIRST_ERROR)),
    "CHAIN": added((1.0, CROSS_ENTROPY), (1.0, CHAIN)),
    "L2R": added((1.0, CROSS_ENTROPY), (0.3, FIRST_ERROR), (1.0, CHAIN)),
    "EAL": per_block(lambda b, f, i: -math.prod(b.accept(j) for j in range(i + 1))),
    "TV1": per_token(lambda b, fixed, i: 1 - b.rate(i, False)),
    "NLA1": per_token(lambda b, fixed, i: -math.log(b.rate(i, False))),
    "LK1": lk(False),
    "TV": per_token(lambda b, fixed, i: 1 - b.rate(i, True)),
    "NLA": per_token(lambda b, fixed, i: -math.log(b.rate(i, True))),
    "LK": lk(True),
    "KD": per_token(lambda b, fixed, i: b.divergence(i, True)),
}


def blocks_of(toy, tensors):
    rows = zip(toy.lengths, *(t.tolist() for t in tensors), strict=True)
    return [Block(*row) for row in rows]


def error(name, toy, objectives=OBJECTIVES):
    """Largest error of an objective's value, and of its slopes in log q, log prior and the candidates' log q.

    The slopes are central differences in float64, one value at a time, with what carries no gradient held fixed.
    """
    tensors = [t.clone() for t in (*toy.tensors, toy.log_q_candidates, toy.log_p_candidates)]
    fixed, oracle = blocks_of(toy, tensors), ORACLES[name]
    leaves = [tensors[k].clone().requires_grad_() for k in (0, 1, 3)]
    value = objectives[name](
        *leaves[:2], tensors[2], toy.valid, tau=0.5, log_q_candidates=leaves[2], log_p_candidates=tensors[4]
    )
    slopes = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    errors = [abs(value.item() - oracle(fixed, fixed))]
    for k, slope in zip((0, 1, 3), slopes, strict=True):
        values = tensors[k].view(-1)
        for position, actual in enumerate(slope.reshape(-1).tolist()):
            ends = []
            for step in (1e-5, -1e-5):
                values[position] += step
                ends.append(oracle(blocks_of(toy, tensors), fixed))
                values[position] -= step
            errors.append(abs(actual - (ends[0] - ends[1]) / 2e-5))
    return torch.tensor(errors).max()  # not Python's, which passes over nan


def few_blocks(branches, seed):
    """Six of the toy's blocks, two of each length: enough to tell faults, few enough for central differences."""
    toy, keep = Toy(branches, seed), [0, 4, 8, 15, 19, 26]
    for field in ("log_q", "log_prior", "log_p", "log_q_candidates", "log_p_candidates", "valid"):
        setattr(toy, field, getattr(toy, field)[keep].clone())
    toy.lengths = [1, 2, 3, 1, 2, 3]
    return toy


@BRANCHES
@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_gradients(name, branches):
    assert error(name, few_blocks(branches, seed=branches)) < 1e-5


MUTANTS = {
    "weights summed from the front": ("DPACE", "reach.flip(-1).cumsum(-1).flip(-1)", "reach.cumsum(-1)"),
    "cumulative confidence alone": ("DPACE", "reach.flip(-1).cumsum(-1).flip(-1)", "reach"),
    "no smoothing": ("DPACE", "(1 - alpha) * confidence + alpha", "confidence"),
    "gradient through the weights": ("DPACE", "valid).detach().exp()", "valid).exp()"),
    "weights reach missing positions": ("DPACE", "alpha).cumprod(-1), valid)", "alpha).cumprod(-1), None)"),
    "the failing prefix left out": ("TRUNC", "length <= last", "length < last"),
    "inverted ratio": ("TRUNC", "return -log_r", "return log_r"),
    "missing prefixes count": ("CHAIN", "log_prior, valid).exp(), valid)", "log_prior, valid).exp(), None)"),
    "conditionals for prefixes": ("CHAIN", "_existing(prefix_log_q(", "_existing(conditional_log_q("),
    "acceptance for rejection": ("FOCAL", "-torch.expm1(log_accept)", "log_accept.exp()"),
    "the error itself in what survives": ("FOCAL", "(log_accept.cumsum(-1) - log_accept)", "log_accept.cumsum(-1)"),
    "gradient through the first error": ("FOCAL", "valid)[0].detach()", "valid)[0]"),
    "no clip": ("EAL", "(-surprise).clamp(max=0.0)", "(-surprise)"),
    "ratio upside down": ("EAL", "(-surprise).clamp(max=0.0)", "surprise.clamp(max=0.0)"),
    "union for overlap": ("TV", "torch.minimum", "torch.maximum"),
    "reverse divergence": ("KD", "log_target.exp() * (log_target - ", "-log_q_mixture.exp() * (log_target - "),
    "prior for posterior": ("NLA", "seen[..., 0] = 0.0", "seen[...] = 0.0"),
    "posterior that has seen the token": ("NLA", "cumsum(-1).roll(1, -1)", "cumsum(-1)"),
    "joint for conditional": ("KD", "joint - before.unsqueeze(-1)", "joint"),
    "lambda with gradient": ("LK", "log_alpha.detach()", "log_alpha"),
    "lambda the wrong way round": ("LK", "torch.exp(-eta * rate)", "1 - torch.exp(-eta * rate)"),
    "lambda over missing positions": ("LK", "valid.float()", "torch.ones_like(log_alpha)"),
    "weights grow": ("CHAIN", "-torch.arange(b,", "torch.arange(b,"),
    "missing positions weighted": ("KD", "weights = weights * valid", "weights = weights * 1"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faulty_objectives_are_far_from_the_right_one(mutant, monkeypatch):
    name, right, wrong = MUTANTS[mutant]
    # The fault stands in one of the two files; the objectives then run on both as they are.
    sources = [inspect.getsource(dblast.reproduction.objectives), inspect.getsource(dblast.losses)]
    place = 0 if right in sources[0] else 1
    assert sources[place].count(right) == 1
    sources[place] = sources[place].replace(right, wrong)
    module, losses = types.ModuleType("objectives"), types.ModuleType("losses")
    # Its objectives must not join the real ones.
    sources[0] = sources[0].replace("LOSSES.update(OBJECTIVES)", "")
    for target, source in zip((module, losses), sources, strict=True):
        monkeypatch.setitem(sys.modules, target.__name__, target)  # where dataclasses look for their module
        exec(compile(source, target.__name__, "exec"), target.__dict__)
    shared = {n: v for n, v in vars(losses).items() if getattr(v, "__module__", "") == "losses" and n in vars(module)}
    assert {"position_mean", "prefix_members"} <= set(shared)
    module.__dict__.update(shared)
    assert error(name, few_blocks(2, seed=2), module.OBJECTIVES) > 1e-3


# -- identities --------------------------------------------------------------------------------


@BRANCHES
def test_d_pace_with_full_smoothing_is_the_untruncated_cross_entropy(branches):
    toy = Toy(branches, seed=6)
    constant = (toy.log_p * torch.arange(LENGTH, 0, -1)).sum(-1).mean()
    assert_close(d_pace_loss(*toy.tensors, alpha=1.0) + constant, truncated_cross_entropy(*toy.tensors, tau=0.0), 1e-5)


@BRANCHES
def test_truncated_constructions(branches):
    toy = Toy(branches, seed=7)
    whole = truncated_cross_entropy(*toy.tensors, construction="whole_block")
    assert_close(whole, nll_loss(*toy.tensors[:2]) + toy.log_p.sum(-1).mean(), 1e-5)
    assert_close(truncated_cross_entropy(*toy.tensors, tau=0.0, construction="one_prefix"), whole)
    first = (toy.log_p - conditional_log_q(*toy.tensors[:2]))[:, 0].mean()
    for construction in ("all_prefixes", "one_prefix"):
        assert_close(truncated_cross_entropy(*toy.tensors, tau=1e30, construction=construction), first)


@BRANCHES
def test_d_pace_without_smoothing_has_the_gradient_of_the_chain_loss(branches):
    toy = Toy(branches, seed=8)
    for valid in (None, toy.valid):
        chain = gradients(chain_loss, *toy.tensors, valid=valid)
        for actual, expected in zip(gradients(d_pace_loss, *toy.tensors, valid=valid, alpha=0.0), chain, strict=True):
            assert_close(actual, expected)


@BRANCHES
def test_chain_loss_counts_the_tokens_that_two_independent_blocks_share(branches):
    toy = Toy(branches, seed=9)
    q = conditional_log_q(*toy.tensors[:2]).double().sum(-1).exp()
    shared = 0.0
    for (n, x), (m, y) in itertools.product(enumerate(toy.blocks.tolist()), repeat=2):
        shared += toy.probability[n] * q[m] * next((i for i in range(LENGTH) if x[i] != y[i]), LENGTH)
    assert_close(toy.expectation(chain_loss), -shared, 1e-6)


@pytest.mark.parametrize("zeros", [False, True], ids=["p > 0", "p with zeros"])
@BRANCHES
def test_expected_accepted_length_is_that_of_sampled_drafts(branches, zeros):
    """E_{x~p} of the loss, and minus the accepted length of x ~ q found by running verification over every draft."""
    toy = Toy(branches, seed=10, zeros=zeros)
    accepted = 0.0
    for x in toy.blocks.tolist():
        alive = 1.0
        for i, token in enumerate(x):
            q = soft_distribution(toy.position_log_q, toy.log_prior[0], torch.tensor(x[:i], dtype=torch.long))
            alive *= float(q[token]) * min(1.0, toy.target[tuple(x[:i])][token] / float(q[token]))
            accepted += alive / VOCABULARY ** (LENGTH - 1 - i)  # blocks that share this prefix
    assert_close(toy.expectation(expected_accepted_length_loss), -accepted, 1e-6)
    assert toy.expectation(chain_loss) > -accepted


@pytest.mark.parametrize("zeros", [False, True], ids=["p > 0", "p with zeros"])
@BRANCHES
def test_acceptance_rate_is_the_overlap_of_target_and_conditional(branches, zeros):
    """Against the verifier's vectors; the realised token's estimate has the same expectation over its last token."""
    toy = Toy(branches, seed=11, zeros=zeros)
    log_alpha, divergence = log_candidate_acceptance(*toy.tensors[:2], *toy.candidates.values())
    once = log_realised_acceptance(*toy.tensors)
    for n, x in enumerate(toy.blocks.tolist()):
        for i in range(LENGTH):
            q = soft_distribution(toy.position_log_q, toy.log_prior[n], torch.tensor(x[:i], dtype=torch.long))
            p = torch.tensor(toy.target[tuple(x[:i])])
            overlap, distance = torch.minimum(p, q).sum(), 0.5 * (p - q).abs().sum()
            assert_close(log_alpha[n, i].exp(), overlap)
            assert_close(1 - log_alpha[n, i].exp(), distance)
            kl = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True) if a > 0)
            assert_close(divergence[n, i], kl, 1e-5)
            siblings = [k for k, y in enumerate(toy.blocks.tolist()) if y[:i] == x[:i] and y[i + 1 :] == x[i + 1 :]]
            weight = toy.log_p[siblings, i].exp()
            assert_close((weight * once[0][siblings, i].exp()).sum(), overlap, 1e-5)
            assert_close((weight * once[1][siblings, i])[weight > 0].sum(), kl, 1e-5)
            assert -(weight * once[0][siblings, i])[weight > 0].sum() >= -log_alpha[n, i] - 1e-6  # Jensen


@BRANCHES
def test_divergence_of_the_conditionals_adds_up_to_that_of_blocks(branches):
    toy = Toy(branches, seed=13)
    _, divergence = log_candidate_acceptance(*toy.tensors[:2], *toy.candidates.values())
    whole = toy.log_p.sum(-1) - conditional_log_q(*toy.tensors[:2]).double().sum(-1)
    assert_close((toy.probability * divergence.sum(-1)).sum(), (toy.probability * whole).sum(), 1e-5)


@BRANCHES
def test_lk_runs_from_divergence_to_total_variation(branches):
    toy = Toy(branches, seed=14)
    for candidates in ({}, toy.candidates):
        ends = {d: distribution_loss(*toy.tensors, toy.valid, distance=d, **candidates) for d in ("KL", "TV")}
        for eta, distance in ((0.0, "KL"), (1e6, "TV")):
            lk = distribution_loss(*toy.tensors, toy.valid, distance="LK", eta=eta, **candidates)
            assert_close(lk, ends[distance])


def test_negative_log_acceptance_has_the_slope_of_total_variation_over_the_rate():
    toy = Toy(1, seed=15, length=1)
    grads = {}
    for distance in ("TV", "NLA"):
        leaf = toy.log_q_candidates.clone().requires_grad_()
        options = {"log_q_candidates": leaf, "log_p_candidates": toy.log_p_candidates, "distance": distance}
        (grads[distance],) = torch.autograd.grad(distribution_loss(*toy.tensors, **options), leaf)
    alpha = 1 - distribution_loss(*toy.tensors, distance="TV", **toy.candidates)
    assert_close(grads["NLA"], grads["TV"] / alpha)


def test_point_mass_target_makes_distillation_cross_entropy():
    toy = Toy(1, seed=16)
    target = torch.nn.functional.one_hot(toy.blocks, VOCABULARY).double().log()
    candidates = {**toy.candidates, "log_p_candidates": target}
    expected = decayed_cross_entropy(*toy.tensors[:2], toy.valid)
    for distance in ("KL", "CE", "NLA"):
        assert_close(distribution_loss(*toy.tensors, toy.valid, distance=distance, **candidates), expected, 1e-5)
    assert_close(distribution_loss(*toy.tensors, toy.valid, distance="CE"), expected, 1e-5)


def test_cross_entropy_is_divergence_plus_entropy():
    toy = Toy(2, seed=17, zeros=True)
    entropy = position_mean(torch.special.entr(toy.log_p_candidates.exp()).sum(-1), toy.valid)
    losses = [distribution_loss(*toy.tensors, toy.valid, distance=d, **toy.candidates) for d in ("CE", "KL")]
    assert_close(losses[0] - losses[1], entropy, 1e-5)


@BRANCHES
def test_first_error_is_one_event_at_most(branches):
    toy = Toy(branches, seed=19)
    survives = log_realised_acceptance(*toy.tensors, toy.valid)[0].sum(-1).exp()
    weights = first_error_weights(*toy.tensors, toy.valid)
    assert_close(weights.sum(-1), 1 - survives, 1e-5)
    missed = torch.tensor(list(itertools.product([False, True], repeat=LENGTH)) * 4)[: len(toy.blocks)]
    hard = first_error_weights(*toy.tensors, toy.valid, missed)
    expected = [
        [float(i < n and row[i] and not any(row[:i])) for i in range(LENGTH)]
        for row, n in zip(missed.tolist(), toy.lengths, strict=True)
    ]
    assert hard.tolist() == expected
    loss = -(hard * conditional_log_q(*toy.tensors[:2], toy.valid)).sum(-1).mean()
    assert_close(first_error_loss(*toy.tensors, toy.valid, missed=missed), loss)


# -- every objective by name -------------------------------------------------------------------

NAMES = pytest.mark.parametrize("name", OBJECTIVES)


@NAMES
def test_what_fills_missing_positions_does_not_matter(name):
    toy = Toy(2, seed=23)
    values = []
    for filler in (-0.3, -torch.inf, torch.nan):
        tensors = [t.clone() for t in (toy.log_q, toy.log_prior, toy.log_p, *toy.candidates.values())]
        masks = {0: toy.valid[:, None], 2: toy.valid, 3: toy.valid[:, None, :, None], 4: toy.valid[..., None]}
        for k, mask in masks.items():
            tensors[k] = tensors[k].masked_fill(~mask, filler).requires_grad_()
        value = OBJECTIVES[name](*tensors[:3], toy.valid, log_q_candidates=tensors[3], log_p_candidates=tensors[4])
        values.append(value)
        used = [tensors[k] for k in masks]
        slopes = torch.autograd.grad(value, used, allow_unused=True, materialize_grads=True)
        for gradient, mask in zip(slopes, masks.values(), strict=True):
            assert (gradient.masked_select(~mask) == 0).all()
    assert_same_computation(values[1], values[0])
    assert_same_computation(values[2], values[0])


@NAMES
def test_padded_candidates_change_nothing(name):
    toy = Toy(2, seed=24)
    pad = torch.nn.functional.pad
    padded = {
        "log_q_candidates": pad(toy.log_q_candidates, (0, 2), value=-1.0),
        "log_p_candidates": pad(toy.log_p_candidates, (0, 2), value=-torch.inf),
    }
    expected = OBJECTIVES[name](*toy.tensors, **toy.candidates)
    assert_close(OBJECTIVES[name](*toy.tensors, **padded), expected)


@NAMES
@pytest.mark.parametrize("disjoint", [False, True], ids=["overlap", "disjoint"])
@pytest.mark.parametrize("impossible", IMPOSSIBLE)
def test_impossible_tokens_leave_losses_and_gradients_finite(impossible, disjoint, name):
    toy = Toy(2, seed=25, zeros=True)
    leaves = [t.clone().requires_grad_() for t in (toy.log_q, toy.log_prior, toy.log_q_candidates)]
    log_q, log_prior, log_p = IMPOSSIBLE[impossible](*leaves[:2], toy.log_p)
    log_q_candidates, log_p_candidates = leaves[2], toy.log_p_candidates
    if disjoint:  # the target on token 0, the drafter on the others
        only = torch.tensor([True, False, False])
        log_q_candidates = log_q_candidates.masked_fill(only, -torch.inf)
        log_p_candidates = only.double().log().expand_as(log_p_candidates)
    candidates = {"log_q_candidates": log_q_candidates, "log_p_candidates": log_p_candidates}
    value = OBJECTIVES[name](log_q, log_prior, log_p, **candidates)
    assert torch.isfinite(value)
    for gradient in torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True):
        assert torch.isfinite(gradient).all()


@NAMES
def test_names_share_a_signature(name):
    toy = Toy(2, seed=26)
    assert LOSSES[name] is OBJECTIVES[name]
    options = {"tau": 0.5, "construction": "one_prefix", **toy.candidates}
    assert set(options) == set(INPUTS)
    value = OBJECTIVES[name](*toy.tensors, toy.valid, **options)
    assert value.ndim == 0
    default = OBJECTIVES[name](*toy.tensors, toy.valid, **toy.candidates)
    assert math.isclose(value, default, rel_tol=1e-4) == (name != "TRUNC")
    with pytest.raises(DBlastError, match="unknown input 'eta'"):
        OBJECTIVES[name](*toy.tensors, eta=1.0)
    if name in ("TV", "NLA", "LK", "KD"):
        with pytest.raises(DBlastError, match="log_q_candidates and log_p_candidates"):
            OBJECTIVES[name](*toy.tensors, log_p_candidates=toy.log_p_candidates)
    else:
        assert_same_computation(value, OBJECTIVES[name](*toy.tensors, toy.valid, tau=0.5, construction="one_prefix"))


@pytest.mark.parametrize("name", ["KD", "CE of distributions"])
def test_candidates_that_cannot_be_drafted_are_left_out(name):
    """Their share would be infinite; everything else counts as if they had not been recorded."""
    toy = Toy(2, seed=28)
    loss = OBJECTIVES["KD"] if name == "KD" else partial(distribution_loss, distance="CE")
    candidates = toy.candidates
    log_q, log_p = candidates["log_q_candidates"].clone(), candidates["log_p_candidates"]
    log_q[..., -1] = float("-inf")
    value = loss(*toy.tensors, toy.valid, log_q_candidates=log_q, log_p_candidates=log_p)
    fewer = {"log_q_candidates": log_q[..., :-1], "log_p_candidates": log_p[..., :-1]}
    assert_close(value, loss(*toy.tensors, toy.valid, **fewer))


def test_bad_options_are_refused():
    toy = Toy(2, seed=27)
    log_q, log_p = toy.candidates.values()
    calls = {
        "'two'.*all_prefixes": lambda *x: truncated_cross_entropy(*x, construction="two"),
        "tau": lambda *x: truncated_cross_entropy(*x, tau=-0.1),
        "alpha": lambda *x: d_pace_loss(*x, alpha=1.5),
        "gamma": lambda *x: left_to_right_loss(*x, gamma=0.0),
        "'L2'.*TV, NLA, LK, KL, CE": lambda *x: distribution_loss(*x, distance="L2"),
        "eta": lambda *x: distribution_loss(*x, distance="LK", eta=-1.0),
        "both or neither": lambda *x: distribution_loss(*x, distance="TV", log_q_candidates=log_q),
        "do not fit": lambda *x: distribution_loss(
            *x, distance="TV", log_q_candidates=log_q[:, :1], log_p_candidates=log_p
        ),
    }
    for match, call in calls.items():
        with pytest.raises(DBlastError, match=match):
            call(*toy.tensors)
