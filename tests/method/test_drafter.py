"""The drafter: configuration, backbone, category heads, reading q, saving and loading."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from dblast import drafter as drafter_module
from dblast.backbone import DBlastConfig, DraftLayer, default_taps, packed_mask, rotary, rotate
from dblast.drafter import DBlastDrafter, log_category_prior, most_likely
from dblast.errors import DBlastError
from dblast.reproduction.paper_shapes import parameters_at_paper_scale
from tests.checks import refused
from tests.conftest import MASK_TOKEN_ID as MASK, VOCABULARY_SIZE, seeded
from tests.helpers import assert_greedy, assert_same_computation, generator, move_in_memory, target_logits

def blocks(seed: int = 0, batch: int = 2, anchors: int = 3, length: int = 12, width: int = 64) -> dict:
    """Random inputs of a packed pass; every anchor lies inside its sequence."""
    rng = generator(seed)
    lengths = torch.tensor([length, length - 4, length - 7][:batch])
    return {
        "anchor_tokens": torch.randint(4, VOCABULARY_SIZE, (batch, anchors), generator=rng),
        "anchor_positions": torch.stack([torch.randperm(int(n) + 1, generator=rng)[:anchors] for n in lengths]),
        "features": torch.randn(batch, length, width, generator=rng),
        "context_lengths": lengths,
    }


@torch.no_grad()
def outputs(drafter: DBlastDrafter, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    out = drafter(**inputs)
    return drafter.logits(out.branch_hidden), out.prior_logits


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target_layers, draft_layers, taps",
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 3, [1, 14, 27]),
        (30, 2, [1, 27]),
        (36, 1, [18]),
        (4, 1, [2]),
        (1, 1, [0]),
        (4, 2, [0, 2]),
        (4, 3, [0, 1, 2]),
        (5, 2, [1, 2]),
        (2, 2, [0, 1]),
    ],
)
def test_default_taps_are_spread_evenly(target_layers, draft_layers, taps):
    assert default_taps(target_layers, draft_layers) == taps


@pytest.mark.parametrize("target_layers", range(3, 40))
@pytest.mark.parametrize("draft_layers", [1, 2, 3])
def test_default_taps_are_distinct_layers_of_the_target(target_layers, draft_layers):
    taps = default_taps(target_layers, draft_layers)
    assert taps == sorted(set(taps)) and len(taps) == draft_layers
    assert 0 <= taps[0] and taps[-1] < target_layers


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"block_size": 1}, ["block_size", "at least 2"]),
        ({"num_categories": -1}, ["num_categories", "-1"]),
        ({"dflash_config": {}}, ["mask_token_id", "not set"]),
        ({"dflash_config": {"mask_token_id": 256}}, ["mask_token_id 256", "256 tokens"]),
        ({"dflash_config": {"mask_token_id": -1}}, ["mask_token_id -1"]),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 4]}}, ["[4]", "4 layers"]),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [-1]}}, ["[-1]"]),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": []}}, ["[]"]),
    ],
)
def test_unusable_configuration_is_refused_by_check_and_by_the_model(settings, words):
    config = DBlastConfig(**({"dflash_config": {"mask_token_id": MASK}} | settings))
    for use in (config.check, lambda: DBlastDrafter(config)):
        with refused(*words):
            use()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"block_length": 0}, ["block length b", "0"]),
        ({"mask_token_id": VOCABULARY_SIZE}, ["mask_token_id 40"]),
    ],
)
def test_for_target_refuses_what_cannot_work(llama, settings, words):
    settings = dict(num_layers=2, block_length=3, mask_token_id=MASK) | settings
    with refused(*words):
        DBlastConfig.for_target(llama.model.config, **settings)


def test_for_target_takes_the_shape_of_a_llama_target(llama):
    config = DBlastConfig.for_target(llama.model.config, num_layers=2, block_length=5, mask_token_id=MASK)
    assert (config.block_size, config.block_length, config.num_target_layers) == (6, 5, 4)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (32, 8, 2)
    assert (config.vocab_size, config.intermediate_size, config.num_categories) == (VOCABULARY_SIZE, 48, 1)
    assert config.target_layer_ids == [0, 2] and config.mask_token_id == MASK
    assert config.rope_theta == 10_000.0 and not config.use_qk_norm


def test_for_target_takes_the_shape_of_a_qwen3_target(qwen3):
    config = DBlastConfig.for_target(qwen3.model.config, num_layers=1, block_length=5, mask_token_id=MASK)
    assert config.head_dim == 12 and config.rope_theta == 1_000_000.0 and config.use_qk_norm
    assert config.target_layer_ids == [2]


def test_for_target_obeys_given_taps_and_qk_norm(llama):
    chosen = dict(mask_token_id=MASK, target_layer_ids=[3, 0], use_qk_norm=True)
    config = DBlastConfig.for_target(llama.model.config, num_layers=1, block_length=2, **chosen)
    assert config.target_layer_ids == [3, 0] and config.use_qk_norm


def test_configuration_survives_json(tmp_path):
    config = DBlastConfig(
        head_dim=24,
        rope_theta=5e5,
        block_size=5,
        num_target_layers=9,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [2, 5]},
        num_categories=4,
        use_qk_norm=False,
        draft_vocab_size=17,
    )
    config.save_pretrained(tmp_path)
    loaded = DBlastConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == DBlastConfig.from_dict(json.loads(config.to_json_string())).to_dict()
    for name in ("head_dim", "rope_theta", "block_size", "num_target_layers", "dflash_config", "num_categories"):
        assert getattr(loaded, name) == getattr(config, name)
    assert loaded.use_qk_norm is False and loaded.draft_vocab_size == 17


def test_rope_base_is_read_from_either_spelling():
    stored = DBlastConfig(dflash_config={"mask_token_id": MASK}).to_dict()
    del stored["rope_theta"]
    new = DBlastConfig.from_dict(stored | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    old = DBlastConfig.from_dict(stored | {"rope_theta": 1e6, "rope_scaling": None})
    assert new.rope_theta == old.rope_theta == 1e6
    assert DBlastConfig.from_dict(json.loads(new.to_json_string())).rope_theta == 1e6


def test_scaled_rope_is_refused():
    with refused("'yarn'"):
        DBlastConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})


def test_configurations_do_not_share_their_dflash_settings():
    given = {"mask_token_id": MASK}
    DBlastConfig(dflash_config=given)
    assert given == {"mask_token_id": MASK}


# -- parameters ----------------------------------------------------------------------------------


def documented_names(layers: int, qk_norm: bool, categories: bool) -> set[str]:
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"] + (["q_norm", "k_norm"] if qk_norm else [])
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(layers):
        names |= {f"layers.{i}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
        names |= {f"layers.{i}.self_attn.{name}.weight" for name in attention}
        names |= {f"layers.{i}.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
    if categories:
        names |= {f"{head}.{kind}" for head in ("expander", "prior") for kind in ("weight", "bias")}
    return names


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("num_categories", [0, 3])
def test_parameter_names_are_the_published_ones(llama, make_drafter, qk_norm, num_categories):
    drafter = make_drafter(llama, use_qk_norm=qk_norm, num_categories=num_categories)
    assert {name for name, _ in drafter.named_parameters()} == documented_names(2, qk_norm, num_categories > 0)
    assert set(drafter.state_dict()) == documented_names(2, qk_norm, num_categories > 0)


@pytest.mark.parametrize("num_categories", [0, 1, 2, 5])
def test_added_parameters_follow_the_formula(llama, make_drafter, num_categories):
    drafter = make_drafter(llama, num_categories=num_categories)
    k, h = num_categories, 32
    assert drafter.category_parameters() == k * h**2 + 2 * k * h + k
    without = make_drafter(llama, num_categories=0)
    assert drafter.num_parameters() - without.num_parameters() == drafter.category_parameters()


@pytest.mark.parametrize(
    "hidden, intermediate, millions", [(2560, 9728, 26.2), (4096, 12288, 67.1)], ids=["Qwen3-4B", "Qwen3-8B"]
)
def test_added_parameters_at_the_papers_scale(hidden, intermediate, millions):
    shape = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=36, vocab_size=151_936)
    target = Qwen3Config(**shape, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    config = DBlastConfig.for_target(target, num_layers=5, block_length=15, mask_token_id=151_669, num_categories=4)
    with torch.device("meta"):
        drafter = DBlastDrafter(config)
    assert round(drafter.category_parameters() / 1e6, 1) == millions
    assert config.target_layer_ids == [1, 9, 17, 25, 33] and config.block_size == 16
    row = parameters_at_paper_scale().set_index("hidden_size").loc[hidden]
    assert row.added_parameters == drafter.category_parameters()
    assert row.drafter_parameters == drafter.num_parameters() - drafter.category_parameters()


# -- initial values ------------------------------------------------------------------------------


def fresh(target, num_categories: int) -> DBlastDrafter:
    """A drafter exactly as the constructor leaves it."""
    config = DBlastConfig.for_target(target.model.config, num_layers=2, block_length=3, mask_token_id=MASK)
    config.num_categories = num_categories
    return seeded(0, lambda: DBlastDrafter(config)).eval().attach(target.model)


def test_fresh_expander_barely_perturbs_the_logits(llama):
    plain, single = fresh(llama, 0), fresh(llama, 1)
    single.load_state_dict(plain.state_dict(), strict=False)
    before, after = outputs(plain, **blocks())[0], outputs(single, **blocks())[0]
    change = (after - before).norm() / before.norm()
    assert 0 < change < 0.05


def test_fresh_prior_is_exactly_flat(llama):
    drafter = fresh(llama, 4)
    assert not drafter.prior.weight.any() and not drafter.prior.bias.any()
    assert not outputs(drafter, **blocks())[1].any()


def test_fresh_branches_differ(llama):
    logits = outputs(fresh(llama, 4), **blocks())[0]
    for first in range(4):
        for second in range(first):
            assert not torch.allclose(logits[:, first], logits[:, second], atol=1e-6)


# -- the pass ------------------------------------------------------------------------------------


def test_outputs_are_sequence_major_blocks(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=2)
    out = drafter(**blocks(batch=2, anchors=3))
    assert out.branch_hidden.shape == (6, 2, 3, 32) and out.prior_logits.shape == (6, 2)
    assert drafter.logits(out.branch_hidden).shape == (6, 2, 3, VOCABULARY_SIZE)


@pytest.mark.parametrize("target_name", ["llama", "qwen3"])
def test_packed_pass_equals_one_pass_per_anchor(request, make_drafter, target_name):
    drafter = make_drafter(request.getfixturevalue(target_name), num_categories=2)
    inputs = blocks(batch=3, anchors=4, length=14)
    packed = outputs(drafter, **inputs)
    single = []
    for row in range(3):
        for anchor in range(4):
            position = inputs["anchor_positions"][row : row + 1, anchor : anchor + 1]
            single.append(
                outputs(
                    drafter,
                    anchor_tokens=inputs["anchor_tokens"][row : row + 1, anchor : anchor + 1],
                    anchor_positions=position,
                    features=inputs["features"][row : row + 1, : int(position)],
                )
            )
    for whole, parts in zip(packed, zip(*single, strict=True), strict=True):
        assert_same_computation(whole, torch.cat(parts))


def test_padding_beyond_the_real_context_is_never_seen(llama, make_drafter):
    drafter, inputs = make_drafter(llama), blocks()
    inputs["anchor_positions"][1] = inputs["context_lengths"][1] + 2  # further than the context reaches
    before = outputs(drafter, **inputs)
    inputs["features"][1, inputs["context_lengths"][1] :] = 100.0
    for old, new in zip(before, outputs(drafter, **inputs), strict=True):
        assert_same_computation(new, old)


def test_a_block_without_context_is_finite(llama, make_drafter):
    inputs = blocks(batch=1, anchors=1)
    inputs["anchor_positions"][:] = 0
    logits, prior = outputs(make_drafter(llama), **inputs)
    assert logits.isfinite().all() and prior.isfinite().all()


def test_no_gradient_reaches_the_context_at_or_after_the_anchor(llama, make_drafter):
    drafter, inputs = make_drafter(llama), blocks(batch=1, anchors=3)
    inputs["anchor_positions"][0] = torch.tensor([2, 9, 5])
    inputs["features"].requires_grad_(True)
    out = drafter(**inputs)
    for block, position in enumerate([2, 9, 5]):
        score = drafter.logits(out.branch_hidden[block]).square().sum() + out.prior_logits[block].square().sum()
        (gradient,) = torch.autograd.grad(score, inputs["features"], retain_graph=True)
        assert gradient[0, :position].abs().sum(-1).gt(0).all()
        assert torch.equal(gradient[0, position:], torch.zeros_like(gradient[0, position:]))


def test_a_block_does_not_see_another_blocks_anchor(llama, make_drafter):
    drafter, inputs = make_drafter(llama), blocks(batch=1, anchors=3)
    before = outputs(drafter, **inputs)
    inputs["anchor_tokens"][0, 1] = 4 + (inputs["anchor_tokens"][0, 1] + 1) % 30
    after = outputs(drafter, **inputs)
    for old, new in zip(before, after, strict=True):
        assert_same_computation(new[[0, 2]], old[[0, 2]])
        assert not torch.allclose(old[1], new[1])


def test_no_gradient_reaches_another_blocks_anchor_embedding(llama, make_drafter):
    drafter, inputs = make_drafter(llama), blocks(batch=1, anchors=3)
    inputs["anchor_tokens"][0] = torch.tensor([10, 11, 12])
    drafter.target_embedding = drafter.target_embedding.clone().requires_grad_(True)
    out = drafter(**inputs)
    (gradient,) = torch.autograd.grad(drafter.logits(out.branch_hidden[1]).sum(), drafter.target_embedding)
    assert gradient[11].any() and gradient[MASK].any()
    assert not gradient[10].any() and not gradient[12].any()


def test_every_slot_attends_to_later_slots_of_its_block(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=0)
    embedding = torch.randn(1, 4, 32, generator=generator(0), requires_grad=True)
    cos_sin = rotary(torch.arange(4)[None], 8, 10_000.0)
    empty = (torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 0, 8))
    first = drafter.layers[0](embedding, cos_sin, empty, None)[0, 0].sum()
    (gradient,) = torch.autograd.grad(first, embedding)
    assert gradient[0].abs().sum(-1).gt(0).all()


@torch.no_grad()
def single_block_logits(drafter, features, context_positions, anchor_position) -> torch.Tensor:
    context = drafter.context_cache(features, context_positions)
    hidden = drafter.block_hidden(torch.tensor([[7]]), torch.tensor([[anchor_position]]), context, None)
    return drafter.logits(drafter.heads(hidden).branch_hidden)


def test_shifting_every_position_changes_nothing(qwen3, make_drafter):
    drafter, features = make_drafter(qwen3), blocks()["features"][:1]
    here = single_block_logits(drafter, features, torch.arange(12)[None], 12)
    there = single_block_logits(drafter, features, 37 + torch.arange(12)[None], 49)
    torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)


def test_shifting_only_the_anchor_changes_the_logits(llama, make_drafter):
    drafter, features = make_drafter(llama), blocks()["features"][:1]
    here = single_block_logits(drafter, features, torch.arange(12)[None], 12)
    there = single_block_logits(drafter, features, torch.arange(12)[None], 13)
    assert (here - there).abs().max() > 1e-3


def test_context_and_block_lie_at_their_true_positions(llama, make_drafter):
    """A pass written out layer by layer: context at 0..11, anchor at 12, mask slots at 13..15."""
    drafter, inputs = make_drafter(llama), blocks(batch=1, anchors=1)
    inputs["anchor_tokens"][:], inputs["anchor_positions"][:] = 7, 12
    config = drafter.config
    before = rotary(torch.arange(12)[None], config.head_dim, config.rope_theta)
    block = rotary(torch.tensor([[12, 13, 14, 15]]), config.head_dim, config.rope_theta)
    with torch.no_grad():
        context = drafter.hidden_norm(drafter.fc(inputs["features"]))
        x = llama.model.get_input_embeddings()(torch.tensor([[7, MASK, MASK, MASK]]))
        for layer in drafter.layers:
            x = layer(x, block, layer.self_attn.keys_values(context, before), None)
        expected = drafter.heads(drafter.norm(x))
        found = drafter(**inputs)
    assert_same_computation(found.branch_hidden, expected.branch_hidden)
    assert_same_computation(found.prior_logits, expected.prior_logits)


def test_attention_mask_equals_a_slow_loop():
    positions, lengths, size, width = torch.tensor([[0, 3, 9], [2, 2, 5]]), torch.tensor([9, 4]), 3, 9
    mask = packed_mask(positions, width, size, lengths)
    assert mask.shape == (2, 1, 9, width + 9) and mask.dtype == torch.bool
    for row in range(2):
        for query in range(9):
            for key in range(width + 9):
                if key < width:
                    seen = key < positions[row, query // size] and key < lengths[row]
                else:
                    seen = (key - width) // size == query // size
                assert mask[row, 0, query, key] == bool(seen)


def test_attention_mask_without_lengths_allows_the_whole_context():
    positions = torch.tensor([[2, 6]])
    assert torch.equal(packed_mask(positions, 5, 2), packed_mask(positions, 5, 2, torch.tensor([5])))


# -- agreement with transformers -----------------------------------------------------------------


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_rotary_equals_transformers(theta):
    rng = generator(0)
    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope)
    positions = torch.randint(0, 5_000, (2, 7), generator=rng)
    queries, keys = (torch.randn(2, heads, 7, 16, generator=rng) for heads in (4, 2))
    cos, sin = LlamaRotaryEmbedding(config)(queries, positions)
    expected = apply_rotary_pos_emb(queries, keys, cos, sin)
    cos_sin = rotary(positions, 16, theta)
    for ours, theirs in zip((rotate(queries, cos_sin), rotate(keys, cos_sin)), expected, strict=True):
        # Angles of thousands of radians leave float32 a few 1e-4.
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("target_name, layer_class", [("llama", LlamaDecoderLayer), ("qwen3", Qwen3DecoderLayer)])
def test_layer_attends_like_the_targets_layer_in_both_directions(request, target_name, layer_class, context):
    """With the normed inputs of earlier positions as context, the block's rows are those of the full layer."""
    target = request.getfixturevalue(target_name)
    theirs = target.model.model.layers[1]
    assert isinstance(theirs, layer_class)
    config = DBlastConfig.for_target(target.model.config, num_layers=1, block_length=3, mask_token_id=MASK)
    ours = DraftLayer(config)
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, 9, 32, generator=generator(0)), torch.arange(3, 12).expand(2, -1)
    before, block = (rotary(part, config.head_dim, config.rope_theta) for part in positions.tensor_split([context], 1))
    with torch.no_grad():
        embeddings = target.model.model.rotary_emb(x, positions)
        everything = torch.zeros(2, 1, 9, 9)
        expected = theirs(x, attention_mask=everything, position_ids=positions, position_embeddings=embeddings)
        seen = ours.self_attn.keys_values(ours.input_layernorm(x[:, :context]), before)
        found = ours(x[:, context:], block, seen, None)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(found, expected[:, context:], atol=1e-5, rtol=1e-5)


