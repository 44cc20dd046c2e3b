"""Toy targets and drafters small enough to enumerate, toy scores, and the tolerances that comparisons use."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm, t
from torch import Tensor

#: A toy target: the distribution over the next token after every prefix shorter than its depth.
ToyTarget = dict[tuple[int, ...], list[float]]


def assert_close(actual, expected, tolerance: float = 1e-6) -> None:
    """Equal up to ``tolerance``, absolute plus relative, element by element; infinities must match."""
    actual = torch.as_tensor(actual, dtype=torch.float64).detach()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach()
    if expected.ndim == 0:
        expected = expected.expand_as(actual)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


#: What roundings add up to in a small model, relative and absolute; bfloat16 is what float32 numbers are stored as.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2**-6}


def assert_same_computation(actual: Tensor, expected: Tensor) -> None:
    """The same numbers, computed twice: equal up to the rounding of their type; integers and truth values are equal.

    Equal bits would test the machine: the order of a sum, and so its last bits, depends on shapes, on the number of
    threads, on the processor, and on where in memory the numbers begin, which differs between weights made in memory
    and weights read from a file. What is only copied (weights, tokens, files) is compared with ``torch.equal``.
    """
    assert actual.dtype == expected.dtype
    assert_close(actual, expected, ROUNDING.get(actual.dtype, 0.0))


def assert_greedy(tokens: Tensor, logits: Tensor) -> None:
    """The tokens are likeliest, (...) of (..., V); either of two that rounding cannot tell apart may be chosen."""
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert_close(chosen, logits.amax(-1), 1e-5)


def target_logits(drafter, hidden: Tensor) -> Tensor:
    """The drafter's logits with a column for every token of the target, -inf outside its draft vocabulary."""
    logits = drafter.logits(hidden)
    if not drafter.config.draft_vocab_size:
        return logits
    dense = logits.new_full((*logits.shape[:-1], drafter.config.vocab_size), -torch.inf)
    dense[..., drafter.draft_token_ids] = logits
    return dense


#: Standard errors that an estimate may be off. A right one is off by more once in 150,000 seeds (normal law, both
#: sides), so that a hundred such comparisons raise a false alarm in less than one of a thousand seeds.
ERRORS = 4.5


def assert_within_errors(estimate, expected, standard_error, errors: float = ERRORS, units: int | None = None) -> None:
    """Every estimate lies within so many standard errors of what is expected; a standard error of 0 wants equality.

    Args:
        units: prompts, or whatever the standard error was estimated from, where they are few: by Student's law more
            errors are then allowed, with the same chance of a false alarm.
    """
    if units is not None:
        errors = t.isf(norm.sf(errors), units - 1)
    estimate, expected, standard_error = (
        torch.as_tensor(x, dtype=torch.float64).detach() for x in (estimate, expected, standard_error)
    )
    # The last term is for rounding alone.
    allowed = errors * standard_error + 1e-6 * expected.abs()
    distance = (estimate - expected).abs()
    assert (distance <= allowed).all(), f"{estimate} against {expected}: {distance / standard_error} standard errors"


def frequency_error(probability, draws: int):
    """Standard error of a frequency among so many independent draws."""
    probability = torch.as_tensor(probability, dtype=torch.float64)
    return (probability * (1 - probability) / draws).sqrt()


def move_in_memory(module: torch.nn.Module) -> None:
    """Put the weights, unchanged, one number behind an aligned address, where some kernels add in another order."""
    for tensor in (*module.parameters(), *module.buffers()):
        storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        tensor.data = storage[1:].view(tensor.shape).copy_(tensor.data)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_distribution(vocabulary: int, rng: torch.Generator, zeros: bool = False) -> list[float]:
    """A distribution over the vocabulary; ``zeros`` removes one random token, as top-k does."""
    weights = torch.randn(vocabulary, generator=rng, dtype=torch.float64).mul(1.2).exp()
    if zeros:
        weights[torch.randint(vocabulary, (1,), generator=rng)] = 0.0
    return (weights / weights.sum()).tolist()


def random_target(vocabulary: int, depth: int, rng: torch.Generator, zeros: bool = False) -> ToyTarget:
    """A random autoregressive target, one unrelated distribution for every prefix of up to depth - 1 tokens."""
    return {
        prefix: random_distribution(vocabulary, rng, zeros)
        for length in range(depth)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    }


def sequence_probability(target: ToyTarget, tokens: tuple[int, ...], start: int = 0) -> float:
    """p(tokens[start:] | tokens[:start])."""
    return math.prod(target[tokens[:i]][tokens[i]] for i in range(start, len(tokens)))


def all_blocks(vocabulary: int, length: int) -> Tensor:
    """Every block of that length, (V^length, length)."""
    return torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))


