"""Which module may import which: the architecture's rules, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (  # a module may import those of earlier lines and those of its own folder
    {"types", "arrays"},
    {"storage"},
    {"data", "text", "model", "tools", "logs", "processes"},
    {"rollout", "rewards", "learn"},
    {"checkpoint"},
    {"command", "records"},
    {"weights", "settings"},
    {"recipe"},
    {"evaluate", "collect", "plan", "chat"},
    {"train", "train_sft", "select_problems", "export"},
)
# A top-level file or folder that belongs to another one.
PART_OF = {"display": "logs", "liveness": "processes", "planning": "plan"}
ANALYSIS_MAY_IMPORT = {"types", "storage", "logs", "analysis"}
MAY_IMPORT_STATS = {"demyrl.evaluate"}  # the one way into analysis: avg@k and its intervals

COMPUTES = ("demyrl.model", "demyrl.learn")
READS_FILES = {f"demyrl.model.hf_{name}" for name in ("config", "load", "save")}
SURROUNDINGS = {"os", "pathlib", "time", "logging"}

ENTRY_POINTS = {"train", "train_sft", "collect", "select_problems", "evaluate"}
ENTRY_POINTS |= {"command", "export", "plan", "quickstart"}

WITHOUT_JAX = {"types", "storage", "logs", "display", "command", "records", "analysis"}
WITHOUT_JAX |= {"data", "text", "tools", "rewards"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path.read_text()
    for folder in ("demyrl", "configs", "experiments")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports_of(source):
    """Every module that a source names in an import, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part(name):
    """The part of demyrl that a module belongs to, None outside."""
    words = name.split(".")
    if words[0] != "demyrl" or len(words) < 2:
        return None
    return PART_OF.get(words[1], words[1])


def layer(name):
    return next(number for number, names in enumerate(LAYERS) if part(name) in names)


def may_import(importer, imported):
    if part(imported) in (None, part(importer)):
        return True
    if part(importer) == "analysis":
        return part(imported) in ANALYSIS_MAY_IMPORT
    if part(imported) == "analysis":
        return importer in MAY_IMPORT_STATS and imported.startswith("demyrl.analysis.stats")
    return layer(imported) < layer(importer)


def wrong_layers(importer, source):
    return sorted(name for name in imports_of(source) if not may_import(importer, name))


def surroundings(importer, source):
    if not importer.startswith(COMPUTES) or importer in READS_FILES:
        return []
    return sorted(name for name in imports_of(source) if name.split(".")[0] in SURROUNDINGS)


def configs_outside_entry_points(importer, source):
    words = importer.split(".")
    if words[0] != "demyrl" or words[-1] in ENTRY_POINTS:
        return []
    return sorted(name for name in imports_of(source) if name.startswith("ml_collections"))


RULES = (wrong_layers, surroundings, configs_outside_entry_points)


@pytest.mark.parametrize("rule", RULES)
def test_no_module_breaks_the_rule(rule):
    broken = {name: rule(name, source) for name, source in SOURCES.items() if part(name)}
    assert {name: found for name, found in broken.items() if found} == {}


def test_every_module_has_a_layer():
    known = set.union(*LAYERS) | {"analysis", None}
    assert {name for name in SOURCES if part(name) not in known} == set()


@pytest.mark.parametrize(
    "rule, importer, source",
    [
        (wrong_layers, "demyrl.learn.loss", "from demyrl import rollout"),
        (wrong_layers, "demyrl.learn.loss", "from demyrl.rewards.grade import grade"),
        (wrong_layers, "demyrl.text.chat", "def f():\n    import demyrl.tools.sandbox"),
        (wrong_layers, "demyrl.types", "from demyrl.arrays import Batch"),
        (wrong_layers, "demyrl.analysis.stats", "from demyrl.model import config"),
        (wrong_layers, "demyrl.train", "from demyrl.analysis import report"),
        (surroundings, "demyrl.learn.update", "import os.path"),
        (surroundings, "demyrl.model.attention", "from time import monotonic"),
        (configs_outside_entry_points, "demyrl.learn.loss", "from ml_collections import x"),
    ],
)
def test_a_planted_import_breaks_its_rule(rule, importer, source):
    assert len(rule(importer, source)) == 1


def test_the_parts_that_run_in_plain_processes_never_load_jax():
    names = [name for name in SOURCES if part(name)]
    names = [name for name in names if name.split(".")[1] in WITHOUT_JAX]
    check = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'jax' not in sys.modules, f'{name} loads jax'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
