"""`deploy/gpu-check`: a part that hangs or fails costs only its own limit, and every part runs to its end on a CPU."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import attention, correct, passes, precisions, resume, steps
from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.summary import summary
from benchmarks.job import Job
from jaxtrain.passes import policy
from jaxtrain.step import LossProgram

COMMAND = Path(__file__).parents[2] / "deploy" / "gpu-check"
EMIT = "import json; print(json.dumps({'what': 'figure', 'step_s': 0.5}), flush=True); "
# Its child has a session of its own, as the workers of benchmarks have.
HANG = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); "
    "print(json.dumps({'what': 'child', 'pid': child.pid}), flush=True); time.sleep(60)"
)
LEAVE = HANG.replace(", start_new_session=True", "").removesuffix("; time.sleep(60)")


@pytest.fixture
def on_machine(monkeypatch):
    """Skip the question what the machine is, which imports both frameworks."""
    machine = {"what": "environment", "platform": "cpu"}
    monkeypatch.setattr(gpu_check, "_machine", lambda options, environment: machine)


def results(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_that_hangs_or_fails_costs_only_its_own_limit(on_machine, tmp_path, capsys):
    parts = [
        Part(1, "hangs", 0.5, ("-c", EMIT + HANG)),
        Part(2, "fails", 10.0, ("-c", f"{EMIT}raise ValueError('wrong answer')")),
        Part(3, "ends", 5.0, ("-c", f"{EMIT}print('noise'); {LEAVE}")),
    ]
    begin = time.monotonic()
    assert gpu_check.main(["--rehearse", str(tmp_path)], parts) == 1
    found = results(tmp_path)
    ends = {x["part"]: x["outcome"] for x in found if x["what"] == "end"}
    assert ends == {1: "stopped after 2 s", 2: "failed: ValueError: wrong answer", 3: "done"}
    assert [x["part"] for x in found if x["what"] == "figure"] == [1, 2, 3]
    assert time.monotonic() - begin < 20  # a process that is left behind has the output still open
    children = [x["pid"] for x in found if x["what"] == "child"]
    assert [is_running(child) for child in children] == [False, False]
    assert (tmp_path / "part-3.log").read_text() == "noise\n"
    page = (tmp_path / "summary.md").read_text()
    assert all(line in page for line in ("A rehearsal on a CPU", "## 1. hangs", "| step_s |", *ends.values()))
    assert "stopped after 2 s" in capsys.readouterr().out
    # The other parts in a second call: results of the first stay.
    assert gpu_check.main(["--rehearse", "--parts", "3", str(tmp_path)], parts) == 0
    assert len([x for x in results(tmp_path) if x["what"] == "figure"]) == 4
    assert (tmp_path / "summary.md").read_text().count("| step_s |") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "1-9"], "there are the parts 1, 2, 3, 4, 5, 6, 7"),
        (["--parts", "first"], "is no list of numbers: write, for example, --parts 1-4"),
        (["/dev/null/results"], "cannot be made (Not a directory): name another folder"),
    ],
)
def test_wrong_usage_is_one_line_with_the_remedy(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_machine_without_a_gpu_is_refused(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    completed = subprocess.run([COMMAND, tmp_path], capture_output=True, text=True, env=environment, check=False)
    assert completed.returncode == 2
    assert completed.stderr == "gpu-check: JAX runs on the cpu here: use a machine with a GPU, or --rehearse\n"
    assert not (tmp_path / "results.jsonl").exists()


def test_the_limits_fit_into_twelve_minutes_and_into_two_calls_of_nine(on_machine, tmp_path, monkeypatch):
    limits = {part.number: part.limit_s for part in PARTS}
    assert [*limits] == [*range(1, 8)]
    for call in ((1, 2, 3, 4), (5, 6, 7)):
        assert sum(limits[number] for number in call) + 20 <= 9 * 60
    clock, given = [0.0], []

    def run_limited(arguments, limit_s, log, on_result, environment):
        given.append((limit_s, arguments[-1]))
        clock[0] += limit_s
        return "stopped"

    monkeypatch.setattr(gpu_check, "run_limited", run_limited)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    assert gpu_check.main([str(tmp_path)]) == 1
    assert clock[0] == 12 * 60
    assert [limit for limit, _ in given[:-1]] == [part.limit_s for part in PARTS[:-1]]
    assert [float(given[i][1]) for i in (1, 6)] == [limits[2] - 10, given[-1][0] - 10]
    assert given[-1][0] >= 100


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_attention_that_is_wrong_is_reported(capsys, monkeypatch):
    shape = attention.Shape(1, 32, 2, 1, segments=2, window=16)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert attention.check(attention.Shape(1, 32, 2, 1, padding=0.25, softcap=1.0), "float32")
        printed(capsys)
        assert attention.check(shape, "bfloat16")
        right = attention.attention
        monkeypatch.setattr(attention, "attention", lambda *args, **kwargs: right(*args, **{**kwargs, "window": 8}))
        assert not attention.check(shape, "bfloat16")
    first, second = printed(capsys)
    assert (first["right"], second["right"]) == (True, False)
    assert max(first[name] for name in ("output", "q", "k", "v")) < 2.0**-7 < second["output"]


def test_a_pass_is_left_out_of_programs_that_are_traced_meanwhile():
    program = LossProgram(lambda params, batch, rng: None, policy("fp8"))
    names = [x.name for x in passes.gpu_passes()]
    assert names[-1] == "fuse_casts"
    for name in names:
        rewrites = {**program.rewrites(), **program.of_gradient(in_loop=False)}
        with passes.without(name):
            left = {**program.rewrites(), **program.of_gradient(in_loop=False)}
        assert rewrites.keys() - left.keys() == {name}


class Counted:
    """In place of `pairs.Steps`: a step is the passes of its program, and their number its predicted seconds."""

    case = None

    def __init__(self, workload, sizes):
        self.job, self.whole = Job(workload, "jax", "bf16", feature="loop", sizes=sizes), {}

    def variant(self, step, precision="bf16"):
        whole = self.whole.setdefault(precision, step)
        losses = [3.0, 2.0, 1.0, *range(30)] if step == whole else [3.0, 1.5, 1.25, *range(30)]
        return SimpleNamespace(losses=losses, predicted={"predicted_s": len(step)}, precision=precision)


def passes_of(case, job):
    program = LossProgram(lambda params, batch, rng: None, policy(job.precision))
    return {*program.rewrites(), *program.of_gradient(in_loop=False), job.feature}


def test_each_pass_is_measured_beside_the_whole_program_of_its_precision(capsys, monkeypatch):
    monkeypatch.setattr(passes, "Steps", Counted)
    monkeypatch.setattr(passes, "train_step", passes_of)
    monkeypatch.setattr(passes, "beside", lambda base, other: {"base": base.precision, "base_s": base.predicted})
    passes.main(rehearse=True)
    found = printed(capsys)
    assert [x["without"] for x in found] == [x.name for x in passes.gpu_passes()]
    for x in found:
        assert x["base"] == x["precision"] == ("fp8" if x["without"] in passes.IN_8_BITS else "bf16")
        count = x["base_s"]["predicted_s"]
        assert (x["losses_apart"], x["predicted_of_base"]) == (0.5, (count - 1) / count)
        assert x["predicted_peak_of_base"] is None


@pytest.mark.parametrize(
    ("scales", "skipped", "losses", "right"),
    [
        ([4, 2, 1, 1], [True, True, False, False], [3, 3, 3, 2], True),
        ([4, 2, 2, 1], [True, True, False, False], [3, 3, 3, 2], False),
        ([1, 1, 1, 1], [False, False, False, False], [3, 3, 3, 2], False),
        ([4, 2, 1, 0.5], [True, True, True, True], [3, 3, 3, 2], False),
        ([4, 2, 1, 1], [True, True, False, False], [3, 3, 3, 3], False),
    ],
)
def test_precisions_are_measured_beside_bf16_and_a_scale_that_does_not_follow_overflows_fails(
    scales, skipped, losses, right, capsys, monkeypatch
):
    seen = [
        {"loss_scale": scale, "skipped": skip, "loss": loss}
        for scale, skip, loss in zip(scales, skipped, losses, strict=True)
    ]
    case, given = SimpleNamespace(loss_fn="loss", optimizer=SimpleNamespace(jax="optimizer")), []
    monkeypatch.setattr(Counted, "states", lambda self, step, count: seen, raising=False)
    monkeypatch.setattr(Counted, "case", case)
    monkeypatch.setattr(precisions, "Steps", Counted)
    monkeypatch.setattr(precisions, "train_step", passes_of)
    monkeypatch.setattr(
        precisions, "jaxtrain_step", lambda *args, **options: given.append((*args, options["precision"]))
    )
    monkeypatch.setattr(precisions, "beside", lambda base, other: {"base": base.precision, "other": other.precision})
    assert precisions.main(rehearse=True) == (not right)
    assert given == [("loss", "optimizer", "fp16")]
    *variants, last = printed(capsys)
    assert [(x["other"], x["micro_batches"], x["feature"]) for x in variants] == [*precisions.VARIANTS]
    assert {(x["base"], x["first_loss"], x["loss_after"], x["bf16_loss_after"]) for x in variants} == {
        ("bf16", 3.0, precisions.STEPS - 4, precisions.STEPS - 4)
    }
    assert (last["what"], last["right"], last["skips"]) == ("fp16 with skips", right, sum(skipped))


@pytest.mark.parametrize(
    ("error", "status", "failed"),
    [(correct.BOUND, 0, False), (2 * correct.BOUND, 0, True), (float("nan"), 0, True), (0.0, 1, True)],
)
def test_a_wrong_program_or_a_failing_test_fails(error, status, failed, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(correct, "PROGRAMS", {"first": error, "second": 0.0})
    monkeypatch.setattr(correct, "error", lambda program: program)
    monkeypatch.setattr(
        correct.subprocess, "run", lambda *args, env, **_: ran.append(env) or SimpleNamespace(returncode=status)
    )
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert correct.main() == failed
    assert [x["right"] for x in printed(capsys)] == [error <= correct.BOUND, True]
    assert [env["JAX_PLATFORMS"] for env in ran] == ["cuda"]


def test_the_outcome_of_each_test_is_printed_once(capsys):
    def report(when, outcome, text):
        failed = outcome == "failed"
        return SimpleNamespace(
            nodeid=f"{when} {outcome}", when=when, outcome=outcome, failed=failed, longreprtext=text, duration=0.5
        )

    failure = "def test():\nE  first\nE  last\n"
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("setup", "skipped"), ("call", "failed")):
        print(".", end="")  # as pytest
        correct.Lines().pytest_runtest_logreport(report(when, outcome, failure))
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(x["test"], x["reason"]) for x in found] == [
        ("call passed", ""),
        ("setup skipped", ""),
        ("call failed", "E  last"),
    ]
    assert {x["seconds"] for x in found} == {0.5}


@pytest.mark.parametrize("differing", [None, *resume.SETTINGS])
def test_bits_that_differ_after_a_resume_fail_only_where_they_are_promised(differing, capsys, monkeypatch):
    class Trained:
        def __init__(self, digest):
            self.digest = digest

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def communicate(self):
            return f"{self.digest}\n", None

    def start(setting, folder, *flags, resumed):
        return Trained("other" if resumed and setting == differing else setting)

    monkeypatch.setattr(resume, "start", start)
    assert resume.main(rehearse=True) == (differing == "deterministic")
    assert {x["setting"]: x["same_bits"] for x in printed(capsys)} == {
        setting: setting != differing for setting in resume.SETTINGS
    }


def test_a_resumed_run_reads_the_state_of_the_middle(tmp_path):
    sizes = resume.SIZES[True]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        whole = resume.train("deterministic", tmp_path, resumed=False, sizes=sizes)
        assert resume.train("deterministic", tmp_path, resumed=True, sizes=sizes) == whole
        (tmp_path / "deterministic.npz").rename(tmp_path / "default.npz")
        other = {**sizes, "rows": 2}  # another batch
        assert resume.train("default", tmp_path, resumed=True, sizes=other) != whole


def test_rows_are_printed_once_as_soon_as_their_group_is_measured(capsys, monkeypatch):
    lines = []

    def measure(suite, budget, progress, note, save):
        figures = {"rows": [], "ratios": [], "ceilings": [{"what": "copy"}]}
        monkeypatch.setattr(steps, "figures_of", lambda *_: figures)
        for number in range(2):
            figures["rows"].append({"number": number})
            save(None)
            lines.append(printed(capsys))
        return dataclasses.make_dataclass("Results", ["notes"])(["reduced"])

    monkeypatch.setattr(steps, "measure", measure)
    steps.main(["gpt2", "--seconds", "10", "--rehearse"])
    ceiling = {"what": "ceiling", "of": "copy"}
    assert lines == [[{"what": "row", "number": 0}, ceiling], [{"what": "row", "number": 1}]]
    assert printed(capsys) == [{"what": "note", "note": "reduced"}]


def test_the_summary_tells_predictions_from_measurements():
    found = [{"part": 0, "what": "environment", "rehearsal": False}, {"part": 2, "what": "start"}]
    found += [{"part": 2, "what": "row", "step_s": 0.0362, "predicted_s": 0.0253, "right": False, "empty": None}]
    page = summary(found, {2: "GPT-2"})
    assert "Figures are measured, but for those called predicted." in page
    assert "rehearsal on a CPU" not in page
    assert "| step_s | predicted_s | right |\n| --- | --- | --- |\n| 0.0362 | 0.0253 | no |" in page


@pytest.mark.nightly
def test_every_part_runs_to_its_end_in_a_rehearsal(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "XLA_FLAGS": ""}
    completed = subprocess.run([COMMAND, "--rehearse", tmp_path], capture_output=True, text=True, env=environment)
    found = results(tmp_path)
    assert {x["part"]: x["outcome"] for x in found if x["what"] == "end"} == dict.fromkeys(range(1, 8), "done")
    assert completed.returncode == 0
    kinds = {
        1: {"compiled program", "test"},
        2: {"row", "ratio", "ceiling"},
        3: {"attention beside float64", "attention, forward and backward"},
        4: {"without a pass"},
        5: {"beside bf16", "fp16 with skips"},
        6: {"resumed"},
        7: {"row", "ratio", "ceiling"},
    }
    for part, expected in kinds.items():
        assert expected <= {x["what"] for x in found if x["part"] == part}
    assert {x["workload"] for x in found if x["what"] == "row" and x["part"] == 7} == {
        "llama-160m",
        "resnet18",
        "vit-s",
    }
    assert all(x["right"] for x in found if "right" in x)
