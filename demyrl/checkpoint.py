"""Checkpoints of a run: saved whole or not at all, checked when read, restored bit for bit.

    workdir/checkpoints/step_00000012/
        state/            the arrays, written by orbax
        checkpoint.json   what the caller wants back (`extra`), the shape of every array, and the
                          size and digest of every file under state/

A checkpoint is written into a folder named `writing_...`, flushed to the disk and renamed as a
whole; older ones are deleted last. A bucket (`gs://...`) cannot rename, so there the arrays go
where they stay, and checkpoint.json, an object that appears whole, is written last: without it
there is no checkpoint. It holds no digests there, as a store keeps its own.

With several processes each writes and reads the parts of the arrays that are on its devices. All
the rest is done by the first of them: the others wait for it, and an error of one is that of all.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from demyrl import processes, storage
from demyrl.storage import Place

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
    """Saves a tree of jax arrays; when it returns, the checkpoint is on the disk or in the bucket.

    `extra` is JSON. The newest `keep` checkpoints up to this step remain. Raises
    CheckpointNotSaved when the disk is full. All processes must call it.
    """
    if keep < 1:
        raise ValueError(f"{keep} checkpoints are to be kept: keep at least 1.")
    root = _root(workdir)
    processes.first(lambda: _sweep(root))
    save_at = _save_in_bucket if storage.is_remote(root) else _save_on_disk
    save_at(root, step, state, extra)
    processes.first(lambda: _delete_old(root, step, keep))


def _save_on_disk(root: Path, step: int, state: PyTree, extra: dict[str, Any]) -> None:
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    processes.first(lambda: _require_space(root, step, needed))
    writing = root / f"writing_{step:08d}"
    try:
        _write(writing, step, state, extra)
    except Exception as error:
        storage.remove_folder(writing)
        if _disk_is_full(error):
            raise _not_saved(root, step, needed) from error
        raise
    processes.first(lambda: _publish(writing, root / f"step_{step:08d}"))


def _save_in_bucket(root: epath.Path, step: int, state: PyTree, extra: dict[str, Any]) -> None:
    folder = root / f"step_{step:08d}"
    processes.first(lambda: _delete(folder))
    _write(folder, step, state, extra)


def like(state: PyTree) -> PyTree:
    """What `restore` needs to know of a state: shapes, dtypes and shardings, no values."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def restore(workdir: str | os.PathLike, abstract_state: PyTree) -> Restored | None:
    """The newest intact checkpoint, or None when there is none.

    Leaves of `abstract_state` have shape, dtype and maybe sharding, which the restored arrays
    get; without one they go to the first device. A damaged checkpoint is passed over with a
    warning. Raises ValueError, naming the leaf, when the checkpoint holds another tree. All
    processes must call it, and get the same one.
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
    root = _root(workdir)
    found = processes.first(lambda: _newest_intact(root, step))
    if found is None:
        return None
    folder, manifest = root / found[0], found[1]
    _check_leaves(folder, manifest["leaves"], _leaves(abstract), partial)
    state = _read_arrays(folder / "state", abstract, partial)
    return Restored(state=state, extra=manifest["extra"], step=manifest["step"])


def _newest_intact(root: Place, step: int | None) -> tuple[str, dict[str, Any]] | None:
    """The name and the manifest of the newest checkpoint, or that of `step`, that is intact."""
    skipped, found = [], None
    for folder in _newest_first(root):
        if step not in (None, _step_of(folder)):
            continue
        try:
            found = folder.name, _verified_manifest(folder)
            break
        except _Damaged as damage:
            skipped.append(f"{folder} ({damage})")
    if skipped:
        instead = f"using {root / found[0]}" if found else "none is intact, so nothing is restored"
        print(f"WARNING: damaged checkpoint {', '.join(skipped)}: {instead}.", file=sys.stderr)
    return found


# Writing


def _write(folder: Place, step: int, state: PyTree, extra: dict[str, Any]) -> None:
    """Fills `folder` with a complete checkpoint, its files flushed to the disk."""
    _write_arrays(folder / "state", state)
    processes.first(lambda: _seal(folder, step, state, extra))


def _seal(folder: Place, step: int, state: PyTree, extra: dict[str, Any]) -> None:
    """Adds the manifest to a checkpoint whose arrays are written."""
    content = {
        "format": FORMAT,
        "step": step,
        "extra": extra,
        "leaves": _leaves(state),
        "files": _flushed_files(folder / "state"),
    }
    text = json.dumps(content, sort_keys=True)
    sealed = {"sha256": _sha256(text.encode()), "content": text}
    storage.write_text(folder / _MANIFEST, json.dumps(sealed))
    if not storage.is_remote(folder):
        storage.flush_folder(folder)


def _write_arrays(folder: Place, state: PyTree) -> None:
    processes.first(lambda: storage.make_folder(folder))
    if not storage.is_remote(folder):
        processes.require_shared(folder)
    writer = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
    try:
        processes.each(lambda: writer.save(epath.Path(folder), args=ocp.args.PyTreeSave(state)))
        processes.first(lambda: writer.finalize(epath.Path(folder)))
    finally:
        writer.close()


def _flushed_files(root: Place) -> dict[str, dict[str, Any]]:
    """Size and, on a disk, digest of every file under `root`, each flushed to the disk."""
    if storage.is_remote(root):
        return {name: {"bytes": size} for name, size in storage.sizes(root).items()}
    files = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            files[str(path.relative_to(root))] = {"bytes": path.stat().st_size, "sha256": digest}
        storage.flush_folder(Path(folder))
    return files


def _publish(writing: Path, folder: Path) -> None:
    """Gives a complete checkpoint its name; one of the same step is replaced."""
    replaced = folder.with_name(f"writing_over_{folder.name}")
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(writing, folder)
    storage.flush_folder(folder.parent)
    storage.remove_folder(replaced)


def _delete(folder: Place) -> None:
    """Removes a checkpoint; a kill in between leaves none that looks whole."""
    if storage.is_remote(folder):
        (folder / _MANIFEST).unlink(missing_ok=True)
        storage.remove_folder(folder)
        return
    doomed = folder.with_name(f"writing_off_{folder.name}")
    os.rename(folder, doomed)
    storage.remove_folder(doomed)


def _delete_old(root: Place, step: int, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints up to this step."""
    for old in [folder for folder in _newest_first(root) if _step_of(folder) <= step][keep:]:
        _delete(old)


