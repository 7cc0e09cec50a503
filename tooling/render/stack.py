"""A few values to a whole stack: gateway, pool, endpoint picker and model servers (`warmpath render values.yaml`).

What is rendered is `stack.yaml`, the overlay `vllm-gpu` of the manifests as kustomize builds it, or with an L1
`tiered-stack.yaml`, the overlay `tiered-kv`, the values put in their places. To change more, take that overlay.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from epp.configuration.loader import strategy_text
from epp.configuration.schema import placed
from epp.documents.strict import Problems, build, nearest, read, short
from epp.errors import ConfigError

_PLAIN: Final = resources.files("tooling.render") / "stack.yaml"
_TIERED: Final = resources.files("tooling.render") / "tiered-stack.yaml"
_MODEL: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REPLICAS: Final = 1000
_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})(Gi|Ti)")
_BESIDE: Final = 8
"""GiB that an LMCache server takes beside its L1."""
_L2_BACKENDS: Final = ("none", "redis")
_REFERENCE: Final = re.compile(r"[a-z0-9]([\w./:-]*\w)?(@sha256:[0-9a-f]{64})?")
_SECRET: Final = """\
# Redis and LMCache's servers start when there is the Secret that their password is in:
#   kubectl create secret generic lmcache-redis --from-literal=password="$(openssl rand -hex 32)"
"""


@dataclass(frozen=True)
class Values:
    """What a values file says. ConfigErrors from the constructor, with all that is wrong."""

    model: str
    """As vLLM takes it: a name on Hugging Face, which clients ask for by the same name."""
    replicas: int = 2
    """Of the model server."""
    strategy: str = "prefix-aware"
    l1_size: Any = "0"
    """Memory of each node for KV that is no longer on its GPUs: `40Gi`; "0" for none."""
    l2_backend: Any = "none"
    """Where KV lies that all nodes can load: `redis`, or `none`."""
    images: Mapping[str, str] = field(default_factory=dict)
    """By the name of an image of the stack, without its tag, what to run instead: `{redis: my.example/redis:7.4}`."""

    def __post_init__(self) -> None:
        problems = Problems()
        if not _MODEL.fullmatch(self.model):
            problems.add("model", f"expected a name such as Qwen/Qwen3-8B, got {short(self.model)}")
        if not 1 <= self.replicas <= _REPLICAS:
            problems.add("replicas", f"expected 1 to {_REPLICAS}, got {short(self.replicas)}")
        with problems.collect():
            strategy_text(self.strategy)
        no_l1 = not isinstance(self.l1_size, bool) and self.l1_size in ("0", 0, None)
        if not no_l1 and not _SIZE.fullmatch(str(self.l1_size)):
            problems.add("l1Size", f"expected a size such as 40Gi, or 0 for none, got {short(self.l1_size)}")
        if self.l2_backend not in (*_L2_BACKENDS, None):
            near = nearest(str(self.l2_backend), _L2_BACKENDS)
            problems.add("l2Backend", f"expected redis or none, got {short(self.l2_backend)}{near}")
        elif no_l1 and self.l2:
            problems.add("l2Backend", f"{self.l2_backend} is reached through L1; expected l1Size too")
        for name, image in self.images.items():
            if not _REFERENCE.fullmatch(image):
                problems.add(
                    f"images.{name}", f"expected an image such as my.example/{name}@sha256:…, got {short(image)}"
                )
        problems.check()

    @property
    def l1(self) -> int:
        """GiB."""
        found = _SIZE.fullmatch(str(self.l1_size))
        return int(found[1]) * (1024 if found[2] == "Ti" else 1) if found else 0

    @property
    def l2(self) -> bool:
        return self.l2_backend not in ("none", None)


def render_file(path: Path) -> str:
    """The manifests for a values file, as YAML. Raises ConfigError: a line for each error, with the file's name."""
    try:
        return render(values_of(path.read_bytes()))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise placed(error, str(path)) from None


def values_of(text: str | bytes) -> Values:
    """The values in a YAML document. Raises ConfigErrors with all that is wrong."""
    content = read(text)
    if not isinstance(content, dict):
        expected = "a mapping with model, replicas, strategy, l1Size, l2Backend and images"
        raise ConfigError("", f"expected {expected}, got {short(content)}")
    return build(Values, content, "")


