"""Prefill and decode apart: profile handlers that find an endpoint for each stage, and deciders that say whether to.

The gateway sends the request to the endpoint that decodes. The sidecar there has it prefilled by the endpoint that a
header names, which keeps the KV cache until the other has fetched it. Order: an endpoint to decode, a decider that
looks at what *that* endpoint holds, an endpoint to prefill. Both are on account (`epp.scheduling.scheduler`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol

from msgspec.structs import replace

from epp.plugin import (
    Cost,
    Decider,
    Endpoint,
    NoEndpoint,
    Picked,
    Plugin,
    PrefixMatch,
    ProfileHandler,
    Reference,
    Request,
    Response,
    RoleView,
    RunProfile,
    Services,
    computes_prompts,
    stages_of,
)

_PREFIX_BASED: Final = "prefix-based-pd-decider"
_ROLE: Final = "llm-d.ai/role"

WhenNoPrefiller = Literal["decode", "refuse"]


class _Stages(ProfileHandler):
    """What handlers of stages have in common: counts, and what happens where nobody can prefill."""

    when_no_prefiller: WhenNoPrefiller

    def __init__(self) -> None:
        self._report: Callable[[str, str], None] = _unreported
        self._engine_of: Callable[[Endpoint], str] = _unnamed
        self._counts = {
            "decode-only": 0, "prefill-decode": 0, "encode-decode": 0, "encode-prefill-decode": 0, "no-prefiller": 0,
            "prefill-failed": 0,
        }  # fmt: skip

    def start(self, services: Services) -> None:
        self._report, self._engine_of = services.degraded, services.engine_of

    def on_answered(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        if response.prefill_failed:
            self._counts["prefill-failed"] += 1
            came = "prefilled where it is decoded" if self._computes(endpoint) else "failed, since nobody prefilled it"
            self._report("prefill-failed", f"{came}: at {endpoint.name}, as its sidecar says")

    def statistics(self) -> Mapping[str, float]:
        """Requests by the stages that had endpoints of their own, in llm-d's words; and `no-prefiller`, where nobody
        was there to prefill, and `prefill-failed`, where the one that was to prefill did not.
        """
        return self._counts

    def _check_setting(self) -> None:
        if self.when_no_prefiller not in ("decode", "refuse"):
            raise ValueError(f"whenNoPrefiller: expected decode or refuse, got {self.when_no_prefiller!r}")

    def _no_prefiller(self, why: str, decode: Endpoint | None) -> None:
        """Raises NoEndpoint where the setting is to refuse, or nobody else could prefill either. Never silent."""
        self._counts["no-prefiller"] += 1
        if decode is not None and not self._computes(decode):
            self._report("no-prefiller", f"refused: {why}")
            raise NoEndpoint(f"{why}, and SGLang computes no prompt where it decodes")
        if self.when_no_prefiller == "refuse":
            self._report("no-prefiller", f"refused: {why}")
            raise NoEndpoint(f"{why}, and whenNoPrefiller is refuse")
        self._report("no-prefiller", f"prefilled where it is decoded: {why}")

    def _needed(
        self, request: Request, endpoints: Sequence[Endpoint], decider: Decider | None
    ) -> Sequence[Sequence[Endpoint]]:
        """`stages`, where a decider says who is prefilled elsewhere: not who need not be somewhere."""
        decode, *others = stages_of(endpoints)
        if not others or not request.tokens or not all(self._prefills_apart(decider, request, one) for one in decode):
            return [decode]
        return [decode, *others]

    def _prefills_apart(self, decider: Decider | None, request: Request, decode: Endpoint) -> bool:
        """Whether its prompt is to be computed elsewhere: some endpoints cannot, whatever the decider says."""
        return _wants(decider, request, decode) or not (request.whole or self._computes(decode))

    def _computes(self, decode: Endpoint) -> bool:
        return computes_prompts(decode, self._engine_of(decode))

    def _decided(
        self, decider: Decider | None, request: Request, endpoints: Sequence[Endpoint], prefill: Endpoint
    ) -> Picked:
        if decider is None or not self._computes(endpoints[0]):
            return Picked(endpoints, prefill=prefill)
        verdict = decider.accepts(request, endpoints[0], prefill)
        if isinstance(verdict, bool):
            return Picked(endpoints, prefill=prefill if verdict else None)
        return Picked(endpoints, prefill=prefill if verdict["apart"] < verdict["here"] else None, ways=verdict)

    def _picked(self, picked: Picked) -> Picked:
        name = ("encode-" if picked.encode else "") + ("prefill-" if picked.prefill else "") + "decode"
        stages = name if name in self._counts else "decode-only"
        self._counts[stages] += 1
        return replace(picked, division=stages)


def _unreported(reason: str, detail: str) -> None:
    """Before its life begins."""


def _unnamed(endpoint: Endpoint) -> str:
    """Likewise."""
    return ""


def _wants(decider: Decider | None, request: Request, decode: Endpoint | None) -> bool:
    """Whether a part of the request is to be done elsewhere, which sidecars may not know how to divide."""
    return decider is not None and not request.whole and decider.wants(request, decode)


def _beside(request: Request, stage: Literal["prefill", "encode"], decode: Endpoint | None) -> Request:
    """The request as the endpoint of another stage gets it: one that ends without an answer."""
    return replace(request, stage=stage, peer=decode, stream=False, max_tokens=1, kept=dict(request.kept))


@dataclass(eq=False)
class RoleProfileHandler(_Stages):
    """`role-profile-handler`: runs the one profile for each stage, over the endpoints whose role says they serve it.

    Without roles (label `llm-d.ai/role`) in the pool it is `single-profile-handler`. An endpoint that only prefills or
    encodes never gets a request to decode. Parameters:
      decider            the plugin that says whether a request is prefilled elsewhere; by default
                         `expected-ttft-pd-decider`
      when_no_prefiller  `decode` (default): where no endpoint is there to prefill, the one that decodes does that too,
                         and `warmpath_degraded_total{reason="no-prefiller"}` says so; `refuse`: status 503
    """

    decider: str = "expected-ttft-pd-decider"
    when_no_prefiller: WhenNoPrefiller = "decode"
    _roles: RoleView = field(default_factory=RoleView, init=False, repr=False)
    _decider: Decider = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__()
        self._check_setting()

    def refers(self) -> Mapping[str, Reference]:
        return {"decider": Reference(self.decider, Decider, add=True)}

    def connect(self, plugins: Mapping[str, Any]) -> None:
        self._decider = plugins["decider"]

    def check(self, profiles: Sequence[str]) -> None:
        if len(profiles) != 1:
            raise ValueError(f"role-profile-handler needs exactly one profile, found {', '.join(profiles) or 'none'}")

    def stages(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Sequence[Endpoint]]:
        return self._needed(request, endpoints, self._decider)

    def divides(self, endpoints: Sequence[Endpoint]) -> bool:
        return self._roles.of(endpoints).apart

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        (profile,) = profiles
        roles = self._roles.of(run.candidates)
        if not roles.apart:
            return Picked(run(profile))
        if not roles.decode:
            found = ", ".join(sorted({endpoint.labels[_ROLE] for endpoint in run.candidates})[:8])
            raise NoEndpoint(f"none of {len(run.candidates)} endpoints decodes, by its label {_ROLE}: {found}")
        endpoints = run(profile, None, roles.decode)
        decode = endpoints[0]
        if not request.tokens or not self._prefills_apart(self._decider, request, decode):
            return self._picked(Picked(endpoints))
        others = [endpoint for endpoint in roles.prefill if endpoint is not decode]
        if not others:
            if decode not in roles.prefill:
                self._no_prefiller(f"none of {len(run.candidates)} endpoints prefills for {decode.name}", decode)
            return self._picked(Picked(endpoints))
        prefill = run(profile, _beside(request, "prefill", decode), others)[0]
        return self._picked(self._decided(self._decider, request, endpoints, prefill))


@dataclass(frozen=True)
class StageProfiles:
    """Names of the profiles of each stage."""

    decode: str = ""
    prefill: str = ""
    encode: str = ""


@dataclass(frozen=True)
class StageDeciders:
    """Names of the deciders; a stage without one is never apart."""

    prefill: str = ""
    encode: str = ""


@dataclass(eq=False)
class DisaggProfileHandler(_Stages):
    """`disagg-profile-handler`: a profile for each stage; decode first, then encode and prefill where deciders say so.

    Parameters (llm-d's, but the last):
      stage_order        `decode-first` (default), or `prefill-first`: prefill, encode, decode, without a decider of
                         prefill
      profiles           names of the profiles: `decode`, `prefill`, `encode` by default
      deciders           names of the plugins that decide on `prefill` and `encode`
      when_no_prefiller  as of `role-profile-handler`
    Or the flat names of its older releases: `decode_profile`, `prefill_profile`, `encode_profile`,
    `prefill_decider_plugin_name` or `decider_plugin_name`, `encode_decider_plugin_name`; not both.

    It sets the headers itself, as llm-d's does since v0.9. Source: llm-d-router, v0.8 to v0.10.
    """

    stage_order: str = ""
    profiles: StageProfiles = field(default_factory=StageProfiles)
    deciders: StageDeciders = field(default_factory=StageDeciders)
    when_no_prefiller: WhenNoPrefiller = "decode"
    decode_profile: str = ""
    prefill_profile: str = ""
    encode_profile: str = ""
    prefill_decider_plugin_name: str = ""
    decider_plugin_name: str = ""
    encode_decider_plugin_name: str = ""
    _deciders: dict[str, Decider] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__()
        self._check_setting()
        flat = (
            self.decode_profile, self.prefill_profile, self.encode_profile, self.prefill_decider_plugin_name,
            self.decider_plugin_name, self.encode_decider_plugin_name,
        )  # fmt: skip
        if any(flat) and (self.profiles != StageProfiles() or self.deciders != StageDeciders()):
            raise ValueError("expected profiles and deciders, or the older flat names; got both")
        self._decode = self.profiles.decode or self.decode_profile or "decode"
        self._prefill = self.profiles.prefill or self.prefill_profile or "prefill"
        self._encode = self.profiles.encode or self.encode_profile or "encode"
        self._prefill_decider = self.deciders.prefill or self.prefill_decider_plugin_name or self.decider_plugin_name
        self._encode_decider = self.deciders.encode or self.encode_decider_plugin_name
        order = self.stage_order.lower().replace("-", "").replace("_", "")
        if order not in ("", "decode", "decodefirst", "prefill", "prefillfirst"):
            raise ValueError(f"stageOrder: expected decode-first or prefill-first, got {self.stage_order!r}")
        self._prefill_first = order.startswith("prefill")
        if self._prefill_first and self._prefill_decider:
            raise ValueError("deciders.prefill: expected none with stageOrder prefill-first, which always prefills")

    def refers(self) -> Mapping[str, Reference]:
        named = {"deciders.prefill": self._prefill_decider, "deciders.encode": self._encode_decider}
        return {path: Reference(name, Decider) for path, name in named.items() if name}

    def connect(self, plugins: Mapping[str, Any]) -> None:
        self._deciders = {path.removeprefix("deciders."): decider for path, decider in plugins.items()}

    def check(self, profiles: Sequence[str]) -> None:
        needed = [self._decode]
        needed += [self._prefill] if self._prefill_decider else []
        needed += [self._encode] if self._encode_decider else []
        if missing := [name for name in needed if name not in profiles]:
            raise ValueError(f"no profile is called {', '.join(missing)}; found {', '.join(profiles)}")

    def stages(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Sequence[Endpoint]]:
        if self._prefill_first and not request.whole:
            return super().stages(request, endpoints)
        return self._needed(request, endpoints, self._deciders.get("prefill"))

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        if self._prefill_first and not request.whole:
            return self._picked(self._from_prefill(request, profiles, run))
        endpoints = run(self._decode)
        decode = endpoints[0]
        encode = self._encoders(request, profiles, decode, run)
        decider = self._deciders.get("prefill")
        if self._prefill not in profiles or not self._prefills_apart(decider, request, decode):
            return self._picked(Picked(endpoints, encode=encode))
        try:
            prefill = run(self._prefill, _beside(request, "prefill", decode))[0]
        except NoEndpoint as error:
            self._no_prefiller(str(error), decode)
            return self._picked(Picked(endpoints, encode=encode))
        if prefill is decode:
            return self._picked(Picked(endpoints, encode=encode))
        return self._picked(replace(self._decided(decider, request, endpoints, prefill), encode=encode))

    def _from_prefill(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        prefill = None
        if self._prefill in profiles:
            try:
                prefill = run(self._prefill, _beside(request, "prefill", None))[0]
            except NoEndpoint as error:
                self._no_prefiller(str(error), None)
        encode = self._encoders(request, profiles, None, run)
        endpoints = run(self._decode, replace(request, peer=prefill))
        return Picked(endpoints, prefill=None if prefill is endpoints[0] else prefill, encode=encode)

    def _encoders(
        self, request: Request, profiles: Sequence[str], decode: Endpoint | None, run: RunProfile
    ) -> Sequence[Endpoint]:
        decider = self._deciders.get("encode")
        if self._encode not in profiles or not _wants(decider, request, decode):
            return ()
        try:
            return run(self._encode, _beside(request, "encode", decode))
        except NoEndpoint as error:
            self._report("no-encoder", str(error))
            return ()


@dataclass(eq=False)
class PdProfileHandler(DisaggProfileHandler):
    """`pd-profile-handler`: llm-d's older name, with the flat parameters and a decider always.

    `primary_port`: the port that requests go to where a pod has several data-parallel ranks; the rank that was picked
    is named in a header. Deprecated in llm-d since v0.7. Source: llm-d-router, v0.8 to v0.10.
    """

    decider_plugin_name: str = _PREFIX_BASED
    primary_port: int = 0
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""
    prefix_match_info_producer_name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_port(self.primary_port, least=0)

    def refers(self) -> Mapping[str, Reference]:
        given = super().refers()
        return {path: each._replace(add=each.name == _PREFIX_BASED) for path, each in given.items()}

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        return replace(super().handle(request, profiles, run), port=self.primary_port)


@dataclass(eq=False)
class DataParallelProfileHandler(ProfileHandler):
    """`data-parallel-profile-handler`: one profile; requests go to `primary_port` (8000) of the pod, and a header names
    the data-parallel rank that was picked. Deprecated in llm-d: give the InferencePool a port for each rank.

    Source: llm-d-router.
    """

    primary_port: int = 8000

    def __post_init__(self) -> None:
        _check_port(self.primary_port, least=1)

    def check(self, profiles: Sequence[str]) -> None:
        if len(profiles) != 1:
            raise ValueError(f"data-parallel-profile-handler needs exactly one profile, found {', '.join(profiles)}")

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        return Picked(run(profiles[0]), port=self.primary_port)


def _check_port(port: int, *, least: int) -> None:
    if not least <= port <= 65535:
        raise ValueError(f"primaryPort: expected {least} to 65535, got {port}")


@dataclass(eq=False)
class DisaggHeadersHandler(Plugin):
    """`disagg-headers-handler` and `prefill-header-handler`: nothing to do, the profile handler sets the headers.

    Parameters of llm-d's, without effect: `prefill_profile`, `encode_profile`. Deprecated there since v0.9.
    """

    prefill_profile: str = "prefill"
    encode_profile: str = "encode"


# --- deciders -------------------------------------------------------------------------------------------------------


class AlwaysDisaggPdDecider(Decider):
    """`always-disagg-pd-decider`: every request is prefilled elsewhere. No parameters. Source: llm-d-router."""

    def wants(self, request: Request, decode: Endpoint | None) -> bool:
        return True


@dataclass(eq=False)
class PrefixBasedPdDecider(Decider):
    """`prefix-based-pd-decider`: prefilled elsewhere if the one that decodes would have to compute so many tokens.

    `non_cached_tokens` (tokens, 0 = never): of the prompt, at least so many are not in its cache. `prompt_tokens`
    (tokens, 0): shorter prompts never are. Source: llm-d-router.
    """

    needs: ClassVar[tuple[type[Any], ...]] = (PrefixMatch,)

    non_cached_tokens: int = 0
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("non_cached_tokens", "prompt_tokens"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")

    def wants(self, request: Request, decode: Endpoint | None) -> bool:
        if not self.non_cached_tokens or decode is None or request.tokens < self.prompt_tokens:
            return False
        match: PrefixMatch | None = request.signals.get(PrefixMatch, {}).get(decode)
        return match is not None and request.tokens - match.tokens >= self.non_cached_tokens


class AlwaysDisaggMultimodalDecider(Decider):
    """`always-disagg-multimodal-decider`: requests with images, video or sound. No parameters. Source: llm-d-router."""

    def wants(self, request: Request, decode: Endpoint | None) -> bool:
        return request.media_tokens > 0


class Ways(Protocol):
    """A cost that can compare: `expected-ttft`."""

    def ways(self, request: Request, decode: Endpoint, prefill: Endpoint) -> Mapping[str, float]: ...
    def might_split(self, request: Request, decode: Endpoint) -> bool: ...


class ExpectedTtftPdDecider(Decider):
    """`expected-ttft-pd-decider`: by seconds, as `expected-ttft` knows them; no threshold and no parameters.

    Here: the wait and the prefill at the endpoint that decodes, of what is not cached there, and a stall as long for
    each answer in flight there. Apart: the wait and the prefill at the other, what it makes others wait there, and the
    transfer. Source: ours.
    """

    _cost: Ways

    def refers(self) -> Mapping[str, Reference]:
        return {"cost": Reference("expected-ttft", Cost, add=True)}

    def connect(self, plugins: Mapping[str, Any]) -> None:
        self._cost = plugins["cost"]

    def wants(self, request: Request, decode: Endpoint | None) -> bool:
        return decode is not None and self._cost.might_split(request, decode)

    def accepts(self, request: Request, decode: Endpoint, other: Endpoint) -> Mapping[str, float]:
        return self._cost.ways(request, decode, other)
