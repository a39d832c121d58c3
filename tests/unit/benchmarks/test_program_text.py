"""Loops, kernels and collectives of programs, read from their text as XLA writes it."""

# ruff: noqa: E501 - XLA's lines are long

from benchmarks.ahead.program_text import CollectiveCalls, read_program

GPU = """\
HloModule jit_accumulate, is_scheduled=true

%add.clone (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.2 = f32[] add(%x, %y)
}

%inner_body (p.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p.1 = (s32[], f32[8,128]{1,0}) parameter(0)
  ROOT %t.1 = (s32[], f32[8,128]{1,0}) tuple(%p.1)
}

%inner_condition (p.2: (s32[], f32[8,128])) -> pred[] {
  %p.2 = (s32[], f32[8,128]{1,0}) parameter(0)
  ROOT %lt.2 = pred[] fusion(%p.2), kind=kLoop, calls=%inner_compare
}

%layer_body (p.3: (s32[], bf16[128,32])) -> (s32[], bf16[128,32]) {
  %p.3 = (s32[], bf16[128,32]{1,0}) parameter(0)
  %part = bf16[128,32]{1,0} get-tuple-element(%p.3), index=1
  %norm = f32[16]{0} broadcast(%part), dimensions={}
  %all-gather-start.1 = ((bf16[128,32]{1,0}, f32[16]{0}), (bf16[1024,32]{1,0}, f32[128]{0})) all-gather-start(%part, %norm), channel_id=20, dimensions={0}
  %all-gather-done.1 = (bf16[1024,32]{1,0}, f32[128]{0}) all-gather-done(%all-gather-start.1)
  %call.1 = (bf16[1,16]{1,0}, f32[1,16]{1,0}) custom-call(%part), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(accumulate)/jvp()/while/body/closed_call/jit(mha)/mha_forward/pallas_call"}
  %scan = (s32[], f32[8,128]{1,0}) while(%p.3), condition=%inner_condition, body=%inner_body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %t.3 = (s32[], bf16[128,32]{1,0}) tuple(%p.3)
}

%branch_short (p.4: f32[]) -> f32[] {
  ROOT %p.4 = f32[] parameter(0)
}

%branch_long (p.5: f32[]) -> f32[] {
  %p.5 = f32[] parameter(0)
  ROOT %loop.5 = f32[] while(%p.5), condition=%inner_condition, body=%inner_body
}

ENTRY %main (a: f32[64,2]) -> f32[] {
  %a = f32[64,2]{1,0} parameter(0)
  %layers = (s32[], bf16[128,32]{1,0}) while(%a), condition=%layer_condition, body=%layer_body, backend_config={"known_trip_count":{"n":"28"}}
  %all-reduce.7 = f32[64,2]{1,0} all-reduce(%a), to_apply=%add.clone
  %conditional.3 = f32[] conditional(%a, %a, %a), branch_computations={%branch_short, %branch_long}
  ROOT %conditional.4 = f32[] conditional(%a, %a, %a), true_computation=%branch_short, false_computation=%branch_short
}
"""

TPU = """\
HloModule jit_decode_slice

%wide.condition (arg: (s32[], f32[4])) -> pred[] {
  %constant.2721 = s32[]{:T(128)} constant(4)
  %arg = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%arg), index=0
  ROOT %lt.192 = pred[]{:T(512)} compare(%n, %constant.2721), direction=LT
}

%wide.body (arg.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg.1 = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %splash_mha_fwd.7 = (f32[512,128]{1,0:T(8,128)}) custom-call(%arg.1), custom_call_target="tpu_custom_call"
  ROOT %t = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) tuple(%arg.1)
}

ENTRY %main.9 (p: s32[3]) -> s32[3] {
  %p = s32[3]{0:T(128)} parameter(0)
  ROOT %while.93 = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) while(%p), condition=%wide.condition, body=%wide.body, metadata={op_name="jit(f)/while"}
}
"""


def test_nested_loops_multiply_and_the_longest_branch_counts() -> None:
    found = read_program(GPU, {28})
    assert (found.num_loops, found.num_open_loops) == (3, 1)
    assert found.num_steps == 28 * (1 + 5) + 1
    assert found.kernels == {"mha_forward": 28}
    assert (found.num_launches, found.written_bytes) == (28, 28 * (16 * 2 + 16 * 4))
    gathered = CollectiveCalls(28, 28 * (128 * 32 * 2 + 16 * 4))
    assert found.collectives == {"all-gather": gathered, "all-reduce": CollectiveCalls(1, 64 * 2 * 4)}
    assert found.in_layers == {"all-gather": gathered}
    assert read_program(GPU, {27}).in_layers == {}


def test_a_bound_in_the_condition_is_the_number_of_steps() -> None:
    found = read_program(TPU, {4})
    assert (found.num_loops, found.num_steps, found.num_open_loops) == (1, 4, 0)
    assert found.kernels == {"splash_mha_fwd": 4} and found.collectives == {}
