"""Reading TOML and --set: values, origins, and refusals with the nearest name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gem_core.config.load import LoadedConfig, flat, load_config, recipes
from gem_core.config.schema import RunConfig
from gem_core.spec import RequestError


@pytest.fixture
def write(tmp_path: Path):
    def put(text: str, name: str = "mine.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return put


def value(loaded: LoadedConfig, path: str) -> Any:
    return dict(flat(loaded.config))[path]


def test_an_empty_file_is_a_valid_configuration(write) -> None:
    loaded = load_config(write(""))
    assert loaded.config.model_copy(update={"run": RunConfig().run}) == RunConfig()
    assert set(loaded.origins.values()) == {"default"}


def test_values_of_the_file_and_where_they_come_from(write) -> None:
    path = write("[data]\nsource = 'toy'\n[data.options]\nrows = 5\n[optim]\nlr = 1\n")
    loaded = load_config(path)
    assert (value(loaded, "data.source"), value(loaded, "optim.lr"), value(loaded, "data.options.rows")) == ("toy", 1.0, 5)
    assert loaded.origins["data.source"] == loaded.origins["data.options.rows"] == str(path)
    assert loaded.origins["data.batch_size"] == "default"
    assert loaded.source.startswith("[data]")


def test_every_value_has_an_origin(write) -> None:
    loaded = load_config(write("[train]\nepochs = 2\n"), ["kernels.use.gdpa=acme"])
    assert list(loaded.origins) == [path for path, _ in flat(loaded.config)]


def test_the_run_folder_is_named_after_the_configuration(write) -> None:
    assert load_config(write("", "quick.toml")).config.run.out == "runs/quick"
    assert load_config(write("[run]\nout = 'elsewhere'\n")).config.run.out == "elsewhere"
    assert load_config("toy").config.run.out == "runs/toy"


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("data.batch_size=32", "data.batch_size", 32),
        ("optim.lr=1e-4", "optim.lr", 1e-4),
        ("optim.lr = 1", "optim.lr", 1.0),
        ("train.shuffle=false", "train.shuffle", False),
        ("data.source=ml-100k", "data.source", "ml-100k"),
        ('data.source="ml-100k"', "data.source", "ml-100k"),
        ("optim.betas=[0.8, 0.9]", "optim.betas", [0.8, 0.9]),
        ("kernels.use.gdpa=acme", "kernels.use.gdpa", "acme"),
        ('kernels.use={gdpa = "acme"}', "kernels.use.gdpa", "acme"),
        ("model.options.depth.inner=3", "model.options.depth.inner", 3),
        ("run.out=a=b", "run.out", "a=b"),
    ],
)
def test_set_reads_toml_and_else_a_string(write, override: str, path: str, expected: object) -> None:
    loaded = load_config(write("[data]\nbatch_size = 8\n"), [override])
    assert value(loaded, path) == expected
    assert loaded.origins[path] == "--set"


def test_the_last_set_wins_and_a_table_replaces_a_table(write) -> None:
    path = write("[kernels.use]\ngdpa = 'acme'\npffn = 'acme'\n")
    loaded = load_config(path, ['kernels.use={gdpa = "rival"}', "data.batch_size=1", "data.batch_size=2"])
    assert loaded.config.kernels.use == {"gdpa": "rival"}
    assert loaded.config.data.batch_size == 2
    assert loaded.origins["kernels.use.gdpa"] == "--set"


@pytest.mark.parametrize(
    ("text", "asked", "hint"),
    [
        ("[data]\nbach_size = 3\n", "data.bach_size", "Did you mean 'batch_size'"),
        ("[dta]\nx = 3\n", "dta", "Did you mean 'data'"),
        ("[optim]\nbetas = [0.9]\n", "optim.betas", "missing"),
        ("[optim]\nlr = nan\n", "optim.lr", "finite"),
        ("[optim]\nlr = -1.0\n", "optim.lr", "greater than or equal to 0"),
        ("[data]\nbatch_size = 0\n", "data.batch_size", "greater than or equal to 1"),
        ("[train]\nuneven = 'pda'\n", "train.uneven", "'stop', 'pad' or 'drop'"),
        ("data = 3\n", "data", "3 is not accepted"),
        ("run = 3\n", "run", "3 is not accepted"),
        ("[plugins]\nrequire = 'gem-data'\n", "plugins.require", "is not accepted"),
        ("[data]\nsource = ''\n", "data.source", "at least 1 character"),
    ],
)
def test_what_is_wrong_is_named_with_its_path_and_file(write, text: str, asked: str, hint: str) -> None:
    with pytest.raises(RequestError, match=r"mine.toml") as caught:
        load_config(write(text))
    assert caught.value.asked.startswith(asked)
    assert hint in str(caught.value)
    assert caught.value.exit_code == 2


INTS = [path for path, item in flat(RunConfig()) if isinstance(item, int) and not isinstance(item, bool)]
NUMBERS = [path for path, item in flat(RunConfig()) if isinstance(item, int | float) and not isinstance(item, bool)]
FLAGS = [path for path, item in flat(RunConfig()) if isinstance(item, bool)]


@pytest.mark.parametrize("path", NUMBERS)
def test_case_F12_a_bool_is_no_number(write, path: str) -> None:
    with pytest.raises(RequestError, match="True is not accepted"):
        load_config(write(""), [f"{path}=true"])


@pytest.mark.parametrize("path", INTS)
def test_case_F12_a_float_or_string_is_no_int(write, path: str) -> None:
    for bad in ("1.5", "'1'"):
        with pytest.raises(RequestError, match="is not accepted"):
            load_config(write(""), [f"{path}={bad}"])


@pytest.mark.parametrize("path", FLAGS)
def test_case_F12_an_int_is_no_flag(write, path: str) -> None:
    with pytest.raises(RequestError, match="1 is not accepted"):
        load_config(write(""), [f"{path}=1"])


def test_case_F12_the_check_sees_every_kind_of_value() -> None:
    assert "data.batch_size" in INTS
    assert "optim.lr" in NUMBERS
    assert FLAGS == ["train.checkpoint_last", "train.checkpoint_background", "train.steps_csv", "train.ahead", "train.shuffle"]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("data.bach_size=3", "data.bach_size (--set)"),
        ("nothing", "not PATH=VALUE"),
        ("=3", "not PATH=VALUE"),
        ("data..x=3", "not PATH=VALUE"),
        ("data.batch_size.x=1", "a value, not a table"),
    ],
)
def test_a_wrong_set_is_refused(write, override: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_config(write("[data]\nbatch_size = 8\n"), [override])
    assert text in str(caught.value)


def test_text_that_is_no_toml_names_the_line(write) -> None:
    with pytest.raises(RequestError, match="line 2"):
        load_config(write("[data]\nsource = toy\n"))


def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="UTF-8"):
        load_config(tmp_path / "bad.toml")


def test_a_name_that_is_neither_file_nor_recipe_offers_the_nearest() -> None:
    with pytest.raises(RequestError, match="Did you mean 'toy'"):
        load_config("toyy")


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_shipped_recipe_is_read(name: str) -> None:
    loaded = load_config(name)
    assert loaded.name == name
    assert f"recipe {name}" in loaded.origins.values()


def test_kernel_policy_knows_where_its_preference_comes_from(write) -> None:
    path = write("[kernels]\nprefer = ['triton', 'reference']\non_reference = 'error'\n[kernels.use]\ngdpa = 'acme'\n")
    policy = load_config(path).kernel_policy()
    assert (policy.use, policy.prefer, policy.on_reference) == ({"gdpa": "acme"}, ("triton", "reference"), "error")
    assert policy.prefer_rule == str(path)
    assert load_config(path, ["kernels.prefer=['reference']"]).kernel_policy().prefer_rule == "--set"
    assert load_config(write("", "other.toml")).kernel_policy().prefer_rule == "default"


@given(st.sampled_from(INTS), st.integers(1, 10**9))
def test_any_positive_int_comes_through_unchanged(path: str, number: int) -> None:
    assert value(load_config("toy", [f"{path}={number}"]), path) == number
