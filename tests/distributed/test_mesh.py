"""Meshes, and the rows of a batch on each device."""

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.mesh_utils import create_hybrid_device_mesh

from jaxtrain.distributed import local_rows, make_mesh, place_batch, place_whole_batch
from jaxtrain.distributed.device_order import ordered_devices
from jaxtrain.distributed.mesh import AXES, data_parallel_size, parse_mesh, run_devices, run_mesh
from jaxtrain.distributed.rows import local_data_parallel_size
from jaxtrain.errors import UserError


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("data=2,tensor=3", "mesh 'data=2,tensor=3' has 6 devices, got 4: make its sizes multiply to 4"),
        (
            "dta=4",
            f"mesh 'dta=4' has an axis 'dta': use {', '.join(AXES)}, as in data=2,fsdp=4",
        ),
        ("data=2,data=2", "mesh 'data=2,data=2' gives data twice: give it once"),
        ("data=0", "mesh 'data=0' gives data the size '0': it must be a number of devices, 1 or more"),
        (
            "data=" + "9" * 5000,
            f"mesh 'data={'9' * 54}… gives data the size '{'9' * 59}…: it must be a number of devices, 1 or more",
        ),
        ("data", "mesh 'data' gives data the size '': it must be a number of devices, 1 or more"),
        ("", f"mesh '' has an axis '': use {', '.join(AXES)}, as in data=2,fsdp=4"),
    ],
)
def test_an_invalid_mesh_raises_an_error_with_its_remedy(spec, message):
    with pytest.raises(UserError) as error:
        make_mesh(spec)
    assert str(error.value) == message


def test_the_order_of_axes_does_not_depend_on_the_spec():
    shape = make_mesh("tensor=2,data=2").shape
    assert [(axis, n) for axis, n in shape.items() if n > 1] == [("data", 2), ("tensor", 2)]
    assert {axis: n for axis, n in make_mesh().shape.items() if n > 1} == {"data": 4}


@pytest.mark.parametrize("as_array", [np.asarray, jax.numpy.asarray])
def test_every_device_has_its_share_of_every_micro_batch_in_order(as_array):
    rows = np.arange(24, dtype=np.int32)
    window = place_batch({"x": as_array(rows)}, make_mesh("data=2,fsdp=2"), accumulate=3)["x"]
    assert window.shape == (3, 8)
    for shard in window.addressable_shards:
        d = shard.device.id
        assert shard.data.tolist() == [[8 * i + 2 * d, 8 * i + 2 * d + 1] for i in range(3)]


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_rows_are_replicated_over_the_other_axes(axis):
    batch = place_batch({"x": np.arange(8, dtype=np.int32)}, make_mesh(f"fsdp=2,{axis}=2"))["x"]
    assert [s.data.tolist() for s in batch.addressable_shards] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


def test_data_parallel_size_counts_only_axes_of_rows():
    assert data_parallel_size(parse_mesh("data=2,fsdp=2,sequence=4,tensor=2")) == 4


def test_a_run_is_on_one_device_or_on_its_mesh():
    mesh = make_mesh("data=2,fsdp=2")
    assert run_mesh(None) is None
    assert run_mesh("data=2,fsdp=2") == mesh
    assert (run_devices(None), run_devices("data=2,fsdp=2")) == (jax.devices()[:1], mesh.devices.ravel().tolist())


def test_indivisible_rows_raise_an_error():
    message = "a micro-batch of 6 rows is not divisible by the 4 devices of data: use a multiple of 4"
    for batch in (np.ones((12, 2), np.float32), jax.numpy.ones((12, 2))):
        with pytest.raises(UserError, match=message):
            place_batch({"x": batch}, make_mesh(), accumulate=2)
    with pytest.raises(UserError, match=message):
        local_rows(make_mesh(), batch_size=12, accumulate=2)


@dataclass(frozen=True)
class FakeDevice:
    """A device of one of several processes."""

    process_index: int
    id: int = 0
    slice_index: int = 0
    device_kind: str = "H100"
    platform: str = "gpu"


@pytest.mark.parametrize("kind", ["process_index", "slice_index"])
def test_dcn_lies_across_processes_or_slices(kind):
    """The order of `create_hybrid_device_mesh`, also of devices that are listed in another order."""
    devices = [FakeDevice(**{"process_index": 0, kind: i % 4}, id=i) for i in range(8)]
    order = partial(ordered_devices, devices=devices)
    for sizes, outer, inner in (
        ({"dcn": 4, "data": 2}, (4, 1), (1, 2)),
        ({"dcn": 2, "data": 4}, (2, 2), (1, 2)),
        ({"dcn": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1), (1, 1, 2)),
    ):
        by_process = kind == "process_index"
        expected = create_hybrid_device_mesh(inner, outer, devices, process_is_granule=by_process)
        assert order(sizes).tolist() == expected.tolist()
        assert {len({getattr(d, kind) for d in group.flat}) for group in order(sizes)} == {4 // sizes["dcn"]}
    with pytest.raises(UserError) as error:
        order({"dcn": 8, "data": 1})
    places = "processes" if kind == "process_index" else "slices"
    assert str(error.value) == f"mesh axis dcn=8 would divide a node: use a divisor of 4, the number of {places}"
    with pytest.raises(UserError, match=f"some {places} have 1 devices and some 2: use as many of each"):
        ordered_devices({"dcn": 2, "data": 3}, [devices[i] for i in (0, 1, 2, 3, 4, 5)])


def test_the_outermost_axes_lie_across_the_hosts_of_gpus():
    """JAX reports each host as a slice, and `jax.make_mesh` refuses more than one."""
    devices = [FakeDevice(i // 2, i, i // 4) for i in range(8)]
    for sizes in ({"data": 8}, {"data": 2, "fsdp": 4}, {"data": 4, "tensor": 2}):
        assert [d.id for d in ordered_devices(sizes, devices).flat] == [*range(8)]


@pytest.mark.parametrize(
    ("shape", "devices_each", "of_process_1"),
    [
        ({"data": 4}, 2, 2),
        ({"data": 2, "tensor": 2}, 2, 1),
        ({"tensor": 4}, 2, 1),
        ({"sequence": 2, "tensor": 2}, 1, 1),
        ({"data": 2, "fsdp": 2, "sequence": 2}, 4, 2),
        ({"dcn": 2, "sequence": 2}, 2, 1),
    ],
)
def test_a_process_supplies_the_rows_of_its_coordinates(monkeypatch, shape, devices_each, of_process_1):
    """Processes whose devices differ only along `tensor` or `sequence` supply the same rows."""
    devices = np.array([None] * math.prod(shape.values()))
    for i in range(len(devices)):
        devices[i] = FakeDevice(i // devices_each)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert (
        local_data_parallel_size(SimpleNamespace(devices=devices.reshape(*shape.values()), axis_names=tuple(shape)))
        == of_process_1
    )


def test_rows_of_an_evaluation_may_be_indivisible():
    batch = {"x": np.arange(6, dtype=np.int32), "y": np.arange(8, dtype=np.int32), "z": np.int32(3)}
    on_mesh = place_whole_batch(batch, make_mesh())
    jax.tree.map(np.testing.assert_array_equal, on_mesh, batch)
    assert [x.is_fully_replicated for x in (on_mesh["x"], on_mesh["y"], on_mesh["z"])] == [True, False, True]
