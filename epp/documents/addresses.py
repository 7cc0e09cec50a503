"""Addresses in the one form in which Envoy, the picker and the gateway compare them."""

from ipaddress import IPv6Address, ip_address


def normal(ip: str) -> str:
    """An IP address in its shortest form, IPv4 mapped into IPv6 as IPv4; any other text as it is."""
    try:
        parsed = ip_address(ip)
    except ValueError:
        return ip
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return str(parsed)


def join(ip: str, port: str) -> str:
    """`ip:port`, with brackets around IPv6."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def address_of(ip: str, port: int) -> str:
    """`ip:port` as Envoy gets it, IPv6 in brackets and in its shortest form. ValueError if `ip` is not an address."""
    ip_address(ip)
    return join(normal(ip), str(port))
