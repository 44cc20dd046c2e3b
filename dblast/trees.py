"""Draft trees from the mixture, and the target's walk through one (beyond the paper).

A node is a prefix u = x_{1:l} of the tokens after an anchor; its weight is
q_dep(u | y) = sum_z pi_z prod_i q_i(x_i | y, z) (eq. 5). The tree of N nodes holds the
N heaviest prefixes. An extension is never heavier than its prefix, so the tree is
closed under ancestors, and expanding the N heaviest prefixes of each level finds it.

One target pass scores the anchor and all nodes, each seeing its own ancestors only.
The walk then draws the target's token at the anchor from p, moves to the child with
that token, draws again, and stops when no child has the token drawn. Every emitted
token is a plain draw of the target: its law is the target's, whatever the tree.

Shapes: B anchors, K branches, b draft positions, V' columns of the draft vocabulary
(or the target's), N nodes, W size of the target's support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.errors import DBlastError
from dblast.support.checks import check_finite

#: Nodes of a draft tree, if nobody says otherwise.
TREE_NODES = 28
#: Log-probabilities (anchors * K * b * V') that :func:`draft_tree` holds at once: 16 MiB in float32.
TREE_LOGITS = 2**22


@dataclass(frozen=True)
class Tree:
    """The nodes of B trees, heaviest first: a node's parent stands before it, and the first n nodes are the tree of n.

    Of equally heavy nodes the shorter stands first. A row with fewer than N prefixes of positive weight ends with
    nodes that are not valid: token 0, parent -1, depth 0, no child of anything.

    Attributes:
        tokens: (B, N) target token ids.
        parent: (B, N) place of the parent in the same row, -1 for the anchor.
        depth: (B, N) tokens from the anchor, 1..b.
        log_weight: (B, N) float64 log q_dep(u | y), nats.
        valid: (B, N) bool.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    log_weight: Tensor
    valid: Tensor

    @property
    def nodes(self) -> int:
        """N."""
        return self.tokens.shape[1]

    def cut(self, nodes: int) -> Tree:
        """The trees of the ``nodes`` heaviest prefixes (all there are, if fewer)."""
        return Tree(**{name: value[:, :nodes] for name, value in vars(self).items()})

    @property
    def ancestors(self) -> Tensor:
        """(B, N, N) bool: entry [., n, m] is True if m is n itself or one of its ancestors."""
        batch, nodes = self.tokens.shape
        # One column more, for the anchor: place -1 and everything above it.
        seen = torch.zeros(batch, nodes, nodes + 1, dtype=torch.bool, device=self.tokens.device)
        here = torch.arange(nodes, device=self.tokens.device).expand(batch, -1)
        for _ in range(int(self.depth.max()) + 1):
            seen.scatter_(2, here.remainder(nodes + 1).unsqueeze(2), True)
            here = torch.where(here < 0, here, self.parent.gather(1, here.clamp(min=0)))
        return seen[..., :nodes]

    def child(self, node: Tensor, token: Tensor) -> Tensor:
        """The child of a node (-1: of the anchor) with a token, (B,) and (B,) to (B,); -1 if it has none."""
        match = (self.parent == node.unsqueeze(1)) & (self.tokens == token.unsqueeze(1)) & self.valid
        return torch.where(match.any(1), match.int().argmax(1), -1)

    def is_leaf(self, node: Tensor) -> Tensor:
        """Whether a node (-1: the anchor) has no children, (B,) to (B,) bool."""
        return ~((self.parent == node.unsqueeze(1)) & self.valid).any(1)

    def follow(self, tokens: Tensor) -> Tensor:
        """How far a text runs inside the tree.

        Places grow along a path, so the text runs inside the tree of the first n nodes
        as far as the places stay below n.

        Args:
            tokens: (B, b) text after each anchor; negative tokens are in no tree.

        Returns:
            (B, b): place of the node that the first i + 1 tokens are, N from the first that leaves the tree.
        """
        node = torch.full_like(tokens[:, 0], -1)
        places = []
        for token in tokens.unbind(1):
            child = self.child(node, token)
            node = torch.where(child < 0, self.nodes, child)  # nothing has N as its parent
            places.append(node)
        return torch.stack(places, dim=1)


