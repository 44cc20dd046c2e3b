"""Anchors, batches, and training that can stop and go on."""

from __future__ import annotations

import json
import math
import runpy
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dblast import drafter as drafter_module
from dblast.losses import LOSSES, get_loss
from dblast.support import states
from dblast.training import AnchorSampler
from dblast.trajectories import pack
from dblast.backbone import DBlastConfig
from dblast.errors import ArtefactError, DBlastError
from dblast.training import new_drafter
from dblast.reproduction.objectives import OBJECTIVES
from dblast.reproduction.paths import ROOT
from dblast.replay import score, trajectory_acceptance
from dblast.training import Trainer, TrainingConfig, batch_loss, learning_rate_factor, loss_and_coverage, train
from tests.checks import one_line
from tests.helpers import assert_close, assert_within_errors, frequency_error

STATE = "state.safetensors"
SMALL = TrainingConfig(steps=20, sequences=2, anchors=4, evaluate_every=6, checkpoint_every=4, learning_rate=3e-3)


@pytest.fixture
def trajectories(make_trajectory):
    return [make_trajectory(prompt=2 + seed, response=7 + 2 * seed, seed=seed) for seed in range(5)]


# -- anchors -------------------------------------------------------------------------------------


@pytest.fixture
def counted(make_trajectory):
    """Prompt 10 11 12, response 20 21 22 23 24; log p and features tell their position."""
    base = make_trajectory(prompt=3, response=5, width=2)
    return replace(
        base,
        prompt_ids=torch.tensor([10, 11, 12]),
        response_ids=torch.tensor([20, 21, 22, 23, 24]),
        log_p=torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5]),
        features=torch.arange(7)[:, None].expand(7, 2).to(torch.bfloat16),
    )


def test_slot_k_is_labelled_with_the_kth_token_after_the_anchor(counted):
    batch = pack([counted], [torch.tensor([2])], block_length=3)
    assert batch.anchor_tokens.tolist() == [[21]]
    assert counted.tokens[batch.anchor_positions].tolist() == [[21]]
    for k in (1, 2, 3):
        assert batch.tokens[0, k - 1] == counted.tokens[int(batch.anchor_positions) + k]
    assert batch.tokens.tolist() == [[22, 23, 24]] and batch.valid.all()


def test_first_anchor_is_the_prompts_last_token(counted):
    batch = pack([counted], [torch.tensor([0])], block_length=3)
    assert batch.anchor_tokens.tolist() == [[12]] and batch.anchor_positions.tolist() == [[2]]
    assert batch.tokens.tolist() == [[20, 21, 22]]


def test_log_p_belongs_to_the_same_tokens(counted):
    batch = pack([counted], [torch.tensor([0, 2])], block_length=3)
    torch.testing.assert_close(batch.log_p, torch.tensor([[-0.1, -0.2, -0.3], [-0.3, -0.4, -0.5]]))


def test_slots_past_the_end_are_not_valid(counted):
    batch = pack([counted], [torch.tensor([2, 3, 4])], block_length=3)
    assert batch.valid.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    assert batch.tokens[1, :2].tolist() == [23, 24] and batch.tokens[2, 0] == 24


