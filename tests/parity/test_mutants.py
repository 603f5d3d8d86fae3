"""The cases of the planted bugs: one without its bug equals PyTorch in float64, and each bug changes it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxtrain.optim import SIGNED, UNSIGNED, Blockwise
from jaxtrain.step import build, step
from jaxtrain.torch_import import Graph, Node, Ref, Spec
from parity.cases import CASES
from parity.divergence import Divergence
from parity.mutate import Mutant, operation_bugs
from tests.parity.both_sides import distances, in_pytorch
from tests.parity.mutants import constants, eight_bit, kinks, layers, losses, models, optimizers, schedules, steps

EQUAL, DIFFERENT = 1e-8, 1e-5
SLOPES_SINCE_2_14 = {"clamp-at-its-ends"} if torch.__version__ >= "2.14" else set()
"""PyTorch 2.14's clamp has the slope 0 at its bounds."""


def check(mutants: Sequence[Mutant]) -> None:
    """Compare the values of all cases and bugs, and the gradients of bugs that have the right values."""
    # PyTorch draws dropout masks of its own.
    mutants = [x for x in mutants if "dropout" not in x.name and x.name not in SLOPES_SINCE_2_14]
    clean = {mutant.clean: mutant.clean() for mutant in mutants}
    theirs = {key: in_pytorch(case) for key, case in clean.items()}
    wrong = [mutant.case() for mutant in mutants]
    found = distances([*clean.values(), *wrong], [*theirs.values(), *(theirs[x.clean] for x in mutants)], graded=False)
    assert max(found[: len(clean)]) < EQUAL, [*zip(found, (case.name for case in clean.values()), strict=False)]
    hidden = [i for i, d in enumerate(found[len(clean) :]) if d <= DIFFERENT]
    if not hidden:
        return
    cases = [case for i in hidden for case in (clean[mutants[i].clean], wrong[i])]
    found = distances(cases, [theirs[mutants[i].clean] for i in hidden for _ in range(2)], graded=True)
    assert max(found[::2]) < EQUAL
    assert min(found[1::2]) > DIFFERENT, [mutants[i].name for i in hidden]


def between(first: str, last: str) -> list[Mutant]:
    """Return the mutants of layers from one to another, by name."""
    names = [mutant.name for mutant in layers.MUTANTS]
    return layers.MUTANTS[names.index(first) : names.index(last) + 1]


def test_norms_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(between("layer-norm-eps", "std-ddof"))


def test_layers_of_images_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(between("conv-same-is-asymmetric", "nearest-half-pixel"))


def test_recurrences_and_attention_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(between("gelu-tanh", layers.MUTANTS[-1].name))


def test_losses_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(losses.MUTANTS)


def test_positions_and_tied_tables_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check([*models.MUTANTS, *constants.MUTANTS])


def test_slopes_at_kinks_equal_pytorchs_unless_a_bug_is_planted() -> None:
    check(kinks.MUTANTS)


GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0, 12.0])}


def listed(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, float).tolist(), tree)


def test_steps_are_wrong_as_their_bugs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped = steps.by_leaf(GRADS, 6.0)
    np.testing.assert_allclose(clipped["a"], GRADS["a"])
    np.testing.assert_allclose(clipped["b"], [0.0, 6.0], rtol=1e-6)
    micro = steps.last_repeated({"x": jnp.arange(8.0)}, 4)
    assert listed(micro) == {"x": [[0, 1], [2, 3], [4, 5], [4, 5]]}
    old, new = ({"w": jnp.ones(1)}, 1, 2), ({"w": jnp.zeros(1)}, 3, 4)
    assert listed(steps.keep_parameters_only(jnp.array(True), old, new)) == ({"w": [1]}, 3, 4)
    assert listed(steps.keep_parameters_only(jnp.array(False), old, new)) == ({"w": [0]}, 3, 4)
    assert steps.keep_parameters_only(False, old, new) is not old
    z, y = jnp.array([[1.0], [2.0], [5.0]]), jnp.array([[0.0], [3.0], [4.0]])
    assert listed(steps.shifted(z, y)) == ((1 - 4) ** 2 + 2**2 + (5 - 3) ** 2, 3)
    assert listed(steps.in_bfloat16(1 + z / 1000, y * 0)) == (1 + 1 + 1.0078125**2, 3)
    left = steps.unscaled(lambda scaled, right: (scaled, right))()
    (scaled, right), _ = left.update(GRADS, left.init(None))
    assert listed(scaled) == listed(GRADS)
    np.testing.assert_allclose(right["a"], np.array([3.0, 4.0]) / 1024)
    called: list[Any] = []
    monkeypatch.setattr(steps, "apply_updates", lambda *args: called.append(args))
    wrong = steps.without_compensation, steps.compensated_the_wrong_way, steps.with_the_first_bits
    for function in wrong:
        function("kahan", "params", "updates", GRADS, "key")
    assert [args[:3] for args in called] == 3 * [("kahan", "params", "updates")]
    assert [listed(args[3]) for args in called] == [
        *({"a": [0, 0], "b": [0, 0]}, {"a": [-3, -4], "b": [0, -12]}, {"a": [3, 4], "b": [0, 12]})
    ]
    assert called[0][4] == called[1][4] == "key"
    assert (jax.random.key_data(called[2][4]) == jax.random.key_data(jax.random.key(0))).all()


