"""`plan`: predictions, compiled candidates and the choice."""

import dataclasses
import gc
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.published import Llama1B, Llama8B, Llama70B, Mixtral8x7B
from jaxtrain.cli import train
from jaxtrain.cost.byte_amounts import format_bytes, parse_bytes
from jaxtrain.cost.data_sheets import CPU, ceilings
from jaxtrain.cost.flops import flops
from jaxtrain.cost.gpu.target import find_target
from jaxtrain.cost.memory import host_memory
from jaxtrain.cost.roofline import estimate_seconds
from jaxtrain.cpu.workspace import cpu_workspace
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.planning.candidate import compile_for_target
from jaxtrain.planning.gradient_sums import GradientSums
from jaxtrain.planning.search import Candidate, choice_notes, plan
from jaxtrain.recipes import RECIPES
from jaxtrain.recipes.command import command
from jaxtrain.run import Recipe, Task
from jaxtrain.runner.recipe_step import training_step

MIB = 2**20
# The package exports a function of the module's name.
planning = sys.modules[plan.__module__]
ROOT = Path(__file__).parents[2]


def fake_compilation(monkeypatch, peak, *, invalid=lambda recipe: False):
    """Replace compilation by a function of the recipe; return the list of compiled recipes."""
    compiled = []

    def compile_candidate(recipe, task, device, devices=None):
        compiled.append(recipe)
        if invalid(recipe):
            raise UserError("invalid step")
        recomputation = {"none": 1.0, "dots": 1.1, "full": 1.3}[recipe.remat]
        faster = 1 if recipe.precision == "fp32" else 1 / device.half * device.tf32
        return Candidate(recipe, peak(recipe), 10, 1, (recomputation + 0.01 * recipe.accumulate) * faster, 0.0)

    monkeypatch.setattr(planning, "compile_candidate", compile_candidate)
    task = Task(init=lambda: np.zeros(1), loss_fn=lambda params, batch, rng: None, train=None)
    for recipe in RECIPES.values():
        monkeypatch.setattr(type(recipe), "task", lambda recipe: task)
    return compiled


