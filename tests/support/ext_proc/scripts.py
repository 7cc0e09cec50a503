"""Every rule of the ext_proc server as a script: what comes in, what must go out."""

from epp import protocol
from epp.errors import NoEndpoint, Rejected
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.extproc.stream import AnswerChunk, Answered
from tests.support.ext_proc.messages import (
    DUPLEX,
    EVENTS,
    HEADERS,
    LEAN,
    TO,
    Mode,
    Script,
    answer_body,
    answer_headers,
    answer_trailers,
    modes,
    request_body,
    request_headers,
    request_trailers,
)  # fmt: skip

FDS, STREAMED, BUFFERED, NONE = Mode.FULL_DUPLEX_STREAMED, Mode.STREAMED, Mode.BUFFERED, Mode.NONE
ROUTED = f"request headers to {TO}"
BIG = bytes(range(256)) * 600  # 153,600 bytes: three chunks
SWH = modes(STREAMED, NONE, swh=True)
FORGED = {
    **HEADERS, protocol.DESTINATION: "6.6.6.6:6", "x-llm-d-inference-objective": "vip", protocol.PREFILLER: "6.6.6.6:6",
}  # fmt: skip
WEBSOCKET = {":method": "GET", ":path": "/v1/realtime", "connection": "Upgrade", "upgrade": "WebSocket"}
WRONG = "refused 400 invalid_request_error"

