"""What any exact scheme can accept: the linear programme against closed forms, and every scheme against enumeration."""

import itertools

import numpy as np
import pytest

from dblast.reproduction.beyond.bound import (
    block_lengths,
    heaviest_tree,
    merged_length,
    merged_tries,
    most,
    prefix_law,
    random_pair,
    recursive_rejection,
    scheme_lengths,
    scheme_table,
    sibling_length,
    sibling_tries,
    transport_bound,
    walk_length,
)


def pairs(count=6, vocabulary=3, length=2, seed=0):
    """(q, p) of blocks, every third q with zeros."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        q, p = (rng.dirichlet(np.full(vocabulary**length, 0.7)).reshape((vocabulary,) * length) for _ in range(2))
        if i % 3 == 2:
            q = np.where(q < np.quantile(q, 0.3), 0.0, q)
            q /= q.sum()
        yield q, p


def one_token_tries(q, branches, replace):
    """The law of sets of drafted tokens, by enumeration of all orders."""
    tries = {}
    for order in itertools.product(range(len(q)), repeat=branches):
        if not replace and len(set(order)) < branches:
            continue
        chance, left = 1.0, 1.0
        for v in order:
            chance *= q[v] if replace else (q[v] / left if left > 1e-15 else 0.0)
            left -= q[v]
        trie = frozenset((v,) for v in order)
        tries[trie] = tries.get(trie, 0.0) + chance
    return tries


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_one_token_is_a_transport_problem_with_a_closed_form(branches, replace):
    for q, p in pairs(5, vocabulary=4, length=1):
        if not replace and (q > 0).sum() < branches:
            continue
        bound = transport_bound(q, p, branches, replace)
        assert most(one_token_tries(q, branches, replace), p) == pytest.approx(bound, abs=1e-9)
        scheme = sum(recursive_rejection(q, p, branches, replace).values())
        assert scheme <= bound + 1e-12
        if branches == 1:
            assert (scheme, bound) == pytest.approx((np.minimum(q, p).sum(),) * 2)


def test_for_one_block_the_optimum_is_block_verification():
    for q, p in pairs():
        by_token, by_block = block_lengths(q, p)
        assert most(merged_tries(q, 1), p) == pytest.approx(by_block, abs=1e-9)
        assert by_token <= by_block + 1e-12
    # The published example of two tokens: 10/9 by token, 11/9 by block.
    q = np.outer([2 / 3, 1 / 3], [2 / 3, 1 / 3])
    p = np.outer([1 / 3, 2 / 3], [1 / 3, 2 / 3])
    assert block_lengths(q, p) == pytest.approx((10 / 9, 11 / 9))


def test_of_a_fixed_tree_the_walk_is_the_optimum():
    for q, p in pairs():
        tree = heaviest_tree(q, 4)
        assert len(tree) == 4 and all(u[:-1] in tree for u in tree if len(u) > 1)
        law = prefix_law(q)
        assert sum(law[u] for u in tree) == pytest.approx(sum(sorted((law[u] for u in law if u), reverse=True)[:4]))
        assert most({tree: 1.0}, p) == pytest.approx(walk_length(tree, p), abs=1e-9)


def test_laws_of_drawn_tries_are_distributions():
    for q, _ in pairs():
        assert sum(merged_tries(q, 2).values()) == pytest.approx(1)
        if (q.sum(1) > 0).sum() >= 2:
            tries = sibling_tries(q, 2)
            assert sum(tries.values()) == pytest.approx(1)
            assert all(len({u[0] for u in trie}) == 2 and len(trie) == 4 for trie in tries)


@pytest.mark.parametrize("replace", [True, False])
def test_recursive_rejection_emits_p(replace):
    """No token is accepted more often than p has it, and coin by coin the same numbers come out."""
    for q, p in pairs(6, vocabulary=4, length=1):
        found = recursive_rejection(q, p, 3, replace)
        mass = np.zeros(4)
        for (_, v), chance in found.items():
            mass[v] += chance
        assert (mass <= p + 1e-12).all()
        expected = {}
        for order in itertools.product(range(4), repeat=3):
            chance, left, law = 1.0, p.copy(), q.copy()
            for turn, v in enumerate(order):
                if law[v] <= 0:
                    break
                accept = min(1.0, left[v] / law[v])
                # The remaining draws are summed over by the other orders: count this one by its own share of them.
                share = chance * law[v] * accept / 4 ** (2 - turn)
                expected[turn, v] = expected.get((turn, v), 0.0) + share
                chance *= law[v] * (1 - accept)
                rest = np.maximum(left - law, 0.0)
                if chance <= 0 or rest.sum() <= 0:
                    break
                left = rest / rest.sum()
                if not replace:
                    law = law.copy()
                    law[v] = 0.0
                    if law.sum() <= 0:
                        break
                    law /= law.sum()
        for key in {*found, *expected}:
            assert found.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), abs=1e-12)


def merged_by_enumeration(q, p, branches):
    """Every draw of blocks and every coin of recursive rejection with replacement, level by level."""
    q_law, p_law, size = prefix_law(q), prefix_law(p), q.shape[0]

    def below(u, drafts):
        if len(u) == q.ndim or not drafts:
            return 0.0
        left = np.array([p_law[*u, v] / p_law[u] for v in range(size)])
        law = np.array([q_law[*u, v] / q_law[u] for v in range(size)])
        total, chance = 0.0, 1.0
        for turn, block in enumerate(drafts):
            v = block[len(u)]
            accept = min(1.0, left[v] / law[v])
            live = [other for other in drafts[turn:] if other[: len(u) + 1] == (*u, v)]
            total += chance * accept * (1 + below((*u, v), live))
            chance *= 1 - accept
            rest = np.maximum(left - law, 0.0)
            if chance <= 0 or rest.sum() <= 0:
                break
            left = rest / rest.sum()
        return total

    blocks = [block for block in np.ndindex(q.shape) if q[block] > 0]
    return sum(
        np.prod([q[block] for block in drafts]) * below((), list(drafts))
        for drafts in itertools.product(blocks, repeat=branches)
    )


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_merged_blocks_are_those_of_enumeration(branches):
    for q, p in pairs(3, vocabulary=3 if branches < 3 else 2):
        assert merged_length(q, p, branches) == pytest.approx(merged_by_enumeration(q, p, branches), abs=1e-12)
        assert merged_length(q, p, 1) == pytest.approx(block_lengths(q, p)[0])
        assert merged_length(q, p, branches) <= most(merged_tries(q, branches), p) + 1e-9


def test_no_scheme_beats_its_optimum_and_a_perfect_drafter_reaches_b():
    for noise in (0.5, 2.0):
        q, p = random_pair(4, 2, 3, noise, np.random.default_rng(1))
        assert q.sum() == pytest.approx(1) and p.sum() == pytest.approx(1)
        found = scheme_lengths(q, p, 2)
        for kind in ("drawn blocks merged", "distinct first tokens"):
            assert found[f"{kind}, recursive rejection"] <= found[f"{kind}, optimum"] + 1e-9
        assert all(0 < value <= 2 + 1e-9 for value in found.values())
        assert sibling_length(q, p, 1) == pytest.approx(found["one drawn block, by token"])
    same = scheme_lengths(p, p, 2)
    drawn = [value for name, value in same.items() if "drawn" in name or "distinct first tokens, optimum" in name]
    assert drawn == pytest.approx([2.0] * len(drawn))


def test_the_table_has_a_column_for_every_noise():
    table = scheme_table(noises=(0.0, 1.0), pairs=2, vocabulary=3)
    assert list(table) == ["noise 0", "noise 1"] and len(table) == 8 and table.notna().all(axis=None)
