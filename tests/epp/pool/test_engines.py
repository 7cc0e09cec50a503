import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from epp.pool.engines import ALL_ENGINES, ENGINES, Figure, Places, page_of_each, parse, samples, series
from epp.pool.store import Load
from epp.testing import endpoint
from tests.support.engines.metrics_pages import vllm_page

VLLM = ENGINES["vllm"]
LORA = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.7e+09\n'


def load(page: bytes, engine: str = "vllm") -> Load:
    found = parse(page, ENGINES[engine], at=7.0, places=Places())
    assert found is not None
    return found


def test_a_page_of_vllm() -> None:
    assert load(vllm_page()) == Load(
        waiting=2,
        running=3,
        kv_usage=0.25,
        block_size=16,
        blocks=1000,
        prefix_queries=1000,
        prefix_hits=600,
        prompt_tokens=5000,
        first_tokens=40,
        computed_tokens=2000,
        generated_tokens=700,
        steps=300,
        at=7.0,
    )


def test_metrics_that_a_configuration_names() -> None:
    custom = {"depth": Figure(b"depth", where=((b"tier", b"gold"),)), "none": Figure(b"none")}
    page = vllm_page() + b'\ndepth{tier="iron"} 9\ndepth{tier="gold"} 4.5\n'
    found = parse(page, VLLM._replace(custom=custom), at=7.0, places=Places())
    assert found is not None
    assert found.custom == {"depth": 4.5}
    assert series(page, "depth") == [({"tier": "iron"}, 9.0), ({"tier": "gold"}, 4.5)]


def test_data_parallel_engines_are_added_up() -> None:
    found = load(vllm_page(engines=4))
    assert (found.waiting, found.running, found.kv_usage) == (8, 12, 0.25)
    assert (found.block_size, found.blocks, found.prompt_tokens) == (16, 4000, 20000)


def test_data_parallel_engines_are_told_apart() -> None:
    page = vllm_page(waiting=1, engines=3, lora='vllm:lora_requests_info{max_lora="2"} 5\n')
    page = page.replace(b'engine="1"', b'engine="10"').replace(b'engine="2"', b'engine="9"')
    page = page.replace(b'waiting{engine="10",model_name="meta/x"} 1', b'waiting{engine="10"} 7')
    pages = page_of_each(page, 3)
    assert list(pages) == [0, 9, 10]
    found = [load(each) for each in pages.values()]
    assert [each.waiting for each in found] == [1, 1, 7]
    assert found[0] == replace(load(vllm_page(waiting=1)), lora_max=2)
    assert {each.blocks for each in found} == {1000}
    assert page_of_each(vllm_page(), 2) == {0: vllm_page()}
    assert page_of_each(vllm_page()[:-9], 2) == {0: vllm_page()[:-9]}


def test_pages_of_more_engines_than_there_are_ranks_are_not_read() -> None:
    assert page_of_each(vllm_page(engines=3), 2) == {0: b"", 1: b"", 2: b""}
    assert page_of_each(b"", 2) == page_of_each(b"python_info 1\n", 2) == {}
    assert page_of_each(vllm_page(engines=2) + b"\n" * 10_000, 2) == {}


def test_the_newest_adapter_series_counts() -> None:
    lora = (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 100.5\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters="c"} 1.7e+09\n'
        'vllm:lora_requests_info{max_lora="3",running_lora_adapters="bad",waiting_lora_adapters=""} NaN\n'
    )
    found = load(vllm_page(lora=lora))
    assert (found.lora_max, sorted(found.lora_running), sorted(found.lora_waiting)) == (4, ["a", "b"], ["c"])


@pytest.mark.parametrize(
    ("engine", "page", "expected"),
    [
        (
            "sglang",
            b'sglang:num_queue_reqs{m="x"} 2\nsglang:num_running_reqs{m="x"} 3\nsglang:token_usage{m="x"} 0.5\n'
            b'sglang:cache_config_info{page_size="64",num_pages="100"} 1\n',
            Load(waiting=2, running=3, kv_usage=0.5, block_size=64, blocks=100, at=7.0),
        ),
        (
            "trtllm-serve",
            b"trtllm_num_requests_waiting 2\ntrtllm_num_requests_running 3\ntrtllm_kv_cache_utilization 0.5\n"
            b"trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 100\n",
            Load(waiting=2, running=3, kv_usage=0.5, block_size=32, blocks=100, at=7.0),
        ),
        (
            "triton-tensorrt-llm",
            b'nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 3\n'
            b'nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 2\n'
            b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.5\n'
            b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 100\n'
            b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64\n',
            Load(waiting=2, running=3, kv_usage=0.5, block_size=64, blocks=100, at=7.0),
        ),
        (
            "triton",
            b'nv_inference_pending_request_count{model="m"} 2\nnv_inference_exec_count{model="m"} 3\n',
            Load(waiting=2, running=3, at=7.0),
        ),
    ],
)
def test_pages_of_other_engines(engine: str, page: bytes, expected: Load) -> None:
    assert load(page, engine) == expected


