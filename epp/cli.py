"""`warmpath`: up · serve · check · render · conformance. Flags to settings, nothing else."""

import asyncio
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import click

from epp import __version__, protocol
from epp.errors import ConfigError

STRATEGIES = ("prefix-aware", "session", "round-robin", "least-load")

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PATH = click.Path(exists=True, path_type=Path)
_PORT = click.IntRange(0, 65535)
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


def _importable(config: Path | None) -> None:
    """Let a configuration name plugins in modules beside it."""
    if config is not None:
        sys.path.insert(0, str(config.absolute().parent))


def _one_of(strategy: str | None, config: Path | None) -> str:
    if strategy and config:
        raise click.UsageError("--strategy and --config exclude each other: the file says how to pick")
    return strategy or STRATEGIES[0]


@warmpath.command()
@click.option(
    "--endpoints",
    multiple=True,
    type=_PATH,
    help="Pools from files: endpoints list, InferencePool, Pod, objective, rewrite YAML; a directory too. Re-read on "
    "change. Without it pools come from Kubernetes.",
)
@click.option("--pool-name", multiple=True, help="The InferencePool to serve; may be repeated in Kubernetes.")
@click.option("--pool-selector", help="Kubernetes: serve the InferencePools with these labels.")
@click.option(
    "--pool-namespace", envvar="NAMESPACE", default="default", show_default=True, help="Kubernetes: where to look."
)
@click.option("--endpoint-selector", help="Kubernetes without InferencePools: labels of the Pods to pick from.")
@click.option(
    "--endpoint-target-ports", multiple=True, type=_PORT, help="The ports those Pods serve on; may be repeated."
)
@_strategy_options
@click.option(
    "--fallbacks",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Endpoints to name beside the first, for retries.",
)
@click.option(
    "--secure-serving", type=bool, help="TLS on the ext_proc port: true or false. [default: true in Kubernetes]"
)
@click.option(
    "--cert-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of tls.crt and tls.key, followed as they change. [default: self-signed]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address every port is bound to.")
@click.option(
    "--grpc-port",
    multiple=True,
    type=_PORT,
    help="ext_proc, one for each pool in the files' order. [default: the pool's endpointPickerRef, else 9002]",
)
@click.option("--grpc-health-port", default=protocol.HEALTH_PORT, show_default=True, type=_PORT)
@click.option(
    "--metrics-port", default=protocol.METRICS_PORT, show_default=True, type=_PORT, help="/metrics, /ready, the page."
)
@click.option(
    "--refresh-metrics-interval", default=1.0, show_default=True, type=_SECONDS, help="Seconds between scrapes."
)
@click.option(
    "--decision-deadline", default=5.0, show_default=True, type=_SECONDS, help="Seconds until a request is refused."
)
@click.option(
    "--max-body", default=64, show_default=True, type=click.IntRange(1, 1024), help="Largest request body, MiB."
)
@click.option(
    "--drain-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds from SIGTERM to the end, at most.",
)
@click.option(
    "--drain-linger",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0),
    help="The first seconds of these, in which gateways may still send requests.",
)
@click.option(
    "--trust-client-headers/--no-trust-client-headers",
    default=False,
    show_default=True,
    help="Honour objective and fairness headers that come with the request.",
)
@click.option("--audit-log", type=click.Path(dir_okay=False, path_type=Path), help="One JSON line per request.")
@click.option("--log-format", type=click.Choice(("text", "json")), default="text", show_default=True)
@click.option(
    "--log-level", type=click.Choice(("debug", "info", "warning", "error")), default="info", show_default=True
)
def serve(**flags: Any) -> None:
    """Run the endpoint picker, on pools from files or from Kubernetes."""
    from epp.app import Settings, run

    flags["strategy"] = _one_of(flags["strategy"], flags["config"])
    flags["max_body"] *= 1 << 20
    _importable(flags["config"])
    try:
        sys.exit(run(Settings(**flags)))
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


@warmpath.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--strategy", type=click.Choice(STRATEGIES), help="Show a built-in configuration instead of a file.")
def check(file: Path | None, strategy: str | None) -> None:
    """Print the pipeline that FILE (an EndpointPickerConfig) gives, or every error in it."""
    if (file is None) == (strategy is None):
        raise click.UsageError("give either a FILE or --strategy")
    from epp.describe import describe
    from epp.loader import load_file, load_strategy

    try:
        if file is not None:
            _importable(file)
            pipeline = load_file(file, clock=time.monotonic, random=Random())
        else:
            pipeline = load_strategy(strategy or "", clock=time.monotonic, random=Random())
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    click.echo(describe(pipeline))


@warmpath.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def render(file: Path) -> None:
    """Print the manifests of a whole stack from five values: model, replicas, strategy, l1Size, l2Backend."""
    from epp.render import render_file

    try:
        click.echo(render_file(file))
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(1)


@warmpath.command()
@click.option("--once", is_flag=True, help="Send a built-in workload with round-robin and with the strategy; compare.")
@click.option("--load", is_flag=True, help="Keep sending the built-in workload while the table is shown.")
@click.option("--pods", default=3, show_default=True, type=click.IntRange(1, 32), help="Simulated vLLM pods.")
@click.option("--replicas", default=1, show_default=True, type=click.IntRange(1, 8), help="EPP replicas, all active.")
@click.option("--port", type=click.IntRange(1, 65535), help="The gateway's port. [default: the manifests', 8080]")
@_strategy_options
@click.option("--manifests", type=_PATH, help="Gateway, HTTPRoute, InferencePool YAML. [default: manifests/laptop]")
@click.option("--seed", default=1, show_default=True, help="Seed of pods and workload.")
@click.option("--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="Directory to leave all logs in.")
def up(**flags: Any) -> None:
    """Run the whole chain on this machine: pods, endpoint picker, Envoy, a live table."""
    from laptop.up import Options, UpError, run

    flags["strategy"] = _one_of(flags["strategy"], flags["config"])
    try:
        sys.exit(asyncio.run(run(Options(**flags))))
    except UpError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


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
    """Try an endpoint picker, of whoever's making, against the protocol.

    Exits 0 if no MUST is broken, 1 if one is, 2 if nobody answers.
    """
    from epp.conformance.command import main, options

    try:
        sys.exit(main(options(**flags), as_json=as_json))
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def main() -> None:
    """Entry point of the `warmpath` command. Flags alone mean `serve`: charts of other pickers pass nothing else."""
    arguments = sys.argv[1:]
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version"):
        arguments = ["serve", *arguments]
    warmpath(arguments, prog_name="warmpath")


if __name__ == "__main__":
    main()