# -- category heads and q ------------------------------------------------------------------------


def test_heads_follow_equation_13(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=3)
    hidden = torch.randn(2, 2, 4, 32, generator=generator(0))
    with torch.no_grad():
        out = drafter.heads(hidden)
        flat = hidden.view(4, 4, 32)
        for z in range(3):
            rows = slice(32 * z, 32 * (z + 1))
            shift = flat[:, 1:] @ drafter.expander.weight[rows].T + drafter.expander.bias[rows]
            torch.testing.assert_close(out.branch_hidden[:, z], flat[:, 1:] + shift)
            prior = flat[:, 0] @ drafter.prior.weight[z] + drafter.prior.bias[z]
            torch.testing.assert_close(out.prior_logits[:, z], prior)


def test_without_categories_the_backbone_is_the_one_branch(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=0)
    hidden = torch.randn(5, 4, 32, generator=generator(0))
    out = drafter.heads(hidden)
    assert torch.equal(out.branch_hidden, hidden[:, None, 1:])
    assert torch.equal(out.log_prior(), torch.zeros(5, 1))


def random_branches(k: int = 3) -> torch.Tensor:
    return torch.randn(5, k, 3, 32, generator=generator(0))


@pytest.mark.parametrize("draft_vocab_size", [0, 11])
@pytest.mark.parametrize("target_name", ["llama", "qwen3"])
def test_q_agrees_with_a_naive_product(request, make_drafter, target_name, draft_vocab_size):
    """Of every token, those outside a draft vocabulary, which have no probability, included."""
    target = request.getfixturevalue(target_name)
    drafter, hidden = make_drafter(target, num_categories=3, draft_vocab_size=draft_vocab_size), random_branches()
    naive = torch.einsum("nkbh,vh->nkbv", hidden, target.model.get_output_embeddings().weight)
    if draft_vocab_size:
        outside = torch.ones(VOCABULARY_SIZE, dtype=torch.bool).index_fill(0, drafter.draft_token_ids, False)
        naive = naive.masked_fill(outside, -torch.inf)
    torch.testing.assert_close(target_logits(drafter, hidden), naive, atol=1e-5, rtol=1e-5)
    log_q, every = naive.log_softmax(-1), torch.arange(VOCABULARY_SIZE).expand(5, 3, -1)
    torch.testing.assert_close(drafter.log_q(hidden, every), log_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drafter.log_q(hidden, every[..., 7]), log_q[..., 7], atol=1e-5, rtol=1e-5)
    assert_greedy(drafter.greedy_tokens(hidden), naive)