def test_features_reach_up_to_the_furthest_anchor(counted):
    batch = pack([counted], [torch.tensor([1, 4, 0])], block_length=3)
    # The furthest anchor sits at position 3 + 4 - 1 = 6: positions 0..5 lie before it.
    assert batch.context_lengths.tolist() == [6] and batch.features[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_sequences_of_other_lengths_are_padded_with_zeros(counted):
    short = replace(counted, prompt_ids=torch.tensor([12]), features=1 + counted.features[:5])
    batch = pack([counted, short], [torch.tensor([4]), torch.tensor([1])], block_length=2)
    assert batch.context_lengths.tolist() == [6, 1]
    assert batch.features[1, :, 0].tolist() == [1, 0, 0, 0, 0, 0]
    assert batch.anchor_positions.tolist() == [[6], [1]]
    assert batch.tokens.tolist() == [[24, 24], [21, 22]] and batch.valid.tolist() == [[True, False], [True, True]]


def test_a_prompt_of_one_token_has_an_anchor_without_context(counted):
    alone = replace(counted, prompt_ids=torch.tensor([12]), features=counted.features[:5])
    batch = pack([alone], [torch.tensor([0])], block_length=2)
    assert batch.context_lengths.tolist() == [0] and batch.anchor_positions.tolist() == [[0]]
    assert batch.features.shape[:2] == (1, 1)


def test_every_pass_visits_each_trajectory_once(make_trajectory):
    # Response tokens name their trajectory.
    trajectories = [replace(make_trajectory(seed=i), response_ids=torch.full((10,), 20 + i)) for i in range(5)]
    sampler = AnchorSampler(
        trajectories, block_length=3, sequences=2, anchors=3, generator=torch.Generator().manual_seed(0)
    )
    seen = [int(tokens[0]) for _ in range(10) for tokens in sampler.next().tokens.view(2, 3, 3)[:, 0]]
    passes = [seen[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(one) == [20, 21, 22, 23, 24] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


def test_anchors_inside_a_trajectory_are_distinct_until_all_are_used(make_trajectory):
    trajectory = make_trajectory(prompt=3, response=6)
    sampler = AnchorSampler(
        [trajectory], block_length=2, sequences=1, anchors=9, generator=torch.Generator().manual_seed(0)
    )
    counts = Counter((sampler.next().anchor_positions[0] - 2).tolist())
    assert set(counts) == set(range(6)) and sorted(counts.values()) == [1, 1, 1, 2, 2, 2]


def test_every_anchor_is_drawn_equally_often(make_trajectory):
    sampler = AnchorSampler(
        [make_trajectory(prompt=1, response=8)],
        block_length=2,
        sequences=1,
        anchors=2,
        generator=torch.Generator().manual_seed(0),
    )
    counts = Counter(int(p) for _ in range(800) for p in sampler.next().anchor_positions[0])
    # 1600 draws over 8 anchors; two of a batch differ, so that frequencies vary a little less than this.
    assert_within_errors([counts[p] / 1600 for p in range(8)], [1 / 8] * 8, frequency_error(1 / 8, 1600))
    assert counts.total() == 1600


def test_sampler_goes_on_from_a_stored_state(trajectories):
    def sampler(seed: int) -> AnchorSampler:
        generator = torch.Generator().manual_seed(seed)
        return AnchorSampler(trajectories, block_length=3, sequences=2, anchors=3, generator=generator, with_support=True)

    first, second = sampler(0), sampler(99)
    first.next()
    second.load_state(first.state())
    for _ in range(5):
        for ours, theirs in zip(vars(first.next()).values(), vars(second.next()).values(), strict=True):
            assert torch.equal(ours, theirs)


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"loss": "KL"}, ["'KL'", "NLL", "AL", "CE"]),
        ({"optimizer": "sgd"}, ["'sgd'", "adamw", "muon"]),
        ({"matrix_learning_rate": 0.0}, ["matrix_learning_rate"]),
        ({"construction": "half"}, ["'half'", "all_prefixes"]),
        ({"precision": "float16"}, ["'float16'", "bfloat16"]),
        ({"steps": 0}, ["steps", "0"]),
        ({"sequences": 0}, ["sequences"]),
        ({"anchors": -3}, ["anchors", "-3"]),
        ({"evaluate_every": 0}, ["evaluate_every"]),
        ({"checkpoint_every": 0}, ["checkpoint_every"]),
        ({"learning_rate": 0.0}, ["learning_rate"]),
        ({"learning_rate": float("nan")}, ["learning_rate"]),
    ],
)
def test_unusable_training_configuration_is_refused(settings, words):
    with pytest.raises(DBlastError) as error:
        TrainingConfig(**settings)
    one_line(error, *words)


def test_schedule_warms_up_and_falls_to_zero():
    config = TrainingConfig(steps=100, warmup_ratio=0.1)
    factors = [learning_rate_factor(step, config) for step in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0 and factors[55] == pytest.approx(0.5) and factors[100] == pytest.approx(0.0)
    assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))


# -- resuming ------------------------------------------------------------------------------------


