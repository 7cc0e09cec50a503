"""Group 5: requests that cannot be routed. An ext_proc stream has its own way to say so: ImmediateResponse."""

import json

from tooling.conformance import wire
from tooling.conformance.case import PROTOCOL, REFERENCE, Group
from tooling.conformance.replies import Refused, quoted
from tooling.conformance.subsets import STRANGER
from tooling.conformance.talk import asked, talk
from tooling.conformance.target import Target
from tooling.conformance.verdict import require

GROUP = Group(5, "refusal")
NEVER = f"{PROTOCOL}, Constraints: ImmediateResponse; a gRPC error triggers the gateway's failure mode instead"
BROKEN = b'{"model": "m", "messages": ['


async def defined(target: Target, body: bytes) -> None:
    """Routed or refused with a status of HTTP. Raises Failed for a gRPC error or silence."""
    outcome = await asked(target, body)
    if isinstance(outcome, Refused):
        require(400 <= outcome.status < 600, "an error of HTTP", str(outcome))


async def refused_as(target: Target, body: bytes, status: int) -> None:
    outcome = await asked(target, body)
    require(isinstance(outcome, Refused) and outcome.status == status, f"an ImmediateResponse {status}", str(outcome))


def without_model() -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


@GROUP.case("MUST", "malformed JSON is routed or refused, never a gRPC error", NEVER)
async def malformed_defined(target: Target) -> None:
    """A body that is cut off, one that is no JSON at all, and one that is no UTF-8."""
    for body in (BROKEN, b"hello", b"\xff\xfe\x00"):
        await defined(target, body)


@GROUP.case("SHOULD", "malformed JSON is refused with 400", f"{REFERENCE}: BadRequest")
async def malformed(target: Target) -> None:
    """A body that is cut off."""
    await refused_as(target, BROKEN, 400)


@GROUP.case("MUST", "a body without a model is routed or refused, never a gRPC error", NEVER)
async def no_model_defined(target: Target) -> None:
    """No model, and a model that is a number."""
    for body in (without_model(), b'{"model":1,"messages":[]}'):
        await defined(target, body)


@GROUP.case("SHOULD", "a body without a model is refused with 400", f"{REFERENCE}: BadRequest")
async def no_model(target: Target) -> None:
    """A chat completion that names none."""
    await refused_as(target, without_model(), 400)


@GROUP.case("MUST", "an empty body is routed or refused, never a gRPC error", NEVER)
async def empty(target: Target) -> None:
    """A POST whose only body message is empty."""
    await defined(target, b"")


@GROUP.case("MUST", "an unknown path is routed or refused, never a gRPC error", NEVER)
async def unknown_path(target: Target) -> None:
    """A POST of JSON to a path that no model server has."""
    body = b'{"a":1}'
    async with talk(target) as one:
        await one.ask(body, headers=one.headers(path="/conformance/unknown", length=len(body)))
        outcome = await one.outcome()
    if isinstance(outcome, Refused):
        require(400 <= outcome.status < 600, "an error of HTTP", str(outcome))


@GROUP.case("MUST", "nothing follows an ImmediateResponse", "Envoy API, ImmediateResponse: no more callouts")
async def last_word(target: Target) -> None:
    """A chat completion restricted to an address in no pool; then the gateway half-closes."""
    async with talk(target) as one:
        await one.ask(wire.chat(target.options.model), context=wire.subset_list([STRANGER]))
        outcome = await one.outcome()
        require(isinstance(outcome, Refused), "an ImmediateResponse", str(outcome))
        await one.half_close()
        await one.end()


@GROUP.case("SHOULD", "an error's body is OpenAI's JSON", "OpenAI API, error object: message and type")
async def openai_error(target: Target) -> None:
    """A chat completion restricted to an address in no pool."""
    outcome = await asked(target, wire.chat(target.options.model), context=wire.subset_list([STRANGER]))
    require(isinstance(outcome, Refused), "an ImmediateResponse", str(outcome))
    assert isinstance(outcome, Refused)
    try:
        error = json.loads(outcome.body)["error"]
        fits = isinstance(error["message"], str) and isinstance(error["type"], str)
    except (ValueError, LookupError, TypeError):
        fits = False
    require(fits, '{"error": {"message": …, "type": …}}', quoted(outcome.body))
