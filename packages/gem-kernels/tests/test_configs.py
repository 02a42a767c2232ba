"""Tile shapes: bounded, valid, and within what an SM holds."""

import pytest

pytest.importorskip("triton")

from gem_kernels.ops.gdpa.configs import DIRECTIONS, Config, choose, config_key, shared_memory, space
from gem_kernels.ops.host import block_width
from gem_kernels.ops.jagged_attention import configs as jagged

WIDTHS = (16, 32, 64, 128, 256)


def keys():
    for direction in DIRECTIONS:
        for dim in WIDTHS:
            for itemsize in (2, 4):
                for length in (100, 5000):
                    for arch in (80, 86, 90, 100):
                        yield config_key(direction, dim=dim, v_dim=dim, itemsize=itemsize, max_length=length, arch=arch)


def test_case_I06_the_number_of_configurations_does_not_grow_with_shapes():
    many = {
        config_key(direction, dim=dim, v_dim=dim, itemsize=2, max_length=length, arch=90)
        for direction in DIRECTIONS
        for dim in range(1, 257)
        for length in (*range(1, 3000, 7), 10**6)
    }
    assert len(many) == len(DIRECTIONS) * len(WIDTHS) * 2


@pytest.mark.parametrize(("size", "block"), [(1, 16), (16, 16), (17, 32), (24, 32), (64, 64), (65, 128), (256, 256)])
def test_block_width_is_the_next_power_of_two(size, block):
    assert block_width(size) == block


def test_width_is_the_larger_of_key_and_value():
    assert config_key("forward", dim=16, v_dim=100, itemsize=2, max_length=1, arch=90).width == 128


def chosen():
    for key in keys():
        yield key, choose(key)
        for bias in (False, True):
            yield key, jagged.choose(key, bias=bias)


def test_chosen_tiles_are_powers_of_two_that_a_matrix_product_takes():
    for key, config in chosen():
        for size in (config.block_m, config.block_n):
            assert size >= 16, key
            assert size & (size - 1) == 0, key
        assert config.warps in (4, 8)
        assert config.stages >= 1


def test_chosen_tiles_fit_shared_memory():
    for key, config in chosen():
        assert shared_memory(config, key) <= (227 if key.hopper else 99) * 1024, key


def test_shared_memory_counts_what_triton_reports():
    """Figures that the compiler printed for Hopper, in bytes."""
    forward = config_key("forward", dim=128, v_dim=128, itemsize=2, max_length=1000, arch=90)
    assert shared_memory(Config(128, 64, 8, 3), forward) == 131072
    gradient = config_key("key_grad", dim=128, v_dim=128, itemsize=2, max_length=1000, arch=90)
    assert shared_memory(Config(64, 128, 8, 2), gradient) == 131072


def test_the_search_space_is_pruned_and_holds_what_is_chosen_on_hopper():
    for direction in DIRECTIONS:
        for length in (100, 5000):
            key = config_key(direction, dim=128, v_dim=128, itemsize=2, max_length=length, arch=90)
            candidates = list(space(key))
            assert choose(key) in candidates
            assert 4 <= len(candidates) <= 60
            assert all(shared_memory(config, key) <= 227 * 1024 for config in candidates)
