"""``gem kernels bench`` and the page that is written from its results."""

import csv
import importlib.util
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from gem_core.spec import MachineError, RequestError, load_object
from gem_kernels.bench import backends, cli, measure, workloads
from gem_kernels.bench.backends import backends_of, resolve, takes
from gem_kernels.bench.plot import draw, panels
from gem_kernels.bench.shapes import BATCH, SHAPES, SHAPES_OF, VARIANTS_OF
from gem_kernels.bench.workloads import build
from gem_kernels.plugin import gem_cli_commands, gem_kernel_impls

PACKAGE = Path(__file__).parents[1]
CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a smoke run of the CPU")


def run(**options):
    given = {"op": None, "backend": None, "shape": None, "mode": None, "dtype": "fp32", "csv_file": None, "plot": None, "smoke": True}
    cli.bench(**{**given, **options})


def small(op="gdpa", **options):
    return build(op, options.get("variant", ""), SHAPES["self-L256"], [3, 0, 20], torch.float32, "cpu")


@CPU
def test_a_smoke_run_writes_a_row_for_each_backend_and_mode(tmp_path, capsys):
    target = tmp_path / "new" / "rows.csv"
    run(op=["block_attention"], backend=["triton", "reference"], csv_file=target)
    run(op=["jagged_pad"], backend=["triton"], mode="fwd", csv_file=target)
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == cli.FIELDS
    assert [(r["op"], r["backend"], r["activation"], r["mode"]) for r in rows] == [
        *(
            ("block_attention", name, word, mode)
            for word in ("softmax", "softmax rope", "softmax rope qk_norm")
            for name in ("triton", "reference")
            for mode in ("fwd", "bwd")
        ),
        ("jagged_pad", "triton", "", "fwd"),
    ]
    assert all(float(r["ms"]) > 0 for r in rows)
    assert "block_attention" in capsys.readouterr().out


@CPU
def test_a_backend_that_does_not_fit_says_why_and_gets_no_row(tmp_path, capsys):
    run(op=["gdpa"], backend=["gluon"], csv_file=tmp_path / "rows.csv")
    assert "fit" in capsys.readouterr().out
    with (tmp_path / "rows.csv").open() as file:
        assert list(csv.DictReader(file)) == []


@CPU
@pytest.mark.parametrize("fault", ["output", "gradient", "exception"])
def test_no_speed_is_reported_for_a_backend_that_is_wrong(fault, tmp_path, capsys):
    from gem_core.ops.gdpa import reference

    def wrong(q, **options):
        if fault == "exception":
            raise RuntimeError("no such tile\nof this compiler")
        out = reference(q, **options)
        return out * 1.01 if fault == "output" else out + (q - q.detach()) * 0.1

    with patch("gem_kernels.bench.backends.kernel", lambda request, backend: wrong):
        run(op=["gdpa"], backend=["triton"], csv_file=tmp_path / "rows.csv")
    assert {"exception": "no speed: RuntimeError: no such tile"}.get(fault, "no speed: result") in capsys.readouterr().out
    with (tmp_path / "rows.csv").open() as file:
        assert list(csv.DictReader(file)) == []


