"""Plan files: what is written is read, and what no longer fits is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError, SparseOptimizer, TableSpec
from gem_parallel.sparse.engine import TorchRecEmbeddings
from gem_parallel.sparse.layout import lay_out
from gem_parallel.sparse.options import TorchRecOptions
from gem_parallel.sparse.placement import Cluster, place, wishes
from gem_parallel.sparse.planfile import read_plan, write_plan

SGD = SparseOptimizer(name="sgd")


def spec(name: str, rows: int = 40, dim: int = 8) -> TableSpec:
    return TableSpec(name=name, rows=rows, dim=dim, features=(name,), pooling="sum", init_scale=1.0)


TABLES = (spec("item"), spec("user", 30), spec("city", 20))


def cluster(world: int, local: int = 0, device: str = "cpu") -> Cluster:
    return Cluster(world=world, local=local or world, device=device)


def written(folder: Path, tables: tuple[TableSpec, ...] = TABLES, world: int = 4, sharding: str = "auto") -> Path:
    places = place(tables, wishes(tables, sharding, "device", ()), SGD, cluster(world))
    path = folder / "plan.toml"
    path.write_text(write_plan(places, tables, cluster(world)), encoding="utf-8")
    return path


@settings(max_examples=25, derandomize=True)
@given(
    names=st.lists(st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()), min_size=1, max_size=5, unique=True),
    world=st.integers(1, 8),
    sharding=st.sampled_from(["auto", "row_wise", "column_wise", "data_parallel", "table_wise"]),
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, names: list[str], world: int, sharding: str) -> None:
    tables = tuple(spec(name, 10 + i) for i, name in enumerate(names))
    path = written(tmp_path_factory.mktemp("plan"), tables, world, sharding)
    places = place(tables, wishes(tables, sharding, "device", ()), SGD, cluster(world))
    assert read_plan(str(path), tables, cluster(world)) == places


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rows = 40", "rows = 41", "'item' has 41 rows of width 8 in it, and 40 of width 8 here"),
        ("ranks_per_host = 4", "ranks_per_host = 0", "ranks_per_host"),
        ("world = 4", "world = 2", "places tables on 2 ranks, here are 4"),
        ('name = "user"', 'name = "usr"', r"lacks \['user'\], has \['usr'\] too many"),
        ('name = "user"', 'name = "item"', r"lacks \['user'\].*\['item'\] twice"),
        ("format = 1", "format = 2", "format"),
        ("format = 1", "format = 1\nextra = 3", "extra"),
        ("format = 1", "format 1", "not TOML"),
        ("rows = 40", "rows = true", "rows"),
        ('sharding = "table_wise"', 'sharding = "sideways"', "sharding"),
        ("ranks = [0]", "ranks = [4]", "do not suit table"),
        ("ranks = [0]", "ranks = [1, 2]", "do not suit table"),
        ("ranks = [0]", "ranks = []", "ranks"),
        ("ranks = [0]\n", "", "left out do not suit table"),
        ('sharding = "row_wise"', 'sharding = "row_wise"\nranks = [0, 1, 2, 3]', "do not suit table 'item'"),
    ],
)
def test_a_plan_that_no_longer_fits_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = written(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RequestError, match=words) as caught:
        read_plan(str(path), TABLES, cluster(4))
    assert "gem plan --write" in caught.value.do


def test_columns_that_cannot_be_cut_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, sharding="column_wise")
    path.write_text(path.read_text().replace("ranks = [0, 1]", "ranks = [0, 1, 2]", 1))
    with pytest.raises(RequestError, match="do not suit table"):
        read_plan(str(path), TABLES, cluster(4))
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        read_plan(str(tmp_path / "none.toml"), TABLES, cluster(4))


def test_case_F09_a_plan_is_checked_like_an_option(tmp_path: Path) -> None:
    """A plan written for SGD places columns; row-wise AdaGrad cannot take it."""
    options = TorchRecOptions(plan=str(written(tmp_path, sharding="column_wise")))
    assert lay_out(TABLES, SGD, cluster(4), options)["item"].sharding == "column_wise"
    with pytest.raises(RequestError, match="one state a row"):
        lay_out(TABLES, SparseOptimizer(), cluster(4), options)


@pytest.mark.parametrize("sharding", ["table_row_wise", "grid"])
def test_a_plan_for_hosts_of_another_size_is_refused(tmp_path: Path, sharding: str) -> None:
    """Eight ranks in hosts of 4; hosts of 2 or 8 would put the parts elsewhere than the plan says."""
    path, options = tmp_path / "plan.toml", TorchRecOptions(plan=str(tmp_path / "plan.toml"))
    planned = {local: cluster(8, local, "cuda") for local in (2, 4, 8)}
    places = place(TABLES, wishes(TABLES, sharding, "device", ()), SGD, planned[4])
    text = write_plan(places, TABLES, planned[4])
    path.write_text(text)
    assert lay_out(TABLES, SGD, planned[4], options) == places
    for local in (2, 8):
        with pytest.raises(RequestError, match=f"hosts of 4 ranks in it, here are {local}"):
            lay_out(TABLES, SGD, planned[local], options)
    path.write_text(text.replace("[0, 1, 2, 3", "[0, 1, 2, 4", 1))
    with pytest.raises(RequestError, match="do not suit table"):
        lay_out(TABLES, SGD, planned[4], options)


def test_one_process_refuses_the_plan_of_several_and_takes_its_own(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"4 ranks, here are 1.*leave embedding.options.plan out"):
        TorchRecEmbeddings(TABLES, SGD, device="cpu", seed=1, plan=str(written(tmp_path)))
    for sharding in ("auto", "data_parallel", "row_wise"):
        own = TorchRecEmbeddings(TABLES, SGD, device="cpu", seed=1, plan=str(written(tmp_path, world=1, sharding=sharding)))
        free = TorchRecEmbeddings(TABLES, SGD, device="cpu", seed=1)
        for name, tensors in free.export_tables().items():
            assert torch.equal(own.export_tables()[name]["weight"], tensors["weight"])