def test_stochastic_rounding_without_bits_truncates() -> None:
    p, key = {"w": jnp.ones(64, jnp.bfloat16)}, jax.random.key(3)
    updates = {"w": jnp.full(64, 0.9 * 2.0**-7)}
    right, _ = steps.apply_updates("stochastic", p, updates, None, key)
    wrong, _ = steps.truncated("stochastic", p, updates, None, key)
    assert listed(wrong) == {"w": [1.0] * 64}
    assert {*listed(right)["w"]} == {1.0, 1 + 2.0**-7}


def test_schedules_are_one_update_early_or_late() -> None:
    schedule = lambda count: 10 * count  # noqa: E731
    assert [schedules.early(schedule)(t) for t in range(3)] == [10, 20, 30]
    assert [float(schedules.late(schedule)(jnp.int32(t))) for t in range(4)] == [0, 0, 10, 20]
    decayed, _ = optimizers.with_l2(optax.identity(), 0.5).update(GRADS, (optax.EmptyState(),) * 2, GRADS)
    assert listed(decayed) == {"a": [4.5, 6], "b": [0, 18]}
    net = optimizers.Spare()
    optimizer = optimizers.grouped(net.named_parameters())
    assert {group["weight_decay"] for group in optimizer.param_groups if group["params"][0] is net.weight} == {0.1}
    others = [group["weight_decay"] for group in optimizer.param_groups if group["params"][0] is not net.weight]
    assert others == [0.0, 0.0]
    z, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert (optimizers.squares(z, y)[0].item(), optimizers.squares(z, y)[1]) == (5, 2)


def test_moments_in_8_bits_are_the_nearest_values_of_their_map_block_by_block() -> None:
    x = np.random.default_rng(0).standard_normal(600, np.float32)
    x *= np.repeat(np.array([1, 100, 0.01], np.float32), 200)
    x[:256] = np.where(np.abs(x[:256]) < 1e-2, -1e-9, x[:256])
    for values, keep_sign in ((SIGNED, True), (SIGNED, False), (UNSIGNED, False)):
        moment = torch.from_numpy(np.abs(x) if values is UNSIGNED else x).clone()
        table, expected = np.asarray(values.values, np.float32), []
        for block in np.split(moment.numpy().copy(), (256, 512)):
            largest = np.abs(block).max()
            codes = np.abs((block * (np.float32(1) / largest))[:, None] - table).argmin(1)
            if keep_sign:
                codes = np.where((block < 0) & (table[codes] == 0), codes - 1, codes)
            expected.append(table[codes] * largest)
        eight_bit.rounded(moment, torch.from_numpy(table), keep_sign)
        np.testing.assert_array_equal(moment, np.concatenate(expected))
        if keep_sign:
            assert (moment[:256][torch.from_numpy(x[:256] == np.float32(-1e-9))] < 0).all()
    p = torch.nn.Parameter(torch.zeros(300))
    optimizer = eight_bit.Quantized([p], lr=0.1)
    p.grad = torch.linspace(-3, 5, 300)
    optimizer.step()
    state = optimizer.state[p]
    for name, exact, values in (("exp_avg", 0.1 * p.grad, SIGNED), ("exp_avg_sq", 1e-3 * p.grad**2, UNSIGNED)):
        eight_bit.rounded(exact, torch.from_numpy(values.values), values is SIGNED)
        np.testing.assert_allclose(state[name], exact, rtol=1e-6)


def test_equally_spaced_codes_are_read_as_they_are_written() -> None:
    for signed in (True, False):
        values, absmax = SimpleNamespace(signed=signed), jnp.array([0.5, 2.0])
        first, count = (-127, 128) if signed else (0, 255)
        codes = np.array([0, 1, 128, 254, 255], np.uint8)
        exact = (codes.astype(float) + first) / count * 2
        np.testing.assert_allclose(
            eight_bit.linear_read(Blockwise(jnp.asarray(codes), absmax), values), exact, rtol=1e-6
        )
        written = eight_bit.linear_write(absmax, jnp.asarray(exact * (1 + 1e-4), jnp.float32), values)
        assert written.codes.tolist() == codes.tolist()
        assert eight_bit.linear_write(absmax, jnp.array([9.0]), values).codes.tolist() == [255]
        assert eight_bit.linear_write(absmax, jnp.array([-9.0]), values).codes.tolist() == [0]


