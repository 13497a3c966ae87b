"""Checkpoints of a run: saved whole or not at all, checked when read, restored bit for bit.

    workdir/checkpoints/step_00000012/
        state/            the arrays, written by orbax
        checkpoint.json   what the caller wants back (`extra`), the shape of every array, and the
                          size and digest of every file under state/

A checkpoint is written into a folder named `writing_...`, flushed to the disk and renamed as a
whole; older ones are deleted last. One process writes; with several, the collective part is what
orbax does in `_write_arrays`, and everything else belongs to the first of them.
"""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

FORMAT = 1
_MANIFEST = "checkpoint.json"


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held."""

    state: PyTree
    extra: dict[str, Any]
    step: int


class CheckpointNotSaved(RuntimeError):
    """The disk could not take a checkpoint; the earlier ones are as they were."""


class _Damaged(Exception):
    """The files of a checkpoint are not those that were saved; says in what."""


def save(
    workdir: str | os.PathLike, step: int, state: PyTree, extra: dict[str, Any], keep: int
) -> None:
    """Saves a tree of jax arrays; when it returns, the checkpoint is on the disk.

    `extra` is JSON. The newest `keep` checkpoints up to this step remain. Raises
    CheckpointNotSaved when the disk is full.
    """
    if keep < 1:
        raise ValueError(f"{keep} checkpoints are to be kept: keep at least 1.")
    assert jax.process_count() == 1, "checkpoints of several processes are not written yet"
    root = _root(workdir)
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    if needed > shutil.disk_usage(root).free:
        raise _not_saved(root, step, needed)
    writing = root / f"writing_{step:08d}"
    try:
        _write(writing, step, state, extra)
    except Exception as error:
        shutil.rmtree(writing, ignore_errors=True)
        if _disk_is_full(error):
            raise _not_saved(root, step, needed) from error
        raise
    _publish(writing, root / f"step_{step:08d}")
    for old in [folder for folder in _newest_first(root) if _step_of(folder) <= step][keep:]:
        _delete(old)


def like(state: PyTree) -> PyTree:
    """What `restore` needs to know of a state: shapes, dtypes and shardings, no values."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def restore(workdir: str | os.PathLike, abstract_state: PyTree) -> Restored | None:
    """The newest intact checkpoint, or None when there is none.

    Leaves of `abstract_state` have shape, dtype and maybe sharding, which the restored arrays
    get; without one they go to the first device. A damaged checkpoint is passed over with a
    warning. Raises ValueError, naming the leaf, when the checkpoint holds another tree.
    """
    return _restore(workdir, abstract_state, partial=False, step=None)


def restore_params(
    workdir: str | os.PathLike, abstract_params: PyTree, step: int | None = None
) -> Restored | None:
    """Like `restore`, but reads only what the saved state has under `params`.

    With a `step`, only the checkpoint of that step will do.
    """
    restored = _restore(workdir, {"params": abstract_params}, partial=True, step=step)
    return restored and dataclasses.replace(restored, state=restored.state["params"])


def latest_step(workdir: str | os.PathLike) -> int | None:
    """The step of the newest complete checkpoint; its arrays are not read."""
    return next(_complete_steps(workdir), None)


def steps(workdir: str | os.PathLike) -> list[int]:
    """The steps of the complete checkpoints, oldest first; their arrays are not read."""
    return sorted(_complete_steps(workdir))


def _complete_steps(workdir: str | os.PathLike) -> Iterator[int]:
    for folder in _newest_first(_root(workdir)):
        try:
            _complete_manifest(folder)
        except _Damaged:
            continue
        yield _step_of(folder)


def _restore(
    workdir: str | os.PathLike, abstract: PyTree, partial: bool, step: int | None
) -> Restored | None:
    skipped = []
    found = None
    for folder in _newest_first(_root(workdir)):
        if step not in (None, _step_of(folder)):
            continue
        try:
            found = folder, _verified_manifest(folder)
            break
        except _Damaged as damage:
            skipped.append(f"{folder} ({damage})")
    if skipped:
        instead = f"using {found[0]}" if found else "none is intact, so nothing is restored"
        print(f"WARNING: damaged checkpoint {', '.join(skipped)}: {instead}.", file=sys.stderr)
    if found is None:
        return None
    folder, manifest = found
    _check_leaves(folder, manifest["leaves"], _leaves(abstract), partial)
    state = _read_arrays(folder / "state", abstract, partial)
    return Restored(state=state, extra=manifest["extra"], step=manifest["step"])


# Writing


def _write(folder: Path, step: int, state: PyTree, extra: dict[str, Any]) -> None:
    """Fills `folder` with a complete checkpoint, flushed to the disk."""
    _write_arrays(folder / "state", state)
    content = {
        "format": FORMAT,
        "step": step,
        "extra": extra,
        "leaves": _leaves(state),
        "files": _flushed_files(folder / "state"),
    }
    text = json.dumps(content, sort_keys=True)
    with open(folder / _MANIFEST, "w") as file:
        json.dump({"sha256": _sha256(text.encode()), "content": text}, file)
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(folder)


