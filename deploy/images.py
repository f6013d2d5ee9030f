"""`make images`: builds every image with buildah, as root, and runs what compose.yaml runs of them.

    python deploy/images.py --base docker.io/library/python:3.11-slim-bookworm
    python deploy/images.py --base ROOT     a folder with a Debian, where there is no registry

The gateway's image and the CPU's run as compose.yaml has it: on a read-only root file system, as
the images' user, without capabilities, with the commands and health checks of both. Then OpenAI's
client, inside the CPU's image, asks the gateway. Needs 40 GB of disk and the ports 8000 and 30000.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
LOGS = ROOT / "build" / "images"
TARGETS = ("gateway", "cpu", "cuda")
#: The gateway's image on the base that it is meant for, python:3.11-slim-bookworm.
MOST_MB = 200
USER = "10001"
WORKER_FOLDERS = ("/tmp", "/home/kvc", "/models", "/dev/shm")
KEY = secrets.token_urlsafe(32)  # between gateway and worker
#: Nothing of the image's file system can be written, and nobody may become root again.
CONTAINER = """
set -e
mount --bind "$0" "$0"
mount -o remount,bind,ro "$0"
mount --rbind /dev "$0/dev"
mount -t proc proc "$0/proc"
mount --rbind /sys "$0/sys"
for folder in $FOLDERS; do mount -t tmpfs -o mode=1777 tmpfs "$0$folder"; done
mount --bind /etc/resolv.conf "$0/etc/resolv.conf"
printf '127.0.0.1 localhost worker\n' > "$0/tmp/hosts"
mount --bind "$0/tmp/hosts" "$0/etc/hosts"
cd "$0"
exec chroot "$0" setpriv --reuid $USER --regid $USER --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all "$@"
"""
PROGRAM = """
import os, openai
assert os.getuid() == 10001
try:
    open("/opt/written", "w")
except OSError as refused:
    print("root file system:", refused.strerror)
client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0)
(model,) = client.models.list()
said = [{"role": "user", "content": "the old river waits near the quiet village . " * 40}]
knob = {"kv_compression": {"rate": 8}}
chat = client.chat.completions.create(model=model.id, messages=said, max_tokens=4, extra_body=knob)
told = chat.kv_compression
print(f"{model.id}: {chat.usage.prompt_tokens} tokens, blocks {told['blocks']}, {told['skipped']}")
assert told["rate"] == 8 and told["blocks"]["after"] * 4 < told["blocks"]["before"]
parts = list(client.chat.completions.create(
    model=model.id, messages=said, max_tokens=4, stream=True, extra_body=knob))
assert parts[-1].choices[0].finish_reason or parts[-2].choices[0].finish_reason
"""


class Wrong(Exception):
    """What an image does not do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="an image, or a folder to make one of")
    parser.add_argument("--pip-args", default="", help="the build argument PIP_ARGS")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    options = parser.parse_args()
    try:
        base = base_image(options.base)
        for target in options.targets:
            build(target, base, options.pip_args)
            print(f"sgl-kvc-{target}: {megabytes(target):.0f} MB", flush=True)
            if target == "gateway" and megabytes(target) > MOST_MB:
                raise Wrong(f"the gateway's image has more than {MOST_MB} MB")
        if {"gateway", "cpu"} <= set(options.targets):
            serve()
        if "cuda" in options.targets:
            look_into_cuda()
    except (Wrong, subprocess.CalledProcessError) as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


def buildah(*arguments: str, log: Path | None = None) -> str:
    """What buildah says, unless that goes to `log`. Raises CalledProcessError."""
    env = {"BUILDAH_ISOLATION": "chroot"} | os.environ
    with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("w") as out:
        done = subprocess.run(["buildah", *arguments], check=True, env=env, stdout=out, text=True)
    return done.stdout


def base_image(base: str) -> str:
    """The name of the base image, made of a folder if that is what it is."""
    if not Path(base).is_dir():
        return base
    working = buildah("from", "scratch").strip()
    buildah("add", "--quiet", working, base, "/")
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    buildah("config", "--cmd", "python3", "--env", path, working)
    buildah("commit", "--quiet", "--rm", "--format", "docker", working, "sgl-kvc-base")
    return "localhost/sgl-kvc-base"


