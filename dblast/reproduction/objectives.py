"""Training objectives of other papers, in the conventions of :mod:`dblast.losses`, for comparison with its loss.

Shapes: N anchors, K categories, b draft positions, W candidate tokens.

* ``log_q`` (N, K, b), ``log_prior`` (N, K), ``log_p`` (N, b), ``valid`` (N, b) as in
  :mod:`dblast.losses`; ``q`` without a branch is the soft mixture's conditional given
  the realised prefix, which at K = 1 is the drafter's own probability.
* ``log_p_candidates`` (N, b, W): the target's distribution at every position, as log p of
  the W distinct tokens it was recorded for (-inf pads a shorter list). Under top-k sampling with
  k <= W that is all of it, and the sums over the vocabulary below are exact.
* ``log_q_candidates`` (N, K, b, W): log q_i(v | y, z) of those same tokens.

Log-probabilities are clamped at ``LOG_FLOOR``, so that every value and gradient is finite;
positions that do not exist contribute nothing. Sums over a block (*per block*) are averaged
over anchors as the paper's losses are; *per token* terms are averaged with DFlash's decaying
weights as its cross-entropy is (``gamma=math.inf``: evenly).

How much of each source could be read is said with each function: what is not marked as read
is our own reading of a published idea.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dblast.errors import DBlastError
from dblast.losses import (
    LOSSES,
    Loss,
    acceptance_terms,
    conditional_log_q,
    masked_log,
    position_mean,
    prefix_log_q,
    prefix_members,
)

# -- what the objectives share -----------------------------------------------------------------


def _existing(values: Tensor, valid: Tensor | None) -> Tensor:
    return values if valid is None else values.masked_fill(~valid, 0.0)


def log_realised_acceptance(
    log_q: Tensor, log_prior: Tensor, log_p: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the realised token alone says of a position: log min(1, q / p) and log p - log q, both (N, b).

    Over x ~ p their expectations are the acceptance rate sum_v min(p(v), q(v)) (of the first, after exp)
    and KL(p || q). Both are zero at positions that do not exist.
    """
    surprise = masked_log(log_p, valid) - conditional_log_q(log_q, log_prior, valid)
    return (-surprise).clamp(max=0.0), surprise


def candidate_log_q(
    log_q: Tensor, log_prior: Tensor, log_q_candidates: Tensor, valid: Tensor | None = None
) -> Tensor:
    """log q(v | y, x_<i) of the candidate tokens under the soft mixture, (N, b, W) (eq. 12).

    The categories are weighted by their posterior given the realised prefix. At a candidate that is the
    realised token this is :func:`dblast.losses.conditional_log_q`.
    """
    mask = None if valid is None else valid.unsqueeze(-2)
    candidate_mask = None if valid is None else valid[..., None, :, None]
    seen = masked_log(log_q, mask).cumsum(-1).roll(1, -1)  # (N, K, b), of the tokens before each position
    seen[..., 0] = 0.0
    before = prefix_log_q(log_q, log_prior, valid).roll(1, -1)  # (N, b)
    before[..., 0] = 0.0
    weight = (log_prior.float().unsqueeze(-1) + seen).unsqueeze(-1)  # (N, K, b, 1)
    joint = torch.logsumexp(weight + masked_log(log_q_candidates, candidate_mask), dim=-3)
    return joint - before.unsqueeze(-1)


