from gateway.errors import ResourceError


def test_a_resource_error_is_one_line_of_where_path_and_message() -> None:
    error = ResourceError("route.yaml: HTTPRoute default/chat", "spec.rules[0]", "nothing would answer")
    assert str(error) == "route.yaml: HTTPRoute default/chat: spec.rules[0]: nothing would answer"
    assert str(ResourceError("route.yaml", "", "no such file")) == "route.yaml: no such file"
