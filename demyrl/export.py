"""A run's weights, or an imported checkpoint, as a folder in Hugging Face format.

    python -m demyrl.export --workdir=runs/x --out=exports/x [--dtype=bfloat16] [--step=40]
    python -m demyrl.export --source=models/qwen3-4b --out=exports/copy [--dtype=bfloat16]

Of a run: its newest intact checkpoint, in float32 unless told otherwise, with the tokenizer and the
chat template it was trained with. Of a source: its own tensors, bit for bit, unless --dtype is
given.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from demyrl import command, processes, storage
from demyrl.model.config import ModelConfig
from demyrl.model.hf_load import dtypes_of, load_params
from demyrl.model.hf_save import CODES, Written, whole_folder, write_checkpoint
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.storage import Place
from demyrl.weights import (
    KEPT,
    TEMPLATE,
    TOKENIZER_FILES,
    folder_of,
    is_workdir,
    params_of_run,
    shape_of,
)

FILES = (*TOKENIZER_FILES, TEMPLATE, "generation_config.json")
TEMPLATES = "chat_templates"  # a folder: further templates, which a caller may ask for by name


def export_run(workdir: Place, out: Path, dtype: str | None, step: int | None) -> Written:
    """Writes what a run has learned until a step, None for the newest that is intact."""
    if not is_workdir(workdir):
        raise ValueError(
            f"--workdir={workdir} is not the folder of a run with checkpoints. Use --source for a "
            "folder in Hugging Face format."
        )
    model, kept = shape_of(str(workdir), "float32"), workdir / KEPT
    config = read_json(kept / "config.json") if (kept / "config.json").is_file() else None
    with whole_folder(out) as writing:
        params = params_of_run(workdir, model, wide_mesh(model), step)
        written = write_checkpoint(writing, params, model, config, dtype or "float32")
        copy_files(kept, writing)
        settle_template(writing)
    return written


def export_source(source: str, out: Path, dtype: str | None) -> Written:
    """Writes a checkpoint as it was imported; tensors keep their types when `dtype` is None."""
    folder = folder_of(source)
    if is_workdir(folder):
        raise ValueError(f"--source={source} is the folder of a run: use --workdir={source}.")
    model, config = shape_of(source, "float32"), read_json(folder / "config.json")
    with whole_folder(out) as writing:
        params = load_params(folder, model, params_sharding(model, wide_mesh(model)))
        written = write_checkpoint(writing, params, model, config, dtype or dtypes_of(folder))
        copy_files(folder, writing)
    return written


def require_one_process() -> None:
    """Raises ValueError when this is one of several processes, joined or about to be."""
    if processes.count() > 1 or processes.wanted(os.environ) is not None:
        raise ValueError(
            "export writes the whole model from one process, and this is one of several: unset "
            f"DEMYRL_PROCESSES, {', '.join(processes.VARIABLES)}, and run it once."
        )


def wide_mesh(model: ModelConfig) -> Mesh:
    """A mesh that spreads the parameters over as many devices as divide the model's width."""
    devices = next(n for n in range(jax.device_count(), 0, -1) if model.width % n == 0)
    return make_mesh(MeshConfig(devices, 1, 1))


def copy_files(folder: Place, out: Path) -> None:
    """Copies what a checkpoint has besides its weights and config.json, where it is there."""
    for name in FILES:
        if (folder / name).is_file():
            storage.copy(folder / name, out / name)
    if (folder / TEMPLATES).is_dir():
        shutil.copytree(folder / TEMPLATES, out / TEMPLATES)


def settle_template(out: Path) -> None:
    """Lets tokenizer_config.json name no other chat template than the file beside it.

    Which of the two is taken differs between servers, and both must render what was trained.
    """
    path = out / "tokenizer_config.json"
    content = read_json(path) if path.is_file() else {}
    if "chat_template" in content and (out / TEMPLATE).is_file():
        content["chat_template"] = (out / TEMPLATE).read_text(encoding="utf-8")
        text = json.dumps(content, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Place) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments; a message and exit code 2 when they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m demyrl.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--workdir", type=storage.path, help="the folder of a run")
    origin.add_argument("--source", help="a folder in Hugging Face format, or builtin:tiny")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument("--dtype", choices=list(CODES), help="of all tensors")
    parser.add_argument("--step", type=int, help="of the run's checkpoint; the newest if not given")
    arguments = parser.parse_args(argv)
    if arguments.source and arguments.step is not None:
        parser.error("--step is of a run's checkpoint: it goes with --workdir, not with --source")
    return arguments


def main() -> None:
    """Exports what the command line says, and prints what was written."""
    asked = parse()
    require_one_process()
    if asked.workdir:
        written = export_run(asked.workdir, asked.out, asked.dtype, asked.step)
    else:
        written = export_source(asked.source, asked.out, asked.dtype)
    dtype = asked.dtype or ("float32" if asked.workdir else "the source's types")
    files = "1 file" if written.files == 1 else f"{written.files} files"
    print(
        f"wrote {asked.out}: {written.parameters:,} parameters in {dtype}, {files} of weights, "
        f"{written.bytes:,} bytes"
    )


if __name__ == "__main__":
    command.end(main)
