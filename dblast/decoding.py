"""Speculative decoding with a block drafter: the loop of Algorithm 1.

:func:`generate` takes prompts of any lengths; :func:`custom_generate` is the same
loop for ``target.generate(..., custom_generate=custom_generate, drafter=drafter)``.
The output is distributed as plain sampling from the target, whatever the drafter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import ModelOutput

from dblast.cache import BlockDecoder
from dblast.drafter import DBlastDrafter, log_category_prior
from dblast.errors import DBlastError
from dblast.sampling import SamplingSettings
from dblast.targets import Target
from dblast.trees import TREE_NODES, Tree, TreeOutcome, draft_tree, walk
from dblast.verifier import BlockOutcome, Proposal, check_mode, nothing_drafted, propose, verify_block


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


def _prompt_tensors(prompts: Sequence, vocab_size: int) -> list[Tensor]:
    """Prompts as 1-d int64 tensors on the CPU.

    Raises:
        DBlastError: no prompts, an empty one, or an id outside the vocabulary.
    """
    if len(prompts) == 0:
        raise DBlastError("no prompts given; give a list of token id sequences")
    if isinstance(prompts, Tensor) and prompts.ndim == 1 or isinstance(prompts[0], int):
        raise DBlastError("prompts must be a list of token id sequences; for one prompt write [ids]")
    tensors = [torch.as_tensor(prompt, dtype=torch.long).cpu() for prompt in prompts]
    for number, prompt in enumerate(tensors):
        if prompt.ndim != 1 or not len(prompt):
            raise DBlastError(f"prompt {number} has no tokens; give at least one token id")
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise DBlastError(f"prompt {number} has a token id outside the target's vocabulary of {vocab_size}")
    return tensors


def target_support(logits: Tensor, settings: SamplingSettings | None) -> tuple[Tensor, Tensor]:
    """p as (tokens, probabilities), both (..., W), float32; without settings all mass on the largest logit."""
    if settings is None:
        best = logits.argmax(-1, keepdim=True)
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
    eos_token_ids: Sequence[int] | None = None,
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
        eos_token_ids: any of these ends a sequence (default: the target's own; ``()`` for none).
        generator: on the target's device; without it the global random state is used.
        streamer: a Hugging Face streamer; receives the prompt, then the tokens of one pass at a
            time. One prompt only.
        decoder: reuse the buffers of an earlier call with the same two models.

    Raises:
        DBlastError: models or arguments that cannot work, an empty prompt, or a prompt and
            budget that pass the target's context limit.
    """
    model = target.model if isinstance(target, Target) else target
    decoder = decoder or BlockDecoder(model, drafter)
    if decoder.model is not model or decoder.drafter is not drafter:
        raise DBlastError("the decoder belongs to other models; make a BlockDecoder for these two")
    check_mode(mode, drafter.config.num_categories)
    log_category_prior(torch.zeros(1), category_temperature)
    settings = (settings or SamplingSettings()) if do_sample else None
    prompts = _prompt_tensors(prompts, model.config.vocab_size)
    if nodes < 1:
        raise DBlastError(f"a draft tree needs at least 1 node, got {nodes}")
    if max_new_tokens < 1:
        raise DBlastError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    longest, limit = max(len(prompt) for prompt in prompts), decoder.context_limit
    if limit and longest + max_new_tokens > limit:
        raise DBlastError(
            f"prompt of {longest} tokens plus {max_new_tokens} new ones passes the target's context limit "
            f"of {limit}; shorten the prompt or the budget"
        )
    if streamer is not None and len(prompts) > 1:
        raise DBlastError(f"a streamer takes one prompt, got {len(prompts)}; call generate once per prompt")
    eos = frozenset(_target_eos(target) if eos_token_ids is None else eos_token_ids)
    if streamer is not None:
        streamer.put(prompts[0])

    new: list[list[int]] = [[] for _ in prompts]
    steps: list[list[Step]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    drafting = {"mode": mode, "category_temperature": category_temperature}
    decoder.start(prompts, reserve=max_new_tokens + (nodes if mode == "tree" else 0))
    while active:
        left = [max_new_tokens - len(new[row]) for row in active]
        # The pass's own token needs room, so a block never drafts past the longest budget.
        length = min(drafter.config.block_length, max(left) - 1)
        if mode == "tree" and length:
            tree, outcome = _tree_step(decoder, settings, nodes, category_temperature, generator)
            drafted, categories, path = outcome.drafted, [-1] * len(active), outcome.path
            unrefused = outcome.leaf.tolist()
            inside = tree.depth < torch.tensor(left, device=tree.depth.device).unsqueeze(1)
            room = (tree.valid & inside).sum(1).tolist()
        else:
            proposal, outcome = step(decoder, length, settings, generator, **drafting)
            drafted, categories, path = proposal.drafted, proposal.category.tolist(), None
            unrefused = (outcome.accepted == length).tolist()
            room = [min(length, budget - 1) for budget in left]
        accepted = outcome.accepted.tolist()
        block = torch.cat([drafted, outcome.token.unsqueeze(1)], dim=1).tolist()
        for i, (row, category) in enumerate(zip(active, categories, strict=True)):
            tokens = [*block[i][: accepted[i]], block[i][-1]][: left[i]]
            end = next((j + 1 for j, token in enumerate(tokens) if token in eos), len(tokens))
            whole = end == accepted[i] + 1
            ending = "accepted" if not whole else "bonus" if unrefused[i] else "replacement"
            position = len(prompts[row]) + len(new[row])
            steps[row].append(Step(position, category, room[i], end - 1, end, ending))
            new[row] += tokens[:end]
            if streamer is not None:
                streamer.put(torch.tensor(tokens[:end]))
        going = [i for i, row in enumerate(active) if len(new[row]) < max_new_tokens and new[row][-1] not in eos]
        active = [active[i] for i in going]
        if active:
            decoder.commit(accepted, outcome.token, path)
            if len(going) < len(accepted):
                decoder.keep(going)
    if streamer is not None:
        streamer.end()
    return Generated(prompts, [torch.tensor(row) for row in new], steps)


def step(
    decoder: BlockDecoder,
    length: int,
    settings: SamplingSettings | None,
    generator: torch.Generator | None,
    **drafting: Any,
) -> tuple[Proposal, BlockOutcome]:
    """One pass of Algorithm 1 over every sequence: draft ``length`` tokens, score them with the target, verify.

    ``drafting`` are the arguments of :func:`dblast.verifier.propose`. With no room for a draft this is a plain
    decoding step.
    """
    if length:
        proposal = propose(decoder.drafter, decoder.draft(), length, generator=generator, **drafting)
    else:
        proposal = nothing_drafted(decoder.anchor)
    tokens, p = target_support(decoder.score(proposal.drafted), settings)
    return proposal, verify_block(proposal, tokens, p, generator=generator)


def _tree_step(
    decoder: BlockDecoder,
    settings: SamplingSettings | None,
    nodes: int,
    category_temperature: float,
    generator: torch.Generator | None,
) -> tuple[Tree, TreeOutcome]:
    """Draft a tree for every sequence, score its nodes in one target pass and walk.

    The tree is that of a whole block even where the budget ends sooner: what it accepts depends on the text alone.
    """
    tree = draft_tree(decoder.drafter, decoder.draft(), nodes, category_temperature=category_temperature)
    tokens, p = target_support(decoder.score_tree(tree), settings)
    return tree, walk(tree, tokens, p, generator=generator)


def _target_eos(target: Target | PreTrainedModel) -> Sequence[int]:
    if isinstance(target, Target):
        return target.eos_token_ids
    return _id_list(target.generation_config.eos_token_id)


def _id_list(ids: int | Sequence[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


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


def _callers_streamer(frame: FrameType | None) -> Any:
    """The ``streamer`` argument of the ``target.generate`` call above.

    transformers (seen in 5.24) hands it to its own decoding methods but not to a callable.
    """
    inside = frame is not None and frame.f_globals.get("__name__", "").startswith("transformers.generation")
    return frame.f_locals.get("streamer") if inside else None


class _PromptAlreadyPut:
    """A streamer that has seen the prompt: passes everything on but the first value."""

    def __init__(self, streamer: Any):
        self.streamer, self.first = streamer, True

    def put(self, value: Tensor) -> None:
        if not self.first:
            self.streamer.put(value)
        self.first = False

    def end(self) -> None:
        self.streamer.end()


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
    generator: torch.Generator | None = None,
    streamer: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The loop as a decoding method of Hugging Face's ``generate``.

    ``target.generate(ids, custom_generate=custom_generate, drafter=drafter, do_sample=True, ...)``:
    ``drafter``, ``mode``, ``nodes``, ``category_temperature`` and ``generator`` are passed through;
    temperature, top-k, top-p, EOS ids and budget come from the generation config (note that
    its default is top-k 50). Left or right padding is recognised by ``attention_mask``.

    Returns:
        (N, L) token ids as ``generate`` returns them; a :class:`SpeculativeOutput` with
        ``return_dict_in_generate=True``.

    Raises:
        DBlastError: no drafter, beam search, or a logits processor, stopping criterion or
            cache that block verification cannot honour.
    """
    if drafter is None:
        raise DBlastError("custom_generate needs a drafter; pass drafter=... to target.generate")
    config = generation_config or model.generation_config
    if (config.num_beams or 1) > 1:
        raise DBlastError("speculative decoding does not do beam search; set num_beams=1")
    known = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MaxLengthCriteria, EosTokenCriteria)
    for item in (*(logits_processor or ()), *(stopping_criteria or ())):
        if not isinstance(item, known):
            raise DBlastError(
                f"{type(item).__name__} is not supported by speculative decoding; "
                "leave out what sets it (only temperature, top_k, top_p, EOS ids and the budget are used)"
            )
    past = model_kwargs.get("cache")
    if past is not None and past.get_seq_length():
        raise DBlastError("speculative decoding keeps its own caches; call generate without a filled one")
    mask = model_kwargs.get("attention_mask")
    prompts = list(input_ids) if mask is None else [ids[keep.bool()] for ids, keep in zip(input_ids, mask, strict=True)]
    width = input_ids.shape[1]
    limit = config.max_length if config.max_new_tokens is None else width + config.max_new_tokens
    temperature, top_p = config.temperature, config.top_p
    streamer = streamer or _callers_streamer(sys._getframe(1))
    result = generate(
        model,
        drafter,
        prompts,
        SamplingSettings(
            1.0 if temperature is None else temperature, config.top_k or None, 1.0 if top_p is None else top_p
        )
        if config.do_sample
        else None,
        max_new_tokens=limit - width,
        do_sample=bool(config.do_sample),
        mode=mode,
        nodes=nodes,
        category_temperature=category_temperature,
        eos_token_ids=_id_list(config.eos_token_id),
        generator=generator,
        streamer=streamer and _PromptAlreadyPut(streamer),
    )
    pad = config.pad_token_id
    if pad is None:
        pad = (_id_list(config.eos_token_id) or [0])[0]
    new = torch.nn.utils.rnn.pad_sequence(result.tokens, batch_first=True, padding_value=pad)
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(sequences=sequences, steps=result.steps, accepted_length=result.accepted_length)
