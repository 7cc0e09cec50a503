"""All endpoints together: what has to be the same everywhere, and what files say beside the pods. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tooling.doctor.engine import ProbedEndpoint
from tooling.doctor.finding import Finding, Level, hint, problem

T = TypeVar("T")

_SEED = "set PYTHONHASHSEED to one value in every pod's environment, or in none"
_XXHASH = "set PYTHONHASHSEED to one value in every pod's environment; without it xxhash draws a seed of its own"
_FILES = "mount the tokenizer the engine was started with; name its --chat-template and the like in --tokenizer-args"


def compare(pods: Sequence[ProbedEndpoint], *, shares: bool) -> list[Finding]:
    """What differs between endpoints. `shares`: they share a tier, so blocks must be the same everywhere."""
    level: Level = "problem" if shares else "hint"
    findings = [
        *_odd(pods, "block-size", level, lambda pod: pod.block_size, "{} tokens a block", "--block-size {}"),
        *_odd(pods, "hash-algorithm", level, lambda pod: pod.algorithm, "{}", "--prefix-caching-hash-algo {}"),
        *_odd(pods, "model", "problem", lambda pod: tuple(pod.bases) or None, "serves {}", "--served-model-name {}"),
    ]
    odd = {finding.subject for finding in findings if finding.check in ("block-size", "hash-algorithm")}
    findings += _hashes([pod for pod in pods if pod.name not in odd], level)
    for trial in sorted({trial for pod in pods for trial in pod.tokens}):
        fix = "the same --tokenizer and --chat-template at every endpoint"
        findings += _odd(pods, "tokenizer", "problem", lambda pod: pod.tokens.get(trial), _ids(trial), fix)  # noqa: B023
    return findings


def against_files(pod: ProbedEndpoint, ids: Mapping[str, Sequence[int]]) -> list[Finding]:
    """What the pod's tokens are beside those that the picker's tokenizer files give. `ids`: trial -> ids."""
    for trial, ours in ids.items():
        theirs = pod.tokens.get(trial)
        if theirs is not None and list(theirs) != list(ours):
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            found = f"of a {trial} it makes {len(theirs)} tokens, the files {len(ours)}; they differ from token {at} on"
            return [problem(pod.name, "tokenizer", found, _FILES)]
    return []


def _odd(
    pods: Sequence[ProbedEndpoint],
    check: str,
    level: Level,
    of: Callable[[ProbedEndpoint], T | None],
    shown: str,
    fix: str,
) -> list[Finding]:
    """A finding for each endpoint that differs from most; of equally many, from the first."""
    known = [(pod, value) for pod in pods if (value := of(pod)) is not None]
    usual = Counter(_key(value) for _, value in known).most_common(1)
    if not usual or usual[0][1] == len(known):
        return []
    example = next((pod, value) for pod, value in known if _key(value) == usual[0][0])
    finding_of = hint if level == "hint" else problem
    return [
        finding_of(
            pod.name,
            check,
            f"{shown.format(_text(value))}; {example[0].name} and {usual[0][1] - 1} more: {_text(example[1])}"
            if usual[0][1] > 1
            else f"{shown.format(_text(value))}; {example[0].name}: {_text(example[1])}",
            fix.format(_text(example[1])),
        )
        for pod, value in known
        if _key(value) != usual[0][0]
    ]


def _key(value: object) -> str:
    return repr(value)


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} tokens"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _ids(trial: str) -> str:
    return f"of a {trial} it makes other tokens, {{}}"


def _hashes(pods: Sequence[ProbedEndpoint], level: Level) -> list[Finding]:
    """Endpoints that give the block another endpoint announced too another hash."""
    first: dict[tuple[int, ...], tuple[ProbedEndpoint, int]] = {}
    findings = []
    finding_of = hint if level == "hint" else problem
    for pod in pods:
        for tokens, hash_ in pod.hashes.items():
            other, known = first.setdefault(tokens, (pod, hash_))
            if known != hash_:
                found = f"the same block has another hash than at {other.name}: what is stored under it is not found"
                fix = _XXHASH if (pod.algorithm or "").startswith("xxhash") else _SEED
                findings.append(finding_of(pod.name, "hash-seed", found, fix))
    return findings
