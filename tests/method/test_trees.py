"""Draft trees against enumeration of all prefixes, and the walk along them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from dblast.errors import DBlastError
from dblast.show import show_tree
from dblast.trees import (
    Tree,
    TreeOutcome,
    branch_trie,
    draft_tree,
    draw_token,
    first_largest,
    heaviest_prefixes,
    join,
    walk,
)
from tests.checks import one_line
from tests.helpers import (
    all_blocks,
    assert_close,
    generator,
    random_branches,
    random_log_prior,
    random_position_log_q,
)


def random_mixtures(count, branches, length, vocabulary, seed, zeros=False):
    """log q (B, K, b, V) and log prior (B, K), float64; with ``zeros`` a third of the tokens has q = 0."""
    rng = generator(seed)
    log_q = torch.stack([random_position_log_q(branches, length, vocabulary, rng) for _ in range(count)])
    if zeros:
        gone = torch.rand(log_q.shape, generator=rng) < 1 / 3
        gone[..., 0] = False
        log_q = log_q.masked_fill(gone, -torch.inf).log_softmax(-1)
    return log_q, torch.stack([random_log_prior(branches, rng) for _ in range(count)])


def prefix_weights(log_q, log_prior):
    """Weight of every prefix of one anchor, from (K, b, V) and (K,)."""
    branches, length, vocabulary = log_q.shape
    q, prior = log_q.double().exp().tolist(), log_prior.double().exp().tolist()
    return {
        prefix: sum(prior[z] * math.prod(q[z][i][v] for i, v in enumerate(prefix)) for z in range(branches))
        for size in range(1, length + 1)
        for prefix in itertools.product(range(vocabulary), repeat=size)
    }


def prefixes(tree, row):
    """Node by node, the prefix that it stands for."""
    found = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parent[row].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return [prefix for prefix, valid in zip(found, tree.valid[row].tolist(), strict=True) if valid]


def check_structure(tree):
    """Parents stand before their children, one token deeper down; siblings differ; weights fall; padding is inert."""
    for row in range(len(tree.tokens)):
        valid = tree.valid[row].tolist()
        count = sum(valid)
        assert valid == [True] * count + [False] * (tree.nodes - count)
        parent, depth = tree.parent[row].tolist(), tree.depth[row].tolist()
        for node in range(count):
            assert -1 <= parent[node] < node
            assert depth[node] == (depth[parent[node]] if parent[node] >= 0 else 0) + 1
        assert parent[count:] == [-1] * (tree.nodes - count)
        assert tree.tokens[row, count:].tolist() == depth[count:] == [0] * (tree.nodes - count)
        names = prefixes(tree, row)
        assert len(set(names)) == count
        log_weight = tree.log_weight[row].tolist()
        assert log_weight == sorted(log_weight, reverse=True)
        assert all(math.isfinite(w) for w in log_weight[:count])
        assert all(w == -math.inf for w in log_weight[count:])


def check_is_heaviest(tree, log_q, log_prior, nodes):
    check_structure(tree)
    for row in range(len(tree.tokens)):
        weights = prefix_weights(log_q[row], log_prior[row])
        positive = sorted((w for w in weights.values() if w > 0), reverse=True)
        mine = prefixes(tree, row)
        assert len(mine) == min(nodes, len(positive))
        assert_close([weights[u] for u in mine], positive[: len(mine)], tolerance=1e-12)
        assert_close(tree.log_weight[row, : len(mine)].exp(), positive[: len(mine)], tolerance=1e-12)


SHAPES = [(1, 3, 4), (2, 3, 4), (3, 2, 7), (4, 4, 3), (2, 1, 30), (5, 2, 12)]


@pytest.mark.parametrize("zeros", [False, True], ids=["q > 0", "q with zeros"])
@pytest.mark.parametrize("nodes", [1, 2, 5, 14, 200])
@pytest.mark.parametrize(("branches", "length", "vocabulary"), SHAPES)
def test_tree_holds_the_heaviest_of_all_prefixes(branches, length, vocabulary, nodes, zeros):
    log_q, log_prior = random_mixtures(4, branches, length, vocabulary, seed=nodes, zeros=zeros)
    check_is_heaviest(heaviest_prefixes(log_q, log_prior, nodes), log_q, log_prior, nodes)


@pytest.mark.parametrize("nodes", [1, 3, 9, 40])
@pytest.mark.parametrize(("branches", "length", "vocabulary"), SHAPES)
def test_tree_with_many_equal_weights(branches, length, vocabulary, nodes):
    """q = 1, equal q inside a slot and between slots: of equals the shorter stands first."""
    rng = generator(nodes)
    shares = torch.randint(0, 3, (4, branches, length, vocabulary), generator=rng).double()
    shares[..., 0] += shares.sum(-1) == 0
    shares[0] = torch.nn.functional.one_hot(shares[0].argmax(-1), vocabulary)
    log_q = (shares / shares.sum(-1, keepdim=True)).log()
    log_prior = torch.full((4, branches), -math.log(branches))
    tree = heaviest_prefixes(log_q, log_prior, nodes)
    check_is_heaviest(tree, log_q, log_prior, nodes)
    # Where q is 0 or 1 equal weights are equal to the last bit.
    weights, depth = tree.log_weight[0], tree.depth[0]
    same = (weights[1:] == weights[:-1]) & tree.valid[0, 1:]
    assert (depth[1:] >= depth[:-1])[same].all()


def test_token_that_is_likely_in_no_branch_may_be_the_heaviest():
    """Two branches love different tokens; the third token is second in both and first in the mixture's next level."""
    q = torch.tensor([[[0.5, 0.1, 0.4]], [[0.1, 0.5, 0.4]]], dtype=torch.float64)
    tree = heaviest_prefixes(q.log()[None], torch.tensor([[0.5, 0.5]]).log(), nodes=1)
    assert prefixes(tree, 0) == [(2,)]
    assert_close(tree.log_weight.exp(), 0.4)


