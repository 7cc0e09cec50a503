"""Five values to a whole stack: gateway, pool, endpoint picker and model servers (`warmpath render values.yaml`).

What is rendered is `stack.yaml`, the overlay `vllm-gpu` of the manifests as kustomize builds it, with the values put in
their places. To change more than the values, take that overlay.
"""

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from epp.config import placed
from epp.decode import Problems, build, read, short
from epp.errors import ConfigError
from epp.loader import strategy_text

_STACK: Final = resources.files("epp") / "stack.yaml"
_MODEL: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REPLICAS: Final = 1000
_LATER: Final = "tiered KV memory is not there yet"


@dataclass(frozen=True)
class Values:
    """What a values file says. ConfigErrors from the constructor, with all that is wrong."""

    model: str
    """As vLLM takes it: a name on Hugging Face, which clients ask for by the same name."""
    replicas: int = 2
    """Of the model server."""
    strategy: str = "prefix-aware"
    l1_size: Any = "0"
    """KV memory beside the GPU's. Only none yet: "0"."""
    l2_backend: Any = "none"
    """KV memory that replicas share. Only none yet."""

    def __post_init__(self) -> None:
        problems = Problems()
        if not _MODEL.fullmatch(self.model):
            problems.add("model", f"expected a name such as Qwen/Qwen3-8B, got {short(self.model)}")
        if not 1 <= self.replicas <= _REPLICAS:
            problems.add("replicas", f"expected 1 to {_REPLICAS}, got {short(self.replicas)}")
        with problems.collect():
            strategy_text(self.strategy)
        if isinstance(self.l1_size, bool) or self.l1_size not in ("0", 0, None):
            problems.add("l1Size", f"{_LATER}; expected 0 or nothing, got {short(self.l1_size)}")
        if self.l2_backend not in ("none", None):
            problems.add("l2Backend", f"{_LATER}; expected none or nothing, got {short(self.l2_backend)}")
        problems.check()


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
        expected = "a mapping with model, replicas, strategy, l1Size and l2Backend"
        raise ConfigError("", f"expected {expected}, got {short(content)}")
    return build(Values, content, "")


def render(values: Values) -> str:
    """The manifests for these values, as YAML documents."""
    documents = list(yaml.safe_load_all(_STACK.read_text(encoding="utf-8")))
    config = _one(documents, "ConfigMap", "warmpath")
    config["data"]["config.yaml"] = strategy_text(values.strategy)
    servers = _one(documents, "Deployment", "llm")["spec"]
    servers["replicas"] = values.replicas
    (vllm,) = servers["template"]["spec"]["containers"]
    vllm["args"][0] = values.model
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


def _one(documents: list[Any], kind: str, name: str) -> Any:
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
