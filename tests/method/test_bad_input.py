"""NaN, infinities, arguments of the wrong kind, targets that the caches do not serve: an error, never a token."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from transformers import (
    BatchEncoding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dblast.cache import BlockDecoder
from dblast.decoding import generate, target_support
from dblast.drafter import DraftOutput, log_category_prior
from dblast.proposals import greedy_branch_proposal, propose
from dblast.replay import expected_accepted, expected_passes, score, trajectory_acceptance, tree_acceptance
from dblast.sampling import SamplingSettings
from dblast.targets import wrap_target
from dblast.verifier import verify_block
from tests.checks import refused
from tests.conftest import MASK_TOKEN_ID, SHAPE, VOCABULARY_SIZE, randomise, seeded
from tests.helpers import generator
from tests.method.test_decoding import plain_greedy

NAN, INF = math.nan, math.inf
PROMPT = [[5, 6, 7]]


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "no prompts"),
        ([[5], []], "prompt 1 has no tokens"),
        ([5, 6], "[ids]"),
        (torch.tensor([5, 6]), "[ids]"),
        (np.array([5, 6]), "[ids]"),
        ([[5, VOCABULARY_SIZE]], "outside the target's vocabulary"),
        ([[-1]], "outside the target's vocabulary"),
        ("hello", "tokenizer"),
        (b"hello", "tokenizer"),
        (["hello"], "tokenizer"),
        (5, "list of token id sequences"),
        (None, "list of token id sequences"),
        (torch.tensor(5), "list of token id sequences"),
        (iter([[5]]), "list of token id sequences"),
        ({"input_ids": [[5]]}, "input_ids"),
        (BatchEncoding({"input_ids": [[5]]}), "input_ids"),
        ([{"input_ids": [5]}], "prompt 0"),
        ([[5.0, 6.0]], "integers"),
        (torch.tensor([[5.0]]), "integers"),
        ([[5, NAN]], "integers"),
        ([[True, False]], "integers"),
        (torch.tensor([[True]]), "integers"),
        ([[[5, 6]], [7]], "flat"),
        (torch.zeros(1, 1, 1, dtype=torch.long), "flat"),
        ([["5"]], "integers"),
        ([[5], None], "prompt 1"),
        ([torch.tensor(5)], "[ids]"),
        ([[5], torch.tensor(5)], "prompt 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_prompts_of_the_wrong_kind(llama, make_drafter, prompts, words):
    with refused(words):
        generate(llama, make_drafter(llama), prompts)


def test_prompts_of_every_right_kind(llama, make_drafter):
    drafter, arguments = make_drafter(llama), dict(max_new_tokens=4, do_sample=False, eos_token_ids=())
    expected = plain_greedy(llama, PROMPT[0], 4)
    for prompts in (
        PROMPT,
        tuple(PROMPT),
        torch.tensor(PROMPT),
        torch.tensor(PROMPT, dtype=torch.int32),
        np.array(PROMPT),
        [np.array(PROMPT[0])],
        [torch.tensor(PROMPT[0])],
        [[np.int64(5), torch.tensor(6), 7]],
        [range(5, 8)],
    ):
        assert generate(llama, drafter, prompts, **arguments).tokens[0].tolist() == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": NAN}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"mode": "nope"}, "greedy_branch, soft, independent, tree"),
        ({"mode": "tree", "nodes": 0}, "nodes"),
        ({"mode": "tree", "nodes": 2.5}, "nodes"),
        ({"mode": "independent"}, "K = 1"),
        ({"category_temperature": -1.0}, "category temperature"),
        ({"category_temperature": NAN}, "category temperature"),
        ({"category_temperature": INF}, "category temperature"),
        ({"category_temperature": "1"}, "category temperature"),
        ({"category_temperature": None}, "category temperature"),
        *[({"mode": "soft", "draft_temperature": value}, "draft temperature") for value in (NAN, INF, -0.1, None)],
        *[({"mode": "soft", "draft_top_k": value}, "draft_top_k") for value in (NAN, 2.5, -1, None, True)],
        ({"draft_temperature": 0.5}, "sampled proposals"),
        ({"mode": "tree", "draft_top_k": 5}, "sampled proposals"),
        ({"verification": "tree"}, "token or block"),
        ({"verification": None}, "token or block"),
        ({"mode": "tree", "verification": "block"}, "walked"),
        ({"settings": "medium"}, "SamplingSettings"),
        ({"generator": 5}, "torch.Generator"),
        ({"decoder": "new"}, "BlockDecoder"),
        ({"prompts": [[5], [6]], "streamer": object()}, "streamer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("branches", [1, 2])
def test_bad_arguments_give_one_clear_line(llama, make_drafter, arguments, words, branches):
    if words == "K = 1" and branches == 1:
        pytest.skip("is what K = 1 does")
    with refused(words):
        drafter = make_drafter(llama, num_categories=branches)
        generate(llama, drafter, **{"prompts": PROMPT, "max_new_tokens": 8} | arguments)


def test_models_of_the_wrong_kind(llama, make_drafter):
    for models, word in ((("llama", make_drafter(llama)), "target"), ((llama, llama.model), "drafter")):
        with refused(word):
            generate(*models, PROMPT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (NAN, INF, -INF, 0.0, -1.0, "1", True, None)],
        *[("top_k", value) for value in (2.5, NAN, -1, "3", True)],
        *[("top_p", value) for value in (NAN, INF, 0.0, -0.5, 1.5, "0.9", None)],
    ],
)
def test_sampling_settings_that_cannot_work(name, value):
    with refused(name):
        SamplingSettings(**{name: value})


@pytest.mark.parametrize("unknown", ["sotf", "greedy", "", None])
def test_an_unknown_proposal_is_refused_everywhere(llama, make_drafter, make_trajectory, unknown):
    drafter, trajectory = make_drafter(llama), make_trajectory()
    output = DraftOutput(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2))
    for call in (
        lambda: score(drafter, [trajectory], proposal=unknown),
        lambda: trajectory_acceptance(drafter, trajectory, [1.0], unknown),
        lambda: propose(drafter, output, 3, mode=unknown),
    ):
        with refused(repr(unknown), "greedy_branch, soft, independent, tree"):
            call()


def test_trees_are_no_blocks_and_blocks_no_trees(llama, make_drafter, make_trajectory):
    drafter, trajectory = make_drafter(llama), make_trajectory()
    output = DraftOutput(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2))
    for call in (
        lambda: propose(drafter, output, 3, mode="tree"),
        lambda: trajectory_acceptance(drafter, trajectory, [1.0], "tree"),
        lambda: tree_acceptance(drafter, trajectory, [1.0], proposal="soft"),
    ):
        with refused("tree"):
            call()
    for nodes in (5, [], [0], [2.5], "5"):
        with refused("nodes"):
            score(drafter, [trajectory], proposal="tree", nodes=nodes)


def test_replay_knows_the_independent_proposal(llama, make_drafter, make_trajectory):
    one, two, trajectory = make_drafter(llama, num_categories=1), make_drafter(llama), make_trajectory()
    soft, independent = (score(one, [trajectory], proposal=name) for name in ("soft", "independent"))
    assert soft.equals(independent)
    with refused("K = 1"):
        score(two, [trajectory], proposal="independent")


@pytest.mark.parametrize("name", ["category_temperatures", "draft_temperatures"])
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("temperatures", [[1.0, NAN], [INF], [-1.0], [], 1.0, "1", ["1"]])
def test_replay_refuses_temperatures_that_are_none(llama, make_drafter, make_trajectory, temperatures, branches, name):
    drafter = make_drafter(llama, num_categories=branches)
    with refused(name):
        score(drafter, [make_trajectory()], proposal="soft", **{name: temperatures})
    with refused("sampled proposals"):
        score(drafter, [make_trajectory()], draft_temperatures=[0.5, 1.0])


# -- NaN in a model ------------------------------------------------------------------------------


def broken(module, value=NAN):
    """A copy of a model with one weight of its last norm replaced."""
    module = copy.deepcopy(module)
    norm = module.norm if hasattr(module, "norm") else module.model.norm
    norm.weight.data[3] = value
    return module


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("mode", ["greedy_branch", "soft", "tree"])
@pytest.mark.parametrize("branches", [0, 1, 4])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_drafter_with_nan_is_named(llama, make_drafter, make_trajectory, branches, mode, do_sample, value):
    drafter = broken(make_drafter(llama, num_categories=branches), value)
    with refused("the drafter's", "NaN"):
        generate(llama, drafter, PROMPT, max_new_tokens=8, mode=mode, do_sample=do_sample)
    with refused("the drafter's", "NaN"):
        score(drafter, [make_trajectory()], proposal=mode)


@pytest.mark.parametrize("mode", ["greedy_branch", "soft", "tree"])
@pytest.mark.parametrize("part", ["prior", "head"])
def test_nan_in_the_prior_or_in_the_head_is_named(llama, make_drafter, part, mode):
    drafter = make_drafter(llama)
    if part == "prior":
        drafter.prior.bias.data[0] = NAN
    else:
        drafter.target_head = drafter.target_head.clone()
        drafter.target_head[7] = NAN
    with refused("the drafter's", "category" if part == "prior" else "logits"):
        generate(llama, drafter, PROMPT, max_new_tokens=8, mode=mode)


SETTINGS = [SamplingSettings(), SamplingSettings(1.0, 5), SamplingSettings(0.7, 30, 0.9), None]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_target_with_nan_is_named(llama, make_drafter, settings, value):
    model = broken(llama.model, value)
    with refused("the target's logits", "NaN"):
        generate(model, make_drafter(llama), PROMPT, settings, max_new_tokens=8, do_sample=settings is not None)


@pytest.mark.parametrize("top_k", [0, 1, 3, 1000])
@pytest.mark.parametrize("row", [[0.0, NAN], [0.0, INF], [-INF, -INF], [1e38, 0.0]])
def test_logits_that_are_no_distribution(row, top_k):
    logits = torch.randn(2, 1000, generator=generator(0))
    logits[1] = torch.tensor(row).repeat(500)
    with refused("the target's logits"):
        SamplingSettings(0.01, top_k, 0.9).support(logits)
    if row != [1e38, 0.0]:
        with refused("the target's logits"):
            target_support(logits, None)


def test_a_draft_temperature_that_takes_logits_to_infinity_is_refused(llama, make_drafter):
    with refused("draft temperature"):
        generate(llama, make_drafter(llama), PROMPT, max_new_tokens=8, mode="soft", draft_temperature=1e-40)


def test_logits_of_minus_infinity_are_tokens_that_cannot_come():
    logits = torch.full((1, 100), -INF)
    logits[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    for top_k in (0, 2, 5):
        p = SamplingSettings(1.0, top_k).probabilities(logits)
        assert torch.isfinite(p).all() and p[0, 3:].sum() == 0


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_decoder_starts_clean_after_an_error(llama, make_drafter, which):
    """Shorter prompts in the same rows, so that the columns of the failed run are still there."""
    model, drafter = copy.deepcopy(llama.model), make_drafter(llama)
    decoder = BlockDecoder(model, drafter)
    arguments = dict(max_new_tokens=8, generator=generator(0), eos_token_ids=())
    part = model.model.layers[1].self_attn.k_proj if which == "target" else drafter.fc
    before = part.weight.data.clone()
    part.weight.data[:] = NAN
    with refused(f"the {which}'s"):
        generate(model, drafter, [list(range(4, 34))], decoder=decoder, **arguments)
    part.weight.data[:] = before
    arguments["generator"] = generator(1)
    again = generate(model, drafter, PROMPT, decoder=decoder, **arguments)
    arguments["generator"] = generator(1)
    fresh = generate(model, drafter, PROMPT, **arguments)
    assert again.tokens[0].tolist() == fresh.tokens[0].tolist() and again.steps == fresh.steps


# -- NaN in the functions below --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [NAN, INF, -1.0, True, None])
def test_category_prior_of_no_temperature(temperature):
    with refused("category temperature"):
        log_category_prior(torch.zeros(1, 2), temperature)


NO_PROBABILITY = {
    "q of the drafted tokens": ("q", (NAN, INF, -0.5, 1.5)),
    "p, summed": ("p", (NAN, INF, 0.0, 0.5)),
    "[0, 1)": ("uniform", (NAN, INF, -0.1, 1.0)),
    "the law of the replacement": ("posterior", (NAN,)),
}
EACH = [(words, name, value) for words, (name, values) in NO_PROBABILITY.items() for value in values]


@pytest.mark.parametrize(("words", "name", "value"), EACH)
def test_verification_refuses_numbers_that_are_no_probability(words, name, value):
    numbers = {"q": 1.0, "p": 1 / 3, "uniform": 0.99, "posterior": 1.0} | {name: value}
    proposal = greedy_branch_proposal(torch.tensor([[[0, 1]]]), torch.zeros(1, 1), torch.tensor([0]))
    proposal.q_drafted[:], proposal.posterior[:] = numbers["q"], numbers["posterior"]
    tokens, p = torch.arange(3).expand(1, 3, 3), torch.full((1, 3, 3), numbers["p"])
    with refused(words):
        verify_block(proposal, tokens, p, uniform=torch.tensor([[0.5, numbers["uniform"]]]))


@pytest.mark.parametrize("value", [NAN, INF, -0.1, 1.1])
def test_replay_refuses_acceptance_that_is_no_probability(value):
    acceptance = torch.full((2, 4, 3), 0.5)
    acceptance[1, 2, 0] = value
    for call in (lambda: expected_passes(acceptance), lambda: expected_accepted(acceptance)):
        with refused("acceptance", "between 0 and 1"):
            call()
    # Past the end of a trajectory there may be anything.
    assert torch.isfinite(expected_passes(acceptance, torch.tensor([4, 2]))).all()
    valid = torch.ones(2, 4, 3, dtype=torch.bool)
    valid[1, 2] = False
    assert torch.isfinite(expected_accepted(acceptance, valid)).all()


@pytest.mark.parametrize("length", [torch.tensor([4, 5]), torch.tensor([-1, 2]), torch.tensor([4])])
def test_replay_refuses_lengths_outside_the_table(length):
    with refused("lengths"):
        expected_passes(torch.full((2, 4, 3), 0.5), length)


@pytest.mark.parametrize("proposal", ["greedy_branch", "soft"])
@pytest.mark.parametrize("value", [NAN, 1.0])
def test_replay_refuses_improbable_trajectories(llama, make_drafter, make_trajectory, proposal, value):
    trajectory = make_trajectory()
    trajectory.log_p[4] = value
    with refused(trajectory.prompt_id):
        score(make_drafter(llama), [trajectory], proposal=proposal)


def test_a_draft_vocabulary_that_was_never_set_is_refused(llama, make_drafter, make_trajectory):
    drafter = make_drafter(llama, draft_vocab_size=10)
    drafter.draft_token_ids.zero_()
    for call in (lambda: generate(llama, drafter, PROMPT), lambda: score(drafter, [make_trajectory()])):
        with refused("draft vocabulary", "set_draft_vocabulary"):
            call()


# -- targets ----------------------------------------------------------------------------------------


def other_target(tokenizer, build, config):
    model = seeded(4, lambda: build(config)).float().eval()
    randomise(model, seed=9)
    return wrap_target(config.model_type, model, tokenizer, MASK_TOKEN_ID)


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_mistral_without_a_window_decodes_exactly(tokenizer, make_drafter):
    target = other_target(tokenizer, MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None))
    result = generate(target, make_drafter(target), PROMPT, max_new_tokens=20, do_sample=False, eos_token_ids=())
    assert result.tokens[0].tolist() == plain_greedy(target, PROMPT[0], 20)


@pytest.mark.parametrize(
    ("build", "config", "word"),
    [
        (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=4), "window"),
        (Qwen3ForCausalLM, Qwen3Config(**SHAPE, **WINDOW), "window"),
        (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=DYNAMIC), "rope type"),
        (GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=32, n_layer=4, n_head=4), "gpt2"),
    ],
    ids=["mistral", "qwen3", "dynamic rotary", "gpt2"],
)
def test_targets_that_read_their_context_otherwise_are_refused(tokenizer, llama, make_drafter, build, config, word):
    target = other_target(tokenizer, build, config)
    with refused(word):
        generate(target, make_drafter(llama), PROMPT)


def test_a_target_in_training_with_dropout_is_refused(tokenizer, make_drafter):
    target = other_target(tokenizer, LlamaForCausalLM, LlamaConfig(**SHAPE, attention_dropout=0.1))
    drafter = make_drafter(target)
    generate(target, drafter, PROMPT, max_new_tokens=2)
    target.model.train()
    with refused("eval()"):
        generate(target, drafter, PROMPT)