def test_tokens_beyond_twice_n_in_every_branch_may_be_the_heaviest():
    """Four branches with seven favourites each, and six tokens that all of them rank after those."""
    q = torch.zeros(4, 34, dtype=torch.float64)
    for z in range(4):
        q[z, 7 * z : 7 * z + 7] = 0.1
    q[:, 28:] = 0.05
    tree = heaviest_prefixes(q.log().view(1, 4, 1, 34), torch.full((1, 4), 0.25).log(), 6)
    assert prefixes(tree, 0) == [(v,) for v in range(28, 34)]
    assert_close(tree.log_weight.exp(), 0.05)


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("rounded", [False, True], ids=["all different", "many equals"])
def test_cutting_a_tree_is_building_a_smaller_one(branches, rounded):
    log_q, log_prior = random_mixtures(5, branches, 4, 12, seed=branches)
    if rounded:
        log_q, log_prior = (log_q * 2).round() / 2, (log_prior * 2).round() / 2
        log_q, log_prior = log_q.log_softmax(-1), log_prior.log_softmax(-1)
    large = heaviest_prefixes(log_q, log_prior, 56)
    for nodes in (1, 2, 7, 14, 28, 55):
        small = heaviest_prefixes(log_q, log_prior, nodes)
        for name, value in vars(large.cut(nodes)).items():
            assert torch.equal(value, getattr(small, name)), name


def test_equal_branches_are_one_branch():
    log_q, _ = random_mixtures(4, 1, 3, 6, seed=0)
    one = heaviest_prefixes(log_q, torch.zeros(4, 1), 20)
    many = heaviest_prefixes(log_q.expand(-1, 4, -1, -1), torch.full((4, 4), 0.25, dtype=torch.float64).log(), 20)
    assert torch.equal(one.tokens, many.tokens) and torch.equal(one.parent, many.parent)
    assert_close(one.log_weight, many.log_weight, tolerance=1e-12)


