"""Whether a request comes from this machine itself, by its address and its headers.

Always holds: a request with any header that a proxy adds does not count as local.
"""

from __future__ import annotations

from starlette.types import Scope

from quire.api.http.origins import is_loopback

# Headers that proxies, CDNs, tunnels and cloud load balancers add: the client is another machine.
_FORWARDING_HEADERS = frozenset(
    {
        *(b"forwarded", b"forwarded-for", b"via", b"cdn-loop", b"client-ip", b"true-client-ip"),
        *(b"remote-addr", b"x-client-ip", b"x-cluster-client-ip", b"x-real-ip", b"x-remote-ip"),
        *(b"x-remote-addr", b"x-originating-ip", b"x-proxyuser-ip", b"x-http-forwarded-for"),
        *(b"x-real-port", b"x-scheme", b"x-url-scheme", b"front-end-https", b"x-request-start"),
        *(b"x-cloud-trace-context", b"x-varnish", b"x-nginx-proxy", b"x-haproxy-server-state"),
        *(b"proxy-client-ip", b"wl-proxy-client-ip", b"x-proxy-id", b"x-proxied-for"),
        *(
            b"incap-client-ip",
            b"x-sucuri-clientip",
            b"x-nf-client-connection-ip",
            b"do-connecting-ip",
        ),
    }
)
_FORWARDING_PREFIXES = (
    *(b"x-forwarded", b"x-original-", b"x-envoy-", b"cf-", b"fly-", b"fastly-", b"tailscale-"),
    *(
        b"x-amzn-",
        b"x-amz-cf-",
        b"x-appengine-",
        b"x-azure-",
        b"x-arr-",
        b"x-vercel-",
        b"x-akamai-",
    ),
    *(b"akamai-", b"cloudfront-", b"x-ngrok-", b"x-traefik-", b"x-proxy-"),
)


def is_here(scope: Scope) -> bool:
    """Return whether the client is on this machine and no header shows that it is a proxy.

    A local proxy without forwarding headers is treated as a local client.
    """
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    return not any(_is_forwarding(name) for name, _ in scope["headers"])


def _is_forwarding(name: bytes) -> bool:
    name = name.replace(b"_", b"-")  # as some gateways write it
    return name in _FORWARDING_HEADERS or name.startswith(_FORWARDING_PREFIXES)
