"""`sgl-kvc cluster`: a gateway before SGLang's own router, and several workers behind it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import sys

from kvc_server import serve
from kvc_server.launch import LaunchFailed, Program, reserved_port, sglang, started
from kvc_server.settings import SettingsError
from kvc_server.supervisor import WORKER_ARGS
from sgl_kvc.spec import WORKER_KEYS

#: Packages of SGLang's router, the newer first, and what starts it.
ROUTERS = {"smg": "smg.launch_router", "sglang_router": "sglang_router.launch_router"}
_STOP_S = 10.0


def router_program(workers: list[str], package: str | None = None) -> Program:
    """SGLang's router before the workers of these URLs. Raises SettingsError if there is none.

    Parameters
    ----------
    package : one of `ROUTERS`; None takes the first that is installed.
    """
    names = ROUTERS if package is None else (package,)
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    if not found:
        told = " or ".join(name.replace("_", "-") for name in names)
        raise SettingsError(f"the router is not installed: pip install {told}")
    with reserved_port() as metrics:
        own = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics))
    arguments = ("--host", "127.0.0.1", *own, "--worker-urls", *workers)
    return Program(("-m", ROUTERS[found[0]]), arguments, ready="/readiness", stop_s=_STOP_S)


def run(options: argparse.Namespace, worker_args: tuple[str, ...]) -> int:
    """Start workers and router, serve until told to stop, end them; 1 where one does not start."""
    if options.worker_url is not None:
        raise SettingsError("--worker-url: the cluster starts its own workers")
    if options.workers < 1:
        raise SettingsError(f"--workers must be at least 1 (got {options.workers})")
    router_program([], options.router)
    settings = serve.settings_of(options, worker_args)
    assert settings.model_path is not None
    program = sglang(settings.model_path, *WORKER_ARGS, *settings.worker_args)
    name = WORKER_KEYS["admin_api_key"]  # every user of the machine reaches the workers' ports
    keys = {name: secrets.token_urlsafe(32)}
    shown = options.log_level == "debug"
    try:
        with contextlib.ExitStack() as running:
            workers = [
                running.enter_context(started(program, env=keys, verbose=shown))
                for _ in range(options.workers)
            ]
            for worker in workers:
                worker.wait_ready()
            urls = [worker.url for worker in workers]
            router = running.enter_context(
                started(router_program(urls, options.router), verbose=shown)
            )
            router.wait_ready()
            os.environ |= keys
            options.worker_url, options.model_path, options.embedded = router.url, None, None
            return serve.run(options, ())
    except LaunchFailed as error:
        print(f"sgl-kvc cluster: {error}", file=sys.stderr)
        return 1
