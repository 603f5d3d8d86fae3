"""Scaling over nodes of GPUs: closed forms against compiled programs, extrapolated costs, and `plan --nodes`."""

import dataclasses
import json
import shlex
import xml.etree.ElementTree

import jax
import pytest
from rich.console import Console

from jaxtrain.cli import main
from jaxtrain.cli.plans import plan_nodes
from jaxtrain.cost import Communication, GpuProgram, find_target
from jaxtrain.cost.communication import Traffic
from jaxtrain.distributed.mesh import parse_mesh
from jaxtrain.errors import UserError
from jaxtrain.planning import MeshChoice
from jaxtrain.planning.candidate import Candidate
from jaxtrain.planning.scale import mesh_costs
from jaxtrain.planning.scale.closed_forms import ClosedForms, sent_bytes, whole_bytes
from jaxtrain.planning.scale.growth import Settings, grow_weakly, weak_programs
from jaxtrain.recipes import RECIPES

H100 = find_target("h100")
MLP = dataclasses.replace(RECIPES["digits-mlp"], hidden=64, batch_size=16)
STATE = mesh_costs.MeshCosts(MLP, H100, print)
GATHERED = 1 << 24


def text(mesh):
    """A step that gathers and scatters the parameters over fsdp, beside a product, and adds gradients over data."""
    d, f = mesh["data"], mesh["fsdp"]
    groups, across = f"[{d},{f}]<=[{d * f}]", f"[{f},{d}]<=[{d},{f}]T(1,0)"
    gathered = GATHERED + 1024 * f  # and the tokens of all of fsdp
    product = (
        'custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"lhs_contracting_dimensions":["1"]}'
    )
    lines = [
        "%x = bf16[8192,8192]{1,0} parameter(0)",
        "%w = bf16[8192,8192]{1,0} parameter(1)",
        f"%p = f32[{GATHERED // f}]{{0}} parameter(2)",
        f"%g = (f32[{gathered // f}]{{0}}, f32[{gathered}]{{0}}) all-gather-start(%p), replica_groups={groups}",
        f"%y = bf16[8192,8192]{{1,0}} {product}",
        f"%whole = f32[{gathered}]{{0}} all-gather-done(%g)",
        "%z = bf16[8192,8192]{1,0} negate(%y)",
        f"%s = f32[{GATHERED // f}]{{0}} reduce-scatter(%whole), replica_groups={groups}, to_apply=%add",
        f"ROOT %r = f32[{GATHERED // f}]{{0}} all-reduce(%s), replica_groups={across}, to_apply=%add",
    ]
    return "ENTRY %main (x: f32[8]) -> f32[8] {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"


def written(recipe, task, target):
    """A candidate whose program is written by `text`; memory is the state of the MLP, and a share of the rest."""
    mesh = parse_mesh(recipe.mesh)
    rows = recipe.batch_size // recipe.accumulate // (mesh["data"] * mesh["fsdp"])
    if mesh["tensor"] > 1:
        raise jax.errors.JaxRuntimeError("INTERNAL: too many\nat line 1")
    state = STATE.state_bytes(mesh)
    temporaries = rows * (1 << 20) + (1 << 30) // mesh["fsdp"] + 1024 * 4 * mesh["fsdp"]
    program = GpuProgram(target, text(mesh), mesh, state, state, state, temporaries)
    return Candidate(recipe, state + temporaries, state, 10**12, program.seconds, 0.0, program)


@pytest.fixture(autouse=True)
def programs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(mesh_costs, "compile_for_target", written)
    monkeypatch.setattr("jaxtrain.cli.plans.plan_nodes.gpu_devices", lambda *_: ())


def run_command(capsys, flags):
    status = main(shlex.split(f"plan digits-mlp --hidden 64 {flags}"))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_mesh_that_divides_fewer_parameters_is_not_extrapolated_to():
    def undivided(*meshes):
        return STATE.undivided(*map(parse_mesh, meshes))

    assert undivided("fsdp=2", "fsdp=4") == "layers/1/bias [10]"
    assert undivided("fsdp=4", "fsdp=8") is None
    assert STATE.state_bytes(parse_mesh("fsdp=2")) < STATE.state_bytes(parse_mesh("data=2"))