def build(target: str, base: str, pip_args: str) -> None:
    """A target of the Dockerfile. Docker's format: OCI's has no health check."""
    begin, log = time.monotonic(), LOGS / f"{target}.log"
    LOGS.mkdir(parents=True, exist_ok=True)
    buildah(
        "bud", "--layers", "--format", "docker", "--target", target,
        "--build-arg", f"PYTHON_IMAGE={base}", "--build-arg", f"PIP_ARGS={pip_args}",
        "--tag", f"sgl-kvc-{target}", str(ROOT), log=log,
    )  # fmt: skip
    print(f"sgl-kvc-{target}: built in {time.monotonic() - begin:.0f} s, {log}", flush=True)


def megabytes(image: str) -> float:
    """Size of an image with all its layers, in 10^6 bytes."""
    (told,) = json.loads(buildah("images", "--json", f"localhost/sgl-kvc-{image}"))
    number, unit = told["size"].split()
    return float(number) * {"KB": 1e-3, "MB": 1, "GB": 1e3}[unit]


def serve() -> None:
    """Run the CPU's image by itself, then worker and gateway of compose.yaml. Raises Wrong."""
    with container("cpu", *WORKER_FOLDERS) as cpu:
        command = [*cpu.config["Entrypoint"], *cpu.config["Cmd"]]
        with cpu.running(command, cpu.config["Healthcheck"]["Test"]):
            cpu.call(["python", "-c", PROGRAM])
        with container("gateway", "/tmp") as gateway:
            worker, front = COMPOSE["worker"], COMPOSE["gateway"]
            command = [*worker["entrypoint"], *worker["command"]]
            with cpu.running(command, worker["healthcheck"]["test"], softly=False):
                command = [*gateway.config["Entrypoint"], *front["command"]]
                with gateway.running(command, gateway.config["Healthcheck"]["Test"]):
                    cpu.call(["python", "-c", PROGRAM])


def look_into_cuda() -> None:
    """What can be asked without a GPU: the plugin and CUDA's compiler are there. Raises Wrong."""
    with container("cuda", *WORKER_FOLDERS) as cuda:
        cuda.call(
            ["sh", "-c", '"$CUDA_HOME"/bin/nvcc --version && python -c "import sgl_kvc.plugin"']
        )


class Container:
    """An image's file system, in which its programs can run as compose.yaml has it."""

    def __init__(self, image: str, root: str, folders: tuple[str, ...]) -> None:
        (told,) = [json.loads(buildah("inspect", "--type", "image", f"localhost/sgl-kvc-{image}"))]
        self.image, self.config = image, told["Docker"]["config"]
        self._command = ["unshare", "--mount", "--propagation", "private",
                         "bash", "-c", CONTAINER, root]  # fmt: skip
        if self.config["User"].partition(":")[0] != USER:
            raise Wrong(f"{image} runs as {self.config['User']}")
        own = dict(pair.split("=", 1) for pair in self.config["Env"])
        self._env = own | {"FOLDERS": " ".join(folders), "USER": USER, "SGL_KVC_API_KEY": KEY}

    def start(self, command: list[str], **options: Any) -> subprocess.Popen:
        """A program in it; `command` as the image would run it."""
        return subprocess.Popen([*self._command, *command], env=self._env, **options)

    def call(self, command: list[str], **options: Any) -> None:
        """Raises Wrong for what ends in an error."""
        if self.start(command, **options).wait(300):
            raise Wrong(f"{self.image}: {shlex.join(command)[:200]} failed")

    @contextlib.contextmanager
    def running(self, command: list[str], health: list[str], softly: bool = True) -> Iterator[None]:
        """A server in it, from when `health` finds it well; told to stop afterwards."""
        print(f"sgl-kvc-{self.image}: {shlex.join(command)}", flush=True)
        begin, process = time.monotonic(), self.start(command)
        try:
            while True:
                with contextlib.suppress(Wrong):
                    self.call(health[1:], stderr=subprocess.DEVNULL)
                    break
                if process.poll() is not None or time.monotonic() > begin + 300:
                    raise Wrong(f"{self.image}: {shlex.join(command)} does not become healthy")
                time.sleep(2)
            print(f"sgl-kvc-{self.image}: healthy after {time.monotonic() - begin:.0f} s")
            yield
        finally:
            process.terminate()
            code = process.wait(120)
        if softly and code:
            raise Wrong(f"{self.image}: ended with {code} when it was told to stop")


@contextlib.contextmanager
def container(image: str, *folders: str) -> Iterator[Container]:
    """A container of an image; `folders` can be written."""
    working = buildah("from", "--pull-never", f"localhost/sgl-kvc-{image}").strip()
    try:
        yield Container(image, buildah("mount", working).strip(), folders)
    finally:
        buildah("rm", working)


if __name__ == "__main__":
    sys.exit(main())
