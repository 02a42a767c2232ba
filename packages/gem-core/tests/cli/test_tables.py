"""Tables and JSON of gem plugins and gem kernels."""

import json
from typing import Any

import pytest

from gem_core.cli.main import run
from gem_core.cli.output import print_table
from gem_core.select.device import cuda_devices

KERNELS = """
def kernel(backend, **more):
    base = dict(op="gdpa", contract=1, backend=backend, load="acme_gem:run", devices=("cpu", "cuda"), dtypes=("fp32", "bf16"), features=("window",))
    return KernelImpl(**{**base, **more})

@hookimpl
def gem_kernel_impls():
    return [kernel("acme"), kernel("old", contract=0), kernel("vary", variant="a", head_dims=(32,)), kernel("lost", op="gdpaa")]
"""


@pytest.fixture
def acme(install) -> None:
    install("acme-gem", KERNELS, version="1.2.0")


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plugins_list_json_has_the_agreed_shape(acme: None, install, capsys: pytest.CaptureFixture[str]) -> None:
    install("sick-gem", "1 / 0")
    rows = {row["name"]: row for row in listed(capsys, "plugins", "list")}
    assert rows["acme-gem"] == {
        "name": "acme-gem",
        "module": "acme_gem",
        "distribution": "acme-gem",
        "version": "1.2.0",
        "status": "loaded",
        "error": "",
        "hooks": ["gem_kernel_impls"],
    }
    assert rows["sick-gem"]["status"] == "failed"
    assert "ZeroDivisionError" in rows["sick-gem"]["error"]
    assert "gem_topology" in rows["gem-core"]["hooks"]