def log_candidate_acceptance(
    log_q: Tensor,
    log_prior: Tensor,
    log_q_candidates: Tensor,
    log_p_candidates: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """log sum_v min(p(v), q(v)) and KL(p || q) of every position given the realised prefix, both (N, b).

    Sums run over the candidates: target mass that was not recorded counts as never accepted, and its
    share of the divergence is left out; so is that of candidates that no branch can draft, which is infinite
    and which no parameter changes. Values at positions that do not exist are finite and meaningless.
    """
    log_q_mixture = candidate_log_q(log_q, log_prior, log_q_candidates, valid)
    log_target = masked_log(log_p_candidates, None if valid is None else valid.unsqueeze(-1))
    overlap = torch.logsumexp(torch.minimum(log_target, log_q_mixture), dim=-1)
    divergence = log_target.exp() * (log_target - log_q_mixture)
    return overlap, divergence.masked_fill(~can_be_drafted(log_q_candidates), 0.0).sum(-1)


def can_be_drafted(log_q_candidates: Tensor) -> Tensor:
    """Which candidates any branch has in its vocabulary: (N, K, b, W) to (N, b, W) bool."""
    return (log_q_candidates > float("-inf")).any(-3)


def _acceptance(
    log_q: Tensor,
    log_prior: Tensor,
    log_p: Tensor,
    valid: Tensor | None,
    log_q_c: Tensor | None,
    log_p_c: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Log acceptance rate and divergence per position: exact with candidates, from the realised token without."""
    if log_q_c is None and log_p_c is None:
        return log_realised_acceptance(log_q, log_prior, log_p, valid)
    if log_q_c is None or log_p_c is None:
        raise DBlastError("log_q_candidates and log_p_candidates belong together: give both or neither")
    if log_p_c.shape[:-1] != log_p.shape or log_q_c.shape != (*log_q.shape, log_p_c.shape[-1]):
        raise DBlastError(
            f"candidates do not fit log_q {tuple(log_q.shape)}: log_q_candidates must be (N, K, b, W) and "
            f"log_p_candidates (N, b, W), got {tuple(log_q_c.shape)} and {tuple(log_p_c.shape)}"
        )
    return log_candidate_acceptance(log_q, log_prior, log_q_c, log_p_c, valid)


# -- position weights --------------------------------------------------------------------------


def d_pace_weights(log_q: Tensor, log_prior: Tensor, valid: Tensor | None = None, alpha: float = 0.5) -> Tensor:
    """D-PACE's position weights w_i = sum_{m >= i} prod_{j <= m} a_j, (N, b), without gradient.

    a_j = (1 - alpha) q_j + alpha. At alpha = 0 they are the slopes of :func:`chain_loss` in -log q_i, at
    alpha = 1 the number of positions from i to the end of the block.

    Raises:
        DBlastError: alpha outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise DBlastError(f"alpha must lie in [0, 1], got {alpha}")
    confidence = conditional_log_q(log_q, log_prior, valid).detach().exp()
    reach = _existing(((1 - alpha) * confidence + alpha).cumprod(-1), valid)
    return reach.flip(-1).cumsum(-1).flip(-1)


def d_pace_loss(
    log_q: Tensor, log_prior: Tensor, log_p: Tensor, valid: Tensor | None = None, *, alpha: float = 0.5
) -> Tensor:
    """Cross-entropy with D-PACE's dynamic position weights (arXiv 2605.18810), nats per block, mean over anchors.

    -sum_i w_i log q_i with :func:`d_pace_weights`; the smoothing by ``alpha`` enters the weights only.

    Source: the authors' code (github.com/Lucas-TY/D-PACE, ``specforge/core/dflash.py``) for the weights, the
    mask and alpha = 0.5, and their statement in a public thread of SpecForge that the sum is divided by the number of
    anchors, not by the weights. The paper's text was not read. Theirs is K = 1; the mixture form puts the
    conditional in place of q, which keeps the weights the slopes of the prefix probabilities.
    """
    weights = d_pace_weights(log_q, log_prior, valid, alpha)
    return -(weights * conditional_log_q(log_q, log_prior, valid)).sum(-1).mean()


def truncated_cross_entropy(
    log_q: Tensor,
    log_prior: Tensor,
    log_p: Tensor,
    valid: Tensor | None = None,
    *,
    tau: float = 0.1,
    construction: str = "all_prefixes",
) -> Tensor:
    """The acceptance-length loss (eq. 16) without its log S_l: -sum_{l in T_tau} log r_l, nats, mean over anchors.

    As log r_l is a sum over positions, ``all_prefixes`` is, up to log p, a cross-entropy whose weights fall
    linearly, l_tau - i + 1 at position i, and stop at l_tau; ``one_prefix`` weights the positions up to l_tau
    by one, ``whole_block`` is the likelihood loss. Which prefixes belong is decided without gradient.

    Source: ours, an ablation of arXiv 2608.05448. Cutting a cross-entropy at the first failure is also the
    idea of Spec-AUF (arXiv 2607.01893), known to us from summaries, with the drafter's first greedy error in
    place of r_l < tau and even weights.

    Raises:
        DBlastError: unknown construction or negative tau.
    """
    log_r, _, _ = acceptance_terms(log_q, log_prior, log_p, valid)
    member = prefix_members(log_r, tau, construction, valid)
    return -log_r.masked_fill(~member, 0.0).sum(-1).mean()


# -- left to right (arXiv 2606.11552) -----------------------------------------------------------


def chain_loss(log_q: Tensor, log_prior: Tensor, log_p: Tensor, valid: Tensor | None = None) -> Tensor:
    """Minus the sum of the prefix probabilities, -sum_l q(x_1:l | y), in tokens per block, mean over anchors.

    Over x ~ p it is minus the expected number of leading tokens that an independent draft x' ~ q has in
    common with x: a lower bound of the accepted length, as q <= min(1, q / p).

    Source: arXiv 2606.11552 calls its chain loss a differentiable stand-in for the expected accepted length
    of a joint prefix (abstract, read); that it sums the prefix products of the realised tokens' probabilities
    is reported by others who cite its section 5.5. Its formula was not read, so the sign, the sum over l
    without a normaliser and the mixture form are ours.
    """
    return -_existing(prefix_log_q(log_q, log_prior, valid).exp(), valid).sum(-1).mean()


def expected_accepted_length_loss(
    log_q: Tensor, log_prior: Tensor, log_p: Tensor, valid: Tensor | None = None
) -> Tensor:
    """Minus the replayed accepted length, -sum_l prod_{j <= l} min(1, q_j / p_j), tokens per block, mean over anchors.

    The chain loss with acceptance probabilities. Over x ~ p it is exactly minus the accepted length of the
    sampled draft: the summand is r_l prod A_j of eq. 14. It has no gradient at tokens that q overrates.

    Source: ours, from the identity behind eq. 14 of arXiv 2608.05448.
    """
    log_accept, _ = log_realised_acceptance(log_q, log_prior, log_p, valid)
    return -_existing(log_accept.cumsum(-1).exp(), valid).sum(-1).mean()


def first_error_weights(
    log_q: Tensor, log_prior: Tensor, log_p: Tensor, valid: Tensor | None = None, missed: Tensor | None = None
) -> Tensor:
    """How much each position is the first error of its block, (N, b), without gradient; sums to at most one.

    ``missed`` (N, b) bool: where the drafter's greedy token is not the realised one; the weight is then one
    at the first such position. Without it, the probability that position i is the first rejection of the
    realised block, prod_{j < i} a_j (1 - a_i) with a = min(1, q / p).
    """
    if missed is not None:
        missed = missed if valid is None else missed & valid
        return (missed & (missed.int().cumsum(-1) == 1)).float()
    log_accept = log_realised_acceptance(log_q, log_prior, log_p, valid)[0].detach()
    return -torch.expm1(log_accept) * (log_accept.cumsum(-1) - log_accept).exp()


def first_error_loss(
    log_q: Tensor, log_prior: Tensor, log_p: Tensor, valid: Tensor | None = None, *, missed: Tensor | None = None
) -> Tensor:
    """Cross-entropy at the first error of each block alone, nats per block, mean over anchors.

    -sum_i w_i log q_i with :func:`first_error_weights`; a block without an error contributes zero.

    Source: arXiv 2606.11552, whose abstract (read) says that its first-error focal loss targets the position
    that breaks the accepted prefix; that it is an auxiliary cross-entropy at the first greedy mismatch, with
    no focusing exponent, is from summaries of it. Its formula and normaliser were not read. Without
    ``missed`` the definition is ours: verification here is by sampling, where the first error is an event
    with a probability rather than a position.
    """
    weights = first_error_weights(log_q, log_prior, log_p, valid, missed)
    return -(weights * conditional_log_q(log_q, log_prior, valid)).sum(-1).mean()


def left_to_right_loss(
    log_q: Tensor,
    log_prior: Tensor,
    log_p: Tensor,
    valid: Tensor | None = None,
    *,
    gamma: float | None = None,
    focal_weight: float = 0.3,
    chain_weight: float = 1.0,
    missed: Tensor | None = None,
) -> Tensor:
    """Decayed cross-entropy (nats per token) + focal_weight x first-error loss + chain_weight x chain loss.

    The cross-entropy is that of the conditionals, DFlash's own at K = 1.

    Source: arXiv 2606.11552 adds its terms to a decayed cross-entropy. Summaries report weights of 0.3 and 40
    for them, and gamma = 10 for blocks of 16; as the normaliser of its chain term is unknown to us, the chain
    weight here is ours, and both are worth a sweep.
    """
    loss = position_mean(-conditional_log_q(log_q, log_prior, valid), valid, gamma)
    if focal_weight:
        loss = loss + focal_weight * first_error_loss(log_q, log_prior, log_p, valid, missed=missed)
    if chain_weight:
        loss = loss + chain_weight * chain_loss(log_q, log_prior, log_p, valid)
    return loss


# -- acceptance rate (arXiv 2602.23881) and distillation -----------------------------------------

DISTANCES = ("TV", "NLA", "LK", "KL", "CE")


def distribution_loss(
    log_q: Tensor,
    log_prior: Tensor,
    log_p: Tensor,
    valid: Tensor | None = None,
    *,
    distance: str,
    log_q_candidates: Tensor | None = None,
    log_p_candidates: Tensor | None = None,
    eta: float = 3.0,
    gamma: float | None = None,
) -> Tensor:
    """How far the drafter's conditional is from the target's distribution at every position, per token.

    With the acceptance rate alpha = sum_v min(p(v), q(v)), ``distance`` is

    * ``TV``: 1 - alpha, the rejection rate, which is the total variation;
    * ``NLA``: -log alpha (nats), whose gradient is that of ``TV`` divided by alpha;
    * ``LK``: lambda KL + (1 - lambda) TV with lambda = exp(-eta a) held fixed, a the mean of alpha over the anchors
      that have the position: each position leaves KL for TV as its drafts come to be accepted;
    * ``KL``: KL(p || q) (nats), distillation; over x ~ p its sum over positions is KL of whole blocks (chain rule);
    * ``CE``: -sum_v p(v) log q(v) (nats), KL without the target's entropy: the same gradient.

    Without candidates the realised token stands in, with min(1, q / p) for alpha, log p - log q for KL and -log q
    for CE: unbiased over x ~ p, except that NLA is then an upper bound (Jensen).

    Sources: NLA and LK with eta = 3 are the losses of arXiv 2602.23881, read in public implementations of it (vLLM
    Speculators' ``nla`` and ``lk_hybrid``, TorchSpec, SpecForge's ``lk_loss.py``), not in the paper. Where they differ:
    lambda is one for each draft depth (TorchSpec, which calls that the paper's, and SpecForge; taken here) or for each
    token (Speculators); NLA is taken of each token's rate (the first two; taken here) or of a depth's mean (SpecForge).
    KL is the textbook distillation of Hinton et al. (arXiv 1503.02531). All of these are for K = 1; the mixture form
    and DFlash's position weights are ours.

    Raises:
        DBlastError: unknown distance, negative eta, one candidate tensor without the other, or shapes that do not fit.
    """
    if distance not in DISTANCES:
        raise DBlastError(f"unknown distance {distance!r}; known: {', '.join(DISTANCES)}")
    if not eta >= 0:
        raise DBlastError(f"eta must not be negative, got {eta}")
    log_alpha, divergence = _acceptance(log_q, log_prior, log_p, valid, log_q_candidates, log_p_candidates)
    if distance == "TV":
        term = -torch.expm1(log_alpha)
    elif distance == "NLA":
        term = -log_alpha
    elif distance == "LK":
        exists = torch.ones_like(log_alpha) if valid is None else valid.float()
        rate = (log_alpha.detach().exp() * exists).sum(0) / exists.sum(0).clamp(min=1.0)
        mix = torch.exp(-eta * rate)
        term = mix * divergence - (1 - mix) * torch.expm1(log_alpha)
    elif distance == "KL":
        term = divergence
    elif log_p_candidates is None:
        term = divergence - masked_log(log_p, valid)
    else:
        log_target = masked_log(log_p_candidates, None if valid is None else valid.unsqueeze(-1))
        own = (log_target.exp() * log_target).masked_fill(~can_be_drafted(log_q_candidates), 0.0)
        term = divergence - own.sum(-1)
    return position_mean(term, valid, gamma)


# -- by name -----------------------------------------------------------------------------------


#: Objectives by name, called as all losses are; importing this module adds them to :data:`dblast.losses.LOSSES`. Names
#: that end in 1 use the realised token alone; TV, NLA, LK and KD need what it was drawn from.
OBJECTIVES: dict[str, Loss] = {
    "DPACE": Loss(d_pace_loss),
    "TRUNC": Loss(truncated_cross_entropy, takes=("tau", "construction")),
    "FOCAL": Loss(partial(left_to_right_loss, chain_weight=0.0)),
    "CHAIN": Loss(partial(left_to_right_loss, focal_weight=0.0)),
    "L2R": Loss(left_to_right_loss),
    "EAL": Loss(expected_accepted_length_loss),
    "TV1": Loss(partial(distribution_loss, distance="TV")),
    "NLA1": Loss(partial(distribution_loss, distance="NLA")),
    "LK1": Loss(partial(distribution_loss, distance="LK")),
    "TV": Loss(partial(distribution_loss, distance="TV"), needs_support=True),
    "NLA": Loss(partial(distribution_loss, distance="NLA"), needs_support=True),
    "LK": Loss(partial(distribution_loss, distance="LK"), needs_support=True),
    "KD": Loss(partial(distribution_loss, distance="KL"), needs_support=True),
}
LOSSES.update(OBJECTIVES)
