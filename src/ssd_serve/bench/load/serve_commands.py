"""The command line of `ssd bench serve`. What is heavy is imported late."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings_sources import resolve
from ssd_serve.bench.experiment import Report, add_experiment
from ssd_serve.bench.extra import need
from ssd_serve.bench.numbers import count, count_or_zero, positive, positive_or_zero
from ssd_serve.bench.provenance import SERVER

_GOOD = ("ttft", "tpot", "e2el")


def add_serve(commands: Commands) -> None:
    """Add the parser `serve`."""
    parser = commands.add_parser(
        "serve", help="any OpenAI endpoint under load, with the figures of `vllm bench serve`"
    )
    parser.add_argument("--base-url", required=True, metavar="URL", help="of the server, without /v1")
    parser.add_argument(
        "--backend", choices=("openai", "openai-chat"), default="openai", help="completions or chat (openai)"
    )
    parser.add_argument("--model", help="its name there (the first that the server lists)")
    _add_requests(parser)
    _add_traffic(parser)
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits of a good answer: ttft, tpot, e2el",
    )
    parser.add_argument("--metric-percentiles", type=float, nargs="+", default=[99.0], metavar="P")
    parser.add_argument("--save-detailed", action="store_true", help="also the times of every request")
    add_experiment(parser, _run_serve, ("bench/load", *SERVER))


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests; SSD_API_KEY is their key")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="HumanEval, GSM8K, MT-Bench, JSON lines with prompt or text, or a text a line (Python sources)",
    )
    group.add_argument("--num-prompts", type=count, default=100, help="requests; a file is begun anew (100)")
    group.add_argument(
        "--input-len",
        type=count,
        nargs=2,
        default=[64, 1000],
        metavar=("FROM", "TO"),
        help="tokens of prompts without a file, counted by the embedded pair's tokenizer (64 1000)",
    )
    group.add_argument("--output-len", type=count, default=128, help="most new tokens of a request (128)")
    group.add_argument("--ignore-eos", action="store_true", help="never fewer new tokens either")
    group.add_argument("--temperature", type=positive_or_zero, help="(what the server takes)")
    group.add_argument("--extra-body", metavar="JSON", default="{}", help="more fields of every request")


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--request-rate", type=_rate, default=math.inf, help="arrivals a second, or inf: all at once (inf)"
    )
    group.add_argument(
        "--burstiness", type=positive, default=1.0, help="1: Poisson; less: in bursts; more: evener (1)"
    )
    group.add_argument("--max-concurrency", type=count, help="most requests at a time (any number)")
    group.add_argument(
        "--num-warmups", type=count_or_zero, default=1, help="requests before, not counted (1)"
    )
    group.add_argument("--seed", type=int, default=0, help="of arrivals, prompts and sampling (0)")


def _run_serve(args: argparse.Namespace) -> Report:
    need("ssd bench serve", "httpx")
    from ssd_serve.bench.load.client import Endpoint
    from ssd_serve.bench.load.serve import ServePlan, as_requests, run_serve, serve_table

    endpoint = Endpoint(
        url=args.base_url.rstrip("/").removesuffix("/v1"),
        temperature=args.temperature,
        api_key=resolve({}).api_key,
        chat=args.backend == "openai-chat",
        model=args.model,
        exact=args.ignore_eos,
        token_ids=False,
        more=_object(args.extra_body),
    )
    plan = ServePlan(
        endpoint,
        as_requests(_texts(args), args.num_prompts, args.output_len, args.seed),
        rate=args.request_rate,
        burstiness=args.burstiness,
        concurrency=args.max_concurrency,
        seed=args.seed,
        warm_ups=args.num_warmups,
        percents=args.metric_percentiles,
        limits=_limits(args.goodput),
        detailed=args.save_detailed,
    )
    return Report(run_serve(plan), serve_table)


def _texts(args: argparse.Namespace) -> list[str]:
    if args.prompts is not None:
        from ssd_serve.bench.datasets import read_questions

        return [question.text for question in read_questions(args.prompts)]
    from ssd_serve.bench.load.requests import Mix, held_out_texts

    shortest, longest = sorted(args.input_len)
    mix = Mix(shortest, longest, args.output_len)
    return held_out_texts(f"serve:{args.seed}", args.num_prompts, mix)


def _object(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise UserError(f"--extra-body is no JSON object: {error}") from error


def _limits(words: list[str]) -> Mapping[str, float]:
    """`ttft:450` and the like, in ms."""
    found: dict[str, float] = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            found[name] = positive(limit)
        except (ValueError, argparse.ArgumentTypeError):
            name = ""
        if name not in _GOOD:
            raise UserError(f"--goodput {word}: give ttft, tpot or e2el and milliseconds, as ttft:450")
    return found


def _rate(text: str) -> float:
    return math.inf if text == "inf" else positive(text)
