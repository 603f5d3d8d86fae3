"""Memory and communication per device on large meshes against closed forms, and the output of `plan --mesh`."""

import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.cli import main
from jaxtrain.cli import plan as plan_command
from jaxtrain.cost.byte_amounts import parse_bandwidth
from jaxtrain.cost.communication import Traffic, _group, communication
from jaxtrain.cost.data_sheets import CPU, find_gpu
from jaxtrain.distributed import make_mesh
from jaxtrain.distributed.mesh import parse_mesh
from jaxtrain.errors import UserError
from jaxtrain.planning.scale.closed_forms import ClosedForms
from jaxtrain.planning.scaling import MAX_DEVICES, Scaling, doubled_meshes, recipe_on_mesh, virtual_devices
from jaxtrain.recipes import RECIPES

ROOT = Path(__file__).parent.parent.parent
MLP = dataclasses.replace(RECIPES["digits-mlp"], hidden=64, batch_size=16)


def sent(hlo, mesh):
    return {(t.kind, t.axes): (t.times, t.sent) for t in communication(hlo, mesh).traffic}


def program(*lines, before=""):
    return f"{before}ENTRY %main (x: f32[8]) -> f32[8] {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"


def test_explicit_collectives_are_counted_exactly():
    mesh = make_mesh("data=2,fsdp=2", jax.devices())

    def fn(x):
        looped, _ = lax.scan(lambda c, _: (lax.pmax(c, "fsdp") * 0.5, None), x, None, length=3)
        return (
            lax.psum(x, "data"),
            lax.all_gather(x, "fsdp"),
            lax.psum_scatter(x, ("data", "fsdp"), tiled=True),
            lax.all_to_all(x, "fsdp", 0, 0, tiled=True),
            lax.ppermute(x, "data", [(0, 1), (1, 0)]),
            looped,
        )

    rows = P(("data", "fsdp"))
    local = jax.shard_map(fn, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    compiled = jax.jit(local).lower(jax.ShapeDtypeStruct((4 * 8, 16), np.float32)).compile()
    of_device = 4 * 8 * 16
    assert sent(compiled.as_text(), mesh.shape) == {
        ("all-reduce", ("data",)): (1, 2 * of_device / 2),
        ("all-gather", ("fsdp",)): (1, of_device),
        ("reduce-scatter", ("data", "fsdp")): (1, of_device * 3 / 4),
        ("all-to-all", ("fsdp",)): (1, of_device / 2),
        ("collective-permute", ("data",)): (1, of_device),
        ("all-reduce", ("fsdp",)): (3, 3 * 2 * of_device / 2),
    }


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("{}", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("{{0,2},{1,3},{4,6},{5,7}}", [0, 2]),
        ("[4,2]<=[8]", [0, 1]),
        ("[2,4]<=[4,2]T(1,0)", [0, 2, 4, 6]),
        ("[4,2]<=[2,2,2]T(2,1,0)", [0, 4]),
        ("mesh['a'=2,'b'=4] {'b'}", [0, 1, 2, 3]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [0, 1, 4, 5]),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", [0, 2]),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", [0, 2, 4, 6]),
        ("mesh['a'=8] {'a':(1)2}", [0, 4]),
        ("mesh['a'=8] {'a':(2)2}", [0, 2]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [0, 1, 4, 5]),
    ],
)
def test_replica_groups_are_parsed_in_every_format(written, group):
    assert _group(f", channel_id=1, replica_groups={written}, dimensions={{0}}", 8).tolist() == group


def test_axes_are_those_along_which_the_devices_differ():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    for groups, axes in {"[4,2]<=[8]": ("tensor",), "[2,4]<=[4,2]T(1,0)": ("data", "fsdp")}.items():
        hlo = program(f"ROOT %y = bf16[8]{{0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}")
        assert [t.axes for t in communication(hlo, mesh).traffic] == [axes]
    alone = program("ROOT %y = f32[8]{0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add")
    assert communication(alone, mesh).sent == 0


