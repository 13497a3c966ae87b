"""Where a run's first weights come from: nothing, a checkpoint folder, or another run's workdir."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from demyrl import checkpoint
from demyrl.model.config import ModelConfig
from demyrl.model.hf import builtin_folder, load_params
from demyrl.model.sharding import params_sharding
from demyrl.model.transformer import Params, init_params, map_table


def starting_params(source: str, model: ModelConfig, mesh: Mesh, seed: int) -> Params:
    """Float32 parameters on the mesh.

    `source` is "" for random weights, "builtin:NAME" for a checkpoint that ships with the package,
    a folder in Hugging Face format, or the workdir of a run. Raises ValueError when it is none of
    them or holds another model.
    """
    sharding = params_sharding(model, mesh)
    if not source:
        draw = jax.jit(init_params, static_argnums=0, out_shardings=sharding)
        return draw(model, jax.random.key(seed))
    folder = builtin_folder(source) if source.startswith("builtin:") else Path(source)
    if (folder / "checkpoints").is_dir():
        return params_of_run(folder, model, sharding)
    if (folder / "config.json").is_file():
        return load_params(folder, model, sharding)
    raise ValueError(
        f"model.source is {source!r}, which is neither the workdir of a run nor a folder with "
        "config.json and model.safetensors. Weights must be on disk: give such a folder, or '' to "
        "start from random weights."
    )


def params_of_run(folder: Path, model: ModelConfig, sharding: Params) -> Params:
    """The parameters of a run's newest intact checkpoint."""
    shapes = map_table(lambda row: row.shape, model)
    abstract = jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape, "float32", sharding=place),
        shapes,
        sharding,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    restored = checkpoint.restore_params(folder, abstract)
    if restored is None:
        raise ValueError(f"model.source is {str(folder)!r}, but no intact checkpoint is in it.")
    print(f"weights of {folder}, step {restored.step}", flush=True)
    return restored.state