def peak_of(recipe):
    """Return a peak that grows with the micro-batch and falls with rematerialization."""
    kept = {"none": 10, "dots": 4, "full": 1}[recipe.remat] * (0.5 if recipe.precision == "bf16" else 1)
    return int(100 + kept * recipe.batch_size // recipe.accumulate)


def run_plan(recipe, memory, **options):
    reported = []
    return plan(recipe, memory, reported.append, **options), reported


RECIPE = dataclasses.replace(RECIPES["digits-mlp"], batch_size=64)


def test_a_recipe_that_fits_is_compiled_once(monkeypatch):
    compiled = fake_compilation(monkeypatch, peak_of)
    found, reported = run_plan(RECIPE, 740)
    assert found.chosen.recipe == RECIPE
    assert compiled == reported == [RECIPE]


def test_the_recipe_is_the_first_candidate_and_less_accumulation_is_chosen(monkeypatch):
    fake_compilation(monkeypatch, peak_of)
    own = dataclasses.replace(RECIPE, accumulate=8, remat="full")
    found, _ = run_plan(own, 740)
    assert found.candidates[0].recipe == own
    assert (found.chosen.recipe.accumulate, found.chosen.recipe.remat) == (1, "none")


def test_the_search_finds_the_optimum_of_an_exhaustive_search(monkeypatch):
    fake_compilation(monkeypatch, peak_of)
    divisors = [k for k in range(1, 65) if 64 % k == 0]
    every = [dataclasses.replace(RECIPE, accumulate=k, remat=r) for k in divisors for r in ("none", "dots", "full")]
    in_bf16 = [dataclasses.replace(recipe, precision="bf16") for recipe in every]

    def times(recipes, memory):
        return [planning.compile_candidate(r, None, CPU).seconds for r in recipes if peak_of(r) <= memory]

    for memory in [*range(101, 760, 13), 10_000]:
        best = min(times(every, memory) or times(in_bf16, memory))
        found, reported = run_plan(RECIPE, memory)
        assert found.chosen.seconds == best
        assert found.chosen.peak_bytes <= memory
        assert found.chosen.recipe.batch_size == 64
        assert len(reported) == len(set(reported)) <= 15


def test_the_precision_is_kept_if_anything_fits_in_it(monkeypatch):
    fake_compilation(monkeypatch, peak_of)
    monkeypatch.setattr(planning, "ceilings", lambda device: dataclasses.replace(CPU, half=4e12))
    found, _ = run_plan(RECIPE, 740)
    assert found.chosen.recipe.precision == "fp32"
    assert [note for note in choice_notes(found) if "bf16 fits too and takes 0.10 times as long" in note]
    found, _ = run_plan(RECIPE, 740, precisions=["fp32"])
    assert {c.recipe.precision for c in found.candidates} == {"fp32"}
    monkeypatch.setattr(planning, "ceilings", lambda device: CPU)
    fake_compilation(monkeypatch, lambda recipe: peak_of(recipe) + 100 * (recipe.precision == "fp32"))
    found, _ = run_plan(RECIPE, 150)
    assert found.chosen.recipe.precision == "bf16"
    assert choice_notes(found) == ["nothing fits in fp32: bf16 rounds differently"]


def test_if_nothing_fits_the_error_names_the_smallest_candidate(monkeypatch):
    fake_compilation(monkeypatch, peak_of)
    with pytest.raises(
        RunFailed, match=r"nothing fits 90 B: the smallest candidate takes 100 B, 10 B of it for the state, with"
    ) as at:
        run_plan(RECIPE, 90)
    assert "\n" not in str(at.value)
    assert at.value.exit_status == 1
    compiled = fake_compilation(monkeypatch, peak_of)
    with pytest.raises(RunFailed, match=r"nothing fits 5 B: parameters and optimizer state alone take \d+ B"):
        run_plan(RECIPE, 5)
    assert not compiled


def test_invalid_policies_and_micro_batches_are_skipped(monkeypatch):
    fake_compilation(monkeypatch, peak_of, invalid=lambda r: r.remat == "dots" or r.batch_size // r.accumulate < 4)
    found, _ = run_plan(RECIPE, 110)
    assert (found.chosen.recipe.remat, found.chosen.micro_batch) == ("full", 8)
    fake_compilation(monkeypatch, peak_of, invalid=lambda r: True)
    with pytest.raises(UserError, match="invalid step"):
        run_plan(RECIPE, 110)
    with pytest.raises(UserError, match="divisible"):
        run_plan(dataclasses.replace(RECIPE, accumulate=3), 110)


@pytest.mark.parametrize(("launches", "is_unrolled"), [(30_000, True), (30_002, False)])
def test_layers_are_unrolled_if_the_program_compiles_in_minutes(monkeypatch, launches, is_unrolled):
    recipe = dataclasses.replace(RECIPE, accumulate=2)
    program = SimpleNamespace(launches=[SimpleNamespace(times=launches)])

    def compiled(recipe, task, target):
        return Candidate(recipe, 10, 5, 1, 0.5 if recipe.unroll else 1 / recipe.accumulate, 0.0, program)

    monkeypatch.setattr(planning, "compile_for_target", compiled)
    monkeypatch.setattr(planning._Search, "fill", lambda search, precision: None)
    found = plan(recipe, 10**9, lambda recipe: None, target=find_target("h100"))
    assert [c.recipe.unroll for c in found.candidates] == ([False, True] if is_unrolled else [False])
    notes = choice_notes(dataclasses.replace(found, chosen=found.candidates[0]))
    assert ["would have 15,001 launches" in note for note in notes] == ([] if is_unrolled else [True])


@pytest.mark.parametrize(("remat", "mesh", "devices"), [("none", None, 1), ("full", None, 1), ("full", "data=4", 4)])
def test_the_flops_of_a_gpu_that_is_not_here_are_those_of_the_model_without_recomputation(
    remat, mesh, devices, monkeypatch
):
    compiled = SimpleNamespace(peak_bytes=0, alias_bytes=0, mesh={} if mesh is None else {"data": devices}, seconds=1.0)
    monkeypatch.setattr(sys.modules[Candidate.__module__], "gpu_program", lambda *args, **options: compiled)
    recipe = dataclasses.replace(RECIPE, hidden=32, remat=remat, mesh=mesh)
    found = compile_for_target(recipe, recipe.task(), find_target("h100"))
    # Forward, and by the weights; by the inputs but for the first layer's.
    assert found.flops == 2 * 64 * (3 * 64 * 32 - 64 * 32 + 3 * 32 * 10) // devices


def test_a_note_reports_batch_norm():
    own = Candidate(RECIPE, 10, 5, 1, 1.0, 0.0)
    finer = dataclasses.replace(own, recipe=dataclasses.replace(RECIPE, accumulate=4))
    found = planning.Plan(10, [own, finer], finer, batch_norm=True)
    assert choice_notes(found) == ["BatchNorm computes statistics per micro-batch: over 16 examples instead of 64"]
    assert choice_notes(dataclasses.replace(found, chosen=own)) == []


def test_a_note_reports_which_kernels_are_in_8_bits():
    recipe = dataclasses.replace(RECIPE, precision="fp8", hidden=32)
    own = Candidate(recipe, 10, 5, 1, 1.0, 0.0)
    found = planning.Plan(10, [own], own, batch_norm=False, fp8=planning._fp8(recipe, recipe.task()))
    assert choice_notes(found) == ["fp8: 1 kernel; not in 8 bits: layers/1/kernel (32×10 is not a multiple of 16)"]
    assert planning._fp8(RECIPE, RECIPE.task()) == ""


def test_notes_report_gradient_sums_and_gathered_parameters_on_fsdp():
    def notes(**settings):
        recipe = dataclasses.replace(RECIPE, mesh="fsdp=4", **settings)
        own = Candidate(recipe, 10, 5, 1, 1.0, 0.0)
        sums = GradientSums(4096, 1024)
        return choice_notes(planning.Plan(10, [own], own, batch_norm=False, sums=sums, gathered_bytes=2048))

    whole, sharded = "4.00 KiB of each device, reduced once per update", "1.00 KiB, reduced in each of 4 micro-batches"
    forward = "one layer at a time, gathered forwards and backwards"
    window = "2.00 KiB of each device, gathered once per update"
    assert notes() == [f"gathered parameters: {forward}; with --reshard-after window {window}"]
    assert notes(accumulate=4) == [
        f"gradient sums: {whole}; with --gradient-sums sharded {sharded}",
        f"gathered parameters: {forward} in each of 4 micro-batches; with --reshard-after window {window}",
    ]
    assert notes(accumulate=4, gradient_sums="sharded", reshard_after="window") == [
        f"gradient sums: {sharded}; with --gradient-sums whole {whole}",
        f"gathered parameters: {window}; with --reshard-after forward {forward} in each of 4 micro-batches",
    ]


def test_sharded_gradient_sums_are_chosen_if_nothing_else_fits(monkeypatch):
    fake_compilation(monkeypatch, lambda r: 50 if r.gradient_sums == "sharded" and r.accumulate > 1 else 200)
    monkeypatch.setattr(planning, "_least_bytes", lambda *_: 0)
    monkeypatch.setattr(planning, "_state", lambda *_: ([], GradientSums(0, 0), 0))
    found = plan(dataclasses.replace(RECIPE, mesh="fsdp=4"), 110, lambda recipe: None)
    assert found.chosen.recipe.gradient_sums == "sharded"
    assert found.chosen.recipe.accumulate == 2


def test_planning_allocates_nothing_and_counts_every_micro_batch():
    small = dataclasses.replace(RECIPES["digits-resnet"], batch_size=8, width=8)
    task = small.task()
    gc.collect()  # of arrays that other tests left
    before = sum(x.nbytes for x in jax.live_arrays())
    whole, four = (planning.compile_candidate(dataclasses.replace(small, accumulate=k), task, CPU) for k in (1, 4))
    assert sum(x.nbytes for x in jax.live_arrays()) == before
    step = training_step(small, task)
    state = step.init(lambda: task.initial().params, model_state=lambda: task.initial().model_state, seed=0)
    batch = {name: np.stack([task.train[i][name] for i in range(8)]) for name in task.train[0]}
    assert whole.flops == flops(step.pure, state, batch) > 1e6
    # XLA's own count includes the body of a loop only once.
    assert abs(four.flops / whole.flops - 1) < 0.01
    assert four.seconds > whole.seconds
    assert four.peak_bytes < whole.peak_bytes
    held = sum(x.nbytes for x in jax.tree.leaves(state._replace(rng=jax.random.key_data(state.rng))))
    assert 0 <= held - whole.state_bytes <= 16  # except for scalars that are not aliased


def test_a_mesh_is_planned_for_the_memory_of_one_device():
    recipe = dataclasses.replace(RECIPES["digits-mlp"], hidden=512, mesh="fsdp=4", batch_size=16)
    found, _ = run_plan(recipe, 10_000_000)
    assert found.chosen.recipe == recipe
    alone = planning.compile_candidate(dataclasses.replace(recipe, mesh=None), recipe.task(), CPU)
    assert 0.2 < found.chosen.state_bytes / alone.state_bytes < 0.4


def test_the_time_estimate_is_a_roofline():
    def of(fn, *shapes, device=CPU):
        return estimate_seconds(
            jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes)).jaxpr, device
        )

    free = dataclasses.replace(CPU, launch_overhead_s=0.0)
    n = 4096
    exact = "highest"
    large = of(lambda a, b: jnp.matmul(a, b, precision=exact), (n, n), (n, n), device=free)
    assert large == 2 * n**3 / free.fp32
    row = of(lambda a, b: jnp.matmul(a, b, precision=exact), (1, n), (n, n), device=free)
    assert row == pytest.approx(4 * (n * n + 2 * n) / free.bandwidth)
    tensor_cores = dataclasses.replace(free, tf32=10 * free.fp32, half=100 * free.fp32)
    assert of(lambda a, b: a @ b, (n, n), (n, n), device=tensor_cores) == large / 10
    half = of(lambda a, b: a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16), (n, n), (n, n), device=tensor_cores)
    assert large / 100 < half < large / 10

    def in_8_bits(a, b):
        return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    operands = jax.ShapeDtypeStruct((n, n), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((n, n), jnp.float8_e5m2)
    eight = jax.make_jaxpr(in_8_bits)(*operands).jaxpr
    assert estimate_seconds(eight, dataclasses.replace(free, fp8=4 * free.half)) == large / 4
    assert estimate_seconds(eight, free) == large
    assert estimate_seconds(eight, dataclasses.replace(free, fp8=1e30)) == 6 * n * n / free.bandwidth
    one = of(jnp.sin, (n, n))
    assert of(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=5)[0], (n, n)) == pytest.approx(
        5 * one
    )
    assert of(lambda x: lax.cond(x[0] > 0, lambda y: y, lambda y: jnp.sin(jnp.sin(y)), x), (n,)) >= of(jnp.sin, (n,))
    h100 = ceilings(SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3"))
    assert h100.half / h100.fp32 > 10
    assert ceilings(SimpleNamespace(platform="gpu", device_kind="Unheard Of")).half > 1e14
    assert ceilings(jax.devices("cpu")[0]) == CPU


def test_workspaces_of_the_cpu_library_are_counted():
    def of(fn, *shapes):
        arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        return cpu_workspace(jax.jit(fn).lower(*arrays).compile().as_text())

    def convolved(x, w, stride=1):
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    kernel = 4 * 3 * 3 * 32 * 32
    assert of(convolved, (8, 16, 16, 32), (3, 3, 32, 32)) == 4 * 8 * 18 * 18 * 32 + kernel
    assert of(lambda x: x.sum(0), (32, 20_000)) == 0
    assert of(jnp.sin, (64, 64)) == 0


def test_parse_and_format_bytes():
    assert parse_bytes("16GiB") == 16 * 2**30
    assert parse_bytes("0.5 KB") == 500
    for wrong in (
        "16",
        "",
        "GiB",
        "-1GiB",
        "1e3GiB",
        "nanGiB",
        "0MiB",
        "16 gib",
        "١GiB",
        "1" * 400 + "GiB",
        "16GiB\n2",
    ):
        with pytest.raises(UserError, match="is not an amount of memory: write it with its unit, as in 16GiB or 40GB"):
            parse_bytes(wrong)
    assert [format_bytes(n) for n in (5, 2048, 12 * MIB, 1536 * MIB)] == ["5 B", "2.00 KiB", "12.0 MiB", "1.50 GiB"]


def test_the_memory_of_a_container_is_its_limit(tmp_path):
    whole = host_memory(())
    limited, free = tmp_path / "memory.max", tmp_path / "max"
    limited.write_text("1048576\n")
    free.write_text("max\n")
    assert host_memory((limited, free, tmp_path / "absent")) == MIB
    assert host_memory((free,)) == whole > MIB


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_restores_the_recipe(name):
    changed = dataclasses.replace(
        RECIPES[name], batch_size=48, accumulate=4, remat="names:a,b", unroll=True, optimizer="sgd(momentum=0.9)"
    )
    for recipe in (RECIPES[name], changed):
        words = shlex.split(command("train", name, recipe))
        assert words[:3] == ["jaxtrain", "train", name]
        assert train.parse_recipe(RECIPES[name], name, train.Train(), words[3:]) == recipe


def measure_peaks(*cases):
    """Return measured and predicted peaks from a separate process."""
    flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    environment.pop("PJRT_NPROC", None)  # of commands that ran in this process: more threads need more workspace
    arguments = [part for name, settings in cases for part in (name, json.dumps(settings))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.measured_peak", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "case",
    [
        ("digits-mlp", {"batch_size": 512, "hidden": 10_000}),
        pytest.param(("gpt-stdlib", {"n_layer": 2, "eval_sequences": 16}), marks=pytest.mark.nightly),
        pytest.param(("digits-resnet", {"batch_size": 512}), marks=pytest.mark.nightly),
    ],
    ids=["digits-mlp", "gpt-stdlib", "digits-resnet"],
)
def test_the_predicted_peak_matches_the_measured_one(case):
    (found,) = measure_peaks(case)
    assert found["predicted"] > 40 * MIB
    assert abs(found["predicted"] / found["measured"] - 1) < 0.1, found


@pytest.mark.nightly
def test_the_predicted_peaks_of_many_recipes_match_the_measured_ones():
    cases = [
        ("gpt-stdlib", {"batch_size": 32, "accumulate": 4}),
        ("gpt-stdlib", {"batch_size": 32, "remat": "full"}),
        ("gpt-stdlib", {"batch_size": 32, "remat": "dots", "precision": "bf16"}),
        ("llama-stdlib", {}),
        ("bert-stdlib", {}),
        ("t5-dates", {"batch_size": 256}),
        ("digits-resnet", {"batch_size": 1024, "accumulate": 2}),
        ("digits-mlp", {"batch_size": 16, "hidden": 200_000, "precision": "fp16"}),
    ]
    for (name, settings), found in zip(cases, measure_peaks(*cases), strict=True):
        assert abs(found["predicted"] / found["measured"] - 1) < 0.1, (name, settings, found)


def test_published_recipes_are_planned_in_every_precision():
    precision = get_type_hints(Recipe)["precision"]
    for recipe in (Llama1B, Llama8B, Llama70B, Mixtral8x7B):
        assert get_type_hints(recipe)["precision"] == precision
