"""Through Hugging Face's ``generate``: whatever the caller asks for is honoured, or refused in one line."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from dblast.decoding import custom_generate, generate
from dblast.support.generation_options import READ, read_options
from dblast.sampling import SamplingSettings
from dblast.targets import wrap_target
from tests.checks import refused
from tests.conftest import VOCABULARY_SIZE
from tests.helpers import generator
from tests.method.test_decoding import Recorder

IDS = torch.tensor([[5, 6, 7]])
SAMPLING = dict(do_sample=True, temperature=0.8, top_k=15, top_p=0.9, max_new_tokens=12)


@pytest.fixture
def call(llama, make_drafter):
    """``generate`` of the target through the loop."""

    def run(**arguments):
        arguments = {"inputs": IDS, "custom_generate": custom_generate, "drafter": make_drafter(llama)} | arguments
        return llama.model.generate(**arguments)

    return run


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


REFUSED = {
    "num_beams": 2,
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "min_p": 0.1,
    "top_h": 0.5,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "min_new_tokens": 3,
    "min_length": 5,
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 2,
    "bad_words_ids": [[5]],
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "sequence_bias": [[[5], 1.0]],
    "exponential_decay_length_penalty": (2, 1.1),
    "guidance_scale": 1.5,
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "max_time": 5.0,
    "use_cache": False,
    "cache_implementation": "static",
    "prompt_lookup_num_tokens": 3,
    "low_memory": True,
    "dola_layers": "high",
}
OUTPUTS = {name: True for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")}


@pytest.mark.parametrize(("name", "value"), (REFUSED | OUTPUTS).items())
def test_an_option_that_is_not_used_is_refused_by_name(call, name, value):
    arguments = dict(return_dict_in_generate=True) if name in OUTPUTS else {}
    with refused(name):
        call(**SAMPLING, **arguments, **{name: value})


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "use_cache"])
def test_it_is_refused_whatever_way_it_comes(call, llama, name, monkeypatch):
    for arguments in ({"generation_config": GenerationConfig(**SAMPLING, **{name: REFUSED[name]})}, {}):
        with refused(name):
            if not arguments:
                monkeypatch.setattr(llama.model.generation_config, name, REFUSED[name])
                arguments = SAMPLING
            call(**arguments)


def test_contrastive_search_is_refused(call):
    with refused("penalty_alpha"):
        call(penalty_alpha=0.6, top_k=4, max_new_tokens=4)


def test_every_option_of_transformers_is_read_or_refused():
    """Also those that come with a later release, and those that somebody invents."""
    for name in [*vars(GenerationConfig()), "invented"]:
        if name.startswith("_") or name in READ:
            continue
        config = GenerationConfig(max_new_tokens=3)
        read_options(config, IDS, VOCABULARY_SIZE, None, None, {})
        setattr(config, name, 0.123)
        with refused(name):
            read_options(config, IDS, VOCABULARY_SIZE, None, None, {})


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize(
    "processors",
    [
        [TopKLogitsWarper(1)],
        [TemperatureLogitsWarper(0.1)],
        [TopPLogitsWarper(0.9)],
        [TopKLogitsWarper(15)],
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(15), TopPLogitsWarper(0.9)],
        [lambda ids, scores: scores],
    ],
)
def test_the_callers_logits_processors_are_refused(call, processors, do_sample):
    with refused(type(processors[0]).__name__):
        call(**SAMPLING | {"do_sample": do_sample}, logits_processor=processors)


CRITERIA = [Never(), MaxLengthCriteria(5), EosTokenCriteria(7), EosTokenCriteria([2, 7])]


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda criterion: type(criterion).__name__)
def test_the_callers_stopping_criteria_are_refused(call, criterion):
    """Also those that transformers would put in the place of its own."""
    with refused(type(criterion).__name__):
        call(**SAMPLING, stopping_criteria=[criterion])


def full_cache(model):
    cache = DynamicCache(config=model.config)
    model(IDS, cache=cache, use_cache=True)
    return cache


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"drafter": None}, "drafter"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [5, 6]}, "PrefixConstrained"),
        ({"position_ids": torch.tensor([[0, 2, 4]])}, "position_ids"),
        ({"attention_mask": torch.tensor([[1, 2, 1]])}, "attention mask"),
        ({"labels": IDS}, "labels"),
        ({"logits_to_keep": 2}, "logits_to_keep"),
        ({"max_new_tokens": 94}, "context limit"),
        ({"category_temperature": float("nan")}, "category temperature"),
        ({"mode": "nope"}, "nope"),
        ({"temperature": float("inf")}, "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_arguments_that_cannot_work(call, arguments, word):
    with refused(word):
        call(**SAMPLING | arguments)


def test_stop_strings_are_refused(call, tokenizer):
    """By transformers already, which keeps the tokenizer from a callable."""
    with pytest.raises(ValueError, match="stop strings"):
        call(**SAMPLING, stop_strings=["w5"], tokenizer=tokenizer)


def test_embeddings_and_a_cache_of_ones_own_are_refused(call, llama):
    with refused("inputs_embeds"):
        embeddings = llama.model.get_input_embeddings()(IDS)
        call(inputs=None, inputs_embeds=embeddings, **SAMPLING)
    for cache in (DynamicCache(config=llama.model.config), full_cache(llama.model)):
        with refused("cache"):
            call(cache=cache, **SAMPLING)


def test_what_changes_nothing_is_taken(call, llama, make_drafter):
    plain = call(**SAMPLING, generator=generator(1))
    asked = call(
        **SAMPLING,
        generator=generator(1),
        repetition_penalty=1.0,
        num_beams=1,
        typical_p=1.0,
        use_cache=True,
        disable_compile=True,
        attention_mask=torch.ones_like(IDS),
        position_ids=torch.arange(3).unsqueeze(0),
    )
    assert asked.tolist() == plain.tolist()
    settings = SamplingSettings(top_k=50)
    by_default = call(do_sample=True, generator=generator(2), max_length=9)
    ours = generate(llama, make_drafter(llama), IDS, settings, max_new_tokens=6, generator=generator(2))
    assert by_default.tolist() == [ours.sequences[0].tolist()]


@pytest.mark.parametrize(
    "drafting",
    [
        dict(mode="soft", draft_temperature=0.6, draft_top_k=5, category_temperature=0.5, verification="block"),
        dict(mode="tree", nodes=9, category_temperature=0.5),
    ],
    ids=["soft", "tree"],
)
def test_arguments_on_drafting_are_passed_through(call, llama, make_drafter, drafting):
    through = call(**SAMPLING, **drafting, generator=generator(1), return_dict_in_generate=True)
    settings = SamplingSettings(0.8, 15, 0.9)
    ours = generate(llama, make_drafter(llama), IDS, settings, max_new_tokens=12, generator=generator(1), **drafting)
    # A tree's size shows in the steps alone: what is drawn does not depend on it.
    assert through.sequences.tolist() == [ours.sequences[0].tolist()] and through.steps == ours.steps


def test_several_sequences_of_one_prompt_are_independent_draws(call, llama, make_drafter):
    ids = torch.tensor([[0, 5, 6], [8, 9, 10]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    out = call(inputs=ids, attention_mask=mask, num_return_sequences=3, generator=generator(4), **SAMPLING)
    prompts = [[5, 6]] * 3 + [[8, 9, 10]] * 3
    settings = SamplingSettings(0.8, 15, 0.9)
    ours = generate(llama, make_drafter(llama), prompts, settings, max_new_tokens=12, generator=generator(4))
    assert out.shape[0] == 6
    for row, tokens in zip(out[:, 3:].tolist(), ours.tokens, strict=True):
        assert row[: len(tokens)] == tokens.tolist()
    assert len({tuple(row) for row in out[:3].tolist()}) == 3


def test_a_streamer_reaches_the_loop_only_through_the_function(call):
    mine, lost = Recorder(), Recorder()
    out = call(custom_generate=functools.partial(custom_generate, streamer=mine), generator=generator(0), **SAMPLING)
    assert torch.cat(mine.values).tolist() == out[0].tolist() and mine.ended == 1
    call(streamer=lost, generator=generator(0), **SAMPLING)
    # As documented: transformers shows it the prompt, and gives a callable no way to know of it.
    assert torch.cat(lost.values).tolist() == IDS[0].tolist() and not lost.ended


EOS_FORMS = [
    lambda e: e,
    lambda e: [e],
    lambda e: (e, 39),
    lambda e: torch.tensor(e),
    lambda e: torch.tensor([e, 39]),
    lambda e: np.int64(e),
    lambda e: np.array([e]),
    lambda e: [torch.tensor(e)],
]


@pytest.mark.parametrize("form", range(len(EOS_FORMS)))
def test_the_end_of_sequence_comes_in_every_form_that_transformers_takes(call, llama, make_drafter, form, monkeypatch):
    drafter, arguments = make_drafter(llama), dict(max_new_tokens=12, do_sample=False)
    whole = generate(llama, drafter, IDS, eos_token_ids=(), **arguments).tokens[0].tolist()
    end = whole[4]
    short = whole[: whole.index(end) + 1]
    eos = EOS_FORMS[form](end)
    assert generate(llama, drafter, IDS, eos_token_ids=eos, **arguments).tokens[0].tolist() == short
    if not isinstance(eos, list) or isinstance(eos[0], int):
        assert call(eos_token_id=eos, pad_token_id=0, **arguments)[0, 3:].tolist() == short
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", eos)
    assert generate(llama.model, drafter, IDS, **arguments).tokens[0].tolist() == short
    assert end in wrap_target("other", llama.model, llama.tokenizer, None).eos_token_ids


@pytest.mark.parametrize("eos", [True, 2.0, [2.0], "2", VOCABULARY_SIZE, -1, [[2], None, "x"], torch.tensor([2.0])])
def test_an_end_of_sequence_that_is_no_token_is_refused(call, llama, make_drafter, eos):
    with refused("eos_token_ids"):
        generate(llama, make_drafter(llama), IDS, eos_token_ids=eos)
    config = GenerationConfig(max_new_tokens=3)
    config.eos_token_id = eos
    with refused("eos_token_id"):
        read_options(config, IDS, VOCABULARY_SIZE, None, None, {})
