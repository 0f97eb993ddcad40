"""Parameters of a `config.json` are those of the model that transformers makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from overlapc.core.errors import OverlapcError
from overlapc.search.models.configs import from_config
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


# The default config of each family that transformers has, and its parameters.
_FAMILIES = """
import json, sys
sys.modules["torchvision"] = None
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
found = {}
for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
    try:
        made = CONFIG_MAPPING[kind]()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except Exception:  # some defaults make no model
        continue
    config = json.loads(json.dumps(made.to_dict(), default=str)) | {"model_type": kind}
    vocab = getattr(made.get_text_config(), "vocab_size", None)
    found[kind] = config, vocab, sum(each.numel() for each in model.parameters())
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_every_family_is_counted_refused_or_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FAMILIES],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    off, counted = {}, []
    for kind, (config, vocab, parameters) in json.loads(done.stdout).items():
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(config))
        try:
            model = from_config(path)
        except OverlapcError:
            continue
        found = replace(model, vocab=vocab or model.vocab).parameters()
        if found == pytest.approx(parameters, rel=1e-3):
            counted.append(kind)
        elif not any(said in model.source for said in _SAID):
            off[kind] = found, parameters
    assert off == {}
    assert len(counted) > 60


_SAID = ("its text model alone", "without what its", "were not compared")


def test_parameters_are_those_that_transformers_makes(tmp_path: Path) -> None:
    configs = {}
    for name, (config, _) in PUBLISHED.items():
        configs[name] = config.get("text_config", config)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _COUNTS],
        input=json.dumps(configs), capture_output=True, text=True, timeout=1200,
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
