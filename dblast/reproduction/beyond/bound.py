"""The most that any exact scheme can accept when drafts are drawn from a given law; solved on small vocabularies.

A scheme draws a trie C of prefixes from Q, walks from the root along nodes of C, stops, and adds one token of its own;
what follows is fresh from p. Let A(u) be the probability that the walk passes through the prefix u (A(root) = 1), and
e(u) that it stops right above u and adds u's last token. Text of law p means, for every prefix u,

    A(u) + sum over v on the way to u, u included, of e(v) p(u | v) = p(u),

and the same equation one token shorter turns it into e(u) = A(parent) p(u | parent) - A(u). So a scheme is exact if and
only if A(u) <= A(parent) p(u | parent) everywhere. The rest is what C allows: A = sum_C Q(C) A_C with A_C a flow
inside C, 1 at the root and never more below a node than in it. The largest sum of A(u) is a linear programme.

* A fixed tree: A(u) = p(u) inside it. The walk of :mod:`dblast.trees` is optimal.
* One block drawn from q: A(u) = min(q(u), A(parent) p(u | parent)), the largest at every prefix, and what block
  verification (arXiv 2403.10444) attains. Token by token it is the product of min(q, p), at most that.
* One token, several drafts: the programme is a transport problem with the value
  1 + min over sets T of tokens of p(T) - Q(all drafts in T) (arXiv 2310.15141, 2502.18779).

Prefixes are tuples of tokens 0..V-1; a law of blocks is an array of shape (V,) * b.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import comb

import numpy as np
import pandas as pd
from scipy.optimize import linprog

Prefix = tuple[int, ...]
#: A trie: its prefixes, without the root, closed under ancestors.
Trie = frozenset[Prefix]


def prefix_law(blocks: np.ndarray) -> dict[Prefix, float]:
    """Probability of every prefix, the root () included, from the law of blocks of shape (V,) * b."""
    b, law = blocks.ndim, {}
    for length in range(b + 1):
        sums = blocks.sum(axis=tuple(range(length, b)))
        law |= {tuple(int(i) for i in place): float(value) for place, value in np.ndenumerate(sums)}
    return law


def _given(law: Mapping[Prefix, float], prefix: Prefix, vocabulary: int) -> np.ndarray:
    """The law of the next token; zeros after a prefix that cannot be."""
    whole = law[prefix]
    return np.array([law[*prefix, v] / whole if whole > 0 else 0.0 for v in range(vocabulary)])


def walk_length(tree: Trie, p: np.ndarray) -> float:
    """Accepted length of a fixed tree: the sum of p(u) over its nodes."""
    law = prefix_law(p)
    return sum(law[u] for u in tree)


def heaviest_tree(q: np.ndarray, nodes: int) -> Trie:
    """The N prefixes with the largest q, shorter ones first among equals."""
    law = prefix_law(q)
    return frozenset(sorted((u for u in law if u), key=lambda u: (-law[u], len(u), u))[:nodes])


def block_lengths(q: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """Accepted length of one block drawn from q, verified by token and by block; the second is the optimum."""
    vocabulary, q_law, p_law = q.shape[0], prefix_law(q), prefix_law(p)
    by_token, by_block = {(): 1.0}, {(): 1.0}
    for u in sorted(q_law, key=len)[1:]:
        above = u[:-1]
        next_p, next_q = (_given(law, above, vocabulary)[u[-1]] for law in (p_law, q_law))
        by_token[u] = by_token[above] * min(next_p, next_q)
        by_block[u] = min(q_law[u], by_block[above] * next_p)
    return sum(by_token.values()) - 1, sum(by_block.values()) - 1


def merged_tries(q: np.ndarray, branches: int) -> dict[Trie, float]:
    """The law of the trie of ``branches`` blocks drawn from q one by one and merged."""
    blocks = [block for block in np.ndindex(q.shape) if q[block] > 0]
    tries: dict[Trie, float] = {}
    for chosen in itertools.product(blocks, repeat=branches):
        trie = frozenset(block[:i] for block in chosen for i in range(1, q.ndim + 1))
        tries[trie] = tries.get(trie, 0.0) + float(np.prod([q[block] for block in chosen]))
    return tries


def sibling_tries(q: np.ndarray, branches: int) -> dict[Trie, float]:
    """The law of a trie with ``branches`` first tokens drawn from q without replacement, and one continuation of each."""
    law, vocabulary, tries = prefix_law(q), q.shape[0], {}
    for first in itertools.permutations(range(vocabulary), branches):
        chance, left = 1.0, 1.0
        for v in first:
            chance *= law[(v,)] / left if left > 0 else 0.0
            left -= law[(v,)]
        tails = [[block for block in np.ndindex(q.shape) if block[0] == v and q[block] > 0] for v in first]
        for chosen in itertools.product(*tails) if chance > 0 else ():
            trie = frozenset(block[:i] for block in chosen for i in range(1, q.ndim + 1))
            share = float(np.prod([q[block] / law[block[:1]] for block in chosen]))
            tries[trie] = tries.get(trie, 0.0) + chance * share
    return tries


def most(tries: Mapping[Trie, float], p: np.ndarray) -> float:
    """The largest accepted length of an exact scheme whose tries have this law: the linear programme above."""
    law, vocabulary = prefix_law(p), p.shape[0]
    # One variable for every trie and node of it: the flow A_C(u).
    place = {(trie, u): i for i, (trie, u) in enumerate((trie, u) for trie in tries for u in sorted(trie, key=len))}
    total, columns = np.zeros(len(place)), {}
    for (trie, u), i in place.items():
        total[i] = tries[trie]
        columns.setdefault(u, []).append((i, tries[trie]))
    rows, limits = [], []
    for trie in tries:
        for above in {(), *trie}:
            below = [place[trie, u] for u in trie if u[:-1] == above]
            if below:
                row = np.zeros(len(place))
                row[below] = 1
                if above:
                    row[place[trie, above]] = -1
                rows.append(row)
                limits.append(0.0 if above else 1.0)
    for u, terms in columns.items():
        # A(u) - p(u | parent) A(parent) <= 0.
        row, share = np.zeros(len(place)), _given(law, u[:-1], vocabulary)[u[-1]]
        for i, chance in terms:
            row[i] += chance
        for i, chance in columns.get(u[:-1], ()):
            row[i] -= share * chance
        rows.append(row)
        limits.append(0.0 if len(u) > 1 else share)
    return float(-linprog(-total, A_ub=np.array(rows), b_ub=np.array(limits), bounds=(0, None)).fun)


def transport_bound(q: np.ndarray, p: np.ndarray, branches: int, replace: bool = True) -> float:
    """The optimum for one token and several drafts in closed form: 1 + min over T of p(T) - Q(all drafts in T).

    Args:
        q, p: (V,).
        replace: drafts are drawn with replacement; else each is another token.
    """
    vocabulary, best = len(p), 1.0
    for mask in itertools.product((False, True), repeat=vocabulary):
        inside = np.array(mask)
        if replace:
            covered = q[inside].sum() ** branches
        else:
            orders = itertools.permutations(np.flatnonzero(inside), branches)
            covered = sum(_order_chance(q, order) for order in orders)
        best = min(best, 1 + p[inside].sum() - covered)
    return float(best)


def _order_chance(q: np.ndarray, order: Sequence[int]) -> float:
    chance, left = 1.0, 1.0
    for v in order:
        chance *= q[v] / left if left > 0 else 0.0
        left -= q[v]
    return chance


def recursive_rejection(q: np.ndarray, p: np.ndarray, branches: int, replace: bool) -> dict[tuple[int, int], float]:
    """One level of recursive rejection: drafts are tried in turn, each against what is left of p.

    Args:
        q, p: (V,) laws of the next token.
        branches: drafts at most.
        replace: drafts are drawn with replacement; else a rejected token is taken out of q.

    Returns:
        P(the i-th draft, i = 0.., is accepted and is the token v) by (i, v).
    """
    accepted: dict[tuple[int, int], float] = {}

    def go(turn: int, chance: float, q: np.ndarray, p: np.ndarray) -> None:
        if turn == branches or chance <= 0 or q.sum() <= 0:
            return
        for v in np.flatnonzero(q > 0):
            key = (turn, int(v))
            accepted[key] = accepted.get(key, 0.0) + chance * min(q[v], p[v])
        left = np.maximum(p - q, 0.0)
        if (rest := left.sum()) <= 0:
            return
        if replace:
            go(turn + 1, chance * rest, q, left / rest)
            return
        for v in np.flatnonzero(q > p):
            # Rejected: gone from q, and nothing of p is left at it.
            without = np.where(np.arange(len(q)) == v, 0.0, q)
            if without.sum() > 0:
                go(turn + 1, chance * (q[v] - p[v]), without / without.sum(), left / rest)

    go(0, 1.0, np.asarray(q, float), np.asarray(p, float))
    return accepted


def merged_length(q: np.ndarray, p: np.ndarray, branches: int) -> float:
    """Accepted length of blocks drawn one by one and merged, verified level by level by recursive rejection.

    Below an accepted token those drafts go on that have it and were not tried yet.
    """
    q_law, p_law, vocabulary = prefix_law(q), prefix_law(p), q.shape[0]

    def go(u: Prefix, live: int) -> float:
        if len(u) == q.ndim:
            return 0.0
        next_q, total = _given(q_law, u, vocabulary), 0.0
        for (turn, v), chance in recursive_rejection(next_q, _given(p_law, u, vocabulary), live, True).items():
            others, share = live - turn - 1, next_q[v]
            below = sum(
                comb(others, k) * share**k * (1 - share) ** (others - k) * go((*u, v), k + 1) for k in range(others + 1)
            )
            total += chance * (1 + below)
        return total

    return go((), branches)


def sibling_length(q: np.ndarray, p: np.ndarray, branches: int) -> float:
    """Accepted length of :func:`sibling_tries`, verified by recursive rejection without replacement at the root, by token below."""
    q_law, p_law, vocabulary = prefix_law(q), prefix_law(p), q.shape[0]

    def go(u: Prefix) -> float:
        if len(u) == q.ndim:
            return 0.0
        both = np.minimum(_given(q_law, u, vocabulary), _given(p_law, u, vocabulary))
        return sum(both[v] * (1 + go((*u, v))) for v in range(vocabulary))

    first = recursive_rejection(_given(q_law, (), vocabulary), _given(p_law, (), vocabulary), branches, False)
    return sum(chance * (1 + go((v,))) for (_, v), chance in first.items())


def random_pair(
    vocabulary: int, length: int, categories: int, noise: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A target of coherent continuations and a drafter's law that is off by ``noise``: both mixtures, (V,) * b.

    The target mixes ``categories`` products of peaked laws with 5 % of an even one; q does so with the logarithms of the
    same laws shifted by normal noise.
    """
    shape = (categories, length, vocabulary)
    logits, weights = 2.5 * rng.normal(size=shape), rng.normal(size=categories)

    def mixture(logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
        laws = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        prior = np.exp(weights) / np.exp(weights).sum()
        letters = "abcdefgh"[:length]
        terms = [laws[:, i] for i in range(length)]
        return np.einsum(f"z,{','.join('z' + x for x in letters)}->{letters}", prior, *terms)

    p = 0.95 * mixture(logits, weights) + 0.05 / vocabulary**length
    return mixture(logits + noise * rng.normal(size=shape), weights + noise * rng.normal(size=categories)), p


def scheme_lengths(q: np.ndarray, p: np.ndarray, branches: int) -> dict[str, float]:
    """Accepted length of every scheme that verifies at most ``branches`` * b tokens, and the optima of their laws."""
    by_token, by_block = block_lengths(q, p)
    nodes = branches * q.ndim
    return {
        "one drawn block, by token": by_token,
        "one drawn block, by block (its optimum)": by_block,
        "fixed tree of the heaviest prefixes (its optimum)": walk_length(heaviest_tree(q, nodes), p),
        "drawn blocks merged, recursive rejection": merged_length(q, p, branches),
        "drawn blocks merged, optimum": most(merged_tries(q, branches), p),
        "distinct first tokens, recursive rejection": sibling_length(q, p, branches),
        "distinct first tokens, optimum": most(sibling_tries(q, branches), p),
        "the best tree there is (p known)": walk_length(heaviest_tree(p, nodes), p),
    }


def scheme_table(
    noises: Sequence[float] = (0.0, 1.0, 2.0), pairs: int = 40, vocabulary: int = 4, length: int = 2, branches: int = 2
) -> pd.DataFrame:
    """Mean accepted length of every scheme over random pairs, a column for every noise of the drafter."""
    columns = {}
    for noise in noises:
        rng = np.random.default_rng(0)
        laws = [random_pair(vocabulary, length, 3, noise, rng) for _ in range(pairs)]
        rows = pd.DataFrame([scheme_lengths(q, p, branches) for q, p in laws])
        columns[f"noise {noise:g}"] = rows.mean()
    return pd.DataFrame(columns).rename_axis("scheme")
