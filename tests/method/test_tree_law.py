"""What tree decoding emits has the law of the target: enumerated on toys, coupled draw by draw on real models."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from dblast import cache, decoding, trees
from dblast.cache import BlockDecoder
from dblast.decoding import generate
from dblast.replay import score
from dblast.sampling import SamplingSettings
from dblast.targets import tap_features
from dblast.trajectories import EncodedPrompt, pack_first, sample_batch
from dblast.trees import Tree, branch_trie, draft_tree, draw_token, heaviest_prefixes, join, walk
from tests.checks import refused
from tests.conftest import EOS_TOKEN_ID, VOCABULARY_SIZE
from tests.helpers import (
    assert_close,
    generator,
    random_branches,
    random_log_prior,
    random_position_log_q,
    sequence_probability,
)
from tests.method.test_decoding import PROMPTS, check_accounting, compare_draft_with_fresh_prefill, plain_greedy
from tests.method.test_exact_law import FAIR, simulated_p_value, toy  # noqa: F401
from tests.method.test_trees import tree_of

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
        return replace(outcome, token=token)

    monkeypatch.setitem(globals(), "walk", mutant)


MUTANTS = [draws_at_the_parent, takes_the_first_child, takes_any_node_with_the_token, draws_again_after_a_miss]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_break_the_joint_law(mutant, monkeypatch):
    toys = [Toy(3, 2, 2, 3, 6, seed) for seed in range(3)]
    assert max(toy.largest_error() for toy in toys) < 1e-12
    mutant(monkeypatch)
    assert max(toy.largest_error() for toy in toys) > 1e-2


# -- real models, draw by draw ---------------------------------------------------------------------

SETTINGS = [SamplingSettings(), SamplingSettings(0.7, top_k=6), SamplingSettings(1.3, top_k=20, top_p=0.9)]


def plain_text(model, prompt, settings, uniform, eos=()):
    """Plain decoding by prefilling the whole sequence for every token; token j is drawn with uniform number j."""
    ids = list(prompt)
    for number in uniform:
        with torch.no_grad():
            tokens, log_p = settings.support(model(torch.tensor([ids])).logits[0, -1])
        ids.append(int(draw_token(tokens, log_p.exp(), number)))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


class NumberedDecoder(BlockDecoder):
    """Knows which prompt each of its rows is, and how many tokens that has emitted."""

    def start(self, prompts, reserve=0):
        super().start(prompts, reserve)
        self.rows, self.begin = list(range(len(prompts))), list(self.lengths)

    def keep(self, rows):
        super().keep(rows)
        self.rows = [self.rows[row] for row in rows]

    def emitted(self):
        return torch.tensor([length - self.begin[row] for row, length in zip(self.rows, self.lengths, strict=True)])


def planted_tree(text, nodes, depth, rng):
    """Random prefixes around the first few tokens of a text, in random order but for parents before children."""

    def number(below):
        return int(torch.randint(below, (1,), generator=rng))

    inside = number(depth + 1)
    names = {tuple(text[:size]) for size in range(1, inside + 1)}
    while len(names) < nodes:
        above = [u for u in [(), *sorted(names)] if len(u) < depth]
        # Many siblings of the text: tokens near its own.
        names.add((*above[number(len(above))], (text[0] + number(12)) % VOCABULARY_SIZE))
    weight = {(): 1.0}
    for u in sorted(names, key=lambda u: (len(u), u)):
        weight[u] = weight[u[:-1]] * float(torch.rand(1, generator=rng))
    return tree_of(sorted(names, key=lambda u: -weight[u]))


@pytest.fixture
def coupled(monkeypatch):
    """generate() in trees, token j of prompt i drawn with the uniform number [i, j].

    The trees are the drafter's, or with ``texts`` random ones that hold the beginning of what follows.
    """

    def run(target, drafter, prompts, settings, uniform, nodes, texts=None, **arguments):
        decoder, depth = NumberedDecoder(getattr(target, "model", target), drafter), drafter.config.block_length
        padded = torch.nn.functional.pad(uniform, (0, depth + 1))
        rng = generator(nodes)

        def numbered_walk(tree, tokens, p, generator):
            columns = decoder.emitted().unsqueeze(1) + torch.arange(int(tree.depth.max()) + 1)
            return walk(tree, tokens, p, uniform=padded[torch.tensor(decoder.rows).unsqueeze(1), columns])

        def planted(drafter, output, nodes, **_):
            places = zip(decoder.rows, decoder.emitted().tolist(), strict=True)
            # Not all of one size: some rows end with nodes that are not valid.
            return join([planted_tree(texts[row][done:], nodes - row, depth, rng) for row, done in places])

        monkeypatch.setattr(decoding, "walk", numbered_walk)
        monkeypatch.setattr(decoding, "draft_tree", planted if texts else draft_tree)
        return generate(
            target, drafter, prompts, settings, mode="tree", nodes=nodes, decoder=decoder, **arguments
        )

    return run


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("branches", "nodes"), [(0, 4), (1, 9), (3, 40)])
@pytest.mark.parametrize("planted", [False, True], ids=["trees of the drafter", "trees around the text"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_trees_emit_what_plain_decoding_draws(request, make_drafter, coupled, name, planted, branches, nodes, settings):
    """With the same uniform numbers token for token; rows of different lengths, budget inside trees."""
    target, budget = request.getfixturevalue(name), 15
    drafter = make_drafter(target, num_categories=branches)
    uniform = torch.rand(len(PROMPTS), budget + 4, generator=generator(nodes), dtype=torch.float64)
    texts = [plain_text(target.model, prompt, settings, row) for prompt, row in zip(PROMPTS, uniform, strict=True)]
    arguments = dict(max_new_tokens=budget, eos_token_ids=(), texts=texts if planted else None)
    result = coupled(target, drafter, PROMPTS, settings, uniform, nodes, **arguments)
    check_accounting(result, nodes)
    for text, tokens, steps in zip(texts, result.tokens, result.steps, strict=True):
        # A last pass with room for one token drafts nothing and draws by itself.
        sure = budget if steps[-1].emitted > 1 else budget - 1
        assert len(tokens) == budget
        assert tokens.tolist()[:sure] == text[:sure]
    assert {step.category for steps in result.steps for step in steps} == {-1}
    if planted:
        assert {step.accepted for steps in result.steps for step in steps} >= {0, 1, 2}


def test_trees_end_where_plain_decoding_ends(llama, make_drafter, coupled):
    """An end token inside a tree, as a node or as the target's own; rows end at different passes."""
    drafter, settings, eos = make_drafter(llama), SamplingSettings(1.0), (EOS_TOKEN_ID, 4, 5, 6)
    endings = set()
    for seed in range(4):
        uniform = torch.rand(len(PROMPTS), 40, generator=generator(seed), dtype=torch.float64)
        texts = [plain_text(llama.model, prompt, settings, row) for prompt, row in zip(PROMPTS, uniform, strict=True)]
        arguments = dict(max_new_tokens=36, eos_token_ids=eos, texts=texts)
        result = coupled(llama, drafter, PROMPTS, settings, uniform, 12, **arguments)
        check_accounting(result, 12)
        for text, tokens, steps in zip(texts, result.tokens, result.steps, strict=True):
            ends = [place for place, token in enumerate(text[:36]) if token in eos]
            assert tokens.tolist() == text[: ends[0] + 1 if ends else 36]
            endings.add((steps[-1].ending, tokens[-1].item() in eos))
    assert endings >= {("accepted", True), ("replacement", True)}


