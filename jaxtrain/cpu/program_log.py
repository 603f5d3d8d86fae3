"""What XLA:CPU logs when it loads compiled programs."""

import importlib.metadata
from collections.abc import MutableMapping


def hide_log_of_loaded_programs(environment: MutableMapping[str, str]) -> None:
    """Keep jaxlib 0.10.1 from logging two errors for each program of the persistent cache, unless the user has chosen.

    They say that the CPU lacks features, which are preferences of LLVM and no instructions. jaxlib reads the variable
    when it is imported. What fails is an exception, with or without log.

    Args:
      environment: The variables of the process.

    Example:
      >>> environment = {"TF_CPP_MIN_LOG_LEVEL": "0"}
      >>> hide_log_of_loaded_programs(environment)
      >>> environment
      {'TF_CPP_MIN_LOG_LEVEL': '0'}
    """
    if importlib.metadata.version("jaxlib") == "0.10.1":
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
