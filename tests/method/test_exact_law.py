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
    category_log_prior,
    generator,
    random_branches,
    random_log_prior,
    random_position_log_q,
    random_target,
    sequence_probability,
)

# -- mutants -----------------------------------------------------------------------------------


def softmaxed_residual(p, q, weight=1.0):
    return (weight * p - q).clamp(min=0).softmax(-1)


def residual_not_normalised(p, q, weight=1.0):
    return (weight * p - q).clamp(min=0)


def redraw_from_the_target(p, q, weight=1.0):
    return p


def residual_without_weight(p, q, weight=1.0, original=verifier.residual_distribution):
    return original(p, q)


def weights_that_never_recover(p_drafted, q_drafted):
    """The product of the token ratios, each clipped: token verification's."""
    ratios = verifier.accept_ratio(p_drafted, q_drafted).cumprod(-1)
    return torch.nn.functional.pad(ratios, (1, 0), value=1.0)


def weights_without_clipping(p_drafted, q_drafted):
    ratios = (p_drafted / q_drafted).cumprod(-1)
    return torch.nn.functional.pad(ratios, (1, 0), value=1.0)


def keep_with_the_weight(weight, p, q):
    return weight


def accept_with_p(p_x, q_x):
    return p_x


def q_of_the_drawn_branch_greedy(branch_tokens, log_prior, category, original=proposals.greedy_branch_proposal):
    proposal = original(branch_tokens, log_prior, category)
    return replace(proposal, q_drafted=torch.ones_like(proposal.q_drafted))


def q_of_the_drawn_branch_soft(position_log_q, log_prior, category, column, *ids, original=proposals.soft_proposal):
    proposal = original(position_log_q, log_prior, category, column, *ids)
    chosen = position_log_q[torch.arange(len(category)), category]
    return replace(proposal, q_drafted=chosen.gather(-1, column.unsqueeze(-1)).squeeze(-1).exp())


def residual_of_the_drawn_branch(branch_tokens, log_prior, category, original=proposals.greedy_branch_proposal):
    """Acceptance from the mixture; the residual as if the drafted branch were the only one."""
    proposal = original(branch_tokens, log_prior, category)
    drawn = torch.nn.functional.one_hot(category, log_prior.shape[1]).to(log_prior.dtype).unsqueeze(-1)
    return replace(proposal, posterior=drawn.expand_as(proposal.posterior))


BOTH = ("greedy_branch", "soft")
#: name -> (module, function, replacement, modes in which it is wrong)
MUTANTS = {
    "residual softmaxed": (verifier, "residual_distribution", softmaxed_residual, BOTH),
    "residual not renormalised": (verifier, "residual_distribution", residual_not_normalised, BOTH),
    "redrawn freely on a mismatch": (verifier, "residual_distribution", redraw_from_the_target, BOTH),
    "accepted with p": (verifier, "accept_ratio", accept_with_p, BOTH),
    "q of the drawn branch": (proposals, "greedy_branch_proposal", q_of_the_drawn_branch_greedy, ("greedy_branch",)),
    "residual of the drawn branch": (
        proposals, "greedy_branch_proposal", residual_of_the_drawn_branch, ("greedy_branch",)
    ),
    "q of the drawn branch, soft": (proposals, "soft_proposal", q_of_the_drawn_branch_soft, ("soft",)),
}
#: The same for block verification.
BLOCK_MUTANTS = {
    "residual without weight": (verifier, "residual_distribution", residual_without_weight),
    "residual softmaxed": (verifier, "residual_distribution", softmaxed_residual),
    "redrawn freely": (verifier, "residual_distribution", redraw_from_the_target),
    "weights not clipped": (verifier, "block_weights", weights_without_clipping),
    "weights that never recover": (verifier, "block_weights", weights_that_never_recover),
    "kept with the weight": (verifier, "block_acceptance", keep_with_the_weight),
}
CASES = [(name, mode) for name, (*_, modes) in MUTANTS.items() for mode in modes]