def sglang_page(data: int = 1, tensor: int = 1, *, attention: bool = False, priorities: bool = False) -> bytes:
    """As SGLang 0.5.23 writes it, of `data` times `tensor` ranks: each reports its memory and its decode steps, of each
    data-parallel rank (with data-parallel attention a tensor-parallel one) the first reports the rest."""
    lines: dict[str, list[str]] = {}

    def say(metric: str, value: float, *more: str, last: str = "") -> None:
        labels = ",".join(['engine_type="unified"', 'model_name="m"', *more, *([last] if last else [])])
        lines.setdefault(metric, []).append(f"sglang:{metric}{{{labels}}} {value}\n")

    for number in range(data * tensor):
        group, first = number // tensor, number % tensor == 0
        rank = f'tp_rank="{number if attention else number % tensor}"'
        of = ('pp_rank="0"', rank, *([f'dp_rank="{group}"'] if data > 1 else []))
        say("page_size", 64, *of)
        say("num_pages", 100, *of)
        say("cuda_graph_passes_total", 30, *of, last='mode="decode_cuda_graph"')
        if not first:
            continue
        for priority, running, waiting in (("", 3, 2), ("0", 1, 2), ("5", 2, 0)) if priorities else (("", 3, 2),):
            last = f'priority="{priority}"' if priorities else ""
            say("num_running_reqs", running, *of, last=last)
            say("num_queue_reqs", waiting, *of, last=last)
        say("token_usage", 0.25, *of)
        say("cuda_graph_passes_total", 5, *of, last='mode="prefill_none"')
        for mode, tokens in (("prefill_compute", 1000), ("prefill_cache", 600), ("decode", 90)):
            say("realtime_tokens_total", tokens, *of, last=f'mode="{mode}"')
        for mode, tokens in (("input", 1000), ("device_hit", 500), ("host_hit", 100), ("storage_hit", 0)):
            say("prefill_effective_tokens_total", tokens, *of, last=f'mode="{mode}"')
    blocks = (f"# HELP sglang:{name} x\n# TYPE sglang:{name} x\n{''.join(each)}" for name, each in lines.items())
    return "".join(blocks).encode()


def test_sglang_that_has_served_nobody_has_memory_and_no_requests() -> None:
    page = b"\n".join(line for line in sglang_page().splitlines() if b"_reqs" not in line)
    found = load(page, "sglang")
    assert (found.waiting, found.running, found.blocks, found.block_size) == (0, 0, 100, 64)
    assert parse(b"sglang:token_usage 0.5\n", ENGINES["sglang"], 7.0, Places()) is None


def test_sglangs_queues_between_prefill_and_decode_are_of_requests_that_wait() -> None:
    """Of one more each time, and of those of a priority once."""
    page = sglang_page()
    for name in (
        "num_prefill_bootstrap_queue_reqs",
        "num_decode_prealloc_queue_reqs",
        "num_decode_transfer_queue_reqs",
    ):
        page += f'sglang:{name}{{tp_rank="0"}} 4\nsglang:{name}{{tp_rank="0",priority="1"}} 3\n'.encode()
    page += b'sglang:num_prefill_inflight_queue_reqs{tp_rank="0"} 9\n'
    assert load(page, "sglang").waiting == 2 + 3 * 4