def test_closed_forms_are_refused_if_a_program_does_not_follow_them():
    def program(n, sent):
        return {"fsdp": n}, Communication((Traffic("all-gather", ("fsdp",), 1, sent * (n - 1) / n),), 0)

    followed = ClosedForms.fit("fsdp", [program(8, 1000.0), program(64, 1000.0), program(512, 1000.0)])
    assert followed.coefficients == {("all-gather", ("fsdp",)): 0}
    over_data = [
        ({"data": 2, "fsdp": n}, Communication((Traffic("all-reduce", ("data",), 1, 4096 / n),), 0)) for n in (2, 4, 8)
    ]
    assert ClosedForms.fit("fsdp", over_data).coefficients == {("all-reduce", ("data",)): 4096}
    with pytest.raises(UserError, match="not extrapolated along fsdp: the all-gather over fsdp of fsdp=64 sends"):
        ClosedForms.fit("fsdp", [program(8, 1000.0), program(64, 1100.0), program(512, 1000.0)])


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"])
def test_whole_arrays_are_those_whose_parts_are_sent(kind):
    mesh = {"data": 4, "fsdp": 8}
    traffic = Traffic(kind, ("data", "fsdp"), 1, 31.0)
    assert sent_bytes((kind, traffic.axes), whole_bytes(traffic, mesh), mesh) == pytest.approx(31)


def test_extrapolated_costs_are_those_of_the_larger_program():
    sizes = 8, 64, 512, 2048
    recipe = dataclasses.replace(MLP, mesh="fsdp=8")
    costs = mesh_costs.MeshCosts(recipe, H100, lambda _: None)
    found = {n: costs.compile(parse_mesh(f"fsdp={n}"), 2, 1, "none") for n in sizes}
    forms = ClosedForms.fit("fsdp", [(found[n].program.mesh, found[n].program.communication) for n in sizes[:3]])
    larger = parse_mesh("fsdp=2048")
    extrapolated, compiled = (costs.cost(found[n], larger, forms) for n in (512, 2048))
    for figure in ("nvlink_bytes", "network_bytes", "communication_s", "exposed_s", "units_per_s", "mfu"):
        assert getattr(extrapolated, figure) == pytest.approx(getattr(compiled, figure), rel=1e-3), figure
    # Without forms along the axis that grows, parameters and gradients are all that is sent there.
    of_params, *others = (
        costs.cost(found[512], larger, x).nvlink_bytes
        for x in (ClosedForms("fsdp", {}), None, ClosedForms("data", forms.coefficients))
    )
    assert [*others] == [of_params] * 2 != [extrapolated.nvlink_bytes] * 2
    program = found[2048].program
    assert min(program.product_seconds, program.traffic_seconds) > 0
    assert compiled.exposed_s == pytest.approx(program.exposed_seconds)
    assert compiled.compute_s == pytest.approx(program.product_seconds + program.traffic_seconds)
    assert compiled.batch_size == 2 * 2048
    assert compiled.mfu == pytest.approx(10**12 / program.seconds / H100.ceilings.of_precision(recipe.precision))
    assert compiled.units_per_s == pytest.approx(compiled.batch_size * costs.task.units_per_row / program.seconds)
    assert 7 * compiled.network_bytes == pytest.approx(compiled.nvlink_bytes)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_extrapolated_memory_is_that_of_the_larger_program(accumulate):
    costs, mesh = (
        mesh_costs.MeshCosts(dataclasses.replace(MLP, mesh="fsdp=8"), H100, lambda _: None),
        parse_mesh("fsdp=8"),
    )
    settings = Settings(2, accumulate, "none")
    *_, largest = grow_weakly(costs, mesh, "fsdp", settings, weak_programs(costs, mesh, "fsdp", settings)).costs
    assert largest.mesh["fsdp"] > largest.program["fsdp"]
    compiled = costs.compile(largest.mesh, *settings)
    assert largest.peak_bytes == pytest.approx(compiled.peak_bytes, rel=1e-6)


