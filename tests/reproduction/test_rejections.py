"""Where acceptance is lost and why: identities, hand-made cases, loops over toy vocabularies, real drafter passes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import dblast.reproduction.diagnosis.rejections as rejections
from dblast.trajectories import pack
from dblast.drafter import log_category_prior
from dblast.errors import DBlastError
from dblast.reproduction.diagnosis.rejections import (
    CAUSES,
    QUANTITIES,
    branches_and_candidates,
    rejection_split,
    score_rejections,
    summarise_rejections,
)
from dblast.replay import expected_accepted
from dblast.replay import score
from dblast.verifier import greedy_branch_acceptance
from tests.checks import refused
from tests.helpers import (
    all_blocks,
    assert_close,
    assert_greedy,
    category_log_prior,
    generator,
    random_branches,
    random_log_prior,
    random_target,
    target_log_p,
    target_logits,
)

VOCABULARY, LENGTH = 4, 3

# -- the split -----------------------------------------------------------------------------------


def agreeing(branches, tokens, j):
    """The branches that have the first j tokens."""
    return [branch for branch in branches if branch[:j] == tokens[:j]]


def by_hand(branches, prior, candidates, tokens, log_p, eligible=agreeing, tests=CAUSES):
    """The split of one block in words, in plain floats; the rules that the tests bend are parameters.

    Args:
        eligible: which branches' token can be underweighted.
        tests: the causes in the order in which they are tried.
    """
    drawn = [branch for branch, weight in zip(branches, prior, strict=True) if weight > 0]
    slots, reached = [], 1.0
    for j, token in enumerate(tokens):
        alive = [z for z, branch in enumerate(branches) if branch[:j] == tokens[:j]]
        total = sum(prior[z] for z in alive)
        q = sum(prior[z] for z in alive if branches[z][j] == token) / total if total > 0 else 0.0
        accept = min(1.0, q / max(math.exp(log_p[j]), math.exp(-60)))
        holds = {
            "underweighted": any(branch[j] == token for branch in eligible(drawn, tokens, j)),
            "other_branch": any(branch[j] == token for branch in drawn if branch[:j] != tokens[:j]),
            "not_offered": token in candidates[j],
            "unknown": True,
        }
        slot = dict.fromkeys(QUANTITIES, 0.0) | {"reached": reached, "accepted": reached * accept}
        slot[next(cause for cause in tests if holds[cause])] = reached * (1 - accept)
        slots.append(slot)
        reached *= accept
    return slots


def random_case(branches, seed, temperature=1.0, zeros=False):
    """Arguments of the split: every block of a toy target after one anchor; with K > 2 one branch has prior zero."""
    rng = generator(seed)
    blocks = all_blocks(VOCABULARY, LENGTH)
    target = random_target(VOCABULARY, LENGTH, rng, zeros)
    log_prior = category_log_prior(random_log_prior(branches, rng), temperature)
    if branches > 2:
        log_prior = log_prior.masked_fill(torch.arange(branches) == seed % branches, -torch.inf)
        log_prior = log_prior.log_softmax(-1) if temperature else category_log_prior(log_prior, 0)
    candidates = torch.rand(LENGTH, VOCABULARY, generator=rng).topk(2).indices
    return dict(
        branches=random_branches(branches, LENGTH, VOCABULARY, rng).expand(len(blocks), -1, -1),
        log_prior=log_prior.expand(len(blocks), -1),
        candidates=candidates.expand(len(blocks), -1, -1),
        tokens=blocks,
        log_p=target_log_p(target, blocks),
    )


def expected_split(case, **rules):
    """The split of every block of a case by hand, each (N, b)."""
    rows = zip(
        case["branches"].tolist(),
        case["log_prior"].exp().tolist(),
        case["candidates"].tolist(),
        case["tokens"].tolist(),
        case["log_p"].tolist(),
        strict=True,
    )
    slots = [by_hand(*row, **rules) for row in rows]
    return {name: torch.tensor([[slot[name] for slot in row] for row in slots]) for name in QUANTITIES}


each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(random_case(k, seed, t, zeros), id=f"K={k} Z_T={t} seed={seed}{' zeros' * zeros}")
        for k in (1, 2, 3, 4)
        for t in (0.0, 0.6, 1.5)
        for seed in range(3)
        for zeros in (False, True)
    ],
)


@each_case
def test_split_is_that_of_a_loop_over_slots_and_branches(case):
    actual, expected = rejection_split(**case), expected_split(case)
    assert list(actual) == list(QUANTITIES)
    for name in QUANTITIES:
        assert_close(actual[name], expected[name], tolerance=1e-6)


def test_random_cases_hold_every_cause():
    totals = {name: 0.0 for name in QUANTITIES}
    for seed in range(3):
        for name, value in rejection_split(**random_case(4, seed)).items():
            totals[name] += float(value.sum())
    assert min(totals.values()) > 1


@each_case
def test_identities(case):
    split = rejection_split(**case)
    assert (split["reached"][:, 0] == 1).all()
    assert (split["reached"][:, 1:] == split["accepted"][:, :-1]).all()
    assert_close(split["accepted"] + sum(split[cause] for cause in CAUSES), split["reached"], tolerance=1e-6)
    assert (torch.stack([split[cause] > 0 for cause in CAUSES]).sum(0) <= 1).all()
    assert all((value >= 0).all() and (value <= 1).all() for value in split.values())
    acceptance = greedy_branch_acceptance(*(case[name] for name in ("branches", "log_prior", "tokens", "log_p")))
    assert_close(split["accepted"].sum(-1), expected_accepted(acceptance), tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_result_is_finite_float32_whatever_the_input(dtype):
    case = random_case(3, seed=1, zeros=True)
    case |= {name: case[name].to(dtype) for name in ("log_prior", "log_p")}
    case["log_p"] = torch.full_like(case["log_p"], -torch.inf)
    for value in rejection_split(**case).values():
        assert value.dtype == torch.float32 and value.isfinite().all()


@pytest.mark.parametrize("copies", [2, 4])
def test_equal_branches_are_one_branch(copies):
    case = random_case(1, seed=4)
    blocks = len(case["tokens"])
    prior = random_log_prior(copies, generator(5)).float()
    several = case | {
        "branches": case["branches"].repeat(1, copies, 1),
        "log_prior": prior.expand(blocks, -1),
    }
    for name, value in rejection_split(**several).items():
        assert_close(value, rejection_split(**case)[name], tolerance=1e-6)


def test_slots_past_the_end_are_zero():
    case = random_case(3, seed=2)
    lengths = torch.arange(len(case["tokens"])) % (LENGTH + 1)
    valid = torch.arange(LENGTH) < lengths.unsqueeze(-1)
    whole, cut = rejection_split(**case), rejection_split(**case, valid=valid)
    for name in QUANTITIES:
        assert (cut[name][valid] == whole[name][valid]).all()
        assert (cut[name][~valid] == 0).all()


#: Two branches over tokens that are letters here, with priors 1/4 and 3/4, and the two likeliest tokens of each slot.
BRANCHES = ["abc", "dbe"]
PRIOR = [0.25, 0.75]
CANDIDATES = ["df", "bf", "ec"]

#: What is emitted and its probabilities; acceptance by slot up to the first loss, and that loss.
BY_CAUSE = [
    # Branch 1 offers a, with q = 1/4 of the 1/2 that the target gives it; the rest of the block is its own.
    pytest.param("abc", [0.5, 0.5, 0.5], [0.5, 0.5, 0.5], (0, "underweighted", 0.5), id="underweighted"),
    # Only branch 1 agrees with "ab"; e is what branch 2 has at slot 3.
    pytest.param("abe", [0.25, 0.5, 0.5], [1, 1, 0], (2, "other_branch", 1.0), id="other branch"),
    # At slot 2 both branches have b; f is among the candidates there, c is not.
    pytest.param("dfc", [0.5, 0.5, 0.5], [1, 0, 0], (1, "not_offered", 1.0), id="not offered"),
    pytest.param("dcc", [0.5, 0.5, 0.5], [1, 0, 0], (1, "unknown", 1.0), id="unknown"),
    # Nothing at slot 1: no branch offers f, which is a candidate; g is not.
    pytest.param("fbc", [0.5, 0.5, 0.5], [0, 0, 0], (0, "not_offered", 1.0), id="not offered at once"),
    pytest.param("gbc", [0.5, 0.5, 0.5], [0, 0, 0], (0, "unknown", 1.0), id="unknown at once"),
    pytest.param("dbe", [0.5, 0.5, 0.5], [1, 1, 1], None, id="all accepted"),
]


def letters(*words):
    return torch.tensor([[ord(letter) - ord("a") for letter in word] for word in words])


def lettered(tokens, p, branches=BRANCHES, prior=PRIOR, candidates=CANDIDATES):
    return dict(
        branches=letters(*branches).unsqueeze(0),
        log_prior=torch.tensor([prior]).log(),
        candidates=letters(*candidates).unsqueeze(0),
        tokens=letters(tokens),
        log_p=torch.tensor([p]).log(),
    )


@pytest.mark.parametrize(("tokens", "p", "accepted", "loss"), BY_CAUSE)
def test_one_hand_made_block_for_every_cause(tokens, p, accepted, loss):
    split = rejection_split(**lettered(tokens, p))
    assert_close(split["accepted"][0], accepted)
    expected = {cause: [0.0] * 3 for cause in CAUSES}
    if loss is not None:
        slot, cause, lost = loss
        expected[cause][slot] = lost
    for cause in CAUSES:
        assert_close(split[cause][0], expected[cause])


def test_branch_that_the_prefix_contradicts_is_not_underweighted():
    """Slot 3 of "abe": a rule that asks all branches for the token, not the agreeing ones, names another cause."""
    case = lettered("abe", [0.25, 0.5, 0.5])
    assert_close(rejection_split(**case)["other_branch"][0], [0.0, 0.0, 1.0])
    assert_close(expected_split(case)["other_branch"][0], [0.0, 0.0, 1.0])
    faulty = expected_split(case, eligible=lambda branches, tokens, j: branches)
    assert_close(faulty["underweighted"][0], [0.0, 0.0, 1.0])
    assert_close(faulty["other_branch"][0], [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("tokens", "p", "loss"),
    [("abe", [0.25, 0.5, 0.5], (2, "other_branch")), ("dbe", [1.0, 0.5, 0.5], (0, "underweighted"))],
)
def test_candidates_are_asked_last(tokens, p, loss):
    """Both lost tokens are candidates too: asked first, the marginal would claim them."""
    case = lettered(tokens, p)
    slot, cause = loss
    faulty = expected_split(case, tests=("not_offered", "underweighted", "other_branch", "unknown"))
    assert float(rejection_split(**case)[cause][0, slot]) > 0.2
    assert float(faulty[cause][0, slot]) == 0 and float(faulty["not_offered"][0, slot]) > 0.2


# -- candidates ----------------------------------------------------------------------------------


def random_hidden(drafter, blocks=5, seed=0):
    k, b = max(1, drafter.config.num_categories), drafter.config.block_length
    rng = generator(seed)
    hidden = torch.randn(blocks, k, b, drafter.config.hidden_size, generator=rng)
    return hidden, torch.randn(blocks, k, generator=rng).log_softmax(-1)


def plain_marginal(drafter, target, hidden, log_prior):
    """The marginal over all target tokens, one block and slot at a time, from the target's own head; (N, b, V)."""
    head = target.model.get_output_embeddings().weight.detach().double()
    size = drafter.config.draft_vocab_size
    allowed = drafter.draft_token_ids.tolist() if size else range(drafter.config.vocab_size)
    blocks, branches, b, _ = hidden.shape
    marginal = torch.zeros(blocks, b, len(head), dtype=torch.float64)
    for n in range(blocks):
        for i in range(b):
            for z in range(branches):
                logits = [float(head[v] @ hidden[n, z, i].double()) for v in allowed]
                total = sum(math.exp(x) for x in logits)
                for v, x in zip(allowed, logits, strict=True):
                    marginal[n, i, v] += log_prior[n, z].double().exp() * math.exp(x) / total
    return marginal