@pytest.mark.parametrize("limit", [1, 100, 2**22])
def test_greedy_tokens_in_parts_are_the_same(llama, make_drafter, monkeypatch, limit):
    drafter, hidden = make_drafter(llama, num_categories=3), random_branches()
    logits = drafter.logits(hidden)
    monkeypatch.setattr("dblast.drafter.GREEDY_LOGITS", limit)
    assert logits.argmax(-1).unique().numel() > 5
    assert_greedy(drafter.greedy_tokens(hidden), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_most_likely_is_the_first_of_equals(dtype):
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [-torch.inf, -2.0, -1.0]], requires_grad=True).to(dtype)
    assert most_likely(logits).tolist() == [1, 0, 2]
    assert most_likely(logits.view(3, 1, 3)).shape == (3, 1) and most_likely(logits[0]).shape == ()


def test_gradient_of_log_q_is_finite_with_tokens_outside_the_draft_vocabulary(llama, make_drafter):
    drafter = make_drafter(llama, num_categories=2, draft_vocab_size=11)
    hidden = random_branches(2).requires_grad_(True)
    tokens = torch.arange(15).view(5, 3)
    log_q = drafter.log_q(hidden, tokens)
    log_q.clamp(min=-60).sum().backward()
    assert log_q.isinf().any() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("ids", [[1, 2], [1, 1, 2], [1, 2, VOCABULARY_SIZE], [-1, 2, 3]])
