"""What tree decoding emits has the target's law: enumerated exactly on toys, and coupled draw by draw on real models."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch

from dblast import trees
from dblast.trees import Tree, branch_trie, heaviest_prefixes, walk
from tests.helpers import assert_close, generator, random_branches, random_log_prior, random_position_log_q, sequence_probability

#: Target probabilities are multiples of 1 / GRID, so that GRID uniform numbers integrate a draw exactly.
GRID = 6


class Toy:
    """A random target on a grid of probabilities (zeros among them), and a random tree after every prefix."""

    def __init__(self, vocabulary, branches, length, emitted, nodes, seed):
        rng = generator(seed)
        self.vocabulary, self.length, self.emitted = vocabulary, length, emitted
        every = [u for n in range(emitted + length) for u in itertools.product(range(vocabulary), repeat=n)]
        self.target = {}
        for u in every:
            counts = torch.randint(vocabulary, (GRID,), generator=rng).bincount(minlength=vocabulary)
            self.target[u] = (counts.double() / GRID).tolist()
        self.trees = {}
        for u in every:
            if len(u) >= emitted:
                continue
            log_prior = random_log_prior(branches, rng)[None]
            if nodes is None:
                self.trees[u] = branch_trie(random_branches(branches, length, vocabulary, rng)[None], log_prior)
            else:
                log_q = random_position_log_q(branches, length, vocabulary, rng)[None]
                self.trees[u] = heaviest_prefixes(log_q, log_prior, nodes)

    def node_prefixes(self, prefix):
        """The anchor's prefix, then that of every node."""
        tree, found = self.trees[prefix], [prefix]
        for token, parent in zip(tree.tokens[0].tolist(), tree.parent[0].tolist(), strict=True):
            found.append((*found[parent + 1], token))
        return found

    def pass_law(self, prefix):
        """Probability of everything that one pass emits, integrated over its uniform numbers."""
        tree = self.trees[prefix]
        depth = int(tree.depth.max())
        cells = torch.tensor(list(itertools.product(range(GRID), repeat=depth + 1)))
        rows = len(cells)
        p = torch.tensor([self.target[u] for u in self.node_prefixes(prefix)], dtype=torch.float64)
        tokens = torch.arange(self.vocabulary).expand(rows, len(p), -1)
        batch = Tree(**{name: value.expand(rows, *value.shape[1:]) for name, value in vars(tree).items()})
        outcome = walk(batch, tokens, p.expand(rows, -1, -1), uniform=(cells + 0.5) / GRID)
        law = defaultdict(float)
        for path, own in zip(outcome.path.tolist(), outcome.token.tolist(), strict=True):
            law[(*(int(tree.tokens[0, node]) for node in path if node >= 0), own)] += 1 / rows
        return law

    def emitted_law(self):
        """Joint law of the tokens of the whole loop, as many passes as it takes; the last may run past the budget."""
        known = {}

        def after(prefix):
            if len(prefix) >= self.emitted:
                return {(): 1.0}
            if prefix not in known:
                law = defaultdict(float)
                for tokens, probability in self.pass_law(prefix).items():
                    kept = tokens[: self.emitted - len(prefix)]
                    for more, share in after(prefix + kept).items():
                        law[kept + more] += probability * share
                known[prefix] = law
            return known[prefix]

        return after(())

    def largest_error(self):
        law = self.emitted_law()
        sequences = itertools.product(range(self.vocabulary), repeat=self.emitted)
        return max(abs(law.get(u, 0.0) - sequence_probability(self.target, u)) for u in sequences)


SHAPES = [(3, 1, 2, 4, 3), (3, 2, 2, 4, 5), (3, 3, 3, 3, 9), (4, 2, 1, 3, 2), (2, 2, 3, 5, 14), (3, 3, 2, 4, None)]


@pytest.mark.parametrize(("vocabulary", "branches", "length", "emitted", "nodes"), SHAPES)
def test_joint_law_of_the_loop_is_that_of_the_target(vocabulary, branches, length, emitted, nodes):
    for seed in range(2):
        assert Toy(vocabulary, branches, length, emitted, nodes, seed).largest_error() < 1e-12


@pytest.mark.parametrize(("vocabulary", "branches", "length", "emitted", "nodes"), SHAPES)
def test_expected_accepted_length_is_the_sum_of_p_over_the_nodes(vocabulary, branches, length, emitted, nodes):
    toy = Toy(vocabulary, branches, length, emitted, nodes, seed=7)
    for prefix in [(), (0,), (1, 0)]:
        accepted = sum(share * (len(tokens) - 1) for tokens, share in toy.pass_law(prefix).items())
        inside = sum(sequence_probability(toy.target, u, len(prefix)) for u in toy.node_prefixes(prefix)[1:])
        assert_close(accepted, inside, tolerance=1e-12)


# -- mutants -----------------------------------------------------------------------------------


def draws_at_the_parent(monkeypatch):
    """p of the node before: the anchor's again at the first node."""
    original = trees.walk

    def mutant(tree, tokens, p, **kwargs):
        rows = torch.arange(len(p)).unsqueeze(1)
        slots = torch.cat([torch.zeros_like(tree.parent[:, :1]), tree.parent + 1], dim=1)
        return original(tree, tokens[rows, slots], p[rows, slots], **kwargs)

    monkeypatch.setitem(globals(), "walk", mutant)


def takes_the_first_child(monkeypatch):
    """Moves to a child whatever was drawn."""

    def child(self, node, token):
        match = (self.parent == node.unsqueeze(1)) & self.valid
        return torch.where(match.any(1), match.int().argmax(1), -1)

    monkeypatch.setattr(Tree, "child", child)


def takes_any_node_with_the_token(monkeypatch):
    """Forgets whose child it is."""

    def child(self, node, token):
        deeper = torch.where(node < 0, 0, self.depth.gather(1, node.clamp(min=0).unsqueeze(1)).squeeze(1)) + 1
        match = (self.tokens == token.unsqueeze(1)) & (self.depth == deeper.unsqueeze(1))
        return torch.where(match.any(1), match.int().argmax(1), -1)

    monkeypatch.setattr(Tree, "child", child)


def draws_again_after_a_miss(monkeypatch):
    """Like a rejection: the own token comes from a second draw, at which the children count for nothing."""
    original = trees.walk

    def mutant(tree, tokens, p, **kwargs):
        outcome = original(tree, tokens, p, **kwargs)
        last = torch.where(
            outcome.accepted > 0, outcome.path.gather(1, (outcome.accepted - 1).clamp(min=0)[:, None])[:, 0], -1
        )
        here = p[torch.arange(len(p)), last + 1].clone()
        for row, node in enumerate(last.tolist()):
            here[row, tree.tokens[row][(tree.parent[row] == node) & tree.valid[row]]] = 0
        redrawn = here.argmax(-1)
        token = torch.where(here.sum(-1) > 0, redrawn, outcome.token)
        return trees.TreeOutcome(outcome.path, outcome.accepted, token, outcome.leaf)

    monkeypatch.setitem(globals(), "walk", mutant)


MUTANTS = [draws_at_the_parent, takes_the_first_child, takes_any_node_with_the_token, draws_again_after_a_miss]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_break_the_joint_law(mutant, monkeypatch):
    toys = [Toy(3, 2, 2, 3, 6, seed) for seed in range(3)]
    assert max(toy.largest_error() for toy in toys) < 1e-12
    mutant(monkeypatch)
    assert max(toy.largest_error() for toy in toys) > 1e-2
