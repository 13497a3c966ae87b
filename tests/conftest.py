"""Before any test imports JAX: eight virtual CPU devices, and shape checks on every call.

Programs are compiled without optimization: tests compile many and run each a few times. What is
compiled is shared by all workers of a run and by the commands they start, and forgotten after it.
"""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "device_count" not in flags:
    flags += " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = flags.strip()

if "DEMYRL_CACHE" not in os.environ:
    os.environ["DEMYRL_CACHE"] = tempfile.mkdtemp(prefix="demyrl-tests-")
    atexit.register(shutil.rmtree, os.environ["DEMYRL_CACHE"], ignore_errors=True)

from jaxtyping import install_import_hook  # noqa: E402

# Not arrays.py: JAX rebuilds pytree dataclasses with leaves of any rank.
CHECKED = ("demyrl.model", "demyrl.learn", "demyrl.rollout")
install_import_hook(CHECKED, "beartype.beartype")

from demyrl import command  # noqa: E402

command.enable_compilation_cache()
