"""The law of what speculative decoding emits is the target's: enumerated exactly, and simulated with the real loop."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dblast import proposals, verifier
from dblast.decoding import generate
from dblast.sampling import SamplingSettings
from dblast.targets import wrap_target
from tests.conftest import SHAPE, seeded
from tests.helpers import (
    all_blocks,
    assert_close,
    generator,
    random_branches,
    random_log_prior,
    random_position_log_q,
    random_target,
    sequence_probability,
)

# -- mutants -----------------------------------------------------------------------------------


def softmaxed_residual(p, q):
    return (p - q).clamp(min=0).softmax(-1)


def residual_not_normalised(p, q):
    return (p - q).clamp(min=0)


def redraw_from_the_target(p, q):
    return p


def accept_with_p(p_x, q_x):
    return p_x


def q_of_the_drawn_branch_greedy(branch_tokens, log_prior, category, original=proposals.greedy_branch_proposal):
    proposal = original(branch_tokens, log_prior, category)
    return replace(proposal, q_drafted=torch.ones_like(proposal.q_drafted))


def q_of_the_drawn_branch_soft(position_log_q, log_prior, category, column, *ids, original=proposals.soft_proposal):
    proposal = original(position_log_q, log_prior, category, column, *ids)
    chosen = position_log_q[torch.arange(len(category)), category]
    return replace(proposal, q_drafted=chosen.gather(-1, column.unsqueeze(-1)).squeeze(-1).exp())


BOTH = ("greedy_branch", "soft")
#: name -> (module, function, replacement, modes in which it is wrong)
MUTANTS = {
    "residual softmaxed": (verifier, "residual_distribution", softmaxed_residual, BOTH),
    "residual not renormalised": (verifier, "residual_distribution", residual_not_normalised, BOTH),
    "redrawn freely on a mismatch": (verifier, "residual_distribution", redraw_from_the_target, BOTH),
    "accepted with p": (verifier, "accept_ratio", accept_with_p, BOTH),
    "q of the drawn branch": (proposals, "greedy_branch_proposal", q_of_the_drawn_branch_greedy, ("greedy_branch",)),
    "q of the drawn branch, soft": (proposals, "soft_proposal", q_of_the_drawn_branch_soft, ("soft",)),
}
CASES = [(name, mode) for name, (*_, modes) in MUTANTS.items() for mode in modes]


def plant(monkeypatch, name):
    module, function, mutant, _ = MUTANTS[name]
    monkeypatch.setattr(module, function, mutant)


# -- the exact law ------------------------------------------------------------------------------


class ToyDrafter:
    """Unrelated random float64 branches, prior and marginals after every prefix."""

    def __init__(self, branches, length, vocabulary, depth, seed):
        rng = generator(seed)
        self.length, self.vocabulary = length, vocabulary
        self.parts = {
            prefix: (
                random_branches(branches, length, vocabulary, rng),
                random_log_prior(branches, rng),
                random_position_log_q(branches, length, vocabulary, rng),
            )
            for n in range(depth)
            for prefix in itertools.product(range(vocabulary), repeat=n)
        }

    def proposals(self, prefix, length, mode):
        """Every proposal that can be made, as one batch, and its probability."""
        tokens, log_prior, log_q = self.parts[prefix]
        branches = len(tokens)
        if mode == "greedy_branch":
            category = torch.arange(branches)
            made = proposals.greedy_branch_proposal(
                tokens[:, :length].expand(branches, -1, -1), log_prior.expand(branches, -1), category
            )
            return made, log_prior.exp()
        blocks = all_blocks(self.vocabulary, length)
        category = torch.arange(branches).repeat_interleave(len(blocks))
        column = blocks.repeat(branches, 1)
        many = len(category)
        made = proposals.soft_proposal(
            log_q[:, :length].expand(many, -1, -1, -1), log_prior.expand(many, -1), category, column
        )
        drawn = log_q[category.unsqueeze(1), torch.arange(length), column].sum(-1)
        return made, (log_prior[category] + drawn).exp()


def support(target, prefixes):
    """The target after these prefixes: tokens with p > 0 and their p, (n, W) each, padded with p = 0."""
    p = torch.tensor([target[prefix] for prefix in prefixes], dtype=torch.float64)
    tokens = (p == 0).int().argsort(dim=-1, stable=True)[:, : int((p > 0).sum(-1).max())]
    return tokens, p.gather(-1, tokens)


def step_law(target, drafter, prefix, room, mode):
    """Probability of everything that one pass can emit when ``room`` tokens are left, as the loop does it."""
    length = min(drafter.length, room - 1)
    law = defaultdict(float)
    if length == 0:
        return {(v,): p for v, p in enumerate(target[prefix])}
    made, weight = drafter.proposals(prefix, length, mode)
    reach = weight.clone()
    blocks = [tuple(block) for block in made.drafted.tolist()]
    for i in range(length + 1):
        tokens, p = support(target, [prefix + block[:i] for block in blocks])
        q = made.q(torch.full((len(blocks),), i), tokens)
        law_here = verifier.residual_distribution(p, q)
        if i < length:
            p_x = verifier.probability_on_support(tokens, p, made.drafted[:, i])
            acceptance = verifier.accept_ratio(p_x, made.q_drafted[:, i])
            stop = reach * (1 - acceptance)
            reach = reach * acceptance
        else:
            stop = reach
        ends = zip(blocks, tokens.tolist(), law_here.tolist(), stop.tolist(), strict=True)
        for block, candidates, shares, probability in ends:
            for v, share in zip(candidates, shares, strict=True):
                law[(*block[:i], v)] += probability * share
    return law


def emitted_law(target, drafter, prefix, room, mode, known):
    """Joint law of the next ``room`` tokens under the whole loop."""
    if room == 0:
        return {(): 1.0}
    if prefix not in known:
        law = defaultdict(float)
        for tokens, probability in step_law(target, drafter, prefix, room, mode).items():
            if probability:
                rest = emitted_law(target, drafter, prefix + tokens, room - len(tokens), mode, known)
                for more, share in rest.items():
                    law[tokens + more] += probability * share
        known[prefix] = law
    return known[prefix]


def largest_error(vocabulary, branches, length, emitted, mode, seed, zeros):
    target = random_target(vocabulary, emitted, generator(seed), zeros)
    drafter = ToyDrafter(branches, length, vocabulary, emitted, seed + 1)
    law = emitted_law(target, drafter, (), emitted, mode, {})
    sequences = itertools.product(range(vocabulary), repeat=emitted)
    return max(abs(law.get(tokens, 0.0) - sequence_probability(target, tokens)) for tokens in sequences)


@pytest.mark.parametrize("zeros", [False, True], ids=["p > 0", "p with zeros"])
@pytest.mark.parametrize(
    ("mode", "branches"), [*itertools.product(("greedy_branch", "soft"), (1, 2, 3)), ("independent", 1)]
)
@pytest.mark.parametrize(("vocabulary", "length", "emitted"), [(3, 2, 4), (4, 2, 3), (5, 1, 3), (3, 3, 3)])
def test_joint_law_of_the_loop_is_that_of_the_target(vocabulary, length, emitted, mode, branches, zeros):
    for seed in range(2):
        assert largest_error(vocabulary, branches, length, emitted, mode, 10 * seed, zeros) < 1e-9


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_mutants_break_the_joint_law(name, mode, monkeypatch):
    plant(monkeypatch, name)
    assert max(largest_error(3, 3, 2, 3, mode, seed, zeros=False) for seed in range(3)) > 1e-2


# -- simulation of the real loop ----------------------------------------------------------------

VOCABULARY, EMITTED, PROMPT = 5, 3, [1, 3, 0]


@pytest.fixture(scope="module")
def toy(tokenizer):
    shape = SHAPE | dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = seeded(5, lambda: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)))
    return wrap_target("toy", model.float().eval(), tokenizer, 3)


def target_law(target, settings, eos):
    """Probability of every sequence of EMITTED tokens, cut after an EOS token, from a plain forward pass."""
    law = defaultdict(float)
    blocks = all_blocks(VOCABULARY, EMITTED)
    ids = torch.cat([torch.tensor(PROMPT).expand(len(blocks), -1), blocks], dim=1)
    with torch.no_grad():
        p = settings.probabilities(target.model(ids).logits[:, len(PROMPT) - 1 : -1]).double()
    joint = p.gather(-1, blocks.unsqueeze(-1)).squeeze(-1).prod(-1)
    for block, probability in zip(blocks.tolist(), joint.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(block) if token in eos), EMITTED)
        law[tuple(block[:end])] += probability
    return law


def chi_square(counts, law):
    """Upper-tail probability of Pearson's statistic; outcomes expected fewer than five times are pooled."""
    n = sum(counts.values())
    assert all(law.get(outcome, 0.0) > 0 for outcome in counts), "an outcome that the target never gives"
    frequent = [outcome for outcome in law if n * law[outcome] >= 5]
    observed = torch.tensor([counts[outcome] for outcome in frequent] + [0.0], dtype=torch.float64)
    expected = torch.tensor([n * law[outcome] for outcome in frequent] + [0.0], dtype=torch.float64)
    observed[-1], expected[-1] = n - observed.sum(), n - expected.sum()
    keep = expected > 1e-6 * n
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    return float(torch.special.gammaincc((keep.sum() - 1) / 2, statistic / 2))


