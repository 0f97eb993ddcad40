"""`overlapc verify`: a plan against eager, from the command line."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from overlapc.cli import FAILED, GOOD, USAGE, main
from overlapc.runtime import verify as verifying

HERE = "tests.torch.test_verify"


def no_loss():
    return nn.Linear(4, 4), (torch.ones(2, 4),)


def nothing():
    return None


def broken():
    raise RuntimeError("no data")


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return (y.tanh() * 3 if torch.compiler.is_compiling() else y.tanh() * 2).sum()


def asks():
    return Asks(), (torch.ones(2, 8),)


def test_the_blame_for_a_difference_is_told(capsys):
    assert main(["verify", f"{HERE}:asks"]) == FAILED
    assert 'torch.compile(backend="eager") gives what the plan gives' in capsys.readouterr().out


def test_a_plan_is_equal_and_its_peak_as_predicted(capsys):
    argv = ["verify", "examples.gpt.model:tiny", "--memory", "0.6", "--json"]
    assert main(argv) == GOOD
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert found["different"] == []
    assert found["predicted_peak_bytes"] == pytest.approx(found["planned_peak_bytes"], rel=0.05)
    assert found["planned_peak_bytes"] < found["eager_peak_bytes"]


def test_a_difference_is_a_failed_check(capsys, monkeypatch):
    monkeypatch.setattr(verifying, "_same", lambda expected, found: False)
    assert main(["verify", "examples.gpt.model:tiny"]) == FAILED
    assert "DIFFER: embed.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("tests", "module:function"),
        ("no.such:thing", "No module named"),
        (f"{HERE}:missing", "no attribute"),
        (f"{HERE}:HERE", "no function"),
        (f"{HERE}:nothing", "expected it to return a model"),
        (f"{HERE}:broken", "no data"),
        (f"{HERE}:no_loss", "gives no loss"),
    ],
)
def test_wrong_use_is_told(where, said, capsys):
    assert main(["verify", where]) == USAGE
    assert said in capsys.readouterr().err
