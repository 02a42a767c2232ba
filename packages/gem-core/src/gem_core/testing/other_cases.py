"""Cases of the ops that are not attention."""

from functools import partial
from typing import Any

from gem_core.ops.activations import ACTIVATIONS
from gem_core.testing.attention_cases import ATTENTION_CASES, HEADS, LENGTHS, longest
from gem_core.testing.inputs import Call, Case, Inputs, OpCases

WIDTH_IN, WIDTH_OUT = 24, 40


def _norm_linear(inputs: Inputs, outer: list[int], *, affine: bool = False, residual: bool = False, bias: bool = False, **options: Any) -> Call:
    where, norm = options.get("where", "before"), options.get("norm", "rms")
    normed = WIDTH_IN if where == "before" else WIDTH_OUT
    x, weight = inputs.tensor(*outer, WIDTH_IN), inputs.tensor(WIDTH_OUT, WIDTH_IN, scale=0.2)
    arguments = (x, weight, inputs.tensor(WIDTH_OUT)) if bias else (x, weight)
    if affine:
        options["gamma"] = inputs.tensor(normed)
        if norm == "layer":
            options["beta"] = inputs.tensor(normed)
    if residual:
        options["residual"] = inputs.tensor(*outer, normed)
    return arguments, options


def _large_mean(inputs: Inputs) -> Call:
    (x, weight), options = _norm_linear(inputs, [9], norm="layer")
    return (x + 300.0, weight), options


def _norm_linear_cases() -> OpCases:
    cases = [Case(f"tokens_{n}", partial(_norm_linear, outer=[n])) for n in (0, 1, 37, 130)]
    for norm in ("rms", "layer"):
        for where in ("before", "after"):
            kind: dict[str, Any] = {"norm": norm, "where": where}
            cases += [
                Case(f"{norm}_{where}", partial(_norm_linear, outer=[17], **kind)),
                Case(f"{norm}_{where}_everything", partial(_norm_linear, outer=[17], affine=True, residual=True, bias=True, return_sum=True, **kind)),
            ]
        stream: dict[str, Any] = {"norm": norm, "return_sum": True}
        cases += [
            Case(f"{norm}_stream", partial(_norm_linear, outer=[37], **stream)),
            Case(f"{norm}_stream_and_branch", partial(_norm_linear, outer=[37], residual=True, bias=True, **stream)),
        ]
    cases += [Case("stream_without_tokens", partial(_norm_linear, outer=[0], residual=True, return_sum=True))]
    cases += [Case("two_outer_dimensions", partial(_norm_linear, outer=[3, 5])), Case("large_mean", _large_mean)]
    return OpCases(tuple(cases), lambda inputs, lengths: _norm_linear(inputs, [sum(lengths)]))


def _add_norm(
    inputs: Inputs,
    outer: list[int],
    *,
    width: int = WIDTH_OUT,
    affine: bool = False,
    residual: bool = False,
    gate: bool = False,
    concat: bool = False,
    **options: Any,
) -> Call:
    arguments = (inputs.tensor(*outer, width), *([inputs.tensor(*outer, width)] if residual else []))
    if affine:
        options["gamma"] = inputs.tensor(width)
        if options.get("norm", "layer") == "layer":
            options["beta"] = inputs.tensor(width)
    if gate:
        options["gate"] = inputs.tensor(*outer, width)
    if concat:
        options["concat"] = inputs.tensor(*outer, width)
    return arguments, options


def _strided_gate(inputs: Inputs) -> Call:
    """The gate and what is gated are views of one buffer, as a fused projection leaves them."""
    buffer = inputs.tensor(19, 3, WIDTH_IN)
    return (buffer[:, 0], buffer[:, 1]), {"gate": buffer[:, 2]}


def _strided_concat(inputs: Inputs) -> Call:
    """What stands beside the gate is a view too, of rows that are further apart."""
    (x,), options = _add_norm(inputs, [19], width=WIDTH_IN, gate=True)
    return (x,), options | {"concat": inputs.tensor(19, 2, WIDTH_IN)[:, 1]}