def siblings_seen(self):
    """Everything at most as deep, instead of ancestors."""
    return (self.depth.unsqueeze(1) < self.depth.unsqueeze(2)) | torch.eye(self.nodes, dtype=torch.bool)


def path_not_copied(self, places):
    order = torch.nn.functional.pad(places, (1, 0)).unsqueeze(2)
    self._features = self._features.gather(1, order.expand(-1, -1, self._features.shape[2]))


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (Tree, "ancestors", property(siblings_seen)),
        (cache.BlockDecoder, "_straighten", path_not_copied),
    ],
    ids=["mask sees siblings", "accepted keys stay where they were"],
)
def test_mutants_emit_something_else(llama, make_drafter, coupled, monkeypatch, owner, name, mutant):
    drafter, settings = make_drafter(llama, num_categories=3), SamplingSettings(1.0)
    uniform = torch.rand(len(PROMPTS), 34, generator=generator(0), dtype=torch.float64)
    texts = [plain_text(llama.model, prompt, settings, row) for prompt, row in zip(PROMPTS, uniform, strict=True)]
    arguments = dict(nodes=20, max_new_tokens=30, eos_token_ids=(), texts=texts)
    result = coupled(llama, drafter, PROMPTS, settings, uniform, **arguments)
    assert [tokens.tolist()[:29] for tokens in result.tokens] == [text[:29] for text in texts]
    monkeypatch.setattr(owner, name, mutant)
    result = coupled(llama, drafter, PROMPTS, settings, uniform, **arguments)
    assert all(tokens.tolist()[:29] != text[:29] for tokens, text in zip(result.tokens, texts, strict=True))


