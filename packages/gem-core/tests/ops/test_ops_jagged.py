import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.ops import jagged_concat, jagged_dense_bmm_add, jagged_pad, jagged_split, jagged_unpad
from gem_core.ops.jagged import bmm_flops, bmm_reference, concat_flops, pad_reference, unpad_reference
from gem_core.spec import RequestError
from gem_core.testing import assert_close


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)


def numbered(lengths, part=0):
    """Values that say part, row and position."""
    return torch.tensor([part * 10_000 + row * 100 + i for row, length in enumerate(lengths) for i in range(length)], dtype=torch.float64)


PARTS = st.integers(0, 6).flatmap(lambda rows: st.lists(st.lists(st.integers(0, 5), min_size=rows, max_size=rows), min_size=1, max_size=4))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(parts=PARTS)
def test_concat_joins_row_by_row_and_split_undoes_it(parts):
    packed = [(numbered(lengths, part), offsets(lengths)) for part, lengths in enumerate(parts)]
    values, joined = jagged_concat(packed)
    want = [part * 10_000 + row * 100 + i for row in range(len(parts[0])) for part, lengths in enumerate(parts) for i in range(lengths[row])]
    assert values.tolist() == want
    assert joined.tolist() == offsets([sum(row) for row in zip(*parts)]).tolist()
    for totals in (None, [sum(lengths) for lengths in parts]):
        back = jagged_split(values, joined, [o for _, o in packed], totals=totals)
        assert len(back) == len(parts)
        assert all(torch.equal(b, v) for b, (v, _) in zip(back, packed))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 9), max_size=6), extra=st.integers(0, 3))
def test_pad_places_rows_and_unpad_undoes_it(lengths, extra):
    width = max(lengths, default=0) + extra
    values = numbered(lengths) + 1
    dense = jagged_pad(values, offsets(lengths), max_length=width, fill=-1.0)
    assert dense.shape == (len(lengths), width)
    for row, length in enumerate(lengths):
        assert dense[row].tolist() == [row * 100 + i + 1 for i in range(length)] + [-1.0] * (width - length)
    assert torch.equal(jagged_unpad(dense, offsets(lengths)), values)
    assert torch.equal(jagged_unpad(dense, offsets(lengths), total=sum(lengths)), values)


@pytest.mark.parametrize(("truncate", "want"), [("left", [[3, 4, 5], [6, 7, 0]]), ("right", [[1, 2, 3], [6, 7, 0]])])
def test_truncation_is_asked_for_by_side(truncate, want):
    values = torch.arange(1.0, 8.0, requires_grad=True)
    dense = jagged_pad(values, offsets([5, 2]), max_length=3, truncate=truncate)
    assert dense.tolist() == want
    (gradient,) = torch.autograd.grad(dense.sum(), values)
    assert gradient.tolist() == [float(v in dense.detach()) for v in values.detach()]


def test_case_B21_longer_rows_are_an_error_unless_truncation_is_asked_for():
    with pytest.raises(RequestError, match="has 5 values, longer than the given maximum 3"):
        jagged_pad(torch.zeros(7), offsets([5, 2]), max_length=3)


def test_case_B07_truncated_rows_get_exactly_zero_gradient():
    """x of 5 rows, lengths [3, 2], max_length 2, upstream 1, 2 / 3, 4: gradients 1, 2, 0, 3, 4."""
    x = torch.zeros(5, 1, dtype=torch.float64, requires_grad=True)
    upstream = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]], dtype=torch.float64)
    for dense in (jagged_pad(x, offsets([3, 2]), max_length=2, truncate="right"), pad_reference(x, offsets([3, 2]), max_length=2)):
        (gradient,) = torch.autograd.grad(dense, x, upstream)
        assert gradient.flatten().tolist() == [1, 2, 0, 3, 4]
    y = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    for truncate in ("left", "right"):
        assert torch.autograd.gradcheck(lambda y, side=truncate: jagged_pad(y, offsets([3, 2]), max_length=2, truncate=side), (y,))


def test_case_B08_cut_rows_are_zero_and_never_uninitialised():
    dense = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        packed = unpad_reference(dense, offsets([0, 3, 0, 2]))  # past the check, as on CUDA
        assert packed.tolist() == [1, 1, 0, 1, 1]
        assert torch.autograd.grad(packed.sum(), dense)[0].tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_case_B09_float64_works_and_gradchecks():
    values, dense = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    other = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    lengths, few = offsets([3, 0, 2]), offsets([0, 1, 1])
    assert torch.autograd.gradcheck(lambda v: jagged_pad(v, lengths, max_length=3), (values,))
    assert torch.autograd.gradcheck(lambda d: jagged_unpad(d, lengths), (dense,))
    assert torch.autograd.gradcheck(lambda v, o: jagged_concat([(v, lengths), (o, few)])[0], (values, other))
    assert torch.autograd.gradcheck(lambda v: jagged_split(v, lengths, [offsets([1, 0, 2]), offsets([2, 0, 0])]), (values,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16])
def test_case_B17_movers_keep_any_dtype_also_of_nothing(dtype):
    for lengths in ([2, 0, 1], [0, 0, 0], []):
        values, total = torch.ones(sum(lengths), dtype=dtype), sum(lengths)
        joined, both = jagged_concat([(values, offsets(lengths))] * 2)
        assert (joined.dtype, joined.numel()) == (dtype, 2 * total)
        assert jagged_split(joined, both, [offsets(lengths)] * 2)[1].dtype == dtype
        dense = jagged_pad(values, offsets(lengths), max_length=2)
        assert (dense.dtype, dense.shape) == (dtype, (len(lengths), 2))
        assert jagged_unpad(dense, offsets(lengths)).dtype == dtype