def test_plugins_list_is_the_same_through_both_ways_in(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The quick way takes the plain command line; any other spelling goes through typer."""
    quick = listed(capsys, "plugins", "list")
    from gem_core.cli.app import invoke

    assert invoke(["plugins", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == quick


def test_plugins_list_as_text(acme: None, install, capsys: pytest.CaptureFixture[str]) -> None:
    install("sick-gem", "1 / 0")
    assert run(["plugins", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["PLUGIN", "FROM", "STATUS", "HOOKS"]
    (acme_line,) = [line for line in lines if line.startswith("acme-gem")]
    assert acme_line.split() == ["acme-gem", "acme-gem", "1.2.0", "loaded", "kernel_impls"]
    assert any(line.startswith("sick-gem") and "division by zero" in line for line in lines)


def test_plugins_show_lists_what_one_declares(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = listed(capsys, "plugins", "show", "acme-gem")
    assert {item["name"] for item in row["declares"]["kernel_impls"]} == {"gdpa/acme", "gdpa/old", "gdpa/vary/a", "gdpaa/lost"}
    assert run(["plugins", "show", "gem-core"]) == 0
    out = capsys.readouterr().out
    for word in ("kernel_ops", "embedding_engines", "torch", "fp32", "single", "toy", "hstu"):
        assert word in out


def test_kernels_list_json_has_the_agreed_shape(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {(row["op"], row["backend"]): row for row in listed(capsys, "kernels", "list")}
    acme = rows["gdpa", "acme"]
    assert acme == {
        "op": "gdpa",
        "backend": "acme",
        "variant": "",
        "from": "acme-gem",
        "version": "1.2.0",
        "here": "fits",
        "why_not": ["not in prefer"],
    }
    assert rows["gdpa", "vary"]["variant"] == "a"
    assert rows["gdpa", "vary"]["why_not"] == ["takes head_dim 32, not 64", "not in prefer"]
    assert any("contract 0 of gdpa" in reason for reason in rows["gdpa", "old"]["why_not"])
    assert rows["gdpaa", "lost"]["here"] == "no"
    assert "no loaded plugin declares the op" in rows["gdpaa", "lost"]["why_not"][0]
    chosen = [row["op"] for row in rows.values() if row["here"] == "chosen"]
    assert len(chosen) == len(set(chosen)) >= 12


def test_a_kernel_says_where_its_configuration_comes_from(install, capsys: pytest.CaptureFixture[str]) -> None:
    source = KERNELS.replace('kernel("acme")', 'kernel("acme", configuration="acme_gem:where")')
    install("acme-gem", source + "\ndef where(request, gpu):\n    return f'{gpu} table of {request.op}'\n")
    rows = {(row["op"], row["backend"]): row for row in listed(capsys, "kernels", "list")}
    assert rows["gdpa", "acme"]["configuration"].endswith("table of gdpa")
    assert "configuration" not in rows["gdpa", "reference"]
    assert run(["kernels", "explain", "gdpa", "--dtype", "fp16", "--device", "cpu"]) == 0
    assert "table of gdpa" not in capsys.readouterr().out, "an unfit kernel has none"
    assert run(["kernels", "explain", "gdpa", "--device", "cpu"]) == 0
    assert "table of gdpa" in capsys.readouterr().out


def test_kernels_list_follows_names_and_configuration(acme: None, tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[kernels]\nprefer = ['acme', 'reference']\n")
    rows = {(r["op"], r["backend"]): r for r in listed(capsys, "kernels", "list", "-c", str(tmp_path / "run.toml"))}
    assert rows["gdpa", "acme"]["here"] == "chosen"
    monkeypatch.setenv("GEM_KERNELS", "gdpa=acme")
    rows = {(r["op"], r["backend"]): r for r in listed(capsys, "kernels", "list")}
    assert rows["gdpa", "acme"]["here"] == "chosen"
    assert rows["gdpa", "reference"]["why_not"] == ["acme is named"]


def test_kernels_list_as_text_says_what_was_asked(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "list"]) == 0
    out = capsys.readouterr().out
    assert "prefer: gluon, triton, reference (default)" in out
    assert "asked: head_dim 64" in out
    assert "acme-gem 1.2.0" in out
    assert len([line for line in out.splitlines() if line.split()[:1] == ["gdpa"]]) >= 4


def test_explain_walks_the_rules(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["kernels", "explain", "gdpa", "--dtype", "bf16", "--head-dim", "96", "--features", "dense_kv,window", "--device", "cpu", "--backward"]
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "request: gdpa on cpu in bf16 (head_dim 96, dense_kv, window, backward)" in out
    assert "1. named: no" in out
    assert "2. by preference: gluon, triton, reference (default)" in out
    assert "3. chosen: reference, by prefer (default)" in out
    assert "does not support dense_kv; not in prefer" in out


def test_explain_a_named_backend_and_a_refusal(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "kernels", "explain", "gdpa", "--backend", "acme", "--device", "cpu")
    assert (found["chosen"], found["rule"], found["error"]) == ("acme", "backend= of the call", None)
    found = listed(capsys, "kernels", "explain", "gdpa", "--backend", "old", "--device", "cpu")
    assert found["chosen"] is None
    assert "contract 0 of gdpa" in found["error"]
    assert run(["kernels", "explain", "gdpa", "--backend", "old", "--device", "cpu"]) == 0
    assert "3. refused: it does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["gdqa"], "Did you mean 'gdpa'"),
        (["gdpa", "--dtype", "bf61"], "Did you mean 'bf16'"),
        (["gdpa", "--device", "cudaa"], "Did you mean 'cuda'"),
        (["gdpa", "--features", "windwo"], "Did you mean 'window'"),
        (["gdpa", "--backend", "acne"], "Did you mean 'acme'"),
        (["gdpa", "--head-dim", "0"], "explain --help"),
    ],
)
def test_explain_refuses_unknown_words(acme: None, words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "explain", *words]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.skipif(bool(cuda_devices()), reason="the machine has a CUDA device")
def test_explain_for_another_machine(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "kernels", "explain", "gdpa", "--device", "cuda", "--arch", "90")
    assert found["request"] == "gdpa on cuda sm90 in bf16 (head_dim 64, backward)"


def test_plain_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A", "LONG"), [("xxx", "y"), ("", "[bold]z")])
    assert capsys.readouterr().out == "A    LONG\nxxx  y\n     [bold]z\n"
    print_table(("A", "B"), [])
    assert capsys.readouterr().out == "A  B\n"


def test_a_terminal_gets_the_same_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_table(("A", "B"), [("one", "[bold]two")])
    out = capsys.readouterr().out
    for cell in ("A", "B", "one", "[bold]two"):
        assert cell in out