def first_largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest values of the last dimension and their places, largest first, of equals the first.

    ``topk`` leaves the choice among equals open; logits in bfloat16 have many.
    """
    edge = values.topk(count, dim=-1).values[..., -1:]
    above, level = values > edge, values == edge
    room = count - above.sum(-1, keepdim=True)
    kept = above | (level & (level.cumsum(-1) <= room))
    place = kept.nonzero()[:, -1].view(*values.shape[:-1], count)
    largest, order = values.gather(-1, place).sort(dim=-1, descending=True, stable=True)
    return largest, place.gather(-1, order)


def _candidates(log_q: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``width`` likeliest columns of every branch at one slot.

    Args:
        log_q: (B, K, V').

    Returns:
        ``columns`` (B, C), C = K * width, ascending if K > 1; ``q`` (B, K, C) float64 of each under every branch,
        zero where a column is repeated; ``unseen`` (B, K), the most that a column left out can have.
    """
    largest, columns = first_largest(log_q, width)
    branches = log_q.shape[1]
    columns = columns.flatten(1)
    repeated = torch.zeros_like(columns, dtype=torch.bool)
    if branches > 1:
        columns = columns.sort(-1).values
        repeated[:, 1:] = columns[:, 1:] == columns[:, :-1]
    q = log_q.gather(-1, columns.unsqueeze(1).expand(-1, branches, -1)).double().exp()
    return columns, q.masked_fill(repeated.unsqueeze(1), 0.0), largest[..., -1].double().exp()


def heaviest_prefixes(
    position_log_q: Tensor, log_prior: Tensor, nodes: int, token_ids: Tensor | None = None
) -> Tree:
    """The tree of the N heaviest prefixes of the mixture, exactly, in b vectorised steps.

    A step extends the N heaviest prefixes of one level. At K = 1 only the N likeliest
    tokens of the slot can matter: any other has N siblings before it. With more
    branches a token may be heavy in the mixture without being among the likeliest of
    any branch. So a step takes the M likeliest of every branch, bounds what a token
    left out could weigh by sum_z w_z q_z^(M) with q_z^(M) the M-th largest, and doubles M
    until that is less than the N-th weight found.

    Weights are float64 products, not sums of logarithms: rounding is monotone, so that no
    extension comes out heavier than its prefix, and equal weights stay equal.

    Args:
        position_log_q: (B, K, b, V') log q_i(. | y, z), -inf where q = 0.
        log_prior: (B, K) log q(z | y) at the category temperature in use.
        nodes: N at most.
        token_ids: (V',) target id of every column; None if columns are target ids.

    Raises:
        DBlastError: fewer than one node.
    """
    if nodes < 1:
        raise DBlastError(f"a draft tree needs at least 1 node, got {nodes}")
    batch, branches, length, vocabulary = position_log_q.shape
    joint = log_prior.double().exp().unsqueeze(1)  # (B, F, K): what branch z adds to the weight of a prefix
    best = joint.new_zeros(batch, nodes)  # the N largest weights so far
    levels = []
    for slot in range(length):
        width = min(nodes, vocabulary)
        while True:
            columns, q, unseen = _candidates(position_log_q[:, :, slot], width)
            # A sum and not a matrix product, whose rounding depends on the place in the matrix.
            weight = sum(joint[:, :, z, None] * q[:, None, z] for z in range(branches)).flatten(1)
            weight, place = first_largest(weight, min(nodes, weight.shape[1]))
            running = torch.cat([best, weight], dim=1).topk(nodes, dim=1).values
            bound = (joint * unseen.unsqueeze(1)).sum(-1).amax(1) * (1 + 1e-9)
            if branches == 1 or width == vocabulary or ((bound < running[:, -1]) | (bound == 0)).all():
                break
            width = min(2 * width, vocabulary)
        best = running
        parent, column = place // columns.shape[1], place % columns.shape[1]
        levels.append((weight, columns.gather(1, column), parent))
        shares = q.transpose(1, 2).gather(1, column.unsqueeze(2).expand(-1, -1, branches))
        joint = joint.gather(1, parent.unsqueeze(2).expand(-1, -1, branches)) * shares
    return _assemble(levels, nodes, token_ids)


