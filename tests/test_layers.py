"""What the linters do not see: a package named in a string, for an import by name, by a package under it; one class name for
two classes."""

import ast
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

from edgevlm.runtime.plugins import GROUPS
from edgevlm.runtime.settings import SessionSettings

ROOT = Path(__file__).parents[1]
LAYERS = (("bench",), ("apps",), ("calib", "export"), ("engines",), ("runtime",))


def named_packages(path):
    """(line, package) of each string in a file that is a module, ``edgevlm.PACKAGE...``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("edgevlm."):
            yield node.lineno, node.value.split(".")[1].split(":")[0]


def test_no_package_names_one_above_it():
    above, found = set(), []
    for packages in LAYERS:
        for package in packages:
            beside = above | set(packages) - {package}
            for path in sorted((ROOT / package).rglob("*.py")):
                found += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in named_packages(path) if name in beside]
        above |= set(packages)
    assert found == []


def test_a_class_name_stands_for_one_class():
    named_after = ("apps/schemas.py", "apps/serve/answers.py")  # models of JSON, named after what they describe
    files = [path for packages in LAYERS for package in packages for path in (ROOT / package).rglob("*.py")]
    files = [path for path in files if str(path.relative_to(ROOT)) not in named_after]
    nodes = [node for path in [*files, *(ROOT / "edgevlm").glob("*.py")] for node in ast.walk(ast.parse(path.read_text()))]
    count = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, times in count.items() if times > 1] == []


def assigned_in_modules(tree):
    """Lines that assign an attribute of an imported module."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {(each.asname or each.name).split(".")[0] for node in imports for each in node.names}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            owner = target
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(target, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in modules and owner.id.islower():
                yield node.lineno


def test_no_module_assigns_the_names_of_another():
    files = [path for packages in LAYERS for package in packages for path in (ROOT / package).rglob("*.py")]
    files += (ROOT / "edgevlm").glob("*.py")
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in assigned_in_modules(ast.parse(path.read_text()))]
    assert found == []


def test_what_can_be_extended_is_one_table():
    declared = entry_points().groups
    ours = {group.removeprefix("edgevlm.") for group in declared if group.startswith("edgevlm.")}
    assert ours | {"sources"} == set(GROUPS), "entry points of sources are other packages' alone"


def sources():
    """The text of each file of the packages, by its path from the root."""
    paths = [path for packages in LAYERS for package in packages for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_each_mechanism_has_one_owner():
    owners = {
        "sqlite3.connect": ["apps/store.py"],
        "os.fsync": ["export/graph.py", "runtime/files.py"],  # weights are flushed where they are written
        "def atomic_write": ["runtime/files.py"],
        "class JsonLines": ["runtime/files.py"],
        "RLIMIT_AS": ["runtime/helper_process.py"],
    }
    found = {words: sorted(path for path, text in sources().items() if words in text) for words in owners}
    assert found == owners


def test_a_sessions_setting_is_declared_once():
    """The command line, edgevlm.toml and HTTP take a setting's help, default and bounds from its field."""
    readers = ("runtime/settings.py", "apps/settings.py", "apps/commands/run.py", "apps/commands/watch.py", "apps/serve/")
    text = "".join(text for path, text in sources().items() if path.startswith(readers))
    assert {name: text.count(field.description) for name, field in SessionSettings.model_fields.items()} == dict.fromkeys(
        SessionSettings.model_fields, 1
    )
