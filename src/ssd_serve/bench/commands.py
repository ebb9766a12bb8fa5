"""The command line `ssd bench modes | serve | peers | kernels | lossless`; heavy imports are late."""

import argparse
import math
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ssd_serve.app.cli.flags import Commands, add_settings_flags
from ssd_serve.base.devices import check_device, parse_device, pin, this_machine
from ssd_serve.base.engine_config import DEFAULT_MODEL, EMBEDDED
from ssd_serve.base.errors import SettingsError, UserError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve
from ssd_serve.bench.options import (
    Devices,
    add_device_flags,
    add_pair,
    add_prompts,
    chosen_devices,
    count,
    count_or_zero,
    pair_settings,
    positive,
    positive_or_zero,
)
from ssd_serve.bench.report import Report, add_report, need, say, usable_cores
from ssd_serve.cluster.process import worker_environment


def add_commands(bench: argparse.ArgumentParser) -> None:
    """Add the subcommands of `ssd bench`; each sets `run`."""
    commands = bench.add_subparsers(required=True, metavar="BENCH")
    _add_modes(commands)
    _add_serve(commands)
    _add_peers(commands)
    _add_kernels(commands)
    _add_lossless(commands)


def _add_modes(commands: Commands) -> None:
    parser = commands.add_parser(
        "modes", help="plain, n-gram lookup, synchronous chain and tree, and SSD, interleaved"
    )
    add_pair(parser)
    parser.add_argument(
        "--setting",
        choices=("real", "emulated", "both"),
        help="real devices, emulated ones, or both (real; of the embedded pair on cores both)",
    )
    parser.add_argument("--temperatures", type=positive_or_zero, nargs="+", help="(0 0.6 1)")
    parser.add_argument("--num-prompts", type=count, help="prompts of each mode (64)")
    parser.add_argument("--table", default="mi300x-70b-1b", help="device table of the emulated setting")
    add_device_flags(parser)
    parser.add_argument(
        "--preset",
        choices=("ssd-table",),
        help="ssd-table: temperature 0 on emulated devices, with the figures that others published",
    )
    devices = ("target_device", "target_device_alone", "draft_device")
    add_settings_flags(parser, leave_out=(*devices, "target", "draft"))
    add_report(parser, _run_modes)


