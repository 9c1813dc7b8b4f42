"""English texts that a Debian machine has: perl's manual (package perl-doc) and common licences.

The manual's pod markup is stripped to plain prose: code samples (verbatim paragraphs) are dropped,
formatting codes are opened, and each paragraph becomes one line. Files do not share text.
"""

import glob
import os
import re

LICENCE_DIR = "/usr/share/common-licenses"
POD_PATTERN = "/usr/share/perl/*/pod/{name}.pod"
POD_NAMES = (
    "perlhack", "perlglossary", "perlport", "perlsub", "perlunicode", "perllocale", "perlpodspec",
    "perlop", "perlre", "perlretut", "perlguts", "perlvar", "perlipc", "perlxs", "perldata",
    "perlebcdic", "perlfunc", "perlhacktips",
)  # fmt: skip
LICENCE_NAMES = ("GPL-3",)
_ESCAPES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "amp": "&", "quot": '"', "nbsp": " "}
_CODE_BEGIN = re.compile(r"([A-Z])(<<+ |<)")


class TextError(Exception):
    """A text that cannot be had: the message has what, expected, got, what to do."""


def names():
    """Names of the texts that this tool knows, found on this machine or not."""
    return POD_NAMES + LICENCE_NAMES


def find_path(name):
    """Path of a known text on this machine, or None."""
    if name in LICENCE_NAMES:
        found = glob.glob(os.path.join(LICENCE_DIR, name))
    else:
        found = glob.glob(POD_PATTERN.format(name=name))
    return found[0] if found else None


def load(name_or_path):
    """(name, text) of a known text, or of a UTF-8 file."""
    if name_or_path in names():
        path = find_path(name_or_path)
        if path is None:
            raise TextError(
                f"text {name_or_path}: expected its file on this machine, got none; "
                "run deploy/install_deps.sh trace, or give --text a UTF-8 file"
            )
        name = name_or_path
    elif os.path.isfile(name_or_path):
        path, name = name_or_path, os.path.basename(name_or_path)
    else:
        raise TextError(
            f"text {name_or_path}: expected a file or one of {', '.join(names())}; got neither; "
            "`dump_trace.py texts` lists what is here"
        )
    try:
        with open(path, encoding="utf-8") as file:
            content = file.read()
    except UnicodeDecodeError as error:
        raise TextError(
            f"text {path}: expected UTF-8, got {error}; convert it with iconv"
        ) from error
    return name, plain_text_of_pod(content) if path.endswith(".pod") else content


def plain_text_of_pod(pod):
    """Prose of a pod document: heading, item or paragraph a line, an empty line between."""
    lines, skipped_until = [], None
    for paragraph in re.split(r"\n[ \t]*\n", pod.replace("\r\n", "\n")):
        paragraph = paragraph.strip("\n")
        command = re.match(r"=([a-z]\w*)\s*(.*)", paragraph, re.DOTALL)
        if skipped_until:
            if command and command[1] == skipped_until:
                skipped_until = None
            continue
        if command:
            if command[1] == "begin":
                skipped_until = "end"
            elif command[1].startswith("head"):
                lines.append(_open_codes(command[2]))
            elif command[1] == "item":
                lines.append(_open_codes(re.sub(r"^(\*|\d+\.?)\s*", "", command[2])))
        elif not paragraph[:1].isspace():
            lines.append(_open_codes(paragraph))
    return "\n\n".join(line for line in lines if line) + "\n"


def _open_codes(text):
    """Replaces formatting codes such as B<x> and C<< x >> by their content, innermost included."""
    opened, _ = _open_until(" ".join(text.split()), 0, None)
    return " ".join(opened.split())


def _open_until(text, start, end_mark):
    """Content from `start` to `end_mark` (None: to the end), and the offset behind it."""
    out, i = [], start
    while i < len(text):
        if end_mark and text.startswith(end_mark, i):
            return "".join(out), i + len(end_mark)
        code = _CODE_BEGIN.match(text, i)
        if code:
            num_marks = code[2].count("<")
            inner_end = ">" if num_marks == 1 else " " + ">" * num_marks
            content, i = _open_until(text, code.end(), inner_end)
            out.append(_content_of(code[1], content))
            continue
        out.append(text[i])
        i += 1
    return "".join(out), i


def _content_of(letter, content):
    if letter in "XZ":
        return ""
    if letter == "E":
        return _ESCAPES.get(content, "")
    if letter == "L":
        label, bar, target = content.partition("|")
        if bar or "://" in content:
            return label
        return content.replace("/", ", ").replace('"', "").strip(", ")
    return content
