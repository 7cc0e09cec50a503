"""What users may import is written down and complete."""

import importlib
import inspect

import pytest


@pytest.mark.parametrize("name", ["epp.plugin", "epp.testing"])
def test_public_modules_export_exactly_what_they_say(name: str) -> None:
    module = importlib.import_module(name)
    exported = module.__all__
    for public in exported:
        assert hasattr(module, public), public
    own = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == name
    }
    assert own <= set(exported), f"public by accident: {sorted(own - set(exported))}"


def test_every_public_class_and_function_of_the_contract_is_documented() -> None:
    module = importlib.import_module("epp.plugin")
    undocumented = [
        name
        for name in module.__all__
        if (inspect.isclass(value := getattr(module, name)) or inspect.isfunction(value)) and not inspect.getdoc(value)
    ]
    assert undocumented == []