def _add_norm_cases() -> OpCases:
    cases = [Case(f"tokens_{n}", partial(_add_norm, outer=[n], residual=True)) for n in (0, 1, 37, 130)]
    for norm in ("rms", "layer"):
        kinds: dict[str, dict[str, Any]] = {"plain": {}, "gate": {"gate": True}, "everything": {"affine": True, "residual": True, "gate": True}}
        kinds["concat"] = {"affine": True, "gate": True, "concat": True}
        cases += [Case(f"{norm}_{name}", partial(_add_norm, outer=[17], norm=norm, **kind)) for name, kind in kinds.items()]
    cases += [
        Case("one_column", partial(_add_norm, outer=[5], width=1, norm="rms", gate=True)),
        Case("wide", partial(_add_norm, outer=[3], width=1100, residual=True, gate=True, affine=True)),
        Case("two_outer_dimensions", partial(_add_norm, outer=[3, 5], residual=True, gate=True)),
        Case("concat_of_two_outer_dimensions", partial(_add_norm, outer=[3, 5], residual=True, gate=True, concat=True)),
        Case("no_outer_dimension", partial(_add_norm, outer=[], residual=True)),
        Case("eps", partial(_add_norm, outer=[9], eps=1e-1)),
        Case("strided", _strided_gate),
        Case("strided_concat", _strided_concat),
        Case("concat_of_nothing", partial(_add_norm, outer=[0], gate=True, concat=True)),
    ]
    return OpCases(tuple(cases), lambda inputs, lengths: _add_norm(inputs, [sum(lengths)], residual=True, gate=True))


def _gated(inputs: Inputs, shape: list[int]) -> Call:
    return tuple(inputs.tensor(*shape) for _ in range(3)), {}


def _strided_residual(inputs: Inputs) -> Call:
    x, gate, residual = inputs.tensor(19, 3, WIDTH_IN).unbind(1)
    return (x, gate, residual), {}


def _gated_residual_cases() -> OpCases:
    shapes = {"empty": [0, 7], "one_value": [1], "no_dimension": [], "odd": [37, 41], "three_dimensions": [3, 5, 24], "long": [2500]}
    cases = [Case(name, partial(_gated, shape=shape)) for name, shape in shapes.items()]
    return OpCases((*cases, Case("strided", _strided_residual)), lambda inputs, lengths: _gated(inputs, [sum(lengths), WIDTH_IN]))


def _pffn(inputs: Inputs, lengths: list[int], *, keys: int = 17, **options: Any) -> Call:
    shape = (len(lengths), keys, HEADS, inputs.head_dim)
    q0 = inputs.tensor(sum(lengths), HEADS, inputs.head_dim)
    return (q0, inputs.tensor(*shape, scale=0.5), inputs.tensor(*shape), inputs.offsets(lengths)), {"max_q": longest(lengths), **options}


def _pffn_cases() -> OpCases:
    odd = LENGTHS["empty_rows"] + LENGTHS["odd"]
    cases = [Case(name, partial(_pffn, lengths=lengths)) for name, lengths in LENGTHS.items()]
    cases += [Case(f"act_{name}", partial(_pffn, lengths=odd, activation=name)) for name in ACTIVATIONS]
    cases += [
        Case("scale_after", partial(_pffn, lengths=odd, scale=0.25, scale_position="after")),
        Case("one_key", partial(_pffn, lengths=odd, keys=1)),
        Case("eps", partial(_pffn, lengths=odd, eps=1e-2)),
    ]
    return OpCases(tuple(cases), _pffn, lambda inputs: (_pffn(inputs, [3, 40, 0])[0], {"max_q": 17}))


def _concat(inputs: Inputs, parts: list[list[int]], tail: tuple[int, ...] = (3,)) -> Call:
    return ([(inputs.tensor(sum(lengths), *tail), inputs.offsets(lengths)) for lengths in parts],), {}


def _concat_cases() -> OpCases:
    cases = [Case(name, partial(_concat, parts=[lengths, lengths[::-1]])) for name, lengths in LENGTHS.items()]
    cases += [
        Case("one_part", partial(_concat, parts=[[2, 0, 3]])),
        Case("three_parts", partial(_concat, parts=[[2, 0, 3], [0, 0, 1], [4, 0, 0]])),
        Case("flat", partial(_concat, parts=[[2, 0], [1, 1]], tail=())),
        Case("heads", partial(_concat, parts=[[2, 0], [1, 1]], tail=(2, 5))),
    ]
    return OpCases(tuple(cases), lambda inputs, lengths: _concat(inputs, [lengths, [1] * len(lengths)]))