def compare_with_fresh_prefill(target, drafter, decoder, sequences, nodes):
    """Logits of every node, and the draft, against passes that know no cache."""
    out = decoder.draft()
    tree = draft_tree(drafter, out, nodes)
    logits = decoder.score(tree.tokens, tree)
    for row, ids in enumerate(sequences):
        texts = [ids]
        for token, parent in zip(tree.tokens[row].tolist(), tree.parent[row].tolist(), strict=True):
            texts.append([*texts[parent + 1], token])
        for node, text in enumerate(texts):
            with torch.no_grad():
                fresh = target.model(torch.tensor([text])).logits[0, -1]
            torch.testing.assert_close(logits[row, node], fresh, atol=1e-4, rtol=1e-4)
        compare_draft_with_fresh_prefill(target, drafter, out, row, ids)
    return tree


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_caches_keep_the_accepted_path(request, make_drafter, name, attention):
    """After paths of every length, different ones in the rows of a batch, and again after rows left."""
    target = request.getfixturevalue(name)
    drafter = make_drafter(target, num_categories=3)
    decoder = BlockDecoder(target.model, drafter)
    target.model.set_attn_implementation(attention)
    try:
        sequences = [list(prompt) for prompt in PROMPTS]
        decoder.start([torch.tensor(ids) for ids in sequences])
        for step in range(4):
            compare_with_fresh_prefill(target, drafter, decoder, sequences, nodes=30)
            lengths = [(step + 2 * row) % 4 for row in range(3)]
            tree = join([planted_tree([10, 11, 12, 13], 24 - row, 3, generator(step + 9 * row)) for row in range(3)])
            decoder.score(tree.tokens, tree)
            path = torch.full((3, 3), -1)
            for row, length in enumerate(lengths):
                # The lightest node of this depth: its path is furthest from where it must go.
                node = int(torch.where(tree.depth[row] == length)[0][-1]) if length else -1
                for place in reversed(range(length)):
                    path[row, place] = node
                    node = int(tree.parent[row, node])
                sequences[row] += [*tree.tokens[row, path[row, :length]].tolist(), 20 + step + row]
            decoder.commit(lengths, torch.arange(3) + 20 + step, path)
        decoder.keep([0, 2])
        compare_with_fresh_prefill(target, drafter, decoder, [sequences[0], sequences[2]], nodes=30)
        # A chain after trees.
        decoder.score(torch.tensor([[4, 5, 6], [7, 8, 9]]))
        decoder.commit([2, 0], torch.tensor([30, 31]))
        after = [[*sequences[0], 4, 5, 30], [*sequences[2], 31]]
        compare_with_fresh_prefill(target, drafter, decoder, after, nodes=30)
    finally:
        target.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("branches", [0, 1, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_decoding_is_plain_greedy_decoding(request, make_drafter, name, branches):
    target = request.getfixturevalue(name)
    drafter = make_drafter(target, num_categories=branches, draft_vocab_size=20 if branches == 4 else None)
    arguments = dict(max_new_tokens=11, do_sample=False, mode="tree", nodes=30, eos_token_ids=())
    together = generate(target, drafter, PROMPTS, **arguments)
    for prompt, tokens in zip(PROMPTS, together.tokens, strict=True):
        alone = generate(target, drafter, [prompt], **arguments)
        assert tokens.tolist() == alone.tokens[0].tolist() == plain_greedy(target, prompt, 11)


def test_a_tree_of_one_node_accepts_like_the_first_greedy_token(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=1, block_length=1)
    arguments = dict(max_new_tokens=20, do_sample=False, eos_token_ids=())
    chain = generate(llama, drafter, PROMPTS, **arguments)
    tree = generate(llama, drafter, PROMPTS, mode="tree", nodes=1, **arguments)
    assert [[step.accepted for step in steps] for steps in tree.steps] == [
        [step.accepted for step in steps] for steps in chain.steps
    ]


@pytest.mark.parametrize(
    ("branches", "settings", "eos", "nodes"),
    [
        (1, SamplingSettings(1.0), (), 6),
        (3, SamplingSettings(1.5, top_k=4, top_p=0.9), (2, 4), 10),
        (2, SamplingSettings(0.8, top_k=3), (0,), 3),
    ],
    ids=str,
)
def test_simulated_loop_has_the_joint_law(toy, make_drafter, branches, settings, eos, nodes):  # noqa: F811
    p_value, result = simulated_p_value(toy, make_drafter, "tree", branches, settings, eos, nodes=nodes)
    assert p_value > FAIR
    assert 0.05 < result.accepted_length


def test_bfloat16_models_decode_in_trees(llama, make_drafter):
    model = copy.deepcopy(llama.model).to(torch.bfloat16)
    drafter = make_drafter(llama).to(torch.bfloat16).attach(model)
    arguments = dict(max_new_tokens=9, mode="tree", nodes=12, eos_token_ids=())
    result = generate(model, drafter, PROMPTS, SETTINGS[1], generator=generator(0), **arguments)
    assert [len(tokens) for tokens in result.tokens] == [9, 9, 9]
    check_accounting(result, 12)
    again = generate(model, drafter, PROMPTS, SETTINGS[1], generator=generator(0), **arguments)
    assert [t.tolist() for t in again.tokens] == [t.tolist() for t in result.tokens]


def test_trees_at_the_context_limit(llama, make_drafter):
    prompt, limit = list(range(4, 34)), llama.model.config.max_position_embeddings
    result = generate(
        llama,
        make_drafter(llama),
        [prompt, [5]],
        max_new_tokens=limit - len(prompt),
        do_sample=False,
        mode="tree",
        eos_token_ids=(),
    )
    assert result.tokens[0].tolist() == plain_greedy(llama, prompt, limit - len(prompt))


# -- replay ----------------------------------------------------------------------------------------


def passes_along(text, trees_at):
    """Passes of the loop along a text, by looking its blocks up; ``trees_at``: the prefixes of every anchor's tree."""
    passes = done = 0
    while done < len(text):
        accepted = 0
        while done + accepted < len(text) and tuple(text[done : done + accepted + 1]) in trees_at[done]:
            accepted += 1
        passes, done = passes + 1, done + accepted + 1
    return passes


def prefixes(tree, row, nodes):
    """The first ``nodes`` prefixes of a tree."""
    found = [()]
    for token, parent in zip(tree.tokens[row, :nodes].tolist(), tree.parent[row, :nodes].tolist(), strict=True):
        found.append((*found[parent + 1], token))
    return {u for u, valid in zip(found[1:], tree.valid[row, :nodes].tolist(), strict=True) if valid}


@pytest.fixture(scope="module")
def sampled(llama, make_drafter):
    """Target-sampled texts of different lengths."""
    settings = SamplingSettings(temperature=0.5, top_k=10)
    prompts = [EncodedPrompt(str(i), "random", (4 + i % 8, 5 + i % 3, 6)) for i in range(24)]
    arguments = dict(max_new_tokens=30, taps=make_drafter(llama).config.target_layer_ids)
    return sample_batch(llama, prompts, settings, generator=generator(0), **arguments)


@pytest.mark.parametrize("branches", [0, 3])
def test_replay_follows_the_text(llama, make_drafter, sampled, branches):
    """All sizes and temperatures from one pass, against looking every block up in trees built one by one."""
    drafter, sizes, temperatures = make_drafter(llama, num_categories=branches), (40, 1, 9, 200), (0.0, 1.5)
    scores = score(drafter, sampled, temperatures, proposal="tree", nodes=sizes)
    cells = [(t, n) for t in (temperatures if branches else temperatures[:1]) for n in sizes]
    assert len(scores) == len(sampled) * len(cells)
    assert scores.nodes.tolist() == [n for _ in sampled for _, n in cells]
    rows = scores.itertuples()
    for trajectory in sampled:
        text = trajectory.response_ids.tolist()
        with torch.no_grad():
            output = pack_first(trajectory, len(text), 3).run(drafter)
        for temperature, size in cells:
            tree = draft_tree(drafter, output, size, category_temperature=temperature)
            names = [prefixes(tree, anchor, size) for anchor in range(len(text))]
            row = next(rows)
            assert row.passes == passes_along(text, names)
            assert row.emitted == len(text) and row.drafted == size
            inside = sum(
                tuple(text[a : a + d]) in names[a] for a in range(max(0, len(text) - 2)) for d in range(1, 4)
            )
            assert row.anchor_accepted == inside and row.anchors == max(0, len(text) - 2)
    mean = scores.groupby("nodes").passes.mean()
    assert mean.is_monotonic_decreasing and mean[200] < mean[1]


def test_replay_of_the_greedy_branches(llama, make_drafter, sampled):
    """All K branches in one pass; shared prefixes count once."""
    drafter = make_drafter(llama, num_categories=4)
    trie = score(drafter, sampled, proposal="branches")
    assert (trie.nodes == 12).all() and trie.drafted.between(3, 12).all() and trie.drafted.mean() < 12
    for trajectory, row in zip(sampled, trie.itertuples(), strict=True):
        text = trajectory.response_ids.tolist()
        with torch.no_grad():
            output = pack_first(trajectory, len(text), 3).run(drafter)
            tokens = drafter.greedy_tokens(output.branch_hidden)[: len(text)].tolist()
        names = [{tuple(branch[:d]) for branch in block for d in (1, 2, 3)} for block in tokens]
        assert row.passes == passes_along(text, names)
        assert row.drafted == pytest.approx(sum(map(len, names)) / len(names))
    one = score(make_drafter(llama, num_categories=1), sampled, proposal="branches")
    assert (one.drafted == 3).all() and one.category_temperature.isna().all()


@pytest.mark.parametrize("branches", [1, 4])
def test_online_passes_along_a_stored_text_are_those_of_replay(llama, make_drafter, sampled, monkeypatch, branches):
    """Text by text, the same number: the loop is made to draw the stored tokens."""
    drafter = make_drafter(llama, num_categories=branches)
    replayed = score(drafter, sampled, proposal="tree", nodes=(25,)).passes
    decoder = NumberedDecoder(llama.model, drafter)
    texts = [torch.nn.functional.pad(t.response_ids, (0, 4)) for t in sampled]

    def stored_walk(tree, tokens, p, generator):
        places = zip(decoder.rows, decoder.emitted().tolist(), strict=True)
        coming = torch.stack([texts[row][done : done + 4] for row, done in places])
        depth = torch.nn.functional.pad(tree.depth, (1, 0))
        certain = coming.gather(1, depth).unsqueeze(-1)
        return walk(tree, certain, torch.ones(certain.shape))

    # Stored features are rounded to bfloat16.
    monkeypatch.setattr(cache, "tap_features", lambda *states: tap_features(*states).bfloat16().float())
    monkeypatch.setattr(decoding, "walk", stored_walk)
    result = generate(
        llama,
        drafter,
        [t.prompt_ids for t in sampled],
        max_new_tokens=30,
        mode="tree",
        nodes=25,
        decoder=decoder,
        generator=generator(0),
    )
    check_accounting(result, 25)
    assert [len(tokens) for tokens in result.tokens] == [len(t.response_ids) for t in sampled]
    assert [len(steps) for steps in result.steps] == replayed.tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"proposal": "nope"}, "tree, branches"), ({"proposal": "tree", "nodes": (7, 0)}, "at least 1, got 0")],
)
def test_replay_refuses_what_it_does_not_know(llama, make_drafter, sampled, arguments, words):
    with refused(words):
        score(make_drafter(llama), sampled, **arguments)
