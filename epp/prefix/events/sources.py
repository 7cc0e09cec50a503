"""Where an endpoint's engines publish their KV events: by their own word, by convention, by configuration. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final, Literal, TypeVar

import msgspec

CONVENTION: Final = 5557
"""Port of the first data-parallel rank; the next ranks' ports follow (vLLM's `--kv-events-config`)."""
_RANK: Final = re.compile(r"-rank-(\d{1,3})\Z")
_ADDRESS: Final = re.compile(r"tcp://(\[[^\]]*\]|[^:/\[\]]*|::):(\d{1,5})\Z")
MOST: Final = 64
"""Data-parallel ranks of one endpoint that are listened to."""
RANKS: Final = 100_000
"""Ranks are less than this."""
_LONGEST_TOPIC: Final = 1024
"""Bytes of a topic that can name an endpoint."""

T = TypeVar("T")


@dataclass(frozen=True)
class PodDiscovery:
    """Ports where a pod does not publish its own. Which pods there are, the pool says; the selectors are not used."""

    socket_port: int = CONVENTION
    replay_socket_port: int = 0
    """0: no replay."""
    pod_label_selector: str = ""
    pod_namespace: str = ""


@dataclass(frozen=True)
class KvEvents:
    """llm-d's `kvEventsConfig`. Events are read on the event loop, and both engines' alike: `concurrency` and
    `engine_type` change nothing."""

    topic_filter: str = ""
    """Only topics that begin with it; "" = all."""
    concurrency: int = 4
    engine_type: Literal["vllm", "sglang"] = "vllm"
    discover_pods: bool = True
    """Connect to each endpoint."""
    zmq_endpoint: str = ""
    """Listen here too (`tcp://*:5557`), for engines that connect to us. Their topic names them: `kv@<ip>[:port]@…`.
    Pools of one picker listen there together."""
    max_message_bytes: int = 2 << 20
    """Ours. A larger message is not read; what its endpoint holds is then matched approximately until that is known
    again. vLLM sends a message for each step: one that computes 65,536 tokens (`--max-num-batched-tokens`) in blocks of
    16 and evicts as many blocks takes at most 1 MiB. Loading a longer prompt from a connector at once may take more."""
    pod_discovery_config: PodDiscovery = field(default_factory=PodDiscovery)

    def __post_init__(self) -> None:
        if self.zmq_endpoint and not re.match(r"(tcp|ipc)://.", self.zmq_endpoint):
            raise ValueError(f"zmqEndpoint: expected tcp://HOST:PORT or ipc://PATH, got {self.zmq_endpoint!r}")
        if not 1 << 16 <= self.max_message_bytes <= 1 << 26:
            raise ValueError(f"maxMessageBytes: {self.max_message_bytes}, expected 65536 to 67108864")


class Source(msgspec.Struct, frozen=True):
    """One publisher: addresses as zmq has them. `replay` "" = it repeats nothing."""

    rank: int
    publisher: str
    replay: str = ""


class _Told(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None


def sources_on(page: bytes, address: str) -> list[Source]:
    """The publishers that an endpoint's `/kv_event_sources` names; [] where it publishes nothing.

    Raises ValueError for what is no such page. A wildcard means the endpoint's own host, and no other host is accepted:
    a server could send us anywhere. Those that connect elsewhere (perhaps to us) are left out.
    """
    try:
        ranks = msgspec.json.decode(page, type=dict[str, _Told])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no list of KV event sources: {error}") from None
    found = []
    for rank, each in list(ranks.items())[:MOST]:
        publisher = _at(each.endpoint or "", address)
        if publisher and rank.isascii() and rank.isdigit() and len(rank) < 6:
            found.append(Source(int(rank), publisher, _at(each.replay_endpoint or "", address)))
    return found


class _Described(msgspec.Struct):
    endpoint_port_base: int
    endpoint_host: str = "*"
    replay_endpoint_port_base: int = 0
    dp_size: int = 1


class _ServerInfo(msgspec.Struct):
    kv_events: _Described | None


def sources_in(page: bytes, address: str) -> list[Source]:
    """The publishers that SGLang's `/server_info` describes (0.5.23), one for each data-parallel rank; [] where it
    publishes nothing. Raises ValueError for what describes none. No other host is accepted.
    """
    try:
        told = msgspec.json.decode(page, type=_ServerInfo).kv_events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no description of KV events: {error}") from None
    if told is None:
        return []
    found = []
    for rank in range(min(told.dp_size, MOST)):
        publisher, replay = (
            _at(f"tcp://{told.endpoint_host}:{base + rank}", address) if base else ""
            for base in (told.endpoint_port_base, told.replay_endpoint_port_base)
        )
        if publisher:
            found.append(Source(rank, publisher, replay))
    return found


def sources_of(rank: int | None, sources: list[Source]) -> list[Source]:
    """Of what an address publishes, that of an endpoint: of a data-parallel rank behind it one, in order of numbers."""
    if rank is None:
        return sources
    return sorted(sources, key=lambda source: source.rank)[rank : rank + 1]


def conventional(name: str, address: str, config: PodDiscovery) -> list[Source]:
    """Where an endpoint that does not say publishes, if it does: a port of its own for each data-parallel rank."""
    found = _RANK.search(name)
    rank = int(found[1]) if found else 0
    host = address.rpartition(":")[0]
    replay = f"tcp://{host}:{config.replay_socket_port + rank}" if config.replay_socket_port else ""
    return [Source(0, f"tcp://{host}:{config.socket_port + rank}", replay)]


def _at(publisher: str, address: str) -> str:
    """Address to connect to, or "" for none."""
    host = address.rpartition(":")[0].strip("[]")
    loopback = ip_address(host).is_loopback
    if publisher.startswith("ipc://"):
        return publisher if loopback else ""
    found = _ADDRESS.match(publisher)
    if found is None or not 0 < int(found[2]) < 65536:
        return ""
    named = found[1].strip("[]").removeprefix("::ffff:")
    if named not in ("*", "::", "", "0.0.0.0", host):
        return ""
    return f"tcp://[{host}]:{found[2]}" if ":" in host else f"tcp://{host}:{found[2]}"


def named_in(topic: bytes, by_name: Mapping[str, T]) -> T | None:
    """What a topic names: `kv@<ip:port, ip or pod>@<model>`, where `by_name` knows it."""
    if len(topic) > _LONGEST_TOPIC:
        return None
    parts = topic.decode("utf-8", "replace").split("@", 2)
    return by_name.get(parts[1]) if len(parts) >= 2 else None
