import pytest

from epp.documents.addresses import address_of


def test_addresses_have_one_form() -> None:
    assert address_of("10.0.0.1", 80) == "10.0.0.1:80"
    assert address_of("2001:DB8:0:0::1", 80) == "[2001:db8::1]:80"
    assert address_of("127.0.0.1", 80) == "127.0.0.1:80"
    assert address_of("0:0:0:0:0:0:0:1", 80) == "[::1]:80"
    assert address_of("::ffff:127.0.0.1", 80) == "127.0.0.1:80"
    with pytest.raises(ValueError, match="does not appear"):
        address_of("localhost", 80)
