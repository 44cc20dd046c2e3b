"""Sampled continuations of shared prefixes, and the oracle proposals made from them."""

import itertools

import pandas as pd
import pytest
import torch

from dblast.reproduction.diagnosis.continuations import (
    Continuations,
    draw_prefixes,
    load_continuations,
    sample_continuations,
    store_continuations,
)
from dblast.reproduction.diagnosis.determinism import accepted_over, determinism_bins, draft_at, gain_by_determinism
from dblast.reproduction.diagnosis.process import estimate_determinism
from dblast.errors import ArtefactError, DBlastError
from dblast.reproduction.diagnosis.oracle import blocks_accepted, independent_accepted, oracle_table, split_halves
from dblast.replay import expected_accepted
from dblast.sampling import SamplingSettings
from dblast.verifier import greedy_branch_acceptance
from tests.checks import refused
from tests.helpers import all_blocks, assert_close, generator, random_target, sequence_probability, target_log_p
from tests.helpers import ERRORS, assert_within_errors, frequency_error

SETTINGS = SamplingSettings(temperature=1.3, top_k=6, top_p=0.9)


def _prefixes(*lengths, seed=0):
    return [torch.randint(4, 40, (n,), generator=generator(seed + n)) for n in lengths]


def test_every_recorded_number_equals_a_plain_forward(llama):
    prefixes = _prefixes(3, 9, 6)
    made = sample_continuations(llama, prefixes, SETTINGS, continuations=5, block_length=4, generator=generator(1))
    for i, prefix in enumerate(prefixes):
        for m in range(5):
            block = made["tokens"][i, m]
            logits = llama.model(torch.cat([prefix, block])[None]).logits[0, len(prefix) - 1 : -1]
            log_p = SETTINGS.log_probabilities(logits)
            length = int(made["valid"][i, m].sum())
            assert_close(made["log_p"][i, m, :length], log_p[torch.arange(length), block[:length]], 2e-5)
            for j in range(length):
                full = torch.full((40,), float("-inf")).scatter(0, made["support"][i, m, j], made["support_log_p"][i, m, j])
                assert_close(full.exp(), log_p[j].exp(), 2e-5)


def test_continuations_end_at_the_first_end_of_sequence(llama):
    made = sample_continuations(
        llama, _prefixes(4), SamplingSettings(temperature=50.0), continuations=400, block_length=6, generator=generator(2)
    )
    ended = (made["tokens"] == 2) & made["valid"]
    assert ended.any()
    after = ended.long().cumsum(-1) - ended.long() > 0
    assert torch.equal(made["valid"], ~after)
    assert (made["log_p"][after] == 0).all() and torch.isinf(made["support_log_p"][after]).all()


def test_first_tokens_follow_the_target(llama):
    (prefix,) = _prefixes(5)
    made = sample_continuations(llama, [prefix], SETTINGS, continuations=4000, block_length=1, generator=generator(3))
    p = SETTINGS.probabilities(llama.model(prefix[None]).logits[0, -1])
    frequency = torch.bincount(made["tokens"].flatten(), minlength=40) / 4000
    assert_within_errors(frequency, p, frequency_error(p, 4000))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"continuations": 0}, "continuations must be at least 1"),
        ({"continuations": float("nan")}, "continuations must be an integer"),
        ({"block_length": 0}, "block length b must be at least 1"),
        ({"block_length": 200}, "context limit"),
        ({"prefixes": [torch.zeros(0, dtype=torch.long)]}, "no tokens"),
    ],
)
def test_bad_sizes_are_refused(llama, change, message):
    arguments = {"prefixes": _prefixes(4), "continuations": 2, "block_length": 2} | change
    with pytest.raises(DBlastError, match=message):
        sample_continuations(llama, settings=SETTINGS, generator=generator(0), **arguments)


# -- truncation points --------------------------------------------------------------------------


def test_truncation_points_are_distinct_leave_room_and_cover_all_places(make_trajectory):
    rows = [make_trajectory(response=n, seed=n) for n in (3, 5, 2)]
    rows = [len(row.response_ids) for row in rows]
    row, emitted = draw_prefixes(rows, [0, 1, 2], 4, 3, generator(0))
    # Room for three tokens: one place in the first, three in the second, none in the third.
    assert list(zip(row.tolist(), emitted.tolist())) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    with pytest.raises(DBlastError, match="5 truncation points .* only 4 places"):
        draw_prefixes(rows, [0, 1, 2], 5, 3, generator(0))


def test_truncation_points_are_uniform():
    drawn = [int(draw_prefixes([5], [0], 1, 3, generator(seed))[1]) for seed in range(900)]
    assert_within_errors([drawn.count(a) / 900 for a in range(3)], [1 / 3] * 3, frequency_error(1 / 3, 900))


