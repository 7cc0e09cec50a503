"""An InferenceModelRewrite through a real Envoy: the model server is asked for one name, the client sees its own."""

from pathlib import Path

import pytest

from gateway.wiring import Wiring
from tests.support.gateway.chain import Laptop, eventually, laptop

pytestmark = pytest.mark.envoy

REWRITE = """\
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: alias}
spec:
  poolRef: {name: sim}
  rules: [{matches: [{model: {value: alias}}], targets: [{modelRewrite: sim}]}]
"""


async def ask(chain: Laptop, *, stream: bool = False) -> tuple[int, str]:
    body = {"model": "alias", "prompt": "Hi", "max_tokens": 2, "stream": stream}
    async with chain.http.post(f"{chain.url}/v1/completions", json=body) as answer:
        return answer.status, (await answer.text()).replace('"model": ', '"model":')


@pytest.mark.parametrize(
    ("wiring", "server", "named"),
    [("full-duplex", "http2", "alias"), ("full-duplex", "grpc", "alias"), ("lean", "http2", "sim")],
)
async def test_the_answer_has_the_name_that_was_asked_for_where_answers_are_shown(
    tmp_path: Path, wiring: Wiring, server: str, named: str
) -> None:
    flags = ("--ext-proc-server", server, "--watch-answers", "0")
    async with laptop(tmp_path, wiring=wiring, pods=1, flags=flags) as chain:
        assert (await ask(chain))[0] == 404
        (chain.manifests / "rewrite.yaml").write_text(REWRITE)
        await eventually(lambda: ask(chain), lambda found: found[0] == 200)
        for stream in (False, True):
            _, text = await ask(chain, stream=stream)
            assert f'"model":"{named}"' in text
            assert text.count('"model":') == text.count(f'"model":"{named}"')
