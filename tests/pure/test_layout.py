"""The house of four floors, read from the imports of every file: down only, and one door to each strange library."""

import ast
import configparser
import importlib
import pathlib
import subprocess
import sys

import pytest

import checkmate_tf

ROOT = pathlib.Path(checkmate_tf.__file__).parent.parent
FOLDERS = ("checkmate_tf", "solvers", "profiles")
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# What each part may import of the package, and of the world beyond the standard library. Keras itself needs the
# libraries that come with it.
WITH_KERAS = {"absl", "rich"}
PARTS = {"ir": {"ir"}, "solvers": {"ir", "solvers"}, "profiles": {"ir", "profiles"},
         "bridge": {"ir", "solvers", "profiles", "bridge"}, "top": {"ir", "solvers", "profiles", "bridge", "top"},
         "front": set()}
WORLD = {"ir": {"numpy"}, "solvers": {"numpy"}, "profiles": {"numpy"},
         "bridge": {"numpy", "tensorflow", "keras"},
         "top": {"numpy", "pandas", "matplotlib", "tensorflow", "keras", *WITH_KERAS}, "front": set()}
DOORS = {pathlib.Path("checkmate_tf/ir/compiled.py"): {"numba"}, pathlib.Path("solvers/engine.py"): {"ortools"},
         pathlib.Path("solvers/compare.py"): {"rich"},
         pathlib.Path("checkmate_tf/zoo.py"): {"keras_hub"}}


def part_of(path):
    if path == pathlib.Path("checkmate_tf/__init__.py"):
        return "front"
    if path.parts[0] != "checkmate_tf":
        return path.parts[0]
    return path.parts[1] if len(path.parts) > 2 else "top"


def imports_of(path):
    """Full dotted names; `from a import b` is a.b, whether b is a module or not."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_named(name):
    words = name.split(".")[1:]
    return words[0] if words and words[0] in ("ir", "solvers", "profiles", "bridge") else "top"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down_only(path):
    part = part_of(path)
    for name in imports_of(path):
        if name.split(".")[0] == "checkmate_tf":
            assert part_named(name) in PARTS[part], f"{path} is in {part!r} and imports {name}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_strange_libraries_come_in_where_they_belong(path):
    allowed = WORLD[part_of(path)] | DOORS.get(path, set()) | {"checkmate_tf"} | sys.stdlib_module_names
    strangers = {name for name in imports_of(path) if name.split(".")[0] not in allowed}
    assert not strangers, f"{path} imports {strangers}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_private_tensorflow_has_one_door(path):
    private = {name for name in imports_of(path) if name.startswith("tensorflow.python")}
    assert not private or path == pathlib.Path("checkmate_tf/bridge/private.py")


def setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options"]


def test_declared_packages_are_those_on_disk():
    on_disk = {".".join(path.parent.parts) for path in FILES if path.name == "__init__.py"}
    on_disk = {name if name.startswith("checkmate_tf") else f"checkmate_tf.{name}" for name in on_disk}
    assert set(setup_cfg()["packages"].split()) == on_disk


def test_every_folder_with_code_is_a_package():
    assert {path.parent for path in FILES} == {path.parent for path in FILES if path.name == "__init__.py"}


def test_every_library_that_is_imported_is_declared():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = config["options"]["install_requires"].split() + config["options.extras_require"]["zoo"].split()
    declared = {line.split(">")[0].replace("-", "_") for line in wanted}
    imported = {name.split(".")[0] for path in FILES for name in imports_of(path)}
    assert imported - sys.stdlib_module_names - {"checkmate_tf"} <= declared | WITH_KERAS


@pytest.mark.parametrize("name", ["ir.graph", "solvers", "profiles"])
def test_all_packages_come_from_one_root(name):
    assert ROOT in pathlib.Path(importlib.import_module(f"checkmate_tf.{name}").__file__).parents


@pytest.mark.parametrize("name", ["solvers", "profiles"])
def test_the_short_names_are_refused(name):
    with pytest.raises(ImportError, match=f"checkmate_tf.{name}"):
        importlib.import_module(name)


@pytest.mark.parametrize("name", ["checkmate_tf", "checkmate_tf.solvers", "checkmate_tf.profiles"])
def test_the_lower_floors_do_not_bring_tensorflow_in(name):
    program = f"import sys, {name}; print('tensorflow' in sys.modules, 'keras' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert finished.stdout.split() == ["False", "False"]