def test_operations_of_an_imported_graph_are_changed_if_the_loss_depends_on_a_parameter_through_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, whole = Spec((2,), "float32"), Spec((2,), "int64")
    inputs = SimpleNamespace(name="w", kind="param"), SimpleNamespace(name="x", kind="input")

    def node(name: str, op: str, *args: Any, of: Any = spec, **kwargs: Any) -> Node:
        line = f"model.py:{len(name)}: {name}"
        return Node(name, op, args, kwargs, of, None, "", line, False)

    table = {"mul": 1, "sin": 2, "cat": 3, "unused": 4, operation_bugs.DETACH: 5, "of_x": 6}
    monkeypatch.setattr(operation_bugs, "TABLE", table)
    nodes = (
        node("a", "mul", Ref("w"), Ref("x")),
        node("xx", "of_x", Ref("x")),
        node("ccc", "cat", (Ref("xx"), {"y": Ref("a")})),
        node("dddd", operation_bugs.DETACH, Ref("a")),
        node("eeeee", "sin", Ref("dddd")),
        node("ffffff", "unused", Ref("a")),
        node("ggggggg", "sin", n=Ref("ccc"), of=(None, spec)),
        node("hhhhhhhh", "mul", Ref("ggggggg"), of=whole),
        node("iiiiiiiii", "mul", Ref("ggggggg")),
        node("jjjjjjjjjj", "unknown", Ref("ggggggg")),
    )
    outputs = {"loss": Ref("iiiiiiiii"), "more": Ref("ffffff"), "others": (Ref("jjjjjjjjjj"),)}
    graph = Graph(inputs, nodes, outputs, {})  # type: ignore[arg-type]
    assert [found.name for found in operation_bugs._differentiated(graph)] == ["a", "ccc", "ggggggg", "iiiiiiiii"]
    other = Graph(inputs, nodes, (Ref("ffffff"), Ref("jjjjjjjjjj")), {})  # type: ignore[arg-type]
    found = operation_bugs._differentiated(other)
    assert [x.name for x in found] == ["a", "ccc", "ffffff", "ggggggg", "jjjjjjjjjj"]
    mutants = {mutant.name: mutant for mutant in operation_bugs.mutants_of(graph, "case")}  # type: ignore[arg-type]
    assert [*mutants] == [f"{op}: {kind}" for op in ("mul", "cat", "sin") for kind in ("values", "gradient")]
    assert mutants["mul: values"].sources == {"model.py:1: a", "model.py:9: iiiiiiiii"}
    assert {mutant.clean() for mutant in mutants.values()} == {"case"}

    def at(source: str) -> Divergence:
        return Divergence("forward", 1, "", source, "", "", (), None, None)

    assert mutants["mul: values"].located_by(at("/x/model.py:9: iiiiiiiii "))
    assert not mutants["mul: values"].located_by(at("model.py:8: iiiiiiiii"))
    assert not mutants["mul: values"].located_by(None)


def test_wrong_operations_are_off_by_a_thousandth_in_values_or_gradient() -> None:
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    factors = 1 + 1e-3 * np.cos(np.arange(1.0, 5)).reshape(2, 2)
    wrong = operation_bugs._with_wrong_values(lambda n, ys, power=1: (n, (ys[0] ** power, ys[1])))
    n, (first, second) = wrong(jnp.array(7), [x, x], power=2)
    assert int(n) == 7
    np.testing.assert_allclose(first, np.square(x * factors), rtol=1e-6)
    np.testing.assert_array_equal(second, x)
    right = operation_bugs._with_wrong_gradient(lambda x: (2 * x, jnp.array(3)))
    value, grad = jax.value_and_grad(lambda x: (right(x)[0] * x).sum())(x)
    assert float(value) == 60
    np.testing.assert_allclose(grad, 2 * x * factors + 2 * x, rtol=1e-6)


