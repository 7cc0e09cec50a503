"""Flags as Go programs take them, and those of the reference pickers that change nothing here.

Sources: GIE v1.5 `pkg/epp/server/options.go`, GIE v1.6 `pkg/lwepp/server/options.go`, llm-d-router v0.10
`pkg/epp/server/options.go`; Go's packages flag and time, and pflag.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, NamedTuple, get_args

import click

from epp.documents.durations import seconds_of
from epp.telemetry.log import Format, Level

_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DEBUG: Final = 4
"""The reference's verbosities: 2 default, 3 verbose, 4 debug, 5 trace."""

ZapLevel = Literal["debug", "info", "error", "panic"]


class Duration(click.ParamType[float]):
    """Seconds, from `1m30s`, `50ms` or a plain number of seconds. At least `low`, or more than it if `above`."""

    name = "duration"

    def __init__(self, low: float = 0.0, *, above: bool = False) -> None:
        self._low = low
        self._above = above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        try:
            seconds = seconds_of(f"{text}s" if _NUMBER.fullmatch(text) else text)
        except ValueError:
            self.fail(f"{text!r} is no duration; expected one such as 50ms, 1m30s, or seconds", param, ctx)
        if seconds < self._low or (self._above and seconds == self._low):
            self.fail(f"{text} is too short; expected {'more than' if self._above else 'at least'} {self._low:g} s")
        return seconds


class WholeNumber(click.IntRange):
    """As click's, with what was expected where it is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            int(value)
        except ValueError:
            low, high = self.min or 0, "" if self.max is None else f", at most {self.max}"
            self.fail(f"{str(value)!r} is no whole number; expected one of at least {low}{high}", param, ctx)
        return int(super().convert(value, param, ctx))


PORT: Final = WholeNumber(0, 65535)


class Ports(click.ParamType[tuple[int, ...]]):
    """Ports, separated by commas."""

    name = "ports"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        return tuple(PORT(each, param, ctx) for each in str(value).split(","))


class NamespacedName(click.ParamType[tuple[str, str]]):
    """(namespace, name) of an object of Kubernetes, from `NAMESPACE/NAME`."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        namespace, slash, name = str(value).partition("/")
        if not (slash and _DNS_LABEL.fullmatch(namespace) and _DNS_LABEL.fullmatch(name)):
            self.fail(f"{value!r} is no name; expected NAMESPACE/NAME, each of a-z, 0-9 and -", param, ctx)
        return namespace, name


class Modules(click.ParamType["tuple[str, ...] | None"]):
    """Python modules, separated by commas; () from `none`, None from `any`."""

    name = "modules"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...] | None:
        if value is None or isinstance(value, tuple) or value == "any":
            return None if value == "any" else value
        names = tuple(each.strip() for each in str(value).split(",")) if value != "none" else ()
        for name in names:
            if name in ("any", "none") or not all(part.isidentifier() for part in name.split(".")):
                self.fail(
                    f"{name!r} is no module; expected any, none, or modules as in my_scorers,acme.plugins", param, ctx
                )
        return names


class MinimalTls(click.ParamType[str]):
    """Go's name of a TLS version. grpc's server takes 1.2 and newer, and cannot be configured otherwise."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "VersionTLS13":
            self.fail("grpc's server takes TLS 1.2 too; expected VersionTLS12", param, ctx)
        if value not in ("VersionTLS10", "VersionTLS11", "VersionTLS12"):
            self.fail(f"{value!r} is no version; expected VersionTLS12", param, ctx)
        return str(value)


class CipherSuites(click.ParamType[str]):
    """Go's names of cipher suites of TLS 1.2, separated by commas, as OpenSSL's, separated by colons."""

    name = "suites"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = [each.strip() for each in str(value).split(",")]
        for name in names:
            if name not in _SUITES:
                self.fail(f"{name!r} is no cipher suite; expected some of {', '.join(_SUITES)}", param, ctx)
        return ":".join(_SUITES[name] for name in names)


_SUITES: Final = {
    f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
    for key in ("ECDSA", "RSA")
    for go, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
    )
}
"""Those of TLS 1.2 that are not broken."""


class Verbosity(click.ParamType[Level]):
    """zap's level, a word or a number, as ours."""

    name = "level"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Level:
        text = str(value)
        if text.isascii() and text.isdigit():
            return of_verbosity(int(text))
        if text not in get_args(ZapLevel):
            self.fail(f"{text!r} is no level; expected one of {', '.join(get_args(ZapLevel))}, or a number", param, ctx)
        return "debug" if text == "debug" else "info" if text == "info" else "error"


def of_verbosity(number: int) -> Level:
    """Our level of the reference's `--v`."""
    return "debug" if number >= _DEBUG else "info"


