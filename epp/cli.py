"""`warmpath`: up · serve · check · replay · conformance. Flags to settings, nothing else."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import click

from epp import __version__, protocol
from epp.errors import ConfigError
from epp.flags import (
    PORT,
    CipherSuites,
    Duration,
    GoCommand,
    MinimalTls,
    Modules,
    NamespacedName,
    Ports,
    SidecarCommand,
    Stages,
    Verbosity,
    WholeNumber,
    log_format,
    log_level,
)
from epp.telemetry.log import FORMATS, LEVELS
from epp.telemetry.text import printable_lines

STRATEGIES = ("prefix-aware", "kv-aware", "session", "round-robin", "least-load")

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PATH = click.Path(exists=True, path_type=Path)
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_SECONDS = click.FloatRange(0, min_open=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="warmpath %(version)s")
def warmpath() -> None:
    """Warmpath names the pod that answers soonest, to any Envoy that asks."""


def _strategy_options(command: Any) -> Any:
    """How to pick: a built-in strategy or a configuration file, never both."""
    command = click.option(
        "--config",
        "--config-file",
        "config",
        type=_FILE,
        help="An EndpointPickerConfig file, followed as it changes.",
    )(command)
    return click.option(
        "--strategy", type=click.Choice(STRATEGIES), help="A built-in configuration. [default: prefix-aware]"
    )(command)


_plugins_from = click.option(
    "--plugins-from",
    envvar="WARMPATH_PLUGINS_FROM",
    default="any",
    show_default=True,
    type=Modules(),
    help="Modules that `type: module.Class` may name in a configuration, with those below each: MODULE,MODULE, any, or "
    "none but Warmpath's own. Naming one runs its code. [env: WARMPATH_PLUGINS_FROM]",
)


_flow_control = click.option(
    "--flow-control",
    is_flag=True,
    help="Let requests wait in Warmpath while the pool is full, by priority and tenant; as the feature gate "
    "flowControl of a configuration.",
)


_trust_client_headers = click.option(
    "--trust-client-headers/--no-trust-client-headers",
    default=False,
    show_default=True,
    help="Honour the headers of a request that name its objective, fairness id, SLO or how long it may wait, or ask "
    "why it goes where it does.",
)


def _importable(config: Path | None, plugins_from: Sequence[str] | None) -> None:
    """Let a configuration name plugins in modules beside it."""
    if config is not None and plugins_from != ():
        sys.path.insert(0, str(config.absolute().parent))


def _one_of(strategy: str | None, config: Path | None, text: str | None = None) -> str:
    if strategy and config:
        raise click.UsageError("--strategy and --config exclude each other: the file says how to pick")
    if text and (strategy or config):
        raise click.UsageError("--config-text, --config and --strategy exclude each other")
    return strategy or STRATEGIES[0]


@warmpath.command(cls=GoCommand)
@click.option(
    "--endpoints",
    multiple=True,
    type=_PATH,
    help="Pools from files: endpoints list, InferencePool, Pod, objective, rewrite YAML; a directory too. Re-read on "
    "change. Without it pools come from Kubernetes.",
)
@click.option("--pool-name", multiple=True, help="The InferencePool to serve; may be repeated in Kubernetes.")
@click.option(
    "--pool-group",
    default=protocol.POOL_GROUP,
    type=click.Choice([protocol.POOL_GROUP]),
    expose_value=False,
    hidden=True,
)
@click.option("--pool-selector", help="Kubernetes: serve the InferencePools with these labels.")
@click.option(
    "--pool-namespace", envvar="NAMESPACE", default="default", show_default=True, help="Kubernetes: where to look."
)
@click.option("--endpoint-selector", help="Kubernetes without InferencePools: labels of the Pods to pick from.")
@click.option(
    "--endpoint-target-ports", multiple=True, type=Ports(), help="The ports those Pods serve on, separated by commas."
)
@click.option(
    "--kubeconfig", type=_FILE, help="Kubernetes: credentials. [default: KUBECONFIG, the pod's, ~/.kube/config]"
)
@click.option(
    "--disable-endpoint-subset-filter",
    default=False,
    type=bool,
    help="Pick from the whole pool, whatever subset the gateway names: true or false.",
)
@_strategy_options
@click.option("--config-text", help="The EndpointPickerConfig itself.")
@_plugins_from
@_flow_control
@click.option(
    "--first-endpoint-delay",
    default="0s",
    show_default=True,
    type=Duration(),
    help="With flow control: requests wait for so long after endpoints came into an empty pool, until a gateway that "
    "sends only to those it knows has heard of them too.",
)
@click.option(
    "--fallbacks",
    default=0,
    show_default=True,
    type=WholeNumber(0),
    help="Endpoints to name beside the first, for retries.",
)
@click.option(
    "--secure-serving", type=bool, help="TLS on the ext_proc port: true or false. [default: true in Kubernetes]"
)
@click.option(
    "--cert-path",
    type=_DIRECTORY,
    help="Directory of tls.crt and tls.key, followed as they change. [default: self-signed]",
)
@click.option("--tls-min-version", type=MinimalTls(), expose_value=False, hidden=True)
@click.option(
    "--tls-cipher-suites", type=CipherSuites(), help="For TLS 1.2, by their names in Go, separated by commas."
)
@click.option(
    "--host",
    envvar="WARMPATH_HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address every port is bound to. [env: WARMPATH_HOST]",
)
@click.option(
    "--ext-proc-server",
    default="http2",
    show_default=True,
    type=click.Choice(["http2", "grpc"]),
    help="What serves ext_proc: our own HTTP/2, or grpc.aio, which costs two to three times as much, for comparison.",
)
@click.option(
    "--grpc-port",
    multiple=True,
    type=PORT,
    help="ext_proc, one for each pool in the files' order. [default: the pool's endpointPickerRef, else 9002]",
)
@click.option("--grpc-health-port", default=protocol.HEALTH_PORT, show_default=True, type=PORT)
@click.option(
    "--metrics-port", default=protocol.METRICS_PORT, show_default=True, type=PORT, help="/metrics, /ready, the page."
)
@click.option(
    "--metrics-endpoint-auth",
    type=bool,
    help="/metrics and the pages beside it want a Kubernetes token: true or false. [default: true in Kubernetes]",
)
@click.option(
    "--metrics-allowed-host",
    multiple=True,
    metavar="NAME",
    help="Without tokens: a host name by which the metrics port may be called, beside IP addresses and localhost.",
)
@click.option(
    "--metrics-cert-dir",
    type=_DIRECTORY,
    help="TLS on the metrics port: directory of tls.crt and tls.key, followed as they change.",
)
@click.option("--metrics-client-ca-file", type=_FILE, help="Readers of the metrics port need a certificate of this CA.")
@click.option(
    "--tracing",
    default=False,
    type=bool,
    help="OpenTelemetry spans of requests, for the collector that OTEL_* in the environment names. [default: false]",
)
@click.option(
    "--enable-pprof",
    default=True,
    type=bool,
    help="/debug/profile on the metrics port: where the time goes, as folded stacks. [default: true]",
)
@click.option(
    "--refresh-metrics-interval",
    default="1s",
    show_default=True,
    type=Duration(above=True),
    help="From one scrape of an endpoint to the next.",
)
@click.option(
    "--list-models",
    default=True,
    type=bool,
    help="Read each endpoint's /v1/models every ten seconds, and answer GET /v1/models with all of them: true or "
    "false. [default: true]",
)
@click.option(
    "--decision-deadline",
    default="5s",
    show_default=True,
    type=Duration(above=True),
    help="How long a request waits for a decision until it is refused.",
)
@click.option(
    "--replica-port",
    type=PORT,
    help="Where other replicas connect to, to know of this one's decisions; 0: any. [default: 9004, with peers only]",
)
@click.option("--peer", multiple=True, metavar="HOST:PORT", help="Another replica; this one may be named too.")
@click.option(
    "--peers-dns",
    metavar="NAME:PORT",
    help="All addresses of this name are replicas, as of a headless Service; looked up every second.",
)
@click.option(
    "--peers-service",
    type=NamespacedName(),
    metavar="NAMESPACE/NAME",
    help="Kubernetes: all addresses of this Service are replicas, ready or not, at its port `replicas` or only one. "
    "Its EndpointSlices are watched.",
)
@click.option(
    "--replica-secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What all replicas know and nobody else, 16 bytes at least: encrypts what they tell each other, and refuses "
    "others. Needed beyond loopback.",
)
@click.option(
    "--max-body",
    default=16,
    show_default=True,
    type=WholeNumber(1, 1024),
    help="Largest request body, MiB; a larger one is answered 413.",
)
@click.option(
    "--max-streams",
    default=16_384,
    show_default=True,
    type=WholeNumber(1),
    help="Requests served at once, those whose answers are under way among them; more are answered 429.",
)
@click.option(
    "--watch-answers",
    default=0.02,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of the answers to look at, where the gateway shows none unless asked to (mode_override): drawn by"
    " chance, after the first 200, and four a second at least. As many again, three a second at least, are those whose"
    " prompts take longest to compute: they show how far an endpoint has come. Beside them each of /v1/responses, which"
    " a later request may name. 0: none.",
)
@click.option(
    "--request-timeout",
    default="30s",
    show_default=True,
    type=Duration(above=True),
    help="How long a request may take to arrive whole, or it is answered 408; and the gateway to take its body back.",
)
@click.option(
    "--stall-limit",
    default="5s",
    show_default=True,
    type=Duration(),
    help="End the process, with status 70 and the stacks of its threads in the log, once its event loop has stood "
    "still for so long: a plugin that blocks, most often. 0: never.",
)
@click.option(
    "--drain-timeout",
    default="30s",
    show_default=True,
    type=Duration(),
    help="From SIGTERM to the end, at most.",
)
@click.option(
    "--drain-linger",
    default="5s",
    show_default=True,
    type=Duration(),
    help="The first part of this, in which gateways may still send requests. After 3/5 of it, always, they are told to "
    "connect anew, so that at its end none is left on an old connection.",
)
@click.option(
    "--tokenizer",
    multiple=True,
    metavar="MODEL=DIRECTORY",
    help="kv-aware: a model's tokenizer files (or hf:ORG/NAME, from the hub); MODEL * is any. Without, pods are asked.",
)
@click.option(
    "--tokenizer-args",
    multiple=True,
    metavar="MODEL=FLAGS",
    help="Flags of that model's engines: --chat-template and its like.",
)
@click.option(
    "--tokenizer-timeout",
    default="500ms",
    show_default=True,
    type=Duration(above=True),
    help="kv-aware: how long the tokens of a prompt may take, at most half of --decision-deadline. Where they take "
    "longer, the pick goes by what was sent where, as prefix-aware does.",
)
@_trust_client_headers
@click.option(
    "--conformance-testing",
    envvar="WARMPATH_CONFORMANCE_TESTING",
    default=False,
    type=bool,
    help="For GIE's Gateway conformance suite: requests say where they go. [env: WARMPATH_CONFORMANCE_TESTING]",
)
@click.option("--audit-log", type=click.Path(dir_okay=False, path_type=Path), help="One JSON line per request.")
@click.option("--log-format", type=click.Choice(FORMATS), help="[default: text]")
@click.option("--log-level", type=click.Choice(LEVELS), help="[default: info]")
@click.option("-v", "--v", "verbosity", type=int, help="The log level as the reference pickers count: 4 is debug.")
@click.option("--zap-log-level", type=Verbosity(), hidden=True)
@click.option("--zap-encoder", type=click.Choice(("json", "console")), hidden=True)
@click.option("--zap-devel", type=bool, hidden=True)
def serve(**flags: Any) -> None:
    """Run the endpoint picker, on pools from files or from Kubernetes.

    Takes the flags of GIE's and llm-d's endpoint pickers; those that change nothing here are named in the log.
    """
    if suites := flags["tls_cipher_suites"]:
        os.environ["GRPC_SSL_CIPHER_SUITES"] = suites  # read when grpc is imported
    from epp.app import Settings, run

    flags["strategy"] = _one_of(flags["strategy"], flags["config"], flags["config_text"])
    flags["max_body"] *= 1 << 20
    flags["endpoint_target_ports"] = tuple(dict.fromkeys(chain.from_iterable(flags["endpoint_target_ports"])))
    flags["log_level"] = log_level(flags["log_level"], flags.pop("zap_log_level"), flags.pop("verbosity"))
    flags["log_format"] = log_format(flags["log_format"], flags.pop("zap_encoder"), flags.pop("zap_devel"))
    _importable(flags["config"], flags["plugins_from"])
    try:
        sys.exit(run(Settings(**flags)))
    except ConfigError as error:
        raise click.ClickException(printable_lines(str(error))) from None


@warmpath.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--strategy", type=click.Choice(STRATEGIES), help="Show a built-in configuration instead of a file.")
@_plugins_from
@_flow_control
def check(file: Path | None, strategy: str | None, plugins_from: Sequence[str] | None, flow_control: bool) -> None:
    """Print the pipeline that FILE (an EndpointPickerConfig) gives, or every error in it."""
    if (file is None) == (strategy is None):
        raise click.UsageError("give either a FILE or --strategy")
    from epp.configuration.describe import describe
    from epp.configuration.loader import load_file, load_strategy

    try:
        if file is not None:
            _importable(file, plugins_from)
            pipeline = load_file(
                file, clock=time.monotonic, random=Random(), plugins_from=plugins_from, flow_control=flow_control
            )
        else:
            pipeline = load_strategy(strategy or "", clock=time.monotonic, random=Random(), flow_control=flow_control)
    except ConfigError as error:
        click.echo(printable_lines(str(error)), err=True)
        sys.exit(1)
    click.echo(describe(pipeline))


@warmpath.command()
@click.option("--once", is_flag=True, help="Send a built-in workload with round-robin and with the strategy; compare.")
@click.option("--load", is_flag=True, help="Keep sending the built-in workload while the table is shown.")
@click.option(
    "--engine", default="sim", show_default=True, type=click.Choice(["sim", "vllm"]), help="What the pods are."
)
@click.option("--roles", metavar="1p1d", help="Pods that prefill (p), decode (d) or both (b), with sidecars.")
@click.option("--pods", type=WholeNumber(1, 32), help="How many. [default: 3 simulated, 2 of vLLM]")
@click.option("--replicas", default=1, show_default=True, type=WholeNumber(1, 8), help="EPP replicas, all active.")
@click.option("--port", type=WholeNumber(1, 65535), help="The gateway's port. [default: the manifests', 8080]")
@_strategy_options
@_plugins_from
@_flow_control
@_trust_client_headers
@click.option("--manifests", type=_PATH, help="Gateway, HTTPRoute, InferencePool YAML. [default: manifests/laptop]")
@click.option("--seed", default=1, show_default=True, help="Seed of pods and workload.")
@click.option("--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="Directory to leave all logs in.")
def up(**flags: Any) -> None:
    """Run the whole chain on this machine: pods, endpoint picker, Envoy, a live table."""
    from tooling.laptop.up import UpError, UpOptions, run

    flags["strategy"] = _one_of(flags["strategy"], flags["config"])
    try:
        sys.exit(asyncio.run(run(UpOptions(**flags))))
    except UpError as error:
        raise click.ClickException(printable_lines(str(error))) from None
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


@warmpath.command()
@click.argument("trace", default="chats")
@click.option(
    "--requests", type=WholeNumber(1), help="How many. [default: all of a file; of a workload what comes in 300 s]"
)
@click.option("--arrivals", default="poisson", show_default=True, type=click.Choice(("poisson", "steady", "bursty")))
@click.option("--pods", help="KINDS, as in 6*h100-8b,2*h100-8b@0.5 or 2*FILE.yaml. [8*h100-8b]")
@click.option(
    "--roles",
    metavar="2p2d",
    help="Pods that prefill (p), decode (d) or do both (b), all of the one kind of --pods [h100-8b].",
)
@click.option("--transfer", type=_SECONDS, help="Tokens a second from who prefills to who decodes. [200000]")
@click.option(
    "--l1", metavar="TOKENS[@SPEED]", help="KV in the memory of each node; loaded at SPEED tokens/s. [300000]"
)
@click.option("--l2", metavar="TOKENS[@SPEED]", help="KV in storage that all pods share; the same. [30000]")
@click.option("--pods-per-node", default=1, show_default=True, type=WholeNumber(1), help="They share their node's L1.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="A strategy, FILE.yaml, FILE.py:CLASS or oracle, +flow-control behind it for flow control; repeat. "
    "[default: prefix-aware, least-load, round-robin; with --roles prefix-aware, always-apart, never-apart, "
    "apart-from-16-tokens, without-roles]",
)
@_plugins_from
@click.option(
    "--oracle/--no-oracle",
    default=True,
    show_default=True,
    help="Show regret against true knowledge; not with --roles.",
)
@click.option("--load", type=_SECONDS, help="Rate as a share of what the pods can do. [default for workloads: 0.8]")
@click.option("--rate", type=_SECONDS, help="Requests a second.")
@click.option("--times", type=_SECONDS, help="Times the trace's own rate. [default for traces: 1]")
@click.option("--seed", default=0, show_default=True)
@click.option("--runs", default=1, show_default=True, type=WholeNumber(1, 100), help="With seeds that follow.")
@click.option("--workers", default=1, show_default=True, type=WholeNumber(1, 64), help="Processes.")
@click.option(
    "--slo-ttft", default=2.0, show_default=True, type=_SECONDS, help="Seconds; goodput counts what keeps it."
)
@click.option("--slo-tpot", default=0.05, show_default=True, type=_SECONDS, help="Seconds a token.")
@click.option("--scrape", default=1.0, show_default=True, type=_SECONDS, help="Seconds between scrapes of metrics.")
@click.option("--event-lag", default=0.002, show_default=True, type=click.FloatRange(0), help="Of KV events, seconds.")
@click.option("--replicas", default=1, show_default=True, type=WholeNumber(1, 16), help="Endpoint pickers.")
@click.option("--exchange", default=0.0005, show_default=True, type=click.FloatRange(0), help="Seconds between them.")
@click.option("--no-exchange", is_flag=True, help="They know nothing of each other.")
@click.option("--lean", is_flag=True, help="The gateway does not show answers: no first tokens, no usage.")
@click.option("--watch-answers", default=0.0, type=click.FloatRange(0, 1), help="Share of them it shows with --lean.")
@click.option("--foreign", default=0.0, type=click.FloatRange(0, 1), help="Share of requests that pass the picker by.")
@click.option(
    "--fail",
    multiple=True,
    metavar="POD@AT+SECONDS[:SHARE%]",
    help="A pod dies at AT and is back after SECONDS; or answers SHARE of its requests with errors at once.",
)
@click.option(
    "--class-slo",
    multiple=True,
    metavar="CLASS=TTFT/TPOT",
    help="Seconds within which requests of a class are to be served, - for any; pickers know of it. May be repeated.",
)
@click.option("--only", metavar="CLASS", help="Play one class of the workload's requests alone, at the same times.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--html", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Write a page with plots.")
def replay(as_json: bool, html: Path | None, no_exchange: bool, **flags: Any) -> None:
    """Replay TRACE through the scheduler on simulated pods, in virtual time, and compare policies.

    TRACE is a Mooncake JSONL file, plain or gzipped, or a workload: chats, documents-8k, documents-64k, agents, tools,
    batches, reasoning, bursts, independent, interactive-and-batch, noisy-neighbour, adapters, chats-and-reports,
    10k-1k, 5k-250, 1k-1k, 200-200, agents-with-slo, burst-from-zero, batch-gateway, flooded, demo.
    """
    from tooling.replay.command import main, plan

    if no_exchange:
        flags["exchange"] = None
    try:
        sys.exit(main(plan(**flags), as_json=as_json, html=html))
    except ConfigError as error:
        raise click.ClickException(printable_lines(str(error))) from None


@warmpath.command(cls=SidecarCommand)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=PORT, help="Where requests come.")
@click.option(
    "--model-server-port", "--vllm-port", default=8200, show_default=True, type=WholeNumber(1, 65535),
    help="Of the engine beside it.",
)  # fmt: skip
@click.option(
    "--kv-connector", default="nixlv2", show_default=True, type=click.Choice(["nixlv2", "shared-storage", "sglang"]),
    help="How the engine gets what another one computed.",
)  # fmt: skip
@click.option(
    "--sglang-bootstrap-port", default=8998, show_default=True, type=WholeNumber(1, 65535),
    envvar="SGLANG_BOOTSTRAP_PORT", show_envvar=True, help="Of SGLang's that prefill: --disaggregation-bootstrap-port.",
)  # fmt: skip
@click.option(
    "--data-parallel-size", default=1, show_default=True, type=WholeNumber(1, 64),
    help="Ranks of the engine: each has a port of its own, and one here, counted from the two ports above.",
)  # fmt: skip
@click.option(
    "--enable-prefiller-sampling",
    default=False,
    type=click.BOOL,
    help="Of several prefillers named take one by chance.",
)
@click.option("--prefill-max-retries", default=0, show_default=True, type=WholeNumber(0, 10))
@click.option("--prefill-retry-backoff", default="100ms", show_default=True, type=Duration())
@click.option("--prefill-timeout", default="2m", show_default=True, type=Duration(), help="Then it is computed here.")
@click.option("--max-body", default=64 << 20, show_default=True, type=WholeNumber(1), help="Bytes of a request.")
@click.option("--max-requests", default=4096, show_default=True, type=WholeNumber(1), help="At once.")
@click.option("--drain-timeout", default="30s", show_default=True, type=Duration(), help="For answers under way.")
@click.option("--metrics-port", default=0, show_default=True, type=PORT, help="0: no metrics.")
@click.option(
    "--secure-proxy", "--secure-serving", type=click.BOOL,
    help="TLS towards the gateway. [default: with --cert-path only; llm-d's: true]",
)  # fmt: skip
@click.option(
    "--cert-path", type=_DIRECTORY, help="Directory of tls.crt and tls.key. [default with TLS: a pair made here]"
)
@click.option("--enable-tls", default="", type=Stages(), help="Engines reached over TLS: prefiller, decoder.")
@click.option("--tls-insecure-skip-verify", default="", type=Stages(), help="Whose certificates are not verified.")
def sidecar(**flags: Any) -> None:
    """Serve beside an engine that decodes: have prompts computed by the engine that x-prefiller-host-port names."""
    from tooling.sidecar.command import main

    try:
        sys.exit(main(**flags))
    except ConfigError as error:
        raise click.ClickException(printable_lines(str(error))) from None


@warmpath.command()
@click.option("--endpoint", multiple=True, metavar="URL", help="A model server; may be repeated.")
@click.option("--endpoints", multiple=True, type=_PATH, help="A pool's files, as `serve` takes them; may be repeated.")
@click.option("--pool-name", help="An InferencePool: of the files, else of Kubernetes.")
@click.option("--pool-namespace", envvar="NAMESPACE", default="default", show_default=True)
@click.option("--kubeconfig", type=_FILE, help="How to reach Kubernetes.")
@click.option("--model", help="The model every endpoint should serve.")
@click.option(
    "--tokenizer", multiple=True, metavar="MODEL=DIRECTORY", help="As of `serve`: compared with the endpoints."
)
@click.option("--tokenizer-args", multiple=True, metavar="MODEL=FLAGS", help="As of `serve`.")
@click.option("--coordinator", metavar="URL", help="LMCache's coordinator.")
@click.option("--lmcache", multiple=True, metavar="URL", help="An LMCache server's HTTP port; may be repeated.")
@click.option("--timeout", default=10.0, show_default=True, type=_SECONDS, help="Seconds an answer may take.")
@click.option(
    "--event-timeout", "--patience", default=3.0, show_default=True, type=_SECONDS, help="Seconds KV events may take."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool, **flags: Any) -> None:
    """Report what is wrong with endpoints and their caches, and the flag that fixes it.

    Sends each endpoint at most four prompts, of some 400 tokens or four blocks, whichever is more. Exits 1 if there is
    a problem, 0 if not.
    """
    from tooling.doctor.command import DoctorOptions, main

    try:
        sys.exit(main(DoctorOptions(**flags), as_json=as_json))
    except ConfigError as error:
        raise click.UsageError(printable_lines(str(error))) from None


@warmpath.command()
@click.argument("file", required=False, type=_FILE)
@click.option("--curl", metavar="LINE", help="A curl command line instead of FILE, as one word.")
@click.option("--url", default="http://127.0.0.1:9090", show_default=True, help="The metrics port of a running picker.")
@click.option("--pool", default="", help="Of several: NAME or NAMESPACE/NAME.")
@click.option("--path", default="", help="The request's path. [default: by the body, /v1/chat/completions]")
@click.option("--model", default="", help="For a FILE that is a prompt and no JSON.")
@click.option("--header", multiple=True, metavar="NAME: VALUE", help="Of the request; may be repeated.")
@click.option("--token-file", type=_FILE, help="Token of who may read the metrics port, where it wants one.")
@click.option("--insecure", is_flag=True, help="Take any certificate.")
@click.option(
    "--endpoints", multiple=True, type=_PATH, help="No picker: a pool's files, of which nothing is known yet."
)
@click.option("--config", type=_FILE, help="With --endpoints: the EndpointPickerConfig.")
@click.option("--strategy", type=click.Choice(STRATEGIES), help="With --endpoints: a built-in configuration.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def explain(as_json: bool, **flags: Any) -> None:
    """Print where a request would go and why, without sending it.

    The request is FILE or standard input: a JSON body as a client sends it, or a prompt; or a --curl line. Exits 1 if
    it would be refused.
    """
    from tooling.explain.command import ExplainOptions, main

    _importable(flags["config"], None)
    try:
        sys.exit(main(ExplainOptions(**flags), as_json=as_json))
    except ConfigError as error:
        raise click.UsageError(printable_lines(str(error))) from None


@warmpath.command()
@click.option("--target", required=True, help="HOST:PORT of the endpoint picker's ext_proc service.")
@click.option("--tls", is_flag=True, help="Speak TLS, whatever certificate the target shows.")
@click.option("--endpoint", "endpoints", multiple=True, help="IP:PORT of one of its pool's endpoints; repeat for all.")
@click.option("--model", default="conformance", show_default=True, help="Model to ask for.")
@click.option("--header", "headers", multiple=True, help="NAME=VALUE to send with every request.")
@click.option("--health", help="HOST:PORT of its health service, in plain text.")
@click.option("--timeout", default=5.0, show_default=True, help="Seconds a reply may take.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def conformance(as_json: bool, **flags: Any) -> None:
    """Try an endpoint picker, whoever made it, against the protocol.

    Exits 0 if no MUST is broken, 1 if one is, 2 if no picker answers.
    """
    from tooling.conformance.command import main, options

    try:
        sys.exit(main(options(**flags), as_json=as_json))
    except ConfigError as error:
        raise click.UsageError(printable_lines(str(error))) from None


def main() -> None:
    """Entry point of the `warmpath` command."""
    warmpath(with_command(sys.argv[1:]), prog_name="warmpath")


def with_command(arguments: Sequence[str]) -> list[str]:
    """Flags alone mean `serve`: charts of other pickers pass nothing else."""
    alone = arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")
    return ["serve", *arguments] if alone else list(arguments)


if __name__ == "__main__":
    main()
