"""The `sgl-kvc` command: serve a model, show what compression does, plan memory, evaluate."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Sequence

from kvc_server import serve_options
from kvc_server.embedded import add_option
from kvc_server.plan import PlanError
from kvc_server.settings import SettingsError
from sgl_kvc import __version__
from sgl_kvc.spec import MAX_RATE

LOG_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for a failure, 2 for a usage error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments, worker_args = _split(arguments)
    parser = build_parser()
    options = parser.parse_args(arguments)
    if worker_args and options.command in ("plan", "policies", "profile", "key"):
        parser.error(f"{options.command} starts no worker: leave out what follows --")
    try:
        return options.run(options, tuple(worker_args))
    except (SettingsError, PlanError) as error:
        print(f"sgl-kvc {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The command line. Arguments after ``--`` are cut off before it is used."""
    parser = argparse.ArgumentParser(
        prog="sgl-kvc", description="SGLang with a compressed KV cache, chosen per request."
    )
    parser.add_argument("--version", action="version", version=f"sgl-kvc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser(
        "serve", help="an OpenAI-compatible server",
        usage="sgl-kvc serve [options] [-- SGLang arguments]",
        description="Start a gateway and one SGLang worker behind it. "
        "Arguments after -- go to SGLang and win over ours.",
    ))  # fmt: skip
    _add_cluster(commands.add_parser(
        "cluster", help="the same before SGLang's router and several workers",
        usage="sgl-kvc cluster [options] [-- SGLang arguments]",
        description="Start a gateway, SGLang's router (pip install smg) and several workers. "
        "Arguments after -- go to each worker.",
    ))  # fmt: skip
    _add_demo(commands.add_parser(
        "demo", help="one question at several rates, in a table",
        usage="sgl-kvc demo [options] [-- SGLang arguments]",
        description="Ask an embedded model the same question at rates 1, 4, 8, 16 and 32.",
    ))  # fmt: skip
    _add_plan(commands.add_parser(
        "plan", help="will it fit?",
        description="How many tokens and requests fit a memory, from a model's config.json.",
    ))  # fmt: skip
    _add_policies(commands.add_parser(
        "policies", help="what can a request ask for?",
        description="The policies, scorers and apportioners there are, and their parameters.",
    ))  # fmt: skip
    _add_key(commands.add_parser(
        "key", help="a new API key for serve --keys",
        description="Make an API key, and the entry of it for the file of serve --keys.",
    ))  # fmt: skip
    _add_profile(commands.add_parser(
        "profile", help="which heads of a model retrieve?",
        description="Find a model's retrieval heads on random tokens that are repeated, and "
        "write them to a file: what the apportioner head-profile needs.",
    ))  # fmt: skip
    _add_eval(commands.add_parser(
        "eval", help="how right are the answers, by policy and rate?",
        usage="sgl-kvc eval (--url URL | --embedded) [options] [-- SGLang arguments]",
        description="Ask prompts of known answers at every policy and rate; write scores, "
        "tables and curves. A rerun goes on where the last one stopped.",
    ))  # fmt: skip
    return parser


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut + 1 :]


def _lazily(module: str, function: str = "run") -> Callable[..., int]:
    """Import a command's module only when it runs."""

    def run(options: argparse.Namespace, worker_args: tuple[str, ...]) -> int:
        logging.basicConfig(
            level=getattr(options, "log_level", "warning").upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)
        logging.getLogger("httpcore").setLevel(logging.WARNING)
        return getattr(importlib.import_module(module), function)(options, worker_args)

    return run


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", metavar="MODEL",
        help="folder or Hugging Face id (default: the embedded recall model)")  # fmt: skip
    add_option(parser, "which of the models that come with us")
    add("--worker-url", metavar="URL", help="use this worker or router; start none")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add("--default-rate", type=float, default=1.0, metavar="RATE",
        help="rate of requests that name none (default: 1, off)")  # fmt: skip
    add("--max-rate", type=float, default=MAX_RATE, metavar="RATE",
        help="highest rate a request may ask for (default: %(default)g)")  # fmt: skip
    add("--connect-timeout", type=float, default=5.0, metavar="S",
        help="seconds to reach the worker (default: %(default)g)")  # fmt: skip
    add("--read-timeout", type=float, metavar="S",
        help="seconds of silence from the worker before giving up (default: never)")  # fmt: skip
    serve_options.add(parser)
    add("--log-level", choices=LOG_LEVELS, default="info")
    parser.set_defaults(run=_lazily("kvc_server.serve"))


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    _add_serve(parser)
    parser.add_argument("--workers", type=int, default=2, metavar="N",
        help="how many workers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--router", choices=("smg", "sglang_router"),
        help="which package of the router (default: the one that is installed)")  # fmt: skip
    parser.set_defaults(run=_lazily("kvc_server.cluster"))


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_option(parser, "which model is asked")
    add("--tokens", type=int, default=1024, help="length of the document (default: %(default)s)")
    add("--seed", type=int, default=0, help="which document (default: %(default)s)")
    add("--verbose", action="store_true", help="show the server's log")
    parser.set_defaults(run=_lazily("kvc_server.demo"))


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a model folder or its config.json")
    add("--memory", required=True, metavar="SIZE",
        help="memory for weights and cache together, such as 24GB or 20GiB")  # fmt: skip
    add("--input-len", type=int, default=1024, metavar="N",
        help="prompt tokens of a request (default: %(default)s)")  # fmt: skip
    add("--output-len", type=int, default=256, metavar="N",
        help="tokens decoded for a request (default: %(default)s)")  # fmt: skip
    add("--page-size", type=int, default=16, metavar="P",
        help="tokens of a block (default: %(default)s)")  # fmt: skip
    add("--kv-dtype", metavar="DTYPE", help="dtype of the cache (default: the model's)")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_lazily("kvc_server.plan_report"))


def _add_policies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_lazily("kvc_server.policies_report"))


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="what logs and metrics call its user")
    parser.set_defaults(run=_lazily("kvc_server.key_command"))


def _add_profile(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help="a model folder or a Hugging Face id")
    add("--out", metavar="FILE", help="where to write (default: MODEL/kvc_head_profile.json)")
    add("--tokens", type=int, default=2500, metavar="N",
        help="random tokens in a copy, or what the model takes (default: %(default)s)")  # fmt: skip
    add("--copies", type=int, default=4, metavar="N",
        help="times they are repeated (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="which tokens (default: %(default)s)")
    parser.set_defaults(run=_lazily("sgl_kvc.profile_command"))


def _add_eval(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("kvc_eval.cli").add_options(parser)  # by name: it is built on us
    parser.set_defaults(run=_lazily("kvc_eval.cli"))


if __name__ == "__main__":
    sys.exit(main())
