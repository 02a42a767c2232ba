"""The declaration, its options, and what may be imported."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

import gem_precision
from gem_precision.options import Bf16IslandsOptions
from gem_precision.plugin import gem_precision_recipes

SOURCE = Path(gem_precision.__file__).parent
ALLOWED = ("gem_core.spec", "gem_core.ops", "gem_core.batch")


def strangers(text: str) -> list[str]:
    """Imports of the repository's packages that the walls forbid here."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.startswith("gem_") and not name.startswith((*ALLOWED, "gem_precision"))]
    return found


def resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def test_the_declaration_resolves() -> None:
    (declared,) = [recipe for recipe in gem_precision_recipes() if recipe.name == "bf16_islands"]
    assert declared.options is not None
    options = resolve(declared.options)
    assert options is Bf16IslandsOptions
    built = resolve(declared.load)(**{field: getattr(options(), field) for field in options.model_fields})
    built.prepare(nn.Linear(32, 32), "cuda")
    assert built.compute_dtype() == "bf16"


def test_options_have_the_recipes_own_defaults() -> None:
    (declared,) = [recipe for recipe in gem_precision_recipes() if recipe.name == "bf16_islands"]
    assert resolve(declared.load).__init__.__kwdefaults__ == Bf16IslandsOptions().model_dump()


@pytest.mark.parametrize("wrong", [{"island": ["heads"]}, {"islands": [""]}, {"islands": "heads"}, {"small": -1}, {"cpu": "fp16"}, {"device": "tpu"}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Bf16IslandsOptions.model_validate(wrong)


def test_the_plugin_module_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, gem_precision.plugin; sys.exit(bool({'torch', 'pydantic', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_walls_only_the_contract_of_core_is_imported() -> None:
    assert [(path.name, bad) for path in SOURCE.rglob("*.py") if (bad := strangers(path.read_text()))] == []


@pytest.mark.parametrize("fault", ["import gem_kernels", "from gem_core.train import step", "def f():\n    from gem_core.model.gem import GemModel"])
def test_walls_planted_fault_is_seen(fault: str) -> None:
    assert len(strangers(fault)) == 1