def test_values_of_any_trailing_shape():
    values = torch.randn(5, 2, 3)
    dense = jagged_pad(values, offsets([3, 0, 2]), max_length=4)
    assert dense.shape == (3, 4, 2, 3)
    assert torch.equal(jagged_unpad(dense, offsets([3, 0, 2])), values)


def test_bmm_add_gives_each_row_its_own_matrix_and_bias():
    lengths = [2, 0, 3]
    values, dense, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 4), (3, 4, 6), (3, 6)))
    got = jagged_dense_bmm_add(values, offsets(lengths), dense, bias, max_length=3)
    want = torch.cat([values[:2] @ dense[0] + bias[0], values[2:] @ dense[2] + bias[2]])
    assert_close(got, want, bound=1e-14)
    gradient = torch.autograd.grad(got.sum(), (dense, bias))
    assert torch.equal(gradient[0][1], torch.zeros(4, 6, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda v, d, b: jagged_dense_bmm_add(v, offsets(lengths), d, b, max_length=3), (values, dense, bias))


def test_bmm_add_cuts_rows_where_they_are_no_error():
    values = torch.ones(5, 2, dtype=torch.float64, requires_grad=True)
    out = bmm_reference(values, offsets([3, 2]), torch.ones(2, 2, 2).double(), torch.ones(2, 2).double(), max_length=2)
    assert out[:, 0].tolist() == [3, 3, 0, 3, 3]
    assert torch.autograd.grad(out.sum(), values)[0][2].tolist() == [0, 0]


@pytest.mark.parametrize("rows", [0, 2])
def test_case_B01_nothing_to_move(rows):
    none = torch.zeros(0, 3, requires_grad=True)
    where = offsets([0] * rows)
    assert jagged_concat([(none, where), (none, where)])[0].shape == (0, 3)
    assert [p.shape for p in jagged_split(none, where, [where, where])] == [(0, 3), (0, 3)]
    assert jagged_pad(none, where, max_length=0).shape == (rows, 0, 3)
    assert jagged_unpad(torch.zeros(rows, 0, 3), where).shape == (0, 3)
    out = jagged_dense_bmm_add(none, where, torch.zeros(rows, 3, 4), torch.zeros(rows, 4), max_length=0)
    assert out.shape == (0, 4)
    assert torch.autograd.grad(out.sum(), none)[0].shape == (0, 3)


def test_flops():
    assert concat_flops() == 0
    assert bmm_flops(lengths=[2, 0, 3], in_features=4, out_features=6) == 2 * 5 * 4 * 6


BAD = [
    (lambda: jagged_concat([]), "there are no parts"),
    (lambda: jagged_concat([(torch.zeros(2), offsets([2])), (torch.zeros(2, 1), offsets([2]))]), r"part 1 has shape \[2, 1\]"),
    (lambda: jagged_concat([(torch.zeros(2), offsets([2])), (torch.zeros(2), offsets([1, 1]))]), "part 1 has 2 rows, part 0 has 1"),
    (lambda: jagged_concat([(torch.zeros(2), offsets([3]))]), "last offset 3 but 2 values"),
    (lambda: jagged_split(torch.zeros(3), offsets([3]), [offsets([1]), offsets([1])]), "do not add up to offsets at row 0"),
    (lambda: jagged_split(torch.zeros(3), offsets([3]), []), "part_offsets are not all int64"),
    (lambda: jagged_split(torch.zeros(3), offsets([3]), [offsets([1]), offsets([2])], totals=[2, 1]), r"totals are \[2, 1\]"),
    (lambda: jagged_split(torch.zeros(3), offsets([3]), [offsets([1]), offsets([2])], totals=[3]), r"totals are \[3\] for 2 parts"),
    (lambda: jagged_split(torch.zeros(2), offsets([1, 1]), [torch.tensor([0, 2, 1]), torch.tensor([0, -1, 1])]), "one falls"),
    (lambda: jagged_pad(torch.zeros(3), offsets([3]), max_length=3, truncate="middle"), "truncate 'middle'"),
    (lambda: jagged_pad(torch.zeros(3, dtype=torch.complex64), offsets([3]), max_length=3), "complex64 is not one of"),
    (lambda: jagged_unpad(torch.zeros(2, 3), offsets([3])), r"dense has shape \[2, 3\]"),
    (lambda: jagged_unpad(torch.zeros(1, 3), offsets([4])), "has 4 values, longer than the given maximum 3"),
    (lambda: jagged_unpad(torch.zeros(1, 3), offsets([2]), total=3), "last offset 2 but 3 values"),
    (lambda: jagged_unpad(torch.zeros(1, 3), torch.tensor([0, -2])), "last offset is -2"),
    (lambda: jagged_dense_bmm_add(torch.zeros(3, 2), offsets([3]), torch.zeros(1, 3, 2), torch.zeros(1, 2), max_length=3), "dense has shape"),
    (lambda: jagged_dense_bmm_add(torch.zeros(3, 2), offsets([3]), torch.zeros(1, 2, 4), torch.zeros(1, 2), max_length=3), "bias has shape"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_refused_before_any_work(call, message):
    with pytest.raises(RequestError, match=message):
        call()
