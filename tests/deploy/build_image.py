#!/usr/bin/env python3
"""Runs the steps of deploy/Dockerfile without a container engine, each stage in a root folder of its own.

usage: sudo build/venv/bin/python -B tests/deploy/build_image.py [NAME=VALUE]... FOLDER
  NAME=VALUE  a build argument
  FOLDER      gets one root a stage; must not exist. The last stage's is the image
A base image that is Debian's is made with debootstrap (apt-get install debootstrap). Needs root and a network, and takes as long as
building everything. Not the same as an engine: no layers, no image file, no limits.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT"}


@dataclasses.dataclass
class Step:
    word: str
    text: str
    flags: dict


@dataclasses.dataclass
class Stage:
    base: str
    name: str
    steps: list


def read_dockerfile(arguments):
    """The stages, with the build arguments' values in their bases. Raises ValueError for an instruction that is not known."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy/Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    values, stages = {}, []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(None, 1)
        if word not in KNOWN:
            raise ValueError(f"{line}: expected one of {', '.join(sorted(KNOWN))}")
        if word == "ARG" and not stages:
            name, _, default = rest.partition("=")
            values[name] = arguments.get(name, default)
        elif word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(re.sub(r"\$\{(\w+)\}", lambda m: values[m.group(1)], base), name, []))
        else:
            flags = dict(re.findall(r"--(\w+)=(\S+)", rest)) if word == "COPY" else {}
            stages[-1].steps.append(Step(word, re.sub(r"--\w+=\S+\s+", "", rest) if flags else rest, flags))
    return stages


def needed(stages):
    """The stages that the last one is made of, in order."""
    by_name = {stage.name: stage for stage in stages}
    wanted, look = [], [stages[-1]]
    while look:
        stage = look.pop()
        if stage in wanted:
            continue
        wanted.append(stage)
        sources = [stage.base, *(step.flags["from"] for step in stage.steps if "from" in step.flags)]
        look += [by_name[source] for source in sources if source in by_name]
    return [stage for stage in stages if stage in wanted]


class Builder:
    def __init__(self, folder, arguments):
        self.folder = pathlib.Path(folder)
        self.arguments = arguments
        self.environment = {}  # of each stage

    def root(self, name):
        return self.folder / (name or "image")

    def build(self, stage):
        root = self.root(stage.name)
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        if self.root(stage.base).exists():
            subprocess.run(["cp", "-a", self.root(stage.base), root], check=True)
            environment = dict(self.environment[stage.base])
        elif stage.base.startswith("debian:bookworm"):
            subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True, stdout=subprocess.DEVNULL)
            root.chmod(0o755)
            self.like_this_machine(root)
        else:
            raise SystemExit(f"build_image: {stage.base}: only Debian's base image can be made here")
        self.environment[stage.name] = environment
        where = "/"
        for step in stage.steps:
            print(f"build_image: {stage.name or 'image'}: {step.word} {step.text}"[:150], flush=True)
            if step.word == "WORKDIR":
                where = step.text
                (root / where.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif step.word == "ENV":
                name, _, value = step.text.partition("=")
                environment[name] = re.sub(r"\$\{(\w+)\}", lambda m: environment[m.group(1)], value)
            elif step.word == "ARG":
                name, _, default = step.text.partition("=")
                environment[name] = self.arguments.get(name, default)
            elif step.word == "COPY":
                self.copy(step, root, where)
            elif step.word == "RUN":
                self.run(step.text, root, where, environment)

    @staticmethod
    def like_this_machine(root):
        """What a fresh machine of this network has: the resolver and the certificates of its registries."""
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")

    def copy(self, step, root, where):
        *sources, target = step.text.split()
        target = root / (pathlib.PurePosixPath(where) / target).relative_to("/")
        for source in sources:
            if "from" in step.flags:
                subprocess.run(["cp", "-a", self.root(step.flags["from"]) / source.lstrip("/"), target], check=True)
            elif source == ".":
                ignored = [f"--exclude=./{line}" for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()
                           if line and not line.startswith(("#", "**"))]
                packed = subprocess.run(["tar", "-C", ROOT, *ignored, "--exclude=__pycache__", "-cf", "-", "."],
                                        check=True, capture_output=True)
                subprocess.run(["tar", "-C", target, "--no-same-owner", "-xf", "-"], input=packed.stdout, check=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, target)

    @staticmethod
    def run(command, root, where, environment):
        inside = f"cd {shlex.quote(where)} && {command}"
        script = ('root=$1; shift; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --rbind /sys "$root/sys"; '
                  'exec chroot "$root" env -i "$@"')
        subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", script, "build_image", root,
                        *(f"{name}={value}" for name, value in environment.items()), "sh", "-euc", inside], check=True)


def main(words):
    if not words or words[0] in ("-h", "--help") or "=" in words[-1]:
        print(__doc__)
        return 2
    if os.geteuid() != 0:
        raise SystemExit("build_image: expected root, which chroot and mounts need")
    arguments = dict(word.split("=", 1) for word in words[:-1])
    builder = Builder(words[-1], arguments)
    builder.folder.mkdir(parents=True)
    for stage in needed(read_dockerfile(arguments)):
        builder.build(stage)
    print(f"build_image: {builder.root('')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