def _run_modes(args: argparse.Namespace) -> Report:
    os.environ.update(worker_environment())  # this process plays the verifier; torch is not imported yet
    need("ssd bench modes", "scipy")
    from ssd_serve.bench.modes import COLUMNS, CORES, PUBLISHED, ModesPlan, run_settings
    from ssd_serve.bench.workload import check_pair

    settings = pair_settings(args)
    if settings.tensor_parallel > 1:
        raise UserError(
            "`ssd bench modes` computes the target in one process; use `ssd bench serve` for ranks"
        )
    check_pair(settings)
    if args.preset:
        args.setting, args.temperatures = args.setting or "emulated", args.temperatures or [0.0]
    devices = chosen_devices(args.device, args.draft_device, this_machine(), CORES)
    setting = args.setting or ("both" if settings.target == EMBEDDED and not devices.on_gpu else "real")
    if devices.on_gpu and setting != "real":
        raise SettingsError(f"--setting {setting}: devices are emulated on CPUs; use --setting real on a GPU")
    plan = ModesPlan(
        settings=("real", "emulated") if setting == "both" else (setting,),
        temperatures=args.temperatures or [0.0, 0.6, 1.0],
        prompts=args.num_prompts or 64,
        table=args.table,
        devices=devices,
        file=args.prompts,
        chat=args.chat,
    )
    notes = [
        "Column ssd: tokens/s of the last row over this row's, prompt by prompt, with its 95 % interval."
    ]
    if "emulated" in plan.settings:
        notes.append(
            "emulated: forwards sleep to a device table's times; not a measurement of those devices."
        )
    notes += PUBLISHED if args.preset else ()
    return Report(run_settings(settings, plan, say), {"results": COLUMNS}, notes)


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve", help="any OpenAI endpoint under load, with the figures of `vllm bench serve`"
    )
    parser.add_argument("--base-url", required=True, metavar="URL", help="server address, without /v1")
    parser.add_argument(
        "--backend", choices=("openai", "openai-chat"), default="openai", help="completions or chat (openai)"
    )
    parser.add_argument("--model", help="model name (the first that the server lists)")
    add_prompts(parser)
    group = parser.add_argument_group("requests; SSD_API_KEY is their key")
    group.add_argument("--num-prompts", type=count, default=100, help="requests; a file is repeated (100)")
    group.add_argument(
        "--input-len",
        type=count,
        nargs=2,
        default=[64, 1000],
        metavar=("FROM", "TO"),
        help="prompt tokens without a file, counted by the embedded pair's tokenizer (64 1000)",
    )
    group.add_argument("--output-len", type=count, default=128, help="most new tokens of a request (128)")
    group.add_argument("--ignore-eos", action="store_true", help="never fewer new tokens either")
    group.add_argument("--temperature", type=positive_or_zero, help="(the server's default)")
    group.add_argument("--extra-body", metavar="JSON", default="{}", help="more fields of every request")
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--request-rate", type=_rate, default=math.inf, help="arrivals a second, or inf: all at once (inf)"
    )
    group.add_argument(
        "--burstiness", type=positive, default=1.0, help="1: Poisson; less: bursts; more: more even (1)"
    )
    group.add_argument("--max-concurrency", type=count, help="most requests at a time (no limit)")
    group.add_argument("--num-warmups", type=count_or_zero, default=1, help="uncounted requests before (1)")
    group.add_argument("--seed", type=int, default=0, help="seed of arrivals, prompts and sampling (0)")
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits of a good answer: ttft, tpot, e2el",
    )
    parser.add_argument("--metric-percentiles", type=float, nargs="+", default=[99.0], metavar="P")
    parser.add_argument("--save-detailed", action="store_true", help="also vLLM's lists of every request")
    add_report(parser, _run_serve)