# -- storage ------------------------------------------------------------------------------------


def _store(llama, make_trajectory, folder, count=5):
    rows = [make_trajectory(prompt=2 + seed, response=6, seed=seed) for seed in range(3)]
    row, emitted = draw_prefixes([6, 6, 6], [0, 1, 2], count, 3, generator(4))
    sizes = {"continuations": 4, "block_length": 3, "seed": 7, "rows_per_pass": 8}
    return rows, store_continuations(llama, rows, row, emitted, SETTINGS, folder, description=None, **sizes)


def test_stored_continuations_keep_the_order_of_their_prefixes(llama, make_trajectory, tmp_path):
    rows, stored = _store(llama, make_trajectory, tmp_path)
    row, emitted = draw_prefixes([6, 6, 6], [0, 1, 2], 5, 3, generator(4))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(stored.row, row) and torch.equal(stored.emitted, emitted)
    for i in range(5):
        prefix = rows[int(row[i])].tokens[: len(rows[int(row[i])].prompt_ids) + int(emitted[i])]
        first = SETTINGS.probabilities(llama.model(prefix[None]).logits[0, -1])
        full = torch.zeros(40).scatter(0, stored.support[i, 0, 0], stored.support_log_p[i, 0, 0].exp())
        assert_close(full, first, 2e-5)


def test_a_killed_run_ends_with_the_same_numbers(llama, make_trajectory, tmp_path):
    _, whole = _store(llama, make_trajectory, tmp_path / "a")
    _store(llama, make_trajectory, tmp_path / "b")
    (tmp_path / "b" / "shard-00001.safetensors").unlink()
    kept = (tmp_path / "b" / "shard-00000.safetensors").stat().st_mtime_ns
    _, again = _store(llama, make_trajectory, tmp_path / "b")
    assert (tmp_path / "b" / "shard-00000.safetensors").stat().st_mtime_ns == kept
    assert all(torch.equal(getattr(whole, name), getattr(again, name)) for name in vars(whole))


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("damage", ["cut off", "flipped"])
def test_a_damaged_shard_is_refused_by_name(llama, make_trajectory, tmp_path, damage, finished):
    _store(llama, make_trajectory, tmp_path)
    path = tmp_path / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data[:50] if damage == "cut off" else data)
    with refused(str(path), "damaged", "delete", kind=ArtefactError):
        load_continuations(tmp_path) if finished else _store(llama, make_trajectory, tmp_path)