def test_plan_nodes_reports_weak_and_strong_scaling(capsys):
    status, out, err = run_command(
        capsys, "--batch-size 256 --mesh fsdp=64 --device h100 --nodes 8 --bandwidth 200Gbit/s --picture p.svg --json"
    )
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["nodes"], found["network_bytes_per_s"], found["chosen"]["gpus"]) == (8, 25e9, 64)
    growth = {(g["axis"], g["scaling"]): g for g in found["growth"]}
    assert [*growth] == [
        *(("fsdp", "weak"), ("fsdp", "strong"), ("data", "weak"), ("data", "strong")),
        *(("sequence", "strong"), ("tensor", "strong")),
    ]
    weak, strong = growth["data", "weak"]["rows"], growth["data", "strong"]["rows"]
    assert [row["gpus"] for row in weak] == [64 << i for i in range(9)]
    assert [row["extrapolated"] for row in weak] == [False] * 4 + [True] * 5
    assert {row["batch_size"] // row["gpus"] for row in weak} == {4}
    assert [(row["gpus"], row["rows"], row["batch_size"]) for row in strong] == [
        (64, 4, 256),
        (128, 2, 256),
        (256, 1, 256),
    ]
    assert growth["data", "strong"]["ends"] == "data=8 leaves less than a row of the batch for each GPU"
    assert growth["tensor", "strong"]["ends"].startswith("XLA cannot compile the step for fsdp=64,tensor=2 ")
    assert xml.etree.ElementTree.parse("p.svg").getroot().tag.endswith("svg")


def test_plan_nodes_chooses_the_fastest_mesh_that_fits(capsys):
    status, out, err = run_command(capsys, "--batch-size 64 --device h100 --nodes 2 --memory 500MiB --json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    seconds = [row["step_s"] for row in found["candidates"]]
    assert seconds == sorted(seconds)
    assert found["chosen"] in found["candidates"]
    assert found["chosen"]["step_s"] <= 1.02 * seconds[0]
    assert all(row["fits"] and row["batch_size"] == 64 for row in found["candidates"])
    assert "data=16" in {row["mesh"] for row in found["rejected"]}
    assert found["command"].endswith(f"--mesh {found['chosen']['mesh']} --hidden 64")


def test_plan_nodes_prints_tables_and_verdicts(capsys):
    status, out, err = run_command(capsys, "--batch-size 128 --mesh data=8 --device h100 --nodes 1 --precision fp8")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "compiling data=8, 128 rows, remat none …" in lines
    assert "data grows, rows of a GPU fixed (weak scaling)" in lines
    assert any(line.startswith("data pays up to data=") or "is where data stops paying" in line for line in lines)
    assert "MFU is over the peak rate of 16-bit products; those in 8 bits have up to twice that rate" in lines
    assert lines[-1] == "jaxtrain train digits-mlp --batch-size 128 --precision fp8 --mesh data=8 --hidden 64"


def test_no_axis_is_broken_over_lines():
    amounts = {"peak_bytes": 1 << 33, "nvlink_bytes": 3e10, "network_bytes": 5e9, "units_per_s": 1e8, "mfu": 0.6}
    seconds = {"compute_s": 0.8, "communication_s": 1.0, "exposed_s": 0.2, "compile_s": 1.0}
    settings = {"rows": 1, "accumulate": 1, "remat": "full", "gradient_sums": "whole", "batch_size": 64}
    meshes = [parse_mesh(spec) for spec in ("data=256,fsdp=64", "fsdp=16384")]
    costs = [mesh_costs.MeshCost(mesh=x, program=x, **amounts, **seconds, **settings) for x in meshes]
    console = Console(width=76)
    with console.capture() as printed:
        console.print(plan_nodes._table(costs, MeshChoice(1 << 34, costs[0], costs, []), "tokens"))
    assert [word for word in printed.get().split() if "=" in word] == ["data=256", "fsdp=64", "fsdp=16384"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nodes 8", "--nodes requires --device: add a GPU, such as --device h100"),
        ("--nodes 8 --device abacus", "device 'abacus' is not known: choose one of h100, h200, a100"),
        ("--nodes 0 --device h100", "--nodes must be from 1 to 2,048 nodes of 8 GPUs, got 0"),
        ("--nodes 9999 --device h100", "--nodes must be from 1 to 2,048 nodes of 8 GPUs, got 9,999"),
        ("--nodes 2 --device h100 --mesh fsdp=8", "mesh 'fsdp=8' has 8 GPUs and 2 nodes have 16: make its sizes"),
        ("--nodes 1 --device h100 --picture a.png", "--picture 'a.png' is not an SVG: use a name that ends in .svg"),
        ("--nodes 1 --device h100 --picture no/a.svg", "the folder of --picture 'no/a.svg' does not exist: create it"),
        ("--nodes 1 --device h100 --bandwidth 50", "'50' is not a bandwidth"),
        ("--device h100 --picture a.svg", "--picture requires --nodes: add a number of nodes, such as --nodes 8"),
    ],
)
def test_wrong_usage_is_a_one_line_error(flags, message, capsys):
    status, _, err = run_command(capsys, f"--batch-size 64 {flags}")
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_plan_that_nothing_fits_names_the_reasons(capsys):
    status, _, err = run_command(capsys, "--batch-size 64 --device h100 --nodes 1 --memory 1MiB")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("jaxtrain: no mesh of 8 GPUs fits (fsdp=8: one row takes ")