def test_planted_bugs_of_a_step_replace_one_part_and_name_where_they_show() -> None:
    clipped = steps.clipped("c", lambda grads, bound: {"w": bound}, bound=3.0)
    assert (clipped.stage, clipped.settings, clipped.clean().clip_norm) == ("clip|update", {}, 3.0)
    assert clipped.case is clipped.clean
    assert steps.clipped("d", lambda grads, bound: grads).clean().clip_norm == 0.01
    before = step.clip_grad_norm
    with clipped.patch():
        grads, norm = step.clip_grad_norm({"w": jnp.array([3.0, 4.0])}, 2.0)
    assert (grads, float(norm)) == ({"w": 2.0}, 5)
    assert step.clip_grad_norm is before
    window = steps.accumulated("w", steps.mean_gradient, "wrong", precision="fp32")
    assert window.settings == {"accumulate": 4, "precision": "fp32"}
    with window.patch():
        assert step.mean_gradient == "wrong"
    assert (window.stage, window.case().clip_norm) == ("", None)
    for mutant, start in (
        (steps.scaled("s", "wrong"), 1024.0),
        (steps.scaled("s", "wrong", 8.0), 8.0),
        (steps.skipping("k", "wrong", steps.MOMENTUM), 2.0**24),
    ):
        assert mutant.settings == {"precision": "fp16", "steps": 9}
        with mutant.around():
            scaler, ours = torch.amp.GradScaler("cpu"), build.dynamic_loss_scale()
            assert (scaler.get_scale(), scaler.get_growth_interval()) == (start, 2)
            assert float(ours.init(None).scale) == start
            with mutant.patch():
                assert "wrong" in (build.dynamic_loss_scale, step._restore_if)
    assert steps.skipping("k", "wrong", steps.MOMENTUM).case().optimizer is steps.MOMENTUM
    rounded = steps.rounded("r", "bf16_params", "wrong")  # type: ignore[arg-type]
    assert rounded.settings == {"precision": "bf16_params", "steps": 20}
    assert rounded.clean().optimizer is steps.SLOW
    with rounded.patch():
        assert step.apply_updates == "wrong"
    assert steps.linear(clip_norm=0.5).clip_norm == 0.5
    assert steps.linear(optimizer=steps.SLOW).optimizer is steps.SLOW


def test_planted_bugs_have_the_stage_and_the_lines_of_their_kind() -> None:
    wrong: dict[str, Any] = {
        "running_x": layers.batch_norm,
        "stopped_x": layers.conv,
        "momentum": layers.gru,
        "b_c": layers.gru,
    }
    made = {x.name: x for x in layers.mutants(lambda: torch.nn.Linear(2, 2), layers.conv, (2,), **wrong)}
    assert [*made] == ["running-x", "stopped-x", "momentum", "b-c"]
    stages = ["buffers", "forward|backward", "buffers", "forward|backward"]
    assert [x.stage for x in made.values()] == stages
    assert [x.lines for x in made.values()] == [layers.batch_norm, None, layers.gru, layers.gru]
    assert len({x.clean for x in made.values()}) == 1
    of_losses = losses.mutants(losses.square, losses.square, losses.padded, mean_x=losses.square, y_z=losses.smooth)
    assert [(x.name, x.lines, x.stage, x.torch) for x in of_losses] == [
        *(("mean-x", None, "forward", "loss"), ("y-z", losses.smooth, "forward", "loss"))
    ]
    draws = kinks.corners(np.random.default_rng(0), (50, 6))
    assert {*draws.flat} == {-1, 0, 1}
    assert draws.dtype == np.float32
    x = jnp.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    for function, values, slopes in (
        (kinks.absolute, [2, 1, 0, 1, 2], [-1, -1, 0, 1, 1]),
        (kinks.leaky, [-0.2, -0.1, 0, 1, 2], [0.1, 0.1, 0.1, 1, 1]),
        (kinks.held, [0, 0, 0, 1, 1], [0, 0, 1, 1, 0]),
        (kinks.inside, [-1, -1, 0, 1, 1], [0, 0, 1, 0, 0]),
    ):
        np.testing.assert_allclose(function(x), values, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(lambda x, function=function: function(x).sum())(x), slopes, rtol=1e-6)


def test_a_mutant_is_located_by_stage_operation_and_lines() -> None:
    def at(stage: str, torch: str, source: str) -> Any:
        return SimpleNamespace(stage=stage, torch=torch, jax_source=source)

    mutant = Mutant("m", CASES["mlp"], CASES["mlp"], "forward|backward", "layer", layers.conv)
    file = "tests/parity/mutants/layer_functions.py"
    first = layers.conv.__code__.co_firstlineno
    count = 5
    for line, inside in ((first - 1, False), (first, True), (first + count - 1, True), (first + count, False)):
        assert mutant.located_by(at("forward", "layer: mm", f"{file}:{line}: text")) is inside
    assert not mutant.located_by(at("forward", "layer", f"other.py:{first}: text"))
    assert not mutant.located_by(at("forwards", "layer", f"{file}:{first}: text"))
    assert not mutant.located_by(at("forward", "a layer", f"{file}:{first}: text"))
    assert not mutant.located_by(None)
    anywhere = Mutant("m", CASES["mlp"], CASES["mlp"], "update")
    assert anywhere.located_by(at("update", "", ""))
