"""The time of collectives by the links they cross, and of programs in which they run beside computation."""

import pytest

from jaxtrain.cost.communication import Traffic
from jaxtrain.cost.gpu.launches import Program
from jaxtrain.cost.gpu.links import Group, Links, group_along
from jaxtrain.cost.gpu.timeline import Timeline

LINKS = Links(nvlink=400e9, network=50e9)


def test_a_group_has_the_gpus_of_its_axes_in_each_node():
    mesh = {"data": 16, "fsdp": 4, "tensor": 2}
    groups = [group_along(mesh, axes, 8) for axes in (("tensor",), ("fsdp",), ("data",), ("data", "tensor"), ())]
    assert groups == [(2, 2), (4, 4), (16, 1), (32, 2), (1, 1)]
    assert [group.nodes for group in groups] == [1, 1, 16, 16, 1]


def test_large_collectives_take_their_bytes_over_the_slowest_link():
    def rate(kind, group):
        return 1e12 / LINKS.seconds(kind, 1e12, group)

    in_node, whole_nodes, one_a_node, half_nodes = Group(8, 8), Group(64, 8), Group(8, 1), Group(32, 4)
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        assert rate(kind, in_node) == pytest.approx(400e9, rel=1e-3)
        assert rate(kind, whole_nodes) == pytest.approx(400e9, rel=1e-3)  # through eight adapters
        assert rate(kind, half_nodes) == pytest.approx(200e9, rel=1e-3)
        assert rate(kind, one_a_node) == pytest.approx(50e9, rel=1e-3)
    # Of 63 others, 56 are in other nodes.
    assert rate("all-to-all", whole_nodes) == pytest.approx(50e9 * 63 / 56, rel=1e-3)
    assert rate("collective-permute", one_a_node) == pytest.approx(50e9, rel=1e-3)
    over_network = [
        LINKS.over_network(Traffic("all-gather", axes, 1, 800.0), {"data": 4, "fsdp": 8})
        for axes in (["fsdp"], ["data"])
    ]
    assert over_network == [0, 800]
    assert LINKS.over_network(Traffic("all-gather", ("fsdp",), 1, 800.0), {"fsdp": 64}) == 100


def test_small_collectives_take_the_latency_of_their_hops():
    # NCCL's LL: 6.6 µs, 0.6 µs a hop in a node and 2.7 µs between nodes.
    assert LINKS.seconds("all-gather", 1.0, Group(64, 8)) == pytest.approx(6.6e-6 + 56 * 0.6e-6 + 7 * 2.7e-6, rel=1e-3)
    # A tree: twice the 7 hops in a node and the 11 between 2,048 nodes.
    tree = 6.8e-6 + 14 * 0.6e-6 + 22 * 5e-6
    assert LINKS.seconds("all-reduce", 1.0, Group(16384, 8)) == pytest.approx(tree, rel=1e-3)
    assert LINKS.seconds("reduce-scatter", 1.0, Group(16384, 8)) > 100 * tree
    assert LINKS.seconds("all-gather", 1e9, Group(1, 1)) == 0


LOOP = """%body (c: (f32[4], f32[8])) -> (f32[4], f32[8]) {
  %c = (f32[4]{0}, f32[8]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%c), index=0
  %g = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,2]<=[2], dimensions={0}
  %y = f32[4]{0} negate(%x)
  %whole = f32[8]{0} all-gather-done(%g)
  %z = f32[8]{0} negate(%whole)
  %r = f32[8]{0} all-reduce-start(%z), replica_groups=[1,2]<=[2], to_apply=%add
  %s = f32[8]{0} all-reduce-done(%r)
  ROOT %out = (f32[4]{0}, f32[8]{0}) tuple(%y, %s)
}
%condition (c: (f32[4], f32[8])) -> pred[] {
  ROOT %t = pred[] constant(true)
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %first = f32[4]{0} all-reduce(%x), replica_groups=[1,2]<=[2], to_apply=%add
  %w = (f32[4]{0}, f32[8]{0}) while(%first), condition=%condition, body=%body, KNOWN
  ROOT %last = f32[4]{0} negate(%w)
}
"""


def test_communication_is_exposed_where_the_program_waits_for_it():
    known = 'backend_config={"known_trip_count":{"n":"5"}}'
    program = Program.parse(LOOP.replace("KNOWN", known))
    computed = {"y": 3.0, "z": 1.0, "last": 2.0}
    seconds = {x: computed.get(x.name, 0.0) for c in program.computations.values() for x in c.instructions.values()}
    timeline = Timeline.of(program, seconds, {"data": 2})

    def price(gather, reduction):
        return lambda traffic: gather if traffic.kind == "all-gather" else reduction

    alone = 5 * (3 + 1) + 2
    assert timeline.seconds(price(0, 0)) == alone
    assert timeline.exposed_seconds(price(2, 0)) == 0  # behind y
    assert timeline.exposed_seconds(price(7, 0)) == 5 * 4
    # The one before the loop, and those in it that nothing hides.
    assert timeline.exposed_seconds(price(7, 0.5)) == 5 * (4 + 0.5) + 0.5
    assert timeline.communication_seconds(price(7, 0.5)) == 5 * 7.5 + 0.5


def test_a_collective_waits_for_those_before_it():
    text = LOOP.replace("  %s = f32[8]{0} all-reduce-done(%r)\n", "").replace("tuple(%y, %s)", "tuple(%y, %z)")
    program = Program.parse(text.replace("KNOWN", 'backend_config={"known_trip_count":{"n":"100"}}'))
    seconds = {x: 4.0 for c in program.computations.values() for x in c.instructions.values() if x.name == "y"}
    timeline = Timeline.of(program, seconds, {"data": 2})
    # Every gather but the first waits for the reduction that the iteration before it has started.
    assert timeline.exposed_seconds(lambda traffic: 3.0) == 3 + 99 * 2