def assert_likeliest(candidates, marginal):
    """Distinct tokens with the largest probabilities, largest first, up to ties within rounding."""
    assert all(len(set(row)) == len(row) for row in candidates.flatten(0, 1).tolist())
    assert_close(marginal.gather(-1, candidates), marginal.topk(candidates.shape[-1]).values)


each_vocabulary = pytest.mark.parametrize("draft_vocab_size", [0, 12], ids=["whole vocabulary", "draft vocabulary"])


@each_vocabulary
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("k", [1, 4, 12])
def test_candidates_are_the_likeliest_of_the_plain_mixture(qwen3, make_drafter, draft_vocab_size, branches, k):
    drafter = make_drafter(qwen3, num_categories=branches, draft_vocab_size=draft_vocab_size)
    hidden, log_prior = random_hidden(drafter)
    greedy, actual = branches_and_candidates(drafter, hidden, log_prior, k)
    assert_greedy(greedy, target_logits(drafter, hidden))
    assert actual.shape == (*hidden.shape[:1], hidden.shape[2], k)
    assert_likeliest(actual, plain_marginal(drafter, qwen3, hidden, log_prior))
    if draft_vocab_size:
        assert set(actual.flatten().tolist()) <= set(drafter.draft_token_ids.tolist())


def test_averaging_logits_instead_of_probabilities_differs(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=3)
    hidden, log_prior = random_hidden(drafter)
    faulty = (log_prior.exp()[:, :, None, None] * drafter.logits(hidden)).sum(1).topk(4).indices
    assert (branches_and_candidates(drafter, hidden, log_prior, 4)[1] != faulty).any()


