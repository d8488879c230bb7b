"""What the linters do not see: packages named in strings, class names used twice, mechanisms written twice."""

import ast
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

from edgevlm.runtime.plugins import GROUPS
from edgevlm.runtime.settings import SessionSettings

ROOT = Path(__file__).parents[1]
LAYERS = (("bench",), ("apps",), ("calib", "export"), ("engines",), ("runtime",))
FOLDERS = [folder for folders in LAYERS for folder in folders]
PATHS = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
FACADE = {f"edgevlm/{path.name}": path.read_text() for path in (ROOT / "edgevlm").glob("*.py")}
NODES = {path: list(ast.walk(ast.parse(text))) for path, text in (SOURCES | FACADE).items()}


def test_no_package_names_one_above_it():
    """In a string that is a module, for an import by name: ``edgevlm.PACKAGE...``."""
    above, found = set(), []
    for packages in LAYERS:
        for path in SOURCES:
            folder = path.partition("/")[0]
            if folder in packages:
                strings = (node for node in NODES[path] if isinstance(node, ast.Constant) and isinstance(node.value, str))
                modules = [(node.lineno, node.value) for node in strings if node.value.startswith("edgevlm.")]
                others = above | set(packages) - {folder}
                found += [(path, line) for line, text in modules if text.split(".")[1].split(":")[0] in others]
        above |= set(packages)
    assert found == []


def test_a_class_name_stands_for_one_class():
    named_after = ("apps/schemas.py", "apps/serve/answers.py")  # models of JSON, named after what they describe
    classes = [node.name for path in NODES if path not in named_after for node in NODES[path] if isinstance(node, ast.ClassDef)]
    assert [name for name, times in Counter(classes).items() if times > 1] == []


def assigned_in_modules(nodes):
    """Lines that assign an attribute of an imported module."""
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {(each.asname or each.name).split(".")[0] for node in imports for each in node.names}
    for target in (target for node in nodes if isinstance(node, ast.Assign) for target in node.targets):
        owner = target
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if isinstance(target, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in modules and owner.id.islower():
            yield target.lineno


def test_no_module_assigns_the_names_of_another():
    assert [f"{path}:{line}" for path, nodes in NODES.items() for line in assigned_in_modules(nodes)] == []


def test_what_can_be_extended_is_one_table():
    declared = entry_points().groups
    ours = {group.removeprefix("edgevlm.") for group in declared if group.startswith("edgevlm.")}
    assert ours | {"backbones", "sources"} == set(GROUPS), "entry points of these are other packages' alone"


def test_each_mechanism_has_one_owner():
    owners = {
        "sqlite3.connect": ["apps/store.py"],
        "os.fsync": ["export/graph.py", "runtime/files.py"],  # weights are flushed where they are written
        "def atomic_write": ["runtime/files.py"],
        "class JsonLines": ["runtime/files.py"],
        "RLIMIT_AS": ["runtime/helper_process.py"],
    }
    assert {words: sorted(path for path, text in SOURCES.items() if words in text) for words in owners} == owners


def test_a_sessions_setting_is_declared_once():
    """The command line, edgevlm.toml and HTTP take a setting's help, default and bounds from its field."""
    readers = ("runtime/settings.py", "apps/settings.py", "apps/commands/watch.py", "apps/serve/")
    text = "".join(text for path, text in SOURCES.items() if path.startswith(readers))
    descriptions = [field.description for field in SessionSettings.model_fields.values()]
    assert [text.count(description) for description in descriptions] == [1] * len(descriptions)
