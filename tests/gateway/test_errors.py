from gateway.errors import EnvoyError, GatewayError


def test_who_catches_what_the_gateway_refuses_catches_envoys_errors_with_their_words() -> None:
    error = EnvoyError("Envoy ended with status 1: no such filter")
    assert isinstance(error, GatewayError)
    assert str(error) == "Envoy ended with status 1: no such filter"
