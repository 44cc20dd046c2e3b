"""The decoding loop: exact greedy output, caches, accounting, edges, and agreement with replay."""

from __future__ import annotations

import copy
import io
import re
import sys

import numpy as np
import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer
from typer.testing import CliRunner

from dblast.reproduction.checkpoints import shipped_drafter
from dblast.reproduction.cli import app
from dblast.cache import BlockDecoder
from dblast.reproduction.demo import default_drafter
from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.errors import DBlastError
from dblast.decoding import Generated, Step, custom_generate, generate, target_support
from dblast.proposals import greedy_branch_proposal, propose, soft_proposal
from dblast.reproduction.estimates import ratio_with_influence, standard_error
from dblast.sampling import SamplingSettings
from dblast.replay import score
from dblast.show import BlockView, Piece, show_blocks
from dblast.targets import tap_features, wrap_target
from dblast.training import Trainer, TrainingConfig
from dblast.trajectories import EncodedPrompt, sample_batch
from tests.checks import refused
from tests.conftest import EOS_TOKEN_ID, MASK_TOKEN_ID, VOCABULARY_SIZE
from tests.helpers import assert_within_errors, generator, random_log_prior, random_position_log_q

PROMPTS = [[5, 6, 7], [8], [9, 10, MASK_TOKEN_ID, 12, 11, MASK_TOKEN_ID]]
SETTINGS = SamplingSettings(temperature=1.0, top_k=20, top_p=0.95)


KNOWN: dict[tuple, int] = {}


