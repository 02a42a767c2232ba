"""Every hook has a heading with its exact signature, an example that works, and a test; each check is shown to go red."""

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from gem_core.plugins.kinds import KINDS, checked
from gem_core.plugins.loader import LoadedPlugin
from gem_core.plugins.manager import PluginHost
from gem_core.spec import hooks

ROOT = Path(__file__).parents[4]
DOCUMENT = ROOT / "docs/hooks.md"
TESTS = Path(__file__).parents[1] / "plugins/test_hooks.py"


def signatures() -> dict[str, str]:
    """``{hook: signature}`` as the source of ``gem_core.spec.hooks`` has it."""
    functions = [node for node in ast.parse(inspect.getsource(hooks)).body if isinstance(node, ast.FunctionDef)]
    return {f.name: f"{f.name}({ast.unparse(f.args)}) -> {ast.unparse(f.returns)}" for f in functions if f.returns is not None}


SIGNATURES = signatures()


def sections(document: str) -> dict[str, str]:
    """``{signature: text}`` of every heading that holds one."""
    parts = re.split(r"^### `(.+)`$", document, flags=re.M)
    return {title: re.split(r"^## ", text, flags=re.M)[0] for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def undocumented(document: str) -> list[str]:
    """Hooks without a heading of their exact signature, and headings without a hook."""
    return sorted(set(SIGNATURES.values()) ^ set(sections(document)))


def example(text: str) -> str:
    """The code of a section's example."""
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    return str(code)


def fault_of(hook: str, code: str) -> str:
    """Why an example is no working plugin that fills ``hook``; empty when it is one."""
    module = ModuleType(f"example_{hook}")
    try:
        exec(compile(code, hook, "exec"), vars(module))
    except Exception as error:
        return repr(error)
    record = LoadedPlugin(name="example", module=module.__name__, distribution="example", version="1", status="loaded", plugin=module)
    (plugin,) = PluginHost([record]).plugins
    if plugin.hooks != (hook,):
        return plugin.error or f"it fills {plugin.hooks}"
    if hook in {kind.hook for kind in KINDS.values()}:
        return "" if checked(hook, getattr(module, hook)()) else "it declares nothing"
    return ""


def untested(source: str) -> list[str]:
    """Hooks without a test function ``test_<hook>`` or ``test_<hook>_...``."""
    names = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [hook for hook in SIGNATURES if not any(re.fullmatch(rf"test_{hook}(_.*)?", name) for name in names)]


def test_the_thirteen_hooks() -> None:
    assert len(SIGNATURES) == 13
    assert SIGNATURES["gem_topology"] == "gem_topology(world: int) -> Topology | None"


def test_every_hook_has_a_heading_with_its_exact_signature() -> None:
    assert undocumented(DOCUMENT.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gem_topology(world: int)", "gem_topology(world)"),
        ("### `gem_models()", "`gem_models()"),
        ("### `gem_cli_commands()", "### `gem_cli_comands()"),
    ],
)
def test_planted_wrong_heading_is_seen(old: str, new: str) -> None:
    document = DOCUMENT.read_text()
    assert old in document
    assert undocumented(document.replace(old, new, 1)) != []


@pytest.mark.parametrize("hook", sorted(SIGNATURES))
def test_every_hook_has_an_example_that_works(hook: str) -> None:
    code = example(sections(DOCUMENT.read_text())[SIGNATURES[hook]])
    assert fault_of(hook, code) == ""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("def gem_models", "def gem_modelz", "gem_modelz"),
        ("@hookimpl\n", "", "lacks the @hookimpl marker"),
        ("summary=", "sumary=", "sumary"),
        ("return [", "return None and [", "NoneType"),
    ],
)
def test_planted_broken_example_is_seen(old: str, new: str, fault: str) -> None:
    code = example(sections(DOCUMENT.read_text())[SIGNATURES["gem_models"]])
    assert old in code
    try:
        found = fault_of("gem_models", code.replace(old, new, 1))
    except TypeError as error:
        found = str(error)
    assert fault in found


def test_every_hook_has_a_test() -> None:
    assert untested(TESTS.read_text()) == []


def test_planted_missing_test_is_seen() -> None:
    assert untested(TESTS.read_text().replace("def test_gem_run_finished", "def other_gem_run_finished")) == ["gem_run_finished"]


def test_every_hook_says_when_it_is_called() -> None:
    for hook in SIGNATURES:
        text = inspect.getdoc(getattr(hooks, hook)) or ""
        assert text.endswith("."), hook
        assert len(text) > 40, hook
