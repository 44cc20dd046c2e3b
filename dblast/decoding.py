"""Speculative decoding with a block drafter: the loop of Algorithm 1.

:func:`generate` takes prompts of any lengths; :func:`custom_generate` is the same
loop for ``target.generate(..., custom_generate=custom_generate, drafter=drafter)``.
The output is distributed as plain sampling from the target, whatever the drafter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from dblast.cache import BlockDecoder
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.proposals import check_drafting, check_output, nothing_drafted, propose
from dblast.sampling import LARGEST, SamplingSettings
from dblast.support.checks import check_finite, check_whole, prompt_tensors, token_ids
from dblast.support.generation_options import read_options
from dblast.targets import Target
from dblast.trees import TREE_NODES, draft_tree, walk
from dblast.verifier import check_verification, verify_block


@dataclass(frozen=True)
class Step:
    """One target pass of one sequence.

    Attributes:
        position: position of the first token the pass emitted, counted from the start of the prompt.
        category: drawn category z; -1 if nothing was drafted, or a tree.
        drafted: draft tokens that the budget left room for: at most b, or the nodes of a tree.
        accepted: accepted draft tokens, without the pass's own token: always ``emitted - 1``.
        emitted: tokens added to the sequence.
        ending: what the last emitted token is: ``"replacement"`` (after a rejection), ``"bonus"``
            (after a fully accepted block, at a leaf of a tree) or ``"accepted"`` (an accepted draft token that ended
            the sequence; it counts as the pass's own).
    """

    position: int
    category: int
    drafted: int
    accepted: int
    emitted: int
    ending: str


@dataclass
class Generated:
    """Tokens and statistics of a call, one entry per prompt.

    Attributes:
        prompts: (P_i,) prompt ids.
        tokens: (n_i,) new ids, a closing end-of-sequence id included.
        steps: the target passes.
    """

    prompts: list[Tensor]
    tokens: list[Tensor]
    steps: list[list[Step]] = field(repr=False)

    @property
    def sequences(self) -> list[Tensor]:
        """Prompt and new tokens, (P_i + n_i,) each."""
        return [torch.cat(pair) for pair in zip(self.prompts, self.tokens, strict=True)]

    @property
    def passes(self) -> int:
        """Target passes summed over sequences; prefill does not count."""
        return sum(len(steps) for steps in self.steps)

    @property
    def accepted_length(self) -> float:
        """Accepted draft tokens per target pass, without the pass's own token; NaN without passes."""
        accepted = sum(step.accepted for steps in self.steps for step in steps)
        return accepted / self.passes if self.passes else float("nan")


def target_support(logits: Tensor, settings: SamplingSettings | None) -> tuple[Tensor, Tensor]:
    """p as (tokens, probabilities), both (..., W), float32; without settings all mass on the largest logit."""
    if settings is None:
        largest, best = logits.max(-1, keepdim=True)
        check_finite(largest, LARGEST)
        return best, torch.ones_like(best, dtype=torch.float32)
    tokens, log_p = settings.support(logits)
    return tokens, log_p.exp()


@torch.no_grad()
def generate(
    target: Target | PreTrainedModel,
    drafter: DBlastDrafter,
    prompts: Sequence[Sequence[int] | Tensor],
    settings: SamplingSettings | None = None,
    *,
    max_new_tokens: int = 128,
    do_sample: bool = True,
    mode: str = "greedy_branch",
    nodes: int = TREE_NODES,
    category_temperature: float = 1.0,
    draft_temperature: float = 1.0,
    draft_top_k: int = 0,
    verification: str = "token",
    eos_token_ids: int | Sequence[int] | Tensor | None = None,
    generator: torch.Generator | None = None,
    streamer: Any = None,
    decoder: BlockDecoder | None = None,
) -> Generated:
    """Decode every prompt with block drafting and exact verification (Algorithm 1).

    Args:
        target: the target, or its bare model.
        drafter: attached to that target, in the dtype it should run in.
        prompts: token ids, one sequence a prompt, of any lengths.
        settings: sampling settings of the target (default: temperature 1, no filters).
        max_new_tokens: budget of every prompt.
        do_sample: False decodes greedily; ``settings`` then have no effect.
        mode: ``"greedy_branch"``, ``"soft"``, ``"tree"`` (the heaviest prefixes of all branches,
            :mod:`dblast.trees`) or, for K = 1, ``"independent"``.
        nodes: size of the trees; without effect in other modes.
        category_temperature: Z_T >= 0.
        draft_temperature, draft_top_k: T_d >= 0 and k_d of tokens drawn inside the branch, for the
            modes that draw them; T_d = 0 is ``"greedy_branch"``, k_d = 0 sets no limit.
        verification: of blocks, ``"token"`` or ``"block"`` (:func:`dblast.verifier.verify_block`).
        eos_token_ids: any of these ends a sequence: one id, or several in a sequence or tensor
            (default: the target's own; ``()`` for none).
        generator: on the target's device; without it the global random state is used.
        streamer: a Hugging Face streamer; receives the prompt, then the tokens of one pass at a
            time. One prompt only.
        decoder: reuse the buffers of an earlier call with the same two models.

    Raises:
        DBlastError: models or arguments that cannot work, prompts that are no token ids, a prompt
            and budget that pass the target's context limit, or a model whose pass holds NaN or
            infinity (a ``decoder`` can be used again after any of these).
    """
    model = target.model if isinstance(target, Target) else target
    decoder = BlockDecoder(model, drafter) if decoder is None else decoder
    if not isinstance(decoder, BlockDecoder) or decoder.model is not model or decoder.drafter is not drafter:
        raise DBlastError("the decoder belongs to other models; make a BlockDecoder for these two")
    drafting: dict[str, Any] = {"mode": mode, "category_temperature": category_temperature}
    drafting |= {"draft_temperature": draft_temperature, "draft_top_k": draft_top_k}
    check_drafting(drafter, **drafting)
    check_verification(verification)
    if mode == "tree" and verification != "token":
        raise DBlastError("a tree is walked, not verified by block; leave out verification")
    check_whole("the nodes of a draft tree", nodes, 1)
    check_whole("max_new_tokens", max_new_tokens, 1)
    _check_generator(generator, decoder.device)
    if settings is not None and not isinstance(settings, SamplingSettings):
        raise DBlastError(f"settings must be SamplingSettings, got {settings!r:.60}; see dblast.sampling.get_setting")
    settings = (settings or SamplingSettings()) if do_sample else None
    prompts = prompt_tensors(prompts, model.config.vocab_size)
    if eos_token_ids is None:
        eos_token_ids = target.eos_token_ids if isinstance(target, Target) else model.generation_config.eos_token_id
    eos = frozenset(token_ids(eos_token_ids, model.config.vocab_size))
    longest, limit = max(len(prompt) for prompt in prompts), decoder.context_limit
    if limit and longest + max_new_tokens > limit:
        raise DBlastError(
            f"prompt of {longest} tokens plus {max_new_tokens} new ones passes the target's context limit "
            f"of {limit}; shorten the prompt or lower max_new_tokens"
        )
    if streamer is not None and len(prompts) > 1:
        raise DBlastError(f"a streamer takes one prompt, got {len(prompts)}; call generate once per prompt")
    if streamer is not None:
        streamer.put(prompts[0])

    new: list[list[int]] = [[] for _ in prompts]
    steps: list[list[Step]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    take: Callable[..., Pass] = functools.partial(step, verification=verification)
    if mode == "tree":
        take, drafting = tree_step, {"nodes": nodes, "category_temperature": category_temperature}
    decoder.start(prompts, reserve=max_new_tokens + (nodes if mode == "tree" else 0))
    while active:
        left = [max_new_tokens - len(new[row]) for row in active]
        done = take(decoder, left, settings, generator, **drafting)
        accepted = done.accepted.tolist()
        block = torch.cat([done.drafted, done.token.unsqueeze(1)], dim=1).tolist()
        for i, row in enumerate(active):
            tokens = [*block[i][: accepted[i]], block[i][-1]][: left[i]]
            end = next((j + 1 for j, token in enumerate(tokens) if token in eos), len(tokens))
            whole = end == accepted[i] + 1
            ending = "accepted" if not whole else "bonus" if done.unrefused[i] else "replacement"
            position = len(prompts[row]) + len(new[row])
            steps[row].append(Step(position, done.category[i], done.room[i], end - 1, end, ending))
            new[row] += tokens[:end]
            if streamer is not None:
                streamer.put(torch.tensor(tokens[:end]))
        going = [i for i, row in enumerate(active) if len(new[row]) < max_new_tokens and new[row][-1] not in eos]
        active = [active[i] for i in going]
        if active:
            decoder.commit(accepted, done.token, done.path)
            if len(going) < len(accepted):
                decoder.keep(going)
    if streamer is not None:
        streamer.end()
    return Generated(prompts, [torch.tensor(row) for row in new], steps)


@dataclass
class Pass:
    """What one target pass made of N sequences.

    Attributes:
        drafted: (N, d) draft tokens; of a tree, those along the accepted path.
        accepted: (N,) how many of them are accepted.
        token: (N,) the target's own token after those.
        category: N drawn categories; -1 where nothing was drafted, or a tree.
        room: N numbers of draft tokens that the budget left room for.
        unrefused: N times whether nothing was turned down: the target's own token is a bonus.
        path: (N, d) accepted nodes of a tree; None of a block.
    """

    drafted: Tensor
    accepted: Tensor
    token: Tensor
    category: list[int]
    room: list[int]
    unrefused: list[bool]
    path: Tensor | None = None


def step(
    decoder: BlockDecoder,
    left: list[int],
    settings: SamplingSettings | None,
    generator: torch.Generator | None,
    verification: str = "token",
    **drafting: Any,
) -> Pass:
    """One pass of Algorithm 1 over N sequences: draft a block, score it with the target, verify it.

    Args:
        left: how many more tokens each sequence may have, at least one.
        verification: see :func:`dblast.verifier.verify_block`.
        drafting: arguments of :func:`dblast.proposals.propose`.
    """
    # The pass's own token needs room, so a block never drafts past the longest budget.
    length = min(decoder.drafter.config.block_length, max(left) - 1)
    if length:
        proposal = propose(decoder.drafter, decoder.draft(), length, generator=generator, **drafting)
    else:
        proposal = nothing_drafted(decoder.anchor)
    tokens, p = target_support(decoder.score(proposal.drafted), settings)
    outcome = verify_block(proposal, tokens, p, generator=generator, verification=verification)
    room, unrefused = [min(length, budget - 1) for budget in left], (outcome.accepted == length).tolist()
    return Pass(proposal.drafted, outcome.accepted, outcome.token, proposal.category.tolist(), room, unrefused)


def tree_step(
    decoder: BlockDecoder,
    left: list[int],
    settings: SamplingSettings | None,
    generator: torch.Generator | None,
    nodes: int,
    category_temperature: float,
) -> Pass:
    """One pass with a draft tree for every sequence: draft it, score its nodes with the target, walk.

    The tree is that of a whole block even where the budget ends sooner: what it accepts depends on the text alone.
    """
    if max(left) == 1:
        return step(decoder, left, settings, generator)
    output = decoder.draft()
    check_output(output)
    tree = draft_tree(decoder.drafter, output, nodes, category_temperature=category_temperature)
    tokens, p = target_support(decoder.score(tree.tokens, tree), settings)
    outcome = walk(tree, tokens, p, generator=generator)
    inside = tree.depth < torch.tensor(left, device=tree.depth.device).unsqueeze(1)
    room, category = (tree.valid & inside).sum(1).tolist(), [-1] * len(left)
    return Pass(
        outcome.drafted, outcome.accepted, outcome.token, category, room, outcome.leaf.tolist(), outcome.path
    )


def _check_generator(generator: torch.Generator | None, device: torch.device) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise DBlastError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator is not None and generator.device.type != device.type:
        raise DBlastError(f"the generator is on {generator.device}, the target on {device}; make one there")


# -- through target.generate --------------------------------------------------------------------


@dataclass
class SpeculativeOutput(ModelOutput):
    """What ``target.generate(..., return_dict_in_generate=True)`` returns.

    Attributes:
        sequences: (N, L) prompt as given, then new tokens, padded on the right.
        steps: target passes of every sequence, lists of :class:`Step`.
        accepted_length: accepted draft tokens per target pass.
    """

    sequences: Tensor | None = None
    steps: list | None = None
    accepted_length: float | None = None


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence | None = None,
    stopping_criteria: Sequence | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    drafter: DBlastDrafter | None = None,
    mode: str = "greedy_branch",
    nodes: int = TREE_NODES,
    category_temperature: float = 1.0,
    draft_temperature: float = 1.0,
    draft_top_k: int = 0,
    verification: str = "token",
    generator: torch.Generator | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The loop as a decoding method of Hugging Face's ``generate``.

    ``target.generate(ids, custom_generate=custom_generate, drafter=drafter, do_sample=True, ...)``:
    ``drafter``, ``generator`` and the arguments of :func:`generate` on drafting are passed through;
    temperature, top-k, top-p, EOS ids, number of sequences and budget come from the generation
    config (note that its default is top-k 50). Any other option is refused. Left or right padding
    is recognised by ``attention_mask``.

    A streamer is given to this function: ``custom_generate=functools.partial(custom_generate,
    streamer=streamer)``. transformers shows the one of ``target.generate`` the prompt and does not
    hand it on; nor does it hand on an assistant model, which would not change the output's law.

    Returns:
        (N, L) token ids as ``generate`` returns them; a :class:`SpeculativeOutput` with
        ``return_dict_in_generate=True``.

    Raises:
        DBlastError: no drafter, an option, logits processor, stopping criterion or cache that block
            verification does not use, or what :func:`generate` refuses.
    """
    if drafter is None:
        raise DBlastError("custom_generate needs a drafter; pass drafter=... to target.generate")
    config = generation_config or model.generation_config
    vocab_size = model.config.vocab_size
    options = read_options(config, input_ids, vocab_size, logits_processor, stopping_criteria, model_kwargs)
    drafting: dict[str, Any] = {"mode": mode, "nodes": nodes, "category_temperature": category_temperature}
    drafting |= {"draft_temperature": draft_temperature, "draft_top_k": draft_top_k, "verification": verification}
    result = generate(model, drafter, **options, **drafting, generator=generator, streamer=streamer)
    pad = (*token_ids(config.pad_token_id, vocab_size, "pad_token_id"), *options["eos_token_ids"], 0)[0]
    new = torch.nn.utils.rnn.pad_sequence(result.tokens, batch_first=True, padding_value=pad)
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(sequences=sequences, steps=result.steps, accepted_length=result.accepted_length)
