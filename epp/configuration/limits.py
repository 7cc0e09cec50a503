"""The section `limits` as objects: whose a request is, and what each tenant may use."""

from dataclasses import fields
from math import inf
from typing import Any

from epp.configuration.schema import EndpointPickerConfig, TenantLimitsSpec
from epp.documents.strict import Problems, short, yaml_name
from epp.flow.limits import MAX_TENANTS, LimitSettings, TenantLimits
from epp.flow.tenants import LONGEST, TenantSource


def limit_settings(config: EndpointPickerConfig, problems: Problems) -> LimitSettings | None:
    """None: the configuration has no such section, or something is wrong with it."""
    if (section := config.limits) is None:
        return None
    source = None
    if (tenant := section.tenant) is not None:
        try:
            source = TenantSource(tenant.header, tenant.claim)
        except ValueError as error:
            problems.add("limits.tenant", str(error))
    usual = _limits(section, TenantLimits(), "limits", problems)
    own = {}
    for name, spec in section.tenants.items():
        if not 0 < len(name) <= LONGEST:
            problems.add("limits.tenants", f"{short(name)}: expected a name of 1 to {LONGEST} characters")
        if isinstance(spec, TenantLimitsSpec):  # else the error is reported already
            own[name] = _limits(spec, usual, f"limits.tenants.{name}", problems)
    if len(own) > MAX_TENANTS:
        problems.add("limits.tenants", f"{len(own)} tenants; expected at most {MAX_TENANTS}")
    return LimitSettings(usual, own, source)


def _limits(spec: TenantLimitsSpec, usual: TenantLimits, path: str, problems: Problems) -> TenantLimits:
    """What the section says, and where it says nothing, what is usual."""
    given: dict[str, Any] = {}
    for field in fields(TenantLimits):
        value = getattr(spec, field.name)
        if value is None:
            given[field.name] = getattr(usual, field.name)
        elif field.name != "models":
            given[field.name] = value or inf
            if value % 1:
                problems.add(f"{path}.{yaml_name(field)}", f"expected a whole number, got {value:g}")
    if spec.models is not None:
        given["models"] = tuple(spec.models)
        for i, model in enumerate(spec.models):
            if "*" in model[:-1] or not model:
                what = "expected a model's name, or its beginning and one * at the end"
                problems.add(f"{path}.models[{i}]", f"{what}, got {short(model)}")
    return TenantLimits(**given)
