"""What an LMCache 0.5.6 server says of itself."""

from prometheus_client.parser import text_string_to_metric_families


def tokens_found(page: str) -> dict[str, float]:
    """Tokens that a server's lookups have found so far, by tier `l1` and `l2`; of all models and cache salts together.

    `page`: its /metrics. It counts a moment after it answers.
    """
    names = {f"lmcache_mp_lookup_hit_{tier}_tokens_total": tier for tier in ("l1", "l2")}
    found = dict.fromkeys(names.values(), 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in names:
                found[names[sample.name]] += sample.value
    return found
