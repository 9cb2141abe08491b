# SPDX-License-Identifier: Apache-2.0
"""Both swappers through the same verbs: states, contents, tags, single records, errors."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

from support.swappers import KINDS, open_swapper, specs_of
from swapio import pipeline
from swapio.buffers import BufferPool
from swapio.errors import ClosedError, ConfigError, PoolExhaustedError, SwapStateError
from swapio.gradients import FragmentSize, reserved_bytes
from swapio.subgroup import RecordSpec, SubGroupState
from swapio.views import Chunk

N = (1 << 20) + 12345


def fill(view, value):
    for chunk in view.chunks():
        for name in view.group.specs:
            chunk[name].fill_(value)
        chunk.mark_dirty()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_content_comes_back_after_swap_out(tmp_path, kind):
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(N))
        ramp = torch.arange(N, dtype=torch.float32)
        with swapper.swap_in("g") as view:
            for chunk in view.chunks():
                chunk["exp_avg"].copy_(ramp[chunk.start : chunk.stop])
                chunk.mark_dirty("exp_avg")
        swapper.drain()
        assert torch.equal(swapper.read("g", "exp_avg"), ramp)
        assert torch.equal(swapper.read("g", "exp_avg_sq"), torch.zeros(N))


def test_a_sub_group_that_is_not_streamed_comes_in_one_piece(tmp_path, kind):
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(N), streamed=False)
        for value in (1.0, 2.0):
            swapper.set_order(["g"])
            with swapper.swap_in("g") as view:
                for chunk in view.chunks():
                    assert (chunk.start, chunk.stop) == (0, N)
                    chunk["exp_avg"].add_(1)
                    swapper.poll()
                    chunk.mark_dirty("exp_avg")
            swapper.drain()
            assert torch.equal(swapper.read("g", "exp_avg"), torch.full((N,), value))


def test_a_chunk_that_is_handed_out_does_not_make_room_for_others(tmp_path, monkeypatch):
    """Another thread may look for memory at any moment, also before the caller has its chunk."""
    with open_swapper(tmp_path, "pipelined") as opened:
        swapper = opened.add("g", specs_of(N))
        fill(swapper.swap_in("g"), 3.0)
        swapper.flush()

        def chunk_after_a_search(*args):
            while swapper._evict_clean():
                pass
            return Chunk(*args)

        monkeypatch.setattr(pipeline, "Chunk", chunk_after_a_search)
        num_chunks = 0
        for chunk in swapper.swap_in("g").chunks():
            num_chunks += 1
            assert swapper.state("g") is not SubGroupState.OUT
            assert torch.equal(chunk["exp_avg"], torch.full((chunk.numel,), 3.0))
        assert num_chunks > 1


def test_initial_content_is_zero_number_tensor_or_function(tmp_path, kind):
    values = torch.randn(N)
    records = {
        "zero": RecordSpec((N,), torch.float32),
        "number": RecordSpec((N,), torch.float32, 3.0),
        "tensor": RecordSpec((N,), torch.float32, values),
        "function": RecordSpec(
            (N,), torch.float32, lambda start, out: out.copy_(values[start : start + out.numel()])
        ),
    }
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", records)
        assert torch.equal(swapper.read("g", "zero"), torch.zeros(N))
        assert torch.equal(swapper.read("g", "number"), torch.full((N,), 3.0))
        assert torch.equal(swapper.read("g", "tensor"), values)
        assert torch.equal(swapper.read("g", "function"), values)


def test_states_of_the_blocking_swapper(tmp_path):
    with open_swapper(tmp_path, "partitioned") as opened:
        swapper = opened.add("g", specs_of(N))
        assert swapper.state("g") is SubGroupState.OUT
        view = swapper.swap_in("g")
        assert swapper.state("g") is SubGroupState.CLEAN
        view["exp_avg"][:] = 1
        view.mark_dirty("exp_avg")
        assert swapper.state("g") is SubGroupState.DIRTY
        with pytest.raises(SwapStateError, match="only a clean copy"):
            swapper.release("g")
        swapper.writeback("g", wait=True)
        assert swapper.state("g") is SubGroupState.CLEAN
        swapper.release("g")
        assert swapper.state("g") is SubGroupState.OUT
        with pytest.raises(SwapStateError, match="out"):
            swapper.writeback("g")
        assert swapper.read("g", "exp_avg").eq(1).all()


def test_records_may_have_shapes_and_lengths_of_their_own(tmp_path, kind):
    records = {
        "matrix": RecordSpec((600, 700), torch.float32, torch.randn(600, 700)),
        "row": RecordSpec((700,), torch.bfloat16, 2.0),
        "flags": RecordSpec((3,), torch.uint8, 7),
    }
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", records)
        with swapper.swap_in("g") as view:
            assert view["matrix"].shape == (600, 700)
            view["matrix"].mul_(2)
            view["row"].add_(1)
            view.mark_dirty("matrix", "row")
        swapper.drain()
        assert torch.equal(swapper.read("g", "matrix"), records["matrix"].init * 2)
        assert swapper.read("g", "row").eq(3).all()
        assert swapper.read("g", "flags").tolist() == [7, 7, 7]


def test_chunks_of_records_of_different_lengths_are_refused(tmp_path, kind):
    records = {
        "long": RecordSpec((N,), torch.float32),
        "short": RecordSpec((5,), torch.float32),
    }
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", records)
        view = swapper.swap_in("g")
        with pytest.raises(SwapStateError, match="different lengths"):
            list(view.chunks())


def test_small_sub_groups_stay_in_ram(tmp_path, kind):
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(1000))
        assert swapper.state("g") is SubGroupState.RESIDENT
        with swapper.swap_in("g") as view:
            fill(view, 4)
        swapper.release("g")
        assert swapper.read("g", "exp_avg").eq(4).all()
        assert swapper.stats()["read_bytes"] == 0


def test_single_spans_can_be_read_and_written_while_out_and_in(tmp_path, kind):
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(N))
        value = torch.randn(300_000)
        swapper.write("g", "exp_avg", value, start=262_000)
        out = torch.empty(300_000)
        assert torch.equal(swapper.read("g", "exp_avg", out, start=262_000), value)
        with swapper.swap_in("g") as view:
            for chunk in view.chunks():
                chunk["exp_avg"].add_(1)
                chunk.mark_dirty("exp_avg")
            swapper.write("g", "exp_avg", value * 3, start=10)
            assert torch.equal(swapper.read("g", "exp_avg", out, start=10), value * 3)
        swapper.drain()
        expected = torch.zeros(N)
        expected[262_000:562_000] = value
        expected += 1
        expected[10:300_010] = value * 3
        assert torch.equal(swapper.read("g", "exp_avg"), expected)


def test_tags_move_records_between_ram_and_storage(tmp_path, kind):
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(N))
        with swapper.swap_in("g") as view:
            fill(view, 2)
        swapper.tag_resident("g", "exp_avg")
        before = swapper.stats()["read_bytes"]
        assert swapper.read("g", "exp_avg").eq(2).all()
        assert swapper.stats()["read_bytes"] == before
        with swapper.swap_in("g") as view:
            for chunk in view.chunks():
                chunk["exp_avg"].add_(1)
                chunk["exp_avg_sq"].add_(2)
                chunk.mark_dirty()
        swapper.tag_resident("g", "exp_avg_sq")
        assert swapper.state("g") is SubGroupState.RESIDENT
        swapper.untag_resident("g", "exp_avg")
        swapper.untag_resident("g", "exp_avg_sq")
        assert swapper.state("g") is SubGroupState.OUT
        assert swapper.read("g", "exp_avg").eq(3).all()
        assert swapper.read("g", "exp_avg_sq").eq(4).all()


def test_gradient_fragments_of_both_kinds_survive_a_rewrite(tmp_path, kind):
    with open_swapper(tmp_path, kind, swap_gradients=True) as opened:
        swapper = opened.add("g", specs_of(N))
        large, small = torch.randn(400_000), torch.randn(100)
        swapper.put_gradient("g", "a", 0, large)
        swapper.put_gradient("g", "b", 400_000, small)
        assert torch.equal(swapper.gradient("g", "a"), large)
        swapper.put_gradient("g", "a", 0, large * 2)
        swapper.put_gradient("g", "b", 400_000, small * 2)
        assert torch.equal(swapper.gradient("g", "a"), large * 2)
        assert torch.equal(swapper.gradient("g", "b"), small * 2)
        swapper.drop_gradients("g")
        with pytest.raises(ConfigError, match="no gradient fragment"):
            swapper.gradient("g", "a")


def test_wrong_names_keys_and_tensors_are_named(tmp_path, kind):
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(N))
        with pytest.raises(ConfigError, match="'nope'"):
            swapper.swap_in("nope")
        with pytest.raises(ConfigError, match="'momentum'"):
            swapper.read("g", "momentum")
        with pytest.raises(ValueError, match=r"torch\.float32"):
            swapper.write("g", "exp_avg", torch.zeros(3, dtype=torch.float64))
        with pytest.raises(ValueError, match="elements"):
            swapper.write("g", "exp_avg", torch.zeros(10), start=N - 5)
        with pytest.raises(ConfigError, match="registered already"):
            swapper.add_sub_group("g", specs_of(10))
    with pytest.raises(ClosedError):
        swapper.swap_in("g")


def test_a_sub_group_larger_than_the_pool_is_an_error_that_says_so(tmp_path):
    with open_swapper(tmp_path, "partitioned", pool_bytes=4 << 20) as opened:
        swapper = opened.add("g", specs_of(N))
        with pytest.raises(PoolExhaustedError, match="in one piece"):
            swapper.swap_in("g")
        assert swapper.state("g") is SubGroupState.OUT


def test_nothing_to_swap_is_no_error(tmp_path, kind):
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(N))
        swapper.set_order([])
        swapper.drain()
        assert swapper.commit(1).result() == 0
        with swapper.swap_in("g") as view:
            assert sum(chunk.numel for chunk in view.chunks()) == N
        swapper.drain()
        assert swapper.stats()["write_bytes"] == 0


def test_a_tagged_record_can_be_written_while_the_rest_is_out(tmp_path, kind):
    """The value was written and then an error raised: the sub-group was not in RAM as a whole."""
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(N))
        swapper.tag_resident("g", "exp_avg")
        assert swapper.state("g") is SubGroupState.OUT
        value = torch.arange(1000, dtype=torch.float32)
        swapper.write("g", "exp_avg", value, start=5)
        assert torch.equal(swapper.read("g", "exp_avg")[5:1005], value)
        swapper.untag_resident("g", "exp_avg")
        assert torch.equal(swapper.read("g", "exp_avg")[5:1005], value)


@pytest.mark.parametrize("verb", ["sweep", "records"])
def test_memory_of_an_interrupted_read_is_not_lent_again(tmp_path, kind, verb):
    """Storage may still write to it: another record's bytes would be spoiled there."""
    with open_swapper(tmp_path, kind) as opened:
        swapper = opened.add("g", specs_of(N))
        read, futures = opened.store.read, []

        def interrupted(*args, **kwargs):
            futures.append(read(*args, **kwargs))
            raise KeyboardInterrupt

        def use():
            if verb == "sweep":
                return list(swapper.swap_in("g").chunks())
            return swapper.read("g", "exp_avg")

        free_bytes = opened.pool.num_free_bytes
        opened.store.read = interrupted
        with pytest.raises(KeyboardInterrupt):
            use()
        opened.store.read = read
        gc.collect()
        assert opened.pool.num_free_bytes < free_bytes
        assert torch.equal(swapper.read("g", "exp_avg"), torch.zeros(N))
        futures.pop().result()
        gc.collect()
        assert opened.pool.num_free_bytes == free_bytes
        assert sum(chunk.numel for chunk in swapper.swap_in("g").chunks()) == N


