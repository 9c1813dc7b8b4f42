"""Takes the commands of a Markdown page apart into steps, runs them in one shell, and compares what they print with the page."""

import os
import re
import signal
import subprocess
import threading

STEP = re.compile(r"<!-- step: (?P<name>[\w-]+) -->\n```sh\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?", re.DOTALL)


class Step:
    def __init__(self, name, code, shown):
        self.name, self.code, self.shown = name, code, shown.splitlines()


def steps_of(text):
    """The steps of a page, in order. Every `sh` piece must be a step, and every `text` piece the output of one."""
    steps = [Step(m["name"], m["code"], m["shown"] or "") for m in STEP.finditer(text)]
    for language, expected in (("sh", len(steps)), ("text", sum(1 for s in steps if s.shown))):
        found = len(re.findall(rf"^```{language}$", text, re.MULTILINE))
        assert found == expected, f"expected each of {found} pieces of `{language}` to belong to a step, got {expected}"
    assert len({s.name for s in steps}) == len(steps), "two steps have one name"
    return steps


def shape(line):
    """A line without what differs from run to run: hex numbers, numbers and how columns are filled."""
    line = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "H", line.strip())
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "N", line))


def not_printed(shown, output):
    """Lines of the page that `output` does not have in this order, by shape. A shown line may be the beginning of a printed one."""
    printed = iter([shape(line) for line in output.splitlines()])
    return [line for line in shown if not any(p.startswith(shape(line)) for p in printed)]


class Shell:
    """One bash for all steps, as a reader's: folder, variables, functions and background programs stay. It ends at a failed command."""

    def __init__(self, folder, environment):
        self.bash = subprocess.Popen(["bash", "--noprofile", "--norc", "-s"], cwd=folder, env=environment, text=True, bufsize=1,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        self.bash.stdin.write("set -euo pipefail\n")

    def run(self, code, limit_s=60):
        """What the commands print. AssertionError if one fails, or they take longer than `limit_s`."""
        timer = threading.Timer(limit_s, self.kill)
        timer.start()
        output = []
        try:
            self.bash.stdin.write(code + "\necho '@@ end of step'\n")
            self.bash.stdin.flush()
            for line in self.bash.stdout:
                if line == "@@ end of step\n":
                    return "".join(output)
                output.append(line)
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        raise AssertionError(f"a command failed, or the step took {limit_s} s:\n{code}\n-- it printed:\n{''.join(output)}")

    def kill(self):
        """Ends the shell and all that it started."""
        try:
            os.killpg(self.bash.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.bash.wait()

    def close(self):
        self.kill()
        self.bash.stdout.close()
        try:
            self.bash.stdin.close()
        except BrokenPipeError:
            pass


def table(output, first_column):
    """The rows of the first table of locksctl whose first column has this name, as dictionaries."""
    lines = output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split() and line.split()[0] == first_column and "  " in line)
    columns = [(m.group(), m.start()) for m in re.finditer(r"\S+", lines[at])]
    rows = []
    for line in lines[at + 1:]:
        if len(line) < columns[-1][1] or any(begin > 0 and line[begin - 1].strip() for _, begin in columns):
            break  # another table, or none
        ends = [begin for _, begin in columns[1:]] + [None]
        rows.append({name: line[begin:end].strip() for (name, begin), end in zip(columns, ends)})
    return rows
