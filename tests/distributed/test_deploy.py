"""The files in deploy/, as far as they can be checked without a cluster."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from jaxtrain.cli.named_recipe import recipe_name
from jaxtrain.cli.train import Train, parse_recipe
from jaxtrain.distributed.processes import initialize_arguments
from jaxtrain.flags import parse_known
from jaxtrain.recipes import RECIPES

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_pods_of_the_job_set_find_each_other() -> None:
    """https://jobset.sigs.k8s.io: a pod is JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN, the subdomain the job set's name."""
    jobset = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    name, port = jobset["metadata"]["name"], container["ports"][0]["containerPort"]
    assert environment["JAX_COORDINATOR_ADDRESS"] == f"{name}-{group['name']}-0-0.{name}:{port}"
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == int(environment["JAX_NUM_PROCESSES"])
    place = next(entry for entry in container["env"] if entry["name"] == "JAX_PROCESS_ID")
    # https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    assert (
        place["valueFrom"]["fieldRef"]["fieldPath"]
        == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )
    assert initialize_arguments({**environment, "JAX_PROCESS_ID": "1"}) == {
        "coordinator_address": environment["JAX_COORDINATOR_ADDRESS"],
        "num_processes": 2,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
    }


def test_the_job_set_stops_retrying_only_on_wrong_usage() -> None:
    jobset = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())["spec"]
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    # A pod failure policy requires both.
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    (set_rule,) = jobset["failurePolicy"]["rules"]
    assert (set_rule["action"], set_rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    mounted = {m["name"] for m in job["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {v["name"] for v in job["template"]["spec"]["volumes"]}


def test_the_job_set_trains_a_recipe() -> None:
    jobset = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["jaxtrain", "train"]
    name, flags = recipe_name(container["args"])
    options, rest = parse_known(Train(), flags, "train")
    assert (options.resume, rest) == ("auto", [])
    assert parse_recipe(RECIPES[name], name, options, rest) == RECIPES[name]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
@pytest.mark.parametrize("script", ["slurm.sbatch", "gpu-check"])
def test_scripts_pass_shellcheck(script: str) -> None:
    subprocess.run(["shellcheck", DEPLOY / script], check=True)


def test_the_batch_script_resumes_after_a_save() -> None:
    """The options precede the first command, because Slurm ignores later ones."""
    script = (DEPLOY / "slurm.sbatch").read_text()
    before, _, after = script.partition("set -euo pipefail")
    assert "#SBATCH" not in after
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", before, re.MULTILINE))
    assert before.count("#SBATCH") == len(options)
    # The signal goes to the job steps and not only to the shell ("B:"), early enough to save.
    assert re.fullmatch(r"TERM@\d+", options["signal"])
    assert "requeue" in options
    assert "--resume auto" in after
    assert '"$status" == 143' in after


@pytest.mark.skipif(not find_spec("ray"), reason="needs Ray: pip install 'ray[train]'")
def test_the_ray_job_trains(tmp_path: Path) -> None:
    program = [sys.executable, DEPLOY / "ray_train.py", "--workers", "2", "--", "digits-mlp"]
    settings = {"PYTHONPATH": str(DEPLOY.parent), "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [*program, "--hidden", "8", "--steps", "5", "--out", tmp_path / "run"],
        env={k: v for k, v in os.environ.items() if not k.startswith(("JAX_NUMPY", "XLA"))} | settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "run" / "config.json").read_text())["devices"]) == 2
    assert (tmp_path / "run" / "report.html").exists()