def plain_greedy(target, prompt, count, eos=()):
    """Greedy decoding by prefilling the whole sequence for every token."""
    ids = list(prompt)
    for _ in range(count):
        key = (target.name, *ids)
        if key not in KNOWN:
            with torch.no_grad():
                KNOWN[key] = int(target.model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(KNOWN[key])
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


@pytest.fixture
def oracle(monkeypatch):
    """Makes the loop draft given tokens, whatever the drafter says; q is a point mass."""

    def install(tokens_at):
        def propose(drafter, output, length, **kwargs):
            drafted = torch.tensor([tokens_at(row, length) for row in range(len(output.prior_logits))])
            only = torch.zeros(len(drafted), 1)
            return greedy_branch_proposal(drafted.unsqueeze(1), only, only.squeeze(1).long())

        monkeypatch.setattr(sys.modules["dblast.decoding"], "propose", propose)

    return install


# -- output ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy_branch", "soft"])
@pytest.mark.parametrize("branches", [0, 1, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_decoding_is_plain_greedy_decoding_alone_and_in_a_batch(request, make_drafter, name, branches, mode):
    target = request.getfixturevalue(name)
    drafter = make_drafter(target, num_categories=branches)
    arguments = dict(max_new_tokens=11, do_sample=False, mode=mode, eos_token_ids=())
    together = generate(target, drafter, PROMPTS, **arguments)
    for prompt, tokens in zip(PROMPTS, together.tokens, strict=True):
        alone = generate(target, drafter, [prompt], **arguments)
        assert tokens.tolist() == alone.tokens[0].tolist() == plain_greedy(target, prompt, 11)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("draft", [(0.0, 0), (0.3, 0), (2.0, 3)])
@pytest.mark.parametrize("branches", [1, 4])
def test_greedy_decoding_at_any_draft_temperature_and_verification(llama, make_drafter, branches, draft, verification):
    drafting = dict(mode="soft", draft_temperature=draft[0], draft_top_k=draft[1], verification=verification)
    drafter = make_drafter(llama, num_categories=branches)
    result = generate(llama, drafter, PROMPTS, max_new_tokens=11, do_sample=False, eos_token_ids=(), **drafting)
    assert [tokens.tolist() for tokens in result.tokens] == [plain_greedy(llama, prompt, 11) for prompt in PROMPTS]


@pytest.mark.parametrize("branches", [0, 1, 4])
def test_draft_temperature_of_zero_is_the_greedy_branch(llama, make_drafter, branches):
    """Token for token; a top-k of one too, whatever the temperature (its draws cost random numbers)."""
    drafter = make_drafter(llama, num_categories=branches)
    arguments = dict(max_new_tokens=12, eos_token_ids=())
    greedy = generate(llama, drafter, PROMPTS, SETTINGS, generator=generator(4), **arguments)
    cold = generate(
        llama, drafter, PROMPTS, SETTINGS, generator=generator(4), mode="soft", draft_temperature=0, **arguments
    )
    assert [t.tolist() for t in cold.tokens] == [t.tolist() for t in greedy.tokens] and cold.steps == greedy.steps
    some = max(1, branches)
    output = DraftOutput(torch.randn(6, some, 3, 32, generator=generator(1)), torch.zeros(6, some))
    ours, one = (
        propose(drafter, output, 3, generator=generator(5), **how)
        for how in ({}, {"mode": "soft", "draft_temperature": 0.7, "draft_top_k": 1})
    )
    assert torch.equal(ours.category, one.category) and torch.equal(ours.drafted, one.drafted)
    torch.testing.assert_close(ours.q_drafted, one.q_drafted)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_greedy_decoding_with_drafts_that_are_right_for_a_while(llama, make_drafter, oracle, right):
    """Rows whose drafts follow the true text for different numbers of tokens (until one ends): the text stays."""
    truth = [plain_greedy(llama, prompt, 24) for prompt in PROMPTS]
    place = [0] * len(PROMPTS)

    def drafts(row, length):
        good = (right + row) % 4
        block = (truth[row][place[row] :] + [0] * length)[:length]
        place[row] += min(good, length) + 1
        return [token if i < good else (token + 1) % VOCABULARY_SIZE for i, token in enumerate(block)]

    oracle(drafts)
    result = generate(llama, make_drafter(llama), PROMPTS, max_new_tokens=12, do_sample=False, eos_token_ids=())
    assert [tokens.tolist() for tokens in result.tokens] == [row[:12] for row in truth]
    first = [steps[0].accepted for steps in result.steps]
    assert first == [(right + row) % 4 for row in range(3)]


@pytest.mark.parametrize("mode", ["greedy_branch", "soft"])
def test_same_seed_same_tokens_whatever_the_global_state(llama, make_drafter, mode):
    drafter = make_drafter(llama)
    arguments = dict(max_new_tokens=12, mode=mode)
    first = generate(llama, drafter, PROMPTS, SETTINGS, generator=generator(4), **arguments)
    before = torch.get_rng_state()
    torch.rand(3)
    second = generate(llama, drafter, PROMPTS, SETTINGS, generator=generator(4), **arguments)
    torch.set_rng_state(before)
    assert [t.tolist() for t in first.tokens] == [t.tolist() for t in second.tokens]
    assert first.steps == second.steps
    generate(llama, drafter, PROMPTS, SETTINGS, generator=generator(4), **arguments)
    assert torch.equal(torch.get_rng_state(), before)
    other = generate(llama, drafter, PROMPTS, SETTINGS, generator=generator(5), **arguments)
    assert [t.tolist() for t in first.tokens] != [t.tolist() for t in other.tokens]


def test_bfloat16_models_decode(llama, make_drafter):
    model = copy.deepcopy(llama.model).to(torch.bfloat16)
    drafter = make_drafter(llama).to(torch.bfloat16)
    result = generate(model, drafter, PROMPTS, SETTINGS, max_new_tokens=9, eos_token_ids=(), generator=generator(0))
    assert [len(tokens) for tokens in result.tokens] == [9, 9, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [None, 1, 5, 20])
def test_support_from_candidates_is_that_of_the_whole_vocabulary(top_k, dtype):
    """Also with many ties at the k-th place, inside the candidates or beyond them."""
    logits = torch.randn(2, 30, 500, generator=generator(0)).mul(3).to(dtype)
    logits[0, :10] = logits[0, :10].round()
    logits[1, :10] = (logits[1, :10] / 4).round()
    for settings in (SamplingSettings(0.7, top_k, 0.8), SamplingSettings(1.5, top_k)):
        for row in logits.flatten(0, 1):
            tokens, p = target_support(row.unsqueeze(0), settings)
            dense = torch.zeros(1, 500).scatter(-1, tokens, p)
            torch.testing.assert_close(dense, settings.probabilities(row.unsqueeze(0)), rtol=0, atol=1e-6)
        tokens, p = target_support(logits, settings)
        dense = torch.zeros_like(logits, dtype=torch.float32).scatter(-1, tokens, p)
        torch.testing.assert_close(dense, settings.probabilities(logits), rtol=0, atol=1e-6)


# -- accounting --------------------------------------------------------------------------------


def check_accounting(result, most):
    """Steps of blocks or of trees: at most so many drafted tokens each, which with the passes' own make the text."""
    for prompt, tokens, steps in zip(result.prompts, result.tokens, result.steps, strict=True):
        assert sum(step.accepted for step in steps) + len(steps) == len(tokens)
        position = len(prompt)
        for step in steps:
            assert step.position == position
            assert step.emitted == step.accepted + 1
            assert 0 <= step.accepted <= step.drafted <= most
            position += step.emitted


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("mode", ["greedy_branch", "soft"])
def test_statistics_add_up_and_the_budget_holds(llama, make_drafter, budget, mode):
    drafter = make_drafter(llama, num_categories=3)
    for seed in range(3):
        result = generate(
            llama, drafter, PROMPTS, SETTINGS, max_new_tokens=budget, mode=mode, generator=generator(seed)
        )
        check_accounting(result, drafter.config.block_length)
        for step in sum(result.steps, []):
            assert step.category >= 0 or step.drafted == 0
            assert step.accepted == step.drafted or step.ending != "bonus"
        for tokens in result.tokens:
            ended = EOS_TOKEN_ID in tokens.tolist()
            assert len(tokens) == budget or ended and tokens[-1] == EOS_TOKEN_ID
            assert (tokens == EOS_TOKEN_ID).sum() == ended


def test_rejecting_everything_is_one_token_per_pass(llama, make_drafter, oracle):
    truth = plain_greedy(llama, PROMPTS[0], 8)
    wrong = next(token for token in range(VOCABULARY_SIZE) if token not in truth)
    oracle(lambda row, length: [wrong] * length)
    result = generate(llama, make_drafter(llama), PROMPTS[:1], max_new_tokens=8, do_sample=False, eos_token_ids=())
    assert result.tokens[0].tolist() == truth
    assert result.accepted_length == 0 and result.passes == 8
    assert [step.ending for step in result.steps[0]] == ["replacement"] * 7 + ["bonus"]
    assert result.steps[0][-1].drafted == 0  # no room was left to draft


def perfect(truth, start=0):
    place = [start]

    def drafts(row, length):
        block = truth[place[0] : place[0] + length]
        place[0] += length + 1
        return block

    return drafts


def test_accepting_everything_adds_the_bonus(llama, make_drafter, oracle):
    truth = plain_greedy(llama, PROMPTS[0], 20)
    oracle(perfect(truth))
    result = generate(llama, make_drafter(llama), PROMPTS[:1], max_new_tokens=11, do_sample=False, eos_token_ids=())
    assert result.tokens[0].tolist() == truth[:11]
    assert [step.emitted for step in result.steps[0]] == [4, 4, 3]
    assert {step.ending for step in result.steps[0]} == {"bonus"}
    assert result.accepted_length == 8 / 3


@pytest.mark.parametrize("end", range(8))
def test_end_of_sequence_inside_a_block(llama, make_drafter, oracle, end):
    """With b = 3 the ends 0..2 and 4..6 are draft tokens, 3 and 7 are bonus tokens."""
    truth = plain_greedy(llama, [9, 10, 12], 20)
    first = truth.index(truth[end])
    oracle(perfect(truth))
    streamer = Recorder()
    result = generate(
        llama,
        make_drafter(llama),
        [[9, 10, 12]],
        max_new_tokens=20,
        do_sample=False,
        eos_token_ids=[truth[end], VOCABULARY_SIZE - 1],
        streamer=streamer,
    )
    expected = truth[: first + 1]
    if VOCABULARY_SIZE - 1 in expected:
        expected = expected[: expected.index(VOCABULARY_SIZE - 1) + 1]
    assert result.tokens[0].tolist() == expected
    assert sum((value.tolist() for value in streamer.values[1:]), []) == expected
    check_accounting(result, 3)
    last = result.steps[0][-1]
    assert last.ending == ("bonus" if (len(expected) - 1) % 4 == 3 else "accepted")


def test_row_that_ends_early_leaves_the_others_alone(llama, make_drafter):
    truths = [plain_greedy(llama, prompt, 16) for prompt in PROMPTS]
    eos = [truths[1][2]]
    result = generate(llama, make_drafter(llama), PROMPTS, max_new_tokens=16, do_sample=False, eos_token_ids=eos)
    for prompt, tokens in zip(PROMPTS, result.tokens, strict=True):
        assert tokens.tolist() == plain_greedy(llama, prompt, 16, eos)


# -- caches ------------------------------------------------------------------------------------


@torch.no_grad()
def compare_draft_with_fresh_prefill(target, drafter, out, row, ids):
    """A row of what the decoder drafts against a pass that knows no cache."""
    fresh = target.model(torch.tensor([ids]), output_hidden_states=True)
    features = tap_features(fresh.hidden_states, drafter.config.target_layer_ids)[:, : len(ids) - 1]
    block = drafter(torch.tensor([[ids[-1]]]), torch.tensor([[len(ids) - 1]]), features)
    torch.testing.assert_close(out.branch_hidden[row], block.branch_hidden[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.prior_logits[row], block.prior_logits[0], atol=1e-4, rtol=1e-4)


def compare_with_fresh_prefill(target, drafter, decoder, sequences):
    """Next logits of both models against passes that know no cache."""
    out = decoder.draft()
    drafted = torch.arange(4, 7).expand(len(sequences), -1)
    logits = decoder.score(drafted)
    for row, ids in enumerate(sequences):
        assert decoder.lengths[row] == len(ids)
        with torch.no_grad():
            fresh = target.model(torch.tensor([[*ids, 4, 5, 6]])).logits[0, len(ids) - 1 :]
        torch.testing.assert_close(logits[row], fresh, atol=1e-4, rtol=1e-4)
        compare_draft_with_fresh_prefill(target, drafter, out, row, ids)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_caches_after_a_rejection_at_every_slot(request, make_drafter, name, attention):
    target = request.getfixturevalue(name)
    drafter = make_drafter(target)
    decoder = BlockDecoder(target.model, drafter)
    target.model.set_attn_implementation(attention)
    try:
        for accepted in ([0], [1], [2], [3], [0, 1, 2], [3, 0, 3], [2, 3, 1]):
            sequences = [list(prompt) for prompt in PROMPTS[: len(accepted)]]
            decoder.start([torch.tensor(ids) for ids in sequences])
            for step, shift in enumerate((0, 1, 2)):
                drafted = torch.randint(VOCABULARY_SIZE, (len(accepted), 3), generator=generator(step))
                decoder.draft()
                decoder.score(drafted)
                counts = [(count + shift) % 4 for count in accepted]
                token = torch.arange(len(accepted)) + 20 + step
                decoder.commit(counts, token)
                for row, count in enumerate(counts):
                    sequences[row] += [*drafted[row, :count].tolist(), 20 + step + row]
                compare_with_fresh_prefill(target, drafter, decoder, sequences)
            if len(sequences) == 3:
                decoder.keep([0, 2])
                compare_with_fresh_prefill(target, drafter, decoder, [sequences[0], sequences[2]])
    finally:
        target.model.set_attn_implementation("sdpa")


def test_reused_decoder_is_like_a_fresh_one_after_a_longer_prompt(llama, make_drafter):
    drafter = make_drafter(llama)
    decoder = BlockDecoder(llama.model, drafter)
    long = [list(range(4, 34)), list(range(10, 36))]
    generate(llama, drafter, long, SETTINGS, max_new_tokens=20, generator=generator(0), decoder=decoder)
    for prompts in ([[5, 6], [7]], [[8, 9, 10]]):
        fresh = generate(llama, drafter, prompts, SETTINGS, max_new_tokens=14, generator=generator(1))
        again = generate(llama, drafter, prompts, SETTINGS, max_new_tokens=14, generator=generator(1), decoder=decoder)
        assert [t.tolist() for t in fresh.tokens] == [t.tolist() for t in again.tokens]
        assert fresh.steps == again.steps
    other = make_drafter(llama)
    with refused("BlockDecoder"):
        generate(llama, other, [[5]], decoder=decoder)


def test_buffers_grow_without_a_reservation(llama, make_drafter):
    drafter = make_drafter(llama)
    decoder = BlockDecoder(llama.model, drafter)
    sequences = [[5, 6], [7]]
    decoder.start([torch.tensor(ids) for ids in sequences])
    for step in range(6):
        drafted = torch.full((2, 3), 10 + step)
        decoder.score(drafted)
        decoder.commit([3, step % 2], torch.tensor([20, 21]))
        sequences[0] += [10 + step] * 3 + [20]
        sequences[1] += [10 + step] * (step % 2) + [21]
    compare_with_fresh_prefill(llama, drafter, decoder, sequences)


# -- edges -------------------------------------------------------------------------------------


def test_sequence_may_fill_the_context_and_not_pass_it(llama, make_drafter):
    drafter, prompt = make_drafter(llama), list(range(4, 34))
    limit = llama.model.config.max_position_embeddings
    arguments = dict(do_sample=False, eos_token_ids=())
    full = generate(llama, drafter, [prompt, [5]], max_new_tokens=limit - len(prompt), **arguments)
    assert len(full.sequences[0]) == limit
    assert full.tokens[0].tolist() == plain_greedy(llama, prompt, limit - len(prompt))
    with refused("context limit", str(limit)):
        generate(llama, drafter, [[5], prompt], max_new_tokens=limit - len(prompt) + 1, **arguments)


def test_models_that_do_not_fit_are_refused(llama, make_drafter):
    config = make_drafter(llama).config
    with refused("attach"):
        generate(llama, DBlastDrafter(config), [[5]])
    foreign = make_drafter(llama)
    foreign.config.num_target_layers = 9
    with refused("another target"):
        generate(llama, foreign, [[5]])


def test_tensor_prompts_one_token_and_a_budget_of_one(llama, make_drafter):
    result = generate(llama, make_drafter(llama), torch.tensor([[5], [6]]), max_new_tokens=1, do_sample=False)
    assert [tokens.tolist() for tokens in result.tokens] == [plain_greedy(llama, [token], 1) for token in (5, 6)]
    assert result.passes == 2 and result.accepted_length == 0
    assert result.steps[0] == [Step(position=1, category=-1, drafted=0, accepted=0, emitted=1, ending="bonus")]


def test_zero_category_temperature_drafts_the_likeliest_branch(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=4)
    arguments = dict(max_new_tokens=12, eos_token_ids=(), category_temperature=0.0)
    result = generate(llama, drafter, PROMPTS[:1], SETTINGS, generator=generator(0), **arguments)
    decoder = BlockDecoder(llama.model, drafter)
    for step in result.steps[0][:3]:
        decoder.start([result.sequences[0][: step.position]])
        assert step.category == int(decoder.draft().prior_logits.argmax())


def test_soft_proposal_of_a_draft_vocabulary_is_that_of_zeros_elsewhere():
    rng = generator(6)
    token_ids = torch.tensor([1, 3, 4])
    columns = torch.tensor([-1, 0, -1, 1, 2])
    small = random_position_log_q(2, 2, 3, rng).expand(4, -1, -1, -1)
    log_prior = random_log_prior(2, rng).expand(4, -1)
    dense = torch.full((4, 2, 2, 5), -torch.inf, dtype=torch.float64)
    dense[..., token_ids] = small
    category, column = torch.tensor([0, 1, 0, 1]), torch.tensor([[0, 1], [2, 0], [1, 1], [2, 2]])
    ours = soft_proposal(small, log_prior, category, column, token_ids, columns)
    whole = soft_proposal(dense, log_prior, category, token_ids[column])
    assert torch.equal(ours.drafted, whole.drafted)
    torch.testing.assert_close(ours.q_drafted, whole.q_drafted)
    candidates = torch.arange(5).expand(4, -1)
    for slot in range(3):
        slots = torch.full((4,), slot)
        torch.testing.assert_close(ours.q(slots, candidates), whole.q(slots, candidates))


@pytest.mark.parametrize("mode", ["greedy_branch", "soft"])
def test_draft_vocabulary_leaves_greedy_output_alone(llama, make_drafter, mode):
    drafter = make_drafter(llama, draft_vocab_size=10)
    result = generate(llama, drafter, PROMPTS, max_new_tokens=10, do_sample=False, mode=mode, eos_token_ids=())
    assert [t.tolist() for t in result.tokens] == [plain_greedy(llama, prompt, 10) for prompt in PROMPTS]


# -- through Hugging Face ----------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.view(-1))

    def end(self):
        self.ended += 1


def test_custom_generate_with_a_padded_batch(llama, make_drafter):
    drafter = make_drafter(llama)
    width = max(len(prompt) for prompt in PROMPTS)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    truths = [plain_greedy(llama, prompt, 10) for prompt in PROMPTS]
    eos = [truths[0][3], truths[1][5]]
    out = llama.model.generate(
        ids,
        attention_mask=mask,
        custom_generate=custom_generate,
        drafter=drafter,
        do_sample=False,
        max_new_tokens=10,
        eos_token_id=eos,
        return_dict_in_generate=True,
    )
    stock = llama.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=10, eos_token_id=eos)
    assert out.sequences.tolist() == stock.tolist()
    assert len(out.steps) == 3 and out.accepted_length >= 0


def test_text_streams_through_a_hugging_face_streamer(llama, make_drafter, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    result = generate(
        llama, make_drafter(llama), PROMPTS[:1], SETTINGS, max_new_tokens=9, generator=generator(0), streamer=streamer
    )
    assert "".join(streamer) == tokenizer.decode(result.tokens[0])


# -- online decoding and replay ------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(llama, make_drafter):
    """Drafters of a random target after a few steps of training, and target-sampled trajectories to score them on."""
    settings = SamplingSettings(temperature=0.3, top_k=20, top_p=0.95)
    prompts = [EncodedPrompt(str(i), "random", (4 + i % 8, 5 + i % 3)) for i in range(768)]
    arguments = dict(max_new_tokens=24, taps=make_drafter(llama).config.target_layer_ids)
    training = sample_batch(llama, prompts[:192], settings, generator=generator(0), **arguments)
    evaluation = sample_batch(llama, prompts, settings, generator=generator(1), **arguments)
    config = TrainingConfig(loss="NLL", steps=60, learning_rate=4e-3, sequences=16, anchors=12)
    drafters = {}
    for branches in (1, 4):
        trainer = Trainer(make_drafter(llama, num_categories=branches), training, config)
        for _ in range(config.steps):
            trainer.advance()
        drafters[branches] = trainer.drafter.eval()
    return drafters, settings, prompts, evaluation


@pytest.mark.parametrize(
    ("mode", "draft_temperature", "draft_top_k"),
    [("greedy_branch", 1.0, 0), ("soft", 1.0, 0), ("tree", 1.0, 0), ("soft", 0.6, 4)],
)
@pytest.mark.parametrize("branches", [1, 4])
def test_online_accepted_length_is_that_of_replay(llama, trained, branches, mode, draft_temperature, draft_top_k):
    drafters, settings, prompts, evaluation = trained
    scores = score(
        drafters[branches],
        evaluation,
        proposal=mode,
        nodes=(6,),
        draft_temperatures=(draft_temperature,),
        draft_top_k=draft_top_k,
    )
    replayed, influence = ratio_with_influence((scores.emitted - scores.passes).to_numpy(), scores.passes.to_numpy())
    result = generate(
        llama,
        drafters[branches],
        [prompt.ids for prompt in prompts],
        settings,
        max_new_tokens=24,
        mode=mode,
        nodes=6,
        draft_temperature=draft_temperature,
        draft_top_k=draft_top_k,
        generator=generator(2),
    )
    accepted = np.array([sum(step.accepted for step in steps) for steps in result.steps], dtype=float)
    passes = np.array([len(steps) for steps in result.steps], dtype=float)
    online, online_influence = ratio_with_influence(accepted, passes)
    assert online == pytest.approx(result.accepted_length)
    assert 0.3 < online < drafters[branches].config.block_length - 0.3
    error = np.hypot(standard_error(influence), standard_error(online_influence))
    assert error < 0.03
    assert_within_errors(online, replayed, error)


# -- the view ----------------------------------------------------------------------------------


def test_view_tells_the_kinds_of_tokens_apart(llama, tokenizer):
    steps = [Step(1, 0, 3, 2, 3, "replacement"), Step(4, 1, 3, 3, 4, "bonus"), Step(8, 0, 3, 1, 2, "accepted")]
    result = Generated([torch.tensor([5])], [torch.arange(6, 15)], [steps])
    view = show_blocks(result, tokenizer)
    kinds = [piece.kind for piece in view.pieces]
    assert kinds == ["accepted"] * 2 + ["replacement"] + ["accepted"] * 3 + ["bonus"] + ["accepted"] * 2
    assert str(view) == tokenizer.decode(range(6, 15))
    page = view._repr_html_()
    assert page.count("border-left") == 3 and 'title="pass 2: bonus token' in page
    assert view.accepted_length == 2.0 and "accepted length 2.00" in view.summary and view.summary in page
    assert re.sub(r"\x1b\[[\d;]*m", "", view.ansi()).startswith(str(view))
    with refused("row 1"):
        show_blocks(result, tokenizer, row=1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_view_without_colours_marks_the_targets_own_tokens(monkeypatch):
    pieces = [
        Piece("Once", "replacement", 0),
        Piece(" upon", "accepted", 1),
        Piece(" a", "bonus", 1),
        Piece("", "accepted", 2),
        Piece("\n", "replacement", 2),
        Piece(" [x]", "accepted", 3),
    ]
    view = BlockView(tuple(pieces), 0.5, 4)
    legend = "accepted  [replacement]  {bonus}"
    assert view.marked() == f"[Once] upon {{a}}[]\n [x]\n\n{legend}"
    assert str(view) == "Once upon a\n [x]"
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert view.text(Terminal()) == view.ansi() and "\x1b" in view.ansi()
    assert view.text(io.StringIO()) == view.marked() and "\x1b" not in view.marked()
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert view.text() == view.ansi()
    monkeypatch.setenv("NO_COLOR", "1")
    assert view.text() == view.text(Terminal()) == view.marked()


def test_view_escapes_html_and_waits_for_whole_characters():
    class Bytes:
        def decode(self, tokens, **kwargs):
            return bytes(tokens).decode("utf-8", "replace")

    data = "<é".encode()
    result = Generated([torch.tensor([1])], [torch.tensor(list(data))], [[Step(1, 0, 3, 2, 3, "replacement")]])
    view = show_blocks(result, Bytes())
    assert [piece.text for piece in view.pieces] == ["<", "", "é"]
    assert "&lt;" in view._repr_html_() and "><</span>" not in view._repr_html_()


def test_command_line_decodes_and_shows(llama, make_drafter, tmp_path):
    llama.model.save_pretrained(tmp_path / "target")
    llama.tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(llama).save_pretrained(tmp_path / "drafter")
    arguments = ["generate", "--prompt", "w5 w6", "--target", str(tmp_path / "target"), "--max-new-tokens", "8"]
    for extra in ([], ["--temperature", "0"], ["--mode", "soft"]):
        done = CliRunner().invoke(app, [*arguments, "--drafter", str(tmp_path / "drafter"), *extra])
        assert done.exit_code == 0, done.output
        assert "accepted length" in done.output and "with plain decoding" in done.output
        # Into a pipe: marks instead of colours.
        assert "[replacement]" in done.output and "\x1b" not in done.output
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, DBlastError) and "--drafter" in str(done.exception)
    done = CliRunner().invoke(app, [*arguments, "--drafter", str(tmp_path / "none")])
    assert isinstance(done.exception, DBlastError) and "holds no drafter" in str(done.exception)


def test_without_a_trained_drafter_the_shipped_one_decodes(monkeypatch, tmp_path):
    monkeypatch.setenv("DBLAST_CACHE", str(tmp_path))
    assert default_drafter() == shipped_drafter("smollm2")


def test_a_plain_dflash_drafter_decodes_as_one_branch(llama, make_drafter):
    plain = make_drafter(llama, num_categories=0)
    heads = plain.with_categories(1, seed=0)
    torch.nn.init.zeros_(heads.expander.weight)
    by_plain, by_heads = (
        generate(llama, drafter, PROMPTS, SETTINGS, max_new_tokens=12, generator=generator(3)) for drafter in (plain, heads)
    )
    assert [t.tolist() for t in by_plain.tokens] == [t.tolist() for t in by_heads.tokens]
    assert by_plain.accepted_length == by_heads.accepted_length


def test_target_without_eos_ids_and_a_bare_model(llama, make_drafter):
    bare = wrap_target("bare", llama.model, llama.tokenizer, MASK_TOKEN_ID)
    drafter = make_drafter(llama)
    by_target = generate(bare, drafter, PROMPTS, SETTINGS, max_new_tokens=10, generator=generator(0))
    by_model = generate(llama.model, drafter, PROMPTS, SETTINGS, max_new_tokens=10, generator=generator(0))
    assert [t.tolist() for t in by_target.tokens] == [t.tolist() for t in by_model.tokens]