@CPU
def test_a_run_that_is_cut_off_keeps_what_it_has_timed(tmp_path):
    def cut_off(function, work, mode):
        if mode == "bwd":
            raise KeyboardInterrupt
        return {"ms": 1.0}

    with patch("gem_kernels.bench.measure.measure", cut_off), pytest.raises(KeyboardInterrupt):
        run(op=["jagged_pad"], backend=["triton"], csv_file=tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        assert [row["mode"] for row in csv.DictReader(file)] == ["fwd"]


ROW = {"op": "gdpa", "activation": "gelu", "shape": "self-L256", "backend": "triton", "mode": "fwd", "tflops": "300", "gbps": "2"}


def test_a_picture_shows_every_backend_and_repeats_to_the_byte(tmp_path):
    rows = [
        ROW,
        {**ROW, "backend": "gluon", "mode": "bwd"},
        {**ROW, "op": "jagged_pad", "activation": "", "backend": "fbgemm", "tflops": "0.0", "gbps": "3900.5"},
    ]
    draw(rows, tmp_path / "a.svg")
    draw(rows, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    for word in ("gdpa gelu, forward", "gluon", "fbgemm", "self-L256", "GB/s", "TFLOP/s"):
        assert word in text
    assert panels(rows)["jagged_pad", ""]["fbgemm"]["self-L256", "fwd"] == 3900.5
    assert panels([ROW, {**ROW, "tflops": "301"}])["gdpa", "gelu"]["triton"]["self-L256", "fwd"] == 301


@CPU
def test_a_smoke_run_draws_its_rows(tmp_path):
    run(op=["jagged_pad"], backend=["reference"], mode="fwd", plot=tmp_path / "new" / "rows.svg")
    assert "jagged_pad" in (tmp_path / "new" / "rows.svg").read_text()


def test_peers_that_want_full_rows_are_not_given_others():
    with patch.object(workloads._Draw, "tensor", lambda self, *shape, scale=1.0: torch.empty(shape, device="meta", requires_grad=True)):
        dense = build("gdpa", "", SHAPES["self-L256"], [20] * BATCH, torch.float32, "cpu")
        ragged = build("gdpa", "", SHAPES["self-L256"], [20] * (BATCH - 1) + [19], torch.float32, "cpu")
    for peer in ("cudnn", "compiled_bmm"):
        assert takes(peer, dense)
        assert not takes(peer, ragged)
    assert takes("varlen_attn", ragged)


def test_the_compiled_products_are_gdpa():
    work = build("gdpa", "", SHAPES["self-L256"], [9, 9], torch.float32, "cpu")
    with patch.object(backends, "_gelu_products", backends._gelu_products._torchdynamo_orig_callable):
        out = work.call(backends.peers_of(work, "")["compiled_bmm"])
    expected = work.call(measure.reference_of("gdpa"))
    torch.testing.assert_close(out.transpose(1, 2).reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "variant"), [("add_norm", "residual"), ("add_norm", "gate"), ("gated_residual", "")])
def test_what_is_compiled_beside_the_kernels_of_elements_is_the_same(op, variant):
    work = build(op, variant, SHAPES["rows-1M-w256"], [9], torch.float32, "cpu")
    (peer,) = backends.peers_of(work, variant).values()
    torch.testing.assert_close(work.call(peer._torchdynamo_orig_callable), work.call(measure.reference_of(op)))


@pytest.mark.parametrize(
    ("op", "variant", "forward", "backward"), [("add_norm", "residual", 3, 4), ("add_norm", "gate", 3, 5), ("gated_residual", "", 4, 5)]
)
def test_bytes_of_the_kernels_of_elements_are_those_of_the_readme(op, variant, forward, backward):
    work = build(op, variant, SHAPES["rows-1M-w256"], [512], torch.float32, "cpu")
    out = work.call(measure.reference_of(op))
    size = out.numel() * out.element_size()
    assert [work.moved([out], mode) // size for mode in ("fwd", "bwd")] == [forward, backward]


def test_a_right_function_is_found_right():
    from gem_core.ops.gdpa import reference

    assert measure.wrong(reference, small()) is None


@pytest.mark.parametrize(
    ("fault", "verdict"), [("none", None), ("output", "result 0 is"), ("gradient", "result 1 is"), ("nan", "result 0 is nan off")]
)
def test_case_G11_a_backend_in_fewer_bits_is_held_to_the_error_of_its_format(fault, verdict):
    """Operands in E4M3, gradients at them: too far off for bfloat16, near enough for four bits, and an eighth more is not."""
    from gem_core.ops.gdpa import reference

    def low(q, *, k, v, **options):
        q, k, v = (x + (x.detach().to(torch.float8_e4m3fn).to(x.dtype) - x.detach()) for x in (q, k, v))
        out = reference(q, k=k, v=v, **options)
        wrongly = {"none": out, "output": out * 1.125, "gradient": out + 0.125 * (out - out.detach()), "nan": out * float("nan")}
        return wrongly[fault]

    work = build("gdpa", "", SHAPES["self-L256"], [70, 0, 100], torch.bfloat16, "cpu")
    found = measure.wrong(low, work, measure.FORMAT["gluon_fp8"])
    assert found is verdict if verdict is None else found.startswith(verdict)
    assert measure.wrong(low, work) is not None


@CPU
@pytest.mark.parametrize(("backend", "part"), [("gluon_fp8", 0.09), ("gluon", None)])
def test_the_command_holds_a_backend_to_its_own_format(backend, part):
    seen = []
    with (
        patch("gem_kernels.bench.backends.kernel", lambda request, name: lambda q, **options: q),
        patch("gem_kernels.bench.measure.wrong", lambda function, work, part: seen.append(part) or "enough"),
    ):
        run(op=["gdpa"], backend=[backend])
    assert seen == [part]


def test_every_backend_with_a_format_of_its_own_exists():
    assert set(measure.FORMAT) <= {impl.backend for impl in gem_kernel_impls()}


WITHOUT_FLOPS = ("jagged_concat", "jagged_split", "jagged_pad", "jagged_unpad", "add_norm", "gated_residual")


@pytest.mark.parametrize("op", SHAPES_OF)
def test_every_op_can_be_built_and_called(op):
    for variant in VARIANTS_OF.get(op, ("",)):
        work = build(op, variant, SHAPES[SHAPES_OF[op][0]], [3, 0, 20], torch.float32, "cpu")
        outputs = measure.flat(work.call(measure.reference_of(op)))
        assert all(torch.isfinite(output).all() for output in outputs)
        assert work.leaves()
        assert callable(resolve(work, "reference"))
        assert (work.flops > 0) == (op not in WITHOUT_FLOPS)


def test_every_op_that_this_package_speeds_up_has_shapes():
    assert {impl.op for impl in gem_kernel_impls()} == set(SHAPES_OF)
    assert backends_of("gdpa")[-1] == "reference"


def test_a_cast_keeps_values_and_makes_new_leaves():
    work = build("block_attention", "rope", SHAPES["block-u2000"], [3, 20], torch.bfloat16, "cpu")
    wide = work.cast(torch.float64)
    assert torch.equal(wide.arguments["q"].float(), work.arguments["q"].float())
    assert wide.arguments["q"].is_leaf
    assert wide.arguments["q"].requires_grad
    assert (wide.arguments["rope"].dtype, work.arguments["rope"].dtype) == (torch.float64, torch.float32)
    assert wide.cast(torch.bfloat16).arguments["rope"].dtype == torch.float32


def test_lengths_are_the_published_ones():
    assert SHAPES["self-L256"].lengths(4) == [256] * 4
    block = SHAPES["block-u2000"].lengths(1152)
    assert (min(block) >= 801, max(block) <= 2000) == (True, True)
    assert sum(block) / 1152 == pytest.approx(1400, rel=0.02)
    assert SHAPES["self-u1024"].lengths(9) == SHAPES["self-u1024"].lengths(9)


@pytest.mark.parametrize("options", [{"op": ["gdpaa"]}, {"shape": ["self-L7"]}, {"mode": "both"}, {"dtype": "fp8"}], ids=str)
def test_unknown_words_are_refused_with_the_known_ones(options):
    with pytest.raises(RequestError, match="Known: "):
        run(**options)


@CPU
def test_without_a_gpu_nothing_is_measured():
    with pytest.raises(MachineError, match="--smoke"):
        run(smoke=False)


def test_the_command_is_declared_and_can_be_loaded():
    (command,) = [c for c in gem_cli_commands() if c.name == "kernels bench"]
    assert load_object(command.load) is cli.bench


# ---- docs/kernels.md ------------------------------------------------------------------------------------------------------------------


def document():
    path = PACKAGE / "benchmarks" / "document.py"
    spec = importlib.util.spec_from_file_location("gem_kernels_document", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def written():
    if not (PACKAGE / "benchmarks" / "document.py").exists():
        pytest.skip("the benchmarks are not beside an installed package")
    return document()


def test_the_page_of_kernels_is_up_to_date(written):
    if not written.PAGE.exists():
        pytest.skip("the documents are not beside an installed package")
    rows = list(csv.DictReader(written.RESULTS.open()))
    text = written.PAGE.read_text()
    assert text == written.page(text, written.section(list(gem_kernel_impls()), rows)), "run benchmarks/document.py"


def test_a_changed_figure_changes_the_page(written):
    rows = list(csv.DictReader(written.RESULTS.open()))
    impls = list(gem_kernel_impls())
    text = written.page("# Page\n", written.section(impls, rows))
    assert written.page(text, written.section(impls, rows)) == text
    rows.append({**rows[-1], "ms": "123.4"})
    changed = written.page(text, written.section(impls, rows))
    assert changed != text
    assert changed.count(written.BEGIN) == 1
    assert "123.4" in changed


def test_targets_are_held_against_what_was_measured(written):
    about = {"op": "norm_linear", "activation": "rms after", "shape": "rows-1M-w256", "mode": "bwd"}
    rows = [{**about, "backend": name, "ms": ms, "tflops": "400"} for name, ms in (("matmul", "9"), ("matmul", "10"), ("triton", "12"))]
    target = {**about, "backend": "triton", "tried": "much"}
    for unit, value, found, met in (
        ("TFLOP/s", "400", 400, True),
        ("TFLOP/s", "400.1", 400, False),
        ("ms", "12", 12, True),
        ("ms", "11.9", 12, False),
        ("% over the product", "20.1", 20, True),
        ("% over the product", "19.9", 20, False),
    ):
        wanted = {**target, "unit": unit, "target": value}
        assert written.reached(wanted, rows) == (pytest.approx(found), met)
        assert ("much" in written.aims([wanted], rows, [])[-1]) != met
    host = {"op": "gdpa", "backend": "triton", "variant": "", "launch": "direct", "path": "op", "mode": "fwd", "us": "40.0"}
    others = [{**host, **other} for other in ({"launch": "triton"}, {"path": "bound"}, {"mode": "bwd"})]
    assert written.aims([], [], others) == written.aims([], [], [])
    assert ["| yes |" in written.aims([], [], [{**host, "us": us}])[-1] for us in ("40.0", "40.1")] == [True, False]


def test_every_missed_target_says_what_was_tried(written):
    rows, targets = written.read(written.RESULTS), written.read(written.TARGETS)
    missed = [target for target in targets if not written.reached(target, rows)[1]]
    assert missed
    assert all(target["tried"] for target in missed)


def test_what_moves_is_counted_once():
    """Movers read every value and write it, and no padding; a backward pass reads no input that it does not need."""
    values, padding = 23 * 4, (3 * 20 - 23) * 4  # rows of 3, 0 and 20 tokens, float32, of one column
    widths = {"jagged_concat": 2, "jagged_split": 2, "jagged_pad": 1, "jagged_unpad": 1}
    for op, parts in widths.items():
        workload = small(op)
        outputs = measure.flat(workload.call(measure.reference_of(op)))
        width = SHAPES["self-L256"].width
        moved = {mode: workload.moved(outputs, mode) // width for mode in ("fwd", "bwd")}
        pads = {"jagged_pad": ("fwd",), "jagged_unpad": ("bwd",)}.get(op, ())
        assert moved == {mode: 2 * parts * values + (padding if mode in pads else 0) for mode in moved}, op


def test_attention_moves_inputs_outputs_and_gradients():
    workload = small("gdpa")
    outputs = measure.flat(workload.call(measure.reference_of("gdpa")))
    tensor = outputs[0].numel() * 4
    assert workload.moved(outputs, "fwd") == 4 * tensor
    assert workload.moved(outputs, "bwd") == 7 * tensor