#: A right loop falls below this in one of a hundred thousand seeds, as far out as 4.4 standard errors of a normal law;
#: the mutants are below 1e-6.
FAIR = 1e-5


def simulated_p_value(toy, make_drafter, mode, branches, settings, eos=(), draws=8000, seed=0, **arguments):
    drafter = make_drafter(toy, num_categories=branches, num_layers=1, block_length=2)
    result = generate(
        toy,
        drafter,
        [PROMPT] * draws,
        settings,
        max_new_tokens=EMITTED,
        mode=mode,
        eos_token_ids=eos,
        generator=generator(seed),
        **arguments,
    )
    counts = Counter(tuple(tokens.tolist()) for tokens in result.tokens)
    return chi_square(counts, target_law(toy, settings, eos)), result


def test_chi_square_knows_a_fair_from_a_loaded_die():
    law = {(i,): 1 / 6 for i in range(6)}
    rolls = torch.randint(6, (6000,), generator=generator(0)).tolist()
    assert chi_square(Counter((i,) for i in rolls), law) > FAIR
    assert chi_square(Counter((min(i + (n % 6 == 0), 5),) for n, i in enumerate(rolls)), law) < 1e-6
    # With one degree of freedom 3.841 is the 5 % point.
    assert math.isclose(float(torch.special.gammaincc(torch.tensor(0.5), torch.tensor(3.841 / 2))), 0.05, abs_tol=1e-3)


