"""The command line of `sgl-kvc eval`: its options, what is wrong with them, and the way in.

It is read for every `sgl-kvc` command, so it imports none of the libraries that `sgl-kvc[eval]`
installs, and nothing that takes long.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from kvc_server.embedded import RECALL, SMOLLM2, add_option
from kvc_server.settings import SettingsError

from kvc_eval.grid import INSIDE, QUESTIONS, RATES
from kvc_eval.suites import SUITES
from sgl_kvc.spec import SpecError, parse_rate

#: What `pip install "sgl-kvc[eval]"` brings, by the names they are imported by.
LIBRARIES = ("matplotlib", "rapidfuzz", "rouge_score", "scipy", "wonderwords")
METRICS = ("accuracy", "edit_similarity", "f1", "numbers", "rouge_l")
DEFAULT_LENGTH = {"recall": 1024, "chats": 1024, "ruler": 4096, "text": 1024, "longbench": 0}
DEFAULT_SUITE = {RECALL: "recall", SMOLLM2: "text"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--url", nargs="+",
        help="an OpenAI-compatible server, or several that serve the same")  # fmt: skip
    add_option(parser, "start a server on a model that comes with us; what follows -- is SGLang's")
    add("--servers", type=int, default=1, metavar="N",
        help="how many --embedded starts, sharing the cores (default: %(default)s)")  # fmt: skip
    add("--model", help="name to ask for (default: the first the server lists)")
    add("--api-key", metavar="KEY", default=os.environ.get("OPENAI_API_KEY"),
        help="sent as a bearer token (default: $OPENAI_API_KEY)")  # fmt: skip
    add("--out", type=Path, default=Path("eval-results"), metavar="DIR",
        help="where results are written, and found by a rerun (default: %(default)s)")  # fmt: skip
    add("--suite", choices=sorted(SUITES),
        help="where prompts come from (default: recall with --embedded, text with "
        "--embedded smollm2, else ruler)")  # fmt: skip
    add("--tasks", nargs="+", metavar="TASK", help="of the suite (default: all)")
    add("--data", type=Path, metavar="JSONL", help="LongBench's format, for the suite longbench")
    add("--metric", choices=METRICS,
        help="for all of --data (default: LongBench's for each data set)")  # fmt: skip
    add("--prompts", type=Path, metavar="JSON",
        help="templates by data set, such as LongBench's dataset2prompt.json")  # fmt: skip
    add("--length", type=int, nargs="+", metavar="N",
        help="tokens of a prompt (default: ruler 4096, longbench all, others 1024)")  # fmt: skip
    add("--question", choices=QUESTIONS, nargs="+", default=[INSIDE],
        help="compressed with the document, asked after, or in turns, each of which begins with "
        "what the one before has left (default: inside)")  # fmt: skip
    add("--policies", nargs="+", metavar="NAME", help="(default: all the server has)")
    add("--rates", type=float, nargs="+", default=list(RATES), metavar="RATE",
        help="KVs before / KVs after (default: 2 4 8 16 32 64)")  # fmt: skip
    add("--n", type=int, metavar="N",
        help="prompts a point, over all tasks together (default: 200, longbench all)")  # fmt: skip
    add("--seed", type=int, default=0, help="which prompts (default: %(default)s)")
    add("--concurrent", type=int, metavar="N",
        help="prompts asked of a server at once (default: 32, smollm2 8)")  # fmt: skip
    add("--batched", action=argparse.BooleanOptionalAction,
        help="many prompts in one request (default: where suite and server can)")  # fmt: skip
    add("--forced", action=argparse.BooleanOptionalAction,
        help="put right answers into the model's mouth and read their tokens' likelihood, rather "
        "than decode (default: where suite and server can)")  # fmt: skip
    add("--timeout", type=float, default=600, metavar="S",
        help="seconds until a request is given up (default: %(default)g)")  # fmt: skip


def run(options: argparse.Namespace, worker_args: tuple[str, ...]) -> int:
    """Evaluate: 0, or 1 if the endpoint failed or some requests did. Raises SettingsError."""
    check(options, worker_args)
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(
            f'{", ".join(missing)} cannot be imported: pip install "sgl-kvc[eval]" installs '
            "what evaluation needs"
        )
    from kvc_eval import command

    return command.run(options, worker_args)


def check(options: argparse.Namespace, worker_args: tuple[str, ...]) -> None:
    """Fill in the suite and its length where they are not given; mutates `options`.

    Raises SettingsError for the first option that cannot be used.
    """
    if (options.embedded is None) == (options.url is None):
        raise SettingsError("give either --url or --embedded")
    if options.servers != 1 and not options.embedded:
        raise SettingsError("--servers is for --embedded; give several to --url")
    if worker_args and not options.embedded:
        raise SettingsError("arguments after -- go to the server that --embedded starts")
    options.suite = options.suite or DEFAULT_SUITE.get(options.embedded, "ruler")
    if (options.suite == "longbench") != (options.data is not None):
        raise SettingsError("--suite longbench and --data belong together")
    for name in ("metric", "prompts"):
        if getattr(options, name) is not None and options.data is None:
            raise SettingsError(f"--{name} is for the suite longbench")
    options.concurrent = options.concurrent or (8 if options.embedded == SMOLLM2 else 32)
    options.length = options.length or [DEFAULT_LENGTH[options.suite]]
    for name, least in (("n", 1), ("concurrent", 1), ("servers", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise SettingsError(f"--{name} must be at least {least} (got {value})")
    if min(options.length) < (0 if options.suite == "longbench" else 1):
        raise SettingsError(f"--length must be at least 1 (got {min(options.length)})")
    for rate in options.rates:
        try:
            if parse_rate(rate) == 1:
                raise SettingsError("--rates: 1 is off, which is always measured; leave it out")
        except SpecError as error:
            raise SettingsError(f"--rates: {str(error).removeprefix(error.field + ': ')}") from None
    if not options.timeout > 0:
        raise SettingsError(f"--timeout must be a positive number (got {options.timeout})")
