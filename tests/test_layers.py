"""What the linters do not see: a package named in a string, for an import by name, by a package under it; one class name for
two classes."""

import ast
from collections import Counter
from pathlib import Path

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
    files = [path for packages in LAYERS for package in packages for path in (ROOT / package).rglob("*.py")]
    nodes = [node for path in [*files, *(ROOT / "edgevlm").glob("*.py")] for node in ast.walk(ast.parse(path.read_text()))]
    count = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, times in count.items() if times > 1] == []
