"""Parameters of a `config.json` are those of the model that transformers makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from overlapc.search.configs import from_config
from tests.plain.test_configs import PUBLISHED

pytest.importorskip("transformers", exc_type=ImportError)
# Counts parameters on the meta device. torchvision, which is not needed, may be made for another
# torch; in a process of its own nobody else misses it.
_COUNTS = """
import json, sys
sys.modules["torchvision"] = None
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
found = {}
for name, config in json.load(sys.stdin).items():
    made = CONFIG_MAPPING[config.pop("model_type")](**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    found[name] = made.vocab_size, sum(each.numel() for each in model.parameters())
json.dump(found, sys.stdout)
"""


def test_parameters_are_those_that_transformers_makes(tmp_path: Path) -> None:
    configs = {}
    for name, (config, _) in PUBLISHED.items():
        configs[name] = config.get("text_config", config)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _COUNTS],
        input=json.dumps(configs), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    off = {}
    for name, (vocab, parameters) in json.loads(done.stdout).items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(PUBLISHED[name][0]))
        model = replace(from_config(path), vocab=vocab)  # without Megatron's padding
        # Small ones that are no matrices may count as buffers there, and norms have biases in some.
        if model.parameters() != pytest.approx(parameters, rel=2e-5):
            off[name] = model.parameters(), parameters
    assert off == {}
