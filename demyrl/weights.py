"""Where a run's first weights come from, and with them the model's shape and its tokenizer.

A source is "" (random weights), "builtin:NAME" (a checkpoint that ships with the package), a folder
in Hugging Face format, or the workdir of another run. A run keeps the small files of its source in
`workdir/source/`, so that it can be continued, exported or talked to when the source is gone.
"""

import importlib.resources
import json
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from demyrl import checkpoint, processes, storage
from demyrl.arrays import TrainState
from demyrl.command import frozen
from demyrl.learn.state import abstract_state, start_state
from demyrl.model.config import AUTO, ModelConfig
from demyrl.model.hf_config import read_config
from demyrl.model.hf_load import load_params
from demyrl.model.sharding import abstract_params, params_sharding
from demyrl.model.transformer import Params, init_params
from demyrl.storage import Place

BUILTIN = "builtin:"
KEPT = "source"  # the folder of a workdir that holds the small files of its source
MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
TEMPLATE = "chat_template.jinja"


def starting_params(
    source: str, model: ModelConfig, mesh: Mesh, seed: int, step: int | None = None
) -> Params:
    """Float32 parameters on the mesh, of the model that `shape_of` says; of a run, those of `step`
    or the newest.

    Raises ValueError when the source is none of the four kinds or holds another model.
    """
    if not source:
        draw = jax.jit(init_params, static_argnums=0, out_shardings=params_sharding(model, mesh))
        return draw(model, jax.random.key(seed))
    folder = folder_of(source)
    if is_workdir(folder):
        return params_of_run(folder, model, mesh, step)
    return load_params(folder, model, params_sharding(model, mesh))


def step_of(source: str) -> int | None:
    """The newest step of a source that is a run; None for other sources."""
    folder = folder_of(source) if source else None
    return checkpoint.latest_step(folder) if folder and is_workdir(folder) else None


def shape_of(source: str, dtype: str) -> ModelConfig:
    """The shape of the model in a source that is not ""; `dtype` is that of its computations."""
    folder = folder_of(source)
    if is_workdir(folder):
        shape = {key: x for key, x in recorded_model(folder).items() if key != "source"}
        return frozen(ModelConfig, {**shape, "dtype": dtype})
    return read_config(folder, dtype)


def compute_dtype(dtype: str) -> str:
    """The data type to compute in: what was asked for, or for "auto" the platform's fastest.

    Loads JAX's devices. On a CPU products are faster in float32 (measured: experiments/LOG.md).
    """
    if dtype != AUTO:
        return dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def tokenizer_of(source: str) -> str:
    """The folder of the tokenizer that belongs to a source."""
    folder = folder_of(source)
    return str(folder / KEPT if is_workdir(folder) else folder)


def folder_of(source: str) -> Place:
    """The folder that holds a source's weights; ValueError says what it should be."""
    if source.startswith(BUILTIN):
        folder = builtin_folder(source)
    else:
        folder = storage.path(source) if storage.is_remote(source) else Path(source).expanduser()
    published = (folder / "config.json").is_file() and not recorded_model(folder)
    if published and storage.is_remote(folder):
        raise ValueError(
            f"the source is {source!r}: weights in Hugging Face format are read from a disk only. "
            f"Copy them to every machine: gcloud storage cp -r {source} models/"
        )
    if published or is_workdir(folder):
        return folder
    raise ValueError(f"the source is {source!r}, {_what_it_is(source, folder)}")


def builtin_folder(source: str) -> Path:
    """The folder of a checkpoint that ships with the package."""
    return Path(str(importlib.resources.files("demyrl") / "assets" / source.split(":", 1)[1]))


def is_workdir(folder: Place) -> bool:
    """Whether a folder is that of a run with checkpoints."""
    return (folder / "checkpoints").is_dir() and bool(recorded_model(folder))


def recorded_model(folder: Place) -> dict[str, Any]:
    """The model section of a run's config; empty where the folder is not that of a run."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    section = config.get("model") if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def _what_it_is(source: str, folder: Place) -> str:
    wanted = (
        "Weights must be on disk: give a folder with config.json and model.safetensors (or its "
        "shards), or the workdir of a run."
    )
    if recorded_model(folder):
        return f"the folder of a run without a checkpoint. {wanted}"
    if folder.is_dir():
        return f"a folder with neither config.json nor checkpoints/. {wanted}"
    source = source.rstrip("/").removeprefix("https://huggingface.co/").removeprefix("hf://")
    if source.count("/") == 1 and not source.startswith((".", "~", "/")):
        name = source.split("/")[1]
        return (
            "which looks like the name of a model on a hub, and nothing is downloaded here. "
            f"{wanted} Where there is a network, `hf download {source} --local-dir {name}` fetches "
            f"it; then {name} is the source."
        )
    return f"and there is no such folder. {wanted}"


def first_state(
    workdir: Place,
    source: str,
    model: ModelConfig,
    mesh: Mesh,
    seed: int,
    optimizer: optax.GradientTransformation,
    offload: bool = False,
) -> tuple[TrainState, checkpoint.Restored | None]:
    """The state that a run goes on from, and the checkpoint it is from; a new state without one.

    The source is not read where there is a checkpoint, so two states never exist at a time.
    """
    abstract = abstract_state(abstract_params(model, mesh), optimizer, offload)
    restored = checkpoint.restore(workdir, abstract)
    if restored is not None:
        return restored.state, restored
    return start_state(starting_params(source, model, mesh, seed), optimizer, offload), None


def params_of_run(folder: Place, model: ModelConfig, mesh: Mesh, step: int | None = None) -> Params:
    """The parameters of a run's checkpoint of `step`, or of its newest that is intact."""
    restored = checkpoint.restore_params(folder, abstract_params(model, mesh), step)
    if restored is None and step is not None:
        there = ", ".join(map(str, checkpoint.steps(folder))) or "none"
        raise ValueError(
            f"{folder} has no intact checkpoint of step {step}: the steps there are {there}."
        )
    if restored is None:
        raise ValueError(f"model.source is {str(folder)!r}, but no intact checkpoint is in it.")
    if processes.is_first():
        print(f"weights of {folder}, step {restored.step}", flush=True)
    return restored.state


def keep_source(workdir: Place, source: str, tokenizer: str, template: str) -> None:
    """Copies the source's config.json and the tokenizer's files into `workdir/source/`.

    `template` is the text of the chat template in use, which takes the place of the tokenizer's.
    """
    kept = workdir / KEPT
    storage.make_folder(kept)
    builtin = tokenizer.startswith(BUILTIN)
    folder = builtin_folder(tokenizer) if builtin else storage.path(tokenizer).expanduser()
    origins = dict.fromkeys(TOKENIZER_FILES, folder)
    if source:
        own = storage.path(tokenizer_of(source))
        # generation_config.json names end tokens by id: another tokenizer has other ids.
        origins |= dict.fromkeys(MODEL_FILES if own == folder else MODEL_FILES[:1], own)
    for name, origin in origins.items():
        if (origin / name).is_file():
            storage.copy(origin / name, kept / name)
    storage.write_text(kept / TEMPLATE, template)