def plant(monkeypatch, name):
    module, function, mutant, _ = MUTANTS[name]
    monkeypatch.setattr(module, function, mutant)


# -- the exact law ------------------------------------------------------------------------------


class ToyDrafter:
    """Unrelated random float64 branches, prior (at Z_T) and marginals after every prefix; ``draft`` is (T_d, k_d)."""

    def __init__(self, branches, length, vocabulary, depth, seed, draft=(1.0, 0), temperature=1.0):
        rng = generator(seed)
        self.length, self.vocabulary, self.draft = length, vocabulary, draft
        self.parts = {
            prefix: (
                random_branches(branches, length, vocabulary, rng),
                category_log_prior(random_log_prior(branches, rng), temperature),
                random_position_log_q(branches, length, vocabulary, rng),
            )
            for n in range(depth)
            for prefix in itertools.product(range(vocabulary), repeat=n)
        }

    def proposals(self, prefix, length, mode):
        """Every proposal that can be made, as one batch, and its probability."""
        tokens, log_prior, log_q = self.parts[prefix]
        log_q = proposals.branch_log_q(log_q, *self.draft)
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


def stop_probabilities(made, tokens, p, verification):
    """P(i drafted tokens are kept), i = 0..d, and the factor of p in the residual there, (N, d + 1) each."""
    p_x = verifier.probability_on_support(tokens[:, :-1], p[:, :-1], made.drafted)
    if verification == "token":
        acceptance = verifier.accept_ratio(p_x, made.q_drafted)
        reached = torch.cat([torch.ones_like(acceptance[:, :1]), acceptance], dim=-1).cumprod(-1)
        refused = torch.cat([1 - acceptance, torch.ones_like(acceptance[:, :1])], dim=-1)
        return reached * refused, torch.ones_like(reached)
    weight = verifier.block_weights(p_x, made.q_drafted)
    slots = [torch.full((len(p),), i) for i in range(p.shape[1])]
    q = torch.stack([made.q(slot, tokens[:, i]) for i, slot in enumerate(slots)], dim=1)
    kept = verifier.block_acceptance(weight, p, q)
    kept = torch.cat([torch.ones_like(kept[:, :1]), kept[:, 1:]], dim=-1)
    later = (1 - kept[:, 1:]).flip(-1).cumprod(-1).flip(-1)
    return kept * torch.cat([later, torch.ones_like(later[:, :1])], dim=-1), weight


def step_law(target, drafter, prefix, room, mode, verification="token"):
    """Probability of everything that one pass can emit when ``room`` tokens are left, as the loop does it."""
    length = min(drafter.length, room - 1)
    law = defaultdict(float)
    if length == 0:
        return {(v,): p for v, p in enumerate(target[prefix])}
    made, chance = drafter.proposals(prefix, length, mode)
    possible = [i for i, weight in enumerate(chance.tolist()) if weight > 0]
    blocks = [tuple(block) for block in made.drafted.tolist()]
    pieces = [support(target, [prefix + block[:i] for block in blocks]) for i in range(length + 1)]
    width = max(tokens.shape[1] for tokens, _ in pieces)
    padded = [[torch.nn.functional.pad(half, (0, width - half.shape[1])) for half in piece] for piece in pieces]
    tokens, p = (torch.stack(halves, dim=1) for halves in zip(*padded, strict=True))
    stop, weight = stop_probabilities(made, tokens, p, verification)
    for i in range(length + 1):
        q = made.q(torch.full((len(blocks),), i), tokens[:, i])
        shares = verifier.residual_distribution(p[:, i], q, weight[:, i, None])
        for n in possible:
            probability = float(chance[n] * stop[n, i])
            if probability:
                for v, share in zip(tokens[n, i].tolist(), shares[n].tolist(), strict=True):
                    law[(*blocks[n][:i], v)] += probability * share
    return law