def test_asynchronous_collectives_count_once():
    hlo = program(
        "%g = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,2]<=[2], dimensions={0}",
        "%h = f32[8]{0} all-gather-done(%g)",
        "%p = (bf16[6]{0}, bf16[6]{0}, u32[], u32[]) collective-permute-start(%h), source_target_pairs={{0,1},{1,0}}",
        "%q = bf16[6]{0} collective-permute-done(%p)",
        "%o = ((f32[8]{0}, f32[20]{0}, s64[2]{0}, s64[2]{0}, s64[2]{0}, s64[2]{0}), f32[20]{0}) "
        "ragged-all-to-all-start(%h, %b, %s, %s, %s, %s), replica_groups={{0,1}}",
        "%r = f32[8]{0} all-reduce-start(%h), replica_groups={{0,1}}, to_apply=%add",
        "ROOT %s = f32[8]{0} all-reduce-done(%r)",
    )
    assert sent(hlo, {"data": 2}) == {
        ("all-gather", ("data",)): (1, 16),
        ("all-to-all", ("data",)): (1, 16),
        ("collective-permute", ("data",)): (1, 12),
        ("all-reduce", ("data",)): (1, 32),
    }


def test_loops_and_branches_multiply_communication():
    summed = "  %r = f32[{}]{{0}} all-reduce(%s), replica_groups={{}}, to_apply=%add"
    before = "".join(f"%of_{n} (s: f32[8]) -> f32[8] {{\n{summed.format(n)}\n}}\n" for n in (2, 8))
    before += (
        "%body (s: f32[8]) -> f32[8] {\n"
        "  ROOT %c = f32[8]{0} conditional(%p, %s, %s), branch_computations={%of_2, %of_8}\n}\n"
        "%condition (s: f32[8]) -> pred[] {\n  ROOT %t = pred[] constant(true)\n}\n"
    )
    loop = "ROOT %w = f32[8]{0} while(%x), condition=%condition, body=%body"
    known = communication(program(loop + ', backend_config={"known_trip_count":{"n":"5"}}', before=before), {"data": 2})
    assert known == (((("all-reduce", ("data",), 5, 5 * 32.0)),), 0)
    unknown = communication(program(loop, before=before), {"data": 2})
    assert unknown == (((("all-reduce", ("data",), 1, 32.0)),), 1)


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        ("ROOT %d = f32[2]{0} dynamic-slice(%r, %at), dynamic_slice_sizes={2}", "reduce-scatter"),
        ("ROOT %d = f32[4]{0} dynamic-slice(%r, %at), dynamic_slice_sizes={4}", "all-reduce"),
        ("ROOT %d = f32[1]{0} dynamic-slice(%r, %at), dynamic_slice_sizes={1}", "all-reduce"),
        ("ROOT %d = f32[8]{0} negate(%r)", "all-reduce"),
        ("%f = f32[8]{0} fusion(%r), calls=%same\n  ROOT %d = f32[8]{0} negate(%f)", "all-reduce"),
        ("ROOT %f = f32[2]{0} fusion(%at, %r), kind=kLoop, calls=%cut", "reduce-scatter"),
        ("ROOT %f = f32[2]{0} fusion(%r, %at), kind=kLoop, calls=%cut", "all-reduce"),
        (
            "%f = f32[8]{0} fusion(%r), kind=kLoop, calls=%same\n  %d = f32[2]{0} dynamic-slice(%f, %at)",
            "reduce-scatter",
        ),
        ("%d = f32[2]{0} dynamic-slice(%r, %at)\n  ROOT %e = f32[8]{0} negate(%r)", "all-reduce"),
    ],
)
def test_an_all_reduce_whose_result_is_sliced_counts_as_a_reduce_scatter(use, kind):
    before = (
        "%cut (at: s32[], whole: f32[8]) -> f32[2] {\n  %at = s32[] parameter(0)\n  %whole = f32[8]{0} parameter(1)\n"
        "  %b = f32[8]{0} bitcast(%whole)\n  ROOT %part = f32[2]{0} dynamic-slice(%b, %at)\n}\n"
        "%same (whole: f32[8]) -> f32[8] {\n  %whole = f32[8]{0} parameter(0)\n"
        "  ROOT %b = f32[8]{0} copy(%whole)\n}\n"
    )
    hlo = program("%r = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add", use, before=before)
    assert sent(hlo, {"fsdp": 4}) == {(kind, ("fsdp",)): (1, 32 * 3 / 4 * (2 if kind == "all-reduce" else 1))}