@pytest.mark.parametrize(
    ("mode", "branches", "settings", "eos"),
    [
        ("greedy_branch", 1, SamplingSettings(1.0), ()),
        ("greedy_branch", 2, SamplingSettings(0.8, top_k=3), ()),
        ("greedy_branch", 3, SamplingSettings(1.5, top_k=4, top_p=0.9), (2, 4)),
        ("soft", 2, SamplingSettings(1.0, top_k=3), (0,)),
        ("soft", 3, SamplingSettings(1.0), ()),
        ("independent", 1, SamplingSettings(1.2, top_p=0.8), ()),
    ],
    ids=str,
)
def test_simulated_loop_has_the_joint_law_of_the_target(toy, make_drafter, mode, branches, settings, eos):
    p_value, result = simulated_p_value(toy, make_drafter, mode, branches, settings, eos)
    assert p_value > FAIR
    assert 0.05 < result.accepted_length


@pytest.mark.parametrize(("name", "mode"), [case for case in CASES if case[0] != "residual not renormalised"])
def test_simulation_finds_the_mutants(toy, make_drafter, name, mode, monkeypatch):
    # Drawing normalises, so the one mutant left out is harmless here.
    plant(monkeypatch, name)
    draws = 20_000 if name.endswith("soft") else 3000
    p_value, _ = simulated_p_value(toy, make_drafter, mode, 3, SamplingSettings(1.0), draws=draws)
    assert p_value < 1e-6