def emitted_law(target, drafter, prefix, room, mode, known, verification="token"):
    """Joint law of the next ``room`` tokens under the whole loop."""
    if room == 0:
        return {(): 1.0}
    if prefix not in known:
        law = defaultdict(float)
        for tokens, probability in step_law(target, drafter, prefix, room, mode, verification).items():
            if probability:
                left = room - len(tokens)
                rest = emitted_law(target, drafter, prefix + tokens, left, mode, known, verification)
                for more, share in rest.items():
                    law[tokens + more] += probability * share
        known[prefix] = law
    return known[prefix]


def largest_error(vocabulary, branches, length, emitted, mode, seed, zeros, verification="token", **drafting):
    target = random_target(vocabulary, emitted, generator(seed), zeros)
    drafter = ToyDrafter(branches, length, vocabulary, emitted, seed + 1, **drafting)
    law = emitted_law(target, drafter, (), emitted, mode, {}, verification)
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


@pytest.mark.parametrize("zeros", [False, True], ids=["p > 0", "p with zeros"])
@pytest.mark.parametrize(("mode", "branches"), [*itertools.product(("greedy_branch", "soft"), (1, 2, 3))])
@pytest.mark.parametrize(("vocabulary", "length", "emitted"), [(3, 2, 4), (4, 2, 3), (5, 1, 3), (3, 3, 4)])
def test_joint_law_with_block_verification_is_that_of_the_target(vocabulary, length, emitted, mode, branches, zeros):
    for seed in range(2):
        assert largest_error(vocabulary, branches, length, emitted, mode, 10 * seed, zeros, "block") < 1e-9


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("draft", [(0.1, 0), (0.5, 0), (3.0, 0), (1.0, 1), (0.7, 2), (2.0, 2)], ids=str)
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_joint_law_at_any_draft_temperature_and_top_k_is_that_of_the_target(branches, draft, verification):
    for zeros in (False, True):
        assert largest_error(3, branches, 2, 4, "soft", 5, zeros, verification, draft=draft) < 1e-9


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("mode", BOTH)
def test_joint_law_at_any_category_temperature_is_that_of_the_target(mode, temperature, verification):
    for zeros in (False, True):
        assert largest_error(3, 4, 2, 4, mode, 5, zeros, verification, temperature=temperature) < 1e-9


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("name", BLOCK_MUTANTS)
def test_mutants_of_block_verification_break_the_joint_law(name, mode, monkeypatch):
    monkeypatch.setattr(*BLOCK_MUTANTS[name])
    assert max(largest_error(3, 3, 3, 4, mode, seed, False, "block") for seed in range(6)) > 5e-4


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_block_verification_keeps_no_fewer_tokens(mode, branches):
    """Expected accepted tokens of one step; strictly more for sampled drafts of several tokens."""
    gains = []
    for seed in range(4):
        target = random_target(3, 4, generator(seed))
        drafter = ToyDrafter(branches, 3, 3, 1, seed + 1)
        expected = [
            sum((len(tokens) - 1) * share for tokens, share in step_law(target, drafter, (), 4, mode, how).items())
            for how in ("token", "block")
        ]
        gains.append(expected[1] - expected[0])
    assert min(gains) > -1e-12
    assert max(gains) > 1e-3 or (mode, branches) == ("greedy_branch", 1)


class Fixed:
    """A target and a drafter that say the same after every prefix."""

    def __init__(self, q, length):
        self.log_q, self.length, self.vocabulary = torch.tensor(q, dtype=torch.float64).log(), length, len(q)

    def proposals(self, prefix, length, mode):
        blocks = all_blocks(self.vocabulary, length)
        many = len(blocks)
        log_q = self.log_q.expand(many, 1, length, -1)
        prior = torch.zeros(many, 1, dtype=torch.float64)
        made = proposals.soft_proposal(log_q, prior, torch.zeros(many, dtype=torch.long), blocks)
        return made, self.log_q[blocks].sum(-1).exp()