def _run_serve(args: argparse.Namespace) -> Report:
    need("ssd bench serve", "httpx")
    from ssd_serve.bench.client import Endpoint
    from ssd_serve.bench.serve import ServePlan, as_requests, held_out_texts, latency_rows, run_serve

    try:
        more = msgspec.json.decode(args.extra_body, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise UserError(f"--extra-body is no JSON object: {error}") from error
    endpoint = Endpoint(
        url=args.base_url.rstrip("/").removesuffix("/v1"),
        temperature=args.temperature,
        api_key=resolve({}).api_key,
        chat=args.backend == "openai-chat",
        model=args.model,
        exact=args.ignore_eos,
        token_ids=False,
        more=more,
    )
    if args.prompts is not None:
        from ssd_serve.bench.prompts import read_questions

        texts = [question.text for question in read_questions(args.prompts)]
    else:
        texts = held_out_texts(args.seed, args.num_prompts, *sorted(args.input_len))
    plan = ServePlan(
        endpoint,
        as_requests(texts, args.num_prompts, args.output_len, args.seed),
        rate=args.request_rate,
        burstiness=args.burstiness,
        concurrency=args.max_concurrency,
        seed=args.seed,
        warm_ups=args.num_warmups,
        percents=args.metric_percentiles,
        limits=_goodput_limits(args.goodput),
        detailed=args.save_detailed,
    )
    result = run_serve(plan)
    rows = latency_rows(result)
    notes = [f"{name}: {value}" for name, value in result.items() if isinstance(value, int | float | str)]
    latencies = {f"{row['ms']}": row for row in rows}
    shown = [note for note in notes if not note.partition(":")[0].endswith("_ms")]
    return Report({**result, "latencies": list(latencies.values())}, {"latencies": tuple(rows[0])}, shown)


def _goodput_limits(words: list[str]) -> dict[str, float]:
    """Parse limits in milliseconds, `ttft:450` and the like."""
    from ssd_serve.bench.serve import GOODPUT_LIMITS

    found: dict[str, float] = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            found[name] = positive(limit)
        except (ValueError, argparse.ArgumentTypeError):
            name = ""
        if name not in GOODPUT_LIMITS:
            raise UserError(f"--goodput {word}: give ttft, tpot or e2el and milliseconds, as ttft:450")
    return found


def _rate(text: str) -> float:
    return math.inf if text == "inf" else positive(text)


def _add_peers(commands: Commands) -> None:
    parser = commands.add_parser("peers", help="this engine and llama.cpp's server, on the same GGUF file")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a short name or FILE.gguf (smollm2)")
    parser.add_argument("--llama-server", type=_program, default="llama-server", help="(llama-server)")
    parser.add_argument("--llama-draft", type=Path, metavar="FILE", help="a draft model for llama.cpp")
    parser.add_argument("--llama-flag", action="append", default=[], metavar="FLAG", help="for llama.cpp")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder of mt_bench.jsonl, HumanEval.jsonl.gz, gsm8k_test.jsonl",
    )
    parser.add_argument("--kinds", default="chat,code,mathematics,copying,editing", help="(all five)")
    parser.add_argument("--modes", help="of this engine (ar,sd,ssd,auto; ssd if the model has a draft model)")
    parser.add_argument("--temperatures", type=positive_or_zero, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=count, default=8, help="of each kind and temperature (8)")
    parser.add_argument("--tokens", type=count, default=256, help="new tokens of each prompt (256)")
    parser.add_argument("--users", type=count, default=1, help="requests at the same time (1)")
    parser.add_argument(
        "--llama-modes", help="of llama.cpp (plain,n-gram; with --llama-draft also draft,draft+n-gram)"
    )
    parser.add_argument(
        "--busy", choices=("none", "one", "all", "burst"), default="none", help="cores that processes take"
    )
    parser.add_argument("--minutes", type=positive, default=1e9, help="begin no prompt later (no limit)")
    add_report(parser, _run_peers)


def _run_peers(args: argparse.Namespace) -> Report:
    need("ssd bench peers", "scipy", "httpx")
    from ssd_serve.bench.peers.comparison import PeersPlan, run_peers
    from ssd_serve.bench.peers.engines import LLAMA_MODES, OUR_MODES, Place
    from ssd_serve.bench.peers.figures import COLUMNS, RATIO_COLUMNS
    from ssd_serve.bench.peers.questions import KINDS
    from ssd_serve.models.hub import find_model

    if args.prompts % args.users:
        raise UserError(f"--prompts {args.prompts} must be a multiple of --users {args.users}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no engine outlives this command
    drafted = resolve({"target": args.model}).draft_model is not None
    modes = [mode for mode in OUR_MODES if mode != "ssd" or drafted]
    limited = [f"{mode}:{cores}" for mode in modes for cores in range(1, usable_cores() + 1)]
    llama_modes = LLAMA_MODES if args.llama_draft else LLAMA_MODES[:2]
    plan = PeersPlan(
        kinds=_names(args.kinds, KINDS, "--kinds"),
        temperatures=args.temperatures,
        modes=_names(args.modes or ",".join(modes), (*OUR_MODES, *limited), "--modes"),
        prompts=args.prompts,
        tokens=args.tokens,
        llama_modes=_names(args.llama_modes or ",".join(llama_modes), llama_modes, "--llama-modes"),
        busy=args.busy,
        data=args.data,
        deadline_s=60 * args.minutes,
    )
    file = find_model(resolve({}).engine_config(), args.model, "target", say)
    place = Place(args.model, file, args.llama_server, args.llama_draft, args.llama_flag, args.users)
    result = run_peers(place, plan, args.json, say)
    return Report(result, {"results": COLUMNS, "ratios": RATIO_COLUMNS})


def _names(words: str, known: Sequence[str], flag: str) -> list[str]:
    found = words.split(",")
    if unknown := [name for name in found if name not in known]:
        raise UserError(f"{flag} {unknown[0]}: give some of {','.join(known)}, with commas")
    return found


def _program(text: str) -> Path:
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no program")
    return Path(found).absolute()  # without a folder, a name is searched in PATH only


def _add_kernels(commands: Commands) -> None:
    parser = commands.add_parser("kernels", help="every tree attention backend: its time, or its correctness")
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("HEADS", "KV", "SIZE"))
    parser.add_argument("--repeats", type=count, default=7, help="at least 2 (7)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0 (cpu)")
    parser.add_argument(
        "--conformance", action="store_true", help="compare every backend with the reference instead"
    )
    parser.add_argument("--quick", action="store_true", help="--conformance: float32 only")
    add_report(parser, _run_kernels)


