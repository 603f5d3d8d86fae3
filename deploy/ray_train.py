"""A run as a job of Ray Train: python deploy/ray_train.py --workers 2 --gpu -- gpt-stdlib --out /shared/runs/mine …

Ray starts the processes and tells JAX of them, `jaxtrain train` does the rest. After a worker is lost Ray starts all
of them again, and the run goes on from its last checkpoint: its folder must be one that all workers see.
"""

import argparse
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig


def train(config: dict[str, Any]) -> None:
    """On each worker. Raises `RuntimeError` where the run did not end well, for Ray to count as a failure."""
    from jaxtrain.cli import main

    if status := main(["train", *config["args"], "--resume", "auto"]):
        raise RuntimeError(f"jaxtrain train ended with {status}: what it says stands in the workers' logs")


def trainer(args: list[str], workers: int, gpu: bool, failures: int) -> JaxTrainer:
    """The job: `args` are those of `jaxtrain train`."""
    return JaxTrainer(
        train,
        train_loop_config={"args": args},
        # Without it Ray tells JAX nothing of the other workers; JAX_PLATFORMS says where they compute.
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=RunConfig(
            name="jaxtrain",
            failure_config=FailureConfig(max_failures=failures),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cuda" if gpu else "cpu"}},
        ),
    )


def main() -> None:
    """Start it and wait for its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one GPU where --gpu is given")
    parser.add_argument("--gpu", action="store_true", help="train on GPUs, not on the CPU")
    parser.add_argument("--failures", type=int, default=3, help="workers lost after which Ray gives up")
    parser.add_argument("args", nargs="+", help="after --: what jaxtrain train is given, --out among it")
    asked = parser.parse_args()
    trainer(asked.args, asked.workers, asked.gpu, asked.failures).fit()


if __name__ == "__main__":
    main()