def test_each_array_of_a_combined_all_reduce_is_classified_separately():
    hlo = program(
        "%r = (f32[8]{0}, /*index=1*/f32[16]{0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add",
        "%whole = f32[8]{0} get-tuple-element(%r), index=0",
        "%both = f32[16]{0} get-tuple-element(%r), index=1",
        "%part = f32[4]{0} dynamic-slice(%both, %at), dynamic_slice_sizes={4}",
        "ROOT %n = f32[8]{0} negate(%whole)",
    )
    assert sent(hlo, {"fsdp": 4}) == {
        ("all-reduce", ("fsdp",)): (1, 2 * 32 * 3 / 4),
        ("reduce-scatter", ("fsdp",)): (1, 64 * 3 / 4),
    }


def test_invalid_programs_raise_an_error():
    with pytest.raises(ValueError, match="no ENTRY"):
        communication("HloModule nothing", {"data": 2})
    with pytest.raises(ValueError, match="a collective without replica_groups"):
        communication(program("%y = f32[8]{0} all-gather(%x), dimensions={0}"), {"data": 2})
    with pytest.raises(ValueError, match="not an instruction of a compiled program: %y = all-gather"):
        communication(program("%y = all-gather(%x), replica_groups={}"), {"data": 2})
    with pytest.raises(ValueError, match="r has a type of another format"):
        communication(program("%r = f32[<=8]{0} all-gather(%x), replica_groups={}"), {"data": 2})