@each_vocabulary
@pytest.mark.parametrize("limit", [1, 500, 1000])
def test_candidates_in_chunks_are_the_same(llama, make_drafter, monkeypatch, draft_vocab_size, limit):
    drafter = make_drafter(llama, num_categories=2, draft_vocab_size=draft_vocab_size)
    hidden, log_prior = random_hidden(drafter, blocks=7)
    marginal = plain_marginal(drafter, llama, hidden, log_prior)
    sizes, logits = [], drafter.logits
    monkeypatch.setattr(drafter, "logits", lambda part: sizes.append(len(part)) or logits(part))
    monkeypatch.setattr(rejections, "LOGITS_AT_ONCE", limit)
    greedy, candidates = branches_and_candidates(drafter, hidden, log_prior, 3)
    per_block = 2 * 3 * (draft_vocab_size or drafter.config.vocab_size)
    assert sum(sizes) == 7 and max(sizes) == min(7, max(1, limit // per_block))
    monkeypatch.undo()
    assert_greedy(greedy, target_logits(drafter, hidden))
    assert_likeliest(candidates, marginal)


@pytest.mark.parametrize(("k", "words"), [(0, ["at least 1"]), (-1, ["at least 1"]), (13, ["12 tokens", "13"])])
def test_impossible_numbers_of_candidates_are_refused(llama, make_drafter, make_trajectory, k, words):
    drafter = make_drafter(llama, draft_vocab_size=12)
    with refused("number of candidates k", *words):
        branches_and_candidates(drafter, *random_hidden(drafter), k)
    with pytest.raises(DBlastError, match="number of candidates k"):
        score_rejections(drafter, [make_trajectory()], 1.0, k=k)


# -- drafter passes ------------------------------------------------------------------------------


@pytest.fixture
def trajectories(make_trajectory):
    """Responses that a drafter of few tokens often hits; one shorter than a block of 3, one exactly as long."""
    rows = []
    for seed, length in enumerate((40, 30, 3, 2)):
        trajectory = make_trajectory(prompt=3 + seed, response=length, seed=seed)
        tokens = torch.randint(4, 8, (length,), generator=generator(seed))
        rows.append(replace(trajectory, response_ids=tokens))
    return rows


@pytest.fixture
def few_tokens(llama, make_drafter):
    """Builds a drafter that proposes tokens 4 to 8 only."""

    def build(num_categories):
        drafter = make_drafter(llama, num_categories=num_categories, draft_vocab_size=5)
        drafter.set_draft_vocabulary(torch.arange(4, 9))
        return drafter.attach(llama.model)

    return build


@pytest.mark.parametrize("branches", [0, 1, 2, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.4])
def test_accepted_tokens_are_those_of_scoring(few_tokens, trajectories, branches, temperature):
    drafter = few_tokens(branches)
    rows = score_rejections(drafter, trajectories, temperature, k=2)
    scores = score(drafter, trajectories, [temperature])
    assert list(rows) == ["prompt_id", "task", "position", "anchors", *QUANTITIES]
    assert rows.position.tolist() == [1, 2, 3] * len(trajectories)
    sums = rows.groupby("prompt_id").agg({"accepted": "sum", "anchors": "max"}).loc[scores.prompt_id]
    assert sums.anchors.tolist() == scores.anchors.tolist() == [38, 28, 1, 0]
    assert_close(sums.accepted.tolist(), scores.anchor_accepted.tolist(), tolerance=1e-5)
    assert scores.anchor_accepted.sum() > 1
    assert_close(rows[rows.position == 1].reached.tolist(), scores.anchors.tolist())
    assert_close(rows[["accepted", *CAUSES]].sum(axis=1).tolist(), rows.reached.tolist(), tolerance=1e-6)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("branches", [1, 3])
def test_rows_are_the_sum_over_anchors_drafted_one_by_one(llama, few_tokens, trajectories, branches, every):
    drafter, temperature = few_tokens(branches), 0.7
    rows = score_rejections(drafter, trajectories, temperature, k=2, every=every).set_index(["prompt_id", "position"])
    for trajectory in trajectories:
        total = {name: np.zeros(3) for name in QUANTITIES}
        anchors = range(0, len(trajectory.response_ids) - 2, every)
        for anchor in anchors:
            batch = pack([trajectory], [torch.tensor([anchor])], 3)
            with torch.no_grad():
                out = batch.run(drafter)
            prior = log_category_prior(out.prior_logits, temperature)
            slots = by_hand(
                drafter.greedy_tokens(out.branch_hidden)[0].tolist(),
                prior[0].exp().tolist(),
                plain_marginal(drafter, llama, out.branch_hidden, prior).topk(2).indices[0].tolist(),
                trajectory.response_ids[anchor : anchor + 3].tolist(),
                trajectory.log_p[anchor : anchor + 3].tolist(),
            )
            for name in QUANTITIES:
                total[name] += [slot[name] for slot in slots]
        found = rows.loc[trajectory.prompt_id]
        assert found.anchors.tolist() == [len(anchors)] * 3
        for name in QUANTITIES:
            assert_close(found[name].tolist(), total[name], tolerance=1e-5)


def test_a_step_between_anchors_below_one_is_refused(few_tokens, trajectories):
    with pytest.raises(DBlastError, match="every"):
        score_rejections(few_tokens(1), trajectories, 1.0, every=0)


def test_random_drafter_loses_tokens_for_every_cause(few_tokens, trajectories):
    """The comparisons above are about something."""
    rows = score_rejections(few_tokens(3), trajectories, 0.7, k=2)
    assert (rows[[*CAUSES]].sum() > 0.1).all()


def test_tokens_outside_the_draft_vocabulary_are_unknown(few_tokens, make_trajectory):
    base = make_trajectory(response=6)
    outside = replace(base, response_ids=torch.full((6,), 20))
    rows = score_rejections(few_tokens(2), [outside], 1.0, k=5)
    assert_close(rows.unknown.tolist(), [4.0, 0.0, 0.0])
    inside = replace(base, response_ids=torch.full((6,), 5))
    assert (score_rejections(few_tokens(2), [inside], 1.0, k=5).unknown == 0).all()


def test_more_candidates_move_losses_from_unknown_to_not_offered(few_tokens, trajectories):
    few, more = (score_rejections(few_tokens(2), trajectories, 1.0, k=k) for k in (1, 4))
    fixed = ["reached", "accepted", "underweighted", "other_branch"]
    assert_close(few[fixed].values.tolist(), more[fixed].values.tolist(), 1e-4)
    assert (more.unknown <= few.unknown + 1e-4).all() and more.unknown.sum() < few.unknown.sum()


def test_category_temperature_has_no_effect_at_one_branch(few_tokens, trajectories):
    drafter = few_tokens(1)
    expected = score_rejections(drafter, trajectories, 1.0)
    for temperature in (0.0, 3.0, float("nan")):
        pd.testing.assert_frame_equal(score_rejections(drafter, trajectories, temperature), expected)


@pytest.mark.parametrize("temperature", [-0.5, float("nan")])
def test_impossible_category_temperature_is_refused(few_tokens, trajectories, temperature):
    with refused("category temperature", str(temperature)):
        score_rejections(few_tokens(2), trajectories, temperature)


def test_half_precision_keeps_the_identities(few_tokens, trajectories):
    rows = score_rejections(few_tokens(3), trajectories, 1.0, precision=torch.bfloat16)
    assert_close(rows[["accepted", *CAUSES]].sum(axis=1).tolist(), rows.reached.tolist(), tolerance=1e-6)
    assert rows.accepted.sum() > 1


def test_nothing_to_score_has_the_columns_all_the_same(few_tokens):
    rows = score_rejections(few_tokens(2), [], 1.0)
    assert rows.empty and list(rows) == ["prompt_id", "task", "position", "anchors", *QUANTITIES]


# -- averages ------------------------------------------------------------------------------------


def rejection_rows(reached, accepted, *, anchors=10, task="a", position=1, **columns):
    """One row per prompt; what is lost was unknown."""
    n = len(reached)
    frame = pd.DataFrame({"prompt_id": [f"p{i}" for i in range(n)], "task": task, "position": position})
    frame = frame.assign(anchors=anchors, reached=np.array(reached, float), accepted=np.array(accepted, float))
    frame = frame.assign(underweighted=0.0, other_branch=0.0, not_offered=0.0)
    return frame.assign(unknown=frame.reached - frame.accepted, **columns)


def test_averages_are_tokens_per_anchor_and_ratios_of_sums():
    rows = rejection_rows([8, 4], [4, 3], anchors=[10, 30], variant="x")
    (row,) = summarise_rejections(rows, ["variant"]).to_dict("records")
    assert list(row) == ["variant", "position", *QUANTITIES, "conditional_acceptance", "standard_error", "n"]
    assert row["variant"] == "x" and row["position"] == 1 and row["n"] == 2
    assert_close([row["reached"], row["accepted"], row["unknown"]], [12 / 40, 7 / 40, 5 / 40], tolerance=1e-12)
    assert_close(row["conditional_acceptance"], 7 / 12, tolerance=1e-12)
    # Influences (accepted - ratio * reached) / 6 are -1/9 and 1/9: their deviation sqrt(2)/9 over sqrt(2).
    assert_close(row["standard_error"], 1 / 9, tolerance=1e-12)


def test_every_group_and_slot_has_its_row():
    parts = [
        rejection_rows([10, 10], [v, v + 1], task=task, position=position, K=k, category_temperature=t)
        for v, (task, position, (k, t)) in enumerate(
            (task, position, variant)
            for task in ("a", "b")
            for position in (1, 2)
            for variant in ((1, float("nan")), (4, 0.6))
        )
    ]
    table = summarise_rejections(pd.concat(parts), ["task", "K", "category_temperature"])
    assert len(table) == 8 and (table.n == 2).all()
    assert table.category_temperature.isna().sum() == 4
    assert table[(table.task == "b") & (table.position == 2)].accepted.tolist() == [0.65, 0.75]
    pooled = summarise_rejections(pd.concat(parts), [])
    assert pooled.position.tolist() == [1, 2] and (pooled.n == 4).all()


def test_several_trajectories_of_a_prompt_are_one_unit():
    rows = rejection_rows([8, 4, 9], [4, 3, 2])
    once, twice = (summarise_rejections(part, []) for part in (rows, pd.concat([rows, rows])))
    pd.testing.assert_frame_equal(once, twice)


def test_prompts_of_the_same_name_in_two_tasks_are_two():
    rows = pd.concat([rejection_rows([8], [4], task=task) for task in ("a", "b")])
    assert summarise_rejections(rows, []).n.tolist() == [2]


def test_standard_error_agrees_with_a_bootstrap_over_prompts():
    rng = np.random.default_rng(0)
    reached = rng.uniform(2, 30, 200)
    accepted = reached * rng.uniform(0.3, 0.9, 200)
    (error,) = summarise_rejections(rejection_rows(reached, accepted), []).standard_error
    draws = rng.integers(200, size=(4000, 200))
    assert error == pytest.approx((accepted[draws].sum(1) / reached[draws].sum(1)).std(ddof=1), rel=0.1)


def test_trajectories_without_anchors_do_not_count():
    rows = rejection_rows([8, 4, 9], [4, 3, 2])
    short = rejection_rows([0, 0, 0, 0], [0, 0, 0, 0], anchors=0)
    pd.testing.assert_frame_equal(summarise_rejections(pd.concat([rows, short]), []), summarise_rejections(rows, []))


@pytest.mark.filterwarnings("error")
def test_slot_that_is_never_reached_has_no_conditional_acceptance():
    (row,) = summarise_rejections(rejection_rows([0, 0], [0, 0]), []).to_dict("records")
    assert math.isnan(row["conditional_acceptance"]) and math.isnan(row["standard_error"])
    assert row["reached"] == 0 and row["n"] == 2


def test_rows_that_cannot_be_averaged_are_refused():
    rows = rejection_rows([8, 4], [4, 3])
    with refused("no column variant"):
        summarise_rejections(rows, ["variant"])
    with refused("no trajectory has an anchor with a full block"):
        summarise_rejections(rows.assign(anchors=0), [])
