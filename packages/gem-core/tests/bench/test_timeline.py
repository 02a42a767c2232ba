"""Traces by hand: every microsecond belongs to one category, and to the right one."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.bench.timeline import CATEGORIES, GAPS, OP, Segment, attribute, category_of, segments

W = "steps"
Trace = list[dict[str, Any]]


def event(cat: str, name: str, begin: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "pid": 1, "tid": tid, "args": args}


def span(name: str, begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", name, begin, end)


def op(name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, begin, end, **args)


def launched(kernel: str, begin: float, end: float, at: float, correlation: int, *, tid: int = 1, kind: str = "kernel") -> Trace:
    """A kernel and its launch by thread ``tid`` at a time."""
    launch = event("cuda_runtime", "cudaLaunchKernel", at, at + 0.5, tid, correlation=correlation)
    return [launch, event(kind, kernel, begin, end, 77, correlation=correlation)]


def times(trace: Trace) -> dict[str, float]:
    """Microseconds by category, without those that took none."""
    found, begin, end = segments(trace, W)
    spent = attribute(found, begin, end)[0]
    assert tuple(spent) == (*CATEGORIES, GAPS)
    assert sum(spent.values()) == pytest.approx(end - begin)
    return {category: took for category, took in spent.items() if took}


# ---- which category --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "operator", "kernel", "expected"),
    [
        ((), "aten::addmm", "", "matmul"),
        ((), "aten::_scaled_mm", "", "matmul"),
        ((), "aten::add", "", "memory-bound"),
        ((), "aten::addmm_like", "", "memory-bound"),
        ((), "aten::embedding", "", "memory-bound"),  # a learned vector of the dense part; tables are looked up in a range
        (("forward", "embedding"), "aten::embedding", "", "embedding"),
        (("forward", OP + "gdpa"), "aten::bmm", "", "attention"),
        (("forward", OP + "hstu_attention"), "", "_forward_kernel", "attention"),
        (("forward", OP + "norm_linear"), "aten::native_layer_norm", "", "memory-bound"),
        (("forward", OP + "norm_linear"), "aten::addmm", "nvjet_tst_128", "matmul"),
        (("forward", OP + "norm_linear"), "", "_forward_kernel", "matmul"),
        (("forward", OP + "jagged_concat"), "", "_move_kernel", "memory-bound"),
        (("backward", OP + "gdpa", OP + "norm_linear"), "aten::addmm", "", "matmul"),  # recomputed on the way to a gradient of gdpa
        (("backward", OP + "gdpa", OP + "jagged_pad"), "aten::index", "", "memory-bound"),
        (("forward",), "", "flash_fwd_kernel", "attention"),
        (("forward",), "aten::linear", "sm90_xmma_gemm_bf16", "matmul"),
        (("backward",), "", "split_embedding_backward_codegen", "embedding"),
        (("optimiser",), "aten::_foreach_add_", "multi_tensor_apply", "optimiser"),
        (("tables",), "aten::index_add_", "", "embedding"),
        (("copy",), "aten::copy_", "Memcpy HtoD (Pinned -> Device)", "data"),
        (("copy", "data"), "aten::index", "", "data"),
        (("backward",), "", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        (("optimiser",), "c10d::allreduce_", "", "communication"),
        ((), "", "vectorized_elementwise_kernel", "memory-bound"),
    ],
)
def test_categories(ranges: tuple[str, ...], operator: str, kernel: str, expected: str) -> None:
    assert category_of((W, *ranges), operator, kernel) == expected


# ---- adding up -------------------------------------------------------------------------------------------------------------------------------

drawn = st.lists(st.tuples(st.integers(-3, 20), st.integers(0, 9), st.sampled_from(CATEGORIES)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(drawn)
def test_every_microsecond_is_the_first_category_that_is_there(stretches: list[tuple[int, int, str]]) -> None:
    found = [Segment(begin, begin + length, category, f"{category} {length}") for begin, length, category in stretches]
    spent, names = attribute(found, 0, 16)
    by_hand = dict.fromkeys((*CATEGORIES, GAPS), 0)
    for moment in range(16):
        there = {s.category for s in found if s.begin <= moment < s.end}
        by_hand[next((category for category in CATEGORIES if category in there), GAPS)] += 1
    assert spent == by_hand
    for category in CATEGORIES:
        assert sum(took for (of, _), took in names.items() if of == category) == spent[category]


def test_a_name_gets_the_time_of_its_own_stretch() -> None:
    found = [Segment(0, 4, "matmul", "a"), Segment(3, 9, "matmul", "b"), Segment(2, 6, "data", "hidden")]
    assert attribute(found, 0, 10)[1] == {("matmul", "a"): 3, ("matmul", "b"): 6}


def test_without_any_work_all_is_gaps() -> None:
    assert times([span(W, 5, 25)]) == {GAPS: 20}


def test_a_trace_without_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="no range 'steps'"):
        segments([span("other", 0, 1), {"ph": "M", "name": "steps"}], W)


# ---- a CPU -----------------------------------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_innermost_operator_counts_and_python_is_a_gap() -> None:
    trace = [
        span(W, 0, 100),
        span("forward", 10, 60),
        op("aten::linear", 12, 30),
        op("aten::addmm", 15, 25),
        op("aten::copy_", 16, 18),
        span(OP + "gdpa", 30, 50),
        op("aten::bmm", 32, 40),
        op("aten::add", 44, 50),
    ]
    assert times(trace) == {"matmul": 16, "memory-bound": 2, "attention": 14, GAPS: 68}


def test_phases_of_data_count_whole_and_operators_in_them_are_data() -> None:
    trace = [span(W, 0, 40), span("data", 5, 15), op("aten::mm", 7, 9), span("agree", 10, 13), span("copy", 20, 30), span("ids", 22, 24)]
    assert times(trace) == {"data": 17, "communication": 3, GAPS: 20}


def test_the_gradient_of_a_range_belongs_to_it() -> None:
    """The node of a gradient carries the sequence number of the operator that made it."""
    node = "autograd::engine::evaluate_function: Any"
    trace = [
        span(W, 0, 100),
        span("forward", 0, 30),
        op("aten::mul", 1, 2, **{"Sequence number": 5, "Fwd thread id": 0}),  # looks at the number before the node is made
        span(OP + "gdpa", 5, 10),
        op("aten::softmax", 6, 9, **{"Sequence number": 5, "Fwd thread id": 0}),
        span("embedding", 10, 20),
        op("aten::index", 12, 18, **{"Sequence number": 6, "Fwd thread id": 0}),
        span("backward", 30, 90),
        op(node, 31, 50, **{"Sequence number": 6, "Fwd thread id": 1}),
        op("aten::index_put_", 33, 43),
        op(node, 50, 60, **{"Sequence number": 5, "Fwd thread id": 1}),
        op("SoftmaxBackward0", 51, 59, **{"Sequence number": 5, "Fwd thread id": 1}),
        op("aten::mul", 52, 57),
        op(node, 60, 70, **{"Sequence number": 4, "Fwd thread id": 1}),
        op("aten::mul", 61, 68),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 70, 80),
        op("torch::autograd::AccumulateGrad", 71, 79),
    ]
    assert times(trace) == {"attention": 3 + 5, "embedding": 6 + 10, "memory-bound": 1 + 7, GAPS: 100 - 32}


def test_operators_of_other_threads_are_not_the_steps() -> None:
    reading = [event("cpu_op", "aten::mm", 10, 90, tid=2), event("user_annotation", "data", 5, 95, tid=2)]
    assert times([span(W, 0, 100), op("aten::mm", 40, 50), *reading]) == {"matmul": 10, GAPS: 90}


def test_a_step_that_waits_for_a_collective_of_another_thread_communicates() -> None:
    talking = event("user_annotation", "gloo:all_reduce", 30, 70, tid=2)
    assert times([span(W, 0, 100), op("aten::mm", 20, 50), talking]) == {"matmul": 30, "communication": 20, GAPS: 50}


# ---- a GPU -----------------------------------------------------------------------------------------------------------------------------------


def test_kernels_belong_to_what_launched_them_however_late_they_run() -> None:
    trace = [
        span(W, 0, 100),
        span("forward", 0, 10),
        op("aten::addmm", 1, 4),
        *launched("some_kernel", 40, 50, at=2, correlation=1),
        span(OP + "gdpa", 5, 8),
        *launched("_forward", 50, 70, at=6, correlation=2),
        span("optimiser", 20, 30),
        op("aten::_foreach_mul_", 21, 24),
        *launched("multi_tensor", 70, 75, at=22, correlation=3),
        event("gpu_user_annotation", "forward", 40, 70, tid=77),
        event("kernel", "unknown", 80, 82, tid=77, correlation=9),
    ]
    assert times(trace) == {"matmul": 10, "attention": 20, "optimiser": 5, "memory-bound": 2, GAPS: 63}


def test_a_backward_thread_launches_for_the_ranges_of_forward() -> None:
    node = event("cpu_op", "autograd::engine::evaluate_function: CppNode", 20, 30, 2, **{"Sequence number": 3, "Fwd thread id": 1})
    trace = [
        node,  # threads may come in any order
        *launched("tbe_backward", 50, 60, at=25, correlation=1, tid=2),
        span(W, 0, 100),
        span("embedding", 1, 5),
        op("fbgemm::lookup", 2, 4, **{"Sequence number": 3, "Fwd thread id": 0}),
    ]
    assert times(trace) == {"embedding": 10, GAPS: 90}


def test_only_what_nothing_hides_is_communication_or_data() -> None:
    trace = [
        span(W, 0, 100),
        span("data", 60, 80),
        *launched("ncclDevKernel_AllGather", 10, 30, at=1, correlation=1),
        *launched("nvjet_gemm", 20, 40, at=2, correlation=2),
        *launched("Memcpy HtoD (Pinned -> Device)", 35, 45, at=3, correlation=3, kind="gpu_memcpy"),
        *launched("elementwise", 70, 75, at=50, correlation=4),
    ]
    # all-gather 10-20, matmul 20-40, copy 40-45; while the host reads, 60-80, the GPU computes from 70 to 75
    assert times(trace) == {"communication": 10, "matmul": 20, "data": 5 + 15, "memory-bound": 5, GAPS: 45}


def test_operators_of_the_host_are_no_work_of_a_gpu() -> None:
    trace = [span(W, 0, 50), op("aten::mm", 5, 25), *launched("gemm", 10, 20, at=6, correlation=1), op("c10d::allreduce_", 30, 45)]
    assert times(trace) == {"matmul": 10, GAPS: 40}


def test_work_outside_the_window_is_cut_off() -> None:
    trace = [span(W, 10, 20), *launched("gemm", 5, 12, at=1, correlation=1), *launched("gemm", 18, 30, at=11, correlation=2)]
    assert times(trace) == {"matmul": 4, GAPS: 6}
