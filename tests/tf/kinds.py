"""The table of what works, read from the marks of the tests: `python tests/tf/kinds.py` writes it into README.md.

A test carries `@pytest.mark.kind(section)`, and its parameters are the kinds; or `kind(section, name)`. With
`refused="SomeError"` the test is that the kind is refused.
"""

import importlib
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
README = HERE.parent.parent / "README.md"
BEGIN, END = "<!-- kinds -->\n", "<!-- end -->"


def table() -> str:
    """The table in Markdown: a row for each section, kinds in the order of the tests."""
    rows: dict[str, dict[str | None, list[str]]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        for function in vars(importlib.import_module(path.stem)).values():
            for section, refused, names in _kinds(function):
                found = rows.setdefault(section, {}).setdefault(refused, [])
                found += [name for name in names if name not in found]
    lines = ["| | trains as in plain Keras | refused |", "|---|---|---|"]
    for section, kinds in sorted(rows.items()):
        refused = [f"{'; '.join(names)}: `{error}`" for error, names in sorted(kinds.items(), key=str) if error is not None]
        lines.append(f"| {section} | {'; '.join(kinds.get(None, []))} | {'; '.join(refused)} |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """The table that the README has."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0]


def _kinds(function) -> list[tuple[str, str | None, list[str]]]:
    """(section, error, names) for each mark of a test."""
    marks = getattr(function, "pytestmark", ())
    parameters = [mark for mark in marks if mark.name == "parametrize"]
    found = []
    for mark in marks:
        if mark.name == "kind":
            section, *names = mark.args
            found.append((section, mark.kwargs.get("refused"), names or _names(parameters[0])))
    return found


def _names(parametrize) -> list[str]:
    return [str(name) for name in parametrize.kwargs.get("ids") or parametrize.args[1]]


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path[:0] = [str(HERE.parent.parent)]
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
