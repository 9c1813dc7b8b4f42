#!/usr/bin/env python3
"""Writes the table of values into the chart's README.md from values.yaml, whose comments are the descriptions.

usage: build/venv/bin/python deploy/helm/values_table.py [--check]
  --check  writes nothing; exit code 1 if README.md is not what it would write
"""

import json
import pathlib
import sys

import yaml

CHART = pathlib.Path(__file__).parent / "locks-kvd"
BEGIN = "<!-- values: written by deploy/helm/values_table.py -->\n"
END = "<!-- end of values -->\n"


def comment_above(lines, line):
    """The comment lines right above lines[line], joined."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(text.strip().lstrip("# ") for text in lines[first:line])


def rows(node, lines, path=""):
    """(path, default, description) of every value: a map that is written over several lines is a group of them."""
    for key, value in node.value:
        name = path + key.value
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from rows(value, lines, name + ".")
            continue
        default = yaml.load(yaml.serialize(value), Loader=yaml.SafeLoader)
        shown = "see values.yaml" if isinstance(value, yaml.SequenceNode) and value.value else f"`{json.dumps(default)}`"
        yield name, shown, comment_above(lines, key.start_mark.line)


def table():
    text = (CHART / "values.yaml").read_text()
    found = list(rows(yaml.compose(text), text.splitlines()))
    silent = [name for name, _, description in found if not description]
    if silent:
        raise SystemExit(f"values_table: expected a comment above each value, found none above: {', '.join(silent)}")
    lines = ["| value | default | what |", "|---|---|---|"]
    lines += [f"| `{name}` | {default} | {description} |" for name, default, description in found]
    return "\n".join(lines) + "\n"


def readme_with_table():
    text = (CHART / "README.md").read_text()
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main(arguments):
    if arguments == ["--check"]:
        if readme_with_table() == (CHART / "README.md").read_text():
            return 0
        print("values_table: README.md differs from values.yaml: run deploy/helm/values_table.py", file=sys.stderr)
        return 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    (CHART / "README.md").write_text(readme_with_table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