SCRIPTS = [
    # --- full duplex ---
    Script(
        "duplex: headers wait for the body's end, answer echoed",
        [
            (request_headers(), []),
            (request_body(b'{"a"'), []),
            (request_body(b":1}"), []),
            (request_body(b"", end=True), [ROUTED, "request body echo '{\"a\":1}' end"]),
            (answer_headers(served="10.0.0.2:8000"), ["answer headers"]),
            (answer_body(b"hel"), ["answer body echo 'hel'"]),
            (answer_body(b"lo"), ["answer body echo 'lo'"]),
            (answer_body(b"", end=True), ["answer body echo '' end"]),
        ],
        seen=[
            Answered(200, "10.0.0.2:8000", "application/json"),
            AnswerChunk(b"hel", False),
            AnswerChunk(b"lo", False),
            AnswerChunk(b"", True),
        ],
    ),
    Script(
        "duplex: a gateway that does not tell its modes",
        [
            (request_headers(config=None), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (answer_headers(), ["answer headers"]),
            (answer_body(b"x", end=True), ["answer body echo 'x' end"]),
        ],
    ),
    Script(
        "duplex: chunks of at most 62,000 bytes, both ways",
        [
            (request_headers(), []),
            (
                request_body(BIG, end=True),
                [
                    ROUTED,
                    "request body echo 62000 bytes",
                    "request body echo 62000 bytes",
                    "request body echo 29600 bytes end",
                ],
            ),
            (answer_headers(), ["answer headers"]),
            (
                answer_body(BIG[:124_000], end=True),
                ["answer body echo 62000 bytes", "answer body echo 62000 bytes end"],
            ),
        ],
    ),
    Script(
        "duplex: a second end of stream and whatever follows it are ignored",
        [
            (request_headers(), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (request_body(b"", end=True), []),
            (request_body(b"more"), []),
            (request_trailers(), []),
            (answer_headers(), ["answer headers"]),
            (answer_body(b"x", end=True), ["answer body echo 'x' end"]),
            (answer_body(b"y", end=True), []),
        ],
        seen=[Answered(200, "", "application/json"), AnswerChunk(b"x", True)],
    ),
    Script(
        "duplex: an empty body",
        [(request_headers(), []), (request_body(b"", end=True), [ROUTED, "request body echo '' end"])],
    ),
    Script("duplex: GET", [(request_headers({":method": "GET", ":path": "/v1/models"}, end=True), [ROUTED])]),
    Script(
        "duplex: a WebSocket does not wait for a body, and goes both ways unseen",
        [
            (request_headers(WEBSOCKET), [ROUTED]),
            (answer_headers({":status": "101"}), ["answer headers"]),
            (answer_body(b"hello"), ["answer body echo 'hello'"]),
            (request_body(b"hello"), ["request body echo 'hello'"]),
            (request_body(BIG[:100_000]), ["request body echo 62000 bytes", "request body echo 38000 bytes"]),
            (answer_body(BIG[:100_000]), ["answer body echo 62000 bytes", "answer body echo 38000 bytes"]),
            (request_body(b"", end=True), ["request body echo '' end"]),
            (request_body(b"late"), []),
            (answer_body(b"", end=True), ["answer body echo '' end"]),
        ],
        seen=[Answered(101, "", "")],
    ),
    Script(
        "duplex: a WebSocket that the endpoint does not want",
        [
            (request_headers(WEBSOCKET), [ROUTED]),
            (answer_headers({":status": "404", "content-type": "application/json"}), ["answer headers"]),
            (answer_body(b"{}", end=True), ["answer body echo '{}' end"]),
        ],
        seen=[Answered(404, "", "")],
    ),
    Script(
        "duplex: what is no handshake of a WebSocket waits for its body",
        [
            (request_headers({**WEBSOCKET, ":method": "POST"}), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
        ],
    ),
    Script(
        "duplex: nor is another upgrade one",
        [
            (request_headers({**WEBSOCKET, "upgrade": "h2c"}), []),
            (request_body(b"", end=True), [ROUTED, "request body echo '' end"]),
        ],
    ),
    *(
        Script(
            f"{name}: of a WebSocket nothing is to be shown, and what is gets a silent reply",
            [
                (request_headers(WEBSOCKET, config=config), [f"{ROUTED} override request=0 answer=0"]),
                (answer_headers({":status": "101"}), ["answer headers"]),
                (request_body(b"hello"), ["request body"]),
                (answer_body(b"hello"), ["answer body"]),
            ],
            seen=[Answered(101, "", "")],
        )
        for name, config in (
            ("streamed", modes(STREAMED, NONE)),
            ("streamed, bodies without waiting", SWH),
            ("streamed both ways", modes(STREAMED, STREAMED)),
            ("buffered", modes(BUFFERED, BUFFERED)),
        )
    ),
    Script(
        "no bodies: a WebSocket as any request",
        [
            (request_headers(WEBSOCKET, config=modes(NONE, NONE)), [ROUTED]),
            (answer_headers({":status": "101"}), ["answer headers"]),
        ],
    ),
    Script(
        "duplex: trailers end the body",
        [
            (request_headers(), []),
            (request_body(b"{}"), []),
            (request_trailers(), [ROUTED, "request body echo '{}'", "request trailers"]),
            (request_trailers(), []),
            (answer_headers(), ["answer headers"]),
            (answer_body(b"x"), ["answer body echo 'x'"]),
            (answer_trailers(), ["answer trailers"]),
        ],
        seen=[Answered(200, "", "application/json"), AnswerChunk(b"x", False), AnswerChunk(b"", True)],
    ),
    Script(
        "duplex: trailers without a body",
        [(request_headers(), []), (request_trailers(), [ROUTED, "request trailers"])],
    ),
    Script(
        "duplex: another body and more headers",
        [
            (request_headers(), []),
            (
                request_body(b"{}", end=True),
                [f"{ROUTED} set x-a=1 set content-length=5", "request body echo '{\"b\"}' end"],
            ),
        ],
        headers={"x-a": "1"},
        body=b'{"b"}',
    ),
    Script(
        "control headers of the client's are dropped, those of ours are not",
        [
            (request_headers(FORGED), []),
            (
                request_body(b"{}", end=True),
                [
                    f"{ROUTED} set {protocol.PREFILLER}=10.0.0.9:1 drop x-llm-d-inference-objective",
                    "request body echo '{}' end",
                ],
            ),
        ],
        headers={protocol.PREFILLER: "10.0.0.9:1"},
    ),
    Script(
        "headers for the client",
        [
            (request_headers(config=LEAN), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (answer_headers(), ["answer headers set x-session-token=abc"]),
        ],
        answer_headers={"x-session-token": "abc"},
    ),
    # --- lean and streamed answers ---
    Script(
        "lean: nothing of the answer's body",
        [
            (request_headers(config=LEAN), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (answer_headers({":status": "503"}), ["answer headers"]),
        ],
        seen=[Answered(503, "", "")],
    ),
    Script(
        "streamed answer: an empty reply a message",
        [
            (request_headers(config=modes(FDS, STREAMED)), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (answer_headers(), ["answer headers"]),
            (answer_body(b"x"), ["answer body"]),
            (answer_body(b"", end=True), ["answer body"]),
        ],
        seen=[Answered(200, "", "application/json"), AnswerChunk(b"x", False), AnswerChunk(b"", True)],
    ),
    Script(
        "buffered answer",
        [
            (request_headers(config=modes(BUFFERED, BUFFERED)), ["request headers"]),
            (request_body(b"{}", end=True), [f"request body to {TO}"]),
            (answer_headers(), ["answer headers"]),
            (answer_body(b"xy", end=True), ["answer body"]),
        ],
        seen=[Answered(200, "", "application/json"), AnswerChunk(b"xy", True)],
    ),
    Script(
        "buffered answer: whole although Envoy does not say so",
        [
            (request_headers(end=True, config=modes(BUFFERED, BUFFERED)), [ROUTED]),
            (answer_headers(), ["answer headers"]),
            (answer_body(b"xy"), ["answer body"]),
            (answer_trailers(), ["answer trailers"]),
        ],
        seen=[Answered(200, "", "application/json"), AnswerChunk(b"xy", True)],
    ),
    Script(
        "buffered answer in events: asked for in pieces, and they come",
        [
            (request_headers(end=True, config=modes(BUFFERED, BUFFERED)), [ROUTED]),
            (answer_headers(EVENTS), [f"answer headers override answer={STREAMED}"]),
            (answer_body(b"data: x"), ["answer body"]),
            (answer_body(b"data: y"), ["answer body"]),
            (answer_body(b"", end=True), ["answer body"]),
        ],
        seen=[
            Answered(200, "", EVENTS["content-type"]),
            AnswerChunk(b"data: x", False),
            AnswerChunk(b"data: y", False),
            AnswerChunk(b"", True),
        ],
    ),
    Script(
        "buffered answer in events: asked for in pieces, and comes whole",
        [
            (request_headers(end=True, config=modes(BUFFERED, BUFFERED)), [ROUTED]),
            (answer_headers(EVENTS), [f"answer headers override answer={STREAMED}"]),
            (answer_body(b"data: x"), ["answer body"]),
            (answer_trailers(), ["answer trailers"]),
        ],
        seen=[
            Answered(200, "", EVENTS["content-type"]),
            AnswerChunk(b"data: x", False),
            AnswerChunk(b"", True),
        ],
    ),
    # --- BUFFERED ---
    Script(
        "buffered: destination in the body's reply, no echo",
        [
            (request_headers(config=modes(BUFFERED, NONE)), ["request headers"]),
            (request_body(b"{}", end=True), [f"request body to {TO}"]),
        ],
    ),
    Script(
        "buffered: another body",
        [
            (request_headers(FORGED, config=modes(BUFFERED, NONE)), ["request headers"]),
            (
                request_body(BIG, end=True),
                [
                    f"request body to {TO} set content-length=3 drop x-llm-d-inference-objective "
                    f"drop {protocol.PREFILLER} replaced by 'new'"
                ],
            ),
        ],
        body=b"new",
    ),
    Script(
        "buffered: the body is whole although trailers follow",
        [
            (request_headers(config=modes(BUFFERED, NONE)), ["request headers"]),
            (request_body(b"{}"), [f"request body to {TO}"]),
            (request_trailers(), ["request trailers"]),
            (request_trailers(), []),
        ],
    ),
    Script("buffered: GET", [(request_headers(end=True, config=modes(BUFFERED, NONE)), [ROUTED])]),
    Script(
        "buffered: an error after the headers were let through",
        [
            (request_headers(config=modes(BUFFERED, NONE)), ["request headers"]),
            (
                request_body(b"{}", end=True),
                ["refused 503 service_unavailable_error rejected-no-endpoints"],
            ),
        ],
        error=NoEndpoint("nobody"),
        ends=True,
    ),
    Script(
        "buffered: trailers without a body",
        [
            (request_headers(config=modes(BUFFERED, NONE)), ["request headers"]),
            (request_trailers(), [WRONG]),
        ],
        routes=0,
        ends=True,
    ),
    # --- STREAMED ---
    Script(
        "streamed: silent until the end, then one reply a message",
        [
            (request_headers(config=SWH), []),
            (request_body(b'{"a"'), []),
            (request_body(b":1}"), []),
            (request_body(b"", end=True), [ROUTED, "request body", "request body", "request body"]),
            (answer_headers(), ["answer headers"]),
        ],
    ),
    Script(
        "streamed: another body",
        [
            (request_headers(config=SWH), []),
            (request_body(b'{"a"'), []),
            (
                request_body(b":1}", end=True),
                [f"{ROUTED} set content-length=3", "request body replaced by 'new'", "request body cleared"],
            ),
        ],
        body=b"new",
    ),
    Script(
        "streamed: trailers end the body",
        [
            (request_headers(config=SWH), []),
            (request_body(b"{}"), []),
            (request_trailers(), [ROUTED, "request body", "request trailers"]),
        ],
    ),
    Script(
        "streamed, waiting for the headers' reply: overridden to full duplex",
        [
            (request_headers(config=modes(STREAMED, NONE)), [f"override request={FDS} answer={NONE}"]),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (answer_headers(), ["answer headers"]),
        ],
    ),
    Script("streamed: GET", [(request_headers(end=True, config=modes(STREAMED, NONE)), [ROUTED])]),
    Script("no request body shown", [(request_headers(config=modes(NONE, NONE)), [ROUTED])]),
    # --- refusals ---
    Script(
        "an error is the whole answer",
        [
            (request_headers(), []),
            (request_body(b"{}", end=True), ["refused 429 rate_limit_error rejected-saturated"]),
        ],
        error=Rejected("full"),
        ends=True,
    ),
    Script(
        "a body beyond the bound",
        [
            (request_headers(), []),
            *[(request_body(bytes(600_000)), [])],
            (request_body(bytes(600_000)), ["refused 413 invalid_request_error"]),
        ],
        routes=0,
        ends=True,
    ),
    Script(
        "headers beyond the bound",
        [(request_headers({f"h{i}": "v" for i in range(1_001)}), ["refused 413 invalid_request_error"])],
        routes=0,
        ends=True,
    ),
    Script("body before headers", [(request_body(b"{}", end=True), [WRONG])], routes=0, ends=True),
    Script("trailers before headers", [(request_trailers(), [WRONG])], routes=0, ends=True),
    Script("headers twice", [(request_headers(), []), (request_headers(), [WRONG])], routes=0, ends=True),
    Script("not a message", [(b"\xff\xff\xff", [WRONG])], routes=0, ends=True),
    Script("not a message, in the middle", [(request_headers(), []), (b"\x0b\x0b", [WRONG])], routes=0, ends=True),
    Script(
        "body mode GRPC",
        [(request_headers(config=modes(Mode.GRPC, Mode.GRPC)), ["refused 500 api_error"])],
        routes=0,
        ends=True,
    ),
    Script(
        "a body mode that does not exist yet",
        [(request_headers(config=pb.ProtocolConfiguration.FromString(b"\x08\x09")), ["refused 500 api_error"])],
        routes=0,
        ends=True,
    ),
    Script(
        "observability mode",
        [
            (
                pb.ProcessingRequest(
                    request_headers=pb.HttpHeaders(end_of_stream=True), observability_mode=True
                ).SerializeToString(),
                ["refused 500 api_error"],
            )
        ],
        routes=0,
        ends=True,
    ),
    # --- out of the ordinary ---
    Script(
        "messages that say nothing are ignored",
        [
            (b"", []),
            (pb.ProcessingRequest(protocol_config=DUPLEX).SerializeToString(), []),
            (b"\xba\x3e\x02hi", []),
            (request_headers(), []),
            (b"", []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
        ],
    ),
    Script(
        "headers without a map",
        [(pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True)).SerializeToString(), [ROUTED])],
    ),
    Script(
        "the gateway answers by itself before the request is complete",
        [
            (request_headers(), []),
            (request_body(b"{"), []),
            (answer_headers({":status": "413"}), ["answer headers"]),
            (request_body(b"}", end=True), []),
            (answer_body(b"too large", end=True), ["answer body echo 'too large' end"]),
        ],
        routes=0,
        seen=[],
    ),
    Script(
        "not a message, while the answer passes: the stream ends",
        [
            (request_headers(), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (answer_headers(), ["answer headers"]),
            (b"\xff", []),
        ],
        ends=True,
    ),
    Script(
        "request headers after the reply: the stream ends",
        [
            (request_headers(), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (request_headers(), []),
        ],
        ends=True,
    ),
    Script(
        "an answer without headers",
        [
            (request_headers(), []),
            (request_body(b"{}", end=True), [ROUTED, "request body echo '{}' end"]),
            (answer_body(b"x", end=True), ["answer body echo 'x' end"]),
        ],
    ),
]