def test_unusable_draft_vocabulary_is_refused(llama, make_drafter, ids):
    drafter = make_drafter(llama, draft_vocab_size=3)
    with refused("vocabulary"):
        drafter.set_draft_vocabulary(torch.tensor(ids))


def test_changing_the_draft_vocabulary_does_not_leave_old_rows_of_the_head(llama, make_drafter):
    drafter, hidden = make_drafter(llama, num_categories=2, draft_vocab_size=3), random_branches(2)
    drafter.set_draft_vocabulary(torch.tensor([20, 30, 35]))
    with pytest.raises(DBlastError, match="attach"):
        drafter.greedy_tokens(hidden)
    full = torch.einsum("nkbh,vh->nkbv", hidden, llama.model.get_output_embeddings().weight)[..., [20, 30, 35]]
    torch.testing.assert_close(drafter.attach(llama.model).logits(hidden), full, atol=1e-5, rtol=1e-5)


def test_category_prior_divides_by_the_temperature_and_at_zero_is_the_first_largest():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0]])
    torch.testing.assert_close(log_category_prior(logits, 0.5), (2 * logits).log_softmax(-1))
    assert torch.equal(log_category_prior(logits, 0.0).exp(), torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))


# -- the target's tables -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": 64}, ["hidden size 64", "32"]),
        ({"vocab_size": 41}, ["vocabulary 41", "40"]),
        ({"num_target_layers": 6}, ["target layers 6", "4"]),
    ],
)
def test_attach_refuses_another_target(llama, change, words):
    shape = dict(hidden_size=32, vocab_size=40, num_target_layers=4, num_attention_heads=4)
    config = DBlastConfig(**(shape | change), dflash_config={"mask_token_id": MASK})
    with refused(*words):
        DBlastDrafter(config).attach(llama.model)


