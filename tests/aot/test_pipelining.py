"""The loops of Triton's GPU IR are read correctly: copies, buffers, and copies in flight."""

import pytest

from tests.aot.pipelining import Loop, product_loops

RING = """\
    %k = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xbf16, #shared, #smem, mutable>
    %first = ttg.memdesc_index %k[%c0] : !ttg.memdesc<3x64x128xbf16, #shared> -> !ttg.memdesc<64x>
    %v_1 = ttg.memdesc_index %v[%c0] : !ttg.memdesc<2x64x128xbf16, #shared> -> !ttg.memdesc<64x>
    %0 = ttg.async_copy_global_to_local %at, %first mask %m : tensor<64x128x!tt.ptr<bf16>>
    %1 = ttg.async_wait %0 {num = 0 : i32}
"""

INNER = """\
      %r = scf.for %i = %c0 to %n step %c64 iter_args(%acc = %zero) -> (tensor<16x128xf32>) {
        %w = ttg.async_wait %t, %u {num = 2 : i32} loc(#loc1)
        scf.if %there {
          %d = tt.dot %q, %s, %acc : tensor<16x128xbf16> * tensor<128x64xbf16>
        }
        %k_2 = ttg.memdesc_index %k[%at] : !ttg.memdesc<3x64x128xbf16> -> !ttg.memdesc<64x128>
        %c = ttg.async_copy_global_to_local %p, %k_2 mask %m other %z : tensor<64x128x!tt.ptr>
        %e = ttg.async_copy_global_to_local %p, %v_1 mask %m other %z : tensor<64x128x!tt.ptr>
        scf.yield %d : tensor<16x128xf32>
      } {tt.num_stages = 3 : i32} loc(#loc2)
"""


def test_copies_of_a_loop_are_found() -> None:
    assert product_loops(RING + INNER) == [Loop(copies=2, buffers=2, in_flight=2)]


def test_a_wait_for_all_copies_counts_only_in_the_loop() -> None:
    (loop,) = product_loops(RING + INNER.replace("num = 2", "num = 0"))
    assert loop.in_flight == 0


@pytest.mark.parametrize("product", ["ttng.warp_group_dot", "ttng.tc_gen5_mma"])
def test_products_of_newer_tensor_cores_are_found(product: str) -> None:
    assert product_loops(RING + INNER.replace("tt.dot", product)) == product_loops(RING + INNER)


def test_a_loop_without_copies_has_no_buffers() -> None:
    text = "".join(line for line in INNER.splitlines(True) if "async" not in line)
    assert product_loops(text) == [Loop(copies=0, buffers=0, in_flight=0)]


def test_a_copy_to_a_tile_without_an_index_has_one_buffer() -> None:
    (loop,) = product_loops(RING + INNER.replace("%p, %v_1", "%p, %alone"))
    assert loop.buffers == 1


def test_loops_without_products_are_left_out() -> None:
    assert product_loops(INNER.replace("tt.dot", "arith.addf")) == []


def test_only_innermost_loops_count() -> None:
    outer = "    scf.for %j = %c0 to %n step %c1 : i32 {\n" + INNER + INNER
    outer += "      %x = tt.dot %q, %s, %acc : tensor<16x128xbf16>\n    } loc(#loc3)\n"
    inner = product_loops(RING + INNER)
    assert product_loops(RING + outer + outer) == inner * 4