# -- the edges of one step ----------------------------------------------------------------------


def verify(branches, log_prior, category, p, uniform, seed=0):
    """One verified block of a greedy-branch proposal, p dense (b + 1, V)."""
    made = proposals.greedy_branch_proposal(branches.unsqueeze(0), log_prior.unsqueeze(0), torch.tensor([category]))
    tokens = torch.arange(p.shape[-1]).expand(1, *p.shape)
    uniform = torch.full(made.drafted.shape, uniform)
    return verifier.verify_block(made, tokens, p.unsqueeze(0), generator=generator(seed), uniform=uniform)


def test_token_of_target_probability_zero_is_rejected_even_at_a_uniform_draw_of_zero():
    p = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    for seed in range(50):
        out = verify(torch.tensor([[0, 1]]), torch.zeros(1), 0, p, uniform=0.0, seed=seed)
        assert out.accepted.item() == 0 and out.token.item() != 0


def test_equal_p_and_q_accept_everything_and_add_the_bonus():
    """Branches whose mixture is the target itself: every token is accepted at a uniform number just below one."""
    branches, log_prior = torch.tensor([[0, 1], [0, 2], [1, 1]]), torch.tensor([0.25, 0.25, 0.5]).log()
    # Further below than what rounding takes from p / q.
    highest = 1 - 1e-5
    for category, branch in enumerate(branches.tolist()):
        first = torch.tensor([0.5, 0.5, 0.0])
        second = torch.tensor([0.0, 0.5, 0.5]) if branch[0] == 0 else torch.tensor([0.0, 1.0, 0.0])
        bonus = torch.tensor([0.0, 0.0, 1.0])
        out = verify(branches, log_prior, category, torch.stack([first, second, bonus]), uniform=highest)
        assert out.accepted.item() == 2 and out.token.item() == 2
        assert_close(out.acceptance, 1.0)


def test_branches_that_share_a_prefix_pool_their_prior():
    branches, log_prior = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 0]]), torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    p = torch.full((3, 3), 1 / 3)
    out = verify(branches, log_prior, 0, p, uniform=0.999)
    # 0 has q = 0.6, then 1 has q = 0.3 / 0.6.
    torch.testing.assert_close(out.acceptance, torch.tensor([[(1 / 3) / 0.6, (1 / 3) / 0.5]]))
    assert out.accepted.item() == 0 and out.token.item() in (1, 2)
    identical = torch.tensor([[2, 1]] * 3)
    certain = torch.nn.functional.one_hot(torch.tensor([2, 1, 0]), 3).float()
    out = verify(identical, torch.tensor([0.2, 0.3, 0.5]).log(), 1, certain, uniform=0.999)
    assert out.accepted.item() == 2 and out.token.item() == 0


def test_forced_rejection_at_every_slot_replaces_with_the_excess_of_the_target():
    branches, log_prior = torch.tensor([[0, 1, 2]]), torch.zeros(1)
    made = proposals.greedy_branch_proposal(branches.unsqueeze(0), log_prior.unsqueeze(0), torch.tensor([0]))
    p = torch.full((1, 4, 3), 1 / 3)
    tokens = torch.arange(3).expand(1, 4, 3)
    for slot in range(4):
        uniform = torch.where(torch.arange(3) < slot, 0.0, 0.9).unsqueeze(0)
        for seed in range(20):
            out = verifier.verify_block(made, tokens, p, generator=generator(seed), uniform=uniform)
            assert out.accepted.item() == slot
            assert slot == 3 or out.token.item() != slot