@pytest.mark.parametrize(
    ("page", "ranks"),
    [
        (sglang_page(), 1),
        (sglang_page(tensor=4), 1),
        (sglang_page(priorities=True), 1),
        (sglang_page(data=2, tensor=2), 2),
        (sglang_page(data=4, attention=True), 4),
        (sglang_page(data=2, tensor=2, attention=True), 2),
        (sglang_page(data=2, tensor=2, priorities=True), 2),
    ],
    ids=["one", "tensor", "priorities", "data and tensor", "attention", "attention and tensor", "all"],
)
def test_each_rank_of_sglang_that_has_requests_of_its_own_counts_once(page: bytes, ranks: int) -> None:
    places = Places()
    for _ in range(2):
        assert parse(page, ENGINES["sglang"], 7.0, places) == Load(
            waiting=2 * ranks,
            running=3 * ranks,
            kv_usage=0.25,
            block_size=64,
            blocks=100 * ranks,
            prefix_queries=1600 * ranks,
            prefix_hits=500 * ranks,
            prompt_tokens=1600 * ranks,
            computed_tokens=1000 * ranks,
            generated_tokens=90 * ranks,
            steps=35 * ranks,
            at=7.0,
        )


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e309", "1e300", "x", "0x10", ""])
def test_a_value_that_is_no_count_is_as_good_as_absent(value: str) -> None:
    page = f"vllm:num_requests_waiting {value}\nvllm:num_requests_running 3\nvllm:kv_cache_usage_perc {value}\n"
    found = load(page.encode())
    assert (found.waiting, found.running, found.kv_usage) == (0, 3, 0.0)


def test_shares_stay_within_one() -> None:
    assert load(b"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 37\n").kv_usage == 1.0


def test_unknown_blocks_are_zero() -> None:
    page = vllm_page().replace(b'num_gpu_blocks="1000"', b'num_gpu_blocks="None"')
    assert load(page).blocks == 0


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\n",
        b"<html>not found</html>",
        b"\x00\xff" * 1000,
        b"vllm:num_requests_waiting",
        b"vllm:num_requests_waiting 1",  # broken off: is it 1 or 17?
        b"vllm:num_requests_waiting_by_reason 1\n",
        b"# HELP vllm:num_requests_waiting 1\n",
        b"xvllm:num_requests_waiting 1\n",
        b'vllm:num_requests_waiting{a="\n1\n',
        b"vllm:num_requests_waiting{" + b"a" * 200_000 + b"} 1\n",
        b'vllm:num_requests_waiting{a="' + b'\\"' * 100_000 + b"\n",
    ],
)
def test_pages_that_are_not_this_engines_give_nothing(page: bytes) -> None:
    assert parse(page, VLLM, at=7.0, places=Places()) is None


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        (b'm{a="1"} 2', (b'a="1"', b"2")),
        (b"m 2", (b"", b"2")),
        (b"m{} 2 1700000000000", (b"", b"2")),
        (b'm{a="} 9 {"} 2\r', (b'a="} 9 {"', b"2")),
        (b'm{a="\\"} 9"} 2 # {id="x"} 1', (b'a="\\"} 9"', b"2")),
        (b"m\t2", (b"", b"2")),
    ],
)
def test_lines_in_every_form(line: bytes, sample: tuple[bytes, bytes]) -> None:
    for page in (line + b"\n", b"# TYPE m gauge\nmm 5\n" + line + b"\nn 1\n"):
        assert list(samples(page, b"m", Places())) == [sample]


def test_a_metric_with_endless_series_is_read_so_far_only() -> None:
    page = b"".join(b'm{a="%d"} 1\n' % n for n in range(5000))
    assert len(list(samples(page, b"m", Places()))) == 1024


@pytest.mark.parametrize("before", [b"", b"# a line more\n" * 10, b"# many lines more\n" * 10_000])
def test_metrics_are_found_wherever_the_page_before_had_them(before: bytes) -> None:
    places = Places()
    pages = [vllm_page(engines=2), before + vllm_page(waiting=5, engines=2, buckets=90), vllm_page(waiting=6)]
    counts = [load.waiting for page in pages if (load := parse(page, VLLM, 7.0, places)) is not None]
    assert counts == [4, 10, 6]


@given(st.data())
def test_pages_one_after_the_other_say_what_each_says_alone(data: st.DataObject) -> None:
    places = Places()
    for _ in range(data.draw(st.integers(2, 6))):
        count = st.sampled_from([0, 1, 9, 10, 99_999, 10**9])
        page = vllm_page(
            waiting=data.draw(count),
            running=data.draw(count),
            kv_usage=data.draw(st.sampled_from([0.0, 0.5, 1 / 3, float("nan")])),
            engines=data.draw(st.sampled_from([1, 1, 1, 2])),
            buckets=data.draw(st.sampled_from([2, 2, 2, 40])),
            lora=data.draw(st.sampled_from(["", "", LORA])),
        )
        name = data.draw(st.sampled_from([b"", b"", b"meta/y", b'm","x="y']))
        page = page.replace(b"meta/x", name) if name else page
        page = b"# a line more\n" * data.draw(st.sampled_from([0, 0, 1, 1000])) + page
        page = page.replace(b"\n# HELP", b"\n\n# HELP") if data.draw(st.booleans()) else page
        first = b"\nvllm:num_requests_waiting{"
        if data.draw(st.booleans()):
            page = page.replace(first, first + data.draw(st.sampled_from([b"} 7", b'engine="9"} 7', b"} x"])) + first)
        if not data.draw(st.integers(0, 4)):
            page = page.replace(b"# ", b"#", 99) if data.draw(st.booleans()) else re.sub(rb"(?m)^#.*\n", b"", page)
        assert parse(page, VLLM, 7.0, places) == parse(page, VLLM, 7.0, Places())


