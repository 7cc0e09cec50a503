"""One match of one HTTPRoute rule as one route of Envoy."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    QueryParameterMatcher,
    RedirectAction,
    RedirectActionRedirectResponseCode,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteMatch,
    WeightedCluster,
    WeightedClusterClusterWeight,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatchAndSubstitute, RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any as Packed

from epp.documents.durations import seconds_of
from gateway.clusters import pool_name
from gateway.matching import Entry
from gateway.replies import body
from gateway.resources import HeaderModifier, InferencePool, NamedMatch, PathModifier, Redirect, Rule
from gateway.wiring import PREVIOUS_HOSTS, picked_by

RETRIES: Final = 3
_APPEND: Final = HeaderValueOptionHeaderAppendAction
_CODES: Final = {
    301: RedirectActionRedirectResponseCode.MOVED_PERMANENTLY,
    302: RedirectActionRedirectResponseCode.FOUND,
    303: RedirectActionRedirectResponseCode.SEE_OTHER,
    307: RedirectActionRedirectResponseCode.TEMPORARY_REDIRECT,
    308: RedirectActionRedirectResponseCode.PERMANENT_REDIRECT,
}


def route(entry: Entry, pools: Mapping[str, InferencePool], port: int) -> Route:
    """`pools` by `namespace/name`; `port`: where the listener listens, for redirects."""
    rule = entry.rule
    made = Route(name=entry.name, match=_match(entry))
    asked, answered = rule.filter("RequestHeaderModifier"), rule.filter("ResponseHeaderModifier")
    if asked and asked.request_header_modifier:
        made.request_headers_to_add = _changes(asked.request_header_modifier)
        made.request_headers_to_remove = list(asked.request_header_modifier.remove)
    if answered and answered.response_header_modifier:
        made.response_headers_to_add = _changes(answered.response_header_modifier)
        made.response_headers_to_remove = list(answered.response_header_modifier.remove)
    backends = [
        (pools[f"{entry.route.metadata.namespace}/{backend.name}"], backend.weight)
        for backend in rule.backend_refs
        if backend.weight
    ]
    if rule.redirect:
        made.redirect = _redirect(rule.redirect, entry, port)
    elif not backends:
        text = body("Every backend of this route has weight 0.", "api_error")
        made.direct_response = DirectResponseAction(status=500, body=DataSource(inline_string=text))
        made.response_headers_to_add.append(_header("content-type", "application/json", replace=True))
    else:
        made.route = _action(rule, entry)
        _lead_to(made, made.route, backends)
    return made


def _match(entry: Entry) -> RouteMatch:
    match, value = entry.match, entry.match.path.value
    made = RouteMatch()
    prefix = value.rstrip("/")
    if match.path.type == "Exact":
        made.path = value
    elif match.path.type == "RegularExpression":
        made.safe_regex = RegexMatcher(regex=value)
    elif prefix:
        made.path_separated_prefix = prefix
    else:
        made.prefix = "/"
    made.headers = [HeaderMatcher(name=each.name, string_match=_string(each)) for each in match.headers]
    if match.method:
        made.headers.append(HeaderMatcher(name=":method", string_match=StringMatcher(exact=match.method)))
    made.query_parameters = [
        QueryParameterMatcher(name=each.name, string_match=_string(each)) for each in match.query_params
    ]
    return made


def _string(match: NamedMatch) -> StringMatcher:
    if match.type == "Exact":
        return StringMatcher(exact=match.value)
    return StringMatcher(safe_regex=RegexMatcher(regex=match.value))


def _action(rule: Rule, entry: Entry) -> RouteAction:
    """Without a time limit unless the rule has one: answers stream for minutes.

    A limit counts from when the picker has decided and the request has come whole: the timer is the router's, which
    stands behind the picker. `max_stream_duration` counts from the start, but its 504 would be shown to the picker as
    an answer first, and wait for one that hangs. So a picker's time is for the picker itself to limit.
    """
    per_try = duration(rule.timeouts.backend_request)
    action = RouteAction(
        timeout=duration(rule.timeouts.request) or timedelta(0),
        retry_policy=RetryPolicy(
            retry_on="connect-failure,refused-stream,reset,retriable-status-codes",
            retriable_status_codes=[503],
            num_retries=RETRIES,
            per_try_timeout=per_try or None,
            retry_back_off=RetryPolicyRetryBackOff(
                base_interval=timedelta(milliseconds=1), max_interval=timedelta(milliseconds=10)
            ),
            host_selection_retry_max_attempts=5,
            retry_host_predicate=[
                RetryPolicyRetryHostPredicate(name=PREVIOUS_HOSTS, typed_config=Packed.pack(PreviousHostsPredicate()))
            ],
        ),
    )
    if rule.rewrite and rule.rewrite.hostname:
        action.host_rewrite_literal = rule.rewrite.hostname
    if rule.rewrite and rule.rewrite.path:
        _rewrite(action, rule.rewrite.path, entry)
    return action


def _lead_to(made: Route, action: RouteAction, backends: list[tuple[InferencePool, int]]) -> None:
    """To the pool and to its own picker: where the dice choose a pool, they choose the picker with it."""
    if len(backends) == 1:
        [(pool, _)] = backends
        action.cluster = pool_name(pool.metadata.id)
        made.typed_per_filter_config = picked_by(pool)
        return
    action.weighted_clusters = WeightedCluster(
        clusters=[
            WeightedClusterClusterWeight(
                name=pool_name(pool.metadata.id), weight=weight, typed_per_filter_config=picked_by(pool)
            )
            for pool, weight in backends
        ]
    )


def _rewrite(action: RouteAction | RedirectAction, path: PathModifier, entry: Entry) -> None:
    """The new path of a rewrite or a redirect; the query stays."""
    if path.type == "ReplaceFullPath":
        action.regex_rewrite = _substitution("^/.*$", path.replace_full_path or "/")
        return
    old, new = entry.match.path.value.rstrip("/"), (path.replace_prefix_match or "").rstrip("/")
    if not old:
        action.prefix_rewrite = f"{new}/"
    elif new:
        action.prefix_rewrite = new
    else:  # /old and /old/x become / and /x, not // and //x
        action.regex_rewrite = _substitution(f"^{re.escape(old)}/*", "/")


def _substitution(pattern: str, text: str) -> RegexMatchAndSubstitute:
    return RegexMatchAndSubstitute(pattern=RegexMatcher(regex=pattern), substitution=text.replace("\\", "\\\\"))


def _redirect(redirect: Redirect, entry: Entry, port: int) -> RedirectAction:
    """Without a port, that of the scheme if it changes, else the listener's."""
    made = RedirectAction(response_code=_CODES[redirect.status_code])
    if redirect.scheme:
        made.scheme_redirect = redirect.scheme
    if redirect.hostname:
        made.host_redirect = redirect.hostname
    well_known = {"http": 80, "https": 443}.get(redirect.scheme or "", port)
    made.port_redirect = redirect.port or well_known
    if redirect.path and redirect.path.type == "ReplaceFullPath":
        made.path_redirect = redirect.path.replace_full_path or "/"
    elif redirect.path:
        _rewrite(made, redirect.path, entry)
    return made


def _changes(modifier: HeaderModifier) -> list[HeaderValueOption]:
    return [
        *(_header(each.name, each.value, replace=True) for each in modifier.set),
        *(_header(each.name, each.value, replace=False) for each in modifier.add),
    ]


def _header(name: str, value: str, *, replace: bool) -> HeaderValueOption:
    """A per cent sign begins a command in Envoy's values; two are one."""
    return HeaderValueOption(
        header=HeaderValue(key=name, value=value.replace("%", "%%")),
        append_action=_APPEND.OVERWRITE_IF_EXISTS_OR_ADD if replace else _APPEND.APPEND_IF_EXISTS_OR_ADD,
    )


def duration(text: str | None) -> timedelta | None:
    return None if text is None else timedelta(seconds=seconds_of(text))
