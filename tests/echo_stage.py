"""A stage for test_command: prints its config, or ends as the config says."""

import os
import signal
import sys
from pathlib import Path

from ml_collections import ConfigDict

from demyrl import command


def echo(config: ConfigDict, workdir: Path) -> None:
    """Prints what it was given and whether JAX was loaded for it."""
    ends = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM}
    if config.end in ends:
        os.kill(os.getpid(), ends[config.end])
    if config.end == "refused":
        raise ValueError("slots is 3: use an even number.")
    if config.end == "broken":
        int("three")
    if config.end == "broken in jax":
        import jax.numpy as jnp

        jnp.zeros(3).reshape(2)
    print(command.config_json(config), workdir, "jax" in sys.modules)


if __name__ == "__main__":
    command.run(echo)