def log_level(ours: Level | None, zap: Level | None, verbosity: int | None) -> Level:
    """Our own flag wins; `--zap-log-level` beats `--v`, as in the reference."""
    return ours or zap or of_verbosity(0 if verbosity is None else verbosity)


def log_format(ours: Format | None, encoder: str | None, devel: bool | None) -> Format:
    """Our own flag wins; `--zap-devel` is what decides where no `--zap-encoder` does."""
    if ours is not None:
        return ours
    return "json" if encoder == "json" or (encoder is None and devel is False) else "text"


class Idle(NamedTuple):
    """A flag that is taken and does nothing."""

    why: str
    usual: str | None = None
    """A value that asks for nothing else than what happens here; nothing is said of it."""
    boolean: bool = False
    refused: bool = False
    """Any other value asks for what this does not do, so it does not start."""


def _off(why: str) -> Idle:
    return Idle(why, "false", boolean=True)


def _on(why: str) -> Idle:
    return Idle(why, "true", boolean=True)


_BY_ENGINE: Final = (
    "an endpoint's label llm-d.ai/engine-type, or core-metrics-extractor, says what its metrics are called"
)
_AT_SCRAPE: Final = "metrics are put together when they are scraped"
_SIZES: Final = "--max-body bounds a request"

IDLE: Final[Mapping[str, Idle]] = {
    "ha-enable-leader-election": _off("every replica is active, none leads"),
    "enable-cert-reload": _on("a certificate is always followed as it changes"),
    "health-checking": _on("health is always served on the ext_proc port too"),
    "emit-endpoint-scores": _off("/decisions has the scores of every endpoint"),
    "enable-grpc-stream-metrics": _off("requests are counted, not streams"),
    "allow-experimental-plugins": _off("no plugin needs leave"),
    "metrics-staleness-threshold": Idle("what is known of an endpoint counts less as it ages"),
    "refresh-prometheus-metrics-interval": Idle(_AT_SCRAPE),
    "grpc-max-recv-msg-size": Idle(_SIZES),
    "grpc-max-send-msg-size": Idle(_SIZES),
    "model-server-metrics-scheme": Idle("endpoints are scraped over http", "http"),
    "model-server-metrics-path": Idle("endpoints are scraped at /metrics", "/metrics"),
    "model-server-metrics-port": Idle("an endpoint is scraped at its own port", "0"),
    "model-server-metrics-https-insecure-skip-verify": _on("endpoints are scraped over http"),
    "total-queued-requests-metric": Idle(_BY_ENGINE, "vllm:num_requests_waiting"),
    "total-running-requests-metric": Idle(_BY_ENGINE, "vllm:num_requests_running"),
    "kv-cache-usage-percentage-metric": Idle(_BY_ENGINE, "vllm:kv_cache_usage_perc"),
    "lora-info-metric": Idle(_BY_ENGINE, "vllm:lora_requests_info"),
    "cache-info-metric": Idle(_BY_ENGINE, "vllm:cache_config_info"),
    "zap-stacktrace-level": Idle("bugs are logged with their trace, at every level"),
    "zap-time-encoding": Idle("times are ISO 8601, UTC", "iso8601"),
}
"""Name of a reference's flag -> why it does nothing."""


_LLM_D: Final = "llm-d's pd-sidecar does that, behind the same picker"
_OTHER: Final = "it is of a connector that this sidecar does not serve"
_LOGS: Final = "a line is logged for each reason, once a minute"

SIDECAR_IDLE: Final[Mapping[str, Idle]] = {
    "tracing": _off("a request keeps its traceparent; no spans are made here"),
    "max-idle-conns-per-host": Idle("as many connections are kept as requests need"),
    "inference-pool": Idle("no InferencePool is read: it is the picker who names a prefiller"),
    "pool-group": Idle("no InferencePool is read: it is the picker who names a prefiller"),
    "mooncake-bootstrap-port": Idle(_OTHER),
    "p2p-connector-port": Idle(_OTHER),
    "moriio-decode-handshake-port": Idle(_OTHER),
    "moriio-decode-notify-port": Idle(_OTHER),
    "moriio-local-pod-ip": Idle(_OTHER),
    "moriio-parallel-decode-wait-timeout": Idle(_OTHER),
    "moriio-prefill-handshake-port": Idle(_OTHER),
    "moriio-prefill-notify-port": Idle(_OTHER),
    "moriio-tp-size": Idle(_OTHER),
    "zap-devel": Idle(_LOGS, boolean=True),
    "zap-encoder": Idle(_LOGS),
    "zap-log-level": Idle(_LOGS),
    "zap-stacktrace-level": Idle(_LOGS),
    "zap-time-encoding": Idle(_LOGS),
    "enable-ssrf-protection": Idle(
        "no InferencePool is read here; let only the gateway reach this port (NetworkPolicy)", "false", True, True
    ),
    "enable-p2p-pull": Idle(_LLM_D, "false", True, True),
    "ec-connector": Idle(f"encoders are not asked here; {_LLM_D}", "", refused=True),
    "decode-chunk-size": Idle(_LLM_D, "0", refused=True),
    "moriio-write-mode": Idle(_LLM_D, "false", True, True),
    "moriio-parallel-dispatch": Idle(_LLM_D, "false", True, True),
    "moriio-dp-size": Idle(_LLM_D, "1", refused=True),
    "moriio-dp-size-local": Idle(_LLM_D, "0", refused=True),
    "moriio-remote-hosts": Idle(_LLM_D, "", refused=True),
    "moriio-decode-hosts": Idle(_LLM_D, "", refused=True),
    "configuration": Idle("give what it says as flags", "", refused=True),
    "configuration-file": Idle("give what it says as flags", "", refused=True),
}
"""The same of llm-d's sidecar. Source: llm-d-router v0.10 `pkg/sidecar/proxy/options.go`."""