@pytest.mark.parametrize("verb", ["write", "swap_out"])
def test_what_an_interrupted_write_left_can_be_written_again(tmp_path, verb):
    """The transaction stayed open, and every later write of the sub-group was refused."""
    with open_swapper(tmp_path, "partitioned") as opened:
        swapper = opened.add("g", specs_of(N))
        begin_write = opened.store.begin_write

        def interrupted(*args):
            transaction = begin_write(*args)
            write = transaction.write

            def submit(*args, **kwargs):
                write(*args, **kwargs)
                raise KeyboardInterrupt

            transaction.write = submit
            return transaction

        value = torch.arange(N, dtype=torch.float32)
        if verb == "swap_out":
            fill(swapper.swap_in("g"), 2.0)
            value.fill_(2.0)

        def use():
            if verb == "write":
                swapper.write("g", "exp_avg", value)
            else:
                swapper.swap_out("g")

        opened.store.begin_write = interrupted
        with pytest.raises(KeyboardInterrupt):
            use()
        opened.store.begin_write = begin_write
        use()
        assert torch.equal(swapper.read("g", "exp_avg"), value)
        assert swapper.read("g", "exp_avg_sq").unique().tolist() == [2.0 * (verb == "swap_out")]


def keep_copy(seen, tensor):
    seen.append(tensor.clone())


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("min_swap_bytes", [0, 2000, 1 << 20])
def test_reserved_fragments_take_no_memory_later(tmp_path, kind, is_stored, min_swap_bytes):
    """Law 7: fragments in RAM were cloned at each put, and read into new memory."""
    opened_pools = []

    def open_pool(nbytes):
        opened_pools.append(BufferPool(nbytes, pin=False))
        return opened_pools[-1]

    generator = torch.Generator().manual_seed(0)
    first = {n: torch.randn(n, generator=generator).bfloat16() for n in (333, 900, 40_000)}
    with open_swapper(
        tmp_path, kind, swap_gradients=is_stored, min_swap_bytes=min_swap_bytes
    ) as opened:
        swapper = opened.add("g", specs_of(N))
        sizes = {str(n): FragmentSize(2 * n, 4 * n, 2) for n in first}
        swapper.reserve_gradients({"g": sizes}, open_pool)
        expected = reserved_bytes({"g": sizes}, min_swap_bytes if is_stored else None)
        regions = [r for pool in opened_pools for r in pool.regions]
        assert sum(nbytes for _, nbytes in regions) == sum(expected)
        stored = set(swapper._gradients._store.keys) if is_stored else set()
        large = {f"g/gradient/{n}/2" for n in first if 2 * n >= min_swap_bytes}
        assert {key for key in stored if "/gradient/" in key} == (large if is_stored else set())
        for _ in range(2):
            for n, value in first.items():
                swapper.put_gradient("g", str(n), 0, value)
            for n, value in first.items():
                seen = []
                look = functools.partial(keep_copy, seen)
                swapper.add_gradient("g", str(n), value, torch.float32, look)
                total = swapper.gradient("g", str(n))
                assert torch.equal(total, value.float() + value)
                assert torch.equal(seen[0], total)
                assert any(at <= total.data_ptr() < at + nbytes for at, nbytes in regions)
            swapper.drop_gradients("g")
            with pytest.raises(ConfigError, match="no gradient fragment"):
                swapper.gradient("g", "333")
    assert len(opened_pools) == sum(nbytes > 0 for nbytes in expected)