def floats(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(("mesh", "sums"), [("fsdp=4", "whole"), ("data=4", "whole"), ("fsdp=4", "sharded")])
def test_the_communication_of_gpt2_matches_the_closed_form(mesh, sums):
    k, n = 2, 4
    sizes_of_model = {"n_layer": 3, "n_embd": 16, "n_head": 2, "seq_len": 8}
    settings = {"batch_size": 8 * k, "accumulate": k, "mesh": mesh, "gradient_sums": sums}
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], **sizes_of_model, **settings)
    share = Scaling(recipe, jax.devices(), CPU).share(parse_mesh(mesh))
    params = jax.eval_shape(recipe.task().initial).params
    blocks, wte, wpe, ends = (floats(params[part]) for part in ("blocks", "wte", "wpe", "ln_f"))
    kernels = floats([params["blocks"][layer]["kernel"] for layer in ("qkv", "attn_proj", "fc", "mlp_proj")])
    scales = floats([params["blocks"][layer]["scale"] for layer in ("ln_1", "ln_2")])
    one_way, traffic = 4 * (n - 1) / n, {t.kind: t.sent for t in share.communication.traffic}
    if mesh == "data=4":
        # Gradients are summed over devices once, after the last micro-batch; the rest are scalars.
        assert traffic.keys() == {"all-reduce"}
        assert 0 <= traffic["all-reduce"] - 2 * one_way * floats(params) < 2 * one_way * 100
    else:
        tokens = 8 * recipe.seq_len
        # Blocks are gathered in the forward pass, and what gradients need in the backward pass; the rest once a step.
        once = wte + wpe + ends + floats(params["ln_f"]["scale"])
        assert traffic["all-gather"] == one_way * (k * (blocks + kernels + scales + tokens) + once)
        # Each device looks tokens of all devices up in its columns of the embedding, and sends their gradients back
        # unless it adds them to whole sums.
        exchanges, whole = one_way * k * (tokens // n) * recipe.n_embd, sums == "whole"
        assert traffic["all-to-all"] == (1 if whole else 2) * exchanges
        assert traffic["reduce-scatter"] == one_way * (floats(params) if whole else k * (blocks + wte + ends))
        # The gradient of the position embeddings is not sliced after its sum; the rest are scalars.
        assert 0 <= traffic["all-reduce"] - (0 if whole else 2 * one_way * k * wpe) < 2 * one_way * 100
    memory, parts = share.memory, 1 if mesh == "data=4" else n
    assert memory.parameters == 4 * floats(params) / parts
    assert memory.gradients == 4 * floats(params) / (n if sums == "sharded" else 1)
    assert 0 <= memory.optimizer - 2 * memory.parameters <= 40
    assert memory.batch == 4 * k * (8 // n) * (recipe.seq_len + 1)
    assert memory.peak == memory.parameters + memory.optimizer + memory.batch + memory.temporaries
    assert (share.rows, share.devices, share.communication.unbounded_loops) == (2, 4, 0)


def test_a_mesh_grows_along_its_first_axis():
    places = [(1, 1), (3, 1), (3, 2), (3, 3), (3, 4), (3, 8), (3, 16), (3, 32)]
    assert doubled_meshes("fsdp=3,data=3", 100) == [parse_mesh(f"data={data},fsdp={fsdp}") for data, fsdp in places]
    assert [math.prod(shape.values()) for shape in doubled_meshes("data=8")] == [2**i for i in range(11)]
    assert [math.prod(shape.values()) for shape in doubled_meshes("tensor=2,data=4")] == [2**i for i in range(11)]
    for shape in doubled_meshes("data=2,fsdp=4"):
        recipe = recipe_on_mesh(dataclasses.replace(MLP, mesh="data=2,fsdp=4"), shape)
        assert recipe.batch_size == 2 * shape["data"] * shape["fsdp"]


def test_flops_count_the_rows_of_one_device():
    shares = Scaling(dataclasses.replace(MLP, mesh="tensor=2"), jax.devices(), CPU)
    tensor_share, data_share = (shares.share(parse_mesh(mesh)) for mesh in ("tensor=2", "data=2"))
    assert 2 * tensor_share.flops == data_share.flops == 3 * 2 * 16 * 64 * (64 + 10) - 2 * 16 * 64 * 64
    assert 2 * tensor_share.seconds == data_share.seconds
    assert (tensor_share.recipe.batch_size, data_share.recipe.batch_size) == (16, 32)


def test_virtual_devices_are_limited_after_jax_has_started():
    assert virtual_devices(4) == jax.devices()[:4]
    with pytest.raises(UserError, match="JAX has 4 CPU devices in this process and the mesh needs 1024: plan before"):
        virtual_devices(MAX_DEVICES)


def run_command(capsys, command):
    status = main(shlex.split(command))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def up_to_four_devices(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(plan_command, "MAX_DEVICES", 4)


RECIPE = "digits-mlp --hidden 64 --batch-size 16"


@pytest.mark.usefixtures("up_to_four_devices")
def test_plan_mesh_reports_the_mesh_and_its_growth(capsys):
    status, out, err = run_command(
        capsys, f"plan {RECIPE} --mesh data=2 --bandwidth 8GB/s --device h100 --memory 16GiB --json"
    )
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["grows"], found["device"], found["bandwidth_bytes_per_s"]) == (
        "data",
        "NVIDIA H100 80GB HBM3",
        8e9,
    )
    assert [(row["devices"], row["mesh"], row["batch_size"]) for row in found["rows"]] == [
        (1, "data=1", 8),
        (2, "data=2", 16),
        (4, "data=4", 32),
    ]
    assert {row["micro_batch_per_device"] for row in found["rows"]} == {8}
    assert found["own"] == found["rows"][1]
    one, two, four = (row["sent_bytes"] for row in found["rows"])
    gradients = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert (one, two, four) == (0, gradients + 4 * 2, (gradients + 4 * 2) * 3 / 2)
    # The closed form by which plans of more devices are extrapolated.
    traffic_of_two, traffic_of_four = (
        [Traffic(t["kind"], tuple(t["axes"]), t["times"], t["sent"]) for t in row["traffic"]]
        for row in found["rows"][1:]
    )
    form = ClosedForms("data", {})
    extrapolated = [form.at(t, {"data": 2}, 4) for t in traffic_of_two]
    assert [t.sent for t in extrapolated] == [t.sent for t in traffic_of_four]
    own = found["own"]
    assert own["communication_s"] == two / 8e9
    assert own["communication_share"] == own["communication_s"] / (own["communication_s"] + own["compute_s"])
    assert own["peak_bytes"] == sum(
        own[f"{part}_bytes"] for part in ("parameters", "optimizer", "batch", "temporaries")
    )
    assert found["command"] == "jaxtrain train digits-mlp --batch-size 16 --mesh data=2 --hidden 64"


@pytest.mark.usefixtures("up_to_four_devices")
def test_the_tables_are_printed_before_the_error_that_nothing_fits(capsys):
    status, out, err = run_command(capsys, f"plan {RECIPE} --mesh fsdp=2 --memory 10KiB")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("jaxtrain: nothing fits 10.0 KiB: parameters and optimizer state alone take ")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["digits-mlp", "·", "fsdp=2", "·", "10.0", "KiB", "per", "device"]
    assert ["compiling", "for", "fsdp=4,", "3", "of", "3", "…"] in lines
    assert [row[0] for row in lines if "KiB" in row and "over" not in row].count("reduce-scatter") == 1
    assert ["devices", "mesh", "micro-batch", "memory", "sent"] in lines
    assert [row[:4] for row in lines if row[:1] == ["✗"]] == [
        ["✗", "1", "data=1", "8"],
        ["✗", "2", "fsdp=2", "8"],
        ["✗", "4", "fsdp=4", "8"],
    ]
    assert "fsdp grows; all values are per device, with 8 rows of a micro-batch on each" in out


@pytest.mark.usefixtures("up_to_four_devices")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh data=3", "batch_size 16 is not divisible by accumulate 1 × the 3 devices of mesh 'data=3'"),
        ("--mesh rows=2", "mesh 'rows=2' has an axis 'rows': use dcn, pipeline, data, fsdp"),
        ("--mesh data=2,data=2", "gives data twice"),
        ("--mesh data=0", "gives data the size '0'"),
        ("--mesh data=2048", "mesh 'data=2048' has 2,048 devices: use at most 1,024"),
        (
            "--mesh data=2 --bandwidth 50GB",
            "'50GB' is not a bandwidth: write it with its unit, as in 50GB/s or 400Gbit/s",
        ),
        ("--mesh data=2 --memory 50", "'50' is not an amount of memory"),
        ("--mesh data=2 --device abacus", "device 'abacus' is not known: choose one of h100, h200, a100"),
        ("--bandwidth 50GB/s", "--bandwidth requires --mesh: add one, such as --mesh data=8"),
        ("--device L4", "device 'L4' is not known: choose one of h100, h200, a100"),
    ],
)
def test_wrong_usage_is_a_one_line_error(flags, message, capsys):
    status, _, err = run_command(capsys, f"plan {RECIPE} {flags}")
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("up_to_four_devices")
def test_the_reason_why_a_mesh_cannot_grow_is_printed(capsys, monkeypatch):
    first = Scaling(dataclasses.replace(MLP, mesh="data=2"), jax.devices(), CPU).share(parse_mesh("data=2"))

    def up_to_two(self, recipe, shape):
        if shape["data"] > 2:
            raise UserError("too many: take fewer")
        return dataclasses.replace(first, recipe=recipe, mesh=shape)

    monkeypatch.setattr(Scaling, "_compile", up_to_two)
    status, out, _ = run_command(capsys, f"plan {RECIPE} --mesh data=2 --bandwidth 400Gbit/s")
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["devices", "mesh", "micro-batch", "memory", "sent", "time", "share"] in lines
    assert [row[:3] for row in lines if row[:1] in (["1"], ["→"])] == [["1", "data=1", "8"], ["→", "2", "data=2"]]
    assert ["sent", "per", "step", "over", "times", "bytes", "at", "50", "GB/s"] in lines
    assert "data=4 and larger: too many: take fewer" in out.splitlines()


