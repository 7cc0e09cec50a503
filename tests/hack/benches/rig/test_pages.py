import re

from epp.pool.engines import ENGINES, Places, parse
from hack.benches.rig.pages import VLLM_BYTES, nginx_page, page

MARK = b'<!--# echo var="connection_requests" -->'


def test_what_nginx_counts_is_in_the_histograms_of_answers_alone() -> None:
    template = nginx_page("m")
    first = template.replace(MARK, b"1.0")
    assert len(first) >= VLLM_BYTES
    assert template.count(MARK) > 100
    marked = {line.split(b"{")[0] for line in template.split(b"\n") if MARK in line}
    assert {re.sub(rb"_(bucket|count|sum)$", b"", name) for name in marked} >= {
        b"vllm:e2e_request_latency_seconds",
        b"vllm:request_prompt_tokens",
    }
    quiet = b"".join(page("m"))
    assert parse(first, ENGINES["vllm"], 0.0, Places()) == parse(quiet, ENGINES["vllm"], 0.0, Places())