def _run_kernels(args: argparse.Namespace) -> Report:
    """Exit with 1 if a backend computes something wrong."""
    os.environ.update(worker_environment())  # as in the engine's processes; torch is not imported yet
    from ssd_serve.bench.kernel_times import COLUMNS, KernelPlan, run_kernels
    from ssd_serve.kernels.native.library import native_library

    device = parse_device(args.device)
    check_device(device, this_machine(), "--device")
    if device.kind == "cuda" or device.indices:
        pin(device)  # kernels start on the current GPU
    if args.conformance:
        from ssd_serve.bench.conformance import check_conformance

        result = check_conformance(device.torch_name, say, quick=args.quick)
        right = result["right"] is True
        verdict = "every backend is correct" if right else "a backend computes something wrong"
        return Report(result, notes=[verdict], exit_code=0 if right else 1)
    heads, kv_heads, head_dim = args.heads
    if min(args.heads) < 1 or heads % kv_heads:
        raise SettingsError("--heads: query heads must be a multiple of KV heads, and all at least 1")
    if args.repeats < 2:
        raise SettingsError("--repeats: quartiles need at least 2")
    plan = KernelPlan(device.torch_name, heads, kv_heads, head_dim, args.repeats)
    return Report(run_kernels(plan, native_library(Settings().engine_config()), say), {"results": COLUMNS})


def _add_lossless(commands: Commands) -> None:
    parser = commands.add_parser("lossless", help="every mode, batch, budget and drafter: the plain text")
    parser.add_argument("--quick", action="store_true", help="a small part of the cases, in about a minute")
    parser.add_argument("--target", help="with --draft: the target that it drafts for (the embedded one)")
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        help="draft source instead of the built-in pairs' models, as SSD_DRAFT names it: a folder, a hub id, "
        "an EAGLE-3 head, self:N, ngram, suffix, an installed source or several with commas; on the target's "
        "device; may be given again",
    )
    add_device_flags(parser)
    add_report(parser, _run_lossless)


def _run_lossless(args: argparse.Namespace) -> Report:
    """Exit with 1 if a text differed beyond near-ties, or nothing was speculated where it should be."""
    if args.target and not args.draft:
        raise SettingsError("--target needs --draft: what shall draft for it?")
    if idle := [each for each in args.draft if not Settings(draft=each).drafts]:
        raise SettingsError(f"nothing drafts with --draft {idle[0]}")
    devices = chosen_devices(args.device, args.draft_device, this_machine(), Devices())
    from ssd_serve.bench.lossless.proof import QUICK, ProofPlan, run_lossless

    plan = QUICK if args.quick else ProofPlan()
    if args.draft:
        plan = replace(plan, pairs=(args.target or EMBEDDED,), drafts=tuple(args.draft))
    result = run_lossless(plan, say, devices)
    notes = [f"{name}: {result[name]}" for name in ("lossless", "totals")]
    return Report(result, notes=notes, exit_code=0 if result["lossless"] else 1)
