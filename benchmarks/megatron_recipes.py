"""Which of Megatron-Bridge's recipes overlapc plans: our rules of refusal against their settings.

    python benchmarks/megatron_recipes.py FOLDER [--out benchmarks/results/megatron_recipes.json]

FOLDER holds Megatron-Bridge's sources (`src/megatron/bridge` in it, or in what pip has unpacked).
Nothing of Megatron is run, and no model is loaded: the recipes' own functions run, and whatever
they import stands for itself as a `Settings`, which remembers what is set. `reason` of the product
judges a model's and DDP's settings. What it cannot see there is judged here: models that overlapc
has not been tried with. So "planned" is what no rule refuses.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from overlapc.megatron.refused import reason

ROOTS = ("megatron", "torch", "transformers", "nemo_run", "omegaconf", "hydra", "huggingface_hub")
REAL = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes")
KINDS = {"library": REAL[0], "performance": REAL[1]}
OF_MODEL = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "tp_comm_overlap")
# By words of a recipe's Python module: models that overlapc has not been tried with.
NOT_TRIED = {
    "pictures, sound or diffusion": (
        *("flux", "wan", "_vl", "vl_", "nemotron_omni", "qwen2_audio", "qwen_omni", "gemma4_vl"),
        *("qwen_vl", "exaone45", "stepfun", "minimax_m3"),
    ),
    "linear or sparse attention": ("qwen3_next", "qwen35", "deepseek_v4", "glm5", "glm_moe_dsa"),
}


# Models of pictures and sound whose own classes, or the one of Megatron that they hold, were tried.
TRIED = ("qwen25_vl", "glm_45v", "qwen2_audio", "nemotron_omni", "nemotron_nano_v2_vl")


class Kind(type):
    """A class that is imported has any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Settings(f"{cls.__name__}.{name}")


class Settings(metaclass=Kind):
    """Anything that a recipe imports, calls or sets: what it was called, and what was set."""

    def __init__(self, name: str, args: tuple[Any, ...] = (), **given: Any) -> None:
        vars(self).update(given, _name=name, _args=args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Settings(f"{self._name}.{name}")

    def __call__(self, *args: Any, **given: Any) -> Any:
        if self._name.endswith("apply_flex_dispatcher_backend"):
            return _apply_dispatcher(*args, **given)
        return Settings(self._name, args, **given)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __gt__(self, _: Any) -> bool:
        return False

    __lt__ = __ge__ = __le__ = __gt__

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __getitem__ = __mul__ = __rmul__ = __floordiv__ = __add__ = __or__

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(map(str, self._args))})"


def _apply_dispatcher(model: Any, moe_flex_dispatcher_backend: Any = None) -> None:
    if moe_flex_dispatcher_backend in ("deepep", "hybridep"):
        model.moe_token_dispatcher_type = "flex"