def test_one_branch_is_the_independent_proposal():
    """Its heaviest path is the greedy block, and weights multiply."""
    log_q, _ = random_mixtures(6, 1, 4, 5, seed=1)
    tree = heaviest_prefixes(log_q, torch.zeros(6, 1), 60)
    greedy = log_q[:, 0].argmax(-1)
    places = tree.follow(greedy)
    expected = log_q[:, 0].amax(-1).cumsum(-1)
    inside = places < tree.nodes
    assert inside[:, :2].all()
    reached = tree.log_weight.gather(1, places.clamp(max=tree.nodes - 1))
    assert_close(reached[inside], expected[inside], tolerance=1e-12)


def test_float32_and_a_draft_vocabulary():
    """Columns are target ids out of order; the tree is that of the dense table with q = 0 elsewhere."""
    token_ids = torch.tensor([7, 2, 9, 4])
    log_q, log_prior = (x.float() for x in random_mixtures(3, 2, 3, 4, seed=2))
    tree = heaviest_prefixes(log_q, log_prior, 15, token_ids)
    dense = torch.full((3, 2, 3, 10), -torch.inf)
    dense[..., token_ids] = log_q
    whole = heaviest_prefixes(dense, log_prior, 15)
    check_structure(tree)
    assert [prefixes(tree, row) for row in range(3)] == [prefixes(whole, row) for row in range(3)]
    assert torch.equal(tree.log_weight, whole.log_weight)


def test_zero_category_temperature_is_the_tree_of_one_branch():
    log_q, _ = random_mixtures(3, 3, 3, 5, seed=3)
    log_prior = torch.tensor([0.0, -torch.inf, -torch.inf]).expand(3, -1)
    tree, one = heaviest_prefixes(log_q, log_prior, 12), heaviest_prefixes(log_q[:, :1], torch.zeros(3, 1), 12)
    for name, value in vars(one).items():
        assert torch.equal(getattr(tree, name), value)


def test_no_nodes_are_refused():
    with pytest.raises(DBlastError) as error:
        heaviest_prefixes(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1), 0)
    one_line(error, "at least 1 node, got 0")


def test_trie_of_the_greedy_branches():
    rng = generator(5)
    for branches, length, vocabulary in [(1, 3, 4), (3, 3, 2), (4, 2, 3), (5, 4, 2)]:
        tokens = torch.stack([random_branches(branches, length, vocabulary, rng) for _ in range(6)])
        log_prior = torch.stack([random_log_prior(branches, rng) for _ in range(6)])
        log_prior[5] = torch.nn.functional.one_hot(torch.tensor(branches - 1), branches).log()
        tree = branch_trie(tokens, log_prior)
        check_structure(tree)
        for row in range(6):
            prior, expected = log_prior[row].exp().tolist(), {}
            for z, branch in enumerate(tokens[row].tolist()):
                for size in range(1, length + 1):
                    if prior[z]:
                        expected[tuple(branch[:size])] = expected.get(tuple(branch[:size]), 0.0) + prior[z]
            mine = prefixes(tree, row)
            assert set(mine) == set(expected)
            assert_close(tree.log_weight[row, : len(mine)].exp(), [expected[u] for u in mine], tolerance=1e-12)


def test_trie_is_the_tree_of_point_masses():
    rng = generator(6)
    tokens = torch.stack([random_branches(3, 3, 4, rng) for _ in range(8)])
    log_prior = torch.stack([random_log_prior(3, rng) for _ in range(8)])
    point_masses = torch.nn.functional.one_hot(tokens, 4).double().log()
    trie, tree = branch_trie(tokens, log_prior), heaviest_prefixes(point_masses, log_prior, 9)
    assert [set(prefixes(trie, row)) for row in range(8)] == [set(prefixes(tree, row)) for row in range(8)]
    assert_close(trie.log_weight, tree.log_weight, tolerance=1e-12)


def test_ancestors():
    tree = heaviest_prefixes(*random_mixtures(4, 2, 4, 3, seed=7, zeros=True), 30)
    mask = tree.ancestors
    for row in range(4):
        names = prefixes(tree, row)
        for (n, node), (m, other) in itertools.product(enumerate(names), repeat=2):
            assert bool(mask[row, n, m]) == (node[: len(other)] == other)
        rest = mask[row, len(names) :]
        assert torch.equal(rest, torch.eye(tree.nodes, dtype=torch.bool)[len(names) :])


