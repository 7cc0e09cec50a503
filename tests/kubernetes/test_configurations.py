"""EndpointPickerConfig documents as other projects publish them: GIE and KServe in the Go modules of releases,
and of llm-d-router where `LLM_D_ROUTER` names a checkout of it (it is no module that can be fetched). In this lane,
since Go fetches them.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from hack.benches.configurations import errors_of, found_in

pytestmark = pytest.mark.kubernetes

SECONDS = 300
GIE = {
    "config/charts/inferencepool/README.md": "'custom-scorer'; did you mean 'active-request-scorer'?",
    "pkg/epp/framework/plugins/requestcontrol/requestattributereporter/README.md": "request-attribute-reporter is not",
    "site-src/guides/epp-configuration/config-text.md": "expected a mapping with type, got '....'",
    "site-src/guides/flow-control.md": "got 'config.x-k8s.io/v1alpha1'; did you mean 'inference.networking.x-k8s.io/",
    "site-src/guides/troubleshooting.md": "plugins[2].parameters.blockSize: unknown; expected one of prefixMatchInfo",
    "test/integration/epp/testdata/datalayer-config.yaml": "no plugin type 'mock-metrics-source'; did you mean",
    "test/integration/epp/testdata/request-attribute-reporter-config.yaml": "request-attribute-reporter is not there",
    "test/testdata/configloader_1_test.yaml": "no plugin type 'test-one'; expected a known type",
}
KSERVE = {
    # It refers to a plugin that it does not declare, which llm-d refuses too.
    "docs/samples/llmisvc/precise-prefix-kv-cache-routing/llm-inference-service-qwen2-7b-gpu-kv-cache-routing.yaml": (
        "no plugin is called 'prefix-cache-scorer'; did you mean 'precise-prefix-cache-scorer'?"
    )
}


def fetched(module: str, folder: Path) -> Path:
    """Its sources. Skips where they cannot be had."""
    if (go := shutil.which("go")) is None:
        pytest.skip(f"{module}: Go is not there to fetch it")
    command = [go, "mod", "download", "-json", module]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{module}: not fetched within {SECONDS} s")
    if done.returncode:
        pytest.skip(f"{module}: cannot be fetched: {(done.stdout + done.stderr).strip()[-200:]}")
    return Path(json.loads(done.stdout)["Dir"])


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        ("sigs.k8s.io/gateway-api-inference-extension@v1.5.0", GIE),
        ("github.com/kserve/kserve@v0.17.0", KSERVE),
    ],
)
def test_documents_of_releases_load_or_say_why_not(module: str, refused: Mapping[str, str], tmp_path: Path) -> None:
    sources = fetched(module, tmp_path)
    documents = list(found_in(sources))
    assert documents
    wrong: dict[str, str] = {}
    for each in documents:
        path, errors = each.path.relative_to(sources).as_posix(), errors_of(each.text)
        if errors:
            wrong[path] = "\n".join([wrong.get(path, ""), *errors])
    assert sorted(wrong) == sorted(refused)
    assert [path for path, errors in wrong.items() if refused[path] not in errors] == []


def test_what_llm_d_deploys_loads() -> None:
    checkout = os.environ.get("LLM_D_ROUTER", "")
    if not checkout:
        pytest.skip("llm-d-router: LLM_D_ROUTER names no checkout of it")
    documents = [each for each in found_in(Path(checkout)) if each.deployable]
    assert documents
    wrong = {str(each.path): errors for each in documents if (errors := errors_of(each.text))}
    assert len(wrong) <= 0.05 * len(documents), wrong
