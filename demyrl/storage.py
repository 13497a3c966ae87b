"""Where the files of a run lie: in folders of this machine, or in a bucket such as gs://name/run.

`path` gives a pathlib.Path for the one and an etils epath.Path for the other, and most of what a
run does works on both. Here is what does not. A bucket holds objects, not folders: an object
appears whole when it is written, cannot be appended to or renamed, and needs no flushing. No JAX.
"""

import atexit
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from etils import epath

Place = Path | epath.Path

CLIENTS = {  # what etils and orbax can reach -> the package that etils reads and writes it with
    "gs://": "gcsfs",
    "s3://": "s3fs",
}


def is_remote(place: str | os.PathLike) -> bool:
    """Whether a place is in a bucket and not on this machine's disk."""
    return os.fspath(place).startswith(tuple(CLIENTS))


def path(place: str | os.PathLike) -> Place:
    """The path of a local place or of one in a bucket.

    `pathlib.Path` would make gs:/name of gs://name. Raises ValueError for a scheme that cannot be
    read, a URL without a bucket, and a bucket without the package that reads it.
    """
    text = os.fspath(place)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return place if isinstance(place, Path) else Path(text)
    scheme += separator
    if scheme not in CLIENTS:
        raise ValueError(f"{text}: {scheme} is unknown, use a folder or {' or '.join(CLIENTS)}.")
    if not rest.strip("/"):
        raise ValueError(f"{text} names no bucket: write {scheme}BUCKET/FOLDER.")
    _require_client(scheme, text)
    return epath.Path(text)


def _require_client(scheme: str, text: str) -> None:
    """Raises ValueError without a package that reads `scheme`; else makes it fit for our use."""
    client = CLIENTS[scheme]
    tensorflow = scheme == "gs://" and importlib.util.find_spec("tensorflow")
    if not tensorflow and not importlib.util.find_spec(client):
        raise ValueError(f"{text} needs the package {client}: pip install {client}.")
    import fsspec

    # Lists of a folder are not kept: orbax writes past this client, and so do other machines.
    for protocol in ("gcs", "s3"):
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)


def make_folder(folder: Place) -> None:
    """Makes a local folder and its parents; a bucket has none to make."""
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def names(folder: Place) -> list[str]:
    """The names of what lies in a folder, sorted; empty where there is no such folder."""
    try:
        return sorted(child.name for child in folder.iterdir())
    except FileNotFoundError:
        return []


def sizes(folder: Place) -> dict[str, int]:
    """The bytes of every file under a folder, by its path inside the folder."""
    found = {}
    for name in names(folder):
        child = folder / name
        if child.is_dir():
            inside = sizes(child)
            found |= {f"{name}/{deeper}": size for deeper, size in inside.items()}
        else:
            found[name] = size_of(child)
    return found


def size_of(file: Place) -> int:
    """The bytes of a file; 0 where there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0
    return found.length if is_remote(file) else found.st_size


def write_text(file: Place, text: str) -> None:
    """Makes `text` the content of a file; a reader sees the old or the new, never a part."""
    if is_remote(file):
        file.write_bytes(text.encode())
        return
    part = file.with_name(file.name + ".part")
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
    except OSError:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, file)


def copy(source: Place, target: Place) -> None:
    """Makes the content of `source` that of `target`; either may be in a bucket."""
    target.write_bytes(source.read_bytes())


def local_folder(folder: Place, without: str = ".safetensors") -> Path:
    """A folder on this machine with the files of `folder`: itself, or a copy of a bucket's.

    The copy lasts as long as the process, and has no folders in it and no files `without`.
    """
    if not is_remote(folder):
        return folder
    copied = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, copied, ignore_errors=True)
    for name in names(folder):
        if not name.endswith(without) and not (folder / name).is_dir():
            copy(folder / name, copied / name)
    return copied


def remove_folder(folder: Place) -> None:
    """Removes a folder with what is in it, if it is there."""
    if is_remote(folder):
        folder.rmtree(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Returns when the names in a local folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