def branch_trie(branch_tokens: Tensor, log_prior: Tensor) -> Tree:
    """The trie of the K greedy branches, at most K * b nodes; a node weighs the prior of its branches (eq. 18).

    Args:
        branch_tokens: (B, K, b) greedy token of every branch, target ids.
        log_prior: (B, K) at the category temperature in use; branches without mass are left out.
    """
    batch, branches, length = branch_tokens.shape
    prior = log_prior.double().exp()
    same = (branch_tokens.unsqueeze(1) == branch_tokens.unsqueeze(2)).long().cumprod(-1).bool()  # (B, K, K, b)
    itself = torch.arange(branches, device=branch_tokens.device).expand(batch, -1)
    levels, before = [], itself
    for slot in range(length):
        agree = same[..., slot]
        first = agree.int().argmax(-1)  # the first branch with this prefix stands for all
        weight = (agree * prior.unsqueeze(1)).sum(-1) * (first == itself)
        levels.append((weight, branch_tokens[..., slot], before))
        before = first
    return _assemble(levels, branches * length, None)


def _assemble(levels: list[tuple[Tensor, Tensor, Tensor]], nodes: int, token_ids: Tensor | None) -> Tree:
    """The N heaviest of all levels as one tree.

    Args:
        levels: for every depth, weight, column (or token) and place of the parent one level up, (B, F) each.
    """
    weight, column, parent = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    sizes = [len(level[0][0]) for level in levels]
    starts = [0, 0, *torch.tensor(sizes).cumsum(0).tolist()]
    device = weight.device
    depth = torch.repeat_interleave(torch.arange(1, len(sizes) + 1), torch.tensor(sizes)).to(device)
    # Places one level up become places in the concatenation, then ranks.
    parent = parent + torch.tensor(starts, device=device)[depth - 1]
    kept, place = first_largest(weight, min(nodes, weight.shape[1]))
    rank = torch.full_like(parent, -1).scatter(1, place, torch.arange(place.shape[1], device=device).expand_as(place))
    parent = rank.gather(1, parent.gather(1, place))
    depth, column, valid = depth.expand_as(weight).gather(1, place), column.gather(1, place), kept > 0
    tokens = column if token_ids is None else token_ids[column]
    tree = Tree(
        tokens=tokens.masked_fill(~valid, 0),
        parent=parent.masked_fill(~valid | (depth == 1), -1),
        depth=depth.masked_fill(~valid, 0),
        log_weight=kept.log(),
        valid=valid,
    )
    return tree.cut(max(1, int(valid.sum(1).max())))