def _split(inputs: Inputs, parts: list[list[int]], totals: bool = False) -> Call:
    sums = [sum(row) for row in zip(*parts)]
    offsets = [inputs.offsets(part) for part in parts]
    return (inputs.tensor(sum(sums), 3), inputs.offsets(sums), offsets), {"totals": [sum(p) for p in parts]} if totals else {}


def _split_cases() -> OpCases:
    cases = [Case(name, partial(_split, parts=[lengths, lengths[::-1]])) for name, lengths in LENGTHS.items()]
    cases += [
        Case("one_part", partial(_split, parts=[[2, 0, 3]])),
        Case("totals", partial(_split, parts=[[2, 0, 3], [0, 0, 1], [4, 0, 0]], totals=True)),
    ]
    return OpCases(tuple(cases), lambda inputs, lengths: _split(inputs, [lengths, [1] * len(lengths)]))


def _pad(inputs: Inputs, lengths: list[int], *, tail: tuple[int, ...] = (3,), **options: Any) -> Call:
    return (inputs.tensor(sum(lengths), *tail), inputs.offsets(lengths)), {"max_length": longest(lengths), **options}


def _pad_cases() -> OpCases:
    odd = LENGTHS["empty_rows"] + LENGTHS["odd"]
    cases = [Case(name, partial(_pad, lengths=lengths)) for name, lengths in LENGTHS.items()]
    cases += [
        Case("wider", partial(_pad, lengths=odd, max_length=40)),
        Case("fill", partial(_pad, lengths=odd, fill=-2.0)),
        Case("flat", partial(_pad, lengths=odd, tail=())),
        Case("truncate_left", partial(_pad, lengths=odd, max_length=4, truncate="left")),
        Case("truncate_right", partial(_pad, lengths=odd, max_length=4, truncate="right")),
    ]
    return OpCases(tuple(cases), _pad, lambda inputs: _pad(inputs, odd, max_length=4))


def _unpad(inputs: Inputs, lengths: list[int], *, width: int | None = None, **options: Any) -> Call:
    return (inputs.tensor(len(lengths), longest(lengths) if width is None else width, 3), inputs.offsets(lengths)), options


def _unpad_cases() -> OpCases:
    odd = LENGTHS["empty_rows"] + LENGTHS["odd"]
    cases = [Case(name, partial(_unpad, lengths=lengths)) for name, lengths in LENGTHS.items()]
    cases += [Case("wider", partial(_unpad, lengths=odd, width=40)), Case("total", partial(_unpad, lengths=odd, total=sum(odd)))]
    return OpCases(tuple(cases), _unpad, lambda inputs: _unpad(inputs, odd, width=4))


def _bmm(inputs: Inputs, lengths: list[int], **options: Any) -> Call:
    rows = len(lengths)
    values, dense = inputs.tensor(sum(lengths), WIDTH_IN), inputs.tensor(rows, WIDTH_IN, WIDTH_OUT, scale=0.2)
    return (values, inputs.offsets(lengths), dense, inputs.tensor(rows, WIDTH_OUT)), {"max_length": longest(lengths), **options}


def _bmm_cases() -> OpCases:
    cases = [Case(name, partial(_bmm, lengths=lengths)) for name, lengths in LENGTHS.items()]
    cases.append(Case("generous_maximum", partial(_bmm, lengths=LENGTHS["odd"], max_length=40)))
    return OpCases(tuple(cases), _bmm, lambda inputs: _bmm(inputs, [3, 40, 0], max_length=17))


OP_CASES = ATTENTION_CASES | {
    "norm_linear": _norm_linear_cases,
    "add_norm": _add_norm_cases,
    "gated_residual": _gated_residual_cases,
    "pffn": _pffn_cases,
    "jagged_concat": _concat_cases,
    "jagged_split": _split_cases,
    "jagged_pad": _pad_cases,
    "jagged_unpad": _unpad_cases,
    "jagged_dense_bmm_add": _bmm_cases,
}
"""How to build the cases of each op."""