# -- saving and loading --------------------------------------------------------------------------


@pytest.mark.parametrize("num_categories", [0, 1, 4])
@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 13}], ids=["whole", "draft-vocabulary"])
@pytest.mark.parametrize("target_name", ["llama", "qwen3"])
def test_save_and_load_give_the_same_outputs(request, make_drafter, tmp_path, target_name, settings, num_categories):
    target = request.getfixturevalue(target_name)
    drafter = make_drafter(target, num_categories=num_categories, **settings)
    drafter.save_pretrained(tmp_path)
    loaded, info = DBlastDrafter.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    loaded.eval().attach(target.model)
    for saved, read in zip(outputs(drafter, **blocks()), outputs(loaded, **blocks()), strict=True):
        assert_same_computation(read, saved)
    hidden = random_branches(max(1, num_categories))
    assert_greedy(loaded.greedy_tokens(hidden), target_logits(drafter, hidden))


def test_save_and_load_keep_every_bit_of_the_weights_wherever_they_lie_in_memory(llama, make_drafter, tmp_path):
    drafter = make_drafter(llama, num_categories=4, draft_vocab_size=13)
    expected = outputs(drafter, **blocks())
    weights = {name: value.clone() for name, value in drafter.state_dict().items()}
    for place in ("once", "twice"):
        move_in_memory(drafter)
        # A whole vector register is at least 16 bytes.
        assert all(weight.data_ptr() % 16 for weight in drafter.parameters())
        for actual, wanted in zip(outputs(drafter, **blocks()), expected, strict=True):
            assert_same_computation(actual, wanted)
        drafter.save_pretrained(tmp_path / place)
        drafter = DBlastDrafter.from_pretrained(tmp_path / place).eval().attach(llama.model)
    for name, value in weights.items():
        assert torch.equal(drafter.state_dict()[name], value), name
    for actual, wanted in zip(outputs(drafter, **blocks()), expected, strict=True):
        assert_same_computation(actual, wanted)