def test_follow_finds_the_depth_and_the_size_that_it_needs():
    log_q, log_prior = random_mixtures(1, 2, 3, 4, seed=8)
    tree = heaviest_prefixes(log_q, log_prior, 25)
    texts = all_blocks(4, 3)
    places = Tree(**{k: v.expand(len(texts), -1) for k, v in vars(tree).items()}).follow(texts)
    names = prefixes(tree, 0)
    for text, row in zip(texts.tolist(), places.tolist(), strict=True):
        for size in range(1, 4):
            prefix = tuple(text[:size])
            assert row[size - 1] == (names.index(prefix) if prefix in names else tree.nodes)
    for nodes in (1, 4, 11):
        cut = tree.cut(nodes)
        shorter = Tree(**{k: v.expand(len(texts), -1) for k, v in vars(cut).items()}).follow(texts)
        assert torch.equal((places < nodes).sum(-1), (shorter < nodes).sum(-1))
    assert (tree.follow(torch.tensor([[-1, 0, 0]])) == tree.nodes).all()


def test_first_largest_is_a_stable_sort():
    values = torch.randint(0, 5, (50, 4, 30), generator=generator(0)).double()
    values[0, 0] = -torch.inf
    expected, order = values.sort(dim=-1, descending=True, stable=True)
    for count in (1, 7, 29, 30):
        largest, place = first_largest(values, count)
        assert torch.equal(largest, expected[..., :count]) and torch.equal(place, order[..., :count])


def test_join_pads_with_nodes_that_do_nothing():
    trees = [heaviest_prefixes(*random_mixtures(2, 2, 2, 3, seed=s), n) for s, n in ((0, 4), (1, 12))]
    both = join(trees)
    check_structure(both)
    assert [prefixes(both, row) for row in range(4)] == [prefixes(t, row) for t in trees for row in range(2)]


@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 12}], ids=["whole vocabulary", "draft vocabulary"])
def test_tree_of_a_drafter_pass(llama, make_drafter, make_trajectory, monkeypatch, settings):
    from dblast import trees
    from dblast.trajectories import pack_first

    drafter = make_drafter(llama, num_categories=3, **settings)
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    with torch.no_grad():
        output = pack_first(make_trajectory(width=width), 10, 3).run(drafter)
        tree = draft_tree(drafter, output, 20, category_temperature=0.7)
        every = torch.arange(40).expand(len(tree.tokens), 3, -1)
        log_q = drafter.log_q(output.branch_hidden, every)
    dense = heaviest_prefixes(log_q, output.log_prior(0.7), 20)
    assert [prefixes(tree, row) for row in range(10)] == [prefixes(dense, row) for row in range(10)]
    assert_close(tree.log_weight, dense.log_weight, tolerance=1e-5)
    monkeypatch.setattr(trees, "TREE_LOGITS", 1)
    with torch.no_grad():
        one_by_one = draft_tree(drafter, output, 20, category_temperature=0.7)
    assert torch.equal(one_by_one.tokens, tree.tokens)


# -- drawing and walking ----------------------------------------------------------------------------