def test_a_missing_shard_is_refused_by_name(llama, make_trajectory, tmp_path):
    _store(llama, make_trajectory, tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    with refused(str(tmp_path), "shard-00001.safetensors is missing", "delete", kind=ArtefactError):
        load_continuations(tmp_path)


def test_a_folder_begun_with_other_places_is_refused(llama, make_trajectory, tmp_path):
    _store(llama, make_trajectory, tmp_path)
    with refused(str(tmp_path), "another run's", kind=ArtefactError):
        _store(llama, make_trajectory, tmp_path, count=4)


# -- an enumerable target behind the estimates -----------------------------------------------------


def _exact(seed, vocabulary=3, length=3):
    """A toy target's blocks, their conditionals and weights, and a sampler of continuations from it."""
    target = random_target(vocabulary, length, generator(seed))
    blocks = all_blocks(vocabulary, length)
    log_p = target_log_p(target, blocks)
    weight = torch.tensor([sequence_probability(target, tuple(b)) for b in blocks.tolist()], dtype=torch.float64)

    def draw(prefixes, m, rng):
        index = torch.multinomial(weight.expand(prefixes, -1), m, replacement=True, generator=rng)
        tokens = blocks[index]
        support = torch.arange(vocabulary).expand(*tokens.shape, vocabulary)
        rows = [[[target[tuple(x[:j])] for j in range(length)] for x in block] for block in tokens.tolist()]
        return Continuations(
            row=torch.arange(prefixes),
            emitted=torch.zeros(prefixes, dtype=torch.long),
            tokens=tokens,
            log_p=log_p[index].float(),
            valid=torch.ones(tokens.shape, dtype=torch.bool),
            support=support,
            support_log_p=torch.tensor(rows).log(),
        )

    return target, blocks, log_p, weight, draw


def _most_covered(target, blocks, count):
    """The largest probability of all prefixes of so many blocks, by trying every set."""
    worth = []
    for some in itertools.combinations(blocks.tolist(), count):
        prefixes = {tuple(block[: j + 1]) for block in some for j in range(3)}
        worth.append(sum(sequence_probability(target, u) for u in prefixes))
    return max(worth)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_estimate_of_early_determinism_is_unbiased(seed):
    _, _, log_p, weight, draw = _exact(seed)
    exact = float((weight * log_p.cumsum(-1).exp().mean(-1)).sum())
    estimates = estimate_determinism(draw(4000, 20, generator(5)).log_p)
    error = float(estimates.std() / 4000**0.5)
    assert_within_errors(estimates.mean(), exact, error)
    # The mean of single probabilities, without the product over the prefix, is another quantity.
    wrong = draw(4000, 20, generator(5)).log_p.exp().mean()
    assert abs(float(wrong) - exact) > 50 * error


def test_determinism_leaves_out_what_was_never_written():
    log_p = torch.tensor([[[0.5, 0.5, 0.5]], [[0.5, 0.5, 0.5]]]).log()
    valid = torch.tensor([[[True, True, True]], [[True, False, False]]])
    assert_close(estimate_determinism(log_p, valid), [(0.5 + 0.25 + 0.125) / 3, 0.5])


def test_scoring_on_the_fitting_half_is_biased_upward():
    _, _, _, _, draw = _exact(3)
    stored = draw(600, 4, generator(6))
    names = ("tokens", "log_p", "valid", "support", "support_log_p")
    split, same = [], []
    for i in range(len(stored)):
        here = {name: getattr(stored, name)[i] for name in names}
        fit, score = ({name: value[index] for name, value in here.items()} for index in split_halves(4)[0])
        split.append(independent_accepted(fit, score))
        same.append(independent_accepted(fit, fit))
    split, same = pd.DataFrame(split), pd.DataFrame(same)
    gap = same - split
    error = gap.std() / len(gap) ** 0.5
    # The bias is twelve errors wide.
    assert gap["independent, sampled"].mean() > ERRORS * error["independent, sampled"]


def test_blocks_chosen_from_few_samples_never_exceed_the_exact_optimum():
    """Their worth is exact, not estimated: choosing and scoring on the same sample cannot flatter them."""
    target, blocks, _, weight, draw = _exact(4)
    best = _most_covered(target, blocks, 1)
    stored = draw(200, 4, generator(11))
    found = []
    for i in range(len(stored)):
        here = {"tokens": stored.tokens[i], "log_p": stored.log_p[i], "valid": stored.valid[i]}
        found.append(blocks_accepted(here, (1,))["best 1 block"])
    assert max(found) <= best + 1e-6 and max(found) > best - 1e-6 and min(found) < best - 0.05


def test_a_block_earns_nothing_after_the_end_of_sequence():
    tokens = torch.tensor([[5, 2, 9], [5, 7, 8]])
    here = {
        "tokens": tokens,
        "log_p": torch.tensor([[0.5, 0.8, 1.0], [0.5, 0.2, 0.5]]).log(),
        "valid": torch.tensor([[True, True, False], [True, True, True]]),
    }
    found = blocks_accepted(here, (1, 2))
    assert_close(found["best 1 block"], 0.5 + 0.4)
    assert_close(found["best 2 blocks"], 0.5 + 0.4 + 0.1 + 0.05)


def test_oracle_proposals_reach_their_exact_values_with_many_samples():
    target, blocks, log_p, weight, draw = _exact(4)
    table = oracle_table(draw(20, 1500, generator(7)), (1, 2)).groupby("proposal").accepted_length.mean()
    marginal = torch.stack([(weight.unsqueeze(-1) * torch.nn.functional.one_hot(blocks[:, i], 3)).sum(0) for i in range(3)])
    q = marginal[torch.arange(3), blocks]
    sampled = (weight * expected_accepted((q / log_p.exp()).clamp(max=1.0))).sum()
    # Over 20 prefixes with 1500 continuations each, most of which differ between prefixes.
    assert_within_errors(table["independent, sampled"], sampled, 0.003)
    # Exact whatever was sampled, as soon as the best blocks are among the 1500.
    assert_close(table["best 1 block"], _most_covered(target, blocks, 1), 1e-4)
    assert_close(table["best 2 blocks"], _most_covered(target, blocks, 2), 1e-4)


def test_splitting_needs_two_continuations():
    with pytest.raises(DBlastError, match="at least two"):
        split_halves(1)
    for fit, score in split_halves(5):
        assert sorted([*fit.tolist(), *score.tolist()]) == list(range(5))


# -- Figure 1 -------------------------------------------------------------------------------------


def test_drafts_at_truncation_points_equal_one_pass_each(llama, make_drafter, make_trajectory):
    drafter = make_drafter(llama)
    width = 32 * len(drafter.config.target_layer_ids)
    rows = [make_trajectory(response=8, width=width, seed=seed) for seed in range(2)]
    row, emitted = torch.tensor([1, 0, 1, 0]), torch.tensor([4, 0, 1, 5])
    branches, prior = draft_at(drafter, rows, row, emitted, 0.7)
    for i in range(4):
        one = draft_at(drafter, rows, row[i : i + 1], emitted[i : i + 1], 0.7)
        assert torch.equal(branches[i], one[0][0])
        assert_close(prior[i], one[1][0], 1e-5)


def test_accepted_length_over_continuations_is_their_mean():
    _, _, _, _, draw = _exact(5)
    stored = draw(3, 6, generator(8))
    branches = torch.randint(3, (3, 2, 3), generator=generator(9))
    prior = torch.randn(3, 2, generator=generator(10)).log_softmax(-1)
    found = accepted_over(stored, branches, prior)
    for i in range(3):
        one = [
            expected_accepted(
                greedy_branch_acceptance(branches[i : i + 1], prior[i : i + 1], stored.tokens[i, m][None], stored.log_p[i, m][None])
            )
            for m in range(6)
        ]
        assert_close(found[i], torch.stack(one).mean(), 1e-5)


def _points(values):
    rows = []
    for prompt, point, d, base, ours in values:
        for method, value in (("DFlash", base), ("DBlast", ours)):
            for seed, shift in ((0, -0.5), (1, 0.5)):
                rows.append((prompt, point, d, method, seed, value + shift))
    columns = ["prompt_id", "point", "determinism", "method", "seed", "accepted_length"]
    return pd.DataFrame(rows, columns=columns).assign(target="t", split="held_out")


def test_bins_hold_every_point_once_and_average_seeds():
    bins = determinism_bins(_points([("a", 0, 0.0, 1, 2), ("a", 1, 0.2, 3, 3), ("b", 2, 0.3, 5, 6), ("b", 3, 1.0, 7, 7)]))
    assert bins.n.tolist() == [1, 2, 1] and bins.bin_low.tolist() == [0.0, 0.2, 0.8]
    assert_close(bins.dflash.to_numpy(), [1.0, 4.0, 7.0])
    assert_close(bins.gain.to_numpy(), [100.0, 12.5, 0.0])


def test_bin_errors_are_over_prompts_and_paired():
    # Two prompts of two like points each: as points the spread would look half as large.
    values = [("a", 0, 0.1, 1, 2), ("a", 1, 0.1, 1, 2), ("b", 2, 0.1, 3, 4), ("b", 3, 0.1, 3, 4)]
    points = _points(values).query("seed == 0")
    row = determinism_bins(points.assign(accepted_length=points.accepted_length + 0.5)).iloc[0]
    assert_close(row.dflash_error, 1.0)
    assert row.prompts == 2 and row.n == 4
    # The difference is one token everywhere: the gain's error comes from the baseline alone.
    assert_close(row.gain_error, 100 * 1.0 * (1 / 2.0**2))
    single = determinism_bins(points.query("prompt_id == 'a'")).iloc[0]
    assert pd.isna(single.gain_error)


def test_the_gain_where_the_target_is_undecided_minus_the_rest():
    values = [("a", 0, 0.1, 1, 3), ("a", 1, 0.5, 2, 2), ("b", 2, 0.1, 1, 4), ("b", 3, 0.9, 2, 3)]
    row = gain_by_determinism(_points(values)).iloc[0]
    assert_close([row.low, row.rest, row.difference], [250.0, 25.0, 225.0])
    # Both gains come from the same two prompts: 200 and 300 per cent, 0 and 50 per cent. Their
    # difference is 200 for one prompt and 250 for the other, so its error is 25 plus the seeds' part.
    one_seed = _points(values).query("seed == 0")
    base = one_seed.assign(accepted_length=one_seed.accepted_length + 0.5)
    assert_close(gain_by_determinism(base).iloc[0].standard_error, 25.0)
    assert row.standard_error > 25.0 and row.seeds == 2


def test_seeds_that_disagree_widen_the_errors_of_bins():
    points = _points([("a", 0, 0.1, 1, 2), ("b", 1, 0.1, 3, 4)])
    agree = points.assign(accepted_length=points.accepted_length - points.seed.map({0: -0.5, 1: 0.5}))
    assert determinism_bins(points).dflash_error[0] > determinism_bins(agree).dflash_error[0]
    assert_close(determinism_bins(agree).dflash_error[0], 1.0)
    # Seed values 1.5 and 2.5: a standard deviation of sqrt(0.5), over sqrt(2) seeds.
    assert_close(determinism_bins(points).dflash_error[0], (1.0 + 0.25) ** 0.5)