def assert_same(first, second) -> None:
    """Nested containers of tensors and numbers, equal to the last bit."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, two in zip(first, second, strict=True):
            assert_same(one, two)
    else:
        assert first == second or (first != first and second != second)


def mean_accepted(trajectories):
    def evaluate(drafter) -> dict:
        table = score(drafter, trajectories[:2])
        # A NumPy number, as tables give them: it must survive the checkpoint.
        return {"accepted": table.anchor_accepted.sum() / table.anchors.sum()}

    return evaluate


@pytest.mark.parametrize(
    ("loss", "optimizer"), [("CE", "adamw"), ("NLL", "adamw"), ("AL", "adamw"), ("CE", "muon"), ("AL", "muon")]
)
@pytest.mark.parametrize("stops", [[10], [7, 13]], ids=["one-stop", "two-stops"])
def test_stopping_and_going_on_changes_nothing(llama, make_drafter, trajectories, tmp_path, loss, optimizer, stops):
    config = replace(SMALL, loss=loss, optimizer=optimizer)
    evaluate = mean_accepted(trajectories)
    whole = make_drafter(llama, random_heads=False)
    history = train(whole, trajectories, config, tmp_path / "whole", evaluate=evaluate)
    for stop in stops:
        parts = make_drafter(llama, random_heads=False)
        train(parts, trajectories, config, tmp_path / "parts", evaluate=evaluate, stop_after=stop)
    parts = make_drafter(llama, random_heads=False)
    resumed = train(parts, trajectories, config, tmp_path / "parts", evaluate=evaluate)
    assert_same(whole.state_dict(), parts.state_dict())
    assert_same(history, resumed)
    whole, parts = ((tmp_path / name / STATE).read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_a_killed_run_goes_on_from_its_last_checkpoint(llama, make_drafter, trajectories, tmp_path, monkeypatch):
    whole = make_drafter(llama)
    history = train(whole, trajectories, SMALL, tmp_path / "whole")
    advance = Trainer.advance

    def killed(self):
        if self.step == 11:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        train(make_drafter(llama), trajectories, SMALL, tmp_path / "parts")
    monkeypatch.undo()
    with safe_open(tmp_path / "parts" / STATE, "pt") as file:
        assert json.loads(file.metadata()["state"].split(" ", 1)[1])["step"] == 8
    parts = make_drafter(llama)
    assert_same(history, train(parts, trajectories, SMALL, tmp_path / "parts"))
    assert_same(whole.state_dict(), parts.state_dict())


def test_a_finished_run_is_not_trained_further(llama, make_drafter, trajectories, tmp_path):
    first, second = make_drafter(llama), make_drafter(llama)
    history = train(first, trajectories, SMALL, tmp_path)
    assert_same(history, train(second, trajectories, SMALL, tmp_path))
    assert_same(first.state_dict(), second.state_dict())


def test_history_has_both_ends_and_every_point_between(llama, make_drafter, trajectories, tmp_path):
    history = train(make_drafter(llama), trajectories, SMALL, tmp_path, evaluate=lambda drafter: {"one": 1})
    assert [point["step"] for point in history] == [0, 6, 12, 18, 20]
    assert all(point["one"] == 1 for point in history)
    assert history[0]["loss"] != history[0]["loss"] and all(point["loss"] > 0 for point in history[1:])


def test_history_losses_are_means_since_the_last_point(llama, make_drafter, trajectories, tmp_path):
    trainer = Trainer(make_drafter(llama), trajectories, SMALL)
    losses = [trainer.advance() for _ in range(20)]
    history = train(make_drafter(llama), trajectories, SMALL, tmp_path)
    assert history[1]["loss"] == pytest.approx(sum(losses[:6]) / 6)
    assert history[-1]["loss"] == pytest.approx(sum(losses[18:]) / 2)


@pytest.mark.parametrize("size", [0, 100, 5_000])
def test_damaged_checkpoint_is_refused(llama, make_drafter, trajectories, tmp_path, size):
    train(make_drafter(llama), trajectories, SMALL, tmp_path, stop_after=5)
    state = tmp_path / STATE
    state.write_bytes(state.read_bytes()[:size])
    with pytest.raises(ArtefactError) as error:
        train(make_drafter(llama), trajectories, SMALL, tmp_path)
    one_line(error, "damaged", str(state))


def test_file_that_is_no_checkpoint_is_refused(llama, make_drafter, trajectories, tmp_path):
    save_file({"something": torch.ones(1)}, tmp_path / STATE)
    with pytest.raises(ArtefactError) as error:
        train(make_drafter(llama), trajectories, SMALL, tmp_path)
    one_line(error, str(tmp_path / STATE))


@pytest.mark.parametrize("place", [0.01, 0.3, 0.6, 0.999])
def test_a_checkpoint_with_a_flipped_bit_is_refused(llama, make_drafter, trajectories, tmp_path, place):
    train(make_drafter(llama), trajectories, SMALL, tmp_path, stop_after=5)
    state = tmp_path / STATE
    data = bytearray(state.read_bytes())
    data[int(place * len(data))] ^= 1
    state.write_bytes(data)
    with pytest.raises(ArtefactError) as error:
        train(make_drafter(llama), trajectories, SMALL, tmp_path)
    one_line(error, "damaged", str(state), "delete")


def test_checkpoint_of_another_run_is_refused(llama, make_drafter, trajectories, tmp_path):
    train(make_drafter(llama), trajectories, SMALL, tmp_path, stop_after=5, key="this")
    with pytest.raises(ArtefactError) as error:
        train(make_drafter(llama), trajectories, SMALL, tmp_path, key="that")
    one_line(error, "another run", str(tmp_path / STATE), "delete")


def test_a_checkpoint_holds_tensors_and_json_alone(llama, make_drafter, trajectories, tmp_path):
    """The parts that a run goes on from: weights, both moments and steps of the optimiser, order, generator, history."""
    train(make_drafter(llama), trajectories, SMALL, tmp_path, stop_after=5)
    names = set(load_file(tmp_path / STATE))
    assert {"model.fc.weight", "optimizer.0.0.exp_avg", "optimizer.0.0.step", "sampler.order", "sampler.generator"} <= names


@pytest.mark.parametrize("change", [{"seed": 1}, {"loss": "AL"}, {"steps": 30}, {"learning_rate": 1e-4}])
def test_checkpoint_of_another_configuration_is_refused(llama, make_drafter, trajectories, tmp_path, change):
    train(make_drafter(llama), trajectories, SMALL, tmp_path, stop_after=5)
    with pytest.raises(ArtefactError) as error:
        train(make_drafter(llama), trajectories, replace(SMALL, **change), tmp_path)
    one_line(error, "another training configuration")


def test_checkpoint_of_another_drafter_is_refused(llama, make_drafter, trajectories, tmp_path):
    train(make_drafter(llama, num_categories=2), trajectories, SMALL, tmp_path, stop_after=5)
    with pytest.raises(ArtefactError) as error:
        train(make_drafter(llama, num_categories=4), trajectories, SMALL, tmp_path)
    one_line(error, str(tmp_path / STATE))


def test_a_kill_while_writing_keeps_the_earlier_checkpoint(llama, make_drafter, trajectories, tmp_path, monkeypatch):
    train(make_drafter(llama), trajectories, SMALL, tmp_path / "a", stop_after=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    def cut_off(tensors, path, metadata):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(states, "save_file", cut_off)
    with pytest.raises(KeyboardInterrupt):
        train(make_drafter(llama), trajectories, SMALL, tmp_path / "b", stop_after=8)
    monkeypatch.undo()
    first, second = make_drafter(llama), make_drafter(llama)
    assert_same(
        train(first, trajectories, SMALL, tmp_path / "a"), train(second, trajectories, SMALL, tmp_path / "b")
    )
    assert_same(first.state_dict(), second.state_dict())


# -- nothing to train on -------------------------------------------------------------------------


def emptied(trajectory):
    return replace(trajectory, **{name: getattr(trajectory, name)[:0] for name in ("response_ids", "log_p", "support", "support_log_p")})


@pytest.mark.parametrize("responses, words", [(0, "no trajectories"), (3, "all 3 responses are empty")])
def test_no_data_is_refused(llama, make_drafter, trajectories, tmp_path, responses, words):
    """It once went round and round for ever."""
    with pytest.raises(DBlastError) as error:
        train(make_drafter(llama), [emptied(t) for t in trajectories[:responses]], SMALL, tmp_path / "new")
    one_line(error, "nothing to train on", words)
    assert not (tmp_path / "new").exists()


def test_empty_responses_are_left_out(llama, make_drafter, trajectories, tmp_path):
    mixed = [emptied(trajectories[0]), *trajectories[1:3], emptied(trajectories[3]), trajectories[4]]
    first, second = make_drafter(llama), make_drafter(llama)
    train(first, mixed, SMALL, tmp_path / "a")
    train(second, [mixed[i] for i in (1, 2, 4)], SMALL, tmp_path / "b")
    assert_same(first.state_dict(), second.state_dict())


# -- randomness ----------------------------------------------------------------------------------


def test_same_seed_same_result_whatever_the_global_state(llama, make_drafter, trajectories, tmp_path):
    first, second = make_drafter(llama), make_drafter(llama)
    train(first, trajectories, SMALL, tmp_path / "a")
    torch.rand(7)
    train(second, trajectories, SMALL, tmp_path / "b")
    assert_same(first.state_dict(), second.state_dict())


def test_another_seed_gives_another_result(llama, make_drafter, trajectories, tmp_path):
    first, second = make_drafter(llama), make_drafter(llama)
    train(first, trajectories, SMALL, tmp_path / "a")
    train(second, trajectories, replace(SMALL, seed=1), tmp_path / "b")
    assert not torch.equal(first.fc.weight, second.fc.weight)


def test_training_leaves_the_global_random_state_alone(llama, make_drafter, trajectories, tmp_path):
    drafter = make_drafter(llama)
    before = torch.get_rng_state()
    train(drafter, trajectories, SMALL, tmp_path)
    assert torch.equal(before, torch.get_rng_state())


# -- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["CE", "NLL", "AL"])
def test_steps_on_one_batch_lower_its_loss(llama, make_drafter, trajectories, loss):
    drafter = make_drafter(llama, random_heads=False)
    config = replace(SMALL, loss=loss)
    batch = AnchorSampler(
        trajectories, block_length=3, sequences=3, anchors=5, generator=torch.Generator().manual_seed(0)
    ).next()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)
    losses = []
    for _ in range(15):
        value = batch_loss(drafter, batch, config)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("construction", ["all_prefixes", "one_prefix", "whole_block"])
def test_every_construction_gives_gradient_to_all_parameters(llama, make_drafter, trajectories, construction):
    drafter = make_drafter(llama, num_categories=2)
    sampler = AnchorSampler(
        trajectories, block_length=3, sequences=3, anchors=5, generator=torch.Generator().manual_seed(0)
    )
    batch_loss(drafter, sampler.next(), replace(SMALL, loss="AL", construction=construction)).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("loss", ["CE", "NLL"])
@pytest.mark.parametrize("num_categories", [0, 2])
def test_a_sequence_learnt_by_heart_is_accepted_whole(
    llama, make_drafter, make_trajectory, tmp_path, loss, num_categories
):
    trajectory = make_trajectory(prompt=3, response=20, seed=1)
    trajectory = replace(trajectory, log_p=torch.zeros(20))
    drafter = make_drafter(llama, num_categories=num_categories, random_heads=False)
    config = TrainingConfig(
        loss=loss,
        steps=200,
        learning_rate=5e-3,
        sequences=1,
        anchors=20,
        evaluate_every=200,
        checkpoint_every=200,
    )
    train(drafter, [trajectory], config, tmp_path)
    accept = trajectory_acceptance(drafter, trajectory, [1.0])
    inside = pack([trajectory], [torch.arange(20)], 3).valid
    torch.testing.assert_close(accept[0], inside.float(), atol=1e-4, rtol=0)
    table = score(drafter, [trajectory])
    assert table.passes.item() == pytest.approx(5.0, abs=1e-2) and table.emitted.item() == 20
    assert table.anchor_accepted.item() / table.anchors.item() == pytest.approx(3.0, abs=1e-2)


def test_gradient_that_is_not_finite_stops_the_run(llama, make_drafter, trajectories, tmp_path):
    drafter = make_drafter(llama)
    with torch.no_grad():
        drafter.fc.weight.fill_(float("nan"))
    with pytest.raises(DBlastError) as error:
        train(drafter, trajectories, SMALL, tmp_path)
    one_line(error, "step 0", "learning rate")


def test_bfloat16_training_stays_near_float32(llama, make_drafter, trajectories):
    drafter = make_drafter(llama)
    batch = AnchorSampler(
        trajectories, block_length=3, sequences=3, anchors=5, generator=torch.Generator().manual_seed(0)
    ).next()
    exact = batch_loss(drafter, batch, SMALL)
    rough = batch_loss(drafter, batch, replace(SMALL, precision="bfloat16"))
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.03)


@pytest.mark.parametrize("categories", [1, 3])
@pytest.mark.parametrize("loss", OBJECTIVES)
def test_objectives_of_other_papers_lower_their_own_value(llama, make_drafter, trajectories, loss, categories):
    trainer = Trainer(make_drafter(llama, num_categories=categories), trajectories, replace(SMALL, loss=loss, steps=40))
    batch = trainer.sampler.next()
    trainer.sampler.next = lambda: batch
    before = float(batch_loss(trainer.drafter, batch, trainer.config))
    for _ in range(12):
        trainer.advance()
    assert float(batch_loss(trainer.drafter, batch, trainer.config)) < before


@pytest.mark.parametrize("loss", sorted(name for name, loss in OBJECTIVES.items() if loss.needs_support))
def test_distributions_of_the_trajectories_reach_the_objectives(llama, make_drafter, trajectories, loss):
    drafter = make_drafter(llama, num_categories=2, draft_vocab_size=40)
    config = replace(SMALL, loss=loss)
    batch = Trainer(drafter, trajectories, config).sampler.next()
    out = batch.run(drafter)
    whole = drafter.logits(out.branch_hidden).log_softmax(-1)
    full = torch.full((*whole.shape[:-1], drafter.config.vocab_size), float("-inf"))
    full[..., drafter.draft_token_ids] = whole
    index = batch.support.unsqueeze(1).expand(-1, 2, -1, -1)
    log_q = full.gather(-1, batch.tokens[:, None, :, None].expand(-1, 2, -1, 1)).squeeze(-1)
    expected = OBJECTIVES[loss](
        log_q,
        out.log_prior(),
        batch.log_p,
        batch.valid,
        log_q_candidates=full.gather(-1, index),
        log_p_candidates=batch.support_log_p,
    )
    assert batch_loss(drafter, batch, config).item() == pytest.approx(expected.item(), rel=1e-5)
    # Where every token was certain, nothing but the sampled token is left to learn from.
    certain = torch.full_like(batch.support_log_p, float("-inf"))
    certain[..., 0] = 0.0
    changed = replace(batch, support_log_p=certain)
    assert batch_loss(drafter, changed, config).item() != pytest.approx(expected.item(), rel=1e-3)


def test_packed_supports_belong_to_their_tokens(trajectories):
    chosen = [torch.tensor([0, 3]), torch.tensor([2, 1])]
    batch = pack(trajectories[:2], chosen, 3, with_support=True)
    assert batch.support.shape == batch.support_log_p.shape == (4, 3, 2)
    own = batch.support == batch.tokens.unsqueeze(-1)
    assert own.any(-1)[batch.valid].all()
    log_p = batch.support_log_p.masked_fill(~own, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(log_p[batch.valid], batch.log_p[batch.valid])
    assert pack(trajectories[:2], chosen, 3).support is None


def test_the_speed_benchmark_s_random_trajectories_can_be_trained_on(llama):
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "training_speed.py"))
    rows = benchmark["random_trajectories"](llama.model.config.hidden_size, 40, count=2, prompt=6, response=9)
    config = DBlastConfig.for_target(
        llama.model.config, num_layers=1, block_length=3, mask_token_id=5, num_categories=2, target_layer_ids=[0]
    )
    drafter = new_drafter(config, llama, 0).attach(llama.model)
    trainer = Trainer(drafter, rows, TrainingConfig(loss="KD", steps=2, sequences=2, anchors=2))
    assert math.isfinite(trainer.advance())


@pytest.mark.parametrize("loss", ["NLL", "AL", "CE", "KD", "LK"])
def test_a_block_ends_before_the_first_token_that_cannot_be_drafted(llama, make_drafter, trajectories, loss):
    """Such a token added 60 nats to the losses once, and could decide which prefixes the AL loss sums over."""
    drafter = make_drafter(llama, num_categories=2, draft_vocab_size=30)
    config = replace(SMALL, loss=loss)
    batch = Trainer(drafter, trajectories, config).sampler.next()
    outside = ~torch.isin(batch.tokens, drafter.draft_token_ids)
    first = torch.where(outside.any(1), outside.int().argmax(1), outside.shape[1])
    assert (first == 0).any() and ((first > 0) & (first < outside.shape[1])).any()
    shorter = batch.valid & (torch.arange(outside.shape[1]) < first.unsqueeze(1))
    # Its successors may be any tokens at all.
    others = torch.where(shorter, batch.tokens, drafter.draft_token_ids[0])
    value, coverage = loss_and_coverage(drafter, batch, config)
    expected, whole = loss_and_coverage(drafter, replace(batch, valid=shorter, tokens=others), config)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert coverage == pytest.approx(shorter.sum().item() / batch.valid.sum().item()) and whole == 1
    assert abs(value.item()) < 30


def test_coverage_stands_in_the_history_of_a_drafter_with_a_vocabulary_of_its_own(llama, make_drafter, trajectories, tmp_path):
    narrow = train(make_drafter(llama, draft_vocab_size=30), trajectories, SMALL, tmp_path / "narrow")
    assert all(0.3 < point["coverage"] < 1 for point in narrow[1:])
    assert all("coverage" not in point for point in train(make_drafter(llama), trajectories, SMALL, tmp_path / "whole"))


def whole_table_loss(drafter, batch, config):
    """The loss with log q of every slot, those that it is not over included."""
    loss = get_loss(config.loss)
    out = batch.run(drafter)
    tokens = torch.cat([batch.tokens.unsqueeze(-1), *([batch.support] if loss.needs_support else [])], dim=-1)
    log_q = drafter.log_q(out.branch_hidden, tokens)
    drafted = batch.valid & (log_q[..., 0] > float("-inf")).any(1).cumprod(-1).bool()
    more = {"log_q_candidates": log_q[..., 1:], "log_p_candidates": batch.support_log_p} if loss.needs_support else {}
    return loss(log_q[..., 0], out.log_prior(), batch.log_p, drafted, tau=config.tau, construction=config.construction, **more)


@pytest.mark.parametrize("pieces", [0, 2**23], ids=["tiled", "one piece"])
@pytest.mark.parametrize("draft_vocab_size", [0, 25])
@pytest.mark.parametrize("name", LOSSES)
def test_slots_that_no_loss_is_over_need_no_product(
    llama, make_drafter, trajectories, name, draft_vocab_size, pieces, monkeypatch
):
    """Loss and gradients are those of the whole table; fewer rows go through the head."""
    monkeypatch.setattr(drafter_module, "PLAIN_LOGITS", pieces)
    drafter = make_drafter(llama, num_categories=3, draft_vocab_size=draft_vocab_size)
    config = replace(SMALL, loss=name, anchors=9)
    batch = Trainer(drafter, trajectories, config).sampler.next()
    assert not batch.valid.all()
    found, rows = [], []
    log_q = drafter.log_q
    monkeypatch.setattr(drafter, "log_q", lambda hidden, tokens: rows.append(hidden[..., 0].numel()) or log_q(hidden, tokens))
    for function in (whole_table_loss, batch_loss):
        drafter.zero_grad()
        value = function(drafter, batch, config)
        value.backward()
        gradients = [torch.zeros(1) if p.grad is None else p.grad.flatten() for p in drafter.parameters()]
        found.append((value.detach(), torch.cat(gradients)))
    assert found[0][1].abs().max() > 1e-4
    assert_close(found[1][0], found[0][0], 1e-5)
    assert_close(found[1][1], found[0][1], 1e-5)
    drafted = batch.valid & drafter.drafts(batch.tokens).cumprod(-1).bool()
    assert rows == [3 * batch.valid.numel(), 3 * int(drafted.sum())]


def test_a_batch_without_a_token_that_can_be_drafted_has_no_gradient(llama, make_drafter, trajectories):
    drafter = make_drafter(llama, num_categories=2, draft_vocab_size=10)
    batch = Trainer(drafter, trajectories, SMALL).sampler.next()
    outside = next(token for token in range(40) if not drafter.drafts(torch.tensor(token)))
    batch = replace(batch, tokens=torch.full_like(batch.tokens, outside))
    value, coverage = loss_and_coverage(drafter, batch, SMALL)
    value.backward()
    assert coverage == 0 and abs(value) < 1e-6
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in drafter.parameters())
