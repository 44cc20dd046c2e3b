"""The best K branches for greedy-branch drafting, when the distribution over blocks is known.

After every prefix, greedy-branch drafting offers the tokens with which its
branches go on (eq. 20). An emitted token that is not offered is never accepted;
at best, every emitted token that is offered is. One prior over the branches
reaches this bound: let it split the mass at every node of the branch trie in
proportion to the target's p(child | prefix). With m the total probability of the
offered children, q(v | prefix) = p(v | prefix) / m is at least p(v | prefix), so
min(1, q / p) = 1. The expected accepted length of one draft step is then

    sum over the distinct non-empty prefixes u of the branches of p(u),

the value of tree verification. The best K branches are therefore the K
root-to-leaf paths that cover the largest total weight of trie nodes. In a tree,
taking the block that adds the most uncovered weight, K times, is optimal.

The distribution is finite: N blocks with weights, an enumerated law or a sample
with weight 1/N each. Where the probability of every prefix is known, as it is of
blocks that a target sampled, weights are (N, b): p of each block's beginnings.
Weights are used as they are; lengths are expected accepted tokens if they are
probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dblast.errors import DBlastError

#: Gains that differ by less than this share count as equal, so that ties are broken
#: by the order of blocks and not by the rounding of sums.
TIE = 1e-12


def best_blocks(blocks: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The branches and prior with the largest expected accepted length of one greedy-branch step.

    Args:
        blocks: (N, b) integer tokens; repeated blocks add their weights.
        weight: (N,) non-negative probabilities of blocks, or (N, b) of their beginnings (equal where these are).
        count: K, number of branches wanted.

    Returns:
        ``(branches, log_prior)``: (K', b) int64 and (K',) float64, K' = min(K, number
        of distinct blocks), in the order of choice: the gain never rises from one
        branch to the next, and the first k branches are the best k. Among blocks of
        equal gain the lexicographically smallest is taken.

    Raises:
        DBlastError: no blocks, wrong shapes, bad weights, or K < 1.
    """
    if count < 1:
        raise DBlastError(f"the number of branches must be at least 1, got {count}")
    blocks, weight = _checked(blocks, weight)
    rows, node, node_weight, _ = _trie(blocks, weight)
    uncovered = node_weight.clone()
    free = torch.ones(len(rows), dtype=torch.bool)
    chosen = []
    for _ in range(min(count, len(rows))):
        gain = uncovered[node].sum(-1).masked_fill(~free, -1.0)
        best = int((gain >= gain.max() * (1 - TIE)).int().argmax())  # the first one; rows are sorted
        chosen.append(best)
        free[best] = False
        uncovered[node[best]] = 0.0
    return rows[chosen], _split(node[chosen], node_weight)


def cover_value(branches: Tensor, blocks: Tensor, weight: Tensor) -> float:
    """Total weight of the distinct non-empty prefixes of the branches, in tokens.

    The expected accepted length of a greedy-branch step with these branches under
    their best prior, and of tree verification of them; an upper bound for any
    other prior.

    Args:
        branches: (K, b) tokens; repeated branches count once.
        blocks, weight: the target's distribution, (N, b) and (N,).

    Raises:
        DBlastError: no blocks or branches, wrong shapes, or bad weights.
    """
    node, node_weight = _branch_nodes(branches, *_checked(blocks, weight))
    return float(node_weight[node.unique()].sum())


def _checked(blocks: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """int64 blocks and float64 weights, or an error that says what is wrong."""
    if blocks.ndim != 2 or blocks.numel() == 0:
        raise DBlastError(f"blocks must be a non-empty (N, b) tensor, got shape {tuple(blocks.shape)}")
    if weight.shape not in (blocks.shape[:1], blocks.shape):
        raise DBlastError(
            f"need one weight per block, or one per beginning of a block: blocks of shape {tuple(blocks.shape)}, "
            f"weights of shape {tuple(weight.shape)}"
        )
    weight = weight.double()
    if not bool((weight.isfinite() & (weight >= 0)).all()) or not bool(weight.sum() > 0):
        raise DBlastError("weights must be finite and not negative, and at least one must be positive")
    return blocks.long(), weight


def _trie(blocks: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All prefixes of the blocks as numbered nodes.

    Returns:
        ``(rows, node, node_weight, inverse)``: the D distinct blocks in lexicographic
        order (D, b), the node number of each of their prefixes (D, b), the weight of
        every node (M,), and the row of every input block (N,).
    """
    rows, inverse = torch.unique(blocks, dim=0, return_inverse=True)
    # Rows are sorted, so equal prefixes are neighbours: a node starts where any column so far changes.
    starts = torch.ones(rows.shape, dtype=torch.bool)
    starts[1:] = (rows[1:] != rows[:-1]).int().cumsum(-1) > 0
    node = starts.T.flatten().cumsum(0).view(rows.shape[1], -1).T - 1
    node_weight = torch.zeros(int(node[-1, -1]) + 1, dtype=weight.dtype)
    if weight.ndim == 2:
        # Already the probability of the node, the same from every block that passes through it.
        node_weight.scatter_reduce_(0, node[inverse].flatten(), weight.flatten(), "amax")
    else:
        mass = torch.zeros(len(rows), dtype=weight.dtype).index_add_(0, inverse, weight)
        node_weight.index_add_(0, node.flatten(), mass.unsqueeze(-1).expand(rows.shape).flatten())
    return rows, node, node_weight, inverse


def _branch_nodes(branches: Tensor, blocks: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Node number of every prefix of every branch (K, b), and the target's weight of every node (M,)."""
    if branches.ndim != 2 or len(branches) == 0 or branches.shape[1] != blocks.shape[1]:
        shape = tuple(branches.shape)
        raise DBlastError(f"branches must be a non-empty (K, {blocks.shape[1]}) tensor like the blocks, got {shape}")
    # Branches join the trie with no weight of their own: they need not be among the blocks.
    together = torch.cat([blocks, branches.long()])
    _, node, node_weight, inverse = _trie(together, torch.cat([weight, weight.new_zeros((len(branches), *weight.shape[1:]))]))
    return node[inverse[len(blocks) :]], node_weight


def _split(node: Tensor, node_weight: Tensor) -> Tensor:
    """Log prior of distinct branches from their nodes (K, b): product of the splits along each path."""
    same = (node.unsqueeze(1) == node).double()  # (K, K, b)
    siblings = torch.cat([torch.ones_like(same[..., :1]), same[..., :-1]], dim=-1)
    share = 1 / same.sum(1)  # branches that share a child count it once together
    weight = node_weight[node]
    offered = (siblings * (weight * share)).sum(1)
    children = (siblings * share).sum(1)
    return torch.where(offered > 0, weight / offered, 1 / children).log().sum(-1)