class Stub(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 (a module's)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not name[0].isupper() or (name.isupper() and len(name) > 4):
            return Settings(f"{self.__name__}.{name}")

        def begin(made: Settings, *args: Any, **given: Any) -> None:
            Settings.__init__(made, name, args, **given)

        kind = Kind(name, (Settings,), {"__init__": begin})
        setattr(self, name, kind)
        return kind


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the recipes in the folder, and stubs for all else that they import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ROOTS or name == "torch":
            return None
        if not name.startswith(REAL):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        place = self.folder.joinpath(*name.split(".")[2:])
        packages = place / "__init__.py"
        if packages.exists():
            return importlib.util.spec_from_file_location(
                name, packages, submodule_search_locations=[str(place)]
            )
        return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))

    def create_module(self, spec: Any) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def recipes(folder: Path, package: str) -> Iterator[tuple[str, str, Any]]:
    """(Python module, name, settings or the error) of each recipe that needs no arguments."""
    place = folder.joinpath(*package.split(".")[2:])
    for file in sorted(place.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        name = ".".join(("megatron", "bridge", *parts))
        if file.name.startswith("_") or "utils" in parts:
            continue
        module = importlib.import_module(name)
        for function in [each for each in vars(module).values() if inspect.isfunction(each)]:
            own = function.__module__ == name and not function.__name__.startswith("_")
            if own and function.__name__.endswith("_config") and not _needs(function):
                try:
                    made = function()
                except Exception as error:
                    made = error
                yield name, function.__name__, made


def _needs(function: Any) -> bool:
    kinds = inspect.signature(function).parameters.values()
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return any(each.default is each.empty and each.kind not in several for each in kinds)


class Wrapper:
    """What stands around a model: Megatron's DDP."""

    def __init__(self, module: nn.Module, ddp_config: Any) -> None:
        self.module, self.ddp_config = module, ddp_config


def _set(settings: Any) -> dict[str, Any]:
    found = vars(settings) if isinstance(settings, Settings) else {}
    return {k: v for k, v in found.items() if k[0] != "_" and not isinstance(v, Settings)}


def judged(path: str, cfg: Any) -> tuple[str, str]:
    """Why a recipe runs plain, before TE's layers were known and now; "" if it is planned."""
    model, precision = _set(cfg.model), str(cfg.mixed_precision)
    overlap = _set(cfg.comm_overlap)
    model |= {name: overlap[name] for name in OF_MODEL if overlap.get(name)}
    # Bridge takes userbuffers out where there is nothing for them to do.
    tp = model.get("tensor_model_parallel_size")
    if isinstance(tp, int) and (tp < 2 or not model.get("sequence_parallel")):
        model.pop("tp_comm_overlap", None)
    if any(kind in precision.lower() for kind in ("fp8", "fp4")):
        model["fp8"] = precision
    inner = nn.Module()
    inner.config = SimpleNamespace(**model)
    why = reason(Wrapper(inner, SimpleNamespace(**_set(cfg.ddp)))).partition(" (")[0]
    data, local = _set(cfg.dataset), model.get("transformer_impl") == "local"
    packed = data.get("enable_offline_packing") or data.get("enable_in_batch_packing")
    was = why or ("packed sequences" if packed else "")
    for kind, words in NOT_TRIED.items():
        if not why and _in(path, words) and not _in(path, TRIED):
            why = f"not tried: {kind}"
    if isinstance(vars(cfg).get("peft"), Settings):
        was = was or why or "not tried: adapters (PEFT)"
    return was or why or ("" if local else "layers of Transformer Engine"), why


def _in(path: str, words: tuple[str, ...]) -> bool:
    return any(word in path for word in words)


def main() -> None:
    shown = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = [each.parent for each in asked.folder.rglob("bridge/recipes")]
    if not found:
        parser.error(f"found no bridge/recipes in {asked.folder}; expected Bridge's sources")
    sys.meta_path.insert(0, Finder(found[0]))
    result = {kind: _counted(found[0], package) for kind, package in KINDS.items()}
    for kind, counts in result.items():
        print(f"{kind}: {counts['recipes']} recipes")
        for when in ("before", "now"):
            planned = counts[when].get("planned", 0)
            print(f"  {when}: {planned} planned ({planned / counts['recipes']:.0%})")
            for why, count in counts[when].items():
                print(f"    {count:4} {why}")
        print(f"  bf16 without CUDA graphs: {counts['bf16']}, planned {counts['bf16 planned']}")
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _counted(folder: Path, package: str) -> dict[str, Any]:
    before, now, bf16 = Counter[str](), Counter[str](), Counter[str]()
    for module, name, cfg in recipes(folder, package):
        if isinstance(cfg, Exception):
            print(f"{name}: {type(cfg).__name__}: {cfg}", file=sys.stderr)
            before["not read"] += 1
            now["not read"] += 1
            continue
        was, why = judged(f"{module}.{name}", cfg)
        before[was or "planned"] += 1
        now[why or "planned"] += 1
        if why not in ("FP8 and FP4 recipes", "CUDA graphs"):
            bf16[why or "planned"] += 1
    return {
        "recipes": now.total(),
        "before": dict(before.most_common()),
        "now": dict(now.most_common()),
        "bf16": bf16.total(),
        "bf16 planned": bf16["planned"],
    }


if __name__ == "__main__":
    main()