def draft_trees(
    drafter: DBlastDrafter, output: DraftOutput, nodes: int, category_temperatures: Sequence[float]
) -> list[Tree]:
    """The trees of the N heaviest prefixes of a drafter pass, B = number of its blocks, for every Z_T.

    Raises:
        DBlastError: fewer than one node, or a negative category temperature.
    """
    hidden = output.branch_hidden
    token_ids = drafter.draft_token_ids if drafter.config.draft_vocab_size else None
    vocabulary = drafter.config.draft_vocab_size or drafter.config.vocab_size
    rows = max(1, TREE_LOGITS // (hidden[0, ..., 0].numel() * vocabulary))
    priors = [output.log_prior(temperature).split(rows) for temperature in category_temperatures]
    parts = []
    for number, some in enumerate(hidden.split(rows)):
        logits = drafter.logits(some)
        check_finite(logits.amax(-1), "the drafter's logits")
        log_q = logits.log_softmax(-1)
        parts.append([heaviest_prefixes(log_q, prior[number], nodes, token_ids) for prior in priors])
    return [join(list(trees)) for trees in zip(*parts, strict=True)]


def draft_tree(drafter: DBlastDrafter, output: DraftOutput, nodes: int, *, category_temperature: float = 1.0) -> Tree:
    """:func:`draft_trees` for one category temperature."""
    return draft_trees(drafter, output, nodes, [category_temperature])[0]


def join(trees: list[Tree]) -> Tree:
    """Trees of several batches as one, padded to the largest N with nodes that are not valid."""
    if len(trees) == 1:
        return trees[0]
    widest = max(tree.nodes for tree in trees)
    fill = {"tokens": 0, "parent": -1, "depth": 0, "log_weight": float("-inf"), "valid": False}

    def padded(tree: Tree, name: str) -> Tensor:
        return torch.nn.functional.pad(getattr(tree, name), (0, widest - tree.nodes), value=fill[name])

    return Tree(**{name: torch.cat([padded(tree, name) for tree in trees]) for name in fill})


# -- the target's walk ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeOutcome:
    """Where the target walked in B trees.

    Attributes:
        path: (B, d) accepted nodes, d the depth of the deepest tree; -1 after the last.
        drafted: (B, d) their tokens; 0 after the last.
        accepted: (B,) their number.
        token: (B,) the target's own token after them.
        leaf: (B,) bool, whether the last accepted node (or the anchor) has no children: nothing was turned down.
    """

    path: Tensor
    drafted: Tensor
    accepted: Tensor
    token: Tensor
    leaf: Tensor


def draw_token(tokens: Tensor, p: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulated p first exceeds a uniform number.

    Args:
        tokens, p: (..., W) support and probabilities; p = 0 is never drawn.
        uniform: (...,) in [0, 1).
    """
    reached = p.double().cumsum(-1)
    place = (reached <= uniform.double().unsqueeze(-1) * reached[..., -1:]).sum(-1, keepdim=True)
    return tokens.gather(-1, place).squeeze(-1)


def walk(
    tree: Tree,
    tokens: Tensor,
    p: Tensor,
    *,
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
) -> TreeOutcome:
    """Draw the target's tokens along the tree until one is no child.

    Args:
        tokens, p: (B, N + 1, W) the target's support and probabilities: entry 0 after the
            anchor, entry n + 1 after node n.
        generator: on the device of p.
        uniform: (B, d + 1) in [0, 1), one number for every position after the anchor,
            instead of numbers drawn from ``generator``; d is the depth of the deepest tree.
    """
    batch, depth = len(p), int(tree.depth.max())
    rows = torch.arange(batch, device=p.device)
    if uniform is None:
        uniform = torch.rand(batch, depth + 1, generator=generator, device=p.device, dtype=torch.float64)
    node = torch.full((batch,), -1, device=p.device)
    token, accepted, alive = torch.zeros_like(node), torch.zeros_like(node), torch.ones_like(node, dtype=torch.bool)
    path = torch.full((batch, depth), -1, device=p.device)
    for step in range(depth + 1):
        drawn = draw_token(tokens[rows, node + 1], p[rows, node + 1], uniform[:, step])
        token = torch.where(alive, drawn, token)
        child = tree.child(node, drawn)
        alive = alive & (child >= 0)
        if not alive.any():
            break
        path[:, step] = torch.where(alive, child, -1)
        node = torch.where(alive, child, node)
        accepted += alive
    drafted = tree.tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, 0)
    return TreeOutcome(path, drafted, accepted, token, tree.is_leaf(node))