@pytest.mark.parametrize("draft_vocab_size", [0, 12])
def test_large_tables_of_logits_are_never_held_and_give_the_same(llama, make_drafter, monkeypatch, draft_vocab_size):
    """The tiled path, taken above a size, equals the plain one in values and gradients."""
    found = []
    for limit in (2**23, 0):
        monkeypatch.setattr("dblast.drafter.PLAIN_LOGITS", limit)
        drafter = make_drafter(llama, draft_vocab_size=draft_vocab_size)
        rng = generator(5)
        hidden = torch.randn(6, 2, 3, 32, generator=rng).transpose(1, 2).transpose(1, 2).requires_grad_()
        tokens = torch.randint(40, (6, 3), generator=rng)
        log_q = drafter.log_q(hidden, tokens)
        log_q.clamp(min=-60).pow(2).sum().backward()
        found.append((log_q.detach(), hidden.grad))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)
    assert found[0][1].abs().max() > 1e-3


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 100])
def test_how_many_anchors_attend_side_by_side_changes_nothing(llama, make_drafter, monkeypatch, limit):
    """Outputs, and the gradients of all parameters, whether or not the rows divide the anchors evenly."""
    inputs = blocks(anchors=5)
    found = []
    for size in (5, limit):
        monkeypatch.setattr(drafter_module, "ANCHORS_PER_ROW", size)
        drafter = make_drafter(llama)
        out = drafter(**inputs)
        weights = torch.randn(out.branch_hidden.shape, generator=torch.Generator().manual_seed(0))
        ((out.branch_hidden * weights).sum() + out.prior_logits.square().sum()).backward()
        found.append([out.branch_hidden, out.prior_logits, *(parameter.grad for parameter in drafter.parameters())])
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 1e-4
        assert_same_computation(other, one)