def test_labels_name_the_engine() -> None:
    assert ALL_ENGINES.of(endpoint("p", labels={})) == "vllm"
    assert ALL_ENGINES.of(endpoint("p", labels={"inference.networking.k8s.io/engine-type": "sglang"})) == "sglang"
    both = {"inference.networking.k8s.io/engine-type": "sglang", "llm-d.ai/engine-type": "triton"}
    assert ALL_ENGINES.of(endpoint("p", labels=both)) == "triton"


PAGE = vllm_page(engines=2, lora=LORA, buckets=2)


@given(st.data())
def test_a_mutated_page_gives_a_sane_load_or_nothing(data: st.DataObject) -> None:
    page = bytearray(PAGE)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(page)))
        page[at : at + data.draw(st.integers(0, 200))] = data.draw(
            st.binary(max_size=8)
            | st.sampled_from([b"\n", b'"', b"{", b"}", b" ", b"\\", b"NaN", b"9" * 400, b"1e308"])
        )
    places = Places()
    parse(PAGE, VLLM, 7.0, places)
    found = parse(bytes(page), VLLM, 7.0, places)
    if found is None:
        return
    assert 0.0 <= found.kv_usage <= 1.0
    assert min(found.waiting, found.running, found.blocks, found.block_size, found.lora_max) >= 0
    assert max(found.waiting, found.prompt_tokens) <= 1e15 * 1024


@given(st.binary(max_size=500))
def test_no_bytes_make_it_raise(page: bytes) -> None:
    for engine in ENGINES.values():
        assert engine.waiting is not None
        for metric in (engine.waiting.metric, engine.lora or b"x"):
            found = parse(metric + page + b"\n" + page, engine, 7.0, Places())
            assert found is None or found.at == 7.0


BASE = "vllm:num_requests_waiting 1\nvllm:num_requests_running 2\n"


@pytest.mark.parametrize(
    ("flood", "expected"),
    [
        ("vllm:prompt_tokens_total 1\n" * 150_000, 1024),
        ('vllm:prompt_tokens_total{a="%s"} 1\n' % ("x" * 1000) * 4000, 31),
        ("vllm:prompt_tokens_totally 1\n" * 60 + "vllm:prompt_tokens_total 7\n", 7),
        ("vllm:prompt_tokens_totally 1\n" * 150_000 + "vllm:prompt_tokens_total 7\n", 0),
        ("vllm:prompt_tokens_total 1" + "x" * 4_000_000 + "\n", 0),
    ],
    ids=["samples", "long samples", "some names alike", "names alike", "no line end"],
)
def test_of_a_page_gone_wrong_a_bounded_part_is_read(flood: str, expected: int) -> None:
    found = load((BASE + flood).encode())
    assert (found.waiting, found.running, found.prompt_tokens) == (1, 2, expected)


def test_a_label_is_found_behind_a_name_that_has_no_value() -> None:
    """Of 60,000 letters: read from each of them on, these took seconds."""
    page = b'a{%b , b="c"} 1\n' % (b"n" * 60_000)
    assert series(page, "a") == [({"b": "c"}, 1.0)]


def test_of_labels_a_bounded_part_is_read() -> None:
    """Each label looked into costs some hundred nanoseconds: here there are 800,000."""
    line = 'vllm:cache_config_info{%sblock_size="16",num_gpu_blocks="1"} 1\n' % ('a="",' * 10_000)
    found = load((BASE + line * 80).encode())
    assert (found.block_size, found.blocks) == (16, 2)


@given(st.text('vllm:cache_config_info{}="\\, \n1', max_size=300))
def test_any_page_is_read_or_not(page: str) -> None:
    assert parse(page.encode(), VLLM, at=0.0, places=Places()) is None, "no page without requests in it"