def render(values: Values) -> str:
    """The manifests for these values, as YAML documents. Raises ConfigErrors for images that are not in them."""
    stack = _TIERED if values.l1 else _PLAIN
    documents = list(yaml.safe_load_all(stack.read_text(encoding="utf-8")))
    if not values.l1 or values.strategy != "kv-aware":  # else it stays: kv-aware, and where LMCache is
        _one(documents, "ConfigMap", "warmpath")["data"]["config.yaml"] = strategy_text(values.strategy)
    if values.l1:
        documents = _with_tiers(documents, values)
    elif values.strategy == "kv-aware":
        _publish(documents)
    servers = _one(documents, "Deployment", "llm")["spec"]
    servers["replicas"] = values.replicas
    (vllm,) = servers["template"]["spec"]["containers"]
    vllm["args"][0] = values.model
    _replace(documents, values.images)
    made = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
    return _SECRET + made if values.l2 else made


def _replace(documents: list[Any], images: Mapping[str, str]) -> None:
    """Put in the images wanted."""
    running = list(_running(documents))
    known = {_repository(each["image"]) for each in running}
    problems = Problems()
    for name in images.keys() - known:
        near = nearest(name, known) or "; expected one of " + ", ".join(sorted(known))
        problems.add(f"images.{name}", f"nothing here runs it{near}")
    problems.check()
    for each in running:
        each["image"] = images.get(_repository(each["image"]), each["image"])


def _repository(image: str) -> str:
    """Its name without a tag, of those that have neither a port nor a digest."""
    return image.partition(":")[0]


def _running(value: Any) -> Iterator[Any]:
    """Every mapping in there that names an image."""
    if isinstance(value, dict):
        if "image" in value:
            yield value
        value = value.values()
    if not isinstance(value, str) and hasattr(value, "__iter__"):
        for each in value:
            yield from _running(each)


def _with_tiers(documents: list[Any], values: Values) -> list[Any]:
    """The same with an L1 of the size wanted, and without what stands for an L2 where none is."""
    (server,) = _one(documents, "DaemonSet", "lmcache")["spec"]["template"]["spec"]["containers"]
    sized = [f"--l1-size-gb={values.l1}" if each.startswith("--l1-size-gb=") else each for each in server["args"]]
    server["args"] = [each for each in sized if values.l2 or not each.startswith("--l2-adapter=")]
    if not values.l2:  # nor waits for it, nor for its password
        server["command"] = ["lmcache", "server"]
        server["env"] = [each for each in server["env"] if each["name"] != "LMCACHE_RESP_PASSWORD"]
    memory = f"{values.l1 + _BESIDE}Gi"
    server["resources"]["requests"]["memory"] = server["resources"]["limits"]["memory"] = memory
    return [each for each in documents if values.l2 or each["metadata"]["name"] != "lmcache-redis"]


def _publish(documents: list[Any]) -> None:
    """What the component `kv-events` adds: model servers that publish, and what the picker needs to receive them."""
    (vllm,) = _one(documents, "Deployment", "llm")["spec"]["template"]["spec"]["containers"]
    publishing = list(yaml.safe_load_all(_TIERED.read_text(encoding="utf-8")))
    (tiered,) = _one(publishing, "Deployment", "llm")["spec"]["template"]["spec"]["containers"]
    vllm["args"] += [each for each in tiered["args"] if each.startswith("--kv-events-config=")]
    events = [each for each in tiered["ports"] if each["name"].startswith("kv-")]
    vllm["ports"] += events
    for name, way, side, who in (("warmpath", "egress", "to", "llm"), ("llm", "ingress", "from", "warmpath")):
        ports = [{"port": each["containerPort"]} for each in events]
        rule = {"ports": ports, side: [{"podSelector": {"matchLabels": {"app": who}}}]}
        _one(documents, "NetworkPolicy", name)["spec"][way].append(rule)


def _one(documents: list[Any], kind: str, name: str) -> Any:
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