def target_log_p(target: ToyTarget, blocks: Tensor) -> Tensor:
    """log p of every token of every block given its predecessors, (N, b) float64."""
    rows = [[target[tuple(row[:i])][row[i]] for i in range(len(row))] for row in blocks.tolist()]
    return torch.tensor(rows, dtype=torch.float64).log()


def random_position_log_q(branches: int, length: int, vocabulary: int, rng: torch.Generator) -> Tensor:
    """log q_i(. | z) of a random drafter at one anchor, (K, b, V) float64."""
    return torch.randn(branches, length, vocabulary, generator=rng, dtype=torch.float64).mul(1.2).log_softmax(-1)


def random_log_prior(branches: int, rng: torch.Generator) -> Tensor:
    """(K,) float64."""
    return torch.randn(branches, generator=rng, dtype=torch.float64).log_softmax(-1)


def block_log_q(position_log_q: Tensor, blocks: Tensor) -> Tensor:
    """log q_i(x_i | z) of every token of every block, (N, K, b)."""
    index = blocks[:, None, :, None].expand(-1, position_log_q.shape[0], -1, 1)
    return position_log_q.expand(len(blocks), -1, -1, -1).gather(-1, index).squeeze(-1)


def greedy_branch_distribution(branch_tokens: Tensor, log_prior: Tensor, prefix: Tensor, vocab_size: int) -> Tensor:
    """Eq. 20 in words, as a vector: among the branches (K, b) with this prefix (i,), the share of prior of each next token.

    (V,); all zero if no branch has the prefix.
    """
    mass = log_prior.exp() * (branch_tokens[:, : len(prefix)] == prefix).all(-1)
    q = torch.zeros(vocab_size, dtype=mass.dtype).scatter_add_(0, branch_tokens[:, len(prefix)], mass)
    return q / mass.sum() if mass.sum() > 0 else q


def soft_distribution(position_log_q: Tensor, log_prior: Tensor, prefix: Tensor) -> Tensor:
    """Eq. 12 in words, as a vector: the branches' (K, b, V) next-token laws, weighted by how likely each drafts the prefix.

    (V,).
    """
    chance = log_prior.exp()
    for i, token in enumerate(prefix.tolist()):
        chance = chance * position_log_q[:, i, token].exp()
    return (chance.unsqueeze(-1) * position_log_q[:, len(prefix)].exp()).sum(0) / chance.sum()


def category_log_prior(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / Z_T) over the last dimension; all mass on the first best category at Z_T = 0."""
    if temperature == 0:
        best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
        return best.to(logits.dtype).log()
    return (logits / temperature).log_softmax(-1)


def random_branches(branches: int, length: int, vocabulary: int, rng: torch.Generator) -> Tensor:
    """Greedy blocks of one anchor, (K, b): each leaves the first branch at a random slot, or never (a duplicate)."""
    tokens = torch.randint(vocabulary, (branches, length), generator=rng)
    shared = torch.randint(length + 1, (branches, 1), generator=rng)
    return torch.where(torch.arange(length) < shared, tokens[:1], tokens)


def prompt_scores(passes: np.ndarray, setting: str, temperature: float, **names) -> pd.DataFrame:
    """Replay scores of one variant on 60 tokens of every prompt: two tasks in turn, a third of the prompts for calibration."""
    n = len(passes)
    return pd.DataFrame(
        {
            "setting": setting,
            "prompt_id": [f"p{i}" for i in range(n)],
            "task": ["chat", "code"] * (n // 2),
            "category_temperature": temperature,
            "emitted": 60,
            "passes": passes,
            "split": ["calibration"] * (n // 3) + ["held_out"] * (n - n // 3),
            "construction": "all_prefixes",
            **names,
        }
    )


def toy_scores(variants, seeds=(0,), settings=("low", "high"), noise=0.0) -> tuple[pd.DataFrame, np.ndarray]:
    """Scores of toy drafters on the same 12 prompts, and the passes of the held-out ones without any drafter's factor.

    Args:
        variants: pairs of what names a drafter (its columns) and the factor of its passes. Where it has several
            categories Z_T = 1 is better than 0, so that a mistaken choice shows.
    """
    rng = np.random.default_rng(0)
    passes = rng.uniform(20, 30, 12)
    parts = []
    for (names, factor), seed, setting in itertools.product(variants, seeds, settings):
        for temperature in (0.0, 1.0) if names["K"] > 1 else (np.nan,):
            mine = passes * factor * (1.2 if temperature == 0 else 1.0) * (1 + noise * rng.normal(size=12))
            parts.append(prompt_scores(mine, setting, temperature, seed=seed, **names))
    return pd.concat(parts, ignore_index=True), passes[4:]


def macro_length(passes: np.ndarray, factor: float) -> float:
    """Accepted length of :func:`prompt_scores`' held-out prompts, averaged over the two tasks."""
    saved = [passes[i::2] * factor for i in (0, 1)]
    return float(np.mean([(60 * len(part) - part.sum()) / part.sum() for part in saved]))