def test_the_published_example_of_block_verification():
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: 10/9 accepted by token, 11/9 by block (arXiv 2403.10444)."""
    target = {prefix: [1 / 3, 2 / 3] for n in range(3) for prefix in itertools.product(range(2), repeat=n)}
    for how, expected in (("token", 10 / 9), ("block", 11 / 9)):
        law = step_law(target, Fixed([2 / 3, 1 / 3], 2), (), 3, "soft", how)
        assert abs(sum((len(tokens) - 1) * share for tokens, share in law.items()) - expected) < 1e-12
        assert abs(sum(law.values()) - 1) < 1e-12


def test_the_published_example_through_verify_block():
    n = 40_000
    log_q = torch.tensor([2 / 3, 1 / 3]).log().expand(n, 1, 2, -1)
    drawn = torch.multinomial(log_q[:, 0].exp().flatten(0, 1), 1, generator=generator(0)).view(n, 2)
    made = proposals.soft_proposal(log_q, torch.zeros(n, 1), torch.zeros(n, dtype=torch.long), drawn)
    tokens, p = torch.arange(2).expand(n, 3, -1), torch.tensor([1 / 3, 2 / 3]).expand(n, 3, -1)
    for how, expected in (("token", 10 / 9), ("block", 11 / 9)):
        out = verifier.verify_block(made, tokens, p, generator=generator(1), verification=how)
        accepted = out.accepted.double()
        assert abs(float(accepted.mean()) - expected) < 4.5 * float(accepted.std()) / n**0.5
        first = torch.where(out.accepted > 0, drawn[:, 0], out.token)
        assert abs(float(first.double().mean()) - 2 / 3) < 4.5 * (2 / 9 / n) ** 0.5


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
    ("mode", "branches", "settings", "eos", "drafting"),
    [
        ("greedy_branch", 1, SamplingSettings(1.0), (), {}),
        ("greedy_branch", 2, SamplingSettings(0.8, top_k=3), (), {}),
        ("greedy_branch", 3, SamplingSettings(1.5, top_k=4, top_p=0.9), (2, 4), {}),
        ("soft", 2, SamplingSettings(1.0, top_k=3), (0,), {}),
        ("soft", 3, SamplingSettings(1.0), (), {}),
        ("independent", 1, SamplingSettings(1.2, top_p=0.8), (), {}),
        # Beyond the paper.
        ("soft", 3, SamplingSettings(1.0), (2,), {"draft_temperature": 0.4}),
        ("soft", 2, SamplingSettings(0.8, top_k=4), (), {"draft_temperature": 2.0, "draft_top_k": 2}),
        ("independent", 1, SamplingSettings(1.0), (), {"draft_temperature": 0.5, "draft_top_k": 3}),
        ("greedy_branch", 3, SamplingSettings(1.0), (0,), {"verification": "block"}),
        ("soft", 3, SamplingSettings(1.0, top_k=4), (), {"verification": "block"}),
        ("soft", 2, SamplingSettings(1.0), (1,), {"verification": "block", "draft_temperature": 0.6, "draft_top_k": 3}),
    ],
    ids=str,
)
def test_simulated_loop_has_the_joint_law_of_the_target(toy, make_drafter, mode, branches, settings, eos, drafting):
    p_value, result = simulated_p_value(toy, make_drafter, mode, branches, settings, eos, **drafting)
    assert p_value > FAIR
    assert 0.05 < result.accepted_length


@pytest.mark.parametrize("name", ["residual softmaxed", "weights not clipped", "kept with the weight"])
def test_simulation_finds_the_mutants_of_block_verification(toy, make_drafter, name, monkeypatch):
    monkeypatch.setattr(*BLOCK_MUTANTS[name])
    p_value, _ = simulated_p_value(
        toy, make_drafter, "soft", 3, SamplingSettings(1.0), draws=20000, verification="block"
    )
    assert p_value < 1e-6


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
