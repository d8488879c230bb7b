"""What import-linter does not see: a room named in a string, for an import by name, by a room below it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = (("bench",), ("apps",), ("calib", "export"), ("engines",), ("runtime",))


def named_rooms(path):
    """(line, room) of each string in a file that is a module of a room, ``edgevlm.ROOM...``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("edgevlm."):
            yield node.lineno, node.value.split(".")[1].split(":")[0]


def test_no_room_names_one_above_it():
    above, found = set(), []
    for rooms in LAYERS:
        for room in rooms:
            beside = above | set(rooms) - {room}
            for path in sorted((ROOT / room).rglob("*.py")):
                found += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in named_rooms(path) if name in beside]
        above |= set(rooms)
    assert found == []