def _sweep(root: Place) -> None:
    """Removes what a killed save or delete left, from a folder that is there from now on."""
    storage.make_folder(root)
    for name in storage.names(root):
        if name.startswith("writing_"):
            storage.remove_folder(root / name)
    if storage.is_remote(root):
        for folder in _newest_first(root):
            if not (folder / _MANIFEST).exists():
                storage.remove_folder(folder)


def _disk_is_full(error: BaseException) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in full) or any(
        os.strerror(number) in str(error) for number in full
    )


def _require_space(root: Path, step: int, needed: int) -> None:
    if needed > shutil.disk_usage(root).free:
        raise _not_saved(root, step, needed)


def _not_saved(root: Path, step: int, needed: int) -> CheckpointNotSaved:
    free = shutil.disk_usage(root).free
    steps = [_step_of(folder) for folder in _newest_first(root)]
    earlier = f"the one of step {steps[0]} is intact" if steps else "there is no earlier one"
    return CheckpointNotSaved(
        f"the checkpoint of step {step} needs about {needed / 1e6:.1f} MB and the disk of {root} "
        f"has {free / 1e6:.1f} MB free; {earlier}. Free some space and run the same command again."
    )


# Reading


def _complete_manifest(folder: Place) -> dict[str, Any]:
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
        size = storage.size_of(folder / "state" / name)
        if size != file["bytes"]:
            raise _Damaged(f"{name} has {size} bytes, {file['bytes']} were saved")
    return manifest


def _verified_manifest(folder: Place) -> dict[str, Any]:
    """What checkpoint.json says, when every file is as it was saved; _Damaged otherwise."""
    manifest = _complete_manifest(folder)
    for name, saved in manifest["files"].items():
        if storage.is_remote(folder) or "sha256" not in saved:
            continue
        with open(folder / "state" / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != saved["sha256"]:
                raise _Damaged(f"{name} was changed")
    return manifest


def _read_arrays(folder: Place, abstract: PyTree, partial: bool) -> PyTree:
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
    folder: Place, saved: dict[str, list], wanted: dict[str, list], partial: bool
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


def _root(workdir: str | os.PathLike) -> Place:
    root = storage.path(workdir) / "checkpoints"
    return root if storage.is_remote(root) else root.absolute()


def _newest_first(root: Place) -> list[Place]:
    found = [root / name for name in storage.names(root) if re.fullmatch(r"step_\d{8}", name)]
    return found[::-1]


def _step_of(folder: Place) -> int:
    return int(folder.name.removeprefix("step_"))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