def _write_arrays(folder: Path, state: PyTree) -> None:
    folder.mkdir(parents=True)
    writer = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
    try:
        writer.save(epath.Path(folder), args=ocp.args.PyTreeSave(state))
        writer.finalize(epath.Path(folder))
    finally:
        writer.close()


def _flushed_files(root: Path) -> dict[str, dict[str, Any]]:
    """Size and digest of every file under `root`, each flushed to the disk."""
    files = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            files[str(path.relative_to(root))] = {"bytes": path.stat().st_size, "sha256": digest}
        _flush_folder(Path(folder))
    return files


def _publish(writing: Path, folder: Path) -> None:
    """Gives a complete checkpoint its name; one of the same step is replaced."""
    replaced = folder.with_name(f"writing_over_{folder.name}")
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(writing, folder)
    _flush_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _delete(folder: Path) -> None:
    """Removes a checkpoint; one killed in between leaves no half checkpoint under its name."""
    doomed = folder.with_name(f"writing_off_{folder.name}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Removes what a killed save left."""
    for left in root.glob("writing_*"):
        shutil.rmtree(left, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_is_full(error: BaseException) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in full) or any(
        os.strerror(number) in str(error) for number in full
    )


def _not_saved(root: Path, step: int, needed: int) -> CheckpointNotSaved:
    free = shutil.disk_usage(root).free
    steps = [_step_of(folder) for folder in _newest_first(root)]
    earlier = f"the one of step {steps[0]} is intact" if steps else "there is no earlier one"
    return CheckpointNotSaved(
        f"the checkpoint of step {step} needs about {needed / 1e6:.1f} MB and the disk of {root} "
        f"has {free / 1e6:.1f} MB free; {earlier}. Free some space and run the same command again."
    )


# Reading


def _complete_manifest(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says, when every file it lists is there in full size.

    Raises _Damaged otherwise, and ValueError for a checkpoint of another format.
    """
    try:
        sealed = json.loads((folder / _MANIFEST).read_bytes())
        text = sealed["content"]
        if sealed["sha256"] != _sha256(text.encode()):
            raise _Damaged(f"{_MANIFEST} was changed")
        manifest = json.loads(text)
    except FileNotFoundError:
        raise _Damaged(f"no {_MANIFEST}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _Damaged(f"{_MANIFEST} is not readable") from None
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{folder} has checkpoint format {manifest['format']}, this version of demyrl reads "
            f"format {FORMAT}: use the version that wrote it, or a new workdir."
        )
    for name, file in manifest["files"].items():
        path = folder / "state" / name
        size = path.stat().st_size if path.is_file() else 0
        if size != file["bytes"]:
            raise _Damaged(f"{name} has {size} bytes, {file['bytes']} were saved")
    return manifest


def _verified_manifest(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says, when every file is as it was saved; _Damaged otherwise."""
    manifest = _complete_manifest(folder)
    for name, saved in manifest["files"].items():
        with open(folder / "state" / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != saved["sha256"]:
                raise _Damaged(f"{name} was changed")
    return manifest


def _read_arrays(folder: Path, abstract: PyTree, partial: bool) -> PyTree:
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or first
        ),
        abstract,
    )
    wanted = ocp.args.PyTreeRestore(
        placed,
        restore_args=ocp.checkpoint_utils.construct_restore_args(placed),
        partial_restore=partial,
    )
    reader = ocp.PyTreeCheckpointHandler()
    try:
        return reader.restore(epath.Path(folder), args=wanted)
    finally:
        reader.close()


def _check_leaves(
    folder: Path, saved: dict[str, list], wanted: dict[str, list], partial: bool
) -> None:
    """Raises ValueError, naming the first leaf in which a checkpoint is not what is wanted."""
    for name, leaf in wanted.items():
        if name not in saved:
            raise ValueError(
                f"{folder} has no {name}, which this config needs: another model or optimizer?"
            )
        if saved[name] != leaf:
            raise ValueError(
                f"{folder} has {name} of {_described(saved[name])}, this config needs "
                f"{_described(leaf)}: another model size?"
            )
    surplus = sorted(saved.keys() - wanted.keys())
    if surplus and not partial:
        raise ValueError(
            f"{folder} has {surplus[0]}, which this config does not: another model or optimizer?"
        )


def _leaves(tree: PyTree) -> dict[str, list]:
    """The shape and dtype of each leaf under its path, as JSON values."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [list(leaf.shape), str(leaf.dtype)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _described(leaf: list) -> str:
    shape, dtype = leaf
    return f"({','.join(map(str, shape))}) {dtype}"


def _root(workdir: str | os.PathLike) -> Path:
    return Path(workdir).absolute() / "checkpoints"


def _newest_first(root: Path) -> list[Path]:
    return sorted(root.glob("step_" + "[0-9]" * 8), reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