@pytest.mark.usefixtures("up_to_four_devices")
def test_contexts_are_doubled_up_to_the_first_that_does_not_fit(capsys):
    flags = "gpt-stdlib --n-layer 1 --n-embd 8 --n-head 2 --seq-len 16 --batch-size 4 --mesh sequence=4"
    status, out, _ = run_command(capsys, f"plan {flags} --json")
    assert status == 0
    contexts = json.loads(out)["contexts"]
    assert [c["length"] for c in contexts] == [16, 32, 64, 128]
    temporaries = [c["temporaries_bytes"] for c in contexts]
    assert temporaries == sorted(temporaries)
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], n_layer=1, n_embd=8, n_head=2, seq_len=16, batch_size=4)
    scaling = Scaling(dataclasses.replace(recipe, mesh="sequence=4"), jax.devices(), CPU)
    limited = scaling.contexts(parse_mesh("sequence=4"), contexts[0]["peak_bytes"])
    assert [(c.length, c.memory.peak) for c in limited] == [(c["length"], c["peak_bytes"]) for c in contexts[:2]]


def test_bandwidths_and_devices():
    assert parse_bandwidth("50GB/s") == parse_bandwidth("400 Gbit/s") == 50e9
    assert parse_bandwidth("1.5GiB/s") == 1.5 * 2**30
    for wrong in ("50", "50GB", "50 gb/s", "-1GB/s", "0GB/s", "50Gbit", "1e3GB/s", ""):
        with pytest.raises(UserError, match="is not a bandwidth: write it with its unit"):
            parse_bandwidth(wrong)
    assert find_gpu("NVIDIA H100 80GB HBM3") == find_gpu("h100")
    assert find_gpu("H100")[1].half > find_gpu("A100")[1].half


