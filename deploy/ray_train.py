"""Train with Ray Train: python deploy/ray_train.py --workers 2 --gpu -- gpt-stdlib --out /shared/runs/mine …

Ray starts the processes and configures JAX; each process runs `jaxtrain train`. If a worker is lost, Ray restarts all
of them, and the run continues from its last checkpoint. The run folder must be shared by all workers.
"""

import argparse
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig


def train(config: dict[str, Any]) -> None:
    """Train on a worker; raise `RuntimeError` if the run fails, so that Ray counts a failure."""
    from jaxtrain.cli import main

    if status := main(["train", *config["args"], "--resume", "auto"]):
        raise RuntimeError(f"jaxtrain train exited with status {status}: see the logs of the workers")


def trainer(args: list[str], workers: int, gpu: bool, failures: int) -> JaxTrainer:
    """Return the job; `args` are the arguments of `jaxtrain train`."""
    return JaxTrainer(
        train,
        train_loop_config={"args": args},
        # Required for Ray to connect the workers, also on CPUs; JAX_PLATFORMS selects the platform.
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=RunConfig(
            name="jaxtrain",
            failure_config=FailureConfig(max_failures=failures),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cuda" if gpu else "cpu"}},
        ),
    )


def main() -> None:
    """Start the job and wait for its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="number of processes, each with one GPU if --gpu is set")
    parser.add_argument("--gpu", action="store_true", help="train on GPUs instead of CPUs")
    parser.add_argument("--failures", type=int, default=3, help="number of failures before Ray gives up")
    parser.add_argument("args", nargs="+", help="after --: arguments of jaxtrain train, including --out")
    arguments = parser.parse_args()
    trainer(arguments.args, arguments.workers, arguments.gpu, arguments.failures).fit()


if __name__ == "__main__":
    main()