def test_draw_covers_the_unit_interval_in_proportion_to_p():
    tokens = torch.tensor([[7, 3, 5, 9]]).expand(1000, -1)
    p = torch.tensor([[0.0, 0.25, 0.75, 0.0]]).expand(1000, -1)
    drawn = draw_token(tokens, p, (torch.arange(1000) + 0.5) / 1000)
    assert drawn.bincount().tolist() == [0, 0, 0, 250, 0, 750]
    edges = draw_token(tokens[:2], p[:2], torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert edges.tolist() == [3, 5]


def tree_of(names, weights=None):
    """One tree with these prefixes, parents first."""
    weights = torch.linspace(0.9, 0.1, len(names), dtype=torch.float64) if weights is None else torch.tensor(weights)
    return Tree(
        tokens=torch.tensor([[u[-1] for u in names]]),
        parent=torch.tensor([[names.index(u[:-1]) if len(u) > 1 else -1 for u in names]]),
        depth=torch.tensor([[len(u) for u in names]]),
        log_weight=weights.log().unsqueeze(0),
        valid=torch.ones(1, len(names), dtype=torch.bool),
    )


def test_walk_with_certain_targets_and_rows_that_end_at_different_depths():
    names = [(1,), (1, 2), (0,), (1, 0), (1, 2, 1), (0, 2)]
    texts = [(3,), (0, 1), (0, 2, 3), (1, 2, 1, 1), (1, 3), (1, 2, 0)]
    batch = Tree(**{k: v.expand(len(texts), -1) for k, v in vars(tree_of(names)).items()})
    tokens = torch.arange(4).expand(len(texts), 7, -1)
    p = torch.zeros(len(texts), 7, 4)
    for row, text in enumerate(texts):
        for slot, node in enumerate([(), *names]):
            p[row, slot, text[len(node)] if text[: len(node)] == node else 0] = 1
    outcome = walk(batch, tokens, p, generator=generator(0))
    assert outcome.accepted.tolist() == [0, 1, 2, 3, 1, 2]
    assert outcome.token.tolist() == [text[-1] for text in texts]
    assert outcome.path.tolist() == [[-1, -1, -1], [2, -1, -1], [2, 5, -1], [0, 1, 4], [0, -1, -1], [0, 1, -1]]
    assert outcome.drafted.tolist() == [[*text[:-1], *[0] * (4 - len(text))] for text in texts]
    assert outcome.leaf.tolist() == [False, False, True, True, False, False]


def test_walk_draws_from_its_generator_alone():
    tree = heaviest_prefixes(*random_mixtures(3, 2, 3, 4, seed=9), 10)
    tokens, p = torch.arange(4).expand(3, tree.nodes + 1, -1), torch.full((3, tree.nodes + 1, 4), 0.25)
    before = torch.get_rng_state()
    first, second = (walk(tree, tokens, p, generator=generator(1)) for _ in range(2))
    assert torch.equal(first.path, second.path) and torch.equal(first.token, second.token)
    assert torch.equal(torch.get_rng_state(), before)


# -- the picture ------------------------------------------------------------------------------------


def test_picture_of_a_tree_with_its_walk(tokenizer):
    names = [(10,), (10, 11), (12,), (10, 13), (10, 11, 14)]
    tree = tree_of(names, [0.8, 0.5, 0.2, 0.125, 0.1])
    outcome = TreeOutcome(
        path=torch.tensor([[0, 1, -1]]),
        drafted=torch.tensor([[10, 11, 0]]),
        accepted=torch.tensor([2]),
        token=torch.tensor([15]),
        leaf=torch.tensor([False]),
    )
    assert show_tree(tree, tokenizer, outcome=outcome).splitlines() == [
        "anchor",
        "├─● 'w10' 0.800",
        "│ ├─● 'w11' 0.500",
        "│ │ ├─○ 'w14' 0.100",
        "│ │ └─⇒ 'w15' drawn by the target",
        "│ └─○ 'w13' 0.125",
        "└─○ 'w12' 0.200",
        "accepted 2, 5 nodes",
    ]
    bare = show_tree(tree, tokenizer)
    assert "●" not in bare and "⇒" not in bare and len(bare.splitlines()) == 6
    nothing = replace(outcome, path=torch.tensor([[-1]]), accepted=torch.tensor([0]))
    assert show_tree(tree, tokenizer, outcome=nothing).splitlines()[-2] == "└─⇒ 'w15' drawn by the target"


def test_picture_leaves_out_nodes_that_are_not_valid(tokenizer):
    both = join([tree_of([(10,), (10, 11)]), tree_of([(12,)])])
    assert show_tree(both, tokenizer, row=1) == "anchor\n└─○ 'w12' 0.900"
    with pytest.raises(DBlastError) as error:
        show_tree(both, tokenizer, row=2)
    one_line(error, "row 2")