def run_in_process(module, *arguments, devices):
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_plans_reach_1024_devices():
    out = run_in_process("jaxtrain.cli", *shlex.split(f"plan {RECIPE} --mesh data=2,fsdp=4 --json"), devices=1)
    rows = json.loads(out)["rows"]
    assert [row["devices"] for row in rows] == [2**i for i in range(11)]
    of_fsdp, largest = rows[2], rows[-1]
    assert largest["mesh"] == "data=256,fsdp=4"
    assert largest["batch_size"] == 2 * 1024
    assert largest["parameters_bytes"] == of_fsdp["parameters_bytes"]
    assert largest["sent_bytes"] > of_fsdp["sent_bytes"]
    over_data = [t["sent"] for row in rows for t in row["traffic"] if t["axes"] == ["data"]]
    # With more devices, an all-reduce sends up to twice the size of its operand.
    assert over_data == pytest.approx([over_data[-1] * (n - 1) / n / (255 / 256) for n in [2**i for i in range(1, 9)]])


@pytest.mark.parametrize(
    "meshes",
    [
        ["fsdp=4"],
        pytest.param(["data=1", "fsdp=2", "fsdp=8"], marks=pytest.mark.nightly),
    ],
    ids=["fsdp=4", "others"],
)
def test_the_predicted_memory_matches_the_measured_memory(meshes):
    cases = [("gpt-stdlib", json.dumps({"n_layer": 2, "batch_size": 32, "mesh": mesh})) for mesh in meshes]
    out = run_in_process("tests.planning.measured_peak_on_mesh", *[x for pair in cases for x in pair], devices=8)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(found) == len(meshes)
    for mesh, of_mesh in zip(meshes, found, strict=True):
        assert abs(of_mesh["predicted"] / of_mesh["measured"] - 1) < 0.1, (mesh, of_mesh)