class Stages(click.ParamType[frozenset[str]]):
    """Stages of a request, separated by commas."""

    name = "stages"
    known: Final = ("prefiller", "decoder")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> frozenset[str]:
        if isinstance(value, frozenset):
            return value
        names = [each.strip() for each in str(value).split(",") if each.strip()]
        for name in names:
            if name not in self.known:
                self.fail(f"{name!r} is no stage here; expected {' or '.join(self.known)}", param, ctx)
        return frozenset(names)


class GoCommand(click.Command):
    """A command whose flags are spelt as Go's are, one dash or two; with those of `IDLE`.

    What follows a boolean flag is not its value: Go reads `--tracing false` as `--tracing=true`, and so it is here.
    Whatever was given and does nothing is handed to the callback, a sentence each, as `idle_flags`.
    """

    idle: ClassVar[Mapping[str, Idle]] = IDLE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, idle in self.idle.items():
            kind = click.BOOL if idle.boolean else click.STRING
            self.params.append(click.Option([f"--{name}"], hidden=True, type=kind, expose_value=False))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        idle: list[str] = []
        rest = super().parse_args(ctx, _Spelling(self.get_params(ctx), self.idle, idle).of(args))
        ctx.params["idle_flags"] = tuple(idle)
        return rest


class SidecarCommand(GoCommand):
    """The same with those of `SIDECAR_IDLE`."""

    idle = SIDECAR_IDLE


class _Spelling:
    """Arguments as click takes them: `--name=value`."""

    def __init__(self, params: list[click.Parameter], known: Mapping[str, Idle], idle: list[str]) -> None:
        self._options = {
            name: option
            for option in params
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        self._known = known
        self._idle = idle

    def of(self, args: list[str]) -> list[str]:
        found: list[str] = []
        todo = list(reversed(args))
        while todo:
            argument = todo.pop()
            if argument == "--":
                return [*found, "--", *reversed(todo)]
            name, option, value = self._flag(argument)
            if option is None or option.is_flag:
                found.append(name if value is None else f"{name}={value}")
                continue
            boolean = option.type is click.BOOL
            if value is None and boolean:
                value = "true"
                if todo and todo[-1].lower() in ("true", "false"):
                    stray = todo.pop()
                    self._idle.append(f"{stray!r} after {name}: a value follows '=', as in {name}={stray}")
            elif value is None and todo:
                value = todo.pop()
            if value == "" and isinstance(option.type, (click.types.StringParamType, click.Path)):
                continue  # as if it were not there
            found.append(name if value is None else f"{name}={value}")
            self._note(name, value)
        return found

    def _flag(self, argument: str) -> tuple[str, click.Option | None, str | None]:
        """The flag's name with two dashes, its option, and its value if it is in the same argument."""
        if not argument.startswith("-") or argument == "-":
            return argument, None, None
        if re.fullmatch(r"-v\d+", argument):
            argument = f"-v={argument[2:]}"
        name, equals, value = argument.partition("=")
        if not name.startswith("--") and (len(name) > 2 or f"-{name}" in self._options):
            name = f"-{name}"
        return name, self._options.get(name), value if equals else None

    def _note(self, name: str, value: str | None) -> None:
        idle = self._known.get(name.removeprefix("--"))
        if idle is None or value is None:
            return
        if value != idle.usual and not (idle.boolean and _truth(value) == _truth(idle.usual or "")):
            if idle.refused:
                raise click.UsageError(f"{name}: {idle.why}; expected {idle.usual or 'none'}")
            self._idle.append(f"{name}: {idle.why}")


def _truth(value: str) -> bool:
    return value.lower() in ("1", "t", "true")
