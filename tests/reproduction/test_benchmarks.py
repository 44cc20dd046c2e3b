"""The benchmark of the stages on a toy shape: every cell is there, and growth is told right."""

import importlib.util
import sys

import pandas as pd
import pytest

from dblast.reproduction.paths import ROOT


@pytest.fixture(scope="module")
def costs():
    spec = importlib.util.spec_from_file_location("stage_costs", ROOT / "benchmarks" / "stage_costs.py")
    module = sys.modules["stage_costs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["stage_costs"]


def test_every_cell_of_a_toy_shape_is_measured(costs, tmp_path, capsys):
    costs.main(["--small", "--parts", "ways", "growth", "--figure", str(tmp_path / "growth.png")])
    tables = capsys.readouterr().out.split("\n\n")
    ways, growth, powers = (table.strip().splitlines()[2:] for table in tables)
    assert (len(ways), len(growth), len(powers)) == (12, 18, 9)
    assert "nan" not in "".join(ways + growth + powers)
    assert (tmp_path / "growth.png").stat().st_size > 1000


def test_a_busy_machine_is_measured_and_left_at_rest(costs, monkeypatch):
    """Both counts of threads, both policies, alone and beside a process, which ends."""
    runs, beside = [], []

    class Beside:
        def __init__(self, command):
            beside.append("began")

        def kill(self):
            beside.append("killed")

        def wait(self):
            beside.append("ended")

    def run(command, env, **_):
        runs.append((env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], len(beside) % 3 == 1))
        if len(runs) > 8 and len(beside) % 3 == 1:
            raise RuntimeError("no more")
        return type("Done", (), {"stdout": f"noise\n{100.0 if len(beside) % 3 == 0 else 40.0}\n"})

    monkeypatch.setattr(costs.subprocess, "Popen", Beside)
    monkeypatch.setattr(costs.subprocess, "run", run)
    table = costs.busy(True, 0.1)
    assert table.kept.tolist() == [0.4] * 4 and len(set(runs)) == 8
    assert beside == ["began", "killed", "ended"] * 4
    with pytest.raises(RuntimeError):
        costs.busy(True, 0.1)
    assert beside == ["began", "killed", "ended"] * 5


def test_training_is_timed_by_the_clock(costs):
    assert costs.speed(costs.SMALL, 1, 0.0) > 0


def table(**costs) -> pd.DataFrame:
    rows = [{"stage": "s", "over": over, "value": x, "seconds": f(x), "GiB": 0.0} for over, f in costs.items() for x in (1, 2, 4)]
    return pd.DataFrame(rows)


def test_growth_is_the_steepest_power(costs):
    assert costs.steepest([1, 2, 8], [3, 6, 24]) == pytest.approx(1)
    assert costs.steepest([1, 2, 4], [1, 1, 4]) == pytest.approx(2)
    found = costs.powers(table(K=lambda x: 5 * x, context=lambda x: x**1.5))
    assert found.time.tolist() == pytest.approx([1, 1.5]) and found.within.tolist() == ["yes", "NO"]
    memory = table(K=lambda x: 1.0).assign(GiB=[0.001, 0.002, 0.2])
    assert costs.powers(memory).within.tolist() == ["NO"]
    assert costs.powers(memory.assign(GiB=[0.0, 0.001, 0.01])).within.tolist() == ["yes"]


def test_the_earlier_ways_give_the_same_numbers(costs):
    """What is compared are ways to one result."""
    drafter = costs.make_drafter(costs.SMALL)
    hidden = costs.torch.randn(6, 4, 7, costs.SMALL.hidden)
    tokens = drafter.greedy_tokens(hidden)[:, 1].clone()
    tokens[:, 3:] += 1
    valid = costs.torch.ones_like(tokens, dtype=costs.torch.bool)
    prior = costs.torch.randn(6, 4).log_softmax(-1)
    log_p = -costs.torch.rand(6, 7)
    found = [
        costs.replay.soft_acceptance(function(drafter, hidden, tokens, valid), prior, log_p)
        for function in (costs.full_table, costs.replay.agreeing_log_q)
    ]
    assert costs.torch.equal(*found) and found[0].any()
